"""loss_scale beside torch.amp.GradScaler, step by step, and on ranks of which one overflows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from depth import at_most, depth, each
from models import refused
from parity import numbers, same, sharded_call, shards_of, squared
from peer_models import MLP, Net
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import funshard as fs
from funshard import loss_scale as ls

MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
OPTIONS = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}
BAD = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]
"""In which steps a gradient overflows."""
MESHES = {"fsdp": (4,), "hsdp": (2, 2)}
SPEC = fs.policies.whole()(nn.Linear(2, 1, bias=False))


@pytest.mark.parametrize("bad", [-1, 0, 1])
@real_ranks(2)
def test_real_ranks_agree(rank: int, bad: int) -> None:
    """On whether any gradient of any rank is not finite."""
    spec, shards = shards_of(fs.by_path({"0": fs.P("shard"), "1": fs.P()}), MODEL)
    init, update = ls.dynamic(spec, scale=4.0)
    _, state = update({"0": shards["0"] * (math.nan if rank == bad else 1.0), "1": shards["1"]}, init())
    assert bool(state.finite) == (bad < 0)


@at_most(1)
@each(bad=[-1, 0, 2], mesh_name=MESHES)
@real_ranks(4)
def test_gradient_scaler(rank: int, mesh_name: str, bad: int) -> None:
    """Infinity in one rank's slice: every rank skips the step and backs off, as GradScaler beside FSDP2; else all step."""
    shape, mesh = MESHES[mesh_name], mesh_of(*MESHES[mesh_name])
    model = Net(depth(1, 3))
    peer = copy.deepcopy(model)
    for module in (*peer.blocks, peer):
        fully_shard(module, mesh=mesh)
    spec = fs.by_type(MLP)(model).on(mesh)
    init, update = ls.dynamic(spec, scale=8.0, growth_interval=2)
    params, state = fs.shard(model, spec), init()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1)
    scales = []
    for step in range(4):
        x = numbers(rank, step)
        optimizer.zero_grad()
        scaler.scale(squared(peer, x)).backward()
        now = state
        scaled = fs.grad(lambda p: now.scale * squared(sharded_call(model, p, spec), x))(params)
        if step == 1 and rank == bad:
            scaled["blocks.0"][0] = math.inf
        if step == 1 and bad >= 0 and rank % shape[-1] == bad % shape[-1]:  # FSDP2's replicas do not ask each other
            peer.blocks[0].in_proj.weight.grad.to_local()[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        grads, state = update(scaled, state)
        finite = state.finite
        assert finite == (step != 1 or bad < 0)  # on every rank
        before = params
        params = ls.select(finite, {key: p - 0.1 * grads[key] for key, p in params.items()}, params)
        assert all(torch.equal(params[key], p) for key, p in before.items()) == (not finite)
        assert state.scale == scaler.get_scale()
        scales.append(state.scale.item())
        same(fs.unshard(params, spec), {name: p.full_tensor() for name, p in peer.named_parameters()}, "parameters")
    assert scales == ([8, 16, 16, 32] if bad < 0 else [8, 4, 4, 8])


@real_ranks(2)
def test_ddp_parity_with_grad_scaler(rank: int) -> None:
    """One-element layers, of which a rank owns none: it learns of the other's infinity, as DDP does."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
    spec = fs.policies.always()(model).bound
    peer = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    init, update = ls.dynamic(spec, scale=8.0, **OPTIONS)
    params, state = fs.shard(model, spec), init()
    assert [piece.numel() for piece in fs.param_views(params, spec).values()] == [1 - rank] * 2  # the other rank owns nothing
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, **OPTIONS)
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1)
    for step, bad in enumerate(BAD):
        x = numbers(rank, step, 1)
        factor = math.inf if bad and rank == step % 2 else 1.0
        optimizer.zero_grad()
        scaler.scale(squared(peer, x) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        now = state
        scaled = fs.grad(lambda p: now.scale * squared(sharded_call(model, p, spec), x) * factor)(params)
        grads, state = update(scaled, state)
        assert state.finite == (not bad)
        params = ls.select(state.finite, {key: p - 0.1 * grads[key] for key, p in params.items()}, params)
        assert (state.scale, state.good_steps) == (scaler.get_scale(), scaler.state_dict()["_growth_tracker"])
        expected = {name.removeprefix("module."): p.detach() for name, p in peer.named_parameters()}
        same(fs.unshard(params, spec), expected, "parameters")


def test_dtypes() -> None:
    """Gradients keep theirs; those of float16 overflow neither on the way nor by a larger scale."""
    init, update = ls.dynamic(SPEC)
    grads, state = update({"": torch.tensor([65504.0, 2.0**-8], dtype=torch.float16)}, init())
    assert state.finite
    assert_close(grads[""], torch.tensor([65504 / 2**16, 2.0**-24], dtype=torch.float16), rtol=0, atol=0)
    assert update({}, init())[1].finite
    state = ls.LossScale(torch.tensor(3e38), torch.tensor(0, dtype=torch.int32))
    _, state = ls.dynamic(SPEC, growth_interval=1)[1]({"": torch.ones(2)}, state)
    assert (state.scale, state.good_steps) == (torch.tensor(3e38), 0)


def test_state_is_a_pytree_for_compiled_and_vmapped_loops() -> None:
    """Nothing in a step looks at values."""
    init, update = ls.dynamic(SPEC, scale=8.0, **OPTIONS)

    def run(grads: Tensor) -> ls.LossScale:
        state = init()
        for i in range(len(BAD)):
            _, state = update({"": grads[i]}, state)
        return state

    good = torch.where(torch.tensor(BAD) == 0, 1.0, math.inf)[:, None].expand(-1, 2)
    each = torch.vmap(run)(torch.stack([good, 1 / (good - 1)]))
    for i, grads in enumerate((good, 1 / (good - 1))):
        assert_close(tuple(part[i] for part in each), tuple(run(grads)))
        assert_close(tuple(torch.compile(run, fullgraph=True, backend="eager")(grads)), tuple(run(grads)))


def test_it_is_a_link_of_a_chain() -> None:
    """Before what skips a step: a bad one changes the scale alone."""
    init, update = fs.optim.chain(ls.dynamic(SPEC, scale=4.0), fs.optim.apply_if_finite(SPEC), fs.optim.sgd(1.0))
    params = {"": torch.zeros(2)}
    state = init(params)
    params, state = update({"": torch.tensor([4.0, 8.0])}, state, params)
    assert_close(params[""], torch.tensor([-1.0, -2.0]))
    after, state = update({"": torch.tensor([math.nan, 8.0])}, state, params)
    assert torch.equal(after[""], params[""])
    assert (state[0].scale, bool(state[0].finite)) == (2, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ls.dynamic(SPEC, scale=0.0), "expected scale > 0 .* got 0.0"),
        (lambda: ls.dynamic(SPEC, growth_factor=1.0), "growth_factor > 1.* got 65536.0, 1.0"),
        (lambda: ls.dynamic(SPEC, growth_interval=0), "growth_interval >= 1.* and 0"),
        (lambda: ls.dynamic(SPEC, scale=torch.inf), "expected scale > 0 in float32, .* got inf"),
        (lambda: ls.select(torch.tensor(True), {"a": torch.ones(1)}, {"b": torch.ones(1)}), "keys|Node|mismatch"),
    ],
    ids=["scale", "growth", "interval", "infinite", "trees"],
)
def test_errors(call: Any, message: str) -> None:
    refused(ValueError, message, call)
