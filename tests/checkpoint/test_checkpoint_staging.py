"""A fault of the file system at any step of a save: all or nothing is there; process groups and timeouts."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from depth import depth, seldom
from models import refused
from ranks import CONTEXT, forked, free_port, launch, real_ranks
from torch import nn

import funshard as fs
from funshard import checkpoint
from funshard.checkpoint import CheckpointError, _checkpoint
from funshard.checkpoint import _directory as staging

CALLS = [(os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "open"), (os, "close"), (os, "unlink"), (fcntl, "flock")]


class Faults:
    """Calls of the file system, of which the one of this number fails; one that closes or flushes does so before."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: int = -1) -> None:
        self.seen: list[str] = []
        for module, name in CALLS:
            patch.setattr(module, name, self._failing(getattr(module, name), name, fails))

    def _failing(self, real: Any, name: str, fails: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            if len(self.seen) - 1 != fails:
                return real(*args, **kwargs)
            if name == "close":
                real(*args)
            raise OSError(5, f"Input/output error of {name}")

        return call


def state_of() -> tuple[fs.Params, fs.PartitionSpec]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    spec = fs.policies.whole()(model)
    return fs.shard(model, spec), spec


def test_a_fault_at_every_step_leaves_all_or_nothing_and_says_which(tmp_path: Path) -> None:
    params, spec = state_of()
    with pytest.MonkeyPatch.context() as patch:
        steps = Faults(patch)
        checkpoint.save(tmp_path / "0", params, spec)
    ended: Counter[str] = Counter()
    for number, name in enumerate(steps.seen):
        folder = tmp_path / f"of {number}"
        folder.mkdir()
        error: Exception | None = None
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, number)
            try:
                checkpoint.save(folder / "1", params, spec)
            except (OSError, CheckpointError) as raised:
                error = raised
        said = str(error)
        if error is None or "is there and whole" in said:
            ended["said that it is there" if error else "saved"] += 1
            assert checkpoint.latest(folder) == folder / "1", (number, name)
            assert checkpoint.load(folder / "1", spec)[""].equal(params[""])
            assert error is None or "the flush of its directory failed" in said
        else:
            ended["nothing"] += 1
            assert list(folder.iterdir()) == [], (number, name, said)
        checkpoint.save(folder / "2", params, spec)
        assert {path.name for path in folder.iterdir()} <= {"1", "2"}
    assert ended["said that it is there"] == 3, ended  # opening the directory, its fsync and its close
    assert ended["saved"] >= 1, ended  # a lock that cannot be had or removed
    assert ended["nothing"] >= 8, ended


@real_ranks(2)
def test_no_rank_says_that_nothing_was_saved_where_it_was(rank: int, tmp_path: Path) -> None:
    """Of a save whose first rank cannot flush the entries of the directory."""
    (params, spec), path, flush = state_of(), tmp_path / "1", staging.flush

    def fails(target: Path) -> None:
        if target == path and (target / "funshard.json").exists():
            raise OSError(5, "Input/output error")
        flush(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "flush", fails)
        with pytest.raises(CheckpointError, match=f"^checkpoint.save: {path} is there and whole, but the flush") as error:
            checkpoint.save(path, params, spec)
    assert type(error.value).__name__ == "SavedError"
    assert checkpoint.latest(tmp_path) == path


# --- export ---


def test_a_dry_run_of_export_says_before_the_training_what_would_fail_after_it(tmp_path: Path) -> None:
    params, spec = state_of()
    assert checkpoint.export(tmp_path / "a" / "b", params, spec, dry_run=True) == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="expected a path where nothing is"):
        checkpoint.export(tmp_path / "file", params, spec, dry_run=True)
    with pytest.raises(PermissionError, match=r"expected a place to write to, and '.*file' is none"):
        checkpoint.export(tmp_path / "file" / "out", params, spec, dry_run=True)
    with pytest.raises(ValueError, match="would both be 'w' in the files"):
        checkpoint.export(tmp_path / "out", params, spec, rename=lambda _: "w", dry_run=True)


# --- The directory that is replaced. ---


def access(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mode & 0o7777, found.st_uid, found.st_gid


def test_owner_and_mode_of_what_is_replaced_are_kept(tmp_path: Path) -> None:
    """Of an empty directory that only its user reads, also while the new one is written."""
    params, spec = state_of()
    (tmp_path / "1").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "1", 1234, 2345)
    before = access(tmp_path / "1")
    checkpoint.save(tmp_path / "1", params, spec)
    assert access(tmp_path / "1") == before


def test_any_directory_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory too, and a mount point is as good: no directory is renamed or replaced."""
    params, spec = state_of()
    (tmp_path / "1").mkdir()
    monkeypatch.chdir(tmp_path / "1")
    inode = (tmp_path / "1").stat().st_ino
    assert checkpoint.save("", params, spec).wait() == tmp_path / "1"
    assert (tmp_path / "1").stat().st_ino == inode
    assert checkpoint.load(".", spec)[""].equal(params[""])
    refused(FileExistsError, "expected a path where nothing is", lambda: checkpoint.export("", params, spec, dry_run=True))


def test_a_working_directory_that_is_gone_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a path that needs none."""
    params, spec = state_of()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd").rmdir()
    assert checkpoint.save(tmp_path / "1", params, spec).wait() == tmp_path / "1"


# --- Object stores, by fsspec. ---


@real_ranks(2)
def test_two_ranks_in_a_store(rank: int, tmp_path: Path) -> None:
    """Any file system of fsspec: here the local one, as a store that both ranks see. A failed save leaves no file."""
    (params, spec), url = state_of(), f"file://{tmp_path}/run"
    for step in (1, 2, 3):
        state = {"params": params, "step": step, "rank": checkpoint.per_rank(rank)}
        assert str(checkpoint.save(f"{url}/{step}", state, spec, asynchronous=step == 2).wait()) == f"{url}/{step}"

    def gone(*_: object) -> None:
        raise OSError(5, "the store is gone")

    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(_checkpoint, "write_boxes", gone)
        refused(OSError, r"nothing was saved at .*: rank 1: .*gone", lambda: checkpoint.save(f"{url}/4", state, spec))
    found = checkpoint.load(checkpoint.latest(url, spec) or "", spec)
    assert (found["step"], found["rank"]) == (3, rank)
    assert found["params"][""].equal(params[""])
    refused(FileExistsError, "/3: expected a path where nothing is", lambda: checkpoint.save(f"{url}/3", state, spec))
    if rank == 0:
        assert [str(path) for path in checkpoint.clean(url, keep=1)] == [f"{url}/1", f"{url}/2"]
        left = sorted(path.name for path in (tmp_path / "run" / "3").iterdir())
        assert [name[:4] for name in left] == [".met", "__0_", "__1_", "funs"]
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["3"]


def test_a_save_that_was_killed_in_a_store(tmp_path: Path) -> None:
    """Without a manifest nothing is there, a save to the same path goes ahead; late writes of the killed one change nothing."""
    params, spec = state_of()
    store: Any = fsspec.filesystem("memory")
    url = f"memory://{tmp_path.name}"
    for name, raw in {"__0_0_123456789abc.distcp": b"killed", ".metadata": b"half"}.items():
        store.pipe(f"/{tmp_path.name}/1/{name}", raw)
    assert checkpoint.latest(url) is None
    for name in ("1", "2"):
        with pytest.raises(FileNotFoundError, match=f"{name}: expected a checkpoint"):
            checkpoint.load(f"{url}/{name}", spec)
    path = checkpoint.save(f"{url}/1", {"params": params}, spec).wait()
    assert len(store.find(f"/{tmp_path.name}/1")) == 3
    store.pipe(f"/{tmp_path.name}/1/__0_0_123456789abc.distcp", b"late")
    assert str(checkpoint.latest(url)) == str(path)
    assert checkpoint.load(path, spec)["params"][""].equal(params[""])


def test_damage_in_a_store(tmp_path: Path) -> None:
    """A flipped bit is an error that names tensor and file, what is cut short is passed over and saved over."""
    params, spec = state_of()
    store: Any = fsspec.filesystem("memory")
    url, folder = f"memory://{tmp_path.name}", f"/{tmp_path.name}/1"
    checkpoint.save(f"{url}/1", {"params": params}, spec)
    (file,) = (name for name in store.find(folder) if name.endswith(".distcp"))
    raw = store.cat(file)
    at = raw.index(params[""].view(torch.uint8)[:8].numpy().tobytes())
    store.pipe(file, raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
    with pytest.raises(CheckpointError, match=r"tensor 'params\.\w+' in file '__0_0_.*' .* is damaged: its checksum"):
        checkpoint.load(f"{url}/1", spec)
    store.pipe(file, raw[:-9])
    with pytest.warns(UserWarning, match="passed over a damaged checkpoint: .*is cut short"):
        assert checkpoint.latest(url) is None
    with pytest.warns(UserWarning, match="takes the place of a damaged checkpoint"):
        checkpoint.save(f"{url}/1", {"params": params}, spec)
    assert checkpoint.load(f"{url}/1", spec)["params"][""].equal(params[""])


# --- process groups and timeouts ---


GLOO = """
import contextlib
from pathlib import Path

def gloo_threads():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            names.append((task / "comm").read_text())
    return [name for name in names if "gloo" in name]
"""

SAVES = f"""
import sys
import threading
import torch
import torch.distributed as dist
import funshard as fs
from funshard.checkpoint import _checkpoint
{GLOO}
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
spec = fs.policies.whole()(model)
params = fs.shard(model, spec, src=0)
fs.checkpoint.save(sys.argv[1] + "/1", params, spec)
saving = fs.checkpoint.save(sys.argv[1] + "/2", params, spec, asynchronous=True)
saving.wait()
fs.checkpoint.load(sys.argv[1] + "/2", spec)
assert gloo_threads()
go, write = threading.Event(), _checkpoint.write_boxes
_checkpoint.write_boxes = lambda *args: go.wait() and write(*args)
saving = fs.checkpoint.save(sys.argv[1] + "/3", params, spec, asynchronous=True)
dist.destroy_process_group()
assert not gloo_threads(), gloo_threads()
go.set()
try:
    saving.wait()
except fs.checkpoint.CheckpointError as error:
    assert "call wait() of what save has returned before torch.distributed.destroy_process_group" in str(error), error
    print("refused")
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


@needs_proc
def test_its_process_groups_end_with_destroy_process_group(tmp_path: Path) -> None:
    """Threads that outlive it make ranks abort when the interpreter ends. A save that is not over then is an error."""
    script = tmp_path / "script.py"
    script.write_text(SAVES)
    assert launch(2, script, str(tmp_path)).count("refused") == 2


def stopped(rank: int, port: str, path: str, out: Any, which: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=100))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    spec = fs.policies.whole()(model)
    params = fs.shard(model, spec)
    if rank == which:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        checkpoint.save(path, params, spec, timeout=2)
    except Exception as error:
        out.send((type(error).__name__, str(error), time.monotonic() - begin))
    dist.destroy_process_group()


@seldom
@pytest.mark.parametrize("which", depth([0], [0, 1]))
def test_a_stopped_rank_is_an_error_within_the_timeout(tmp_path: Path, which: int) -> None:
    """Not the training group's: the rank that has the store, or another one."""
    port = free_port()
    reader, writer = CONTEXT.Pipe(duplex=False)
    ranks = [forked(stopped, rank, port, str(tmp_path / "1"), writer, which) for rank in range(2)]
    try:
        assert reader.poll(120), "it hangs"
        kind, text, seconds = reader.recv()
        assert kind == "CheckpointError"
        assert "one of the 2 ranks was lost, or did not answer in time" in text
        assert seconds < 40, "it waits for the training group's limit"
        ranks[1 - which].join(40)
        assert ranks[1 - which].exitcode == 0, "its end waits for the training group's limit"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert list(tmp_path.iterdir()) == []
