"""The spectrum of a small GPT's Hessian on shards, by exact products; beside products by differences of gradients.

`fs.curvature.slq` estimates the density of all eigenvalues, `fs.curvature.lanczos` finds the largest. Where collectives have
no second derivative, (g(w + h v) - g(w - h v)) / 2h of gradients g takes the place of a product. The table has its error
and that of `fs.hvp`, relative to `fs.hvp` in float64, for a random v of the length of w; and the processor's time relative to
that of a gradient. The batch is split over the ranks, so that any number of ranks prints the same spectrum.

python examples/spectrum.py
torchrun --nproc-per-node 2 examples/spectrum.py
"""

import functools
import math
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, batch, text

import funshard as fs

LAYERS, DIM, HEADS, SEQ = 2, 32, 4, 32
BATCH = 16  # sequences on all ranks together
LR, STEPS = 0.5, 40  # of gradient descent before the spectrum is taken
LANCZOS, PROBES = 30, 3  # steps; random vectors of the density
TOP, POINTS = 5, 24  # largest eigenvalues to print; points of the density
DISTANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # h
REPEATS = 7  # of each product, for the median time

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert BATCH % world == 0, f"expected a number of ranks that divides {BATCH}, got {world}"

torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)  # the same model, and the batch of all ranks, on every rank
own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
x, y = batch(text("*.py", 1_000_000)[0], (BATCH, SEQ), torch.Generator().manual_seed(1), torch.device("cpu"), own)


def build(dtype, precision=None):
    """The model's spec, its shards and its loss of this rank's batch, in a dtype; computed in another by `precision`."""
    model = GPT(LAYERS, DIM, HEADS, SEQ).to(dtype)
    spec = fs.by_type(Block, p=fs.P("shard", precision=precision))(model).bound
    params = fs.shard(model, spec)
    model = fs.skeleton(model)

    def loss(params):
        logits = fs.functional_call(model, params, (x,), spec=spec).to(dtype)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return spec, params, loss


def show(line):
    if rank == 0:
        print(line, flush=True)


spec, params, loss = build(torch.float64)
axis = spec.bound_mesh["shard"]
for _ in range(STEPS):
    params = fs.optim.axpy(-LR, fs.grad(loss)(params), params)
low = {key: p.float() for key, p in params.items()}
params = {key: p.double() for key, p in low.items()}  # all dtypes have the same weights

# --- the spectrum, in float64 ---

hessian = fs.curvature.hessian(loss, params, spec)
v = fs.random_like(low, spec, seed=0)
size = fs.optim.global_norm(low, spec) / fs.optim.global_norm(v, spec)
v = {key: size * x for key, x in v.items()}
exact_v = {key: t.double() for key, t in v.items()}
with fs.transforms_attention():  # which has second derivatives
    largest = fs.curvature.lanczos(hessian, exact_v, LANCZOS).values.flip(0)[:TOP]
    spectrum = fs.curvature.slq(hessian, steps=LANCZOS, probes=PROBES)
    exact = hessian @ exact_v
show(f"{world} ranks: loss {fs.collectives.all_reduce(loss(params), axis):.10f}, {hessian.numel} eigenvalues")
show(f"the largest: {'  '.join(f'{value:.8f}' for value in largest)}")
points = torch.linspace(*spectrum.values.aminmax(), POINTS, dtype=torch.float64)
width = float(points[1] - points[0]) / 2
for point, density in zip(points, spectrum.density(points, width), strict=True):
    count = density * width * (2 * math.pi) ** 0.5 * hessian.numel  # of eigenvalues at this point that give this density
    show(f"density at {point:6.2f}: {density:7.1e}  {'#' * int(4 * (1 + count).log2())}")

# --- products in float32 and bfloat16, exact and by differences ---


def differences(loss, h):
    def product():
        up, down = (fs.grad(loss)(fs.optim.axpy(by, v, low)) for by in (h, -h))
        return {key: (up[key] - down[key]) / (2 * h) for key in up}

    return product


def products(loss):
    """By name, functions of nothing that return the product of the Hessian and v."""

    def product():
        with fs.transforms_attention():
            return fs.hvp(loss, low, v)

    return {"fs.hvp": product} | {f"differences, h = {h:.0e}": differences(loss, h) for h in DISTANCES}


def error(product):
    """Its distance from the exact product, relative to that one's length."""
    difference = {key: t.double() - exact[key] for key, t in product.items()}
    return fs.optim.global_norm(difference, spec) / fs.optim.global_norm(exact, spec)


def seconds(function):
    """Of this rank's processor: on a machine that runs other work, the ratio of two of them still holds."""
    start = time.process_time()
    function()
    return time.process_time() - start


_, _, loss = build(torch.float32)
rows, gradient = products(loss), functools.partial(fs.grad(loss), low)
errors = {name: [error(function())] for name, function in rows.items()}
times = {name: [] for name in rows}
for _ in range(REPEATS):
    for name, function in rows.items():  # in turn, each beside a gradient
        times[name].append(seconds(function) / seconds(gradient))
_, _, loss = build(torch.float32, fs.Precision(param=torch.bfloat16, reduce=torch.float32))
for name, function in products(loss).items():
    errors[name].append(error(function()))

show(f"\n{'product':26}  error in float32  in bfloat16  time / gradient")
for name, (single, half) in errors.items():
    show(f"{name:26}  {single:16.1e}  {half:11.1e}  {statistics.median(times[name]):15.1f}")
if dist.is_initialized():
    dist.destroy_process_group()
