"""What a training step costs the host beyond the plain one: milliseconds for each unit, beside FSDP2.

    python examples/benchmarks/host.py
    python examples/benchmarks/host.py --modes plain,FSDP2,shard --rounds 20 --json host.json

A GPT of 48 blocks of width 64 computes 4 tokens, on a fake process group of 8 ranks: its collectives return at once, so nothing
is computed or sent to speak of, and what remains is what each library does in Python and in torch's operators to have units
gathered, used, let go and reduced. On a GPU this is hidden behind large layers, and decides the time of small ones.

A step is forward, loss and backward; its CPU time is taken, of one thread. Every round runs each mode once, in an order drawn
anew, and what is reported is the median over rounds of what a mode takes beyond plain autograd *in the same round*, by the
number of blocks; the "spread" is the middle half. "keep" is ``P("shard", reshard=False)``, beside FSDP2 with
``reshard_after_forward=False``; "P()" is replicated (DDP itself does not run on a fake group); "torch.func" is
torch.func.grad_and_value of ``P("shard")``, of which "plain torch.func" is torch's own part.

"shard by 2" and "by 4" are units of so many blocks (`policies.by_group`), beside FSDP2 with ``fully_shard([a, b, ...])``; their
milliseconds are for each block, too. "Collectives" are those of a step.

"remat" runs each block again in backward; "save attention" and "save products" keep results of operators, "save names" that of
attention by its name. Beside them "FSDP2 remat" and its two are torch.utils.checkpoint (not reentrant) of FSDP2's blocks, with
torch's own selective checkpoint.

"bare" and "bare keep" are the floor of this design, without checks and options: `bare.py`.

"bf16" computes in bf16; "bf16 keep" has the normalisation layers' parameters in float32 in the same gathers, "bf16 apart" in
units of their own.
"""

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from bare import bare
from common import (
    ATTENTION,
    BF16,
    BF16_KEEP,
    GPT,
    PRODUCTS,
    Block,
    Step,
    checkpointed,
    fake_world,
    fsdp2,
    fully_sharded,
    funshard,
    loss_of,
    plain,
    quartiles,
)
from counted import work_of
from report import add_output_options, report
from torch import Tensor, nn

import funshard as fs

WIDTH, TOKENS, RANKS = 64, 4, 8


def plain_functional(model: nn.Module) -> Step:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, params, (x,)), y)

    return lambda x, y: torch.func.grad_and_value(loss)(params, x, y)


def sharded(model: nn.Module, p: fs.P, grad: Callable[..., object] = fs.grad_and_value) -> Step:
    return funshard(model, fs.by_type(Block, p=p)(model), grad)


def grouped(model: nn.Module, size: int) -> Step:
    return funshard(model, fs.policies.by_group([Block], size=size)(model))


def norms_apart(model: nn.Module) -> Step:
    policy = fs.policies.full_precision(fs.by_type(Block, p=fs.P("shard", precision=BF16)), nn.LayerNorm)
    return funshard(model, policy(model))


def recomputed(save: list | None) -> Callable[[nn.Module], Step]:
    return functools.partial(sharded, p=fs.P("shard", remat=fs.Remat(save)))


def modes(mesh: dist.DeviceMesh) -> dict[str, Callable[[nn.Module], Step]]:
    return {
        "plain": plain,
        "plain torch.func": plain_functional,
        "FSDP2": lambda model: fsdp2(model, mesh),
        "FSDP2 keep": lambda model: fsdp2(model, mesh, reshard=False),
        "shard": functools.partial(sharded, p=fs.P("shard")),
        "keep": functools.partial(sharded, p=fs.P("shard", reshard=False)),
        "P()": functools.partial(sharded, p=fs.P()),
        "torch.func": functools.partial(sharded, p=fs.P("shard"), grad=torch.func.grad_and_value),
        "bare": bare,
        "bare keep": functools.partial(bare, reshard=False),
        **{f"FSDP2 by {n}": functools.partial(fsdp2, mesh=mesh, group=n) for n in (2, 4)},
        **{f"shard by {n}": functools.partial(grouped, size=n) for n in (2, 4)},
        "FSDP2 remat": checkpointed(fully_sharded(reshard=True)),
        "FSDP2 save attention": checkpointed(fully_sharded(reshard=True), ATTENTION),
        "FSDP2 save products": checkpointed(fully_sharded(reshard=True), PRODUCTS),
        "remat": recomputed(None),
        "save attention": recomputed(ATTENTION),
        "save products": recomputed(PRODUCTS),
        "bf16": functools.partial(sharded, p=fs.P("shard", precision=BF16)),
        "bf16 keep": functools.partial(sharded, p=fs.P("shard", precision=BF16_KEEP)),
        "bf16 apart": norms_apart,
    }


def measure(names: list[str], blocks: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """CPU seconds of each mode's steps, one a round, and the number of collectives of a step."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {}
    x = torch.randint(256, (1, TOKENS))
    with fake_world(RANKS):
        mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
        for name in names:
            torch.manual_seed(0)
            steps[name] = modes(mesh)[name](GPT(blocks, WIDTH, heads=2, seq=TOKENS))
        times: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds + 2):
            for name in random.sample(names, len(names)):
                start = time.process_time()
                steps[name](x, x)
                if i >= 2:
                    times[name].append(time.process_time() - start)
        return times, {name: work_of(steps[name], x, x).collectives for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="plain,plain torch.func,FSDP2,FSDP2 keep,shard,keep,P(),torch.func")
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=15)
    add_output_options(parser)
    args = parser.parse_args()
    names = args.modes.split(",")
    if "plain" not in names:
        parser.error(f"--modes: expected plain among them, which the others are measured beside, got {args.modes!r}")
    times, collectives = measure(names, args.blocks, args.rounds)
    extra = {
        name: [1e3 * (a - b) / args.blocks for a, b in zip(times[name], times["plain"], strict=True)]
        for name in names
        if name != "plain"
    }
    figures: dict[str, dict[str, float]] = {}
    for name, some in extra.items():
        low, middle, high = quartiles(some)
        figures[name] = {"ms per unit": middle, "low": low, "high": high, "collectives": collectives[name]}
    for one in figures.values() if "FSDP2" in figures else ():
        one["over FSDP2"] = one["ms per unit"] / figures["FSDP2"]["ms per unit"]
    rows = [
        [name, f"{f['ms per unit']:.2f}", f"{f['low']:.2f} to {f['high']:.2f}", str(f["collectives"])]
        for name, f in figures.items()
    ]
    if "FSDP2" in figures:
        rows = [[*row, f"{figures[row[0]]['over FSDP2']:.2f}"] for row in rows]
    print(f"plain step: {1e3 * statistics.median(times['plain']):.1f} ms")
    report(["beyond plain", "ms per unit", "spread", "collectives", "of FSDP2's"][: len(rows[0])], rows, figures, args)


if __name__ == "__main__":
    main()
