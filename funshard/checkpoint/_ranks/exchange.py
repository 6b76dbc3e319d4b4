"""Exchange a few bytes between all ranks of a process group, through its store, within a time limit."""

from __future__ import annotations

import json
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

from ... import _torch
from ...collectives._announce import announce

__all__ = ["exchange_through_store"]


def exchange_through_store(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    """Return the value of every rank of a process group, in the order of its ranks.

    The function starts no collective, which would wait for a missing rank longer than ``timeout``. The first rank collects the
    values and answers each rank under a name that this rank has just drawn. So a call that has failed on some ranks leaves
    nothing that the next call could take for an answer.

    Args:
        value: This rank's value.
        group: The group's name, equal on its ranks and different from that of any other group.
        rank: The number of this rank in the group.
        size: The number of ranks in the group.
        timeout: The time after which a missing rank is an error.

    Raises:
        RuntimeError: If a rank did not call this in time.
    """
    announce("exchange through the store", group, "for a checkpoint")
    found: list[list[str]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_run_exchange(value, group, rank, size, timeout))
        except BaseException as error:
            errors.append(error)

    # The store's own time limit does not end a wait for the process that has the store if that process is stopped: so a
    # thread waits, which can be left behind.
    thread = threading.Thread(target=run, name="funshard.checkpoint.exchange", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + GRACE)
    if errors:
        raise errors[0]
    if not found:
        raise RuntimeError(f"the store of the process group did not answer within {timeout.total_seconds():g} s")
    return found[0]


GRACE = 2.0
"""Seconds that an exchange has to report its failure after the time limit."""


def _run_exchange(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    """Return the values of all ranks, in their order, exchanged through the default store."""
    store, prefix, name = _torch.default_store(), f"funshard/checkpoint/{group}", uuid.uuid4().hex
    requests, answer = [f"{prefix}/from/{i}" for i in range(size)], f"{prefix}/to/{name}"
    own = json.dumps([name, value])
    store.set(requests[rank], own)
    try:
        if rank == 0:
            names, values = zip(*map(json.loads, _collect(store, requests, timeout)), strict=True)
            for each in names:
                store.set(f"{prefix}/to/{each}", json.dumps(values))
        store.wait([answer], timeout)
    except RuntimeError:
        store.compare_set(requests[rank], own, "")  # a late rank then waits for this rank's next call
        raise
    values = json.loads(store.get(answer))
    store.delete_key(answer)
    return values


def _collect(store: Any, keys: list[str], timeout: timedelta) -> list[bytes]:
    """Wait until no key has an empty value, return the values, and set all keys to empty ones."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        store.wait(keys, timedelta(seconds=max(0.001, end - time.monotonic())))
        found = store.multi_get(keys)
        if all(found):
            break
        if time.monotonic() > end:
            raise RuntimeError(f"{sum(not value for value in found)} of {len(keys)} ranks did not come")
        time.sleep(0.005)
    for key in keys:
        store.set(key, "")
    return found
