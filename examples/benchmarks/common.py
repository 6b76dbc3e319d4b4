"""What the benchmarks share: models, training steps to compare, fake worlds, and a free port."""

import contextlib
import dataclasses
import functools
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import funshard as fs

Step = Callable[[Tensor, Tensor], object]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 8, dim: int = 384, heads: int = 6, seq: int = 128, vocab: int = 256) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embeddings of [batch, heads, seq, dim]: each pair (x[i], x[i + dim/2]) turned by its angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Llama(nn.Module):
    """A Llama without buffers; by default of 953 million parameters."""

    def __init__(
        self,
        layers: int = 16,
        dim: int = 2048,
        heads: int = 32,
        ffn: int = 5632,
        vocab: int = 32000,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.token = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads or heads, ffn) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x)
        exponent = torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), 500000.0**-exponent)
        cos, sin = angles.cos().to(h.dtype), angles.sin().to(h.dtype)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.head(self.norm(h))


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def plain(model: nn.Module) -> Step:
    """The step of a module that reduces its gradients by itself, if they are reduced at all."""

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad = None

    return step


BF16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
BF16_KEEP = dataclasses.replace(BF16, keep={"*norm*": torch.float32})
REDUCE_BF16 = fs.Precision(reduce=torch.bfloat16)
CODEC_BF16, CODEC_INT8 = (fs.Precision(reduce_codec=codec) for codec in (fs.codecs.cast(torch.bfloat16), fs.codecs.int8()))


def fsdp2(
    model: nn.Module,
    mesh: dist.DeviceMesh,
    *,
    reshard: bool | int = True,
    precision: fs.Precision | None = None,
    offload: bool = False,
    group: int = 1,
    apart: type[nn.Module] | tuple[()] = (),
) -> Step:
    """The step of FSDP2 with each ``group`` of ``model.blocks``, and the rest, as a unit.

    Offloaded: on the CPU, so without pinning. Modules of the class ``apart`` are units of their own, without the precision.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    low = MixedPrecisionPolicy(precision.param, precision.reduce) if precision else MixedPrecisionPolicy()
    rest = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    blocks = list(model.blocks)
    groups = blocks if group == 1 else [blocks[i : i + group] for i in range(0, len(blocks), group)]
    exact = [module for module in model.modules() if isinstance(module, apart)]
    for modules in (*exact, *groups, model):
        own = MixedPrecisionPolicy() if modules in exact else low
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=own, offload_policy=rest)
    return plain(model)


def funshard(
    model: nn.Module, spec: fs.PartitionSpec, grad: Callable[..., Any] = fs.grad_and_value, *, check_order: bool = True
) -> Step:
    """The step of funshard with a spec that is bound to a mesh."""
    params = fs.shard(model, spec)
    model.to("meta")

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(fs.functional_call(model, params, (x,), spec=spec, check_order=check_order), y)

    return lambda x, y: grad(loss)(params, x, y)


def sharded(p: fs.P, grad: Callable = fs.grad_and_value, *, check_order: bool = True) -> Callable[[nn.Module], Step]:
    return lambda model: funshard(model, fs.by_type(Block, p=p)(model).bound, grad, check_order=check_order)


def compared(build: Callable[[nn.Module], Step]) -> Callable[[nn.Module], Step]:
    """The same step inside of `funshard.check`."""

    def wrapped(model: nn.Module) -> Step:
        return fs.check()(build(model))

    return wrapped


def fully_sharded(reshard: bool | int = True, **options: Any) -> Callable[[nn.Module], Step]:
    """FSDP2 on all ranks, with the options of `fsdp2`."""

    def build(model: nn.Module) -> Step:
        return fsdp2(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)), reshard=reshard, **options)

    return build


def checkpointed(build: Callable[[nn.Module], Step], save: list | None = None) -> Callable[[nn.Module], Step]:
    options = {} if save is None else {"context_fn": functools.partial(create_selective_checkpoint_contexts, save)}

    def wrapped(model: nn.Module) -> Step:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        return build(model)

    return wrapped


ATTENTION = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
PRODUCTS = [*ATTENTION, torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group of any size in one process: its collectives return at once, what they return means nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
