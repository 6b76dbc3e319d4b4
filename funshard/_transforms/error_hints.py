"""torch's errors in a forward, with a note of what in the call may be the reason: arguments, or a missing derivative.

The error stays torch's own, with its type and traceback, and so does what catches it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .._spec.spec import PartitionSpec, sample

__all__ = [
    "add_argument_hints",
    "add_hints",
    "as_call_arguments",
    "check_materialized",
    "find_hint",
    "find_running_module",
    "is_forward_rule_missing",
]

E = TypeVar("E", bound=BaseException)

_START = "funshard: "
_LACKS_FORWARD = re.compile(r"forward AD with (\S+) that|jvp function for custom (autograd\.Function)")
_LACKS_SECOND = re.compile(r"derivative for (\S*attention\S*) is not implemented")
_LACKS_SECOND_OF_BAG = re.compile(r"derivative for '_embedding_bag\w*' is not implemented|Autograd not support dtype: Long")
_DTYPES = re.compile(r"dtype|scalar type|datatype|Input type \(|\bbe the same\b")
"""torch's words about tensors of two dtypes. Pinned by ``test_input_of_another_dtype``."""


_BAG_HINT = (
    "torch's EmbeddingBag has no second derivative: expected nn.Embedding and a sum or mean over the bag where a gradient is "
    "differentiated again"
)


def is_forward_rule_missing(error: BaseException) -> bool:
    """Whether torch says that it has no forward-mode rule. Pinned by ``test_what_has_no_forward_mode_rule``."""
    return isinstance(error, NotImplementedError) and _LACKS_FORWARD.search(str(error)) is not None


def add_hints(error: E, model: nn.Module | None = None, *, known: str = "") -> E:
    """The same error; one about a missing derivative has a note, which names the module of ``model`` that was running.

    ``known`` is a note on what failed before, which knows the module where a traceback through backward does not.
    """
    if find_hint(error):
        return error
    if _LACKS_SECOND_OF_BAG.search(str(error)):
        return _noted(error, f"{_START}{_BAG_HINT}")
    found = _LACKS_FORWARD.search(str(error)) or _LACKS_SECOND.search(str(error))
    if found is None:
        return error
    if "attention" in found.group() and "attention" in known:
        return _noted(error, known)
    if "attention" in found.group():
        hint = (
            "torch's fused attention kernels have neither second derivatives nor forward-mode ones: expected the math kernel; "
            "call it under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )
    else:
        what = next(filter(None, found.groups()))
        hint = f"torch has no forward-mode rule for {what}: a gradient of a gradient may do, as fs.hvp(..., forward=False)"
    path = find_running_module(error.__traceback__, model)
    return _noted(error, _START + ("" if path is None else f"module '{path}': ") + hint)


def add_argument_hints(
    error: Exception, params: Mapping[str, Tensor], spec: PartitionSpec, args: object, given: object
) -> None:
    """Add to torch's words about an argument, a dtype or a device what of the call may be the reason."""
    hints: list[str] = []
    if isinstance(args, list):
        hints.append("args is a list, which is the model's only argument: for several, or for one tensor, give a tuple")
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    devices = [{str(x.device) for x in some} for some in (params.values(), tensors)]
    if len(devices[0] | devices[1]) > 1:
        hints.append(f"params are on {', '.join(sorted(devices[0]))}, the arguments on {', '.join(sorted(devices[1]))}")
    used = {unit.p.precision._resolve(unit.dtype).param if unit.p.precision else unit.dtype for unit in spec}
    floats = {x.dtype for x in tensors if x.is_floating_point() or "Long" in str(error)}  # whole numbers are often right
    if _DTYPES.search(str(error)) and (others := floats - used):
        shown = ", ".join(sorted(map(str, others)))
        hints.append(
            f"arguments are of {shown}, units compute in {', '.join(sorted(map(str, used)))}; cast the arguments, or give the "
            "model the other dtype before the spec is made"
        )
    for unit in spec:
        if unit.key in params and params[unit.key].dtype not in (unit.dtype, spec.stored(unit)[1]) and not unit.p.precision:
            hints.append(f"unit '{unit.key}' is given in {params[unit.key].dtype}, in the model it is {unit.dtype}")
            break
    _hinted(error, hints)


def check_materialized(model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, given: object) -> None:
    """ValueError, naming them, for parameters on the meta device where others have values: some results would have none.

    Of params where all arguments have values, and of what the spec ignores where params have.
    """
    empty = {key: tensor for key, tensor in params.items() if tensor.is_meta}
    if not empty:
        ignored = {name: model.get_parameter(name) for name in spec.ignored if name not in params}
        left = {name: tensor for name, tensor in ignored.items() if tensor.is_meta}
        if left:
            raise ValueError(
                f"functional_call: parameters that the spec ignores are on the meta device, without values: {sample(left)}; "
                "expected them in params"
            )
        return
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    if tensors and not any(x.is_meta for x in tensors):
        raise ValueError(
            f"functional_call: params are on the meta device, without values: {sample(empty)}; expected them to be "
            f"materialized as the arguments are, on {tensors[0].device}; fs.init(model, spec) gives params that are born "
            "sharded, fs.scatter_full those of one rank"
        )


def _hinted(error: Exception, hints: list[str]) -> None:
    if hints and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\nfunctional_call: {'; '.join(hints)}", *error.args[1:])


def find_hint(error: BaseException) -> str:
    """The note that `explained` has given an error; empty for none."""
    return next((note for note in (*getattr(error, "__notes__", ()), *str(error).split("\n")) if note.startswith(_START)), "")


def _noted(error: E, note: str) -> E:
    """The same error with a note; before Python 3.11, at the end of its message."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = f"{error}\n{note}", *error.args[1:]
    return error


def find_running_module(traceback: TracebackType | None, model: nn.Module | None) -> str | None:
    """Return the path of the innermost module of the model in a traceback, None if there is none."""
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    path = None
    while traceback is not None:
        path = paths.get(id(traceback.tb_frame.f_locals.get("self")), path)
        traceback = traceback.tb_next
    return path


def as_call_arguments(args: object, kwargs: Mapping[str, object] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the model with: ``args`` is a tuple, or the only argument."""
    return args if isinstance(args, tuple) else (args,), dict(kwargs or {})
