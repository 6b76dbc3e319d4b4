"""Units that rest on the host: what is alive on which device at each moment, and how each copy is issued.

There is no device here: "meta" stands for one, as in test_offload_memory.py. The process group is one in name.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from collective_log import meta_world
from depth import at_most, each
from hosted import elsewhere
from offloaded import Told
from parity import WAYS
from test_memory import no_collector
from test_profiling import logged
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P, _torch
from funshard._core.ops import PendingResult
from funshard._torch import storage
from funshard._wire.chain import BufferPool
from funshard._wire.reductions import ReductionQueue

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
        if name == "all_gather_into_tensor_out":  # of which meta tensors make another result
            return kwargs["out"]
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.see(x)
        return out


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with meta_world(monkeypatch, RANKS), no_collector():
        yield


def step(blocks: int, p: P, way: str, prefetch: int = 1, some: int | None = None) -> tuple[Where, dict[str, int]]:
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    rest = P("shard", reshard=p.reshard)
    away = fs.by_path({str(i): p for i in range(blocks if some is None else some)})
    spec = fs.policies.override(fs.by_type(Block, p=rest), away)(model).bound
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


def in_slices(marks: dict[str, int]) -> dict[str, float]:
    return {name: size / SLICE for name, size in marks.items()}


@each
@pytest.mark.parametrize("way", ["fs", "torch.func", "backward"])
@pytest.mark.parametrize(("blocks", "prefetch"), [(8, 1), (12, 1), (12, 2)])
def test_the_device_holds_what_is_on_its_way(world: None, way: str, blocks: int, prefetch: int) -> None:
    """In slices, of which w make a unit, for n units, with p gathered ahead and f gradients under way:

    forward   device: (1 + p) * w + p, which are the slices that are being gathered      host: n
    between   device: w, the last unit
    backward  device: (1 + p) * w + p, (1 + f) * w gradients, 2 slices (of a reduction, and leaving)      host: 2 * n
    end       device: 0
    plain     device: n, forward n + (1 + p) * w, end 2 * n

    Every copy is one that the host does not wait for: to the device one for each gather, from it one for each unit.
    """
    w, n, p, f = RANKS, blocks, prefetch, 1
    where, marks = step(blocks, P("shard", offload="params"), way, prefetch)
    gathers = 2 * n - 2  # the last unit of forward stays, and nobody differentiates what the first one is given
    assert in_slices(marks) == {
        "rest device": 0,
        "rest host": n,
        "forward": (1 + p) * w + p,
        "between": w,
        "backward": (1 + p) * w + p + (1 + f) * w + 2,
        "end": 0,
        "host": 2 * n,
    }
    assert where.peak["cpu"] == 2 * n * SLICE
    assert sorted(where.copies) == [("cpu", True)] * n + [("meta", True)] * gathers
    first = where.copies.index(("cpu", True))
    assert first == n + p + 1  # the first leaves as the second is reduced, while others are gathered
    assert where.copies[first + 1] == ("meta", True)
    where, plain = step(blocks, P("shard"), way, prefetch)
    assert where.copies == []
    told = in_slices(plain)
    assert (told["rest device"], told["forward"], told["end"], told["host"]) == (n, n + (1 + p) * w, 2 * n, 0)
    assert told["backward"] - in_slices(marks)["backward"] >= 2 * n - 6 - p


@at_most(1)
@pytest.mark.parametrize("way", ["fs", "backward"])
def test_kept_and_recomputed_units_and_some_of_them(world: None, way: str) -> None:
    """A unit that is kept is copied once. Of n units, k on the host, n - k slices and gradients are on the device."""
    n, k, w = 8, 3, RANKS
    where, marks = step(n, P("shard", offload="params", reshard=False), way)
    assert sorted(where.copies) == [("cpu", True)] * n + [("meta", True)] * n
    assert (marks["between"], marks["end"]) == ((n - 1) * WHOLE, 0)
    where, marks = step(n, P("shard", offload="params", remat=True), way)
    assert sorted(where.copies) == [("cpu", True)] * n + [("meta", True)] * (2 * n - 1)
    assert (marks["between"], marks["end"], marks["host"]) == (WHOLE, 0, 2 * n * SLICE)
    where, marks = step(n, P("shard", offload="params"), way, some=k)
    assert sorted(where.copies) == [("cpu", True)] * k + [("meta", True)] * (2 * k - 1)
    assert in_slices(marks)["rest device"] == n - k
    assert in_slices(marks)["between"] == n - k + w
    assert (in_slices(marks)["end"], in_slices(marks)["host"]) == (2 * (n - k), 2 * k)


@pytest.mark.parametrize("collectives", [1, 2])
def test_a_gradient_that_was_handed_on_is_let_go(collectives: int) -> None:
    """Also where it has left early, with more than one collective before (HSDP): nothing holds it to the next unit's."""
    handed: list[weakref.ref[Any]] = []
    receiver = SimpleNamespace(
        expect=lambda key: None, receive=lambda key, grad: handed.append(weakref.ref(grad.untyped_storage()))
    )
    host, dtype = torch.device("cpu"), torch.float64
    dtypes = SimpleNamespace(reduce=dtype)
    route: Any = SimpleNamespace(device=host, padded_numel=4, shard_dtype=dtype, dtypes=dtypes, reduce_codec=None)
    steps: Any = SimpleNamespace(
        prepare=lambda grad: grad, reduce=[lambda x, own: PendingResult((), lambda: x.clone())] * (collectives + 1)
    )
    reductions = ReductionQueue(1, BufferPool(), cast("Any", receiver))
    reductions.begin_backward(0)
    with no_collector():
        for i in range(6):
            reductions.reduce_split(str(i), [torch.ones(4, dtype=dtype)], route, steps)
            assert len(handed) >= i - 1
            assert not any(one() is not None for one in handed)
        assert all(torch.equal(g, torch.ones(4, dtype=dtype)) for g in reductions.wait_all().values())


# --- what waits for what ---


class Stream:
    """A stream that is a name: what is told to it, and to others to wait for it."""

    device = torch.device("cpu")

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.copies = log, name, 0

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.copies += 1
        self.log.append(f"copy {self.copies}")
        return f"{self.copies}"

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Telling(Block):
    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self.log, self.number = log, number

    def forward(self, x: Tensor) -> Tensor:
        return Told.apply(super().forward(x), self.log, self.number)


def test_copies_have_a_unit_to_run_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way in, each is issued one unit before it is waited for; on the way out the host waits once, at the end."""
    log: list[str] = []
    computes, ways = Stream(log, "compute"), {True: Stream(log, "in"), False: Stream(log, "out")}
    model, x = nn.Sequential(*[Telling(log, i) for i in range(4)]), torch.ones(2, WIDTH, dtype=torch.float64)
    with elsewhere():
        spec = fs.by_type(Telling, p=P("shard", offload="params"))(model).on({"shard": 1})
        shards = fs.shard(model, spec)
        grad = fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum())
        expected = grad(shards)
        log.clear()
        monkeypatch.setattr(storage, "is_accelerator", lambda device: True)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: computes)
        monkeypatch.setattr(storage, "_copy_stream", lambda device, towards: ways[towards])
        monkeypatch.setattr(_torch, "allocate_like", lambda like, device, **_: torch.empty_like(like))
        got = grad(shards)
    for key, g in got.items():
        assert torch.equal(g, expected[key])
    assert log == [
        *("copy 1", "compute waits for 1"),
        *("copy 2", "forward 0", "compute waits for 2"),
        *("copy 3", "forward 1", "compute waits for 3"),
        *("copy 4", "forward 2", "compute waits for 4"),
        *("forward 3", "backward 3"),  # which is there; the first block's weight is not asked for
        *("copy 5", "backward 2", "compute waits for 5"),
        *("copy 6", "backward 1", "compute waits for 6"),
        *("backward 0", "copy 7", "compute waits for 7"),  # out: of one rank the gradients are one bucket
        "the host waits for out",
    ]


class PinnedMemory:
    """It knows host memory that was asked for as pinned, which this machine cannot pin, by its storage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: dict[int, Any] = {}
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, functools.partial(self._allocate, getattr(torch, name)))
        monkeypatch.setattr(_torch, "is_pinned", self.holds)

    def _allocate(self, plain: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        out = plain(*args, **kwargs)
        if pin_memory:
            self.storages[out.untyped_storage()._cdata] = out.untyped_storage()
        return out

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self.storages


def test_the_host_memory_of_units_is_pinned(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, gradients, the optimizer's state and what an update makes: the host would wait for copies of other memory."""
    model, x = nn.Sequential(Block(), Block()), torch.empty(4, WIDTH, dtype=torch.float64, device="meta")
    spec = fs.by_type(Block, p=P("shard", offload="params"))(model).bound
    stream, pinned = Stream([], "any"), PinnedMemory(monkeypatch)
    monkeypatch.setattr(storage, "is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(storage, "is_fake", lambda tensor: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(storage, "_copy_stream", lambda device, towards: stream)
    shards = fs.shard(model, spec, rank=0)
    init, update = fs.optim.from_torch(torch.optim.AdamW, foreach=False)
    state = init(shards)
    with Where(), logged(logging.DEBUG) as said:
        grads = fs.grad(lambda params: fs.functional_call(model, params, (x,), spec=spec).sum())(shards)
        new, after = update(grads, state, shards)
    for tree in (shards, grads, new, *state.values(), *after.values()):
        for key, value in tree.items():
            assert value.device.type == "cpu"
            assert pinned.holds(value) or not value.dim(), key  # counts of steps are used where they are
    copies = [message for _, message in said if message.startswith("copy")]
    assert copies == [
        "copy to the device 0",
        "copy to the device 1",
        "copy gradient to the host 1",
        "copy gradient to the host 0",
    ]
