"""MeanFlow on curves: a jvp of a sharded transformer inside its loss, and samples in one step.

The network learns the mean velocity u(z, r, t) of a flow between two times, whose derivative by t along the flow is a jvp of
the network itself (Geng et al. 2025, arXiv:2505.13447). Attention needs forward mode for it: `fs.transforms_attention`. A curve
is a sine of its own phase at LENGTH points, each of them a token. In float64, on a batch that is split over the ranks, so that
any number of ranks prints the same.

python examples/meanflow.py
torchrun --nproc-per-node 2 examples/meanflow.py
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import jvp

import funshard as fs

LAYERS, DIM, HEADS, LENGTH = 2, 32, 4, 16
BLOCK = 8  # queries of which attention has scores at once
BATCH = 24  # curves on all ranks together
LR, STEPS, EVERY = 4e-3, 80, 40


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.point, self.position, self.times = nn.Linear(1, DIM), nn.Embedding(LENGTH, DIM), nn.Linear(4, DIM)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, **options) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 1)

    def forward(self, z, r, t):
        times = torch.cat([r, t, torch.sin(math.pi * r), torch.sin(math.pi * t)], -1)
        h = self.point(z) + self.position.weight + self.times(times)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert BATCH % world == 0, f"expected a number of ranks that divides {BATCH}, got {world}"

torch.manual_seed(0)  # the same model, and the curves of all ranks, on every rank
model = Velocity().double()
spec = fs.by_type(nn.TransformerEncoderLayer)(model).bound
params = fs.shard(model, spec)
model = fs.skeleton(model)
axis = spec.bound_mesh["shard"]
places = torch.linspace(0, 2 * math.pi, LENGTH + 1, dtype=torch.float64)[:-1, None]


def velocity(params, z, r, t):
    return fs.functional_call(model, params, (z, r, t), spec=spec)


def draw():
    """This rank's curves, noise, and pairs of times r <= t, of which half are equal: there u is the velocity itself."""
    phase, times = 2 * math.pi * torch.rand(BATCH, 1, 1).double(), torch.rand(BATCH, 1, 2).double().sort(-1).values
    times[::2, :, 0] = times[::2, :, 1]
    noise = torch.randn(BATCH, LENGTH, 1).double()
    return (x.chunk(world)[rank] for x in (torch.sin(places + phase), noise, times[..., :1], times[..., 1:]))


def loss(params, curve, noise, r, t):
    z, v = (1 - t) * curve + t * noise, noise - curve  # on the straight path, and its velocity
    tangents = (v, torch.zeros_like(r), torch.ones_like(t))
    u, du_dt = jvp(lambda z, r, t: velocity(params, z, r, t), (z, r, t), tangents)
    return F.mse_loss(u, (v - (t - r) * du_dt).detach())


def distance(samples):
    """How far each curve is from the closest sine of amplitude 1, in the mean."""
    basis = torch.cat([torch.sin(places), torch.cos(places)], 1)
    along = basis.T @ samples / (LENGTH / 2)
    nearest = basis @ (along / along.norm(dim=1, keepdim=True))
    return (samples - nearest).square().mean().sqrt()


init, update = fs.optim.from_torch(torch.optim.AdamW, lr=LR)
state = init(params)
ends = torch.zeros(BATCH // world, 1, 1, dtype=torch.float64), torch.ones(BATCH // world, 1, 1, dtype=torch.float64)
with fs.transforms_attention(BLOCK):
    for step in range(STEPS + 1):
        curve, noise, r, t = draw()
        grads, value = fs.grad_and_value(loss)(params, curve, noise, r, t)
        if step % EVERY == 0:
            with torch.no_grad():
                samples = noise - velocity(params, noise, *ends)  # one step from noise to curves
            value = fs.collectives.all_reduce(value, axis)
            away = fs.collectives.all_reduce(distance(samples) ** 2, axis).sqrt()
            if rank == 0:
                print(f"step {step:3d}  loss {value:.10f}  distance {away:.10f}", flush=True)
        params, state = update(grads, state, params)
if rank == 0:
    print(f"{world} ranks")
if dist.is_initialized():
    dist.destroy_process_group()
