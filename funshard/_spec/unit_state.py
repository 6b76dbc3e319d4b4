"""The elementwise state of a unit, which declares what its tensors are: slices, or numbers for the unit's options."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import optree
from torch.utils import _pytree as pytree  # the tree of torch.func and torch.compile

__all__ = ["UnitState", "replace_values"]

T = TypeVar("T")


class UnitState(dict[str, T]):
    """The elementwise state of a unit by name: a dict that declares which of its values are numbers. All others are slices.

    It is a pytree node whose declaration is static, so that `torch.func`, `torch.compile` and ``tree_map`` see plain tensors.
    It pickles as a plain dict, which ``torch.load(weights_only=True)`` reads.
    """

    __slots__ = ("numbers",)
    numbers: frozenset[str]

    def __init__(self, values: Iterable[tuple[str, T]] | Mapping[str, T], numbers: Iterable[str]) -> None:
        super().__init__(values)
        self.numbers = frozenset(numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __copy__(self) -> UnitState[T]:
        return UnitState(self, self.numbers)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitState[T]:
        return UnitState(((name, copy.deepcopy(x, memo)) for name, x in self.items()), self.numbers)


def replace_values(old: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with new values that declares what the old one does."""
    return UnitState(values, old.numbers) if isinstance(old, UnitState) else dict(values)


_Context = tuple[tuple[str, ...], frozenset[str]]


def _unflatten(values: Iterable[Any], context: Any) -> UnitState[Any]:
    names, numbers = context
    return UnitState(zip(names, values, strict=True), numbers)


def _flatten(state: Any) -> tuple[list[Any], _Context]:
    return [*state.values()], (tuple(state), state.numbers)


def _flatten_with_keys(state: Any) -> tuple[list[tuple[Any, Any]], _Context]:
    return [(pytree.MappingKey(name), x) for name, x in state.items()], (tuple(state), state.numbers)


pytree.register_pytree_node(
    UnitState, _flatten, _unflatten, serialized_type_name="funshard.optim.UnitState", flatten_with_keys_fn=_flatten_with_keys
)
_register: Any = optree.register_pytree_node
_everywhere: Any = getattr(optree, "registry").__GLOBAL_NAMESPACE  # noqa: B009
_register(
    UnitState,
    lambda state: (*_flatten(state), tuple(state)),
    lambda context, values: _unflatten(values, context),
    namespace=_everywhere,
)
