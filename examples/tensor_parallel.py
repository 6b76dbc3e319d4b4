"""Train a byte-level Llama whose attention heads and MLPs are split over "tensor", and all parameters over "shard".

One rank:       python examples/tensor_parallel.py
Four ranks:     torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2   (2 x 2: FSDP of pieces)
Sequence too:   torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2 --sequence
Eight, HSDP:    torchrun --nproc-per-node 8 examples/tensor_parallel.py --tensor 2 --replicas 2

Maps into heads and into the MLP are split by columns, maps out of them by rows; embeddings, head and norms are replicated over
"tensor". The sum over ranks of what the row-parallel maps return is the only communication over that axis. With --sequence
ranks hold slices of the sequence between these pairs: they gather them before a pair, and reduce-scatter after it. The loss is
each rank's own, and the gradient that of its mean over all ranks: no collective needs another factor.

Ranks along "tensor" read the same sequences. Without --sequence they hold the same activations outside of the pairs, so they
must draw dropout alike: the seed is the same for all ranks of one group. With --sequence each drops within its own slice.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import LossReport, add_run_options, batch, mesh_of, ranks, text
from torch import Tensor, nn

import funshard as fs
from funshard.collectives import Axis, all_reduce, gather_values, reduce_scatter, scatter

COLUMNS = ("q", "k", "v", "gate", "up")  # features that a map returns are split: dimension 0 of its weight
ROWS = ("out", "down")  # features that it takes are split: dimension 1
LOCAL = {f"*.{name}.weight": 0 for name in COLUMNS} | {f"*.{name}.weight": 1 for name in ROWS}


def policy(reshard: bool = True) -> fs.policies.Policy:
    """Return the policy for a `Llama` of pieces: a unit for each block, the rest of the model as another."""
    p = fs.P("shard", reshard=reshard)
    return fs.policies.by_path({"blocks.*": fs.P("shard", reshard=reshard, local={"tensor": LOCAL})}, p)


@dataclass(frozen=True)
class Split:
    """The axis that a model is split over, and whether activations between its pairs of maps are split along the sequence."""

    axis: Axis
    sequence: bool = False

    def slice(self, x: Tensor) -> Tensor:
        """Return this rank's part of tokens [batch, seq] that all ranks have."""
        return scatter(x.mT, self.axis).mT if self.sequence else x

    def enter(self, x: Tensor) -> Tensor:
        """Return what column-parallel maps take: activations [batch, seq, dim] of the whole sequence."""
        return gather_values(x, self.axis, dim=1) if self.sequence else x

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of what row-parallel maps return, or this rank's slice of it."""
        if self.sequence:
            return reduce_scatter(x, self.axis, reduce="sum", dim=1)
        return all_reduce(x, self.axis, reduce="sum")


ALONE = Split(fs.collectives.ProcessAxis(1))


def rotate(x: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + dim/2]) of [batch, heads, seq, dim] by an angle that grows with its position."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Block(nn.Module):
    """One of ``parts`` equal parts of a block: some of its query and key heads, and of its MLP's hidden features."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float, parts: int) -> None:
        super().__init__()
        for name, size in {"heads": heads, "kv_heads": kv_heads, "hidden": hidden}.items():
            if size % parts:
                raise ValueError(f"{name}: expected a multiple of {parts} ranks, got {size}")
        self.head_dim, self.dropout = dim // heads, nn.Dropout(dropout)
        inner, kv = dim // parts, kv_heads * self.head_dim // parts
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.out = nn.Linear(dim, inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.k, self.v = nn.Linear(dim, kv, bias=False), nn.Linear(dim, kv, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden // parts, bias=False), nn.Linear(dim, hidden // parts, bias=False)
        self.down = nn.Linear(hidden // parts, dim, bias=False)

    def forward(self, x: Tensor, split: Split) -> Tensor:
        h = split.enter(self.norm1(x))
        q, k, v = (part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.dropout(split.leave(self.out(h.transpose(1, 2).flatten(2))))
        h = split.enter(self.norm2(x))
        return x + self.dropout(split.leave(self.down(F.silu(self.gate(h)) * self.up(h))))


class Llama(nn.Module):
    """One of ``parts`` equal parts of a Llama; ``parts=1``: the whole."""

    def __init__(
        self, layers: int, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float = 0.0, parts: int = 1
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden, dropout, parts) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor, split: Split = ALONE) -> Tensor:
        """Return the loss of predicting y from x, [batch, seq] both, over this rank's part of the sequence."""
        h = self.token(split.slice(x))
        for block in self.blocks:
            h = block(h, split)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), split.slice(y).flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that each matrix is split over")
    parser.add_argument("--replicas", type=int, default=1, help="HSDP: ranks that have the same slices")
    parser.add_argument("--sequence", action="store_true", help="split activations between the maps along the sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=352)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences of each step, over all ranks")
    parser.add_argument("--max-norm", type=float, default=1.0)
    add_run_options(parser, steps=60)
    args = parser.parse_args()

    rank, world, device = ranks()
    readers, left = divmod(world, args.tensor)  # groups of ranks that read the same sequences
    if left or readers % args.replicas or args.batch % readers:
        parser.error(f"--tensor, --replicas, --batch: they do not divide {world} ranks, and {args.batch} sequences, evenly")
    axes = {"replicate": args.replicas, "shard": readers // args.replicas, "tensor": args.tensor}  # "tensor" varies fastest

    torch.manual_seed(args.seed)
    sizes = (args.layers, args.dim, args.heads, args.kv_heads, args.hidden, args.dropout)
    whole = Llama(*sizes)  # the same values on every rank
    with torch.device("meta"):
        model = Llama(*sizes, parts=args.tensor)  # the structure of a rank's pieces
    spec = policy()(model).on(mesh_of(axes, device))
    params = {key: shard.to(device) for key, shard in fs.shard(whole, spec).items()}
    del whole
    split = Split(spec.axis("tensor"), args.sequence)
    reader = rank // args.tensor

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        return fs.functional_call(model, params, (x, y, split), spec=spec)

    train, _ = text("*.py", args.max_bytes)
    generator = torch.Generator().manual_seed(args.seed + 1)
    each = args.batch // readers
    torch.manual_seed(args.seed + 2 + (rank if args.sequence else reader))  # dropout: alike where activations are

    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=args.lr, fused=True, donate=True)
    state, progress = init(params), LossReport(args, spec, rank)
    for step in range(args.steps):
        x, y = batch(train, (args.batch, args.seq), generator, device, slice(reader * each, (reader + 1) * each))
        grads, value = fs.grad_and_value(loss)(params, x, y)
        grads, norm = fs.optim.clip_by_global_norm(grads, spec, args.max_norm)
        params, state = update(grads, state, params)
        progress.report(step, value, norm)
    if rank == 0:
        print(f"{world} ranks: {axes}, {sum(p.numel() for p in params.values()):,} parameters on each")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
