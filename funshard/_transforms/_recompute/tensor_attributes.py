"""Attributes of Python that tensors have, such as ``y.tag = 1``: autograd gives and returns other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from .reachable import ReachableObjects

__all__ = ["attributes_equal", "check_result_attributes", "copy_attributes", "with_attributes"]


def with_attributes(x: Tensor, attributes: Mapping[str, Any] | None) -> Tensor:
    """Return an operand with these attributes: a view if it is the caller's tensor, which has others by now."""
    if not attributes or attributes_equal(vars(x), attributes):
        return x
    if vars(x):
        with torch.enable_grad():
            x = x.view_as(x)
    vars(x).update(attributes)
    return x


def attributes_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two tensors have the same attributes, by identity, but for Dynamo's own and a running call's ``set_``."""
    names = {name for name in (*a, *b) if name != "set_" and not _torch.is_compiler_attribute(name)}
    return all(name in a and name in b and a[name] is b[name] for name in names)


def check_result_attributes(results: Sequence[Tensor], name: str) -> None:
    """Raise RuntimeError if tensors can be reached from an attribute of a result: they would have no gradient."""
    for attributes in filter(None, map(vars, results)):
        for key, value in attributes.items():
            if ReachableObjects([value], ()).tensors:
                raise RuntimeError(
                    f"{name} sets the attribute '{key}' of a result to a tensor or an object with one, where it would have no "
                    "gradient: expected it returned beside the result"
                )


def copy_attributes(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, which autograd has made, with the first run's classes and attributes of Python."""
    out = [
        output.as_subclass(type(r)) if _torch.is_attribute_subclass(type(r)) else output
        for r, output in zip(results, outputs, strict=True)
    ]
    for result, output in zip(results, out, strict=True):
        vars(output).update(vars(result))
    return out
