"""The guard against modules that a custom backward runs after their call: they have the model's own parameters again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._spec.tree import join_path
from .bound_module import BoundModule

__all__ = ["find_tensors", "guard_backward"]


def guard_backward(out: Any, place: BoundModule, params: Mapping[str, Tensor]) -> None:
    """Let a backward from the results of a call raise RuntimeError if it runs a module with the model's own parameters.

    From the first node of backward to its end, also by an error, a hook of torch for all modules looks at each that is called.
    """

    def arm(_: object) -> None:
        key = _torch.current_graph_task(), place.modules[""]
        if key not in _GUARDS:
            _GUARDS[key] = guard = _Guard(place, params)
            _torch.hold_until_backward_ends(guard)

    for node in {node for tensor in find_tensors(out) for node, _ in _torch.own_edges(tensor)}:
        node.register_prehook(arm)


class _Guard:
    """The hook, until this object is freed."""

    def __init__(self, place: BoundModule, params: Mapping[str, Tensor]) -> None:
        def check(module: nn.Module, _: object) -> None:
            own = vars(module).get("_parameters") if module in place.owned else None
            if type(own) is not dict or _torch.current_graph_task() < 0:  # in a call, or in a thread without a backward
                return
            path = next(path for path, one in place.modules.items() if one is module)
            for attr in place.owned[module]:
                name = join_path(path, attr)
                if isinstance(own.get(attr), nn.Parameter) and own[attr] is not params.get(name):
                    raise RuntimeError(
                        f"module '{path}' runs in backward, after its functional_call, and would read the model's own "
                        f"parameter '{name}', with the values from before training and no gradient: expected a custom "
                        "autograd.Function to take the parameters as arguments, and to run torch.func.functional_call(module, "
                        "params, x) in its backward; or P(remat=True) instead of it"
                    )

        self._handle = register_module_forward_pre_hook(check)

    def __call__(self) -> None:
        """Do nothing at the end of backward, which then frees this object."""

    def __del__(self) -> None:
        self._handle.remove()


_GUARDS: WeakValueDictionary[tuple[int, nn.Module], _Guard] = WeakValueDictionary()
"""The guards of backwards that run, by the number of the backward and the model."""


def find_tensors(out: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree of results, and in the attributes of other objects in it."""
    for leaf in pytree.tree_leaves(out):
        inside = [leaf] if isinstance(leaf, Tensor) else pytree.tree_leaves(getattr(leaf, "__dict__", ()))
        yield from (x for x in inside if isinstance(x, Tensor) and not isinstance(x, _torch.StandIn))
