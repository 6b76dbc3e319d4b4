"""Laws L3 to L8 of sharding, on simulated ranks and with ranks as arguments; partition and combine; adjoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import strategies
import torch
from cases import Case, cases, each_rank, on_ranks, poisoned, same, specs, stacked
from depth import depth, every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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


def adamw(params: Params, grads: Params, steps: int = 3) -> Params:
    leaves = {key: nn.Parameter(tensor.clone()) for key, tensor in params.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.1, weight_decay=0.3)
    for _ in range(steps):
        for key, leaf in leaves.items():
            leaf.grad = grads[key]
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


def output(case: Case, params: Params, spec: PartitionSpec, x: Tensor) -> Tensor:
    return fs.functional_call(case.model, params, (x,), spec=spec)


@given(cases())
def test_unshard_inverts_shard(case: Case) -> None:
    """U(S(t)) is t on every rank, whatever the policy and the mesh; as values without gradient, too."""
    for gather in (fs.unshard, partial(fs.unshard, offload_to_cpu=True)):
        for full in on_ranks(case.sizes, lambda mesh: gather(fs.shard(case.full, case.spec.on(mesh)), case.spec.on(mesh))):
            same(full, case.full)


@given(cases())
def test_shard_is_the_same_with_a_rank_and_on_it(case: Case) -> None:
    """shard(..., rank=r) is what rank r gets, from a module as from its parameters."""
    expected = each_rank(case.full, case.spec)
    for rank, shards in enumerate(on_ranks(case.sizes, lambda mesh: fs.shard(case.full, case.spec.on(mesh)))):
        same(shards, expected[rank])
    values = {name: p.detach() for name, p in case.model.named_parameters()}
    for rank in case.ranks:
        same(fs.shard(case.model, case.spec, rank=rank), fs.shard(values, case.spec, rank=rank))


@given(cases())
def test_unshard_of_some_units(case: Case) -> None:
    """``units`` gathers these and no others: their parameters, bit by bit (recurse and submodules, rows C2 and C11)."""
    chosen = [unit.key for unit in case.spec][::2]
    names = {param.name for key in chosen for param in case.spec.by_key[key].params}
    for full in on_ranks(
        case.sizes, lambda mesh: fs.unshard(fs.shard(case.full, case.spec.on(mesh)), case.spec.on(mesh), units=chosen)
    ):
        same(full, {name: tensor for name, tensor in case.full.items() if name in names})


@settings(max_examples=depth(6, 300))
@given(cases(), st.integers(-2, 2))
def test_l3_padding_is_never_observable(case: Case, x: int) -> None:
    """With NaN in every padding: unshard, outputs, and gradients through functional_call and unshard are the same."""
    clean = each_rank(case.full, case.spec)
    bad = [poisoned(shards, case.spec, rank) for rank, shards in enumerate(clean)]
    xs = torch.arange(len(clean)).double() + x

    def results(mesh: Mesh, params: Params, x: Tensor) -> list[Params]:
        spec = case.spec.on(mesh)
        loss = lambda params: output(case, params, spec, x)  # noqa: E731
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


@given(nonempty, st.integers(0, 9))
def test_l5_adamw_commutes_with_sharding(case: Case, seed: int) -> None:
    """The same for torch's AdamW on real values, to rounding: vectorised and scalar code may round differently."""
    generator = torch.Generator().manual_seed(seed)
    full, grads = (
        {name: torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in case.full.items()} for _ in range(2)
    )
    expected = each_rank(adamw(full, grads), case.spec)
    for rank in case.ranks:
        params, slopes = (fs.shard(tree, case.spec, rank=rank) for tree in (full, grads))
        torch.testing.assert_close(adamw(params, slopes), expected[rank], rtol=1e-14, atol=1e-14)


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


def test_partition_by_requires_grad_trains_only_the_trainable() -> None:
    """LoRA and BitFit: differentiate with respect to the first part and combine inside the loss."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    spec = fs.by_type(nn.Linear, p=P("shard", align=1))(model).on({"shard": 1})
    trainable, frozen = fs.partition(fs.shard(model, spec, rank=0), spec)
    assert (sorted(trainable), sorted(frozen)) == (["0", "1"], ["0:frozen", "1:frozen"])
    x = torch.ones(4, 2, dtype=torch.float64)
    grads = fs.grad(lambda part: fs.functional_call(model, fs.combine(part, frozen), (x,), spec=spec).sum())(trainable)
    expected = torch.autograd.grad(model(x).sum(), [model[0].bias, model[1].bias])
    torch.testing.assert_close(list(grads.values()), list(expected))


def test_partition_of_ignored_parameters() -> None:
    """They are frozen, whatever the predicate: no unit owns them, so nothing would reduce their gradient."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    spec = fs.policies.ignoring(fs.by_type(nn.Linear), params=["0.bias"])(model).on({"shard": 1})
    params = fs.shard(model, spec) | {"0.bias": model[0].bias.detach()}
    for predicate in (None, lambda owner: True):
        trainable, frozen = fs.partition(params, spec, predicate)
        assert (sorted(trainable), sorted(frozen)) == (["0", "1"], ["0.bias"])


def test_an_axis_of_one_rank_knows_its_rank() -> None:
    """A mesh given as sizes knows no ranks, but of one rank there is only one."""
    mesh = Mesh.of({"replicate": 2, "shard": 1})
    assert (mesh["replicate"].rank, mesh["shard"].rank) == (None, 0)
    model = nn.Linear(2, 3)
    assert torch.equal(fs.shard(model, fs.policies.whole()(model).on({"shard": 1}))[""][:3], model.bias)
