"""functional_call: a module on sharded parameters, one unit gathered at a time (running.py)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .._spec.division import ReduceBy
from .._spec.spec import PartitionSpec
from .._transforms.error_hints import add_argument_hints, add_hints
from . import compiled_call
from .buffers import warn_discarded
from .entry import check_call
from .running import Call
from .schedule import CallOptions
from .stale_statistics import check_statistics

__all__ = ["functional_call"]


def functional_call(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: object = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    spec: PartitionSpec,
    buffers: dict[str, Tensor] | None = None,
    method: str | None = None,
    reduce: ReduceBy = "mean",
    reduce_axes: Iterable[str] | None = None,
    prefetch: int = 1,
    in_flight: int = 1,
    check_order: bool = True,
) -> Any:
    """Call a module on sharded parameters: torch.func.functional_call where ``params`` may be shards.

    Gathers each unit just before its module runs and frees it after. Backward gathers it again, unless it has
    ``P(reshard=False)`` or is still there, and reduces its gradient as soon as that is complete. Results and derivatives equal
    those of the module on ``unshard(params, spec)``, at every order and under every torch.func transform. The guide has the
    details: `ideas.md` on gradients, buffers, memory and schedule, `transforms.md` on stacks of transforms, recomputation and
    compilation, `limits.md` on what forward may not do.

    All ranks must run the same units in the same order; of one unit each may use other parameters. After the call every
    attribute of the model is what it was before, also after an error: return what you want to keep.

    Args:
        model: The module that the spec was made for. Its own parameters are not read.
        params: By unit key the slices that `shard` gives. A unit's full parameters may stand under their names instead: then
            nothing is gathered or reduced for it. Ignored parameters are the model's own if they are not in here.
        args: The positional arguments as a tuple, or the only one.
        kwargs: The keyword arguments.
        spec: The spec of the slices. An unbound one is on all ranks, as one axis "shard".
        buffers: Used instead of the model's, and updated. Without them the call works on copies, and a `BufferWarning` names
            those that forward has changed.
        method: The name of a method to call instead of forward.
        reduce: What gradients are over ranks: their "mean", their "sum", or their sum divided by a number.
        reduce_axes: The mesh axes to reduce gradients over, or one; all by default. Over the others they stay each rank's own.
        prefetch: How many units are gathered ahead of their use, in forward and in backward.
        in_flight: How many units' gradients are reduced while the rest of backward computes.
        check_order: Whether ranks compare which units they gather and reduce.

    Returns:
        What the module returns.

    Raises:
        ValueError, TypeError: Before any communication, naming the path: for params, buffers, a model or axes that do not fit
            the spec, for tensors on the meta device, and for the model's own parameters where they are differentiated on
            several ranks (copies of them give a warning).
        RuntimeError: If forward changes a parameter in place, computes with one that a list, dict or object holds, or makes
            one; if ranks run different units; if another thread has the model in a call.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}, spec)
        >>> fs.functional_call(model, params, (torch.ones(2),), spec=spec)
        tensor([6.])
    """
    options = CallOptions(prefetch, in_flight, check_order)
    inputs = check_call(model, params, args, kwargs, spec, reduce, reduce_axes, options, stacklevel=2)
    if inputs.place is None:
        return compiled_call.run(model, inputs, buffers, method)
    call = Call(inputs.place, inputs.params, inputs.spec, inputs.reduction, options, inputs.receiver)
    try:
        out = call.run(inputs.args, inputs.kwargs, buffers, method)
    except (TypeError, AttributeError, RuntimeError) as error:
        add_argument_hints(error, inputs.params, inputs.spec, args, (inputs.args, inputs.kwargs))
        raise add_hints(error, model)  # noqa: B904 - the same one
    warn_discarded(model, call.discarded_buffers, stacklevel=2)
    if call.normalized:
        check_statistics(model, call.normalized, buffers or (), stacklevel=2)
    if inspect.isgenerator(out):
        raise TypeError("functional_call: expected results, got a generator, which would run after the call; consume it inside")
    return out
