"""The examples' progress: one line on a terminal."""

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


def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written over with carriage returns, and begins where a run goes on."""
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    line = progress.Progress(5, 2)
    for step in range(2, 5):
        line.show(step, loss=1 / (step + 1), **{"tokens/s": 1234.5, "bytes per rank": 4096})
    said = terminal.getvalue()
    assert said.count("\n") == 1
    assert "2/5" in said
    assert "5/5" in said
    assert "loss 0.2000" in said
