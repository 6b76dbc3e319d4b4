"""The tables of figures in README and guide show what the benchmarks have written into examples/benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import seldom
from ranks import launch
from test_reference import load

figures = load(Path(__file__).parents[2] / "examples" / "guide" / "figures.py")
PAGES = {page.stem: page for page in figures.PAGES}
FILES = sorted(figures.RESULTS.glob("*.json"))
NO_FIGURES = {"changes", "ideas", "limits", "optimizers"}
"""Pages whose tables have other numbers: versions, formats, and what tests compare."""


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- figures |" in PAGES[page].read_text()])
def test_tables_show_what_was_measured(page: str) -> None:
    """``python examples/guide/figures.py`` changes nothing."""
    text = PAGES[page].read_text()
    assert figures.fill_page(text) == text


def has_figures(table: Any) -> bool:
    """Whether a table has numbers with a decimal point beside its first column."""
    return any(re.search(r"(?<![\w.])\d+\.\d+(?![\w.])", cell) for row in table.rows for cell in row[1:])


def test_every_table_of_figures_has_a_file() -> None:
    """A table with figures has a mark, which names the file that a benchmark wrote."""
    tables = [
        (page, one) for page, path in PAGES.items() if page not in NO_FIGURES for one in figures.find_tables(path.read_text())
    ]
    assert not [(page, table.rows[0][0]) for page, table in tables if has_figures(table) and not table.mark]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_say_where_they_are_from(path: Path) -> None:
    """Machine, versions and date; no name of a machine, and no path."""
    result = json.loads(path.read_text())
    assert [*result] == ["benchmark", "date", "versions", "machine", "arguments", "figures"]
    assert (figures.RESULTS.parent / f"{result['benchmark']}.py").exists()
    assert {"cpu", "cores", "memory GB"} <= {*result["machine"]}
    assert {*result["versions"]} == {"python", "torch", "funshard"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert not re.search(r'"[^"]*(/home|/root|/tmp|/work)', path.read_text())


@seldom
def test_exact_figures_are_those_of_today() -> None:
    """Counts of collectives, bytes and operators depend on torch's version alone."""
    saved = json.loads((figures.RESULTS / "comm.json").read_text())
    if saved["versions"]["torch"].partition("+")[0] != (here := torch.__version__.partition("+")[0]):
        pytest.skip(f"the file is of torch {saved['versions']['torch']}, and here is {here}")
    output = launch(1, figures.RESULTS.parent / "comm.py", "--ranks", "8", "--modes", ",".join(saved["figures"]["8"]))
    found = json.loads(output.splitlines()[-1])["figures"]["8"]
    for mode, one in found.items():
        assert one == pytest.approx(saved["figures"]["8"][mode], rel=1e-4), mode


def test_every_file_is_shown() -> None:
    marks = " ".join(table.mark for path in PAGES.values() for table in figures.find_tables(path.read_text()))
    assert {path.stem for path in FILES} == {*re.findall(r"(?:= |; )([\w-]+)/", marks)}
