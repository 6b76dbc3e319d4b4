"""StateCodec: which slices of a state are encoded, and how: the arguments of `quantized_state`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ..._spec.bind import bind_spec, check_spec
from ..._spec.codec import Codec
from ..._spec.spec import PartitionSpec
from ..._spec.unit import Unit
from ..._spec.unit_state import UnitState, replace_values
from ..._units.padding import zero_padding
from ..._units.random_slices import draw_like, draw_uniform, hash_text
from .._elementwise.streaming import copy_like
from .._option_numbers import find_option_numbers
from .slices import QuantizedSlice, check_blocks, check_codec, check_encoding, decode_slice, encode_slice

__all__ = ["StateCodec"]

ROUNDING = "rounding_step"
"""The name of the number in a unit's state that counts stochastic roundings."""
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number, so that each step has a random stream of its own."""


@dataclass(frozen=True)
class StateCodec:
    """The checked arguments of `quantized_state`, with which it encodes and decodes the states of units."""

    who: str
    codec: Codec
    spec: PartitionSpec
    at_least: int | None
    """The fewest elements of a unit that is encoded; None to decode only."""
    seed: int | None
    rank: int | None

    @classmethod
    def make(
        cls, who: str, codec: object, spec: object, at_least: int | None, seed: int | None, rank: int | None
    ) -> StateCodec:
        """Check the arguments of `quantized_state`; raise TypeError or ValueError if they do not fit."""
        known, checked = check_spec(spec), check_codec(who, codec)
        for name, value in (("at_least", at_least), ("seed", seed)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{who}: {name}: expected a whole number, got {value!r}")
        if seed is not None and not checked.takes_noise:
            raise ValueError(f"{who}: {codec} rounds to the nearest only: expected seed=None, or codecs.dynamic8()")
        self = cls(who, checked, known, at_least, seed, rank)
        for unit in known:
            if self.encodes(unit) and unit.requires_grad:
                check_blocks(who, checked, unit)
        return self

    def encodes(self, unit: Unit) -> bool:
        """Return whether the state of a unit is encoded."""
        if self.at_least is None:
            return False
        return unit.numel >= self.at_least and unit.dtype.is_floating_point and unit.at_rest is None

    def encode(self, state: object) -> dict[str, UnitState]:
        """Return a state by unit key with encoded slices."""
        units = self.find_units(state)
        spec = bind_spec(self.spec)
        numbers = find_option_numbers(units, [key for key in units if key in spec.by_key], spec, ())
        out: dict[str, UnitState] = {}
        for key, values in units.items():
            of_unit = {name for name, x in values.items() if isinstance(x, Tensor) and (not x.dim() or id(x) in numbers)}
            slots = [name for name in values if name not in of_unit] if key in spec.by_key else []
            new = UnitState(values, of_unit)
            if slots and self.encodes(unit := spec.by_key[key]):
                check_blocks(self.who, self.codec, unit)
                if {"square_avg", "grad_avg"} <= {*slots}:
                    raise ValueError(
                        f"{self.who}: unit '{key}': RMSprop(centered=True) takes the root of a difference of averages, which "
                        "rounding can make negative: expected centered=False"
                    )
                if "acc_delta" in slots:
                    raise ValueError(
                        f"{self.who}: unit '{key}': Adadelta multiplies by the root of its average of squared updates, and "
                        "rounding a small one up makes later updates too large: expected another optimizer"
                    )
                for name in slots:
                    self._check_slice(values[name], unit, name)
                new = self.encode_unit(unit, new, [name for name in slots if values[name].is_floating_point()])
                if self.seed is not None:
                    new = UnitState({**new, ROUNDING: torch.zeros((), dtype=torch.int64)}, {*new.numbers, ROUNDING})
            out[key] = new
        return out

    def encoded_slots(self, key: str, values: Mapping[str, Any]) -> list[str]:
        """Return the names of the encoded slices in a unit's state; raise ValueError for a state that is not as `encode`'s."""
        slots = [name for name, x in values.items() if isinstance(x, QuantizedSlice)]
        if not slots and key in self.spec.by_key and self.encodes(self.spec.by_key[key]):
            numel = self.spec.shard_numel(self.spec.by_key[key])
            given = [n for n, x in values.items() if isinstance(x, Tensor) and x.shape == (numel,) and x.is_floating_point()]
            if given:
                raise ValueError(
                    f"{self.who}: '{given[0]}' of unit '{key}' is {values[given[0]].dtype} and not in {self.codec}: expected "
                    "the state of init(params) or of an update; optim.encode_state of what optim.decode_state returns is one"
                )
        if slots and (ROUNDING in values) != (self.seed is not None):
            got = "one that counts its roundings" if self.seed is None else "one without a count of roundings"
            raise ValueError(
                f"{self.who}: unit '{key}': expected a state of an optimizer with seed={self.seed}, got {got}; decode_state "
                "and encode_state(..., seed=) convert it"
            )
        return slots

    def encode_unit(
        self, unit: Unit, values: Mapping[str, Any], slots: list[str], before: Mapping[str, Any] | None = None
    ) -> UnitState:
        """Return a unit's state with these slots encoded, rounded to the nearest.

        With the encoded state before, they are where that is and, if it counts roundings, rounded at random.
        """
        count = None if before is None else before.get(ROUNDING)
        out = dict(values)
        for name in slots:
            x = zero_padding(values[name].detach(), unit, bind_spec(self.spec), self.rank)
            encoded = encode_slice(x, self.codec, None if count is None else self._draw_noise(x, unit, name, count))
            place = values[name] if before is None else before[name].codes
            if _torch.is_pinned(place):
                encoded = QuantizedSlice(*(copy_like(place[: len(part)], part) for part in encoded))
            out[name] = encoded
        numbers = values.numbers if isinstance(values, UnitState) else frozenset[str]()
        if count is None:
            return UnitState(out, numbers)
        return UnitState({**out, ROUNDING: count + 1}, {*numbers, ROUNDING})

    def _draw_noise(self, x: Tensor, unit: Unit, name: str, count: Tensor) -> Tensor:
        """Return a number in [0, 1) for each element, the same however the parameters are sharded."""
        assert self.seed is not None
        stream = count * _STEP + hash_text(f"{self.seed} {name}")
        like = torch.empty(len(x), dtype=torch.float32, device=x.device)
        return draw_like(like, unit.key, bind_spec(self.spec), stream, draw_uniform, self.rank)

    def decode(self, state: object) -> dict[str, dict[str, Any]]:
        """Return a state by unit key with decoded slices, without the count of roundings."""
        return {
            key: self.decode_unit(self.spec.by_key[key], values) if key in self.spec.by_key else replace_values(values, values)
            for key, values in self.find_units(state).items()
        }

    def decode_unit(self, unit: Unit, values: Mapping[str, Any]) -> UnitState:
        """Return a unit's state with decoded slices, without the count of roundings."""
        spec = bind_spec(self.spec)
        out: dict[str, Any] = {}
        for name, x in values.items():
            if isinstance(x, QuantizedSlice):
                check_blocks(self.who, self.codec, unit)
                check_encoding(x, self.codec, unit, spec, name)
                out[name] = zero_padding(decode_slice(x, self.codec), unit, spec, self.rank)
            elif name != ROUNDING:
                out[name] = x
        numbers = values.numbers if isinstance(values, UnitState) else ()
        return UnitState(out, [name for name in numbers if name in out])

    def find_units(self, state: object) -> Mapping[str, Mapping[str, Any]]:
        """Return the state; raise TypeError or ValueError unless it is elementwise, with the keys of units."""
        if not isinstance(state, Mapping) or not all(isinstance(values, Mapping) for values in state.values()):
            raise TypeError(
                f"{self.who}: expected a state by unit key, as that of optim.from_torch, got {type(state).__name__}; what is "
                "made of optimizers goes around: optim.chain(..., optim.quantized_state(...))"
            )
        for key in state:
            if key not in self.spec.by_key and key not in self.spec.ignored:
                raise ValueError(
                    f"{self.who}: '{key}' is no unit of the spec: expected shards by unit key, such as "
                    f"{list(self.spec.by_key)[:8]}"
                )
        return state

    def _check_slice(self, x: object, unit: Unit, name: str) -> None:
        """Raise ValueError, naming the unit, unless this is a rank's slice of it that is not encoded yet."""
        numel = self.spec.shard_numel(unit)
        if not isinstance(x, Tensor) or x.shape != (numel,):
            got = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.who}: '{name}' of unit '{unit.key}': expected this rank's slice, [{numel}], or a number, got {got}"
            )
