"""What the units of a call have rest on the host: `offload` around the modules of those that say so.

The innermost unit decides: the model's own ``P(offload="activations")`` is for what none of the others saves, and a unit in it
that does not say so keeps what it saves. An `offload` around the call is for all of them that do not say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .._spec.spec import PartitionSpec
from .._spec.tree import is_within
from .._transforms.offload import OffloadHooks, OffloadTarget, can_offload, constant_storages, find_offload_hooks, storage_ids
from .._transforms.saved_tensors import RestorableBuffer, SavedTensorHooks

__all__ = ["Resting", "hooks_around", "resting"]

Live = dict[int, RestorableBuffer] | None
TO = OffloadTarget()


class Resting:
    """Which modules of a call have what they save on the host, and what they do not save so: what the call holds anyway."""

    def __init__(self, own: frozenset[str], around: OffloadHooks | None, params: Mapping[str, Tensor]) -> None:
        self._own, self._around = own, around
        self._held = storage_ids(params.values())

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """These stay where they are for the length of the call."""
        self._held |= storage_ids(tensors)

    def to(self, path: str) -> OffloadTarget | None:
        """Where the module at this path has what it saves."""
        return TO if path in self._own else self._around.target if self._around else None

    def hooks(
        self, path: str, live: Live, module: nn.Module | None = None, args: Any = (), kwargs: Any = None
    ) -> SavedTensorHooks:
        """What a run of this module is to be in."""
        to = self.to(path)
        if to is None:
            return SavedTensorHooks({} if live is None else live)
        held = self._held, storage_ids(module.buffers() if module else ()), constant_storages(args, kwargs)
        return OffloadHooks({} if live is None else live, to, (*(self._around.held if self._around else ()), *held))

    def install(self, modules: Mapping[str, nn.Module], root: str, paths: Iterable[str], live: Live) -> None:
        """Put it around the forward of these modules, in which there are no others than the root."""
        for path in paths:
            if path in modules and path != root and any(is_within(path, own) for own in self._own):
                vars(modules[path])["forward"] = self._around_forward(path, modules[path], live)

    def _around_forward(self, path: str, module: nn.Module, live: Live) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not can_offload():
                return forward(*args, **kwargs)
            hooks = self.hooks(path, live, module, args, kwargs)
            with hooks.activate(hooks.pack):
                return forward(*args, **kwargs)

        return run


def resting(
    params: Mapping[str, Tensor], spec: PartitionSpec, outer: Callable[..., object] | None, *, again: bool
) -> Resting | None:
    """What rests where in a call, None for nothing. ``outer`` packs what is saved around it.

    Not ``again``: what runs is itself run again for its derivatives, and what it saves then is soon read.
    """
    own = spec._compute_once(_offloaded)
    around = find_offload_hooks(outer)
    if not own and around is None:
        return None
    return Resting(own if again else own - {""}, around, params) if can_offload() else None


def _offloaded(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(path for path, p in spec.places.items() if "activations" in p.offloads)


def hooks_around(live: Live, rests: Resting | None) -> SavedTensorHooks | None:
    """What all of a call's forward is to be in, None for nothing. ``live`` are the buffers whose views are replaced."""
    if rests is not None and rests.to("") is not None:
        return rests.hooks("", live)
    return None if live is None else SavedTensorHooks(live)
