"""Local units together with the options of P and of a call, on four ranks: each combination has the exact gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from depth import at_most, depth, each, seldom
from ranks import Pool
from test_local_training import MESHES, Rank, Tree, norm
from torch import Tensor

import funshard as fs

OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"axis": "shard"},
    "replicated": {"axis": None},
    "kept": {"axis": "shard", "reshard": False},
    "remat": {"axis": "shard", "remat": True},
    "params on the host": {"axis": "shard", "offload": "params"},
    "activations on the host": {"axis": "shard", "offload": "activations"},
    "compiled": {"axis": "shard", "compile": depth(fs.Compile(backend="aot_eager"), True)},
    "bf16": {"axis": "shard", "precision": fs.Precision(param=torch.bfloat16, reduce=torch.float32)},
    "fp16": {"axis": "shard", "precision": fs.Precision(param=torch.float16)},
    "summed in bf16": {"axis": "shard", "precision": fs.Precision(reduce=torch.bfloat16)},
}
TOLERANCES = {"bf16": 0.1, "fp16": 0.01, "summed in bf16": 0.03}
"""Of the whole gradient's norm, for options that round."""


def by_grad(case: Rank) -> Tree:
    return fs.grad(case.loss)(case.params, case.x[0])


def by_autograd(case: Rank) -> Tree:
    params = {key: p.clone().requires_grad_() for key, p in case.params.items()}
    case.loss(params, case.x[0]).backward()
    return {key: p.grad for key, p in params.items() if p.grad is not None}


def by_compiled_step(case: Rank) -> Tree:
    return fs.compile(lambda params, x: fs.grad(case.loss)(params, x), backend="aot_eager")(case.params, case.x[0])


def by_accumulation(case: Rank) -> Tree:
    return fs.accumulate(case.loss, case.params, [case.x[0], case.x[0]], spec=case.spec)[0]


def under_vmap(case: Rank) -> Tree:
    """Of two copies of the parameters, the second one's."""

    def scaled(scale: Tensor) -> Tree:
        return fs.grad(case.loss)({key: p * scale for key, p in case.params.items()}, case.x[0])

    return {key: g[1] for key, g in torch.vmap(scaled)(torch.tensor([0.5, 1.0], dtype=torch.float64)).items()}


WAYS = {
    "grad": by_grad,
    "autograd": by_autograd,
    "compile": by_compiled_step,
    "accumulate": by_accumulation,
    "vmap": under_vmap,
}


def run(rank: int, sizes: dict[str, int], option: str, way: str) -> None:
    case = Rank(rank, sizes, OPTIONS[option])
    case.xs = case.xs[:, :1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own while it compiles
        grads = WAYS[way](case)
    want = case.expected()
    if option not in TOLERANCES:
        case.check(grads, want)
    found = fs.unshard(grads, case.spec)
    error = torch.stack([(found[name].double() - g).norm() for name, g in want.items()]).norm() / norm(want)
    assert error < TOLERANCES.get(option, 1e-9)
    length = fs.optim.global_norm(grads, case.spec)
    torch.testing.assert_close(length.double(), torch.stack([g.double().norm() for g in found.values()]).norm())


@at_most(1)
@each(way=[pytest.param(way, marks=[seldom] if way == "compile" else []) for way in WAYS], option=OPTIONS, sizes=MESHES)
def test_every_option(gloo4: Pool, sizes: dict[str, int], option: str, way: str) -> None:
    gloo4.run(run, {"shard": 1, **sizes} if OPTIONS[option]["axis"] else sizes, option, way)
