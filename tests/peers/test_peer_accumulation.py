"""Gradient accumulation: torch's own claims for no_sync and set_requires_gradient_sync, with what is sent.

Micro-batches whose gradients are not to be reduced are differentiated with respect to full parameters, which stand in the
place of their units' shards: neither gathered nor reduced. `reduce_grads` reduces what was added up, once.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from collective_log import Collectives, gathers, reduce, scatters, world
from depth import at_most, depth, each, every
from parity import MAIN_WAYS, STRATEGIES, WAYS, numbers, same, sharded_call, shards_of, squared, step_with
from peer_models import MLP, chain, fsdp2
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P, Precision

F16, F32 = torch.float16, torch.float32
MICRO = 3
ROOT, MLPS = "", ["1", "2", "3"]
MODES: dict[str, list[str]] = {"none": [], "all": [ROOT, *MLPS], "root_only": [ROOT], "some_mlps": MLPS[:2]}
"""The units that are not synchronised before the last micro-batch."""


def sequence() -> nn.Module:
    """A layer that the root owns, and MLPs: the model of torch's test."""
    return nn.Sequential(nn.Linear(5, 5).double(), *chain())


def accumulate(
    model: nn.Module, spec: fs.PartitionSpec, params: fs.Params, batches: list[Tensor], held: list[str], way: str, partial: bool
) -> tuple[fs.Params, list[Tensor], Collectives]:
    """The gradients of micro-batches by unit key, those of the ``held`` units reduced at the end; if ``partial``, the others'
    over replicas at the end as well; the losses; and what was sent, in ``backward`` by the reduction at the end."""
    losses: list[Tensor] = []
    total: fs.Params = {}
    options: dict[str, Any] = {"reduce_axes": ["shard"]} if partial else {}
    with Collectives() as sent:
        given = {key: shard for key, shard in params.items() if key not in held} | fs.unshard(params, spec, units=held)
        for x in batches:
            loss = lambda p: squared(lambda x: fs.functional_call(model, p, x, spec=spec, **options), x)  # noqa: E731
            grads, value = WAYS[way](loss)(given)
            total = {key: total[key] + g if total else g for key, g in grads.items()}
            losses.append(value)
        sent.turn()
        own = {name: g for name, g in total.items() if name not in spec.by_key}
        slices = {key: g for key, g in total.items() if key in spec.by_key}
        if partial:
            slices = fs.reduce_grads(slices, spec, reduce_axes=["replicate"])
        reduced = slices | fs.reduce_grads(own, spec)
    return {unit.key: reduced[unit.key] for unit in spec}, losses, sent


# --- what is sent ---
@at_most(12)
@every(way=MAIN_WAYS, reshard=[True, False], mode=MODES, mesh=[(8,), (2, 4), (4, 2)])
def test_gradient_accumulation_communication_count(mesh: tuple[int, ...], mode: str, reshard: bool, way: str) -> None:
    """A unit that is held is gathered and reduced once, each other one for every micro-batch: torch's formulas for
    reductions, and fewer gathers. Over replicas all at the end on the last mesh."""
    held, partial = MODES[mode], mesh == (4, 2)
    synced = [key for key in (ROOT, *MLPS) if key not in held]
    with world(torch.Size(mesh).numel()):
        model = sequence()
        spec = fs.by_type(MLP, p=P("shard", reshard=reshard))(model).on(mesh_of(*mesh))
        batches = [numbers(0, step) for step in range(MICRO)]
        *_, sent = accumulate(model, spec, fs.shard(model, spec), batches, held, way, partial)
    reduced = lambda *keys: [reduce(spec, key, mesh[0]) for key in keys if len(mesh) == 2]  # noqa: E731
    again = [key for key in synced if key != ROOT][:-1] if reshard else []  # what ran last is still there
    micro = Counter(gathers(spec, *synced) + gathers(spec, *again) + scatters(spec, *synced))
    micro += Counter([] if partial else reduced(*synced))
    end = Counter(scatters(spec, *held) + reduced(*held, *(synced if partial else [])))
    assert Counter(sent.forward) == Counter(gathers(spec, *held) + [*micro.elements()] * MICRO)
    assert Counter(sent.backward) == end
    assert sent.forward[: len(held)] == gathers(spec, *held)


# --- parity ---
@at_most(1)
@each(way=["fs", "torch.func"], reshard=[True, False], mode=MODES)
@pytest.mark.parametrize(("shape", "partial"), [((4,), False), ((2, 2), False), ((2, 2), True)])
@real_ranks(4)
def test_gradient_accumulation(rank: int, shape: tuple[int, ...], mode: str, reshard: bool, partial: bool, way: str) -> None:
    """Losses of every micro-batch, gradients and parameters as FSDP2's in the same mode."""
    mesh = mesh_of(*shape)
    held = MODES[mode]
    model = sequence()
    peer = fsdp2(copy.deepcopy(model), MLP, mesh=mesh, reshard_after_forward=reshard)
    spec, params = shards_of(fs.by_type(MLP, p=P("shard", reshard=reshard)), model, mesh)
    ours, theirs = (torch.optim.Adam(tensors, lr=1e-2) for tensors in (params.values(), peer.parameters()))
    for step in range(depth(1, 2)):
        batches = [numbers(rank, 10 * step + i) for i in range(MICRO)]
        grads, losses, _ = accumulate(model, spec, params, batches, held, way, partial)
        theirs.zero_grad()
        for i, x in enumerate(batches):
            last = i == MICRO - 1
            for key in (ROOT, *MLPS):
                peer.get_submodule(key).set_requires_gradient_sync(last or key not in held, recurse=False)
            peer.set_requires_all_reduce(last or not partial)
            peer.set_is_last_backward(last)
            loss = squared(peer, x)
            loss.backward()
            assert_close(losses[i], loss.detach())
        expected = {name: p.grad.full_tensor() for name, p in peer.named_parameters()}
        full = fs.unshard(grads, spec)
        same(full, expected, f"gradient at step {step}")
        step_with(grads, params, ours, theirs)
    same(fs.unshard(params, spec), {name: p.full_tensor() for name, p in peer.named_parameters()}, "parameters")


# --- FSDP1's no_sync ---


def permuted(rank: int, i: int) -> Tensor:
    """The elements of one batch in another order for each iteration."""
    return numbers(rank, 0).flatten()[torch.randperm(20, generator=torch.Generator().manual_seed(i))].view(4, 5)


@each(pattern=["iiioooiii", "oio", "oioioi"], strategy=STRATEGIES)
@real_ranks(2)
def test_grad_acc(rank: int, strategy: str, pattern: str) -> None:
    """FSDP1's no_sync: iterations inside of it (i) and outside (o), of which one more is last, are one backward of all batches
    joined."""
    model = sequence()
    spec, params = shards_of(fs.by_type(MLP, p=STRATEGIES[strategy]), model)
    pattern += "o"
    n = len(pattern)
    full, slices, pending = {}, {}, {}
    losses = []
    for i, where in enumerate(pattern):
        loss = lambda p: squared(sharded_call(model, p, spec), permuted(rank, i)) / n  # noqa: E731
        if where == "i":
            full = full or fs.unshard(params, spec)
            with Collectives() as sent:
                grads, value = fs.grad_and_value(loss)(full)
            assert not sent.all
            pending = {name: pending[name] + g if pending else g for name, g in grads.items()}
        else:
            grads, value = fs.grad_and_value(loss)(params)
            slices = {key: slices[key] + g if slices else g for key, g in grads.items()}
        losses.append(value)
    reduced = fs.reduce_grads(pending, spec)
    grads = fs.unshard({key: g + reduced[key] for key, g in slices.items()}, spec)
    joined = torch.cat([permuted(r, i) for r in range(2) for i in range(n)])
    plain = copy.deepcopy(model)
    squared(plain, joined).backward()
    same(grads, {name: q.grad for name, q in plain.named_parameters()}, "gradient")
    own = torch.cat([permuted(rank, i) for i in range(n)])
    assert_close(sum(losses), squared(plain, own).detach())


@real_ranks(2)
def test_no_sync_mixed_precision(rank: int) -> None:
    """Local gradients are in the dtype of the full parameters that you give: float16 as in FSDP1, or float32 to add up in."""
    model = sequence().float()
    spec = fs.by_type(MLP, p=P("shard", precision=Precision(param=F16, reduce=F32)))(model).bound
    params, x = fs.shard(model, spec), numbers(rank, 0).float()
    loss = lambda p: squared(sharded_call(model, p, spec), x).float()  # noqa: E731
    full = fs.unshard(params, spec)
    wide = fs.grad(loss)(full)
    low = fs.grad(loss)({name: t.half() for name, t in full.items()})
    assert {g.dtype for g in wide.values()} == {F32}
    assert {g.dtype for g in low.values()} == {F16}
    for name, g in low.items():
        assert g.any()
        assert torch.equal(g.float(), wide[name])  # what was added up nowhere is the same number
    reduced = fs.reduce_grads({name: g.float() for name, g in low.items()}, spec)
    assert {g.dtype for g in reduced.values()} == {F32}
    same(reduced, fs.grad(loss)(params), "reduced at once")


# --- what is pending is a value ---
