"""What fs.functional_call and fs.grad do, written out: one layer at a time is gathered, used and let go.

Forward: gather, call, free. Backward: gather again, vjp, free, reduce. Nothing here but arithmetic and two collectives;
the layer is run again in backward (activation checkpointing), which fs.functional_call does not need.

python examples/per_layer_by_hand.py
torchrun --nproc-per-node 2 examples/per_layer_by_hand.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)  # the same layers, and the batches of all ranks, on every rank
layers = [nn.Sequential(nn.Linear(8, 33), nn.Tanh()), nn.Sequential(nn.Linear(33, 33), nn.Tanh()), nn.Linear(33, 4)]
layers = [layer.double() for layer in layers]
xs, ys = torch.randn(world, 16, 8).double(), torch.randint(4, (world, 16))

mesh = fs.collectives.Mesh.world()
axis = mesh["shard"]
specs = [fs.policies.whole()(layer).on(mesh) for layer in layers]  # a layer is one unit, whose key is ""
shards = [fs.shard(layer, spec)[""] for layer, spec in zip(layers, specs, strict=True)]


def gather(i):
    """Layer i's parameters by name: views of one gathered buffer."""
    return fs.unflatten({"": fs.collectives.gather_slices(shards[i], axis)}, specs[i])


def reduce(i, grads):
    """This rank's slice of the mean over ranks of layer i's gradients."""
    return fs.collectives.reduce_scatter(fs.flatten(grads, specs[i])[""], axis)


def call(i, full, x):
    return torch.func.functional_call(layers[i], full, (x,))


inputs = [xs[rank]]  # of every layer, and the last one's output: all that forward keeps
for i in range(len(layers)):
    inputs.append(call(i, gather(i), inputs[-1]))  # the gathered buffer is gone when this line is done

cotangent, value = torch.func.grad_and_value(F.cross_entropy)(inputs.pop(), ys[rank])
grads = [None] * len(layers)
for i in reversed(range(len(layers))):
    _, vjp = torch.func.vjp(lambda full, x, i=i: call(i, full, x), gather(i), inputs.pop())
    full_grads, cotangent = vjp(cotangent)
    grads[i] = reduce(i, full_grads)
    del vjp, full_grads  # the full gradient, and the buffer that vjp holds

# The same by fs.functional_call and fs.grad_and_value, and on the joined batch in plain torch.
model = nn.Sequential(*layers)
spec = fs.by_path({"*": fs.P("shard")})(model).on(mesh)
params = fs.shard(model, spec)
same, same_value = fs.grad_and_value(
    lambda params: F.cross_entropy(fs.functional_call(model, params, (xs[rank],), spec=spec), ys[rank])
)(params)
torch.testing.assert_close(dict(zip("012", grads, strict=True)), same)
torch.testing.assert_close(value, same_value)

full = {name: p.detach() for name, p in model.named_parameters()}
expected = torch.func.grad(
    lambda full: F.cross_entropy(torch.func.functional_call(model, full, (xs.flatten(0, 1),)), ys.flatten())
)(full)
torch.testing.assert_close(fs.unshard(same, spec), expected)
if rank == 0:
    print(f"{world} ranks, loss {value.item():.4f} on rank 0: by hand, by functional_call and unsharded agree")
if dist.is_initialized():
    dist.destroy_process_group()
