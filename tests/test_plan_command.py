"""python -m funshard plan, the picture of a plan, and fs.visualize."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import funshard as fs
from funshard._plan.command import main

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
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a callable that returns a model, in a module of its own."""
    (tmp_path / "planned_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)
    return "planned_model:make"


def test_json_is_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those of fs.plan for the same model, policy and mesh."""
    assert main(["plan", model, "--policy", "by_type:Block", "--mesh", "replicate=2,shard=4", "--tokens", "64", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["plan"]
    module = sys.modules["planned_model"]
    spec = fs.by_type(module.Block)(module.make()).on({"replicate": 2, "shard": 4})
    assert figures == json.loads(json.dumps(fs.plan(spec, batch=64).to_json()))


def test_batch_compare_and_fit(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a batch activations are counted, choices compared and searched, and a picture is drawn."""
    options = ["--policy", "by_type:Block", "--mesh", "shard=2", "--batch", "4x8", "--svg", "plan.svg"]
    assert main(["plan", model, *options, "--compare", 'P("shard", remat=True)', "--fit", "1GB"]) == 0
    table = capsys.readouterr().out
    assert "activations" in table
    assert 'P("shard", remat=True)' in table
    assert "replicated" not in table
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.tag == f"{SVG}svg"


def test_as_a_module(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "funshard", "plan", model, "--mesh", "shard=4"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "by_type:Blok"], "has no module of type 'Blok'"),
        (["--mesh", "shard"], "--mesh: expected axes and sizes"),
        (["--p", "3"], "expected a P"),
        (["--batch", "4,8"], "--batch: expected a shape"),
        (["--fit", "1GB"], "activations are not counted"),
    ],
)
def test_wrong_options(model: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, *options]) == 2
    assert words in capsys.readouterr().err


def test_picture() -> None:
    """Areas for what is held, a box for every slice and its padding to scale, and the streams, inside of the picture."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    plan = fs.plan(fs.by_type(nn.Linear)(module).on({"shard": 3}), batch=16)
    root = ElementTree.fromstring(plan.to_svg())
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    held = {name for held in plan.peaks.values() for name, size in held.items() if size}
    assert len(root.findall(f"{SVG}polygon")) == len(held)
    for rect in root.findall(f"{SVG}rect")[1:]:
        assert 0 <= float(rect.attrib["x"]) <= width
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 1
        assert float(rect.attrib["y"]) <= height
    boxes = [r for r in root.findall(f"{SVG}rect") if (t := r.find(f"{SVG}title")) is not None and "elements" in (t.text or "")]
    hatched = sum(float(r.attrib["width"]) for r in boxes if "padding" in r.attrib["fill"])
    everything = sum(float(r.attrib["width"]) for r in boxes)
    numel = sum(unit.numel for unit in plan.units.values())
    assert hatched / everything == pytest.approx(plan.padding / (plan.padding + numel), abs=1e-3)
    words = " ".join(text.text or "" for text in root.findall(f"{SVG}text"))
    assert "rank 2" in words
    assert "forward" in words


def test_visualize_many_ranks() -> None:
    model = nn.Linear(64, 64)
    spec = fs.policies.whole()(model).on({"shard": 64})
    text = fs.visualize(fs.shard(model, spec, rank=0), spec)
    assert "... 63" in text
    assert max(map(len, text.splitlines())) <= 80
    with pytest.raises(ValueError, match="unit ''"):
        fs.visualize({"": torch.zeros(3)}, spec)
