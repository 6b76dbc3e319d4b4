"""stream_full: full parameters one by one, in the memory of two buckets; unshard is its sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import same
from collective_log import world
from depth import at_most, every, mark_seldom
from ranks import Pool, real_ranks
from test_gather_full import MESHES, Watch, bound, net, pool_of, values
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P, Params, PartitionSpec
from funshard._wire import chain

BUCKETS = (1, 200, "1GB")


def streamed(shards: Params, spec: PartitionSpec, **options: Any) -> Params:
    return {name: tensor.clone() for name, tensor in fs.stream_full(shards, spec, **options)}


def cast(full: Params, dtype: torch.dtype) -> Params:
    return {name: tensor.to(dtype) for name, tensor in full.items()}


def as_gathered(rank: int, mesh: str) -> bool:
    model = net()
    spec, full = bound(mesh, model), values(model)
    shards = fs.shard(model, spec)
    for bucket in BUCKETS:
        same(streamed(shards, spec, bucket=bucket), full)
        first = streamed(shards, spec, bucket=bucket, rank0_only=True, offload_to_cpu=True)
        same(first, full if rank == 0 else {})
        for dtype in (torch.bfloat16, torch.float64, torch.float16):
            same(streamed(shards, spec, bucket=bucket, dtype=dtype), cast(full, dtype))
    kept = list(fs.stream_full(shards, spec))  # what is kept stays as it was
    for _, tensor in kept:
        tensor.zero_()
    same(fs.unshard(shards, spec), full)  # and is not the shards
    return True


@pytest.mark.parametrize("mesh", mark_seldom(sorted(MESHES), "both axes, turned", "ddp", "fsdp"))
def test_the_stream_is_unshard(mesh: str, gloo2: Pool, gloo4: Pool) -> None:
    """Bitwise, on every mesh, for small and large buckets; a cast before the wire or after it is that of the parameters."""
    assert pool_of(mesh, gloo2, gloo4).run(as_gathered, mesh) == [True] * MESHES[mesh][0]


ON_ONE = fs.policies.always()(net()).on({"shard": 1})


def test_the_order_of_names() -> None:
    """Units by their first parameter in the model, and parameters as in the model; of a tied parameter the first name."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    model[2].weight = model[0].weight
    spec = fs.by_path({"1": P("shard")})(model).on({"shard": 1})
    shards = fs.shard(model, spec)
    assert [name for name, _ in fs.stream_full(shards, spec)] == ["0.weight", "2.bias", "1.weight", "1.bias"]
    assert [name for name, _ in fs.stream_full(shards, spec, names="2.weight")] == ["0.weight"]
    assert [name for name, _ in fs.stream_full(shards, spec, names=["*.bias", "1.*"])] == ["2.bias", "1.weight", "1.bias"]
    assert [*fs.unshard(shards, spec)] == [name for name, _ in model.named_parameters()]


def test_a_part_and_ignored_parameters() -> None:
    """Of a part of the shards, that part; parameters that the spec ignores last, as copies."""
    model = net()
    spec = fs.policies.ignoring(fs.policies.always(), params=["one"])(model).on({"shard": 1})
    shards = {**fs.shard(model, spec), "one": torch.tensor([3.0])}
    got = list(fs.stream_full(shards, spec))
    assert got[-1][0] == "one"
    got[-1][1].zero_()
    assert shards["one"].item() == 3
    same(dict(got) | {"one": shards["one"]}, fs.unshard(shards, spec))
    assert list(fs.stream_full({}, spec)) == []
    part = {"inner.1:frozen": shards["inner.1:frozen"]}
    assert [name for name, _ in fs.stream_full(part, spec)] == ["inner.1.bias"]
    with pytest.raises(ValueError, match=r"names: 'one' matches no parameter of these shards.*inner.1.bias"):
        fs.stream_full(part, spec, names="one")


def test_what_is_refused() -> None:
    """When it is called, before anything is iterated over or sent."""
    shards = fs.shard(net(), ON_ONE)
    for match, options in {
        "names: 'scales' matches no parameter": {"names": ["scale", "scales"]},
        "bucket: expected a positive number": {"bucket": 0},
        "bucket: expected a number of bytes such as": {"bucket": "1 gigabyte"},
        "bucket: expected a number of bytes .*, got inf": {"bucket": float("inf")},
        "expected a floating point dtype, got bfloat16": {"dtype": "bfloat16"},
        "expected a floating point dtype, got torch.int32": {"dtype": torch.int32},
    }.items():
        with pytest.raises(ValueError, match=match):
            fs.stream_full(shards, ON_ONE, **options)
    with pytest.raises(ValueError, match="unit 'other' is not in the spec"):
        fs.stream_full({"other": torch.ones(3)}, ON_ONE)
    with pytest.raises(ValueError, match=r"unit '.*' is on the meta device: expected values"):
        fs.stream_full({key: shard.to("meta") for key, shard in shards.items()}, ON_ONE)
    with pytest.raises(RuntimeError, match=r"inside a transform.*unshard\(params, spec\) is differentiable"):
        torch.func.grad(lambda p: sum(x.sum() for _, x in fs.stream_full(p, ON_ONE)))(shards)


def test_on_simulated_ranks() -> None:
    model = net()
    full = values(model)

    def run(mesh: Any) -> Params:
        spec = fs.policies.always()(model).on(mesh)
        with pytest.raises(ValueError, match="rank0_only on a simulated mesh"):
            fs.stream_full(fs.shard(full, spec), spec, rank0_only=True)
        return streamed(fs.shard(full, spec), spec, dtype=torch.float64)

    for got in ({name: rows[i] for name, rows in fs.testing.spmd(run, 3)().items()} for i in range(3)):
        same(got, cast(full, torch.float64))


def chained(units: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(units)))


UNIT = 4 * 64 * 64
"""Bytes of one of its units."""


@at_most(4)
@every(mesh=["fsdp", "fsdp of 4", "hsdp", "both axes"], dtype=[None, torch.bfloat16])
def test_the_peak_is_two_buckets(mesh: str, dtype: torch.dtype | None) -> None:
    """Or two units, where they are larger, and what an inner axis has gathered of the one that arrives.

    The loop holds its last parameter while it asks for the next one, as loops do. On the fake process group: gloo's threads let
    go of tensors when they please.
    """
    size, shape, names, p = MESHES[mesh]
    unit = UNIT // (1 if dtype is None else 2)
    part = unit // math.prod(n for n, name in zip(shape, names, strict=True) if name in p.axes)
    own = unit + (part * shape[-1] if mesh == "both axes" else 0)
    for buckets in (0.5, 1.0, 1.5, 2.0):
        with world(size):
            spec = bound(mesh, chained())
            shards = fs.shard(chained(), spec)
            with Watch(shards.values()) as every:
                for _ in fs.stream_full(shards, spec, bucket=buckets * unit, dtype=dtype):
                    pass
        assert every.largest == unit
        assert 2 * unit <= every.peak <= max(2 * own + part * (own > unit), 2 * buckets * unit)
        assert own > unit or every.peak == max(2, math.floor(2 * buckets)) * unit


@every(mesh=["fsdp", "hsdp", "both axes"], dtype=[None, torch.bfloat16])
def test_the_peak_of_a_stream_to_the_first_rank(mesh: str, dtype: torch.dtype | None) -> None:
    """There two buckets as well. Other ranks hold no more than slices that are cast, and what an inner axis gathers."""
    size, shape, names, p = MESHES[mesh]
    unit = UNIT // (1 if dtype is None else 2)
    part = unit // math.prod(n for n, name in zip(shape, names, strict=True) if name in p.axes)
    for rank in range(size):
        with world(size, rank):
            spec = bound(mesh, chained())
            shards = fs.shard(chained(), spec)
            with Watch(shards.values()) as watch:
                received = [name for name, _ in fs.stream_full(shards, spec, bucket=2 * unit, rank0_only=True, dtype=dtype)]
        assert len(received) == (8 if rank == 0 else 0)
        gathers_inner = mesh == "both axes" and rank % shape[-1] == 0
        assert watch.peak <= (4 * unit if rank == 0 else 3 * part * (gathers_inner * shape[-1] + (dtype is not None)))


class Sends(TorchDispatchMode):
    """The bytes that all-gathers return, and how many had started when each parameter was used."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.started = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "all_gather" in str(func):
            self.bytes, self.started = self.bytes + out.nbytes, self.started + 1
        assert "all_reduce" not in str(func)
        return out


def test_bytes_and_overlap() -> None:
    """Each unit is gathered once, in the narrower dtype, while those before it are used; those without a name not at all."""
    with world(4):
        model = chained()
        spec = fs.policies.always()(model).bound
        shards = fs.shard(model, spec)
        started: dict[float, list[int]] = {}
        for units in (0.5, 1, 1.5, 2, 10):
            with Sends() as sent:
                started[units] = [sent.started for _ in fs.stream_full(shards, spec, bucket=units * UNIT)]
            assert sent.bytes == 8 * UNIT
        assert started[0.5] == started[1] == [2, 2, 3, 4, 5, 6, 7, 8] or started[1] == [2, *range(2, 9)]
        assert started[2] == [4, 4, 5, 6, 7, 8, 8, 8]
        assert started[10] == [8] * 8
        for dtype, factor in ((torch.bfloat16, 2), (torch.float64, 1)):
            with Sends() as sent:
                list(fs.stream_full(shards, spec, dtype=dtype))
            assert sent.bytes == 8 * UNIT // factor
        with Sends() as sent:
            assert len(list(fs.stream_full(shards, spec, names=["0.*", "3.weight"]))) == 2
        assert sent.bytes == 2 * UNIT


@real_ranks(2)
def test_shards_that_change_are_refused(rank: int) -> None:
    """Some parameters would be older than others; also if they were under way already. The next stream is right."""
    model = chained(4)
    spec = fs.policies.always()(model).bound
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1, donate=True)
    for bucket in (UNIT // 2, 10 * UNIT):
        for donates in (False, True):
            shards = {key: shard.clone() for key, shard in fs.shard(model, spec).items()}
            stream = fs.stream_full(shards, spec, bucket=bucket)
            next(stream)
            if donates:
                update({key: torch.ones_like(shard) for key, shard in shards.items()}, init(shards), shards)
            else:
                shards["1"].mul_(2)
            with pytest.raises(RuntimeError, match=r"was donated|the shard of unit '1' was modified in place"):
                next(stream)
            same(streamed(fs.shard(model, spec), spec), values(model))


def fail(stream: Iterator[Any]) -> None:
    for _ in stream:
        raise ZeroDivisionError


@pytest.mark.usefixtures("not_on_worst")
@real_ranks(2)
def test_streams_that_are_left(rank: int) -> None:
    """By all ranks, at one unit or by an error: the next calls are right. At different units: the next call raises on all."""
    model = chained(6)
    spec, full = fs.policies.always()(model).bound, values(model)
    shards = fs.shard(model, spec)

    def loss(params: Params) -> Tensor:
        return fs.functional_call(model, params, (torch.ones(2, 64),), spec=spec).sum()

    for bucket in (UNIT, 10 * UNIT):
        for name, _ in fs.stream_full(shards, spec, bucket=bucket):
            if name == "1.weight":
                break
        same(fs.unshard(shards, spec), full)
        with pytest.raises(ZeroDivisionError):
            fail(fs.stream_full(shards, spec, bucket=bucket))
        assert fs.grad(loss)(shards).keys() == shards.keys()
        assert not chain._UNCLAIMED
        for i, (_, tensor) in enumerate(fs.stream_full(shards, spec, bucket=bucket, rank0_only=True)):
            assert tensor.shape == (64, 64)
            if i == 1:
                break  # the first rank alone: the others have nothing to stop at
        same(fs.unshard(shards, spec), full)
        fs.stream_full(shards, spec)  # that nobody iterates over sends nothing
    for i, _ in enumerate(fs.stream_full(shards, spec)):
        if i == 1 + rank:
            break  # what both have started
    both = "after 2 of 6 units, the last one '1' on rank 0.*after 3 of 6 units, the last one '2' on rank 1"
    with pytest.raises(RuntimeError, match=f"(?s)ranks have ended a stream early.*{both}"):
        fs.grad(loss)(shards)


@pytest.mark.usefixtures("not_on_worst")
@real_ranks(2)
def test_ranks_that_stream_different_parameters(rank: int) -> None:
    model = chained(3)
    spec = fs.policies.always()(model).bound
    shards = fs.shard(model, spec)
    for options in ({"names": f"{rank}.weight"}, {"dtype": (torch.bfloat16, torch.float16)[rank]}):
        for rank0_only in (False, True):
            with pytest.raises(RuntimeError, match="different units: gather of unit"):
                list(fs.stream_full(shards, spec, rank0_only=rank0_only, **options))
    with pytest.raises(RuntimeError, match="gather of unit '0' to the first rank"):
        fs.unshard(shards, spec, rank0_only=rank == 1, offload_to_cpu=True)


DTYPES = (torch.complex64, torch.int16, torch.bool, torch.float8_e4m3fn, torch.float64, torch.float16)


@real_ranks(2)
def test_every_dtype(rank: int) -> None:
    """Only floating point parameters are cast, from 8 bits to 64; also in inference mode."""
    model = nn.Module()
    for i, dtype in enumerate(DTYPES):
        model.register_parameter(f"p{i}", nn.Parameter(torch.arange(7).to(dtype), requires_grad=False))
    spec = fs.policies.whole()(model).bound
    with torch.inference_mode(mode=rank == 1):
        shards = fs.shard(model, spec)
        for dtype in (None, torch.bfloat16, torch.float8_e5m2, torch.float64):
            expected = {n: p if dtype is None or not p.is_floating_point() else p.to(dtype) for n, p in values(model).items()}
            for options in ({}, {"rank0_only": True}, {"bucket": 1}):
                got = streamed(shards, spec, dtype=dtype, **options)
                assert {name: x.dtype for name, x in got.items()} == {
                    name: x.dtype for name, x in expected.items() if rank == 0 or "rank0_only" not in options
                }
                assert all(torch.equal(x.cpu(), expected[name]) for name, x in got.items() if x.itemsize > 1)
                assert all(torch.equal(x.view(torch.uint8), expected[name].view(torch.uint8)) for name, x in got.items())


@pytest.mark.usefixtures("not_on_worst")
@real_ranks(4)
def test_local_and_encoded_units(rank: int) -> None:
    """Whole parameters of local units, decoded ones of units at rest, copies of replicated ones; inside of fs.check."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].requires_grad_(False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    policy = fs.by_path(
        {
            "0": P("shard", local={"expert": {"*weight": 1}}, align=1),
            "1": P(local={"expert": 0}),
            "2": P("shard", at_rest=fs.codecs.nf4(16)),
            "3": P(),
        }
    )
    pieces = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), model[2], model[3])
    spec = policy(pieces).on(mesh)
    shards = fs.shard(values(model), spec)
    expected = {name: tensor.clone() for name, tensor in fs.unshard(shards, spec).items()}
    same({name: x for name, x in expected.items() if name[0] != "2"}, {n: x for n, x in values(model).items() if n[0] != "2"})
    with fs.check():
        for bucket in BUCKETS:
            for dtype in (None, torch.float64, torch.bfloat16):
                for rank0_only in (False, True):
                    got = streamed(shards, spec, bucket=bucket, dtype=dtype, rank0_only=rank0_only)
                    wanted = expected if dtype is None else cast(expected, dtype)
                    same(got, wanted if not (rank0_only and rank) else {})
        assert [name for name, _ in fs.stream_full(shards, spec)] == [name for name, _ in model.named_parameters()]
