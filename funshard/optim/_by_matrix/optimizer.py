"""by_matrix: an optimizer of whole matrices on flat shards, each updated once, by its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from ... import _torch
from ..._core.layout import Params
from ..._core.spec import PartitionSpec
from ..._core.tree import Param
from ..._spec.local import stack_dims
from ..._torch.phases import phase
from .._checks import (
    Optimizer,
    Tensors,
    break_message,
    check_rate,
    check_trees,
    is_pair,
    named_tensors,
    refuse_shared_memory,
)
from .._from_torch import from_torch
from .._matrices.matrices import Matrices, matrices
from .._options import ParamOptions, SharedOptions, check_options, scale_lr
from .._rules import adamw
from .step import (
    Fallback,
    MatrixInit,
    MatrixOptions,
    MatrixRule,
    MatrixState,
    MatrixStep,
    MatrixUpdate,
    rule_from_update,
)

OwnedShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""By matrix, the shapes of the state that its owner holds."""


def find_owned_shapes(rule: MatrixRule, known: Matrices) -> OwnedShapes:
    """Return the shapes of owners' state; ValueError if an update would mix a split stack, or a shape hides what is split."""
    sizes = dict(known.spec.bound_mesh.sizes)
    states: dict[object, Tensors] = {}
    owned: dict[str, dict[str, tuple[int, ...]]] = {}
    for matrix in known.chosen:
        if matrix.stack and rule.is_whole:
            raise ValueError(
                f"matrix '{matrix.name}': its stack is local over axis '{matrix.stack_axes[0]}', of which a rank has a part, "
                f"{list(matrix.shape)}, and the update may mix its matrices: expected matrices(spec, gather_stacks=True), "
                "which sends the stack whole to one owner, or select= without it"
            )
        kind = matrix.shape, matrix.unit.dtype
        if kind not in states:
            states[kind] = rule.init_owned(torch.empty(matrix.shape, dtype=matrix.unit.dtype, device="meta"))
        owned[matrix.name] = {n: tuple(x.shape) for n, x in states[kind].items() if n not in rule.slots}
        for slot, shape in owned[matrix.name].items():
            if stack_dims(matrix.param, shape, sizes) != matrix.stack:
                raise ValueError(
                    f"matrix '{matrix.name}': state '{slot}' {list(shape)} of the matrix {list(matrix.shape)}: expected the "
                    "dimensions of its batch first, or another size in their place"
                )
    return owned


def check_state(
    state: Mapping[str, object], params: Tensors, known: Matrices, slots: Sequence[str], owned: OwnedShapes
) -> None:
    """Raise ValueError or TypeError, naming the unit, unless the state fits the params and this rank's matrices."""
    for key, param in params.items():
        unit = state[key]
        if not isinstance(unit, MatrixState):
            raise TypeError(
                f"state of unit '{key}': expected a MatrixState, got {type(unit).__name__}; make it by init(params)"
            )
        names = known._names_in(key)
        here = {name: [] if known._is_owner(name) else [0] for name in names}
        expected = (
            {slot: [len(param)] for slot in slots if names},
            {name: {slot: [*here[name], *shape] for slot, shape in owned[name].items()} for name in names},
        )
        got = (
            {slot: [*x.shape] for slot, x in unit.slices.items()},
            {name: {slot: [*x.shape] for slot, x in own.items()} for name, own in unit.owned.items()},
        )
        if got != expected:
            raise ValueError(
                f"state of unit '{key}': expected the shapes {expected}, got {got}; was it made by another optimizer, or is it "
                "of another spec or mesh? checkpoint.load(..., like=init(params)) gives it to the owners that there are now"
            )


def by_matrix(
    init: MatrixInit, update: MatrixUpdate, spec: PartitionSpec | Matrices, *, fallback: Fallback, donate: bool = False
) -> Optimizer:
    """Return ``(init, update)`` for a pure update of single matrices, which runs once for each matrix, on its owner.

    State of the matrix's shape is kept in slices like the parameters' and is sent with the matrix; other state, such as
    preconditioners, stays on the owner. One batch of matrices goes to its owners while another is updated and a third returns.

    Args:
        init: ``init(param)`` returns a matrix's state, a dict of tensors, from a whole tensor [n, m] or [batch, n, m].
        update: ``update(grad, state, param)`` returns ``(new param, new state)``; with a step's ``lr`` also by name.
        spec: The spec, or `matrices`, which says what is a matrix and who owns it.
        fallback: ``(init, update)``, such as `from_torch` returns, for everything that is not a matrix. It receives whole
            shards of units without matrices; in mixed units, pieces by parameter name.
        donate: Write new params and state into the given memory, which is lost even if an update raises. Without it
            ``fallback`` may not donate either.

    Returns:
        An `Optimizer`. Its state has one `MatrixState` a unit. ``lr`` of a step goes to ``update``, ``fallback_lr`` to
        ``fallback``.

    Example:
        >>> import torch, funshard as fs
        >>> def sign(grad, state, param):  # of the singular values
        ...     u, _, vh = torch.linalg.svd(grad, full_matrices=False)
        ...     return param - 0.5 * u @ vh, {}
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False)).on({"shard": 1})
        >>> fallback = fs.optim.from_torch(torch.optim.AdamW)
        >>> init, update = fs.optim.by_matrix(lambda param: {}, sign, spec, fallback=fallback)
        >>> params = {"": torch.zeros(8)}
        >>> update({"": torch.tensor([3.0, 0, 0, 4, 0, 0, 0, 0])}, init(params), params)[0][""][:4]
        tensor([-0.5000,  0.0000,  0.0000, -0.5000])
    """
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    return make_optimizer(
        "by_matrix", rule_from_update(init, update, known.chosen), known, {}, fallback=fallback, donate=donate
    )


def make_optimizer(
    who: str,
    rule: MatrixRule,
    known: Matrices,
    defaults: Mapping[str, Any],
    *,
    options: ParamOptions | None = None,
    fallback: Fallback | None = None,
    shares_lr: bool = False,
    donate: bool = False,
    breaks_graph: str = "",
) -> Optimizer:
    """Return the optimizer of a rule with the ``defaults`` as its options, and AdamW as the default ``fallback``.

    A fallback that ``shares_lr`` gets a step's ``lr=``. ``breaks_graph`` says why torch.compile runs an update eagerly.
    """
    every: dict[str, MatrixOptions] = {}
    for matrix in known.chosen:
        own = {} if options is None else dict(options(matrix.name, matrix.param))
        check_options(f"{who}: options of matrix '{matrix.name}'", own, defaults)
        every[matrix.name] = {**defaults, **own}
    shares_lr = shares_lr or fallback is None
    others = fallback or _fallback_adamw(known, defaults, options, donate=donate)
    if not is_pair(others):
        raise TypeError(
            f"fallback: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW) gives, got {others!r}"
        )
    owned = find_owned_shapes(rule, known)

    def init(params: Tensors) -> dict[str, MatrixState]:
        known._check_slices(params)
        return MatrixStep(rule, known, every, others).init(params)

    def update(
        grads: Tensors,
        state: Mapping[str, MatrixState],
        params: Tensors,
        *,
        lr: float | Tensor | None = None,
        fallback_lr: float | Tensor | None = None,
    ) -> tuple[Params, dict[str, MatrixState]]:
        known._check_slices(params)
        check_trees(params, grads, state, params)
        check_state(state, params, known, rule.slots, owned)
        check_rate(lr, "lr")
        check_rate(fallback_lr, "fallback_lr")
        if lr is not None and fallback_lr is None and not shares_lr:
            raise ValueError(
                "lr= is the matrices': expected fallback_lr= with it, the learning rate of the fallback= that was given"
            )
        rates = {"lr": lr if fallback_lr is None else fallback_lr} if lr is not None or fallback_lr is not None else {}
        now = every if lr is None else {name: _with_lr(own, lr, defaults.get("lr")) for name, own in every.items()}
        given = [x for x in pytree.tree_leaves((grads, state, params, lr, fallback_lr)) if isinstance(x, Tensor)]
        if not _torch.is_eager() or _torch.any_tracked(given):
            shared, mesh_axes = SharedOptions(known.spec), known.spec.bound_mesh.names
            for matrix in known.chosen:  # for derivatives on slices, or on owners, each of which is one rank of the whole mesh
                axes = mesh_axes if rule.is_whole else matrix.unit.distinct_axes
                now = {**now, matrix.name: {key: shared.over_axes(x, axes) for key, x in now[matrix.name].items()}}
            return MatrixStep(rule, known, now, others, tracked=True).update(grads, state, params, rates)
        if donate:
            refuse_shared_memory(named_tensors(grads, {key: unit.slices for key, unit in state.items()}, params))
        with phase("update of matrices"), torch.no_grad():
            return MatrixStep(rule, known, now, others, donate).update(grads, state, params, rates)

    broken = _torch.disable_in_graph(break_message(who, breaks_graph))(update) if breaks_graph else update
    return Optimizer(init, broken)


def _with_lr(options: MatrixOptions, lr: float | Tensor, default: float | None) -> MatrixOptions:
    """Return a matrix's options in a step with its own ``lr``; a parameter keeps its ratio to the default."""
    own = options.get("lr")
    return {**options, "lr": lr if default is None or own == default else scale_lr(lr, own, default)}


def _fallback_adamw(known: Matrices, defaults: Mapping[str, Any], options: ParamOptions | None, *, donate: bool) -> Fallback:
    """Return AdamW: of torch's kernels, or where something follows the tensors the pure rule, whose state is the same."""

    def own_options(name: str, param: Param) -> Mapping[str, Any]:
        own = {} if options is None or name in known.by_name else options(name, param)
        return {key: value for key, value in own.items() if key in ("lr", "weight_decay")}

    lr, weight_decay = defaults["lr"], defaults["weight_decay"]
    given: dict[str, Any] = {"weight_decay": weight_decay, "spec": known.spec, "options": options and own_options}
    fast, rule = from_torch(torch.optim.AdamW, lr=lr, donate=donate, **given), adamw(lr, **given)

    def update(grads: Tensors, state: Any, params: Tensors, **rates: Any) -> tuple[Params, Any]:
        tensors = [x for x in pytree.tree_leaves((grads, state, params, rates)) if isinstance(x, Tensor)]
        is_followed = not _torch.is_eager() or _torch.any_tracked(tensors)
        return (rule if is_followed else fast).update(grads, state, params, **rates)

    return fast.init, update


def resolve_real_matrices(who: str, spec: PartitionSpec | Matrices) -> Matrices:
    """Return the matrices of a spec, or those given. TypeError for a complex one, or one of 1 or 4 dimensions."""
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    for matrix in known.chosen:
        if matrix.param.dtype.is_complex or len(matrix.shape) not in (2, 3):
            got = f"{list(matrix.shape)} {matrix.param.dtype}"
            raise TypeError(f"{who}: '{matrix.name}': expected a real matrix, [n, m] or [batch, n, m], got {got}")
    return known
