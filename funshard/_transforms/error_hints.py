"""Hints for torch's errors in a forward: which argument may be the reason, or which derivative is missing.

The error stays torch's own, with its type and traceback, so that what catches it still does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._core.spec import PartitionSpec, abridge
from .._spec.precision import Precision, precision_of

__all__ = ["add_argument_hints", "add_compile_hint", "add_hints", "as_call_arguments", "check_materialized", "find_hint"]
__all__ += ["find_running_module", "is_forward_rule_missing"]

E = TypeVar("E", bound=BaseException)

_PREFIX = "funshard: "
_NO_FORWARD_RULE = re.compile(r"forward AD with (\S+) that|jvp function for custom (autograd\.Function)")
_WRITES_TANGENT = "ZeroTensors are immutable"
"""torch's words where a rule writes into a tangent that is zero, as that of mse_loss's backward does."""
_NO_SECOND_OF_ATTENTION = re.compile(r"derivative for (\S*attention\S*) is not implemented")
_NO_SECOND_OF_BAG = re.compile(r"derivative for '_embedding_bag\w*' is not implemented|Autograd not support dtype: Long")
_NO_SETUP_CONTEXT = "must override the setup_context staticmethod"
"""torch's words about an autograd.Function, such as that of a custom operator, which it does not name."""
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|datatype|Input type \(|\bbe the same\b")
"""torch's words about tensors of two dtypes. Pinned by ``test_input_of_another_dtype``."""
_EXPECTS_INTEGERS = re.compile(r"(scalar types?:?|dtype to be) Long")
"""torch's words about a tensor that is to hold integers. Pinned by ``test_inputs_that_are_no_integers``."""


def is_forward_rule_missing(error: BaseException) -> bool:
    """Return whether torch says that it has no forward-mode rule. Pinned by ``test_what_has_no_forward_mode_rule``."""
    text = _torch.error_text(error)
    if isinstance(error, NotImplementedError):
        return _NO_FORWARD_RULE.search(text) is not None
    return isinstance(error, RuntimeError) and text.startswith(_WRITES_TANGENT)


def add_hints(error: E, model: nn.Module | None = None, *, known: str = "") -> E:
    """Return the same error; with a note, which names the module of ``model``, if it is about a missing derivative.

    ``known`` is the note of an earlier error, which names the module where a traceback through backward does not.
    """
    if find_hint(error):
        return error
    text = _torch.error_text(error)
    if _NO_SECOND_OF_BAG.search(text):
        hint = "expected nn.Embedding and a sum or mean over the bag where a gradient is differentiated again"
        return _add_note(error, f"{_PREFIX}torch's EmbeddingBag has no second derivative: {hint}")
    if _NO_SETUP_CONTEXT in text:
        hint = (
            "torch.func does not take it: expected setup_context in it (and a vmap rule for per_sample_grads); or second "
            "derivatives by plain double backward, torch.autograd.grad(..., create_graph=True), and samples one by one"
        )
        name = _find_function(error.__traceback__)
        return _add_note(error, f"{_PREFIX}{name} is an autograd.Function without setup_context, or a custom operator: {hint}")
    if text.startswith(_WRITES_TANGENT):
        hint = "expected a gradient of a gradient, as fs.hvp(..., forward=False)"
        return _add_note(error, f"{_PREFIX}torch's forward-mode rule of an operator, such as F.mse_loss, fails: {hint}")
    found = _NO_FORWARD_RULE.search(text) or _NO_SECOND_OF_ATTENTION.search(text)
    if found is None:
        return error
    if "attention" in found.group() and "attention" in known:
        return _add_note(error, known)
    if "attention" in found.group():
        hint = (
            "torch's fused attention kernels have neither second derivatives nor forward-mode ones: call it under "
            "funshard.transforms_attention(), or, for short sequences, the math kernel: "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )
    else:
        op = next(filter(None, found.groups()))
        hint = f"torch has no forward-mode rule for {op}: a gradient of a gradient may do, as fs.hvp(..., forward=False)"
    path = find_running_module(error.__traceback__, model)
    return _add_note(error, _PREFIX + ("" if path is None else f"module '{path}': ") + hint)


def add_compile_hint(error: E, compile_error: BaseException) -> E:
    """Return an error, with a note that says what to do if torch.compile has raised ``compile_error`` because of it."""
    if find_hint(add_hints(error)) or not (hint := _torch.find_compile_hint(compile_error)):
        return error
    return _add_note(error, _PREFIX + hint)


def add_argument_hints(
    error: Exception, model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, args: object, given: object
) -> None:
    """Add to torch's message about an argument, a dtype or a device what may be wrong in the call."""
    hints: list[str] = []
    if isinstance(args, list):
        hints.append("args is a list, which is the model's only argument: for several, or for one tensor, give a tuple")
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    devices = [{str(x.device) for x in given} for given in (params.values(), tensors)]
    if len(devices[0] | devices[1]) > 1:
        hints.append(f"params are on {', '.join(sorted(devices[0]))}, the arguments on {', '.join(sorted(devices[1]))}")
    used = {(precision_of(unit.p) or Precision())._resolve(unit.dtype).param for unit in spec}
    used |= {dtype for unit in spec for dtype in unit.param_dtypes if dtype}
    text = _torch.error_text(error)
    floats = {x.dtype for x in tensors if x.is_floating_point() or "Long" in text}  # whole numbers are often right
    shown = ", ".join(sorted({str(x.dtype) for x in tensors if x.is_floating_point()}))
    if shown and _EXPECTS_INTEGERS.search(text):
        hints.append(f"arguments are of {shown}, and torch expects integers of one of them, such as ids or labels: x.long()")
    elif _ABOUT_DTYPES.search(text) and (others := floats - used):
        shown = ", ".join(sorted(map(str, others)))
        hints.append(
            f"arguments are of {shown}, units compute in {', '.join(sorted(map(str, used)))}; cast the arguments, or give the "
            "model the other dtype before the spec is made"
        )
    elif _ABOUT_DTYPES.search(text) and (hint := _find_kept_hint(error, model, spec)):
        hints.append(hint)
    for unit in spec:
        if unit.key in params and params[unit.key].dtype not in (unit.dtype, spec.stored(unit)[1]) and not unit.p.precision:
            hints.append(f"unit '{unit.key}' is given in {params[unit.key].dtype}, in the model it is {unit.dtype}")
            break
    _extend_message(error, hints)


def _find_kept_hint(error: Exception, model: nn.Module, spec: PartitionSpec) -> str:
    """Return which cast is missing beside a parameter of ``Precision(keep=)``, next to the module that failed; or nothing."""
    kept = {x.name: (dtype, unit) for unit in spec for x, dtype in zip(unit.params, unit.param_dtypes, strict=False) if dtype}
    if not kept or (path := find_running_module(error.__traceback__, model)) is None:
        return ""
    own = next((name for name in kept if name.rpartition(".")[0] == path), None)
    name = own or max(kept, key=lambda name: [a == b for a, b in zip(name.split("."), path.split("."), strict=False)])
    dtype, unit = kept[name]
    low = (precision_of(unit.p) or Precision())._resolve(unit.dtype).param
    where = f"module '{path}' failed, and Precision(keep=) has '{name}' in {dtype}"
    if own:
        return f"{where}, while inputs are cast to {low}: expected its forward to cast its input, as x.to(self.weight.dtype)"
    return (
        f"{where}, so that what is computed with it is, too: expected its module to return .to({low}), as nn.RMSNorm does; "
        "or policies.full_precision(policy, type(norm)) instead of keep"
    )


def check_materialized(model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, given: object) -> None:
    """Raise ValueError for parameters on the meta device if results are to have values.

    That is for params if the arguments have values, and for parameters that the spec ignores if params have.
    """
    empty = {key: tensor for key, tensor in params.items() if tensor.is_meta}
    if not empty:
        ignored = {name: model.get_parameter(name) for name in spec.ignored if name not in params}
        empty = {name: tensor for name, tensor in ignored.items() if tensor.is_meta}
        if empty:
            raise ValueError(
                f"functional_call: parameters that the spec ignores are on the meta device, without values: {abridge(empty)}; "
                "expected them in params"
            )
        return
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    if tensors and not any(x.is_meta for x in tensors):
        raise ValueError(
            f"functional_call: params are on the meta device, without values: {abridge(empty)}; expected them to be "
            f"materialized as the arguments are, on {tensors[0].device}; fs.init(model, spec) gives params that are born "
            "sharded, fs.scatter_full those of one rank"
        )


def _extend_message(error: Exception, hints: list[str]) -> None:
    """Append hints to the message of an error."""
    if hints and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\nfunctional_call: {'; '.join(hints)}", *error.args[1:])


def find_hint(error: BaseException) -> str:
    """Return the note that `add_hints` has added to an error; empty for none."""
    notes = *getattr(error, "__notes__", ()), *_torch.error_text(error).split("\n")
    return next((note for note in notes if note.startswith(_PREFIX)), "")


def _add_note(error: E, note: str) -> E:
    """Return the same error with a note; before Python 3.11, at the end of its message."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = f"{error}\n{note}", *error.args[1:]
    return error


def _find_function(traceback: TracebackType | None) -> str:
    """Return the name of the innermost autograd.Function in a traceback: of a custom operator, torch's name with its own."""
    name = "what forward calls"
    while traceback is not None:
        cls = traceback.tb_frame.f_locals.get("cls")
        if isinstance(cls, type) and issubclass(cls, torch.autograd.Function):
            name = f"'{cls.__qualname__}'"
        traceback = traceback.tb_next
    return name


def find_running_module(traceback: TracebackType | None, model: nn.Module | None) -> str | None:
    """Return the path of the innermost module of the model in a traceback, None if there is none."""
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    path = None
    while traceback is not None:
        path = paths.get(id(traceback.tb_frame.f_locals.get("self")), path)
        traceback = traceback.tb_next
    return path


def as_call_arguments(args: object, kwargs: Mapping[str, object] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model; ``args`` is a tuple, or the only argument."""
    return args if isinstance(args, tuple) else (args,), dict(kwargs or {})
