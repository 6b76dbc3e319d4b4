"""Law S6 and the rows of policies that have a namesake in torch.distributed.fsdp.wrap: they select the very same modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch
from depth import at_most
from hypothesis import given
from hypothesis import strategies as st
from models import ARCHITECTURES, build
from strategies import OtherResidualNode, ResidualNode, modules
from torch import nn
from torch.distributed.fsdp import wrap
from wrap_oracle import assert_same, lambdas, owning, size, torch_units, units_of, wide

import funshard as fs

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
    assert (
        fs.policies.override(mine, fs.policies.whole())(model)
        == fs.policies.override(fs.policies.whole(), mine)(fs.module_tree(model))
        == spec
    )


@given(TREES)
def test_a3_by_type_is_module_wrap_policy(model: nn.Module) -> None:
    """Instances of the classes, subclasses too; as an object and as a callable in an or-policy."""
    for classes in [(OtherResidualNode,), (ResidualNode,), (nn.ModuleList, OtherResidualNode), (nn.Module,), (nn.Linear,)]:
        assert_same(model, by_type(model, *classes), wrap.ModuleWrapPolicy(classes))
        assert_same(model, by_type(model, *classes), partial(wrap._or_policy, policies=[wrap.ModuleWrapPolicy(classes)]))


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


@given(TREES)
def test_a5_custom_is_lambda_auto_wrap_policy(model: nn.Module) -> None:
    """With a predicate, the modules for which it is true."""
    root = model  # torch's callables are never asked about the root
    assert_same(model, fs.policies.custom(wide), lambdas(wide))
    assert_same(model, fs.policies.custom(lambda m: m is not root), lambdas(lambda m: True))


@given(TREES)
def test_a6_by_type_is_transformer_auto_wrap_policy(model: nn.Module) -> None:
    """And the private _wrap_module_cls_individually, which is the same once more."""
    assert_same(
        model,
        by_type(model, OtherResidualNode),
        partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={OtherResidualNode}),
    )
    assert_same(
        model,
        by_type(model, OtherResidualNode),
        partial(wrap._wrap_module_cls_individually, module_classes=[OtherResidualNode]),
    )


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


def has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def first_block(model: nn.Module | fs.ModuleTree) -> fs.PartitionSpec:
    return fs.by_path({"0": fs.P("shard", remat=True)})(model)


EVERY_POLICY = {
    "whole": fs.policies.whole(),
    "always": fs.policies.always(),
    "by_type": fs.by_type(nn.Linear, p=fs.P()),
    "by_size": fs.by_size(10, force_leaf=[nn.MultiheadAttention]),
    "custom": fs.policies.custom(has_bias),
    "by_path": fs.by_path({"*": fs.P("shard", reshard=False)}),
    "override": fs.policies.override(fs.policies.whole(), first_block),
    "ignoring": fs.policies.ignoring(fs.by_type(nn.Linear), modules=["0", nn.LayerNorm], params=["*.bias"]),
    "full_precision": fs.policies.full_precision(
        fs.policies.whole(fs.P("shard", precision=fs.Precision(param=torch.float16))), nn.LayerNorm
    ),
}


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_policies_pickle(name: str) -> None:
    """For arguments of torch.multiprocessing.spawn: one that was pickled prints alike and gives the same spec."""
    policy = EVERY_POLICY[name]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    loaded = pickle.loads(pickle.dumps(policy))
    assert loaded(model) == policy(model) == copy.deepcopy(policy)(model)
    assert repr(loaded) == repr(policy)


def test_a_policy_that_names_modules_pickles_with_them() -> None:
    """In one pickle with the model it ignores the same module there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    policy = fs.policies.ignoring(fs.policies.always(), modules=[model[0]], params=[model[1].bias])
    loaded_policy, loaded_model = pickle.loads(pickle.dumps((policy, model)))
    assert loaded_policy(loaded_model) == policy(model)
