"""by_matrix: an optimizer of whole matrices on flat shards, each matrix worked on once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._spec.spec import PartitionSpec
from .._units.layout import Params
from ._group import Group
from ._matrices import Matrices, matrices
from ._rule import MatrixInit, MatrixUpdate, Options, Rule, Whole, of_update
from ._step import MatrixState, Step

__all__ = ["MatrixOptimizer", "MatrixState", "by_matrix", "by_rule"]


State = dict[str, MatrixState]


Rest = tuple[Callable[[Mapping[str, Tensor]], Mapping[str, Any]], Callable[..., tuple[Mapping[str, Tensor], Mapping[str, Any]]]]
"""``(init, update)``, such as `optim.from_torch` gives: the state has the keys of what it is given."""


class MatrixOptimizer(NamedTuple):
    """An optimizer that keeps nothing itself."""

    init: Callable[[Mapping[str, Tensor]], State]
    """The state before the first step, for the units of ``params``."""
    update: Callable[..., tuple[Params, State]]
    """``update(grads, state, params, lr=None, rest_lr=None) -> (new params, new state)``, of some units or all."""


class _Plan(NamedTuple):
    """What follows from the arguments alone."""

    rule: Rule
    matrices: Matrices
    options: Mapping[str, Options]
    rest: Rest
    own_rest: bool
    """Whether ``rest`` is the default one, whose learning rate is the matrices'."""
    donate: bool
    lr: float | None
    owned: Mapping[str, frozenset[str]]
    """By matrix the names of what its owner has of its state."""

    def with_lr(self, lr: float | Tensor | None) -> Mapping[str, Options]:
        """The options of a step that has a learning rate of its own: those of parameters keep their ratio to the default."""
        if lr is None:
            return self.options
        if self.lr is None:
            return {name: {**options, "lr": lr} for name, options in self.options.items()}
        return {name: {**options, "lr": lr * (options["lr"] / self.lr)} for name, options in self.options.items()}


def by_matrix(
    init: MatrixInit,
    update: MatrixUpdate,
    spec: PartitionSpec | Matrices,
    *,
    rest: Rest,
    donate: bool = False,
) -> MatrixOptimizer:
    """``(init, update)``: a pure update of single matrices, run once for each on the rank that owns it.

    ``init(param)`` gives a matrix's state and ``update(grad, state, param)`` its new value and state, from whole tensors,
    [n, m] or [batch, n, m]; nothing else is known of them. Which are matrices, and who owns them, say `matrices` (in the
    place of the ``spec``). What is no matrix is updated by ``rest``, a pair such as `from_torch` gives, on this rank's
    slices: whole ones of units without matrices, under their keys, else what lies in them of single parameters, under
    their names.

    The state is one `MatrixState` for each unit. What has the matrix's shape is kept in slices like the parameters' and
    travels with it; other state, such as factors of preconditioners, stays on the owner. The groups of matrices go to their
    owners one ahead of the one that is worked on, and come back behind it.

    With ``donate`` the new params and state are in the memory of what was given. ``lr`` is this step's learning rate, handed
    to ``update`` by name, and ``rest_lr`` that of ``rest``.

    >>> import torch, funshard as fs
    >>> def sign(grad, state, param):  # of the singular values
    ...     u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    ...     return param - 0.5 * u @ vh, {}
    >>> spec = fs.whole()(torch.nn.Linear(2, 2, bias=False)).on({"shard": 1})
    >>> rest = fs.optim.from_torch(torch.optim.AdamW)
    >>> init, update = fs.optim.by_matrix(lambda param: {}, sign, spec, rest=rest)
    >>> params = {"": torch.zeros(8)}
    >>> update({"": torch.tensor([3.0, 0, 0, 4, 0, 0, 0, 0])}, init(params), params)[0][""][:4]
    tensor([-0.5000,  0.0000,  0.0000, -0.5000])

    Raises ValueError or TypeError, naming the unit, for what does not fit, before any communication.
    """
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    rule = of_update(init, update, [(m.shape, m.unit.dtype) for m in known.chosen])
    return by_rule(rule, known, {}, rest=rest, donate=donate)


def by_rule(
    rule: Rule,
    known: Matrices,
    options: Mapping[str, Options],
    *,
    rest: Rest,
    own_rest: bool = False,
    donate: bool = False,
    lr: float | None = None,
) -> MatrixOptimizer:
    """The pair of functions of a rule; ``options`` by matrix, ``lr`` the default learning rate among them."""
    every = {matrix.name: options.get(matrix.name, {}) for matrix in known.chosen}
    begun = {m.name: rule.begin(torch.empty(m.shape, dtype=m.unit.dtype, device="meta")) for m in known.chosen}
    owned = {name: frozenset(state) - {*rule.slots} for name, state in begun.items()}
    plan = _Plan(rule, known, every, rest, own_rest, donate, lr, owned)
    return MatrixOptimizer(partial(_init, plan), partial(_update, plan))


def _init(plan: _Plan, params: Mapping[str, Tensor]) -> State:
    _check(plan, params=params)
    others = _rest(plan, params)
    rest = plan.rest[0](others)
    if [*rest] != [*others]:
        raise ValueError(f"rest: expected a state with the keys of what it is given, {[*others][:4]}, got {[*rest][:4]}")
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
        zeros = torch.zeros_like(tensor.detach())
        some = {slot: {n: parts[n] for n in names if n in parts} for slot, parts in slots.items()} if names else {}
        slices = {slot: cut.joined(parts, zeros) if parts else zeros.clone() for slot, parts in some.items()}
        owned = {name: whole[name] for name in names}
        others = {name: rest[name] for name in _rest(plan, {key: tensor})}
        state[key] = MatrixState(torch.zeros((), dtype=torch.int64), slices, owned, others)
    return state


def _begun(plan: _Plan, group: Group, params: Mapping[str, Tensor]) -> Whole:
    """The state that the matrices of a group begin with: on their owners, and elsewhere empty tensors [0, *shape]."""
    parts = {m.name: plan.matrices.cut(m.unit.key).part(params[m.unit.key].detach(), m.name) for m in group.chosen}
    given = group.collect(parts) if plan.rule.values else {}
    out: Whole = {}
    for matrix in group.chosen:
        part = parts[matrix.name]
        if matrix in group.owned:
            out[matrix.name] = plan.rule.begin(given[matrix.name] if given else part.new_zeros(()).expand(matrix.shape))
        else:
            like = plan.rule.begin(torch.empty(matrix.shape, dtype=part.dtype, device="meta"))
            out[matrix.name] = {key: part.new_empty((0, *x.shape), dtype=x.dtype) for key, x in like.items()}
    return out


def _rest(plan: _Plan, tree: Mapping[str, Tensor]) -> Params:
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
    rest_lr: float | Tensor | None = None,
) -> tuple[Params, State]:
    _check(plan, params=params, grads=grads, state=state)
    if lr is not None and rest_lr is None and not plan.own_rest:
        raise ValueError("lr= is the matrices': expected rest_lr= with it, the learning rate of the rest= that was given")
    rates = {"lr": lr if rest_lr is None else rest_lr} if lr is not None or rest_lr is not None else {}
    tensors = [*grads.values(), *params.values(), *(x for unit in state.values() for x in unit.slices.values())]
    if not _torch.plain() or _torch.any_tracked(tensors):
        return _stepped(plan, grads, state, params, plan.with_lr(lr), rates, donate=False)
    with torch.no_grad():
        return _stepped(plan, grads, state, params, plan.with_lr(lr), rates, donate=plan.donate)


def _stepped(
    plan: _Plan,
    grads: Mapping[str, Tensor],
    state: Mapping[str, MatrixState],
    params: Mapping[str, Tensor],
    options: Mapping[str, Options],
    rates: Mapping[str, Any],
    *,
    donate: bool,
) -> tuple[Params, State]:
    step = Step(plan.rule, plan.matrices, options, grads, state, params)
    rest: dict[str, Any] = {}
    new_params: Params = {}
    new_state: State = {}

    def meanwhile() -> None:
        given = {name: x for unit in state.values() for name, x in unit.rest.items()}
        parts, rest_state = plan.rest[1](_rest(plan, grads), given, _rest(plan, params), **rates)
        rest.update({name: (parts[name], rest_state[name]) for name in given})

    for key in step.run([*plan.matrices.groups_of(params)], meanwhile):
        cut, names = plan.matrices.cut(key), plan.matrices.names(key)
        others = {name: rest.pop(name) for name in state[key].rest}
        parts, slots, owned = step.taken(key)
        parts |= {name: part for name, (part, _) in others.items()}
        new_params[key] = cut.joined(parts, params[key]) if names else parts[key]
        slices = {slot: cut.joined(slots[slot], old) for slot, old in state[key].slices.items()}
        if donate and names:
            new_params[key] = _given(params[key], new_params[key])
            slices = {slot: _given(state[key].slices[slot], new) for slot, new in slices.items()}
        new_state[key] = MatrixState(step.steps[key], slices, owned, {name: new for name, (_, new) in others.items()})
    return {key: new_params[key] for key in params}, {key: new_state[key] for key in state}


def _given(old: Tensor, new: Tensor) -> Tensor:
    """The new values in the old memory, which is not to be used by its old name any more."""
    return _torch.taken_over(old.copy_(new))


def _check(plan: _Plan, **trees: Mapping[str, Any]) -> None:
    """ValueError or TypeError, naming the unit, for what does not fit."""
    spec = plan.matrices.spec
    params = trees["params"]
    for what, tree in trees.items():
        for key in tree:
            if key not in spec.by_key:
                raise ValueError(f"{what}: unit '{key}' is not in the spec: expected some of {[*spec.by_key][:8]}")
            if key not in params:
                raise ValueError(f"unit '{key}' has {what} and is not in params: expected some of {[*params][:8]}")
        for key in params:
            if key not in tree:
                raise ValueError(f"unit '{key}' has no {what}: expected those of each of the params, got {[*tree][:8]}")
            if what == "state":
                _check_state(plan, key, tree[key])
            else:
                _check_slice(f"{what} of unit '{key}'", tree[key], params[key], spec.shard_numel(spec.by_key[key]))


def _check_slice(what: str, tensor: object, like: Tensor, numel: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(tensor).__name__}; what is not used has gradient zeros")
    if tuple(tensor.shape) != (numel,) or tensor.dtype != like.dtype or tensor.device != like.device:
        got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{what}: expected [{numel}] {like.dtype} on {like.device}, got {got}; is it of another spec or mesh?")


def _check_state(plan: _Plan, key: str, state: object) -> None:
    if not isinstance(state, MatrixState):
        raise TypeError(f"state of unit '{key}': expected a MatrixState, got {type(state).__name__}; make it by init(params)")
    names = plan.matrices.names(key)
    slots = plan.rule.slots if names else ()
    if set(state.slices) != set(slots) or set(state.owned) != set(names):
        raise ValueError(
            f"state of unit '{key}': expected {sorted(slots)} of {sorted(names)}, got {sorted(state.slices)} of "
            f"{sorted(state.owned)}; was it made for other matrices?"
        )
    for name in names:
        if frozenset(state.owned[name]) != plan.owned[name]:
            raise ValueError(
                f"state of unit '{key}': expected {sorted(plan.owned[name])} of '{name}', got {sorted(state.owned[name])}; was "
                "it made by another optimizer?"
            )
        here, owned = plan.matrices.is_here(name), state.owned[name]
        for slot, x in owned.items():
            if here is (x.dim() > 0 and not len(x)):
                rank = dict(zip(plan.matrices.spec.bound_mesh.names, plan.matrices.owner(name), strict=True))
                raise ValueError(
                    f"state of unit '{key}': '{slot}' of '{name}': expected {'it here' if here else 'an empty tensor'}, as its "
                    f"owner is rank {rank}, got {list(x.shape)}; was it made on another mesh, or with another cost of "
                    "matrices? checkpoint.load(like=init(params)) gives it to the owners that there are now"
                )
