"""The gather of one unit under way: from this rank's slice to its buffer, by way of its device and of what it is encoded in."""

from __future__ import annotations

import functools

from torch import Tensor

from .. import _torch
from .._spec.codec import packed
from .chain import Buffers, Chain, Routes
from .host import arriving

__all__ = ["gathering"]


def gathering(shard: Tensor, key: str, routes: Routes, buffers: Buffers) -> Chain:
    """The gather of the unit of this key, started. To be called beneath all transforms."""
    route = routes.of[key]
    if not routes.connected and _torch.is_fake(shard):  # shapes can be computed
        return Chain(shard.new_empty(route.padded, dtype=route.dtypes.param, device=route.device), ())
    if route.device is None:
        return _sent(shard, key, routes, buffers)
    piece, copy = arriving(shard, route.device, shard.dtype if route.codec else route.dtypes.param)
    with copy.after():  # and beside what is computed with the unit before
        chain = _sent(piece, key, routes, buffers)
    chain.after = copy
    return chain


def _sent(piece: Tensor, key: str, routes: Routes, buffers: Buffers) -> Chain:
    route, steps = routes.of[key], routes.steps[key].gather
    if route.codec:
        whole = piece if route.split or route.device else piece.clone()
        sent, form = (whole, route.form) if route.form else packed(route.codec.encoded(piece))
        chain = Chain(sent, steps)
        chain.made = functools.partial(route.decoded, form=form)
        return chain
    own = None
    if route.split and not _torch.is_traced():
        own = buffers.take(route.padded, route.dtypes.param, piece)
    casts = own is not None and len(route.split) == 1  # as it writes its own slice
    return Chain(piece if casts else piece.to(route.dtypes.param), steps, own)
