"""The pure rules: torch's and optax's steps, and derivatives, batches and graphs of them without a case of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from depth import at_most
from models import refused
from ranks import at_rank
from test_compile import IMPORT
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import optim

pytestmark = pytest.mark.filterwarnings(f"ignore:{IMPORT}")
RULES: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any], Any, dict[str, Any]]] = {
    "sgd": (optim.sgd, {}, torch.optim.SGD, {}),
    "momentum": (optim.sgd, {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (optim.sgd, {"momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (optim.adam, {"b1": 0.8, "eps": 1e-6}, torch.optim.Adam, {"betas": (0.8, 0.999), "eps": 1e-6}),
    "adamw": (optim.adamw, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "rmsprop": (optim.rmsprop, {"eps_in_sqrt": False}, torch.optim.RMSprop, {"alpha": 0.9}),
    "centered": (
        optim.rmsprop,
        {"decay": 0.7, "eps_in_sqrt": False, "centered": True, "momentum": 0.9},
        torch.optim.RMSprop,
        {"alpha": 0.7, "centered": True, "momentum": 0.9},
    ),
    "adagrad": (optim.adagrad, {"initial_accumulator_value": 0.0, "eps": 1e-10, "eps_in_sqrt": False}, torch.optim.Adagrad, {}),
}
"""By name: the rule and its options, torch's class and its own."""


@pytest.mark.parametrize("name", RULES)
def test_the_bits_of_torchs_foreach_kernels(name: str) -> None:
    """In float32, at rates that change; torch.optim's state_dict has what the state has."""
    rule, given, cls, of_torch = RULES[name]
    init, update = rule(0.1, **given)
    params = {"a": torch.randn(101), "b": torch.randn(13), "frozen": torch.arange(3)}
    theirs = {key: nn.Parameter(x.clone()) for key, x in params.items() if x.is_floating_point()}
    optimizer, state = cls(theirs.values(), lr=0.1, foreach=True, **of_torch), init(params)
    for i in range(10):
        grads = {key: torch.randn_like(x) for key, x in theirs.items()}
        rate = 0.1 / (1 + i)
        params, state = update(grads, state, params, lr=rate)
        for key, p in theirs.items():
            p.grad = grads[key].clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    assert all(torch.equal(params[key], p) for key, p in theirs.items())
    for key, p in theirs.items():
        for slot, x in state[key].items():
            assert torch.equal(x, optimizer.state[p][slot]), slot


def of_optax(name: str, x: Tensor, grads: list[Tensor]) -> Tensor:
    """The formulas of optax, in float64."""
    m, v = torch.zeros_like(x), torch.full_like(x, 0.1 if name == "adagrad" else 0.0)
    for t, g in enumerate(grads, 1):
        if name == "lion":
            update, m = (0.9 * m + 0.1 * g).sign() + 0.1 * x, 0.99 * m + 0.01 * g
        elif name == "adagrad":
            v = v + g**2
            update = g * (v + 1e-7).rsqrt()
        elif name == "rmsprop":
            v = 0.9 * v + 0.1 * g**2
            update = g / (v + 1e-8).sqrt()
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            update = m / (1 - 0.9**t) / ((v / (1 - 0.999**t) + 1e-3).sqrt() + 1e-8) + 1e-4 * x
        x = x - 0.05 * update
    return x


@pytest.mark.parametrize(
    ("name", "given"), [("lion", {"weight_decay": 0.1}), ("adagrad", {}), ("rmsprop", {}), ("adamw", {"eps_root": 1e-3})]
)
def test_the_formulas_of_optax(name: str, given: dict[str, Any]) -> None:
    x, grads = torch.randn(9).double(), [torch.randn(9).double() for _ in range(5)]
    init, update = getattr(optim, name)(0.05, **given)
    params, state = {"": x}, init({"": x})
    for g in grads:
        params, state = update({"": g}, state, params)
    assert_close(params[""], of_optax(name, x, grads), rtol=1e-12, atol=1e-12)


def steps(name: str, x: Tensor, lr: Any, count: int = 2) -> Tensor:
    """Some steps of a rule on a function of the parameter itself."""
    rule, given, _, _ = RULES[name]
    init, update = rule(0.1, **{**given, **({"eps_root": 1e-4} if name.startswith("adam") else {})})
    params, state = {"w": x}, init({"w": x})
    for _ in range(count):
        params, state = update({"w": params["w"].cos()}, state, params, lr=lr)
    return params["w"]


@at_most(1)
@pytest.mark.parametrize("name", RULES)
def test_derivatives_batches_and_graphs(name: str) -> None:
    """Of parameters and of a rate: reverse and forward mode, twice; of a batch; and all of it in a graph."""
    x, lr = torch.tensor([0.5, 1.0, -2.0]).double(), torch.tensor(0.1).double()
    assert torch.autograd.gradcheck(partial(steps, name), (x.clone().requires_grad_(), lr.clone().requires_grad_()))
    loss = lambda x, lr: (steps(name, x, lr) ** 3).sum()  # noqa: E731
    along = torch.ones_like(x), torch.ones_like(lr)
    by_forward = torch.func.jvp(lambda *args: torch.func.grad(loss, (0, 1))(*args), (x, lr), along)[1]
    second = torch.func.hessian(loss, (0, 1))(x, lr)
    by_reverse = second[0][0] @ along[0] + second[0][1], second[1][0] @ along[0] + second[1][1]
    assert_close(by_forward, by_reverse)
    rates = torch.tensor([0.1, 0.3]).double()
    assert_close(torch.vmap(partial(steps, name), (None, 0))(x, rates), torch.stack([steps(name, x, r) for r in rates]))
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(loss, (0, 1)), backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, lr), torch.func.grad(loss, (0, 1))(x, lr))


def test_adafactor_is_a_rule_of_whole_matrices() -> None:
    """With derivatives by parameters, gradients and a rate, and in a graph; its steps are compared in test_matrix_steps."""
    model = nn.Linear(3, 2).double()
    spec = fs.policies.whole()(model).on({"shard": 1})
    init, update = optim.adafactor(0.1, spec)
    shards = fs.shard(model, spec)
    state = init(shards)

    def after(x: Tensor, lr: Tensor) -> Tensor:
        return update({"": x.cos()}, state, {"": x}, lr=lr)[0][""][:8]

    x, lr = shards[""].clone().requires_grad_(), torch.tensor(0.1).double().requires_grad_()
    assert torch.autograd.gradcheck(after, (x, lr))
    torch._dynamo.reset()
    grads = {"": torch.ones_like(shards[""])}
    assert_close(fs.compile(update, backend="aot_eager")(grads, state, shards)[0], update(grads, state, shards)[0])


def test_zeros_need_a_root() -> None:
    """Where all gradients of an element were 0, the root has no derivative without ``eps_root``."""
    x = torch.tensor([1.0, 0.0]).double()

    def after(eps_root: float, w: Tensor) -> Tensor:
        init, update = optim.adam(0.1, eps_root=eps_root)
        return update({"w": w * x}, init({"w": w}), {"w": w})[0]["w"]

    assert torch.func.jacrev(partial(after, 0.0))(x).isnan().any()
    assert torch.autograd.gradcheck(partial(after, 1e-3), torch.ones(2).double().requires_grad_())


def test_the_gradient_through_two_updates_with_options() -> None:
    """On two ranks' shards that of the whole: each parameter has its rate, and padding stays."""
    module = nn.Linear(3, 2).double()
    start, target = ({name: torch.randn_like(p) for name, p in module.named_parameters()} for _ in range(2))
    spec = fs.policies.whole(fs.P("shard", align=5))(module).on({"shard": 2})

    def own(name: str, param: fs.Param) -> dict[str, float]:
        return {"lr": 0.3} if name == "bias" else {}

    def trained(params: fs.Params, goal: fs.Params, rank: int) -> Tensor:
        init, update = optim.adamw(0.1, weight_decay=0.1, spec=at_rank(spec, rank), options=own)
        state = init(params)
        for _ in range(2):
            params, state = update({k: 2 * (p - goal[k]) for k, p in params.items()}, state, params)
        return sum((p**3).sum() for p in params.values())

    full = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    moved = {name: tensor.clone() for name, tensor in full.items()}
    groups = [{"params": [p], **({"lr": 0.3} if name == "bias" else {})} for name, p in moved.items()]
    peer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, differentiable=True)
    for _ in range(2):
        for grad, p in [(2 * (p - target[name]), p) for name, p in moved.items()]:
            p.grad = grad.clone()
        peer.step()
    cubes = sum((p**3).sum() for p in moved.values())
    wanted = dict(zip(full, torch.autograd.grad(cubes, list(full.values())), strict=True))
    for rank in range(2):
        shards, goal = (fs.shard(tree, spec, rank=rank) for tree in (start, target))
        got = torch.func.grad(trained)(shards, goal, rank)
        assert_close(got, fs.shard(wanted, spec, rank=rank), rtol=1e-3, atol=1e-4)  # torch counts in float32


def test_what_a_rule_refuses() -> None:
    init, _ = optim.adam(0.1)
    refused(ValueError, "adamw: eps_root: expected at least 0, got -1", lambda: optim.adamw(0.1, eps_root=-1.0))
    refused(ValueError, "adamw: b2: expected a number below 1, got 1", lambda: optim.adamw(0.1, b2=1.0))
    refused(ValueError, "sgd: nesterov: expected a momentum with it", lambda: optim.sgd(0.1, nesterov=True))
    words: Any = "0.1"
    refused(TypeError, "adamw: eps: expected a number, got str", lambda: optim.adamw(0.1, eps=words))
    refused(TypeError, "sgd: learning_rate: expected a number or a tensor of one, got str", lambda: optim.sgd(words))
    with pytest.raises(TypeError, match=r"unit '': expected real parameters, got torch\.complex64; optim\.from_torch takes th"):
        init({"": torch.ones(3, dtype=torch.complex64)})
    spec = fs.policies.whole()(nn.Linear(2, 2)).on({"shard": 1})
    with pytest.raises(ValueError, match=r"lion: options of 'bias': expected some of .*, got 'eps'"):
        optim.lion(0.1, spec=spec, options=lambda name, param: {"eps": 0.1})


@at_most(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_schedules(compiled: bool) -> None:
    """Of Optax's formulas, for numbers and tensors; as a rule's rate and by a link; in one graph."""
    rate = optim.warmup(optim.join([optim.cosine(1.0, 8, 0.1), optim.linear(0.5, 0.1, 4)], [6]), 4)
    want = [*(i / 4 for i in range(4)), *(0.9 * 0.5 * (1 + torch.tensor(torch.pi * i / 8).cos()) + 0.1 for i in range(6))]
    want += [0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    assert_close([rate(i) for i in range(16)], [float(x) for x in want], rtol=1e-6, atol=1e-6)
    assert_close([rate(torch.tensor(i)).item() for i in range(16)], [rate(i) for i in range(16)], rtol=0, atol=0)
    for init, update in (optim.sgd(rate), optim.chain(optim.schedule_lr(rate), optim.sgd(0.0))):
        torch._dynamo.reset()
        run = fs.compile(update, backend="aot_eager") if compiled else update
        params, total = {"": torch.zeros(2).double()}, 0.0
        state = init(params)
        for i in range(8):
            params, state = run({"": torch.ones(2).double()}, state, params)
            total += rate(i)
        assert_close(params[""], torch.full((2,), -total).double())
    once = optim.schedule(torch.optim.lr_scheduler.OneCycleLR, 0.1, max_lr=0.1, total_steps=5, cycle_momentum=False)
    rate = optim.join([once, lambda step: 0.1], [5])
    assert [rate(7), float(rate(torch.tensor(7)))] == [0.1, 0.1]  # in float64, and without the one that has ended
    for wrong in (lambda: optim.cosine(1.0, 0), lambda: optim.linear(1.0, 0.0, 0), lambda: optim.join([rate], [3])):
        refused(ValueError, "expected", wrong)
