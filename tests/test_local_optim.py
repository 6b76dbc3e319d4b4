"""Optimizers and averages of local units are those of the whole parameters in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import at_most, each, every, mark_seldom
from ranks import Pool, real_ranks
from test_local import batches, full_sizes, objective, spec_of, whole_params
from test_local_training import MESHES, Rank, Tree, check_training
from torch import Tensor

import funshard as fs

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
KERNELS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "fused, donated": {"fused": True, "donate": True},
}


def trained(rank: int, sizes: dict[str, int], options: dict[str, Any], name: str, kernel: str) -> None:
    """Steps with an option of a parameter's own, and the state by parameter name."""
    case = Rank(rank, sizes, options)
    cls, settings = OPTIMIZERS[name]
    want = {name: p.clone().requires_grad_() for name, p in case.full.items()}
    bias = [p for name, p in want.items() if name.endswith("bias")]
    others = [p for name, p in want.items() if not name.endswith("bias")]
    lr = settings.get("lr", 0.01)
    own = lr if name == "ASGD" else lr / 2  # ASGD's number of the unit's state is computed from the rate
    theirs = cls([{"params": others}, {"params": bias, "lr": own}], **settings)
    of_bias = None if own == lr else lambda name, _: {"lr": own} if name.endswith("bias") else {}
    init, update = fs.optim.from_torch(cls, **settings, **KERNELS[kernel], spec=case.spec, options=of_bias)
    params = {key: p.clone() for key, p in case.params.items()}
    state = check_training(case, want, theirs, update, params, init(params))
    names = [name for name, value in theirs.state[others[0]].items() if isinstance(value, Tensor) and value.dim()]
    for of_torch in names:
        slices = {key: values[of_torch] for key, values in state.items()}
        case.check(slices, {name: theirs.state[p][of_torch] for name, p in want.items()}, rtol=1e-6, atol=1e-8)


@at_most(3)
@each(sizes=MESHES)
@every(options=[{"axis": "shard"}, {"axis": None}], name=mark_seldom(OPTIMIZERS, "AdamW", "SGD", "Adagrad", "RMSprop", "Rprop"))
def test_optimizers(gloo4: Pool, sizes: dict[str, int], options: dict[str, Any], name: str) -> None:
    sizes = {"shard": 1, **sizes}
    gloo4.run(trained, sizes, options, name, "single")


@each
@pytest.mark.parametrize(
    "sizes", [{"replicate": 2, "expert": 2, "shard": 1}, {"tensor": 2, "replicate": 2, "shard": 1}], ids=str
)
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
    average = fs.averaging.average(mine, case.spec, axes="replicate")
    case.check(average, mean)


@at_most(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_derivative_of_a_rate(max_norm: float | None) -> None:
    """Through a clipped step of SGD, whose rate all ranks share: units with and without local axes have parts of it."""
    sizes, kinds = full_sizes({"tensor": 2, "expert": 2}), ("experts", "pair")
    torch.manual_seed(1)
    xs, (model, spec), (whole, full) = batches(sizes), spec_of(kinds, sizes, {"axis": "shard"}), whole_params(kinds)
    rate = torch.tensor(0.05, dtype=torch.float64)

    def rank(mesh: Any, x: Tensor) -> Tensor:
        on = spec.on(mesh)
        params, axes = fs.shard(full, on), {name: on.axis(name) for name in ("tensor", "expert")}
        loss = lambda p, x: objective(fs.functional_call(model, p, (x, axes), spec=on))  # noqa: E731
        init, update = fs.optim.sgd(0.1, spec=on)

        def after(lr: Tensor) -> Tensor:
            step = lambda grads, state, params: update(grads, state, params, lr=lr)  # noqa: E731
            if max_norm is None:
                return loss(fs.update_in_backward(step, loss, params, init(params), [x], spec=on).params, x)
            grads, _ = fs.optim.clip_by_global_norm(fs.accumulate(loss, params, [x], spec=on)[0], on, max_norm)
            return loss(step(grads, init(params), params)[0], x)

        return torch.func.grad(after)(rate)

    def mean(params: Tree) -> Tensor:
        return torch.stack([objective(torch.func.functional_call(whole, params, (x,))) for x in xs]).mean()

    grads = torch.func.grad(mean)(full)
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    scale = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
    want = torch.func.grad(lambda lr: mean({name: p - lr * scale * grads[name] for name, p in full.items()}))(rate)
    found = fs.testing.spmd(rank, sizes)(xs)
    torch.testing.assert_close(found, want.expand_as(found))
