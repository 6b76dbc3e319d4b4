"""The stages of a unit's way from slice to buffer: values pass `Stage.apply`, and gradients `Stage.transpose`.

            Move         Divide     Replicas("replicate")   AllGather("shard")   Divide    GradDtype
    slice   copy, cast ->   -    ->          -           ->     all-gather     ->   -    ->    -    -> buffer
    grad    cast, copy <- divide <-     all-reduce       <-   reduce-scatter   <- divide <-  cast   <- grad of buffer

A `Route` is a tuple of them. FSDP is `AllGather` alone, DDP is `Replicas` alone; a codec puts `Encode` and `Decode` around the
gathers, parameters of several dtypes `Bytes` and `Join`, and a slice at rest in a codec has a `Decode` alone. An option of the
wire is one stage, and nothing outside of it knows what it does. Folds over the tuple run it: flow.py as differentiable data
flow, chain.py asynchronously on buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.mesh import Axis, Mesh, ProcessAxis, Simulated
from .._core.ops import OpContext, PendingResult, apply, start_op
from .._spec.codec import Codec, Encoding, pack_bytes, pack_rows, unpack_bytes
from .._spec.precision import Dtypes
from ..collectives._functions import gather_slices, make_label, reduce_scatter, unvary, vary
from .host import HOST, move, start_grad_copy
from .mixed_layout import MixedLayout

if TYPE_CHECKING:
    from typing_extensions import Self


StartStep = Callable[[Tensor, Tensor | None], PendingResult]
"""A function that starts one collective or copy on a tensor, and writes the result into the second one, if there is one."""


class Names(NamedTuple):
    """The names of a unit in a chain: its key, and the label of its collectives."""

    key: str
    label: str


class Transit:
    """The state that stages share while a tensor passes them."""

    __slots__ = ("encoding", "label", "ranks", "shape")

    def __init__(self, label: str = "", ranks: Mapping[str, Tensor] | None = None) -> None:
        self.label = label  # of collectives in data flow, if ranks compare them
        self.ranks = ranks or {}  # of the simulated axes, by name
        self.encoding: Encoding | None = None  # of the slice that `Encode` has encoded
        self.shape: Sequence[int] | None = None  # of the slice that `Bytes` has encoded


@dataclass(frozen=True)
class Stage:
    """One stage. By itself it is the identity in both directions, and sends nothing."""

    is_option: ClassVar[bool] = False
    """Whether it is an option's that computes with other values than those that were sharded."""
    kinds: ClassVar[dict[str, type[Stage]]] = {}
    """All classes of stages by name."""

    def __init_subclass__(cls) -> None:
        Stage.kinds[cls.__name__] = cls

    @property
    def changes_values(self) -> bool:
        """Whether it changes values, and not gradients alone."""
        return type(self).apply is not Stage.apply

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        """Return the value after the stage, in data flow below autograd. Dimensions after the first may be batches."""
        return x

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        """Return the gradient before the stage from that after it, in data flow: the transpose of `linear`."""
        return grad

    def linear(self) -> Stage | None:
        """Return the stage that tangents go through: itself, unless it is not linear; None for the identity."""
        return self

    def apply_out(self, x: Tensor, transit: Transit, out: Tensor | None) -> Tensor:
        """Return the value after the stage, in a chain.

        If the one gather follows, ``out`` is its result, which casts what it gathers; after the last one it is a buffer.
        """
        return self.apply(x, transit)

    def transpose_(self, grad: Tensor) -> Tensor:
        """Return the gradient before the stage, in a chain, whose ``grad`` may be written to; nothing is sent here."""
        return grad

    def start_transpose(self, names: Names) -> StartStep | None:
        """Return the function that starts the stage for gradients in a chain, if it sends something."""
        return None


@dataclass(frozen=True)
class Move(Stage):
    """A copy to the device where the slice is used, if it is host-resident, and a cast; gradients go the way back."""

    device: torch.device | None
    dtype: torch.dtype
    home: torch.dtype
    """The dtype of the slice, and so of its gradient."""
    leaves_in: torch.dtype
    """The dtype in which a gradient leaves the device: the slice's, or the smaller one of the reduction."""

    @property
    def changes_values(self) -> bool:
        return self.device is not None or self.dtype != self.home

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        return move(x, self.device, self.dtype)

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        return move(grad, self.device and HOST, self.home)

    def apply_out(self, x: Tensor, transit: Transit, out: Tensor | None) -> Tensor:
        return x if out is not None else x.to(self.dtype)  # a gather casts as it writes its own slice

    def transpose_(self, grad: Tensor) -> Tensor:
        return grad.to(self.leaves_in)

    def start_transpose(self, names: Names) -> StartStep | None:
        return None if self.device is None else lambda x, out: start_grad_copy(x, names.key)


@dataclass(frozen=True)
class Divide(Stage):
    """A division of gradients. NCCL's PREMUL_SUM would divide as it sends, but functional collectives of torch 2.13 lack it."""

    divisor: float

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        return grad / self.divisor

    def transpose_(self, grad: Tensor) -> Tensor:
        return grad.div_(self.divisor)


@dataclass(frozen=True)
class GradDtype(Stage):
    """The cast of the buffer's gradient to the dtype of the reduction, where the buffer is. A chain joins it in that dtype."""

    device: torch.device | None
    dtype: torch.dtype

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        return move(grad, self.device, self.dtype)  # which is there, but for a slice that is to be reduced over more axes


@dataclass(frozen=True)
class _Collective(Stage):
    """A collective over an axis of the mesh."""

    axis: str
    size: int
    group: str | None
    """The name of its process group; None for a simulated axis."""
    reduction_group: str
    """The name of the process group of its reductions in a chain."""
    op: Literal["mean", "sum"]
    """The result of the reduction of gradients."""

    @classmethod
    def on_axis(cls, name: str, mesh: Mesh, op: Literal["mean", "sum"], **others: Any) -> Self:
        """Return the stage over an axis of a mesh."""
        axis = mesh[name]
        if isinstance(axis, ProcessAxis):
            return cls(name, axis.size, axis.name, axis.reduction_name or axis.name, op, **others)
        return cls(name, axis.size, None, "", op, **others)

    def axis_in(self, transit: Transit) -> Axis:
        """Return the axis in data flow."""
        return (
            ProcessAxis(self.size, None, self.group)
            if self.group is not None
            else Simulated(self.size, transit.ranks[self.axis])
        )

    def context(self, names: Names, *, reduces: bool = False) -> OpContext:
        """Return the process group of a chain's collectives, and what they are called."""
        group = self.reduction_group if reduces else self.group
        return OpContext(self.size, group or "", label=f"{names.label} over '{self.axis}'")


@dataclass(frozen=True)
class AllGather(_Collective):
    """The gather of the slices of an axis; gradients are reduce-scattered."""

    @property
    def codec_label(self) -> str:
        """Says how gradients are encoded; empty if they are not."""
        return ""

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        return gather_slices(x, self.axis_in(transit), reduce=self.op, label=transit.label)

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        return reduce_scatter(grad, self.axis_in(transit), reduce=self.op, label=transit.label)

    def start(self, names: Names) -> StartStep:
        """Return the function that starts the gather in a chain."""
        context = self.context(names)
        return lambda x, out: start_op("gather_mean", x, context, out)

    def start_transpose(self, names: Names) -> StartStep | None:
        context, op = self.context(names, reduces=True), f"scatter_{self.op}"
        return lambda x, out: start_op(op, x, context, out)


@dataclass(frozen=True)
class GatherEncodedBack(AllGather):
    """A gather whose gradients are sent encoded to the owners of slices, which decode and add them.

    The sum is in the dtype of the reduction, however narrow what is sent is. A slice is encoded for itself, so that a codec's
    blocks lie in one slice, and every rank's in the same way, its own too: which rank owns a slice does not change the result.
    """

    codec: Codec
    numel: int
    """The elements of a slice."""
    dtype: torch.dtype
    """The dtype of the sum."""

    @property
    def codec_label(self) -> str:
        return f" encoded by {self.codec}"  # ranks compare it: other codecs may send as many bytes

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        batch = grad.shape[1:]
        rows = grad.unflatten(0, (self.size, -1)).movedim(1, -1)  # by owner, by batch
        numel = rows.shape[-1]
        raw, encoding = pack_rows(self.codec._encode_rows(rows.reshape(-1, numel)))
        label = make_label(transit.label and transit.label + self.codec_label)
        received = apply("all_to_all", raw.reshape(self.size, -1), self.axis_in(transit), label=label).reshape(raw.shape)
        return self._sum_rows(received, encoding, numel, grad.dtype).reshape(*batch, numel).movedim(-1, 0)

    def transpose_(self, grad: Tensor) -> Tensor:
        rows = grad.view(self.size, -1)
        raw, encoding = pack_rows(self.codec._encode_rows(rows))
        # not every encode runs on shapes
        self.codec._encodings.setdefault((rows.shape[1], grad.dtype), (raw.shape[1], encoding))
        return raw

    def start_transpose(self, names: Names) -> StartStep | None:
        context = self.context(names, reduces=True)
        context = context._replace(label=context.label + self.codec_label)

        def start(sent: Tensor, out: Tensor | None) -> PendingResult:
            encoding = self.codec._describe_encoding(self.numel, self.dtype)[1]
            return start_op("all_to_all", sent, context).then(lambda x: self._sum_rows(x, encoding, self.numel, self.dtype))

        return start

    def _sum_rows(self, received: Tensor, encoding: Encoding, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode the slices that this rank has received, by sender, and add them in the order of ranks.

        Some senders' at a time: those of all ranks, decoded, are as large as the unit's buffer.
        """
        tensors, rows_each = unpack_bytes(received, encoding), len(received) // self.size  # several rows under vmap

        def decode(rows: Sequence[Tensor]) -> Tensor:
            decoded = self.codec._decode_slices(rows, numel, dtype)
            return decoded if len(rows[0]) == rows_each else decoded.reshape(-1, rows_each * numel).sum(0)

        senders = -(-self.size // _MOST_DECODES)
        first, *rest = zip(*(x.split(senders * rows_each) for x in tensors), strict=True)
        total = decode(first)
        for rows in rest:
            total = total + decode(rows)
        return total / self.size if self.op == "mean" else total


_MOST_DECODES = 4
"""The most calls of a decoder for one reduction: each decodes the slices of as many ranks as that takes."""


@dataclass(frozen=True)
class Replicas(_Collective):
    """The ranks of an axis that hold equal slices; gradients are all-reduced."""

    @property
    def changes_values(self) -> bool:
        return False

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        return vary(x, self.axis_in(transit), reduce=self.op, label=transit.label)

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        return unvary(grad, self.axis_in(transit), reduce=self.op, label=transit.label)

    def start_transpose(self, names: Names) -> StartStep | None:
        context, op = self.context(names, reduces=True), f"unvary_{self.op}"
        return lambda x, out: start_op(op, x, context, None if _torch.is_tracing() else x)  # in place


@dataclass(frozen=True)
class Encode(Stage):
    """The encoding of a slice by a codec, as bytes. Its derivative is that of a cast."""

    codec: Codec
    dtypes: Dtypes
    """The dtypes in which the unit is computed with, and its gradients are reduced."""

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        raw, transit.encoding = pack_bytes(self.codec._encode_slice(x))
        return raw

    def linear(self) -> Stage | None:
        return Move(None, self.dtypes.param, self.dtypes.reduce, self.dtypes.reduce)


@dataclass(frozen=True)
class Decode(Stage):
    """The decoding of all slices, end to end, to the buffer."""

    codec: Codec
    num_slices: int
    numel: int
    """The elements of a slice."""
    dtype: torch.dtype
    encoding: Encoding | None = None
    """The form of a slice that is at rest in the codec."""

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        encoding = self.encoding or transit.encoding
        assert encoding is not None
        x = x.clone() if self.encoding is not None and self.num_slices == 1 else x  # of the shard, which a codec may return
        return self.codec._decode_slices(unpack_bytes(x.view(self.num_slices, -1), encoding), self.numel, self.dtype)

    def linear(self) -> Stage | None:
        return None


@dataclass(frozen=True)
class Bytes(Stage):
    """The bytes of a slice whose parameters have several dtypes."""

    layout: MixedLayout

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        if self.layout.num_slices == 1 or self.layout.index is None:  # nobody's slice, on simulated ranks
            return x
        transit.shape = x.shape
        return self.layout.encode(x)

    def apply_out(self, x: Tensor, transit: Transit, out: Tensor | None) -> Tensor:
        return self.layout.encode(x)  # also of one slice


@dataclass(frozen=True)
class Join(Stage):
    """The buffer of several dtypes from the bytes of all slices; in data flow it has a dtype with the values of all of them."""

    layout: MixedLayout

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        return x.to(self.layout.wide) if transit.shape is None else self.layout.widen(x, transit.shape)

    def apply_out(self, x: Tensor, transit: Transit, out: Tensor | None) -> Tensor:
        if not self.layout.is_padded:
            return x
        return self.layout.join(x) if out is None else self.layout.join_into(x, out)


# --- Stages as constants: what a graph of Dynamo's holds of them ---

Constants = tuple[tuple[Any, ...], ...]


def to_constants(stages: Sequence[Stage]) -> Constants:
    """Return linear stages as tuples of constants, for Dynamo. Inverse of `from_constants`."""
    out: list[tuple[Any, ...]] = []
    for stage in stages:
        if isinstance(stage, Bytes | Join):
            out.append((type(stage).__name__, stage.layout.runs, stage.layout.num_slices, stage.layout.index))
        else:
            out.append((type(stage).__name__, *(getattr(stage, name) for name in type(stage).__match_args__)))
    return tuple(out)


def from_constants(constants: Constants) -> tuple[Stage, ...]:
    """Return the stages of `to_constants`."""
    made = ((Stage.kinds[name], values) for name, *values in constants)
    return tuple(kind(MixedLayout(*values)) if issubclass(kind, Bytes | Join) else kind(*values) for kind, values in made)
