"""Learn a learning rate for each layer by descent on the validation loss at the end of training.

`fs.scan` differentiates through 32 steps of AdamW with a schedule; every rank gets the whole gradient by the logarithms of
the rates. One of them is checked by forward mode, which needs the memory of one step, at any number of steps.

python examples/learn_rates.py
torchrun --nproc-per-node 2 examples/learn_rates.py
"""

import torch
import torch.distributed as dist
from torch import nn

import funshard as fs

SAMPLES, FEATURES, HIDDEN = 64, 8, 32  # samples of a step, on all ranks together
STEPS, RATE = 32, 3e-4  # of training; at the start, for all layers
UPDATES, META_LR = 8, 0.5  # of the rates; of their logarithms, by Adam

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert SAMPLES % world == 0, f"expected a number of ranks that divides {SAMPLES}, got {world}"

torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)  # the same model, and the samples of all ranks, on every rank
model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
model = model.double()
spec = fs.by_type(nn.Linear)(model).bound
params = fs.shard(model, spec)
x = torch.randn(STEPS + 1, SAMPLES, FEATURES).double()
y = torch.sin(x @ torch.randn(FEATURES, 1).double() / FEATURES**0.5)
(x, x_val), (y, y_val) = ((t[:-1], t[-1]) for t in (t.chunk(world, 1)[rank] for t in (x, y)))
factors = torch.linspace(1, 0.1, STEPS).double()  # a schedule
init, update = fs.optim.adamw(1e-3, eps_root=1e-12, weight_decay=1e-2, spec=spec)


def loss(params, x, y):
    return (fs.functional_call(model, params, (x,), spec=spec) - y).square().mean()


def validation(logs):
    """The validation loss of this rank after training with these rates."""

    def step(state, given):
        params, moments = state
        x, y, factor = given
        grads, value = fs.grad_and_value(loss)(params, x, y)
        new, new_moments = {}, {}
        for key in params:  # a unit at a time, each with its rate
            one = ({key: tree[key]} for tree in (grads, moments, params))
            stepped, state = update(*one, lr=logs[key].exp() * factor)
            new, new_moments = new | stepped, new_moments | state
        return (new, new_moments), value

    (trained, _), _ = fs.scan(step, (params, init(params)), (x, y, factors))
    return loss(trained, x_val, y_val)


def mean(value):
    """The mean over all ranks."""
    return fs.collectives.sum_over(value, spec.bound_mesh) / world


logs = {key: torch.tensor(RATE).double().log() for key in params}
gradient = fs.grad(validation)(logs)  # of the mean over ranks, on every rank
along = {key: torch.full_like(log, float(key == "0")) for key, log in logs.items()}
torch.testing.assert_close(mean(torch.func.jvp(validation, (logs,), (along,))[1]), gradient["0"])
if rank == 0:
    print(f"{world} ranks: forward mode gives the same derivative, {gradient['0']:.10f}", flush=True)

optimizer = torch.optim.Adam(logs.values(), lr=META_LR)
for number in range(UPDATES + 1):
    gradient, value = fs.grad_and_value(validation)(logs)
    value = mean(value)
    if rank == 0:
        shown = "  ".join(f"{log.exp():.5f}" for log in logs.values())
        print(f"update {number}  validation loss {value:.10f}  rates {shown}", flush=True)
    for key, log in logs.items():
        log.grad = gradient[key]
    optimizer.step()
if dist.is_initialized():
    dist.destroy_process_group()
