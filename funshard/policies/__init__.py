"""Policies: pure functions from a module pytree to a partition spec."""

from .._core.policies import Policy, by_type, whole
from ._policies import always, any_of, by_group, by_path, by_size, custom, full_precision, ignoring, mark, marked, override

__all__ = [
    "Policy", "always", "any_of", "by_group", "by_path", "by_size", "by_type", "custom", "full_precision", "ignoring", "mark",
    "marked", "override", "whole",
]  # fmt: skip
