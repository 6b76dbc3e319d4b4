"""by_matrix: an optimizer of whole matrices on flat shards, each updated once, by its owner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from ... import _torch
from ..._core.checks import check_mapping
from ..._core.layout import Params
from ..._core.spec import PartitionSpec
from ..._core.tree import Param
from ..._spec.codec import check_trainable
from ..._spec.local import stack_dims
from ..._torch.phases import phase
from .._checks import Optimizer, Tensors, break_message, check_rate, is_pair, named_tensors, refuse_shared_memory
from .._elementwise import elementwise
from .._matrices.matrices import Matrices, matrices
from .._options import ParamOptions, check_options
from .._rules import adamw
from .step import (
    Fallback,
    MatrixConfig,
    MatrixInit,
    MatrixOptions,
    MatrixRule,
    MatrixState,
    MatrixStep,
    MatrixUpdate,
    OwnedShapes,
    init_state,
    rule_from_update,
)


def check_stacks(rule: MatrixRule, known: Matrices, owned: OwnedShapes) -> None:
    """Raise ValueError if an update would mix a split stack, or a state's shape hides from checkpoints whether it is split."""
    sizes = dict(known.spec.bound_mesh.sizes)
    for matrix in known.chosen:
        if matrix.stack and rule.is_whole:
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


def check_step(config: MatrixConfig, params: Mapping[str, Any], **trees: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, naming the unit, unless these are slices of the spec, and ``grads`` and ``state`` fit."""
    known, spec = config.matrices, config.matrices.spec
    for what, tree in {"params": params, **trees}.items():
        check_mapping(tree, what)
        for key in tree:
            if key not in spec.by_key:
                raise ValueError(f"{what}: unit '{key}' is not in the spec: expected some of {[*spec.by_key][:8]}")
        check_trainable((spec.by_key[key] for key in tree), "update")
        if only := sorted(tree.keys() ^ params.keys()):
            has = f"{what} and is not in params" if only[0] in tree else f"no {what}"
            raise ValueError(f"unit '{only[0]}' has {has}: expected the same units in both, got {[*tree][:8]}")
        for key in params:
            if what == "state":
                _check_unit_state(config, key, tree[key])
            else:
                _check_slice(f"{what} of unit '{key}'", tree[key], params[key], spec.shard_numel(spec.by_key[key]))
    known._check_sent_together({name: params[key] for key in params for name in known._names_in(key)})


def _check_slice(what: str, tensor: object, like: Tensor, numel: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(tensor).__name__}; what is not used has gradient zeros")
    if tuple(tensor.shape) != (numel,) or tensor.dtype != like.dtype or tensor.device != like.device:
        got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{what}: expected [{numel}] {like.dtype} on {like.device}, got {got}; is it of another spec or mesh?")


def _check_unit_state(config: MatrixConfig, key: str, state: object) -> None:
    if not isinstance(state, MatrixState):
        raise TypeError(f"state of unit '{key}': expected a MatrixState, got {type(state).__name__}; make it by init(params)")
    known, names = config.matrices, config.matrices._names_in(key)
    numel = known.spec.shard_numel(known.spec.by_key[key])
    slots = {slot: [numel] for slot in config.rule.slots if names}
    here = {name: [] if known._is_owner(name) else [0] for name in names}
    owned = {name: {slot: [*here[name], *shape] for slot, shape in config.owned[name].items()} for name in names}
    got_owned = {name: {slot: list(x.shape) for slot, x in own.items()} for name, own in state.owned.items()}
    got_slots = {slot: list(x.shape) for slot, x in state.slices.items()}
    for expected, got in ((slots, got_slots), (owned, got_owned)):
        if got != expected:
            raise ValueError(
                f"state of unit '{key}': expected the shapes {expected}, got {got}; was it made by another optimizer or "
                "cost of matrices, or is it of another spec or mesh? checkpoint.load(..., like=init(params)) gives it to the "
                "owners that there are now"
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

    Raises:
        ValueError: An argument does not fit; the message names the unit, before any communication.
        TypeError: An argument has the wrong type.

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
    rule = rule_from_update(init, update, known.chosen)
    return optimizer_from_rule(rule, known, {}, fallback=fallback, donate=donate)


def optimizer_from_rule(
    rule: MatrixRule,
    known: Matrices,
    options: Mapping[str, MatrixOptions],
    *,
    fallback: Fallback,
    is_default_fallback: bool = False,
    donate: bool = False,
    lr: float | None = None,
) -> Optimizer:
    """Return the optimizer of a rule; ``options`` are by matrix, ``lr`` is the default learning rate among them."""
    every = {matrix.name: options.get(matrix.name, {}) for matrix in known.chosen}
    if not is_pair(fallback):
        raise TypeError(
            f"fallback: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW) gives, got {fallback!r}"
        )
    kinds = {m.name: (m.shape, m.unit.dtype) for m in known.chosen}
    states = {
        kind: rule.init_owned(torch.empty(kind[0], dtype=kind[1], device="meta")) for kind in dict.fromkeys(kinds.values())
    }
    shapes = {kind: {n: tuple(x.shape) for n, x in state.items() if n not in rule.slots} for kind, state in states.items()}
    owned = {name: shapes[kind] for name, kind in kinds.items()}
    check_stacks(rule, known, owned)
    config = MatrixConfig(rule, known, every, fallback, is_default_fallback, donate, lr, owned)

    def init(params: Tensors) -> dict[str, MatrixState]:
        check_step(config, params)
        return init_state(config, params)

    return Optimizer(init, partial(_update, config))


def _update(
    config: MatrixConfig,
    grads: Tensors,
    state: Mapping[str, MatrixState],
    params: Tensors,
    *,
    lr: float | Tensor | None = None,
    fallback_lr: float | Tensor | None = None,
) -> tuple[Params, dict[str, MatrixState]]:
    check_step(config, params, grads=grads, state=state)
    check_rate(lr, "lr")
    check_rate(fallback_lr, "fallback_lr")
    if lr is not None and fallback_lr is None and not config.is_default_fallback:
        raise ValueError(
            "lr= is the matrices': expected fallback_lr= with it, the learning rate of the fallback= that was given"
        )
    rates = {"lr": lr if fallback_lr is None else fallback_lr} if lr is not None or fallback_lr is not None else {}
    given = [x for x in pytree.tree_leaves((grads, state, params, lr, fallback_lr)) if isinstance(x, Tensor)]
    options = config.options_with_lr(lr)
    if not _torch.is_eager() or _torch.any_tracked(given):
        return MatrixStep(config, config.shared_options(options), rates, grads, state, params, True, False).run()
    if config.donate:
        refuse_shared_memory(named_tensors(grads, {key: unit.slices for key, unit in state.items()}, params))
    with phase("update of matrices"), torch.no_grad():
        return MatrixStep(config, options, rates, grads, state, params, False, config.donate).run()


ADAMW_OPTIONS = ("lr", "weight_decay")
"""Options of matrices that AdamW also has."""


def resolve_options(
    who: str, known: Matrices, defaults: Mapping[str, Any], options: ParamOptions | None
) -> dict[str, Mapping[str, Any]]:
    """Return each matrix's options. Raise ValueError, naming the matrix, for an unknown option or one below 0."""
    out: dict[str, Mapping[str, Any]] = {}
    for matrix in known.chosen:
        overrides = {} if options is None else dict(options(matrix.name, matrix.param))
        check_options(f"{who}: options of matrix '{matrix.name}'", overrides, defaults)
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
    break_graphs: str = "",
) -> Optimizer:
    """Return the optimizer of a rule, with AdamW as the default ``fallback``; ``constants`` are options that nobody sets.

    ``break_graphs`` says why an update runs eagerly inside torch.compile, if it does.
    """
    resolved = resolve_options(who, known, defaults, options)
    if constants is not None:
        resolved = {name: {**values, **constants[name]} for name, values in resolved.items()}
    lr, is_default = defaults["lr"], fallback is None
    others = fallback or _fallback_adamw(known, lr, defaults["weight_decay"], options, donate=donate)
    made = optimizer_from_rule(rule, known, resolved, fallback=others, is_default_fallback=is_default, donate=donate, lr=lr)
    broken = _torch.disable_in_graph(break_message(who, break_graphs))(made.update) if break_graphs else made.update
    return made._replace(update=broken)


def _fallback_adamw(known: Matrices, lr: float, weight_decay: float, options: ParamOptions | None, *, donate: bool) -> Fallback:
    """Return AdamW: of torch's kernels, or where something follows the tensors the pure rule, whose state is the same."""

    def adamw_options(name: str, param: Param) -> Mapping[str, Any]:
        own = {} if options is None or name in known.by_name else options(name, param)
        return {key: value for key, value in own.items() if key in ADAMW_OPTIONS}

    own: dict[str, Any] = {} if options is None else {"spec": known.spec, "options": adamw_options}
    fast = elementwise(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, donate=donate, **own)
    rule = adamw(lr, weight_decay=weight_decay, spec=known.spec, options=adamw_options if own else None)

    def update(grads: Tensors, state: Any, params: Tensors, **rates: Any) -> tuple[Params, Any]:
        given = [x for x in pytree.tree_leaves((grads, state, params, rates)) if isinstance(x, Tensor)]
        follows = not _torch.is_eager() or _torch.any_tracked(given)
        return (rule if follows else fast).update(grads, state, params, **rates)

    return fast.init, update


def resolve_real_matrices(who: str, spec: PartitionSpec | Matrices) -> Matrices:
    """Return the matrices of a spec, or those given. TypeError for a complex one, or one of 1 or 4 dimensions."""
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    for matrix in known.chosen:
        if matrix.param.dtype.is_complex or len(matrix.shape) not in (2, 3):
            got = f"{list(matrix.shape)} {matrix.param.dtype}"
            raise TypeError(f"{who}: '{matrix.name}': expected a real matrix, [n, m] or [batch, n, m], got {got}")
    return known
