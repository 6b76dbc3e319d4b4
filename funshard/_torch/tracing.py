"""Tracing: fake tensors, recorded operators, marks on functions for torch.compile, and the phases of a step."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate
from torch.torch_version import TorchVersion

from .levels import current_level


def is_fake(tensor: Tensor) -> bool:
    """Return whether the tensor has a shape and no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and no data.

    Pinned, as `is_fake`, by ``test_trace_order_names_what_forward_gathers``.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_tracing() -> bool:
    """Return whether operators are being recorded, as by make_fx: then everything must be data flow.

    Pinned by ``test_fully_shard_compile_graph``.
    """
    return get_proxy_mode() is not None


is_in_graph: Callable[[], bool] = torch.compiler.is_compiling
"""Whether torch.compile traces the running code: the function that Dynamo knows, under a name that says what callers ask."""
is_in_dynamo: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces the running code itself, as torch.export may not."""

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Whether a profiler records ranges: torch.profiler, emit_nvtx or emit_itt. Pinned by ``test_a_profiler_is_seen``."""


def is_eager() -> bool:
    """Return whether code runs outside of torch.func transforms, compilation, recording and fake tensors.

    Pinned by ``test_values_are_compared_where_they_can_be``.
    """
    if torch.compiler.is_compiling() or current_level() or is_tracing():
        return False
    return not is_fake(torch.empty(0, device="cpu"))


def annotate_graph(**notes: object) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch.compile writes these notes on the nodes that it traces, under ``meta["custom"]``.

    Pinned by ``test_every_phase_gathers_what_was_let_go``.
    """
    return annotate(notes)


def current_annotations(*names: str) -> dict[str, object]:
    """Return those of the notes of `annotate_graph` with these names that hold for the node that is being traced; eager none.

    Pinned by ``test_gradients_of_gradients_gather_again``.
    """
    notes = traceback.current_meta.get("custom", {})
    return {name: notes[name] for name in names if name in notes} if notes else {}


F = TypeVar("F", bound=Callable[..., Any])


def assume_constant(fn: F) -> F:
    """Apply torch.compiler.assume_constant_result: torch.compile runs the function as it traces, once for each graph.

    Like `allow_in_graph` and `disable_in_graph` it does not import Dynamo, which takes longer than torch itself. Pinned by
    ``test_said_in_a_compiled_call``.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def wraps(fn: Callable[..., Any]) -> Callable[[F], F]:
    """Apply functools.wraps, in a graph without the attributes of a functools.partial, which Dynamo does not find."""
    updated = () if is_in_graph() and isinstance(fn, functools.partial) else functools.WRAPPER_UPDATES
    return functools.wraps(fn, updated=updated)  # pyright: ignore[reportReturnType]  as Dynamo traces no cast of it


def allow_in_graph(fn: F) -> F:
    """Apply torch.compiler.allow_in_graph, when Dynamo first traces the function. Pinned by tests/house/test_import.py."""

    @assume_constant
    def known() -> None:
        torch.compiler.allow_in_graph(fn)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            known()
        return fn(*args)

    return cast("F", call)


def write_into(tensor: Tensor, value: Tensor) -> Tensor:
    """Copy a value of the same shape into a tensor, and return the tensor.

    Inside torch.compile, torch 2.11 to 2.13 lose what is copied into a 0-D float64 input. Pinned by
    ``test_scalars_are_written_in_a_graph``.
    """
    (tensor if tensor.dim() else tensor.unsqueeze(0)).copy_(value if value.dim() else value.unsqueeze(0))
    return tensor


def disable_in_graph(reason: str) -> Callable[[F], F]:
    """Return a decorator that applies torch.compiler.disable when Dynamo first traces the function."""

    def decorated(fn: F) -> F:
        disabled: dict[None, F] = {}

        @assume_constant
        def known() -> None:
            disabled.setdefault(None, cast("F", torch.compiler.disable(fn, reason=reason)))

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Where Dynamo has given up on the callers' frames, it still tries this one's, and compilation is not under way.
            if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            known()
            return disabled[None](*args, **kwargs)

        return cast("F", call)

    return decorated


FORWARD_CAN_BE_REPLACED = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo traces a ``forward`` that a module's ``__dict__`` has for a while, and leaves none behind.

Pinned by ``test_casts_inside_of_a_compiled_call``.
"""


# --- The phases of a step, such as one unit's gather: ranges in the traces of torch.profiler, and lines of the log at DEBUG ---

LOGGER = logging.getLogger("funshard")
"""The log of the package: decisions and files at INFO, each phase at DEBUG. It has no handler of its own."""
LOGGER.addHandler(logging.NullHandler())

_NO_RANGE: AbstractContextManager[Any] = contextlib.nullcontext()


def phase(action: str, subject: str | None = None) -> AbstractContextManager[Any]:
    """Return a context whose block a profiler shows as ``funshard::action subject``, and whose start is logged at DEBUG.

    The subject is most often the key of a unit. Graphs that are compiled or recorded have no ranges, which would be operators.
    """
    if torch.compiler.is_compiling():
        return _NO_RANGE
    is_ranged = is_profiling() and not is_tracing()
    if not is_ranged and not LOGGER.isEnabledFor(logging.DEBUG):
        return _NO_RANGE
    label = action if subject is None else f"{action} {subject or repr(subject)}"
    LOGGER.debug("%s", label)
    return torch.profiler.record_function(f"funshard::{label}") if is_ranged else _NO_RANGE
