"""Curvature of losses of sharded parameters: Hessian, Gauss-Newton and Fisher matrices as operators, and what acts on them."""

from .._gone import raise_gone
from .._transforms.products import cross_entropy
from ._methods import cg, hutchinson, lanczos, slq
from ._operator import Operator, fisher, ggn, hessian

__all__ = [
    "Operator", "cg", "cross_entropy", "fisher", "ggn", "hessian", "hutchinson", "lanczos", "slq",
]  # fmt: skip

__getattr__ = raise_gone(__name__)
