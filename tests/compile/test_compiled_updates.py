"""Updates of the pure rules inside fs.compile: one graph with the gradient, clipping, loss scaling and a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, depth, each, every, mark_seldom, seldom
from parity import strategies
from ranks import real_ranks
from test_compile import IMPORT, needs_cpp
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P, _torch

pytestmark = [pytest.mark.filterwarnings(f"ignore:{IMPORT}"), pytest.mark.usefixtures("fresh_dynamo")]
Counters = torch._dynamo.utils.counters
Refused = RuntimeError

OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (fs.optim.adamw, {"weight_decay": 0.1}),
    "adam": (fs.optim.adam, {"eps_root": 1e-8}),
    "sgd": (fs.optim.sgd, {"momentum": 0.9, "nesterov": True}),
    "lion": (fs.optim.lion, {}),
    "rmsprop": (fs.optim.rmsprop, {"momentum": 0.9, "centered": True, "eps": 1e-3}),
    "adagrad": (fs.optim.adagrad, {}),
}
RATES = (0.05, 0.03, 0.0, 0.07, 0.01, 0.04, 0.06)
LOW = P("shard", precision=fs.Precision(param=torch.bfloat16, reduce=torch.float32))
POLICIES = strategies("shard", "keep", "replicated", "remat", precision=LOW)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rank: int, i: int) -> Tensor:
    return torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * i + rank))


def scaled_step(model: nn.Module, spec: fs.PartitionSpec, update: Callable[..., Any]) -> Callable[..., Any]:
    """A step with everything that training has beside its gradient."""
    _, unscale = fs.loss_scale.dynamic(spec, growth_interval=2)

    def step(params: fs.Params, state: Any, scale: Any, x: Tensor, lr: float | Tensor) -> Any:
        def loss(params: fs.Params) -> Tensor:
            y = fs.functional_call(model, params, (x,), spec=spec).to(x.dtype)
            return scale.scale * F.mse_loss(y, x[:, :3])

        grads, value = fs.grad_and_value(loss)(params)
        grads, scale = unscale(grads, scale)
        grads, norm = fs.optim.clip_by_global_norm(grads, spec, 0.2)
        new, after = fs.loss_scale.select(scale.finite, update(grads, state, params, lr=lr), (params, state))
        return new, after, scale, value, norm

    return step


def close(got: object, expected: object, rtol: float = 1e-10) -> None:
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=(1e-3 if rtol <= 1e-10 else 1) * rtol, equal_nan=True)


CASES = [
    *((name, "aot_eager", kind, "shard") for name in OPTIMIZERS for kind in depth(["tensor"], ["float", "tensor"])),
    *(("adamw", "aot_eager", "tensor", policy) for policy in depth(["precision"], [*POLICIES])),
    pytest.param("adamw", "inductor", "tensor", "shard", marks=needs_cpp),
]


@seldom
@pytest.mark.parametrize(("name", "backend", "kind", "policy"), CASES)
@real_ranks(2)
def test_updates_compile_with_the_step(rank: int, name: str, backend: str, kind: str, policy: str) -> None:
    """One graph for steps with other rates, two with floats: equal to eager, in the memory of the given tensors.

    The second step has a gradient that is not finite.
    """
    if policy == "precision" and not _torch.FORWARD_CAN_BE_REPLACED:
        return  # torch 2.11: fs.compile refuses what is cast inside the model
    warnings.filterwarnings("ignore", IMPORT)
    torch._dynamo.reset()
    Counters.clear()
    rule, given = OPTIMIZERS[name]
    rtol = 1e-10 if policy != "precision" else 1e-5
    model = model_of().to(torch.float64 if policy != "precision" else torch.float32)
    dtype = model[0].weight.dtype
    spec = fs.by_type(nn.Linear, p=POLICIES[policy])(model).bound
    init, update = rule(0.1, spec=spec, options=lambda name, _: {"lr": 0.2} if name.endswith("bias") else {}, **given)
    params = fs.shard(model, spec)
    expected: Any = params, init(params), fs.loss_scale.dynamic(spec, scale=8.0)[0](params)
    got: Any = pytree.tree_map(torch.clone, expected)
    pointers = [leaf.data_ptr() for leaf in pytree.tree_leaves(got)]
    numbers = [values.numbers for values in got[1].values()]
    step = scaled_step(model, spec, update)
    compiled = fs.compile(step, donate_argnums=(0, 1, 2), backend=backend)
    for i, rate in enumerate(RATES[: 5 if kind == "float" else 3]):
        x = batch(rank, i).to(dtype) * (float("inf") if i == 1 else 1)
        *expected, value, norm = step(*expected, x, rate)
        *got, ours, our_norm = compiled(*got, x, rate if kind == "float" else torch.tensor(rate, dtype=torch.float64))
        close((got, ours, our_norm), (expected, value, norm), rtol)
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(got)] == pointers
    assert [values.numbers for values in got[1].values()] == numbers
    assert Counters["stats"]["unique_graphs"] == (2 if kind == "float" else 1)
    assert not Counters["graph_break"]


def hostile(dtype: torch.dtype, i: int) -> Tensor:
    """Gradients that are zero, tiny, large, and with i > 2 not finite."""
    grad = torch.tensor([0.0, 0.0, 1.0, -2.0, 1e-30, -1e-8, 1e8, 3.0], dtype=torch.float64).roll(i)
    grad[0] = 0.0
    return (grad if i < 3 else grad.where(grad != 3.0, torch.inf)).to(dtype)


@at_most(1)
@each
@pytest.mark.parametrize("name", mark_seldom(OPTIMIZERS, "adamw", "sgd"))
@every(dtype=[torch.float64, torch.float32, *depth([], [torch.bfloat16])], lr=[1.0, *depth([], [1e-3])])
def test_recorded_updates_equal_eager_ones(name: str, dtype: torch.dtype, lr: float) -> None:
    """Also with a rate of 0, where no gradient was; a first rate that is not the default; a scalar; units that have none."""
    rule, given = OPTIMIZERS[name]
    init, update = rule(lr, **given)
    params = {"w": torch.arange(8).to(dtype), "scalar": torch.tensor(1.5).to(dtype), "frozen": torch.arange(3)}
    expected: Any = params, init(params)
    step = lambda p, s, g, lr: update({"w": g, "scalar": g[2]}, s, p, lr=lr)  # noqa: E731
    compiled = fs.compile(step, backend="aot_eager", donate_argnums=(0, 1))
    for i, rate in enumerate((0.5 * lr, 0.0, lr, lr)):
        got = compiled(*pytree.tree_map(torch.clone, expected), hostile(dtype, i), rate)
        expected = step(*expected, hostile(dtype, i), rate)
        close(got, expected, 1e-10 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps)
        assert torch.equal(got[0]["frozen"], params["frozen"])
    assert Counters["stats"]["unique_graphs"] <= 3  # rates of 0 and 1 may be constants


@seldom
def test_rates_that_are_tensors_of_the_optimizer() -> None:
    """A default rate is read at each step, as in eager: torch's own advice for compiled optimizers."""
    rate, params = torch.tensor(0.1), {"w": torch.arange(1.0, 5.0)}
    init, update = fs.optim.adamw(rate)
    state = init(params)
    compiled = fs.compile(lambda p, s: update(p, s, p), backend="aot_eager")
    for value in (0.1, 0.5):
        rate.fill_(value)
        close(compiled(params, state), update(params, state, params))
    assert Counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", mark_seldom(OPTIMIZERS, "adamw"))
def test_numbers_of_updates_are_in_memory(name: str) -> None:
    """inductor computes what is not for each element again: two powers in Adam."""
    params = {"w": torch.arange(1.0, 5.0)}
    init, update = OPTIMIZERS[name][0](0.1, **OPTIMIZERS[name][1])
    nodes: list[Node] = []

    def note(graph: GraphModule, inputs: object) -> Callable[..., Any]:
        nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph

    fs.compile(lambda *args: update(*args[:3], lr=args[3]), backend=note)(params, init(params), params, 0.1)
    found = 0
    for node in (node for node in nodes if node.meta["val"].dim() and "copy" not in str(node.target)):
        for number in (arg for arg in node.all_input_nodes if not arg.meta["val"].dim()):
            found += 1
            assert number.op == "placeholder" or str(number.target).split(".")[1] in ("as_strided", "scalar_tensor"), node
    assert found


def test_updates_that_break_the_graph() -> None:
    """Where the graph must break, the error names the optimizer and says what to do; with a break the values are eager's."""
    params = {"w": torch.arange(1.0, 5.0)}
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    state = init(params)
    step = lambda p, s: update(p, s, p, lr=0.2)  # noqa: E731
    with pytest.raises(Refused, match=r"SGD's update cannot be part of a graph: torch's kernels write in place; .* optim\.sgd"):
        fs.compile(step, backend="aot_eager")(params, state)
    close(fs.compile(step, backend="aot_eager", fullgraph=False)(params, state), step(params, state))


MISTAKES: dict[str, Callable[..., Any]] = {
    "a gradient of no unit": lambda u, p, s: u({**p, "v": p["w"]}, s, p),
    "another shape": lambda u, p, s: u({"w": p["w"][:2]}, s, p),
    "a rate that is no number": lambda u, p, s: u(p, s, p, lr="a"),
}
"""Calls of an update that eager refuses."""


@pytest.mark.parametrize("name", MISTAKES)
def test_updates_refuse_what_eager_refuses(name: str) -> None:
    """With the same error: Dynamo's own would say "Observed exception"."""
    call, params = MISTAKES[name], {"w": torch.arange(1.0, 5.0)}
    init, update = fs.optim.adam(0.1)
    state = init(params)
    with pytest.raises((ValueError, TypeError)) as eager:
        call(update, params, state)
    with pytest.raises(type(eager.value)) as compiled:
        fs.compile(lambda p, s: call(update, p, s), backend="aot_eager")(params, state)
    assert type(compiled.value) is type(eager.value)
    assert str(compiled.value) == str(eager.value)
