"""hvp: the product of a Hessian with a vector, forward over reverse or reverse over reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .error_hints import add_hints, find_hint, is_forward_rule_missing
from .grad import check_differentiable, split_loss

__all__ = ["hvp", "match_vector", "push_forward"]


def hvp(f: Callable[..., Any], params: Any, v: Any, *args: Any, forward: bool | None = None, has_aux: bool = False) -> Any:
    """Return the product of the Hessian of ``f`` at ``params`` with ``v``: shards from shards.

    Each rank passes the loss of its own batch. The result is its slice of the product with the Hessian of the mean loss over
    ranks, exact in both forms. What ``f`` computes under ``torch.no_grad`` is a constant.

    Args:
        f: The loss, ``f(params, *args)``.
        params: A tree of floating point tensors.
        v: A tree with the paths, shapes and dtypes of ``params``.
        args: The other arguments of ``f``, such as a batch: constants.
        forward: True for ``jvp`` of ``grad``, False for ``grad`` of ``lambda p: <grad(f)(p), v>``. None tries the first, and
            runs ``f`` again for the second if torch has no forward-mode rule for an operator (``_grouped_mm`` in mixtures of
            experts, ``F.mse_loss``). Inside torch.compile None is True.
        has_aux: Whether ``f`` returns ``(loss, aux)``, where aux is a tree of tensors.

    Returns:
        A tree like ``params``, or ``(that tree, aux)``.

    Raises:
        ValueError: ``v`` differs from ``params``; the message names the path. `grad` raises others.
        RuntimeError: torch has no second derivative, as for fused attention outside of `transforms_attention`; a note names
            the module.

    Example:
        >>> import torch, funshard as fs
        >>> fs.hvp(lambda p: (p["w"] ** 3).sum(), {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 1.0])})
        {'w': tensor([ 6., 12.])}
    """
    check_differentiable(params)
    leaves, treedef = pytree.tree_flatten(params)
    direction = pytree.tree_unflatten(match_vector("hvp", params, v), treedef)

    def loss(p: Any) -> Any:
        value, aux = split_loss(f(p, *args), has_aux)
        return (value, aux) if has_aux else value

    if not leaves:
        return (direction, loss(params)[1]) if has_aux else direction
    first = torch.func.grad(loss, has_aux=has_aux)
    missing = ""
    if forward is not False:
        try:
            results = push_forward(first, params, direction, has_aux=has_aux)
            return results[1:] if has_aux else results[1]
        except RuntimeError as error:  # NotImplementedError is one
            if forward or torch.compiler.is_compiling() or not is_forward_rule_missing(error):
                raise add_hints(error)  # noqa: B904 - the same one
            missing = find_hint(error)

    def along(p: Any) -> Any:
        grads, aux = first(p) if has_aux else (first(p), None)
        return (_inner_product(grads, direction), aux) if has_aux else _inner_product(grads, direction)

    try:
        return torch.func.grad(along, has_aux=has_aux)(params)
    except RuntimeError as error:
        raise add_hints(error, known=missing)  # noqa: B904 - the same one


def push_forward(f: Callable[[Any], Any], params: Any, direction: Any, *, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the results of ``torch.func.jvp``; what ``f`` computes under ``torch.no_grad`` is a constant."""
    has_graph, is_traced = torch.is_grad_enabled(), torch.compiler.is_compiling()

    def run(p: Any) -> Any:
        mode = _torch.NoGradInTracedForwardMode() if is_traced else _torch.NoGradInForwardMode()
        with torch.enable_grad(), mode:  # gradients that are off in here, f has switched off
            return f(p)

    results: tuple[Any, ...] = torch.func.jvp(run, (params,), (direction,), has_aux=has_aux)
    return results if has_graph else pytree.tree_map_only(Tensor, Tensor.detach, results)


def match_vector(name: str, params: object, v: object) -> list[Tensor]:
    """Return the tensors of ``v`` in the order of those of ``params``; ValueError if they differ in shape or dtype."""
    expected = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(params)[0]}
    got = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(v)[0]}
    for path in (*expected, *got):
        if path not in expected or path not in got or not _is_like(got[path], expected[path]):
            texts = [_describe_leaf(tree[path]) if path in tree else "none" for tree in (expected, got)]
            raise ValueError(f"{name}: v{path}: expected {texts[0]} as in params, got {texts[1]}")
    return [got[path] for path in expected]


def _inner_product(a: Any, b: Any) -> Tensor:
    """Return the inner product of two trees, over the real numbers."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return torch.stack([(x.conj() * y).real.sum() if x.is_complex() else (x * y).sum() for x, y in pairs]).sum()


def _is_like(leaf: object, other: Tensor) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape == other.shape and leaf.dtype == other.dtype


def _describe_leaf(leaf: object) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
