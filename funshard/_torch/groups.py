"""Process groups of torch.distributed: the default store, and a gloo backend outside of the registry."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["connect_store", "default_store", "group_timeout", "make_unregistered_gloo"]

if dist.is_available() and not dist.is_initialized():
    # The functions of this module take `group.WORLD` as it is at import for a default argument. Imported later, as Dynamo
    # does at the first use of torch.optim, they keep the default group and its threads alive past destroy_process_group,
    # and a process that ends then may abort. Pinned by ``test_a_late_import_keeps_the_default_group``.
    importlib.import_module("torch.distributed.nn.functional")


def default_store() -> Store:
    """Return the key-value store of the default process group. Pinned by ``test_default_store``."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def connect_store(prefix: str, timeout: timedelta) -> Store:
    """Return another connection to the default process group's store, which another thread may use.

    Pinned by ``test_connect_store``.

    Args:
        prefix: The prefix of its keys.
        timeout: The timeout of a wait for a key.
    """
    store = dist.PrefixStore(prefix, default_store().clone())  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    store.set_timeout(timeout)
    return store


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long a process group's collectives wait; torch's default where a backend does not say.

    Pinned by ``test_group_timeout``.
    """
    backends = [group._get_backend(device) for device in group._device_types]  # pyright: ignore
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    return max([one._timeout for one in options if one is not None], default=default_pg_timeout)


def make_unregistered_gloo(prefix: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend that torch.distributed's registry of groups does not list, and connect it.

    Its stub lacks the collectives. Pinned by ``test_an_unregistered_gloo_backend``.

    Args:
        prefix: The prefix of its keys in the default group's store: equal on its ranks, and of no other group.
        rank: This process's rank in the backend.
        size: The number of its ranks.
        timeout: The timeout of the connection and of every collective.
    """
    store = connect_store(prefix, timeout)  # by whose timeout gloo waits for the addresses of the others
    return dist.ProcessGroupGloo(store, rank, size, timeout)
