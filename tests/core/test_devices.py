"""Where shards go on machines that these tests do not have: fakes in the place of CUDA and NCCL, fake tensors on "cuda"."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_log import meta_world
from depth import every
from models import module_class, refused
from parity import MAIN_WAYS, WAYS, loss_of, mean_square, shards_of
from ranks import mesh_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import _torch
from funshard._wire.host import copy_to_host
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


@pytest.fixture
def on_cuda1(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with CUDA, the rank's device."""
    machine(monkeypatch, NCCL, cuda=True)
    world.bound_device_id = torch.device("cuda", 1)


is_without_driver = torch.version.cuda is not None and not torch.cuda.is_available()
needs_driver = pytest.mark.skipif(is_without_driver, reason="torch for CUDA makes no cuda tensor without a driver")


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
        ("cpu:gloo,cuda:gloo", True, None),  # init_process_group("gloo"): tensors stay where they are
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
    without_group = (("shard", fs.collectives.ProcessAxis(1, 0)),)
    assert [Mesh(without_group, kind).device for kind in ("cuda", "cpu")] == [torch.device("cuda", 1), torch.device("cpu")]
    world.bound_device_id = torch.device("xpu", 0)
    assert Mesh.world().device == torch.device("cuda", 2)


@needs_driver
@pytest.mark.parametrize("moved", ["weight", "shift"])
def test_a_model_on_another_device_than_the_groups(moved: str, world: dist.ProcessGroup, monkeypatch: Any) -> None:
    """set_device was forgotten: shards went to cuda:0, the rest stayed on cuda:3, and torch's words came in forward."""
    machine(monkeypatch, NCCL, cuda=True)
    with FakeTensorMode():
        model = nn.Linear(3, 4, bias=False)
        model.register_buffer("shift", torch.zeros(4))
        spec = fs.policies.whole(fs.P("shard", align=1))(model)
        own = model._parameters if moved == "weight" else model._buffers
        own[moved] = nn.Parameter(torch.empty(4, 3, device="cuda:3")) if moved == "weight" else torch.empty(4, device="cuda:3")
        words = rf"shard: '{moved}' is on cuda:3, and the process group's device is cuda:0, .* torch\.cuda\.set_device\(3\)"
        refused(ValueError, words, lambda: fs.shard(model, spec, rank=1))
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
@pytest.mark.parametrize(("ignored", "numel"), [((), 8), (("bias",), 6)])
def test_ignored_parameters_stay_where_they_are(on_cuda1: None, ignored: tuple[str, ...], numel: int) -> None:
    """test_move_states_to_device_ignored_param_device: shards go to the device of the group, each rank's on its own, here
    those of rank 1 on cuda:1, as fake tensors; what is ignored is the model's."""
    with FakeTensorMode():
        model = nn.Linear(3, 4)
        policy = fs.policies.whole(fs.P("shard", align=1))
        shards = fs.shard(model, (fs.policies.ignoring(policy, params=ignored) if ignored else policy)(model))
    assert {key: (shard.device, shard.numel()) for key, shard in shards.items()} == {"": (torch.device("cuda", 1), numel)}
    assert model.bias.device == torch.device("cpu")


def test_specs_on_one_mesh_share_its_groups(world: dist.ProcessGroup) -> None:
    """test_share_comm_context: calls of several models are on the same process groups, and so on NCCL's same streams."""
    mesh = mesh_of(2)
    models = [nn.Linear(3, 4), nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 2))]
    groups = {fs.policies.whole()(model).on(mesh).bound_mesh["shard"].name for model in models}
    assert groups == {mesh.get_group("shard").group_name}


@needs_driver
@pytest.mark.parametrize("axis", ["shard", None])
def test_averages_of_what_rests_on_the_host_rest_there(on_cuda1: None, monkeypatch: Any, axis: str | None) -> None:
    """They are sent from the device of the group, which may know no other."""
    sent: list[torch.device] = []

    def reduced(x: Tensor, axis: fs.collectives.Axis, *, reduce: str = "mean") -> Tensor:
        sent.append(x.device)
        return fs.collectives.all_reduce(x, axis, reduce=reduce)

    monkeypatch.setattr(fs.averaging, "all_reduce", reduced)
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
        spec, shards = shards_of(fs.by_path({"0": fs.P(axis, offload="params", align=1), "1": fs.P(axis, align=1)}), model)
        averaged = fs.averaging.average(shards, spec)
    where = {"0": torch.device("cpu"), "1": torch.device("cuda", 1)}
    assert [{key: x.device for key, x in tree.items()} for tree in (shards, averaged)] == [where, where]
    assert sent == ([] if axis else [torch.device("cuda", 1)] * 2)


# --- trace_order. ---
Matrix = module_class(
    "Matrix", lambda n, device: {"weight": nn.Parameter(torch.empty(n, 3, device=device))}, lambda self, x: x @ self.weight.T
)
"""A linear map that draws no numbers, for which fake CUDA has no kernels."""


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
    """With buffers or without, wherever the model is: on the device of its buffers, its parameters, or the arguments. A
    model without buffers may stay on the CPU, and be called with arguments on the device where its shards are."""
    with FakeTensorMode():
        model, x = Net(model_on, buffer), torch.ones(2, 3, device=x_on)
    assert fs.trace_order(model, fs.by_type(Matrix)(Net("meta")), (x,), {"scale": 2.0}) == ("second", "first")


# --- what makes the host wait, or a kernel for nothing ---
READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique")


class Waits(TorchDispatchMode):
    """Notes every operator for which the host waits: values of the device, and copies to it or from it, unless in passing."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device, self.seen = device, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = [x for x in args if isinstance(x, Tensor)]
        on_device = [x for x in tensors if x.device.type == self.device]
        if name in READS and on_device:
            self.seen[name] += 1
        elif name in ("_to_copy", "copy_") and not kwargs.get("non_blocking") and not args[3 if name == "_to_copy" else 2 :]:
            devices = {x.device.type for x in [*tensors, out]}
            if len(devices) > 1:
                self.seen[f"{name} {tensors[-1].device.type} to {out.device.type}"] += 1
        return out


class Builds(TorchFunctionMode):
    """Refuses what builds a tensor of the device on the host, below all operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            assert out.device.type == "cpu", f"{func.__name__}({args[0]!r}, device='{out.device}')"
        return out


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with meta_world(monkeypatch):
        yield


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(3)))


def step_with_loss_scale(model: nn.Module, spec: fs.PartitionSpec, shards: fs.Params, x: Tensor) -> None:
    loss = loss_of(model, spec, x, of=mean_square)
    init, unscale = fs.loss_scale.dynamic(spec)
    state = init(shards)
    waits, first = Waits(), Counter[str]()
    for _ in range(3):
        with waits:
            grads, state = unscale(fs.grad(lambda p, by=state.scale: by * loss(p))(shards), state)
            grads, _ = fs.optim.clip_by_global_norm(grads, spec, 1.0)
            shards = fs.loss_scale.select(state.finite, {key: p - 0.1 * grads[key] for key, p in shards.items()}, shards)
        first, waits.seen = waits.seen, Counter()
    assert not first, f"the third step: {first}"


def mean_of_uneven(model: nn.Module, spec: fs.PartitionSpec, shards: fs.Params, x: Tensor) -> None:
    full = fs.unshard(shards, spec)
    with Waits() as waits:
        fs.reduce_grads(full, spec, weight=3)
        fs.reduce_grads(full, spec, weight=2.5)
    assert not waits.seen


def clipped_samples(model: nn.Module, spec: fs.PartitionSpec, shards: fs.Params, x: Tensor) -> None:
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).square().mean()  # noqa: E731
    with Waits() as waits:
        fs.per_sample_grads(loss, shards, (x,), spec=spec, clip=1.0)
    assert not waits.seen


def on_device(model: nn.Module) -> tuple[fs.PartitionSpec, fs.Params]:
    spec = fs.policies.always(fs.P("shard", align=1))(model).bound
    return spec, {unit.key: torch.empty(spec.shard_numel(unit), device="meta") for unit in spec}


@pytest.mark.parametrize("step", [step_with_loss_scale, mean_of_uneven, clipped_samples])
def test_a_step_does_not_wait(step: Callable[..., None], meta: None) -> None:
    """Nothing is read, and nothing copied from the host, but for the state of the loss scale before the first step."""
    model, logger = net(), logging.getLogger("funshard")
    before = logger.level
    logger.setLevel(logging.WARNING)  # whatever a library has set for all loggers: INFO has to read
    with contextlib.ExitStack() as stack, Builds():
        stack.callback(logger.setLevel, before)
        step(model, *on_device(model), torch.empty(5, 4, device="meta"))


class TakesAddresses(nn.Linear):
    """Takes the address of its weight, as a Triton kernel does: a lazy copy would become a real one."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data_ptr()
        return super().forward(x)


def test_parameters_are_not_compared() -> None:
    """The watch for writes asks for versions alone."""
    model = nn.Sequential(TakesAddresses(4, 4), TakesAddresses(4, 4))
    (spec, shards), x = shards_of(fs.by_type(TakesAddresses), model), torch.ones(2, 4)
    with Waits("cpu") as waits:
        fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum())(shards)
    assert not waits.seen


def test_full_parameters_leave_the_device_by_one_copy_each_unit(meta: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next one is gathered, and each parameter is a tensor of its own."""
    copied: list[int] = []

    def on_host(tensor: Tensor) -> Tensor:
        copied.append(tensor.numel())
        return torch.empty_like(tensor, device="cpu")

    monkeypatch.setattr(sys.modules[fs.stream_full.__module__], "copy_to_host", on_host)
    spec, shards = on_device(net())
    full = fs.unshard(shards, spec, offload_to_cpu=True)
    assert copied == [20, 20, 20]
    assert {x.device.type for x in full.values()} == {"cpu"}
    assert len({_torch.storage_id(x) for x in full.values()}) == len(full) == 6


def test_a_copy_on_the_host_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """From CUDA by a copy that torch does not wait for, and then the stream; what is on the CPU is no copy."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: events.append("wait")))
    with FakeTensorMode(), torch.no_grad(), Waits("cuda") as waits:
        assert copy_to_host(torch.empty(3, device="cuda")).device.type == "cpu"
    assert (events, waits.seen) == (["wait"], {})
    x = torch.ones(3)
    assert copy_to_host(x) is x


# --- Buffers. ---
class Clones(TorchDispatchMode):
    """Counts the kernels that copy as many elements as this."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.seen = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "_to_copy", "copy_") and out.numel() == self.numel:
            self.seen += 1
        return out


def address(x: Tensor) -> int:
    """Without asking for memory that may be written to."""
    return torch._C._data_address(x)  # pyright: ignore[reportAttributeAccessIssue]


class Masked(nn.Module):
    """Adds its buffers; writes to the first, if it is to, as some kernels do: without telling the version."""

    def __init__(self, n: int, numel: int, writes: str = "") -> None:
        super().__init__()
        self.weight, self.writes = nn.Parameter(torch.ones(3, 3)), writes
        self.addresses: list[int] = []
        for i in range(n):
            self.register_buffer(f"mask{i}", torch.full((numel,), float(i)))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes == "told":
            self.get_buffer("mask0").add_(1)
        elif self.writes == "quietly":
            self.get_buffer("mask0").data.add_(1)
        if not self.writes:
            self.addresses.extend(address(_torch.unwrap(b)) for b in self.buffers())
        return x @ self.weight * sum(b[0] for b in self.buffers())


MODES = {"shard": fs.P("shard"), "kept": fs.P("shard", reshard=False), "whole": fs.P(), "remat": fs.P("shard", remat=True)}


@every(mode=MODES, way=MAIN_WAYS)
def test_buffers_that_nobody_writes_to_are_not_copied(mode: str, way: str) -> None:
    """Neither a kernel nor memory, for sixty small ones or big ones: outside of transforms they are the model's own memory."""
    model: Any = nn.Sequential(Masked(60, 7), Masked(3, 7))
    spec, shards = shards_of(fs.by_type(Masked, p=MODES[mode]), model, {"shard": 1})
    loss = loss_of(model, spec, torch.ones(2, 3), of=torch.sum)
    with Clones(7) as clones:
        WAYS[way](loss)(shards)
    assert clones.seen == 0
    assert {*model[0].addresses, *model[1].addresses} == {address(b) for b in model.buffers()}


@every(mode=MODES, writes=["told", "quietly"])
def test_what_forward_writes_to_is_a_copy(mode: str, writes: str) -> None:
    """The model's own buffers stay, what is given has the update, and another backward finds what the first run found."""
    model = nn.Sequential(Masked(2, 7, writes), Masked(2, 7))
    spec = fs.by_type(Masked, p=MODES[mode])(model).on({"shard": 1})
    shards = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
    before = {name: b.clone() for name, b in model.named_buffers()}
    given = {name: b.clone() for name, b in before.items()}
    x = torch.ones(2, 3)
    out = fs.functional_call(model, shards, (x,), spec=spec, buffers=given)
    with pytest.warns(fs._call.buffers.BufferWarning) if writes == "told" or mode == "remat" else contextlib.nullcontext():
        assert torch.equal(fs.functional_call(model, shards, (x,), spec=spec), out)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert torch.equal(given["0.mask0"], torch.ones(7))
    assert all(torch.equal(given[name], b) for name, b in before.items() if name != "0.mask0")
    grads = torch.autograd.grad(out.sum(), list(shards.values()))
    plain = torch.autograd.grad(_plain(model, x).sum(), list(model.parameters()))
    for g, p in zip(grads, plain, strict=True):
        assert torch.equal(g[: p.numel()], p.reshape(-1))


def _plain(model: Any, x: Tensor) -> Tensor:
    a, b = (m.get_parameter("weight") for m in model)
    return (x @ a * 2) @ b * 1  # masks of 1 (written to) and 1, of 0 and 1
