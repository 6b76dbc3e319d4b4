"""Value numbering: equal numbers for what two runs of a function compute alike, as compilers number equal expressions.

The number of a storage is that of an argument, or of the operator that made it or wrote to it last, with the numbers of
the operator's arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ... import _torch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ValueNumbering", "result_tensors"]


class ValueNumbering(_torch.DispatchMode):
    """A mode around one run that numbers every storage; subclasses decide in `run_op` what an operator returns.

    Args:
        numbers: The number of each key, shared by the runs that are compared.
        xs: The arguments of the run.
    """

    def __init__(self, numbers: dict[Hashable, int], xs: Iterable[Tensor]) -> None:
        super().__init__()
        self.paused = False
        self.is_done = False  # from here on operators run as without the mode
        self.needs_every_op = False
        self._is_entered = False
        self._numbers = numbers
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._call_counts: dict[int, int] = {}
        self._draw_count = 0
        for i, x in enumerate(xs):
            if _torch.is_plain(x) and self.number_of(x) is None:
                self._set_number(x, ("argument", i))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or self.is_done or not isinstance(func, _torch.OpOverload):
            if self.is_done and not self.paused:
                self.count_unseen(func)
            return func(*args, **kwargs)
        traits = _torch.op_traits(func)
        if traits.is_view:
            out = func(*args, **kwargs)
            if func is torch.ops.aten.lift_fresh.default and (key := _constant_key(out)) is not None:
                self._set_number(out, key)
            return out
        if traits.log_sum_exp is not None:
            args, kwargs = _torch.args_under_autograd(func, args, kwargs)  # in the first run nothing is
        number = self._number_call(traits, args, kwargs)
        is_reusable = traits.is_pure and kwargs.get("generator") is None
        out = self.run_op(func, args, kwargs, number, traits.draws) if is_reusable else func(*args, **kwargs)
        for i, x in enumerate(result_tensors(out)):
            if _torch.is_plain(x) and self.number_of(x) is None:
                self._set_number(x, (number, i))
        if traits.is_mutation:
            for i, x in enumerate(_torch.mutated_args(func, args, kwargs)):
                if _torch.is_plain(x):
                    self.check_write(x, func)
                    self._set_number(x, (number, "wrote", i))
        return out

    def __enter__(self) -> Self:
        """Enter the mode."""
        super().__enter__()
        self._is_entered = True
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode, unless it has been left."""
        if self._is_entered:
            self._is_entered = False
            super().__exit__(*error)

    def leave_if_done(self) -> None:
        """Leave the mode before the run ends, unless another mode or a transform is inside of it."""
        if self.is_done and not self.needs_every_op and not _torch.current_level() and self.is_innermost():
            self.__exit__(None, None, None)

    def run_op(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, draws: bool) -> Any:
        """Return the results of an operator with this number; ``draws`` says whether it draws random numbers."""
        raise NotImplementedError

    def count_unseen(self, op: Any) -> None:
        """Count an operator that runs when the run is done."""

    def check_write(self, x: Tensor, op: _torch.OpOverload) -> None:
        """Check a tensor that an operator has changed in place."""

    def number_views(self, tensors: Sequence[Tensor], key: str, source: Tensor) -> None:
        """Give numbers to tensors that no operator here has made, but that follow from ``source`` alone."""
        number = self._storage_key(_torch.unwrap(source))
        for x in {_torch.storage_id(x): x for x in map(_torch.unwrap, tensors)}.values():
            if self.number_of(x) is None:
                self._set_number(x, ("unit", key, number))

    def number_key(self, key: Hashable) -> int:
        """Return the number of a key, the same one in all runs that share ``numbers``."""
        return self._numbers.setdefault(key, len(self._numbers))

    def number_of(self, x: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it has none."""
        ref, number = self._storages.get(_torch.storage_id(x), (None, None))
        return None if ref is None or ref() is None else number

    def _set_number(self, x: Tensor, key: Hashable) -> None:
        """Give a tensor's storage the number of a key."""
        storage = x.untyped_storage()
        self._storages[_torch.storage_id_of(storage)] = weakref.ref(storage), self.number_key(key)

    def _number_call(self, traits: _torch.OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of this call of an operator: the arguments, how many such calls, and how many draws before."""
        try:
            call = self.number_key((traits, self._key_of(args), self._key_of(tuple(kwargs.items())) if kwargs else None))
        except TypeError:  # an argument that cannot be hashed
            call = self.number_key(object())
        if kwargs.get("generator") is not None:  # whose state may differ in another run
            call = self.number_key(object())
        count = self._call_counts[call] = self._call_counts.get(call, 0) + 1
        if traits.draws:
            self._draw_count += 1
            return self.number_key((call, count, self._draw_count))
        return call if count == 1 else self.number_key((call, count))

    def _key_of(self, x: Any) -> Hashable:
        """Return a hashable key of an argument that is equal for equal values in two runs."""
        if isinstance(x, Tensor):
            if not _torch.is_plain(x):
                return object()
            return self._storage_key(x), x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()
        if isinstance(x, list | tuple):
            return tuple([self._key_of(item) for item in x])
        return type(x), x

    def _storage_key(self, x: Tensor) -> Hashable:
        """Return the number of a tensor's storage, or the storage itself if it comes from outside."""
        number = self.number_of(x)
        return ("outside", _torch.storage_id(x)) if number is None else number


def result_tensors(value: Any) -> list[Tensor]:
    """Return the tensors among an operator's results."""
    if isinstance(value, Tensor):
        return [value]
    leaves = value if isinstance(value, tuple) and not any(isinstance(x, list | tuple) for x in value) else tree_leaves(value)
    return [x for x in leaves if isinstance(x, Tensor)]


def _constant_key(x: Tensor) -> Hashable:
    """Return the values of a small tensor that was made of numbers; None if they are not known on the host."""
    if not _torch.is_plain(x) or _torch.is_fake(x) or x.device.type != "cpu" or x.numel() > 1000:
        return None
    return "constant", x.dtype, x.shape, repr(x.tolist())
