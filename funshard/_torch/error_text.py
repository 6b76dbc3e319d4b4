"""The message of any error."""

from __future__ import annotations

__all__ = ["error_text"]


def error_text(error: BaseException) -> str:
    """Return the message of an error, or that it has none if the ``__str__`` of a user's class raises."""
    try:
        return str(error)
    except Exception:
        return f"no message: __str__ of {type(error).__name__} raises"
