"""What a run depends on beside its arguments: generators of random numbers, autocast, and attention's kernels."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import _torch

__all__ = ["AmbientState"]


def _kernels() -> list[SDPBackend]:
    """Those that torch.nn.attention.sdpa_kernel allows here."""
    allowed = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return [kernel for kernel, is_on in allowed.items() if is_on]


class AmbientState:
    """What a run depends on beside its arguments: the generators of random numbers, autocast, and attention's kernels."""

    def __init__(self, leaves: Iterable[object]) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        self._devices = sorted((device.type, device.index) for device in devices if device.type not in ("cpu", "meta"))
        self._state = self.random()
        self._end: list[Tensor] = []
        self._others: tuple[Any, Any] | None = _others()
        self._kernels = _kernels()
        self._casts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(kind for kind, _ in self._devices)})
        ]

    def random(self) -> list[Tensor]:
        """The states of torch's generators, on the CPU and on the devices."""
        return [torch.get_rng_state(), *(torch.get_device_module(kind).get_rng_state(index) for kind, index in self._devices)]

    @contextlib.contextmanager
    def as_they_were(self) -> Generator[None]:
        """For a rerun: as they were, within this."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.put, self.random())
            self.put(self._state)
            if self._others is not None:
                stack.callback(_put_others, _others())
                _put_others(self._others)
            for cast in self._casts:
                stack.enter_context(cast)
            if self._kernels != _kernels():
                stack.enter_context(sdpa_kernel(self._kernels))
            yield

    def put(self, states: Sequence[Tensor]) -> None:
        """Have these states."""
        torch.set_rng_state(states[0])
        for (kind, index), state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(kind).set_rng_state(state, index)

    def ended(self) -> None:
        """The first run has ended."""
        self._end = self.random()
        if self._others == _others():  # nothing was drawn
            self._others = None

    def check_end(self, name: str) -> None:
        """RuntimeError if another run has drawn other random numbers than the first one."""
        for was, now in zip(self._end, self.random(), strict=True):
            if not _equal(was, now):
                raise RuntimeError(
                    f"{name} does not draw in every run as many random numbers as in its first one: expected the same "
                    "control flow in each run"
                )


def _others() -> tuple[Any, Any]:
    """The states of Python's generator and, if it is there, of NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and pickle.dumps(numpy.random.get_state(legacy=False))


def _put_others(states: tuple[Any, Any]) -> None:
    python, numpy = states
    random.setstate(python)
    if numpy:
        sys.modules["numpy"].random.set_state(pickle.loads(numpy))


def _equal(a: Tensor, b: Tensor) -> bool:
    if _torch.is_fake(a):
        return True
    with _torch.below_transforms():
        return torch.equal(a, b)
