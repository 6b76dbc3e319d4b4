"""A process group of any size in one process, and tensors of shapes alone, for a step that is only to be counted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .backward import current_graph_task
from .dispatch import OpOverload

__all__ = ["axis_group", "counted_flops", "fake_world", "is_in_backward", "is_no_operator", "real_tensors"]


@contextlib.contextmanager
def fake_world(size: int) -> Generator[None]:
    """Run inside a process group of so many ranks that exist in name only, of which this process is the first.

    Pinned by ``test_a_world_in_name``.

    Raises:
        RuntimeError: If this process has a process group already.
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


def axis_group(ranks: Sequence[int]) -> str:
    """Return the name of a new process group of these ranks. Pinned with `fake_world`."""
    group = dist.new_group([*ranks], backend="fake")
    assert isinstance(group, dist.ProcessGroup)
    return group.group_name


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context outside of the active mode of fake tensors. Pinned by ``test_a_world_in_name``."""
    return unset_fake_temporarily()


def is_in_backward() -> bool:
    """Return whether autograd runs a graph."""
    return current_graph_task() != -1


def counted_flops(op: OpOverload, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call of an operator that torch's counter knows, 0 for others. Pinned by ``test_flops``."""
    from torch.utils.flop_counter import flop_registry  # which training does not need

    count = flop_registry.get(op.overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count else 0


@functools.cache
def is_no_operator(op: OpOverload) -> bool:
    """Return whether an operator only marks a range of the profiler or the like."""
    return op.namespace in ("profiler", "prim")
