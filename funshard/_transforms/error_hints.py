"""Hints for torch's errors: which derivative is missing, in which module, and what to write instead.

The error stays torch's own, with its type and traceback, so that what catches it still does.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TypeVar

from torch import nn
from torch.autograd import Function

from .. import _torch

E = TypeVar("E", bound=BaseException)

_PREFIX = "funshard: "
_NO_FORWARD_RULE = r"forward AD with (\S+) that|jvp function for custom (autograd\.Function)"
_WRITES_TANGENT = "^ZeroTensors are immutable"
_HINTS = (
    (
        "must override the setup_context staticmethod",  # torch does not name the function
        "{function} is an autograd.Function without setup_context, or a custom operator: torch.func does not take it: expected "
        "setup_context in it (and a vmap rule for per_sample_grads); or second derivatives by plain double backward, "
        "torch.autograd.grad(..., create_graph=True), and samples one by one",
    ),
    (
        r"(forward AD with|derivative for) \S*attention\S* (that|is not implemented)",
        "torch's fused attention kernels have neither second derivatives nor forward-mode ones: call it under "
        "funshard.transforms_attention(), or, for short sequences, the math kernel: "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
    ),
    (
        "tensors does not require grad and does not have a grad_fn",
        "if torch.autograd.grad in forward raises this, in P(remat=True) or fs.remat and in several transforms: what runs "
        "again has no graph of its own there; expected torch.func.grad in its place, or no remat of the module",
    ),
    (
        f"{_NO_FORWARD_RULE}|{_WRITES_TANGENT}",  # into a tangent that is zero, as the rule of mse_loss's backward does
        "torch has no forward-mode rule for {operator}: a gradient of a gradient may do, as fs.hvp(..., forward=False)",
    ),
)
"""torch's words, and what to do; the first that fits."""


def is_forward_rule_missing(error: BaseException) -> bool:
    """Return whether torch says that it has no forward-mode rule. Pinned by ``test_what_has_no_forward_mode_rule``."""
    words = _NO_FORWARD_RULE if isinstance(error, NotImplementedError) else _WRITES_TANGENT
    return isinstance(error, RuntimeError) and re.search(words, _torch.error_text(error)) is not None


def add_hints(error: E, model: nn.Module | None = None) -> E:
    """Return the same error; with a note, which names the module of ``model``, if it is about a missing derivative."""
    text = _torch.error_text(error)
    found = next(((match, hint) for words, hint in _HINTS if (match := re.search(words, text))), None)
    if found is None or find_hint(error):
        return error
    match, hint = found
    classes = [x for x in _iter_locals(error.__traceback__, "cls") if isinstance(x, type) and issubclass(x, Function)]
    function = f"'{classes[-1].__qualname__}'" if classes else "what forward calls"
    operator = next(filter(None, match.groups()), "an operator, such as F.mse_loss")
    path = find_running_module(error.__traceback__, model)
    hint = hint.format(operator=operator, function=function)
    return _add_note(error, hint if path is None else f"module '{path}': {hint}")


@contextlib.contextmanager
def explain_compile_errors(where: str = "") -> Generator[None]:
    """Run what torch.compile has made. Raise the program's own errors where Dynamo replaces them, and add notes on what to do.

    ``where`` begins the note of an error in compiling.
    """
    try:
        with _torch.compiled_code():
            yield
    except Exception as error:
        raised = _torch.find_traced_error(error) or error
        hint = "" if find_hint(add_hints(raised)) else _torch.find_compile_hint(error)
        if where and _torch.is_compile_error(error) and not find_hint(raised):
            expected = "expected a forward that torch.compile takes (with fullgraph=True as one graph), or no compile"
            hint = f"{where}: {hint or expected}"
        if hint:
            _add_note(raised, hint)
        if raised is error:
            raise
        raise raised from error


def find_hint(error: BaseException) -> str:
    """Return the note that `add_hints` has added to an error; empty for none."""
    notes = *getattr(error, "__notes__", ()), *_torch.error_text(error).split("\n")
    return next((note for note in notes if note.startswith(_PREFIX)), "")


def _add_note(error: E, hint: str) -> E:
    """Return the same error with a note; before Python 3.11, at the end of its message."""
    if sys.version_info >= (3, 11):
        error.add_note(_PREFIX + hint)
    else:
        error.args = f"{error}\n{_PREFIX}{hint}", *error.args[1:]
    return error


def find_running_module(traceback: TracebackType | None, model: nn.Module | None) -> str | None:
    """Return the path of the innermost module of the model in a traceback, None if there is none."""
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    running = [paths[id(x)] for x in _iter_locals(traceback, "self") if id(x) in paths]
    return running[-1] if running else None


def _iter_locals(traceback: TracebackType | None, name: str) -> Iterator[object]:
    while traceback is not None:
        yield traceback.tb_frame.f_locals.get(name)
        traceback = traceback.tb_next
