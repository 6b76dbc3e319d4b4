"""A loop that saves at every step is killed at random moments and started again, so many times.

Each time one of the ranks, the first, or all are killed, interrupted or stopped, at some moment of a save or between two.
What has to hold each time: those that are left end by themselves, soon after the save's timeout; the last checkpoint loads,
as a whole, and is not older than the last one whose end was told; and the directory does not grow.
As a script, ``kill_loop.py FOLDER SEED``, it is one of the ranks.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import funshard as fs

TIMEOUT = 8.0
"""Seconds that a rank waits for another one."""
SLACK = 30.0
"""Seconds that a process may take to end after that, on a machine that is busy."""
WHO = ["one", "first", "all"]
HOW = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGSTOP]


def spec_of() -> tuple[nn.Module, fs.PartitionSpec]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    return model, fs.by_type(nn.Linear)(model)


def state_at(step: int, params: fs.Params) -> dict[str, Any]:
    """What is saved after so many steps: every number in it says which."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = fs.checkpoint.per_rank(torch.tensor([step, rank]))
    return {"params": {key: torch.full_like(shard, step) for key, shard in params.items()}, "step": step, "own": own}


def steps_in(saved: dict[str, Any]) -> set[int]:
    return {saved["step"], *(int(x) for shard in saved["params"].values() for x in shard.tolist())}


def loop(folder: Path, seed: str) -> None:
    """Steps until it is killed, each saved; what is begun and what is over is told line by line."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, order = dist.get_rank(), random.Random(seed)
    model, spec = spec_of()
    params = fs.shard(model, spec)
    found = [fs.checkpoint.latest(folder) if rank == 0 else None]
    dist.broadcast_object_list(found)
    first = 0
    if found[0]:
        saved = fs.checkpoint.load(found[0], spec, timeout=TIMEOUT)
        first = saved["step"]
        assert steps_in(saved) - {0} == {first}, steps_in(saved)  # zeros: padding
        assert saved["own"].tolist() == [first, rank]

    def tell(what: str, step: int) -> None:
        if rank == 0:
            os.write(1, f"{what} {step}\n".encode())

    for step in itertools.count(first + 1):
        tell("begun", step)
        state, asynchronous = state_at(step, params), order.random() < 0.5
        saving = fs.checkpoint.save(folder / f"{step}", state, spec, asynchronous=asynchronous, timeout=TIMEOUT)
        for shard in state["params"].values():
            shard.fill_(-1)  # as training does, which goes on in place
        if rank == 0:
            fs.checkpoint.clean(folder, keep=2)
        saving.wait()
        tell("over", step)


def last(said: str, what: str) -> int:
    return max((int(line.split()[1]) for line in said.splitlines() if line.startswith(f"{what} ")), default=0)


def kill(folder: Path, order: random.Random, seconds: float, ranks: int) -> tuple[str, int]:
    """Start the loop, end it, and look: ``(what was done, the last step)``. Raises AssertionError with all that was said."""
    from ranks import start

    who, how = order.choice(WHO), order.choice(HOW)
    with tempfile.NamedTemporaryFile("r") as output:

        def said() -> str:
            return Path(output.name).read_text()

        processes = start(ranks, Path(__file__), [str(folder), str(order.random())], output.name)
        try:
            wait_for(lambda: last(said(), "over") > 0 or any(p.exitcode is not None for p in processes), SLACK * 2, said)
            time.sleep(order.uniform(0, seconds))
            hit = processes if who == "all" else processes[:1] if who == "first" else [order.choice(processes[1:])]
            if who == "all" and how == signal.SIGSTOP:
                how = signal.SIGKILL
            for process in hit:
                os.kill(process.pid or 0, how)
            if how == signal.SIGSTOP:
                left = [p for p in processes if p not in hit]
                wait_for(lambda: all(p.exitcode is not None for p in left), 2 * TIMEOUT + SLACK, said)
                for process in hit:
                    process.kill()
            wait_for(lambda: all(p.exitcode is not None for p in processes), 2 * TIMEOUT + SLACK, said)
        finally:
            for process in processes:
                process.kill()
                process.join()
        text = said()
    found = fs.checkpoint.latest(folder)
    assert found is not None, text
    _, spec = spec_of()
    saved = {part: fs.checkpoint.load(found, spec, only=part) for part in ("params", "step")}
    assert steps_in(saved) == {saved["step"]} == {int(found.name)}, (steps_in(saved), found, text)
    assert last(text, "over") <= saved["step"] <= last(text, "begun"), (found, text)
    fs.checkpoint.clean(folder, keep=2)
    left = [name for name in os.listdir(folder) if os.listdir(folder / name)]  # perhaps also the empty one of a save's begin
    assert len(left) <= 2, (left, text)
    return f"{signal.Signals(how).name} {who}", saved["step"]


def wait_for(true: Any, seconds: float, said: Any) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"expected an end within {seconds:.0f} s\n{said()}"
        time.sleep(0.005)


def kills(number: int, folder: Path, seed: int, seconds: float = 0.5, ranks: int = 2) -> Counter[str]:
    """What was done how many times, at moments up to so many seconds after the first save."""
    order, before = random.Random(seed), 0
    done: Counter[str] = Counter()
    for _ in range(number):
        what, step = kill(folder, order, seconds, ranks)
        assert step > before, f"{what}: expected later checkpoints than {before}, got {step}"
        done[what], before = done[what] + 1, step
    return done


if __name__ == "__main__":
    loop(Path(sys.argv[1]), sys.argv[2])
