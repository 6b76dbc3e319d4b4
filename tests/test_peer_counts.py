"""Laws C1 and C2, and the communication counts of torch's own FSDP tests: what a step sends, to the byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from collective_log import Collectives, Sent, gather, gathers, reduce, scatter, scatters, step, world
from depth import at_most
from parity import WAYS, numbers, squared
from peer_models import MLP, Net, Order, Outer, chain, frozen
from torch import nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import P

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
WORLDS = [8, 64]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", WORLDS)
def test_fully_shard_communication_count(size: int, way: str) -> None:
    """n blocks and a root: forward n+1 gathers, backward n-1 (the root and the last block stay) and n+1 reductions."""
    with world(size):
        spec = fs.by_type(MLP)(Net()).bound
        sent = step(Net(), spec, way)
        assert sent.forward == gathers(spec, "", *BLOCKS)
        assert Counter(sent.backward) == Counter(gathers(spec, *BLOCKS[:-1]) + scatters(spec, "", *BLOCKS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", WORLDS)
def test_fully_shard_communication_count_without_root_parameters(size: int, way: str) -> None:
    """With nothing in the root the last block ends the forward and is the one that is not gathered again."""
    with world(size):
        spec = fs.by_type(MLP)(chain()).bound
        sent = step(chain(), spec, way)
        assert sent.forward == gathers(spec, "0", "1", "2")
        assert Counter(sent.backward) == Counter(gathers(spec, "0", "1") + scatters(spec, "0", "1", "2"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", WORLDS)
def test_no_reshard_after_forward(size: int, way: str) -> None:
    """P(reshard=False), ZeRO-2: no gather in backward."""
    with world(size):
        spec = fs.by_type(MLP, p=P("shard", reshard=False))(Net()).bound
        sent = step(Net(), spec, way)
        assert sent.forward == gathers(spec, "", *BLOCKS)
        assert Counter(sent.backward) == Counter(scatters(spec, "", *BLOCKS))


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_set_reshard_after_forward(reshard: bool, recurse: bool) -> None:
    """Each unit has its own setting: the blocks' decides the gathers in backward, the root's changes none."""
    with world(8):
        mine, others = P("shard", reshard=reshard), P("shard", reshard=reshard if recurse else not reshard)
        spec = fs.by_path({"blocks.*": others}, p=mine)(Net()).bound
        sent = step(Net(), spec)
        again = gathers(spec, *BLOCKS[:-1]) if others.reshard else []
        assert sent.forward == gathers(spec, "", *BLOCKS)
        assert Counter(sent.backward) == Counter(again + scatters(spec, "", *BLOCKS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", WORLDS)
def test_replicated_units_only_reduce(size: int, way: str) -> None:
    """P(), DDP: no gathers, one all-reduce of all buffers together."""
    with world(size):
        spec = fs.by_type(MLP, p=P())(Net()).bound
        sent = step(Net(), spec, way)
        assert sent.forward == []
        n = sum(spec.padded_numel(unit) for unit in spec)
        assert sent.backward == [Sent("all_reduce", n, 8 * n, size)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 4), (4, 16)])
def test_fsdp_hybrid_shard_basic_setup(shape: tuple[int, int], way: str) -> None:
    """HSDP: as FSDP within the inner axis, and one all-reduce more for each unit, of the slice alone."""
    with world(shape[0] * shape[1]):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        spec = fs.by_type(MLP)(Net()).on(mesh)
        sent = step(Net(), spec, way)
        every = ("", *BLOCKS)
        assert sent.forward == gathers(spec, *every)
        reductions = scatters(spec, *every) + [reduce(spec, key, shape[0]) for key in every]
        assert Counter(sent.backward) == Counter(gathers(spec, *BLOCKS[:-1]) + reductions)
        for key in every:  # reduce-scattered first: the replicas exchange slices, not buffers
            assert sent.backward.index(scatter(spec, key)) < sent.backward.index(reduce(spec, key, shape[0]))


def test_split_over_two_axes() -> None:
    """P(("outer", "inner")): gathered inside out, reduced outside in, a collective for each axis."""
    with world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
        spec = fs.policies.whole(P(("outer", "inner")))(MLP(5)).on(mesh)
        n = spec.shard_numel(spec.by_key[""])
        sent = step(MLP(5), spec)
        assert sent.forward == [Sent("all_gather", n, 8 * n, 4), Sent("all_gather", 4 * n, 32 * n, 2)]
        assert sent.backward == [Sent("reduce_scatter", 8 * n, 64 * n, 2), Sent("reduce_scatter", 4 * n, 32 * n, 4)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [P("shard"), P("shard", reshard=False), P()], ids=str)
@pytest.mark.parametrize("initialised", [True, False])
def test_train_parity_single_worldsize1(initialised: bool, p: P, way: str) -> None:
    """One rank sends nothing at all, not even while sharding, with a process group or without; gradients are plain."""
    model, x = Net(), numbers(0, 0)
    squared(model, x).backward()
    sent = Collectives()
    with world(1) if initialised else sent, sent:
        spec = fs.by_type(MLP, p=p)(model).bound
        params = fs.shard(model, spec)
        grads, _ = WAYS[way](lambda params: squared(lambda x: fs.functional_call(model, params, x, spec=spec), x))(params)
        for name, grad in fs.unshard(grads, spec).items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad)
    assert sent.all == []


@pytest.mark.parametrize("way", WAYS)
def test_always_wrap_communication_count(way: str) -> None:
    """A unit for each layer; what backward does not read, the weight of a first layer, is not gathered again either."""
    with world(8):
        model = nn.Sequential(*(nn.Linear(5, 5).double() for _ in range(4)))
        spec = fs.policies.always()(model).bound
        sent = step(model, spec, way)
        assert sent.forward == gathers(spec, "0", "1", "2", "3")
        assert Counter(sent.backward) == Counter(gathers(spec, "1", "2") + scatters(spec, "0", "1", "2", "3"))


@pytest.mark.parametrize("way", WAYS)
def test_nested_units_are_gathered_once(way: str) -> None:
    """An outer unit stays gathered over the inner one: two units' gathers each pass, and each reduced once."""
    with world(8):
        model = nn.Sequential(Outer(), Outer(), MLP(5))
        spec = fs.by_type(MLP)(model).bound
        units = ("0", "0.inner", "1", "1.inner")
        sent = step(model, spec, way)
        assert sent.forward == gathers(spec, *units, "2")
        assert Counter(sent.backward) == Counter(gathers(spec, *units) + scatters(spec, *units, "2"))


@at_most(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["aba", "aab", "aa", "bca", "ac", "abcabc", ""])
def test_multi_forward_module_and_unused_units(order: str, way: str) -> None:
    """A unit is gathered and reduced once for each visit, visits in a row are one, and an unused unit sends nothing.

    This is with the real order; without it, the module tree's next unit is gathered ahead, for nothing at most once.
    """
    visits = [name for i, name in enumerate(order) if order[i - 1 : i] != name]
    with world(8):
        model = Order(order)
        spec = fs.by_type(MLP)(model).bound
        sent = step(model, spec.ordered(fs.trace_order(model, spec, numbers(0, 0))), way)
        assert sent.forward == gathers(spec, "", *visits)
        assert Counter(sent.backward) == Counter(gathers(spec, *visits[:-1]) + scatters(spec, "", *visits))
        unordered = step(model, spec, way)
        wasted = Counter(unordered.forward) - Counter(sent.forward)
        assert Counter(unordered.forward) == Counter(sent.forward) + wasted
        assert sum(wasted.values()) <= 1
        assert Counter(unordered.backward) == Counter(sent.backward)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_units_are_not_reduced(way: str) -> None:
    """A frozen unit is gathered in both passes where a gradient has to go through it, only forward where none has."""
    with world(8):
        model = frozen(Net(), "first", "blocks.0", "blocks.2")
        spec = fs.by_type(MLP)(model).bound
        sent = step(model, spec, way)
        assert sent.forward == gathers(spec, *(unit.key for unit in spec))
        again = gathers(spec, "blocks.1")  # and blocks.2, which is still there
        assert Counter(sent.backward) == Counter(again + scatters(spec, "", "blocks.1"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reshard", [True, False])
def test_train_mixed_requires_grad_per_group(reshard: bool, way: str) -> None:
    """BitFit: only biases are trained, and only their elements are reduced, at every one of several steps."""
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    biases = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with world(8):
        spec = fs.by_type(MLP, p=P("shard", reshard=reshard))(model).bound
        padding = sum(spec.padded_numel(unit) - unit.numel for unit in spec if unit.requires_grad)
        for _ in range(3):
            sent = step(model, spec, way)
            reductions = [s for s in sent.all if s.op != "all_gather"]
            assert Counter(reductions) == Counter(scatter(spec, unit.key) for unit in spec if unit.requires_grad)
            assert sum(s.numel for s in reductions) == biases + padding
            again = {s for s in sent.backward if s.op == "all_gather"}
            weights = {gather(spec, unit.key) for unit in spec if unit.path and not unit.requires_grad}
            assert again == (weights if reshard else set())  # and no bias: nothing reads one in backward


def test_forward_without_gradient_gathers_once() -> None:
    """Evaluation: a gather for each unit and nothing else."""
    with world(8):
        model, spec = Net(), fs.by_type(MLP)(Net()).bound
        params = fs.shard(model, spec)
        with Collectives() as sent, torch.no_grad():
            fs.functional_call(model, params, numbers(0, 0), spec=spec)
        assert sent.all == gathers(spec, "", *BLOCKS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bytes_follow_the_dtype(dtype: torch.dtype) -> None:
    """What is sent is what is held: padded elements times the size of one."""
    with world(64):
        model = Net().to(dtype)
        spec = fs.by_type(MLP, p=P("shard", align=1))(model).bound
        sent = step(model, spec)
        padded = {unit.key: -(-unit.numel // 64) * 64 * dtype.itemsize for unit in spec}
        received = sum(s.bytes * s.ranks for s in sent.all if s.op == "all_gather")
        assert received == 2 * sum(padded.values()) - padded[""] - padded["blocks.2"]
        assert sum(s.bytes for s in sent.all if s.op == "reduce_scatter") == sum(padded.values())
