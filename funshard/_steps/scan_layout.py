"""What the arguments and results of a scan are like: slices of one length, and a state that keeps its tree and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._transforms._recompute.code_reads import version_of

__all__ = ["StateLayout", "check_unchanged", "concat_results", "count_steps", "expand_result", "record_versions"]


def count_steps(xs: object) -> int:
    """Return the tensors' common length along dimension 0; raise TypeError or ValueError, with the path, if there is none."""
    first = ""
    steps = 0
    for path, leaf in pytree.tree_flatten_with_path(xs)[0]:
        name = f"xs{pytree.keystr(path)}"
        if not isinstance(leaf, Tensor):
            raise TypeError(f"scan: {name}: expected a tensor, got {type(leaf).__name__}")
        if not leaf.dim():
            raise ValueError(f"scan: {name}: expected one slice for each step along dimension 0, got a tensor of shape []")
        if not first:
            first, steps = name, leaf.shape[0]
        if leaf.shape[0] != steps:
            raise ValueError(f"scan: {name}: expected length {steps} along dimension 0, as {first} has, got {leaf.shape[0]}")
    if not first:
        raise ValueError("scan: xs has no tensors: expected one at least, such as torch.arange(T) for T steps")
    if not steps:
        raise ValueError(f"scan: {first}: expected one step at least, got length 0")
    return steps


_Kind = tuple[torch.Size, torch.dtype, torch.device] | type
"""What a leaf is like: shape, dtype and device of a tensor, or a class."""


def _kind_of(leaf: object) -> _Kind:
    """Return a tensor's shape, dtype and device, or the class of any other leaf."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)


def _describe(kind: _Kind) -> str:
    """Return the text for a leaf's kind in an error."""
    return kind.__name__ if isinstance(kind, type) else f"{list(kind[0])} {kind[1]} on {kind[2]}"


def _kinds_by_path(tree: object) -> dict[str, _Kind]:
    """Return the kind of every leaf of a tree by path."""
    return {pytree.keystr(path): _kind_of(leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]}


def _check_equal(expected: dict[str, _Kind], got: dict[str, _Kind], name: str, hint: str) -> None:
    """Raise ValueError for the first path that only one tree has, or whose leaves are of different kinds."""
    for path in (*expected, *got):
        if expected.get(path) != got.get(path):
            texts = [_describe(kinds[path]) if path in kinds else "nothing" for kinds in (expected, got)]
            raise ValueError(f"scan: {name}{path}: expected {texts[0]}, {hint}, got {texts[1]}")


@dataclass(frozen=True)
class StateLayout:
    """The tree of a state, and the kind of each of its leaves."""

    tree: pytree.TreeSpec
    leaves: list[_Kind]
    paths: dict[str, _Kind]

    @classmethod
    def from_state(cls, state: object) -> StateLayout:
        """Return the layout of a state."""
        leaves, tree = pytree.tree_flatten(state)
        return cls(tree, [_kind_of(leaf) for leaf in leaves], _kinds_by_path(state))

    def check(self, state: object) -> None:
        """Raise ValueError, with the path, for the state after a step that is not like the one before."""
        leaves, tree = pytree.tree_flatten(state)
        if tree != self.tree or [_kind_of(leaf) for leaf in leaves] != self.leaves:
            _check_equal(self.paths, _kinds_by_path(state), "state", "as before the step")


def record_versions(*trees: object) -> list[int]:
    """Return each leaf's count of in-place changes, 0 for other objects than tensors; an empty list while torch compiles."""
    if torch.compiler.is_compiling():
        return []
    return [version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in pytree.tree_leaves(trees)]


def check_unchanged(state: object, x: object, versions: list[int]) -> None:
    """Raise RuntimeError, with the path, for a tensor that a step has changed in place since `record_versions`."""
    if record_versions(state, x) == versions:
        return
    for (path, leaf), version in zip(pytree.tree_flatten_with_path({"state": state, "x": x})[0], versions, strict=True):
        if isinstance(leaf, Tensor) and version_of(leaf) != version:
            name = path[0].key + pytree.keystr(path[1:])  # pyright: ignore
            raise RuntimeError(
                f"scan: step changes {name} in place, as an update with donate=True does: expected it unchanged, because steps "
                "run again for derivatives; give donate=False, or change a copy"
            )


def expand_result(y: Any) -> Any:
    """Return a step's y with a first dimension of 1 on its tensors; raise TypeError for a leaf that is no tensor or None."""

    def expand(path: Any, leaf: object) -> object:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(f"scan: y{pytree.keystr(path)}: expected a tensor or None, got {type(leaf).__name__}")
        return leaf if leaf is None else leaf.unsqueeze(0)

    return pytree.tree_map_with_path(expand, y)


def concat_results(ys: Sequence[Any]) -> Any:
    """Concatenate the results of all pieces along dimension 0; raise ValueError, with the path, if two steps' differ."""
    leaves, tree = pytree.tree_flatten(ys[0])
    expected = _kinds_by_path(pytree.tree_map(_take_first, ys[0]))
    columns: list[list[Any]] = [leaves]
    for y in ys[1:]:
        _check_equal(expected, _kinds_by_path(pytree.tree_map(_take_first, y)), "y", "as in the steps before")
        columns.append(pytree.tree_leaves(y))
    whole = [None if column[0] is None else torch.cat(column) for column in zip(*columns, strict=True)]
    return pytree.tree_unflatten(whole, tree)


def _take_first(leaf: Any) -> Any:
    """Return the first step's result from a leaf of stacked results; None stays None."""
    return leaf if leaf is None else leaf[0]
