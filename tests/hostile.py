"""Checkpoints to be damaged, and what a file could have changed in the process that reads it."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import save as torch_save

import funshard as fs
from funshard import checkpoint
from funshard.checkpoint._directory import checksum


def made() -> tuple[nn.Module, fs.PartitionSpec]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return model, fs.by_type(nn.Linear)(model)


def save(path: Path) -> dict[str, Any]:
    """By us, with every kind of leaf."""
    model, spec = made()
    params = fs.shard(model, spec)
    init, _ = fs.optim.from_torch(torch.optim.AdamW, lr=0.1)
    more = {"dtype": torch.bfloat16, "bytes": b"b", "list": [1, (2.5, None)], "tensor": torch.arange(3)}
    state = {"params": params, "opt": init(params), **more}
    checkpoint.save(path, state, spec)
    return state


def set_manifest(path: Path, text: str) -> None:
    """This content, under a good checksum."""
    (path / "funshard.json").write_text(json.dumps({"content": text, "crc32": checksum(text.encode("utf-8", "replace"))}))


def change_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(json.loads((path / "funshard.json").read_text())["content"])
    set_manifest(path, json.dumps(changed if isinstance(changed := change(content), list) else content))


def theirs(path: Path) -> dict[str, torch.Tensor]:
    """By torch.distributed.checkpoint, without anybody's checksum of its description."""
    model, _ = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is one process
        torch_save({"model": model.state_dict(), "plain": [1, {"a": "b"}]}, checkpoint_id=path)
    return {name: p.detach() for name, p in model.named_parameters()}


def process_state() -> list[Any]:
    """What a pickle could have changed: attributes of classes and functions that files name."""
    kinds = [getattr(dcp, name) for name in dir(dcp) if isinstance(getattr(dcp, name), type)]
    kinds += [*pathlib.PurePath.__subclasses__(), pathlib.PurePath, OrderedDict, torch.Size, torch.dtype]
    functions = [torch.serialization._get_layout, getattr, torch._utils._rebuild_tensor_v2]
    return [dict(vars(kind)) for kind in kinds] + [getattr(function, "__defaults__", None) for function in functions]
