"""Hints for torch's errors in a forward: which argument may be the reason, or which derivative is missing.

The error stays torch's own, with its type and traceback, so that what catches it still does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._core.spec import PartitionSpec, abridge
from .._spec.precision import resolve_dtypes

E = TypeVar("E", bound=BaseException)

_PREFIX = "funshard: "
_NO_FORWARD_RULE = r"forward AD with (\S+) that|jvp function for custom (autograd\.Function)"
_WRITES_TANGENT = "^ZeroTensors are immutable"
_HINTS = (
    (
        r"derivative for '_embedding_bag\w*' is not implemented|Autograd not support dtype: Long",
        "torch's EmbeddingBag has no second derivative: expected nn.Embedding and a sum or mean over the bag where a gradient "
        "is differentiated again",
    ),
    (
        "must override the setup_context staticmethod",  # torch does not name the function
        "{function} is an autograd.Function without setup_context, or a custom operator: torch.func does not take it: expected "
        "setup_context in it (and a vmap rule for per_sample_grads); or second derivatives by plain double backward, "
        "torch.autograd.grad(..., create_graph=True), and samples one by one",
    ),
    (
        _WRITES_TANGENT,  # into a tangent that is zero, as the rule of mse_loss's backward does
        "torch's forward-mode rule of an operator, such as F.mse_loss, fails: expected a gradient of a gradient, as "
        "fs.hvp(..., forward=False)",
    ),
    (
        r"(forward AD with|derivative for) \S*attention\S* (that|is not implemented)",
        "torch's fused attention kernels have neither second derivatives nor forward-mode ones: call it under "
        "funshard.transforms_attention(), or, for short sequences, the math kernel: "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
    ),
    (_NO_FORWARD_RULE, "torch has no forward-mode rule for {}: a gradient of a gradient may do, as fs.hvp(..., forward=False)"),
)
"""torch's words, and what to do; the first that fits."""
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|datatype|Input type \(|\bbe the same\b")
"""torch's words about tensors of two dtypes."""


def is_forward_rule_missing(error: BaseException) -> bool:
    """Return whether torch says that it has no forward-mode rule. Pinned by ``test_what_has_no_forward_mode_rule``."""
    words = _NO_FORWARD_RULE if isinstance(error, NotImplementedError) else _WRITES_TANGENT
    return isinstance(error, RuntimeError) and re.search(words, _torch.error_text(error)) is not None


def add_hints(error: E, model: nn.Module | None = None) -> E:
    """Return the same error; with a note, which names the module of ``model``, if it is about a missing derivative."""
    text = _torch.error_text(error)
    if find_hint(error) or not (hints := [(found, hint) for words, hint in _HINTS if (found := re.search(words, text))]):
        return error
    found, hint = hints[0]
    classes = [x for x in _iter_locals(error.__traceback__, "cls") if isinstance(x, type) and issubclass(x, Function)]
    function = f"'{classes[-1].__qualname__}'" if classes else "what forward calls"
    path = find_running_module(error.__traceback__, model)
    hint = hint.format(*filter(None, found.groups()), function=function)
    return _add_note(error, hint if path is None else f"module '{path}': {hint}")


def add_compile_hint(error: E, compile_error: BaseException) -> E:
    """Return an error, with a note that says what to do if torch.compile has raised ``compile_error`` because of it."""
    if find_hint(add_hints(error)) or not (hint := _torch.find_compile_hint(compile_error)):
        return error
    return _add_note(error, hint)


def add_argument_hints(
    error: Exception, model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, args: object
) -> None:
    """Add to torch's message about an argument or a dtype what may be wrong in the call."""
    hints: list[str] = []
    if isinstance(args, list):
        hints.append("args is a list, which is the model's only argument: for several, or for one tensor, give a tuple")
    if _ABOUT_DTYPES.search(_torch.error_text(error)):
        hints += _find_dtype_hints(error, model, params, spec)
    if hints and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\nfunctional_call: {'; '.join(hints)}", *error.args[1:])


def _find_dtype_hints(error: Exception, model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec) -> list[str]:
    """Return which unit has been given in another dtype, or which cast is missing beside one of ``Precision(keep=)``."""
    for unit in spec:
        if unit.key in params and params[unit.key].dtype not in (unit.dtype, spec.stored(unit)[1]) and not unit.p.precision:
            return [f"unit '{unit.key}' is given in {params[unit.key].dtype}, in the model it is {unit.dtype}"]
    kept = [(x.name, dtype, unit) for unit in spec for x, dtype in zip(unit.params, unit.param_dtypes, strict=False) if dtype]
    path = find_running_module(error.__traceback__, model)
    if path is None or not kept:
        return []
    name, dtype, unit = max(kept, key=lambda one: len(os.path.commonprefix([one[0], path])))  # noqa: RUF071 - of names
    low = resolve_dtypes(unit.p, unit.dtype).param
    return [
        f"module '{path}' failed, and Precision(keep=) has parameters such as '{name}' in {dtype}, while inputs are cast to "
        f"{low}: expected forward to cast its input, as x.to(self.weight.dtype), or the module of the parameter to return "
        f".to({low}), as nn.RMSNorm does; or policies.full_precision(policy, type(module)) instead of keep"
    ]


def check_materialized(model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, given: object) -> None:
    """Raise ValueError for parameters on the meta device, in ``params`` or ignored, where the other tensors have values."""
    empty = {key: tensor for key, tensor in params.items() if tensor.is_meta}
    if not empty:
        ignored = {name: model.get_parameter(name) for name in spec.ignored if name not in params}
        if empty := {name: tensor for name, tensor in ignored.items() if tensor.is_meta}:
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


def find_hint(error: BaseException) -> str:
    """Return the note that `add_hints` has added to an error; empty for none."""
    notes = *getattr(error, "__notes__", ()), *_torch.error_text(error).split("\n")
    return next((note for note in notes if note.startswith(_PREFIX)), "")


def _add_note(error: E, hint: str) -> E:
    """Return the same error with a note; before Python 3.11, at the end of its message."""
    if sys.version_info >= (3, 11):
        error.add_note(_PREFIX + hint)
    else:
        error.args = f"{error}\n{_PREFIX}{hint}", *error.args[1:]
    return error


def find_running_module(traceback: TracebackType | None, model: nn.Module | None) -> str | None:
    """Return the path of the innermost module of the model in a traceback, None if there is none."""
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    running = [paths[id(x)] for x in _iter_locals(traceback, "self") if id(x) in paths]
    return running[-1] if running else None


def _iter_locals(traceback: TracebackType | None, name: str) -> Iterator[object]:
    while traceback is not None:
        yield traceback.tb_frame.f_locals.get(name)
        traceback = traceback.tb_next


def as_call_arguments(args: object, kwargs: Mapping[str, object] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model; ``args`` is a tuple, or the only argument."""
    return args if isinstance(args, tuple) else (args,), dict(kwargs or {})
