"""Process groups of torch.distributed: the default store, and a gloo backend outside of the registry."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.constants import default_pg_timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


if dist.is_available() and not dist.is_initialized():
    # The functions of this module take `group.WORLD` as it is at import for a default argument. Imported later, as Dynamo
    # does at the first use of torch.optim, they keep the default group and its threads alive past destroy_process_group,
    # and a process that ends then may abort. Pinned by ``test_a_late_import_keeps_the_default_group``.
    importlib.import_module("torch.distributed.nn.functional")


def default_store() -> Store:
    """Return the key-value store of the default process group. Pinned by ``test_default_store``."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def connect_store(prefix: str, timeout: timedelta) -> Store:
    """Return another connection to the default process group's store, with a prefix of keys and a timeout of waits.

    Another thread may use it. Pinned by ``test_connect_store``.
    """
    store = dist.PrefixStore(prefix, default_store().clone())  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    store.set_timeout(timeout)
    return store


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long a process group's collectives wait, by default torch's default. Pinned by ``test_group_timeout``."""
    backends = [group._get_backend(device) for device in group._device_types]  # pyright: ignore
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    return max([one._timeout for one in options if one is not None], default=default_pg_timeout)


def make_unregistered_gloo(prefix: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend that torch.distributed's registry of groups does not list, and connect it.

    ``prefix`` is that of its keys in the default group's store: equal on its ranks, and of no other group. The timeout is that
    of the connection and of every collective. Its stub lacks the collectives. Pinned by ``test_an_unregistered_gloo_backend``.
    """
    store = connect_store(prefix, timeout)  # by whose timeout gloo waits for the addresses of the others
    return dist.ProcessGroupGloo(store, rank, size, timeout)


# --- A process group of any size in one process, and tensors of shapes alone, for a step that is only to be counted ---


@contextlib.contextmanager
def fake_world(size: int) -> Generator[None]:
    """Run inside a process group of so many ranks that exist in name only, of which this process is the first.

    Raise RuntimeError if this process has a process group already. Pinned by ``test_a_world_in_name``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # half a second of imports

    if dist.is_initialized():
        raise RuntimeError(
            f"plan: this process has a process group of backend {dist.get_backend()!r}, and a step is planned on ranks in name "
            "only: expected none; plan before init_process_group, after destroy_process_group, or in another process"
        )
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def named_groups(sizes: Mapping[str, int], device: torch.device) -> Generator[dict[str, str]]:
    """Run with process groups of these sizes, for tensors on this device, of ranks in name only; yield their names.

    They need no process group of this process, and leave one alone. Pinned by ``test_groups_in_name``.
    """
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    world: Any = dist.distributed_c10d._world  # pyright: ignore
    groups: dict[str, Any] = {}  # the registry does not hold them
    for axis, size in sizes.items():
        groups[axis] = group = c10d.ProcessGroup(c10d.HashStore(), 0, size)
        backend = c10d.FakeProcessGroup._create_internal(0, size, c10d.FakeProcessGroup.Options())
        group._register_backend(device, c10d.ProcessGroup.BackendType.CUSTOM, backend)
        group.bound_device_id = torch.device(device.type, 0)
    names = {axis: f"planned {axis} {id(group)}" for axis, group in groups.items()}
    for axis, name in names.items():
        c10d._register_process_group(name, groups[axis])
        world.pg_map[groups[axis]] = "fake", None  # so that get_backend knows it
    try:
        yield names
    finally:
        for axis, name in names.items():
            c10d._unregister_process_group(name)
            del world.pg_map[groups[axis]]


real_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = unset_fake_temporarily
"""Return a context outside of the active mode of fake tensors. Pinned by ``test_a_world_in_name``."""


_TASKS = {"SLURM_NTASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""The variables in which launchers other than torchrun say how many processes they started."""


def warn_of_tasks() -> None:
    """Warn if a launcher started several processes and there is no process group."""
    for name, launcher in _TASKS.items():
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            warnings.warn(
                f"this process has no process group, and {name}={size}: if {launcher} started it as one of {size}, each trains "
                "alone; expected torch.distributed.init_process_group(rank=..., world_size=...) before this, or start it by "
                "torchrun; where one process is meant, .on({'shard': 1}) on the spec says so",
                stacklevel=2,
            )
