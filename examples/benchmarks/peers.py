"""A training step of funshard beside torch's own data parallel trainers, in one run: time and peak memory.

    python examples/benchmarks/peers.py                     (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/peers.py --ranks 1 --modes plain,fs
    python examples/benchmarks/peers.py --rounds 40 --json peers.json

A step is forward, loss and backward of an 8-block GPT of 14 million parameters in fp32, up to gradients that are
reduced over the ranks; no optimizer. Every round runs each mode once, in an order drawn anew, and what is reported are
medians over rounds of the ratio to another mode *in the same round*: a shared machine has no other honest figure. The
"spread" is the middle half of those ratios. Peak bytes are the most that one rank's tensors hold during a step, from
the profiler's record of every allocation, at rest (parameters, shards, buckets) included; taken apart from the time.

"plain" is autograd on each rank's own batch without any communication: the limit; "plain torch.func" is that of a
torch.func.grad_and_value.

The compiled modes run if they are asked for (--modes 'plain,plain compiled,fs,fs compiled,FSDP2,FSDP2 compiled'): inductor
takes a minute or more for each. "plain compiled" is torch.compile of the model, "FSDP2 compiled" of each block before
`fully_shard`, "fs compiled" is the whole step by `fs.compile`. So do the modes that run each block again in backward
(--modes 'FSDP2 remat,fs remat,fs torch.func remat'): torch.utils.checkpoint for torch, ``P(remat=True)`` for funshard; those
with "save" keep what attention made ("save attention"), or that and all products ("save products"), and run the rest again,
by torch's selective checkpointing and by ``P(remat=Remat(save=...))``; try them on a long batch (--seq 512 --batch 8). And
those that gather and compute in bf16 and reduce in float32 (--modes 'plain,plain bf16,FSDP2,FSDP2 bf16,fs,fs bf16').
"""

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import BF16, GPT, Block, Step, free_port, fsdp2, funshard, loss_of, plain, quartiles, report
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import funshard as fs
from funshard._compiled.step import compile


def plain_functional(model: nn.Module) -> Step:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, params, (x,)), y)

    step = torch.func.grad_and_value(loss)
    return lambda x, y: step(params, x, y)


def ddp(model: nn.Module) -> Step:
    return plain(nn.parallel.DistributedDataParallel(model))


def fsdp1(model: nn.Module) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return plain(FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")))


def sharded(p: fs.P, grad: Callable = fs.grad_and_value) -> Callable[[nn.Module], Step]:
    return lambda model: funshard(model, fs.by_type(Block, p=p)(model).bound, grad)


def compiled(p: fs.P) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block, p=p)(model).bound
        params = fs.shard(model, spec)
        model.to("meta")

        def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(fs.functional_call(model, params, (x,), spec=spec), y)

        step = compile(fs.grad_and_value(loss))
        return lambda x, y: step(params, x, y)

    return build


def checkpointed(build: Callable[[nn.Module], Step], save: list | None = None) -> Callable[[nn.Module], Step]:
    options = {} if save is None else {"context_fn": functools.partial(create_selective_checkpoint_contexts, save)}

    def wrapped(model: nn.Module) -> Step:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        return build(model)

    return wrapped


def plain_compiled(model: nn.Module) -> Step:
    return plain(torch.compile(model, fullgraph=True))


def fsdp2_compiled(model: nn.Module) -> Step:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, fullgraph=True)
    return fully_sharded(reshard=True)(model)


def fully_sharded(reshard: bool, precision: fs.Precision | None = None) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        return fsdp2(model, mesh, reshard=reshard, precision=precision)

    return build


MODES: dict[str, Callable[[nn.Module], Step]] = {
    "plain": plain,
    "plain torch.func": plain_functional,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fully_sharded(reshard=True),
    "FSDP2 keep": fully_sharded(reshard=False),
    "fs": sharded(fs.P("shard")),
    "fs keep": sharded(fs.P("shard", reshard=False)),
    "fs P()": sharded(fs.P()),
    "fs torch.func": sharded(fs.P("shard"), torch.func.grad_and_value),
}
COMPILED: dict[str, Callable[[nn.Module], Step]] = {
    "plain compiled": plain_compiled,
    "FSDP2 compiled": fsdp2_compiled,
    "fs compiled": compiled(fs.P("shard")),
    "fs keep compiled": compiled(fs.P("shard", reshard=False)),
}
ATTENTION = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
PRODUCTS = [*ATTENTION, torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
REMAT: dict[str, Callable[[nn.Module], Step]] = {
    "plain remat": checkpointed(plain),
    "FSDP2 remat": checkpointed(fully_sharded(reshard=True)),
    "fs remat": sharded(fs.P("shard", remat=True)),
    "fs torch.func remat": sharded(fs.P("shard", remat=True), torch.func.grad_and_value),
    "FSDP2 save attention": checkpointed(fully_sharded(reshard=True), ATTENTION),
    "fs save attention": sharded(fs.P("shard", remat=fs.Remat(ATTENTION))),
    "FSDP2 save products": checkpointed(fully_sharded(reshard=True), PRODUCTS),
    "fs save products": sharded(fs.P("shard", remat=fs.Remat(PRODUCTS))),
}
LOW: dict[str, Callable[[nn.Module], Step]] = {
    "plain bf16": lambda model: plain(model.bfloat16()),
    "FSDP2 bf16": fully_sharded(reshard=True, precision=BF16),
    "fs bf16": sharded(fs.P("shard", precision=BF16)),
    "fs P() bf16": sharded(fs.P(precision=BF16)),
}
ALL = MODES | COMPILED | REMAT | LOW


def peak_bytes(build: Callable[[nn.Module], Step], make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> int:
    """The most bytes that tensors hold in a step, after one to warm up; what is at rest included."""
    if build in COMPILED.values():
        return peak_bytes_compiled(build, make, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = build(make())
        step(*batch)
        with torch.profiler.record_function("measured"):
            step(*batch)
    begin = next(event.start_ns() for event in record.profiler.kineto_results.events() if event.name() == "measured")
    return max(bytes_ for at, bytes_ in held(record) if at >= begin)


def peak_bytes_compiled(build: Callable[[nn.Module], Step], make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> int:
    """The same, with the first step, which compiles, between two records: the profiler miscounts meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as building:
        step = build(make())
    step(*batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as stepping:
        step(*batch)
    return held(building)[-1][1] + max(bytes_ for _, bytes_ in held(stepping))


def held(record: profile) -> list[tuple[int, int]]:
    """When memory was allocated or released, and how many bytes more than at the start of the record are held then."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return list(zip((e.start_ns() for e in events), itertools.accumulate(e.nbytes() for e in events), strict=True))


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
    peaks = {mode: peak_bytes(ALL[mode], make, (x, y)) for mode in modes} if args.memory else {}
    steps = {mode: ALL[mode](make()) for mode in modes}
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
    return quartiles([a / b for a, b in zip(times[mode], times[base], strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(ALL))
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", help="where to write the figures; printed as one line if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        mp.start_processes(run, (args, free_port(), str(out)), nprocs=args.ranks, start_method="forkserver")
        result = json.loads(out.read_text())
    times, peaks = result["times"], result["peaks"]
    modes = args.modes.split(",")
    bases = [base for base in ("FSDP2", "DDP", "plain") if base in modes]
    rows, figures = [], {}
    for mode in modes:
        cells = ["{1:.3f} ({0:.2f}-{2:.2f})".format(*ratio(times, mode, base)) for base in bases]
        milliseconds = f"{statistics.median(times[mode]) * 1e3:.0f}"
        rows.append([mode, *cells, milliseconds, f"{peaks[mode] / 1e6:.1f}" if peaks else "-"])
        over = {f"over {base}": round(ratio(times, mode, base)[1], 4) for base in bases}
        figures[mode] = {**over, "peak bytes": peaks.get(mode)}
    print(f"{result['parameters']:,} parameters, {args.ranks} ranks; step time over ... (spread)")
    report(["mode", *bases, "median ms", "peak MB"], rows, figures, args)


if __name__ == "__main__":
    main()
