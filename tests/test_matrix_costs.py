"""What a step of whole matrices costs: what is sent, who has how much to do, what is alive."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from collective_log import Collectives, Sent, world
from depth import at_most, depth, each, seldom
from ranks import Pool
from test_matrices import piece_of
from test_memory import Peak, no_collector
from torch import nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import P
from funshard.collectives import ProcessAxis
from funshard.optim._by_matrix import rules as muon_module

# --- what is sent ---

AXES: dict[str, tuple[str | tuple[str, ...] | None, tuple[str, ...]]] = {
    "fsdp": ("shard", ("shard",)),
    "ddp": (None, ("shard",)),
    "hsdp": ("shard", ("replicate", "shard")),
    "two axes": (("replicate", "shard"), ("replicate", "shard")),
}


def blocks(count: int, size: int, device: str = "cpu") -> nn.Sequential:
    """Equal ones, of matrices alone."""
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(size, size, bias=False, device=device) for _ in range(3))) for _ in range(count))
    )


def on_fake(model: nn.Module, axes: str, ranks: int, pattern: str = "*") -> fs.PartitionSpec:
    """The model's blocks as units, on a mesh that exists in name only; of two axes the first has 2 ranks."""
    axis, names = AXES[axes]
    sizes = (ranks,) if len(names) == 1 else (2, ranks // 2)
    return fs.by_path({pattern: P(axis)})(model).on(init_device_mesh("cpu", sizes, mesh_dim_names=names))


def step(spec: fs.PartitionSpec, **options: Any) -> None:
    params = {unit.key: torch.zeros(spec.shard_numel(unit)) for unit in spec}
    init, update = fs.optim.muon(spec, steps=1, **options)
    update(params, init(params), params)


def in_shares(pieces: list[int], count: int) -> list[int]:
    """How much of these is in each of so many shares of every one."""
    return [sum(n * (i + 1) // count - n * i // count for n in pieces) for i in range(count)]


def slices_of(matrix: Any, spec: fs.PartitionSpec) -> list[int]:
    """How much of a matrix is in each slice of its unit under HSDP."""
    return [(p := piece_of(matrix, spec, (0, i))).high - p.low for i in range(spec.size(matrix.unit))]


@at_most(1)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("axes", AXES)
@each
def test_what_is_sent(axes: str, ranks: int, rank: int) -> None:
    """One all-to-all each way for each group and axis; each matrix goes once to its owner, and back once to each replica.

    Back to several replicas in shares: what one takes of memory, on the rank that has most to send, is two thirds of a unit.
    """
    with world(ranks, rank):
        spec = on_fake(blocks(7, 8), axes, ranks)
        known = fs.optim.matrices(spec)
        with Collectives() as sent:
            step(spec)
        sizes = [size for _, size in spec.bound_mesh.sizes]
        at = tuple(axis.rank for _, axis in spec.bound_mesh.axes if isinstance(axis, ProcessAxis) and axis.rank is not None)
        expected: list[Sent] = []
        for names in known.groups:
            some = [known.by_name[name] for name in names]
            own = sum(m.param.numel for m in some if m.owner == at)
            part = {m.name: (p := piece_of(m, spec, at)).high - p.low for m in some}
            mine = [part[m.name] for m in some if m.owner[0] == at[0]]
            replicas = Counter[Any]()
            for m in some:
                replicas[m.owner[:1]] += m.param.numel  # pyright: ignore[reportArgumentType]
            most, slices = len(replicas) and max(replicas.values()), ranks // sizes[0]
            if axes == "fsdp":
                expected += [Sent("", sum(part.values()), 0, ranks), Sent("", own, 0, ranks)]
            elif axes == "ddp":
                goes = math.ceil(1.5 * (ranks * most + 2 * sum(replicas.values())) / some[0].unit.numel)
                expected += [Sent("", ranks * n, 0, ranks) for n in in_shares(mine, goes)]
            elif axes == "hsdp":
                goes = math.ceil(1.5 * (2 * most + 2 * sum(replicas.values())) / (slices * some[0].unit.numel))
                expected.append(Sent("", sum(mine), 0, slices))
                whole = [n for m in some if m.owner == at for n in slices_of(m, spec)]
                expected += [Sent("", n, 0, slices) for n in in_shares(whole, goes)]
                expected += [Sent("", 2 * n, 0, 2) for n in in_shares(mine, goes)]
        if axes == "two axes":  # what passes through a rank on its way is another's
            assert len(sent.all) == 4 * len(known.groups)
            assert Counter(s.ranks for s in sent.all) == Counter(sizes * 2 * len(known.groups))
        else:
            bfloat16 = [s._replace(op="all_to_all_single", bytes=2 * s.numel) for s in expected]
            assert sorted(sent.all) == sorted(bfloat16)


# --- who works ---


class Llama(nn.Module):
    """The shapes of one, on no device."""

    def __init__(self, layers: int, dim: int, hidden: int, kv: int) -> None:
        super().__init__()
        sizes = [(dim, dim), (dim, kv), (dim, kv), (dim, dim), (dim, hidden), (dim, hidden), (hidden, dim)]
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(a, b, bias=False, device="meta") for a, b in sizes) for _ in range(layers)
        )


@at_most(2)
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("shape", [(32, 4096, 14336, 1024), (80, 8192, 28672, 1024)], ids=["8B", "70B"])
def test_balance(shape: tuple[int, int, int, int], ranks: int) -> None:
    """The dearest rank is within a tenth of what no assignment can go below."""
    known = fs.optim.matrices(fs.by_path({"layers.*": P("shard")})(Llama(*shape)).on({"shard": ranks}))
    costs = sorted((m.cost for m in known.chosen), reverse=True)
    loads = Counter[Any]()
    for m in known.chosen:
        loads[m.owner] += m.cost  # pyright: ignore[reportArgumentType]
    # of k N + 1 matrices some rank has k + 1
    least = max(sum(costs) / ranks, *((k + 1) * costs[k * ranks] for k in range(-(-len(costs) // ranks))))
    assert max(loads.values()) <= 1.1 * least


@at_most(3)
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("axes", AXES)
def test_ranks_work_at_the_same_time(axes: str, ranks: int) -> None:
    """Although a rank begins a group when all have done the last but one: within an eighth of what nobody can go below."""
    with world(ranks):
        known = fs.optim.matrices(on_fake(Llama(32, 4096, 14336, 1024), axes, ranks, "layers.*"))
    done, before, last = Counter[Any](), 0.0, 0.0  # by rank when it is done, and when all were with the groups before
    for group in known.groups:
        work = Counter[Any]()
        for name in group:
            work[known.by_name[name].owner] += known.by_name[name].cost  # pyright: ignore[reportArgumentType]
        for owner in {*done, *work}:
            done[owner] = max(done[owner], before) + work[owner]  # pyright: ignore[reportArgumentType]
        before, last = last, max(done.values())
    assert last <= 1.125 * sum(m.cost for m in known.chosen) / ranks


def worked(rank: int, sizes: dict[str, int], axis: Any) -> list[tuple[int, ...]]:
    """The shapes of what a rank has made orthogonal in two steps."""
    done: list[tuple[int, ...]] = []
    plain = muon_module.orthogonal

    def orthogonal(x: torch.Tensor, **options: Any) -> torch.Tensor:
        done.extend([tuple(x.shape[-2:])] * x.shape[:-2].numel())
        return plain(x, **options)

    model = nn.Sequential(*(nn.Linear(i + 2, 3) for i in range(5)), nn.Linear(2, 3))
    spec = fs.policies.always(P(axis))(model).on(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    params = fs.shard(model, spec)
    muon_module.orthogonal = orthogonal
    try:
        init, update = fs.optim.muon(spec)
        state = init(params)
        for _ in range(2):
            params, state = update(params, state, params)
    finally:
        muon_module.orthogonal = plain
    return done


@at_most(1)
@each
@pytest.mark.parametrize("mesh", ["fsdp", "ddp", "hsdp", "4"])
def test_each_matrix_is_worked_on_once(gloo2: Pool, gloo4: Pool, mesh: str) -> None:
    """In the whole mesh, by each rank some."""
    of = {"fsdp": ({"shard": 2}, "shard"), "ddp": ({"shard": 2}, None), "4": ({"shard": 4}, "shard")}
    sizes, axis = of.get(mesh, ({"replicate": 2, "shard": 2}, "shard"))
    done = (gloo2 if len(sizes) == 1 and sizes["shard"] == 2 else gloo4).run(worked, sizes, axis)
    assert Counter(shape for some in done for shape in some) == {**{(3, i + 2): 2 for i in range(1, 5)}, (3, 2): 4}
    assert all(done)


# --- what is alive ---


def beyond(model: nn.Module, axes: str, **options: Any) -> float:
    """What a step of Muon holds beyond one of SGD, at its peak, in units."""
    spec = on_fake(model, axes, 8)
    bytes_of: list[int] = []
    for init, update in (
        fs.optim.muon(spec, **options),
        fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, **options),
    ):
        grads, params = ({unit.key: torch.zeros(spec.shard_numel(unit)) for unit in spec} for _ in range(2))
        with Collectives():
            params, state = update(grads, init(params), params)  # with what is made once
        grads = {key: torch.zeros_like(p) for key, p in params.items()}
        with no_collector(), Collectives(), Peak() as peak:
            update(grads, state, params)
        bytes_of.append(peak.bytes)
    return (bytes_of[0] - bytes_of[1]) / sum(p.nbytes for p in model[0].parameters())  # pyright: ignore[reportIndexIssue]


@seldom
@pytest.mark.parametrize("axes", AXES)
def test_no_more_than_an_elementwise_step(axes: str) -> None:
    """Which copies all gradients."""
    with world(8):
        assert beyond(blocks(24, 32), axes) <= 0


@seldom
@each
@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("axes", AXES)
def test_at_most_two_units_beyond_a_donated_elementwise_step(axes: str, rank: int) -> None:
    """Which makes nothing: so this is what is under way, however many units there are."""
    with world(8, rank):
        few, many = (beyond(blocks(count, 32), axes, donate=True) for count in depth((8, 16), (16, 32)))
        assert few <= 2
        assert many <= few + 0.2
