"""remat: a function whose derivatives keep only its arguments and run it again (jax.checkpoint).

One autograd Function whose every rule is itself, applied to a function derived from the previous one: its gradient is the
vjp, its tangent the jvp, its batched form the vmap. So it holds at every order and in every stack of transforms. At every
order what stays alive is the arguments, and what one run of the function needs while it runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge

from ... import _torch
from ..._spec.options import Remat, Save
from ..saved_tensors import mark_graph_freed
from .function import RecomputedFunction
from .saved_results import mark_region

# --- The functions that are derived from a function of tensors: its gradient, its tangent, and the batch of it ---
#
# Each is a function of tensors again, from which others are derived in turn. Those of a `SlicedFunction` are sliced as it is:
#
#     function      shared argument            sliced argument      summed result          joined result
#     its gradient  summed gradient            joined gradient      shared cotangent       sliced cotangent
#     its tangent   shared, and its tangent    sliced, and the same summed tangent         joined tangent

TensorFunction = Callable[..., tuple[Tensor, ...]]
"""A function from tensors to tensors."""
Dims = tuple[int | None, ...]
"""For each argument or result the dimension along which it is sliced, None for one that all slices share or add up to."""


def make_vjp(fn: TensorFunction, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> TensorFunction:
    """Return the `Vjp` of a function, slice by slice if that is sliced."""
    if not isinstance(fn, SlicedFunction):
        return Vjp(fn, wanted, given)
    in_dims = *fn.in_dims, *itertools.compress(fn.out_dims, given)
    return fn.derive(lambda part: Vjp(part, wanted, given), in_dims, itertools.compress(fn.in_dims, wanted))


def make_jvp(fn: TensorFunction, given: Sequence[bool], differentiable: Sequence[bool]) -> TensorFunction:
    """Return ``(*xs, *tangents) -> tangents`` of the differentiable results, from the tangents that are given."""
    if isinstance(fn, SlicedFunction):
        in_dims = *fn.in_dims, *itertools.compress(fn.in_dims, given)
        out_dims = itertools.compress(fn.out_dims, differentiable)
        return fn.derive(lambda part: make_jvp(part, given, differentiable), in_dims, out_dims)

    def jvp(*operands: Tensor) -> tuple[Tensor, ...]:
        if not any(differentiable):  # torch.func.jvp asks for results
            return ()
        xs, tangents = operands[: len(given)], operands[len(given) :]
        primals = tuple(itertools.compress(xs, given))
        return torch.func.jvp(_restrict_arguments(fn, xs, given, differentiable), primals, tangents)[1]

    return jvp


def make_batched(fn: TensorFunction, dims: Dims, randomness: str) -> TensorFunction:
    """Return the ``torch.vmap`` of ``fn`` over these dimensions of its arguments; results are batched in dimension 0."""
    if not isinstance(fn, SlicedFunction):
        return lambda *xs: torch.vmap(fn, dims, randomness=randomness)(*xs)
    pairs = zip(fn.in_dims, dims, strict=True)
    in_dims = (d if d is None or batch is None or d < batch else d + 1 for d, batch in pairs)
    out_dims = (d if d is None else d + 1 for d in fn.out_dims)
    return fn.derive(lambda part: make_batched(part, dims, randomness), in_dims, out_dims)


def _restrict_arguments(fn: TensorFunction, xs: Sequence[Tensor], free: Sequence[bool], out: Sequence[bool]) -> TensorFunction:
    """Return ``fn`` as a function of its free arguments, with only the wanted results."""

    def restricted(*free_xs: Tensor) -> tuple[Tensor, ...]:
        values = iter(free_xs)
        return tuple(
            itertools.compress(fn(*(next(values) if is_free else x for x, is_free in zip(xs, free, strict=True))), out)
        )

    return restricted


@dataclass(frozen=True)
class Vjp:
    """``(*xs, *cotangents) -> gradients`` of the wanted arguments, from the cotangents that are given."""

    fn: TensorFunction
    wanted: tuple[bool, ...]
    given: tuple[bool, ...]

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if not _torch.current_level() and not _torch.is_in_forward_ad():
            pairs = zip(itertools.compress(operands, self.wanted), self.run_by_autograd(operands), strict=True)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in pairs)
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
        xs, cotangents = operands[: len(self.wanted)], operands[len(self.wanted) :]
        return (
            _restrict_arguments(self.fn, xs, self.wanted, self.given),
            [*itertools.compress(xs, self.wanted)],
            tuple(cotangents),
        )


class SlicedFunction:
    """A function of tensors that runs on one slice of its arguments after another, and joins or adds up the results.

    Sums of 16 bits are in float32. What is alive is the sums, and what one part needs. ``parts`` are the functions of slices of
    these ``sizes``; the dims are those along which arguments are sliced (None: shared) and results joined (None: added up).
    """

    def __init__(self, parts: Sequence[TensorFunction], sizes: Sequence[int], in_dims: Dims, out_dims: Dims) -> None:
        self.parts, self.sizes, self.in_dims, self.out_dims = parts, sizes, in_dims, out_dims

    def derive(
        self, make: Callable[[TensorFunction], TensorFunction], in_dims: Iterable[int | None], out_dims: Iterable[int | None]
    ) -> SlicedFunction:
        """Return the function whose parts are made of the parts of this one."""
        return SlicedFunction([*map(make, self.parts)], self.sizes, tuple(in_dims), tuple(out_dims))

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._combine(part(*given) for part, given in self._slices(xs)))

    def _slices(self, xs: Sequence[Tensor]) -> Iterator[tuple[TensorFunction, list[Tensor]]]:
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part, [x if d is None else x.narrow(d, start, size) for x, d in zip(xs, self.in_dims, strict=True)]
            start += size

    def _combine(self, outs: Iterator[Sequence[Tensor]]) -> Iterator[Tensor]:
        """Yield the joined slices and the sums of the parts' results."""
        sums: list[Tensor | None] = [None] * len(self.out_dims)
        dtypes: list[torch.dtype | None] = [None] * len(self.out_dims)
        slices: list[list[Tensor]] = [[] for _ in self.out_dims]
        for out in outs:
            for k, (x, dim) in enumerate(zip(out, self.out_dims, strict=True)):
                dtypes[k], total = x.dtype, sums[k]
                if dim is not None:
                    slices[k].append(x)
                elif total is None:  # a copy: what a part gives may be one of its arguments
                    sums[k] = x.to(torch.float32 if x.dtype in _HALF else x.dtype, copy=True)
                else:
                    sums[k] = total + x if _torch.any_tracked((total, x)) else total.add_(x)
            out = x = None  # frees the gradients of one part before the next one runs
        for total, dtype, parts, dim in zip(sums, dtypes, slices, self.out_dims, strict=True):
            yield torch.cat(parts, dim or 0) if total is None else total.to(dtype)


_HALF = (torch.float16, torch.bfloat16)

# --- The autograd Function, and remat ---

Args = ParamSpec("Args")
Result = TypeVar("Result")


def remat(f: Callable[Args, Result], *, save: Save | None = None) -> Callable[Args, Result]:
    """Wrap a function so that its derivatives keep only its arguments, and run it again (jax.checkpoint).

    The results are the same under any stack of torch.func transforms, plain autograd and vmap, at any order. Arguments are
    the tensors in what ``f`` is given, in its closure, in dicts of context variables, and in objects there that pickle copies;
    `torch.func.functional_call` makes a module's parameters arguments. Each later run finds these as the first one did, with
    its random numbers; ``f`` changes them once. All else is a constant, such as globals, which every run changes.
    Inside torch.compile the wrapper is ``f``, and `compile` recomputes. What else it does not see: examples/guide/limits.md.
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.

    Args:
        f: The function.
        save: What the first run saves for one gradient, see `Remat`. It never changes a number.

    Returns:
        A function with the signature and the results of ``f``.

    Raises:
        RuntimeError: ``f`` changes in place a tensor that it was given (but by ``.data``), reads parameters of a module or
            functional_call around it, or does not do the same in every run.
        TypeError: pickle cannot copy an argument or a result; or ``f`` changes an argument otherwise than in lists, dicts, sets
            and attributes.
        ValueError: ``f`` gives none of the names to save.

    Example:
        >>> import torch, funshard as fs
        >>> torch.func.grad(torch.func.grad(fs.remat(torch.sin)))(torch.tensor(0.0))
        tensor(-0.)
    """
    what = Remat(save)
    name = f"remat of {getattr(f, '__qualname__', type(f).__name__)}"

    @_torch.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if _torch.is_in_graph():
            with mark_region(what):
                return f(*args, **kwargs)
        if not _torch.needs_graph():
            return f(*args, **kwargs)
        roots = {f"args[{i}]": x for i, x in enumerate(args)} | {f"kwargs[{key!r}]": x for key, x in kwargs.items()}
        count, keys = len(args), tuple(kwargs)

        def call(f: Callable[..., Result], *xs: Any) -> Result:
            return f(*xs[:count], **dict(zip(keys, xs[count:], strict=True)))

        return call_recomputed(call, name, {"the function": f, **roots}, remat=what)

    return run


def call_recomputed(
    call: Callable[..., Any], name: str, roots: dict[str, Any], modules: Sequence[nn.Module] = (), *, remat: Remat
) -> Any:
    """Return ``call(*roots.values())``, and keep only tensors that can be reached from the roots, and what ``remat`` saves.

    ``name`` and the keys of ``roots`` are what errors call them; ``modules`` are those of `RecomputedFunction`. If
    ``call`` has a context manager ``last_run``, the last run and its backward are within that.
    """
    fn = RecomputedFunction(call, name, roots, modules, remat)
    outputs, operands = apply_recomputed(fn, fn.tensors)
    return fn.finish(_protect_aliases(outputs, operands))


def apply_recomputed(fn: TensorFunction, xs: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return ``fn(*xs)``, whose derivatives run ``fn`` again, and the tensors that they keep."""
    tensors = map(_torch.unwrap_dead, xs)  # a list of activations, say, that transforms before have left
    operands = [x.clone() if _torch.unwrap(x).is_inference() else x for x in tensors]  # which autograd would not save
    return _RecomputeFunction.apply(fn, *operands), operands


def _protect_aliases(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs; one in the storage of another or of an operand as a view that torch lets no one change in place.

    Each output is differentiated by itself, so that a change in one would be missing in the others' gradients.
    """
    inner = [_torch.unwrap(x) for x in (*outputs, *operands)]
    storages = [_torch.storage_id(x) if x.layout is torch.strided and x.numel() else None for x in inner]
    pairs = zip(outputs, storages, strict=False)  # as what chunk and split return
    return [x.unsqueeze(0).unbind(0)[0] if key is not None and storages.count(key) > 1 else x for x, key in pairs]


class _RecomputeFunction(_torch.Function):
    """A function of tensors whose derivatives are functions of the same tensors, and run it again."""

    @staticmethod
    def forward(fn: TensorFunction, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        xs = tuple(x.detach() for x in xs)  # for a run that is in grad mode, as the caller is
        # autograd must not get an argument itself as a result
        return tuple(r.view_as(r) if any(r is x for x in xs) else r for r in fn(*xs))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.fn = fn = inputs[0]  # pyright: ignore[reportAttributeAccessIssue]
        constants = (isinstance(fn, RecomputedFunction) and fn.constants) or (False,) * len(output)
        ctx.mark_non_differentiable(*itertools.compress(output, constants))
        ctx.differentiable = tuple(  # pyright: ignore[reportAttributeAccessIssue]
            (x.is_floating_point() or x.is_complex()) and not constant for x, constant in zip(output, constants, strict=True)
        )
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = tuple(ctx.needs_input_grad[1:])
        given = tuple(grad is not None for grad in grads)
        if not any(given) or not any(wanted):
            return (None,) * (1 + len(wanted))
        vjp = make_vjp(ctx.fn, wanted, given)
        operands = *_read_saved(ctx), *(g for g in grads if g is not None)
        last = _torch.current_level() == 1 and _torch.is_last_backward(1)
        if last or not _torch.current_level():
            plain = [_torch.unwrap_to_level(x, 0) for x in operands]
            recorded = last or torch.is_grad_enabled()
            if not (recorded and any(_torch.has_derivative(x) for x in plain)):  # this derivative is not differentiated
                is_first_order = isinstance(ctx.fn, RecomputedFunction) and not _torch.is_in_forward_ad()
                with _torch.below_transforms(), ctx.fn.last_run() if is_first_order else contextlib.nullcontext():
                    found = vjp.run_by_autograd(plain) if isinstance(vjp, Vjp) else vjp(*plain)
                return None, *_fill_mask(_mark_freed(operands, found) if last else found, wanted)
        if isinstance(ctx.fn, RecomputedFunction):
            ctx.fn.check_second_derivative()
        return None, *_fill_mask(_RecomputeFunction.apply(vjp, *operands), wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = tuple(t is not None for t in tangents)
        operands = *_read_saved(ctx), *(t for t in tangents if t is not None)
        tangent_function = make_jvp(ctx.fn, given, ctx.differentiable)
        return _fill_mask(_RecomputeFunction.apply(tangent_function, *operands), ctx.differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: TensorFunction, *xs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dims, randomness = tuple(in_dims[1:]), info.randomness
        out = _RecomputeFunction.apply(make_batched(fn, dims, randomness), *xs)
        return out, (0,) * len(out)


def _read_saved(ctx: Any) -> tuple[Tensor, ...]:
    """Return what was saved. Reading it may push hooks for what the node saves itself, which torch.func refuses."""
    before = _torch.current_pack_hook()
    tensors = ctx.saved_tensors
    while _torch.current_pack_hook() is not before:
        _torch.pop_saved_tensor_hooks()
    return tensors


def _mark_freed(operands: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that raise where the transform of these operands would differentiate them."""
    of = next((x for x in operands if x.requires_grad), None)
    given = [g for g in grads if g is not None]
    values = iter(given if of is None else mark_graph_freed(of, given))
    return [None if g is None else next(values) for g in grads]


def _fill_mask(tensors: Iterable[Tensor | None], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the next tensor for each True, None for each False."""
    values = iter(tensors)
    return tuple(next(values) if is_given else None for is_given in mask)
