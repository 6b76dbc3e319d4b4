"""What modules of a call have beside parameters and buffers: casts around forward, and where to take statistics over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .._batchnorm import MESH, SyncBatchNorm
from .._spec.spec import PartitionSpec
from .casting import cast_around, casts

__all__ = ["fittings"]


def fittings(modules: Mapping[str, nn.Module], spec: PartitionSpec, path: str) -> Iterator[tuple[nn.Module, str, Any]]:
    """What to put into modules, all by their paths: of each the module, an attribute's name, and the value.

    Each is to be put there before the next is asked for. The casts around the module at ``path`` are left to who calls it.
    """
    for module in modules.values():
        if isinstance(module, SyncBatchNorm):
            yield module, MESH, spec.bound_mesh
    for at, p in spec.places.items():
        if p.precision and casts(p.precision) and at in modules and at != path:
            yield modules[at], "forward", cast_around(modules[at].forward, p.precision)
