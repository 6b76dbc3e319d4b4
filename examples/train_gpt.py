"""Train a byte-level GPT on the source text of the Python standard library, on shards.

One rank:          python examples/train_gpt.py
Two ranks:         torchrun --nproc-per-node 2 examples/train_gpt.py
HSDP, DDP:         torchrun --nproc-per-node 4 examples/train_gpt.py --strategy hsdp   (or ddp)
Mixed precision:   torchrun --nproc-per-node 2 examples/train_gpt.py --precision bf16 --micro-batches 2
Muon, for matrices: torchrun --nproc-per-node 2 examples/train_gpt.py --optimizer muon   (or shampoo, soap)
State in 8 bits:   torchrun --nproc-per-node 2 examples/train_gpt.py --eight-bit
Larger, on GPUs:   torchrun --nproc-per-node 8 examples/train_gpt.py --layers 12 --dim 768 --heads 12 --seq 1024 --batch 64
That goes on:      torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint runs/gpt --every 50

Matrices of hidden layers are --optimizer's, with --matrix-lr; embeddings, head and norms always AdamW's, with --lr.

A terminal shows one line that rewrites itself, if tqdm is installed; a file gets a line every --log-every steps.

With --checkpoint the last three states are kept. Ranks that torchrun starts again after one has died go on from the last one,
and so does a new start with --resume, on as many ranks with the same losses to the last bit, on others to rounding.

Runs on nccl where there are CUDA devices, on gloo elsewhere; without torchrun there is one rank and no process group.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, ranks, text
from progress import Progress
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
parser.add_argument("--batch", type=int, default=16, help="sequences of each step, over all ranks and micro-batches")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument(
    "--optimizer", choices=["adamw", "muon", "shampoo", "soap"], default="adamw", help="of the blocks' matrices"
)
parser.add_argument("--eight-bit", action="store_true", help="keep AdamW's state in 8 bits")
parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's")
parser.add_argument("--matrix-lr", type=float, help="of another --optimizer; by default 0.02, for soap 3e-3")
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log-every", type=int, default=20)
parser.add_argument("--eval-batches", type=int, default=10)
parser.add_argument("--sample", type=int, default=200, help="bytes of text to generate at the end")
parser.add_argument("--save", help="a file for the trained parameters, such as gpt.pt for lora.py")
parser.add_argument("--plot", metavar="FILE", help="a picture of loss, rate, speed and memory over steps, such as run.svg")
parser.add_argument("--checkpoint", type=Path, help="a directory for states to go on from, one every so many steps")
parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
parser.add_argument("--max-bytes", type=int, default=8_000_000, help="of text, training and validation together")
args = parser.parse_args()
if args.eight_bit and args.optimizer != "adamw":
    parser.error(f"--eight-bit: expected --optimizer adamw, whose state is slices, got {args.optimizer}")

# --- ranks and devices ---

rank, world, device = ranks()
sequences, left = divmod(args.batch, world * args.micro_batches)
if left:
    parser.error(f"--batch: expected a multiple of {world} ranks x {args.micro_batches} micro-batches, got {args.batch}")

# --- model: born alike on every rank from the same seed, then only its structure is kept ---

torch.manual_seed(args.seed)
model = GPT(args.layers, args.dim, args.heads, args.seq)
bf16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
precision = bf16 if args.precision == "bf16" else None
align = 256 if args.eight_bit else None  # no block of 256 elements straddles parameters or ranks
p = fs.P(None if args.strategy == "ddp" else "shard", precision=precision, align=align)
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

# --- data: sequences end to end, [sequences, seq + 1]; each rank takes its part of batches that do not depend on the ranks ---

train, validation = (part.unfold(0, args.seq + 1, args.seq) for part in text("*.py", args.max_bytes))
batches = fs.data.sampler(train, spec, batch=args.batch, seed=args.seed + 1)
held_out = fs.data.sampler(validation, spec, batch=args.batch, seed=args.seed + 1)


def take(source: Tensor, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Sequences, and the byte after each of theirs."""
    chunk = source[indices].long().to(device)
    return chunk[:, :-1], chunk[:, 1:]


def loss(params: fs.Params, x: Tensor, y: Tensor, reduce_axes: list[str] | None = None) -> Tensor:
    logits = fs.functional_call(model, params, (x,), spec=spec, reduce_axes=reduce_axes)
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def gradients(params: fs.Params, step: int) -> tuple[fs.Params, Tensor]:
    """Of the mean over micro-batches: each reduced over the slices while its backward runs, over replicas all at once."""
    later = [name for name in spec.bound_mesh.names if name not in p.axes and args.micro_batches > 1]
    now = [name for name in spec.bound_mesh.names if name not in later]
    own = batches[step]
    micro = [own[i : i + sequences] for i in range(0, len(own), sequences)]
    parts = (fs.grad_and_value(loss)(params, *take(train, indices), now) for indices in micro)
    total, value = next(parts)
    for grads, loss_value in parts:
        total, value = {key: total[key] + grads[key] for key in total}, value + loss_value
    mean = {key: grad / args.micro_batches for key, grad in total.items()} if args.micro_batches > 1 else total
    return fs.reduce_grads(mean, spec, reduce_axes=later), value / args.micro_batches


def decay(name: str, param: fs.Param) -> dict[str, float]:
    """Weight decay for matrices only."""
    return {} if len(param.shape) > 1 else {"weight_decay": 0.0}


def over_ranks(value: Tensor) -> float:
    """The mean over ranks."""
    if world > 1:
        dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()


def schedule(step: int) -> float:
    """What learning rates are multiplied by: linear warmup, then a cosine down to a tenth."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


# --- optimizer: params and its state go in and come out, in the same memory ---

adamw = fs.optim.from_torch(
    torch.optim.AdamW,
    spec=spec,
    options=decay,
    lr=args.lr,
    betas=(0.9, 0.95),
    weight_decay=args.weight_decay,
    fused=True,
    donate=True,
)
init, update = fs.optim.quantized_state(adamw, fs.codecs.dynamic8(), spec=spec, donate=True) if args.eight_bit else adamw
rates = {"lr": args.lr}
if args.optimizer != "adamw":
    matrices = fs.optim.matrices(spec, select=fs.optim.hidden(model, "head"))  # whole on their owners: each rank has some
    make = {"muon": fs.optim.muon, "shampoo": fs.optim.shampoo, "soap": fs.optim.soap}[args.optimizer]
    rates = {"lr": args.matrix_lr or (3e-3 if args.optimizer == "soap" else 0.02), "fallback_lr": args.lr}
    wide = {"dtype": torch.float32} if args.optimizer == "muon" and device.type == "cpu" else {}  # on GPUs bf16
    init, update = make(matrices, lr=rates["lr"], weight_decay=args.weight_decay, fallback=adamw, donate=True, **wide)
    if rank == 0:
        print(matrices)
state = init(params)
torch.manual_seed(args.seed + 1 + rank)  # from here on, random numbers are each rank's own: a model's dropout
first = line = 0  # the step to begin with, and the one after the last line that was printed
losses = torch.zeros((), device=device)  # their sum since then

# --- checkpoints: all that the loop needs to go on ---


def everything(step: int) -> dict[str, Any]:
    """The state after so many steps, of which the random numbers and losses are each rank's own."""
    loop = {"step": step, "line": line, "ranks": world, "data": batches.state_dict(step)}
    random = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    return {"params": params, "state": state, "loop": loop, "own": fs.checkpoint.per_rank({"random": random, "losses": losses})}


def last_checkpoint() -> Path | None:
    """The last whole one, to go on from."""
    found = fs.checkpoint.latest(args.checkpoint, spec) if args.checkpoint else None
    if found and not (args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))):
        parser.error(f"--checkpoint: expected a directory without checkpoints, or --resume, got {found}")
    return found


if found := last_checkpoint():
    params, loop = (fs.checkpoint.load(found, spec, only=part) for part in ("params", "loop"))
    state = fs.checkpoint.load(found, spec, only="state", like=state)
    first = line = loop["step"]
    batches.load_state_dict(loop["data"])  # the same batches, or an error
    if loop["ranks"] == world:
        own = fs.checkpoint.load(found, spec, only="own")
        line, losses = loop["line"], own["losses"]
        (torch.cuda if device.type == "cuda" else torch).set_rng_state(own["random"])
    if rank == 0:
        print(f"resumed from {found} at step {first}", flush=True)

# --- training ---

progress = Progress(args.steps, first, shown=rank == 0)
start, since, saving = time.perf_counter(), first, None
for step in range(first, args.steps):
    grads, value = gradients(params, step)
    scheduled = {name: lr * schedule(step) for name, lr in rates.items()}
    params, state = update(grads, state, params, **scheduled)
    losses += value
    if step % args.log_every == 0 or step == args.steps - 1:
        mean = over_ranks(losses / (step + 1 - line))
        now = time.perf_counter()
        speed = (step + 1 - since) * args.batch * args.seq / (now - start)
        held = sum(tensor.nbytes for tensor in optree.tree_leaves((params, state)))
        if device.type == "cuda":  # activations and gathered units as well
            held = torch.cuda.max_memory_allocated(device)
        shown = {"loss": float(mean), "lr": scheduled["lr"], "tokens/s": speed, "bytes per rank": held}
        progress.show(step, **shown)
        start, since, line = now, step + 1, step + 1
        losses.zero_()
    if args.checkpoint and ((step + 1) % args.every == 0 or step == args.steps - 1):
        if saving is not None:
            saving.wait()
        if rank == 0:
            fs.checkpoint.clean(args.checkpoint, keep=2)  # the third is written now, while training goes on
        path = args.checkpoint / f"step-{step + 1:08d}"
        saving = fs.checkpoint.save(path, everything(step + 1), spec, asynchronous=True)
if saving is not None:
    saving.wait()  # while there are ranks
if args.plot:
    progress.plot(args.plot)

# --- validation, and a sample: every rank takes part in the gathers ---

with torch.no_grad():
    mean = over_ranks(torch.stack([loss(params, *take(validation, held_out[i])) for i in range(args.eval_batches)]).mean())
    if rank == 0:
        print(f"validation loss {mean:.4f}")
    ids = torch.tensor([list(b"def ")], device=device)
    generator = torch.Generator().manual_seed(args.seed)  # the same text on every rank
    for _ in range(args.sample):
        logits = fs.functional_call(model, params, (ids[:, -args.seq :],), spec=spec)[0, -1]
        chosen = torch.multinomial((logits.float().cpu() / 0.8).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen[None].to(device)], 1)
    if rank == 0:
        print("sample:\n" + bytes(ids[0].tolist()).decode(errors="replace"))
if args.save:
    full = fs.unshard(params, spec, rank0_only=True, offload_to_cpu=True)
    if rank == 0:
        torch.save(full, args.save)
if dist.is_initialized():
    dist.destroy_process_group()
