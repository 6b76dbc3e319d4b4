"""P(offload="activations"): the modules of a call whose saved tensors live in host memory.

The innermost unit decides. The model's own ``P(offload="activations")`` holds for what no other unit saves, and a unit in it
that does not say so keeps what it saves on the device. An `offload` around the call holds for all units that say nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._transforms.offload import OffloadHooks, OffloadTarget, can_offload, constant_storages, find_offload_hooks, storage_ids
from .._transforms.saved_tensors import RestorableBuffer, SavedTensorHooks

__all__ = ["ActivationOffload", "choose_hooks", "choose_offload"]

Live = dict[int, RestorableBuffer] | None
DEFAULT_OFFLOAD = OffloadTarget()


class ActivationOffload:
    """The modules of a call that offload what they save, and the tensors that the call holds anyway and that stay."""

    def __init__(self, own: frozenset[str], around: OffloadHooks | None, params: Mapping[str, Tensor]) -> None:
        self._own, self._around = own, around
        self._held = storage_ids(params.values())

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave these tensors where they are for the length of the call."""
        self._held |= storage_ids(tensors)

    def hooks(self, path: str, live: Live, *held: set[int]) -> SavedTensorHooks:
        """Return the saved-tensor hooks for a run of the module at this path, which offload what is not ``held``."""
        target = DEFAULT_OFFLOAD if path in self._own else self._around.target if self._around else None
        if target is None:
            return SavedTensorHooks({} if live is None else live)
        around = self._around.held if self._around else ()
        return OffloadHooks({} if live is None else live, target, (*around, self._held, *held))

    def forwards(
        self, modules: Mapping[str, nn.Module], root: str, paths: Iterable[str], live: Live
    ) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield the forward of each of these modules but the root, with the hooks around it."""
        for path in paths:
            if path in modules and path != root and any(is_within(path, own) for own in self._own):
                yield modules[path], "forward", self._wrap_forward(path, modules[path], live)

    def _wrap_forward(self, path: str, module: nn.Module, live: Live) -> Callable[..., Any]:
        """Return the module's forward, which offloads the tensors that it saves where that is possible."""
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not can_offload():
                return forward(*args, **kwargs)
            hooks = self.hooks(path, live, storage_ids(module.buffers()), constant_storages(args, kwargs))
            with hooks.activate(hooks.pack):
                return forward(*args, **kwargs)

        return run


def choose_offload(
    params: Mapping[str, Tensor], spec: PartitionSpec, outer: Callable[..., object] | None, *, is_recomputing: bool
) -> ActivationOffload | None:
    """Return what a call offloads, None for nothing. ``outer`` packs what is saved around the call.

    In a run of a recomputed module, which ``is_recomputing``, backward soon reads what is saved.
    """
    own = spec._compute_once(_offloaded_paths)
    around = find_offload_hooks(outer)
    if not (own or around) or not can_offload():
        return None
    return ActivationOffload(own - {""} if is_recomputing else own, around, params)


def _offloaded_paths(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(path for path, p in spec.by_path.items() if "activations" in p.offloads)


def choose_hooks(live: Live, offload: ActivationOffload | None) -> SavedTensorHooks | None:
    """Return the saved-tensor hooks of a call's forward, None for none. ``live`` are the buffers whose views are replaced."""
    hooks = None if offload is None else offload.hooks("", live)
    if isinstance(hooks, OffloadHooks):
        return hooks
    return None if live is None else SavedTensorHooks(live)
