"""Gradients reduced when you say so: reduce_grads, and functional_call with reduce and reduce_axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, depth, every
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import real_ranks
from strategies import integers_like, meshes, modules, policies
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import P
from funshard.testing import spmd

HYBRID = {"replicate": 2, "shard": 2}


def total(sizes: Mapping[str, int]) -> int:
    return torch.Size(sizes.values()).numel()


def own(model: nn.Module, full: fs.Params, spec: fs.PartitionSpec, x: Tensor) -> fs.Params:
    """This rank's own full gradients."""
    return fs.grad(lambda full: fs.functional_call(model, full, (x,), spec=spec))(full)


def sharded(model: nn.Module, params: fs.Params, spec: fs.PartitionSpec, x: Tensor, **options: Any) -> fs.Params:
    return fs.grad(lambda params: fs.functional_call(model, params, (x,), spec=spec, **options))(params)


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-9, atol=1e-9, msg=key)


@settings(max_examples=depth(12, 300))
@given(st.data())
def test_reduced_later_as_at_once(data: st.DataObject) -> None:
    """On any model, policy and mesh, to the mean, the sum, or the sum over a number."""
    model = data.draw(modules(max_depth=2))
    policy, sizes = data.draw(policies(model)), data.draw(meshes(3))
    reduce = data.draw(st.sampled_from(["mean", "sum", 3.0, 0.5]))
    full = integers_like(model, high=2)
    xs = torch.arange(1.0, 1 + total(sizes), dtype=torch.float64)

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = policy(model).on(mesh)
        params = fs.shard(full, spec)
        later = fs.reduce_grads(own(model, fs.unshard(params, spec), spec, x), spec, reduce=reduce)
        by_unshard = fs.grad(lambda p: fs.functional_call(model, fs.unshard(p, spec, reduce=reduce), (x,), spec=spec))(params)
        return sharded(model, params, spec, x, reduce=reduce), later, by_unshard

    at_once, later, by_unshard = spmd(run, sizes)(xs)
    same(later, at_once)
    same(by_unshard, at_once)


@pytest.mark.parametrize("p", [P("shard"), P(), P("shard", reshard=False), P(("replicate", "shard"))], ids=str)
def test_over_some_axes_and_then_the_others(p: P) -> None:
    """The same as over all: gradients are partial in between, and so are those of functional_call with reduce_axes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    full = {name: t.detach() for name, t in model.named_parameters()}
    xs = torch.randn(4, 5, 3, dtype=torch.float64)
    first = [name for name in HYBRID if name in (p.axes or ("shard",))]
    rest = [name for name in HYBRID if name not in first]

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = fs.by_type(nn.Linear, p=p)(model).on(mesh)

        def loss(params: fs.Params, **options: Any) -> Tensor:
            return fs.functional_call(model, params, (x,), spec=spec, **options).square().mean()

        params = fs.shard(full, spec)
        whole = fs.grad(loss)(params)
        partial = fs.grad(lambda p: loss(p, reduce_axes=first))(params)
        by_hand = fs.reduce_grads(fs.grad(loss)(fs.unshard(params, spec)), spec, reduce_axes=first)
        done = fs.reduce_grads(partial, spec, reduce_axes=rest)
        return whole, partial, by_hand, done

    whole, partial, by_hand, done = spmd(run, HYBRID)(xs)
    same(by_hand, partial)
    same(done, whole)
    if rest:  # the replicas have their own
        assert not any(torch.equal(t[0], t[2] if rest == ["replicate"] else t[1]) for t in partial.values())


@at_most(2)
@every(p=[P("shard"), P("shard", reshard=False)], way=["fs", "torch.func"])
@real_ranks(4)
def test_micro_batches_with_one_all_reduce(rank: int, way: str, p: P) -> None:
    """HSDP on real ranks: three micro-batches reduced over the slices each, over the replicas once; or once altogether."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    spec = fs.by_type(nn.Linear, p=p)(model).on(mesh)
    params = fs.shard(model, spec)
    gradient = {"fs": fs.grad, "torch.func": torch.func.grad}[way]
    xs = [torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(3)]

    def loss(params: fs.Params, x: Tensor, **options: Any) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec, **options).square().mean()

    whole = [gradient(loss)(params, x) for x in xs]
    with Collectives() as log:
        partial = [gradient(lambda params, x=x: loss(params, x, reduce_axes="shard"))(params) for x in xs]
    assert not any(sent.op.startswith("all_reduce") for sent in log.all)
    accumulated = {key: torch.stack([g[key] for g in partial]).sum(0) for key in params}
    with Collectives() as log:
        done = fs.reduce_grads(accumulated, spec, reduce_axes="replicate")
    assert [sent.op for sent in log.all] == ["all_reduce"] * len(spec)
    same(done, {key: torch.stack([g[key] for g in whole]).sum(0) for key in params})
    full = fs.unshard(params, spec)
    local = [gradient(loss)(full, x) for x in xs]
    with Collectives() as log:
        once = fs.reduce_grads({name: torch.stack([g[name] for g in local]).sum(0) for name in full}, spec)
    assert len(log.all) == 2 * len(spec)
    same(once, done)


@settings(max_examples=depth(12, 300))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_reduce_mean_is_the_mean_over_all_samples(counts: list[int]) -> None:
    """On ranks with any numbers of samples, none at all among them, where the rank's own mean is NaN."""
    model = nn.Linear(3, 1).double()
    full = {name: t.detach() for name, t in model.named_parameters()}
    most, n = max(counts), len(counts)
    xs = torch.randn(n, max(most, 1), 3, dtype=torch.float64)
    mask = torch.arange(max(most, 1)) < torch.tensor(counts)[:, None]

    def mean(params: fs.Params, x: Tensor, mask: Tensor) -> Tensor:
        losses = torch.func.functional_call(model, params, (x,)).square().squeeze(-1)
        return torch.where(mask, losses, 0).sum() / mask.sum()

    def run(mesh: fs.collectives.Mesh, x: Tensor, mask: Tensor) -> Any:
        spec = fs.policies.whole()(model).on(mesh)
        params = fs.shard(full, spec)
        grads = fs.reduce_grads(torch.func.grad(mean)(fs.unshard(params, spec), x, mask), spec, weight=mask.sum())

        return fs.weight_share(mask.sum(), spec), fs.unshard(grads, spec)

    shares, got = spmd(run, n)(xs, mask)
    torch.testing.assert_close(
        shares.double(), torch.tensor(counts) / max(sum(counts), 1), rtol=1e-6, atol=0, check_dtype=False
    )
    if not sum(counts):
        assert not any(t.any() for t in got.values())
        return
    expected = torch.func.grad(lambda p: mean(p, xs.flatten(0, 1), mask.flatten()))(full)
    for name, g in expected.items():
        torch.testing.assert_close(got[name][0], g, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [-2.0, math.nan, math.inf])
def test_a_weight_that_is_no_number_of_samples(wrong: float) -> None:
    """All ranks' shares are NaN, and none is 0 without a word."""
    spec = fs.policies.whole()(nn.Linear(3, 1))
    shares = spmd(lambda mesh, weight: fs.weight_share(weight, spec.on(mesh)), 2)(torch.tensor([2.0, wrong]))
    assert shares.isnan().all()


@real_ranks(2)
def test_a_weighted_loss_is_reduced_in_backward(rank: int) -> None:
    """``loss * weight_share`` and ``reduce="sum"`` on two ranks with two and five samples: the mean over seven."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    spec = fs.policies.whole()(model).on(mesh)
    params = fs.shard(model, spec)
    xs = torch.randn(7, 3, dtype=torch.float64)
    x = xs[:2] if rank == 0 else xs[2:]

    def loss(params: fs.Params) -> Tensor:
        value = fs.functional_call(model, params, (x,), spec=spec, reduce="sum").square().mean()
        return value * fs.weight_share(len(x), spec)

    got = fs.grad(loss)(params)
    own = fs.grad(lambda p: loss(p) / fs.weight_share(len(x), spec))(fs.unshard(params, spec))
    later = fs.reduce_grads(own, spec, weight=len(x))
    full = {name: t.detach() for name, t in model.named_parameters()}
    expected = fs.shard(torch.func.grad(lambda p: torch.func.functional_call(model, p, (xs,)).square().mean())(full), spec)
    for key, g in expected.items():
        torch.testing.assert_close(got[key], g, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(later[key], g, rtol=1e-6, atol=1e-7)


class Total(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_history_in_float32() -> None:
    """What is accumulated as you say: 256 + 1 - 256 is 1 in float32, and 0 where it is added up in bfloat16."""
    model = Total(1, 1, bias=False)
    spec = fs.policies.whole(P("shard", align=1, precision=fs.Precision(param=torch.bfloat16, reduce=torch.float32)))(model)

    def run(mesh: fs.collectives.Mesh, *steps: Tensor) -> Tensor:
        bound = spec.on(mesh)
        shards = fs.shard({"weight": torch.zeros(1, 1)}, bound)
        acc = {"weight": torch.zeros(1, 1)}
        low = {"weight": torch.zeros(1, 1, dtype=torch.bfloat16)}
        for x in steps:
            g = own(model, fs.unshard(shards, bound), bound, x)
            acc = {name: acc[name] + t for name, t in g.items()}
            low = {name: low[name] + t.bfloat16() for name, t in g.items()}
        return torch.cat([fs.reduce_grads(tree, bound)[""].float() for tree in (acc, low)])

    steps = (torch.full((2, 1), v) for v in (256.0, 1.0, -256.0))
    assert spmd(run, 2)(*steps)[0].tolist() == [1.0, 0.0]


def test_what_is_wrong_is_said_before_anything_is_sent() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        spec = fs.by_type(nn.Linear)(model).on(mesh)
        full = {name: t.detach() for name, t in model.named_parameters()}
        params = fs.shard(full, spec, rank=0)

        def loss(**options: Any) -> Tensor:
            return fs.functional_call(model, params, (torch.ones(2, 3),), spec=spec, **options)

        with Collectives() as log:
            with pytest.raises(ValueError, match=r"unit '0' is split over axis 'shard'.*got axes \['replicate'\]"):
                fs.reduce_grads(full, spec, reduce_axes=["replicate"])
            with pytest.raises(ValueError, match="unit '0' is split over axis 'shard'"):
                loss(reduce_axes=["replicate"])
            with pytest.raises(ValueError, match="unknown mesh axis 'model': expected some of"):
                loss(reduce_axes=["shard", "model"])
            with pytest.raises(ValueError, match="unit '0': a slice cannot be reduced over axis 'shard'"):
                fs.reduce_grads(params, spec)
            with pytest.raises(ValueError, match="'mean', 'sum' or a positive number"):
                loss(reduce=0.0)
            with pytest.raises(ValueError, match=r"'mean', 'sum' or a positive number.*got 'avg'"):
                fs.reduce_grads(full, spec, reduce="avg")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"parameter '0.bias' of unit '0' is missing"):
                fs.reduce_grads({"0.weight": full["0.weight"]}, spec)
            with pytest.raises(ValueError, match="unit 'nowhere' is not in the spec"):
                fs.reduce_grads({**full, "nowhere": full["0.bias"]}, spec)
        assert not log.all


def test_some_units_only() -> None:
    """The gradients of the units that are given, as of a model of which a part is frozen."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    spec = fs.by_type(nn.Linear)(model).on({"shard": 1})
    full = {name: t.detach() for name, t in model[1].named_parameters(prefix="1")}
    assert list(fs.reduce_grads(full, spec)) == ["1"]


@pytest.mark.parametrize("others", [{"reduce": "sum"}, {"reduce_axes": ("shard",)}], ids=str)
def test_a_weight_stands_alone(others: dict[str, Any]) -> None:
    """It is a share of all ranks' weights: a sum over some axes, or another division, would be no mean."""
    model = torch.nn.Linear(2, 1)
    spec = fs.policies.whole()(model).on({"shard": 1})
    with pytest.raises(ValueError, match=r"reduce_grads: expected weight= alone, got reduce="):
        fs.reduce_grads(dict(model.named_parameters()), spec, weight=1, **others)
