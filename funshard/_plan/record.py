"""The events of a step that runs on fake tensors: every operator that allocates, computes or sends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from .. import _torch
from .even_indices import MOST_VALUES, fill_collective, give_even_indices, has_known_integers
from .events import Category, Collective, EventKind, EventList

__all__ = ["StepRecorder"]

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
_OUTPUT_CATEGORY: Mapping[str, Category] = {
    "all_gather": "gathered",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients",
}


class StepRecorder(_torch.DispatchMode):
    """A mode that records the events of the step inside it, and follows every storage from its allocation until it is freed.

    A unit's name is that of the last weights or gathered buffer that was read.
    """

    def __init__(self, shards: Mapping[str, Tensor], axes: Mapping[str, tuple[str, int]]) -> None:
        super().__init__()
        self.events = EventList()
        self._axes = axes  # by name of process group, the mesh axis and its size
        self._storages: dict[int, tuple[Category, int]] = {}
        self._units = {_torch.storage_id(shard): key for key, shard in shards.items()}
        self._shards = {_torch.storage_id(shard): shard.numel() for shard in shards.values()}
        self._lazy: dict[int, int] = {}  # the bytes of storages that copies share until they are written to
        self._sending: dict[int, int] = {}  # the event of the collective that fills a storage
        self._unit = ""
        self._was_backward = False

    def hold(self, tree: Any) -> None:
        """Leave out the tensors in a tree: they are held between steps."""
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor):
                self._storages[_torch.storage_id(x)] = "parameters", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.is_no_operator(func):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._place(name, inputs)
        if name == "wait_tensor":
            self._wait(args[0])
            if not _torch.is_fake(args[0]):
                with _torch.real_tensors():
                    func(*args, **kwargs)
            return args[0]  # a fake result would have another storage
        with self._real_where(inputs):
            out = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
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
        memory: dict[Category, int] = {}
        for x in outputs:
            self._allocate(x, memory, is_lazy=name == "_lazy_clone")
        for x in _torch.mutated_args(func, args, kwargs):
            self._write(x, memory)
        traits = _torch.op_traits(func)
        flops = _torch.counted_flops(func, args, kwargs, out)
        moved = 0 if flops or traits.is_view else sum(x.nbytes for x in (*inputs, *outputs))
        if memory or flops or moved:
            self.events.add("compute", self._unit, memory, flops=flops, moved_bytes=moved)
        return out

    @staticmethod
    def _real_where(inputs: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operators on small tensors that have values compute them, as those of random states."""
        has_values = bool(inputs) and not any(_torch.is_fake(x) or x.numel() > MOST_VALUES for x in inputs)
        return _torch.real_tensors() if has_values else contextlib.nullcontext()

    def _place(self, name: str, inputs: list[Tensor]) -> None:
        """Note the phase and the unit that an operator belongs to."""
        if _torch.is_in_backward():
            self.events.phase, self._was_backward = "backward", True
        elif self._was_backward and self.events.phase == "backward":
            self.events.phase = "update"
        for x in inputs:
            storage = _torch.storage_id(x)
            if (key := self._units.get(storage)) is not None:
                self._unit = key
                is_read = self._shards.get(storage) != x.numel() or name.startswith("all_gather")
                if is_read and self.events.phase == "update":
                    self.events.phase = "forward"  # of another micro-batch

    def _allocate(
        self, x: Tensor, memory: dict[Category, int], category: Category | None = None, *, is_lazy: bool = False
    ) -> None:
        """Follow the storage of a result, if it is new. A lazy copy has no memory of its own before something writes to it."""
        storage = x.untyped_storage()
        at = _torch.storage_id_of(storage)
        if at in self._storages:
            return
        category = category or ("optimizer" if self.events.phase == "update" else "activations")
        size = 0 if is_lazy else storage.nbytes()
        if is_lazy:
            self._lazy[at] = storage.nbytes()
        self._storages[at] = category, size
        memory[category] = memory.get(category, 0) + size
        weakref.finalize(storage, self._free, at).atexit = False

    def _write(self, x: Tensor, memory: dict[Category, int]) -> None:
        """Count the memory of a lazy copy that an operator writes to."""
        if (size := self._lazy.pop(at := _torch.storage_id(x), 0)) and at in self._storages:
            category, _ = self._storages[at]
            self._storages[at] = category, size
            memory[category] = memory.get(category, 0) + size

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
            self.events.add("memory", self._unit, {category: change})

    def _free(self, at: int) -> None:
        """Add the release of a storage."""
        category, size = self._storages.pop(at, ("activations", 0))
        self._units.pop(at, None)
        self._lazy.pop(at, None)
        self._sending.pop(at, None)
        if size:
            self.events.add("memory", self._unit, {category: -size})

    def _wait(self, x: Tensor) -> None:
        """Add the wait for the collective that fills a tensor, if one does."""
        index = self._sending.pop(_torch.storage_id(x), None)
        if index is not None:
            self.events.add("wait", self._unit, after=(index,))

    def _send(self, name: str, args: Any, sent: Tensor, out: Tensor) -> None:
        """Add the start of a collective, with the memory of its output."""
        op = _COLLECTIVES[name]
        axis, ranks = self._axes.get(args[-1], (str(args[-1]), 1))
        memory: dict[Category, int] = {}
        category = _OUTPUT_CATEGORY.get(op)
        self._allocate(out, memory, category)
        for x in (out, sent) if category == "gradients" else (out,) if category else ():
            self._move(_torch.storage_id(x), category, memory)
        kind: EventKind = "gather" if op == "all_gather" else "reduce" if category else "exchange"
        at = _torch.storage_id(out)
        if op == "all_gather" and _torch.storage_id(sent) in self._units:
            self._units[at] = self._units[_torch.storage_id(sent)]
        self._sending[at] = self.events.add(
            kind, self._unit, memory, collective=Collective(op, axis, ranks, sent.nbytes, out.nbytes)
        )

    def _move(self, at: int, category: Category | None, memory: dict[Category, int]) -> None:
        """Count a storage as another category, now that its use is known."""
        old, size = self._storages.get(at, ("parameters", 0))
        if size and category and old != category:
            self._storages[at] = category, size
            memory[old] = memory.get(old, 0) - size
            memory[category] = memory.get(category, 0) + size
