"""R1 and R4: whatever people write in a forward is exact, or an error that says so, and nothing of the caller's is changed.

Pieces of fuzz_modules.py, put together at random, under each transform, beside the plain model (fuzz_cases.py);
``pytest --thorough tests/test_fuzz.py`` runs 20,000. Every bug that was found is an example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import mirror
import pytest
from depth import depth
from fuzz_cases import MEANS, PS, TRANSFORMS, Case, Plain, batch, mirrored, on_real_ranks, on_simulated, per_sample, sharded
from fuzz_modules import PIECES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import Pool

import funshard as fs

COUNT = depth(40, 10_000)


@st.composite
def cases(draw: st.DrawFn, transforms: list[str], meshes: list[tuple[int, ...]], *, train: bool = True) -> Case:
    pieces = draw(st.lists(st.sampled_from(list(PIECES)), min_size=1, max_size=3))
    order = draw(st.one_of(st.just(()), st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=4).map(tuple)))
    return Case(
        tuple(pieces),
        tuple(draw(st.sampled_from(["", *PS])) for _ in pieces),
        draw(st.sampled_from(transforms)),
        order,
        draw(st.sampled_from(list(PS))),
        leaves=draw(st.booleans()),
        tie=draw(st.booleans()),
        train=train and draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        mesh=draw(st.sampled_from(meshes)),
    )


def one(name: str, p: str, transform: str, **rest: Any) -> Case:
    return Case((name,), (p,), transform, **rest)


def after(name: str, p: str, transform: str, **rest: Any) -> Case:
    """After another layer, whose gradient its weight has a part in."""
    return Case(("Linear", name), ("shard", p), transform, **rest)


FOUND = [
    # weights read without a graph
    after("Detached", "shard", "hvp"),
    after("Detached", "codec", "grad of grad"),
    after("Data", "remat", "hvp"),
    after("ClampsData", "shard", "double backward"),
    one("GradInNoGrad", "remat", "grad of jvp", leaves=True),
    # first touched in inference mode
    one("ConditionInInference", "codec", "fs.grad", leaves=True),
    one("ConditionInInference", "shard", "double backward"),
    one("ProbeInInference", "shard", "fs.grad"),
    # changed in place
    one("ClampsWithoutGrad", "shard", "fs.grad"),
    one("ClampsWithoutGrad", "replicated", "no_grad"),
    one("ClampsWithoutGrad", "codec", "jvp", mesh=(1,)),
    one("ClampsData", "keep", "grad of jvp"),
    one("ScalesAfterUse", "keep", "grad"),
    one("SetsData", "remat", "fs.grad", order=(0, 0)),
    one("MaxNorm", "replicated", "fs.grad"),
    # run again with other arguments, contexts, hooks or parameters than the first time
    one("AppendsToAList", "remat", "fs.grad", order=(0, 0)),
    one("AddsToADict", "remat", "jvp", order=(0, 0)),
    one("UsesACache", "remat", "grad of grad", order=(0, 0)),
    one("Grows", "codec remat", "fs.grad", order=(0, 0)),
    one("Hypernetwork", "remat", "fs.grad", leaves=True),
    one("FastWeights", "codec remat", "grad", leaves=True),
    one("WholeInner", "remat", "jvp", leaves=True),
    after("Borrows", "remat", "fs.grad"),
    one("Cached", "remat", "hvp", leaves=True),
    one("TensorHook", "remat", "grad of grad"),
    after("InnerAutograd", "remat", "hvp"),
    one("Attention", "remat", "hvp", leaves=True),
    one("Counts", "replicated remat", "jvp", order=(0, 0)),
    one("Lstm", "remat", "fs.grad", leaves=True),
    # what torch computes
    one("batch_norm", "remat", "hvp"),
    one("group_norm", "remat", "hvp"),
    one("silu", "remat", "hvp"),
    one("Sparse", "shard", "fs.grad"),
    one("Sparse", "keep", "grad of grad"),
    one("Scripted", "shard", "fs.grad", leaves=True),
]
"""Each was wrong, or crashed without a word about what to do."""


def found(test: Callable[..., None]) -> Callable[..., None]:
    for case in reversed(FOUND):
        test = example(case=case)(test)
    return test


def accept(results: list[str]) -> None:
    """Exact, refused with a name, or nothing to compare with."""
    for result in results:
        hypothesis.event(result.split(":")[0] or "exact")
        assert not result or result.startswith(("refused: ", "no reference: ")), result


@found
@settings(max_examples=COUNT)
@given(case=cases([t for t in TRANSFORMS if t != "penalty"], [(2,), (3,), (2, 2), (2, 1), (1,)]))
def test_equal_ranks(alone: Pool, case: Case) -> None:
    """In one process: a mesh whose ranks all do the same (mirror.py)."""
    accept(alone.run(mirrored, case))


@settings(max_examples=depth(4, COUNT // 10))
@given(case=cases(list(TRANSFORMS), [(2,)]))
def test_real_ranks(gloo2: Pool, case: Case) -> None:
    """With batches of their own."""
    accept(gloo2.run(on_real_ranks, case))


@example(case=one("ClampsWithoutGrad", "replicated", "per_sample"), clip=None)
@example(case=one("Scripted", "shard", "per_sample"), clip=None)
@example(case=one("TensorHook", "shard", "per_sample"), clip=0.5)
@example(case=one("BufferBeforeAndAfter", "remat", "per_sample"), clip=None)
@example(case=one("BufferBeforeAndAfter", "remat", "per_sample", order=(0, 0)), clip=0.5)
@settings(max_examples=COUNT // 10)
@given(case=cases(["per_sample"], [(2,), (2, 2)]), clip=st.sampled_from([None, 0.5]))
def test_per_sample(alone: Pool, case: Case, clip: float | None) -> None:
    accept(alone.run(per_sample, case, clip))


def simulated(rank: int, case: Case) -> str:
    return on_simulated(case)


@example(case=one("BufferBeforeAndAfter", "remat", "fs.grad", order=(0, 0), train=False))
@settings(max_examples=COUNT // 10)
@given(case=cases(list(MEANS), [(2,), (3,), (2, 2)], train=False))
def test_simulated_ranks(alone: Pool, case: Case) -> None:
    """Without dropout, whose numbers are each simulated rank's own."""
    accept(alone.run(simulated, case))


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_can_be_compared(alone: Pool, name: str) -> None:
    """There is a reference for plain autograd of each: none of the cases above is empty for it."""
    result = alone.run(mirrored, Case((name,), ("shard",), "backward"))[0]
    assert not result.startswith("no reference"), result


def traffic(rank: int) -> list[str]:
    plain = Plain(Case(("Linear", "Mlp", "Linear"), ("shard",) * 3, "fs.grad"), 1, equal=True)
    spec = plain.spec.on(mirror.mesh({"shard": 2}))
    f, params, _ = sharded(plain, plain.sharded(), spec, batch(0), 0)
    return mirror.sent(2, lambda: fs.grad(f)(params))


def test_equal_ranks_gather_again(alone: Pool) -> None:
    """All for forward, for backward the one whose weights it reads and that is gone; each is reduced once."""
    assert sorted(alone.run(traffic)[0]) == ["gather 10"] * 2 + ["gather 20"] * 2 + ["reduce 20"] * 2 + ["reduce 40"]
