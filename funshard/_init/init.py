"""init, init_buffers: the first values of a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .. import _torch
from .._sharding.agree import check_ranks_agree, has_peers, hash_bits, report_to_ranks
from .._sharding.sharding import check_rank
from .._spec.checks import bind_spec, collect_full_params
from .._spec.spec import PartitionSpec, log_spec
from .._spec.tree import join_path
from .._spec.unit import Unit, whole_shape
from .._units.flow import encode_at_rest
from .._units.host import place_slice
from .._units.layout import Params, to_memory_order, unflatten_unit
from .._units.whole import flatten_whole, scatter_whole
from .slots import InitFn, Slot
from .values import InitialValues, WiderReachError, open_values

__all__ = ["init", "init_buffers"]


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
