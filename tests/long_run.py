"""A long training run with everything that goes wrong: NaNs on one rank, other numbers of micro-batches, kills.

Run by test_long_run.py, as by torchrun on two ranks. It writes each step's loss into FOLDER/losses, its memory into
FOLDER/memory, and its parameters at the end into FOLDER/end.pt. Started again, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import funshard as fs

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, Block, ranks, text

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
parser.add_argument("--kill", default="", help="steps at which a rank kills itself, once each, such as 700:1,1300:0")
args = parser.parse_args()
rank, world, _ = ranks()
SEQ = 32


class DroppedGPT(GPT):
    """With dropout behind each block: random numbers of each rank's own."""

    def __init__(self) -> None:
        super().__init__(2, 32, 2, SEQ)
        for i, block in enumerate(self.blocks):
            self.blocks[i] = nn.Sequential(block, nn.Dropout(0.1))


torch.manual_seed(0)
model = DroppedGPT()
precision = fs.Precision(param=torch.bfloat16, reduce=torch.float32, keep={"*norm*": torch.float32})
p = fs.P("shard", precision=precision, remat=True, align=256)
spec = fs.policies.by_group([Block], size=2, p=p)(model)
params = fs.shard(model, spec)
model = fs.skeleton(model)
source, _ = text("*.py", 200_000)


batches = fs.data.sampler((len(source) - 1) // SEQ, spec, batch=6 * world, epochs=None)


def loss(params: fs.Params, batch: tuple[Tensor, Tensor, bool]) -> Tensor:
    x, y, spoilt = batch
    value = F.cross_entropy(fs.functional_call(model, params, (x,), spec=spec).flatten(0, 1).float(), y.flatten())
    return value * torch.nan if spoilt else value


def microbatches(step: int) -> list[tuple[Tensor, Tensor, bool]]:
    """None to three micro-batches, of other sizes on each rank; NaN on rank 1 at every 13th step."""
    own = batches[step][: (7 * step + 3 * rank) % 6]  # from none of this rank's sequences to all but one
    chunk = source[SEQ * torch.tensor(own, dtype=torch.long)[:, None] + torch.arange(SEQ + 1)].long()
    return [(part[:, :-1], part[:, 1:], rank == 1 and step % 13 == 5) for part in chunk.split(2) if len(part)]


adamw = fs.optim.from_torch(torch.optim.AdamW, spec=spec, lr=3e-3, donate=True)
adamw = fs.optim.quantized_state(adamw, fs.codecs.dynamic8(), spec=spec, donate=True)
rate = fs.optim.schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 3e-3, T_max=args.steps)
chained = fs.optim.clip_gradients(spec, 1.0), fs.optim.schedule_lr(rate), adamw
init, update = fs.optim.chain(fs.optim.apply_if_finite(spec, max_consecutive=3), *chained)
state: Any = init(params)
torch.manual_seed(1 + rank)
first, stand_in = 0, (torch.zeros(1, SEQ, dtype=torch.long),) * 2 + (False,)
args.folder.mkdir(exist_ok=True)
if found := fs.checkpoint.latest(args.folder / "states", spec):
    params, first, own = (fs.checkpoint.load(found, spec, only=part) for part in ("params", "step", "own"))
    state = fs.checkpoint.load(found, spec, only="state", like=state)
    torch.set_rng_state(own["random"])
kills = dict(map(int, kill.split(":")) for kill in args.kill.split(",") if kill)
saving = None
for step in range(first, args.steps):
    mark = args.folder / f"killed-{step}"
    if kills.get(step) == rank and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    own = microbatches(step)
    tokens = [float(y.numel()) for _, y, _ in own]
    padded = fs.pad_microbatches(own, tokens, spec=spec, stand_in=stand_in)
    if not padded.microbatches:
        continue
    grads, value = fs.accumulate(loss, params, padded.microbatches, spec=spec, weights=padded.weights)
    largest = max(fs.optim.norms(grads, spec).values())
    params, state = update(grads, state, params)
    with (args.folder / f"losses-{rank}").open("a") as file:
        file.write(f"{step} {value.item():.17g} {float(largest):.17g} {int(state.total)}\n")
    if rank == 0 and step % 50 == 0:
        now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        with (args.folder / "memory").open("a") as file:
            file.write(f"{step} {now}\n")
    if step % 100 == 0:
        streamed = {name: full.double().sum() for name, full in fs.stream_full(params, spec, bucket=20_000)}
        assert streamed == {name: full.double().sum() for name, full in fs.unshard(params, spec).items()}
    if (step + 1) % args.every == 0:
        if saving is not None:
            saving.wait()
        if rank == 0:
            fs.checkpoint.clean(args.folder / "states", keep=2)
        everything = {"params": params, "state": state, "step": step + 1}
        everything["own"] = fs.checkpoint.per_rank({"random": torch.get_rng_state()})
        saving = fs.checkpoint.save(args.folder / "states" / f"step-{step + 1:06d}", everything, spec, asynchronous=True)
if saving is not None:
    saving.wait()
full = fs.unshard(params, spec, rank0_only=True)
if rank == 0:
    torch.save(full, args.folder / "end.pt")
dist.destroy_process_group()
