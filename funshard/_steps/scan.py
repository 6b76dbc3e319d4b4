"""scan: a training run as a function, whose derivatives keep few of its states (jax.lax.scan).

Derivatives need the state before every step. A recorded run divides its steps into pieces and recomputes all pieces but the
last one, whose derivatives come first: each keeps the state that it begins with. When its turn comes, it runs again and divides
its own steps alike. So at any time the states are there that begin the pieces before the current one, at each depth.

    segments=3, 9 steps    [0 1 2] [3 4 5] [6][7] 8       kept: 0, 3; 6, 7; then step 8 is differentiated,
                           [0 1 2] [3][4] 5               and the second segment runs again
    "log", 8 steps         [0 1 2 3] [4 5] [6] 7          kept: 0, 4, 6
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._spec.options import Remat
from .._transforms._recompute.remat import call_recomputed
from .._transforms._recompute.saved_results import mark_region
from .._transforms._recompute.snapshot import find_tensors
from .._transforms.ambient import RUNNING
from .._transforms.products import find_length

# --- What the arguments and results of a scan are like: a state that keeps its tree and shapes ---


_Layout = tuple[pytree.TreeSpec, list[Any]]
"""A tree, and of each leaf shape, dtype and device, or its class if it is no tensor."""


def _read_layout(tree: object) -> _Layout:
    leaves, spec = pytree.tree_flatten(tree)
    return spec, [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in leaves]


def _check_layout(expected: _Layout, got: _Layout, name: str, hint: str) -> None:
    """Raise ValueError for the first path that only one tree has, or whose leaves are not alike."""
    if expected == got:
        return
    before, after = _describe_leaves(*expected), _describe_leaves(*got)
    for path in (*before, *after):
        texts = before.get(path, "nothing"), after.get(path, "nothing")
        if texts[0] != texts[1]:
            raise ValueError(f"scan: {name}{path}: expected {texts[0]}, {hint}, got {texts[1]}")


def _describe_leaves(tree: pytree.TreeSpec, kinds: list[Any]) -> dict[str, str]:
    texts = [kind.__name__ if isinstance(kind, type) else f"{list(kind[0])} {kind[1]} on {kind[2]}" for kind in kinds]
    return {pytree.keystr(path): text for path, text in pytree.tree_flatten_with_path(pytree.tree_unflatten(texts, tree))[0]}


def _concat_results(ys: Sequence[Any]) -> Any:
    """Concatenate the results of all pieces along dimension 0; raise ValueError, with the path, if two steps' differ."""
    first, *others = (_read_layout(pytree.tree_map(lambda y: y if y is None else y[0], piece)) for piece in ys)
    for layout in others:
        _check_layout(first, layout, "y", "as in the steps before")
    columns = zip(*map(pytree.tree_leaves, ys), strict=True)
    return pytree.tree_unflatten([None if column[0] is None else torch.cat(column) for column in columns], first[0])


# --- scan ---

State = TypeVar("State")


def scan(
    step: Callable[[State, Any], tuple[State, Any]], state: State, xs: Any, *, segments: int | Literal["log"] | None = None
) -> tuple[State, Any]:
    """Run a step for each slice of ``xs``, and keep few states for derivatives, of any order (jax.lax.scan).

    A rank's own ``xs``, such as weights of its samples, get the gradient of its own objective: N times that of the mean over
    N ranks. A scalar that all ranks share, such as a learning rate, gets the whole derivative on every rank if the update
    knows the spec: ``from_torch(..., spec=spec, differentiable=True)``. See examples/guide/research.md.

    Args:
        step: ``(state, x) -> (new state, y)``, without changes in place. The state keeps its tree, shapes and dtypes.
        state: A tree, such as ``(params, optimizer state)``.
        xs: A tree of tensors with one length T along dimension 0; step t gets the t-th slice of each.
        segments: The number of segments that are recomputed as a whole, by default about sqrt(T): a step runs at most three
            times. With T it runs twice, and every state is kept. ``"log"`` keeps log2(T) states, and a step runs
            1 + log2(T) / 2 times.

    Returns:
        ``(state, ys)``: the last state, and every step's y, stacked along dimension 0. A y may be None.

    Raises:
        ValueError, TypeError: An argument, or what ``step`` returns, does not fit; the message names the path.
        RuntimeError: As `remat`, such as for a step that changes in place what it was given, where steps run again.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad(lambda rates: fs.scan(lambda w, lr: (w - lr * w, None), torch.tensor(1.0), rates)[0])(torch.zeros(2))
        tensor([-1., -1.])
    """
    if not (steps := find_length("scan: xs", xs)):
        raise ValueError("scan: xs: expected a slice for each step, got tensors of length 0")
    return _ScanRun(_count_segments(segments, steps), _read_layout(state)).run_piece(step, state, xs, steps, 0)


def _count_segments(segments: int | str | None, steps: int) -> int | None:
    """Return the number of segments, None for halves; 1 becomes one per step; raise ValueError for others."""
    if segments == "log":
        return None
    if segments is None:
        return max(1, round(math.sqrt(steps)))
    if not isinstance(segments, int) or isinstance(segments, bool) or not 1 <= segments <= steps:
        raise ValueError(f"scan: segments: expected 1 to {steps}, the number of steps, 'log' or None, got {segments!r}")
    return steps if segments == 1 else segments  # one segment is all steps, whose states would be kept when it runs again


@dataclass(frozen=True)
class _ScanRun:
    """One call of `scan`: how its steps are divided, and the layout of its state."""

    segments: int | None
    """None divides by halves."""
    layout: _Layout

    def run_piece(self, step: Any, state: Any, xs: Any, count: int, depth: int) -> tuple[Any, Any]:
        """Return the state after so many steps, and their stacked y."""
        recorded = _is_recorded(step, state, xs)
        if count == 1:
            return self._run_step(step, state, xs, recorded=recorded)
        sizes = self._divide(count, depth) if recorded else [1] * count
        leaves, tree = pytree.tree_flatten(xs)
        parts = zip(*(leaf.split(sizes) for leaf in leaves), strict=True)
        ys: list[Any] = []
        for i, (size, part) in enumerate(zip(sizes, parts, strict=True)):
            run = functools.partial(self.run_piece, count=size, depth=depth + 1)
            if recorded and i + 1 < len(sizes):
                run = functools.partial(_recompute, run)
            state, y = run(step, state, pytree.tree_unflatten(list(part), tree))
            ys.append(y)
        return state, _concat_results(ys)

    def _divide(self, count: int, depth: int) -> list[int]:
        if self.segments is None:
            return [count // 2, count - count // 2]
        if depth:
            return [1] * count
        return [count // self.segments + (i < count % self.segments) for i in range(self.segments)]

    def _run_step(self, step: Any, state: Any, xs: Any, *, recorded: bool) -> tuple[Any, Any]:
        """Run one step, of slices of length 1, and check what it returns."""
        x = pytree.tree_map(lambda leaf: leaf.squeeze(0), xs)
        with contextlib.nullcontext() if _torch.is_in_graph() else RUNNING.set(is_differentiated=recorded):
            result = step(state, x)
        if not isinstance(result, tuple) or len(result) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f"scan: expected step to return (new state, y), got {type(result).__name__}")  # pyright: ignore[reportUnknownArgumentType]
        new, y = result  # pyright: ignore[reportUnknownVariableType]
        _check_layout(self.layout, _read_layout(new), "state", "as before the step")
        for path, leaf in pytree.tree_flatten_with_path(y)[0]:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(f"scan: y{pytree.keystr(path)}: expected a tensor or None, got {type(leaf).__name__}")
        return new, pytree.tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), y)


def _recompute(run: Callable[..., Any], step: Any, state: Any, xs: Any) -> Any:
    """Run a piece whose derivatives keep the state that it begins with, and run it again."""
    if not _torch.is_in_graph():
        return call_recomputed(run, "scan", {"step": step, "state": state, "xs": xs}, remat=Remat())
    with mark_region(Remat()):
        return run(step, state, xs)


def _is_recorded(step: object, state: object, xs: object) -> bool:
    """Return whether autograd records what a step computes from its arguments or from what it closes over."""
    if _torch.is_in_graph():
        return torch.is_grad_enabled()
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    tensors = itertools.chain(pytree.tree_leaves((state, xs)), find_tensors(step, state))
    return any(isinstance(x, Tensor) and _torch.requires_grad_at_any_level(x) for x in tensors)
