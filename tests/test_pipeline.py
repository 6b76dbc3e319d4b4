"""examples/pipeline.py: gradients, norms and Hessian-vector products are those of the single-process model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, depth, each, every, mark_seldom, seldom
from ranks import Pool, launch
from test_examples_axes import Tree, bind, check, losses
from test_memory import Peak
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import funshard as fs

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))
import pipeline as example  # noqa: E402

MICRO, BATCH, SEQ, DIM = 4, 2, 6, 8


def gpt(stages: int = 1) -> example.GPT:
    torch.manual_seed(0)
    return example.GPT(4, DIM, 2, SEQ, stages).double()


def batches(sizes: Mapping[str, int]) -> Tensor:
    """What each rank reads, the same for all stages: [ranks, 2, micro-batches, batch, seq]."""
    torch.manual_seed(1)
    x = torch.randint(256, (1, sizes["shard"], 2, MICRO, BATCH, SEQ))
    return x.expand(sizes["stage"], -1, -1, -1, -1, -1).flatten(0, 1)


def expected(sizes: Mapping[str, int], direction: Tree | None = None) -> Tree:
    """In one process, without stages or micro-batches: the gradient, or its derivative in a direction."""
    model = gpt()
    full = {name: p.detach() for name, p in model.named_parameters()}
    x, y = batches(sizes)[: sizes["shard"]].transpose(0, 1).flatten(1, 3)

    def whole(model: example.GPT) -> Tensor:
        return model.predict(model.blocks(model.embed(x)), y)

    def loss(params: Tree) -> Tensor:
        return torch.func.functional_call(model, params, (whole,))

    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        return torch.func.grad(loss)(full) if direction is None else fs.hvp(loss, full, direction)


def whole_params() -> Tree:
    return {name: p.detach() for name, p in gpt().named_parameters()}


def along() -> Tree:
    return {name: p.cos() for name, p in whole_params().items()}


def derivatives(mesh: Any, xy: Tensor, model: example.GPT, full: Tree, direction: Tree) -> list[tuple[Tree, Tensor]]:
    """A rank's gradient and Hessian-vector product of the whole pipeline, and their norms."""
    spec = example.policy()(model).on(mesh)
    params, tangent = fs.shard(full, spec), fs.shard(direction, spec)

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (example.spmd, xy[0], xy[1], spec.axis("stage")), spec=spec)

    with sdpa_kernel(SDPBackend.MATH):
        trees = fs.grad(loss)(params), fs.hvp(loss, params, tangent)
    return [(fs.unshard(tree, spec), fs.optim.global_norm(tree, spec)) for tree in trees]


MESHES = [{"stage": 2, "shard": 2}, {"stage": 4, "shard": 1}, {"stage": 1, "shard": 4}, {"shard": 2, "stage": 2}]


def on_ranks(rank: int, sizes: dict[str, int]) -> int:
    """Both schedules; the most micro-batches whose activations a rank keeps in 1F1B."""
    mesh = bind(sizes)
    xy = batches({"stage": sizes["stage"], "shard": sizes["shard"]})[mesh.get_local_rank("shard")]
    model = gpt(sizes["stage"])
    (grads, norm), (product, length) = derivatives(mesh, xy, model, whole_params(), along())
    want = expected(sizes)
    check(grads, norm, want)
    check(product, length, expected(sizes, along()))
    spec = example.policy()(model).on(mesh)
    kept = most = 0
    run_stage, backward = example.run_stage, torch.autograd.grad

    def counted_stage(*args: Any) -> Tensor:
        nonlocal kept, most
        kept, most = kept + 1, max(most, kept + 1)
        return run_stage(*args)

    def counted_backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal kept
        kept -= 1
        return backward(*args, **kwargs)

    with mock.patch.object(example, "run_stage", counted_stage), mock.patch("torch.autograd.grad", counted_backward):
        shards, value = example.one_f_one_b(model, fs.shard(gpt(), spec), xy[0], xy[1], spec.axis("stage"), spec)
    assert kept == 0
    check(fs.unshard(shards, spec), fs.optim.global_norm(shards, spec), want)
    assert (value > 0) == (mesh.get_local_rank("stage") == sizes["stage"] - 1)
    return most


@at_most(1)
@each(sizes=mark_seldom(MESHES, *MESHES[:2]))
def test_both_schedules_on_four_ranks(gloo4: Pool, sizes: dict[str, int]) -> None:
    """1F1B keeps activations of S - s micro-batches on stage s of S, whatever their number."""
    stages = torch.arange(4).view(*sizes.values())
    at = [*sizes].index("stage")
    of_rank = torch.arange(sizes["stage"]).view([-1 if i == at else 1 for i in range(2)]).expand(stages.shape).flatten()
    assert gloo4.run(on_ranks, sizes) == [sizes["stage"] - int(stage) for stage in of_rank]


def test_both_schedules_on_two_ranks(gloo2: Pool) -> None:
    assert gloo2.run(on_ranks, {"stage": 2, "shard": 1}) == [2, 1]


def peaks(rank: int) -> list[tuple[int, int]]:
    """The peaks of both schedules on one of two stages, for 4, 8 and 16 micro-batches."""
    model, out = example.GPT(2, DIM, 2, 32, 2), []
    spec = example.policy()(model).on(bind({"stage": 2, "shard": 1}))
    params, axis = fs.shard(example.GPT(2, DIM, 2, 32), spec), spec.axis("stage")
    for count in (4, 8, 16):
        x = torch.randint(256, (count, 4, 32))
        with Peak() as spmd:
            fs.grad(lambda p, x=x: fs.functional_call(model, p, (example.spmd, x, x, axis), spec=spec))(params)
        with Peak() as alternating:
            example.one_f_one_b(model, params, x, x, axis, spec)
        out.append((spmd.bytes, alternating.bytes))
    return out


@seldom
def test_peak_of_1f1b_does_not_grow_with_micro_batches(gloo2: Pool) -> None:
    """That of the pipeline as one function does."""
    for (spmd4, few), (spmd8, more), (spmd16, most) in gloo2.run(peaks):
        assert most < 1.05 * more < 1.1 * few
        assert spmd16 > 1.7 * spmd8 > 2.7 * spmd4
        assert 4 * most < spmd16


@every(schedule=["spmd", "1f1b"], count=[2, 8])
def test_each_unit_is_gathered_and_reduced_once_a_step(schedule: str, count: int) -> None:
    """For any number of micro-batches; what they send besides are their results, and cotangents."""
    with world(4):
        model = gpt(2)
        spec = example.policy()(model).on(bind({"stage": 2, "shard": 2}))
        params = {unit.key: torch.zeros(spec.shard_numel(unit)).double() for unit in spec}
        axis, x = spec.axis("stage"), torch.randint(256, (count, BATCH, SEQ))
        with Collectives() as sent:
            if schedule == "spmd":
                fs.grad(lambda p: fs.functional_call(model, p, (example.spmd, x, x, axis), spec=spec))(params)
            else:
                example.one_f_one_b(model, params, x, x, axis, spec)
    sizes = sorted(spec.shard_numel(unit) for unit in spec)
    gathers = sorted(one.numel for one in sent.all if one.op == "all_gather")
    assert [numel for numel in gathers if numel in sizes] == sizes
    assert sorted(one.numel for one in sent.all if one.op == "reduce_scatter" and one.numel // 2 in sizes) == [
        2 * n for n in sizes
    ]
    activations = {BATCH * SEQ * DIM * n for n in (1, count, count // 2)} | {0}
    assert {one.numel for one in sent.all} <= {*sizes, *(2 * n for n in sizes), *activations}


TINY = "--blocks 2 --dim 16 --heads 2 --seq 16 --batch 16 --steps 10 --log-every 1 --lr 1e-2 --max-bytes 20000"


@seldom
def test_every_number_of_ranks_learns_alike() -> None:
    """One process, and two stages by either schedule: the losses of the same training."""
    runs = (1, ""), (2, "--stages 2 --schedule 1f1b"), *depth((), ((2, "--stages 2"),))
    one, *others = (losses(launch(n, EXAMPLES / "pipeline.py", *f"{TINY} {flags}".split())) for n, flags in runs)
    assert len(one) == 10
    assert one[-1] < one[0]
    for found in others:
        assert found == pytest.approx(one, abs=2e-3)
