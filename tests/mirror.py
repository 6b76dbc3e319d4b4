"""Ranks that all do what this one does: a process group of any size in one process, fast enough for thousands of cases.

A gather gives this rank's slice again and again, a reduction what so many equal ranks give. So it is exactly a mesh whose
ranks have equal shards and equal batches; its schedule, notes and second gathers are those of any other group. Outputs are
NaN (all bits set) until they are waited for. What differs between ranks needs real ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from worst import collect_in_python, plainly

import funshard as fs
from funshard._wire.chain import wait_unclaimed
from funshard.collectives import Mesh, ProcessAxis


def mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of such ranks, whose first one is this process."""
    wait_unclaimed()  # what a case that failed has not waited for
    _open.clear()
    return Mesh(tuple((axis, ProcessAxis(size, 0, _group(size))) for axis, size in sizes.items()))


def _group(size: int) -> str:
    name = f"mirror of {size}"
    if name not in _groups():
        collect_in_python()
        _groups()[name] = Mirror(size)
        torch._C._distributed_c10d._register_process_group(name, _groups()[name])
        dist.distributed_c10d._world.pg_map[_groups()[name]] = ("fake", None)  # its ranks are no processes
    return name


def sent(size: int, run: Callable[[], object]) -> list[str]:
    """The gathers and reductions over an axis of so many ranks while this runs."""
    log = _groups()[_group(size)].sent
    start = len(log)
    run()
    return log[start:]


def gradients(model: nn.Module, policy: fs.Policy, x: Tensor, *axes: str) -> tuple[fs.Params, list[str]]:
    """Those of a sum of squares on two equal ranks along each axis, and what is sent for them."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # in Dynamo
    torch._dynamo.reset()
    spec = policy(model).on(mesh(dict.fromkeys(axes, 2)))
    params, grads = fs.shard(model, spec, rank=0), {}
    loss = lambda p: fs.functional_call(model, p, (x,), spec=spec).square().sum()  # noqa: E731
    return grads, sent(2, lambda: grads.update(fs.grad(loss)(params)))


def same_compiled(rank: int, model: nn.Module, policies: Sequence[fs.Policy], x: Tensor, *axes: str) -> None:
    """Both policies, of which one compiles, have the same gradients and send the same. On a rank of its own."""
    (grads, first), (compiled, second) = (gradients(model, policy, x, *axes) for policy in policies)
    assert first == second
    assert all(torch.allclose(compiled[key], g, rtol=1e-12, atol=1e-12) for key, g in grads.items())


@functools.cache
def _groups() -> dict[str, Mirror]:
    return {}


class _Done(Work):
    """A collective: its outputs are NaN until it is waited for."""

    def __init__(self, outs: Sequence[Tensor], results: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__()
        with plainly():
            self.pairs: list[tuple[Tensor, Tensor]] | None = [
                (out.detach(), result.clone()) for out, result in zip(outs, results(), strict=True)
            ]
            for out, _ in self.pairs:
                _bytes(out).fill_(255)
        _open.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        with plainly():
            for out, result in self.pairs or ():
                _bytes(out).copy_(_bytes(result))
        self.pairs = None
        _open.discard(self)
        return True


_open: set[_Done] = set()
"""On these C++ alone has no hold in torch 2.13."""


def _bytes(x: Tensor) -> Tensor:
    """Its memory, whose version is another one."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), x.storage_offset() * x.itemsize, (x.nbytes,))


class Mirror(dist.ProcessGroup):
    """The process group."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self._size = size
        self.sent: list[str] = []

    def getBackendName(self) -> str:
        return "mirror"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> Mirror:
        return self

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        return x * self._size if op == dist.ReduceOp.SUM else x

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return _Done(tensors, lambda: [self._reduced(x, op) for x in tensors])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Done:
        return _Done(tensors, lambda: tensors)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Done:
        self.sent.append(f"gather {x.numel()}")
        return _Done([out], lambda: [torch.cat([x] * self._size)])

    def all_gather_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> _Done:
        self.sent += [f"gather {x.numel()}" for x in xs]
        return _Done(outs, lambda: [torch.cat([x] * self._size) for x in xs])

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> _Done:
        self.sent.append(f"reduce {x.numel()}")
        return _Done([out], lambda: [self._reduced(x[: len(out)], opts.reduceOp)])

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any) -> _Done:
        self.sent += [f"reduce {x.numel()}" for x in xs]
        return _Done(outs, lambda: [self._reduced(x[: len(out)], opts.reduceOp) for out, x in zip(outs, xs, strict=True)])

    # as torch 2.11 and 2.13 call them
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
