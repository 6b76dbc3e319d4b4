"""The examples with axes of their own are exact: their gradients are those of the single-process model, norm included."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, depth, each, every, mark_seldom, seldom
from ranks import Pool, launch, mesh_of, real_ranks
from test_examples import EXAMPLES, losses
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import funshard as fs
from funshard import collectives as c
from funshard.collectives import Mesh

sys.path.append(str(EXAMPLES))
import moe
import tensor_parallel

Tree = dict[str, Tensor]
BATCH, SEQ = 2, 8
TINY = {"layers": 2, "dim": 8, "heads": 4, "kv_heads": 4, "hidden": 12}


def check(grads: fs.Params, spec: fs.PartitionSpec, want: Tree) -> None:
    """Whole gradients, and the norm of all ranks' slices."""
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(fs.unshard(grads, spec), want, **tolerance)
    norm = torch.stack([g.norm() for g in want.values()]).norm()
    torch.testing.assert_close(fs.optim.global_norm(grads, spec), norm, **tolerance)


# --- tensor parallel ---
def llama(**options: Any) -> nn.Module:
    """A model, by default the whole one."""
    torch.manual_seed(0)
    return tensor_parallel.Llama(**TINY, **options).double()


WAYS = [{}, {"sequence": True}, {"sequence": True, "reshard": False}]
MESHES = [{"shard": 2, "tensor": 2}, {"tensor": 4, "shard": 1}, {"shard": 4, "tensor": 1}]


@at_most(1)
@each(way=WAYS, sizes=MESHES)
@real_ranks(4)
def test_tensor_parallel_on_four_ranks(rank: int, sizes: dict[str, int], way: dict[str, bool]) -> None:
    """Ranks along "tensor" read and drop the same."""
    whole, model, mesh = llama(), llama(parts=sizes["tensor"]), mesh_of(**sizes)
    at = mesh.get_local_rank("shard")
    xys = torch.randint(256, (sizes["shard"], 2, BATCH, SEQ), generator=torch.Generator().manual_seed(1))

    def loss(call: Any, xy: Tensor) -> Tensor:
        torch.manual_seed(at)
        if (axis := call.axis("tensor")) is None:
            return call(*xy)
        value = call(*xy, tensor_parallel.Split(axis, way.get("sequence", False)))
        return fs.collectives.all_reduce(value, axis)  # of its part of the sequence, where that is split

    spec = tensor_parallel.policy(way.get("reshard", True))(model).on(mesh)
    fs.testing.assert_exact(loss, whole, spec, xys[at], local=model)


LEARN: dict[str, tuple[str, list[tuple[int, str]], float]] = {
    "tensor_parallel": (
        "--layers 1 --heads 4 --kv-heads 2 --hidden 64",
        [(1, ""), (4, "--tensor 2 --sequence"), *depth([], [(4, "--tensor 2"), (2, "--tensor 2")])], 2e-3),
    "moe": ("--layers 1 --heads 2 --hidden 32 --experts 4 --balance 0.1", [(1, "--expert 1"), (4, "--expert 2")], 2e-3),
    "pipeline": (
        "--blocks 2 --heads 2 --batch 16",
        [(1, ""), (2, "--stages 2 --schedule 1f1b"), *depth([], [(2, "--stages 2")])], 2e-3),
    "mixtral": ("--layers 1 --heads 2 --hidden 32 --experts 4", [(1, "--expert 1"), (4, "--expert 2")], 3e-2),  # by rank
}  # fmt: skip
"""Flags, the numbers of ranks with those of each, and by how much losses may differ."""


@seldom
@pytest.mark.parametrize("name", LEARN)
def test_scripts_learn_alike_on_any_ranks(name: str) -> None:
    """The same losses, auxiliary ones included, on one rank and on more."""
    if name == "mixtral":
        pytest.importorskip("transformers.integrations.moe")
    flags, runs, apart = LEARN[name]
    tiny = f"--dim 32 --seq 32 --batch 4 --steps 12 --lr 1e-2 --log-every 1 --max-bytes 200000 {flags}"
    one, *others = (losses(launch(ranks, EXAMPLES / f"{name}.py", *f"{tiny} {more}".split())) for ranks, more in runs)
    assert len(one) == 12
    assert one[-1] < one[0] - 1
    for other in others:
        assert other == pytest.approx(one, abs=apart)


# --- experts ---
def experts(parts: int = 1) -> tuple[nn.Module, Tree]:
    torch.manual_seed(0)
    model = moe.MoE(layers=2, dim=8, heads=2, seq=SEQ, hidden=12, experts=8, parts=parts).double()
    return model, {name: p.detach() for name, p in model.named_parameters()}


def moe_rank(rank: int, sizes: dict[str, int], tokens: int, balance: float) -> list[list[int]]:
    """Compare a rank's gradient, and a product with the Hessian, with those of the joined batch.

    Returns each layer's rows for the experts here.
    """
    (whole, full), (model, _) = experts(), experts(sizes["expert"])
    torch.manual_seed(1)
    xys = torch.randint(256, (torch.Size(sizes.values()).numel(), 2, 1, tokens))
    spec = moe.policy()(model).on(mesh_of(**sizes))
    seen, run = [], moe.run_experts

    def watched(rows: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        seen.append(counts)
        assert sum(counts) == len(rows)
        return run(rows, counts, *weights)

    def loss(params: Tree) -> Tensor:
        return fs.functional_call(model, params, (*xys[rank], spec.bound_mesh, balance), spec=spec)

    params = fs.shard(full, spec)
    with mock.patch.object(moe, "run_experts", watched):
        grads = fs.grad(loss)(params)
    joined = (xys[:, 0, 0], xys[:, 1, 0], moe.ALONE, balance)
    of_joined = torch.func.grad(lambda p: torch.func.functional_call(whole, p, joined))
    check(grads, spec, of_joined(full))
    direction = {name: p.cos() for name, p in full.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        product = fs.hvp(loss, params, fs.shard(direction, spec))
        want = torch.func.jvp(of_joined, (full,), (direction,))[1]
    check(product, spec, want)
    return seen


MOE_MESHES = [{"expert": 2, "shard": 2}, {"shard": 2, "expert": 2}, {"expert": 4, "shard": 1}, {"expert": 1, "shard": 4}]


@at_most(1)
@each(balance=[0.5, 0.0], tokens=[2, SEQ], sizes=mark_seldom(MOE_MESHES, *MOE_MESHES[:2]))
def test_experts_on_four_ranks(gloo4: Pool, sizes: dict[str, int], tokens: int, balance: float) -> None:
    """Of uneven counts, with experts that have no tokens: two tokens of each rank have eight experts to choose from."""
    seen = gloo4.run(moe_rank, sizes, tokens, balance)
    counts = [count for rank in seen for layer in rank for count in layer]
    assert len({*counts}) > 1
    if tokens == 2:
        assert 0 in counts


# --- shards over one axis of weights that are split by hand over another ---
class Parallel(nn.Module):
    """An MLP whose hidden layer is split over an axis: columns of the first weight, rows of the second."""

    def __init__(self, width: int, hidden: int, tp: c.Axis) -> None:
        super().__init__()
        self.tp = tp
        self.up = nn.Linear(width, hidden // tp.size).double()
        self.down = nn.Linear(hidden // tp.size, width, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        x = c.vary(x, self.tp, reduce="sum")  # one value on all, used by each for its part: gradients add up
        return c.sum_shards(self.down(torch.tanh(self.up(x))), self.tp)  # each has a part of the sum


def split(width: int, hidden: int, reshard: bool) -> tuple[nn.Module, nn.Module, fs.PartitionSpec, c.Axis, tuple[int, int]]:
    """A plain MLP, this rank's part of it, the spec of that, the other axis, and where this rank is."""
    grid = mesh_of(shard=2, tp=2)
    tp = Mesh.of(grid)["tp"]
    at = grid.get_local_rank("shard"), grid.get_local_rank("tp")
    plain = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width, bias=False)).double()
    model = nn.Sequential(Parallel(width, hidden, tp))
    with torch.no_grad():
        model[0].up.weight.copy_(plain[0].weight.chunk(2)[at[1]])
        model[0].up.bias.copy_(plain[0].bias.chunk(2)[at[1]])
        model[0].down.weight.copy_(plain[2].weight.chunk(2, dim=1)[at[1]])
    return plain, model, fs.by_type(Parallel, p=fs.P("shard", reshard=reshard))(model).on(grid["shard"], submesh=True), tp, at


@each(reshard=[True, False])
@pytest.mark.parametrize(("width", "hidden"), [(3, 10), (5, 34), (17, 6)])
@real_ranks(4)
def test_2d_mlp_with_nd_mesh(rank: int, width: int, hidden: int, reshard: bool) -> None:
    """FSDP x TP: the spec on one axis of the mesh, the model's own collectives over the other, has the plain model's gradients.
    Its norm is of this rank's part of the model; the norm of those over the other axis is the whole model's, by any p."""
    plain, model, spec, tp, at = split(width, hidden, reshard)
    xs, close = torch.randn(2, 4, width, dtype=torch.float64), {"rtol": 1e-9, "atol": 1e-12}
    loss = lambda q: (fs.functional_call(model, q, (xs[at[0]],), spec=spec) ** 2).mean()  # noqa: E731
    grads, value = fs.grad_and_value(loss)(fs.shard(model, spec))
    losses = [(plain(x) ** 2).mean() for x in xs]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(value, losses[at[0]].detach(), **close)
    for p in (None, 1.0, 2.0, 3.0, math.inf):
        if p is not None:  # of what is clipped already
            norm = torch.linalg.vector_norm(c.gather_slices(fs.optim.global_norm(grads, spec, p=p)[None], tp), p)
            most = norm.item() / 3
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), most, p), rtol=1e-9, atol=0)
            grads = {key: g * (most / (norm + 1e-6)).clamp(max=1) for key, g in grads.items()}
        full = fs.unshard(grads, spec)
        torch.testing.assert_close(full["0.up.weight"], plain[0].weight.grad.chunk(2)[at[1]], **close)
        torch.testing.assert_close(full["0.up.bias"], plain[0].bias.grad.chunk(2)[at[1]], **close)
        torch.testing.assert_close(full["0.down.weight"], plain[2].weight.grad.chunk(2, dim=1)[at[1]], **close)


@real_ranks(4)
def test_a_mesh_of_some_ranks_is_refused_by_norms_and_checkpoints(rank: int, tmp_path: Path) -> None:
    """Clipping would drift and one checkpoint would have the slices of another: unless the spec says ``submesh=True``."""
    _, model, spec, _, at = split(5, 34, reshard=True)
    own, folder = spec.on(mesh_of(shard=2, tp=2)["shard"]), str(tmp_path)
    params = fs.shard(model, own)
    fs.functional_call(model, params, (torch.ones(2, 5, dtype=torch.float64),), spec=own)  # which says nothing of the others
    said = []
    for call in (
        lambda: fs.optim.global_norm(params, own),
        lambda: fs.optim.clip_by_global_norm(params, own, 1.0),
        lambda: fs.optim.vdot(params, params, own),
        lambda: fs.checkpoint.save(folder + "/1", params, own),
        lambda: fs.checkpoint.load(folder + "/1", own),
        lambda: fs.checkpoint.latest(folder, own),
        lambda: fs.checkpoint.export(folder + "/2", params, own),
    ):
        with pytest.raises(ValueError, match=r"the spec's mesh \{'shard': 2\} has 2 of 4 ranks: expected all of") as error:
            call()
        said.append(str(error.value))
    assert all("spec.on(mesh, submesh=True)" in text for text in said)
    assert said[3].startswith("checkpoint.save: ")
    path = f"{folder}/{at[1]}"
    fs.checkpoint.save(path, params, spec)
    loaded = fs.checkpoint.load(path, spec)
    assert all(loaded[key].equal(params[key]) for key in params)
    alone = fs.policies.whole()(model).on({"shard": 1})  # which talks to nobody
    fs.optim.global_norm(fs.shard(model, alone), alone)
    torch.distributed.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


# --- pipeline ---
import pipeline as example  # noqa: E402

DIM = 8


def gpt(stages: int = 1) -> example.GPT:
    torch.manual_seed(0)
    return example.GPT(4, DIM, 2, SEQ, stages).double()


STAGES = [{"stage": 2, "shard": 1}, {"stage": 2, "shard": 2}, {"stage": 4, "shard": 1}, {"stage": 1, "shard": 4}]
STAGES += [{"shard": 2, "stage": 2}]


@at_most(2)
@each(sizes=mark_seldom(STAGES, *STAGES[:3]))
@real_ranks(lambda sizes: math.prod(sizes.values()))
def test_both_schedules(rank: int, sizes: dict[str, int]) -> None:
    """1F1B keeps activations of S - s micro-batches on stage s of S, whatever their number."""
    mesh, model, whole = mesh_of(**sizes), gpt(sizes["stage"]), gpt()
    spec, full = example.policy()(model).on(mesh), {name: p.detach() for name, p in whole.named_parameters()}
    params, along, axis = fs.shard(full, spec), {name: p.cos() for name, p in full.items()}, spec.axis("stage")
    torch.manual_seed(1)
    xys = torch.randint(256, (sizes["shard"], 2, 4, BATCH, SEQ))  # the same four micro-batches for all stages
    x, y = xys[mesh.get_local_rank("shard")]

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (example.spmd, x, y, axis), spec=spec)

    def at_once(params: Tree) -> Tensor:
        """In one process, without stages or micro-batches."""
        x, y = xys.transpose(0, 1).flatten(1, 3)
        return torch.func.functional_call(whole, params, (lambda model: model.predict(model.blocks(model.embed(x)), y),))

    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        want = torch.func.grad(at_once)(full)
        check(fs.grad(loss)(params), spec, want)
        check(fs.hvp(loss, params, fs.shard(along, spec)), spec, fs.hvp(at_once, full, along))
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
        shards, value = example.one_f_one_b(model, params, x, y, axis, spec)
    assert kept == 0
    check(shards, spec, want)
    assert (value > 0) == (mesh.get_local_rank("stage") == sizes["stage"] - 1)
    assert most == sizes["stage"] - mesh.get_local_rank("stage")


@every(schedule=["spmd", "1f1b"], count=[2, 8])
def test_each_unit_is_gathered_and_reduced_once_a_step(schedule: str, count: int) -> None:
    """For any number of micro-batches; what they send besides are their results, and cotangents."""
    with world(4):
        model = gpt(2)
        spec = example.policy()(model).on(mesh_of(stage=2, shard=2))
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
    reduced = sorted(one.numel // 2 for one in sent.all if one.op == "reduce_scatter")
    assert [numel for numel in reduced if numel in sizes] == sizes
    activations = {BATCH * SEQ * DIM * n for n in (1, count, count // 2)} | {0}
    assert {one.numel for one in sent.all} <= {*sizes, *(2 * n for n in sizes), *activations}
