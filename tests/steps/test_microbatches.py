"""Ranks with other numbers of micro-batches: refused by accumulate, or made equal by ones of weight 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from depth import at_most, each, every, mark_seldom
from models import refused
from parity import STRATEGIES, strategies
from peer_models import MLP
from ranks import mesh_of, real_ranks
from torch import Tensor, nn

import funshard as fs
from funshard import P

Batch = tuple[Tensor, Tensor]
COUNTS = {"two and one": (2, 1), "none": (0, 3), "equal": (2, 2), "of a mesh with replicas": (1, 2, 0, 3)}
WAYS = ["accumulate", "full", "sum", "update_in_backward", "torch.func", "grad of grad"]


def batch_of(rank: int, i: int) -> Batch:
    """Inputs, and labels of which some are ignored: other numbers in each micro-batch."""
    generator = torch.Generator().manual_seed(10 * rank + i)
    labels = torch.randint(5, (4,), generator=generator)
    labels[: (rank + i) % 3] = -100
    return torch.randn(4, 5, generator=generator, dtype=torch.float64), labels


def batches_of(rank: int, counts: tuple[int, ...]) -> list[Batch]:
    return [batch_of(rank, i) for i in range(counts[rank])]


def tokens(batches: Iterable[Batch]) -> list[Tensor]:
    return [(labels >= 0).sum() for _, labels in batches]


def make(p: P | None = None, mesh: Any = None) -> tuple[nn.Module, fs.PartitionSpec, Callable[..., Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(MLP(5), nn.Dropout(0.0), MLP(5)).double()
    spec = fs.by_type(MLP, p=p or P("shard"))(model)
    spec = spec.on(mesh) if mesh is not None else spec.bound

    def loss(params: fs.Params, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(fs.functional_call(model, params, batch[0], spec=spec), batch[1])

    return model, spec, loss


def expected_grads(model: nn.Module, spec: fs.PartitionSpec, batches: list[Batch]) -> fs.Params:
    """The gradients of one process that has the tokens of all ranks."""

    def whole(full: fs.Params) -> Tensor:
        out = torch.func.functional_call(model, full, (torch.cat([x for x, _ in batches]),))
        return nn.functional.cross_entropy(out, torch.cat([labels for _, labels in batches]))

    return fs.shard(torch.func.grad(whole)({name: t.detach() for name, t in model.named_parameters()}), spec)


def close(got: fs.Params, expected: fs.Params) -> None:
    torch.testing.assert_close(got, dict(expected), rtol=1e-12, atol=1e-12)


# --- padded ---
@each(step=["accumulate", "update_in_backward", "torch.func"], strategy=STRATEGIES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@real_ranks(lambda counts: len(counts))
def test_the_mean_is_over_the_tokens_of_all_ranks(rank: int, strategy: str, counts: tuple[int, ...], step: str) -> None:
    """As of one process that has them; ranks with fewer micro-batches are given some that count with weight 0."""
    model, spec, loss = make(STRATEGIES[strategy], mesh_of(2, 2) if len(counts) == 4 else None)
    params, own = fs.shard(model, spec), batches_of(rank, counts)
    nonsense = (torch.full((4, 5), 7.0, dtype=torch.float64), torch.full((4,), -100))  # whose mean loss is NaN
    got = fs.pad_microbatches(iter(own), tokens(own), spec=spec, stand_in=nonsense)
    assert len(got.microbatches) == len(got.weights) == max(counts)
    assert all(a is b for a, b in zip(got.microbatches, own, strict=False))
    everything = [batch for r in range(len(counts)) for batch in batches_of(r, counts)]
    expected = expected_grads(model, spec, everything)
    if step == "accumulate":
        grads, value = fs.accumulate(loss, params, got.microbatches, spec=spec, weights=got.weights)
        close(grads, expected)
    elif step == "torch.func":
        run = lambda p: fs.accumulate(loss, p, got.microbatches, spec=spec, weights=got.weights)  # noqa: E731
        (grads, value), _ = torch.func.jvp(run, (params,), (params,))
        close(grads, expected)
    else:
        init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
        new = fs.update_in_backward(update, loss, params, init(params), got.microbatches, spec=spec, weights=got.weights)
        close(new.params, {key: params[key] - g for key, g in expected.items()})
        value = new.value
    assert value.isfinite()
    assert (value != 0) == (counts[rank] > 0)


@real_ranks(2)
def test_a_rank_joins_the_last_steps_of_the_others(rank: int) -> None:
    """Five batches on one rank and two on the other: both make three steps of two, and end together."""
    model, spec, loss = make()
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=0.1)
    params = fs.shard(model, spec)
    plain, state, states, steps = params, init(params), init(params), 0
    own = iter(batches_of(rank, (5, 2)))
    everyone = [batches_of(r, (5, 2)) for r in range(2)]
    take = lambda own: fs.pad_microbatches(own, tokens(own), spec=spec, stand_in=batch_of(0, 0))  # noqa: E731
    while (step := take(list(itertools.islice(own, 2)))).microbatches:
        grads, _ = fs.accumulate(loss, params, step.microbatches, spec=spec, weights=step.weights)
        params, state = update(grads, state, params)
        alike = [batch for some in everyone for batch in some[2 * steps : 2 * steps + 2]]
        current = nn.Sequential(MLP(5), nn.Dropout(0.0), MLP(5)).double()
        current.load_state_dict(fs.unshard(plain, spec))
        plain, states = update(expected_grads(current, spec, alike), states, plain)
        steps += 1
    assert steps == 3
    torch.testing.assert_close(params, plain, rtol=1e-9, atol=1e-9)


@real_ranks(2)
def test_a_rank_without_micro_batches_needs_one_to_repeat(rank: int) -> None:
    _, spec, _ = make()
    with pytest.raises(ValueError, match=rf"this rank has {2 * rank} micro-batches and another one 2: .* stand_in="):
        fs.pad_microbatches(batches_of(rank, (0, 2)), spec=spec)
    assert fs.pad_microbatches([], spec=spec) == ([], [])  # all ranks are at the end
    assert fs.pad_microbatches([1, 2][: 2 - rank], spec=spec) == ([1, 2 - rank], [1.0, 1.0 - rank])
    with pytest.raises(ValueError, match=rf"a weight for each micro-batch on every rank, got {1 + rank} for 2 on this one"):
        fs.pad_microbatches([1, 2], [1.0] * (1 + rank), spec=spec)


# --- weight 0: adds nothing, whatever is computed (law R11) ---
def masked_mean(call: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """The mean over labels: 0/0 without any."""
    rows = nn.functional.cross_entropy(call(batch[0]), batch[1].clamp(min=0), reduction="none")
    mask = (batch[1] >= 0).double()
    return (rows * mask).sum() / mask.sum()


@at_most(1)
@each(way=WAYS, strategy=mark_seldom([*STRATEGIES, "remat"], "shard", "remat"))
@real_ranks(2)
def test_a_micro_batch_of_weight_0_is_left_out(rank: int, strategy: str, way: str) -> None:
    """NaN in one rank's micro-batch of weight 0 passes neither into its sums nor through the reduction; a sum is by weights."""
    model, spec, _ = make(strategies(strategy)[strategy])
    loss = lambda p, b: masked_mean(lambda x: fs.functional_call(model, p, (x,), spec=spec), b)  # noqa: E731
    nonsense = (torch.full((4, 5), torch.nan, dtype=torch.float64), torch.full((4,), -100))
    own, params = batches_of(rank, (3, 3)), fs.shard(model, spec)
    expected = expected_grads(model, spec, [*batches_of(0, (3, 3)), *batches_of(1, (3, 2))])
    if rank:
        own[1], own[2] = nonsense, own[1]
    counts = [w if i % 2 else int(w) for i, w in enumerate(tokens(own))]
    keep, reduce = "full" if way == "full" else "shards", "sum" if way == "sum" else "mean"
    run = lambda p: fs.accumulate(loss, p, own, spec=spec, weights=counts, keep=keep, reduce=reduce)  # noqa: E731
    if way == "sum":
        everyone = [*batches_of(0, (3, 3)), *batches_of(1, (3, 2))]
        expected = {key: g * sum(tokens(everyone)) for key, g in expected.items()}
    if way == "update_in_backward":
        init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
        options: Any = {"weights": counts, "max_norm": 1e3, "clip": "previous"}
        new = fs.update_in_backward(update, loss, params, init(params), own, spec=spec, **options)
        grads, value = {key: params[key] - p for key, p in new.params.items()}, new.value
        torch.testing.assert_close(new.norm, fs.optim.global_norm(expected, spec))
    elif way == "torch.func":
        (grads, value), _ = torch.func.jvp(run, (params,), (params,))
    elif way == "grad of grad":
        squares = lambda grads: sum((g**2).sum() for g in grads.values()) / 2  # noqa: E731
        twice = fs.grad(lambda p: squares(run(p)[0]))(params)
        sane = [batch if batch is not nonsense else (torch.zeros(4, 5).double(), batch[1].clamp(min=0)) for batch in own]
        again = lambda p: fs.accumulate(loss, p, sane, spec=spec, weights=counts)  # noqa: E731
        close(twice, fs.grad(lambda p: squares(again(p)[0]))(params))
        grads, value = run(params)
    else:
        grads, value = run(params)
    close(grads, expected)
    assert value.isfinite()


def test_weight_0_on_simulated_ranks() -> None:
    """Where no host reads a weight."""
    model = nn.Linear(2, 1).double()

    def run(mesh: Any, x: Tensor, weight: Tensor) -> fs.Params:
        spec = fs.policies.whole()(model).on(mesh)
        loss = lambda p, x: fs.functional_call(model, p, x, spec=spec).sum() * (weight / weight)  # noqa: E731
        grads, _ = fs.accumulate(loss, fs.shard(model, spec), [x], spec=spec, weights=[weight])
        return fs.unshard(grads, spec)

    got = fs.testing.spmd(run, 2)(torch.tensor([[[1.0, 2.0]], [[torch.nan] * 2]]).double(), torch.tensor([2.0, 0.0]))
    assert got["weight"].tolist() == [[[1.0, 2.0]]] * 2


def test_a_weight_of_0_has_its_derivative() -> None:
    """Law R7: how the step would change if the micro-batch counted, as when samples are reweighted from 0 on."""
    model = nn.Linear(2, 1).double()
    spec = fs.policies.whole()(model)
    params, xs = fs.shard(model, spec), list(torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0)).double())
    loss = lambda p, x: fs.functional_call(model, p, x, spec=spec).square().mean()  # noqa: E731

    def step(weights: Tensor) -> Tensor:
        grads, value = fs.accumulate(loss, params, xs, spec=spec, weights=[*weights])
        return value + grads[""].sum()

    def plain(weights: Tensor) -> Tensor:
        grads, values = zip(*(fs.grad_and_value(loss)(params, x) for x in xs), strict=True)
        terms = torch.stack([value + g[""].sum() for g, value in zip(grads, values, strict=True)])
        return (weights * terms).sum() / weights.sum()

    weights = torch.tensor([5.0, 0.0]).double()
    torch.testing.assert_close(torch.func.grad(step)(weights), torch.func.grad(plain)(weights))


# --- compared ---
@each(step=["accumulate", "update_in_backward", "torch.func"], kind=["list", "generator"])
@every(strategy=STRATEGIES, counts=[(2, 3), (3, 1), (2, 0), (0, 1), (2, 2, 2, 1)])
@real_ranks(lambda counts: len(counts))
def test_other_numbers_are_an_error_on_every_rank(
    rank: int, counts: tuple[int, ...], strategy: str, kind: str, step: str
) -> None:
    """With replicated parameters, too, whose gradients would be means of means; of a mesh, where ranks share no axis, too."""
    model, spec, loss = make(STRATEGIES[strategy], mesh_of(2, 2) if len(counts) == 4 else None)
    params, own = fs.shard(model, spec), [batch_of(rank, 0)] * counts[rank]
    ran: list[Batch] = []

    def counted(p: fs.Params, batch: Batch) -> Tensor:
        ran.append(batch)
        return loss(p, batch)

    batches = own if kind == "list" else (batch for batch in own)
    other = next(i for i, n in enumerate(counts) if n != counts[0])
    error = rf"got {counts[0]} micro-batches on rank 0, and {counts[other]} micro-batches on rank {other}; fs.pad_microbatches"
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
    steps: dict[str, Callable[[], Any]] = {
        "accumulate": lambda: fs.accumulate(counted, params, batches, spec=spec),
        "torch.func": lambda: torch.func.jvp(lambda p: fs.accumulate(counted, p, batches, spec=spec)[0], (params,), (params,)),
        "update_in_backward": lambda: fs.update_in_backward(update, counted, params, init(params), batches, spec=spec),
    }
    refused(ValueError, error, lambda: steps[step]())
    assert not ran
    fs.accumulate(counted, params, [batch_of(rank, 0)], spec=spec)  # nothing is left under way


@real_ranks(2)
def test_batches_that_are_none_or_no_list(rank: int) -> None:
    _, spec, loss = make()
    assert fs.pad_microbatches([None] * (1 + rank), spec=spec).microbatches == [None, None]
    for one_batch in ({"x": 1}, torch.ones(2, 3)):
        with pytest.raises(TypeError, match="pad_microbatches: expected a list of micro-batches, or a generator, got"):
            fs.pad_microbatches(one_batch, spec=spec)
    with pytest.raises(TypeError, match="accumulate: expected microbatches of pad_microbatches' result, and weights="):
        fs.accumulate(loss, {}, fs.pad_microbatches([None], spec=spec), spec=spec)
    with pytest.raises(ValueError, match="expected one micro-batch at least, got none"):
        fs.accumulate(loss, {}, [], spec=spec)  # on all ranks
