"""Torch's own files on the stack of a thread."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["TORCH_FOLDER", "is_compiler_file"]

TORCH_FOLDER = f"{Path(torch.__file__).parent}/"
"""The folder of torch's Python files, with a slash at the end."""
_COMPILER_FILES = (f"{TORCH_FOLDER}_dynamo/convert_frame.py", f"{TORCH_FOLDER}_inductor/compile_fx.py")


def is_compiler_file(name: str) -> bool:
    """Return whether a file is on the stack while torch compiles, and not while compiled code runs.

    Pinned by ``test_compiler_files_are_on_the_stack``.
    """
    return name.startswith(_COMPILER_FILES)
