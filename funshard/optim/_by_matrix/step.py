"""The rule and the configuration of an optimizer of matrices, its state, and one step: batches go to owners and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from ... import _torch
from ..._core.layout import Params
from .._checks import Tensors, copy_like
from .._matrices.exchange import Chunk, ExchangePlan, MatrixBatch, chunk_slice
from .._matrices.matrices import Matrices
from .._matrices.owners import Matrix

MatrixOptions = Mapping[str, Any]
"""Options of one matrix, such as its learning rate, its ``shape``, and the ``step``, which counts from 1, on the host."""
Slots = dict[str, Tensor]
"""State of one matrix by name."""
Payload = tuple[Tensor, ...]
"""The tensors of a matrix that are sent: the same number and dtypes for every matrix."""
MAX_BATCHED_NUMEL = 1 << 20
"""Matrices of one shape are computed as one batch up to this many elements: for larger ones the copies cost more."""


@dataclass(frozen=True)
class MatrixRule:
    """An optimizer of matrices: elementwise on slices, then on owners, then elementwise on slices."""

    slots: tuple[str, ...]
    """Names of the elementwise state, which is kept in slices."""
    init_owned: Callable[[Tensor], Slots]
    """Returns the owner's initial state from a tensor like the matrix; with ``is_whole``, all state from the matrix."""
    before_exchange: Callable[[Tensor, Slots, Tensor, MatrixOptions], tuple[Payload, Slots]]
    """``before_exchange(grad, slots, param, options) -> (payload, new slots)``."""
    on_owner: Callable[[Payload, Slots, MatrixOptions], tuple[Payload, Slots]]
    """``on_owner(payload, owned, options) -> (results, new owned)``; a result has the dtype at its place in the payload."""
    after_exchange: Callable[[Payload, Slots, Tensor, MatrixOptions], tuple[Tensor, Slots]]
    """``after_exchange(results, slots, param, options) -> (new param, new slots)``."""
    result_count: int = 1
    takes_batches: bool = False
    """Whether ``on_owner``, which has no state, also takes a stack of matrices."""
    is_whole: bool = False
    """Whether it is a `MatrixUpdate`, which may mix a batch and only owners give options; else slices use these."""


class MatrixInit(Protocol):
    """``init(param) -> state``, a dict of tensors. It also runs on a meta tensor, for names and shapes."""

    def __call__(self, param: Tensor, /) -> Tensors: ...


class MatrixUpdate(Protocol):
    """``update(grad, state, param) -> (new param, new state)`` for one matrix, with ``lr=`` if the step has one."""

    def __call__(self, grad: Tensor, state: Tensors, param: Tensor, /, **options: Any) -> tuple[Tensor, Tensors]: ...


def rule_from_update(init: MatrixInit, update: MatrixUpdate, chosen: Sequence[Matrix]) -> MatrixRule:
    """Return the rule of a pure update of whole matrices, with which all state of the matrices' own shape is sent."""
    kinds = dict.fromkeys((m.shape, m.unit.dtype) for m in chosen)
    initial = {shape: _try_init(init, update, shape, dtype) for shape, dtype in kinds}
    shaped = [[name for name, x in state.items() if x.shape == shape] for shape, state in initial.items()]
    slots = tuple(name for name in shaped[0] if all(name in names for names in shaped)) if shaped else ()

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        return (param, *slots.values(), grad), slots

    def on_owner(payload: Payload, owned: Slots, options: MatrixOptions) -> tuple[Payload, Slots]:
        # copies: where nothing is sent these are the caller's own, and an update may write after all
        param, *own, grad = (x.clone() for x in payload)
        given = {**dict(zip(slots, own, strict=True)), **{name: x.clone() for name, x in owned.items()}}
        rates = {key: value for key, value in options.items() if key not in ("step", "shape")}
        new, state = update(grad, dict(given), param, **rates)
        _check_result(new, param, state, given)
        return (new, *(state[slot] for slot in slots)), {name: state[name] for name in owned}

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        new, *own = results
        return new, dict(zip(slots, own, strict=True))

    def init_owned(param: Tensor) -> Slots:
        return dict(init(param))

    return MatrixRule(slots, init_owned, before_exchange, on_owner, after_exchange, 1 + len(slots), is_whole=True)


def _try_init(init: MatrixInit, update: MatrixUpdate, shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
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
    _check_result(new[0], x, new[1], state)
    return state


def _check_result(new: object, param: Tensor, state: Mapping[str, object], given: Tensors) -> None:
    def describe(x: object) -> str:
        return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

    of = f"a matrix {list(param.shape)}"
    if describe(new) != describe(param):
        raise ValueError(f"by_matrix: the update of {of}: expected {describe(param)}, got {describe(new)}")
    after, before = ({name: describe(x) for name, x in one.items()} for one in (state, given))
    if after != before:
        raise ValueError(f"by_matrix: the new state of {of}: expected {before}, as before, got {after}")


# --- The driver: batches of matrices go to their owners and return, whatever the rule ---

Fallback = tuple[Callable[[Tensors], Mapping[str, Any]], Callable[..., tuple[Tensors, Mapping[str, Any]]]]
"""``(init, update)`` of parameters that are not matrices, such as `from_torch` returns. Its state has its params' keys."""


class MatrixState(NamedTuple):
    """The state of one unit, as an optimizer of matrices keeps it."""

    step: Tensor
    """The number of steps taken: int64, on the host, the same on all ranks."""
    slices: dict[str, Tensor]
    """Elementwise state of the matrices, such as momentum: slices like the shard. {} for a unit without matrices."""
    owned: dict[str, dict[str, Tensor]]
    """By matrix, its owner's state, such as preconditioners. Other ranks hold empty tensors, [0, *shape]."""
    fallback: dict[str, Any]
    """The state of ``fallback``: by unit key if the unit has no matrix, else by parameter name."""


ArrivingChunks = Iterator[tuple[Chunk, list[Params]]]
"""An iterator over the chunks of some results, each with its parts by matrix, in the order of their arrival."""


@dataclass(frozen=True)
class MatrixStep:
    """An optimizer of matrices, and one step of it: with ``donate`` in the given memory, part by part."""

    rule: MatrixRule
    known: Matrices
    options: Mapping[str, MatrixOptions]
    fallback: Fallback
    donate: bool = False
    tracked: bool = False
    """Whether the step is differentiated, batched or recorded: then no rank may skip what another rank runs."""

    def init(self, params: Tensors) -> dict[str, MatrixState]:
        """Return the state before the first step, by unit key: zeros, or what the rule returns for each matrix."""
        others = self._fallback_tensors(params)
        fallback = self.fallback[0](others)
        if [*fallback] != [*others]:
            expected = f"expected a state with the keys {[*others][:4]} that it is given"
            raise ValueError(f"fallback: {expected}, got {[*fallback][:4]}")
        initial: dict[str, Slots] = {}
        parts: dict[str, Params] = {slot: {} for slot in self.rule.slots}
        for batch in self.known._batches_of(params):
            made = self._init_batch(batch, params)
            initial |= made
            for slot, of_slot in parts.items() if self.rule.is_whole else ():
                of_slot |= batch.spread({name: state.pop(slot) for name, state in made.items()})()
        state: dict[str, MatrixState] = {}
        for key, tensor in params.items():
            names = self.known._names_in(key)
            slices: Params = {}
            for slot, of_slot in parts.items() if names else ():
                own = {name: [of_slot[name]] for name in names if name in of_slot}
                dtype = next(iter(own.values()))[0].dtype if own else tensor.dtype
                zeros = torch.zeros_like(tensor.detach(), dtype=dtype)
                slices[slot] = _place_like(tensor, self.known._join(key, own, zeros) if own else zeros)
            owned = {name: initial[name] for name in names}
            rest = {name: fallback[name] for name in self._fallback_tensors({key: tensor})}
            state[key] = MatrixState(torch.zeros((), dtype=torch.int64), slices, owned, rest)
        return state

    def _init_batch(self, batch: MatrixBatch, params: Tensors) -> dict[str, Slots]:
        """Return the initial state of the matrices of a batch: empty tensors [0, *shape] where another rank is the owner."""
        parts = {m.name: self.known._select(m.unit.key, params[m.unit.key].detach(), m.name) for m in batch.matrices}
        whole = batch.collect(parts)() if self.rule.is_whole else {}
        out: dict[str, Slots] = {}
        for matrix in batch.matrices:
            part = parts[matrix.name]
            if self.known._is_owner(matrix.name):
                out[matrix.name] = self.rule.init_owned(whole.get(matrix.name, part.new_zeros(()).expand(matrix.shape)))
            else:
                like = self.rule.init_owned(torch.empty(matrix.shape, dtype=part.dtype, device="meta"))
                out[matrix.name] = {key: part.new_empty((0, *x.shape), dtype=x.dtype) for key, x in like.items()}
        return out

    def update(
        self, grads: Tensors, state: Mapping[str, MatrixState], params: Tensors, rates: Mapping[str, Any]
    ) -> tuple[Params, dict[str, MatrixState]]:
        """Return the new params and state. The fallback, which gets the ``rates``, runs while the first batch is sent."""
        if self.donate:
            if any(map(_torch.is_pinned, params.values())):
                _torch.synchronize_copies()  # what a gather may still read
            # from here on, so that nobody goes on with what is half written where something raises
            params = {key: _torch.take_storage(x) if self.known._names_in(key) else x for key, x in params.items()}
            state = {key: s._replace(slices=pytree.tree_map(_torch.take_storage, s.slices)) for key, s in state.items()}
        run = _Run(grads, state, params, {key: unit.step + 1 for key, unit in state.items()})
        batches = [*self.known._batches_of(params)]
        arriving = self._start_to_owners(run, batches[0]) if batches else None
        fallback = self._update_fallback(run, rates)
        returning: tuple[MatrixBatch, ArrivingChunks] | None = None
        for i, batch in enumerate(batches):
            assert arriving is not None
            arrived = arriving()
            arriving = self._start_to_owners(run, batches[i + 1]) if i + 1 < len(batches) else None
            results = self._update_owned(run, batch, arrived)
            del arrived
            if returning is not None:
                self._finish_batch(run, *returning)
            returning = batch, self._start_from_owners(batch, results)
        if returning is not None:
            self._finish_batch(run, *returning)
        new = {key: self._join_unit(run, key, fallback) for key in params}
        return {key: param for key, (param, _) in new.items()}, {key: new[key][1] for key in state}

    def _fallback_tensors(self, tree: Tensors) -> Params:
        """Return the tensors of ``fallback``: shards of units without matrices by key, other parts of shards by name."""
        out: Params = {}
        for key, tensor in tree.items():
            if not (names := self.known._names_in(key)):
                out[key] = tensor
                continue
            others = [param.name for param in self.known.spec.by_key[key].params if param.name not in names]
            out |= {name: self.known._select(key, tensor, name) for name in others}
        return out

    def _update_fallback(self, run: _Run, rates: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
        keeps = [key for key in run.params if self.known._names_in(key)] if _torch.is_eager() and not self.donate else []
        versions = {key: _torch.version(run.params[key]) for key in keeps}
        given = {name: x for unit in run.state.values() for name, x in unit.fallback.items()}
        grads, params = self._fallback_tensors(run.grads), self._fallback_tensors(run.params)
        parts, state = self.fallback[1](grads, given, params, **rates)
        for key, version in versions.items():
            if _torch.version(run.params[key]) != version:
                raise ValueError(f"fallback: it has written into params['{key}']: expected donate=True of both, or of neither")
        return {name: (parts[name], state[name]) for name in given}

    def _options_of(self, run: _Run, matrix: Matrix) -> MatrixOptions:
        return {**self.options[matrix.name], "shape": matrix.shape, "step": run.steps[matrix.unit.key]}

    def _start_to_owners(self, run: _Run, batch: MatrixBatch) -> Callable[[], dict[str, Payload]]:
        """Run the rule's part before the exchange, and start to send its payloads to the owners."""
        sent: dict[str, Payload] = {}
        wanted = batch.sent_names
        for matrix in batch.matrices:
            name, select = matrix.name, partial(self.known._select, matrix.unit.key, name=matrix.name)
            grad, param = (select(tree[matrix.unit.key]) for tree in (run.grads, run.params))
            slots = {slot: select(x) for slot, x in run.state[matrix.unit.key].slices.items()}
            sent[name], new = self.rule.before_exchange(grad, slots, param, self._options_of(run, matrix))
            if self.donate:  # in the old memory
                new = {slot: slots[slot] if x is slots[slot] else slots[slot].copy_(x) for slot, x in new.items()}
            run.slots[name] = new
            if not self.tracked and name not in wanted:
                sent[name] = tuple(x.new_empty(0) for x in sent[name])
        arriving = [batch.collect(dict(zip(sent, some, strict=True))) for some in zip(*sent.values(), strict=True)]

        def arrived() -> dict[str, Payload]:
            whole = [wait() for wait in arriving]
            return {matrix.name: tuple(some[matrix.name] for some in whole) for matrix in batch.matrices}

        return arrived

    def _update_owned(self, run: _Run, batch: MatrixBatch, sent: Mapping[str, Payload]) -> list[Params]:
        """Run the rule on the owners. Returns one dict for each result; other ranks have empty tensors in it."""
        old = {matrix.name: run.state[matrix.unit.key].owned[matrix.name] for matrix in batch.matrices}
        alike: dict[object, list[Matrix]] = {}
        for matrix in batch.owned_matrices:
            is_small = self.rule.takes_batches and matrix.numel <= MAX_BATCHED_NUMEL
            alike.setdefault(matrix.shape if is_small else matrix.name, []).append(matrix)
        results, owned = dict(sent), dict(old)
        for first, *others in alike.values():
            payload, options = sent[first.name], self._options_of(run, first)
            if not others:
                results[first.name], owned[first.name] = self.rule.on_owner(payload, old[first.name], options)
                continue
            names = [first.name, *(matrix.name for matrix in others)]
            stacks = tuple(torch.stack(some) for some in zip(*(sent[name] for name in names), strict=True))
            made, _ = self.rule.on_owner(stacks, {}, options)
            results |= zip(names, zip(*(stack.unbind() for stack in made), strict=True), strict=True)
        rates = [x for m in batch.matrices for x in self.options[m.name].values() if isinstance(x, Tensor)]
        tie = batch.tie_to_inputs(pytree.tree_leaves((dict(sent), old, rates)) if self.tracked else [])
        for matrix in batch.matrices:
            before = old[matrix.name]
            new = {key: batch.select_owner_result(matrix, x, before[key]) for key, x in owned[matrix.name].items()}
            run.owned[matrix.name] = {key: tie(x) for key, x in new.items()}
        return [
            {name: tie(results[name][i].to(payload[i].dtype)) for name, payload in sent.items()}
            for i in range(self.rule.result_count)
        ]

    def _start_from_owners(self, batch: MatrixBatch, results: list[Params]) -> ArrivingChunks:
        """Start to send the results back. While one chunk is used, the next one is in flight."""
        plans = [None] if self.tracked or not batch.chunks else [*batch.chunks]

        def start(plan: ExchangePlan | None) -> list[Callable[[], Params]]:
            coming = [batch.spread(some, plan) for some in results]
            if plan is plans[-1]:
                results.clear()
            return coming

        def arriving(coming: list[Callable[[], Params]]) -> ArrivingChunks:
            for i, plan in enumerate(plans):
                parts = [wait() for wait in coming]
                coming = start(plans[i + 1]) if i + 1 < len(plans) else []
                yield (0, 1) if plan is None else plan.chunk, parts

        return arriving(start(plans[0]))

    def _finish_batch(self, run: _Run, batch: MatrixBatch, returning: ArrivingChunks) -> None:
        """Run the rule's part after the exchange, chunk by chunk."""
        for chunk, results in returning:
            for matrix in batch.matrices:
                name = matrix.name
                param = self.known._select(matrix.unit.key, run.params[matrix.unit.key], name)
                elements = chunk_slice(len(param), chunk)
                slots = {slot: x[elements] for slot, x in run.slots[name].items()}
                arrived = tuple(some[name].to(param.device) for some in results)
                new, after = self.rule.after_exchange(arrived, slots, param[elements], self._options_of(run, matrix))
                if self.donate:
                    param[elements].copy_(new)
                    for slot, x in after.items():
                        if x is not slots[slot]:
                            slots[slot].copy_(x)
                    continue
                made = run.parts.setdefault(name, {slot: [] for slot in ("", *after)})
                for slot, x in {"": new, **after}.items():
                    made[slot].append(x)
            del results
        for matrix in batch.matrices:
            del run.slots[matrix.name]

    def _join_unit(self, run: _Run, key: str, fallback: dict[str, tuple[Tensor, Any]]) -> tuple[Tensor, MatrixState]:
        """Return, once, a unit's new shard and state."""
        param, state, names = run.params[key], run.state[key], self.known._names_in(key)
        others = {name: fallback.pop(name) for name in state.fallback}
        owned = {name: run.owned.pop(name) for name in names}
        new = MatrixState(run.steps[key], state.slices, owned, {name: after for name, (_, after) in others.items()})
        if not names:
            return others[key][0], new
        if self.donate:  # the matrices' parts are there
            for name, (part, _) in others.items():
                self.known._select(key, param, name).copy_(part)
            return param, new
        made = {name: run.parts.pop(name) for name in names}
        parts = {name: parts[""] for name, parts in made.items()} | {name: [part] for name, (part, _) in others.items()}
        slices: Params = {}
        for slot, old in state.slices.items():
            slices[slot] = _place_like(old, self.known._join(key, {name: made[name].pop(slot) for name in names}, old))
        return _place_like(param, self.known._join(key, parts, param)), new._replace(slices=slices)


@dataclass(eq=False)
class _Run:
    """What one step is given, and what it has made so far."""

    grads: Tensors
    state: Mapping[str, MatrixState]
    params: Tensors
    steps: Mapping[str, Tensor]
    slots: dict[str, Slots] = field(default_factory=dict)
    """By matrix, its slots before the exchange."""
    parts: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)
    """By matrix, the chunks of its parameter, "", and of its slots after the exchange."""
    owned: dict[str, Slots] = field(default_factory=dict)


def _place_like(old: Tensor, new: Tensor) -> Tensor:
    return copy_like(old, new) if _torch.is_pinned(old) else new
