"""Train a byte-level mixture of experts (top 2, token choice) with its experts split over "expert", all of it sharded.

One rank:     python examples/moe.py
Four ranks:   torchrun --nproc-per-node 4 examples/moe.py --expert 2   (2 x 2; or --expert 4)

Each rank reads sequences of its own, and has some of the experts of every block. Tokens go to the ranks of their experts, as
many to each as the router chooses, and the results come back; no weight of an expert crosses that axis. No token is dropped,
and an expert that nobody chooses has a gradient of zeros. Slices of the experts are gathered over "shard" alone; all other
parameters are sharded over both axes.

The loss is each rank's own, and the gradient that of its mean over all ranks. Its auxiliary loss for balance (Switch
Transformer) takes the shares of experts among the tokens of all ranks, so that training is the same on any number of them.
`dispatch` works with any experts: mixtral.py has those of transformers.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import LossReport, add_run_options, batch, mesh_of, ranks, text
from torch import Tensor, nn

import funshard as fs
from funshard.collectives import Axis, Mesh, all_to_all, ragged_all_to_all, sum_over

ALONE = Mesh.of({"expert": 1})


def dispatch(
    x: Tensor, chosen: Tensor, weights: Tensor, axis: Axis, experts: int, run: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Return the weighted sum of what each token's experts return, of which every rank of an axis has some.

    Args:
        x: This rank's tokens, [tokens, dim].
        chosen: Each token's experts, [tokens, k], numbered over all ranks.
        weights: Those of their results, [tokens, k].
        axis: The axis that experts are split over, in rank order.
        experts: The number of experts on each rank.
        run: This rank's experts: of rows [n, dim], sorted by expert, and each expert's number of rows, which may be 0.
    """
    expert = chosen.flatten()
    order = expert.argsort(stable=True)  # by expert is by rank, too
    counts = torch.bincount(expert, minlength=axis.size * experts)  # rows for each expert
    arriving = all_to_all(counts, axis).view(axis.size, experts)  # rows of each rank for each expert here
    send, receive = counts.view(axis.size, experts).sum(1), arriving.sum(1)
    rows = ragged_all_to_all(x[order // chosen.shape[1]], axis, send, receive)
    here = torch.arange(experts, device=x.device).repeat(axis.size).repeat_interleave(arriving.flatten()).argsort(stable=True)
    y = run(rows[here], [int(n) for n in arriving.sum(0)])[here.argsort()]
    y = ragged_all_to_all(y, axis, receive, send)[order.argsort()].view(*chosen.shape, -1)
    return (y * weights[..., None]).sum(1)


def run_experts(
    rows: Tensor, counts: list[int], gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor] = F.silu
) -> Tensor:
    """Return what each expert makes of its rows: gate_up is [experts, 2 * hidden, dim], down [experts, dim, hidden]."""
    out = []
    for part, first, second in zip(rows.split(counts), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = F.linear(part, first).chunk(2, -1)
        out.append(F.linear(activation(gate) * up, second))
    return torch.cat(out)


class Experts(nn.Module):
    """One of ``parts`` equal parts of a block's experts."""

    def __init__(self, dim: int, hidden: int, experts: int, parts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts // parts, 2 * hidden, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts // parts, dim, hidden) * hidden**-0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, axis: Axis) -> Tensor:
        run = lambda rows, counts: run_experts(rows, counts, self.gate_up, self.down)  # noqa: E731
        return dispatch(x, chosen, weights, axis, len(self.gate_up), run)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, experts: int, parts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(dim, hidden, experts, parts)

    def forward(self, x: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x).flatten(0, 1)
        probabilities = self.router(h).softmax(-1)  # [tokens, experts]
        weights, chosen = probabilities.topk(2)
        y = self.experts(h, chosen, weights / weights.sum(-1, keepdim=True), mesh["expert"])
        counts = sum_over(torch.bincount(chosen.flatten(), minlength=probabilities.shape[1]), mesh)
        return x + y.view_as(x), len(counts) * (counts / counts.sum() * probabilities.mean(0)).sum()


class MoE(nn.Module):
    """A GPT whose MLPs are mixtures of experts, of which it has one of ``parts`` equal parts; ``parts=1``: all."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int, hidden: int, experts: int, parts: int = 1) -> None:
        super().__init__()
        if experts % parts:
            raise ValueError(f"experts: expected a multiple of {parts} ranks, got {experts}")
        self.token, self.position = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden, experts, parts) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor, mesh: Mesh = ALONE, balance: float = 0.01) -> Tensor:
        """Return the loss of predicting y from x, [batch, seq] both, and ``balance`` times the auxiliary loss."""
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        auxiliary = []
        for block in self.blocks:
            h, value = block(h, mesh)
            auxiliary.append(value)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + balance * torch.stack(auxiliary).mean()


EVERYWHERE = fs.P(("expert", "shard"))
"""Of parameters that are no experts': slices over all ranks."""


def policy() -> fs.policies.Policy:
    """Return the policy for a `MoE` of pieces: units for each block and its experts, the rest of the model as another."""
    patterns = {"blocks.*": EVERYWHERE, "blocks.*.experts": fs.P("shard", local={"expert": 0})}
    return fs.policies.by_path(patterns, EVERYWHERE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expert", type=int, default=1, help="ranks that experts are split over")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences of each step, over all ranks")
    add_run_options(parser, steps=60)
    args = parser.parse_args()

    rank, world, device = ranks()
    if world % args.expert or args.batch % world:
        parser.error(f"--expert, --batch: they do not divide {world} ranks, and {args.batch} sequences, evenly")
    axes = {"expert": args.expert, "shard": world // args.expert}

    torch.manual_seed(args.seed)
    sizes = (args.layers, args.dim, args.heads, args.seq, args.hidden, args.experts)
    whole = MoE(*sizes)  # the same values on every rank
    with torch.device("meta"):
        model = MoE(*sizes, parts=args.expert)  # the structure of a rank's pieces
    spec = policy()(model).on(mesh_of(axes, device))
    params = {key: shard.to(device) for key, shard in fs.shard(whole, spec).items()}
    del whole

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        return fs.functional_call(model, params, (x, y, spec.bound_mesh, args.balance), spec=spec)

    train, _ = text("*.py", args.max_bytes)
    generator = torch.Generator().manual_seed(args.seed + 1)
    each = args.batch // world
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=args.lr, fused=True, donate=True)
    state, progress = init(params), LossReport(args, spec, rank)
    for step in range(args.steps):
        x, y = batch(train, (args.batch, args.seq), generator, device, slice(rank * each, (rank + 1) * each))
        grads, value = fs.grad_and_value(loss)(params, x, y)
        grads, norm = fs.optim.clip_by_global_norm(grads, spec, 1.0)
        params, state = update(grads, state, params)
        progress.report(step, value, norm)
    if rank == 0:
        print(f"{world} ranks: {axes}, {sum(p.numel() for p in params.values()):,} parameters on each")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
