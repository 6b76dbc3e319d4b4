"""Laws L3 to L8 of sharding, on simulated ranks and with ranks as arguments; partition and combine; adjoints."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import strategies
import torch
from cases import Case, cases, each_rank, on_ranks, poisoned, same, specs, stacked
from depth import depth, every
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import mesh_of, real_ranks
from test_gather_full import values
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import funshard as fs
from funshard import P, Params, PartitionSpec
from funshard.collectives import Mesh

nonempty = cases().filter(lambda case: bool(case.full))
STEPS: dict[str, Callable[..., Tensor]] = {
    "sgd": lambda p, g: p - 0.5 * g,
    "ema": lambda p, g: torch.lerp(p, g, 0.25),
    "cast": lambda p, g: p.bfloat16(),
    "sign": lambda p, g: torch.where(g > p, g.sign(), p),
}


@given(cases())
def test_unshard_inverts_shard(case: Case) -> None:
    """U(S(t)) is t on every rank, whatever the policy and the mesh; as values without gradient, too.

    ``units`` gathers these and no others: their parameters, bit by bit (recurse and submodules, rows C2 and C11).
    """
    chosen = [unit.key for unit in case.spec][::2]
    part = {param.name: case.full[param.name] for key in chosen for param in case.spec.by_key[key].params}
    for gather, expected in (
        (fs.unshard, case.full),
        (partial(fs.unshard, offload_to_cpu=True), case.full),
        (partial(fs.unshard, units=chosen), part),
    ):
        for full in on_ranks(case.sizes, lambda mesh: gather(fs.shard(case.full, case.spec.on(mesh)), case.spec.on(mesh))):
            same(full, expected)


@given(cases())
def test_shard_is_the_same_with_a_rank_and_on_it(case: Case) -> None:
    """shard(..., rank=r) is what rank r gets, from a module as from its parameters."""
    expected = each_rank(case.full, case.spec)
    for rank, shards in enumerate(on_ranks(case.sizes, lambda mesh: fs.shard(case.full, case.spec.on(mesh)))):
        same(shards, expected[rank])
    values = {name: p.detach() for name, p in case.model.named_parameters()}
    for rank in case.ranks:
        same(fs.shard(case.model, case.spec, rank=rank), fs.shard(values, case.spec, rank=rank))


@settings(max_examples=depth(6, 300))
@given(cases(), st.integers(-2, 2))
def test_l3_padding_is_never_observable(case: Case, x: int) -> None:
    """With NaN in every padding: unshard, outputs, and gradients through functional_call and unshard are the same."""
    clean = each_rank(case.full, case.spec)
    bad = [poisoned(shards, case.spec, rank) for rank, shards in enumerate(clean)]
    xs = torch.arange(len(clean)).double() + x

    def results(mesh: Mesh, params: Params, x: Tensor) -> list[Params]:
        spec = case.spec.on(mesh)
        loss = lambda params: fs.functional_call(case.model, params, (x,), spec=spec)  # noqa: E731
        dense = lambda params: sum((t**2).sum() * (x + 1) for t in fs.unshard(params, spec).values())  # noqa: E731
        grads = [torch.func.grad(loss)(params), fs.grad(loss)(params)]
        grads += [torch.func.grad(dense)(params)] if params else []
        return [fs.unshard(params, spec), {"": loss(params)}, *grads]

    run = fs.testing.spmd(results, case.sizes)
    expected = run(stacked(clean), xs)
    for got, wanted in zip(run(stacked(bad), xs), expected, strict=True):
        same(got, wanted)
    for grads in expected[2:]:  # and the padding of a gradient is zeros
        for unit in case.spec:
            assert not torch.isnan(grads[unit.key]).any()


@given(cases(), st.sampled_from(sorted(STEPS)), st.integers(0, 9))
def test_l3_and_l5_elementwise_steps_commute_with_sharding(case: Case, step: str, seed: int) -> None:
    """S(f(t, g)) is f(S t, S g), exactly; with poisoned padding in both, the parameters are still the same."""
    f, grads = STEPS[step], strategies.integers_like(case.model, seed)
    updated = {name: f(tensor, grads[name]) for name, tensor in case.full.items()}
    expected = each_rank(updated, case.spec)
    pairs = list(zip(each_rank(case.full, case.spec), each_rank(grads, case.spec), strict=True))
    for rank, (params, slopes) in enumerate(pairs):
        same({key: f(params[key], slopes[key]) for key in params}, expected[rank])
        bad, worse = (poisoned(shards, case.spec, rank) for shards in (params, slopes))
        stepped = {key: f(bad[key], worse[key]) for key in bad}
        same(fs.param_views(stepped, case.spec, rank=rank), fs.param_views(expected[rank], case.spec, rank=rank))


@settings(max_examples=depth(8, 300))
@given(st.data(), strategies.modules(), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_l6_reshard_composes(data: st.DataObject, model: nn.Module, counts: list[int]) -> None:
    """From N ranks to M to K, each with a policy of its own, is sharding anew: S^K(t). The axes n, m, k are simulated."""
    sizes = dict(zip("nmk", counts, strict=True))
    full = strategies.integers_like(model, 1)
    axes = ["n", "m", "k", ("n", "m"), ("k", "n"), None]
    chain = [_moved(data.draw(specs(model, {"shard": 1})), data.draw(st.sampled_from(axes))) for _ in range(3)]

    def resharded(mesh: Mesh) -> Params:
        first, second, third = (spec.on(mesh) for spec in chain)
        return fs.reshard(fs.reshard(fs.shard(full, first), first, second), second, third)

    for rank, shards in enumerate(on_ranks(sizes, resharded)):
        same(shards, fs.shard(full, chain[-1].on(sizes), rank=rank))


def _moved(spec: PartitionSpec, axis: str | tuple[str, ...] | None) -> PartitionSpec:
    """The spec with its "shard" axis, wherever it is in use, replaced by another."""
    units = tuple(dataclasses.replace(u, p=dataclasses.replace(u.p, axis=axis if u.p.axis else None)) for u in spec.units)
    return dataclasses.replace(spec, units=units, sizes=None, mesh=None)


@given(cases())
def test_l6_reshard_drops_the_padding(case: Case) -> None:
    """NaN in the padding of the old shards is in none of the new ones."""
    bad = [poisoned(shards, case.spec, rank) for rank, shards in enumerate(each_rank(case.full, case.spec))]
    new = fs.policies.whole(P(tuple(case.sizes), align=2))(case.model).on(case.sizes)
    run = fs.testing.spmd(lambda mesh, shards: fs.reshard(shards, case.spec.on(mesh), new.on(mesh)), case.sizes)
    same(run(stacked(bad)), stacked(each_rank(case.full, new)))


@given(nonempty, st.integers(0, 9))
def test_shard_is_differentiable_its_transpose_gathers(case: Case, seed: int) -> None:
    """<S t, y> summed over the slices is <t, S' y>, and S' y is the gathered y: so grad(f . S) is unshard(grad f)."""
    cotangents = each_rank(strategies.integers_like(case.model, seed), case.spec)

    def back(mesh: Mesh, y: Params) -> Params:
        spec = case.spec.on(mesh)
        return torch.func.vjp(lambda t: fs.shard(t, spec), case.full)[1](y)[0]

    got = fs.testing.spmd(back, case.sizes)(stacked(cotangents))
    expected = strategies.integers_like(case.model, seed)
    for rank in case.ranks:
        same({name: tensor[rank] for name, tensor in got.items()}, expected)
    for rank in case.ranks:  # a given rank's shard: the gradient is zero outside of its slice
        back_one = torch.func.vjp(lambda t: fs.shard(t, case.spec, rank=rank), case.full)[1](cotangents[rank])[0]
        inner = sum((t * back_one[name]).sum() for name, t in case.full.items())
        shards = fs.shard(case.full, case.spec, rank=rank)
        assert inner == sum((shards[key] * y).sum() for key, y in cotangents[rank].items())


@settings(max_examples=depth(6, 300))
@given(st.data(), nonempty, st.integers(0, 9))
def test_reshard_is_differentiable_its_transpose_reshards_back(data: st.DataObject, case: Case, seed: int) -> None:
    """The gradient of reshard is reshard the other way: autograd's adjoint, in torch.func and through the simulation."""
    new = data.draw(specs(case.model, case.sizes))
    y = stacked(each_rank(strategies.integers_like(case.model, seed), new))
    x = stacked(each_rank(case.full, case.spec))
    expected = stacked(each_rank(strategies.integers_like(case.model, seed), case.spec))

    def back(mesh: Mesh, x: Params, y: Params) -> Params:
        return torch.func.vjp(lambda x: fs.reshard(x, case.spec.on(mesh), new.on(mesh)), x)[1](y)[0]

    same(fs.testing.spmd(back, case.sizes)(x, y), expected)
    if "replicate" not in case.sizes and all(u.p.axes for s in (case.spec, new) for u in s):
        run = fs.testing.spmd(lambda mesh, x: fs.reshard(x, case.spec.on(mesh), new.on(mesh)), case.sizes)
        same(torch.func.vjp(run, x)[1](y)[0], expected)


@given(cases())
def test_l8_no_result_aliases_an_input(case: Case) -> None:
    """Writing zeros into what shard and reshard return leaves the parameters and the shards as they were."""
    before = {name: tensor.clone() for name, tensor in case.full.items()}
    alone = case.spec.on(dict.fromkeys(case.sizes, 1))
    shards = fs.shard(case.full, alone, rank=0)
    kept = {key: tensor.clone() for key, tensor in shards.items()}
    for result in (fs.reshard(shards, alone, alone), fs.unshard(shards, alone), fs.shard(case.full, alone, src=0)):
        for tensor in result.values():
            tensor.zero_()
    same(shards, kept)
    for result in (shards, fs.shard(case.model, alone, rank=0)):
        for tensor in result.values():
            tensor.fill_(9)
    same(case.full, before)
    assert not any(p.any() for p in case.model.parameters())  # modules() starts at zeros


@every(p=[P(), P("shard")], by=["a donated update", "hand"])
def test_unshard_gives_no_view_of_the_shards(p: P, by: str) -> None:
    """Where nothing is gathered either: on one rank, and of replicated units on any."""
    model = nn.Linear(3, 2)
    spec = fs.policies.whole(p)(model).on({"shard": 1})
    params = fs.shard(model, spec, rank=0)
    full = fs.unshard(params, spec)
    leaf = fs.shard(model, spec, rank=0)[""].requires_grad_()
    graph = fs.unshard({"": leaf}, spec)
    aux = torch.func.grad(lambda q: (q[""].sum(), fs.unshard(q, spec)), has_aux=True)(params)[1]
    seen = params[""].detach()  # but a view of a donated shard is one of the new values
    if by == "hand":
        new = params[""].zero_()
    else:
        init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0, donate=True)
        new = update({"": torch.ones_like(params[""])}, init(params), params)[0][""]
    assert torch.equal(seen, new)
    for name, own in model.named_parameters():
        assert torch.equal(full[name], own)
        assert torch.equal(aux[name], own)
    ones = fs.shard({name: torch.ones_like(x) for name, x in graph.items()}, spec, rank=0)[""]
    assert torch.equal(torch.autograd.grad(sum(x.sum() for x in graph.values()), leaf)[0], ones)
    mine = fs.shard(model, spec, rank=0)
    fs.unshard(mine, spec)["weight"].zero_()
    assert torch.equal(mine[""], fs.shard(model, spec, rank=0)[""])


@given(cases(), st.booleans())
def test_partition_and_combine_are_inverse(case: Case, of_units: bool) -> None:
    """combine(*partition(p)) is p; the parts are disjoint, and the predicate is asked with the unit or the parameter."""
    params = fs.shard(case.full, case.spec, rank=0) if of_units else case.full
    for predicate in (None, lambda owner: owner.numel % 2 == 0):
        trainable, frozen = fs.partition(params, case.spec, predicate)
        same(fs.combine(trainable, frozen), params)
        assert not trainable.keys() & frozen.keys()
        for key in params:
            owner = case.spec.by_key[key] if of_units else case.spec.by_name[key][1]
            assert (key in trainable) == (predicate is None or predicate(owner))


@given(cases(), st.data())
def test_a_part_of_the_tree_is_gathered_and_resharded_as_it_is_in_the_whole(case: Case, data: st.DataObject) -> None:
    """Of some units come their parameters and no others; and of another spec the units that these make, or an error."""
    chosen = {unit.key for unit in case.spec if data.draw(st.booleans())}
    names = {param.name for key in chosen for param in case.spec.by_key[key].params}
    new = data.draw(specs(case.model, case.sizes))
    made = {unit.key for unit in new if names.intersection(p.name for p in unit.params)}
    whole = {unit.key for unit in new if names.issuperset(p.name for p in unit.params)}

    def part(mesh: Mesh) -> tuple[fs.PartitionSpec, Params]:
        spec = case.spec.on(mesh)
        return spec, fs.partition(fs.shard(case.full, spec), spec, lambda unit: unit.key in chosen)[0]

    for gather in (fs.unshard, partial(fs.unshard, offload_to_cpu=True)):
        for full in on_ranks(case.sizes, lambda mesh: gather(*part(mesh)[::-1])):
            same(full, {name: tensor for name, tensor in case.full.items() if name in names})
    resharded = lambda mesh: fs.reshard(part(mesh)[1], part(mesh)[0], new.on(mesh))  # noqa: E731
    if made != whole:
        with pytest.raises(ValueError, match=r"is missing: expected all that the new spec's unit '.*' is made of, "):
            on_ranks(case.sizes, resharded)
        return
    for rank, shards in enumerate(on_ranks(case.sizes, resharded)):
        same(shards, {key: shard for key, shard in fs.shard(case.full, new, rank=rank).items() if key in made})


def test_partition_of_ignored_parameters() -> None:
    """They are frozen, whatever the predicate: no unit owns them, so nothing would reduce their gradient."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    spec = fs.policies.ignoring(fs.by_type(nn.Linear), params=["0.bias"])(model).on({"shard": 1})
    params = fs.shard(model, spec) | {"0.bias": model[0].bias.detach()}
    for predicate in (None, lambda owner: True):
        trainable, frozen = fs.partition(params, spec, predicate)
        assert (sorted(trainable), sorted(frozen)) == (["0", "1"], ["0.bias"])


# --- On real ranks, and what is refused there ---
def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))


def message(fn: object, *args: object, **kwargs: object) -> str:
    """What the error says that fn raises; empty for none."""
    try:
        fn(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


DIFFERENCES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "shape": (lambda m: m.__setitem__(1, nn.Linear(5, 7, bias=False)), r"'1\.bias' \[7\].*'1\.weight' \[7, 5\]"),
    "frozen": (lambda m: m[2].requires_grad_(False), r"'2\.bias' \[1\].*requires_grad=True.*requires_grad=False"),
    "policy": (lambda m: fs.policies.whole(), r"unit '0' P\('shard'\).*unit '' P\('shard'\)"),
    "ignored": (lambda m: fs.policies.ignoring(fs.by_type(nn.Linear), params=["1.bias"]), r"'1\.bias' \[7\].*'1\.weight'"),
}
"""What is done to the model of one rank, or its policy, and what the error says."""


def on_two_or_four(flat: bool) -> int:
    return 2 if flat else 4


@pytest.mark.parametrize(("flat", "odd"), [(True, 1), (False, 3), (False, 1)])
@pytest.mark.parametrize("what", sorted(DIFFERENCES))
@real_ranks(on_two_or_four)
def test_ranks_with_different_models(rank: int, what: str, flat: bool, odd: int) -> None:
    """shard raises on *every* rank, with what rank 0 has and what the other has; on two axes nobody waits for the odd one.

    (torch trains with different ignored modules on different ranks; here that is an error as well.)
    """
    model, (change, words) = layers(), DIFFERENCES[what]
    made = change(model) if rank == odd else None
    spec = (fs.by_type(nn.Linear) if made is None or isinstance(made, nn.Module) else made)(model)
    said = message(fs.shard, model, spec if flat else spec.on(mesh_of(2, 2)))
    pattern = rf"different models: expected, as on its rank 0, .*got on rank {odd} unit .*; build the same"
    assert re.search(pattern, said), said
    assert re.search(words, said), said


@pytest.mark.parametrize(("flat", "odd"), [(True, 0), (True, 1), (False, 3), (False, 2)])
@real_ranks(on_two_or_four)
def test_shard_of_a_model_changed_on_one_rank(rank: int, flat: bool, odd: int) -> None:
    """A model that one rank alone changed after the spec was made is an error on every rank that names the parameter."""
    model = layers()
    spec = fs.by_type(nn.Linear)(model)
    bound = spec if flat else spec.on(mesh_of(2, 2))
    if rank == odd:
        model[1].bfloat16()
    said = message(fs.shard, model, bound)
    assert re.search(r"parameter '1\.bias' of unit '1': expected torch\.float32, got torch\.bfloat16", said), said
    same(fs.shard(layers(), bound), fs.shard(values(layers()), bound, rank=rank))  # and nothing is out of step


W = "1.weight"
BAD_SOURCES: dict[str, tuple[Callable[[Params], Any], str]] = {
    "name": (lambda f: {"7.weight": f.pop(W), **f}, r"parameter '7\.weight' is not in the spec: expected names"),
    "dtype": (lambda f: {n: t.double() for n, t in f.items()}, r"'0\.weight': expected torch\.float32, got torch\.float64"),
    "none": (lambda f: None, r"shard: expected a model or full parameters by name, got None"),
    "not a tensor": (lambda f: f | {W: [1.0]}, r"'1\.weight' of unit '1': expected a tensor, got list"),
    "meta": (
        lambda f: {n: t.to("meta") for n, t in f.items()},
        r"parameter '0\.weight': expected a tensor with data, got a meta tensor",
    ),
}


@pytest.mark.parametrize(("flat", "src", "p"), [(True, 0, P("shard")), (True, 1, P()), (False, 2, P("shard"))])
@pytest.mark.parametrize("what", sorted(BAD_SOURCES))
@real_ranks(on_two_or_four)
def test_a_source_that_does_not_fit(rank: int, what: str, flat: bool, src: int, p: P) -> None:
    """What is wrong with the source's dict is the same ValueError on every rank, and the next call works."""
    model = layers()
    spec = fs.by_type(nn.Linear, p=p)(model)
    bound = spec.bound if flat else spec.on(mesh_of(2, 2))
    said = message(fs.shard, BAD_SOURCES[what][0](values(model)) if rank == src else None, bound, src=src)
    assert re.search(BAD_SOURCES[what][1], said), said
    good = fs.shard(values(model) if rank == src else None, bound, src=src)  # and nothing is out of step
    same(good, fs.shard(values(model), bound, rank=rank))


@real_ranks(2)
def test_a_spec_on_another_world(rank: int) -> None:
    """On more ranks than there are, on sizes alone, on a mesh of others: each says what the spec is on."""
    model, x = layers(), torch.ones(1, 3)
    spec = fs.policies.whole(P("shard", align=1))(model)
    shards, four = fs.shard(model, spec), spec.on({"shard": 4})
    alone = r"an axis of 2 ranks without a process group cannot communicate: .*"
    for call, words in (
        (
            lambda: fs.shard(model, four),
            r"sizes alone, \{'shard': 4\}: expected a rank in 0\.\.3, got None; give rank=, or bind .*\.on\(init_device",
        ),
        (
            lambda: fs.functional_call(model, shards, x, spec=four),
            r"unit '': expected a 1-D buffer of 18 elements, got shape \[35\]; .* another mesh than shard=4\?",
        ),
        (lambda: fs.functional_call(model, shards, x, spec=spec.on({"shard": 2})), rf"{alone} bind the spec with \.on\(mesh\)"),
        (lambda: fs.shard(values(model), spec.bound, src=2), r"rank 2 is not on the mesh.*expected 0\.\.1"),
        (lambda: fs.unshard(shards, pickle.loads(pickle.dumps(spec.bound))), rf"{alone} \(a pickled spec must be bound anew\)"),
    ):
        assert re.search(words, message(call)), message(call)
    said = message(lambda: fs.shard(model, spec.on(DeviceMesh("cpu", [0]))))
    assert bool(rank) == bool(re.search(r"rank 1 of the world is not on the mesh of ranks \[0\]: expected", said))


@real_ranks(4)
def test_l6_reshard(rank: int) -> None:
    """From any of one, two and four slices, of any policy, to any other, on a real 2 x 2 mesh."""
    model, mesh = layers(), mesh_of(2, 2)
    full = values(model)
    axes = ["shard", "replicate", ("replicate", "shard"), ("shard", "replicate"), None]
    policies = [lambda p: fs.policies.whole(p), lambda p: fs.by_type(nn.Linear, p=p), lambda p: fs.by_path({"1": p}, P())]
    specs = [policies[i % 3](P(axis, align=1 + i % 2))(model).on(mesh) for i, axis in enumerate(axes)]
    shards = {spec: fs.shard(full, spec) for spec in specs}
    for old, new in itertools.permutations(specs, 2):
        same(fs.reshard(shards[old], old, new), fs.shard(full, new, rank=rank))


@real_ranks(4)
def test_parts_of_the_tree(rank: int) -> None:
    """What partition gives is gathered and resharded by itself: LoRA's trainable part, which test_peft_llama.py trains."""
    model, mesh = layers().double(), mesh_of(2, 2)
    model[1].requires_grad_(False)
    spec = fs.by_type(nn.Linear, p=P(("shard", "replicate")))(model).on(mesh)
    new = fs.policies.override(fs.by_type(nn.Linear), fs.by_path({"1": P()}))(model).on(mesh)
    shards = fs.shard(model, spec)
    for part in fs.partition(shards, spec):
        names = {param.name for key in part for param in spec.by_key[key].params}
        full = {name: value for name, value in values(model).items() if name in names}
        same(fs.unshard(part, spec), full)
        for options in ({}, {"offload_to_cpu": True}, {"rank0_only": True}):
            same(fs.unshard(part, spec, **options), {} if rank and "rank0_only" in options else full)
        same(fs.reshard(part, spec, new), {key: s for key, s in fs.shard(model, new, rank=rank).items() if key in part})
