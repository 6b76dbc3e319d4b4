"""Where a scan keeps states: on their device, in host memory, or in files without a name."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from .. import _torch
from .scan_layout import StateLayout

__all__ = ["StateStore"]


@dataclass(frozen=True)
class StateStore:
    """A place to keep states: their device (None), host memory (``"host"``) or files in a directory."""

    place: str | None

    @classmethod
    def make(cls, offload: str | os.PathLike[str] | None) -> StateStore:
        """Return the store for an argument of `scan`; raise ValueError for a directory that is not there."""
        if offload is None or offload == "host":
            return cls(offload)  # pyright: ignore[reportArgumentType]
        if not isinstance(offload, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"scan: offload: expected 'host', a directory or None, got {offload!r}")
        if not Path(offload).is_dir():
            raise ValueError(f"scan: offload: expected 'host' or a directory, got '{offload}', which is none")
        return cls(str(offload))

    def put(self, state: Any) -> Any:
        """Return the state with its tensors in this place. In host memory are already those of the CPU."""
        if self.place is None:
            return state
        directory = None if self.place == "host" else self.place

        def move(x: Tensor) -> Tensor:
            if not x.numel() or x.layout is not torch.strided or (directory is None and not needs_host_copy(x.device)):
                return x
            return _StoredTensor.apply(x, directory)

        return pytree.tree_map_only(Tensor, move, state)

    def fetch(self, state: Any, layout: StateLayout) -> Any:
        """Return the state with its tensors on the devices of the layout."""
        leaves, tree = pytree.tree_flatten(state)
        moved = [
            leaf.to(kind[2], non_blocking=True) if isinstance(kind, tuple) else leaf
            for leaf, kind in zip(leaves, layout.leaves, strict=True)
        ]
        return pytree.tree_unflatten(moved, tree)


def needs_host_copy(device: torch.device) -> bool:
    """Return whether a tensor on this device needs a copy to be in host memory."""
    return _torch.is_accelerator(device)


class _StoredTensor(_torch.Function):
    """The identity, with its result in host memory or, given a directory, in a file; gradients return to the device."""

    @staticmethod
    def forward(x: Tensor, directory: str | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if directory is not None:
            return _allocate_in_file(x, directory).copy_(x)
        out = _torch.allocate_like(x, torch.device("cpu"))
        _torch.AsyncCopy(x, out).wait()
        return out

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.device = inputs[0].device  # pyright: ignore[reportAttributeAccessIssue]
        ctx.host = output.device  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.to(ctx.device), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent.to(ctx.host, copy=True)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, directory: str | None) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _StoredTensor.apply(x, directory), in_dims[0]


def _allocate_in_file(like: Tensor, directory: str) -> Tensor:
    """Return an uninitialized tensor, of another's shape and dtype, in a file without a name that is freed with the tensor."""
    nbytes = like.numel() * like.itemsize
    descriptor, name = tempfile.mkstemp(prefix="funshard-scan-", dir=directory)
    try:
        if hasattr(os, "posix_fallocate"):  # an error now; a write to a full disk would end the process
            os.posix_fallocate(descriptor, 0, nbytes)
        storage = torch.UntypedStorage.from_file(name, True, nbytes)
    finally:
        os.close(descriptor)
        os.unlink(name)
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape)  # pyright: ignore[reportCallIssue]
