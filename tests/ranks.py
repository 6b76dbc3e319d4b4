"""Real ranks for tests: gloo processes, started once for a test run and asked to run functions.

A function given to `Pool.run` is a module-level ``fn(rank, *args)`` of a test module; it runs on every rank with the
default process group of that size, and its results come back in rank order. A rank that raises, or does not answer in
time (a diverged rank hangs), fails the test with every rank's traceback and the pool starts anew.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120


def _serve(rank: int, size: int, port: int, path: list[str], pipe: Connection) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)  # as in pyproject.toml
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    try:
        while (task := pipe.recv()) is not None:
            fn, args = task
            try:
                torch.manual_seed(0)
                pipe.send((True, fn(rank, *args)))
            except BaseException:  # every failure goes to the parent
                pipe.send((False, traceback.format_exc()))
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        dist.destroy_process_group()


def _receive(pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process died"


class Pool:
    """``size`` gloo processes, started at the first `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[tuple[mp.process.BaseProcess, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``[fn(rank, *args) for rank in range(size)]``, at once."""
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send((fn, args))
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers) if rank not in results}
            ready = wait(list(waiting), timeout=TIMEOUT)
            failed = any(not ok for ok, _ in results.values())
            if not ready:
                break
            for pipe in ready:
                results[waiting[pipe]] = _receive(pipe)
            if failed:
                break
        errors = [f"--- rank {r} ---\n{text}" for r, (ok, text) in sorted(results.items()) if not ok]
        silent = [r for r in range(self.size) if r not in results]
        if errors or silent:
            self.stop()
            raise AssertionError("\n".join([*errors, *([f"no answer from ranks {silent}"] if silent else [])]))
        return [results[r][1] for r in range(self.size)]

    def _start(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = mp.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, sys.path, there), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self.workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(2)
            process.kill()
            process.join()
            pipe.close()
        self.workers = []
