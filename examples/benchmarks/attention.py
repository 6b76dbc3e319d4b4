"""A Hessian product through attention, by torch's math kernel and in fs.transforms_attention: memory and time by length.

    python examples/benchmarks/attention.py
    python examples/benchmarks/attention.py --lengths 512,1024 --block 64

Causal attention of one sequence, in one process. Peaks are counted as in memory.py, beyond the arguments; times are the
CPU's, of one thread, the shortest of some rounds.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measured import held
from report import add_output_options, report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import funshard as fs


def loss(qkv: tuple[Tensor, ...]) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, is_causal=True).square().sum()


def measure(length: int, context: Callable[[], Any], args: argparse.Namespace) -> tuple[float, float]:
    """Bytes and seconds of one product."""
    torch.manual_seed(0)
    qkv = tuple(torch.randn(1, args.heads, length, args.dim) for _ in range(3))
    v = tuple(x.cos() for x in qkv)
    times = []
    with context():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            fs.hvp(loss, qkv, v)
        for _ in range(args.rounds):
            start = time.process_time()
            fs.hvp(loss, qkv, v)
            times.append(time.process_time() - start)
    return max(size for _, size in held(record)), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    add_output_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    contexts: list[Callable[[], contextlib.AbstractContextManager[object]]] = [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: fs.transforms_attention(args.block),
    ]
    rows, figures = [], {}
    for length in map(int, args.lengths.split(",")):
        (whole, slow), (blocks, fast) = (measure(length, context, args) for context in contexts)
        rows.append([str(length), f"{whole / 1e6:.1f}", f"{blocks / 1e6:.1f}", f"{fast / slow:.2f}"])
        figures[length] = {"math": whole, "blocks": blocks, "time": fast / slow}
    report(["length", "math MB", "blocks MB", "time / math"], rows, figures, args)


if __name__ == "__main__":
    main()
