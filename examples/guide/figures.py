"""Write the figures of the benchmarks' files into the tables of README and guide: ``python examples/guide/figures.py``.

A benchmark writes a file with ``--save`` (examples/benchmarks/results). A comment before a table says where its figures are
from: for each column a template, and for each row a file and a path in it:

    <!-- figures | step / FSDP2 = {over FSDP2:.2f} | peak MB = {peak bytes:.0fM} | rows = peers/FSDP2; peers/fs -->

A column without a template stays as it is, and so does a row "-". A cell is empty where the file has no such figure. "M" after
a format divides by a million. A range of equal figures, as ``{low:.0f}-{high:.0f}`` or ``{x:.1f} ({low:.1f}-{high:.1f})`` may
have, is shown as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted(Path(__file__).resolve().parent.glob("*.md"))]
TABLE = re.compile(r"(?:^<!-- figures \| (?P<mark>.*) -->\n)?^(?P<head>\|.*)\n\|[-|: ]+\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)


class Table(NamedTuple):
    """A table of a page: its mark, its columns, its rows as cells, and where the rows begin in the text."""

    mark: str
    columns: list[str]
    rows: list[list[str]]
    start: int


class Figure(float):
    """A number whose format may end in "M", for millions."""

    def __format__(self, spec: str) -> str:
        return format(self / 1e6, spec[:-1]) if spec.endswith("M") else super().__format__(spec)


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def join_row(cells: list[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def find_tables(text: str) -> Iterator[Table]:
    for found in TABLE.finditer(text):
        rows = [split_row(row) for row in found["rows"].splitlines()]
        yield Table(found["mark"] or "", split_row(found["head"]), rows, found.start("rows"))


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Figure]]:
    """Yield every number of a file with its path."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from flatten(value, f"{path}{key}/")
    if isinstance(tree, int | float):
        yield path[:-1], Figure(tree)


def read_row(row: str) -> dict[str, Figure]:
    """Return the figures of a row, such as "peers/fs P()"."""
    name, *keys = row.split("/")
    tree = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    for key in keys:
        tree = tree[key]
    return dict(flatten(tree))


def fill(template: str, figures: Mapping[str, Figure]) -> str:
    """Return the cell that a template makes of a row's figures, '' without one of them."""
    try:
        text = template.format_map(figures)
    except KeyError:
        return ""
    return re.sub(r"^([\d.]+)(?:-\1| \(\1-\1\))$", r"\1", text)


def fill_table(table: Table) -> list[list[str]]:
    """Return the rows of a table with the figures of the files."""
    templates = dict(part.split(" = ", 1) for part in table.mark.split(" | "))
    paths = templates.pop("rows").split("; ")
    if len(paths) != len(table.rows) or not {*templates} <= {*table.columns}:
        raise ValueError(f"expected {len(table.rows)} rows and columns of {table.columns}, got {table.mark}")
    rows = []
    for path, row in zip(paths, table.rows, strict=True):
        figures = read_row(path) if path != "-" else None
        cells = zip(table.columns, row, strict=True)
        rows.append([fill(templates[name], figures) if figures and name in templates else cell for name, cell in cells])
    return rows


def fill_page(text: str) -> str:
    """Return a page with the figures of the files."""
    for table in reversed([*find_tables(text)]):
        if table.mark:
            old = "".join(map(join_row, table.rows))
            text = text[: table.start] + "".join(map(join_row, fill_table(table))) + text[table.start + len(old) :]
    return text


def main() -> None:
    for page in PAGES:
        page.write_text(fill_page(page.read_text()))


if __name__ == "__main__":
    main()
