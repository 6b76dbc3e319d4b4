"""Selective recomputation: the first run saves results of operators, and the next one reuses them instead of kernels.

It works below autograd, which makes its nodes in the next run as always. A call of an operator is known by how many calls of
that operator a run made before it, as in torch.utils.checkpoint. Of what torch.compile traces the nodes are annotated instead.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ... import _torch
from ..._spec.options import Remat, Save
from ..ambient import RUNNING, AmbientState

Call = tuple[_torch.OpTraits, int]
"""A call of an operator: the operator, and how many calls of it were before."""


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
    if _torch.is_in_graph():
        if not _is_name_saved(name):
            return x
        with _torch.annotate_graph(**{NAME_KEY: name}):
            return x.view_as(x)
    if not isinstance(x, Tensor) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"checkpoint_name: expected a tensor and a name, got a {type(x).__name__} and {name!r}")
    for run in RUNNING.first_runs:
        run.add_name(x, name)
    return x


@dataclass
class _SavedResult:
    """The results of one call of an operator. Until they are saved, the first one is not held, but the view of its storage."""

    call: Call
    value: Any
    random_states: list[Tensor] | None  # after the call, if it drew random numbers
    layout: list[Any]  # of its arguments
    view: tuple[Any, ...] = ()
    versions: list[int] | None = None  # of its results at the end of the first run, which sees every write until then


_FIRST = object()
"""Stands for the first result where it is not held."""


class SavedResults(_torch.DispatchMode):
    """A mode around the first run of a function, which saves results, and around the next one, which reuses them."""

    def __init__(self, remat: Remat, name: str) -> None:
        super().__init__()
        self._name, self._remat, self._names, self._seen_names = name, remat, remat.names, set[str]()
        self._by_call: dict[Call, _SavedResult] = {}
        # by storage, in the first run: what made it, and is saved, or will be if it gets a name
        self._makers: weakref.WeakKeyDictionary[Any, _SavedResult] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def run(self, ambient: AmbientState, *, is_first: bool) -> Generator[None]:
        """Save results within this context in the first run, reuse them in the next one; later ones have none left."""
        self._ambient, self._is_first, self._counts = ambient, is_first, dict[_torch.OpTraits, int]()
        chooses = is_first and self._remat.save != self._names
        self._is_chosen = self._remat._choose_operators() if chooses else None
        first_runs = (*RUNNING.first_runs, self) if is_first else RUNNING.first_runs
        try:
            with RUNNING.set(first_runs=first_runs), self if is_first or self._by_call else contextlib.nullcontext():
                yield
            self._check_names() if is_first else self._check_calls()
        finally:
            self._makers.clear()
            if not is_first:
                self._by_call.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if RUNNING.is_paused or not isinstance(func, _torch.OpOverload):
            return func(*args, **kwargs)
        traits = _torch.op_traits(func)
        if traits.is_pure and kwargs.get("generator") is None:
            self._counts[traits] = count = self._counts.get(traits, 0) + 1
            return (self._run_op if self._is_first else self._reuse)((traits, count), args, kwargs)
        out = func(*args, **kwargs)
        if self._is_first and traits.is_mutation:
            for x in filter(_torch.is_plain, _torch.mutated_args(func, args, kwargs)):  # or it would be reused as it is now
                if (result := self._makers.pop(x.untyped_storage(), None)) is not None:
                    self._by_call.pop(result.call, None)
        return out

    # --- the first run ---

    def _run_op(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator. Save its results if they are chosen, or as soon as the first of them gets a name."""
        op = call[0].op
        out = op(*args, **kwargs)
        tensors = _tensors_of(out)
        if not tensors or not all(map(_torch.is_plain, tensors)):
            return out
        is_chosen = self._is_chosen is not None and self._is_chosen(op, args, kwargs, out)
        if is_chosen or self._names:
            states = self._ambient.get_random_states() if call[0].draws else None
            result = _SavedResult(call, tree_map_only(Tensor, _torch.detach_in_dispatch, out), states, _layout_of(args))
            if is_chosen:
                self._save(result)
            elif (storage := tensors[0].untyped_storage()) not in self._makers:  # else `_unsafe_view` and the like give a view
                first = _tensors_of(result.value)[0]
                result.value = tree_map_only(Tensor, lambda x: _FIRST if x is first else x, result.value)
                result.view = first.dtype, first.shape, first.stride(), first.storage_offset()
                self._makers[storage] = result
        return out

    def _save(self, result: _SavedResult) -> None:
        self._by_call[result.call] = result
        for x in _tensors_of(result.value):
            self._makers[x.untyped_storage()] = result

    def add_name(self, x: Tensor, name: str) -> None:
        """Save what made a tensor of this name, if the name is to be saved and the tensor is unchanged."""
        self._seen_names.add(name)
        x = _torch.unwrap(x)
        result = self._makers.get(x.untyped_storage()) if name in self._names and _torch.is_plain(x) else None
        if result is not None and result.call not in self._by_call and result.view[0] == x.dtype:
            with _torch.below_transforms():
                first = x.detach().as_strided(*result.view[1:])
            result.value = tree_map(lambda item: first if item is _FIRST else item, result.value)
            self._save(result)

    def _check_names(self) -> None:
        """Note the versions of what is saved; ValueError if the function gave none of the names."""
        for result in self._by_call.values():
            result.versions = [*map(_torch.version, _tensors_of(result.value))]
        if self._names and not self._names & self._seen_names:
            wanted, given = (", ".join(sorted(map(repr, names))) for names in (self._names, self._seen_names))
            expected = f"some of {given}" if given else "funshard.checkpoint_name(x, name) in it"
            raise ValueError(
                f"{self._name} is to save {wanted}, and gave none of these names while it ran: expected {expected}"
            )

    # --- the next run ---

    def _reuse(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the saved results and set the random state as after the call; run the operator if there are none."""
        result = self._by_call.pop(call, None)
        if result is None or result.versions != [*map(_torch.version, _tensors_of(result.value))]:  # or changed since
            return call[0].op(*args, **kwargs)
        if result.layout != _layout_of(args):
            raise self._differs(call[0].op, f"given {result.layout}, now {_layout_of(args)}")
        if result.random_states is not None:
            self._ambient.set_random_states(result.random_states)
        return tree_map_only(Tensor, Tensor.detach, result.value)

    def _check_calls(self) -> None:
        """Raise RuntimeError for a saved call that the run did not make."""
        for traits, count in self._by_call:
            raise self._differs(traits.op, f"called {count} times, now {self._counts.get(traits, 0)}")

    def _differs(self, op: object, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name} does not run the operators in every run that it ran in its first one, whose results are saved: "
            f"{op}, {how}; expected the same control flow in each run"
        )


def _layout_of(args: tuple[Any, ...]) -> list[Any]:
    return [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x) for x in args]


def _tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for x in tree_leaves(value) if isinstance(x, Tensor)]


# --- regions: torch.compile traces a function once, with its derivatives; _compiled/graph.py computes it again in there ---

REGION_KEY, NAME_KEY = "funshard_region", "funshard_name"
"""Keys of annotations: the number of the innermost region on all that it traces; the name on a view of a named tensor."""


@_torch.assume_constant
def is_collecting_regions() -> bool:
    """Return whether regions are collected now."""
    return RUNNING.regions is not None


@contextlib.contextmanager
def mark_region(remat: Remat) -> Generator[None]:
    """Annotate what torch.compile traces within this context as a region."""
    number = _enter_region(remat.save)  # Dynamo may know only the fields of a Remat that was made in what is traced
    with contextlib.nullcontext() if number < 0 else _torch.annotate_graph(**{REGION_KEY: number}):
        yield


@_torch.assume_constant
def _enter_region(save: Save | None) -> int:
    if RUNNING.regions is None:
        return -1
    RUNNING.regions.append(Remat(save))
    return len(RUNNING.regions) - 1


@_torch.assume_constant
def _is_name_saved(name: str) -> bool:
    return any(name in remat.names for remat in RUNNING.regions or ())
