"""Selective recomputation: the first run saves results of operators, and the last one reuses them instead of kernels.

It works below autograd, which makes its nodes in the last run as always. A result is reused where the same operator is
about to compute it from the same values (`ValueNumbering`); what differs between the two runs is computed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ... import _torch
from ..._spec.options import Remat, Save
from .ambient import AmbientState
from .regions import mark_name, missing_names_message

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SavedResults", "checkpoint_name", "leave_finished_runs", "number_views", "run_unrecorded"]


# --- Value numbering: equal numbers for what two runs of a function compute alike, as compilers number equal expressions ---
#
# The number of a storage is that of an argument, or of the operator that made it or wrote to it last, with the numbers of
# the operator's arguments.


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


# --- The runs of selective recomputation that are active in this thread ---

Args = ParamSpec("Args")
Result = TypeVar("Result")

_THREAD = threading.local()
"""``runs``: the runs that are numbered in this thread, the innermost last."""


def active_runs() -> tuple[ValueNumbering, ...]:
    """Return the runs that are numbered now, the innermost last."""
    return getattr(_THREAD, "runs", ())


def leave_finished_runs() -> None:
    """Leave the modes of runs that need no more operators, because an active mode slows each operator down."""
    for run in reversed(active_runs()):
        run.leave_if_done()


def run_unrecorded(f: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Call ``f`` without saving or reusing results: it gathers parameters, which all ranks must do together."""
    before = [(run, run.paused) for run in active_runs()]
    for run, _ in before:
        run.paused = True
    try:
        return f(*args, **kwargs)
    finally:
        for run, paused in before:
            run.paused = paused


def number_views(tensors: Sequence[Tensor], key: str, source: Tensor | None) -> Sequence[Tensor]:
    """Return the tensors, numbered in the active runs as views of the unit ``key`` whose shard is ``source``."""
    for run in active_runs():
        if source is not None:
            run.number_views(tensors, key, source)
    return tensors


@contextlib.contextmanager
def activate(run: ValueNumbering) -> Generator[None]:
    """Make a run active within this context; it may leave its mode before the end."""
    before = active_runs()
    _THREAD.runs = (*before, run)
    try:
        with run:
            yield
    finally:
        _THREAD.runs = before


# --- How often a function comes across what it is to save: the rest of a run then needs no dispatch mode ---
#
# A count too low costs a recomputation and one too high the mode, never a number.

_COUNTS: MutableMapping[object, dict[Save, int]] = WeakIdKeyDictionary()
"""For each function and each set to save from it, the largest count of its runs."""


def find_count(function: object, remat: Remat) -> int | None:
    """Return how often earlier first runs came across what is to be saved; None if a function has to see every operator."""
    if not isinstance(remat.save, frozenset):
        return None
    return _counts_of(function).get(remat.save)


def record_count(function: object, remat: Remat, count: int) -> None:
    """Record how often a first run came across what is to be saved."""
    if isinstance(remat.save, frozenset):
        counts = _counts_of(function)
        counts[remat.save] = max(count, counts.get(remat.save, 0))


def _counts_of(function: object) -> dict[Save, int]:
    """Return the counts kept for a function; a new dict, which nothing keeps, if it takes no weak reference."""
    with contextlib.suppress(TypeError):  # an object without weak references
        return _COUNTS.setdefault(function, {})
    return {}


# --- The two runs, and what the first one saves ---


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
