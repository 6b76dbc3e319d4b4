"""What optimizers share: checks of trees, rates and memory, options of single parameters, and derivatives of an update."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec, check_mapping
from .._core.layout import Params
from .._core.mesh import Simulated
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import Unit
from .._slices.pieces import param_ranges
from .._slices.values import is_inexact
from .._spec.unit_state import UnitState, replace_values
from .._torch.tracing import phase
from ..collectives._functions import vary

Tensors = Mapping[str, Tensor]  # a tree that is only read: by unit key or parameter name
StateMapping = Mapping[str, Tensors]  # an elementwise state that is only read: by unit key and name


def check_rate(lr: object, what: str, *, optional: bool = True) -> None:
    """Raise TypeError, with ``what`` as its subject, unless ``lr`` is a number, a tensor or, if ``optional``, None."""
    if not isinstance(lr, numbers.Real | Tensor) and not (optional and lr is None):
        raise TypeError(
            f"{what}: expected a number or a tensor of one, got {type(lr).__name__}; a schedule is a function of the step: "
            "give update(..., lr=schedule(step)). torch's schedulers write into a torch optimizer, and here is none"
        )


State = dict[str, dict[str, Any]]  # by unit key, then by torch's name: slices like the shard, and numbers
StepRate = float | Tensor | None  # a step's own learning rate, or None for the optimizer's


class Optimizer(NamedTuple):
    """A pair of pure functions, which holds no state itself: an optimizer, or a link of `chain`. Any such tuple is one."""

    init: Callable[[Any], Any]
    """``init(params) -> state``."""
    update: Callable[..., tuple[Params, Any]]
    """``update(grads, state, params, **rates) -> (new params, new state)``; a link returns new gradients."""


Pair = tuple[Callable[[Any], Any], Callable[..., tuple[Mapping[str, Tensor], Any]]]
"""``(init, update)``: an `Optimizer`, or such functions of yours."""


def is_pair(value: object) -> bool:
    """Return whether a value is ``(init, update)``, two functions."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def break_message(name: str, why: str) -> str:
    """Return the reason that torch.compile gives where an update breaks its graph."""
    return f"{name}'s update cannot be part of a graph: {why}. Compile the gradients, and call update outside"


def named_tensors(grads: Tensors, state: StateMapping, params: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name for an error, tensor)`` for every tensor of the trees."""
    yield from ((f"params['{key}']", tensor) for key, tensor in params.items())
    yield from ((f"grads['{key}']", tensor) for key, tensor in grads.items())
    yield from ((f"state['{key}']['{name}']", t) for key, values in state.items() for name, t in values.items())


def refuse_shared_memory(tensors: Iterable[tuple[str, Tensor]], by: str = "donate=True") -> None:
    """Raise ValueError if two of the tensors overlap in memory that will be written."""
    bases = ((what, _torch.unwrap(tensor)) for what, tensor in tensors)
    ranges = sorted((*_torch.memory_range(base), what) for what, base in bases if base.numel())
    for (storage, _, end, what), (other, begin, _, second) in itertools.pairwise(ranges):
        if storage == other and begin < end:
            raise ValueError(f"{what} and {second} share memory, which {by} writes: expected tensors of their own")


def check_tensors(tree: Tensors, what: str) -> None:
    """Raise TypeError, naming the key, unless this is a mapping of tensors."""
    check_mapping(tree, what)
    for key, x in tree.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = "; an unused parameter has gradient zeros" if x is None else ""
            raise TypeError(f"{what}: '{key}': expected a tensor, got {type(x).__name__}{hint}")


def check_nonnegative(who: str, **values: Any) -> None:
    """Raise ValueError, naming it, for an option below 0, and TypeError for one that is not a number."""
    for name, value in values.items():
        if name == "lr":
            check_rate(value, f"{who}: lr", optional=False)
        elif not issubclass(type(value), numbers.Real | Tensor):
            raise TypeError(f"{who}: {name}: expected a number, got {type(value).__name__}")
        if not value >= 0:
            raise ValueError(f"{who}: {name}: expected at least 0, got {value}")


def copy_like(template: Tensor, values: Tensor | None = None) -> Tensor:
    """Return a copy of the values, by default its own, where ``template`` lives, in pinned memory if that is pinned."""
    values = template if values is None else values
    return torch.empty_like(template, dtype=values.dtype, pin_memory=_torch.is_pinned(template)).copy_(values)


def place_like(template: Tensor, values: Tensor) -> Tensor:
    """Return the values, copied into pinned memory if ``template`` is."""
    return copy_like(template, values) if _torch.is_pinned(template) else values


class QuantizedSlice(NamedTuple):
    """A rank's slice of a unit's state, in the codec of `quantized_state`.

    No block straddles two parameters or two ranks, so a checkpoint has each parameter's bytes, for any mesh and policy.
    """

    codes: Tensor  # 1-D, as long as the slice or, where a code stands for several elements, that much shorter
    scales: Tensor  # one for each block, in the dtype that the slice has when it is decoded


torch.serialization.add_safe_globals([QuantizedSlice])


def refuse_encoded(state: Mapping[str, object]) -> None:
    """Raise TypeError, naming the unit, for a slice in a codec where a state in its own dtypes is expected."""
    for key, values in state.items():
        for name, x in values.items() if isinstance(values, Mapping) else ():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(x, QuantizedSlice):
                raise TypeError(
                    f"'{name}' of unit '{key}' is in a codec: expected a state in the optimizer's own dtypes, as "
                    "optim.decode_state(state, codec, spec=spec) returns it; optim.encode_state is its inverse"
                )


def check_trees(params: Tensors, grads: Tensors, state: Mapping[str, object], updated: Iterable[str]) -> None:
    """Raise ValueError or TypeError, naming the unit, unless units have a state and the updated ones gradients like them."""
    check_tensors(grads, "grads")
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"state: expected a dict by unit key, as init(params) or an update returns, got {type(state).__name__}; that of an "
            "optimizer made of others has this one's inside"
        )
    refuse_encoded(state)
    for what, tree in (("gradient", grads), ("state", state)):
        for key in tree:
            if key not in params:
                raise ValueError(f"unit '{key}' has a {what} and is not in params: expected some of {[*params][:8]}")
    for key in grads:
        if params[key].dtype == torch.uint8:
            raise TypeError(
                f"unit '{key}' is torch.uint8, as is what is frozen and at rest in a codec: expected no gradient of it; set it "
                "apart with fs.partition(params, spec)"
            )
    for key in params:
        if key not in state:
            raise ValueError(f"unit '{key}' has no state: expected that of init(params) or of an update, got {[*state][:8]}")
    for key in updated:
        if key not in grads:
            raise ValueError(f"unit '{key}' has no gradient: expected one for each of the params, got {[*grads][:8]}")
        grad, param, what = grads[key], params[key], f"the gradient of unit '{key}'"
        if grad.layout != torch.strided:
            raise ValueError(f"{what}: expected a dense tensor, got {grad.layout}; use grad.to_dense()")
        if (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device):
            expected, got = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (param, grad))
            raise ValueError(f"{what}: expected {expected}, got {got}")


def is_slice(tensor: Tensor, unit: Unit, spec: PartitionSpec) -> bool:
    """Return whether the tensor is as long as this rank's slice of the unit."""
    length, dtype = spec.stored(unit)
    if unit.is_encoded and tensor.dtype == dtype:
        return tensor.shape == (length,)
    return tensor.shape == (spec.shard_numel(unit),)


# --- Options of single parameters, as ranges of the shards that they lie in ---

ParamOptions = Callable[[str, Param], Mapping[str, Any]]  # ``options(name, param)``, which replace the defaults


def check_options(what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError, with ``what`` as its subject, for an option that is not among the known ones or below 0."""
    if unknown := sorted({*given}.difference(known)):
        raise ValueError(f"{what}: expected some of {[*known]}, got '{unknown[0]}'")
    check_nonnegative(what, **given)


def scale_lr(lr: float | Tensor, own: Any, default: Any, who: str = "") -> Any:
    """Return a step's lr for a parameter with its own lr, whose ratio to the default stays. ValueError unless that is > 0."""
    if own is default:
        return lr
    if not default:
        raise ValueError(f"{who}an lr among the options keeps its ratio to the default one: expected that positive")
    return lr * (own / default)


class OptionRanges(NamedTuple):
    """The ranges of a shard whose parameters have the same options: by default one, all of it, of any shape."""

    numel: int | None = None
    ranges: tuple[tuple[int, Any], ...] = ((0, ...),)  # ``(group, slice)``: the same groups on every rank, perhaps empty ones

    @property
    def groups(self) -> set[int]:
        """The groups of options that parameters of the unit have."""
        return {group for group, _ in self.ranges}

    def split(self, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """Return ``(group, view)`` for every range."""
        return [(group, tensor[at]) for group, at in self.ranges]

    def join(self, old: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return a shard of these parts, and of ``old`` outside of the ranges. Differentiable."""
        if self.ranges[0][1] is ...:
            return parts[0]
        filled = ((at.start, at.stop, part) for (_, at), part in zip(self.ranges, parts, strict=True) if at.stop > at.start)
        return join_parts(old, filled)


def join_parts(old: Tensor, parts: Iterable[tuple[int, int, Tensor]]) -> Tensor:
    """Return ``old`` with other elements in these ranges, ``(begin, end, part)``. Differentiable."""
    tensors: list[Tensor] = []
    after = 0
    for begin, end, part in parts:
        tensors += [old[after:begin], part]
        after = end
    return concat_flat([*tensors, old[after:]])


def concat_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors through 2-D: torch.cat drops empty 1-D ones, and with them their vmap level, which is sent."""
    return torch.cat([x[:, None] for x in tensors])[:, 0]


Check = Callable[[str, Mapping[str, Any]], None]


def group_by_options(
    spec: PartitionSpec, options: ParamOptions | None, check: Check = lambda name, own: None
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """Return ``(the distinct options, the index of each parameter's options)``; ``check`` runs on each distinct one."""
    groups: list[Mapping[str, Any]] = []
    group_of_param: dict[str, int] = {}
    for param in (param for unit in spec for param in unit.params):
        own = {} if options is None else dict(options(param.name, param))
        if own not in groups:
            check(param.name, own)
            groups.append(own)
        group_of_param[param.name] = groups.index(own)
    return groups, group_of_param


def option_ranges(
    who: str, spec: PartitionSpec | None, options: ParamOptions | None, check: Check
) -> tuple[list[Mapping[str, Any]], dict[str, OptionRanges] | None]:
    """Return ``(the distinct options, ranges by unit key of shards, and by name of `param_views`)``; None without a spec."""
    if spec is None:
        if options is not None:
            raise ValueError(f"{who}: options are those of a spec's parameters: expected spec=, got none")
        return [{}], None
    spec = bind_spec(spec)
    groups, group_of_param = group_by_options(spec, options, check)
    if spec.bound_mesh.is_simulated and len(groups) > 1:
        raise ValueError(
            "options: where a parameter lies in a shard depends on the rank, and simulated ranks are all there at once: "
            "expected a mesh of processes, or the same options for all parameters"
        )
    out: dict[str, OptionRanges] = {}
    for unit in spec:
        if unit.is_encoded or spec.bound_mesh.is_simulated:  # bytes, which stay, or a slice that is every parameter's part
            numel = spec.stored(unit)[0] if unit.is_encoded else spec.shard_numel(unit)
            out |= dict.fromkeys((unit.key, *(param.name for param in unit.params)), OptionRanges(numel))
            continue
        ranges: list[tuple[int, slice]] = []
        for name, begin, end in param_ranges(unit, spec):
            group = group_of_param[name]
            out[name] = OptionRanges(end - begin, ((group, ...),))
            if ranges and ranges[-1][0] == group and end > begin:  # neighbours with the same options: fewer kernels
                ranges[-1] = group, slice(ranges[-1][1].start, end)
            elif end > begin:
                ranges.append((group, slice(begin, end)))
        of_unit = dict.fromkeys(group_of_param[param.name] for param in unit.params)
        absent = [(group, slice(0, 0)) for group in of_unit if group not in dict(ranges)]
        out[unit.key] = OptionRanges(spec.shard_numel(unit), (*ranges, *absent))
    return groups or [{}], out


def find_updated(ranges: Mapping[str, OptionRanges] | None, params: Tensors) -> dict[str, OptionRanges]:
    """Return the option ranges of units that an update changes: integers stay. ValueError or TypeError for other slices."""
    check_tensors(params, "params")
    updated = [key for key, x in params.items() if is_inexact(x)]
    if ranges is None:
        return dict.fromkeys(updated, OptionRanges())
    for key, tensor in params.items():
        if key not in ranges:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*ranges][:8]}")
        if tuple(tensor.shape) != (ranges[key].numel,):
            raise ValueError(
                f"unit '{key}': expected a shard of {ranges[key].numel} elements, got shape {list(tensor.shape)}; "
                "are these params of another spec or another mesh?"
            )
    return {key: ranges[key] for key in updated}


def make_elementwise(
    name: str,
    begin: Callable[[str, Tensor], Tensors],
    step: Callable[..., tuple[Params, Mapping[str, Tensors]]],
    slots: Collection[str],  # of the state of an updated unit, all like the unit but for the ``numbers``
    numbers: frozenset[str],
    ranges: Mapping[str, OptionRanges] | None,
) -> Optimizer:
    """Return the pair of ``begin(key, param)``, the state of a unit, and ``step(grads, state, params, lr, updated)``."""

    def init(params: Tensors) -> State:
        updated = find_updated(ranges, params)
        states = {key: begin(key, x.detach()) if key in updated else {} for key, x in params.items()}
        return {key: UnitState(values, numbers.intersection(values)) for key, values in states.items()}

    def update(grads: Tensors, state: StateMapping, params: Tensors, *, lr: StepRate = None) -> tuple[Params, State]:
        with phase("update", name):
            check_rate(lr, "lr")
            updated = find_updated(ranges, params)
            check_trees(params, grads, state, updated)
            for key in updated:
                if {*state[key]} != {*slots}:
                    raise ValueError(f"the state of unit '{key}': expected {sorted(slots)}, got {sorted(state[key])}")
                for slot, x in state[key].items():
                    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                        raise TypeError(f"'{slot}' of unit '{key}': expected a tensor, got {type(x).__name__}")
                    shape = () if slot in numbers else params[key].shape
                    if x.shape != shape:
                        raise ValueError(f"'{slot}' of unit '{key}': expected shape {list(shape)}, got {list(x.shape)}")
            new_params, new_state = step(grads, state, params, lr, updated)
            return new_params, {key: replace_values(values, new_state[key]) for key, values in state.items()}

    return Optimizer(init, update)


# --- Derivatives of an update: which ranks share an option, by the spec ---


def vary_over(x: Tensor, axes: Iterable[str], spec: PartitionSpec) -> Tensor:
    """Return a number for slices that are split over these axes: backward sums what each rank has of its derivative."""
    return functools.reduce(lambda x, name: vary(x, spec.bound_mesh[name], reduce="sum"), axes, x)


def share_options(spec: PartitionSpec | None) -> Callable[[Any, tuple[str, ...]], Any]:
    """Return ``share(option, axes)`` for one step: the option, of which backward sums the derivative over a unit's axes."""
    entered: dict[tuple[int, tuple[str, ...]], tuple[Tensor, Tensor]] = {}

    def share(option: Any, axes: tuple[str, ...]) -> Any:
        if spec is None or not axes or not isinstance(option, Tensor):
            return option
        if _torch.is_in_dynamo():  # which does not tell; forward it is nothing
            return vary_over(option, axes, spec)
        if not _torch.has_derivative(option):
            return option
        key = id(option), axes
        if key not in entered:  # once, so that backward sends one number for many units
            mesh = spec.bound_mesh
            varied = vary_over(option.to(mesh.device or option.device), axes, spec)
            for _, axis in mesh.axes:  # an in-place kernel under vmap takes an operand of all of its levels
                if isinstance(axis, Simulated):
                    varied = varied + 0 * axis.rank
            entered[key] = option, varied.to(option.device)
        return entered[key][1]

    return share
