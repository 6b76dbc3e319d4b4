"""by_matrix: an optimizer of whole matrices on flat shards, each matrix worked on once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # traced by torch.compile, as optree is not

from ... import _torch
from ..._spec.spec import PartitionSpec
from ..._units.layout import Params
from .._checks import check_rate, named, refuse_shared_memory
from .._elementwise.derivatives import SharedOptions
from .._elementwise.options import kept_ratio
from .._elementwise.streaming import like
from .._matrices.batch import Group
from .._matrices.matrices import Matrices, matrices
from .._matrices.slices import Cut
from .checks import Shapes, check_step
from .rule import MatrixInit, MatrixUpdate, Options, Rule, Whole, of_update
from .step import MatrixState, Step

__all__ = ["MatrixOptimizer", "MatrixState", "by_matrix", "by_rule"]

State = dict[str, MatrixState]

Fallback = tuple[
    Callable[[Mapping[str, Tensor]], Mapping[str, Any]], Callable[..., tuple[Mapping[str, Tensor], Mapping[str, Any]]]
]
"""``(init, update)``, such as `optim.from_torch` gives: the state has the keys of what it is given."""


class MatrixOptimizer(NamedTuple):
    """An optimizer that keeps nothing itself."""

    init: Callable[[Mapping[str, Tensor]], State]
    """The state before the first step, for the units of ``params``."""
    update: Callable[..., tuple[Params, State]]
    """``update(grads, state, params, *, lr=None, fallback_lr=None) -> (new params, new state)``, of some units or all."""


class _Plan(NamedTuple):
    """What follows from the arguments alone."""

    rule: Rule
    matrices: Matrices
    options: Mapping[str, Options]
    fallback: Fallback
    is_default_fallback: bool
    """Whether ``fallback`` is the default one, whose learning rate is the matrices'."""
    donate: bool
    lr: float | None
    owned: Shapes
    """By matrix the shapes of the state that its owner has."""

    def __repr__(self) -> str:
        return f"<{len(self.options)} matrices>"

    def with_lr(self, lr: float | Tensor | None) -> Mapping[str, Options]:
        """The options of a step that has a learning rate of its own: those of parameters keep their ratio to the default."""
        if lr is None:
            return self.options

        def rate(own: Any) -> Any:
            return lr if self.lr is None or own == self.lr else kept_ratio(lr, own, self.lr)

        return {name: {**options, "lr": rate(options.get("lr"))} for name, options in self.options.items()}

    def shared(self, options: Mapping[str, Options]) -> Mapping[str, Options]:
        """The options as what computes with them takes them in: slices, or the owner, one of all ranks of the mesh."""
        shared, spec = SharedOptions(self.matrices.spec), self.matrices.spec
        every = spec.bound_mesh.names
        axes = {m.name: every if self.rule.owner_options else m.unit.p.axes for m in self.matrices.chosen}
        return {name: shared.of_matrix(own, axes[name]) for name, own in options.items()}


def by_matrix(
    init: MatrixInit,
    update: MatrixUpdate,
    spec: PartitionSpec | Matrices,
    *,
    fallback: Fallback,
    donate: bool = False,
) -> MatrixOptimizer:
    """``(init, update)``: a pure update of single matrices, run once for each on the rank that owns it.

    ``init(param)`` gives a matrix's state and ``update(grad, state, param)`` its new value and state, from whole tensors,
    [n, m] or [batch, n, m]; nothing else is known of them. Which are matrices, and who owns them, say `matrices` (in the
    place of the ``spec``). What is no matrix is updated by ``fallback``, a pair such as `from_torch` gives, on this rank's
    slices: whole ones of units without matrices, under their keys, else what lies in them of single parameters, under
    their names.

    The state is one `MatrixState` for each unit. What has the matrix's shape is kept in slices like the parameters' and
    travels with it; other state, such as factors of preconditioners, stays on the owner. The groups of matrices go to their
    owners one ahead of the one that is worked on, and come back behind it.

    With ``donate`` the new params and state are in the memory of what was given, which is gone as well where an update raises
    in the middle; without it ``fallback`` may not donate either. ``lr`` is this step's learning rate, handed to ``update`` by
    name, and ``fallback_lr`` that of ``fallback``.

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

    Raises ValueError or TypeError, naming the unit, for what does not fit, before any communication.
    """
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    rule = of_update(init, update, [(m.shape, m.unit.dtype) for m in known.chosen])
    return by_rule(rule, known, {}, fallback=fallback, donate=donate)


def by_rule(
    rule: Rule,
    known: Matrices,
    options: Mapping[str, Options],
    *,
    fallback: Fallback,
    is_default_fallback: bool = False,
    donate: bool = False,
    lr: float | None = None,
) -> MatrixOptimizer:
    """The pair of functions of a rule; ``options`` by matrix, ``lr`` the default learning rate among them."""
    every = {matrix.name: options.get(matrix.name, {}) for matrix in known.chosen}
    if not (isinstance(fallback, tuple) and len(fallback) == 2 and all(map(callable, fallback))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"fallback: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW) gives, got {fallback!r}"
        )
    kinds = {m.name: (m.shape, m.unit.dtype) for m in known.chosen}
    shapes = {kind: _owned_shapes(rule, *kind) for kind in dict.fromkeys(kinds.values())}
    owned = {name: shapes[kind] for name, kind in kinds.items()}
    plan = _Plan(rule, known, every, fallback, is_default_fallback, donate, lr, owned)
    return MatrixOptimizer(partial(_init, plan), partial(_update, plan))


def _owned_shapes(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    state = rule.begin(torch.empty(shape, dtype=dtype, device="meta"))
    return {name: tuple(x.shape) for name, x in state.items() if name not in rule.slots}


def _init(plan: _Plan, params: Mapping[str, Tensor]) -> State:
    check_step(plan.matrices, plan.rule.slots, plan.owned, params)
    others = _fallback_inputs(plan, params)
    fallback = plan.fallback[0](others)
    if [*fallback] != [*others]:
        raise ValueError(
            f"fallback: expected a state with the keys of what it is given, {[*others][:4]}, got {[*fallback][:4]}"
        )
    whole: Whole = {}
    slots: dict[str, Params] = {slot: {} for slot in plan.rule.slots}
    for group in plan.matrices.groups_of(params):
        begun = _begun(plan, group, params)
        whole |= {name: {key: x for key, x in state.items() if key not in slots} for name, state in begun.items()}
        for slot, parts in slots.items() if plan.rule.values else ():
            parts |= group.spread({name: state[slot] for name, state in begun.items()})
    state: State = {}
    for key, tensor in params.items():
        cut, names = plan.matrices.cut(key), plan.matrices.names(key)
        some = {slot: {n: parts[n] for n in names if n in parts} for slot, parts in slots.items()} if names else {}
        slices = {slot: _resting(tensor, _begun_slice(cut, parts, tensor.detach())) for slot, parts in some.items()}
        owned = {name: whole[name] for name in names}
        others = {name: fallback[name] for name in _fallback_inputs(plan, {key: tensor})}
        state[key] = MatrixState(torch.zeros((), dtype=torch.int64), slices, owned, others)
    return state


def _begun_slice(cut: Cut, parts: Params, shard: Tensor) -> Tensor:
    """Elementwise state: zeros, but for the matrices whose own is given."""
    zeros = torch.zeros_like(shard, dtype=next(iter(parts.values()), shard).dtype)
    return cut.joined(parts, zeros) if parts else zeros


def _begun(plan: _Plan, group: Group, params: Mapping[str, Tensor]) -> Whole:
    """The state that the matrices of a group begin with: on their owners, and elsewhere empty tensors [0, *shape]."""
    parts = {m.name: plan.matrices.cut(m.unit.key).part(params[m.unit.key].detach(), m.name) for m in group.chosen}
    given = group.collect(parts) if plan.rule.values else {}
    out: Whole = {}
    for matrix in group.chosen:
        part = parts[matrix.name]
        if plan.matrices.is_here(matrix.name):
            out[matrix.name] = plan.rule.begin(given[matrix.name] if given else part.new_zeros(()).expand(matrix.shape))
        else:
            like = plan.rule.begin(torch.empty(matrix.shape, dtype=part.dtype, device="meta"))
            out[matrix.name] = {key: part.new_empty((0, *x.shape), dtype=x.dtype) for key, x in like.items()}
    return out


def _fallback_inputs(plan: _Plan, tree: Mapping[str, Tensor]) -> Params:
    """What is no matrix: shards of units without matrices by their keys, else parts of them by parameter name."""
    out: Params = {}
    for key, tensor in tree.items():
        matrices_of_it = {*plan.matrices.names(key)}
        if not matrices_of_it:
            out[key] = tensor
            continue
        cut = plan.matrices.cut(key)
        others = [param.name for param in cut.unit.params if param.name not in matrices_of_it]
        out |= {name: cut.part(tensor, name) for name in others}
    return out


def _update(
    plan: _Plan,
    grads: Mapping[str, Tensor],
    state: Mapping[str, MatrixState],
    params: Mapping[str, Tensor],
    *,
    lr: float | Tensor | None = None,
    fallback_lr: float | Tensor | None = None,
) -> tuple[Params, State]:
    check_step(plan.matrices, plan.rule.slots, plan.owned, params, grads=grads, state=state)
    check_rate(lr, "lr")
    check_rate(fallback_lr, "fallback_lr")
    if lr is not None and fallback_lr is None and not plan.is_default_fallback:
        raise ValueError(
            "lr= is the matrices': expected fallback_lr= with it, the learning rate of the fallback= that was given"
        )
    rates = {"lr": lr if fallback_lr is None else fallback_lr} if lr is not None or fallback_lr is not None else {}
    given = [x for x in pytree.tree_leaves((grads, state, params, lr, fallback_lr)) if isinstance(x, Tensor)]
    if not _torch.is_eager() or _torch.any_tracked(given):
        options = plan.shared(plan.with_lr(lr))
        return _stepped(plan, grads, state, params, options, rates, tracked=True, donate=False)
    if plan.donate:
        refuse_shared_memory(named(grads, {key: unit.slices for key, unit in state.items()}, params))
    with torch.no_grad():
        return _stepped(plan, grads, state, params, plan.with_lr(lr), rates, tracked=False, donate=plan.donate)


def _stepped(
    plan: _Plan,
    grads: Mapping[str, Tensor],
    state: Mapping[str, MatrixState],
    params: Mapping[str, Tensor],
    options: Mapping[str, Options],
    rates: Mapping[str, Any],
    *,
    tracked: bool,
    donate: bool,
) -> tuple[Params, State]:
    if donate:
        if any(map(_torch.is_pinned, params.values())):
            _torch.synchronize_copies()  # what a gather may still read
        # from here on, so that nobody goes on with what is half written where something raises
        params = {key: _torch.take_storage(x) if plan.matrices.names(key) else x for key, x in params.items()}
        state = {key: unit._replace(slices=pytree.tree_map(_torch.take_storage, unit.slices)) for key, unit in state.items()}
    keeps = _torch.is_eager() and not donate
    versions = {key: _torch.version(params[key]) for key in params if keeps and plan.matrices.names(key)}
    step = Step(plan.rule, plan.matrices, options, grads, state, params, tracked=tracked, donate=donate)
    fallback: dict[str, Any] = {}
    new_params: Params = {}
    new_state: State = {}

    def meanwhile() -> None:
        given = {name: x for unit in state.values() for name, x in unit.fallback.items()}
        parts, fallback_state = plan.fallback[1](_fallback_inputs(plan, grads), given, _fallback_inputs(plan, params), **rates)
        for key, version in versions.items():
            if _torch.version(params[key]) != version:
                raise ValueError(f"fallback: it has written into params['{key}']: expected donate=True of both, or of neither")
        fallback.update({name: (parts[name], fallback_state[name]) for name in given})

    for key in step.run([*plan.matrices.groups_of(params)], meanwhile):
        others = {name: fallback.pop(name) for name in state[key].fallback}
        new_params[key], new_state[key] = _joined(plan, step, params[key], state[key], key, others, donate=donate)
    return {key: new_params[key] for key in params}, {key: new_state[key] for key in state}


def _joined(
    plan: _Plan, step: Step, param: Tensor, state: MatrixState, key: str, others: Mapping[str, Any], *, donate: bool
) -> tuple[Tensor, MatrixState]:
    """The new shard and state of a unit, whose parts the step does not keep any longer."""
    cut, names = plan.matrices.cut(key), plan.matrices.names(key)
    parts, slots, owned = step.taken(key)
    more = {name: part for name, (part, _) in others.items()}
    fallback = {name: new for name, (_, new) in others.items()}
    if not names:
        return more[key], MatrixState(step.steps[key], {}, {}, fallback)
    if donate:  # the matrices' parts are there
        for name, part in more.items():
            cut.part(param, name).copy_(part)
        return param, MatrixState(step.steps[key], state.slices, owned, fallback)
    slices = {slot: _resting(old, cut.joined(slots[slot], old)) for slot, old in state.slices.items()}
    return _resting(param, cut.joined({**parts, **more}, param)), MatrixState(step.steps[key], slices, owned, fallback)


def _resting(old: Tensor, new: Tensor) -> Tensor:
    """In memory like the old."""
    return like(old, new) if _torch.is_pinned(old) else new
