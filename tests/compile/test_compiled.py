"""Law G10: torch.compile(fullgraph=True) and make_fx of the transforms over functional_call equal eager, on real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from depth import at_most, depth, each, every, mark_seldom, seldom
from models import Block, module_class
from parity import HIGHER, WAYS, loss_of, same_leaves, shards_of
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import funshard as fs
from funshard import _torch


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = depth(lambda: (Block(3), nn.Linear(3, 2)), lambda: (nn.Linear(3, 5), Block(5), Block(5), nn.Linear(5, 2)))()
    return nn.Sequential(*layers).double()


MODEL = model()
DERIVATIVES = {"grad": torch.func.grad, **WAYS, **HIGHER}
TRANSFORMS = ["grad", "torch.func", "fs", "grad of grad", "jvp of grad", "vmap of grad"]


def step(transform: str, spec: fs.PartitionSpec) -> Callable[[fs.Params, Tensor], Any]:
    if transform == "vmap of grad":
        return torch.vmap(torch.func.grad(lambda params, x: loss_of(MODEL, spec, x)(params)), (None, 0))
    return lambda params, x: DERIVATIVES[transform](loss_of(MODEL, spec, x))(params)


def specs() -> dict[str, fs.PartitionSpec]:
    return {
        "blocks": fs.by_type(Block)(MODEL).bound,
        "kept": fs.by_type(Block, p=fs.P("shard", reshard=False))(MODEL).bound,
        "replicated": fs.policies.whole(fs.P())(MODEL).bound,
        "kept in a replicated one": fs.by_path({"": fs.P(), "0": fs.P("shard", reshard=False)})(MODEL).bound,
    }


@pytest.mark.parametrize(
    ("transform", "which"),
    [
        *(pytest.param(name, "blocks", marks=[seldom] * (name != "grad of grad")) for name in TRANSFORMS),
        *depth([("fs", "kept in a replicated one")], [("fs", w) for w in ("kept", "replicated")]),
    ],
)
@real_ranks(2)
def test_compiled_equals_eager(rank: int, transform: str, which: str) -> None:
    """One graph per step, values and gradients as without the compiler; for ZeRO-2 and for DDP as well."""
    spec = specs()[which]
    params, x = fs.shard(MODEL, spec), torch.randn(2, 4, 3, dtype=torch.float64)[rank]
    if transform == "vmap of grad":
        x = x[:, None]
    f = step(transform, spec)
    torch._dynamo.reset()
    same_leaves(torch.compile(f, fullgraph=True, backend="aot_eager")(params, x), f(params, x), rtol=1e-12, atol=1e-12)


LOW = fs.Precision(param=torch.bfloat16, reduce=torch.float32, buffer=torch.bfloat16)
SHARD, REPLICATED = fs.P("shard", precision=LOW), fs.P(precision=LOW)


Cast = module_class(
    "Cast",
    lambda: {
        "first": nn.Linear(3, 4),
        "norm": nn.LayerNorm(4),
        "last": nn.Linear(4, 2),
        "scale": nn.Buffer(torch.tensor([1.001, 0.5, 2.0, 3.0])),
    },
    lambda self, x: self.last(self.norm(self.first(x) * self.scale) + torch.ones(4)),  # of float32: the last layer casts
)
"""Modules with a precision of their own inside of one with another, a tensor made on the way, and a buffer."""

inside = pytest.mark.skipif(not _torch.FORWARD_CAN_BE_REPLACED, reason="torch 2.13: Dynamo and a forward in __dict__")


@pytest.mark.parametrize(
    ("p", "last"),
    [
        *(
            pytest.param(p, last, marks=inside)
            for p, last in depth([(SHARD, REPLICATED)], [(SHARD, SHARD), (REPLICATED, REPLICATED)])
        ),
        pytest.param(fs.P("shard", precision=fs.Precision(reduce=torch.bfloat16)), None, marks=seldom),
    ],
)
@real_ranks(2)
def test_casts_inside_of_a_compiled_call(rank: int, p: fs.P, last: fs.P | None) -> None:
    """The same casts around modules, of buffers, gathers and reductions, bit for bit; the model is as it was.

    A precision of the whole model on every torch.
    """
    model, x = Cast(), torch.randn(2, 5, 3)[rank]
    spec = fs.policies.whole(p)(model).bound
    if last:
        units = fs.policies.override(fs.policies.whole(p), fs.by_path({"first": p, "last": last}))
        spec = fs.policies.full_precision(units, torch.nn.LayerNorm)(model).bound
    params = fs.shard(model, spec)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = fs.functional_call(model, params, (x,), spec=spec)
        assert y.dtype == torch.bfloat16 or p.precision is None or p.precision.param is None
        return y.float().square().mean()

    for gradient in depth([fs.grad if p.axes else torch.func.grad], [fs.grad, torch.func.grad]):
        torch._dynamo.reset()
        expected = gradient(loss)(params, x)
        before = {path: dict(vars(module)) for path, module in model.named_modules()}
        compiled = torch.compile(gradient(loss), fullgraph=True, backend="aot_eager")
        same_leaves(compiled(params, x), expected, rtol=0, atol=0)
        assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


@pytest.mark.skipif(_torch.FORWARD_CAN_BE_REPLACED, reason="before torch 2.13")
def test_casts_inside_of_a_compiled_call_are_refused() -> None:
    """By name, where Dynamo cannot see them."""
    model = Cast()
    spec = fs.by_type(torch.nn.Linear, p=fs.P("shard", precision=LOW))(model)
    call = torch.compile(lambda p, x: fs.functional_call(model, p, (x,), spec=spec), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"unit 'first' has a Precision: inside torch\.compile"):
        call(fs.shard(model, spec), torch.randn(5, 3))


# --- what forward sets in its modules: as in eager calls, the modules have it until the call ends ---
class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count, self.cache, self.gone = 0, None, 2.0


def counts(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.linear(x) * self.count


def caches(self: Any, x: Tensor) -> Tensor:
    self.cache = x.detach() if self.cache is None else self.cache + x.detach()
    return self.linear(x) + self.cache


def deletes(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x) * getattr(self, "gone", 3.0)
    if hasattr(self, "gone"):
        del self.gone
    return y * getattr(self, "gone", 5.0)


def registers(self: Any, x: Tensor) -> Tensor:
    if "late" not in self._buffers:
        self.register_buffer("late", torch.full_like(x[0], 2.0))
    self.late = self.late * 1.5
    return self.linear(x) * self.late


def switches(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x) * (2.0 if self.training else 3.0)
    self.eval()
    return y * (5.0 if self.linear.training else 7.0)


def stateful(forward: Callable[..., Any]) -> type[nn.Module]:
    return type(forward.__name__, (Stateful,), {"forward": forward})


MODULES = {f.__name__: stateful(f) for f in (counts, caches, deletes, registers, switches)}
if not _torch.FORWARD_CAN_BE_REPLACED:  # before torch 2.13 Dynamo cannot ask for an attribute that the same trace has deleted
    del MODULES["deletes"]
COMPILERS: dict[str, Callable[..., Any]] = {"fs.compile": fs.compile, "torch.compile": torch.compile}


def attributes(model: nn.Module) -> list[Any]:
    return [{name: str(value) for name, value in vars(m).items() if name != "_parameters"} for m in model.modules()]


def check(rank: int, which: str, compiler: str, derivative: str) -> None:
    warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)
    model = nn.Sequential(MODULES[which](), nn.Linear(3, 3), MODULES[which]()).double()
    spec, params = shards_of(fs.by_type(Stateful, p=fs.P("shard", remat=dist.get_world_size() > 1)), model)

    def step(params: fs.Params, x: Tensor) -> Any:
        model.steps = getattr(model, "steps", 0) + 1  # outside of the call, where it stays

        def loss(params: fs.Params) -> Tensor:
            outs = [fs.functional_call(model, params, (x * k,), spec=spec).sin() for k in (1, 2)]
            return model.steps * outs[0].sum() * outs[1].sum()

        if derivative == "hvp":
            return fs.hvp(loss, params, tree_map(torch.ones_like, params))
        return fs.grad_and_value(loss)(params)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = attributes(model)
    compiled = COMPILERS[compiler](step, backend="aot_eager", fullgraph=True)
    results: list[list[Any]] = []
    for function in (compiled, step):
        model.__dict__.pop("steps", None)
        results.append([])
        for seed in range(3):
            x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + seed))
            results[-1].append(tree_map(torch.clone, function(params, x)))
        assert model.__dict__.pop("steps") == 3
        assert attributes(model) == before
    torch.testing.assert_close(*results)


@at_most(1)
@each
@pytest.mark.parametrize("ranks", mark_seldom(["alone", "gloo2"], "alone"))
@every(derivative=mark_seldom(["grad", "hvp"], "grad"), compiler=COMPILERS, which=mark_seldom(MODULES, "caches", "counts"))
def test_attributes_that_forward_sets_are_restored(
    request: pytest.FixtureRequest, which: str, compiler: str, derivative: str, ranks: str
) -> None:
    """Counters, caches, deleted ones, new buffers, the training flag: equal to eager in every call; on two ranks with remat."""
    request.getfixturevalue(ranks).run(check, which, compiler, derivative)


class Routes(Stateful):
    """As a mixture of experts has it, beside a cache of constants and a state where None was before."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.linear(x).softmax(-1)
        self.count, self.cache, self.positions = gates.square().sum(), gates[1:], torch.arange(3.0).cos()
        return x * gates * self.positions


def recorded(rank: int, compiler: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    normed = nn.utils.weight_norm(nn.Linear(3, 3))  # its hook computes a weight with a graph in each forward
    model, x = nn.Sequential(Routes(), normed), torch.randn(2, 3)
    spec = fs.policies.whole()(model)
    step = fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum() + model[0].count)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="leaves a tensor with a graph in attribute 'count' of a Routes, and the call puts"):
        COMPILERS[compiler](step, backend="aot_eager", fullgraph=True)(fs.shard(model, spec))
    torch._dynamo.reset()
    model[0].forward = lambda x: x * 2
    COMPILERS[compiler](step, backend="aot_eager", fullgraph=True)(fs.shard(model, spec))


@seldom
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_tensor_with_a_graph_in_an_attribute_is_an_error(alone: Pool, compiler: str) -> None:
    """It would be read later without its gradient, as in eager calls."""
    alone.run(recorded, compiler)
