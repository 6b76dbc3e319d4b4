"""What makes the host wait for the device, or a kernel for nothing: host reads, copies between devices, clones of buffers.

There is no device here, so what a step asks for is counted: "meta" is the device, whose values nobody can read.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from collective_log import meta_world
from depth import every
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import _torch
from funshard._wire.host import start_copy_to_host

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
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with meta_world(monkeypatch):
        yield


class Linear(nn.Module):
    """A linear map that draws no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(*shape, device="meta")) for shape in ((4, 4), (4,)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def net() -> nn.Module:
    return nn.Sequential(*(Linear() for _ in range(3)))


def step_with_loss_scale(model: nn.Module, spec: fs.PartitionSpec, shards: fs.Params, x: Tensor) -> None:
    def loss(p: fs.Params) -> Tensor:
        return fs.functional_call(model, p, (x,), spec=spec).square().mean()

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
def test_a_step_does_not_wait(step: Callable[..., None], world: None) -> None:
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
    spec = fs.by_type(TakesAddresses)(model)
    shards, x = fs.shard(model, spec), torch.ones(2, 4)
    with Waits("cpu") as waits:
        fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum())(shards)
    assert not waits.seen


def test_full_parameters_leave_the_device_by_one_copy_each_unit(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is waited for when the next one is on its way, and each parameter is a tensor of its own."""
    events: list[str] = []

    def on_host(tensor: Tensor) -> Callable[[], Tensor]:
        events.append(f"start {tensor.numel()}")
        return lambda: events.append("wait") or torch.empty_like(tensor, device="cpu")

    monkeypatch.setattr(sys.modules[fs.stream_full.__module__], "start_copy_to_host", on_host)
    spec, shards = on_device(net())
    full = fs.unshard(shards, spec, offload_to_cpu=True)
    assert events == ["start 20", "start 20", "wait", "start 20", "wait", "wait"]
    assert {x.device.type for x in full.values()} == {"cpu"}
    assert len({_torch.storage_id(x) for x in full.values()}) == len(full) == 6


def test_only_the_reader_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """From CUDA by a copy that torch does not wait for; what is on the CPU is no copy."""
    events: list[str] = []

    class Stream:
        def record_event(self) -> Stream:
            events.append("record")
            return self

        def synchronize(self) -> None:
            events.append("wait")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    with FakeTensorMode(), torch.no_grad(), Waits("cuda") as waits:
        there = start_copy_to_host(torch.empty(3, device="cuda"))
        assert (events, waits.seen) == (["record"], {})
        assert (there().device.type, events) == ("cpu", ["record", "wait"])
    x = torch.ones(3)
    assert start_copy_to_host(x)() is x


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


@every(mode=MODES, way=["backward", "fs.grad", "torch.func.grad"])
def test_buffers_that_nobody_writes_to_are_not_copied(mode: str, way: str) -> None:
    """Neither a kernel nor memory, for sixty small ones or big ones: outside of transforms they are the model's own memory."""
    model: Any = nn.Sequential(Masked(60, 7), Masked(3, 7))
    spec = fs.by_type(Masked, p=MODES[mode])(model).on({"shard": 1})
    shards = fs.shard(model, spec)
    x = torch.ones(2, 3)

    def loss(p: fs.Params) -> Tensor:
        return fs.functional_call(model, p, (x,), spec=spec).sum()

    with Clones(7) as clones:
        if way == "backward":
            loss({key: p.requires_grad_() for key, p in shards.items()}).backward()
        else:
            (fs.grad if way == "fs.grad" else torch.func.grad)(loss)(shards)
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
