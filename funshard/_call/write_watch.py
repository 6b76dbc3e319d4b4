"""Detection of writes by forward into the parameters that it reads: gathered copies, or the caller's own tensors.

Versions tell of a write at no cost to a device. They miss one through ``.data``, which is found by copies: in `funshard.check`
and `funshard.testing.assert_exact`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._core.layout import unflatten_unit
from .._core.ops import is_checked
from .._core.unit import Unit
from .._wire.mixed_layout import MixedLayout

_comparing = 0
"""How many `compare_values` are active in this process."""


@contextlib.contextmanager
def compare_values() -> Generator[None]:
    """Compare the values of parameters with copies after forward, and restore them, within this context."""
    global _comparing
    _comparing += 1
    try:
        yield
    finally:
        _comparing -= 1


class WriteWatch:
    """The versions of one unit's parameters when the watch began: in one buffer (of bytes if it has a layout), or of each.

    ``views`` are the parameters where they are views of the buffer, which ``weight.data = other`` would take elsewhere.
    """

    __slots__ = ("_layout", "_unit", "_watched", "views")

    def __init__(
        self, unit: Unit, tensors: Iterable[Tensor], views: Sequence[Tensor] = (), layout: MixedLayout | None = None
    ) -> None:
        self._unit, self.views, self._layout = unit, views, layout
        bases = () if _torch.is_tracing() else map(_torch.unwrap, tensors)
        self._watched = [(x, _torch.version(x), _copy(x) if _comparing or is_checked() else None) for x in bases]

    def find_write(self) -> str | None:
        """Return what has been written to since, None if nothing has. The values of before are restored from copies."""
        changed = [
            not _bits_equal(now, copy) if copy is not None else _torch.version(now) != version
            for now, version, copy in self._watched
        ]
        if not any(changed):
            return self._find_replaced()
        what = self._describe(changed)
        with _torch.below_transforms():
            for now, _, copy in self._watched:
                if copy is not None:
                    now.copy_(copy)
        return what

    def _find_replaced(self) -> str | None:
        if not self._watched:
            return None
        storages = {_torch.storage_id(now) for now, _, _ in self._watched}
        for i, view in enumerate(self.views):
            if _torch.storage_id(_torch.unwrap(view)) not in storages:
                return f"parameter '{self._unit.params[i].name}'"
        return None

    def _describe(self, changed: list[bool]) -> str:
        """Name the parameter that was changed, or those among which it is."""
        names = [param.name for param in self._unit.params]
        buffer, _, copy = self._watched[0]
        is_split = self._layout is not None or not self._unit.param_dtypes
        if len(changed) == 1 and copy is not None and buffer.dim() == 1 and is_split:  # and no vmap has batched it
            unflatten = self._layout.unflatten if self._layout else unflatten_unit
            pairs = zip(unflatten(buffer, self._unit), unflatten(copy, self._unit), strict=True)
            changed = [not _bits_equal(*pair) for pair in pairs]
        if len(changed) == len(names):  # those given in full may be views of one buffer, which have one version
            names = [name for name, is_changed in zip(names, changed, strict=True) if is_changed]
        return f"parameter '{names[0]}'" if len(names) == 1 else f"one of the parameters {', '.join(map(repr, names))}"


def _copy(x: Tensor) -> Tensor | None:
    with _torch.below_transforms():
        return x.clone() if x.layout is torch.strided and not x.is_meta and not _torch.is_fake(x) else None


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    with _torch.below_transforms():
        return torch.equal(a, b) or torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def write_error(unit: Unit, what: str) -> RuntimeError:
    """Return the error for what `WriteWatch.find_write` has found."""
    return RuntimeError(
        f"{what} of unit '{unit.key}' was changed in place in forward: expected it left alone, since what is "
        "gathered is let go again and what was given is yours, and has the change; compute with a new tensor "
        "(w = self.weight.clamp(-1, 1)), or change the shards between steps (weight clipping, and in the place of "
        "nn.Embedding's max_norm). fs.check() names the parameter"
    )
