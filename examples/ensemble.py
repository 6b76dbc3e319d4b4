"""An ensemble of byte models, trained at once: vmap over stacked shards, one gather of each unit for all members.

Each member predicts the next byte of the Python standard library's source from the bytes before (Bengio et al. 2003),
with its own initialisation and its own learning rate; at the end each is what it is when it is trained alone.

python examples/ensemble.py
torchrun --nproc-per-node 2 examples/ensemble.py
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

RATES = (0.2, 0.3, 0.4, 0.5)  # a member for each
CONTEXT, DIM, HIDDEN = 6, 8, 64
BATCH = 240  # contexts in a step, on all ranks together
STEPS, EVERY = 30, 10

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert BATCH % world == 0, f"expected a number of ranks that divides {BATCH}, got {world}"

torch.manual_seed(0)  # the same models, and the batches of all ranks, on every rank


def build():
    layers = nn.Linear(CONTEXT * DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 256)
    return nn.Sequential(nn.Embedding(256, DIM), nn.Flatten(), *layers).double()


models = [build() for _ in RATES]
model = models[0]  # whose structure serves all
spec = fs.by_type(nn.Embedding, nn.Linear)(model).bound
alone = [fs.shard(member, spec) for member in models]
together = {key: torch.stack([member[key] for member in alone]) for key in alone[0]}  # unit -> [members, slice]

files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
starts = torch.randint(len(text) - CONTEXT, (STEPS + 1, BATCH, 1)).chunk(world, 1)[rank]
batches = text[starts + torch.arange(CONTEXT + 1)].long()  # [step, context, bytes]: the last byte is the target


def log_probabilities(params, batch):
    return fs.functional_call(model, params, (batch[:, :-1],), spec=spec).log_softmax(-1)


def loss(params, batch):
    return F.nll_loss(log_probabilities(params, batch), batch[:, -1])


def update(params, rate, batch):
    """One step of one member."""
    grads, value = fs.grad_and_value(loss)(params, batch)
    return {key: p - rate * grads[key] for key, p in params.items()}, value


def over_ranks(value):
    return fs.collectives.all_reduce(value, spec.bound_mesh["shard"])


rates = torch.tensor(RATES, dtype=torch.float64)
update_all = torch.vmap(update, in_dims=(0, 0, None))
for step in range(STEPS):
    together, losses = update_all(together, rates, batches[step])
    if step % EVERY == 0 or step == STEPS - 1:
        shown = "  ".join(f"{x:.10f}" for x in over_ranks(losses))
        if rank == 0:
            print(f"step {step:3d}  losses {shown}", flush=True)

# The ensemble's prediction is the mean of its members': better than their mean, as the logarithm is concave.
held_out = batches[STEPS]
each = torch.vmap(log_probabilities, in_dims=(0, None))(together, held_out)  # [members, context, 256]
mean = each.exp().mean(0).log()
losses = over_ranks(torch.stack([F.nll_loss(p, held_out[:, -1]) for p in (*each, mean)]))
if rank == 0:
    print(f"on held-out text: a member {losses[:-1].mean():.10f}, the ensemble {losses[-1]:.10f}")

for i, params in enumerate(alone):
    for step in range(STEPS):
        params, _ = update(params, rates[i], batches[step])
    torch.testing.assert_close({key: p[i] for key, p in together.items()}, params, rtol=1e-9, atol=1e-9)
if rank == 0:
    print(f"{world} ranks: {len(RATES)} members trained at once equal those trained alone")
if dist.is_initialized():
    dist.destroy_process_group()
