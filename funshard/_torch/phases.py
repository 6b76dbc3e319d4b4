"""The phases of a step, such as one unit's gather: ranges in the traces of torch.profiler, and lines of the log at DEBUG."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from .tracing import is_profiling, is_tracing

LOGGER = logging.getLogger("funshard")
"""The log of the package: decisions and files at INFO, each phase at DEBUG. It has no handler of its own."""
LOGGER.addHandler(logging.NullHandler())

_NO_RANGE: AbstractContextManager[Any] = contextlib.nullcontext()


def phase(action: str, subject: str | None = None) -> AbstractContextManager[Any]:
    """Return a context whose block a profiler shows as ``funshard::action subject``, and whose start is logged at DEBUG.

    The subject is most often the key of a unit. Graphs that are compiled or recorded have no ranges, which would be operators.
    """
    if torch.compiler.is_compiling():
        return _NO_RANGE
    is_ranged = is_profiling() and not is_tracing()
    if not is_ranged and not LOGGER.isEnabledFor(logging.DEBUG):
        return _NO_RANGE
    label = action if subject is None else f"{action} {subject or repr(subject)}"
    LOGGER.debug("%s", label)
    return torch.profiler.record_function(f"funshard::{label}") if is_ranged else _NO_RANGE
