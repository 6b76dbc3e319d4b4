"""The ambient state of a run: generators, autocast, torch's defaults, attention's kernels, context variables; what it is in."""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import _torch

Args = ParamSpec("Args")
Result = TypeVar("Result")


def _get_python_states() -> tuple[Any, Any]:
    """Return the states of Python's generator and, if NumPy is imported, of NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and pickle.dumps(numpy.random.get_state(legacy=False))


def _set_python_states(states: tuple[Any, Any]) -> None:
    python, numpy = states
    random.setstate(python)
    if numpy:
        sys.modules["numpy"].random.set_state(pickle.loads(numpy))


_ATTENTION = torch.backends.cuda
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_ATTENTION.flash_sdp_enabled, _ATTENTION.enable_flash_sdp),
    (_ATTENTION.mem_efficient_sdp_enabled, _ATTENTION.enable_mem_efficient_sdp),
    (_ATTENTION.math_sdp_enabled, _ATTENTION.enable_math_sdp),
    (_ATTENTION.cudnn_sdp_enabled, _ATTENTION.enable_cudnn_sdp),
)
"""Functions that get and set what every run is to find as the first one did."""


class AmbientState:
    """The ambient state where it is made, with the generators of the devices of ``leaves``, the arguments, and more of them."""

    @_torch.disable_in_graph("the state around a recomputed function is the host's")
    def __init__(self, leaves: Iterable[object], generators: Iterable[torch.Generator] = ()) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        self._devices = sorted((device.type, device.index) for device in devices if device.type not in ("cpu", "meta"))
        self._generators = list(generators)
        self._start = self.get_random_states()
        self._end: list[Tensor] = []
        self._python_start: tuple[Any, Any] | None = _get_python_states()
        self._values = [get() for get, _ in _SETTINGS]
        self._config = {var: value for var, value in contextvars.copy_context().items() if _torch.is_config_variable(var)}
        self._modes, self._device = _torch.function_modes(own=False), torch.get_default_device()
        self._casts = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(kind for kind, _ in self._devices)})
        }

    def get_random_states(self) -> list[Tensor]:
        """Return the states of torch's generators now."""
        devices = [torch.get_device_module(kind).get_rng_state(index) for kind, index in self._devices]
        with _torch.below_transforms() if self._generators else contextlib.nullcontext():
            return [torch.get_rng_state(), *devices, *(generator.get_state() for generator in self._generators)]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        """Set the states of torch's generators."""
        cpu, *others = states
        torch.set_rng_state(cpu)
        for (kind, index), state in zip(self._devices, others, strict=False):
            torch.get_device_module(kind).set_rng_state(state, index)
        for generator, state in zip(self._generators, others[len(self._devices) :], strict=True):
            generator.set_state(state)

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Restore the recorded state within this context, for another run."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.set_random_states, self.get_random_states())
            self.set_random_states(self._start)
            if self._python_start is not None:
                stack.callback(_set_python_states, _get_python_states())
                _set_python_states(self._python_start)
            for (get_value, set_value), value in zip(_SETTINGS, self._values, strict=True):
                if (now := get_value()) != value:
                    stack.callback(set_value, now)
                    set_value(value)
            for kind, (enabled, dtype) in self._casts.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            for var, value in self._config.items():
                stack.callback(var.reset, var.set(value))
            active = _torch.function_modes(own=False)  # none of them: torch calls their handlers for backward() as well
            for mode in self._modes:
                if mode not in active:
                    stack.enter_context(mode)
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


def _states_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two random states are equal; True for fake tensors."""
    with _torch.below_transforms():
        return _torch.is_fake(a) or torch.equal(a, b)


# --- Context variables, by which transformers collects outputs of its layers ---

_COPIED = (Tensor, list, dict, tuple, int, float, str)
"""The classes of values that each run gets a copy of."""


def find_variables() -> dict[contextvars.ContextVar[Any], Any]:
    """Return the context variables that hold numbers, texts, tensors and containers, with their values, but for torch's own."""
    return {var: value for var, value in contextvars.copy_context().items() if isinstance(value, _COPIED) and _is_users(var)}


@contextlib.contextmanager
def set_variables(values: dict[contextvars.ContextVar[Any], Any], name: str) -> Generator[None]:
    """Set context variables within this context; RuntimeError if what runs in it, which errors call ``name``, sets others."""
    tokens = [(var, var.set(value)) for var, value in values.items()]
    before = contextvars.copy_context()
    try:
        yield
        for var, value in contextvars.copy_context().items():
            if before.get(var, values) is not value and _is_users(var):
                raise RuntimeError(
                    f"{name} sets context variable '{var.name}', which each run would set again: expected it in the result"
                )
    finally:
        for var, token in reversed(tokens):
            var.reset(token)


def _is_users(var: contextvars.ContextVar[Any]) -> bool:
    return not (_torch.is_compiler_variable(var) or _torch.is_config_variable(var))


class _Running(threading.local):
    """The functions that this thread runs and will run again, by name, the innermost last."""

    names: tuple[str, ...] = ()
    in_stack = False
    is_first = False
    """Whether the innermost is in its first run, whose graph is not kept."""
    is_paused = False
    """Whether results of operators are neither saved nor reused."""


RUNNING = _Running()


def run_unrecorded(f: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Call ``f`` without saving or reusing results: it gathers parameters, which all ranks must do together."""
    before, RUNNING.is_paused = RUNNING.is_paused, True
    try:
        return f(*args, **kwargs)
    finally:
        RUNNING.is_paused = before
