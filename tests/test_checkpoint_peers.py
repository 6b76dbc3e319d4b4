"""Checkpoints from and for others: what FSDP1, FSDP2 and DDP save is loaded, and they load what we save, bit for bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from depth import at_most, each, mark_seldom, seldom
from parity import numbers, sharded_call, squared
from peer_models import MLP, Net
from ranks import Pool
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import funshard as fs
from funshard import P, checkpoint

FULL = StateDictOptions(full_state_dict=True)
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
POLICIES = {
    "blocks": lambda: fs.by_type(MLP)(Net()),
    "whole": lambda: fs.policies.whole()(Net()),
    "replicated": lambda: fs.by_type(MLP, p=P())(Net()),
}
STATES = ("exp_avg", "exp_avg_sq", "step")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own older ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sharded_by_fsdp2(mesh: Any = None) -> nn.Module:
    model = Net()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(kind: str) -> nn.Module:
    world = dist.get_world_size()
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy({MLP}), use_orig_params=True, device_id=torch.device("cpu")
        )
    if kind == "ddp":
        return DistributedDataParallel(Net())
    if kind == "hsdp":
        return sharded_by_fsdp2(init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    if kind == "checkpointed":
        model = Net()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = fully_shard(checkpoint_wrapper(block))
        return fully_shard(model)
    if kind == "plain":
        return Net()
    return sharded_by_fsdp2()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    squared(model, x).backward()
    if not isinstance(model, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()


def state_dict(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What their users save."""
    if kind == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    if kind == "compiled":
        return {"model": torch.compile(model).state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    if kind in ("ddp", "checkpointed"):  # with the prefixes that they have
        return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)["state"]


def alike(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].dtype == expected[name].dtype
        assert torch.equal(got[name], expected[name]), name


def loaded_by_us(rank: int, kind: str, policy: str, folder: str) -> None:
    with quiet():
        model = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        for i in range(2):
            step(model, optimizer, numbers(rank, i))
        saved = state_dict(kind, model, optimizer)
        dcp.save(saved, checkpoint_id=folder)
        weights, states = full_of(model, optimizer)
    if rank == 0:
        checkpoint.from_dcp(folder, f"{folder}/anew")
    dist.barrier()
    folder = f"{folder}/anew"
    spec = POLICIES[policy]()
    init, update = fs.optim.from_torch(torch.optim.AdamW, **OPTIONS)
    blank = fs.shard(Net(), spec)
    params = checkpoint.load(folder, spec, only="model")
    alike(fs.unshard(params, spec), weights)
    found = checkpoint.load(folder, spec, like={"model": blank, "optim": {"state": init(blank)}})
    alike(fs.unshard(found["model"], spec), weights)
    for name in STATES[:2]:
        ours = {key: slots[name] for key, slots in found["optim"]["state"].items()}
        alike(fs.unshard(ours, spec), {key: slots[name] for key, slots in states.items()})
    assert {float(slots["step"]) for slots in found["optim"]["state"].values()} == {2.0}

    x = numbers(rank, 2)
    with quiet():
        step(model, optimizer, x)
        weights, states = full_of(model, optimizer)
    grads = fs.grad(lambda p: squared(sharded_call(Net(), p, spec), x))(params)
    params, state = update(grads, found["optim"]["state"], params)
    averages = fs.unshard({key: slots["exp_avg"] for key, slots in state.items()}, spec)
    same = alike if dist.get_world_size() == 2 else torch.testing.assert_close  # of four the order of the sum is another
    same(fs.unshard(params, spec), weights)
    same(averages, {name: slots["exp_avg"] for name, slots in states.items()})


KINDS = ["fsdp2", "hsdp", "fsdp1", "ddp", "compiled", "checkpointed", "plain"]


@at_most(1)
@each
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", mark_seldom(KINDS, *[*KINDS][::2]))
@pytest.mark.usefixtures("not_on_worst")  # where torch's FSDP1 asks the group for a device
def test_what_others_save_is_loaded(gloo2: Pool, kind: str, policy: str, tmp_path: Path) -> None:
    """By names: weights, averages and counts bit for bit, and the next step is theirs."""
    gloo2.run(loaded_by_us, kind, policy, str(tmp_path / "theirs"))


@seldom
def test_what_hsdp_saves_is_loaded_on_four_ranks(gloo4: Pool, tmp_path: Path) -> None:
    gloo4.run(loaded_by_us, "hsdp", "blocks", str(tmp_path / "theirs"))


# --- The other way. ---


def saved_by_us(rank: int, policy: str, folder: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """``(full parameters, full state)`` after two steps."""
    spec = POLICIES[policy]()
    model = Net()
    params = fs.shard(model, spec)
    init, update = fs.optim.from_torch(torch.optim.AdamW, **OPTIONS)
    state = init(params)
    for i in range(2):
        grads = fs.grad(lambda p, i=i: squared(sharded_call(model, p, spec), numbers(rank, i)))(params)
        params, state = update(grads, state, params)
    checkpoint.save(folder, {"model": params, "optim": {"state": state}}, spec)
    return fs.unshard(params, spec), checkpoint.optimizer_state_dict(state, spec, torch.optim.AdamW, **OPTIONS)["state"]


def loaded_by_torch(rank: int, kind: str, folder: str, expected: Any) -> None:
    weights, states = expected
    with quiet():
        torch.manual_seed(1)
        model = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        into = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        groups = into["optim"].pop("param_groups")
        dcp.load(into, checkpoint_id=folder)
        set_model_state_dict(model, into["model"])
        set_optimizer_state_dict(model, optimizer, {**into["optim"], "param_groups": groups})
        got, got_states = full_of(model, optimizer)
    alike(got, weights)
    for name in weights:
        alike(got_states[name], states[name])


@at_most(1)
@each
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "fsdp1", "ddp", "plain"])
@pytest.mark.usefixtures("not_on_worst")  # where torch's FSDP1 asks the group for a device
def test_what_is_saved_others_load(gloo2: Pool, kind: str, policy: str, tmp_path: Path) -> None:
    expected = gloo2.run(saved_by_us, policy, str(tmp_path / "ours"))[0]
    gloo2.run(loaded_by_torch, kind, str(tmp_path / "ours"), expected)


@seldom
def test_what_two_ranks_save_fsdp2_loads_on_four(gloo2: Pool, gloo4: Pool, tmp_path: Path) -> None:
    expected = gloo2.run(saved_by_us, "blocks", str(tmp_path / "ours"))[0]
    gloo4.run(loaded_by_torch, "fsdp2", str(tmp_path / "ours"), expected)


def test_what_is_saved_becomes_one_file_of_torch(gloo2: Pool, tmp_path: Path) -> None:
    """By torch's own dcp_to_torch_save."""
    weights, states = gloo2.run(saved_by_us, "blocks", str(tmp_path / "ours"))[0]
    with quiet():
        dcp_to_torch_save(tmp_path / "ours", tmp_path / "ours.pt")
    found = torch.load(tmp_path / "ours.pt", weights_only=True)
    model = Net()
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in found.items() if name.startswith("model.")})
    alike(dict(model.state_dict()), weights)
    for name, slots in states.items():
        alike({slot: found[f"optim.state.{name}.{slot}"] for slot in slots}, slots)
