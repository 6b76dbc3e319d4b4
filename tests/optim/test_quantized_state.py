"""Optimizer state at rest in 8 bits: exact on any number of ranks, saved as bytes, beside float64; and what is refused."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_most, each, every, seldom
from models import refused
from parity import shards_of
from ranks import at_rank, mesh_of, real_ranks
from test_compile import IMPORT
from test_memory import Peak
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P, codecs, optim

batched = pytest.mark.filterwarnings("ignore:There is a performance drop")
torch.manual_seed(0)
BLOCK = 16
CODEC = codecs.dynamic8(BLOCK)
MODEL = nn.Sequential(nn.Linear(9, 20), nn.Linear(20, 30), nn.Linear(30, 4, bias=False))
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
GRADS = [{name: torch.randn_like(p) * 10 ** (2 * torch.randn_like(p)) for name, p in FULL.items()} for _ in range(6)]
"""The whole gradients of steps, of many magnitudes."""
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def sliced(axis: str | tuple[str, ...] | None = "shard", **options: Any) -> P:
    return P(axis, align=BLOCK, **options)


POLICIES = {
    "sharded": fs.policies.always(sliced()),
    "whole": fs.policies.whole(sliced()),
    "replicated": fs.policies.whole(sliced(None)),
    "mixed": fs.by_path({"0": sliced(("replicate", "shard")), "1": sliced("replicate"), "2": sliced(None)}),
}
DONATED: dict[str, Any] = {"donate": True, "inner": {"donate": True}}
USUAL = {"sharded": DONATED, "mixed": {}}


def quantized(
    spec: fs.PartitionSpec, rank: int | None = None, optimizer: Any = torch.optim.AdamW, **options: Any
) -> optim.Optimizer:
    spec = spec if rank is None else at_rank(spec, rank)
    settings = ADAMW if optimizer is torch.optim.AdamW else {"lr": 0.01}
    inner = optim.from_torch(optimizer, spec=spec, **settings, **options.pop("inner", {}))
    codec = options.pop("codec", CODEC)
    return optim.quantized_state(inner, codec, spec=spec, at_least=options.pop("at_least", 1), **options)


def run_steps(
    spec: fs.PartitionSpec, optimizer: Any, steps: int = 4, begin: int = 0, given: Any = None, rank: int | None = None
) -> Any:
    """The parameters and the state after steps on a rank's slices."""
    params = {key: x.clone() for key, x in fs.shard(FULL, spec, rank=rank).items()}
    params, state = given or (params, optimizer.init(params))
    for grads in GRADS[begin:steps]:
        params, state = optimizer.update(fs.shard(grads, spec, rank=rank), state, params)
    return params, state


def one_rank(policy: str = "sharded") -> fs.PartitionSpec:
    return POLICIES[policy](MODEL).on({"replicate": 1, "shard": 1})


def join_ranks(spec: fs.PartitionSpec, trees: list[fs.Params]) -> fs.Params:
    """Full tensors from the slices of all ranks."""
    buffers = {key: torch.cat([tree[key] for tree in trees]) for key in trees[0]}
    return fs.unflatten({key: x[: spec.padded_numel(spec.by_key[key])] for key, x in buffers.items()}, spec)


def decoded(state: Any, spec: fs.PartitionSpec, name: str, rank: int | None = None, codec: Any = CODEC) -> fs.Params:
    wide = optim.decode_state(state, codec, spec=spec if rank is None else at_rank(spec, rank))
    return {key: values[name] for key, values in wide.items()}


# --- The same on any number of ranks, and for any policy ---
@at_most(1)
@each(ranks=[2, 3, 7], policy=["sharded", "whole"], codec=[CODEC, codecs.int8(BLOCK), codecs.nf4(BLOCK)])
def test_values_depend_neither_on_ranks_nor_on_units(codec: Any, policy: str, ranks: int) -> None:
    """Bit for bit."""
    alone = one_rank()
    want, state = run_steps(alone, quantized(alone, codec=codec))
    spec = POLICIES[policy](MODEL).on({"shard": ranks})
    found = [run_steps(spec, quantized(spec, rank, codec=codec), rank=rank) for rank in range(ranks)]
    assert_close(join_ranks(spec, [params for params, _ in found]), fs.unshard(want, alone), rtol=0, atol=0)
    for name in ("exp_avg", "exp_avg_sq"):
        got = join_ranks(spec, [decoded(x, spec, name, rank, codec) for rank, (_, x) in enumerate(found)])
        assert_close(got, fs.unshard(decoded(state, alone, name, codec=codec), alone), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=seldom)])
@real_ranks(lambda shape: math.prod(shape))
def test_real_ranks_and_checkpoints(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    """The bits of one rank, with FSDP, HSDP and a mixture, donated and not; saved, loaded with other units and gone on with,
    and on one rank, where it is those bytes."""
    mesh, path = mesh_of(*shape), tmp_path
    alone = one_rank()
    expected = run_steps(alone, quantized(alone))
    for policy, options in (USUAL if shape == (1, 2) else {**USUAL, "replicated": {}}).items():
        spec = POLICIES[policy](MODEL).on(mesh)
        params, state = run_steps(spec, quantized(spec, **options))
        assert_close(fs.unshard(params, spec), fs.unshard(expected[0], alone), rtol=0, atol=0)
        found = fs.unshard(decoded(state, spec, "exp_avg_sq"), spec)
        assert_close(found, fs.unshard(decoded(expected[1], alone, "exp_avg_sq"), alone), rtol=0, atol=0)
        fs.checkpoint.save(path / policy, {"params": params, "opt": state}, spec).wait()
        other = POLICIES["whole"](MODEL).on(mesh)
        start = fs.shard(FULL, other)
        found = fs.checkpoint.load(path / policy, other, like={"params": start, "opt": quantized(other).init(start)})
        params, _ = run_steps(other, quantized(other), 6, 4, (found["params"], found["opt"]))
        assert_close(fs.unshard(params, other), fs.unshard(run_steps(alone, quantized(alone), 6)[0], alone), rtol=0, atol=0)
        of_one = fs.checkpoint.load(path / policy, alone, like={"params": expected[0], "opt": expected[1]})
        got = of_one["params"], of_one["opt"]
        assert pytree.tree_structure(got) == pytree.tree_structure(expected)
        assert_close(got, expected, rtol=0, atol=0)


@real_ranks(2)
def test_local_units(rank: int, tmp_path: Path) -> None:
    """A unit local over an axis, beside the optimizer on decoded states of the same slices."""
    spec = fs.policies.whole(sliced(None, local={"expert": 0}))(nn.Linear(8, 8, bias=False)).on(mesh_of(expert=2))
    params = fs.shard({"weight": torch.arange(128.0).view(16, 8)}, spec)
    init, update = quantized(spec)
    params, state = update({"": params[""].sin()}, init(params), params)
    wide = optim.decode_state(state, CODEC, spec=spec)
    fs.checkpoint.save(tmp_path / "local", {"params": params, "opt": wide}, spec).wait()
    again = optim.encode_state(fs.checkpoint.load(tmp_path / "local", spec)["opt"], CODEC, spec=spec, at_least=1)
    assert_close(again[""]["exp_avg"], state[""]["exp_avg"], rtol=0, atol=0)
    whole = fs.unshard(decoded(state, spec, "exp_avg"), spec)["weight"]
    assert_close(whole, 0.1 * torch.arange(128.0).view(16, 8).sin(), rtol=0, atol=0.03 * 0.1)


@seldom
@real_ranks(2)
def test_blocks_of_other_pieces_are_refused(rank: int, tmp_path: Path) -> None:
    """Another size of a local axis was "another model"; of another dimension or memory order the scales were wrong. A
    parameter in pieces over an axis of 2 or 1, along either dimension, in either memory order, or in no pieces."""

    def spec_of(size: int, local: int | None, order: str = "rows") -> fs.PartitionSpec:
        shape = [16 // (size if local == dim else 1) for dim in range(2)]
        weight = torch.zeros(shape) if order == "rows" else torch.zeros(shape[::-1]).T
        p = sliced("shard", local=None if local is None else {"expert": local})
        return fs.policies.whole(p)(nn.ParameterDict({"weight": weight})).on(mesh_of(shard=2 // size, expert=size))

    full = {"weight": torch.arange(256.0).view(16, 16).sin() * torch.logspace(0, 3, 16)}
    specs = [spec_of(2, 0), spec_of(2, 1), *(spec_of(n, None, "columns") for n in (2, 1)), spec_of(1, 0), spec_of(2, None)]
    alike = [set[int](), set[int](), {2, 3}, {2, 3}, {4, 5}, {4, 5}]
    for i, spec in enumerate(specs):
        params = fs.shard(full, spec)
        init, update = quantized(spec)
        _, state = update(params, init(params), params)
        wide = optim.decode_state(state, CODEC, spec=spec)
        want = fs.unshard({"": wide[""]["exp_avg"]}, spec)["weight"]
        raised = pytest.raises(ValueError, match=r"'opt\.\.exp_avg\.codes' is in a codec, whose .*local axes: .*decode_state")
        with raised if i < 2 else contextlib.nullcontext():
            fs.checkpoint.save(tmp_path / f"{i}", {"opt": state}, spec).wait()
        fs.checkpoint.save(tmp_path / f"{i} wide", {"opt": wide}, spec).wait()
        for j, to in enumerate(specs):
            fresh = quantized(to).init(fs.shard(full, to))
            if j in alike[i]:
                got = decoded(fs.checkpoint.load(tmp_path / f"{i}", to, like={"opt": fresh})["opt"], to, "exp_avg")
                assert_close(fs.unshard(got, to)["weight"], want, rtol=0, atol=0)
                continue
            if i > 1:
                text = r"in a codec, whose blocks follow|'opt\.weight\.exp_avg\.scales.*not in .*decode"
                refused(ValueError, text, lambda: fs.checkpoint.load(tmp_path / f"{i}", to, like={"opt": fresh}))
            loaded = fs.checkpoint.load(tmp_path / f"{i} wide", to)["opt"]
            assert_close(fs.unshard({"": loaded[""]["exp_avg"]}, to)["weight"], want, rtol=0, atol=0)
            assert optim.encode_state(loaded, CODEC, spec=to, at_least=1)[""].keys() == fresh[""].keys()


def test_units_that_join_encoded_and_other_state(tmp_path: Path) -> None:
    """A unit below at_least= has its state in no codec: the way to other units that the error names leads there."""
    fine, coarse = one_rank("sharded"), one_rank("whole")
    most = max(unit.numel for unit in fine)
    saving, loading = quantized(fine, at_least=most), quantized(coarse, at_least=most)
    params, state = run_steps(fine, saving)
    assert {isinstance(x["exp_avg"], optim._checks.QuantizedSlice) for x in state.values()} == {True, False}
    fs.checkpoint.save(tmp_path / "a", {"opt": state}, fine).wait()
    with pytest.raises(
        ValueError, match=r"state 'opt\.': .*in one unit.*do not mix them, as those that were saved.*decode_state"
    ):
        fs.checkpoint.load(tmp_path / "a", coarse)
    with pytest.raises(ValueError, match=r"'opt\.0\.bias\.exp_avg\.codes' is not in .*decode_state"):
        fs.checkpoint.load(tmp_path / "a", coarse, like={"opt": loading.init(fs.shard(FULL, coarse))})
    like = {"opt": saving.init(fs.shard(FULL, fine))}
    wide = optim.decode_state(fs.checkpoint.load(tmp_path / "a", fine, like=like)["opt"], CODEC, spec=fine)
    fs.checkpoint.save(tmp_path / "b", {"opt": wide}, fine).wait()
    loaded = fs.checkpoint.load(tmp_path / "b", coarse)["opt"]
    got, want = (fs.unshard(decoded(x, spec, "exp_avg"), spec) for x, spec in ((loaded, coarse), (state, fine)))
    assert_close(got, want, rtol=0, atol=0)
    given = fs.reshard(params, fine, coarse), optim.encode_state(loaded, CODEC, spec=coarse, at_least=most)
    assert run_steps(coarse, loading, 4, 3, given)
    # a state of which one unit only is to be encoded: as from a larger at_least=
    with pytest.raises(ValueError, match=r"encode_state of what optim\.decode_state returns is one"):
        quantized(fine).update(params, state, params)
    every = optim.encode_state(optim.decode_state(state, CODEC, spec=fine), CODEC, spec=fine, at_least=1)
    assert quantized(fine).update(params, every, params)


def test_blocks_of_another_policy_are_refused(tmp_path: Path) -> None:
    spec = one_rank()
    params, state = run_steps(spec, quantized(spec))
    fs.checkpoint.save(tmp_path / "a", {"opt": state}, spec).wait()
    other = fs.policies.always(P("shard", align=8))(MODEL).on({"shard": 1})
    with pytest.raises(ValueError, match=r"state 'opt\.0\.exp_avg\.codes': .* in a codec: expected like="):
        fs.checkpoint.load(tmp_path / "a", spec)
    with pytest.raises(ValueError, match=r"unit '0' of state '0\.exp_avg\.codes': expected a part of this rank's slice"):
        fs.checkpoint.save(tmp_path / "b", state, other)
    wide = optim.from_torch(torch.optim.AdamW).init(params)
    with pytest.raises(ValueError, match=r"'opt\.0\.bias\.exp_avg' is not in the checkpoint: .*decode_state"):
        fs.checkpoint.load(tmp_path / "a", spec, like={"opt": wide})
    fs.checkpoint.save(tmp_path / "c", {"opt": wide}, spec).wait()
    with pytest.raises(ValueError, match=r"'opt\.0\.bias\.exp_avg\.codes' is not in the checkpoint: .*encode_state"):
        fs.checkpoint.load(tmp_path / "c", spec, like={"opt": state})


# --- Bytes ---
def nbytes(state: Any) -> int:
    return sum(x.nbytes for x in pytree.tree_leaves(state))


def big(units: int = 6) -> tuple[fs.PartitionSpec, fs.Params]:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(units)))
    spec = fs.by_type(nn.Linear, p=P("shard", align=256))(model).on({"shard": 1})
    return spec, fs.shard(model, spec)


def test_bytes_at_rest_and_of_a_plan() -> None:
    """At most 0.28 of float32's, and as a plan counts them."""
    spec, params = big()
    adamw: Any = optim.from_torch(torch.optim.AdamW)
    made = optim.quantized_state(adamw, codecs.dynamic8(), spec=spec)
    wide, state = adamw.init(params), made.init(params)
    assert nbytes(state) < 0.255 * nbytes(wide)
    counted = fs.plan(spec, optimizer=made).units["0"].optimizer
    assert counted == 2 * (128 * 128 + 4 * 64)
    assert counted + 4 == nbytes(state["0"])
    assert nbytes(optim.quantized_state(adamw, codecs.dynamic8(), spec=spec, at_least=16385).init(params)) == nbytes(wide)


@seldom
def test_one_unit_at_a_time_is_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time of a donated step: two decoded slices of one unit, and what encodes a part of one."""
    monkeypatch.setattr("funshard.optim._quantized.CHUNK", 1024)
    peaks: list[int] = []
    for units in (3, 6):
        spec, params = big(units)
        inner = optim.from_torch(torch.optim.AdamW, fused=True, donate=True)
        init, update = optim.quantized_state(inner, codecs.dynamic8(), spec=spec, donate=True)
        state = init(params)
        grads = {key: torch.ones_like(x) for key, x in params.items()}
        given = nbytes((params, state, grads))
        with Peak() as peak:
            update(grads, state, params)
        peaks.append(peak.bytes - given)
    one = 128 * 128 * 4
    assert peaks[1] - peaks[0] < one / 8
    assert peaks[1] < 4 * one


def test_donated_state_is_written_in_place() -> None:
    spec = one_rank()
    optimizer = quantized(spec, donate=True)
    params, state = run_steps(spec, optimizer, 1)
    old = state["0"]["exp_avg"].codes
    pointer = old.data_ptr()
    given = {key: x.clone() for key, x in params.items()}, pytree.tree_map(torch.clone, state)
    got = run_steps(spec, optimizer, 2, 1, (params, state))
    assert got[1]["0"]["exp_avg"].codes.data_ptr() == pointer
    assert_close(got, run_steps(spec, quantized(spec), 2, 1, given), rtol=0, atol=0)
    refused(RuntimeError, "was donated", lambda: old + 1)
    shared = {**given[1], "1": given[1]["1"] | {"exp_avg": given[1]["1"]["exp_avg_sq"]}}
    with pytest.raises(ValueError, match=r"state\['1'\]\['exp_avg'\]\.(codes|scales) and .* share memory"):
        run_steps(spec, optimizer, 2, 1, (given[0], shared))


# --- Numerics ---
def one_unit(numel: int = 512) -> tuple[fs.PartitionSpec, fs.Params]:
    model = nn.Linear(numel, 1, bias=False)
    spec = fs.policies.whole(P(align=256))(model).on({"shard": 1})
    return spec, fs.shard(model, spec)


def updates(grads: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Adam's last update in 8 bits, and in float64 without rounding, in units of the learning rate."""
    spec, params = one_unit(len(grads[0]))
    adam: Any = optim.from_torch(torch.optim.Adam, lr=1.0, **options)
    init, update = optim.quantized_state(adam, codecs.dynamic8(), spec=spec, at_least=1)
    zeros = {"": torch.zeros_like(params[""])}
    wide = {"": zeros[""].double()}
    new, state, exact, exact_state = zeros, init(zeros), wide, adam.init(wide)
    for g in grads:
        new, state = update({"": g}, state, zeros)
        exact, exact_state = adam.update({"": g.double()}, exact_state, wide)
    return new[""].double(), exact[""]


@at_most(2)
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18])
def test_updates_beside_float64(scale: float) -> None:
    """At all magnitudes of a gradient whose square float32 has, with steps that take other directions."""
    generator = torch.Generator().manual_seed(0)
    grads = [scale * torch.randn(512, generator=generator) for _ in range(30)]
    got, want = updates(grads, eps=0.0 if scale > 1e-20 else 1e-8)
    assert_close(got, want, rtol=0, atol=0.04 * want.abs().max().item())
    zeros = [torch.cat([g[:256], torch.zeros(256)]) for g in grads]
    assert (updates(zeros)[0][256:] == 0).all()


@at_most(1)
@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-6])
def test_small_second_moments_do_not_become_zero(small: float) -> None:
    """Beside a large gradient in their block: an update never is 1.6 times the exact one's largest, where eps alone is 1e8."""
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for late in (0.0, 1.0):  # the last gradients of small elements are zero, or are not
        grads = [torch.randn(512, generator=generator) * small for _ in range(60)]
        for i, g in enumerate(grads):
            g[::64] = torch.randn(8, generator=generator)
            if i >= 40:
                g[1::64] *= late
        got, want = updates(grads, eps=1e-30, betas=(0.9, 0.999))
        assert got.isfinite().all()
        largest = max(largest, float(got.abs().max() / want.abs().max()))
    assert largest < 1.6


@every(value=[math.nan, math.inf, -math.inf, 1e30], codec=[codecs.dynamic8(), codecs.int8(256), codecs.nf4(256)])
def test_what_is_not_finite_stays_so(codec: Any, value: float) -> None:
    """A block with an infinite or NaN value is NaN in the next steps, and the others are as before; 1e30 has no square."""
    spec, params = one_unit()
    init, update = optim.quantized_state(optim.from_torch(torch.optim.Adam), codec, spec=spec, at_least=1)
    grads = torch.ones(512)
    grads[7] = value
    new, state = update({"": grads}, init(params), params)
    assert not optim.decode_state(state, codec, spec=spec)[""]["exp_avg_sq"][7].isfinite()
    new, state = update({"": torch.ones(512)}, state, new)
    assert not new[""][7].isfinite()
    assert new[""][256:].isfinite().all()


def test_padding_does_not_matter() -> None:
    """NaN in the padding of gradients, parameters and codes."""
    spec = one_rank("whole")
    (unit,) = spec
    mask = torch.ones(spec.padded_numel(unit), dtype=torch.bool)
    fs.unflatten({"": mask}, spec)
    for view in fs.param_views({"": mask}, spec).values():
        view.fill_(False)
    init, update = optim.quantized_state(optim.from_torch(torch.optim.AdamW), CODEC, spec=spec, at_least=1)
    params = fs.shard(FULL, spec)
    want, state = update(fs.shard(GRADS[0], spec), init(params), params)
    grads, poisoned = ({"": x[""].masked_fill(mask, math.nan)} for x in (fs.shard(GRADS[0], spec), params))
    got, same = update(grads, init(poisoned), poisoned)
    assert_close(fs.unshard(got, spec), fs.unshard(want, spec), rtol=0, atol=0)
    assert_close(same, state, rtol=0, atol=0)
    codes = {name: x._replace(codes=x.codes.masked_fill(mask, 77)) for name, x in state[""].items() if name != "step"}
    new, again = update(fs.shard(GRADS[1], spec), state, want), update(fs.shard(GRADS[1], spec), {"": state[""] | codes}, want)
    assert_close(again, new, rtol=0, atol=0)


@each(dtype=[torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """The state is decoded in its own dtype."""
    model = nn.Linear(64, 8).to(dtype)
    spec, params = shards_of(fs.policies.whole(sliced()), model, {"shard": 1})
    init, update = quantized(spec)
    params, state = update({"": torch.ones_like(params[""])}, init(params), params)
    assert state[""]["exp_avg"].scales.dtype == dtype
    assert optim.decode_state(state, CODEC, spec=spec)[""]["exp_avg"].dtype == dtype


# --- Around it ---
@batched
def test_ensembles() -> None:
    """Under a vmap of the user's over gradients and parameters, also with a donating optimizer."""
    spec = one_rank("whole")
    for options in ({}, {"donate": True}):
        made = quantized(spec, **options)
        params = fs.shard(FULL, spec)

        def run(factor: Tensor, made: Any = made, params: fs.Params = params) -> Any:
            state = made.init(params)
            new, state = made.update({"": fs.shard(GRADS[0], spec)[""] * factor}, state, params)
            return made.update({"": fs.shard(GRADS[1], spec)[""]}, state, new)

        factors = torch.tensor([1.0, 0.25])
        got = torch.vmap(run)(factors)
        for i, factor in enumerate(factors):
            assert_close(pytree.tree_map(lambda y, i=i: y[i], got), run(factor), rtol=0, atol=0)


@pytest.mark.filterwarnings(f"ignore:{IMPORT}")
@seldom
@pytest.mark.parametrize(("backend", "options"), [("aot_eager", {}), ("aot_eager", {"donate": True}), ("inductor", {})])
def test_a_compiled_step(backend: str, options: dict[str, Any]) -> None:
    """One graph, with the bits of the eager step; by inductor nearly, because an update's last bit can choose another code."""
    spec = one_rank("whole")
    made = optim.quantized_state(optim.adamw(0.01, weight_decay=0.1), CODEC, spec=spec, at_least=1, **options)
    step: Any = fs.compile(lambda params, state, grads: made.update(grads, state, params), backend=backend)
    got: Any = pytree.tree_map(torch.clone, run_steps(spec, made, 1))
    want = pytree.tree_map(torch.clone, got)
    for grads in GRADS[1:3]:
        got = step(*got, fs.shard(grads, spec))
    tolerance = {"rtol": 0, "atol": 0} if backend == "aot_eager" else {"rtol": 0.05, "atol": 1e-3}
    assert_close(fs.unshard(got[0], spec), fs.unshard(run_steps(spec, made, 3, 1, want)[0], spec), **tolerance)


def test_a_state_is_converted() -> None:
    """From float32 and back, by torch's state_dict too; a state in the other form is refused with the name of the function."""
    spec = one_rank()
    inner: Any = optim.from_torch(torch.optim.AdamW, spec=spec, **ADAMW)
    made = quantized(spec)
    params, wide = run_steps(spec, inner, 2)
    state = optim.encode_state(wide, CODEC, spec=spec, at_least=1)
    assert pytree.tree_structure(state) == pytree.tree_structure(made.init(params))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert pytree.tree_structure(read) == pytree.tree_structure(state)
    assert_close(read, state, rtol=0, atol=0)
    back = optim.decode_state(state, CODEC, spec=spec)
    assert pytree.tree_structure(back) == pytree.tree_structure(wide)
    for key, values in wide.items():
        for name, x in values.items():
            assert_close(back[key][name], x, rtol=0, atol=0.011 * float(x.abs().max()))
    names = fs.checkpoint.optimizer_state_dict(back, spec, torch.optim.AdamW, **ADAMW)
    assert_close(fs.checkpoint.from_optimizer_state_dict(names, spec, wide), back, rtol=0, atol=0)
    grads = fs.shard(GRADS[0], spec)
    with pytest.raises(ValueError, match=r"'exp_avg' of unit '0' is torch\.float32 and not in dynamic8.*optim\.encode_state"):
        made.update(grads, wide, params)
    for use in (
        lambda: inner.update(grads, state, params),
        lambda: fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.AdamW, **ADAMW),
    ):
        refused(TypeError, r"'exp_avg' of unit '0' is in a codec: .*optim\.decode_state", use)
    with pytest.raises(ValueError, match=r"'exp_avg' of unit '0': expected this rank's slice, \[\d+\], or a number, got Quant"):
        optim.encode_state(state, CODEC, spec=spec, at_least=1)


def test_what_does_not_fit_is_refused() -> None:
    spec = one_rank()
    adamw: Any = optim.from_torch(torch.optim.AdamW)
    params, grads = fs.shard(FULL, spec), fs.shard(GRADS[0], spec)
    made = quantized(spec)
    state = made.init(params)

    def make(optimizer: Any = adamw, codec: Any = CODEC, **options: Any) -> Any:
        return optim.quantized_state(optimizer, codec, spec=spec, at_least=1, **options)

    def float8(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(torch.float8_e4m3fn), x.abs().amax()

    def total(factor: Any, lr: Any) -> Tensor:
        return made.update({key: factor * g for key, g in grads.items()}, state, params, lr=lr)[0]["0"].sum()

    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"unit '0': blocks of 256 .* multiples of 16, .*P\(align=256\)", lambda: make(codec=codecs.dynamic8())),
        (ValueError, "does not encode each block", lambda: make(codec=codecs.nf4(BLOCK, double_quant=True))),
        (ValueError, "does not encode each block", lambda: make(codec=fs.Codec(float8, lambda x, scale: x.float() * scale))),
        (TypeError, "codec: expected a Codec", lambda: make(codec="int8")),
        (TypeError, "expected a state by unit key", lambda: make(optim.muon(spec, lr=0.1)).init(params)),
        (TypeError, "what is made of optimizers goes around", lambda: make(optim.ema(0.5)(adamw)).init(params)),
        (TypeError, "gradient transformation", lambda: make(optim.clip_gradients(spec, 1.0))),
        (TypeError, "expected a PartitionSpec", lambda: optim.quantized_state(adamw, CODEC, spec=fs.policies.whole())),  # type: ignore[arg-type]
        (ValueError, "centered", lambda: make(optim.from_torch(torch.optim.RMSprop, centered=True)).init(params)),
        (ValueError, "Adadelta multiplies by the root", lambda: make(optim.from_torch(torch.optim.Adadelta)).init(params)),
        (ValueError, "'0.weight' is no unit", lambda: make().init(FULL)),
        (ValueError, r"in dynamic8\(block=8\)", lambda: make(codec=codecs.dynamic8(8)).update(grads, state, params)),
        (ValueError, "unit '0' has a state and no gradient", lambda: made.update({}, state, params)),
        (ValueError, "unit '0' has no state", lambda: made.update(grads, {}, params)),
        (RuntimeError, "rounding the state to few bits has none", lambda: fs.grad(total)(torch.tensor(1.0), 0.1)),
        (RuntimeError, r"rates\['lr'\] takes part", lambda: fs.grad(total, 1)(1.0, torch.tensor(0.1))),
    ]
    for error, match, use in cases:
        refused(error, match, use)
    matrices = optim.matrices(spec, select=lambda name, param: len(param.shape) > 1)
    with pytest.raises(ValueError, match="is no unit of the spec: expected shards by unit key"):
        optim.muon(matrices, lr=0.1, fallback=made).init(params)


def test_a_state_with_units_that_are_not_encoded_is_decoded() -> None:
    """Only units whose state is in the codec need blocks that straddle nothing."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    policy = fs.policies.override(fs.by_type(nn.Linear, p=fs.P("shard", align=256)), fs.by_type(nn.LayerNorm, p=fs.P("shard")))
    spec = policy(model)
    init, _ = optim.quantized_state(optim.from_torch(torch.optim.AdamW, **ADAMW), CODEC, spec=spec)
    state = init(fs.shard(model, spec))
    found = optim.decode_state(state, CODEC, spec=spec)
    assert [key for key, values in state.items() if isinstance(values["exp_avg"], optim._checks.QuantizedSlice)] == ["0"]
    assert found["0"]["exp_avg"].shape == (spec.shard_numel(spec.by_key["0"]),)
    assert found["1"]["exp_avg"] is state["1"]["exp_avg"]
