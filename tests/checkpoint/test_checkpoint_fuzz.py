"""FUZZ of the files of checkpoints: a reader of any bytes has what was saved, or one of three errors, soon and for good.

No crash, no hang, no class of the process changed, no other value, and no more memory than the files have. By default a few
cases of each kind of file, 5,000 in all with --thorough.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from depth import depth
from hostile import made, process_state, save, set_manifest
from safetensors.torch import save_file
from torch import Tensor

import funshard as fs
from funshard import checkpoint

CASES = depth(60, 1000)
SECONDS = 20
"""That a case may take; most take some milliseconds."""
ERRORS = ("CheckpointError", "NewerError", "ValueError", "FileNotFoundError")
"""What a reader may raise, and nothing that inherits from these, such as UnicodeDecodeError."""
EXTREMES = [b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, struct.pack("<q", 1 << 60), struct.pack("<i", -1), b"\x7f"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``ours``, and ``tensors`` of safetensors in several files."""
    path = tmp_path_factory.mktemp("fuzz")
    save(path / "ours")
    model, spec = made()
    checkpoint.export(path / "tensors", fs.shard(model, spec), spec, shard_bytes=1)
    (path / "tensor").mkdir()
    save_file(model.state_dict(), path / "tensor" / "model.safetensors")
    return path


# --- Mutations. ---


def mutated(raw: bytes, random: random.Random) -> bytes:
    """Other bytes: some are changed, left out, doubled, put elsewhere or cut off."""
    out = bytearray(raw)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at, length = random.randrange(len(out) + 1), random.choice((1, 1, 2, 4, 8, random.randrange(64)))
        match random.randrange(7):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << random.randrange(8)
            case 2:
                out[at : at + length] = random.randbytes(length)
            case 3:
                del out[at : at + length]
            case 4:
                piece = random.choice(EXTREMES)
                out[at : at + len(piece) * random.randrange(2)] = piece
            case 5:
                begin = random.randrange(len(out) + 1)
                out[at:at] = out[begin : begin + length]
            case _:
                out[at:] = out[at:] if random.randrange(8) else b""
    return bytes(out)


JUNK: list[Any] = [
    *(None, True, 0, -1, 1 << 62, 1 << 200, 0.5, float("nan"), "", "load", "..", "__0_0.distcp", "a\0b", "\ud800", [], {}),
    *(
        [[]],
        {"list": [[]]},
        {"value": {}},
        {"value": 3},
        {"dtype": "load"},
        {"dtype": "float64"},
        {"bytes": "%%"},
        {"units": {}},
    ),
    *({"tensor": [[3], {"dtype": "int64"}, False, False, False]}, {"slice": {"dtype": "float32"}}, {"other": []}),
    {"matrix": [{"value": 1}, {"dict": []}, {"dict": []}]},
]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """``(container, key)`` of everything in it."""
    for key, child in list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()):
        yield data, key
        yield from places(child)


def change_tree(data: Any, random: random.Random) -> Any:
    """Another value, type, key or order somewhere in a tree."""
    for _ in range(random.choice((1, 1, 2))):
        every = [*places(data)]
        if not every:
            break
        container, key = random.choice(every)
        match random.randrange(5):
            case 0 | 1:
                container[key] = copy.deepcopy(random.choice(JUNK))
            case 2:
                del container[key]
            case 3:
                other, place = random.choice(every)
                if isinstance(other, dict | list) and (place in other if isinstance(other, dict) else place < len(other)):
                    container[key] = json.loads(json.dumps(other[place]))
            case _:
                if isinstance(container, dict):
                    container[random.choice(("of", "value", "units", "dict", "list", "matrix"))] = container.pop(key)
    return data


# --- What came of it. ---


@contextmanager
def in_time(case: str) -> Iterator[None]:
    """An error where it hangs."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"{case}: it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, SECONDS)  # of the whole test
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, remaining)


def outcome(case: str, read: Callable[[], Any], check: Callable[[Any], None]) -> str:
    """ "read", or the kind of error."""
    found = failed = None
    with in_time(case):
        try:
            found = read()
        except Exception as error:
            failed = error
    if failed is None:
        check(found)
        return "read"
    assert type(failed).__name__ in ERRORS, (case, failed)
    assert str(failed), case
    return type(failed).__name__


def is_one_of(found: Any, expected: list[Tensor]) -> bool:
    return any(one.dtype == found.dtype and one.shape == found.shape and one.equal(found) for one in expected)


def tensors_of(state: Any) -> list[Any]:
    return [leaf for leaf in optree.tree_leaves(state, namespace="funshard") if isinstance(leaf, Tensor)]


@contextmanager
def unchanged() -> Iterator[list[str]]:
    """Of the process, but for what was read; of the outcomes some are errors."""
    before, memory = process_state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: list[str] = []
    yield outcomes
    assert process_state() == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (1 << 20)  # a GB, in kB
    assert {"CheckpointError", "read"} <= {*outcomes} or len(outcomes) < 20
    assert outcomes.count("CheckpointError") > len(outcomes) // 10


# --- Each kind of file. ---


@pytest.mark.timeout(1800)
def test_records(files: Path, tmp_path: Path) -> None:
    """The file of tensors."""
    shutil.copytree(files / "ours", path := tmp_path / "1")
    model, spec = made()
    expected = fs.shard(model, spec)
    good = next(path.glob("__0_0*")).read_bytes()

    def check(found: Any) -> None:
        assert all(found[key].equal(shard) for key, shard in expected.items())

    with unchanged() as outcomes:
        for seed in range(CASES):
            next(path.glob("__0_0*")).write_bytes(mutated(good, random.Random(seed)))
            outcomes.append(outcome(f"{seed}", lambda: checkpoint.load(path, spec, only="params"), check))


@pytest.mark.timeout(1800)
def test_manifests(files: Path, tmp_path: Path) -> None:
    """funshard.json: bytes, text and trees, the latter two with a good checksum. Tensors are some that were saved."""
    shutil.copytree(files / "ours", path := tmp_path / "1")
    _, spec = made()
    good = (path / "funshard.json").read_bytes()
    content = json.loads(good)["content"]
    expected = tensors_of(checkpoint.load(path, spec))

    def check(found: Any) -> None:
        for leaf in optree.tree_leaves(found, none_is_leaf=True, namespace="funshard"):
            if isinstance(leaf, Tensor):
                assert is_one_of(leaf, expected)
            else:
                assert type(leaf) in (int, float, str, bytes, bool, type(None), torch.dtype), leaf

    with unchanged() as outcomes, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # `latest` says what it passes over
        for seed in range(CASES):
            rng = random.Random(seed)
            if seed % 4 == 0:
                (path / "funshard.json").write_bytes(mutated(good, rng))
            elif seed % 4 == 1:
                set_manifest(path, mutated(content.encode(), rng).decode("utf-8", "replace"))
            else:
                set_manifest(path, json.dumps(change_tree(json.loads(content), rng)))
            outcomes.append(outcome(f"{seed}", lambda: checkpoint.load(path, spec), check))
            with in_time(f"latest {seed}"):
                assert checkpoint.latest(tmp_path) in (path, None)


@pytest.mark.timeout(1800)
def test_headers_of_safetensors(files: Path, tmp_path: Path) -> None:
    """The header of a file, which has no checksum, and the index of several."""
    model, spec = made()
    expected = fs.shard(model, spec)
    shutil.copytree(files / "tensors", pieces := tmp_path / "pieces")
    shutil.copytree(files / "tensor", whole := tmp_path / "whole")
    file, index = whole / "model.safetensors", pieces / "model.safetensors.index.json"
    good, listed = file.read_bytes(), index.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")

    def check(found: Any) -> None:
        assert all(found[key].equal(shard) for key, shard in expected.items())

    with unchanged() as outcomes:
        for seed in range(CASES):
            rng = random.Random(seed)
            if seed % 3:
                file.write_bytes(mutated(good[:end], rng) + good[end:])
            else:
                text = json.dumps(change_tree(json.loads(listed), rng)).encode()
                index.write_bytes(text if seed % 2 else mutated(listed, rng))
            where = whole if seed % 3 else pieces
            outcomes.append(outcome(f"{seed}", lambda where=where: checkpoint.read_safetensors(where, spec), check))
