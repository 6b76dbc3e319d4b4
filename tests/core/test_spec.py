"""Laws S1 to S7: what holds for the spec that any policy makes of any model."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from models import refused, unchanged
from strategies import ResidualNode, meshes, modules, policies
from torch import nn

import funshard as fs
from funshard._core.policies import build
from funshard.policies import Policy

MODELS = modules(frozen=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, Policy]:
    model = draw(MODELS)
    return model, draw(policies(model))


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    """A copy in which submodules and parameters were registered in another order."""
    model, rng = copy.deepcopy(model), random.Random(seed)
    for module in list(model.modules()):
        for registry in (module._modules, module._parameters):
            items = rng.sample(list(registry.items()), len(registry))
            registry.clear()
            registry.update(items)
    return model


# --- S1 purity, S2 cover, S3 order, S4 prefix. ---
@given(cases())
def test_s1_purity(case: tuple[nn.Module, Policy]) -> None:
    """Twice, on a copy, on the tree and on the meta-device twin: equal specs, and the model is untouched."""
    model, policy = case
    with unchanged(model):
        spec = policy(model)
        assert policy(model) == spec == policy(fs.module_tree(model))
    assert policy(copy.deepcopy(model)) == spec
    twins = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    assert policy(copy.deepcopy(model, twins)) == spec


@given(cases())
def test_s2_exact_cover(case: tuple[nn.Module, Policy]) -> None:
    """Every parameter is in one unit, once, with all its names; a unit has one dtype and one requires_grad."""
    model, policy = case
    spec = policy(model)
    names: dict[nn.Parameter, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, set()).add(name)
    owned = [param for unit in spec for param in unit.params]
    assert len({param.name for param in owned}) == len(owned) == len(names)
    assert {frozenset(param.names) for param in owned} == set(map(frozenset, names.values()))
    assert {param.name for param in owned} == {name for name, _ in model.named_parameters()}
    for unit in spec:
        assert {(p.dtype, p.requires_grad) for p in unit.params} == {(unit.dtype, unit.requires_grad)}
        assert unit.numel == sum(model.get_parameter(p.name).numel() for p in unit.params)
        assert [spec.by_name[name] for p in unit.params for name in p.names] == [
            (unit, p) for p in unit.params for _ in p.names
        ]
    assert [spec.by_key[unit.key] for unit in spec] == list(spec)
    assert len(spec.by_key) == len(spec)


@given(cases(), st.integers(0, 5))
def test_s3_registration_order_is_invisible(case: tuple[nn.Module, Policy], seed: int) -> None:
    """Ranks that registered submodules in different orders have the same units in the same order, laid out alike."""
    model, policy = case

    def layout(spec: fs.PartitionSpec) -> list[object]:
        return [(unit.p, unit.numel, [(set(p.names), p.shape, p.order) for p in unit.params]) for unit in spec]

    spec, other = policy(model), policy(shuffled(model, seed))
    assert layout(spec) == layout(other)
    if not any(node.aliases for node in fs.module_tree(model).nodes()):  # a shared module is known by its first path
        assert [(unit.key, unit.path) for unit in spec] == [(unit.key, unit.path) for unit in other]


@given(cases(), meshes())
def test_s3_equality_hash_pickle_and_copies(case: tuple[nn.Module, Policy], sizes: dict[str, int]) -> None:
    """Specs are values: equal ones hash equal, copies are equal, a pickle keeps the sizes of the mesh."""
    model, policy = case
    for spec, twin in [(policy(model), policy(copy.deepcopy(model))), (policy(model).on(sizes), policy(model).on(sizes))]:
        assert spec == twin
        assert hash(spec) == hash(twin)
        assert len({spec, twin}) == 1
        loaded = pickle.loads(pickle.dumps(spec))
        assert loaded == spec
        assert hash(loaded) == hash(spec)
        assert (loaded.mesh, loaded.sizes, loaded.by_key, loaded.by_name) == (None, spec.sizes, spec.by_key, spec.by_name)
        assert copy.deepcopy(spec).mesh is copy.copy(spec).mesh is spec.mesh
    assert policy(model).on(sizes) != policy(model)
    assert policy(model).on({"shard": 6}) != policy(model).on({"shard": 7})


@given(MODELS, st.data())
def test_s4_longest_prefix_wins(model: nn.Module, data: st.DataObject) -> None:
    """Against a plain reading of the law: the deepest entry that is above every name of the parameter, in any order."""
    tree = fs.module_tree(model)
    paths = data.draw(st.lists(st.sampled_from(sorted(tree.canonical)), max_size=4, unique=True))
    entries = {path: fs.P("shard") for path in paths}
    spec = build(tree, entries, fs.P("shard"))
    assert spec == build(tree, dict(reversed(entries.items())), fs.P("shard")) == fs.by_path(entries)(model)
    places: dict[str, list[str]] = {}
    for path, home in tree.canonical.items():
        places.setdefault(home, []).append(path)
    homes = {tree.canonical[path] for path in ["", *paths]}
    for unit in spec:
        for param in unit.params:
            above = [h for h in homes if all(any(_above(place, name) for place in places[h]) for name in param.names)]
            assert unit.path == max(above, key=lambda h: max(len(p) for p in places[h] if _above(p, param.name)))


def _above(path: str, name: str) -> bool:
    return path == "" or name.startswith(f"{path}.")


@given(MODELS, st.data())
def test_s4_a_new_entry_moves_only_what_is_under_it(model: nn.Module, data: st.DataObject) -> None:
    """Adding a path leaves every parameter where it was that is not below that path."""
    tree = fs.module_tree(model)
    any_path = st.sampled_from(sorted(tree.canonical))
    paths, new = data.draw(st.sets(any_path, max_size=3)), data.draw(any_path)
    before = build(tree, dict.fromkeys(paths, fs.P("shard")), fs.P("shard"))
    after = build(tree, dict.fromkeys({*paths, new}, fs.P("shard")), fs.P("shard"))
    places = [path for path in tree.canonical if tree.canonical[path] == tree.canonical[new]]
    for param in tree.all_params:
        old, now = before.by_name[param.name][0].path, after.by_name[param.name][0].path
        assert now in (old, tree.canonical[new])
        if not all(any(_above(place, name) for place in places) for name in param.names):
            assert now == old


def test_s4_whole_components_only() -> None:
    """blocks.1 never captures blocks.10, and units come in natural order, parents before children."""
    model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(12)))})
    assert [unit.key for unit in fs.by_path({"blocks.1": fs.P("shard")})(model)] == ["", "blocks.1"]
    owned = fs.by_path({"blocks.1": fs.P("shard")})(model).by_key["blocks.1"].params
    assert {p.name for p in owned} == {"blocks.1.0.weight", "blocks.1.0.bias"}
    spec = fs.by_path({"blocks.?": fs.P("shard"), "blocks.1?": fs.P("shard")})(model)
    assert [unit.key for unit in spec] == [f"blocks.{i}" for i in range(12)]


@given(cases())
def test_units_come_in_pre_order(case: tuple[nn.Module, Policy]) -> None:
    """test_fsdp_modules: a unit comes before the units inside it; the ones with none above them are the roots."""
    model, policy = case
    tree, spec = fs.module_tree(model), policy(model)
    nodes = {node.path: node for node in tree.nodes()}
    paths = [unit.path for unit in spec]
    for i, path in enumerate(paths):
        assert not {d for d in tree.dominators(nodes[path]) if d != path} & set(paths[i + 1 :])


# --- S5 errors, S6 algebra, S7 resources. ---
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fs.P(("a", "b", "a")), ValueError, r"P: axis named twice in \('a', 'b', 'a'\): expected different mesh axes"),
        (lambda: fs.P("a", align=0), ValueError, r"P: expected align >= 1, got 0"),
        (lambda: fs.P(["a"]), TypeError, r"P: expected an axis name, a tuple of names or None, got \['a'\]"),
        (lambda: fs.P(("a", 1)), TypeError, r"P: expected an axis name, a tuple of names or None, got \('a', 1\)"),
        (lambda: fs.P("a", align=1.5), TypeError, r"P: align: expected a whole number of elements, got 1\.5"),
        (lambda: fs.P("a", align=True), TypeError, r"P: align: expected a whole number of elements, got True"),
        (lambda: fs.P("a", reshard=None), TypeError, r"P: reshard: expected True, False, or some of the axes .*, got None"),
        (lambda: fs.P("a", remat="False"), TypeError, r"P: remat: expected True or False, got 'False'"),
        (lambda: fs.P("a", local="b"), TypeError, r"P: local: expected a dict such as .*, got 'b'"),
        (lambda: fs.P("a", precision=fs.Remat()), TypeError, r"P: precision: expected a Precision or None, got Remat\(\)"),
        (lambda: fs.P("a", offload=True), TypeError, r"P: offload: expected 'activations' or 'params', .*, got True"),
        (lambda: fs.P("a", offload={1}), TypeError, r"P: offload: expected 'activations' or 'params', .*, got \{1\}"),
        (lambda: fs.P("a", offload={"params", "x"}), ValueError, r"P: offload: expected .*, got 'x'"),
        (lambda: fs.P(""), TypeError, r"P: expected an axis name, a tuple of names or None, got ''"),
        (lambda: fs.P(unit=""), TypeError, "P: unit: expected a label or None, got ''"),
    ],
)
def test_s5_wrong_p(make: object, error: type[Exception], message: str) -> None:
    """An axis used twice, none at all, or no name; a field of another type."""
    refused(error, message, lambda: make())


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ({"shard": 0}, ValueError, r"mesh axis 'shard': expected a size of at least 1, got 0"),
        ({"shard": True}, TypeError, r"mesh axis 'shard': expected its size, got True"),
        ({"shard": 2.0}, TypeError, r"mesh axis 'shard': expected its size, got 2\.0"),
        ({2: 2}, TypeError, r"mesh: expected axis names, got 2"),
        (2, TypeError, r"mesh: expected a DeviceMesh, or axis names with sizes such as \{'shard': 2\}, got 2"),
    ],
)
def test_s5_wrong_meshes(mesh: object, error: type[Exception], message: str) -> None:
    """Sizes that are none, and what is no mesh."""
    refused(error, message, lambda: fs.policies.whole()(nn.Linear(2, 2)).on(mesh))


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        ({"c": fs.P()}, r"path 'c' matches no module: expected one of '', 'a', 'a\.0', 'b\.0', 'b', 'b\.1'"),
        ({"a.0": fs.P(), "b.0": fs.P("x")}, r"module 'b\.0' is also 'a\.0' and is selected twice: as P\(\) and as P\('x'\)"),
        (
            {"a": fs.P(), "b": fs.P()},
            r"parameter 'a\.0\.weight' is in no unit: expected a selected path above all its uses, got 'a', 'b'",
        ),
        ({}, r"parameter 'a\.0\.weight' is in no unit: .* select '' for the leftovers"),
    ],
)
def test_s5_wrong_selections(selected: Mapping[str, fs.P], message: str) -> None:
    """A path that matches nothing, a shared module with two P, parameters that nothing covers: the path is named."""
    shared = nn.Linear(2, 2)
    tower = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.Linear(2, 2))})
    refused(ValueError, message, lambda: build(fs.module_tree(tower), selected, None))


@given(MODELS, st.sampled_from(["data", ("shard", "data"), ("data", "shard")]))
def test_s5_unknown_axis(model: nn.Module, axis: str | tuple[str, ...]) -> None:
    """Binding to a mesh names the first unit whose axis it lacks, and the axes that it has."""
    spec = fs.policies.always(fs.P(axis))(model)
    assume(len(spec) > 0)
    message = rf"unit '{spec.units[0].key}': unknown mesh axis 'data' in .*; expected one of \('replicate', 'shard'\)"
    refused(ValueError, message, lambda: spec.on({"replicate": 2, "shard": 2}))
    assert spec.on({"data": 2, "shard": 3}).size(spec.units[0]) == (2 if axis == "data" else 6)


@given(MODELS, st.data())
def test_s6_override_is_associative_and_right_biased(model: nn.Module, data: st.DataObject) -> None:
    """(a | b) | c == a | (b | c); what c selects is as c says; the leftovers are a's."""
    a, b, c = (data.draw(policies(model)) for _ in range(3))
    spec = fs.policies.override(fs.policies.override(a, b), c)(model)
    assert spec == fs.policies.override(a, fs.policies.override(b, c))(model)
    selected = [dict(policy(model).selected) for policy in (a, b, c)]
    assert dict(spec.selected) == {**selected[0], **selected[1], **selected[2]}
    assert spec.root == a(model).root
    assert fs.policies.override(a, a)(model) == a(model)


@given(MODELS, st.sampled_from([fs.P("shard"), fs.P(), fs.P(("a", "b"), align=4)]))
def test_s6_identities(model: nn.Module, p: fs.P) -> None:
    """by_size(inf), a custom never and no path are whole; by_type(Module) takes every module."""
    for policy in (fs.by_size(torch.inf, p=p), fs.policies.custom(lambda m: False, p), fs.by_path({}, p)):
        assert policy(model) == fs.policies.whole(p)(model)
    assert len(fs.by_type(ResidualNode, nn.ModuleList)(model).selected) == len(list(model.modules()))
    assert fs.policies.ignoring(fs.policies.always(p))(model) == fs.policies.always(p)(model)


# --- The table. ---
def test_str_of_a_spec_is_a_table() -> None:
    """Path, P, parameters, numel, padding, bytes per rank and totals, to the letter.

    Of units that differ in numbers of their paths alone, ``layers.{0..31}``, a row with how many they are, and the same totals.
    """
    model = nn.Sequential(nn.Linear(100, 20), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).bfloat16()), nn.LayerNorm(3))
    model[2].requires_grad_(False)
    policy = fs.by_path({"0": fs.P("shard"), "1": fs.P(("replicate", "shard"), reshard=False, align=8)})
    spec = fs.policies.ignoring(policy, params=["2.bias"])(model).on({"replicate": 2, "shard": 4})
    assert str(spec) == (
        "unit        P                                                  parameters  numel  padding  bytes per rank\n"
        "---------------------------------------------------------------------------------------------------------\n"
        "''          P('shard')                                                  1      3       29              32\n"
        "0           P('shard')                                                  2  2,020       28           2,048\n"
        "1:bfloat16  P(('replicate', 'shard'), reshard=False, align=8)           2      4       60              16\n"
        "1:float32   P(('replicate', 'shard'), reshard=False, align=8)           2     12       52              32\n"
        "total       replicate=2 x shard=4                                       7  2,039      169           2,128\n"
        "ignored: 2.bias"
    )
    model = nn.ModuleDict({"embed": nn.Linear(3, 4), "layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(32))})
    assert str(fs.by_path({"layers.*": fs.P("shard")})(model).on({"shard": 4})) == (
        "unit            P           parameters    numel  padding  bytes per rank\n"
        "------------------------------------------------------------------------\n"
        "''              P('shard')           2       16       16              32\n"
        "layers.{0..31}  P('shard')      32 x 2  32 x 20  32 x 12         32 x 32\n"
        "total           shard=4             66      656      400           1,056"
    )
    assert "layers.{0..4,6..31}  P('shard')" in str(fs.by_path({"layers.*": fs.P("shard"), "layers.5": fs.P()})(model))


def test_reprs_are_short() -> None:
    """A spec is a line, a P is what made it, a policy is its call."""
    model = nn.Sequential(nn.Linear(100, 20), nn.Linear(3, 3))
    spec = fs.by_type(nn.Linear)(model)
    assert repr(spec) == "<PartitionSpec: 2 units, 4 parameters, 2,032 elements, unbound>"
    assert repr(spec.on({"replicate": 2, "shard": 4})).endswith("2,032 elements, replicate=2 x shard=4>")
    for p in (fs.P(), fs.P("shard", reshard=False), fs.P(("a", "b"), align=8, remat=True)):
        assert eval(repr(p), {"P": fs.P}) == p
        assert repr(p) == str(p)


def test_what_is_derived_belongs_to_one_spec() -> None:
    """What a spec keeps of itself is not carried to another mesh, another order, a pickle or an equal spec."""
    spec = fs.policies.whole()(nn.Linear(8, 8))
    one = spec.on({"shard": 2})
    unit = one.units[0]
    assert one.size(unit) == 2
    assert one._cache
    for other, size in ((one.on({"shard": 8}), 8), (one.ordered([""]), 2), (pickle.loads(pickle.dumps(one)), 2)):
        assert not other._cache
        assert other.size(unit) == size
    assert one.size(unit) == 2
    assert spec.on({"shard": 2}) == one
    assert hash(spec.on({"shard": 2})) == hash(one)


def test_what_rests_on_the_host() -> None:
    """One of two names, or a set of both, which is the same in any order."""
    both = fs.P("a", offload={"params", "activations"})
    assert both == fs.P("a", offload=("activations", "params")) == eval(repr(both), {"P": fs.P})
    assert hash(both) == hash(fs.P("a", offload=["params", "activations"]))
    assert repr(both) == "P('a', offload=('activations', 'params'))"
    assert both.offloads == ("activations", "params")
    assert fs.P("a", offload={"params"}) == fs.P("a", offload="params")
    assert fs.P("a", offload="params").offloads == ("params",)
    assert fs.P("a", offload=set()) == fs.P("a")
    assert fs.P("a").offloads == ()
