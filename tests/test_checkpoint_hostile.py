"""Files that were made to mislead: whoever reads a checkpoint gets what was saved or an error, and nothing else happens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import funshard as fs
from funshard import checkpoint
from funshard.checkpoint import CheckpointError, _commit
from funshard.checkpoint._regular import checksum


def made() -> tuple[nn.Module, fs.PartitionSpec]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return model, fs.by_type(nn.Linear)(model)


def save(path: Path) -> None:
    model, spec = made()
    params = fs.shard(model, spec)
    init, _ = fs.optim.from_torch(torch.optim.AdamW, lr=0.1)
    more = {"dtype": torch.bfloat16, "bytes": b"b", "list": [1, (2.5, None)], "tensor": torch.arange(3)}
    checkpoint.save(path, {"params": params, "opt": init(params), **more}, spec)


# --- A manifest with a good checksum that says what no manifest says. ---


def change_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "funshard.json"
    content = json.loads(json.loads(file.read_text())["content"])
    text = json.dumps(changed if isinstance(changed := change(content), list) else content)
    file.write_text(json.dumps({"content": text, "crc32": checksum(text.encode())}))


def set_state(node: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["state"]["dict"][-1].__setitem__(1, node)


def nested(depth: int) -> Any:
    node: Any = {"value": 1}
    for _ in range(depth):
        node = {"list": [node]}
    return node


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
    "no version": (lambda content: content.pop("version"), "a field 'version'"),
    "a version of another type": (lambda content: content.update(version="1"), "field 'version'"),
    "no sequence": (lambda content: content.pop("sequence"), "a field 'sequence'"),
    "a sequence of another type": (lambda content: content.update(sequence="1"), "field 'sequence'"),
    "a sequence without end": (lambda content: content.update(sequence=10**400), "field 'sequence'"),
    "no files": (lambda content: content.pop("files"), "a field 'files'"),
    "a list of files": (lambda content: content.update(files=["__0_0.distcp"]), "field 'files'"),
    "a size of another type": (lambda content: content.update(files={"__0_0.distcp": None}), "field 'files'"),
    "a file elsewhere": (lambda content: content.update(files={"../1/__0_0.distcp": 3}), "field 'files'"),
    "a name without end": (lambda content: content.update(files={"a\0b": 3}), "field 'files'"),
    "a huge file": (lambda content: content.update(files={"__0_0.distcp": 1 << 60}), "is cut short"),
    "another checksum": (lambda content: content.update(metadata=[1]), "field 'metadata'"),
    "no state": (lambda content: content.pop("state"), "a field 'state'"),
    "an empty state": (lambda content: content.update(state={}), "state ''"),
    "a list": (lambda content: [content], "expected an object"),
    "a dtype that is none": (set_dtype, "state 'dtype': expected .* a dtype of this torch, got .*load"),
    "bytes that are none": (set_state({"value": {"bytes": "%"}}), "state 'tensor': expected .* bytes"),
    "a dict as a value": (set_state({"value": {"a": 1}}), "state 'tensor'"),
    "an unknown node": (set_state({"object": 1}), "state 'tensor': expected a container or a leaf"),
    "a shape of another type": (set_state({"tensor": ["3", {"dtype": "int64"}, False, False, False]}), "expected a shape"),
    "a shape without end": (set_state({"tensor": [[1 << 70], {"dtype": "int64"}, False, False, False]}), "expected a shape"),
    "a negative shape": (set_state({"tensor": [[-3], {"dtype": "int64"}, False, False, False]}), "expected a shape"),
    "a short leaf": (set_state({"tensor": [[3]]}), "expected a list of 5"),
    "a dict of no pairs": (set_state({"dict": [1]}), "expected a list of 2"),
    "a key that is a list": (set_state({"dict": [[[1], {"value": 1}]]}), "state 'tensor'"),
    "a key twice": (set_state({"dict": [["a", {"value": 1}], ["a", {"value": 2}]]}), "each key once"),
    "other fields": (set_state({"LossScale": [["scale", {"value": 1}]]}), "the fields"),
    "a factory that is none": (set_state({"defaultdict": [], "of": "open"}), "nothing else of a defaultdict"),
    "a length that is none": (set_state({"deque": [], "of": -1}), "nothing else of a deque"),
    "deeply nested": (lambda content: content.update(state=nested(150)), "at most 100 containers in each other"),
    "units without parameters": (set_units(params=None), "field 'params'"),
    "a parameter without a name": (set_units(params=[[[], "float32", {"value": 1}]]), "the names of a parameter"),
    "a parameter of no dtype": (set_units(params=[[["a"], "load", {"value": 1}]]), "a dtype of this torch"),
    "a parameter that is units": (set_units(params=[[["a"], "float32", {"units": {}}]]), "a leaf of a unit"),
    "units of another kind": (set_units(kind="list"), "expected one of dict"),
    "matrices of nothing": (set_units(params=[[["a"], "float32", {"matrix": [{"value": 1}]}]]), "a list of 3"),
}
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (text_of("{"), "'funshard.json' is damaged"),
    "a number": (text_of("3"), "expected an object"),
    "no content": (text_of('{"crc32": 1}'), "a field 'content'"),
    "deep text": (text_of("[" * 100_000 + "]" * 100_000), "'funshard.json' is damaged"),
    "half a character": (text_of(json.dumps({"content": "\ud800", "crc32": 1})), "'funshard.json' is damaged"),
    "a FIFO": (replaced(os.mkfifo), "expected a regular file as 'funshard.json', got .*FIFO"),
    "a device without end": (replaced(lambda file: file.symlink_to("/dev/zero")), "expected a regular file"),
    "a directory": (replaced(os.mkdir), "expected a regular file"),
    "a FIFO that describes": (
        lambda path: ((path / ".metadata").unlink(), os.mkfifo(path / ".metadata")),
        "'.metadata' is damaged or missing",
    ),
}
DAMAGES = FILES | {
    name: (lambda path, change=change: change_manifest(path, change), text) for name, (change, text) in MANIFESTS.items()
}


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
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(tmp_path / "2", spec)
    checkpoint.save(tmp_path / "3", {"step": 3}, spec)
    assert checkpoint.clean(tmp_path, keep=1) == [tmp_path / "1"]
    with pytest.warns(UserWarning, match="takes the place of a damaged checkpoint"):
        checkpoint.save(tmp_path / "2", {"step": 4}, spec)
    assert checkpoint.latest(tmp_path) == tmp_path / "2"


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "1"
    save(path)
    return path


def test_latest_of_two_jobs_is_the_one_that_ended_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever began first, and whatever names they have; also if both had the same sequence before they knew."""
    _, spec = made()
    real = _commit.Aside.commit

    def commit(self: Any, *args: Any) -> None:
        monkeypatch.setattr(_commit.Aside, "commit", real)
        checkpoint.save(tmp_path / "z", {"job": 2}, spec)  # begins later and ends before
        real(self, *args)

    monkeypatch.setattr(_commit.Aside, "commit", commit)
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
