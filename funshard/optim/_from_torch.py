"""from_torch: torch's elementwise optimizers as pairs of pure functions over dicts of shards, by torch's own kernels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop, Rprop

from .. import _torch
from .._core.layout import Params
from .._core.spec import PartitionSpec
from . import _checks
from ._checks import Optimizer, OptionRanges, ParamOptions, State, StateMapping, Tensors

InitialState = Callable[[Tensor], Tensors]  # from a vector to its state before the first step

ELEMENTWISE_CLASSES = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)
"""The elementwise optimizers of torch.optim. Pinned by ``test_every_optimizer_is_right_or_refused``."""
WHOLE: Mapping[type[torch.optim.Optimizer], str] = {Muon: "optim.muon(spec)", Adafactor: "optim.adafactor(learning_rate, spec)"}
STATE_FROM_RATE: Mapping[type[torch.optim.Optimizer], str] = {ASGD: "eta", Rprop: "step_size"}
"""The state that torch creates in the first step, from the learning rate of that step."""
NUMBERS_FROM: Mapping[type[torch.optim.Optimizer], set[str]] = {
    ASGD: {"lr", "lambd", "alpha", "t0"},
    Adagrad: {"initial_accumulator_value"},
    NAdam: {"betas", "momentum_decay"},
}
"""The options from which torch computes numbers in a state. A unit has one number for all of its parameters."""
RULES = "optim.sgd, adam, adamw, lion, rmsprop or adagrad, which are pure functions"


def from_torch(
    optimizer_class: type[torch.optim.Optimizer],
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
    initial: InitialState | None = None,
    donate: bool = False,
    **defaults: Any,
) -> Optimizer:
    """Return ``(init, update)``: k updates equal k steps of ``optimizer_class(params.values(), **defaults)``.

    Torch's own kernels run on the shards, few long vectors, and eagerly: derivatives, batched rates and graphs take the pure
    rules, such as `adamw`, whose state has the same form. The state lives where the shards do. Integer units stay as they are,
    and with a spec padding does. On the CPU ``fused=True`` is fastest. See examples/guide/optimizers.md.

    Args:
        optimizer_class: A class of torch.optim, or with ``initial`` your own.
        spec: The spec of the shards, for ``options`` and padding.
        options: ``options(name, param)`` replaces defaults for a parameter, such as ``{"weight_decay": 0.0}``. An ``lr`` in it
            keeps its ratio to the default one. Needs ``spec``.
        initial: ``initial(vector)`` returns the state before the first step of an elementwise class that torch.optim does not
            have, such as ``{"exp_avg": torch.zeros_like(p)}``.
        donate: Write the results into ``params`` and ``state`` and return their memory in other tensors; using the given ones
            afterwards is a RuntimeError (not inside torch.compile). Views of them show the new values; some kernels write
            ``grads`` as well.
        **defaults: The arguments of ``optimizer_class``. ``update(..., lr=)`` is a step's own learning rate.

    Example:
        >>> import torch, funshard as fs
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
        >>> update({"": torch.tensor([2.0, 0.0])}, init(params), params)
        ({'': tensor([0., 2.])}, {'': {'momentum_buffer': tensor([2., 0.])}})
    """
    cls = optimizer_class
    _check_class(cls, initial)
    _checks.check_rate(defaults.get("lr"), "from_torch: lr")
    if defaults.get("differentiable") or "eps_root" in defaults:
        raise ValueError(f"from_torch: torch's kernels write in place: for derivatives use {RULES}, and take eps_root")
    if "device" in defaults:
        raise ValueError("from_torch: an update runs where the shards are: expected no device=, and on the host fused=True")
    lr_of_class = cls([torch.empty(0)], **defaults).defaults.get("lr")

    def check(name: str, overrides: Mapping[str, Any]) -> None:
        try:
            _checks.check_rate(overrides.get("lr"), "lr")
            cls([torch.empty(0)], **{**defaults, **overrides})
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"options of parameter '{name}', {dict(overrides)}: {error}") from error
        is_other = _begin(cls, torch.empty(0), {**defaults, **overrides}, initial).keys() != start.keys()
        if own := [*overrides] if is_other else [*NUMBERS_FROM.get(cls, set()).intersection(overrides)]:
            raise ValueError(
                f"options of parameter '{name}': {cls.__name__} computes a number of the unit's state from '{min(own)}', or "
                "whether there is one: expected one for all parameters, or a second optimizer for those that "
                "fs.partition(params, spec) sets apart"
            )

    start = _begin(cls, torch.empty(0), defaults, initial)
    numbers = frozenset(name for name, x in start.items() if not x.dim())
    groups, ranges = _checks.option_ranges("from_torch", spec, options, check)
    if len(groups) > 1 and initial is not None and numbers - {"step"}:
        raise ValueError(f"from_torch: {cls.__name__} has numbers in its state, {sorted(numbers)}: expected options=None")

    def begin(key: str, x: Tensor) -> Tensors:
        values = _begin(cls, x, defaults, initial)
        return {name: value if name in numbers else _checks.place_like(x, value) for name, value in values.items()}

    def step(
        grads: Tensors, state: StateMapping, params: Tensors, lr: Any, updated: Mapping[str, OptionRanges]
    ) -> tuple[Params, State]:
        given = [*_checks.named_tensors(grads, state, params)]
        named = [("lr", lr), *defaults.items(), *(option for group in groups for option in group.items())]
        rates = [(name, x) for name, x in named if isinstance(x, Tensor)]
        for what, tensor in (*given, *rates):  # torch's kernels would lose that silently
            if _torch.has_derivative(tensor):
                raise RuntimeError(
                    f"from_torch: {what} takes part in a derivative, which torch's kernels would lose: expected {RULES}, or an "
                    "update under torch.no_grad() or outside of the transform"
                )
        if batched := [name for name, rate in rates if _torch.is_wrapped(rate)]:
            got = f"{batched[0]} is batched, and torch's {cls.__name__} makes a number of it"
            raise RuntimeError(f"from_torch: {got}: expected {RULES}")
        is_batched = any(_torch.is_batched(x) for _, x in given)
        is_donated = donate and not is_batched  # memory that is not batched cannot take results that are
        if is_donated:
            _checks.refuse_shared_memory(given)
            if any(map(_torch.is_pinned, params.values())):
                _torch.synchronize_copies()  # what a gather may still read

        def make_writable(tensor: Tensor, key: str) -> Tensor:
            if is_donated:
                return tensor
            tensor = tensor.detach()
            if key in updated and tensor.shape == grads[key].shape:  # vmap writes into what has its dimensions
                written = [x for x in (grads[key], params[key]) if _torch.is_wrapped(x)]
                if written:
                    return math.prod((torch.ones_like(x, dtype=tensor.dtype) for x in written), start=tensor)
            return _checks.copy_like(tensor, tensor) if _torch.is_pinned(tensor) else tensor.clone()

        new_params = {key: make_writable(x, key) if key in updated else x for key, x in params.items()}
        new_state = {key: {name: make_writable(x, key) for name, x in values.items()} for key, values in state.items()}
        now: dict[str, Any] = defaults if lr is None else {**defaults, "lr": lr}
        optimizer = cls([{"params": [torch.empty(0)], **own} for own in groups], **now)
        optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = []
            if lr is not None and "lr" in own:
                group["lr"] = _checks.scale_lr(lr, own["lr"], lr_of_class, "from_torch: ")
            if is_batched:  # the fused and foreach kernels have no batching rule
                group.update({name: False for name in ("foreach", "fused") if name in group})
        states: dict[Tensor, dict[str, Tensor]] = {}
        for key, unit_ranges in updated.items():
            grad_parts = unit_ranges.split(make_writable(grads[key], key))
            parts = zip(unit_ranges.split(new_params[key].detach()), grad_parts, strict=True)
            slices = {n: unit_ranges.split(x) for n, x in new_state[key].items() if n not in numbers}
            for at, ((group, piece), (_, piece.grad)) in enumerate(parts):
                optimizer.param_groups[group]["params"].append(piece)
                own = {n: x.clone() if at else x for n, x in new_state[key].items() if n in numbers}  # each range counts up one
                states[piece] = own | {n: cuts[at][1] for n, cuts in slices.items()}
                optimizer.state[piece] = _state_to_step(cls, states[piece], numbers, optimizer.param_groups[group]["lr"])
        if states:
            optimizer.step()
        for piece, written in states.items():
            _write_state(cls, written, optimizer.state[piece])
        if is_donated:  # torch 2.13: fused kernels do not count, and autograd would take stale values for fresh ones
            torch.autograd.graph.increment_version([new_params[key] for key in updated])
            if _torch.is_eager():
                new_params |= {key: _torch.take_storage(new_params[key]) for key in updated}
                new_state = {key: {n: _torch.take_storage(t) for n, t in values.items()} for key, values in new_state.items()}
        return new_params, new_state

    init, update = _checks.make_elementwise(cls.__name__, begin, step, start, numbers, ranges)
    reason = _checks.break_message(cls.__name__, f"torch's kernels write in place; a graph takes {RULES}")
    return Optimizer(init, _torch.disable_in_graph(reason)(update))


def _check_class(cls: object, initial: InitialState | None) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"from_torch: expected a class of optimizers such as torch.optim.AdamW, got {cls!r}")
    if instead := WHOLE.get(cls):
        raise ValueError(f"from_torch: {cls.__name__} needs whole matrices: expected {instead}, which sends them to owners")
    if cls not in ELEMENTWISE_CLASSES and (initial is None or cls.__module__.startswith("torch.optim")):
        raise ValueError(
            f"from_torch: {cls.__name__} is not known to work element by element, and on slices it would be another "
            f"optimizer: expected one of {[c.__name__ for c in ELEMENTWISE_CLASSES]}, or initial= for a class of your own that "
            "works element by element; one that needs whole tensors can step those of fs.unshard"
        )


def _begin(
    cls: type[torch.optim.Optimizer], piece: Tensor, options: Mapping[str, Any], initial: InitialState | None
) -> dict[str, Tensor]:
    """Return a vector's state before the first step: as torch's ``_init_group`` creates it, and SGD's momentum as zeros."""
    if cls not in ELEMENTWISE_CLASSES and initial is not None:
        return dict(initial(piece))
    if cls is SGD:
        buffer = {"momentum_buffer": torch.zeros_like(piece)} if options.get("momentum") else {}
        # The first gradient is not dampened: count, to know which is the first.
        return buffer | ({"step": torch.zeros(())} if buffer and options.get("dampening") else {})
    piece.grad = piece.detach()  # any gradient will do
    optimizer = cls([piece], **options)
    start: Any = optimizer._init_group  # pyright: ignore[reportAttributeAccessIssue]
    start(optimizer.param_groups[0], *([] for _ in list(inspect.signature(start).parameters)[1:]))
    return dict(optimizer.state[piece])


def _state_to_step(cls: type, given: Tensors, numbers: Container[str], lr: Any) -> dict[str, Tensor]:
    """Return a vector's state for torch's step with ``lr``: {} if torch must create it, as SGD's before a dampened step."""
    if cls is SGD and "step" in given and bool(given["step"] == 0):
        return {}
    name = STATE_FROM_RATE.get(cls)
    if name is None or (_torch.is_eager() and bool(given["step"] != 0)):
        return dict(given)
    old = given[name]
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32) if name in numbers else old.dtype
    rate = torch.as_tensor(lr * (1 + 1j) if old.is_complex() else lr, dtype=dtype, device=old.device)
    return {**given, name: torch.where((given["step"] == 0).to(old.device), rate, old)}


def _write_state(cls: type, given: dict[str, Tensor], after: Tensors) -> None:
    """Write into ``given`` the state that torch replaced instead of updating."""
    for name, tensor in after.items():
        if name not in given:
            raise ValueError(f"from_torch: the first step made '{name}': expected initial= to give it, got {[*given]}")
        if tensor is not given[name]:
            given[name].copy_(tensor)
    if cls is SGD and "step" in given:
        given["step"].add_(1)
