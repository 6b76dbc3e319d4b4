"""functional_call: a module on sharded parameters, one unit gathered at a time (running.py); and trace_order."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._batchnorm import SyncBatchNorm
from .._core.checks import bind_spec, check_params, check_spec, find_full_params
from .._core.flow import ReduceBy, Reduction, resolve_reduction
from .._core.mesh import has_peers
from .._core.spec import PartitionSpec, abridge
from .._transforms.error_hints import add_hints
from .._wire.accumulation import find_accumulation
from .._wire.flow import refuse_reduce_codec_in_graph
from .._wire.host import check_host_resident
from . import compiled_call
from .buffers import is_first_warning
from .casting import module_overrides, wrap_in_casts
from .compiled_unit import compiled_forwards
from .guards import AttributeWrites, BackwardGuard, BufferChanges, OwnParameters
from .module_state import BoundModule, ModuleAttributes, find_instances
from .recompute import recomputed_forwards
from .running import Call, ForwardRun, Guard, Override, Wrapper, scoped_forwards
from .schedule import CallInputs


def functional_call(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: object = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    spec: PartitionSpec,
    buffers: dict[str, Tensor] | None = None,
    attributes: Iterable[str] | None = None,
    method: str | None = None,
    reduce: ReduceBy = "mean",
    reduce_axes: Iterable[str] | None = None,
    prefetch: int = 1,
    in_flight: int = 1,
    check_order: bool = True,
) -> Any:
    """Call a module on sharded parameters: torch.func.functional_call where ``params`` may be shards.

    Gathers each unit just before its module runs and frees it after; backward gathers it again and reduces its gradient.
    Results and derivatives equal those of the module on ``unshard(params, spec)``, at every order and under every torch.func
    transform. All ranks must run the same units in the same order. After the call, or an error, the model is as before.
    See ``examples/guide``: `ideas.md`, `transforms.md`, and `limits.md` on what forward may not do.

    Args:
        model: The module that the spec was made for. Its own parameters are not read.
        params: Slices by unit key, as `shard` gives them, or a unit's full parameters by name, for which nothing is gathered
            or reduced. Ignored parameters are the model's own if they are not in here.
        args: The positional arguments as a tuple, or the only one.
        kwargs: The keyword arguments.
        spec: The spec of the slices. An unbound one is on all ranks, as one axis "shard".
        buffers: Used instead of the model's, and updated. Without them forward changes copies, with a UserWarning.
        attributes: Globs of attributes that forward sets, such as ``("*.aux_loss",)``, to return beside the result. The call
            puts all back as they were before, and refuses to do so with a tensor that has a graph.
        method: The name of a method to call instead of forward.
        reduce: The reduction of gradients over ranks: "mean", "sum", or a number to divide the sum by.
        reduce_axes: The mesh axes to reduce gradients over, or one; all by default.
        prefetch: The number of units that are gathered ahead of their use, in forward and in backward.
        in_flight: The number of units whose gradients are reduced while the rest of backward computes.
        check_order: Whether ranks compare which units they gather and reduce.

    Returns:
        What the module returns; with ``attributes`` a pair of that and of a dict from "path.attribute" to its value.

    Raises:
        ValueError, TypeError: Before any communication, naming the path: for arguments that do not fit the spec, tensors on
            the meta device, and the model's own parameters where they are differentiated on several ranks.
        RuntimeError: If forward changes or makes a parameter, or computes with one that a list, dict or object holds; if it
            leaves a tensor with a graph in an attribute that is not in ``attributes``; if ranks run different units; if another
            thread has the model in a call.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}, spec)
        >>> fs.functional_call(model, params, (torch.ones(2),), spec=spec)
        tensor([6.])
    """
    inputs = CallInputs(params, bind_spec(spec), Reduction(), prefetch, in_flight, check_order)
    inputs = _check_inputs(inputs, reduce, reduce_axes)
    given = args if isinstance(args, tuple) else (args,), dict(kwargs or {})
    returned = (attributes,) if isinstance(attributes, str) else tuple(attributes or ())
    if _torch.is_in_graph():
        if returned:
            raise NotImplementedError(
                "functional_call: attributes= inside torch.compile: expected them in the result of forward"
            )
        return compiled_call.run(model, inputs, *given, buffers, method)
    bound = BoundModule.bind(model, inputs.spec)
    _check_materialized(model, inputs, given)
    _check_reduced(model, inputs)
    try:
        run = _run_call(Call(bound, inputs, wrappers=_WRAPPERS), *given, buffers, method, returned)
    except (TypeError, RuntimeError) as error:
        raise add_hints(error, model)  # noqa: B904 - the same one
    for guard in run.guards:
        guard.report(run, stacklevel=2)
    if inspect.isgenerator(run.out):
        raise TypeError("functional_call: expected results, got a generator, which would run after the call; consume it inside")
    return run.out if attributes is None else (run.out, run.attributes)


# --- The checks of the arguments, before anything is communicated or computed ---


def _check_inputs(inputs: CallInputs, reduce: ReduceBy, reduce_axes: Iterable[str] | None) -> CallInputs:
    """Return the inputs with their reduction, after checks that need no model: inside torch.compile there are no others."""
    params, spec, _, prefetch, in_flight, check_order, weight, receiver = inputs
    check_params(params, spec)
    check_host_resident(params, spec)
    refuse_reduce_codec_in_graph(spec)
    if accumulation := find_accumulation(params, spec, reduce, reduce_axes):
        params, reduction, receiver = accumulation.replace(params)
        weight = accumulation.weight
    else:
        reduction = resolve_reduction(reduce, reduce_axes, spec.bound_mesh, (unit for unit in spec if unit.key in params))
    _check_count("prefetch", prefetch, 0)
    _check_count("in_flight", in_flight, 1)
    return CallInputs(params, spec, reduction, prefetch, in_flight, check_order, weight, receiver)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_materialized(model: nn.Module, inputs: CallInputs, given: object) -> None:
    """Raise ValueError for parameters on the meta device, in ``params`` or ignored, where the other tensors have values."""
    params, spec, *_ = inputs
    empty = {key: tensor for key, tensor in params.items() if tensor.is_meta}
    ignored = {} if empty else {name: model.get_parameter(name) for name in spec.ignored if name not in params}
    if left := {name: tensor for name, tensor in ignored.items() if tensor.is_meta}:
        raise ValueError(
            f"functional_call: parameters that the spec ignores are on the meta device, without values: {abridge(left)}; "
            "expected them in params"
        )
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)] if empty else []
    if tensors and not any(x.is_meta for x in tensors):
        raise ValueError(
            f"functional_call: params are on the meta device, without values: {abridge(empty)}; expected them to be "
            f"materialized as the arguments are, on {tensors[0].device}; fs.init(model, spec) gives params that are born "
            "sharded, with src= those of one rank"
        )


def _check_reduced(model: nn.Module, inputs: CallInputs) -> None:
    """Refuse the model's own parameters where they are differentiated on several ranks; warn, once, of copies of them.

    Nothing reduces the gradients of full parameters, so each rank would train alone. `unshard` gives neither: there the
    caller has said who reduces. Its results are known by their layout, since all parameters of a unit are views of one
    buffer. A unit of a single parameter does not tell, and is passed over; so is what was computed, as by an inner step.
    """
    params, spec, *_ = inputs
    ranks = torch.Size(size for _, size in spec.bound_mesh.sizes).numel()
    full = [] if ranks == 1 else [unit for unit in spec if unit.key not in params and unit.requires_grad]
    named = dict(model.named_parameters(remove_duplicate=False)) if full else {}
    for unit in full:
        tensors = find_full_params(params, unit) or []
        for param, tensor in zip(unit.params, tensors, strict=True):
            if _torch.has_derivative(tensor) and _torch.shares_storage(tensor, named[param.name]):
                raise ValueError(
                    f"parameter '{param.name}' is the model's own, and with full parameters no gradient is reduced: on "
                    f"{ranks} ranks each would train alone; expected fs.shard(model, spec), or fs.unshard(params, spec) with "
                    "fs.reduce_grads on the gradients"
                )
        are_copies = (
            len({_torch.storage_id(_torch.unwrap(tensor)) for tensor in tensors}) > 1
            and any(map(_torch.has_derivative, tensors))
            and all(_torch.is_leaf(x) and x.dtype == unit.dtype for x in tensors)  # others were cast, as for mixed precision
        )
        if are_copies and has_peers(spec.bound_mesh) and is_first_warning(model, "full parameters"):
            warnings.warn(
                f"functional_call: parameter '{unit.params[0].name}' is given in full and differentiated, and no gradient of "
                f"full parameters is reduced: each of {ranks} ranks would train alone; expected fs.shard(model, spec), or "
                "fs.unshard(params, spec) with fs.reduce_grads on the gradients; filter this warning if your own code "
                "reduces them",
                stacklevel=3,
            )


# --- The run of forward, with what surrounds and watches it ---


def _run_call(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffers: dict[str, Tensor] | None,
    method: str | None,
    returned: Collection[str] = (),
) -> ForwardRun:
    """Call the model, or another of its methods than forward. ``returned`` are globs of attributes to return."""
    with call.install(buffers, returned=returned, guards=_GUARDS) as run:
        forward = getattr(call.bound.modules[""], method or "__call__")
        run.out = wrap_in_casts(forward, call.spec.by_path[""], "")(*args, **kwargs)
    return run


def _cast_forwards(call: Call, _: ModuleAttributes) -> Iterator[Override]:
    bound, norms = call.bound, find_instances(call.bound.modules, SyncBatchNorm)
    return module_overrides(bound.modules, norms, call.spec, bound.path, call.inputs.weight)


def _offloaded_forwards(call: Call, _: ModuleAttributes) -> Iterable[Override]:
    bound = call.bound
    return call.offload.forwards(bound.modules, bound.path, call.spec.paths, call.mode.restorable) if call.offload else ()


_WRAPPERS: tuple[Wrapper, ...] = (compiled_forwards, scoped_forwards, recomputed_forwards, _cast_forwards, _offloaded_forwards)
"""What surrounds the forwards of modules: each wrapper is around those before it."""

_GUARDS: tuple[type[Guard], ...] = (AttributeWrites, OwnParameters, BackwardGuard, BufferChanges)
"""What watches a call, in the order in which it is made and asked."""


# --- The order in which forward uses units ---


def trace_order(
    model: nn.Module,
    spec: PartitionSpec,
    args: object = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    method: str | None = None,
) -> tuple[str, ...]:
    """Return the keys of the units in the order in which the model's forward gathers them, for `PartitionSpec.ordered`.

    Runs the forward once on shapes alone: nothing is computed, gathered or sent, the parameters are not read, and the model
    stays as it was. A unit is named once for each time that it is gathered.

    Args:
        model: The module, which may be on the meta device. Units count as gathered on the accelerator that the model's buffers,
            its parameters or the arguments are on, the first that are.
        spec: Its spec; the mesh does not matter.
        args: The positional arguments of `functional_call`.
        kwargs: Its keyword arguments.
        method: The name of the method that it calls.

    Returns:
        The keys of the units.

    Raises:
        RuntimeError: Where forward depends on the values of tensors: then give the order by hand, or none.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> spec = fs.by_type(torch.nn.Linear)(model)
        >>> fs.trace_order(model, spec, (torch.ones(2),))
        ('0', '1')
    """
    spec = check_spec(spec).on({axis: 2 if axis in unit.p.axes else 1 for unit in spec for axis in unit.distinct_axes})
    with _torch.fake_mode(), torch.no_grad():

        def fake(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=device if x.is_meta else x.device)

        given = args if isinstance(args, tuple) else (args,), dict(kwargs or {})
        tensors = (*model.buffers(), *model.parameters(), *(x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)))
        device = next((x.device for x in tensors if x.device.type not in ("cpu", "meta")), torch.device("cpu"))
        shards = {u.key: spec.stored(u) for u in spec}
        params = {key: torch.empty(length, dtype=dtype, device=device) for key, (length, dtype) in shards.items()}
        named = dict(model.named_parameters(remove_duplicate=False))
        params |= {name: fake(named[name]) for name in spec.ignored if name in named}
        positional, keywords = pytree.tree_map_only(Tensor, fake, given)
        inputs = CallInputs(params, spec, Reduction(), prefetch=0, check_order=False)
        call = Call(BoundModule.bind(model, spec), inputs, wrappers=_WRAPPERS)
        schedule = call.mode.schedule
        assert schedule is not None
        try:
            _run_call(call, positional, keywords, {name: fake(b) for name, b in model.named_buffers()}, method)
        except RuntimeError as error:
            raise RuntimeError(
                f"trace_order: expected a forward that runs on shapes alone, got {type(error).__name__}: {error}; "
                "if it depends on the values of tensors, give the order of the units to spec.ordered by hand"
            ) from error
    return tuple(key for key in schedule.gathered_keys if schedule.routes.steps[key].route.split_axes)
