"""The rule and the configuration of an optimizer of matrices, its state, and one step: batches go to owners and return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from ... import _torch
from ..._core.layout import Params
from .._checks import Tensors, copy_like
from .._matrices.exchange import Chunk, MatrixBatch, chunk_slice
from .._matrices.matrices import Matrices
from .._matrices.owners import Matrix
from .._options import SharedOptions, scale_lr

MatrixOptions = Mapping[str, Any]
"""Options of one matrix, such as its learning rate, and the number ``step`` of this step, from 1, on the host."""
Slots = dict[str, Tensor]
"""Elementwise state by name."""
Payload = tuple[Tensor, ...]
"""The tensors of a matrix that are sent: the same number and dtypes for every matrix."""
MatricesOptions = Mapping[str, MatrixOptions]
Sent = Mapping[str, Payload]
"""By matrix, what has arrived at its owner."""
OwnedState = dict[str, dict[str, Tensor]]
"""By matrix, the state that only its owner has."""
OwnerResults = tuple[dict[str, Payload], OwnedState]


@dataclass(frozen=True)
class MatrixRule:
    """An optimizer of matrices: elementwise on slices, then on owners, then elementwise on slices."""

    slots: tuple[str, ...]
    """Names of the elementwise state, which is kept in slices."""
    init_owned: Callable[[Tensor], Slots]
    """Returns the owner's initial state from a tensor like the matrix; with ``is_whole``, all state from the matrix."""
    before_exchange: Callable[[Tensor, Slots, Tensor, MatrixOptions], tuple[Payload, Slots]]
    """``before_exchange(grad, slots, param, options) -> (payload, new slots)``."""
    on_owner: Callable[[Sent, OwnedState, MatricesOptions], OwnerResults]
    """``on_owner(payloads, state, options) -> (results, new state)``, by name, for the owned matrices of a batch."""
    result_dtype_of: tuple[int, ...]
    """For each result, the index of the tensor in the payload whose dtype it takes."""
    after_exchange: Callable[[Payload, Slots, Tensor, MatrixOptions], tuple[Tensor, Slots]]
    """``after_exchange(results, slots, param, options) -> (new param, new slots)``."""
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
        return (grad, param, *slots.values()), slots

    def on_owner(sent: Sent, whole: OwnedState, options: MatricesOptions) -> OwnerResults:
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

    dtypes = tuple(range(1, 2 + len(slots)))
    return MatrixRule(slots, lambda x: dict(init(x)), before_exchange, on_owner, dtypes, after_exchange, is_whole=True)


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
    _check_result(f"a matrix {list(shape)}", new[0], x, new[1], state)
    return state


def _check_result(of: str, new: object, param: Tensor, state: Mapping[str, object], given: Tensors) -> None:
    def describe(x: object) -> str:
        return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

    if describe(new) != describe(param):
        raise ValueError(f"by_matrix: the update of {of}: expected {describe(param)}, got {describe(new)}")
    after, before = ({name: describe(x) for name, x in one.items()} for one in (state, given))
    if after != before:
        raise ValueError(f"by_matrix: the new state of {of}: expected {before}, as before, got {after}")


Fallback = tuple[Callable[[Tensors], Mapping[str, Any]], Callable[..., tuple[Tensors, Mapping[str, Any]]]]
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
        axes = {m.name: every if self.rule.is_whole else m.unit.distinct_axes for m in self.matrices.chosen}
        return {name: {k: shared.over_axes(x, axes[name]) for k, x in own.items()} for name, own in options.items()}

    def fallback_tensors(self, tree: Tensors) -> Params:
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


def init_state(config: MatrixConfig, params: Tensors) -> dict[str, MatrixState]:
    """Return the state before the first step, by unit key: zeros, or what the rule's ``init_owned`` returns for each matrix."""
    others = config.fallback_tensors(params)
    fallback = config.fallback[0](others)
    if [*fallback] != [*others]:
        raise ValueError(f"fallback: expected a state with the keys {[*others][:4]} that it is given, got {[*fallback][:4]}")
    whole: OwnedState = {}
    slots: dict[str, Params] = {slot: {} for slot in config.rule.slots}
    for batch in config.matrices._batches_of(params):
        initial = _init_batch(config, batch, params)
        whole |= {name: {key: x for key, x in state.items() if key not in slots} for name, state in initial.items()}
        for slot, parts in slots.items() if config.rule.is_whole else ():
            parts |= batch.spread({name: state[slot] for name, state in initial.items()})()
    state: dict[str, MatrixState] = {}
    for key, tensor in params.items():
        layout, names = config.matrices._slice_layout(key), config.matrices._names_in(key)
        slices: Params = {}
        for slot, parts in slots.items() if names else ():
            some = {name: parts[name] for name in names if name in parts}
            zeros = torch.zeros_like(tensor.detach(), dtype=next(iter(some.values()), tensor).dtype)
            slices[slot] = _place_like(tensor, layout.join(some, zeros) if some else zeros)
        owned = {name: whole[name] for name in names}
        others = {name: fallback[name] for name in config.fallback_tensors({key: tensor})}
        state[key] = MatrixState(torch.zeros((), dtype=torch.int64), slices, owned, others)
    return state


def _init_batch(config: MatrixConfig, batch: MatrixBatch, params: Tensors) -> OwnedState:
    """Return the initial state of the matrices of a batch: empty tensors [0, *shape] where another rank is the owner."""
    parts = {
        m.name: config.matrices._slice_layout(m.unit.key).select(params[m.unit.key].detach(), m.name) for m in batch.matrices
    }
    given = batch.collect(parts)() if config.rule.is_whole else {}
    out: OwnedState = {}
    for matrix in batch.matrices:
        part = parts[matrix.name]
        if config.matrices._is_owner(matrix.name):
            out[matrix.name] = config.rule.init_owned(given[matrix.name] if given else part.new_zeros(()).expand(matrix.shape))
        else:
            like = config.rule.init_owned(torch.empty(matrix.shape, dtype=part.dtype, device="meta"))
            out[matrix.name] = {key: part.new_empty((0, *x.shape), dtype=x.dtype) for key, x in like.items()}
    return out


def _place_like(old: Tensor, new: Tensor) -> Tensor:
    return copy_like(old, new) if _torch.is_pinned(old) else new


ArrivingChunks = Iterator[tuple[Chunk, list[Params]]]
"""An iterator over the chunks of some results, each with its parts by matrix, in the order of their arrival."""


@dataclass(eq=False)
class MatrixStep:
    """One step of the given units; with ``donate`` in their own memory, part by part.

    ``tracked`` says whether the step is differentiated, batched or recorded: then no rank may skip what another rank runs.
    """

    config: MatrixConfig
    options: MatricesOptions
    rates: Mapping[str, Any]
    """Of the fallback."""
    grads: Tensors
    state: Mapping[str, MatrixState]
    params: Tensors
    tracked: bool
    donate: bool
    _parts: Params = field(default_factory=dict)
    _slots: dict[str, Slots] = field(default_factory=dict)
    _new_slots: dict[str, Slots] = field(default_factory=dict)
    _whole: OwnedState = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = {key: unit.step + 1 for key, unit in self.state.items()}

    def run(self) -> tuple[Params, dict[str, MatrixState]]:
        """Return the new params and state. The fallback runs while the first batch is sent."""
        known = self.config.matrices
        if self.donate:
            if any(map(_torch.is_pinned, self.params.values())):
                _torch.synchronize_copies()  # what a gather may still read
            # from here on, so that nobody goes on with what is half written where something raises
            self.params = {key: _torch.take_storage(x) if known._names_in(key) else x for key, x in self.params.items()}
            self.state = {
                key: unit._replace(slices=pytree.tree_map(_torch.take_storage, unit.slices)) for key, unit in self.state.items()
            }
        batches = [*known._batches_of(self.params)]
        left = Counter(matrix.unit.key for batch in batches for matrix in batch.matrices)
        arriving = self._start_collect(batches[0]) if batches else None
        fallback = self._update_fallback()
        new = {key: self._join_unit(key, fallback) for key in self.params if not left[key]}
        returning: tuple[MatrixBatch, ArrivingChunks] | None = None
        for batch, after in zip((*batches, None), (*batches[1:], None, None), strict=False):
            results: list[Params] = []
            if batch is not None:
                assert arriving is not None
                now, arriving = arriving, None if after is None else self._start_collect(after)
                results = self._compute_owned(batch, now())
                del now  # with what has arrived
            if returning is not None:
                self._finish_batch(*returning)
                left.subtract(matrix.unit.key for matrix in returning[0].matrices)
                done = dict.fromkeys(matrix.unit.key for matrix in returning[0].matrices if not left[matrix.unit.key])
                new |= {key: self._join_unit(key, fallback) for key in done}
            returning = None if batch is None else (batch, self._start_spread(batch, results))
        return {key: new[key][0] for key in self.params}, {key: new[key][1] for key in self.state}

    def _update_fallback(self) -> dict[str, tuple[Tensor, Any]]:
        config = self.config
        keeps = [key for key in self.params if config.matrices._names_in(key)] if _torch.is_eager() and not self.donate else []
        versions = {key: _torch.version(self.params[key]) for key in keeps}
        given = {name: x for unit in self.state.values() for name, x in unit.fallback.items()}
        grads, params = config.fallback_tensors(self.grads), config.fallback_tensors(self.params)
        parts, state = config.fallback[1](grads, given, params, **self.rates)
        for key, version in versions.items():
            if _torch.version(self.params[key]) != version:
                raise ValueError(f"fallback: it has written into params['{key}']: expected donate=True of both, or of neither")
        return {name: (parts[name], state[name]) for name in given}

    def _join_unit(self, key: str, fallback: dict[str, tuple[Tensor, Any]]) -> tuple[Tensor, MatrixState]:
        """Return, once, a unit's new shard and state."""
        names, layout = self.config.matrices._names_in(key), self.config.matrices._slice_layout(key)
        param, state = self.params[key], self.state[key]
        others = {name: fallback.pop(name) for name in state.fallback}
        slots = {name: {**self._slots.pop(name), **self._new_slots.pop(name)} for name in names}
        parts = {name: self._parts.pop(name) for name in names} | {name: part for name, (part, _) in others.items()}
        owned = {name: self._whole.pop(name) for name in names}
        new = MatrixState(self._steps[key], state.slices, owned, {name: after for name, (_, after) in others.items()})
        if not names:
            return parts[key], new
        if self.donate:  # the matrices' parts are there
            for name in others:
                layout.select(param, name).copy_(parts[name])
            return param, new
        by_slot = {slot: {name: own[slot] for name, own in slots.items()} for slot in state.slices}
        slices = {slot: _place_like(old, layout.join(by_slot[slot], old)) for slot, old in state.slices.items()}
        return _place_like(param, layout.join(parts, param)), new._replace(slices=slices)

    def _start_collect(self, batch: MatrixBatch) -> Callable[[], dict[str, Payload]]:
        """Run the rule's part before the exchange, and start to send its payloads to the owners."""
        sent: dict[str, Payload] = {}
        wanted = batch.sent_names
        for matrix in batch.matrices:
            cut, name = self.config.matrices._slice_layout(matrix.unit.key), matrix.name
            grad, param = (cut.select(tree[matrix.unit.key], name) for tree in (self.grads, self.params))
            slots = {slot: cut.select(x, name) for slot, x in self.state[matrix.unit.key].slices.items()}
            sent[name], new = self.config.rule.before_exchange(grad, slots, param, self._options_of(matrix))
            if self.donate:  # in the old memory
                new = {slot: slots[slot] if x is slots[slot] else slots[slot].copy_(x) for slot, x in new.items()}
            self._slots[name] = new
            if not self.tracked and name not in wanted:
                sent[name] = tuple(x.new_empty(0) for x in sent[name])
        names = [*sent]
        arriving = [batch.collect(dict(zip(names, some, strict=True))) for some in zip(*sent.values(), strict=True)]

        def arrived() -> dict[str, Payload]:
            whole = [wait() for wait in arriving]
            return {name: tuple(some[name] for some in whole) for name in names}

        return arrived

    def _options_of(self, matrix: Matrix) -> MatrixOptions:
        return {**self.options[matrix.name], "step": self._steps[matrix.unit.key]}

    def _compute_owned(self, batch: MatrixBatch, sent: Mapping[str, Payload]) -> list[Params]:
        """Run the rule on the owners. Returns one dict for each result; other ranks have empty tensors in it."""
        names = [matrix.name for matrix in batch.owned_matrices]
        whole = {matrix.name: self.state[matrix.unit.key].owned[matrix.name] for matrix in batch.matrices}
        options = {matrix.name: self._options_of(matrix) for matrix in batch.owned_matrices}
        given, owned = {name: sent[name] for name in names}, {name: whole[name] for name in names}
        results, new = self.config.rule.on_owner(given, owned, options)
        rates = [x for m in batch.matrices for x in self.options[m.name].values() if isinstance(x, Tensor)]
        tie = batch.tie_to_inputs([*pytree.tree_leaves(sent), *pytree.tree_leaves(whole), *rates])
        for matrix in batch.matrices:
            old = whole[matrix.name]
            made = new.get(matrix.name, old)
            self._whole[matrix.name] = {key: tie(batch.select_owner_result(matrix, x, old[key])) for key, x in made.items()}
        return [
            {
                name: tie(results[name][i].to(tensors[give].dtype) if name in results else tensors[give])
                for name, tensors in sent.items()
            }
            for i, give in enumerate(self.config.rule.result_dtype_of)
        ]

    def _start_spread(self, batch: MatrixBatch, results: list[Params]) -> ArrivingChunks:
        """Start to send the results back. While one chunk is used, the next one is in flight."""
        chunks = batch.chunk_count(results)

        def start_chunk(chunk: int) -> list[Callable[[], Params]]:
            coming = [batch.spread(some, (chunk, chunks)) for some in results]
            if chunk + 1 == chunks:
                results.clear()
            return coming

        def arriving(coming: list[Callable[[], Params]]) -> ArrivingChunks:
            for chunk in range(chunks):
                parts = [wait() for wait in coming]
                coming = start_chunk(chunk + 1) if chunk + 1 < chunks else []
                yield (chunk, chunks), parts

        return arriving(start_chunk(0))

    def _finish_batch(self, batch: MatrixBatch, returning: ArrivingChunks) -> None:
        """Run the rule's part after the exchange."""
        for chunk, results in returning:
            for matrix in batch.matrices:
                name = matrix.name
                param = self.config.matrices._slice_layout(matrix.unit.key).select(self.params[matrix.unit.key], name)
                elements = chunk_slice(len(param), *chunk)
                slots = {slot: x[elements] for slot, x in self._slots[name].items()}
                arrived = tuple(some[name].to(param.device) for some in results)
                part, new = self.config.rule.after_exchange(arrived, slots, param[elements], self._options_of(matrix))
                self._store_chunk(self._parts, name, param, part, elements)
                made = self._new_slots.setdefault(name, {})
                for slot, x in new.items():
                    if x is not slots[slot]:
                        self._store_chunk(made, slot, self._slots[name][slot], x, elements)
            del results

    def _store_chunk(self, made: Params, name: str, old: Tensor, new: Tensor, elements: slice) -> None:
        """Store one chunk of a new tensor, in the old memory if that is donated."""
        if not self.donate and len(new) == len(old):
            made[name] = new
            return
        if name not in made:
            made[name] = old if self.donate else torch.empty_like(old, dtype=new.dtype)
        made[name][elements].copy_(new)
