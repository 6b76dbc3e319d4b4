"""init, init_buffers: the first values of a model on the meta device."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .. import _torch
from .._call.module_state import calling_thread, restore_modules
from .._core.checks import bind_spec
from .._core.layout import Params, to_memory_order, unflatten_unit
from .._core.spec import PartitionSpec
from .._core.tree import join_path
from .._core.unit import Unit, whole_shape
from .._sharding.hashes import hash_bits
from .._sharding.sharding import check_rank, collect_full_params
from .._spec.table import log_spec
from .._wire.flow import encode_at_rest
from .._wire.host import place_slice
from .._wire.whole import flatten_whole, scatter_whole
from ..collectives._agree import check_ranks_agree, report_to_ranks
from ..collectives._world import has_peers
from .sandbox import InitFn, Initialiser, InitSandbox, Slot, find_initialisers, find_slots, format_slots

__all__ = ["init", "init_buffers"]


# --- The values that a model's initialisers compute from a seed, a few tensors at a time, as often as they are needed ---


class WiderReachError(Exception):
    """An initialiser touched a slot outside its known reach, which now includes it: values made before must be made again."""


@contextlib.contextmanager
def open_values(model: nn.Module, init_fn: InitFn | None, seed: int, device: torch.device) -> Generator[InitialValues]:
    """Yield the model's `InitialValues`; afterwards restore the model's tensors and torch's random state."""
    slots, runs = find_slots(model), find_initialisers(model, init_fn)
    devices = [device] if _torch.is_accelerator(device) else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"))
        stack.enter_context(restore_modules(dict(model.named_modules(remove_duplicate=False)), calling_thread()))
        if torch.get_default_device().type == "meta":  # as within `with torch.device("meta")`, where the model was made
            stack.enter_context(device)
        with _torch.below_transforms():
            values = InitialValues(runs, slots.values(), InitSandbox(model, slots, seed, device), device)
        yield values


class InitialValues:
    """The values that a model's initialisers give its slots, within `open_values`.

    An initialiser's *reach* is the slots of its module and all others that it touches; only they have values when it runs. A
    first run on the meta device finds the reach. A slot's value is the result of all initialisers that reach it, in order:
    it depends on the model alone, not on which slots are filled together.
    """

    def __init__(self, runs: list[Initialiser], slots: Collection[Slot], sandbox: InitSandbox, device: torch.device) -> None:
        self.slots, self._runs, self._sandbox, self._device = slots, runs, sandbox, device
        self._own: dict[nn.Module, set[Slot]] = defaultdict(set)
        for slot in slots:
            for module in slot.modules:
                self._own[module].add(slot)
        self._reach: list[set[Slot]] = [set() for _ in runs]
        self._reached_by: dict[Slot, set[int]] = {slot: set() for slot in slots}
        self._unsure: set[int] = set()
        """The initialisers that failed on the meta device and did not yet run with values: they may reach further."""
        for i, one in enumerate(runs):
            with warnings.catch_warnings():  # which come again when it runs with values
                warnings.simplefilter("ignore")
                run = sandbox.run(one, {})
            self._widen(i, self._own[one.module] | run.touched)
            if run.error:
                self._unsure.add(i)

    def _widen(self, i: int, slots: set[Slot]) -> None:
        """Add slots to the reach of an initialiser."""
        self._reach[i] |= slots
        for slot in slots:
            self._reached_by[slot].add(i)

    @property
    def largest_module_nbytes(self) -> int:
        """The most bytes that one module owns."""
        return max((sum(slot.nbytes for slot in own) for own in self._own.values()), default=0)

    def check_reached(self, slots: Iterable[Slot]) -> None:
        """Raise ValueError, naming the module, for a slot that is in no initialiser's reach."""
        for slot in slots:
            if not self._reached_by[slot]:
                raise ValueError(
                    f"init: {slot.kind} '{slot.name}': {slot.owner} has no reset_parameters, and that of no module around it "
                    "gives it values: expected one, or init_fn=, a function that is called with every module and initialises it"
                )

    def fill(self, wanted: Mapping[Slot, Tensor], most: int) -> None:
        """Write the values of these slots into these tensors.

        Others that have to be made with one of them are held beside them, of ``most`` bytes at most: ValueError where it
        would be more, and for a slot that was left without values. Raises `WiderReachError`.
        """
        left = dict(wanted)
        with _torch.below_transforms():
            while left:
                runs, slots = self._find_connected(next(iter(left)))
                self._check_held_bytes([slot for slot in slots if slot not in wanted], runs, most)
                values = {slot: self._allocate_unset(slot, wanted.get(slot)) for slot in slots}
                written: set[Slot] = set()
                for i in runs:
                    written |= self._run(i, values)
                for slot in [slot for slot in slots if slot in left]:
                    self._check_set(slot, values[slot], written)
                    if values[slot] is not wanted[slot]:
                        wanted[slot].copy_(values[slot])
                    del left[slot]

    def run_unsure(self, most: int) -> None:
        """Run the initialisers that failed on the meta device and did not run since. Call it last; it raises as `fill` does."""
        for i in sorted(self._unsure):
            self.fill({slot: slot.empty(self._device) for slot in self._reach[i]}, most)
            if not self._reach[i]:
                self._run(i, {})

    def _find_connected(self, first: Slot) -> tuple[list[int], list[Slot]]:
        """Return the initialisers that must run for this slot, in their order, and all slots in their reach."""
        runs: set[int] = set()
        slots, new = {first: None}, [first]
        while new:
            more = {i for slot in new for i in self._reached_by[slot]} - runs
            new = [slot for i in sorted(more) for slot in self._reach[i] if slot not in slots]
            runs, slots = runs | more, slots | dict.fromkeys(new)
        return sorted(runs), list(slots)

    def _run(self, i: int, values: Mapping[Slot, Tensor]) -> set[Slot]:
        """Run an initialiser on the slots in its reach and return those that it wrote."""
        run = self._sandbox.run(self._runs[i], {slot: values[slot] for slot in self._reach[i]})
        if run.touched - self._reach[i]:
            self._widen(i, run.touched)
            raise WiderReachError
        if run.error:
            what = f"{type(run.error).__name__}: {run.error}"
            raise RuntimeError(f"init: the initialiser of {self._runs[i]} failed: {what}") from run.error
        self._unsure.discard(i)
        return run.written

    def _allocate_unset(self, slot: Slot, given: Tensor | None) -> Tensor:
        """Return memory for a slot, filled with NaN if that shows what is never written."""
        if not slot.uses_nan:
            return slot.empty(self._device)  # in memory of its own, so that a write to it is seen
        return (slot.empty(self._device) if given is None else given).fill_(torch.nan)

    def _check_set(self, slot: Slot, value: Tensor, written: set[Slot]) -> None:
        """Raise ValueError if a slot was left without values."""
        if not value.numel() or _torch.is_fake(value):
            return
        pieces = value.reshape(-1).split(1 << 24) if slot.uses_nan else ()  # a mask of all of it would be memory
        if slot not in written if not slot.uses_nan else torch.stack([piece.isnan().any() for piece in pieces]).any():
            hint = "an init_fn is all that initialises a module, and may call its reset_parameters"
            if isinstance(slot.modules[0], ParametrizationList):
                hint = "an init_fn can assign the weight that is computed from it: recipes.md, 'A model that does not fit'"
            raise ValueError(
                f"init: {slot.kind} '{slot.name}' of {slot.owner} was left without values, or has some that are NaN: expected "
                f"its initialiser to write all of it; {hint}"
            )

    def _check_held_bytes(self, beside: list[Slot], runs: list[int], most: int) -> None:
        """Raise ValueError if initialisers that touch other units would hold more than the largest unit."""
        if (nbytes := sum(slot.nbytes for slot in beside)) > most:
            foreign = {i: self._reach[i] - self._own[self._runs[i].module] for i in runs}
            widest = max(runs, key=lambda i: sum(slot.nbytes for slot in foreign[i]))
            what = f"touches {format_slots(foreign[widest])}" if foreign[widest] else f"is tied to {format_slots(beside)}"
            raise ValueError(
                f"init: the initialiser of {self._runs[widest]} {what}, in other units: with it "
                f"{nbytes:,} bytes would be held beside a unit, and the largest unit has {most:,}; expected an init_fn that "
                "leaves each module to itself, or a policy with one unit around them"
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

    Each rank makes every unit whole, for its slice of it. At once it holds its slices, one unit, and at most a unit's size of
    what an initialiser writes to in other units. It sends only a digest.
    See ``examples/guide/recipes.md``, "A model that does not fit", for initialisers.

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
        where = _resolve_device(spec, device)
        number = _resolve_seed(seed, init_fn)
        full = collect_full_params(model, spec)
        _check_whole(full, spec)
        for name in (name for name in spec.by_name if not full[name].is_meta):
            raise ValueError(
                f"init: parameter '{name}' is on {full[name].device}: expected it on the meta device; shard(model, spec) takes "
                "parameters that have values"
            )
    if together:
        check_ranks_agree(spec, asked=(f"init(seed={number})",))
    digest = None
    with report_to_ranks(spec, together), open_values(model, init_fn, number, where) as values:
        slots = {name: slot for slot in values.slots for name in _unit_param_name(slot, spec)}
        values.check_reached(slots.values())
        while True:
            try:
                params, digests = _init_units(values, slots, spec, rank, where, together and check_values)
                break
            except WiderReachError:
                continue
        digest = torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)
    if together:
        check_ranks_agree(spec, digest if check_values else None, hint=INITIALIZER_HINT)
    log_spec(spec)
    return params


INITIALIZER_HINT = (
    "expected initialisers that depend on the module and torch's default generators alone; or give check_values=False"
)


def _init_units(
    values: InitialValues, slots: dict[str, Slot], spec: PartitionSpec, rank: int | None, device: torch.device, compared: bool
) -> tuple[Params, list[Tensor]]:
    """Return each unit's slice, and the fingerprints of its parameters if ``compared``."""
    most = _largest_nbytes(values, spec)
    out: Params = {}
    digests: list[Tensor] = []
    sizes = dict(spec.bound_mesh.sizes)
    numels = {unit.key: 0 if unit.local_axes else spec.padded_numel(unit) for unit in spec}
    shared = set[str]() if spec.bound_mesh.is_simulated else {unit.key for unit in spec if unit.p.axes}
    longest = max((numels[key] * spec.by_key[key].dtype.itemsize for key in shared), default=0)
    with _torch.below_transforms():  # one buffer for all split units: between slices of many buffers, malloc keeps memory
        workspace = torch.empty(longest, dtype=torch.uint8, device=device)

    def init_slice(unit: Unit) -> Tensor:
        numel = numels[unit.key]
        with _torch.below_transforms():
            if unit.key in shared:
                buffer = workspace[: numel * unit.dtype.itemsize].zero_().view(unit.dtype)
            else:
                buffer = torch.zeros(numel, dtype=unit.dtype, device=device)
        full = _empty_whole(unit, sizes, device) if unit.local_axes else unflatten_unit(buffer, unit)
        values.fill({slots[param.name]: x for param, x in zip(unit.params, full, strict=True)}, most)
        if compared:
            digests.extend(hash_bits(to_memory_order(x, param)).cpu() for x, param in zip(full, unit.params, strict=True))
        if unit.local_axes:
            buffer = flatten_whole({param.name: x for param, x in zip(unit.params, full, strict=True)}, unit, spec)
        return scatter_whole(buffer, unit, spec.bound_mesh, rank)

    for unit in spec:
        out[unit.key] = place_slice(encode_at_rest(init_slice(unit), unit), unit, spec.bound_mesh)
    values.run_unsure(most)
    return out, digests


def _check_whole(full: Mapping[str, Tensor], spec: PartitionSpec) -> None:
    """Raise ValueError for a local parameter of which ``full`` has one rank's piece."""
    sizes = dict(spec.bound_mesh.sizes)
    for param in (param for unit in spec for param in unit.params if param.local):
        shape = whole_shape(param, sizes)
        if tuple(full[param.name].shape) != shape:
            raise ValueError(
                f"init: parameter '{param.name}': expected the whole one, {list(shape)}, got this rank's piece, "
                f"{list(param.shape)}: initialisers of pieces would give every rank the same; give the whole model on the meta "
                "device"
            )


def _empty_whole(unit: Unit, sizes: Mapping[str, int], device: torch.device) -> list[Tensor]:
    """Return memory for the whole parameters of which ranks have pieces."""
    with _torch.below_transforms():
        return [torch.zeros(whole_shape(param, sizes), dtype=param.dtype, device=device) for param in unit.params]


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
    where = _resolve_device(spec, device)
    number = _resolve_seed(seed, init_fn)
    with open_values(model, init_fn, number, where) as values:
        wanted = [slot for slot in values.slots if not slot.param]
        values.check_reached(wanted)
        while True:
            made = {id(slot.tensor): slot.empty(where) for slot in wanted}
            try:
                values.fill({slot: made[id(slot.tensor)] for slot in wanted}, _largest_nbytes(values, spec))
                values.run_unsure(_largest_nbytes(values, spec))
                break
            except WiderReachError:
                continue
    named = {join_path(path, attr): x for path, module in model.named_modules() for attr, x in module._buffers.items()}
    for tensor in (x for x in named.values() if x is not None and not x.is_meta):
        made.setdefault(id(tensor), tensor.detach().to(where, copy=True))
    return {name: made[id(tensor)] for name, tensor in named.items() if tensor is not None}


def _unit_param_name(slot: Slot, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the name that a unit has for a slot, in a tuple; an empty tuple if no unit owns it."""
    owned = spec.by_name.get(slot.name) if slot.param else None
    return () if owned is None else (owned[1].name,)


def _largest_nbytes(values: InitialValues, spec: PartitionSpec) -> int:
    """Return the bytes of the largest unit, or of the largest module's own tensors if they are more."""
    return max(values.largest_module_nbytes, *(unit.numel * unit.dtype.itemsize for unit in spec), 0)


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
