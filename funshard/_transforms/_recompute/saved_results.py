"""What the first run of a function keeps of its operators' results, and the last one is handed instead of running them.

Below autograd, which makes its nodes in the last run as ever. A result is handed out where the same operator is about to
compute it from the same (numbered.py); what differs between the two runs is computed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ... import _torch
from ..._spec.remat import Chosen, Remat
from .ambient import AmbientState
from .regions import mark_name, missing_names_message
from .value_numbering import ValueNumbering, result_tensors

__all__ = ["SavedResults", "checkpoint_name", "number_views", "run_unrecorded"]

Args = ParamSpec("Args")
Result = TypeVar("Result")

_RUNS = threading.local()


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """``x``, by a name that ``remat(f, save={name})`` and ``P(remat=Remat(save={name}))`` can keep it by.

    jax.ad_checkpoint.checkpoint_name. What is kept is the result of the operator that made ``x``, whose kernel then does
    not run again; ``x`` may be a view of it. An argument, and what was changed in place since it was made, is kept by
    nobody; it is computed again as ever. Outside of a remat this does nothing.

    >>> import torch, funshard as fs
    >>> f = fs.remat(lambda x: fs.checkpoint_name(x.exp(), "exp").sin(), save={"exp"})
    >>> torch.func.grad(f)(torch.tensor(0.0)) == torch.tensor(1.0).cos()
    tensor(True)

    Raises TypeError for another thing than a tensor and a name.
    """
    if torch.compiler.is_compiling():
        return mark_name(x, name)
    if not isinstance(x, Tensor) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"checkpoint_name: expected a tensor and a name, got a {type(x).__name__} and {name!r}")
    for run in _runs():
        run.named(x, name)
    return x


def _runs() -> tuple[ValueNumbering, ...]:
    """The runs that are watched here, the innermost last."""
    return getattr(_RUNS, "now", ())


def run_unrecorded(make: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """``make(*args, **kwargs)``, of which nothing is kept or handed out: parameters are gathered, by all ranks together."""
    before = [(run, run.paused) for run in _runs()]
    for run, _ in before:
        run.paused = True
    try:
        return make(*args, **kwargs)
    finally:
        for run, paused in before:
            run.paused = paused


def number_views(tensors: Sequence[Tensor], key: str, source: Tensor | None) -> Sequence[Tensor]:
    """The tensors, which are in each run what this is made of: views of the unit of that key, of its shard."""
    for run in _runs():
        if source is not None:
            run.made_of(tensors, key, source)
    return tensors


@dataclass
class _Result:
    """What an operator has made, and the random numbers' state after it where it drew some."""

    op: Any
    value: Any
    random: list[Tensor] | None
    versions: tuple[int, ...] = ()
    """Its tensors', when the first run ended: until then each write was seen, and what only looks otherwise counts as one."""

    def versions_now(self) -> tuple[int, ...]:
        """Its tensors'."""
        return tuple(map(_torch.version, result_tensors(self.value)))

    def again(self, name: str) -> Any:
        """It, as if it had been made anew, of versions of its own. RuntimeError if it was changed after the first run."""
        if self.versions != self.versions_now():
            raise _changed(name, self.op)
        return tree_map_only(Tensor, Tensor.detach, self.value)


def _changed(name: str, made: _torch.OpOverload, how: str = "") -> RuntimeError:
    return RuntimeError(
        f"{name}: what {made} made is saved, and was changed in place afterwards{how}: expected it as it was made; do not save "
        "this operator, or change a copy of what it made"
    )


class SavedResults:
    """What the first run of a function has kept for the last one."""

    def __init__(self, remat: Remat, name: str) -> None:
        self.name, self._remat = name, remat
        self.numbers: dict[Hashable, int] = {}
        self.results: dict[int, _Result] = {}
        """By the number of the operator that made it."""

    @contextlib.contextmanager
    def first_run(self, xs: Sequence[Tensor], surroundings: AmbientState) -> Generator[None]:
        """Within this the function runs for the first time. ValueError if it has none of the names that are to be saved."""
        names = self._remat.names
        run = _First(self, xs, surroundings, self._remat.chosen(), names)
        try:
            with _watched(run):
                yield
        finally:
            run.ended()
        if names and not names & run.seen:
            raise ValueError(missing_names_message(self.name, names, run.seen))

    @contextlib.contextmanager
    def last_run(self, xs: Sequence[Tensor], surroundings: AmbientState, *, retained: bool) -> Generator[None]:
        """Within this it runs for its gradient; unless that is ``retained`` for another time, what is kept goes."""
        try:
            with _watched(_Last(self, xs, surroundings, retained=retained)):
                yield
        finally:
            if not retained:
                self.results.clear()


@contextlib.contextmanager
def _watched(run: ValueNumbering) -> Generator[None]:
    before = _runs()
    _RUNS.now = (*before, run)
    try:
        with run:
            yield
    finally:
        _RUNS.now = before


class _First(ValueNumbering):
    """The first run, which keeps what is chosen, and what is named."""

    def __init__(
        self, kept: SavedResults, xs: Iterable[Tensor], surroundings: AmbientState, chosen: Chosen, names: frozenset[str]
    ) -> None:
        super().__init__(kept.numbers, xs)
        self._kept, self._surroundings = kept, surroundings
        self._chosen, self._names, self.seen = chosen, names, set[str]()
        self._makers: dict[int | None, tuple[Callable[[Tensor], None], weakref.ref[Any]]] = {}
        """By the number of its first tensor, how to keep what an operator has made."""
        self._ops: dict[int, _torch.OpOverload] = {}
        """By the storages that are kept, what made them."""

    def run(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, draws: bool) -> Any:
        """What the operator makes; it is kept if it is chosen, and may be as long as its first tensor lives."""
        out = op(*args, **kwargs)
        tensors = result_tensors(out)
        if not tensors or any(not _torch.is_plain(x) or self.known(x) is not None for x in tensors):
            return out
        chosen = self._chosen(op, args, kwargs, out)
        if not chosen and not self._names:
            return out
        random = self._surroundings.random() if draws else None
        if chosen:
            self._keep(number, op, tree_map_only(Tensor, _torch.detach_in_dispatch, out), random)
        else:
            self._may_keep(number, op, out, random)
        return out

    def _keep(self, number: int, op: Any, value: Any, random: list[Tensor] | None) -> None:
        self._kept.results[number] = _Result(op, value, random)
        self._ops |= {_torch.storage_id(x): op for x in result_tensors(value)}

    def wrote(self, x: Tensor, op: _torch.OpOverload) -> None:
        """RuntimeError if that is kept, for which another run would take it as it was."""
        if (made := self._ops.get(_torch.storage_id(x))) is not None:
            raise _changed(self._kept.name, made, f", by {op}")

    def _may_keep(self, number: int, op: Any, out: Any, random: list[Tensor] | None) -> None:
        """Keep it if its first tensor, or a view of it, gets a name. That one is not held until then, only the others are."""
        first, *others = result_tensors(out)
        items: list[Any] = [out] if isinstance(out, Tensor) else list(out)
        if sum(isinstance(x, Tensor) for x in items) <= len(others):
            return  # lists in lists
        at = next(i for i, x in enumerate(items) if x is first)
        like = first.dtype, (first.shape, first.stride(), first.storage_offset())
        items = [None if i == at else _torch.detach_in_dispatch(x) if isinstance(x, Tensor) else x for i, x in enumerate(items)]
        kind = None if out is first else type(out)

        def keep(x: Tensor) -> None:
            if x.dtype == like[0]:
                with _torch.below_transforms():
                    items[at] = x.detach().as_strided(*like[1])
                self._keep(number, op, kind(items) if kind else items[at], random)

        makes = self.number((number, 0))
        gone = functools.partial(self._makers.pop, makes)  # what is held for it goes with it
        self._makers[makes] = keep, weakref.ref(first.untyped_storage(), gone)

    def named(self, x: Tensor, name: str) -> None:
        """Keep what made it, if it is to be kept and as it was made."""
        self.seen.add(name)
        x = _torch.unwrap(x)
        if name in self._names and _torch.is_plain(x) and (number := self.known(x)) in self._makers:
            self._makers.pop(number)[0](x)

    def ended(self) -> None:
        """No more names are given, and no more writes seen."""
        self._makers.clear()
        for result in self._kept.results.values():
            result.versions = result.versions_now()


class _Last(ValueNumbering):
    """The last run, which is handed what was kept."""

    def __init__(self, kept: SavedResults, xs: Iterable[Tensor], surroundings: AmbientState, *, retained: bool) -> None:
        super().__init__(kept.numbers, xs)
        self._kept, self._surroundings = kept, surroundings
        self._retained = retained

    def run(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, draws: bool) -> Any:
        """What was kept of what the operator makes, with the random numbers as after it, or else what it makes."""
        results = self._kept.results
        result = results.get(number) if self._retained else results.pop(number, None)
        if result is None:
            return op(*args, **kwargs)
        if result.random is not None:
            self._surroundings.put(result.random)
        return result.again(self._kept.name)
