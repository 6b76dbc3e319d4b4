"""Steps of random strategies on gloo ranks for so many seconds, each compared with plain autograd, where memory is guarded.

    python tests/soak.py --ranks 4 --seconds 120

Whether a buffer is ever freed or written while gloo has it: guard.c, which needs a C compiler, puts every tensor before a page
that nobody may touch and never uses its memory again. Some steps end in an error on every rank, or go no further than forward.
A rank that dies says where, by faulthandler. One line with the number of steps if nothing was found.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models import function, module_class
from ranks import free_port

LEAST = 20  # steps
LIMIT = 300  # seconds after which a rank that stands still says where


def soak(ranks: int, seconds: float, seed: int, least: int = LEAST) -> int:
    """The number of steps, at least so many. Raises AssertionError with all that was said if a rank fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "expected a C compiler, got none"
    with tempfile.TemporaryDirectory() as folder:
        library, source = f"{folder}/guard.so", str(Path(__file__).with_name("guard.c"))
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "LD_PRELOAD": library}
        command = [sys.executable, __file__, "--rank", "--seconds", str(seconds), "--seed", str(seed), "--least", str(least)]
        outputs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("w") as out:
                    own = {**env, "RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env=own, stdout=out, stderr=subprocess.STDOUT))
            end = time.monotonic() + seconds + LIMIT
            while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes) and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1 if any(p.poll() for p in processes) else 0)  # the others may say why as well
        finally:
            for process in processes:
                process.kill()
        codes, said = [process.wait() for process in processes], [output.read_text() for output in outputs]
    report = "\n".join(f"--- rank {r}: exit code {code} ---\n{said[r]}" for r, code in enumerate(codes))
    assert codes == [0] * ranks, report
    return int(said[0].split()[-1])


class Stop(Exception):
    """An error in the middle of a step, on every rank."""


def rank_main(seconds: float, seed: int, least: int) -> None:
    faulthandler.enable()
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _get_work_registry_size

    from funshard._wire.chain import wait_unclaimed

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps, end = 0, time.monotonic() + seconds
    for step in _steps(seed, dist.get_rank(), dist.get_world_size()):
        faulthandler.dump_traceback_later(LIMIT / 2, exit=True)
        going = torch.tensor(float(steps < least or time.monotonic() < end))
        dist.broadcast(going, 0)
        if not going:
            break
        step()
        steps += 1
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    wait_unclaimed()
    assert not _get_work_registry_size(), f"{_get_work_registry_size()} collectives that nobody has waited for"
    dist.barrier()
    print("steps", steps)
    dist.destroy_process_group()


def _steps(seed: int, rank: int, size: int) -> Iterator[Callable[[], None]]:
    """Random steps, the same ones on every rank; each of them asserts that its gradients are those of plain autograd."""
    import torch
    from parity import DERIVATIVES, leaves_of, strategies
    from torch import Tensor, nn
    from torch.distributed import init_device_mesh

    import funshard as fs
    from funshard import P

    codec = fs.Codec(lambda x: (x,), lambda x: x)
    kinds = [*strategies("shard", "keep", "remat", "replicated").values(), P("shard", precision=fs.Precision(codec=codec))]
    meshes = [init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))]
    if size % 2 == 0 and size > 2:
        meshes.append(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    alike, own = random.Random(seed), random.Random(seed + 1 + rank)

    def rest() -> None:
        time.sleep(own.choice([0, 0, 0, 0.001, 0.01]))

    def forward(x: Tensor, fails: bool) -> Tensor:
        rest()
        return x.view_as(x)

    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.fails = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rest()
        if ctx.fails:
            raise Stop
        return grad, None

    # the identity, which takes another time on each rank in both directions, and may fail in backward
    methods = {"setup_context": setup_context, "backward": backward}
    Slow = function(forward, jvp=lambda ctx, tangent, _: tangent.view_as(tangent), **methods)
    Layer = module_class(
        "Layer",
        lambda width: {"linear": nn.Linear(width, width), "norm": nn.LayerNorm(width), "fails": False},
        lambda self, x: x + Slow.apply(torch.tanh(self.norm(self.linear(x))), self.fails),
    )

    def make() -> Callable[[], None]:
        width, depth = alike.choice([1, 2, 3, 5, 8, 16, 33, 70]), alike.randint(1, 5)
        torch.manual_seed(alike.randrange(10**6))
        model = nn.Sequential(*(Layer(width) for _ in range(depth))).double()
        for p in model.parameters():
            p.requires_grad_(alike.random() < 0.85)
        model[-1].norm.bias.requires_grad_(True)
        xs = torch.randn(size, 3, width, dtype=torch.float64)
        spec = fs.by_type(Layer, p=alike.choice(kinds))(model).on(alike.choice(meshes))
        options = {"prefetch": alike.randint(0, 2), "in_flight": alike.randint(1, 2)}
        way = alike.choice(["autograd", "fs.grad", "fs.grad", "double backward", "hvp", "value", "no backward", "error"])
        trained, frozen = fs.partition(fs.shard(model, spec), spec)

        def loss(params: fs.Params, x: Tensor = xs[rank]) -> Tensor:
            y = fs.functional_call(model, fs.combine(params, frozen), x, spec=spec, **options)
            return (y**2).mean()

        def whole(params: fs.Params) -> Tensor:
            return torch.stack([(torch.func.functional_call(model, params, x) ** 2).mean() for x in xs]).mean()

        def check(got: fs.Params, want: fs.Params) -> None:
            full = {name: torch.zeros_like(p) for name, p in model.named_parameters()} | want
            for key, mine in fs.partition(fs.shard(full, spec), spec)[0].items():
                ok = torch.allclose(got[key], mine, rtol=1e-9, atol=1e-9)
                assert ok, f"{way} {spec.by_key[key]} {options}: got {got[key]}, expected {mine}"

        plain = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        rest = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}

        def run() -> None:
            if way == "value":
                with torch.no_grad():
                    loss(trained)
            elif way == "no backward":
                loss(leaves_of(trained))
            elif way == "error":
                alike.choice(list(model)).fails = True
                with contextlib.suppress(Stop):  # none where nothing before it is trained
                    loss(leaves_of(trained)).backward()
            else:
                check(DERIVATIVES[way](loss)(trained), DERIVATIVES[way](lambda p: whole({**p, **rest}))(plain))

        return run

    while True:
        yield make()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=LEAST, help="steps, however long they take")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.seconds, args.seed, args.least)
    else:
        print(soak(args.ranks, args.seconds, args.seed, args.least), "steps, nothing found")


if __name__ == "__main__":
    main()
