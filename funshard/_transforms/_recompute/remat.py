"""remat: a function that keeps only its arguments for its derivatives and runs again for each (jax.checkpoint).

One autograd Function whose every rule is itself, applied to a function derived from the one before: its gradient is the
vjp, its tangent the jvp, its batched form the vmap. So it holds at every order and in every stack of transforms, and at
every order what stays alive is the arguments and what one run of the function needs while it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge

from ... import _torch
from ..._spec.remat import Remat, Save
from ..saved_tensors import mark_graph_freed
from .function import RecomputedFunction
from .regions import mark_region

__all__ = ["call_recomputed", "remat"]

Args = ParamSpec("Args")
Result = TypeVar("Result")
Flat = Callable[..., tuple[Tensor, ...]]
"""A function from tensors to tensors."""


def remat(f: Callable[Args, Result], *, save: Save | None = None) -> Callable[Args, Result]:
    """``f``, but its derivatives keep only the arguments, and run it again: equal to ``f`` in everything but memory.

    jax.checkpoint for torch.func, where torch.utils.checkpoint fails: under grad, vjp, jvp, vmap, plain autograd and any
    stack of them, at any order. Random numbers, autocast and ranks that vmap simulates are in every run those of the
    first. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.

    The arguments are all tensors that can be reached from ``f`` and what it is given: by closures, defaults and attributes
    of functions, containers, attributes of objects and modules, context variables, and the ranks of a spec on simulated ones.
    What ``f`` changes in these objects it changes once: each later run finds them as the first one did, and tensors that it
    leaves in them are results. Python's and NumPy's random numbers are those of the first run, too. Inside torch.compile it
    is ``f``: the compiler decides what to keep, and `compile` computes again for derivatives what ``save`` does not.

    ``save`` says what else is kept of the first run, and not computed again for the gradient: see `Remat`. It never changes
    a number. It is for the gradient of plain autograd, of `grad`, and of one torch.func.grad or vjp; a stack of transforms,
    torch.vmap around it, forward mode and a second derivative compute everything again. So do collectives, which all ranks
    run or none, views, batch norm, and what changes its arguments in place.

    Out of reach are globals, attributes of classes, defaults of context variables, parameters that a module lists beside
    those it registers, and what objects of C keep to themselves, such as the elements of a
    NumPy array: a tensor of the running computation there is a constant, what is changed there is changed in every run.

    >>> import torch, funshard as fs
    >>> torch.func.grad(torch.func.grad(fs.remat(torch.sin)))(torch.tensor(0.0))
    tensor(-0.)

    Raises RuntimeError where ``f`` changes a tensor in place that it was handed (but by ``.data``, which nobody sees), reads
    parameters of a module or of a functional_call around it, which are none of its arguments, or does not do the same in
    every run: results of other shapes, other values left behind, other random numbers; or changes in place what it is to
    save. TypeError for an object that it changes, or that holds tensors, and that cannot be made anew, as an iterator, and
    for another ``save`` than `Remat` takes. ValueError for names to save of which it has none.
    """
    keeps = Remat(save)
    name = f"remat of {getattr(f, '__qualname__', type(f).__name__)}"

    @functools.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if torch.compiler.is_compiling():
            with mark_region(keeps, name):
                return f(*args, **kwargs)
        if not _torch.needs_graph():
            return f(*args, **kwargs)
        roots = {"the function": f, "args": args, "kwargs": kwargs}
        return call_recomputed(lambda f, args, kwargs: f(*args, **kwargs), name, roots, remat=keeps)

    return run


def call_recomputed(
    call: Callable[..., Any], name: str, roots: dict[str, Any], own: Iterable[nn.Module] = (), *, remat: Remat
) -> Any:
    """``call(*roots.values())``, of which only the tensors are kept that can be reached from the roots.

    And what ``remat`` says. ``name`` is what errors call it, and the roots have the names of their keys there. ``own`` are
    roots that are modules, of which ``call`` brings the parameters, buffers and forward.
    """
    runs = RecomputedFunction(call, name, roots, own, remat)
    given = map(_torch.unwrap_dead, runs.tensors)  # a list of activations, say, that transforms before have left
    operands = [x.clone() if _torch.unwrap(x).is_inference() else x for x in given]  # which autograd would not save
    return runs.result(_Remat.apply(runs, *operands))


class _Remat(_torch.Function):
    """A function of tensors, all of whose derivatives are functions of the same tensors, run anew."""

    @staticmethod
    def forward(fn: Flat, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        xs = tuple(x.detach() for x in xs)  # for a run that is in grad mode, as the caller is
        # an argument that comes back is another tensor than the argument
        return tuple(r.view_as(r) if any(r is x for x in xs) else r for r in fn(*xs))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.fn = inputs[0]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.kinds = tuple(_continuous(x) for x in output)  # pyright: ignore[reportAttributeAccessIssue]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = tuple(ctx.needs_input_grad[1:])
        given = tuple(grad is not None for grad in grads)
        if not any(given) or not any(wanted):
            return (None,) * (1 + len(wanted))
        vjp = _Vjp(ctx.fn, wanted, given)
        operands = *_saved(ctx), *(g for g in grads if g is not None)
        last = _torch.current_level() == 1 and _torch.is_last_backward(1)
        if last or not _torch.current_level():
            plain = [_torch.unwrap_to_level(x, 0) for x in operands]
            recorded = last or torch.is_grad_enabled()
            if not (recorded and any(_torch.is_tracked(x) for x in plain)):  # nobody comes back to this derivative
                running = isinstance(ctx.fn, RecomputedFunction) and not _torch.in_forward_ad()
                with _torch.below_transforms(), ctx.fn.last_run() if running else contextlib.nullcontext():
                    found = vjp.plain(plain)
                return None, *_spread(_with_end(operands, found) if last else found, wanted)
        return None, *_spread(_Remat.apply(vjp, *operands), wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = tuple(t is not None for t in tangents)
        operands = *_saved(ctx), *(t for t in tangents if t is not None)
        return _spread(_Remat.apply(_Jvp(ctx.fn, given, ctx.kinds), *operands), ctx.kinds)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: Flat, *xs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = _Remat.apply(_Vmap(fn, tuple(in_dims[1:]), info.randomness), *xs)
        return out, (0,) * len(out)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """What was saved. Reading it may push hooks for what the node saves itself, which torch.func refuses."""
    before = _torch.current_pack_hook()
    tensors = ctx.saved_tensors
    while _torch.current_pack_hook() is not before:
        _torch.pop_saved_tensor_hooks()
    return tensors


def _with_end(operands: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients that nobody can differentiate any more in the transform that these operands are of."""
    of = next((x for x in operands if x.requires_grad), None)
    some = [g for g in grads if g is not None]
    values = iter(some if of is None else mark_graph_freed(of, some))
    return [None if g is None else next(values) for g in grads]


def _continuous(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _spread(some: Iterable[Tensor | None], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """One for each True, None for each False."""
    values = iter(some)
    return tuple(next(values) if there else None for there in mask)


def _partial(fn: Flat, xs: Sequence[Tensor], free: Sequence[bool], out: Sequence[bool]) -> Flat:
    """``fn`` of its free arguments alone, and of its results those that are wanted."""

    def part(*some: Tensor) -> tuple[Tensor, ...]:
        values = iter(some)
        results = fn(*(next(values) if is_free else x for x, is_free in zip(xs, free, strict=True)))
        return tuple(result for result, is_wanted in zip(results, out, strict=True) if is_wanted)

    return part


@dataclass(frozen=True)
class _Vjp:
    """``(*xs, *cotangents) -> gradients``: of the wanted arguments, from cotangents of the results that have one."""

    fn: Flat
    wanted: tuple[bool, ...]
    given: tuple[bool, ...]

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if not _torch.current_level() and not _torch.in_forward_ad():
            xs = (x for x, wanted in zip(operands, self.wanted, strict=False) if wanted)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(xs, self.plain(operands), strict=True))
        part, free, cotangents = self._split(operands)
        pullback = torch.func.vjp(part, *free)[1]
        # with gradients off, backwards of SiLU and others are kernels that forward-mode AD does not know
        with torch.set_grad_enabled(torch.is_grad_enabled() or _torch.in_forward_ad()):
            return pullback(cotangents)

    def plain(self, operands: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The same by plain autograd, which frees as it goes: beneath all transforms. None for zero."""
        part, free, cotangents = self._split(operands)
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in operands)  # a derivative of this one is under way
        with torch.enable_grad():
            free = [x.view_as(x) if recorded and x.requires_grad else x.detach().requires_grad_() for x in free]
            pairs = [(out, g) for out, g in zip(part(*free), cotangents, strict=True) if out.requires_grad]
            if not pairs:
                return (None,) * len(free)
            outs = [get_gradient_edge(out) for out, _ in pairs]
            cotangents = tuple(g for _, g in pairs)
            pairs.clear()  # the results themselves, which nobody reads
            return torch.autograd.grad(outs, free, cotangents, create_graph=recorded, allow_unused=True)

    def _split(self, operands: Sequence[Tensor]) -> tuple[Flat, list[Tensor], tuple[Tensor, ...]]:
        xs, cotangents = operands[: len(self.wanted)], operands[len(self.wanted) :]
        part = _partial(self.fn, xs, self.wanted, self.given)
        return part, [x for x, wanted in zip(xs, self.wanted, strict=True) if wanted], tuple(cotangents)


@dataclass(frozen=True)
class _Jvp:
    """``(*xs, *tangents) -> tangents``: of the continuous results, from tangents of the arguments that have one."""

    fn: Flat
    given: tuple[bool, ...]
    kinds: tuple[bool, ...]

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if not any(self.kinds):  # torch.func.jvp asks for results
            return ()
        xs, tangents = operands[: len(self.given)], operands[len(self.given) :]
        moved = tuple(x for x, given in zip(xs, self.given, strict=True) if given)
        return torch.func.jvp(_partial(self.fn, xs, self.given, self.kinds), moved, tangents)[1]


@dataclass(frozen=True)
class _Vmap:
    """The function of arguments that are batched in these dimensions; its results are batched in the first one."""

    fn: Flat
    in_dims: tuple[int | None, ...]
    randomness: str

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return torch.vmap(self.fn, self.in_dims, randomness=self.randomness)(*operands)
