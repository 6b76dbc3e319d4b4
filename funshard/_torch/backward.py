"""Private parts of autograd: saved tensors, their hooks, nodes of a graph, and the running backward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import (
    get_single_level_autograd_function_allowed,
    get_unwrapped,
    set_single_level_autograd_function_allowed,
)
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from .errors import error_text
from .levels import current_level, detach_level, is_wrapped, unwrap


class Function(torch.autograd.Function):
    """A torch.autograd.Function with ``setup_context`` whose ``apply`` does not inspect forward's signature in each call.

    That saves some 40 us a call. Pinned by ``test_functions_keep_their_signature``.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward.__signature__ = inspect.signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]


class LevelFunction(_SingleLevelFunction):
    """An autograd Function in the graph of the innermost torch.func.grad alone, or of plain autograd outside of one.

    torch.func applies a torch.autograd.Function at every level, by a class that it makes in each call: 0.3 ms.
    Here ``forward`` runs in the transform, and gives tensors of its level. Pinned by ``test_functions_of_one_level``.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Return the result of ``forward`` with an autograd node."""
        before = get_single_level_autograd_function_allowed()
        set_single_level_autograd_function_allowed(True)
        try:
            return super().apply(*args)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            set_single_level_autograd_function_allowed(before)


def is_leaf_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf that requires grad, a parameter, or a view of one. See ``test_views_of_leaves``."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and (base.requires_grad or isinstance(base, torch.nn.Parameter))


Versioned = Tensor | tuple[Tensor, int]
"""A tensor and its version; the tensor alone if that is 0 and no transform wraps it: a tuple less for the garbage collector."""


def unpack_versioned(kept: Versioned, shape_in_error: torch.Size | None = None) -> Tensor:
    """Return the tensor, or probe, that `pack_versioned` kept. Raise RuntimeError if it was modified in place since."""
    given: Any = kept  # type() is quicker than isinstance, and tells less
    tensor, expected = given if type(given) is tuple else (given, 0)
    if (now := (tensor if tensor is given else unwrap(tensor))._version) != expected:
        raise RuntimeError(
            f"a tensor of shape {list(shape_in_error or tensor.shape)} needed for gradient computation was modified in place: "
            f"it is at version {now}, expected version {expected}"
        )
    return tensor


def add_gradient_hook(tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Register a hook that no TorchFunctionMode sees. Pinned by ``test_a_hook_that_no_mode_sees``."""
    with torch._C.DisableTorchFunction():
        tensor.register_hook(hook)


def prioritize_backward(tensors: Iterable[Tensor]) -> None:
    """Let backward run the nodes from these tensors to their leaves, along first inputs, as early as it can.

    By default it runs nodes in the reverse order of forward. Pinned by ``test_backward_early``.
    """
    for tensor in tensors:
        node = tensor.grad_fn
        while node is not None and node.next_functions and node._sequence_nr() != _EARLY:
            node._set_sequence_nr(_EARLY)  # pyright: ignore[reportAttributeAccessIssue]
            node = node.next_functions[0][0]


_EARLY = 2**62


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward pass, -1 outside of one. Pinned by ``test_graph_task``."""


def is_last_backward(level_: int) -> bool:
    """Return whether the running backward is the one that a torch.func.grad of this level ends with.

    It records itself, and frees the graph as it goes. Pinned by ``test_last_backward``.
    """
    running = level_ > 0 and level_ == current_level() and torch.is_grad_enabled()
    return running and not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore


def is_in_python_node() -> bool:
    """Return whether backward runs the node of a custom autograd Function, which may differentiate something itself."""
    return isinstance(torch._C._current_autograd_node(), BackwardCFunction)


def pack_versioned(tensor: Tensor, inner: Tensor) -> Versioned:
    """Return what saved-tensor hooks keep instead of a tensor, for `unpack_versioned`; ``inner`` is the tensor from `unwrap`.

    A node that saves its own output would hold itself, so that output loses its graph; autograd adds it again when it unpacks.
    Only the newest C++ node can be saving its output, and any of Python. Pinned by ``test_saved_outputs_hold_no_graph``.
    """
    version = inner._version
    if inner is not tensor:
        return detach_level(tensor), version
    node = tensor.grad_fn
    if node is not None and (node._sequence_nr() == _get_sequence_nr() - 1 or isinstance(node, BackwardCFunction)):
        tensor = tensor.detach()
    return (tensor, version) if version else tensor


@contextlib.contextmanager
def saved_tensor_hooks(
    pack: Callable[[Tensor], object],
    unpack: Callable[[object], Tensor],
    *,
    what: str = "functional_call: forward",
    instead: str = "P(reshard=False), and no remat, for every unit, which replaces none",
) -> Generator[None]:
    """Install saved-tensor hooks, also inside torch.func.grad, which disables those of torch.autograd.graph.

    torch.func has not said what a hook sees (pytorch issue 146036): it is the tensor of the level that saves it. Pinned by
    ``test_hooks_work_in_one_transform``. torch refuses a transform that begins inside; our error says ``what`` replaces saved
    tensors, and what to do ``instead``. Pinned by ``test_transforms_refuse_hooks_outside``.
    """
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # pyright: ignore
    if message is not None:
        torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in error_text(error):
            raise
        raise RuntimeError(
            f"{what} uses a torch.func transform, or recomputes a derivative, which torch refuses where saved tensors are "
            f"replaced: expected {instead}"
        ) from error
    finally:
        if message is not None:
            torch._C._autograd._saved_tensors_hooks_disable(message)  # pyright: ignore


def push_saved_tensor_hooks(pack: Callable[[Tensor], object], unpack: Callable[[object], Tensor]) -> None:
    """Install saved-tensor hooks until the running node of a backward ends, which restores thread-local state.

    Pinned by ``test_hooks_for_the_rest_of_a_node``.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:  # pyright: ignore
        torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # pyright: ignore


def pop_saved_tensor_hooks() -> None:
    """Remove the innermost saved-tensor hooks. Pinned by ``test_hooks_of_a_node_can_be_taken_away``."""
    torch._C._autograd._pop_saved_tensors_default_hooks()  # pyright: ignore


def current_pack_hook() -> Callable[[Tensor], object] | None:
    """Return the pack function of the innermost saved-tensor hooks, None without such hooks.

    By it functional_call sees a torch.utils.checkpoint around or inside it: ``test_checkpoint_is_seen_by_its_hooks``.
    """
    hooks = current_saved_tensor_hooks(False)
    return None if hooks is None else hooks[0]


current_saved_tensor_hooks: Callable[[bool], tuple[Callable[[Tensor], object], object] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore
)
"""The innermost saved-tensor hooks, None without such; ``False`` asks for them also where they are disabled."""


def count_reentrant_checkpoints() -> int:
    """Return how many reentrant torch.utils.checkpoints run their forward here: each leaves no trace but its frame.

    Pinned by ``test_reentrant_checkpoint_is_seen_by_its_frame``.
    """
    code = CheckpointFunction.forward.__code__
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


DATA: Callable[..., Any] = vars(torch._C.TensorBase)["data"].__get__
"""The getter of ``tensor.data`` as a TorchFunctionMode sees it: reading it cuts the derivative of one level.

Pinned by ``test_right_or_refused.py``'s modules that read it.
"""


Edge = tuple[Any, int]
"""A node of a graph, and the index of one of its results."""


def iter_nodes(nodes: Iterable[Any], begins: Set[Any] = frozenset()) -> Iterator[tuple[Any, Sequence[Edge]]]:
    """Yield each node from these up to ``begins`` once, with the nodes whose results it takes, and the index of each result.

    Pinned by ``test_nodes_of_a_graph``.
    """
    waiting = [node for node in dict.fromkeys(nodes) if node is not None and node not in begins]
    seen = {*begins, *waiting}
    while waiting:
        node = waiting.pop()
        yield node, (edges := node.next_functions)
        new = dict.fromkeys(other for other, _ in edges if other is not None and other not in seen)
        seen.update(new)
        waiting += new


def own_edges(tensor: Tensor) -> list[Edge]:
    """Return the results of nodes that a tensor is, at each level of transforms. Pinned by ``test_edges_in_a_graph``."""
    edges: list[Edge] = [] if tensor.grad_fn is None else [(tensor.grad_fn, tensor.output_nr)]
    return edges + own_edges(get_unwrapped(tensor)) if is_wrapped(tensor) else edges


def edges_in_graph(tensors: Iterable[Tensor]) -> set[Edge]:
    """Return the results of nodes that tensors are, or are computed from. Pinned by ``test_edges_in_a_graph``."""
    own = {edge for tensor in tensors for edge in own_edges(tensor)}
    return own.union(*(edges for _, edges in iter_nodes(node for node, _ in own)))
