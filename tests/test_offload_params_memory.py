"""Units that rest on the host: what is alive on which device at each moment, and how each copy is issued.

There is no device here: "meta" stands for one, as in test_offload_memory.py. The process group is one in name.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import WAYS

from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P, _torch

WIDTH, RANKS = 64, 2
WHOLE = WIDTH * WIDTH * 8
"""Bytes of a unit: one parameter in float64, far more than an activation."""
SLICE = WHOLE // RANKS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Where(TorchDispatchMode):
    """Bytes of units and slices on the device and on the host, now and at most; every copy between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[str, dict[int, tuple[weakref.ref[Any], int]]] = {"meta": {}, "cpu": {}}
        self.peak = {"meta": 0, "cpu": 0}
        self.copies: list[tuple[str, bool]] = []

    def now(self, device: str) -> int:
        self.storages[device] = {key: one for key, one in self.storages[device].items() if one[0]() is not None}
        return sum(size for _, size in self.storages[device].values())

    def see(self, x: Tensor) -> None:
        if (storage := x.untyped_storage()).nbytes() >= SLICE:
            key = storage._cdata
            if key not in self.storages[x.device.type] or self.storages[x.device.type][key][0]() is None:
                self.storages[x.device.type][key] = weakref.ref(storage), storage.nbytes()
        for device in self.peak:
            self.peak[device] = max(self.peak[device], self.now(device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_" and args[0].device != args[1].device:
            self.copies.append((args[0].device.type, (*args, False)[2] is True or kwargs.get("non_blocking", False)))
            return args[0]
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.see(x)
        return out


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of two in name only, whose device is "meta"."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    monkeypatch.setattr(fs.collectives.Mesh, "device", torch.device("meta"))
    monkeypatch.setattr(_torch, "backend", lambda name, device: "nccl")
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    dist.destroy_process_group()


def step(blocks: int, p: P, way: str, prefetch: int = 1, some: int | None = None) -> tuple[Where, dict[str, int]]:
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    rest = P("shard", reshard=p.reshard)
    spec = fs.override(fs.by_type(Block, p=rest), fs.by_path({str(i): p for i in range(blocks if some is None else some)}))(model)
    spec = spec.bound
    shards = {
        key: torch.zeros(SLICE // 8, dtype=torch.float64, device="cpu" if spec.by_key[key].p.offload else "meta")
        for key in spec.by_key
    }
    x = torch.empty(4, WIDTH, dtype=torch.float64, device="meta")
    marks: dict[str, int] = {}
    with Where() as where:
        for shard in shards.values():
            where.see(shard)
        marks["rest device"], marks["rest host"] = where.now("meta"), where.now("cpu")

        def loss(params: fs.Params) -> Tensor:
            y = fs.functional_call(model, params, (x,), spec=spec, prefetch=prefetch).sum()
            marks["forward"], marks["between"] = where.peak["meta"], where.now("meta")
            where.peak["meta"] = where.now("meta")
            return y

        grads, _ = WAYS[way](loss)(shards)
        assert {key: g.device.type for key, g in grads.items()} == {key: x.device.type for key, x in shards.items()}
        marks["backward"], marks["end"], marks["host"] = where.peak["meta"], where.now("meta"), where.now("cpu")
    return where, marks


@pytest.mark.parametrize("way", ["fs", "torch.func", "backward"])
@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("blocks", [4, 8])
def test_the_device_holds_what_is_on_its_way(world: None, way: str, prefetch: int, blocks: int) -> None:
    marks = {}
    where, marks = step(blocks, P("shard", offload="params"), way, prefetch)
    print(way, prefetch, blocks, {k: v / SLICE for k, v in marks.items()}, where.copies)
    plain, m2 = step(blocks, P("shard"), way, prefetch)
    print("plain", {k: v / SLICE for k, v in m2.items()}, plain.copies)
    raise AssertionError
