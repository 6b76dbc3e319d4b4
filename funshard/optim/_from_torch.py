"""from_torch: torch's optimizers as pairs of pure functions over dicts of shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._core.spec import PartitionSpec
from ._by_matrix.muon import muon
from ._by_matrix.optimizer import MatrixOptimizer, break_graphs, optimizer_from_rule, resolve_options
from ._by_matrix.step import rule_from_update
from ._checks import Tensors, check_rate
from ._elementwise.optimizer import Optimizer, elementwise
from ._elementwise.options import ParamOptions
from ._elementwise.torch_optimizer import InitialState, init_vector_state, is_updated, refuse_derivatives
from ._matrices.matrices import Matrices, matrices

__all__ = ["from_torch"]


def from_torch(
    optimizer_class: type[torch.optim.Optimizer],
    *,
    spec: PartitionSpec | Matrices | None = None,
    options: ParamOptions | None = None,
    rank: int | None = None,
    initial: InitialState | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
    **defaults: Any,
) -> Optimizer | MatrixOptimizer:
    """Return ``(init, update)``: k updates equal k steps of ``optimizer_class(params.values(), **defaults)``.

    Elementwise optimizers run torch's own kernels on the shards, few long vectors. torch.optim.Muon is `muon`, with AdamW for
    what is not a matrix; torch.optim.Adafactor updates each parameter whole, on its owner (`by_matrix`). Both need ``spec`` or
    `matrices`, and take no ``rank``, ``initial`` or ``device``. examples/guide/optimizers.md says more.

    The state lives where the shards do, also on the host (``P(offload="params")``). Integer units stay as they are, and with a
    spec padding does. ``foreach``, ``fused`` and ``capturable`` are torch's; on the CPU ``fused=True`` is fastest.

    ``differentiable=True`` records the update, at every order, and refuses ``donate`` and ``device``. A differentiated or
    vmapped learning rate is for Adam, AdamW, NAdam and RAdam (SGD: reverse mode). With a spec its derivative is whole on every
    rank. `remat` around several steps keeps only their first state. ``eps_root`` of differentiable Adam and AdamW is added
    under the root, as in optax: without it, derivatives are NaN where all gradients of an element were 0.

    Args:
        optimizer_class: A class of torch.optim, or with ``initial`` your own.
        spec: The spec of the shards, for ``options``, padding and derivatives; or `matrices` for Muon and Adafactor.
        options: ``options(name, param)`` replaces defaults for a parameter, such as ``{"weight_decay": 0.0}``. An ``lr`` in it
            keeps its ratio to the default one. Needs ``spec``.
        rank: The rank of the shards, as in `param_views`; by default this process's.
        initial: ``initial(vector)`` returns the state before the first step of an elementwise class that torch.optim does not
            have, such as ``{"exp_avg": torch.zeros_like(p)}``.
        donate: Write the results into ``params`` and ``state`` and return their memory in other tensors; using the given ones
            afterwards is a RuntimeError (not inside torch.compile). Views of them show the new values; some kernels write
            ``grads`` as well.
        device: Update there what lives on the host, unit by unit, while neighbouring units are copied; at most three units are
            on the device at once. Inside a transform or a compiler nothing is copied.
        **defaults: The arguments of ``optimizer_class``.

    Returns:
        An `Optimizer`, or a `MatrixOptimizer` for Muon and Adafactor. ``update(grads, state, params, lr=None)`` returns ``(new
        params, new state)``; ``lr`` is this step's learning rate.

    Raises:
        ValueError: The optimizer needs whole tensors, or torch refuses an option; `update` raises it, naming the unit, before
            anything changes.
        TypeError: As ValueError, for wrong types.
        RuntimeError: `update` would lose a derivative.

    Example:
        >>> import torch, funshard as fs
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
        >>> update({"": torch.tensor([2.0, 0.0])}, init(params), params)
        ({'': tensor([0., 2.])}, {'': {'momentum_buffer': tensor([2., 0.])}})
    """
    if optimizer_class not in (torch.optim.Muon, torch.optim.Adafactor):
        if isinstance(spec, Matrices):
            raise TypeError(f"from_torch: {optimizer_class.__name__} works element by element: expected a spec, got matrices")
        given: dict[str, Any] = {"spec": spec, "options": options, "rank": rank, "initial": initial, "device": device}
        return elementwise(optimizer_class, donate=donate, **given, **defaults)
    name = optimizer_class.__name__
    check_rate(defaults.get("lr"), "from_torch: lr")
    if spec is None:
        raise ValueError(f"from_torch: {name} needs whole matrices, and of slices only the spec knows them: expected spec=")
    for what, value in (("rank", rank), ("initial", initial), ("device", device)):
        if value is not None:
            raise ValueError(f"from_torch: {name} works on whole matrices, on their owners: expected no {what}=, got {value!r}")
    if optimizer_class is torch.optim.Adafactor:
        return _adafactor(spec, options, donate, defaults)
    of_torch = torch.optim.Muon([torch.empty(1, 1)], **defaults).defaults
    return muon(
        spec,
        lr=float(of_torch["lr"]),
        adjust_lr=of_torch["adjust_lr_fn"] or "original",
        coefficients=of_torch["ns_coefficients"],
        steps=of_torch["ns_steps"],
        options=options,
        donate=donate,
        **{key: of_torch[key] for key in ("weight_decay", "momentum", "nesterov", "eps")},
    )


def _adafactor(
    spec: PartitionSpec | Matrices, options: ParamOptions | None, donate: bool, defaults: Mapping[str, Any]
) -> MatrixOptimizer:
    known = spec if isinstance(spec, Matrices) else matrices(spec, select=lambda name, param: True, gather_stacks=True)
    of_torch = torch.optim.Adafactor([torch.empty(1, 1)], **defaults).defaults

    def init(param: Tensor) -> Tensors:
        return init_vector_state(torch.optim.Adafactor, param, defaults)

    def update(grad: Tensor, state: Tensors, param: Tensor, **overrides: Any) -> tuple[Tensor, Tensors]:
        refuse_derivatives((("a gradient", grad), ("a parameter", param)))
        new = param.detach().clone()
        new.grad = grad.detach()
        optimizer = torch.optim.Adafactor([new], **{**defaults, **overrides})
        optimizer.state[new] = {name: x.clone() for name, x in state.items()}
        optimizer.step()
        return new, dict(optimizer.state[new])

    rule = rule_from_update(init, update, [(m.shape, m.unit.dtype) for m in known.chosen])
    resolved = resolve_options("from_torch", known, {"lr": of_torch["lr"], "weight_decay": of_torch["weight_decay"]}, options)
    fallback = partial(_refuse_update, known.spec), lambda grads, state, params, **rates: (dict(params), dict(state))
    optimizer = optimizer_from_rule(
        rule, known, resolved, fallback=fallback, is_default_fallback=True, donate=donate, lr=float(of_torch["lr"])
    )
    return break_graphs(optimizer, "Adafactor", "torch's step reads its count on the host")


def _refuse_update(spec: PartitionSpec, params: Tensors) -> dict[str, Any]:
    """Return no state for what is not updated; raise ValueError for anything else, also on ranks that hold none of it."""
    for name, x in params.items():
        if is_updated(x) and (spec.by_name[name][1].numel if name in spec.by_name else len(x)):
            raise ValueError(
                f"from_torch: Adafactor: '{name}' is frozen, or none of the matrices given: expected what is trained, all "
                "of it among the matrices; set the rest apart with trainable, frozen = partition(params, spec)"
            )
    return {name: {} for name in params}
