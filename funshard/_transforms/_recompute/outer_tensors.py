"""Tensors of the transforms around a run that the run reads without having been given them.

torch takes such a tensor for a constant: the run is below those transforms. So its derivative would be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import _torch
from .graph_checks import check_not_read, describe_parameter

__all__ = ["OuterTensors"]

_DETACH = frozenset({torch.detach, torch.Tensor.detach})


class OuterTensors(TorchFunctionMode):
    """A mode that records the tensors of outer transforms that functions with tensors as results are given.

    Args:
        name: The function that runs, for errors.
        objects: What it reaches. Errors name parameters of modules among these.
    """

    def __init__(self, name: str, objects: Iterable[object]) -> None:
        super().__init__()
        self._name, self._objects, self._keys = name, objects, _torch.dispatch_keys()
        self._tensors: dict[int, Tensor] = {}  # by id

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if not any(map(_may_be_outer, (*args, *kwargs.values()))):  # nearly always
            return func(*args, **kwargs)
        level = _torch.current_level()
        outer = [x for x in _iter_tensors((*args, *kwargs.values())) if _torch.level_of(x) > level]
        for x in filter(_torch.is_batched, outer):
            self._refuse(x)
        out = func(*args, **kwargs)
        if outer and func not in _DETACH and next(_iter_tensors((out,)), None) is not None:
            self._tensors.update((id(x), x) for x in outer)
        return out

    def check(self) -> None:
        """Raise RuntimeError if a running transform differentiates one of the recorded tensors."""
        for x in self._tensors.values():
            # the levels of a tensor are those inside of another wrapper around it
            if _torch.tracking_levels(_torch.wrap_for_ended_level(x), self._keys):
                self._refuse(x)

    def _refuse(self, x: Tensor) -> NoReturn:
        """Raise RuntimeError for a tensor that is neither an argument nor reached from one."""
        check_not_read(self._name, describe_parameter({id(x)}, self._objects))
        raise RuntimeError(
            f"{self._name} reads a tensor of shape {list(x.shape)} that is neither an argument nor reached from one, as in a "
            "global or an attribute of a class, and that a transform around it has computed: there it would have no gradient; "
            "expected it among the arguments"
        )


def _may_be_outer(value: Any) -> bool:
    """Return whether a value is a tensor of a transform, or may contain one."""
    return _torch.is_wrapped(value) if isinstance(value, Tensor) else type(value) in (tuple, list)


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _iter_tensors(value)
