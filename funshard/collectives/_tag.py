"""Tags on the slices that a rank sends, which say which of the spec's units they are of.

On gloo the host waits for every collective, so ranks that send different numbers of units would wait for each other for ever
before they could compare what they have started (_sequence.py). There 8 bytes travel with a slice. They come from margins
around the buffer that slices lie in, so that nothing is copied and no collective is added: what a rank gathers is a broadcast
from each rank, of which the first and the last one take the tag along; what it reduces is exchanged piece by piece.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["MARGIN", "REMEDY", "TAG_BYTES", "UnitTag", "has_margins", "tag_length", "widen"]

MARGIN = 64
"""Bytes before and behind a buffer with margins: what lies between stays aligned."""
TAG_BYTES = 8
"""Bytes of a tag."""
REMEDY = (
    "Expected the same units in the same order on all ranks: run every unit on every rank (its output times 0 where it is not "
    "wanted), or choose units by numbers that all ranks have alike; check_order=False leaves this out"
)
"""The advice in an error about ranks that run different units."""


@dataclass(frozen=True)
class UnitTag:
    """The tag of a unit: its index among the keys of its spec's units, and in which form it is sent, if not as it is."""

    keys: tuple[str, ...]
    index: int
    form: str = ""

    @functools.cached_property
    def _payload(self) -> bytes:
        """The tag's bytes, which differ from those of other specs' units."""
        return zlib.crc32("\n".join((*self.keys, self.form)).encode()).to_bytes(4, "little") + self.index.to_bytes(4, "little")

    def write(self, address: int) -> None:
        """Write the tag to this address of the CPU's memory. Tensor operators for 8 bytes would cost a multiple."""
        ctypes.memmove(address, self._payload, TAG_BYTES)

    def compare(self, address: int, group: dist.ProcessGroup, sender: int) -> None:
        """Compare with the tag at this address, which a rank of the group has sent.

        Raises:
            RuntimeError: If it is of another unit.
        """
        if (sent := ctypes.string_at(address, TAG_BYTES)) == self._payload:
            return
        index = int.from_bytes(sent[4:], "little")
        known = sent[:4] == self._payload[:4] and index < len(self.keys)
        theirs = f"unit '{self.keys[index]}'" if known else "something that is no unit of this spec"
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"ranks gather or reduce different units: rank {ranks[group.rank()]} unit '{self.keys[self.index]}'{self.form}, "
            f"rank {ranks[sender]} {theirs}. {REMEDY}"
        )

    def attach(self, own: Tensor, pieces: list[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
        """Let the first and the last piece of a gather take the tag along.

        Args:
            own: The buffer with margins that is gathered into.
            pieces: Its slices, by rank. The first and the last one are replaced by wider ones.
            group: The ranks that gather.

        Returns:
            What compares the tags once the pieces are there.
        """
        last = len(pieces) - 1
        pieces[0], pieces[last] = widen(pieces[0], before=True), widen(pieces[last], before=False)
        addresses = {0: own.data_ptr() - TAG_BYTES, last: own.data_ptr() + own.nbytes}
        if (mine := addresses.pop(group.rank(), None)) is not None:
            self.write(mine)

        def compare() -> None:
            for sender, address in addresses.items():
                self.compare(address, group, sender)

        return compare

    def pack(self, pieces: list[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Join slices for the other ranks, each with the tag.

        Args:
            pieces: Flat slices of a buffer with margins, for the other ranks of the group, in their order.
            group: The ranks that exchange them.

        Returns:
            What to send, the same number of elements to each rank; and what compares the tags of all that was received and
            gives it without them, a row for each rank.
        """
        k, rank = tag_length(pieces[0]), group.rank()
        by_edge = len(pieces) == 1  # of two ranks the first sends (slice, tag), and the second (tag, slice): nothing is copied
        if by_edge:
            sent = widen(pieces[0], before=rank == 1)
            self.write(pieces[0].data_ptr() + (-TAG_BYTES if rank == 1 else pieces[0].nbytes))
        else:
            tag = pieces[0].new_empty(k)
            self.write(tag.data_ptr())
            sent = torch.cat([part for piece in pieces for part in (piece, tag)])

        def receive(received: Tensor) -> Tensor:
            rows, tag_first = received.view(len(pieces), -1), by_edge and rank == 0
            row_bytes = received.nbytes // len(pieces)
            address = received.data_ptr() + (0 if tag_first else row_bytes - TAG_BYTES)
            for i, sender in enumerate(i for i in range(group.size()) if i != rank):
                self.compare(address + i * row_bytes, group, sender)
            return rows[:, k:] if tag_first else rows[:, :-k]

        return sent, receive


def tag_length(x: Tensor) -> int:
    """Return the number of elements of this tensor's dtype that a tag takes."""
    return TAG_BYTES // x.itemsize


def has_margins(x: Tensor) -> bool:
    """Return whether a contiguous CPU tensor has room for tags on both sides of it in its storage."""
    if x.device.type != "cpu":
        return False
    begin = x.storage_offset() * x.itemsize
    return begin >= MARGIN and x.untyped_storage().nbytes() >= begin + x.numel() * x.itemsize + MARGIN


def widen(piece: Tensor, *, before: bool) -> Tensor:
    """Extend a flat piece at the edge of a buffer with margins by the space of a tag before or behind the piece."""
    k = tag_length(piece)
    return piece.as_strided((piece.numel() + k,), (1,), piece.storage_offset() - (k if before else 0))
