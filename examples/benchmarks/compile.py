"""Seconds from a fresh process to its first finished step, with compiled code, by the depth of the model.

    python examples/benchmarks/compile.py
    python examples/benchmarks/compile.py --backend inductor --blocks 2,8
    python examples/benchmarks/compile.py --modes 'FSDP2,units' --blocks 2,8,24,80 --json compile.json

A GPT of width 64 takes one step of forward, loss and backward on a fake process group of 8 ranks, whose collectives return at
once. Each figure is a process of its own, from before torch is imported to the end of
the step. "plain" compiles the unsharded model, "plain step" a gradient of torch.func over it as one graph; "FSDP2" compiles
each block before `fully_shard`; "units" is ``P("shard", compile=True)``; "step" is `fs.compile` of the whole step. "eager" is
FSDP2 without compilation.

"cold" has empty caches, "warm" is a second process that finds the first one's (only inductor has such caches). For the time and
memory of steps after the first see peers.py: --modes 'FSDP2 compiled,fs units compiled,fs compiled'.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time

BEGIN = time.perf_counter()

from report import add_output_options, report  # noqa: E402  torch's import counts

MODES = ("eager", "plain", "plain step", "FSDP2", "units", "step")


def run_step(mode: str, blocks: int, backend: str) -> None:
    """Take one step, and print the seconds since the process began and the graphs that were compiled."""
    import torch
    import torch.distributed as dist
    from common import GPT, Block, fake_world, fsdp2, funshard, loss_of, plain
    from torch._dynamo.utils import counters

    import funshard as fs

    torch.set_num_threads(1)
    x, y = torch.randint(256, (2, 2, 32))
    with fake_world(8):
        torch.manual_seed(0)
        model = GPT(blocks, 64, 4, 32)
        if mode == "plain":
            step = plain(torch.compile(model, backend=backend))
        elif mode == "plain step":
            full = {name: p.detach() for name, p in model.named_parameters()}
            model.to("meta")
            grad = torch.func.grad_and_value(lambda p, x, y: loss_of(torch.func.functional_call(model, p, (x,)), y))
            step = functools.partial(torch.compile(grad, backend=backend, fullgraph=True), full)
        elif mode in ("eager", "FSDP2"):
            for i, block in enumerate(model.blocks if mode == "FSDP2" else ()):
                model.blocks[i] = torch.compile(block, backend=backend)
            step = fsdp2(model, dist.init_device_mesh("cpu", (8,)))
        elif mode == "units":
            spec = fs.by_type(Block, p=fs.P("shard", compile=fs.Compile(backend=backend)))(model)
            step = funshard(model, spec.bound)
        else:
            spec = fs.by_type(Block)(model).bound
            params = fs.shard(model, spec)
            model.to("meta")
            compiled = fs.compile(
                fs.grad_and_value(lambda p, x, y: loss_of(fs.functional_call(model, p, (x,), spec=spec), y)), backend=backend
            )
            step = functools.partial(compiled, params)
        step(x, y)
        print(time.perf_counter() - BEGIN, counters["stats"]["unique_graphs"])


def measure(mode: str, blocks: int, backend: str, cache: str) -> tuple[float, int]:
    """Return the seconds and the graphs of a process with this cache."""
    command = [sys.executable, __file__, "--step", mode, "--blocks", str(blocks), "--backend", backend]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{mode} of {blocks} blocks ended with {done.returncode}:\n{done.stderr}")
    seconds, graphs = done.stdout.split()[-2:]
    return float(seconds), int(graphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--blocks", default="2,8,24")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--rounds", type=int, default=1, help="the least of so many is reported")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    add_output_options(parser)
    args = parser.parse_args()
    if args.step:
        run_step(args.step, int(args.blocks), args.backend)
        return
    depths = [int(blocks) for blocks in args.blocks.split(",")]
    rows, figures = [], {}
    for mode in args.modes.split(","):
        for state in ("cold", "warm") if args.backend == "inductor" and mode != "eager" else ("cold",):
            figures[f"{mode} {state}"] = {}
        for blocks in depths:
            for _ in range(args.rounds):
                with tempfile.TemporaryDirectory() as cache:
                    for state in ("cold", "warm"):
                        if (known := figures.get(f"{mode} {state}")) is None:
                            continue
                        seconds, graphs = measure(mode, blocks, args.backend, cache)
                        known[blocks] = min(known.get(blocks, (seconds, graphs)), (seconds, graphs))
        for state in ("cold", "warm"):
            if f"{mode} {state}" in figures:
                known = figures[f"{mode} {state}"]
                rows.append([mode, state, *(f"{known[b][0]:.1f} s, {known[b][1]} graphs" for b in depths)])
    report(["mode", "caches", *(f"{blocks} blocks" for blocks in depths)], rows, figures, args)


if __name__ == "__main__":
    main()
