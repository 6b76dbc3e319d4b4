"""Policies: pure functions from a module pytree to a partition spec."""

from ._exceptions import full_precision, ignoring
from ._policies import Policy, always, any_of, by_path, by_size, by_type, custom, mark, marked, override, whole

__all__ = [
    "Policy",
    "always",
    "any_of",
    "by_path",
    "by_size",
    "by_type",
    "custom",
    "full_precision",
    "ignoring",
    "mark",
    "marked",
    "override",
    "whole",
]
