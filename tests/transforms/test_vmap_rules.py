"""The vmap rule of every collective, under any nesting of ordinary vmaps and mesh axes, against loops over lists."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives, world
from depth import at_most, depth, every
from hypothesis import given, settings
from hypothesis import strategies as st
from models import refused
from ranks import Pool, mesh_of
from torch import Tensor
from torch.func import jvp, vjp, vmap

import funshard as fs
from funshard import collectives as c
from funshard._core.mesh import Simulated
from funshard.collectives import Axis, Mesh
from funshard.collectives._functions import unvary

Item = list[Tensor]  # what each rank of one axis has


def joined(xs: Item) -> Item:
    return [torch.cat(xs) for _ in xs]


def total(xs: Item) -> Item:
    out = torch.zeros_like(xs[0])
    for x in xs:
        out = out + x
    return [out for _ in xs]


def slices(xs: Item) -> Item:
    return [x[r * len(x) // len(xs) : (r + 1) * len(x) // len(xs)] for r, x in enumerate(xs)]


def mean(xs: Item) -> Item:
    return [x / len(xs) for x in xs]


def exchanged(xs: Item) -> Item:
    pieces = [slices([x] * len(xs)) for x in xs]
    return [torch.cat([piece[r] for piece in pieces]) for r in range(len(xs))]


def only(xs: Item, root: int) -> Item:
    return [x if r == root else torch.zeros_like(x) for r, x in enumerate(xs)]


class Collective(NamedTuple):
    """The function, what the picture in its docstring shows, its transpose's, and that one's transpose if it is another."""

    run: Callable[[Tensor, Axis], Tensor]
    picture: Callable[[Item], Item]
    transpose: Callable[[Item], Item]
    again: Callable[[Item], Item] | None = None


COLLECTIVES = {
    "gather_slices": Collective(c.gather_slices, joined, lambda xs: mean(slices(total(xs)))),
    "gather_slices sum": Collective(lambda x, a: c.gather_slices(x, a, reduce="sum"), joined, lambda xs: slices(total(xs))),
    "gather_values": Collective(c.gather_values, joined, lambda xs: slices(total(xs))),
    "reduce_scatter": Collective(c.reduce_scatter, lambda xs: mean(slices(total(xs))), joined),
    "reduce_scatter sum": Collective(lambda x, a: c.reduce_scatter(x, a, reduce="sum"), lambda xs: slices(total(xs)), joined),
    "all_reduce": Collective(c.all_reduce, lambda xs: mean(total(xs)), lambda xs: mean(total(xs))),
    "all_reduce sum": Collective(lambda x, a: c.all_reduce(x, a, reduce="sum"), total, total),
    "sum_shards": Collective(c.sum_shards, total, lambda xs: mean(total(xs))),
    "vary": Collective(c.vary, list, lambda xs: mean(total(xs))),
    "vary sum": Collective(lambda x, a: c.vary(x, a, reduce="sum"), list, total),
    "unvary": Collective(unvary, lambda xs: mean(total(xs)), list),
    "unvary sum": Collective(lambda x, a: unvary(x, a, reduce="sum"), total, list),
    "broadcast": Collective(c.broadcast, lambda xs: [xs[0] for _ in xs], lambda xs: only(total(xs), 0)),
    "broadcast last": Collective(
        lambda x, a: c.broadcast(x, a, src=a.size - 1), lambda xs: [xs[-1] for _ in xs], lambda xs: only(total(xs), len(xs) - 1)
    ),
    "all_to_all": Collective(c.all_to_all, exchanged, exchanged),
    "permute": Collective(c.permute, lambda xs: [*xs[-1:], *xs[:-1]], lambda xs: [*xs[1:], *xs[:1]]),
    "permute to the next": Collective(
        lambda x, a: c.permute(x, a, perm=[(i, i + 1) for i in range(a.size - 1)]),
        lambda xs: [torch.zeros_like(xs[0]), *xs[:-1]],
        lambda xs: [*xs[1:], torch.zeros_like(xs[0])],
    ),
    "scatter": Collective(c.scatter, slices, joined, lambda xs: mean(slices(total(xs)))),
}

WAYS: dict[str, Callable[[Collective], tuple[Callable[[Tensor, Axis], Tensor], Callable[[Item], Item]]]] = {
    "value": lambda op: (op.run, op.picture),
    "transpose": lambda op: (
        lambda x, a: (lambda y, back: back(y)[0])(*vjp(lambda x: op.run(x, a), x)),
        lambda xs: op.transpose(op.picture(xs)),
    ),
    "tangent": lambda op: (
        lambda x, a: jvp(lambda x: op.run(x, a), (x,), (x + 1,))[1],
        lambda xs: op.picture([x + 1 for x in xs]),
    ),
    "transpose of the transpose": lambda op: (
        lambda x, a: vjp(lambda y: vjp(lambda x: op.run(x, a), x)[1](y)[0], op.run(x, a))[1](x)[0],
        op.again or op.picture,
    ),
}
"""What is computed inside all vmaps, and the same by the pictures."""
Index = tuple[int, ...]


class Level(NamedTuple):
    """One vmap, outermost first: ``axis`` names the mesh axis that it simulates, "" for an ordinary one.

    ``in_dim`` None: the same for all entries. What is not batched leaves vmap by dimension 0 (torch 2.13: no other works).
    """

    size: int
    in_dim: int | None
    out_dim: int
    axis: str = ""


class Case(NamedTuple):
    """A collective over ``over`` on an item of this shape for every index into ``levels``."""

    op: str
    way: str
    over: str
    shape: tuple[int, ...]
    levels: tuple[Level, ...]


def item(case: Case, index: Index) -> Tensor:
    """What the entry at an index holds: whole numbers that all ranks of up to six divide."""
    seen = [0 if level.in_dim is None else i for level, i in zip(case.levels, index, strict=True)]
    seed = 1 + sum(i * 7**k for k, i in enumerate(seen))
    return 60 * torch.randint(-9, 9, case.shape, generator=torch.Generator().manual_seed(seed)).double()


def stacked(case: Case, index: Index = ()) -> Tensor:
    """The items, each level's in its in_dim."""
    if len(index) == len(case.levels):
        return item(case, index)
    level = case.levels[len(index)]
    if level.in_dim is None:
        return stacked(case, (*index, 0))
    return torch.stack([stacked(case, (*index, i)) for i in range(level.size)], level.in_dim)


def unstacked(levels: tuple[Level, ...], out: Tensor) -> dict[Index, Tensor]:
    """The results by index, each level's from its out_dim."""
    if not levels:
        return {(): out}
    level, *rest = levels
    assert out.shape[level.out_dim] == level.size
    return {
        (i, *index): value
        for i in range(level.size)
        for index, value in unstacked(tuple(rest), out.select(level.out_dim, i)).items()
    }


def nest(levels: Sequence[Level], axes: Mapping[str, Axis], f: Callable[..., Any], x: Tensor) -> Tensor:
    """``f(axes, x)`` under vmaps, those of an axis by a Simulated one."""
    if not levels:
        return f(axes, x)
    level, *rest = levels

    def one(i: Tensor, x: Tensor) -> Tensor:
        here = {level.axis: Simulated(level.size, i)} if level.axis else {}
        return nest(rest, {**axes, **here}, f, x)

    return vmap(one, in_dims=(0, level.in_dim), out_dims=level.out_dim)(torch.arange(level.size), x)


def expected(case: Case, picture: Callable[[Item], Item]) -> dict[Index, Tensor]:
    """Every entry's result, by a loop over all that is not the axis, and a list over the axis."""
    at = [level.axis for level in case.levels].index(case.over)
    out: dict[Index, Tensor] = {}
    for index in itertools.product(*(range(level.size) for level in case.levels)):
        if index[at] == 0:
            ranks = [(*index[:at], r, *index[at + 1 :]) for r in range(case.levels[at].size)]
            out.update(zip(ranks, picture([item(case, rank) for rank in ranks]), strict=True))
    return out


def check(case: Case) -> None:
    f, picture = WAYS[case.way](COLLECTIVES[case.op])
    out = nest(case.levels, {}, lambda axes, x: f(x, axes[case.over]), stacked(case))
    agree(case, unstacked(case.levels, out), expected(case, picture))


def agree(case: Case, got: Mapping[Index, Tensor], want: Mapping[Index, Tensor]) -> None:
    assert got.keys() == want.keys()
    for index, value in want.items():
        assert torch.equal(got[index], value), f"{case}: at {index} expected {value}, got {got[index]}"


def dims(count: int) -> st.SearchStrategy[int]:
    return st.integers(-count, count - 1)


@st.composite
def cases(draw: st.DrawFn, real: dict[str, int] | None = None, op: str = "", way: str = "") -> Case:
    """Up to three ordinary vmaps around, inside and between the axes, in and out of any dimension, negative ones too.

    ``real`` axes are process groups: the first levels, outside of every vmap.
    """
    sizes = real or draw(st.sampled_from([{"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 3}, {"a": 2, "b": 2}]))
    op, way = op or draw(st.sampled_from(sorted(COLLECTIVES))), way or draw(st.sampled_from(sorted(WAYS)))
    over = draw(st.sampled_from(sorted(sizes)))
    shape = (sizes[over] ** 2, *draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
    names = draw(st.permutations([*([] if real else sizes), *[""] * draw(st.integers(1, 3))]))
    levels: list[Level] = []
    count = len(shape)
    for i, name in enumerate(reversed(names)):  # inside out: a level adds a dimension to what is inside
        in_dim = draw(st.one_of(st.none(), dims(count + 1)))
        count += in_dim is not None
        out_dim = 0 if in_dim is None and name != over else draw(dims(len(shape) + i + 1))
        levels.insert(0, Level(sizes[name] if name else draw(st.integers(1, 3)), in_dim, out_dim, name))
    ranks = [Level(size, 0, 0, name) for name, size in (real or {}).items()]
    return Case(op, way, over, shape, (*ranks, *levels))


@at_most(19)
@every(way=WAYS, op=COLLECTIVES)
@settings(max_examples=depth(3, 120))
@given(data=st.data())
def test_any_nesting(op: str, way: str, data: st.DataObject) -> None:
    """Every collective and its derivatives are what a loop over the batches gives, with mesh axes around and between vmaps."""
    check(data.draw(cases(op=op, way=way)))


@functools.cache
def real_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh.of(mesh_of(**dict(zip(names, sizes, strict=True))))


def of_case(case: Case) -> Callable[..., Tensor]:
    return lambda axes, x: WAYS[case.way](COLLECTIVES[case.op])[0](x, axes[case.over])


def on_groups(rank: int, cases: list[Case], sizes: dict[str, int]) -> list[Tensor]:
    """This rank's results of cases whose first levels are the axes of a real mesh."""
    mesh = real_mesh(tuple(sizes.values()), tuple(sizes))
    index = tuple(int(i) for i in torch.arange(math.prod(sizes.values())).view(*sizes.values()).eq(rank).nonzero()[0])
    return [nest(case.levels[len(sizes) :], dict(mesh.axes), of_case(case), stacked(case, index)) for case in cases]


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 2, "b": 2}], ids=["one axis", "two axes"])
@settings(max_examples=depth(3, 100))
@given(data=st.data())
def test_any_nesting_on_process_groups(gloo2: Pool, gloo4: Pool, sizes: dict[str, int], data: st.DataObject) -> None:
    """The same where the axis is processes, under one to three vmaps, or either axis of a real mesh of two."""
    many = data.draw(st.lists(cases(sizes), min_size=8, max_size=8))
    answers = (gloo2 if len(sizes) == 1 else gloo4).run(on_groups, many, sizes)
    for k, case in enumerate(many):
        got: dict[Index, Tensor] = {}
        for at, answer in zip(itertools.product(*map(range, sizes.values())), answers, strict=True):
            got |= {at + index: value for index, value in unstacked(case.levels[len(sizes) :], answer[k]).items()}
        agree(case, got, expected(case, WAYS[case.way](COLLECTIVES[case.op])[1]))


@pytest.mark.parametrize(("chunk_size", "sends"), [(None, 1), (1, 5), (2, 3), (5, 1), (7, 1)])
def test_one_collective_for_each_chunk(chunk_size: int | None, sends: int) -> None:
    """Over a process group a batch is sent at once, in chunks as many times as there are chunks."""
    with world(2), Collectives() as sent:
        vmap(lambda x: c.gather_slices(x, Mesh.world()["shard"]), chunk_size=chunk_size)(torch.ones(5, 3))
    assert [s.op for s in sent.all] == ["all_gather"] * sends
    assert sum(s.numel for s in sent.all) == 15


DTYPES = [torch.bfloat16, torch.complex128, torch.int32]
LEVELS = (Level(2, 0, 0, "a"), Level(3, -1, 1), Level(2, 0, -1))
WIDE = 64  # two masks of so many entries are never alike by chance


def of_dtypes(rank: int, case: Case) -> list[Tensor]:
    f = lambda axes, x: COLLECTIVES[case.op].run(x, axes["a"])  # noqa: E731
    axes = {"a": Mesh.world()["shard"]}
    return [nest(LEVELS[1:], axes, f, stacked(case, (rank,)).to(dtype)) for dtype in DTYPES]


@pytest.mark.parametrize("op", ["gather_slices", "reduce_scatter sum", "all_reduce sum", "broadcast", "all_to_all", "scatter"])
def test_dtypes(gloo2: Pool, op: str) -> None:
    """Two vmaps over values of any dtype, that is kept, on simulated and on real ranks."""
    case = Case(op, "value", "a", (4, 3), LEVELS)
    answers = gloo2.run(of_dtypes, case)
    for k, dtype in enumerate(DTYPES):
        want = {at: value.to(dtype) for at, value in expected(case, COLLECTIVES[op].picture).items()}
        f = lambda axes, x: COLLECTIVES[op].run(x, axes["a"])  # noqa: E731
        for out in (torch.stack([answer[k] for answer in answers]), nest(LEVELS, {}, f, stacked(case).to(dtype))):
            assert out.dtype == dtype
            agree(case, unstacked(LEVELS, out), want)


def test_an_axis_in_chunks_is_an_error() -> None:
    """The ranks would see some of the others only; so is a rank of scatter that is none, as on a process group."""
    run = vmap(lambda i, x: c.all_reduce(x, Simulated(4, i), reduce="sum"), chunk_size=2)
    refused(ValueError, "4 ranks", lambda: run(torch.arange(4), torch.ones(4)))
    for rank in (2, -1):
        run = fs.testing.spmd(lambda mesh, x: c.scatter(x, mesh["shard"], rank=rank), 2)
        refused(ValueError, r"expected a rank in 0\.\.1", lambda: run(torch.ones(2, 4)))


# --- Random numbers ---
def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def same_everywhere(x: Tensor) -> bool:
    return bool((x == x[:1]).all())


def all_different(x: Tensor) -> bool:
    """Whether no two entries of dimension 0 are alike."""
    return len({tuple(row.flatten().tolist()) for row in x}) == len(x)


@every(sizes=[{"shard": 3}, {"replicate": 2, "shard": 2}], shared=[False, True])
def test_ranks_draw_their_own_numbers(sizes: dict[str, int], shared: bool) -> None:
    """Every simulated rank drops other entries, also of what all ranks share, and the same again from the same seed."""
    ranks = math.prod(sizes.values())
    x = torch.ones(WIDE)

    def run() -> Tensor:
        torch.manual_seed(5)
        return fs.testing.spmd(lambda mesh, own: dropped(x if shared else own), sizes)(x.expand(ranks, WIDE))

    assert all_different(run())
    assert torch.equal(run(), run())


@pytest.mark.parametrize("outside", [True, False])
def test_randomness_of_a_vmap_beside_the_ranks(outside: bool) -> None:
    """ "error" raises although the ranks may draw; "same" gives each rank one mask for all entries; "different" all others."""
    spmd, batch, own = fs.testing.spmd, torch.ones(3, 2, WIDE), torch.ones(2, 3, WIDE)

    def masks(randomness: str) -> Tensor:
        """[rank, entry, ...]"""
        if outside:
            return vmap(spmd(lambda mesh, x: dropped(x), 2), randomness=randomness)(batch).transpose(0, 1)
        return spmd(lambda mesh, x: vmap(dropped, randomness=randomness)(x), 2)(own)

    refused(RuntimeError, "randomness error mode", lambda: masks("error"))
    same = masks("same")
    assert all(same_everywhere(entries) for entries in same)
    assert all_different(same[:, 0])
    assert all_different(masks("different").flatten(0, 1))
