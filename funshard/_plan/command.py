"""``python -m funshard plan``: a plan of a model from the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import policies
from .._call.call import functional_call
from .._core.spec import PartitionSpec
from .._core.unit import P
from .._transforms.grad import grad_and_value
from .costs import resolve_optimizer
from .plan import plan

EPILOG = """MODULE:CALLABLE returns the model; it is called on the meta device. With a shape for --batch it runs on fake
tensors, called with integers of that shape (or "8x1024:float32"), and its loss is a cross entropy of its first result.
--compare takes P as in Python: --compare 'P("shard", reshard=False)' 'P("shard", remat=True)'."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    parser = argparse.ArgumentParser("python -m funshard", description="Plan a training step before it runs.", epilog=EPILOG)
    command = parser.add_subparsers(required=True).add_parser("plan", epilog=EPILOG, description="Plan a training step.")
    command.add_argument("model", metavar="MODULE:CALLABLE", help="what returns the model")
    command.add_argument("--policy", default="whole", help="whole, by_type:NAME[,NAME] or by_size:BYTES (whole)")
    command.add_argument("--mesh", type=axes_and_sizes, default="shard=8", help="such as replicate=2,shard=8 (shard=8)")
    command.add_argument("--p", type=read_p, default='P("shard")', help="the P of all units (P('shard'))")
    command.add_argument("--batch", type=shape_or_tokens, help="a rank's batch: a shape as 8x1024, or its number of tokens")
    command.add_argument("--optimizer", default="adamw", help="a class of torch.optim (adamw)")
    command.add_argument("--compare", type=read_p, nargs="+", default=[], metavar="P", help="other choices of P")
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan into a file")
    args = parser.parse_args(argv)
    try:
        sys.path.insert(0, os.getcwd())
        module, _, name = args.model.partition(":")
        with torch.device("meta"):
            model: nn.Module = getattr(importlib.import_module(module), name or "MODULE:CALLABLE")()
        spec, optimizer = _find_policy(args.policy, model, args.p)(model).on(args.mesh), resolve_optimizer(args.optimizer)
        step = _make_step(model, optimizer) if isinstance(args.batch, Tensor) else None
        found = plan(spec, optimizer=optimizer, batch=args.batch, step=step)
        compared = found.compare({str(p): p for p in args.compare})
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        command.error(str(error))
    if args.svg:
        args.svg.write_text(found.to_svg())
    if args.json:
        print(json.dumps({"plan": found.to_json(), "compare": {name: one.to_json() for name, one in compared.items()}}))
    else:
        print("\n\n".join(map(str, [found, compared] if compared else [found])))


def axes_and_sizes(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by axis."""
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def read_p(text: str) -> P:
    """Return the `P` that Python's own notation says."""
    value = eval(text, {"__builtins__": {}, "P": P, "True": True, "False": False})  # the user's own command line
    if not isinstance(value, P):
        raise TypeError(f"expected a P such as P('shard'), got {text!r}")
    return value


def shape_or_tokens(text: str) -> Tensor | int:
    """Return a number, or an empty tensor of a shape such as ``8x1024:float32``."""
    shape, _, dtype = text.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    return sizes[0] if text.isdecimal() else torch.empty(sizes, dtype=getattr(torch, dtype or "int64"), device="meta")


def _find_policy(text: str, model: nn.Module, p: P) -> Callable[[nn.Module], PartitionSpec]:
    kind, _, value = text.partition(":")
    types = {type(module).__name__: type(module) for module in model.modules()}
    if kind == "by_type" and types.keys() >= {*value.split(",")}:
        return policies.by_type(*(types[name] for name in value.split(",")), p=p)
    if kind == "by_size" and value.isdecimal():
        return policies.by_size(int(value), p=p)
    if text != "whole":
        raise ValueError(f"--policy: expected whole, by_size:BYTES or by_type:NAME with some of {sorted(types)}, got {text!r}")
    return policies.whole(p)


def _make_step(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    """Return a training step of a model: the cross entropy of its first result, and an update in place."""

    def step(params: Any, state: Any, batch: Tensor, *, spec: PartitionSpec) -> Any:
        buffers = {name: torch.empty_like(x, device=batch.device) for name, x in model.named_buffers()}

        def loss(params: Any) -> Tensor:
            out = functional_call(model, params, (batch,), spec=spec, buffers=buffers)
            first = next(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())
            rows = first.flatten(0, -2) if first.dim() > 1 else first[None]
            return F.cross_entropy(rows.float(), torch.zeros(len(rows), dtype=torch.int64, device=rows.device))

        return optimizer[1](grad_and_value(loss)(params)[0], state, params)

    return step
