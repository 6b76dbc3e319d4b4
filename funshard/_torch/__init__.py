"""The private parts of torch that funshard touches: why, and in tests/test_torch_facts.py what pins each.

Most is about torch.func's stack of transforms, for which torch has no public questions; the rest about what autograd saves
and runs, storages, and process groups.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._autograd import _get_sequence_nr
from torch._functorch.eager_transforms import grad_increment_nesting
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage]
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointFunction

__all__ = [
    "FORWARD_CAN_BE_REPLACED",
    "Function",
    "alias",
    "alone",
    "assumed_constant",
    "at_level",
    "backend",
    "backward_early",
    "base",
    "below_autograd",
    "beneath",
    "bound_device",
    "copy_on_write",
    "derivatives_alone",
    "differentiates",
    "dispatch_keys",
    "fake_mode",
    "followed",
    "graph_task",
    "group",
    "has_tangent",
    "in_forward_ad",
    "in_graph",
    "in_python_node",
    "is_batched",
    "is_fake",
    "is_last_backward",
    "is_over",
    "is_tracked",
    "is_wrapped",
    "joined",
    "kept",
    "level",
    "level_of",
    "lower",
    "not_in_graph",
    "overwrite",
    "pack_hook",
    "plain",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "reentrant_checkpoints",
    "reparametrized",
    "savable",
    "saved_tensor_hooks",
    "seen_from",
    "shares_memory",
    "storage_id",
    "traced",
    "unchanged",
    "version",
    "viewed",
    "without_graph",
    "wrapped",
    "wrapped_for_dead",
]


def level() -> int:
    """How many torch.func transforms are running: 0 outside of all.

    functional_call must not hand a tensor of a transform that has ended to one that runs on, and `grad` must know
    whether it is nested. Pinned by ``test_level_counts_transforms``.
    """
    return _functorch.maybe_current_level() or 0


def differentiates() -> bool:
    """Whether something may come back to what is computed now for its derivative; plain forward-mode AD never does.

    In inference mode nothing that it might want is kept.
    """
    if torch.is_inference_mode_enabled():
        return False
    return level() > 0 or (torch.is_grad_enabled() and not in_forward_ad())


def savable() -> bool:
    """Whether saved tensors can be replaced: outside of torch.func, or in a single torch.func.grad, vjp or the like.

    Deeper stacks keep what they save. Pinned by ``test_hooks_work_in_one_transform``.
    """
    depth = level()
    return depth == 0 or (depth == 1 and _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Grad)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data.

    Pinned, as `is_fake`, by ``test_trace_order_names_what_forward_gathers``.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def traced() -> bool:
    """Whether operators are being recorded, as by make_fx: then everything has to be data flow.

    Pinned by ``test_fully_shard_compile_graph``.
    """
    return get_proxy_mode() is not None


def plain() -> bool:
    """Whether what runs is neither in a torch.func transform, nor compiled, nor recorded, nor on shapes alone.

    Pinned by ``test_values_are_compared_where_they_can_be``.
    """
    if level() or torch.compiler.is_compiling() or traced():
        return False
    return not is_fake(torch.empty(0, device="cpu"))


class Function(torch.autograd.Function):
    """torch.autograd.Function for those with ``setup_context``, of which ``apply`` asks the signature of forward anew.

    Here that finds it at once: some 40 us less a call. Pinned by ``test_functions_keep_their_signature``.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward.__signature__ = inspect.signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]


def base(tensor: Tensor) -> Tensor:
    """The plain tensor inside the wrappers of all transforms: the one that has a storage."""
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether the tensor belongs to a transform."""


def level_of(tensor: Tensor) -> int:
    """The level of the transform that the tensor belongs to, 0 for none, -1 for one that has ended."""
    return _functorch.maybe_get_level(tensor) if is_wrapped(tensor) else 0


def seen_from(tensor: Tensor, level: int) -> Tensor:
    """The tensor as this level sees it: without the wrappers of those above, or of those that have ended."""
    while level_of(tensor) > max(level, 0) or is_over(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


DispatchKeys = tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]
"""Which dispatch keys are included and excluded in this thread."""


def dispatch_keys() -> DispatchKeys:
    """Those of user code that runs now, for `followed`."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def followed(tensor: Tensor, keys: DispatchKeys) -> frozenset[int]:
    """The levels below its own at which a derivative follows the tensor: 0 is plain autograd's.

    ``detach`` ends all of them, ``.data`` that of its own level alone, ``no_grad`` those of reverse mode: what it gives a
    view of says that it requires grad and has no graph. Where autograd saves tensors, the levels below cannot be asked
    for a tangent but with the ``keys`` of user code. Pinned by ``test_followed_at_which_levels``.
    """
    levels: list[int] = []
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        if _has_graph(tensor) or (in_forward_ad() and _has_tangent(tensor, keys)):
            levels.append(level_of(tensor))
    return frozenset(levels)


def _has_graph(tensor: Tensor) -> bool:
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    made_without = tensor._is_view() and tensor._base is not None and tensor._base.requires_grad
    return not made_without


def has_tangent(tensor: Tensor) -> bool:
    """Whether the innermost forward-mode derivative follows the tensor."""
    return in_forward_ad() and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def _has_tangent(tensor: Tensor, keys: DispatchKeys) -> bool:
    with torch._C._ForceDispatchKeyGuard(*keys), at_level(level_of(tensor)):
        return has_tangent(tensor)


@contextlib.contextmanager
def at_level(target: int) -> Generator[None]:
    """Beneath the transforms above this level. With `seen_from` and `wrapped` pinned by ``test_weights_of_every_level``."""
    with contextlib.ExitStack() as stack:
        while level() > max(target, 0):
            stack.enter_context(temporarily_pop_interpreter_stack())
        yield


def wrapped(tensor: Tensor, level: int) -> Tensor:
    """A constant of this level, 0 for none: as a graph's saved tensor it keeps what the levels below know of it."""
    return _functorch._wrap_for_grad(tensor, level) if level else tensor


def wrapped_for_dead(tensor: Tensor) -> Tensor:
    """The same for a level that has ended: the wrapper is another one's that ends here, and gives way to what is inside."""
    with grad_increment_nesting() as level:
        return _functorch._wrap_for_grad(tensor, level)


def derivatives_alone() -> bool:
    """Whether every torch.func transform that runs is a grad, vjp or jvp."""
    kinds = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
    return all(interpreter.key() in kinds for interpreter in retrieve_all_functorch_interpreters())


class Noted(Protocol):
    """What stands for the views of a buffer of this dtype."""

    @property
    def dtype(self) -> torch.dtype: ...


Note = TypeVar("Note", bound=Noted)


def viewed(tensor: Tensor, live: Mapping[int, Note]) -> Note | None:
    """Which of these buffers, by storage, a tensor sees by shape, strides and offset alone; None for any other tensor."""
    inner = base(tensor) if is_wrapped(tensor) else tensor
    if type(inner) is not Tensor or inner.layout is not torch.strided:
        return None
    note = live.get(storage_id(inner))
    return note if note is not None and inner.dtype == note.dtype and not inner.is_conj() and not inner.is_neg() else None


def unchanged(tensor: Tensor, version_: int) -> Tensor:
    """A tensor that hooks kept. The version check is autograd's own, which hooks switch off."""
    if version(tensor) != version_:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} needed for gradient computation was modified in place: "
            f"it is at version {version(tensor)}, expected version {version_}"
        )
    return tensor


def is_tracked(tensor: Tensor) -> bool:
    """Whether autograd, torch.func or forward-mode AD follows the tensor. Pinned by ``test_derivatives_are_refused``."""
    while is_wrapped(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return in_forward_ad() and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def is_over(tensor: Tensor) -> bool:
    """Whether the transform that the tensor belongs to has ended. Pinned by ``test_a_pullback_gives_plain_tensors``."""
    return _functorch.is_dead_tensor_wrapper(tensor)


class beneath:  # noqa: N801  a context, as torch.no_grad
    """Without gradients and beneath all transforms, where `base` tensors live.

    What is computed from them inside a transform is wrapped by it and dies with it. Pinned by ``test_beneath``. A class,
    as it is entered some ten times for each unit: a generator takes three times as long.
    """

    __slots__ = ("_grad", "_stack")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._stack = temporarily_clear_interpreter_stack() if level() else None
        if self._stack is not None:
            self._stack.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Where operators go straight to what computes them: the functional collectives' autograd is written in Python.

    Only `beneath`, where nobody differentiates. Pinned by ``test_below_autograd``.
    """
    return torch._C._AutoDispatchBelowAutograd()


def backward_early(tensors: Iterable[Tensor]) -> None:
    """Have backward come to all that these were made from as soon as it can.

    By itself it goes back in the order in which forward ran, so to what was made before all else it comes last, and
    until then every gradient waits. Pinned by ``test_backward_early``.
    """
    for tensor in tensors:
        node = tensor.grad_fn
        while node is not None and node.next_functions and node._sequence_nr() != _EARLY:
            node._set_sequence_nr(_EARLY)  # pyright: ignore[reportAttributeAccessIssue]
            node = node.next_functions[0][0]


_EARLY = 2**62


def overwrite(target: Tensor, source: Tensor, *, told: bool = True) -> None:
    """Put values into a tensor, as kernels do with buffers: torch.func refuses ``copy_`` to what was made outside of it.

    Unless it is to be ``told``, the tensor's version stays, as it does when those kernels write. Where vmap has batched one
    of them, ``copy_`` decides. Pinned by ``test_buffers_of_recomputed_modules``.
    """
    if is_batched(target) or is_batched(source):
        target.copy_(source)
        return
    with beneath():
        (base(target) if told else base(target).data).copy_(base(source))


def is_batched(tensor: Tensor) -> bool:
    """Whether a vmap has batched the tensor. Pinned, as `overwrite`, by ``test_pure_form``."""
    while is_wrapped(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def graph_task() -> int:
    """The number of the running backward pass, -1 outside of one. Pinned by ``test_graph_task``."""
    return torch._C._current_graph_task_id()


def is_last_backward(level_: int) -> bool:
    """Whether the backward that runs is the one that a torch.func.grad of this level ends with.

    It records itself (create_graph) and frees the graph as it goes (no retain_graph), so nobody comes back to it at that
    level. Pinned by ``test_last_backward``.
    """
    running = level_ > 0 and level_ == level() and torch.is_grad_enabled()
    return running and not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore


def in_python_node() -> bool:
    """Whether a node of backward runs that Python defines: it may differentiate something itself. Pinned with the last."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def lower(tensor: Tensor) -> Tensor:
    """The tensor as the transform below sees it: without the outermost wrapper of a running torch.func.grad."""
    return _functorch.get_unwrapped(tensor) if _functorch.is_gradtrackingtensor(tensor) else tensor


def without_graph(tensor: Tensor) -> Tensor:
    """The same values with the graph of the running torch.func.grad cut off, or that of plain autograd outside of it.

    ``detach`` inside a transform cuts those of all levels. Pinned by ``test_without_graph_cuts_one_level``.
    """
    if _functorch.is_gradtrackingtensor(tensor):
        return _functorch._wrap_for_grad(lower(tensor), _functorch.maybe_get_level(tensor))
    return tensor.detach()


def kept(tensor: Tensor) -> Tensor:
    """What saved-tensor hooks may keep in a tensor's place: itself, or itself without its graph if that keeps itself.

    A node that saves its own output would hold itself. Of the C++ nodes only the newest can be saving its output; one
    that Python defines may have made others since. Autograd adds the graph again when it unpacks. Pinned by
    ``test_saved_outputs_hold_no_graph``.
    """
    if is_wrapped(tensor):
        return without_graph(tensor)
    node = tensor.grad_fn
    if node is None:
        return tensor
    own = isinstance(node, torch.autograd.function.BackwardCFunction) or node._sequence_nr() == _get_sequence_nr() - 1
    return tensor.detach() if own else tensor


def joined(pieces: Sequence[Tensor], out: Tensor) -> Tensor:
    """Contiguous tensors end to end in a buffer of any dtype, by one kernel if they have one dtype.

    torch.cat wants them flat, and on CUDA casts them by a kernel each. Only what is recorded is torch.cat, which compilers
    know. Pinned by ``test_joined``.
    """
    some = [piece if piece.dim() else piece.reshape(1) for piece in pieces if piece.numel()]
    if traced() or len({piece.dtype for piece in some}) != 1:
        return torch.cat([piece.reshape(-1) for piece in some], out=out) if some else out
    torch.ops.aten._chunk_cat.out(some, 0, 1, out=out.view(1, -1))
    return out


def storage_id(tensor: Tensor) -> int:
    """The identity of a live storage, also of fake and meta ones, which have no address."""
    return tensor.untyped_storage()._cdata


def alias(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one storage, whatever transforms they are wrapped for."""
    return storage_id(base(a)) == storage_id(base(b))


def alone(tensor: Tensor) -> bool:
    """Whether this tensor is all that holds its storage: no view, no other tensor, no Python object.

    A buffer may be written over only then. Pinned by ``test_alone``.
    """
    return _holders(tensor) == _ONE_HOLDER


def _holders(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ONE_HOLDER = _holders(torch.empty(1))


def copy_on_write(tensor: Tensor) -> Tensor:
    """A copy that shares the tensor's memory until one of the two is written to, by whatever means: ``.data`` as well.

    It costs less than a microsecond. Memory that torch did not allocate is copied at once. Pinned, with
    `shares_memory`, by ``test_copies_on_write``.
    """
    try:
        return torch._lazy_clone(tensor)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError:
        return tensor.clone()


def shares_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Whether neither the tensor nor its `copy_on_write` has been written to; kernels that might write count as well.

    Asking for the address by ``data_ptr`` would be one of them.
    """
    return torch._C._data_address(tensor) == torch._C._data_address(copy)  # pyright: ignore[reportAttributeAccessIssue]


def group(name: str) -> dist.ProcessGroup:
    """The process group of that name, as the functional collectives find it. Pinned by ``test_groups_by_name``."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def backend(name: str, device: torch.device) -> str:
    """What moves a device's tensors in the process group of that name: "gloo", "nccl", ... Pinned with `group`."""
    return group(name)._get_backend(device).name()


def bound_device(group: dist.ProcessGroup) -> torch.device | None:
    """The device that ``init_process_group(device_id=...)`` bound the group to. Pinned by ``test_bound_device``."""
    return getattr(group, "bound_device_id", None)


def version(tensor: Tensor) -> int:
    """How often the tensor was modified in place; 0 for inference tensors, which do not count and are not saved."""
    inner = base(tensor) if is_wrapped(tensor) else tensor
    return 0 if inner.is_inference() else inner._version


def in_forward_ad() -> bool:
    """Whether a torch.autograd.forward_ad level is open. Pinned by ``test_forward_ad_level``."""
    return torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


@contextlib.contextmanager
def saved_tensor_hooks(pack: Callable[[Tensor], object], unpack: Callable[[object], Tensor]) -> Generator[None]:
    """torch.autograd.graph.saved_tensors_hooks, which torch.func.grad switches off, also inside it.

    torch.func forbids the hooks because it has not said what a hook sees (pytorch issue 146036). What it sees is the
    tensor of the level that saves it, which is all that functional_call needs: it takes the storage from `base`, and
    gathers again from the shard one level below. Pinned by ``test_hooks_work_in_one_transform``. A transform that
    begins inside is refused by torch, with its error and ours; pinned by ``test_transforms_refuse_hooks_outside``.
    """
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # pyright: ignore
    if message is not None:
        torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            "functional_call: forward uses a torch.func transform, which torch refuses where saved tensors are "
            "replaced: expected P(reshard=False) for every unit, which replaces none"
        ) from error
    finally:
        if message is not None:
            torch._C._autograd._saved_tensors_hooks_disable(message)  # pyright: ignore


def push_saved_tensor_hooks(pack: Callable[[Tensor], object], unpack: Callable[[object], Tensor]) -> None:
    """Saved-tensor hooks for the rest of one node of a backward that is running, to be called from within it.

    Nothing takes them away: autograd puts thread-local state back after each node. Pinned by
    ``test_hooks_for_the_rest_of_a_node``.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:  # pyright: ignore
        torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # pyright: ignore


def pop_saved_tensor_hooks() -> None:
    """Take the innermost saved-tensor hooks away, before a node of a backward differentiates something itself.

    Pinned by ``test_hooks_of_a_node_can_be_taken_away``.
    """
    torch._C._autograd._pop_saved_tensors_default_hooks()  # pyright: ignore


def pack_hook() -> Callable[[Tensor], object] | None:
    """The pack function of the innermost saved-tensor hooks, None where there are none.

    functional_call must not come between torch.utils.checkpoint and its tensors, and must see one that begins inside
    it. Pinned by ``test_checkpoint_is_seen_by_its_hooks``.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    return None if hooks is None else hooks[0]


def reentrant_checkpoints() -> int:
    """How many reentrant torch.utils.checkpoints run their forward here, which leaves no trace but its frame.

    functional_call must see one that begins inside it. Pinned by ``test_reentrant_checkpoint_is_seen_by_its_frame``.
    """
    code = CheckpointFunction.forward.__code__
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


def noted(**notes: object) -> contextlib.AbstractContextManager[None]:
    """A context in which torch.compile writes these notes on the nodes of what it traces, under ``meta["custom"]``.

    Pinned by ``test_every_phase_gathers_what_was_let_go``.
    """
    return annotate(notes)


F = TypeVar("F", bound=Callable[..., Any])


def assumed_constant(fn: F) -> F:
    """torch.compiler.assume_constant_result: torch.compile runs the function while it traces, once for each graph.

    As `in_graph` and `not_in_graph` without importing Dynamo, which takes longer than torch itself. Pinned by
    ``test_said_in_a_compiled_call``.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def in_graph(fn: F) -> F:
    """torch.compiler.allow_in_graph, which Dynamo is told when it comes by. Pinned by tests/test_import.py."""

    @assumed_constant
    def known() -> None:
        torch.compiler.allow_in_graph(fn)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            known()
        return fn(*args)

    return cast("F", call)


def not_in_graph(reason: str) -> Callable[[F], F]:
    """torch.compiler.disable, asked for when Dynamo comes by. Pinned by tests/test_import.py."""

    def decorated(fn: F) -> F:
        disabled: dict[None, F] = {}

        @assumed_constant
        def known() -> None:
            disabled.setdefault(None, cast("F", torch.compiler.disable(fn, reason=reason)))

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            if not torch.compiler.is_compiling():
                return fn(*args)
            known()
            return disabled[None](*args)

        return cast("F", call)

    return decorated


FORWARD_CAN_BE_REPLACED = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo sees a ``forward`` that is put into a module's ``__dict__`` for a while, and leaves none behind.

Pinned by ``test_casts_inside_of_a_compiled_call``.
"""


def reparametrized(module: nn.Module, tensors: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
    """What torch.func.functional_call runs a module in; by itself it serves methods other than forward as well.

    Afterwards the dict holds what the module then had in their places.

    Dynamo traces it. Pinned by ``test_compiled_equals_eager``.
    """
    return _reparametrize_module(module, tensors)
