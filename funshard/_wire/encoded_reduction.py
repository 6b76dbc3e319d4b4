"""Reductions of gradients that are sent encoded: each slice goes to its owner, which decodes and adds those of all ranks.

The sum is in the dtype of the reduction, however narrow what is sent is. A slice is encoded for itself, so that a codec's
blocks lie in one slice, and every rank's in the same way, its own too: which rank owns a slice does not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .._core.mesh import Axis
from .._core.ops import OpContext, PendingResult, start_op
from .._core.primitive import apply
from .._spec.codec import Codec, Form, pack_rows, unpack_bytes
from ..collectives._functions import make_label

__all__ = ["count_senders", "encode_slices", "reduce_encoded", "start_encoded_reduction"]

_MOST_DECODES = 4
"""The most calls of a decoder for one reduction: each decodes the slices of as many ranks as that takes."""


def encode_slices(buffer: Tensor, codec: Codec, num_slices: int) -> Tensor:
    """Return the bytes of each encoded slice of a buffer, a row for each."""
    rows = buffer.view(num_slices, -1)
    raw, form = pack_rows(codec._encode_rows(rows))
    codec._forms.setdefault((rows.shape[1], buffer.dtype), (raw.shape[1], form))  # not every encode runs on shapes
    return raw


def start_encoded_reduction(
    sent: Tensor, *, codec: Codec, context: OpContext, numel: int, dtype: torch.dtype, mean: bool
) -> PendingResult:
    """Start to reduce the rows of `encode_slices` to this rank's slice of ``numel`` elements: the sum or the ``mean``."""
    form = codec._describe_encoding(numel, dtype)[1]

    def decode(received: Tensor) -> Tensor:
        return _sum_rows(received, form, codec, numel, dtype, context.size, mean=mean)

    return start_op("all_to_all", sent, context).then(decode)


def reduce_encoded(buffer: Tensor, codec: Codec, axis: Axis, op: Literal["mean", "sum"], label: str) -> Tensor:
    """Reduce a buffer to a slice along an axis, as `start_encoded_reduction`; dimensions after the first are batches."""
    batch = buffer.shape[1:]
    rows = buffer.unflatten(0, (axis.size, -1)).movedim(1, -1)  # by owner, by batch
    numel = rows.shape[-1]
    raw, form = pack_rows(codec._encode_rows(rows.reshape(-1, numel)))
    label = label and f"{label} encoded by {codec}"  # ranks compare it: other codecs may send as many bytes
    received = apply("all_to_all", raw.reshape(axis.size, -1), axis, label=make_label(label)).reshape(raw.shape)
    total = _sum_rows(received, form, codec, numel, buffer.dtype, axis.size, mean=op == "mean")
    return total.reshape(*batch, numel).movedim(-1, 0)


def count_senders(size: int) -> int:
    """Return the number of ranks whose slices are decoded together."""
    return -(-size // _MOST_DECODES)


def _sum_rows(received: Tensor, form: Form, codec: Codec, numel: int, dtype: torch.dtype, size: int, *, mean: bool) -> Tensor:
    """Decode the slices that this rank has received, by sender, and add them in the order of ranks.

    Some senders' at a time: those of all ranks, decoded, are as large as the unit's buffer.
    """
    tensors, rows_each = unpack_bytes(received, form), len(received) // size  # several rows under vmap

    def decode(rows: Sequence[Tensor]) -> Tensor:
        decoded = codec._decode_slices(rows, numel, dtype)
        return decoded if len(rows[0]) == rows_each else decoded.reshape(-1, rows_each * numel).sum(0)

    first, *rest = zip(*(x.split(count_senders(size) * rows_each) for x in tensors), strict=True)
    total = decode(first)
    for rows in rest:
        total = total + decode(rows)
    return total / size if mean else total
