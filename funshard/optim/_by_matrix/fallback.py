"""Options of single parameters for optimizers of matrices, and AdamW as the default fallback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._spec.tree import Param
from .._checks import check_rate
from .._elementwise.optimizer import elementwise
from .._elementwise.options import ParamOptions
from .._matrices.matrices import Matrices
from .config import Fallback
from .optimizer import MatrixOptimizer, optimizer_from_rule
from .rule import MatrixRule

__all__ = ["check_nonnegative", "optimizer_with_fallback", "resolve_options"]

ADAMW_OPTIONS = ("lr", "weight_decay")
"""Options of matrices that AdamW also has."""


def check_nonnegative(who: str, **values: float) -> None:
    """Raise ValueError, naming it, for an option below 0, and TypeError for a learning rate that is not a number."""
    for name, value in values.items():
        if name == "lr":
            check_rate(value, f"{who}: lr", optional=False)
        if not value >= 0:
            raise ValueError(f"{who}: {name}: expected at least 0, got {value}")


def resolve_options(
    who: str, known: Matrices, defaults: Mapping[str, Any], options: ParamOptions | None
) -> dict[str, Mapping[str, Any]]:
    """Return each matrix's options. Raise ValueError, naming the matrix, for an unknown option or one below 0."""
    out: dict[str, Mapping[str, Any]] = {}
    for matrix in known.chosen:
        overrides = {} if options is None else dict(options(matrix.name, matrix.param))
        if unknown := sorted({*overrides} - {*defaults}):
            raise ValueError(f"{who}: options of matrix '{matrix.name}': expected some of {[*defaults]}, got '{unknown[0]}'")
        check_nonnegative(f"{who}: options of matrix '{matrix.name}'", **overrides)
        out[matrix.name] = {**defaults, **overrides}
    return out


def optimizer_with_fallback(
    who: str,
    rule: MatrixRule,
    known: Matrices,
    defaults: Mapping[str, Any],
    options: ParamOptions | None,
    fallback: Fallback | None,
    *,
    donate: bool,
    constants: Mapping[str, Mapping[str, Any]] | None = None,
) -> MatrixOptimizer:
    """Return the optimizer of a rule, with AdamW as the default ``fallback``; ``constants`` are options that nobody sets."""
    resolved = resolve_options(who, known, defaults, options)
    if constants is not None:
        resolved = {name: {**values, **constants[name]} for name, values in resolved.items()}
    lr = defaults["lr"]
    others = fallback or _fallback_adamw(known, lr, defaults["weight_decay"], options, donate=donate)
    return optimizer_from_rule(
        rule, known, resolved, fallback=others, is_default_fallback=fallback is None, donate=donate, lr=lr
    )


def _fallback_adamw(known: Matrices, lr: float, weight_decay: float, options: ParamOptions | None, *, donate: bool) -> Fallback:
    """Return AdamW for what is not a matrix, with the parameters' own options that it has."""
    if options is None:
        return elementwise(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, donate=donate, derived_by=known.spec)

    def adamw_options(name: str, param: Param) -> Mapping[str, Any]:
        if name in known.by_name:
            return {}
        return {key: value for key, value in options(name, param).items() if key in ADAMW_OPTIONS}

    return elementwise(
        torch.optim.AdamW, lr=lr, weight_decay=weight_decay, spec=known.spec, options=adamw_options, donate=donate
    )
