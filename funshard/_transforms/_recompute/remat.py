"""remat: a function whose derivatives keep only its arguments and run it again (jax.checkpoint).

One autograd Function whose every rule is itself, applied to a function derived from the previous one: its gradient is the
vjp, its tangent the jvp, its batched form the vmap. So it holds at every order and in every stack of transforms. At every
order what stays alive is the arguments, and what one run of the function needs while it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ... import _torch
from ..._spec.remat import Remat, Save
from ..saved_tensors import mark_graph_freed
from .derived import TensorFunction, make_batched, make_jvp, make_vjp
from .function import RecomputedFunction
from .regions import mark_region

__all__ = ["apply_recomputed", "call_recomputed", "remat"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


def remat(f: Callable[Args, Result], *, save: Save | None = None) -> Callable[Args, Result]:
    """Wrap a function so that its derivatives keep only its arguments, and run it again (jax.checkpoint).

    The results are the same under any stack of torch.func transforms, plain autograd and vmap, at any order. Arguments are
    all tensors that can be reached from ``f`` and what it is given: by closures, attributes, containers, context variables
    and modules, but for their parameters, which `torch.func.functional_call` makes arguments. Each later run finds these as
    the first one did, with its random numbers; ``f`` changes them once. Globals and attributes of classes are constants.
    Inside torch.compile the wrapper is ``f``, and `compile` recomputes. What else it does not see: examples/guide/limits.md.
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.

    Args:
        f: The function.
        save: What the first run saves for one gradient, see `Remat`. It never changes a number.

    Returns:
        A function with the signature and the results of ``f``.

    Raises:
        RuntimeError: ``f`` changes in place a tensor that it was given or that it saves (but by ``.data``), reads parameters
            of a module or functional_call around it, or does not do the same in every run.
        TypeError: ``f`` changes an object, or reaches tensors in one, that cannot be copied, such as an iterator; or it
            returns a generator.
        ValueError: ``f`` gives none of the names to save.

    Example:
        >>> import torch, funshard as fs
        >>> torch.func.grad(torch.func.grad(fs.remat(torch.sin)))(torch.tensor(0.0))
        tensor(-0.)
    """
    what = Remat(save)
    name = f"remat of {getattr(f, '__qualname__', type(f).__name__)}"

    @functools.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if torch.compiler.is_compiling():
            with mark_region(what, name):
                return f(*args, **kwargs)
        if not _torch.needs_graph():
            return f(*args, **kwargs)
        roots = {"the function": f, "args": args, "kwargs": kwargs}
        return call_recomputed(lambda f, args, kwargs: f(*args, **kwargs), name, roots, remat=what)

    return run


def call_recomputed(
    call: Callable[..., Any], name: str, roots: dict[str, Any], owned: Iterable[nn.Module] = (), *, remat: Remat
) -> Any:
    """Return ``call(*roots.values())``, and keep only tensors that can be reached from the roots, and what ``remat`` saves.

    ``name`` is what errors call it, and the keys of ``roots`` what they call its arguments. ``owned`` are roots that are
    modules, whose parameters, buffers and forward ``call`` sets itself. If ``call`` has a context manager ``last_run``, the
    last run and its backward are within that.
    """
    fn = RecomputedFunction(call, name, roots, owned, remat)
    outputs, operands = apply_recomputed(fn, fn.tensors)
    return fn.finish(_protect_aliases(outputs, operands))


def apply_recomputed(fn: TensorFunction, xs: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return ``fn(*xs)``, whose derivatives run ``fn`` again, and the tensors that they keep."""
    tensors = map(_torch.unwrap_dead, xs)  # a list of activations, say, that transforms before have left
    operands = [x.clone() if _torch.unwrap(x).is_inference() else x for x in tensors]  # which autograd would not save
    return _RecomputeFunction.apply(fn, *operands), operands


def _protect_aliases(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs; one in the memory of another or of an operand as a view that torch lets no one change in place.

    Each output is differentiated by itself, so that a change in one would be missing in the others' gradients.
    """
    out, memory = list(outputs), [_memory_of(x) for x in outputs]
    if not any(memory):
        return out
    taken = [*memory, *map(_memory_of, operands)]
    for i, mine in enumerate(memory):
        others = (other for k, other in enumerate(taken) if k != i)
        if mine and any(other and other[0] == mine[0] and other[1] < mine[2] and mine[1] < other[2] for other in others):
            out[i] = out[i].unsqueeze(0).unbind(0)[0]  # as what chunk and split return
    return out


def _memory_of(x: Tensor) -> tuple[int, int, int] | None:
    """Return the memory of a tensor's elements, None for none."""
    x = _torch.unwrap(x)
    return _torch.memory_range(x) if x.layout is torch.strided and x.numel() else None


class _RecomputeFunction(_torch.Function):
    """A function of tensors whose derivatives are functions of the same tensors, and run it again."""

    @staticmethod
    def forward(fn: TensorFunction, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        xs = tuple(x.detach() for x in xs)  # for a run that is in grad mode, as the caller is
        # autograd must not get an argument itself as a result
        return tuple(r.view_as(r) if any(r is x for x in xs) else r for r in fn(*xs))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.fn = inputs[0]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.differentiable = tuple(_is_differentiable(x) for x in output)  # pyright: ignore[reportAttributeAccessIssue]
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
            if not (recorded and any(_torch.is_tracked(x) for x in plain)):  # this derivative is not differentiated
                is_first_order = isinstance(ctx.fn, RecomputedFunction) and not _torch.is_in_forward_ad()
                with _torch.below_transforms(), ctx.fn.last_run() if is_first_order else contextlib.nullcontext():
                    found = vjp.run_by_autograd(plain)
                return None, *_fill_mask(_mark_freed(operands, found) if last else found, wanted)
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


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _fill_mask(tensors: Iterable[Tensor | None], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the next tensor for each True, None for each False."""
    values = iter(tensors)
    return tuple(next(values) if is_given else None for is_given in mask)
