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

    State of the matrix's own shape travels with it, where all matrices have it; vectors' and the rest stays with the owner.
    """
    kinds = [_kinds(init, shape, dtype) for shape, dtype in dict.fromkeys(shapes)]
    alike = [names for names in kinds if names is not None]
    slots = tuple(name for name in alike[0] if all(name in names for names in alike)) if alike else ()

    def before(grad: Tensor, slots: Slots, param: Tensor, options: Options) -> tuple[Sent, Slots]:
        return (grad, param, *slots.values()), slots

    def work(sent: Mapping[str, Sent], whole: Whole, options: Mapping[str, Options]) -> tuple[dict[str, Sent], Whole]:
        results: dict[str, Sent] = {}
        new: Whole = {}
        for name, (grad, param, *rest) in sent.items():
            rates = {key: value for key, value in options[name].items() if key != "step"}
            own = dict(zip(slots, rest, strict=True)) if param.dim() > 1 else {}
            stepped, state = update(grad, {**own, **whole[name]}, param, **rates)
            _check(name, stepped, param, state, {*own, *whole[name]})
            results[name] = (stepped, *(state[slot] if slot in own else x for slot, x in zip(slots, rest, strict=True)))
            new[name] = {key: state[key] for key in whole[name]}
        return results, new

    def after(results: Sent, slots: Slots, param: Tensor, options: Options) -> tuple[Tensor, Slots]:
        stepped, *rest = results
        return stepped, dict(zip(slots, rest, strict=True))

    return Rule(slots, lambda x: dict(init(x)), before, work, tuple(range(1, 2 + len(slots))), after, values=True)


def _kinds(init: MatrixInit, shape: tuple[int, ...], dtype: torch.dtype) -> list[str] | None:
    """The names of the state of a matrix of this shape that have the same one; None for a vector."""
    if len(shape) < 2:
        return None
    return [name for name, x in init(torch.empty(shape, dtype=dtype, device="meta")).items() if tuple(x.shape) == shape]


def _check(name: str, new: object, param: Tensor, state: Mapping[str, object], expected: set[str]) -> None:
    if not isinstance(new, Tensor) or new.shape != param.shape or new.dtype != param.dtype:
        got = f"{list(new.shape)} {new.dtype}" if isinstance(new, Tensor) else type(new).__name__
        raise ValueError(f"by_matrix: the update of '{name}': expected {list(param.shape)} {param.dtype}, got {got}")
    if set(state) != expected:
        raise ValueError(f"by_matrix: the new state of '{name}': expected {sorted(expected)}, got {sorted(state)}")
