"""A long run with NaNs on one rank, uneven micro-batches and kills ends as the uninterrupted one, and its memory stays."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from depth import depth, seldom
from ranks import ended, start

SCRIPT = Path(__file__).parents[1] / "long_run.py"
STEPS = depth(60, 2000)
KILLS = {STEPS // 3 + 1: 1, 2 * STEPS // 3 + 4: 0}
"""The rank that is killed at each of these steps."""


def run(folder: Path, kill: str = "") -> int:
    """Train to the end, starting all ranks again where one has died. Returns the number of starts."""
    flags = [str(folder), "--steps", str(STEPS), "--every", str(depth(8, 50)), "--kill", kill]
    for starts in range(1, 6):
        with tempfile.NamedTemporaryFile("r") as output:
            codes = ended(start(2, SCRIPT, flags, output.name), depth(120, 1500))
            if codes == [0, 0]:
                return starts
            said = output.read()
        assert any(code is not None and code < 0 for code in codes), said
    raise AssertionError("killed too often")


def losses(folder: Path, rank: int) -> dict[int, set[str]]:
    """What was written of each step, once or, where it ran again, twice."""
    found: dict[int, set[str]] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, rest = line.split(" ", 1)
        found.setdefault(int(step), set()).add(rest)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(folder) == 1
    return folder


@seldom
def test_a_killed_run_ends_as_the_uninterrupted_one(uninterrupted: Path, tmp_path: Path) -> None:
    """Each loss, norm and count of skipped steps of each rank, and the parameters at the end, to the last bit."""
    assert run(tmp_path, ",".join(f"{step}:{rank}" for step, rank in KILLS.items())) == 1 + len(KILLS)
    for rank in range(2):
        assert losses(tmp_path, rank) == losses(uninterrupted, rank)
    torch.testing.assert_close(torch.load(tmp_path / "end.pt"), torch.load(uninterrupted / "end.pt"), rtol=0, atol=0)


@seldom
def test_it_trains_and_skips(uninterrupted: Path) -> None:
    lines = {step: [*texts] for step, texts in losses(uninterrupted, 0).items()}
    values = [float(text.split()[0]) for (text,) in lines.values()]
    begin, end = ([v for v in some if v == v and v > 0] for some in (values[:20], values[-20:]))
    assert sum(end) / len(end) < sum(begin) / len(begin) - depth(0.5, 2.0)
    (last,) = lines[max(lines)]
    assert int(last.split()[2]) >= STEPS // 20


@seldom
def test_memory_does_not_grow(uninterrupted: Path) -> None:
    """From a tenth of the run on by less than a hundredth."""
    rows = [tuple(map(int, line.split())) for line in (uninterrupted / "memory").read_text().splitlines()]
    settled = [memory for step, memory in rows if step >= STEPS // 10]
    assert max(settled) < 1.01 * settled[0] + depth(1 << 24, 0)
