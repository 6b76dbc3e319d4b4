"""One compiled function for all modules of a structure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import _torch
from .._spec.compiled import Compile
from .._spec.remat import Remat
from .._transforms._recompute.regions import RecomputeRegions, collect_regions, missing_names_message

__all__ = ["CompiledRun", "find_compiled_run", "is_first_run"]

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``run(module, args, kwargs)``: the module's forward."""


class CompiledRun:
    """A compiled function for the forward of a module; ``remat`` is what it saves for backward, None for what torch chooses."""

    def __init__(self, run: Run, remat: Remat | None) -> None:
        self._run, self._names = run, frozenset[str]() if remat is None else remat.names
        self._regions = RecomputeRegions()
        if remat is not None:
            self._regions.enter(remat)

    def __call__(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the module at ``path``. Raises ValueError if it gives none of the names to save."""
        if not self._names:
            return self._run(module, args, kwargs)
        with collect_regions(self._regions):
            out = self._run(module, args, kwargs)
        if self._names.isdisjoint(seen := self._regions.names_in(0)):
            raise ValueError(missing_names_message(f"module '{path}' with P(compile=True)", self._names, seen))
        return out


def _run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


_RUNS: WeakKeyDictionary[nn.Module, dict[tuple[Compile, Remat | None, bool], CompiledRun]] = WeakKeyDictionary()
"""The compiled functions of each module that has run."""


def find_compiled_run(
    module: nn.Module, inside: Sequence[nn.Module], options: Compile, remat: Remat | None, *, retains: bool
) -> CompiledRun:
    """Return the compiled function of a module.

    Args:
        module: The module.
        inside: All modules in it, itself included.
        options: How to compile it.
        remat: What it saves for backward, None for what torch chooses.
        retains: Whether a backward may come back to what it saved.
    """
    runs = _RUNS.setdefault(module, {})
    run = runs.get((options, remat, retains))
    if run is None:
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
    run = _torch.copy_function(_run_module, "run_compiled_unit")
    settings: dict[str, Any] = dict(options.options)
    if options.backend == "inductor":
        # random numbers are those of eager: graphs that record a backward and graphs that do not draw the same ones
        settings = {"fallback_random": True, **(_torch.inductor_mode_options(options.mode) if options.mode else {}), **settings}
        if retains:
            settings["inplace_buffers"] = False
    kwargs = {"mode": options.mode} if options.mode and options.backend != "inductor" else {}
    how: dict[str, Any] = {"backend": options.backend, "options": settings or None, **kwargs}
    if remat is not None:
        from .._transforms._recompute.saved_nodes import SelectiveBackend  # takes a second to import

        how = {"backend": SelectiveBackend(options.backend, settings, kwargs, remat)}
    compile: Any = torch.compile  # whose overloads know no computed options
    return CompiledRun(compile(run, dynamic=options.dynamic, fullgraph=options.fullgraph, **how), remat)


_MODES: WeakKeyDictionary[CompiledRun, set[tuple[bool, bool]]] = WeakKeyDictionary()
"""The modes in which each compiled function has run: with gradients or without, in training or evaluation."""


def is_first_run(run: CompiledRun, module: nn.Module) -> bool:
    """Return whether a function has not run before with or without gradients, in training or evaluation, as it will now."""
    mode, known = (torch.is_grad_enabled(), module.training), _MODES.setdefault(run, set())
    is_first = mode not in known
    known.add(mode)
    return is_first
