"""What rests on the host: what is alive on which device at each moment, and when each copy is issued and waited for.

There is no device here. "meta" stands for one: its tensors have storages to watch and no values (at a fake CUDA tensor
autograd ends the process on builds without CUDA, as InputMetadata asks for its stream). Copies from it to the host and back
are noted and not made. Where copies wait is seen on streams that are names. The process group is one in name.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # torch imports it in its first operator under a mode, and that import holds frames, and their tensors
from collective_log import meta_world
from depth import at_most, each
from hosted import elsewhere
from models import module_class
from offloaded import Stream, Told, Where, everywhere
from parity import WAYS, loss_of, shards_of
from test_memory import no_collector
from test_profiling import logged
from torch import Tensor, nn

import funshard as fs
from funshard import P, _torch
from funshard._core.ops import PendingResult
from funshard._torch import storage
from funshard._wire.chain import BufferPool
from funshard._wire.reductions import ReductionQueue


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with meta_world(monkeypatch), no_collector():
        yield


Block = module_class(
    "Block",
    lambda width, device="cpu": {"weight": nn.Parameter(torch.full((width, width), 0.1, dtype=torch.float64, device=device))},
    lambda self, x: x + torch.tanh(x @ self.weight),
)


# --- activations ---
ROWS, NARROW = 1 << 14, 8
ACTIVATION = ROWS * NARROW * 8
"""Bytes of one: 1 MiB, which is what offload takes by itself."""
OF_BLOCK = 2
"""How many a block saves: its argument and the result of tanh."""


class Tailed(nn.Sequential):
    """With something that no block saves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def narrow_blocks(blocks: int = 4, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(*[Block(NARROW, "meta") for _ in range(blocks)])


def of_rows() -> Tensor:
    return torch.empty(ROWS, NARROW, dtype=torch.float64, device="meta")


def step_of_activations(blocks: int, way: str, p: P) -> Where:
    model, x = narrow_blocks(blocks), of_rows()  # which is the caller's, and not counted
    spec = fs.by_type(Block, p=p)(model).bound
    params = fs.shard(model, spec, rank=0)
    with everywhere(1 << 20), Where(ACTIVATION, x) as where:

        def turn() -> None:
            where.turn = where.now("meta"), where.now("cpu"), dict(where.peak)
            where.peak["meta"] = where.now("meta")

        WAYS[way](loss_of(model, spec, x, of=torch.sum, then=turn))(params)
        where.end = where.now("meta"), where.now("cpu")
    return where


@each(blocks=[4, 8], way=["fs", "backward"])
def test_two_loads_are_on_the_device(world: None, way: str, blocks: int) -> None:
    """In activations, of n blocks of which each saves 2 (the first 1: its argument is the caller's):

    forward   device: 2 * 2 + 1, of the block before and of this one, and what it gives       host: 2 * n - 1
    between   device: 2, the last block's
    backward  device: 2 * 2 + 2, of this block and of the one that comes, and two gradients
    plain     device: 2 * n, of which one is no longer needed when forward ends
    """
    saved = OF_BLOCK * blocks - 1
    plain = step_of_activations(blocks, way, P("shard"))
    assert (plain.turn, plain.end, plain.copies) == ((saved, 0, {"meta": saved + 1, "cpu": 0}), (0, 0), [])
    there = step_of_activations(blocks, way, P("shard", offload="activations"))
    assert there.turn == (OF_BLOCK, saved, {"meta": 2 * OF_BLOCK + 1, "cpu": saved})
    assert there.peak == {"meta": 2 * OF_BLOCK + 2, "cpu": saved}
    assert there.end == (0, 0)
    assert there.copies == [("cpu", True)] * saved + [("meta", True)] * (saved - OF_BLOCK)  # the last load has not left


@each(blocks=[4, 8], way=["fs", "backward"])
def test_of_recomputed_units_the_arguments_leave(world: None, way: str, blocks: int) -> None:
    """In activations, of n blocks that keep 1, their argument (the first none), and save 2 when they run again:

    forward   device: 2 * 1 + 2, and what is computed with                                    host: n - 1
    between   device: 1
    backward  device: 2 * 1 + 2 + 1, with what the block saves that runs again, and a gradient
    plain     device: n - 1 between, n + 1 in backward
    """
    kept = blocks - 1
    plain = step_of_activations(blocks, way, P("shard", remat=True))
    assert (plain.turn[0], plain.peak["meta"], plain.end) == (kept, kept + 2, (0, 0))
    there = step_of_activations(blocks, way, P("shard", remat=True, offload="activations"))
    assert there.turn == (1, kept, {"meta": 4, "cpu": kept})
    assert there.peak == {"meta": 5, "cpu": kept}
    assert there.end == (0, 0)
    assert there.copies == [("cpu", True)] * kept + [("meta", True)] * (kept - 1)


def test_the_innermost_unit_decides(world: None) -> None:
    """The model's own P is for what no unit saves; a unit that does not say so keeps what it saves."""

    def saved(p: P, root: P) -> int:
        model, x = narrow_blocks(kind=Tailed), of_rows()
        spec = fs.by_path({"": root, "0": p, "1": p, "2": P("shard"), "3": P("shard")})(model).bound
        shards = {key: x.requires_grad_() for key, x in fs.shard(model, spec, rank=0).items()}
        with everywhere(1 << 20) as copies, Where(ACTIVATION, x):
            y = fs.functional_call(model, shards, (x.detach(),), spec=spec)
            assert y.requires_grad
        return copies.out

    offloaded = P("shard", offload={"activations"})
    assert [saved(p, root) for root in (P("shard"), offloaded) for p in (P("shard"), offloaded)] == [0, 3, 1, 4]


def test_offload_wrapper(world: None) -> None:
    """Every tensor that autograd saves rests on the host: of a function by itself, all but the last load."""
    model, x = narrow_blocks(), of_rows()
    for load, there in ((1, 1), (1 << 40, 2 * 4 - 1)):  # each by itself, or all of it one load
        with Where(ACTIVATION, x) as where:
            y = fs.offload(model, load=load, host="cpu")(x).sum()
            assert (where.now("meta"), where.now("cpu")) == (there, 2 * 4 - 1)
            y.backward()
            del y
            assert (where.now("meta"), where.now("cpu")) == (0, 0)


# --- params ---
WIDTH, RANKS = 64, 2
WHOLE = WIDTH * WIDTH * 8
"""Bytes of a unit: one parameter in float64, far more than an activation."""
SLICE = WHOLE // RANKS


def step_of_params(blocks: int, p: P, way: str, prefetch: int = 1, some: int | None = None) -> tuple[Where, dict[str, float]]:
    """Where things were, and how many slices there were at each moment."""
    model = nn.Sequential(*[Block(WIDTH) for _ in range(blocks)])
    rest = P("shard", reshard=p.reshard)
    away = fs.by_path({str(i): p for i in range(blocks if some is None else some)})
    spec = fs.policies.override(fs.by_type(Block, p=rest), away)(model).bound
    shards = {
        key: torch.zeros(SLICE // 8, dtype=torch.float64, device="cpu" if spec.by_key[key].p.offload else "meta")
        for key in spec.by_key
    }
    x = torch.empty(4, WIDTH, dtype=torch.float64, device="meta")
    marks: dict[str, float] = {}
    with Where(SLICE) as where:
        for shard in shards.values():
            where.see(shard)
        marks["rest device"], marks["rest host"] = where.now("meta"), where.now("cpu")

        def turn() -> None:
            marks["forward"], marks["between"] = where.peak["meta"], where.now("meta")
            where.peak["meta"] = where.now("meta")

        grads, _ = WAYS[way](loss_of(model, spec, x, of=torch.sum, then=turn, prefetch=prefetch))(shards)
        assert {key: g.device.type for key, g in grads.items()} == {key: x.device.type for key, x in shards.items()}
        marks["backward"], marks["end"], marks["host"] = where.peak["meta"], where.now("meta"), where.now("cpu")
    return where, marks


@each(way=["fs", "torch.func", "backward"])
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
    where, marks = step_of_params(blocks, P("shard", offload="params"), way, prefetch)
    gathers = 2 * n - 2  # the last unit of forward stays, and nobody differentiates what the first one is given
    assert marks == {
        "rest device": 0,
        "rest host": n,
        "forward": (1 + p) * w + p,
        "between": w,
        "backward": (1 + p) * w + p + (1 + f) * w + 2,
        "end": 0,
        "host": 2 * n,
    }
    assert where.peak["cpu"] == 2 * n
    assert sorted(where.copies) == [("cpu", True)] * n + [("meta", True)] * gathers
    first = where.copies.index(("cpu", True))
    assert first == n + p + 1  # the first leaves as the second is reduced, while others are gathered
    assert where.copies[first + 1] == ("meta", True)
    where, plain = step_of_params(blocks, P("shard"), way, prefetch)
    assert where.copies == []
    assert (plain["rest device"], plain["forward"], plain["end"], plain["host"]) == (n, n + (1 + p) * w, 2 * n, 0)
    assert plain["backward"] - marks["backward"] >= 2 * n - 6 - p


@at_most(1)
@pytest.mark.parametrize("way", ["fs", "backward"])
def test_kept_and_recomputed_units_and_some_of_them(world: None, way: str) -> None:
    """A unit that is kept is copied once. Of n units, k on the host, n - k slices and gradients are on the device."""
    n, k, w = 8, 3, RANKS
    where, marks = step_of_params(n, P("shard", offload="params", reshard=False), way)
    assert sorted(where.copies) == [("cpu", True)] * n + [("meta", True)] * n
    assert (marks["between"], marks["end"]) == ((n - 1) * w, 0)
    where, marks = step_of_params(n, P("shard", offload="params", remat=True), way)
    assert sorted(where.copies) == [("cpu", True)] * n + [("meta", True)] * (2 * n - 1)
    assert (marks["between"], marks["end"], marks["host"]) == (w, 0, 2 * n)
    where, marks = step_of_params(n, P("shard", offload="params"), way, some=k)
    assert sorted(where.copies) == [("cpu", True)] * k + [("meta", True)] * (2 * k - 1)
    assert marks["rest device"] == n - k
    assert marks["between"] == n - k + w
    assert (marks["end"], marks["host"]) == (2 * (n - k), 2 * k)


@pytest.mark.parametrize("collectives", [1, 2])
def test_a_gradient_that_was_handed_on_is_let_go(collectives: int) -> None:
    """Also where it has left early, with more than one collective before (HSDP): nothing holds it to the next unit's."""
    handed: list[weakref.ref[Any]] = []
    receiver = SimpleNamespace(receive=lambda key, grad: handed.append(weakref.ref(grad.untyped_storage())))
    host, dtype = torch.device("cpu"), torch.float64
    dtypes = SimpleNamespace(reduce=dtype)
    route: Any = SimpleNamespace(device=host, padded_numel=4, shard_dtype=dtype, dtypes=dtypes, reduce_codec=None)
    reduce = [lambda x, own: PendingResult((), lambda: x.clone())] * (collectives + 1)
    steps: Any = SimpleNamespace(route=route, prepare=lambda grad: grad, reduce=reduce)
    reductions = ReductionQueue(1, BufferPool(), cast("Any", receiver))
    with no_collector():
        for i in range(6):
            reductions.reduce_split(str(i), [torch.ones(4, dtype=dtype)], steps)
            assert len(handed) >= i - 1
            assert not any(one() is not None for one in handed)
        assert all(torch.equal(g, torch.ones(4, dtype=dtype)) for g in reductions.wait_all().values())


# --- when copies wait ---
@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host tells an accelerator, of which the CPU plays the part."""
    log: list[str] = []
    copies = Stream(log, "in")
    play_accelerator(monkeypatch, Stream(log, "compute"), lambda device, towards: copies)
    return log


def play_accelerator(monkeypatch: pytest.MonkeyPatch, computes: Stream, copies: Callable[[Any, bool], Stream]) -> None:
    monkeypatch.setattr(storage, "is_accelerator", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: computes)
    monkeypatch.setattr(storage, "_copy_stream", copies)
    monkeypatch.setattr(_torch, "allocate_like", lambda like, device, **_: torch.empty_like(like))


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


def test_copies_of_activations_have_a_block_to_run_beside(log: list[str]) -> None:
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


class Telling(Block):
    def __init__(self, log: list[str], number: int) -> None:
        super().__init__(WIDTH)
        self.log, self.number = log, number

    def forward(self, x: Tensor) -> Tensor:
        return Told.apply(super().forward(x), self.log, self.number)


def test_copies_of_params_have_a_unit_to_run_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way in, each is issued one unit before it is waited for; on the way out the host waits once, at the end."""
    log: list[str] = []
    ways = {True: Stream(log, "in"), False: Stream(log, "out")}
    model, x = nn.Sequential(*[Telling(log, i) for i in range(4)]), torch.ones(2, WIDTH, dtype=torch.float64)
    with elsewhere():
        spec, shards = shards_of(fs.by_type(Telling, p=P("shard", offload="params")), model, {"shard": 1})
        grad = fs.grad(loss_of(model, spec, x, of=torch.sum))
        expected = grad(shards)
        log.clear()
        play_accelerator(monkeypatch, Stream(log, "compute"), lambda device, towards: ways[towards])
        got = grad(shards)
    for key, g in got.items():
        assert torch.equal(g, expected[key])
    assert [line for line in log if "waits for compute" not in line] == [
        *("copy 1 in", "compute waits for copy 1"),
        *("copy 2 in", "forward 0", "compute waits for copy 2"),
        *("copy 3 in", "forward 1", "compute waits for copy 3"),
        *("copy 4 in", "forward 2", "compute waits for copy 4"),
        *("forward 3", "backward 3"),  # which is there; the first block's weight is not asked for
        *("copy 5 in", "backward 2", "compute waits for copy 5"),
        *("copy 6 in", "backward 1", "compute waits for copy 6"),
        *("backward 0", "copy 7 in", "compute waits for copy 7"),  # out: of one rank the gradients are one bucket
        "the host waits for out",
    ]


def test_the_host_memory_of_units_is_pinned(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, gradients, the optimizer's state and what an update makes: the host would wait for copies of other memory."""
    model, x = nn.Sequential(Block(WIDTH), Block(WIDTH)), torch.empty(4, WIDTH, dtype=torch.float64, device="meta")
    spec = fs.by_type(Block, p=P("shard", offload="params"))(model).bound
    stream, allocate_like, pinned = Stream([], "any"), _torch.allocate_like, dict[int, Any]()

    def allocate(plain: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        """It knows host memory that was asked for as pinned, which this machine cannot pin, by its storage."""
        storage = (out := plain(*args, **kwargs)).untyped_storage()
        pinned.update({storage._cdata: storage} if pin_memory else {})
        return out

    def is_pinned(x: Tensor) -> bool:
        return x.untyped_storage()._cdata in pinned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, functools.partial(allocate, getattr(torch, name)))
    monkeypatch.setattr(_torch, "is_pinned", is_pinned)
    play_accelerator(monkeypatch, stream, lambda device, towards: stream)
    monkeypatch.setattr(_torch, "allocate_like", allocate_like)
    monkeypatch.setattr(storage, "is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(storage, "is_fake", lambda tensor: False)
    shards = fs.shard(model, spec, rank=0)
    init, update = fs.optim.from_torch(torch.optim.AdamW, foreach=False)
    state = init(shards)
    with Where(SLICE), logged(logging.DEBUG) as said:
        grads = fs.grad(loss_of(model, spec, x, of=torch.sum))(shards)
        new, after = update(grads, state, shards)
    for tree in (shards, grads, new, *state.values(), *after.values()):
        for key, value in tree.items():
            assert value.device.type == "cpu"
            assert is_pinned(value) or not value.dim(), key  # counts of steps are used where they are
    copies = [message for _, message in said if message.startswith("copy")]
    assert copies == [*(f"copy to the device {i}" for i in (0, 1)), *(f"copy gradient to the host {i}" for i in (1, 0))]
