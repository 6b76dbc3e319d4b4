"""Frozen units at rest in a codec: bytes between steps and on the wire, decoded where they are used."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from collective_log import Collectives, Sent, world
from depth import at_most, depth, each, every, mark_seldom, pairs
from hypothesis import given
from models import EXACT, refused, unchanged
from parity import MAIN_WAYS, WAYS, strategies
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import Codec, P, codecs

F64, BF16 = torch.float64, torch.bfloat16
CODECS = {"nf4": codecs.nf4(8), "int8": codecs.int8(5), "half": Codec(lambda x: (x.half(),), lambda x: x)}
XS = torch.randn(4, 3, 6, dtype=F64, generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=bias).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def model_of(dtype: torch.dtype = F64, width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Linear(width, 3).requires_grad_(False)
    return nn.Sequential(Adapted(width, True), Adapted(width, False), head).to(dtype)


def shapes(p: P) -> fs.Policy:
    """Each layer whole, frozen and trained parameters in it, and the head."""
    return fs.policies.override(fs.by_type(Adapted, p=p), fs.by_path({"": p}))


def quantized(model: nn.Module, codec: Codec) -> nn.Module:
    """The plain model with every frozen parameter as it is decoded: blocks begin with parameters."""
    model = copy.deepcopy(model)
    for p in (p for p in model.parameters() if not p.requires_grad):
        flat = nn.functional.pad(p.detach().flatten(), (0, -p.numel() % codec.block))
        p.data.copy_(codec.decode(*codec.encode(flat)).to(p.dtype)[: p.numel()].view_as(p))
    return model


def expected(model: nn.Module, codec: Codec, xs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    plain = quantized(model, codec)
    losses = torch.stack([(plain(x) ** 2).mean() for x in xs])
    losses.mean().backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, losses.detach()


# --- what is kept ---
SIZES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}]

DTYPES = [torch.float32, BF16]


@given(st.sampled_from(SIZES), st.sampled_from([*CODECS]), st.sampled_from([None, 1, 3]), st.sampled_from(DTYPES))
def test_every_rank_encodes_its_own_slice_and_all_get_the_same(
    sizes: dict[str, int], name: str, align: int | None, dtype: torch.dtype
) -> None:
    """Blocks straddle neither ranks nor parameters, so the values do not depend on how many ranks there are."""
    model, codec = model_of(dtype), CODECS[name]
    spec = shapes(P("shard", at_rest=codec, align=align))(model).on(sizes)
    shards = [fs.shard(model, spec, rank=rank) for rank in range(torch.Size(sizes.values()).numel())]
    wanted = dict(quantized(model, codec).named_parameters())
    for unit in spec:
        assert (unit.at_rest is None) is unit.requires_grad
        for of_rank in shards:
            length, kept = spec.stored(unit)
            assert (of_rank[unit.key].shape, of_rank[unit.key].dtype) == ((length,), kept)
            assert (kept == torch.uint8) is (unit.at_rest is not None)

    def full(mesh: Any, *tensors: Tensor) -> fs.Params:
        return fs.unshard(dict(zip(shards[0], tensors, strict=True)), spec.on(mesh))

    got = fs.testing.spmd(full, sizes)(*(torch.stack([some[key] for some in shards]) for key in shards[0]))
    for name, p in wanted.items():
        assert all(torch.equal(row, p) for row in got[name]), name


def test_bytes_at_rest_are_at_most_0_30_of_16_bits() -> None:
    """To the byte, of layers of whole blocks; and what a spec prints."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=BF16) for _ in range(3))).requires_grad_(False)
    numel = 256 * 256 // 4
    for codec, length in (
        (codecs.nf4(), numel // 2 + numel // 64 * 2),
        (codecs.nf4(double_quant=True), numel // 2 + numel // 64 + 16 + 16),  # of one scale, and of their mean, padded
        (codecs.int8(), numel + numel // 64 * 2),
    ):
        spec = fs.by_type(nn.Linear, p=P("shard", at_rest=codec))(layers).on({"shard": 4})
        assert {spec.stored(unit) for unit in spec} == {(length, torch.uint8)}
        assert f"{3 * length:,}" in str(spec).splitlines()[-1]
        assert repr(codec) in str(spec)
    unit = next(iter(fs.by_type(nn.Linear, p=P("shard", at_rest=codecs.nf4()))(layers)))
    assert spec.on({"shard": 4}).stored(unit)[0] / (numel * 2) == 0.265625


def test_shards_are_pure_bytes_on_every_mesh_and_specs_are_values() -> None:
    model = model_of()
    spec = shapes(P("shard", at_rest=codecs.nf4(8)))(model)
    assert spec == shapes(P("shard", at_rest=codecs.nf4(8)))(model) != shapes(P("shard", at_rest=codecs.nf4(16)))(model)
    assert pickle.loads(pickle.dumps(spec)) == spec
    trained, frozen = fs.partition(fs.shard(model, spec), spec)
    assert set(frozen) == {"", "0:frozen", "1:frozen"}
    assert set(trained) == {"0", "1"}
    assert fs.trace_order(model, spec, XS[0]) == ("", "0:frozen", "0", "1:frozen", "1")
    params = fs.combine(trained, frozen)  # full parameters may stand in the place of some
    mixed = {key: p for key, p in params.items() if key != "0:frozen"} | fs.unshard(params, spec, units=["0:frozen"])
    assert torch.equal(*(fs.functional_call(model, some, XS[0], spec=spec) for some in (params, mixed)))


# --- computed with ---
WAYS_OF_P = strategies("shard", "keep", "remat", replicate=P(), unaligned=P("shard", align=1))


@at_most(3)
@pairs(way=MAIN_WAYS, name=CODECS, how=WAYS_OF_P)
@real_ranks(2)
def test_real_ranks(rank: int, how: str, name: str, way: str) -> None:
    """Values and gradients are the plain model's with the decoded weights; that is also what is gathered."""
    model, codec = model_of(), CODECS[name]
    spec = shapes(dataclasses.replace(WAYS_OF_P[how], at_rest=codec))(model).bound
    grads, losses = expected(model, codec, XS[:2])
    trained, frozen = fs.partition(fs.shard(model, spec), spec)
    with unchanged(model):
        loss = lambda p: (fs.functional_call(model, fs.combine(p, frozen), XS[rank], spec=spec) ** 2).mean()  # noqa: E731
        got, value = WAYS[way](loss)(trained)
    assert_close(value, losses[rank], **EXACT)
    assert_close(fs.unshard(got, spec), grads, **EXACT)
    full = fs.unshard(fs.combine(trained, frozen), spec)
    for key, p in quantized(model, codec).named_parameters():
        assert torch.equal(full[key], p)


@each(name=mark_seldom(CODECS, "int8"))
@real_ranks(4)
def test_meshes_of_two_axes_and_overrides(rank: int, name: str) -> None:
    """Split over either axis, over both in either order or neither, and some units in another way than others."""
    model, codec, mesh = model_of(), CODECS[name], mesh_of(2, 2)
    grads, losses = expected(model, codec, XS)
    wanted = {name: p.detach() for name, p in quantized(model, codec).named_parameters()}
    both = ("replicate", "shard")
    specs = {axis: shapes(P(axis, at_rest=codec))(model).on(mesh) for axis in ("shard", "replicate", both, both[::-1], None)}
    some = fs.by_path({"0": P("shard"), "1": P(both, at_rest=codec)})  # with the outermost choice for each path
    specs["some"] = fs.policies.override(shapes(P("shard", at_rest=codec)), some)(model).on(mesh)
    assert [unit.key for unit in specs["some"] if unit.at_rest] == ["", "1:frozen"]
    plain = shapes(P("shard"))(model).on(mesh)
    values = {name: p.detach() for name, p in model.named_parameters()}
    before = specs["some"]
    for axis, spec in specs.items():
        params = fs.shard(model, spec)
        trained, frozen = fs.partition(params, spec)
        for p in (P("shard", at_rest=codec), P("shard", at_rest=codec, remat=True)) if axis == "shard" else (None,):
            here = spec if p is None else shapes(p)(model).on(mesh)
            loss = lambda p, here=here: (fs.functional_call(model, p | frozen, XS[rank], spec=here) ** 2).mean()  # noqa: E731
            with unchanged(model):
                got, value = fs.grad_and_value(loss)(trained)
            if axis != "some":
                assert_close(value, losses[rank], **EXACT)
                assert_close(fs.unshard(got, spec), grads, **EXACT)
        at_rest = {param.name for unit in spec if unit.at_rest for param in unit.params}
        full = fs.unshard(params, spec)
        assert all(torch.equal(full[name], (wanted if name in at_rest else values)[name]) for name in values)
        encoded = fs.reshard(fs.shard(model, plain), plain, spec)
        assert all(torch.equal(encoded[key], shard) for key, shard in params.items())
        scattered = fs.shard(values if rank == 3 else None, spec, src=3)
        assert all(torch.equal(scattered[key], shard) for key, shard in params.items())
        # once decoded, values are fixed points: bytes of any other slices are theirs
        for other in depth([before], [*specs.values()]):
            moved = fs.reshard(params, spec, other)
            assert all(torch.equal(moved[key], shard) for key, shard in fs.shard(full, other).items())
        back = fs.unshard(fs.reshard(params, spec, plain), plain)
        assert all(torch.equal(back[name], full[name]) for name in full)
        before = spec


@every(param=[BF16, None], dtype=[torch.float32, BF16])
def test_computed_in_what_the_precision_says(dtype: torch.dtype, param: torch.dtype | None) -> None:
    """Decoded to that dtype, or to the parameters' own, also where params of another dtype were sharded."""
    model = model_of(dtype)
    spec = shapes(P("shard", at_rest=codecs.nf4(8), precision=fs.Precision(param=param)))(model)
    seen: list[torch.dtype] = []
    for module in (m for m in model.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad):
        module.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    fs.functional_call(model, fs.shard(model, spec), XS[0].to(param or dtype), spec=spec)
    assert seen == [param or dtype] * 3
    wide = {name: p.detach().double() for name, p in model.named_parameters()}
    again = fs.shard(wide, spec)
    for key, shard in fs.shard(model, spec).items():
        assert torch.equal(again[key], shard.double() if spec.by_key[key].requires_grad else shard)
    assert {p.dtype for name, p in fs.unshard(again, spec).items() if spec.by_name[name][0].at_rest} == {dtype}


# --- what is sent ---
def test_bytes_are_gathered_and_nothing_is_reduced() -> None:
    with world(8):
        model = model_of(BF16, 64)
        spec = shapes(P("shard", at_rest=codecs.nf4()))(model).bound
        trained, frozen = fs.partition(fs.shard(model, spec), spec)
        sent = Collectives()

        def loss(p: fs.Params) -> Tensor:
            y = fs.functional_call(model, p | frozen, torch.ones(2, 64, dtype=BF16), spec=spec)
            sent.turn()
            return y.sum()

        with sent:
            fs.grad(loss)(trained)
        for key in ("0:frozen", "1:frozen", ""):
            length, _ = spec.stored(spec.by_key[key])
            assert Sent("all_gather", length, length, 8) in sent.forward
        reduced = [s.numel for s in sent.all if s.op == "reduce_scatter"]
        assert sorted(reduced) == sorted(spec.padded_numel(spec.by_key[key]) for key in ("0", "1"))
        wide = [s.bytes for s in sent.all if s.op == "all_gather"]
        elements = sum(spec.shard_numel(spec.by_key[key]) for key in ("0:frozen", "1:frozen", ""))
        assert sum(s for s in wide if s > 200) < 0.6 * elements


# --- refused ---
def test_refused() -> None:
    """With the unit's name and what to do."""
    model = model_of()
    plain, spec = (shapes(p)(model) for p in (P("shard"), P("shard", at_rest=codecs.nf4(8))))
    params = fs.shard(model, spec)
    trained, _ = fs.partition(params, spec)
    says = r"unit '(0:frozen|)' is at rest in nf4\(block=8\), and so frozen: expected no {} of it; set it apart with"
    refused(ValueError, says.format("gradient"), lambda: fs.partition(params, spec, lambda unit: True))
    refused(ValueError, says.format("param_views"), lambda: fs.param_views(params, spec))
    assert set(fs.param_views(trained, spec)) == {"0.a.weight", "0.b.weight", "1.a.weight", "1.b.weight"}
    refused(ValueError, says.format("gradient"), lambda: fs.reduce_grads(fs.unshard(params, spec), spec))
    refused(ValueError, says.format("gradient"), lambda: fs.per_sample_grads(lambda p, x: x.sum(), params, XS[0], spec=spec))
    refused(ValueError, says.format("gradient"), lambda: fs.compress.quantize(8).reduce(fs.unshard(params, spec), (), spec))
    for options in ({}, {"spec": spec}, {"spec": spec, "options": lambda name, param: {}}):
        init, update = fs.optim.from_torch(torch.optim.AdamW, lr=0.1, **options)
        words = r"unit '' is torch.uint8.*expected no gradient of it; set it apart with fs.partition"
        refused(TypeError, words, lambda: update(params, init(params), params))
        state = init(params)  # bytes are like all integers: no state, no gradient, and left as they are
        assert {key for key, slots in state.items() if slots} <= set(trained)
        new, _ = update(trained, state, params)
        assert all((new[key] is params[key]) == (key not in trained) for key in params)
    with pytest.raises(TypeError, match=r"\['(0:frozen)?'\]: expected a floating point tensor, got torch.uint8; set it"):
        fs.grad(lambda p: fs.functional_call(model, p, XS[0], spec=spec).sum())(params)
    wrong = {"0:frozen": fs.shard(model, plain)["0:frozen"]}
    bytes_of = spec.stored(spec.by_key["0:frozen"])[0]
    for call in (
        lambda: fs.functional_call(model, params | wrong, XS[0], spec=spec),
        lambda: fs.unshard(params | wrong, spec),
        lambda: fs.functional_call(model, params | {"0:frozen": params["0:frozen"][:-1]}, XS[0], spec=spec),
    ):
        refused(ValueError, rf"unit '0:frozen' is at rest in nf4\(block=8\): expected its {bytes_of} bytes", call)
    refused((ValueError, TypeError), r"unit '(0:frozen)?'", lambda: fs.functional_call(model, params, XS[0], spec=plain))
    with pytest.raises(RuntimeError, match=r"at rest in nf4\(block=8\), and bytes have no derivative"):
        torch.func.grad(lambda full: fs.shard(full, spec)["0"].sum())(dict(model.named_parameters()))
    with pytest.raises(TypeError, match=r"P: at_rest: expected a Codec such as codecs.nf4\(\) or None, got 'nf4'"):
        P(at_rest="nf4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"unit '' is P\('shard', at_rest=nf4\(block=64\)\).*nothing is: expected requires"):
        fs.policies.whole(P("shard", at_rest=codecs.nf4()))(nn.Linear(2, 2))


def test_a_codec_that_needs_values_is_refused() -> None:
    """What is encoded has to have shapes that the slice's tell."""
    reads = Codec(lambda x: (x * x.abs().max().item(),), lambda x: x)
    layer = nn.Linear(2, 2).requires_grad_(False)
    spec = fs.policies.whole(P("shard", at_rest=reads))(layer)
    with pytest.raises(TypeError, match=r"expected encode to run on shapes alone"):
        fs.functional_call(layer, fs.shard(layer, spec), torch.ones(2), spec=spec)
