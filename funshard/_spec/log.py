"""The log's line of a spec."""

from __future__ import annotations

import logging

import torch

from .._core.spec import PartitionSpec
from .._torch.phases import LOGGER

__all__ = ["log_spec"]


def log_spec(spec: PartitionSpec) -> None:
    """Log a spec's summary at INFO, the first time that values are sharded by it."""
    if not torch.compiler.is_compiling() and LOGGER.isEnabledFor(logging.INFO):  # Dynamo traces no logging
        spec._compute_once(_log_spec)


def _log_spec(spec: PartitionSpec) -> bool:
    """Log a spec's summary and return True, which the spec caches."""
    LOGGER.info("sharded by %r", spec)
    return True
