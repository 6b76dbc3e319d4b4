"""The ranks of a checkpoint: the process groups that it makes end with torch's, and its timeout covers every wait."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from depth import depth, seldom
from ranks import CONTEXT, forked, free_port, launch
from torch import nn

import funshard as fs
from funshard import checkpoint

GLOO = """
from pathlib import Path

def gloo_threads():
    return [name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())]
"""

SAVES = f"""
import sys
import threading
import torch
import torch.distributed as dist
import funshard as fs
from funshard.checkpoint import _save
{GLOO}
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
spec = fs.policies.whole()(model)
params = fs.shard(model, spec, src=0)
fs.checkpoint.save(sys.argv[1] + "/1", params, spec)
saving = fs.checkpoint.save(sys.argv[1] + "/2", params, spec, asynchronous=True)
saving.wait()
fs.checkpoint.load(sys.argv[1] + "/2", spec)
assert gloo_threads()
go, write = threading.Event(), _save.RangeWriter.write
_save.RangeWriter.write = lambda *args: go.wait() and write(*args)
saving = fs.checkpoint.save(sys.argv[1] + "/3", params, spec, asynchronous=True)
dist.destroy_process_group()
assert not gloo_threads(), gloo_threads()
go.set()
try:
    saving.wait()
except fs.checkpoint.CheckpointError as error:
    assert "call wait() of what save has returned before torch.distributed.destroy_process_group" in str(error), error
    print("ended")
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


@needs_proc
def test_its_process_groups_end_with_destroy_process_group(tmp_path: Path) -> None:
    """Threads that outlive it make ranks abort when the interpreter ends. A save that is not over then is an error."""
    script = tmp_path / "script.py"
    script.write_text(SAVES)
    assert launch(2, script, str(tmp_path)).count("ended") == 2


def stopped(rank: int, port: str, path: str, out: Any, where: str, which: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=100))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    spec = fs.policies.whole()(model)
    params = fs.shard(model, spec)
    if rank == which and where == "before":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == which:
        dist.ProcessGroupGloo = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        checkpoint.save(path, params, spec, timeout=2)
    except Exception as error:
        out.send((type(error).__name__, str(error), time.monotonic() - begin))
    dist.destroy_process_group()


@seldom
@pytest.mark.parametrize(("where", "which"), depth([("before", 0)], [("before", 1), ("before", 0), ("group", 1)]))
def test_a_stopped_rank_is_an_error_within_the_timeout(tmp_path: Path, where: str, which: int) -> None:
    """Not the training group's: before the first save, the rank that has the store, or while the process group is made."""
    port = free_port()
    reader, writer = CONTEXT.Pipe(duplex=False)
    ranks = [forked(stopped, rank, port, str(tmp_path / "1"), writer, where, which) for rank in range(2)]
    try:
        assert reader.poll(120), "it hangs"
        kind, text, seconds = reader.recv()
        assert kind == "CheckpointError"
        assert "one of the 2 ranks was lost, or did not answer in time" in text
        assert seconds < 40, "it waits for the training group's limit"
        ranks[1 - which].join(40)
        assert ranks[1 - which].exitcode == 0, "its end waits for the training group's limit"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert list(tmp_path.iterdir()) == []
