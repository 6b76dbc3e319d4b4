"""What a wrong spec, wrong params or a changed model say: the path, what was expected and what was there (law S5)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from depth import every
from models import module_class, refused
from torch import nn

import funshard as fs
from funshard import P, Params, PartitionSpec
from funshard._transforms import products

MODEL = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
SPEC = fs.by_type(nn.Linear, p=fs.P("shard", align=4))(MODEL).on({"shard": 2})
PARAMS = fs.shard(MODEL, SPEC, rank=0)
POLICY = fs.by_type(nn.Linear)
ONE = SPEC.on({"shard": 1})
X = torch.ones(1, 3)
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
COUNTS = nn.Module()
COUNTS.register_parameter("count", nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))

READERS: dict[str, Callable[[Params], object]] = {
    "unshard": lambda params: fs.unshard(params, SPEC),
    "to the host": lambda params: fs.unshard(params, SPEC, offload_to_cpu=True),
    "reshard": lambda params: fs.reshard(params, SPEC, SPEC),
    "param_views": lambda params: fs.param_views(params, SPEC, rank=0),
    "functional_call": lambda params: fs.functional_call(MODEL, params, (X,), spec=SPEC),
}
TAKE_A_PART = ("unshard", "to the host", "reshard")
BAD_PARAMS: dict[str, tuple[Params, type[Exception], str]] = {
    "missing": ({"0": PARAMS["0"]}, ValueError, r"unit '1' is missing: expected a buffer of 4 elements, got units \['0'\]"),
    "unknown": ({**PARAMS, "7": X}, ValueError, r"unit '7' is not in the spec: expected units \['0', '1'\]"),
    "shape": ({**PARAMS, "1": X}, ValueError, r"unit '1': expected a 1-D buffer of 4 elements, got shape \[1, 3\]"),
    "a list": ([*PARAMS.values()], TypeError, r"params: expected a dict of tensors by unit key or parameter name, got list"),
    "the model": (MODEL, TypeError, r"params: expected a dict .*, got Sequential; fs\.shard\(model, spec\) gives them"),
    "not a tensor": ({**PARAMS, "1": [0.0]}, TypeError, r"unit '1': expected a tensor, got list"),
    "full": (FULL, ValueError, r"unit '0\.weight' is not in the spec: expected units \['0', '1'\]"),
    "another policy": (
        fs.shard(MODEL, fs.policies.whole()(MODEL).on({"shard": 2}), rank=0),
        ValueError,
        r"unit '' is not in the spec: expected units \['0', '1'\].*another spec",
    ),
    "another mesh": (
        fs.shard(MODEL, SPEC.on({"shard": 4}), rank=0),
        ValueError,
        r"unit '0': expected a 1-D buffer of 8 elements, got shape \[4\].*another mesh",
    ),
}


@every(bad=sorted(BAD_PARAMS), reader=sorted(READERS))
def test_params_that_do_not_fit_the_spec(reader: str, bad: str) -> None:
    """Everything that takes shards says which unit is wrong, what it expected and what it got."""
    params, error, match = BAD_PARAMS[bad]
    if (reader, bad) == ("functional_call", "full"):  # it takes these as well
        assert torch.equal(READERS[reader](params), MODEL(X))
        return
    if bad == "missing" and reader in TAKE_A_PART:  # it gets as far as the gather, for which there is no process group
        match = "an axis of 2 ranks without a process group cannot communicate"
    refused(error, match, lambda: READERS[reader](params))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({**PARAMS, "1.weight": FULL["1.weight"]}, r"parameter '1\.weight': expected the shard of its unit '1' or .* got both"),
        ({"0": PARAMS["0"], "1.weight": X}, r"parameter '1\.weight' of unit '1': expected shape \[2, 4\], got \[1, 3\]"),
        ({"1": PARAMS["1"], "0.bias": FULL["0.bias"]}, r"parameter '0\.weight' of unit '0' is missing"),
    ],
    ids=["twice", "shape", "some"],
)
def test_full_parameters_that_do_not_fit_the_spec(params: Params, message: str) -> None:
    """functional_call takes a unit's full parameters in the place of its shard: all of them, and not beside it."""
    refused(ValueError, message, lambda: READERS["functional_call"](params))


TIED = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
TIED[1].weight = TIED[0].weight
ON_TIED = fs.policies.whole()(TIED)
TAKE_FULL: dict[str, Callable[[Params], object]] = {
    "shard": lambda params: fs.shard(params, ON_TIED),
    "scatter_full": lambda params: fs.shard(params, ON_TIED, src=0),
    "functional_call": lambda params: fs.functional_call(TIED, params, (X,), spec=ON_TIED),
    "differentiated": lambda params: torch.func.vjp(lambda p: fs.shard(p, ON_TIED), params),
}


@pytest.mark.parametrize("taker", sorted(TAKE_FULL))
def test_two_tensors_for_a_tied_parameter(taker: str) -> None:
    """The second was dropped, torch.func raises; one value under all names, as in a state_dict or a file, is right."""
    weight = TIED[0].weight.detach()
    right = TAKE_FULL[taker]({"0.weight": weight})
    if taker != "differentiated":  # there each has a gradient of its own
        for second in (weight, weight.detach(), weight.clone()):
            got = TAKE_FULL[taker]({"0.weight": weight, "1.weight": second})
            torch.testing.assert_close(got, right, rtol=0, atol=0)
        torch.testing.assert_close(TAKE_FULL[taker](TIED.state_dict()), right, rtol=0, atol=0)
    words = r"parameter '1\.weight' of unit '' is tied, .*'0\.weight', '1\.weight'\]: expected one tensor, got"
    refused(ValueError, words, lambda: TAKE_FULL[taker]({"0.weight": weight, "1.weight": weight + 1}))


Scaled = type("Scaled", (nn.Parameter,), {"scale": 3.0})
"""A parameter that forward multiplies by what its class keeps."""
ReadsClass = module_class(
    "ReadsClass",
    lambda: {"weight": Scaled(torch.ones(2))},
    lambda self, x: x * self.weight * (self.weight.scale if isinstance(self.weight, Scaled) else 1),
)


def test_a_parameter_of_a_class_of_its_own() -> None:
    """A call gives forward plain tensors, without the class: an error in the policy and in shard, unless it is ignored."""
    model, words = nn.Sequential(ReadsClass()), r"parameter '0\.weight' is a Scaled: expected an nn\.Parameter"
    refused(TypeError, words, lambda: fs.policies.whole()(model))
    x = torch.ones(1, 2)
    spec = fs.policies.ignoring(fs.policies.whole(), params=["0.weight"])(model)
    assert torch.equal(fs.functional_call(model, fs.shard(model, spec), (x,), spec=spec), 3 * x)
    plain = nn.Sequential(ReadsClass())
    plain[0].weight = nn.Parameter(torch.ones(2))
    refused(TypeError, words, lambda: fs.shard(model, fs.policies.whole()(plain)))


def on_one(double: Sequence[str] = ()) -> Params:
    return {key: shard.double() if key in double else shard for key, shard in fs.shard(MODEL, ONE).items()}


def changed(change: Callable[[nn.Module], object]) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    change(model)
    return model


def _tied() -> tuple[nn.Module, PartitionSpec]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    spec = fs.policies.whole()(model).on({"shard": 1})
    model[1].weight = nn.Parameter(torch.zeros(3, 3))
    return model, spec


def functions_of_specs() -> Iterator[tuple[str, Any]]:
    """Every public function with an argument ``spec``."""
    for module in (fs, *(getattr(fs, name) for name in ("optim", "checkpoint", "loss_scale", "averaging", "testing"))):
        for name in module.__all__:
            if inspect.isfunction(function := getattr(module, name)) and "spec" in inspect.signature(function).parameters:
                yield f"{module.__name__}.{name}", function


STAND_INS = {"model": MODEL, "batch": X, "order": 1, "optimizer_class": torch.optim.AdamW}
STAND_INS |= dict.fromkeys(("params", "grads", "shards"), PARAMS)


@pytest.mark.parametrize("name", dict(functions_of_specs()))
def test_a_policy_is_no_spec(name: str) -> None:
    """In every public function: the error says to call it."""
    function = dict(functions_of_specs())[name]
    needed = (p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD)
    given = {p.name: POLICY if p.name == "spec" else STAND_INS.get(p.name, 1) for p in needed}
    words = r"spec: expected a PartitionSpec, got the policy by_type\(Linear\); call it on the model"
    refused(TypeError, words, lambda: function(**given | {"spec": POLICY}))


GROWN = changed(lambda m: m.append(nn.Linear(2, 2)))
WIDER = changed(lambda m: setattr(m, "1", nn.Linear(4, 5, bias=False)))
SHORTER = changed(lambda m: m.pop(1))

MISTAKES: dict[type[Exception], dict[str, Callable[[], object]]] = {
    TypeError: {
        r"spec: expected a PartitionSpec such as .*, got P$": lambda: fs.unshard(PARAMS, P()),
        r"params: expected a dict of tensors .*, got list": lambda: fs.reduce_grads([*FULL.values()], SPEC),
        r"params: expected a .* of tensors .*, got list": lambda: fs.partition([*PARAMS.values()], SPEC),
        r"params: expected .* of tensors .*, got list": lambda: fs.shard([*FULL.values()], SPEC, rank=0),
        r"must be Tensor, not list": lambda: fs.functional_call(MODEL, on_one(), [X], spec=ONE),
        r"unit '0': expected a floating point dtype such as torch\.float32, got torch\.int64": lambda: fs.functional_call(
            MODEL, {k: p.long() for k, p in PARAMS.items()}, X, spec=SPEC
        ),
        r"unit '1': expected a floating point dtype such as torch\.float32, got torch\.complex64": lambda: fs.functional_call(
            MODEL, {**FULL, "1.weight": FULL["1.weight"].cfloat()}, X, spec=SPEC
        ),
        r"\[''\]: expected a floating point tensor, got torch\.int64; set it apart with partition": lambda: fs.grad(
            lambda params: params[""].sum()
        )(fs.shard(COUNTS, fs.policies.whole()(COUNTS).on({"shard": 1}), rank=0)),
        r"\['b'\]: expected a floating point tensor, got torch\.bool": lambda: fs.grad(lambda params: params["a"].sum())(
            {"a": X, "b": X.bool()}
        ),
    },
    RuntimeError: {r"same dtype": lambda: fs.functional_call(MODEL, on_one(double=["1"]), X, spec=ONE)},
    ValueError: {
        r"unit '1' is missing: .* got units \['0'\]": lambda: fs.unshard({"0": on_one()["0"]}, ONE, units=["1"]),
        r"unit '': unknown mesh axis 'x'.*one of \('shard',\)": lambda: fs.policies.whole(P("x"))(MODEL).on({"shard": 2}),
        r"'1\.weight' of unit '' is tied, .*: expected one tensor, got two": lambda: fs.shard(*_tied(), rank=0),
        r"'2\.weight' is not in the spec.*changed after": lambda: fs.functional_call(GROWN, PARAMS, X, spec=SPEC),
        r"'1\.weight' of unit '1'.*got none.*changed": lambda: fs.functional_call(SHORTER, PARAMS, X, spec=SPEC),
        r"expected shape \[2, 4\].*got shape \[5, 4\]": lambda: fs.functional_call(WIDER, PARAMS, X, spec=SPEC),
        r"'0\.weight' of unit '0': expected torch\.float64 as '0\.bias' has, got torch\.float32": lambda: fs.flatten(
            {**FULL, "0.bias": torch.ones(4).double()}, SPEC
        ),
        r"rank 2 is not on the mesh of sizes \[2\]: expected 0\.\.1": lambda: fs.shard(MODEL, SPEC, rank=2),
        r"sizes \[2\] does not know its rank: expected rank=0\.\.1": lambda: fs.param_views(PARAMS, SPEC),
        r"unit '2' is not in the spec: expected some of \['0',": lambda: fs.unshard(PARAMS, SPEC, units=["2"]),
        r"unit '0': expected a 1-D buffer of 16 elements, got shape \[8\]": lambda: fs.unflatten(PARAMS, SPEC),
        r"parameter '2\.(weight|bias)' is in the new spec only: expected two specs of one model": lambda: fs.reshard(
            PARAMS, SPEC, fs.policies.whole()(GROWN).on({"shard": 2})
        ),
        r"'2' is no unit and no parameter of the spec: expected some of": lambda: fs.partition({"2": X}, SPEC),
        r"'a' is in two parts: expected disjoint ones": lambda: fs.combine({"a": X}, {"a": X}),
    },
}
CALLS: dict[str, Callable[[nn.Module], object]] = {
    "policy": lambda model: POLICY(model),
    "shard": lambda model: fs.shard(model, SPEC, rank=0),
    "functional_call": lambda model: fs.functional_call(model, on_one(), X, spec=ONE),
}


@pytest.mark.parametrize(
    ("error", "match", "call"), [(error, words, make) for error, rows in MISTAKES.items() for words, make in rows.items()]
)
def test_bad_input(call: Callable[[], object], error: type[Exception], match: str) -> None:
    """Each mistake is an error that names the path, what was expected and what was there."""
    refused(error, re.compile(match, re.DOTALL), call)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_compiled_models(call: str) -> None:
    """What torch.compile makes of a module has other names: it is named, also inside of a model and compiled in place."""
    wrapped = torch.compile(MODEL, backend="eager")
    match = r"module '{}' is what torch\.compile\({}\) gives: expected the module itself \(its _orig_mod\)"
    refused(TypeError, match.format("", "Sequential"), lambda: CALLS[call](wrapped))
    with pytest.raises(TypeError, match=match.format("1", "Linear")):
        CALLS[call](changed(lambda m: setattr(m, "1", torch.compile(m[1], backend="eager"))))
    in_place = changed(lambda m: m.compile(backend="eager"))  # which is no unit that the policy chose
    if call != "functional_call":  # names and values are the module's own
        CALLS[call](in_place)
        return
    with pytest.raises(TypeError, match=r"module '' was compiled in place by \.compile\(\).*compile what calls it"):
        CALLS[call](in_place)


def square(params: Params, x: torch.Tensor) -> torch.Tensor:
    return fs.functional_call(MODEL, params, (x,), spec=ONE).square().sum()


IDENTITY = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
BY_AUTOGRAD: dict[str, Callable[[Params], object]] = {
    "grad": lambda params: fs.grad(square)(params, X),
    "accumulate": lambda params: fs.accumulate(square, params, [X], spec=ONE),
    "update_in_backward": lambda params: fs.update_in_backward(IDENTITY[1], square, params, IDENTITY[0](params), [X], spec=ONE),
    "ggnvp": lambda params: products.ggnvp(
        lambda p: fs.functional_call(MODEL, p, (X,), spec=ONE), lambda y: y.square().sum(), params, params
    ),
}


@pytest.mark.parametrize("name", sorted(BY_AUTOGRAD))
def test_inference_mode(name: str) -> None:
    """Gradients in it were zeros without a word; of shards that were made in it the error was torch's."""
    with torch.inference_mode(), pytest.raises(RuntimeError, match=rf"{name}.*: called in torch\.inference_mode\(\)"):
        BY_AUTOGRAD[name](on_one())
    with torch.inference_mode():
        params = on_one()
    words = r"argument\['0'\] was made in torch\.inference_mode\(\), .* the \.clone\(\) of each"
    refused(RuntimeError, rf"{name}.*: {words}", lambda: BY_AUTOGRAD[name](params))
    with torch.no_grad():
        BY_AUTOGRAD[name]({key: x.clone() for key, x in params.items()})


def test_outputs_that_are_no_loss() -> None:
    """As models of transformers give them: an object with a loss, which is None without labels."""
    words = r"expected f to return a tensor, got SimpleNamespace; return its \.loss$"
    refused(TypeError, words, lambda: fs.grad(lambda x: SimpleNamespace(loss=x.sum()))(X))
    words = r"got NoneType; is there a return, and, for a \.loss of transformers, labels= in the call"
    refused(TypeError, words, lambda: fs.grad(lambda x: None)(X))


def test_a_skeleton_that_is_called() -> None:
    words = r"^skeleton: Sequential was called and has no values: expected fs\.functional_call"
    refused(RuntimeError, words, lambda: fs.skeleton(MODEL)(X))


MATRIX: dict[str, Any] = {"muon": fs.optim.muon, "shampoo": fs.optim.shampoo, "soap": fs.optim.soap}


@pytest.mark.parametrize("make", [*MATRIX, "AdamW"])
def test_a_rate_or_trees_that_are_none(make: str) -> None:
    """Of all parameters, as the option of one, and in a step, before anything is sent or written to donated memory."""
    of = MATRIX.get(make, partial(fs.optim.from_torch, torch.optim.AdamW))
    said = "lr: expected a number or a tensor of one, got list; a schedule is a function"
    refused(TypeError, said, lambda: of(spec=ONE, lr=[0.1]))
    words = rf"options of (matrix|parameter) '0\.(weight|bias)'.*{said}"
    refused(TypeError, words, lambda: of(spec=ONE, options=lambda name, param: {"lr": [0.1]}))
    init, update = of(spec=ONE, donate=True)
    params = on_one()
    before, state, given = {key: x.clone() for key, x in params.items()}, init(params), [*params.values()]
    for which in ("lr", "fallback_lr")[: 1 + (make in MATRIX)]:
        words = rf"^{which}: expected a number or a tensor of one, got list; a schedule is a"
        refused(TypeError, words, lambda: update(before, state, params, **{which: [0.1]}))
    for what, call in {
        "params": lambda: init(given),
        "grads": lambda: update(given, state, params),
        **({"state": lambda: update(before, given, params)} if make in MATRIX else {}),
    }.items():
        refused(TypeError, rf"^{what}: expected a dict (of tensors )?by unit key.*, got list", call)
    assert all(torch.equal(x, before[key]) for key, x in params.items())
