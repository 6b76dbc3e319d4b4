"""remat: a function that keeps only its arguments for its derivatives and runs again for each (jax.checkpoint).

One autograd Function whose every rule is itself, applied to a function derived from the one before: its gradient is the
vjp, its tangent the jvp, its batched form the vmap. So it holds at every order and in every stack of transforms, and at
every order what stays alive is the arguments and what one run of the function needs while it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from . import _torch
from .mesh import Mesh, Simulated
from .saved import ended
from .spec import PartitionSpec

__all__ = ["Surroundings", "remat"]

Args = ParamSpec("Args")
Result = TypeVar("Result")
Flat = Callable[..., tuple[Tensor, ...]]
"""A function from tensors to tensors."""


def remat(f: Callable[Args, Result]) -> Callable[Args, Result]:
    """``f``, but its derivatives keep only the arguments, and run it again: equal to ``f`` in everything but memory.

    jax.checkpoint for torch.func, where torch.utils.checkpoint fails: under grad, vjp, jvp, vmap, plain autograd and any
    stack of them, at any order. Random numbers, autocast and ranks that vmap simulates are in every run those of the
    first. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.

    What is differentiated or batched has to come in by the arguments (any pytree of tensors and constants) and leave by
    the result: tensors that ``f`` closes over are constants, so are those that it stores elsewhere, and a spec on
    simulated ranks is an argument, too. ``f`` must compute the same in every run and must not change its arguments.
    Inside torch.compile it is ``f``: the compiler decides what to keep.

    >>> import torch, funshard as fs
    >>> torch.func.grad(torch.func.grad(fs.remat(torch.sin)))(torch.tensor(0.0))
    tensor(-0.)

    Raises TypeError for an argument or a result that hides tensors in a class that is no registered pytree node.
    """

    @functools.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if torch.compiler.is_compiling() or not _torch.differentiates():
            return f(*args, **kwargs)
        leaves, treedef = pytree.tree_flatten((args, kwargs))
        again = _Again(f, leaves, treedef)
        return again.result(_Remat.apply(again, *again.tensors(leaves)))

    return run


class _Remat(_torch.Function):
    """A function of tensors, all of whose derivatives are functions of the same tensors, run anew."""

    @staticmethod
    def forward(fn: Flat, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
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
        operands = *ctx.saved_tensors, *(g for g in grads if g is not None)
        last = _torch.level() == 1 and _torch.is_last_backward(1)
        if last or not _torch.level():
            plain = [_torch.seen_from(x, 0) for x in operands]
            recorded = last or torch.is_grad_enabled()
            if not (recorded and any(_torch.is_tracked(x) for x in plain)):  # nobody comes back to this derivative
                running = isinstance(ctx.fn, _Again) and not _torch.in_forward_ad()
                with _torch.beneath(), ctx.fn.last_run() if running else contextlib.nullcontext():
                    found = vjp.plain(plain)
                return None, *_spread(_with_end(operands, found) if last else found, wanted)
        return None, *_spread(_Remat.apply(vjp, *operands), wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = tuple(t is not None for t in tangents)
        operands = *ctx.saved_tensors, *(t for t in tangents if t is not None)
        return _spread(_Remat.apply(_Jvp(ctx.fn, given, ctx.kinds), *operands), ctx.kinds)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: Flat, *xs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = _Remat.apply(_Vmap(fn, tuple(in_dims[1:]), info.randomness), *xs)
        return out, (0,) * len(out)


def _with_end(operands: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients that nobody can differentiate any more in the transform that these operands are of."""
    of = next((x for x in operands if x.requires_grad), None)
    some = [g for g in grads if g is not None]
    values = iter(some if of is None else ended(of, some))
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
        if not _torch.level() and not _torch.in_forward_ad():
            xs = (x for x, wanted in zip(operands, self.wanted, strict=False) if wanted)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(xs, self.plain(operands), strict=True))
        part, free, cotangents = self._split(operands)
        return torch.func.vjp(part, *free)[1](cotangents)

    def plain(self, operands: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The same by plain autograd, which frees as it goes: beneath all transforms. None for zero."""
        part, free, cotangents = self._split(operands)
        again = torch.is_grad_enabled() and any(x.requires_grad for x in operands)  # a derivative of this one is under way
        with torch.enable_grad():
            free = [x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_() for x in free]
            pairs = [(out, g) for out, g in zip(part(*free), cotangents, strict=True) if out.requires_grad]
            if not pairs:
                return (None,) * len(free)
            outs, cotangents = zip(*pairs, strict=True)
            return torch.autograd.grad(outs, free, cotangents, create_graph=again, allow_unused=True)

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


_HOLE = object()
"""Where in a pytree a tensor is."""


class _Again:
    """``f`` as a function of the tensors among its arguments, the same in every run."""

    def __init__(self, f: Callable[..., Any], leaves: list[Any], treedef: pytree.TreeSpec) -> None:
        _check_open(leaves, "an argument")
        self._f, self._treedef = f, treedef
        self.last_run: Callable[[], contextlib.AbstractContextManager[None]] = getattr(f, "last_run", contextlib.nullcontext)
        """What to run it in where plain autograd runs it for its gradient, once and for all."""
        self._leaves = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._surroundings: Surroundings | None = None
        self._out: tuple[list[Any], pytree.TreeSpec] | None = None

    @staticmethod
    def tensors(leaves: list[Any]) -> list[Tensor]:
        """The operands of `_Remat`."""
        return [x for leaf in leaves for x in _tensors(leaf)]

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        values = iter(xs)
        leaves = [
            next(values) if leaf is _HOLE else _on_ranks(leaf, values) if isinstance(leaf, PartitionSpec) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._treedef)
        if self._surroundings is None:
            self._surroundings = Surroundings(xs)
            out = self._f(*args, **kwargs)
        else:
            with self._surroundings.again():
                out = self._f(*args, **kwargs)
        results, treedef = pytree.tree_flatten(out)
        _check_open(results, "a result")
        self._out = [_HOLE if isinstance(result, Tensor) else result for result in results], treedef
        return tuple(result for result in results if isinstance(result, Tensor))

    def result(self, tensors: Iterable[Tensor]) -> Any:
        """The result of ``f`` with these tensors in it."""
        assert self._out is not None
        values, (results, treedef) = iter(tensors), self._out
        return pytree.tree_unflatten([next(values) if r is _HOLE else r for r in results], treedef)


def _tensors(leaf: object) -> list[Tensor]:
    """The tensors in a leaf: itself, or the ranks that a spec is bound to."""
    if isinstance(leaf, PartitionSpec):
        axes = leaf.mesh.axes if leaf.mesh else ()
        return [axis.rank for _, axis in axes if isinstance(axis, Simulated)]
    return [leaf] if isinstance(leaf, Tensor) else []


def _on_ranks(spec: PartitionSpec, ranks: Iterator[Tensor]) -> PartitionSpec:
    """The spec with other tensors as the ranks that vmap simulates."""
    if not _tensors(spec):
        return spec
    axes = spec.bound_mesh.axes
    return spec.on(Mesh(tuple((n, Simulated(a.size, next(ranks)) if isinstance(a, Simulated) else a) for n, a in axes)))


def _check_open(leaves: Iterable[object], what: str) -> None:
    """TypeError for a leaf with tensors in it that the pytree does not show."""
    for leaf in leaves:
        inside = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | torch.nn.Module | type) else {}
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves(inside)):
            raise TypeError(
                f"remat: expected tensors in pytrees, got {what} of {type(leaf).__name__} with tensors inside; "
                "register the class with torch.utils._pytree.register_pytree_node, or pass its tensors"
            )


class Surroundings:
    """What a run depends on beside its arguments: the random number generators and autocast."""

    def __init__(self, leaves: Iterable[object]) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        self._devices = sorted((device.type, device.index) for device in devices if device.type not in ("cpu", "meta"))
        self._random = torch.get_rng_state()
        self._on_devices = [torch.get_device_module(kind).get_rng_state(index) for kind, index in self._devices]
        self._casts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(kind for kind, _ in self._devices)})
        ]

    @contextlib.contextmanager
    def again(self) -> Generator[None]:
        """For a run that is to see them as they were."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(self._random)
            for (kind, index), state in zip(self._devices, self._on_devices, strict=True):
                stack.enter_context(torch.random.fork_rng(devices=[index], device_type=kind))
                torch.get_device_module(kind).set_rng_state(state, index)
            for cast in self._casts:
                stack.enter_context(cast)
            yield
