"""Errors: their messages, torch's own files on the stack, and the known ones of torch.compile."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import torch

# --- The message of any error ---


def error_text(error: BaseException) -> str:
    """Return the message of an error, or that it has none if the ``__str__`` of a user's class raises."""
    try:
        return str(error)
    except Exception:
        return f"no message: __str__ of {type(error).__name__} raises"


# --- Torch's own files on the stack of a thread ---

TORCH_FOLDER = f"{Path(torch.__file__).parent}/"
"""The folder of torch's Python files, with a slash at the end."""
_COMPILER_FILES = (f"{TORCH_FOLDER}_dynamo/convert_frame.py", f"{TORCH_FOLDER}_inductor/compile_fx.py")


def is_compiler_file(name: str) -> bool:
    """Return whether a file is on the stack while torch compiles, and not while compiled code runs.

    Pinned by ``test_compiler_files_are_on_the_stack``.
    """
    return name.startswith(_COMPILER_FILES)


# --- Errors of torch.compile: the program's own error inside of one, and what to do about the known ones ---


def is_compile_error(error: BaseException) -> bool:
    """Return whether an error is one of Dynamo's."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    return isinstance(error, TorchDynamoException)


_RAISED = re.compile(  # torch 2.11 shows its own variables for the arguments
    r"raised exception (\w+)\((?:\[ConstantVariable\(str: )?(.+?)(?:\)\])?\)$", re.MULTILINE
)
_RUN_ON_FAKES = re.compile("Dynamo failed to run FX node|TypeError when making fake tensor call")
_DISABLED = re.compile(r"was wrapped with `torch\.compiler\.disable` \(reason: (.+)\)$", re.MULTILINE)


def find_traced_error(error: Exception) -> BaseException | None:
    """Return the exception that the traced program raises, or an error with the reason why it must not be traced.

    Dynamo replaces both by an error of its own. Return None for any other error, and for a ``raise`` in traced code of a class
    that is not built in, or with other arguments than a string. Pinned by ``test_errors_of_the_step_are_its_own``.
    """
    if not is_compile_error(error):
        return None
    if disabled := _DISABLED.search(str(error)):
        return RuntimeError(disabled[1])
    if _RUN_ON_FAKES.search(str(error)):  # it is the cause of Dynamo's, or of what that replaces
        cause: BaseException | None = error
        while cause is not None and (is_compile_error(cause) or str(cause).startswith("Dynamo failed")):
            cause = cause.__cause__ or cause.__context__
        return cause
    raised = _RAISED.search(str(error))
    return None if raised is None else _make_error(raised[1], raised[2])


def _make_error(name: str, argument: str) -> Exception | None:
    """Return a built-in exception, by its name and by its argument as a Python literal; None unless that is a string."""
    kind: Any = getattr(builtins, name, None)
    try:
        message = ast.literal_eval(argument)
    except (SyntaxError, ValueError):
        return None
    is_plain = isinstance(message, str) and isinstance(kind, type) and issubclass(kind, Exception)
    return kind(message) if is_plain else None


_HINTS = [
    (r"storage of TensorWrapper",
     "forward keeps a tensor that it computes, in a list, a global or an object: expected it among the results (has_aux=True), "
     "or no compile"),
    (r"view is the output of a function that returns multiple views|mutate a captured Tensor|leaf Variable that requires grad",
     "forward changes a parameter, a buffer or an argument in place: expected a new tensor (w = self.weight.clamp(-1, 1)), "
     "buffers that are given by buffers=, or no compile"),
    (r"tag_activation_checkpoint",
     "forward uses torch.utils.checkpoint: expected P(remat=True) of the unit, or fs.remat"),
    (r"Module-level backwards hooks",
     "a module has a backward hook: expected tensor.register_hook in forward, or P(compile=True) of units"),
    (r"`torch\.autograd\.grad` with|Tensor\.backward\(\)|requires_grad_\(\)",
     "expected fs.grad, fs.grad_and_value or torch.func.grad for every gradient inside of the compiled function"),
    (r"numel\(\) on tensor with symbolic sizes",
     "torch's dropout takes no symbols for sizes in a gradient: expected dynamic=False, and a compilation for each size"),
    (r"DynamicLayer\.cpp",  # torch's own assertion, where it goes on after a break
     "the graph breaks inside of a gradient, as by a branch on values in forward, and torch cannot go on from there: expected "
     "a step that is one graph, or no compile; fullgraph=True names the line"),
]  # fmt: skip
"""torch's words where they do not say what to do, and that. Pinned by ``test_compile_errors_say_what_to_do``."""


def find_compile_hint(error: BaseException) -> str:
    """Return what to do about a known error of torch.compile; empty for none."""
    text = error_text(error)
    return next((hint for words, hint in _HINTS if re.search(words, text)), "")
