"""Ranks that would train alone are told so: no process group, the model's own parameters, a policy that takes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import same
from depth import depth, seldom
from models import refused
from parity import DERIVATIVES, shards_of
from ranks import launch, real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import P, Params
from funshard.collectives import Mesh

X = torch.ones(2, 3, dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()


# --- Started as one of several, and no process group. ---
SPEC = fs.by_type(nn.Linear)(model())
WITHOUT_A_GROUP: dict[str, Callable[[], object]] = {
    "shard": lambda: fs.shard(model(), SPEC),
    "unshard": lambda: fs.unshard({}, SPEC),
    "functional_call": lambda: fs.functional_call(model(), dict(model().named_parameters()), X, spec=SPEC),
    "global_norm": lambda: fs.optim.global_norm({}, SPEC),
    "world": Mesh.world,
}


@pytest.mark.parametrize("what", sorted(WITHOUT_A_GROUP))
def test_started_as_one_of_several_without_a_process_group(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would take the whole world says what is missing, and how to mean a single rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 \(WORLD_SIZE\) .* alone: expected torch\..*\.init_process_group\(\)"):
        WITHOUT_A_GROUP[what]()


def test_one_rank_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound spec, a policy and a table work; so does a launcher that starts one process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    here = SPEC.on({"shard": 1})
    same(fs.unshard(fs.shard(model(), here), here), {name: p.detach() for name, p in model().named_parameters()})
    assert "shard=1" in str(fs.by_type(nn.Linear)(model()))
    for size in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert dict(SPEC.bound.bound_mesh.sizes) == {"shard": 1}


@seldom
@pytest.mark.parametrize("variable", depth(["SLURM_NTASKS"], ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]))
def test_started_by_another_launcher_without_a_process_group_is_said_once(variable: str, tmp_path: Path) -> None:
    """srun and mpirun set no WORLD_SIZE; a job of several tasks may run one process, so it is a warning."""
    program = tmp_path / "program.py"
    program.write_text("""
import torch, funshard as fs
model = torch.nn.Linear(2, 2)
for _ in range(2):
    fs.shard(model, fs.policies.whole()(model))
""")
    for more, count in (({variable: "2"}, 1), ({variable: "1"}, 0), ({variable: "2", "WORLD_SIZE": "1"}, 0)):
        said = launch(1, program, **more)
        assert len(re.findall(rf"has no process group, and {variable}=2: .* each trains alone", said)) == count, said


# --- The model's own parameters on several ranks. ---
OF_ALL = DERIVATIVES | {
    "vmap of grad": lambda f: lambda p: torch.vmap(lambda x: torch.func.grad(lambda p: f(p) * x)(p))(torch.ones(2).double()),
    "backward": lambda f: lambda p: f(p).backward(),
}
HOW = ["fs.grad", "torch.func.grad", "hvp", "jvp", "vmap of grad", "backward"]


def differentiated(how: str, model: nn.Module, params: Params, spec: fs.PartitionSpec) -> Any:
    return OF_ALL[how](lambda params: fs.functional_call(model, params, (X,), spec=spec).pow(2).mean())(params)


OWN = (
    r"parameter '0\.(weight|bias)' is the model's own, .* on 2 ranks each would train alone; expected fs\.shard\(model, spec\)"
)


@pytest.mark.parametrize("how", HOW)
@real_ranks(2)
def test_own_parameters_on_two_ranks(rank: int, how: str) -> None:
    """In every derivative, for every strategy: nothing would be reduced, so that each rank would train alone."""
    for policy in (fs.by_type(nn.Linear), fs.policies.whole(P())):
        net = model()
        refused(ValueError, OWN, lambda: differentiated(how, net, dict(net.named_parameters()), policy(net).bound))
        assert all(p.grad is None for p in net.parameters())


@real_ranks(2)
def test_own_parameters_where_nothing_is_lost(rank: int) -> None:
    """Without a derivative, on one rank, for what is frozen; and unshard's are full parameters like any."""
    net = model()
    own = dict(net.named_parameters())
    spec = fs.by_type(nn.Linear)(net).bound
    alone = fs.by_type(nn.Linear)(net).on(init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"])
    with torch.no_grad():  # nothing to reduce
        assert torch.equal(fs.functional_call(net, own, (X,), spec=spec), net(X))
    torch.testing.assert_close(fs.functional_call(net, {k: p.detach() for k, p in own.items()}, (X,), spec=spec), net(X))
    expected = torch.func.grad(lambda p: torch.func.functional_call(net, p, (X,)).pow(2).mean())(own)
    same(differentiated("fs.grad", net, own, alone), expected)  # one rank
    full = fs.unshard(fs.shard(net, spec), spec)
    reduced = fs.reduce_grads(differentiated("fs.grad", net, full, spec), spec)
    same(reduced, fs.shard(expected, spec))
    for p in net[0].parameters():
        p.requires_grad_(False)
    frozen = fs.by_type(nn.Linear)(net).bound
    trained = {"2": fs.shard(net, frozen)["2"]} | {name: p for name, p in net.named_parameters() if name[0] == "0"}
    assert torch.equal(differentiated("fs.grad", net, trained, frozen)["2"], reduced["2"])  # a frozen base that no rank slices


COPIES = r"parameter '\d\.\w+' is given in full and differentiated, .* each of 2 ranks would train alone; expected fs\.shard"


@pytest.mark.parametrize("how", ["fs.grad", "torch.func.grad", "backward"])
@real_ranks(2)
def test_copies_of_full_parameters_on_two_ranks_are_said_once(rank: int, how: str) -> None:
    """Nothing reduces their gradients either; but a caller's own code may."""
    net = model()
    spec = fs.by_type(nn.Linear)(net).bound
    copies = {name: x.clone() for name, x in net.state_dict().items()}
    if how == "backward":
        copies = {name: x.requires_grad_() for name, x in copies.items()}
    with pytest.warns(UserWarning, match=COPIES) as caught:
        differentiated(how, net, copies, spec)
    assert [warning.filename for warning in caught] == [__file__]
    differentiated(how, net, copies, spec)  # warnings are errors in the tests


@real_ranks(2)
def test_full_parameters_that_are_no_copies_are_not_warned_of(rank: int) -> None:
    """What unshard and accumulate give, inner steps of these under a gradient, and calls without a gradient."""
    net = model()
    spec, params = shards_of(fs.by_type(nn.Linear), net)
    with torch.no_grad():
        fs.functional_call(net, {name: x.clone() for name, x in net.state_dict().items()}, (X,), spec=spec)

    def loss(full: Params) -> Tensor:
        return fs.functional_call(net, full, (X,), spec=spec).pow(2).mean()

    def adapted(shards: Params) -> Tensor:
        full = fs.unshard(shards, spec)
        grads = torch.func.grad(loss)(full)
        stepped = {name: x - 0.1 * grads[name] for name, x in full.items()}
        again = torch.func.grad(loss)(stepped)
        return loss({name: x - 0.1 * again[name] for name, x in stepped.items()})

    for transform in (fs.grad, torch.func.grad):
        transform(adapted)(params)
        transform(lambda shards: loss({name: 2 * x for name, x in fs.unshard(shards, spec).items()}))(params)
        transform(loss)(fs.unshard(params, spec))
    fs.accumulate(lambda p, x: fs.functional_call(net, p, (x,), spec=spec).sum(), params, [X, X], spec=spec, keep="full")


# --- A parameter with the name of a unit. ---
class Named(nn.Module):
    """A parameter that is trained, one that is not, and one of a name."""

    def __init__(self, name: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.f = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_parameter(name, nn.Parameter(torch.ones(3)))
        self.a = inner


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: fs.policies.whole()(Named(":frozen")), ":frozen"),
        (lambda: fs.by_path({"a": P()})(Named("z", Named(":frozen"))), None),
        (lambda: fs.by_path({"a": P()})(Named("a:frozen", Named("z"))), "a:frozen"),
    ],
)
def test_a_parameter_with_the_name_of_a_unit(make: Callable[[], fs.PartitionSpec], key: str | None) -> None:
    """params may hold either, so one would be taken for the other: an error that says to rename it. Other ':' are names."""
    if key is None:
        assert {"a:frozen", "a"} < set(make().by_key)
        return
    refused(ValueError, rf"parameter '{key}' has the name of a unit, .*rename it in the model", lambda: make())
    net = nn.Module()  # the path of a module: torch refuses one that is registered; what gets in by another way is refused here
    net.a = nn.Linear(2, 2)
    refused(KeyError, "attribute 'a' already exists", lambda: net.register_parameter("a", nn.Parameter(torch.ones(1))))
    net._parameters["a"] = nn.Parameter(torch.ones(1))
    refused(ValueError, r"parameter 'a' has the name of a unit", lambda: fs.by_type(nn.Linear)(net))
