"""How much of each law, table and claim a run tests: a part of each by default, the whole with ``pytest --thorough``.

By default a law has fewer examples (`depth`, and the profiles of conftest.py), and a test that is marked
`pairs` or `each` runs fewer combinations of what it is parametrized by, the same ones every time:

    @pairs(ranks=[2, 3, 8], strategy=STRATEGIES, way=WAYS)  # each two values of two parameters are in one case together

A test of seconds whose law cheaper tests hold as well is marked `seldom`, and so are most values of a parameter whose cases
take seconds each (`mark_seldom`): they run by default only if they are asked for alone. Of a test that is marked
`at_most(n)`, n of the cases that are left run, spread over all of them.

The others are counted as deselected. They are chosen from what -k or the command line has left: a case that is asked for runs.
``pytest --slice K/N`` runs every N-th of the others, beginning with the K-th, and nothing else, ``--with-slice K/N`` beside
what runs by default: CI runs a tenth of them, which the commit chooses. Their laws have as many examples as by default, and
timeouts stay.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

PROFILE = "HYPOTHESIS_PROFILE"
"""The variable of the environment that holds the depth, so that real ranks have it too."""
T = TypeVar("T")
V = TypeVar("V")


def _name(value: Any) -> str | None:
    """What a case is called by, of dtypes, options and the like, which pytest would number."""
    text = str(value)
    named = value is None or isinstance(value, str | int | float) or callable(value)
    return None if named or " at 0x" in text else text


class Combinations:
    """A mark: ``@each``, or ``@each(strategy=STRATEGIES, way=WAYS)`` with what the test is parametrized by."""

    def __init__(self, mark: pytest.MarkDecorator | None) -> None:
        self.mark = mark

    def __call__(self, test: Any = None, /, **tables: Collection[Any]) -> Any:
        def decorate(test: Any) -> Any:
            for name, values in reversed(tables.items()):
                test = pytest.mark.parametrize(name, values, ids=_name)(test)
            return self.mark(test) if self.mark else test

        return decorate if test is None else decorate(test)


every = Combinations(None)
"""All combinations run."""
each = Combinations(pytest.mark.each)
"""Each value of each parameter is in some case."""
pairs = Combinations(pytest.mark.pairs)
"""Each two values of two parameters are in some case together."""
seldom = pytest.mark.seldom
"""Not by default: in one of CI's slices, with --thorough, or alone."""
at_most = pytest.mark.at_most
"""``at_most(n)``: n of its cases by default, spread over those that its other marks leave."""
TOGETHER = {"each": 1, "pairs": 2}


def thorough() -> bool:
    """Whether this run is one of ``pytest --thorough``."""
    return os.environ.get(PROFILE) == "thorough"


def depth(default: T, thoroughly: T) -> T:
    """The first by default, the second with ``pytest --thorough``."""
    return thoroughly if thorough() else default


def mark_seldom(values: Iterable[T], *usual: T) -> list[Any]:
    """Return the values of a parametrization, of which all but the ``usual`` ones are marked `seldom`."""
    return [value if value in usual else pytest.param(value, marks=seldom) for value in values]


def covering(cases: Sequence[Sequence[Hashable]], together: int) -> list[int]:
    """Which of the cases to run, so that any ``together`` values that are in one case are in one of these."""
    missing = [{*itertools.combinations(enumerate(case), min(together, len(case)))} for case in cases]
    chosen = []
    while any(missing):
        best = max(range(len(cases)), key=lambda i: len(missing[i]))  # the first of several
        covered = frozenset(missing[best])
        chosen.append(best)
        missing = [some - covered for some in missing]
    return sorted(chosen)


def some(cases: Iterable[tuple[Any, ...]], together: int = 2) -> list[tuple[Any, ...]]:
    """Of the cases that one test goes through: by default so many that any ``together`` values are in one of them."""
    every = list(cases)
    return every if thorough() else [every[i] for i in covering(every, together)]


def dealt(to: T, firsts: Iterable[T], seconds: Iterable[V]) -> list[V]:
    """What one of the ``firsts`` goes through: all of the ``seconds``, by default dealt out so that each is with some first."""
    return [second for first, second in some(itertools.product(firsts, seconds), 1) if first == to]


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that run by default, and the others."""
    rare = {item for item in items if item.get_closest_marker("seldom")}
    left_out = {*rare} if len(rare) < len(items) else set[pytest.Item]()
    tables: dict[tuple[str, str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item in left_out:
            continue
        for mark, together in TOGETHER.items():
            if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker(mark):
                tables[item.parent.nodeid, item.originalname, together].append(item)
    for (*_, together), cases in tables.items():
        chosen = covering([_values(case) for case in cases], together)
        left_out |= {*cases} - {cases[i] for i in chosen}
    limited: dict[tuple[str, str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item not in left_out and isinstance(item, pytest.Function) and (mark := item.get_closest_marker("at_most")):
            limited[item.parent.nodeid, item.originalname, mark.args[0]].append(item)
    for (*_, count), cases in limited.items():
        run = min(count, len(cases))
        left_out |= {*cases} - {cases[i * len(cases) // run] for i in range(run)}
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def choose(
    items: Sequence[pytest.Item], part: tuple[int, int] | None = None, *, alone: bool = True
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run, those of a slice if there is one, ``alone`` or with the default ones, and the others."""
    chosen, left_out = split(items)
    if part is None:
        return chosen, left_out
    k, n = part
    running = {*left_out[k::n], *(() if alone else chosen)}
    return [item for item in items if item in running], [item for item in items if item not in running]


def parse_slice(text: str) -> tuple[int, int]:
    """Return K and N of "K/N", where 0 <= K < N."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        raise argparse.ArgumentTypeError(f"expected K/N with 0 <= K < N, got {text}")
    return int(k), int(n)


def _values(case: pytest.Function) -> tuple[tuple[int, ...], ...]:
    """Which values each of its parametrizations, which may be of several names, has given it."""
    given = case.callspec.params
    tables = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [[name.strip() for name in table.split(",")] if isinstance(table, str) else [*table] for table in tables]
    known = {name for some in names for name in some}
    return tuple(tuple(id(given[name]) for name in some) for some in (*names, *([name] for name in given if name not in known)))
