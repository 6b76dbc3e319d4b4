"""Steps of whole matrices: torch's own, options and rates, and all else that a step is made of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import matrix_peers as peers
import pytest
import torch
from depth import at_most, depth, each, seldom
from models import of_transformers, refused
from parity import shards_of, squared_loss, step_with
from ranks import mesh_of, real_ranks
from test_by_matrix import ALONE as ON_ONE
from test_by_matrix import GRADS, MODEL, PARAMS, REST, WANTED, collect, matrices_on, spec_on
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P

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
    grads = [cast(tree, dtype) for tree in GRADS]
    return fs.unshard(peers.sharded(spec, pair, cast(PARAMS, dtype), grads, rates)[0], spec)


def spec_of(mesh: Any, axis: Any, dtype: torch.dtype) -> fs.PartitionSpec:
    return fs.by_type(nn.Sequential, nn.Linear, p=P(axis))(copy.deepcopy(MODEL).to(dtype)).on(mesh)


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
    init, update = fs.optim.muon(matrices_on(spec, "muon"), lr=0.02, weight_decay=0.0)
    params = fs.shard(cast(PARAMS, dtype), spec)
    new, _ = update(fs.shard(cast(GRADS[0], dtype), spec), init(params), params)
    got = fs.unshard(new, spec)
    for name in WANTED:
        weight = PARAMS[name].to(dtype, copy=True)
        weight.grad = GRADS[0][name].to(dtype)
        torch.optim.Muon([weight], lr=0.02, weight_decay=0.0).step()
        assert_close(got[name], weight, rtol=0, atol=atol)


ADAFACTOR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"learning_rate": 0.01}, {}),
    "of its own": (
        {"learning_rate": 0.1, "decay_rate": 0.5, "eps": 1e-6, "min_scale": 1e-2, "clipping_threshold": 1.5,
         "weight_decay": 0.1},
        {"lr": 0.1, "beta2_decay": -0.5, "eps": (1e-6, 1e-2), "d": 1.5, "weight_decay": 0.1},
    ),
}  # fmt: skip
"""Options of ours, and of torch's."""
ODD: dict[str, dict[str, Tensor]] = {
    "a scalar": {"scalar": torch.tensor(2.0), "other": torch.ones(3, 2, 2)},
    "a column": {"weight": torch.linspace(-1, 1, 5)[:, None], "bias": torch.linspace(1, 2, 5)},
}


@at_most(1)
@each(axis=["shard", None], case=ADAFACTOR)
@real_ranks(2)
def test_torchs_adafactor_on_real_ranks(rank: int, case: str, axis: Any) -> None:
    """Every parameter, vectors as well."""
    spec, (options, of_torch) = spec_on(mesh_of(2), axis), ADAFACTOR[case]
    got = trained(spec, fs.optim.adafactor(spec=spec, **options), torch.float64)
    assert_close(got, by_torch([(torch.optim.Adafactor, {*PARAMS}, of_torch)], torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("what", ODD)
def test_adafactor_of_odd_shapes(what: str) -> None:
    """What only some parameters have in their own shape stays with the owner."""
    model = nn.ParameterDict({name: x.double() for name, x in ODD[what].items()})
    spec, params = fs.policies.whole()(model).on(ALONE), dict(model.named_parameters())
    grads = [{name: (p + t - 1.5).detach() for name, p in params.items()} for t in range(3)]
    got, _ = peers.sharded(spec, fs.optim.adafactor(0.01, spec), {name: p.detach() for name, p in params.items()}, grads)
    want = torch.optim.Adafactor(params.values())
    for tree in grads:
        step_with(tree, params, want)
    assert_close(fs.unshard(got, spec), {name: p.detach() for name, p in params.items()}, rtol=1e-12, atol=1e-12)


@real_ranks(2)
def test_adafactor_refuses_on_all_ranks(rank: int) -> None:
    """The rank that has nothing of the bias, and one that has; a frozen unit."""
    spec = fs.policies.whole()(nn.Linear(3, 4)).on(mesh_of(2))
    with pytest.raises(ValueError, match="Adafactor: 'bias' is frozen, or none of the matrices given"):
        fs.optim.adafactor(0.01, fs.optim.matrices(spec))[0](fs.shard(nn.Linear(3, 4), spec, check_values=False))
    init, _ = fs.optim.adafactor(0.01, fs.policies.whole()(nn.Linear(2, 2).requires_grad_(False)).on(ALONE))
    refused(ValueError, r"Adafactor: '' .* frozen", lambda: init({"": torch.zeros(16)}))


# --- options and learning rates ---
def test_options_of_parameters_and_rates_of_steps() -> None:
    """As torch's groups, whose learning rates follow the schedule in their ratio; a number or a tensor."""
    spec = ON_ONE
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
    spec = ON_ONE
    with pytest.raises(ValueError, match=r"options of matrix '1\.0\.weight': expected some of .*, got 'beta'"):
        fs.optim.muon(spec, options=lambda name, p: {"beta": 1} if name == "1.0.weight" else {})
    params = fs.shard(PARAMS, spec)
    init, update = fs.optim.muon(spec, fallback=REST)
    refused(ValueError, "expected fallback_lr= with it", lambda: update(params, init(params), params, lr=0.1))
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
    spec = ON_ONE
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
        refused(RuntimeError, "donate", lambda: x.sum())
    # what a rest that does not donate makes in new memory is written into that of the parameters
    steps = [fs.optim.muon(matrices_on(ON_ONE, "muon"), fallback=REST, donate=donate) for donate in (False, True)]
    assert_close(*(peers.sharded(ON_ONE, pair, PARAMS, GRADS[:1])[0] for pair in steps), rtol=0, atol=0)


def test_state_of_another_dtype_than_the_parameters() -> None:
    """Momentum in float32, of bfloat16 parameters and of float64 ones, also beside what is no matrix."""

    def step(grad: torch.Tensor, state: Any, param: torch.Tensor) -> Any:
        momentum = state["momentum"] + grad.float() / 3
        return (param.float() - momentum).to(param.dtype), {"momentum": momentum}

    begin = lambda p: {"momentum": p.new_zeros(p.shape, dtype=torch.float32)}  # noqa: E731
    for dtype in (torch.bfloat16, torch.float64):
        spec = spec_of(ALONE, "shard", dtype)
        params, grads = (fs.shard(cast(tree, dtype), spec) for tree in (PARAMS, GRADS[0]))
        known = matrices_on(spec, "muon")
        init, update = fs.optim.by_matrix(begin, step, known, fallback=REST)
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
    spec = ON_ONE
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
    spec, params = shards_of(policy, model, ALONE)
    trainable, frozen = fs.partition(params, spec)
    init, update = fs.optim.muon(spec)
    refused(ValueError, "unit '0' is at rest in", lambda: init(params))
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
    spec = ON_ONE
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
    two = fs.optim.matrices(two_units.on({"shard": fs.collectives.ProcessAxis(2, 0)}))
    bad += [
        (lambda: two._check_slices({"0": torch.ones(2), "1": torch.ones(8).half()}), "'1.0.weight' is sent together"),
        (lambda: collect(two, {"0": torch.ones(2), "1": torch.ones(8)}), "cannot communicate"),
    ]
    for call, match in bad:
        refused(ValueError, match, call)
    init, update = fs.optim.soap(known)
    state = init(params)
    of = state[key]
    cut = of._replace(slices={slot: x[1:] for slot, x in of.slices.items()})
    lost = of._replace(owned={n: {slot: x.new_empty(0) for slot, x in some.items()} for n, some in of.owned.items()})
    for wrong, match in ((cut, "is it of another spec or mesh"), (lost, "expected the shapes")):
        refused(ValueError, match, lambda: update(params, {**state, key: wrong}, params))
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.ones(2, 3, 2, 2))
    of_four = fs.optim.matrices(fs.policies.whole()(experts).on(ALONE), select=lambda n, p: True)
    refused(TypeError, r"'weight': expected a real matrix, \[n, m\] or .*, got \[2, 3, 2, 2\]", lambda: fs.optim.muon(of_four))
    for select in (lambda n, p: (7, -1), lambda n, p: (-2, -3), lambda n, p: None):
        with pytest.raises(ValueError, match=r"parameter '.*: expected True, False or a shape of as many elements"):
            fs.optim.matrices(spec, select=select)  # pyright: ignore[reportArgumentType]


# --- in training: derivatives, updates in backward, compilation, models of transformers ---
def of_your_own(mesh: Any, axis: str | None, what: str) -> Any:
    """Of two steps: derivatives with respect to the first one's gradients, or new parameters for a batch of two of these."""

    def step(grad: Tensor, state: Any, param: Tensor) -> tuple[Tensor, Any]:
        momentum = 0.9 * state["momentum"] + grad
        new = {"momentum": momentum, "length": state["length"] + grad.norm()}
        return param - 0.1 * momentum / new["length"], new

    spec = spec_on(mesh, axis)
    rest = lambda params: {key: {} for key in params}, lambda grads, state, params: (params, state)
    begin = lambda p: {"momentum": torch.zeros_like(p), "length": p.new_zeros(())}  # noqa: E731
    init, update = fs.optim.by_matrix(begin, step, matrices_on(spec, "muon"), fallback=rest)
    params, grads, later = (fs.shard(tree, spec) for tree in (PARAMS, GRADS[0], GRADS[1]))
    state = init(params)
    squares = lambda tree: sum((x**2).sum() for x in tree.values())  # noqa: E731

    def stepped(grads: fs.Params) -> fs.Params:
        """The parameters do not take part in the second step's derivative: on other ranks than the owner nothing does."""
        return update(later, update(grads, state, params)[1], params)[0]

    if what == "batch":
        new = torch.func.vmap(stepped)({key: torch.stack([g, 2 * g]) for key, g in grads.items()})
        return fs.unshard({key: x[1] for key, x in new.items()}, spec)
    return fs.unshard(torch.func.grad(lambda grads: squares(stepped(grads)))(grads), spec)


@at_most(3)
@each(what=["gradients", "batch"], axis=["shard", None])
@real_ranks(2)
def test_transforms_of_an_update_of_your_own(rank: int, axis: str | None, what: str) -> None:
    """Ranks that own a matrix and ranks that do not send the same things, whatever the update makes of what."""
    warnings.filterwarnings("ignore", "There is a performance drop")
    assert_close(of_your_own(mesh_of(2), axis, what), of_your_own(ALONE, axis, what), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("donate", [False, True])
@real_ranks(2)
def test_in_backward(rank: int, donate: bool) -> None:
    """The step of all units at once."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5)).double()
    spec = fs.by_type(nn.Linear)(model).on(mesh_of(2))
    update, inside = (fs.optim.muon(spec, dtype=torch.float64, donate=donate).update for donate in (False, donate))
    params = fs.shard(model, spec)
    state = fs.optim.muon(spec, dtype=torch.float64).init(params)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double()

    loss = squared_loss(model, spec, x)
    for _ in range(2):
        want = update(fs.grad(loss)(params), state, params)
        got = fs.update_in_backward(inside, lambda p, _: loss(p), params, state, [x], spec=spec)
        assert_close((got.params, got.state), want, rtol=1e-9, atol=1e-9)
        params, state = got.params, got.state


@seldom
def test_compiled() -> None:
    """As one graph the same numbers. The rest is plain: what `from_torch` asks of its tensors torch.compile cannot trace."""
    spec = ON_ONE
    rest = lambda params: {key: {} for key in params}, lambda grads, state, params: ({k: -g for k, g in grads.items()}, state)
    init, update = fs.optim.muon(matrices_on(spec, "muon"), dtype=torch.float64, fallback=rest, steps=depth(2, 5))
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    state = init(params)
    got = torch.compile(update, backend=depth("eager", "aot_eager"), fullgraph=True)(grads, state, params)
    assert_close(got, update(grads, state, params), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_of_transformers(tied: bool) -> None:
    """Those of the layers and no others, tied embeddings and heads neither."""
    made = of_transformers("llama_tied", 1, tie_word_embeddings=tied)
    spec = fs.by_type(*made.blocks)(made.model).on(ALONE)
    layers = {n for n, p in made.model.named_parameters() if p.dim() == 2 and ".layers." in n}
    assert layers
    assert set(fs.optim.matrices(spec, select=fs.optim.hidden(made.model)).by_name) == layers
