"""What each choice about memory gains and costs: peak memory and time of a step, in one run, and FSDP2 with all of them.

    python examples/benchmarks/memory.py                   (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/memory.py --modes 'shard,remat,all of it,FSDP2 all of it' --rounds 30 --json memory.json

A GPT of 8 blocks with a long batch, in fp32. Each mode stands beside another one, as `BESIDE` says; rounds and ratios as in
peers.py. Two kinds of step:

- To gradients that are reduced. "shard" is ``P("shard")``; "reshard=False" and "P()" keep more, "remat", "save attention" and
  "save products" less; "accumulate shards" and "accumulate full" run the batch as 8 micro-batches, of which "one micro-batch"
  is the first alone.
- To new params and state of AdamW (its fused kernel), with remat, without which activations are all of the peak. "AdamW" is
  the update after backward, "AdamW donate" in the place of the old params and state, "AdamW in backward" that by
  `fs.update_in_backward`, and "all of it" that of 8 micro-batches.

FSDP2's remat is torch.utils.checkpoint (not reentrant), and its updates in backward ("hooks") one AdamW for each parameter by
``register_post_accumulate_grad_hook``, in the last micro-batch's backward. "offload" is CPUOffloadPolicy, without pinned
memory, which needs a GPU. What goes to the host stays on the device here, so that ``P(offload="activations")`` has no row:
tests/remat/test_offload_memory.py has its peaks.

A peak is the most that one rank's tensors hold during a step, at rest included, by the profiler's record of every
allocation: on a fake process group, whose collectives are done at once, so that it is exact; and the least and the most of a
few steps on the real ranks, where threads let go when they come to it. Alive gradients are counted on the fake group, too:
storages that a reduction is given (of whole units), and those that it gives or the update's kernel takes (slices). The losses
after the last round show that all whole steps have trained the same model.
"""

import argparse
import statistics
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    ATTENTION,
    GPT,
    PRODUCTS,
    Block,
    Step,
    checkpointed,
    fake_world,
    fsdp2,
    fully_sharded,
    loss_of,
    sharded,
)
from counted import SCATTER, Sent, Work
from measured import Batch, Build, in_rounds, on_ranks, peak_bytes, peaks_of_steps, ratio
from report import add_model_options, add_output_options, report
from torch import Tensor, nn

import funshard as fs

ADAMW = {"lr": 1e-4, "fused": True}
SHARD, REMAT = fs.P("shard"), fs.P("shard", remat=True)


def split(x: Tensor, y: Tensor, count: int) -> list[Batch]:
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def started(model: nn.Module, p: fs.P) -> tuple[Callable[[fs.Params, Batch], Tensor], fs.Params, fs.PartitionSpec]:
    spec = fs.by_type(Block, p=p)(model).bound
    params = fs.shard(model, spec)
    model.to("meta")

    def loss(params: fs.Params, batch: Batch) -> Tensor:
        return loss_of(fs.functional_call(model, params, (batch[0],), spec=spec), batch[1])

    return loss, params, spec


def one_of(count: int) -> Build:
    def build(model: nn.Module) -> Step:
        loss, params, _ = started(model, SHARD)
        return lambda x, y: fs.grad_and_value(loss)(params, split(x, y, count)[0])

    return build


def accumulated(count: int, keep: Any) -> Build:
    def build(model: nn.Module) -> Step:
        loss, params, spec = started(model, SHARD)
        return lambda x, y: fs.accumulate(loss, params, split(x, y, count), spec=spec, keep=keep)

    return build


def updated(*, donate: bool) -> Build:
    def build(model: nn.Module) -> Step:
        loss, params, _ = started(model, REMAT)
        init, update = fs.optim.from_torch(torch.optim.AdamW, donate=donate, **ADAMW)
        state = init(params)

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal params, state
            grads, value = fs.grad_and_value(loss)(params, (x, y))
            params, state = update(grads, state, params)
            return value

        return step

    return build


def updated_in_backward(count: int) -> Build:
    def build(model: nn.Module) -> Step:
        loss, params, spec = started(model, REMAT)
        init, update = fs.optim.from_torch(torch.optim.AdamW, donate=True, **ADAMW)
        state = init(params)

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal params, state
            params, state, value, _ = fs.update_in_backward(update, loss, params, state, split(x, y, count), spec=spec)
            return value

        return step

    return build


def fsdp2_updated(*, hooks: bool, count: int = 1, offload: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        fsdp2(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)), offload=offload)
        params, last = list(model.parameters()), False
        of = {p: torch.optim.AdamW([p], **ADAMW) for p in params} if hooks else {}
        whole = None if hooks else torch.optim.AdamW(params, **ADAMW)

        def arrived(p: Tensor) -> None:
            if last:
                of[p].step()
                p.grad = None

        for p in of:
            p.register_post_accumulate_grad_hook(arrived)

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal last
            values: list[Tensor] = []
            for i, (some, labels) in enumerate(split(x, y, count)):
                last = i == count - 1
                value = loss_of(model(some), labels) / count
                value.backward()
                values.append(value.detach())
            if whole is not None:
                whole.step()
                whole.zero_grad()
            return torch.stack(values).sum()

        return step

    return build


def gradients(count: int) -> dict[str, Build]:
    """The modes that end with gradients."""
    return {
        "shard": sharded(SHARD),
        "reshard=False": sharded(fs.P("shard", reshard=False)),
        "P()": sharded(fs.P()),
        "remat": sharded(REMAT),
        "save attention": sharded(fs.P("shard", remat=fs.Remat(ATTENTION))),
        "save products": sharded(fs.P("shard", remat=fs.Remat(PRODUCTS))),
        "one micro-batch": one_of(count),
        "accumulate shards": accumulated(count, "shards"),
        "accumulate full": accumulated(count, "full"),
        "FSDP2": fully_sharded(reshard=True),
        "FSDP2 remat": checkpointed(fully_sharded(reshard=True)),
    }


def whole_steps(count: int) -> dict[str, Build]:
    """Those that end with an update."""
    return {
        "AdamW": updated(donate=False),
        "AdamW donate": updated(donate=True),
        "AdamW in backward": updated_in_backward(1),
        "all of it": updated_in_backward(count),
        "FSDP2 AdamW": checkpointed(fsdp2_updated(hooks=False)),
        "FSDP2 hooks": checkpointed(fsdp2_updated(hooks=True)),
        "FSDP2 all of it": checkpointed(fsdp2_updated(hooks=True, count=count)),
        "FSDP2 all of it offload": checkpointed(fsdp2_updated(hooks=True, count=count, offload=True)),
    }


BESIDE = {
    **dict.fromkeys(gradients(1), "shard"),
    "shard": "FSDP2",
    "remat": "shard",
    **dict.fromkeys(whole_steps(1), "AdamW"),
    "AdamW": "FSDP2 AdamW",
    "all of it": "FSDP2 all of it",
    "FSDP2 remat": "remat",
    "FSDP2 hooks": "AdamW in backward",
    "FSDP2 all of it": "all of it",
    "FSDP2 all of it offload": "all of it",
}


class Gradients(Work):
    """The most bytes of gradients that were alive at once: whole units' before they are reduced, and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.most = {"whole": 0, "slices": 0}
        self._alive: dict[str, dict[int, tuple[weakref.ref[Any], int]]] = {kind: {} for kind in self.most}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_fused_adamw_":
            for grad in args[1]:
                self._add("slices", grad)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for kind, some in self._alive.items():
            self._alive[kind] = {key: one for key, one in some.items() if one[0]() is not None}
            self.most[kind] = max(self.most[kind], sum(nbytes for _, nbytes in self._alive[kind].values()))
        return out

    def send(self, one: Sent) -> None:
        super().send(one)
        if one.op == SCATTER:
            self._add("whole", one.input)
            self._add("slices", one.output)

    def _add(self, kind: str, grad: Tensor) -> None:
        storage = grad.untyped_storage()
        self._alive[kind][storage._cdata] = weakref.ref(storage), storage.nbytes()


def maker(args: argparse.Namespace) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, args.heads, args.seq)

    return make


def batch_of(rank: int, args: argparse.Namespace) -> Batch:
    x, y = torch.randint(256, (2, args.batch, args.seq), generator=torch.Generator().manual_seed(rank))
    return x, y


def chosen(args: argparse.Namespace) -> tuple[dict[str, Build], list[str]]:
    """The modes that run; and those of them that end with an update."""
    whole = whole_steps(args.micro)
    modes = gradients(args.micro) | whole
    names = args.modes.split(",")
    return {mode: modes[mode] for mode in names}, [mode for mode in names if mode in whole]


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    (modes, updating), make, batch = chosen(args), maker(args), batch_of(rank, args)
    peaks = {mode: peaks_of_steps(build, make, batch, args.peaks) for mode, build in modes.items()}
    steps = {mode: build(make()) for mode, build in modes.items()}
    times = in_rounds(steps, batch, args.warmup, args.rounds)
    losses: dict[str, float] = {}
    for mode in updating:
        value: Any = steps[mode](*batch)
        dist.all_reduce(value)
        losses[mode] = value.item() / args.ranks
    return {"times": times, "on ranks": peaks, "losses": losses}


def exact(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks and bytes of alive gradients, on a fake process group, and the units' bytes."""
    torch.set_num_threads(1)
    (modes, updating), make, batch, alive = chosen(args), maker(args), batch_of(0, args), {}
    with fake_world(args.ranks):
        peaks = {mode: peak_bytes(build, make, batch) for mode, build in modes.items()}
        for mode in updating:
            step = modes[mode](make())
            step(*batch)
            with Gradients() as found:
                step(*batch)
            alive[mode] = found.most
        spec = fs.by_type(Block)(make()).bound
        return {"peaks": peaks, "alive": alive, "units": [4 * spec.padded_numel(unit) for unit in spec]}


def limits(result: dict[str, Any], args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """What is claimed of the modes that ran: each a figure, and what it is to be at most."""
    peaks, units, found = result["peaks"], result["units"], {}
    if {"shard", "remat"} <= peaks.keys():
        found["remat: peak / shard"] = peaks["remat"] / peaks["shard"], 0.6
    for mode in ("save attention", "save products"):
        if {"shard", "remat", mode} <= peaks.keys():
            found[f"remat: peak / {mode}"] = peaks["remat"] / peaks[mode], 1
            found[f"{mode}: peak / shard"] = peaks[mode] / peaks["shard"], 1
    if "AdamW in backward" in peaks:
        for kind, of in (("whole", max(units)), ("slices", max(units) // args.ranks)):
            found[f"AdamW in backward: gradients alive ({kind}), in units"] = result["alive"]["AdamW in backward"][kind] / of, 2
    if {"one micro-batch", "accumulate shards"} <= peaks.keys():
        beyond = peaks["accumulate shards"] - peaks["one micro-batch"]
        sums = sum(units) // args.ranks + 4 * (args.micro - 1)
        found["accumulate shards: bytes beyond one micro-batch's peak; its sums of gradients, and losses"] = beyond, sums
    for peer in ("FSDP2 all of it", "FSDP2 all of it offload"):
        if {"all of it", peer} <= peaks.keys():
            found[f"all of it: peak / {peer}"] = peaks["all of it"] / peaks[peer], 1
            found[f"all of it: most on ranks / {peer}"] = (
                max(result["on ranks"]["all of it"]) / max(result["on ranks"][peer]),
                1,
            )
            found[f"all of it: step / {peer}"] = ratio(result["times"], "all of it", peer)[1], 1.05
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--peaks", type=int, default=3, help="steps whose peaks are taken on the real ranks")
    parser.add_argument("--modes", default=",".join((*gradients(8), *whole_steps(8))))
    add_model_options(parser, dim=128, heads=2, batch=8)
    parser.add_argument("--micro", type=int, default=8, help="micro-batches of an accumulation")
    add_output_options(parser)
    args = parser.parse_args()
    result = exact(args) | on_ranks(measure, args)
    times, peaks = result["times"], result["peaks"]
    rows, figures = [], {}
    for mode in times:
        base = BESIDE[mode] if BESIDE[mode] in times else mode
        low, middle, high = ratio(times, mode, base)
        alive = result["alive"].get(mode, {})
        rows.append(
            [
                mode,
                base,
                f"{peaks[mode] / 1e6:.2f}",
                f"{peaks[mode] / peaks[base]:.2f}",
                "-".join(f"{some(result['on ranks'][mode]) / 1e6:.2f}" for some in (min, max)),
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                f"{statistics.median(times[mode]) * 1e3:.0f}",
                *(f"{alive[kind] / 1e6:.2f}" if alive else "-" for kind in ("whole", "slices")),
                f"{result['losses'][mode]:.5f}" if alive else "-",
            ]
        )
        figures[mode] = {"beside": base, "peak bytes": peaks[mode], "step": middle, "low": low, "high": high}
        figures[mode] |= {"on ranks": result["on ranks"][mode], "alive": alive, "loss": result["losses"].get(mode)}
    found = limits(result, args)
    print(f"units of {', '.join(f'{nbytes:,}' for nbytes in result['units'])} bytes, {args.ranks} ranks")
    for name, (figure, limit) in found.items():
        print(f"{name}: {figure:,.4g}, at most {limit:,.4g}{'' if figure <= limit else '  NOT MET'}")
    head = [
        "mode",
        "beside",
        "peak MB",
        "of its",
        "on ranks",
        "step of its (spread)",
        "median ms",
        "whole MB",
        "slices MB",
        "loss",
    ]
    report(head, rows, {"modes": figures, "limits": found}, args)


if __name__ == "__main__":
    main()
