"""functional_call: a module on sharded parameters, one unit gathered at a time (gathering.py)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch
from .batchnorm import MESH, SyncBatchNorm
from .buffers import put_back, running_statistics, warn_of_lost, warn_of_lost_while_tracing
from .casting import buffer_dtypes, cast_around, cast_back, cast_floats, cast_params, casts
from .division import Divide, Reduction
from .explained import about_arguments, explained
from .fits import check_not_own, check_params, whole_unit
from .gathering import Call
from .layout import unflatten_unit
from .mesh import Mesh
from .spec import PartitionSpec, bound
from .swap import Place
from .travel import gather_unit, reduction_over
from .tree import join

__all__ = ["arguments", "functional_call"]


def functional_call(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: object = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    spec: PartitionSpec,
    buffers: dict[str, Tensor] | None = None,
    method: str | None = None,
    reduce: Divide = "mean",
    reduce_over: Iterable[str] | None = None,
    prefetch: int = 1,
    in_flight: int = 1,
) -> Any:
    """``model(*args, **kwargs)`` on sharded parameters: torch.func.functional_call where ``params`` are shards.

    Each unit is gathered just before its module runs and freed after it; where the module's gradient is wanted it is
    gathered again in backward (not with ``P(reshard=False)``, nor what is still there when forward ends: the root's
    unit and the last one to run), and its gradient is reduced as soon as it is complete. Equal to calling the module
    with ``unshard(params, spec)``, at every order and under every torch.func transform around it. In memory, all of this
    holds for plain autograd, its double backward too, and under one torch.func.grad, which keeps no more than plain
    autograd does if there is a unit to free: nothing for a second derivative that nobody can take. In a stack of
    transforms each derivative gathers again what it reads, and what is then kept are the gathered tangents and cotangents
    that another derivative reads; under torch.vmap, which batches what is gathered, all of it stays. Not so a module with
    ``P(remat=True)``: in every derivative, of any order, it is gathered and run again (as by `funshard.remat`, whose
    conditions are then the module's), and one such unit is alive at a time. Its arguments are also what it finds in its own
    attributes and buffers and what forward has put in the place of its parameters, as torch.func.functional_call does;
    caches and whatever else it changes are changed once. A parameter of a unit outside of it is none of its arguments:
    RuntimeError. A torch.func.grad *inside* forward needs
    ``P(reshard=False)``: RuntimeError otherwise.

    While one unit computes, the next ``prefetch`` ones are gathered (in ``spec.order``, in backward in the reverse of
    what forward did) and the gradients of the last ``in_flight`` ones are reduced. So besides the units whose modules
    are running, ``prefetch`` gathered buffers are alive, and ``in_flight + 1`` gradients that are not reduced. A unit
    that is gathered ahead and not used costs its bytes. Gradients of replicated units are reduced in buckets. All
    of this is for process groups, in plain autograd and under one torch.func.grad or vjp: in deeper stacks gathers and
    reductions wait where they start, and so does a reduction that may be differentiated again (``create_graph``).

    Gradients are reduced to their mean over ranks; with ``reduce="sum"`` to their sum, with a number to the sum over that.
    ``reduce_over`` are the mesh axes to reduce over, or one, all by default: over the others gradients stay each rank's
    own, as for HSDP's micro-batches (`reduce_grads` reduces the rest later) or local SGD. `Precision` says in which dtypes
    units are gathered, computed with and reduced, and what is cast around their modules; gradients have the shards' own.

    ``params`` are what `shard` gives, of any floating dtype. In the place of a unit's shard its full parameters may stand
    under their names, as `unshard` gives them: then nothing is gathered or reduced for it. Parameters that the spec
    ignores are the model's own, or those in ``params`` under their names. ``args`` is a tuple, or the only argument.
    ``method`` names another method than forward. After the call, also when it raises, every attribute of the model and its
    submodules is what it was before: what forward stored on ``self`` is gone, so return what you want to keep.

    ``buffers`` are used in place of the model's, and updates land in that dict and, where forward writes in place, in those
    tensors, as in torch. The model's own buffers are never changed: without ``buffers`` the call works on copies, and where
    forward has changed some of them, such as running statistics, a `BufferWarning` names them, once for a model. To keep
    them, take them in and hand them out by ``has_aux``: a pure function, under every transform and compiler::

        def loss(params, buffers, x):
            buffers = {name: b.clone() for name, b in buffers.items()}
            return functional_call(model, params, x, spec=spec, buffers=buffers).sum(), buffers

        grads, (value, buffers) = grad_and_value(loss, has_aux=True)(params, buffers, x)

    Inside torch.compile the whole tree is gathered by data flow and the compiler decides what lives how long; ``remat`` is
    then left to it as well.

    Raises ValueError or TypeError, naming the path, for params that do not fit the spec, a model that the spec was not made
    for or that was compiled, the model's own parameters in the place of `shard`'s on several ranks where they are
    differentiated, unknown buffers, and axes to reduce over that do not fit, before any communication. Raises RuntimeError,
    naming unit and parameter, where forward changes a parameter in place, by whatever means (``.data``, nn.Embedding's
    ``max_norm``): of plain modules the change would last, here it would be lost; ``params`` are what they were. So it does
    where another thread has the model in a call: one at a time.
    """
    spec = bound(spec)
    check_params(params, spec)
    _check_supported(spec)
    reduction = reduction_over(reduce, reduce_over, spec.bound_mesh, (unit for unit in spec if unit.key in params))
    _check_count("prefetch", prefetch, 0)
    _check_count("in_flight", in_flight, 1)
    given = arguments(args, kwargs)
    if torch.compiler.is_compiling():
        return _by_data_flow(model, params, *given, spec, buffers, method, reduction)
    place = Place.of(model, spec)
    check_not_own(params, model, spec)
    call = Call(place, params, spec, reduction, prefetch, in_flight)
    try:
        out = call.run(*given, buffers, method)
    except (TypeError, AttributeError, RuntimeError) as error:
        about_arguments(error, params, spec, args, given)
        raise explained(error, model)  # noqa: B904 - the same one
    warn_of_lost(model, call.lost, stacklevel=2)
    if inspect.isgenerator(out):
        raise TypeError("functional_call: expected results, got a generator, which would run after the call; consume it inside")
    return out


def arguments(args: object, kwargs: Mapping[str, object] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the model with: ``args`` is a tuple, or the only argument."""
    return args if isinstance(args, tuple) else (args,), dict(kwargs or {})


def _check_supported(spec: PartitionSpec) -> None:
    for unit in spec:
        if unit.p.offload:
            raise NotImplementedError(
                f"unit '{unit.key}': functional_call does not apply P(offload=...) yet, got {unit.p}; leave it out"
            )


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _by_data_flow(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: PartitionSpec,
    buffers: dict[str, Tensor] | None,
    method: str | None,
    reduction: Reduction,
) -> Any:
    _check_casts_inside(spec)  # not on entering the context: Dynamo of torch 2.11 loses the error
    full: dict[str, Tensor] = {}
    for unit in spec:
        if (given := whole_unit(params, unit)) is not None:
            views = cast_params(given, unit)
        else:
            with _torch.noted(funshard_reshard=unit.p.reshard):  # for fs.compile, which then gathers again in backward
                views = unflatten_unit(gather_unit(params[unit.key], unit, spec.bound_mesh, reduction, unit.p.precision), unit)
        full |= {name: view for param, view in zip(unit.params, views, strict=True) for name in param.names}
    full |= {name: params[name] for name in spec.ignored if name in params}
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():  # each once: two names of one attribute would not be put back right
        tensors |= {name: full[name] for name in (join(path, attr) for attr in module._parameters) if name in full}
    before = dict(model.named_buffers()) if buffers is None else buffers
    dtypes = buffer_dtypes(spec)
    moving = tuple(running_statistics(model))
    copies = {x: x.clone() for name, x in before.items() if buffers is None or name in moving}
    now: dict[str, Tensor] = {}
    for name, x in before.items():
        cast = cast_floats(x, dtypes(name.rpartition(".")[0]))
        now[name] = copies[x] if cast is x and x in copies else cast
    tensors |= now
    with _torch.reparametrized(model, tensors), _casts_inside(model, spec), _on_mesh(model, spec.bound_mesh):
        run = getattr(model, method) if method else model
        out = cast_around(run, spec.places[""].precision)(*args, **kwargs)
    if buffers is None:
        warn_of_lost_while_tracing(tuple(name for name, x in now.items() if name in moving or tensors[name] is not x))
        return out
    for name, x in before.items():
        after = tensors[name]
        if x in copies and after is copies[x]:
            put_back(x, after)
        elif after is not x:
            buffers[name] = cast_back(after, x, now[name])
    return out


def _check_casts_inside(spec: PartitionSpec) -> None:
    for path, p in spec.places.items():
        if path and p.precision and casts(p.precision) and not _torch.FORWARD_CAN_BE_REPLACED:
            raise NotImplementedError(
                f"unit '{path}' has a Precision: inside torch.compile, torch {torch.__version__} can cast around the whole "
                "model only: expected torch 2.13, or a Precision for whole(P(...)) and for no other unit"
            )


@contextlib.contextmanager
def _on_mesh(model: nn.Module, mesh: Mesh) -> Generator[None]:
    """Within this, what takes statistics over ranks finds them."""
    own = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    for module in own:
        setattr(module, MESH, mesh)
    try:
        yield
    finally:
        for module in own:
            delattr(module, MESH)


@contextlib.contextmanager
def _casts_inside(model: nn.Module, spec: PartitionSpec) -> Generator[None]:
    """Within this, the modules of units but the root's cast what they say they cast."""
    own: list[tuple[dict[str, Any], Any]] = []  # by __dict__, which Dynamo leaves as it was when it is put back
    for path, p in spec.places.items():
        if path and p.precision and casts(p.precision):
            module = model.get_submodule(path)
            own.append((module.__dict__, module.__dict__.get("forward")))
            module.__dict__["forward"] = cast_around(module.forward, p.precision)
    try:
        yield
    finally:
        for attributes, forward in own:
            attributes.pop("forward")
            if forward is not None:
                attributes["forward"] = forward
