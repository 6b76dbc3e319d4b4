"""Private parts of torch.compile: the options of a module's ``.compile()``, and functions with a cache of their own."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from .tracing import assume_constant

F = TypeVar("F", bound=types.FunctionType)


def compile_options(compiled: Callable[..., Any]) -> dict[str, Any]:
    """Return the backend, options, dynamic and fullgraph of torch.compile's function; a mode is among inductor's options.

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
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)  # pyright: ignore[reportReturnType]


def run_uncompiled(*functions: types.FunctionType) -> None:
    """Make Dynamo leave the frames of these functions, and of what they call, as they are.

    Where it goes on after a graph break it compiles all frames, those of saved-tensor hooks included. Pinned by
    ``test_saved_tensor_hooks_are_not_traced``.
    """
    # takes a second to import
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, skip)


def is_in_traced_function() -> bool:
    """Return whether the caller is traced, or runs in Python after a graph break of a compiled function.

    Pinned by ``test_a_compiled_function_runs``.
    """
    return torch.compiler.is_compiling() or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())  # pyright: ignore


@contextlib.contextmanager
def guard_hooks() -> Generator[None]:
    """Have what Dynamo compiles depend on modules' hooks: by default it misses those that are registered later.

    Pinned by ``test_hooks_that_are_registered_later``.
    """
    from torch._dynamo import config  # takes a second to import

    before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
    try:
        yield
    finally:
        config.skip_nnmodule_hook_guards = before


@contextlib.contextmanager
def restore_autograd_state() -> Generator[None]:
    """Restore, after an error, what a trace that fails may leave switched off: saved-tensor hooks, forward-mode AD.

    torch.utils.checkpoint in a torch.func.grad leaves the hooks disabled in the process. Pinned by
    ``test_a_failed_trace_leaves_no_state``.
    """
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # pyright: ignore
    forward_mode = torch._C._is_fwd_grad_enabled()
    try:
        yield
    except Exception:
        if message is None:
            torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore
        torch._C._set_fwd_grad_enabled(forward_mode)
        raise


def list_backends() -> list[str]:
    """Return the names of the backends of torch.compile."""
    return torch._dynamo.list_backends(exclude_tags=())


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Return the options that each mode of torch.compile stands for."""
    from torch._inductor import list_mode_options  # takes a second to import

    return list_mode_options()


def list_inductor_options() -> list[str]:
    """Return the names of the options of inductor."""
    from torch._inductor import list_options  # takes a second to import

    return list_options()


# --- Symbolic shapes in a graph of torch.compile ---


@assume_constant
def has_symbolic_shapes() -> bool:
    """Return whether an input of the graph that Dynamo traces has a symbolic size. Pinned by ``test_one_graph``."""
    context = TracingContext.try_get()
    env = context.fake_mode.shape_env if context and context.fake_mode else None
    if env is None:
        return False
    symbols = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # pyright: ignore[reportDeprecated]
    return any(symbol.is_integer and symbol not in env.replacements for symbol in symbols)


def flat_linear(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer that flattens its input by itself, as its kernel does, with the same numbers.

    Inside torch.func transforms torch's ``linear`` with a bias makes constants of the sizes that it flattens, and a graph of
    each shape (torch 2.11 to 2.13). Pinned by ``test_linear_with_a_bias_makes_constants_of_sizes``.
    """

    def forward(x: Tensor) -> Tensor:
        if x.dim() < 3 or module.bias is None:  # pyright: ignore[reportUnnecessaryComparison]
            return nn.functional.linear(x, module.weight, module.bias)
        return nn.functional.linear(x.flatten(0, -2), module.weight, module.bias).unflatten(0, x.shape[:-1])

    return forward
