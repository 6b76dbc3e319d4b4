"""init, init_buffers: what a model on the meta device begins with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _torch
from .._sharding.agree import check_ranks_agree, fingerprint, has_peers, report_to_ranks
from .._sharding.sharding import check_rank
from .._spec.checks import collect_full_params
from .._spec.spec import PartitionSpec, bind_spec
from .._spec.tree import join_path
from .._spec.unit import Unit
from .._units.flow import encode_at_rest, scatter_unit
from .._units.host import place_slice
from .._units.layout import Params, to_memory_order, unflatten_unit
from .slots import InitFn, Slot
from .values import Values, WiderReachError, open_values

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

    >>> import torch, funshard as fs
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(2, 1)
    >>> spec = fs.policies.whole()(model)
    >>> params = fs.init(model, spec, seed=0)
    >>> fs.functional_call(model, params, (torch.ones(3, 2),), spec=spec).shape
    torch.Size([3, 1])

    Slices of the parameters' own dtypes, where `shard` puts them, unit by unit: no more is held at once than this rank's
    slices, one unit, and what one initialiser writes to of other units, itself no larger than a unit. Every rank makes
    every unit whole, for its slice of it, and sends nothing but a digest; the model stays on the meta device, as it is.
    Buffers are `init_buffers`'s, and parameters that the spec ignores the caller's.

    Modules initialise themselves, children before parents and each once, as by ``nn.Module.apply``: by their
    ``reset_parameters`` (nn.MultiheadAttention by its own), or by ``init_fn(module)`` instead, which is called with every
    module, such as ``model._init_weights`` of transformers. A tied parameter has what the last of its modules gives it.
    An initialiser may also change what is in other modules: then it has their values, and they are held together. It runs
    without gradients, on the meta device first, to see what it needs, and then as often as that is made: it must
    depend on nothing but the module, and what it notes there is gone.

    A value depends on ``seed`` and on names in the model: each module's initialiser begins with torch's default generators
    seeded from ``seed`` and the module's path, so any mesh, policy and rank has the same bits, and what else is in the model
    changes nothing. On another kind of device torch draws other numbers. By default ``seed`` is ``torch.initial_seed()``,
    what was last given to ``torch.manual_seed``; random states are as before afterwards. ``device`` is where the values
    are made: that of the mesh by default, or else the CPU, where they stay if the mesh names none. ``rank`` and
    ``check_values`` are `shard`'s: ranks compare their seeds first, and in the end what they have made.

    Raises ValueError, naming the path, for a parameter that is not on the meta device (`shard` takes those), one that no
    initialiser gives values or not all, initialisers that reach over more than a unit, and a spec, seed or values in which
    ranks differ; RuntimeError, naming the module, where an initialiser fails; TypeError for what is no init_fn or seed.
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    together = rank is None and has_peers(mesh) and _torch.is_eager()
    with report_to_ranks(spec, together):
        check_rank("init", spec, rank)
        where = _resolve_device(spec, device)
        number = _resolve_seed(seed, init_fn)
        full = collect_full_params(model, spec)
        for name in (name for name in spec.by_name if not full[name].is_meta):
            raise ValueError(
                f"init: parameter '{name}' is on {full[name].device}: expected it on the meta device; shard(model, spec) takes "
                "parameters that have values"
            )
    if together:
        check_ranks_agree(spec, asked=(f"init(seed={number})",))
    digest = None
    with report_to_ranks(spec, together), open_values(model, init_fn, number, where) as values:
        slots = {name: slot for slot in values.slots for name in _owned_names(slot, spec)}
        values.check_reached(slots.values())
        while True:
            try:
                params, digests = _init_units(values, slots, spec, rank, where, together and check_values)
                break
            except WiderReachError:
                continue
        digest = torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)
    if together:
        check_ranks_agree(spec, digest if check_values else None, hint=VALUES_HINT)
    return params


VALUES_HINT = "expected initialisers that depend on the module and torch's default generators alone; or give check_values=False"


def _init_units(
    values: Values, slots: dict[str, Slot], spec: PartitionSpec, rank: int | None, device: torch.device, compared: bool
) -> tuple[Params, list[Tensor]]:
    """Return each unit's slice, and the fingerprints of its parameters if ``compared``."""
    most = _largest_nbytes(values, spec)
    out: Params = {}
    digests: list[Tensor] = []
    numels = {unit.key: spec.padded_numel(unit) for unit in spec}
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
        full = unflatten_unit(buffer, unit)
        values.fill({slots[param.name]: x for param, x in zip(unit.params, full, strict=True)}, most)
        if compared:
            digests.extend(fingerprint(to_memory_order(x, param)).cpu() for x, param in zip(full, unit.params, strict=True))
        return scatter_unit(buffer, unit, spec.bound_mesh, rank)

    for unit in spec:
        out[unit.key] = place_slice(encode_at_rest(init_slice(unit), unit), unit, spec.bound_mesh)
    values.run_unsure(most)
    return out, digests


def init_buffers(
    model: nn.Module,
    spec: PartitionSpec,
    *,
    init_fn: InitFn | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return the buffers of a model on the meta device, by name, as functional_call takes them in ``buffers=``.

    Those that have no values get them as parameters do by `init`, from the same arguments: BatchNorm's statistics by
    ``reset_parameters``, the rotary frequencies of transformers by ``init_fn=model._init_weights``. The others are copied.
    Also those that the state_dict leaves out; on the device of the mesh, or on ``device``. Nothing is sent.

    >>> import torch, funshard as fs
    >>> with torch.device("meta"):
    ...     norm = torch.nn.BatchNorm1d(2)
    >>> fs.init_buffers(norm, fs.policies.whole()(norm))["running_var"]
    tensor([1., 1.])

    Raises what `init` does, naming the buffer: one that is computed in a constructor alone, such as a mask, has to be made
    there on another device, ``torch.ones(n, n, device="cpu")``.

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


def _owned_names(slot: Slot, spec: PartitionSpec) -> tuple[str, ...]:
    owned = spec.by_name.get(slot.name) if slot.param else None
    return () if owned is None else (owned[1].name,)


def _largest_nbytes(values: Values, spec: PartitionSpec) -> int:
    """Return the bytes of the largest unit, or of the largest module's own tensors if they are more."""
    return max(values.largest_module, *(unit.numel * unit.dtype.itemsize for unit in spec), 0)


def _resolve_device(spec: PartitionSpec, device: torch.device | str | None) -> torch.device:
    """Return the device on which values are made, with its index."""
    found = torch.device(device) if device is not None else spec.bound_mesh.device or torch.device("cpu")
    if found.type == "meta" and spec.bound_mesh.device != found:
        raise ValueError("init: device='meta': expected one that can hold values, or none for the mesh's")
    return torch.empty(0, device=found).device


def _resolve_seed(seed: int | None, init_fn: InitFn | None) -> int:
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init: init_fn: expected a function of a module, got {type(init_fn).__name__}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"init: seed: expected a whole number or None, got {seed!r}")
    return torch.initial_seed() if seed is None else seed
