"""by_matrix: an optimizer of whole matrices on flat shards, each matrix updated once, by its owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # traced by torch.compile, as optree is not

from ... import _torch
from ..._phases import phase
from ..._spec.spec import PartitionSpec
from ..._units.layout import Params
from .._checks import break_message, check_rate, named_tensors, refuse_pickle, refuse_shared_memory, same_pair
from .._matrices.matrices import Matrices, matrices
from .checks import check_stacks, check_step
from .config import Fallback, MatrixConfig
from .rule import MatrixInit, MatrixOptions, MatrixRule, MatrixUpdate, rule_from_update
from .state import MatrixState, init_state, place_like
from .step import MatrixStep

__all__ = ["Fallback", "MatrixOptimizer", "break_graphs", "by_matrix", "optimizer_from_rule"]


class MatrixOptimizer(NamedTuple):
    """A pair of pure functions; it holds no state itself."""

    init: Callable[[Mapping[str, Tensor]], dict[str, MatrixState]]
    """Returns the state before the first step, by unit key of ``params``."""
    update: Callable[..., tuple[Params, dict[str, MatrixState]]]
    """``update(grads, state, params, *, lr=None, fallback_lr=None) -> (new params, new state)``, for some or all units."""

    __reduce__ = refuse_pickle
    __copy__ = __deepcopy__ = same_pair


def by_matrix(
    init: MatrixInit,
    update: MatrixUpdate,
    spec: PartitionSpec | Matrices,
    *,
    fallback: Fallback,
    donate: bool = False,
) -> MatrixOptimizer:
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
        A `MatrixOptimizer`. Its state has one `MatrixState` a unit. ``lr`` of a step goes to ``update``, ``fallback_lr`` to
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
    rule = rule_from_update(init, update, [(m.shape, m.unit.dtype) for m in known.chosen])
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
) -> MatrixOptimizer:
    """Return the optimizer of a rule; ``options`` are by matrix, ``lr`` is the default learning rate among them."""
    every = {matrix.name: options.get(matrix.name, {}) for matrix in known.chosen}
    if not (isinstance(fallback, tuple) and len(fallback) == 2 and all(map(callable, fallback))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"fallback: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW) gives, got {fallback!r}"
        )
    kinds = {m.name: (m.shape, m.unit.dtype) for m in known.chosen}
    shapes = {kind: _owned_shapes(rule, *kind) for kind in dict.fromkeys(kinds.values())}
    owned = {name: shapes[kind] for name, kind in kinds.items()}
    check_stacks(rule, known, owned)
    config = MatrixConfig(rule, known, every, fallback, is_default_fallback, donate, lr, owned)
    return MatrixOptimizer(partial(_init, config), partial(_update, config))


def break_graphs(optimizer: MatrixOptimizer, name: str, why: str) -> MatrixOptimizer:
    """Return the optimizer with an update that runs eagerly inside torch.compile, which gives the reason ``why``."""
    return optimizer._replace(update=_torch.disable_in_graph(break_message(name, why))(optimizer.update))


def _owned_shapes(rule: MatrixRule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that only a matrix's owner has, by their names in the state."""
    state = rule.init_owned(torch.empty(shape, dtype=dtype, device="meta"))
    return {name: tuple(x.shape) for name, x in state.items() if name not in rule.slots}


def _init(config: MatrixConfig, params: Mapping[str, Tensor]) -> dict[str, MatrixState]:
    """Check the parameters, and return the state before the first step."""
    check_step(config.matrices, config.rule.slots, config.owned, params)
    return init_state(config, params)


def _update(
    config: MatrixConfig,
    grads: Mapping[str, Tensor],
    state: Mapping[str, MatrixState],
    params: Mapping[str, Tensor],
    *,
    lr: float | Tensor | None = None,
    fallback_lr: float | Tensor | None = None,
) -> tuple[Params, dict[str, MatrixState]]:
    """Check the arguments, and run a step, tracked if a transform or graph needs it."""
    check_step(config.matrices, config.rule.slots, config.owned, params, grads=grads, state=state)
    check_rate(lr, "lr")
    check_rate(fallback_lr, "fallback_lr")
    if lr is not None and fallback_lr is None and not config.is_default_fallback:
        raise ValueError(
            "lr= is the matrices': expected fallback_lr= with it, the learning rate of the fallback= that was given"
        )
    rates = {"lr": lr if fallback_lr is None else fallback_lr} if lr is not None or fallback_lr is not None else {}
    given = [x for x in pytree.tree_leaves((grads, state, params, lr, fallback_lr)) if isinstance(x, Tensor)]
    if not _torch.is_eager() or _torch.any_tracked(given):
        options = config.shared_options(config.options_with_lr(lr))
        return _update_units(config, grads, state, params, options, rates, tracked=True, donate=False)
    if config.donate:
        refuse_shared_memory(named_tensors(grads, {key: unit.slices for key, unit in state.items()}, params))
    with phase("update of matrices"), torch.no_grad():
        return _update_units(
            config, grads, state, params, config.options_with_lr(lr), rates, tracked=False, donate=config.donate
        )


def _update_units(
    config: MatrixConfig,
    grads: Mapping[str, Tensor],
    state: Mapping[str, MatrixState],
    params: Mapping[str, Tensor],
    options: Mapping[str, MatrixOptions],
    rates: Mapping[str, Any],
    *,
    tracked: bool,
    donate: bool,
) -> tuple[Params, dict[str, MatrixState]]:
    """Return parameters and state after a step of the matrices and of the fallback."""
    if donate:
        if any(map(_torch.is_pinned, params.values())):
            _torch.synchronize_copies()  # what a gather may still read
        # from here on, so that nobody goes on with what is half written where something raises
        params = {key: _torch.take_storage(x) if config.matrices._names_in(key) else x for key, x in params.items()}
        state = {key: unit._replace(slices=pytree.tree_map(_torch.take_storage, unit.slices)) for key, unit in state.items()}
    keeps = _torch.is_eager() and not donate
    versions = {key: _torch.version(params[key]) for key in params if keeps and config.matrices._names_in(key)}
    step = MatrixStep(config.rule, config.matrices, options, grads, state, params, tracked=tracked, donate=donate)
    fallback: dict[str, Any] = {}
    new_params: Params = {}
    new_state: dict[str, MatrixState] = {}

    def update_fallback() -> None:
        given = {name: x for unit in state.values() for name, x in unit.fallback.items()}
        parts, fallback_state = config.fallback[1](
            config.fallback_tensors(grads), given, config.fallback_tensors(params), **rates
        )
        for key, version in versions.items():
            if _torch.version(params[key]) != version:
                raise ValueError(f"fallback: it has written into params['{key}']: expected donate=True of both, or of neither")
        fallback.update({name: (parts[name], fallback_state[name]) for name in given})

    for key in step.run([*config.matrices._batches_of(params)], update_fallback):
        others = {name: fallback.pop(name) for name in state[key].fallback}
        new_params[key], new_state[key] = _assemble_unit(config, step, params[key], state[key], key, others, donate=donate)
    return {key: new_params[key] for key in params}, {key: new_state[key] for key in state}


def _assemble_unit(
    config: MatrixConfig,
    step: MatrixStep,
    param: Tensor,
    state: MatrixState,
    key: str,
    others: Mapping[str, Any],
    *,
    donate: bool,
) -> tuple[Tensor, MatrixState]:
    """Return a unit's new shard and state, and remove its parts from the step."""
    layout, names = config.matrices._slice_layout(key), config.matrices._names_in(key)
    parts, slots, owned = step.pop_unit(key)
    more = {name: part for name, (part, _) in others.items()}
    fallback = {name: new for name, (_, new) in others.items()}
    if not names:
        return more[key], MatrixState(step.steps[key], {}, {}, fallback)
    if donate:  # the matrices' parts are there
        for name, part in more.items():
            layout.select(param, name).copy_(part)
        return param, MatrixState(step.steps[key], state.slices, owned, fallback)
    slices = {slot: place_like(old, layout.join(slots[slot], old)) for slot, old in state.slices.items()}
    return place_like(param, layout.join({**parts, **more}, param)), MatrixState(step.steps[key], slices, owned, fallback)
