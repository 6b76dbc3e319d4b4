"""python -m funshard plan, the picture of a plan, and fs.visualize."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from depth import seldom
from torch import nn

import funshard as fs
from funshard._plan.picture import CATEGORY_COLORS
from funshard._plan.plan import main

GUIDE = Path(__file__).parent.parent / "examples" / "guide"

MODEL = """
from torch import nn
import funshard as fs


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def make():
    return nn.Sequential(nn.Embedding(32, 16), *(Block() for _ in range(3)), nn.Linear(16, 32))
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM


def llama_7b():
    return LlamaForCausalLM(LlamaConfig())
"""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a callable that returns a model, in a module of its own."""
    (tmp_path / "planned_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)
    return "planned_model:make"


def test_what_is_printed_is_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is that of fs.plan for the same model, policy and mesh."""
    main(["plan", model, "--policy", "by_type:Block", "--mesh", "replicate=2,shard=4", "--batch", "64"])
    module = sys.modules["planned_model"]
    spec = fs.by_type(module.Block)(module.make()).on({"replicate": 2, "shard": 4})
    assert capsys.readouterr().out == f"{fs.plan(spec, batch=64)}\n"


def test_a_batch(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a batch activations are counted, and a picture is drawn."""
    main(["plan", model, "--policy", "by_type:Block", "--mesh", "shard=2", "--batch", "4x8", "--svg", "plan.svg"])
    assert "activations" in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.tag == f"{SVG}svg"


@seldom
def test_as_a_module(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "funshard", "plan", model, "--mesh", "shard=4"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "by_type:Blok"], "--policy: expected whole, or by_type:NAME with some of ['Block'"),
        (["--mesh", "shard"], "argument --mesh: invalid axes_and_sizes value: 'shard'"),
        (["--batch", "4,8"], "argument --batch: invalid shape_or_tokens value: '4,8'"),
    ],
)
def test_wrong_options(model: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", model, *options])
    assert words in capsys.readouterr().err


def rows_of(root: ElementTree.Element) -> list[list[ElementTree.Element]]:
    """The boxes of each rank's slices; a row that is another one's copy has the same ones."""
    groups = {g.attrib["id"]: g for g in root.iter(f"{SVG}g") if g.attrib.get("id", "").startswith("rank")}
    copies = [groups[use.attrib["href"].removeprefix("#")] for use in root.iter(f"{SVG}use")]
    return [[*g.iter(f"{SVG}rect")] for g in (*groups.values(), *copies)]


def test_picture() -> None:
    """Areas for what is held, a box for every slice and its padding to scale, and the streams, inside of the picture."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    plan = fs.plan(fs.by_type(nn.Linear)(module).on({"shard": 3}), batch=16)
    root = ElementTree.fromstring(plan.to_svg())
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    held = {name for held in plan.peaks.values() for name, size in held.items() if size}
    areas = [path.attrib["fill"] for path in root.iter(f"{SVG}path") if path.attrib["d"].endswith("Z")]
    assert sorted(areas) == sorted(CATEGORY_COLORS[name] for name in held)
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    rows = rows_of(root)
    assert len(rows) == 3
    padding = {id(r) for g in root.iter(f"{SVG}g") if "padding" in g.attrib.get("fill", "") for r in g.iter(f"{SVG}rect")}
    sizes = [(float(r.attrib["width"]), id(r) in padding) for row in rows for r in row]
    numel = sum(unit.numel for unit in plan.units.values())
    hatched = sum(w for w, is_padding in sizes if is_padding) / sum(w for w, _ in sizes)
    assert hatched == pytest.approx(plan.padding / (plan.padding + numel), abs=1e-3)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {"rank 2", "forward", "backward", "gathers", "reductions", f"hatched: padding, {plan.padding} elements"} <= {*texts}
    assert any("peak: backward of" in text for text in texts)


MADE_WITH = {"torch": "2.13.0", "transformers": "5.24.0"}
"""The versions that the picture in README was made with: others save other activations."""


@seldom
def test_readme_shows_what_its_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make it again: run the command under it, and move plan.svg to examples/guide."""
    if (found := {name: version(name).partition("+")[0] for name in MADE_WITH}) != MADE_WITH:
        pytest.skip(f"the picture is of {MADE_WITH}, and here are {found}")
    (tmp_path / "models.py").write_text(LLAMA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "models", sys)  # so that tests/models.py, if others have it, is there again afterwards
    del sys.modules["models"]
    readme = (GUIDE.parents[1] / "README.md").read_text()
    (command,) = re.findall(r"^python -m funshard (plan .*)$", readme, re.MULTILINE)
    assert "](examples/guide/plan.svg)" in readme.partition(command)[0]
    main(shlex.split(command))
    assert (tmp_path / "plan.svg").read_text() == (GUIDE / "plan.svg").read_text()


def test_visualize_many_ranks() -> None:
    model = nn.Linear(64, 64)
    spec = fs.policies.whole()(model).on({"shard": 64})
    text = fs.visualize(fs.shard(model, spec, rank=0), spec)
    assert "... 63" in text
    assert max(map(len, text.splitlines())) <= 80
    with pytest.raises(ValueError, match="unit ''"):
        fs.visualize({"": torch.zeros(3)}, spec)
