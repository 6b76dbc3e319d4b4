"""Steps of tensor_parallel.py and moe.py beside torch's: time, operators, bytes moved and peak memory of a rank.

    python examples/benchmarks/axes.py                      (four gloo ranks on this machine, one thread each)
    python examples/benchmarks/axes.py --dim 32 --hidden 64 --seq 16 --batch 1     (host time: there is little to compute)

A step is forward, loss and backward up to reduced gradients, in fp32; no optimizer. The Llama is on a mesh of (shard, tensor =
2): "DTensor" is parallelize_module with ColwiseParallel and RowwiseParallel, then fully_shard of each block; "fs" is
``P("shard", local={"tensor": ...})``, and "fs sequence" has activations split along the sequence, too. For the mixture of
experts "FSDP2" gathers all experts of a block on every rank; "fs gathered" does the same, and "fs expert" splits them over as
many ranks and sends tokens. All modes of a model have the same loss on the same batch, which is checked.

"over" is the median, over rounds, of the ratio to torch's mode in the same round, and its middle half. "cpu ms" is the time
that the step's thread computes, in operators and in Python: waiting for others is not in it. "moved MB" is the larger side of
each collective in a step, twice for an all_reduce; "peak MB" the most that a rank's tensors hold, parameters included.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import Step
from counted import REDUCE, Sent, Work
from measured import Batch, in_rounds, on_ranks, over, peak_bytes, ratio
from report import add_output_options, report
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, parallelize_module

import funshard as fs

sys.path.append(str(Path(__file__).parent.parent))
import moe
import tensor_parallel as tp

Build = Callable[[argparse.Namespace], Step]


def bind(args: argparse.Namespace, name: str, size: int) -> dist.DeviceMesh:
    """A mesh whose inner axis has this name and size, and whose outer one is "shard"."""
    return dist.init_device_mesh("cpu", (args.ranks // size, size), mesh_dim_names=("shard", name))


def llama(args: argparse.Namespace, parts: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return tp.Llama(args.layers, args.dim, args.heads, args.heads, args.hidden, parts=parts)


def mixture(args: argparse.Namespace, parts: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return moe.MoE(args.layers, args.dim, args.heads, args.seq, args.hidden, args.experts, parts)


def fsdp2(model: nn.Module, mesh: dist.DeviceMesh, *options: object) -> Step:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)

    def step(x: Tensor, y: Tensor) -> Tensor:
        value = model(x, y, *options)
        value.backward()
        for p in model.parameters():
            p.grad = None
        return value.detach()

    return step


def dtensor(args: argparse.Namespace, joined: bool = True) -> Step:
    mesh, model = bind(args, "tensor", 2), llama(args)
    plan = {name: ColwiseParallel() for name in tp.COLUMNS} | {name: RowwiseParallel() for name in tp.ROWS}
    if joined:  # what several maps take is one DTensor, whose gradient is reduced once
        whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate(), "use_local_output": False}
        plan |= {name: PrepareModuleOutput(**whole) for name in ("norm1", "norm2")}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    return fsdp2(model, mesh["shard"])


def split_llama(sequence: bool) -> Build:
    def build(args: argparse.Namespace) -> Step:
        with torch.device("meta"):
            model = llama(args, 2)
        spec = tp.policy()(model).on(bind(args, "tensor", 2))
        params, split = fs.shard(llama(args), spec), tp.Split(spec.axis("tensor"), sequence)
        grad = fs.grad_and_value(lambda p, x, y: fs.functional_call(model, p, (x, y, split), spec=spec))
        return lambda x, y: grad(params, x, y)[1]

    return build


def gathered_experts(args: argparse.Namespace) -> Step:
    return fsdp2(mixture(args), bind(args, "expert", 1)["shard"], moe.ALONE, 0.0)


def split_experts(size: int | None) -> Build:
    """The experts over as many ranks, None: over all of them."""

    def build(args: argparse.Namespace) -> Step:
        parts = size or args.ranks
        with torch.device("meta"):
            model = mixture(args, parts)
        spec = moe.policy()(model).on(bind(args, "expert", parts))
        params = fs.shard(mixture(args), spec)
        grad = fs.grad_and_value(lambda p, x, y: fs.functional_call(model, p, (x, y, spec.bound_mesh, 0.0), spec=spec))
        return lambda x, y: grad(params, x, y)[1]

    return build


MODES: dict[str, dict[str, Build]] = {
    "llama": {
        "DTensor": dtensor,
        "DTensor each": functools.partial(dtensor, joined=False),
        "fs": split_llama(False),
        "fs sequence": split_llama(True),
    },
    "moe": {
        "FSDP2": gathered_experts,
        "fs gathered": split_experts(1),
        "fs expert 2": split_experts(2),
        "fs expert": split_experts(None),
    },
}


class Moved(Work):
    """The bytes of the larger side of each collective; twice for an all_reduce, which scatters sums and gathers them."""

    moved = 0

    def send(self, one: Sent) -> None:
        super().send(one)
        self.moved += max(one.input_bytes, one.output_bytes) * (2 if one.op == REDUCE else 1)


def timed(step: Step, seconds: list[float]) -> Step:
    """The step, with the seconds that its thread computes put into a list."""

    def run(x: Tensor, y: Tensor) -> None:
        start = time.thread_time()
        step(x, y)
        seconds.append(time.thread_time() - start)

    return run


def peak_of(build: Build, args: argparse.Namespace, batch: Batch) -> int:
    return peak_bytes(lambda _: build(args), nn.Module, batch)


def measure(rank: int, args: argparse.Namespace) -> dict:
    out = {}
    for name, modes in MODES.items():
        reader = rank // 2 if name == "llama" else rank  # tensor ranks read the same
        batch = torch.randint(256, (2, args.batch, args.seq), generator=torch.Generator().manual_seed(reader)).unbind()
        peaks = {mode: peak_of(build, args, batch) for mode, build in modes.items()}
        steps = {mode: build(args) for mode, build in modes.items()}
        means, works = {}, {}
        for mode, step in steps.items():
            means[mode] = step(*batch).clone()
            dist.all_reduce(means[mode])
            with Moved() as works[mode]:
                step(*batch)
        first = next(iter(means.values()))
        for mode, mean in means.items():
            torch.testing.assert_close(mean, first, msg=lambda m, mode=mode: f"{mode}: {m}")
        cpu: dict[str, list[float]] = {mode: [] for mode in modes}
        times = in_rounds({mode: timed(step, cpu[mode]) for mode, step in steps.items()}, batch, args.warmup, args.rounds)
        for mode in modes:
            out[f"{name}: {mode}"] = {
                "seconds": times[mode],
                "cpu seconds": statistics.median(cpu[mode][args.warmup :]),
                "operators": works[mode].dispatched,
                "moved bytes": works[mode].moved,
                "peak bytes": peaks[mode],
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank")
    add_output_options(parser)
    args = parser.parse_args()
    found = on_ranks(measure, args)
    times = {mode: values.pop("seconds") for mode, values in found.items()}
    rows = []
    for mode, values in found.items():
        model = mode.partition(":")[0]
        ratios = ratio(times, mode, f"{model}: {next(iter(MODES[model]))}")
        values |= over("torch", ratios)
        cells = ["{1:.3f} ({0:.3f}-{2:.3f})".format(*ratios), f"{statistics.median(times[mode]) * 1e3:.1f}"]
        cells += [f"{values['cpu seconds'] * 1e3:.1f}", f"{values['operators']}"]
        rows.append([mode, *cells, f"{values['moved bytes'] / 1e6:.2f}", f"{values['peak bytes'] / 1e6:.1f}"])
    head = ["mode", "over torch", "median ms", "cpu ms", "operators", "moved MB", "peak MB"]
    report(head, rows, found, args)


if __name__ == "__main__":
    main()
