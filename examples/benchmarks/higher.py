"""Derivatives of derivatives, eager and by fs.compile: time and peak memory of a step.

    python examples/benchmarks/higher.py
    python examples/benchmarks/higher.py --backend aot_eager --modes 'hvp,grad of grad'

A GPT with each block as a unit of ``P("shard")`` takes a product with the Hessian ("hvp", and "hvp in reverse" with
``forward=False``), the gradient of the squared norm of a gradient, MAML of one step, or the private gradient of
`per_sample_grads`. Attention uses the math kernel, the only one with a second derivative. Peaks are counted as in memory.py, on
a fake process group; times are those of gloo ranks, as in peers.py, and their ratios within rounds. "no prefetch" is
``fs.compile(prefetch=0)``: the eager step gathers nothing ahead in a stack of transforms.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import GPT, Block, Step, fake_world, loss_of
from measured import Batch, Build, in_rounds, on_ranks, over, peak_bytes, peak_bytes_compiled, ratio
from report import add_model_options, add_output_options, report
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import funshard as fs

Loss = Callable[[fs.Params, Tensor, Tensor], Tensor]


def squares(tree: fs.Params) -> Tensor:
    return torch.stack([x.square().sum() for x in tree.values()]).sum()


def hvp(forward: bool) -> Callable[..., Any]:
    def step(loss: Loss, spec: fs.PartitionSpec, params: fs.Params, x: Tensor, y: Tensor) -> fs.Params:
        return fs.hvp(lambda p: loss(p, x, y), params, {k: p.cos() for k, p in params.items()}, forward=forward)

    return step


def grad_of_grad(loss: Loss, spec: fs.PartitionSpec, params: fs.Params, x: Tensor, y: Tensor) -> fs.Params:
    return fs.grad(lambda p: squares(fs.grad(loss)(p, x, y)))(params)


def maml(loss: Loss, spec: fs.PartitionSpec, params: fs.Params, x: Tensor, y: Tensor) -> fs.Params:
    def adapted(params: fs.Params) -> Tensor:
        grads = fs.grad(loss)(params, x, y)
        return loss({k: p - 0.1 * grads[k] for k, p in params.items()}, x, y)

    return fs.grad(adapted)(params)


def per_sample(loss: Loss, spec: fs.PartitionSpec, params: fs.Params, x: Tensor, y: Tensor) -> fs.Params:
    return fs.per_sample_grads(lambda p, x, y: loss(p, x[None], y[None]), params, (x, y), spec=spec, clip=1.0)


STEPS = {
    "hvp": hvp(forward=True),
    "hvp in reverse": hvp(forward=False),
    "grad of grad": grad_of_grad,
    "maml": maml,
    "per sample": per_sample,
}

PREFETCHES = {"compiled": 1, "no prefetch": 0}


def built(mode: str, backend: str | None, prefetch: int = 1) -> Build:
    """The step of a mode, eager without a backend."""

    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block)(model).bound
        params = fs.shard(model, spec)
        model.to("meta")

        def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return loss_of(fs.functional_call(model, params, (x,), spec=spec), y)

        def step(params: fs.Params, x: Tensor, y: Tensor) -> Any:
            return STEPS[mode](loss, spec, params, x, y)

        if backend:
            step = fs.compile(step, backend=backend, prefetch=prefetch)
        return lambda x, y: step(params, x, y)

    return build


def maker(args: argparse.Namespace) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, args.heads, args.seq)

    return make


def batch_of(rank: int, args: argparse.Namespace) -> Batch:
    x, y = torch.randint(256, (2, args.batch, args.seq), generator=torch.Generator().manual_seed(rank))
    return x, y


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    make, batch, times = maker(args), batch_of(rank, args), {}
    for mode in args.modes.split(","):
        steps = {"eager": built(mode, None)(make())}
        steps |= {name: built(mode, args.backend, prefetch)(make()) for name, prefetch in PREFETCHES.items()}
        times[mode] = in_rounds(steps, batch, args.warmup, args.rounds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--modes", default=",".join(STEPS))
    parser.add_argument("--backend", default="inductor")
    add_model_options(parser, layers=4, dim=128, heads=2, seq=64)
    add_output_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    peaks: dict[str, list[int]] = {}
    with fake_world(args.ranks):
        for mode in args.modes.split(","):
            peaks[mode] = [peak_bytes(built(mode, None), maker(args), batch_of(0, args))]
            for prefetch in PREFETCHES.values():
                torch._dynamo.reset()
                build = built(mode, args.backend, prefetch)
                peaks[mode].append(peak_bytes_compiled(build, maker(args), batch_of(0, args)))
    times = on_ranks(measure, args)
    rows, figures = [], {}
    for mode, (eager, compiled, without) in peaks.items():
        figures[mode] = {"eager": {"peak bytes": eager}}
        cells = [f"{eager / 1e6:.1f}"]
        for name, peak in (("compiled", compiled), ("no prefetch", without)):
            quarters = ratio(times[mode], name, "eager")
            figures[mode][name] = {**over("eager", quarters), "peak bytes": peak}
            cells += ["{1:.2f} ({0:.2f}-{2:.2f})".format(*quarters), f"{peak / 1e6:.1f}"]
        rows.append([mode, *cells])
    report(["mode", "eager MB", "compiled / eager", "MB", "no prefetch / eager", "MB"], rows, figures, args)


if __name__ == "__main__":
    main()
