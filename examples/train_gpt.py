"""Train a byte-level GPT on the source text of the Python standard library, on shards.

One rank:          python examples/train_gpt.py
Two ranks:         torchrun --nproc-per-node 2 examples/train_gpt.py
HSDP, DDP:         torchrun --nproc-per-node 4 examples/train_gpt.py --strategy hsdp   (or ddp)
Mixed precision:   torchrun --nproc-per-node 2 examples/train_gpt.py --precision bf16 --micro-batches 2
Larger, on GPUs:   torchrun --nproc-per-node 8 examples/train_gpt.py --layers 12 --dim 768 --heads 12 --seq 1024

Runs on nccl where there are CUDA devices, on gloo elsewhere; without torchrun there is one rank and no process group.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, batch, ranks, text
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import funshard as fs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", choices=["fsdp", "hsdp", "ddp"], default="fsdp")
parser.add_argument("--replicas", type=int, default=2, help="hsdp: the size of the axis that is replicated over")
parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="bf16: reduced in float32")
parser.add_argument("--micro-batches", type=int, default=1, help="of each step, whose gradients are added up")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=192)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log-every", type=int, default=20)
parser.add_argument("--eval-batches", type=int, default=10)
parser.add_argument("--sample", type=int, default=200, help="bytes of text to generate at the end")
parser.add_argument("--save", help="a file for the trained parameters, such as gpt.pt for lora.py")
parser.add_argument("--max-bytes", type=int, default=8_000_000, help="of text, training and validation together")
args = parser.parse_args()

# --- ranks and devices ---

rank, world, device = ranks()

# --- data: this rank's batches are drawn by this rank's generator ---

train, validation = text("*.py", args.max_bytes)
generator = torch.Generator().manual_seed(args.seed + 1 + rank)


def draw(source: Tensor) -> tuple[Tensor, Tensor]:
    return batch(source, (args.batch, args.seq), generator, device)


# --- model: born alike on every rank from the same seed, then only its structure is kept ---

torch.manual_seed(args.seed)
model = GPT(args.layers, args.dim, args.heads, args.seq)
bf16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
precision = bf16 if args.precision == "bf16" else None
p = fs.P(None if args.strategy == "ddp" else "shard", precision=precision)
spec = fs.by_type(Block, p=p)(model)  # on the whole world as one axis "shard"
if args.strategy == "hsdp":
    replicas = min(args.replicas, world)
    axes = {"replicate": replicas, "shard": world // replicas}
    # No name for the DeviceMesh: it would keep its process groups alive past destroy_process_group, and gloo aborts
    # when the interpreter takes them down at exit.
    spec = spec.on(init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)) if world > 1 else axes)
params = {key: shard.to(device) for key, shard in fs.shard(model, spec).items()}
model = fs.skeleton(model)  # the full parameters are let go
if rank == 0:
    print(spec)


def loss(params: fs.Params, x: Tensor, y: Tensor, reduce_over: list[str] | None = None) -> Tensor:
    logits = fs.functional_call(model, params, (x,), spec=spec, reduce_over=reduce_over)
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def gradients(params: fs.Params) -> tuple[fs.Params, Tensor]:
    """Of the mean over micro-batches: each reduced over the slices while its backward runs, over replicas all at once."""
    later = [name for name in spec.bound_mesh.names if name not in p.axes and args.micro_batches > 1]
    now = [name for name in spec.bound_mesh.names if name not in later]
    parts = (fs.grad_and_value(loss)(params, *draw(train), now) for _ in range(args.micro_batches))
    total, value = next(parts)
    for grads, loss_value in parts:
        total, value = {key: total[key] + grads[key] for key in total}, value + loss_value
    mean = {key: grad / args.micro_batches for key, grad in total.items()} if args.micro_batches > 1 else total
    return fs.reduce_grads(mean, spec, axes=later), value / args.micro_batches


def decay(name: str, param: fs.Param) -> dict[str, float]:
    """Weight decay for matrices only."""
    return {} if len(param.shape) > 1 else {"weight_decay": 0.0}


def over_ranks(value: Tensor) -> float:
    """The mean over ranks."""
    if world > 1:
        dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()


def learning_rate(step: int) -> float:
    """Linear warmup, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# --- training: params and optimizer state go in and come out, in the same memory ---

init, update = fs.optim.from_torch(
    torch.optim.AdamW,
    spec=spec,
    options=decay,
    lr=args.lr,
    betas=(0.9, 0.95),
    weight_decay=args.weight_decay,
    fused=True,
    donate=True,
)
state = init(params)
start, losses = time.perf_counter(), []
for step in range(args.steps):
    grads, value = gradients(params)
    params, state = update(grads, state, params, lr=learning_rate(step))
    losses.append(value)
    if step % args.log_every == 0 or step == args.steps - 1:
        mean = over_ranks(torch.stack(losses).mean())  # since the last line
        now = time.perf_counter()
        speed = len(losses) * args.micro_batches * args.batch * args.seq * world / (now - start)
        held = sum(t.nbytes for t in [*params.values(), *(t for values in state.values() for t in values.values())])
        if rank == 0:
            print(f"step {step:5d}  loss {mean:.4f}  tokens/s {speed:,.0f}  bytes per rank {held:,}", flush=True)
        start, losses = now, []

# --- validation, and a sample: every rank takes part in the gathers ---

with torch.no_grad():
    mean = over_ranks(torch.stack([loss(params, *draw(validation)) for _ in range(args.eval_batches)]).mean())
    if rank == 0:
        print(f"validation loss {mean:.4f}")
    ids = torch.tensor([list(b"def ")], device=device)
    generator.manual_seed(args.seed)  # the same text on every rank
    for _ in range(args.sample):
        logits = fs.functional_call(model, params, (ids[:, -args.seq :],), spec=spec)[0, -1]
        chosen = torch.multinomial((logits.float().cpu() / 0.8).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen[None].to(device)], 1)
    if rank == 0:
        print("sample:\n" + bytes(ids[0].tolist()).decode(errors="replace"))
if args.save:
    full = fs.gather_full(params, spec, rank0_only=True, offload_to_cpu=True)
    if rank == 0:
        torch.save(full, args.save)
if dist.is_initialized():
    dist.destroy_process_group()
