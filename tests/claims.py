"""The table of what torch's data parallel trainers do and claim, and where each of it is shown here.

    python tests/claims.py    prints what is open: no place that shows it, or none that exists; 1 if there is any

The table is claims.md. Its rows come from two pages, FEATURES.md and PEER_TESTS.md, which may lie beside the checkout, in
../shared: a row for each row of the former by its id, and for the tests that the latter names. A place is a test, such as
test_spec.py::test_s1_purity, a heading of the guide, such as ideas.md#precision, or a row of a table of the guide, such as
``limits.md: norms by parameter``, by words of its first cell.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
ROOT = TESTS.parent
GUIDE = ROOT / "examples" / "guide"
TABLE = TESTS / "claims.md"
PAGES = ROOT.parent / "shared"
FEATURES, PEER_TESTS = "FEATURES.md", "PEER_TESTS.md"


class Claim(NamedTuple):
    """One row of the table."""

    section: str
    """The number of the section of PEER_TESTS.md; "" for a row of FEATURES.md."""
    names: tuple[str, ...]
    """The id of the feature, or the names of torch's tests."""
    title: str
    places: tuple[str, ...]


def read_table() -> list[Claim]:
    """Return the rows of claims.md."""
    claims, section = [], ""
    for line in TABLE.read_text().splitlines():
        if heading := re.match(r"### (\d+) ", line):
            section = heading[1]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("id", "test") and set(cells[0]) != {"-"}:
            names, places = (tuple(filter(None, (part.strip() for part in cell.split(", ")))) for cell in (cells[0], cells[2]))
            claims.append(Claim(section, names, cells[1], places))
    return claims


def read_headings() -> dict[str, str]:
    """Return the headings of the sections of PEER_TESTS.md in claims.md, which name files of tests, by number."""
    return dict(re.findall(r"^### (\d+) (.*)$", TABLE.read_text(), re.MULTILINE))


# --- the places ---


@functools.cache
def tests_of(file: str) -> frozenset[str]:
    """Return the tests of a file, and the rows of its table."""
    text = next((path.read_text() for path in TESTS.rglob(file)), "")
    return frozenset(re.findall(r"^(?:def | +f?\")(test_\w+)(?:\(|[^\"]*\": Claim\()", text, re.MULTILINE))


@functools.cache
def headings_of(page: str) -> frozenset[str]:
    """Return what links may point to on a page of the guide, as GitHub names headings."""
    text = re.sub(r"^```.*?^```", "", (GUIDE / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@functools.cache
def first_cells_of(page: str) -> tuple[str, ...]:
    """Return the first cells of the rows of all tables on a page of the guide."""
    return tuple(re.findall(r"^\| (.*?) \|", (GUIDE / page).read_text(), re.MULTILINE))


def exists(place: str) -> bool:
    """Return whether there is such a test, heading or row."""
    if "::" in place:
        file, test = place.split("::")
        return test in tests_of(file)
    if "#" in place:
        page, heading = place.split("#")
        return heading in headings_of(page)
    page, _, words = place.partition(": ")
    return bool(words) and any(re.search(rf"(?<!\w){re.escape(words)}(?!\w)", cell) for cell in first_cells_of(page))


def missing_places(claims: list[Claim]) -> Iterator[str]:
    """Yield the rows without a place, and the places that do not exist."""
    for claim in claims:
        if not claim.places:
            yield f"{', '.join(claim.names)} ({claim.title}): nothing shows it"
        for place in claim.places:
            if not exists(place):
                yield f"{', '.join(claim.names)} ({claim.title}): {place} does not exist"


# --- the pages ---


def asked_features(pages: Path) -> list[str]:
    """Return the ids of the rows of FEATURES.md."""
    return re.findall(r"^\| ([A-Z]\d+) \|", (pages / FEATURES).read_text(), re.MULTILINE)


def asked_tests(pages: Path) -> Iterator[tuple[str, str]]:
    """Yield the section and name of what PEER_TESTS.md claims; without the shortlist (0) and defects of the peer (19).

    In a table the claims of a row are the names in its first cell, or its words if there are none; elsewhere they are names of
    tests. The last section has formulas, by bold words.
    """
    parts = re.split(r"^## (\d+)\. ", (pages / PEER_TESTS).read_text(), flags=re.MULTILINE)
    for section, body in zip(parts[1::2], parts[2::2], strict=True):
        if section == "20":
            yield from ((section, name) for name in re.findall(r"\*\*([^*]+)\*\*:", body))
        elif section not in ("0", "19"):
            for line in body.splitlines():
                yield from ((section, name) for name in _names_in(line))


def _names_in(line: str) -> list[str]:
    if not line.startswith("|"):
        return [name for name in re.findall(r"`([^`]+)`", line) if name.startswith(("test_", "…"))]
    cell = line.split("|")[1].strip()
    return [] if cell == "test" or set(cell) <= {"-"} else re.findall(r"`([^`]+)`", cell) or [cell]


def is_named(name: str, known: list[str]) -> bool:
    """Return whether one of the known names is that of a claim, which may be a part of a name.

    A part begins or ends with an ellipsis, or goes on with alternatives, of which the first is looked for. Parameters in
    brackets do not count.
    """
    whole = re.sub(r"\[[^\]]*\]$", "", re.sub(r"^[\w.]+::(?=\w)", "", name))
    part = re.split(r"[…{(*:/]", whole.lstrip("…"))[0].strip()
    return whole in known if part == whole else any(part in other for other in known)


def left_out(claims: list[Claim], pages: Path) -> Iterator[str]:
    """Yield what the pages ask for and the table does not name."""
    features = {name for claim in claims if not claim.section for name in claim.names}
    yield from (f"{FEATURES}: {name} has no row" for name in asked_features(pages) if name not in features)
    headings = read_headings()
    for section, name in asked_tests(pages):
        names = re.findall(r"[\w.]+", headings.get(section, ""))
        if not is_named(name, [*names, *(name for claim in claims if claim.section == section for name in claim.names)]):
            yield f"{PEER_TESTS}, section {section}: {name} has no row"


def has_pages() -> bool:
    """Return whether both pages are there."""
    return all((PAGES / name).is_file() for name in (FEATURES, PEER_TESTS))


if __name__ == "__main__":
    table = read_table()
    open_claims = [*missing_places(table), *(left_out(table, PAGES) if has_pages() else ())]
    print(*open_claims, sep="\n", end="\n" if open_claims else "")
    tested = sum(any("::" in place for place in claim.places) for claim in table)
    print(f"{len(table)} rows: {tested} with a test, {len(table) - tested} with the guide alone; {len(open_claims)} open")
    if not has_pages():
        print(f"not compared with {FEATURES} and {PEER_TESTS}, which are not in {PAGES}")
    sys.exit(bool(open_claims))
