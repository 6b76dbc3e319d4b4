"""Tune a strength of regularisation for every unit by gradient descent, through the minimum of training.

A linear model predicts which kind of byte comes next in the Python standard library's source from the bytes before: a
table for each distance, which is a unit and has its own L2 strength. The gradient of the validation loss at the minimum
with respect to the strengths comes from the implicit function theorem: one linear system in the Hessian of the training
loss, solved on shards by `fs.curvature.cg` (Rajeswaran et al. 2019, arXiv:1909.04630). The minimum is found
by Newton's method with the same solver. The gradient is checked against differences between trainings.

python examples/implicit.py
torchrun --nproc-per-node 2 examples/implicit.py
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

CONTEXT, KINDS = 2, 4  # bytes before; space, letter or digit, newline, the rest
SAMPLES = 600  # to train on, and as many to validate, on all ranks together
STRENGTH, LR, STEPS = 5e-2, 20.0, 2  # at the start; of the descent on logarithms of strengths
TOLERANCE, DISTANCE = 1e-9, 1e-3  # of the gradient and of linear systems; of logarithms, for differences


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(KINDS))
        self.tables = nn.ModuleList(nn.Embedding(256, KINDS) for _ in range(CONTEXT))

    def forward(self, x):
        return self.bias + sum(table(byte) for table, byte in zip(self.tables, x.unbind(-1), strict=True))


if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert SAMPLES % world == 0, f"expected a number of ranks that divides {SAMPLES}, got {world}"

torch.manual_seed(0)  # the samples of all ranks on every rank
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
kind = torch.tensor([[b == 32, chr(b).isalnum(), b == 10, True] for b in range(256)]).int().argmax(1)
starts = torch.randint(len(text) - CONTEXT, (2, SAMPLES, 1)).chunk(world, 1)[rank]
samples = text[starts + torch.arange(CONTEXT + 1)].int()
(x, x_val), (y, y_val) = samples[..., :-1], kind[samples[..., -1]]

# Each table is split over the ranks; the bias is so small that every rank has it whole.
model = Tables().double()
spec = fs.policies.override(fs.by_type(nn.Embedding), fs.by_path({"": fs.P()}))(model).bound
axis = spec.bound_mesh["shard"]
params = {key: torch.zeros_like(shard) for key, shard in fs.shard(model, spec).items()}
strengths = {key: torch.tensor(STRENGTH, dtype=torch.float64).log() for key in params}  # their logarithms


def validation(params):
    return F.cross_entropy(fs.functional_call(model, params, (x_val,), spec=spec), y_val)


def training(params, strengths):
    """The penalty is of shards alone: it counts with its sum over ranks."""
    fit = F.cross_entropy(fs.functional_call(model, params, (x,), spec=spec), y)
    return fit + sum(strengths[key].exp() / 2 * (p**2).sum() for key, p in params.items())


def solve(params, strengths, b, tolerance=TOLERANCE):
    """The inverse of the training loss's Hessian times b, by conjugate gradients, to a relative tolerance."""
    hessian = fs.curvature.hessian(lambda w: training(w, strengths), params, spec)
    solution = fs.curvature.cg(hessian, b, tolerance=tolerance)
    assert solution.converged
    return solution.x


def minimum(params, strengths):
    """Where training ends, by Newton's method from a starting point."""
    grads = fs.grad(training)(params, strengths)
    while fs.optim.global_norm(grads, spec) > TOLERANCE:
        params = fs.optim.axpy(-1, solve(params, strengths, grads, 1e-3), params)
        grads = fs.grad(training)(params, strengths)
    return params


def validation_loss(params):
    return fs.collectives.all_reduce(validation(params), axis)


def hypergradient(params, strengths):
    """The gradient of the validation loss at the minimum: -grad(validation) . inverse Hessian . mixed derivative."""
    q = solve(params, strengths, fs.grad(validation)(params))
    _, mixed = torch.func.vjp(lambda s: fs.grad(training)(params, s), strengths)
    parts = mixed(q)[0]  # of what this rank has
    return {unit.key: -(fs.collectives.sum_shards(parts[unit.key], axis) if unit.p.axes else parts[unit.key]) for unit in spec}


params = minimum(params, strengths)

# All strengths up and down together: the sum of the hypergradient is the difference between two more trainings.
ends = [minimum(params, {key: s + by for key, s in strengths.items()}) for by in (DISTANCE, -DISTANCE)]
by_difference = (validation_loss(ends[0]) - validation_loss(ends[1])) / (2 * DISTANCE)
total = sum(hypergradient(params, strengths).values())
torch.testing.assert_close(total, by_difference, rtol=1e-5, atol=0)
if rank == 0:
    print(f"{world} ranks: hypergradient {total:.10f}, by differences {by_difference:.10f}", flush=True)

for step in range(STEPS + 1):
    value = validation_loss(params)
    if rank == 0:
        shown = "  ".join(f"{s.exp():.5f}" for s in strengths.values())
        print(f"step {step}  validation loss {value:.10f}  strengths {shown}", flush=True)
    if step < STEPS:
        strengths = fs.optim.axpy(-LR, hypergradient(params, strengths), strengths)
        params = minimum(params, strengths)
if dist.is_initialized():
    dist.destroy_process_group()
