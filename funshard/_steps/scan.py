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
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._sharding.agree import gather_texts, has_peers
from .._spec.checks import bind_spec
from .._spec.options import Remat
from .._spec.spec import PartitionSpec
from .._transforms._recompute.code_reads import GlobalWatch
from .._transforms._recompute.reachable import ReachableObjects
from .._transforms._recompute.regions import mark_region
from .._transforms._recompute.remat import call_recomputed
from .._transforms.grad import assume_differentiated
from .scan_layout import StateLayout, check_unchanged, concat_results, count_steps, expand_result, record_versions
from .state_store import StateStore

__all__ = ["scan"]

State = TypeVar("State")


def scan(
    step: Callable[[State, Any], tuple[State, Any]],
    state: State,
    xs: Any,
    *,
    segments: int | Literal["log"] | None = None,
    offload: str | None = None,
    spec: PartitionSpec | None = None,
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
        offload: ``"host"`` or a directory, for the states that segments begin with.
        spec: The ranks of its mesh compare T and ``segments`` before anything runs.

    Returns:
        ``(state, ys)``: the last state, and every step's y, stacked along dimension 0. A y may be None.

    Raises:
        ValueError, TypeError: An argument, or what ``step`` returns, does not fit; the message names the path.
        RuntimeError: ``step`` changes what it was given, as updates with ``donate=True`` do; and as `remat`.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad(lambda rates: fs.scan(lambda w, lr: (w - lr * w, None), torch.tensor(1.0), rates)[0])(torch.zeros(2))
        tensor([-1., -1.])
    """
    spec = spec if spec is None else bind_spec(spec)
    try:
        steps = count_steps(xs)
        count = _count_segments(segments, steps)
    except (TypeError, ValueError) as error:
        if spec is not None:  # so that the other ranks do not wait
            with contextlib.suppress(ValueError):
                _check_ranks_agree(f"an error: {error}", spec)
        raise
    watch = None
    if _is_recorded(step, state, xs) and not torch.compiler.is_compiling():
        hint = "expected it in the state or in y, or as an attribute of an object that step closes over"
        watch = GlobalWatch.for_function(step, "scan: step", hint)
    run = _ScanRun(count, StateLayout.from_state(state), StateStore.make(offload), watch)
    if spec is not None:
        _check_ranks_agree(f"{steps} steps, segments={segments!r}", spec)
    return run.run_piece(step, state, xs, steps, 0)


def _count_segments(segments: int | str | None, steps: int) -> int | None:
    """Return the number of segments, None for halves; 1 becomes one per step; raise TypeError or ValueError for others."""
    if segments == "log":
        return None
    if segments is None:
        return max(1, round(math.sqrt(steps)))
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise TypeError(f"scan: segments: expected a number, 'log' or None, got {segments!r}")
    if not 1 <= segments <= steps:
        raise ValueError(f"scan: segments: expected 1 to {steps}, the number of steps, got {segments}")
    return steps if segments == 1 else segments  # one segment is all steps, whose states would be kept when it runs again


def _check_ranks_agree(text: str, spec: PartitionSpec) -> None:
    """Raise ValueError on every rank of the mesh if the ranks pass different texts."""
    mesh = spec.bound_mesh
    if not has_peers(mesh) or torch.compiler.is_compiling():
        return
    with _torch.below_transforms():
        texts = gather_texts(text, mesh, mesh.device or torch.device("cpu"))
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ValueError(
                f"scan: the ranks of the mesh {mesh.names} run different steps: expected {texts[0]}, as on its rank 0, got "
                f"{other} on rank {rank}; give every rank as many slices"
            )


@dataclass(frozen=True)
class _ScanRun:
    """One call of `scan`: how its steps are divided, the layout of its state, and where states are kept."""

    segments: int | None
    """None divides by halves."""
    layout: StateLayout
    store: StateStore
    watch: GlobalWatch | None
    """None if steps run once."""

    def run_piece(self, step: Any, state: Any, xs: Any, count: int, depth: int) -> tuple[Any, Any]:
        """Return the state after so many steps, and their stacked y."""
        if count == 1:
            return self._run_step(step, state, xs)
        recorded = _is_recorded(step, state, xs)
        sizes = self._divide(count, depth) if recorded else [1] * count
        leaves, tree = pytree.tree_flatten(xs)
        parts = zip(*(leaf.split(sizes) for leaf in leaves), strict=True)
        ys: list[Any] = []
        for i, (size, part) in enumerate(zip(sizes, parts, strict=True)):
            run = functools.partial(self.run_piece, count=size, depth=depth + 1)
            if recorded and i + 1 < len(sizes):
                run = functools.partial(self._recompute, run, is_stored=size > 1 or depth == 0)
            state, y = run(step, state, pytree.tree_unflatten(list(part), tree))
            ys.append(y)
        return state, concat_results(ys)

    def _divide(self, count: int, depth: int) -> list[int]:
        """Return the sizes of the pieces of so many steps."""
        if self.segments is None:
            return [count // 2, count - count // 2]
        if depth:
            return [1] * count
        return [count // self.segments + (i < count % self.segments) for i in range(self.segments)]

    def _recompute(self, run: Callable[..., Any], step: Any, state: Any, xs: Any, *, is_stored: bool) -> Any:
        """Run a piece whose derivatives keep the state that it begins with, and run it again."""
        if torch.compiler.is_compiling():
            with mark_region(Remat(), "scan"):
                return run(step, state, xs)
        if not is_stored or self.store.place is None:
            return call_recomputed(run, "scan", {"step": step, "state": state, "xs": xs}, remat=Remat())

        def fetch_and_run(step: Any, state: Any, xs: Any) -> Any:
            return run(step, self.store.fetch(state, self.layout), xs)

        return call_recomputed(fetch_and_run, "scan", {"step": step, "state": self.store.put(state), "xs": xs}, remat=Remat())

    def _run_step(self, step: Any, state: Any, xs: Any) -> tuple[Any, Any]:
        """Run one step, of slices of length 1, and check what it returns."""
        x = pytree.tree_map(lambda leaf: leaf.squeeze(0), xs)
        versions = record_versions(state, x)
        if torch.compiler.is_compiling():
            result = step(state, x)
        else:
            with assume_differentiated(_is_recorded(step, state, xs)), self.watch or contextlib.nullcontext():
                result = step(state, x)
        check_unchanged(state, x, versions)
        if not isinstance(result, tuple) or len(result) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f"scan: expected step to return (new state, y), got {type(result).__name__}")  # pyright: ignore[reportUnknownArgumentType]
        new, y = result  # pyright: ignore[reportUnknownVariableType]
        self.layout.check(new)
        return new, expand_result(y)


def _is_recorded(step: object, state: object, xs: object) -> bool:
    """Return whether autograd records what a step computes from its arguments or from what it closes over."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    given = (x for x in pytree.tree_leaves((state, xs)) if isinstance(x, Tensor))
    return any(map(_torch.is_recorded, given)) or any(map(_torch.is_recorded, ReachableObjects([step, state], ()).tensors))
