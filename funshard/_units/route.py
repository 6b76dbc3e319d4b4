"""How a unit travels between ranks, as plain data. Two interpret it: data flow (flow.py), and chains under way (chain.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._spec.codec import Codec, Form, unpacked
from .._spec.division import Reduction, division
from .._spec.host import used_on
from .._spec.precision import Dtypes, Precision
from .._spec.unit import Unit
from ..collectives._mesh import Mesh
from .layout import widest

__all__ = ["Route"]


@dataclass(frozen=True)
class Route:
    """Over which mesh axes a unit is gathered and reduced, in which dtypes, and what its gradients are divided by."""

    padded: int
    """Elements of its whole buffer."""
    widest: int
    """Elements of the longest padding in its buffer."""
    split: tuple[str, ...]
    """The axes of its slices, outermost first: gathered over from the last one on, reduced over from the first one on."""
    rest: tuple[str, ...]
    """The other axes that its gradients are reduced over, in that order, as slices."""
    op: Literal["mean", "sum"]
    """What collectives take of gradients."""
    before: float
    """What gradients are divided by before the first collective."""
    after: float
    """And after the last one."""
    dtype: torch.dtype
    """The shard's."""
    dtypes: Dtypes
    """In which it is gathered and computed with, and in which its gradients are reduced."""
    codec: Codec | None
    """What is sent is encoded in."""
    form: Form | None
    """How the shard's bytes are what is encoded, where it is at rest in that."""
    slices: int
    """How many slices its buffer is."""
    device: torch.device | None
    """To which the shard, which rests on the host, is copied to be gathered; None where it is where it is used."""
    made: bool
    """Whether its buffer is another tensor than the shard."""
    frees: bool
    """Whether its buffer goes between forward and backward."""

    @classmethod
    def of(cls, unit: Unit, mesh: Mesh, reduction: Reduction, precision: Precision | None, dtype: torch.dtype) -> Route:
        """That of a unit whose shard has this dtype. Axes of one rank do not count; what has no elements stays where it is."""
        dtype = unit.dtype if unit.at_rest else dtype
        dtypes = (precision or Precision()).resolve(dtype)
        codec = unit.at_rest or (precision.codec if precision and dtype.is_floating_point and unit.numel else None)
        sizes = {name: axis.size for name, axis in mesh.axes if axis.size > 1 and unit.numel}
        split = tuple(name for name in unit.p.axes if name in sizes)
        rest = tuple(name for name in reversed(sizes) if name not in split and reduction.includes(name))
        ranks = torch.Size(sizes[name] for name in (*split, *rest)).numel()
        slices = torch.Size(mesh[name].size for name in unit.p.axes).numel()
        padded = unit.padded_numel(slices)
        form = unit.at_rest.form(padded // slices, dtype)[1] if unit.at_rest else None
        device = used_on(unit, mesh)
        made = bool(split) or dtypes.param != dtype or codec is not None or device is not None
        op, before, after = division(reduction.by, ranks, dtypes.reduce) if unit.numel else ("mean", 1.0, 1.0)
        return cls(
            padded=padded,
            widest=widest(unit, padded),
            split=split,
            rest=rest,
            op=op,
            before=before,
            after=after,
            dtype=dtype,
            dtypes=dtypes,
            codec=codec,
            form=form,
            slices=slices,
            device=device,
            made=made,
            frees=unit.p.reshard and made,
        )

    @property
    def left(self) -> torch.dtype:
        """The dtype of a reduced slice when it leaves the device where it was reduced: the shard's, or one that is smaller."""
        return self.dtype if self.device is None else min(self.dtype, self.dtypes.reduce, key=lambda dtype: dtype.itemsize)

    def decoded(self, raw: Tensor, form: Form) -> Tensor:
        """Its buffer, from the bytes of all slices, end to end."""
        assert self.codec is not None
        tensors = unpacked(raw.view(self.slices, -1), form)
        return self.codec.decoded(tensors, self.padded // self.slices, self.dtypes.param)

    @property
    def plain(self) -> bool:
        """Whether the collectives by themselves are the way: nothing is cast, divided or copied."""
        return self.dtypes == (self.dtype, self.dtype) and self.before == self.after == 1 and self.device is None
