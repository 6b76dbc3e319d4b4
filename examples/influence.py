"""The influence of training samples on the validation loss of a small Llama, beside leaving each of them out.

Without sample i of N, the validation loss changes by about g' (G + d)^-1 g_i / N, where g and g_i are the gradients of the
validation loss and of the sample's loss, G is the Gauss-Newton matrix of training, and d a damping (Koh and Liang, 2017,
arXiv:1703.04730; Grosse et al., 2023, arXiv:2308.03296). Conjugate gradients solve once for all samples, and one run in forward
mode gives the products of their gradients with the solution. The table has Spearman's rank correlation of these predictions
with what N retrainings from the same initial values say.

It depends on the damping: STEPS steps of LR hardly move where the curvature is below 1 / (LR STEPS), the damping in the second
row. The last row is nearly that of gradients without the matrix. It falls with longer training: for three seeds from 0.86 to
0.94 after 40 steps to 0.74 to 0.80 after 80. It says nothing of sizes: predicted changes are too small by a factor of two or
more. The initial values matter as well: changes that two seeds find correlate by 0.4 to 0.6 with each other.

python examples/influence.py
torchrun --nproc-per-node 2 examples/influence.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import batch, text
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import funshard as fs

WORDS, WIDTH, LAYERS, SEQ = 32, 16, 1, 8  # WORDS: the low bits of a byte, which are letters without their case
SAMPLES = 24  # sequences on all ranks together: for training, and as many for validation
LR, STEPS = 0.1, 80  # of gradient descent
SEEDS = 3  # of initial values
DAMPINGS = (0.01, 1 / (LR * STEPS), 1.0, 100.0)

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
assert SAMPLES % world == 0, f"expected a number of ranks that divides {SAMPLES}, got {world}"

torch.set_num_threads(1)  # tensors are small
own = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
generator, cpu = torch.Generator().manual_seed(1), torch.device("cpu")  # the samples of all ranks on every rank
(x, y), (x_val, y_val) = (
    batch(part[part > 32] % WORDS, (SAMPLES, SEQ), generator, cpu, own)  # without spaces, which would make samples equal
    for part in text("*.py", 1_000_000)
)


def build(seed):
    """The Llama with these initial values, the same on every rank."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, initializer_range=WIDTH**-0.5, use_cache=False, **sizes))
    nn.init.normal_(model.model.embed_tokens.weight)  # of the size that the norms expect: smaller ones learn too fast
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
    model.model.norm = nn.RMSNorm(WIDTH)  # as the others: those of transformers compute in float32
    return model.double()


model = build(0)
spec = fs.by_type(LlamaDecoderLayer)(model).bound
axis = spec.bound_mesh["shard"]


def logits(params, x):
    return fs.functional_call(model, params, (x,), spec=spec).logits.flatten(0, 1)


def losses(params, x, y):
    """The loss of each of this rank's samples."""
    return F.cross_entropy(logits(params, x), y.flatten(), reduction="none").view(y.shape).mean(1)


def training(params, weights):
    return (weights * losses(params, x, y)).mean()


def validation(params):
    return losses(params, x_val, y_val).mean()


def train(params, weights):
    for _ in range(STEPS):
        params = fs.optim.axpy(-LR, fs.grad(training)(params, weights), params)
    return params


def leave_out(start):
    """Return the trained parameters, and how the validation loss changes without each sample: [SAMPLES]."""
    every = torch.ones(1, SAMPLES, dtype=torch.float64)
    weights = torch.cat([every, every - torch.eye(SAMPLES)])[:, own]  # [1 + SAMPLES models, this rank's samples]
    together = torch.vmap(train, in_dims=(None, 0))(start, weights)
    values = fs.collectives.all_reduce(torch.vmap(validation)(together), axis)
    return {key: p[0] for key, p in together.items()}, values[1:] - values[0]


def predict(params, damping):
    """Return the predicted change of the validation loss without each sample, [SAMPLES], and the number of products."""
    ggn = fs.curvature.ggn(lambda p: logits(p, x), fs.curvature.cross_entropy(y.flatten()), params, spec)
    solution = fs.curvature.cg(ggn, fs.grad(validation)(params), damping=damping, tolerance=1e-8)
    assert solution.converged
    _, products = torch.func.jvp(lambda p: losses(p, x, y), (params,), (solution.x,))
    return fs.collectives.gather_values(products, axis) / SAMPLES, solution.products


def correlate(a, b):
    """Return Spearman's rank correlation."""
    return float(torch.corrcoef(torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double())[0, 1])


changes, predictions = [], {damping: [] for damping in DAMPINGS}
with fs.transforms_attention():  # which has forward mode, and vmap
    for seed in range(SEEDS):
        params, change = leave_out(fs.shard(build(seed), spec))
        changes.append(change)
        for damping, predicted in predictions.items():
            predicted.append(predict(params, damping))
        most = int(change.abs().argmax())
        predicted = float(predictions[DAMPINGS[1]][-1][0][most])
        if rank == 0:
            print(f"seed {seed}: the largest change is {float(change[most]):.8f}, predicted {predicted:.8f}", flush=True)

if rank == 0:
    print(f"{world} ranks: rank correlation with leaving out each of {SAMPLES} samples")
    print(f"{'damping':>8}  {'products':>8}  {'  '.join(f'seed {seed}' for seed in range(SEEDS))}")
    for damping, predicted in predictions.items():
        found = "  ".join(f"{correlate(p, change):6.3f}" for (p, _), change in zip(predicted, changes, strict=True))
        print(f"{damping:8.2f}  {predicted[0][1]:8d}  {found}")
    for seed, change in enumerate(changes[1:], 1):
        print(f"changes of seed {seed} with those of seed 0: {correlate(change, changes[0]):.3f}")
if dist.is_initialized():
    dist.destroy_process_group()
