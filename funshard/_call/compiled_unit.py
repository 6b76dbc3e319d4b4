"""A unit's module with P(compile=...): its forward as a compiled function, inside the eager schedule.

The schedule gathers the unit before the run and frees it after it, as without compilation. For the run the modules hold the
gathered parameters in plain dicts, which Dynamo makes inputs of the graph: modules of one structure share a compilation. What
AOTAutograd saves of a parameter is the view that was given in, so saved-tensor hooks replace it as in eager.

Inside of torch.func's transforms, in which torch runs no compiled code, the unit runs as without compilation.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._spec.options import Compile, Remat, check_names, find_compiled, remat_of, surrounds_forward
from .._transforms.ambient import RUNNING
from .._transforms.error_hints import explain_compile_errors
from .._transforms.saved_tensors import SavedTensorHooks, unpack
from .buffers import is_first_warning
from .module_state import GatheringParameters, ModuleAttributes, find_modules
from .running import Call, Override

# --- one compiled function for all modules of a structure ---

Run = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``run(path, module, args, kwargs)``: the module's forward."""


def _run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


_RUNS: WeakKeyDictionary[nn.Module, dict[tuple[Compile, Remat | None], Run]] = WeakKeyDictionary()
"""The compiled functions of each module that has run."""


def _find_run(path: str, module: nn.Module, inside: Sequence[nn.Module], options: Compile, remat: Remat | None) -> Run:
    """Return the compiled function of a module with these inside."""
    runs = _RUNS.setdefault(module, {})
    if (options, remat) not in runs:
        check_names(f"module '{path}': Compile", options.backend, options.mode, dict(options.options))
        structure = tuple(
            (type(one), tuple((name, p.shape, p.dtype) for name, p in dict.items(vars(one)["_parameters"]) if p is not None))
            for one in inside
        )
        runs[options, remat] = _compile(options, remat, structure)
    return runs[options, remat]


@functools.lru_cache(maxsize=256)
def _compile(options: Compile, remat: Remat | None, structure: Hashable) -> Run:
    """Return a function with a compilation cache of its own, for modules of this structure."""
    from .compiled_backend import UnitBackend  # takes a second to import

    _torch.run_uncompiled(SavedTensorHooks.pack, unpack)
    settings: dict[str, Any] = dict(options.options)
    if options.backend == "inductor":
        # random numbers are those of eager: graphs that record a backward and graphs that do not draw the same ones
        settings = {"fallback_random": True, **(_torch.inductor_modes()[options.mode] if options.mode else {}), **settings}
    kwargs = {"mode": options.mode} if options.mode and options.backend != "inductor" else {}
    regions = [remat] if remat is not None and remat.names else None
    backend = UnitBackend(options.backend, settings, kwargs, remat)
    compiled = torch.compile(
        _torch.copy_function(_run_module, "run_compiled_unit"),
        backend=backend,
        dynamic=options.dynamic,
        fullgraph=options.fullgraph,
    )

    def run(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        backend.path = path
        with explain_compile_errors(f"module '{path}' with P(compile=True)"), RUNNING.set(regions=regions):
            return compiled(module, args, kwargs)

    return run


# --- the forward of a compiled module ---


class CompileWarning(UserWarning):
    """A unit with ``P(compile=True)`` runs without compilation, where torch cannot run compiled code."""


def compiled_forwards(call: Call, before: ModuleAttributes) -> Iterator[Override]:
    """Yield the forwards of the modules that are compiled, the innermost ones."""
    modules = call.bound.modules
    for path, options in _find_compiled(call.spec, modules).items():
        if vars(modules[path]).get("_compiled_call_impl") is not None:
            yield modules[path], "_compiled_call_impl", None
        yield modules[path], "forward", _compile_forward(call, path, options, before, modules[path].forward)


def is_compiled(spec: PartitionSpec, path: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether the module at this path is compiled, by its ``P`` or, as its attributes of before the call say, itself."""
    return path in spec._compute_once(find_compiled) or attributes.get("_compiled_call_impl") is not None


def _find_compiled(spec: PartitionSpec, modules: Mapping[str, nn.Module]) -> dict[str, Compile]:
    """Return how each compiled module is compiled, by path: by its ``P`` or, among ``modules``, by its ``.compile()``."""
    in_place = {path: m._compiled_call_impl for path, m in modules.items() if m._compiled_call_impl is not None}
    options = {path: Compile(**_torch.compile_options(run)) for path, run in in_place.items()}
    if found := {**spec._compute_once(find_compiled), **options}:
        spec._compute_once(_check_units_inside, *found)
    return found


def _check_units_inside(spec: PartitionSpec, *paths: str) -> bool:
    """Return True; raise ValueError if a unit inside one of these modules has remat, casts or offloaded activations."""
    for path in paths:
        for inner, p in spec.by_run.items():
            if inner != path and is_within(inner, path) and surrounds_forward(p):
                raise ValueError(
                    f"unit '{inner}' with {p} is inside of module '{path}', which is compiled as one: expected no remat, casts "
                    "or offloaded activations inside of a compiled module; compile the inner unit instead"
                )
    return True


def _compile_forward(
    call: Call, path: str, options: Compile, before: ModuleAttributes, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the forward of the module at ``path``: compiled where torch can run compiled code, else ``forward`` itself."""
    module, chosen = call.bound.modules[path], call.spec.by_run.get(path)
    remat = remat_of(chosen) if chosen else None
    inside = [*find_modules(call.bound.modules[path], path, {}).values()]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not can_run_compiled(call, path):
            return forward(*args, **kwargs)
        compiled = _find_run(path, module, inside, options, remat)
        with _plain_parameters(call, inside, before):
            return compiled(path, module, args, kwargs)

    return run


# --- where compiled code can run ---


def can_run_compiled(call: Call, path: str) -> bool:
    """Return whether torch can run the module at ``path`` compiled.

    Warn, once for each class of modules and reason, of a user's choice that prevents it.
    """
    reason, kind = _find_obstacle(call), type(call.bound.modules[path])
    if reason and is_first_warning(kind, reason):
        warnings.warn(
            f"module '{path}' with P(compile=True) runs without compilation, with the same results: {reason}",
            CompileWarning,
            stacklevel=2,
        )
    return reason is None


def _find_obstacle(call: Call) -> str | None:
    """Return why torch cannot run compiled code here: "" where operators are recorded; None if it can."""
    if _torch.is_in_graph() or _torch.is_tracing() or call.is_fake:
        return ""
    if _torch.has_dispatch_mode():
        return "a TorchDispatchMode is active, which sees no operators of compiled code"
    if _torch.current_attention() is not None:
        return "attention is that of fs.transforms_attention"
    if _torch.current_level():
        return "inside of torch.func's transforms torch runs no compiled code; fs.grad and plain autograd run it"
    if _torch.function_modes(own=True):  # Dynamo would trace its handler for each operator
        return "fs.remat inside of torch.func's transforms looks at its operators"
    if _torch.is_in_forward_ad():
        return "forward-mode AD does not run through it"
    return None


# --- parameters that Dynamo can read ---


@contextlib.contextmanager
def _plain_parameters(call: Call, inside: Sequence[nn.Module], before: ModuleAttributes) -> Generator[None]:
    """Give modules their gathered parameters in plain dicts, and their own forward, for the length of a run."""
    restored: list[tuple[nn.Module, GatheringParameters, dict[str, Any], dict[str, Any], Any]] = []
    try:
        for module in inside:
            attributes = vars(module)
            gathering = attributes.get("_parameters")
            if not isinstance(gathering, GatheringParameters):
                continue
            plain = gathering.read_with(functools.partial(call.read, for_module=True))
            restored.append((module, gathering, plain, plain.copy(), attributes.pop("forward", None)))
            attributes["_parameters"] = plain
            if "forward" in before[module]:
                attributes["forward"] = before[module]["forward"]
        yield
    finally:
        for module, gathering, plain, views, forward in restored:
            attributes = vars(module)
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward
            for name in {**views, **plain}:
                if name not in plain:
                    del gathering[name]
                elif plain[name] is not views.get(name, gathering):
                    gathering[name] = plain[name]
            attributes["_parameters"] = gathering
