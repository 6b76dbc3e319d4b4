"""Python floats that torch.compile takes as inputs of its graph; import this module only to compile, for it imports Dynamo."""

import contextlib
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch._dynamo.exc import TorchDynamoException

pgo: Any = None
with contextlib.suppress(ImportError):
    from torch._dynamo import pgo

__all__ = ["forget_floats", "is_compile_error", "trace_floats"]


def is_compile_error(error: BaseException) -> bool:
    """Return whether torch.compile raised the error before anything ran."""
    return isinstance(error, TorchDynamoException)


def trace_floats(function: FunctionType, names: Iterable[str]) -> bool:
    """Make torch.compile take these Python floats as inputs of its graph from the first call on, and not as constants.

    Torch does so once it has seen a second value, at the price of another compilation. This function writes into torch's
    profile of the code that it has. A branch on a float still makes it a constant. Pinned by ``test_floats_do_not_recompile``.

    Args:
        function: The function that torch.compile was given.
        names: Dynamo's names of the floats, such as ``L['args'][2]``.

    Returns:
        Whether this torch has such a profile. Without it, a second value compiles again.
    """
    try:
        known = _profile(function)
        for name in names:
            known[name] = pgo.FrameStateSizeEntry(scalar=pgo.auto_dynamic)
    except Exception:  # another version's form
        return False
    return True


def forget_floats(function: FunctionType, names: Iterable[str]) -> None:
    """Make torch.compile take these floats of a function as constants at the next call: the reverse of `trace_floats`."""
    known = _profile(function)
    for name in names:
        known.pop(name, None)


def _profile(function: FunctionType) -> dict[str, Any]:
    """Return what torch.compile has seen of a function's arguments, by name."""
    make: Any = pgo.CodeId.make
    takes_closure = len(inspect.signature(make).parameters) > 1
    code_id = make(function.__code__, function.__closure__) if takes_closure else make(function.__code__)
    return pgo.get_code_state()[code_id].automatic_dynamic
