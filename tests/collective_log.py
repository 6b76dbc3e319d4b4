"""What a step sends: a record of every collective, also over worlds that exist in name only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from parity import WAYS, numbers
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import _torch

SHORT = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce_": "all_reduce",
}


class Sent(NamedTuple):
    """One collective: what, elements and bytes that each rank puts in, over how many ranks."""

    op: str
    numel: int
    bytes: int
    ranks: int


class Collectives(TorchDispatchMode):
    """Everything sent while the mode is on, in ``forward`` up to a call of `turn` and in ``backward`` after it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Sent] = []
        self.backward: list[Sent] = []
        self.now = self.forward

    def turn(self) -> None:
        self.now = self.backward

    @property
    def all(self) -> list[Sent]:
        return self.forward + self.backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            x = args[0]
            self.now.append(Sent(SHORT.get(name, name), x.numel(), x.numel() * x.itemsize, group.size()))
            if name == "all_to_all_single" and not x.numel() and dist.get_backend(group) == "fake":  # it alone refuses
                return x.new_empty(sum(args[1]), *x.shape[1:])
        elif func.namespace == "c10d" and not _compares(name, args):  # what torch.distributed's own functions send
            self.now.append(Sent(f"c10d.{name}", 0, 0, 0))
        return func(*args, **(kwargs or {}))


def _compares(name: str, args: Any) -> bool:
    """Whether it is the reduction by which real ranks compare what they have started: two numbers between hosts."""
    return name == "allreduce_" and [(x.dtype, x.numel()) for x in args[0]] == [(torch.int64, 2)]


@contextlib.contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of any size in which collectives return at once; what they return means nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def meta_world(monkeypatch: pytest.MonkeyPatch, size: int = 2) -> Iterator[None]:
    """Rank 0 of so many in name only, whose device is "meta"."""
    with world(size):
        monkeypatch.setattr(fs.collectives.Mesh, "device", torch.device("meta"))
        monkeypatch.setattr(_torch, "backend_name", lambda name, device: "nccl")
        yield


def gather(spec: fs.PartitionSpec, key: str) -> Sent:
    """The gather of one unit that is split over one axis."""
    unit = spec.by_key[key]
    n = spec.shard_numel(unit)
    return Sent("all_gather", n, n * unit.dtype.itemsize, spec.size(unit))


def scatter(spec: fs.PartitionSpec, key: str) -> Sent:
    """The reduce-scatter of that unit's gradient."""
    unit = spec.by_key[key]
    n = spec.padded_numel(unit)
    return Sent("reduce_scatter", n, n * unit.dtype.itemsize, spec.size(unit))


def reduce(spec: fs.PartitionSpec, key: str, ranks: int) -> Sent:
    """The all-reduce of what a rank has of that unit's gradient, over an axis that it is replicated on."""
    unit = spec.by_key[key]
    n = spec.shard_numel(unit)
    return Sent("all_reduce", n, n * unit.dtype.itemsize, ranks)


def step(model: nn.Module, spec: fs.PartitionSpec, way: str = "fs") -> Collectives:
    """What one step sends: forward and backward of the spec's trained units."""
    trained, frozen = fs.partition(fs.shard(model, spec), spec)
    x = numbers(0, 0).to(next(model.parameters()).dtype)
    sent = Collectives()

    def loss(params: dict[str, Tensor]) -> Tensor:
        y = fs.functional_call(model, fs.combine(params, frozen), (x,), spec=spec)
        sent.turn()
        return y.sum()

    with sent:
        WAYS[way](loss)(trained)
    return sent


def gathers(spec: fs.PartitionSpec, *keys: str) -> list[Sent]:
    return [gather(spec, key) for key in keys]


def scatters(spec: fs.PartitionSpec, *keys: str) -> list[Sent]:
    return [scatter(spec, key) for key in keys]
