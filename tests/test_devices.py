"""Where shards go on machines that these tests do not have: fakes in the place of CUDA and NCCL, fake tensors on "cuda"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import funshard as fs
from funshard.collectives import Mesh

NCCL = "cpu:gloo,cuda:nccl"


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """Rank 1 of two, in name only."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    yield group
    group.bound_device_id = None
    dist.destroy_process_group()


needs_driver = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch for CUDA makes no cuda tensor without a driver",
)


def machine(monkeypatch: pytest.MonkeyPatch, backends: str, *, cuda: bool, current: int = 0) -> None:
    """A machine with CUDA or without, and a group with these backends."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize(
    ("backends", "cuda", "expected"),
    [
        (NCCL, True, "cuda"),  # init_process_group() where there is CUDA
        ("cuda:nccl", True, "cuda"),
        (NCCL, False, None),
        ("cpu:gloo", True, None),
        ("cpu:gloo", False, None),
        ("cpu:gloo,cuda:gloo", True, None),  # init_process_group("gloo"): tensors stay where they are
        ("cpu:mpi,cuda:nccl", True, "cuda"),
        ("cuda:nccl,cpu:gloo", True, "cuda"),
    ],
)
def test_the_device_type_of_the_world(
    backends: str, cuda: bool, expected: str | None, world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the accelerator which has a backend of its own, if this machine has one; anything where one serves both."""
    machine(monkeypatch, backends, cuda=cuda)
    assert Mesh.world().device_type == expected


def test_a_group_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch itself makes of init_process_group() names its backends, as the table above has it."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    try:
        kinds = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        assert kinds["cpu"] == "gloo"
        assert Mesh.world().device_type == ("cuda" if torch.cuda.is_available() else None)
    finally:
        dist.destroy_process_group()


def test_the_device_that_the_group_is_bound_to(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_process_group(device_id=...)`` decides; else the current device; one of another kind says nothing."""
    machine(monkeypatch, NCCL, cuda=True, current=2)
    assert Mesh.world().device == torch.device("cuda", 2)
    world.bound_device_id = torch.device("cuda", 1)
    assert Mesh.world().device == torch.device("cuda", 1)
    assert Mesh((("shard", fs.collectives.ProcessAxis(1, 0)),), "cuda").device == torch.device(
        "cuda", 1
    )  # of an axis without a group
    assert Mesh((("shard", fs.collectives.ProcessAxis(1, 0)),), "cpu").device == torch.device("cpu")
    world.bound_device_id = torch.device("xpu", 0)
    assert Mesh.world().device == torch.device("cuda", 2)


@needs_driver
def test_shards_of_a_cpu_model_are_on_the_device_of_the_group(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's on its own: here those of rank 1 on cuda:1, as fake tensors."""
    machine(monkeypatch, NCCL, cuda=True)
    world.bound_device_id = torch.device("cuda", 1)
    with FakeTensorMode():
        model = nn.Linear(3, 4)
        shards = fs.shard(model, fs.policies.whole(fs.P("shard", align=1))(model))
    assert {key: (shard.device, shard.numel()) for key, shard in shards.items()} == {"": (torch.device("cuda", 1), 8)}


class Shifted(nn.Linear):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__(3, 4, bias=False)
        self.register_buffer("shift", torch.zeros(4))


@needs_driver
@pytest.mark.parametrize("moved", ["weight", "shift"])
def test_a_model_on_another_device_than_the_groups(
    moved: str, world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """set_device was forgotten: shards went to cuda:0, the rest stayed on cuda:3, and torch's words came in forward."""
    machine(monkeypatch, NCCL, cuda=True)
    with FakeTensorMode():
        model = Shifted()
        spec = fs.policies.whole(fs.P("shard", align=1))(model)
        own = model._parameters if moved == "weight" else model._buffers
        own[moved] = nn.Parameter(torch.empty(4, 3, device="cuda:3")) if moved == "weight" else torch.empty(4, device="cuda:3")
        words = rf"shard: '{moved}' is on cuda:3, and the process group's device is cuda:0, .* torch\.cuda\.set_device\(3\)"
        with pytest.raises(ValueError, match=words):
            fs.shard(model, spec, rank=1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        assert fs.shard(model, spec, rank=1)[""].device == torch.device("cuda", 3)


@needs_driver
def test_scatter_full_without_a_group_leaves_parameters_on_their_device() -> None:
    """As shard does: they came to the CPU."""
    with FakeTensorMode():
        full = {name: torch.empty_like(x, device="cuda:1") for name, x in nn.Linear(3, 4).named_parameters()}
        spec = fs.policies.whole(fs.P("shard", align=1))(nn.Linear(3, 4))
        trees = fs.shard(full, spec, src=0), fs.shard(full, spec)
    assert [x[""].device for x in trees] == [torch.device("cuda", 1)] * 2


@needs_driver
def test_ignored_parameters_stay_where_they_are(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_move_states_to_device_ignored_param_device: shards go to the device of the group, what is ignored is the model's."""
    machine(monkeypatch, NCCL, cuda=True)
    world.bound_device_id = torch.device("cuda", 1)
    with FakeTensorMode():
        model = nn.Linear(3, 4)
        spec = fs.policies.ignoring(fs.policies.whole(fs.P("shard", align=1)), params=["bias"])(model)
        shards = fs.shard(model, spec)
    assert {key: (shard.device, shard.numel()) for key, shard in shards.items()} == {"": (torch.device("cuda", 1), 6)}
    assert model.bias.device == torch.device("cpu")


def test_specs_on_one_mesh_share_its_groups(world: dist.ProcessGroup) -> None:
    """test_share_comm_context: calls of several models are on the same process groups, and so on NCCL's same streams."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    models = [nn.Linear(3, 4), nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 2))]
    groups = {fs.policies.whole()(model).on(mesh).bound_mesh["shard"].name for model in models}
    assert groups == {mesh.get_group("shard").group_name}


@needs_driver
@pytest.mark.parametrize("axis", ["shard", None])
def test_averages_of_what_rests_on_the_host_rest_there(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, axis: str | None
) -> None:
    """They are sent from the device of the group, which may know no other."""
    machine(monkeypatch, NCCL, cuda=True)
    world.bound_device_id = torch.device("cuda", 1)
    sent: list[torch.device] = []

    def reduced(x: Tensor, axis: fs.collectives.Axis, *, reduce: str = "mean") -> Tensor:
        sent.append(x.device)
        return fs.collectives.all_reduce(x, axis, reduce=reduce)

    monkeypatch.setattr(fs.averaging, "all_reduce", reduced)
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
        spec = fs.by_path({"0": fs.P(axis, offload="params", align=1), "1": fs.P(axis, align=1)})(model)
        shards = fs.shard(model, spec)
        averaged = fs.averaging.average(shards, spec)
    where = {"0": torch.device("cpu"), "1": torch.device("cuda", 1)}
    assert [{key: x.device for key, x in tree.items()} for tree in (shards, averaged)] == [where, where]
    assert sent == ([] if axis else [torch.device("cuda", 1)] * 2)


# --- trace_order. ---


class Matrix(nn.Module):
    """A linear map that draws no numbers, for which fake CUDA has no kernels."""

    def __init__(self, n: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, 3, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Net(nn.Module):
    """Blocks in another order than their names', and a buffer if asked."""

    def __init__(self, device: str, buffer: bool = False) -> None:
        super().__init__()
        self.first, self.second = (Matrix(n, device) for n in (4, 3))
        self.register_buffer("shift", torch.zeros(3, device=device) if buffer else None)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.second(x if self.shift is None else x + self.shift)
        return self.first(x + torch.arange(3, device=x.device)) * scale


PLACES = [("cuda", "cuda"), ("meta", "cuda"), ("cuda", "meta"), ("cpu", "cpu"), ("meta", "meta"), ("meta", "cpu")]


@pytest.mark.parametrize(
    ("model_on", "x_on", "buffer"), [*((*place, b) for place in PLACES for b in (False, True)), ("cpu", "cuda", False)]
)
def test_trace_order_on_another_device(model_on: str, x_on: str, buffer: bool) -> None:
    """With buffers or without, wherever the model is: on the device of its buffers, its parameters, or the arguments.

    A model without buffers may stay on the CPU, and be called with arguments on the device where its shards are.
    """
    with FakeTensorMode():
        model, x = Net(model_on, buffer), torch.ones(2, 3, device=x_on)
    spec = fs.by_type(Matrix)(Net("meta"))
    assert fs.trace_order(model, spec, (x,), {"scale": 2.0}) == ("second", "first")
