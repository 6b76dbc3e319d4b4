"""A module that runs again for its derivatives: what it is made of is an argument, in every run the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # the tree of what modules keep

from . import _torch
from .batchnorm import MESH
from .layout import Params, unflatten_unit
from .remat import remat
from .schedule import Visit
from .spec import PartitionSpec
from .swap import CONTAINERS, Attributes, Place
from .tree import join

__all__ = ["Inside", "recomputed"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Inside = Callable[[Attributes, Mapping[str, Tensor], PartitionSpec, Params, Args, Kwargs], tuple[Any, Attributes]]
"""``inside(attributes, params, spec, buffers, args, kwargs)``: a run of the module with these insides. It gives the result
and what the attributes are then, and updates the dict of buffers."""

_OWN = ("_parameters", "_buffers", "forward", MESH)


def recomputed(
    inside: Inside,
    place: Place,
    before: Attributes,
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    visits: Sequence[Visit],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The result of the module at this place, of which only the arguments are kept.

    ``before`` are the attributes of the model before the call that runs, ``visits`` its own units where the schedule has
    gathered them. Buffers that a run changes are changed once, and so are attributes; tensors come in by the arguments
    and leave by the result: RuntimeError otherwise.
    """
    buffers: dict[Tensor, list[str]] = {}
    for path, module in place.modules.items():
        for attr, buffer in module._buffers.items():
            if buffer is not None:
                buffers.setdefault(buffer, []).append(join(path, attr))
    run = _Runs(inside, place, before, list(buffers.values()), visits)
    out, written = remat(run)(params, tuple(buffer.clone() for buffer in buffers), spec, args, kwargs)
    for i, buffer in written.items():
        if i in run.replaced:
            for name in run.buffers[i]:
                path, _, attr = name.rpartition(".")
                place.modules[path]._buffers[attr] = buffer
        else:
            _torch.overwrite(list(buffers)[i], buffer, told=i in run.told)
    for module, new in run.changed.items():
        vars(module).update(new)
    return out


class _Runs:
    """The module as a function of all that it is made of. ``buffers`` are the names of each of its buffers."""

    def __init__(
        self, inside: Inside, place: Place, before: Attributes, buffers: list[list[str]], visits: Sequence[Visit]
    ) -> None:
        self._inside, self._place, self.buffers = inside, place, buffers
        self._attributes = _entered(place, before)
        self._known = {id(tensor) for module in place.owned for _, tensor in _kept(self._attributes[module])}
        self._first, self._last = True, False
        self._visits = visits
        self._leases = [visit.hold() for visit in visits]  # a backward that nobody comes back to runs it with these
        self.changed: Attributes = {}
        self.told: set[int] = set()
        """The buffers that a run has changed and said so; others may have changed all the same."""
        self.replaced: set[int] = set()
        """Those in whose place it has put others."""

    def __call__(
        self, params: Mapping[str, Tensor], given: tuple[Tensor, ...], spec: PartitionSpec, args: Args, kwargs: Kwargs
    ) -> tuple[Any, dict[int, Tensor]]:
        copies = [buffer.clone() for buffer in given]
        versions = [_torch.version(copy) for copy in copies]
        now = {name: copy for copy, names in zip(copies, self.buffers, strict=True) for name in names}
        out, after = self._inside(self._attributes, self._gathered(params), spec, now, args, kwargs)
        if self._first:
            self.changed = _changed(self._place, self._attributes, self._known, after)
            self._first = False
        written: dict[int, Tensor] = {}
        for i, (copy, version, names) in enumerate(zip(copies, versions, self.buffers, strict=True)):
            # kernels write running statistics without telling the version; those that vmap does not batch they refuse
            silent = copy.is_floating_point() and (not _torch.level() or _torch.is_batched(copy))
            if now[names[0]] is not copy:
                self.replaced.add(i)
            if _torch.version(copy) != version:
                self.told.add(i)
            if silent or i in self.replaced | self.told:
                written[i] = now[names[0]]
        return out, written

    def _gathered(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full parameters in the place of the shards that the schedule gathers, in the first and in the last run."""
        params = dict(params)
        for visit in self._visits if self._first or self._last else ():
            shard = params.pop(visit.unit.key)
            views = visit.parameters_again(shard) if self._last else unflatten_unit(visit.buffer, visit.unit)
            params |= zip((param.name for param in visit.unit.params), views, strict=True)
        return params

    @contextlib.contextmanager
    def last_run(self) -> Generator[None]:
        """For the run that plain autograd's backward makes: gathered ahead, reduced behind."""
        if not self._leases:
            yield
            return
        self._last = True
        try:
            with self._visits[0].schedule.part_of_backward():
                yield
        finally:
            self._last = False


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
