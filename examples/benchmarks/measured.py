"""How a step is measured on real ranks: the most bytes it holds, its time in alternating rounds, and the ranks themselves."""

import argparse
import gc
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Step, free_port, quartiles
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile

Build = Callable[[nn.Module], Step]
Batch = tuple[Tensor, Tensor]


def peak_bytes(build: Build, make: Callable[[], nn.Module], batch: Batch) -> int:
    """The most bytes that tensors hold in a step, after one to warm up; what is at rest included."""
    return peaks_of_steps(build, make, batch, 1)[0]


def peaks_of_steps(build: Build, make: Callable[[], nn.Module], batch: Batch, steps: int) -> list[int]:
    """That of each of so many steps."""
    gc.collect()  # or what goes during the record, and was there before, is subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = build(make())
        step(*batch)
        for _ in range(steps):
            with torch.profiler.record_function("measured"):
                step(*batch)
    events = record.profiler.kineto_results.events()
    begins = sorted(event.start_ns() for event in events if event.name() == "measured")
    moments = held(record)
    return [max(b for at, b in moments if low <= at < high) for low, high in itertools.pairwise((*begins, math.inf))]


def peak_bytes_compiled(build: Build, make: Callable[[], nn.Module], batch: Batch) -> int:
    """The same, of a second step: the profiler miscounts while the first one compiles. What it leaves is found by gc."""
    before = live_bytes()
    step = build(make())
    step(*batch)
    at_rest = live_bytes() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(*batch)
    return at_rest + max(bytes_ for _, bytes_ in held(record))


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python knows of, after a collection of garbage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not isinstance(x, FakeTensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    whole = (getattr(x, "_local_tensor", x) for x in tensors)  # of a DTensor
    storages = [x.untyped_storage() for x in whole if x.device.type == "cpu" and torch._C._has_storage(x)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(record: profile) -> list[tuple[int, int]]:
    """When memory was allocated or released, and how many bytes more than at the start of the record are held then."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return list(zip((e.start_ns() for e in events), itertools.accumulate(e.nbytes() for e in events), strict=True))


def in_rounds(steps: Mapping[str, Step], batch: Batch, warmup: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each mode's steps, one a round, in an order drawn anew for each."""
    modes, order = list(steps), random.Random(0)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for round_ in range(warmup + rounds):
        order.shuffle(modes)
        for mode in modes:
            dist.barrier()
            start = time.perf_counter()
            steps[mode](*batch)
            dist.barrier()
            if round_ >= warmup:
                times[mode].append(time.perf_counter() - start)
    return times


def ratio(times: Mapping[str, list[float]], mode: str, base: str) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile of the ratios within rounds."""
    return quartiles([a / b for a, b in zip(times[mode], times[base], strict=True)])


def over(base: str, quarters: tuple[float, float, float]) -> dict[str, float]:
    """Such a ratio to a base, as figures."""
    low, middle, high = quarters
    return {f"over {base}": middle, f"over {base}, low": low, f"over {base}, high": high}


def on_ranks(measure: Callable[[int, argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """What ``measure(rank, args)`` gives on the first of ``args.ranks`` gloo ranks, each a process with one thread.

    Forked: nothing is imported again, and this process has used one thread, if it has computed at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        mp.start_processes(_rank, (measure, args, free_port(), str(out)), nprocs=args.ranks, start_method="fork")
        return json.loads(out.read_text())


def _rank(rank: int, measure: Callable[..., Any], args: argparse.Namespace, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(getattr(args, "threads", 1))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    try:
        result = measure(rank, args)
        if rank == 0:
            Path(out).write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()
