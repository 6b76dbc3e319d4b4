"""R1 and R4: whatever people write in a forward is exact, or an error that says so, and nothing of the caller's is changed.

Pieces of fuzz_modules.py, put together at random, under each transform, beside the plain model (fuzz_cases.py);
``pytest --thorough tests/combined/test_fuzz.py`` runs 20,000. Every bug that was found is an example.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from depth import at_most, depth
from fuzz_cases import MEANS, PS, TRANSFORMS, Case, mirrored, on_real_ranks, on_simulated, per_sample
from fuzz_modules import PIECES
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool

COUNT = depth(40, 10_000)


@st.composite
def cases(draw: st.DrawFn, transforms: list[str], meshes: list[tuple[int, ...]], *, train: bool = True) -> Case:
    pieces = draw(st.lists(st.sampled_from(sorted(PIECES, reverse=True)), min_size=1, max_size=3))
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
    after("Data", "remat", "hvp"),
    one("GradInNoGrad", "remat", "grad of jvp", leaves=True),
    # first touched in inference mode
    one("ConditionInInference", "codec", "fs.grad", leaves=True),
    one("ProbeInInference", "shard", "fs.grad"),
    # changed in place
    one("ClampsWithoutGrad", "shard", "fs.grad"),
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
    *(Case(("Hypernetwork", "Linear"), ("shard", "remat"), transform, root="remat") for transform in ("fs.grad", "hvp")),
    after("Borrows", "remat", "fs.grad"),
    one("Cached", "remat", "hvp", leaves=True),
    one("TensorHook", "remat", "grad of grad"),
    after("InnerAutograd", "remat", "hvp"),
    one("InnerAutogradByWeight", "remat", "fs.grad", order=(0, 0)),
    one("GradientThroughItsLayer", "keep remat", "double backward", order=(0, 0)),
    after("InnerAutogradByWeight", "shard", "fs.grad", order=(1, 0, 1)),
    after("BackwardHooked", "remat", "double backward"),
    one("Attention", "remat", "hvp", leaves=True),
    one("Counts", "replicated remat", "jvp", order=(0, 0)),
    one("Lstm", "remat", "fs.grad", leaves=True),
    one("SavedOnCpu", "remat", "fs.grad", leaves=True, root="shard", mesh=(2, 1)),
    # saved in another dtype than the unit's
    *(one("Rotates", "shard", transform) for transform in ("fs.grad of fs.grad", "hvp")),
    # what torch computes
    one("batch_norm", "remat", "hvp"),
    one("group_norm", "remat", "hvp"),
    one("silu", "remat", "hvp"),
    one("Sparse", "keep", "grad of grad"),
    # what this file took for the reference
    Case(("NormWithoutGrad", "Table"), ("shard", "shard"), "hvp"),
    Case(("Replaces", "Replaces"), ("", "remat"), "jvp", root="remat"),
]
"""Each was wrong, or crashed without a word about what to do."""

BY_WEIGHT = {"InnerAutogradByWeight", "GradientThroughItsLayer"}
MAY_BE_REFUSED: dict[str, set[str]] = {
    "was changed in place in forward": {"ClampsData", "ClampsWithoutGrad", "MaxNorm", "ScalesAfterUse", "SetsData"},
    "reads tensor.data": {"ClampsData", "Data", "Rewrapped", "batch_norm"},
    "uses a torch.func transform": {"InnerGradByInput", "InnerStep", *BY_WEIGHT},
    "torch.utils.checkpoint inside functional_call": {"Checkpointed", "CheckpointedReentrant"},
    "calls tensor.register_hook": {"TensorHook"},
    "reads tensor.requires_grad": {"InnerAutograd", "TensorHook", *BY_WEIGHT},
    "which others of its arguments are computed from": {*BY_WEIGHT},
    "is read in forward where its module computes with another tensor": {*BY_WEIGHT},
    "it was freed and gathered again in this call": {*BY_WEIGHT},
    "with the backward hook": {"BackwardHooked"},
    "within torch.autograd.graph.saved_tensors_hooks": {"SavedOnCpu"},
    "reads other parameters in one of its runs": {"Cached"},
    "puts a tensor into its buffer": {"Counts"},
    "does not own it": {"Borrows"},
    "neither an argument nor reached from one": {"Cached", "InnerAutograd", "Rewrapped"},
    "which is not one of its arguments": {"Cached"},  # the same, where the parameter is known
    "Batching rule not implemented for aten::lstm": {"Lstm"},  # recomputed on simulated ranks
    "Batching rule not implemented for aten::div.out": {"spectral_norm"},  # recomputed for each sample
    # clipped, whose units are differentiated one by one
    "attempting to call Tensor.requires_grad_()": {"InnerAutograd", *BY_WEIGHT},
    "a tensor was torch.float32 of shape": {"AutocastSingle"},  # recomputed for each sample
}
"""The pieces that may be refused, by what the error says. Any other refusal is a defect."""
FLOOR = 0.6
"""The part of the cases that have a reference which must be exact."""


def kind(case: Case, result: str) -> str:
    """Return "exact", "refused" or "no reference"; anything else is an AssertionError, a refusal of other pieces too."""
    found = result.split(":")[0] or "exact"
    assert found in ("exact", "refused", "no reference"), result
    if found == "refused":
        expected = [pieces for said, pieces in MAY_BE_REFUSED.items() if said in result]
        assert any(pieces & {*case.pieces} for pieces in expected), result
    return found


def check_cases(drawn: st.SearchStrategy[Any], count: int, run: Callable[..., list[str]]) -> None:
    """Run so many cases; most of those that can be compared are exact."""
    kinds: Counter[str] = Counter()

    @settings(max_examples=count)
    @given(drawn)
    def check(drawn: Any) -> None:
        case, *more = drawn if isinstance(drawn, tuple) else (drawn,)
        kinds.update(kind(case, result) for result in run(case, *more))

    check()
    if count >= 10:  # fewer say little
        assert kinds["exact"] >= FLOOR * (kinds["exact"] + kinds["refused"]), kinds
        assert kinds["exact"] >= kinds["no reference"], kinds


@at_most(18)
@pytest.mark.parametrize("case", FOUND, ids=lambda case: "-".join((*case.pieces, *case.ps, case.transform)))
def test_found(alone: Pool, case: Case) -> None:
    """What was wrong once is exact, or refused."""
    for result in alone.run(mirrored, case):
        kind(case, result)


def test_equal_ranks(alone: Pool) -> None:
    """In one process: a mesh whose ranks all do the same (mirror.py)."""
    transforms = [t for t in TRANSFORMS if t != "penalty"]
    check_cases(cases(transforms, [(2,), (3,), (2, 2), (2, 1), (1,)]), COUNT, functools.partial(alone.run, mirrored))


def test_real_ranks(gloo2: Pool) -> None:
    """With batches of their own."""
    check_cases(cases(list(TRANSFORMS), [(2,)]), depth(4, COUNT // 10), functools.partial(gloo2.run, on_real_ranks))


PER_SAMPLE = [
    (one("ClampsWithoutGrad", "replicated", "per_sample"), None),
    (one("TensorHook", "shard", "per_sample"), 0.5),
    (one("BufferBeforeAndAfter", "remat", "per_sample"), None),
    (one("BufferBeforeAndAfter", "remat", "per_sample", order=(0, 0)), 0.5),
    (Case(("weight_norm", "Table"), ("", "remat"), "per_sample", leaves=True), None),  # reads what is given in full
]


@pytest.mark.parametrize(("case", "clip"), PER_SAMPLE, ids=lambda x: x.pieces[0] if isinstance(x, Case) else str(x))
def test_found_per_sample(alone: Pool, case: Case, clip: float | None) -> None:
    for result in alone.run(per_sample, case, clip):
        kind(case, result)


def test_per_sample(alone: Pool) -> None:
    drawn = st.tuples(cases(["per_sample"], [(2,), (2, 2)]), st.sampled_from([None, 0.5]))
    check_cases(drawn, COUNT // 10, functools.partial(alone.run, per_sample))


@pytest.mark.parametrize("transform", ["fs.grad", "jvp"])
def test_found_on_simulated_ranks(alone: Pool, transform: str) -> None:
    case = one("BufferBeforeAndAfter", "remat", transform, order=(0, 0, 0), train=False)
    assert [kind(case, result) for result in alone.run(on_simulated, case)] == ["exact"]


def test_simulated_ranks(alone: Pool) -> None:
    """Without dropout, whose numbers are each simulated rank's own."""
    drawn = cases(list(MEANS), [(2,), (3,), (2, 2)], train=False)
    check_cases(drawn, COUNT // 10, functools.partial(alone.run, on_simulated))


@at_most(58)
@pytest.mark.parametrize("name", PIECES)
def test_every_piece_can_be_compared(alone: Pool, name: str) -> None:
    """There is a reference for plain autograd of each: none of the cases above is empty for it."""
    result = alone.run(mirrored, Case((name,), ("shard",), "backward"))[0]
    assert not result.startswith("no reference"), result
    assert not result or any(name in pieces for pieces in MAY_BE_REFUSED.values()), result
