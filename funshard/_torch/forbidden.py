"""Tensors that must not be used for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils import _pytree as pytree


class ForbiddenTensor(Tensor):
    """The class of a tensor for as long as it is an error to compute with it; it has its metadata.

    Pinned by ``test_a_forbidden_tensor``.
    """

    explain: ClassVar[list[Callable[[Tensor], str]]] = []
    """Functions that return the error of using a tensor, or an empty string."""

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # which has read past the mapping that gathers: run it, and see
            torch._dynamo.graph_break()
        if func not in _QUESTIONS and TracingContext.try_get() is None:  # else the compiler asks
            for tensor in [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ForbiddenTensor)]:
                if text := next(filter(None, (explain(tensor) for explain in cls.explain)), ""):
                    raise RuntimeError(text)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@functools.cache
def _forbidden_class(cls: type[Tensor]) -> type[Tensor]:
    return type(cls.__name__, (ForbiddenTensor, cls), {})


def forbid(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Make it an error to compute with these tensors. Return a function that allows it again."""
    changed = [*tensors]
    classes = [*map(type, changed)]
    for x, cls in zip(changed, classes, strict=True):
        x.__class__ = _forbidden_class(cls)

    def allow() -> None:
        for x, cls in zip(changed, classes, strict=True):
            x.__class__ = cls

    return allow


_QUESTIONS: frozenset[Any] = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__]
    + [getattr(torch._C.TensorBase, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")]
)
