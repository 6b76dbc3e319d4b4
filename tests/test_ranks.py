"""The tests' own ranks: a pool does not fill up, and a script that fails says so at once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from depth import depth
from ranks import THREADS, TIMEOUT, Pool, launch


def groups(rank: int, count: int) -> tuple[int, int]:
    for _ in range(count):
        dist.new_group()
    return os.getpid(), len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells a process's threads")
def test_a_pool_that_made_many_groups_starts_anew(gloo2: Pool) -> None:
    few, again, many, after = (gloo2.run(groups, count) for count in (0, 0, depth(THREADS // 2, THREADS), 0))
    assert [process for process, _ in few] == [process for process, _ in again]
    assert all(threads > THREADS for _, threads in many)
    assert all(threads < THREADS / 2 for _, threads in after)
    assert {process for process, _ in after}.isdisjoint(process for process, _ in many)


def threads_of_the_first(rank: int) -> tuple[bool, int]:
    return "warm" in sys.modules, len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells a process's threads")
def test_what_ranks_are_forked_from_is_warm_and_has_no_threads(gloo2: Pool) -> None:
    assert gloo2.run(threads_of_the_first) == [(True, 1)] * 2


def test_a_script_that_fails_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    """Rank 0, which would go on, is ended; what each of them said is in the error."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "sys.stdout.write(f'rank {dist.get_rank()} of {os.environ[\"WORLD_SIZE\"]} {sys.argv[1:]}\\n')  # at one go\n"
        "sys.stdout.flush()\n"
        "dist.barrier()\n"
        "assert dist.get_rank() == 0, 'not this one'\n"
        f"time.sleep({TIMEOUT})\n"
    )
    start = time.monotonic()
    with pytest.raises(AssertionError, match="exit codes") as raised:
        launch(2, script, "--flag")
    assert time.monotonic() - start < TIMEOUT / 2
    for said in ("rank 0 of 2 ['--flag']", "rank 1 of 2", "not this one"):
        assert said in str(raised.value)
