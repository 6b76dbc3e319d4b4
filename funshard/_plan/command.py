"""``python -m funshard plan``: a plan of a model from the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
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
from ..optim import from_torch
from .at_rest import find_optimizer
from .plan import Comparison, Plan, plan

EPILOG = """MODULE:CALLABLE returns the model; it is called on the meta device. With --batch it runs on fake tensors: it is
called with integers of that shape (or "8x1024:float32"), its loss is a cross entropy of its first result, and AdamW writes in
place. --compare takes P as in Python: --compare 'P("shard", reshard=False)' 'P("shard", remat=True)'."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser("python -m funshard", description="Plan a training step before it runs.", epilog=EPILOG)
    command = parser.add_subparsers(required=True).add_parser("plan", epilog=EPILOG, description="Plan a training step.")
    command.add_argument("model", metavar="MODULE:CALLABLE", help="what returns the model")
    command.add_argument("--policy", default="whole", help="whole, by_type:NAME[,NAME] or by_size:BYTES (whole)")
    command.add_argument("--mesh", default="shard=8", help="axes and sizes, such as replicate=2,shard=8 (shard=8)")
    command.add_argument("--p", default='P("shard")', help="the P of all units (P('shard'))")
    command.add_argument("--batch", help="the shape of a rank's batch, such as 8x1024")
    command.add_argument("--tokens", type=int, help="a rank's number of tokens, without running the model")
    command.add_argument("--optimizer", default="adamw", help="a class of torch.optim (adamw)")
    command.add_argument("--compare", nargs="+", default=[], metavar="P", help="other choices of P")
    command.add_argument("--fit", metavar="BYTES", help="find what fits into so much memory, such as 80GB; needs --batch")
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan into a file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process. Return its exit status."""
    args = make_parser().parse_args(argv)
    try:
        found = _plan_of(args)
        results: dict[str, Comparison] = {}
        if args.compare:
            results["compare"] = found.compare({text: _read_p(text) for text in args.compare})
        if args.fit:
            results["fit"] = found.fit(args.fit)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"python -m funshard plan: {error}", file=sys.stderr)
        return 2
    if args.svg:
        args.svg.write_text(found.to_svg())
    if args.json:
        compared = {key: {name: one.to_json() for name, one in plans.items()} for key, plans in results.items()}
        print(json.dumps({"plan": found.to_json(), **compared}, default=str))
    else:
        print("\n\n".join(map(str, [found, *results.values()])))
    return 0


def _plan_of(args: argparse.Namespace) -> Plan:
    sys.path.insert(0, os.getcwd())
    module, _, name = args.model.partition(":")
    if not name:
        raise ValueError(f"expected MODULE:CALLABLE, got {args.model!r}")
    make = getattr(importlib.import_module(module), name)
    with torch.device("meta"):
        model: nn.Module = make()
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{args.model}: expected it to return a module, got {type(model).__name__}")
    sizes = re.findall(r"(\w+)=(\d+)(?:,|$)", args.mesh)
    if ",".join(f"{axis}={size}" for axis, size in sizes) != args.mesh:
        raise ValueError(f"--mesh: expected axes and sizes such as replicate=2,shard=8, got {args.mesh!r}")
    spec = _find_policy(args.policy, model, _read_p(args.p))(model).on({axis: int(size) for axis, size in sizes})
    if not args.batch:
        return plan(spec, batch=args.tokens, optimizer=args.optimizer)
    shape = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", args.batch)
    dtype = getattr(torch, shape[2] or "int64", None) if shape else None
    if not shape or not isinstance(dtype, torch.dtype):
        raise ValueError(f"--batch: expected a shape such as 8x1024 or 8x1024:float32, got {args.batch!r}")
    batch = torch.empty([int(size) for size in shape[1].split("x")], dtype=dtype, device="meta")
    optimizer = from_torch(find_optimizer(args.optimizer), lr=1e-3, donate=True)
    return plan(spec, batch=batch, step=_make_step(model, optimizer), optimizer=optimizer)


def _read_p(text: str) -> P:
    value = eval(text, {"__builtins__": {}, "P": P, "True": True, "False": False})  # the user's own command line
    if not isinstance(value, P):
        raise TypeError(f"expected a P such as P('shard'), got {text!r}")
    return value


def _find_policy(text: str, model: nn.Module, p: P) -> Callable[[nn.Module], PartitionSpec]:
    kind, _, value = text.partition(":")
    if kind == "whole":
        return policies.whole(p)
    if kind == "by_size":
        return policies.by_size(int(value), p=p)
    if kind != "by_type":
        raise ValueError(f"--policy: expected whole, by_type:NAME or by_size:BYTES, got {text!r}")
    types = {type(module) for module in model.modules()}
    chosen = [cls for cls in types if cls.__name__ in value.split(",")]
    if not chosen:
        known = sorted(cls.__name__ for cls in types)
        raise ValueError(f"--policy: the model has no module of type {value!r}: expected some of {known}")
    return policies.by_type(*chosen, p=p)


def _make_step(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    """Return a training step of a model: the cross entropy of its first result, and an update in place."""

    def step(params: Any, state: Any, batch: Tensor, *, spec: PartitionSpec) -> Any:
        buffers = {name: torch.empty_like(x, device=batch.device) for name, x in model.named_buffers()}

        def loss(params: Any) -> Tensor:
            out = functional_call(model, params, (batch,), spec=spec, buffers=buffers)
            first = next(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())
            rows = first.flatten(0, -2) if first.dim() > 1 else first[None]
            return F.cross_entropy(rows.float(), torch.zeros(len(rows), dtype=torch.int64, device=rows.device))

        grads, _ = grad_and_value(loss)(params)
        return optimizer.update(grads, state, params)

    return step
