"""Laws C1 and C2, and torch's own claims for communication and meshes: what a step sends, to the byte, on every rank."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from collective_log import Collectives, Sent, gather, gathers, reduce, scatter, scatters, step, world
from depth import at_most, depth, each, every
from models import module_class, refused
from parity import WAYS, check_parity, next_token, numbers, shards_of, squared, tokens
from peer_models import MLP, Block, Net, Order, Outer, Transformer, chain, frozen
from ranks import mesh_of, real_ranks
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh

import funshard as fs
from funshard import P
from funshard.collectives import Mesh
from funshard.policies import Policy

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
WORLDS = [8, 64]
DOUBLE = P("shard", precision=fs.Precision(reduce=torch.float64))


class Claim(NamedTuple):
    """What a step of a model sends: unit keys, gathered in forward, gathered again in backward, and reduced."""

    says: str
    model: Callable[[], nn.Module]
    policy: Policy
    forward: Sequence[str]
    again: Sequence[str]
    reduced: Sequence[str]


def bitfit() -> nn.Module:
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


ALL, NESTED = ["", *BLOCKS], ["0", "0.inner", "1", "1.inner"]
CLAIMS = {
    "test_fully_shard_communication_count": Claim(
        "n blocks and a root: forward n+1 gathers, backward n-1 (the root and the last block stay) and n+1 reductions.", Net,
        fs.by_type(MLP), ALL, BLOCKS[:-1], ALL),
    "test_fully_shard_communication_count_without_root_parameters": Claim(
        "With nothing in the root the last block ends the forward and is the one that is not gathered again.", chain,
        fs.by_type(MLP), "012", "01", "012"),
    "test_no_reshard_after_forward": Claim(
        "P(reshard=False), ZeRO-2: no gather in backward.", Net, fs.by_type(MLP, p=P("shard", reshard=False)), ALL, [], ALL),
    "test_nested_units_are_gathered_once": Claim(
        "An outer unit stays gathered over the inner one: two units' gathers each pass, and each reduced once.",
        lambda: nn.Sequential(Outer(), Outer(), MLP(5)), fs.by_type(MLP), [*NESTED, "2"], NESTED, [*NESTED, "2"]),
    **{
        f"test_train_mixed_requires_grad_per_group, {reshard}": Claim(
            "BitFit: only biases are trained, and only their elements are reduced; backward reads no bias.", bitfit,
            fs.by_type(MLP, p=P("shard", reshard=reshard)), [key for unit in ALL for key in (f"{unit}:frozen", unit)],
            [f"{unit}:frozen" for unit in BLOCKS[:-1]] if reshard else [], ALL) for reshard in (True, False)},
    **{
        f"test_set_reshard_after_forward, {reshard}, of blocks {others}": Claim(
            "Each unit has its own setting: the blocks' decides the gathers in backward, the root's changes none.", Net,
            fs.by_path({"blocks.*": P("shard", reshard=others)}, p=P("shard", reshard=reshard)), ALL,
            BLOCKS[:-1] if others else [], ALL)
        for reshard in (True, False) for others in (True, False)},
}  # fmt: skip
"""By the names of torch's tests."""


@each(way=WAYS, size=WORLDS, name=CLAIMS)
def test_claims(name: str, size: int, way: str) -> None:
    """A step sends these collectives and no others, each over all ranks: each of `CLAIMS`."""
    claim = CLAIMS[name]
    with world(size):
        model = claim.model()
        spec = claim.policy(model).bound
        sent = step(model, spec, way)
        assert sent.forward == gathers(spec, *claim.forward)
        assert Counter(sent.backward) == Counter(gathers(spec, *claim.again) + scatters(spec, *claim.reduced))


@every(way=WAYS, size=WORLDS)
def test_replicated_units_only_reduce(size: int, way: str) -> None:
    """P(), DDP: no gathers, one all-reduce of all buffers together."""
    with world(size):
        spec = fs.by_type(MLP, p=P())(Net()).bound
        sent = step(Net(), spec, way)
        assert sent.forward == []
        n = sum(spec.padded_numel(unit) for unit in spec)
        assert sent.backward == [Sent("all_reduce", n, 8 * n, size)]


HYBRID: list[dict[str, int]] = [{"replicate": 2, "shard": 4}, {"pod": 2, "replicate": 3, "shard": 4}]


@every(way=WAYS, sizes=HYBRID)
def test_fsdp_hybrid_shard_basic_setup(sizes: dict[str, int], way: str) -> None:
    """HSDP: as FSDP within the inner axis, and one all-reduce more for each unit and axis of replicas, of the slice alone."""
    with world(math.prod(sizes.values())):
        spec = fs.by_type(MLP)(Net()).on(mesh_of(**sizes))
        sent = step(Net(), spec, way)
        assert sent.forward == gathers(spec, *ALL)
        *replicas, _ = sizes.values()
        reductions = {key: [scatter(spec, key), *(reduce(spec, key, n) for n in reversed(replicas))] for key in ALL}
        assert Counter(sent.backward) == Counter([*gathers(spec, *BLOCKS[:-1]), *itertools.chain(*reductions.values())])
        for own in reductions.values():  # the replicas exchange slices, not buffers, innermost first
            assert [s for s in dict.fromkeys(sent.backward) if s in own] == own


@every(way=WAYS, p=[P("shard"), P("shard", reshard=False), P(), DOUBLE], initialised=[True, False])
def test_train_parity_single_worldsize1(initialised: bool, p: P, way: str) -> None:
    """One rank sends nothing at all, not even while sharding, with a process group or without; gradients are plain."""
    model, x = Net(), numbers(0, 0)
    squared(model, x).backward()
    sent = Collectives()
    with world(1) if initialised else sent, sent:
        spec, params = shards_of(fs.by_type(MLP, p=p), model)
        grads, _ = WAYS[way](lambda params: squared(lambda x: fs.functional_call(model, params, x, spec=spec), x))(params)
        for name, grad in fs.unshard(grads, spec).items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad)
    assert sent.all == []


# --- traces ---
MODELS: dict[str, tuple[Callable[[], nn.Module], Policy]] = {
    "blocks": (Net, fs.by_type(MLP)),
    "mixed": (Net, fs.by_path({"blocks.0": P(), "blocks.1": P("shard", reshard=False)})),
    "frozen": (lambda: frozen(Net(), "blocks.1"), fs.policies.always()),
    "nested": (lambda: nn.Sequential(Outer(), MLP(5)), fs.by_type(MLP)),
    "visits": (lambda: Order("abcab"), fs.by_type(MLP)),
}


@at_most(1)
@each(way=WAYS, name=MODELS)
def test_c2_same_trace_on_every_rank(name: str, way: str) -> None:
    """The order of collectives is the same on all ranks, and step after step: what keeps them from waiting for ever."""

    def trace(rank: int) -> list[Any]:
        with world(8, rank):
            make, policy = MODELS[name]
            model = make()
            spec = policy(model).on(mesh_of(2, 4))
            first = step(model, spec, way).all
            assert step(model, spec, way).all == first
            return first

    traces = [trace(rank) for rank in range(8)]
    assert traces[0]
    assert all(other == traces[0] for other in traces)


def test_c3_ten_thousand_ranks() -> None:
    """Counts do not depend on the size of the world, and slices are padded to it."""
    with world(10_000, rank=9_999):
        sent = step(Net(), fs.by_type(MLP, p=P("shard", align=1))(Net()).bound)
        assert Counter(s.op for s in sent.all) == {"all_gather": 6, "reduce_scatter": 4}
        assert {s.numel for s in sent.all} == {1, 10_000}


# --- several axes ---
BOTH = P(("replicate", "shard"))


def test_what_each_strategy_sends() -> None:
    """On 2 x 4: blocks over all ranks in two stages, the embedding within four and as a slice over two, the head over all."""
    with world(8):
        model = nn.Sequential(*(nn.Linear(5, 5, bias=False).double() for _ in range(3)))
        spec = fs.by_path({"0": P("shard"), "1": BOTH, "2": P()})(model).on(mesh_of(2, 4))
        sent = step(model, spec)
    n = spec.shard_numel(spec.by_key["1"])
    block = [Sent("all_gather", n, 8 * n, 4), Sent("all_gather", 4 * n, 32 * n, 2)]
    assert sent.forward == [gather(spec, "0"), *block]
    head = [reduce(spec, "2", 4), reduce(spec, "2", 2)]
    reduced = [Sent("reduce_scatter", 8 * n, 64 * n, 2), Sent("reduce_scatter", 4 * n, 32 * n, 4)]
    wanted = Counter([*head, *reduced, scatter(spec, "0"), reduce(spec, "0", 2)])
    assert Counter(s for s in sent.backward if s.op != "all_gather") == wanted


# --- meshes of groups ---
Plain = module_class(
    "Plain",
    lambda dim: {"in_proj": nn.Linear(dim, 4 * dim, bias=False), "out_proj": nn.Linear(4 * dim, dim, bias=False)},
    lambda self, x: torch.relu(self.out_proj(torch.relu(self.in_proj(x)))),
)
"""The MLP of FSDP2's tests."""


def subgroups(groups: list[list[int]], rank: int) -> Any:
    """This rank's of these groups, which every rank makes."""
    made = [dist.new_group(ranks) for ranks in groups]
    return made[next(i for i, ranks in enumerate(groups) if rank in ranks)]


@real_ranks(4)
def test_custom_hsdp_all_reduce_hook(rank: int) -> None:
    """FSDP within pairs and the user's own all-reduce between them is HSDP: 22.5 everywhere and 0, 10, ..., 90."""
    intra, inter = subgroups([[0, 1], [2, 3]], rank), subgroups([[0, 2], [1, 3]], rank)
    replica = rank // 2
    model = Plain(10)
    nn.init.constant_(model.in_proj.weight, 1.0 * replica)
    nn.init.constant_(model.out_proj.weight, 2.0 * replica)
    expected = {"in_proj.weight": torch.arange(0.0, 100, 10).repeat(40, 1), "out_proj.weight": torch.full((10, 40), 22.5)}
    x = torch.arange(10.0).view(1, 10)
    call = lambda p, spec: fs.functional_call(model, p, x, spec=spec).sum()  # noqa: E731
    within = fs.policies.whole()(model).on(DeviceMesh.from_group(intra, "cpu", mesh_dim_names=("shard",)))
    params = fs.shard(model, within)
    grads = fs.grad(lambda p: call(p, within))(params)
    for g in grads.values():
        dist.all_reduce(g, group=inter, op=dist.ReduceOp.AVG)
    want = fs.shard(expected, within, rank=rank % 2)
    assert torch.equal(grads[""], want[""])
    hybrid = fs.policies.whole()(model).on(mesh_of(2, 2))
    assert torch.equal(fs.shard(model, hybrid, check_values=False)[""], params[""])  # the replicas' weights are their own
    assert torch.equal(fs.grad(lambda p: call(p, hybrid))(params)[""], want[""])


@at_most(1)
@pytest.mark.parametrize("dims", [1, 2])
@real_ranks(4)
def test_process_group_init(rank: int, dims: int) -> None:
    """``test_1d_process_group_init``, ``test_2d_...``: on a mesh of groups that exist it trains as the plain model."""
    if dims == 1:
        made = DeviceMesh.from_group(dist.new_group(range(4)), "cpu", mesh_dim_names=("shard",))
    else:
        groups = [subgroups([[0, 2], [1, 3]], rank), subgroups([[0, 1], [2, 3]], rank)]
        made = DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    assert Mesh.of(made)["shard"].name != Mesh.of(mesh_of(4) if dims == 1 else mesh_of(2, 2))["shard"].name
    for p in (P("shard"), P("shard", reshard=False), P()):
        model = Transformer(depth(1, 3))
        check_parity(rank, model, fs.by_type(Block, p=p)(model).on(made), tokens, next_token, steps=depth(2, 5))


def test_invalid_meshes() -> None:
    """Two dimensions without names, and axes that are not there, are errors that name them before anything is sent."""
    model, policy, both = Net(), fs.by_type(MLP), fs.by_type(MLP, p=BOTH)
    words = r"unit '': unknown mesh axis 'replicate' in .* one of \('shard',\)"
    with world(8):
        unnamed, one = init_device_mesh("cpu", (2, 4)), init_device_mesh("cpu", (8,))
        with Collectives() as log:
            said = "mesh of 2 dimensions has no names: expected one for each axis; give mesh_"
            refused(ValueError, said, lambda: policy(model).on(unnamed))
            refused(ValueError, words, lambda: both(model).on(one))
            refused(ValueError, words, lambda: fs.shard(model, both(model)))  # the whole world is one axis
            assert policy(model).on(one).sizes == (("shard", 8),)
        assert not log.all
