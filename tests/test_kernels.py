"""How many kernels a step has beyond the plain one: a number for each unit, at any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from collective_log import Collectives, world
from depth import each
from hypothesis import given
from hypothesis import strategies as st
from kernels import Kernels
from parity import WAYS
from torch import Tensor, nn

import funshard as fs
from funshard import Codec, P, Precision
from funshard._wire import reductions


def layers(units: int, dim: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(units)))


def kernels(p: P, size: int, way: str = "fs", units: int = 4, dim: int = 512) -> Kernels:
    """What a step on so many ranks dispatches, where slices need no padding on up to 64."""
    model, x = layers(units, dim), torch.ones(3, dim)
    with world(size):
        spec = fs.by_type(nn.Linear, p=p)(model).bound
        params = fs.shard(model, spec)
        with Kernels() as counted:
            WAYS[way](lambda params: fs.functional_call(model, params, (x,), spec=spec).sum())(params)
    return counted


def plain_kernels(way: str, units: int, dim: int) -> int:
    """What a step of the whole model dispatches."""
    model, x = layers(units, dim), torch.ones(3, dim)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Kernels() as counted:
        WAYS[way](lambda params: torch.func.functional_call(model, params, (x,)).sum())(params)
    return counted.all


# --- steps ---

MOST = {
    "P()": (P(), 0.1),
    "shard": (P("shard"), 1.9),
    "bfloat16": (P("shard", precision=Precision(param=torch.bfloat16)), 4.0),
    "float16": (P("shard", precision=Precision(param=torch.float16)), 6.0),
}
"""So many for each unit, beyond the plain step's."""


@each(way=WAYS, p=MOST)
def test_kernels_of_a_step(p: str, way: str) -> None:
    """A joining of gradients for each bucket or unit, and in low precision a cast before each gather and after the reduction.

    Float16 has two divisions more: sums over ranks must neither overflow nor vanish, so one part of the number of ranks
    divides before the collective and the rest after it (`divide_factors`). Also where slices are padded, as of 64 ranks.
    """
    spec, most = MOST[p]
    units, dim = 16, 128
    counts = [kernels(spec, size, way, units, dim).all for size in (2, 8, 64)]
    assert max(counts) - plain_kernels(way, units, dim) <= most * units
    assert counts[1] <= counts[2] <= counts[1] + 1  # the zeros of all padding
    assert counts[0] == counts[1] - units * (p == "float16")  # on two ranks it divides once


@pytest.mark.parametrize("way", WAYS)
def test_buckets_of_replicated_units(way: str) -> None:
    """On the CPU they are reduced once they are BUCKET_BYTES together, and at the end of backward."""
    units, dim = 9, 512
    model, x = layers(units, dim), torch.ones(3, dim)
    with world(8):
        spec = fs.by_type(nn.Linear, p=P())(model).bound
        params = fs.shard(model, spec)
        with Collectives() as sent:
            WAYS[way](lambda params: fs.functional_call(model, params, (x,), spec=spec).sum())(params)
    one = 4 * (dim * dim + dim)
    together = -(-reductions.BUCKET_BYTES // one)
    assert 1 < together < units / 2
    assert {s.op for s in sent.all} == {"all_reduce"}
    assert [s.bytes for s in sent.all] == [together * one] * (units // together) + [units % together * one]


# --- codecs ---


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def decoded(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(scale.dtype) * scale


def written(x: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty(len(x))  # which vmap cannot write to
    return out.copy_(x).mul_(scale)


def read(x: Tensor, scale: Tensor) -> Tensor:
    return x.float() * scale.item()  # nor read this


def blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 8)
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scale[:, None]).round().to(torch.int8), scale.to(torch.bfloat16)


@pytest.mark.parametrize("way", WAYS)
def test_a_codec_has_as_many_kernels_at_any_number_of_ranks(way: str) -> None:
    """Slices of all ranks are decoded at once."""
    p = P("shard", precision=Precision(codec=Codec(scaled, decoded)))
    counts = [kernels(p, size, way).ops for size in (2, 8, 64)]
    assert counts[0] == counts[1] == counts[2]


DECODES: dict[str, Callable[..., Tensor]] = {"at once": decoded, "writes": written, "reads": read}


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99), st.sampled_from([*DECODES]))
def test_slices_are_decoded_alike_at_once_and_one_by_one(slices: int, numel: int, seed: int, how: str) -> None:
    """Bit by bit; also by a decode that vmap cannot run."""
    x = torch.randn(slices, numel, generator=torch.Generator().manual_seed(seed))
    sent = [torch.stack(parts) for parts in zip(*map(scaled, x), strict=True)]
    expected = torch.cat([decoded(*scaled(row)) for row in x])
    assert torch.equal(Codec(scaled, DECODES[how])._decode_slices(sent, numel, torch.float32), expected)


# --- compressors ---


@pytest.mark.parametrize("p", [P("shard"), P()], ids=str)
def test_quantize_has_as_many_kernels_at_any_number_of_ranks(p: P) -> None:
    """What all ranks sent is dequantized and added at once."""
    model = layers(2, 64)
    grads = {name: torch.ones_like(x) for name, x in model.named_parameters()}
    counts: list[Counter[str]] = []
    for size in (2, 8, 64):
        with world(size), Kernels() as counted:
            fs.compress.quantize(16).reduce(grads, (), fs.policies.always(p)(model).bound)
        counts.append(counted.ops)
    assert counts[0] == counts[1] == counts[2]
