"""The errors of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be read because it is damaged, cut short or of another format."""


class SavedError(CheckpointError):
    """An operation failed after the checkpoint was complete at its path."""


class NewerError(CheckpointError):
    """A checkpoint was written by a newer version of this library."""


class DamagedError(ValueError):
    """The error for bytes in a file that are not what was written. Callers raise a `CheckpointError` that names the file."""
