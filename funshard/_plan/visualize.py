"""visualize: a sharding drawn in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .._spec.checks import bind_spec, check_buffers
from .._spec.spec import PartitionSpec
from .at_rest import count_per_slice

__all__ = ["visualize"]

MOST_RANKS = 8


def visualize(params: Mapping[str, Tensor], spec: PartitionSpec, *, width: int = 72) -> str:
    """Return a drawing of sharded parameters: a row for each unit, with the slice of every rank that splits it.

    After ``jax.debug.visualize_array_sharding``. A box is a slice, and says which rank has it; the dots at its end are
    its share of padding.

    Args:
        params: The shards, as `shard` gives them.
        spec: Their spec.
        width: The characters of a row.

    Returns:
        The text, to be printed.

    Raises:
        ValueError: Naming the unit, for shards that are not those of the spec.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        >>> spec = fs.by_type(torch.nn.Linear)(model).on({"shard": 2})
        >>> print(fs.visualize(fs.shard(model, spec, rank=0), spec, width=30))
        0  shard=2  72
        +-------------+-------------+
        |      0      |      1   ...|
        +-------------+-------------+
        1  shard=2  27
        +-------------+-------------+
        |      0  ....|      1      |
        +-------------+-------------+
    """
    spec = bind_spec(spec)
    check_buffers(params, spec, {unit.key: spec.stored(unit)[0] for unit in spec})
    sizes, lines = dict(spec.bound_mesh.sizes), []
    for unit in spec:
        slices, length = spec.size(unit), spec.shard_numel(unit)
        counts = count_per_slice(unit, slices, length).tolist()
        shown = min(slices, MOST_RANKS)
        cell = max((width - 1) // (shown + (slices > shown)) - 1, 6)
        boxes: list[str] = []
        for rank in range(shown):
            padding = round(cell * (length - counts[rank]) / length) if length else 0
            name = "all" if slices == 1 else str(rank)
            boxes.append(name.center(cell)[: cell - padding] + "." * padding)
        if slices > shown:
            boxes.append(f"... {slices - 1}".center(cell))
        edge = "+" + "+".join("-" * cell for _ in boxes) + "+"
        axes = " x ".join(f"{axis}={sizes[axis]}" for axis in unit.p.axes) or "replicated"
        lines += [f"{unit.key or repr('')}  {axes}  {unit.numel:,}", edge, "|" + "|".join(boxes) + "|", edge]
    return "\n".join(lines)
