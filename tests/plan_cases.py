"""Models, training steps and choices of P whose planned peaks are compared with measured ones."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import funshard as fs

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(folder: Path, name: str) -> Any:
    """A module of a folder of scripts, which import each other by their names."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


common, measured, moe = (
    load(EXAMPLES / "benchmarks", "common"),
    load(EXAMPLES / "benchmarks", "measured"),
    load(EXAMPLES, "moe"),
)
P = fs.P
BF16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
MIXED = fs.Precision(param=torch.bfloat16, reduce=torch.float32, keep={"*norm*": torch.float32})
BATCH = 4, 64


class Case(NamedTuple):
    """A model, its policy with these options of P, and the value of its loss."""

    make: Callable[[], nn.Module]
    policy: Callable[[P], fs.Policy]
    value: Callable[[nn.Module, fs.Params, tuple[Tensor, ...], fs.PartitionSpec], Tensor]
    plain_value: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    """The same value by a call of the model itself."""


def gpt_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    return common.loss_of(fs.functional_call(model, params, (batch[0],), spec=spec), batch[1])


def llama_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    inputs = {"input_ids": batch[0], "labels": batch[1], "use_cache": False}
    return fs.functional_call(model, params, (), inputs, spec=spec).loss


def moe_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    return fs.functional_call(model, params, (*batch, spec.bound_mesh, 0.01), spec=spec)


def make_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def moe_policy(p: P) -> fs.Policy:
    """Experts as units of their own. The mesh needs no axis for them, of which each rank has all."""
    return fs.policies.by_path({"blocks.*": p, "blocks.*.experts": p}, p)


CASES = {
    "gpt": Case(
        lambda: common.GPT(6, 128, 2, 64),
        lambda p: fs.by_type(common.Block, p=p),
        gpt_value,
        lambda model, batch: common.loss_of(model(batch[0]), batch[1]),
    ),
    "llama": Case(
        make_llama,
        lambda p: fs.by_type(LlamaDecoderLayer, p=p),
        llama_value,
        lambda model, batch: model(input_ids=batch[0], labels=batch[1], use_cache=False).loss,
    ),
    "moe": Case(
        lambda: moe.MoE(2, 64, 4, 64, 128, 8), moe_policy, moe_value, lambda model, batch: model(*batch, moe.ALONE, 0.01)
    ),
}


def optimizer_of(name: str) -> Any:
    if name == "sgd":
        return fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    return fs.optim.from_torch(torch.optim.AdamW, lr=1e-3, fused=name == "donate", donate=name == "donate")


def step_of(case: Case, model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    def step(params: fs.Params, state: Any, batch: Any, *, spec: fs.PartitionSpec) -> Any:
        grads, value = fs.grad_and_value(lambda p: case.value(model, p, batch, spec))(params)
        params, state = optimizer.update(grads, state, params)
        return params, state, grads, value

    return step


def measured_peak(case: Case, p: P, optimizer: Any, mesh: dict[str, int], batch: tuple[Tensor, ...]) -> int:
    """The most bytes that a step's tensors hold, by the profiler, on a process group in name only."""

    def build(model: nn.Module) -> Any:
        spec = case.policy(p)(model).on(init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)))
        trees = [fs.shard(model, spec), None]
        trees[1] = optimizer.init(trees[0])
        step = step_of(case, fs.skeleton(model), optimizer)

        def run(*batch: Tensor) -> None:
            trees[0], trees[1], *_ = step(*trees, batch, spec=spec)

        return run

    mesh = {"expert": 1, **mesh} if case.value is moe_value else mesh
    with common.fake_world(math.prod(mesh.values())):
        return measured.peak_bytes(build, case.make, batch)


def planned(case: Case, p: P, optimizer: Any, mesh: dict[str, int], batch: tuple[Tensor, ...]) -> fs._plan.plan.Plan:
    model = case.make()
    spec = case.policy(p)(model).on({"expert": 1, **mesh} if case.value is moe_value else mesh)
    return fs.plan(spec, batch=batch, step=step_of(case, fs.skeleton(model), optimizer), optimizer=optimizer)
