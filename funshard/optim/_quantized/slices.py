"""QuantizedSlice: a slice of optimizer state in a codec, as codes and a scale for each block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._core.spec import PartitionSpec
from ..._core.unit import Unit
from ..._spec.codec import Codec

__all__ = ["QuantizedSlice", "check_blocks", "check_codec", "check_encoding", "decode_slice", "encode_slice", "refuse_encoded"]

CHUNK, DEVICE_CHUNK = 1 << 16, 1 << 22
"""The number of elements that are encoded or decoded at once, some 30 bytes each: in a CPU's cache, and on a device."""


class QuantizedSlice(NamedTuple):
    """A rank's slice of a unit's state, in the codec of `quantized_state`.

    No block straddles two parameters or two ranks, so a checkpoint has each parameter's bytes, for any mesh and policy.
    """

    codes: Tensor
    """1-D, as long as the slice or, where a code stands for several elements, that much shorter."""
    scales: Tensor
    """One for each block, in the dtype that the slice has when it is decoded."""


torch.serialization.add_safe_globals([QuantizedSlice])


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


def refuse_encoded(state: Mapping[str, object]) -> None:
    """Raise TypeError, naming the unit, for a slice in a codec where a state in its own dtypes is expected."""
    for key, values in state.items():
        for name, x in values.items() if isinstance(values, Mapping) else ():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(x, QuantizedSlice):
                raise TypeError(
                    f"'{name}' of unit '{key}' is in a codec: expected a state in the optimizer's own dtypes, as "
                    "optim.decode_state(state, codec, spec=spec) returns it; optim.encode_state is its inverse"
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
