"""Adapt a byte-level GPT to another text with low-rank adapters (LoRA), its own parameters frozen; or QLoRA, these in NF4.

One rank:     python examples/lora.py
Two ranks:    torchrun --nproc-per-node 2 examples/lora.py --quantize
Of its own:   torchrun --nproc-per-node 2 examples/train_gpt.py --save gpt.pt
              torchrun --nproc-per-node 2 examples/lora.py --load gpt.pt

The GPT has read the standard library's modules, and is adapted to the prose of its help texts. Without --load it is
trained here first, shortly. At the end the adapters are merged into the weights, and the plain GPT that this gives is
compared with the adapted one. Hu et al., LoRA, 2021; Dettmers et al., QLoRA, 2023.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, batch, ranks, text
from torch import Tensor, nn

import funshard as fs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--load", help="parameters that train_gpt.py saved, of the same --layers, --dim and --seq")
parser.add_argument("--quantize", action="store_true", help="keep and send the frozen matrices of the blocks in NF4")
parser.add_argument("--rank", type=int, default=8, help="of the adapters")
parser.add_argument("--alpha", type=float, default=16.0, help="adapters count with alpha / rank")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=192)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--pretrain", type=int, default=100, help="steps, without --load")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log-every", type=int, default=20)
args = parser.parse_args()

rank, world, device = ranks()
generator = torch.Generator().manual_seed(args.seed + 1 + rank)


class LoRA(nn.Module):
    """``base(x) + scale * b(a(x))``; ``b`` begins with zeros."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.b(self.a(x))


def over_ranks(value: Tensor) -> float:
    """The mean over ranks."""
    if world > 1:
        dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()


def trained(model: nn.Module, spec: fs.PartitionSpec, params: fs.Params, source: Tensor, steps: int, name: str) -> fs.Params:
    """All params, after so many steps of those that are not frozen."""
    trainable, frozen = fs.partition(params, spec)

    def loss(trainable: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        logits = fs.functional_call(model, fs.combine(trainable, frozen), (x,), spec=spec)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=args.lr, weight_decay=0.0, fused=True, donate=True)
    state = init(trainable)
    if rank == 0:
        held = [sum(p.nbytes for p in some.values()) for some in (trainable, frozen)]
        moments = sum(t.nbytes for values in state.values() for t in values.values())
        print(f"{name}: bytes per rank: {held[0]:,} trained, {moments:,} of optimizer state, {held[1]:,} frozen", flush=True)
    for step in range(steps):
        x, y = batch(source, (args.batch, args.seq), generator, device)
        grads, value = fs.grad_and_value(loss)(trainable, x, y)
        trainable, state = update(grads, state, trainable)
        if step % args.log_every == 0 or step == steps - 1:
            mean = over_ranks(value)
            if rank == 0:
                print(f"{name}: step {step:4d}  loss {mean:.4f}", flush=True)
    return fs.combine(trainable, frozen)


# --- a GPT that has read the modules of the standard library ---

torch.manual_seed(args.seed)  # one seed on every rank
model = GPT(args.layers, args.dim, args.heads, args.seq)
if args.load:
    model.load_state_dict(torch.load(args.load, weights_only=True))
else:
    spec = fs.by_type(Block)(model)
    params = {key: shard.to(device) for key, shard in fs.shard(model, spec).items()}
    params = trained(model, spec, params, text("*.py", 8_000_000)[0], args.pretrain, "pretraining")
    model.load_state_dict(fs.unshard(params, spec, offload_to_cpu=True))

# --- frozen, with adapters beside every matrix of its blocks ---

model.requires_grad_(False)
for block in model.blocks:
    for name, layer in list(block.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(block, name, LoRA(layer, args.rank, args.alpha / args.rank))

blocks = fs.P("shard", at_rest=fs.codecs.nf4() if args.quantize else None)
small = {f"blocks.*.{name}": fs.P() for name in ("*.a", "*.b", "norm1", "norm2")}  # whole on every rank, and as they are
spec = fs.policies.override(fs.by_type(Block, p=blocks), fs.by_path({"": fs.P("shard"), **small}))(model)
if rank == 0:
    print(spec)
params = {key: shard.to(device) for key, shard in fs.shard(model, spec).items()}
prose, unseen = text("pydoc_data/topics.py", 8_000_000)


@torch.no_grad()
def validation(params: fs.Params) -> float:
    """The loss on eight batches of text that nobody has trained on, always the same."""
    drawn, losses = torch.Generator().manual_seed(rank), []
    for _ in range(8):
        x, y = batch(unseen, (args.batch, args.seq), drawn, device)
        logits = fs.functional_call(model, params, (x,), spec=spec)
        losses.append(F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    return over_ranks(torch.stack(losses).mean())


before = validation(params)
params = trained(model, spec, params, prose, args.steps, "adapting")
after = validation(params)
if rank == 0:
    print(f"validation loss on the other text: {before:.4f} before, {after:.4f} after")

# --- merged: what is quantized is gathered as what it was computed with ---

full = fs.unshard(params, spec)
merged: fs.Params = {}
for name, p in full.items():
    path, _, kind = name.partition(".base.")
    if kind:
        change = full[f"{path}.b.weight"] @ full[f"{path}.a.weight"]
        merged[f"{path}.{kind}"] = p + args.alpha / args.rank * change
    elif not name.endswith((".a.weight", ".b.weight")):
        merged[name] = p
plain = GPT(args.layers, args.dim, args.heads, args.seq).to(device)
plain.load_state_dict(merged)
x, _ = batch(unseen, (args.batch, args.seq), torch.Generator().manual_seed(0), device)
with torch.no_grad():
    adapted, alone = fs.functional_call(model, params, (x,), spec=spec), plain(x)
torch.testing.assert_close(alone, adapted, rtol=1e-3, atol=1e-3)
if rank == 0:
    print(f"the merged GPT is the adapted one: logits differ by at most {(alone - adapted).abs().max():.1e}")
if dist.is_initialized():
    dist.destroy_process_group()
