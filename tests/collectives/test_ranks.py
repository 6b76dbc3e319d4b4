"""The tests' own ranks: a pool does not fill up, and a script that fails says so at once."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch.distributed as dist
from depth import at_most, choose, covering, depth, each, mark_seldom, pairs, parse_slice, seldom, split
from hypothesis import given
from hypothesis import strategies as st
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


# --- what a run at default depth leaves out, and what it never does ---
TABLES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(lambda sizes: list(itertools.product(*map(range, sizes))))
"""Cases of whole tables."""


@given(TABLES, st.integers(1, 2), st.data())
def test_what_is_left_out_is_covered_by_what_runs(table: list[tuple[int, ...]], together: int, data: st.DataObject) -> None:
    """Also where some of the table's cases are not there."""
    table = data.draw(st.lists(st.sampled_from(table), min_size=1, unique=True))
    run = [table[i] for i in covering(table, together)]
    for case in table:
        for places in itertools.combinations(range(len(case)), together):
            assert any(all(other[i] == case[i] for i in places) for other in run), (case, places)


@pytest.fixture
def items(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """All cases of this file."""
    assert isinstance(request.node.parent, pytest.Module)
    return [item for item in request.node.parent.collect() if isinstance(item, pytest.Function)]


LETTERS, NUMBERS, TWINS = "abcd", [1, 2, 3], [(1, "x"), (1, "y"), (2, "y")]


@each(letter=LETTERS, number=NUMBERS)
@pytest.mark.parametrize(("n", "twin"), TWINS)
def test_each(letter: str, number: int, n: int, twin: str) -> None: ...


@pairs(letter=LETTERS, number=NUMBERS)
@pytest.mark.parametrize(("n", "twin"), TWINS)
def test_pairs(letter: str, number: int, n: int, twin: str) -> None: ...


def test_marks_choose_from_the_cases(items: list[pytest.Function]) -> None:
    """Of the two tests above, names that are parametrized together count as one."""
    chosen = split(items)[0]
    runs = {
        test: [item.callspec.params for item in chosen if item.originalname == test] for test in ("test_each", "test_pairs")
    }
    assert len(runs["test_each"]) == 4
    for some in runs.values():
        assert {case["letter"] for case in some} == {*LETTERS}
        assert {case["number"] for case in some} == {*NUMBERS}
        assert {(case["n"], case["twin"]) for case in some} == {*TWINS}
    seen = runs["test_pairs"]
    assert {(case["letter"], case["number"]) for case in seen} == {*itertools.product(LETTERS, NUMBERS)}
    assert {(case["letter"], (case["n"], case["twin"])) for case in seen} == {*itertools.product(LETTERS, TWINS)}
    assert 12 <= len(seen) < 36


@at_most(3)
@pytest.mark.parametrize("number", mark_seldom(range(12), *range(1, 12, 2)))
def test_at_most(number: int) -> None: ...


@seldom
def test_seldom() -> None: ...


@each
@pytest.mark.parametrize("letter", mark_seldom(LETTERS, "b", "c"))
@pytest.mark.parametrize("number", NUMBERS)
def test_some_letters(letter: str, number: int) -> None: ...


def test_what_runs_seldom_or_at_most_so_often(items: list[pytest.Function]) -> None:
    """Seldom only if it is asked for; of so many cases that run, which are spread, and all where there are no more.

    Each of the usual letters and each number is in a case without the other letters, which are left out.
    """
    (rare,) = (item for item in items if item.name == "test_seldom")
    assert rare in split(items)[1]
    assert split([rare]) == ([rare], [])
    some = [item for item in items if item.originalname == "test_at_most"]
    assert [item.callspec.params["number"] for item in split(some)[0]] == [1, 5, 9]
    assert split(some[1:4:2])[0] == some[1:4:2]
    items = [item for item in items if item.originalname == "test_some_letters"]
    assert len(items) == len(LETTERS) * len(NUMBERS)
    runs = [item.callspec.params for item in split(items)[0]]
    assert {case["letter"] for case in runs} == {"b", "c"}
    assert {case["number"] for case in runs} == {*NUMBERS}
    marked = [item for item in items if item.get_closest_marker("seldom")]
    assert {item.callspec.params["letter"] for item in split(marked)[0]} == {"a", "d"}


def test_slices_are_what_is_left_out(items: list[pytest.Function]) -> None:
    """Each case that does not run by default is in one of the slices, and nothing else is."""
    default, left_out = split(items)
    slices = [choose(items, (k, 3)) for k in range(3)]
    assert len(left_out) > 50
    assert sorted(item.name for chosen, _ in slices for item in chosen) == sorted(item.name for item in left_out)
    assert all(len(chosen) + len(others) == len(items) for chosen, others in slices)
    both, _ = choose(items, (1, 3), alone=False)
    assert {*both} == {*default, *slices[1][0]}


def test_slices_are_written_as_fractions() -> None:
    assert parse_slice("3/10") == (3, 10)
    for text in ("10/10", "-1/10", "3", "a/b", "0/0"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected K/N with 0 <= K < N, got "):
            parse_slice(text)
