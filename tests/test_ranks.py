"""The tests' own ranks: a pool does not fill up, and a script that fails says so at once."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch.distributed as dist
from depth import at_most, depth
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


def process_and_word(rank: int, word: str, seconds: float) -> tuple[int, str]:
    time.sleep(seconds)
    return os.getpid(), word


@at_most(1)
@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, "no answer"])
def test_a_pool_that_met_a_timeout_is_thrown_away(
    gloo2: Pool, monkeypatch: pytest.MonkeyPatch, ends_by: type[BaseException] | str
) -> None:
    """By the test's own timeout, which is raised while it waits, or by a rank's: the next test is not answered in its place."""
    before = gloo2.run(process_and_word, "before", 0)
    with monkeypatch.context() as patched:
        if isinstance(ends_by, str):
            patched.setattr(ranks, "TIMEOUT", 0.1)
        else:
            patched.setattr(ranks, "wait", mock.Mock(side_effect=ends_by("interrupted")))
        with pytest.raises((KeyboardInterrupt, AssertionError), match=r"no answer|interrupted"):
            gloo2.run(process_and_word, "late", 1.0)
    after = gloo2.run(process_and_word, "after", 0)
    assert [word for _, word in after] == ["after"] * 2
    assert {process for process, _ in after}.isdisjoint(process for process, _ in before)


@pytest.mark.parametrize("word", ["right", "wrong"])
def test_a_real_ranks_test_runs_on_each_rank_and_fails_with_it(gloo2: Pool, word: str) -> None:
    """What it is parametrized by arrives by name, and an assertion of one rank is the test's."""
    with contextlib.nullcontext() if word == "right" else pytest.raises(AssertionError, match=r"rank 1(?s:.)*not on this one"):
        on_both(gloo2=gloo2, word=word)


@ranks.real_ranks(2)
def on_both(rank: int, word: str) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    assert rank == 0 or word == "right", "not on this one"


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
