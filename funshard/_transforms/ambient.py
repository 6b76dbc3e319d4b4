"""The surroundings of a run: the ambient state, what runs it is in, and checks of what it reads that it was not given."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._spec.options import Remat

Args = ParamSpec("Args")
Result = TypeVar("Result")


def _get_python_states() -> tuple[Any, Any]:
    """Return the states of Python's generator and, if NumPy is imported, of NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *others = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *others)


def _set_python_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1]:
        kind, keys, *others = states[1]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, "uint32"), *others))


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kernel}_sdp"))
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ),
)
"""Functions that get and set what every run is to find as the first one did."""


class AmbientState:
    """The ambient state where it is made, with the generators of the devices of ``leaves``, the arguments, and more of them."""

    @_torch.disable_in_graph("the state around a recomputed function is the host's")
    def __init__(self, leaves: Iterable[object], generators: Iterable[torch.Generator] = ()) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        devices = sorted((device.type, device.index) for device in devices if device.type not in ("cpu", "meta"))
        self._random: list[tuple[Callable[[], Tensor], Callable[[Tensor], object]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            *(
                (functools.partial(module.get_rng_state, index), functools.partial(module.set_rng_state, device=index))
                for module, index in ((torch.get_device_module(kind), index) for kind, index in devices)
            ),
            *((generator.get_state, generator.set_state) for generator in generators),
        ]
        self._start = self.get_random_states()
        self._end: list[Tensor] = []
        self._python_start: tuple[Any, Any] | None = _get_python_states()
        self._values = [get() for get, _ in _SETTINGS]
        self._modes, self._device = _torch.function_modes(own=False), torch.get_default_device()
        kinds = sorted({"cpu", *(kind for kind, _ in devices)})
        self._casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}

    def get_random_states(self) -> list[Tensor]:
        """Return the states of torch's generators now."""
        with _torch.below_transforms() if len(self._random) > 1 else contextlib.nullcontext():
            return [get_state() for get_state, _ in self._random]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        """Set the states of torch's generators."""
        for (_, set_state), state in zip(self._random, states, strict=True):
            set_state(state)

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
        with _torch.below_transforms():
            pairs = zip(self._end, self.get_random_states(), strict=True)
            if not all(_torch.is_fake(was) or torch.equal(was, now) for was, now in pairs):
                raise RuntimeError(
                    f"{name} does not draw in every run as many random numbers as in its first one: expected the same "
                    "control flow in each run, and no other thread that draws from the same generators meanwhile; give it a "
                    "torch.Generator of its own"
                )


class _Running(threading.local):
    """The functions that this thread runs, and how it runs them."""

    names: tuple[str, ...] = ()  # the functions that run and will run again, the innermost last
    in_stack = False  # whether several transforms are around the innermost
    is_first = False  # whether the innermost is in its first run, whose graph is not kept
    first_runs: tuple[Any, ...] = ()  # the first runs that save results of operators, the innermost last
    is_paused = False  # whether results of operators are neither saved nor reused
    is_per_sample = False  # whether the loss of each sample runs by itself, under vmap
    is_in_gradient = False  # whether plain autograd differentiates a loss function that runs
    is_differentiated = False
    """Whether something outside counts as differentiating what is computed, whose arguments may not require grad: a run of a
    function may be below the transform that differentiates it, and what `grad` closes over would be a constant."""
    regions: list[Remat] | None = None
    """Where the regions are collected that torch.compile traces, by number."""

    @contextlib.contextmanager
    def set(self, **values: Any) -> Generator[None]:
        """Set these attributes within this context."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


RUNNING = _Running()


def run_unrecorded(f: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Call ``f`` without saving or reusing results: it gathers parameters, which all ranks must do together."""
    before, RUNNING.is_paused = RUNNING.is_paused, True
    try:
        return f(*args, **kwargs)
    finally:
        RUNNING.is_paused = before


# --- checks: hooks, queries, and tensors that a function was not given ---


def check_backward_hooks(modules: Iterable[nn.Module], name: str) -> None:
    """Raise RuntimeError for a module's backward hook: torch drops it inside forward mode, and another run would not."""
    for module in modules:
        for hook in (*module._backward_pre_hooks.values(), *module._backward_hooks.values()):
            hook_name = getattr(hook, "__qualname__", type(hook).__name__)
            raise RuntimeError(
                f"{name} reaches a {type(module).__name__} with the backward hook {hook_name}, which torch calls for one "
                "derivative of several or for none: expected an autograd.Function that changes the gradient, or the hook "
                "removed"
            )


REGISTER_HOOK: Callable[..., Any] = torch.Tensor.register_hook
"""``tensor.register_hook``, which changes the gradient of one level."""

_GETTERS = {getattr(torch.Tensor, name).__get__: name for name in ("requires_grad", "grad_fn", "is_leaf")}
"""The functions that a TorchFunctionMode sees for the attributes that ask autograd."""


def messages_in_stack(name: str) -> dict[Callable[..., Any], str]:
    """Return the errors for what concerns one derivative of a stack: which one that is differs between runs."""
    return {
        function: f"{name} reads tensor.{attribute}, which in a stack of transforms means one of them, and not the same one "
        f"when {name} runs again: expected it not to (detach() for .data, an autograd.Function for a hook), or no remat"
        for function, attribute in {_torch.DATA: "data", REGISTER_HOOK: "register_hook", **_GETTERS}.items()
    }


class ForbiddenFunctions(TorchFunctionMode):
    """A mode that refuses functions of tensors by a RuntimeError with its message, but for queries of torch and of funshard."""

    def __init__(self, messages: Mapping[Callable[..., Any], str]) -> None:
        super().__init__()
        self._messages = messages

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if (message := self._messages.get(func)) is not None:
            caller = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            if func not in _GETTERS or caller not in ("torch", "funshard"):
                raise RuntimeError(message)
        return func(*args, **(kwargs or {}))


def refuse_outer(name: str, ids: set[int], modules: Iterable[nn.Module]) -> NoReturn:
    """Raise RuntimeError for a tensor that the function of this name was not given: it, or its node, has one of these ids."""
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in ids or id(parameter.grad_fn) in ids):
                raise RuntimeError(
                    f"{name} reads parameter '{key}' of a {type(module).__name__}, which is not one of its arguments and would "
                    "have no gradient: expected fs.remat(lambda p, x: torch.func.functional_call(module, p, x)), or "
                    "P(remat=True) of a unit"
                )
    raise RuntimeError(
        f"{name} reads a tensor of the running computation that is neither an argument nor reached from one, as in a global or "
        "an attribute of a class, where it would have no gradient: expected it among the arguments"
    )


class OuterTensors(TorchFunctionMode):
    """A mode that records the tensors of transforms around a run that functions with tensors as results are given.

    torch takes such a tensor for a constant, since the run is below those transforms: its derivative would be missing.
    """

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._name, self._modules, self._keys = name, modules, _torch.dispatch_keys()
        self._tensors: dict[int, Tensor] = {}  # by id

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, level = kwargs or {}, _torch.current_level()
        outer = [x for x in _iter_tensors((*args, *kwargs.values())) if _torch.is_wrapped(x) and _torch.level_of(x) > level]
        if any(map(_torch.is_batched, outer)):
            refuse_outer(self._name, set(map(id, outer)), self._modules)
        out = func(*args, **kwargs)
        if outer and func not in (torch.detach, torch.Tensor.detach) and any(True for _ in _iter_tensors((out,))):
            self._tensors.update((id(x), x) for x in outer)
        return out

    def check(self) -> None:
        """Raise RuntimeError if a running transform differentiates one of the recorded tensors."""
        for x in self._tensors.values():
            # the levels of a tensor are those inside of another wrapper around it
            if _torch.tracking_levels(_torch.wrap_for_ended_level(x), self._keys):
                refuse_outer(self._name, {id(x)}, self._modules)


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _iter_tensors(value)
