"""What a training step sends and does: collectives, bytes, operators and copies, exact, on ranks that exist in name only.

    python examples/benchmarks/comm.py                      (the 8-block GPT on 8 and on 64 ranks)
    python examples/benchmarks/comm.py --order              (the collectives of one funshard step, one by one)
    python examples/benchmarks/comm.py --buckets            (two gloo ranks: how fast all-reduces of several sizes are)
    python examples/benchmarks/comm.py --ranks 8 --modes plain,fs --json comm.json

Bytes are over the bytes of the parameters. "gathered": what all-gathers put out; the limit is 2 minus the units that
end the forward (the last block and the root, which backward needs at once), 1 without reshard. "across": what of this
comes from the other half of the ranks, as from another machine. "reduced": what goes into reduce-scatters, and into the
exchanges of encoded gradients; the limit is 1 plus padding. "of 3U" are all collectives over three for each of U units.
"ops" are dispatched operators over the plain step's, without the profiler's; "copied" are bytes that copies and
concatenations write, beyond the plain step's.

Two modes differ from "fs" in how the gradient is taken or where: "fs torch.func" is torch.func.grad_and_value, "fs HSDP"
is on a mesh of 2 replicas. FSDP2 is `fully_shard` on each block and on the root. "bf16" gathers and computes in bf16 and
reduces in float32; its "copied" is beyond the plain step in float32, so casts of activations are in it. "bf16 keep" has the
normalisation layers' parameters in float32 in the same gathers (``Precision(keep=)``), "bf16 apart" in units of their own
(`policies.full_precision`), and of FSDP2 as well. Slices with other numbers of bytes are padded to the longest, which the
limit leaves out. "halves" are slices over all ranks, which between forward and backward are those over half of them: FSDP2's
``reshard_after_forward=ranks // 2``, and ``P(("replicate", "shard"), reshard="shard")``. "reduce bf16" adds gradients in bf16;
"codec" sends them in bf16 and in int8, and adds them in float32.

``--buckets`` is where BUCKET_BYTES in funshard/_wire/reductions.py comes from: from that size on, more bytes in one all-reduce
make it hardly any faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    BF16,
    BF16_KEEP,
    CODEC_BF16,
    CODEC_INT8,
    GPT,
    REDUCE_BF16,
    Block,
    Step,
    fake_world,
    fsdp2,
    funshard,
    plain,
)
from counted import EXCHANGE, GATHER, REDUCE, SCATTER, Sent, Work, work_of
from measured import on_ranks
from report import add_model_options, add_output_options, report
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import funshard as fs

Build = Callable[[nn.Module, int], Step]


def sharded(p: fs.P, grad: Callable[..., Any] = fs.grad_and_value) -> Build:
    return lambda model, ranks: funshard(model, fs.by_type(Block, p=p)(model).on(init_device_mesh("cpu", (ranks,))), grad)


def in_halves(p: fs.P) -> Build:
    def build(model: nn.Module, ranks: int) -> Step:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        return funshard(model, fs.by_type(Block, p=p)(model).on(mesh))

    return build


def norms_apart(model: nn.Module, ranks: int) -> Step:
    policy = fs.policies.full_precision(fs.by_type(Block, p=fs.P("shard", precision=BF16)), nn.LayerNorm)
    return funshard(model, policy(model).on(init_device_mesh("cpu", (ranks,))))


def torch_fsdp2(**options: Any) -> Build:
    return lambda model, ranks: fsdp2(model, init_device_mesh("cpu", (ranks,)), **options)


MODES: dict[str, Build] = {
    "plain": lambda model, ranks: plain(model),
    "FSDP2": torch_fsdp2(),
    "FSDP2 keep": torch_fsdp2(reshard=False),
    "fs": sharded(fs.P("shard")),
    "fs keep": sharded(fs.P("shard", reshard=False)),
    "fs P()": sharded(fs.P()),
    "fs HSDP": in_halves(fs.P("shard")),
    "fs torch.func": sharded(fs.P("shard"), torch.func.grad_and_value),
    "FSDP2 halves": lambda model, ranks: torch_fsdp2(reshard=ranks // 2)(model, ranks),
    "fs halves": in_halves(fs.P(("replicate", "shard"), reshard="shard")),
    "FSDP2 reduce bf16": torch_fsdp2(precision=REDUCE_BF16),
    "fs codec bf16": sharded(fs.P("shard", precision=CODEC_BF16)),
    "fs codec int8": sharded(fs.P("shard", align=64, precision=CODEC_INT8)),
    "FSDP2 bf16": torch_fsdp2(precision=BF16),
    "FSDP2 bf16 apart": torch_fsdp2(precision=BF16, apart=nn.LayerNorm),
    "fs bf16": sharded(fs.P("shard", precision=BF16)),
    "fs bf16 keep": sharded(fs.P("shard", precision=BF16_KEEP)),
    "fs bf16 apart": norms_apart,
}
LOW = {"FSDP2 bf16", "FSDP2 bf16 apart", "fs bf16", "fs bf16 keep", "fs bf16 apart"}
KEPT = {"FSDP2 keep", "fs keep"}
NOT_SPLIT = {"plain", "fs P()"}


def make(args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randint(256, (2, args.batch, args.seq))
    return GPT(args.layers, args.dim, args.heads, args.seq), x, y


def gathered_limit(model: nn.Module, mode: str) -> float:
    """Twice, but the root and the last block once: they are still there when backward begins."""
    if mode in NOT_SPLIT:
        return 0.0

    def gathered(module: nn.Module) -> float:
        names = dict(module.named_parameters())
        low = [0.5 if mode in LOW and not (mode.endswith((" keep", "apart")) and "norm" in name) else 1 for name in names]
        return sum(p.numel() * factor for p, factor in zip(names.values(), low, strict=True))

    total = sum(p.numel() for p in model.parameters())
    again = sum(map(gathered, list(model.blocks)[:-1]))
    first_step = gathered(model) / 2 if mode == "fs halves" else 0  # over one axis, of the two that split a unit
    return (first_step + gathered(model) + (0 if mode in KEPT else again)) / total


class Across(Work):
    """Counts the bytes, too, that gathers bring from ranks that are not among the first ``near`` ones, as this rank is."""

    def __init__(self, near: int) -> None:
        super().__init__()
        self.near, self.across = near, 0.0

    def send(self, one: Sent) -> None:
        super().send(one)
        if one.op == GATHER:
            ranks = dist.get_process_group_ranks(one.group)
            self.across += one.output_bytes * sum(rank >= self.near for rank in ranks) / len(ranks)


def counts(args: argparse.Namespace) -> None:
    figures: dict[str, dict[str, dict[str, float]]] = {}
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        base = work_of(plain(make(args)[0]), *make(args)[1:])
        for mode in args.modes.split(","):
            model, x, y = make(args)
            size, units = sum(p.nbytes for p in model.parameters()), len(fs.by_type(Block)(model))
            limit = gathered_limit(model, mode)
            with fake_world(ranks):
                step = MODES[mode](model, ranks)
                step(x, y)
                with Across(ranks // 2) as work:
                    step(x, y)
            reduced = work.bytes[f"into {SCATTER}"] + work.bytes[f"into {EXCHANGE}"]
            one = {
                "all-gathers": work.ops[GATHER],
                "reduce-scatters": work.ops[SCATTER],
                "all-reduces": work.ops[REDUCE],
                "gathered": work.bytes[f"out of {GATHER}"] / size,
                "gathered limit": limit,
                "across": work.across / size,
                "reduced": reduced / size,
                "all-reduced": work.bytes[f"into {REDUCE}"] / size,
                "ops": work.dispatched / base.dispatched,
                "copied": (work.copied - base.copied) / size,
            }
            if mode != "plain":
                one["of 3U"] = work.collectives / (3 * units)
            figures.setdefault(str(ranks), {})[mode] = {
                "gathered bytes": work.bytes[f"out of {GATHER}"],
                "reduced bytes": reduced,
                "parameter bytes": size,
                "units": units,
                **one,
            }
            cells = [f"{one[name]:.3f}" if name in one else "-" for name in FRACTIONS]
            rows.append([mode, str(ranks), *(str(one[name]) for name in COUNTS), *cells])
    report(["mode", "ranks", *COUNTS, *FRACTIONS], rows, figures, args)


COUNTS = ["all-gathers", "reduce-scatters", "all-reduces"]
FRACTIONS = ["gathered", "gathered limit", "across", "reduced", "all-reduced", "of 3U", "ops", "copied"]


class Order(Work):
    """What is started and waited for, in order, with the number of other operators between; units are found by storage."""

    def __init__(self, shards: fs.Params) -> None:
        super().__init__()
        self.units = {address(shard): key for key, shard in shards.items()}
        self.lines: list[tuple[str, str, int, int]] = []  # start or wait, op, address that tells the unit, operators before
        self.started: dict[int, tuple[str, int]] = {}
        self.alive: list[Tensor] = []
        self.before = 0

    def line(self, event: str, op: str, where: int) -> None:
        rest = self.dispatched - self.ops["_c10d_functional::wait_tensor"] - self.collectives
        self.lines.append((event, op, where, rest - self.before))
        self.before = rest

    def send(self, one: Sent) -> None:
        super().send(one)
        where = address(one.input if one.op == GATHER else one.output)  # a gradient is known by what it is in the end
        if one.op == REDUCE and address(one.input) in self.started:
            where = self.started[address(one.input)][1]
        if one.op != GATHER:
            self.alive.append(one.output)
        self.started[address(one.output)] = one.op, where
        self.line("start", one.op, where)

    def wait(self, tensor: Tensor) -> None:
        self.line("wait", *self.started[address(tensor)])


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def order(args: argparse.Namespace) -> None:
    model, x, y = make(args)
    ranks = int(args.ranks.split(",")[0])
    with fake_world(ranks):
        spec = fs.by_type(Block)(model).on(init_device_mesh("cpu", (ranks,)))
        params = fs.shard(model, spec)
        model.to("meta")
        turn = []

        def loss(params: fs.Params) -> Tensor:
            logits = fs.functional_call(model, params, (x,), spec=spec)
            turn.append(len(work.lines))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

        with Order(params) as work:
            grads, _ = fs.grad_and_value(loss)(params)
    units = {**work.units, **{address(grad): key for key, grad in grads.items()}}
    lines = [(event, op, units.get(where, "?") or "''", ops) for event, op, where, ops in work.lines]
    rows = [
        ["forward" if i < turn[0] else "backward", event, op, unit, str(ops)] for i, (event, op, unit, ops) in enumerate(lines)
    ]
    report(["pass", "what", "collective", "unit", "operators before"], rows, {"order": [row[:4] for row in rows]}, args)


def all_reduces(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one of each size, in KiB."""
    name = dist.distributed_c10d._get_default_group().group_name
    tensors = {kib: torch.zeros(int(kib) * 256) for kib in args.sizes.split(",")}
    times: dict[str, list[float]] = {kib: [] for kib in tensors}
    for round_ in range(args.warmup + args.rounds):
        for kib, x in tensors.items():
            dist.barrier()
            start = time.perf_counter()
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(x, "avg", name))
            if round_ >= args.warmup:
                times[kib].append(time.perf_counter() - start)
    return {kib: statistics.median(t) for kib, t in times.items()}


def buckets(args: argparse.Namespace) -> None:
    times = on_ranks(all_reduces, argparse.Namespace(**{**vars(args), "ranks": 2}))
    figures = {f"{kib} KiB": {"ms": t * 1e3, "MB/s": int(kib) * 1024 / t / 1e6} for kib, t in times.items()}
    rows = [[name, f"{one['ms']:.2f}", f"{one['MB/s']:.0f}"] for name, one in figures.items()]
    report(["all-reduce of", "ms", "MB/s"], rows, figures, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", action="store_true", help="print the sequence of collectives of one funshard step")
    parser.add_argument("--buckets", action="store_true", help="time all-reduces on two gloo ranks")
    parser.add_argument("--ranks", default="8,64", help="worlds, even ones for HSDP; --order takes the first")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    add_model_options(parser, seq=16, batch=1)
    parser.add_argument("--sizes", default="64,128,256,512,1024,2048,4096,8192,16384,32768", help="of all-reduces, in KiB")
    parser.add_argument("--rounds", type=int, default=20, help="of all-reduces")
    parser.add_argument("--warmup", type=int, default=3)
    add_output_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (order if args.order else buckets if args.buckets else counts)(args)


if __name__ == "__main__":
    main()
