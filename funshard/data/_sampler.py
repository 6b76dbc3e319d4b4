"""sampler: which samples a rank takes in a step, as a function of the step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Literal, get_args

import torch
from torch import Tensor

from .._core.checks import bind_spec
from .._core.layout import rank_along, rank_coords
from .._core.mesh import has_peers
from .._core.spec import PartitionSpec
from .._spec.local import check_axes_are_given
from ..collectives._agree import check_ranks_agree, report_to_ranks

Last = Literal["drop", "pad", "short"]


def sampler(
    data: Sized | int,
    spec: PartitionSpec,
    *,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    last: Last = "drop",
    epochs: int | None = 1,
    axes: Iterable[str] | None = None,
    rank: int | None = None,
) -> BatchSampler:
    """Return this rank's part of each global batch, for ``DataLoader(data, batch_sampler=...)``.

    Global batches are the same on any number of ranks: the parts of all ranks, joined in rank order, are the batch of one.
    Each epoch has its own order, that of torch's ``DistributedSampler`` on one rank with this seed.

    Args:
        data: The data set, or its number of samples.
        spec: A spec on the mesh of all ranks. They compare their options.
        batch: Samples of a step on all ranks together, a multiple of the ranks that have different ones.
        seed: The seed of the order.
        shuffle: Whether to shuffle each epoch.
        last: What to do with the last samples of an epoch, if they fill no batch: "drop" them, split a "short" batch, or "pad"
            it with the first samples of the epoch. `BatchSampler.count` has the weights.
        epochs: The epochs of one iteration, None without an end. The next iteration goes on with the next epoch.
        axes: The mesh axes along which ranks have different samples, all by default. Needed with local axes (`P`).
        rank: The rank, counted over the mesh row by row; this one by default.

    Raises:
        ValueError: For options that do not fit; on all ranks if theirs differ.
        TypeError: For data without a length, or an option that is no whole number where one is expected.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2)).on({"shard": 2})
        >>> [list(fs.data.sampler(10, spec, batch=4, shuffle=False, rank=rank)) for rank in range(2)]
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    spec = bind_spec(spec)
    together = rank is None and has_peers(spec.bound_mesh)
    with report_to_ranks(spec, together):
        check_axes_are_given(axes, spec, "data.sampler", _SAMPLES)
        chosen = spec.bound_mesh.select(axes)
        index, parts = rank_along(chosen, spec.bound_mesh, rank_coords(spec.bound_mesh, rank))
        size = len(data) if isinstance(data, Sized) else _to_int("data", data, "a data set with a length, or its size")
        made = BatchSampler(size, batch, seed, shuffle, last, epochs, index, parts)
    if together:
        check_ranks_agree(spec, asked=(f"data.sampler {made.state_dict(0)} epochs={epochs} axes={chosen}",))
    return made


def _to_int(name: str, value: int, expected: str = "a whole number") -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected {expected}, got {value!r}") from None


_SAMPLES = "along which ranks may share samples (tensor parallel) or have different ones (experts): expected axes= that differ"


class BatchSampler:
    """The indices of one rank's samples in each step. `sampler` makes it.

    Steps count from 0 over all epochs. ``sampler[step]`` gives the indices of a step. This rank is number ``index`` of the
    ``parts`` ranks with different samples.
    """

    def __init__(
        self, size: int, batch: int, seed: int, shuffle: bool, last: Last, epochs: int | None, index: int, parts: int
    ) -> None:
        self.size, self.batch, self.seed = _to_int("data", size), _to_int("batch", batch), _to_int("seed", seed)
        self.epochs = None if epochs is None else _to_int("epochs", epochs)
        self.shuffle, self.last, self.index, self.parts = shuffle, last, index, parts
        self.start = 0
        """The step with which the next iteration begins."""
        self._order: tuple[int, Tensor] | None = None
        if last not in get_args(Last):
            raise ValueError(f"last: expected one of {get_args(Last)}, got {last!r}")
        if size < 1:
            raise ValueError(f"data: expected one sample at least, got {size}")
        if batch < 1 or batch % parts:
            raise ValueError(f"batch: expected a multiple of the {parts} ranks with different samples, got {batch}")
        if not self.steps_per_epoch:
            raise ValueError(f"batch: expected at most the {size} samples of the data with last='{last}', got {batch}")
        if last == "short" and 0 < (left := size % batch) < parts:
            raise ValueError(
                f"last='short': the last batch has {left} samples for {parts} ranks, some of which get none: expected another "
                "batch, 'drop' or 'pad'"
            )
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs: expected at least 1, or None for no end, got {epochs}")

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch."""
        return self.size // self.batch if self.last == "drop" else -(-self.size // self.batch)

    def __len__(self) -> int:
        """Return the number of steps of the next iteration; TypeError if it has no end."""
        if self.epochs is None:
            raise TypeError("data.sampler with epochs=None has no length: expected a number of epochs")
        return (self.start // self.steps_per_epoch + self.epochs) * self.steps_per_epoch - self.start

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each step from ``start`` to the end of the last epoch, and begin there the next time.

        After an iteration that ends early, the next one begins at the same step. But a DataLoader's workers may have drawn
        the last step already: a loop that ends early sets ``start`` to its next step.
        """
        if self.epochs is None:
            yield from map(self.__getitem__, itertools.count(self.start))
        end = self.start + len(self)
        for step in range(self.start, end):
            if step == end - 1:
                self.start = end  # before it is yielded: zip(range(n), ...) never asks for more
            yield self[step]

    def __getitem__(self, step: int) -> list[int]:
        """Return the indices of this rank's samples in a step; IndexError if it is negative."""
        if step < 0:
            raise IndexError(f"step: expected at least 0, got {step}")
        epoch, i = divmod(step, self.steps_per_epoch)
        low, high = self._find_part(i)
        places = torch.arange(low, high, device="cpu") + i * self.batch
        return self._order_of(epoch)[places % self.size].tolist()

    def count(self, step: int) -> int:
        """Return how many of this rank's samples in a step are no padding: its weight in a mean over samples.

        With ``last="pad"`` they are the first of its indices. See `weight_share`.

        Args:
            step: The step, counted from 0 over all epochs.
        """
        i = step % self.steps_per_epoch
        low, high = self._find_part(i)
        return max(0, min(high, self.size - i * self.batch) - low)

    def state_dict(self, step: int) -> dict[str, int | bool | str]:
        """Return the state of a run after so many steps, for a checkpoint.

        Args:
            step: The steps that the loop has taken. Only the loop knows: a DataLoader's workers draw ahead.
        """
        if step < 0 or step % 1:
            raise ValueError(f"data.sampler: step: expected a whole number from 0 on, got {step}")
        return {"step": step} | {name: getattr(self, name) for name in ("size", "batch", "seed", "shuffle", "last")}

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Begin the next iteration after the steps of a state, which may be of any number of ranks.

        Args:
            state: What `state_dict` returned. ValueError if it is of other data or options, which draw other batches.
        """
        names = self.state_dict(0)
        if lacking := [name for name in names if name not in state]:
            raise ValueError(f"data.sampler: expected what state_dict returned, got no '{lacking[0]}' among {[*state]}")
        for name, own in self.state_dict(int(state["step"])).items():
            if state[name] != own:
                raise ValueError(
                    f"data.sampler: {name}: expected {state[name]}, as in the state, got {own}: the batches would differ from "
                    "those of the run that goes on; sampler.start = step goes on with other ones"
                )
        self.start = int(state["step"])

    def _find_part(self, i: int) -> tuple[int, int]:
        """Return where this rank's part of the i-th batch of an epoch begins and ends in the batch."""
        real = min(self.batch, self.size - i * self.batch) if self.last == "short" else self.batch
        each, more = divmod(real, self.parts)  # the first ranks have one more
        low = self.index * each + min(self.index, more)
        return low, low + each + (self.index < more)

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator("cpu").manual_seed(self.seed + epoch)  # as torch's DistributedSampler
            with torch.device("cpu"):
                order = torch.randperm(self.size, generator=generator) if self.shuffle else torch.arange(self.size)
            self._order = epoch, order
        return self._order[1]
