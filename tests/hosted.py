"""Units that rest on the host where the device is the host as well: all that would be copied is, and is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

import funshard as fs
from funshard import _torch
from funshard._wire import host, stages


class Copies:
    """How many tensors were copied beside what is computed, how many bytes, and how many copies are nodes of a graph."""

    def __init__(self) -> None:
        self.beside = self.bytes = self.nodes = 0


def no_host(device: torch.device) -> bool:
    return False


@contextlib.contextmanager
def elsewhere() -> Iterator[Copies]:
    """Within this meshes compute on the CPU, which for new specs is not the host: units rest in other memory of it."""
    copies, plain = Copies(), _torch.AsyncCopy

    class Counted(plain):
        def __init__(self, source: Tensor, target: Tensor) -> None:
            assert not _torch.shares_storage(source, target)
            copies.beside, copies.bytes = copies.beside + 1, copies.bytes + source.nbytes
            super().__init__(source, target)

    def counted(x: Tensor, device: torch.device | None, dtype: torch.dtype) -> Tensor:
        copies.nodes += device is not None
        return moved(x, device, dtype)

    moved = stages.move
    with (
        mock.patch.object(stages, "move", counted),
        mock.patch.object(host, "is_host", no_host),
        mock.patch.object(fs.collectives.Mesh, "device", torch.device("cpu")),
        mock.patch.object(_torch, "AsyncCopy", Counted),
    ):
        yield copies
