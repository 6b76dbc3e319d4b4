"""A compiled function as one node in the graph of a torch.func.grad, in which torch runs no compiled code.

The function runs outside of the transform, by plain autograd, on detached tensors. The node keeps that graph, and its backward
goes back through it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch

__all__ = ["TRANSPARENT", "CompiledNode", "GivenParameter"]

GivenParameter = tuple[dict[str, Any], str, Tensor]
"""A module's dict of parameters, a name in it, and the tensor there."""

TRANSPARENT = (
    int, float, complex, str, bytes, type(None), enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of leaves in which no tensor can be."""


class CompiledNode:
    """One run of ``compiled(args, kwargs)`` outside of the torch.func.grad around it, and the graph of that run.

    Args:
        path: The module's path, for messages.
        compiled: The compiled function.
        parameters: The parameters that it finds in modules.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        path: str,
        compiled: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        parameters: Sequence[GivenParameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.path, self._compiled, self._parameters = path, compiled, parameters
        self._leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._positions = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.tensors = [*(self._leaves[i] for i in self._positions), *(x for _, _, x in parameters)]
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._shared: list[tuple[Tensor, int]] = []  # outputs that share memory, and their versions
        self.result: list[Any] = []
        self.result_tree: pytree.TreeSpec | None = None

    def apply(self) -> Any:
        """Run the function, and return its result as that of a node in the transform's graph."""
        outputs = iter(_Below.apply(self, *self.tensors))
        leaves = [next(outputs) if isinstance(x, Tensor) else x for x in self.result]
        assert self.result_tree is not None
        return pytree.tree_unflatten(leaves, self.result_tree)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function on tensors of plain autograd. Return the tensors of its result, without a graph."""
        with _torch.below_transforms(), torch.enable_grad():
            self.inputs = [_torch.unwrap_level(x).detach().requires_grad_(x.requires_grad) for x in tensors]
            leaves = self._leaves.copy()
            for i, x in zip(self._positions, self.inputs, strict=False):
                leaves[i] = x
            views = self.inputs[len(self._positions) :]
            for (plain, name, _), view in zip(self._parameters, views, strict=True):
                plain[name] = view
            args, kwargs = pytree.tree_unflatten(leaves, self._tree)
            self.result, self.result_tree = pytree.tree_flatten(self._compiled(args, kwargs))
            after, tree = pytree.tree_flatten((args, kwargs))
            if tree != self._tree or any(x is not y for x, y in zip(after, leaves, strict=True)):
                raise RuntimeError(
                    f"module '{self.path}' with P(compile=True) changes a list or dict that it was given inside of a "
                    "torch.func.grad: expected it left alone and the new values returned, no compile, or fs.grad"
                )
            for (plain, name, _), view in zip(self._parameters, views, strict=True):
                if plain.get(name) is not view:
                    raise RuntimeError(
                        f"module '{self.path}' with P(compile=True) sets its parameter '{name}' in forward inside of a "
                        "torch.func.grad: expected it left alone, no compile, or fs.grad"
                    )
            if opaque := [x for x in self.result if not isinstance(x, (Tensor, *TRANSPARENT))]:
                raise RuntimeError(
                    f"module '{self.path}' with P(compile=True) returns a {type(opaque[0]).__name__} inside of a "
                    "torch.func.grad, which may hold tensors without their derivatives: expected tensors in tuples, lists, "
                    "dicts or registered pytrees, no compile, or fs.grad"
                )
            self.outputs = [x for x in self.result if isinstance(x, Tensor)]
            uses = Counter(_torch.storage_id(x) for x in (*self.outputs, *self.inputs))
            self._shared = [(x, _torch.version(x)) for x in self.outputs if uses[_torch.storage_id(x)] > 1]
            return [x.detach() for x in self.outputs]

    def pull_back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs, None for those without."""
        if any(_torch.version(x) != version for x, version in self._shared):
            raise RuntimeError(
                f"module '{self.path}' with P(compile=True) returned tensors that share memory with each other or with its "
                "arguments, and one of them was changed in place inside of a torch.func.grad, which the others' derivatives "
                "miss: expected a clone, no compile, or fs.grad"
            )
        pairs = [(x, g) for x, g in zip(self.outputs, grads, strict=True) if g is not None and x.requires_grad]
        wanted = [x for x in self.inputs if x.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outputs, given = zip(*pairs, strict=True)
            with _torch.keep_saved_tensors():
                found = [*torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)]
        left = iter(found)
        return [next(left) if x.requires_grad else None for x in self.inputs]


class _Below(_torch.LevelFunction):
    """A run of a compiled function as one node in the graph of a torch.func.grad."""

    @staticmethod
    def forward(below: CompiledNode, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        level = _torch.current_level()
        return tuple(_torch.wrap_at_level(x, level) for x in below.run(tensors))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.below = inputs[0]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.mark_non_differentiable(*(out for out, x in zip(output, inputs[0].outputs, strict=True) if not x.requires_grad))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        below, level = ctx.below, _torch.current_level()
        if any(g is not None and _torch.is_batched(g) for g in grads):
            raise RuntimeError(
                f"module '{below.path}' with P(compile=True): a vmap takes its gradient, as torch.func.jacrev does, where "
                "compiled code does not run: expected no compile for this unit"
            )
        is_last = _torch.is_last_backward(level)
        if level and torch.is_grad_enabled() and not is_last:
            raise RuntimeError(
                f"module '{below.path}' with P(compile=True): a gradient with create_graph=True inside of a torch.func.grad "
                "differentiates compiled code twice, which torch cannot: expected no compile for this unit"
            )
        with _torch.below_transforms():
            found = below.pull_back([None if g is None else _torch.unwrap_level(g) for g in grads])
        if is_last:
            ctx.below = None  # and the graph
        return None, *(None if g is None else _torch.wrap_at_level(g, level) for g in found)
