"""What the documentation shows is true: README's blocks and the modules' doctests run."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from ranks import Pool
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import funshard

README = Path(__file__).parent.parent / "README.md"
ROWS = re.findall(r"^\|(.+)\|(.+)\|$", README.read_text().partition("## Migrating")[2], re.MULTILINE)
IN_ROWS = {name for theirs, _ in ROWS for code in re.findall(r"`([^`]+)`", theirs) for name in re.findall(r"\w+", code)}
OURS = [ours for _, ours in ROWS]
MODULES = ["funshard", *(f"funshard.{m.name}" for m in pkgutil.iter_modules(funshard.__path__) if m.name != "__main__")]


def blocks(language: str) -> list[str]:
    """README's fenced blocks of a language; each under as many newlines as put its errors at README's lines."""
    text = README.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block.group(1) for block in found]


def test_readme_python_blocks_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every python block runs, in order, in one namespace; what is printed is what the text block after it shows."""
    python = blocks("python")
    assert len(python) >= 8
    readme = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", readme)  # where the compiler looks for its names
    for block in python:
        exec(compile(block, str(README), "exec"), vars(readme))
    assert capsys.readouterr().out.strip() in {block.strip() for block in blocks("text")}


def on_two_ranks(rank: int) -> str:
    """What README's blocks print here, after a look at what the last of two meshes gave."""
    readme = sys.modules["readme"] = types.ModuleType("readme")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for block in blocks("python"):
                exec(compile(block, str(README), "exec"), vars(readme))
                if "on_both" in block:
                    want = funshard.grad(readme.loss)(readme.params, readme.x, readme.y)
                    torch.testing.assert_close(readme.grads, want)
    finally:
        del sys.modules["readme"]
    return printed.getvalue()


def test_readme_python_blocks_run_on_two_ranks(gloo2: Pool) -> None:
    """All of them, as they stand."""
    for printed in gloo2.run(on_two_ranks):
        assert printed.strip() in {block.strip() for block in blocks("text")}


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


def test_what_the_migration_table_offers_exists() -> None:
    """A function that a row calls by name, and does not say is planned, is exported."""
    exported = {*funshard.__all__, *funshard.collectives.__all__}
    offered = {
        name
        for ours in OURS
        for code in re.findall(r"`([^`]+)`", re.split("planned", ours)[0])
        for name in re.findall(r"^(?:collectives\.)?([a-z_]+)(?=\(|$)", code)
    }
    assert len(offered) > 15
    assert offered - exported <= {"params", "no_sync"}


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    """The examples in a module's docstrings give what they show."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_doctests() -> None:
    """The doctest finder sees the library's examples at all."""
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(len(t.examples) for m in modules for t in doctest.DocTestFinder().find(m)) >= 2
