"""Tracing: fake tensors, recorded operators, and marks on functions for torch.compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate
from torch.torch_version import TorchVersion

from .levels import current_level

__all__ = [
    "FORWARD_CAN_BE_REPLACED",
    "allow_in_graph",
    "annotate_graph",
    "assume_constant",
    "disable_in_graph",
    "fake_mode",
    "is_eager",
    "is_fake",
    "is_traced",
]


def is_fake(tensor: Tensor) -> bool:
    """Return whether the tensor has a shape and no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and no data.

    Pinned, as `is_fake`, by ``test_trace_order_names_what_forward_gathers``.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_traced() -> bool:
    """Return whether operators are being recorded, as by make_fx: then everything must be data flow.

    Pinned by ``test_fully_shard_compile_graph``.
    """
    return get_proxy_mode() is not None


def is_eager() -> bool:
    """Return whether code runs outside of torch.func transforms, compilation, recording and fake tensors.

    Pinned by ``test_values_are_compared_where_they_can_be``.
    """
    if current_level() or torch.compiler.is_compiling() or is_traced():
        return False
    return not is_fake(torch.empty(0, device="cpu"))


def annotate_graph(**notes: object) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch.compile writes these notes on the nodes that it traces, under ``meta["custom"]``.

    Pinned by ``test_every_phase_gathers_what_was_let_go``.
    """
    return annotate(notes)


F = TypeVar("F", bound=Callable[..., Any])


def assume_constant(fn: F) -> F:
    """Apply torch.compiler.assume_constant_result: torch.compile runs the function as it traces, once for each graph.

    Like `allow_in_graph` and `disable_in_graph` it does not import Dynamo, which takes longer than torch itself. Pinned by
    ``test_said_in_a_compiled_call``.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def allow_in_graph(fn: F) -> F:
    """Apply torch.compiler.allow_in_graph, when Dynamo first traces the function. Pinned by tests/test_import.py."""

    @assume_constant
    def known() -> None:
        torch.compiler.allow_in_graph(fn)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            known()
        return fn(*args)

    return cast("F", call)


def disable_in_graph(reason: str) -> Callable[[F], F]:
    """Return a decorator that applies torch.compiler.disable when Dynamo first traces the function."""

    def decorated(fn: F) -> F:
        disabled: dict[None, F] = {}

        @assume_constant
        def known() -> None:
            disabled.setdefault(None, cast("F", torch.compiler.disable(fn, reason=reason)))

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            if not torch.compiler.is_compiling():
                return fn(*args)
            known()
            return disabled[None](*args)

        return cast("F", call)

    return decorated


FORWARD_CAN_BE_REPLACED = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo traces a ``forward`` that a module's ``__dict__`` has for a while, and leaves none behind.

Pinned by ``test_casts_inside_of_a_compiled_call``.
"""
