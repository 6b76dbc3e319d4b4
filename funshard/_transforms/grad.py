"""grad and grad_and_value as in torch.func, by one plain autograd pass if nothing outside differentiates again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .ambient import RUNNING
from .error_hints import add_hints


def grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of ``f``, as torch.func.grad does.

    Args:
        f: A function that returns a scalar loss, or ``(loss, aux)``.
        argnums: The arguments to differentiate with respect to; their tensors must be floating point.
        has_aux: Whether ``f`` returns ``(loss, aux)``.

    Returns:
        A function that returns the gradients, or ``(grads, aux)``. See `grad_and_value` for their graph and for errors.

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
    """Return a function that computes the gradient and the value of ``f``, as torch.func.grad_and_value does.

    It is one plain autograd pass if nothing outside can differentiate the result; torch.func would keep the graph for a
    second derivative. Inside another torch.func transform, in torch.compile, in forward-mode AD, or if an argument requires
    grad, it *is* torch.func's. What ``f`` closes over is a constant: the results have no graph.

    Args:
        f: A function that returns a scalar loss, or ``(loss, aux)``.
        argnums: The arguments to differentiate with respect to; their tensors must be floating point.
        has_aux: Whether ``f`` returns ``(loss, aux)``.

    Returns:
        A function that returns ``(grads, value)``, or ``(grads, (value, aux))``. Gradients have the tree of the arguments;
        where an argument does not influence the loss they are zeros, never None.

    Raises:
        TypeError: An argument or the loss is of the wrong type. Raised by the function, as the next ones.
        RuntimeError: In ``torch.inference_mode``, or for an argument made there.
        ValueError: The loss is not a scalar.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        ({'w': tensor([2., 4.])}, tensor(5.))
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else argnums
        if not all(-len(args) <= i < len(args) for i in positions):
            raise ValueError(f"grad: argnums {argnums} but only {len(args)} positional arguments: expected 0..{len(args) - 1}")
        chosen = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        leaves, treedef = pytree.tree_flatten(chosen)
        check_differentiable(chosen)
        if is_differentiated_outside((args, kwargs)):
            return torch.func.grad_and_value(f, argnums, has_aux)(*args, **kwargs)
        check_recorded("grad", chosen)
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            given, values = list(args), pytree.tree_unflatten(inputs, treedef)
            for i, value in zip(positions, (values,) if isinstance(argnums, int) else values, strict=True):
                given[i] = value
            loss, aux = run_loss(f, has_aux, *given, **kwargs)
            if loss.requires_grad and inputs:
                try:
                    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
                except RuntimeError as error:
                    raise add_hints(error)  # noqa: B904 - the same one
            else:
                grads = [torch.zeros_like(x) for x in leaves]
        result, value = pytree.tree_unflatten([g.detach() for g in grads], treedef), loss.detach()
        return result, ((value, pytree.tree_map_only(Tensor, torch.Tensor.detach, aux)) if has_aux else value)

    return wrapper


def value_and_grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the value and the gradient of ``f``, as jax.value_and_grad does.

    Args:
        f: As for `grad_and_value`.
        argnums: As there.
        has_aux: Whether ``f`` returns ``(loss, aux)``; the result is then ``((value, aux), grads)``.

    Example:
        >>> import torch, funshard as fs
        >>> fs.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """
    return lambda *args, **kwargs: grad_and_value(f, argnums, has_aux)(*args, **kwargs)[::-1]


def is_differentiated_outside(arguments: object) -> bool:
    """Return whether anything outside can differentiate, batch or trace what is computed from these arguments."""
    if _torch.is_in_graph() or _torch.current_level() or _torch.is_in_forward_ad() or RUNNING.is_differentiated:
        return True
    tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_differentiable(chosen: object) -> None:
    """Raise TypeError, with the path, for a leaf that is no floating point tensor."""
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


def check_recorded(who: str, chosen: object) -> None:
    """Raise RuntimeError if plain autograd records nothing: in inference mode, or, with the path, for tensors made there."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{who}: called in torch.inference_mode(), where autograd records nothing: expected the call outside of it, or in "
            "torch.no_grad()"
        )
    if any(leaf.is_inference() for leaf in pytree.tree_leaves(chosen)):
        path = next(path for path, leaf in pytree.tree_flatten_with_path(chosen)[0] if leaf.is_inference())
        raise RuntimeError(
            f"{who}: argument{pytree.keystr(path)} was made in torch.inference_mode(), and autograd does not follow it: "
            "expected shards made outside of it, or the .clone() of each"
        )


def run_loss(f: Callable[..., Any], has_aux: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call a loss function that plain autograd differentiates, with `RUNNING` told, and return ``(loss, aux)``."""
    if _torch.is_in_graph():
        return split_loss(f(*args, **kwargs), has_aux)
    with RUNNING.set(is_in_gradient=True):
        return split_loss(f(*args, **kwargs), has_aux)


def split_loss(out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """Return ``(loss, aux)`` of the result of a loss function, aux None without it; TypeError or ValueError if it is none."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(f"grad: expected f to return (loss, aux) with has_aux=True, got {type(out).__name__}")
    loss, aux = out if has_aux else (out, None)
    if not isinstance(loss, Tensor):
        hint = "; return its .loss" if hasattr(loss, "loss") else ""
        if loss is None:
            hint = "; is there a return, and, for a .loss of transformers, labels= in the call?"
        raise TypeError(f"grad: expected f to return a tensor, got {type(loss).__name__}{hint}")
    if loss.dim():
        raise ValueError(f"grad: expected f to return a scalar (0-dim) tensor, got shape {list(loss.shape)}; reduce the loss")
    if not loss.is_floating_point():
        raise TypeError(f"grad: expected f to return a floating point loss, got {loss.dtype}")
    return loss, aux
