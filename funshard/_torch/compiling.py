"""Private parts of torch.compile: the options of a module's ``.compile()``, and functions with a cache of their own."""

from __future__ import annotations

import contextvars
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._config_module import ConfigModule

__all__ = [
    "CompileOptions",
    "compile_options",
    "copy_function",
    "inductor_mode_options",
    "is_compiler_variable",
    "run_compiled",
]

CompileOptions = dict[str, Any]
"""Keyword arguments of torch.compile: backend, options, dynamic and fullgraph."""

F = TypeVar("F", bound=types.FunctionType)


def compile_options(compiled: Callable[..., Any]) -> CompileOptions:
    """Return the options with which torch.compile made this function; those of a mode are among inductor's options.

    Pinned by ``test_options_of_a_compiled_module``.
    """
    get_config: Any = getattr(compiled, "get_compiler_config")  # noqa: B009  a function's attribute
    (context,) = (cell.cell_contents for cell in get_config.__closure__)
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if isinstance(backend, torch._TorchCompileInductorWrapper):  # pyright: ignore[reportPrivateUsage]
        name, options = "inductor", backend.config
    else:
        name, options = backend.compiler_fn, backend.kwargs.get("options", {})
    return {"backend": name, "options": options, "dynamic": context._dynamic, "fullgraph": context.fullgraph}


def copy_function(function: F, name: str) -> F:
    """Return a copy of a function with a code object of its own: Dynamo keeps and counts compilations by code object.

    Pinned by ``test_a_copied_function_compiles_by_itself``.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name)  # pyright: ignore[reportReturnType]


def run_compiled(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function, and drop the context variables that torch sets while it compiles.

    Whoever compares the variables before and after a run, as recomputation does, would take them for the function's. Pinned by
    ``test_compilation_leaves_no_context_variables``.
    """
    inside = contextvars.copy_context()
    before = dict(inside.items())
    try:
        return inside.run(compiled, *args)
    finally:
        changed = {var: value for var, value in inside.items() if var not in before or before[var] is not value}
        if changed:
            own = _config_variables()
            for var, value in changed.items():
                if var in before or not (var in own or is_compiler_variable(var)):
                    var.set(value)


def is_compiler_variable(var: contextvars.ContextVar[Any]) -> bool:
    """Return whether Dynamo or AOTAutograd keeps its own state in a context variable, by its name."""
    return var.name.startswith("torch.") or var.name == "_vt_active_calls"


def _config_variables() -> set[contextvars.ContextVar[Any]]:
    """Return the context variables that hold torch's configuration."""
    entries = [e for m in [*sys.modules.values()] if isinstance(m, ConfigModule) for e in vars(m)["_config"].values()]
    return {x for entry in entries for x in vars(entry).values() if isinstance(x, contextvars.ContextVar)}


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Return the options that a mode of torch.compile stands for."""
    from torch._inductor import list_mode_options  # takes a second to import

    return list_mode_options(mode)
