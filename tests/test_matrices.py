"""Which ranks own whole matrices, and the way there and back: from the spec alone, an inverse pair, linear."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from depth import at_most, depth, each, mark_seldom
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import Pool
from test_by_matrix import MESHES, MODEL, WANTED, collect, matrices_on, spec_on, spread
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard._core.tree import Param
from funshard._slices.pieces import Piece, slice_pieces
from funshard.collectives import ProcessAxis
from funshard.optim._matrices import ExchangePlan, plan_exchange
from funshard.optim._owners import Matrix, assign_owners
from funshard.testing import spmd

At = tuple[int, ...]

# --- the ways of all ranks, walked in one process ---

SHAPES = [(), (3,), (1, 5), (4, 1), (1, 1), (2, 3), (5, 2), (3, 3), (2, 3, 2), (4, 2, 3, 1), (7, 11), (0, 3)]


class Node(nn.Module):
    """Parameters of any shapes, dtypes and memory orders."""

    def __init__(self, params: list[tuple[tuple[int, ...], torch.dtype, bool]]) -> None:
        super().__init__()
        for i, (shape, dtype, turned) in enumerate(params):
            tensor = torch.zeros(shape[::-1] if turned else shape, dtype=dtype)
            tensor = tensor.permute([*range(len(shape))][::-1]) if turned else tensor
            self.register_parameter(f"w{i}", nn.Parameter(tensor, requires_grad=dtype.is_floating_point))


@st.composite
def sharded(draw: st.DrawFn) -> fs.PartitionSpec:
    """A spec of units that are split over any axes of a mesh, whose groups have the names of their axes."""
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.int32])
    param = st.tuples(st.sampled_from(SHAPES), dtypes, st.booleans())
    model = nn.ModuleList([Node(some) for some in draw(st.lists(st.lists(param, max_size=5), min_size=1, max_size=4))])
    owners = [module for module in model if [*module.parameters()]]
    assume(owners)
    if len(owners) > 1 and draw(st.booleans()):
        owners[-1].register_parameter("tied", next(owners[0].parameters()))
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 8]), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 64))
    names = [f"axis{i}" for i in range(len(sizes))]
    axes = st.permutations(names).flatmap(lambda some: st.integers(0, len(some)).map(lambda n: tuple(some[:n])))
    p = st.builds(P, axes, align=st.sampled_from([None, 1, 4]))
    policy = fs.by_path({str(i): draw(p) for i in range(len(model)) if [*model[i].parameters()]}, draw(p))
    return policy(model).on({name: ProcessAxis(size, 0, name) for name, size in zip(names, sizes, strict=True)})


@pytest.fixture(autouse=True)
def _groups_in_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent over them is followed by hand."""
    monkeypatch.setattr(fs.collectives.Mesh, "check_groups", lambda mesh: None)


def seen(name: str, param: Param) -> bool | tuple[int, ...]:
    """Stacks as batches, and convolutions as matrices where their memory allows it."""
    return (len(param.shape) == 4 and not param.permuted and (param.shape[0], -1)) or len(param.shape) > 1


def walk(
    ways: Mapping[At, ExchangePlan], spec: fs.PartitionSpec, parts: Mapping[At, list[Tensor]]
) -> tuple[dict[At, list[Tensor]], int]:
    """What becomes of every rank's parts, and how many elements went from one rank to another."""
    names, moved = spec.bound_mesh.names, 0
    flat = {at: torch.cat(some) for at, some in parts.items()}
    assert len({len(way.steps) for way in ways.values()}) == 1
    for hops in zip(*(way.steps for way in ways.values()), strict=True):
        now = dict(zip(ways, hops, strict=True))
        for at, hop in now.items():
            held = flat[at].split([*hop.sizes])
            flat[at] = torch.cat([flat[at][:0], *(held[i] for i in hop.order)])
        assert len({hop.group for hop in hops}) == 1
        if hops[0].group:
            axis = names.index(hops[0].group)
            sent = {at: flat[at].split([*hop.send]) for at, hop in now.items()}
            for at, hop in now.items():
                others = [(*at[:axis], j, *at[axis + 1 :]) for j in range(len(hop.receive))]
                arrived = [sent[other][at[axis]] for other in others]
                assert [len(x) for x in arrived] == [*hop.receive]
                moved += sum(len(x) for other, x in zip(others, arrived, strict=True) if other != at)
                flat[at] = torch.cat(arrived)
    return {at: [*flat[at].split([*way.end])] for at, way in ways.items()}, moved


def piece_of(matrix: Matrix, spec: fs.PartitionSpec, at: At) -> Piece:
    return next(piece for piece in slice_pieces(matrix.unit, spec, at) if piece.param.name == matrix.name)


@settings(max_examples=depth(25, 2000))
@given(sharded())
def test_the_ways_of_all_ranks_fit(spec: fs.PartitionSpec) -> None:
    """Every rank gets what the others send it; matrices arrive whole at their owners, and slices at all replicas.

    What is sent is at most each matrix once for each axis, each way, and once to each replica.
    """
    known = fs.optim.matrices(spec, select=seen)
    ranks = [*itertools.product(*(range(size) for _, size in spec.bound_mesh.sizes))]
    numbered = iter(range(1, 10**6))
    for names in known.groups:
        some = [known.by_name[name] for name in names]
        full = {m.name: torch.tensor([next(numbered) for _ in range(m.param.numel)]) for m in some}
        cut = {at: [piece_of(m, spec, at) for m in some] for at in ranks}
        slices = {
            at: [full[m.name][p.begin : p.begin + p.high - p.low] for m, p in zip(some, cut[at], strict=True)] for at in ranks
        }
        whole, collected = walk({at: plan_exchange(some, spec, at, to_owners=True) for at in ranks}, spec, slices)
        for at in ranks:
            for matrix, got in zip(some, whole[at], strict=True):
                assert torch.equal(got, full[matrix.name] if matrix.owner == at else got[:0])
        again, spread = walk({at: plan_exchange(some, spec, at, to_owners=False) for at in ranks}, spec, whole)
        for at in ranks:
            for want, got in zip(slices[at], again[at], strict=True):
                assert torch.equal(got, want)
        numel, axes = sum(m.param.numel for m in some), some[0].unit.p.axes
        hops = sum(spec.bound_mesh[name].size > 1 for name in axes)
        replicas = len(ranks) // spec.size(some[0].unit)
        assert collected <= hops * numel
        assert spread <= (hops + replicas - 1) * numel


@settings(max_examples=depth(10, 300))
@given(sharded())
def test_all_ranks_agree(spec: fs.PartitionSpec) -> None:
    """On the owners and the groups, whichever rank asks; each group is of one dtype and one way, each matrix in one."""
    known = fs.optim.matrices(spec, select=seen)
    last = spec.on({name: ProcessAxis(size, size - 1, name) for name, size in spec.bound_mesh.sizes})
    other = fs.optim.matrices(last, select=seen)
    assert (known.chosen, known.groups, str(known)) == (other.chosen, other.groups, str(other))
    assert [name for names in known.groups for name in names] == [m.name for m in known.chosen]
    for names in known.groups:
        assert len({(known.by_name[name].unit.dtype, known.by_name[name].unit.p.axes) for name in names}) == 1


def test_what_rests_on_the_host_is_sent_by_itself() -> None:
    """Its gradients are there too, and those of others on the device: tensors of one group are of one device."""
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    one, other = P("shard"), P("shard", offload="params")
    for first, groups in ((other, (("0.weight", "1.weight"),)), (one, (("0.weight",), ("1.weight",)))):
        known = fs.optim.matrices(fs.by_path({"0": first, "1": other})(layers).on({"shard": 8}))
        assert known.groups == groups


def test_ranks_work_on_a_group_at_the_same_time() -> None:
    """Of ranks that have as much to do, the small matrix of a group is for the one that has not its large one."""
    layers = nn.Sequential(*(nn.Linear(n, n, bias=False) for n in (8, 2, 8, 2)))
    known = fs.optim.matrices(fs.policies.whole()(layers).on({"shard": 2}))
    owners = [matrix.owner for matrix in assign_owners(known.chosen, [[0, 1], [2, 3]], known.spec)]
    assert owners == [(0,), (1,), (1,), (0,)]


# --- collect and spread ---

LAWS = {name: MESHES[name] for name in ("fsdp", "3 ranks", "8 ranks", "ddp", "hsdp", "two axes")}


def trees(model: nn.Module) -> list[fs.Params]:
    """Three of numbers in the shapes of the parameters."""
    g = torch.Generator().manual_seed(0)
    return [{name: torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in model.named_parameters()} for _ in range(3)]


HALVES = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(4, 4, bias=False)).double()
"""As one unit: of two ranks each has one of the matrices, and owns the other."""
TREES = {False: trees(MODEL), True: trees(HALVES)}


def of(mesh: Any, axis: Any, halves: bool) -> fs.optim._matrices.Matrices:
    if halves:
        return fs.optim.matrices(fs.policies.whole(P(axis))(HALVES).on(mesh))
    return matrices_on(spec_on(mesh, axis), "muon")


def derived(known: fs.optim._matrices.Matrices, trees: list[fs.Params]) -> dict[str, fs.Params]:
    """Full trees: there and back; of a cube of the matrices in between tangent, pullback and second derivatives."""
    spec = known.spec
    x, v, c = (fs.shard(full, spec) for full in trees)

    def cube(x: fs.Params) -> fs.Params:
        return spread(known, {name: m**3 for name, m in collect(known, x).items()})

    def dot(a: fs.Params, b: fs.Params) -> Tensor:
        return sum((a[key] * b[key]).sum() for key in a)  # pyright: ignore[reportReturnType]

    inner = {key: p for key, p in x.items() if known._names_in(key)}
    others = {key: p for key, p in x.items() if key not in inner}
    gradient = torch.func.grad(lambda x: dot(cube(x), c))
    out = {
        "there and back": spread(known, collect(known, x)),
        "jvp": torch.func.jvp(cube, (x,), (v,))[1],
        "vjp": torch.func.vjp(cube, x)[1]({key: c[key] for key in inner})[0],
        "grad of grad": torch.func.grad(lambda x: dot(gradient(x), v))(x),
        "jvp of grad": torch.func.jvp(gradient, (x,), (v,))[1],
    }
    batched = torch.func.vmap(cube)({key: torch.stack([p, v[key]]) for key, p in x.items()})
    out |= {f"vmap {i}": {key: p[i] for key, p in batched.items()} for i in range(2)}
    mapped = torch.func.vmap(torch.func.grad(lambda x, c: dot(cube(x), c)), in_dims=(None, 0))
    out["vmap of grad"] = {key: p[1] for key, p in mapped(x, {key: torch.stack([v[key], c[key]]) for key in c}).items()}
    zeros = {key: torch.zeros_like(p) for key, p in others.items()}
    return {what: fs.unshard({**zeros, **got}, spec) for what, got in out.items()}


def expected(halves: bool) -> dict[str, fs.Params]:
    matrices = {*dict(HALVES.named_parameters())} if halves else WANTED
    x, v, c = ({name: x if name in matrices else 0 * x for name, x in full.items()} for full in TREES[halves])
    of: dict[str, Any] = {
        "there and back": lambda x, v, c: x,
        "jvp": lambda x, v, c: 3 * x**2 * v,
        "vjp": lambda x, v, c: 3 * x**2 * c,
        "grad of grad": lambda x, v, c: 6 * x * v * c,
        "jvp of grad": lambda x, v, c: 6 * x * v * c,
        "vmap 0": lambda x, v, c: x**3,
        "vmap 1": lambda x, v, c: v**3,
        "vmap of grad": lambda x, v, c: 3 * x**2 * c,
    }
    return {what: {name: f(x[name], v[name], c[name]) for name in x} for what, f in of.items()}


@at_most(1)
@each
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("mesh", LAWS)
def test_inverse_pair_and_derivatives_on_simulated_ranks(mesh: str, halves: bool) -> None:
    sizes, axis = LAWS[mesh]
    ranks = math.prod(sizes.values())
    got = spmd(lambda mesh, _: derived(of(mesh, axis, halves), TREES[halves]), sizes)(torch.zeros(ranks))
    for what, want in expected(halves).items():
        for rank in range(ranks):
            assert_close({name: x[rank] for name, x in got[what].items()}, want, msg=lambda m, what=what: f"{what}: {m}")


def derived_on_ranks(rank: int, sizes: dict[str, int], axis: Any, halves: bool) -> tuple[dict[str, fs.Params], dict[str, At]]:
    known = of(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), axis, halves)
    full = TREES[halves]
    collected = collect(known, fs.shard(full[0], known.spec))
    for name, got in collected.items():
        assert_close(got, full[0][name] if known._is_owner(name) else got.new_empty(0))
    return derived(known, full), {name: known.by_name[name].owner for name in collected}


@at_most(1)
@each
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("mesh", mark_seldom(["fsdp", "ddp", "hsdp", "two axes"], "fsdp", "hsdp"))
def test_inverse_pair_and_derivatives_on_real_ranks(gloo2: Pool, gloo4: Pool, mesh: str, halves: bool) -> None:
    """Also where a rank has no part of a matrix, or owns none of a group: it sends and receives what the others do."""
    sizes, axis = LAWS[mesh]
    want = expected(halves)
    owners: list[Any] = []
    for got, of in (gloo4 if math.prod(sizes.values()) == 4 else gloo2).run(derived_on_ranks, sizes, axis, halves):
        for what in want:
            assert_close(got[what], want[what], msg=lambda m, what=what: f"{what}: {m}")
        owners.append(of)
    assert all(of == owners[0] for of in owners)
