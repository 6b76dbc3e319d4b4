"""Laws L1 to L4 and L7, L8 of the layout, and what torch's flat parameter tests claim. No communication here."""

from __future__ import annotations

import copy
import itertools

import optree
import pytest
import strategies
import torch
from cases import Case, alignment, cases, each_rank, owned, owners, poisoned, same, slice_numel
from depth import every
from hypothesis import assume, given
from hypothesis import strategies as st
from models import refused
from strategies import modules
from torch import Tensor, nn

import funshard as fs
from funshard import P
from funshard._core.tree import NAMESPACE

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
LOW = [None, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
WHOLE_DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool]


def weights(*widths: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers without biases, their parameters "0.weight", "1.weight", ..."""
    layers = [nn.Linear(a, b, bias=False, dtype=dtype) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def memory_order(tensor: Tensor, param: fs.Param) -> Tensor:
    return tensor.permute(param.order).reshape(-1)


@given(cases())
def test_l1_unflatten_inverts_flatten(case: Case) -> None:
    """F'(F(t)) is t, bit by bit, and F(F'(b)) is b."""
    buffers = fs.flatten(case.full, case.spec)
    same(fs.unflatten(buffers, case.spec), case.full)
    same(fs.flatten(fs.unflatten(buffers, case.spec), case.spec), buffers)


@given(cases())
def test_l2_slices_join_to_the_buffer(case: Case) -> None:
    """The slices, in the order that P gives the ranks, are the flat buffer; replicas hold equal ones of equal length."""
    buffers, shards = fs.flatten(case.full, case.spec), each_rank(case.full, case.spec)
    for unit in case.spec:
        ranks = owners(unit, case.sizes)
        for replica in ranks.T.tolist():
            assert torch.equal(torch.cat([shards[rank][unit.key] for rank in replica]), buffers[unit.key])
        assert {len(shards[rank][unit.key]) for rank in case.ranks} == {case.spec.shard_numel(unit)}


@given(cases())
def test_l2_every_element_has_one_owner(case: Case) -> None:
    """The views of the owners of the slices, joined, are each parameter once, in its memory order."""
    shards = each_rank(case.full, case.spec)
    pieces = [fs.param_views(shards[rank], case.spec, rank=rank) for rank in case.ranks]
    for unit in case.spec:
        for param in unit.params:
            joined = torch.cat([pieces[rank][param.name] for rank in owners(unit, case.sizes)[:, 0].tolist()])
            assert torch.equal(joined, memory_order(case.full[param.name], param))


@given(cases())
def test_s7_padding_is_at_the_end_and_short(case: Case) -> None:
    """What is not of a parameter is zeros: less than one `align` for every parameter and for every slice, all of one length."""
    for unit in case.spec:
        assert case.spec.size(unit) == len(owners(unit, case.sizes))
        buffer, size = fs.flatten(case.full, case.spec)[unit.key], case.spec.size(unit)
        assert (
            len(buffer) == case.spec.padded_numel(unit) == size * case.spec.shard_numel(unit) == size * slice_numel(unit, size)
        )
        align, real = alignment(unit), owned(unit, len(buffer))
        assert not buffer[~real].any()
        assert int(real.sum()) == unit.numel
        assert 0 <= len(buffer) - unit.numel < max(size + len(unit.params) - 1, 1) * align
        assert case.spec.shard_numel(unit) % align == 0


@given(cases())
def test_l3_padding_is_in_no_view(case: Case) -> None:
    """NaN in the padding is seen neither by unflatten nor by views, and flattening anew leaves it behind."""
    buffers = fs.flatten(case.full, case.spec)
    bad = {u.key: torch.where(owned(u, len(buffers[u.key])), buffers[u.key], torch.nan) for u in case.spec}
    same(fs.unflatten(bad, case.spec), case.full)
    same(fs.flatten(fs.unflatten(bad, case.spec), case.spec), buffers)
    for rank in case.ranks:
        shards = fs.shard(case.full, case.spec, rank=rank)
        seen = fs.param_views(poisoned(shards, case.spec, rank), case.spec, rank=rank)
        same(seen, fs.param_views(shards, case.spec, rank=rank))


@pytest.mark.parametrize("numel", [30, 32])
def test_float4_with_padding_and_without(numel: int) -> None:
    """torch fills no float4: a unit whose length needs no padding was "not implemented" to flatten and to shard."""
    values = torch.arange(numel, dtype=torch.uint8)
    model = nn.ParameterDict({"w": nn.Parameter(values.view(torch.float4_e2m1fn_x2), requires_grad=False)})
    spec = fs.policies.whole()(model).on({"shard": 2})
    (joined,) = (torch.cat([s[key] for s in (fs.shard(model, spec, rank=r) for r in (0, 1))]) for key in spec.by_key)
    assert joined.view(torch.uint8)[:numel].equal(values)
    assert len(joined) == 32
    assert fs.flatten(dict(model), spec).popitem()[1].view(torch.uint8).equal(joined.view(torch.uint8))
    assert fs.unflatten(dict.fromkeys(spec.by_key, joined), spec)["w"].view(torch.uint8).equal(values)


@given(cases(), st.sampled_from(DTYPES), st.sampled_from(LOW), st.sampled_from(LOW))
def test_l9_parameters_and_slices_start_on_16_bytes(
    case: Case, dtype: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    """By default, in their own dtype, and float32 in those of 16 bits, at the least padding that does it.

    Whatever the precision, so that shards may be used with another one.
    """
    model = copy.deepcopy(case.model)
    for x in model.parameters():
        x.data = x.to(dtype)

    def spec_with(precision: fs.Precision | None) -> fs.PartitionSpec:
        chosen = {path: P(p.axis, precision=precision) for path, p in [*case.spec.selected, ("", case.spec.root)]}
        return fs.by_path(chosen)(model).on(case.sizes)

    spec = spec_with(fs.Precision(param=param, reduce=reduce))
    plain = spec_with(None)
    assert [(u.parts, spec.padded_numel(u)) for u in spec] == [(u.parts, plain.padded_numel(u)) for u in plain]
    for unit in spec:
        kinds = (torch.float32, torch.bfloat16) if unit.dtype == torch.float32 else (unit.dtype,)
        for kind in kinds:
            full = fs.unflatten({u.key: torch.zeros(spec.padded_numel(u), dtype=kind) for u in spec}, spec)
            assert {full[p.name].storage_offset() * kind.itemsize % 16 for p in unit.params} == {0}
            assert spec.shard_numel(unit) * kind.itemsize % 16 == 0
        slack = 16 // min(kind.itemsize for kind in kinds)
        assert spec.padded_numel(unit) - unit.numel < max(len(unit.params) - 1 + spec.size(unit), 1) * slack


@given(cases())
def test_l9_padding_has_no_gradient(case: Case) -> None:
    """The transpose of unflatten is flatten: zeros where there is no parameter; and the other way round."""
    assume(case.full)
    buffers = fs.flatten(case.full, case.spec)
    numbers = strategies.integers_like(case.model, 5)
    numbers = {name: numbers[name] for name in fs.unflatten(buffers, case.spec)}  # in this order
    _, back = torch.func.vjp(lambda b: fs.unflatten(b, case.spec), buffers)
    same(back(numbers)[0], fs.flatten(numbers, case.spec))
    _, back = torch.func.vjp(lambda full: fs.flatten(full, case.spec), case.full)
    ones = {name: torch.ones_like(x) for name, x in case.full.items()}
    same(back({key: torch.ones_like(buffer) for key, buffer in buffers.items()})[0], ones)


@pytest.mark.parametrize("p", [P("shard"), P()], ids=str)
def test_unflatten_is_one_node(p: P) -> None:
    """No zeros of the size of the buffer for each parameter in backward, also where parameters are padded."""
    model = weights(3, 7, 5, 5)
    spec = fs.policies.whole(p)(model).on({"shard": 2})
    buffer = fs.flatten({name: x.detach() for name, x in model.named_parameters()}, spec)[""].requires_grad_()
    nodes = {view.grad_fn.next_functions[0][0] for view in fs.unflatten({"": buffer}, spec).values() if view.grad_fn}
    assert [node.name() for node in nodes if node] == ["SplitWithSizesBackward0"]


def odd(dtype: torch.dtype, requires_grad: bool) -> nn.Module:
    """Parameters of every awkward kind, in one module."""
    values = torch.arange(24).to(dtype)
    kinds = {
        "scalar": values[1],
        "empty": values[:0].view(0, 3),
        "short": values[:2],
        "transposed": values.view(4, 6).t(),
        "channels_last": values.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "strided": values[::2],
        "expanded": values[1:4, None].expand(3, 2),
    }
    return nn.ParameterDict({name: nn.Parameter(value, requires_grad=requires_grad) for name, value in kinds.items()})


@every(size=[1, 3, 64], dtype=DTYPES + WHOLE_DTYPES)
def test_l4_odd_parameters(dtype: torch.dtype, size: int) -> None:
    """Scalars, empty, tiny and non-contiguous parameters of any dtype come back equal; dense strides are kept."""
    model = odd(dtype, requires_grad=dtype in DTYPES)
    spec = fs.policies.whole()(model).on({"shard": size})
    full = {name: p.detach() for name, p in model.named_parameters()}
    shards = each_rank(model, spec)
    assert {shard.dtype for one in shards for shard in one.values()} == {dtype}
    back = fs.unflatten({"": torch.cat([one[""] for one in shards])}, spec)
    same(back, full)
    dense = ["scalar", "empty", "short", "transposed", "channels_last"]
    assert {name: back[name].stride() for name in dense} == {name: full[name].stride() for name in dense}
    assert back["strided"].is_contiguous()
    assert back["expanded"].is_contiguous()


def test_l4_one_unit_has_one_dtype_and_one_requires_grad() -> None:
    """A module that mixes them becomes several buffers, with readable keys, and comes back whole (row B9)."""
    kinds = enumerate([torch.float32, torch.bfloat16, torch.int64])
    full = {f"w{i}": torch.full((i + 1,), i + 1).to(dtype) for i, dtype in kinds} | {"b": torch.ones(5)}
    trained = {name: name != "b" and x.is_floating_point() for name, x in full.items()}
    model = nn.ParameterDict({name: nn.Parameter(x, requires_grad=trained[name]) for name, x in full.items()})
    spec = fs.policies.whole()(model).on({"shard": 2})
    buffers = fs.flatten(dict(model.named_parameters()), spec)
    assert {key: (buffer.dtype, len(buffer)) for key, buffer in buffers.items()} == {
        ":float32": (torch.float32, 16),
        ":float32:frozen": (torch.float32, 16),
        ":bfloat16": (torch.bfloat16, 16),
        ":int64:frozen": (torch.int64, 4),
    }
    same(fs.unflatten(buffers, spec), {name: p.detach() for name, p in model.named_parameters()})


@given(cases())
def test_l7_replicated_and_one_rank(case: Case) -> None:
    """With P() every rank holds F(t); with one rank sharding is flattening."""
    replicated = fs.policies.whole(P())(case.model).on(case.sizes)
    for shards in each_rank(case.full, replicated):
        same(shards, fs.flatten(case.full, replicated))
    alone = case.spec.on(dict.fromkeys(case.sizes, 1))
    same(fs.shard(case.full, alone, rank=0), fs.flatten(case.full, alone))
    same(fs.unshard(fs.shard(case.full, alone, rank=0), alone), case.full)


@given(cases())
def test_l8_flatten_copies_and_unflatten_and_views_alias(case: Case) -> None:
    """Writing into F(t) leaves t alone; writing into the views is writing into the buffer, as their docstrings say."""
    before = {name: tensor.clone() for name, tensor in case.full.items()}
    buffers = fs.flatten(case.full, case.spec)
    for view in fs.unflatten(buffers, case.spec).values():
        view.fill_(7)
    same(case.full, before)
    same(buffers, fs.flatten({name: torch.full_like(t, 7) for name, t in before.items()}, case.spec))
    shards = fs.shard(case.full, case.spec, rank=0)
    for piece in fs.param_views(shards, case.spec, rank=0).values():
        piece.fill_(7)
    same(shards, fs.shard({name: torch.full_like(t, 7) for name, t in before.items()}, case.spec, rank=0))


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 20))
def test_b10_uneven_slices(numel: int, size: int, align: int) -> None:
    """torch.chunk's slices padded to the length of the first, and empty where chunk gives none (any align: ceil)."""
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.arange(1.0, numel + 1)))
    spec = fs.policies.whole(P("shard", align=1))(model).on({"shard": size})
    chunks = torch.arange(1.0, numel + 1).chunk(size) if numel else ()
    for rank in range(size):
        expected = chunks[rank] if rank < len(chunks) else torch.empty(0)
        assert torch.equal(fs.param_views(fs.shard(model, spec, rank=rank), spec, rank=rank)["w"], expected)
    aligned = fs.policies.whole(P("shard", align=align))(model).on({"shard": size})
    (unit,) = aligned
    assert aligned.shard_numel(unit) == align * -(-numel // (size * align))


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [
        (300, 0, {"0.weight": (0, 0)}),
        (6, 1, {"0.weight": (50, 99)}),
        (2, 0, {"0.weight": (0, 99), "1.weight": (0, 49)}),
        (2, 1, {"1.weight": (50, 99), "2.weight": (0, 99)}),
        (1, 0, {"0.weight": (0, 99), "1.weight": (0, 99), "2.weight": (0, 99)}),
        (300, 299, {"2.weight": (99, 99)}),
        (301, 300, {}),
    ],
)
def test_flat_param_shard_metadata_unaligned(size: int, rank: int, expected: dict[str, tuple[int, int]]) -> None:
    """Three 10x10 weights: the first and last element of which a slice holds, clamped at the end; padding is in none."""
    model = weights(10, 10, 10, 10)
    spec = fs.policies.whole(P("shard", align=1))(model).on({"shard": size})
    numbers = {name: torch.arange(p.numel()).view(p.shape).to(p.dtype) for name, p in model.named_parameters()}
    pieces = fs.param_views(fs.shard(numbers, spec, rank=rank), spec, rank=rank)
    assert {name: (int(piece[0]), int(piece[-1])) for name, piece in pieces.items() if len(piece)} == expected


def test_a22_shared_parameters_belong_to_the_lowest_common_ancestor() -> None:
    """Tied across two units: owned once, above both, and known under every name; within one unit: by that one."""
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model.decoder.layers[0].linear1.weight = model.encoder.layers[0].linear1.weight
    model.decoder.layers[1].norm1 = model.encoder.layers[1].norm1
    spec = fs.by_type(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(model)
    for name in ["encoder.layers.0.linear1.weight", "decoder.layers.0.linear1.weight"]:
        unit, param = spec.by_name[name]
        assert unit.path == ""
        assert param.name == "encoder.layers.0.linear1.weight"
    inside = weights(3, 3, 3)
    inside[1].weight = inside[0].weight
    assert fs.policies.whole()(inside).by_name["1.weight"][0].numel == 9


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Identity())])
def test_flatten_nothing(model: nn.Module) -> None:
    """No parameters, no unit, the same output. (The peer raises for an empty list of parameters.)"""
    spec = fs.policies.always()(model).on({"shard": 2})
    assert len(spec) == 0
    assert fs.flatten({}, spec) == fs.unflatten({}, spec) == fs.shard(model, spec, rank=1) == {}
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(fs.functional_call(model, {}, (x,), spec=spec), model(x))


# --- Trees of modules ---
MODELS = modules(frozen=True)


@given(MODELS)
def test_a_tree_is_what_the_module_says(model: nn.Module) -> None:
    """Nodes are named_modules, parameters are named_parameters, aliases are what they list with duplicates kept.

    It is a value: equal and hash-equal for a copy; another shape, dtype, class or requires_grad makes another tree.
    """
    tree = fs.module_tree(model)
    assert [(n.path, n.module, n.cls) for n in tree.nodes()] == [(p, m, type(m)) for p, m in model.named_modules()]
    assert [p.name for p in tree.all_params] == [name for name, _ in model.named_parameters()]
    every = dict(model.named_modules(remove_duplicate=False))
    assert {path: every[first] for path, first in tree.canonical.items()} == every
    for param in tree.all_params:
        tensor = model.get_parameter(param.name)
        same = [name for name, p in model.named_parameters(remove_duplicate=False) if p is tensor]
        assert list(param.names) == same
        found = param.shape, param.dtype, param.requires_grad, param.numel
        assert found == (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.numel())
    twin = copy.deepcopy(model)
    assert fs.module_tree(tree) is tree  # so that a policy may be given either
    assert fs.module_tree(twin) == tree
    assert hash(fs.module_tree(twin)) == hash(tree)
    twin.register_parameter("another", nn.Parameter(torch.zeros(2)))
    more = fs.module_tree(twin)
    twin.another.requires_grad_(False)
    assert len({tree, more, fs.module_tree(twin), fs.module_tree(twin.half())}) == 4


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


def test_a16_ignoring_the_second_home_of_a_shared_module() -> None:
    """Whichever of its parents is ignored, a shared module is ignored: the other one needs no synchronisation of it."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(2, 2)), "b": nn.Sequential(shared)})
    for parent in "ab":
        spec = fs.policies.ignoring(fs.policies.whole(), modules=[parent])(model)
        assert set(spec.ignored) >= {"a.0.weight", "a.0.bias"}
        assert set(spec.by_name) == ({"a.1.weight", "a.1.bias"} if parent == "b" else set())
    assert dict(fs.policies.ignoring(fs.by_type(nn.Linear), modules=["b"])(model).selected).keys() == {"a.1"}


# --- Managed states: which modules and parameters a unit has (test_fully_shard_init.py, test_fsdp_flatten_params.py). ---
def test_identity_is_not_reused() -> None:
    """test_layer_by_layer_shard_no_false_positive: modules made and collected in turn are never taken for shared ones."""
    for _ in range(20):
        assert not any(p.aliases for p in fs.module_tree(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).all_params)


def test_what_is_no_tree() -> None:
    """A dict of tensors or a class has no structure, a cycle closes at a path, lazy parameters have no shape until a run."""
    for other in ({"a": torch.zeros(1)}, nn.Linear):
        refused(TypeError, r"module_tree: expected an nn\.Module, got (dict|type)", lambda: fs.policies.whole()(other))
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    model[0].add_module("up", model)
    refused(ValueError, r"module '0\.up' contains itself: expected a tree of modules", lambda: fs.module_tree(model))
    words = r"parameter '0\.weight' is lazy: expected a shape, got none yet; run the module once"
    refused(ValueError, words, lambda: fs.module_tree(nn.Sequential(nn.LazyLinear(3))))
