"""What the benchmarks share: models, training steps to compare, a count of what a step does, and a free port."""

import contextlib
import dataclasses
import functools
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
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


def fsdp2(
    model: nn.Module,
    mesh: dist.DeviceMesh,
    *,
    reshard: bool = True,
    precision: fs.Precision | None = None,
    offload: bool = False,
    group: int = 1,
) -> Step:
    """The step of FSDP2 with each ``group`` of ``model.blocks``, and the rest, as a unit.

    Offloaded: on the CPU, so without pinning.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    low = MixedPrecisionPolicy(precision.param, precision.reduce) if precision else MixedPrecisionPolicy()
    rest = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    blocks = list(model.blocks)
    groups = blocks if group == 1 else [blocks[i : i + group] for i in range(0, len(blocks), group)]
    for modules in (*groups, model):
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=low, offload_policy=rest)
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


def fully_sharded(reshard: bool, precision: fs.Precision | None = None) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        return fsdp2(model, mesh, reshard=reshard, precision=precision)

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


class Sent(NamedTuple):
    """One collective: what, the tensor that goes in and the one that comes out."""

    op: str
    input: Tensor
    output: Tensor

    @property
    def input_bytes(self) -> int:
        return self.input.nbytes

    @property
    def output_bytes(self) -> int:
        return self.output.nbytes


GATHER, SCATTER, REDUCE, EXCHANGE = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
BROADCAST = "broadcast"  # of which gloo's gathers consist between several ranks
COPIES = {"aten::cat", "aten::clone", "aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "fsdp::split_with_sizes_copy"}

SENDS_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def sent(name: str, args: Sequence[Any], out: Any) -> Sent | None:
    """The collective that an operator was, of torch's functional ones and of those that torch.distributed calls."""
    if name.startswith("_c10d_functional::all_gather_into_tensor"):
        return Sent(GATHER, args[0], out)
    if name == "_c10d_functional::reduce_scatter_tensor":
        return Sent(SCATTER, args[0], out)
    if name in ("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"):
        return Sent(REDUCE, args[0], out)
    if name == "_c10d_functional::broadcast_":
        return Sent(BROADCAST, args[0], out)
    if name == "_c10d_functional::all_to_all_single":
        return Sent(EXCHANGE, args[0], out)
    if name == "c10d::_allgather_base_":
        return Sent(GATHER, args[1], args[0])
    if name == "c10d::_reduce_scatter_base_":
        return Sent(SCATTER, args[1], args[0])
    if name == "c10d::allreduce_":
        (x,) = args[0]
        return Sent(REDUCE, x, x)
    if name.startswith(("c10d::", "_c10d_functional::")) and name not in SENDS_NOTHING:
        raise NotImplementedError(f"{name} is not counted")
    return None


class Work(TorchDispatchMode):
    """A count of the operators that are dispatched (not the profiler's), what they send, and the bytes they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # that go in and come out, by collective
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # count what it does to its local tensor
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("profiler::"):
            return out
        self.ops[name] += 1
        if (one := sent(name, args, out)) is not None:
            self.send(one)
        elif name == "_c10d_functional::wait_tensor":
            self.wait(args[0])
        elif name == "fsdp::all_gather_copy_in":
            self.copied += sum(x.nbytes for x in args[0])
        elif name in ("aten::_chunk_cat", "fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype"):
            self.copied += kwargs["out"].nbytes
        elif name in COPIES:
            written = kwargs.get("out", args[0] if func._schema.is_mutable else out)
            self.copied += sum(x.nbytes for x in pytree.tree_leaves(written))
        return out

    def send(self, one: Sent) -> None:
        """A collective was started."""
        self.ops[one.op] += 1
        self.bytes[f"into {one.op}"] += one.input_bytes
        self.bytes[f"out of {one.op}"] += one.output_bytes

    def wait(self, tensor: Tensor) -> None:
        """A functional collective's result was waited for."""

    @property
    def dispatched(self) -> int:
        """How many operators."""
        return sum(n for name, n in self.ops.items() if "::" in name)

    @property
    def collectives(self) -> int:
        """How many collectives."""
        return sum(self.ops[op] for op in (GATHER, SCATTER, REDUCE, EXCHANGE))


def work_of(step: Step, x: Tensor, y: Tensor) -> Work:
    """What one step does, after another one."""
    step(x, y)
    with Work() as work:
        step(x, y)
    return work


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
