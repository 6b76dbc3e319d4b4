"""A few bytes from every rank of a process group to every other one, through the store, within a time limit."""

from __future__ import annotations

import contextlib
import json
import uuid
from datetime import timedelta

from .. import _torch

__all__ = ["exchange"]


def exchange(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    """Return the value of every rank of the process group, in the order of its ranks.

    ``group`` is the group's name, the same on its ranks and no other group's; ``rank`` is this rank of its ``size``. No
    collective is started: a rank that does not come leaves none behind that would wait for it longer than ``timeout``. The
    first rank collects the values and answers each rank under a name that the rank has just drawn. So a call that has failed
    on some ranks leaves nothing that the next one could take for an answer.

    Raises RuntimeError if a rank did not come in time.
    """
    store, prefix, name = _torch.default_store(), f"funshard/checkpoint/{group}", uuid.uuid4().hex
    asking, own = [f"{prefix}/from/{i}" for i in range(size)], f"{prefix}/to/{name}"
    store.set(asking[rank], json.dumps([name, value]))
    try:
        if rank == 0:
            store.wait(asking, timeout)
            names, values = zip(*map(json.loads, store.multi_get(asking)), strict=True)
            for each in names:
                store.set(f"{prefix}/to/{each}", json.dumps(values))
        store.wait([own], timeout)
        return json.loads(store.get(own))
    finally:  # whoever comes too late waits for this rank's next call
        with contextlib.suppress(RuntimeError):
            store.delete_key(asking[rank])
            store.delete_key(own)
