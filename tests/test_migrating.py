"""The table of migrating.md names everything that torch has, and what it offers instead is there."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import funshard

PAGE = Path(__file__).parent.parent / "examples" / "guide" / "migrating.md"
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
