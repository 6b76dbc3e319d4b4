"""Files that others read and write: safetensors out and in, for transformers and by ranges, whole or not at all."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exchange
import pytest
import safetensors
import torch
from depth import at_most, each
from models import build, refused
from ranks import real_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import funshard as fs
from funshard import P, checkpoint
from funshard._sharding import full
from funshard.checkpoint import _convert
from funshard.checkpoint._convert import DTYPES, SINGLE
from funshard.checkpoint._leaves import clean_name


def mixed() -> nn.Module:
    """Three dtypes, a dense permuted weight, a scalar, nothing at all, what is tied, and buffers."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(4, 3).bfloat16())
    model[0].to(memory_format=torch.channels_last)
    model[3].weight = model[2].weight
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("odd", nn.Parameter(torch.randn(3).half()))
    return model


POLICIES: dict[str, Callable[[nn.Module], fs.PartitionSpec]] = {
    "shard": fs.policies.always(P("shard")),
    "whole": fs.policies.whole(),
    "replicated": fs.policies.always(P()),
    "end to end": fs.policies.whole(P("shard", align=1)),
}


def same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].dtype == expected[name].dtype, name
        assert torch.equal(got[name], expected[name]), name


def written(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, by the library."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


# --- Out and in. ---


@each(shard_bytes=[300, 1, 5_000_000_000], policy=POLICIES)
@real_ranks(2)
def test_what_is_exported_the_library_reads_and_so_do_we(rank: int, policy: str, shard_bytes: int, tmp_path: Path) -> None:
    """In one file or many, with every dtype where it can be mapped; back as the shards of any other policy."""
    model = mixed()
    spec = POLICIES[policy](model)
    params = fs.shard(model, spec)
    buffers = dict(model.named_buffers())
    path = checkpoint.export(tmp_path / "files", params, spec, shard_bytes=shard_bytes, buffers=buffers, metadata={"by": "us"})
    full = {name: p.detach() for name, p in model.named_parameters()}
    same_bits(written(path), full | buffers)
    names = sorted(file.name for file in path.iterdir())
    if shard_bytes > 2000:
        assert names == ["model.safetensors"]
    else:
        assert names[-1] == "model.safetensors.index.json"
        assert len(names) > 3
        assert names[:-1] == [f"model-{i + 1:05d}-of-{len(names) - 1:05d}.safetensors" for i in range(len(names) - 1)]
        index = json.loads((path / names[-1]).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in [*full.values(), *buffers.values()])
        assert {**index["weight_map"]}.keys() == full.keys() | buffers.keys()
    with safetensors.safe_open(path / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}

    unwanted = lambda name: None if name in buffers else name  # noqa: E731
    for other in POLICIES.values():
        again = checkpoint.read_safetensors(path, other(model), rename=unwanted)
        same_bits(again, fs.shard(model, other(model)))


def test_every_dtype_is_called_what_the_library_calls_it(tmp_path: Path) -> None:
    """The library reads each one; names are those that it has. Each begins where memory that is mapped may be viewed so."""
    model = nn.ParameterDict({})
    for name, dtype in DTYPES.items():
        values = torch.randint(0, 2, (3, 2)).to(dtype)
        model[name] = nn.Parameter(values, requires_grad=False)
    spec = fs.policies.whole()(model)
    path = checkpoint.export(tmp_path / "files", fs.shard(model, spec), spec)
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        for name, dtype in DTYPES.items():
            assert file.get_slice(name).get_dtype() == name
            assert file.get_tensor(name).dtype == dtype
            assert torch.equal(file.get_tensor(name).view(torch.uint8), model[name].detach().view(torch.uint8))
    same_bits(checkpoint.read_safetensors(path, spec), fs.shard(model, spec))
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert not any(header[name]["data_offsets"][0] % dtype.itemsize for name, dtype in DTYPES.items())


def test_options_of_export(tmp_path: Path) -> None:
    """Another dtype for what is floating point, other names, full parameters, parameters that are ignored."""
    model = mixed()
    model.register_parameter("ids", nn.Parameter(torch.arange(3), requires_grad=False))
    spec = fs.policies.ignoring(fs.policies.whole(), params=["odd"])(model)
    assert "odd" in spec.ignored
    full = {name: p.detach() for name, p in model.named_parameters() if name != "odd"}
    path = checkpoint.export(
        tmp_path / "a", full, spec, dtype=torch.bfloat16, rename="model.{}".format, buffers={"odd": model.odd.detach()}
    )
    expected = {f"model.{name}": t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    got = written(path)
    same_bits(got, {name: t for name, t in expected.items() if name in got})
    assert len(got) == len(full) + 1

    def back(name: str) -> str:
        return name.removeprefix("model.")

    refused(
        ValueError,
        r"torch.float32, got .* torch.bfloat16.*cast=True",
        lambda: checkpoint.read_safetensors(path, spec, rename=back),
    )
    params = checkpoint.read_safetensors(path, spec, rename=back, cast=True)
    same_bits(
        fs.unshard(params, spec), {n: t.to(torch.bfloat16).to(t.dtype) if t.is_floating_point() else t for n, t in full.items()}
    )


def test_units_at_rest_are_decoded_and_encoded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    spec = fs.policies.always(P("shard", at_rest=fs.codecs.int8()))(model)
    params = fs.shard(model, spec)
    path = checkpoint.export(tmp_path / "files", params, spec)
    same_bits(written(path), fs.unshard(params, spec))
    plain = checkpoint.export(tmp_path / "plain", fs.shard(model, fs.policies.whole()(model)), fs.policies.whole()(model))
    same_bits(checkpoint.read_safetensors(plain, spec), params)


# --- transformers. ---


@at_most(1)
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
@real_ranks(2)
def test_transformers_loads_what_is_exported(rank: int, name: str, tmp_path: Path) -> None:
    """A model with tied weights, stored once under the name that transformers gives them: the same logits."""
    made = build(name, 1)
    spec = fs.by_type(*made.blocks)(made.model)
    path = checkpoint.export(tmp_path / "files", fs.shard(made.model, spec), spec, shard_bytes=4000)
    if rank:
        return
    made.model.config.save_pretrained(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, info = type(made.model).from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same_bits(dict(found.state_dict()), dict(made.model.state_dict()))
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    made = build("llama_tied", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.model.save_pretrained(tmp_path / "files", max_shard_size="4KB")
    spec = fs.by_size(100)(made.model)
    same_bits(checkpoint.read_safetensors(tmp_path / "files", spec), fs.shard(made.model, spec))


# --- Only what is needed. ---


@real_ranks(2)
def test_each_rank_reads_the_ranges_of_its_slices(rank: int, tmp_path: Path) -> None:
    """And nothing else: each byte of the file is asked for once, by one rank."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 53))
    if rank == 0:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.distributed.barrier()
    spec = fs.policies.always(P("shard", align=1))(copy.deepcopy(model).to("meta"))
    asked, real = list[int](), _convert._FileTensor.read

    def counted(self: Any, box: Any) -> Tensor:
        found = real(self, box)
        asked.append(found.nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_convert._FileTensor, "read", counted)
        params = checkpoint.read_safetensors(tmp_path, spec)
    same_bits(params, fs.shard(model, spec))
    assert sum(asked) == sum(piece.nbytes for piece in fs.param_views(params, spec).values())
    assert abs(2 * sum(asked) - sum(p.nbytes for p in model.parameters())) <= 16


@real_ranks(2)
def test_a_unit_at_a_time_is_gathered_to_the_first_rank(rank: int, tmp_path: Path) -> None:
    """Of a unit at a time: the first rank alone gathers, and holds those of one file; in the files' dtype if it is narrower."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    spec = fs.policies.always(P("shard"))(model)
    params = fs.shard(model, spec)
    alive, made = [], 0
    gather = full._start_gather

    def watched(*args: Any) -> Callable[[], Tensor | None]:
        nonlocal made
        for _ in range(200):  # a thread of gloo's may hold a finished collective for a moment
            if all(ref() is None for ref in alive):
                break
            time.sleep(0.01)
        assert all(ref() is None for ref in alive)
        buffer = gather(*args)()
        assert (buffer is None) == (rank != 0)
        made += 1
        if buffer is not None:
            assert buffer.dtype == torch.bfloat16
            alive.append(weakref.ref(buffer.untyped_storage()))
            alive.append(weakref.ref(buffer))
        return lambda: buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "_start_gather", watched)
        checkpoint.export(tmp_path / "files", params, spec, dtype=torch.bfloat16, shard_bytes=1)
    assert made == len(spec)


# --- Whole or not at all. ---


@real_ranks(2)
def test_an_error_of_the_first_rank_is_one_of_all(rank: int, tmp_path: Path) -> None:
    """And nothing is left of it, under any name."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    spec = fs.policies.always(P("shard"))(model)
    params = fs.shard(model, spec)
    path = tmp_path / "files"
    write, writes = safetensors.torch.save_file, 0

    def failing(*args: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 2:
            raise OSError(28, "No space left on device")
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", failing)
        refused(OSError, "No space left", lambda: checkpoint.export(path, params, spec, shard_bytes=300))
    torch.distributed.barrier()
    assert os.listdir(tmp_path) == []
    torch.distributed.barrier()
    checkpoint.export(path, params, spec)
    refused(FileExistsError, "expected a path where nothing is", lambda: checkpoint.export(path, params, spec))
    refused(ValueError, "expected a local directory, .* got 's3://", lambda: checkpoint.export("s3://here", params, spec))
    assert os.listdir(tmp_path) == ["files"]
    assert os.listdir(path) == ["model.safetensors"]


@real_ranks(2)
def test_bad_exports_are_refused_on_all_ranks(rank: int, tmp_path: Path) -> None:
    model = mixed()
    spec = fs.policies.whole()(model)
    params = fs.shard(model, spec)
    path = tmp_path / "files"
    without = {key: t for key, t in params.items() if key != next(iter(params))}

    def no(match: str, params: fs.Params = params, error: type[Exception] = ValueError, **options: Any) -> None:
        refused(error, match, lambda: checkpoint.export(path, params, spec, **options))

    no("is missing", without)
    no("rank 1: unit '.*' is missing", params if rank == 0 else without)
    no(
        r"expected as|expected the same on all ranks, got on rank 0 a slice, .*, on rank 1 a slice, torch\.float64",
        params if rank == 0 else {key: t.double() for key, t in params.items()},
    )
    no(r"parameter '\S+': expected a tensor with values, got one on", {key: t.to("meta") for key, t in params.items()})
    no("would both be 'x' in the files", rename=lambda name: "x")
    no("'0.weight' is a parameter of the spec", buffers={"0.weight": torch.ones(1)})
    no("expected a floating point dtype", dtype=torch.int8)
    no("that safetensors has, got torch.complex128", buffers={"z": torch.ones(1, dtype=torch.complex128)})
    no("'x': expected a .*on the meta", buffers={"x": torch.ones(1, device="meta")})
    no("'x': expected a .*got Tensor .*sparse", buffers={"x": torch.eye(2).to_sparse()}, error=TypeError)
    no("'x': expected a .*got int", buffers={"x": 3}, error=TypeError)
    no("shard_bytes: expected at least 1", shard_bytes=0)
    no("metadata 'step': expected a string, got int", metadata={"step": 1}, error=TypeError)
    assert os.listdir(tmp_path) == []


# --- Wrong files. ---


WRONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "missing": ("parameter '1.bias' of unit '1?' is not in .*, got 3 tensors", lambda t: t.pop("1.bias")),
    "unexpected": ("tensor '2.bias' of .* is no parameter", lambda t: t.update({"2.bias": torch.ones(1)})),
    "shape": (r"'0.weight'.*expected \[3, 2\] .*32, got \[2, 3\]", lambda t: t.update({"0.weight": torch.ones(2, 3)})),
    "dtype": (r"'0.bias'.* torch.float32, got .* torch.int64", lambda t: t.update({"0.bias": torch.ones(3).long()})),
    "float": (r"float32, got \[3\] torch.float64.*cast=True", lambda t: t.update({"0.bias": torch.ones(3).double()})),
    "twice": ("are both '0.bias' in the model", lambda t: t.update({"module.0.bias": torch.ones(3)})),
}


@pytest.mark.parametrize("kind", WRONG)
@real_ranks(2)
def test_files_that_do_not_fit_are_refused_on_every_rank(rank: int, kind: str, tmp_path: Path) -> None:
    """Naming the parameter."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    text, change = WRONG[kind]
    change(tensors := model.state_dict())
    if rank == 0:
        save_file(tensors, tmp_path / "model.safetensors")
    torch.distributed.barrier()
    for policy in (fs.policies.always(P("shard")), fs.policies.whole()):
        refused(ValueError, text, lambda policy=policy: checkpoint.read_safetensors(tmp_path, policy(model)))


@real_ranks(2)
def test_damage_that_one_rank_finds_is_an_error_of_all(rank: int, tmp_path: Path) -> None:
    """As where the ranks' machines have copies at one path."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    (tmp_path / str(rank)).mkdir()
    save_file(model.state_dict(), file := tmp_path / str(rank) / "model.safetensors")
    os.truncate(file, file.stat().st_size - (rank == 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(file.parent)
        read = lambda: checkpoint.read_safetensors(file.name, fs.policies.whole()(model))  # noqa: E731
        refused(checkpoint.CheckpointError, "read_safetensors: rank 0: .*model.safetensors: damaged, cut short", read)


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, size)


def header_says(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return damage


DAMAGES = {
    "empty": cut_to(0),
    "no header": cut_to(4),
    "half a header": cut_to(60),
    "no data": cut_to(200),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "a huge header": lambda file: file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:]),
    "other sizes": header_says(lambda header: header["0.bias"].update(shape=[4])),
    "other places": header_says(lambda header: header["0.bias"].update(data_offsets=[4, 16])),
    "other text": header_says(lambda header: header["0.bias"].pop("dtype")),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    DAMAGES[kind](file)
    refused(
        checkpoint.CheckpointError, "model.safetensors: ", lambda: checkpoint.read_safetensors(file, fs.policies.whole()(model))
    )


def test_indices_that_are_wrong_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    spec = fs.policies.whole()(model)
    path = checkpoint.export(tmp_path / "files", fs.shard(model, spec), spec, shard_bytes=1)
    index = path / "model.safetensors.index.json"
    read = lambda: checkpoint.read_safetensors(path, spec)  # noqa: E731
    content = json.loads(index.read_text())
    read()

    def says(weights: Any) -> None:
        index.write_text(json.dumps({"weight_map": weights}))

    weights = content["weight_map"]
    says({**weights, "0.bias": weights["0.weight"]})
    refused(ValueError, "parameter '0.bias' of unit '' is not in ", read)
    says({**weights, "0.bias": "../other.safetensors"})
    refused(checkpoint.CheckpointError, "expected files beside it, got '../other", read)
    says({**weights, "0.bias": "model-9.safetensors"})
    refused(checkpoint.CheckpointError, "model-9.safetensors: expected this file, which the index names", read)
    for text in ("{", "[]", "[" * 100_000 + "]" * 100_000, '{"weight_map": {"0.bias": 3}}', '{"weight_map": {"0.bias": ".."}}'):
        index.write_text(text)
        refused(checkpoint.CheckpointError, "the index is damaged", read)
    refused(FileNotFoundError, "expected a file of safetensors", lambda: checkpoint.read_safetensors(tmp_path, spec))
    refused(FileNotFoundError, "expected a file of safetensors", lambda: checkpoint.read_safetensors(tmp_path / "x", spec))


def test_an_index_beside_the_one_file_is_stale(tmp_path: Path) -> None:
    """transformers reads the file: of an earlier save in pieces the index has stayed, and perhaps the pieces."""
    old, new = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(2))
    spec = fs.policies.whole()(old)
    path = checkpoint.export(tmp_path / "files", fs.shard(old, spec), spec, shard_bytes=1)
    save_file(new.state_dict(), path / "model.safetensors")
    same_bits(checkpoint.read_safetensors(path, spec), fs.shard(new, spec))
    same_bits(checkpoint.read_safetensors(path / "model.safetensors.index.json", spec), fs.shard(old, spec))


def test_a_tied_parameter_may_have_any_of_its_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    spec = fs.policies.whole()(model)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    for left_out in ("0.weight", "1.weight"):
        save_file({name: t for name, t in tensors.items() if name != left_out}, tmp_path / "model.safetensors")
        same_bits(checkpoint.read_safetensors(tmp_path, spec), fs.shard(model, spec))
    save_file(tensors, tmp_path / "model.safetensors")  # with other values, perhaps
    text = r"'0.weight' of unit '': expected one of its names, got '0.weight' and '1.weight'; .* rename= that gives None"
    refused(ValueError, text, lambda: checkpoint.read_safetensors(tmp_path, spec))


def test_prefixes_of_wrappers_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    save_file({"module._orig_mod.0.weight": model[0].weight, "_orig_mod.0.bias": model[0].bias}, tmp_path / "model.safetensors")
    spec = fs.policies.whole()(model)
    same_bits(checkpoint.read_safetensors(tmp_path, spec), fs.shard(model, spec))
    assert clean_name("_fsdp_wrapped_module.a._checkpoint_wrapped_module.module.w") == "a.w"


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing and reading say which one to install; a dry run too."""
    model = nn.Linear(2, 2)
    spec = fs.policies.whole()(model)
    path = checkpoint.export(tmp_path / "files", fs.shard(model, spec), spec)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    text = r"need the package safetensors: pip install 'funshard\[safetensors\]'"
    refused(ImportError, text, lambda: checkpoint.export(tmp_path / "other", fs.shard(model, spec), spec, dry_run=True))
    refused(ImportError, text, lambda: checkpoint.read_safetensors(path, spec))
    assert os.listdir(tmp_path) == ["files"]


def test_tensors_that_are_not_aligned(tmp_path: Path) -> None:
    """As others may write them: the elements of each begin right after the ones before, whatever their size."""
    model = nn.Linear(2, 2)
    spec = fs.policies.whole()(model)
    header = {"x": ("U8", [3], [0, 3]), "empty": ("F32", [0], [3, 3]), "weight": ("F32", [2, 2], [3, 19])}
    header["bias"] = ("F32", [2], [19, 27])
    text = json.dumps(
        {name: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True)) for name, entry in header.items()}
    )
    raw = b"abc" + b"".join(bytes(p.detach().view(torch.uint8).flatten().tolist()) for p in model.parameters())
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text.encode() + raw)
    rename = {"weight": "weight", "bias": "bias"}.get
    same_bits(checkpoint.read_safetensors(tmp_path, spec, rename=rename), fs.shard(model, spec))


def test_exchange_between_environments(tmp_path: Path) -> None:
    """The script that CI runs in several environments, in one."""
    exchange.save(tmp_path)
    exchange.load(tmp_path)
