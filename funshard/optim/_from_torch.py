"""from_torch: torch's optimizers as pairs of pure functions over dicts of shards."""

from __future__ import annotations

from typing import Any

import torch

from .._core.spec import PartitionSpec
from ._by_matrix.rules import adafactor, muon
from ._checks import Optimizer, check_rate
from ._elementwise import InitialState, elementwise
from ._matrices.matrices import Matrices
from ._options import ParamOptions


def from_torch(
    optimizer_class: type[torch.optim.Optimizer],
    *,
    spec: PartitionSpec | Matrices | None = None,
    options: ParamOptions | None = None,
    rank: int | None = None,
    initial: InitialState | None = None,
    donate: bool = False,
    **defaults: Any,
) -> Optimizer:
    """Return ``(init, update)``: k updates equal k steps of ``optimizer_class(params.values(), **defaults)``.

    Elementwise optimizers run torch's own kernels on the shards, few long vectors. torch.optim.Muon is `muon`, with AdamW for
    what is not a matrix; torch.optim.Adafactor updates each parameter whole, on its owner (`by_matrix`). Both need ``spec`` or
    `matrices`, and take no ``rank`` or ``initial``. examples/guide/optimizers.md says more.

    The state lives where the shards do, also on the host (``P(offload="params")``). Integer units stay as they are, and with a
    spec padding does. ``foreach``, ``fused`` and ``capturable`` are torch's; on the CPU ``fused=True`` is fastest. The
    update is eager: derivatives, batched rates and graphs take the pure rules, such as `adamw`, whose state has the same form.

    Args:
        optimizer_class: A class of torch.optim, or with ``initial`` your own.
        spec: The spec of the shards, for ``options`` and padding; or `matrices` for Muon and Adafactor.
        options: ``options(name, param)`` replaces defaults for a parameter, such as ``{"weight_decay": 0.0}``. An ``lr`` in it
            keeps its ratio to the default one. Needs ``spec``.
        rank: The rank of the shards, as in `param_views`; by default this process's.
        initial: ``initial(vector)`` returns the state before the first step of an elementwise class that torch.optim does not
            have, such as ``{"exp_avg": torch.zeros_like(p)}``.
        donate: Write the results into ``params`` and ``state`` and return their memory in other tensors; using the given ones
            afterwards is a RuntimeError (not inside torch.compile). Views of them show the new values; some kernels write
            ``grads`` as well.
        **defaults: The arguments of ``optimizer_class``.

    Returns:
        An `Optimizer`. ``update(grads, state, params, lr=None)`` returns ``(new
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
        given: dict[str, Any] = {"spec": spec, "options": options, "rank": rank, "initial": initial}
        return elementwise(optimizer_class, donate=donate, **given, **defaults)
    name = optimizer_class.__name__
    check_rate(defaults.get("lr"), "from_torch: lr")
    if spec is None:
        raise ValueError(f"from_torch: {name} needs whole matrices, and of slices only the spec knows them: expected spec=")
    for what, value in (("rank", rank), ("initial", initial)):
        if value is not None:
            raise ValueError(f"from_torch: {name} works on whole matrices, on their owners: expected no {what}=, got {value!r}")
    of_torch = optimizer_class([torch.empty(1, 1)], **defaults).defaults
    common: dict[str, Any] = {"weight_decay": of_torch["weight_decay"], "options": options, "donate": donate}
    if optimizer_class is torch.optim.Adafactor:
        eps, min_scale = of_torch["eps"]
        return adafactor(
            float(of_torch["lr"]),
            spec,
            decay_rate=-of_torch["beta2_decay"],
            clipping_threshold=of_torch["d"],
            eps=eps,
            min_scale=min_scale,
            maximize=of_torch["maximize"],
            **common,
        )
    return muon(
        spec,
        lr=float(of_torch["lr"]),
        adjust_lr=of_torch["adjust_lr_fn"] or "original",
        coefficients=of_torch["ns_coefficients"],
        steps=of_torch["ns_steps"],
        **{key: of_torch[key] for key in ("momentum", "nesterov", "eps")},
        **common,
    )
