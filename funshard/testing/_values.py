"""Helpers for trees of tensors: find, clone, select and compare, and fix the seed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["clone_tensors", "find_tensors", "fixed_seed", "is_equal", "max_magnitude", "select_rank"]


@contextlib.contextmanager
def fixed_seed(seed: int, devices: Iterable[torch.device]) -> Generator[None]:
    """Seed the generators of the CPU and the devices, and restore them afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device's
        for device in devices:
            stack.enter_context(torch.random.fork_rng(devices=[device.index], device_type=device.type))
            module = torch.get_device_module(device.type)
            with module.device(device):
                module.manual_seed(seed)
        yield


def find_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def clone_tensors(tree: Any) -> Any:
    """Return the tree with copies of its tensors, one of each: forward may write to them."""
    copies: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda x: copies.setdefault(id(x), x.clone()), tree)


def select_rank(tree: Any, rank: int) -> Any:
    """Return the tree of one of the ranks that are stacked in dimension 0."""
    return pytree.tree_map_only(Tensor, lambda x: x[rank], tree)


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in every element, whatever their devices are."""
    return a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))


def max_magnitude(x: Tensor) -> float:
    """Return the largest magnitude of finite elements, 0 if there is none."""
    return float(x.detach().abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
