"""The examples' progress: one line on a terminal, plain lines elsewhere, and a plot."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from ranks import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
import progress  # noqa: E402


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(steps: int, first: int = 0, *, shown: bool = True) -> progress.Progress:
    line = progress.Progress(steps, first, shown=shown)
    for step in range(first, steps):
        line.show(step, loss=1 / (step + 1), **{"tokens/s": 1234.5, "bytes per rank": 4096})
    return line


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    run(2)
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step     0  loss 1.0000  tokens/s 1,23[45]  bytes per rank 4,096  left \d+:\d\d", first)
    assert last.startswith("step     1  loss 0.5000")
    assert last.endswith("left 0:00")


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run(2, shown=False).history) == 2
    assert capsys.readouterr().out == ""


def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written over with carriage returns, and begins where a run goes on."""
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(5, first=2)
    said = terminal.getvalue()
    assert said.count("\n") == 1
    assert "2/5" in said
    assert "5/5" in said
    assert "loss 0.2000" in said


def test_plot(tmp_path: Path) -> None:
    """`train_gpt.py --plot` draws what its lines say."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.svg"
    tiny = "--layers 1 --dim 32 --heads 2 --seq 32 --batch 4 --sample 1 --eval-batches 1 --max-bytes 1000000"
    launch(1, EXAMPLES / "train_gpt.py", *f"{tiny} --steps 4 --log-every 1 --plot {path}".split())
    picture = path.read_text()
    for name in ("loss", "lr", "tokens/s", "bytes per rank", "step"):
        assert f"<!-- {name} -->" in picture
    assert picture.count("<use ") > 4 * 4  # a mark for each step and number
