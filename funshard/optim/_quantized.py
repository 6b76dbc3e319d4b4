"""quantized_state: an elementwise optimizer whose state is at rest in a codec, and decoded unit by unit."""

from __future__ import annotations

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
from .._spec.codec import Codec
from .._spec.unit_state import UnitState, replace_values
from ._checks import Optimizer, Pair, QuantizedSlice, Tensors, copy_like, refuse_shared_memory
from ._compose import check_optimizer

CHUNK, DEVICE_CHUNK = 1 << 16, 1 << 22
"""The number of elements that are encoded or decoded at once, some 30 bytes each: in a CPU's cache, and on a device."""


def _encode_slice(x: Tensor, codec: Codec) -> QuantizedSlice:
    parts = [codec._encode_slice(part)[:2] for part in x.split(_chunk_length(len(x), codec, x.device))]
    codes, scales = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if scales.dtype != x.dtype:
        raise TypeError(f"{codec}: expected scales in the dtype of the slice, {x.dtype}, got {scales.dtype}")
    return QuantizedSlice(codes, scales)


def _decode_slice(x: QuantizedSlice, codec: Codec) -> Tensor:
    numel = len(x.scales) * codec.block
    length = _chunk_length(numel, codec, x.codes.device)
    if length == numel:
        return _decode_chunk(*x, codec)
    out = x.scales.new_empty(numel)
    parts = zip(x.codes.split(length // (numel // len(x.codes))), x.scales.split(length // codec.block), strict=True)
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


def _check_arguments(who: str, codec: object, spec: PartitionSpec) -> None:
    """Raise TypeError or ValueError unless the codec encodes each block by itself."""
    check_spec(spec)
    if not isinstance(codec, Codec):
        raise TypeError(f"{who}: codec: expected a Codec such as codecs.dynamic8(), got {codec!r}")
    numel = 2 * codec.block
    (_, codes), *others = codec._describe_encoding(numel, torch.float32)[1]
    is_blockwise = len(codes) == 1 and codes.numel() and not numel % codes.numel() and others[:1] == [(torch.float32, (2,))]
    if not is_blockwise or any(shape.numel() for _, shape in others[1:]):
        raise ValueError(
            f"{who}: {codec} does not encode each block of {codec.block} elements by itself, so that the state would depend on "
            "the number of ranks: expected codes and one scale for each block, as of codecs.dynamic8()"
        )


def _check_blocks(who: str, codec: Codec, unit: Unit) -> None:
    if unit.align % codec.block:
        raise ValueError(
            f"{who}: unit '{unit.key}': blocks of {codec.block} elements would straddle parameters and ranks' slices, which "
            f"start at multiples of {unit.align}, and the state would depend on the number of ranks: expected a policy with "
            f"P(align={codec.block}), or a multiple of it"
        )


def _encodes(unit: Unit, at_least: int) -> bool:
    return unit.numel >= at_least and unit.dtype.is_floating_point and not unit.is_encoded


def _find_units(who: str, state: object, spec: PartitionSpec) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(state, Mapping) or not all(isinstance(values, Mapping) for values in state.values()):
        raise TypeError(
            f"{who}: expected a state by unit key, as that of optim.from_torch, got {type(state).__name__}; what is made of "
            "optimizers goes around: optim.chain(..., optim.quantized_state(...))"
        )
    for key in state:
        if key not in spec.by_key and key not in spec.ignored:
            units = list(spec.by_key)[:8]
            raise ValueError(f"{who}: '{key}' is no unit of the spec: expected shards by unit key, such as {units}")
    return state


def _encode_unit(
    unit: Unit, values: Mapping[str, Any], slots: list[str], spec: PartitionSpec, codec: Codec, before: Any = None
) -> UnitState:
    """Return a unit's state with these slots encoded, in pinned memory if the state ``before`` is."""
    out = dict(values)
    for name in slots:
        out[name] = _encode_slice(zero_padding(values[name].detach(), unit, bind_spec(spec)), codec)
        place = values[name] if before is None else before[name].codes
        if _torch.is_pinned(place):
            out[name] = QuantizedSlice(*(copy_like(place[: len(part)], part) for part in out[name]))
    return UnitState(out, getattr(values, "numbers", ()))


def _decode_unit(unit: Unit, values: Mapping[str, Any], spec: PartitionSpec, codec: Codec) -> UnitState:
    bound = bind_spec(spec)
    out: dict[str, Any] = {name: x for name, x in values.items() if name != "rounding_step"}  # a number in older states
    for name, x in out.items():
        if not isinstance(x, QuantizedSlice):
            continue
        _check_blocks("decode_state", codec, unit)
        numel = bound.shard_numel(unit)
        expected = codec._describe_encoding(numel, x.scales.dtype)[1][:2]
        if tuple((part.dtype, part.shape) for part in x) != expected:
            got = [f"{list(part.shape)} {part.dtype}" for part in x]
            raise ValueError(
                f"'{name}' of unit '{unit.key}': expected this rank's slice of {numel} elements in {codec}, "
                f"{[f'{list(shape)} {dtype}' for dtype, shape in expected]}, got {got}; is it of another codec, spec or mesh?"
            )
        out[name] = zero_padding(_decode_slice(x, codec), unit, bound)
    return UnitState(out, [name for name in getattr(values, "numbers", ()) if name in out])


def encode_state(
    state: Mapping[str, Mapping[str, Any]], codec: Codec, *, spec: PartitionSpec, at_least: int = 4096
) -> dict[str, UnitState]:
    """Return an elementwise state, such as one of a float32 checkpoint, encoded as `quantized_state` keeps it.

    It rounds to the nearest. Inverse of `decode_state`, up to that rounding.

    Args:
        state: A state of `from_torch`, by unit key.
        codec: The codec of `quantized_state`.
        spec: The spec of the state.
        at_least: The fewest elements of a unit whose state is encoded.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=256))(torch.nn.Linear(64, 64, bias=False))
        >>> state = fs.optim.encode_state({"": {"exp_avg": torch.ones(4096)}}, fs.codecs.dynamic8(), spec=spec)
        >>> {name: (part.dtype, len(part)) for name, part in state[""]["exp_avg"]._asdict().items()}
        {'codes': (torch.uint8, 4096), 'scales': (torch.float32, 16)}
    """
    _check_arguments("encode_state", codec, spec)
    out: dict[str, UnitState] = {}
    for key, values in _find_units("encode_state", state, spec).items():
        out[key] = new = UnitState(values, {name for name, x in values.items() if isinstance(x, Tensor) and not x.dim()})
        slots = {name: x for name, x in values.items() if name not in new.numbers}
        unit = spec.by_key.get(key)
        if not slots or unit is None or not _encodes(unit, at_least):
            continue
        _check_blocks("encode_state", codec, unit)
        if {"square_avg", "grad_avg"} <= {*slots} or "acc_delta" in slots:
            raise ValueError(
                f"encode_state: unit '{key}': RMSprop(centered=True) takes the root of a difference of averages, and Adadelta "
                "multiplies by the root of one: rounding them makes updates wrong: expected another optimizer"
            )
        numel = bind_spec(spec).shard_numel(unit)
        for name, x in slots.items():
            if not isinstance(x, Tensor) or x.shape != (numel,):
                got = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"'{name}' of unit '{key}': expected this rank's slice, [{numel}], or a number, got {got}")
        floats = [name for name, x in slots.items() if x.is_floating_point()]
        out[key] = _encode_unit(unit, new, floats, spec, codec)
    return out


def decode_state(state: Mapping[str, Mapping[str, Any]], codec: Codec, *, spec: PartitionSpec) -> dict[str, dict[str, Any]]:
    """Return a state of `quantized_state` decoded, for the optimizer inside it and `checkpoint.optimizer_state_dict`.

    Args:
        state: The state, by unit key.
        codec: The codec of the state.
        spec: The spec of the state.

    Example:
        >>> import torch, funshard as fs
        >>> spec, codec = fs.policies.whole(fs.P(align=256))(torch.nn.Linear(64, 64, bias=False)), fs.codecs.dynamic8()
        >>> state = fs.optim.encode_state({"": {"exp_avg": torch.ones(4096)}}, codec, spec=spec)
        >>> fs.optim.decode_state(state, codec, spec=spec)[""]["exp_avg"].sum()
        tensor(4096.)
    """
    _check_arguments("decode_state", codec, spec)
    return {
        key: _decode_unit(spec.by_key[key], values, spec, codec) if key in spec.by_key else replace_values(values, values)
        for key, values in _find_units("decode_state", state, spec).items()
    }


def quantized_state(
    optimizer: Pair, codec: Codec, *, spec: PartitionSpec, at_least: int = 4096, donate: bool = False
) -> Optimizer:
    """Return an elementwise optimizer whose state is at rest in a codec, such as 8 bits (``codecs.dynamic8()``).

    Its update decodes the state of one unit, updates that unit, and encodes the state again. Units need ``P(align=256)``: no
    block straddles parameters or ranks' slices, so the values depend neither on the number of ranks nor on the policy. A block
    with an infinite value or NaN, also from a square that overflows, becomes NaN as a whole.

    Args:
        optimizer: ``(init, update)`` that treats each unit by itself, as those of `from_torch` do. Put `chain` and other
            compositions around the result.
        codec: A codec of blocks, `codecs.dynamic8` for moments.
        spec: The spec of the shards.
        at_least: The fewest elements of a unit whose state is encoded.
        donate: Write the new state into the memory of the given one, as `from_torch` does with its own ``donate``.

    Returns:
        An `Optimizer`, whose state by unit key has a `QuantizedSlice` for each slice. `encode_state` and `decode_state`
        convert it. It refuses derivatives, Adadelta, centered RMSprop, and optimizers of matrices or made of others.

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
    _check_arguments(who, codec, spec)
    check_optimizer(who, optimizer)
    for unit in spec:
        if unit.requires_grad and _encodes(unit, at_least):
            _check_blocks(who, codec, unit)
    begin, apply = optimizer

    def init(params: Tensors, /) -> Any:
        check_mapping(params)
        return encode_state(begin(params), codec, spec=spec, at_least=at_least)

    def update(grads: Tensors, state: Mapping[str, Any], params: Tensors, /, **rates: Any) -> tuple[Params, Any]:
        check_mapping(grads, "grads")
        check_mapping(params)
        units = _find_units(who, state, spec)
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
        found = {key: [n for n, x in values.items() if isinstance(x, QuantizedSlice)] for key, values in units.items()}
        slots = {key: names for key, names in found.items() if names}
        for key in (key for key in units if key not in slots and key in spec.by_key and _encodes(spec.by_key[key], at_least)):
            for name, x in units[key].items():
                if isinstance(x, Tensor) and x.shape == (spec.shard_numel(spec.by_key[key]),) and x.is_floating_point():
                    raise ValueError(
                        f"'{name}' of unit '{key}' is {x.dtype} and not in {codec}: expected the state of init(params) or of "
                        "an update; optim.encode_state of what optim.decode_state returns is one"
                    )
        for what, tree in (("gradient", grads), ("param", params)):
            for key in (key for key in slots if key not in tree):
                raise ValueError(f"unit '{key}' has a state and no {what}: expected one for each unit, got {[*tree][:8]}")

        def update_unit(key: str) -> tuple[Tensor, Any]:  # nothing of the unit is decoded afterwards
            unit, values = spec.by_key[key], units[key]
            decoded = {key: _decode_unit(unit, values, spec, codec)}
            new, states = apply({key: grads[key]}, decoded, {key: params[key]}, **rates)
            encoded = _encode_unit(unit, states[key], slots[key], spec, codec, values)
            for name in slots[key] if is_donated else ():
                written = [_torch.write_into(into, part) for into, part in zip(values[name], encoded[name], strict=True)]
                encoded[name] = QuantizedSlice(*(map(_torch.take_storage, written) if _torch.is_eager() else written))
            return new[key], encoded

        others = [{key: x for key, x in tree.items() if key not in slots} for tree in (grads, units, params)]
        new_params, new_state = map(dict[str, Any], apply(*others, **rates)) if any(others) else ({}, {})
        for key in slots:
            new_params[key], new_state[key] = update_unit(key)
        return {key: new_params[key] for key in params}, {key: new_state[key] for key in units}

    return Optimizer(init, update)


def _argument_tensors(**trees: Any) -> list[tuple[str, Tensor]]:
    leaves = ((what, path, x) for what, tree in trees.items() for path, x in pytree.tree_flatten_with_path(tree)[0])
    return [(f"{what}{pytree.keystr(path)}", x) for what, path, x in leaves if isinstance(x, Tensor)]
