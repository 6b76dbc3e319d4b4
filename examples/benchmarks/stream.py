"""Full parameters for another program, beside torch's full state dict of an FSDP2 model, in one run: time, memory and bytes.

    python examples/benchmarks/stream.py               (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/stream.py --rounds 12 --layers 64

The model is a chain of square linears in float32, 537 MB by default, each a unit. The first rank writes every parameter into
memory of its own, as an inference engine loads them; that memory is there before, and is not counted. "FSDP2" is
``get_model_state_dict`` with ``full_state_dict=True, cpu_offload=True``, which gives the first rank all parameters at once.
"bf16" casts: FSDP2's are cast as they are written, which is what is left to do.

Every round runs each mode once, in an order drawn anew. "peak" are the megabytes of memory that a rank has at most beyond what
it had before, by the system's count (VmHWM), each mode in processes of its own. Their allocator gives back what is freed:
glibc's would otherwise keep a part, by luck up to all of the parameters. "received" are the bytes that collectives bring to a
rank, over the bytes of the parameters.
"""

import argparse
import ctypes
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import quartiles
from measured import on_ranks, ratio
from report import add_output_options, report
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs

BASE = "FSDP2"
M_MMAP_THRESHOLD = -3
"""The option of glibc's mallopt for the size from which an allocation has pages of its own."""


class Both:
    """The same model twice, and how each mode gives the first rank its parameters."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        with torch.device("meta"):
            models = [nn.Sequential(*(nn.Linear(args.dim, args.dim) for _ in range(args.layers))) for _ in range(2)]
        self.spec = fs.by_type(nn.Linear)(models[0])
        self.params = {unit.key: torch.randn(self.spec.bound.shard_numel(unit)) for unit in self.spec}
        self.theirs = models[1]
        for module in (*self.theirs, self.theirs):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        self.theirs.to_empty(device="cpu")
        for param in self.theirs.parameters():
            nn.init.normal_(param.to_local())  # pyright: ignore[reportAttributeAccessIssue]
        first = self.rank == 0
        self.engine = {name: torch.ones(p.shape) for name, p in models[0].named_parameters()} if first else {}
        self.low = {name: tensor.bfloat16() for name, tensor in self.engine.items()}
        whole = {"bucket": args.bucket, "rank0_only": True}
        self.modes: dict[str, Callable[[], Iterable[tuple[str, Tensor]]]] = {
            "FSDP2": self.state_dict,
            "unshard": lambda: fs.unshard(self.params, self.spec, rank0_only=True).items(),
            "stream_full": lambda: fs.stream_full(self.params, self.spec, **whole),
            "stream_full, all ranks": lambda: fs.stream_full(self.params, self.spec, bucket=args.bucket),
            "FSDP2, bf16": self.state_dict,
            "stream_full, bf16": lambda: fs.stream_full(self.params, self.spec, dtype=torch.bfloat16, **whole),
        }

    def state_dict(self) -> Iterable[tuple[str, Tensor]]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.theirs, options=options).items()

    def run(self, mode: str) -> None:
        """What is timed."""
        engine = self.low if mode.endswith("bf16") else self.engine
        for name, tensor in self.modes[mode]():
            if engine:
                engine[name].copy_(tensor)


class Received(TorchDispatchMode):
    """The bytes that collectives bring to this rank from others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.others = 0.0, 1 - 1 / dist.get_world_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        out = func(*args, **(kwargs or {}))
        if name.startswith("_c10d_functional::all_gather_into_tensor"):
            self.bytes += out.nbytes * self.others
        elif name == "_c10d_functional::broadcast_":
            self.bytes += args[0].nbytes * (args[1] != dist.get_rank())
        elif name == "c10d::gather_":
            self.bytes += sum(x.nbytes for row in args[0] for x in row) * self.others
        elif name in ("c10d::_allgather_base_", "c10d::broadcast_", "c10d::allgather_", "c10d::scatter_"):
            raise NotImplementedError(f"{name} is not counted")
        return out


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each mode, one a round, and the bytes received, on the first and the last rank."""
    warnings.simplefilter("ignore")
    both, order = Both(args), random.Random(0)
    modes = list(both.modes)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    received: dict[str, list[float]] = {}
    size = 4 * sum(p.numel() for p in both.theirs.parameters())
    for mode in modes:
        with Received() as count:
            both.run(mode)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, count.bytes / size)
        received[mode] = [every[0], every[-1]]
    for round_ in range(args.warmup + args.rounds):
        order.shuffle(modes)
        for mode in modes:
            dist.barrier()
            start = time.perf_counter()
            both.run(mode)
            dist.barrier()
            if round_ >= args.warmup:
                times[mode].append(time.perf_counter() - start)
    return {"times": times, "received": received}


def peak(rank: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Megabytes that one mode takes beyond what was there, on the first and the last rank, in new processes."""
    warnings.simplefilter("ignore")
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    both = Both(args)
    dist.barrier()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    both.run(args.mode)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, memory("VmHWM") - before)
    return {args.mode: [every[0], every[-1]]}


def memory(what: str) -> float:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--bucket", type=float, default=64e6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--no-peaks", dest="peaks", action="store_false")
    add_output_options(parser)
    args = parser.parse_args()
    found = on_ranks(measure, args)
    times, received = found["times"], found["received"]
    most: dict[str, list[float]] = {}
    for mode in times if args.peaks else ():
        most |= on_ranks(peak, argparse.Namespace(**vars(args), mode=mode))
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    for mode, some in times.items():
        low, middle, high = quartiles(some)
        base = BASE + ", bf16" * mode.endswith("bf16")
        over = ratio(times, mode, base)[1]
        first, last = most.get(mode, [float("nan")] * 2) if args.peaks else (0.0, 0.0)
        figures[mode] = {"s": middle, "low": low, "high": high, "over FSDP2": over}
        figures[mode] |= {"received": received[mode][0], "received by the last": received[mode][1]}
        if args.peaks:
            figures[mode] |= {"peak MB": first, "peak MB of the last": last}
        peaks = [f"{first:,.0f}", f"{last:,.0f}"] if args.peaks else ["-", "-"]
        sent = [f"{x:.2f}" for x in received[mode]]
        rows.append([mode, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{over:.2f}", *peaks, *sent])
    head = ["", "s", "spread", "of FSDP2's", "peak MB", "of the last rank", "received", "by the last rank"]
    report(head, rows, figures, args)


if __name__ == "__main__":
    main()
