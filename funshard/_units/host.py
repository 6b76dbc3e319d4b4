"""What leaves the device for the host while the device goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["on_host"]


def on_host(tensor: Tensor) -> Callable[[], Tensor]:
    """A copy on the CPU, to be called when it is wanted: from CUDA through pinned memory, and only the call waits for it.

    What is on the CPU is no copy.
    """
    if not tensor.is_cuda:
        there = tensor.cpu()
        return lambda: there
    pinned = tensor.to("cpu", non_blocking=True)  # torch pins what it copies so
    done = torch.cuda.current_stream(tensor.device).record_event()

    def waited() -> Tensor:
        done.synchronize()
        return pinned

    return waited
