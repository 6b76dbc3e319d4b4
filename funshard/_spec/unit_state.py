"""The elementwise state of a unit, which declares what its tensors are: slices, or numbers for the unit's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optree
import torch
from torch.utils import _pytree as pytree  # the tree of torch.func and torch.compile


class UnitState(dict[str, Any]):
    """The elementwise state of a unit by name: a dict that declares which of its values are numbers. All others are slices.

    It is a pytree node whose declaration is static, so that `torch.func`, `torch.compile` and ``tree_map`` see plain tensors.
    ``tree_map`` over several states needs the same declaration in all of them, and refuses a plain dict: make one of it first.
    Copies, pickles and ``torch.load(weights_only=True)`` keep the declaration; pickles need funshard imported.

    Args:
        values: The tensors by name, such as a plain dict of an older checkpoint.
        numbers: The names of tensors that are numbers, which have no dimensions.

    Raises:
        ValueError: A number has no value.

    Example:
        >>> import torch, funshard as fs
        >>> plain = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(8)}
        >>> fs.optim.UnitState(plain, numbers=["step"]).numbers
        frozenset({'step'})
    """

    __module__ = "funshard.optim"  # pickles name it
    __slots__ = ("numbers",)
    numbers: frozenset[str]
    """The names of the values that are numbers."""

    def __init__(self, values: Iterable[tuple[str, Any]] | Mapping[str, Any], numbers: Iterable[str]) -> None:
        super().__init__(values)
        self.numbers = frozenset(numbers)
        for name in self.numbers:
            if name not in self:
                raise ValueError(f"UnitState: expected numbers among {[*self]}, got '{name}'")

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitState, (dict(self), sorted(self.numbers))

    def copy(self) -> UnitState:
        """Return a new state of the same tensors."""
        return UnitState(self, self.numbers)

    def __or__(self, other: Mapping[str, Any]) -> UnitState:  # pyright: ignore[reportIncompatibleMethodOverride]
        return UnitState({**self, **other}, self.numbers)


def replace_values(old: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with new values that declares what the old one does."""
    return UnitState(values, old.numbers) if isinstance(old, UnitState) else dict(values)


_Context = tuple[tuple[str, ...], frozenset[str]]


def _unflatten_state(values: Iterable[Any], context: Any) -> UnitState:
    names, numbers = context
    return UnitState(zip(names, values, strict=True), numbers)


def _flatten_state(state: Any) -> tuple[list[Any], _Context]:
    names = tuple(sorted(state))  # in any order of insertion states have the same structure, as dicts do
    return [state[name] for name in names], (names, state.numbers)


def _flatten_with_keys(state: Any) -> tuple[list[tuple[Any, Any]], _Context]:
    values, context = _flatten_state(state)
    return [(pytree.MappingKey(name), x) for name, x in zip(context[0], values, strict=True)], context


pytree.register_pytree_node(
    UnitState,
    _flatten_state,
    _unflatten_state,
    serialized_type_name="funshard.optim.UnitState",
    flatten_with_keys_fn=_flatten_with_keys,
)
_register: Any = optree.register_pytree_node
_global_namespace: Any = getattr(optree, "registry").__GLOBAL_NAMESPACE  # noqa: B009


def _flatten_with_entries(state: Any) -> tuple[list[Any], _Context, tuple[str, ...]]:
    values, context = _flatten_state(state)
    return values, context, context[0]


_register(
    UnitState, _flatten_with_entries, lambda context, values: _unflatten_state(values, context), namespace=_global_namespace
)
torch.serialization.add_safe_globals([UnitState])
