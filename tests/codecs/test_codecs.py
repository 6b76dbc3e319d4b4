"""int8 and NF4: how far off, what is exact, which bytes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from depth import at_most, every, seldom
from hypothesis import example, given
from models import refused
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from funshard import Codec, codecs
from funshard._spec.codec import pack_bytes

LOW, WIDE = [torch.bfloat16, torch.float16], [torch.float32, torch.float64]
EPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-22, torch.float64: 2**-50}
"""Two roundings, of numbers of at most one."""
EVERY = [codecs.int8, codecs.nf4, codecs.dynamic8, lambda block: codecs.nf4(block, double_quant=True)]


def numbers(numel: int, dtype: torch.dtype, seed: int = 0, zeros: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10 ** torch.randint(-2, 3, (numel,), generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < zeros, 0, x).to(dtype)


def absmax_of(x: Tensor, block: int) -> Tensor:
    """Each element's block's, in float64."""
    blocks = [piece.abs().max().double().expand(len(piece)) for piece in x.split(block)] if len(x) else []
    return torch.cat([torch.empty(0, dtype=torch.float64), *blocks])


@given(st.integers(0, 300), st.sampled_from([2, 8, 64]), st.sampled_from([*LOW, *WIDE]), st.integers(0, 99))
@example(0, 64, torch.bfloat16, 0)
@example(65, 64, torch.float32, 0)
def test_error_zeros_and_again(numel: int, block: int, dtype: torch.dtype, seed: int) -> None:
    """At most half a step off, zeros exact, and what was decoded is encoded to the same bytes."""
    x = numbers(numel, dtype, seed)
    most = max(b - a for a, b in zip(codecs._codecs.NF4, codecs._codecs.NF4[1:], strict=False)) / 2
    for codec, bound in ((codecs.int8(block), 1 / 127 / 2), (codecs.nf4(block), most)):
        encoded = codec.encode(x)
        got = codec.decode(*encoded)
        assert got.dtype == dtype
        assert got.shape == x.shape
        assert ((got.double() - x.double()).abs() <= (bound + EPS[dtype]) * absmax_of(x, block)).all()
        assert (got[x == 0] == 0).all()
        assert all(torch.equal(a, b) for a, b in zip(codec.encode(got), encoded, strict=True))


@given(st.integers(1, 3000), st.sampled_from([*LOW, *WIDE]), st.integers(0, 99))
def test_quantized_scales(numel: int, dtype: torch.dtype, seed: int) -> None:
    """Each is off by at most 1 / 254 of the largest difference of one from their mean, and none is below zero."""
    x, block = numbers(numel, dtype, seed), 4
    codec = codecs.nf4(block, double_quant=True)
    got = codec.decode(*codec.encode(x))
    plain = codecs.nf4(block).decode(*codecs.nf4(block).encode(x)).double()
    scales = torch.stack([piece.abs().max().double() for piece in x.split(block)])
    off = torch.cat([(group - scales.mean()).abs().max().expand(len(group)) / 254 for group in scales.split(256)])
    off = off.repeat_interleave(block)[:numel]
    rounding = EPS[dtype] * 2 * (off + absmax_of(x, block)) + 1e-6 * scales.mean()
    assert ((got.double() - plain).abs() <= off * (1 + 1e-5) + rounding).all()
    assert (got[x == 0] == 0).all()
    assert (got * x >= 0).all()


def slow_nf4(x: Sequence[float], block: int) -> tuple[list[int], list[float], list[float]]:
    """The bytes, the scales and the values, in loops, as the paper has them."""
    nearest: list[int] = []
    scales = []
    for start in range(0, len(x), block):
        some = x[start : start + block]
        scales.append(max(abs(v) for v in some))
        for v in some:
            ratio = v / scales[-1] if scales[-1] else 0.0
            nearest.append(min(range(16), key=lambda i: abs(codecs._codecs.NF4[i] - ratio)))
    both = [*nearest, 0 if len(nearest) % 2 else None]
    raw = [a * 16 + b for a, b in zip(both[::2], both[1::2], strict=False) if a is not None and b is not None]
    return raw, scales, [codecs._codecs.NF4[i] * scales[at // block] for at, i in enumerate(nearest)]


@given(st.integers(0, 70), st.sampled_from([2, 6, 16]), st.integers(0, 99))
def test_by_hand(numel: int, block: int, seed: int) -> None:
    x = numbers(numel, torch.float64, seed)
    raw, scales, values = slow_nf4(x.tolist(), block)
    codes, absmax, _ = codecs.nf4(block).encode(x)
    whole = len(raw) if numel % 2 == 0 else len(raw) - 1  # half of the last byte is nobody's
    assert codes.tolist()[:whole] == raw[:whole]
    assert [c >> 4 for c in codes.tolist()] == [c >> 4 for c in raw]
    assert absmax.tolist() == scales
    assert codecs.nf4(block).decode(codes, absmax, x.new_empty(numel, 0)).tolist() == values


def test_the_values_are_the_papers() -> None:
    """Quantiles of the normal distribution, eight below zero and seven above it, as bitsandbytes and torchao compute them."""
    last = 0.9677083  # of the distribution: bitsandbytes.functional.create_normal_map
    quantile = NormalDist().inv_cdf
    above = [quantile(last + (0.5 - last) * i / 8) for i in range(8)]
    below = [-quantile(last + (0.5 - last) * i / 7) for i in range(7)]
    exact = sorted([*above, 0.0, *below])
    assert len(codecs._codecs.NF4) == 16
    for ours, value in zip(codecs._codecs.NF4, exact, strict=True):
        assert math.isclose(ours, value / max(exact), abs_tol=2e-6)
    # the published numbers, table 1 of appendix E, to their last digit
    published = {1: -0.6961928009986877, 6: -0.09105003625154495, 8: 0.07958029955625534, 14: 0.7229568362236023}
    assert {i: codecs._codecs.NF4[i] for i in published} == published


@every(make=EVERY, bad=[math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(make: Any, bad: float) -> None:
    """Its block is NaN, and without quantized scales no other."""
    x = torch.ones(24)
    x[9] = bad
    codec = make(8)
    got = codec.decode(*codec.encode(x))
    assert got[8:16].isnan().all()
    if "double" not in repr(codec):
        assert torch.equal(got[:8], x[:8])
        assert torch.equal(got[16:], x[16:])


@every(make=EVERY, dtype=[torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_numbers_are_finite(make: Any, dtype: torch.dtype) -> None:
    """Sums of scales overflowed, where these are quantized."""
    x = torch.full((40,), torch.finfo(dtype).max, dtype=dtype)
    x[::3], x[16:24] = -x[0], 0
    codec = make(8)
    assert ((codec.decode(*codec.encode(x)).double() - x.double()).abs() <= 0.2 * torch.finfo(dtype).max).all()


@every(make=EVERY, numel=[0, 1, 63, 64, 65])
def test_decodes_to_the_dtype_it_is_asked_for(make: Any, numel: int) -> None:
    x = numbers(numel, torch.float32)
    codec = make(64)
    encoded = codec.encode(x)
    for dtype in (*LOW, *WIDE):
        got = codec.decode(*encoded, dtype=dtype)
        assert got.dtype == dtype
        absmax = absmax_of(codec.decode(*encoded), 64)
        off = (got.double() - codec.decode(*encoded).double()).abs()
        assert (off <= 2 * max(EPS[dtype], EPS[torch.float32]) * absmax).all()


@at_most(8)
@every(dtype=[*LOW, *WIDE], make=EVERY)
def test_slices_at_once_are_slices_one_by_one(make: Any, dtype: torch.dtype) -> None:
    """By torch.vmap, both ways, bit by bit; and what is packed has the length that shapes alone tell."""
    for numel in (0, 1, 64, 130):
        codec: Codec = make(64)
        rows = torch.stack([numbers(numel, dtype, seed) for seed in range(3)])
        encoded = torch.vmap(codec.encode)(rows)
        decoded = torch.vmap(codec.decode)(*encoded)
        for i, row in enumerate(rows):
            one = codec.encode(row)
            assert all(torch.equal(a[i], b) for a, b in zip(encoded, one, strict=True))
            assert torch.equal(decoded[i], codec.decode(*one))
            raw, form = pack_bytes(one)
            assert codec._describe_encoding(numel, dtype) == (len(raw), form)


def test_are_values() -> None:
    """Equal by what they are, also out of a pickle, and printed as they are made."""
    for make in EVERY:
        assert make(8) == make(8) != make(16)
        assert hash(make(8)) == hash(make(8))
        assert pickle.loads(pickle.dumps(make(8))) == make(8)
    assert codecs.nf4() != codecs.nf4(double_quant=True)
    assert [repr(make(8)) for make in EVERY] == [
        "int8(block=8)",
        "nf4(block=8)",
        "dynamic8(block=8)",
        "nf4(block=8, double_quant=True)",
    ]


@pytest.mark.parametrize("make", [codecs.int8, codecs.nf4])
def test_bad_blocks(make: Any) -> None:
    refused(ValueError, "positive", lambda: make(0))
    refused(TypeError, "whole number", lambda: make(1.5))
    refused(ValueError, "even", lambda: codecs.nf4(3))


# --- dynamic8 ---
def dynamic_levels(signed: bool) -> Tensor:
    """The levels of Dettmers et al., 2022, with -1 instead of the largest negative one, in float64 and in order."""
    found = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        means = (bounds[1:] + bounds[:-1]) / 2 * 10.0 ** (i - 6)
        found += means.tolist() + (-means).tolist() * signed
    levels = torch.tensor(found, dtype=torch.float64).sort().values
    return torch.cat([-torch.ones(1, dtype=torch.float64), levels[1:]]) if signed else levels


@seldom
@given(st.integers(0, 600), st.sampled_from([1, 8, 256]), st.sampled_from([*LOW, *WIDE]), st.integers(0, 99), st.booleans())
@example(513, 256, torch.float32, 0, True)
@example(513, 256, torch.float32, 0, False)
def test_dynamic_levels_are_nearest(numel: int, block: int, dtype: torch.dtype, seed: int, signed: bool) -> None:
    """The nearest of 256 levels, zeros exact and nothing else zero without signs; twice the same bytes; 0 has code 0."""
    x = numbers(numel, dtype, seed)
    x = x if signed else x.abs()
    codec = codecs.dynamic8(block)
    codes, scales, like = codec.encode(x)
    got = codec.decode(codes, scales, like)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    for i, (piece, found) in enumerate(zip(x.split(block), got.split(block), strict=True)) if numel else ():
        absmax = piece.abs().max().double()
        assert scales[i].abs() == absmax
        levels = dynamic_levels(bool((piece < 0).any()))
        least = (piece[:, None].double() - levels * absmax).abs().amin(1)
        off = (found.double() - piece.double()).abs()
        is_floor = (piece > 0) & (levels.min() == 0)  # which never becomes zero
        least = torch.where(is_floor, least.maximum(levels.abs().sort().values[1] * absmax - piece.double()), least)
        assert (off <= least + max(EPS[dtype], EPS[torch.float32]) * absmax).all()
        assert ((found == 0) == (piece == 0)).all() or levels.min() < 0 or dtype == torch.float16
    assert (got[x == 0] == 0).all()
    assert (codes[x == 0] == 0).all()
    if not signed:
        assert all(torch.equal(a, b) for a, b in zip(codec.encode(got), (codes, scales, like), strict=True)) or dtype in LOW


def test_dynamic_codes_are_the_same_where_they_are_recorded() -> None:
    """By a binary search in a graph, and by a table of floats' upper halves in eager mode: next to each bound, too."""
    levels = torch.cat([dynamic_levels(signed).float() for signed in (True, False)])
    bounds = ((levels[1:] + levels[:-1]) / 2).clamp(-1, 1)
    near = torch.cat([bounds, levels, *(torch.nextafter(bounds, torch.tensor(to)) for to in (-2.0, 2.0))])
    for x in (near, near.abs()):
        rows = torch.cat([torch.ones(len(x), 1), x[:, None]], 1).flatten()
        codec = codecs.dynamic8(2 if x is near else len(rows))
        recorded = make_fx(codec.encode)(rows)
        assert "bucketize" in recorded.code
        for got, want in zip(recorded(rows), codec.encode(rows), strict=True):
            assert torch.equal(got, want)
