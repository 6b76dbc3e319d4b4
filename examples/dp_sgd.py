"""DP-SGD on shards: a byte-level language model whose training tells little about any one of its samples.

Every step clips each sample's gradient and adds noise to their sum, which is reduced once (Abadi et al. 2016,
arXiv:1607.00133). The privacy spent, (epsilon, delta), is accounted for by Renyi differential privacy of the subsampled
Gaussian mechanism at whole orders (Mironov, Talwar and Zhang 2019, arXiv:1908.10530): a coin of its own says of every
sample whether it is in a batch, so that a rank may have none. Any number of ranks trains the same.

python examples/dp_sgd.py
torchrun --nproc-per-node 2 examples/dp_sgd.py
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

CONTEXT, DIM, HIDDEN = 8, 16, 64
BATCH, STEPS, EVERY = 256, 60, 15  # samples on all ranks together, on average
LR, CLIP, NOISE, DELTA = 2.0, 1.0, 0.8, 1e-6

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
samples = text.unfold(0, CONTEXT + 1, CONTEXT + 1)  # no byte is in two samples

torch.manual_seed(0)  # the same model, and the batches of all ranks, on every rank
model = nn.Sequential(
    nn.Embedding(256, DIM), nn.Flatten(0), nn.Linear(CONTEXT * DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 256)
).double()
spec = fs.by_type(nn.Embedding, nn.Linear)(model).bound
params = fs.shard(model, spec)


def loss(params, sample):
    """Of one sample: the last byte from those before it."""
    return F.cross_entropy(fs.functional_call(model, params, sample[:-1], spec=spec), sample[-1])


def epsilon(steps, rate, noise, delta):
    """The best bound over orders of Renyi differential privacy, for batches of a random ``rate`` of the samples."""

    def renyi(order):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        return torch.tensor(terms, dtype=torch.float64).logsumexp(0).item() / (order - 1)

    return min(steps * renyi(a) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in range(2, 128))


generator = torch.Generator().manual_seed(1)  # for a secret, seed it from the system: generator.seed()
losses, rate = [], BATCH / len(samples)
for step in range(1, STEPS + 1):
    batch = samples[torch.rand(len(samples)) < rate].long()
    losses.append(torch.vmap(loss, (None, 0))(params, batch).mean().item())  # to look at: not private
    mine = batch[rank::world]
    grads = fs.per_sample_grads(loss, params, mine, spec=spec, clip=CLIP, noise=NOISE, generator=generator, reduce=BATCH)
    params = {key: p - LR * grads[key] for key, p in params.items()}
    if rank == 0 and step % EVERY == 0:
        spent = epsilon(step, rate, NOISE, DELTA)
        print(f"step {step:3d}  loss {sum(losses[-EVERY:]) / EVERY:.10f}  epsilon {spent:.3f} at delta {DELTA:g}", flush=True)
if rank == 0:
    print(f"{world} ranks")
if dist.is_initialized():
    dist.destroy_process_group()
