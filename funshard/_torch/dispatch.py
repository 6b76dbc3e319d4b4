"""Operators below autograd: a dispatch mode, and the properties that their schemas state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy  # pyright: ignore[reportPrivateUsage]
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # pyright: ignore[reportPrivateUsage]

from .modules import SeparateTensor

A = TypeVar("A")


def run_uncompiled(*functions: FunctionType) -> None:
    """Make Dynamo leave the frames of these functions, and of what they call, as they are.

    Where it goes on after a graph break it compiles all frames, those of saved-tensor hooks included. Pinned by
    ``test_saved_tensor_hooks_are_not_traced``.
    """
    for function in functions:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


class DispatchMode(TorchDispatchMode):
    """A mode that sees every operator that runs, below autograd and all transforms. Pinned by ``test_a_dispatch_mode``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep Dynamo out of the subclass's handler, by a mark on its code: torch's wrapper costs each operator three calls."""
        super().__init_subclass__(**kwargs)
        if isinstance(handler := vars(cls).get("__torch_dispatch__"), FunctionType):
            run_uncompiled(handler)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no wrapper."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions stay compiled under this mode, as under torch.utils.checkpoint's modes."""
        return True


def has_dispatch_mode() -> bool:
    """Return whether a TorchDispatchMode is active. Pinned by ``test_a_dispatch_mode``."""
    return _get_current_dispatch_mode() is not None


def function_modes(*, own: bool) -> list[TorchFunctionMode]:
    """Return the active TorchFunctionModes of funshard, or else those of the user; torch's own, as a default device, never.

    Pinned by ``test_function_modes``.
    """
    packages = [(type(mode).__module__.partition(".")[0], mode) for mode in _get_current_function_mode_stack()]
    return [mode for package, mode in packages if package != "torch" and (package == "funshard") is own]


COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
"""Namespaces of operators that all ranks run together or not at all."""


IMPURE_OPS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "empty", "new_empty", "empty_like", "_lazy_clone"}
"""Operators that write running statistics, which their schemas hide, or return memory that is to be written to."""


def is_pure_op(op: OpOverload) -> bool:
    """Return whether an operator only allocates new results: no views, writes or collectives. It may draw random numbers.

    Pinned by ``test_operators_that_make_results``.
    """
    returns, name = op._schema.returns, op._schema.name.partition("::")[2]
    fresh = bool(returns) and all(result.alias_info is None for result in returns) and not op._schema.is_mutable
    return fresh and op.namespace not in COLLECTIVE_NAMESPACES and name not in IMPURE_OPS and not name.startswith("empty_")


def is_inplace_view(op: OpOverload) -> bool:
    """Return whether an operator changes how its argument views memory, and not the memory: ``t_``, ``squeeze_``."""
    others = torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_
    return torch.Tag.inplace_view in op.tags and op.overloadpacket not in others


@dataclass(frozen=True, eq=False)
class OpTraits:
    """Properties that a mode needs of every call of an operator. It is hashed by identity, which an operator is not."""

    is_view: bool
    is_pure: bool
    draws: bool  # random numbers
    is_mutation: bool  # whether it writes to the memory of an argument
    mutated: tuple[tuple[int | None, str], ...]  # of each argument that it mutates the position, None for keywords, and name
    op: OpOverload


_TRAITS: dict[int, OpTraits] = {}
"""By the operator's id: hashing an operator takes a call of Python."""


def op_traits(op: OpOverload) -> OpTraits:
    """Return the properties of an operator, the same object for each call."""
    if (traits := _TRAITS.get(id(op))) is None:
        draws, mutates = torch.Tag.nondeterministic_seeded in op.tags, op._schema.is_mutable and not is_inplace_view(op)
        slots = enumerate(op._schema.arguments if op._schema.is_mutable else ())
        mutated = [(None if x.kwarg_only else i, x.name) for i, x in slots if x.alias_info and x.alias_info.is_write]
        traits = _TRAITS[id(op)] = OpTraits(op.is_view, is_pure_op(op), draws, mutates, tuple(mutated), op)
    return traits


def mutated_args(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[A] = Tensor) -> Iterator[A]:
    """Yield the tensor arguments that an operator mutates, or what stands for them. Pinned with `is_pure_op`."""
    for i, name in op_traits(op).mutated:
        value = args[i] if i is not None and i < len(args) else kwargs.get(name)
        yield from (x for x in (value if isinstance(value, list | tuple) else (value,)) if isinstance(x, kind))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a strided Tensor, Parameter or FakeTensor. Wrappers of transforms pass: call it below them."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is _STRIDED


PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, FakeTensor, SeparateTensor})
_STRIDED = torch.strided


def detach_in_dispatch(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, with the same version counter. Call it within a dispatch mode.

    torch.utils.checkpoint keeps the tensors that a policy saves in this form. Pinned by ``test_a_dispatch_mode``.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # pyright: ignore[reportPrivateUsage]
        return tensor.detach()


def is_attribute_subclass(cls: type[Tensor]) -> bool:
    """Return whether a class of tensors only adds attributes and methods: it wraps no other tensor.

    torch.func's autograd Functions return plain tensors for those. Pinned by ``test_functions_lose_subclasses``.
    """
    if cls in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return getattr(cls, "__torch_dispatch__") is torch._C._disabled_torch_dispatch_impl  # noqa: B009
