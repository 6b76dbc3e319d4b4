"""Offloaded units on a device: what is alive where at each moment, and when each copy is issued and waited for.

There is no device here. "meta" stands for one: its tensors have storages to watch and no values (at a fake CUDA tensor
autograd ends the process on builds without CUDA, as InputMetadata asks for its stream). Copies from it to the host and back
are noted and not made. Where copies wait is seen on streams that are names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it in its first operator under a mode, and that import holds frames, and their tensors
from collective_log import meta_world
from depth import each
from offloaded import Told, everywhere
from parity import WAYS
from test_memory import no_collector
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P, _torch
from funshard._torch import storage
from funshard._transforms import offload as host_buffers

ROWS, WIDTH = 1 << 14, 8
BYTES = ROWS * WIDTH * 8
"""Of one activation: 1 MiB, which is what offload takes by itself."""
OF_BLOCK = 2
"""How many a block saves: its argument and the result of tanh."""


class Block(nn.Module):
    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1, dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Tailed(nn.Sequential):
    """With something that no block saves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Where(TorchDispatchMode):
    """How many activations are alive on the device and on the host, now and at most; every copy between the two."""

    def __init__(self, callers: Tensor) -> None:
        super().__init__()
        self.callers = callers.untyped_storage()._cdata
        self.storages: dict[str, dict[int, weakref.ref[Any]]] = {"meta": {}, "cpu": {}}
        self.peak = {"meta": 0, "cpu": 0}
        self.copies: list[tuple[str, bool]] = []

    def now(self, device: str) -> int:
        alive = {key: ref for key, ref in self.storages[device].items() if ref() is not None}
        self.storages[device] = alive
        return len(alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and len({x.device for x in args if isinstance(x, Tensor)}) > 1:
            self.copies.append((args[0].device.type, kwargs.get("non_blocking", False) or (*args, False, False)[2] is True))
            return args[0]
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()).nbytes() == BYTES and storage._cdata != self.callers:
                self.storages[x.device.type].setdefault(storage._cdata, weakref.ref(storage))
                if self.storages[x.device.type][storage._cdata]() is None:
                    self.storages[x.device.type][storage._cdata] = weakref.ref(storage)
        for device in self.peak:
            self.peak[device] = max(self.peak[device], self.now(device))
        return out


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with meta_world(monkeypatch), no_collector():
        yield


def step(blocks: int, way: str, p: P, mark: Callable[[], None] = lambda: None) -> Where:
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    spec = fs.by_type(Block, p=p)(model).bound
    params = fs.shard(model, spec, rank=0)
    x = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta")  # the caller's, and not counted
    with everywhere(1 << 20), Where(x) as where:

        def loss(params: fs.Params) -> Tensor:
            y = fs.functional_call(model, params, (x,), spec=spec).sum()
            where.turn = where.now("meta"), where.now("cpu"), dict(where.peak)
            where.peak["meta"] = where.now("meta")
            return y

        WAYS[way](loss)(params)
        where.end = where.now("meta"), where.now("cpu")
    return where


@each
@pytest.mark.parametrize("way", ["fs", "backward"])
@pytest.mark.parametrize("blocks", [4, 8])
def test_two_loads_are_on_the_device(world: None, way: str, blocks: int) -> None:
    """In activations, of n blocks of which each saves 2 (the first 1: its argument is the caller's):

    forward   device: 2 * 2 + 1, of the block before and of this one, and what it gives       host: 2 * n - 1
    between   device: 2, the last block's
    backward  device: 2 * 2 + 2, of this block and of the one that comes, and two gradients
    plain     device: 2 * n, of which one is no longer needed when forward ends
    """
    saved = OF_BLOCK * blocks - 1
    plain = step(blocks, way, P("shard"))
    assert (plain.turn, plain.end, plain.copies) == ((saved, 0, {"meta": saved + 1, "cpu": 0}), (0, 0), [])
    there = step(blocks, way, P("shard", offload="activations"))
    assert there.turn == (OF_BLOCK, saved, {"meta": 2 * OF_BLOCK + 1, "cpu": saved})
    assert there.peak == {"meta": 2 * OF_BLOCK + 2, "cpu": saved}
    assert there.end == (0, 0)
    assert there.copies == [("cpu", True)] * saved + [("meta", True)] * (saved - OF_BLOCK)  # the last load has not left


@each
@pytest.mark.parametrize("way", ["fs", "backward"])
@pytest.mark.parametrize("blocks", [4, 8])
def test_of_recomputed_units_the_arguments_leave(world: None, way: str, blocks: int) -> None:
    """In activations, of n blocks that keep 1, their argument (the first none), and save 2 when they run again:

    forward   device: 2 * 1 + 2, and what is computed with                                    host: n - 1
    between   device: 1
    backward  device: 2 * 1 + 2 + 1, with what the block saves that runs again, and a gradient
    plain     device: n - 1 between, n + 1 in backward
    """
    kept = blocks - 1
    plain = step(blocks, way, P("shard", remat=True))
    assert (plain.turn[0], plain.peak["meta"], plain.end) == (kept, kept + 2, (0, 0))
    there = step(blocks, way, P("shard", remat=True, offload="activations"))
    assert there.turn == (1, kept, {"meta": 4, "cpu": kept})
    assert there.peak == {"meta": 5, "cpu": kept}
    assert there.end == (0, 0)
    assert there.copies == [("cpu", True)] * kept + [("meta", True)] * (kept - 1)


def test_the_innermost_unit_decides(world: None) -> None:
    """The model's own P is for what no unit saves; a unit that does not say so keeps what it saves."""

    def saved(p: P, root: P) -> int:
        model = Tailed(*[Block() for _ in range(4)])
        spec = fs.by_path({"": root, "0": p, "1": p, "2": P("shard"), "3": P("shard")})(model).bound
        shards = {key: x.requires_grad_() for key, x in fs.shard(model, spec, rank=0).items()}
        x = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta")
        with everywhere(1 << 20) as copies, Where(x):
            y = fs.functional_call(model, shards, (x.detach(),), spec=spec)
            assert y.requires_grad
        return copies.out

    offloaded = P("shard", offload={"activations"})
    assert [saved(p, root) for root in (P("shard"), offloaded) for p in (P("shard"), offloaded)] == [0, 3, 1, 4]


# --- when copies wait ---


class Stream:
    """A stream that is a name: what is told to it, in order."""

    device = torch.device("cpu")

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"copy {sum(line.startswith('copy') for line in self.log)}"

    def __enter__(self) -> None:
        self.log.append(f"copy {sum(line.startswith('copy') for line in self.log) + 1} {self.name}")

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host tells an accelerator, of which the CPU plays the part."""
    log: list[str] = []
    computes = Stream(log, "compute")
    monkeypatch.setattr(storage, "is_accelerator", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: computes)
    monkeypatch.setattr(storage, "_copy_stream", lambda device, towards: Stream(log, "in"))
    monkeypatch.setattr(host_buffers._torch, "allocate_like", lambda like, device: torch.empty_like(like))
    return log


def test_a_copy_runs_beside_and_is_waited_for_once(log: list[str]) -> None:
    a, b = torch.ones(3), torch.zeros(3)
    copy = _torch.AsyncCopy(a, b)
    assert log == ["in waits for compute", "copy 1 in"]
    copy.wait()
    copy.wait()
    assert log[2:] == ["compute waits for copy 1"]
    del copy
    assert len(log) == 3
    _torch.AsyncCopy(a, b)  # nobody wants it: its memory may be used again after it
    assert log[3:] == ["in waits for compute", "copy 2 in", "compute waits for copy 2"]
    assert torch.equal(a, b)


def test_copies_have_a_block_to_run_beside(log: list[str]) -> None:
    """Each is waited for one block after it was issued: out when the next one ends, back when its own block's turn comes."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    block = lambda k: fs.offload(lambda x: Told.apply(Told.apply(x, log, k).exp(), log, k), at_least=0, host="cpu")  # noqa: E731
    y = x
    for k in range(4):
        y = block(k)(y)
    y.sum().backward()
    told = [line for line in log if "waits for compute" not in line]
    assert told == [
        *("forward 0", "copy 1 in", "forward 0"),
        *("forward 1", "copy 2 in", "forward 1", "compute waits for copy 1"),
        *("forward 2", "copy 3 in", "forward 2", "compute waits for copy 2"),
        *("forward 3", "copy 4 in", "forward 3", "compute waits for copy 3"),
        *("backward 3", "copy 5 in", "compute waits for copy 4", "backward 3"),  # as what it has read is let go
        *("backward 2", "copy 6 in", "compute waits for copy 5", "backward 2"),
        *("backward 1", "copy 7 in", "compute waits for copy 6", "backward 1"),
        *("backward 0", "compute waits for copy 7", "backward 0"),
    ]
    expected = torch.autograd.grad(x.exp().exp().exp().exp().sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


# --- PEER_TESTS.md 16 ---


def test_offload_wrapper(world: None) -> None:
    """Every tensor that autograd saves rests on the host: of a function by itself, all but the last load."""
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta")
    for load, there in ((1, 1), (1 << 40, 2 * 4 - 1)):  # each by itself, or all of it one load
        with Where(x) as where:
            y = fs.offload(model, load=load, host="cpu")(x).sum()
            assert (where.now("meta"), where.now("cpu")) == (there, 2 * 4 - 1)
            y.backward()
            del y
            assert (where.now("meta"), where.now("cpu")) == (0, 0)


def test_offload_of_remats(world: None) -> None:
    """Offload(ckpt(a) -> ckpt(b) -> ckpt(c)): what is between them goes, what is inside is made again (FEATURES.md I3)."""
    parts = [fs.remat(lambda x: x + x.sin().tanh()) for _ in range(4)]
    x = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    with Where(x) as where:
        y = fs.offload(lambda x: parts[3](parts[2](parts[1](parts[0](x)))), load=1, host="cpu")(x).sum()
        assert (where.now("meta"), where.now("cpu")) == (1, 3)
        y.backward()
        del y
        assert (where.now("meta"), where.now("cpu"), where.peak["cpu"]) == (1, 0, 3)  # x.grad
