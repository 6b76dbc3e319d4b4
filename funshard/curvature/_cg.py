"""cg: linear systems in a symmetric positive operator, by conjugate gradients with one reduction a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .._units.layout import Params
from ..optim._trees import axpy, scale
from ._operator import Operator, find_largest, read_numbers

__all__ = ["Solution", "cg"]


class Solution(NamedTuple):
    """The result of `cg`.

    Attributes:
        x: This rank's slices of the solution.
        residual: The length of b - A x relative to b's, by a product with the x that is returned.
        products: How many there were.
        converged: Whether the residual is within the tolerance.
        negative_curvature: Whether a direction p had <p, A p> <= 0, up to rounding: the operator is not positive there, and x
            is the solution before it.
    """

    x: Params
    residual: float
    products: int
    converged: bool
    negative_curvature: bool


def cg(
    operator: Operator,
    b: Mapping[str, Tensor],
    *,
    damping: float = 0.0,
    start: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
    max_products: int = 1000,
) -> Solution:
    """Solve ``(operator + damping) @ x = b`` by conjugate gradients, in the memory of five vectors.

    A step is a product and one small reduction over ranks (Chronopoulos and Gear, s-Step Iterative Methods for Symmetric Linear
    Systems, 1989). Where the recursive residual is within the tolerance, a product checks it; if rounding has hidden the true
    one, the iteration begins again at x, as long as that helps.

    Args:
        operator: Positive definite with the damping; see `Solution` for one that is not.
        b: The right side.
        damping: A multiple of the identity to add, >= 0.
        start: The first x; zero by default.
        tolerance: Of the residual, relative to b's length.
        max_products: The most products.

    Returns:
        A `Solution`.

    Raises:
        ValueError: For values that are not finite, a negative damping, and b or start that differ from the operator's params.
        RuntimeError: As in `lanczos`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> operator = fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec)
        >>> fs.curvature.cg(operator, {"": torch.ones(2)}, damping=2.0).x
        {'': tensor([0.1250, 0.0714])}
    """
    if not 0 <= damping < math.inf:
        raise ValueError(f"cg: damping: expected a number from 0 on, got {damping}")
    operator.check_vector(b)
    damped = operator + damping
    largest = find_largest("cg", b, operator.spec)
    zeros = {key: torch.zeros_like(t) for key, t in b.items()}
    if not largest:
        return Solution(zeros, 0.0, 0, converged=True, negative_curvature=False)
    b = scale(1 / largest, b)  # squares of its elements are representable now
    epsilon = max(torch.finfo(t.dtype).eps for t in b.values())
    (bb,) = read_numbers("cg", [(b, b)], operator.spec)
    x, r, rr, products = zeros, b, bb, 0
    if start is not None:
        operator.check_vector(start)
        x = scale(1 / largest, start)
        r, products = axpy(-1.0, damped @ x, b), 1
        (rr,) = read_numbers("cg", [(r, r)], operator.spec)
    end = tolerance * tolerance * bb
    negative = False
    while rr > end and products + 1 < max_products and not negative:
        before = rr
        x, products, negative = _iterate(damped, x, r, end, products, max_products - 1, epsilon)
        r = axpy(-1.0, damped @ x, b)
        products += 1
        (rr,) = read_numbers("cg", [(r, r)], operator.spec)
        if rr > before / 4:
            break
    return Solution(scale(largest, x), math.sqrt(rr / bb), products, converged=rr <= end, negative_curvature=negative)


def _iterate(
    operator: Operator, x: Params, r: Params, end: float, products: int, most: int, epsilon: float
) -> tuple[Params, int, bool]:
    """Run conjugate gradients from a residual r; return x, the number of products, and whether curvature was negative."""
    p, s = r, r  # directions, and products with them
    alpha = rr_before = pp = top = 0.0
    while products < most:
        w = operator @ r
        products += 1
        rr, rw = read_numbers("cg", [(r, r), (r, w)], operator.spec)
        if rr <= end:
            break
        beta = rr / rr_before if rr_before else 0.0
        curvature = rw - beta * rr / alpha if beta else rw  # <p, A p> of the new direction
        pp = rr + beta * beta * pp
        top = max(top, abs(curvature) / pp)
        if curvature <= 10 * epsilon * top * pp:
            return x, products, True
        alpha, rr_before = rr / curvature, rr
        p, s = (axpy(beta, p, r), axpy(beta, s, w)) if beta else (r, w)
        x, r = axpy(alpha, p, x), axpy(-alpha, s, r)
    return x, products, False
