"""Detection of writes by forward into the parameters that it reads: gathered copies, or the caller's own tensors.

A gathered buffer is freed and gathered again, so a write into it would be lost for backward; a buffer that is the caller's
own shard must not be changed at all. Versions do not tell: ``weight.data.clamp_()`` leaves them as they are. So a lazy copy
watches what forward reads: it costs nothing until somebody writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.unit import Unit
from .._units.layout import unflatten_unit
from .._units.mixed_layout import MixedLayout

__all__ = ["WriteWatch", "write_error"]


class WriteWatch:
    """The values of one unit's parameters when the watch began: in one buffer, or each by itself.

    ``views`` are the parameters where they are views of the buffer, which ``weight.data = other`` would take elsewhere.
    ``layout`` is that of a buffer of bytes.
    """

    __slots__ = ("_layout", "_unit", "_watched", "views")

    def __init__(
        self, unit: Unit, tensors: Iterable[Tensor], views: Sequence[Tensor] = (), layout: MixedLayout | None = None
    ) -> None:
        self._unit, self.views, self._layout = unit, views, layout
        bases = () if _torch.is_traced() else map(_torch.unwrap, tensors)
        with _torch.below_transforms():
            copies = ((x, _torch.lazy_clone(x), _torch.version(x)) for x in bases if _can_be_copied(x))
            self._watched: list[tuple[Tensor, Tensor | None, int]] = [*copies]

    def drop_lazy_copies(self, *, copies: bool) -> None:
        """Watch versions alone, or real copies: where compiled code takes an address, a lazy copy becomes a real one."""
        if not copies:
            self._watched = [(x, None, version) for x, _, version in self._watched]
            return
        with _torch.below_transforms():
            self._watched = [(x, x.clone(), version) for x, _, version in self._watched]

    def find_write(self) -> str | None:
        """Return what has been written to since, None if nothing has. The values of before are restored from the copies."""
        moved = any(_torch.version(now) != version for now, _, version in self._watched)
        if not moved and all(before is None or _torch.shares_memory(now, before) for now, before, _ in self._watched):
            return self._find_replaced()
        with _torch.below_transforms():
            changed = [
                _torch.version(now) != version if before is None else not _bits_equal(now, before)
                for now, before, version in self._watched
            ]
            what = self._describe(changed) if moved or any(changed) else None
            for (now, before, _), differs in zip(self._watched, changed, strict=True):
                if differs and before is not None:
                    now.copy_(before)
        return what or self._find_replaced()

    def _find_replaced(self) -> str | None:
        """Return a parameter that is no view of the buffer any more."""
        if not self._watched or not self.views or _torch.is_wrapped(self.views[0]):  # then all of them are
            return None
        storages = {_torch.storage_id(now) for now, _, _ in self._watched}
        for i, view in enumerate(self.views):
            if _torch.storage_id(view) not in storages:
                return f"parameter '{self._unit.params[i].name}'"
        return None

    def _describe(self, changed: list[bool]) -> str:
        """Name the parameter that was changed, or those among which it is."""
        names = [param.name for param in self._unit.params]
        buffer, copy, _ = self._watched[0] if len(changed) == 1 else (None, None, 0)
        is_split = self._layout is not None or not self._unit.kept_dtypes
        if buffer is not None and copy is not None and buffer.dim() == 1 and is_split:  # and no vmap has batched it
            unflatten = self._layout.unflatten if self._layout else unflatten_unit
            pairs = zip(unflatten(buffer, self._unit), unflatten(copy, self._unit), strict=True)
            changed = [not _bits_equal(*pair) for pair in pairs]
        if len(changed) == len(names) and any(changed):
            return f"parameter '{names[changed.index(True)]}'"
        return f"one of the parameters {', '.join(map(repr, names))}"


def _can_be_copied(x: Tensor) -> bool:
    """Return whether a tensor is dense and has values, and is of no subclass but Parameter."""
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, NaN included."""
    return torch.equal(a, b) or torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def write_error(unit: Unit, what: str) -> RuntimeError:
    """Return the error for what `WriteWatch.find_write` has found."""
    return RuntimeError(
        f"{what} of unit '{unit.key}' was changed in place in forward: expected it left alone, since what is "
        "gathered is let go again and what was given is yours; compute with a new tensor (w = self.weight.clamp(-1, 1)), or "
        "change the shards between steps (weight clipping, and in the place of nn.Embedding's max_norm)"
    )
