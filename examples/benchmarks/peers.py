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
`fully_shard`, "fs units compiled" is ``P("shard", compile=True)``, "fs compiled" is the whole step by `fs.compile`, and "fs
compiled remat" that with ``P(remat=True)``. So do the modes that run each block again in backward (--modes 'FSDP2 remat,fs
remat,fs torch.func remat'): torch.utils.checkpoint for torch, ``P(remat=True)`` for funshard; those with "save" keep what
attention made ("save attention"), or that and all products ("save products"), and run the rest again, by torch's selective
checkpointing and by ``P(remat=Remat(save=...))``; try them on a long batch (--seq 512 --batch 8). And those that gather and
compute in bf16 and reduce in float32 (--modes 'plain,plain bf16,FSDP2,FSDP2 bf16,fs,fs bf16'). Those "unchecked" leave out
that ranks compare their collectives (--modes 'fs,fs unchecked,fs keep,fs keep unchecked'): the column "unchecked" is a mode's
time over that of the same mode without it. Those with "check" run inside of `funshard.check` (--modes 'fs,fs check'). Those
with "AdamW" also update (--modes 'FSDP2 AdamW,fs AdamW,fs compiled + AdamW,fs compiled AdamW'): by torch's fused kernels, in
the memory of the old parameters and state, or inside the graph of `fs.compile`.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from common import (
    ATTENTION,
    BF16,
    GPT,
    PRODUCTS,
    Block,
    Step,
    checkpointed,
    compared,
    fully_sharded,
    loss_of,
    plain,
    sharded,
)
from measured import Batch, in_rounds, on_ranks, over, peak_bytes_compiled, peaks_of_steps, ratio
from report import add_output_options, report
from torch import Tensor, nn

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


def plain_compiled(model: nn.Module) -> Step:
    return plain(torch.compile(model, fullgraph=True))


def fsdp2_compiled(model: nn.Module) -> Step:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, fullgraph=True)
    return fully_sharded(reshard=True)(model)


def fsdp2_adamw(model: nn.Module) -> Step:
    fully_sharded(reshard=True)(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(*, compile_grad: bool = False, compile_step: bool = False) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block)(model).bound
        init, update = fs.optim.from_torch(torch.optim.AdamW, fused=True, donate=not compile_step)
        params = fs.shard(model, spec)
        model.to("meta")
        grad = fs.grad_and_value(lambda p, x, y: loss_of(fs.functional_call(model, p, (x,), spec=spec), y))
        grad = compile(grad) if compile_grad else grad

        def train(params: fs.Params, state: object, x: Tensor, y: Tensor) -> tuple:
            grads, value = grad(params, x, y)
            return *update(grads, state, params), value

        train = compile(train, donate_argnums=(0, 1)) if compile_step else train
        known = [params, init(params)]

        def step(x: Tensor, y: Tensor) -> None:
            known[:] = train(*known, x, y)[:2]

        return step

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
    "fs units compiled": sharded(fs.P("shard", compile=True)),
    "fs units compiled keep": sharded(fs.P("shard", reshard=False, compile=True)),
    "fs units compiled remat": sharded(fs.P("shard", remat=True, compile=True)),
    "fs keep compiled": compiled(fs.P("shard", reshard=False)),
    "fs compiled remat": compiled(fs.P("shard", remat=True)),
}
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
UNCHECKED: dict[str, Callable[[nn.Module], Step]] = {
    "fs unchecked": sharded(fs.P("shard"), check_order=False),
    "fs keep unchecked": sharded(fs.P("shard", reshard=False), check_order=False),
    "fs P() unchecked": sharded(fs.P(), check_order=False),
}
CHECKED: dict[str, Callable[[nn.Module], Step]] = {
    "fs check": compared(sharded(fs.P("shard"))),
    "fs keep check": compared(sharded(fs.P("shard", reshard=False))),
    "fs P() check": compared(sharded(fs.P())),
}
ADAMW: dict[str, Callable[[nn.Module], Step]] = {
    "FSDP2 AdamW": fsdp2_adamw,
    "fs AdamW": adamw(),
}
COMPILED |= {"fs compiled + AdamW": adamw(compile_grad=True), "fs compiled AdamW": adamw(compile_step=True)}
ALL = MODES | COMPILED | REMAT | LOW | UNCHECKED | CHECKED | ADAMW


def peaks_of(mode: str, make: Callable[[], nn.Module], batch: Batch, steps: int) -> list[int]:
    """The peak of each of so many steps, of a compiled mode that of one."""
    if mode in COMPILED:
        return [peak_bytes_compiled(COMPILED[mode], make, batch)]
    return peaks_of_steps(ALL[mode], make, batch, steps)


def measure(rank: int, args: argparse.Namespace) -> dict:
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randint(256, (2, args.batch, args.seq), generator=generator)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, args.heads, args.seq)

    modes = args.modes.split(",")
    peaks = {mode: peaks_of(mode, make, (x, y), args.peaks) for mode in modes} if args.memory else {}
    times = in_rounds({mode: ALL[mode](make()) for mode in modes}, (x, y), args.warmup, args.rounds)
    return {"times": times, "peaks": peaks, "parameters": sum(p.numel() for p in make().parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(ALL))
    parser.add_argument("--peaks", type=int, default=5, help="steps whose peaks are taken")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    add_output_options(parser)
    args = parser.parse_args()
    result = on_ranks(measure, args)
    times, peaks = result["times"], result["peaks"]
    modes = args.modes.split(",")
    bases = [base for base in ("FSDP2", "DDP", "plain", "FSDP2 AdamW") if base in modes]
    if any(mode in UNCHECKED for mode in modes):
        bases.append("unchecked")
    bases += [mode.removesuffix(" check") for mode in modes if mode in CHECKED]
    rows, figures = [], {}
    for mode in modes:
        against = {base: f"{mode} {base}" if base == "unchecked" else base for base in bases}
        ratios = {base: ratio(times, mode, other) for base, other in against.items() if other in times}
        cells = ["{1:.3f} ({0:.3f}-{2:.3f})".format(*ratios[base]) if base in ratios else "" for base in bases]
        milliseconds = f"{statistics.median(times[mode]) * 1e3:.0f}"
        most = peaks.get(mode, [])
        megabytes = dict.fromkeys(f"{some(most) / 1e6:.1f}" for some in (min, max)) if most else ["-"]
        rows.append([mode, *cells, milliseconds, "-".join(megabytes)])
        figures[mode] = {"s": statistics.median(times[mode])}
        figures[mode] |= {"peak bytes": max(most, default=None), "least peak bytes": min(most, default=None)}
        for base, quarters in ratios.items():
            figures[mode] |= over(base, quarters)
    print(f"{result['parameters']:,} parameters, {args.ranks} ranks; step time over ... (spread)")
    report(["mode", *bases, "median ms", "peak MB"], rows, figures, args)


if __name__ == "__main__":
    main()
