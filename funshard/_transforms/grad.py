"""grad and grad_and_value, torch.func's in one plain autograd pass where nothing outside differentiates again; and hvp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .error_hints import add_hints, find_hint, is_forward_rule_missing

__all__ = ["check_differentiable", "grad", "grad_and_value", "hvp", "is_differentiated_outside", "split_loss"]


def grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns ``f``'s gradient: torch.func.grad's signature and result. See `grad_and_value`.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([2., 4.])}
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        grads, value = grad_and_value(f, argnums, has_aux)(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapper


def grad_and_value(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns ``(grads, value)``, or ``(grads, (value, aux))``: torch.func.grad_and_value's.

    Computed by one plain autograd pass where nothing outside can differentiate the result; torch.func would record it
    for a second derivative. Inside another torch.func transform, in torch.compile, in forward-mode AD, or where an
    argument itself requires grad, it *is* torch.func's. What ``f`` closes over counts as a constant: ``value``, ``aux``
    and ``grads`` come back without a graph.

    ``argnums`` says with respect to which arguments; their tensors must be floating point. What does not influence the
    loss has gradient zeros, never None.

    Raises TypeError for arguments or a loss of the wrong kind, ValueError for a loss that is not a scalar.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        ({'w': tensor([2., 4.])}, tensor(5.))
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        chosen = _arguments(args, argnums)
        leaves, treedef = pytree.tree_flatten(chosen)
        check_differentiable(chosen)
        if is_differentiated_outside((args, kwargs)):
            return torch.func.grad_and_value(f, argnums, has_aux)(*args, **kwargs)
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            fresh = _replaced(args, argnums, pytree.tree_unflatten(inputs, treedef))
            out = f(*fresh, **kwargs)
            loss, aux = split_loss(out, has_aux)
            if loss.requires_grad and inputs:
                try:
                    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
                except RuntimeError as error:
                    raise add_hints(error)  # noqa: B904 - the same one
            else:
                grads = [torch.zeros_like(x) for x in leaves]
        result = pytree.tree_unflatten([g.detach() for g in grads], treedef)
        value = loss.detach()
        return result, ((value, pytree.tree_map_only(Tensor, torch.Tensor.detach, aux)) if has_aux else value)

    return wrapper


def hvp(f: Callable[[Any], Tensor], params: Any, v: Any, *, forward: bool | None = None) -> Any:
    """The Hessian of the scalar ``f`` at ``params`` times ``v``: a tree like ``params``, shards from shards.

    With the loss of this rank's batch it is this rank's slice of the product with the Hessian of the mean loss over ranks.
    Close over the batch. Forward over reverse, ``jvp`` of ``grad``; or, with ``forward=False``, reverse over reverse: ``grad``
    of ``lambda p: <grad(f)(p), v>``. On shards that inner product is each rank's part of the whole one, and counts with its
    sum as all that is computed from shards does, so both are exact. Where ``forward`` is None the second one is taken if the
    first ends because torch has no forward-mode rule for an operator (``_grouped_mm`` of mixtures of experts): then ``f``
    runs again, and what it changed in place outside it changes again; inside torch.compile it is not taken. What ``f`` computes
    under ``torch.no_grad`` is a constant in both forms (torch's own forward mode does not know it), but not inside
    torch.compile.

    >>> import torch, funshard as fs
    >>> fs.hvp(lambda p: (p["w"] ** 3).sum(), {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 1.0])})
    {'w': tensor([ 6., 12.])}

    Raises ValueError, naming the path, where ``v`` has not the tensors of ``params``, by shape and dtype; and what `grad`
    raises. Of torch's attention kernels only the math one has a second derivative (``torch.nn.attention.sdpa_kernel``):
    torch's error about another one has a note with the module's path.
    """
    check_differentiable(params)
    leaves, treedef = pytree.tree_flatten(params)
    direction = pytree.tree_unflatten(_like(params, v), treedef)
    if not leaves:
        return direction
    first = torch.func.grad(lambda p: split_loss(f(p), has_aux=False)[0])
    missing = ""
    if forward is not False:
        try:
            return _forward_over_reverse(first, params, direction)
        except NotImplementedError as error:
            if forward or torch.compiler.is_compiling() or not is_forward_rule_missing(error):
                raise add_hints(error)  # noqa: B904 - the same one
            missing = find_hint(error)
    try:
        return torch.func.grad(lambda p: _inner(first(p), direction))(params)
    except RuntimeError as error:
        raise add_hints(error, known=missing)  # noqa: B904 - the same one


def _forward_over_reverse(first: Callable[[Any], Any], params: Any, direction: Any) -> Any:
    """``jvp`` of a gradient, in which ``torch.no_grad`` is what it is for the gradient."""
    if torch.compiler.is_compiling():
        return torch.func.jvp(first, (params,), (direction,))[1]
    wanted = torch.is_grad_enabled()

    def watched(p: Any) -> Any:
        with torch.enable_grad(), _torch.NoGradInForwardMode():  # what is off in here, f has switched off
            return first(p)

    out = torch.func.jvp(watched, (params,), (direction,))[1]
    return out if wanted else pytree.tree_map_only(Tensor, Tensor.detach, out)


def _inner(a: Any, b: Any) -> Tensor:
    """The inner product of two trees, over the real numbers."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return torch.stack([(x.conj() * y).real.sum() if x.is_complex() else (x * y).sum() for x, y in pairs]).sum()


def _like(params: object, v: object) -> list[Tensor]:
    """The tensors of ``v`` in the order of those of ``params``."""
    expected = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(params)[0]}
    got = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(v)[0]}
    for path in (*expected, *got):
        kinds = [_kind(tree[path]) if path in tree else "none" for tree in (expected, got)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"hvp: v{path}: expected {kinds[0]} as in params, got {kinds[1]}")
    return [got[path] for path in expected]


def _kind(leaf: object) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def is_differentiated_outside(arguments: object) -> bool:
    """Whether anything around can differentiate, batch or record what is computed from these arguments."""
    if torch.compiler.is_compiling() or _torch.current_level() or _torch.in_forward_ad():
        return True
    tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _arguments(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> Any:
    for i in (argnums,) if isinstance(argnums, int) else argnums:
        if not -len(args) <= i < len(args):
            raise ValueError(f"grad: argnums {argnums} but only {len(args)} positional arguments: expected 0..{len(args) - 1}")
    return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


def _replaced(args: tuple[Any, ...], argnums: int | tuple[int, ...], chosen: Any) -> tuple[Any, ...]:
    out = list(args)
    for i, value in [(argnums, chosen)] if isinstance(argnums, int) else zip(argnums, chosen, strict=True):
        out[i] = value
    return tuple(out)


def check_differentiable(chosen: object) -> None:
    """TypeError, naming its path, for what nothing can be differentiated with respect to."""
    if all(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in pytree.tree_leaves(chosen)):
        return
    for path, leaf in pytree.tree_flatten_with_path(chosen)[0]:
        where = pytree.keystr(path)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"grad: argument{where}: expected a tensor, got {type(leaf).__name__}")
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(
                f"grad: argument{where}: expected a floating point tensor, got {leaf.dtype}; "
                "set it apart with partition(params, spec, predicate)"
            )


def split_loss(out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """``(loss, aux)`` of what a loss function gave, None without aux; TypeError or ValueError for what is no loss."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(f"grad: expected f to return (loss, aux) with has_aux=True, got {type(out).__name__}")
    loss, aux = out if has_aux else (out, None)
    if not isinstance(loss, Tensor):
        raise TypeError(f"grad: expected f to return a tensor, got {type(loss).__name__}")  # pyright: ignore[reportUnknownArgumentType]
    if loss.dim():
        raise ValueError(f"grad: expected f to return a scalar (0-dim) tensor, got shape {list(loss.shape)}; reduce the loss")
    if not loss.is_floating_point():
        raise TypeError(f"grad: expected f to return a floating point loss, got {loss.dtype}")
    return loss, aux
