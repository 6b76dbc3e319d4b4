"""HSDP and meshes: torch's own claims (test_train_parity_hsdp, test_fsdp_hybrid_shard), on four real ranks."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_log import Collectives, Sent, gather, reduce, scatter, world
from collective_log import step as sent_by
from depth import at_most, depth
from models import module_class, refused
from parity import WAYS, check_parity, next_token, numbers, squared, tokens
from peer_models import MLP, Block, Net, Transformer, fsdp2
from ranks import mesh_of, real_ranks
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh

import funshard as fs
from funshard import P
from funshard.collectives import Mesh

BOTH = P(("replicate", "shard"))


def test_what_each_strategy_sends() -> None:
    """On 2 x 4: blocks over all ranks in two stages, the embedding within four and as a slice over two, the head over all."""
    with world(8):
        model = nn.Sequential(*(nn.Linear(5, 5, bias=False).double() for _ in range(3)))
        spec = fs.by_path({"0": P("shard"), "1": BOTH, "2": P()})(model).on(mesh_of(2, 4))
        sent = sent_by(model, spec)
    n = spec.shard_numel(spec.by_key["1"])
    block = [Sent("all_gather", n, 8 * n, 4), Sent("all_gather", 4 * n, 32 * n, 2)]
    assert sent.forward == [gather(spec, "0"), *block]
    head = [reduce(spec, "2", 4), reduce(spec, "2", 2)]
    reduced = [Sent("reduce_scatter", 8 * n, 64 * n, 2), Sent("reduce_scatter", 4 * n, 32 * n, 4)]
    wanted = Counter([*head, *reduced, scatter(spec, "0"), reduce(spec, "0", 2)])
    assert Counter(s for s in sent.backward if s.op != "all_gather") == wanted


# --- three axes ---
CUBE = {"pod": 2, "replicate": 2, "shard": 2}
SUBSETS = [None, "pod", "replicate", "shard", ("pod", "shard"), ("shard", "replicate"), ("pod", "replicate", "shard")]


@pytest.mark.parametrize("axis", SUBSETS, ids=str)
def test_three_axes(axis: Any) -> None:
    """Eight simulated ranks: split over any of three axes, gradients are the slices of the mean over all of them."""
    model, xs = Net(2), torch.stack([numbers(rank, 0) for rank in range(8)])
    fs.testing.assert_exact(squared, model, fs.by_type(MLP, p=P(axis))(model).on(CUBE), xs)


@pytest.mark.parametrize("way", WAYS)
def test_three_axes_send(way: str) -> None:
    """HSDP with two axes of replicas: slices are all-reduced over each of them, innermost first."""
    with world(24):
        spec = fs.policies.whole()(MLP(5)).on(mesh_of(pod=2, replicate=3, shard=4))
        sent = sent_by(MLP(5), spec, way)
    assert sent.forward == [gather(spec, "")]
    assert sent.backward == [scatter(spec, ""), reduce(spec, "", 3), reduce(spec, "", 2)]


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
    peer = fsdp2(copy.deepcopy(model), mesh=mesh_of(2, 2))
    peer(x).sum().backward()
    for name, p in peer.named_parameters():
        assert torch.equal(p.grad.full_tensor(), expected[name])


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
    policy, both, words = (
        fs.by_type(MLP),
        fs.by_type(MLP, p=BOTH),
        r"unit '': unknown mesh axis 'replicate' in .* one of \('shard',\)",
    )
    model = Net()
    with world(8):
        unnamed, one = init_device_mesh("cpu", (2, 4)), init_device_mesh("cpu", (8,))
        with Collectives() as log:
            said = "mesh of 2 dimensions has no names: expected one for each axis; give mesh_"
            refused(ValueError, said, lambda: policy(model).on(unnamed))
            refused(ValueError, words, lambda: both(model).on(one))
            refused(ValueError, words, lambda: fs.shard(model, both(model)))  # the whole world is one axis
            assert policy(model).on(one).sizes == (("shard", 8),)
        assert not log.all
