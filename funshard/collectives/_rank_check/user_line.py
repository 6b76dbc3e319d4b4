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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return _line_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    if threading.current_thread() is threading.main_thread():
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _line_of(frame.f_code, frame.f_lineno)


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
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    line, is_compiling = None, False
    while frame is not None:
        if line is None and _is_user_file(frame.f_code.co_filename):
            line = _line_of(frame.f_code, frame.f_lineno)
        is_compiling |= is_compiler_file(frame.f_code.co_filename)
        frame = frame.f_back
    return describe_line(line), is_compiling
