"""The table of what torch's trainers do and claim (claims.md) is complete, and what it names is there."""

from __future__ import annotations

import claims
import pytest


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
