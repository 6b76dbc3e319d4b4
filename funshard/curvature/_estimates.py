"""power_iteration, and the trace and the diagonal by random signs (Hutchinson)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.layout import Params
from .._sharding.random_like import random_like
from ..optim._norms import vdot
from ..optim._trees import axpy, scale
from ._krylov import normalize
from ._operator import Operator, find_largest, probe_seed, read_numbers

__all__ = ["Eigenpair", "TraceEstimate", "hutchinson", "power_iteration"]


class Eigenpair(NamedTuple):
    """The result of `power_iteration`.

    Attributes:
        value: The Rayleigh quotient of the vector.
        vector: This rank's slices of the vector, of length 1.
        residual: The length of A v - value * v: an eigenvalue is at most that far from the value.
        products: How many there were.
    """

    value: float
    vector: Params
    residual: float
    products: int


def power_iteration(
    operator: Operator, start: Mapping[str, Tensor] | None = None, *, steps: int = 100, tolerance: float = 1e-3, seed: int = 0
) -> Eigenpair:
    """Return the eigenvalue of largest magnitude and its vector by power iteration, in the memory of two vectors.

    `lanczos` needs fewer products. If two eigenvalues differ in sign alone, it does not converge.

    Args:
        operator: The operator.
        start: The first vector; random by default.
        steps: The most products.
        tolerance: Stop when the residual is at most ``tolerance * |value|``; the value's own error is of its square. In float32
            a residual is known to about 3e-4.
        seed: The seed of the first vector.

    Raises:
        ValueError: As in `lanczos`.
        RuntimeError: As in `lanczos`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=1))(torch.nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]])}, spec)
        >>> operator = fs.curvature.hessian(lambda p: (p[""] ** 3).sum(), params, spec)
        >>> round(fs.curvature.power_iteration(operator).value, 3)
        12.0
    """
    if steps < 1:
        raise ValueError(f"power_iteration: steps: expected a whole number from 1 on, got {steps}")
    v = normalize("power_iteration", random_like(operator.params, operator.spec, seed) if start is None else start, operator)
    unit = 0.0
    for n in range(1, steps + 1):
        w = operator @ v
        unit = unit or find_largest("power_iteration", w, operator.spec) or 1.0
        w = scale(1 / unit, w)
        value, square, length = read_numbers("power_iteration", [(v, w), (w, w), (v, v)], operator.spec)
        value /= length
        residual = math.sqrt(max(square / length - value * value, 0.0))
        if residual <= tolerance * abs(value) or n == steps:
            return Eigenpair(value * unit, v, residual * unit, n)
        v = scale(1 / math.sqrt(square), w)
    raise AssertionError


class TraceEstimate(NamedTuple):
    """The result of `hutchinson`.

    Attributes:
        trace: A scalar.
        standard_error: Of the trace, from the differences between probes; NaN for one probe.
        diagonal: This rank's slices of the diagonal.
    """

    trace: Tensor
    standard_error: Tensor
    diagonal: Params


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
    if probes < 1:
        raise ValueError(f"hutchinson: probes: expected a whole number from 1 on, got {probes}")
    diagonal = {key: torch.zeros_like(x) for key, x in operator.params.items()}
    traces: list[Tensor] = []
    for i in range(probes):
        v = random_like(operator.params, operator.spec, probe_seed(seed, i), distribution="rademacher")
        av = operator @ v
        diagonal = axpy(1 / probes, {key: v[key] * x for key, x in av.items()}, diagonal)
        traces.append(vdot(v, av, operator.spec))
    each = torch.stack(traces)
    spread = (each - each.mean()).square().sum() / (probes - 1) if probes > 1 else each.mean() * math.nan
    return TraceEstimate(each.mean(), (spread / probes).sqrt(), diagonal)
