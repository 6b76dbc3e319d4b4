"""The laws of compressors, each on every layout: against plain means of the ranks' gradients, which no collective made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from depth import depth, each, every
from hypothesis import given, settings
from hypothesis import strategies as st
from models import refused
from test_compress_law import mean_over, reduced, slices_of
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard.compress import Compressor, exact, powersgd, quantize, switch
from funshard.compress._compressors import PowerSGD

MODEL = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 7), nn.Linear(7, 5, bias=False)).double()
HSDP = {"replicate": 2, "shard": 3}
SOME = {"0": fs.P("shard"), "1": fs.P(), "2": fs.P("shard", align=4)}
LAYOUTS: dict[str, tuple[fs.Policy, Mapping[str, int]]] = {
    "alone": (fs.policies.always(), {"shard": 1}),
    "split": (fs.policies.always(), {"shard": 4}),
    "replicated": (fs.by_path({"0": fs.P()}, fs.P()), {"shard": 3}),
    "some": (fs.by_path(SOME), {"shard": 2}),
    "hsdp": (fs.by_path(SOME), HSDP),
    "both": (fs.by_path({"0": fs.P(("replicate", "shard"))}, fs.P(("shard", "replicate"))), HSDP),
    "four": (fs.by_path(SOME | {"2": fs.P(("shard", "replicate"))}), {"replicate": 2, "shard": 2}),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
COMPRESSORS: dict[str, Compressor[Any]] = {
    "exact": exact(),
    "unreduced": exact(()),
    "quantize": quantize(),
    "chunks": quantize(5),
    "powersgd": powersgd(),
    "rank 2": powersgd(2, warm_start=False, min_compression_rate=0.5),
    "slices": powersgd(axes="shard", batched=True, min_compression_rate=0.5),
    "batched": powersgd(2, batched=True, min_compression_rate=0.5),
    "post local": switch(1, exact(), exact(())),
}
each_compressor = pytest.mark.parametrize("name", COMPRESSORS)


def ranks(layout: str) -> int:
    return math.prod(LAYOUTS[layout][1].values())


def gradients(size: int, seed: int = 0, model: nn.Module = MODEL) -> fs.Params:
    """Each rank's own, in dimension 0."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(size, *p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


def steps(compressor: Compressor[Any], layout: str, *grads: fs.Params) -> tuple[list[fs.Params], Any]:
    """What every step gives, ranks in dimension 0, and the last state."""
    policy, sizes = LAYOUTS[layout]
    return fs.testing.spmd(lambda mesh, *grads: reduced(compressor, policy(MODEL).on(mesh), *grads), sizes)(*grads)


def slices(full: fs.Params, layout: str) -> fs.Params:
    policy, sizes = LAYOUTS[layout]
    return slices_of(full, policy(MODEL), sizes)


def mean(full: fs.Params, layout: str, axes: tuple[str, ...] | None = None) -> fs.Params:
    return mean_over(full, LAYOUTS[layout][1], axes)


@each_compressor
def test_the_state_keeps_its_structure(name: str) -> None:
    """And is a pytree of tensors: it can be saved, compiled and looped over."""
    spec = fs.policies.always()(MODEL)
    state = COMPRESSORS[name].init(spec)
    before = pytree.tree_flatten(state)
    for seed in range(3):
        grads = {n: g[0] for n, g in gradients(1, seed).items()}
        given = pytree.tree_map(torch.clone, state)
        kept = {n: g.clone() for n, g in grads.items()}
        _, new = COMPRESSORS[name].reduce(grads, state, spec)
        assert_close(state, given, rtol=0, atol=0)
        assert_close(grads, kept, rtol=0, atol=0)
        leaves, tree = pytree.tree_flatten(new)
        assert tree == before[1]
        assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in before[0]]
        state = new


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_layout
def test_the_mean_in_another_dtype(layout: str, dtype: torch.dtype) -> None:
    """Of gradients that are divided first: they may be as large as the dtype's largest."""
    grads = {n: g * 3e4 for n, g in gradients(ranks(layout)).items()}
    grads = {n: g.clamp(-6e4, 6e4) for n, g in grads.items()}
    [again], _ = steps(exact(), layout, {n: g.to(dtype) for n, g in grads.items()})
    want = slices(mean({n: g.to(dtype).double() for n, g in grads.items()}, layout), layout)
    eps = torch.finfo(dtype).eps
    assert_close({key: x.double() for key, x in again.items()}, want, rtol=0, atol=6e4 * eps * ranks(layout))
    assert {x.dtype for x in again.values()} == {dtype}


def through_torch(x: Tensor, chunk: int | None) -> Tensor:
    """What is left of a rank's buffer, by torch's observers and quantized tensors."""
    if chunk is None:
        observer = MinMaxObserver()
        observer(x)
        scale, zero = observer.calculate_qparams()
        return torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), 0, 255)
    rows = torch.nn.functional.pad(x, (0, -len(x) % chunk)).view(-1, chunk)
    observer = PerChannelMinMaxObserver()
    observer(rows)
    scale, zero = observer.calculate_qparams()
    return torch.fake_quantize_per_channel_affine(rows, scale, zero.int(), 0, 0, 255).flatten()[: len(x)]


@each(chunk=[None, 1, 5, 16, 10**6])
@each_layout
def test_quantized_as_by_torch(layout: str, chunk: int | None) -> None:
    """Each slice that a rank sends is one that torch quantizes."""
    grads = gradients(ranks(layout))
    [shards], _ = steps(quantize(chunk), layout, grads)
    policy, sizes = LAYOUTS[layout]
    spec = policy(MODEL).on(dict(sizes))
    senders = [{n: g[r] for n, g in grads.items()} for r in range(ranks(layout))]
    for r in range(ranks(layout)):
        own = [fs.shard(sender, spec, rank=r) for sender in senders]
        for unit in spec:
            size = None if chunk is None else min(chunk, spec.shard_numel(unit))
            want = torch.stack([through_torch(shards[unit.key].float(), size) for shards in own]).mean(0)
            assert_close(shards[unit.key][r].float(), want, rtol=1e-5, atol=1e-6)


@given(st.floats(-20, 20), st.integers(1, 40), st.sampled_from(["both", "some", "alone"]))
@settings(max_examples=depth(5, 200))
def test_quantized_is_off_by_half_a_level_at_most(exponent: float, chunk: int, layout: str) -> None:
    """However small or large gradients are: torch's observer rounds those of 1e-10 to zero."""
    grads = {n: g * 10**exponent for n, g in gradients(ranks(layout)).items()}
    [shards], _ = steps(quantize(chunk), layout, grads)
    want = slices(mean(grads, layout), layout)
    flat = torch.cat([g.flatten() for g in grads.values()])
    level = (flat.amax().clamp(min=0) - flat.amin().clamp(max=0)) / 255
    assert max((shards[key] - want[key]).abs().amax() for key in want) <= 0.5001 * level
    assert all(shards[key].any() for key in want)


@every(dtype=[torch.float32, torch.float16, torch.bfloat16], layout=["both", "some", "alone"])
def test_quantized_near_the_largest_number_is_finite(layout: str, dtype: torch.dtype) -> None:
    """The difference of the largest and the smallest overflowed, and so did sums over ranks."""
    most = torch.finfo(dtype).max
    grads = {n: (g / g.abs().amax() * most).to(dtype) for n, g in gradients(ranks(layout)).items()}
    for g in grads.values():
        g.view(-1)[0], g.view(-1)[-1] = most, -most
    [shards], _ = steps(quantize(16), layout, grads)
    want = slices(mean({n: g.double() / 2 for n, g in grads.items()}, layout), layout)
    for key, shard in shards.items():
        assert (shard.double() / 2 - want[key]).abs().amax() <= 0.51 * (2 * most / 255) / 2


@every(bad=[math.nan, math.inf, -math.inf], name=["exact", "quantize", "chunks", "powersgd", "rank 2", "batched"])
def test_what_is_not_finite_shows(name: str, bad: float) -> None:
    """On whichever rank: loss_scale has to see it."""
    grads = gradients(4)
    grads["1.weight"][2, 0, 3] = bad
    [shards], _ = steps(COMPRESSORS[name], "split", grads)
    assert not all(torch.isfinite(x).all() for x in shards["1"])


def low_rank(size: int, rank: int, seed: int = 0) -> fs.Params:
    """Gradients whose matrices are, on all ranks together, of this rank."""
    generator = torch.Generator().manual_seed(seed)
    out = gradients(size, seed)
    for name, g in out.items():
        if g.dim() == 3:
            u, v = (torch.randn(n, rank, generator=generator, dtype=g.dtype) for n in g.shape[1:])
            c = torch.randn(size, 1, rank, generator=generator, dtype=g.dtype)
            out[name] = (c * u) @ v.T
    return out


@each(rank=[1, 2, 3, 4])
@each_layout
def test_low_rank_gradients_are_sent_exactly(layout: str, rank: int) -> None:
    """Of the approximation's rank, and of a lower one: Gram-Schmidt gives columns that are not orthogonal then."""
    for true in range(1, rank + 1):
        grads = low_rank(ranks(layout), true)
        out, _ = steps(powersgd(rank, min_compression_rate=0, error_feedback=False), layout, grads, grads)
        for shards in out:
            assert_close(shards, slices(mean(grads, layout), layout))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_gradient_of_zeros_is_one_and_does_not_last(rank: int) -> None:
    """An unused parameter: torch's hook makes it NaN, or with an epsilon never sends it again."""
    dead = {n: torch.zeros_like(g) for n, g in gradients(2).items()}
    live = low_rank(2, rank)
    out, _ = steps(powersgd(rank, min_compression_rate=0), "some", dead, dead, live)
    assert not any(x.any() for shards in out[:2] for x in shards.values())
    assert_close(out[2], slices(mean(live, "some"), "some"))


def test_drawn_numbers_are_a_function_of_seed_and_step() -> None:
    """And of nothing else; they are those of test_curvature.py::test_normal_numbers_are_normal."""
    spec = fs.policies.whole()(nn.Linear(200, 3, bias=False))
    grads = {"weight": torch.randn(3, 200, generator=torch.Generator().manual_seed(0))}

    def after(seed: int, count: int, warm_start: bool) -> Tensor:
        compressor = powersgd(1, seed=seed, warm_start=warm_start)
        state = compressor.init(spec)
        for _ in range(count):
            torch.manual_seed(count)  # no part of it
            state = compressor.reduce(grads, state, spec)[1]
        return state.q["weight"]

    drawn = [after(seed, step, False) for seed in (0, 1, 2**32, -1) for step in range(3)]
    assert torch.corrcoef(torch.cat(drawn, 1).T).fill_diagonal_(0).abs().max() < 0.3
    assert_close(after(0, 2, False), drawn[2], rtol=0, atol=0)
    assert_close(after(0, 0, True), drawn[0], rtol=0, atol=0)
    assert not torch.equal(after(0, 1, True), drawn[1])


def test_some_units() -> None:
    """What has no gradients is left out, and its state stays; frozen units' gradients, where there are some, are exact."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    model[2].requires_grad_(False)
    spec = fs.policies.always()(model)
    grads = {n: g[0] for n, g in gradients(1, model=model).items()}
    compressor = powersgd()
    state = compressor.init(spec)
    shards, new = compressor.reduce({n: g for n, g in grads.items() if not n.startswith("0")}, state, spec)
    assert list(shards) == ["1", "2"]
    assert_close(shards["2"], fs.shard(grads, spec)["2"], rtol=0, atol=0)
    assert torch.equal(new.q["0.weight"], state.q["0.weight"])
    assert new.error["1.weight"].any()
    assert not new.error["0.weight"].any()


def test_tied_and_ignored_parameters() -> None:
    """A tied parameter's gradient may have any of its names; an ignored one's is passed over."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    spec = fs.policies.ignoring(fs.policies.whole(), params=["c.bias"])(model)
    g = torch.randn(4, 4)
    for name in ("a.weight", "b.weight"):
        for c in (exact(), quantize(), powersgd(4, min_compression_rate=0)):
            grads = {name: g, "c.weight": torch.ones(2, 2), "c.bias": torch.ones(2)}
            shards, _ = c.reduce(grads, c.init(spec), spec)
            assert_close(shards[""][:16], g.flatten(), rtol=0, atol=0.05)


def test_memory_order_and_mixed_dtypes() -> None:
    """Gradients lie where `shard` puts parameters, and keep their dtypes, also where those are not the parameters'."""
    model = nn.ModuleDict({"a": nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), "b": nn.Linear(8, 8).bfloat16()})
    spec = fs.policies.whole()(model)
    grads = {n: g[0] for n, g in gradients(1, model=model).items()}
    for to in (None, torch.float32, torch.bfloat16):
        given = {n: g if to is None else g.to(to) for n, g in grads.items()}
        for c in (exact(), powersgd(99, min_compression_rate=0), quantize(4)):
            shards, state = c.reduce(given, c.init(spec), spec)
            assert_close(shards, fs.flatten(given, spec), rtol=0.05, atol=0.05)
            assert [x.dtype for x in pytree.tree_leaves(state)] == [x.dtype for x in pytree.tree_leaves(c.init(spec))]


def test_powersgd_reads_no_values() -> None:
    """One graph for all steps; the state may come from outside of spmd."""
    model = depth(MODEL[:1], MODEL)
    spec = fs.policies.always()(model).on({"shard": 1})
    compressor = powersgd(2, min_compression_rate=0.5, warm_start=False)
    step = torch.compile(lambda g, s: compressor.reduce(g, s, spec), backend="eager", fullgraph=True)
    plain = compiled = compressor.init(spec)
    for seed in range(3):
        grads = {n: g[0] for n, g in gradients(1, seed, model).items()}
        want, plain = compressor.reduce(grads, plain, spec)
        got, compiled = step(grads, compiled)
        assert_close((got, compiled), (want, plain))

    policy, sizes = LAYOUTS["hsdp"]
    every = [gradients(6, seed) for seed in range(3)]
    inside, _ = steps(compressor, "hsdp", *every)
    state = fs.testing.spmd(lambda mesh, _: compressor.init(policy(MODEL).on(mesh)), sizes)(torch.zeros(6))
    for want, g in zip(inside, every, strict=True):
        got, state = fs.testing.spmd(lambda mesh, g, s: compressor.reduce(g, s, policy(MODEL).on(mesh)), sizes)(g, state)
        assert_close(got, want)


GOOD = {n: torch.zeros_like(p) for n, p in MODEL.named_parameters()}
BAD: dict[str, tuple[fs.Params, type[Exception], str]] = {
    "shards": ({"0": torch.zeros(77)}, ValueError, r"gradient '0' is not of a parameter .*unshard"),
    "missing": ({n: g for n, g in GOOD.items() if n != "1.bias"}, ValueError, r"parameter '1.bias' of unit '1' is missing"),
    "shape": (GOOD | {"2.weight": torch.zeros(5, 8).double()}, ValueError, r"'2.weight' .* shape \[5, 7\], got \[5, 8\]"),
    "dtype": (GOOD | {"1.bias": torch.zeros(7)}, ValueError, r"'1.weight' of unit '1': expected torch.float32 as '1.bias' has"),
    "integer": (GOOD | {"0.bias": torch.zeros(11).int()}, TypeError, r"'0.bias': .*floating point dtype, got torch.int32"),
}


@each_compressor
@pytest.mark.parametrize("case", BAD)
def test_bad_gradients(case: str, name: str) -> None:
    """Named, and on a mesh that cannot communicate: so before any communication."""
    grads, error, message = BAD[case]
    spec = fs.policies.always()(MODEL).on({"shard": 4})
    refused(error, message, lambda: COMPRESSORS[name].reduce(grads, COMPRESSORS[name].init(spec), spec))


SPLIT = fs.policies.always()(MODEL).on({"shard": 4})
ALONE = fs.policies.always()(MODEL)


def reduce_with_state_of(other: Compressor[PowerSGD]) -> Any:
    return powersgd().reduce(GOOD, other.init(SPLIT), SPLIT)


REFUSED: dict[str, tuple[Any, str]] = {
    "rank": (lambda: powersgd(0), "rank of at least 1, got 0"),
    "chunk": (lambda: quantize(0), "at least one element, got 0"),
    "axis": (lambda: powersgd(axes="slow").init(ALONE), r"unknown mesh axis 'slow': .*\('shard',\)"),
    "a state of another rank": (
        lambda: reduce_with_state_of(powersgd(2, min_compression_rate=0)),
        r"'0.weight': expected a state whose q is \[6, 1\], got \[6, 2\]; make it by init",
    ),
    "no error": (lambda: reduce_with_state_of(powersgd(error_feedback=False)), r"whose error is \[11, 6\], got none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    refused(ValueError, message, call)
