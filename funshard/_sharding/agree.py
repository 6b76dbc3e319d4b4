"""What ranks tell each other before they rely on it: that specs and values agree, that a source has what it should."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Generator, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._spec.fits import full_of_unit
from .._spec.spec import PartitionSpec
from .._units.layout import to_memory_order
from ..collectives._functions import gather_slices
from ..collectives._mesh import Mesh, ProcessAxis

__all__ = [
    "broadcast_text",
    "check_ranks_agree",
    "fingerprint",
    "fingerprints",
    "gather_texts",
    "process_group",
    "spec_numbers",
    "talks",
    "telling",
]


def _lines(spec: PartitionSpec) -> list[str]:
    """What must be alike on all ranks, a line for each parameter."""
    order = [] if spec.runs is None else [f"order {', '.join(map(repr, spec.runs))}"]
    return order + [
        f"unit '{unit.key}' {unit.p}: parameter '{min(p.names)}' {list(p.shape)} {p.dtype} order={p.order} "
        f"requires_grad={p.requires_grad}"
        for unit in spec
        for p in unit.params
    ]


def spec_numbers(spec: PartitionSpec) -> list[int]:
    """Numbers that are alike on ranks for whose specs `check_ranks_agree` would find nothing."""
    return list(struct.unpack("<4q", hashlib.sha256("\n".join(_lines(spec)).encode()).digest()))


MEND = (
    "call torch.manual_seed with one seed on all ranks before the model is built, or take those of one rank by "
    "shard(..., src=0), or, if they are meant to differ, give check_values=False"
)


def check_ranks_agree(
    spec: PartitionSpec, values: Tensor | None = None, asked: tuple[str, ...] = (), *, error: str = "", mend: str = MEND
) -> None:
    """ValueError on every rank of the mesh if their specs differ, their values, or if one reports an error of its own.

    ``values`` are the `fingerprints` of parameters that all ranks should have alike, ``asked`` what all must have asked
    for, ``mend`` what to do where values differ. One small all-gather of a digest per mesh axis. Only when all axes are
    through is the result looked at: a rank that raised before would leave others waiting.
    """
    mesh = spec.bound_mesh
    asked = (*asked, f"check_values={values is not None}")
    lines = [error] if error else [*asked, *_lines(spec)]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    device = mesh.device or torch.device("cpu")
    own = torch.zeros(0, dtype=torch.int64, device=device) if values is None else values.to(device)
    rows = _rows(torch.cat([torch.tensor(list(digest), dtype=torch.uint8, device=device), _mixed(own).view(torch.uint8)]), mesh)
    differs = (rows != rows[0]).any(0).tolist()
    if any(differs[: len(digest)]):
        _raise_difference(lines, mesh, device)
    if any(differs):
        _raise_values(own, spec, mesh, mend)


@contextlib.contextmanager
def telling(spec: PartitionSpec, together: bool) -> Generator[None]:
    """Within it an error is told to the ranks that wait in `check_ranks_agree`, if there are any."""
    try:
        yield
    except Exception as error:
        if together:
            told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(ValueError):
                check_ranks_agree(spec, error=told)
        raise


def _raise_difference(lines: list[str], mesh: Mesh, device: torch.device) -> NoReturn:
    texts = gather_texts("\n".join(lines), mesh, device)
    other, rank = next((t.split("\n"), r) for r, t in enumerate(texts) if t != texts[0])
    first = texts[0].split("\n")
    i = next(i for i in range(len(first) + 1) if first[i : i + 1] != other[i : i + 1])
    expected, got = (x[i] if i < len(x) else "nothing more" for x in (first, other))
    raise ValueError(
        f"the ranks of the mesh {mesh.names} have different models: expected, as on its rank 0, {expected}; "
        f"got on rank {rank} {got}; build the same model with the same policy on every rank"
    )


def _raise_values(own: Tensor, spec: PartitionSpec, mesh: Mesh, mend: str) -> NoReturn:
    rows = _rows(own, mesh)
    differs = rows != rows[0]
    names = [(unit.key, param.name) for unit in spec for param in unit.params]
    which = differs.any(0).nonzero().flatten().tolist()
    ranks = differs[:, which[0]].nonzero().flatten().tolist()
    key, name = names[which[0]]
    raise ValueError(
        f"parameter '{name}' of unit '{key}': expected the same values on all ranks of the mesh {mesh.names}, got others on "
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} than on rank 0 ({len(which)} of {len(names)} parameters "
        f"differ); {mend}"
    )


# --- Values as numbers that differ where they do. ---

_PIECE = 1 << 17
"""Words that are looked at together: what they are multiplied by then stays in the cache."""


def fingerprints(params: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """For each parameter, in the order of the spec, a number that follows from its bits: NaN and -0.0 like all others.

    Sums of 64-bit words, each times an odd number of its place, modulo 2**64: one changed word always shows. Made on the
    parameter's own device.
    """
    with torch.no_grad():
        found = [
            fingerprint(to_memory_order(tensor.detach(), param))
            for unit in spec
            for tensor, param in zip(full_of_unit(params, unit), unit.params, strict=True)
        ]
        return torch.stack([number.to(found[0].device) for number in found]) if found else torch.zeros(0, dtype=torch.int64)


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that follows from the tensor's bits, as an int64 tensor without dimensions; 0 on the meta device."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # also of one element, which counts as contiguous whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    return _mixed(torch.cat([_mixed(words.view(torch.int64)), raw[whole:].long()]))[0]


def _mixed(words: Tensor) -> Tensor:
    """One number, as a tensor of one element, that follows from these and their places."""
    places = torch.arange(1, min(len(words), _PIECE) + 1, device=words.device)
    places *= -0x61C8864680B583EB  # as in splitmix64: neighbours get numbers that have nothing in common
    places = (places ^ (places >> 29)) * -0x40A7B892E31B1A47 | 1
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * 0x5851F42D4C957F2D + (piece * places[: len(piece)]).sum()
    return total


# --- Between the ranks. ---


def talks(mesh: Mesh) -> bool:
    """Whether there are other processes on the mesh, with groups to reach them by."""
    return bool(_talking(mesh))


def _talking(mesh: Mesh) -> list[ProcessAxis]:
    return [axis for _, axis in mesh.axes if isinstance(axis, ProcessAxis) and axis.name and axis.size > 1]


def _rows(row: Tensor, mesh: Mesh) -> Tensor:
    """The rows of all ranks of the mesh, in its row-major order, over the axes that can communicate."""
    rows = row.unsqueeze(0)
    for axis in reversed(_talking(mesh)):
        rows = gather_slices(rows, axis)
    return rows


def gather_texts(text: str, mesh: Mesh, device: torch.device) -> list[str]:
    """The texts of all ranks of the mesh, in its row-major order, over the axes that can communicate."""
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


def process_group(mesh: Mesh, name: str) -> tuple[ProcessAxis, dist.ProcessGroup | None]:
    """An axis that is no simulated one, and its process group, None for a single rank; ValueError without one."""
    axis = mesh[name]
    assert isinstance(axis, ProcessAxis)
    if axis.size > 1 and not axis.name:
        raise ValueError(f"axis '{name}' of {axis.size} ranks has no process group: bind the spec with .on(mesh)")
    return axis, _torch.resolve_group(axis.name) if axis.size > 1 else None
