"""Train a byte-level GPT on sequences that ranks along "context" share, and all parameters over all ranks.

One rank:       python examples/context_parallel.py
Four ranks:     torchrun --nproc-per-node 4 examples/context_parallel.py --context 2   (2 sequences at a time, each on 2 ranks)
Ulysses:        torchrun --nproc-per-node 4 examples/context_parallel.py --context 4 --attention ulysses

Attention alone needs the other ranks' slices of a sequence. Ulysses exchanges a slice with all heads for the whole sequence
with a slice of the heads, by all_to_all. Ring attention keeps the queries and sends keys and values around a ring, by permute;
each rank adds up what its queries see of them, with an online softmax. A rank has the n-th chunk from the start of the sequence
and the n-th from its end, so that a causal mask leaves all ranks the same number of pairs. The loss is each rank's own, and the
gradient that of its mean over all ranks: no collective needs another factor.

This shows the exchanges: every pair of a query and a key is computed, also where the mask hides it, and what a rank sends does
not overlap with what it computes. Ulysses: Jacobs et al. 2023, arXiv 2309.14509; ring: Liu et al. 2023, arXiv 2310.01889.
"""

import argparse
import math
from collections.abc import Callable

import gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import LossReport, add_run_options, batch, mesh_of, ranks, text
from torch import Tensor, nn

import funshard as fs
from funshard.collectives import Axis, ProcessAxis, all_to_all, permute, scatter

Attention = Callable[[Tensor, Tensor, Axis], Tensor]
ALONE = ProcessAxis(1, 0)


def positions(seq: int, ranks: int) -> Tensor:
    """Return the positions of a sequence in the order in which ranks hold them: [ranks, seq / ranks]."""
    if seq % (2 * ranks):
        raise ValueError(f"seq: expected a multiple of {2 * ranks}, two chunks for each rank, got {seq}")
    chunks = torch.arange(seq).view(2 * ranks, -1)
    return torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), 1)


def ulysses(qkv: Tensor, order: Tensor, axis: Axis) -> Tensor:
    """Return causal attention of this rank's slice, by the whole sequence and a slice of the heads.

    Args:
        qkv: [3, batch, heads, slice, dim]; the ranks divide the heads.
        order: The `positions` of all ranks.
        axis: The ranks that share a sequence.
    """
    q, k, v = all_to_all(qkv, axis, split_dim=2, concat_dim=3)
    place = order.flatten().to(q.device)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    out = scores.masked_fill(place[:, None] < place, -math.inf).softmax(-1) @ v
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


def ring(qkv: Tensor, order: Tensor, axis: Axis) -> Tensor:
    """Return causal attention of this rank's slice, by the keys and values that come around.

    Args:
        qkv: [3, batch, heads, slice, dim].
        order: The `positions` of all ranks.
        axis: The ranks that share a sequence.
    """
    q, kv = qkv[0] / math.sqrt(qkv.shape[-1]), qkv[1:]
    order = order.to(q.device)
    mine = scatter(order, axis)[0]
    for step in range(axis.size):
        theirs = scatter(order.roll(step, 0), axis)[0]  # of the slice that has come here
        scores = (q @ kv[0].mT).masked_fill(mine[:, None] < theirs, -math.inf)
        highest = scores.detach().amax(-1, keepdim=True)  # the result does not depend on it, nor do its derivatives
        if step == 0:  # every query sees itself: this one is finite
            top, weight = highest, (scores - highest).exp()
            total, out = weight.sum(-1, keepdim=True), weight @ kv[1]
        else:
            before, top = top, torch.maximum(top, highest)
            weight, shrink = (scores - top).exp(), (before - top).exp()
            total, out = total * shrink + weight.sum(-1, keepdim=True), out * shrink + weight @ kv[1]
        if step < axis.size - 1:
            kv = permute(kv, axis)
    return out / total


ATTENTION: dict[str, Attention] = {"ring": ring, "ulysses": ulysses}


class Block(gpt.Block):
    """A block of gpt.py whose attention is over slices of the sequence."""

    def forward(self, x: Tensor, order: Tensor, axis: Axis, attention: Attention) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(qkv, order, axis).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor, axis: Axis = ALONE, attention: Attention = ring) -> Tensor:
        """Return the loss of predicting y from x, [batch, seq] both, over this rank's slice of the sequence."""
        order = positions(x.shape[1], axis.size)
        here = scatter(order, axis)[0].to(x.device)
        h = self.token(x[:, here]) + self.position(here)
        for block in self.blocks:
            h = block(h, order, axis, attention)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y[:, here].flatten())


def policy() -> fs.policies.Policy:
    """Return the policy for a `GPT`: a unit for each block, the rest of the model as another, over all ranks."""
    p = fs.P(("shard", "context"))
    return fs.policies.by_path({"blocks.*": p}, p)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--attention", choices=ATTENTION, default="ring")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each step, over all ranks")
    add_run_options(parser, steps=40)
    args = parser.parse_args()

    rank, world, device = ranks()
    readers, left = divmod(world, args.context)  # groups of ranks that read the same sequences
    if left or args.batch % readers or args.seq % (2 * args.context):
        parser.error(
            f"--context, --batch, --seq: expected what divides {world} ranks, {args.batch} sequences, {args.seq} bytes"
        )
    axes = {"shard": readers, "context": args.context}

    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.dim, args.heads, args.seq)  # the same values on every rank
    spec = policy()(model).on(mesh_of(axes, device))
    params = {key: shard.to(device) for key, shard in fs.shard(model, spec).items()}
    axis, attention = spec.bound_mesh["context"], ATTENTION[args.attention]

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        return fs.functional_call(model, params, (x, y, axis, attention), spec=spec)

    train, _ = text("*.py", args.max_bytes)
    generator = torch.Generator().manual_seed(args.seed + 1)
    each, reader = args.batch // readers, rank // args.context
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=args.lr, fused=True, donate=True)
    state, progress = init(params), LossReport(args, spec, rank)
    for step in range(args.steps):
        x, y = batch(train, (args.batch, args.seq), generator, device, slice(reader * each, (reader + 1) * each))
        grads, value = fs.grad_and_value(loss)(params, x, y)
        params, state = update(grads, state, params)
        progress.report(step, value)
    if rank == 0:
        print(f"{world} ranks: {axes}, {args.attention}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
