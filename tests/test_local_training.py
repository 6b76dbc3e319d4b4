"""Local units in what training does around the gradient: accumulation, norms, clipping, averages, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from depth import at_most, depth, each, every, mark_seldom
from ranks import mesh_of, real_ranks
from test_local import OPTIONS, Setting, batches
from torch import Tensor

import funshard as fs

Tree = dict[str, Tensor]
KINDS = ("pair", "experts", "replicated")
MICRO = 3


class Rank:
    """A rank's side of a case with micro-batches, and the same in one process."""

    def __init__(self, rank: int, sizes: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self.case = Setting(KINDS, sizes, options)
        self.whole, self.full, self.sizes = self.case.whole, self.case.full, self.case.sizes
        self.xs = torch.stack([batches(self.sizes) for _ in range(MICRO)], 1)  # [ranks, micro-batches, tokens, features]
        self.x, self.on = self.xs[rank], self.case.on(mesh_of(**self.sizes))
        self.spec, self.params = self.on.spec, self.on.params

    def loss(self, params: Tree, x: Tensor) -> Tensor:
        return self.on.loss(params, x)

    def expected(self) -> Tree:
        """The gradient of the mean over ranks and micro-batches."""
        return torch.func.grad(self.case.mean)(self.full, self.xs.flatten(0, 1))

    def check(self, grads: Tree, want: Tree | None = None, **tolerance: float) -> None:
        want, tolerance = self.expected() if want is None else want, tolerance or {"rtol": 1e-9, "atol": 1e-11}
        for name, got in fs.unshard(grads, self.spec).items():
            torch.testing.assert_close(got, want[name], **tolerance, msg=lambda m, n=name: n + m)


def norm(grads: Tree) -> Tensor:
    return torch.stack([g.norm() for g in grads.values()]).norm()


def summed(case: Rank) -> Tree:
    """The gradient by hand over micro-batches."""
    grads = [fs.grad(case.loss)(case.params, x) for x in case.x]
    return {key: torch.stack([g[key] for g in grads]).mean(0) for key in case.params}


# --- what is compared ---


def accumulated(case: Rank) -> None:
    case.check(summed(case))
    for keep in ("shards", "full"):
        grads, _ = fs.accumulate(case.loss, case.params, list(case.x), spec=case.spec, keep=keep)
        case.check(grads)
    pieces = fs.unshard(case.params, case.spec, whole=False)
    of_each = [fs.grad(case.loss)(pieces, x) for x in case.x]
    case.check(fs.reduce_grads({name: sum(g[name] for g in of_each) / MICRO for name in pieces}, case.spec))


def updated_in_backward(case: Rank) -> None:
    """A step of SGD with a rate of 1 subtracts the gradient, clipped by the norm of all ranks' pieces."""
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0, donate=True)
    want = case.expected()
    for max_norm in (None, 0.1):
        params = {key: p.clone() for key, p in case.params.items()}
        clip: Any = {"max_norm": max_norm, "clip": "previous", "norm": norm(want)} if max_norm else {}
        result = fs.update_in_backward(update, case.loss, params, init(params), list(case.x), spec=case.spec, **clip)
        assert result.norm is None or torch.allclose(result.norm, norm(want))
        scale = 1.0 if max_norm is None else max_norm / (norm(want) + 1e-6)
        steps = {key: case.params[key] - p for key, p in result.params.items()}
        case.check(steps, {name: g * scale for name, g in want.items()})


def clipped(case: Rank) -> None:
    """The norm counts every element once: local ones of all ranks, replicated ones of one."""
    grads, want = summed(case), case.expected()
    scale = 0.1 / (norm(want) + 1e-6)
    found, total = fs.optim.clip_by_global_norm(grads, case.spec, 0.1)
    torch.testing.assert_close(total, norm(want))
    case.check(found, {name: g * scale for name, g in want.items()})
    torch.testing.assert_close(fs.optim.norms(grads, case.spec), {name: g.norm() for name, g in want.items()})
    torch.testing.assert_close(
        fs.optim.vdot(grads, case.params, case.spec), sum((want[n] * p).sum() for n, p in case.full.items())
    )


def found_finite(case: Rank) -> None:
    """One element of one rank's piece that is not finite skips the step on every rank."""
    grads = summed(case)
    key = next(unit.key for unit in case.spec if unit.local_axes)
    if all(axis.rank == 0 for _, axis in case.spec.bound_mesh.axes):
        grads[key] = grads[key].clone().index_fill_(0, torch.tensor(0), float("inf"))
    init, unscale = fs.loss_scale.dynamic(case.spec, scale=4.0)
    assert not unscale(grads, init())[1].finite
    init, update = fs.optim.apply_if_finite(case.spec)(fs.optim.from_torch(torch.optim.SGD))
    params, state = update(grads, init(case.params), case.params)
    assert state.total == 1
    torch.testing.assert_close(params, case.params, rtol=0, atol=0)


def averaged(case: Rank) -> None:
    """Averages never mix the pieces of ranks."""
    drift = {key: p + 0.25 for key, p in case.params.items()}
    case.check(fs.averaging.average(drift, case.spec), fs.unshard(drift, case.spec))


def check_training(case: Rank, want: Tree, theirs: torch.optim.Optimizer, update: Any, params: Tree, state: Any) -> Any:
    """Check that parameters after a step for each batch are those of one process; return the state."""
    for i in range(MICRO):
        loss = case.case.mean(want, case.xs[:, i])
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        params, state = update(fs.grad(case.loss)(params, case.x[i]), state, params)
    case.check(params, {name: p.detach() for name, p in want.items()}, rtol=1e-6, atol=1e-8)
    return state


def gathered(case: Rank) -> None:
    """Whole parameters leave and enter, on every rank or on the first one."""
    full = fs.unshard(case.params, case.spec)
    assert all(torch.equal(full[name], p) for name, p in case.full.items())
    first = fs.unshard(case.params, case.spec, rank0_only=True)
    is_first = all(axis.rank == 0 for _, axis in case.spec.bound_mesh.axes)
    assert bool(first) == is_first
    assert all(torch.equal(p, case.full[name]) for name, p in first.items())
    back = fs.shard(first or None, case.spec, src=0)
    sent = fs.shard(case.whole, case.spec, src=1)
    for key, p in case.params.items():
        assert torch.equal(back[key], p)
        assert sent[key].shape == p.shape


CHECKS: dict[str, Callable[[Rank], None]] = {
    "accumulate": accumulated,
    "update_in_backward": updated_in_backward,
    "clip": clipped,
    "finite": found_finite,
    "average": averaged,
    "gather_full": gathered,
}
MESHES = [{"shard": 2, "tensor": 2}, {"expert": 2, "shard": 2}, {"tensor": 2, "expert": 2}, {"replicate": 2, "expert": 2}]


@each(options=depth(mark_seldom(OPTIONS[:2], OPTIONS[0]), OPTIONS), sizes=mark_seldom(MESHES, MESHES[0]))
@real_ranks(4)
def test_training_with_local_units(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Every part of a training step speaks of the same gradient."""
    case = Rank(rank, sizes, options)
    for check in CHECKS.values():
        check(case)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_on_groups_of_one(count: int) -> None:
    """No factor for each micro-batch where every axis has one rank (Megatron-LM 6660)."""
    case = Setting(KINDS, {}, OPTIONS[0])
    on, xs = case.on(case.sizes), torch.randn(count, 16, 4, dtype=torch.float64)
    grads, _ = fs.accumulate(on.loss, on.params, list(xs), spec=on.spec)
    torch.testing.assert_close(fs.unshard(grads, on.spec), torch.func.grad(case.mean)(case.full, xs))


# --- optimizers ---


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


@at_most(3)
@each(sizes=MESHES)
@every(options=[{"axis": "shard"}, {"axis": None}], name=mark_seldom(OPTIMIZERS, "AdamW", "SGD", "Adagrad", "RMSprop", "Rprop"))
@real_ranks(4)
def test_optimizers(rank: int, sizes: dict[str, int], options: dict[str, Any], name: str) -> None:
    """Steps with an option of a parameter's own, and the state by parameter name."""
    case = Rank(rank, {"shard": 1, **sizes}, options)
    cls, settings = OPTIMIZERS[name]
    want = {name: p.clone().requires_grad_() for name, p in case.full.items()}
    bias = [p for name, p in want.items() if name.endswith("bias")]
    others = [p for name, p in want.items() if not name.endswith("bias")]
    lr = settings.get("lr", 0.01)
    own = lr if name == "ASGD" else lr / 2  # ASGD's number of the unit's state is computed from the rate
    theirs = cls([{"params": others}, {"params": bias, "lr": own}], **settings)
    of_bias = None if own == lr else lambda name, _: {"lr": own} if name.endswith("bias") else {}
    init, update = fs.optim.from_torch(cls, **settings, spec=case.spec, options=of_bias)
    params = {key: p.clone() for key, p in case.params.items()}
    state = check_training(case, want, theirs, update, params, init(params))
    names = [name for name, value in theirs.state[others[0]].items() if isinstance(value, Tensor) and value.dim()]
    for of_torch in names:
        slices = {key: values[of_torch] for key, values in state.items()}
        case.check(slices, {name: theirs.state[p][of_torch] for name, p in want.items()}, rtol=1e-6, atol=1e-8)


@each(sizes=[{"replicate": 2, "expert": 2, "shard": 1}, {"tensor": 2, "replicate": 2, "shard": 1}])
@real_ranks(4)
def test_averages_of_replicas(rank: int, sizes: dict[str, int]) -> None:
    """Replicas drift apart, average sometimes, and never with ranks that hold other pieces."""
    case = Rank(rank, {"shard": 1, **sizes}, {"axis": "shard"})
    replica = case.spec.axis("replicate").rank

    def drifted(by: Tensor | float) -> Tree:
        return {name: p * (1 + by) for name, p in case.full.items()}

    mine, mean = fs.shard(drifted(float(replica)), case.spec, check_values=False), drifted(0.5)
    init, update = fs.averaging.periodic(case.spec, 2)
    state = init()
    for step in range(4):
        params, state = update(mine, state)
        want = drifted(float(replica)) if step % 2 else mean
        for key, p in fs.shard(want, case.spec, check_values=False).items():
            torch.testing.assert_close(params[key], p)
    case.check(fs.averaging.average(mine, case.spec, axes="replicate"), mean)


@at_most(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_derivative_of_a_rate(max_norm: float | None) -> None:
    """Through a clipped step of SGD, whose rate all ranks share: units with and without local axes have parts of it."""
    case, rate = Setting(("experts", "pair"), {"tensor": 2, "expert": 2}, OPTIONS[0]), torch.tensor(0.05, dtype=torch.float64)

    def rank(mesh: Any, x: Tensor) -> Tensor:
        _, on, params, _ = local = case.on(mesh)
        loss, (init, update) = local.loss, fs.optim.sgd(0.1, spec=on)

        def after(lr: Tensor) -> Tensor:
            step = lambda grads, state, params: update(grads, state, params, lr=lr)  # noqa: E731
            if max_norm is None:
                return loss(fs.update_in_backward(step, loss, params, init(params), [x], spec=on).params, x)
            grads, _ = fs.optim.clip_by_global_norm(fs.accumulate(loss, params, [x], spec=on)[0], on, max_norm)
            return loss(step(grads, init(params), params)[0], x)

        return torch.func.grad(after)(rate)

    grads = torch.func.grad(case.mean)(case.full)
    scale = 1.0 if max_norm is None else max_norm / (norm(grads) + 1e-6)
    want = torch.func.grad(lambda lr: case.mean({name: p - lr * scale * grads[name] for name, p in case.full.items()}))(rate)
    found = fs.testing.spmd(rank, case.sizes)(case.xs)
    torch.testing.assert_close(found, want.expand_as(found))
