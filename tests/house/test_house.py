"""The house (funshard/__init__.py): imports run downwards, and what has no underscore is public and documented."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import funshard
from funshard._gone import GONE

ROOT = Path(funshard.__file__).parent
TESTS = Path(__file__).parents[1]
MAP = re.findall(r"^   ([1 ][0-9 ])  ((?:_?[a-z_]+(?:, )?)+)  ", funshard.__doc__ or "", re.MULTILINE)
FILES = sorted(ROOT.rglob("*.py"))


def floors() -> dict[str, int]:
    """By the name of a folder or file at the top, from the map in the package's docstring."""
    floor, out = 0, {}
    for number, names in MAP:
        floor = int(number) if number.strip() else floor
        out |= dict.fromkeys(names.split(", "), floor)
    return out


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """What a file is made of; the whole is the first."""
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The modules of the package that a file imports, with dots from its root: also within functions, and for types alone."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            where = [*above, *(node.module.split(".") if node.module else [])]
            for name in [node.module] if node.module and where else node.names:
                yield node.lineno, ".".join(where if isinstance(name, str) else [*where, name.name])


def test_the_map_is_complete() -> None:
    """Every folder and file has its floor."""
    assert set(floors()) == {m.name for m in pkgutil.iter_modules([str(ROOT)])}


def test_imports_run_downwards() -> None:
    """From a folder to itself, or to a lower floor."""
    floor = floors()
    owners = {path: path.relative_to(ROOT).with_suffix("").parts[0] for path in FILES}
    up = [
        (str(path), line, to)
        for path, own in owners.items()
        if own != "__init__"
        for line, to in imported(path)
        if (top := to.split(".")[0]) != own and floor[top] >= floor[own]
    ]
    assert not up


def test_there_are_no_circles() -> None:
    """No files import each other, directly, by way of others, or for types alone: a CycleError would name them."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    assert len(names) > 60
    graphlib.TopologicalSorter(
        {name: [to for _, to in imported(path) if to in names] for name, path in names.items()}
    ).prepare()


def test_public_modules_are_exported() -> None:
    """A module without an underscore, at the top or in a public folder, is in its package's list."""
    public = {m.name for m in pkgutil.iter_modules([str(ROOT)]) if not m.name.startswith("_")}
    assert public == {name for name in funshard.__all__ if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()}
    for folder in (ROOT / name for name in public if (ROOT / name).is_dir()):
        assert all(path.name.startswith("_") for path in folder.glob("*.py"))


def test_private_parts_of_torch_are_in_one_place() -> None:
    """Elsewhere nothing of torch with an underscore is used but torch.utils._pytree, whose nodes models return."""
    others = [path for path in FILES if path.relative_to(ROOT).parts[0] != "_torch"]
    assert [(str(path), name) for path in others for name in private(path) if not name.startswith(ALLOWED)] == []


ATTRIBUTES = {name for cls in (torch.Tensor, torch.UntypedStorage) for name in dir(cls) if re.match(r"_[^_]", name)}
ATTRIBUTES -= {"_values", "_backward_hooks"}  # of dicts of our own, and of modules


def private(path: Path) -> list[str]:
    """The private names of torch that a file uses, attributes of tensors and storages among them."""
    text = re.sub(r'(?s)""".*?"""', "", path.read_text())
    used = re.findall(r"\btorch(?:\.\w+)*\._\w+(?:\.\w+)*", text)
    used += [name for name in re.findall(r"(?<!self)\.(_\w+)\b", text) if name in ATTRIBUTES]
    used += [f"{a}.{b}" for a, b in re.findall(r"from (torch[\w.]*) import (?:.*\b)?(_\w+)", text)]
    return used + re.findall(r"from (torch[\w.]*\._[\w.]*) import", text)


ALLOWED = ("torch.ops._c10d_functional", "torch.utils._pytree", "torch.__version__")
"""The functional collectives are torch's documented way for compilers, under this name."""


def test_files_are_short() -> None:
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 600] == []


BUDGETS = {
    "_call": 3410, "_compiled": 775, "_core": 2425, "_init": 450, "_plan": 1100, "_sharding": 1060, "_slices": 475,
    "_spec": 1000, "_steps": 910, "_torch": 1940, "_transforms": 2955, "_wire": 1775, "checkpoint": 2745,
    "codecs": 350, "collectives": 1395, "compress": 475, "curvature": 675, "data": 225, "optim": 3685,
    "testing": 625,
}  # fmt: skip
"""The most lines of each folder. Their sum may only be lowered: the house is to have 31,000 lines, then 27,000."""


def test_what_pins_a_private_part_of_torch_is_there() -> None:
    """Docstrings name the tests that fail when torch changes it."""
    named = {name for path in FILES for name in re.findall(r"``(test_\w+)``", path.read_text())}
    defined = re.findall(r"^def (test_\w+)", "".join(map(Path.read_text, TESTS.rglob("*.py"))), re.MULTILINE)
    assert len(named) > 50
    assert named <= {*defined}


def test_folders_stay_within_their_budgets() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    sizes = {folder: sum(n for path, n in lines.items() if ROOT / folder in path.parents) for folder in BUDGETS}
    assert {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()} == set(BUDGETS)
    assert {folder: size for folder, size in sizes.items() if size > BUDGETS[folder]} == {}
    assert sum(lines.values()) <= 29_423


def test_tests_stay_within_their_budget() -> None:
    """Their lines may only be lowered as well: they are to be 45,000."""
    assert sum(len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")) <= 44_989


OPTIONS = {
    "compil": (r"_compiled/|_call/compiled_|_torch/|_spec/options|^__init__", 14),
    "remat|recompu": (r"_recompute/|recompute.py|_spec/options|^__init__|_compiled/|_call/compiled_|scan.py|sliced.py", 4),
    "offload(?!_to_cpu)": (r"offload.py|_wire/host|_spec/options|^__init__", 5),
    "precision": (r"_spec/|_call/casting|_wire/|^__init__", 5),
    "at_rest": (r"_spec/|_wire/|^_plan/|^__init__", 3),
    "local_axes|localdims": (r"_spec/local|_wire/flow|_core/unit", 11),
}
"""Words in the names of an option, the files of its own, and the most others that name it. They may only be lowered.

What a plan calls at rest is memory between steps, of any option; `gather_full` has an ``offload_to_cpu`` of its own. `scan`,
`chunked` and attention are made of the transform `remat`, and compiled code recomputes by its own means.
"""


@pytest.mark.parametrize("words", OPTIONS)
def test_few_files_name_an_option(words: str) -> None:
    own, most = OPTIONS[words]
    others = [path for path in FILES if not re.search(own, path.relative_to(ROOT).as_posix())]
    named = {str(path) for path in others if re.search(words, names_of(path))}
    assert len(named) <= most, sorted(named)


@functools.cache
def names_of(path: Path) -> str:
    """The names in the nodes of a file, one a line, but for that of re.compile."""
    names = {getattr(node, field, None) for node in nodes(path) for field in ("id", "name", "arg", "module")}
    of_attributes = [node for node in nodes(path) if isinstance(node, ast.Attribute)]
    names |= {node.attr for node in of_attributes if not (isinstance(node.value, ast.Name) and node.value.id == "re")}
    return "\n".join(sorted(name for name in names if isinstance(name, str))).lower()


def undocumented(path: Path) -> Iterator[str]:
    """The functions, classes and methods of a file without an underscore or a docstring, but for methods that inherit one."""

    def bare(node: ast.AST, *classes: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef) or child.name.startswith("_"):
                continue
            if isinstance(child, ast.ClassDef):
                yield from bare(child, *classes, child.name)
            if ast.get_docstring(child) is None and "overload" not in map(ast.unparse, child.decorator_list):
                names = ".".join([*classes, child.name])
                if not (classes and isinstance(child, ast.FunctionDef) and inspect.getdoc(attrgetter(names)(module))):
                    yield names

    name = ".".join(("funshard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(name)
    return bare(nodes(path)[0])


def test_what_has_no_underscore_has_a_docstring() -> None:
    """Also in private folders, which ruff takes for private files and passes over."""
    assert [(str(path), name) for path in FILES for name in undocumented(path)] == []


def test_few_names_are_public() -> None:
    """Each once, where two modules export the same object; the submodules count as well."""
    modules = [
        funshard,
        *(value for name in funshard.__all__ if isinstance(value := getattr(funshard, name), types.ModuleType)),
    ]
    names = {id(getattr(module, name)): f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert len(modules) == 12
    assert len(names) <= 158, sorted(names.values())


@pytest.mark.parametrize("module", GONE)
def test_names_that_are_gone_say_what_to_write(module: str) -> None:
    """Each is an AttributeError, and in changes.md's table."""
    page = (ROOT.parent / "examples/guide/changes.md").read_text()
    for name, instead in GONE[module].items():
        with pytest.raises(AttributeError, match=re.escape(f"{module} has no '{name}' any more: use {instead}")):
            getattr(importlib.import_module(module), name)
        assert re.search(rf"^\|.*\b{name}\b.*\|.*\|$", page, re.MULTILINE), name


def test_the_package_exports_nothing_by_accident() -> None:
    """Without an underscore, it has what is in its list: no module or name that it imports for itself."""
    lazy = {*funshard._LAZY_MODULES, *funshard._LAZY}
    assert {name for name in dir(funshard) if not name.startswith("_")} | lazy == set(funshard.__all__)
