"""The reference page is complete and up to date, and the docstrings render as HTML without a warning."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import funshard

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "guide" / "reference.py"
RENDER = SCRIPT.with_name("render.py")
PAGE = SCRIPT.with_suffix(".md")
SUBMODULES = [name for name in funshard.__all__ if isinstance(getattr(funshard, name), types.ModuleType)]
TOP = [f"fs.{name}" for name in funshard.__all__ if name not in SUBMODULES]
BELOW = [
    f"fs.{module}.{name}"
    for module in SUBMODULES
    for name in getattr(funshard, module).__all__
    if module != "policies" or f"fs.{name}" not in TOP
]


def load(script: Path) -> Any:
    """A script of the guide as a module."""
    spec = importlib.util.spec_from_file_location(f"guide_{script.stem}", script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public(name: str) -> Any:
    """What ``fs.optim.muon`` is, from its name."""
    *path, last = name.removeprefix("fs.").split(".")
    return getattr(importlib.import_module(".".join(["funshard", *path])), last)


def entries() -> dict[str, str]:
    """The page's entries: by name the signature, if there is one."""
    return dict(re.findall(r"^- \*\*`(fs\.[\w.]+)`\*\*(?:`(.*)`)?$", PAGE.read_text(), re.MULTILINE))


def test_the_page_is_up_to_date() -> None:
    made = load(SCRIPT)
    assert made.page() == PAGE.read_text(), f"examples/guide/reference.md is out of date: run `{made.COMMAND}`"
    assert f"`{made.COMMAND}`" in PAGE.read_text()
    assert (ROOT / made.COMMAND.removeprefix("python ")) == SCRIPT


def test_every_public_name_is_on_the_page_once() -> None:
    assert sorted(re.findall(r"^- \*\*`(fs\.[\w.]+)`", PAGE.read_text(), re.MULTILINE)) == sorted([*TOP, *BELOW])
    headings = re.findall(r"^## fs\.(\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(SUBMODULES)


def test_signatures_are_those_that_python_sees() -> None:
    """The arguments' names and kinds: the script reads them from the source, not from the objects."""
    checked = 0
    for name, shown in entries().items():
        given = public(name)
        if not shown.startswith("(") or (inspect.isclass(given) and "Protocol" in str(given.__bases__)):
            continue
        namespace: dict[str, Any] = {}
        (tree,) = ast.parse(f"def f{re.sub(r'-> .*$', '', shown)}: ...").body
        assert isinstance(tree, ast.FunctionDef)
        tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
        tree.args.kw_defaults = [x and ast.Constant(None) for x in tree.args.kw_defaults]
        exec(f"from __future__ import annotations\ndef f({ast.unparse(tree.args)}): ...", namespace)
        want = [(p.name, p.kind) for p in inspect.signature(given).parameters.values()]
        assert [(p.name, p.kind) for p in inspect.signature(namespace["f"]).parameters.values()] == want, name
        checked += 1
    assert checked > 100


def test_public_functions_have_an_example_that_runs() -> None:
    """tests/pages/test_readme.py runs them."""
    functions = [name for name in [*TOP, *BELOW] if inspect.isfunction(public(name))]
    assert len(functions) > 90
    assert [name for name in functions if ">>> " not in (public(name).__doc__ or "")] == []


def functions_and_methods() -> Iterator[tuple[str, Any]]:
    """Yield every public function, and every public method of a public class, by name."""
    for name in [*TOP, *BELOW]:
        given = public(name)
        if inspect.isfunction(given):
            yield name, given
        for method, defined in vars(given).items() if inspect.isclass(given) else ():
            function = getattr(defined, "__func__", defined)  # of a class method or a static one
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


def missing_sections(function: Any) -> set[str]:
    """Return which of ``Args``, its names and ``Returns`` a docstring lacks; "Return ..." in front also counts."""
    doc, signature = inspect.getdoc(function) or "", inspect.signature(function)
    params = set(signature.parameters) - {"self", "cls"}
    named = {name for line in re.findall(r"^    ((?:[*]{0,2}\w+(?:, )?)+):", doc, re.M) for name in re.findall(r"\w+", line)}
    if params - named:
        return params - named
    wanted = {"Args"} if params else set()
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    if returns and not doc.startswith(("Return ", "Whether ")):
        wanted.add("Returns")
    return {section for section in wanted if not re.search(rf"^({section}|{section.replace('Return', 'Yield')}):$", doc, re.M)}


def test_public_docstrings_have_args_and_returns() -> None:
    """Those of every public function and method."""
    lacking = {name: missing_sections(function) for name, function in functions_and_methods()}
    assert {name: sections for name, sections in lacking.items() if sections} == {}


def test_docstrings_render_as_html_without_a_warning(tmp_path: Path) -> None:
    """README's command, with warnings as errors: a page for every public module, with every public name on it."""
    pytest.importorskip("pdoc")
    assert f"python {RENDER.relative_to(ROOT)}`" in (ROOT / "README.md").read_text()
    load(RENDER).render(tmp_path)
    for name in [*TOP, *BELOW]:
        *path, last = name.removeprefix("fs.").split(".")
        page = tmp_path.joinpath("funshard", *path).with_suffix(".html")
        assert f'id="{last}"' in page.read_text(), name


def test_help_begins_with_what_a_user_needs() -> None:
    """An example and the public names come before the map of private folders; all but rare public names are there."""
    before, _, after = (funshard.__doc__ or "").partition("For those who change the package")
    assert "_sharding" not in before
    assert "_sharding" in after
    found = dict(re.findall(r"^    (\w+(?: \w+)*)  +(\w+[,;].*)$", before, re.MULTILINE))
    named = {name for names in found.values() for name in re.split(r"[,;] ", names)}
    rare = {"ModuleTree", "Param", "Params", "Policy", "init_buffers"}
    assert named | rare | {"checkpoint_name"} == set(funshard.__all__)


def test_the_version_is_the_last_one_of_the_changelog() -> None:
    versions = re.findall(r"^## (\S+)(?: - (\d{4}-\d\d-\d\d))?$", (SCRIPT.parent / "changes.md").read_text(), re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    assert all(date for _, date in versions[1:])
    assert f'version = "{versions[1][0]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_glossary_is_short() -> None:
    """At most thirty words, each with its meaning and the names of FSDP2 and JAX beside it."""
    rows = re.findall(r"^\| (.+) \|$", (SCRIPT.parent / "glossary.md").read_text(), re.MULTILINE)[1:]
    words = [row.split(" | ") for row in rows]
    assert 20 < len(words) <= 30
    assert {len(word) for word in words} == {4}
