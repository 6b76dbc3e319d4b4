"""What ranks tell each other before they rely on it: that their specs agree, that a source has what it should."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from . import _torch
from .collectives import all_gather
from .mesh import Group, Mesh
from .spec import PartitionSpec

__all__ = ["broadcast_text", "check_ranks_agree", "process_group"]


def _lines(spec: PartitionSpec) -> list[str]:
    """What must be alike on all ranks, a line for each parameter."""
    order = [] if spec.runs is None else [f"order {', '.join(map(repr, spec.runs))}"]
    return order + [
        f"unit '{unit.key}' {unit.p}: parameter '{min(p.names)}' {list(p.shape)} {p.dtype} order={p.order} "
        f"requires_grad={p.requires_grad}"
        for unit in spec
        for p in unit.params
    ]


def check_ranks_agree(spec: PartitionSpec, error: str = "") -> None:
    """ValueError on every rank of the mesh if their specs differ, or if one of them reports an error of its own.

    One small all-gather of a digest per mesh axis. Only when all axes are through is the result looked at: a rank that
    raised before would leave others waiting.
    """
    mesh = spec.bound_mesh
    lines = [error] if error else _lines(spec)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    device = mesh.device or torch.device("cpu")
    digests = _rows(torch.tensor(list(digest), dtype=torch.uint8, device=device), mesh)
    if bool((digests == digests[0]).all()):
        return
    texts = _gather_texts("\n".join(lines), mesh, device)
    other, rank = next((t.split("\n"), r) for r, t in enumerate(texts) if t != texts[0])
    first = texts[0].split("\n")
    i = next(i for i in range(len(first) + 1) if first[i : i + 1] != other[i : i + 1])
    expected, got = (x[i] if i < len(x) else "nothing more" for x in (first, other))
    raise ValueError(
        f"the ranks of the mesh {mesh.names} have different models: expected, as on its rank 0, {expected}; "
        f"got on rank {rank} {got}; build the same model with the same policy on every rank"
    )


def _rows(row: Tensor, mesh: Mesh) -> Tensor:
    """The rows of all ranks of the mesh, in its row-major order, over the axes that can communicate."""
    rows = row.unsqueeze(0)
    for _, axis in reversed(mesh.axes):
        if isinstance(axis, Group) and axis.name:
            rows = all_gather(rows, axis)
    return rows


def _gather_texts(text: str, mesh: Mesh, device: torch.device) -> list[str]:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = _rows(torch.tensor([len(data)], device=device), mesh).flatten().tolist()
    padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
    return [bytes(row[:n].tolist()).decode() for row, n in zip(_rows(padded, mesh), lengths, strict=True)]


def broadcast_text(text: str, mesh: Mesh, source: tuple[int, ...], device: torch.device) -> str:
    """The source's text on every rank of the mesh: an axis at a time, the length first."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    for name, src in zip(mesh.names, source, strict=True):
        _, group = process_group(mesh, name)
        if group is None:
            continue
        length = torch.tensor([len(data)], device=device)
        dist.broadcast(length, group=group, group_src=src)
        data = data if len(data) == int(length) else data.new_empty(int(length))
        if len(data):
            dist.broadcast(data, group=group, group_src=src)
    return bytes(data.tolist()).decode()


def process_group(mesh: Mesh, name: str) -> tuple[Group, dist.ProcessGroup | None]:
    """An axis that is no simulated one, and its process group, None for a single rank; ValueError without one."""
    axis = mesh[name]
    assert isinstance(axis, Group)
    if axis.size > 1 and not axis.name:
        raise ValueError(f"axis '{name}' of {axis.size} ranks has no process group: bind the spec with .on(mesh)")
    return axis, _torch.group(axis.name) if axis.size > 1 else None
