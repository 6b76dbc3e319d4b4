"""Warnings that users get once, whatever the filters of warnings."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["is_first_warning", "was_warned"]

_WARNED: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
"""The kinds of warnings that users have got, by model or class."""


def was_warned(subject: Any, kind: Hashable) -> bool:
    """Return whether users have got a warning of this kind about a model or a class."""
    return kind in _WARNED.get(subject, ())


def is_first_warning(subject: Any, kind: Hashable) -> bool:
    """Return whether users have not got a warning of this kind yet about a model or a class, and note that they get it."""
    is_first = not was_warned(subject, kind)
    _WARNED.setdefault(subject, set()).add(kind)
    return is_first
