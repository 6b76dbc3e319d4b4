"""What is known of a kind of objects: how to see what is in one, and how to make another with other things in it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._batchnorm import MESH

__all__ = ["CALL_ATTRIBUTES", "PLAIN_TYPES", "Contents", "ObjectAdapter", "OpaqueState"]

Contents = list[tuple[list[Any], list[Any]]]
"""What is in an object: names and values, of its items, of its attributes and so on."""

CALL_ATTRIBUTES = ("_parameters", "_buffers", "forward", MESH)
"""The attributes of a module that functional_call puts there."""


class OpaqueState:
    """The state of a generator of random numbers, or the place of an iterator."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpaqueState):
            return False
        if isinstance(self.value, Tensor):
            return torch.equal(self.value, other.value)
        return bool(self.value == other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


PLAIN_TYPES = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.BuiltinFunctionType, types.ModuleType, OpaqueState}
)


@dataclass(frozen=True)
class ObjectAdapter:
    """How to look into objects of a class, and to make one."""

    read: Callable[[Any], Contents]
    like: Callable[[Any], Any]
    """What to make another one of."""
    blank: Callable[[Any], Any] | None
    """An empty one; None for what cannot change."""
    fill: Callable[[Any, Contents], Any]
    """Have this in it; or, of what cannot change, one that has it."""
