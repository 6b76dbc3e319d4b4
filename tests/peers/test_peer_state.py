"""State dicts of models and optimizers: torch's claims, and checkpoints of FSDP and DDP both ways."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import same
from depth import at_most, each, seldom
from parity import average_gradients, numbers, sharded_call, squared
from peer_models import MLP, Net, fsdp1, fsdp2
from ranks import Pool, mesh_of, real_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import funshard as fs
from funshard import P, checkpoint

Trained = tuple[nn.Module, torch.optim.Optimizer, fs.PartitionSpec, fs.Params, Any]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
}


def decayed(name: str, param: Any) -> dict[str, Any]:
    """No decay of biases: two groups in each unit."""
    return {"weight_decay": 0.0} if len(param.shape) < 2 else {}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As torch's users write `decayed`."""
    named = [*model.named_parameters()]
    return [
        {"params": [p for _, p in named if p.dim() >= 2]},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def made(kind: str, spec: fs.PartitionSpec, *, grouped: bool) -> Any:
    cls, defaults = OPTIMIZERS[kind]
    return fs.optim.from_torch(cls, **({"spec": spec, "options": decayed} if grouped else {}), **defaults)


def trained(rank: int, kind: str, policy: Any, *, grouped: bool = False, steps: int = 3) -> Trained:
    """A plain model and its optimizer beside ours, after some steps."""
    model = Net()
    spec = policy(model).bound
    params = fs.shard(model, spec)
    init, update = made(kind, spec, grouped=grouped)
    state = init(params)
    plain = copy.deepcopy(model)
    cls, defaults = OPTIMIZERS[kind]
    theirs = cls(groups_of(plain) if grouped else plain.parameters(), **defaults)
    for i in range(steps):
        params, state = one_step(model, spec, params, state, update, numbers(rank, i))
        plain_step(plain, theirs, numbers(rank, i))
    return plain, theirs, spec, params, state


def one_step(model: nn.Module, spec: fs.PartitionSpec, params: Any, state: Any, update: Any, x: Tensor) -> Any:
    grads = fs.grad(lambda p: squared(sharded_call(model, p, spec), x))(params)
    return update(grads, state, params)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    squared(model, x).backward()
    if not isinstance(model, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
        average_gradients(model)
    optimizer.step()


def exported(kind: str, spec: fs.PartitionSpec, state: Any, *, grouped: bool = False, **how: Any) -> dict[str, Any]:
    cls, defaults = OPTIMIZERS[kind]
    return checkpoint.optimizer_state_dict(state, spec, cls, options=decayed if grouped else None, **how, **defaults)


def alike(got: Any, expected: Any) -> None:
    assert got["state"].keys() == expected["state"].keys()
    for key, slots in got["state"].items():
        wanted = {name: value for name, value in expected["state"][key].items() if value is not None}
        assert slots.keys() == wanted.keys()
        for name, value in slots.items():
            assert_close(value, wanted[name], msg=lambda m, key=key, name=name: f"'{name}' of '{key}': {m}")
    groups = [{frozenset(x["params"]): {**x, "params": None} for x in some["param_groups"]} for some in (got, expected)]
    assert groups[0] == groups[1]


def same_state(got: Any, expected: Any) -> None:
    assert got.keys() == expected.keys()
    for key, slots in got.items():
        same(slots, expected[key])


def without_count(kind: str, state: Any) -> Any:
    """What torch has no name for: SGD with dampening has begun or not, and how often it stepped says nothing more."""
    if kind != "dampening":
        return state
    return {key: {**slots, "step": slots["step"].clamp(max=1)} for key, slots in state.items()}


BLOCKS = fs.by_type(MLP)
WRAPPINGS = {
    "blocks": BLOCKS,
    "whole": fs.policies.whole(),
    "replicated": fs.by_type(MLP, p=P()),
    "end to end": fs.policies.whole(P("shard", align=1)),
}


@at_most(1)
@each(wrapping=WRAPPINGS)
@pytest.mark.parametrize(
    ("grouped", "kind"),
    [pytest.param(*case, marks=[seldom] * (i % 2)) for i, case in enumerate(itertools.product((False, True), OPTIMIZERS))],
)
@real_ranks(2)
def test_optimizer_states_by_names(rank: int, kind: str, wrapping: str, grouped: bool) -> None:
    """Those of the plain model, and its optimizer takes them; so do other wrappings; back, bit for bit."""
    plain, theirs, spec, params, state = trained(rank, kind, WRAPPINGS[wrapping], grouped=grouped)
    full = exported(kind, spec, state, grouped=grouped)
    first = exported(kind, spec, state, grouped=grouped, rank0_only=True, offload_to_cpu=True)
    assert first.keys() == (full.keys() if rank == 0 else set())
    blank = made(kind, spec, grouped=grouped).init(params)
    same_state(checkpoint.from_optimizer_state_dict(full, spec, blank), without_count(kind, state))

    alike(full, get_optimizer_state_dict(plain, theirs))

    cls, defaults = OPTIMIZERS[kind]  # into torch's own, which steps on as ours does
    fresh = copy.deepcopy(plain)
    fresh.load_state_dict(fs.unshard(params, spec))
    loaded = cls(groups_of(fresh) if grouped else fresh.parameters(), **{**defaults, "lr": 1.0})
    set_optimizer_state_dict(fresh, loaded, copy.deepcopy(full))  # torch steps in what it was given
    changed = kind in ("dampening", "NAdam")  # torch has no step of the one, and has changed a dtype of the other
    again = full if changed else get_optimizer_state_dict(fresh, loaded)
    other = WRAPPINGS["whole" if wrapping == "blocks" else "blocks"](plain).bound  # and into another wrapping of ours
    blank = fs.shard(Net(), other, check_values=False)
    init, update = made(kind, other, grouped=grouped)
    found = checkpoint.from_optimizer_state_dict(again, other, init(blank))
    alike_again = exported(kind, other, found, grouped=grouped)["state"]
    assert alike_again.keys() == full["state"].keys()
    for name, slots in full["state"].items():
        same(alike_again[name], slots)
    x = numbers(rank, 7)
    plain_step(fresh, loaded, x)
    moved, _ = one_step(plain, other, fs.reshard(params, spec, other), found, update, x)
    got = fs.unshard(moved, other)
    for name, p in fresh.named_parameters():
        assert_close(got[name], p.detach(), msg=lambda m, name=name: f"'{name}' after a further step: {m}")


def refused(match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ValueError, match=match):
        checkpoint.from_optimizer_state_dict(*args, **kwargs)


def changed(found: Any, name: str, **slots: Any) -> Any:
    """One parameter's state with others in it, or none."""
    state = {key: dict(own) for key, own in found["state"].items()}
    state[name] |= slots
    return {**found, "state": state}


@real_ranks(2)
def test_states_that_do_not_fit_are_refused(rank: int) -> None:
    """On every rank, naming the parameter: FSDP1's "same value and dtype", missing, unknown and misshapen ones."""
    _, _, spec, params, state = trained(rank, "AdamW", BLOCKS, steps=1)
    init, _ = made("AdamW", spec, grouped=False)
    blank, full = init(params), exported("AdamW", spec, state)
    name = "blocks.1.in_proj.weight"
    without = {**full, "state": {key: own for key, own in full["state"].items() if key != name}}
    nowhere = {**without, "param_groups": [{**full["param_groups"][0], "params": ["head.weight"]}]}
    one_step = r"unit 'blocks.1': expected one 'blocks.1\.\S+\.step' for all of its parameters"
    refused(one_step, changed(full, name, step=torch.tensor(9.0)), spec, blank)
    refused(f"tensor '{name}.step': expected .* torch.float32", changed(full, name, step=torch.tensor(1)), spec, blank)
    refused(one_step, without, spec, blank)  # never stepped, as others of its unit were
    refused(f"parameter '{name}' of unit 'blocks.1' has no state and is in no group", nowhere, spec, blank)
    refused(f"tensor '{name}.exp_avg': expected", changed(full, name, exp_avg=torch.zeros(11, 5)), spec, blank)
    refused(f"parameter '{name}': expected a state of", changed(full, name, more=torch.zeros(3)), spec, blank)
    refused("parameter 'x.y' is not in the spec", {**full, "state": {**full["state"], "x.y": {}}}, spec, blank)
    twice = {**full, "state": {**full["state"], f"module.{name}": full["state"][name]}}
    refused(f"parameter '{name}' has two states", twice, spec, blank)
    by_number = torch.optim.AdamW(Net().parameters()).state_dict() | {"state": {0: {}}}
    refused("by parameters' names, got the key 0; .*get_optimizer_state_dict", by_number, spec, blank)
    refused("unit 'x' is not in the spec", full, spec, {**blank, "x": {}})
    part = {key: slots for key, slots in blank.items() if key != "blocks.1"}
    refused("has a state, expected one of those of init_state", full, spec, part)
    on_one_rank = changed(full, name, step=torch.tensor(9.0)) if rank else full
    refused(f"rank 1: .*{one_step}", on_one_rank, spec, blank)

    for other in (state if rank == 0 else {}, {key: {**s, "step": s["step"] + rank} for key, s in state.items()}):
        with pytest.raises(ValueError, match=r"state '[\w.]*': expected the same on all ranks, got on rank 0 "):
            exported("AdamW", spec, other)
    with pytest.raises(ValueError, match="expected this rank's slice"):
        exported("AdamW", spec, {key: {**s, "exp_avg": s["exp_avg"][1:]} for key, s in state.items()})
    with pytest.raises(ValueError, match=r"has the state 'exp_avg', and SGD with these options has \['momentum_buffer'\]"):
        checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)


@real_ranks(2)
def test_what_was_never_stepped(rank: int) -> None:
    """No state at all, none for some units, None, numbers that are no tensors, parameters without gradient."""
    model = Net().requires_grad_(True)
    model.blocks[1].requires_grad_(False)
    spec = BLOCKS(model).bound
    trainable, _ = fs.partition(fs.shard(model, spec), spec)
    init, _ = made("AdamW", spec, grouped=False)
    full = exported("AdamW", spec, init(trainable))
    assert not any(name.startswith("blocks.1") for name in full["param_groups"][0]["params"])
    same_state(checkpoint.from_optimizer_state_dict(full, spec, init(trainable)), init(trainable))
    bare = {"state": {}, "param_groups": full["param_groups"]}  # torch's, before the first step
    same_state(checkpoint.from_optimizer_state_dict(bare, spec, init(trainable)), init(trainable))
    some = {"state": {n: s for n, s in full["state"].items() if n.startswith("blocks.0")}, "param_groups": full["param_groups"]}
    some["state"] = {n: {**s, "step": 4, "exp_avg": s["exp_avg"] + 1} for n, s in some["state"].items()}
    found = checkpoint.from_optimizer_state_dict(some, spec, init(trainable))
    assert {key: float(slots["step"]) for key, slots in found.items()} == {"": 0.0, "blocks.0": 4.0, "blocks.2": 0.0}
    assert bool((fs.unshard({"blocks.0": found["blocks.0"]["exp_avg"]}, spec)["blocks.0.in_proj.bias"] == 1).all())
    init, _ = made("momentum", spec, grouped=False)
    none = {"state": {n: {"momentum_buffer": None} for n in full["state"]}, "param_groups": full["param_groups"]}
    same_state(checkpoint.from_optimizer_state_dict(none, spec, init(trainable)), init(trainable))


# --- checkpoints of torch, both ways ---
FULL = StateDictOptions(full_state_dict=True)
POLICIES = [*WRAPPINGS][:3]
STATES = ("exp_avg", "exp_avg_sq", "step")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own older ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def wrapped(kind: str) -> nn.Module:
    if kind == "fsdp1":
        return fsdp1(Net(), MLP, ShardingStrategy.FULL_SHARD)
    if kind == "ddp":
        return DistributedDataParallel(Net())
    if kind == "hsdp":
        return fsdp2(Net(), MLP, mesh=mesh_of(2, dist.get_world_size() // 2))
    return Net() if kind == "plain" else fsdp2(Net(), MLP)


def state_dict(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What their users save."""
    if kind == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    weights = model.state_dict() if kind == "ddp" else get_model_state_dict(model)  # with the prefixes that it has, or without
    return {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}


def full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)["state"]


SAVED = [(2, kind) for kind in ("fsdp2", "fsdp1", "plain")]
SAVED += [pytest.param(*case, marks=seldom) for case in ((2, "hsdp"), (2, "ddp"), (4, "hsdp"))]


@at_most(1)
@each(policy=POLICIES)
@pytest.mark.parametrize(("ranks", "kind"), SAVED)
@pytest.mark.usefixtures("not_on_worst")  # where torch's FSDP1 asks the group for a device
@real_ranks(lambda ranks: ranks)
def test_what_others_save_is_loaded(rank: int, ranks: int, kind: str, policy: str, tmp_path: Path) -> None:
    """By names: weights, averages and counts bit for bit, and the next step is theirs."""
    folder = f"{tmp_path}/theirs"
    with quiet():
        model = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["AdamW"][1])
        for i in range(2):
            plain_step(model, optimizer, numbers(rank, i))
        saved = state_dict(kind, model, optimizer)
        dcp.save(saved, checkpoint_id=folder)
        weights, states = full_of(model, optimizer)
    spec = WRAPPINGS[policy](Net()).bound
    init, update = made("AdamW", spec, grouped=False)
    blank = fs.shard(Net(), spec)
    if rank == 0:
        checkpoint.from_dcp(folder, f"{folder}/anew")
    dist.barrier()
    folder = f"{folder}/anew"
    params = checkpoint.load(folder, spec, only="model")
    same(fs.unshard(params, spec), weights)
    found = checkpoint.load(folder, spec, like={"model": blank, "optim": {"state": init(blank)}})
    same(fs.unshard(found["model"], spec), weights)
    for name in STATES[:2]:
        ours = {key: slots[name] for key, slots in found["optim"]["state"].items()}
        same(fs.unshard(ours, spec), {key: slots[name] for key, slots in states.items()})
    assert {float(slots["step"]) for slots in found["optim"]["state"].values()} == {2.0}

    x = numbers(rank, 2)
    with quiet():
        plain_step(model, optimizer, x)
        weights, states = full_of(model, optimizer)
    params, state = one_step(Net(), spec, params, found["optim"]["state"], update, x)
    averages = fs.unshard({key: slots["exp_avg"] for key, slots in state.items()}, spec)
    equal = same if ranks == 2 else torch.testing.assert_close  # of four the order of the sum is another
    equal(fs.unshard(params, spec), weights)
    equal(averages, {name: slots["exp_avg"] for name, slots in states.items()})


# --- The other way. ---
def saved_by_us(rank: int, policy: str, folder: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """``(full parameters, full state)`` after two steps."""
    _, _, spec, params, state = trained(rank, "AdamW", WRAPPINGS[policy], steps=2)
    checkpoint.save(folder, {"model": params, "optim": {"state": state}}, spec)
    return fs.unshard(params, spec), exported("AdamW", spec, state)["state"]


def loaded_by_torch(rank: int, kind: str, folder: str, expected: Any) -> None:
    weights, states = expected
    with quiet():
        torch.manual_seed(1)
        model = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["AdamW"][1])
        into = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        groups = into["optim"].pop("param_groups")
        dcp.load(into, checkpoint_id=folder)
        set_model_state_dict(model, into["model"])
        set_optimizer_state_dict(model, optimizer, {**into["optim"], "param_groups": groups})
        got, got_states = full_of(model, optimizer)
    same(got, weights)
    for name in weights:
        same(got_states[name], states[name])


@at_most(1)
@each(policy=POLICIES)
@pytest.mark.parametrize(
    ("ranks", "kind"),
    [*((2, kind) for kind in ("fsdp2", "hsdp", "fsdp1", "ddp", "plain")), pytest.param(4, "fsdp2", marks=seldom)],
)
@pytest.mark.usefixtures("not_on_worst")  # where torch's FSDP1 asks the group for a device
def test_what_is_saved_others_load(gloo2: Pool, gloo4: Pool, ranks: int, kind: str, policy: str, tmp_path: Path) -> None:
    """By two ranks, on as many or on four."""
    expected = gloo2.run(saved_by_us, policy, str(tmp_path / "ours"))[0]
    (gloo2 if ranks == 2 else gloo4).run(loaded_by_torch, kind, str(tmp_path / "ours"), expected)


def test_what_is_saved_becomes_one_file_of_torch(gloo2: Pool, tmp_path: Path) -> None:
    """By torch's own dcp_to_torch_save."""
    weights, states = gloo2.run(saved_by_us, "blocks", str(tmp_path / "ours"))[0]
    with quiet():
        dcp_to_torch_save(tmp_path / "ours", tmp_path / "ours.pt")
    found = torch.load(tmp_path / "ours.pt", weights_only=True)
    model = Net()
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in found.items() if name.startswith("model.")})
    same(dict(model.state_dict()), weights)
    for name, slots in states.items():
        same({slot: found[f"optim.state.{name}.{slot}"] for slot in slots}, slots)
