"""One step of an optimizer of matrices: groups on their way to their owners, worked on, and on their way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # traced by torch.compile, as optree is not

from ..._units.layout import Params
from .._matrices.batch import Group
from .._matrices.flat import Share, part_of
from .._matrices.matrices import Matrices
from .._matrices.owners import Matrix
from .rule import Options, Rule, Sent, Slots, Whole

__all__ = ["MatrixState", "Step"]


Returning = Iterator[tuple[Share, list[Params]]]
"""Of some results one share after the other, as they come."""


class MatrixState(NamedTuple):
    """Of one unit."""

    step: Tensor
    """How many were taken: int64, on the host, the same on all ranks."""
    slices: dict[str, Tensor]
    """Elementwise state of the matrices, such as momentum: slices like the shard. {} where the unit has no matrices."""
    owned: dict[str, dict[str, Tensor]]
    """By matrix its own state, such as preconditioners: on its owner; elsewhere empty tensors, [0, *shape]."""
    fallback: dict[str, Any]
    """The state of ``fallback``: by unit key where no parameter of the unit is a matrix, else by parameter name."""


class Step:
    """What becomes of the matrices of the units that are given; with ``donate`` in their own memory, part by part.

    ``tracked`` is whether it is differentiated, batched or recorded: then no rank leaves out what another one does.
    """

    def __init__(
        self,
        rule: Rule,
        matrices: Matrices,
        options: Mapping[str, Options],
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
        self._whole: Whole = {}
        self.steps = {key: unit.step + 1 for key, unit in state.items()}
        """By unit which step this is."""

    def run(self, groups: Sequence[Group], meanwhile: Callable[[], None]) -> Iterator[str]:
        """The units' keys, each as soon as all of its matrices are done; ``meanwhile`` runs when the first are on their way.

        One group is on its way to its owners while one is worked on and one on its way back.
        """
        left = Counter(matrix.unit.key for group in groups for matrix in group.chosen)
        arriving = self._sent(groups[0]) if groups else None
        meanwhile()
        yield from (key for key in self._params if not left[key])
        leaving: tuple[Group, Returning] | None = None
        for group, after in zip(groups, (*groups[1:], None), strict=False):
            assert arriving is not None
            now, arriving = arriving, None if after is None else self._sent(after)
            results = self._worked(group, now())
            del now  # with what has arrived
            if leaving is not None:
                yield from self._arrived(*leaving, left)
            leaving = group, self._returned(group, results)
        if leaving is not None:
            yield from self._arrived(*leaving, left)

    def taken(self, key: str) -> tuple[Params, dict[str, Params], Whole]:
        """What has become of a unit's matrices, once: parts of its shard, by slot those of its state, and what owners have."""
        names = self._matrices.names(key)
        slots = [(name, {**self._slots.pop(name), **self._new_slots.pop(name)}) for name in names]
        by_slot = {slot: {name: some[slot] for name, some in slots} for slot in self._rule.slots} if names else {}
        return {name: self._parts.pop(name) for name in names}, by_slot, {name: self._whole.pop(name) for name in names}

    def _sent(self, group: Group) -> Callable[[], dict[str, Sent]]:
        """The elementwise part, and what it gives begun to be collected."""
        sent: dict[str, Sent] = {}
        wanted = group.wanted
        for matrix in group.chosen:
            cut, name = self._matrices.cut(matrix.unit.key), matrix.name
            grad, param = (cut.part(tree[matrix.unit.key], name) for tree in (self._grads, self._params))
            slots = {slot: cut.part(x, name) for slot, x in self._state[matrix.unit.key].slices.items()}
            sent[name], new = self._rule.before(grad, slots, param, self._with_step(matrix))
            self._slots[name] = self._settled(slots, new)
            if not self._tracked and name not in wanted:
                sent[name] = tuple(x.new_empty(0) for x in sent[name])
        names = [*sent]
        arriving = [group.collecting(dict(zip(names, some, strict=True))) for some in zip(*sent.values(), strict=True)]

        def arrived() -> dict[str, Sent]:
            whole = [wait() for wait in arriving]
            return {name: tuple(some[name] for some in whole) for name in names}

        return arrived

    def _settled(self, old: Slots, new: Slots) -> Slots:
        if not self._donate:
            return new
        return {slot: old[slot] if x is old[slot] else old[slot].copy_(x) for slot, x in new.items()}

    def _with_step(self, matrix: Matrix) -> Options:
        return {**self._options[matrix.name], "step": self.steps[matrix.unit.key]}

    def _worked(self, group: Group, sent: Mapping[str, Sent]) -> list[Params]:
        """What the owners make of it: of each matrix as many results, which are the empty tensors elsewhere."""
        names = [matrix.name for matrix in group.owned]
        whole = {matrix.name: self._state[matrix.unit.key].owned[matrix.name] for matrix in group.chosen}
        options = {matrix.name: self._with_step(matrix) for matrix in group.owned}
        results, new = self._rule.work({name: sent[name] for name in names}, {name: whole[name] for name in names}, options)
        rates = [x for m in group.chosen for x in self._options[m.name].values() if isinstance(x, Tensor)]
        alike = group.alike([*pytree.tree_leaves(sent), *pytree.tree_leaves(whole), *rates])
        for matrix in group.chosen:
            old = whole[matrix.name]
            made = new.get(matrix.name, old)
            self._whole[matrix.name] = {key: alike(group.of_owner(matrix, x, old[key])) for key, x in made.items()}
        return [
            {
                name: alike(results[name][i].to(tensors[give].dtype) if name in results else tensors[give])
                for name, tensors in sent.items()
            }
            for i, give in enumerate(self._rule.gives)
        ]

    def _returned(self, group: Group, results: list[Params]) -> Returning:
        """The results, begun to be spread: one share of them after the other, with the next one on its way."""
        shares = group.shares(results)

        def begun(share: int) -> list[Callable[[], Params]]:
            coming = [group.spreading(some, (share, shares)) for some in results]
            if share + 1 == shares:
                results.clear()
            return coming

        def arriving(coming: list[Callable[[], Params]]) -> Returning:
            for share in range(shares):
                parts = [wait() for wait in coming]
                coming = begun(share + 1) if share + 1 < shares else []
                yield (share, shares), parts

        return arriving(begun(0))

    def _arrived(self, group: Group, leaving: Returning, left: Counter[str]) -> Iterator[str]:
        for share, results in leaving:
            for matrix in group.chosen:
                name = matrix.name
                param = self._matrices.cut(matrix.unit.key).part(self._params[matrix.unit.key], name)
                here = part_of(len(param), *share)
                slots = {slot: x[here] for slot, x in self._slots[name].items()}
                back = tuple(some[name].to(param.device) for some in results)
                part, new = self._rule.after(back, slots, param[here], self._with_step(matrix))
                self._put(self._parts, name, param, part, here)
                made = self._new_slots.setdefault(name, {})
                for slot, x in new.items():
                    if x is not slots[slot]:
                        self._put(made, slot, self._slots[name][slot], x, here)
            del results
        for matrix in group.chosen:
            left[matrix.unit.key] -= 1
        yield from dict.fromkeys(matrix.unit.key for matrix in group.chosen if not left[matrix.unit.key])

    def _put(self, made: Params, name: str, old: Tensor, new: Tensor, here: slice) -> None:
        """Some of what an old tensor becomes: in its memory, or in new one."""
        if not self._donate and len(new) == len(old):
            made[name] = new
            return
        if name not in made:
            made[name] = old if self._donate else torch.empty_like(old, dtype=new.dtype)
        made[name][here].copy_(new)
