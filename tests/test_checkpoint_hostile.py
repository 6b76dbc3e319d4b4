"""Files that were made to mislead: whoever reads a checkpoint gets what was saved or an error, and nothing else happens."""

from __future__ import annotations

import contextlib
import enum
import io
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
from hostile import made, process_state, save, theirs
from torch.distributed.checkpoint import metadata as dcp
from torch.testing import assert_close

import funshard as fs
from funshard import checkpoint
from funshard.checkpoint import CheckpointError
from funshard.checkpoint import _directory as staging
from funshard.checkpoint._files import checksum

# --- A manifest with a good checksum that says what no manifest says. ---


def change_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "funshard.json"
    content = json.loads(json.loads(file.read_text())["content"])
    text = json.dumps(changed if isinstance(changed := change(content), list) else content)
    file.write_text(json.dumps({"content": text, "crc32": checksum(text.encode())}))


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
    "another checksum": (lambda content: content.update(metadata=[1]), "field 'metadata'"),
    "records of another type": (lambda content: content.update(records=[1]), "field 'records'"),
    "records of no file": (lambda content: content.update(records={"__0_0.distcp": 3}), "an object for each file"),
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
    "a link to itself": (replaced(lambda file: file.symlink_to(file.name)), "got a link that leads to itself"),
    "a link to itself that describes": (
        lambda path: ((path / ".metadata").unlink(), (path / ".metadata").symlink_to(".metadata")),
        "'.metadata' is damaged or missing",
    ),
    "a FIFO that describes": (
        lambda path: ((path / ".metadata").unlink(), os.mkfifo(path / ".metadata")),
        "'.metadata' is damaged or missing",
    ),
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
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(tmp_path / "2", spec)
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
    with pytest.raises((CheckpointError, ValueError), match=r"damaged|expected"):
        checkpoint.load(tmp_path / "1", made()[1])


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "1"
    save(path)
    return path


def test_a_lost_manifest_is_named(tmp_path: Path, saved_once: Path) -> None:
    """What is left is read as a checkpoint of another program, which has other names."""
    shutil.copytree(saved_once, tmp_path / "1")
    (tmp_path / "1" / "funshard.json").unlink()
    with pytest.raises(ValueError, match=r"is not in the checkpoint: .*; the checkpoint has .* lost its funshard\.json\?"):
        checkpoint.load(tmp_path / "1", made()[1])


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


def test_a_hostile_description_is_not_run(tmp_path: Path) -> None:
    model, spec = made()
    checkpoint.save(tmp_path / "1", fs.shard(model, spec), spec)
    (tmp_path / "1" / "funshard.json").unlink()  # as if others had written it
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "owned"), protocol))
        with pytest.raises(
            CheckpointError, match=r"asks for posix\.mkdir, which is no description of tensors: it is not loaded"
        ):
            checkpoint.load(tmp_path / "1", spec)
    assert not (tmp_path / "owned").exists()


class Early(pickle.Pickler):
    """Python 3.11's first releases write a member of an enumeration down as ``getattr(enumeration, name)``."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


class Attribute:
    """What a pickle of it asks for."""

    def __init__(self, of: Any, name: str) -> None:
        self.asked = of, name

    def __reduce__(self) -> Any:
        return getattr, self.asked


def test_members_of_enumerations_and_no_other_attributes(tmp_path: Path) -> None:
    """However this Python writes them: those that torch describes a tensor's memory with."""
    model, spec = made()
    checkpoint.save(tmp_path / "1", shards := fs.shard(model, spec), spec)
    (tmp_path / "1" / "funshard.json").unlink()
    metadata = tmp_path / "1" / ".metadata"
    content = io.BytesIO()
    Early(content).dump(pickle.loads(metadata.read_bytes()))
    metadata.write_bytes(content.getvalue())
    assert b"getattr" in content.getvalue()
    assert_close(checkpoint.load(tmp_path / "1", spec, check=False), shards, rtol=0, atol=0)
    for of, name in ((dcp.Metadata, "__init__"), (dcp._MEM_FORMAT_ENCODING, "__class__"), (dcp._MEM_FORMAT_ENCODING, "mro")):
        metadata.write_bytes(pickle.dumps(Attribute(of, name)))
        with pytest.raises(CheckpointError, match=r"expected an object of Metadata, got .*builtins\.getattr"):
            checkpoint.load(tmp_path / "1", spec)


def test_a_hostile_tensor_is_not_run(tmp_path: Path) -> None:
    """In the place of every tensor: torch.save of something else, with good checksums."""
    model, spec = made()
    checkpoint.save(tmp_path / "1", fs.shard(model, spec), spec)
    (path,) = (tmp_path / "1").glob("__0_0_*")
    out = bytearray()
    metadata = pickle.loads((tmp_path / "1" / ".metadata").read_bytes())
    storage: Any = metadata.storage_data
    evil = tmp_path / "evil"
    torch.save({"x": Hostile(tmp_path / "owned")}, evil)
    for info in storage.values():
        info.offset, info.length = len(out), evil.stat().st_size
        out += evil.read_bytes()
    path.write_bytes(out)
    (tmp_path / "1" / "funshard.json").unlink()
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"is damaged: UnpicklingError: torch\.load\(weights_only=True\) refuses it"):
        checkpoint.load(tmp_path / "1", spec)
    assert not (tmp_path / "owned").exists()


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    model, spec = made()
    checkpoint.save(tmp_path / "1", fs.shard(model, spec), spec)
    metadata = pickle.loads((tmp_path / "1" / ".metadata").read_bytes())
    storage: Any = metadata.storage_data
    for info in storage.values():
        info.relative_path = "../1/__0_0.distcp"
    (tmp_path / "1" / "funshard.json").unlink()
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"expected a file of the checkpoint's directory"):
        checkpoint.load(tmp_path / "1", spec)


# --- Which Python wrote it. ---

PATHS = {  # as pickle.dumps(Path(...), 4) of each has them
    "3.10": b"\x8c\x07pathlib\x94\x8c\tPosixPath\x94\x93\x94\x8c\x01a\x94\x8c\x011\x94\x86\x94R\x94",
    "3.13": b"\x8c\x0epathlib._local\x94\x8c\tPosixPath\x94\x93\x94\x8c\x03a/1\x94\x85\x94R\x94",
    "3.13 on Windows": b"\x8c\x0epathlib._local\x94\x8c\x0bWindowsPath\x94\x93\x94\x8c\x03a/1\x94\x85\x94R\x94",
}


@pytest.mark.parametrize("python", PATHS)
def test_a_description_of_any_python_is_read(tmp_path: Path, python: str) -> None:
    """torch's own has the checkpoint's path in it, whose class is elsewhere in Python 3.13."""
    _, spec = made()
    expected = theirs(tmp_path / "1")
    file = tmp_path / "1" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.checkpoint_id = "here it is"
    raw = pickle.dumps(metadata, 4)
    mark = b"\x8c\x0ahere it is\x94"
    assert raw.count(mark) == 1
    file.write_bytes(raw[:2] + raw[11:].replace(mark, PATHS[python]))  # without the frame, whose length it has
    found = checkpoint.load(tmp_path / "1", spec, only="model")
    assert all(found[key].equal(shard) for key, shard in fs.shard(expected, spec).items())


def test_what_is_saved_every_python_reads(tmp_path: Path) -> None:
    """It names no class that another Python keeps elsewhere, or does not have."""
    save(tmp_path / "1")
    strings = {arg for _, arg, _ in pickletools.genops((tmp_path / "1" / ".metadata").read_bytes()) if isinstance(arg, str)}
    assert not any("pathlib" in text or str(tmp_path) in text for text in strings)
    assert strings


# --- A description that lies. ---


def metadata_changed(path: Path, change: Callable[[Any], Any]) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_a_small_file_does_not_fill_memory(tmp_path: Path) -> None:
    """A tensor of any size fits into a few bytes where its steps are 0."""
    _, spec = made()
    theirs(tmp_path / "1")
    torch.save(torch.ones(1).expand(5, 4), tmp_path / "1" / "small")
    length = (tmp_path / "1" / "small").stat().st_size

    def change(metadata: Any) -> None:
        info = metadata.storage_data[dcp.MetadataIndex("model.0.weight", [0, 0])]
        vars(info).update(relative_path="small", offset=0, length=length)

    metadata_changed(tmp_path / "1", change)
    with pytest.raises(CheckpointError, match=r"its elements, \[5, 4\] in steps of \[0, 0\], are not all there"):
        checkpoint.load(tmp_path / "1", spec, only="model")


def boxes_of(*boxes: tuple[list[int], list[int]], size: tuple[int, ...] = (5, 4)) -> Callable[[Any], None]:
    """The chunks of the first weight, all of them at the place of its one record."""

    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["model.0.weight"]
        tensor.size = torch.Size(size)
        tensor.chunks = [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
        info = metadata.storage_data.pop(dcp.MetadataIndex("model.0.weight", [0, 0]))
        for offsets, _ in boxes:
            metadata.storage_data[dcp.MetadataIndex("model.0.weight", offsets)] = info

    return change


def every_info(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: [vars(info).update(fields) for info in metadata.storage_data.values()]


def first_chunk(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["model.0.weight"].chunks[0]).update(fields)


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "twice the same rows": (boxes_of(([0, 0], [3, 4]), ([0, 0], [2, 4])), "'model.0.weight' of .* damaged: its pieces overlap"),
    "rows that overlap": (boxes_of(([0, 0], [3, 4]), ([2, 0], [2, 4])), "damaged: its pieces overlap"),
    "rows beyond the end": (boxes_of(([0, 0], [3, 4]), ([4, 0], [2, 4])), r"the piece of \[2, 4\] at \[4, 0\] is not inside"),
    "rows that are left out": (boxes_of(([0, 0], [3, 4])), "expected 20 elements in its pieces, got 12"),
    "rows twice": (boxes_of(([0, 0], [5, 4]), ([1, 0], [2, 4])), "expected 20 elements in its pieces, got 28"),
    "a smaller record": (boxes_of(([0, 0], [1, 4]), ([1, 0], [4, 4])), r"expected \[1, 4\] torch.float32 there, got \[5, 4\]"),
    "no chunk": (boxes_of(), "expected 20 elements in its pieces, got 0"),
    "a file elsewhere": (every_info(relative_path="../1/__0_0.distcp"), "expected a file of the checkpoint's directory"),
    "no file": (every_info(relative_path=None), "a file of the checkpoint's directory, got None"),
    "a place that is none": (every_info(offset=-1), "no less than 0, got -1"),
    "a place of another type": (every_info(offset="0"), "no less than 0, got '0'"),
    "a huge place": (every_info(offset=1 << 62), "damaged: it was cut short"),
    "a huge length": (every_info(length=1 << 62), "damaged: it was cut short"),
    "a length too short": (every_info(length=100), "is damaged: "),
    "nothing": (every_info(length=0), "is damaged"),
    "bytes that were transformed": (every_info(transform_descriptors=["zstd"]), "got .transformed "),
    "a chunk of other dimensions": (first_chunk(sizes=torch.Size([20])), r"expected 2 dimensions, got \[20\]"),
    "a shape without end": (first_chunk(sizes=torch.Size([1] * 65)), "expected a shape of at most 64 dimensions"),
    "a huge chunk": (first_chunk(sizes=torch.Size([1 << 60, 4])), "is not inside of"),
    "a chunk of another type": (first_chunk(sizes="54"), "expected a shape"),
    "no chunks": (lambda m: vars(m.state_dict_metadata["model.0.weight"]).pop("chunks"), "a list as 'chunks'"),
    "no storage": (lambda m: vars(m).update(storage_data=None), "a dict as 'storage_data'"),
    "a chunk in no file": (lambda m: m.storage_data.pop(dcp.MetadataIndex("model.0.weight", [0, 0])), "in none of the files"),
    "no properties": (lambda m: vars(m.state_dict_metadata["model.0.weight"]).pop("properties"), "as 'properties'"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", LIES)
def test_a_description_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    """Chunks tile each tensor, and each is what its record holds: nothing that nobody wrote is taken for a weight."""
    change, text = LIES[name]
    _, spec = made()
    theirs(tmp_path / "1")
    metadata_changed(tmp_path / "1", change)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "1", spec, only="model")


# --- A pickle that changes the process. ---


def on(module: str, name: str, make: bytes = b"", state: bytes = b"N}\x8c\x04name\x8c\x04oopss\x86") -> bytes:
    return f"c{module}\n{name}\n".encode() + make + state + b"b"


ATTACKS: dict[str, bytes] = {
    "a class's attribute": on("pathlib", "PosixPath"),
    "a class's attribute by a dict": on("pathlib", "PurePosixPath", state=b"}\x8c\x04name\x8c\x04oopss"),
    "an attribute of torch's class": on("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    "a method": on("torch.distributed.checkpoint.metadata", "Metadata", state=b"N}\x8c\x08__init__Ns\x86"),
    "a function's defaults": on("torch.serialization", "_get_layout", state=b"N}\x8c\x0c__defaults__)s\x86"),
    "an enumeration": on("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    "a member of it": on("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", make=b"K\x00\x85R"),
    "a function that gives attributes": on("builtins", "getattr"),
    "a dtype": on("torch", "float32"),
    "an ordered dict": on("collections", "OrderedDict"),
    "an ordered dict of a deep key": b"ccollections\nOrderedDict\n])" + b"\x85" * 200_000 + b"K\x01\x86a\x85R",
    "the items of a class": b"ccollections\nOrderedDict\n\x8c\x01aK\x01s",
    "what is added to a class": b"cpathlib\nPosixPath\nK\x01a",
    "a call of what a call gave": b"cbuiltins\ngetattr\ncpathlib\nPosixPath\n\x8c\x04home\x86R)R",
    "a class of the extensions": b"\x82\x01",
    "a persistent id": b"K\x01Q",
    "a buffer of elsewhere": b"\x97",
    "an instance by a mark": b"(ipathlib\nPosixPath\n",
    "memory by a place in the memo": b"K\x01r\xff\xff\xff\xff",
    "memory by a length": b"\x96\xff\xff\xff\xff\xff\xff\x00\x00",
    "a name of its own": b"cfunshard.checkpoint\nsave\n",
    "a tuple that is as deep as it is long": b")" + b"\x85" * 200_000,
    "a key that is as deep as it is long": b"})" + b"\x85" * 200_000 + b"Ns",
    "a key whose hash never ends": b"})" + b"q\x00h\x00\x86" * 80 + b"Ns",
}


@at_most(13)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("where", ["whole", "inside"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_pickle_changes_nothing_of_the_process(tmp_path: Path, name: str, where: str) -> None:
    """As the whole description, or in a place of it that nobody looks at."""
    _, spec = made()
    theirs(tmp_path / "1")
    file = tmp_path / "1" / ".metadata"
    attack = ATTACKS[name]
    raw = b"\x80\x04" + attack + b"."
    if where == "inside":
        metadata_changed(tmp_path / "1", lambda metadata: setattr(metadata, "planner_data", "here it is"))
        raw = file.read_bytes().replace(b"\x8c\x0ahere it is", attack)
        raw = raw[:2] + raw[11:]
    file.write_bytes(raw)
    before = process_state()
    with contextlib.suppress(CheckpointError) if where == "inside" else pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "1", spec, only="model")
    assert process_state() == before
