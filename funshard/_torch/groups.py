"""What torch.distributed keeps about process groups: their store, and the group that a late import would keep alive."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["default_store"]

if dist.is_available() and not dist.is_initialized():
    # The functions of this module take `group.WORLD` as it is at import for a default argument. Imported later, as Dynamo
    # does at the first use of torch.optim, they keep the default group and its threads alive past destroy_process_group,
    # and a process that ends then may abort. Pinned by ``test_a_late_import_keeps_the_default_group``.
    importlib.import_module("torch.distributed.nn.functional")


def default_store() -> Store:
    """The key-value store over which the default process group was made. Pinned by ``test_default_store``."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
