"""torch.no_grad in forward-mode AD, where torch itself ignores it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
from torch.overrides import TorchFunctionMode

from .levels import current_level

__all__ = ["NoGradInForwardMode", "NoGradInTracedForwardMode"]


class _ModeCount(threading.local):
    """The number of the modes that this thread is within."""

    count = 0


_MODE_COUNT = _ModeCount()


class NoGradInTracedForwardMode(TorchFunctionMode):
    """A mode in which results under ``torch.no_grad`` in a torch.func transform are constants for jvp, too.

    It asks for the mode of gradients at each function of torch and keeps no state: C++ changes that mode, too. A view would
    ask its base for a tangent later, so results are detached. This one is for torch.compile, as Dynamo cannot trace what the
    other one asks and counts. Pinned by ``test_no_grad_in_a_compiled_hvp``.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # whose super() Dynamo traces in a call of the method alone
            func = _unflatten
        if torch.is_grad_enabled() or func is torch._VF._unpack_dual:  # which reads a tangent
            return func(*args, **kwargs)
        with _set_fwd_grad_enabled(False):
            out = func(*args, **kwargs)
            given = [*args, *kwargs.values()]
            if isinstance(out, Tensor):
                return _detach_result(out, given)
            return type(out)(_detach_result(x, given) for x in out) if type(out) in (list, tuple) else out


class NoGradInForwardMode(NoGradInTracedForwardMode):
    """The same mode outside of torch.compile.

    Custom Functions run without it: what runs others' code in one enters another where `is_active` was true. Pinned by
    ``test_no_grad_in_forward_mode``.
    """

    @staticmethod
    def is_active() -> bool:
        """Return whether this thread is within one, even if that is disabled for the moment."""
        return _MODE_COUNT.count > 0

    def __enter__(self) -> NoGradInForwardMode:
        _MODE_COUNT.count += 1
        return super().__enter__()  # pyright: ignore[reportReturnType]

    def __exit__(self, *error: Any) -> None:
        _MODE_COUNT.count -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled() or not current_level():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _unflatten(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call the method of a tensor."""
    return x.unflatten(*args, **kwargs)


def _detach_result(x: Any, given: list[Any]) -> Any:
    """Detach a result, unless the result is itself one of the arguments, as with operators that write in place."""
    return x.detach() if isinstance(x, Tensor) and not any(x is other for other in given) else x
