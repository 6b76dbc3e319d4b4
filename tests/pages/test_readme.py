"""What the documentation shows is true: the blocks of README and of the guide's pages run, and so do the doctests."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import inspect
import io
import os
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import claims
import pytest
import torch
import torch.distributed as dist
from depth import at_most, each, mark_seldom, seldom
from ranks import Pool, launch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import funshard

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "examples" / "guide"
PAGES = {page.stem: page for page in [README, *sorted(GUIDE.glob("*.md"))]}
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
MODULES = ["funshard", *(m.name for m in pkgutil.walk_packages(funshard.__path__, "funshard.") if "__main__" not in m.name)]


class Block(NamedTuple):
    """A python block: its code under as many newlines as put its errors at the page's lines, and what it is to print."""

    code: str
    mark: str
    shown: str


def blocks(page: str) -> list[Block]:
    """A page's python blocks; each shows what the text block shows that follows it, with nothing between, or nothing."""
    text = PAGES[page].read_text()
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in zip_longest(fences, fences[1:]):
        if fence["language"] != "python":
            continue
        shows = following and following["language"] == "text" and not text[fence.end() : following.start()].strip()
        lines = "\n" * text.count("\n", 0, fence.start("body"))
        found.append(
            Block(lines + fence["body"], fence["mark"] or "", following["body"].strip() if following and shows else "")
        )
    return found


def run(page: str, folder: str) -> None:
    """A page's blocks in order, in one namespace and in a folder of their own: each prints what the page shows.

    Left out are scripts. On several ranks the first prints, or each does.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    name = f"page_{page}"
    module = sys.modules[name] = types.ModuleType(name)  # where the compiler looks for its names
    here = os.getcwd()
    os.chdir(folder)
    try:
        for block in blocks(page):
            if block.mark == "script":
                continue
            with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft uses older names of transformers
                exec(compile(block.code, str(PAGES[page]), "exec"), vars(module))
            printed = said.getvalue().strip()
            assert printed in {block.shown, "" if rank else block.shown}, f"rank {rank}: {block.code.strip()}\n{printed}"
    finally:
        os.chdir(here)
        del sys.modules[name]


def on_a_rank(rank: int, page: str, folder: str) -> None:
    run(page, folder)


def needed(page: str) -> None:
    """Skips where a page is about a library, as its first lines say in a comment, that is not installed."""
    for library in re.findall(r"^<!-- needs (\w+) -->$", PAGES[page].read_text(), re.MULTILINE):
        pytest.importorskip(library)


def page_cases() -> list[Any]:
    """Each page with a number of ranks: by default two, but for the pages that compile most, which CI runs by themselves."""
    cases = [(page, ranks) for page in PAGES if blocks(page) for ranks in (2, 1)]
    marks = {case: [seldom] * (case[0] in ("transforms", "research") or case[1] == 1) for case in cases}
    return [pytest.param(*case, marks=marks[case], id=f"{case[0]}-{case[1]}") for case in cases]


@pytest.mark.parametrize(("page", "ranks"), page_cases())
def test_blocks_run(gloo2: Pool, page: str, ranks: int, tmp_path: Path) -> None:
    """Every python block runs as it stands, on one rank and on two, and prints what the text block after it shows."""
    needed(page)
    if ranks > 1 and "<!-- without a process group -->" in PAGES[page].read_text():
        pytest.skip("the page is about what runs before there is a process group")
    if ranks == 1:
        run(page, str(tmp_path))
    else:
        gloo2.run(on_a_rank, page, str(tmp_path))


@at_most(1)
@each(ranks=[1, 2])
@pytest.mark.parametrize(
    "script",
    [pytest.param(block, id=f"{page}{i}") for page in PAGES for i, block in enumerate(blocks(page)) if block.mark == "script"],
)
def test_scripts_run(script: Block, ranks: int, tmp_path: Path) -> None:
    """A whole script runs plainly and as under torchrun, and prints what the page shows."""
    path = tmp_path / "script.py"
    path.write_text(f"import os; os.chdir({str(tmp_path)!r})\n" + script.code)
    assert launch(ranks, path).strip() == script.shown


def test_readme_is_a_first_page() -> None:
    """Of at most 220 lines, from which every page of the guide can be reached."""
    assert len(README.read_text().splitlines()) <= 220
    assert {page.name for page in GUIDE.glob("*.md")} <= set(re.findall(r"\(examples/guide/([\w-]+\.md)\)", README.read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To a file, and to a heading that it has; and files of the repository that are named are there."""
    text = FENCE.sub("", PAGES[page].read_text())
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    named = re.findall(r"`((?:tests|examples|funshard)/[\w/]+\.(?:py|md))`", text)
    assert links or named
    for target, anchor in links:
        if target.startswith("http"):
            continue
        file = (PAGES[page].parent / target).resolve() if target else PAGES[page]
        assert file.exists(), target
        assert not anchor or anchor in claims.headings_of(str(file)), f"{target}#{anchor}"
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_reading_order_is_that_of_the_code() -> None:
    """Each row of how-it-works.md names what is defined in its file or folder."""
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| ([^|]+) \|", PAGES["how-it-works"].read_text(), re.MULTILINE)
    assert len(rows) == 14
    for place, names in rows:
        files = [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py")
        code = "\n".join(path.read_text() for path in files)
        defined = set(re.findall(r"^(?:class |def )?(\w+)(?:\(|:| =)", code, re.MULTILINE))
        assert {*re.findall(r"`(\w+)`", names)} <= defined, (place, names)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    """The examples in a module's docstrings give what they show."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@seldom
@pytest.mark.parametrize("up", mark_seldom([True, False], True), ids=["up", "down"])
@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("funshard._compiled")])
def test_doctests_do_not_depend_on_the_last_bit(name: str, up: bool) -> None:
    """The doctests pass on CPUs that round otherwise. Operators in compiled functions are not checked."""
    if name.endswith("_transforms.offload") and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 fails an assertion of its own: its dispatch modes, within saved-tensor hooks")
    with OtherLastBit(up=up):
        assert doctest.testmod(importlib.import_module(name)).failed == 0


# --- the table of migrating.md names everything that torch has, and what it offers instead is there ---

PAGE = Path(__file__).parents[2] / "examples" / "guide" / "migrating.md"
ROWS = re.findall(r"^\|(.+)\|(.+)\|$", PAGE.read_text(), re.MULTILINE)
IN_ROWS = {name for theirs, _ in ROWS for code in re.findall(r"`([^`]+)`", theirs) for name in re.findall(r"\w+", code)}
OURS = [ours for _, ours in ROWS]

of_torch_2_13 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) > (2, 13), reason="the table lists the names of torch 2.13"
)


def public(module: str) -> set[str]:
    """The public names of one of the torch modules that README's migration table is about."""
    found = importlib.import_module(module)
    return set(
        getattr(found, "__all__", None) or {n for n in vars(found) if getattr(vars(found)[n], "__module__", "") == module}
    )


@of_torch_2_13
@pytest.mark.parametrize(
    "module",
    [
        "torch.distributed.fsdp",
        "torch.distributed.fsdp.wrap",
        "torch.distributed.fsdp.api",
        "torch.distributed.fsdp.sharded_grad_scaler",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.algorithms.model_averaging.averagers",
        "torch.distributed.algorithms.model_averaging.hierarchical_model_averager",
        "torch.distributed.algorithms.model_averaging.utils",
    ],
)
def test_migration_table_is_complete(module: str) -> None:
    """Every public name of torch's modules has its row."""
    names = {name for name in public(module) if not name.startswith("_")}
    assert names
    assert names - IN_ROWS == set()


@of_torch_2_13
@pytest.mark.parametrize("cls", [FullyShardedDataParallel, FSDPModule, DistributedDataParallel])
def test_migration_table_has_every_method_and_option(cls: type) -> None:
    """So has every public method of the wrappers, and every option of their constructors."""
    options = set(inspect.signature(cls.__init__).parameters) - {"self", "module", "args", "kwargs"}
    if cls is FSDPModule:
        options = set(inspect.signature(fully_shard).parameters) - {"module"}
    names = {name for name in vars(cls) if not name.startswith("_")} | options
    assert names - IN_ROWS == set()


ROOTS = {"spec": funshard.PartitionSpec, "model": nn.Module, "nn": nn}
"""Names in the migration table that are not funshard's."""
OTHERS = {"params", "policy", "no_sync"}
"""Words in code that are arguments, or torch's own."""


def resolve(dotted: str) -> Any:
    """Return what a name of the migration table stands for; raises AttributeError if there is no such thing."""
    first, *rest = dotted.split(".")
    found = ROOTS.get(first) or getattr(funshard, first, None) or getattr(funshard.collectives, first)
    return functools.reduce(getattr, rest, found)


def calls(code: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the dotted name and the keywords of each call in a piece of code, or the name that it is."""
    try:
        tree = ast.parse(re.sub(r"=(?=[,)])", "=...", code))
    except SyntaxError:  # `axes=`
        return
    for node in [tree.body[0].value] if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else []:
        if isinstance(node, ast.Name | ast.Attribute):
            yield ast.unparse(node), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg for keyword in node.keywords if keyword.arg}


def test_what_the_migration_table_offers_exists() -> None:
    """Each function that a row names, by whatever path, and does not call planned, is there and has the options."""
    offered = [
        call for ours in OURS for code in re.findall(r"`([^`]+)`", re.split("[Pp]lanned", ours)[0]) for call in calls(code)
    ]
    assert len({name for name, _ in offered}) > 40
    assert {"checkpoint.optimizer_state_dict", "averaging.periodic", "spec.on"} <= {name for name, _ in offered}
    for name, keywords in offered:
        if name not in OTHERS:
            assert keywords <= {*inspect.signature(resolve(name)).parameters} if keywords else resolve(name), (name, keywords)


def script(sign: str) -> str:
    """The page's script before (``-``) or after (``+``)."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(line[2:] for line in diff.splitlines() if line[:1] in (sign, " ", ""))


def test_one_script_before_and_after(tmp_path: Path) -> None:
    """FSDP2's and ours print the same losses and end with the same parameters, bit for bit."""
    said, models = [], []
    for name, sign in (("before", "-"), ("after", "+")):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "train.py"
        path.write_text(f"import os, warnings\nos.chdir({str(folder)!r})\nwarnings.simplefilter('ignore')\n" + script(sign))
        said.append(launch(2, path))
        models.append(torch.load(folder / "model.pt"))
    assert said[0] == said[1]
    assert said[0].startswith("step 0  loss 5.7")
    before, after = models
    assert [*before] == [*after]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert 50 <= len(script("-").splitlines()) <= 60


# --- another CPU, on which inexact float32 results differ by one in their last bit ---


class OtherLastBit(TorchDispatchMode):
    """Moves each float32 that an operator rounds to the next one, up or down; leaves exact results alone.

    A result is exact if the operator computes the same in float64. Operators inside ``torch.compile`` are not seen.
    """

    def __init__(self, *, up: bool) -> None:
        super().__init__()
        self.limit = torch.tensor(float("inf") if up else float("-inf"))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace != "aten" or func._schema.is_mutable or func.is_view or is_random or not is_float32(out):
            return out
        exact = func(*tree_map(to_double, args), **tree_map(to_double, kwargs))
        if exact.dtype != torch.float64:  # a factory, or a conversion
            return out
        is_rounded = exact != out
        return torch.where(is_rounded, torch.nextafter(out, self.limit), out)


def is_float32(x: Any) -> bool:
    return type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"


def to_double(x: Any) -> Any:
    return x.double() if is_float32(x) else x
