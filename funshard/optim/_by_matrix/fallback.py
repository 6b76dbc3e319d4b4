"""Options of single parameters for optimizers of matrices, and AdamW for what is no matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._spec.tree import Param
from .._checks import check_rate
from .._elementwise.optimizer import elementwise
from .._elementwise.options import Options
from .._matrices.matrices import Matrices
from .optimizer import Fallback, MatrixOptimizer, by_rule
from .rule import Rule

__all__ = ["options_of", "positive", "with_fallback"]

ADAMW = ("lr", "weight_decay")
"""The options of matrices that AdamW has as well."""


def positive(who: str, **values: float) -> None:
    """Raise ValueError, naming it, for an option that is below 0, and TypeError for a learning rate that is no number."""
    for name, value in values.items():
        if name == "lr":
            check_rate(value, f"{who}: lr", optional=False)
        if not value >= 0:
            raise ValueError(f"{who}: {name}: expected at least 0, got {value}")


def options_of(who: str, known: Matrices, defaults: Mapping[str, Any], options: Options | None) -> dict[str, Mapping[str, Any]]:
    """The options of each matrix. ValueError, naming it, for one that there is not, or that is below 0."""
    out: dict[str, Mapping[str, Any]] = {}
    for matrix in known.chosen:
        own = {} if options is None else dict(options(matrix.name, matrix.param))
        if unknown := sorted({*own} - {*defaults}):
            raise ValueError(f"{who}: options of matrix '{matrix.name}': expected some of {[*defaults]}, got '{unknown[0]}'")
        positive(f"{who}: options of matrix '{matrix.name}'", **own)
        out[matrix.name] = {**defaults, **own}
    return out


def with_fallback(
    rule: Rule,
    known: Matrices,
    own: Mapping[str, Mapping[str, Any]],
    fallback: Fallback | None,
    lr: float,
    weight_decay: float,
    options: Options | None,
    *,
    donate: bool,
) -> MatrixOptimizer:
    """The optimizer of a rule with the options of each matrix, and ``fallback``, or else AdamW, for what is no matrix."""
    others = fallback or _adamw(known, lr, weight_decay, options, donate=donate)
    return by_rule(rule, known, own, fallback=others, is_default_fallback=fallback is None, donate=donate, lr=lr)


def _adamw(known: Matrices, lr: float, weight_decay: float, options: Options | None, *, donate: bool) -> Fallback:
    """AdamW for what is no matrix, with those of a parameter's options that it has."""
    if options is None:
        return elementwise(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, donate=donate, derived_by=known.spec)

    def own(name: str, param: Param) -> Mapping[str, Any]:
        if name in known.by_name:
            return {}
        return {key: value for key, value in options(name, param).items() if key in ADAMW}

    return elementwise(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, spec=known.spec, options=own, donate=donate)
