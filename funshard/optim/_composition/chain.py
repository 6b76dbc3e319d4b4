"""chain: gradient transformations and an optimizer as one optimizer; clipping as a transformation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor

from ..._spec.bind import check_spec
from ..._spec.checks import check_mapping
from ..._spec.spec import PartitionSpec
from ..._units.layout import Params
from .._by_matrix.optimizer import MatrixOptimizer
from .._elementwise.optimizer import Optimizer
from .._norms import check_max_norm, clip_by_global_norm
from .pairs import AnyOptimizer, ComposedOptimizer, GradientTransformation, is_pair

__all__ = ["chain", "clip_gradients"]


@overload
def chain(*pairs: GradientTransformation) -> GradientTransformation: ...  # pyright: ignore[reportOverlappingOverload]


@overload
def chain(*pairs: AnyOptimizer) -> ComposedOptimizer: ...


def chain(*pairs: AnyOptimizer) -> GradientTransformation | ComposedOptimizer:
    """Return gradient transformations and an optimizer, in this order, as one optimizer.

    The first result of each update is the gradients of the next one; the optimizer, which is last, returns the parameters. The
    state is the tuple of their states. `checkpoint.save` takes it as it is; functions that take an optimizer's own state, such
    as `checkpoint.optimizer_state_dict`, take its last entry.

    Args:
        *pairs: ``(init, update)``: transformations, `GradientTransformation` or functions of yours, and an optimizer. Without
            an optimizer the last one is a `GradientTransformation`, and so is the result.

    Returns:
        A `ComposedOptimizer`. ``update(grads, state, params, **rates)`` passes ``rates``, such as ``lr=``, to the optimizer.

    Raises:
        TypeError: An argument is no pair of functions.
        ValueError: An optimizer is not the last one; in ``update``, a state of another chain, or a transformation that returns
            other keys than those of its gradients.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> sgd = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
        >>> init, update = fs.optim.chain(fs.optim.clip_gradients(spec, 2.5), sgd)
        >>> params = {"weight": torch.zeros(1, 2)}
        >>> update({"weight": torch.tensor([[3.0, 4.0]])}, init(params), params)[0]
        {'weight': tensor([[-1.5000, -2.0000]])}

    Source: ``optax.chain``.
    """
    if not pairs:
        raise ValueError("chain: expected transformations and an optimizer, got nothing")
    for i, pair in enumerate(pairs):
        if not is_pair(pair):
            raise TypeError(f"chain: argument {i}: expected (init, update), got {pair!r}")
        if isinstance(pair, Optimizer | MatrixOptimizer | ComposedOptimizer) and i < len(pairs) - 1:
            raise ValueError(
                f"chain: argument {i} of {len(pairs)} is an optimizer, which returns parameters: expected it last, after what "
                "changes the gradients"
            )
    *transformations, (last_init, last_update) = pairs

    def init(params: Mapping[str, Tensor], /) -> tuple[Any, ...]:
        return (*(begin(params) for begin, _ in transformations), last_init(params))

    def update(
        grads: Mapping[str, Tensor], state: tuple[Any, ...], params: Mapping[str, Tensor], /, **rates: Any
    ) -> tuple[Params, tuple[Any, ...]]:
        check_mapping(grads, "grads")
        if not isinstance(state, tuple) or len(state) != len(pairs):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"{len(state)}" if isinstance(state, tuple) else type(state).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"chain: state: expected a tuple of {len(pairs)}, as init(params) returns, got {got}")
        new: list[Any] = []
        for i, ((_, transform), own) in enumerate(zip(transformations, state[:-1], strict=True)):
            changed, after = transform(grads, own, params)
            check_mapping(changed, f"chain: the gradients that transformation {i} returns")
            if changed.keys() != grads.keys():
                key = next(iter(changed.keys() ^ grads.keys()))
                raise ValueError(f"chain: transformation {i}: expected gradients of the same keys, got others: '{key}'")
            grads = changed
            new.append(after)
        result, after = last_update(grads, state[-1], params, **rates)
        return dict(result), (*new, after)

    return (GradientTransformation if isinstance(pairs[-1], GradientTransformation) else ComposedOptimizer)(init, update)


def clip_gradients(spec: PartitionSpec, max_norm: float | Tensor, *, p: float = 2.0) -> GradientTransformation:
    """Return `clip_by_global_norm` as a gradient transformation for `chain`. It has no state.

    Args:
        spec: The spec of the gradients.
        max_norm: The largest norm of all gradients together, >= 0 (otherwise ValueError).
        p: The order of the norm.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> init, update = fs.optim.clip_gradients(spec, 2.5)
        >>> grads = {"weight": torch.tensor([[3.0, 4.0]])}
        >>> update(grads, init(grads), grads)
        ({'weight': tensor([[1.5000, 2.0000]])}, ())
    """
    check_spec(spec)
    check_max_norm("clip_gradients", max_norm)

    def update(grads: Mapping[str, Tensor], state: tuple[()], params: object, /) -> tuple[Params, tuple[()]]:
        return clip_by_global_norm(grads, spec, max_norm, p=p)[0], state

    return GradientTransformation(lambda params, /: (), update)
