"""A process group that is the worst case of NCCL's streams: nothing happens when a collective is issued.

Its outputs are filled with NaN then (all bits set, whatever the dtype), and only its wait reads the inputs and writes the
outputs, over gloo. So what is read too early is NaN, and these raise `Misuse`, which names the op and the unit, on every rank:

- an input or an output that was written between issue and wait;
- ranks that issue collectives, or wait for them, in different orders;
- a collective that nobody has waited for, at the end of `watched`.

`register` makes it the backend "worst", which torch.distributed, DeviceMesh and the functional collectives find by name; the
wait of these finds the `Work` that torch has registered for its tensor's storage. Values go into and out of tensors by
address: no version is counted, and no mode or transform sees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

import funshard
from funshard._wire.chain import wait_unclaimed

TIMEOUT = timedelta(seconds=30)
HEADER = 512
"""Bytes in which ranks tell each other what they are about to do."""


class Misuse(Exception):
    """What would be wrong on NCCL, or could be."""


@dataclass
class _Log:
    """Of this process: what was issued and found, and where the result of the last wait is, with its unit.

    Collectives are counted over all groups of the same ranks.
    """

    issued: Counter[tuple[int, ...]] = field(default_factory=Counter)
    waited: Counter[tuple[int, ...]] = field(default_factory=Counter)
    open: list[_Late] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    last: tuple[set[int], str] = field(default_factory=lambda: (set(), ""))

    @property
    def faults(self) -> list[str]:
        return self.found or [f"{late.what}: nobody has waited for it" for late in self.open]


_log = _Log()
Results = Callable[[list[list[bytes]]], list[bytes]]
"""From every rank's inputs to this rank's outputs."""
PACKAGE = Path(funshard.__file__).parent
STARTERS = ("unshard", "reduce_split", "_reduce_bucket", "unshard_unit", "reduce_unit")
"""The functions of funshard that start a unit's collectives. No other frame is asked for its locals, which would hold them."""


@contextlib.contextmanager
def watched() -> Generator[_Log]:
    """Raises Misuse for what was found inside, also where the error was caught, and for what nobody has waited for."""
    global _log
    outer, _log = _log, _Log()
    try:
        yield _log
        wait_unclaimed()  # as the next call would, what one that ended in an error has left
        if _log.faults:
            raise Misuse("\n".join(_log.faults))
    finally:
        for late in _log.open:
            late.done = True  # whoever waits for it from here on need not
        _log = outer


class _Bytes(NamedTuple):
    """Some of a tensor's memory."""

    of: Tensor
    at: int
    count: int

    def read(self) -> bytes:
        return ctypes.string_at(self.at, self.count)

    def write(self, value: bytes) -> None:
        assert len(value) == self.count
        ctypes.memmove(self.at, value, self.count)

    def overlaps(self, other: _Bytes) -> bool:
        return self.at < other.at + other.count and other.at < self.at + self.count


def _whole(x: Tensor) -> _Bytes:
    dense = not x.numel() or x.numel() == 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    assert dense, f"expected a tensor without holes, got strides {x.stride()} of {list(x.shape)}"
    return _Bytes(x, x.data_ptr(), x.nbytes)


def _cut(x: Tensor, rows: Sequence[int]) -> list[_Bytes]:
    """The memory of so many rows for each rank."""
    whole = _whole(x)
    row = whole.count // len(x) if len(x) else 0
    ends = list(itertools.accumulate(rows))
    return [_Bytes(x, whole.at + (end - n) * row, n * row) for n, end in zip(rows, ends, strict=True)]


class _Late(Work):
    """A collective that was issued: its tensors, what was in them then, and what its wait does."""

    def __init__(self, group: Worst, op: str, inputs: Sequence[_Bytes], outputs: Sequence[_Bytes], results: Results) -> None:
        super().__init__()
        self.group, self.inputs, self.outputs, self.results = group, inputs, outputs, results
        self.log, self.done = _log, False
        self.sent = [x.read() for x in inputs]
        self.log.issued[group.members] += 1
        addresses, unit = self.log.last
        self.unit = _unit() or (unit if any(x.at in addresses for x in inputs) else "")  # a chain goes on
        self.order = f"{op}, issued as number {self.log.issued[group.members]} of group {group.group_name}"
        self.what = f"unit '{self.unit}': {self.order}"
        for x in outputs:
            x.write(b"\xff" * x.count)
        self.log.open.append(self)  # on which C++ alone has no hold in torch 2.13

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.done:
            return True
        if self.log.found:  # ranks are not in step any more
            raise Misuse(f"{self.what}: after {self.log.found[0]}")
        self.done = True
        self.log.open.remove(self)
        self.log.waited[self.group.members] += 1
        try:
            self._run()
        except Exception as error:
            self.log.found.append(str(error))
            raise
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What DistributedDataParallel asks for, beside which some tests are: it is not made to wait."""
        self.wait()
        future = torch.futures.Future()
        future.set_result([x.of for x in self.outputs])
        return future

    def _fault(self) -> str:
        """What has happened to the tensors meanwhile."""
        in_place = [any(x.overlaps(out) for out in self.outputs) for x in self.inputs]
        if any(x.read() != sent for x, sent, own in zip(self.inputs, self.sent, in_place, strict=True) if not own):
            return f"{self.what}: an input was written between issue and wait"
        if any(x.read() != b"\xff" * x.count for x in self.outputs):
            return f"{self.what}: an output was written between issue and wait"
        return ""

    def _run(self) -> None:
        counts = " ".join(str(len(some)) for some in self.sent)
        order = f"{self.order}, waited for as number {self.log.waited[self.group.members]}"
        told = [text.split("\n") for text in self.group.tell(f"{self._fault()}\n{order}\n{self.unit}\n{counts}")]
        if faults := [fault for fault, *_ in told if fault]:
            raise Misuse("; ".join(dict.fromkeys(faults)))
        if len({order for _, order, *_ in told}) > 1:
            each = "; ".join(f"rank {i}: unit '{unit}': {order}" for i, (_, order, unit, _) in enumerate(told))
            raise Misuse(f"ranks issue or wait in different orders: {each}")
        lengths = [[int(n) for n in counts.split()] for *_, counts in told]
        longest = max(sum(some) for some in lengths)
        rows = self.group.exchange(b"".join(self.sent).ljust(longest, b"\0"))
        every: list[list[bytes]] = []
        for row, some in zip(rows, lengths, strict=True):
            ends = list(itertools.accumulate(some))
            every.append([row[end - n : end] for n, end in zip(some, ends, strict=True)])
        for x, value in zip(self.outputs, self.results(every), strict=True):
            x.write(value)
        self.log.last = {x.at for x in self.outputs}, self.unit


def _reduced(rows: Sequence[bytes], dtype: torch.dtype, op: Any) -> bytes:
    if not rows[0]:
        return b""
    with plainly():
        x = torch.stack([torch.frombuffer(bytearray(row), dtype=dtype) for row in rows])
        ways = {
            dist.ReduceOp.SUM: lambda: x.sum(0, dtype=dtype),
            dist.ReduceOp.AVG: lambda: x.sum(0, dtype=dtype) / len(x),
            dist.ReduceOp.MAX: lambda: x.amax(0),
            dist.ReduceOp.MIN: lambda: x.amin(0),
        }
        return _whole(next(way for kind, way in ways.items() if op == kind)()).read()


class plainly:
    """Outside of all modes. A class: mirror.py enters it thousands of times, and a generator takes longer."""

    def __enter__(self) -> None:
        self.modes = [_disable_current_modes(), torch.inference_mode(False), torch.no_grad()]
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *args: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*args)


def _named(op: str, x: Tensor) -> str:
    return f"{op} {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class Worst(dist.ProcessGroup):
    """The process group."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, TIMEOUT)
        self._rank, self._size, self._name, self._desc = rank, size, "", ""

    # --- what torch asks of a group ---

    def getBackendName(self) -> str:
        return "worst"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> Worst:
        return self

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def shutdown(self) -> None:
        pass

    @functools.cached_property
    def members(self) -> tuple[int, ...]:
        """Its ranks in the world."""
        return tuple(dist.get_process_group_ranks(self))

    # --- what its collectives are made of ---

    def exchange(self, mine: bytes) -> list[bytes]:
        """What each rank gives, which is equally long."""
        if not mine:
            return [b""] * self._size
        with plainly():
            x = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            rows = [torch.empty_like(x) for _ in range(self._size)]
            self._inner.allgather([rows], [x]).wait()
            return [_whole(row).read() for row in rows]

    def tell(self, mine: str) -> list[str]:
        """What each rank says."""
        assert len(mine) <= HEADER, mine
        return [row.decode().rstrip(" ") for row in self.exchange(mine.encode().ljust(HEADER))]

    # --- the collectives ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Late:
        (x,), op = tensors, opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return _Late(
            self,
            _named("all_reduce", x),
            [_whole(x)],
            [_whole(x)],
            lambda every: [_reduced([sent for (sent,) in every], x.dtype, op)],
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Late:
        (x,), root = tensors, opts.rootRank
        return _Late(self, _named("broadcast", x), [_whole(x)], [_whole(x)], lambda every: every[root])

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Late:
        joined: Results = lambda every: [b"".join(sent for (sent,) in every)]  # noqa: E731
        return _Late(self, _named("all_gather", x), [_whole(x)], [_whole(out)], joined)

    def all_gather_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> _Late:
        (out,), (x,) = outs, xs
        return self.all_gather_single(out, x)

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any = None) -> _Late:
        (some,), (x,) = outs, xs
        each: Results = lambda every: [sent for (sent,) in every]  # noqa: E731
        return _Late(self, _named("all_gather to a list", x), [_whole(x)], [_whole(out) for out in some], each)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> _Late:
        op = opts.reduceOp
        return _Late(
            self,
            _named("reduce_scatter", x),
            _cut(x, [len(x) // self._size] * self._size),
            [_whole(out)],
            lambda every: [_reduced([sent[self._rank] for sent in every], x.dtype, op)],
        )

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any) -> _Late:
        (out,), (x,) = outs, xs
        return self.reduce_scatter_single(out, x, opts)

    def all_to_all_single(self, out: Tensor, x: Tensor, out_rows: list[int], rows: list[int], opts: Any = None) -> _Late:
        return _Late(
            self,
            f"all_to_all of rows {x.dtype}{list(x.shape[1:])}" if rows else _named("all_to_all", x),
            _cut(x, rows or [len(x) // self._size] * self._size),
            [_whole(out)],
            lambda every: [b"".join(sent[self._rank] for sent in every)],
        )

    def gather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any) -> _Late:
        (x,), here = xs, opts.rootRank == self._rank
        each: Results = lambda every: [sent for (sent,) in every] if here else []  # noqa: E731
        return _Late(self, _named("gather", x), [_whole(x)], [_whole(out) for out in outs[0]] if here else [], each)

    def scatter(self, outs: list[Tensor], xs: list[list[Tensor]], opts: Any) -> _Late:
        (out,), root = outs, opts.rootRank
        inputs = [_whole(x) for x in xs[0]] if root == self._rank else []
        return _Late(self, _named("scatter", out), inputs, [_whole(out)], lambda every: [every[root][self._rank]])

    def barrier(self, opts: Any = None) -> _Late:
        return _Late(self, "barrier", [], [], lambda every: [])

    # as torch 2.11 and 2.13 call them
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _unit() -> str:
    """The unit of the innermost such function that runs: by its ``unit``, ``key`` or ``bucket``, its own or its object's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in STARTERS and Path(code.co_filename).is_relative_to(PACKAGE):
            names = frame.f_locals
            unit = names.get("unit") or getattr(names.get("self"), "unit", None)
            if unit is not None:
                return unit.key
            if "bucket" in names:
                return ", ".join(names["bucket"].keys)
            if "key" in names:
                return names["key"]
        frame = frame.f_back
    return ""


def register() -> None:
    """Make it the backend "worst" of this process."""
    if "WORST" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("worst", lambda store, rank, size, timeout: Worst(store, rank, size), devices=["cpu"])
    collect_in_python()


@functools.cache
def collect_in_python() -> torch.library.Library:
    """Ask groups of Python for the one collective that torch before 2.14 does not ask them for. Of no other groups."""

    def allgather_base(out: Tensor, x: Tensor, group: Any, asynchronous: bool = True, timeout: int = -1) -> tuple[Tensor, Any]:
        return out, dist.ProcessGroup.unbox(group).all_gather_single(out, x).boxed()

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is overridden
        library.impl("_allgather_base_", allgather_base, "CPU")
    return library
