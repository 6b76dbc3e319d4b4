"""init, init_buffers: the first values of a model on the meta device."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # arguments of operators

from .. import _torch
from .._call.buffers import copy_buffer
from .._call.module_state import calling_thread, restore_modules
from .._core.checks import bind_spec
from .._core.flow import scatter_along
from .._core.layout import Params, to_memory_order, unflatten_unit
from .._core.mesh import has_peers
from .._core.spec import PartitionSpec, abridge
from .._core.tree import check_not_compiled, join_path
from .._core.unit import Unit, global_shape
from .._sharding.sharding import check_rank, collect_full_params, hash_bits
from .._spec.table import log_spec
from .._torch.modules import find_reset
from .._wire.flow import flatten_global, store_slice
from ..collectives._agree import check_ranks_agree, report_to_ranks

InitFn = Callable[[nn.Module], object]
META = torch.device("meta")
_KINDS = "_parameters", "_buffers"


# --- The parameters and buffers of a model on the meta device, and the functions that initialise them ---


@dataclass(eq=False)
class _Slot:
    """A parameter or buffer without values: once, however many modules share it."""

    name: str
    tensor: Tensor
    is_param: bool
    scope: tuple[str, ...]
    now: Tensor = field(init=False)
    """What modules have: on the meta device, unless it is filled."""
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    """Each module that has it, the dict in the module, and the name in the dict."""
    owner: nn.Module | None = None
    """The first of these modules that is initialised; the others' initialisers do not write to it, as if it was tied later."""

    @property
    def has_nan(self) -> bool:
        """Whether NaN marks elements that nobody wrote. torch has no test for NaN in dtypes of 8 bits."""
        return (self.tensor.is_floating_point() or self.tensor.is_complex()) and self.tensor.itemsize > 1

    def empty(self, device: torch.device = META) -> Tensor:
        return torch.empty_like(self.tensor, device=device, requires_grad=False)

    def put(self, values: Tensor) -> None:
        """Give modules these values."""
        self.now = _make_tensor(values, self.tensor)
        for module, kind, attr in self.places:
            vars(module)[kind][attr] = self.now

    def take_back(self, value: Tensor) -> bool:
        """Return whether a module has another tensor, or one with other memory (``.data``) than ``value``; copy what it has."""
        held = [vars(module)[kind].get(attr) for module, kind, attr in self.places]
        now = next((x for x in held if x is not self.now), self.now)
        if now is self.now and _memory(now) == _memory(value):
            return False
        if not isinstance(now, Tensor) or (now.shape, now.dtype) != (value.shape, value.dtype):
            got = f"{list(now.shape)} {now.dtype}" if isinstance(now, Tensor) else type(now).__name__
            raise ValueError(f"expected {list(value.shape)} {value.dtype} in the place of '{self.name}', got {got}")
        value.copy_(now.detach().clone())
        self.put(value)
        return True

    def __str__(self) -> str:
        return f"{'parameter' if self.is_param else 'buffer'} '{self.name}'"


def _make_tensor(values: Tensor, like: Tensor) -> Tensor:
    """Return a tensor on the memory of ``values``, with the type and the attributes of another."""
    tensor = nn.Parameter(values, like.requires_grad) if isinstance(like, nn.Parameter) else values.detach()
    vars(tensor).update(vars(like))
    return tensor


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return _torch.storage_id(tensor), tensor.storage_offset(), tensor.stride()


@dataclass(eq=False)
class _Initialiser:
    """A function that gives a module's parameters and buffers their values, and maybe those of modules inside it."""

    path: str
    module: nn.Module
    run: Callable[[], object]
    inside: list[_Slot]
    """The slots of the module and of all modules inside it."""

    def __str__(self) -> str:
        return f"the initialiser of module '{self.path}' ({type(self.module).__name__})"


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


# --- The values that a model's initialisers compute from a seed, a unit at a time ---


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

    A scope is what one unit surrounds, or several of one path. To fill it, the initialisers of its modules and of those around
    them run, children first, each from a seed of its own, where the scope has values and all else is on the meta device.
    """

    def __init__(self, model: nn.Module, spec: PartitionSpec, init_fn: InitFn | None, seed: int, device: torch.device) -> None:
        self._seed, self._device, by_tensor = seed, device, dict[int, _Slot]()
        paths = {module: path for path, module in model.named_modules()}
        scopes, own = {path: unit.paths for unit in spec for path in unit.paths}, dict[nn.Module, list[_Slot]]()
        for module, path in paths.items():
            scope = scopes.setdefault(path, scopes.get(path.rpartition(".")[0], ()))
            own[module] = _take_tensors(path, module, scope, by_tensor)
        self.slots = [*by_tensor.values()]
        children_first = list[nn.Module]()
        nn.Module.apply(model, children_first.append)
        resets = {x: find_reset(x) if init_fn is None else partial(init_fn, x) for x in dict.fromkeys(children_first)}
        inside = {x: [*dict.fromkeys(slot for one in x.modules() for slot in own[one])] for x, reset in resets.items() if reset}
        self._runs = [_Initialiser(paths[x], x, reset, inside[x]) for x, reset in resets.items() if reset is not None]
        for run in reversed(self._runs):
            for slot in own[run.module]:
                slot.owner = run.module
        self._storages = {_torch.storage_id(slot.tensor): slot for slot in self.slots}

    def fill(self, wanted: Mapping[_Slot, Tensor]) -> None:
        """Write the values of these slots into these tensors, and meanwhile hold the others of their scopes."""
        scopes = {slot.scope for slot in wanted}
        with _torch.below_transforms():
            values = {x: wanted[x] if x in wanted else x.empty(self._device) for x in self.slots if x.scope in scopes}
            for value in (value for slot, value in values.items() if slot.has_nan):
                value.fill_(torch.nan)  # which shows what is never written
            runs = [one for one in self._runs if not values.keys().isdisjoint(one.inside)]
            written = set[_Slot]()
            try:
                with restore_modules({one.path: one.module for one in runs}, calling_thread()):
                    for module, kind in itertools.product((one.module for one in runs), _KINDS):
                        vars(module)[kind] = dict(vars(module)[kind])
                    for slot, value in values.items():
                        slot.put(value)
                    storages = {_torch.storage_id(slot.now): slot for slot in self.slots} | self._storages
                    for one in runs:
                        written |= self._run(one, values, storages)
            finally:
                for slot in values:
                    slot.put(slot.empty())
            for slot, value in wanted.items():
                _check_set(slot, value, is_written=slot in written)

    def _run(self, one: _Initialiser, values: Mapping[_Slot, Tensor], storages: Mapping[int, _Slot]) -> set[_Slot]:
        """Run an initialiser from a seed that follows from its path, and return the slots that it wrote to.

        What it puts in the place of a tensor is copied. Raise ValueError if it touches slots of this scope and others.
        """
        tied = ((slot, *place) for slot in one.inside for place in slot.places if place[0] is one.module is not slot.owner)
        others = [(slot, vars(module)[kind], attr) for slot, module, kind, attr in tied]  # that another module initialises
        for slot, tensors, attr in others:
            tensors[attr] = _make_tensor(slot.empty(), slot.tensor)
        versions = {slot: _torch.version(slot.now) for slot in one.inside}
        number = int.from_bytes(hashlib.sha256(f"{self._seed} {one.path}".encode()).digest()[:7], "big")
        torch.default_generator.manual_seed(number)
        if _torch.is_accelerator(self._device):
            torch.get_device_module(self._device.type).default_generators[self._device.index].manual_seed(number)
        touched = _TouchedSlots(storages)
        try:
            with touched:
                one.run()
            for slot, tensors, attr in others:
                tensors[attr] = slot.now
            replaced = {slot for slot in one.inside if slot.take_back(values.get(slot, slot.now.detach()))}
            written = replaced | {slot for slot, version in versions.items() if _torch.version(slot.now) != version}
        except Exception as error:
            is_around = not values.keys() >= {*one.inside}
            hint = "; parameters of other units are on the meta device then: " + _REMEDY if is_around else ""
            raise RuntimeError(f"init: {one} failed: {type(error).__name__}: {error}{hint}") from error
        reach = touched.slots | written  # a function of C++ or of TorchScript is not seen, but what it writes
        if not values.keys().isdisjoint(reach) and not values.keys() >= reach:
            names = dict.fromkeys(sorted(slot.name for slot in reach))
            raise ValueError(f"init: {one} touches {abridge(names, 3)}, in other units than one: {_REMEDY}")
        return written


def _take_tensors(path: str, module: nn.Module, scope: tuple[str, ...], by_tensor: dict[int, _Slot]) -> list[_Slot]:
    """Give a module tensors of our own in the place of its own ones, and return the slots of those without values."""
    check_not_compiled(path, module)
    found: list[_Slot] = []
    for kind in _KINDS:
        tensors = vars(module)[kind] = dict(vars(module)[kind])
        for attr, tensor in [(attr, tensor) for attr, tensor in tensors.items() if tensor is not None]:
            if not tensor.is_meta:
                tensors[attr] = _make_tensor(copy_buffer(tensor.detach(), tensor.dtype), tensor)
                continue
            name, is_param = join_path(path, attr), kind == "_parameters"
            if tensor.layout is not torch.strided or (is_param and type(tensor) is not nn.Parameter):
                raise TypeError(f"init: '{name}': expected a dense nn.Parameter or buffer, got {type(tensor).__name__}")
            found.append(slot := by_tensor.setdefault(id(tensor), _Slot(name, tensor, is_param, scope)))
            slot.places.append((module, kind, attr))
            slot.put(slot.empty())
    return found


_REMEDY = (
    "expected an initialiser that leaves each module to itself, such as init_fn=; a policy with one unit around them; or a "
    "model that torch initialises, and fs.shard"
)


def _check_set(slot: _Slot, value: Tensor, *, is_written: bool) -> None:
    """Raise ValueError if a slot was left without values."""
    if not value.numel() or _torch.is_fake(value):
        return
    pieces = value.reshape(-1).split(1 << 24)  # a mask of all of it would be memory
    if any(piece.isnan().any() for piece in pieces) if slot.has_nan else not is_written:
        raise ValueError(
            f"init: {slot} of module '{slot.name.rpartition('.')[0]}' ({type(slot.places[0][0]).__name__}) was left without "
            "values, or has some that are NaN: expected its reset_parameters or that of a module around it to write all of it, "
            "or init_fn=, which is then all that initialises modules, and may call these; it has to assign a weight that has a "
            "parametrization: recipes.md, 'A model that does not fit'"
        )


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

    Each rank makes every unit whole, for its slice of it. At once it holds its slices and one unit. See
    ``examples/guide/recipes.md``, "A model that does not fit".

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
            initialisers that touch several units, and if ranks differ in spec, seed or values. It names the path.
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
        where, number = _resolve(spec, device, seed, init_fn)
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
    slots = {spec.by_name[slot.name][1].name: slot for slot in values.slots if slot.name in spec.by_name}
    digests: list[Tensor] = []
    mesh = spec.bound_mesh
    sizes = {unit.key: spec.padded_numel(unit) * unit.dtype.itemsize for unit in spec}
    split = {unit.key for unit in spec if unit.p.axes and not mesh.is_simulated}
    with _torch.below_transforms():  # one buffer for all split units: between slices of many buffers, malloc keeps memory
        workspace = torch.empty(max(map(sizes.__getitem__, split), default=0), dtype=torch.uint8, device=device)

    def init_slice(unit: Unit) -> Tensor:
        size = sizes[unit.key]
        with _torch.below_transforms():
            buffer = (workspace if unit.key in split else workspace.new_empty(size))[:size].zero_().view(unit.dtype)
            shapes = [global_shape(param, dict(mesh.sizes)) for param in unit.params] if unit.local_axes else []
            full = [buffer.new_zeros(shape) for shape in shapes] or unflatten_unit(buffer, unit)
        by_name = {param.name: x for param, x in zip(unit.params, full, strict=True)}
        values.fill({slots[name]: x for name, x in by_name.items()})
        if compared:
            digests.extend(hash_bits(to_memory_order(x, param)).cpu() for x, param in zip(full, unit.params, strict=True))
        buffer = flatten_global(by_name, unit, spec) if unit.local_axes else buffer
        return scatter_along(buffer, unit.distinct_axes, mesh, rank)

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
    ``init_fn=model._init_weights`` the rotary frequencies of transformers. The others are copied. Nothing is sent. At once it
    holds the buffers and one unit.

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
    where, number = _resolve(spec, device, seed, init_fn)
    with _open_values(model, spec, init_fn, number, where) as values:
        wanted = {slot: slot.empty(where) for slot in values.slots if not slot.is_param}
        for scope in dict.fromkeys(slot.scope for slot in wanted):
            values.fill({slot: x for slot, x in wanted.items() if slot.scope == scope})
    made = {id(slot.tensor): x for slot, x in wanted.items()}
    named = {join_path(path, attr): x for path, module in model.named_modules() for attr, x in module._buffers.items()}
    for tensor in (x for x in named.values() if x is not None and not x.is_meta):
        made.setdefault(id(tensor), tensor.detach().to(where, copy=True))
    return {name: made[id(tensor)] for name, tensor in named.items() if tensor is not None}


def _resolve(
    spec: PartitionSpec, device: torch.device | str | None, seed: int | None, init_fn: InitFn | None
) -> tuple[torch.device, int]:
    """Return the device on which values are made, with its index, and the seed."""
    found = torch.device(device) if device is not None else spec.bound_mesh.device or torch.device("cpu")
    if found.type == "meta" and spec.bound_mesh.device != found:
        raise ValueError("init: device='meta': expected one that can hold values, or none for the mesh's")
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init: init_fn: expected a function of a module, got {type(init_fn).__name__}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"init: seed: expected a whole number or None, got {seed!r}")
    return torch.empty(0, device=found).device, torch.initial_seed() if seed is None else seed
