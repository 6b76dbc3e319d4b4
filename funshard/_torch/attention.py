"""Attention by another function than torch's kernels, in one thread, and torch's own attention in plain operators."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .compiling import run_uncompiled

AttentionFunction = Callable[..., Tensor]
"""A function with the arguments of ``F.scaled_dot_product_attention``."""


class _CurrentAttention(threading.local):
    """The function that replaces attention in this thread, None for torch's own."""

    function: AttentionFunction | None = None


_CURRENT = _CurrentAttention()


def current_attention() -> AttentionFunction | None:
    """Return the function that replaces attention in this thread, None for torch's own."""
    return _CURRENT.function


class ReplaceAttention(TorchFunctionMode):
    """A mode in which a function replaces ``F.scaled_dot_product_attention`` in this thread; None restores torch's own.

    torch runs ``F.multi_head_attention_forward``, which calls it, outside of the mode. So this runs a copy of that, in whose
    globals attention is the other function. Pinned by ``test_attention_is_replaced``.
    """

    def __init__(self, function: AttentionFunction | None) -> None:
        super().__init__()
        self._function = function
        self._multi_head = None if function is None else _copy_multi_head(function)
        self._before: list[AttentionFunction | None] = []

    def __enter__(self) -> ReplaceAttention:
        self._before.append(_CURRENT.function)
        _CURRENT.function = self._function
        return super().__enter__()  # pyright: ignore[reportReturnType]

    def __exit__(self, *error: Any) -> None:
        if _CURRENT.function is not self._function:
            raise RuntimeError(
                "transforms_attention is left where it is not the innermost one: expected the thread that entered it, and the "
                "reverse order"
            )
        _CURRENT.function = self._before.pop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        # a mode further inside may say that attention is torch's own; Dynamo traces none of those
        if self._function is not None and (torch.compiler.is_compiling() or _CURRENT.function is self._function):
            if func is F.scaled_dot_product_attention:
                func = self._function
            elif func is F.multi_head_attention_forward:
                func = self._multi_head
        return func(*args, **(kwargs or {}))


# Dynamo compiles this frame where it left the one of the caller uncompiled, and takes one function for the next one
run_uncompiled(ReplaceAttention.__torch_function__)


def use_attention(function: AttentionFunction | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a function replaces attention in this thread; None restores torch's own."""
    return contextlib.nullcontext() if function is None and _CURRENT.function is None else ReplaceAttention(function)


def _copy_multi_head(function: AttentionFunction) -> Callable[..., Any]:
    """Return a copy of ``F.multi_head_attention_forward`` that calls a function as attention."""
    original: Any = F.multi_head_attention_forward
    names = {name: value for name, value in vars(F).items() if name != "__name__"}  # by which Dynamo would find F's own
    copy = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    names |= {"scaled_dot_product_attention": function, original.__name__: copy}
    return copy


def math_attention(*args: Any, **options: Any) -> Tensor:
    """Compute attention by torch's math kernel, which consists of operators that have every derivative.

    `sdpa_kernel` would choose it for all threads. Pinned by ``test_attention_in_plain_operators``.
    """
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **options)[0]
