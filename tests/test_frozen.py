"""What is not trained costs no gradient: nothing of it is reduced or saved, and backward ends at the first trained unit."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from collective_log import Collectives, Sent, gather, scatter, world
from depth import pairs
from parity import WAYS, strategies
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P, _torch, codecs

UNITS = 6
STRATEGIES = strategies("shard", "keep", "replicated", "remat", low=P("shard", precision=fs.Precision(param=torch.bfloat16)))


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        made.append(StorageWeakRef(_torch.unwrap(y).untyped_storage()))
        return y


made: list[StorageWeakRef] = []
"""What the layers gave, in order."""


def layers(frozen: set[str], *, by_flag: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(8, 8) for _ in range(UNITS)))
    for name, layer in model.named_children():
        layer.requires_grad_(not (by_flag and name in frozen))
    return model


class Products(TorchDispatchMode):
    """How many matrix products there are, before and after `turn`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0, 0]
        self.at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.at] += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Step:
    """What one step did."""

    sent: Collectives
    products: int
    """Matrix products in backward."""
    kept: list[int]
    """The layers whose results were there when forward had ended."""
    grads: fs.Params


def step(frozen: set[str], p: P, way: str, how: str, prefetch: int = 1) -> tuple[Step, fs.PartitionSpec]:
    """One step of six layers of which these are frozen, by ``requires_grad``, or as a constant of the loss."""
    model = layers(frozen, by_flag=how == "flag")
    spec = fs.by_type(Layer, p=p)(model).bound
    trained, rest = fs.partition(fs.shard(model, spec), spec, None if how == "flag" else lambda unit: unit.path not in frozen)
    sent, products, kept = Collectives(), Products(), list[int]()
    made.clear()

    def loss(params: fs.Params) -> Tensor:
        y = fs.functional_call(model, fs.combine(params, rest), torch.ones(3, 8), spec=spec, prefetch=prefetch)
        sent.turn()
        products.at = 1
        kept[:] = [i for i, ref in enumerate(made[:UNITS]) if not ref.expired()]
        return y.sum()

    gc.disable()  # nothing is to wait for that
    try:
        with sent, products:
            grads, _ = WAYS[way](loss)(trained)
    finally:
        gc.enable()
    return Step(sent, products.counts[1], kept, grads), spec


def expected_products(frozen: set[str]) -> int:
    """Of each layer from the first trained one on: one for its weight if that is trained, one for its input, not that one's."""
    trained = [i for i in range(UNITS) if str(i) not in frozen]
    return len(trained) + sum(i > trained[0] for i in range(UNITS))


FROZEN = [{"0"}, {"0", "1", "2"}, {"2", "3"}, {"5"}, {"0", "2", "4", "5"}, set("01234")]


@pairs(how=["flag", "constant"], way=WAYS, strategy=STRATEGIES)
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda x: "".join(sorted(x)))
def test_a_step_does_no_more_than_it_must(frozen: set[str], strategy: str, way: str, how: str) -> None:
    """Reductions, gathers and matrix products of backward, by number and by size."""
    p = STRATEGIES[strategy]
    with world(4):
        did, spec = step(frozen, p, way, how)
        trained = [str(i) for i in range(UNITS) if str(i) not in frozen]
        first = int(trained[0])
        assert set(did.grads) == set(trained)
        low = p.precision is not None

        def narrow(s: Sent) -> Sent:
            return s._replace(bytes=s.bytes // 2) if low else s

        sends = Counter(s for s in did.sent.backward)
        if p.axes:
            # the last one still is there, and the first one's input wants no gradient, for which its weight would be needed
            again = [str(i) for i in range(first + (not p.remat), UNITS - 1)] if p.reshard else []
            wanted = Counter(narrow(gather(spec, key)) for key in again)
            wanted += Counter(narrow(scatter(spec, key)) for key in trained)
            assert sends == wanted
        else:
            assert {s.op for s in sends} == {"all_reduce"}
            assert sum(s.numel for s in sends.elements()) == len(trained) * spec.shard_numel(next(iter(spec)))
        rerun = range(first, UNITS) if p.remat else ()
        assert did.products == expected_products(frozen) + len(rerun)
        assert did.kept == [*range(max(first - 1, 0), UNITS)]


@pytest.mark.parametrize("strategy", ["shard", "keep", "remat"])
def test_at_rest_before_what_is_trained(strategy: str) -> None:
    """The same of frozen units that are bytes, and of those after the first trained one bytes are gathered again."""
    p = dataclasses.replace(STRATEGIES[strategy], at_rest=codecs.nf4(8))
    with world(4):
        did, spec = step({"0", "1", "3", "4"}, p, "fs", "flag")
        lengths = {unit.key: spec.stored(unit)[0] for unit in spec}
        sent = [s.bytes for s in did.sent.backward if s.op == "all_gather"]
        again = [str(i) for i in range(2 + (not p.remat), UNITS - 1)] if p.reshard else []
        of_frozen = [lengths[key] for key in again if spec.by_key[key].at_rest]
        assert Counter(sent) == Counter([*of_frozen, *(gather(spec, key).bytes for key in again if key == "2")])
        assert [s for s in did.sent.backward if s.op != "all_gather"] == [scatter(spec, "5"), scatter(spec, "2")]


def test_no_optimizer_state() -> None:
    model = layers({"0", "3"}, by_flag=True)
    spec = fs.by_type(Layer, p=P("shard"))(model)
    trained, _ = fs.partition(fs.shard(model, spec), spec)
    init, _ = fs.optim.from_torch(torch.optim.AdamW, lr=0.1, spec=spec)
    assert set(init(trained)) == {"1", "2", "4", "5"}
