"""Train a byte-level GPT whose blocks are split into stages over "stage", and all parameters over "shard".

One rank:       python examples/pipeline.py
Two stages:     torchrun --nproc-per-node 2 examples/pipeline.py --stages 2
Each on two:    torchrun --nproc-per-node 4 examples/pipeline.py --stages 2 --schedule 1f1b

The blocks are one stack, [blocks, ...] for each parameter, of which a stage has some rows: local over "stage". A checkpoint has
the whole stack, so that any number of stages loads it. Embeddings and head are replicated over the stages.

`spmd` is the pipeline as one function: at every tick all stages run, and permute brings each the result of the one before.
Every order of derivative goes through it. Its backward runs after all forwards (GPipe: Huang et al. 2019, arXiv 1811.06965).
`one_f_one_b` alternates a micro-batch's forward with another one's backward, so that stage s of S keeps activations of at most
S - s micro-batches instead of all (PipeDream: Narayanan et al. 2019, arXiv 1806.03377). It has the same gradient, first order.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import LossReport, add_run_options, batch, mesh_of, ranks, text
from torch import Tensor, nn

import funshard as fs
from funshard.collectives import Axis, ProcessAxis, permute, reduce_scatter, scatter

ALONE = ProcessAxis(1, 0)


class Blocks(nn.Module):
    """Transformer blocks, each a row of every parameter."""

    def __init__(self, blocks: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(blocks, dim)) for _ in range(2))
        self.qkv, self.out = _matrices(blocks, 3 * dim, dim), _matrices(blocks, dim, dim)
        self.up, self.down = _matrices(blocks, 4 * dim, dim), _matrices(blocks, dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.qkv)):
            qkv = F.linear(F.layer_norm(x, x.shape[-1:], self.norm1[i]), self.qkv[i])
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.linear(y, self.out[i])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], self.norm2[i]), self.up[i])), self.down[i])
        return x


def _matrices(blocks: int, rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(blocks, rows, columns) / math.sqrt(columns) / 2)


class GPT(nn.Module):
    """A GPT with the blocks of one stage, by default of the only one."""

    def __init__(self, blocks: int, dim: int, heads: int, seq: int, stages: int = 1) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = Blocks(blocks // stages, dim, heads)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of the model and ``args`` returns: `spmd`, or `run_stage` for a micro-batch."""
        return function(self, *args)

    def embed(self, x: Tensor) -> Tensor:
        """Return [..., seq, dim] of bytes, [..., seq]."""
        return self.token(x) + self.position.weight[: x.shape[-1]]

    def predict(self, h: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting y from the last block's results."""
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, -2), y.flatten())


def policy() -> fs.policies.Policy:
    """Return the policy for a `GPT`: a unit for a stage's blocks, the rest of the model as another."""
    stage = fs.P("shard", local={"stage": 0})
    return fs.policies.by_path({"blocks": stage}, fs.P("shard"))


def spmd(model: GPT, x: Tensor, y: Tensor, axis: Axis) -> Tensor:
    """Return the loss of this rank's share of the micro-batches, which all pass through every stage.

    The mean over all ranks is the mean over all micro-batches.

    Args:
        model: This stage's part.
        x: [micro-batches, batch, seq]; the stages divide the micro-batches.
        y: What is predicted, as x.
        axis: The stages.
    """
    stage = scatter(torch.arange(axis.size, device=x.device), axis)  # [1]
    embedded, results = model.embed(x), []
    h = torch.zeros_like(embedded[0])
    for tick in range(len(x) + axis.size - 1):
        fresh = embedded[min(tick, len(x) - 1)]
        out = model.blocks(torch.where(stage == 0, fresh, h))
        results.append(out)
        h = permute(out, axis, perm=[(i, i + 1) for i in range(axis.size - 1)])
    of_last = torch.where(stage == axis.size - 1, torch.stack(results[axis.size - 1 :]), 0)
    return model.predict(reduce_scatter(of_last, axis, reduce="sum"), scatter(y, axis))


def run_stage(model: GPT, h: Tensor, x: Tensor, y: Tensor, axis: ProcessAxis) -> Tensor:
    """Return this stage's result for one micro-batch: [batch, seq, dim], and of the last stage the loss."""
    h = model.blocks(model.embed(x) if axis.rank == 0 else h)
    return model.predict(h, y) if axis.rank == axis.size - 1 else h


def one_f_one_b(
    model: GPT, params: fs.Params, x: Tensor, y: Tensor, axis: ProcessAxis, spec: fs.PartitionSpec
) -> tuple[fs.Params, Tensor]:
    """Return the gradient of `spmd`, and a value whose mean over all ranks is the mean loss: 0 but on the last stage.

    At clock t stage s of S runs the forward of micro-batch (t - s) / 2 where that is whole, and otherwise the backward of
    (t + s + 1) / 2 - S. Then stages exchange in pairs: one has a result for the next stage, that one a cotangent.

    A stage's parameters are gathered before the first micro-batch, and their gradients reduced after the last: for the step it
    holds both unsharded.

    Args:
        model: This stage's part.
        params: This rank's shards.
        x: [micro-batches, batch, seq].
        y: What is predicted, as x.
        axis: The stages.
        spec: The spec of the shards.
    """
    stages, stage = axis.size, axis.rank
    is_last = stage == stages - 1
    pieces = {name: p.detach().requires_grad_() for name, p in fs.unshard(params, spec, whole=False).items()}
    grads = {name: torch.zeros_like(p) for name, p in pieces.items()}
    nothing = next(iter(params.values())).new_zeros(*x.shape[1:], model.token.embedding_dim)
    received, value = nothing, nothing.new_zeros(())
    weight = torch.full_like(value, stages / len(x))  # of a micro-batch's loss, which only the ranks of the last stage have
    in_flight: deque[tuple[Tensor, Tensor]] = deque()
    for clock in range(2 * (len(x) + stages - 1)):
        sent = nothing
        if (clock - stage) % 2 == 0:
            i = (clock - stage) // 2
            if 0 <= i < len(x):
                h = received.detach().requires_grad_()
                result = fs.functional_call(model, pieces, (run_stage, h, x[i], y[i], axis), spec=spec)
                in_flight.append((h, result))
                if is_last:
                    value = value + result.detach() * weight
                else:
                    sent = result.detach()
        elif 0 <= (clock + stage + 1) // 2 - stages < len(x):
            h, result = in_flight.popleft()
            inputs, cotangent = (*pieces.values(), h), weight if is_last else received
            *own, sent = torch.autograd.grad(result, inputs, cotangent, materialize_grads=True)
            grads = {name: grad + part for (name, grad), part in zip(grads.items(), own, strict=True)}
        pairs = [(s, s + 1) for s in range(clock % 2, stages - 1, 2)]
        received = permute(sent, axis, perm=[*pairs, *((b, a) for a, b in pairs)])
    return fs.reduce_grads(grads, spec), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--schedule", choices=("spmd", "1f1b"), default="spmd")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences of each step, over all ranks")
    add_run_options(parser, steps=40)
    args = parser.parse_args()

    rank, world, device = ranks()
    readers, left = divmod(world, args.stages)  # groups of ranks that read the same sequences
    if left or args.batch % (readers * args.micro_batches) or args.micro_batches % args.stages or args.blocks % args.stages:
        parser.error(
            "--stages, --micro-batches, --batch, --blocks: expected stages that divide ranks, blocks and micro-batches, and "
            f"sequences that {readers} groups of ranks divide into {args.micro_batches} micro-batches"
        )
    axes = {"stage": args.stages, "shard": readers}
    torch.manual_seed(args.seed)
    whole = GPT(args.blocks, args.dim, args.heads, args.seq)  # the same values on every rank
    with torch.device("meta"):
        model = GPT(args.blocks, args.dim, args.heads, args.seq, args.stages)  # the structure of a rank's pieces
    spec = policy()(model).on(mesh_of(axes, device))
    params = {key: shard.to(device) for key, shard in fs.shard(whole, spec).items()}
    del whole
    axis = spec.axis("stage")

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        return fs.functional_call(model, params, (spmd, x, y, axis), spec=spec)

    train, _ = text("*.py", args.max_bytes)
    generator = torch.Generator().manual_seed(args.seed + 1)
    each, reader = args.batch // readers, rank % readers
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=args.lr, fused=True, donate=True)
    state, progress = init(params), LossReport(args, spec, rank)
    for step in range(args.steps):
        xy = batch(train, (args.batch, args.seq), generator, device, slice(reader * each, (reader + 1) * each))
        x, y = (part.view(args.micro_batches, -1, args.seq) for part in xy)
        if args.schedule == "spmd":
            grads, value = fs.grad_and_value(loss)(params, x, y)
        else:
            grads, value = one_f_one_b(model, params, x, y, axis, spec)
        params, state = update(grads, state, params)
        progress.report(step, value)
    if rank == 0:
        print(f"{world} ranks: {axes}, {args.schedule}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
