"""Batches of a data set that do not depend on the number of ranks."""

from .._gone import raise_gone
from ._sampler import sampler

__all__ = ["sampler"]

__getattr__ = raise_gone(__name__)
