"""Find mislabelled samples by the gradient of a validation loss with respect to the weight of every training sample.

A classifier is trained by 64 steps of AdamW on samples of which a tenth have a wrong label. `fs.scan` differentiates the
validation loss through all steps. A sample whose weight should fall is suspected; then the suspects are left out.

python examples/data_weights.py
torchrun --nproc-per-node 2 examples/data_weights.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funshard as fs

GROUPS, SAMPLES, FEATURES, CLASSES = 4, 96, 12, 3  # ranks have whole groups, of so many samples
WRONG = 0.1  # of the labels
STEPS, BATCH, LR = 64, 24, 1e-2  # samples of each group in a step

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert GROUPS % world == 0, f"expected a number of ranks that divides {GROUPS}, got {world}"

torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)  # the same model, and the samples of all ranks, on every rank
model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)).double()
full = {name: p.detach() for name, p in model.named_parameters()}
teacher = torch.randn(FEATURES, CLASSES).double()
x, x_val = torch.randn(2, GROUPS, SAMPLES, FEATURES).double()
y, y_val = (x @ teacher).argmax(-1), (x_val @ teacher).argmax(-1)
is_wrong = torch.rand(GROUPS, SAMPLES) < WRONG
y = torch.where(is_wrong, (y + torch.randint(1, CLASSES, y.shape)) % CLASSES, y)
epochs = [torch.rand(GROUPS, SAMPLES).argsort(1) for _ in range(STEPS * BATCH // SAMPLES)]
order = torch.cat(epochs, 1).unflatten(1, (STEPS, BATCH)).transpose(0, 1)  # [STEPS, GROUPS, BATCH]
x, y, x_val, y_val = (t.chunk(world)[rank] for t in (x, y, x_val, y_val))
order = order.chunk(world, 1)[rank]


def training(dtype):
    """Return the validation loss after training as a function of the weights of this rank's samples, in a dtype."""
    model.to(dtype)
    spec = fs.by_type(nn.Linear)(model).bound
    params = fs.shard({name: p.to(dtype) for name, p in full.items()}, spec)
    init, update = fs.optim.adamw(LR, eps_root=1e-12, weight_decay=1e-2, spec=spec)
    groups = torch.arange(len(x))[:, None]

    def losses(params, x, y):
        logits = fs.functional_call(model, params, (x.to(dtype),), spec=spec)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)

    def step(state, given):
        params, moments = state
        chosen, weights = given
        batch = x[groups, chosen], y[groups, chosen]
        grads = fs.grad(lambda params: (weights * losses(params, *batch)).mean())(params)
        return update(grads, moments, params), None

    def validation(weights):
        given = order, torch.stack([weights[groups, chosen] for chosen in order])
        (trained, _), _ = fs.scan(step, (params, init(params)), given)
        return losses(trained, x_val, y_val).mean()

    return validation, spec.bound_mesh


def mean(value, mesh):
    """The mean over all ranks."""
    return float(fs.collectives.sum_over(value, mesh)) / world


def metagradient(dtype):
    """The gradient of the mean over ranks by the weights of all samples: [GROUPS, SAMPLES]; and that mean."""
    validation, mesh = training(dtype)
    own, value = fs.grad_and_value(validation)(torch.ones(y.shape, dtype=dtype))
    own = own / world  # a rank's own inputs get the gradient of its own loss
    return fs.collectives.gather_values(own, mesh["shard"]), mean(value, mesh)


gradient, before = metagradient(torch.float64)
low, _ = metagradient(torch.float32)
error = float((low - gradient).norm() / gradient.norm())

suspects = torch.zeros(GROUPS * SAMPLES, dtype=torch.bool)
suspects[gradient.flatten().topk(int(is_wrong.sum())).indices] = True  # their weight should fall most
suspects = suspects.view(GROUPS, SAMPLES)
validation, mesh = training(torch.float64)
with torch.no_grad():
    # The metagradient predicts a small change of the weights: down for the suspects, up for the others.
    change = torch.where(suspects, -1e-3, 1e-4).double()
    predicted = float((gradient * change).sum())
    measured = mean(validation(1 + change.chunk(world)[rank]), mesh) - before
    after = mean(validation((~suspects).double().chunk(world)[rank]), mesh)
if rank == 0:
    print(
        f"{world} ranks: {int((suspects & is_wrong).sum())} of {int(is_wrong.sum())} mislabelled samples are among the suspects"
    )
    print(f"a small change of the weights: predicted {predicted:.10f}, measured {measured:.10f}")
    print(f"validation loss {before:.10f}, without the suspects {after:.10f}")
    print(f"the gradient in float32 differs by {error:.1e} of its length")
if dist.is_initialized():
    dist.destroy_process_group()
