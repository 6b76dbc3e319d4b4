"""Sharded training (FSDP) as functions: the idea of funshard in plain torch, to read in ten minutes.

torchrun --nproc-per-node 2 examples/mini.py      (or python examples/mini.py, on one rank)

A model is cut into units, and each rank holds one slice of every unit. A unit is gathered from all ranks when its module
runs, and freed after. Backward gathers it again, and reduces its gradient to slices. All else is as on one rank: the model,
the loss, and the optimizer, which updates slices as it would update whole parameters.
"""

import contextlib
import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Tree = dict[str, Tensor]  # parameters by name, or slices by unit
Shapes = dict[str, torch.Size]  # of parameters, by name
Spec = dict[str, Shapes]  # by unit, which is the path of a module: the parameters in it

# --- policy: a pure function from a model to its units ---


def by_type(model: nn.Module, kind: type[nn.Module]) -> Spec:
    """Make a unit of each module of a class. The longest path that is a prefix of a parameter's name owns the parameter."""
    paths = ["", *(path for path, module in model.named_modules() if isinstance(module, kind))]
    spec: Spec = {path: {} for path in paths}
    for name, param in model.named_parameters():
        owner = max((path for path in paths if not path or name.startswith(f"{path}.")), key=len)
        spec[owner][name] = param.shape
    return {unit: shapes for unit, shapes in spec.items() if shapes}


# --- layout: a unit is one flat buffer, of which each rank owns an equal slice ---


def flatten(params: Tree, shapes: Shapes, ranks: int) -> Tensor:
    """Join a unit's parameters end to end, padded to a multiple of the number of ranks."""
    buffer = torch.cat([params[name].flatten() for name in shapes])
    return F.pad(buffer, (0, -len(buffer) % ranks))


def unflatten(buffer: Tensor, shapes: Shapes) -> Tree:
    """Return a unit's parameters as views of its buffer. Inverse of `flatten`."""
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = buffer.split([*sizes, len(buffer) - sum(sizes)])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces[:-1], strict=True)}


def shard(params: Tree, spec: Spec) -> Tree:
    """Return this rank's slice of every unit."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {unit: flatten(params, shapes, ranks).chunk(ranks)[rank].detach().clone() for unit, shapes in spec.items()}


def unshard(slices: Tree, spec: Spec) -> Tree:
    """Return all parameters, each in its own shape. Inverse of `shard`."""
    return {name: param for unit in spec for name, param in unflatten(gather(slices[unit]), spec[unit]).items()}


# --- communication: a gather, and its transpose, which reduces gradients ---


def all_gather(x: Tensor) -> Tensor:
    """Return the slices of all ranks, end to end."""
    out = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather([*out.chunk(dist.get_world_size())], x.contiguous())
    return out


def reduce_scatter(x: Tensor) -> Tensor:
    """Return this rank's slice of the mean over ranks."""
    pieces = [*x.contiguous().chunk(dist.get_world_size())]
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter(out, pieces)
    return out / len(pieces)


class LinearMap(torch.autograd.Function):
    """A linear map along dimension 0. Its derivatives are such maps, too, so they exist at every order."""

    @staticmethod
    def forward(x: Tensor, run: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.run, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return LinearMap.apply(grad, ctx.transpose, ctx.run), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return LinearMap.apply(tangent, ctx.run, ctx.transpose)

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None, None], x: Tensor, *maps: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        return LinearMap.apply(x.movedim(dims[0], -1), *maps), x.dim() - 1  # a batch is one more dimension at the end


def gather(x: Tensor) -> Tensor:
    """Gather a unit's buffer. Training minimises the mean of the ranks' losses, so its gradient is their mean."""
    return LinearMap.apply(x, all_gather, reduce_scatter)


# --- call: a module's unit is gathered, used and freed ---


def functional_call(model: nn.Module, slices: Tree, args: tuple[Any, ...], spec: Spec, reshard: bool = True) -> Any:
    """Call a model on slices.

    With ``reshard`` buffers are freed between forward and backward (ZeRO-3), by hooks that torch.func refuses. Without it they
    stay (ZeRO-2), and every transform of torch.func works.
    """

    @functools.lru_cache(maxsize=1)  # backward holds one unit at a time
    def gather_again(unit: str) -> Tensor:
        return all_gather(slices[unit].detach())

    def run(unit: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        buffer = gather(slices[unit])
        hooks = save_positions(buffer, functools.partial(gather_again, unit)) if reshard else contextlib.nullcontext()
        before = swap(model, unflatten(buffer, spec[unit]))
        try:
            with hooks:
                return forward(*args, **kwargs)
        finally:
            swap(model, before)

    with contextlib.ExitStack() as stack:
        for unit in spec:
            module = model.get_submodule(unit)
            module.forward = functools.partial(run, unit, module.forward)
            stack.callback(delattr, module, "forward")  # its class's method is back
        return model(*args)


def swap(model: nn.Module, params: Tree) -> Tree:
    """Put tensors where a model has its parameters, and return what was there."""
    before: Tree = {}
    for name, param in params.items():
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)._parameters
        before[name], owner[own] = owner[own], param
    return before


def save_positions(buffer: Tensor, gather_again: Callable[[], Tensor]) -> contextlib.AbstractContextManager[None]:
    """Have autograd save where a weight lies in the buffer, instead of the weight: then nothing holds the buffer."""
    storage = buffer.untyped_storage().data_ptr()

    def pack(x: Tensor) -> Any:
        return (x.shape, x.stride(), x.storage_offset()) if x.untyped_storage().data_ptr() == storage else x

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else gather_again().as_strided(*saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# --- step: gradients and the optimizer's state are slices, too ---


def grad_and_value(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tree, Tensor]]:
    """Differentiate by the first argument. This is torch.func.grad_and_value by plain autograd, which takes hooks."""

    def run(slices: Tree, *args: Any) -> tuple[Tree, Tensor]:
        slices = {unit: x.detach().requires_grad_() for unit, x in slices.items()}
        value = loss(slices, *args)
        return dict(zip(slices, torch.autograd.grad(value, [*slices.values()]), strict=True)), value.detach()

    return run


Moments = dict[str, tuple[Tensor, Tensor]]  # by unit


def adamw(grads: Tree, moments: Moments, slices: Tree, step: int, lr: float = 3e-3) -> tuple[Tree, Moments]:
    """Return slices and moments after a step, counted from 1. AdamW is elementwise: no rank needs another rank's slice."""
    slices, moments = {**slices}, {**moments}
    for unit, grad in grads.items():
        m, v = moments[unit]
        m, v = moments[unit] = m.lerp(grad, 0.1), v.lerp(grad * grad, 0.001)
        change = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        slices[unit] = slices[unit] * (1 - lr * 0.01) - lr * change
    return slices, moments


# --- training: a small GPT on the source text of the standard library ---


class GPT(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 64, heads: int = 4, seq: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, heads, 4 * dim, **options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
        for block in self.blocks:
            h = block(h, mask, is_causal=True)
        return self.head(self.norm(h))


def main(steps: int = 100, batch: int = 16, seq: int = 64) -> None:
    alone = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else alone))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model on every rank
    model = GPT(seq=seq)
    spec = by_type(model, nn.TransformerEncoderLayer)
    slices = shard(dict(model.named_parameters()), spec)
    moments = {unit: (torch.zeros_like(x), torch.zeros_like(x)) for unit, x in slices.items()}
    model.to("meta")  # the full parameters are freed, the structure stays

    def loss(slices: Tree, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, slices, (x,), spec).flatten(0, 1), y.flatten())

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    torch.manual_seed(1 + rank)  # other samples on every rank
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - seq, (batch // ranks, 1))
        samples = text[starts + torch.arange(seq + 1)].long()
        grads, value = grad_and_value(loss)(slices, samples[:, :-1], samples[:, 1:])
        slices, moments = adamw(grads, moments, slices, step)
        if step == 1 or step % 10 == 0:
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step:3}  loss {value / ranks:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
