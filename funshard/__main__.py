"""The command line: ``python -m funshard plan --help``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import policies
from ._call.call import functional_call
from ._core.spec import PartitionSpec
from ._plan.plan import plan
from ._plan.record import resolve_optimizer
from ._transforms.products import grad_and_value

_BATCH = "a rank's tokens; or a shape, as 8x1024 or 8x1024:float32, to run the model, with a cross entropy of its first result"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    parser = argparse.ArgumentParser("python -m funshard", description="Plan a training step before it runs.")
    command = parser.add_subparsers(required=True).add_parser("plan", description="Plan a training step, with AdamW.")
    command.add_argument("model", metavar="MODULE:CALLABLE", help="what returns the model; called on the meta device")
    command.add_argument("--policy", default="whole", help="whole, or by_type:NAME[,NAME] (whole)")
    command.add_argument("--mesh", type=axes_and_sizes, default="shard=8", help="such as replicate=2,shard=8 (shard=8)")
    command.add_argument("--batch", type=shape_or_tokens, help=_BATCH)
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan into a file")
    args = parser.parse_args(argv)
    try:
        sys.path.insert(0, os.getcwd())
        module, _, name = args.model.partition(":")
        with torch.device("meta"):
            model: nn.Module = getattr(importlib.import_module(module), name or "MODULE:CALLABLE")()
        types, names = {type(x).__name__: type(x) for x in model.modules()}, args.policy.removeprefix("by_type:").split(",")
        if args.policy != "whole" and (not args.policy.startswith("by_type:") or not types.keys() >= {*names}):
            raise ValueError(f"--policy: expected whole, or by_type:NAME with some of {sorted(types)}, got {args.policy!r}")
        policy = policies.whole() if args.policy == "whole" else policies.by_type(*(types[name] for name in names))
        step = _make_step(model) if isinstance(args.batch, Tensor) else None
        found = plan(policy(model).on(args.mesh), batch=args.batch, step=step)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        command.error(str(error))
    if args.svg:
        args.svg.write_text(found.to_svg())
    print(found)


def axes_and_sizes(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by axis."""
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def shape_or_tokens(text: str) -> Tensor | int:
    """Return a number, or an empty tensor of a shape such as ``8x1024:float32``."""
    shape, _, dtype = text.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    return sizes[0] if text.isdecimal() else torch.empty(sizes, dtype=getattr(torch, dtype or "int64"), device="meta")


def _make_step(model: nn.Module) -> Callable[..., Any]:
    """Return a training step of a model: the cross entropy of its first result, and AdamW in place."""
    _, update = resolve_optimizer("adamw")

    def step(params: Any, state: Any, batch: Tensor, *, spec: PartitionSpec) -> Any:
        buffers = {name: torch.empty_like(x, device=batch.device) for name, x in model.named_buffers()}

        def loss(params: Any) -> Tensor:
            out = functional_call(model, params, (batch,), spec=spec, buffers=buffers)
            first = next(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())
            rows = first.flatten(0, -2) if first.dim() > 1 else first[None]
            return F.cross_entropy(rows.float(), torch.zeros(len(rows), dtype=torch.int64, device=rows.device))

        return update(grad_and_value(loss)(params)[0], state, params)

    return step


if __name__ == "__main__":
    main()
