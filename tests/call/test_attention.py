"""Functions in slices: attention is the math kernel, and chunked the function of all rows, at every order, in less memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives, world
from depth import at_most, each, every, seldom
from models import module_class, refused
from orders import FIRST_AND_SECOND, ORDERS, cubes
from parity import gradient_of, loss_of, normal, shards_of
from ranks import real_ranks
from test_memory import Peak
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import funshard as fs
from funshard import P, _torch
from funshard._transforms import sliced

LENGTH, BLOCK = 11, 4


def qkv(heads: int = 4, queries: int = LENGTH, keys: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, queries, 3), normal(2, heads, keys, 3, seed=1), normal(2, heads, keys, 3, seed=2)


ALLOWED = normal(LENGTH, LENGTH) > -0.3
ALLOWED[3] = False  # a query that attends to nothing
CASES: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "all": (qkv(), {}),
    "causal": (qkv(), {"is_causal": True}),
    "causal, more keys": (qkv(queries=7), {"is_causal": True}),
    "causal, fewer keys": (qkv(keys=6), {"is_causal": True, "scale": 0.3}),
    "bool mask": (qkv(), {"attn_mask": ALLOWED}),
    "additive mask": (qkv(), {"attn_mask": normal(2, 1, LENGTH, LENGTH).masked_fill(~ALLOWED, -torch.inf)}),
    "one mask for all queries": (qkv(), {"attn_mask": normal(2, 1, 1, LENGTH) > 0}),
    "fewer heads of keys": (qkv(heads=2), {"enable_gqa": True, "is_causal": True}),
    "no queries": (qkv(queries=0), {}),
}


AT_ORDERS = [*FIRST_AND_SECOND, "grad of jvp", "vmap of grad", "vmap over the last"]


def as_math(run: Callable[[], Any]) -> None:
    """In blocks the same as by the math kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        want = run()
    with fs.transforms_attention(BLOCK):
        got = run()
    # NaN: third derivatives of the math kernel where a query attends to nothing
    assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


@each(case=CASES, order=AT_ORDERS)
def test_equals_the_math_kernel(order: str, case: str) -> None:
    """Masks, causal and not, grouped queries, another number of keys, rows that attend to nothing; at every order."""
    xs, options = CASES[case]
    as_math(lambda: ORDERS[order](lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), xs))


def test_a_mask_has_its_derivative() -> None:
    """As a learnt bias by position, which all queries share or not."""
    xs = qkv()
    for shape in ((1, 4, LENGTH, LENGTH), (1, 1, 1, LENGTH)):
        bias = normal(*shape, seed=3)
        as_math(lambda b=bias: fs.hvp(lambda bias: cubes(F.scaled_dot_product_attention)(*xs, bias), b, b.cos()))


@pytest.mark.parametrize("forward", [True, False])
def test_attention_under_no_grad_is_a_constant(forward: bool) -> None:
    """At every level of a stack of transforms, as other operators."""
    x = normal(1, 1, LENGTH, 3)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = F.scaled_dot_product_attention(x, x, x)
        return (out * x * x).sum()

    with fs.transforms_attention(BLOCK):
        want = 2 * F.scaled_dot_product_attention(x, x, x) * x.cos()
        assert_close(fs.hvp(loss, x, x.cos(), forward=forward), want, rtol=1e-12, atol=1e-12)


@every(dtype=[torch.float16, torch.bfloat16], cast=["arguments", "autocast"])
def test_16_bits_accumulate_in_32(dtype: torch.dtype, cast: str) -> None:
    """The same numbers as the math kernel's; and the same in a backward outside of autocast."""
    xs = [x.float() if cast == "autocast" else x.to(dtype) for x in qkv()]
    results = []
    for context in (sdpa_kernel(SDPBackend.MATH), fs.transforms_attention(BLOCK)):
        leaves = [x.clone().requires_grad_() for x in xs]
        with context, torch.autocast("cpu", dtype) if cast == "autocast" else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        assert out.dtype == dtype
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert_close(results[1], results[0], rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_dropout_is_the_same_in_every_run() -> None:
    """Its derivatives are those of the scores that were dropped; and what is drawn afterwards."""
    q, k, v = qkv()

    def f(value: Tensor) -> Tensor:
        torch.manual_seed(4)
        return F.scaled_dot_product_attention(q, k, value, dropout_p=0.5)

    with fs.transforms_attention(BLOCK):
        out, tangent = jvp(f, (v,), (v.cos(),))
        assert_close(f(v), out)
        assert (f(torch.ones_like(v)) - 1).abs().max() > 0.1  # some are dropped
        drawn = torch.rand(2)
        assert_close(tangent, f(v.cos()))  # it is linear in the values
        assert_close(torch.rand(2), drawn)
        assert_close(grad(lambda v: (f(v) * q).sum())(v), grad(lambda w: (jvp(f, (v,), (w,))[1] * q).sum())(v))


@at_most(3)
@pytest.mark.parametrize("order", FIRST_AND_SECOND)
def test_memory_is_linear_in_the_length(order: str) -> None:
    """No tensor has a number for each pair of query and key."""
    for length in (32, 64):
        xs = tuple(normal(1, 1, length, 2, seed=i) for i in range(3))
        with fs.transforms_attention(8), Peak() as peak:
            ORDERS[order](F.scaled_dot_product_attention, xs)
        assert max(peak.made) <= 8 * 8 * length


# --- where it holds ---
@contextlib.contextmanager
def blocks_seen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The lengths of the queries of each call by blocks."""
    seen: list[int] = []
    original = sliced._attend_by_blocks

    def counted(block: int, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(block)
        return original(block, query, *args, **kwargs)

    monkeypatch.setattr(sliced, "_attend_by_blocks", counted)
    sliced._make_attention.cache_clear()
    yield seen
    sliced._make_attention.cache_clear()


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x).square().sum()


def test_nested_contexts_and_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost context counts, in its thread alone, and ends with its block, also by an error.

    It is left where it was entered: in another thread that is an error of torch's there, and nothing changes here.
    """
    x = normal(1, 1, LENGTH, 3)
    with blocks_seen(monkeypatch) as seen:
        with fs.transforms_attention(4):
            with fs.transforms_attention(2):
                attend(x)
            with pytest.raises(ValueError, match="got both"), fs.transforms_attention(2):
                F.scaled_dot_product_attention(x, x, x, attn_mask=ALLOWED, is_causal=True)
            attend(x)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(attend, x).result()
        attend(x)
    assert seen == [2, 2, 4]
    context = fs.transforms_attention(BLOCK)
    with ThreadPoolExecutor(1) as pool, context:
        refused(RuntimeError, "empty mode stack", lambda: pool.submit(context.__exit__, None, None, None).result())
        assert _torch.current_attention() is not None
    assert _torch.current_attention() is None


@pytest.mark.parametrize("way", ["remat", "P(remat=True)"])
def test_a_recomputed_call_has_the_attention_of_its_first_run(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By blocks also where backward is outside of the context; torch's own where backward is inside, and forward was not."""
    model, spec, (x, _) = layers(P("shard", remat=True), 1)
    params = fs.shard(model, spec)
    run = loss_of(model, spec, x) if way != "remat" else lambda params: fs.remat(attend)(x * params["0"].sum())
    with blocks_seen(monkeypatch) as seen:
        for forward, backward in ((True, False), (False, True)):
            leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
            with fs.transforms_attention(BLOCK) if forward else contextlib.nullcontext():
                loss = run(leaves)
            assert seen == [BLOCK] * forward
            with fs.transforms_attention(BLOCK) if backward else contextlib.nullcontext():
                loss.backward()
            assert seen == [BLOCK, BLOCK] * forward
            seen.clear()


def test_multi_head_attention() -> None:
    """torch's module runs its function outside of modes."""
    module, length = nn.MultiheadAttention(8, 2, batch_first=True).double(), 10 * LENGTH
    x, mask = normal(2, length, 8), nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    options: dict[str, Any] = {"need_weights": False, "is_causal": True, "attn_mask": mask}
    product = lambda: fs.hvp(lambda x: module(x, x, x, **options)[0].square().sum(), x, x.cos())  # noqa: E731
    as_math(product)
    with fs.transforms_attention(BLOCK), Peak() as peak:
        product()
    assert max(peak.made) < 8 * 2 * 2 * length * length


def layers(p: P | None = None, count: int = 2) -> tuple[nn.Module, fs.PartitionSpec, Tensor]:
    """Layers of torch's, and a batch for each of two ranks."""
    torch.manual_seed(0)
    blocks = (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(count))
    model = nn.Sequential(*blocks).double()
    return model, fs.by_type(nn.TransformerEncoderLayer, p=p or P("shard"))(model).bound, normal(2, 2, LENGTH, 4)


@at_most(1)
@every(p=[P("shard"), P("shard", remat=True), pytest.param(P(), marks=seldom)])
@real_ranks(2)
def test_on_real_ranks(rank: int, p: P) -> None:
    """Every derivative of the loss of a sharded model."""
    model, spec, x = layers(p)
    params, loss = fs.shard(model, spec), loss_of(model, spec, x[rank])
    v = fs.random_like(params, spec, 0)

    def run() -> Any:
        twice = fs.hvp(loss, params, v), fs.hvp(loss, params, v, forward=False)
        third = grad(lambda p: sum((g**2).sum() for g in fs.hvp(loss, p, v).values()))
        return fs.grad(loss)(params), *twice, jvp(loss, (params,), (v,)), third(params)

    as_math(run)


@seldom
def test_in_a_compiled_step() -> None:
    """It is entered around the step."""
    model, spec, (x, _) = layers()
    params = fs.shard(model, spec)

    def step(params: fs.Params, x: Tensor) -> Any:
        loss = loss_of(model, spec, x)
        return fs.grad(loss)(params), fs.hvp(loss, params, {k: p.cos() for k, p in params.items()})

    torch._dynamo.reset()
    with fs.transforms_attention(BLOCK):
        assert_close(fs.compile(step, backend="aot_eager")(params, x), step(params, x), rtol=1e-9, atol=1e-9)


@seldom
@pytest.mark.parametrize("compile_", [torch.compile, fs.compile, functools.partial(torch.compile, fullgraph=True)])
def test_inside_of_a_compiled_function_it_is_refused(compile_: Callable[..., Any]) -> None:
    """Also where torch.compile leaves the function to Python, and compiles the frames of recomputation: numbers were wrong."""

    def run(x: Tensor) -> Tensor:
        with fs.transforms_attention(BLOCK):
            return x.sin().cos()

    torch._dynamo.reset()
    refused(Exception, "expected it around the call", lambda: compile_(run, backend="aot_eager")(torch.ones(2)))


@seldom
def test_what_torch_compile_leaves_to_python_is_right() -> None:
    """After a graph break Dynamo would compile the mode's frame alone, and run the first function twice."""

    def run(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin().cos()

    x = torch.ones(2)
    torch._dynamo.reset()
    with fs.transforms_attention(BLOCK):
        assert torch.equal(torch.compile(run, backend="eager")(x), x.sin().cos())


def test_a_compiled_unit_runs_without_compilation() -> None:
    model, spec, (x, _) = layers(P("shard", compile=fs.Compile(backend="eager")))
    warned = pytest.warns(fs._call.compiled_unit.CompileWarning, match="attention is that of fs.transforms_attention")
    with fs.transforms_attention(BLOCK), warned:
        fs.grad(loss_of(model, spec, x))(fs.shard(model, spec))


# --- fs.chunked: the sum of a function over slices of the rows is the function of all rows, in less memory ---
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


@each
@pytest.mark.parametrize(("count", "chunks"), [(10, 3), (10, 4), (2, 5), (0, 3), (6, 1)])
@pytest.mark.parametrize("order", [*AT_ORDERS, "grad of grad", "kept graph"])
def test_equals_the_function_of_all_rows(order: str, count: int, chunks: int) -> None:
    """Uneven slices, fewer rows than slices, no rows, ignored labels."""
    rows = rows_of(count)

    def of(f: Any) -> Loss:
        def loss(w: Tensor, h: Tensor) -> Tensor:
            total, number = f(w, {**rows, "h": h})
            assert total.dtype == torch.float64
            return total * w.sum() / (number + 1)

        return loss

    got, want = (ORDERS[order](of(f), (W, rows["h"])) for f in (fs.chunked(cross_entropy, chunks), cross_entropy))
    assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_what_the_function_closes_over_has_its_gradient() -> None:
    h = rows_of(5)["h"]

    def loss(bias: Tensor, chunks: int) -> Tensor:
        return fs.chunked(lambda w, h: ((torch.tanh(h @ w) + bias).exp().sum(), len(h)), chunks, reduce="mean")(W, h)

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
        run = ORDERS[order]
        assert_close(*(run(lambda v, h, g=g: g((v, w[1]), h)[0], (w[0], h)) for g in (fs.chunked(f, 3), by_hand)))
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
@at_most(2)
@every(order=[*FIRST_AND_SECOND, "kept graph"])
def test_no_tensor_is_as_large_as_the_logits(order: str) -> None:
    rows = rows_of(64)
    sizes = []
    for chunks in (1, 16):
        f = fs.chunked(cross_entropy, chunks)
        with Peak() as peak:
            ORDERS[order](lambda w, h, f=f: f(w, {**rows, "h": h})[0], (W, rows["h"]))
        sizes.append(max(peak.made) // 8)
    assert sizes[0] >= 64 * WORDS > 64 * WIDTH >= sizes[1]


# --- in a model ---
def sum_of_rows(w: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits = F.linear(rows[0], w)
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits, rows[1], reduction="sum"), (rows[1] >= 0).sum()


def mean_of_rows(w: Tensor, h: Tensor, y: Tensor, chunks: int) -> Tensor:
    total, count = (fs.chunked(sum_of_rows, chunks) if chunks else sum_of_rows)(w, (h, y))
    return total / count


Head = module_class(
    "Head",
    lambda weight, chunks: {"weight": weight, "chunks": chunks},
    lambda self, h, y: mean_of_rows(self.weight, h, y, self.chunks),
)
"""A head and its loss; ``weight`` may be that of an embedding."""


class Model(nn.Module):
    """A language model whose forward gives its loss."""

    def __init__(self, chunks: int, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token, self.block = nn.Embedding(WORDS, 5), nn.Linear(5, 5)
        self.head = Head(self.token.weight if tied else nn.Parameter(torch.randn(words, 5)), chunks)

    def hidden(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.block(self.token(y[:-1]))), torch.where(y[1:] == 0, -100, y[1:])

    def forward(self, y: Tensor) -> Tensor:
        return self.head(*self.hidden(y))


def labels(rank: int) -> Tensor:
    """Of another length, and with other words ignored, on each rank."""
    return torch.randint(WORDS, (9 + rank,), generator=torch.Generator().manual_seed(rank))


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
    """Both derivatives of the mean loss, of ranks with different numbers of rows, are those of the whole model."""
    p = STRATEGIES[strategy]
    model = Model(3, strategy == "tied").double()
    model.head.weight.requires_grad_(strategy != "frozen")
    rounding = {} if p.precision is None else {"tolerance": 0.05}
    spec = fs.by_type(nn.Linear, Head, p=p)(model)
    fs.testing.assert_exact(lambda call, y: call(y), model, spec, labels(rank), order=2, **rounding)


def test_the_head_is_gathered_once_and_reduced_once() -> None:
    """Whatever the number of slices: by fs.grad once in forward, at most once in backward, with one reduction."""
    for strategy in (P("shard"), P("shard", remat=True)):
        sent = []
        for chunks in (0, 4):
            model = Model(chunks, words=2 * WORDS)
            with world(2):
                spec, params = shards_of(fs.by_type(nn.Linear, Head, p=strategy), model)
                with Collectives() as log:
                    fs.grad(loss_of(model, spec, labels(0), of=torch.sum))(params)
                own = spec.shard_numel(spec.by_key["head"])
            sent.append(log.all)
            assert sum(s.op == "all_gather" and s.numel == own for s in log.all) <= 2
            assert sum(s.op == "reduce_scatter" and s.numel == 2 * own for s in log.all) == 1
        assert sent[0] == sent[1]


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
    got = gradient_of(fs.policies.whole(p), head, H, of=torch.sum)
    want = grad(lambda w: (H @ w.T / 2).square().sum() / len(H))(head.weight.detach())
    assert_close(fs.unshard(got, fs.policies.whole(p)(head).bound)["weight"], want)


def total(w: Tensor, h: Tensor) -> Any:
    return (h @ w).sum(), 1


H = rows_of(4)["h"]


def attend_masked() -> Tensor:
    with fs.transforms_attention(BLOCK):
        return F.scaled_dot_product_attention(*qkv(), attn_mask=ALLOWED, is_causal=True)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "block": (lambda: fs.transforms_attention(0), ValueError, "block: expected a number of queries, 1 or more, got 0"),
    "mask and causal": (attend_masked, ValueError, "expected attn_mask or is_causal=True, got both"),
    "chunks": (
        lambda: fs.chunked(total, 0),
        ValueError,
        "chunked total: chunks: expected a number of slices, 1 or more, got 0",
    ),
    "reduce": (lambda: fs.chunked(total, 2, reduce="max"), ValueError, 'expected "sum" or "mean", got \'max\''),
    "no rows": (lambda: fs.chunked(total, 2)(W, ()), ValueError, "rows: expected one tensor at least, got none"),
    "a number": (lambda: fs.chunked(total, 2)(W, (H, 3)), TypeError, r"rows\[1\]: expected a tensor, got int"),
    "lengths": (lambda: fs.chunked(total, 2)(W, (H, H[:3])), ValueError, r"rows\[1\]: expected length 4 .* got shape \[3, 3\]"),
    "dimension": (lambda: fs.chunked(total, 2, dim=2)(W, H), ValueError, r"with a dimension 2, got shape \[4, 3\]"),
    "no pair": (lambda: fs.chunked(lambda w, h: (h @ w).sum(), 2)(W, H), TypeError, r"to return \(sum, count\), got Tensor"),
    "rows as sum": (lambda: fs.chunked(lambda w, h: (h @ w, 1), 2)(W, H), TypeError, r"0-dim.* as its sum, got .*\[2, 7\]"),
    "rows as count": (lambda: fs.chunked(lambda w, h: (h.sum(), h), 2)(W, H), TypeError, r"as its count, got shape \[2, 3\]"),
    "kept tensors": (lambda: grad(lambda w: fs.chunked(keeps, 2)(w, H)[0])(W), RuntimeError, "chunked keeps changes an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """Of chunked functions, of attention in blocks, and of what both mask and causality say."""
    run, error, message = REFUSED[case]
    refused(error, message, run)
