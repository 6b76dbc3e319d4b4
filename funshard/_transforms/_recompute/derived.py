"""The functions that are derived from a function of tensors: its gradient, its tangent, and the batch of it.

Each is a function of tensors again, from which others are derived in turn. Those of a `SlicedFunction` are sliced as it is:

    function      shared argument            sliced argument      summed result          joined result
    its gradient  summed gradient            joined gradient      shared cotangent       sliced cotangent
    its tangent   shared, and its tangent    sliced, and the same summed tangent         joined tangent
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ... import _torch

__all__ = ["SlicedFunction", "SlicedVjp", "TensorFunction", "Vjp", "make_batched", "make_jvp", "make_vjp"]

TensorFunction = Callable[..., tuple[Tensor, ...]]
"""A function from tensors to tensors."""
Dims = tuple[int | None, ...]
"""For each argument or result the dimension along which it is sliced, None for one that all slices share or add up to."""


def make_vjp(fn: TensorFunction, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> Vjp | SlicedVjp:
    """Return ``(*xs, *cotangents) -> gradients`` of the wanted arguments, from the cotangents that are given."""
    if not isinstance(fn, SlicedFunction):
        return Vjp(fn, wanted, given)
    in_dims = *fn.in_dims, *itertools.compress(fn.out_dims, given)
    parts = [Vjp(part, wanted, given) for part in fn.parts]
    return SlicedVjp(parts, fn.sizes, in_dims, tuple(itertools.compress(fn.in_dims, wanted)))


def make_jvp(fn: TensorFunction, given: Sequence[bool], differentiable: Sequence[bool]) -> TensorFunction:
    """Return ``(*xs, *tangents) -> tangents`` of the differentiable results, from the tangents that are given."""
    if not isinstance(fn, SlicedFunction):
        return _make_jvp(fn, given, differentiable)
    in_dims = *fn.in_dims, *itertools.compress(fn.in_dims, given)
    parts = [_make_jvp(part, given, differentiable) for part in fn.parts]
    return SlicedFunction(parts, fn.sizes, in_dims, tuple(itertools.compress(fn.out_dims, differentiable)))


def make_batched(fn: TensorFunction, dims: Dims, randomness: str) -> TensorFunction:
    """Return the ``torch.vmap`` of ``fn`` over these dimensions of its arguments; results are batched in dimension 0."""
    if not isinstance(fn, SlicedFunction):
        return lambda *xs: torch.vmap(fn, dims, randomness=randomness)(*xs)
    pairs = zip(fn.in_dims, dims, strict=True)
    in_dims = tuple(d if d is None or batch is None or d < batch else d + 1 for d, batch in pairs)
    parts = [make_batched(part, dims, randomness) for part in fn.parts]
    return SlicedFunction(parts, fn.sizes, in_dims, tuple(d if d is None else d + 1 for d in fn.out_dims))


def _restrict_arguments(fn: TensorFunction, xs: Sequence[Tensor], free: Sequence[bool], out: Sequence[bool]) -> TensorFunction:
    """Return ``fn`` as a function of its free arguments, with only the wanted results."""

    def restricted(*free_xs: Tensor) -> tuple[Tensor, ...]:
        values = iter(free_xs)
        results = fn(*(next(values) if is_free else x for x, is_free in zip(xs, free, strict=True)))
        return tuple(result for result, is_wanted in zip(results, out, strict=True) if is_wanted)

    return restricted


@dataclass(frozen=True)
class Vjp:
    """``(*xs, *cotangents) -> gradients`` of the wanted arguments, from the cotangents that are given."""

    fn: TensorFunction
    wanted: tuple[bool, ...]
    given: tuple[bool, ...]

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if not _torch.current_level() and not _torch.is_in_forward_ad():
            xs = (x for x, wanted in zip(operands, self.wanted, strict=False) if wanted)
            return tuple(
                torch.zeros_like(x) if g is None else g for x, g in zip(xs, self.run_by_autograd(operands), strict=True)
            )
        part, free, cotangents = self._split(operands)
        pullback = torch.func.vjp(part, *free)[1]
        # with gradients off, the backwards of SiLU and others are kernels without a forward-mode rule
        with torch.set_grad_enabled(torch.is_grad_enabled() or _torch.is_in_forward_ad()):
            return pullback(cotangents)

    def run_by_autograd(self, operands: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the same by plain autograd, which frees as it goes: below all transforms. None stands for zero."""
        part, free, cotangents = self._split(operands)
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in operands)  # this derivative is differentiated
        with torch.enable_grad():
            free = [x.view_as(x) if recorded and x.requires_grad else x.detach().requires_grad_() for x in free]
            pairs = [(out, g) for out, g in zip(part(*free), cotangents, strict=True) if out.requires_grad]
            if not pairs:
                return (None,) * len(free)
            outs = [get_gradient_edge(out) for out, _ in pairs]
            cotangents = tuple(g for _, g in pairs)
            pairs.clear()  # frees the results, which are not read
            return torch.autograd.grad(outs, free, cotangents, create_graph=recorded, allow_unused=True)

    def _split(self, operands: Sequence[Tensor]) -> tuple[TensorFunction, list[Tensor], tuple[Tensor, ...]]:
        """Return the function of the wanted arguments, these arguments, and the cotangents."""
        xs, cotangents = operands[: len(self.wanted)], operands[len(self.wanted) :]
        part = _restrict_arguments(self.fn, xs, self.wanted, self.given)
        return part, [x for x, wanted in zip(xs, self.wanted, strict=True) if wanted], tuple(cotangents)


def _make_jvp(fn: TensorFunction, given: Sequence[bool], differentiable: Sequence[bool]) -> TensorFunction:
    """Return the jvp of a function that is not a `SlicedFunction`, as `make_jvp` does."""

    def jvp(*operands: Tensor) -> tuple[Tensor, ...]:
        if not any(differentiable):  # torch.func.jvp asks for results
            return ()
        xs, tangents = operands[: len(given)], operands[len(given) :]
        primals = tuple(x for x, is_given in zip(xs, given, strict=True) if is_given)
        return torch.func.jvp(_restrict_arguments(fn, xs, given, differentiable), primals, tangents)[1]

    return jvp


class SlicedFunction:
    """A function of tensors that runs on one slice of its arguments after another, and concatenates or sums the results.

    Each part is a function of one slice. Of its results, some are joined again, and the others are added up: those of
    16 bits in float32. What is alive is the sums, and what one part needs.

    Args:
        parts: The functions of the slices, with the same arguments and results.
        sizes: The length of each slice.
        in_dims: For each argument the dimension along which it is sliced, None for one that all parts share.
        out_dims: For each result the dimension along which it is joined, None for one that is added up.
    """

    def __init__(self, parts: Sequence[TensorFunction], sizes: Sequence[int], in_dims: Dims, out_dims: Dims) -> None:
        self.parts, self.sizes, self.in_dims, self.out_dims = parts, sizes, in_dims, out_dims

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        results = self._combine(part(*given) for part, given in self._slices(xs))
        return tuple(result for result in results if result is not None)

    def _slices(self, xs: Sequence[Tensor]) -> Iterator[tuple[TensorFunction, list[Tensor]]]:
        """Yield each part with its arguments."""
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part, [x if d is None else x.narrow(d, start, size) for x, d in zip(xs, self.in_dims, strict=True)]
            start += size

    def _combine(self, outs: Iterator[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Return the joined slices and the sums of the parts' results. None stands for zero; joined results are all given."""
        sums: list[Tensor | None] = [None] * len(self.out_dims)
        dtypes: list[torch.dtype | None] = [None] * len(self.out_dims)
        slices: list[list[Tensor]] = [[] for _ in self.out_dims]
        for out in outs:
            for k, (x, dim) in enumerate(zip(out, self.out_dims, strict=True)):
                if dim is not None:
                    assert x is not None
                    slices[k].append(x)
                elif x is not None:
                    dtypes[k], total = x.dtype, sums[k]
                    if total is None:  # a copy: what a part gives may be one of its arguments
                        sums[k] = x.to(torch.float32 if x.dtype in _HALF else x.dtype, copy=True)
                    else:
                        sums[k] = total + x if _torch.any_tracked((total, x)) else total.add_(x)
            out = x = None  # frees the gradients of one part before the next one runs
        added = [
            total if dtype is None or total is None else total.to(dtype) for total, dtype in zip(sums, dtypes, strict=True)
        ]
        return [total if dim is None else torch.cat(x, dim) for total, x, dim in zip(added, slices, self.out_dims, strict=True)]


_HALF = (torch.float16, torch.bfloat16)


class SlicedVjp(SlicedFunction):
    """The gradient of a `SlicedFunction`: it runs the gradient of each slice in turn."""

    def run_by_autograd(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the same by plain autograd, as `Vjp.run_by_autograd` does."""
        return self._combine(self._run_part(part, given) for part, given in self._slices(operands))

    def _run_part(self, part: TensorFunction, given: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of one slice, with zeros for those that are to be joined."""
        assert isinstance(part, Vjp)
        wanted = itertools.compress(given, part.wanted)
        triples = zip(part.run_by_autograd(given), wanted, self.out_dims, strict=True)
        return [torch.zeros_like(x) if grad is None and dim is not None else grad for grad, x, dim in triples]
