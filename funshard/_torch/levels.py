"""torch.func's stack of transforms, and the wrappers that each of its levels puts around a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.eager_transforms import grad_increment_nesting
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)

__all__ = [
    "any_tracked",
    "at_level",
    "below_autograd",
    "below_transforms",
    "can_replace_saved_tensors",
    "current_level",
    "detach_level",
    "dispatch_keys",
    "has_only_derivatives",
    "has_tangent",
    "is_batched",
    "is_dead",
    "is_in_forward_ad",
    "is_leaf",
    "is_tracked",
    "is_wrapped",
    "level_of",
    "materialize_zeros",
    "needs_graph",
    "tracking_levels",
    "unwrap",
    "unwrap_dead",
    "unwrap_level",
    "unwrap_to_level",
    "unwrap_untracked",
    "wrap_at_level",
    "wrap_for_ended_level",
]


def current_level() -> int:
    """Return the number of running torch.func transforms: 0 outside of all.

    functional_call must not hand a tensor of a transform that has ended to one that runs on, and `grad` must know
    whether it is nested. Pinned by ``test_level_counts_transforms``.
    """
    return _functorch.maybe_current_level() or 0


def needs_graph() -> bool:
    """Return whether a backward, or a transform, may later differentiate what is computed now.

    Plain forward-mode AD never does, and inference mode keeps nothing for it.
    """
    if torch.is_inference_mode_enabled():
        return False
    return current_level() > 0 or (torch.is_grad_enabled() and not is_in_forward_ad())


def can_replace_saved_tensors() -> bool:
    """Return whether saved tensors can be replaced: outside of torch.func, or in a single torch.func.grad or vjp.

    Deeper stacks keep what they save. Pinned by ``test_hooks_work_in_one_transform``.
    """
    depth = current_level()
    return depth == 0 or (depth == 1 and _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Grad)


def unwrap(tensor: Tensor) -> Tensor:
    """Return the plain tensor, which has a storage, inside the wrappers of all transforms."""
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether the tensor is in a wrapper of a transform, running or ended."""


def level_of(tensor: Tensor) -> int:
    """Return the level of the transform that the tensor belongs to, 0 for none, -1 for one that has ended."""
    return _functorch.maybe_get_level(tensor) if is_wrapped(tensor) else 0


def unwrap_to_level(tensor: Tensor, level: int) -> Tensor:
    """Return the tensor as this level sees it: without the wrappers of higher levels and of transforms that have ended."""
    while level_of(tensor) > max(level, 0) or is_dead(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


DispatchKeys = tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]
"""The dispatch keys that a thread includes, and those that it excludes."""


def dispatch_keys() -> DispatchKeys:
    """Return the dispatch keys of the user code that is running, for `tracking_levels`."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def tracking_levels(tensor: Tensor, keys: DispatchKeys) -> frozenset[int]:
    """Return the levels below the tensor's own at which autograd or forward AD tracks the tensor; 0 is plain autograd.

    ``detach`` ends all of them, ``.data`` that of its own level alone, ``no_grad`` those of reverse mode: what it gives a
    view of says that it requires grad and has no graph. Where autograd saves tensors, the levels below cannot be asked
    for a tangent but with the ``keys`` of user code. Pinned by ``test_followed_at_which_levels``.
    """
    levels: list[int] = []
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        if _has_graph(tensor) or (is_in_forward_ad() and _has_tangent(tensor, keys)):
            levels.append(level_of(tensor))
    return frozenset(levels)


def _has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor requires grad; False for a view made under no_grad of a tensor that does."""
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    made_without = tensor._is_view() and tensor._base is not None and tensor._base.requires_grad
    return not made_without


def has_tangent(tensor: Tensor) -> bool:
    """Return whether the innermost forward-mode derivative follows the tensor."""
    while _functorch.is_batchedtensor(tensor):  # unpack_dual has no batching rule
        tensor = _functorch.get_unwrapped(tensor)
    return is_in_forward_ad() and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def _has_tangent(tensor: Tensor, keys: DispatchKeys) -> bool:
    """Return whether a tensor has a tangent, as seen with the dispatch keys of a transform."""
    # the keys may be those of a transform that has ended: once the stack is empty, its own have nothing to go to
    target = level_of(tensor)
    ended = contextlib.nullcontext() if target > 0 else torch._C._ExcludeDispatchKeyGuard(_FUNCTORCH_KEYS)
    with torch._C._ForceDispatchKeyGuard(*keys), at_level(target), ended:
        return has_tangent(tensor)


_FUNCTORCH_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode).add(
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
)
"""The dispatch keys of torch.func, excluded where no transform runs any more."""


@contextlib.contextmanager
def at_level(target: int) -> Generator[None]:
    """Leave the transforms above this level for a while.

    Pinned, with `unwrap_to_level` and `wrap_at_level`, by ``test_weights_of_every_level``.
    """
    with contextlib.ExitStack() as stack:
        while current_level() > max(target, 0):
            stack.enter_context(temporarily_pop_interpreter_stack())
        yield


def wrap_at_level(tensor: Tensor, level: int) -> Tensor:
    """Wrap the tensor as a constant of this level (0: none); a saved tensor keeps its derivatives at lower levels."""
    return _functorch._wrap_for_grad(tensor, level) if level else tensor


def wrap_for_ended_level(tensor: Tensor) -> Tensor:
    """Wrap the tensor for a level that has ended, in the wrapper of a new level that ends at once."""
    with grad_increment_nesting() as level:
        return _functorch._wrap_for_grad(tensor, level)


def has_only_derivatives() -> bool:
    """Return whether every running torch.func transform is a grad, vjp or jvp."""
    kinds = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
    return all(interpreter.key() in kinds for interpreter in retrieve_all_functorch_interpreters())


def is_tracked(tensor: Tensor) -> bool:
    """Return whether autograd, torch.func or forward-mode AD follows the tensor. Pinned by ``test_derivatives_are_refused``."""
    while is_wrapped(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return has_tangent(tensor)


def is_leaf(tensor: Tensor) -> bool:
    """Return whether neither autograd nor any transform has computed the tensor. Pinned by ``test_leaves_of_transforms``."""
    while is_wrapped(tensor):
        if not tensor.is_leaf:
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.is_leaf


def any_tracked(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether one of these is in a transform's wrapper, or `is_tracked` in the current grad mode; None is not."""
    follows = torch.is_grad_enabled() or is_in_forward_ad()  # or else nobody follows but transforms
    return any(x is not None and (is_wrapped(x) or (follows and is_tracked(x))) for x in tensors)


def is_dead(tensor: Tensor) -> bool:
    """Return whether the transform that the tensor belongs to has ended. Pinned by ``test_a_pullback_gives_plain_tensors``."""
    return _functorch.is_dead_tensor_wrapper(tensor)


def unwrap_untracked(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of transforms that do not differentiate it.

    What returns its argument (``to``, ``contiguous``) returns a constant in a new wrapper there. Pinned by
    ``test_constants_come_back_wrapped``.
    """
    while _functorch.is_gradtrackingtensor(tensor) and not tensor.requires_grad:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def unwrap_dead(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of ended transforms: operators see through one such wrapper, not through two.

    Pinned by ``test_what_has_ended_twice``.
    """
    while is_dead(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


class below_transforms:  # noqa: N801  a context, as torch.no_grad
    """A context without gradients and outside of all transforms, for tensors that `unwrap` returns.

    A transform would wrap what is computed from them, and the result would die with it. Pinned by ``test_beneath``. A class,
    as it is entered some ten times for each unit: a generator takes three times as long.
    """

    __slots__ = ("_grad", "_stack")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._stack = temporarily_clear_interpreter_stack() if current_level() else None
        if self._stack is not None:
            self._stack.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators skip autograd, which for functional collectives is written in Python.

    Use it only within `below_transforms`, where nobody differentiates. Pinned by ``test_below_autograd``.
    """
    return torch._C._AutoDispatchBelowAutograd()


def is_batched(tensor: Tensor) -> bool:
    """Return whether a vmap has batched the tensor. Pinned, as `overwrite`, by ``test_pure_form``."""
    while is_wrapped(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def unwrap_level(tensor: Tensor) -> Tensor:
    """Return the tensor without the outermost wrapper of a running torch.func.grad."""
    return _functorch.get_unwrapped(tensor) if _functorch.is_gradtrackingtensor(tensor) else tensor


def detach_level(tensor: Tensor) -> Tensor:
    """Detach the tensor from the graph of the running torch.func.grad only, or of plain autograd outside of one.

    ``detach`` inside a transform cuts those of all levels. Pinned by ``test_without_graph_cuts_one_level``.
    """
    if _functorch.is_gradtrackingtensor(tensor):
        return _functorch._wrap_for_grad(unwrap_level(tensor), _functorch.maybe_get_level(tensor))
    return tensor.detach()


def materialize_zeros(tangent: Tensor) -> Tensor:
    """Return a tangent that has memory: zeros instead of a ZeroTensor, which has none.

    Pinned by ``test_zero_tangents_arrive_without_memory``.
    """
    return torch.zeros_like(tangent) if tangent._is_zerotensor() else tangent  # pyright: ignore[reportPrivateUsage]


def is_in_forward_ad() -> bool:
    """Return whether a torch.autograd.forward_ad level is open. Pinned by ``test_forward_ad_level``."""
    return torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
