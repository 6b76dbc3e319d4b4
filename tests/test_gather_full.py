"""unshard to the host or the first rank, and shard from one, on real ranks: rows C1 to C11, torch's summon_full_params."""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same
from collective_log import world
from depth import at_most, mark_seldom
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P, Params, PartitionSpec, Precision

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
    return make(p)(model).on(init_device_mesh("cpu", shape, mesh_dim_names=names))


def values(model: nn.Module) -> Params:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def pool_of(mesh: str, gloo2: Pool, gloo4: Pool) -> Pool:
    return gloo2 if MESHES[mesh][0] == 2 else gloo4


def round_trip(rank: int, mesh: str, src: int) -> bool:
    model = net()
    spec, full = bound(mesh, model), values(model)
    shards = fs.shard(model, spec)
    same(shards, fs.shard(full, spec, rank=rank))
    kept = {key: shard.clone() for key, shard in shards.items()}
    for offload in (False, True):
        same(fs.unshard(shards, spec, offload_to_cpu=offload), full)
        same(fs.unshard(shards, spec, rank0_only=True, offload_to_cpu=offload), full if rank == 0 else {})
    same(dict(sorted(fs.unshard(shards, spec).items())), dict(sorted(full.items())))
    edited = {name: tensor * 3 - 1 for name, tensor in full.items()}
    before = {name: tensor.clone() for name, tensor in edited.items()}
    written = fs.shard(edited if rank == src else None, spec, src=src)
    same(written, fs.shard(before, spec, rank=rank))
    for tensor in (*written.values(), *fs.unshard(shards, spec).values()):
        tensor.zero_()
    same(shards, kept)  # L8: what came back was a copy, on the source as well
    same(edited, before)
    return True


@at_most(1)
@pytest.mark.parametrize("mesh", mark_seldom(sorted(MESHES), *sorted(MESHES)[::2]))
def test_full_parameters_leave_and_enter(mesh: str, gloo2: Pool, gloo4: Pool) -> None:
    """C1, C4, C5, C6, C10: full values, shapes and dtypes on every mesh, on all ranks or the first; written back from any."""
    size = MESHES[mesh][0]
    for src in (0, size - 1):
        assert pool_of(mesh, gloo2, gloo4).run(round_trip, mesh, src) == [True] * size


@pytest.mark.parametrize("rank0_only", [False, True])
@real_ranks(2)
def test_unshard_params_writeback(rank: int, rank0_only: bool) -> None:
    """C3, C5: an edit is kept if written back and dropped if not; with rank0_only too, which torch refuses."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    spec = fs.by_type(nn.Linear)(model).bound
    shards = {key: torch.full_like(shard, rank + 2.0) for key, shard in fs.shard(model, spec).items()}
    full = fs.unshard(shards, spec, rank0_only=rank0_only)
    zeroed = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    assert shards["0"][0] == rank + 2
    scattered = fs.shard(zeroed if rank == 0 else None, spec, src=0)
    sliced = scattered if rank0_only else fs.shard(zeroed, spec)
    same(sliced, scattered)
    assert not sliced["0"].any()
    assert not sliced["1"].any()


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


@real_ranks(2)
def test_unshard_params_recurse(rank: int) -> None:
    """C2, C11: which of the nested units are gathered is what `units` says; the numels are the parameters', not padded."""
    model = nn.Sequential(nn.Linear(5, 2), nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(3, 1)))
    spec = fs.by_path({"1": P("shard"), "1.1": P("shard")})(model).bound
    shards = fs.shard(model, spec)
    root, outer, inner = {"0.bias": 2, "0.weight": 10}, {"1.0.weight": 10}, {"1.1.bias": 1, "1.1.weight": 3}
    for units, numels in ((None, root | outer | inner), (["1"], outer), (["1.1"], inner), ([], {})):
        assert {n: t.numel() for n, t in fs.unshard(shards, spec, units=units).items()} == numels


def gradients(rank: int, mesh: str) -> Params:
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
    return {name: tensor.abs().sum() for name, tensor in full.items()}


@pytest.mark.parametrize("mesh", ["fsdp", "ddp", "hsdp", "both axes"])
def test_with_grads(mesh: str, gloo2: Pool, gloo4: Pool) -> None:
    """C7: gradients are gathered like parameters and equal DDP's; edits of them are written back the same way."""
    for sums in pool_of(mesh, gloo2, gloo4).run(gradients, mesh):
        assert sums["inner.0.weight"] > 0


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


@real_ranks(2)
def test_apply_to_the_full_parameters_equals_apply_to_the_model(rank: int) -> None:
    """module.apply(init) is sharding the initialised full parameters of one rank."""
    model, twin = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    spec = fs.by_type(nn.Linear)(model).bound
    full = fs.unshard(fs.shard(model, spec), spec, rank0_only=True)
    for tensor in full.values():
        nn.init.constant_(tensor, 5)
    twin.apply(lambda m: [nn.init.constant_(p, 5) for p in m.parameters(recurse=False)])
    same(fs.shard(full or None, spec, src=0), fs.shard(twin, spec))


class Watch(TorchDispatchMode):
    """The bytes of the storages alive of those that ops returned, at their peak, and of the largest one; but for known ones."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.refs: list[weakref.ref[Tensor]] = []
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.refs.append(weakref.ref(tensor))
        alive = [tensor for ref in self.refs if (tensor := ref()) is not None]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in alive}
        storages = {key: size for key, size in storages.items() if key not in self.known}
        self.largest = max([self.largest, *storages.values()])
        self.peak = max(self.peak, sum(storages.values()))
        return out


def memory(rank: int, mesh: str) -> dict[str, tuple[int, int]]:
    """(largest tensor, peak beyond arguments and results) in elements, of each call."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    spec = bound(mesh, model)
    shards = fs.shard(model, spec)
    full = fs.unshard(shards, spec)
    calls: dict[str, Callable[[], Params]] = {
        "all": lambda: fs.unshard(shards, spec, offload_to_cpu=True),
        "rank0_only": lambda: fs.unshard(shards, spec, rank0_only=True, offload_to_cpu=True),
        "from one": lambda: fs.shard(full if rank == 0 else None, spec, src=0),
    }
    out: dict[str, tuple[int, int]] = {}
    for name, call in calls.items():
        with Watch() as watch:
            result = call()
        out[name] = watch.largest // 4, watch.peak // 4 - sum(tensor.numel() for tensor in result.values())
    return out


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp of 4", "hsdp", "both axes"])
def test_the_peak_is_one_unit(mesh: str) -> None:
    """C4, C5: with rank0_only nothing larger than a slice exists off the first rank; nowhere are two units gathered.

    On torch's fake process group, a rank after the other: gloo's threads let go of tensors when they please.
    """
    size, shape, names, p = MESHES[mesh]
    unit, piece = 64 * 64, 64 * 64 // math.prod(n for n, name in zip(shape, names, strict=True) if name in p.axes)
    inner = piece * shape[-1] if mesh == "both axes" else piece  # the rows of the inner axis, on its first rank
    for rank in range(size):
        with world(size, rank):
            seen = memory(rank, mesh)
        assert seen["all"] == (unit, unit)  # beyond the result of six
        if rank:
            assert seen["rank0_only"][0] <= inner < unit
            assert seen["from one"][0] <= inner
        else:
            assert seen["rank0_only"][0] == unit
            assert seen["rank0_only"][1] <= unit + piece + inner
            assert seen["from one"][1] <= 2 * unit + piece + inner  # the source's own tensor as well


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


@real_ranks(2)
def test_a_model_without_parameters(rank: int) -> None:
    """``shard(full or None, src=0)`` gives rank 0 None there: nothing comes back."""
    model = nn.Sequential(nn.ReLU())
    spec = fs.policies.whole()(model)
    full = fs.unshard(fs.shard(model, spec), spec, rank0_only=True)
    assert fs.shard(full or None, spec, src=0) == {}
