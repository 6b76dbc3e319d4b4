"""The shortest complete example: an MLP trained on shards, checked against the same training unsharded.

python examples/mlp.py
torchrun --nproc-per-node 2 examples/mlp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)  # the same model, and the batches of all ranks, on every rank
model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 4)).double()
xs, ys = torch.randn(world, 16, 8).double(), torch.randint(4, (world, 16))

spec = fs.by_type(nn.Linear)(model)  # a unit per layer, over all ranks
params = fs.shard(model, spec)


def loss(params, x, y):
    return F.cross_entropy(fs.functional_call(model, params, (x,), spec=spec), y)


for _ in range(10):
    grads, value = fs.grad_and_value(loss)(params, xs[rank], ys[rank])
    params = {key: p - 0.5 * grads[key] for key, p in params.items()}

# The same on the joined batch, in plain torch. A mean over ranks of means over equal batches is the joined mean.
full = {name: p.detach() for name, p in model.named_parameters()}
for _ in range(10):
    grads = torch.func.grad(
        lambda full: F.cross_entropy(torch.func.functional_call(model, full, (xs.flatten(0, 1),)), ys.flatten())
    )(full)
    full = {name: p - 0.5 * grads[name] for name, p in full.items()}

torch.testing.assert_close(fs.unshard(params, spec), full)
if rank == 0:
    print(spec)
    print(f"{world} ranks, 10 steps, loss {value.item():.4f} on rank 0: equal to the unsharded run")
if dist.is_initialized():
    dist.destroy_process_group()
