"""Ranks that run other units, or the same ones in another order: an error on every rank, and never each other's slices."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from depth import at_most, each, every, seldom
from parity import numbers, strategies
from ranks import Pool, launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import funshard as fs
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
ROUTES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one expert, by rank": lambda rank: (rank,),
    "reversed on one rank": lambda rank: (0, 1, 2) if rank == 0 else (2, 1, 0),
    "one more on one rank": lambda rank: (0, 1) if rank == 0 else (0, 1, 2),
}


def own_group() -> DeviceMesh:
    """All ranks with a process group of their own: after an error its ranks may have started different collectives."""
    group: Any = dist.new_group()
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


def error_of(run: Callable[..., object], *args: object) -> str:
    """What it raises, '' for nothing."""
    try:
        run(*args)
    except RuntimeError as error:
        return str(error)
    return ""


Step = Callable[[Callable[[fs.Params], Tensor], fs.Params], object]
STEPS: dict[str, Step] = {
    "fs.grad": lambda loss, params: fs.grad(loss)(params),
    "torch.func.grad": lambda loss, params: torch.func.grad(loss)(params),
    "hvp": lambda loss, params: fs.hvp(loss, params, params),
    "jvp": lambda loss, params: torch.func.jvp(loss, (params,), (params,)),
    "no_grad": lambda loss, params: torch.no_grad()(loss)(params),
}


def routed(rank: int, strategy: str, route: str, step: str, **options: Any) -> str:
    """What a rank's step says, '' where it ends."""
    torch.manual_seed(0)
    model = Routed().double()
    spec = fs.by_type(nn.Linear, p=STRATEGIES[strategy])(model).on(own_group())
    params, own = fs.shard(model, spec), ROUTES[route](rank)
    x = numbers(rank, 0, width=6)

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (x, own), spec=spec, **options).square().sum()

    return error_of(STEPS[step], loss, params)


@at_most(3)
@each(step=["fs.grad", "torch.func.grad", "hvp", "jvp"])
@every(route=["one expert, by rank", "reversed on one rank"], strategy=STRATEGIES)
def test_ranks_that_run_other_units_get_an_error(gloo2: Pool, strategy: str, route: str, step: str) -> None:
    if strategy == "replicated" and step == "jvp":
        step = "fs.grad"  # of the others nothing is sent
    for error in gloo2.run(routed, strategy, route, step):
        assert "ranks" in error
        assert "unit 'experts." in error
        assert "check_order=False" in error


@at_most(4)
@every(strategy=STRATEGIES, step=["fs.grad", "hvp"])
def test_a_rank_that_runs_one_unit_more_is_an_error(gloo2: Pool, strategy: str, step: str) -> None:
    for error in gloo2.run(routed, strategy, "one more on one rank", step):
        assert "unit '" in error


def early(rank: int, layers: int, strategy: str, routes: tuple[tuple[int, ...], ...], step: str) -> str:
    """What a rank says that ends forward with other units than the other one, in a group with a timeout of 20 seconds."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers)).double()
    model.forward = lambda x: [x := model[i](x).sin() for i in routes[rank]][-1] if routes[rank] else x
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    spec = fs.by_type(nn.Linear, p=STRATEGIES[strategy])(model).on(mesh)
    x = numbers(rank, 0, width=6).requires_grad_()

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec).sum()

    return error_of(STEPS[step], loss, fs.shard(model, spec))


def _raise(error: str) -> None:
    if error:
        raise RuntimeError(error)


@at_most(3)
@every(strategy=STRATEGIES, step=["fs.grad", "no_grad"])
def test_a_rank_that_leaves_out_the_last_unit_is_an_error(gloo2: Pool, strategy: str, step: str) -> None:
    """Its gather was started ahead on both, which compare when forward ends what they have used."""
    step = "fs.grad" if strategy == "replicated" else step  # of the others nothing is sent
    for error in gloo2.run(early, 2, strategy, ((0, 1), (0,)), step):
        assert "ranks ran different units" in error
        assert "unit '1'" in error
        assert "check_order=False" in error


def after_other_units(rank: int) -> float:
    """A value of the world's group after ranks ran other units of a group of their own: one of them gathered one more ahead."""
    assert "ranks ran different units" in early(rank, 2, "shard", ((0,), (1,)), "no_grad")
    model = nn.Linear(6, 6, dtype=torch.float64)
    spec = fs.policies.whole()(model)
    return fs.functional_call(model, fs.shard(model, spec), (torch.ones(6).double(),), spec=spec).sum().item()


def test_another_group_goes_on_after_the_error(gloo2: Pool) -> None:
    """No call waits for what the other rank has never started."""
    first, second = gloo2.run(after_other_units)
    assert first == second


def with_unequal_losses(rank: int, strategy: str) -> str:
    """The same forward on all ranks, and on one of them a loss that does not depend on what came last."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
    spec = fs.by_type(nn.Linear, p=STRATEGIES[strategy])(model).on(own_group())
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out))

    def loss(params: fs.Params) -> Tensor:
        out = fs.functional_call(model, params, (numbers(rank, 0, width=6),), spec=spec)
        return (seen[-1] if rank else out).sum()

    return error_of(fs.grad(loss), fs.shard(model, spec))


def with_unequal_losses_in_a_check(rank: int, strategy: str) -> str:
    """The same in `funshard.check`."""
    return error_of(fs.check(timeout=20)(lambda: _raise(with_unequal_losses(rank, strategy))))


def test_losses_that_depend_on_other_units_are_an_error(gloo2: Pool) -> None:
    """Of replicas, which are reduced together when backward ends."""
    for error in gloo2.run(with_unequal_losses, "replicated"):
        assert "ranks ran different units" in error


@at_most(1)
@pytest.mark.parametrize("strategy", ["shard", "keep", "remat", "precision"])
def test_the_check_names_losses_that_depend_on_other_units(gloo2: Pool, strategy: str) -> None:
    """It compares each reduction before it starts: without it a rank with more of them waits for the timeout."""
    for error in gloo2.run(with_unequal_losses_in_a_check, strategy):
        assert "ranks disagree" in error
    gloo2.stop()  # some collectives have started on one rank only


def unsharded(rank: int) -> str:
    """Ranks that ask `unshard` for other units."""
    torch.manual_seed(0)
    model = Routed(2)
    spec = fs.by_type(nn.Linear)(model).on(own_group())
    shards = fs.shard(model, spec)
    return error_of(lambda: fs.unshard(shards, spec, units=[f"experts.{rank}"]))


def test_ranks_that_unshard_other_units_get_an_error(gloo2: Pool) -> None:
    for error in gloo2.run(unsharded):
        assert "gather_mean of unit 'experts.0' on rank 0, and gather_mean of unit 'experts.1' on rank 1" in error


def forward_alone(rank: int) -> list[str]:
    """Forwards that require grad and have no backward: both are compared, and a right one after a wrong one is right."""
    torch.manual_seed(0)
    model = Routed(2).double()
    spec = fs.by_type(nn.Linear, p=fs.P("shard", precision=fs.Precision(codec=fs.codecs.int8())))(model)
    params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}

    def call(route: tuple[int, ...]) -> Tensor:
        return fs.functional_call(model, params, (numbers(rank, 0, width=6), route), spec=spec, prefetch=0)

    return [error_of(call, (rank, 1 - rank)), error_of(call, (0, 1))]


def test_a_forward_without_a_backward_is_compared(gloo2: Pool) -> None:
    for first, second in gloo2.run(forward_alone):
        assert "ranks ran different units" in first
        assert second == ""


def not_compared(rank: int) -> str:
    return routed(rank, "keep", "reversed on one rank", "no_grad", check_order=False)


def left_alone(rank: int) -> str:
    """What rank 0 says where rank 1 compares nothing, in a group with a timeout of two seconds."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    return error_of(check_sequence, ["a gather"], group.group_name, torch.ones(1)) if rank == 0 else ""


def test_a_rank_that_compares_nothing_is_an_error_within_the_timeout(gloo2: Pool) -> None:
    said, _ = gloo2.run(left_alone)
    gloo2.stop()
    assert "one has not come to the first one within the process group's timeout" in said


def test_check_order_can_be_turned_off(gloo2: Pool) -> None:
    assert gloo2.run(not_compared) == ["", ""]


def replicas(rank: int) -> list[str]:
    """HSDP on 2 x 2 ranks: two replicas may evaluate other units, and may not train them."""
    torch.manual_seed(0)
    model = Routed(2).double()
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    spec = fs.by_type(nn.Linear)(model).on(mesh)
    params, route = fs.shard(model, spec), (0, 1) if rank < 2 else (1, 0)

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (numbers(rank, 0, width=6), route), spec=spec).sum()

    return [error_of(torch.no_grad()(loss), params), error_of(fs.grad(loss), params)]


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
    torch.manual_seed(0)
    model = Routed(1).double()
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    spec = fs.by_type(nn.Linear)(model).on(mesh)
    params = fs.shard(model, spec)
    fs.grad(lambda p: fs.functional_call(model, p, (numbers(rank, 0, width=6), (0,)), spec=spec).sum())(params)
    across = fs.by_type(nn.Linear, p=fs.P("replicate"))(model).on(mesh["replicate"], submesh=True)  # ranks 0 and 2, 1 and 3
    fs.checkpoint.save(f"{folder}/{rank % 2}", fs.shard(model, across), across, timeout=30)


@seldom
def test_ranks_that_have_made_different_numbers_of_groups(gloo4: Pool, tmp_path: Path) -> None:
    """torch names a group of some ranks by how many a process has: ranks would wait for groups of different names for ever."""
    gloo4.stop()  # none of these groups is there yet
    gloo4.run(with_more_groups, str(tmp_path))
    gloo4.stop()  # whose ranks have different numbers of process groups


EVALUATION = """
import time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import funshard as fs

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.ModuleDict({{key: nn.Linear(6, 6) for key in "abc"}})
model.forward = lambda x, route: [x := model[key](x) for key in route][-1]
spec = fs.by_type(nn.Linear)(model)
params, rank = fs.shard(model, spec), dist.get_rank()
try:
    with torch.no_grad():
        fs.functional_call(model, params, (torch.ones(2, 6), "ac" if rank == 1 else "ab"), spec=spec, prefetch=0)
    print("a value on rank", rank)
except RuntimeError as error:
    Path(f"{folder}/{{rank}}").write_text(str(error))
    time.sleep(4)  # the others have time to go on: those that still run when the first one ends say nothing
    raise
"""


@seldom
def test_no_rank_returns_values_where_one_between_others_ran_another_unit(tmp_path: Path) -> None:
    """All ranks compare what they have gathered at the end of forward."""
    script = tmp_path / "evaluation.py"
    script.write_text(EVALUATION.format(folder=tmp_path))
    with pytest.raises(AssertionError, match="exit codes") as raised:
        launch(4, script)
    for rank in range(4):
        assert (tmp_path / str(rank)).read_text().startswith("ranks ran different units")
    assert "a value on rank" not in str(raised.value)
