"""The tests' own helpers: a rank's failure is its test's, a pool that met a timeout goes, what is left out is in a slice."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from unittest import mock

import pytest
import ranks
import torch.distributed as dist
from depth import at_most, choose, covering, each, mark_seldom, seldom, split
from hypothesis import given
from hypothesis import strategies as st
from ranks import Pool


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


LETTERS, NUMBERS = "abcd", [1, 2, 3]


@each(letter=LETTERS, number=NUMBERS)
def test_each(letter: str, number: int) -> None: ...


@at_most(3)
@pytest.mark.parametrize("number", mark_seldom(range(12), *range(1, 12, 2)))
def test_at_most(number: int) -> None: ...


@seldom
def test_seldom() -> None: ...


def test_slices_are_what_is_left_out(items: list[pytest.Function]) -> None:
    """Each case that does not run by default is in one of the slices, and nothing else is."""
    default, left_out = split(items)
    slices = [choose(items, (k, 3)) for k in range(3)]
    assert len(left_out) == len(items) - len(default) == 8 + 9 + 1 + 1
    assert sorted(item.name for chosen, _ in slices for item in chosen) == sorted(item.name for item in left_out)
    assert all(len(chosen) + len(others) == len(items) for chosen, others in slices)
    both, _ = choose(items, (1, 3), alone=False)
    assert {*both} == {*default, *slices[1][0]}
