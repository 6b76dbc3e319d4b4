"""The rule of an optimizer of matrices, before the exchange, on the owner and after it; and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..._core.layout import Params
from .._elementwise.options import SharedOptions, scale_lr
from .._matrices.matrices import Matrices

__all__ = ["Fallback", "MatrixConfig", "MatrixInit", "MatrixOptions", "MatrixRule", "MatrixUpdate", "OwnedShapes", "OwnedState"]
__all__ += ["Payload", "Slots", "rule_from_update"]


MatrixOptions = Mapping[str, Any]
"""Options of one matrix, such as its learning rate, and the number ``step`` of this step, from 1, on the host."""
Slots = dict[str, Tensor]
"""Elementwise state by name."""
Payload = tuple[Tensor, ...]
"""The tensors of a matrix that are sent: the same number and dtypes for every matrix."""
OwnedState = dict[str, dict[str, Tensor]]
"""By matrix, the state that only its owner has."""


@dataclass(frozen=True)
class MatrixRule:
    """An optimizer of matrices: elementwise on slices, then on owners, then elementwise on slices."""

    slots: tuple[str, ...]
    """Names of the elementwise state, which is kept in slices."""
    init_owned: Callable[[Tensor], Slots]
    """Returns the owner's initial state from a tensor like the matrix; with ``needs_values``, all state from the matrix."""
    before_exchange: Callable[[Tensor, Slots, Tensor, MatrixOptions], tuple[Payload, Slots]]
    """``before_exchange(grad, slots, param, options) -> (payload, new slots)``."""
    on_owner: Callable[[Mapping[str, Payload], OwnedState, Mapping[str, MatrixOptions]], tuple[dict[str, Payload], OwnedState]]
    """``on_owner(payloads, state, options) -> (results, new state)``, by name, for the owned matrices of a batch."""
    result_dtype_of: tuple[int, ...]
    """For each result, the index of the tensor in the payload whose dtype it takes."""
    after_exchange: Callable[[Payload, Slots, Tensor, MatrixOptions], tuple[Tensor, Slots]]
    """``after_exchange(results, slots, param, options) -> (new param, new slots)``."""
    needs_values: bool = False
    has_owner_options: bool = False
    """Whether only owners use the options; else slices do, before and after the exchange."""
    mixes_stacks: bool = True
    """Whether the update of a matrix [batch, n, m] may depend on others of its batch."""


class MatrixInit(Protocol):
    """``init(param) -> state``, a dict of tensors. It also runs on a meta tensor, for names and shapes."""

    def __call__(self, param: Tensor, /) -> Mapping[str, Tensor]: ...


class MatrixUpdate(Protocol):
    """``update(grad, state, param) -> (new param, new state)`` for one matrix, with ``lr=`` if the step has one."""

    def __call__(
        self, grad: Tensor, state: Mapping[str, Tensor], param: Tensor, /, **options: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]: ...


def rule_from_update(
    init: MatrixInit, update: MatrixUpdate, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> MatrixRule:
    """Return the rule of a pure update of whole matrices: owners do all of it.

    State of the matrix's own shape is sent with it, if all matrices have it, vectors included; other state stays with the
    owner.
    """
    initial = {shape: _try_init(init, update, shape, dtype) for shape, dtype in dict.fromkeys(shapes)}
    shaped = [[name for name, x in state.items() if x.shape == shape] for shape, state in initial.items()]
    slots = tuple(name for name in shaped[0] if all(name in names for names in shaped)) if shaped else ()

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        return (grad, param, *slots.values()), slots

    def on_owner(
        sent: Mapping[str, Payload], whole: OwnedState, options: Mapping[str, MatrixOptions]
    ) -> tuple[dict[str, Payload], OwnedState]:
        results: dict[str, Payload] = {}
        new: OwnedState = {}
        for name, (grad, param, *rest) in sent.items():
            rates = {key: value for key, value in options[name].items() if key != "step"}
            own = dict(zip(slots, rest, strict=True))
            # copies: where nothing is sent these are the caller's own, and an update may write after all
            given = {slot: x.clone() for slot, x in {**own, **whole[name]}.items()}
            stepped, state = update(grad.clone(), given, param.clone(), **rates)
            _check_result(f"'{name}'", stepped, param, state, given)
            results[name] = (stepped, *(state[slot] for slot in slots))
            new[name] = {key: state[key] for key in whole[name]}
        return results, new

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        stepped, *rest = results
        return stepped, dict(zip(slots, rest, strict=True))

    return MatrixRule(
        slots,
        lambda x: dict(init(x)),
        before_exchange,
        on_owner,
        tuple(range(1, 2 + len(slots))),
        after_exchange,
        needs_values=True,
        has_owner_options=True,
    )


def _try_init(init: MatrixInit, update: MatrixUpdate, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return the state of a matrix of this shape on meta. Wrong results raise TypeError or ValueError, on all ranks."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    state: Any
    new: Any
    try:
        state = init(x)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(
            f"by_matrix: init runs on a meta tensor first, for names and shapes: expected that to do, got: {error}"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise TypeError(f"by_matrix: init: expected a dict of tensors, got {state!r}")
    try:
        new = update(x, dict(state), x)
    except Exception:  # it asks for values, or for options: what it gives is looked at on the owner
        return state
    if not isinstance(new, tuple) or len(new) != 2:
        raise TypeError(f"by_matrix: update: expected (new param, new state), got {type(new).__name__}")
    _check_result(f"a matrix {list(shape)}", new[0], x, new[1], state)
    return state


def _check_result(of: str, new: object, param: Tensor, state: Mapping[str, object], given: Mapping[str, Tensor]) -> None:
    def describe(x: object) -> str:
        return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

    if describe(new) != describe(param):
        raise ValueError(f"by_matrix: the update of {of}: expected {describe(param)}, got {describe(new)}")
    after, before = ({name: describe(x) for name, x in one.items()} for one in (state, given))
    if after != before:
        raise ValueError(f"by_matrix: the new state of {of}: expected {before}, as before, got {after}")


# --- The configuration of an optimizer of matrices: its checked arguments, before any parameter is known ---

Fallback = tuple[
    Callable[[Mapping[str, Tensor]], Mapping[str, Any]], Callable[..., tuple[Mapping[str, Tensor], Mapping[str, Any]]]
]
"""``(init, update)`` of parameters that are not matrices, such as `from_torch` returns. Its state has its params' keys."""


OwnedShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""By matrix, the shapes of the state that its owner holds."""


class MatrixConfig(NamedTuple):
    """The arguments of an optimizer of matrices."""

    rule: MatrixRule
    matrices: Matrices
    options: Mapping[str, MatrixOptions]
    fallback: Fallback
    is_default_fallback: bool
    """Whether ``fallback`` is the default one, which has the matrices' learning rate."""
    donate: bool
    lr: float | None
    owned: OwnedShapes
    """By matrix, the shapes of its owner's state."""

    def __repr__(self) -> str:
        return f"<{len(self.options)} matrices>"

    def options_with_lr(self, lr: float | Tensor | None) -> Mapping[str, MatrixOptions]:
        """Return the options of a step with its own ``lr``; parameters keep their ratio to the default."""
        if lr is None:
            return self.options

        def rate(own: Any) -> Any:
            return lr if self.lr is None or own == self.lr else scale_lr(lr, own, self.lr)

        return {name: {**options, "lr": rate(options.get("lr"))} for name, options in self.options.items()}

    def shared_options(self, options: Mapping[str, MatrixOptions]) -> Mapping[str, MatrixOptions]:
        """Return the options for derivatives on slices, or on owners, each of which is one rank of the whole mesh."""
        shared, spec = SharedOptions(self.matrices.spec), self.matrices.spec
        every = spec.bound_mesh.names
        axes = {m.name: every if self.rule.has_owner_options else m.unit.distinct_axes for m in self.matrices.chosen}
        return {name: shared.for_matrix(own, axes[name]) for name, own in options.items()}

    def fallback_tensors(self, tree: Mapping[str, Tensor]) -> Params:
        """Return the tensors of ``fallback``: shards of units without matrices by key, other parts of shards by name."""
        out: Params = {}
        for key, tensor in tree.items():
            matrices_of_it = {*self.matrices._names_in(key)}
            if not matrices_of_it:
                out[key] = tensor
                continue
            layout = self.matrices._slice_layout(key)
            others = [param.name for param in layout.unit.params if param.name not in matrices_of_it]
            out |= {name: layout.select(tensor, name) for name in others}
        return out
