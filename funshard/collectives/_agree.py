"""Ranks agree: they compare lines of text, such as the names of the collectives that each has started, its spec or its values.

It goes over `HostGroup`s, sends two integers, and cannot come between the collectives that it is about. Where lines differ all
ranks exchange them, and raise one error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.mesh import Mesh, process_axes
from .._core.ops import RankError, announce
from .._core.spec import PartitionSpec

# --- Process groups between hosts that torch.distributed's registry does not list ---
#
# `torch.distributed.new_group` names a group by the number of groups that this process has: ranks that have made different
# numbers of groups wait for each other for ever. The name of a `HostGroup` depends on its process group alone.


class HostGroup:
    """A gloo process group of the ranks of another process group, which connects when it is made.

    `funshard.check` compares what is announced.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._name = f"sequence of {group.group_name}"
        self._announce("connection")
        digest = hashlib.blake2b(repr([*self.ranks]).encode(), digest_size=16).hexdigest()
        prefix, rank = f"funshard/{self._name}/{digest}/", self.ranks.index(dist.get_rank())
        self._group = _torch.make_unregistered_gloo(prefix, rank, len(self.ranks), _torch.group_timeout(group))

    def all_reduce_max(self, x: Tensor, label: str = "") -> dist.Work:
        """Start to replace a tensor by the largest values of all ranks. The label says for what, to `funshard.check`."""
        self._announce("all-reduce", label)
        options: Any = dist.AllreduceOptions()  # its stub does not say that the attribute takes ReduceOp.MAX
        options.reduceOp = dist.ReduceOp.MAX
        return self._group.allreduce([x], options)

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank."""
        self._announce("all-gather")
        raw = bytearray(pickle.dumps(value))
        lengths = [torch.empty(1, dtype=torch.long) for _ in self.ranks]
        self._group.allgather([lengths], [torch.tensor([len(raw)])]).wait()
        longest = max(map(int, lengths))
        received = [bytearray(longest) for _ in self.ranks]
        rows = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        self._group.allgather([rows], [torch.frombuffer(raw.ljust(longest), dtype=torch.uint8)]).wait()
        return [*map(pickle.loads, received)]  # which ignores the padding

    def _announce(self, op: str, label: str = "") -> None:
        announce(op, self.ranks, f"between hosts, {label or f'for {self._name}'}")


_GROUPS_OF_WORLD: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, HostGroup]] = weakref.WeakKeyDictionary()
"""The host groups of each default group, by process group: destroy_process_group ends them, and their threads, together."""


# --- Comparisons ---

REMEDY = (
    "Expected the same units in the same order on all ranks: run every unit on every rank (its output times 0 where it is not "
    "wanted), or choose units by numbers that all ranks have alike; check_order=False leaves this out"
)
"""The advice in an error about ranks that run different units."""
RankLines = list[tuple[int, list[str]]]
"""Ranks in the world, in rising order, each with its lines."""


class Comparison:
    """A comparison under way of lines, at least one, between the ranks of these host groups: for a mesh one for each axis.

    All ranks raise the error that ``make_error`` returns from the lines of all. The ``label``, by default the first line, says
    to `funshard.check` what is compared.
    """

    def __init__(
        self, lines: Sequence[str], groups: Sequence[HostGroup], make_error: Callable[[RankLines], Exception], label: str = ""
    ) -> None:
        self._work: dist.Work | None = None
        if not groups:
            return
        self._lines, self._make_error, self._label = [*lines], make_error, f"to compare {label or lines[0]}"
        self._groups = [*map(weakref.ref, groups)]  # destroy_process_group is to end them, and their threads
        digest = int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "little")
        self._own = [digest, -digest]  # the maxima over ranks only where all ranks have the same
        with _torch.below_transforms(), _torch.below_autograd():
            self._maxima = torch.tensor(self._own, device="cpu")
            self._work = groups[0].all_reduce_max(self._maxima, self._label)

    def finish(self) -> None:
        """Wait for the other ranks' lines. Raise the error on every rank if they differ."""
        if self._work is None:
            return
        with _torch.below_transforms(), _torch.below_autograd():
            groups = [group for ref in self._groups if (group := ref()) is not None]  # else their process group is gone
            with _explaining_lost_rank(self._lines[-1]):
                self._work.wait()
                for group in groups[1:]:
                    group.all_reduce_max(self._maxima, self._label).wait()
            if self._maxima.tolist() == self._own:
                return
            everyone = gather_from_ranks(self._lines, groups)
        raise self._make_error(everyone)


@contextlib.contextmanager
def _explaining_lost_rank(line: str) -> Generator[None]:
    """Raise an error of the process group as that of a rank whose others do not come to compare this line."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks are to compare what they have started, and one has not come to {line} within the process group's timeout, "
            "or has ended: expected all ranks to make the same calls; look at the first error of every rank, or run them in "
            "fs.check(), which says where each rank is"
        ) from error


def gather_from_ranks(value: Any, groups: Sequence[HostGroup]) -> list[tuple[int, Any]]:
    """Return the values of all ranks of these groups, as `RankLines`; a mesh has a group for each axis."""
    everyone = [(dist.get_rank() if groups else 0, value)]
    for group in groups:
        everyone = [one for some in group.all_gather_object(everyone) for one in some]
    return sorted(everyone, key=lambda one: one[0])


def find_difference(everyone: RankLines) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return the first rank with its first line that differs from another rank's, and that rank with its line."""
    (rank, first), *others = everyone
    other, lines = next((one for one in others if one[1] != first), (rank, first))
    i = next((i for i in range(len(first)) if lines[i : i + 1] != first[i : i + 1]), len(first))
    expected, got = (x[i] if i < len(x) else "nothing more" for x in (first, lines))
    return (rank, expected), (other, got)


def is_comparable(group: str) -> bool:
    """Return whether a process group has other processes: one of the backend "fake" has a size alone."""
    return dist.get_backend(_torch.resolve_group(group)) != "fake"


def get_host_group(name: str) -> HostGroup:
    """Return a process group's own host group, which connects at the first comparison."""
    world = dist.group.WORLD
    assert world is not None
    groups = _GROUPS_OF_WORLD.setdefault(world, {})
    if name not in groups:
        group = _torch.resolve_group(name)
        with _explaining_lost_rank("the first one"):
            groups[name] = HostGroup(group)
    return groups[name]


def find_host_groups(mesh: Mesh) -> list[HostGroup]:
    """Return a host group for each mesh axis of several processes: an empty list while operators are recorded or compiled."""
    if _torch.is_in_graph() or _torch.is_tracing() or _torch.is_fake(torch.empty(0, device="cpu")):
        return []
    return [get_host_group(axis.name) for axis in process_axes(mesh).values() if is_comparable(axis.name)]


# --- Ranks start the same collectives. A process group pairs the n-th of one rank with the n-th of every other: ranks that
#     gather other units of one size get each other's slices, and no backend says so. Where they start other numbers of
#     collectives, the process group itself times out, and `funshard.check`, which compares each one, says which rank differs.


def make_order_error(
    everyone: RankLines, error: str = "ranks ran different units: what this call computed is wrong", remedy: str = REMEDY
) -> RuntimeError:
    """Return the error of ranks that start different collectives."""
    (rank, expected), (other, got) = find_difference(everyone)
    return RuntimeError(f"{error}: {expected} on rank {rank}, and {got} on rank {other}. {remedy}")


class OrderCheck:
    """The comparison of the collectives that a call and its backward have started, at the end of each."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on, self.compares_each = is_on, False  # the latter where no end will be seen
        self._started: dict[str, list[str]] = {}  # names by process group, since ranks last compared them
        self._pending: list[Comparison] = []  # at most one for each process group

    def record(self, groups: Iterable[str], name: str) -> None:
        """Record that a collective of this name is started on these process groups."""
        if not self._is_on:
            return
        for group in groups:
            self._started.setdefault(group, []).append(name)
        if self.compares_each:
            self._start()

    def compare(self, groups: Iterable[str], end: str) -> None:
        """Compare what was recorded on these process groups, and that all ranks have come to this end."""
        self.record(groups, end)
        self._start()
        self.finish()

    def finish(self) -> None:
        """Wait for the comparison under way. Raise RuntimeError on every rank if their names differ."""
        if self._pending:
            comparisons, self._pending = self._pending, []
            for comparison in comparisons:
                comparison.finish()

    def _start(self) -> None:
        self.finish()
        started, self._started = self._started, {}
        self._pending = [_compare_order(names, group) for group, names in started.items()]


def _compare_order(names: Sequence[str], group: str, **words: str) -> Comparison:
    return Comparison(names, [get_host_group(group)], functools.partial(make_order_error, **words))


def check_sequence(
    names: Sequence[str],
    group: str,
    sent: Tensor,
    error: str = "ranks are about to exchange values of different units",
    remedy: str = REMEDY,
) -> None:
    """Compare the names of the collectives that each rank of a process group is about to start, unless nothing is sent."""
    if not (_torch.is_tracing() or _torch.is_fake(sent)) and is_comparable(group):
        _compare_order(names, group, error=error, remedy=remedy).finish()


# --- Ranks have the same spec, and the same values ---


def _spec_lines(spec: PartitionSpec) -> list[str]:
    """Return what must be equal on all ranks, a line for each parameter."""
    order = [] if spec.run_order is None else [f"order {', '.join(map(repr, spec.run_order))}"]
    return order + [
        f"unit '{unit.key}' {unit.p}: parameter '{min(p.names)}' {list(p.shape)} {p.dtype} order={p.order} "
        f"requires_grad={p.requires_grad}"
        for unit in spec
        for p in unit.params
    ]


def hash_spec(spec: PartitionSpec) -> str:
    """Return a text that is equal on two ranks if `check_ranks_agree` finds their specs equal."""
    return hashlib.sha256("\n".join(_spec_lines(spec)).encode()).hexdigest()


SHARD_VALUES_HINT = (
    "call torch.manual_seed with one seed on all ranks before the model is built, or take those of one rank by "
    "shard(..., src=0), or, if they are meant to differ, give check_values=False"
)


def check_ranks_agree(
    spec: PartitionSpec,
    values: Tensor | None = None,
    asked: tuple[str, ...] = (),
    *,
    error: str = "",
    hint: str = SHARD_VALUES_HINT,
) -> None:
    """Raise ValueError on every rank of the mesh if specs, options ``asked`` or values differ, or if one reports an error.

    ``values`` are the `hash_params` of parameters that all ranks should have equal; ``hint`` says what to do if they differ.
    """
    mesh, params = spec.bound_mesh, [(unit.key, param.name) for unit in spec for param in unit.params]
    lines = [error] if error else [*asked, f"check_values={values is not None}", *_spec_lines(spec)]
    hashes = [] if error or values is None else [*map(str, values.tolist())]

    def make_error(everyone: RankLines) -> ValueError:
        specs = [(rank, found[: len(lines)]) for rank, (_, found) in enumerate(everyone)]
        if any(found != lines for _, found in specs):
            (_, expected), (rank, got) = find_difference(specs)
            return ValueError(
                f"the ranks of the mesh {mesh.names} have different models: expected, as on its rank 0, {expected}; "
                f"got on rank {rank} {got}; build the same model with the same policy on every rank"
            )
        rows = [found[len(lines) :] for _, found in everyone]
        others = [i for i, column in enumerate(zip(*rows, strict=True)) if len({*column}) > 1]
        ranks = [str(rank) for rank, row in enumerate(rows) if row[others[0]] != rows[0][others[0]]]
        key, name = params[others[0]]
        return ValueError(
            f"parameter '{name}' of unit '{key}': expected the same values on all ranks of the mesh {mesh.names}, got others "
            f"on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} than on rank 0 ({len(others)} of {len(params)} "
            f"parameters differ); {hint}"
        )

    Comparison(lines + hashes, find_host_groups(mesh), make_error, "models").finish()


@contextlib.contextmanager
def report_to_ranks(spec: PartitionSpec, together: bool) -> Generator[None]:
    """Report an error raised inside to the ranks that wait in `check_ranks_agree`, if ``together``, and raise it."""
    try:
        yield
    except Exception as error:
        if together:
            text = _torch.error_text(error)
            text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            with contextlib.suppress(ValueError):
                check_ranks_agree(spec, error=text)
        raise
