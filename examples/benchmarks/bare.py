"""The host's floor for this design: a step that gathers, saves and reduces as funshard's, without checks and without options.

`host.py` measures it beside funshard, so that the difference is what options and checks cost. A unit's parameters are views of
a buffer, which is gathered one unit ahead, in forward and again in backward, where saved views of it are made anew. Its
gradient is reduce-scattered while backward goes on. An error, another order of units or a second derivative breaks it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Block, Step, loss_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

gather = torch.ops._c10d_functional.all_gather_into_tensor_out.default
reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
wait = torch.ops._c10d_functional.wait_tensor.default


def bare(model: nn.Module, *, reshard: bool = True) -> Step:
    """Return the step of a model with ``blocks``; with ``reshard`` their buffers are freed between forward and backward."""
    units = _Units(model, reshard)

    def step(x: Tensor, y: Tensor) -> None:
        with saved_tensors_hooks(units.pack, units.unpack) if reshard else contextlib.nullcontext(), units.root:
            loss = loss_of(model(x), y)
        loss.backward()
        units.finish_reductions(0)

    return step


class _Units:
    """The units of a model, in the order of forward, and what is under way of them."""

    def __init__(self, model: Any, reshard: bool) -> None:
        self.reshard = reshard
        self.size, self.group = dist.get_world_size(), dist.group.WORLD.group_name
        self.blocks = [_Unit(self, block, i) for i, block in enumerate(model.blocks)]
        self.root = _Unit(self, model, len(self.blocks))
        self.by_storage: dict[int, _Unit] = {}
        self.spare: list[Tensor] = []
        self.reducing: list[tuple[_Unit, Tensor]] = []

    def pack(self, tensor: Tensor) -> Any:
        unit = self.by_storage.get(torch._C._storage_address(tensor))
        if unit is not None:
            return unit, tensor.shape, tensor.stride(), tensor.storage_offset()
        return (tensor, tensor._version) if tensor._version else tensor

    def unpack(self, kept: Any) -> Tensor:
        if type(kept) is not tuple:
            return kept
        if len(kept) == 2:
            return kept[0]
        unit, *layout = kept
        return unit.gather_again().as_strided(*layout)

    def finish_reductions(self, most: int) -> None:
        while len(self.reducing) > most:
            unit, sent = self.reducing.pop(0)
            unit.grad = wait(sent).div_(self.size)


class _Unit:
    """The parameters of a module, but for those of blocks in it, as views of one buffer. This rank has a slice of it."""

    def __init__(self, units: _Units, module: nn.Module, index: int) -> None:
        self.units, self.index = units, index
        found = [(one._parameters, name) for one in _own_modules(module) for name in one._parameters]
        self.places = [(own, name) for own, name in found if own[name] is not None]
        params = [own[name] for own, name in self.places]
        self.shapes, self.sizes = [p.shape for p in params], [p.numel() for p in params]
        self.numel = sum(self.sizes)
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        self.shard = flat.chunk(units.size)[dist.get_rank()].clone().requires_grad_()
        self.buffer: Tensor | None = None
        self.under_way: Tensor | None = None
        self.grad: Tensor | None = None
        if isinstance(module, Block):
            module.forward = _within(self, module.forward)

    def start(self) -> None:
        spare = self.units.spare
        out = spare.pop() if spare and len(spare[-1]) == self.numel else torch.empty(self.numel)
        with torch.no_grad():
            self.under_way = gather(self.shard, self.units.size, self.units.group, out=out)

    def wait(self, ahead: int) -> Tensor:
        """Return the gathered buffer; start to gather the unit that comes next."""
        if self.under_way is None:
            self.start()
        with torch.no_grad():
            buffer, self.under_way = wait(self.under_way), None
        if 0 <= ahead < len(self.units.blocks):
            self.units.blocks[ahead].start()
        return buffer

    def __enter__(self) -> None:
        self.buffer = self.wait(self.index + 1)
        for (own, name), view in zip(self.places, _Unflatten.apply(self.shard, self), strict=True):
            own[name] = view
        self.units.by_storage[torch._C._storage_address(self.buffer)] = self

    def __exit__(self, *_: object) -> None:
        assert self.buffer is not None
        if self.units.reshard:
            del self.units.by_storage[torch._C._storage_address(self.buffer)]
            self.units.spare[:] = [self.buffer]
            self.buffer = None
        for own, name in self.places:
            own[name] = None

    def gather_again(self) -> Tensor:
        if self.buffer is None:
            self.buffer = self.wait(self.index - 1)
        return self.buffer

    def views(self) -> tuple[Tensor, ...]:
        assert self.buffer is not None
        return tuple(x.view(shape) for x, shape in zip(self.buffer.split_with_sizes(self.sizes), self.shapes, strict=True))

    def reduce(self, grads: Sequence[Tensor]) -> None:
        self.buffer = None
        with torch.no_grad():
            joined = torch.empty(self.numel)
            torch.ops.aten._chunk_cat.out([grad.contiguous() for grad in grads], 0, 1, out=joined.view(1, -1))
            self.units.reducing.append((self, reduce_scatter(joined, "sum", self.units.size, self.units.group)))
        self.units.finish_reductions(1)


class _Unflatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, unit: _Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return unit.views()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.unit.reduce(grads)
        return None, None


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, Block):
            yield from _own_modules(child)


def _within(unit: _Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with unit:
            return forward(*args)

    return run
