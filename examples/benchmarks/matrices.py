"""An update by Muon, in one run: each matrix on its owner, all of them gathered everywhere, and the unsharded model's.

    python examples/benchmarks/matrices.py                     (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/matrices.py --ranks 4 --rounds 40 --json matrices.json

Only the update of a GPT (float32, the iteration too), given gradients. "fs.optim.muon" sends each matrix to its owner and
back, or of what all ranks hold (`P()`) what its owner made of it to all; "gathered" gathers every unit's momentum and makes
every matrix orthogonal on every rank; "unsharded" is the arithmetic of torch.optim.Muon on whole parameters, which every rank
has and nothing is sent for; "AdamW" is optim.from_torch's of all parameters, which needs no whole ones. What is no hidden
matrix has AdamW in all of them, and all write in place.

Rounds, ratios and peaks as in peers.py: what rank 0's tensors hold, parameters, gradients and state included. The bytes that
come out of collectives, one's own part included, are counted on fake process groups of so many ranks.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from common import GPT, Block, Step, fake_world
from counted import EXCHANGE, GATHER, REDUCE, SCATTER, work_of
from measured import in_rounds, on_ranks, over, peak_bytes, ratio
from report import add_output_options, report
from torch import Tensor, nn

import funshard as fs

LR, REST_LR, DECAY, MOMENTUM = 0.02, 1e-3, 0.1, 0.95
SHARD = fs.P("shard")
NOTHING = torch.empty(0)
Update = Callable[..., tuple[fs.Params, Any]]


def adamw() -> fs.optim.Optimizer:
    return fs.optim.from_torch(torch.optim.AdamW, lr=REST_LR, weight_decay=DECAY, fused=True, donate=True)


def some_grads(like: Mapping[str, Tensor]) -> fs.Params:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(t.shape, generator=generator) for key, t in like.items()}


def stepping(update: Update, params: fs.Params, state: Any) -> Step:
    """Updates with the same gradients, each of what the one before gave."""
    grads = some_grads(params)

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal params, state
        params, state = update(grads, state, params)

    return step


def sharded(pair: Callable[[Any], Any], p: fs.P) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block, p=p)(model).bound
        params = fs.shard(model, spec)
        init, update = pair(fs.optim.matrices(spec, select=fs.optim.hidden(model, "head")))
        model.to("meta")
        return stepping(update, params, init(params))

    return build


def moved(param: Tensor, grad: Tensor, buffer: Tensor) -> Tensor:
    """A step of torch/optim/_muon.py, all in float32; ``buffer`` and ``param`` are changed in place."""
    buffer.lerp_(grad, 1 - MOMENTUM)
    direction = fs.optim.orthogonal(grad.lerp(buffer, MOMENTUM))
    return param.mul_(1 - LR * DECAY).sub_(direction, alpha=LR * scale(param))


def scale(matrix: Tensor) -> float:
    return max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5


def gathered(matrices: Any) -> tuple[Callable[..., Any], Update]:
    """Muon without owners: a unit after the other is gathered, and every rank does all of it and keeps its slice."""
    spec = matrices.spec
    begin, rest = adamw()
    counted = {p.name: torch.arange(p.numel, dtype=p.dtype).view(p.shape) for unit in spec for p in unit.params}
    where = {name: x.tolist() for name, x in fs.param_views(fs.shard(counted, spec), spec).items()}
    own = {name: slice(int(x[0]), int(x[-1]) + 1) if x else slice(0) for name, x in where.items()}  # elements of each

    def others(tree: Mapping[str, Tensor]) -> fs.Params:
        return {name: part for name, part in fs.param_views(tree, spec).items() if name not in matrices.by_name}

    def init(params: fs.Params) -> Any:
        return {key: torch.zeros_like(p) for key, p in params.items()}, begin(others(params))

    def update(grads: fs.Params, state: Any, params: fs.Params) -> tuple[fs.Params, Any]:
        momentum, of_rest = state
        of_rest = rest(others(grads), of_rest, others(params))[1]
        parts = fs.param_views(params, spec)  # writing into them writes into the slices
        for key in dict.fromkeys(matrix.unit.key for matrix in matrices.chosen):
            momentum[key].lerp_(grads[key], 1 - MOMENTUM)
            whole = fs.unshard({key: grads[key].lerp(momentum[key], MOMENTUM)}, spec)
            for name in (matrix.name for matrix in matrices.chosen if matrix.unit.key == key):
                direction = fs.optim.orthogonal(whole[name]).flatten()[own[name]]
                parts[name].mul_(1 - LR * DECAY).sub_(direction, alpha=LR * scale(whole[name]))
        return params, (momentum, of_rest)

    return init, update


def unsharded(model: nn.Module) -> Step:
    hidden = fs.optim.matrices(fs.policies.whole()(model).on({"shard": 1}), select=fs.optim.hidden(model, "head")).by_name
    params = {name: p.detach() for name, p in model.named_parameters()}
    others = [name for name in params if name not in hidden]
    begin, rest = adamw()

    def update(grads: fs.Params, state: Any, params: fs.Params) -> tuple[fs.Params, Any]:
        momentum, of_rest = state
        new, of_rest = rest({name: grads[name] for name in others}, of_rest, {name: params[name] for name in others})
        return {**{name: moved(params[name], grads[name], momentum[name]) for name in hidden}, **new}, (momentum, of_rest)

    momentum = {name: torch.zeros_like(params[name]) for name in hidden}
    return stepping(update, params, (momentum, begin({name: params[name] for name in others})))


def muon(matrices: Any) -> fs.optim.Optimizer:
    return fs.optim.muon(matrices, lr=LR, weight_decay=DECAY, dtype=torch.float32, fallback=adamw(), donate=True)


MODES: dict[str, Callable[[nn.Module], Step]] = {
    "fs.optim.muon": sharded(muon, SHARD),
    "fs.optim.muon, `P()`": sharded(muon, fs.P()),
    "gathered": sharded(gathered, SHARD),
    "unsharded": unsharded,
    "AdamW": sharded(lambda matrices: adamw(), SHARD),
}


def made(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(args.layers, args.dim, 4, args.seq)


def arriving(args: argparse.Namespace, mode: str, ranks: int) -> int:
    """The bytes that come out of collectives on rank 0 of so many."""
    with fake_world(ranks):
        work = work_of(MODES[mode](made(args)), NOTHING, NOTHING)
    return sum(work.bytes[f"out of {op}"] for op in (GATHER, SCATTER, REDUCE, EXCHANGE))


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    batch = (NOTHING, NOTHING)
    peaks = {mode: peak_bytes(MODES[mode], lambda: made(args), batch) for mode in MODES}
    times = in_rounds({mode: MODES[mode](made(args)) for mode in MODES}, batch, args.warmup, args.rounds)
    dist.barrier()
    return {"times": times, "peaks": peaks, "parameters": sum(p.numel() for p in made(args).parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--counted", type=int, default=8, help="ranks of which the bytes are counted as well")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128, help="positions")
    add_output_options(parser)
    args = parser.parse_args()
    result = on_ranks(measure, args)
    rows, figures = [], {}
    for mode in MODES:
        of = {base: ratio(result["times"], mode, base) for base in ("unsharded", "gathered")}
        cells = ["{1:.3f} ({0:.2f}-{2:.2f})".format(*quarters) for quarters in of.values()]
        milliseconds, peak = statistics.median(result["times"][mode]) * 1e3, result["peaks"][mode]
        sent = {ranks: arriving(args, mode, ranks) for ranks in (args.ranks, args.counted)}
        rows.append([mode, *cells, f"{milliseconds:.0f}", f"{peak / 1e6:.1f}", *(f"{n / 1e6:.1f}" for n in sent.values())])
        figures[mode] = {"peak bytes": peak, "arriving bytes": sent}
        for base, quarters in of.items():
            figures[mode] |= over(base, quarters)
    print(f"{result['parameters']:,} parameters, {args.ranks} ranks; time of an update over ... (spread)")
    heads = [f"MB in of {ranks}" for ranks in (args.ranks, args.counted)]
    report(["mode", "unsharded", "gathered", "median ms", "peak MB", *heads], rows, figures, args)


if __name__ == "__main__":
    main()
