"""One step of an optimizer of matrices: batches go to their owners, are updated there, and return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # traced by torch.compile, as optree is not

from ..._units.layout import Params
from .._matrices.batch import MatrixBatch
from .._matrices.flat import Chunk, chunk_slice
from .._matrices.matrices import Matrices
from .._matrices.selection import Matrix
from .rule import MatrixOptions, MatrixRule, OwnedState, Payload, Slots
from .state import MatrixState

__all__ = ["MatrixStep"]


ArrivingChunks = Iterator[tuple[Chunk, list[Params]]]
"""An iterator over the chunks of some results, each with its parts by matrix, in the order of their arrival."""


class MatrixStep:
    """One step for the matrices of the given units; with ``donate`` in their own memory, part by part.

    ``tracked`` says whether the step is differentiated, batched or recorded: then no rank may skip what another rank runs.
    """

    def __init__(
        self,
        rule: MatrixRule,
        matrices: Matrices,
        options: Mapping[str, MatrixOptions],
        grads: Mapping[str, Tensor],
        state: Mapping[str, MatrixState],
        params: Mapping[str, Tensor],
        *,
        tracked: bool,
        donate: bool,
    ) -> None:
        self._rule, self._matrices, self._options = rule, matrices, options
        self._tracked, self._donate = tracked, donate
        self._grads, self._state, self._params = grads, state, params
        self._parts: Params = {}
        self._slots: dict[str, Slots] = {}
        self._new_slots: dict[str, Slots] = {}
        self._whole: OwnedState = {}
        self.steps = {key: unit.step + 1 for key, unit in state.items()}
        """By unit which step this is."""

    def run(self, batches: Sequence[MatrixBatch], update_fallback: Callable[[], None]) -> Iterator[str]:
        """Yield each unit's key when all of its matrices are done; ``update_fallback`` runs while the first batch is sent.

        One batch is on its way to its owners while another is updated and a third returns.
        """
        left = Counter(matrix.unit.key for batch in batches for matrix in batch.matrices)
        arriving = self._start_collect(batches[0]) if batches else None
        update_fallback()
        yield from (key for key in self._params if not left[key])
        returning: tuple[MatrixBatch, ArrivingChunks] | None = None
        for batch, after in zip(batches, (*batches[1:], None), strict=False):
            assert arriving is not None
            now, arriving = arriving, None if after is None else self._start_collect(after)
            results = self._compute_owned(batch, now())
            del now  # with what has arrived
            if returning is not None:
                yield from self._finish_batch(*returning, left)
            returning = batch, self._start_spread(batch, results)
        if returning is not None:
            yield from self._finish_batch(*returning, left)

    def pop_unit(self, key: str) -> tuple[Params, dict[str, Params], OwnedState]:
        """Return, once, a unit's new parts of its shard, of its state by slot, and its owners' state."""
        names = self._matrices._names_in(key)
        slots = [(name, {**self._slots.pop(name), **self._new_slots.pop(name)}) for name in names]
        by_slot = {slot: {name: some[slot] for name, some in slots} for slot in self._rule.slots} if names else {}
        return {name: self._parts.pop(name) for name in names}, by_slot, {name: self._whole.pop(name) for name in names}

    def _start_collect(self, batch: MatrixBatch) -> Callable[[], dict[str, Payload]]:
        """Run the rule's part before the exchange, and start to send its payloads to the owners."""
        sent: dict[str, Payload] = {}
        wanted = batch.sent_names
        for matrix in batch.matrices:
            cut, name = self._matrices._slice_layout(matrix.unit.key), matrix.name
            grad, param = (cut.select(tree[matrix.unit.key], name) for tree in (self._grads, self._params))
            slots = {slot: cut.select(x, name) for slot, x in self._state[matrix.unit.key].slices.items()}
            sent[name], new = self._rule.before_exchange(grad, slots, param, self._options_of(matrix))
            self._slots[name] = self._store_slots(slots, new)
            if not self._tracked and name not in wanted:
                sent[name] = tuple(x.new_empty(0) for x in sent[name])
        names = [*sent]
        arriving = [batch.start_collect(dict(zip(names, some, strict=True))) for some in zip(*sent.values(), strict=True)]

        def arrived() -> dict[str, Payload]:
            whole = [wait() for wait in arriving]
            return {name: tuple(some[name] for some in whole) for name in names}

        return arrived

    def _store_slots(self, old: Slots, new: Slots) -> Slots:
        """Return the new slots, in the old memory if that is donated."""
        if not self._donate:
            return new
        return {slot: old[slot] if x is old[slot] else old[slot].copy_(x) for slot, x in new.items()}

    def _options_of(self, matrix: Matrix) -> MatrixOptions:
        """Return the options of a matrix, its step among them."""
        return {**self._options[matrix.name], "step": self.steps[matrix.unit.key]}

    def _compute_owned(self, batch: MatrixBatch, sent: Mapping[str, Payload]) -> list[Params]:
        """Run the rule on the owners. Returns one dict for each result; other ranks have empty tensors in it."""
        names = [matrix.name for matrix in batch.owned_matrices]
        whole = {matrix.name: self._state[matrix.unit.key].owned[matrix.name] for matrix in batch.matrices}
        options = {matrix.name: self._options_of(matrix) for matrix in batch.owned_matrices}
        results, new = self._rule.on_owner({name: sent[name] for name in names}, {name: whole[name] for name in names}, options)
        rates = [x for m in batch.matrices for x in self._options[m.name].values() if isinstance(x, Tensor)]
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
            for i, give in enumerate(self._rule.result_dtype_of)
        ]

    def _start_spread(self, batch: MatrixBatch, results: list[Params]) -> ArrivingChunks:
        """Start to send the results back. While one chunk is used, the next one is in flight."""
        chunks = batch.chunk_count(results)

        def start_chunk(chunk: int) -> list[Callable[[], Params]]:
            coming = [batch.start_spread(some, (chunk, chunks)) for some in results]
            if chunk + 1 == chunks:
                results.clear()
            return coming

        def arriving(coming: list[Callable[[], Params]]) -> ArrivingChunks:
            for chunk in range(chunks):
                parts = [wait() for wait in coming]
                coming = start_chunk(chunk + 1) if chunk + 1 < chunks else []
                yield (chunk, chunks), parts

        return arriving(start_chunk(0))

    def _finish_batch(self, batch: MatrixBatch, returning: ArrivingChunks, left: Counter[str]) -> Iterator[str]:
        """Run the rule's part after the exchange, and yield each unit's key when its last matrix is done."""
        for chunk, results in returning:
            for matrix in batch.matrices:
                name = matrix.name
                param = self._matrices._slice_layout(matrix.unit.key).select(self._params[matrix.unit.key], name)
                elements = chunk_slice(len(param), *chunk)
                slots = {slot: x[elements] for slot, x in self._slots[name].items()}
                arrived = tuple(some[name].to(param.device) for some in results)
                part, new = self._rule.after_exchange(arrived, slots, param[elements], self._options_of(matrix))
                self._store_chunk(self._parts, name, param, part, elements)
                made = self._new_slots.setdefault(name, {})
                for slot, x in new.items():
                    if x is not slots[slot]:
                        self._store_chunk(made, slot, self._slots[name][slot], x, elements)
            del results
        for matrix in batch.matrices:
            left[matrix.unit.key] -= 1
        yield from dict.fromkeys(matrix.unit.key for matrix in batch.matrices if not left[matrix.unit.key])

    def _store_chunk(self, made: Params, name: str, old: Tensor, new: Tensor, elements: slice) -> None:
        """Store one chunk of a new tensor, in the old memory if that is donated."""
        if not self._donate and len(new) == len(old):
            made[name] = new
            return
        if name not in made:
            made[name] = old if self._donate else torch.empty_like(old, dtype=new.dtype)
        made[name][elements].copy_(new)
