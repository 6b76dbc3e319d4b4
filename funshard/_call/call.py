"""functional_call: a module on sharded parameters, one unit gathered at a time (running.py)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._spec.accumulation import accumulation_of
from .._spec.division import Divide
from .._spec.fits import check_params
from .._spec.spec import PartitionSpec, bound
from .._transforms.explained import about_arguments, arguments, check_values, explained
from .._units.flow import reduction_over
from . import in_graph
from .buffers import warn_of_lost
from .options import CallOptions
from .running import Call
from .stale_statistics import check_statistics
from .swap import Place
from .unreduced import check_reduced

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
    reduce: Divide = "mean",
    reduce_over: Iterable[str] | None = None,
    prefetch: int = 1,
    in_flight: int = 1,
    check_order: bool = True,
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

    All ranks must run the same units in the same order, and have losses that depend on the same ones. With ``check_order`` they
    compare that by a small reduction after forward and one after backward (in stacks of transforms before each collective):
    RuntimeError on every rank where they differ. A rank that makes fewer calls than others still leaves them waiting. Of one
    unit each rank may use other parameters. Parameters that are not used have zeros where gradients are returned, and after
    a plain ``backward()`` the shard of a unit that is not used has none.

    Gradients are reduced to their mean over ranks; with ``reduce="sum"`` to their sum, with a number to the sum over that.
    ``reduce_over`` are the mesh axes to reduce over, or one, all by default: over the others gradients stay each rank's
    own, as for HSDP's micro-batches (`reduce_grads` reduces the rest later) or local SGD. `accumulate` decides both by itself.
    `Precision` says in which dtypes units are gathered, computed with and reduced, and what is cast around their modules;
    gradients have the shards' own.

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

    What a module with ``P(offload="activations")`` has autograd save rests on the host until backward (`funshard.offload`), and
    comes back one such unit ahead; with ``remat`` too, its arguments do and its insides run again. Of units in units the
    innermost one decides.

    The shards of units with ``P(offload="params")`` rest on the host, where `shard` puts them, and so do their gradients. A
    gather first copies this rank's slice to the mesh's device, and a reduced slice leaves for the host while the next unit's
    gradient is reduced; the host waits for these at the end of backward, once. A slice is copied in the dtype that it is
    gathered in, if that is smaller than its own: then it is cast on the host. In stacks of transforms, and where a derivative
    records itself, a gradient's copy is waited for where it is made.

    Inside torch.compile the whole tree is gathered by data flow and the compiler decides what lives how long; ``remat`` and
    ``offload`` of activations are then left to it as well, and params that rest on the host are plainly copied. `compile`
    decides itself about gathers and ``remat``.

    Raises RuntimeError, naming it, where forward computes with a parameter of the model that a list, dict or object holds,
    which a call does not replace, or makes a parameter itself, which the next call would not know. Raises ValueError or
    TypeError, naming the path, for params that do not fit the spec or are on the meta device where the arguments are not,
    buffers that are there where params are not, a model that the spec was not made for or that was compiled, the model's own
    parameters in the place of `shard`'s on several ranks where they are differentiated (of copies of them it warns, once),
    unknown buffers, and axes to reduce over that do not fit, before any communication. Raises RuntimeError, naming unit and
    parameter, where forward changes a parameter in place, by whatever means (``.data``, nn.Embedding's ``max_norm``): of plain
    modules the change would last, here it would be lost; ``params`` are what they were. So it does where another thread has
    the model in a call: one at a time.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> spec = fs.whole()(model)
        >>> params = fs.shard({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}, spec)
        >>> fs.functional_call(model, params, (torch.ones(2),), spec=spec)
        tensor([6.])
    """
    spec = bound(spec)
    check_params(params, spec)
    accumulation = accumulation_of(params, spec, reduce, reduce_over)
    arrivals = None
    if accumulation:
        params, reduction, arrivals = accumulation.entering(params)
    else:
        reduction = reduction_over(reduce, reduce_over, spec.bound_mesh, (unit for unit in spec if unit.key in params))
    _check_count("prefetch", prefetch, 0)
    _check_count("in_flight", in_flight, 1)
    given = arguments(args, kwargs)
    if torch.compiler.is_compiling():
        return in_graph.run(model, params, *given, spec, buffers, method, reduction, check_order)
    place = Place.of(model, spec)
    check_values(model, params, spec, given)
    check_reduced(params, model, spec, stacklevel=2)
    call = Call(place, params, spec, reduction, CallOptions(prefetch, in_flight, check_order), arrivals)
    try:
        out = call.run(*given, buffers, method)
    except (TypeError, AttributeError, RuntimeError) as error:
        about_arguments(error, params, spec, args, given)
        raise explained(error, model)  # noqa: B904 - the same one
    warn_of_lost(model, call.lost, stacklevel=2)
    if call.normalized:
        check_statistics(model, call.normalized, buffers or (), stacklevel=2)
    if inspect.isgenerator(out):
        raise TypeError("functional_call: expected results, got a generator, which would run after the call; consume it inside")
    return out


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
