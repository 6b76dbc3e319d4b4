"""quantized_state: an elementwise optimizer whose state is at rest in a codec, and decoded unit by unit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from .. import _torch
from .._core.checks import bind_spec, check_mapping, check_spec
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.pieces import zero_padding
from .._slices.random_slices import draw_like, draw_uniform, hash_text
from .._spec.codec import Codec
from .._spec.unit_state import UnitState, replace_values
from ._checks import Optimizer, QuantizedSlice, Tensors, copy_like, refuse_shared_memory
from ._compose import Pair, check_optimizer

CHUNK, DEVICE_CHUNK = 1 << 16, 1 << 22
"""The number of elements that are encoded or decoded at once, some 30 bytes each: in a CPU's cache, and on a device."""
ROUNDING = "rounding_step"
"""The name of the number in a unit's state that counts stochastic roundings."""
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number, so that each step has a random stream of its own."""


# --- A slice in a codec ---


def check_codec(who: str, codec: object) -> None:
    """Raise TypeError or ValueError unless the codec encodes each block by itself, as codes and one scale."""
    if not isinstance(codec, Codec):
        raise TypeError(f"{who}: codec: expected a Codec such as codecs.dynamic8(), got {codec!r}")
    numel = 2 * codec.block
    (_, codes), *others = codec._describe_encoding(numel, torch.float32)[1]
    scales = others[0] if others else (None, None)
    is_blockwise = len(codes) == 1 and codes.numel() and not numel % codes.numel() and scales == (torch.float32, (2,))
    if not is_blockwise or any(shape.numel() for _, shape in others[1:]):
        raise ValueError(
            f"{who}: {codec} does not encode each block of {codec.block} elements by itself, so that the state would depend on "
            f"the number of ranks: expected codes and one scale for each block, in the slice's dtype, got for {numel} elements "
            f"tensors of shapes {[list(codes), *(list(shape) for _, shape in others)]}; codecs.dynamic8() is such a codec"
        )


def check_blocks(who: str, codec: Codec, unit: Unit) -> None:
    """Raise ValueError, naming the unit, if a block would straddle two parameters or two ranks' slices."""
    if unit.align % codec.block:
        raise ValueError(
            f"{who}: unit '{unit.key}': blocks of {codec.block} elements would straddle parameters and ranks' slices, which "
            f"start at multiples of {unit.align}, and the state would depend on the number of ranks: expected a policy with "
            f"P(align={codec.block}), or a multiple of it"
        )


def encode_slice(x: Tensor, codec: Codec, noise: Tensor | None = None) -> QuantizedSlice:
    """Encode a slice, rounded by ``noise`` as `Codec` says, or to the nearest without it."""
    length = _chunk_length(len(x), codec, x.device)
    noises = [None] * -(-len(x) // length) if noise is None else noise.split(length)
    parts = [_encode_chunk(part, codec, one) for part, one in zip(x.split(length), noises, strict=True)]
    return parts[0] if len(parts) == 1 else QuantizedSlice(*map(torch.cat, zip(*parts, strict=True)))


def _encode_chunk(x: Tensor, codec: Codec, noise: Tensor | None) -> QuantizedSlice:
    encode = codec if noise is None else dataclasses.replace(codec, encode=functools.partial(codec.encode, noise=noise))
    codes, scales, *_ = encode._encode_slice(x)
    if scales.dtype != x.dtype:
        raise TypeError(f"{codec}: expected scales in the dtype of the slice, {x.dtype}, got {scales.dtype}")
    return QuantizedSlice(codes, scales)


def decode_slice(x: QuantizedSlice, codec: Codec) -> Tensor:
    """Return the elements of a slice, in the dtype of its scales."""
    numel = len(x.scales) * codec.block
    length = _chunk_length(numel, codec, x.codes.device)
    ratio = numel // len(x.codes)
    parts = zip(x.codes.split(length // ratio), x.scales.split(length // codec.block), strict=True)
    if length == numel:
        return _decode_chunk(*next(parts), codec)
    out = x.scales.new_empty(numel)
    for into, part in zip(out.split(length), parts, strict=True):
        into.copy_(_decode_chunk(*part, codec))
    return out


def _decode_chunk(codes: Tensor, scales: Tensor, codec: Codec) -> Tensor:
    numel = len(scales) * codec.block
    _, _, *others = codec._describe_encoding(numel, scales.dtype)[1]
    x = codec.decode(codes, scales, *(codes.new_empty(shape, dtype=dtype) for dtype, shape in others))
    # inductor on the CPU (2.13) computes slices of what is not in memory wrongly; pinned by ``test_a_compiled_step``
    return x.as_strided((numel,), (1,)) if _torch.is_in_graph() else x


def _chunk_length(numel: int, codec: Codec, device: torch.device) -> int:
    """Return how many elements to encode at once: whole blocks, or all elements if operators are recorded or batched."""
    length = max((CHUNK if device.type == "cpu" else DEVICE_CHUNK) // codec.block, 1) * codec.block
    return length if length < numel and _torch.is_eager() else numel


def check_encoding(x: QuantizedSlice, codec: Codec, unit: Unit, spec: PartitionSpec, name: str) -> None:
    """Raise ValueError, naming the unit, unless this is the rank's slice of it in this codec."""
    numel = spec.shard_numel(unit)
    expected = codec._describe_encoding(numel, x.scales.dtype)[1][:2]
    if tuple((part.dtype, part.shape) for part in x) != expected:
        got = [f"{list(part.shape)} {part.dtype}" for part in x]
        raise ValueError(
            f"'{name}' of unit '{unit.key}': expected this rank's slice of {numel} elements in {codec}, "
            f"{[f'{list(shape)} {dtype}' for dtype, shape in expected]}, got {got}; is it of another codec, spec or mesh?"
        )


# --- The state of units ---


@dataclasses.dataclass(frozen=True)
class StateCodec:
    """The checked arguments of `quantized_state`, with which it encodes and decodes the states of units."""

    who: str
    codec: Codec
    spec: PartitionSpec
    at_least: int | None
    """The fewest elements of a unit that is encoded; None to decode only."""
    seed: int | None
    rank: int | None

    def __post_init__(self) -> None:
        check_spec(self.spec)
        check_codec(self.who, self.codec)
        for name, value in (("at_least", self.at_least), ("seed", self.seed)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{self.who}: {name}: expected a whole number, got {value!r}")
        if self.seed is not None and not self.codec.takes_noise:
            raise ValueError(f"{self.who}: {self.codec} rounds to the nearest only: expected seed=None, or codecs.dynamic8()")
        for unit in self.spec:
            if self.encodes(unit) and unit.requires_grad:
                check_blocks(self.who, self.codec, unit)

    def encodes(self, unit: Unit) -> bool:
        """Return whether the state of a unit is encoded."""
        if self.at_least is None:
            return False
        return unit.numel >= self.at_least and unit.dtype.is_floating_point and not unit.is_encoded

    def encode(self, state: object) -> dict[str, UnitState]:
        """Return a state by unit key with encoded slices."""
        out: dict[str, UnitState] = {}
        for key, values in self.find_units(state).items():
            out[key] = new = UnitState(values, {name for name, x in values.items() if isinstance(x, Tensor) and not x.dim()})
            slots = {name: x for name, x in values.items() if name not in new.numbers}
            unit = self.spec.by_key.get(key)
            if not slots or unit is None or not self.encodes(unit):
                continue
            check_blocks(self.who, self.codec, unit)
            if {"square_avg", "grad_avg"} <= {*slots}:
                raise ValueError(
                    f"{self.who}: unit '{key}': RMSprop(centered=True) takes the root of a difference of averages, which "
                    "rounding can make negative: expected centered=False"
                )
            if "acc_delta" in slots:
                raise ValueError(
                    f"{self.who}: unit '{key}': Adadelta multiplies by the root of its average of squared updates, and "
                    "rounding a small one up makes later updates too large: expected another optimizer"
                )
            numel = bind_spec(self.spec).shard_numel(unit)
            for name, x in slots.items():
                if not isinstance(x, Tensor) or x.shape != (numel,):
                    got = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                    raise ValueError(
                        f"{self.who}: '{name}' of unit '{key}': expected this rank's slice, [{numel}], or a number, got {got}"
                    )
            out[key] = new = self.encode_unit(unit, new, [name for name, x in slots.items() if x.is_floating_point()])
            if self.seed is not None:
                out[key] = UnitState({**new, ROUNDING: torch.zeros((), dtype=torch.int64)}, {*new.numbers, ROUNDING})
        return out

    def encoded_slots(self, key: str, values: Mapping[str, Any]) -> list[str]:
        """Return the names of the encoded slices in a unit's state; raise ValueError for a state that is not as `encode`'s."""
        slots = [name for name, x in values.items() if isinstance(x, QuantizedSlice)]
        if not slots and key in self.spec.by_key and self.encodes(self.spec.by_key[key]):
            numel = self.spec.shard_numel(self.spec.by_key[key])
            given = [n for n, x in values.items() if isinstance(x, Tensor) and x.shape == (numel,) and x.is_floating_point()]
            if given:
                raise ValueError(
                    f"{self.who}: '{given[0]}' of unit '{key}' is {values[given[0]].dtype} and not in {self.codec}: expected "
                    "the state of init(params) or of an update; optim.encode_state of what optim.decode_state returns is one"
                )
        if slots and (ROUNDING in values) != (self.seed is not None):
            got = "one that counts its roundings" if self.seed is None else "one without a count of roundings"
            raise ValueError(
                f"{self.who}: unit '{key}': expected a state of an optimizer with seed={self.seed}, got {got}; decode_state "
                "and encode_state(..., seed=) convert it"
            )
        return slots

    def encode_unit(
        self, unit: Unit, values: Mapping[str, Any], slots: list[str], before: Mapping[str, Any] | None = None
    ) -> UnitState:
        """Return a unit's state with these slots encoded: where ``before`` is, and rounded at random if it counts roundings."""
        count, spec = None if before is None else before.get(ROUNDING), bind_spec(self.spec)
        out = dict(values)
        for name in slots:
            x = zero_padding(values[name].detach(), unit, spec, self.rank)
            noise = None
            if count is not None:  # a number in [0, 1) for each element, the same however the parameters are sharded
                like = torch.empty(len(x), dtype=torch.float32, device=x.device)
                stream = count * _STEP + hash_text(f"{self.seed} {name}")
                noise = draw_like(like, unit.key, spec, stream, draw_uniform, self.rank)
            encoded = encode_slice(x, self.codec, noise)
            place = values[name] if before is None else before[name].codes
            if _torch.is_pinned(place):
                encoded = QuantizedSlice(*(copy_like(place[: len(part)], part) for part in encoded))
            out[name] = encoded
        numbers = values.numbers if isinstance(values, UnitState) else frozenset[str]()
        if count is None:
            return UnitState(out, numbers)
        return UnitState({**out, ROUNDING: count + 1}, {*numbers, ROUNDING})

    def decode(self, state: object) -> dict[str, dict[str, Any]]:
        """Return a state by unit key with decoded slices, without the count of roundings."""
        return {
            key: self.decode_unit(self.spec.by_key[key], values) if key in self.spec.by_key else replace_values(values, values)
            for key, values in self.find_units(state).items()
        }

    def decode_unit(self, unit: Unit, values: Mapping[str, Any]) -> UnitState:
        """Return a unit's state with decoded slices, without the count of roundings."""
        spec = bind_spec(self.spec)
        out: dict[str, Any] = {}
        for name, x in values.items():
            if isinstance(x, QuantizedSlice):
                check_blocks(self.who, self.codec, unit)
                check_encoding(x, self.codec, unit, spec, name)
                out[name] = zero_padding(decode_slice(x, self.codec), unit, spec, self.rank)
            elif name != ROUNDING:
                out[name] = x
        numbers = values.numbers if isinstance(values, UnitState) else ()
        return UnitState(out, [name for name in numbers if name in out])

    def find_units(self, state: object) -> Mapping[str, Mapping[str, Any]]:
        """Return the state; raise TypeError or ValueError unless it is elementwise, with the keys of units."""
        if not isinstance(state, Mapping) or not all(isinstance(values, Mapping) for values in state.values()):
            raise TypeError(
                f"{self.who}: expected a state by unit key, as that of optim.from_torch, got {type(state).__name__}; what is "
                "made of optimizers goes around: optim.chain(..., optim.quantized_state(...))"
            )
        for key in state:
            if key not in self.spec.by_key and key not in self.spec.ignored:
                raise ValueError(
                    f"{self.who}: '{key}' is no unit of the spec: expected shards by unit key, such as "
                    f"{list(self.spec.by_key)[:8]}"
                )
        return state


def encode_state(
    state: Mapping[str, Mapping[str, Any]],
    codec: Codec,
    *,
    spec: PartitionSpec,
    at_least: int = 4096,
    seed: int | None = None,
    rank: int | None = None,
) -> dict[str, UnitState]:
    """Return an elementwise state, such as one of a float32 checkpoint, encoded as `quantized_state` keeps it.

    It rounds to the nearest. Inverse of `decode_state`, up to that rounding.

    Args:
        state: A state of `from_torch`, by unit key.
        codec: The codec of `quantized_state`.
        spec: The spec of the state.
        at_least: The fewest elements of a unit whose state is encoded.
        seed: The seed of `quantized_state`. Any seed adds the count of roundings that it needs.
        rank: Whose slices these are, by its number on the mesh; this rank's by default.

    Raises:
        ValueError, TypeError: As `quantized_state`, and for a state of another spec.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=256))(torch.nn.Linear(64, 64, bias=False))
        >>> state = fs.optim.encode_state({"": {"exp_avg": torch.ones(4096)}}, fs.codecs.dynamic8(), spec=spec)
        >>> {name: (part.dtype, len(part)) for name, part in state[""]["exp_avg"]._asdict().items()}
        {'codes': (torch.uint8, 4096), 'scales': (torch.float32, 16)}
    """
    return StateCodec("encode_state", codec, spec, at_least, seed, rank).encode(state)


def decode_state(
    state: Mapping[str, Mapping[str, Any]], codec: Codec, *, spec: PartitionSpec, rank: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return a state of `quantized_state` decoded, for the optimizer inside it and `checkpoint.optimizer_state_dict`.

    Args:
        state: The state, by unit key.
        codec: The codec of the state.
        spec: The spec of the state.
        rank: Whose slices these are, by its number on the mesh; this rank's by default.

    Raises:
        ValueError: Naming the unit, for a state of another codec or spec.
        TypeError: For a state that is not by unit key.

    Example:
        >>> import torch, funshard as fs
        >>> spec, codec = fs.policies.whole(fs.P(align=256))(torch.nn.Linear(64, 64, bias=False)), fs.codecs.dynamic8()
        >>> state = fs.optim.encode_state({"": {"exp_avg": torch.ones(4096)}}, codec, spec=spec)
        >>> fs.optim.decode_state(state, codec, spec=spec)[""]["exp_avg"].sum()
        tensor(4096.)
    """
    return StateCodec("decode_state", codec, spec, None, None, rank).decode(state)


def quantized_state(
    optimizer: Pair,
    codec: Codec,
    *,
    spec: PartitionSpec,
    at_least: int = 4096,
    seed: int | None = None,
    donate: bool = False,
    rank: int | None = None,
) -> Optimizer:
    """Return an elementwise optimizer whose state is at rest in a codec, such as 8 bits (``codecs.dynamic8()``).

    Its update decodes the state of one unit, updates that unit, and encodes the state again. Numbers such as the step are
    not encoded. Units need ``P(align=256)``, so that no block straddles parameters or ranks' slices. So the values depend
    neither on the number of ranks nor on the policy, and checkpoints keep the bytes. A block with an infinite value or NaN,
    also from a square that overflows, becomes NaN as a whole.

    Args:
        optimizer: ``(init, update)`` that treats each unit by itself, as those of `from_torch` do. Put `chain` and other
            compositions around the result.
        codec: A codec of blocks, `codecs.dynamic8` for moments.
        spec: The spec of the shards.
        at_least: The fewest elements of a unit whose state is encoded.
        seed: Round each element up or down at random, so that the mean is right. With one seed on all ranks the values are
            the same on any number of them. None: round to the nearest.
        donate: Write the new state into the memory of the given one, as `from_torch` does with its own ``donate``.
        rank: The rank of the shards, as in `from_torch`.

    Returns:
        An `Optimizer`, whose state by unit key has a `QuantizedSlice` for each slice. `encode_state` and `decode_state`
        convert it.

    Raises:
        TypeError: For an optimizer of matrices or one that is made of others, and for a state that is not by unit key.
        ValueError: Naming the unit, for blocks that would straddle; in ``init`` for Adadelta and centered RMSprop; in
            ``update`` for a state that is not in the codec.
        RuntimeError: If ``update`` is differentiated: rounding has no derivative.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P("shard", align=256))(torch.nn.Linear(64, 64))
        >>> adamw = fs.optim.from_torch(torch.optim.AdamW, lr=1e-3)
        >>> init, update = fs.optim.quantized_state(adamw, fs.codecs.dynamic8(), spec=spec)
        >>> init({"": torch.ones(4352)})[""]["exp_avg"].codes.dtype
        torch.uint8

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
    """
    who = "quantized_state"
    state_codec = StateCodec(who, codec, spec, at_least, seed, rank)
    check_optimizer(who, optimizer)
    begin, apply = optimizer

    def init(params: Tensors, /) -> Any:
        check_mapping(params)
        return state_codec.encode(begin(params))

    def update(grads: Tensors, state: Mapping[str, Any], params: Tensors, /, **rates: Any) -> tuple[Params, Any]:
        check_mapping(grads, "grads")
        check_mapping(params)
        units = state_codec.find_units(state)
        is_donated = donate
        if not _torch.is_in_graph():  # in a graph the optimizer's own update refuses derivatives
            given = _argument_tensors(grads=grads, state=units, params=params, rates=rates)
            for what, tensor in given:
                if _torch.has_derivative(tensor):
                    raise RuntimeError(
                        f"{who}: {what} takes part in a derivative, and rounding the state to few bits has none: expected an "
                        "update under torch.no_grad() or outside of the transform, or the optimizer without quantized_state"
                    )
            # memory that vmap has not batched cannot take results that are
            is_donated = donate and not any(_torch.is_batched(x) for _, x in given)
            if is_donated:
                encoded = {k: {n: x for n, x in v.items() if isinstance(x, QuantizedSlice)} for k, v in units.items()}
                refuse_shared_memory(_argument_tensors(state=encoded))
        found_slots = {key: state_codec.encoded_slots(key, values) for key, values in units.items()}
        slots = {key: names for key, names in found_slots.items() if names}
        for what, tree in (("gradient", grads), ("param", params)):
            if missing := [key for key in slots if key not in tree]:
                raise ValueError(
                    f"unit '{missing[0]}' has a state and no {what}: expected one for each unit, got {[*tree][:8]}"
                )

        def update_unit(key: str) -> tuple[Tensor, Any]:  # nothing of the unit is decoded afterwards
            unit, values = spec.by_key[key], units[key]
            new, states = apply({key: grads[key]}, {key: state_codec.decode_unit(unit, values)}, {key: params[key]}, **rates)
            encoded = state_codec.encode_unit(unit, states[key], slots[key], values)
            return new[key], _write_state(values, encoded) if is_donated else encoded

        others = [{key: x for key, x in tree.items() if key not in slots} for tree in (grads, units, params)]
        new_params, new_state = map(dict[str, Any], apply(*others, **rates)) if any(others) else ({}, {})
        for key in slots:
            new_params[key], new_state[key] = update_unit(key)
        return {key: new_params[key] for key in params}, {key: new_state[key] for key in units}

    return Optimizer(init, update)


def _write_state(old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Write the new codes and scales into the memory of the old ones, and return the state that has it."""
    out = dict(new)
    for name, x in old.items():
        if isinstance(x, QuantizedSlice):
            written = [_torch.write_into(into, value) for into, value in zip(x, new[name], strict=True)]
            out[name] = QuantizedSlice(*(map(_torch.take_storage, written) if _torch.is_eager() else written))
    return replace_values(new, out)


def _argument_tensors(**trees: Any) -> list[tuple[str, Tensor]]:
    """Return ``(name for an error, tensor)`` for every tensor of the trees."""
    leaves = ((what, path, x) for what, tree in trees.items() for path, x in pytree.tree_flatten_with_path(tree)[0])
    return [(f"{what}{pytree.keystr(path)}", x) for what, path, x in leaves if isinstance(x, Tensor)]
