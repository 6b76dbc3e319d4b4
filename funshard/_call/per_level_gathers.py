"""Weights that stacks of transforms save, gathered again by the backward of each transform.

Under several torch.func transforms, or one around plain autograd, a saved weight is a tensor of one level, and its value is
one of the level below, with a graph or a tangent there. What is kept instead says which view of which unit it was at which
level. The backward of that level gathers the unit's shard once more as the level below sees it. So the gather is a part of
what is differentiated there, exactly, at every order. No gradient tells when the last use is over, so only the units that
were gathered last stay.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._transforms.saved_tensors import RestorableBuffer, TensorRestorer, hook_running_node
from .saved_weights import MAX_UNSHARDED_IN_BACKWARD, check_unmodified

__all__ = ["PerLevelGathers"]


class PerLevelGathers:
    """The gathers of one call that the backwards of its transforms repeat."""

    def __init__(self) -> None:
        self.live: dict[int, RestorableBuffer] = {}  # by storage: what pack recognises
        self._count = itertools.count()
        # by number: what is in it must not hold this
        self._recent = deque[tuple[int, int, list[Tensor]]](maxlen=MAX_UNSHARDED_IN_BACKWARD)
        self.keys = _torch.dispatch_keys()
        with _torch.below_transforms():
            empty = torch.empty(0)
        levels = range(1, _torch.current_level() + 1)
        self._levels = [_torch.wrap_at_level(empty, level) for level in levels]  # to know when each is over

    def add(
        self, key: str, shard: Tensor, buffers: Sequence[Tensor], gather: Callable[[Tensor], list[Tensor]]
    ) -> tuple[int, ...]:
        """Add the gathered buffers, one for each dtype, of the unit of this key.

        Returns:
            Their storages, by which they are removed from ``live``.
        """
        dtypes = tuple(buffer.dtype for buffer in buffers)
        storages = tuple(_torch.storage_id(_torch.unwrap(buffer)) for buffer in buffers)
        self.live |= dict.fromkeys(storages, _RepeatableGather(self, key, next(self._count), shard, dtypes, gather))
        return storages

    def recent_buffer(self, gather: _RepeatableGather, level: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer of a dtype as a level sees it, gathered again unless it is among the last ones."""
        which = gather.number, level
        buffers = next((buffers for *some, buffers in self._recent if tuple(some) == which), None)
        if buffers is None:
            buffers = gather.unshard_again(level)
            self._recent.append((*which, buffers))
        return buffers[gather.dtypes.index(dtype)]

    def is_over(self, level: int) -> bool:
        """Return whether the transform of this level has ended, as when the pullback of a vjp runs."""
        return level > 0 and _torch.is_dead(self._levels[level - 1])


class _RepeatableGather:
    """A gather that can be repeated as any level sees it."""

    def __init__(
        self,
        call: PerLevelGathers,
        key: str,
        number: int,
        shard: Tensor,
        dtypes: tuple[torch.dtype, ...],
        gather: Callable[[Tensor], list[Tensor]],
    ) -> None:
        self._key, self.number, self.dtypes = key, number, dtypes
        self._call, self._shard, self._gather = call, shard, gather
        self._version = _torch.version(shard)

    def unshard_again(self, level: int) -> list[Tensor]:
        """Gather the buffers as a level sees them. Raise RuntimeError if the shard was modified in place since."""
        check_unmodified(self._key, self._shard, self._version)
        with _torch.at_level(level), torch.set_grad_enabled(level >= 0):
            return self._gather(_torch.unwrap_to_level(self._shard, level))

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> TensorRestorer | None:
        """Return what the graph of a level keeps instead of this view of the buffer, None to keep the view."""
        level = _torch.level_of(tensor)
        if level < 0:
            return None
        view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return functools.partial(self._restore_view, level, _torch.tracking_levels(tensor, self._call.keys), *view)

    def _restore_view(
        self,
        level: int,
        followed: frozenset[int],
        dtype: torch.dtype,
        shape: torch.Size,
        stride: tuple[int, ...],
        offset: int | torch.SymInt,
    ) -> Tensor:
        """Return the view as its level saw it, of the buffer gathered again."""
        over = self._call.is_over(level)
        below = max(followed, default=-1)
        buffer = self._call.recent_buffer(self, below, dtype)
        if torch.is_grad_enabled():
            hook_running_node({_torch.storage_id(_torch.unwrap(buffer)): self}, 0 if over else level)
        with _torch.at_level(below), torch.set_grad_enabled(below >= 0):
            view = buffer.as_strided(shape, stride, offset)
        view = _torch.wrap_for_ended_level(view) if over else _torch.wrap_at_level(view, level)
        now = _torch.tracking_levels(view, self._call.keys)
        if now != followed:
            raise RuntimeError(
                f"unit '{self._key}': a weight that forward saved is followed by derivatives of levels {sorted(followed)}, "
                f"gathered again by those of {sorted(now)}: expected the same; give the unit P(reshard=False)"
            )
        return view
