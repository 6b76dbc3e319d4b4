"""Real ranks for tests: processes, started once for a test run and asked to run functions.

A test that is `real_ranks` is a ``fn(rank, ...)`` that every rank runs. A function given to `Pool.run` is a module-level
``fn(rank, *args)`` of a test module; it runs on every rank with the default process group of that size, and its results come
back in rank order. A rank that raises, or does not answer in time (a diverged rank hangs), fails the test with every rank's
traceback and the pool starts anew.

`launch` runs a script instead, as torchrun would. Processes are forked from one that has imported torch (warm.py) and has
no threads: they start in hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import multiprocessing as mp
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

TIMEOUT = 120
THREADS = 64
"""Of a rank, beyond which a pool starts anew: a process group that a task has made keeps three, which wake 100 times a
second until the process ends, and those of some hundred tasks keep a small machine busy. So `_shared_groups`."""

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["warm"])


_modules = 0


def freeze_imports() -> None:
    """Exempt what imports have made from garbage collection, if there are new ones: each full run would go through it."""
    global _modules
    if len(sys.modules) != _modules:
        _modules = len(sys.modules)
        gc.freeze()


def free_port() -> str:
    """One on the loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def _env(port: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}


def forked(target: Callable[..., None], *args: Any, daemon: bool = False) -> mp.process.BaseProcess:
    """A process that runs ``target(*args)``, started."""
    process = CONTEXT.Process(target=target, args=args, daemon=daemon)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # by which the first finds what to preload
        process.start()
    return process


def _serve(rank: int, size: int, backend: str, port: str, path: list[str], pipe: Connection) -> None:
    _die_with_parent()
    freeze_imports()  # of before the fork
    sys.path[:] = path
    import torch
    import torch.distributed as dist
    import worst

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script`")  # as in pyproject.toml
    warnings.filterwarnings("ignore", "Guards may run slower on Python", RuntimeWarning)
    torch.set_num_threads(1)
    os.environ.update(_env(port))
    watched = contextlib.nullcontext
    if backend == "worst":  # whose kernels would be those of every group of the process
        worst.register()
        watched = worst.watched
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    begin = _shared_groups()
    torch.manual_seed(0)  # what a task brings may import a module that makes a model
    try:
        while (task := pipe.recv()) is not None:
            fn, args = task
            begin()
            freeze_imports()
            try:
                torch.manual_seed(0)
                with watched():
                    result = fn(rank, *args)
                pipe.send((True, result, _crowded()))
            except BaseException:  # every failure goes to the parent
                pipe.send((False, traceback.format_exc(), True))
            torch.manual_seed(0)
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        dist.destroy_process_group()


def _shared_groups() -> Callable[[], None]:
    """Has a task's meshes take the groups of earlier tasks, each its own. To be called at a task's begin."""
    from torch.distributed import device_mesh

    make, made = device_mesh.new_group, defaultdict[str, list[Any]](list)
    taken: Counter[str] = Counter()

    def new_group(**options: Any) -> Any:
        key = str({name: value for name, value in options.items() if name != "group_desc"})
        taken[key] += 1
        if taken[key] > len(made[key]):
            made[key].append(make(**options))
        return made[key][taken[key] - 1]

    device_mesh.new_group = new_group
    return taken.clear


def _crowded() -> bool:
    tasks = Path("/proc/self/task")  # Linux: the threads of this process
    return tasks.exists() and len(list(tasks.iterdir())) > THREADS


def _signal(process: mp.process.BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)


def _die_with_parent() -> None:
    """Linux: killed where what has forked this process ends, also while this one is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _receive(pipe: Any) -> tuple[bool, Any, bool]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process died", True


def at_rank(spec: Any, rank: int) -> Any:
    """The spec on a mesh of the same sizes that knows its rank, of which no process is there."""
    from funshard._core.layout import rank_coords
    from funshard.collectives import ProcessAxis

    at = rank_coords(spec.bound_mesh, rank)
    return spec.on({name: ProcessAxis(size, i) for (name, size), i in zip(spec.bound_mesh.sizes, at, strict=True)})


class Pool:
    """``size`` processes, started at the first `run`, and anew after one that failed or made many process groups.

    Between runs they are stopped: the threads of process groups wake 100 times a second, also of those that nobody uses.
    Their backend is gloo or "worst" (worst.py), by which each task is `watched`.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.workers: list[tuple[mp.process.BaseProcess, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``[fn(rank, *args) for rank in range(size)]``, at once."""
        try:
            return self._run(fn, *args)
        except BaseException:  # a test's timeout among them: ranks that still work would answer what is asked next
            self.stop()
            raise

    def _run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.workers:
            self._start()
        for process, pipe in self.workers:
            _signal(process, signal.SIGCONT)
            pipe.send((fn, args))
        results: dict[int, tuple[bool, Any, bool]] = {}
        while len(results) < self.size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers) if rank not in results}
            ready = wait(list(waiting), timeout=TIMEOUT)
            failed = any(not ok for ok, *_ in results.values())
            if not ready:
                break
            for pipe in ready:
                results[waiting[pipe]] = _receive(pipe)
            if failed:
                break
        errors = [f"--- rank {r} ---\n{text}" for r, (ok, text, _) in sorted(results.items()) if not ok]
        if silent := [r for r in range(self.size) if r not in results]:
            errors.append(f"no answer from ranks {silent}")
        if errors:
            raise AssertionError("\n".join(errors))
        if any(crowded for *_, crowded in results.values()):
            self.stop()
        for process, _ in self.workers:
            _signal(process, signal.SIGSTOP)
        return [results[r][1] for r in range(self.size)]

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            here, there = CONTEXT.Pipe()
            process = forked(_serve, rank, self.size, self.backend, port, sys.path, there, daemon=True)
            there.close()
            self.workers.append((process, here))

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self.workers:
            _signal(process, signal.SIGCONT)
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(2)
            process.kill()
            process.join()
            pipe.close()
        self.workers = []


def mesh_of(*sizes: int, **named: int) -> DeviceMesh:
    """The mesh of all ranks on the CPU, of these sizes by name: the last of "replicate" and "shard" where none are given."""
    from torch.distributed import init_device_mesh

    named = named or dict(zip(("replicate", "shard")[-len(sizes) :], sizes, strict=True))
    return init_device_mesh("cpu", tuple(named.values()), mesh_dim_names=tuple(named))


def real_ranks(count: int | Callable[..., int], backend: str = "gloo") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test ``fn(rank, ...)`` is run by each of so many ranks, with what it is parametrized by and its fixtures, pickled.

    A function of some of these says 2 or 4 for each case.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(fn).parameters)[1:]
        asked = list(inspect.signature(count).parameters) if callable(count) else []
        pools = [f"{backend}{n}" for n in ((2, 4) if callable(count) else (count,))]

        @functools.wraps(fn)
        def test(*of_a_rank: Any, **given: Any) -> None:
            if of_a_rank:
                fn(*of_a_rank)
            else:
                ranks = count(*(given[name] for name in asked)) if callable(count) else count
                given[f"{backend}{ranks}"].run(test, *(given[name] for name in names))

        del test.__wrapped__
        test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in [*pools, *names]])
        return test

    return decorate


def _script(path: str, argv: list[str], env: dict[str, str], output: str) -> None:
    gc.freeze()
    import torch

    os.environ.update(env)
    torch.set_num_threads(1)
    with open(output, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def start(ranks: int, path: Path, argv: Sequence[str], output: str, **env: str) -> list[mp.process.BaseProcess]:
    """The processes of a script, which write to the file ``output``: one that is run plainly, or several as by torchrun."""
    port = free_port()

    def started(rank: int) -> mp.process.BaseProcess:
        own = env
        if ranks > 1:
            own = own | _env(port) | {"TORCHELASTIC_RUN_ID": "tests", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        return start_one(path, argv, output, **own)

    return [started(rank) for rank in range(ranks)]


def start_one(path: Path, argv: Sequence[str], output: str, **env: str) -> mp.process.BaseProcess:
    """The process of a script that has these variables beside those of this process."""
    own = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env}
    return forked(_script, str(path), list(argv), own, output)


def ended(processes: Sequence[mp.process.BaseProcess], seconds: float = TIMEOUT) -> list[int | None]:
    """Exit codes, once all have ended, or one with an error, whose others are not waited for; None of what was killed then."""
    running = {process.sentinel: process for process in processes}
    end = time.monotonic() + seconds
    while running and (over := wait(list(running), max(0, end - time.monotonic()))):
        if any(running.pop(sentinel).exitcode for sentinel in over):
            break  # the others would wait for it
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def launch(ranks: int, path: Path, *argv: str, **env: str) -> str:
    """What a script prints, all of its ranks together: run plainly on one, as by torchrun on more; ``env`` as for `start`.

    Raises AssertionError with all it said if a rank fails or takes longer than `TIMEOUT` seconds.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        codes = ended(start(ranks, path, argv, output.name, **env))
        said = output.read()
    assert codes == [0] * ranks, f"exit codes {codes} (None: still running)\n{said}"
    return said
