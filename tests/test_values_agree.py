"""Ranks slice what each of them holds itself: shard compares the values first, or takes those of one rank."""

from __future__ import annotations

import re

import pytest
import torch
from cases import same
from collective_log import Collectives
from depth import every
from hypothesis import given
from hypothesis import strategies as st
from ranks import Pool, real_ranks
from test_sharding import layers, message, square, values
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import funshard as fs
from funshard import P, Params, _torch
from funshard._sharding.sharding import hash_params

KINDS = {
    "P('shard')": lambda model: fs.by_type(nn.Linear)(model).bound,
    "P()": lambda model: fs.policies.whole(P())(model).bound,
    "HSDP": lambda model: fs.by_type(nn.Linear)(model).on(square()),
}


# --- Ranks that hold different values. ---


def unseeded(rank: int, kind: str, by_name: bool) -> str:
    torch.manual_seed(rank // 2)  # of four ranks 2 and 3 alike, of two none: where there is no common seed
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)).requires_grad_(rank >= 0)
    with torch.no_grad():
        model[0].bias.zero_()  # what is alike is not named
    if kind != "HSDP":
        with torch.no_grad():
            model[0].weight.add_(rank)
    said = message(fs.shard, values(model) if by_name else model, KINDS[kind](model))
    same(
        fs.shard(layers(), fs.policies.whole()(layers())),
        fs.shard(values(layers()), fs.policies.whole()(layers()).bound, rank=rank),
    )
    return said


@every(by_name=[False, True], kind=sorted(KINDS))
def test_models_of_different_seeds(kind: str, by_name: bool, gloo2: Pool, gloo4: Pool) -> None:
    """An error on every rank with the first parameter that differs and the ranks where; the next call is in step."""
    said = (gloo4 if kind == "HSDP" else gloo2).run(unseeded, kind, by_name)
    unit, ranks, total = ("", r"rank 1", "1 of 4") if kind == "P()" else ("0", "rank 1", "1 of 4")
    if kind == "HSDP":
        ranks, total = "ranks 2, 3", "3 of 4"
    assert len(set(said)) == 1
    pattern = (
        rf"parameter '0\.weight' of unit '{unit}': expected the same values .* got others on {ranks} than on rank 0 \({total}"
    )
    assert re.search(pattern, said[0]), said[0]
    assert re.search(r"torch\.manual_seed .*shard\(\.\.\., src=0\).*check_values=False", said[0])


@real_ranks(2)
def test_values_that_are_meant_to_differ(rank: int) -> None:
    """With check_values=False each rank's slice is of its own."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 5)
    for p in (P("shard"), P()):
        spec = fs.policies.whole(p)(model).bound
        for own in (model, values(model)):
            same(fs.shard(own, spec, check_values=False), fs.shard(own, spec, rank=rank))


def constant_of_a_transform(rank: int) -> Params:
    full = {"w": torch.full((3,), float(rank))}
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(3)))
    spec = fs.policies.whole(P())(model).bound
    return torch.func.grad(lambda full: (fs.shard(full, spec)[""] ** 2).sum())(full)


def test_values_are_compared_where_they_can_be(gloo2: Pool) -> None:
    """Not in a transform, a recording or on shapes alone: there nothing is sent."""
    for rank, grads in enumerate(gloo2.run(constant_of_a_transform)):
        same(grads, {"w": torch.full((3,), 2.0 * rank)})
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(_torch.is_eager())
        return x.sum()

    x = torch.ones(2)
    torch.func.grad(look)(x)
    torch.vmap(look)(x)
    make_fx(look)(x)
    with _torch.fake_mode():
        look(torch.ones(2))
    assert seen == [False] * 4
    with torch.device("meta"), torch.no_grad():
        look(x)
    assert seen[4:] == [True]


def sent(rank: int) -> tuple[int, int]:
    model = layers()
    spec = fs.by_type(nn.Linear)(model).bound
    with Collectives() as log:
        fs.shard(model, spec)
    return len(spec), len(log.all)


def test_hosts_compare_a_digest(gloo2: Pool) -> None:
    """Nothing comes between the collectives of the mesh. One rank sends nothing."""
    assert gloo2.run(sent) == [(3, 0)] * 2
    assert sent(0) == (3, 0)


# --- Values of one rank. ---


def from_one(rank: int, src: int, p: P, flat: bool) -> None:
    torch.manual_seed(src)
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    torch.manual_seed(rank)
    with torch.device("cpu" if rank == src else "meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    before = values(model)
    spec = fs.by_type(nn.Linear, p=p)(model)
    spec = spec.bound if flat else spec.on(square())
    same(fs.shard(model, spec, src=src), fs.shard(expected, spec, rank=rank))
    same(fs.shard(values(model), spec, src=src), fs.shard(expected, spec, rank=rank))
    if rank == src:
        same(values(model), before)


@pytest.mark.parametrize("p", [P("shard"), P("shard", align=4), P()], ids=str)
def test_values_of_one_rank(p: P, gloo2: Pool, gloo4: Pool) -> None:
    """With ``src`` every rank has slices of that rank's values; the others' models may be without any."""
    gloo2.run(from_one, 1, p, True)
    gloo4.run(from_one, 2, p, False)


def other_requests(rank: int) -> list[str]:
    model = layers()
    spec = fs.policies.whole()(model).bound
    requests = [{"src": rank}, {"src": 0} if rank else {}, {"check_values": bool(rank)}]
    said = [message(fs.shard, model, spec, **options) for options in requests]
    same(fs.shard(model, spec), fs.shard(model, spec, rank=rank))
    return said


def test_ranks_that_ask_for_different_things(gloo2: Pool) -> None:
    """Another source, or another check, on another rank: an error on each that says which."""
    for said in gloo2.run(other_requests):
        for text, pattern in zip(said, ["src=0; got on rank 1 src=1", r"check_values=True; got on rank 1 src=0",
                                        "check_values=False; got on rank 1 check_values=True"], strict=True):  # fmt: skip
            assert re.search(pattern, text), text


def test_src_where_there_is_none() -> None:
    """Of simulated ranks all are one process; rank= is no source."""
    model = layers()
    with pytest.raises(ValueError, match=r"src= on a simulated mesh: expected process groups"):
        fs.testing.spmd(lambda mesh, _: fs.shard(values(model), fs.policies.whole()(model).on(mesh), src=0), 2)(torch.zeros(2))
    with pytest.raises(ValueError, match=r"expected rank= or src=, got both: 1 and 0"):
        fs.shard(model, fs.policies.whole()(model), rank=1, src=0)
    same(fs.shard(model, fs.policies.whole()(model), src=0), fs.shard(model, fs.policies.whole()(model)))


def test_simulated_ranks_hold_what_they_are_given() -> None:
    """There nothing is compared: each is handed its values as an argument."""
    model = nn.Linear(2, 1, bias=False)
    spec = fs.policies.whole(P(align=1))(model)
    out = fs.testing.spmd(lambda mesh, w: fs.shard({"weight": w}, spec.on(mesh))[""], 3)(torch.arange(6.0).view(3, 1, 2))
    assert torch.equal(out, torch.arange(6.0).view(3, 2))


# --- The numbers that stand for values. ---

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


def digest(*tensors: Tensor) -> list[int]:
    model = nn.Module()
    for i, t in enumerate(tensors):
        model.register_parameter(f"w{i}", nn.Parameter(t, requires_grad=False))
    named = dict(model.named_parameters())
    return hash_params(named, fs.by_path({})(model).on({"shard": 1})).tolist()


def bits(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Any bits at all: NaNs of every kind, -0.0, infinities."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@given(st.sampled_from(DTYPES), st.integers(1, 300), st.integers(0, 9999), st.data())
def test_a_changed_element_always_shows(dtype: torch.dtype, numel: int, seed: int, data: st.DataObject) -> None:
    """Equal bits give equal numbers, wherever they lie in memory; one changed bit, and two exchanged elements, others."""
    x = bits(dtype, numel, seed)
    offset = torch.cat([bits(dtype, data.draw(st.integers(0, 9)), 1), x])[-numel:]
    strided = torch.stack([x, x], 1)[:, 0]
    assert digest(x, offset) == digest(offset, strided) == digest(x.clone(), x)
    raw, at = x.clone().view(torch.uint8), data.draw(st.integers(0, numel * dtype.itemsize - 1))
    raw[at] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert digest(raw.view(dtype)) != digest(x)
    i, j = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, numel - 1))
    swapped = x.clone()
    swapped[i], swapped[j] = x[j].clone(), x[i].clone()
    assert (digest(swapped) == digest(x)) == torch.equal(swapped.view(torch.uint8), x.view(torch.uint8))


def test_a_changed_element_shows_in_a_long_tensor() -> None:
    """Over more than one piece of what is looked at together, also where equal changes are far apart."""
    x = torch.ones(1 << 19)
    own = digest(x)
    for places in ([0], [(1 << 19) - 1], [1 << 18], [5, 5 + (1 << 18)]):
        y = x.clone()
        y[places] = 2.0
        assert digest(y) != own
    rolled = torch.arange(1 << 19)
    assert digest(rolled) != digest(rolled.roll(1 << 17))


def test_what_has_no_values_and_odd_shapes() -> None:
    """Meta tensors count as alike; empty and 0-dim parameters and other memory orders are values like others."""
    assert digest(torch.empty(3, device="meta")) == [0]
    assert digest(torch.zeros(0), torch.tensor(3.0)) == digest(torch.zeros(0), torch.full((1,), 3.0))
    x = torch.randn(2, 3, 4, 5)
    assert digest(x.to(memory_format=torch.channels_last)) == digest(x.permute(0, 2, 3, 1).contiguous())
