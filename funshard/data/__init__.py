"""Batches of a data set that do not depend on the number of ranks."""

from ._sampler import BatchSampler, sampler

__all__ = ["BatchSampler", "sampler"]
