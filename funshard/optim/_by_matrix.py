"""by_matrix, and the driver of all optimizers of whole matrices: batches of matrices go to their owners and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from .. import _torch
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._spec.local import stack_dims
from .._torch.tracing import phase
from . import _checks
from ._checks import Optimizer, Pair, ParamOptions, StepRate, Tensors
from ._from_torch import from_torch
from ._matrices import Chunk, Matrices, Matrix, MatrixBatch, chunk_slice, matrices
from ._rules import adamw

MatrixOptions = Mapping[str, Any]
"""Options of one matrix, such as its learning rate, its ``shape``, and the ``step``, which counts from 1, on the host."""
Slots = dict[str, Tensor]  # the state of one matrix by name
Payload = tuple[Tensor, ...]  # what is sent of a matrix: the same number and dtypes for every matrix
MAX_BATCHED_NUMEL = 1 << 20
"""Matrices of one shape are computed as one batch up to this many elements: for larger ones the copies cost more."""


@dataclass(frozen=True)
class MatrixRule:
    """An optimizer of matrices: elementwise on slices, then on owners, then elementwise on slices."""

    slots: tuple[str, ...]  # names of the elementwise state, which is kept in slices
    init_owned: Callable[[Tensor], Tensors]  # from a tensor like the matrix; with ``is_whole`` all state, from the matrix
    # ``before_exchange(grad, slots, param, options) -> (payload, new slots)``
    before_exchange: Callable[[Tensor, Slots, Tensor, MatrixOptions], tuple[Payload, Slots]]
    # ``on_owner(payload, owned, options) -> (results, new owned)``; a result has the dtype at its place in the payload
    on_owner: Callable[[Payload, Slots, MatrixOptions], tuple[Payload, Slots]]
    # ``after_exchange(results, slots, param, options) -> (new param, new slots)``
    after_exchange: Callable[[Payload, Slots, Tensor, MatrixOptions], tuple[Tensor, Slots]]
    result_count: int = 1
    takes_batches: bool = False  # whether ``on_owner``, which has no state, also takes a stack of matrices
    reads_step: bool = False  # ``on_owner`` reads the step to know what to compute, which no graph can
    is_whole: bool = False  # it is a `MatrixUpdate`, which may mix a batch and only owners give options; else slices use these


MatrixInit = Callable[[Tensor], Tensors]
"""``init(param) -> state``, a dict of tensors. It also runs on a meta tensor, for names and shapes."""
MatrixUpdate = Callable[..., tuple[Tensor, Tensors]]
"""``update(grad, state, param) -> (new param, new state)`` for one matrix, with ``lr=`` if the step has one."""


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

    return MatrixRule(slots, init, before_exchange, on_owner, after_exchange, 1 + len(slots), is_whole=True)


def _try_init(init: Callable[..., Any], update: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """Return the state of a matrix of this shape on meta. Wrong results raise TypeError or ValueError, on all ranks."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    try:
        state = init(x)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"by_matrix: init runs on a meta tensor first, for names and shapes: {error}") from error
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


class MatrixState(NamedTuple):
    """The state of one unit, as an optimizer of matrices keeps it."""

    step: Tensor  # the number of steps taken: int64, on the host, the same on all ranks
    slices: dict[str, Tensor]  # elementwise state of the matrices, such as momentum: slices like the shard, {} without any
    owned: dict[str, dict[str, Tensor]]  # by matrix, its owner's state; other ranks hold empty tensors, [0, *shape]
    fallback: dict[str, Any]  # the state of ``fallback``: by unit key if the unit has no matrix, else by parameter name


def init_state(rule: MatrixRule, known: Matrices, fallback: Pair, params: Tensors) -> dict[str, MatrixState]:
    """Return the state before the first step, by unit key: zeros, or what the rule returns for each matrix."""
    others = _fallback_tensors(known, params)
    initial = fallback[0](others)
    if (keys := [*others]) != (got := [*initial]):
        raise ValueError(f"fallback: expected a state with the keys {keys[:4]} that it is given, got {got[:4]}")
    owned: dict[str, Slots] = {}
    parts: dict[str, Params] = {slot: {} for slot in rule.slots}
    for batch in known._batches_of(params):
        pieces = {m.name: known._select(m.unit.key, params[m.unit.key].detach(), m.name) for m in batch.matrices}
        whole = batch.collect(pieces)() if rule.is_whole else {}
        for name, shape in ((matrix.name, matrix.shape) for matrix in batch.matrices):
            piece = pieces[name]
            if known._is_owner(name):
                owned[name] = dict(rule.init_owned(whole.get(name, piece.new_zeros(()).expand(shape))))
            else:
                like = rule.init_owned(torch.empty(shape, dtype=piece.dtype, device="meta"))
                owned[name] = {key: piece.new_empty((0, *x.shape), dtype=x.dtype) for key, x in like.items()}
        for slot, of_slot in parts.items() if rule.is_whole else ():
            of_slot |= batch.spread({name: owned[name].pop(slot) for name in pieces})()
    state: dict[str, MatrixState] = {}
    for key, tensor in params.items():
        names = known._names_in(key)
        slices: Params = {}
        for slot, of_slot in parts.items() if names else ():
            own = {name: of_slot[name] for name in names if name in of_slot}
            zeros = torch.zeros_like(tensor.detach(), dtype=next((x.dtype for x in own.values()), tensor.dtype))
            slices[slot] = _checks.place_like(tensor, known._join(key, own, zeros) if own else zeros)
        rest = {name: initial[name] for name in _fallback_tensors(known, {key: tensor})}
        state[key] = MatrixState(torch.zeros((), dtype=torch.int64), slices, {name: owned[name] for name in names}, rest)
    return state


def _fallback_tensors(known: Matrices, tree: Tensors) -> Params:
    """Return the tensors of ``fallback``: shards of units without matrices by key, other parts of shards by name."""
    out: Params = {}
    for key, tensor in tree.items():
        names = known._names_in(key)
        others = [param.name for param in known.spec.by_key[key].params if param.name not in names]
        out |= {name: known._select(key, tensor, name) for name in others} if names else {key: tensor}
    return out


@dataclass(eq=False)
class MatrixStep:
    """One step of an optimizer of matrices, which writes into the given params and slices, unless it is tracked."""

    rule: MatrixRule
    known: Matrices
    options: Mapping[str, MatrixOptions]
    fallback: Pair
    grads: Tensors
    state: Mapping[str, MatrixState]  # with the number of this step
    params: Tensors
    is_tracked: bool  # differentiated, batched or recorded: then no rank may skip what another rank runs
    parts: dict[str, Slots] = field(default_factory=dict)  # by matrix, its new slots and, after its return, its new param, ""
    owned: dict[str, Slots] = field(default_factory=dict)  # by matrix, its owner's new state

    def run(self, rates: Mapping[str, Any]) -> tuple[Params, dict[str, MatrixState]]:
        """Return the new params and state. The fallback, which gets the ``rates``, runs while the first batch is sent."""
        batches = [*self.known._batches_of(self.params)]
        waiting = self._send(batches[0]) if batches else []
        others = {name: x for unit in self.state.values() for name, x in unit.fallback.items()}
        grads, params = (_fallback_tensors(self.known, tree) for tree in (self.grads, self.params))
        new_others, others = self.fallback[1](grads, others, params, **rates)
        finish: Callable[[], None] | None = None
        for i, batch in enumerate(batches):  # meanwhile the next one goes to its owners, and the one before returns
            arrived = [wait() for wait in waiting]
            waiting = self._send(batches[i + 1]) if i + 1 < len(batches) else []
            results = self._update_owned(batch, arrived)
            del arrived
            if finish:
                finish()
            finish = self._start_return(batch, results)
            del results
        if finish:
            finish()
        new = {key: self._join_unit(key, new_others, others) for key in self.params}
        return {key: param for key, (param, _) in new.items()}, {key: new[key][1] for key in self.state}

    def _options_of(self, matrix: Matrix) -> MatrixOptions:
        return {**self.options[matrix.name], "shape": matrix.shape, "step": self.state[matrix.unit.key].step}

    def _send(self, batch: MatrixBatch) -> list[Callable[[], Params]]:
        """Run the rule before the exchange; return what to call for each tensor of the payloads."""
        sent: dict[str, Payload] = {}
        reaching = batch.to_owners.steps[0].order if batch.to_owners else range(len(batch.matrices))
        for i, matrix in enumerate(batch.matrices):
            key, name = matrix.unit.key, matrix.name
            grad, param = (self.known._select(key, tree[key], name) for tree in (self.grads, self.params))
            old = {slot: self.known._select(key, x, name) for slot, x in self.state[key].slices.items()}
            sent[name], new = self.rule.before_exchange(grad, old, param, self._options_of(matrix))
            self.parts[name] = {slot: self._store(old[slot], x) for slot, x in new.items()}
            if not self.is_tracked and i not in reaching:  # another replica sends it
                sent[name] = tuple(x.new_empty(0) for x in sent[name])
        return [batch.collect(dict(zip(sent, some, strict=True))) for some in zip(*sent.values(), strict=True)]

    def _store(self, old: Tensor, new: Tensor) -> Tensor:
        return new if self.is_tracked or new is old else old.copy_(new)

    def _update_owned(self, batch: MatrixBatch, arrived: Sequence[Params]) -> list[Params]:
        """Run the rule on the owners. Returns one dict for each result; other ranks have empty tensors in it."""
        sent: dict[str, Payload] = {matrix.name: tuple(some[matrix.name] for some in arrived) for matrix in batch.matrices}
        old = {matrix.name: self.state[matrix.unit.key].owned[matrix.name] for matrix in batch.matrices}
        alike: dict[object, list[Matrix]] = {}
        for matrix in (matrix for matrix in batch.matrices if self.known._is_owner(matrix.name)):
            is_small = self.rule.takes_batches and matrix.numel <= MAX_BATCHED_NUMEL
            alike.setdefault(matrix.shape if is_small else matrix.name, []).append(matrix)
        results, owned = dict(sent), dict(old)
        for first, *others in alike.values():
            if not others:
                name = first.name
                results[name], owned[name] = self.rule.on_owner(sent[name], old[name], self._options_of(first))
                continue
            names = [first.name, *(matrix.name for matrix in others)]
            stacks = tuple(torch.stack(some) for some in zip(*(sent[name] for name in names), strict=True))
            made, _ = self.rule.on_owner(stacks, {}, self._options_of(first))
            results |= zip(names, zip(*(stack.unbind() for stack in made), strict=True), strict=True)
        rates = [x for m in batch.matrices for x in self.options[m.name].values() if isinstance(x, Tensor)]
        given = pytree.tree_leaves((dict(sent), old, rates)) if self.is_tracked and batch.to_owners else []
        zeros = [x.reshape(-1)[:0].sum().abs().float().to(given[0].device) for x in given]

        def tie(x: Tensor) -> Tensor:  # or else ranks without the matrix send other sizes under vmap, and nothing in backward
            return x + torch.stack(zeros).sum().to(x.dtype) if zeros else x

        for matrix in batch.matrices:
            new = owned[matrix.name]
            if not batch.to_owners:  # simulated ranks, of which one is the owner
                new = {key: batch.select_on_owner(matrix, x, old[matrix.name][key]) for key, x in new.items()}
            self.owned[matrix.name] = {key: tie(x).contiguous() for key, x in new.items()}  # as a checkpoint gives it back
        return [
            {name: tie(results[name][i].to(payload[i].dtype)) for name, payload in sent.items()}
            for i in range(self.rule.result_count)
        ]

    def _start_return(self, batch: MatrixBatch, results: list[Params]) -> Callable[[], None]:
        """Start to send results back; call the result to run the rule on each chunk of them while the next is on its way."""
        plans = [None] if self.is_tracked or not batch.chunks else [*batch.chunks]
        waiting = [batch.spread(some, plans[0]) for some in results]
        held = results if plans[1:] else []

        def finish() -> None:
            nonlocal waiting, held
            for i, plan in enumerate(plans):
                back = [wait() for wait in waiting]
                waiting = [batch.spread(some, following) for following in plans[i + 1 : i + 2] for some in held]
                held = held if plans[i + 2 :] else []
                for matrix in batch.matrices:
                    self._use_results(matrix, tuple(some[matrix.name] for some in back), plan.chunk if plan else (0, 1))
                back = []

        return finish

    def _use_results(self, matrix: Matrix, results: Payload, chunk: Chunk) -> None:
        """Run the rule after the exchange on a chunk of a matrix's slice."""
        param = self.known._select(matrix.unit.key, self.params[matrix.unit.key], matrix.name)
        elements = chunk_slice(len(param), chunk)
        part, own = param[elements], {slot: x[elements] for slot, x in self.parts[matrix.name].items() if slot}
        results = tuple(x.to(param.device) for x in results)
        new, after = self.rule.after_exchange(results, own, part, self._options_of(matrix))
        stored = {"": self._store(part, new), **{slot: self._store(own[slot], x) for slot, x in after.items()}}
        if self.is_tracked:
            self.parts[matrix.name] = stored

    def _join_unit(self, key: str, new_others: Tensors, states: Mapping[str, Any]) -> tuple[Tensor, MatrixState]:
        param, state, names = self.params[key], self.state[key], self.known._names_in(key)
        others = {name: new_others[name] for name in state.fallback}
        owned = {name: self.owned[name] for name in names}
        new = state._replace(owned=owned, fallback={name: states[name] for name in others})
        if not names:
            return others[key], new
        if not self.is_tracked:  # the matrices' parts are there
            for name, part in others.items():
                self.known._select(key, param, name).copy_(part)
            return param, new
        joined: Params = {}
        for slot, old in {"": param, **state.slices}.items():
            parts = {name: self.parts[name][slot] for name in names} | ({} if slot else others)
            joined[slot] = _checks.place_like(old, self.known._join(key, parts, old))
        return joined.pop(""), new._replace(slices=joined)


# --- The optimizer: options, checks, and the default for parameters that are not matrices ---


def by_matrix(
    init: MatrixInit, update: MatrixUpdate, spec: PartitionSpec | Matrices, *, fallback: Pair, donate: bool = False
) -> Optimizer:
    """Return ``(init, update)`` for a pure update of single matrices, which runs once for each matrix, on its owner.

    State of the matrix's shape is kept in slices and is sent with the matrix; other state stays on the owner.

    Args:
        init: ``init(param)`` returns a matrix's state, a dict of tensors, from a whole tensor [n, m] or [batch, n, m].
        update: ``update(grad, state, param)`` returns ``(new param, new state)``; with a step's ``lr`` also by name.
        spec: The spec, or `matrices`, which says what is a matrix and who owns it.
        fallback: ``(init, update)``, such as `from_torch` returns, for everything that is not a matrix. It receives whole
            shards of units without matrices; in mixed units, pieces by parameter name.
        donate: Write new params and slices of state into the given memory, which is lost even if an update raises.

    Returns:
        An `Optimizer`. A step's ``lr`` goes to ``update``, ``fallback_lr`` to ``fallback``, which donates by its own option.

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
    return make_optimizer("by_matrix", rule, known, {}, fallback=fallback, donate=donate)


def make_optimizer(
    who: str,
    rule: MatrixRule,
    spec: PartitionSpec | Matrices,
    defaults: Mapping[str, Any],
    *,
    options: ParamOptions | None = None,
    fallback: Pair | None = None,
    shares_lr: bool = False,  # whether the fallback gets a step's ``lr=``, as the default one does
    donate: bool = False,
) -> Optimizer:
    """Return the optimizer of a rule with the ``defaults`` as its options, and AdamW as the default ``fallback``."""
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    every: dict[str, MatrixOptions] = {}
    owned: dict[str, dict[str, list[int]]] = {}  # by matrix and name, the shape of its owner's state
    for matrix in known.chosen:
        if not rule.is_whole and (matrix.param.dtype.is_complex or len(matrix.shape) not in (2, 3)):
            got = f"{list(matrix.shape)} {matrix.param.dtype}"
            raise TypeError(f"{who}: '{matrix.name}': expected a real matrix, [n, m] or [batch, n, m], got {got}")
        own = {} if options is None else dict(options(matrix.name, matrix.param))
        _checks.check_options(f"{who}: options of matrix '{matrix.name}'", own, defaults)
        every[matrix.name] = {**defaults, **own}
        if matrix.stack and rule.is_whole:
            raise ValueError(
                f"matrix '{matrix.name}': its stack is local over axis '{matrix.stack_axes[0]}', of which a rank has a part, "
                f"{list(matrix.shape)}, and the update may mix its matrices: expected matrices(spec, gather_stacks=True), "
                "which sends the stack whole to one owner, or select= without it"
            )
        initial = rule.init_owned(torch.empty(matrix.shape, dtype=matrix.unit.dtype, device="meta"))
        owned[matrix.name] = {slot: [*x.shape] for slot, x in initial.items() if slot not in rule.slots}
        for slot, shape in owned[matrix.name].items():
            if stack_dims(matrix.param, tuple(shape), dict(known.spec.bound_mesh.sizes)) != matrix.stack:
                raise ValueError(
                    f"matrix '{matrix.name}': state '{slot}' {shape} of the matrix {list(matrix.shape)}: expected the "
                    "dimensions of its batch first, or another size in their place"
                )
    shares_lr = shares_lr or fallback is None
    others = fallback or _fallback_adamw(known, defaults, options, donate=donate)
    if not _checks.is_pair(others):
        raise TypeError(f"fallback: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW), got {others!r}")

    def init(params: Tensors) -> dict[str, MatrixState]:
        known._check_slices(params)
        return init_state(rule, known, others, params)

    def update(
        grads: Tensors, state: Mapping[str, MatrixState], params: Tensors, *, lr: StepRate = None, fallback_lr: StepRate = None
    ) -> tuple[Params, dict[str, MatrixState]]:
        known._check_slices(params)
        _checks.check_trees(params, grads, state, params)
        for key, unit in ((key, state[key]) for key in params):
            if not isinstance(unit, MatrixState):  # pyright: ignore[reportUnnecessaryIsInstance]
                got = type(unit).__name__
                raise TypeError(f"state of unit '{key}': expected a MatrixState, got {got}; make it by init(params)")
            names = known._names_in(key)
            here = {name: [] if known._is_owner(name) else [0] for name in names}
            held = {name: {slot: [*here[name], *x] for slot, x in owned[name].items()} for name in names}
            expected = {slot: [len(params[key])] for slot in rule.slots if names}, held
            got = pytree.tree_map(lambda x: [*x.shape], (unit.slices, unit.owned))
            if got != expected:
                raise ValueError(
                    f"state of unit '{key}': expected the shapes {expected}, got {got}; was it made by another optimizer, "
                    "or is it of another spec or mesh? checkpoint.load(..., like=init(params)) gives it to the current owners"
                )
        _checks.check_rate(lr, "lr")
        _checks.check_rate(fallback_lr, "fallback_lr")
        if lr is not None and fallback_lr is None and not shares_lr:
            raise ValueError("lr= is the matrices': expected fallback_lr= with it, that of the fallback= that was given")
        rates = {"lr": lr if fallback_lr is None else fallback_lr} if lr is not None or fallback_lr is not None else {}
        now = every
        if lr is not None:
            now = {name: {**own, "lr": _checks.scale_lr(lr, own.get("lr"), defaults.get("lr"))} for name, own in every.items()}
        given = [x for x in pytree.tree_leaves((grads, state, params, lr, fallback_lr)) if isinstance(x, Tensor)]
        next_state = {key: unit._replace(step=unit.step + 1) for key, unit in state.items()}
        if not _torch.is_eager() or _torch.any_tracked(given):
            share, mesh_axes = _checks.share_options(known.spec), known.spec.bound_mesh.names
            # for derivatives on slices, or on owners, each of which is one rank of the whole mesh
            axes = {m.name: mesh_axes if rule.is_whole else m.unit.distinct_axes for m in known.chosen}
            now = {name: {key: share(x, axes[name]) for key, x in own.items()} for name, own in now.items()}
            return MatrixStep(rule, known, now, others, grads, next_state, params, is_tracked=True).run(rates)
        if donate:
            slices = {key: unit.slices for key, unit in state.items()}
            _checks.refuse_shared_memory(_checks.named_tensors(grads, slices, params))
            if any(map(_torch.is_pinned, params.values())):
                _torch.synchronize_copies()  # what a gather may still read
        with phase("update of matrices"), torch.no_grad():
            # with donate from here on, so that nobody goes on with what is half written where something raises
            make_writable = _torch.take_storage if donate else _checks.copy_like
            written = {key: make_writable(x) if known._names_in(key) else x for key, x in params.items()}
            next_state = {key: s._replace(slices=pytree.tree_map(make_writable, s.slices)) for key, s in next_state.items()}
            return MatrixStep(rule, known, now, others, grads, next_state, written, is_tracked=False).run(rates)

    reason = _checks.break_message(who, "it reads the step to know what to compute")
    return Optimizer(init, _torch.disable_in_graph(reason)(update) if rule.reads_step else update)


def _fallback_adamw(known: Matrices, defaults: Mapping[str, Any], options: ParamOptions | None, *, donate: bool) -> Pair:
    """Return AdamW: of torch's kernels, or where something follows the tensors the pure rule, whose state is the same."""

    def own_options(name: str, param: Param) -> Mapping[str, Any]:
        own = {} if options is None or name in known.by_name else options(name, param)
        return {key: value for key, value in own.items() if key in ("lr", "weight_decay")}

    lr, weight_decay = defaults["lr"], defaults["weight_decay"]
    given: dict[str, Any] = {"weight_decay": weight_decay, "spec": known.spec, "options": options and own_options}
    fast, rule = from_torch(torch.optim.AdamW, lr=lr, donate=donate, **given), adamw(lr, **given)

    def update(*args: Any, **rates: Any) -> tuple[Params, Any]:
        tensors = [x for x in pytree.tree_leaves((args, rates)) if isinstance(x, Tensor)]
        return (fast if _torch.is_eager() and not _torch.any_tracked(tensors) else rule).update(*args, **rates)

    return fast.init, update
