"""P(reshard=) with the names of axes: between forward and backward a rank keeps its slice over those alone (ZeRO++'s hpZ)."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any
from unittest import mock

import mirror
import pytest
import torch
from collective_log import Sent, step, world
from depth import at_most, each, every, mark_seldom
from models import refused
from parity import MAIN_WAYS, WAYS, check_parity, loss_of, next_token, numbers, shards_of, tokens
from peer_models import MLP, Block, Net, Transformer, chain
from ranks import Pool, mesh_of, real_ranks
from test_memory import no_collector
from torch import nn

import funshard as fs
from funshard import P
from funshard._call import schedule
from funshard._wire.chain import copy_secondary_slice

BOTH = ("replicate", "shard")
BF16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def test_the_axes_that_it_names() -> None:
    """Some of the axes, in their order and one form, and not all."""
    assert P(("a", "b", "c"), reshard=("c", "b")) == P(("a", "b", "c"), reshard=("b", "c"))
    assert P(BOTH, reshard=("shard",)) == P(BOTH, reshard="shard")
    assert str(P(BOTH, reshard="shard")) == "P(('replicate', 'shard'), reshard='shard')"
    assert P(BOTH, reshard="shard").reshard_axes == ("shard",)
    assert P(BOTH).reshard_axes == P(BOTH, reshard=False).reshard_axes == ()
    words = r"P: reshard: expected some of the axes \('shard',\), and not all, got 'shard'; resha"
    refused(ValueError, words, lambda: P("shard", reshard="shard"))
    words = r"expected some of the axes \('replicate', 'shard'\), and not all, got 'inner'$"
    refused(ValueError, words, lambda: P(BOTH, reshard="inner"))
    refused(ValueError, r"and not all, got \(\)$", lambda: P(BOTH, reshard=()))


# --- what a step sends and holds ---
def gathers(spec: fs.PartitionSpec, key: str, axes: tuple[str, ...], itemsize: int = 8) -> list[Sent]:
    """The gathers of a unit from slices over these axes, the innermost first."""
    sizes, sent = dict(spec.bound_mesh.sizes), []
    numel = spec.padded_numel(spec.by_key[key])
    for axis in axes:
        numel //= sizes[axis]
    for axis in reversed(axes):
        sent.append(Sent("all_gather", numel, itemsize * numel, sizes[axis]))
        numel *= sizes[axis]
    return sent


TWO, THREE = {"replicate": 2, "shard": 4}, {"pod": 2, "node": 2, "gpu": 4}
KEPT = [(TWO, ("shard",)), (TWO, ("replicate",)), (THREE, ("node", "gpu")), (THREE, ("pod", "gpu"))]


@at_most(6)
@every(way=MAIN_WAYS, remat=[False, True])
@pytest.mark.parametrize(("sizes", "kept"), KEPT, ids=str)
def test_backward_gathers_over_these_axes_alone(sizes: dict[str, int], kept: tuple[str, ...], remat: bool, way: str) -> None:
    """Forward gathers over all axes; backward each unit that did not end the forward, over those of ``reshard``."""
    with world(torch.Size(sizes.values()).numel()):
        axes = tuple(sizes)
        spec = fs.by_type(MLP, p=P(axes, reshard=kept, remat=remat))(Net()).on(mesh_of(**sizes))
        sent = step(Net(), spec, way)
        assert sent.forward == [one for key in ("", *BLOCKS) for one in gathers(spec, key, axes)]
        again = [one for one in sent.backward if one.op == "all_gather"]
        assert again == [one for key in BLOCKS[-2::-1] for one in gathers(spec, key, kept)]


def test_axes_of_one_rank() -> None:
    """What is kept over all axes that have ranks is the shard; over none of them, the whole buffer."""
    for shape, keeps in {(1, 8): False, (8, 1): True}.items():
        with world(8):
            mesh = mesh_of(*shape)
            sent = [step(Net(), fs.by_type(MLP, p=P(BOTH, reshard=how))(Net()).on(mesh)) for how in ("shard", not keeps)]
            assert sent[0].all == sent[1].all


def test_the_slice_has_the_dtype_of_the_parameters_in_use() -> None:
    with world(8):
        model = nn.Sequential(*(MLP(5) for _ in range(3))).float()
        spec = fs.by_type(MLP, p=P(BOTH, reshard="shard", precision=BF16))(model).on(mesh_of(2, 4))
        sent = step(model, spec)
        again = [one for one in sent.backward if one.op == "all_gather"]
        assert again == [one for key in ("1", "0") for one in gathers(spec, key, ("shard",), 2)]


def test_what_the_plan_holds() -> None:
    """Beside the units in use, a slice of each unit that forward is done with."""
    with torch.device("meta"):
        model = Net(blocks=6)
    how: tuple[Any, ...] = (True, "shard")
    plans = [fs.plan(fs.by_type(MLP, p=P(BOTH, reshard=r))(model).on({"replicate": 2, "shard": 4})) for r in how]
    freed, kept = (plan.peaks["forward"]["gathered"] for plan in plans)
    block = plans[0].spec.padded_numel(plans[0].spec.by_key["blocks.0"]) * 8
    assert kept == freed + 5 * block // 4  # the fifth is cut while the fifth block and the last are there


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_slices_live_from_forward_to_the_backward_of_their_unit(way: str) -> None:
    """Of all blocks but the last, which stays whole; without a backward there are none."""
    refs: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []

    def copied(*args: Any) -> torch.Tensor:
        kept = copy_secondary_slice(*args)
        refs.append(weakref.ref(kept))
        return kept

    with world(8), mock.patch.object(schedule, "copy_secondary_slice", copied), no_collector():
        model = Net(blocks=6)
        spec, params = shards_of(fs.by_type(MLP, p=P(BOTH, reshard="shard")), model, mesh_of(2, 4))

        def note() -> None:
            sizes.extend(kept.numel() for ref in refs if (kept := ref()) is not None)

        loss = loss_of(model, spec, numbers(0, 0), then=note)
        with torch.no_grad():
            loss(params)
        assert not refs
        WAYS[way](loss)(params)
        assert sizes == [spec.padded_numel(spec.by_key["blocks.0"]) // 4] * 5
        assert not any(ref() is not None for ref in refs)


# --- the same results ---
PS: dict[str, dict[str, Any]] = {
    "inner": {"reshard": "shard"},
    "outer": {"reshard": "replicate"},
    "remat": {"reshard": "shard", "remat": True},
    "activations": {"reshard": "shard", "offload": "activations"},
}


@at_most(1)
@each(way=MAIN_WAYS, name=PS)
@real_ranks(4)
def test_train_parity(rank: int, name: str, way: str) -> None:
    """Losses, gradients and parameters on four real ranks, with frozen and tied parameters."""
    model = Transformer(3, tied=name == "outer")
    model.layers[1].norm1.requires_grad_(False)
    mesh = mesh_of(2, 2)
    check_parity(rank, model, fs.by_type(Block, p=P(BOTH, **PS[name]))(model).on(mesh), tokens, next_token, way=way)


@pytest.mark.parametrize("kept", mark_seldom([("node",), ("gpu",), ("pod", "gpu")], ("pod", "gpu")), ids=str)
@real_ranks(4)
def test_three_axes(rank: int, kept: tuple[str, ...]) -> None:
    axes = ("pod", "node", "gpu")
    model = Net()
    check_parity(rank, model, fs.by_type(MLP, p=P(axes, reshard=kept))(model).on(mesh_of(pod=1, node=2, gpu=2)))


TO_BF16 = fs.Precision(param=torch.bfloat16, output=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "codec": {"precision": fs.Precision(codec=fs.codecs.int8())},
    "keep": {"precision": dataclasses.replace(TO_BF16, keep={"*.0.*": torch.float32}), "align": 1},
    "nf4": {"at_rest": fs.codecs.nf4(), "precision": TO_BF16},
    "retained": {},
}


@at_most(1)
@pytest.mark.parametrize("what", mark_seldom(OPTIONS, "codec", "keep", "nf4"))
@real_ranks(4)
def test_a_step_is_that_of_shards(rank: int, what: str) -> None:
    """A step with kept slices is, bit by bit, that of shards alone."""
    model = chain().float() if what in ("codec", "nf4") else chain()
    if what == "keep":  # bytes whose number is no multiple of the ranks
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5)) for _ in range(3)))
    if what == "nf4":
        model[:2].requires_grad_(False)
    mesh = mesh_of(2, 2)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).to(next(model.parameters()).dtype)
    results = []
    for reshard in ("shard", True):
        spec, params = shards_of(fs.by_path({"*": P(BOTH, reshard=reshard, **OPTIONS[what])}), model, mesh)
        params, frozen = fs.partition(params, spec)
        loss = loss_of(model, spec, x, frozen=frozen)
        if what == "retained":  # backward comes to every unit twice, and finds slices both times
            leaves = {k: p.requires_grad_() for k, p in params.items()}
            value = loss(leaves)
            first = torch.autograd.grad(value, list(leaves.values()), retain_graph=True)
            second = torch.autograd.grad(value, list(leaves.values()))
            assert all(map(torch.equal, first, second))
            results.append(dict(zip(leaves, second, strict=True)))
        else:
            results.append(fs.grad(loss)(params))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(x, results[1][key]) for key, x in results[0].items())


# --- compiled ---
@pytest.mark.parametrize("remat", mark_seldom([False, True], False))
def test_compiled_units(alone: Pool, remat: bool) -> None:
    """The gradients of eager units, by as many gathers and reductions."""
    options = [P(BOTH, reshard="shard", remat=remat, compile=how) for how in (False, fs.Compile(backend="aot_eager"))]
    model, policies = nn.Sequential(*(MLP(5) for _ in range(3))), [fs.by_type(MLP, p=p) for p in options]
    alone.run(mirror.same_compiled, model, policies, numbers(0, 0), *BOTH)
