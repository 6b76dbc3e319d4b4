"""One compiled function for all modules of a structure."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import _torch
from .._spec.options import Compile, Remat, check_names
from .._transforms._recompute.regions import RecomputeRegions, collect_regions, missing_names_message
from .._transforms.saved_tensors import SavedTensorHooks, unpack

__all__ = ["CompiledRun", "find_compiled_run"]

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``run(module, args, kwargs)``: the module's forward."""


class CompiledRun:
    """A compiled function for the forward of a module; ``remat`` is what it saves for backward, None for what torch chooses."""

    run: Run

    def __init__(self, remat: Remat | None) -> None:
        self._path, self._names = "", frozenset[str]() if remat is None else remat.names
        self._regions = RecomputeRegions()
        if remat is not None:
            self._regions.enter(remat)

    def __call__(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the module at ``path``. Raises ValueError if it gives none of the names to save."""
        self._path = path
        try:
            with _torch.guard_hooks(), collect_regions(self._regions) if self._names else contextlib.nullcontext():
                out = self.run(module, args, kwargs)
        except RuntimeError as error:
            if (explained := _explain(error, path)) is error:
                raise
            raise explained from error
        if self._names and self._names.isdisjoint(seen := self._regions.names_in(0)):
            raise ValueError(missing_names_message(f"module '{path}' with P(compile=True)", self._names, seen))
        return out

    def make_prehook(self) -> Callable[[Any], None]:
        """Return what the backward of the run calls first."""
        return functools.partial(_refuse_second_derivative, self._path)


def _refuse_second_derivative(path: str, _: object) -> None:
    """Raise RuntimeError in a backward that records a graph: torch may take a second derivative of compiled code for zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"module '{path}' with P(compile=True): a gradient with create_graph=True, outside or inside of its forward, "
            "differentiates compiled code twice, which torch cannot: expected fs.hvp or torch.func, which run it without "
            "compilation, or no compile for this unit"
        )


def _explain(error: RuntimeError, path: str) -> RuntimeError:
    """Return an error that names the module, for one in Dynamo's words; any other as it is."""
    is_dynamo, is_graph_break = _torch.classify_compile_error(error)
    if not is_dynamo:
        return error
    what, hint = _torch.describe_compile_error(error), _torch.find_compile_hint(error)
    if is_graph_break:
        return RuntimeError(
            f"module '{path}' with Compile(fullgraph=True) has a graph break ({what}): expected a forward that torch.compile "
            "traces as one graph, fullgraph=False, or no compile"
        )
    expected = f"{hint}; or a forward" if hint else "expected a forward"
    return RuntimeError(
        f"module '{path}' with P(compile=True) does not compile: {what}; {expected} that runs without compile, as "
        "P(compile=False) shows, and that the backend of torch.compile takes"
    )


def _run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


_RUNS: WeakKeyDictionary[nn.Module, dict[tuple[Compile, Remat | None, bool], CompiledRun]] = WeakKeyDictionary()
"""The compiled functions of each module that has run."""


def find_compiled_run(
    path: str, module: nn.Module, inside: Sequence[nn.Module], options: Compile, remat: Remat | None, *, retains: bool
) -> CompiledRun:
    """Return the compiled function of a module.

    Args:
        path: The module's path.
        module: The module.
        inside: All modules in it, itself included.
        options: How to compile it.
        remat: What it saves for backward, None for what torch chooses.
        retains: Whether a backward may come back to what it saved.

    Raises:
        ValueError: For a backend, a mode or an option that torch.compile does not know.
    """
    runs = _RUNS.setdefault(module, {})
    run = runs.get((options, remat, retains))
    if run is None:
        check_names(f"module '{path}': Compile", options.backend, options.mode, dict(options.options))
        structure = tuple(
            (type(one), tuple((name, p.shape, p.dtype) for name, p in dict.items(vars(one)["_parameters"]) if p is not None))
            for one in inside
        )
        run = runs[options, remat, retains] = _compile(options, remat, structure, retains)
    return run


@functools.lru_cache(maxsize=256)
def _compile(options: Compile, remat: Remat | None, structure: Hashable, retains: bool) -> CompiledRun:
    """Return a function with a compilation cache of its own, for modules of this structure.

    Functions that ``retains`` tells apart share none, nor inductor's caches on disk: a backward that was compiled where it ran
    with ``retain_graph=False`` writes into what forward has saved, and refuses ``retain_graph=True``.
    """
    _torch.run_uncompiled(SavedTensorHooks.pack, unpack)
    run = _torch.copy_function(_run_module, "run_compiled_unit")
    settings: dict[str, Any] = dict(options.options)
    if options.backend == "inductor":
        # random numbers are those of eager: graphs that record a backward and graphs that do not draw the same ones
        settings = {"fallback_random": True, **(_torch.inductor_mode_options(options.mode) if options.mode else {}), **settings}
        if retains:
            settings["inplace_buffers"] = False
    kwargs = {"mode": options.mode} if options.mode and options.backend != "inductor" else {}
    from .._transforms._recompute.saved_nodes import UnitBackend  # takes a second to import

    out = CompiledRun(remat)
    backend = UnitBackend(options.backend, settings, kwargs, remat, out.make_prehook, retains=retains)
    out.run = torch.compile(run, backend=backend, dynamic=options.dynamic, fullgraph=options.fullgraph)
    return out
