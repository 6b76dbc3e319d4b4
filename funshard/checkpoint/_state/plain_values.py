"""Plain values (numbers, strings, bytes, dtypes, None) as JSON."""

from __future__ import annotations

import base64
import contextlib
import reprlib
from typing import Any

import torch

from .._errors import DamagedError

__all__ = ["is_plain_value", "plain_from_json", "plain_to_json"]

PLAIN = (bool, int, float, str, type(None))
"""The classes whose values JSON holds as they are."""


def is_plain_value(value: object) -> bool:
    """Return whether `plain_to_json` takes a value."""
    return type(value) in PLAIN or isinstance(value, bytes | torch.dtype)


def plain_to_json(value: object, name: str) -> Any:
    """Return a plain value as JSON data. Raises TypeError, with its name in the state, for any other value."""
    if isinstance(value, PLAIN) and type(value) in PLAIN:
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(
        f"state '{name}': expected a tensor, a number, a string, bytes, None or a container of such, got "
        f"{type(value).__module__}.{type(value).__qualname__}; a checkpoint holds no pickles: save the parts of the object, by "
        "its state_dict(), list(...), dict(...), .item() or torch.from_numpy(...)"
    )


def plain_from_json(data: Any) -> Any:
    """Return the plain value of JSON data. Inverse of `plain_to_json`. Raises DamagedError for any other data."""
    if type(data) in PLAIN:
        return data
    if type(data) is dict and len(data) == 1:
        ((kind, text),) = data.items()
        if kind == "bytes" and type(text) is str:
            with contextlib.suppress(ValueError):
                return base64.b64decode(text, validate=True)
        if kind == "dtype" and type(text) is str and isinstance(found := getattr(torch, text, None), torch.dtype):
            return found
    raise DamagedError(f"expected a number, a string, null, bytes or a dtype of this torch, got {reprlib.repr(data)}")
