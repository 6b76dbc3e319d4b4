"""fs.chunked: the sum of a function over slices of the rows is the function of all rows, at every order, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives, world
from depth import at_most, each
from ranks import real_ranks
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P

WORDS, WIDTH = 7, 3
W = torch.randn(WIDTH, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BIAS = W[0].clone()
Loss = Callable[..., Tensor]


def cross_entropy(w: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over the labels that count, and their number. The bias is no argument."""
    logits = torch.tanh(rows["h"]) @ w + BIAS
    return F.cross_entropy(logits, rows["y"], reduction="sum"), (rows["y"] >= 0).sum()


def rows_of(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(WORDS, (count,), generator=generator)
    y[::3] = -100  # ignored
    return {"h": torch.randn(count, WIDTH, dtype=torch.float64, generator=generator), "y": y}


def by_double_backward(loss: Loss, w: Tensor, h: Tensor) -> Any:
    w, h = w.clone().requires_grad_(), h.clone().requires_grad_()
    first = torch.autograd.grad(loss(w, h), (w, h), create_graph=True)
    return *first, *torch.autograd.grad(sum((g**3).sum() for g in first), (w, h))


def by_backward(loss: Loss, w: Tensor, h: Tensor) -> Any:
    """Twice, the first time with a graph that is kept."""
    w, h = w.clone().requires_grad_(), h.clone().requires_grad_()
    value = loss(w, h)
    first = torch.autograd.grad(value, (w, h), retain_graph=True)
    return first, torch.autograd.grad(3 * value, (w, h))


ORDERS: dict[str, Callable[[Loss, Tensor, Tensor], Any]] = {
    "value": lambda loss, w, h: loss(w, h),
    "grad": lambda loss, w, h: grad(loss, (0, 1))(w, h),
    "fs.grad": lambda loss, w, h: fs.grad(loss, (0, 1))(w, h),
    "jvp": lambda loss, w, h: jvp(loss, (w, h), (w.cos(), h.cos())),
    "hvp": lambda loss, w, h: fs.hvp(lambda p: loss(*p), (w, h), (w.cos(), h.cos())),
    "hvp in reverse": lambda loss, w, h: fs.hvp(lambda p: loss(*p), (w, h), (w.cos(), h.cos()), forward=False),
    "grad of grad": lambda loss, w, h: grad(lambda w: (grad(loss, 1)(w, h) ** 3).sum())(w),
    "third": lambda loss, w, h: grad(lambda w: (fs.hvp(lambda w: loss(w, h), w, w.cos()) ** 2).sum())(w),
    "vmap of grad": lambda loss, w, h: vmap(grad(loss, (0, 1)), (2, None))(torch.stack([w, w.cos()], 2), h),
    "vmap over rows": lambda loss, w, h: vmap(grad(loss, (0, 1)), (None, 1))(w, torch.stack([h, h.cos()], 1)),
    "plain autograd": by_double_backward,
    "first order": lambda loss, w, h: by_backward(loss, w, h),
}


@each
@pytest.mark.parametrize(("count", "chunks"), [(10, 3), (10, 4), (2, 5), (0, 3), (6, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_equals_the_function_of_all_rows(order: str, count: int, chunks: int) -> None:
    """Uneven slices, fewer rows than slices, no rows, ignored labels."""
    rows = rows_of(count)

    def of(f: Any) -> Loss:
        def loss(w: Tensor, h: Tensor) -> Tensor:
            total, number = f(w, {**rows, "h": h})
            assert total.dtype == torch.float64
            return total * w.sum() / (number + 1)

        return loss

    got, want = (ORDERS[order](of(f), W, rows["h"]) for f in (fs.chunked(cross_entropy, chunks), cross_entropy))
    assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_what_the_function_closes_over_has_its_gradient() -> None:
    h = rows_of(5)["h"]

    def loss(bias: Tensor, chunks: int) -> Tensor:
        def f(w: Tensor, h: Tensor) -> tuple[Tensor, int]:
            return (torch.tanh(h @ w) + bias).exp().sum(), len(h)

        return fs.chunked(f, chunks, reduce="mean")(W, h)

    assert_close(*(fs.hvp(lambda b, n=n: loss(b, n), BIAS, W[1]) for n in (2, 1)))


def test_rows_that_some_slices_do_not_use() -> None:
    """Their gradient is zero there; and that of weights which none uses."""
    h = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [-2.0, 4.0]])

    def f(w: tuple[Tensor, Tensor], h: Tensor) -> tuple[Tensor, int]:
        return (h @ w[0]).square().sum() if bool(h[0, 0] > 0) else w[0].square().sum(), 1

    def by_hand(w: tuple[Tensor, Tensor], h: Tensor) -> tuple[Tensor, int]:
        return torch.stack([f(w, row[None])[0] for row in h]).sum(), 1

    w = torch.tensor([3.0, 4.0]), torch.ones(2)
    for order in ("fs.grad", "plain autograd"):
        got, want = (ORDERS[order](lambda v, h, g=g: g((v, w[1]), h)[0], w[0], h) for g in (fs.chunked(f, 3), by_hand))
        assert_close(got, want)
    assert_close(fs.grad(lambda v: fs.chunked(f, 3)((w[0], v), h)[0])(w[1]), torch.zeros(2))


def test_the_mean_and_the_dimension() -> None:
    """Along the last dimension of each tensor; the mean of no rows is zero, and so is its gradient."""
    h, target = torch.randn(2, 3, 8), torch.randn(8)

    def f(w: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return ((torch.einsum("abt,ab->t", rows[0], w) - rows[1]) ** 2).sum(), rows[1].numel()

    mean = fs.chunked(f, 3, dim=-1, reduce="mean")
    w = torch.randn(2, 3)
    assert_close(mean(w, (h, target)), f(w, (h, target))[0] / 8)
    none = fs.grad_and_value(mean)(w, (h[..., :0], target[:0]))
    assert_close(none, (torch.zeros(2, 3), torch.tensor(0.0)))


def test_random_numbers_are_those_of_the_first_run() -> None:
    """Of every slice, in its derivatives; and what is drawn afterwards."""

    def dropped(w: Tensor, h: Tensor) -> tuple[Tensor, int]:
        return (F.dropout(h @ w, 0.5) ** 2).sum(), len(h)

    def by_hand(w: Tensor, h: Tensor) -> tuple[Tensor, int]:
        return sum((dropped(w, part)[0] for part in h.split(4)), torch.zeros(())), 0

    def results(f: Any) -> Any:
        torch.manual_seed(3)
        return fs.hvp(lambda w: f(w, rows_of(10)["h"])[0], W, W.cos()), torch.rand(2)

    assert_close(results(fs.chunked(dropped, 3)), results(by_hand))


@at_most(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_added_up_in_32(dtype: torch.dtype) -> None:
    """As those of the whole, which one product gives; added up in 16 bits they would be several times as far off."""
    torch.manual_seed(0)
    w, h = torch.randn(4, 8, dtype=dtype), torch.randn(512, 4, dtype=dtype).abs()

    def f(w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        total = (h @ w).sum()
        return total, torch.ones((), dtype=dtype)

    exact = grad(lambda w: f(w, h.double())[0])(w.double())
    chunked = fs.chunked(f, 128)
    got = fs.grad(lambda w: chunked(w, h)[0])(w)
    total, count = chunked(w, h)
    assert (got.dtype, total.dtype, count.dtype) == (dtype, torch.float32, torch.float32)
    assert ((got.double() - exact).abs() / exact).max() < 1.01 * torch.finfo(dtype).eps / 2


# --- memory ---
class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@at_most(2)
@pytest.mark.parametrize(
    "order", ["value", "fs.grad", "grad", "hvp", "hvp in reverse", "third", "plain autograd", "first order"]
)
def test_no_tensor_is_as_large_as_the_logits(order: str) -> None:
    rows = rows_of(64)
    sizes = []
    for chunks in (1, 16):
        f = fs.chunked(cross_entropy, chunks)
        with Largest() as largest:
            ORDERS[order](lambda w, h, f=f: f(w, {**rows, "h": h})[0], W, rows["h"])
        sizes.append(largest.numel)
    assert sizes[0] >= 64 * WORDS > 64 * WIDTH >= sizes[1]


# --- in a model ---
class Head(nn.Module):
    """A head and its loss; ``weight`` may be that of an embedding."""

    def __init__(self, weight: nn.Parameter, chunks: int) -> None:
        super().__init__()
        self.weight, self.chunks = weight, chunks

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        def f(w: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            logits = F.linear(rows[0], w)
            return F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, rows[1], reduction="sum"), (
                rows[1] >= 0
            ).sum()

        total, count = (fs.chunked(f, self.chunks) if self.chunks else f)(self.weight, (h, y))
        return total / count


class Model(nn.Module):
    """A language model whose forward gives its loss."""

    def __init__(self, chunks: int, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token, self.block = nn.Embedding(WORDS, 5), nn.Linear(5, 5)
        self.head = Head(self.token.weight if tied else nn.Parameter(torch.randn(words, 5)), chunks)

    def forward(self, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.token(y[:-1]))), torch.where(y[1:] == 0, -100, y[1:]))


def labels(rank: int) -> Tensor:
    """Of another length, and with other words ignored, on each rank."""
    return torch.randint(WORDS, (9 + rank,), generator=torch.Generator().manual_seed(rank))


def derivatives(loss: Callable[[fs.Params], Tensor], params: fs.Params, v: fs.Params) -> dict[str, fs.Params]:
    out = {"grad": fs.grad(loss)(params), "func": grad(loss)(params), "hvp": fs.hvp(loss, params, v)}
    return out | {"reverse": fs.hvp(loss, params, v, forward=False)}


STRATEGIES = {
    "tied": P("shard"),
    "frozen": P("shard"),
    "remat": P("shard", remat=True),
    "bf16": P("shard", precision=fs.Precision(param=torch.bfloat16, reduce=torch.float32)),
}


@at_most(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_in_a_model_on_real_ranks(rank: int, strategy: str) -> None:
    """The derivatives of the mean loss, of ranks with different numbers of rows."""
    p, tied, frozen = STRATEGIES[strategy], strategy == "tied", strategy == "frozen"
    whole, model = (Model(chunks, tied).double() for chunks in (0, 3))
    for each_model in (whole, model):
        each_model.head.weight.requires_grad_(not frozen)
    spec = fs.by_type(nn.Linear, Head, p=p)(model).bound
    full = {name: x.detach() for name, x in model.named_parameters()}
    trained = {name: x for name, x in full.items() if not frozen or name != "head.weight"}
    rest = {name: x for name, x in full.items() if name not in trained}
    mine, others = fs.partition(fs.shard(full, spec), spec)

    def reference(trained: fs.Params) -> Tensor:
        losses = (torch.func.functional_call(whole, {**trained, **rest}, (labels(r),)) for r in range(2))
        return torch.stack([*losses]).mean()

    def loss(mine: fs.Params) -> Tensor:
        return fs.functional_call(model, {**mine, **others}, (labels(rank),), spec=spec)

    v = {name: x.cos() for name, x in trained.items()}
    want = {k: fs.partition(fs.shard({**rest, **g}, spec), spec)[0] for k, g in derivatives(reference, trained, v).items()}
    got = derivatives(loss, mine, fs.partition(fs.shard({**rest, **v}, spec), spec)[0])
    exact = p.precision is None
    assert_close(got, want, rtol=1e-9 if exact else 0.05, atol=1e-9 if exact else 0.02)


def test_the_head_is_gathered_once_and_reduced_once() -> None:
    """Whatever the number of slices: by fs.grad once in forward, at most once in backward, with one reduction."""
    for strategy in (P("shard"), P("shard", remat=True)):
        sent = []
        for chunks in (0, 4):
            model = Model(chunks, words=2 * WORDS)
            with world(2):
                spec = fs.by_type(nn.Linear, Head, p=strategy)(model).bound
                params = fs.shard({name: p.detach() for name, p in model.named_parameters()}, spec)
                with Collectives() as log:
                    fs.grad(lambda p, m=model, s=spec: fs.functional_call(m, p, (labels(0),), spec=s))(params)
                own = spec.shard_numel(spec.by_key["head"])
            sent.append(log.all)
            assert sum(s.op == "all_gather" and s.numel == own for s in log.all) <= 2
            assert sum(s.op == "reduce_scatter" and s.numel == 2 * own for s in log.all) == 1
        assert sent[0] == sent[1]


@real_ranks(2)
def test_with_an_unsharded_head_on_real_ranks(rank: int) -> None:
    """Outside of functional_call, on weights that fs.unshard gathers once."""
    model = Model(0).double()
    spec = fs.by_type(nn.Linear, Head)(model).bound
    full = {name: x.detach() for name, x in model.named_parameters()}
    h = torch.randn(2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = torch.arange(9) % WORDS

    def f(w: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(F.linear(rows[0], w), rows[1], reduction="sum"), len(rows[1])

    def loss(params: fs.Params) -> Tensor:
        weight = fs.unshard(params, spec, units=["head"])["head.weight"]
        return fs.chunked(f, 4, reduce="mean")(weight, (h[rank], y))

    def reference(full: fs.Params) -> Tensor:
        return torch.stack([f(full["head.weight"], (h[r], y))[0] / 9 for r in range(2)]).mean()

    v = {name: x.cos() for name, x in full.items()}
    want = {k: fs.shard(g, spec) for k, g in derivatives(reference, full, v).items()}
    assert_close(derivatives(loss, fs.shard(full, spec), fs.shard(v, spec)), want, rtol=1e-9, atol=1e-9)


# --- refusals ---
def keeps(w: Tensor, h: Tensor, kept: list[Any] = []) -> tuple[Tensor, int]:  # noqa: B006
    kept.append(h @ w)
    return kept[-1].sum(), 1


class ScaledHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS, bias=False, dtype=torch.float64)
        self.temperature = 2.0

    def forward(self, h: Tensor) -> Tensor:
        return fs.chunked(lambda w, h: ((h @ w.T / self.temperature).square().sum(), len(h)), 2, reduce="mean")(self.weight, h)


@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True)], ids=str)
def test_a_function_reads_attributes_of_its_module(p: P) -> None:
    """A run of a recomputed module sets some of them anew, in another order."""
    head = ScaledHead()
    spec = fs.policies.whole(p)(head)
    got = fs.grad(lambda params: fs.functional_call(head, params, (H,), spec=spec))(fs.shard(head, spec))
    want = grad(lambda w: (H @ w.T / 2).square().sum() / len(H))(head.weight.detach())
    assert_close(fs.unshard(got, spec)["weight"], want)


def total(w: Tensor, h: Tensor) -> Any:
    return (h @ w).sum(), 1


H = rows_of(4)["h"]

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "chunks": (
        lambda: fs.chunked(total, 0),
        ValueError,
        "chunked total: chunks: expected a number of slices, 1 or more, got 0",
    ),
    "reduce": (lambda: fs.chunked(total, 2, reduce="max"), ValueError, 'expected "sum" or "mean", got \'max\''),
    "no rows": (lambda: fs.chunked(total, 2)(W, ()), TypeError, "rows: expected tensors, got none"),
    "a number": (lambda: fs.chunked(total, 2)(W, (H, 3)), TypeError, r"rows\[1\]: expected a tensor, got int"),
    "lengths": (lambda: fs.chunked(total, 2)(W, (H, H[:3])), ValueError, r"rows\[1\]: expected 4 rows .* got 3"),
    "dimension": (lambda: fs.chunked(total, 2, dim=2)(W, H), ValueError, r"with a dimension 2, got shape \[4, 3\]"),
    "no pair": (lambda: fs.chunked(lambda w, h: (h @ w).sum(), 2)(W, H), TypeError, r"to return \(sum, count\), got Tensor"),
    "rows as sum": (lambda: fs.chunked(lambda w, h: (h @ w, 1), 2)(W, H), TypeError, r"0-dim.* as its sum, got .*\[2, 7\]"),
    "rows as count": (
        lambda: fs.chunked(lambda w, h: (total(w, h)[0], h), 2)(W, H),
        TypeError,
        r"as its count, got shape \[2, 3\]",
    ),
    "kept tensors": (lambda: grad(lambda w: fs.chunked(keeps, 2)(w, H)[0])(W), RuntimeError, "chunked keeps changes an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    run, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        run()
