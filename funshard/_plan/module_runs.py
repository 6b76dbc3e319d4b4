"""The modules that a step runs, as a tree: which units each one gathers, and whether backward runs it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .._spec.spec import PartitionSpec
from .._spec.tree import is_within
from .._spec.unit import Unit

__all__ = ["ModuleRun", "module_runs"]


@dataclass(eq=False)
class ModuleRun:
    """One run of a module: its own units, and the runs of modules inside it, in the order of forward."""

    path: str
    units: list[Unit]
    inner: list[ModuleRun] = field(default_factory=list["ModuleRun"])
    is_recomputed: bool = False
    has_backward: bool = False
    """Whether backward comes to it: it, or what ran before it, is trained."""

    def walk(self) -> Iterator[ModuleRun]:
        """Yield this run and those inside it, in the order in which they begin."""
        yield self
        for run in self.inner:
            yield from run.walk()


def module_runs(spec: PartitionSpec) -> ModuleRun:
    """Return the run of the model, whose modules run in the order of ``spec.order``."""
    root = ModuleRun("", [unit for unit in spec if unit.path == ""])
    recomputed = set(spec.recomputed)
    root.is_recomputed = "" in recomputed
    stack = [root]
    for key in (*spec.order, *(key for key in spec.by_key if key not in spec.order)):
        unit = spec.by_key[key]
        if unit.path == "" or unit in stack[-1].units:
            continue
        while not is_within(unit.path, stack[-1].path) or unit.path == stack[-1].path:
            stack.pop()
        around = [path for path in spec._chosen if path and is_within(unit.path, path) and path != unit.path]
        for path in sorted(around, key=len):
            if is_within(path, stack[-1].path) and path != stack[-1].path:
                stack.append(_add_run(stack[-1], path, [], recomputed))
        stack.append(_add_run(stack[-1], unit.path, [u for u in spec if u.path == unit.path], recomputed))
    _mark_backward(root, reached=False)
    return root


def _mark_backward(run: ModuleRun, *, reached: bool) -> bool:
    """Note of each run whether anything is trained up to its end; return that of this run."""
    reached = reached or any(unit.requires_grad for unit in run.units)
    for inner in run.inner:
        reached = _mark_backward(inner, reached=reached)
    run.has_backward = reached
    return reached


def _add_run(outer: ModuleRun, path: str, units: list[Unit], recomputed: set[str]) -> ModuleRun:
    run = ModuleRun(path, units, is_recomputed=path in recomputed)
    outer.inner.append(run)
    return run
