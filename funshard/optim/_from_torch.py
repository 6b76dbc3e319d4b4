"""from_torch: torch's optimizers as a pair of pure functions over dicts of shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._spec.spec import PartitionSpec
from ._by_matrix.fallback import options_of
from ._by_matrix.muon import muon
from ._by_matrix.optimizer import MatrixOptimizer, by_rule
from ._by_matrix.rule import of_update
from ._checks import Initial, check_rate, moves, refuse_derivatives
from ._elementwise.optimizer import Optimizer, begin, elementwise
from ._elementwise.options import Options
from ._matrices.matrices import Matrices, matrices

__all__ = ["from_torch"]


def from_torch(
    optimizer_class: type[torch.optim.Optimizer],
    *,
    spec: PartitionSpec | Matrices | None = None,
    options: Options | None = None,
    rank: int | None = None,
    initial: Initial | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
    **defaults: Any,
) -> Optimizer | MatrixOptimizer:
    """``(init, update)``: k updates equal k steps of ``optimizer_class(params.values(), **defaults)``.

    For optimizers that work element by element: slices are updated as the whole would be. (torch.optim.Muon and Adafactor need
    whole matrices: see the end.) ``update(grads, state, params, lr=None)`` runs torch's own kernels on the shards, few long
    vectors, and changes nothing that it was given. With ``donate`` it writes into ``params`` and ``state`` and returns their
    memory in other tensors, without memory beyond torch's; to use the given ones afterwards is a RuntimeError (not inside
    torch.compile, which returns them), and views of them, such as ``p.detach()``, have the new values. Some kernels write
    into ``grads`` as well. ``lr`` is this step's learning rate: a schedule is plain Python.

    ``options(name, param)`` is what a parameter has in the place of the defaults, such as ``{"weight_decay": 0.0}``. It
    needs the ``spec``, and so the rank: this process's, or ``rank`` as for `views`. An lr among them keeps its ratio to
    the default one. With a spec the padding is left as it is.

    The state rests where the shards do: on the host with those of ``P(offload="params")``, and the update runs there, fastest
    with ``fused=True``. With a ``device`` it runs on that: the gradient, shard and state of a unit at a time are copied there,
    while the unit before is updated, and what is new of the shard and the state is copied back while the next one is, into
    pinned memory. At most three units are on the device, and the host waits once, at the end. What is on the device already
    stays there. Inside a transform or a compiler nothing is copied.

    Integer units stay as they are. ``foreach``, ``fused`` and ``capturable`` are torch's: by default foreach on
    accelerators and a loop on the CPU, where ``fused=True`` (SGD, Adagrad, Adam, AdamW) is the fastest. So is
    ``differentiable=True``: derivatives of the update, at every order, which are refused without it; `remat` around a run of
    steps keeps only the state that it begins with, and the count of steps is a constant. A learning rate that is
    differentiated or batched by vmap is for Adam, AdamW, NAdam and RAdam alone (SGD's has reverse mode): refused of others.
    With the ``spec`` a learning rate's derivative is the whole one on every rank, whichever units are split or replicated, and
    padding has none; without it a derivative of several ranks' shards is refused. ``eps_root`` of differentiable Adam and AdamW
    is added under the root, as in optax: without it derivatives are NaN where an element's gradients were all 0, of which a
    warning tells where there is a ``spec``.

    ``initial`` vouches for a class that torch.optim does not have, by the state that it begins a vector with:
    ``initial=lambda p: {"exp_avg": torch.zeros_like(p)}``.

    torch.optim.Muon is `muon` with its own options, in bfloat16, and has AdamW for what is no matrix. torch.optim.Adafactor
    runs on every parameter whole, matrices and vectors, on its owner (`by_matrix`). Both need the ``spec``, or `matrices` in
    its place; their state is one `MatrixState` for each unit, and they have no ``initial``, ``rank`` or ``device``.

    >>> import torch, funshard as fs
    >>> params = {"": torch.tensor([1.0, 2.0])}
    >>> init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> update({"": torch.tensor([2.0, 0.0])}, init(params), params)
    ({'': tensor([0., 2.])}, {'': {'momentum_buffer': tensor([2., 0.])}})

    Raises ValueError for another optimizer that needs whole tensors, and what torch raises for options that it refuses, with
    the parameter's name; `update` ValueError or TypeError for what does not fit, naming the unit, and RuntimeError for
    derivatives, before anything is changed.
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
    if optimizer_class is torch.optim.Muon:
        return _muon(spec, options, donate, defaults)
    return _adafactor(spec, options, donate, defaults)


def _muon(
    spec: PartitionSpec | Matrices, options: Options | None, donate: bool, defaults: Mapping[str, Any]
) -> MatrixOptimizer:
    of_torch = torch.optim.Muon([torch.empty(1, 1)], **defaults).defaults
    lr, adjust = of_torch["lr"], of_torch["adjust_lr_fn"]
    return muon(
        spec,
        lr=float(lr),
        adjust_lr=adjust or "original",
        coefficients=of_torch["ns_coefficients"],
        steps=of_torch["ns_steps"],
        options=options,
        donate=donate,
        **{key: of_torch[key] for key in ("weight_decay", "momentum", "nesterov", "eps")},
    )


def _adafactor(
    spec: PartitionSpec | Matrices, options: Options | None, donate: bool, defaults: Mapping[str, Any]
) -> MatrixOptimizer:
    """Every parameter is one to work on as a whole."""
    known = spec if isinstance(spec, Matrices) else matrices(spec, select=lambda name, param: True)
    of_torch = torch.optim.Adafactor([torch.empty(1, 1)], **defaults).defaults

    def init(param: Tensor) -> Mapping[str, Tensor]:
        return begin(torch.optim.Adafactor, param, defaults)

    def update(grad: Tensor, state: Mapping[str, Tensor], param: Tensor, **own: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        refuse_derivatives((("a gradient", grad), ("a parameter", param)))
        new = param.detach().clone()
        new.grad = grad.detach()
        optimizer = torch.optim.Adafactor([new], **{**defaults, **own})
        optimizer.state[new] = {name: x.clone() for name, x in state.items()}
        optimizer.step()
        return new, dict(optimizer.state[new])

    rule = of_update(init, update, [(m.shape, m.unit.dtype) for m in known.chosen])
    own = options_of("from_torch", known, {"lr": of_torch["lr"], "weight_decay": of_torch["weight_decay"]}, options)
    fallback = partial(_refused, known.spec), lambda grads, state, params, **rates: (dict(params), dict(state))
    return by_rule(rule, known, own, fallback=fallback, is_default_fallback=True, donate=donate, lr=float(of_torch["lr"]))


def _refused(spec: PartitionSpec, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """No state, for what does not move; else an error, also on ranks that have nothing of it."""
    for name, x in params.items():
        if moves(x) and (spec.by_name[name][1].numel if name in spec.by_name else len(x)):
            raise ValueError(
                f"from_torch: Adafactor: '{name}' is frozen, or none of the matrices given: expected what is trained, all "
                "of it among the matrices; set the rest apart with trainable, frozen = partition(params, spec)"
            )
    return {name: {} for name in params}
