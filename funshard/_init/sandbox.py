"""One run of one initialiser on some slots of a model: records what it touches and writes, and leaves the model unchanged."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # arguments of operators

from .. import _torch
from .._call.buffers import copy_buffer
from .._call.module_state import calling_thread, restore_modules
from .._core.tree import check_not_compiled, join_path
from .._torch.modules import find_reset

__all__ = ["InitFn", "InitSandbox", "Initialiser", "Slot", "find_initialisers", "find_slots", "format_slots"]


# --- The parameters and buffers of a model on the meta device, and the functions that initialise them ---

InitFn = Callable[[nn.Module], object]


@dataclass(eq=False)
class Slot:
    """A parameter or buffer that has a shape and no values: once, however many modules share it."""

    name: str
    path: str
    """The path of the first module that has it."""
    tensor: Tensor
    param: bool
    modules: list[nn.Module] = field(default_factory=list)
    """Every module that has it."""

    @property
    def kind(self) -> str:
        """The word for it in an error."""
        return "parameter" if self.param else "buffer"

    @property
    def owner(self) -> str:
        """The first module that has it, for an error."""
        return f"module '{self.path}' ({type(self.modules[0]).__name__})"

    @property
    def nbytes(self) -> int:
        """The size of its values in bytes."""
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def uses_nan(self) -> bool:
        """Whether NaN marks elements that nobody wrote. torch has no test for NaN in dtypes of 8 bits."""
        return (self.tensor.is_floating_point() or self.tensor.is_complex()) and self.tensor.itemsize > 1

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for it, in its own order of the dimensions."""
        return torch.empty_like(self.tensor, device=device, requires_grad=False)

    def make_tensor(self, values: Tensor) -> Tensor:
        """Return a tensor on these values' memory, with the type and the attributes of the slot's own tensor."""
        put = nn.Parameter(values, self.tensor.requires_grad) if self.param else values.detach()
        vars(put).update(vars(self.tensor))
        return put


def find_slots(model: nn.Module) -> dict[int, Slot]:
    """Return the slots by the ids of their tensors, in the order of the modules.

    Raises:
        TypeError: For a ScriptModule, and for a tensor that is no dense nn.Parameter or buffer.
    """
    found: dict[int, Slot] = {}
    for path, module in model.named_modules():
        check_not_compiled(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"init: module '{path}' is a ScriptModule: expected one whose parameters Python can give it")
        for param, own in ((True, module._parameters), (False, module._buffers)):
            for attr, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                name = join_path(path, attr)
                if tensor.layout is not torch.strided or (param and type(tensor) is not nn.Parameter):
                    raise TypeError(f"init: '{name}': expected a dense nn.Parameter or buffer, got {type(tensor).__name__}")
                found.setdefault(id(tensor), Slot(name, path, tensor, param)).modules.append(module)
    return found


@dataclass(frozen=True, eq=False)
class Initialiser:
    """A function that gives a module's parameters and buffers their values, and maybe those of modules in it."""

    path: str
    module: nn.Module
    run: Callable[[], object]

    def __str__(self) -> str:
        return f"module '{self.path}' ({type(self.module).__name__})"


def find_initialisers(model: nn.Module, init_fn: InitFn | None) -> list[Initialiser]:
    """Return the initialisers in the order of ``nn.Module.apply``: ``init_fn`` of each module, or its reset_parameters."""
    paths = {module: path for path, module in model.named_modules()}

    def of(module: nn.Module) -> Callable[[], object] | None:
        return find_reset(module) if init_fn is None else functools.partial(init_fn, module)

    found = ((module, of(module)) for module in _children_first(model, set()))
    return [Initialiser(paths[module], module, run) for module, run in found if run is not None]


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules inside a module and then itself, each once."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def format_slots(slots: Iterable[Slot], most: int = 3) -> str:
    """Return the names of a few slots, for an error."""
    every = sorted(slot.name for slot in slots)
    return ", ".join(f"'{name}'" for name in every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


# --- One run of an initialiser ---

KINDS = ("_parameters", "_buffers")
META = torch.device("meta")
DEVICE_READS = tuple(getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu", "is_cuda"))


class InitOutcome(NamedTuple):
    """The slots that a run of an initialiser touched and wrote, and its error."""

    touched: set[Slot]
    written: set[Slot]
    error: Exception | None


class InitSandbox:
    """A model with stand-ins for its tensors: slots are on the meta device, other tensors are copied on write.

    Create it within `restore_modules` of the whole model, which puts the model's own tensors back.
    """

    def __init__(self, model: nn.Module, slots: Mapping[int, Slot], seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._memory = {slot: slot.empty(META) for slot in slots.values()}
        put: dict[int, Tensor] = {key: slot.make_tensor(self._memory[slot]) for key, slot in slots.items()}
        self._slots = {id(put[key]): slot for key, slot in slots.items()}
        self._storages = {_torch.storage_id(memory): slot for slot, memory in self._memory.items()}
        for module in model.modules():
            for kind in KINDS:
                own: dict[str, Tensor | None] = vars(module)[kind]
                for tensor in own.values():
                    if tensor is not None and id(tensor) not in put:
                        copy = copy_buffer(tensor.detach(), tensor.dtype)
                        put[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if kind == "_parameters" else copy
                vars(module)[kind] = {attr: None if x is None else put[id(x)] for attr, x in own.items()}

    def run(self, one: Initialiser, values: Mapping[Slot, Tensor]) -> InitOutcome:
        """Run an initialiser on these values, which it writes to, and on the meta device for the other slots.

        torch's generators are seeded by the seed and the path of its module. Afterwards the modules are as before, also
        where they noted that they were initialised.
        """
        put = {slot: slot.make_tensor(value) for slot, value in values.items()}
        modules = dict(one.module.named_modules(prefix=one.path))
        modules |= {f"{slot.name} {i}": module for slot in put for i, module in enumerate(slot.modules)}
        own_memory = {_torch.storage_id(x): slot for slot, x in put.items() if not slot.uses_nan}
        watch, error = _SlotWatch({**self._storages, **own_memory}), None
        with restore_modules(modules, calling_thread()):
            placed: list[tuple[dict[str, Tensor | None], str, Tensor, Slot]] = []
            for module in dict.fromkeys(modules.values()):
                for kind in KINDS:
                    mine = dict(vars(module)[kind])
                    vars(module)[kind] = mine
                    for attr, twin in list(mine.items()):
                        if slot := self._slots.get(id(twin)):
                            mine[attr] = put.get(slot, twin)
                            placed.append((mine, attr, mine[attr], slot))
            _seed_generators(self._seed, one.path, self._device)
            try:
                with watch, _DeviceWatch(watch):
                    one.run()
            except Exception as failed:
                error = failed
            for mine, attr, was, slot in placed:
                error = self._adopt_value(mine.get(attr), was, slot, values, watch) or error
        return InitOutcome(watch.touched, watch.written, error)

    def _adopt_value(
        self, now: object, was: Tensor, slot: Slot, values: Mapping[Slot, Tensor], watch: _SlotWatch
    ) -> Exception | None:
        """Copy the values of a tensor that replaced a slot's, or of one that was given other memory (``.data``)."""
        value, tensor = values.get(slot), slot.tensor
        memory = self._memory[slot] if value is None else value
        if now is was and _same_memory(was, memory):
            return None
        watch.touched.add(slot)
        if value is None:
            was.data = memory
        elif isinstance(now, Tensor) and (now.shape, now.dtype) == (tensor.shape, tensor.dtype):
            value.copy_(now)
            watch.written.add(slot)
        else:
            got = f"{list(now.shape)} {now.dtype}" if isinstance(now, Tensor) else type(now).__name__
            return ValueError(f"expected {list(tensor.shape)} {tensor.dtype} in the place of '{slot.name}', got {got}")
        return None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors begin at one element of the same storage."""
    return _torch.storage_id(a) == _torch.storage_id(b) and a.storage_offset() == b.storage_offset()


class _SlotWatch(_torch.DispatchMode):
    """A dispatch mode that records which slots operators touch and write, by their storages."""

    def __init__(self, storages: Mapping[int, Slot]) -> None:
        super().__init__()
        self._storages = storages
        self.touched: set[Slot] = set()
        self.written: set[Slot] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.touch((args, kwargs))
        self.written |= self._slots_of(_torch.mutated_args(func, args, kwargs))
        return func(*args, **kwargs)

    def touch(self, tree: object) -> None:
        """Record the slots of a tree's tensors as touched."""
        self.touched |= self._slots_of(pytree.tree_leaves(tree))

    def _slots_of(self, values: Iterable[object]) -> set[Slot]:
        """Return the slots whose memory is among the values."""
        ids = (_torch.storage_id(x) for x in values if isinstance(x, Tensor) and _torch.is_plain(x))
        return {slot for key in ids if (slot := self._storages.get(key))}


class _DeviceWatch(TorchFunctionMode):
    """Records slots whose device is asked for: ``trunc_normal_`` and others of torch write nothing to a meta tensor."""

    def __init__(self, watch: _SlotWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DEVICE_READS:
            self._watch.touch(args)
        return func(*args, **(kwargs or {}))


def _seed_generators(seed: int, path: str, device: torch.device) -> None:
    """Seed the generators that initialisers draw from: the CPU's and the device's."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7], "big")
    torch.default_generator.manual_seed(number)
    if _torch.is_accelerator(device):
        torch.get_device_module(device.type).default_generators[device.index].manual_seed(number)
