"""What a step of whole matrices costs: what is sent, who has how much to do, what is alive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_log import Collectives, Sent, world
from depth import at_most, depth, each, every, seldom
from ranks import mesh_of
from test_by_matrix import piece_of
from test_memory import Peak, no_collector
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.collectives import ProcessAxis

# --- what is sent ---
AXES: dict[str, tuple[str | tuple[str, ...] | None, tuple[str, ...]]] = {
    "fsdp": ("shard", ("shard",)),
    "ddp": (None, ("shard",)),
    "hsdp": ("shard", ("replicate", "shard")),
    "two axes": (("replicate", "shard"), ("replicate", "shard")),
}


def blocks(count: int, size: int, device: str = "cpu") -> nn.Sequential:
    """Equal ones, of matrices alone."""
    made = [[nn.Linear(size, size, bias=False, device=device) for _ in range(3)] for _ in range(count)]
    return nn.Sequential(*(nn.Sequential(*some) for some in made))


def on_fake(model: nn.Module, axes: str, ranks: int, pattern: str = "*") -> fs.PartitionSpec:
    """The model's blocks as units, on a mesh that exists in name only; of two axes the first has 2 ranks."""
    axis, names = AXES[axes]
    return fs.by_path({pattern: P(axis)})(model).on(mesh_of(ranks) if len(names) == 1 else mesh_of(2, ranks // 2))


def step(spec: fs.PartitionSpec, **options: Any) -> None:
    params = {unit.key: torch.zeros(spec.shard_numel(unit)) for unit in spec}
    init, update = fs.optim.muon(spec, steps=1, **options)
    update(params, init(params), params)


def in_shares(pieces: list[int], count: int) -> list[int]:
    """How much of these is in each of so many shares of every one."""
    return [sum(n * (i + 1) // count - n * i // count for n in pieces) for i in range(count)]


@at_most(1)
@each(axes=AXES, ranks=[8, 64], rank=[0, 3])
def test_what_is_sent(axes: str, ranks: int, rank: int) -> None:
    """One all-to-all each way for each group and axis; each matrix goes once to its owner, and back once to each replica.
    Back to several replicas in shares: what one takes of memory, on the rank that has most to send, is two thirds of a unit."""
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
                mine_whole = [(m, i) for m in some if m.owner == at for i in range(spec.size(m.unit))]
                whole = [(p := piece_of(m, spec, (0, i))).high - p.low for m, i in mine_whole]
                expected += [Sent("", n, 0, slices) for n in in_shares(whole, goes)]
                expected += [Sent("", 2 * n, 0, 2) for n in in_shares(mine, goes)]
        if axes == "two axes":  # what passes through a rank on its way is another's
            assert len(sent.all) == 4 * len(known.groups)
            assert Counter(s.ranks for s in sent.all) == Counter(sizes * 2 * len(known.groups))
        else:
            bfloat16 = [s._replace(op="all_to_all_single", bytes=2 * s.numel) for s in expected]
            assert sorted(sent.all) == sorted(bfloat16)


# --- who works ---
@at_most(3)
@every(axes=AXES, ranks=[8, 64])
def test_ranks_work_at_the_same_time(axes: str, ranks: int) -> None:
    """Although a rank begins a group when all have done the last but one: within an eighth of what nobody can go below."""
    dim, hidden, kv = 4096, 14336, 1024  # the shapes of Llama's, on no device
    sizes = [(dim, dim), (dim, kv), (dim, kv), (dim, dim), (dim, hidden), (dim, hidden), (hidden, dim)]
    layers = [nn.ModuleList([nn.Linear(a, b, bias=False, device="meta") for a, b in sizes]) for _ in range(32)]
    with world(ranks):
        known = fs.optim.matrices(on_fake(nn.ModuleDict({"layers": nn.ModuleList(layers)}), axes, ranks, "layers.*"))
    done, before, last = Counter[Any](), 0.0, 0.0  # by rank when it is done, and when all were with the groups before
    for group in known.groups:
        work = Counter[Any]()
        for name in group:
            work[known.by_name[name].owner] += known.by_name[name].cost  # pyright: ignore[reportArgumentType]
        for owner in {*done, *work}:
            done[owner] = max(done[owner], before) + work[owner]  # pyright: ignore[reportArgumentType]
        before, last = last, max(done.values())
    assert last <= 1.125 * sum(m.cost for m in known.chosen) / ranks


# --- what is alive ---
def beyond(model: nn.Module, axes: str, **options: Any) -> float:
    """What a step of Muon holds beyond one of SGD, at its peak, in units."""
    spec = on_fake(model, axes, 8)
    bytes_of: list[int] = []
    for init, update in (fs.optim.muon(spec, **options), fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, **options)):
        grads, params = ({unit.key: torch.zeros(spec.shard_numel(unit)) for unit in spec} for _ in range(2))
        with Collectives():
            params, state = update(grads, init(params), params)  # with what is made once
        grads = {key: torch.zeros_like(p) for key, p in params.items()}
        with no_collector(), Collectives(), Peak() as peak:
            update(grads, state, params)
        bytes_of.append(peak.bytes)
    return (bytes_of[0] - bytes_of[1]) / sum(p.nbytes for p in model[0].parameters())  # pyright: ignore[reportIndexIssue]


@seldom
@each(axes=AXES, rank=[0, 7])
def test_at_most_two_units_beyond_a_donated_elementwise_step(axes: str, rank: int) -> None:
    """Which makes nothing: so this is what is under way, however many units there are; one that copies holds more."""
    with world(8, rank):
        assert rank or beyond(blocks(24, 32), axes) <= 0
        few, many = (beyond(blocks(count, 32), axes, donate=True) for count in depth((8, 16), (16, 32)))
        assert few <= 2
        assert many <= few + 0.2


# --- float32 does what float64 does ---
STEPS = 3
SHAPES = [(8, 8), (96, 3), (48, 24)]


def whole(shape: tuple[int, int], t: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(t))


def low_rank(shape: tuple[int, int], t: int) -> Tensor:
    """Of rank 2 and in whole numbers, so exactly of that rank in each dtype; of one row and column space in all steps."""
    u, v = (torch.randint(-3, 4, (2, n), generator=torch.Generator().manual_seed(99 + n)).float() for n in shape)
    return u.T @ torch.diag(torch.tensor([1.0 + t, 2.0 - t % 2])) @ v


def few_rows(shape: tuple[int, int], t: int) -> Tensor:
    grad = torch.zeros(shape)
    grad[1 : 1 + shape[1] // 2] = whole((shape[1] // 2, shape[1]), 7) * 2**t
    return grad


GRADIENTS: dict[str, Callable[[tuple[int, int], int], Tensor]] = {"whole": whole, "low rank": low_rank, "few rows": few_rows}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "muon": lambda spec, dtype: fs.optim.muon(spec, lr=1.0, weight_decay=0.0, dtype=dtype),
    "shampoo": lambda spec, dtype: fs.optim.shampoo(spec, lr=1.0, momentum=0.5),
    "shampoo of averages": lambda spec, dtype: fs.optim.shampoo(spec, lr=1.0, momentum=0.5, decay=0.9, every=2),
    "shampoo of one side": lambda spec, dtype: fs.optim.shampoo(spec, lr=1.0, max_size=40),
    "soap": lambda spec, dtype: fs.optim.soap(spec, lr=1.0, weight_decay=0.0, every=2),
}

TOLERANCES = {"soap": 0.1, "shampoo of averages": 0.02}
"""Of Adam's division what is left of rounding errors; of old roots those of eigenvalues that were 0."""


def stepped(name: str, grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """What each of the steps adds."""
    module = nn.Linear(grads[0].shape[1], grads[0].shape[0], bias=False, dtype=dtype)
    spec = fs.policies.whole()(module).on({"shard": 1})
    init, update = OPTIMIZERS[name](spec, dtype)
    params = fs.shard({"weight": torch.zeros_like(module.weight)}, spec)
    state, out = init(params), []
    for grad in grads:
        new, state = update(fs.shard({"weight": grad.to(dtype)}, spec), state, params)
        out.append(fs.unshard(new, spec)["weight"] - fs.unshard(params, spec)["weight"])
        params = new
    return torch.stack(out).double()


@each(name=OPTIMIZERS, kind=GRADIENTS, scale=[1.0, 2.0**-40, 2.0**40])
def test_float32_does_what_float64_does(name: str, kind: str, scale: float) -> None:
    """Where a gradient has nothing, rounding errors do not become steps: Shampoo's were 4e12 where 2 is due."""
    for shape in SHAPES if (name, kind) != ("soap", "whole") else SHAPES[:1]:  # SOAP: the null space has no basis of its own
        grads = [GRADIENTS[kind](shape, t) * scale for t in range(STEPS)]
        got, want = (stepped(name, grads, dtype) for dtype in (torch.float32, torch.float64))
        for one, expected in zip(got, want, strict=True):
            error, size = (one - expected).norm(), expected.norm()
            assert error <= TOLERANCES.get(name, 1e-3) * size + 1e-12, (shape, float(error), float(size))


def test_muon_of_gradients_whose_squares_overflow() -> None:
    """The norm of 1e20 was infinite in float32, and the step 0."""
    x = whole((6, 4), 0)
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(fs.optim.orthogonal(x.to(dtype) * 2.0**70), fs.optim.orthogonal(x.to(dtype)), rtol=0, atol=0)
    assert_close(fs.optim.orthogonal(torch.stack([x, x * 2.0**100])), torch.stack([fs.optim.orthogonal(x)] * 2))


@at_most(8)
@every(name=OPTIMIZERS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_whose_square_overflows_leaves_state_finite(name: str, dtype: torch.dtype) -> None:
    """Of Shampoo and SOAP it was NaN for good, at the first step or later, and `apply_if_finite` saw a finite gradient."""
    module = nn.Linear(6, 8, bias=False, dtype=dtype)
    spec = fs.policies.whole()(module).on({"shard": 1})
    init, update = fs.optim.apply_if_finite(spec)(OPTIMIZERS[name](spec, torch.float32))
    params, huge = fs.shard({"weight": torch.zeros_like(module.weight)}, spec), torch.finfo(dtype).max
    state = init(params)
    for t, scale in enumerate((min(huge, 1e19), 1.0, huge, 1.0)):
        grad = whole((8, 6), t).tanh() * scale
        params, state = update(fs.shard({"weight": grad.to(dtype)}, spec), state, params)
        assert all(x.isfinite().all() for x in torch.utils._pytree.tree_leaves((params, state)) if isinstance(x, Tensor)), t
        assert params[""].abs().max() < 100
    assert state.total == 0
    bare, infinite = OPTIMIZERS[name](spec, torch.float32), {"": torch.full((48,), torch.inf, dtype=dtype)}
    assert bare.update(infinite, state.inner, params)[0][""].isnan().any(), "what is not finite stays visible"


def test_relative_eps_is_of_the_largest_eigenvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the authors' code: (L + relative_eps max(L) I)^(-1/4)."""
    monkeypatch.setattr("funshard.optim._matrix_rules.RELATIVE_EPS", 0.5)
    spec = fs.policies.whole()(nn.Linear(2, 2, bias=False).double()).on({"shard": 1})
    init, update = fs.optim.shampoo(spec, lr=1.0, momentum=0.0, eps=1e-30)
    params = {"": torch.zeros(4).double()}
    new, _ = update({"": torch.tensor([4.0, 0.0, 0.0, 1.0]).double()}, init(params), params)
    assert_close(new[""], -torch.tensor([4 / (16 + 8) ** 0.5, 0, 0, 1 / (1 + 8) ** 0.5]).double())
