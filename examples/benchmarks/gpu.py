"""A training step of a Llama on one GPU: time, launch time, peak memory and copies, beside FSDP2.

    python examples/benchmarks/gpu.py                       (CUDA and NCCL, one billion parameters in bf16)
    python examples/benchmarks/gpu.py --modes plain,FSDP2,fs --rounds 20 --json gpu.json
    python examples/benchmarks/gpu.py --device cpu --layers 2 --dim 64 --ffn 128 --seq 16 --compiler aot_eager

Everything twice: with one rank, where all collectives are elided and what is left is the same code path, and on a fake
process group of 8, whose collectives return at once. On the latter values mean nothing and no communication is timed;
memory, copies and the CPU's work are what a rank of 8 has. One GPU says nothing about overlap.

A step is forward, loss and backward up to reduced gradients; no optimizer. Every round runs each mode once, in an order
drawn anew; "over" another mode is the median of the ratios within rounds, its spread their middle half. Times are those
of CUDA events; "launch ms" is until the step's Python returns, the device still at work. "peak MB" is the allocator's
maximum during a step with no other mode on the device, parameters included. "copied" is what copies and concatenations
write beyond the plain step's, over the bytes of the parameters; unknown where a compiler hides it.

"FSDP2 compiled" compiles each block before `fully_shard`, "fs compiled" is the whole step in one graph by `fs.compile`.
A mode that fails says so in its row.
"""

import argparse
import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import Llama, LlamaBlock, Step, fake_world, fsdp2, funshard, plain, quartiles
from counted import work_of
from report import add_output_options, report
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh

import funshard as fs

Build = Callable[[nn.Module, DeviceMesh, str], Step]


def fsdp2_compiled(model: nn.Module, mesh: DeviceMesh, compiler: str) -> Step:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, fullgraph=True, backend=compiler)
    return fsdp2(model, mesh)


def sharded(p: fs.P, grad: Callable[..., Any] = fs.grad_and_value) -> Build:
    return lambda model, mesh, compiler: funshard(model, fs.by_type(LlamaBlock, p=p)(model).on(mesh), grad)


def fs_compiled(model: nn.Module, mesh: DeviceMesh, compiler: str) -> Step:
    return fs.compile(sharded(fs.P("shard"))(model, mesh, compiler), backend=compiler)


MODES: dict[str, Build] = {
    "plain": lambda model, mesh, compiler: plain(model),
    "FSDP2": lambda model, mesh, compiler: fsdp2(model, mesh),
    "FSDP2 compiled": fsdp2_compiled,
    "fs": sharded(fs.P("shard")),
    "fs keep": sharded(fs.P("shard", reshard=False)),
    "fs compiled": fs_compiled,
    "fs torch.func": sharded(fs.P("shard"), torch.func.grad_and_value),
}
BASES = ["plain", "FSDP2"]


class Device:
    """The clock, the memory and the queue of a device."""

    def __init__(self, name: str) -> None:
        self.name, self.cuda = name, torch.device(name).type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, f: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of the device, and until f returns."""
        self.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else []
        start = time.perf_counter()
        if self.cuda:
            events[0].record()
        f()
        launch = (time.perf_counter() - start) * 1e3
        if not self.cuda:
            return launch, launch
        events[1].record()
        self.synchronize()
        return events[0].elapsed_time(events[1]), launch

    def peak(self, f: Callable[[], object]) -> int | None:
        """The most bytes that are allocated while f runs, what is there before included; None off CUDA."""
        if not self.cuda:
            f()
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        f()
        self.synchronize()
        return torch.cuda.max_memory_allocated()

    def clear(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.cuda:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def one_rank(args: argparse.Namespace) -> Iterator[None]:
    dist.init_process_group(args.backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Part:
    """All modes on one kind of process group."""

    def __init__(self, args: argparse.Namespace, ranks: int) -> None:
        self.args, self.device = args, Device(args.device)
        self.mesh = init_device_mesh(torch.device(args.device).type, (ranks,))
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randint(args.vocab, (2, args.batch, args.seq), generator=generator).to(args.device)
        self.batch: tuple[Tensor, Tensor] = (x, y)
        self.failed: dict[str, str] = {}

    def build(self, mode: str) -> Step:
        args = self.args
        torch.manual_seed(0)
        with torch.device(args.device):
            model = Llama(args.layers, args.dim, args.heads, args.ffn, args.vocab)
        return MODES[mode](model.to(getattr(torch, args.dtype)), self.mesh, args.compiler)

    def attempt(self, mode: str, f: Callable[[], Any]) -> Any:
        """What f gives, or None and a note where it or an earlier attempt of the mode fails."""
        if mode in self.failed:
            return None
        try:
            return f()
        except Exception as error:  # a mode that this torch or this device cannot run leaves the others be
            self.failed[mode] = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            return None

    def alone(self, mode: str) -> dict[str, Any]:
        """Peak memory, and what is copied, with nothing else on the device."""
        step = self.build(mode)
        for _ in range(2):
            step(*self.batch)
        peak = self.device.peak(lambda: step(*self.batch))
        return {"peak bytes": peak, "copied bytes": None if "compiled" in mode else work_of(step, *self.batch).copied}

    def times(self, modes: list[str]) -> dict[str, list[tuple[float, float]]]:
        """Milliseconds of the device and of the launch, round by round."""
        steps = {mode: self.attempt(mode, lambda mode=mode: self.build(mode)) for mode in modes}
        times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        order, shuffled = random.Random(0), list(modes)
        for round_ in range(self.args.warmup + self.args.rounds):
            order.shuffle(shuffled)
            for mode in shuffled:
                one = self.attempt(mode, lambda mode=mode: self.device.timed(lambda: steps[mode](*self.batch)))
                if one and round_ >= self.args.warmup:
                    times[mode].append(one)
        return times

    def figures(self, modes: list[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for mode in modes:
            found[mode] = self.attempt(mode, lambda mode=mode: self.alone(mode)) or {}
            self.device.clear()
        times = self.times([mode for mode in modes if mode not in self.failed])
        self.device.clear()
        with torch.device("meta"):
            model = Llama(self.args.layers, self.args.dim, self.args.heads, self.args.ffn, self.args.vocab)
        size = sum(p.numel() for p in model.parameters()) * getattr(torch, self.args.dtype).itemsize
        base_copied = found.get("plain", {}).get("copied bytes")
        for mode, one in found.items():
            if mode in self.failed:
                found[mode] = {"failed": self.failed[mode]}
                continue
            mine = times[mode]
            one.update({"ms": statistics.median(ms for ms, _ in mine), "launch ms": statistics.median(ms for _, ms in mine)})
            for base in BASES:
                if base in times and base not in self.failed:
                    one[f"over {base}"] = quartiles([a / b for (a, _), (b, _) in zip(mine, times[base], strict=True)])
            if one["copied bytes"] is not None and base_copied is not None:
                one["copied"] = (one["copied bytes"] - base_copied) / size
        return found


def rows_of(part: str, found: dict[str, dict[str, Any]]) -> list[list[str]]:
    def over(one: dict[str, Any], base: str) -> str:
        return "{1:.3f} ({0:.2f}-{2:.2f})".format(*one[f"over {base}"]) if f"over {base}" in one else "-"

    rows = []
    for mode, one in found.items():
        if "failed" in one:
            rows.append([mode, part, *["-"] * (len(HEAD) - 3), f"failed: {one['failed']}"])
            continue
        peak = "-" if one["peak bytes"] is None else f"{one['peak bytes'] / 1e6:.0f}"
        copied = f"{one['copied']:.2f}" if "copied" in one else "-"
        rows.append([mode, part, *(over(one, b) for b in BASES), f"{one['ms']:.1f}", f"{one['launch ms']:.1f}", peak, copied])
    return rows


HEAD = ["mode", "ranks", *(f"over {base} (spread)" for base in BASES), "ms", "launch ms", "peak MB", "copied"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="of the one rank; nccl on CUDA, gloo elsewhere, if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compiler", default="inductor", help="torch.compile's backend")
    parser.add_argument("--parts", default="1,8", help="1: one rank; another number: a fake process group of so many")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048)
    add_output_options(parser)
    args = parser.parse_args()
    args.backend = args.backend or ("nccl" if torch.device(args.device).type == "cuda" else "gloo")
    if torch.device(args.device).type == "cuda":
        torch.cuda.set_device(torch.device(args.device).index or 0)
    else:
        torch.set_num_threads(1)
    rows, figures = [], {}
    for ranks in map(int, args.parts.split(",")):
        with one_rank(args) if ranks == 1 else fake_world(ranks):
            found = Part(args, ranks).figures(args.modes.split(","))
        figures[str(ranks)] = found
        rows += rows_of(f"{ranks}" if ranks == 1 else f"{ranks} fake", found)
    report(HEAD, rows, figures, args)


if __name__ == "__main__":
    main()
