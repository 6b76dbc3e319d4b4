"""Files that were made to mislead: whoever reads a checkpoint gets what was saved or an error, and nothing else happens."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_most
from hostile import change_manifest, made, save, theirs
from models import refused
from torch.testing import assert_close

import funshard as fs
from funshard import checkpoint
from funshard.checkpoint import CheckpointError, _checkpoint, _leaves
from funshard.checkpoint import _directory as staging

# --- A manifest with a good checksum that says what no manifest says. ---


def set_state(node: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["state"]["dict"][-1].__setitem__(1, node)


def set_dtype(content: dict[str, Any]) -> None:
    content["state"]["dict"][2][1] = {"value": {"dtype": "load"}}


def set_units(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["state"]["dict"][0][1]["units"].update(fields)


def text_of(text: str) -> Callable[[Path], Any]:
    return lambda path: (path / "funshard.json").write_text(text)


def replaced(by: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def replace(path: Path) -> None:
        (path / "funshard.json").unlink()
        by(path / "funshard.json")

    return replace


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no version": (lambda content: content.pop("version"), "field 'version'"),
    "a version of another type": (lambda content: content.update(version="1"), "field 'version'"),
    "no sequence": (lambda content: content.pop("sequence"), "field 'sequence'"),
    "a sequence of another type": (lambda content: content.update(sequence="1"), "field 'sequence'"),
    "a sequence without end": (lambda content: content.update(sequence=10**400), "field 'sequence'"),
    "no files": (lambda content: content.pop("files"), "field 'files'"),
    "a list of files": (lambda content: content.update(files=["__0_0.distcp"]), "field 'files'"),
    "a size of another type": (lambda content: content.update(files={"__0_0.distcp": None}), "field 'files'"),
    "a file elsewhere": (lambda content: content.update(files={"../1/__0_0.distcp": 3}), "field 'files'"),
    "a name without end": (lambda content: content.update(files={"a\0b": 3}), "field 'files'"),
    "a huge file": (lambda content: content.update(files=dict.fromkeys(content["files"], 1 << 60)), "is cut short"),
    "no state": (lambda content: content.pop("state"), "field 'state'"),
    "a list": (lambda content: [content], "expected an object"),
}
STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an empty state": lambda content: content.update(state={}),
    "a dtype that is none": set_dtype,
    "bytes that are none": set_state({"value": {"bytes": "%"}}),
    "a dict as a value": set_state({"value": {"a": 1}}),
    "an unknown node": set_state({"object": 1}),
    "a shape of another type": set_state({"tensor": ["3", {"dtype": "int64"}, False, False, False]}),
    "a shape without end": set_state({"tensor": [[1 << 70], {"dtype": "int64"}, False, False, False]}),
    "a negative shape": set_state({"tensor": [[-3], {"dtype": "int64"}, False, False, False]}),
    "a short leaf": set_state({"tensor": [[3]]}),
    "a dict of no pairs": set_state({"dict": [1]}),
    "a key that is a list": set_state({"dict": [[[1], {"value": 1}]]}),
    "other fields": set_state({"LossScale": [["scale", {"value": 1}]]}),
    "units without parameters": set_units(params=None),
    "a parameter without a name": set_units(params=[[[], "float32", {"value": 1}]]),
    "a parameter that is units": set_units(params=[[["0.weight"], "float32", {"units": {}}]]),
    "matrices of nothing": set_units(params=[[["0.weight"], "float32", {"matrix": [{"value": 1}]}]]),
}
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (text_of("{"), "'funshard.json' is damaged"),
    "a number": (text_of("3"), "expected an object"),
    "no content": (text_of('{"crc32": 1}'), "field 'content'"),
    "deep text": (text_of("[" * 100_000 + "]" * 100_000), "'funshard.json' is damaged"),
    "half a character": (text_of(json.dumps({"content": "\ud800", "crc32": 1})), "'funshard.json' is damaged"),
    "a FIFO": (replaced(os.mkfifo), "expected a regular file as 'funshard.json', got .*FIFO"),
    "a device without end": (replaced(lambda file: file.symlink_to("/dev/zero")), "expected a regular file"),
    "a directory": (replaced(os.mkdir), "expected a regular file"),
    "a link to itself": (replaced(lambda file: file.symlink_to(file.name)), "got .* or a link that leads to none"),
}
DAMAGES = FILES | {
    name: (lambda path, change=change: change_manifest(path, change), text) for name, (change, text) in MANIFESTS.items()
}


@at_most(9)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", DAMAGES)
def test_one_bad_neighbour_blocks_nothing(tmp_path: Path, saved_once: Path, name: str) -> None:
    """It is damaged, and an error says why; `latest`, `clean` and `save` go on."""
    damage, text = DAMAGES[name]
    for number in ("1", "2"):
        shutil.copytree(saved_once, tmp_path / number)
    damage(tmp_path / "2")
    _, spec = made()
    with pytest.warns(UserWarning, match=rf"passed over a damaged checkpoint: .*{text}"):
        assert checkpoint.latest(tmp_path) == tmp_path / "1"
    if name != "a huge file":
        refused(CheckpointError, text, lambda: checkpoint.load(tmp_path / "2", spec))
    checkpoint.save(tmp_path / "3", {"step": 3}, spec)
    assert checkpoint.clean(tmp_path, keep=1) == [tmp_path / "1"]
    with pytest.warns(UserWarning, match="takes the place of a damaged checkpoint"):
        checkpoint.save(tmp_path / "2", {"step": 4}, spec)
    assert checkpoint.latest(tmp_path) == tmp_path / "2"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", STATES)
def test_a_state_that_was_not_saved_is_an_error(tmp_path: Path, saved_once: Path, name: str) -> None:
    """Under a good checksum, as only another program writes it: `load` raises one of its errors and builds nothing else."""
    shutil.copytree(saved_once, tmp_path / "1")
    change_manifest(tmp_path / "1", STATES[name])
    refused((CheckpointError, ValueError), r"damaged|expected", lambda: checkpoint.load(tmp_path / "1", made()[1]))


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "1"
    save(path)
    return path


def test_latest_of_two_jobs_is_the_one_that_ended_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever began first, and whatever names they have; also if both had the same sequence before they knew."""
    _, spec = made()
    real = staging.Target.commit

    def commit(self: Any, *args: Any) -> None:
        monkeypatch.setattr(staging.Target, "commit", real)
        checkpoint.save(tmp_path / "z", {"job": 2}, spec)  # begins later and ends before
        real(self, *args)

    monkeypatch.setattr(staging.Target, "commit", commit)
    checkpoint.save(tmp_path / "a", {"job": 1}, spec)
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    for name in ("a", "z"):
        change_manifest(tmp_path / name, lambda content: content.update(sequence=(1 << 63) - 1))
    os.utime(tmp_path / "a" / "funshard.json", ns=(1, 1))
    assert checkpoint.latest(tmp_path) == tmp_path / "z"
    os.utime(tmp_path / "z" / "funshard.json", ns=(0, 0))
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    checkpoint.save(tmp_path / "b", {"job": 3}, spec)  # after the last number that there is
    assert checkpoint.latest(tmp_path) == tmp_path / "b"
    assert checkpoint.clean(tmp_path, keep=1) == [tmp_path / "z", tmp_path / "a"]


def test_a_state_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    """As deep as what `load` takes, and no deeper."""
    _, spec = made()

    def deep(depth: int) -> Any:
        return [deep(depth - 1)] if depth else 1

    checkpoint.save(tmp_path / "1", deep(100), spec)
    assert checkpoint.load(tmp_path / "1", spec) == deep(100)
    with pytest.raises(ValueError, match=r"expected at most 100 containers in each other"):
        checkpoint.save(tmp_path / "2", deep(101), spec)
    with pytest.raises(ValueError, match=r"state 'x': expected at most 64 dimensions, got 65"):
        checkpoint.save(tmp_path / "2", {"x": torch.zeros([1] * 65)}, spec)


# --- No pickle is run. ---


class Hostile:
    """What a pickle of it does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    """Neither torch's metadata nor what is around the elements of a tensor; what has torch's metadata alone is refused."""
    model, spec = made()
    checkpoint.save(tmp_path / "1", shards := fs.shard(model, spec), spec)
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "owned")))
    (file,) = (tmp_path / "1").glob("__0_0_*")
    raw = file.read_bytes()
    evil = pickle.dumps(Hostile(tmp_path / "owned"))[:64]
    file.write_bytes(evil + raw[len(evil) :])
    assert_close(checkpoint.load(tmp_path / "1", spec), shards, rtol=0, atol=0)
    (tmp_path / "1" / "funshard.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"which has a file 'funshard\.json'.*fs\.checkpoint\.from_dcp\(path, new_path\)"
    ):
        checkpoint.load(tmp_path / "1", spec)
    assert not (tmp_path / "owned").exists()


def test_what_is_saved_every_python_reads(tmp_path: Path) -> None:
    """torch's metadata names no class that another Python keeps elsewhere, or does not have."""
    save(tmp_path / "1")
    strings = {arg for _, arg, _ in pickletools.genops((tmp_path / "1" / ".metadata").read_bytes()) if isinstance(arg, str)}
    assert not any("pathlib" in text or str(tmp_path) in text for text in strings)
    assert strings


# --- An index that lies. ---


def boxes_of(*boxes: tuple[list[int], list[int]]) -> Callable[[Any], None]:
    """The boxes of the first weight, all of them at the place of its one record."""

    def change(content: dict[str, Any]) -> None:
        tensor = first_weight(content)
        tensor[3] = [[offsets, sizes, *tensor[3][0][2:]] for offsets, sizes in boxes]

    return change


def first_weight(content: dict[str, Any]) -> list[Any]:
    return next(tensor for tensor in content["tensors"] if tensor[0][0] == "params.0.weight")


def every_place(at: int, value: Any) -> Callable[[Any], None]:
    """Another file (2), offset (3) or checksum (4) of each box."""

    def change(content: dict[str, Any]) -> None:
        for _, _, _, boxes in content["tensors"]:
            for box in boxes:
                box[at] = value

    return change


def weight_is(at: int, value: Any) -> Callable[[Any], None]:
    return lambda content: first_weight(content).__setitem__(at, value)


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "twice the same rows": (boxes_of(([0, 0], [3, 4]), ([0, 0], [2, 4])), "'params.0.weight' .* damaged: its pieces overlap"),
    "rows that overlap": (boxes_of(([0, 0], [3, 4]), ([2, 0], [2, 4])), "damaged: its pieces overlap"),
    "rows beyond the end": (boxes_of(([0, 0], [3, 4]), ([4, 0], [2, 4])), r"the piece of \[2, 4\] at \[4, 0\] is not inside"),
    "rows that are left out": (boxes_of(([0, 0], [3, 4])), "expected 20 elements in its pieces, got 12"),
    "rows twice": (boxes_of(([0, 0], [5, 4]), ([1, 0], [2, 4])), "expected 20 elements in its pieces, got 28"),
    "smaller records": (boxes_of(([0, 0], [1, 4]), ([1, 0], [4, 4])), "its checksum is not that in 'funshard.json'"),
    "no box": (boxes_of(), "expected 20 elements in its pieces, got 0"),
    "a file elsewhere": (every_place(2, "../1/__0_0.distcp"), "expected a file of the checkpoint's directory"),
    "no file": (every_place(2, None), "a file of the checkpoint's directory, got None"),
    "a place that is none": (every_place(3, -1), "no less than 0, got -1"),
    "a place of another type": (every_place(3, "0"), "no less than 0, got '0'"),
    "a huge place": (every_place(3, 1 << 62), "damaged: it was cut short"),
    "another place": (every_place(3, 0), "its checksum is not that in 'funshard.json'"),
    "a checksum of another type": (every_place(4, None), "no less than 0, got None"),
    "a box of other dimensions": (boxes_of(([0], [20])), r"expected 2 sizes or places, got \[0\]"),
    "a huge box": (boxes_of(([0, 0], [1 << 60, 4])), "is not inside of"),
    "a box of another type": (weight_is(3, ["54"]), "is damaged"),
    "a shape without end": (weight_is(2, [1] * 65), "expected 64 sizes or places"),
    "a dtype that is none": (weight_is(1, "load"), "expected a dtype of this torch, got 'load'"),
    "names that are none": (weight_is(0, [3]), r"expected names, got \[3\]"),
    "no boxes": (weight_is(3, None), "is damaged"),
    "no index": (lambda content: content.update(tensors=None), r"which version 0\.2 did not write: fs\.checkpoint\.from_dcp"),
    "an index of another type": (lambda content: content.update(tensors=3), "is damaged"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies_is_refused(tmp_path: Path, saved_once: Path, name: str) -> None:
    """Boxes tile each tensor, and each is what was written: nothing that nobody wrote is taken for a weight."""
    change, text = LIES[name]
    shutil.copytree(saved_once, tmp_path / "1")
    change_manifest(tmp_path / "1", change)
    refused(CheckpointError, text, lambda: checkpoint.load(tmp_path / "1", made()[1], only="params"))


# --- Checkpoints of others are written anew, by torch's reader. ---


def test_from_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's trainers and of funshard 0.2: a tensor at a time, with the state as it was, or nothing is there."""
    loads, load = [], _checkpoint.load_by_torch
    monkeypatch.setattr(
        _checkpoint, "load_by_torch", lambda tensors, **options: loads.append(len(tensors)) or load(tensors, **options)
    )
    monkeypatch.setattr(_leaves, "MAX_BOX_BYTES", 32)
    model, spec = made()
    theirs(tmp_path / "theirs")
    path = checkpoint.from_dcp(tmp_path / "theirs", tmp_path / "1")
    assert len(loads) > 1 == max(loads)
    assert_close(checkpoint.load(path, spec, only="model"), fs.shard(model, spec), rtol=0, atol=0)
    state = save(tmp_path / "old")
    change_manifest(tmp_path / "old", lambda content: (content.pop("tensors"), content.update(version=1, metadata=1)))
    with pytest.raises(CheckpointError, match=r"expected an index of tensors.*fs\.checkpoint\.from_dcp\(path, new_path\)"):
        checkpoint.load(tmp_path / "old", spec)
    assert checkpoint.latest(tmp_path) == tmp_path / "old"
    checkpoint.from_dcp(tmp_path / "old", str(tmp_path / "2"))
    found = checkpoint.load(tmp_path / "2", spec)
    for name in ("dtype", "bytes", "list"):
        assert found.pop(name) == state.pop(name)
    assert_close(found, state, rtol=0, atol=0)
    next((tmp_path / "old").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"old: torch\.distributed\.checkpoint cannot read it: FileNotFoundError"):
        checkpoint.from_dcp(tmp_path / "old", tmp_path / "3")
    assert not (tmp_path / "3").exists()
    with pytest.raises(FileExistsError):
        checkpoint.from_dcp(tmp_path / "theirs", tmp_path / "1")
    (tmp_path / "theirs" / ".metadata").write_bytes(b"cpathlib._later\nPosixPath\n.")  # as a newer Python names a class
    with pytest.raises(CheckpointError, match=r"theirs: expected the Python and torch that wrote it, got others: .*_later"):
        checkpoint.from_dcp(tmp_path / "theirs", tmp_path / "4")
