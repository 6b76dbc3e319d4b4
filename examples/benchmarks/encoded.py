"""What encoded gradients cost and save: the error of the mean, the time of the codec, and the wire on which it pays.

    python examples/benchmarks/encoded.py                   (four gloo ranks, each with a batch of its own)

"error" is the distance of a step's reduced gradients from the mean of the ranks' own ones in float64, over the length of that
mean. "bytes" is what a rank sends to others for each element. "ns" is the time to encode and decode an element, the fastest of
many runs on the first rank. "GB/s" is what the wire may carry at most, for each rank, if what it saves is to be more than that
time: bytes saved over seconds spent, where nothing else hides either.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import CODEC_BF16, CODEC_INT8, GPT, REDUCE_BF16, Block, fully_sharded, loss_of
from measured import on_ranks
from report import add_model_options, add_output_options, report
from torch import Tensor, nn

import funshard as fs

Grads = dict[str, Tensor]
Reduce = Callable[[nn.Module, Tensor, Tensor], Grads]


def own_mean(model: nn.Module, x: Tensor, y: Tensor) -> Grads:
    """The mean over ranks of what each one's backward gives, in float64."""
    loss_of(model(x), y).backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def fsdp2(precision: fs.Precision) -> Reduce:
    def reduce(model: nn.Module, x: Tensor, y: Tensor) -> Grads:
        fully_sharded(precision=precision)(model)
        loss_of(model(x), y).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}

    return reduce


def funshard(p: fs.P) -> Reduce:
    def reduce(model: nn.Module, x: Tensor, y: Tensor) -> Grads:
        spec = fs.by_type(Block, p=p)(model).bound
        grads = fs.grad(lambda params: loss_of(fs.functional_call(model, params, (x,), spec=spec), y))(fs.shard(model, spec))
        return fs.unshard(grads, spec)

    return reduce


MODES: dict[str, tuple[Reduce, float, fs.Codec | None]] = {
    "FSDP2": (fsdp2(fs.Precision()), 4, None),
    "FSDP2 reduce bf16": (fsdp2(REDUCE_BF16), 2, None),
    "fs": (funshard(fs.P("shard")), 4, None),
    "fs reduce bf16": (funshard(fs.P("shard", precision=REDUCE_BF16)), 2, None),
    "fs codec bf16": (funshard(fs.P("shard", precision=CODEC_BF16)), 2, CODEC_BF16.reduce_codec),
    "fs codec int8": (funshard(fs.P("shard", align=64, precision=CODEC_INT8)), 1 + 4 / 64, CODEC_INT8.reduce_codec),
}
"""How gradients are reduced, the bytes that an element is sent in, and the codec."""


def codec_seconds(codec: fs.Codec, x: Tensor, runs: int) -> float:
    """Seconds to encode and decode, the fewest of some runs."""
    times: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        codec.decode(*codec.encode(x))
        times.append(time.perf_counter() - start)
    return min(times)


def measure(rank: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    x, y = torch.randint(256, (2, args.batch, args.seq), generator=torch.Generator().manual_seed(rank))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, args.heads, args.seq)

    exact = own_mean(make(), x, y)
    length = torch.stack([g.norm() for g in exact.values()]).norm()
    sample = torch.cat([g.flatten() for g in exact.values()])[: args.elements].float()
    figures: dict[str, dict[str, float]] = {}
    for mode, (reduce, element, codec) in MODES.items():
        grads = reduce(make(), x, y)
        error = torch.stack([(grads[name].double() - g).norm() for name, g in exact.items()]).norm() / length
        others = 1 - 1 / args.ranks
        one = {"error": float(error), "bytes": element * others}
        dist.barrier()
        if codec is not None and rank == 0:
            seconds = codec_seconds(codec, sample, args.runs) / len(sample)
            one |= {"ns": seconds * 1e9, "GB/s": (4 - element) * others / seconds / 1e9}
        dist.barrier()
        figures[mode] = one
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--elements", type=int, default=1_000_000, help="of the slice that is encoded for the time")
    add_model_options(parser)
    add_output_options(parser)
    args = parser.parse_args()
    figures: dict[str, Any] = on_ranks(measure, args)
    columns = {"error": "{:.1e}", "bytes": "{:.2f}", "ns": "{:.2f}", "GB/s": "{:.2f}"}
    rows = [[mode, *(text.format(one[n]) if n in one else "-" for n, text in columns.items())] for mode, one in figures.items()]
    report(["mode", *columns], rows, figures, args)


if __name__ == "__main__":
    main()
