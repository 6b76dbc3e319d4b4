"""The values that a model's initialisers compute from a seed, a few tensors at a time, as often as they are needed."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .. import _torch
from .._call.module_state import calling_thread, restore_modules
from .sandbox import InitSandbox
from .slots import InitFn, Initialiser, Slot, find_initialisers, find_slots, format_slots

__all__ = ["InitialValues", "WiderReachError", "open_values"]


class WiderReachError(Exception):
    """An initialiser touched a slot outside its known reach, which now includes it: values made before must be made again."""


@contextlib.contextmanager
def open_values(model: nn.Module, init_fn: InitFn | None, seed: int, device: torch.device) -> Generator[InitialValues]:
    """Yield the model's `InitialValues`; afterwards restore the model's tensors and torch's random state."""
    slots, runs = find_slots(model), find_initialisers(model, init_fn)
    devices = [device] if _torch.is_accelerator(device) else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"))
        stack.enter_context(restore_modules(dict(model.named_modules(remove_duplicate=False)), calling_thread()))
        if torch.get_default_device().type == "meta":  # as within `with torch.device("meta")`, where the model was made
            stack.enter_context(device)
        with _torch.below_transforms():
            values = InitialValues(runs, slots.values(), InitSandbox(model, slots, seed, device), device)
        yield values


class InitialValues:
    """The values that a model's initialisers give its slots, within `open_values`.

    An initialiser's *reach* is the slots of its module and all others that it touches; only they have values when it runs. A
    first run on the meta device finds the reach. A slot's value is the result of all initialisers that reach it, in order:
    it depends on the model alone, not on which slots are filled together.
    """

    def __init__(self, runs: list[Initialiser], slots: Collection[Slot], sandbox: InitSandbox, device: torch.device) -> None:
        self.slots, self._runs, self._sandbox, self._device = slots, runs, sandbox, device
        self._own: dict[nn.Module, set[Slot]] = defaultdict(set)
        for slot in slots:
            for module in slot.modules:
                self._own[module].add(slot)
        self._reach: list[set[Slot]] = [set() for _ in runs]
        self._reached_by: dict[Slot, set[int]] = {slot: set() for slot in slots}
        self._unsure: set[int] = set()
        """The initialisers that failed on the meta device and did not yet run with values: they may reach further."""
        for i, one in enumerate(runs):
            with warnings.catch_warnings():  # which come again when it runs with values
                warnings.simplefilter("ignore")
                run = sandbox.run(one, {})
            self._widen(i, self._own[one.module] | run.touched)
            if run.error:
                self._unsure.add(i)

    def _widen(self, i: int, slots: set[Slot]) -> None:
        """Add slots to the reach of an initialiser."""
        self._reach[i] |= slots
        for slot in slots:
            self._reached_by[slot].add(i)

    @property
    def largest_module_nbytes(self) -> int:
        """The most bytes that one module owns."""
        return max((sum(slot.nbytes for slot in own) for own in self._own.values()), default=0)

    def check_reached(self, slots: Iterable[Slot]) -> None:
        """Raise ValueError, naming the module, for a slot that is in no initialiser's reach."""
        for slot in slots:
            if not self._reached_by[slot]:
                raise ValueError(
                    f"init: {slot.kind} '{slot.name}': {slot.owner} has no reset_parameters, and that of no module around it "
                    "gives it values: expected one, or init_fn=, a function that is called with every module and initialises it"
                )

    def fill(self, wanted: Mapping[Slot, Tensor], most: int) -> None:
        """Write the values of these slots into these tensors.

        Others that have to be made with one of them are held beside them, of ``most`` bytes at most: ValueError where it
        would be more, and for a slot that was left without values. Raises `WiderReachError`.
        """
        left = dict(wanted)
        with _torch.below_transforms():
            while left:
                runs, slots = self._find_connected(next(iter(left)))
                self._check_held_bytes([slot for slot in slots if slot not in wanted], runs, most)
                values = {slot: self._allocate_unset(slot, wanted.get(slot)) for slot in slots}
                written: set[Slot] = set()
                for i in runs:
                    written |= self._run(i, values)
                for slot in [slot for slot in slots if slot in left]:
                    self._check_set(slot, values[slot], written)
                    if values[slot] is not wanted[slot]:
                        wanted[slot].copy_(values[slot])
                    del left[slot]

    def run_unsure(self, most: int) -> None:
        """Run the initialisers that failed on the meta device and did not run since. Call it last; it raises as `fill` does."""
        for i in sorted(self._unsure):
            self.fill({slot: slot.empty(self._device) for slot in self._reach[i]}, most)
            if not self._reach[i]:
                self._run(i, {})

    def _find_connected(self, first: Slot) -> tuple[list[int], list[Slot]]:
        """Return the initialisers that must run for this slot, in their order, and all slots in their reach."""
        runs: set[int] = set()
        slots, new = {first: None}, [first]
        while new:
            more = {i for slot in new for i in self._reached_by[slot]} - runs
            new = [slot for i in sorted(more) for slot in self._reach[i] if slot not in slots]
            runs, slots = runs | more, slots | dict.fromkeys(new)
        return sorted(runs), list(slots)

    def _run(self, i: int, values: Mapping[Slot, Tensor]) -> set[Slot]:
        """Run an initialiser on the slots in its reach and return those that it wrote."""
        run = self._sandbox.run(self._runs[i], {slot: values[slot] for slot in self._reach[i]})
        if run.touched - self._reach[i]:
            self._widen(i, run.touched)
            raise WiderReachError
        if run.error:
            what = f"{type(run.error).__name__}: {run.error}"
            raise RuntimeError(f"init: the initialiser of {self._runs[i]} failed: {what}") from run.error
        self._unsure.discard(i)
        return run.written

    def _allocate_unset(self, slot: Slot, given: Tensor | None) -> Tensor:
        """Return memory for a slot, filled with NaN if that shows what is never written."""
        if not slot.uses_nan:
            return slot.empty(self._device)  # in memory of its own, so that a write to it is seen
        return (slot.empty(self._device) if given is None else given).fill_(torch.nan)

    def _check_set(self, slot: Slot, value: Tensor, written: set[Slot]) -> None:
        """Raise ValueError if a slot was left without values."""
        if not value.numel() or _torch.is_fake(value):
            return
        pieces = value.reshape(-1).split(1 << 24) if slot.uses_nan else ()  # a mask of all of it would be memory
        if slot not in written if not slot.uses_nan else torch.stack([piece.isnan().any() for piece in pieces]).any():
            hint = "an init_fn is all that initialises a module, and may call its reset_parameters"
            if isinstance(slot.modules[0], ParametrizationList):
                hint = "an init_fn can assign the weight that is computed from it: recipes.md, 'A model that does not fit'"
            raise ValueError(
                f"init: {slot.kind} '{slot.name}' of {slot.owner} was left without values, or has some that are NaN: expected "
                f"its initialiser to write all of it; {hint}"
            )

    def _check_held_bytes(self, beside: list[Slot], runs: list[int], most: int) -> None:
        """Raise ValueError if initialisers that touch other units would hold more than the largest unit."""
        if (nbytes := sum(slot.nbytes for slot in beside)) > most:
            foreign = {i: self._reach[i] - self._own[self._runs[i].module] for i in runs}
            widest = max(runs, key=lambda i: sum(slot.nbytes for slot in foreign[i]))
            what = f"touches {format_slots(foreign[widest])}" if foreign[widest] else f"is tied to {format_slots(beside)}"
            raise ValueError(
                f"init: the initialiser of {self._runs[widest]} {what}, in other units: with it "
                f"{nbytes:,} bytes would be held beside a unit, and the largest unit has {most:,}; expected an init_fn that "
                "leaves each module to itself, or a policy with one unit around them"
            )
