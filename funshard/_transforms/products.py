"""Derivatives of losses: grad and grad_and_value, as in torch.func; products of curvature matrices with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._core.flow import ReduceBy, Reduction
from .ambient import RUNNING, AmbientState
from .error_hints import add_hints, is_forward_rule_missing

# --- grad and its kin, by one plain autograd pass where nothing outside differentiates again ---


def grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of ``f``, as torch.func.grad does.

    Args:
        f: A function that returns a scalar loss, or ``(loss, aux)``.
        argnums: The arguments to differentiate with respect to; their tensors must be floating point.
        has_aux: Whether ``f`` returns ``(loss, aux)``.

    Returns:
        A function that returns the gradients, or ``(grads, aux)``. See `grad_and_value` for their graph and for errors.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([2., 4.])}
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        grads, value = grad_and_value(f, argnums, has_aux)(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapper


def grad_and_value(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient and the value of ``f``, as torch.func.grad_and_value does.

    It is one plain autograd pass if nothing outside can differentiate the result; torch.func would keep the graph for a
    second derivative. Inside another torch.func transform, in torch.compile, in forward-mode AD, or if an argument requires
    grad, it *is* torch.func's. What ``f`` closes over is a constant: the results have no graph.

    Args:
        f: A function that returns a scalar loss, or ``(loss, aux)``.
        argnums: The arguments to differentiate with respect to; their tensors must be floating point.
        has_aux: Whether ``f`` returns ``(loss, aux)``.

    Returns:
        A function that returns ``(grads, value)``, or ``(grads, (value, aux))``. Gradients have the tree of the arguments;
        where an argument does not influence the loss they are zeros, never None.

    Raises:
        TypeError: An argument or the loss is of the wrong type. Raised by the function, as the next ones.
        RuntimeError: In ``torch.inference_mode``, or for an argument made there.
        ValueError: The loss is not a scalar.

    Example:
        >>> import torch, funshard as fs
        >>> fs.grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        ({'w': tensor([2., 4.])}, tensor(5.))
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else argnums
        if not all(-len(args) <= i < len(args) for i in positions):
            raise ValueError(f"grad: argnums {argnums} but only {len(args)} positional arguments: expected 0..{len(args) - 1}")
        chosen = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        leaves, treedef = pytree.tree_flatten(chosen)
        check_differentiable(chosen)
        if is_differentiated_outside((args, kwargs)):
            return torch.func.grad_and_value(f, argnums, has_aux)(*args, **kwargs)
        check_recorded("grad", chosen)
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            given, values = list(args), pytree.tree_unflatten(inputs, treedef)
            for i, value in zip(positions, (values,) if isinstance(argnums, int) else values, strict=True):
                given[i] = value
            loss, aux = run_loss(f, has_aux, *given, **kwargs)
            if loss.requires_grad and inputs:
                try:
                    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
                except RuntimeError as error:
                    raise add_hints(error)  # noqa: B904 - the same one
            else:
                grads = [torch.zeros_like(x) for x in leaves]
        result, value = pytree.tree_unflatten([g.detach() for g in grads], treedef), loss.detach()
        return result, ((value, pytree.tree_map_only(Tensor, torch.Tensor.detach, aux)) if has_aux else value)

    return wrapper


def value_and_grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the value and the gradient of ``f``, as jax.value_and_grad does.

    Args:
        f: As for `grad_and_value`.
        argnums: As there.
        has_aux: Whether ``f`` returns ``(loss, aux)``; the result is then ``((value, aux), grads)``.

    Example:
        >>> import torch, funshard as fs
        >>> fs.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """
    return lambda *args, **kwargs: grad_and_value(f, argnums, has_aux)(*args, **kwargs)[::-1]


def is_differentiated_outside(arguments: object) -> bool:
    """Return whether anything outside can differentiate, batch or trace what is computed from these arguments."""
    if _torch.is_in_graph() or _torch.current_level() or _torch.is_in_forward_ad() or RUNNING.is_differentiated:
        return True
    tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_differentiable(chosen: object) -> None:
    """Raise TypeError, with the path, for a leaf that is no floating point tensor."""
    if all(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in pytree.tree_leaves(chosen)):
        return
    for path, leaf in pytree.tree_flatten_with_path(chosen)[0]:
        where = pytree.keystr(path)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"grad: argument{where}: expected a tensor, got {type(leaf).__name__}")
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(
                f"grad: argument{where}: expected a floating point tensor, got {leaf.dtype}; "
                "set it apart with partition(params, spec, predicate)"
            )


def check_recorded(who: str, chosen: object) -> None:
    """Raise RuntimeError if plain autograd records nothing: in inference mode, or, with the path, for tensors made there."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{who}: called in torch.inference_mode(), where autograd records nothing: expected the call outside of it, or in "
            "torch.no_grad()"
        )
    if any(leaf.is_inference() for leaf in pytree.tree_leaves(chosen)):
        path = next(path for path, leaf in pytree.tree_flatten_with_path(chosen)[0] if leaf.is_inference())
        raise RuntimeError(
            f"{who}: argument{pytree.keystr(path)} was made in torch.inference_mode(), and autograd does not follow it: "
            "expected shards made outside of it, or the .clone() of each"
        )


def find_length(who: str, tree: object, dim: int = 0) -> int:
    """Return the common length of a tree's tensors along a dimension; raise an error, with the path, if they have none."""
    first: Tensor | None = None
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = f"{who}{pytree.keystr(path)}"
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(leaf).__name__}")
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(f"{name}: expected a tensor with a dimension {dim}, got shape {list(leaf.shape)}")
        first = leaf if first is None else first
        if (length := first.shape[dim]) != leaf.shape[dim]:
            got = list(leaf.shape)
            raise ValueError(f"{name}: expected length {length} in dimension {dim}, as in the first tensor, got shape {got}")
    if first is None:
        raise ValueError(f"{who}: expected one tensor at least, got none")
    return first.shape[dim]


def run_loss(f: Callable[..., Any], has_aux: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call a loss function that plain autograd differentiates, with `RUNNING` told, and return ``(loss, aux)``."""
    if _torch.is_in_graph():
        return split_loss(f(*args, **kwargs), has_aux)
    with RUNNING.set(is_in_gradient=True):
        return split_loss(f(*args, **kwargs), has_aux)


def split_loss(out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """Return ``(loss, aux)`` of the result of a loss function, aux None without it; TypeError or ValueError if it is none."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(f"grad: expected f to return (loss, aux) with has_aux=True, got {type(out).__name__}")
    loss, aux = out if has_aux else (out, None)
    if not isinstance(loss, Tensor):
        hint = "; return its .loss" if hasattr(loss, "loss") else ""
        if loss is None:
            hint = "; is there a return, and, for a .loss of transformers, labels= in the call?"
        raise TypeError(f"grad: expected f to return a tensor, got {type(loss).__name__}{hint}")
    if loss.dim():
        raise ValueError(f"grad: expected f to return a scalar (0-dim) tensor, got shape {list(loss.shape)}; reduce the loss")
    if not loss.is_floating_point():
        raise TypeError(f"grad: expected f to return a floating point loss, got {loss.dtype}")
    return loss, aux


# --- Convex losses whose Hessian is known in closed form: its product with a vector needs no second derivative ---


@dataclass(frozen=True)
class ConvexLoss:
    """A convex function of a model's outputs, called as a loss, with its Hessian's product in closed form.

    Attributes:
        value: A function of outputs that returns the loss, a scalar.
        hessian_product: A function of outputs and of a tensor of their shape, that returns the product, of that shape.
    """

    value: Callable[[Tensor], Tensor]
    hessian_product: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the loss of these outputs."""
        return self.value(outputs)


def cross_entropy(
    labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduce: ReduceBy = "mean"
) -> ConvexLoss:
    """Return the cross-entropy of logits with these labels as a `ConvexLoss`.

    The value is that of ``torch.nn.functional.cross_entropy``. The classes are the last dimension of the logits.

    Args:
        labels: Whole numbers, in the logits' shape without its last dimension.
        ignore_index: The label of positions that do not count.
        label_smoothing: From 0 to 1: how much of the target is uniform. The Hessian does not depend on it.
        reduce: "mean" divides the sum by the number of positions that count, "sum" by nothing, or a number.

    Raises:
        ValueError: For another ``reduce``; and where it is used, for logits of another shape.
        TypeError: For labels that are no whole numbers.

    Example:
        >>> import torch, funshard as fs
        >>> loss = fs.curvature.cross_entropy(torch.tensor([0]))
        >>> loss.hessian_product(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])
    """
    Reduction.make(reduce)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"cross_entropy: labels: expected whole numbers, got {labels.dtype}")

    def divisor(logits: Tensor) -> Tensor | float:
        if logits.shape[:-1] != labels.shape or not logits.dim():
            raise ValueError(
                f"cross_entropy: expected logits of shape {[*labels.shape, 'classes']} for these labels, got "
                f"{list(logits.shape)}"
            )
        if isinstance(reduce, str):
            return (labels != ignore_index).sum() if reduce == "mean" else 1.0
        return reduce

    def value(logits: Tensor) -> Tensor:
        by = divisor(logits)
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        return F.cross_entropy(rows, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum") / by

    def hessian_product(logits: Tensor, u: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights = (labels != ignore_index).to(wide) / divisor(logits)
        p, u = logits.softmax(-1, dtype=wide), u.to(wide)
        centred = u - torch.linalg.vecdot(p, u)[..., None]  # which keeps more digits than p * u - p * <p, u>
        return centred.mul_(p).mul_(weights[..., None]).to(logits.dtype)

    return ConvexLoss(value, hessian_product)


# --- hvp: the product of a Hessian with a vector, forward over reverse or reverse over reverse ---


def hvp(f: Callable[..., Any], params: Any, v: Any, *args: Any, forward: bool | None = None, has_aux: bool = False) -> Any:
    """Return the product of the Hessian of ``f`` at ``params`` with ``v``: shards from shards.

    The Hessian is that of the mean over ranks of each rank's loss. What ``f`` computes under ``torch.no_grad`` is a constant.

    Args:
        f: The loss, ``f(params, *args)``.
        params: A tree of floating point tensors.
        v: A tree with the paths, shapes and dtypes of ``params``.
        args: The other arguments of ``f``, such as a batch: constants.
        forward: True for ``jvp`` of ``grad``, False for ``grad`` of ``lambda p: <grad(f)(p), v>``. None tries the first, and
            then the second if torch has no forward-mode rule for an operator, as ``F.mse_loss``. In torch.compile it is True.
        has_aux: Whether ``f`` returns ``(loss, aux)``, where aux is a tree of tensors.

    Returns:
        A tree like ``params``, or ``(that tree, aux)``.

    Raises:
        ValueError: ``v`` differs from ``params``; the message names the path. `grad` raises others.
        RuntimeError: torch has no second derivative, as for fused attention outside of `transforms_attention`.

    Example:
        >>> import torch, funshard as fs
        >>> fs.hvp(lambda p: (p["w"] ** 3).sum(), {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 1.0])})
        {'w': tensor([ 6., 12.])}
    """
    check_differentiable(params)
    direction = match_vector("hvp", params, v)

    def loss(p: Any) -> tuple[Tensor, Any]:
        value, aux = split_loss(f(p, *args), has_aux)
        return value, aux if has_aux else ()

    def along(p: Any) -> tuple[Tensor, Any]:
        grads, aux = first(p)
        return _inner_product(grads, direction), aux

    def run() -> tuple[Any, Any]:
        if not pytree.tree_leaves(params):
            return direction, loss(params)[1] if has_aux else ()
        if forward is not False:
            try:
                return push_forward(first, params, direction, has_aux=True)[1:]
            except RuntimeError as error:  # NotImplementedError is one
                if forward or _torch.is_in_graph() or not is_forward_rule_missing(error):
                    raise
        return torch.func.grad(along, has_aux=True)(params)

    first = torch.func.grad(loss, has_aux=True)
    try:
        product, aux = run()
    except RuntimeError as error:
        raise add_hints(error)  # noqa: B904 - the same one
    return (product, aux) if has_aux else product


def push_forward(f: Callable[[Any], Any], params: Any, direction: Any, *, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the results of ``torch.func.jvp``; what ``f`` computes under ``torch.no_grad`` is a constant."""
    has_graph = torch.is_grad_enabled()

    def run(p: Any) -> Any:
        with torch.enable_grad(), _torch.NoGradInForwardMode():  # gradients that are off in here, f has switched off
            return f(p)

    results: tuple[Any, ...] = torch.func.jvp(run, (params,), (direction,), has_aux=has_aux)
    return results if has_graph else pytree.tree_map_only(Tensor, Tensor.detach, results)


def match_vector(name: str, params: object, v: object) -> Any:
    """Return ``v`` as a tree like ``params``; ValueError if they differ in a path, shape or dtype."""
    expected, got = ({pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(tree)[0]} for tree in (params, v))
    for path in (*expected, *got):
        if path not in expected or path not in got or not _is_alike(expected[path], got[path]):
            texts = [_describe_leaf(tree[path]) if path in tree else "none" for tree in (expected, got)]
            raise ValueError(f"{name}: v{path}: expected {texts[0]} as in params, got {texts[1]}")
    return pytree.tree_unflatten([got[path] for path in expected], pytree.tree_structure(params))


def _is_alike(a: object, b: object) -> bool:  # not by their texts, which Dynamo does not compare
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _describe_leaf(leaf: object) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _inner_product(a: Any, b: Any) -> Tensor:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return torch.stack([(x.conj() * y).real.sum() if x.is_complex() else (x * y).sum() for x, y in pairs]).sum()


# --- ggnvp and fishervp: J' H J v, J by forward-mode AD, H of a loss of few numbers, J' by a gradient ---

TOLERANCE = 1e-2
"""By how much of their largest element outputs may differ between two runs: rounding is far below, another function above."""


def ggnvp(outputs: Callable[[Any], Any], loss: Callable[[Any], Tensor], params: Any, v: Any) -> Any:
    """Return J' H J v, the product of the Gauss-Newton matrix (Schraudolph, 2002): J of the outputs, H of the loss at them."""

    def product(z: Any, u: Any) -> Any:
        if not isinstance(loss, ConvexLoss):
            return hvp(loss, z, u)
        if not isinstance(z, Tensor):
            raise TypeError(f"ggnvp: outputs: expected a tensor, as the loss takes, got {type(z).__name__}")
        return loss.hessian_product(z, u)

    return _gauss_newton("ggnvp", outputs, product, params, v)


def fishervp(losses: Callable[[Any], Tensor], params: Any, v: Any) -> Any:
    """Return the mean over samples of g g' v, where g is the gradient of one sample's loss."""

    def product(z: Any, u: Any) -> Any:
        if not isinstance(z, Tensor) or z.dim() != 1 or not len(z):
            got = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"fishervp: losses: expected a loss for each sample, [samples], got {got}")
        return u / len(z)

    return _gauss_newton("fishervp", losses, product, params, v)


@_torch.disable_in_graph(
    "ggnvp and fishervp run their function twice with the same random numbers, which no graph can set back: expected no "
    "compilation of the product itself; compile the model, or its units by P(compile=True)"
)
def _gauss_newton(name: str, f: Callable[[Any], Any], product: Callable[[Any, Any], Any], params: Any, v: Any) -> Any:
    """Return J' H J v by one forward-mode run of ``f``, the ``product`` H u, and one gradient, which runs ``f`` again."""
    check_differentiable(params)
    direction = match_vector(name, params, v)
    if not pytree.tree_leaves(params):
        return params
    is_plain = not is_differentiated_outside((params, v))
    if is_plain:
        check_recorded(name, params)
        params, direction = pytree.tree_map(Tensor.detach, (params, direction))
    ambient = AmbientState(pytree.tree_leaves(params))

    def run(p: Any) -> Any:
        z = f(p)
        for path, leaf in pytree.tree_flatten_with_path(z)[0]:
            if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"{name}: outputs{pytree.keystr(path)}: expected a floating point tensor, got {got}")
        return z

    def push_by_transposes() -> tuple[Any, Any]:  # without forward mode: J is the transpose of the linear c -> J' c
        results: tuple[Any, ...] = torch.func.vjp(run, params)
        z, pull = results
        zeros = pytree.tree_map(torch.zeros_like, z)
        return z, torch.func.vjp(lambda c: pull(c)[0], zeros)[1](direction)[0]

    def along(p: Any, u: Any) -> Tensor:
        z = run(p)
        if is_plain:
            _check_repeated(name, first, pytree.tree_leaves(z))
        first.clear()
        return _inner_product(z, u)

    try:
        try:
            z, u = push_forward(run, params, direction)
        except RuntimeError as error:
            if not is_forward_rule_missing(error):
                raise
            with ambient.restored():
                z, u = push_by_transposes()
        if is_plain:
            z, u = pytree.tree_map(Tensor.detach, (z, u))
        u = product(z, u)
        first = pytree.tree_leaves(z)
        del z
        texts = [
            tuple(map(_describe_leaf, two)) for two in zip(first, pytree.tree_leaves(u), strict=True) if not _is_alike(*two)
        ]
        if texts:
            raise ValueError(f"{name}: expected the Hessian's product to be like the outputs, {texts[0][0]}, got {texts[0][1]}")
        with ambient.restored():
            return grad(along)(params, u)
    except RuntimeError as error:
        raise add_hints(error)  # noqa: B904 - the same one


def _check_repeated(name: str, first: list[Tensor], second: list[Tensor]) -> None:
    """Raise RuntimeError if the outputs of two runs differ in shape or, where the host reads values, by more than rounding."""
    same = [x.shape for x in first] == [x.shape for x in second]
    with torch.no_grad():
        for x, y in zip(first, second, strict=True) if same and _torch.is_eager() else ():
            far = x.numel() and float(torch.dist(x, y, math.inf)) > TOLERANCE * float(torch.linalg.vector_norm(x, math.inf))
            same = same and not far
    if not same:
        raise RuntimeError(
            f"{name}: the function of params gives other outputs when it runs again with the same random numbers: expected one "
            "that changes nothing; give each run a cache of its own"
        )
