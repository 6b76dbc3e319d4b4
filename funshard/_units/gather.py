"""The gather of one unit under way: from this rank's slice to its buffer, through copies to the device and codecs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _torch
from .._spec.precision import pack_bytes
from ..collectives._mesh import Mesh
from .chain import BufferPool, CollectiveChain, RouteTable, StartStep
from .host import start_copy_to_device
from .route import Route, find_slice

__all__ = ["copy_kept_slice", "start_gather", "start_gather_of_kept"]


def start_gather(shard: Tensor, key: str, routes: RouteTable, buffers: BufferPool) -> CollectiveChain:
    """Start to gather the unit of this key. To be called below all transforms."""
    route = routes.by_key[key]
    if not routes.has_groups and _torch.is_fake(shard):  # shapes can be computed
        return CollectiveChain(route.allocate(shard), ())
    if route.device is None:
        return _start_collectives(shard, key, routes, buffers)
    piece, copy = start_copy_to_device(
        shard, key, route.device, shard.dtype if route.codec or route.layout else route.dtypes.param
    )
    with copy.queue_behind():  # and beside what is computed with the unit before
        chain = _start_collectives(piece, key, routes, buffers)
    chain.copy = copy
    return chain


def copy_kept_slice(buffer: Tensor, route: Route, mesh: Mesh) -> Tensor:
    """Return a copy of the slice of a gathered buffer that this rank keeps between forward and backward."""
    index = find_slice(route.kept_axes, mesh) or 0  # sizes without ranks have shapes alone
    numel = -(-len(buffer) // route.num_kept)
    with _torch.below_transforms(), _torch.below_autograd():
        piece = buffer[index * numel : (index + 1) * numel]
        kept = piece.new_empty(numel)
        kept[: len(piece)].copy_(piece)  # shorter at the end of bytes, which have no padding for this
        return kept


def start_gather_of_kept(kept: Tensor, key: str, routes: RouteTable, buffers: BufferPool) -> CollectiveChain:
    """Start to gather the unit of this key from the slices of its buffer that forward kept. As `start_gather`."""
    route = routes.by_key[key]
    if not routes.has_groups and _torch.is_fake(kept):
        return CollectiveChain(route.allocate(kept), ())
    numel, length = route.num_kept * len(kept), route.buffer_bytes // kept.itemsize
    own = None if _torch.is_traced() else buffers.take(numel, kept.dtype, kept)
    chain = CollectiveChain(kept, routes.steps[key].gather_kept, own)
    if numel > length:
        chain.decode = lambda buffer: buffer.narrow(0, 0, length)
    return chain


def _start_collectives(piece: Tensor, key: str, routes: RouteTable, buffers: BufferPool) -> CollectiveChain:
    """Return the chain of a unit's gather, which sends a codec's bytes, or the slice in the parameters' dtype."""
    route, steps = routes.by_key[key], routes.steps[key].gather
    if route.layout:
        return _start_mixed(piece, route, steps, buffers)
    if route.codec:
        whole = piece if route.split_axes or route.device else piece.clone()
        sent, form = (whole, route.form) if route.form else pack_bytes(route.codec._encode_slice(piece))
        chain = CollectiveChain(sent, steps)
        chain.decode = functools.partial(route.decode, form=form)
        return chain
    own = None
    if route.split_axes and not _torch.is_traced():
        own = buffers.take(route.padded_numel, route.dtypes.param, piece)
    casts = own is not None and len(route.split_axes) == 1  # as it writes its own slice
    return CollectiveChain(piece if casts else piece.to(route.dtypes.param), steps, own)


def _start_mixed(piece: Tensor, route: Route, steps: Sequence[StartStep], buffers: BufferPool) -> CollectiveChain:
    """Return the chain of the gather, as bytes, of a unit whose parameters have several dtypes."""
    layout = route.layout
    assert layout is not None
    if _torch.is_traced():
        chain = CollectiveChain(layout.encode(piece), steps)
        chain.decode = layout.join
        return chain
    raw = buffers.take(layout.sent_bytes * layout.num_slices, torch.uint8, piece)
    out = raw.chunk(layout.num_slices)[layout.index or 0]  # where the gather puts it
    if len(route.split_axes) > 1:
        out = raw.new_empty(layout.sent_bytes)
    chain = CollectiveChain(layout.encode_into(piece, out), steps, raw)
    if layout.is_padded:

        def join(raw: Tensor) -> Tensor:
            joined = layout.join_into(raw, buffers.take(layout.buffer_bytes, torch.uint8, raw))
            buffers.give(raw)
            return joined

        chain.decode = join
    return chain
