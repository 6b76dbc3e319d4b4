"""spmd: N ranks in one process, by torch.vmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._core.mesh import Axis, Mesh, Simulated


def spmd(fn: Callable[..., Any], size: int | Mapping[str, int]) -> Callable[..., Any]:
    """Run ``fn`` on every rank of a simulated mesh, in one process: ``spmd(fn, 4)(xs)[r] == fn(mesh, xs[r])`` on rank r.

    torch.func's transforms work inside and outside. Close over what all ranks share. Random numbers are each rank's own; a
    vmap inside has the ``randomness`` that you give it, and with ``chunk_size`` it cannot be an axis (ValueError).

    Args:
        fn: A function of the mesh, to which it binds specs with ``.on(mesh)``, and this rank's arguments.
        size: The size of one axis "shard", or axis names with sizes.

    Returns:
        A function of the same arguments without the mesh. Tensors in its arguments and results have the ranks in dimension 0,
        row by row for a mesh of several axes.

    >>> import funshard as fs
    >>> fs.testing.spmd(lambda mesh, x: fs.collectives.gather_slices(x, mesh["shard"]), 2)(torch.tensor([[1], [2]]))
    tensor([[1, 2],
            [1, 2]])
    """
    sizes = {"shard": size} if isinstance(size, int) else dict(size)
    total = torch.Size(sizes.values()).numel()

    def run(*args: Any) -> Any:
        def nest(axes: tuple[tuple[str, Axis], ...], rest: list[tuple[str, int]], inner: Any) -> Any:
            if not rest:
                return fn(Mesh(axes), *inner)
            (name, n), *others = rest

            def one(rank: torch.Tensor, *leaves: Any) -> Any:
                axis = Simulated(n, rank)
                return nest((*axes, (name, axis)), others, pytree.tree_unflatten(list(leaves), treedef))

            leaves, treedef = pytree.tree_flatten(inner)
            dims = tuple(0 if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
            return torch.vmap(one, in_dims=(0, *dims), randomness="different")(torch.arange(n), *leaves)

        def split(x: torch.Tensor) -> torch.Tensor:
            if len(x) != total:
                raise ValueError(f"spmd: expected {total} ranks in dimension 0, got shape {list(x.shape)}")
            return x.unflatten(0, tuple(sizes.values()))

        out = nest((), list(sizes.items()), pytree.tree_map_only(torch.Tensor, split, args))
        return pytree.tree_map_only(torch.Tensor, lambda x: x.flatten(0, len(sizes) - 1), out)

    return run
