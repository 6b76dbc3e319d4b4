"""global_norm, clip_by_global_norm and vdot agree with torch's on the gathered tree, however it is sharded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, each, every
from models import refused
from parity import STRATEGIES, numbers, policies, same, sharded_call, shards_of, squared, squared_loss, step_with
from peer_models import MLP, Net
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import funshard as fs
from funshard._core.flow import scatter_along
from funshard.optim import clip_by_global_norm, global_norm, vdot

MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)).double()
NORMS = [0.5, 1.0, 2.0, 3.0, math.inf]
POLICIES = policies({"0": fs.P(), "1": fs.P("shard")}, "sharded", "replicated")
HYBRID = fs.by_path({"0": fs.P(("replicate", "shard")), "1": fs.P("replicate"), "2": fs.P()})
"""Every set of axes."""


def gradients(seed: int = 0) -> fs.Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in MODEL.named_parameters()}


GRADIENTS, OTHERS = gradients(), gradients(1)
INPUT = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def clipped_by_torch(full: fs.Params, max_norm: float, p: float) -> tuple[fs.Params, Tensor]:
    """The peer."""
    holders = {name: nn.Parameter(torch.zeros_like(g)) for name, g in full.items()}
    for name, holder in holders.items():
        holder.grad = full[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(list(holders.values()), max_norm, p)
    return {name: holder.grad for name, holder in holders.items()}, norm


def check(mesh: Any, policy: fs.Policy, max_norm: float, p: float, want: fs.Params) -> tuple[fs.Params, Tensor, fs.Params]:
    """What we get on this rank, and this rank's shards of what torch gives."""
    spec = policy(MODEL).on(mesh)
    return *clip_by_global_norm(fs.shard(GRADIENTS, spec), spec, max_norm, p=p), fs.shard(want, spec)


def agrees_on_simulated_ranks(policy: fs.Policy, sizes: dict[str, int], max_norm: float, p: float) -> None:
    want, norm = clipped_by_torch(GRADIENTS, max_norm, p)
    ranks = torch.zeros(math.prod(sizes.values()))
    got, got_norm, want_shards = fs.testing.spmd(lambda mesh, _: check(mesh, policy, max_norm, p, want), sizes)(ranks)
    assert_close(got, want_shards, rtol=1e-11, atol=1e-13)
    assert_close(got_norm, norm.expand(len(ranks)))


@every(p=NORMS, policy=POLICIES)
def test_clipping_is_torchs(policy: str, p: float) -> None:
    """On one, two and five simulated ranks, whether the norm is above the bound or below it."""
    for size in (1, 2, 5):
        for max_norm in (0.1, 1e9):
            agrees_on_simulated_ranks(POLICIES[policy], {"shard": size}, max_norm, p)
    agrees_on_simulated_ranks(HYBRID, {"replicate": 2, "shard": 3}, 0.1, p)


@at_most(3)
@every(p=[1.0, 2.0, 3.0, math.inf], policy=POLICIES)
def test_derivatives_of_a_clipped_step(policy: str, p: float) -> None:
    """A loss after a clipped step: its gradient and a Hessian-vector product are the shards of the whole tree's."""
    full, v = gradients(2), gradients(1)

    def outer(model_loss: Callable[[fs.Params], Tensor], params: fs.Params, spec: fs.PartitionSpec) -> Tensor:
        steps = clip_by_global_norm(torch.func.grad(model_loss)(params), spec, 0.05, p=p)[0]
        return model_loss({key: param - 0.3 * steps[key] for key, param in params.items()})

    alone = POLICIES[policy](MODEL).on({"shard": 1})
    whole = partial(outer, lambda p: torch.func.functional_call(MODEL, p, (INPUT,)).sin().square().mean(), spec=alone)
    expected = torch.func.grad(whole)(full), fs.hvp(whole, full, v)

    def rank(mesh: Any, _: Tensor) -> Any:
        spec = POLICIES[policy](MODEL).on(mesh)
        after = partial(outer, lambda p: fs.functional_call(MODEL, p, (INPUT,), spec=spec).sin().square().mean(), spec=spec)
        shards, direction = fs.shard(full, spec), fs.shard(v, spec)
        return tuple(fs.unshard(tree, spec) for tree in (torch.func.grad(after)(shards), fs.hvp(after, shards, direction)))

    got = fs.testing.spmd(rank, 2)(torch.zeros(2))
    for got_tree, want_tree in zip(got, expected, strict=True):
        for name, want in want_tree.items():
            assert_close(got_tree[name], want.expand_as(got_tree[name]))


def test_full_tensors_and_some_units() -> None:
    """What every rank has whole counts once; what is not in the tree counts not at all."""
    full = GRADIENTS

    def rank(mesh: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        spec = fs.policies.always()(MODEL).on(mesh)
        shards = fs.shard(full, spec)
        mixed = {"0": shards["0"], **{name: g for name, g in full.items() if not name.startswith("0")}}
        return global_norm(mixed, spec), global_norm({"0": shards["0"]}, spec)

    everything, first = fs.testing.spmd(rank, 3)(torch.zeros(3))
    assert_close(everything, torch.cat([g.flatten() for g in full.values()]).norm().expand(3))
    assert_close(first, torch.cat([full["0.weight"].flatten(), full["0.bias"]]).norm().expand(3))
    assert global_norm({}, fs.policies.always()(MODEL)) == 0


# --- torch's own claims for clipping ---
PARITY = {name: fs.by_type(MLP, p=p) for name, p in STRATEGIES.items()}
PARITY["mixed"] = fs.policies.override(fs.by_type(MLP), fs.by_path({"blocks.1": fs.P()}))


@each(p=[1.0, 2.0, math.inf], strategy=PARITY)
@real_ranks(2)
def test_ddp_parity(rank: int, strategy: str, p: float) -> None:
    """Clipped and stepped beside DDP: a step whose gradients are multiplied by 100, and three more."""
    max_norm = {1.0: 25.0, 2.0: 2.5, math.inf: 1.0}[p]
    model = Net()
    peer = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    spec, params = shards_of(PARITY[strategy], model)
    ours, theirs = torch.optim.Adam(params.values(), lr=1e-2), torch.optim.Adam(peer.parameters(), lr=1e-2)
    for step in range(4):
        x = numbers(rank, step)
        theirs.zero_grad()
        expected = squared(peer, x)
        expected.backward()
        grads, value = fs.grad_and_value(squared_loss(model, spec, x))(params)
        assert_close(value, expected.detach())
        if step == 0:  # so that it bites
            grads = {key: 100 * g for key, g in grads.items()}
            for q in peer.parameters():
                q.grad *= 100
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), max_norm, p)
        clipped, got = clip_by_global_norm(grads, spec, max_norm, p=p)
        assert_close(got, norm)
        assert (norm > max_norm) == (step == 0)
        full = {name.removeprefix("module."): q for name, q in peer.named_parameters()}
        same(clipped, fs.shard({name: q.grad for name, q in full.items()}, spec, rank=rank), "clipped")
        step_with(clipped, params, ours, theirs)
        same(params, fs.shard({name: q.detach() for name, q in full.items()}, spec, rank=rank), "parameters")


@at_most(1)
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
@real_ranks(4)
def test_clip_grad_norm_beside_fully_shard(rank: int, p: float) -> None:
    """On 2 x 2 the norm and the gradients are FSDP2's; all of them, and all slices, are within the bound after."""
    mesh = mesh_of(2, 2)
    model = Net()
    peer, max_norm = copy.deepcopy(model), 0.01
    for module in (*peer.blocks, peer):
        fully_shard(module, mesh=mesh)
    squared(peer, numbers(rank, 0)).backward()
    spec = fs.by_type(MLP)(model).on(mesh)
    grads = fs.grad(lambda params: squared(sharded_call(model, params, spec), numbers(rank, 0)))(fs.shard(model, spec))
    norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), max_norm, p)
    clipped, got = clip_by_global_norm(grads, spec, max_norm, p=p)
    assert_close(got, norm.full_tensor())
    before, after = (fs.unshard(tree, spec) for tree in (grads, clipped))
    same(after, {name: q.grad.full_tensor() for name, q in peer.named_parameters()}, "clipped")
    size = lambda g: torch.linalg.vector_norm(g.flatten(), p)  # noqa: E731
    assert any(size(g) > max_norm for g in before.values())
    assert all(size(g) <= max_norm for g in [*after.values(), *fs.param_views(clipped, spec).values()] if g.numel())
    assert all((g[before[name] != 0] != before[name][before[name] != 0]).all() for name, g in after.items())


COUNTS: dict[str, tuple[fs.Policy, list[int]]] = {
    "HSDP": (fs.policies.always(), [4]),
    "FSDP over both": (fs.policies.always(fs.P(("replicate", "shard"))), [4, 2]),
    "DDP": (fs.policies.always(fs.P()), []),
    "each its own": (fs.by_path({"0": fs.P("shard"), "1": fs.P(), "2": fs.P("shard")}), [4]),
}


@every(p=[1.0, 2.0, math.inf], name=COUNTS)
def test_one_collective_of_a_scalar_for_each_axis(name: str, p: float) -> None:
    """For all units together, over the axes that they are split over: none over replicas, which FSDP2 asks too."""
    policy, ranks = COUNTS[name]
    with world(8):
        spec = policy(MODEL).on(mesh_of(2, 4))
        shards = fs.shard(GRADIENTS, spec)
        with Collectives() as sent:
            clip_by_global_norm(shards, spec, 1.0, p=p)
    assert sorted(s.ranks for s in sent.all) == sorted(ranks)
    assert {(s.op, s.numel) for s in sent.all} <= {("all_gather" if p == math.inf else "all_reduce", 1)}


@real_ranks(2)
def test_low_precision_grads(rank: int) -> None:
    """Gradients in float16 stay so and are within the bound on every rank; their norm is added up in float32."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)).half()
    spec = fs.policies.always()(model).bound
    full = {name: 10 * g.half() for name, g in GRADIENTS.items()}
    for p in (1.0, 2.0, math.inf):
        want, norm = clipped_by_torch({name: g.float() for name, g in full.items()}, 2.5, p)
        clipped, got = clip_by_global_norm(fs.shard(full, spec), spec, 2.5, p=p)
        assert got.dtype == torch.float32  # FSDP1's is float16
        assert_close(got, norm)
        for name, g in fs.unshard(clipped, spec).items():
            assert g.dtype == torch.float16
            assert_close(g, want[name].half())
        for piece in fs.param_views(clipped, spec).values():
            assert not len(piece) or torch.linalg.vector_norm(piece.float(), p) <= 2.5


@real_ranks(2)
def test_no_gradients(rank: int) -> None:
    """Nothing has norm 0 in float32, and a rank that owns none of a gradient has the norm of the others."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False)).float()
    spec = fs.policies.always()(model).bound
    assert clip_by_global_norm({}, spec, 1.0)[0] == {}
    assert clip_by_global_norm({}, spec, 1.0)[1].dtype == torch.float32
    full = {"0.weight": torch.zeros(1, 3), "1.weight": torch.full((1, 1), 3.0)}
    shards = fs.shard(full, spec)
    assert (fs.param_views(shards, spec)["1.weight"].numel() == 1) == (rank == 0)  # the other rank has padding alone
    clipped, norm = clip_by_global_norm(shards, spec, 1.0)
    assert norm == 3
    assert_close(fs.unshard(clipped, spec)["1.weight"], torch.ones(1, 1))


# --- vdot ---
def dotted(a: fs.Params, b: fs.Params) -> Tensor:
    """The peer."""
    return torch.vdot(*(torch.cat([tree[name].flatten() for name in GRADIENTS]) for tree in (a, b)))


ON_MESHES = [
    *((policy, {"shard": n}) for policy in POLICIES.values() for n in (1, 2, 3, 5)),
    (HYBRID, {"replicate": 2, "shard": 3}),
]


@pytest.mark.parametrize(("policy", "sizes"), ON_MESHES)
def test_vdot_is_torchs(policy: fs.Policy, sizes: dict[str, int]) -> None:
    """The gradient of a function of it in both arguments, and a Hessian-vector product, are the shards of the whole's; and it
    itself, also of complex numbers."""
    a, b, v = (gradients(seed) for seed in range(3))
    turned = [{name: torch.complex(g, g.flip(0)) for name, g in tree.items()} for tree in (a, b)]
    cubes = lambda dot, x, y: dot(x, y) ** 3 + dot(x, x)  # noqa: E731

    def derived(dot: Any, x: fs.Params, y: fs.Params, direction: fs.Params, z: fs.Params, w: fs.Params) -> Any:
        hvp = fs.hvp(lambda x: cubes(dot, x, y), x, direction)
        return (*torch.func.grad(partial(cubes, dot), (0, 1))(x, y), hvp), dot(x, y), dot(z, w)

    def rank(mesh: Any, _: Tensor) -> Any:
        spec = policy(MODEL).on(mesh)
        got = derived(lambda x, y: vdot(x, y, spec), *(fs.shard(tree, spec) for tree in (a, b, v, *turned)))
        return got, (tuple(fs.shard(tree, spec) for tree in wanted[0]), *(x.clone() for x in wanted[1:]))

    wanted = derived(dotted, a, b, v, *turned)
    assert_close(*fs.testing.spmd(rank, sizes)(torch.zeros(math.prod(sizes.values()))))


def test_vdot_of_full_tensors_some_units_and_nothing() -> None:
    spec = fs.policies.always()(MODEL)
    a, b = fs.shard(GRADIENTS, spec), fs.shard(gradients(1), spec)
    trees = (a, GRADIENTS), (b, gradients(1))
    mixed = [{"0": shards["0"], **{n: g for n, g in full.items() if n[0] != "0"}} for shards, full in trees]
    assert_close(vdot(*mixed, spec), dotted(GRADIENTS, gradients(1)))
    assert_close(vdot({"0": a["0"]}, {"0": b["0"]}, spec), a["0"] @ b["0"])
    assert vdot({}, {}, spec) == 0
    low = {"weight": torch.ones(1, 1001, dtype=torch.bfloat16)}
    wide = vdot(low, low, fs.policies.whole()(nn.Linear(1001, 1, bias=False, dtype=torch.bfloat16)))
    assert (wide.item(), wide.dtype) == (1001, torch.float32)  # which bfloat16 rounds


def poisoned(spec: fs.PartitionSpec, full: fs.Params, value: float) -> fs.Params:
    """This rank's shards, with a value where there is padding."""
    filled = fs.flatten({name: torch.ones_like(x) for name, x in full.items()}, spec)
    own = {unit.key: scatter_along(filled[unit.key], unit.p.axes, spec.bound_mesh) for unit in spec}
    return {key: torch.where(own[key] == 0, value, x) for key, x in fs.shard(full, spec).items()}


def of_poisoned(mesh: Any, policy: fs.Policy, value: float) -> dict[str, Tensor]:
    spec = policy(MODEL) if mesh is None else policy(MODEL).on(mesh)
    a, b = poisoned(spec, GRADIENTS, value), poisoned(spec, OTHERS, value)
    norms = {f"norm {p}": global_norm(a, spec, p=p) for p in NORMS}
    init, unscale = fs.loss_scale.dynamic(spec, scale=1.0)
    finite = unscale(a, init())[1].finite
    slopes = torch.func.grad(lambda t: vdot(t, b, spec))(a)  # zero in the padding
    return {**norms, "vdot": vdot(a, b, spec), "finite": finite, "slopes": vdot(slopes, slopes, spec).isfinite()}


def without_padding() -> dict[str, Tensor]:
    norms = {f"norm {p}": clipped_by_torch(GRADIENTS, 1.0, p)[1] for p in NORMS}
    return {**norms, "vdot": dotted(GRADIENTS, OTHERS), "finite": torch.tensor(True), "slopes": torch.tensor(True)}


@every(value=[3.0, math.inf, math.nan], policy=POLICIES)
def test_padding_does_not_count(policy: str, value: float) -> None:
    """In norms, inner products and the look for what is not finite: as torch.randn_like of a shard has values in it."""
    for ranks in (1, 3):
        got = fs.testing.spmd(lambda mesh, _: of_poisoned(mesh, POLICIES[policy], value), ranks)(torch.zeros(ranks))
        assert_close(got, {key: x.expand(ranks) for key, x in without_padding().items()})
    assert_close(of_poisoned(None, POLICIES[policy], value), without_padding())


@real_ranks(2)
def test_padding_does_not_count_on_real_ranks(rank: int) -> None:
    for policy in POLICIES.values():
        assert_close(of_poisoned(None, policy, math.nan), without_padding())
    spec = fs.policies.always()(MODEL)
    shards = poisoned(spec, GRADIENTS, 3.0)
    compiled = torch.compile(lambda tree: global_norm(tree, spec), fullgraph=True, backend="eager")
    assert_close(compiled(shards), without_padding()["norm 2.0"])


SPEC = fs.policies.always()(MODEL)
FROZEN = nn.Linear(4, 4).requires_grad_(False)
AT_REST = fs.policies.whole(fs.P("shard", at_rest=fs.codecs.int8()))(FROZEN)
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("expected a positive p, or inf, got 0.0", lambda: global_norm({"2": torch.ones(12)}, SPEC, p=0.0)),
    ("'7' is no unit and no parameter of the spec", lambda: global_norm({"7": torch.ones(12)}, SPEC)),
    (r"unit '0': expected this rank's slice of \d+ elements, got shape \[3\]", lambda: global_norm({"0": torch.ones(3)}, SPEC)),
    (r"unit '' is at rest in .* expected no norm of it", lambda: global_norm(fs.shard(FROZEN, AT_REST), AT_REST)),
    ("'1' is in b only", lambda: vdot({"0": torch.ones(20)}, {"0": torch.ones(20), "1": torch.ones(30)}, SPEC)),
    (r"'0': expected tensors of one shape, got \[20\]", lambda: vdot({"0": torch.ones(20)}, {"0": torch.ones(1)}, SPEC)),
]


@pytest.mark.parametrize(("match", "call"), REFUSED)
def test_what_is_refused(match: str, call: Callable[[], Any]) -> None:
    """Of a slice of another mesh, say, which elements are padding is not known."""
    refused(ValueError, match, call)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_by_a_norm_that_is_not_finite(bad: float) -> None:
    """As torch's: NaN makes everything NaN; inf makes what is finite 0 and what is infinite NaN."""
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, bad, -2.0])
    spec = fs.policies.whole()(nn.ParameterDict({"w": torch.zeros(3)}))
    clipped, norm = fs.optim.clip_by_global_norm({"w": p.grad.clone()}, spec, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([p], 1.0), equal_nan=True)
    torch.testing.assert_close(clipped["w"], p.grad, equal_nan=True)
    expected = torch.full((3,), math.nan) if math.isnan(bad) else torch.tensor([0.0, math.nan, 0.0])
    torch.testing.assert_close(clipped["w"], expected, equal_nan=True)


@pytest.mark.parametrize("limit", [-1.0, float("nan"), torch.tensor(-1.0), torch.tensor(torch.nan)], ids=str)
def test_clipping_to_no_length(limit: float | Tensor) -> None:
    """A negative limit would turn the gradient around; one that the host cannot read makes it NaN."""
    spec = fs.policies.whole()(nn.Linear(2, 1, bias=False)).bound
    with pytest.raises(ValueError, match="clip_by_global_norm: max_norm: expected a number from 0 on, got"):
        clip_by_global_norm({"": torch.ones(8)}, spec, limit)
    each = torch.func.vmap(lambda limit: clip_by_global_norm({"": torch.ones(8)}, spec, limit)[0][""])
    got = each(torch.tensor([1.0, float(limit), 0.0]))
    assert got[1].isnan().all()
    assert got[2].eq(0).all()
