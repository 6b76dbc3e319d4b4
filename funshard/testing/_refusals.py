"""Cases that assert_exact refuses: ranks that run different units, and forwards that simulated ranks cannot run."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType

import torch
from torch import nn

from .. import _torch
from .._spec.spec import PartitionSpec
from .._transforms.error_hints import find_running_module

__all__ = ["check_same_units", "explain_vmap", "record_units"]

_BY_VMAP = re.compile(r"vmap|[Bb]atching (?:rule|operators)|functorch|torch\.func\b")
"""torch's words where a function cannot run under its transforms. Pinned by ``test_simulated_ranks_refuse_in_our_words``."""


def record_units(spec: PartitionSpec, modules: Mapping[str, nn.Module], visited: list[str]) -> None:
    """Register hooks that append the keys of a unit to ``visited`` whenever its module runs."""
    for unit in spec:
        for path in unit.paths:
            if not isinstance(modules[path], torch.jit.ScriptModule):
                modules[path].register_forward_pre_hook(functools.partial(_append_key, visited, unit.key))


def _append_key(visited: list[str], key: str, _module: nn.Module, _args: object) -> None:
    """Append a unit's key: a hook of its module."""
    visited.append(key)


def check_same_units(visited: Sequence[list[str]]) -> None:
    """Raise AssertionError unless all ranks ran the modules of the same units in the same order.

    ``visited`` has the units' keys for each rank. On shards such ranks would wait for each other, or mix their units.
    """
    for rank, keys in enumerate(visited):
        if keys != visited[0]:
            turn = next((i for i, pair in enumerate(zip(keys, visited[0], strict=False)) if pair[0] != pair[1]), None)
            turn = min(len(keys), len(visited[0])) if turn is None else turn
            ours, theirs = (repr(run[turn]) if turn < len(run) else "none" for run in (keys, visited[0]))
            raise AssertionError(
                f"assert_exact: rank {rank} runs other units than rank 0: as number {turn} unit {ours}, where rank 0 runs "
                f"{theirs}; expected the same units in the same order on all ranks, which gather them together; route "
                "inside of a unit, or run every unit on every rank"
            )


@contextlib.contextmanager
def explain_vmap(model: nn.Module) -> Generator[None]:
    """Add the module and a remedy to errors of torch.vmap and torch.func raised inside."""
    try:
        yield
    except RuntimeError as error:
        path = find_running_module(error.__traceback__, model)
        where = f"module '{path}'" if path is not None else "the loss"
        # transformers' checkpointing also makes the embedding's output a leaf, which fails before any block runs
        checkpoints = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
        if checkpoints or _runs_checkpoint(error.__traceback__):
            raise RuntimeError(
                f"assert_exact: {where} uses torch.utils.checkpoint, as the gradient checkpointing of transformers does: "
                "expected none inside functional_call, where it would recompute with the module's own parameters; give its "
                "blocks P(remat=True), and switch it off (of transformers: model.gradient_checkpointing_disable())"
            ) from error
        if _BY_VMAP.search(_torch.error_text(error)):
            raise RuntimeError(
                f"assert_exact: simulated ranks run together under torch.vmap, and {where} does what vmap cannot: "
                f"{str(error).strip().splitlines()[0]}; expected a forward without branches on values and without writes "
                "into tensors that the ranks share; compare on real ranks, with an unbound spec (under torchrun, or in one "
                "process), or by model.eval() if only training does it"
            ) from error
        raise


def _runs_checkpoint(traceback: TracebackType | None) -> bool:
    """Return whether a traceback has a frame of torch.utils.checkpoint."""
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        traceback = traceback.tb_next
    return False
