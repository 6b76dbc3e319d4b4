"""The line of user code that a thread runs: the innermost one outside of torch, funshard and Python's own library."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from ..._torch import TORCH_FOLDER, is_compiler_file

__all__ = ["UserLine", "describe_line", "describe_main_thread", "find_error_line", "find_user_line"]

_LIBRARIES = (TORCH_FOLDER, f"{Path(__file__).parents[2]}/", "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"
_SITE_PACKAGES = ("/site-packages/", "/dist-packages/")


class UserLine(NamedTuple):
    """A line of user code. Code objects themselves are no keys of caches: Dynamo makes some that have no hash."""

    file: str
    number: int
    function: str


def _line_of(code: CodeType, number: int) -> UserLine:
    return UserLine(code.co_filename, number, getattr(code, "co_qualname", code.co_name))


@functools.lru_cache(maxsize=4096)
def _is_user_file(name: str) -> bool:
    """Return whether a file is neither of the libraries here nor of Python."""
    if name.startswith(_LIBRARIES):
        return False
    return not name.startswith(_STANDARD_LIBRARY) or any(part in name for part in _SITE_PACKAGES)


def find_user_line() -> UserLine | None:
    """Return the line that this thread runs for the user, or that the main thread runs.

    Backward of a model on an accelerator runs in a thread of autograd, which has no user code below it.
    """
    line = _find_in_stack(sys._getframe(1))
    if line is None and threading.current_thread() is not threading.main_thread():
        return _find_in_stack(_main_frame())
    return line


def _find_in_stack(frame: FrameType | None) -> UserLine | None:
    """Return the innermost line of user code at this frame or around it."""
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return _line_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def _main_frame() -> FrameType | None:
    """Return the frame that the main thread runs."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def find_error_line(traceback: TracebackType | None) -> str:
    """Return the innermost line of user code of an error, as `describe_line` does."""
    found = None
    while traceback is not None:
        if _is_user_file(traceback.tb_frame.f_code.co_filename):
            found = _line_of(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return describe_line(found)


@functools.lru_cache(maxsize=4096)
def describe_line(line: UserLine | None) -> str:
    """Return a line of code as "file:number in function: source"."""
    if line is None:
        return "no line of user code"
    source = linecache.getline(line.file, line.number).strip()
    return f"{line.file}:{line.number} in {line.function}" + (f": {source}" if source else "")


def describe_main_thread() -> tuple[str, bool]:
    """Return the line of user code that the main thread runs, and whether torch compiles something for it."""
    inner = frame = _main_frame()
    is_compiling = False
    while frame is not None:
        is_compiling |= is_compiler_file(frame.f_code.co_filename)
        frame = frame.f_back
    return describe_line(_find_in_stack(inner)), is_compiling
