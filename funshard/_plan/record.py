"""The events of a user's step that runs on fake tensors, on a process group of ranks in name only."""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from .. import _torch
from .._core.mesh import Mesh, ProcessAxis
from .._core.spec import PartitionSpec
from .._wire.host import HOST
from .at_rest import Init, is_on_host, make_shard
from .timeline import Category, Collective, Event, EventKind, Phase

__all__ = ["StepRecorder", "has_parameter", "record_step"]


# --- Values for indices that a model computes from its data, such as each token's experts, where tensors have shapes alone ---

MOST_VALUES = 2**20
"""The elements of the largest tensor with values that a planned step computes with."""

_RANKING = {"topk", "sort", "argmax", "argmin", "max", "min", "multinomial"}


def give_even_indices(name: str, args: Any, out: Any) -> Any:
    """Return an operator's results, with indices that it chose among spread evenly: a router then loads all experts alike."""
    if name not in _RANKING:
        return out
    many = isinstance(out, tuple | list)
    results: list[Any] = list(out) if many else [out]
    for i, x in enumerate(results):
        if not isinstance(x, Tensor) or not _torch.is_fake(x) or x.numel() > MOST_VALUES:
            continue
        if (x.dtype == torch.int64 and args[0].is_floating_point()) or (name == "sort" and i == 1):
            with _torch.real_tensors():
                results[i] = (torch.arange(x.numel(), device=x.device) % _count_choices(name, args)).view(x.shape)
    return tuple(results) if many else results[0]


def has_known_integers(name: str, out: Any) -> bool:
    """Return whether an operator without inputs makes a tensor of integers, such as positions: models look at their values."""
    known = name in ("arange", "full", "ones", "zeros") and isinstance(out, Tensor) and not out.is_floating_point()
    return known and not out.is_meta and not out.is_complex() and out.numel() <= MOST_VALUES


def _count_choices(name: str, args: Any) -> int:
    """Return how many elements an operator chose among, and at least 1."""
    dim = args[2] if name == "topk" and len(args) > 2 else args[1] if name != "topk" and len(args) > 1 else -1
    x = args[0]
    return max(x.shape[dim] if x.dim() and isinstance(dim, int) and not isinstance(dim, bool) else x.numel(), 1)


def fill_collective(op: str, sent: Tensor, out: Tensor, ranks: int) -> None:
    """Write what a collective gives where every rank has the values of this one."""
    if op == "all_reduce":
        out.mul_(ranks)
    elif op == "all_gather":
        out.copy_(torch.cat([sent] * ranks).view(out.shape))
    elif out.shape == sent.shape:
        out.copy_(sent)


# --- The events of a step that runs on fake tensors: every operator that allocates, computes or sends ---

_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


class StepRecorder(_torch.DispatchMode):
    """A mode that records the events of the step inside it, and follows every storage from its allocation until it is freed.

    A unit's name is that of the last weights or gathered buffer that was read.
    """

    _counts_moves = True
    _output_category: ClassVar[Mapping[str, Category]] = {
        "all_gather": "gathered",
        "reduce_scatter": "gradients",
        "all_reduce": "gradients",
    }

    def __init__(self, shards: Mapping[str, Tensor], axes: Mapping[str, tuple[str, int]], device: torch.device = HOST) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.phase: Phase = "forward"
        self._axes = axes  # by name of process group, the mesh axis and its size
        self._device = device
        self._on_host = set[int]()  # the storages in host memory, where the device has its own
        self._copying: dict[int, int] = {}  # the event of the copy between host and device that fills a storage
        self._storages: dict[int, tuple[Category, int]] = {}
        self._units = {_torch.storage_id(shard): key for key, shard in shards.items()}
        self._shards = {_torch.storage_id(shard): shard.numel() for shard in shards.values()}
        self._lazy: dict[int, int] = {}  # the bytes of storages that copies share until they are written to
        self._sending: dict[int, int] = {}  # the event of the collective that fills a storage
        self.unit = ""
        self._was_backward = False

    def add(self, kind: EventKind, memory: Mapping[Category, int] | None = None, **fields: Any) -> int:
        """Add an event of the unit that is worked on, and return its index."""
        self.events.append(Event(kind, self.phase, self.unit, memory or {}, **fields))
        return len(self.events) - 1

    def hold(self, tree: Any, on_host: Iterable[Tensor] = ()) -> None:
        """Leave out the tensors in a tree: they are held between steps."""
        self._on_host.update(map(_torch.storage_id, on_host))
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor):
                at = _torch.storage_id(x)
                self._storages[at] = "parameters", 0
                if self._is_on_host(x):
                    self._on_host.add(at)

    def _is_on_host(self, x: Tensor) -> bool:
        """Return whether a tensor is in host memory, and the step computes elsewhere."""
        return x.device.type == HOST.type != self._device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.is_no_operator(func):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._place(name, inputs)
        traits, is_sent = _torch.op_traits(func), func.namespace == "_c10d_functional"
        if self._copying and not (is_sent or traits.is_view or name.startswith("new_")):
            self.wait(inputs)  # which is read; a collective waits itself, and the device goes on
        if name == "wait_tensor":
            self.wait(inputs, self._sending)
            if not _torch.is_fake(args[0]):
                with _torch.real_tensors():
                    func(*args, **kwargs)
            return args[0]  # a fake result would have another storage
        has_values = bool(inputs) and not any(_torch.is_fake(x) or x.numel() > MOST_VALUES for x in inputs)  # as random states
        with _torch.real_tensors() if has_values else contextlib.nullcontext():
            out = func(*args, **kwargs)
        if is_sent:
            out = args[0] if name.endswith("_") else kwargs.get("out", out)
            self._send(name, args, args[0], out)
            if not _torch.is_fake(out):
                with _torch.real_tensors():
                    fill_collective(_COLLECTIVES[name], args[0], out, self._axes[args[-1]][1])
            return out
        if not inputs and has_known_integers(name, out):
            with _torch.real_tensors():
                out = func(*args, **kwargs)
        out = give_even_indices(name, args, out)
        outputs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        memory = Counter[Category]()
        for x in outputs:
            self._allocate(x, memory, self._category_of(inputs), is_lazy=name == "_lazy_clone")
        for x in _torch.mutated_args(func, args, kwargs):
            self._write(x, memory)
        if name in ("copy_", "_to_copy") and self._is_on_host(source := inputs[-1]) != self._is_on_host(outputs[0]):
            at = _torch.storage_id(outputs[0])
            self._copying[at] = self.add("copy", memory, moved_bytes=source.nbytes)
            return out
        flops = _torch.counted_flops(func, args, kwargs, out)
        moved = 0 if flops or traits.is_view or not self._counts_moves else sum(x.nbytes for x in (*inputs, *outputs))
        if memory or flops or moved:
            self.add("compute", memory, flops=flops, moved_bytes=moved)
        return out

    def _place(self, name: str, inputs: list[Tensor]) -> None:
        """Note the phase and the unit that an operator belongs to."""
        if _torch.is_in_backward():
            self.phase, self._was_backward = "backward", True
        elif self._was_backward and self.phase == "backward":
            self.phase = "update"
        for x in inputs:
            storage = _torch.storage_id(x)
            if (key := self._units.get(storage)) is not None:
                self.unit = key
                is_read = self._shards.get(storage) != x.numel() or name.startswith("all_gather")
                if is_read and self.phase == "update":
                    self.phase = "forward"  # of another micro-batch

    def _category_of(self, inputs: list[Tensor]) -> Category:
        """Return the category of what an operator on these allocates; a collective that takes it may know better."""
        return "optimizer" if self.phase == "update" else "activations"

    def _allocate(self, x: Tensor, memory: Counter[Category], category: Category, *, is_lazy: bool = False) -> None:
        """Follow the storage of a result, if it is new. A lazy copy has no memory of its own before something writes to it."""
        storage = x.untyped_storage()
        at = _torch.storage_id_of(storage)
        if at in self._storages:
            return
        size = storage.nbytes()
        if self._is_on_host(x):
            self._on_host.add(at)
            size = 0
        if is_lazy:
            self._lazy[at], size = size, 0
        self._storages[at] = category, size
        memory[category] += size
        weakref.finalize(storage, self._free, at).atexit = False

    def _write(self, x: Tensor, memory: Counter[Category]) -> None:
        """Count the memory of a lazy copy that an operator writes to."""
        if (size := self._lazy.pop(at := _torch.storage_id(x), 0)) and at in self._storages:
            category = self._storages[at][0]
            self._storages[at] = category, size
            memory[category] += size

    def resize(self, storage: UntypedStorage, nbytes: int) -> None:
        """Follow a storage that is freed or allocated while tensors have it, as FSDP2's gathered buffers are."""
        at = _torch.storage_id_of(storage)
        if at not in self._storages:
            self._storages[at] = "gathered", storage.nbytes()
            weakref.finalize(storage, self._free, at).atexit = False
        category, size = self._storages[at]
        change = nbytes - storage.nbytes()
        self._storages[at] = category, size + change
        if change:
            self.add("memory", {category: change})

    def _free(self, at: int) -> None:
        """Add the release of a storage."""
        category, size = self._storages.pop(at, ("activations", 0))
        self._units.pop(at, None)
        self._lazy.pop(at, None)
        self._sending.pop(at, None)
        self._copying.pop(at, None)
        self._on_host.discard(at)
        if size:
            self.add("memory", {category: -size})

    def wait(self, inputs: Iterable[Tensor], pending: dict[int, int] | None = None) -> None:
        """Add the wait for the copies that fill these tensors, or for what else is pending."""
        pending = self._copying if pending is None else pending
        for at in map(_torch.storage_id, inputs):
            if (index := pending.pop(at, None)) is not None:
                self.add("wait", after=(index,))

    def _send(self, name: str, args: Any, sent: Tensor, out: Tensor) -> None:
        """Add the start of a collective, with the memory of its output."""
        op = _COLLECTIVES[name]
        axis, ranks = self._axes.get(args[-1], (str(args[-1]), 1))
        memory = Counter[Category]()
        category = self._output_category.get(op)
        self._allocate(out, memory, category or self._category_of([sent]))
        for x in (out, sent) if category == "gradients" else (out,) if category else ():
            self._move(_torch.storage_id(x), category, memory)
        kind: EventKind = "gather" if op == "all_gather" else "reduce" if category else "exchange"
        at, copy = _torch.storage_id(out), self._copying.pop(_torch.storage_id(sent), None)
        if op == "all_gather" and _torch.storage_id(sent) in self._units:
            self._units[at] = self._units[_torch.storage_id(sent)]
        one, after = Collective(op, axis, ranks, sent.nbytes, out.nbytes), () if copy is None else (copy,)
        self._sending[at] = self.add(kind, memory, collective=one, after=after)

    def _move(self, at: int, category: Category | None, memory: Counter[Category]) -> None:
        """Count a storage as another category, now that its use is known."""
        old, size = self._storages.get(at, ("parameters", 0))
        if size and category and old != category:
            self._storages[at] = category, size
            memory[old] -= size
            memory[category] += size


# --- A user's step run on shapes alone: fake tensors, on a process group of ranks in name only ---


def has_parameter(step: Callable[..., Any], name: str) -> bool:
    """Return whether a step has a parameter of this name."""
    return name in inspect.signature(step).parameters


def record_step(
    step: Callable[..., Any], spec: PartitionSpec, batch: Any, init: Init | None, **options: Any
) -> tuple[list[Event], int]:
    """Return the events of ``step(params, state, batch)``, run on fake tensors, and the bytes of its batch.

    Raises:
        RuntimeError: If this process has a process group, or the step sends nothing although its spec has several ranks.
        NotImplementedError: Naming the unit, for offloading where the device is the host.
    """
    sizes = dict(spec.bound_mesh.sizes)
    device = next((x.device for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and not x.is_meta), torch.device("cpu"))
    if device.type == "cpu" and (unit := next((unit for unit in spec if unit.p.offloads), None)):
        raise NotImplementedError(
            f"unit '{unit.key}' has {unit.p}, and where the device is the host nothing is copied: expected a batch on an "
            "accelerator, or a plan without step="
        )
    with _torch.fake_world(math.prod(sizes.values())), torch.enable_grad():
        groups, stride = dict[str, tuple[str, int]](), math.prod(sizes.values())  # the axis and size of each group
        for axis, size in sizes.items():
            stride //= size
            groups[_torch.axis_group(range(0, size * stride, stride))] = axis, size
        axes = ((axis, ProcessAxis(size, 0, group)) for group, (axis, size) in groups.items())
        bound = spec.on(Mesh(tuple(axes), device.type))
        if has_parameter(step, "spec"):
            options["spec"] = bound
        with _torch.fake_mode():
            params = {unit.key: make_shard(bound, unit, HOST if is_on_host(unit, bound) else device) for unit in bound}
            state: Any = init({key: x for key, x in params.items() if bound.by_key[key].requires_grad}) if init else {}
            fake_batch = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device=device), batch)
            recorder = StepRecorder(params, groups, device)
            recorder.hold((params, state, fake_batch))
            with recorder, _torch.report_resizes(recorder.resize):
                result = step(params, state, fake_batch, **options)
            size = sum(x.nbytes for x in pytree.tree_leaves(fake_batch) if isinstance(x, Tensor))
            events = list(recorder.events)
            del result
    if any(axis > 1 for axis in sizes.values()) and not any(event.collective for event in events):
        raise RuntimeError(
            f"plan: the step sends nothing, and its mesh has axes {sizes}: expected a step that takes spec= and gives it to "
            "functional_call, or one whose spec is bound to no mesh"
        )
    return events, size
