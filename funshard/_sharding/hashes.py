"""Hashes of parameters, by which ranks compare their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._core.checks import take_full_params
from .._core.layout import to_memory_order
from .._core.spec import PartitionSpec

_PIECE = 1 << 17
"""Words hashed at once: few enough that their factors stay in the cache."""


def hash_params(params: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return a hash of the bits of each parameter, in the order of the spec, with NaN and -0.0 like any other values.

    A hash sums the 64-bit words, each times an odd number for its place, modulo 2**64: one changed word always changes it. It
    is computed on the parameter's own device.
    """
    sizes = dict(spec.bound_mesh.sizes)
    with torch.no_grad():
        found = [
            hash_bits(to_memory_order(tensor.detach(), param))
            for unit in spec
            for tensor, param in zip(take_full_params(params, unit, sizes), unit.params, strict=True)
        ]
        return torch.stack([number.to(found[0].device) for number in found]) if found else torch.zeros(0, dtype=torch.int64)


def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits, as an int64 scalar tensor; 0 on the meta device."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # also of one element, which counts as contiguous whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    return _hash_words(torch.cat([_hash_words(words.view(torch.int64)), raw[whole:].long()]))[0]


def _hash_words(words: Tensor) -> Tensor:
    places = torch.arange(1, min(len(words), _PIECE) + 1, device=words.device)
    places *= -0x61C8864680B583EB  # as in splitmix64: neighbours get numbers that have nothing in common
    places = (places ^ (places >> 29)) * -0x40A7B892E31B1A47 | 1
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * 0x5851F42D4C957F2D + (piece * places[: len(piece)]).sum()
    return total
