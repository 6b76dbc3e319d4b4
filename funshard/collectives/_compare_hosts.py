"""Comparisons between the hosts of all ranks of a mesh: an error on every rank, and nothing that a device sends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import _torch
from .._core.mesh import Mesh, ProcessAxis
from ._host_group import HostGroup
from ._sequence import get_host_group, is_comparable

__all__ = ["find_host_groups", "start_comparison"]


def start_comparison(
    text: str, label: str, mesh: Mesh, make_error: Callable[[list[tuple[int, str]]], Exception]
) -> Callable[[], None]:
    """Start to compare a text between ranks; return a function that waits, and raises an error if the texts differ.

    Args:
        text: What is compared.
        label: Says what for, such as "to compare numbers of micro-batches".
        mesh: The ranks.
        make_error: Returns the error from all ranks in the world, in order, and their texts. All ranks raise it.
    """
    groups = find_host_groups(mesh)
    if not groups:
        return lambda: None
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    with _torch.below_transforms():
        extremes = torch.tensor([digest, -digest], device="cpu")  # equal to a rank's own only if all ranks have the same
        first = groups[0].all_reduce_max(extremes, label)

    def finish() -> None:
        with _torch.below_transforms():
            first.wait()
            for group in groups[1:]:
                group.all_reduce_max(extremes, label).wait()
            if extremes.tolist() == [digest, -digest]:
                return
            everyone = [(dist.get_rank(), text)]
            for group in groups:
                everyone = [one for some in group.all_gather_object(everyone) for one in some]
        raise make_error(sorted(everyone))

    return finish


def find_host_groups(mesh: Mesh) -> list[HostGroup]:
    """Return a host group for each mesh axis of several processes: an empty list while operators are recorded or compiled."""
    if torch.compiler.is_compiling() or _torch.is_traced() or _torch.is_fake(torch.empty(0, device="cpu")):
        return []
    axes = [axis for _, axis in mesh.axes if isinstance(axis, ProcessAxis) and axis.name and axis.size > 1]
    return [get_host_group(axis.name) for axis in axes if is_comparable(axis.name)]
