"""The modules that a step runs, as a tree: which units each one gathers, and whether backward runs it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from .._spec.spec import PartitionSpec
from .._spec.tree import Param, is_within
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
    shared: tuple[Unit, ...] = ()
    """Those of its units that another run before it in the order of forward has, too, which ends their backward."""

    def params_of(self, unit: Unit) -> list[Param]:
        """Return the parameters of one of its units that its module has: all of them, unless the unit has other modules."""
        return [x for x in unit.params if len(unit.paths) == 1 or any(is_within(name, self.path) for name in x.names)]

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
    above: dict[str, list[ModuleRun]] = {}  # by the path of a module that shares its units: the runs around it, and its own
    added: list[Unit] = []  # by the last key
    order = (*spec.order, *(key for key in spec.by_key if key not in spec.order))
    seen: Counter[str] = Counter()
    for key in order:
        unit = spec.by_key[key]
        if unit.path == "" or unit in added:
            continue
        seen[key] += 1
        modules = _modules_of_gather(unit, seen[key], order.count(key))
        added = []
        if inside := [path for path in above if path not in unit.paths and unit.is_inside(path)]:
            stack = [*above[max(inside, key=len)]]
        for module in modules:
            while not is_within(module, stack[-1].path) or module == stack[-1].path:
                stack.pop()
            around = [path for path in spec._chosen if path and is_within(module, path) and path != module]
            for path in sorted(around, key=len):
                if is_within(path, stack[-1].path) and path != stack[-1].path:
                    stack.append(_add_run(stack[-1], path, [], recomputed))
            units = [u for u in spec if module in u.paths]
            shared = tuple(u for u in units if u in added)
            added += units
            stack.append(_add_run(stack[-1], module, units, recomputed, shared))
            if len(unit.paths) > 1:
                above[module] = [*stack]
    _mark_backward(root, reached=False)
    return root


def _modules_of_gather(unit: Unit, number: int, gathers: int) -> tuple[str, ...]:
    """Return the modules that run after one of the gathers of a unit: one each, and after the last gather all that are left."""
    return unit.paths[number - 1 : number if number < gathers else None] or unit.paths


def _mark_backward(run: ModuleRun, *, reached: bool) -> bool:
    """Note of each run whether anything is trained up to its end; return that of this run."""
    reached = reached or any(unit.requires_grad for unit in run.units)
    for inner in run.inner:
        reached = _mark_backward(inner, reached=reached)
    run.has_backward = reached
    return reached


def _add_run(outer: ModuleRun, path: str, units: list[Unit], recomputed: set[str], shared: tuple[Unit, ...] = ()) -> ModuleRun:
    run = ModuleRun(path, units, is_recomputed=path in recomputed, shared=shared)
    outer.inner.append(run)
    return run
