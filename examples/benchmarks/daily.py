"""What surrounds a step, beside torch's own: norms, skipped steps, 8-bit states, unequal work, samples and schedules.

    python examples/benchmarks/daily.py
    python examples/benchmarks/daily.py --parts norms,finite --rounds 8

Two gloo ranks with a GPT of 14 million fp32 parameters. Each part compares modes that do one thing, with the first as its base:
"over" are medians over rounds of the ratio within a round, with the middle half of those ratios. Collectives are those of one
run, by torch's dispatcher, which does not see those of DDP. Peaks are the profiler's, as in peers.py.

"norms": that of each gradient, by name. "finite": AdamW, and AdamW that skips a step if a gradient is not finite. "rules: SGD"
and others: torch's foreach kernels on FSDP2's parameters and on slices, and the pure rule. "state": AdamW with its moments in
float32 and in 8 bits, and what the state holds; those of bitsandbytes and torchao run if they are installed, on the same
slices. "join": four steps on each rank, and four on the first and two on the other. "samples": the indices of an epoch of a
million samples, and of a step in its middle after a restart. "schedule": a thousand learning rates.
"""

import argparse
import statistics
import warnings
from typing import Any

import torch
from common import GPT
from counted import Work
from daily_modes import PARTS
from measured import in_rounds, on_ranks, over, peaks_of_steps, ratio
from report import add_output_options, report
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def state_bytes(state: object) -> int:
    """Bytes of the tensors of an optimizer's state, those inside of other packages' tensors too."""
    tensors = (x for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
    return sum(inner.nbytes for x in tensors for inner in inner_tensors(x))


def inner_tensors(x: Tensor) -> list[Tensor]:
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]] if hasattr(x, "__tensor_flatten__") else [x]


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(rank)
    batch: tuple[Tensor, Tensor] = tuple(torch.randint(256, (2, 1, args.seq), generator=generator))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, args.heads, args.seq)

    found: dict[str, Any] = {}
    for part in args.parts.split(","):
        modes, known = PARTS[part], dict[str, Any]()
        if args.memory and part in HAVE_PEAKS:
            known["peak bytes"] = {name: max(peaks_of_steps(build, make, batch, 1)) for name, build in modes.items()}
        steps = {name: build(make()) for name, build in modes.items()}
        results = {name: step(*batch) for name, step in steps.items()}
        if part == "state":
            known["state bytes"] = {name: state_bytes(result) for name, result in results.items()}
        if part in HAVE_COLLECTIVES:
            known["collectives"] = {}
            for name, step in steps.items():
                with Work() as work:
                    step(*batch)
                known["collectives"][name] = work.collectives
        found[part] = {"times": in_rounds(steps, batch, args.warmup, args.rounds), "known": known}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=128)
    add_output_options(parser)
    args = parser.parse_args()
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    for part, found in on_ranks(measure, args).items():
        times, known = found["times"], found["known"]
        base = next(iter(times))
        for mode, seconds in times.items():
            quarters = ratio(times, mode, base)
            one = {"ms": statistics.median(seconds) * 1e3, **over("the first", quarters)}
            one |= {name: some[mode] for name, some in known.items()}
            figures.setdefault(part, {})[mode] = one
            cells = [f"{one['ms']:.2f}", "{1:.2f} ({0:.2f}-{2:.2f})".format(*quarters)]
            cells += [text.format(one[name]) if name in one else "-" for name, text in COLUMNS.items()]
            rows.append([f"{part}: {mode}", *cells])
    report(["", "ms", "over the first", *COLUMNS], rows, figures, args)


COLUMNS = {"collectives": "{}", "state bytes": "{:,}", "peak bytes": "{:,}"}
HAVE_COLLECTIVES = {"norms", "finite"}
HAVE_PEAKS = PARTS.keys() - {"samples", "schedule"}


if __name__ == "__main__":
    main()
