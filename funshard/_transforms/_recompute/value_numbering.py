"""Runs of a function in which what is computed alike has the same number, by which one run is compared with another.

Every storage has one: an argument's, or that of the operator that made it or wrote to it last, with its arguments' numbers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ... import _torch

__all__ = ["ValueNumbering", "result_tensors"]


class ValueNumbering(_torch.DispatchMode):
    """A run, in which every storage has a number: the same one in another run where it holds the same."""

    def __init__(self, numbers: dict[Hashable, int], xs: Iterable[Tensor]) -> None:
        super().__init__()
        self.paused = False
        self._numbers = numbers
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._times: Counter[Hashable] = Counter()
        self._drawn = 0
        for i, x in enumerate(xs):
            if _torch.is_plain(x) and self.known(x) is None:
                self._note(x, self.number(("argument", i)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not isinstance(func, _torch.OpOverload):
            return func(*args, **kwargs)
        if func.is_view:
            out = func(*args, **kwargs)
            if func is torch.ops.aten.lift_fresh.default and (value := _constant(out)) is not None:
                self._note(out, self.number(value))
            return out
        args, kwargs = _torch.args_under_autograd(func, args, kwargs)  # in the first run nothing is
        draws = torch.Tag.nondeterministic_seeded in func.tags
        number = self._called(func, args, kwargs, draws=draws)
        keeps = _torch.is_pure_op(func) and kwargs.get("generator") is None
        out = self.run(func, args, kwargs, number, draws) if keeps else func(*args, **kwargs)
        for i, x in enumerate(result_tensors(out)):
            if _torch.is_plain(x) and self.known(x) is None:
                self._note(x, self.number((number, i)))
        for i, x in enumerate(() if _torch.is_inplace_view(func) else _torch.mutated_args(func, args, kwargs)):
            if _torch.is_plain(x):
                self.wrote(x, func)
                self._note(x, self.number((number, "wrote", i)))
        return out

    def wrote(self, x: Tensor, op: _torch.OpOverload) -> None:
        """The operator has changed this in place."""

    def run(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, draws: bool) -> Any:
        """What the operator makes."""
        raise NotImplementedError

    def named(self, x: Tensor, name: str) -> None:
        """The function gives a tensor a name."""

    def made_of(self, tensors: Sequence[Tensor], key: str, source: Tensor) -> None:
        """These tensors, which no operator here has made, are all that is in ``source``."""
        number = self._storage(_torch.unwrap(source))
        for x in {_torch.storage_id(x): x for x in map(_torch.unwrap, tensors)}.values():
            if self.known(x) is None:
                self._note(x, self.number(("unit", key, number)))

    def number(self, key: Hashable) -> int:
        """That of what is known by this key: the same one in all runs with these ``numbers``."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _called(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool) -> int:
        """The number of an operator on these arguments, this time; where it draws random numbers, of all times."""
        key: Hashable = (op, self._described(args), self._described(tuple(kwargs.items())))
        try:
            self._times[key] += 1
        except TypeError:  # an argument that nothing is known of
            key = object()
        if kwargs.get("generator") is not None:  # of which another run may find another state
            key = object()
        self._drawn += draws
        return self.number((key, self._times[key], draws and self._drawn))

    def _described(self, x: Any) -> Hashable:
        if isinstance(x, Tensor):
            if not _torch.is_plain(x):
                return object()
            bits = x.is_conj(), x.is_neg()
            return self._storage(x), x.dtype, x.shape, x.stride(), x.storage_offset(), bits
        if isinstance(x, list | tuple):
            return tuple(map(self._described, x))
        return type(x), x

    def _storage(self, x: Tensor) -> Hashable:
        number = self.known(x)
        return ("outside", _torch.storage_id(x)) if number is None else number

    def known(self, x: Tensor) -> int | None:
        """The number of the tensor's storage; None for one that is not known here."""
        ref, number = self._storages.get(_torch.storage_id(x), (None, None))
        return None if ref is None or ref() is None else number

    def _note(self, x: Tensor, number: int) -> None:
        storage = x.untyped_storage()
        self._storages[_torch.storage_id_of(storage)] = weakref.ref(storage), number


def result_tensors(value: Any) -> list[Tensor]:
    """The tensors among an operator's results."""
    return [value] if isinstance(value, Tensor) else [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _constant(x: Tensor) -> Hashable:
    """What is in a small tensor that was made of numbers. None where that is not known, or not known here."""
    if not _torch.is_plain(x) or _torch.is_fake(x) or x.device.type != "cpu" or x.numel() > 1000:
        return None
    return "constant", x.dtype, x.shape, repr(x.tolist())
