"""per_sample_grads equals the single-process per-sample gradients, clipped or not, at any number of ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import strategies
import torch
from cases import owned
from depth import every, mark_seldom, seldom, some
from gradient_cases import Case, cases
from hypothesis import given
from hypothesis import strategies as st
from models import module_class, refused
from parity import strategies as strategies_of
from ranks import real_ranks
from test_local import objective, spec_of, whole_params
from test_memory import Peak, no_collector
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.testing import assert_close

import funshard as fs

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


Block = module_class(
    "Block",
    lambda width: {"linear": nn.Linear(width, width), "norm": nn.LayerNorm(width), "drop": nn.Dropout(0.5)},
    lambda self, x: x + torch.tanh(self.norm(self.drop(self.linear(x)))),
)


def network() -> nn.Module:
    """Two blocks that run twice, on weights that they share in part."""
    torch.manual_seed(1)
    a, b = Block(5), Block(5)
    b.linear.weight = a.linear.weight
    return nn.Sequential(nn.Linear(3, 5), a, b, a, nn.Linear(5, 2)).double().eval()


MODEL = network()
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
RANKS, SAMPLES = 3, 4
X, Y = torch.randn(RANKS, SAMPLES, 7, 3, dtype=torch.float64), torch.randn(RANKS, SAMPLES, 7, 2, dtype=torch.float64)
POLICIES = {name: fs.by_type(Block, p=p) for name, p in strategies_of("shard", "keep", "remat", "replicated").items()}
POLICIES |= {"always": fs.policies.always(), "mixed": fs.by_path({"1": fs.P(), "4": fs.P("shard")})}


def reference(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
    # of a copy: torch 2.13 leaves its tensors in a tied parameter of a module that is registered twice
    return ((torch.func.functional_call(copy.deepcopy(MODEL), params, (x,)) - y) ** 2).sum()


def loss_on(spec: fs.PartitionSpec, model: nn.Module = MODEL) -> Callable[..., Tensor]:
    return lambda params, x, y: ((fs.functional_call(model, params, x, spec=spec) - y) ** 2).sum()


def clipped(each: fs.Params, clip: float) -> fs.Params:
    norms = sum((g.reshape(len(g), -1) ** 2).sum(1) for g in each.values()).sqrt()
    scale = (clip / (norms + 1e-6)).clamp(max=1)
    return {name: torch.einsum("b...,b->...", g, scale) for name, g in each.items()}


EACH = vmap(grad(reference), (None, 0, 0))(FULL, X.flatten(0, 1), Y.flatten(0, 1))
CLIP = float(sum((g.flatten(1) ** 2).sum(1) for g in EACH.values()).sqrt().median())
"""Half of the samples are clipped."""
WAYS: dict[str, dict[str, Any]] = {"each": {}, "clipped": {"clip": CLIP}, "noisy": {"clip": CLIP, "noise": 0.5}}
BOTH = some(itertools.product(POLICIES, WAYS), 1)
SMALL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def results(policy: fs.Policy, **options: Any) -> Callable[..., Any]:
    def rank(mesh: Any, x: Tensor, y: Tensor) -> fs.Params:
        spec = policy(MODEL).on(mesh)
        return fs.per_sample_grads(loss_on(spec), fs.shard(FULL, spec), (x, y), spec=spec, **options)

    return rank


def shards_of(full: fs.Params, policy: fs.Policy, sizes: Any = RANKS) -> fs.Params:
    ranks = torch.zeros(sizes if isinstance(sizes, int) else torch.Size(sizes.values()).numel())
    return fs.testing.spmd(lambda mesh, _: fs.shard(full, policy(MODEL).on(mesh)), sizes)(ranks)


@given(case=cases(), reduce=st.sampled_from(["mean", "sum", 64.0, 5]), chunk_size=st.sampled_from([None, 1]))
def test_any_model(case: Case, reduce: str | float, chunk_size: int | None) -> None:
    """Random models, policies and meshes: each rank's samples, and the clipped sum or mean of all, also in chunks."""
    model, policy, sizes = case
    ranks = torch.Size(sizes.values()).numel()
    full = strategies.integers_like(model, high=1)
    xs = torch.arange(1, 2 * ranks + 1).double().view(ranks, 2)
    each = vmap(grad(lambda p, x: torch.func.functional_call(copy.deepcopy(model), p, (x,))), (None, 0))(full, xs.flatten())

    def rank(mesh: Any, x: Tensor) -> tuple[fs.Params, fs.Params]:
        spec = policy(model).on(mesh)
        f = functools.partial(fs.functional_call, model, spec=spec)
        run = functools.partial(fs.per_sample_grads, f, fs.shard(full, spec), x, spec=spec, chunk_size=chunk_size)
        return run(), run(clip=2.0, reduce=reduce)

    got, total = fs.testing.spmd(rank, sizes)(xs)
    assert_close({name: g.flatten(0, 1) for name, g in got.items()}, each, **CLOSE)
    over = {"mean": 2 * ranks, "sum": 1}.get(reduce, reduce)
    expected = {name: g / over for name, g in clipped(each, 2.0).items()}
    want = fs.testing.spmd(lambda mesh, _: fs.shard(expected, policy(model).on(mesh)), sizes)(xs)
    assert_close(total, want, **CLOSE)


def test_some_of_the_units() -> None:
    """The norm is over those that are given; f closes over the others."""
    policy = POLICIES["always"]

    def rank(mesh: Any, x: Tensor, y: Tensor) -> fs.Params:
        spec = policy(MODEL).on(mesh)
        trained, frozen = fs.partition(fs.shard(FULL, spec), spec, lambda unit: unit.path.startswith("4"))
        loss = loss_on(spec)
        return fs.per_sample_grads(
            lambda p, x, y: loss(fs.combine(p, frozen), x, y), trained, (x, y), spec=spec, clip=CLIP / 2, reduce="sum"
        )

    got = fs.testing.spmd(rank, RANKS)(X, Y)
    last = clipped({name: g for name, g in EACH.items() if name.startswith("4")}, CLIP / 2)
    expected = shards_of({**FULL, **last}, policy)
    assert got.keys() == {"4"}
    assert_close(got["4"], expected["4"], **CLOSE)


def noise_of(policy: fs.Policy, sizes: Any, seeds: list[int] | None = None, **options: Any) -> fs.Params:
    """What noise adds, in multiples of clip."""
    count = sizes if isinstance(sizes, int) else torch.Size(sizes.values()).numel()
    x, y = X.flatten(0, 1)[:count, None], Y.flatten(0, 1)[:count, None]

    def rank(mesh: Any, x: Tensor, y: Tensor) -> fs.Params:
        generator = torch.Generator().manual_seed(7)
        with_noise = results(policy, clip=2.0, noise=3.0, generator=generator, reduce="sum", **options)(mesh, x, y)
        without = results(policy, clip=2.0, reduce="sum")(mesh, x, y)
        return {key: (with_noise[key] - without[key]) / 6 for key in without}

    return fs.testing.spmd(rank, sizes)(x, y)


def test_noise_is_the_same_at_any_number_of_ranks() -> None:
    """Independent normal numbers for all parameters; none in the padding; replicas alike."""
    policy = POLICIES["shard"]
    specs = {n: policy(MODEL).on({"shard": n}) for n in (1, 2, 5)}
    alone, on_two, on_five = (
        fs.unflatten({key: z.flatten() for key, z in noise_of(policy, n).items()}, spec) for n, spec in specs.items()
    )
    assert_close(on_two, alone, **CLOSE)
    assert_close(on_five, alone, **CLOSE)
    padded = {unit.key: ~owned(unit, specs[5].padded_numel(unit)) for unit in specs[5]}
    assert any(padding.any() for padding in padded.values())
    drawn = noise_of(policy, 5)
    assert all((drawn[key].flatten()[padding].abs() < 1e-12).all() for key, padding in padded.items())
    hybrid = noise_of(policy, {"replicate": 2, "shard": 2})
    for z in hybrid.values():
        assert_close(z[:2], z[2:], **CLOSE)
    numbers = torch.cat([z.flatten() for z in alone.values()])
    assert abs(numbers.mean()) < 4 / len(numbers) ** 0.5
    assert abs(numbers.std() - 1) < 4 / len(numbers) ** 0.5
    assert len(numbers.unique()) == len(numbers)


def test_dropout_is_the_same_in_both_passes() -> None:
    """A clip that every gradient meets: each has that norm, which it has not if the two passes drop other values."""
    model = network().train()
    spec = fs.policies.always()(model).bound
    run = functools.partial(fs.per_sample_grads, loss_on(spec, model), fs.shard(model, spec), (X[0], Y[0]), spec=spec)
    for randomness in ("same", "different"):
        torch.manual_seed(2)
        each = run(randomness=randomness)
        torch.manual_seed(2)
        got = run(randomness=randomness, clip=CLIP, reduce="sum")
        after = torch.rand(3)
        assert_close(got, fs.shard(clipped(each, CLIP), spec), **CLOSE)
        torch.manual_seed(2)
        run(randomness=randomness)
        assert torch.equal(torch.rand(3), after)  # numbers are drawn once
    refused(RuntimeError, "randomness", run)


def test_clipping_never_holds_all_gradients_of_all_samples() -> None:
    """One unit's at a time: the peak hardly grows with the number of units, where that of all of them does."""
    samples, width = 16, 24
    unit_bytes = (width * width + width) * 8

    def peak(blocks: int, **options: Any) -> int:
        model = nn.Sequential(*(nn.Linear(width, width, dtype=torch.float64) for _ in range(blocks)))
        spec = fs.policies.always()(model).bound
        shards = fs.shard(model, spec)
        x = torch.randn(samples, 1, width, dtype=torch.float64)
        with no_collector(), Peak() as mode:
            fs.per_sample_grads(
                lambda p, x: fs.functional_call(model, p, x, spec=spec).sin().sum(), shards, x, spec=spec, **options
            )
        return mode.bytes

    few, many = peak(3, clip=1.0), peak(9, clip=1.0)
    assert few > samples * unit_bytes  # it does hold those of one
    assert many - few < 6 * 4 * unit_bytes  # the buffers, their gradients, activations
    assert peak(9) - peak(3) >= 6 * samples * unit_bytes


@real_ranks(2)
def test_real_ranks_agree_with_simulated_ones(rank: int) -> None:
    """The noise too."""
    for policy, way in BOTH:
        spec, options = POLICIES[policy](MODEL).bound, WAYS[way]
        shards = {k: p.requires_grad_() for k, p in fs.shard(FULL, spec).items()}
        own, first = (torch.Generator().manual_seed(seed) for seed in (5 + rank, 5))  # only rank 0's matters
        grads = fs.per_sample_grads(loss_on(spec), shards, (X[rank], Y[rank]), spec=spec, generator=own, **options)
        assert all(g.requires_grad != bool(options) for g in grads.values())
        simulated = fs.testing.spmd(results(POLICIES[policy], generator=first, **options), 2)(X[:2], Y[:2])
        assert_close({k: g.detach() for k, g in grads.items()}, {k: z[rank] for k, z in simulated.items()}, **CLOSE)


@every(ranks_with=[1, 0], policy=mark_seldom(POLICIES, "shard", "replicated"))
@real_ranks(2)
def test_a_rank_without_samples(rank: int, policy: str, ranks_with: int) -> None:
    """It adds nothing, and the others do not wait for it; without any sample at all there is the noise alone."""
    spec = POLICIES[policy](MODEL).bound
    call = loss_on(spec)
    loss = lambda p, x, y: call(p, x, y) / x.abs().sum()  # noqa: E731
    of_rank = (X[rank], Y[rank]) if rank < ranks_with else (X[rank, :0], Y[rank, :0])
    shards = fs.shard(FULL, spec)
    each = fs.per_sample_grads(loss, shards, of_rank, spec=spec)
    plain = lambda p, x, y: reference(p, x, y) / x.abs().sum()  # noqa: E731
    samples = vmap(grad(plain), (None, 0, 0))(FULL, X[0], Y[0])
    assert_close(each, samples if rank < ranks_with else {name: g[:0] for name, g in samples.items()}, **CLOSE)
    total = {name: g if ranks_with else 0 * g for name, g in clipped(samples, CLIP).items()}
    run = lambda **options: fs.per_sample_grads(loss, shards, of_rank, spec=spec, clip=CLIP, **options)  # noqa: E731
    assert_close(run(reduce=64.0), dict(fs.shard({name: g / 64 for name, g in total.items()}, spec)), **CLOSE)
    mean = {name: g / (SAMPLES if ranks_with else 1) for name, g in total.items()}
    assert_close(run(), dict(fs.shard(mean, spec)), **CLOSE)
    noisy = run(reduce=64.0, noise=0.5, generator=torch.Generator().manual_seed(5))
    alone = fs.unshard(noisy, spec)["0.weight"] - total["0.weight"] / 64
    assert 0.5 < float(alone.std() / (0.5 * CLIP / 64)) < 1.5  # added once


@seldom
@pytest.mark.parametrize("options", [{"noise": 0.5}, {"noise": 0.5, "randomness": "different"}], ids=str)
def test_compiled_in_several_graphs(options: dict[str, Any]) -> None:
    """Where noise or numbers are drawn: as without, or refused where it has to be one graph, which takes no generator."""
    spec = fs.policies.always()(SMALL).bound
    shards = fs.shard(strategies.integers_like(SMALL), spec)

    def step(params: fs.Params, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> fs.Params:
        return fs.per_sample_grads(loss_on(spec, SMALL), params, (x, y), spec=spec, generator=generator, clip=CLIP, **options)

    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=fullgraph, backend="eager")
        if fullgraph and "randomness" in options:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="because a graph draws other numbers"):
                compiled(shards, X[0], Y[0])
            continue
        both = []
        for run in (compiled, step):
            torch.manual_seed(3)
            both.append(run(shards, X[0], Y[0], None if fullgraph else torch.Generator().manual_seed(5)))
        assert_close(*both, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": (X[0], Y[0, :2])}, r"batch\[1\]: expected length 4 in dimension 0, as in the first tensor, got shape \[2"),
        ({"batch": (X[0], torch.ones(()))}, r"batch\[1\]: expected a tensor with a dimension 0, got shape \[\]"),
        ({"params": {"nothing": X}}, "unit 'nothing' is not in the spec"),
        ({"clip": 0.0}, "expected a positive clip, got 0.0"),
        ({"noise": 1.0}, "expected a noise of at least 0, in units of clip, got 1.0 with clip=None"),
        ({"clip": 1.0, "noise": math.nan}, "got nan with clip=1.0"),
        ({"clip": math.inf, "noise": 0.5}, "expected a finite clip, of which noise=0.5 is a multiple, got clip=inf"),
        ({"clip": 1.0, "reduce": "average"}, "reduce: expected 'mean', 'sum' or a positive number .*got 'average'"),
        ({"reduce": "sum"}, "expected clip with reduce='sum': without it nothing is reduced"),
    ],
    ids=lambda value: ",".join(k for k in value) if isinstance(value, dict) else "",
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    """Before any communication: the mesh has no process group."""
    spec = fs.policies.always()(MODEL).on({"shard": 2})
    options = {"params": fs.shard(FULL, spec, rank=0), "batch": (X[0], Y[0])} | changes
    with pytest.raises(ValueError, match=message):
        fs.per_sample_grads(loss_on(spec), options.pop("params"), options.pop("batch"), spec=spec, **options)


@pytest.mark.parametrize("clip", [None, 2.45])
def test_local_axes_of_several_ranks_are_refused(clip: float | None) -> None:
    """On a mesh with one rank along each of them it is exact."""
    kinds = "replicated", "pair", "experts"
    whole, full = whole_params(kinds)
    x = torch.randn(2, 3, 12, 4, dtype=torch.float64)
    wanted = vmap(grad(lambda p, x: objective(torch.func.functional_call(whole, p, (x,)))), (None, 0))(full, x.flatten(0, 1))

    def rank(mesh: Any, x: Tensor, model: nn.Module, spec: fs.PartitionSpec) -> fs.Params:
        spec = spec.on(mesh)
        params, axes = fs.shard(full, spec), {name: spec.axis(name) for name in ("tensor", "expert")}
        loss = lambda p, x: objective(fs.functional_call(model, p, (x, axes), spec=spec))  # noqa: E731
        grads = fs.per_sample_grads(loss, params, (x,), spec=spec, clip=clip, reduce="sum" if clip else "mean")
        return grads if clip is None else fs.unshard(grads, spec)

    for sizes in ({"shard": 2, "tensor": 1, "expert": 1}, {"shard": 1, "tensor": 2, "expert": 1}):
        model, spec = spec_of(kinds, sizes, {"axis": "shard"})
        run = fs.testing.spmd(functools.partial(rank, model=model, spec=spec), sizes)
        if sizes["tensor"] == 1:
            each = {name: g.unflatten(0, (2, 3)) for name, g in wanted.items()}
            assert_close(run(x), each if clip is None else {k: g.expand(2, *g.shape) for k, g in clipped(wanted, clip).items()})
        else:
            words = r"unit 'layers.1:tensor' is local over \('tensor',\), .*: expected one rank along each"
            refused(ValueError, words, lambda: run(x))


def test_statistics_over_the_samples_of_other_ranks_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), fs.SyncBatchNorm(3, track_running_stats=False)), torch.randn(2, 4, 5, 3)

    def run(mesh: Any, x: Tensor) -> fs.Params:
        spec = fs.policies.whole()(model).on(mesh)
        loss = lambda p, x: objective(fs.functional_call(model, p, (x,), spec=spec))  # noqa: E731
        return fs.per_sample_grads(loss, fs.shard(model, spec), (x,), spec=spec, clip=1.0)

    words = r"SyncBatchNorm '1' in per_sample_grads takes statistics over the samples of other ranks"
    refused(ValueError, words, lambda: fs.testing.spmd(run, 2)(x))
    fs.testing.spmd(run, 1)(x[:1])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of its hooks
def test_opacus_agrees() -> None:
    """The clipped mean of Opacus, the peer, on one process."""
    opacus = pytest.importorskip("opacus")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    spec = fs.policies.always()(model).bound
    got = fs.per_sample_grads(loss_on(spec, model), fs.shard(model, spec), (x, y), spec=spec, clip=1.5)
    peer, options = opacus.GradSampleModule(model), {"max_grad_norm": 1.5, "expected_batch_size": 6}
    optimizer = opacus.optimizers.DPOptimizer(torch.optim.SGD(peer.parameters()), noise_multiplier=0.0, **options)
    ((peer(x) - y) ** 2).sum(1).mean().backward()
    optimizer.pre_step()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_close(got, fs.shard(expected, spec), rtol=1e-5, atol=1e-6)
