"""accumulate: the gradients of the mean over micro-batches, for both ways to keep them, and what it sends."""

from __future__ import annotations

import _thread
import functools
import queue
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from collective_log import Collectives, Sent, gathers, reduce, scatters, world
from depth import at_most, dealt, depth, each, every, mark_seldom, seldom
from gradient_cases import agree, calls, cases, models, penalty, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import module_class, refused, with_forward
from parity import numbers, shards_of
from peer_models import MLP, Net, chain
from ranks import mesh_of, real_ranks
from test_memory import Alive, Peak, no_collector
from torch import Tensor, nn

import funshard as fs
from funshard import P, Precision
from funshard.collectives import Mesh

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KEEPS = ["shards", "full"]
MICRO = 3


def each_alone(
    loss: Callable[..., Tensor], params: fs.Params, batches: Sequence[Any], weights: Sequence[Any] | None = None
) -> tuple[fs.Params, Tensor]:
    """The mean over micro-batches, each differentiated and reduced by itself; by weights of one rank, where there are any."""
    by = [1.0] * len(batches) if weights is None else [w / sum(weights) * len(batches) for w in weights]
    got = [fs.grad_and_value(loss)(params, batch) for batch in batches]
    grads = {key: sum(w * g[key].double() for w, (g, _) in zip(by, got, strict=True)) / len(by) for key in params}
    return grads, sum(w * v.double() for w, (_, v) in zip(by, got, strict=True)) / len(by)


def close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for key, g in expected.items():
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(got[key].double(), g.double(), **close, msg=lambda m, k=key: f"{k}: {m}")


def size_of(found: tuple[fs.Params, Tensor]) -> Tensor:
    return sum(((g**2).sum() for g in found[0].values()), found[1])


# --- on simulated ranks ---
@settings(max_examples=depth(6, 300))
@given(cases(st.one_of(models(), calls())), st.sampled_from(KEEPS), st.sampled_from(["mean", "sum", 4.0]))
def test_of_any_model_on_any_mesh(case: Any, keep: str, by: Any) -> None:
    """With a penalty on shards; "sum" and a number are of all micro-batches, too. Values, gradients, and the gradient of a norm
    of what accumulate gives, as a step of meta-learning has it."""
    model, policy, sizes = case
    t = values(model, exact=False)
    xs = torch.linspace(0.3, 1, torch.Size(sizes.values()).numel() * 2).double().view(-1, 2)

    def run(mesh: Mesh, x: Tensor) -> Any:
        spec = policy(model).on(mesh)
        params = fs.shard(t, spec)

        def loss(p: fs.Params, x: Tensor, **options: Any) -> Tensor:
            return fs.functional_call(model, p, x, spec=spec, **options) + penalty(p)

        got = fs.accumulate(loss, params, x.unbind(), spec=spec, keep=keep, reduce=by)
        grads, value = fs.grad_and_value(lambda p: sum(loss(p, one, reduce=by) for one in x))(params)
        share = 2 if by == "mean" else 1
        twice = torch.func.grad(lambda p: size_of(fs.accumulate(loss, p, x.unbind(), spec=spec, keep=keep)))(params)
        mean = torch.func.grad_and_value(lambda p: (loss(p, x[0]) + loss(p, x[1])) / 2)
        want = {key: g / share for key, g in grads.items()}, value / (share if by in ("mean", "sum") else by)
        return (got, twice), (want, torch.func.grad(lambda p: size_of(mean(p)))(params))

    ((grads, value), twice), ((expected, mean), squared) = fs.testing.spmd(run, sizes)(xs)
    agree(grads, expected, exact=False)
    agree(twice, squared, exact=False)
    torch.testing.assert_close(value, mean)


# --- on real ranks ---
LOSSY = fs.Codec(lambda x: ((x * 8).round() / 8,), lambda x: x)
STRATEGIES = {
    "shard": P("shard"),
    "kept": P("shard", reshard=False),
    "replicated": P(),
    "remat": P("shard", remat=True),
    "replicated remat": P(remat=True),
    "all axes": P(("replicate", "shard")),
    "bf16": P("shard", precision=Precision(param=BF16, reduce=F32, restore_outputs=True)),
    "bf16 reduced": P("shard", precision=Precision(reduce=BF16)),
    "fp16": P("shard", precision=Precision(param=F16, restore_outputs=True)),
    "replicated fp16": P(precision=Precision(param=F16, restore_outputs=True)),
    "codec": P("shard", precision=Precision(codec=LOSSY)),
}
REDUCTIONS: list[str | float] = ["sum", "mean", 3.0]
USUAL = ["shard", "kept", "replicated", "remat", "bf16", "codec", "all axes", "fp16", "bf16 reduced"]


Unused = type("Unused", (nn.Linear,), {})
Some = module_class("Some", lambda: {"net": Net(blocks=2), "unused": Unused(2, 2).double()}, lambda self, x: self.net(x))
"""Blocks, one of which is not used, under a root of its own."""


def policy(p: P, root: P | None = None) -> fs.Policy:
    return fs.policies.override(fs.by_type(MLP, Unused, p=p), fs.by_path({"": root or P()}))


@at_most(3)
@each(way=["fs", "torch.func", "backward"], keep=KEEPS, shape=[(2,), (2, 2)], strategy=mark_seldom(STRATEGIES, *USUAL))
@real_ranks(lambda shape: torch.Size(shape).numel())
def test_on_ranks(rank: int, shape: tuple[int, ...], strategy: str, keep: str, way: str) -> None:
    """The mean, the sum, and the sum over a number, with aux, penalties and an unused unit; over two axes "shards" reduces
    over one of them at the end. Beside each micro-batch by itself."""
    p = STRATEGIES[strategy]
    model = Some()
    spec = policy(p, P("shard"))(model).on(mesh_of(1, 2) if p.axes[1:] and len(shape) == 1 else mesh_of(*shape))
    params = fs.shard(model, spec)
    batches = [numbers(rank, i) for i in range(MICRO)]
    narrow = {"bf16": BF16, "fp16": F16}.get(strategy.removeprefix("replicated ").removesuffix(" reduced"))
    tolerance = 1e-9 if narrow is None else torch.finfo(narrow).eps

    def loss(p: fs.Params, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        y = fs.functional_call(model, p, (x,), spec=spec, **options).double()
        return (y**2).mean() + 0.1 * sum((shard**2).sum() for shard in p.values()), y.mean()

    for by in REDUCTIONS if len(shape) == 1 else dealt(strategy, STRATEGIES, REDUCTIONS):
        expected, value = each_alone(lambda p, x, by=by: loss(p, x, reduce=by)[0], params, batches)
        share = 1 if by == "mean" else MICRO
        got, (mean, auxes) = by_way(way, loss, params, batches, spec=spec, keep=keep, reduce=by, has_aux=True)
        expected = {key: share * g for key, g in expected.items()}
        if narrow is None:
            close(got, expected)
        else:  # beside the gradients of the data alone, most of which are smaller than the penalty's
            assert got.keys() == expected.keys()
            for key, g in expected.items():
                error, norm = (got[key].double() - g.double()).norm(), (g - share * 0.2 * params[key]).double().norm()
                assert error <= tolerance * norm + 1e-12, f"{key}: {error:.2e} of {norm:.2e}"
        assert {key: g.dtype for key, g in got.items()} == {key: shard.dtype for key, shard in params.items()}
        torch.testing.assert_close(mean, value * share / (by if by == 3.0 else 1), rtol=tolerance, atol=tolerance)
        assert [aux.shape for aux in auxes] == [()] * MICRO
        assert not any(aux.requires_grad for aux in auxes) or way == "backward"


def by_way(way: str, loss: Any, params: fs.Params, batches: Sequence[Tensor], **options: Any) -> Any:
    """accumulate called plainly; under torch.func; or where the shards require grad: then its results have a graph."""
    if way == "torch.func":
        one = torch.zeros(1, dtype=torch.float64)
        return torch.func.vjp(lambda _: fs.accumulate(loss, params, batches, **options), one)[0]
    if way == "backward":
        params = {key: p.detach().requires_grad_() for key, p in params.items()}
        grads, value = fs.accumulate(loss, params, batches, **options)
        assert all(g.requires_grad for key, g in grads.items() if key != "unused")
        return grads, value
    return fs.accumulate(loss, params, batches, **options)


@seldom
@pytest.mark.parametrize("keep", KEEPS)
@real_ranks(2)
def test_compiled(rank: int, keep: str) -> None:
    """In one graph: what the loss calls inside knows how accumulate reduces, and a weight of 0 leaves out NaN."""
    model = MLP(5)
    (spec, params), batches = shards_of(fs.policies.whole(), model), [numbers(rank, i) for i in range(3)]
    weights, batches[2] = [torch.tensor(2.0 + rank), torch.tensor(1.0), torch.tensor(0.0)], batches[2] * torch.nan

    def step(params: fs.Params, batches: list[Tensor], weights: list[Tensor]) -> Any:
        loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec) ** 2).mean()  # noqa: E731
        return fs.accumulate(loss, params, batches, spec=spec, keep=keep, reduce="sum", weights=weights)

    torch._dynamo.reset()
    expected, value = step(params, batches, weights)
    assert value.isfinite()
    whole = functools.partial(torch.compile, fullgraph=True, backend=depth("eager", "aot_eager"))
    compile = whole if keep == "full" else functools.partial(fs.compile, backend="aot_eager")
    grads, v = compile(step)(params, batches, weights)
    close(grads, expected)
    torch.testing.assert_close(v, value)


@seldom
@real_ranks(2)
def test_of_a_compiled_loss(rank: int) -> None:
    """The graph is another one inside of accumulate, where replicas are reduced later and the sum is taken, than outside."""
    model = nn.Linear(5, 1).double()
    (spec, params), batches = shards_of(fs.policies.whole(), model, mesh_of(2, 1)), [numbers(rank, i) for i in range(2)]
    loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec) ** 2).mean()  # noqa: E731
    torch._dynamo.reset()
    quick = torch.compile(loss, fullgraph=True, backend=depth("eager", "aot_eager"))
    first = quick(params, batches[0])  # outside of accumulate: the same function, compiled without it
    for keep in depth(KEEPS[:1], KEEPS):
        expected, _ = fs.accumulate(loss, params, batches, spec=spec, keep=keep, reduce="sum")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # for which Dynamo asks
            got, _ = fs.accumulate(quick, params, batches, spec=spec, keep=keep, reduce="sum")
        close(got, expected)
    close({"": first}, {"": quick(params, batches[0])})
    close(fs.grad(quick)(params, batches[0]), fs.grad(loss)(params, batches[0]))


# --- what is sent ---
def sent_by(model: nn.Module, spec: fs.PartitionSpec, count: int = MICRO, **options: Any) -> Collectives:
    params, batches = fs.shard(model, spec), [numbers(0, i) for i in range(count)]
    loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec) ** 2).mean()  # noqa: E731
    with Collectives() as sent:
        fs.accumulate(loss, params, batches, spec=spec, **options)
    return sent


@pytest.mark.parametrize("p", [P("shard"), P("shard", reshard=False), P("shard", remat=True)], ids=str)
def test_full_gathers_and_reduces_each_unit_once(p: P) -> None:
    with world(8):
        model = Net(blocks=3)
        spec = fs.by_type(MLP, p=p)(model).bound
        keys = list(spec.by_key)
        assert sent_by(model, spec, keep="full").all == gathers(spec, *keys) + scatters(spec, *keys)
        weighted = sent_by(model, spec, keep="full", weights=[1, 2, 3]).all  # whose sum is one scalar for each axis
        assert [s for s in weighted if s.op == "all_reduce"] == [Sent("all_reduce", 1, 8, 8)]
        assert not [s for s in sent_by(model, spec, weights=[1, 2, 3], reduce="sum").all if s.op == "all_reduce"]


@pytest.mark.parametrize("count", [1, 3])
def test_replicas_are_reduced_once(count: int) -> None:
    """Over slices with each micro-batch; over replicas, and of replicated units over all, at the end."""
    with world(8):
        model = Net(blocks=3)
        some = fs.by_path({"": P(), "blocks.2": P(("replicate", "shard"))})
        spec = fs.policies.override(fs.by_type(MLP), some)(model).on(mesh_of(4, 2))
        sent = sent_by(model, spec, count).all
        counts = Counter(sent)
        once = [reduce(spec, "", 4), reduce(spec, "", 2), *(reduce(spec, key, 4) for key in ("blocks.0", "blocks.1"))]
        assert Counter(s for s in sent if s.op == "all_reduce") == Counter(once)
        for s in scatters(spec, "blocks.0", "blocks.1"):
            assert counts[s] == 2 * count
        assert Counter(s.op for s in sent)["reduce_scatter"] == (2 + 2) * count  # the last one is split over both axes
        full = sent_by(model, spec, count, keep="full").all
        assert Counter(s.op for s in full) == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 4}
        spec = fs.by_type(MLP)(model).on(
            mesh_of(4, 2)
        )  # accumulate's ``reduce_axes``: over the others they stay each rank's own
        for keep in KEEPS:
            sent = sent_by(model, spec, keep=keep, reduce_axes="shard").all
            assert {s.op for s in sent} == {"all_gather", "reduce_scatter"}
        refused(ValueError, "split over axis 'shard'", lambda: sent_by(model, spec, reduce_axes=["replicate"]))


# --- what is alive ---
@pytest.mark.parametrize("keep", KEEPS)
def test_what_lives_from_one_micro_batch_to_the_next(keep: str) -> None:
    """One sum of gradients in slices; or of whole ones, and the full parameters. And in backward what one call has there."""
    with world(4), no_collector():
        model = chain(5)
        (spec, params), batches = shards_of(fs.by_type(MLP), model), [numbers(0, i) for i in range(MICRO)]
        block = spec.padded_numel(spec.by_key["0"])
        slices = sum(p.nbytes for p in params.values())
        between: list[int] = []

        def loss(p: fs.Params, x: Tensor) -> Tensor:
            between.append(sum(nbytes for held, nbytes in peak.alive.values() if held() is not None))
            return fs.functional_call(model, p, (x,), spec=spec).square().mean()

        with Alive() as alive, Peak() as peak:
            fs.accumulate(loss, params, batches, spec=spec, keep=keep)
        own = slices if keep == "shards" else sum(p.nbytes for p in model.parameters())
        before = slices + (0 if keep == "shards" else 4 * slices)  # the shards themselves, and what they are gathered to
        for held, sums in zip(between, (0, own, own), strict=True):
            assert before + sums <= held <= before + sums + 100  # and the losses
        if keep == "shards":
            assert max(alive.peak, alive.peak_unreduced) <= 4 * block
            assert alive.peak_unreduced <= 2 * block
        assert alive.now() == []


# --- weights ---
@each(use=["penalty", "derived", "remat", "unshard"])
@real_ranks(2)
def test_weights_and_a_loss_that_uses_its_shards(rank: int, use: str) -> None:
    """The mean is right with a penalty; elsewhere replicas would differ without a word. Replicas: a loss that uses the
    shards beside functional_call, where the ranks' weights differ."""
    model, weights = chain(2), [[1.0, 2.0], [3.0, 4.0]]
    (spec, params), xs = shards_of(fs.by_type(MLP, p=P()), model), [[numbers(r, i) for i in range(2)] for r in range(2)]

    def loss(p: Any, x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
        return (call(p, x) ** 2).mean() + (sum((t**2).sum() for t in p.values()) if use == "penalty" else 0)

    def sharded(p: fs.Params, x: Tensor) -> Tensor:
        call = lambda p, x: fs.functional_call(model, p, (x,), spec=spec)  # noqa: E731
        calls = {
            "derived": lambda p, x: call({key: 2 * t for key, t in p.items()}, x),
            "remat": fs.remat(call),
            "unshard": lambda p, x: torch.func.functional_call(model, fs.unshard(p, spec), x),
        }
        return loss(p, x, calls.get(use, call))

    def plain(p: fs.Params) -> Tensor:
        call = lambda p, x: torch.func.functional_call(model, p, x)  # noqa: E731
        each = [w * loss(p, x, call) for r in range(2) for w, x in zip(weights[r], xs[r], strict=True)]
        return sum(each) / 10

    def run(reduce: str | float) -> fs.Params:
        return fs.accumulate(sharded, params, xs[rank], spec=spec, weights=weights[rank], reduce=reduce)[0]

    if use == "penalty":
        full = {name: t.detach() for name, t in model.named_parameters()}
        close(run("mean"), fs.shard(fs.grad(plain)(full), spec))
        for reduce in ("sum", 3.0):
            refused(ValueError, r"unit '0': .*reduce=.*uses the shard itself, .* replicas differ", lambda: run(reduce))
        idle = fs.accumulate(sharded, params, xs[rank], spec=spec, weights=[rank, rank])[0]  # no weight on the first rank
        assert all(bool(g.isnan().all()) == (rank == 0) for g in idle.values())
    else:
        refused(ValueError, r"unit '0': accumulate.weights=.: .* expected functional_call of the shards", lambda: run("mean"))


def test_weights_are_of_the_ranks_that_are_reduced_over() -> None:
    """Over some axes alone: of each group the mean by its own weights."""
    model = nn.Linear(1, 1, bias=False).double()

    def run(mesh: Mesh, x: Tensor, weight: Tensor) -> Tensor:
        spec = fs.policies.whole()(model).on(mesh)
        loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum()  # noqa: E731
        grads, _ = fs.accumulate(loss, fs.shard(model, spec), [x], spec=spec, weights=[weight], reduce_axes="shard")
        return fs.unshard(grads, spec)["weight"].sum()

    x, weights = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor([1.0, 3.0, 1.0, 0.0])
    got = fs.testing.spmd(run, {"replicate": 2, "shard": 2})(x.view(4, 1, 1), weights)
    assert got.tolist() == [1.75, 1.75, 3.0, 3.0]


def test_without_any_weight() -> None:
    """Zeros, and not NaN; a rank without weight takes part."""
    model = nn.Linear(2, 1).double()

    def run(mesh: Mesh, weight: Tensor) -> Any:
        spec = fs.policies.whole()(model).on(mesh)
        params = fs.shard({name: t.detach() for name, t in model.named_parameters()}, spec)
        some, nan = weight.clamp(min=1), torch.where(weight > 0, 0, torch.nan)
        loss = lambda p, x: fs.functional_call(model, p, x, spec=spec).sum() / some + nan  # noqa: E731
        return fs.accumulate(loss, params, [torch.ones(1, 2).double()], spec=spec, weights=[weight])

    grads, value = fs.testing.spmd(run, 2)(torch.tensor([0.0, 0.0]))
    assert not grads[""].any()
    assert not value.any()
    grads, value = fs.testing.spmd(run, 2)(torch.tensor([0.0, 2.0]))
    full = fs.testing.spmd(lambda mesh, g: fs.unshard(g, fs.policies.whole()(model).on(mesh)), 2)(grads)
    assert full["bias"][0].tolist() == [0.5]
    assert value[0] == 0 != value[1]


@real_ranks(2)
def test_full_takes_other_numbers_of_micro_batches(rank: int) -> None:
    """One on the first rank and three on the second, whose micro-batches all count alike with weights."""
    model = nn.Linear(5, 1).double()
    (spec, params), batches = shards_of(fs.policies.whole(), model), [numbers(rank, i) for i in range(1 + 2 * rank)]
    loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec) ** 2).mean()  # noqa: E731
    weighted, _ = fs.accumulate(loss, params, batches, spec=spec, keep="full", weights=[1] * len(batches))
    full = {name: t.detach() for name, t in model.named_parameters()}
    xs = torch.cat([numbers(r, i) for r in range(2) for i in range(1 + 2 * r)])
    expected = fs.grad(lambda p: (torch.func.functional_call(model, p, (xs,)) ** 2).mean())(full)
    close(weighted, fs.shard(expected, spec))


# --- dtypes ---
Total = with_forward(nn.Linear, lambda self, x: nn.Linear.forward(self, x).float().sum())


@every(keep=KEEPS, dtype=[F32, BF16])
def test_added_up_in_float32(dtype: torch.dtype, keep: str) -> None:
    """256 + 1 - 256 is 1, which bfloat16 loses; the result is in the shards' own dtype."""
    model = Total(1, 1, bias=False).to(dtype)
    spec = fs.policies.whole(P("shard", precision=Precision(param=BF16)))(model)
    loss = lambda p, x: fs.functional_call(model, p, torch.full((1, 1), x), spec=spec)  # noqa: E731
    grads, _ = fs.accumulate(loss, fs.shard(model, spec), [256.0, 1.0, -256.0], spec=spec, keep=keep, reduce="sum")
    assert grads[""].dtype == dtype
    assert grads[""][0] == 1


@pytest.mark.parametrize("keep", KEEPS)
@real_ranks(4)
def test_float16_does_not_overflow(rank: int, keep: str) -> None:
    model = Total(1, 1, bias=False)
    spec = fs.policies.whole(P("shard", precision=Precision(param=F16)))(model).on(mesh_of(2, 2))
    loss = lambda p, x: fs.functional_call(model, p, torch.full((1, 1), x), spec=spec)  # noqa: E731
    grads, _ = fs.accumulate(loss, fs.shard(model, spec), [20480.0, 24576.0], spec=spec, keep=keep)
    assert float(fs.unshard(grads, spec)["weight"]) == 22528.0  # whose sum over ranks float16 does not hold


# --- what people write ---
# The outputs of a loss whose units get gradients from several places, or that changes the shards before it calls the model.
USES: dict[str, Callable[..., Tensor]] = {
    "twice": lambda call, p, x, *_: call(p, x) * call(p, x + 1),
    "penalty": lambda call, p, x, first, _: call(p, x) + p[first].sum() ** 2,
    "teacher": lambda call, p, x, first, teacher: call(p, x) - teacher(x),
    "computed": lambda call, p, x, *_: call(p, x) + call({key: 0.5 * q for key, q in p.items()}, x),
    "changed": lambda call, p, x, *_: call({key: 2 * q if key else q for key, q in p.items()}, x),
    "one computed": lambda call, p, x, first, _: call(p, x) + call({**p, first: 2 * p[first]}, x),
    "step inside": lambda call, p, x, *_: call(stepped(call, p, x), x),
    "gradient of the input": lambda call, p, x, *_: torch.func.grad(lambda x: call(p, x).square().sum())(x),
    "checkpoint": lambda call, p, x, *_: torch.utils.checkpoint.checkpoint(call, p, x, use_reentrant=False),
    "remat": lambda call, p, x, *_: fs.remat(call)(p, x),
    "a unit alone": lambda call, p, x, *_: call({key: q if key.endswith("1") else q.detach() for key, q in p.items()}, x),
}
OTHERWISE = [*USES]


def stepped(call: Callable[..., Tensor], p: fs.Params, x: Tensor) -> fs.Params:
    inner = torch.func.grad(lambda p: (call(p, x) ** 2).mean())(p)
    return {key: q - 0.1 * inner[key] for key, q in p.items()}


def used_otherwise(how: str, model: nn.Module, spec: fs.PartitionSpec, teacher: Any) -> Callable[..., Tensor]:
    def loss(p: fs.Params, x: Tensor, **by: Any) -> Tensor:
        first = next(key for key in p if key.endswith("blocks.0"))
        call = lambda p, x: fs.functional_call(model, p, (x,), spec=spec, **by)  # noqa: E731
        return (USES[how](call, p, x, first, teacher) ** 2).mean()

    return loss


@at_most(2)
@pytest.mark.parametrize(
    "how", mark_seldom([*OTHERWISE, "same architecture"], "changed", "twice", "step inside", "gradient of the input", "remat")
)
@every(keep=KEEPS)
@real_ranks(4)
def test_what_is_computed_from_shards(rank: int, keep: str, how: str) -> None:
    """Shards that the loss has changed, a gradient inside the loss, a teacher: nothing of this is reduced twice or never."""
    mesh = mesh_of(2, 2)
    model, teacher = Net(blocks=2), Net(blocks=2 if how == "same architecture" else 1)
    spec, other = (policy(P("shard"))(m).on(mesh) for m in (model, teacher))
    params, taught = fs.shard(model, spec), fs.shard(teacher, other)
    batches = [numbers(rank, i) for i in range(2)]

    def teach(x: Tensor) -> Tensor:
        target = lambda t: fs.functional_call(teacher, t, (x,), spec=other, reduce=3.0)  # noqa: E731
        slopes = torch.func.grad(lambda t: target(t).sum())(taught)
        return target(taught) + sum(slope.sum() for slope in slopes.values())

    loss = used_otherwise("teacher" if how == "same architecture" else how, model, spec, teach)
    for by in depth({"shards": ["sum"], "full": ["mean"]}[keep], ["mean", "sum"]):
        expected, _ = each_alone(lambda p, x, by=by: loss(p, x, reduce=by), params, batches)
        got, _ = fs.accumulate(loss, params, batches, spec=spec, keep=keep, reduce=by)
        close(got, {key: g * (1 if by == "mean" else 2) for key, g in expected.items()})


def of_chain(blocks: int = 2, p: P | None = None) -> tuple[nn.Module, fs.PartitionSpec, fs.Params, Tensor]:
    """A small model, its spec and shards, and a batch."""
    model = chain(blocks)
    spec = policy(p or P("shard"))(model)
    return model, spec, fs.shard(model, spec), numbers(0, 0)


def test_nothing_of_the_callers_is_changed() -> None:
    """Nor is anything left behind where the loss fails."""
    model = chain(2)
    (spec, params), x = shards_of(policy(P("shard")), model), numbers(0, 0)
    kept = {key: p.clone() for key, p in params.items()}

    def loss(p: fs.Params, x: Tensor, **options: Any) -> Tensor:
        return fs.functional_call(model, p, (x,), spec=spec, **options).sum()

    def failing(p: fs.Params, x: Tensor) -> Tensor:
        handed.update(p)
        p.clear()
        raise KeyError("mine")

    handed: fs.Params = {}
    first, _ = fs.accumulate(loss, params, [x, x], spec=spec)
    refused(KeyError, "mine", lambda: fs.accumulate(failing, params, [x, x], spec=spec))
    loss(handed, x, reduce="sum")  # which inside of accumulate would be refused
    second, _ = fs.accumulate(loss, params, [x, x], spec=spec)
    close(second, first)
    first["0"].zero_()
    assert all(torch.equal(p, kept[key]) for key, p in params.items())
    assert not any(p.requires_grad or p.grad is not None for p in params.values())


def test_of_the_thread_that_runs_it() -> None:
    """A call in another thread is not inside of it; but in a thread of autograd's own, which Python has not started, it is."""
    model, spec, params, x = of_chain(1)
    said: queue.Queue[str] = queue.Queue()

    def call(p: fs.Params) -> None:
        try:
            fs.functional_call(model, p, (x,), spec=spec, reduce="sum")
            said.put("none")
        except ValueError as error:
            said.put(str(error))

    def loss(p: fs.Params, x: Tensor) -> Tensor:
        for start in (threading.Thread(target=call, args=(p,)).start, lambda: _thread.start_new_thread(call, (p,))):
            start()
            heard.append(said.get(timeout=60))
        return fs.functional_call(model, p, (x,), spec=spec).sum()

    heard: list[str] = []
    fs.accumulate(loss, params, [x], spec=spec)
    assert heard[0] == "none"
    assert "give them to accumulate" in heard[1]


# --- what is refused ---
X = numbers(0, 0)
REFUSALS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "none": (ValueError, "expected one micro-batch at least, got none", {"microbatches": []}),
    "a tensor": (TypeError, "expected a list of micro-batches, or a generator, got Tensor", {"microbatches": X}),
    "keep": (ValueError, "keep: expected 'shards' or 'full', got 'all'", {"keep": "all"}),
    "reduce": (ValueError, "reduce: expected 'mean', 'sum'", {"reduce": "max"}),
    "axes": (ValueError, "unknown mesh axis 'data'", {"reduce_axes": "data"}),
    "weights": (ValueError, "expected a weight for each of 2 micro-batches, got 1", {"weights": [1]}),
    "of a generator": (ValueError, "for each of 2 micro-batches, got 1", {"weights": [1], "microbatches": iter([X, X])}),
    "negative": (ValueError, "weight 1: expected a finite number from 0 on, got -1", {"weights": [1, -1]}),
    "NaN tensor": (ValueError, "weight 0: .* from 0 on, got nan", {"weights": [torch.tensor(torch.nan), 1]}),
    "bool": (TypeError, "weight 1: expected a number or a scalar tensor, got bool", {"weights": [1, True]}),
    "shape": (ValueError, r"weight 0: expected a scalar, got shape \[2\]", {"weights": [torch.ones(2), 1]}),
    "no shards": (ValueError, "is not in the spec", {"params": {"0.in_proj.weight": X}}),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused(what: str) -> None:
    model, spec, params, x = of_chain()
    error, match, options = REFUSALS[what]
    given: dict[str, Any] = {"params": params, "microbatches": [x] * 2, "spec": spec} | options
    refused(error, match, lambda: fs.accumulate(lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum(), **given))


@at_most(1)
@pytest.mark.parametrize("keep", KEEPS)
@real_ranks(2)
def test_a_bad_weight_on_one_rank_is_an_error_on_every_rank(rank: int, keep: str) -> None:
    """None waits for the other one."""
    model = MLP(5)
    (spec, params), x = shards_of(fs.policies.whole(), model), numbers(rank, 0)
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum()  # noqa: E731
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
    told = r"weight 1: expected a (finite number from 0 on|number or a scalar tensor), got .* on rank 1"
    for bad in (torch.nan, -1.0, True, "1", torch.tensor(-1.0)):
        for batches in ([x, x], iter([x, x])):
            weights: list[Any] = [1.0, bad if rank else 1.0]
            refused(ValueError, told, lambda: fs.accumulate(loss, params, batches, spec=spec, keep=keep, weights=weights))
    with pytest.raises(ValueError, match="accumulate: expected a weight for each of 2 micro-batches, got 1 on rank 1"):
        fs.accumulate(loss, params, [x, x], spec=spec, keep=keep, weights=[1.0] * (2 - rank))
    with pytest.raises(ValueError, match="weight 0: expected a finite number from 0 on, got nan on rank 1"):
        fs.update_in_backward(update, loss, params, init(params), [x], spec=spec, weights=[torch.nan if rank else 1.0])
    fs.accumulate(loss, params, [x, x], spec=spec, keep=keep, weights=[1.0, 2.0])  # the ranks are together


@real_ranks(2)
def test_units_that_are_closed_over_need_as_many_micro_batches(rank: int) -> None:
    """They are gathered in each, also where the others are kept full, as the frozen ones beside LoRA."""
    model, x = chain(2), numbers(0, 0)
    spec, params = shards_of(policy(P("shard")), model)
    frozen = {key: params[key] for key in [*params][:1]}
    trained = {key: shard for key, shard in params.items() if key not in frozen}
    loss = lambda p, x: fs.functional_call(model, frozen | p, (x,), spec=spec).sum()  # noqa: E731
    run = functools.partial(fs.accumulate, loss, microbatches=[x] * (1 + rank), spec=spec, keep="full")
    refused(ValueError, "got 1 micro-batches on rank 0, and 2 micro-batches on rank 1", lambda: run(trained))
    close({key: run(params)[0][key] for key in trained}, fs.accumulate(loss, trained, [x], spec=spec, keep="full")[0])


@at_most(8)
@every(keep=KEEPS, reduce=["mean", "sum"], bad=[-1.0, -0.25, torch.nan, torch.inf])
def test_weights_that_the_host_cannot_read_make_nan(keep: str, reduce: Any, bad: float) -> None:
    """On simulated ranks, as on a device: one rank's bad weight shows on every rank that is reduced over, not as zeros."""
    model = chain(2)
    spec = policy(P("shard"))(model)

    def run(mesh: Mesh, weights: Tensor) -> Any:
        on = spec.on(mesh)
        loss = lambda p, x: fs.functional_call(model, p, (x,), spec=on).sum()  # noqa: E731
        batches = [numbers(0, i) for i in range(2)]
        return fs.accumulate(loss, fs.shard(model, on), batches, spec=on, keep=keep, weights=[*weights], reduce=reduce)

    grads, value = fs.testing.spmd(run, 2)(torch.tensor([[1.0, 1.0], [1.0, bad]]))
    assert value[1].isnan()
    for unit in spec:
        assert not grads[unit.key].nan_to_num(0).count_nonzero() or reduce == "sum"
        assert grads[unit.key].isnan().any(1).all()


@pytest.mark.parametrize("keep", KEEPS)
def test_what_decides_the_reduction(keep: str) -> None:
    """A call inside that says how to reduce, or takes the shards with another spec, would be reduced in two ways."""
    model = chain(2)
    spec, other = policy(P("shard"))(model), policy(P("shard", reshard=False))(model)
    params, x = fs.shard(model, spec), numbers(0, 0)

    def run(on: fs.PartitionSpec, **options: Any) -> None:
        loss = lambda p, x: fs.functional_call(model, p, (x,), spec=on, **options).sum()  # noqa: E731
        fs.accumulate(loss, params, [x], spec=spec, keep=keep)

    for options in ({"reduce": "sum"}, {"reduce": 2.0}, {"reduce_axes": ["shard"]}):
        refused(ValueError, "give them to accumulate", lambda: run(spec, **options))
    refused(ValueError, "unit '0': functional_call takes the shards of accumulate with another spec", lambda: run(other))


def test_ignored_parameters_are_closed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spec = fs.policies.ignoring(fs.policies.whole(), modules=["1"])(model)
    params = {**fs.shard(model, spec), "1.weight": model[1].weight.detach()}
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is ignored by the spec: expected shards"):
        fs.accumulate(lambda p, x: p[""].sum(), params, [torch.ones(2)], spec=spec)


# --- what goes on beside the loss ---
@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True)], ids=str)
def test_a_checkpoint_around_a_call_of_what_is_kept_full(p: P) -> None:
    """Its second run, in backward, takes what the first one took, and gathers nothing."""
    model, batches = chain(2), [numbers(0, i) for i in range(2)]
    spec = policy(p)(model)

    def run(params: fs.Params, x: Tensor) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec)

    def loss(params: fs.Params, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(run, params, x, use_reentrant=False).square().mean()

    params = fs.shard(model, spec)
    with world(8):
        on_many, full = policy(p)(model), {name: q.detach() for name, q in model.named_parameters()}
        spec, sharded = on_many, fs.shard(full, on_many)
        with Collectives() as sent:
            fs.accumulate(loss, sharded, batches, spec=spec, keep="full")
        assert sent.all == gathers(spec.bound, *spec.by_key) + scatters(spec.bound, *spec.by_key)
    spec = policy(p)(model)
    got, _ = fs.accumulate(loss, params, batches, spec=spec, keep="full")
    close(got, each_alone(lambda params, x: run(params, x).square().mean(), params, batches)[0])


@every(keep=KEEPS, how=["a hook", "backward", "autograd.grad"])
def test_what_would_not_see_the_gradients_of_a_call(keep: str, how: str) -> None:
    """A hook on a shard is not called with them, a backward inside of the loss would be counted: both are refused."""
    model, spec, params, x = of_chain()

    def loss(params: fs.Params, x: Tensor) -> Tensor:
        value = fs.functional_call(model, params, (x,), spec=spec).square().mean()
        if how == "a hook":
            params["0"].register_hook(lambda g: g * 3)
        elif how == "autograd.grad":
            torch.autograd.grad(value, list(params.values()), create_graph=True, allow_unused=True)
        else:
            value.backward(retain_graph=True)
        return value

    match = "unit '0': .*register_hook on its shard" if how == "a hook" else "backward inside of the loss"
    with pytest.raises((ValueError, RuntimeError), match=match):
        fs.accumulate(loss, params, [x], spec=spec, keep=keep)  # pyright: ignore[reportArgumentType]
    if keep == "shards":
        init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
        with pytest.raises((ValueError, RuntimeError), match=match):
            fs.update_in_backward(update, loss, params, init(params), [x], spec=spec)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_object_in_aux_keeps_no_graph(is_recorded: bool) -> None:
    """One that holds a tensor of its micro-batch is refused, since nothing detaches it."""
    model = nn.Linear(2, 1)
    spec = fs.policies.whole()(model)
    batches = [torch.ones(1, 2)] * 2

    def loss(p: fs.Params, x: Tensor, detached: bool) -> tuple[Tensor, Any]:
        out = fs.functional_call(model, p, x, spec=spec).sum()
        return out, {"stats": types.SimpleNamespace(out=[out.detach() if detached else out])}

    def run(detached: bool) -> Any:
        step = lambda p: fs.accumulate(lambda p, x: loss(p, x, detached), p, batches, spec=spec, has_aux=True)  # noqa: E731
        params = fs.shard(model, spec)
        return torch.func.vjp(step, params)[0] if is_recorded else step(params)

    refused(TypeError, r"aux\['stats'\]: SimpleNamespace holds a tensor that is not detached", lambda: run(detached=False))
    if not is_recorded:
        assert len(run(detached=True)[1][1]) == 2
