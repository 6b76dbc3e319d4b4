"""Law S6, policies that have a namesake in torch.distributed.fsdp.wrap, which select the very same modules, and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from depth import at_most
from hypothesis import example, given
from hypothesis import strategies as st
from models import ARCHITECTURES, build, module_class, refused
from strategies import OtherResidualNode, ResidualNode, modules
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, apply_activation_checkpointing
from torch.distributed.fsdp import wrap
from torch.nn.modules.batchnorm import _BatchNorm
from wrap_oracle import NESTED, Wrapper, assert_same, lambdas, owning, sequential, size, torch_units, units_of, wide, wrapped

import funshard as fs
from funshard.policies import always, by_group, custom, full_precision, ignoring, override, whole

TREES = modules(tied=False)


def by_type(model: nn.Module, *classes: type[nn.Module], ignored: Collection[str] = ()) -> fs.Policy:
    """Ours; where the model has no such module torch's selects nothing, and ours is an error."""
    left = [m for path, m in model.named_modules() if not any(f"{path}.".startswith(f"{gone}.") for gone in ignored)]
    if any(isinstance(m, classes) for m in left):
        return fs.by_type(*classes)
    with pytest.raises(ValueError, match=r"by_type: no module is of .*: expected classes of the model's modules"):
        fs.policies.ignoring(fs.by_type(*classes), modules=ignored)(model)
    return fs.policies.whole()


@given(TREES)
def test_a1_a2_policies_are_functions_and_specs_are_policies(model: nn.Module) -> None:
    """Any function from a tree to a spec is a policy; what a spec selected selects the same again."""

    def mine(model: nn.Module | fs.ModuleTree) -> fs.PartitionSpec:
        tree = model if isinstance(model, fs.ModuleTree) else fs.module_tree(model)
        return fs.by_path({node.path: fs.P("shard") for node in tree.nodes() if wide(node.module)})(tree)

    spec = fs.policies.custom(wide)(model)
    assert mine(model) == spec == fs.by_path(dict(spec.selected))(model)
    assert fs.policies.override(mine, fs.policies.whole())(model) == spec
    assert fs.policies.override(fs.policies.whole(), mine)(fs.module_tree(model)) == spec


@given(TREES)
def test_a3_by_type_is_module_wrap_policy(model: nn.Module) -> None:
    """Instances of the classes, subclasses too; as an object and as a callable in an or-policy, and by its two namesakes."""
    for classes in [(OtherResidualNode,), (ResidualNode,), (nn.ModuleList, OtherResidualNode), (nn.Module,), (nn.Linear,)]:
        for theirs in (
            wrap.ModuleWrapPolicy(classes),
            partial(wrap._or_policy, policies=[wrap.ModuleWrapPolicy(classes)]),
            partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={*classes}),
            partial(wrap._wrap_module_cls_individually, module_classes=[*classes]),
        ):
            assert_same(model, by_type(model, *classes), theirs)


@given(TREES)
def test_a4_custom_is_custom_policy(model: nn.Module) -> None:
    """False and {} select nothing, True the options of the policy, a dict overrides some of them."""

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return [False, True, {}, {"align": 4}][(len(module._parameters) + isinstance(module, OtherResidualNode)) % 4]

    options = {"axis": "shard", "reshard": False}
    targets = wrap.CustomPolicy(choose)._run_policy(model, set(), options)
    expected = {path: fs.P(**targets[m]) for path, m in model.named_modules() if m in targets}
    assert dict(fs.policies.custom(choose, fs.P(**options))(model).selected) == expected
    assert_same(model, fs.policies.custom(choose), wrap.CustomPolicy(lambda m: bool(choose(m))))
    assert_same(model, fs.policies.custom(wide), lambdas(wide))
    assert_same(model, fs.policies.custom(lambda m: m is not model), lambdas(lambda m: True))  # torch does not ask of the root


@given(TREES)
def test_a7_always_is_always_wrap_policy(model: nn.Module) -> None:
    """Less the modules without parameters of their own, which own nothing in torch either."""
    ours, theirs = units_of(fs.policies.always()(model)), torch_units(model, wrap.always_wrap_policy)
    assert owning(ours) == owning(theirs)
    assert ours.keys() - {""} == owning(theirs).keys() - {""}


@given(
    TREES,
    st.integers(0, 25),
    st.sampled_from([(), (OtherResidualNode,), (ResidualNode,)]),
    st.sampled_from([(), (OtherResidualNode,), (nn.ModuleList,)]),
)
def test_a8_by_size_is_size_based_auto_wrap_policy(
    model: nn.Module, least: int, leaves: tuple[type[nn.Module], ...], excluded: tuple[type[nn.Module], ...]
) -> None:
    """Any threshold (inclusive), any sets of forced leaves and excluded classes; given sets replace the defaults."""
    assert_same(model, fs.by_size(least), size(least))
    options = size(least, force_leaf_modules=set(leaves), exclude_wrap_modules=set(excluded))
    assert_same(model, fs.by_size(least, force_leaf=leaves, exclude=excluded), options)


@given(TREES, st.data())
def test_a16_ignoring_is_ignored_modules(model: nn.Module, data: st.DataObject) -> None:
    """Ignored subtrees are no units, own no parameters and count nothing towards a threshold."""
    ignored = data.draw(st.sets(st.sampled_from([path for path, _ in model.named_modules() if path] or ["none"]), max_size=2))
    ignored.discard("none")
    assert_same(model, by_type(model, OtherResidualNode, ignored=ignored), wrap.ModuleWrapPolicy([OtherResidualNode]), ignored)
    assert_same(model, fs.policies.custom(wide), wrap.CustomPolicy(wide), ignored)
    assert_same(model, fs.by_size(6), size(6), ignored)


@given(TREES)
def test_a18_override_is_or_policy(model: nn.Module) -> None:
    """Selected by any; a never-policy adds nothing."""
    never = fs.policies.custom(lambda m: False)
    both = partial(wrap._or_policy, policies=[lambdas(wide), wrap.ModuleWrapPolicy([OtherResidualNode])])
    policy = fs.policies.override(fs.policies.override(fs.policies.custom(wide), never), by_type(model, OtherResidualNode))
    assert_same(model, policy, both)


@given(modules())
def test_a3_shared_modules_are_selected_as_in_torch(model: nn.Module) -> None:
    """With sharing as well: a module once, at its first path; each parameter in one unit above all its uses."""
    tree, spec = fs.module_tree(model), by_type(model, OtherResidualNode)(model)
    targets = wrap.ModuleWrapPolicy([OtherResidualNode])._run_policy(model, set(), {})
    assert [node.module for node in tree.nodes() if node.path in dict(spec.selected)] == list(targets)


@at_most(6)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_s6_architectures_are_cut_as_torch_cuts_them(name: str) -> None:
    """Real models, on the meta device: by block class, every module, and by size where no weights are tied."""
    with torch.device("meta"):
        made = build(name, 1)
    spec = fs.by_type(*made.blocks)(made.model)
    assert units_of(spec) == torch_units(made.model, wrap.ModuleWrapPolicy(made.blocks))
    assert len(spec.selected) == sum(isinstance(m, made.blocks) for m in made.model.modules()) > 0
    if not any(param.aliases for param in fs.module_tree(made.model).all_params):
        assert owning(units_of(fs.policies.always()(made.model))) == owning(torch_units(made.model, wrap.always_wrap_policy))
        for least in (0, 16, 64, 100, 300, 1000):
            assert_same(made.model, fs.by_size(least), size(least))


def test_a_policy_that_names_modules_pickles_with_them() -> None:
    """In one pickle with the model it ignores the same module there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    policy = fs.policies.ignoring(fs.policies.always(), modules=[model[0]], params=[model[1].bias])
    loaded_policy, loaded_model = pickle.loads(pickle.dumps((policy, model)))
    assert loaded_policy(loaded_model) == policy(model)


# --- What policies refuse: where, what was expected, what came ---
MODEL = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
W = whole()
NO_MODULE = "by_type: no module is of"
KINDS = "ignoring: modules: expected path patterns, module classes or modules, got "
WHOLE_NUMBER = "expected a whole number of modules, at least 1"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fs.by_type(), ValueError, r"by_type: expected at least one module class, got none; whole\(\) makes one unit"),
        (lambda: fs.by_type(int), TypeError, r"by_type: expected subclasses of nn\.Module, got <class 'int'>"),
        (lambda: whole("shard"), TypeError, r"whole: expected a P such as P\('shard'\), got 'shard'; write P\('shard'\)"),
        (lambda: whole(None), TypeError, r"whole: expected a P such as P\('shard'\), got None$"),
        (lambda: always(("a", "b")), TypeError, r"always: .* got \('a', 'b'\); write P\(\('a', 'b'\)\)"),
        (lambda: fs.by_path({"m": "shard"}), TypeError, r"by_path: pattern 'm': expected a P such as .*, got 'shard'"),
        (lambda: fs.by_path({0: fs.P()}), TypeError, r"by_path: expected path patterns such as 'blocks\.\*', got 0"),
        (lambda: fs.by_path(["0"]), TypeError, r"by_path: expected a dict of path patterns and P, got list"),
        (lambda: fs.by_size(exclude=["Linear"]), TypeError, r"by_size: expected subclasses of nn\.Module, got 'Linear'"),
        (lambda: ignoring(W, "0"), TypeError, r"ignoring: modules: expected an iterable, got str; put it in a list"),
        (lambda: ignoring(W, [], 3), TypeError, r"ignoring: params: expected an iterable, got int; put it in a list"),
        (lambda: ignoring(W, [int]), TypeError, rf"{KINDS}type"),
        (lambda: ignoring(W, [3]), TypeError, rf"{KINDS}int"),
        (lambda: ignoring(W, [], [nn.ReLU()]), TypeError, r"ignoring: params: expected name patterns or parameters, got ReLU"),
        *(
            (lambda n=n: by_group(["0"], size=n), ValueError, rf"by_group: size: {WHOLE_NUMBER}, got {n}")
            for n in (0, True, 1.5)
        ),
    ],
)
def test_wrong_when_made(make: Callable[[], object], error: type[Exception], message: str) -> None:
    """Before any model is seen (test_ignored_modules_invalid: wrong types are named)."""
    refused(error, message, lambda: make())


@pytest.mark.parametrize("result", [None, 1, "True", [], nn.ReLU()])
def test_a4_custom_gives_a_bool_or_a_dict(result: object) -> None:
    """Anything else is refused with the path and the result, as CustomPolicy refuses it."""
    with pytest.raises(ValueError, match=r"custom: module '1\.0': expected <function .*> to give a bool or a dict, got"):
        custom(lambda m: result if m is MODEL[1][0] else False)(MODEL)
    with pytest.raises(TypeError, match=r"custom: module '1\.0': P: reshard: expected True, False, .*, got 3"):
        custom(lambda m: {"reshard": 3} if m is MODEL[1][0] else False)(MODEL)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            custom(lambda m: {"strategy": 1} if m is MODEL[1] else False),
            r"custom: module '1': P has no field 'strategy': expected",
        ),
        (
            fs.by_type(nn.Conv2d, nn.LayerNorm),
            rf"{NO_MODULE} Conv2d, LayerNorm: .*\['Sequential', 'Linear'\]; whole\(\) makes one unit",
        ),
        (ignoring(fs.by_type(nn.Linear), [nn.Linear]), rf"{NO_MODULE} Linear: .* some of \['Sequential'\]"),
        (fs.by_path({"10": fs.P()}), r"by_path: pattern '10' matches no module: expected a path such as .*'1'"),
        (
            fs.by_path({"*.0": fs.P(), "1.*": fs.P("x")}),
            r"module '1\.0' is matched by '\*\.0' \(P\(\)\) and by '1\.\*' \(P\('x'\)\): expected",
        ),
        (ignoring(W, ["2"]), r"ignoring: modules: '2' matches no module: expected some of \['', '0', '1', '1\.0'\]"),
        (ignoring(W, params=["*.scale"]), r"ignoring: params: '\*\.scale' matches no parameter of the model"),
        (ignoring(W, [""]), r"ignoring: modules: the root '' is ignored: expected something left to shard"),
    ],
)
def test_wrong_for_this_model(policy: fs.Policy, message: str) -> None:
    """When the policy meets the model: every message names the path or the pattern."""
    refused(ValueError, message, lambda: policy(MODEL))


def test_names_that_look_like_patterns() -> None:
    """A component that is a module's very name matches it, and is more literal than one that only matches: the most literal
    pattern rules, and ** stands for any number of components."""
    model = nn.ModuleDict({"[z]": nn.Linear(2, 2), "z": nn.Linear(2, 2), "*": nn.Linear(2, 2), "a?": nn.Linear(2, 2)})
    assert set(fs.by_path({"[z]": fs.P("a")})(model).by_path) == {"", "[z]", "z"}
    chosen = dict(fs.by_path({"[z]": fs.P("a"), "z": fs.P("b"), "*": fs.P("c")})(model).selected)
    assert {path: p.axis for path, p in chosen.items()} == {"": "c", "[z]": "a", "z": "b", "*": "c", "a?": "c"}
    assert dict(fs.by_path({"[[]z]": fs.P("a")})(model).selected).keys() == {"[z]"}
    assert set(ignoring(whole(), modules=["a?"])(model).ignored) == {"a?.weight", "a?.bias"}
    spec = fs.by_path({"**": fs.P("a"), "*.0": fs.P("b"), "1.0": fs.P("c"), "0": fs.P("d")})(MODEL)
    assert {path: p.axis for path, p in spec.selected} == {"": "a", "0": "d", "1": "a", "1.0": "c"}


def odd(module: nn.Module) -> bool:
    return len(module._parameters) % 2 == 1


def test_policies_print_as_what_made_them() -> None:
    """Classes by name, `P` where it is not the default, what is inside of combinators as well.

    Out of a pickle, as arguments of torch.multiprocessing.spawn are, or a copy, they print alike and give the same spec.
    """
    policies = [
        whole(), whole(fs.P()), always(p=fs.P("shard", remat=True)), fs.by_type(nn.Linear, nn.ReLU), fs.by_size(10),
        custom(odd), fs.by_path({"0": fs.P()}), override(whole(), fs.by_path({"1": fs.P("x")})),
        ignoring(whole(), ["0"], ["1.0.bias"]), full_precision(whole(), nn.LayerNorm),
    ]  # fmt: skip
    assert [repr(policy) for policy in (*policies, ignoring(whole(), [MODEL[0]], [MODEL[0].bias]))] == [
        "whole()", "whole(p=P())", "always(p=P('shard', remat=True))", "by_type(Linear, ReLU)", "by_size(10)",
        "custom(odd)", "by_path({'0': P()})", "override(whole(), by_path({'1': P('x')}))",
        "ignoring(whole(), ['0'], ['1.0.bias'])", "full_precision(whole(), LayerNorm)",
        "ignoring(whole(), [<Linear>], [<Parameter>])",
    ]  # fmt: skip
    for policy in policies:
        loaded = pickle.loads(pickle.dumps(policy))
        assert loaded(MODEL) == policy(MODEL) == copy.deepcopy(policy)(MODEL)
        assert repr(loaded) == repr(policy)


def test_two_units_with_one_key() -> None:
    """A module name that looks like the suffix of a mixed unit is an error, not a unit that hides another."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "a:float32": nn.Linear(2, 2)})
    model["a"].bias.data = model["a"].bias.data.double()
    with pytest.raises(ValueError, match=r"two units have the key 'a:float32': expected no ':' in module names"):
        fs.by_type(nn.Linear)(model)


# --- torch's own claims (test_wrap.py), and where torch is wrong ---
BF16 = fs.Precision(param=torch.bfloat16)
FULL = fs.Precision(param=torch.float32, restore_outputs=True)


def shared_below_two() -> nn.Module:
    """``a.x`` and ``b.x`` are one Linear of 6 elements."""
    shared, model = nn.Linear(2, 2), nn.Module()
    for name in "ab":
        parent = nn.Module()
        parent.x, parent.own = shared, nn.Parameter(torch.zeros(5 if name == "a" else 1))
        model.add_module(name, parent)
    return model


def test_a12_shared_modules_and_tied_parameters_count_once() -> None:
    """torch wraps a shared module twice and counts it twice; here it is one unit, and its elements count once."""
    model, seen = shared_below_two(), []
    root = wrapped(model, size(6))
    assert root.a.x is not root.b.x
    assert isinstance(root.a.x, Wrapper)
    assert root.a.x._wrapped is root.b.x._wrapped
    wrap._recursive_wrap(copy.deepcopy(model), size(6), lambda m: seen.append(m) or m, set(), set())
    assert sum(isinstance(m, nn.Linear) for m in seen) == 2
    _, counted = wrap._recursive_wrap(copy.deepcopy(model), lambdas(lambda m: isinstance(m, nn.Linear)), Wrapper, set(), set())
    assert counted == 12
    spec = fs.by_size(6)(model)
    assert units_of(spec) == {"": {"a.own", "b.own"}, "a.x": {"a.x.weight", "a.x.bias"}}
    assert spec.by_name["b.x.bias"] == spec.by_name["a.x.bias"]

    tied = sequential((None,), (None,))
    tied[1][0].weight = tied[0][0].weight  # 5 elements of either side are its own, 25 are both's
    assert torch_units(tied, size(30)).keys() == {"", "0.0", "1.0"}
    assert fs.by_size(30)(tied).selected == ()
    assert units_of(fs.by_size(5)(tied))[""] == {"0.0.weight"}


NORMS = {"bn1": nn.BatchNorm1d, "bn2": nn.BatchNorm2d, "bn3": nn.BatchNorm3d, "sync": nn.SyncBatchNorm}
Norms = module_class("Norms", lambda: {"lin": nn.Linear(5, 5)} | {name: cls(5) for name, cls in NORMS.items()}, None)


@given(modules())
def test_a17_full_precision_inherits_from_the_unit_around(model: nn.Module) -> None:
    """On shared modules too: the P of the lowest unit above all places, but for its precision."""
    p, q = fs.P("shard", precision=BF16), fs.P("shard", precision=BF16, align=4)
    before = fs.policies.override(fs.policies.whole(p), fs.by_size(4, p=q))
    spec, tree = fs.policies.full_precision(before, OtherResidualNode)(model), fs.module_tree(model)
    for unit in spec:
        leafy = tree.canonical[unit.path] in {node.path for node in tree.nodes() if node.cls is OtherResidualNode}
        assert unit.p.precision == (FULL if leafy else BF16)
    dropped = {param.name: (u.p.align, u.p.axis) for u in spec for param in u.params}
    kept = {param.name: (u.p.align, u.p.axis) for u in before(model) for param in u.params}
    assert dropped == kept


def test_custom_policy_with_full_precision() -> None:
    """test_custom_policy: a dict overrides one unit's options, the rest inherit; batch norms stay in full precision."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Sequential(Norms(), nn.Linear(2, 2)))
    p = fs.P("shard", precision=BF16)

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {"axis": None, "reshard": False} if isinstance(module, Norms) else type(module) is nn.Linear

    spec = fs.policies.full_precision(fs.policies.custom(choose, p), _BatchNorm, nn.LayerNorm)(model)
    got = {unit.key: unit.p for unit in spec}
    norm = fs.P(reshard=False, precision=FULL)
    expected = dict.fromkeys(("0", "2.1", "2.0.lin"), p) | {"1": fs.P("shard", precision=FULL)}
    assert got == expected | {f"2.0.{name}": norm for name in NORMS}


# --- Marks, frozen parameters, the root, checkpointing. ---
def test_a19_marks_are_enable_wrap_and_wrap() -> None:
    """The override of the mark beats the policy's option, as wrap's beats enable_wrap's; no context, so nothing nests."""
    with wrap.enable_wrap(wrapper_cls=Wrapper, align=2, reshard=False):
        inner = wrap.wrap(nn.Linear(2, 2), align=4)
        with pytest.raises(NotImplementedError, match="nested"), wrap.enable_wrap(wrapper_cls=Wrapper):
            pass
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0].unit, model[0][0].unit = True, {"align": 4}  # as a model may mark its modules where it builds itself
    marked = fs.policies.custom(lambda module: getattr(module, "unit", False), fs.P("shard", align=2, reshard=False))
    spec = marked(model)
    assert dict(spec.selected) == {"0": fs.P("shard", align=2, reshard=False), "0.0": fs.P("shard", align=4, reshard=False)}
    assert inner.options == {"align": 4, "reshard": False}
    assert marked(copy.deepcopy(model)) == spec, "a copy is marked as well"


@given(modules())
@example(nn.Sequential())
def test_a15_the_root_owns_the_leftovers(model: nn.Module) -> None:
    """What no path owns is in unit "", which exists only if something is left."""
    spec = fs.policies.always()(model)
    taken = {param.name for unit in spec if unit.path for param in unit.params}
    left = {param.name for param in fs.module_tree(model).all_params} - taken
    assert {param.name for unit in spec if not unit.path for param in unit.params} == left
    assert ("" in spec.by_key) == bool(left)
    assert spec.paths[0] == ""


def test_a21_frozen_parameters_are_units_of_their_own() -> None:
    """test_frozen_params, test_validate_frozen_params: nothing to warn about, a reduction carries trainable numel only."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Linear(2, 2))
    model[0][0].requires_grad_(False)
    spec = fs.by_path({"0": fs.P("shard")})(model)
    found = {unit.key: (unit.requires_grad, unit.numel) for unit in spec}
    assert found == {"": (True, 6), "0": (True, 10), "0:frozen": (False, 20)}
    assert {unit.key: unit.requires_grad for unit in fs.policies.always()(model)} == {"0.0": False, "0.1": True, "1": True}
    lora = fs.policies.ignoring(fs.by_path({"0": fs.P("shard")}), modules=["0.0"])(model)
    assert [unit.key for unit in lora] == ["", "0"]


def test_a23_one_policy_type_serves_checkpointing() -> None:
    """The units with remat are the modules that apply_activation_checkpointing wraps under the same policy."""
    model = sequential(*NESTED)
    checkpointed = copy.deepcopy(model)
    apply_activation_checkpointing(checkpointed, auto_wrap_policy=wrap.ModuleWrapPolicy([nn.Linear]))
    wrapped = [path for path, module in checkpointed.named_modules() if isinstance(module, CheckpointWrapper)]
    places = {path.replace("._checkpoint_wrapped_module", "") for path in wrapped}
    spec = fs.by_type(nn.Linear, p=fs.P("shard", remat=True))(model)
    assert {unit.path for unit in spec if unit.p.remat} == places == {"0", "1", "2.0", "2.1"}


def test_mixed_precision_resnet() -> None:
    """As many full-precision units as there are batch norms, whatever the policy and although the rest is bf16."""
    with torch.device("meta"):
        made = build("resnet_with_batch_norm", 1)
    norms = {path for path, m in made.model.named_modules() if isinstance(m, _BatchNorm)}
    p = fs.P("shard", precision=BF16)
    for policy in (fs.policies.whole(p), fs.policies.always(p), fs.by_type(*made.blocks, p=p), fs.by_size(50, p=p)):
        assert {unit.path for unit in fs.policies.full_precision(policy)(made.model) if unit.p.precision == FULL} == norms
    assert len(norms) > 3
