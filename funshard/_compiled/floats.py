"""Python floats among the arguments of a compiled step, such as a learning rate: inputs of the graph, not constants in it."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["TracedFloats"]


class TracedFloats:
    """The floats among the arguments of one compiled function, which Dynamo traces from the first call on.

    Where it cannot, as in ``len(str(x))``, they are constants, and each new value compiles again.
    """

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._can_be_traced = True

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell Dynamo how to take the floats among the arguments. Return whether it will trace some."""
        if not (names := _names_of_floats(args, kwargs)):
            return False
        from .._torch.traced_floats import forget_floats, trace_floats  # here, because the compiler takes a second to import

        if self._can_be_traced:
            return trace_floats(self._function, names)
        forget_floats(self._function, names)
        return False

    def make_constant(self, error: Exception) -> bool:
        """Make floats constants from the next call on, if the error may be due to them. Return whether it may."""
        from .._torch.traced_floats import is_compile_error

        self._can_be_traced = not is_compile_error(error.__cause__ or error)  # what the program raises has torch's as its cause
        return not self._can_be_traced


def _names_of_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return Dynamo's names of the Python floats among the arguments."""
    found: list[str] = []
    for name, given in (*((f"L['args'][{i}]", x) for i, x in enumerate(args)), ("L['kwargs']", kwargs)):
        if isinstance(given, float):
            found.append(name)
        elif not isinstance(given, Tensor) and any(isinstance(x, float) for x in pytree.tree_leaves(given)):
            leaves, _ = pytree.tree_flatten_with_path(given)
            found += [name + pytree.keystr(path) for path, leaf in leaves if isinstance(leaf, float)]
    return found
