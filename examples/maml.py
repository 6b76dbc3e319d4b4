"""MAML on sinusoids: gradients through sharded gradient steps, for many tasks in one vmapped call.

A task is a sinusoid of its own amplitude and phase; K_STEPS gradient steps on a few points of it must fit it. The
meta-gradient is the gradient, through those steps, of the loss on other points (Finn et al. 2017, arXiv:1703.03400).
Every rank has its share of each task's points, and its shards of every task's adapted parameters.

python examples/maml.py
torchrun --nproc-per-node 2 examples/maml.py
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.func import grad, vmap

import funshard as fs

TASKS, POINTS = 16, 12  # in a step; to adapt on and as many to judge by, on all ranks together
K_STEPS, INNER_LR = 2, 0.02
STEPS, LR, EVERY = 60, 2e-2, 15

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert POINTS % world == 0, f"expected a number of ranks that divides {POINTS}, got {world}"

torch.manual_seed(0)  # the same model, and the tasks of all ranks, on every rank
model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
full = {name: p.detach() for name, p in model.named_parameters()}
spec = fs.by_type(nn.Linear)(model).bound
params = fs.shard(full, spec)


def tasks():
    """Points to adapt on and points to judge by, of every task: (x, y), (x, y), each [TASKS, POINTS, 1]."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(TASKS, 1, 1).double(), math.pi * torch.rand(TASKS, 1, 1).double()
    x = 10 * torch.rand(TASKS, 2 * POINTS, 1).double() - 5
    y = amplitude * torch.sin(x + phase)
    return tuple(zip(x.chunk(2, 1), y.chunk(2, 1), strict=True))


def sharded(params, x):
    return fs.functional_call(model, params, (x,), spec=spec)


def unsharded(full, x):
    return torch.func.functional_call(model, full, (x,))


def loss(call, params, x, y):
    return ((call(params, x) - y) ** 2).mean()


def adapted_loss(call, params, support, query):
    """The loss of one task after K_STEPS steps on it."""
    for _ in range(K_STEPS):
        grads = grad(lambda p: loss(call, p, *support))(params)
        params = {key: p - INNER_LR * grads[key] for key, p in params.items()}
    return loss(call, params, *query)


def meta_loss(params, batch, call=sharded):
    """The mean over tasks. Under vmap all tasks' parameters are gathered at once."""
    return vmap(lambda support, query: adapted_loss(call, params, support, query))(*batch).mean()


def share(batch):
    """This rank's points of every task."""
    return [[points.chunk(world, 1)[rank] for points in part] for part in batch]


# The meta-gradient is that of the unsharded model on all points.
batch = tasks()
meta_gradient = fs.grad(meta_loss)(params, share(batch))
expected = grad(meta_loss)(full, batch, unsharded)
torch.testing.assert_close(fs.unshard(meta_gradient, spec), expected, rtol=1e-9, atol=1e-9)

optimizer = torch.optim.Adam(params.values(), lr=LR)
losses = []
for step in range(1, STEPS + 1):
    grads, value = fs.grad_and_value(meta_loss)(params, share(tasks()))
    losses.append(fs.collectives.all_reduce(value, spec.bound_mesh["shard"]).item())
    if rank == 0 and step % EVERY == 0:
        print(f"step {step:4d}  loss after {K_STEPS} steps {sum(losses[-EVERY:]) / EVERY:.10f}", flush=True)
    for key, p in params.items():
        p.grad = grads[key]
    optimizer.step()
if rank == 0:
    print(f"{world} ranks: the meta-gradient equals the unsharded one")
if dist.is_initialized():
    dist.destroy_process_group()
