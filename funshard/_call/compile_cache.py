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

__all__ = ["CompiledRun", "find_compiled_run", "is_first_run"]

CompiledRun = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``run(module, args, kwargs)``: the module's forward."""


def _run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


_RUNS: WeakKeyDictionary[nn.Module, dict[tuple[Compile, bool], CompiledRun]] = WeakKeyDictionary()
"""The compiled functions of each module that has run."""


def find_compiled_run(module: nn.Module, inside: Sequence[nn.Module], options: Compile, *, retains: bool) -> CompiledRun:
    """Return the compiled function of a module; ``retains`` if a backward may come back to what it saved."""
    runs = _RUNS.setdefault(module, {})
    run = runs.get((options, retains))
    if run is None:
        structure = tuple(
            (type(one), tuple((name, p.shape, p.dtype) for name, p in dict.items(vars(one)["_parameters"]) if p is not None))
            for one in inside
        )
        run = runs[options, retains] = _compile(options, structure, retains)
    return run


@functools.lru_cache(maxsize=256)
def _compile(options: Compile, structure: Hashable, retains: bool) -> CompiledRun:
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
    compile: Any = torch.compile  # whose overloads know no computed options
    return compile(
        run,
        backend=options.backend,
        options=settings or None,
        dynamic=options.dynamic,
        fullgraph=options.fullgraph,
        **({"mode": options.mode} if options.mode and options.backend != "inductor" else {}),
    )


_MODES: WeakKeyDictionary[CompiledRun, set[tuple[bool, bool]]] = WeakKeyDictionary()
"""The modes in which each compiled function has run: with gradients or without, in training or evaluation."""


def is_first_run(run: CompiledRun, module: nn.Module) -> bool:
    """Return whether a function has not run before with or without gradients, in training or evaluation, as it will now."""
    mode, known = (torch.is_grad_enabled(), module.training), _MODES.setdefault(run, set())
    is_first = mode not in known
    known.add(mode)
    return is_first
