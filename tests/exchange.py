"""Save checkpoints in one environment and load them in another, of other versions of Python and torch.

python tests/exchange.py save DIRECTORY
python tests/exchange.py load DIRECTORY [DIRECTORY ...]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import funshard as fs

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}


def build_model() -> nn.Module:
    """Return a model with values that no random generator decides, in two dtypes."""
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3).bfloat16())
    for i, p in enumerate(model.parameters()):
        p.data = (torch.arange(p.numel()).view(p.shape) - i).to(p.dtype) / 64
    return model


def build_state(spec: fs.PartitionSpec) -> dict[str, Any]:
    """Return parameters after an exact step of plain SGD with momentum, and other things that a loop saves."""
    params = fs.shard(build_model(), spec)
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.5)
    params, state = update({key: p.clone() for key, p in params.items()}, init(params), params)
    rest = {"step": 7, "losses": [1.5, 0.25], "seen": (3, "text"), "scale": torch.tensor(2.0)}
    return {"params": params, "state": state, **rest}


def train_with_torch() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def save(folder: Path) -> None:
    """Save a state with funshard, the same parameters as safetensors, and a training of torch's own with DCP."""
    spec = fs.by_type(nn.Linear)(build_model())
    state = build_state(spec)
    fs.checkpoint.save(folder / "funshard", state, spec)
    fs.checkpoint.export(folder / "exported", state["params"], spec)
    model, optimizer = train_with_torch()
    own = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is no process group
        dcp.save(own, checkpoint_id=folder / "dcp")
    fs.checkpoint.from_dcp(folder / "dcp", folder / "anew")  # by the Python that wrote it


def load(folder: Path) -> None:
    """Load them under another policy; AssertionError unless they have the values that `save` gave them."""
    spec = fs.policies.whole()(build_model())
    expected = build_state(spec)
    got = fs.checkpoint.load(folder / "funshard", spec)
    assert [got.pop(key) for key in ("step", "losses", "seen")] == [expected.pop(key) for key in ("step", "losses", "seen")]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    full = fs.unshard(expected["params"], spec)
    exported = fs.unshard(fs.checkpoint.read_safetensors(folder / "exported", spec), spec)
    torch.testing.assert_close(exported, full, rtol=0, atol=0)
    model, optimizer = train_with_torch()
    blank = fs.shard(build_model(), spec)
    init, _ = fs.optim.from_torch(torch.optim.AdamW, **OPTIONS)
    found = fs.checkpoint.load(folder / "anew", spec, like={"model": blank, "optim": {"state": init(blank)}})
    torch.testing.assert_close(fs.unshard(found["model"], spec), dict(model.named_parameters()), rtol=1e-2, atol=1e-6)
    averages = {key: slots["exp_avg"] for key, slots in found["optim"]["state"].items()}
    states = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    torch.testing.assert_close(fs.unshard(averages, spec), states, rtol=1e-2, atol=1e-6)


if __name__ == "__main__":
    for folder in sys.argv[2:]:
        {"save": save, "load": load}[sys.argv[1]](Path(folder))
    print(f"{sys.argv[1]}: Python {sys.version.split()[0]}, torch {torch.__version__}")
