"""Module trees: what policies see of a model, and the claims of torch's own tests of managed states."""

from __future__ import annotations

import copy

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import modules
from torch import nn

import funshard as fs
from funshard._core.tree import NAMESPACE, natural_key

MODELS = modules(frozen=True)


@given(MODELS)
def test_a_tree_is_what_the_module_says(model: nn.Module) -> None:
    """Nodes are named_modules, parameters are named_parameters, aliases are what they list with duplicates kept."""
    tree = fs.module_tree(model)
    assert [(n.path, n.module, n.cls) for n in tree.nodes()] == [(p, m, type(m)) for p, m in model.named_modules()]
    assert [p.name for p in tree.all_params] == [name for name, _ in model.named_parameters()]
    every = dict(model.named_modules(remove_duplicate=False))
    assert {path: every[first] for path, first in tree.canonical.items()} == every
    for param in tree.all_params:
        tensor = model.get_parameter(param.name)
        same = [name for name, p in model.named_parameters(remove_duplicate=False) if p is tensor]
        assert list(param.names) == same
        assert (param.shape, param.dtype, param.requires_grad, param.numel) == (
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            tensor.numel(),
        )


@given(MODELS)
def test_a_tree_is_a_value(model: nn.Module) -> None:
    """Equal and hash-equal for a copy; another shape, dtype, class or requires_grad makes another tree."""
    tree, twin = fs.module_tree(model), copy.deepcopy(model)
    assert fs.module_tree(twin) == tree
    assert hash(fs.module_tree(twin)) == hash(tree)
    twin.register_parameter("another", nn.Parameter(torch.zeros(2)))
    more = fs.module_tree(twin)
    twin.another.requires_grad_(False)
    assert len({tree, more, fs.module_tree(twin), fs.module_tree(twin.half())}) == 4


def test_the_tree_of_a_tree() -> None:
    """It is the tree itself, so that a policy may be given either."""
    tree = fs.module_tree(nn.Sequential(nn.Linear(2, 2)))
    assert fs.module_tree(tree) is tree


@given(MODELS)
def test_optree_sees_parameters_as_leaves(model: nn.Module) -> None:
    """Leaves are each module's own Params, flatten and unflatten are inverse, a map keeps the structure."""
    tree = fs.module_tree(model)
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    assert leaves == [param for node in tree.nodes() for param in node.params]
    assert optree.tree_unflatten(structure, leaves) == tree
    assert optree.tree_map(lambda p: p, tree, namespace=NAMESPACE) == tree
    numels = optree.tree_map(lambda p: p.numel, tree, namespace=NAMESPACE)
    assert optree.tree_structure(numels, namespace=NAMESPACE) == structure
    assert optree.tree_leaves(numels, namespace=NAMESPACE) == [p.numel for p in leaves]
    sums = optree.tree_map(lambda p, n: p.numel + n, tree, numels, namespace=NAMESPACE)
    assert optree.tree_leaves(sums, namespace=NAMESPACE) == [2 * p.numel for p in leaves]
    assert [n.module for n in numels.nodes()] == list(model.modules())


@given(MODELS, st.data())
def test_dominators_are_on_every_way(model: nn.Module, data: st.DataObject) -> None:
    """The modules without which the parameter or module could not be reached, outermost first."""
    tree = fs.module_tree(model)
    items = [*tree.all_params, *(node for node in tree.nodes() if node.path)]
    for item in items[:8]:
        ways = [["", *(".".join(parts[:i]) for i in range(1, len(parts)))] for parts in (n.split(".") for n in item.names)]
        modules_on = [{model.get_submodule(path) for path in way} for way in ways]
        dominators = tree.dominators(item)
        assert {model.get_submodule(path) for path in dominators} == set.intersection(*modules_on)
        assert dominators[0] == ""
        assert list(dominators) == sorted(dominators, key=len)


@given(MODELS, st.data())
def test_without_takes_whole_subtrees(model: nn.Module, data: st.DataObject) -> None:
    """What is below a chosen module goes from everywhere, shared modules and tied parameters too; nothing else goes."""
    tree = fs.module_tree(model)
    path = data.draw(st.sampled_from(sorted(tree.canonical)))
    chosen = model.get_submodule(path)
    rest = tree.without(lambda node: node.module is chosen, lambda param: False)
    gone = {param.name for param in tree.all_params if any(p is model.get_parameter(param.name) for p in chosen.parameters())}
    assert set(rest.ignored) == gone
    assert {p.name for p in rest.all_params} == {p.name for p in tree.all_params} - gone
    below = set(chosen.modules()) - {model}
    assert [node.module for node in rest.nodes()] == [m for m in model.modules() if m not in below]
    assert fs.policies.always()(rest).ignored == rest.ignored


def test_a16_ignoring_the_second_home_of_a_shared_module() -> None:
    """Whichever of its parents is ignored, a shared module is ignored: the other one needs no synchronisation of it."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(2, 2)), "b": nn.Sequential(shared)})
    for parent in "ab":
        spec = fs.policies.ignoring(fs.policies.whole(), modules=[parent])(model)
        assert set(spec.ignored) >= {"a.0.weight", "a.0.bias"}
        assert set(spec.by_name) == ({"a.1.weight", "a.1.bias"} if parent == "b" else set())


# --- Managed states: which modules and parameters a unit has (test_fully_shard_init.py, test_fsdp_flatten_params.py). ---


def test_managed_modules_and_states() -> None:
    """Nested units are left out, duplicates come once, a parameter lists all its homes, buffers are no parameters."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    spec = fs.by_path({"0": fs.P("shard"), "0.1": fs.P()})(model)
    assert {unit.key: [p.name for p in unit.params] for unit in spec} == {
        "": ["1.bias", "1.weight", "2.bias"],
        "0": ["0.0.bias", "0.0.weight"],
        "0.1": ["0.1.bias", "0.1.weight"],
    }
    assert spec.by_name["2.weight"][1].names == ("1.weight", "2.weight")
    assert not {name for name, _ in model.named_buffers()} & set(spec.by_name)


def test_identity_is_not_reused() -> None:
    """test_layer_by_layer_shard_no_false_positive: modules made and collected in turn are never taken for shared ones."""
    for _ in range(20):
        assert not any(p.aliases for p in fs.module_tree(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).all_params)


@given(st.lists(st.integers(0, 200), min_size=2, max_size=4))
def test_natural_order(numbers: list[int]) -> None:
    """blocks.2 comes before blocks.10; the root before all below it is the caller's business."""
    assert sorted((f"blocks.{i}.w" for i in numbers), key=natural_key) == [f"blocks.{i}.w" for i in sorted(numbers)]


# --- What is no tree. ---


def test_not_a_module() -> None:
    """A dict of tensors, or a class, has no structure to look at."""
    for other in ({"a": torch.zeros(1)}, nn.Linear):
        with pytest.raises(TypeError, match=r"module_tree: expected an nn\.Module, got (dict|type)"):
            fs.policies.whole()(other)


def test_a_module_that_contains_itself() -> None:
    """A cycle is an error that names the path at which it closes."""
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    model[0].add_module("up", model)
    with pytest.raises(ValueError, match=r"module '0\.up' contains itself: expected a tree of modules"):
        fs.module_tree(model)


def test_lazy_parameters_have_no_shape() -> None:
    """Until the module ran once."""
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is lazy: expected a shape, got none yet; run the module once"):
        fs.module_tree(nn.Sequential(nn.LazyLinear(3)))
