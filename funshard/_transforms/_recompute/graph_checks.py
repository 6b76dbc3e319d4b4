"""Checks of operands and results of a recomputed function that read their graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ... import _torch

__all__ = ["differentiates_operand", "find_parameter", "has_grad"]


def find_parameter(result: Tensor, objects: Iterable[object]) -> str:
    """Return a description of a module's parameter in the graph of a result; empty if none of these modules has one there."""
    leaves = {id(leaf) for node, _ in _torch.iter_nodes(result) if (leaf := getattr(node, "variable", None)) is not None}
    for module in objects:
        for name, parameter in module._parameters.items() if isinstance(module, nn.Module) else ():
            if id(parameter) in leaves:
                return f"parameter '{name}' of a {type(module).__name__}"
    return ""


def has_grad(x: Tensor) -> bool:
    """Return whether an operand has a ``grad``."""
    x = _torch.unwrap(x)
    return (x.is_leaf or x.retains_grad) and x.grad is not None


def differentiates_operand(result: Tensor, xs: Sequence[Tensor]) -> bool:
    """Return whether the graph of a result ends in a tensor that shares memory with an operand, none of which has a graph."""
    memory = {_torch.storage_id(_torch.unwrap(x)) for x in xs if _torch.is_strided(_torch.unwrap(x))}
    leaves = (getattr(node, "variable", None) for node, _ in _torch.iter_nodes(result))
    return any(leaf is not None and _torch.is_strided(leaf) and _torch.storage_id(leaf) in memory for leaf in leaves)
