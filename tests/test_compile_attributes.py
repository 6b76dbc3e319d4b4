"""What forward sets in its modules under torch.compile: as in eager calls, the modules have it until the call ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from depth import at_most, depth, each, mark_seldom, seldom
from ranks import Pool
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import funshard as fs
from funshard import _torch


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count, self.cache, self.gone = 0, None, 2.0
        self.register_buffer("decay", torch.ones(3))


class Counts(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class Caches(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.detach() if self.cache is None else self.cache + x.detach()
        return self.linear(x) + self.cache


class Deletes(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * getattr(self, "gone", 3.0)
        if hasattr(self, "gone"):
            del self.gone
        return y * getattr(self, "gone", 5.0)


class Registers(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", torch.full_like(x[0], 2.0))
        self.late = self.late * 1.5
        return self.linear(x) * self.late


class Rebinds(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.decay = self.decay * 0.5
        self.count += 1
        return self.linear(x) * self.decay * self.count


class Switches(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * (2.0 if self.training else 3.0)
        self.eval()
        return y * (5.0 if self.linear.training else 7.0)


MODULES = {cls.__name__: cls for cls in (Counts, Caches, Deletes, Registers, Rebinds, Switches)}
if not _torch.FORWARD_CAN_BE_REPLACED:  # before torch 2.13 Dynamo cannot ask for an attribute that the same trace has deleted
    del MODULES["Deletes"]
COMPILERS: dict[str, Callable[..., Any]] = {"fs.compile": fs.compile, "torch.compile": torch.compile}


def attributes(model: nn.Module) -> list[Any]:
    return [{name: str(value) for name, value in vars(m).items() if name != "_parameters"} for m in model.modules()]


def check(rank: int, which: str, compiler: str, derivative: str, p: Mapping[str, Any]) -> None:
    warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)
    torch.manual_seed(0)
    model = nn.Sequential(MODULES[which](), nn.Linear(3, 3), MODULES[which]()).double()
    spec = fs.by_type(Stateful, p=fs.P("shard", **p))(model).bound
    params = fs.shard(model, spec)

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
@pytest.mark.parametrize("derivative", mark_seldom(["grad", "hvp"], "grad"))
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("which", mark_seldom(MODULES, "Caches", "Counts"))
def test_attributes_that_forward_sets_are_restored(alone: Pool, which: str, compiler: str, derivative: str) -> None:
    """Counters, caches, deleted ones, new buffers, the training flag: equal to eager in every call."""
    alone.run(check, which, compiler, derivative, {})


@seldom
def test_on_two_ranks(gloo2: Pool) -> None:
    for which in depth(["Caches"], [*MODULES]):
        gloo2.run(check, which, "fs.compile", "grad", {"remat": True})


class Routes(Stateful):
    """As a mixture of experts has it, beside a cache of constants and a state where None was before."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.linear(x).softmax(-1)
        self.count, self.cache, self.positions = gates.square().sum(), gates[1:], torch.arange(3.0).cos()
        return x * gates * self.positions


def recorded(rank: int, compiler: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(0)
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
