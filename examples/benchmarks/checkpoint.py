"""Checkpoints beside DCP's own of an FSDP2 model, in one run: seconds to save and load, the stall of training, and peaks.

    python examples/benchmarks/checkpoint.py               (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/checkpoint.py --rounds 12 --json checkpoint.json

The model is a chain of square linears in float32, 1 GB by default, each a unit; the state is its parameters alone, as in
``torch.distributed.checkpoint.save({"model": get_model_state_dict(model)})``. Every round runs each mode once, in an order
drawn anew, into a directory of its own that is removed outside of the timed part. All files are flushed, ours as DCP's.

"load" reads into memory that is new in each round, as after a start: for FSDP2 a model on the meta device is given its memory
by ``to_empty``, and what either has freed goes back to the system before the clock starts. Page faults are most of a load: who
gets what it had touched before is up to three times as fast, by luck. "load, warm" has DCP read into the same tensors again and
again, which a resume does not. "stall" is how long an asynchronous save keeps training, "async" until it is written; the first
is a warm-up, in which memory for staging is made.

"peak" are the bytes of memory that a rank has at most beyond what it had before, by the system's count (VmHWM), each in
processes of their own; that of a load includes the loaded shards.
"""

import argparse
import ctypes
import random
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import quartiles
from measured import on_ranks, ratio
from report import add_output_options, report
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import funshard as fs

MODES = ["save: DCP", "save: fs", "load: DCP", "load: fs", "load, warm: DCP", "load: fs unchecked", "async: DCP", "async: fs"]
PEAKS = ["save: DCP", "save: fs", "load: DCP", "load: fs", "async: DCP", "async: fs"]
SHARE = 0.15
"""Of a synchronous save, that an asynchronous one keeps training at most."""


def chain(args: argparse.Namespace) -> nn.Module:
    return nn.Sequential(*(nn.Linear(args.dim, args.dim) for _ in range(args.layers)))


def fully_sharded(args: argparse.Namespace) -> nn.Module:
    """FSDP2's, on the meta device."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = chain(args)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


class Both:
    """The same model twice, and what each mode does with it; ``asked`` are the modes that will be run."""

    def __init__(self, args: argparse.Namespace, asked: list[str]) -> None:
        torch.manual_seed(0)
        self.args, self.stall = args, 0.0
        self.loaded: Any = None
        self.fresh: Any = None
        with torch.device("meta"):
            model = chain(args)
        self.spec = fs.by_type(nn.Linear)(model)
        self.params: fs.Params = {}
        self.theirs: dict[str, Any] = {}
        if any("fs" in mode and "load" not in mode for mode in asked):
            self.params = {unit.key: torch.randn(self.spec.bound.shard_numel(unit)) for unit in self.spec}
        if any("DCP" in mode and mode != "load: DCP" for mode in asked):
            model = fully_sharded(args).to_empty(device="cpu")
            for param in model.parameters():
                nn.init.normal_(param.to_local())  # pyright: ignore[reportAttributeAccessIssue]
            self.theirs = {"model": get_model_state_dict(model)}

    def run(self, mode: str, path: Path, saved: dict[str, Path]) -> None:
        """What is timed; ``saved`` are checkpoints to load."""
        start = time.perf_counter()
        match mode:
            case "save: DCP":
                dcp.save(self.theirs, checkpoint_id=path)
            case "save: fs":
                fs.checkpoint.save(path, {"model": self.params}, self.spec)
            case "load: DCP":
                model = self.fresh.to_empty(device="cpu")
                dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=saved["DCP"])
            case "load, warm: DCP":
                dcp.load(self.theirs, checkpoint_id=saved["DCP"])
            case "load: fs" | "load: fs unchecked":
                self.loaded = fs.checkpoint.load(saved["fs"], self.spec, check=not mode.endswith("unchecked"))
            case "async: DCP":
                future = dcp.async_save(self.theirs, checkpoint_id=path, process_group=self.background)
                self.stall = time.perf_counter() - start
                future.result()  # pyright: ignore[reportAttributeAccessIssue]
            case "async: fs":
                saving = fs.checkpoint.save(path, {"model": self.params}, self.spec, asynchronous=True)
                self.stall = time.perf_counter() - start
                saving.wait()

    def prepare(self, mode: str) -> None:
        """What is not timed."""
        self.loaded = self.fresh = None
        forget(4 * sum(map(self.spec.bound.shard_numel, self.spec)))
        if mode == "load: DCP":
            self.fresh = fully_sharded(self.args)
        if mode == "async: DCP" and not hasattr(self, "background"):
            self.background = dist.new_group(backend="gloo")


def forget(nbytes: int) -> None:
    """Hand free memory back to the system, which has as much of it at hand: of what a mode takes next, all is new to it."""
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    ctypes.CDLL(None).malloc_trim(0)


def agreed(value: str) -> str:
    """The first rank's."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


def removed(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each mode, one a round, and of the stalls."""
    warnings.simplefilter("ignore")
    modes, order = list(args.modes), random.Random(0)
    folder = Path(agreed(tempfile.mkdtemp(dir=args.folder) if rank == 0 else ""))
    both = Both(args, [*modes, "save: DCP", "save: fs"])
    saved = {"DCP": folder / "DCP", "fs": folder / "fs"}
    times: dict[str, list[float]] = {mode: [] for mode in modes} | {f"stall: {name}": [] for name in saved}
    try:
        for name, path in saved.items():
            both.run(f"save: {name}", path, saved)
        for round_ in range(args.warmup + args.rounds):
            order.shuffle(modes)
            for mode in modes:
                both.prepare(mode)
                dist.barrier()
                start = time.perf_counter()
                both.run(mode, folder / "new", saved)
                dist.barrier()
                taken = time.perf_counter() - start
                removed(folder / "new")
                if round_ >= args.warmup:
                    times[mode].append(taken)
                    if mode.startswith("async"):
                        times[f"stall: {mode.split(': ')[1]}"].append(both.stall)
    finally:
        removed(folder)
    return times


def peak(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Megabytes that one mode takes beyond what was there, in a new process; files are there for it to load."""
    warnings.simplefilter("ignore")
    folder = Path(agreed(tempfile.mkdtemp(dir=args.folder) if rank == 0 else ""))
    both = Both(args, [args.mode])
    saved = {"DCP": Path(args.saved, "DCP"), "fs": Path(args.saved, "fs")}
    both.prepare(args.mode)
    dist.barrier()
    try:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        both.run(args.mode, folder / "new", saved)
        return {args.mode: memory("VmHWM") - before}
    finally:
        removed(folder)


def save_both(rank: int, args: argparse.Namespace) -> dict[str, float]:
    warnings.simplefilter("ignore")
    both = Both(args, ["save: DCP", "save: fs"])
    for name in ("DCP", "fs"):
        both.run(f"save: {name}", Path(args.saved, name), {})
    return {}


def memory(what: str) -> float:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3


def peaks(args: argparse.Namespace) -> dict[str, float]:
    if not args.peaks:
        return {}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for_all = argparse.Namespace(**vars(args), saved=folder)
        on_ranks(save_both, for_all)
        for mode in PEAKS:
            found |= on_ranks(peak, argparse.Namespace(**vars(for_all), mode=mode))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--modes", default=MODES, type=lambda text: text.split(";"), help="some of them, with ; between")
    parser.add_argument("--no-peaks", dest="peaks", action="store_false")
    parser.add_argument("--folder", help="where the files go; a temporary directory by default")
    add_output_options(parser)
    args = parser.parse_args()
    times, most = on_ranks(measure, args), peaks(args)
    rows: list[list[str]] = []
    figures: dict[str, Any] = {"modes": {}, "limits": {}}
    for mode, some in times.items():
        if not some:
            continue
        low, middle, high = quartiles(some)
        base = mode.split(":")[0].replace(", warm", "") + ": DCP"
        _, over, _ = ratio(times, mode, base) if times.get(base) else (0.0, 0.0, 0.0)
        figures["modes"][mode] = {"s": middle, "low": low, "high": high, "over DCP": over}
        peak = most.get(mode.replace("stall", "async"))  # the wait is part of the asynchronous save
        figures["modes"][mode] |= {} if peak is None else {"peak MB": peak}
        megabytes = "" if peak is None else f"{peak:,.0f}"
        rows.append([mode, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{over:.2f}", megabytes])
    for what, mode, base, limit in (
        ("save over DCP's", "save: fs", "save: DCP", 1.0),
        ("load over DCP's", "load: fs", "load: DCP", 1.0),
        ("stall over a synchronous save", "stall: fs", "save: fs", SHARE),
    ):
        if times.get(mode) and times.get(base):
            figures["limits"][what] = [ratio(times, mode, base)[1], limit]
    for what, (figure, limit) in figures["limits"].items():
        print(f"{what}: {figure:.2f}, limit {limit:.2f}")
    report(["", "s", "spread", "of DCP's", "peak MB"], rows, figures, args)


if __name__ == "__main__":
    main()
