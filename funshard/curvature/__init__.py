"""Curvature of losses of sharded parameters: Hessian, Gauss-Newton and Fisher matrices as operators, and what acts on them."""

from .._transforms.products import ConvexLoss, cross_entropy, squared_error
from ._methods import Eigenpair, Solution, Spectrum, TraceEstimate, Tridiagonal, cg, hutchinson, lanczos, power_iteration, slq
from ._operator import Operator, fisher, ggn, hessian, sample_labels

__all__ = [
    "ConvexLoss", "Eigenpair", "Operator", "Solution", "Spectrum", "TraceEstimate", "Tridiagonal", "cg", "cross_entropy",
    "fisher", "ggn", "hessian", "hutchinson", "lanczos", "power_iteration", "sample_labels", "slq", "squared_error",
]  # fmt: skip
