"""quantized_state: an elementwise optimizer whose state is at rest in a codec, and decoded unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # traced by torch.compile, as optree is not

from ... import _torch
from ..._spec.bind import check_spec
from ..._spec.checks import check_mapping
from ..._spec.codec import Codec
from ..._spec.spec import PartitionSpec
from ..._spec.unit_state import replace_values
from ..._units.layout import Params
from .._by_matrix.optimizer import MatrixOptimizer
from .._checks import refuse_shared_memory
from .._composition.pairs import AnyOptimizer, ComposedOptimizer, check_optimizer
from .slices import QuantizedSlice
from .state_codec import StateCodec

__all__ = ["quantized_state"]


def quantized_state(
    optimizer: AnyOptimizer,
    codec: Codec,
    *,
    spec: PartitionSpec,
    at_least: int = 4096,
    seed: int | None = None,
    donate: bool = False,
    rank: int | None = None,
) -> ComposedOptimizer:
    """Return an elementwise optimizer whose state is at rest in a codec, such as 8 bits (``codecs.dynamic8()``).

    Its update decodes the state of one unit, updates that unit, and encodes the state again. Numbers such as the step are
    not encoded. Units need ``P(align=256)``, so that no block straddles parameters or ranks' slices. So the values depend
    neither on the number of ranks nor on the policy, and checkpoints keep the bytes. A block with an infinite value or NaN,
    also from a square that overflows, becomes NaN as a whole.

    Args:
        optimizer: ``(init, update)`` that treats each unit by itself, as those of `from_torch` do. Put `chain` and other
            compositions around the result.
        codec: A codec of blocks, `codecs.dynamic8` for moments.
        spec: The spec of the shards.
        at_least: The fewest elements of a unit whose state is encoded.
        seed: Round each element up or down at random, so that the mean is right. With one seed on all ranks the values are
            the same on any number of them. None: round to the nearest.
        donate: Write the new state into the memory of the given one, as `from_torch` does with its own ``donate``.
        rank: The rank of the shards, as in `from_torch`.

    Returns:
        A `ComposedOptimizer`, whose state by unit key has a `QuantizedSlice` for each slice. `encode_state` and `decode_state`
        convert it.

    Raises:
        TypeError: For an optimizer of matrices or one that is made of others, and for a state that is not by unit key.
        ValueError: Naming the unit, for blocks that would straddle; in ``init`` for Adadelta and centered RMSprop; in
            ``update`` for a state that is not in the codec.
        RuntimeError: If ``update`` is differentiated: rounding has no derivative.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P("shard", align=256))(torch.nn.Linear(64, 64))
        >>> adamw = fs.optim.from_torch(torch.optim.AdamW, lr=1e-3)
        >>> init, update = fs.optim.quantized_state(adamw, fs.codecs.dynamic8(), spec=spec)
        >>> init({"": torch.ones(4352)})[""]["exp_avg"].codes.dtype
        torch.uint8

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
    """
    who = "quantized_state"
    check_spec(spec)
    check_optimizer(who, optimizer)
    if isinstance(optimizer, MatrixOptimizer):
        raise TypeError(f"{who}: an optimizer of matrices updates all units together: expected one such as optim.from_torch's")
    if isinstance(optimizer, ComposedOptimizer):
        raise TypeError(
            f"{who}: expected an optimizer that treats each unit by itself, got one that is made of others: put it inside, as "
            "optim.chain(..., optim.quantized_state(adamw, ...)), optim.ema(optim.quantized_state(adamw, ...), ...)"
        )
    begin, apply = optimizer
    state_codec = StateCodec.make(who, codec, spec, at_least, seed, rank)

    def init(params: Mapping[str, Tensor], /) -> Any:
        check_mapping(params)
        return state_codec.encode(begin(params))

    def update_unit(
        key: str,
        slots: list[str],
        grads: Mapping[str, Tensor],
        state: Mapping[str, Any],
        params: Mapping[str, Tensor],
        rates: Mapping[str, Any],
        *,
        is_donated: bool,
    ) -> tuple[Tensor, Any]:
        """Return the new shard and state of a unit; nothing of it is decoded afterwards."""
        unit, values = state_codec.spec.by_key[key], state[key]
        new, states = apply({key: grads[key]}, {key: state_codec.decode_unit(unit, values)}, {key: params[key]}, **rates)
        encoded = state_codec.encode_unit(unit, states[key], slots, values)
        return new[key], _write_state(values, encoded) if is_donated else encoded

    def update(
        grads: Mapping[str, Tensor], state: Mapping[str, Any], params: Mapping[str, Tensor], /, **rates: Any
    ) -> tuple[Params, Any]:
        check_mapping(grads, "grads")
        check_mapping(params)
        units = state_codec.find_units(state)
        is_donated = donate
        if not torch.compiler.is_compiling():  # in a graph the optimizer's own update refuses derivatives
            _refuse_derivatives(_iter_argument_tensors(grads, units, params, rates))
            # memory that vmap has not batched cannot take results that are
            is_donated = donate and not any(
                _torch.is_batched(x) for _, x in _iter_argument_tensors(grads, units, params, rates)
            )
            if is_donated:
                refuse_shared_memory(_iter_encoded_tensors(units))
        found_slots = {key: state_codec.encoded_slots(key, values) for key, values in units.items()}
        slots = {key: names for key, names in found_slots.items() if names}
        for what, tree in (("gradient", grads), ("param", params)):
            if missing := [key for key in slots if key not in tree]:
                raise ValueError(
                    f"unit '{missing[0]}' has a state and no {what}: expected one for each unit, got {[*tree][:8]}"
                )
        others = [{key: x for key, x in tree.items() if key not in slots} for tree in (grads, units, params)]
        new_params: Params = {}
        new_state: dict[str, Any] = {}
        if any(others):
            found = apply(*others, **rates)
            new_params |= found[0]
            new_state |= found[1]
        for key in slots:
            new_params[key], new_state[key] = update_unit(key, slots[key], grads, units, params, rates, is_donated=is_donated)
        return {key: new_params[key] for key in params}, {key: new_state[key] for key in units}

    return ComposedOptimizer(init, update)


def _write_state(old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Write the new codes and scales into the memory of the old ones, and return the state that has it."""
    out = dict(new)
    for name, x in old.items():
        if isinstance(x, QuantizedSlice):
            written = [_torch.write_into(into, value) for into, value in zip(x, new[name], strict=True)]
            out[name] = QuantizedSlice(*(map(_torch.take_storage, written) if _torch.is_eager() else written))
    return replace_values(new, out)


def _iter_encoded_tensors(state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name for an error, tensor)`` for the codes and scales of a state."""
    for key, values in state.items():
        for name, x in values.items():
            if isinstance(x, QuantizedSlice):
                yield from ((f"{part} of state['{key}']['{name}']", one) for part, one in x._asdict().items())


def _iter_argument_tensors(*trees: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name for an error, tensor)`` for every tensor of grads, state, params and rates, in this order."""
    for what, tree in zip(("grads", "state", "params", "rates"), trees, strict=True):
        for path, x in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(x, Tensor):
                yield f"{what}{pytree.keystr(path)}", x


def _refuse_derivatives(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Raise RuntimeError if autograd or a transform differentiates a tensor: rounding has no derivative."""
    for what, tensor in tensors:
        if _torch.is_tracked(tensor):
            raise RuntimeError(
                f"quantized_state: {what} takes part in a derivative, and rounding the state to few bits has none: expected an "
                "update under torch.no_grad() or outside of the transform, or the optimizer without quantized_state"
            )
