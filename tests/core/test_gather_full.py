"""Full parameters (rows C1 to C11, torch's summon_full_params): unshard, stream_full one by one, and shard from one rank."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same
from collective_log import Collectives, world
from depth import at_most, every, mark_seldom
from models import refused
from parity import shards_of, squared_loss
from ranks import mesh_of, real_ranks
from test_memory import Peak
from torch import Tensor, nn

import funshard as fs
from funshard import P, Params, PartitionSpec, Precision
from funshard._wire import chain

MESHES: dict[str, tuple[int, tuple[int, ...], tuple[str, ...], P]] = {
    "fsdp": (2, (2,), ("shard",), P("shard")),
    "ddp": (2, (2,), ("shard",), P()),
    "low precision": (2, (2,), ("shard",), P("shard", align=8, precision=Precision(param=torch.bfloat16))),
    "fsdp of 4": (4, (4,), ("shard",), P("shard", reshard=False)),
    "hsdp": (4, (2, 2), ("replicate", "shard"), P("shard")),
    "outer axis": (4, (2, 2), ("replicate", "shard"), P("replicate")),
    "both axes": (4, (2, 2), ("replicate", "shard"), P(("replicate", "shard"))),
    "both axes, turned": (4, (2, 2), ("replicate", "shard"), P(("shard", "replicate"))),
    "ddp of 4": (4, (2, 2), ("replicate", "shard"), P()),
}


class Net(nn.Module):
    """Odd sizes, a scalar, a singleton, an empty unit, a transposed, a half precision and a tied parameter, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.tensor([3.0]))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.nothing = nn.Module()
        self.nothing.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        self.inner[1].bias.requires_grad_(False)
        self.half = nn.Linear(2, 2).bfloat16()
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) @ self.turned + self.tied(x).sum() * self.one


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def bound(mesh: str, model: nn.Module, make: Callable[..., fs.Policy] = fs.policies.always) -> PartitionSpec:
    _, shape, names, p = MESHES[mesh]
    return make(p)(model).on(mesh_of(**dict(zip(names, shape, strict=True))))


def values(model: nn.Module) -> Params:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def ranks_of(mesh: str) -> int:
    return MESHES[mesh][0]


@pytest.mark.parametrize("mesh", mark_seldom(sorted(MESHES), "both axes, turned", "ddp", "fsdp"))
@real_ranks(ranks_of)
def test_full_parameters_leave_and_enter(rank: int, mesh: str) -> None:
    """C1, C3 to C6, C10: full values, shapes and dtypes on every mesh, on all ranks or the first; written back from any.

    The stream is unshard, bitwise, for small and large buckets; a cast before the wire or after it is that of the parameters.
    """
    model = net()
    spec, full = bound(mesh, model), values(model)
    shards = fs.shard(model, spec)
    same(shards, fs.shard(full, spec, rank=rank))
    kept = {key: shard.clone() for key, shard in shards.items()}
    for offload in (False, True):
        same(fs.unshard(shards, spec, offload_to_cpu=offload), full)
        same(fs.unshard(shards, spec, rank0_only=True, offload_to_cpu=offload), full if rank == 0 else {})
    same(dict(sorted(fs.unshard(shards, spec).items())), dict(sorted(full.items())))
    for src in (0, MESHES[mesh][0] - 1):
        edited = {name: tensor * 3 - 1 for name, tensor in full.items()}
        before = {name: tensor.clone() for name, tensor in edited.items()}
        written = fs.shard(edited if rank == src else None, spec, src=src)
        same(written, fs.shard(before, spec, rank=rank))
        for tensor in (*written.values(), *fs.unshard(shards, spec).values()):
            tensor.zero_()
        same(shards, kept)  # L8: what came back was a copy, on the source as well
        same(edited, before)
    for bucket in BUCKETS:
        same(streamed(shards, spec, bucket=bucket), full)
        first = streamed(shards, spec, bucket=bucket, rank0_only=True, offload_to_cpu=True)
        same(first, full if rank == 0 else {})
        for dtype in (torch.bfloat16, torch.float64, torch.float16):
            same(streamed(shards, spec, bucket=bucket, dtype=dtype), cast(full, dtype))
    for _, tensor in [*fs.stream_full(shards, spec)]:  # what is kept stays as it was
        tensor.zero_()
    same(fs.unshard(shards, spec), full)  # and is not the shards
    nothing = fs.policies.whole()(nn.Sequential(nn.ReLU()))
    assert fs.shard(fs.unshard({}, nothing, rank0_only=True) or None, nothing, src=0) == {}


@real_ranks(2)
def test_unshard_singleton_param_writeback(rank: int) -> None:
    """A parameter of one element on two ranks: writing it back does not leak into rank 1's padding."""
    model = nn.Linear(1, 1, bias=False)
    spec = fs.policies.whole(P("shard", align=1))(model).bound
    shards = {"": torch.full((1,), rank + 2.0)}  # rank 1 holds nothing but padding
    full = fs.unshard(shards, spec)
    assert full["weight"].tolist() == [[2.0]]
    for name, piece in fs.param_views(shards, spec).items():  # write-back in place, into what is the parameter's
        piece.copy_(fs.param_views(fs.shard({name: torch.zeros(1, 1)}, spec), spec)[name])
    assert shards[""] == 3 * rank
    assert fs.shard({"weight": torch.ones(1, 1)} if rank == 0 else None, spec, src=0)[""] == 1 - rank


@pytest.mark.parametrize("mesh", ["fsdp", "ddp", "hsdp", "both axes"])
@real_ranks(ranks_of)
def test_with_grads(rank: int, mesh: str) -> None:
    """C7: gradients are gathered like parameters and equal DDP's; edits of them are written back the same way."""
    model = net()
    spec = bound(mesh, model)
    x = torch.randint(-2, 3, (4, 3)).float() + rank
    trainable, frozen = fs.partition(fs.shard(model, spec), spec)
    grads = fs.grad(lambda part: fs.functional_call(model, part | frozen, (x,), spec=spec).sum())(trainable)
    zeros = {key: torch.zeros_like(shard) for key, shard in frozen.items()}
    full = fs.unshard(grads | zeros, spec)
    doubled = fs.shard({name: 2 * g for name, g in full.items()} if rank == 0 else None, spec, src=0)
    same({key: doubled[key] for key in grads}, {key: 2 * g for key, g in grads.items()})
    model(x).sum().backward()
    expected: Params = {}
    for name, p in model.named_parameters():
        expected[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(expected[name], dist.ReduceOp.AVG)
    torch.testing.assert_close(full, {name: expected[name] for name in full}, rtol=1e-5, atol=1e-5)
    assert full.keys() == expected.keys()
    assert not full["half.weight"].any()  # unused in forward: zeros, where torch has None
    assert full["inner.0.weight"].any()


@real_ranks(2)
def test_unshard_inside_forward_and_nested(rank: int) -> None:
    """C8, C9: gathering while differentiating, nested, and calling the model on full params are all legal here."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    spec = fs.by_type(nn.Linear)(model).bound
    x = torch.ones(2, 3, dtype=torch.float64) * (rank + 1)
    shards = fs.shard(model, spec)
    seen: list[Params] = []

    def loss(params: Params) -> Tensor:
        out = fs.functional_call(model, params, (x,), spec=spec)
        seen.append(fs.unshard(params, spec, offload_to_cpu=True))
        seen.append(fs.unshard(fs.shard(fs.unshard(params, spec, offload_to_cpu=True), spec), spec))
        full = fs.unshard(params, spec)
        assert torch.equal(torch.func.functional_call(model, full, (x,)), out)
        return out.sum()

    grads = fs.grad(loss)(shards)
    for full in seen:
        same(full, values(model))
        assert not any(tensor.requires_grad for tensor in full.values())
    same(grads, fs.grad(lambda params: fs.functional_call(model, params, (x,), spec=spec).sum())(shards))


def parts(mesh: str, unit: int) -> tuple[int, int, int]:
    """Ranks, a slice of a unit, and the rows of the inner axis, which its first rank gathers; a slice where there are none."""
    size, shape, names, p = MESHES[mesh]
    piece = unit // math.prod(n for n, name in zip(shape, names, strict=True) if name in p.axes)
    return size, piece, piece * shape[-1] if mesh == "both axes" else piece


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp of 4", "hsdp", "both axes"])
def test_the_peak_is_one_unit(mesh: str) -> None:
    """C4, C5: with rank0_only nothing larger than a slice exists off the first rank; nowhere are two units gathered.

    On torch's fake process group, a rank after the other: gloo's threads let go of tensors when they please.
    """
    size, piece, inner = parts(mesh, UNIT)
    for rank in range(size):
        with world(size, rank):
            model = chained(6)
            spec = bound(mesh, model)
            shards = fs.shard(model, spec)
            full = fs.unshard(shards, spec)
            calls: dict[str, Callable[[], Params]] = {
                "all": lambda: fs.unshard(shards, spec, offload_to_cpu=True),
                "rank0_only": lambda: fs.unshard(shards, spec, rank0_only=True, offload_to_cpu=True),
                "from one": lambda rank=rank: fs.shard(full if rank == 0 else None, spec, src=0),
            }
            seen: dict[str, tuple[int, int]] = {}  # the largest tensor, the peak beyond results
            for name, call in calls.items():
                with Peak((*shards.values(), *full.values())) as watch:
                    result = call()
                seen[name] = max(watch.made, default=0), watch.bytes - sum(tensor.nbytes for tensor in result.values())
        assert seen["all"] == (UNIT, UNIT)  # beyond the result of six
        if rank:
            assert seen["rank0_only"][0] <= inner < UNIT
            assert seen["from one"][0] <= inner
        else:
            assert seen["rank0_only"][0] == UNIT
            assert seen["rank0_only"][1] <= UNIT + piece + inner
            assert seen["from one"][1] <= UNIT + piece + inner


def test_the_models_own_order() -> None:
    """torch.func.jvp refuses trees whose keys have another order; units have theirs by name."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"b": nn.Linear(3, 3), "a": nn.Linear(3, 3)})["b"], nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    named = {name: p.detach() for name, p in model.named_parameters()}
    for policy in (fs.policies.always(), fs.by_path({"2": fs.P(), "0": fs.P("shard")}), fs.policies.whole()):
        spec = pickle.loads(pickle.dumps(policy(model))).on({"shard": 1})
        shards = fs.shard(model, spec)
        trees = fs.unshard(shards, spec), fs.unshard(shards, spec), fs.unflatten(fs.flatten(named, spec), spec)
        for full in trees:
            assert [*full] == [*named]
            torch.func.jvp(lambda p: sum(x.sum() for x in p.values()), (named,), (full,))


# --- one by one, in the memory of two buckets ---
BUCKETS = (1, 200, "1GB")
ON_ONE = fs.policies.always()(net()).on({"shard": 1})
UNIT = 4 * 64 * 64
"""Bytes of one of its units."""
OTHERS = (torch.complex64, torch.complex128, torch.int16, torch.uint8, torch.bool)
DTYPES = (*OTHERS, torch.float8_e4m3fn, torch.float64, torch.float16)


def streamed(shards: Params, spec: PartitionSpec, **options: Any) -> Params:
    return {name: tensor.clone() for name, tensor in fs.stream_full(shards, spec, **options)}


def cast(full: Params, dtype: torch.dtype) -> Params:
    return {name: tensor.to(dtype) for name, tensor in full.items()}


def test_the_order_of_names() -> None:
    """Units by their first parameter in the model, and parameters as in the model; of a tied parameter the first name."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    model[2].weight = model[0].weight
    spec, shards = shards_of(fs.by_path({"1": P("shard")}), model, {"shard": 1})
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
        refused(ValueError, match, lambda: fs.stream_full(shards, ON_ONE, **options))
    refused(ValueError, "unit 'other' is not in the spec", lambda: fs.stream_full({"other": torch.ones(3)}, ON_ONE))
    with pytest.raises(ValueError, match=r"unit '.*' is on the meta device: expected values"):
        fs.stream_full({key: shard.to("meta") for key, shard in shards.items()}, ON_ONE)
    with pytest.raises(RuntimeError, match=r"inside a transform.*unshard\(params, spec\) is differentiable"):
        torch.func.grad(lambda p: sum(x.sum() for _, x in fs.stream_full(p, ON_ONE)))(shards)


def test_on_simulated_ranks() -> None:
    """They all run the same code, so one of them cannot get more than the others."""
    model = net()
    full = values(model)

    def run(mesh: Any) -> Params:
        spec = fs.policies.always()(model).on(mesh)
        for gather in (fs.stream_full, fs.unshard):
            with pytest.raises(ValueError, match=r"rank0_only on a simulated mesh: expected process groups"):
                gather(fs.shard(full, spec), spec, rank0_only=True)
        return streamed(fs.shard(full, spec), spec, dtype=torch.float64)

    for got in ({name: rows[i] for name, rows in fs.testing.spmd(run, 3)().items()} for i in range(3)):
        same(got, cast(full, torch.float64))


def chained(units: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(units)))


@at_most(4)
@every(mesh=["fsdp", "fsdp of 4", "hsdp", "both axes"], dtype=[None, torch.bfloat16])
def test_the_peak_is_two_buckets(mesh: str, dtype: torch.dtype | None) -> None:
    """Or two units, where they are larger, and what an inner axis has gathered of the one that arrives; to the first rank as
    well, while others hold no more than slices that are cast, and what an inner axis gathers.

    The loop holds its last parameter while it asks for the next one, as loops do. On the fake process group: gloo's threads let
    go of tensors when they please.
    """
    unit = UNIT // (1 if dtype is None else 2)
    size, part, inner = parts(mesh, unit)
    own = unit + (inner if mesh == "both axes" else 0)
    for buckets in (0.5, 1.0, 1.5, 2.0):
        with world(size):
            spec = bound(mesh, chained())
            shards = fs.shard(chained(), spec)
            with Peak(shards.values()) as peak:
                for _ in fs.stream_full(shards, spec, bucket=buckets * unit, dtype=dtype):
                    pass
        assert max(peak.made) == unit
        assert 2 * unit <= peak.bytes <= max(2 * own + part * (own > unit), 2 * buckets * unit)
        assert own > unit or peak.bytes == max(2, math.floor(2 * buckets)) * unit
    for rank in range(size):
        with world(size, rank):
            spec = bound(mesh, chained())
            shards = fs.shard(chained(), spec)
            with Peak(shards.values()) as watch:
                received = [name for name, _ in fs.stream_full(shards, spec, bucket=2 * unit, rank0_only=True, dtype=dtype)]
        assert len(received) == (8 if rank == 0 else 0)
        gathered = inner if mesh == "both axes" and rank % 2 == 0 else 0
        assert watch.bytes <= (4 * unit if rank == 0 else 3 * (gathered + part * (dtype is not None)))


def bytes_of(sent: Collectives) -> int:
    """What all-gathers, of which alone it is, have returned."""
    assert {s.op for s in sent.all} == {"all_gather"}
    return sum(s.bytes * s.ranks for s in sent.all)


def test_bytes_and_overlap() -> None:
    """Each unit is gathered once, in the narrower dtype, while those before it are used; those without a name not at all."""
    with world(4):
        model = chained()
        spec, shards = shards_of(fs.policies.always(), model)
        started: dict[float, list[int]] = {}
        for units in (0.5, 1, 1.5, 2, 10):
            with Collectives() as sent:
                started[units] = [len(sent.all) for _ in fs.stream_full(shards, spec, bucket=units * UNIT)]
            assert bytes_of(sent) == 8 * UNIT
        assert started[0.5] == started[1] == [2, 2, 3, 4, 5, 6, 7, 8] or started[1] == [2, *range(2, 9)]
        assert started[2] == [4, 4, 5, 6, 7, 8, 8, 8]
        assert started[10] == [8] * 8
        for dtype, factor in ((torch.bfloat16, 2), (torch.float64, 1)):
            with Collectives() as sent:
                list(fs.stream_full(shards, spec, dtype=dtype))
            assert bytes_of(sent) == 8 * UNIT // factor
        with Collectives() as sent:
            assert len(list(fs.stream_full(shards, spec, names=["0.*", "3.weight"]))) == 2
        assert bytes_of(sent) == 2 * UNIT


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
            refused(RuntimeError, r"was donated|the shard of unit '1' was modified in place", lambda: next(stream))
            same(streamed(fs.shard(model, spec), spec), values(model))


def fail(stream: Iterator[Any]) -> None:
    for _ in stream:
        raise ZeroDivisionError


@pytest.mark.usefixtures("not_on_worst")
@real_ranks(2)
def test_streams_that_are_left(rank: int) -> None:
    """By all ranks at one unit, by an error, or by each rank at another unit: the next calls are right."""
    model = chained(6)
    spec, full = fs.policies.always()(model).bound, values(model)
    shards = fs.shard(model, spec)

    loss = squared_loss(model, spec, torch.ones(2, 64))
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
            break
    same(fs.unshard(shards, spec), full)


@pytest.mark.usefixtures("not_on_worst")
@real_ranks(2)
def test_ranks_that_stream_different_parameters(rank: int) -> None:
    model = chained(3)
    spec, shards = shards_of(fs.policies.always(), model)
    for options in ({"names": f"{rank}.weight"}, {"dtype": (torch.bfloat16, torch.float16)[rank]}):
        for rank0_only in (False, True):
            with pytest.raises(RuntimeError, match="different units: gather of unit"):
                list(fs.stream_full(shards, spec, rank0_only=rank0_only, **options))
    with pytest.raises(RuntimeError, match="gather of unit '0' to the first rank"):
        fs.unshard(shards, spec, rank0_only=rank == 1, offload_to_cpu=True)


@real_ranks(2)
def test_l4_every_dtype_travels(rank: int) -> None:
    """What a backend does not reduce or know is moved as bytes.

    Only floating point parameters are cast, from 8 bits to 64; also in inference mode.
    """
    model = nn.Module()
    for i, dtype in enumerate(DTYPES):
        model.register_parameter(f"p{i}", nn.Parameter(torch.arange(7).to(dtype), requires_grad=False))
    spec, shards = shards_of(fs.policies.whole(), model)
    same(fs.unshard(shards, spec), values(model))
    first = fs.unshard(shards, spec, rank0_only=True)
    same(first, values(model) if rank == 0 else {})
    same(fs.shard(first or None, spec, src=0), shards)
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
    mesh = mesh_of(expert=2, shard=2)
    local = {"0": P("shard", local={"expert": {"*weight": 1}}, align=1), "1": P(local={"expert": 0})}
    policy = fs.by_path(local | {"2": P("shard", at_rest=fs.codecs.nf4(16)), "3": P()})
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


@pytest.mark.parametrize("precision", [Precision(param=torch.bfloat16), Precision(codec=fs.codecs.int8(4))], ids=str)
def test_pieces_are_what_is_stored(precision: Precision) -> None:
    """Without the casts and codecs of calls, as whole parameters are."""
    model = nn.Linear(4, 4)
    spec = fs.policies.whole(P("shard", precision=precision))(model).on({"shard": 2})
    run = fs.testing.spmd(lambda mesh: fs.unshard(fs.shard(model, spec.on(mesh)), spec.on(mesh), whole=False), 2)
    torch.testing.assert_close(
        run(), {name: torch.stack(2 * [p.detach()]) for name, p in model.named_parameters()}, rtol=0, atol=0
    )
