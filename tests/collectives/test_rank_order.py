"""Ranks that run other units, or the same ones in another order: an error on every rank, and never each other's slices."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same
from collective_log import Collectives
from depth import at_most, each, every, seldom
from hypothesis import given
from hypothesis import strategies as st
from models import refused
from parity import DERIVATIVES, loss_of, numbers, shards_of, strategies
from ranks import Pool, mesh_of, real_ranks
from test_gather_full import values
from test_sharding import layers, message
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import funshard as fs
from funshard import P, _torch
from funshard._sharding.sharding import hash_params
from funshard.collectives._agree import check_sequence

torch.manual_seed(0)


class Routed(nn.Module):
    """Experts of one size, each a unit, that run in the order that the caller says."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(experts))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        for i in route:
            x = self.experts[i](x).sin()
        return self.head(x)


DOUBLE = fs.P("shard", precision=fs.Precision(param=torch.float32, reduce=torch.float64))
STRATEGIES = strategies("shard", "keep", "remat", "replicated", precision=DOUBLE)
ENCODED = fs.Precision(reduce=torch.float32, reduce_codec=fs.codecs.int8())
ROUTES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one expert, by rank": lambda rank: (rank,),
    "reversed on one rank": lambda rank: (0, 1, 2) if rank == 0 else (2, 1, 0),
    "one more on one rank": lambda rank: (0, 1) if rank == 0 else (0, 1, 2),
}


def own_group() -> DeviceMesh:
    """All ranks with a process group of their own: after an error its ranks may have started different collectives."""
    group: Any = dist.new_group()
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


def assert_says(error: str, *words: str) -> None:
    for word in words:
        assert word in error, error


def by_route(
    rank: int,
    route: tuple[int, ...],
    mesh: DeviceMesh | None = None,
    experts: int = 3,
    p: P = STRATEGIES["shard"],
    **options: Any,
) -> tuple[Callable[[fs.Params], Tensor], fs.Params]:
    """The loss of a rank whose experts run so, and its shards; by default in a group of its own."""
    torch.manual_seed(0)
    model = Routed(experts).double()
    spec, params = shards_of(fs.by_type(nn.Linear, p=p), model, mesh or own_group())
    return loss_of(model, spec, numbers(rank, 0, width=6), route, **options), params


def routed(rank: int, strategy: str, route: str, step: str, **options: Any) -> str:
    """What a rank's step says, '' where it ends."""
    loss, params = by_route(rank, ROUTES[route](rank), p=STRATEGIES[strategy], **options)
    return message(DERIVATIVES[step](loss), params)


@at_most(7)
@each(step=["fs.grad", "torch.func.grad", "hvp", "jvp"], route=ROUTES, strategy=STRATEGIES)
@real_ranks(2)
def test_ranks_that_run_other_units_get_an_error(rank: int, strategy: str, route: str, step: str) -> None:
    """Others, in another order, or one more."""
    if strategy == "replicated" and step == "jvp":
        step = "fs.grad"  # of the others nothing is sent
    words = ("unit '",) if route == "one more on one rank" else ("ranks", "unit 'experts.", "check_order=False")
    assert_says(routed(rank, strategy, route, step), *words)


def early(rank: int, layers: int, strategy: str, routes: tuple[tuple[int, ...], ...], step: str) -> str:
    """What a rank says that ends forward with other units than the other one, in a group with a timeout of 20 seconds."""
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers)).double()
    model.forward = lambda x: [x := model[i](x).sin() for i in routes[rank]][-1] if routes[rank] else x
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    spec = fs.by_type(nn.Linear, p=STRATEGIES[strategy])(model).on(mesh)
    x = numbers(rank, 0, width=6).requires_grad_()
    loss = DERIVATIVES[step](lambda params: fs.functional_call(model, params, (x,), spec=spec).sum())
    return message(loss, fs.shard(model, spec))


@at_most(3)
@every(strategy=STRATEGIES, step=["fs.grad", "no_grad"])
@real_ranks(2)
def test_a_rank_that_leaves_out_the_last_unit_is_an_error(rank: int, strategy: str, step: str) -> None:
    """Its gather was started ahead on both, which compare when forward ends what they have used."""
    step = "fs.grad" if strategy == "replicated" else step  # of the others nothing is sent
    error = early(rank, 2, strategy, ((0, 1), (0,)), step)
    assert_says(error, "ranks ran different units", "unit '1'", "check_order=False")


@real_ranks(2)
def test_another_group_goes_on_after_the_error(rank: int) -> None:
    """No call of the world's waits for what the other rank, which has gathered one more ahead, has never started."""
    assert "ranks ran different units" in early(rank, 2, "shard", ((0,), (1,)), "no_grad")
    model, x = nn.Linear(6, 6, dtype=torch.float64), torch.ones(6).double()
    spec, params = shards_of(fs.policies.whole(), model)
    assert torch.equal(fs.functional_call(model, params, (x,), spec=spec), model(x))


def with_unequal_losses(rank: int, strategy: str, checked: bool = False) -> str:
    """The same forward on all ranks, and on one of them a loss that does not depend on what came last."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
    p = P("shard", reshard=False, align=64, precision=ENCODED) if strategy == "encoded" else STRATEGIES[strategy]
    spec = fs.by_type(nn.Linear, p=p)(model).on(own_group())
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out))

    def loss(params: fs.Params) -> Tensor:
        out = fs.functional_call(model, params, (numbers(rank, 0, width=6),), spec=spec)
        return (seen[-1] if rank else out).sum()

    run = fs.grad(loss)
    return message(fs.check(timeout=20)(run) if checked else run, fs.shard(model, spec))


@real_ranks(2)
def test_losses_that_depend_on_other_units_are_an_error(rank: int) -> None:
    """Of replicas, which are reduced together when backward ends."""
    assert_says(with_unequal_losses(rank, "replicated"), "ranks ran different units")


@at_most(2)
@pytest.mark.parametrize("strategy", ["shard", "keep", "encoded", "remat", "precision"])
def test_the_check_names_losses_that_depend_on_other_units(gloo2: Pool, strategy: str) -> None:
    """It compares each reduction before it starts: without it a rank with more of them waits for the timeout."""
    for error in gloo2.run(with_unequal_losses, strategy, True):
        assert_says(error, "ranks disagree on collective", "unit '1'")
    gloo2.stop()  # some collectives have started on one rank only


@real_ranks(2)
def test_ranks_that_unshard_other_units_get_an_error(rank: int) -> None:
    model = Routed(2)
    spec, shards = shards_of(fs.by_type(nn.Linear), model, own_group())
    words = "gather_mean of unit 'experts.0' on rank 0, and gather_mean of unit 'experts.1' on rank 1"
    refused(RuntimeError, words, lambda: fs.unshard(shards, spec, units=[f"experts.{rank}"]))


@real_ranks(2)
def test_a_forward_without_a_backward_is_compared(rank: int) -> None:
    """Also where it requires grad; a right one after a wrong one is right."""
    model = Routed(2).double()
    spec = fs.by_type(nn.Linear, p=fs.P("shard", precision=fs.Precision(codec=fs.codecs.int8())))(model)
    params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}

    def call(route: tuple[int, ...]) -> Tensor:
        return fs.functional_call(model, params, (numbers(rank, 0, width=6), route), spec=spec, prefetch=0)

    refused(RuntimeError, "ranks ran different units", lambda: call((rank, 1 - rank)))
    call((0, 1))


def left_alone(rank: int) -> str:
    """What rank 0 says where rank 1 compares nothing, in a group with a timeout of two seconds."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    return message(check_sequence, ["a gather"], group.group_name, torch.ones(1)) if rank == 0 else ""


def test_a_rank_that_compares_nothing_is_an_error_within_the_timeout(gloo2: Pool) -> None:
    said, _ = gloo2.run(left_alone)
    gloo2.stop()
    assert "one has not come to the first one within the process group's timeout" in said


@real_ranks(2)
def test_check_order_can_be_turned_off(rank: int) -> None:
    assert routed(rank, "keep", "reversed on one rank", "no_grad", check_order=False) == ""


def replicas(rank: int) -> list[str]:
    """HSDP on 2 x 2 ranks: two replicas may evaluate other units, and may not train them."""
    loss, params = by_route(rank, (0, 1) if rank < 2 else (1, 0), mesh_of(2, 2), 2)
    return [message(torch.no_grad()(loss), params), message(fs.grad(loss), params)]


def test_replicas_are_compared_where_they_reduce(gloo4: Pool) -> None:
    said = gloo4.run(replicas)
    gloo4.stop()  # whose ranks have started different collectives on groups that other tests would use
    for alone, trained in said:
        assert alone == ""
        assert "ran different units" in trained


def with_more_groups(rank: int, folder: str) -> None:
    """A pair of ranks makes process groups that the others do not know, then all train as replicas, and pairs save."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = mesh_of(2, 2)
    loss, params = by_route(rank, (0,), mesh, 1)
    fs.grad(loss)(params)
    torch.manual_seed(0)
    model = Routed(1)
    across = fs.by_type(nn.Linear, p=fs.P("replicate"))(model).on(mesh["replicate"], submesh=True)  # ranks 0 and 2, 1 and 3
    fs.checkpoint.save(f"{folder}/{rank % 2}", fs.shard(model, across), across, timeout=30)


@seldom
def test_ranks_that_have_made_different_numbers_of_groups(gloo4: Pool, tmp_path: Path) -> None:
    """torch names a group of some ranks by how many a process has: ranks would wait for groups of different names for ever."""
    gloo4.stop()  # none of these groups is there yet
    gloo4.run(with_more_groups, str(tmp_path))
    gloo4.stop()  # whose ranks have different numbers of process groups


@real_ranks(4)
def test_no_rank_returns_values_where_one_between_others_ran_another_unit(rank: int) -> None:
    """All ranks compare what they have gathered at the end of forward."""
    loss, params = by_route(rank, (0, 2) if rank == 1 else (0, 1), prefetch=0)
    assert message(torch.no_grad()(loss), params).startswith("ranks ran different units")


# --- ranks slice what each of them holds itself: shard compares the values first ---
KINDS = {
    "P('shard')": lambda model: fs.by_type(nn.Linear)(model).bound,
    "P()": lambda model: fs.policies.whole(P())(model).bound,
    "HSDP": lambda model: fs.by_type(nn.Linear)(model).on(mesh_of(2, 2)),
}


@every(by_name=[False, True], kind=sorted(KINDS))
@real_ranks(lambda kind: 4 if kind == "HSDP" else 2)
def test_models_of_different_seeds(rank: int, kind: str, by_name: bool) -> None:
    """An error on every rank with the first parameter that differs and the ranks where; the next call is in step."""
    torch.manual_seed(rank // 2)  # of four ranks 2 and 3 alike, of two none: where there is no common seed
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    with torch.no_grad():
        model[0].bias.zero_()  # what is alike is not named
        model[0].weight.add_(0 if kind == "HSDP" else rank)
    said = message(fs.shard, values(model) if by_name else model, KINDS[kind](model))
    unit, (ranks, total) = "" if kind == "P()" else "0", ("ranks 2, 3", "3") if kind == "HSDP" else ("rank 1", "1")
    before = "expected the same values .* got others on"
    words = rf"parameter '0\.weight' of unit '{unit}': {before} {ranks} than on rank 0 \({total} of 4"
    assert re.search(words, said), said
    assert re.search(r"torch\.manual_seed .*shard\(\.\.\., src=0\).*check_values=False", said)
    whole = fs.policies.whole()(layers())
    same(fs.shard(layers(), whole), fs.shard(values(layers()), whole.bound, rank=rank))


@real_ranks(2)
def test_values_that_are_meant_to_differ(rank: int) -> None:
    """With check_values=False each rank's slice is of its own."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 5)
    for p in (P("shard"), P()):
        spec = fs.policies.whole(p)(model).bound
        for own in (model, values(model)):
            same(fs.shard(own, spec, check_values=False), fs.shard(own, spec, rank=rank))


@real_ranks(2)
def test_values_are_compared_where_they_can_be(rank: int) -> None:
    """Not in a transform, a recording or on shapes alone: there nothing is sent."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    spec = fs.policies.whole(P())(model).bound
    grads = torch.func.grad(lambda full: (fs.shard(full, spec)[""] ** 2).sum())({"w": torch.full((3,), float(rank))})
    same(grads, {"w": torch.full((3,), 2.0 * rank)})
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(_torch.is_eager())
        return x.sum()

    x = torch.ones(2)
    for run in (torch.func.grad(look), torch.vmap(look), make_fx(look)):
        run(x)
    with _torch.fake_mode():
        look(torch.ones(2))
    assert seen == [False] * 4
    with torch.device("meta"), torch.no_grad():
        look(x)
    assert seen[4:] == [True]


@pytest.mark.parametrize("alone", [False, True])
@real_ranks(2)
def test_hosts_compare_a_digest(rank: int, alone: bool) -> None:
    """Nothing comes between the collectives of the mesh. One rank sends nothing."""
    model = layers()
    spec = fs.by_type(nn.Linear)(model)
    spec = spec.on({"shard": 1}) if alone else spec.bound
    with Collectives() as log:
        fs.shard(model, spec)
    assert (len(spec), log.all) == (3, [])


# --- Values of one rank. ---
@pytest.mark.parametrize("p", [P("shard"), P("shard", align=4), P(), P(("replicate", "shard"))], ids=str)
@pytest.mark.parametrize(("ranks", "src"), [(2, 1), (4, 0), (4, 2), (4, 3)])
@real_ranks(lambda ranks: ranks)
def test_values_of_one_rank(rank: int, ranks: int, src: int, p: P) -> None:
    """With ``src`` every rank has slices of that rank's values; the others' models may be without any."""
    torch.manual_seed(src)
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    torch.manual_seed(rank)
    with torch.device("cpu" if rank == src else "meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    before = values(model)
    spec = fs.by_type(nn.Linear, p=p)(model).on(mesh_of(1, 2) if ranks == 2 else mesh_of(2, 2))
    same(fs.shard(model, spec, src=src), fs.shard(expected, spec, rank=rank))
    same(fs.shard(values(model), spec, src=src), fs.shard(expected, spec, rank=rank))
    if rank == src:
        same(values(model), before)


@real_ranks(2)
def test_ranks_that_ask_for_different_things(rank: int) -> None:
    """Another source, or another check, on another rank: an error on each that says which."""
    model = layers()
    spec = fs.policies.whole()(model).bound
    for options, words in (
        ({"src": rank}, "src=0; got on rank 1 src=1"),
        ({"src": 0} if rank else {}, "check_values=True; got on rank 1 src=0"),
        ({"check_values": bool(rank)}, "check_values=False; got on rank 1 check_values=True"),
    ):
        assert_says(message(fs.shard, model, spec, **options), words)
    same(fs.shard(model, spec), fs.shard(model, spec, rank=rank))


def test_src_where_there_is_none() -> None:
    """Of simulated ranks all are one process, where nothing is compared: each is handed its values; rank= is no source."""
    model, narrow = layers(), fs.policies.whole(P(align=1))(nn.Linear(2, 1, bias=False))
    run = fs.testing.spmd(lambda mesh, w: fs.shard({"weight": w}, narrow.on(mesh))[""], 3)
    assert torch.equal(run(torch.arange(6.0).view(3, 1, 2)), torch.arange(6.0).view(3, 2))
    with pytest.raises(ValueError, match=r"src= on a simulated mesh: expected process groups"):
        fs.testing.spmd(lambda mesh, _: fs.shard(values(model), fs.policies.whole()(model).on(mesh), src=0), 2)(torch.zeros(2))
    with pytest.raises(ValueError, match=r"expected rank= or src=, got both: 1 and 0"):
        fs.shard(model, fs.policies.whole()(model), rank=1, src=0)
    same(fs.shard(model, fs.policies.whole()(model), src=0), fs.shard(model, fs.policies.whole()(model)))


# --- The numbers that stand for values. ---
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


def digest(*tensors: Tensor) -> list[int]:
    model = nn.Module()
    for i, t in enumerate(tensors):
        model.register_parameter(f"w{i}", nn.Parameter(t, requires_grad=False))
    named = dict(model.named_parameters())
    return hash_params(named, fs.by_path({})(model).on({"shard": 1})).tolist()


def bits(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Any bits at all: NaNs of every kind, -0.0, infinities."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@given(st.sampled_from(DTYPES), st.integers(1, 300), st.integers(0, 9999), st.data())
def test_a_changed_element_always_shows(dtype: torch.dtype, numel: int, seed: int, data: st.DataObject) -> None:
    """Equal bits give equal numbers, wherever they lie in memory; one changed bit, and two exchanged elements, others."""
    x = bits(dtype, numel, seed)
    offset = torch.cat([bits(dtype, data.draw(st.integers(0, 9)), 1), x])[-numel:]
    strided = torch.stack([x, x], 1)[:, 0]
    assert digest(x, offset) == digest(offset, strided) == digest(x.clone(), x)
    raw, at = x.clone().view(torch.uint8), data.draw(st.integers(0, numel * dtype.itemsize - 1))
    raw[at] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert digest(raw.view(dtype)) != digest(x)
    i, j = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, numel - 1))
    swapped = x.clone()
    swapped[i], swapped[j] = x[j].clone(), x[i].clone()
    assert (digest(swapped) == digest(x)) == torch.equal(swapped.view(torch.uint8), x.view(torch.uint8))


def test_digests_of_long_tensors_and_of_odd_shapes() -> None:
    """A changed element shows over more than one piece of what is looked at together, also where equal changes are far apart.

    Meta tensors count as alike; empty and 0-dim parameters and other memory orders are values like others.
    """
    x = torch.ones(1 << 19)
    own = digest(x)
    for places in ([0], [(1 << 19) - 1], [1 << 18], [5, 5 + (1 << 18)]):
        y = x.clone()
        y[places] = 2.0
        assert digest(y) != own
    rolled = torch.arange(1 << 19)
    assert digest(rolled) != digest(rolled.roll(1 << 17))
    assert digest(torch.empty(3, device="meta")) == [0]
    assert digest(torch.zeros(0), torch.tensor(3.0)) == digest(torch.zeros(0), torch.full((1,), 3.0))
    x = torch.randn(2, 3, 4, 5)
    assert digest(x.to(memory_format=torch.channels_last)) == digest(x.permute(0, 2, 3, 1).contiguous())
