"""What goes wrong with a checkpoint is a clear error on every rank, and nothing that was saved is lost."""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from depth import at_most, every
from hostile import change_manifest
from models import refused
from ranks import CONTEXT, Pool, forked, free_port, real_ranks
from torch import nn

import funshard as fs
from funshard import checkpoint
from funshard.checkpoint import CheckpointError, _leaves
from funshard.checkpoint import _checkpoint as writer
from funshard.checkpoint import _directory as staging


def made(width: int = 5) -> tuple[nn.Module, fs.PartitionSpec]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
    return model, fs.by_type(nn.Linear)(model).bound


def write(rank: int, path: str, step: int = 1) -> None:
    model, spec = made()
    checkpoint.save(path, {"params": fs.shard(model, spec), "step": step}, spec)


def write_over(rank: int, path: str, step: int) -> None:
    told = pytest.warns(UserWarning, match="takes the place of a damaged checkpoint")
    with contextlib.nullcontext() if rank else told:
        write(rank, path, step)


def expect(rank: int, kind: str, text: str, do: Callable[..., Any], *args: Any) -> None:
    """The call raises this on every rank, within seconds."""
    begin = time.monotonic()
    cls = getattr(checkpoint, kind, None) or getattr(builtins, kind)
    refused(cls, text, lambda: do(rank, *args))
    assert time.monotonic() - begin < 60


def read(rank: int, path: str, width: int = 5, dtype: torch.dtype = torch.float32) -> None:
    model, _ = made(width)
    checkpoint.load(path, fs.by_type(nn.Linear)(model.to(dtype)))


# --- Damage: what was written is not what is read. ---


def truncated(path: Path) -> None:
    (file,) = path.glob("__1_0_*")
    os.truncate(file, file.stat().st_size // 2)


def flipped(path: Path) -> None:
    """A byte of the elements of a tensor."""
    (file,) = path.glob("__0_0_*")
    raw = bytearray(file.read_bytes())
    manifest = staging.read_manifest(path)
    assert manifest is not None
    places = (place for tensor in _leaves.parse_tensors(path, manifest).values() for place in tensor.boxes.values())
    raw[next(place.offset for place in places if place.file == file.name) + 2] ^= 64
    file.write_bytes(raw)


def missing(path: Path) -> None:
    next(path.glob("__1_0_*")).unlink()


def other_state(path: Path) -> None:
    file = path / "funshard.json"
    file.write_text(file.read_text().replace("step", "stop"))


def newer(path: Path) -> None:
    change_manifest(path, lambda content: content.update(version=99))


@at_most(3)
@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (truncated, "CheckpointError", r"tensor 'params\.\d\.\w+' in file '__1_0_\w+.distcp' .* is damaged: .*cut short"),
        (flipped, "CheckpointError", r"tensor 'params\.\d\.\w+' in file '__0_0_\w+.distcp' .*its checksum is not that in"),
        (missing, "CheckpointError", r"tensor 'params\.\d\.\w+': file '__1_0_\w+.distcp' of the checkpoint is missing"),
        (other_state, "CheckpointError", r"'funshard\.json' is damaged: its checksum"),
        (newer, "CheckpointError", r"of version 99, expected at most 2: use a newer funshard"),
        (shutil.rmtree, "FileNotFoundError", "expected a checkpoint"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damage(gloo2: Pool, tmp_path: Path, damage: Callable[[Path], None], kind: str, text: str) -> None:
    """It names tensor and file on every rank; `latest` passes over what is cut short or missing, and the one before loads.

    What it passes over, a save to the same path takes the place of, and of nothing else.
    """
    gloo2.run(write, str(tmp_path / "1"))
    gloo2.run(write, str(tmp_path / "2"), 2)
    damage(tmp_path / "2")
    gloo2.run(expect, kind, text, read, str(tmp_path / "2"))
    there = (tmp_path / "2").exists()
    if damage is not flipped:  # sizes say nothing of that
        with pytest.warns(UserWarning, match="passed over a damaged checkpoint") if there else contextlib.nullcontext():
            assert checkpoint.latest(tmp_path) == tmp_path / "1"
    gloo2.run(read, str(tmp_path / "1"))
    if damage in (flipped, newer):
        text = "expected a path where nothing is, such as one with the number of the step"
        gloo2.run(expect, "FileExistsError", text, write, str(tmp_path / "2"), 3)
    else:
        gloo2.run(write_over if there else write, str(tmp_path / "2"), 3)
        gloo2.run(read, str(tmp_path / "2"))
        assert checkpoint.latest(tmp_path) == tmp_path / "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def damaged(path: Path) -> tuple[fs.Params, fs.PartitionSpec]:
    model, spec = made()
    checkpoint.save(path, fs.shard(model, spec), spec)
    (file,) = path.glob("__0_0_*")
    os.truncate(file, file.stat().st_size // 2)
    return fs.shard(model, spec), spec


OVER = r"checkpoint.save: takes the place of a damaged checkpoint: .*__0_0_\w+.distcp' is cut short"


def test_a_damaged_one_stays_until_another_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the writing fails it is as it was; and a warning says that it will go."""
    path = tmp_path / "1"
    params, spec = damaged(path)
    before = {file.name: file.stat().st_size for file in path.iterdir()}

    def written(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_boxes", written)
        with pytest.warns(UserWarning, match=OVER), pytest.raises(OSError, match="Input/output error"):
            checkpoint.save(path, params, spec)
    assert {file.name: file.stat().st_size for file in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.warns(UserWarning, match=OVER):
        checkpoint.save(path, params, spec)
    assert all(shard.equal(params[key]) for key, shard in checkpoint.load(path, spec).items())
    assert list(tmp_path.iterdir()) == [path]


def test_a_whole_one_that_has_come_in_the_meantime_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without locks, if it comes after the first look at the damaged one; `export` does not look for damage."""
    path = tmp_path / "1"
    params, spec = damaged(path)
    refused(FileExistsError, "expected a path where nothing is", lambda: checkpoint.export(path, params, spec))
    with pytest.warns(UserWarning, match=OVER):
        aside = staging.Target(path)
    monkeypatch.setattr(staging, "_lock", lambda path: contextlib.nullcontext())  # as on a file system without locks
    with pytest.warns(UserWarning, match=OVER):
        checkpoint.save(path, params, spec)
    refused(FileExistsError, "expected a path where nothing is", lambda: aside.commit(b"", {}, {}, {}))
    aside.abandon()
    assert checkpoint.latest(tmp_path) == path
    assert all(shard.equal(params[key]) for key, shard in checkpoint.load(path, spec).items())


def test_every_flipped_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    """Or does no harm: what is loaded is what was saved, or an error."""
    model, spec = made()
    expected = fs.shard(model, spec)
    checkpoint.save(tmp_path / "1", expected, spec)
    (file,) = (tmp_path / "1").glob("__0_0_*")
    good = file.read_bytes()
    found = 0
    for at in range(0, len(good), 7):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        try:
            loaded = checkpoint.load(tmp_path / "1", spec)
        except CheckpointError as error:
            found += "tensor '" in str(error)
        else:
            assert all(loaded[key].equal(expected[key]) for key in expected), at
    assert found > 10


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    """Of a copy that was interrupted: the file's size, shapes and own checksums are right, the values are another step's."""
    _, spec = made()
    for step in (1, 2):
        params = {unit.key: torch.full((spec.shard_numel(unit),), float(step)) for unit in spec}
        checkpoint.save(tmp_path / str(step), {"params": params, "step": step}, spec)
    shutil.copy(*(next((tmp_path / name).glob("__0_0_*")) for name in ("1", "2")))
    with pytest.raises(CheckpointError, match=r"tensor 'params.*' in file '__0_0_\w+.distcp' .* is it another's\?"):
        checkpoint.load(tmp_path / "2", spec)
    assert checkpoint.load(tmp_path / "2", spec, only="step") == 2
    assert checkpoint.load(tmp_path / "1", spec)["step"] == 1


def test_containers_of_version_0_2_load(tmp_path: Path) -> None:
    """Of classes that files named then, as `from_dcp` keeps them."""
    _, spec = made()
    checkpoint.save(tmp_path / "2", {"deque": [1, 2], "Counter": {"a": 3}}, spec)
    old = {"deque": {"deque": [{"value": 1}, {"value": 2}], "of": 4}, "Counter": {"Counter": [["a", {"value": 3}]]}}
    change_manifest(tmp_path / "2", lambda content: content.update(state={"dict": [list(pair) for pair in old.items()]}))
    assert checkpoint.load(tmp_path / "2", spec) == {"deque": [1, 2], "Counter": {"a": 3}}


# --- Ranks whose calls differ. ---


def call_otherwise(rank: int, path: str, change: str) -> None:
    """A call that differs on the second rank."""
    _, spec = made()
    params = {unit.key: torch.zeros(spec.shard_numel(unit)) for unit in spec}
    state = {"params": params, "ema": params, "step": 1}
    other = f"{path}/{2 if rank else 1}"
    match change:
        case "load":
            checkpoint.load(other, spec)
        case "load only":
            checkpoint.load(f"{path}/1", spec, only="ema" if rank else "params")
        case "load like":
            checkpoint.load(f"{path}/1", spec, like={"ema" if rank else "params": params})
        case "save and load":
            checkpoint.load(f"{path}/1", spec) if rank else checkpoint.save(f"{path}/3", state, spec)
        case "asynchronous":
            checkpoint.save(f"{path}/3", state, spec, asynchronous=bool(rank)).wait()
        case "export":
            checkpoint.export(f"{path}/3", params, spec, dry_run=bool(rank))
        case _:
            checkpoint.read_safetensors(other, spec)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("load", r"expected one checkpoint .*, got on rank 0 '.*/1', on rank 1 '.*/2', with other contents or names; latest"),
        ("load only", r"checkpoint.load: expected one only on all ranks, got on rank 0 'params', on rank 1 'ema'"),
        ("load like", r"expected one checkpoint and names of one like= on all ranks, got on rank 0 '.*/1', on rank 1 '.*/1'"),
        ("save and load", r"expected one function on all ranks, got on rank 0 'checkpoint.save', on rank 1 'checkpoint.load'"),
        ("asynchronous", "expected one asynchronous on all ranks, got on rank 0 False, on rank 1 True"),
        ("export", "expected one dry_run on all ranks, got on rank 0 False, on rank 1 True"),
        ("read_safetensors", r"expected one path on all ranks, got on rank 0 '.*/1', on rank 1 '.*/2'"),
    ],
)
def test_calls_that_differ_between_ranks(gloo2: Pool, tmp_path: Path, change: str, text: str) -> None:
    """Every rank says what differs: the result would be half of each, or the ranks would wait for each other."""
    for step in (1, 2):
        gloo2.run(write_both, str(tmp_path / str(step)), step)
    gloo2.run(expect, "ValueError", text, call_otherwise, str(tmp_path), change)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def write_both(rank: int, path: str, step: int) -> None:
    _, spec = made()
    params = {unit.key: torch.full((spec.shard_numel(unit),), float(step)) for unit in spec}
    checkpoint.save(path, {"params": params, "ema": params, "step": step}, spec)


@real_ranks(2)
def test_each_rank_may_load_a_copy_of_its_own(rank: int, tmp_path: Path) -> None:
    """As on the local disks of several machines: what counts is the save, not the path."""
    write_both(rank, str(tmp_path / "0"), 1)
    if rank:
        shutil.copytree(tmp_path / "0", tmp_path / "1")
    assert checkpoint.load(tmp_path / str(rank), made()[1])["step"] == 1


class MuteError(ValueError):
    """An error without a message, since its class raises."""

    def __str__(self) -> str:
        raise KeyError("no message")


@real_ranks(2)
def test_an_error_whose_message_cannot_be_read_is_raised_on_every_rank(rank: int, tmp_path: Path) -> None:
    """A rank that fails while it reports an error leaves the others waiting."""
    model, spec = made()

    def rename(name: str) -> str:
        if rank:
            raise MuteError
        return name

    with pytest.raises(CheckpointError, match="rank 1: no message: __str__ of MuteError raises"):
        checkpoint.export(tmp_path / "1", fs.shard(model, spec), spec, rename=rename)


# --- Arguments of any function. ---


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none(tmp_path: Path, timeout: float) -> None:
    """Said before anything is written or sent."""
    model, spec = made()
    with pytest.raises(ValueError, match=r"checkpoint.save: timeout: expected a positive number of seconds, .* got"):
        checkpoint.save(tmp_path / "1", fs.shard(model, spec), spec, timeout=timeout)
    with pytest.raises(ValueError, match=r"checkpoint.load: timeout: expected a positive number of seconds, .* got"):
        checkpoint.load(tmp_path / "1", spec, timeout=timeout)


# --- Another model. ---


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((6,), r"tensor 'params\.0\.(weight|bias)': expected \[6(, 4)?\] torch.float32, got \[5(, 4)?\] .* in the chec"),
        ((5, torch.bfloat16), r"parameter '0\.(weight|bias)': expected float32, as the checkpoint has it, got torch.bfloat16"),
    ],
)
def test_another_model(gloo2: Pool, tmp_path: Path, args: tuple[Any, ...], text: str) -> None:
    gloo2.run(write, str(tmp_path / "1"))
    gloo2.run(expect, "ValueError", text, read, str(tmp_path / "1"), *args)


def test_more_or_fewer_parameters(tmp_path: Path) -> None:
    model, spec = made()
    checkpoint.save(tmp_path / "1", {"params": fs.shard(model, spec)}, spec)
    more = nn.Sequential(*model.children(), nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"parameter '2\.\w+' of unit '2' is not in state 'params' of the checkpoint, which has 4 .*'0\.bias'"
    ):
        checkpoint.load(tmp_path / "1", fs.by_type(nn.Linear)(more))
    with pytest.raises(ValueError, match=r"parameter '1\.\w+' is in state 'params' of the checkpoint and not in the spec"):
        checkpoint.load(tmp_path / "1", fs.by_type(nn.Linear)(nn.Sequential(model[0])))  # pyright: ignore[reportIndexIssue]
    with pytest.raises(
        ValueError, match=r"only='prams': expected the path of a part of the state, got none at '' but \['params'"
    ):
        checkpoint.load(tmp_path / "1", spec, only="prams")
    refused(ValueError, r"its units come together", lambda: checkpoint.load(tmp_path / "1", spec, only="params.0"))
    with pytest.raises(ValueError, match=r"state 'steps' is no plain value in the checkpoint"):
        checkpoint.load(tmp_path / "1", spec, like={"steps": 3})


# --- A state that cannot be saved. ---


CHANGES: dict[str, Callable[[int, fs.Params], dict[Any, Any]]] = {
    "number": lambda rank, params: {"step": rank},
    "type": lambda rank, params: {"sampler": object() if rank else 1},
    "length": lambda rank, params: {"params": {key: x[:-1] if rank else x for key, x in params.items()}},
    "keys": lambda rank, params: {"more": 1} if rank else {},
    "values": lambda rank, params: {"c": {"a.b": 1, "a": {"b": 2}}},
    "empty": lambda rank, params: {"seen": {"x": {} if rank else []}},
    "ragged list": lambda rank, params: {"seen": checkpoint.per_rank([0] * (rank + 1))},
    "ragged tensor": lambda rank, params: {"seen": checkpoint.per_rank(torch.zeros(rank + 1))},
    "key": lambda rank, params: {"c": {"x": 1, ("a", 1) if rank else "('a', 1)": 2}},
    "key beside units": lambda rank, params: {"params": {**params, ("a", 1): 2}},
    "numpy": lambda rank, params: {"x": np.float64(1.5)},
}
"""What differs in the state on a rank."""


def save_changed(rank: int, path: str, change: str) -> None:
    model, spec = made()
    params = fs.shard(model, spec)
    state: dict[Any, Any] = {"params": params, "step": 1}
    match change:
        case "path":
            path += str(rank)
        case "url":
            path = "nothing://bucket/1"
        case "spec":
            spec = fs.policies.whole()(model).on(spec.bound_mesh) if rank else spec
            state = {"params": fs.shard(model, spec, rank=rank)}
        case "replicas":
            spec = fs.by_type(nn.Linear, p=fs.P())(model).on(spec.bound_mesh)
            state = {"ema": {key: shard + rank for key, shard in fs.shard(model, spec).items()}}
        case _:
            state |= CHANGES[change](rank, params)
    checkpoint.save(path, state, spec)


KEYS = r"expected keys that are strings, .*, got \('a', 1\) \(tuple\)"


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ("number", "ValueError", r"'step': expected the same on all ranks, got on rank 0 0, on rank 1 1; wrap .*per_rank"),
        ("type", "TypeError", r"rank 1: state 'sampler': expected a tensor, a number.*got builtins\.object; .*no pickles"),
        ("length", "ValueError", r"rank 1: unit '0' of state 'params\.0': expected this rank's slice, \[\d+\]"),
        ("keys", "ValueError", r"state 'more': expected the same on all ranks, got on rank 0 nothing"),
        ("values", "ValueError", r"state 'c\.a\.b': two of its leaves have this name"),
        ("empty", "ValueError", r"state 'seen\.x': .*on rank 0 a container, list, on rank 1 a container, dict"),
        ("ragged list", "ValueError", r"state 'seen\.1': .* on rank 0 nothing, on rank 1 each rank's own, .*\(json\.dumps\)"),
        ("ragged tensor", "ValueError", r"'seen': .* rank 0 each .*, \[2, 1\] .*, on rank 1 each .*, \[2, 2\] .*one structure"),
        ("key", "TypeError", f"rank 1: state 'c': {KEYS}"),
        ("key beside units", "TypeError", f"state 'params': {KEYS}"),
        ("path", "ValueError", r"expected one path on all ranks, got on rank 0 '.*10', on rank 1 '.*11'"),
        ("url", "ValueError", r"Protocol not known: nothing"),
        ("numpy", "TypeError", r"'x': .*got numpy\.float64; .*no pickles: save the parts of the object, by .*\.item\(\)"),
        ("spec", "ValueError", r"the ranks of the mesh .* have different models"),
        (
            "replicas",
            "ValueError",
            r"state 'ema\.0\.\w+', slice 0 of unit '0': .*got on rank 0 slice.*, on rank 1 slice.*; average replicas first",
        ),
    ],
)
def test_what_cannot_be_saved(gloo2: Pool, tmp_path: Path, change: str, kind: str, text: str) -> None:
    """Every rank says why, and nothing is there."""
    gloo2.run(expect, kind, text, save_changed, str(tmp_path / "1"), change)
    assert list(tmp_path.iterdir()) == []


def test_frozen_units_at_rest_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    spec = fs.by_type(nn.Linear, p=fs.P(at_rest=fs.codecs.nf4()))(model)
    params = fs.shard(model, spec)
    with pytest.raises(ValueError, match=r"unit '0' is at rest in nf4.*expected a state without it; save fs\.partition"):
        checkpoint.save(tmp_path / "1", params, spec)
    checkpoint.save(tmp_path / "1", fs.partition(params, spec)[0], spec)
    assert checkpoint.load(tmp_path / "1", spec).keys() == {"1"}
    plain = fs.by_type(nn.Linear)(model)
    checkpoint.save(tmp_path / "2", fs.shard(model, plain), plain)
    found = checkpoint.load(tmp_path / "2", spec)  # encoded as it comes
    assert found.keys() == params.keys()
    assert all(found[key].equal(params[key]) for key in params)


def test_simulated_ranks_do_not_save(tmp_path: Path) -> None:
    model, spec = made()

    def rank(mesh: Any, _: torch.Tensor) -> torch.Tensor:
        checkpoint.save(tmp_path / "1", fs.shard(model, spec.on(mesh)), spec.on(mesh))
        return torch.zeros(())

    with pytest.raises(ValueError, match=r"checkpoint\.save: expected process groups, outside of transforms"):
        fs.testing.spmd(rank, 2)(torch.zeros(2))


# --- Writing fails. ---


def _fails(rank: int, path: str, where: int, error: str) -> None:
    """One rank's writer fails: no space, a file system that is read-only."""

    def fail(*_: object) -> None:
        raise OSError(*{"full": (28, "No space left on device"), "read-only": (30, "Read-only file system")}[error])

    with pytest.MonkeyPatch.context() as patch:
        if rank == where:
            patch.setattr(writer, "write_boxes", fail)
        write(rank, path, 2)


@every(where=[0, 1], error=["full", "read-only"])
def test_a_rank_cannot_write(gloo2: Pool, tmp_path: Path, where: int, error: str) -> None:
    """All ranks say which and why; nothing is left of it, and what was there before is whole."""
    gloo2.run(write, str(tmp_path / "1"))
    text = rf"checkpoint\.save: nothing was saved at /.*: rank {where}: .*({'No space' if error == 'full' else 'Read-only'})"
    gloo2.run(expect, "OSError", text, _fails, str(tmp_path / "2"), where, error)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoint.latest(tmp_path) == tmp_path / "1"
    gloo2.run(read, str(tmp_path / "1"))
    gloo2.run(write, str(tmp_path / "2"), 2)


def test_a_directory_that_cannot_be_written_to(gloo2: Pool, tmp_path: Path) -> None:
    """Where its parent is a file."""
    (tmp_path / "file").write_text("")
    text = r"checkpoint\.save: rank 0: .*(Not a directory|File exists)"
    gloo2.run(expect, "OSError", text, write, str(tmp_path / "file" / "1"))


def test_a_write_that_fails_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer would end it, by what its destructor writes."""
    spec = fs.policies.whole()(nn.Linear(3, 2))
    for error in (OSError("disk full"), KeyboardInterrupt()):
        monkeypatch.setattr(staging, "checksum", mock.Mock(side_effect=[0, error]))
        with pytest.raises(type(error)):
            checkpoint.save(tmp_path / "a", {"x": torch.randn(300_000)}, spec)
    assert not (tmp_path / "a").exists()


def test_all_is_flushed_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, after its last write, and the directories; then the manifest is there, and the entry of that."""
    model, spec = made()
    seen: list[Any] = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        seen.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))
        fsync(handle)

    def replaced(old: Any, new: Any) -> None:
        seen.append(new)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    checkpoint.save(tmp_path / "1", fs.shard(model, spec), spec)
    at = seen.index(tmp_path / "1" / "funshard.json")
    files = [(file.stat().st_ino, file.stat().st_size) for file in (tmp_path / "1").iterdir()]
    assert len(files) == 3
    assert set(files) <= set(seen[:at])
    assert [seen[i][0] for i in (at - 1, at + 1)] == [(tmp_path / "1").stat().st_ino] * 2
    assert tmp_path.stat().st_ino in [entry[0] for entry in seen[:at] if isinstance(entry, tuple)]


# --- Several writers. ---


def test_two_writers_of_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has it, the other one is told; on a file system without locks the first to end has it."""
    model, spec = made()
    path, ends = tmp_path / "1", staging.Target.commit

    def save(step: int) -> None:
        checkpoint.save(path, {"params": fs.shard(model, spec), "step": step}, spec)

    def commit(self: Any, *args: Any) -> None:
        monkeypatch.setattr(staging.Target, "commit", ends)
        save(2)  # another job, a moment before
        ends(self, *args)

    monkeypatch.setattr(staging.Target, "commit", commit)
    refused(FileExistsError, "expected a path that no other save writes to", lambda: save(1))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(staging, "_lock", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(staging.Target, "commit", commit)
    refused(FileExistsError, "expected a path where nothing is", lambda: save(1))
    assert checkpoint.load(path, spec, only="step") == 2
    assert checkpoint.load(path, spec, only="params").keys() == {"0", "1"}


# --- A rank is lost. ---


def _lost(rank: int, size: int, port: str, path: str, out: Any, where: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    write(rank, f"{path}/1")
    if rank == 1:
        of, name = (writer, "write_boxes") if where == "plan" else (_leaves, "write_record")
        setattr(of, name, lambda *_: os._exit(9))
    model, spec = made()
    try:
        checkpoint.save(f"{path}/2", {"params": fs.shard(model, spec), "step": 2}, spec, timeout=20)
    except Exception as error:
        out.send((type(error).__name__, str(error)))
    out.close()
    os._exit(0)


@at_most(1)
@pytest.mark.parametrize("where", ["plan", "write"])
def test_a_lost_rank(tmp_path: Path, where: str) -> None:
    """The others say so, in time; the checkpoint before is whole, and what was begun is cleaned up."""
    port = free_port()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(3)]
    ranks = [forked(_lost, r, 3, port, str(tmp_path), w, where) for r, (_, w) in enumerate(pipes)]
    try:
        for rank, (r, _) in enumerate(pipes):
            if rank != 1:
                assert r.poll(60), "it hangs"
                kind, text = r.recv()
                assert kind == "CheckpointError"
                assert "was lost, or did not answer in time" in text
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert checkpoint.latest(tmp_path) == tmp_path / "1"
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


# --- latest and clean. ---


def test_latest_and_clean(tmp_path: Path) -> None:
    """By the order of saving, not by names or clocks; what is being written stays, what was cut short goes."""
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.clean(tmp_path / "nowhere") == []
    model, spec = made()
    params = fs.shard(model, spec)
    for i, name in enumerate(["step_9", "step_10", "b", "a"]):
        checkpoint.save(tmp_path / name, {"params": params, "step": i}, spec)
        os.utime(tmp_path / name, (1000 - i, 1000 - i))
        assert checkpoint.latest(tmp_path) == tmp_path / name
    for name in ("other", "theirs"):  # not ours
        (tmp_path / name).mkdir()
    (tmp_path / "theirs" / "__0_0.distcp").touch()
    alive, dead = (staging.Target(tmp_path / name) for name in ("alive", "dead"))
    dead._locked.close()
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    assert {path.name for path in checkpoint.clean(tmp_path, keep=2)} == {"step_9", "step_10", "dead"}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "other", "theirs", "alive"}
    alive.abandon()
    checkpoint.save(tmp_path / "0", {"params": params, "step": 4}, spec)
    assert checkpoint.latest(tmp_path) == tmp_path / "0"  # however few are left of those before
    for n in (0, 1.5):
        refused(ValueError, f"keep: expected a whole number from 1 on, got {n}", lambda: checkpoint.clean(tmp_path, keep=n))


def test_what_others_put_beside_checkpoints_stays(tmp_path: Path) -> None:
    """Links to checkpoints are none, neither to keep nor to remove; nor is what ends as a name of ours."""
    model, spec = made()
    for name in ("1", "2", "3", ".kept.partial"):
        checkpoint.save(tmp_path / name, fs.shard(model, spec), spec)
    assert checkpoint.latest(tmp_path) == tmp_path / ".kept.partial"
    for link, to in {"latest": "3", "best": "1"}.items():
        (tmp_path / link).symlink_to(to)
    (tmp_path / ".partial").mkdir()  # rsync's
    (tmp_path / "__0_0_0123456789ab.distcp").touch()
    before = {path.name for path in tmp_path.iterdir()}
    assert checkpoint.latest(tmp_path) == tmp_path / ".kept.partial"
    assert checkpoint.clean(tmp_path, keep=2) == [tmp_path / "1", tmp_path / "2"]
    assert {path.name for path in tmp_path.iterdir()} == before - {"1", "2"}


@pytest.mark.parametrize("to", ["nowhere", "empty", "damaged"])
def test_a_link_is_not_written_over(tmp_path: Path, to: str) -> None:
    """Said before anything is written."""
    model, spec = made()
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "damaged", fs.shard(model, spec), spec)
    next((tmp_path / "damaged").glob("*.distcp")).unlink()
    (tmp_path / "link").symlink_to(to)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match=r"link: expected a path where nothing is"):
        checkpoint.save(tmp_path / "link", fs.shard(model, spec), spec)
    assert sorted(tmp_path.iterdir()) == before


@contextlib.contextmanager
def as_user(uid: int) -> Generator[None]:
    """As another user, for root."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_clean_leaves_what_belongs_to_others() -> None:
    """It does not raise after it has removed the first ones, and returns only what is gone."""
    model, spec = made()
    params = fs.shard(model, spec)
    with tempfile.TemporaryDirectory() as name:  # pytest's directories are for their owner alone
        folder = Path(name)
        folder.chmod(0o777)
        theirs = staging.Target(folder / "theirs")  # root's
        theirs._locked.close()
        checkpoint.save(folder / "1", params, spec)  # root's too, which the other user may rename, but not remove
        with as_user(65534):
            for step in ("2", "3"):
                checkpoint.save(folder / step, params, spec)
            with pytest.warns(UserWarning, match="1 stays, because this user may not remove it"):
                assert checkpoint.clean(folder, keep=1) == [folder / "2"]
        assert {path.name for path in folder.iterdir()} == {"1", "3", "theirs"}
        assert checkpoint.load(folder / "1", spec)["0"].equal(params["0"])
        assert set(checkpoint.clean(folder, keep=1)) == {folder / "1", folder / "theirs"}


def test_clean_returns_only_what_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory whose removal fails halfway is no checkpoint any more, and is not returned before it is gone."""
    model, spec = made()
    for name in ("1", "2"):
        checkpoint.save(tmp_path / name, fs.shard(model, spec), spec)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "remove", lambda path: path.unlink() if path.name == "funshard.json" else None)
        assert checkpoint.clean(tmp_path, keep=1) == []
    (left,) = (path for path in tmp_path.iterdir() if path.name != "2")
    assert checkpoint.clean(tmp_path, keep=1) == [left]
    assert list(tmp_path.iterdir()) == [tmp_path / "2"]
