"""R1 and R4: whatever people write in a forward is exact, or an error that says so, and nothing of the caller's is changed.

Pieces of fuzz_modules.py, put together at random, under each transform, beside the plain model (fuzz_cases.py). About a minute;
``pytest --thorough tests/test_fuzz.py`` runs 20,000. Every bug that was found is an example.
"""

from __future__ import annotations

import hypothesis
import pytest
from fuzz_cases import MEANS, PS, TRANSFORMS, Case, mirrored, on_real_ranks, on_simulated
from fuzz_modules import PIECES
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool

THOROUGH = settings().max_examples >= 2000
COUNT = 20_000 if THOROUGH else 800


@st.composite
def cases(draw: st.DrawFn, transforms: list[str], meshes: list[tuple[int, ...]], *, train: bool = True) -> Case:
    pieces = draw(st.lists(st.sampled_from(list(PIECES)), min_size=1, max_size=3))
    order = draw(st.one_of(st.just(()), st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=4).map(tuple)))
    return Case(
        tuple(pieces),
        tuple(draw(st.sampled_from(["", *PS])) for _ in pieces),
        draw(st.sampled_from(transforms)),
        order,
        draw(st.sampled_from(list(PS))),
        leaves=draw(st.booleans()),
        tie=draw(st.booleans()),
        train=train and draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        mesh=draw(st.sampled_from(meshes)),
    )


def accept(results: list[str]) -> None:
    """Exact, refused with a name, or nothing to compare with."""
    for result in results:
        hypothesis.event(result.split(":")[0] or "exact")
        assert not result or result.startswith(("refused: ", "no reference: ")), result


@settings(max_examples=COUNT)
@given(case=cases([t for t in TRANSFORMS if t != "penalty"], [(2,), (3,), (2, 2), (2, 1), (1,)]))
def test_equal_ranks(alone: Pool, case: Case) -> None:
    """In one process: a mesh whose ranks all do the same (mirror.py)."""
    accept(alone.run(mirrored, case))


@settings(max_examples=COUNT // 10)
@given(case=cases(list(TRANSFORMS), [(2,)]))
def test_real_ranks(gloo2: Pool, case: Case) -> None:
    """With batches of their own."""
    accept(gloo2.run(on_real_ranks, case))


def simulated(rank: int, case: Case) -> str:
    return on_simulated(case)


@settings(max_examples=COUNT // 10)
@given(case=cases(list(MEANS), [(2,), (3,), (2, 2)], train=False))
def test_simulated_ranks(alone: Pool, case: Case) -> None:
    """Without dropout, whose numbers are each simulated rank's own."""
    accept(alone.run(simulated, case))


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_can_be_compared(alone: Pool, name: str) -> None:
    """There is a reference for plain autograd of each: none of the cases above is empty for it."""
    result = alone.run(mirrored, Case((name,), ("shard",), "backward"))[0]
    assert not result.startswith("no reference"), result
