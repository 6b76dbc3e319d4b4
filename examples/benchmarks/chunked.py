"""A head and its loss, whole and by fs.chunked: peak memory and time of the loss, its gradient and a Hessian product.

    python examples/benchmarks/chunked.py
    python examples/benchmarks/chunked.py --tokens 512 --steps gradient

A head of 50,000 words is a unit of ``P("shard")`` on one rank. "whole" computes all logits at once, "chunked" those of one
slice of the tokens at a time. Peaks are counted as in memory.py, beyond the parameters and the batch. Times are the CPU's, of
one thread, the shortest of some rounds.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import Step
from measured import Batch, Build, held
from report import add_output_options, report
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import funshard as fs


def cross_entropy(weight: Tensor, rows: Batch) -> tuple[Tensor, Tensor]:
    h, y = rows
    return F.cross_entropy(F.linear(h, weight), y, reduction="sum"), (y >= 0).sum()


class Head(nn.Module):
    """The mean loss of the words' logits, whole if there are no chunks."""

    def __init__(self, dim: int, words: int, chunks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, dim) * 0.02)
        self.loss = fs.chunked(cross_entropy, chunks) if chunks else cross_entropy

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        total, count = self.loss(self.weight, (h, y))
        return total / count


Loss = Callable[[fs.Params, Tensor], Tensor]


def gradient(loss: Loss, params: fs.Params, h: Tensor) -> Any:
    return fs.grad(loss, argnums=(0, 1))(params, h)


def hvp(loss: Loss, params: fs.Params, h: Tensor) -> Any:
    return fs.hvp(lambda both: loss(*both), (params, h), ({k: p.cos() for k, p in params.items()}, h.cos()))


STEPS: dict[str, Callable[[Loss, fs.Params, Tensor], Any]] = {
    "loss": lambda loss, params, h: loss({k: p.requires_grad_() for k, p in params.items()}, h).detach(),
    "gradient": gradient,
    "hvp": hvp,
}


def built(step: str) -> Build:
    def build(model: nn.Module) -> Step:
        spec = fs.policies.whole()(model).bound
        params = {k: p.detach() for k, p in fs.shard(model, spec).items()}
        model.to("meta")

        def run(h: Tensor, y: Tensor) -> Any:
            own = {k: p.detach() for k, p in params.items()}
            return STEPS[step](lambda p, h: fs.functional_call(model, p, (h, y), spec=spec), own, h)

        return run

    return build


def measure(name: str, chunks: int, args: argparse.Namespace) -> tuple[int, float]:
    """Return the most bytes that tensors of a step hold beyond the parameters, and its seconds of CPU time."""
    torch.manual_seed(0)
    run = built(name)(Head(args.dim, args.words, chunks))
    batch = torch.randn(args.tokens, args.dim), torch.randint(args.words, (args.tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run(*batch)
    times = []
    for _ in range(args.rounds):
        start = time.process_time()
        run(*batch)
        times.append(time.process_time() - start)
    return max(size for _, size in held(record)), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--words", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=16)
    add_output_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures = [], {}
    for name in args.steps.split(","):
        (whole, slow), (chunked, fast) = (measure(name, chunks, args) for chunks in (0, args.chunks))
        rows.append([name, f"{whole / 1e6:.0f}", f"{chunked / 1e6:.0f}", f"{whole / chunked:.1f}", f"{fast / slow:.2f}"])
        figures[name] = {"whole": whole, "chunked": chunked, "less": whole / chunked, "time": fast / slow, "seconds": slow}
    report(["step", "whole MB", "chunked MB", "whole / chunked", "time / whole"], rows, figures, args)


if __name__ == "__main__":
    main()
