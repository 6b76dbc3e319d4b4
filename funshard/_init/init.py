"""init, init_buffers: the first values of a model on the meta device."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # arguments of operators

from .. import _torch
from .._call.buffers import copy_buffer
from .._call.module_state import calling_thread, restore_modules
from .._core.checks import bind_spec
from .._core.layout import Params, to_memory_order, unflatten_unit
from .._core.spec import PartitionSpec
from .._core.tree import check_not_compiled, join_path
from .._core.unit import Unit, global_shape
from .._sharding.hashes import hash_bits
from .._sharding.sharding import check_rank, collect_full_params
from .._spec.table import log_spec
from .._torch.modules import find_reset
from .._wire.flow import store_slice
from .._wire.global_params import flatten_global, scatter_global
from ..collectives._agree import check_ranks_agree, report_to_ranks
from ..collectives._world import has_peers

InitFn = Callable[[nn.Module], object]
META = torch.device("meta")


# --- The parameters and buffers of a model on the meta device, and the functions that initialise them ---


@dataclass(eq=False)
class _Slot:
    """A parameter or buffer without values: once, however many modules share it."""

    name: str
    tensor: Tensor
    is_param: bool
    modules: list[nn.Module] = field(default_factory=list)
    owner: nn.Module | None = None
    """The first of these modules whose initialiser touches it; those of the others do not, as if it was tied after them."""
    reached_by: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def has_nan(self) -> bool:
        """Whether NaN marks elements that nobody wrote. torch has no test for NaN in dtypes of 8 bits."""
        return (self.tensor.is_floating_point() or self.tensor.is_complex()) and self.tensor.itemsize > 1

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_like(self.tensor, device=device, requires_grad=False)

    def make_tensor(self, values: Tensor) -> Tensor:
        """Return a tensor on the memory of ``values``, with the type and the attributes of the slot's own."""
        tensor = nn.Parameter(values, self.tensor.requires_grad) if self.is_param else values.detach()
        vars(tensor).update(vars(self.tensor))
        return tensor

    def __str__(self) -> str:
        return f"{'parameter' if self.is_param else 'buffer'} '{self.name}'"

    def is_borrowed_by(self, module: nn.Module) -> bool:
        """Whether a module has the tensor that another one initialises."""
        return self.owner not in (None, module) and module in self.modules

    @property
    def place(self) -> str:
        return f"module '{self.name.rpartition('.')[0]}' ({type(self.modules[0]).__name__})"


@dataclass(eq=False)
class _Initialiser:
    """A function that gives a module's parameters and buffers their values, and maybe those of modules inside it."""

    path: str
    module: nn.Module
    run: Callable[[], object]
    own: set[_Slot]
    reach: set[_Slot]
    """The slots of its module, and all others that it touches."""

    def __str__(self) -> str:
        return f"the initialiser of module '{self.path}' ({type(self.module).__name__})"


def _copy_own_tensors(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Give a module new dicts of parameters and of buffers, within `restore_modules`. Return these with their names."""
    names = ("_parameters", "_buffers")
    vars(module).update({name: dict(vars(module)[name]) for name in names})
    return [(vars(module)[name], name) for name in names]


def _find_slots(model: nn.Module) -> dict[int, _Slot]:
    """Return the slots by the ids of their tensors. Give the modules copies of tensors that have values."""
    copies: dict[int, Tensor] = {}
    slots: dict[int, _Slot] = {}
    for path, module in model.named_modules():
        check_not_compiled(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"init: module '{path}' is a ScriptModule: expected one whose parameters Python can give it")
        for tensors, kind in _copy_own_tensors(module):
            for attr, tensor in ((attr, tensor) for attr, tensor in tensors.items() if tensor is not None):
                slot = _Slot(join_path(path, attr), tensor, kind == "_parameters")
                if not tensor.is_meta:
                    if id(tensor) not in copies:
                        copies[id(tensor)] = slot.make_tensor(copy_buffer(tensor.detach(), tensor.dtype))
                    tensors[attr] = copies[id(tensor)]
                    continue
                if tensor.layout is not torch.strided or (slot.is_param and type(tensor) is not nn.Parameter):
                    what = type(tensor).__name__
                    raise TypeError(f"init: '{slot.name}': expected a dense nn.Parameter or buffer, got {what}")
                slots.setdefault(id(tensor), slot).modules.append(module)
    return slots


def _find_initialisers(model: nn.Module, init_fn: InitFn | None, slots: Iterable[_Slot]) -> list[_Initialiser]:
    """Return the initialisers in the order of ``nn.Module.apply``: ``init_fn`` of each module, or its reset_parameters."""
    paths, children_first = {module: path for path, module in model.named_modules()}, list[nn.Module]()
    nn.Module.apply(model, children_first.append)
    own: dict[nn.Module, set[_Slot]] = defaultdict(set)
    for slot in slots:
        for module in slot.modules:
            own[module].add(slot)
    runs = ((x, find_reset(x) if init_fn is None else partial(init_fn, x)) for x in dict.fromkeys(children_first))
    return [_Initialiser(paths[x], x, run, own[x], set()) for x, run in runs if run is not None]


class _TouchedSlots(TorchFunctionMode):
    """A mode that collects the slots that functions of torch read or write, by their storages.

    A question for the device counts: ``trunc_normal_`` and others of torch write nothing to a meta tensor.
    """

    DEVICE_READS = tuple(getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu", "is_cuda"))

    def __init__(self, storages: Mapping[int, _Slot]) -> None:
        super().__init__()
        self._storages = storages
        self.slots: set[_Slot] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__" or func in self.DEVICE_READS:
            tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and _torch.is_plain(x))
            self.slots.update(slot for x in tensors if (slot := self._storages.get(_torch.storage_id(x))))
        return func(*args, **(kwargs or {}))


# --- The values that a model's initialisers compute from a seed, a few tensors at a time, as often as they are needed ---


@contextlib.contextmanager
def _open_values(
    model: nn.Module, spec: PartitionSpec, init_fn: InitFn | None, seed: int, device: torch.device
) -> Generator[_InitialValues]:
    """Yield the model's values; afterwards restore the model's tensors and torch's random state."""
    devices = [device] if _torch.is_accelerator(device) else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"))
        stack.enter_context(restore_modules(dict(model.named_modules(remove_duplicate=False)), calling_thread()))
        stack.enter_context(torch.inference_mode(False))  # so that writes are counted
        if torch.get_default_device().type == "meta":  # as within `with torch.device("meta")`, where the model was made
            stack.enter_context(device)
        with _torch.below_transforms():
            values = _InitialValues(model, spec, init_fn, seed, device)
        yield values


class _InitialValues:
    """The values that initialisers give slots, within `_open_values`: they depend on the model alone.

    Each initialiser runs on the meta device first, which shows its reach; only slots in its reach have values when it runs
    again. A slot's value is the result of all initialisers that reach it, in order.
    """

    def __init__(self, model: nn.Module, spec: PartitionSpec, init_fn: InitFn | None, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._by_tensor = _find_slots(model)
        self.slots = [*self._by_tensor.values()]
        self._storages = {_torch.storage_id(slot.tensor): slot for slot in self.slots}
        self._runs = _find_initialisers(model, init_fn, self.slots)
        sizes = [sum(slot.nbytes for slot in one.own) for one in self._runs]
        self._most = max(*sizes, *(unit.numel * unit.dtype.itemsize for unit in spec), 0, 0)
        """The bytes of the largest unit, or of the largest module's own tensors."""
        for one in self._runs:
            with warnings.catch_warnings():  # which come again when it runs with values
                warnings.simplefilter("ignore")
                touched, _, error = self._run(one, {})
            inside = set(one.module.modules())
            if error and (not one.own or any(not inside.isdisjoint(slot.modules) for slot in {*self.slots} - one.own)):
                raise RuntimeError(
                    f"init: {one} failed: {type(error).__name__}: {error}; it runs on the meta device first, without values, "
                    "which shows the modules that it writes to: expected one that runs there, or init_fn=, a function that "
                    "initialises each module by itself"
                ) from error
            one.reach = touched
        reach = {one.module: one.reach for one in self._runs}
        for slot in self.slots:
            slot.owner = next((x for x in slot.modules if slot in reach.get(x, ())), None)
        for i, one in enumerate(self._runs):
            one.reach = {slot for slot in one.own | one.reach if not slot.is_borrowed_by(one.module)}
            for slot in one.reach:
                slot.reached_by.append(i)

    def check_reached(self, slots: Iterable[_Slot]) -> None:
        """Raise ValueError, naming the module, for a slot that is in no initialiser's reach."""
        if slot := next((slot for slot in slots if not slot.reached_by), None):
            raise ValueError(
                f"init: {slot}: {slot.place} has no reset_parameters, and that of no module around it gives it values: "
                "expected one, or init_fn=, a function that is called with every module and initialises it"
            )

    def fill(self, wanted: Mapping[_Slot, Tensor]) -> None:
        """Write the values of these slots into these tensors, and meanwhile hold others that are made with them."""
        left = dict(wanted)
        with _torch.below_transforms():
            while left:
                runs, slots = self._find_connected(next(iter(left)))
                self._check_held_bytes([slot for slot in slots if slot not in wanted], runs)
                values = {slot: wanted[slot] if slot in wanted else slot.empty(self._device) for slot in slots}
                for value in (value for slot, value in values.items() if slot.has_nan):
                    value.fill_(torch.nan)  # which shows what is never written
                written: set[_Slot] = set()
                for one in runs:
                    touched, wrote, error = self._run(one, {slot: values[slot] for slot in one.reach})
                    if beyond := touched - one.reach:
                        raise ValueError(
                            f"init: {one} touches {_format_slots(beyond)}, which it did not on the meta device: expected one "
                            "that writes to the same tensors whatever their values, or init_fn="
                        )
                    if error:
                        raise RuntimeError(f"init: {one} failed: {type(error).__name__}: {error}") from error
                    written |= wrote
                for slot in [slot for slot in slots if slot in left]:
                    _check_set(slot, left.pop(slot), slot in written)

    def _find_connected(self, first: _Slot) -> tuple[list[_Initialiser], list[_Slot]]:
        """Return the initialisers that must run for this slot, in their order, and all slots in their reach."""
        runs: set[int] = set()
        slots, new = {first: None}, [first]
        while new:
            more = {i for slot in new for i in slot.reached_by} - runs
            new = [slot for i in sorted(more) for slot in self._runs[i].reach if slot not in slots]
            runs, slots = runs | more, slots | dict.fromkeys(new)
        return [self._runs[i] for i in sorted(runs)], list(slots)

    def _check_held_bytes(self, beside: list[_Slot], runs: list[_Initialiser]) -> None:
        """Raise ValueError if initialisers that touch other units would hold more than the largest unit."""
        if (nbytes := sum(slot.nbytes for slot in beside)) > self._most:
            widest = max(runs, key=lambda one: sum(slot.nbytes for slot in one.reach - one.own))
            raise ValueError(
                f"init: {widest} touches {_format_slots(widest.reach - widest.own or beside)}, in other units: with it "
                f"{nbytes:,} bytes would be held beside a unit, and the largest unit has {self._most:,}; expected an init_fn "
                "that leaves each module to itself, or a policy with one unit around them"
            )

    def _run(self, one: _Initialiser, values: Mapping[_Slot, Tensor]) -> tuple[set[_Slot], set[_Slot], Exception | None]:
        """Run an initialiser on these values, others on the meta device. Return what it touched, what it wrote, its error.

        torch's generators are seeded by the seed and the path of its module. Afterwards the modules are as before.
        """
        modules = dict(one.module.named_modules(prefix=one.path))
        modules |= {f"{slot.name} {i}": module for slot in values for i, module in enumerate(slot.modules)}
        memory, put = {slot: value.data for slot, value in values.items()}, dict[_Slot, Tensor]()  # which count writes anew
        placed: list[tuple[dict[str, Tensor | None], str, _Slot]] = []
        error: Exception | None = None
        with restore_modules(modules, calling_thread()):
            for module, (tensors, _) in ((x, own) for x in dict.fromkeys(modules.values()) for own in _copy_own_tensors(x)):
                for attr, tensor in tensors.items():
                    slot = self._by_tensor.get(id(tensor))
                    if slot and one.module is module and slot.is_borrowed_by(module):
                        tensors[attr] = slot.make_tensor(slot.empty(META))
                    elif slot:
                        if slot not in put:
                            put[slot] = slot.make_tensor(memory.setdefault(slot, slot.empty(META)))
                        placed.append((tensors, attr, slot))
                        tensors[attr] = put[slot]
            on_meta = {_torch.storage_id(x): slot for slot, x in put.items() if slot not in values}
            number = int.from_bytes(hashlib.sha256(f"{self._seed} {one.path}".encode()).digest()[:7], "big")
            torch.default_generator.manual_seed(number)
            if _torch.is_accelerator(self._device):
                torch.get_device_module(self._device.type).default_generators[self._device.index].manual_seed(number)
            touched = _TouchedSlots({**self._storages, **on_meta})
            try:
                with touched:
                    one.run()
            except Exception as failed:
                error = failed
            for tensors, attr, slot in placed:
                now, value = tensors.get(attr), memory[slot]  # another tensor, or one that was given other memory (``.data``)
                places = [(_torch.storage_id(x), x.storage_offset(), x.stride()) for x in (put[slot], value)]
                if now is put[slot] and places[0] == places[1]:
                    continue
                if slot not in values:
                    touched.slots.add(slot)
                elif isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
                    value.copy_(now.detach().clone())
                else:
                    got = f"{list(now.shape)} {now.dtype}" if isinstance(now, Tensor) else type(now).__name__
                    error = ValueError(f"expected {list(value.shape)} {value.dtype} in the place of '{slot.name}', got {got}")
        written = {slot for slot in put if _torch.version(memory[slot]) or _torch.version(put[slot])}
        return touched.slots | written, written, error  # a function of C++ or of TorchScript is not seen, but what it writes


def _check_set(slot: _Slot, value: Tensor, is_written: bool) -> None:
    """Raise ValueError if a slot was left without values."""
    if not value.numel() or _torch.is_fake(value):
        return
    pieces = value.reshape(-1).split(1 << 24)  # a mask of all of it would be memory
    if any(piece.isnan().any() for piece in pieces) if slot.has_nan else not is_written:
        hint = "an init_fn is all that initialises a module, and may call its reset_parameters"
        if isinstance(slot.modules[0], ParametrizationList):
            hint = "an init_fn can assign the weight that is computed from it: recipes.md, 'A model that does not fit'"
        raise ValueError(
            f"init: {slot} of {slot.place} was left without values, or has some that are NaN: expected its initialiser to "
            f"write all of it; {hint}"
        )


def _format_slots(slots: Iterable[_Slot]) -> str:
    every = sorted(slot.name for slot in slots)
    return ", ".join(f"'{name}'" for name in every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


# --- init and init_buffers ---


def init(
    model: nn.Module,
    spec: PartitionSpec,
    *,
    init_fn: InitFn | None = None,
    seed: int | None = None,
    rank: int | None = None,
    device: torch.device | str | None = None,
    check_values: bool = True,
) -> Params:
    """Initialise a model on the meta device unit by unit, and return the shards of its parameters, as `shard` does.

    Each rank makes every unit whole, for its slice of it. At once it holds its slices, one unit, and at most a unit's size of
    what an initialiser writes to in other units. See ``examples/guide/recipes.md``, "A model that does not fit".

    Args:
        model: A model on the meta device. It does not change. For its buffers: `init_buffers`.
        spec: The units. Parameters that it ignores are the caller's to make.
        init_fn: Initialises a module, as ``model._init_weights`` of transformers does, and may depend on nothing but the
            module. Called with every module, children first; by default modules run their ``reset_parameters``.
        seed: ``torch.initial_seed()`` by default. Values depend on it, on names in the model and on the kind of device, not on
            mesh, policy or rank. The random states of torch are the same afterwards.
        rank: As in `shard`.
        device: Where the values are made: the mesh's device by default, or else the CPU, where they stay if the mesh has none.
        check_values: Whether ranks compare what they made, as in `shard`.

    Returns:
        By unit key this rank's slice, in the parameters' own dtypes.

    Raises:
        ValueError: For a parameter that is not on the meta device (`shard` takes those) or that no initialiser fills, for
            initialisers that reach over more than a unit, and if ranks differ in spec, seed or values. It names the path.
        RuntimeError: If an initialiser fails. It names the module.
        TypeError: For a wrong ``init_fn`` or ``seed``.

    Example:
        >>> import torch, funshard as fs
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(2, 1)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.init(model, spec, seed=0)
        >>> fs.functional_call(model, params, (torch.ones(3, 2),), spec=spec).shape
        torch.Size([3, 1])
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    together = rank is None and has_peers(mesh) and _torch.is_eager()
    with report_to_ranks(spec, together):
        check_rank("init", spec, rank)
        where, number = _resolve_device(spec, device), _resolve_seed(seed, init_fn)
        full = collect_full_params(model, spec)
        for name in (name for name in spec.by_name if not full[name].is_meta):
            raise ValueError(
                f"init: parameter '{name}' is on {full[name].device}: expected it on the meta device; shard(model, spec) takes "
                "parameters that have values"
            )
    if together:
        check_ranks_agree(spec, asked=(f"init(seed={number})",))
    digest = None
    with report_to_ranks(spec, together), _open_values(model, spec, init_fn, number, where) as values:
        params, digest = _init_units(values, spec, rank, where, compared=together and check_values)
    if together:
        hint = "expected initialisers that depend on the module and torch's default generators alone; or check_values=False"
        check_ranks_agree(spec, digest, hint=hint)
    log_spec(spec)
    return params


def _init_units(
    values: _InitialValues, spec: PartitionSpec, rank: int | None, device: torch.device, *, compared: bool
) -> tuple[Params, Tensor | None]:
    """Return each unit's slice, and the fingerprints of its parameters if ``compared``."""
    owned = ((slot, spec.by_name.get(slot.name)) for slot in values.slots if slot.is_param)
    slots = {unit_and_param[1].name: slot for slot, unit_and_param in owned if unit_and_param is not None}
    values.check_reached(slots.values())
    digests: list[Tensor] = []
    mesh = spec.bound_mesh
    numels = {unit.key: spec.padded_numel(unit) for unit in spec if not unit.local_axes}
    shared = {key for key in numels if spec.by_key[key].p.axes and not mesh.is_simulated}
    longest = max((numels[key] * spec.by_key[key].dtype.itemsize for key in shared), default=0)
    with _torch.below_transforms():  # one buffer for all split units: between slices of many buffers, malloc keeps memory
        workspace = torch.empty(longest, dtype=torch.uint8, device=device)

    def init_slice(unit: Unit) -> Tensor:
        buffer: Tensor | None = None
        with _torch.below_transforms():
            if unit.key in shared:
                buffer = workspace[: numels[unit.key] * unit.dtype.itemsize].zero_().view(unit.dtype)
            elif not unit.local_axes:
                buffer = torch.zeros(numels[unit.key], dtype=unit.dtype, device=device)
            if buffer is not None:
                full = unflatten_unit(buffer, unit)
            else:
                shapes = [global_shape(param, dict(mesh.sizes)) for param in unit.params]
                full = [torch.zeros(shape, dtype=unit.dtype, device=device) for shape in shapes]
        values.fill({slots[param.name]: x for param, x in zip(unit.params, full, strict=True)})
        if compared:
            digests.extend(hash_bits(to_memory_order(x, param)).cpu() for x, param in zip(full, unit.params, strict=True))
        if buffer is None:
            buffer = flatten_global({param.name: x for param, x in zip(unit.params, full, strict=True)}, unit, spec)
        return scatter_global(buffer, unit, mesh, rank)

    out = {unit.key: store_slice(init_slice(unit), unit, mesh) for unit in spec}
    digest = torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)
    return out, digest if compared else None


def init_buffers(
    model: nn.Module,
    spec: PartitionSpec,
    *,
    init_fn: InitFn | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return the buffers of a model on the meta device, by name, as functional_call takes them in ``buffers=``.

    Initialisers make those without values, as `init` makes parameters: ``reset_parameters`` makes BatchNorm's statistics,
    ``init_fn=model._init_weights`` the rotary frequencies of transformers. The others are copied. Nothing is sent.

    Args:
        model: A model on the meta device. Buffers that its state_dict leaves out are also made.
        spec: The spec, for its mesh and its units.
        init_fn: As in `init`.
        seed: As in `init`.
        device: Where the buffers are: the mesh's device by default.

    Raises:
        ValueError, RuntimeError, TypeError: As `init`, naming the buffer. Make one that only a constructor computes, such as
            a mask, on another device there: ``torch.ones(n, n, device="cpu")``.

    Example:
        >>> import torch, funshard as fs
        >>> with torch.device("meta"):
        ...     model = torch.nn.BatchNorm1d(2)
        >>> fs.init_buffers(model, fs.policies.whole()(model))["running_var"]
        tensor([1., 1.])
    """
    spec = bind_spec(spec)
    where, number = _resolve_device(spec, device), _resolve_seed(seed, init_fn)
    with _open_values(model, spec, init_fn, number, where) as values:
        wanted = {slot: slot.empty(where) for slot in values.slots if not slot.is_param}
        values.check_reached(wanted)
        values.fill(wanted)
    made = {id(slot.tensor): x for slot, x in wanted.items()}
    named = {join_path(path, attr): x for path, module in model.named_modules() for attr, x in module._buffers.items()}
    for tensor in (x for x in named.values() if x is not None and not x.is_meta):
        made.setdefault(id(tensor), tensor.detach().to(where, copy=True))
    return {name: made[id(tensor)] for name, tensor in named.items() if tensor is not None}


def _resolve_device(spec: PartitionSpec, device: torch.device | str | None) -> torch.device:
    """Return the device on which values are made, with its index."""
    found = torch.device(device) if device is not None else spec.bound_mesh.device or torch.device("cpu")
    if found.type == "meta" and spec.bound_mesh.device != found:
        raise ValueError("init: device='meta': expected one that can hold values, or none for the mesh's")
    return torch.empty(0, device=found).device


def _resolve_seed(seed: int | None, init_fn: InitFn | None) -> int:
    """Return the seed, torch's initial one for None; raise TypeError for an argument of another type."""
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init: init_fn: expected a function of a module, got {type(init_fn).__name__}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"init: seed: expected a whole number or None, got {seed!r}")
    return torch.initial_seed() if seed is None else seed
