"""Trees of tensors as they come: seeded, cloned, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["clones", "largest_of", "row", "same", "seeded", "tensors_of"]


@contextlib.contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Generator[None]:
    """Within this, random numbers follow from the seed; afterwards the generators are where they were."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device's
        for device in devices:
            stack.enter_context(torch.random.fork_rng(devices=[device.index], device_type=device.type))
            module = torch.get_device_module(device.type)
            with module.device(device):
                module.manual_seed(seed)
        yield


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def clones(tree: Any) -> Any:
    """The tree with copies of its tensors, one of each: forward may write to them."""
    copies: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda x: copies.setdefault(id(x), x.clone()), tree)


def row(tree: Any, rank: int) -> Any:
    """The tree of one of the ranks that are stacked in dimension 0."""
    return pytree.tree_map_only(Tensor, lambda x: x[rank], tree)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal in every element, wherever they are."""
    return a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))


def largest_of(x: Tensor) -> float:
    """The largest magnitude; what is not finite counts as 0, and so does nothing."""
    return float(x.detach().abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
