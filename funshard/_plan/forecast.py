"""The events of a step from the spec alone: `functional_call` on shapes, of a model that does no more than read its parameters.

The schedule is the real one, and so are the collectives, casts, codecs and reductions; `StepRecorder` sees them run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _torch
from .._call.call import functional_call
from .._core.mesh import Mesh, ProcessAxis
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._core.unit import Unit
from .._wire.host import HOST
from .at_rest import UnitBytes, make_shard, map_p
from .record import StepRecorder
from .timeline import Category, Event

__all__ = ["count_tokens", "forecast"]

META = torch.device("meta")


# --- A model with the modules and parameters of a spec and without its layers, whose forward reads them in the spec's order ---


class Skeleton(nn.Module):
    """A module whose forward reads the parameters of its units, and runs modules inside it."""

    def forward(self, x: Tensor, run: ModuleRun) -> Tensor:
        """Run as a run says. ``x`` has no elements: it is there for autograd."""
        reads_last = not run.path and bool(run.inner)  # the root has layers before and after the others
        x = run.read(x, saves=not reads_last)
        for inner in run.inner:
            x = inner.module(x, inner)
        return run.read(x) if reads_last else x


class ModuleRun:
    """One run of a module: what it reads itself, and the runs of modules inside it, in the order of forward."""

    def __init__(self, path: str, units: Sequence[Unit], modules: Mapping[str, Skeleton], recorder: ScheduleRecorder) -> None:
        self.path, self.module, self.inner = path, modules[path], list[ModuleRun]()
        self._recorder, self._name = recorder, units[0].key if units else path
        self._params: list[tuple[nn.Module, str]] = []
        self.firsts: list[int] = []  # among them, of each unit
        self._numel = [0, 0]  # of matrices, and of those among them that are trained
        for unit in units:
            self.firsts.append(len(self._params))
            for param in unit.params:
                inside = [at for at, name in zip(param.locations, param.names, strict=True) if is_within(name, path)]
                if inside or len(unit.paths) == 1:  # else it is of another module of the unit
                    where, attr = (inside or param.locations)[0]
                    self._params.append((modules[where], attr))
                    numel = param.numel if len(param.shape) > 1 else 0
                    self._numel[0] += numel
                    self._numel[1] += numel if unit.requires_grad else 0

    def read(self, x: Tensor, *, saves: bool = True) -> Tensor:
        """Return ``x`` as if it was computed with the parameters. With ``saves`` backward reads them again."""
        return _Read.apply(x, self, saves, *(getattr(module, attr) for module, attr in self._params))

    def compute(self, params: Sequence[Tensor], *, backward: bool = False) -> None:
        """Record the computation with the parameters: two FLOPs for each element of a matrix and token, for each product."""
        self._recorder.unit = self._name
        self._recorder.wait(params)
        self._recorder.add("compute", flops=2 * self._recorder.tokens * (sum(self._numel) if backward else self._numel[0]))


class _Read(torch.autograd.Function):
    """The use of parameters: forward saves them, and backward allocates their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: ModuleRun, saves: bool, *params: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.run, ctx.saves, ctx.forms = run, saves, [(p.shape, p.stride(), p.dtype) for p in params]
        if saves:
            ctx.save_for_backward(*(params[i] for i in run.firsts))  # any of them has its unit gathered
            run.compute(params)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads: list[Tensor | None] = [None] * len(ctx.forms)
        if ctx.saves:
            ctx.run.compute(ctx.saved_tensors, backward=True)
            for i, (shape, stride, dtype) in enumerate(ctx.forms):
                if ctx.needs_input_grad[i + 3]:
                    grads[i] = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device)
        return grad, None, None, *grads


def make_modules(spec: PartitionSpec) -> dict[str, Skeleton]:
    """Return the modules of the model by path, with parameters of shapes alone."""
    modules = {"": Skeleton()}

    def module(path: str) -> Skeleton:
        if path not in modules:
            above, _, name = path.rpartition(".")
            modules[path] = Skeleton()
            module(above).add_module(name, modules[path])
        return modules[path]

    for unit in spec:
        for param in unit.params:
            tensor = torch.empty(param.shape, dtype=param.dtype, device=META)
            for path, attr in param.locations:
                module(path).register_parameter(attr, nn.Parameter(tensor, requires_grad=False))
    for path in {*spec.paths, *(path for unit in spec for path in unit.paths)}:
        module(path)
    return modules


def make_runs(spec: PartitionSpec, recorder: ScheduleRecorder) -> ModuleRun:
    """Return the run of the model, whose modules run in the order of ``spec.order``; those that it leaves out come last."""
    modules, units_at = make_modules(spec), dict[str, list[Unit]]()
    for unit in spec:
        for path in unit.paths:
            units_at.setdefault(path, []).append(unit)
    root = ModuleRun("", units_at.get("", ()), modules, recorder)
    latest = {"": root}  # by path

    def add_run(path: str) -> ModuleRun:
        above = path
        while above == path or above not in spec.by_path:
            above = above.rpartition(".")[0]
        outer = latest.get(above) or add_run(above)
        latest[path] = run = ModuleRun(path, units_at.get(path, ()), modules, recorder)
        outer.inner.append(run)
        return run

    order = (*spec.order, *(key for key in spec.by_key if key not in spec.order))
    seen, total, added = Counter[str](), Counter(order), list[Unit]()
    for key in order:
        unit = spec.by_key[key]
        if unit.path and unit not in added:  # else it runs with the unit before, at the same module
            seen[key] += 1
            # one of its modules runs after each of its gathers, and after the last one all that are left
            paths = unit.paths[seen[key] - 1 : None if seen[key] == total[key] else seen[key]] or unit.paths
            added = [other for path in paths for other in units_at[add_run(path).path]]
    return root


# --- The record of a step of that model ---


class ScheduleRecorder(StepRecorder):
    """A recorder of a step in which nothing but gathered parameters and gradients is allocated."""

    _counts_moves = False
    _output_category: ClassVar[Mapping[str, Category]] = {**StepRecorder._output_category, "all_to_all": "gradients"}
    _allocates_on_host = False
    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._allocates_on_host = (kwargs or {}).get("device") == HOST != self._device
        if self._allocates_on_host:
            kwargs = {**kwargs, "device": self._device}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._allocates_on_host = False
        return out

    def _is_on_host(self, x: Tensor) -> bool:
        return self._allocates_on_host or _torch.storage_id(x) in self._on_host

    def _category_of(self, inputs: Iterable[Tensor]) -> Category:
        known = {self._storages[at][0] for at in map(_torch.storage_id, inputs) if at in self._storages}
        return "gathered" if self.phase == "forward" or known - {"gradients"} else "gradients"


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch: a number, or tensors; 0 for None."""
    if batch is None or (type(batch) is int and batch > 0):
        return batch or 0
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    if not tensors:
        error = ValueError if isinstance(batch, int | float) else TypeError
        raise error(f"plan: batch: expected a number of tokens, at least 1, or tensors, or None, got {batch!r:.80}")
    integers = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
    return integers[0].numel() if integers else tensors[0].numel() // max(tensors[0].shape[-1] if tensors[0].dim() else 1, 1)


def forecast(spec: PartitionSpec, units: dict[str, UnitBytes], tokens: int) -> list[Event]:
    """Return the events of a step from shapes alone."""
    device = HOST if spec.bound_mesh.device_type == "cpu" else META
    sizes = dict(spec.bound_mesh.sizes)
    # without what the model has no layers for
    bare = map_p(spec, lambda p: dataclasses.replace(p, compile=False, offload="params" if "params" in p.offloads else None))
    with (
        _torch.named_groups(sizes, device) as names,
        torch.inference_mode(False),
        torch.enable_grad(),
        _torch.fake_mode() if device == HOST else contextlib.nullcontext(),
    ):
        mesh = Mesh(tuple((axis, ProcessAxis(size, 0, names[axis])) for axis, size in sizes.items()), device.type)
        spec = dataclasses.replace(bare, ignored=()).on(mesh)
        shards = {unit.key: make_shard(spec, unit, device) for unit in spec}
        x = torch.empty(0, device=device)
        recorder = ScheduleRecorder(shards, {names[axis]: (axis, sizes[axis]) for axis in sizes}, device)
        recorder.tokens = tokens
        recorder.hold([x, *shards.values()], on_host=[shards[key] for key, unit in units.items() if unit.on_host])
        run = make_runs(spec, recorder)
        trained = {unit.key: shards[unit.key].requires_grad_() for unit in spec if unit.requires_grad}
        with recorder:
            out = functional_call(run.module, shards, (x, run), spec=spec, check_order=False)
            found = torch.autograd.grad(out, [*trained.values()], x, allow_unused=True) if trained else ()
            grads = dict(zip(trained, found, strict=True))
            del out, found
            recorder.phase = "update"
            for key in trained:
                recorder.unit, unit = key, units[key]
                if not unit.on_host:
                    recorder.add("update", moved_bytes=3 * unit.parameters + 2 * unit.optimizer)
                del grads[key]
    return recorder.events
