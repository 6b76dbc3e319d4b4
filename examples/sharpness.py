"""The sharpness of a small GPT, the top eigenvalue of its loss's Hessian, by Lanczos on shards while it is trained.

Gradient descent raises it towards 2 / LR, beyond which it oscillates (Cohen et al. 2021, arXiv:2103.00065). Neither the
Hessian nor a full vector is ever in memory: a Hessian-vector product is `fs.hvp` of shards, an inner product one sum
over ranks (`fs.curvature.lanczos`). In float64, on one batch that is split over the ranks, so that any number of ranks
prints the same.

python examples/sharpness.py
torchrun --nproc-per-node 2 examples/sharpness.py
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

LAYERS, DIM, HEADS, SEQ = 2, 16, 2, 16
BATCH = 12  # sequences on all ranks together
LR, STEPS, EVERY = 0.2, 40, 20
TOLERANCE, LONGEST = 1e-4, 100  # of the eigenpair, relative; Lanczos vectors


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, DIM), nn.Embedding(SEQ, DIM)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, **options) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, x):
        h = self.token(x) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ, dtype=h.dtype)
        for block in self.blocks:
            h = block(h, mask, is_causal=True)
        return self.head(self.norm(h))


if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert BATCH % world == 0, f"expected a number of ranks that divides {BATCH}, got {world}"

torch.manual_seed(0)  # the same model, and the batch of all ranks, on every rank
model = GPT().double()
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
starts = torch.randint(len(text) - SEQ, (BATCH, 1)).chunk(world)[rank]
chunk = text[starts + torch.arange(SEQ + 1)].long()
x, y = chunk[:, :-1], chunk[:, 1:]

# A unit per block, split over the ranks; the final norm is so small that every rank has it whole.
spec = fs.policies.override(fs.by_type(nn.TransformerEncoderLayer), fs.by_path({"norm": fs.P()}))(model).bound
params = fs.shard(model, spec)
axis = spec.bound_mesh["shard"]


def loss(params):
    logits = fs.functional_call(model, params, (x,), spec=spec)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def sharpness(params):
    """The top eigenvalue and how many steps of Lanczos it took."""
    hessian = fs.curvature.hessian(loss, params, spec)
    start = fs.grad(loss)(params)  # sharded already, and the same on any number of ranks
    krylov = fs.curvature.lanczos(hessian, start, LONGEST, tolerance=TOLERANCE)
    return krylov.values[-1].item(), len(krylov.values)


with fs.transforms_attention():  # which has second derivatives
    for step in range(STEPS + 1):
        grads, value = fs.grad_and_value(loss)(params)
        if step % EVERY == 0:
            value = fs.collectives.all_reduce(value, axis)
            top, count = sharpness(params)
            if rank == 0:
                print(f"step {step:3d}  loss {value:.10f}  sharpness {top:.10f}  after {count} Lanczos steps", flush=True)
        params = fs.optim.axpy(-LR, grads, params)
if rank == 0:
    print(f"{world} ranks, 2 / LR = {2 / LR:g}")
if dist.is_initialized():
    dist.destroy_process_group()
