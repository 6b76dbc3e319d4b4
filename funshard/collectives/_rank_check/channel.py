"""The comparison of the next collective between the ranks of one process group, over the key-value store.

A rank writes what it is about to start, and adds a one and a digest of it to a sum that all ranks share. The rank that comes
last sees in the sum whether all digests are equal, and sets a key that the others wait for. Whoever sets that key first
decides. A rank that has an error sets it, too: so either all ranks start the collective, or none does.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..._torch.groups import Store

__all__ = ["AnnouncedStart", "Channel", "name_ranks"]

_ONE = 1 << 47
"""The part of the sum that counts ranks. Below it, there is room for the digests of 32 bits of 32,768 ranks."""
_START = "start"
"""The value of the key that lets ranks start the collective; any other is an error."""


class AnnouncedStart(NamedTuple):
    """A collective that a rank is about to start."""

    sequence: int
    """The number of collectives that were compared on the channel before."""
    what: str
    line: str
    """The line of user code."""

    def describe(self) -> str:
        """Return the collective with its line."""
        return f"{self.what} ({self.line})"


class Channel:
    """The comparisons between some ranks.

    Args:
        store: The store of the rank's main thread.
        ranks: The global ranks, in rising order.
        rank: This process's global rank.
        prefix: Distinguishes the channels after an error from those before.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, prefix: str) -> None:
        self.ranks, self._store, self._rank = tuple(ranks), store, rank
        self.sequence = 0
        members = hashlib.blake2b(repr(self.ranks).encode(), digest_size=12).hexdigest()
        self._prefix = f"{prefix}/{members}"

    def compare(self, what: str, line: str) -> str:
        """Wait until all ranks are about to start a collective, and return an empty string, or an error if they differ."""
        n, store = self.sequence, self._store
        digest = hashlib.blake2b(f"{n} {what}".encode(), digest_size=4).digest()
        own = _ONE + int.from_bytes(digest, "little")
        store.set(self._announcement_key(self._rank), f"{n}\n{what}\n{line}")
        total = store.add(f"{self._prefix}/sum", own)
        count = total // _ONE
        if count == 1 and n > 1:  # all ranks have come here since, so none waits for that key any more
            store.delete_key(self._go_key(n - 2))
        if count < len(self.ranks):
            answer = store.get(self._go_key(n)).decode()
        else:
            if is_equal := total == own * len(self.ranks):
                store.set(f"{self._prefix}/sum", "0")
            answer = self.decide(n, _START if is_equal else self._describe_difference(), store)
        self.sequence = n + 1
        return "" if answer == _START else answer

    def decide(self, sequence: int, answer: str, store: Store) -> str:
        """Say that ranks start a collective, or what is wrong, unless some rank has said it before. Return what was said."""
        return store.compare_set(self._go_key(sequence), "", answer).decode()

    def stop(self, error: str, store: Store) -> None:
        """Have all ranks raise an error instead of starting the next collective."""
        self.decide(self.sequence, error, store)

    def read_announced(self, store: Store) -> dict[int, AnnouncedStart]:
        """Return the last start that each rank has announced, for those that have announced one."""
        records: dict[int, AnnouncedStart] = {}
        for rank in self.ranks:
            if store.check([key := self._announcement_key(rank)]):
                sequence, what, line = store.get(key).decode().split("\n", 2)
                records[rank] = AnnouncedStart(int(sequence), what, line)
        return records

    def _describe_difference(self) -> str:
        """Return the error that says what each rank was about to start."""
        by_record: defaultdict[str, list[int]] = defaultdict(list)
        for rank, record in self.read_announced(self._store).items():
            by_record[record.describe()].append(rank)
        each = "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in by_record.items())
        where = f"collective {self.sequence + 1} of {name_ranks(self.ranks)}"
        return f"fs.check: ranks disagree on {where}. Each was about to start: {each}"

    def _announcement_key(self, rank: int) -> str:
        return f"{self._prefix}/record/{rank}"

    def _go_key(self, sequence: int) -> str:
        """Return the store's key that decides whether ranks start this collective."""
        return f"{self._prefix}/go/{sequence}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as "rank 1" or "ranks 0, 2"; many are abridged."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
