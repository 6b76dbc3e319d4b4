"""A module that runs again for its derivatives: what it is made of is an argument, in every run the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # the tree of what modules keep

from . import _torch
from .layout import Params
from .remat import remat
from .spec import PartitionSpec
from .swap import CONTAINERS, Attributes, Place
from .tree import join

__all__ = ["Inside", "recomputed"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Inside = Callable[[Attributes, Mapping[str, Tensor], PartitionSpec, Params, Args, Kwargs], tuple[Any, Attributes]]
"""``inside(attributes, params, spec, buffers, args, kwargs)``: a run of the module with these insides. It gives the result
and what the attributes are then, and updates the dict of buffers."""

_OWN = ("_parameters", "_buffers", "forward")


def recomputed(
    inside: Inside,
    place: Place,
    before: Attributes,
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The result of the module at this place, of which only the arguments are kept.

    ``before`` are the attributes of the model before the call that runs. Buffers that a run changes are changed once,
    and so are attributes; tensors come in by the arguments and leave by the result: RuntimeError otherwise.
    """
    attributes = _entered(place, before)
    known = {id(tensor) for module in place.owned for _, tensor in _kept(attributes[module])}
    buffers: dict[Tensor, list[str]] = {}
    for path, module in place.modules.items():
        for attr, buffer in module._buffers.items():
            if buffer is not None:
                buffers.setdefault(buffer, []).append(join(path, attr))
    changed: Attributes = {}
    first = True

    def run(
        params: Mapping[str, Tensor], given: tuple[Tensor, ...], spec: PartitionSpec, args: Args, kwargs: Kwargs
    ) -> tuple[Any, dict[int, Tensor]]:
        nonlocal first
        copies = [buffer.clone() for buffer in given]
        versions = [_torch.version(copy) for copy in copies]
        now = {name: copy for copy, names in zip(copies, buffers.values(), strict=True) for name in names}
        out, after = inside(attributes, params, spec, now, args, kwargs)
        if first:
            changed.update(_changed(place, attributes, known, after))
            first = False
        written: dict[int, Tensor] = {}
        for i, (copy, version, names) in enumerate(zip(copies, versions, buffers.values(), strict=True)):
            # kernels write running statistics without telling the version; under vmap they refuse to
            silent = copy.is_floating_point() and not _torch.level()
            if silent or now[names[0]] is not copy or _torch.version(copy) != version:
                written[i] = now[names[0]]
        return out, written

    out, written = remat(run)(params, tuple(buffer.clone() for buffer in buffers), spec, args, kwargs)
    for i, buffer in written.items():
        _torch.overwrite(list(buffers)[i], buffer)
    for module, new in changed.items():
        vars(module).update(new)
    return out


def _entered(place: Place, before: Attributes) -> Attributes:
    """The attributes of the modules as forward sees them now, without what the call put there."""
    out: Attributes = {}
    for path, module in place.modules.items():
        was, now = before[module], vars(module)
        own = {name: was[name] for name in ("_parameters", "forward") if name in was}
        out[module] = {name: value for name, value in now.items() if name not in ("_parameters", "forward")} | own
        for name, tensor in _kept(out[module]):
            if tensor.requires_grad or _torch.is_wrapped(tensor):
                raise RuntimeError(
                    f"module '{path}' has P(remat=True) and reads a tensor of the running computation from its attribute "
                    f"'{name}': expected it among the arguments of the module"
                )
    return out


def _changed(place: Place, attributes: Attributes, known: set[int], after: Attributes) -> Attributes:
    """What a run has set; RuntimeError if there are tensors in it that are not known."""
    out: Attributes = {}
    for path, module in place.modules.items():
        old, new = attributes[module], after[module]
        for name, tensor in _kept(new):
            if id(tensor) not in known and (tensor.is_floating_point() or tensor.is_complex()):
                raise RuntimeError(
                    f"module '{path}' has P(remat=True) and stores a tensor in its attribute '{name}', where it would have "
                    "no gradient: expected it in the result of the module"
                )
        if set_now := {k: v for k, v in new.items() if k not in _OWN and (k not in old or old[k] is not v)}:
            out[module] = set_now
    return out


def _kept(attributes: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors in a module's own attributes, its parameters and buffers aside."""
    return [
        (name, leaf)
        for name, value in attributes.items()
        if name not in _OWN and name not in CONTAINERS and isinstance(value, Tensor | list | dict | tuple)
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
