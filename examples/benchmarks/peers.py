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

The compiled modes run if they are asked for (--modes 'plain,plain compiled,fs,fs compiled,FSDP2,FSDP2 compiled'):
inductor takes a minute or more for each. "plain compiled" is torch.compile of the model, "FSDP2 compiled" of each block
before `fully_shard`, "fs units compiled" is ``P("shard", compile=True)``, "fs compiled" is the whole step by
`fs.compile`, and "fs compiled remat" that with ``P(remat=True)``. So do the modes that run each block again in backward
(--modes 'FSDP2 remat,fs remat,fs torch.func remat'): torch.utils.checkpoint for torch, ``P(remat=True)`` for funshard;
those with "save" keep what attention made ("save attention"), or that and all products ("save products"), and run the
rest again, by torch's selective checkpointing and by ``P(remat=Remat(save=...))``; try them on a long batch (--seq 512
--batch 8). And those that gather and compute in bf16 and reduce in float32 (--modes 'plain,plain bf16,FSDP2,FSDP2
bf16,fs,fs bf16'), with the parameters of norms in float32 in the same gathers ("keep") or in units of their own
("apart"). "reduce bf16" adds gradients in bf16; "codec" sends them in bf16 or int8 and adds them in float32. "by 2" and
"by 4" are units of so many blocks. "halves" (--ranks 4) are slices over all ranks in forward, and over half of them in
backward. Those "unchecked" leave out that ranks compare their collectives (--modes 'fs,fs unchecked,fs keep,fs keep
unchecked'): the column "unchecked" is a mode's time over that of the same mode without it. Those with "check" run
inside of `funshard.check` (--modes 'fs,fs check'). Those with "AdamW" also update (--modes 'FSDP2 AdamW,fs AdamW,fs
compiled + AdamW,fs compiled AdamW'): by torch's fused kernels, in the memory of the old parameters and state, or inside
the graph of `fs.compile`.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from common import GPT
from measured import Batch, in_rounds, on_ranks, over, peak_bytes_compiled, peaks_of_steps, ratio
from peer_modes import ALL, CHECKED, COMPILED, MODES, UNCHECKED
from report import add_model_options, add_output_options, report
from torch import nn


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
    add_model_options(parser)
    add_output_options(parser)
    args = parser.parse_args()
    result = on_ranks(measure, args)
    times, peaks = result["times"], result["peaks"]
    modes = args.modes.split(",")
    bases = [base for base in ("FSDP2", "FSDP2 compiled", "DDP", "plain", "FSDP2 AdamW") if base in modes]
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
