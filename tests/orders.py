"""Derivatives of a function of tensors, of every order and by every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import funshard as fs

Function = Callable[..., Any]
Tensors = tuple[Tensor, ...]


def cubes(f: Function) -> Function:
    return lambda *xs: (f(*xs) ** 3).sum()


def gradient(f: Function, xs: Tensors) -> Tensors:
    return grad(cubes(f), tuple(range(len(xs))))(*xs)


def along(xs: Tensors) -> Tensors:
    return tuple(x.cos() for x in xs)


def hvp(f: Function, xs: Tensors, **options: bool) -> Tensors:
    return fs.hvp(lambda p: cubes(f)(*p), xs, along(xs), **options)


def squares(xs: Tensors) -> Tensor:
    return torch.stack([(x**2).sum() for x in xs]).sum()


def thrice_by_autograd(f: Function, xs: Tensors) -> Tensors:
    leaves, out = [x.detach().clone().requires_grad_() for x in xs], []
    value = cubes(f)(*leaves)
    for _ in range(3):
        out += torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
        value = squares(tuple(out[-len(xs) :]))
    return tuple(t.detach() for t in out)


def by_a_kept_graph(f: Function, xs: Tensors) -> Any:
    """Twice, the first time with a graph that is kept."""
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    value = cubes(f)(*leaves)
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    return first, torch.autograd.grad(3 * value, leaves)


def batched(f: Function, xs: Tensors, dims: tuple[int | None, ...]) -> Any:
    """For some of the tensors and their sines at once."""
    both = [x if dim is None else torch.stack([x, x.sin()], dim) for x, dim in zip(xs, dims, strict=True)]
    return vmap(f, dims, randomness="same")(*both)


ORDERS: dict[str, Callable[[Function, Tensors], Any]] = {
    "value": lambda f, xs: f(*xs),
    "fs.grad": lambda f, xs: fs.grad(cubes(f), tuple(range(len(xs))))(*xs),
    "grad": gradient,
    "kept graph": by_a_kept_graph,
    "vjp": lambda f, xs: (lambda y, pull: pull(y.cos()))(*vjp(f, *xs)),
    "jvp": lambda f, xs: jvp(f, xs, along(xs)),
    "jvp of jvp": lambda f, xs: jvp(lambda *xs: jvp(f, xs, along(xs))[1], xs, along(xs)),
    "hvp": hvp,
    "hvp in reverse": lambda f, xs: hvp(f, xs, forward=False),
    "grad of grad": lambda f, xs: grad(lambda xs: squares(gradient(f, xs)))(xs),
    "grad of jvp": lambda f, xs: gradient(lambda *xs: jvp(f, xs, xs)[1], xs),
    "vjp of vjp": lambda f, xs: vjp(lambda *xs: (lambda y, pull: pull(y.cos()))(*vjp(f, *xs))[0], *xs)[1](xs[0].cos()),
    "third": lambda f, xs: grad(lambda xs: squares(hvp(f, xs)))(xs),
    "vmap of grad": lambda f, xs: batched(lambda *xs: gradient(f, xs), xs, (-1, *[None] * (len(xs) - 1))),
    "vmap over the last": lambda f, xs: batched(lambda *xs: gradient(f, xs), xs, (*[None] * (len(xs) - 1), 1)),
    "grad of vmap": lambda f, xs: gradient(lambda *xs: batched(cubes(f), xs, (*[None] * (len(xs) - 1), 1)).prod(), xs),
    "plain autograd": thrice_by_autograd,
}
FIRST_AND_SECOND = ["value", "fs.grad", "grad", "jvp", "hvp", "hvp in reverse", "third", "plain autograd"]


def whole_jacobians(f: Function, xs: Tensors) -> Any:
    return jacrev(f)(*xs), jacfwd(f)(*xs), hessian(cubes(f))(*xs)
