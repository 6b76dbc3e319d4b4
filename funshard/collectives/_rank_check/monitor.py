"""One process's part in the check: it compares collectives, reports errors, and hears of those of other ranks.

The main thread waits for the other ranks in the store without a limit of its own. A thread beside it asks the store twice a
second whether a rank has reported an error, and ends that wait. It also answers where this rank is when others wait for it,
and says which ranks are missing when this one waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ... import _torch
from .._announce import RankError
from .channel import Channel
from .silence import SilenceWatch

if TYPE_CHECKING:
    from ..._torch.groups import Store

__all__ = ["Monitor", "Wait"]

TICK = 0.5
"""Seconds between two looks at the store."""
FAREWELL = 5.0
"""The most seconds for which a rank with an error waits until the others know of it."""
_ERROR = 1 << 32
"""The part of the "alert" counter that counts errors. Below it are the ranks that ask where the others are."""


class Wait(NamedTuple):
    """The wait of the main thread for other ranks."""

    channel: Channel
    sequence: int
    what: str
    line: str
    begin: float
    check: int
    """The number of the check around it."""


class Monitor:
    """The check's connection of this process to the other ranks of the default process group."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = weakref.ref(world)
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.error = ""
        """The error that this rank has heard of or reported; it is raised at the next collective, too."""
        self.timeout = 0.0
        self.check = 0
        """The number of checks that this process has entered."""
        self.wait: Wait | None = None
        self._epoch = 0  # the number of errors before: each has keys of its own
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._by_name: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._store, self._side_store = (self._connect() for _ in range(2))
        self._watch = SilenceWatch(self, self._side_store)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="funshard.check", daemon=True)
        self._thread.start()

    @staticmethod
    def _connect() -> Store:
        """Return a connection to the store that never times out."""
        return _torch.connect_store("funshard/check", timedelta(days=7))  # the thread ends a wait

    # --- main thread ---

    def ranks_of(self, group: str | Sequence[int]) -> tuple[int, ...]:
        """Return the global ranks of a process group, () if there is nobody to compare with."""
        if not isinstance(group, str):
            return tuple(group)
        if group not in self._by_name:
            found = _torch.resolve_group(group)
            is_fake = dist.get_backend(found) == "fake"
            self._by_name[group] = () if is_fake else tuple(dist.get_process_group_ranks(found))
        return self._by_name[group]

    def compare(self, what: str, ranks: tuple[int, ...], line: str) -> None:
        """Wait until all of these ranks are about to start the same collective.

        Raises:
            RankError: If they are not, one has raised, or one does not come.
        """
        if self.error:
            raise RankError(self.error)
        channel = self._channels.get(ranks)
        if channel is None:
            channel = self._channels[ranks] = Channel(self._store, ranks, self.rank, str(self._epoch))
        self.wait = Wait(channel, channel.sequence, what, line, time.monotonic(), self.check)
        try:
            error = channel.compare(what, line)
        except RuntimeError as lost:
            error = f"the store of the default process group has ended, with its process: {str(lost).splitlines()[0]}"
            error = self.error or f"fs.check: {error}"
        finally:
            self.wait = None
        if error:
            self.declare(error, self._store)
            raise RankError(self.error)

    def report(self, error: str) -> None:
        """Tell all ranks that this one has an error, if it is the first, and wait for a short time until they know."""
        if not self.error:
            self.declare(error, self._store)
        self._wait_for_all(f"{self._epoch}/heard")

    def leave(self, how: str) -> None:
        """Write down that this rank does not come to collectives of this check any more."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._epoch}/left/{self.rank}", f"{self.check}\n{how}")

    def wait_for_answers(self) -> None:
        """On rank 0, wait until all ranks know that they have come to the end: the store may end with its process."""
        key, end = f"{self._epoch}/past", time.monotonic() + FAREWELL
        count = self._store.add(key, 1)
        while self.rank == 0 and count < self.check * len(self.ranks) and time.monotonic() < end:
            count = self._store.add(key, 0)

    def forget_error(self) -> None:
        """Begin again after an error that all ranks have got."""
        if self.error:
            with self._lock:
                self._epoch += 1
                self.error = ""
                self._channels.clear()
                self.check = 0

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(FAREWELL)  # a thread that is left in a call of the store aborts an interpreter that ends

    def end_process(self) -> None:
        """Say that this process ends, and end the thread."""
        if self.world() is not None:  # else the store may be gone, which torch reports at length
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._epoch}/left/{self.rank}", f"{1 << 62}\nended")
                self._store.add("ended", 1)
                if self.rank == 0:
                    self._wait_for_all("ended")
        self.stop()

    def _wait_for_all(self, key: str) -> None:
        """Wait for a short time until all ranks have added to a counter: the store may end with this process."""
        end = time.monotonic() + FAREWELL
        with contextlib.suppress(RuntimeError):
            while self._store.add(key, 0) < len(self.ranks) and time.monotonic() < end:
                time.sleep(TICK / 20)

    # --- both threads ---

    def declare(self, error: str, store: Store) -> None:
        """Say that something is wrong, unless another rank has said it before."""
        epoch = self._epoch
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank: this rank hears of it alone
            error = store.compare_set(f"{epoch}/error", "", error).decode()
            store.add(f"{epoch}/alert", _ERROR)
        self.learn(error, store, epoch)

    def learn(self, error: str, store: Store, epoch: int) -> None:
        """Keep an error of this epoch, and have the other ranks raise it that wait for this one, or will."""
        with self._lock:
            if self.error or epoch != self._epoch:
                return
            self.error = error
            channels = [*self._channels.values()]
        with contextlib.suppress(RuntimeError):
            for channel in channels:
                channel.stop(error, store)
            if store.compare_set(f"{epoch}/error", "", error).decode() == error:
                store.add(f"{epoch}/alert", _ERROR)
            store.add(f"{epoch}/heard", 1)

    # --- the thread beside ---

    def _listen(self) -> None:
        """Look for errors and for silent ranks until the check ends: the thread's function."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not self._stopped.wait(TICK) and self.world() is not None:
                self._look()

    def _look(self) -> None:
        """Read a new error, if any, and look at who is waited for."""
        epoch, store = self._epoch, self._side_store
        alert = store.add(f"{epoch}/alert", 0)
        if alert >= _ERROR and not self.error:
            self.learn(store.get(f"{epoch}/error").decode(), store, epoch)
        self._watch.look(store, str(epoch), is_asked=alert % _ERROR > 0)
