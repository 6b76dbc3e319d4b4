"""The ambient state of a run: random number generators, autocast, defaults, attention's kernels, context variables."""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import random
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import _torch

__all__ = ["AmbientState", "compared_variables", "context_variables", "set_context_variables"]


class AmbientState:
    """The state of random number generators, autocast, `sdpa_kernel`, deterministic mode and torch's defaults where it is made.

    Args:
        leaves: The arguments; the generators of their devices are among those that count.
    """

    def __init__(self, leaves: Iterable[object]) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        self._devices = sorted((device.type, device.index) for device in devices if device.type not in ("cpu", "meta"))
        self._start = self.get_random_states()
        self._end: list[Tensor] = []
        self._python_start: tuple[Any, Any] | None = _get_python_states()
        self._kernels, self._modes = _allowed_kernels(), _torch.function_modes(own=False)
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()
        self._deterministic = torch.get_deterministic_debug_mode()
        self._casts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(kind for kind, _ in self._devices)})
        ]

    def get_random_states(self) -> list[Tensor]:
        """Return the states of torch's generators now, on the CPU and on the devices."""
        return [torch.get_rng_state(), *(torch.get_device_module(kind).get_rng_state(index) for kind, index in self._devices)]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        """Set the states of torch's generators."""
        torch.set_rng_state(states[0])
        for (kind, index), state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(kind).set_rng_state(state, index)

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Restore the recorded state within this context, for another run."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.set_random_states, self.get_random_states())
            self.set_random_states(self._start)
            if self._python_start is not None:
                stack.callback(_set_python_states, _get_python_states())
                _set_python_states(self._python_start)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            torch.set_deterministic_debug_mode(self._deterministic)
            for cast in self._casts:
                stack.enter_context(cast)
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            active = _torch.function_modes(own=False)  # none of them: torch calls their handlers for backward() as well
            for mode in self._modes:
                if mode not in active:
                    stack.enter_context(mode)
            if self._kernels != _allowed_kernels():
                stack.enter_context(sdpa_kernel(self._kernels))
            yield

    def record_end(self) -> None:
        """Record the states that the first run has left."""
        self._end = self.get_random_states()
        if self._python_start == _get_python_states():  # nothing was drawn
            self._python_start = None

    def check_end(self, name: str) -> None:
        """Raise RuntimeError if a run of the function of this name has drawn other random numbers than the first one."""
        states = zip(self._end, self.get_random_states(), strict=True)
        if not all(_states_equal(was, now) for was, now in states):
            raise RuntimeError(
                f"{name} does not draw in every run as many random numbers as in its first one: expected the same "
                "control flow in each run, and no other thread that draws from the same generators meanwhile; give it a "
                "torch.Generator of its own"
            )


def _allowed_kernels() -> list[SDPBackend]:
    """Return the kernels that torch.nn.attention.sdpa_kernel allows now."""
    allowed = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return [kernel for kernel, is_on in allowed.items() if is_on]


def _get_python_states() -> tuple[Any, Any]:
    """Return the states of Python's generator and, if NumPy is imported, of NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and pickle.dumps(numpy.random.get_state(legacy=False))


def _set_python_states(states: tuple[Any, Any]) -> None:
    """Set the random states of Python and NumPy."""
    python, numpy = states
    random.setstate(python)
    if numpy:
        sys.modules["numpy"].random.set_state(pickle.loads(numpy))


def _states_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two random states are equal; True for fake tensors."""
    with _torch.below_transforms():
        return _torch.is_fake(a) or torch.equal(a, b)


def context_variables() -> dict[contextvars.ContextVar[Any], Any]:
    """Return all context variables that are set, with their values, except for the compiler's own."""
    return {var: value for var, value in contextvars.copy_context().items() if not _torch.is_compiler_variable(var)}


def compared_variables() -> dict[contextvars.ContextVar[Any], Any]:
    """Return the context variables that every run must leave alike: torch changes its configuration while it compiles."""
    return {var: value for var, value in context_variables().items() if not _torch.is_config_variable(var)}


@contextlib.contextmanager
def set_context_variables(values: dict[contextvars.ContextVar[Any], Any]) -> Generator[None]:
    """Set context variables to these values within this context."""
    tokens = [(var, var.set(value)) for var, value in values.items() if var.get(values) is not value]
    try:
        yield
    finally:
        for var, token in reversed(tokens):
            var.reset(token)
