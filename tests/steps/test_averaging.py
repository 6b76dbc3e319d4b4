"""averaging as laws on simulated ranks, and beside torch's averagers, optimizer and hook on real ones, step by step."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from cases import Case, cases, each_rank, on_ranks, same, stacked
from collective_log import Collectives, world
from depth import at_most, mark_seldom, seldom
from hypothesis import given
from hypothesis import strategies as st
from models import refused
from parity import numbers, plain_call, squared
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import averaging as av

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit")  # torch's own, at import
    from torch.distributed.optim import PostLocalSGDOptimizer

torch.manual_seed(1)  # the same on every rank
MODEL = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5)).double()
REPLICATED = fs.policies.always(fs.P())
HYBRID = {"replicate": 2, "shard": 2}
MIXED = fs.by_path({"0": fs.P("shard"), "1": fs.P()})
PAIRS = {"quad": 2, "pair": 2}
LEVELS = [(2, "pair"), (4, ("quad", "pair"))]
AXES = {2: "pair", 4: ("quad", "pair"), 8: ("all", "quad", "pair")}
SPEC = MIXED(MODEL).on(HYBRID)
ONES = {"0": torch.ones(12).double(), "1": torch.ones(25).double()}


def at(step: int) -> av.Averaging:
    """The state after some steps."""
    return av.Averaging(torch.tensor(step))


def drift(params: fs.Params, *seed: int) -> fs.Params:
    """Each moved by another amount: whole numbers, of which the mean over so few ranks is exact."""
    generator = torch.Generator().manual_seed(hash(seed))
    return {key: p + torch.randint(-9, 9, p.shape, generator=generator).to(p.dtype) for key, p in params.items()}


def drifted(case: Case) -> list[fs.Params]:
    """Each rank's shards, moved by that rank's own amount and multiplied so that every mean is whole."""
    n = math.prod(case.sizes.values())
    shards = each_rank(case.full, case.spec)
    return [{key: n * p for key, p in drift(of_rank, rank).items()} for rank, of_rank in enumerate(shards)]


def means(many: list[fs.Params], sizes: dict[str, int], over: dict[str, tuple[str, ...]]) -> list[fs.Params]:
    """The mean of every key over its axes, on every rank."""
    out = {}
    for key, x in stacked(many).items():
        grid = x.unflatten(0, tuple(sizes.values()))
        dims = [list(sizes).index(name) for name in over[key]]
        out[key] = (grid.mean(dims, keepdim=True) if dims else grid).expand_as(grid).flatten(0, len(sizes) - 1)
    return [{key: x[rank] for key, x in out.items()} for rank in range(len(many))]


@given(cases())
def test_by_default_over_what_a_unit_is_not_split_over(case: Case) -> None:
    """The mean over replicas, which is the same for all of them, and nothing more to average."""
    many = drifted(case)
    before = copy.deepcopy(many)
    got = on_ranks(case.sizes, lambda mesh, p: av.average(p, case.spec.on(mesh)), stacked(many))
    over = {unit.key: tuple(name for name in case.sizes if name not in unit.p.axes) for unit in case.spec}
    again = on_ranks(case.sizes, lambda mesh, p: av.average(p, case.spec.on(mesh)), stacked(got))
    for rank, want in enumerate(means(many, case.sizes, over)):
        same(got[rank], want)
        same(again[rank], want)
        same(many[rank], before[rank])


@given(cases(), st.data())
def test_over_some_axes(case: Case, data: st.DataObject) -> None:
    """As given, whatever their order; a unit that is split over one of them is an error that names it."""
    names = tuple(data.draw(st.lists(st.sampled_from(list(case.sizes)), unique=True)))
    axes = names[0] if len(names) == 1 and data.draw(st.booleans()) else names
    split = [unit.key for unit in case.spec if set(names) & set(unit.p.axes)]
    many = drifted(case)
    for key in split:
        with pytest.raises(ValueError, match=rf"unit '{re.escape(key)}' is split over '\w+'.*expected axes without it, got"):
            av.average({key: many[0][key]}, case.spec, axes=axes)
    many = [{key: p for key, p in of_rank.items() if key not in split} for of_rank in many]
    if many[0]:
        got = on_ranks(case.sizes, lambda mesh, p: av.average(p, case.spec.on(mesh), axes=axes), stacked(many))
        for rank, want in enumerate(means(many, case.sizes, dict.fromkeys(many[0], names))):
            same(got[rank], want)


def test_gradients_go_through() -> None:
    """Of a loss at the average of two drifted replicas: that of the plain loss there, on every rank; and its HVP."""
    xs = torch.stack([numbers(rank, 0) for rank in range(4)])
    full = {name: p.detach() for name, p in MODEL.named_parameters()}
    replicas = [drift(full, 0), drift(full, 1)]
    middle = {name: (p + replicas[1][name]) / 2 for name, p in replicas[0].items()}
    v = drift(full, 2)

    def joined(p: fs.Params) -> Tensor:
        return torch.func.functional_call(MODEL, p, (xs.flatten(0, 1),)).pow(3).mean()

    expected = torch.func.grad(joined)(middle), fs.hvp(joined, middle, v)

    def rank(mesh: Any, x: Tensor, mine: fs.Params) -> Any:
        spec = MIXED(MODEL).on(mesh)

        def loss(shards: fs.Params) -> Tensor:
            here = av.average(shards, spec, axes="replicate")
            return fs.functional_call(MODEL, here, (x,), spec=spec).pow(3).mean()

        shards = fs.shard(mine, spec)
        got = torch.func.grad(loss)(shards), fs.hvp(loss, shards, fs.shard(v, spec))
        return got, tuple(fs.shard(tree, spec) for tree in expected)

    mine = stacked([replicas[0], replicas[0], replicas[1], replicas[1]])
    got, want = fs.testing.spmd(rank, HYBRID)(xs, mine)
    assert_close(got, want)


def test_dtypes() -> None:
    """Each in its own; what is not floating point stays each rank's, and a float16 mean does not overflow."""
    model = nn.Module()
    for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.int64):
        zeros = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=dtype != torch.int64)
        model.register_parameter(f"in {str(dtype)[6:]}", zeros)
    ranks = torch.tensor([[1.0, 4e4], [3.0, 4e4]])
    tensors = {name: ranks.to(p.dtype) for name, p in model.named_parameters()}
    got = fs.testing.spmd(lambda mesh, p: av.average(p, REPLICATED(model).on(mesh)), 2)(tensors)
    for name, p in model.named_parameters():
        want = ranks.to(p.dtype) if name == "in int64" else torch.tensor([[2.0, 4e4]] * 2).to(p.dtype)
        assert_close(got[name], want, rtol=0, atol=0)


def test_ignored_parameters_stay() -> None:
    spec = fs.policies.ignoring(fs.policies.whole(fs.P()), params=("0.bias",))(MODEL)
    mine = {"": torch.stack([torch.zeros(45), torch.ones(45)]).double(), "0.bias": torch.tensor([[1.0], [2.0]])}
    got = fs.testing.spmd(lambda mesh, p: av.average(p, spec.on(mesh)), 2)(mine)
    assert_close(got, {"": torch.full((2, 45), 0.5).double(), "0.bias": mine["0.bias"]})


class Many(nn.Module):
    """A thousand small units, and two that are more than 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(3, 3) for _ in range(1000))
        self.low = nn.ModuleList(nn.Linear(3, 3, dtype=torch.bfloat16) for _ in range(3))
        self.middle = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.wide = nn.ModuleList(nn.Linear(1024, 1025) for _ in range(2))


def test_few_collectives() -> None:
    """Small tensors travel together by dtype until they are 4 MiB, large ones alone, once for every axis."""
    with world(8):
        spec = fs.policies.always(fs.P())(Many()).on(mesh_of(a=4, b=2))
        params = fs.shard(Many(), spec)
        with Collectives() as sent:
            got = av.average(params, spec)
        assert len({p.untyped_storage().data_ptr() for p in got.values()}) == len(got)  # each can be written to by itself
        total = sum(p.numel() for p in params.values())
        assert all(one.op == "all_reduce" and one.bytes < 2 * 2**22 for one in sent.all)
        assert sorted(one.ranks for one in sent.all) == 5 * [2] + 5 * [4]
        assert sum(one.numel == params["wide.0"].numel() for one in sent.all) == 4
        assert [sum(one.numel for one in sent.all if one.ranks == n) for n in (2, 4)] == [total, total]
        with Collectives() as sent:
            av.average(params, spec, axes="b")
        assert [one.ranks for one in sent.all] == 5 * [2]


def test_nothing_is_sent_where_nothing_can_differ() -> None:
    """For FSDP, one rank, and no axes; nor in the steps between, whatever the axes."""
    with world(4):
        split, spec = fs.policies.always()(MODEL).bound, REPLICATED(MODEL).bound
        slices, params = fs.shard(MODEL, split), fs.shard(MODEL, spec)
        with Collectives() as sent:
            av.average(slices, split)
            av.average(params, spec, axes=())
            av.periodic(spec, 2)[1](params, at(3))
            av.periodic(spec, [(2, "shard")])[1](params, at(3))
        assert not sent.all
    alone = REPLICATED(MODEL).bound
    params = fs.shard(MODEL, alone)
    assert all(p is params[key] for key, p in av.average(params, alone).items())


def parameter() -> nn.Parameter:
    """One that torch's averagers do not leave out: it has a gradient."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


def due(step: Any) -> list[Any]:
    """The process groups over which a step of a torch averager averages."""
    groups: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "average_parameters_or_parameter_groups", lambda _, group: groups.append(group))
        step()
    return groups


@given(st.integers(1, 5) | st.sets(st.integers(2, 12), min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 30))
def test_due_where_torchs_are(periods: int | set[int], warmup_steps: int, start: int) -> None:
    """The periodic averager and the hierarchical one: on how many ranks in each of 25 steps, for any periods, warm-up and step
    to start again from."""
    warns = pytest.warns(UserWarning, match="When period is 1") if periods == 1 else contextlib.nullcontext()
    with world(8), warns:
        spec = fs.policies.whole(fs.P())(nn.Linear(2, 1, bias=False)).on(mesh_of(all=2, quad=2, pair=2))
        if isinstance(periods, int):
            levels, peer = periods, PeriodicModelAverager(periods, warmup_steps)
        else:
            sizes = dict(zip(sorted(periods), [2, 4, 8][-len(periods) :], strict=True))
            levels = [(period, AXES[size]) for period, size in sizes.items()]
            peer = HierarchicalModelAverager(OrderedDict(sizes), warmup_steps)
        peer.step, state = start, at(start)
        for _ in range(25):
            theirs = [torch.distributed.get_world_size(group) for group in due(lambda: peer.average_parameters([parameter()]))]
            with Collectives() as sent:
                _, state = av.periodic(spec, levels, warmup_steps=warmup_steps)[1]({"": torch.ones(2)}, state)
            assert [math.prod(one.ranks for one in sent.all)] == (theirs or [1])
            assert state.step == peer.step


@real_ranks(4)
def test_averagers_on_real_ranks(rank: int) -> None:
    """utils.average_parameters in a group; and whatever order the keys of a rank's dict have."""
    mesh = mesh_of(**PAIRS)
    spec = REPLICATED(MODEL).on(mesh)
    mine = {"1.bias": torch.full((5,), float(rank % 2)).double()}
    peer = nn.Parameter(mine["1.bias"].clone())
    utils.average_parameters(iter([peer]), mesh.get_group("pair"))
    got = av.average(mine, spec, axes="pair")["1.bias"]
    assert torch.equal(got, peer.detach())
    assert got.tolist() == 5 * [0.5]
    keys = ["0", "1"] if rank % 2 else ["1", "0"]  # a dict in an order of this rank's own
    got = av.average({key: torch.full((3,), rank + 10.0 * int(key)) for key in keys}, spec)
    same(got, {key: torch.full((3,), 1.5 + 10 * int(key)) for key in keys})


@seldom
@real_ranks(2)
def test_compiled(rank: int) -> None:
    """By torch.compile and fs.compile as in eager, through steps of both kinds."""
    spec = REPLICATED(MODEL).bound
    init, update = av.periodic(spec, 3, warmup_steps=1)

    def step(params: fs.Params, state: av.Averaging) -> tuple[fs.Params, av.Averaging]:
        return update({key: 0.9 * p + 0.01 * rank for key, p in params.items()}, state)

    for ours in (torch.compile(step, fullgraph=True, backend="eager"), fs.compile(step, backend="aot_eager")):
        want = got = fs.shard(MODEL, spec), init()
        for _ in range(9):
            want, got = step(*want), ours(*got)
            assert_close(got, want)


@at_most(1)
@pytest.mark.parametrize("local", [("pair",), ()], ids=["pairs reduce", "nobody reduces"])
@pytest.mark.parametrize("levels", mark_seldom([None, LEVELS], LEVELS), ids=["periodic", "hierarchical"])
@real_ranks(4)
def test_post_local_sgd(rank: int, levels: list[tuple[int, Any]] | None, local: tuple[str, ...]) -> None:
    """Twenty steps of torch's optimizer over DDP with its hook, and ours, that both stop and start again at step 9."""
    mesh = mesh_of(**PAIRS)
    spec, start = REPLICATED(MODEL).on(mesh), 5
    model = copy.deepcopy(MODEL)
    ddp = nn.parallel.DistributedDataParallel(model)
    hook = PostLocalSGDState(None, mesh.get_group("pair"), start, post_local_gradient_allreduce=bool(local))
    ddp.register_comm_hook(hook, post_localSGD_hook)

    def torchs() -> PostLocalSGDOptimizer:
        hierarchical = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), start)
        averager = hierarchical if levels else PeriodicModelAverager(3, start)
        return PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), averager)

    optimizer = torchs()
    params, state = {name: p.detach().clone() for name, p in MODEL.named_parameters()}, at(0)
    update = av.periodic(spec, levels or 3, warmup_steps=start)[1]
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    apart: list[bool] = []
    for step in range(20):
        x = numbers(rank, step)
        optimizer.zero_grad()
        squared(plain_call(ddp), x).backward()
        optimizer.step()

        grads = torch.func.grad(lambda p: torch.func.functional_call(MODEL, p, (x,)).pow(2).mean())(params)
        axes = None if step < start else local
        grads = av.average(grads, spec, axes=axes)
        momentum = {name: 0.5 * momentum[name] + g for name, g in grads.items()}
        params = {name: p - 0.1 * momentum[name] for name, p in params.items()}
        params, state = update(params, state)

        assert_close(params, {name: p.detach() for name, p in model.named_parameters()}, rtol=1e-12, atol=1e-13)
        assert state.step == optimizer.averager.step == step + 1
        mean = av.average(params, spec)
        apart.append(any(not torch.allclose(p, mean[name], rtol=1e-12, atol=1e-13) for name, p in params.items()))
        if step == 9:
            saved, optimizer = optimizer.state_dict(), torchs()
            optimizer.load_state_dict(saved)
            leaves, structure = pytree.tree_flatten(state)  # out of a file in which no code is
            torch.save(leaves, file := io.BytesIO())
            file.seek(0)
            state = pytree.tree_unflatten(torch.load(file, weights_only=True), structure)
    last, offset = (4, 0) if levels else (3, start)
    assert apart == [step >= start and (step - offset) % last != 0 for step in range(20)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: av.average(ONES, SPEC, axes="data"), r"unknown mesh axis 'data': expected some of \('replicate',"),
        (lambda: av.average(ONES, SPEC, axes="shard"), r"unit '0' is split over 'shard'.* axes without it, got 'shard'"),
        (lambda: av.average({"7": ONES["0"]}, SPEC), r"'7' is no unit and no parameter.* some of \['0', '1'\]"),
        (lambda: av.periodic(SPEC, 0), "level 0: expected a period above 0, got 0"),
        (lambda: av.periodic(SPEC, 2, axes="shard")[1](ONES, at(1)), "unit '0' is split over 'shard'"),
        (lambda: hierarchical(), "expected a level or more.* got 0 and 0"),
        (lambda: hierarchical((2, "replicate"), warmup_steps=-1), "warmup_steps of 0 or more, got 1 and -1"),
        (lambda: hierarchical((4, ()), (2, "replicate")), "level 1: expected a period above 4, got 2; put"),
        (lambda: hierarchical((2, "replicate"), (4, ())), r"level 1: expected axes with all of \['replicate'\], got \(\); add"),
    ],
)  # fmt: skip
def test_errors(call: Any, message: str) -> None:
    """Also in steps in which nothing is averaged."""
    refused(ValueError, message, call)


def hierarchical(*levels: tuple[int, Any], warmup_steps: int = 0) -> Any:
    return av.periodic(SPEC, levels, warmup_steps=warmup_steps)[1](ONES, at(1))
