"""Optimizers of matrices: equal to the unsharded ones on every mesh; owners and ways from the spec alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matrix_peers as peers
import pytest
import torch
from depth import at_most, depth, each, mark_seldom
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from models import refused
from ranks import Pool, mesh_of, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard._core.tree import Param
from funshard._slices.pieces import Piece, slice_pieces
from funshard.collectives import ProcessAxis
from funshard.optim._matrices import ExchangePlan, Matrix, assign_owners, plan_exchange
from funshard.testing import spmd

STEPS = 10
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
REST = fs.optim.from_torch(torch.optim.AdamW)
ADAMW: dict[str, float] = {"lr": 0.05, "weight_decay": 0.1}


def model() -> nn.Module:
    """Embeddings, biases, a norm, a head, tall, wide and square matrices, some of one shape."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    return nn.Sequential(nn.Embedding(11, 6), block, nn.Linear(8, 3), nn.Linear(3, 11)).double()


MODEL = model()
WANTED = {"1.0.weight", "1.2.weight", "1.3.weight", "2.weight"}
GRADS = [
    {name: torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in MODEL.named_parameters()}
    for g in (torch.Generator().manual_seed(t) for t in range(STEPS))
]
PARAMS = {name: p.detach() for name, p in MODEL.named_parameters()}

OPTIMIZERS: dict[str, tuple[Any, peers.Peer]] = {
    "muon": (lambda where, **o: fs.optim.muon(where, dtype=torch.float64, **ADAMW, **o), peers.muon()),
    "shampoo": (lambda where, **o: fs.optim.shampoo(where, eps=1e-2, **ADAMW, **o), peers.shampoo()),
    "shampoo every 3": (
        lambda where, **o: fs.optim.shampoo(where, eps=1e-2, every=3, decay=0.9, momentum=0.5, **ADAMW, **o),
        peers.shampoo(every=3, beta=0.9, mu=0.5),
    ),
    "soap": (lambda where, **o: fs.optim.soap(where, betas=(0.9, 0.8), every=3, **ADAMW, **o), peers.soap()),
    "soap of one side": (
        lambda where, **o: fs.optim.soap(where, betas=(0.9, 0.8), every=3, max_size=6, **ADAMW, **o),
        peers.soap(max_size=6),
    ),
}
SQUARE = {"1.2.weight", "1.3.weight"}
"""Of the others the larger factor has no inverse at first, and in its null space SOAP's basis is any."""
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "alone": ({"shard": 1}, "shard"),
    "fsdp": ({"shard": 2}, "shard"),
    "3 ranks": ({"shard": 3}, "shard"),
    "8 ranks": ({"shard": 8}, "shard"),
    "ddp": ({"shard": 2}, None),
    "hsdp": ({"replicate": 2, "shard": 2}, "shard"),
    "two axes": ({"a": 2, "b": 2}, ("b", "a")),
}


POLICIES = {"whole": fs.policies.whole(), "always": fs.policies.always(), "linear ddp": fs.by_type(nn.Linear, p=fs.P())}


def spec_on(mesh: Any, axis: Any) -> fs.PartitionSpec:
    return fs.by_type(nn.Sequential, nn.Linear, p=fs.P(axis))(MODEL).on(mesh)


ALONE = spec_on({"shard": 1}, "shard")


def matrices_on(spec: fs.PartitionSpec, optimizer: str) -> fs.optim._matrices.Matrices:
    hidden = fs.optim.hidden(MODEL, "3")
    return fs.optim.matrices(spec, select=lambda name, p: hidden(name, p) and name in wanted(optimizer))


def collect(known: fs.optim._matrices.Matrices, tree: fs.Params) -> fs.Params:
    """The matrices of the units in a tree, whole on their owners: empty elsewhere, zeros on simulated ranks."""
    parts = {name: known._select(key, tree[key], name) for key in tree for name in known._names_in(key)}
    return {name: x for batch in known._batches_of(tree) for name, x in batch.collect(parts)().items()}


def spread(known: fs.optim._matrices.Matrices, whole: fs.Params) -> fs.Params:
    """The slices of whole matrices, with zeros for all other elements: the inverse and the transpose of `collect`."""
    keys = dict.fromkeys(known.by_name[name].unit.key for name in whole)
    parts = {name: x for batch in known._batches_of(keys) for name, x in batch.spread(whole)().items()}
    own = {key: {name: parts[name] for name in known._names_in(key)} for key in keys}
    numels = {key: known.spec.shard_numel(known.spec.by_key[key]) for key in keys}
    return {key: known._join(key, some, next(iter(some.values())).new_zeros(numels[key])) for key, some in own.items()}


def wanted(optimizer: str) -> set[str]:
    return SQUARE if optimizer == "soap" else WANTED


def expected(optimizer: str) -> fs.Params:
    return peers.trained(PARAMS, GRADS, OPTIMIZERS[optimizer][1], wanted(optimizer), **ADAMW)


def made(optimizer: str, spec: fs.PartitionSpec, **options: Any) -> Any:
    return OPTIMIZERS[optimizer][0](matrices_on(spec, optimizer), **options)


def ours(mesh: Any, axis: Any, optimizer: str, **options: Any) -> fs.Params:
    """Full parameters after all steps."""
    spec = spec_on(mesh, axis)
    return fs.unshard(peers.sharded(spec, made(optimizer, spec, **options), PARAMS, GRADS)[0], spec)


def test_what_is_hidden() -> None:
    """Neither embeddings nor heads, nor what is tied to one; a wrong name is an error."""
    assert set(fs.optim.matrices(ALONE, select=fs.optim.hidden(MODEL, "3")).by_name) == WANTED
    with pytest.raises(ValueError, match="hidden: 'lm_head' is no module of the model: expected paths such as"):
        fs.optim.hidden(MODEL, "lm_head")
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False))
    tied[2].weight = tied[0].weight
    assert set(fs.optim.matrices(fs.policies.whole()(tied), select=fs.optim.hidden(tied)).by_name) == {"1.weight"}


def ranks_of(mesh: str) -> int:
    return math.prod(MESHES[mesh][0].values())


@at_most(1)
@each(mesh=MESHES, optimizer=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_equal_to_the_unsharded_one_on_simulated_ranks(optimizer: str, mesh: str) -> None:
    sizes, axis = MESHES[mesh]
    got = spmd(lambda mesh, _: ours(mesh, axis, optimizer), sizes)(torch.zeros(ranks_of(mesh)))
    for name, want in expected(optimizer).items():
        assert_close(got[name], want.expand_as(got[name]), **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@at_most(1)
@each(donate=[False, True], mesh=["fsdp", "ddp", "hsdp", "two axes"], optimizer=OPTIMIZERS)
@real_ranks(ranks_of)
def test_equal_to_the_unsharded_one_on_real_ranks(rank: int, optimizer: str, mesh: str, donate: bool) -> None:
    """Also where the step writes into what it was given."""
    sizes, axis = MESHES[mesh]
    assert_close(ours(mesh_of(**sizes), axis, optimizer, donate=donate), expected(optimizer), **CLOSE)


def saved_in_the_middle(rank: int, mesh: str, optimizer: str, path: str) -> None:
    sizes, axis = MESHES[mesh]
    spec = spec_on(mesh_of(**sizes), axis)
    params, state = peers.sharded(spec, made(optimizer, spec), PARAMS, GRADS[: STEPS // 2])
    assert all(x.is_contiguous() for unit in state.values() for slots in unit.owned.values() for x in slots.values())
    fs.checkpoint.save(path, {"params": params, "opt": state}, spec)


def loaded_in_the_middle(rank: int, ranks: int, policy: str, optimizer: str, path: str) -> None:
    spec = POLICIES[policy](MODEL).on(mesh_of(ranks))
    init, update = made(optimizer, spec)
    params = fs.shard({name: torch.zeros_like(p) for name, p in PARAMS.items()}, spec)
    with pytest.raises(ValueError, match=r"state 'opt\..*': .*, or of an optimizer of matrices, or in a codec: expected like="):
        fs.checkpoint.load(path, spec)
    state = fs.checkpoint.load(path, spec, like={"params": params, "opt": init(params)})
    params, state = state["params"], state["opt"]
    assert all(isinstance(unit, fs.optim._by_matrix.MatrixState) for unit in state.values())
    for grads in GRADS[STEPS // 2 :]:
        params, state = update(fs.shard(grads, spec), state, params)
    assert_close(fs.unshard(params, spec), expected(optimizer), **CLOSE)


@at_most(1)
@each(policy=POLICIES, mesh=["fsdp", "hsdp", "two axes"], optimizer=mark_seldom(OPTIMIZERS, *[*OPTIMIZERS][::2]))
def test_another_world_size_in_the_middle(
    gloo2: Pool, gloo4: Pool, tmp_path: Path, optimizer: str, mesh: str, policy: str
) -> None:
    """Saved on four ranks (or two), loaded on two (or four) with another policy: equal to rounding; state is row by row."""
    first, second = (gloo4, gloo2) if ranks_of(mesh) == 4 else (gloo2, gloo4)
    first.run(saved_in_the_middle, mesh, optimizer, str(tmp_path))
    second.run(loaded_in_the_middle, second.size, policy, optimizer, str(tmp_path))


# --- your own, and what goes wrong in it ---
def test_an_update_that_raises_in_the_middle() -> None:
    """Nothing has happened; or what was donated, which is half written, is gone."""
    calls: list[int] = []

    def step(grad: Tensor, state: Any, param: Tensor) -> tuple[Tensor, Any]:
        calls.append(0)
        if len(calls) % 4 == 0:
            raise RuntimeError("the fourth")
        return param - grad, {"momentum": grad}

    spec, everything = ALONE, fs.optim.matrices(ALONE, select=lambda name, param: True)
    for donate in (False, True):
        pair = fs.optim.by_matrix(lambda p: {"momentum": torch.zeros_like(p)}, step, everything, fallback=REST, donate=donate)
        params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
        state = pair.init(params)
        calls.clear()
        refused(RuntimeError, "the fourth", lambda: pair.update(grads, state, params))
        for x in (*params.values(), *(x for unit in state.values() for x in unit.slices.values())):
            if donate:
                refused(RuntimeError, "donated", lambda: x.sum())
        if not donate:
            assert_close(fs.unshard(params, spec), PARAMS, rtol=0, atol=0)
            assert not any(x.any() for unit in state.values() for x in unit.slices.values())


def test_a_rest_that_writes_alone_leaves_the_parameters_that_were_given() -> None:
    """Of units with matrices it is given copies, which are the new ones."""
    spec = ALONE
    known, found = matrices_on(spec, "muon"), list[fs.Params]()
    for donate in (False, True):
        params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
        given = {key: x for key, x in params.items() if known._names_in(key)}
        before = {key: x.clone() for key, x in given.items()}
        init, update = fs.optim.muon(known, fallback=fs.optim.from_torch(torch.optim.AdamW, donate=donate))
        found.append(update(grads, init(params), params)[0])
        assert_close(given, before, rtol=0, atol=0)
    assert_close(*found, rtol=0, atol=0)


def test_memory_that_would_be_written_twice_is_refused() -> None:
    """With donate, before anything is sent: a gradient, a slot or a shard in the memory of another."""
    spec = ALONE
    init, update = fs.optim.muon(matrices_on(spec, "muon"), donate=True)
    params = fs.shard(PARAMS, spec)
    state, grads = init(params), fs.shard(GRADS[0], spec)
    key = next(key for key, unit in state.items() if unit.slices)
    slices = {"momentum_buffer": params[key]}
    for both in ((params, state), (grads, {**state, key: state[key]._replace(slices=slices)})):
        with pytest.raises(ValueError, match=r"share memory, which donate=True writes: expected tensors of their own"):
            update(*both, params)
    assert_close(fs.unshard(params, spec), PARAMS, rtol=0, atol=0)


def test_the_state_of_another_optimizer_is_refused() -> None:
    """Also where both have momentum alone in slices, and where it is of other matrices."""
    params, grads = fs.shard(PARAMS, ALONE), fs.shard(GRADS[0], ALONE)
    every = {name: made(name, ALONE) for name in OPTIMIZERS}
    before = {key: x.clone() for key, x in params.items()}
    for mine, other in (("muon", "shampoo"), ("shampoo", "muon"), ("soap", "muon"), ("muon", "soap of one side")):
        with pytest.raises(ValueError, match=r"state of unit '.*expected .*was it made"):
            every[mine][1](grads, every[other][0](params), params)
    with pytest.raises(TypeError, match="expected a MatrixState, got UnitState; make it by init"):
        every["muon"][1](grads, REST[0](params), params)
    assert_close(params, before, rtol=0, atol=0)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "shape": (lambda p: {}, lambda g, s, p: (p.mT, {}), r"the update of a matrix \[8, 6\]: expected \[8, 6\] .*, got \[6, 8\]"),
    "state": (lambda p: {"m": p}, lambda g, s, p: (p, {}), "the new state of .*: expected {'m': .*}, as before, got {}"),
    "no pair": (lambda p: {}, lambda g, s, p: p, r"expected \(new param, new state\), got Tensor"),
    "no dict": (lambda p: p, lambda g, s, p: (p, {}), "init: expected a dict of tensors"),
    "values": (lambda p: {"m": torch.tensor(p.sum().item())}, lambda g, s, p: (p, s), "init runs on a meta tensor first"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_update_is_refused_where_it_is_made(wrong: str) -> None:
    """On all ranks, before anything is sent: alone on an owner it would leave the others waiting."""
    init, update, message = WRONG[wrong]
    where = matrices_on(spec_on({"shard": 4}, "shard"), "muon")
    refused((ValueError, TypeError), message, lambda: fs.optim.by_matrix(init, update, where, fallback=REST))
    with pytest.raises(TypeError, match=r"fallback: expected \(init, update\), such as"):
        fs.optim.muon(where, fallback=torch.optim.AdamW)  # pyright: ignore[reportArgumentType]


@real_ranks(2)
def test_an_update_that_writes_changes_nothing_of_the_callers(rank: int) -> None:
    """Nor where the matrices are whole on the rank that has them, or on every rank."""

    def update(g: Tensor, s: Any, p: Tensor) -> tuple[Tensor, Any]:
        return p.sub_(g.mul_(2)), {"m": s["m"].add_(1)}

    for spec in (ALONE, spec_on(mesh_of(2), None)):
        known = matrices_on(spec, "muon")
        begin, update_all = fs.optim.by_matrix(lambda p: {"m": torch.zeros_like(p)}, update, known, fallback=REST)
        params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
        state = begin(params)
        kept = [{key: x.clone() for key, x in tree.items()} for tree in (params, grads)]
        new, after = update_all(grads, state, params)
        assert_close([params, grads], kept, rtol=0, atol=0)
        assert not any(x.any() for unit in state.values() for x in unit.slices.values())
        full = fs.unshard(new, spec)
        assert_close({name: full[name] for name in WANTED}, {name: PARAMS[name] - 2 * GRADS[0][name] for name in WANTED})
        assert any(x.slices for x in after.values())


# --- which ranks own whole matrices, and the ways there and back, walked in one process ---
At = tuple[int, ...]
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


@pytest.fixture
def groups_in_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("groups_in_name_only")
@settings(max_examples=depth(25, 2000), suppress_health_check=[*HealthCheck])
@given(sharded())
def test_the_ways_of_all_ranks_fit(spec: fs.PartitionSpec) -> None:
    """Every rank gets what the others send it; matrices arrive whole at their owners, and slices at all replicas. What is
    sent is at most each matrix once for each axis, each way, and once to each replica. All ranks agree on owners and groups,
    whose matrices are of one dtype and one way."""
    known = fs.optim.matrices(spec, select=seen)
    last = spec.on({name: ProcessAxis(size, size - 1, name) for name, size in spec.bound_mesh.sizes})
    other = fs.optim.matrices(last, select=seen)
    assert (known.chosen, known.groups, str(known)) == (other.chosen, other.groups, str(other))
    assert [name for names in known.groups for name in names] == [m.name for m in known.chosen]
    ranks = [*itertools.product(*(range(size) for _, size in spec.bound_mesh.sizes))]
    numbered = iter(range(1, 10**6))
    for names in known.groups:
        some = [known.by_name[name] for name in names]
        assert len({(m.unit.dtype, m.unit.p.axes) for m in some}) == 1
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
