"""encode_state, decode_state: an elementwise state at rest in a codec, and in its own dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._spec.codec import Codec
from ..._spec.spec import PartitionSpec
from ..._spec.unit_state import UnitState
from .state_codec import StateCodec

__all__ = ["decode_state", "encode_state"]


def encode_state(
    state: Mapping[str, Mapping[str, Any]],
    codec: Codec,
    *,
    spec: PartitionSpec,
    at_least: int = 4096,
    seed: int | None = None,
    rank: int | None = None,
) -> dict[str, UnitState]:
    """Return an elementwise state, such as one of a float32 checkpoint, encoded as `quantized_state` keeps it.

    It rounds to the nearest. Inverse of `decode_state`, up to that rounding.

    Args:
        state: A state of `from_torch`, by unit key.
        codec: The codec of `quantized_state`.
        spec: The spec of the state.
        at_least: The fewest elements of a unit whose state is encoded.
        seed: The seed of `quantized_state`. Any seed adds the count of roundings that it needs.
        rank: Whose slices these are, by its number on the mesh; this rank's by default.

    Raises:
        ValueError, TypeError: As `quantized_state`, and for a state of another spec.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P(align=256))(torch.nn.Linear(64, 64, bias=False))
        >>> state = fs.optim.encode_state({"": {"exp_avg": torch.ones(4096)}}, fs.codecs.dynamic8(), spec=spec)
        >>> {name: (part.dtype, len(part)) for name, part in state[""]["exp_avg"]._asdict().items()}
        {'codes': (torch.uint8, 4096), 'scales': (torch.float32, 16)}
    """
    return StateCodec.make("encode_state", codec, spec, at_least, seed, rank).encode(state)


def decode_state(
    state: Mapping[str, Mapping[str, Any]], codec: Codec, *, spec: PartitionSpec, rank: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return a state of `quantized_state` decoded, for the optimizer inside it and `checkpoint.optimizer_state_dict`.

    Args:
        state: The state, by unit key.
        codec: The codec of the state.
        spec: The spec of the state.
        rank: Whose slices these are, by its number on the mesh; this rank's by default.

    Raises:
        ValueError: Naming the unit, for a state of another codec or spec.
        TypeError: For a state that is not by unit key.

    Example:
        >>> import torch, funshard as fs
        >>> spec, codec = fs.policies.whole(fs.P(align=256))(torch.nn.Linear(64, 64, bias=False)), fs.codecs.dynamic8()
        >>> state = fs.optim.encode_state({"": {"exp_avg": torch.ones(4096)}}, codec, spec=spec)
        >>> fs.optim.decode_state(state, codec, spec=spec)[""]["exp_avg"].sum()
        tensor(4096.)
    """
    return StateCodec.make("decode_state", codec, spec, None, None, rank).decode(state)
