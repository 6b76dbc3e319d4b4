"""Checks of a step of an optimizer of matrices: they name the unit, and run before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..._spec.checks import check_mapping, check_trainable
from ..._spec.local import stack_dims
from .._matrices.matrices import Matrices
from .config import OwnedShapes
from .rule import MatrixRule
from .state import MatrixState

__all__ = ["check_stacks", "check_step"]


def check_stacks(rule: MatrixRule, known: Matrices, owned: OwnedShapes) -> None:
    """Raise ValueError, with the name, if an update would mix a split stack, or a state's shape hides whether it is split.

    Checkpoints tell a part of a stack from a whole one by the shape of its state.
    """
    sizes = dict(known.spec.bound_mesh.sizes)
    for matrix in known.chosen:
        if matrix.stack and rule.mixes_stacks:
            raise ValueError(
                f"matrix '{matrix.name}': its stack is local over axis '{matrix.stack_axes[0]}', of which a rank has a part, "
                f"{list(matrix.shape)}, and the update may mix its matrices: expected matrices(spec, gather_stacks=True), "
                "which sends the stack whole to one owner, or select= without it"
            )
        for slot, shape in owned[matrix.name].items():
            if stack_dims(matrix.param, shape, sizes) != matrix.stack:
                raise ValueError(
                    f"matrix '{matrix.name}': state '{slot}' {list(shape)} of the matrix {list(matrix.shape)}: expected the "
                    "dimensions of its batch first, or another size in their place"
                )


def check_step(
    known: Matrices, slots: Sequence[str], owned: OwnedShapes, params: Mapping[str, Any], **trees: Mapping[str, Any]
) -> None:
    """Raise ValueError or TypeError, naming the unit, unless these are slices of the spec and the other trees fit them.

    The other trees are gradients, which are like the params, or are named ``state``.
    """
    spec = known.spec
    for what, tree in {"params": params, **trees}.items():
        check_mapping(tree, what)
        for key in tree:
            if key not in spec.by_key:
                raise ValueError(f"{what}: unit '{key}' is not in the spec: expected some of {[*spec.by_key][:8]}")
            if key not in params:
                raise ValueError(f"unit '{key}' has {what} and is not in params: expected some of {[*params][:8]}")
        check_trainable((spec.by_key[key] for key in tree), "update")
        for key in params:
            if key not in tree:
                raise ValueError(f"unit '{key}' has no {what}: expected those of each of the params, got {[*tree][:8]}")
            if what == "state":
                _check_unit_state(known, slots, owned, key, tree[key])
            else:
                _check_slice(f"{what} of unit '{key}'", tree[key], params[key], spec.shard_numel(spec.by_key[key]))
    known._check_sent_together({name: params[key] for key in params for name in known._names_in(key)})


def _check_slice(what: str, tensor: object, like: Tensor, numel: int) -> None:
    """Raise TypeError or ValueError unless this is a slice of ``numel`` elements with the dtype and device of ``like``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(tensor).__name__}; what is not used has gradient zeros")
    if tuple(tensor.shape) != (numel,) or tensor.dtype != like.dtype or tensor.device != like.device:
        got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{what}: expected [{numel}] {like.dtype} on {like.device}, got {got}; is it of another spec or mesh?")


def _check_unit_state(known: Matrices, slots: Sequence[str], owned: OwnedShapes, key: str, state: object) -> None:
    """Raise TypeError or ValueError unless the state of a unit is that of its matrices."""
    if not isinstance(state, MatrixState):
        raise TypeError(f"state of unit '{key}': expected a MatrixState, got {type(state).__name__}; make it by init(params)")
    names = known._names_in(key)
    slots = slots if names else ()
    if set(state.slices) != set(slots) or set(state.owned) != set(names):
        raise ValueError(
            f"state of unit '{key}': expected {sorted(slots)} of {sorted(names)}, got {sorted(state.slices)} of "
            f"{sorted(state.owned)}; was it made for other matrices?"
        )
    numel = known.spec.shard_numel(known.spec.by_key[key])
    for slot, x in state.slices.items():
        if tuple(x.shape) != (numel,):
            got = f"expected [{numel}], got {list(x.shape)}"
            raise ValueError(f"state of unit '{key}': '{slot}': {got}; is it of another spec or mesh?")
    for name in names:
        here = known._is_owner(name)
        expected = {slot: list(shape) if here else [0, *shape] for slot, shape in owned[name].items()}
        if (got := {slot: list(x.shape) for slot, x in state.owned[name].items()}) != expected:
            raise ValueError(
                f"state of unit '{key}': that of '{name}', whose owner is {'this rank' if here else known.owner(name)}: "
                f"expected the shapes {expected}, got {got}; was it made by another optimizer, on another mesh, or with "
                "another cost of matrices? checkpoint.load(..., like=init(params)) gives it to the owners that there are now"
            )
