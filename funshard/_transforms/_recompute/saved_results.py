"""Selective recomputation: the first run saves results of operators, and the last one reuses them instead of kernels.

It works below autograd, which makes its nodes in the last run as always. A result is reused where the same operator is
about to compute it from the same values (value_numbering.py); what differs between the two runs is computed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ... import _torch
from ..._spec.remat import Remat
from .active_runs import activate, active_runs, leave_finished_runs
from .ambient import AmbientState
from .occurrences import find_count, record_count
from .regions import mark_name, missing_names_message
from .value_numbering import ValueNumbering, result_tensors

__all__ = ["SavedResults", "checkpoint_name"]


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Name a tensor, so that ``remat(f, save={name})`` can save it; jax.ad_checkpoint.checkpoint_name.

    ``P(remat=Remat(save={name}))`` saves it for a module. The result of the operator that made ``x`` is saved, and its
    kernel does not run again; ``x`` may be a view of it. An argument, and a result that was changed in place since, is not
    saved but computed again. Outside a remat this does nothing.

    Args:
        x: The tensor.
        name: Its name.

    Returns:
        ``x``.

    Raises:
        TypeError: ``x`` is no tensor or ``name`` no string.

    Example:
        >>> import torch, funshard as fs
        >>> f = fs.remat(lambda x: fs.checkpoint_name(x.exp(), "exp").sin(), save={"exp"})
        >>> torch.func.grad(f)(torch.tensor(0.0)) == torch.tensor(1.0).cos()
        tensor(True)
    """
    if torch.compiler.is_compiling():
        return mark_name(x, name)
    if not isinstance(x, Tensor) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"checkpoint_name: expected a tensor and a name, got a {type(x).__name__} and {name!r}")
    for run in active_runs():
        if isinstance(run, _SavingRun):
            run.add_name(x, name)
    leave_finished_runs()
    return x


@dataclass
class _SavedResult:
    """The results of one call of an operator."""

    op: Any
    value: Any
    random_states: list[Tensor] | None  # after the call, if it drew random numbers
    versions: tuple[int, ...] = ()  # of its tensors at the end of the first run, which sees every write until then

    def current_versions(self) -> tuple[int, ...]:
        """Return the versions of its tensors now."""
        return tuple(map(_torch.version, result_tensors(self.value)))

    def reuse(self, name: str) -> Any:
        """Return the results as new tensors with versions of their own; RuntimeError if they were changed in place."""
        if self.versions != self.current_versions():
            raise _changed_error(name, self.op)
        return tree_map_only(Tensor, Tensor.detach, self.value)


def _changed_error(name: str, op: _torch.OpOverload, how: str = "") -> RuntimeError:
    """Return the error for a saved result that was changed in place."""
    return RuntimeError(
        f"{name}: the result of {op} is saved, and was changed in place afterwards{how}: expected it unchanged; do not save "
        "this operator, or change a copy of its result"
    )


class SavedResults:
    """The results that the first run of a function has saved for the last one."""

    def __init__(self, remat: Remat, name: str, function: object) -> None:
        self.name, self._remat, self._function = name, remat, function
        self.numbers: dict[Hashable, int] = {}
        self.by_number: dict[int, _SavedResult] = {}  # by the number of the operator's call

    @contextlib.contextmanager
    def first_run(self, xs: Sequence[Tensor], ambient: AmbientState) -> Generator[None]:
        """Save results within this context; ValueError if the function gives none of the names to save."""
        names = self._remat.names
        run = _SavingRun(self, xs, ambient, self._remat, find_count(self._function, self._remat))
        try:
            with activate(run):
                yield
        finally:
            run.end()
        if names and not names & run.seen_names:
            raise ValueError(missing_names_message(self.name, names, run.seen_names))
        record_count(self._function, self._remat, run.count)

    @contextlib.contextmanager
    def last_run(self, xs: Sequence[Tensor], ambient: AmbientState, *, retained: bool) -> Generator[None]:
        """Reuse results within this context, and free them unless the graph is ``retained`` for another backward."""
        if not self.by_number:
            yield
            return
        try:
            with activate(_ReusingRun(self, xs, ambient, retained=retained)):
                yield
        finally:
            if not retained:
                self.by_number.clear()


@dataclass
class _ResultTuple:
    """The results of an operator that has several: the first is not held, and its storage's end frees the others."""

    items: list[Any]
    position: int
    container: Callable[[list[Any]], Any]
    storage: weakref.ref[Any]


class _Saver(NamedTuple):
    """The call of an operator whose results are saved if the first of them gets a name."""

    number: int
    op: Any
    random_states: list[Tensor] | None
    view: tuple[Any, ...]  # dtype, shape, strides and offset of the first
    results: _ResultTuple | None = None


class _SavingRun(ValueNumbering):
    """The first run. It saves the results of the chosen operators, and those that are named."""

    def __init__(
        self, saved: SavedResults, xs: Iterable[Tensor], ambient: AmbientState, remat: Remat, expected_count: int | None
    ) -> None:
        super().__init__(saved.numbers, xs)
        self._saved, self._ambient = saved, ambient
        self._names, self.seen_names = remat.names, set[str]()
        self._operators = remat.save - remat.names if isinstance(remat.save, frozenset) else frozenset[Any]()
        self._is_chosen = None if remat.save == remat.names else remat._choose_operators()
        self.count, self._expected_count = 0, expected_count
        self.needs_every_op = bool(self._operators)  # to count them
        # by the number of its first tensor, a result that is saved if it gets a name
        self._savers: dict[int | None, _Saver] = {}
        self._ops: dict[int, _torch.OpOverload] = {}  # by the storages that are saved, the operators that made them

    def run_op(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, draws: bool) -> Any:
        """Run the operator. Save its results if they are chosen, or as soon as the first of them gets a name."""
        out = op(*args, **kwargs)
        tensors = result_tensors(out)
        if not tensors or any(not _torch.is_plain(x) or self.number_of(x) is not None for x in tensors):
            return out
        is_chosen = self._is_chosen is not None and self._is_chosen(op, args, kwargs, out)
        if not is_chosen and not self._names:
            return out
        random_states = self._ambient.get_random_states() if draws else None
        if is_chosen:
            self._save(number, op, tree_map_only(Tensor, _torch.detach_in_dispatch, out), random_states)
            self._count_saved()
        else:
            self._save_if_named(number, op, out, random_states)
        return out

    def _save(self, number: int, op: Any, value: Any, random_states: list[Tensor] | None) -> None:
        self._saved.by_number[number] = _SavedResult(op, value, random_states)
        self._ops |= {_torch.storage_id(x): op for x in result_tensors(value)}

    def count_unseen(self, op: Any) -> None:
        """Count it, so that a run that has more of them to save than earlier ones did is the last to save too few."""
        self.count += op in self._operators

    def check_write(self, x: Tensor, op: _torch.OpOverload) -> None:
        """Raise RuntimeError if this tensor is saved: the last run would reuse it as it was before the write."""
        if (maker := self._ops.get(_torch.storage_id(x))) is not None:
            raise _changed_error(self._saved.name, maker, f", by {op}")

    def _save_if_named(self, number: int, op: Any, out: Any, random_states: list[Tensor] | None) -> None:
        """Save results when the first tensor, or a view of it, gets a name. Until then only the others are held."""
        if isinstance(out, Tensor):
            view = out.dtype, out.shape, out.stride(), out.storage_offset()
            self._savers[self.number_key((number, 0))] = _Saver(number, op, random_states, view)
            return
        first, *others = result_tensors(out)
        items: list[Any] = list(out)
        if sum(isinstance(x, Tensor) for x in items) <= len(others):
            return  # lists in lists
        position = next(i for i, x in enumerate(items) if x is first)
        items = [
            None if i == position else _torch.detach_in_dispatch(x) if isinstance(x, Tensor) else x for i, x in enumerate(items)
        ]
        view = first.dtype, first.shape, first.stride(), first.storage_offset()
        key = self.number_key((number, 0))
        on_free = functools.partial(self._savers.pop, key)  # frees the other results as well
        storage = weakref.ref(first.untyped_storage(), on_free)
        self._savers[key] = _Saver(number, op, random_states, view, _ResultTuple(items, position, type(out), storage))

    def add_name(self, x: Tensor, name: str) -> None:
        """Save what made a tensor of this name, if the name is to be saved and the tensor is unchanged."""
        self.seen_names.add(name)
        if name not in self._names:
            return
        if not self.is_done:
            self._save_named(_torch.unwrap(x))
        self._count_saved()

    def _count_saved(self) -> None:
        """Count a saved result. No operator needs a number once there are as many as earlier calls have shown."""
        self.count += 1
        if not self.is_done and self.count == self._expected_count:
            self.is_done = True
            self._record_versions()

    def _save_named(self, x: Tensor) -> None:
        """Save the result that a named tensor is a view of, if an operator of this run made it."""
        if _torch.is_plain(x) and (key := self.number_of(x)) in self._savers:
            saver = self._savers.pop(key)
            dtype, *view = saver.view
            if x.dtype != dtype:
                return
            with _torch.below_transforms():
                value: Any = x.detach().as_strided(*view)
            if (results := saver.results) is not None:
                results.items[results.position] = value
                value = results.container(results.items)
            self._save(saver.number, saver.op, value, saver.random_states)

    def end(self) -> None:
        """Free what was not named, and record versions, unless writes are not seen since before."""
        if not self.is_done:
            self._record_versions()

    def _record_versions(self) -> None:
        """Record the versions of the saved results, and free those that were not named."""
        self._savers.clear()
        for result in self._saved.by_number.values():
            result.versions = result.current_versions()


class _ReusingRun(ValueNumbering):
    """The last run, which reuses what was saved."""

    def __init__(self, saved: SavedResults, xs: Iterable[Tensor], ambient: AmbientState, *, retained: bool) -> None:
        super().__init__(saved.numbers, xs)
        self._saved, self._ambient, self._retained = saved, ambient, retained
        self._left = len(saved.by_number)  # results that this run has not reused yet
        self.is_done = not self._left

    def run_op(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, draws: bool) -> Any:
        """Return the saved results and set the random state as after the call; run the operator if there are none."""
        results = self._saved.by_number
        result = results.get(number) if self._retained else results.pop(number, None)
        if result is None:
            return op(*args, **kwargs)
        self._left -= 1
        self.is_done = not self._left  # no call that follows needs a number
        if result.random_states is not None:
            self._ambient.set_random_states(result.random_states)
        return result.reuse(self._saved.name)
