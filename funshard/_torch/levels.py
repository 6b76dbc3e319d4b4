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
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]


def current_level() -> int:
    """Return the number of running torch.func transforms: 0 outside of all. Pinned by ``test_level_counts_transforms``."""
    return _functorch.maybe_current_level() or 0


def needs_graph() -> bool:
    """Return whether a backward, or a transform, may later differentiate what is computed now: plain forward AD never does."""
    is_recorded = current_level() > 0 or (torch.is_grad_enabled() and not is_in_forward_ad())
    return is_recorded and not torch.is_inference_mode_enabled()


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

    ``detach`` ends all of them, ``.data`` that of its own level alone, ``no_grad`` those of reverse mode. Where autograd saves
    tensors, a tangent can be asked for only with the ``keys`` of user code. Pinned by ``test_followed_at_which_levels``.
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
    """Leave the transforms above this level for a while. Pinned by ``test_weights_of_every_level``."""
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


def has_derivative(tensor: Tensor) -> bool:
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
    while is_wrapped(tensor) and tensor.is_leaf:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.is_leaf


def any_tracked(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether one of these is in a transform's wrapper, or `has_derivative` in the current grad mode; None is not."""
    given = [x for x in tensors if x is not None]
    follows = torch.is_grad_enabled() or is_in_forward_ad()  # or else nobody follows but transforms
    return any(map(is_wrapped, given)) or (follows and any(map(has_derivative, given)))


def is_dead(tensor: Tensor) -> bool:
    """Return whether the transform that the tensor belongs to has ended. Pinned by ``test_a_pullback_gives_plain_tensors``."""
    return _functorch.is_dead_tensor_wrapper(tensor)


def unwrap_untracked(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers that ``to`` and the like give to a constant of a transform.

    Pinned by ``test_constants_come_back_wrapped``.
    """
    while _functorch.is_gradtrackingtensor(tensor) and not tensor.requires_grad:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def unwrap_dead(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of ended transforms: torch sees through one. See ``test_what_has_ended_twice``."""
    while is_dead(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


class below_transforms:  # noqa: N801  a context, as torch.no_grad
    """A context without gradients and outside of all transforms, for tensors that `unwrap` returns. Pinned by ``test_beneath``.

    A class, as it is entered some ten times for each unit: a generator takes three times as long.
    """

    __slots__ = ("_grad", "_stack")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._stack = temporarily_clear_interpreter_stack() if _functorch.maybe_current_level() else None
        if self._stack is not None:
            self._stack.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators skip autograd, within `below_transforms`. Pinned by ``test_below_autograd``."""
    return torch._C._AutoDispatchBelowAutograd()


def is_batched(tensor: Tensor) -> bool:
    """Return whether a vmap has batched the tensor. Pinned, as `overwrite`, by ``test_pure_form``."""
    while is_wrapped(tensor) and not _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return is_wrapped(tensor)


def unwrap_level(tensor: Tensor) -> Tensor:
    """Return the tensor without the outermost wrapper of a running torch.func.grad."""
    return _functorch.get_unwrapped(tensor) if _functorch.is_gradtrackingtensor(tensor) else tensor


def detach_level(tensor: Tensor) -> Tensor:
    """Detach the tensor from the graph of the running torch.func.grad only, where ``detach`` cuts those of all levels.

    Pinned by ``test_without_graph_cuts_one_level``.
    """
    if _functorch.is_gradtrackingtensor(tensor):
        return _functorch._wrap_for_grad(unwrap_level(tensor), _functorch.maybe_get_level(tensor))
    return tensor.detach()


def materialize_zeros(tangent: Tensor) -> Tensor:
    """Return zeros instead of a ZeroTensor, without memory. Pinned by ``test_zero_tangents_arrive_without_memory``."""
    return torch.zeros_like(tangent) if tangent._is_zerotensor() else tangent  # pyright: ignore[reportPrivateUsage]


def is_in_forward_ad() -> bool:
    """Return whether a torch.autograd.forward_ad level is open. Pinned by ``test_forward_ad_level``."""
    return torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


# --- What reverse mode records, and when its backward ends ---


def requires_grad_at_any_level(tensor: Tensor) -> bool:
    """Return whether reverse mode at any level records what uses the tensor. Pinned by ``test_what_reverse_mode_records``."""
    while is_wrapped(tensor) and not tensor.requires_grad:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def hold_until_backward_ends(held: Callable[[], None]) -> None:
    """Hold an object until the running backward ends, and call it then unless by an error.

    Pinned by ``test_held_until_backward_ends``.
    """
    torch.autograd.Variable._execution_engine.queue_callback(held)  # pyright: ignore


# --- torch.no_grad in forward-mode AD, where torch itself ignores it ---


class NoGradInForwardMode(TorchFunctionMode):
    """A mode in which results under ``torch.no_grad`` in a torch.func transform are constants for jvp, too.

    A view would ask its base for a tangent later, so results are detached. Custom Functions run without it. Pinned by
    ``test_no_grad_in_forward_mode`` and ``test_no_grad_in_a_compiled_hvp``.
    """

    @classmethod
    def is_active(cls) -> bool:
        """Return whether this thread is within one."""
        is_any = torch._C._len_torch_function_stack() > 0  # pyright: ignore[reportAttributeAccessIssue]
        return is_any and any(isinstance(mode, cls) for mode in _get_current_function_mode_stack())

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():  # Dynamo traces its super() in calls of the method
            func = lambda x, *sizes, **names: x.unflatten(*sizes, **names)  # noqa: E731
        is_constant = not torch.is_grad_enabled() and func is not torch._VF._unpack_dual
        if not (is_constant and (torch.compiler.is_compiling() or current_level())):  # Dynamo cannot ask for the level
            return func(*args, **kwargs)
        with _set_fwd_grad_enabled(False):
            out = func(*args, **kwargs)
            given = [*args, *kwargs.values()]
            if isinstance(out, Tensor):
                return _detach_result(out, given)
            return type(out)(_detach_result(x, given) for x in out) if type(out) in (list, tuple) else out


def _detach_result(x: Any, given: list[Any]) -> Any:
    """Detach a result, unless the result is itself one of the arguments, as with operators that write in place."""
    return x.detach() if isinstance(x, Tensor) and not any(x is other for other in given) else x
