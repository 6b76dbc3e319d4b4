"""random_like: one vector however the parameters are sharded, with the distribution that it names."""

from __future__ import annotations

import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from depth import at_most, every
from hypothesis import given
from ranks import real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard._slices.random_slices import philox

MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, bias=False), nn.LayerNorm(7))
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
POLICIES = {
    "sharded": fs.policies.always(),
    "whole": fs.policies.whole(),
    "aligned": fs.policies.whole(P("shard", align=64)),
    "mixed": fs.by_path({"0": P(), "1": P("shard"), "2": P("shard")}),
    "replicated": fs.policies.whole(P()),
}
DISTRIBUTIONS = ["normal", "rademacher"]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_answers(counter: Any, key: Any, words: Any) -> None:
    """The known answers of Random123, by numbers and by tensors."""
    assert philox(counter, key) == words
    got = philox(tuple(torch.tensor([x]) for x in counter), tuple(torch.tensor(x) for x in key))
    assert tuple(int(word) for word in got) == words


@at_most(1)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@given(data=st.data())
def test_equal_for_every_policy_and_any_number_of_ranks(distribution: Any, data: st.DataObject) -> None:
    """Bit by bit, and as of the full parameters; padding is zero."""
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    ranks, seed = data.draw(st.integers(1, 5)), data.draw(st.integers(-(2**70), 2**70))
    spec = policy(MODEL).on({"shard": ranks})
    want = fs.random_like(FULL, spec, seed, distribution=distribution)
    for rank in range(ranks):
        got = fs.random_like(fs.shard(FULL, spec, rank=rank), spec, seed, distribution=distribution, rank=rank)
        assert_close(got, fs.shard(want, spec, rank=rank), rtol=0, atol=0)


@every(sizes=[{"shard": 3}, {"replicate": 2, "shard": 2}], policy=POLICIES)
def test_on_simulated_ranks(policy: str, sizes: dict[str, int]) -> None:
    def rank(mesh: Any, _: Tensor) -> Any:
        spec = POLICIES[policy](MODEL).on(mesh)
        params = fs.shard(FULL, spec)
        return fs.random_like(params, spec, 7), fs.shard(fs.random_like(FULL, spec, 7), spec)

    got, want = fs.testing.spmd(rank, sizes)(torch.zeros(torch.Size(sizes.values()).numel()))
    assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    """Moments, tails, and nothing in common between neighbours, parameters and seeds."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(300, 301, dtype=dtype)) for name in "ab"})
    spec = fs.policies.whole()(model)
    x, y = (fs.random_like({"a": model["a"], "b": model["b"]}, spec, seed) for seed in (0, 1))
    for tree in (x, y):
        values = tree["a"].flatten()
        assert values.dtype == dtype
        parts = [values.float()] if not dtype.is_complex else [2**0.5 * values.real, 2**0.5 * values.imag]
        for part in parts:
            assert abs(float(part.mean())) < 0.015
            assert abs(float(part.var()) - 1) < 0.025
            assert abs(float((part**4).mean()) - 3) < 0.15
            assert abs(float((part.abs() < 0.6745).float().mean()) - 0.5) < 0.01
            assert 3.8 < float(part.abs().max()) < 6.8
    wide = torch.complex128 if dtype.is_complex else torch.float64
    streams = torch.stack([t[name].flatten().to(wide)[i : i + 90_000] for t in (x, y) for name in "ab" for i in range(5)])
    others = (streams @ streams.mH / 90_000 - torch.eye(len(streams))).abs()
    assert float(others.max()) < 0.03


def test_signs_are_equally_likely() -> None:
    model = nn.Linear(300, 301)
    spec = fs.policies.whole()(model)
    shard = fs.random_like(fs.shard(model, spec), spec, 5, distribution="rademacher")
    signs = fs.unshard(shard, spec)["weight"]
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.02
    assert abs(float((signs[:, 1:] * signs[:, :-1]).mean())) < 0.02


def test_a_seed_that_is_a_tensor() -> None:
    """Gives what the number does, also in a batch of them, and compiled."""
    spec = POLICIES["aligned"](MODEL)
    params = fs.shard(MODEL, spec)
    want = [fs.random_like(params, spec, seed)[""] for seed in (3, -4)]
    batch = torch.vmap(lambda seed: fs.random_like(params, spec, seed))(torch.tensor([3, -4]))
    assert_close(batch[""], torch.stack(want), rtol=0, atol=0)
    assert_close(fs.random_like(params, spec, torch.tensor(3))[""], want[0], rtol=0, atol=0)
    compiled = torch.compile(lambda seed: fs.random_like(params, spec, seed), fullgraph=True, backend="eager")
    assert_close(compiled(torch.tensor(3))[""], want[0], rtol=0, atol=0)


def test_memory_order_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter in another memory format; and where it is more than is worked on at once."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    full = {name: p.detach() for name, p in model.named_parameters()}
    spec = fs.policies.whole()(model).on({"shard": 3})
    want = fs.random_like(full, spec, 1)
    monkeypatch.setattr("funshard._slices.random_slices.CHUNK", 5)
    for rank in range(3):
        got = fs.random_like(fs.shard(full, spec, rank=rank), spec, 1, rank=rank)
        assert_close(got, fs.shard(want, spec, rank=rank), rtol=0, atol=0)


def test_what_is_refused() -> None:
    spec = fs.policies.always()(MODEL)
    params = fs.shard(MODEL, spec)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: fs.random_like(params, spec, 0.5), TypeError, "seed: expected a whole number"),
        (lambda: fs.random_like(params, spec, True), TypeError, "seed: expected a whole number"),
        (lambda: fs.random_like(params, spec, torch.tensor([1])), TypeError, "seed: expected a whole number"),
        (lambda: fs.random_like(params, spec, 0, distribution="uniform"), ValueError, "expected 'normal' or 'rademacher'"),
        (lambda: fs.random_like({"0": torch.ones(3)}, spec, 0), ValueError, "unit '0': expected this rank's slice of"),
        (lambda: fs.random_like({"9": torch.ones(3)}, spec, 0), ValueError, "'9' is no unit and no parameter"),
        (lambda: fs.random_like({"0.bias": torch.ones(3)}, spec, 0), ValueError, r"'0.bias': expected shape \[5\], got \[3\]"),
        (lambda: fs.random_like({"0": params["0"].int()}, spec, 0), TypeError, "'0': expected a floating point tensor"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    frozen = nn.Linear(4, 4).requires_grad_(False)
    encoded = fs.policies.whole(P("shard", at_rest=fs.codecs.int8()))(frozen)
    with pytest.raises(ValueError, match=re.escape("expected no random vector of it")):
        fs.random_like(fs.shard(frozen, encoded), encoded, 0)


@real_ranks(2)
def test_hvp_on_a_unit_of_replicas(rank: int) -> None:
    """With torch.randn_like and a seed of each rank's own it was off by 170%."""
    torch.manual_seed(rank)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.arange(12.0).view(2, 2, 3).double()
    full = {name: torch.linspace(-1, 1, p.numel()).view(p.shape).double() for name, p in model.named_parameters()}
    spec = fs.by_path({"0": P(), "2": P("shard")})(model)
    params = fs.shard(full, spec)
    got = fs.hvp(
        lambda p: fs.functional_call(model, p, x[rank], spec=spec).square().mean(), params, fs.random_like(params, spec, 1)
    )
    want = fs.hvp(
        lambda p: torch.func.functional_call(model, p, x.flatten(0, 1)).square().mean(), full, fs.random_like(full, spec, 1)
    )
    assert_close(got, fs.shard(want, spec))
