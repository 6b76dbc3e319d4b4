"""Training that is ended at any moment goes on from its last checkpoint as if nothing had been."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import kill_loop
import pytest
import torch
import torch.distributed as dist
from depth import at_most, depth, each, mark_seldom, seldom
from ranks import ended, real_ranks, start
from test_examples import launched
from torch import nn

import funshard as fs
from funshard.checkpoint import _checkpoint

# --- train_gpt.py: ended, and started again. ---

TRAIN = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS, EVERY = depth(20, 40), 5
TINY = f"--layers 1 --dim 32 --heads 2 --seq 16 --batch 12 --steps {STEPS} --warmup 5 --lr 1e-2 --log-every 1 --sample 1"
TINY += f" --eval-batches 1 --max-bytes 100000 --every {EVERY}"


def lines(said: str) -> dict[int, set[str]]:
    """The losses that were printed of each step, by one run or several."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)", said, re.MULTILINE):
        found.setdefault(int(step), set()).add(loss)
    return found


class Trained(NamedTuple):
    said: str
    model: dict[str, torch.Tensor]
    kept: list[str]
    """The names of the checkpoints that are left."""


def trained(ranks: int, folder: Path, *flags: str) -> Trained:
    """The end of a run that goes on from what is in the folder."""
    end = folder / "end.pt"
    said = launched(ranks, TRAIN, *TINY.split(), "--checkpoint", str(folder / "states"), "--save", str(end), *flags)
    return Trained(said, torch.load(end), sorted(os.listdir(folder / "states")))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of two ranks."""
    return trained(2, tmp_path_factory.mktemp("uninterrupted"))


@seldom
def test_train_gpt_keeps_three_checkpoints(uninterrupted: Trained) -> None:
    """As its docstring says; none of them is only begun."""
    assert uninterrupted.kept == [f"step-{STEPS - back:08d}" for back in (2 * EVERY, EVERY, 0)]


def check_same(again: Trained, said_before: str, once: Trained) -> None:
    """To the last bit: each loss that was printed, and the parameters at the end."""
    assert re.search(r"resumed from .*step-\d+ at step \d+", again.said)
    assert lines(said_before + again.said) == lines(once.said)
    torch.testing.assert_close(again.model, once.model, rtol=0, atol=0)


def under_way(folder: Path, moment: float, seconds: float = 100) -> None:
    """Returns some time after the first checkpoint of a run is there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not [*folder.glob("states/step-*/funshard.json")]:
        time.sleep(0.002)
    time.sleep(moment)


def killed(folder: Path, seed: int) -> str:
    """What two ranks say until all of them are killed, at a random moment after the first checkpoint."""
    with tempfile.NamedTemporaryFile("r") as output:
        processes = start(2, TRAIN, [*TINY.split(), "--checkpoint", str(folder / "states")], output.name)
        under_way(folder, seed / 100)
        for process in processes:
            process.kill()
            process.join()
        return output.read()


@each(seed=range(depth(1, 12)))
def test_all_ranks_are_killed(uninterrupted: Trained, tmp_path: Path, seed: int) -> None:
    """Started again with --resume, training goes on to the same end."""
    said = killed(tmp_path, seed)
    check_same(trained(2, tmp_path, "--resume"), said, uninterrupted)


def test_other_numbers_of_ranks(uninterrupted: Trained, tmp_path: Path) -> None:
    """They see the same batches: the same training, to rounding."""
    said = killed(tmp_path, 0)
    for ranks in depth((1,), (1, 3)):
        folder = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "states", folder / "states")
        again = trained(ranks, folder, "--resume")
        assert "resumed from" in again.said
        first = min(lines(again.said))
        assert 0 < first <= len(lines(said))
        assert sorted(lines(again.said)) == [*range(first, STEPS)]
        for step, (loss,) in lines(again.said).items():
            (expected,) = lines(uninterrupted.said)[step]
            assert float(loss) == pytest.approx(float(expected), abs=2e-4)
        torch.testing.assert_close(again.model, uninterrupted.model, rtol=1e-4, atol=2e-5)


def test_a_directory_of_another_run(tmp_path: Path) -> None:
    """It is not gone on from, and not written into, unless asked."""
    (tmp_path / "states").mkdir()
    trained(1, tmp_path, "--steps", "2")
    with pytest.raises(AssertionError, match=r"expected a directory without checkpoints, or --resume, got .*step-00000002"):
        trained(1, tmp_path, "--steps", "2")


# --- A loop that saves at every step. ---


@seldom
@pytest.mark.parametrize("ranks", [2, 4])
def test_killed_at_random_moments(tmp_path: Path, ranks: int) -> None:
    """The last checkpoint is whole each time, and the last; --thorough: fifty times."""
    assert kill_loop.kills(depth(3, 50), tmp_path, seed=depth(4, 5), ranks=ranks).total() == depth(3, 50)


# --- What a loop may do while a save is under way. ---


def _state() -> tuple[fs.PartitionSpec, dict[str, object]]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    spec = fs.by_type(nn.Linear)(model)
    return spec, {"params": fs.shard(model, spec), "step": 3}


@at_most(1)
@pytest.mark.parametrize("slow", [0, 1])
@real_ranks(2)
def test_what_is_asked_while_a_save_is_under_way(rank: int, tmp_path: Path, slow: int) -> None:
    """Another save is refused, a checkpoint is loaded: nothing of it comes between what the threads tell each other."""
    spec, state = _state()
    fs.checkpoint.save(tmp_path / "0", state, spec)
    write = _checkpoint.write_boxes

    def slowly(*args: Any) -> Any:
        time.sleep(0.5 * (rank == slow))
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpoint, "write_boxes", slowly)
        saving = fs.checkpoint.save(tmp_path / "1", state, spec, asynchronous=True, timeout=60)
        for _ in range(3):
            assert fs.checkpoint.load(tmp_path / "0", spec, timeout=60)["step"] == 3
            assert not saving.done()
        if rank == 0:
            assert not fs.checkpoint.clean(tmp_path)
        saving.wait()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@real_ranks(2)
def test_ranks_with_other_process_groups(rank: int, tmp_path: Path) -> None:
    """torch names a group of some ranks by how many groups a rank has."""
    dist.new_group([0])  # which rank 1 has no part in
    spec, state = _state()
    fs.checkpoint.save(tmp_path / "a", state, spec, timeout=7)


@real_ranks(2)
def test_an_interrupt_on_one_rank(rank: int, tmp_path: Path) -> None:
    """It is one, nothing is left in the directory, the others have an error after the timeout; and then all save again."""
    spec, state = _state()
    write = _checkpoint.write_boxes

    def interrupted(*_: object) -> Any:
        _checkpoint.write_boxes = write
        raise KeyboardInterrupt

    if rank == 0:
        _checkpoint.write_boxes = interrupted
    with pytest.raises(KeyboardInterrupt if rank == 0 else fs.checkpoint.CheckpointError):
        fs.checkpoint.save(tmp_path / "1", state, spec, timeout=1.5)
    fs.checkpoint.save(tmp_path / "1", state, spec, timeout=1.5)
    assert os.listdir(tmp_path) == ["1"]
    dist.barrier()


@real_ranks(2)
def test_staging_fails_on_one_rank(rank: int, tmp_path: Path) -> None:
    spec, state = _state()

    def failing(*_: Any) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_checkpoint, "stage", failing)
        with pytest.raises(MemoryError, match="rank 1: no room"):
            fs.checkpoint.save(tmp_path / "1", state, spec, asynchronous=True)
    dist.barrier()
    assert os.listdir(tmp_path) == []


ENDS = """
import sys, time, torch, torch.distributed as dist, funshard as fs
from torch import nn
from funshard.checkpoint import _checkpoint
write = _checkpoint.write_boxes
def slowly(*args):
    time.sleep(0.5)
    if sys.argv[2] == "fails" and dist.get_rank() == 1:
        raise OSError("disk full")
    return write(*args)
_checkpoint.write_boxes = slowly
dist.init_process_group("gloo")
model = nn.Linear(8, 8)
spec = fs.policies.whole()(model)
fs.checkpoint.save(sys.argv[1], fs.shard(model, spec), spec, asynchronous=True, timeout=20)
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
"""


@seldom
@pytest.mark.parametrize("how", mark_seldom(["plainly", "fails", "destroyed"], "plainly"))
def test_the_process_ends_with_a_save_under_way(tmp_path: Path, how: str) -> None:
    """It is written to its end, or what went wrong is said."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with tempfile.NamedTemporaryFile("r") as output:
        codes = ended(start(2, script, [str(tmp_path / "a"), how], output.name), 60)
        said = output.read()
    assert None not in codes, said
    there = (tmp_path / "a" / "funshard.json").exists()
    assert there or "the save ended with an error" in said, (codes, said)
    assert there or how != "plainly", (codes, said)
    assert "disk full" in said or how != "fails", said
