"""ggnvp and fishervp: products J' H J v, where J is forward-mode AD, H the Hessian of a loss of few numbers, J' a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from ._recompute.ambient import AmbientState
from .convex_loss import ConvexLoss
from .error_hints import add_hints, find_hint, is_forward_rule_missing
from .grad import check_differentiable, check_recorded, is_differentiated_outside
from .hvp import hvp, match_vector, push_forward

__all__ = ["fishervp", "ggnvp"]

Product = Callable[[Any, Any], Any]
"""A function of outputs and of their tangents that returns the Hessian's product with the tangents."""

TOLERANCE = 1e-2
"""By how much of their largest element outputs may differ between two runs: rounding is far below, another function above."""


def ggnvp(outputs: Callable[[Any], Any], loss: Callable[[Any], Tensor], params: Any, v: Any) -> Any:
    """Return the product of the generalised Gauss-Newton matrix with ``v``: shards from shards.

    The matrix is the mean over ranks of J' H J: J is the Jacobian of a rank's outputs, H the Hessian of its loss at them. It is
    positive semi-definite for a convex loss (Schraudolph, Fast Curvature Matrix-Vector Products for Second-Order Gradient
    Descent, 2002). ``outputs`` runs twice, with the same random numbers: once forward, once for a gradient.

    Args:
        outputs: A function of params that returns this rank's outputs, such as logits: a tensor or a tree of tensors.
        loss: A convex function of the outputs alone, without reductions over ranks. With `curvature.cross_entropy` or
            `curvature.squared_error` its Hessian is in closed form; another function is differentiated by `hvp`.
        params: A tree of floating point tensors.
        v: A tree with the paths, shapes and dtypes of ``params``.

    Returns:
        A tree like ``params``.

    Raises:
        ValueError: ``v`` differs from ``params``; the message names the path.
        RuntimeError: The second run gives other outputs, as with a cache that the first one fills.

    Example:
        >>> import torch, funshard as fs
        >>> params, v = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 1.0])}
        >>> fs.ggnvp(lambda p: p["w"] ** 2, fs.curvature.squared_error(torch.zeros(2), reduce="sum"), params, v)
        {'w': tensor([ 8., 32.])}
    """

    def product(z: Any, u: Any) -> Any:
        if not isinstance(loss, ConvexLoss):
            return hvp(loss, z, u)
        if not isinstance(z, Tensor):
            raise TypeError(f"ggnvp: outputs: expected a tensor, as the loss takes, got {type(z).__name__}")
        return loss.hessian_product(z, u)

    return _gauss_newton("ggnvp", outputs, product, params, v)


def fishervp(losses: Callable[[Any], Tensor], params: Any, v: Any) -> Any:
    """Return the product of the Fisher matrix with ``v``: shards from shards.

    The matrix is the mean, over ranks and their samples, of g g', where g is the gradient of one sample's loss: the empirical
    Fisher matrix. With labels that the model itself draws (`curvature.sample_labels`) it estimates the true one.

    Args:
        losses: A function of params that returns the losses of this rank's samples: [samples]. It runs twice, as in `ggnvp`.
        params: A tree of floating point tensors.
        v: A tree with the paths, shapes and dtypes of ``params``.

    Returns:
        A tree like ``params``.

    Raises:
        ValueError: ``v`` differs from ``params``, or the losses are no vector.
        RuntimeError: As in `ggnvp`.

    Example:
        >>> import torch, funshard as fs
        >>> samples = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> fs.fishervp(lambda p: samples @ p["w"], {"w": torch.zeros(2)}, {"w": torch.ones(2)})
        {'w': tensor([0.5000, 2.0000])}
    """

    def product(z: Any, u: Any) -> Any:
        if not isinstance(z, Tensor) or z.dim() != 1 or not len(z):
            got = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"fishervp: losses: expected a loss for each sample, [samples], got {got}")
        return u / len(z)

    return _gauss_newton("fishervp", losses, product, params, v)


@_torch.disable_in_graph(
    "ggnvp and fishervp run their function twice with the same random numbers, which no graph can set back: expected no "
    "compilation of the product itself; compile the model, or its units by P(compile=True)"
)
def _gauss_newton(name: str, f: Callable[[Any], Any], product: Product, params: Any, v: Any) -> Any:
    """Return J' H J v by one forward-mode run of ``f``, the ``product`` H u, and one gradient, which runs ``f`` again."""
    check_differentiable(params)
    leaves, treedef = pytree.tree_flatten(params)
    vector = match_vector(name, params, v)
    is_plain = not is_differentiated_outside((params, v))
    if is_plain:
        check_recorded(name, params)
        leaves, vector = [x.detach() for x in leaves], [x.detach() for x in vector]
    params, direction = (pytree.tree_unflatten(x, treedef) for x in (leaves, vector))
    if not leaves:
        return params
    ambient, missing = AmbientState(leaves), ""

    def run(p: Any) -> Any:
        z = f(p)
        for path, leaf in pytree.tree_flatten_with_path(z)[0]:
            if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"{name}: outputs{pytree.keystr(path)}: expected a floating point tensor, got {got}")
        return z

    try:
        try:
            z, u = push_forward(run, params, direction)
        except RuntimeError as error:
            if not is_forward_rule_missing(error):
                raise
            missing = find_hint(error)
            with ambient.restored():
                z, u = _push_by_transposes(run, params, direction)
        if is_plain:
            z, u = pytree.tree_map(Tensor.detach, (z, u))
        u = _check_product(name, product(z, u), z)
        with ambient.restored():
            return pytree.tree_unflatten(_pull_back(name, run, params, z, u, is_plain=is_plain), treedef)
    except RuntimeError as error:
        raise add_hints(error, known=missing)  # noqa: B904 - the same one


def _push_by_transposes(f: Callable[[Any], Any], params: Any, direction: Any) -> tuple[Any, Any]:
    """Return outputs and tangents without forward mode: J is the transpose of the linear function c -> J' c."""
    results: tuple[Any, ...] = torch.func.vjp(f, params)
    z, pull = results
    zeros = pytree.tree_map(torch.zeros_like, z)
    return z, torch.func.vjp(lambda c: pull(c)[0], zeros)[1](direction)[0]


def _pull_back(name: str, f: Callable[[Any], Any], params: Any, z: Any, u: Any, *, is_plain: bool) -> list[Tensor]:
    """Return J' u by torch.func.vjp, or by plain autograd, which raises RuntimeError if ``f`` does not repeat its outputs."""
    if not is_plain:
        return pytree.tree_leaves(torch.func.vjp(f, params)[1](u)[0])
    leaves, treedef = pytree.tree_flatten(params)
    with torch.enable_grad():
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        again = pytree.tree_leaves(f(pytree.tree_unflatten(inputs, treedef)))
        _check_repeated(name, pytree.tree_leaves(z), again)
        del z
        roots = [(y, c) for y, c in zip(again, pytree.tree_leaves(u), strict=True) if y.requires_grad]
        if not roots:
            return [torch.zeros_like(x) for x in leaves]
        outputs, cotangents = zip(*roots, strict=True)
        grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, materialize_grads=True)
    return [g.detach() for g in grads]


def _check_product(name: str, u: Any, z: Any) -> Any:
    """Return the Hessian's product; raise ValueError if a shape or dtype differs from the outputs'."""
    leaves, others = pytree.tree_leaves(u), pytree.tree_leaves(z)
    for got, expected in zip(leaves, others, strict=True):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise ValueError(
                f"{name}: expected the Hessian's product to be like the outputs, {list(expected.shape)} {expected.dtype}, got "
                f"{list(got.shape)} {got.dtype}"
            )
    return u


def _check_repeated(name: str, first: list[Tensor], second: list[Tensor]) -> None:
    """Raise RuntimeError if the outputs of two runs differ in shape or, where the host reads values, by more than rounding."""
    same = [x.shape for x in first] == [x.shape for x in second]
    if same and not _torch.is_eager():
        return
    with torch.no_grad():
        for x, y in zip(first, second, strict=True) if same else ():
            if x.numel() and float(torch.dist(x, y, math.inf)) > TOLERANCE * float(torch.linalg.vector_norm(x, math.inf)):
                same = False
    if not same:
        raise RuntimeError(
            f"{name}: the function of params gives other outputs when it runs again with the same random numbers: expected one "
            "that changes nothing; give each run a cache of its own"
        )
