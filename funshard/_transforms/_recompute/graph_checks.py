"""Checks of what a recomputed function reaches, and of the graph of its operands and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ... import _torch

__all__ = [
    "check_backward_hooks",
    "check_not_read",
    "describe_parameter",
    "differentiates_operand",
    "find_parameter",
    "has_grad",
]


def check_backward_hooks(objects: Iterable[object], name: str) -> None:
    """Raise RuntimeError for a module's backward hook: torch drops it inside forward mode, and another run would not."""
    for module in objects:
        hooks = (module._backward_pre_hooks, module._backward_hooks) if isinstance(module, nn.Module) else ()
        for hook in (hook for some in hooks for hook in some.values()):
            hook_name = getattr(hook, "__qualname__", type(hook).__name__)
            raise RuntimeError(
                f"{name} reaches a {type(module).__name__} with the backward hook {hook_name}, which in a stack of transforms "
                "torch calls for one of them or for none: expected an autograd.Function that changes the gradient, or the hook "
                "removed"
            )


def find_parameter(result: Tensor, objects: Iterable[object]) -> str:
    """Return a description of a module's parameter in the graph of a result; empty if none of these modules has one there."""
    nodes = [node for node, _ in _torch.iter_nodes(result)]
    return describe_parameter(
        {id(x) for node in nodes for x in (node, getattr(node, "variable", None)) if x is not None}, objects
    )


def describe_parameter(ids: set[int], objects: Iterable[object]) -> str:
    """Return a description of the first parameter of these modules that has, or whose node has, one of these ids."""
    for module in objects:
        for name, parameter in module._parameters.items() if isinstance(module, nn.Module) else ():
            if parameter is not None and (id(parameter) in ids or id(parameter.grad_fn) in ids):
                return f"parameter '{name}' of a {type(module).__name__}"
    return ""


def check_not_read(name: str, parameter: str) -> None:
    """Raise RuntimeError if the function of this name reads a parameter, of which this is a description."""
    if parameter:
        raise RuntimeError(
            f"{name} reads {parameter}, which is not one of its arguments and would have no gradient: expected "
            "fs.remat(lambda p, x: torch.func.functional_call(module, p, x)), or P(remat=True) of a unit"
        )


def has_grad(x: Tensor) -> bool:
    """Return whether an operand has a ``grad``."""
    x = _torch.unwrap(x)
    return (x.is_leaf or x.retains_grad) and x.grad is not None


def differentiates_operand(result: Tensor, xs: Sequence[Tensor]) -> bool:
    """Return whether the graph of a result ends in a tensor that shares memory with an operand, none of which has a graph."""
    memory = {_torch.storage_id(_torch.unwrap(x)) for x in xs if _torch.is_strided(_torch.unwrap(x))}
    leaves = (getattr(node, "variable", None) for node, _ in _torch.iter_nodes(result))
    return any(leaf is not None and _torch.is_strided(leaf) and _torch.storage_id(leaf) in memory for leaf in leaves)
