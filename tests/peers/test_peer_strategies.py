"""Some AdamW steps of a small GPT on four real ranks: FSDP2's and DDP's of the same mesh and precision."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, depth, each, every, mark_seldom
from parity import MAIN_WAYS, WAYS, next_token, numbers, same, sharded_call, shards_of, squared_loss, step_with, tokens
from peer_models import MLP, Block, Net, Transformer, chain, frozen, fsdp2
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import funshard as fs
from funshard import P, Precision, _torch
from funshard.collectives import Axis, Mesh, all_to_all

BF16, F32 = torch.bfloat16, torch.float32
STEPS = depth(2, 3)


def gpt() -> Transformer:
    torch.manual_seed(0)
    return Transformer(depth(2, 3), 23, 18).float()


def loss_of(call: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    return next_token(lambda ids: call(ids).float(), tokens(rank, step, 23))


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def check(rank: int, reference: nn.Module, policy: fs.Policy, mesh_name: str, rounding: float = 0) -> None:
    """Losses and parameters of our training beside those of a module that reduces its gradients by itself.

    Parameters are equal but for float32, and on average but for ``rounding``: Adam makes a step of that of a small gradient.
    """
    model, theirs = gpt(), adamw(reference.parameters())
    spec, params = shards_of(policy, model, mesh_of(*MESHES[mesh_name]))
    ours = adamw(params.values())
    for step in range(STEPS):
        loss = loss_of(reference, rank, step)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        grads, value = fs.grad_and_value(lambda p: loss_of(sharded_call(model, p, spec), rank, step))(params)
        assert {key: g.dtype for key, g in grads.items()} == {key: p.dtype for key, p in params.items()}
        step_with(grads, params, ours)
        assert_close(value, loss.detach(), rtol=0, atol=20 * rounding or 1e-5, check_dtype=False)
    got = fs.unshard(params, spec)
    named = ((name.removeprefix("module."), p) for name, p in reference.named_parameters())
    expected = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}
    difference = torch.cat([(got[name] - p).abs().flatten() for name, p in expected.items()])
    assert difference.max() < 1e-5 or 0 < difference.mean() < rounding, (difference.mean(), difference.max())


PRECISIONS: dict[str, tuple[Precision | None, MixedPrecisionPolicy, float]] = {
    "float32": (None, MixedPrecisionPolicy(), 0),
    "bf16": (Precision(param=BF16), MixedPrecisionPolicy(BF16, BF16), 1e-4),
    "bf16, reduced in float32": (Precision(param=BF16, reduce=F32), MixedPrecisionPolicy(BF16, F32), 0),
    "float32, reduced in bf16": (Precision(reduce=BF16), MixedPrecisionPolicy(reduce_dtype=BF16), 1e-4),
    "bf16, output in float32": (Precision(param=BF16, reduce=F32, output=F32), MixedPrecisionPolicy(BF16, F32, F32), 0),
}
MESHES = {"fsdp": (4,), "hsdp": (2, 2)}


@at_most(2)
@each(name=mark_seldom(PRECISIONS, *[*PRECISIONS][:3]), reshard=[True, False], mesh_name=MESHES)
@real_ranks(4)
def test_fsdp2(rank: int, mesh_name: str, name: str, reshard: bool) -> None:
    """fully_shard on the blocks and the root."""
    precision, policy, rounding = PRECISIONS[name]
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
    options = {"mesh": mesh_of(*MESHES[mesh_name]), "mp_policy": policy, "reshard_after_forward": reshard}
    reference = fsdp2(gpt(), Block, of_blocks={"mp_policy": inner}, **options)
    p = P("shard", reshard=reshard, precision=precision)
    blocks = dataclasses.replace(p, precision=precision and dataclasses.replace(precision, output=None))
    ours = fs.policies.override(fs.policies.whole(p), fs.by_path({"layers.*": blocks}))
    check(rank, reference, ours, mesh_name, rounding)


@pytest.mark.parametrize("mesh_name", MESHES)
@real_ranks(4)
def test_ddp(rank: int, mesh_name: str) -> None:
    """P() over one axis or over two."""
    check(rank, nn.parallel.DistributedDataParallel(gpt()), fs.by_type(Block, p=P()), mesh_name)


# --- a gather and a reduction of your own ---
def own_gather(shard: Tensor, axis: Axis) -> Tensor:
    """Every rank sends its slice to each: an all-to-all, whose transpose is a reduction by all-to-all."""
    return all_to_all(shard.repeat(axis.size), axis)


@real_ranks(4)
def test_set_custom_all_gather_and_reduce_scatter(rank: int) -> None:
    """Your own differentiable gather replaces the default, both ways; so does your own reduction of full gradients."""
    model, x = chain(), numbers(rank, 0)
    spec = fs.by_type(MLP)(model).bound
    axis = Mesh.world()["shard"]
    params = fs.shard(model, spec)
    default, value = fs.grad_and_value(squared_loss(model, spec, x))(params)

    def through(params: fs.Params) -> Tensor:
        full = fs.unflatten({key: own_gather(shard, axis) for key, shard in params.items()}, spec)
        return squared_loss(model, spec, x)(full) / axis.size

    for way in MAIN_WAYS:
        with Collectives() as sent:
            grads, loss = WAYS[way](through)(params)
        assert Counter(s.op for s in sent.all) == {"all_to_all_single": 6}  # three units, there and back
        assert_close(loss * axis.size, value)
        same(grads, default, way)

    full = fs.unflatten({key: own_gather(shard, axis) for key, shard in params.items()}, spec)
    with Collectives() as sent:
        own = fs.grad(squared_loss(model, spec, x))(full)
    assert not sent.all
    exchanged = {key: all_to_all(buffer, axis).view(axis.size, -1).sum(0) for key, buffer in fs.flatten(own, spec).items()}
    reduced = {key: buffer / axis.size for key, buffer in exchanged.items()}  # the ranks' sum of this one's slice
    same(reduced, default, "reduced by hand")


# --- no copy where there is nothing to gather ---
storage = _torch.storage_id
"""An address is for those who may write to it: copies on write are made for them."""


class Seeing(Net):
    """Notes where the weights are that forward computes with."""

    def __init__(self, seen: list[tuple[str, int]]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [(name, storage(p)) for name, p in self.named_parameters()]
        return super().forward(x)


WITHOUT_COPY: dict[str, tuple[int, Callable[[], P]]] = {
    "one rank": (1, lambda: P("shard")),
    "one rank, kept": (1, lambda: P("shard", reshard=False)),
    "replicated": (8, P),
}


@every(trained=[False, True], where=WITHOUT_COPY)
def test_unsharded_views(where: str, trained: bool) -> None:
    """What one rank has whole, uncast, is computed with where it is: parameters are views of the shard; unshard copies."""
    size, p = WITHOUT_COPY[where]
    seen: list[tuple[str, int]] = []
    model = Seeing(seen)
    if not trained:
        frozen(model, "")
    with world(size):
        spec, params = shards_of(fs.by_type(MLP, p=p()), model)
        places = {name: storage(params[unit.key]) for name, (unit, _) in spec.by_name.items()}
        copies = {name: storage(t) for name, t in fs.unshard(params, spec).items()}
        assert copies.keys() == places.keys()
        assert not {*copies.values()} & {*places.values()}  # a donated update would change them
        x = numbers(0, 0)
        with torch.no_grad():
            fs.functional_call(model, params, x, spec=spec)
        assert dict(seen) == places
        seen.clear()
        for way in ("fs", "backward"):
            WAYS[way](lambda given: squared_loss(model, spec, given["x"])(params))({"x": x})
        if trained:
            WAYS["fs"](squared_loss(model, spec, x))(params)
        assert set(seen) == set(places.items())
