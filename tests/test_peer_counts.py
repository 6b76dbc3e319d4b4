"""Laws C1 and C2, and the communication counts of torch's own FSDP tests: what a step sends, to the byte, on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from collective_log import Collectives, Sent, gather, gathers, reduce, scatter, scatters, step, world
from depth import at_most, each, every
from parity import WAYS, numbers, shards_of, squared
from peer_models import MLP, Net, Order, Outer, chain, frozen
from ranks import mesh_of
from torch import Tensor, nn

import funshard as fs
from funshard import P
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
    "test_always_wrap_communication_count": Claim(
        "A unit for each layer; what backward does not read, the weight of a first layer, is not gathered again either.",
        lambda: nn.Sequential(*(nn.Linear(5, 5).double() for _ in range(4))), fs.policies.always(), "0123", "12", "0123"),
    "test_nested_units_are_gathered_once": Claim(
        "An outer unit stays gathered over the inner one: two units' gathers each pass, and each reduced once.",
        lambda: nn.Sequential(Outer(), Outer(), MLP(5)), fs.by_type(MLP), [*NESTED, "2"], NESTED, [*NESTED, "2"]),
    "test_frozen_units_are_not_reduced": Claim(
        "A frozen unit is gathered again where a gradient has to go through it, and not if it is still there, as blocks.2.",
        lambda: frozen(Net(), "first", "blocks.0", "blocks.2"), fs.by_type(MLP), [":frozen", "", *BLOCKS], ["blocks.1"],
        ["", "blocks.1"]),
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


@every(way=WAYS, shape=[(2, 4), (4, 16)])
def test_fsdp_hybrid_shard_basic_setup(shape: tuple[int, int], way: str) -> None:
    """HSDP: as FSDP within the inner axis, and one all-reduce more for each unit, of the slice alone."""
    with world(shape[0] * shape[1]):
        spec = fs.by_type(MLP)(Net()).on(mesh_of(*shape))
        sent = step(Net(), spec, way)
        every = ("", *BLOCKS)
        assert sent.forward == gathers(spec, *every)
        reductions = scatters(spec, *every) + [reduce(spec, key, shape[0]) for key in every]
        assert Counter(sent.backward) == Counter(gathers(spec, *BLOCKS[:-1]) + reductions)
        for key in every:  # reduce-scattered first: the replicas exchange slices, not buffers
            assert sent.backward.index(scatter(spec, key)) < sent.backward.index(reduce(spec, key, shape[0]))


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


@at_most(6)
@every(way=WAYS, order=["aba", "aab", "aa", "bca", "ac", "abcabc", ""])
def test_multi_forward_module_and_unused_units(order: str, way: str) -> None:
    """A unit is gathered and reduced once for each visit, visits in a row are one, and an unused unit sends nothing. This is
    with the real order; without it, the module tree's next unit is gathered ahead, for nothing at most once."""
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


@every(way=WAYS, reshard=[True, False])
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


# --- traces ---
class Failing(Net):
    fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            self.blocks[0](x)
            raise KeyError("halfway")
        return super().forward(x)


@pytest.mark.parametrize("way", WAYS)
def test_reset_iter_state_after_exception(way: str) -> None:
    """A forward that raises halfway has sent its gathers so far, and the next step sends what every step does."""
    with world(8):
        model = Failing()
        spec = fs.by_type(MLP)(model).bound
        clean = step(model, spec, way)
        model.fail = True
        with Collectives() as sent, pytest.raises(KeyError, match="halfway"):
            fs.functional_call(model, fs.shard(model, spec, rank=0), numbers(0, 0), spec=spec)
        assert sent.all == gathers(spec, "", "blocks.0", "blocks.1")  # the last one ahead of its use
        model.fail = False
        assert step(model, spec, way).all == clean.all


MODELS: dict[str, tuple[Callable[[], nn.Module], Policy]] = {
    "blocks": (Net, fs.by_type(MLP)),
    "layers": (Net, fs.policies.always()),
    "kept": (Net, fs.by_type(MLP, p=P("shard", reshard=False))),
    "replicated": (Net, fs.policies.always(P())),
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
