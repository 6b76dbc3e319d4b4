"""What examples share: a byte-level GPT, the ranks, text of the standard library, and the frame of a training run."""

import argparse
import math
import os
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from progress import Progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import funshard as fs


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def ranks() -> tuple[int, int, torch.device]:
    """This rank, how many there are, and its device; with a process group if torchrun has started them."""
    gpu = torch.cuda.is_available()
    if dist.is_torchelastic_launched():
        again, store = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), None
        if again:  # torchrun has kept its store, with the addresses of ranks that are gone: we begin under a name of our own
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store = dist.PrefixStore(f"start-{again}", store)
        of_store = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("nccl" if gpu else "gloo", **(of_store if again else {}))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return rank, world, device


def text(pattern: str, most: int) -> tuple[Tensor, Tensor]:
    """Nine tenths of the bytes of the standard library's files of this pattern for training, and a tenth for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:most]), dtype=torch.uint8)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def batch(
    source: Tensor, shape: tuple[int, int], generator: torch.Generator, device: torch.device, own: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """So many sequences of so many bytes, and the byte after each; of those that are drawn, one's own."""
    starts = torch.randint(len(source) - shape[1] - 1, (shape[0], 1), generator=generator)[own]
    chunk = source[starts + torch.arange(shape[1] + 1)].long().to(device)
    return chunk[:, :-1], chunk[:, 1:]


def add_run_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options of a training run: its steps, rate, seed, progress lines and text."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--max-bytes", type=int, default=4_000_000)


def mesh_of(axes: Mapping[str, int], device: torch.device) -> DeviceMesh | Mapping[str, int]:
    """Return a mesh of these sizes by axis: of process groups where there are several ranks."""
    if math.prod(axes.values()) == 1:
        return axes
    return init_device_mesh(device.type, (*axes.values(),), mesh_dim_names=(*axes,))


class LossReport:
    """The progress of a training run, by the loss of each step."""

    def __init__(self, args: argparse.Namespace, spec: fs.PartitionSpec, rank: int) -> None:
        self.args, self.mesh, self.start = args, spec.bound_mesh, time.perf_counter()
        self.progress = Progress(args.steps, shown=rank == 0)

    def report(self, step: int, value: Tensor, norm: Tensor | None = None) -> None:
        """Show the mean loss over all ranks, every few steps and at the last one."""
        if step % self.args.log_every and step != self.args.steps - 1:
            return
        mean = fs.collectives.sum_over(value, self.mesh) / math.prod(size for _, size in self.mesh.sizes)
        seconds = (time.perf_counter() - self.start) / (step + 1)
        length = {} if norm is None else {"norm": float(norm)}
        self.progress.show(step, loss=float(mean), **length, **{"seconds a step": seconds})
