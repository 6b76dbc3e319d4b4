"""Checks between ranks before they communicate: specs and values agree, and a source has the right parameters."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.checks import take_full_params
from .._core.layout import to_memory_order
from .._core.mesh import Mesh, ProcessAxis
from .._core.spec import PartitionSpec
from ..collectives._sequence import Comparison, RankLines, find_difference, find_host_groups
from ..collectives._world import process_axes

__all__ = ["check_ranks_agree", "has_peers", "hash_bits", "hash_params", "hash_spec", "process_group"]
__all__ += ["report_to_ranks"]


def _spec_lines(spec: PartitionSpec) -> list[str]:
    """Return what must be equal on all ranks, a line for each parameter."""
    order = [] if spec.run_order is None else [f"order {', '.join(map(repr, spec.run_order))}"]
    return order + [
        f"unit '{unit.key}' {unit.p}: parameter '{min(p.names)}' {list(p.shape)} {p.dtype} order={p.order} "
        f"requires_grad={p.requires_grad}"
        for unit in spec
        for p in unit.params
    ]


def hash_spec(spec: PartitionSpec) -> str:
    """Return a text that is equal on two ranks if `check_ranks_agree` finds their specs equal."""
    return hashlib.sha256("\n".join(_spec_lines(spec)).encode()).hexdigest()


SHARD_VALUES_HINT = (
    "call torch.manual_seed with one seed on all ranks before the model is built, or take those of one rank by "
    "shard(..., src=0), or, if they are meant to differ, give check_values=False"
)


def check_ranks_agree(
    spec: PartitionSpec,
    values: Tensor | None = None,
    asked: tuple[str, ...] = (),
    *,
    error: str = "",
    hint: str = SHARD_VALUES_HINT,
) -> None:
    """Raise ValueError on every rank of the mesh if specs or values differ, or if one rank reports an error.

    ``values`` are the `hash_params` of parameters that all ranks should have equal, ``asked`` are options that all must
    have given, ``hint`` says what to do if values differ. Hosts compare a digest.
    """
    mesh, params = spec.bound_mesh, [(unit.key, param.name) for unit in spec for param in unit.params]
    lines = [error] if error else [*asked, f"check_values={values is not None}", *_spec_lines(spec)]
    hashes = [] if error or values is None else [*map(str, values.tolist())]

    def make_error(everyone: RankLines) -> ValueError:
        rows = [found[len(lines) :] for _, found in everyone]
        specs = [(rank, found[: len(lines)]) for rank, (_, found) in enumerate(everyone)]
        if any(found != lines for _, found in specs):
            _, (_, expected), (rank, got) = find_difference(specs)
            return ValueError(
                f"the ranks of the mesh {mesh.names} have different models: expected, as on its rank 0, {expected}; "
                f"got on rank {rank} {got}; build the same model with the same policy on every rank"
            )
        others = [i for i, column in enumerate(zip(*rows, strict=True)) if len({*column}) > 1]
        ranks = [rank for rank, row in enumerate(rows) if row[others[0]] != rows[0][others[0]]]
        key, name = params[others[0]]
        return ValueError(
            f"parameter '{name}' of unit '{key}': expected the same values on all ranks of the mesh {mesh.names}, got others "
            f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} than on rank 0 ({len(others)} of {len(params)} "
            f"parameters differ); {hint}"
        )

    Comparison(lines + hashes, find_host_groups(mesh), make_error, "models").finish()


@contextlib.contextmanager
def report_to_ranks(spec: PartitionSpec, together: bool) -> Generator[None]:
    """Report an error raised inside to the ranks that wait in `check_ranks_agree`, if ``together``, and raise it."""
    try:
        yield
    except Exception as error:
        if together:
            text = _torch.error_text(error)
            text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            with contextlib.suppress(ValueError):
                check_ranks_agree(spec, error=text)
        raise


# --- Hashes of values. ---

_PIECE = 1 << 17
"""Words hashed at once: few enough that their factors stay in the cache."""


def hash_params(params: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return a hash of the bits of each parameter, in the order of the spec, with NaN and -0.0 like any other values.

    A hash sums the 64-bit words, each times an odd number for its place, modulo 2**64: one changed word always changes it. It
    is computed on the parameter's own device.
    """
    sizes = dict(spec.bound_mesh.sizes)
    with torch.no_grad():
        found = [
            hash_bits(to_memory_order(tensor.detach(), param))
            for unit in spec
            for tensor, param in zip(take_full_params(params, unit, sizes), unit.params, strict=True)
        ]
        return torch.stack([number.to(found[0].device) for number in found]) if found else torch.zeros(0, dtype=torch.int64)


def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits, as an int64 scalar tensor; 0 on the meta device."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # also of one element, which counts as contiguous whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    return _hash_words(torch.cat([_hash_words(words.view(torch.int64)), raw[whole:].long()]))[0]


def _hash_words(words: Tensor) -> Tensor:
    """Return a hash of words and their places, as an int64 tensor [1]."""
    places = torch.arange(1, min(len(words), _PIECE) + 1, device=words.device)
    places *= -0x61C8864680B583EB  # as in splitmix64: neighbours get numbers that have nothing in common
    places = (places ^ (places >> 29)) * -0x40A7B892E31B1A47 | 1
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * 0x5851F42D4C957F2D + (piece * places[: len(piece)]).sum()
    return total


# --- Between the ranks. ---


def has_peers(mesh: Mesh) -> bool:
    """Return whether the mesh has other processes and process groups to reach them."""
    return len(process_axes(mesh)) > 0  # Dynamo of torch 2.11 traces no bool() of a list


def process_group(mesh: Mesh, name: str) -> tuple[ProcessAxis, dist.ProcessGroup | None]:
    """Return a mesh axis and its process group, None for a single rank; raise ValueError if it has none."""
    axis = mesh[name]
    assert isinstance(axis, ProcessAxis)
    if axis.size > 1 and not axis.name:
        raise ValueError(f"axis '{name}' of {axis.size} ranks has no process group: bind the spec with .on(mesh)")
    return axis, _torch.resolve_group(axis.name) if axis.size > 1 else None
