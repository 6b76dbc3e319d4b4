"""What assert_exact gives the whole model for a plain run, and restores after it: buffers, attributes and parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import torch
from torch import nn

from .._batchnorm import MESH, SyncBatchNorm
from .._call.buffers import set_buffers
from .._call.module_state import calling_thread, own_tensors, restore_modules
from .._spec.tree import join_path
from .._units.layout import Params
from ..collectives._mesh import Mesh
from ._values import clone_tensors, fixed_seed

__all__ = ["find_buffers", "find_modules_by_path", "install_buffers", "preserve_model"]


def find_modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's modules by path, a shared one under each of its paths."""
    return dict(model.named_modules(remove_duplicate=False))


def install_buffers(model: nn.Module, buffers: Params, mesh: Mesh) -> None:
    """Give the model these buffers and this mesh, as a call does; use it within `preserve_model`."""
    for path, module in find_modules_by_path(model).items():
        if isinstance(module, SyncBatchNorm):
            vars(module)[MESH] = mesh
        if own := own_tensors(module, "_buffers"):
            set_buffers(module, {attr: buffers.get(join_path(path, attr)) for attr in own})


def find_buffers(model: nn.Module, names: Iterable[str]) -> Params:
    """Return the buffers of these names that the model has at present."""
    now = dict(model.named_buffers(remove_duplicate=False))
    return {name: now[name] for name in names if name in now}


@contextlib.contextmanager
def preserve_model(model: nn.Module, seed: int, devices: Iterable[torch.device]) -> Generator[None]:
    """Seed the generators; after the ``with`` block restore them and the model's attributes and parameters."""
    values = clone_tensors({name: p.detach() for name, p in model.named_parameters()})
    try:
        with restore_modules(find_modules_by_path(model), calling_thread()), fixed_seed(seed, devices), torch.enable_grad():
            yield
    finally:
        for name, own in model.named_parameters():
            if not torch.equal(own, values[name]):  # forward wrote to it
                own.data.copy_(values[name])
