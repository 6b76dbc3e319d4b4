"""The table of what torch's trainers do and claim (claims.md) is complete, and what it names is there."""

from __future__ import annotations

from pathlib import Path

import claims
import pytest
from claims import Claim


def test_each_claim_is_shown() -> None:
    """By a test, a heading of the guide or a row of its tables, of which each exists."""
    table = claims.read_table()
    assert len(table) > 400
    assert [*claims.missing_places(table)] == []


def test_no_name_is_twice_in_a_section() -> None:
    table = claims.read_table()
    names = [(claim.section, name) for claim in table for name in claim.names]
    assert len(names) == len({*names})


@pytest.mark.skipif(not claims.has_pages(), reason="FEATURES.md and PEER_TESTS.md are not beside this checkout, in ../shared")
def test_each_row_of_the_pages_has_a_claim() -> None:
    """All that the two pages ask for is in the table."""
    assert len(claims.asked_features(claims.PAGES)) >= 168
    assert len([*claims.asked_tests(claims.PAGES)]) > 250
    assert [*claims.left_out(claims.read_table(), claims.PAGES)] == []


@pytest.mark.parametrize(
    "place",
    [
        "test_spec.py::test_s0_nothing",
        "test_nothing.py::test_s1_purity",
        "test_call.py::right",
        "ideas.md#nothing",
        "limits.md: no such words",
        "limits.md: norm by",
        "limits.md",
    ],
)
def test_a_place_that_does_not_exist_is_open(place: str) -> None:
    claim = Claim("4", ("test_x",), "what", (place,))
    assert [*claims.missing_places([claim])] == [f"test_x (what): {place} does not exist"]


def test_a_claim_without_a_place_is_open() -> None:
    assert [*claims.missing_places([Claim("", ("A1",), "what", ())])] == ["A1 (what): nothing shows it"]


def test_what_the_table_does_not_name_is_open(tmp_path: Path) -> None:
    """A row of features, and tests in tables and sentences, by the part of their names that says what they are."""
    (tmp_path / claims.FEATURES).write_text("| id | feature |\n|---|---|\n| A1 | one |\n| A2 | two |\n")
    (tmp_path / claims.PEER_TESTS).write_text(
        "## 0. First\n`test_of_the_shortlist`\n## 4. Training\n| test | claim |\n|---|---|\n"
        "| `test_one_of_many[x, y]`, `…_two_ranks`, `test_on` | ... |\n"
        "| Words alone | ... |\n\n`test_three.py::test_four{a,b}` is `test_five…`\n"
        "## 20. Formulas\n**Memory**: 4S\n"
    )
    table = [
        Claim("", ("A1",), "", ()),
        Claim("4", ("test_one_of_many", "test_four_b"), "", ()),
        Claim("5", ("test_five",), "", ()),
    ]
    assert [*claims.left_out(table, tmp_path)] == [
        "FEATURES.md: A2 has no row",
        "PEER_TESTS.md, section 4: …_two_ranks has no row",
        "PEER_TESTS.md, section 4: test_on has no row",
        "PEER_TESTS.md, section 4: Words alone has no row",
        "PEER_TESTS.md, section 4: test_five… has no row",
        "PEER_TESTS.md, section 20: Memory has no row",
    ]
