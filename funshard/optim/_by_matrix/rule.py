"""What an optimizer does with a matrix: before it travels, on its owner, and after; and how that is made of a pure update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["MatrixInit", "MatrixUpdate", "Options", "Rule", "Sent", "Slots", "Whole", "of_update"]

Options = Mapping[str, Any]
"""Of one matrix: its learning rate, say, and the ``step`` that is taken, counted from 1, on the host."""
Slots = dict[str, Tensor]
"""Elementwise state, by name."""
Sent = tuple[Tensor, ...]
"""What of a matrix travels: as many tensors, of the same dtypes, for each."""
Whole = dict[str, dict[str, Tensor]]
"""By matrix what its owner alone has of its state."""


@dataclass(frozen=True)
class Rule:
    """An optimizer of matrices. The first and the last step are elementwise, on slices; the middle one is for owners."""

    slots: tuple[str, ...]
    """Names of its elementwise state, which is kept in slices."""
    begin: Callable[[Tensor], Slots]
    """The rest of a matrix's state, from a tensor of its shape, dtype and device; with ``values`` all of it, from its own."""
    before: Callable[[Tensor, Slots, Tensor, Options], tuple[Sent, Slots]]
    """``before(grad, slots, param, options) -> (what is sent, new slots)``."""
    work: Callable[[Mapping[str, Sent], Whole, Mapping[str, Options]], tuple[dict[str, Sent], Whole]]
    """``work(sent, state, options) -> (results, new state)``, by name, of the matrices that a rank owns in a group."""
    gives: tuple[int, ...]
    """Of which of the tensors that are sent each result has the dtype."""
    after: Callable[[Sent, Slots, Tensor, Options], tuple[Tensor, Slots]]
    """``after(results, slots, param, options) -> (new param, new slots)``."""
    values: bool = False
    owner_options: bool = False
    """Whether owners alone compute with the options, in ``work``; else slices do, before and after."""


class MatrixInit(Protocol):
    """``init(param) -> state``, a dict of tensors; run on a meta tensor where only their names and shapes are asked for."""

    def __call__(self, param: Tensor, /) -> Mapping[str, Tensor]:
        """The state before the first step."""
        ...


class MatrixUpdate(Protocol):
    """``update(grad, state, param) -> (new param, new state)`` of one matrix, with ``lr=`` where the step has one."""

    def __call__(
        self, grad: Tensor, state: Mapping[str, Tensor], param: Tensor, /, **options: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One step, that changes nothing it is given."""
        ...


def of_update(init: MatrixInit, update: MatrixUpdate, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Rule:
    """The rule of a pure update of whole matrices: all of it happens on the owner.

    State of the matrix's own shape travels with it, where all matrices have it, vectors as well; the rest stays with the owner.
    """
    begun = {shape: _tried(init, update, shape, dtype) for shape, dtype in dict.fromkeys(shapes)}
    alike = [[name for name, x in state.items() if x.shape == shape] for shape, state in begun.items()]
    slots = tuple(name for name in alike[0] if all(name in names for names in alike)) if alike else ()

    def before(grad: Tensor, slots: Slots, param: Tensor, options: Options) -> tuple[Sent, Slots]:
        return (grad, param, *slots.values()), slots

    def work(sent: Mapping[str, Sent], whole: Whole, options: Mapping[str, Options]) -> tuple[dict[str, Sent], Whole]:
        results: dict[str, Sent] = {}
        new: Whole = {}
        for name, (grad, param, *rest) in sent.items():
            rates = {key: value for key, value in options[name].items() if key != "step"}
            own = dict(zip(slots, rest, strict=True))
            # copies: where nothing is sent these are the caller's own, and an update may write after all
            given = {slot: x.clone() for slot, x in {**own, **whole[name]}.items()}
            stepped, state = update(grad.clone(), given, param.clone(), **rates)
            _check(f"'{name}'", stepped, param, state, given)
            results[name] = (stepped, *(state[slot] for slot in slots))
            new[name] = {key: state[key] for key in whole[name]}
        return results, new

    def after(results: Sent, slots: Slots, param: Tensor, options: Options) -> tuple[Tensor, Slots]:
        stepped, *rest = results
        return stepped, dict(zip(slots, rest, strict=True))

    return Rule(
        slots, lambda x: dict(init(x)), before, work, tuple(range(1, 2 + len(slots))), after, values=True, owner_options=True
    )


def _tried(init: MatrixInit, update: MatrixUpdate, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The state of a matrix of this shape, on meta; an error on all ranks for an update that does not give what it should."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    state: Any
    new: Any
    try:
        state = init(x)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(
            f"by_matrix: init runs on a meta tensor first, for names and shapes: expected that to do, got: {error}"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise TypeError(f"by_matrix: init: expected a dict of tensors, got {state!r}")
    try:
        new = update(x, dict(state), x)
    except Exception:  # it asks for values, or for options: what it gives is looked at on the owner
        return state
    if not isinstance(new, tuple) or len(new) != 2:
        raise TypeError(f"by_matrix: update: expected (new param, new state), got {type(new).__name__}")
    _check(f"a matrix {list(shape)}", new[0], x, new[1], state)
    return state


def _check(of: str, new: object, param: Tensor, state: Mapping[str, object], given: Mapping[str, Tensor]) -> None:
    def told(x: object) -> str:
        return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

    if told(new) != told(param):
        raise ValueError(f"by_matrix: the update of {of}: expected {told(param)}, got {told(new)}")
    after, before = ({name: told(x) for name, x in one.items()} for one in (state, given))
    if after != before:
        raise ValueError(f"by_matrix: the new state of {of}: expected {before}, as before, got {after}")
