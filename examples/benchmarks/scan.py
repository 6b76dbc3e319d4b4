"""The gradient through a training run: memory and time of fs.scan, of a loop, and of TorchOpt's unrolled loop.

    python examples/benchmarks/scan.py
    python examples/benchmarks/scan.py --steps 16,64 --modes 'sqrt,log,TorchOpt' --dtype float32

A small GPT is trained by AdamW, and the loss on another batch is differentiated by the weight of every sample, on one rank
with one thread. "loop" is Python's over the same sharded steps, under `fs.grad`; "sqrt", "log" and "all" are `fs.scan` with its
choices of ``segments``, and "forward mode" one derivative along all weights by
``torch.func.jvp``. "TorchOpt" (extra `peers`) is its own loop over full parameters: ``torchopt.adamw`` in steps by
``torch.func.grad``, and plain autograd through them. All give the same gradient, whose difference from that of the first mode
is a column.

A peak is the most bytes that tensors hold beyond what was there before, by the profiler's record of every allocation.
Times are CPU seconds of one thread, medians of rounds; "passes a step" is the time of a step over that of a
forward-backward pass, the loss of one step and its gradient without update. Loops that would hold more than --most bytes, by
their peak at fewer steps, are left out.
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import GPT, Block
from measured import held
from report import add_model_options, add_output_options, report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import funshard as fs

ADAMW: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.01, "eps": 1e-8}
ROOT = 1e-12
SCANS: dict[str, dict[str, Any]] = {"sqrt": {}, "log": {"segments": "log"}, "all": {"segments": "all"}}
MODES = ("loop", *SCANS, "forward mode", "TorchOpt")


class Run:
    """A training run of so many steps: its model, batches and what each mode differentiates."""

    def __init__(self, args: argparse.Namespace, steps: int) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, args.dtype)
        self.model = GPT(args.layers, args.dim, args.heads, args.seq).to(dtype)
        self.full = {name: p.detach() for name, p in self.model.named_parameters()}
        self.spec = fs.by_type(Block)(self.model).on({"shard": 1})
        self.x, self.y = torch.randint(256, (2, steps + 1, args.batch, args.seq))
        self.weights = torch.ones(steps, args.batch, dtype=dtype)

    def sharded(self, params: fs.Params, x: Tensor) -> Tensor:
        return fs.functional_call(self.model, params, (x,), spec=self.spec)

    def unsharded(self, params: fs.Params, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, params, (x,))

    def loss(self, call: Callable[..., Tensor], params: fs.Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            logits = call(params, x)
        return (F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1) * weights).mean()

    def trained(self, scan: Callable[..., Any], weights: Tensor, grad: Callable[..., Any] = fs.grad) -> Tensor:
        """The loss after training on shards, in steps by this gradient."""
        init, update = fs.optim.adamw(spec=self.spec, eps_root=ROOT, **ADAMW)
        params = fs.shard(self.full, self.spec)

        def step(state: Any, given: Any) -> Any:
            params, moments = state
            grads = grad(lambda p: self.loss(self.sharded, p, *given))(params)
            return update(grads, moments, params), None

        state, _ = scan(step, (params, init(params)), (self.x[:-1], self.y[:-1], weights))
        return self.loss(self.sharded, state[0], self.x[-1], self.y[-1], torch.ones_like(weights[0]))

    def torchopt(self, weights: Tensor) -> Tensor:
        """The same by TorchOpt's loop."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchopt
        optimizer = torchopt.adamw(ADAMW["learning_rate"], eps=ADAMW["eps"], eps_root=ROOT, weight_decay=ADAMW["weight_decay"])
        params: Any = self.full
        state = optimizer.init(params)
        for given in zip(self.x[:-1], self.y[:-1], weights, strict=True):
            grads = torch.func.grad(lambda p, given=given: self.loss(self.unsharded, p, *given))(params)
            updates, state = optimizer.update(grads, state, params=params, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
        return self.loss(self.unsharded, params, self.x[-1], self.y[-1], torch.ones_like(weights[0]))

    def gradient(self, mode: str) -> Tensor:
        """The gradient by all weights, or its product with ones in forward mode."""
        if mode == "TorchOpt":
            weights = self.weights.clone().requires_grad_()
            return torch.autograd.grad(self.torchopt(weights), weights)[0]
        if mode == "loop":
            return fs.grad(lambda w: self.trained(loop, w, torch.func.grad))(self.weights)
        if mode == "forward mode":
            ones = torch.ones_like(self.weights)
            return torch.func.jvp(lambda w: self.trained(fs.scan, w), (self.weights,), (ones,))[1]
        options = dict(SCANS[mode])
        if options.get("segments") == "all":
            options["segments"] = len(self.weights)
        return fs.grad(lambda w: self.trained(lambda *a: fs.scan(*a, **options), w))(self.weights)

    def pass_seconds(self, rounds: int) -> float:
        """The time of one step's loss and its gradient."""
        params, given, times = fs.shard(self.full, self.spec), (self.x[0], self.y[0], self.weights[0]), []
        for _ in range(rounds + 2):
            start = time.process_time()
            fs.grad(lambda p: self.loss(self.sharded, p, *given))(params)
            times.append(time.process_time() - start)
        return statistics.median(times[2:])


def loop(step: Any, state: Any, xs: Any) -> Any:
    for x in zip(*xs, strict=True):
        state, _ = step(state, x)
    return state, None


def peak_of(run: Run, mode: str) -> int:
    """The most bytes beyond what was there: all segments' states, when backward begins."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run.gradient(mode)
    return max(nbytes for _, nbytes in held(record))


def measure(args: argparse.Namespace, mode: str, steps: int, first: Tensor | None) -> tuple[dict[str, float], Tensor]:
    run = Run(args, steps)
    times: list[float] = []
    for _ in range(args.rounds):
        start = time.process_time()
        gradient = run.gradient(mode)
        times.append(time.process_time() - start)
    of_pass = run.pass_seconds(5)
    expected = gradient if first is None else first.sum() if mode == "forward mode" else first
    return {
        "peak": peak_of(run, mode),
        "seconds": statistics.median(times),
        "passes": statistics.median(times) / steps / of_pass,
        "difference": float((gradient - expected).norm() / expected.norm()),
    }, gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="16,64,256")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--most", type=float, default=4e9, help="bytes that a mode may hold")
    parser.add_argument("--dtype", default="float64")
    add_model_options(parser, layers=2, dim=64, heads=2, seq=32, batch=8)
    add_output_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(n) for n in args.steps.split(",")]
    figures: dict[str, dict[int, dict[str, float]]] = {mode: {} for mode in args.modes.split(",")}
    firsts: dict[int, Tensor] = {}
    for mode, known in figures.items():
        for before, steps in zip([0, *counts], counts, strict=False):
            if before and known and known[max(known)]["peak"] * steps / before > args.most and mode in ("loop", "TorchOpt"):
                break
            known[steps], gradient = measure(args, mode, steps, firsts.get(steps))
            firsts.setdefault(steps, gradient)
    state = 3 * sum(p.numel() * p.itemsize for p in Run(args, 1).full.values())
    print(f"a state of {state:,} bytes: parameters and two moments")
    rows = [
        [
            mode,
            str(steps),
            f"{f['peak'] / 1e6:.1f}",
            f"{f['peak'] / state:.1f}",
            f"{f['seconds']:.2f}",
            f"{f['passes']:.1f}",
            f"{f['difference']:.1e}",
        ]
        for mode, known in figures.items()
        for steps, f in known.items()
    ]
    report(["mode", "steps", "peak MB", "in states", "CPU seconds", "passes a step", "differs by"], rows, figures, args)


if __name__ == "__main__":
    main()
