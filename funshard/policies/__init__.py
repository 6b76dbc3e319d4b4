"""Policies: pure functions from a module pytree to a partition spec."""

from .._core.policies import Policy, by_type, whole
from .._gone import raise_gone
from ._policies import always, by_group, by_path, by_size, custom, full_precision, ignoring, override

__all__ = [
    "Policy", "always", "by_group", "by_path", "by_size", "by_type", "custom", "full_precision", "ignoring", "override",
    "whole",
]  # fmt: skip

__getattr__ = raise_gone(__name__)
