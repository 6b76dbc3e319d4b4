"""How the costs that do not depend on the size of tensors grow with units and ranks.

    python examples/benchmarks/scale.py
    python examples/benchmarks/scale.py --units 10,100 --ranks 8,64 --no-llama --rounds 3
    python examples/benchmarks/scale.py --json scale.json

"spec": the policy on a module on the meta device; "on": the spec on a mesh of so many ranks, by sizes, and the length of
every slice; "str": the table of the spec. They need no process group, so any number of ranks will do; "Llama 405B" is
its shapes (126 layers) on 16,384 ranks. The rest is on a fake process group of 8, with tensors so small that only Python
counts: "shard"; "forward" is functional_call under no_grad; "step" is fs.grad, forward and backward, and "step P()" the
same with replicated units. Of these the time of the plain module is subtracted, round by round. All are medians over
rounds, with Python's cyclic garbage collector off, as in timeit; "per unit" should stay what it is as units are added.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from common import GPT, Block, Llama, LlamaBlock, fake_world, funshard, loss_of, plain
from report import add_output_options, report
from torch import nn
from torch.distributed import init_device_mesh

import funshard as fs

NAMES = ["what", "units", "ranks", "ms", "us per unit"]


def seconds(f: Callable[[], object]) -> float:
    gc.disable()
    start = time.perf_counter()
    f()
    took = time.perf_counter() - start
    gc.enable()
    return took


def median(f: Callable[[], object], rounds: int) -> float:
    f()
    return statistics.median(seconds(f) for _ in range(rounds))


def beyond(f: Callable[[], object], base: Callable[[], object], rounds: int) -> float:
    """The median over rounds of how much longer f takes."""
    f(), base()
    return statistics.median(seconds(f) - seconds(base) for _ in range(rounds))


def tiny(units: int) -> nn.Module:
    """A GPT of width 8 with so many units, of 12 parameters but for the root's 5."""
    return GPT(units - 1, 8, 1, 4)


def spec_rows(what: str, model: nn.Module, kind: type[nn.Module], worlds: list[int], rounds: int) -> list[dict]:
    policy = fs.by_type(kind)
    spec = policy(model)

    def on(ranks: int) -> int:
        bound = spec.on({"shard": ranks})
        return sum(bound.shard_numel(unit) for unit in bound)

    def row(name: str, ranks: int | None, f: Callable[[], object]) -> dict:
        return {"what": what + name, "units": len(spec), "ranks": ranks, "seconds": median(f, rounds)}

    return [
        row("spec", None, lambda: policy(model)),
        *(row("on", ranks, lambda ranks=ranks: on(ranks)) for ranks in worlds),
        *(row("str", ranks, lambda ranks=ranks: str(spec.on({"shard": ranks}))) for ranks in worlds[-1:]),
    ]


def call_rows(units: int, rounds: int) -> list[dict]:
    x, y = torch.randint(256, (2, 1, 4))
    reference, model = tiny(units), tiny(units)
    spec = fs.by_type(Block)(model).on(init_device_mesh("cpu", (8,)))
    sharding = median(lambda: fs.shard(model, spec), rounds)
    params = fs.shard(model, spec)
    base, step = plain(reference), funshard(model, spec)
    replicated = funshard(tiny(units), fs.by_type(Block, p=fs.P())(model).on(init_device_mesh("cpu", (8,))))

    def row(what: str, time: float) -> dict:
        return {"what": what, "units": len(spec), "ranks": 8, "seconds": time}

    with torch.no_grad():
        forward = beyond(
            lambda: loss_of(fs.functional_call(model, params, (x,), spec=spec), y), lambda: loss_of(reference(x), y), rounds
        )
    return [
        row("shard", sharding),
        row("forward", forward),
        row("step", beyond(lambda: step(x, y), lambda: base(x, y), rounds)),
        row("step P()", beyond(lambda: replicated(x, y), lambda: base(x, y), rounds)),
    ]


def llama_405b() -> nn.Module:
    with torch.device("meta"):
        return Llama(126, 16384, 128, 53248, 128256, kv_heads=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", default="10,100,1000")
    parser.add_argument("--ranks", default="8,64,1024,16384")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-llama", dest="llama", action="store_false")
    add_output_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    many, worlds = [int(n) for n in args.units.split(",")], [int(n) for n in args.ranks.split(",")]
    found: list[dict] = []
    for units in many:
        with torch.device("meta"):
            model = tiny(units)
        found += spec_rows("", model, Block, worlds, args.rounds)
    if args.llama:
        found += spec_rows("Llama 405B: ", llama_405b(), LlamaBlock, [16384], args.rounds)
    with fake_world(8):
        for units in many:
            found += call_rows(units, args.rounds)
    rows = []
    for one in sorted(found, key=lambda one: "Llama" in one["what"]):
        one["us per unit"] = one["seconds"] * 1e6 / one["units"]
        ranks = "-" if one["ranks"] is None else f"{one['ranks']:,}"
        rows.append([one["what"], f"{one['units']:,}", ranks, f"{one['seconds'] * 1e3:.2f}", f"{one['us per unit']:.1f}"])
    report(NAMES, rows, found, args)


if __name__ == "__main__":
    main()
