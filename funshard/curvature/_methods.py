"""What acts on an operator: lanczos and the spectral density by it, conjugate gradients and hutchinson."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.layout import Params
from .._slices.random_slices import random_like
from ..optim._norms import axpy, scale, vdot
from ._operator import Operator, find_largest, probe_seed, read_numbers

# --- lanczos, and the spectral density by stochastic Lanczos quadrature ---


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """The result of `lanczos`: a tridiagonal matrix, whose eigenvalues (Ritz values) approximate those of the operator."""

    diagonal: Tensor  # [steps], float64 on the CPU, the same on all ranks
    off_diagonal: Tensor  # [steps - 1]
    remainder: float  # its next element: 0 if the vectors span an invariant subspace, whose Ritz values are eigenvalues
    basis: Params | None  # the orthonormal vectors by unit key, [steps, this rank's slice]; None without reorthogonalisation

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        matrix = self.diagonal.diag() + self.off_diagonal.diag(1) + self.off_diagonal.diag(-1)
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    @property
    def values(self) -> Tensor:
        """The Ritz values, ascending: [steps]."""
        return self._eigh[0]

    @property
    def residuals(self) -> Tensor:
        """The length of A x - value * x for each Ritz pair, so that an eigenvalue is at most that far away: [steps]."""
        return self.remainder * self._eigh[1][-1].abs()

    @property
    def weights(self) -> Tensor:
        """The squared component of the start in each Ritz vector; they sum to 1: [steps]."""
        return self._eigh[1][0].square()

    def vector(self, i: int) -> Params:
        """Return this rank's slices of the Ritz vector of ``values[i]``, of length 1.

        Args:
            i: The number of the value.

        Raises:
            ValueError: The vectors were not kept.
        """
        if self.basis is None:
            raise ValueError("lanczos: the vectors were not kept: expected lanczos(..., reorthogonalize=True)")
        along = self._eigh[1][:, i]
        return {key: _combine_rows(rows, along.tolist()) for key, rows in self.basis.items()}


def lanczos(
    operator: Operator, start: Mapping[str, Tensor], steps: int, *, reorthogonalize: bool = True, tolerance: float = 0.0
) -> Tridiagonal:
    """Return the tridiagonal matrix of the Lanczos iteration: the operator in the Krylov space of ``start``.

    A step is a product and one small reduction over ranks. Each vector is orthogonalised twice against those before it, the
    second time, as its norm, one step late (Bielich et al., Low-synch Gram-Schmidt with delayed reorthogonalization for Krylov
    solvers, 2022). If the space is invariant, fewer steps are taken.

    Args:
        operator: The operator.
        start: A vector that is not zero, such as `random_like` or a gradient.
        steps: The most vectors, > 0.
        reorthogonalize: Against all vectors, which are kept: ``steps`` slices. Else against two, so that eigenvalues that have
            converged appear several times.
        tolerance: Stop when the Ritz pair of largest magnitude has a residual of at most ``tolerance * |value|``.

    Raises:
        ValueError: For a start that is zero or differs from the operator's params, and values that are not finite.
        RuntimeError: On simulated ranks, in transforms and in compilation.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> operator = fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec)
        >>> [round(x, 4) for x in fs.curvature.lanczos(operator, {"": torch.ones(2)}, 5).values.tolist()]
        [6.0, 12.0]
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"lanczos: steps: expected a whole number from 1 on, got {steps!r}")
    spec = operator.spec
    operator.check_vector(start)
    largest = find_largest("lanczos", start, spec)
    if not largest:
        raise ValueError("lanczos: expected a vector that is not zero")
    u = scale(1 / largest, start)  # squares of its elements are representable now
    u = scale(1 / math.sqrt(read_numbers("lanczos", [(u, u)], spec)[0]), u)
    unit = 0.0  # the largest element of the first product: squares of tiny and of huge ones are not representable
    basis = {key: x.new_empty((steps if reorthogonalize else 1, *x.shape)) for key, x in u.items()}
    epsilon = max(torch.finfo(x.dtype).eps for x in u.values())
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    remainder = -1.0
    for n in range(steps):
        w = operator @ u
        unit = unit or find_largest("lanczos", w, spec) or 1.0
        w = scale(1 / unit, w)
        count = n if reorthogonalize else min(n, 1)
        kept = [{key: rows[i] for key, rows in basis.items()} for i in range(count)]
        numbers = read_numbers("lanczos", [(q, x) for x in (u, w) for q in (*kept, u)], spec)
        (*off, uu), (*along, uw) = numbers[: count + 1], numbers[count + 1 :]
        square = uu - sum(x * x for x in off)
        length = math.sqrt(max(square, 0.0))
        if n:
            size = max(map(abs, (*diagonal, *off_diagonal)))
            if length <= 10 * epsilon * size:
                remainder = 0.0
                break
            remainder = length * unit
            if tolerance and _has_converged(diagonal, off_diagonal, length, tolerance):
                break
            off_diagonal.append(length)
        q = _subtract_rows(u, basis, off, 1 / length)
        alpha = (uw - sum(x * y for x, y in zip(off, along, strict=True))) / square
        diagonal.append(alpha)
        u = _subtract_rows(w, basis, along, 1 / length)
        for key, rows in basis.items():
            rows[n if reorthogonalize else 0] = q[key]
            u[key] = u[key] - alpha * q[key]
        remainder = -1.0
    if remainder < 0:
        remainder = math.sqrt(read_numbers("lanczos", [(u, u)], spec)[0]) * unit
    found = {key: rows[: len(diagonal)] for key, rows in basis.items()} if reorthogonalize else None
    return Tridiagonal(_as_tensor(diagonal) * unit, _as_tensor(off_diagonal) * unit, remainder, found)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The result of `slq`: an estimate of the spectral density by points and weights."""

    values: Tensor  # the points, [points], float64 on the CPU
    weights: Tensor  # their weights, which sum to 1
    numel: int  # the number of eigenvalues

    def density(self, at: Tensor, width: float) -> Tensor:
        """Return the density at some points, each eigenvalue a normal distribution: its integral is 1.

        Args:
            at: Where, [points].
            width: The standard deviation, > 0.
        """
        if not width > 0:
            raise ValueError(f"density: width: expected a positive number, got {width}")
        distance = (at.double()[:, None] - self.values) / width
        return (-0.5 * distance.square()).exp() @ self.weights / (width * math.sqrt(2 * math.pi))

    def trace(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Return an estimate of the trace of a function of the operator, such as ``torch.log``.

        Args:
            f: An elementwise function.
        """
        return self.numel * (f(self.values) * self.weights).sum()


def slq(operator: Operator, *, steps: int, probes: int, seed: int = 0, reorthogonalize: bool = True) -> Spectrum:
    """Return the spectral density by stochastic Lanczos quadrature: `lanczos` from random vectors of signs.

    Ubaru, Chen and Saad, Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature, 2017. The same at any number of ranks.

    Args:
        operator: The operator.
        steps: The steps of each Lanczos iteration.
        probes: The number of vectors; each takes ``steps`` products.
        seed: Their seed.
        reorthogonalize: As in `lanczos`.

    Raises:
        ValueError: As in `lanczos`, and for less than one probe.
        RuntimeError: As in `lanczos`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> operator = fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec)
        >>> round(fs.curvature.slq(operator, steps=2, probes=1).trace(lambda x: x).item(), 4)
        18.0
    """
    starts = _draw_signs("slq", operator, probes, seed)
    found = [lanczos(operator, start, steps, reorthogonalize=reorthogonalize) for start in starts]
    return Spectrum(torch.cat([t.values for t in found]), torch.cat([t.weights for t in found]) / probes, operator.numel)


def _has_converged(diagonal: Sequence[float], off_diagonal: Sequence[float], length: float, tolerance: float) -> bool:
    """Return whether the residual of the Ritz pair of largest magnitude is within the relative tolerance."""
    found = Tridiagonal(_as_tensor(diagonal), _as_tensor(off_diagonal), length, None)
    top = int(found.values.abs().argmax())
    return bool(found.residuals[top] <= tolerance * found.values[top].abs())


def _subtract_rows(v: Params, basis: Params, coefficients: Sequence[float], factor: float) -> Params:
    """Return ``factor * (v - sum of coefficients * rows)``."""
    rows = {key: _combine_rows(basis[key], coefficients) for key in v} if coefficients else {}
    return {key: (factor * (x - rows[key]) if rows else factor * x) for key, x in v.items()}


def _combine_rows(rows: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the linear combination of the first rows with these coefficients."""
    chosen = rows[: len(coefficients)]
    return torch.tensordot(torch.tensor(coefficients, dtype=rows.dtype, device=rows.device), chosen, 1)


def _as_tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor([*numbers], dtype=torch.float64)


# --- cg: linear systems in a symmetric positive operator, by conjugate gradients with one reduction a step ---


class Solution(NamedTuple):
    """The result of `cg`."""

    x: Params  # this rank's slices of the solution, or with negative curvature of the one before it
    residual: float  # the length of b - A x relative to b's, by a product with the x that is returned
    products: int  # how many there were
    converged: bool  # whether the residual is within the tolerance
    negative_curvature: bool  # whether a direction p had <p, A p> <= 0, up to rounding: the operator is not positive there


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


# --- The trace and the diagonal by random signs (Hutchinson) ---


class TraceEstimate(NamedTuple):
    """The result of `hutchinson`."""

    trace: Tensor  # a scalar
    standard_error: Tensor  # of the trace, from the differences between probes; NaN for one probe
    diagonal: Params  # this rank's slices of the diagonal


def hutchinson(operator: Operator, *, probes: int, seed: int = 0) -> TraceEstimate:
    """Return estimates of the trace and of the diagonal: means of <v, A v> and of v * A v over random signs v.

    Bekas, Kokiopoulou and Saad, An Estimator for the Diagonal of a Matrix, 2007. Both are exact for a diagonal operator. The
    same at any number of ranks; runs on simulated ones too.

    Args:
        operator: The operator.
        probes: The number of vectors, of one product each.
        seed: Their seed.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> estimate = fs.curvature.hutchinson(fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec), probes=2)
        >>> estimate.trace, estimate.diagonal
        (tensor(18.), {'': tensor([ 6., 12.])})
    """
    diagonal = {key: torch.zeros_like(x) for key, x in operator.params.items()}
    traces: list[Tensor] = []
    for v in _draw_signs("hutchinson", operator, probes, seed):
        av = operator @ v
        diagonal = axpy(1 / probes, {key: v[key] * x for key, x in av.items()}, diagonal)
        traces.append(vdot(v, av, operator.spec))
    each = torch.stack(traces)
    spread = (each - each.mean()).square().sum() / (probes - 1) if probes > 1 else each.mean() * math.nan
    return TraceEstimate(each.mean(), (spread / probes).sqrt(), diagonal)


def _draw_signs(function: str, operator: Operator, probes: int, seed: int) -> Iterator[Params]:
    if probes < 1:
        raise ValueError(f"{function}: probes: expected a whole number from 1 on, got {probes}")
    seeds = (probe_seed(seed, i) for i in range(probes))
    return (random_like(operator.params, operator.spec, s, distribution="rademacher") for s in seeds)
