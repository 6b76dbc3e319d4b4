"""Precision: the dtypes in which a unit's values are sent and computed with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .codec import Codec

__all__ = ["Dtypes", "Precision"]


class Dtypes(NamedTuple):
    """The dtypes in which parameters are gathered and their gradients reduced."""

    param: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a unit's values on their way. Shards, gradients and optimizer state keep the parameters' own.

    ``param`` is what parameters are gathered and computed in; with ``cast_inputs`` floating point inputs of the unit's
    module are cast to it as well. ``reduce`` is what gradients are reduced in: by default ``param`` where that is given.
    Floating point outputs of the module are cast to ``output``, or with ``restore_outputs`` to the dtype in which the
    inputs came (of the first floating point one). ``buffer`` is what floating point buffers are cast to for the call.
    ``codec`` is how slices are sent in a gather: see `Codec`. None keeps what is there.

    After ``MixedPrecision`` and ``MixedPrecisionPolicy`` of torch.distributed.fsdp. To keep gradients in low precision
    (FSDP1's ``keep_low_precision_grads``), differentiate with respect to params that are cast to it.

    Raises TypeError for what is no floating point dtype.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    buffer: torch.dtype | None = None
    restore_outputs: bool = False
    codec: Codec | None = None

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output", "buffer"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"Precision: {name}: expected a floating point dtype or None, got {dtype!r}")
        if self.output is not None and self.restore_outputs:
            raise ValueError(f"Precision: expected output or restore_outputs, got both: output={self.output}")

    def __repr__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"Precision({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def _resolve(self, original: torch.dtype) -> Dtypes:
        """Return the dtypes for parameters of dtype ``original``; ``reduce`` defaults to ``param``, and that to ``original``.

        What is not floating point stays as it is. The rule of ``FlatParamHandle._init_param_reduce_dtypes``.

        >>> import torch, funshard as fs
        >>> fs.Precision(param=torch.bfloat16)._resolve(torch.float32)
        Dtypes(param=torch.bfloat16, reduce=torch.bfloat16)
        """
        if not original.is_floating_point:
            return Dtypes(original, original)
        return Dtypes(self.param or original, self.reduce or self.param or original)
