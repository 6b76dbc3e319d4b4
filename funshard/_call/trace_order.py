"""trace_order: the order in which forward uses its units, found on shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._spec.checks import check_spec
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._transforms.error_hints import as_call_arguments
from .bound_module import BoundModule
from .modes import Scheduled
from .running import Call
from .schedule import CallOptions

__all__ = ["trace_order"]


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

        given = as_call_arguments(args, kwargs)
        tensors = (*model.buffers(), *model.parameters(), *(x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)))
        device = next((x.device for x in tensors if x.device.type not in ("cpu", "meta")), torch.device("cpu"))
        shards = {u.key: spec.stored(u) for u in spec}
        params = {key: torch.empty(length, dtype=dtype, device=device) for key, (length, dtype) in shards.items()}
        named = dict(model.named_parameters(remove_duplicate=False))
        params |= {name: fake(named[name]) for name in spec.ignored if name in named}
        positional, keywords = pytree.tree_map_only(Tensor, fake, given)
        call = Call(BoundModule.bind(model, spec), params, spec, Reduction(), CallOptions(prefetch=0, check_order=False))
        assert isinstance(call.mode, Scheduled)
        schedule = call.mode.schedule
        try:
            call.run(positional, keywords, {name: fake(b) for name, b in model.named_buffers()}, method)
        except RuntimeError as error:
            raise RuntimeError(
                f"trace_order: expected a forward that runs on shapes alone, got {type(error).__name__}: {error}; "
                "if it depends on the values of tensors, give the order of the units to spec.ordered by hand"
            ) from error
    return tuple(key for key in schedule.gathered_keys if schedule.routes.by_key[key].split_axes)
