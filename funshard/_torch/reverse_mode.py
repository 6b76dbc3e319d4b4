"""What reverse mode records, and when its backward ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped

from .levels import is_wrapped

__all__ = ["edges_in_graph", "hold_until_backward_ends", "is_recorded", "own_edges"]

Edge = tuple[Any, int]
"""A node of a graph, and the index of one of its results."""


def is_recorded(tensor: Tensor) -> bool:
    """Return whether torch.func.grad or vjp, or plain autograd, records operations on the tensor now.

    Forward mode does not. Pinned by ``test_what_reverse_mode_records``.
    """
    while is_wrapped(tensor):
        if tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad


def hold_until_backward_ends(held: Callable[[], None]) -> None:
    """Hold an object until the running backward ends, also by an error. The end without one calls it.

    Pinned by ``test_held_until_backward_ends``.
    """
    torch.autograd.Variable._execution_engine.queue_callback(held)  # pyright: ignore


def own_edges(tensor: Tensor) -> list[Edge]:
    """Return the results of nodes that a tensor is, at each level of transforms. Pinned by ``test_edges_in_a_graph``."""
    edges: list[Edge] = []
    while True:
        if tensor.grad_fn is not None:
            edges.append((tensor.grad_fn, tensor.output_nr))
        if not is_wrapped(tensor):
            return edges
        tensor = get_unwrapped(tensor)


def edges_in_graph(tensors: Iterable[Tensor]) -> set[Edge]:
    """Return the results of nodes that tensors are, or are computed from. Pinned by ``test_edges_in_a_graph``."""
    waiting = [edge for tensor in tensors for edge in own_edges(tensor)]
    seen = set(waiting)
    while waiting:
        new = [edge for edge in waiting.pop()[0].next_functions if edge[0] is not None and edge not in seen]
        seen.update(new)
        waiting += new
    return seen
