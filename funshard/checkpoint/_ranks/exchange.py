"""A few bytes from every rank of a process group to every other one, through the store, within a time limit."""

from __future__ import annotations

import json
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

from ... import _torch

__all__ = ["exchange"]


def exchange(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    """Return the value of every rank of the process group, in the order of its ranks.

    ``group`` is the group's name, the same on its ranks and no other group's; ``rank`` is this rank of its ``size``. No
    collective is started: a rank that does not come leaves none behind that would wait for it longer than ``timeout``. The
    first rank collects the values and answers each rank under a name that the rank has just drawn. So a call that has failed
    on some ranks leaves nothing that the next one could take for an answer.

    Raises RuntimeError if a rank did not come in time.
    """
    found: list[list[str]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_run_exchange(value, group, rank, size, timeout))
        except BaseException as error:
            errors.append(error)

    # The store's own time limit does not end a wait for the process that has the store, if that one is stopped: a thread can
    # be left behind.
    thread = threading.Thread(target=run, name="funshard.checkpoint.exchange", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + GRACE)
    if errors:
        raise errors[0]
    if not found:
        raise RuntimeError(f"the store of the process group did not answer within {timeout.total_seconds():g} s")
    return found[0]


GRACE = 2.0
"""Seconds for an exchange that has failed in time to say so."""


def _run_exchange(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    store, prefix, name = _torch.default_store(), f"funshard/checkpoint/{group}", uuid.uuid4().hex
    asking, own = [f"{prefix}/from/{i}" for i in range(size)], f"{prefix}/to/{name}"
    asked = json.dumps([name, value])
    store.set(asking[rank], asked)
    try:
        if rank == 0:
            names, values = zip(*map(json.loads, _collect(store, asking, timeout)), strict=True)
            for each in names:
                store.set(f"{prefix}/to/{each}", json.dumps(values))
        store.wait([own], timeout)
    except RuntimeError:
        store.compare_set(asking[rank], asked, "")  # whoever comes too late waits for this rank's next call
        raise
    answer = json.loads(store.get(own))
    store.delete_key(own)
    return answer


def _collect(store: Any, keys: list[str], timeout: timedelta) -> list[bytes]:
    """The values of these keys when none is empty any more, which they are left as."""
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
