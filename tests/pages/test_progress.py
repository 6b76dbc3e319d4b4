"""The examples' progress: one line on a terminal, plain lines elsewhere, and a plot."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

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
