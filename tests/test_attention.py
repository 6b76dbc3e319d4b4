"""fs.transforms_attention: attention by blocks of queries is the math kernel, with every derivative and in linear memory."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, each, every, seldom
from ranks import real_ranks
from test_chunked import Largest
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import funshard as fs
from funshard import P, _torch
from funshard._transforms import sliced

LENGTH, BLOCK = 11, 4
Function = Callable[..., Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(heads: int = 4, queries: int = LENGTH, keys: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(2, 4, queries, 3), numbers(2, heads, keys, 3, seed=1), numbers(2, heads, keys, 3, seed=2)


ALLOWED = numbers(LENGTH, LENGTH) > -0.3
ALLOWED[3] = False  # a query that attends to nothing
CASES: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "all": (qkv(), {}),
    "causal": (qkv(), {"is_causal": True}),
    "causal, more keys": (qkv(queries=7), {"is_causal": True}),
    "causal, fewer keys": (qkv(keys=6), {"is_causal": True, "scale": 0.3}),
    "bool mask": (qkv(), {"attn_mask": ALLOWED}),
    "additive mask": (qkv(), {"attn_mask": numbers(2, 1, LENGTH, LENGTH).masked_fill(~ALLOWED, -torch.inf)}),
    "one mask for all queries": (qkv(), {"attn_mask": numbers(2, 1, 1, LENGTH) > 0}),
    "fewer heads of keys": (qkv(heads=2), {"enable_gqa": True, "is_causal": True}),
    "no queries": (qkv(queries=0), {}),
}


def cubes(f: Function) -> Function:
    return lambda *xs: (f(*xs) ** 3).sum()


def hvp(f: Function, xs: Any, **options: Any) -> Any:
    return fs.hvp(lambda p: cubes(f)(*p), xs, tuple(x.cos() for x in xs), **options)


def by_double_backward(f: Function, xs: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in xs]
    first = torch.autograd.grad(cubes(f)(*leaves), leaves, create_graph=True)
    return [g.detach() for g in first], torch.autograd.grad(sum((g**2).sum() for g in first), leaves)


ORDERS: dict[str, Callable[[Function, tuple[Tensor, ...]], Any]] = {
    "value": lambda f, xs: f(*xs),
    "fs.grad": lambda f, xs: fs.grad(cubes(f), (0, 1, 2))(*xs),
    "grad": lambda f, xs: grad(cubes(f), (0, 1, 2))(*xs),
    "jvp": lambda f, xs: jvp(f, xs, tuple(x.cos() for x in xs)),
    "hvp": hvp,
    "hvp in reverse": lambda f, xs: hvp(f, xs, forward=False),
    "grad of jvp": lambda f, xs: grad(lambda *xs: cubes(lambda *xs: jvp(f, xs, xs)[1])(*xs), (0, 1, 2))(*xs),
    "third": lambda f, xs: grad(lambda xs: sum((g**2).sum() for g in hvp(f, xs)))(xs),
    "vmap": lambda f, xs: vmap(grad(cubes(f), (0, 1, 2)), (3, None, 0))(
        torch.stack([xs[0], xs[0].sin()], 3), xs[1], torch.stack([xs[2], xs[2].sin()])
    ),
    "plain autograd": by_double_backward,
}


@each(case=CASES, order=ORDERS)
def test_equals_the_math_kernel(order: str, case: str) -> None:
    """Masks, causal and not, grouped queries, another number of keys, rows that attend to nothing; at every order."""
    xs, options = CASES[case]

    def run() -> Any:
        return ORDERS[order](lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), xs)

    with sdpa_kernel(SDPBackend.MATH):
        want = run()
    with fs.transforms_attention(BLOCK):
        got = run()
    # NaN: third derivatives of the math kernel where a query attends to nothing
    assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_mask_has_its_derivative() -> None:
    """As a learnt bias by position, which all queries share or not."""
    xs = qkv()
    for shape in ((1, 4, LENGTH, LENGTH), (1, 1, 1, LENGTH)):
        f = lambda bias: cubes(F.scaled_dot_product_attention)(*xs, bias)  # noqa: E731
        bias = numbers(*shape, seed=3)
        with sdpa_kernel(SDPBackend.MATH):
            want = fs.hvp(f, bias, bias.cos())
        with fs.transforms_attention(BLOCK):
            assert_close(fs.hvp(f, bias, bias.cos()), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("forward", [True, False])
def test_attention_under_no_grad_is_a_constant(forward: bool) -> None:
    """At every level of a stack of transforms, as other operators."""
    x = numbers(1, 1, LENGTH, 3)

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
@pytest.mark.parametrize("order", ["value", "fs.grad", "grad", "jvp", "hvp", "hvp in reverse", "third", "plain autograd"])
def test_memory_is_linear_in_the_length(order: str) -> None:
    """No tensor has a number for each pair of query and key."""
    for length in (32, 64):
        xs = tuple(numbers(1, 1, length, 2, seed=i) for i in range(3))
        with fs.transforms_attention(8), Largest() as largest:
            ORDERS[order](lambda q, k, v: F.scaled_dot_product_attention(q, k, v), xs)
        assert largest.numel <= 8 * length


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
    """The innermost context counts, in its thread alone, and ends with its block, also by an error."""
    x = numbers(1, 1, LENGTH, 3)
    with blocks_seen(monkeypatch) as seen:
        with fs.transforms_attention(4):
            with fs.transforms_attention(2):
                attend(x)
            with pytest.raises(ValueError, match="got both"), fs.transforms_attention(2):
                F.scaled_dot_product_attention(x, x, x, attn_mask=ALLOWED, is_causal=True)
            attend(x)
            thread = threading.Thread(target=attend, args=(x,))
            thread.start()
            thread.join()
        attend(x)
    assert seen == [2, 2, 4]
    assert _torch.current_attention() is None


@pytest.mark.parametrize("way", ["remat", "P(remat=True)"])
def test_a_recomputed_call_has_the_attention_of_its_first_run(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By blocks also where backward is outside of the context; torch's own where backward is inside, and forward was not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)).double()
    spec = fs.by_type(nn.TransformerEncoderLayer, p=P("shard", remat=True))(model).bound
    x, params = numbers(2, LENGTH, 4), fs.shard(model, spec)

    def run(params: fs.Params) -> Tensor:
        if way == "remat":
            return fs.remat(attend)(x * params["0"].sum())
        return fs.functional_call(model, params, (x,), spec=spec).square().sum()

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


@at_most(1)
@pytest.mark.parametrize(
    "options", [{"need_weights": False}, {"need_weights": True}, {"need_weights": False, "is_causal": True}]
)
def test_multi_head_attention(options: dict[str, Any]) -> None:
    """torch's module runs its function outside of modes."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    length = 10 * LENGTH
    x, mask = numbers(2, length, 8), nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    options = {**options, "attn_mask": mask} if "is_causal" in options else options
    f = lambda x: module(x, x, x, **options)[0].square().sum()  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        want = fs.hvp(f, x, x.cos())
    with fs.transforms_attention(BLOCK), Largest() as largest:
        got = fs.hvp(f, x, x.cos())
    assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert options["need_weights"] or largest.numel < 2 * 2 * length * length  # or else it returns the scores


def llama() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=16, num_hidden_layers=2, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config).double(), torch.randint(1, 16, (2, 2, LENGTH))


def sharded_llama(model: nn.Module, ids: Tensor, spec: fs.PartitionSpec, *, padded: bool) -> dict[str, fs.Params]:
    """Derivatives of its loss at the defaults of transformers, for a batch without and with padding."""
    params = fs.shard(model, spec)
    full = {name: x.detach().cos() for name, x in model.named_parameters()}
    v = fs.shard(full, spec)
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [3]])).long() if padded else None

    def loss(params: fs.Params) -> Tensor:
        kwargs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        return fs.functional_call(model, params, (), kwargs, spec=spec).loss

    out = {"grad": fs.grad(loss)(params), "hvp": fs.hvp(loss, params, v), "reverse": fs.hvp(loss, params, v, forward=False)}
    return out | {"jvp": jvp(loss, (params,), (v,))[1]}


@seldom
@every(padded=[True, False], p=[P("shard", remat=True), P("shard"), P()])
@real_ranks(2)
def test_transformers_on_real_ranks(rank: int, p: P, padded: bool) -> None:
    model, ids = llama()
    spec = fs.by_type(type(model.model.layers[0]), p=p)(model).bound
    with sdpa_kernel(SDPBackend.MATH):
        want = sharded_llama(model, ids[rank], spec, padded=padded)
    with fs.transforms_attention(BLOCK):
        assert_close(sharded_llama(model, ids[rank], spec, padded=padded), want, rtol=1e-9, atol=1e-9)


def layers(p: P | None = None) -> tuple[nn.Module, fs.PartitionSpec, Tensor]:
    """Two layers, and a batch for each of two ranks."""
    torch.manual_seed(0)
    blocks = (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(*blocks).double()
    return model, fs.by_type(nn.TransformerEncoderLayer, p=p or P("shard"))(model), numbers(2, 2, LENGTH, 4)


@at_most(1)
@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True), pytest.param(P(), marks=seldom)])
@real_ranks(2)
def test_on_real_ranks(rank: int, p: P) -> None:
    model, spec, x = layers(p)
    params = fs.shard(model, spec)
    v = fs.random_like(params, spec, 0)

    def run() -> Any:
        loss = lambda p: fs.functional_call(model, p, (x[rank],), spec=spec).square().mean()  # noqa: E731
        first = fs.grad(loss)(params), fs.hvp(loss, params, v), fs.hvp(loss, params, v, forward=False)
        return (
            *first,
            jvp(loss, (params,), (v,)),
            grad(lambda p: sum((g**2).sum() for g in fs.hvp(loss, p, v).values()))(params),
        )

    with sdpa_kernel(SDPBackend.MATH):
        want = run()
    with fs.transforms_attention(BLOCK):
        assert_close(run(), want, rtol=1e-9, atol=1e-9)


@seldom
def test_in_a_compiled_step() -> None:
    """It is entered around the step."""
    model, spec, (x, _) = layers()
    params = fs.shard(model, spec)

    def step(params: fs.Params, x: Tensor) -> Any:
        loss = lambda p: fs.functional_call(model, p, (x,), spec=spec).square().mean()  # noqa: E731
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
    with pytest.raises(Exception, match="expected it around the call"):
        compile_(run, backend="aot_eager")(torch.ones(2))


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


def test_a_context_is_left_where_it_was_entered() -> None:
    """In another thread it is an error there, and nothing changes here."""
    context = fs.transforms_attention(BLOCK)
    with ThreadPoolExecutor(1) as thread, context:
        with pytest.raises(RuntimeError, match="expected the thread that entered it"):
            thread.submit(context.__exit__, None, None, None).result()
        assert _torch.current_attention() is not None
    assert _torch.current_attention() is None


def test_a_compiled_unit_runs_without_compilation() -> None:
    model, spec, (x, _) = layers(P("shard", compile=fs.Compile(backend="eager")))
    with (
        fs.transforms_attention(BLOCK),
        pytest.warns(fs._call.compiled_unit.CompileWarning, match="attention is that of fs.transforms_attention"),
    ):
        fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum())(fs.shard(model, spec))


def test_refusals() -> None:
    for block in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"block: expected a number of queries, 1 or more, got {block}"):
            fs.transforms_attention(block)  # pyright: ignore[reportArgumentType]
    q, k, v = qkv()
    with fs.transforms_attention(BLOCK), pytest.raises(ValueError, match="expected attn_mask or is_causal=True, got both"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=ALLOWED, is_causal=True)
