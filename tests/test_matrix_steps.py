"""Steps of whole matrices: torch's own, options and rates, and all else that a step is made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from depth import at_most, each
from ranks import Pool
from test_by_matrix import GRADS, MODEL, PARAMS, WANTED, collect, matrices_on, spec_on
from torch import nn
from torch.distributed import init_device_mesh
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P
from funshard.collectives import ProcessAxis

ALONE = {"shard": 1}
OWN: dict[str, dict[str, Any]] = {"1.0.weight": {"lr": 0.2}, "2.weight": {"weight_decay": 0.0}, "2.bias": {"lr": 0.01}}


def cast(tree: fs.Params, dtype: torch.dtype) -> fs.Params:
    return {name: x.to(dtype) for name, x in tree.items()}


def by_torch(
    optimizers: list[tuple[Any, set[str], dict[str, Any]]], dtype: torch.dtype, own: Mapping[str, Any] = {}, lrs: Any = None
) -> fs.Params:
    """Torch's optimizers on the parameters of these names, unsharded."""
    params = {name: p.to(dtype).clone() for name, p in PARAMS.items()}
    made = [
        cls([{"params": [params[name]], **own.get(name, {})} for name in sorted(names)], **options)
        for cls, names, options in optimizers
    ]
    for t, grads in enumerate(GRADS):
        for name, p in params.items():
            p.grad = grads[name].to(dtype)
        for optimizer in made:
            for group in optimizer.param_groups if lrs else ():
                group["lr"] = group.setdefault("first", group["lr"]) / optimizer.defaults["lr"] * lrs[t]
            optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def trained(spec: fs.PartitionSpec, pair: Any, dtype: torch.dtype, rates: Any = lambda t: {}) -> fs.Params:
    """Full parameters after all steps of ours."""
    init, update = pair
    params = fs.shard(cast(PARAMS, dtype), spec)
    state = init(params)
    for t, grads in enumerate(GRADS):
        params, state = update(fs.shard(cast(grads, dtype), spec), state, params, **rates(t))
    return fs.unshard(params, spec)


def spec_of(mesh: Any, axis: Any, dtype: torch.dtype) -> fs.PartitionSpec:
    model = copy.deepcopy(MODEL).to(dtype)
    return fs.by_type(nn.Sequential, nn.Linear, p=P(axis))(model).on(mesh)


# --- torch's own ---

MUON: dict[str, dict[str, Any]] = {
    "default": {"lr": 0.05},
    "of its own": {"lr": 0.05, "momentum": 0.8, "nesterov": False, "adjust_lr": "match_rms_adamw", "steps": 3},
    "coefficients": {"lr": 0.05, "weight_decay": 0.0, "coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}


def torch_muon(options: dict[str, Any], dtype: torch.dtype, own: Mapping[str, Any] = {}, lrs: Any = None) -> fs.Params:
    adamw = {"lr": options["lr"], "weight_decay": options.get("weight_decay", 0.1)}
    theirs = {"adjust_lr": "adjust_lr_fn", "steps": "ns_steps", "coefficients": "ns_coefficients"}
    named = {theirs.get(name, name): value for name, value in options.items()}
    both = [(torch.optim.Muon, WANTED, named), (torch.optim.AdamW, {*PARAMS} - WANTED, adamw)]
    return by_torch(both, dtype, own, lrs)


@pytest.mark.parametrize(
    ("case", "dtype"),
    # not of its own in bfloat16: without nesterov torch 2.13 divides the momentum itself by its norm
    [*((case, torch.float32) for case in MUON), ("default", torch.bfloat16), ("coefficients", torch.bfloat16)],
)
def test_torchs_muon(case: str, dtype: torch.dtype) -> None:
    """One rank, whose iteration is torch's on the same numbers, alone or in a batch: to the rounding of bfloat16."""
    spec = spec_of(ALONE, "shard", dtype)
    pair = fs.optim.muon(matrices_on(spec, "muon"), **MUON[case])
    got, want = trained(spec, pair, dtype), torch_muon(MUON[case], dtype)
    for name in want:
        close: dict[str, Any] = {"rtol": 0, "atol": 0} if name not in WANTED else {"rtol": 0.02, "atol": 0.02}
        assert_close(got[name], want[name], **close)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-15)])
def test_a_step_of_torchs_muon_is_not_rounded(dtype: torch.dtype, atol: float) -> None:
    """What comes back in bfloat16 is multiplied by the rate in float32, or in a parameter's wider dtype, as in torch."""
    spec = spec_of(ALONE, "shard", dtype)
    known = matrices_on(spec, "muon")
    init, update = fs.optim.muon(known, lr=0.02, weight_decay=0.0)
    params = fs.shard(cast(PARAMS, dtype), spec)
    new, _ = update(fs.shard(cast(GRADS[0], dtype), spec), init(params), params)
    got = fs.unshard(new, spec)
    for name in WANTED:
        weight = PARAMS[name].to(dtype, copy=True)
        weight.grad = GRADS[0][name].to(dtype)
        torch.optim.Muon([weight], lr=0.02, weight_decay=0.0).step()
        assert_close(got[name], weight, rtol=0, atol=atol)


ADAFACTOR: dict[str, dict[str, Any]] = {
    "default": {"learning_rate": 0.01},
    "of its own": {
        "learning_rate": 0.1, "decay_rate": 0.5, "eps": 1e-6, "min_scale": 1e-2, "clipping_threshold": 1.5, "weight_decay": 0.1
    },
}  # fmt: skip
OF_TORCH: dict[str, dict[str, Any]] = {
    "default": {},
    "of its own": {"lr": 0.1, "beta2_decay": -0.5, "eps": (1e-6, 1e-2), "d": 1.5, "weight_decay": 0.1},
}


@at_most(1)
@each
@pytest.mark.parametrize("case", ADAFACTOR)
@pytest.mark.parametrize("axis", ["shard", None])
def test_torchs_adafactor_on_real_ranks(gloo2: Pool, case: str, axis: Any) -> None:
    """Every parameter, vectors as well."""
    want = by_torch([(torch.optim.Adafactor, {*PARAMS}, OF_TORCH[case])], torch.float64)
    for got in gloo2.run(adafactor_on_ranks, axis, case):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


def adafactor_on_ranks(rank: int, axis: Any, case: str) -> fs.Params:
    spec = spec_on(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), axis)
    return trained(spec, fs.optim.adafactor(spec=spec, **ADAFACTOR[case]), torch.float64)


def test_adafactor_of_a_scalar() -> None:
    model = nn.Module()
    model.scalar, model.other = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3, 2, 2))
    spec = fs.policies.whole()(model).on(ALONE)
    init, update = fs.optim.adafactor(0.01, spec)
    params = fs.shard(model, spec)
    state, want = init(params), torch.optim.Adafactor(model.parameters())
    for t in range(3):
        grads = {name: torch.full_like(p, t - 1.5) for name, p in model.named_parameters()}
        params, state = update(fs.shard(grads, spec), state, params)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        want.step()
    assert_close(fs.unshard(params, spec), {name: p.detach() for name, p in model.named_parameters()})


def test_adafactor_of_a_frozen_unit_is_refused() -> None:
    frozen = fs.policies.whole()(nn.Linear(2, 2).requires_grad_(False)).on(ALONE)
    init, _ = fs.optim.adafactor(0.01, frozen)
    with pytest.raises(ValueError, match=r"Adafactor: '' .* frozen"):
        init({"": torch.zeros(16)})


def adafactor_without_a_bias(rank: int) -> str:
    """What a rank says that has nothing of the bias, and one that has."""
    layer = nn.Linear(3, 4)
    spec = fs.policies.whole()(layer).on(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    init, _ = fs.optim.adafactor(0.01, fs.optim.matrices(spec))
    try:
        init(fs.shard(layer, spec))
    except ValueError as error:
        return str(error)
    return ""


def test_adafactor_refuses_on_all_ranks(gloo2: Pool) -> None:
    for said in gloo2.run(adafactor_without_a_bias):
        assert "Adafactor: 'bias' is frozen, or none of the matrices given" in said


# --- options and learning rates ---


def test_options_of_parameters_and_rates_of_steps() -> None:
    """As torch's groups, whose learning rates follow the schedule in their ratio; a number or a tensor."""
    spec = spec_on(ALONE, "shard")
    lrs = [0.1 / (t + 1) for t in range(len(GRADS))]
    plain: dict[str, Any] = {"dtype": torch.float64, "lr": 0.05, "weight_decay": 0.1}
    muon = fs.optim.muon(matrices_on(spec, "muon"), options=lambda name, p: OWN.get(name, {}), **plain)
    got = trained(spec, muon, torch.float64, lambda t: {"lr": lrs[t]})
    want = torch_muon({"lr": 0.05}, torch.float64, OWN, lrs)
    for name in want:
        close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12} if name not in WANTED else {"rtol": 0.02, "atol": 0.02}
        assert_close(got[name], want[name], **close)
    tensors = trained(spec, muon, torch.float64, lambda t: {"lr": torch.tensor(lrs[t], dtype=torch.float64)})
    assert_close(tensors, got, rtol=1e-12, atol=1e-12)
    rest = fs.optim.from_torch(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    given = fs.optim.muon(matrices_on(spec, "muon"), fallback=rest, **plain)
    both = trained(spec, given, torch.float64, lambda t: {"lr": lrs[t], "fallback_lr": 2 * lrs[t]})
    alone = [(torch.optim.AdamW, {"0.weight"}, {"lr": 0.05, "weight_decay": 0.1})]
    assert_close(both["0.weight"], by_torch(alone, torch.float64, {}, [2 * x for x in lrs])["0.weight"])


def test_rates_and_options_that_do_not_fit() -> None:
    spec = spec_on(ALONE, "shard")
    with pytest.raises(ValueError, match=r"options of matrix '1\.0\.weight': expected some of .*, got 'beta'"):
        fs.optim.muon(spec, options=lambda name, p: {"beta": 1} if name == "1.0.weight" else {})
    params = fs.shard(PARAMS, spec)
    init, update = fs.optim.muon(spec, fallback=fs.optim.from_torch(torch.optim.AdamW))
    with pytest.raises(ValueError, match="expected fallback_lr= with it"):
        update(params, init(params), params, lr=0.1)
    init, update = fs.optim.muon(spec, lr=0.0)  # of a warmup
    assert update(params, init(params), params, lr=0.1)[0].keys() == params.keys()
    init, update = fs.optim.muon(spec, lr=0.0, options=lambda name, p: {"lr": 0.1} if name == "2.weight" else {})
    with pytest.raises(ValueError, match="keeps its ratio to the default one: expected that positive"):
        update(params, init(params), params, lr=0.1)
    with pytest.raises(ValueError, match=r"muon: options of matrix '2\.weight': momentum: expected at least 0, got -1"):
        fs.optim.muon(spec, options=lambda name, p: {"momentum": -1} if name == "2.weight" else {})
    wrong = {"lr": -1.0}, {"momentum": float("nan")}, {"steps": 0}, {"steps": 2.5}, {"adjust_lr": "other"}
    for bad in (*wrong, {"coefficients": (1.0, 2.0)}, {"dtype": torch.int32}):
        with pytest.raises(ValueError, match=f"muon: {next(iter(bad))}: expected"):
            fs.optim.muon(spec, **bad)  # pyright: ignore[reportArgumentType]


# --- beside the rest of a step ---


def test_donated() -> None:
    """The same numbers in the memory of what was given, which is dead."""
    spec = spec_on(ALONE, "shard")
    muon = {donate: fs.optim.muon(matrices_on(spec, "muon"), dtype=torch.float64, donate=donate) for donate in (False, True)}
    params = fs.shard(PARAMS, spec)
    grads, state = fs.shard(GRADS[0], spec), muon[True].init(params)
    want = muon[False].update(grads, state, params)
    slices = [x for unit in state.values() for x in unit.slices.values()]
    where = {x.untyped_storage().data_ptr() for x in (*params.values(), *slices)}
    new, after = muon[True].update(grads, state, params)
    assert_close((new, after), want, rtol=0, atol=0)
    news = [*new.values(), *(x for unit in after.values() for x in unit.slices.values())]
    assert {x.untyped_storage().data_ptr() for x in news} == where
    for x in (*params.values(), *slices):
        with pytest.raises(RuntimeError, match="donate"):
            x.sum()


def test_donated_beside_a_rest_that_does_not() -> None:
    """What the rest makes in new memory is written into that of the parameters."""
    spec = spec_on(ALONE, "shard")
    rest = fs.optim.from_torch(torch.optim.AdamW)
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    steps = [fs.optim.muon(matrices_on(spec, "muon"), fallback=rest, donate=donate) for donate in (False, True)]
    want, got = (step.update(grads, step.init(params), params)[0] for step in steps)
    assert_close(got, want, rtol=0, atol=0)


def test_state_of_another_dtype_than_the_parameters() -> None:
    """Momentum in float32, of bfloat16 parameters and of float64 ones, also beside what is no matrix."""

    def step(grad: torch.Tensor, state: Any, param: torch.Tensor) -> Any:
        momentum = state["momentum"] + grad.float() / 3
        return (param.float() - momentum).to(param.dtype), {"momentum": momentum}

    begin = lambda p: {"momentum": p.new_zeros(p.shape, dtype=torch.float32)}  # noqa: E731
    rest = fs.optim.from_torch(torch.optim.AdamW)
    for dtype in (torch.bfloat16, torch.float64):
        spec = spec_of(ALONE, "shard", dtype)
        params, grads = (fs.shard(cast(tree, dtype), spec) for tree in (PARAMS, GRADS[0]))
        known = matrices_on(spec, "muon")
        init, update = fs.optim.by_matrix(begin, step, known, fallback=rest)
        _, state = update(grads, init(params), params)
        momenta = collect(known, {key: unit.slices["momentum"] for key, unit in state.items() if unit.slices})
        assert_close(momenta, {name: GRADS[0][name].to(dtype).float() / 3 for name in momenta}, rtol=0, atol=0)


@pytest.mark.parametrize("make", [fs.optim.muon, fs.optim.shampoo, fs.optim.soap])
def test_derivatives_through_two_steps(make: Any) -> None:
    """With respect to the first gradient, against finite differences."""
    spec = fs.policies.whole()(nn.Linear(4, 3, bias=False).double()).on({"shard": 1})
    init, update = make(spec, **({"dtype": torch.float64} if make is fs.optim.muon else {}))
    params, first, second = ({"": x} for x in torch.randn(3, 12, generator=torch.Generator().manual_seed(0)).double())

    def stepped(grads: torch.Tensor) -> torch.Tensor:
        new, state = update({"": grads}, init(params), params)
        return update(second, state, new)[0][""]

    assert torch.autograd.gradcheck(stepped, first[""].requires_grad_())


@pytest.mark.parametrize("make", [fs.optim.shampoo, fs.optim.soap])
def test_gradients_that_are_not_finite(make: Any) -> None:
    """NaN, as of any optimizer: an error of one owner would leave the others waiting, and a step may be left out afterwards."""
    spec = spec_on(ALONE, "shard")
    params, grads = fs.shard(PARAMS, spec), {**GRADS[0]}
    grads["2.weight"] = grads["2.weight"].clone()
    grads["2.weight"][1, 1] = torch.inf
    init, update = make(matrices_on(spec, "muon"))
    state = init(params)
    new, after = update(fs.shard(grads, spec), state, params)
    _, after = update(fs.shard(grads, spec), after, new)
    full = fs.unshard(new, spec)
    assert not full["2.weight"].isfinite().all()
    assert full["1.2.weight"].isfinite().all()
    kept, of_before = fs.loss_scale.select(torch.tensor(False), (new, after), (params, state))
    assert_close(kept, params, rtol=0, atol=0)
    assert all(x.isfinite().all() for x in pytree.tree_leaves(of_before))


def test_frozen_integer_and_missing() -> None:
    """Units at rest, integers, units and models without matrices, and some of the units alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.arange(3), requires_grad=False))
    policy = fs.by_path({"0": P("shard", at_rest=fs.codecs.int8(block=4)), "1": P("shard"), "2": P("shard")})
    spec = policy(model).on(ALONE)
    params = fs.shard(model, spec)
    trainable, frozen = fs.partition(params, spec)
    init, update = fs.optim.muon(spec)
    with pytest.raises(ValueError, match="unit '0' is at rest in"):
        init(params)
    state = init(trainable)
    new, after = update(trainable, state, trainable)
    assert new.keys() == after.keys() == trainable.keys()
    if integers := {key: p for key, p in params.items() if not p.is_floating_point() and key != "0"}:
        assert_close(update(integers, init(integers), integers)[0], integers)
    for key in trainable:
        some, of_some = update({key: trainable[key]}, {key: state[key]}, {key: trainable[key]})
        assert_close(some[key], new[key], rtol=0, atol=0)
        assert_close(pytree.tree_leaves(of_some[key]), pytree.tree_leaves(after[key]), rtol=0, atol=0)
    assert update({}, {}, {}) == ({}, {})
    assert "1" in trainable
    assert "0" in frozen


def test_what_does_not_fit() -> None:
    """Named before anything is sent."""
    spec = spec_on(ALONE, "shard")
    known = fs.optim.matrices(spec)
    params = fs.shard(PARAMS, spec)
    init, _ = fs.optim.muon(known)
    key = known.by_name["1.0.weight"].unit.key
    bad: list[tuple[Any, str]] = [
        (lambda: init({"other": params[key]}), "'other' is no unit and no parameter of the spec"),
        (lambda: init({"1.0.weight": params[key]}), "'1.0.weight' is a parameter of the spec: expected units"),
        (lambda: init({**params, key: params[key][1:]}), f"unit '{key}': expected this rank's slice of"),
    ]
    first, *others = (nn.Linear(2, 2, bias=False) for _ in range(5))
    two_units = fs.by_path({"*": P("shard", align=1)})(nn.Sequential(first, nn.Sequential(*others)))
    two = fs.optim.matrices(two_units.on({"shard": ProcessAxis(2, 0)}))
    bad += [
        (lambda: two._check_slices({"0": torch.ones(2), "1": torch.ones(8).half()}), "'1.0.weight' is sent together"),
        (lambda: collect(two, {"0": torch.ones(2), "1": torch.ones(8)}), "cannot communicate"),
    ]
    for call, match in bad:
        with pytest.raises(ValueError, match=match):
            call()
    for make in (fs.optim.muon, fs.optim.shampoo, fs.optim.soap):
        init, update = make(known)
        state = init(params)
        of = state[key]
        cut = of._replace(slices={slot: x[1:] for slot, x in of.slices.items()})
        lost = of._replace(owned={n: {slot: x.new_empty(0) for slot, x in some.items()} for n, some in of.owned.items()})
        wrongs = [(cut, "is it of another spec or mesh")] if of.slices else []
        wrongs += [(lost, "expected the shapes")] if any(of.owned.values()) else []
        assert wrongs
        for wrong, match in wrongs:
            with pytest.raises(ValueError, match=match):
                update(params, {**state, key: wrong}, params)
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.ones(2, 3, 2, 2))
    of_four = fs.optim.matrices(fs.policies.whole()(experts).on(ALONE), select=lambda n, p: True)
    with pytest.raises(TypeError, match=r"'weight': expected a real matrix, \[n, m\] or .*, got \[2, 3, 2, 2\]"):
        fs.optim.muon(of_four)
    for select in (lambda n, p: (7, -1), lambda n, p: (-2, -3), lambda n, p: None):
        with pytest.raises(ValueError, match=r"parameter '.*: expected True, False or a shape of as many elements"):
            fs.optim.matrices(spec, select=select)  # pyright: ignore[reportArgumentType]
