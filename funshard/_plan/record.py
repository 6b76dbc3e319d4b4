"""The events of a step that runs on shapes alone: a user's step, or that of a model which only reads its parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .. import _torch
from .._call.call import functional_call
from .._core.mesh import Mesh, ProcessAxis
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._core.unit import P, Unit
from .._wire.host import HOST, is_host_resident
from ..optim import from_torch
from ..optim._checks import is_pair

# --- The events of a step: what each one holds, sends and computes ---

Category = Literal["parameters", "optimizer", "gathered", "gradients", "activations"]
Phase = Literal["forward", "backward", "update"]
EventKind = Literal["gather", "compute", "reduce", "exchange", "copy", "wait", "memory", "update"]
"""The action of an event. An exchange is a collective of the model's own; "memory" only allocates or frees."""

CATEGORIES: tuple[Category, ...] = ("parameters", "optimizer", "gathered", "gradients", "activations")
Held = dict[Category, int]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends along one mesh axis by collectives of one kind, in one event or in a whole step."""

    axis: str
    op: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"
    count: int
    input_bytes: int
    output_bytes: int
    sent_bytes: int  # by this rank over the axis, by a ring, which receives as many
    seconds: float = 0.0  # of the step's, hidden behind computation or not

    def __add__(self, other: Traffic) -> Traffic:
        sums: Any = (a + b for a, b in zip(dataclasses.astuple(self)[2:], dataclasses.astuple(other)[2:], strict=True))
        return Traffic(self.axis, self.op, *sums)


class Event(NamedTuple):
    """One event of a step, in the order in which the program starts them."""

    kind: EventKind
    phase: Phase
    unit: str
    memory: Mapping[Category, int]  # the bytes that it allocates, or frees where negative
    collective: Traffic | None = None
    flops: int = 0
    moved_bytes: int = 0  # that it reads and writes: in device memory for an update, between host and device for a copy
    after: tuple[int, ...] = ()  # the indices of the collectives and copies that must end before it starts

    @property
    def stream(self) -> str:
        """The stream that it runs on."""
        return "network" if self.collective else "host" if self.kind == "copy" else "compute"


# --- What a rank holds between steps ---

Init = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""The function of an optimizer that returns its state before the first step."""


class UnitBytes(NamedTuple):
    """One unit at rest on one rank."""

    numel: int  # of its parameters, on all ranks together
    padding: int  # elements of its buffer that are no parameter's
    parameters: int  # bytes of this rank's slice as it is stored
    optimizer: int  # bytes of its optimizer state
    on_host: bool


def is_on_host(unit: Unit, spec: PartitionSpec) -> bool:
    """Return whether a unit lives in host memory and is used elsewhere: on any mesh but one of the CPU."""
    return is_host_resident(unit) and spec.bound_mesh.device_type != "cpu"


def resolve_optimizer(optimizer: object) -> tuple[Init | None, Any]:
    """Return ``(init, update)`` of an optimizer that is given by name, by class, or as that pair; Nones for None."""
    classes = {key.lower(): cls for key, cls in vars(torch.optim).items() if inspect.isclass(cls)}
    found = classes.get(optimizer.lower()) if isinstance(optimizer, str) else optimizer
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return cast("Any", from_torch(found, donate=True))
    if optimizer is None:
        return None, None
    if is_pair(found):
        return cast("Any", found)
    error = ValueError if isinstance(optimizer, str) else TypeError
    raise error(
        "optimizer: expected a name such as 'adamw', the name of a class of torch.optim, such a class, (init, update) as "
        f"fs.optim makes them, or None, got {optimizer!r}"
    )


def map_p(spec: PartitionSpec, change: Callable[[P], P]) -> PartitionSpec:
    """Return a spec with another `P` for each of its units."""
    units = tuple(dataclasses.replace(unit, p=change(unit.p)) for unit in spec.units)
    selected = tuple((path, change(p)) for path, p in spec.selected)
    return dataclasses.replace(spec, selected=selected, root=change(spec.root), units=units)


def make_shard(spec: PartitionSpec, unit: Unit, device: torch.device | None = None) -> Tensor:
    """Return an empty shard of a unit."""
    length, dtype = spec.stored(unit)
    return torch.empty(length, dtype=dtype, device=device)


def unit_bytes(spec: PartitionSpec, init: Init | None) -> dict[str, UnitBytes]:
    """Return what one rank holds of each unit between steps, from shapes alone: ``init`` runs on fake tensors."""
    with _torch.fake_mode():
        shards = {unit.key: make_shard(spec, unit) for unit in spec if not unit.at_rest}
        shards = {key: shard.requires_grad_(spec.by_key[key].requires_grad) for key, shard in shards.items()}
        states = init(shards) if init else {}
    optimizer = dict.fromkeys(spec.by_key, 0)
    for path, x in pytree.tree_flatten_with_path(states)[0]:
        key = next((part.key for part in path if isinstance(part, pytree.MappingKey) and part.key in optimizer), None)
        if key is not None and isinstance(x, Tensor) and x.dim() and spec.by_key[key].requires_grad:
            optimizer[key] += x.nbytes
    found: dict[str, UnitBytes] = {}
    for unit in spec:
        length, dtype = spec.stored(unit)
        sizes = unit.numel, spec.padded_numel(unit) - unit.numel, length * dtype.itemsize, optimizer[unit.key]
        found[unit.key] = UnitBytes(*sizes, is_on_host(unit, spec))
    return found


# --- Values for indices that a model computes from its data, such as each token's experts, where tensors have shapes alone ---

META = torch.device("meta")
MOST_VALUES = 2**20
"""The elements of the largest tensor with values that a planned step computes with."""

_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_RANKING = {"topk", "sort", "argmax", "argmin", "max", "min", "multinomial"}


def _give_even_indices(name: str, args: Any, out: Any) -> Any:
    """Return an operator's results, with indices that it chose among spread evenly: a router then loads all experts alike."""
    if name not in _RANKING or not args[0].is_floating_point():
        return out
    choices = max(min(args[0].shape, default=1), 1)  # are in range for any dimension

    def spread(x: Tensor) -> Tensor:
        if x.dtype != torch.int64 or not _torch.is_fake(x) or x.numel() > MOST_VALUES:
            return x
        with _torch.real_tensors():
            return (torch.arange(x.numel(), device=x.device) % choices).view(x.shape)

    return pytree.tree_map_only(Tensor, spread, out)


# --- The events of a step that runs on fake tensors: every operator that allocates, computes or sends ---

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_OUTPUT_CATEGORIES: dict[str, Category] = {"all_gather": "gathered", "reduce_scatter": "gradients", "all_reduce": "gradients"}


@dataclasses.dataclass
class _Storage:
    """The memory of a tensor of the step."""

    category: Category
    nbytes: int  # that are counted: none of what is held between steps
    is_on_host: bool = False
    unit: str | None = None  # whose shard or gathered buffer it is
    shard_numel: int | None = None
    pending: int | None = None  # the event of the copy or collective that fills it, unless something waited for it


class StepRecorder(_torch.DispatchMode):
    """A mode that records the events of the step inside it, and follows every storage from its allocation until it is freed.

    A unit's name is that of the last weights or gathered buffer that was read. Without ``has_layers`` nothing but gathered
    parameters and gradients is allocated, and ``tensor.to("cpu")`` gives tensors of the device that count as the host's.
    """

    def __init__(self, device: torch.device, axes: Mapping[str, tuple[str, int]], *, has_layers: bool) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.phase: Phase = "forward"
        self.unit = ""
        self._axes = axes  # by name of process group, the mesh axis and its size
        self._device, self._has_layers = device, has_layers
        self._allocates_on_host = self._was_backward = False
        self._storages: dict[int, _Storage] = {}

    def add(self, kind: EventKind, memory: Mapping[Category, int] | None = None, **fields: Any) -> int:
        """Add an event of the unit that is worked on, and return its index."""
        self.events.append(Event(kind, self.phase, self.unit, memory or {}, **fields))
        return len(self.events) - 1

    def hold(self, tree: Any) -> None:
        """Leave out the tensors in a tree: they are held between steps."""
        for x in (x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)):
            self._storages.setdefault(_torch.storage_id(x), self._find(x))

    def hold_shard(self, unit: str, shard: Tensor, *, on_host: bool) -> None:
        """Leave out a shard, and know whose it is."""
        self._storages[_torch.storage_id(shard)] = _Storage("parameters", 0, on_host, unit, shard.numel())

    def wait(self, inputs: Iterable[Tensor]) -> None:
        """Add the wait for the copies and collectives that fill these tensors."""
        for storage in map(self._find, inputs):
            if storage.pending is not None:
                self.add("wait", after=(storage.pending,))
                storage.pending = None

    def _find(self, x: Tensor) -> _Storage:
        """Return the storage of a tensor; for one from outside of the step a new one."""
        on_host = self._has_layers and x.device.type == HOST.type != self._device.type
        return self._storages.get(_torch.storage_id(x)) or _Storage("parameters", 0, on_host)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("profiler", "prim"):  # which mark a range
            return func(*args, **kwargs)
        self._allocates_on_host = not self._has_layers and kwargs.get("device") == HOST != self._device
        if self._allocates_on_host:
            kwargs = {**kwargs, "device": self._device}
        name = func._schema.name.partition("::")[2]
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._place(name, inputs)
        traits, is_sent = _torch.op_traits(func), func.namespace == "_c10d_functional"
        if not (is_sent or traits.is_view or name.startswith("new_")):
            self.wait(inputs)  # which is read; a collective waits itself, and the device goes on
        if name == "wait_tensor":
            self.wait(args[:1])
            if not _torch.is_fake(args[0]):
                with _torch.real_tensors():
                    func(*args, **kwargs)
            return args[0]  # a fake result would have another storage
        has_values = bool(inputs) and not any(_torch.is_fake(x) or x.numel() > MOST_VALUES for x in inputs)  # as random states
        with _torch.real_tensors() if has_values else contextlib.nullcontext():
            out = func(*args, **kwargs)
        if is_sent:
            out, op = args[0] if name.endswith("_") else kwargs.get("out", out), next(filter(name.startswith, _COLLECTIVES))
            self._send(op, *(self._axes.get(args[-1]) or (args[-1], _torch.resolve_group(args[-1]).size())), args[0], out)
            return out
        is_counting = not inputs and name in ("arange", "full", "ones", "zeros") and out.dtype in _INTEGERS
        if is_counting and not out.is_meta and out.numel() <= MOST_VALUES:  # as positions, whose values models look at
            with _torch.real_tensors():
                out = func(*args, **kwargs)
        out = _give_even_indices(name, args, out)
        outputs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        memory = Counter[Category]()
        for x in outputs:
            self._allocate(x, memory, self._category_of(inputs), is_lazy=name == "_lazy_clone")
        if name in ("copy_", "_to_copy") and self._find(inputs[-1]).is_on_host != self._find(outputs[0]).is_on_host:
            self._find(outputs[0]).pending = self.add("copy", memory, moved_bytes=inputs[-1].nbytes)
            return out
        count = flop_registry.get(func.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        moved = 0 if flops or traits.is_view or not self._has_layers else sum(x.nbytes for x in (*inputs, *outputs))
        if memory or flops or moved:
            self.add("compute", memory, flops=flops, moved_bytes=moved)
        return out

    def _place(self, name: str, inputs: list[Tensor]) -> None:
        """Note the phase and the unit that an operator belongs to."""
        if _torch.current_graph_task() != -1:
            self.phase, self._was_backward = "backward", True
        elif self._was_backward and self.phase == "backward":
            self.phase = "update"
        for x, storage in zip(inputs, map(self._find, inputs), strict=True):
            if storage.unit is not None:
                self.unit = storage.unit
                if self.phase == "update" and (storage.shard_numel != x.numel() or name.startswith("all_gather")):
                    self.phase = "forward"  # of another micro-batch

    def _category_of(self, inputs: Iterable[Tensor]) -> Category:
        """Return the category of what an operator on these allocates; a collective that takes it may know better."""
        if self._has_layers:
            return "optimizer" if self.phase == "update" else "activations"
        known = {self._storages[at].category for at in map(_torch.storage_id, inputs) if at in self._storages}
        return "gathered" if self.phase == "forward" or known - {"gradients"} else "gradients"

    def _allocate(self, x: Tensor, memory: Counter[Category], category: Category, *, is_lazy: bool = False) -> None:
        """Follow the storage of a result, if it is new. A lazy copy, as of buffers, counts none, though something may write."""
        storage, at = x.untyped_storage(), _torch.storage_id(x)
        if at not in self._storages:
            on_host = self._allocates_on_host or self._find(x).is_on_host
            self._storages[at] = _Storage(category, 0 if on_host or is_lazy else storage.nbytes(), on_host)
            memory[category] += self._storages[at].nbytes
            weakref.finalize(storage, self._free, at).atexit = False

    def _free(self, at: int) -> None:
        if (storage := self._storages.pop(at, None)) and storage.nbytes:
            self.add("memory", {storage.category: -storage.nbytes})

    def _send(self, op: str, axis: str, ranks: int, sent: Tensor, out: Tensor) -> None:
        """Add the start of a collective, with the memory of its output, and values where all ranks have those of this one."""
        memory = Counter[Category]()
        category = "gradients" if op == "all_to_all" and not self._has_layers else _OUTPUT_CATEGORIES.get(op)
        self._allocate(out, memory, category or self._category_of([sent]))
        source, target = self._find(sent), self._find(out)
        for storage in (target, source) if category == "gradients" else (target,):
            if category and storage.nbytes and storage.category != category:  # now its use is known
                memory[storage.category] -= storage.nbytes
                memory[category] += storage.nbytes
                storage.category = category
        kind: EventKind = "gather" if op == "all_gather" else "reduce" if category else "exchange"
        after, source.pending = () if source.pending is None else (source.pending,), None
        if op == "all_gather" and source.unit is not None:
            target.unit = source.unit
        by_ring = max(sent.nbytes, out.nbytes) * (ranks - 1) // ranks * (2 if op == "all_reduce" else 1)
        traffic = Traffic(axis, op, 1, sent.nbytes, out.nbytes, by_ring)
        target.pending = self.add(kind, memory, collective=traffic, after=after)
        if not _torch.is_fake(out):
            with _torch.real_tensors():
                values = torch.cat([sent] * ranks) if op == "all_gather" else sent * ranks if op == "all_reduce" else sent
                if values.numel() == out.numel():
                    out.copy_(values.view(out.shape))


# --- A user's step, on a process group of ranks in name only ---


def _record(
    spec: PartitionSpec,
    device: torch.device,
    run: Callable[[PartitionSpec, dict[str, Tensor], StepRecorder], object],
    *,
    has_layers: bool,
) -> list[Event]:
    """Return the events of ``run(spec, shards, recorder)`` on ranks in name only, and on tensors of shapes alone."""
    sizes = dict(spec.bound_mesh.sizes)
    on_host = {unit.key: is_on_host(unit, spec) for unit in spec}
    with (
        _torch.named_groups(sizes, device) as names,
        torch.inference_mode(False),
        torch.enable_grad(),
        contextlib.nullcontext() if device == META else _torch.fake_mode(),
    ):
        spec = spec.on(Mesh(tuple((axis, ProcessAxis(size, 0, names[axis])) for axis, size in sizes.items()), device.type))
        recorder = StepRecorder(device, {names[axis]: (axis, size) for axis, size in sizes.items()}, has_layers=has_layers)
        shards: dict[str, Tensor] = {}
        for unit in spec:
            shards[unit.key] = make_shard(spec, unit, HOST if has_layers and on_host[unit.key] else device)
            recorder.hold_shard(unit.key, shards[unit.key], on_host=on_host[unit.key])
        result = run(spec, shards, recorder)
        events = [*recorder.events]
        del result  # whose release is none of them
        return events


def record_step(step: Callable[..., Any], spec: PartitionSpec, batch: Any, init: Init | None) -> tuple[list[Event], int]:
    """Return the events of ``step(params, state, batch, spec=spec)``, run on fake tensors, and the bytes of its batch.

    Raises:
        RuntimeError: If this process has a process group, or the step sends nothing although its spec has several ranks.
        NotImplementedError: Naming the unit, for offloading where the device is the host.
    """
    parameters = inspect.signature(step).parameters.values()
    if not any(p.name == "spec" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            "plan: step: expected step(params, state, batch, *, spec), which gives spec to functional_call, got no spec"
        )
    sizes = dict(spec.bound_mesh.sizes)
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    device = next((x.device for x in tensors if not x.is_meta), HOST)
    if device.type == "cpu" and (unit := next((unit for unit in spec if unit.p.offloads), None)):
        raise NotImplementedError(
            f"unit '{unit.key}' has {unit.p}, and where the device is the host nothing is copied: expected a batch on an "
            "accelerator, or a plan without step="
        )

    def run(bound: PartitionSpec, params: dict[str, Tensor], recorder: StepRecorder) -> object:
        state: Any = init({key: x for key, x in params.items() if bound.by_key[key].requires_grad}) if init else {}
        fake_batch = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device=device), batch)
        recorder.hold((state, fake_batch))
        with recorder:
            return step(params, state, fake_batch, spec=bound)

    with _torch.fake_world(math.prod(sizes.values())):
        events = _record(spec, device, run, has_layers=True)
    if any(axis > 1 for axis in sizes.values()) and not any(event.collective for event in events):
        raise RuntimeError(
            f"plan: the step sends nothing, and its mesh has axes {sizes}: expected functional_call by the spec= that it gets"
        )
    return events, sum(x.nbytes for x in tensors)


# --- The step of a model that has the modules and parameters of a spec, and whose forward only reads them, in its order ---


class _Skeleton(nn.Module):
    """A module whose forward reads the parameters of its units, and runs modules inside it."""

    def forward(self, x: Tensor, run: _ModuleRun) -> Tensor:
        """Run as a run says. ``x`` has no elements: it is there for autograd."""
        reads_last = not run.path and bool(run.inner)  # the root has layers before and after the others
        x = run.read(x, saves=not reads_last)
        for inner in run.inner:
            x = inner.module(x, inner)
        return run.read(x) if reads_last else x


class _ModuleRun:
    """One run of a module: what it reads itself, and the runs of modules inside it, in the order of forward."""

    def __init__(self, path: str, units: Sequence[Unit], modules: Mapping[str, _Skeleton], recorder: StepRecorder, tokens: int):
        self.path, self.module, self.inner, self.recorder = path, modules[path], list[_ModuleRun](), recorder
        self.name, self.params, self.flops = units[0].key if units else path, list[tuple[nn.Module, str]](), [0, 0]
        for unit in units:
            for param in unit.params:
                inside = [at for at, name in zip(param.locations, param.names, strict=True) if is_within(name, path)]
                if inside or len(unit.paths) == 1:  # else it is of another module of the unit
                    where, attr = (inside or param.locations)[0]
                    self.params.append((modules[where], attr))
                    flops = 2 * tokens * param.numel if len(param.shape) > 1 else 0  # one product for each matrix
                    self.flops[0] += flops
                    self.flops[1] += flops * (2 if unit.requires_grad else 1)

    def read(self, x: Tensor, *, saves: bool = True) -> Tensor:
        """Return ``x`` as if it was computed with the parameters. With ``saves`` backward reads them again."""
        return _Read.apply(x, self, saves, *(getattr(module, attr) for module, attr in self.params))

    def compute(self, params: Iterable[Tensor], *, backward: bool = False) -> None:
        self.recorder.unit = self.name
        self.recorder.wait(params)
        self.recorder.add("compute", flops=self.flops[backward])


class _Read(torch.autograd.Function):
    """The use of parameters: forward saves them, and backward allocates their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _ModuleRun, saves: bool, *params: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.run, ctx.saves, ctx.forms = run, saves, [(p.shape, p.stride(), p.dtype) for p in params]
        if saves:
            ctx.save_for_backward(*params)
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


def _make_modules(spec: PartitionSpec) -> dict[str, _Skeleton]:
    """Return the modules of the model by path, with parameters of shapes alone."""
    modules = {"": _Skeleton()}

    def find(path: str) -> _Skeleton:
        if path not in modules:
            above, _, name = path.rpartition(".")
            modules[path] = _Skeleton()
            find(above).add_module(name, modules[path])
        return modules[path]

    for path in (*spec.paths, *(path for unit in spec for path in unit.paths)):
        find(path)
    for param in (param for unit in spec for param in unit.params):
        tensor = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=META), requires_grad=False)
        for path, attr in param.locations:
            find(path).register_parameter(attr, tensor)
    return modules


def _make_runs(spec: PartitionSpec, recorder: StepRecorder, tokens: int) -> _ModuleRun:
    """Return the run of the model, whose modules run in the order of ``spec.order``; those that it leaves out come last."""
    modules, units_at = _make_modules(spec), dict[str, list[Unit]]()
    for unit in spec:
        for path in unit.paths:
            units_at.setdefault(path, []).append(unit)
    latest = {"": _ModuleRun("", units_at.get("", ()), modules, recorder, tokens)}  # by path

    def add_run(path: str) -> None:
        above = path
        while above == path or above not in spec.by_path:
            above = above.rpartition(".")[0]
        if above not in latest:
            add_run(above)
        latest[path] = _ModuleRun(path, units_at.get(path, ()), modules, recorder, tokens)
        latest[above].inner.append(latest[path])

    order = (*spec.order, *(key for key in spec.by_key if key not in spec.order))
    seen, total, added = Counter[str](), Counter(order), list[Unit]()
    for key in order:
        unit = spec.by_key[key]
        if unit.path and unit not in added:  # else it runs with the unit before, at the same module
            seen[key] += 1
            # one of its modules runs after each of its gathers, and after the last one all that are left
            paths = unit.paths[seen[key] - 1 : None if seen[key] == total[key] else seen[key]] or unit.paths
            for path in paths:
                add_run(path)
            added = [other for path in paths for other in units_at[path]]
    return latest[""]


def record_schedule(spec: PartitionSpec, units: Mapping[str, UnitBytes], tokens: int) -> list[Event]:
    """Return the events of a step of that model: `functional_call` and its backward, and an update in place."""
    device = HOST if spec.bound_mesh.device_type == "cpu" else META
    # without what the model has no layers for
    bare = map_p(spec, lambda p: dataclasses.replace(p, compile=False, offload="params" if "params" in p.offloads else None))

    def run(spec: PartitionSpec, shards: dict[str, Tensor], recorder: StepRecorder) -> None:
        x = torch.empty(0, device=device)
        recorder.hold(x)
        model = _make_runs(spec, recorder, tokens)
        trained = {unit.key: shards[unit.key].requires_grad_() for unit in spec if unit.requires_grad}
        with recorder:
            out = functional_call(model.module, shards, (x, model), spec=spec, check_order=False)
            found = torch.autograd.grad(out, [*trained.values()], x, allow_unused=True) if trained else ()
            grads = dict(zip(trained, found, strict=True))
            del out, found
            recorder.phase = "update"
            for key in trained:
                recorder.unit, unit = key, units[key]
                if not unit.on_host:
                    recorder.add("update", moved_bytes=3 * unit.parameters + 2 * unit.optimizer)
                del grads[key]

    return _record(dataclasses.replace(bare, ignored=()), device, run, has_layers=False)
