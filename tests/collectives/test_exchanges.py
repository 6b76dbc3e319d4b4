"""Collectives of activations, and their derivatives of any order, against one process that has all ranks' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from collective_log import Collectives, world
from depth import at_most, depth, each, mark_seldom, seldom
from models import refused
from ranks import real_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import funshard as fs
from funshard import collectives as c
from funshard.collectives import Axis, Mesh, ProcessAxis

Item = list[Tensor]  # what each rank has


def total(xs: Item) -> Tensor:
    return torch.stack(xs).sum(0)


def exchanged(xs: Item, split: int, concat: int) -> Item:
    pieces = [x.chunk(len(xs), split) for x in xs]
    return [torch.cat([piece[r] for piece in pieces], concat) for r in range(len(xs))]


class Case(NamedTuple):
    """A collective, the shape of its input on so many ranks, and the results of all ranks from the inputs of all."""

    run: Callable[[Tensor, Axis], Tensor]
    shape: Callable[[int], tuple[int, ...]]
    results: Callable[[Item], Item]


def to_next(n: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(n - 1)]


def counts_of(n: int) -> Tensor:
    """Rows that rank i sends to rank j: some none at all, one rank nothing to anybody, and one that receives none."""
    counts = torch.tensor([[1, 2, 0, 3], [0, 0, 0, 0], [2, 0, 0, 1], [1, 1, 0, 2]])[:n, :n]
    return counts if n > 1 else torch.tensor([[3]])


ROWS = 7
"""Room for what any rank sends or receives."""


def sent_rows(xs: Item, size: int | None = ROWS) -> Item:
    """By `counts_of`, with zeros up to so many rows."""
    counts = counts_of(len(xs))
    pieces = [x[: row.sum()].split(row.tolist()) for x, row in zip(xs, counts, strict=True)]
    out = [torch.cat([piece[r] for piece in pieces]) for r in range(len(xs))]
    return [torch.cat([y, y.new_zeros(0 if size is None else size - len(y), *y.shape[1:])]) for y in out]


def send_rows(x: Tensor, axis: Axis) -> Tensor:
    return c.ragged_all_to_all(x, axis, counts_of(axis.size)[axis.rank], size=ROWS)


def send_back_rows(x: Tensor, axis: Axis) -> Tensor:
    send = counts_of(axis.size)[axis.rank]
    receive = c.all_to_all(send, axis)
    return c.ragged_all_to_all(c.ragged_all_to_all(x, axis, send, receive, size=9) * 2, axis, receive, send, size=ROWS)


def twice(xs: Item) -> Item:
    """Of the rows that are sent, zeros for the others."""
    counts = counts_of(len(xs)).sum(1)
    return [torch.cat([2 * x[:count], torch.zeros_like(x[count:])]) for x, count in zip(xs, counts, strict=True)]


CASES = {
    "ragged_all_to_all": Case(send_rows, lambda n: (ROWS, 2), sent_rows),
    "ragged_all_to_all of numbers": Case(send_rows, lambda n: (ROWS,), sent_rows),
    "ragged_all_to_all and back": Case(send_back_rows, lambda n: (ROWS, 2), twice),
    "permute": Case(c.permute, lambda n: (3, 2), lambda xs: [*xs[-1:], *xs[:-1]]),
    "permute by two": Case(
        lambda x, a: c.permute(x, a, 2), lambda n: (), lambda xs: [xs[(r - 2) % len(xs)] for r in range(len(xs))]),
    "permute to the next": Case(
        lambda x, a: c.permute(x, a, perm=to_next(a.size)), lambda n: (2, 3), lambda xs: [torch.zeros_like(xs[0]), *xs[:-1]]),
    "permute of nothing": Case(lambda x, a: c.permute(x, a), lambda n: (0, 2), lambda xs: [*xs[-1:], *xs[:-1]]),
    "all_to_all 0 0": Case(c.all_to_all, lambda n: (2 * n, 3), lambda xs: exchanged(xs, 0, 0)),
    "all_to_all 1 1": Case(
        lambda x, a: c.all_to_all(x, a, split_dim=1, concat_dim=1), lambda n: (3, 2 * n), lambda xs: exchanged(xs, 1, 1)),
    "all_to_all 0 1": Case(lambda x, a: c.all_to_all(x, a, concat_dim=1), lambda n: (2 * n, 3), lambda xs: exchanged(xs, 0, 1)),
    "all_to_all 2 1": Case(
        lambda x, a: c.all_to_all(x, a, split_dim=2, concat_dim=1), lambda n: (2, 3, 2 * n), lambda xs: exchanged(xs, 2, 1)),
    "all_to_all of nothing": Case(
        lambda x, a: c.all_to_all(x, a, split_dim=1, concat_dim=0), lambda n: (2, 0, 3), lambda xs: exchanged(xs, 1, 0)),
    "gather_values 1": Case(
        lambda x, a: c.gather_values(x, a, dim=1), lambda n: (2, 3, 2), lambda xs: [torch.cat(xs, 1) for _ in xs]),
    "gather_values of nothing": Case(
        lambda x, a: c.gather_values(x, a, dim=1), lambda n: (2, 0), lambda xs: [torch.cat(xs, 1) for _ in xs]),
    "reduce_scatter -2": Case(
        lambda x, a: c.reduce_scatter(x, a, reduce="sum", dim=-2), lambda n: (1, n, 2),
        lambda xs: [*total(xs).chunk(len(xs), -2)]),
}  # fmt: skip


def inputs(case: Case, n: int, seed: int = 0) -> Tensor:
    """What each rank has, [n ranks, ...]."""
    return torch.randn(n, *case.shape(n), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss(y: Tensor) -> Tensor:
    return (y.sin() * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum() + (y**3).sum()


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def derivatives(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> list[Tensor]:
    """Of a loss: the gradient, both Hessian-vector products, and gradients of a gradient's norm, of one and two orders."""
    squared = lambda x: dot(g := grad(f)(x), g)  # noqa: E731
    return [
        grad(f)(x),
        jvp(grad(f), (x,), (v,))[1],
        grad(lambda x: dot(grad(f)(x), v))(x),
        grad(squared)(x),
        grad(lambda x: f(x - 0.1 * grad(f)(x)))(x),
        vjp(grad(f), x)[1](v)[0],
        jvp(grad(squared), (x,), (v,))[1],
    ]


def on_axis(axis: Axis, name: str, x: Tensor, v: Tensor) -> list[Tensor]:
    """What one rank gets: the value, the tangent, three vmaps and all derivatives of its loss."""
    case = CASES[name]
    run = lambda x: case.run(x, axis)  # noqa: E731
    y, back = vjp(run, x)
    many = torch.stack([x, v, x * v], -1)
    turned = many.transpose(0, -2) if many.dim() > 2 else many  # not contiguous
    return [
        y,
        jvp(run, (x,), (v,))[1],
        back(y.cos())[0],
        vmap(run, -1, -1)(many),
        vmap(lambda x: run(x.transpose(0, -1)) if x.dim() > 1 else run(x), -1)(turned),
        vmap(grad(lambda x: loss(run(x))), -1)(many),
        *derivatives(lambda x: loss(run(x)), x, v),
    ]


def in_one_process(name: str, n: int, x: Tensor, v: Tensor) -> list[Tensor]:
    """The same for all ranks: the objective is the sum over ranks of their losses."""
    results = CASES[name].results
    run = lambda x: torch.stack(results([*x]))  # noqa: E731
    f = lambda x: sum(loss(y) for y in run(x))  # noqa: E731
    y, back = vjp(run, x)
    many = [x, v, x * v]
    return [
        y,
        run(v),
        back(y.cos())[0],
        torch.stack([run(x) for x in many], -1),
        torch.stack([run(x) for x in many], 1),
        torch.stack([grad(f)(x) for x in many], 1),
        *derivatives(f, x, v),
    ]


def check(name: str, n: int, got: Mapping[int, list[Tensor]]) -> None:
    """The results of ranks."""
    x, v = (inputs(CASES[name], n, seed) for seed in (0, 1))
    for i, want in enumerate(in_one_process(name, n, x, v)):
        for rank, results in got.items():
            assert_close(results[i], want[rank], rtol=1e-9, atol=1e-9, msg=lambda m, i=i: f"{name} [{i}]: {m}")


@at_most(8)
@each(n=[1, 2, 3, 4], name=CASES)
def test_simulated_ranks(name: str, n: int) -> None:
    """Values, transposes, vmaps and derivatives of two and three orders."""
    x, v = (inputs(CASES[name], n, seed) for seed in (0, 1))
    out = fs.testing.spmd(lambda mesh, x, v: on_axis(mesh["shard"], name, x, v), n)(x, v)
    check(name, n, {rank: [result[rank] for result in out] for rank in range(n)})
    if n == 1:  # which needs no group
        check(name, n, {0: on_axis(ProcessAxis(1, 0), name, x[0], v[0])})


ON_GROUPS = {
    2: ["permute to the next", "all_to_all 2 1", "reduce_scatter -2", "gather_values 1", "ragged_all_to_all and back"],
    4: [
        "ragged_all_to_all", "permute", "permute by two", "all_to_all 0 1", "all_to_all of nothing",
        "gather_values of nothing"],
}  # fmt: skip
"""By default, by the number of ranks."""


@pytest.mark.parametrize("n", mark_seldom([2, 4], 2))
@real_ranks(lambda n: n)
def test_process_groups(rank: int, n: int) -> None:
    """The same on real ranks."""
    axis = Mesh.world()["shard"]
    for name in depth(ON_GROUPS[n], [*CASES]):
        check(name, n, {rank: on_axis(axis, name, *(inputs(CASES[name], n, seed)[rank] for seed in (0, 1)))})


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn]


@real_ranks(2)
def test_dtypes(rank: int) -> None:
    """What gloo does not send by its own dtype, too, and inputs of any strides: 0-dim, transposed, empty."""
    axis, none = Mesh.world()["shard"], torch.zeros_like
    for dtype in DTYPES:
        rows = [torch.arange(6.0).view(2, 3).add(r).to(dtype) for r in range(2)]
        mine, other = ([x[:, 0], x[:, 0][1], x.t(), x.t()[:0]] for x in (rows[rank], rows[1 - rank]))
        got = [
            *(c.permute(x, axis) for x in mine),
            *(c.permute(x, axis, perm=[(0, 1)]) for x in mine),
            c.all_to_all(rows[rank][:, 0], axis),
            c.all_to_all(rows[rank], axis, concat_dim=1),
        ]
        want = [*other, *(other if rank else map(none, mine))]
        want += [torch.stack([x[rank, 0] for x in rows]), torch.cat([x[rank : rank + 1] for x in rows], 1)]
        for x, y in zip(got, want, strict=True):
            assert x.dtype == dtype
            as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (x, y)]  # no operator compares some dtypes
            assert torch.equal(*as_bytes), f"{dtype}: expected {y}, got {x}"
            assert x.shape == y.shape


def test_bytes() -> None:
    """A rank sends its values once, a derivative's as well, of uneven counts what they say; nothing where it keeps them."""
    x = torch.ones(8, 3)
    with world(4), Collectives() as sent:
        axis = Mesh.world()["shard"]
        c.permute(x, axis, 4)
        c.permute(x, axis, perm=[])
        assert sent.all == []
        grad(lambda x: c.permute(x, axis).sum())(x)
        grad(lambda x: c.all_to_all(x, axis, concat_dim=1).sum())(x)
        grad(lambda x: c.ragged_all_to_all(x, axis, [3, 0, 5, 1], size=20).sum())(torch.ones(10, 2))
    assert [(s.op, s.numel) for s in sent.all] == [("all_to_all_single", n) for n in (24, 24, 24, 24, 2 * 9, 2 * 12)]


# --- Uneven counts ---
@pytest.mark.parametrize("n", mark_seldom([2, 4], 2))
@real_ranks(lambda n: n)
def test_exact_rows(rank: int, n: int) -> None:
    """Each rank has its own number of rows, some none, however the counts are given: value and derivatives without padding."""
    axis, (send, receive) = Mesh.world()["shard"], (counts_of(n)[rank], counts_of(n)[:, rank])
    xs, vs = (inputs(CASES["ragged_all_to_all"], n, seed) for seed in (0, 1))
    x, v = (x[rank][: send.sum()] for x in (xs, vs))
    want = derivatives(lambda x: sum(loss(y) for y in sent_rows([*x])), xs, vs)
    ways = [(send.tolist(),), (send.int(),), (send.tolist(), receive.tolist()), (send, c.all_to_all(send, axis))]
    for counts in [*ways, (tuple(send.tolist()), receive)]:
        run = lambda x: c.ragged_all_to_all(x, axis, *counts)  # noqa: E731
        assert torch.equal(run(x), sent_rows([*xs], None)[rank]), counts
        for i, (a, b) in enumerate(zip(derivatives(lambda x: loss(run(x)), x, v), want, strict=True)):
            assert_close(a, b[rank][: send.sum()], rtol=1e-9, atol=1e-9, msg=lambda m, of=(counts, i): f"{of}: {m}")


SENT: dict[str, tuple[Callable[[int], tuple[Any, ...]], dict[str, Any], str]] = {
    "too many": (lambda r: ([2, 3 - r],), {}, r"rank 0: .*send_counts: expected 4 rows together, got \[2, 3\]$"),
    "too few": (lambda r: ([2, 1 + r],), {}, r"rank 0: .*send_counts: expected 4 rows together, got \[2, 1\]$"),
    "negative": (lambda r: ([5, -1],), {}, r"rank 0: .*got \[5, -1\]; rank 1: .*got \[5, -1\]"),
    "of three ranks": (lambda r: ([2, 2, 0],), {}, r"for each of 2 ranks, got \[2, 2, 0\]"),
    "no ints": (lambda r: ([2.0, 2.0],), {}, r"for each of 2 ranks, got \[2\.0, 2\.0\]"),
    "no whole numbers": (lambda r: (torch.tensor([2.0, 2.0]),), {}, r"whole numbers of shape \[N\], got torch.float32 \[2\]"),
    "a matrix": (lambda r: (torch.ones(2, 2).int(),), {}, r"whole numbers of shape \[N\], got torch.int32 \[2, 2\]"),
    "of others": (lambda r: ([1, 3], [1, 1 + r]), {}, r"rank 0 sends 3 rows to rank 1, which expects 1: .*leave them out"),
    "no room": (lambda r: ([1, 3],), {"size": 5}, r"room for the 6 rows that rank 1 receives, got 5"),
    "too many expected": (lambda r: ([2, 2], [9, 9]), {"size": 9}, r"receive_counts: expected at most 9 rows together"),
}


@real_ranks(2)
def test_wrong_counts_are_an_error_on_every_rank(rank: int) -> None:
    """The same one, before anything is sent: gloo would end the process, and NCCL wait."""
    axis, said = Mesh.world()["shard"], []
    for counts, options, match in SENT.values():
        with pytest.raises(ValueError, match=match) as error:
            c.ragged_all_to_all(torch.ones(4), axis, *counts(rank), **options)
        said.append(str(error.value))
        assert "ragged_all_to_all: " in said[-1]
    for x in (torch.ones(4).to(torch.float64 if rank else torch.int64), torch.ones(4, 1 + rank)):
        with pytest.raises(ValueError, match="rows of the same dtype and shape on all ranks") as error:
            c.ragged_all_to_all(x, axis, [2, 2])
        said.append(str(error.value))
    refused(ValueError, "got a 0-dim tensor", lambda: c.ragged_all_to_all(torch.ones(()), axis, [2, 2]))
    with pytest.raises(ValueError, match=r"differ within a torch\.vmap"):
        vmap(lambda x, n: c.ragged_all_to_all(x, axis, n))(torch.ones(2, 4), torch.tensor([[2, 2], [1, 3]]))
    assert c.ragged_all_to_all(torch.ones(4), axis, [2, 2]).sum() == 4  # ranks are still in step
    of_all: list[Any] = [None] * 2
    dist.all_gather_object(of_all, said)
    assert of_all[0] == of_all[1]


@pytest.mark.parametrize(
    ("counts", "options", "match"),
    [
        (([1, 2],), {}, "expected size=, with room for what any rank receives"),
        (([1, 3],), {"size": 9}, "send_counts: expected at most 3 rows"),
        ((torch.tensor([1, 3]),), {"size": 9}, "at most 3 rows to send, at most 9 to receive"),
        ((torch.tensor([1, 2]),), {"size": 3}, "at most 3 to receive"),
        ((torch.tensor([4, -1]),), {"size": 9}, "at most 3 rows to send"),
        ((torch.tensor([1, 2]), torch.tensor([1, 1])), {"size": 9}, "the counts of other ranks"),
        ((torch.tensor([1, 1, 1]),), {"size": 9}, r"shape \[2\], got \[3\]"),
    ],
)
def test_wrong_counts_on_simulated_ranks(counts: tuple[Any, ...], options: dict[str, int], match: str) -> None:
    """A batch of ranks has no exact rows; what does not fit is an error there, too, below any transform."""
    run = lambda mesh, x: c.ragged_all_to_all(x, mesh["shard"], *counts, **options)  # noqa: E731
    for f in (run, lambda mesh, x: grad(lambda x: run(mesh, x).sum())(x), lambda mesh, x: vmap(lambda x: run(mesh, x), 1)(x)):
        refused(ValueError, match, lambda: fs.testing.spmd(f, 2)(torch.ones(2, 3, 2)))


def test_counts_that_need_no_size() -> None:
    """Equal ones of simulated ranks; and one rank's own, which have to fit."""
    x = torch.arange(8.0).view(2, 4)
    got = fs.testing.spmd(lambda mesh, x: c.ragged_all_to_all(x, mesh["shard"], [2, 2]), 2)(x)
    assert got.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for counts in (([2],), ([3], [2]), ([4],)):
        refused(ValueError, "ragged_all_to_all", lambda: c.ragged_all_to_all(torch.ones(3), ProcessAxis(1, 0), *counts))


@seldom
@real_ranks(2)
def test_uneven_counts_compiled(rank: int) -> None:
    """Lists of ints are in one graph; counts from data interrupt torch.compile's, and make_fx refuses them."""
    axis, send = Mesh.world()["shard"], counts_of(2)[rank]
    receive = c.all_to_all(send, axis)
    x = inputs(CASES["ragged_all_to_all"], 2)[rank][: send.sum()]

    def second(x: Tensor, *counts: Any) -> Tensor:
        f = lambda x: loss(c.ragged_all_to_all(x.sin(), axis, *counts))  # noqa: E731
        return grad(lambda x: f(x) + (grad(f)(x) ** 2).sum())(x)

    want = second(x, send)
    torch._dynamo.reset()
    lists = send.tolist(), receive.tolist()
    whole = torch.compile(lambda x: second(x, *lists), fullgraph=True, backend="aot_eager")
    assert_close(whole(x), want, rtol=1e-12, atol=1e-12)
    assert_close(make_fx(lambda x: second(x, *lists))(x)(x), want, rtol=1e-12, atol=1e-12)
    broken = torch.compile(lambda x, send: second(x * 2, send), backend="aot_eager")
    for few in (send, send.flip(0) if rank == 0 else send, send):  # other counts at the second call
        assert_close(broken(x, few), second(x * 2, few), rtol=1e-12, atol=1e-12)
    for counts in ((send,), (send.tolist(),), (send, receive)):
        with pytest.raises(RuntimeError, match="a recorded graph would keep those of its example"):
            make_fx(lambda x: c.ragged_all_to_all(x, axis, *counts))(x)
    with pytest.raises(ValueError, match="expected 3 rows together"):
        make_fx(lambda x: c.ragged_all_to_all(x, axis, [1, 1], [1, 1]))(torch.ones(3))


def test_shapes_without_values() -> None:
    """On fake tensors counts have no values: the shape is right with size=."""
    with world(4), FakeTensorMode(allow_non_fake_inputs=True):
        axis, counts = Mesh.world()["shard"], torch.ones(4, dtype=torch.int64)
        assert c.ragged_all_to_all(torch.ones(6, 2), axis, counts, size=9).shape == (9, 2)
        assert c.ragged_all_to_all(torch.ones(6, 2), axis, counts).shape == (6, 2)
