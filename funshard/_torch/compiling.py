"""Private parts of torch.compile, keys by which graphs hold objects, and attention in one thread by another function."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Generator, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]

from .dispatch import run_uncompiled
from .tracing import assume_constant

Code = TypeVar("Code", bound=types.FunctionType)


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


def copy_function(function: Code, name: str) -> Code:
    """Return a copy of a function with a code object of its own: Dynamo keeps and counts compilations by code object.

    Pinned by ``test_a_copied_function_compiles_by_itself``.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)  # pyright: ignore[reportReturnType]


def is_in_traced_function() -> bool:
    """Return whether the caller is traced, or runs in Python after a graph break of a compiled function.

    Pinned by ``test_a_compiled_function_runs``.
    """
    return torch.compiler.is_compiling() or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())  # pyright: ignore


@contextlib.contextmanager
def compiled_code() -> Generator[None]:
    """Have what Dynamo compiles depend on modules' hooks, and restore what a trace that fails may leave switched off.

    By default Dynamo misses hooks that are registered later: ``test_hooks_that_are_registered_later``. torch.utils.checkpoint
    in a torch.func.grad leaves saved-tensor hooks disabled in the process: ``test_a_failed_trace_leaves_no_state``.
    """
    from torch._dynamo import config  # takes a second to import

    before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # pyright: ignore
    forward_mode = torch._C._is_fwd_grad_enabled()
    try:
        yield
    except Exception:
        if message is None:
            torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore
        torch._C._set_fwd_grad_enabled(forward_mode)
        raise
    finally:
        config.skip_nnmodule_hook_guards = before


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
    """Return whether an input of the graph that Dynamo traces has a symbolic size. Pinned by ``test_graphs_by_shapes``."""
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


# --- Graph keys: a string that stands for a frozen object's contents in a graph: Dynamo guards it, and not every field ---

_FIRST: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The first live object of each graph key."""


_NUMBERS = itertools.count()


@functools.lru_cache(maxsize=256)
def _make_key(contents: Hashable) -> str:
    """Return a string that no other contents have; equal contents have the same one while it is cached."""
    return f"{next(_NUMBERS)}"


def set_graph_key(owner: Any, contents: Hashable) -> None:
    """Set ``owner._graph_key``, never the same string for other contents. Equal ones share it while they are in use.

    All live objects with a graph key hold the first one, so that it can be found while any of them lives.
    """
    graph_key = _make_key(contents)
    first = _FIRST.setdefault(graph_key, owner)
    object.__setattr__(owner, "_graph_key", graph_key)
    if first is not owner:
        object.__setattr__(owner, "_equal", first)


def find_by_graph_key(graph_key: str) -> Any:
    """Return the first object with this graph key. One that has it must be alive."""
    return _FIRST[graph_key]


# --- Attention by another function than torch's kernels, in one thread, and torch's own in plain operators ---

AttentionFunction = Callable[..., Tensor]
"""A function with the arguments of ``F.scaled_dot_product_attention``."""


def current_attention() -> AttentionFunction | None:
    """Return the function that replaces attention in this thread, None for torch's own."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, ReplaceAttention)]
    return modes[-1].function if modes else None


class ReplaceAttention(TorchFunctionMode):
    """A mode in which a function replaces ``F.scaled_dot_product_attention`` in this thread; the innermost counts.

    torch runs ``F.multi_head_attention_forward``, which calls it, outside of the mode. So this runs a copy of that, in whose
    globals attention is the other function. Pinned by ``test_attention_is_replaced``.
    """

    def __init__(self, function: AttentionFunction) -> None:
        super().__init__()
        self.function, self._multi_head = function, _copy_multi_head(function)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self.function
        elif func is F.multi_head_attention_forward:
            func = self._multi_head
        return func(*args, **(kwargs or {}))


# Dynamo compiles this frame where it left the one of the caller uncompiled, and takes one function for the next one
run_uncompiled(ReplaceAttention.__torch_function__)


def use_attention(function: AttentionFunction | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a function replaces attention in this thread; None for no change.

    A backward has torch's own by itself, also in the context of another function: torch runs it outside of all modes.
    """
    return contextlib.nullcontext() if function in (None, current_attention()) else ReplaceAttention(function)


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
