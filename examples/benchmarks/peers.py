"""A training step of funshard beside torch's own data parallel trainers, in one run: time and peak memory.

    python examples/benchmarks/peers.py                     (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/peers.py --ranks 1 --modes plain,fs
    python examples/benchmarks/peers.py --rounds 40 --json peers.json

A step is forward, loss and backward of an 8-block GPT of 14 million parameters in fp32, up to gradients that are
reduced over the ranks; no optimizer. Every round runs each mode once, in an order drawn anew, and what is reported are
medians over rounds of the ratio to another mode *in the same round*: a shared machine has no other honest figure. The
"spread" is the middle half of those ratios. Peak bytes are the most that one rank's tensors hold during a step, from
the profiler's record of every allocation, at rest (parameters, shards, buckets) included; measured apart from the time.

"plain" is autograd on each rank's own batch without any communication: the limit.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import GPT, Block, free_port
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import funshard as fs

Step = Callable[[Tensor, Tensor], object]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def backward_of(model: nn.Module) -> Step:
    """The step of a module that reduces its gradients by itself."""

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad = None

    return step


def plain(model: nn.Module) -> Step:
    return backward_of(model)


def ddp(model: nn.Module) -> Step:
    return backward_of(nn.parallel.DistributedDataParallel(model))


def fsdp1(model: nn.Module) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return backward_of(
        FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    )


def fsdp2(reshard: bool) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        return backward_of(fully_shard(model, reshard_after_forward=reshard))

    return build


def funshard(p: fs.P, grad: Callable = fs.grad_and_value) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block, p=p)(model).bound
        params = fs.shard(model, spec)
        model.to("meta")

        def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(fs.functional_call(model, params, (x,), spec=spec), y)

        return lambda x, y: grad(loss)(params, x, y)

    return build


MODES: dict[str, Callable[[nn.Module], Step]] = {
    "plain": plain,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2(reshard=True),
    "FSDP2 keep": fsdp2(reshard=False),
    "fs": funshard(fs.P("shard")),
    "fs keep": funshard(fs.P("shard", reshard=False)),
    "fs P()": funshard(fs.P()),
    "fs torch.func": funshard(fs.P("shard"), torch.func.grad_and_value),
}


def peak_bytes(build: Callable[[nn.Module], Step], make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> int:
    """The most bytes that tensors hold in a step, after one to warm up; what is at rest included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = build(make())
        step(*batch)
        with torch.profiler.record_function("measured"):
            step(*batch)
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == "measured")
    held, peak = 0, 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if event.start_ns() >= begin:
                peak = max(peak, held)
    return peak


def run(rank: int, args: argparse.Namespace, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    try:
        result = measure(rank, args)
        if rank == 0:
            with open(out, "w") as file:
                json.dump(result, file)
    finally:
        dist.destroy_process_group()


def measure(rank: int, args: argparse.Namespace) -> dict:
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randint(256, (2, args.batch, args.seq), generator=generator)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, args.heads, args.seq)

    modes = args.modes.split(",")
    peaks = {mode: peak_bytes(MODES[mode], make, (x, y)) for mode in modes} if args.memory else {}
    steps = {mode: MODES[mode](make()) for mode in modes}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    order = random.Random(0)
    for round_ in range(args.warmup + args.rounds):
        order.shuffle(modes)
        for mode in modes:
            dist.barrier()
            start = time.perf_counter()
            steps[mode](x, y)
            dist.barrier()
            if round_ >= args.warmup:
                times[mode].append(time.perf_counter() - start)
    return {"times": times, "peaks": peaks, "parameters": sum(p.numel() for p in make().parameters())}


def ratio(times: dict[str, list[float]], mode: str, base: str) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile of the ratios within rounds."""
    ratios = [a / b for a, b in zip(times[mode], times[base], strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", help="where to write the figures; printed as one line if not given")
    args = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        mp.start_processes(run, (args, free_port(), out), nprocs=args.ranks, start_method="spawn")
        with open(out) as file:
            result = json.load(file)
    times, peaks = result["times"], result["peaks"]
    modes = args.modes.split(",")
    bases = [base for base in ("FSDP2", "DDP", "plain") if base in modes]
    print(f"{result['parameters']:,} parameters, {args.ranks} ranks, torch {torch.__version__}; step time over ...")
    head = ["mode", *(f"{base} (spread)" for base in bases), "median ms", "peak MB"]
    rows = [head]
    for mode in modes:
        cells = ["{1:.3f} ({0:.2f}-{2:.2f})".format(*ratio(times, mode, base)) for base in bases]
        peak = f"{peaks[mode] / 1e6:.1f}" if peaks else "-"
        rows.append([mode, *cells, f"{statistics.median(times[mode]) * 1e3:.0f}", peak])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print(
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        )
    figures = {
        mode: {
            **{f"over {base}": round(ratio(times, mode, base)[1], 4) for base in bases},
            "peak bytes": peaks.get(mode),
        }
        for mode in modes
    }
    text = json.dumps({"benchmark": "peers", "torch": torch.__version__, "arguments": vars(args), "figures": figures})
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
