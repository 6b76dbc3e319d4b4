"""Law C2, the same trace on every rank; what a step sends after an exception, and in a huge world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from collective_log import Collectives, gathers, step, world
from depth import at_most, each
from parity import WAYS, numbers
from peer_models import MLP, Net, Order, Outer, frozen
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import P
from funshard.policies import Policy


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


POLICIES: dict[str, tuple[Callable[[], nn.Module], Policy]] = {
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
@each
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", POLICIES)
def test_c2_same_trace_on_every_rank(name: str, way: str) -> None:
    """The order of collectives is the same on all ranks, and step after step: what keeps them from waiting for ever."""

    def trace(rank: int) -> list[Any]:
        with world(8, rank):
            make, policy = POLICIES[name]
            model = make()
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            spec = policy(model).on(mesh)
            first = step(model, spec, way).all
            assert step(model, spec, way).all == first
            return first

    traces = [trace(rank) for rank in range(8)]
    assert traces[0]
    assert all(other == traces[0] for other in traces)


def test_c3_ten_thousand_ranks() -> None:
    """Counts do not depend on the size of the world, and slices are padded to it."""
    with world(10_000, rank=9_999):
        spec = fs.by_type(MLP, p=P("shard", align=1))(Net()).bound
        sent = step(Net(), spec)
        assert Counter(s.op for s in sent.all) == {"all_gather": 6, "reduce_scatter": 4}
        assert {s.numel for s in sent.all} == {1, 10_000}
