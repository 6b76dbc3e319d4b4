"""One torch optimizer for one step: what it can be given, its state and result, and the same inside torch.compile."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ... import _torch
from ..._core.checks import check_mapping
from ..._core.spec import PartitionSpec
from ..._spec.codec import check_trainable
from ..._spec.unit_state import replace_values
from .._checks import StateMapping, Tensors, break_message, check_rate, named_tensors
from .._quantized.slices import refuse_encoded
from .options import OptionRanges, scale_lr

__all__ = ["ELEMENTWISE_CLASSES", "ElementwiseConfig", "InitialState", "NumbersAsTensors", "add_eps_root", "build_optimizer"]
__all__ += ["check_class", "check_fits", "check_options", "find_ranges", "flatten_update"]
__all__ += ["init_vector_state", "is_updated", "reason_for_break", "refuse_derivatives", "refuse_lost_rates", "run_in_graph"]
__all__ += ["state_to_step", "tensor_options", "warn_zero_gradients", "write_state"]


InitialState = Callable[[Tensor], Tensors]
"""A function from a vector to its state before the first step."""

ELEMENTWISE_CLASSES = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)
"""The elementwise optimizers of torch.optim. Pinned by ``test_every_optimizer_is_right_or_refused``."""

LR_DIFFERENTIABLE_CLASSES = (SGD, Adam, AdamW, NAdam, RAdam)
"""The classes that can differentiate their learning rate as any tensor. Pinned by ``test_derivatives_of_rates``."""


def check_class(cls: object, initial: InitialState | None) -> None:
    """Raise ValueError for an optimizer not known to be elementwise, TypeError for what is not an optimizer class."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"from_torch: expected a class of optimizers such as torch.optim.AdamW, got {cls!r}")
    of_torch = cls.__module__.startswith("torch.optim")
    if cls not in ELEMENTWISE_CLASSES and (of_torch or initial is None):
        vouch = "" if of_torch else ", or initial= for a class of your own that works element by element"
        raise ValueError(
            f"from_torch: {cls.__name__} is not known to work element by element, and on slices it would be another "
            f"optimizer: expected one of {[c.__name__ for c in ELEMENTWISE_CLASSES]}{vouch}; one that needs whole tensors can "
            "step those of fs.unshard or fs.gather_full"
        )


def is_updated(tensor: Tensor) -> bool:
    """Return whether an optimizer changes the tensor: integers stay as they are."""
    return tensor.is_floating_point() or tensor.is_complex()


def find_ranges(ranges: Mapping[str, OptionRanges] | None, key: str, tensor: object) -> OptionRanges:
    """Return a unit's option ranges. ValueError or TypeError, naming the unit, if the tensor is not a shard of it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"unit '{key}': expected a tensor, got {type(tensor).__name__}")
    if ranges is None:
        return OptionRanges()
    if key not in ranges:
        raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*ranges][:8]}")
    if frozen := ranges[key].frozen_unit:
        check_trainable([frozen], "update")
    if tuple(tensor.shape) != (ranges[key].numel,):
        raise ValueError(
            f"unit '{key}': expected a shard of {ranges[key].numel} elements, got shape {list(tensor.shape)}; "
            "are these params of another spec or another mesh?"
        )
    return ranges[key]


def check_options(defaults: Mapping[str, Any], *, donate: bool, device: object) -> None:
    """Raise ValueError or TypeError for options of an elementwise optimizer that exclude each other, or a bad ``lr``."""
    check_rate(defaults.get("lr"), "from_torch: lr")
    if not defaults.get("differentiable"):
        return
    if donate:
        raise ValueError("from_torch: donated memory is written over: expected donate=False with differentiable=True")
    if device is not None:
        raise ValueError(
            "from_torch: copies to a device and back are not recorded: expected device=None with differentiable=True"
        )
    if defaults.get("dampening"):
        raise ValueError("from_torch: with dampening torch cuts the first momentum off: expected differentiable=False")


def check_fits(
    grads: Tensors,
    state: StateMapping,
    params: Tensors,
    ranges: Mapping[str, OptionRanges],
    names: list[frozenset[str]],
    scalars: frozenset[str],
) -> None:
    """Raise ValueError or TypeError, naming the unit, unless each unit of the params has a gradient and a state that fit it."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"state: expected a dict by unit key, as init(params) or an update returns, got {type(state).__name__}; that of an "
            "optimizer made of others has this one's inside"
        )
    refuse_encoded(state)
    for what, tree in (("gradient", grads), ("state", state)):
        for key in tree:
            if key not in params:
                raise ValueError(f"unit '{key}' has a {what} and is not in params: expected some of {[*params][:8]}")
        for key in tree if what == "gradient" else ():
            if params[key].dtype == torch.uint8:
                raise TypeError(
                    f"unit '{key}' is torch.uint8, as is what is frozen and at rest in a codec: expected no gradient of it; "
                    "set it apart with fs.partition(params, spec)"
                )
    for key in params:
        if key not in state:
            raise ValueError(f"unit '{key}' has no state: expected that of init(params) or of an update, got {[*state][:8]}")
    for key, unit_ranges in ranges.items():
        param = params[key]
        if key not in grads:
            raise ValueError(f"unit '{key}' has no gradient: expected one for each of the params, got {[*grads][:8]}")
        _check_like(f"the gradient of unit '{key}'", grads[key], param)
        expected = {name for group in unit_ranges.groups for name in names[group]}
        if set(state[key]) != expected:
            raise ValueError(f"the state of unit '{key}': expected {sorted(expected)}, got {sorted(state[key])}")
        for name, tensor in state[key].items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"'{name}' of unit '{key}': expected a tensor, got {type(tensor).__name__}")
            shape = param.shape if name not in scalars else () if len(unit_ranges.groups) == 1 else (len(unit_ranges.groups),)
            if tensor.shape not in (shape, *([()] if name in scalars else [])):
                raise ValueError(f"'{name}' of unit '{key}': expected shape {list(shape)}, got {list(tensor.shape)}")


def _check_like(what: str, grad: object, param: Tensor) -> None:
    if not isinstance(grad, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(grad).__name__}; an unused parameter has gradient zeros")
    if grad.layout != torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got {grad.layout}; use grad.to_dense()")
    expected, got = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (param, grad))
    if expected != got:
        raise ValueError(f"{what}: expected {expected}, got {got}")


def refuse_derivatives(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise RuntimeError if a tensor is tracked: torch's kernels would lose its derivatives silently."""
    for what, tensor in tensors:
        if _torch.has_derivative(tensor):
            raise RuntimeError(
                f"from_torch: {what} takes part in a derivative, which torch's kernels would lose: expected "
                "differentiable=True, or an update under torch.no_grad() or outside of the transform"
            )


def refuse_lost_rates(cls: type[torch.optim.Optimizer], rates: Iterable[tuple[str, Tensor]], *, differentiable: bool) -> None:
    """Raise RuntimeError for a differentiated or batched learning rate that torch would turn into a number silently."""
    for what, rate in rates:
        if not (_torch.is_wrapped(rate) or _torch.has_derivative(rate)):
            continue
        if not (differentiable and (cls in LR_DIFFERENTIABLE_CLASSES or cls not in ELEMENTWISE_CLASSES)):
            raise RuntimeError(
                f"from_torch: {what} is differentiated or batched, and torch's {cls.__name__} makes a number of it: expected "
                f"differentiable=True and one of {[c.__name__ for c in LR_DIFFERENTIABLE_CLASSES]}"
            )


STATE_FROM_RATE: Mapping[type[torch.optim.Optimizer], str] = {ASGD: "eta", Rprop: "step_size"}
"""The state that torch creates in the first step, from the learning rate of that step."""


class ElementwiseConfig(NamedTuple):
    """The checked arguments of `from_torch`."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    initial: InitialState | None
    donate: bool
    device: torch.device | None
    groups: list[Mapping[str, Any]]
    ranges: Mapping[str, OptionRanges] | None
    names: list[frozenset[str]]
    """For each param group, the names in its state."""
    scalars: frozenset[str]
    """The names whose values are numbers."""
    lr: Any
    spec: PartitionSpec | None
    """The spec, by which derivatives know replicas and padding."""
    rank: int | None
    is_recorded: bool = False
    """Whether the update becomes part of a graph, where numbers are tensors without values."""

    @property
    def differentiable(self) -> bool:
        """Whether torch's kernels record derivatives."""
        return bool(self.defaults.get("differentiable"))


def init_vector_state(
    cls: type[torch.optim.Optimizer], piece: Tensor, options: Mapping[str, Any], initial: InitialState | None = None
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


def state_to_step(config: ElementwiseConfig, given: Tensors, lr: Any) -> dict[str, Tensor]:
    """Return a vector's state for torch's step with ``lr``: {} if torch must create it, as SGD's before a dampened step."""
    if config.cls is SGD and "step" in given and bool(given["step"] == 0):
        return {}
    name = STATE_FROM_RATE.get(config.cls)
    if name is None or (_torch.is_eager() and bool(given["step"] != 0)):
        return dict(given)
    old = given[name]
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32) if name in config.scalars else old.dtype
    rate = torch.as_tensor(lr * (1 + 1j) if old.is_complex() else lr, dtype=dtype, device=old.device)
    return {**given, name: torch.where((given["step"] == 0).to(old.device), rate, old)}


def tensor_options(config: ElementwiseConfig, lr: float | Tensor | None) -> list[tuple[str, Tensor]]:
    """Return ``(name, value)`` of the options that are tensors."""
    options = [("lr", lr), *config.defaults.items(), *(option for group in config.groups for option in group.items())]
    return [(name, value) for name, value in options if isinstance(value, Tensor)]


def write_state(config: ElementwiseConfig, given: dict[str, Tensor], after: Tensors) -> None:
    """Write into ``given`` the state that torch replaced instead of updating."""
    for name, tensor in after.items():
        if name not in given:
            raise ValueError(f"from_torch: the first step made '{name}': expected initial= to give it, got {[*given]}")
        if tensor is not given[name]:
            given[name].copy_(tensor)
    if config.cls is SGD and "step" in given:
        given["step"].add_(1)


def build_optimizer(config: ElementwiseConfig, lr: float | Tensor | None) -> torch.optim.Optimizer:
    """Return torch's optimizer with its param groups, without parameters."""
    groups = [{"params": [torch.empty(0)], **group} for group in config.groups]
    # torch asks whether it is below 0, and nobody can tell
    batched = isinstance(lr, Tensor) and (config.is_recorded or _torch.is_wrapped(lr))
    optimizer = config.cls(groups, **(config.defaults if lr is None or batched else {**config.defaults, "lr": lr}))
    optimizer.state.clear()
    for group, own in zip(optimizer.param_groups, config.groups, strict=True):
        group["params"] = []
        if lr is not None and "lr" in own:
            group["lr"] = scale_lr(lr, own["lr"], config.lr, "from_torch: ")
        elif batched:
            group["lr"] = lr
    return optimizer


# --- Adam and AdamW with an epsilon under the root, so that derivatives exist where all gradients were zero ---


def add_eps_root(cls: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class itself, or a subclass with ``eps_root``, which is checked and removed from the defaults."""
    if "eps_root" not in defaults:
        return cls
    eps_root = defaults.pop("eps_root")
    if cls not in (Adam, AdamW) or not defaults.get("differentiable") or defaults.get("amsgrad"):
        raise ValueError(
            f"from_torch: eps_root is for differentiable Adam and AdamW, without amsgrad: expected one of these with "
            f"differentiable=True, got {cls.__name__}"
        )
    if not eps_root >= 0:
        raise ValueError(f"from_torch: eps_root: expected at least 0, got {eps_root}")

    class WithEpsRoot(cls):  # pyright: ignore[reportGeneralTypeIssues]
        """An optimizer that divides by ``sqrt(v / (1 - b2^t) + eps_root) + eps``, as optax.adam does."""

        has_derivative_at_zero = eps_root > 0

        def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                for param in group["params"]:
                    _step(param, self.state[param], group, eps_root)

    WithEpsRoot.__name__ = WithEpsRoot.__qualname__ = cls.__name__
    return WithEpsRoot


def _step(param: Tensor, state: dict[str, Tensor], group: dict[str, Any], eps_root: float) -> None:
    """Run one step in place, as torch's own does, in operations that autograd records."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    assert param.grad is not None
    before = param.clone()  # saved for derivatives by tensor options, and not written to
    if param.is_complex():
        raise TypeError("from_torch: eps_root is for real parameters, got complex ones")
    grad = -param.grad if group["maximize"] else param.grad
    decoupled = group.get("decoupled_weight_decay", False)
    if decay and not decoupled:
        grad = grad + decay * before
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    steps = state["step"].to(param.dtype)
    average = state["exp_avg"] / (1 - beta1**steps)
    square = state["exp_avg_sq"] / (1 - beta2**steps)
    shrunk = before * (1 - lr * decay) if decay and decoupled else before
    param.copy_(shrunk - lr * average / ((square + eps_root).sqrt() + group["eps"]))


def warn_zero_gradients(cls: type[torch.optim.Optimizer], grads: Tensors, state: StateMapping, masks: Tensors) -> None:
    """Warn, naming the unit, about elements whose gradients were all zero and are differentiated through a root."""
    if not issubclass(cls, Adam | AdamW) or getattr(cls, "has_derivative_at_zero", False) or _torch.is_in_graph():
        return
    for key, grad in grads.items():
        if key not in state or "exp_avg_sq" not in state[key] or not _torch.has_derivative(grad) or _torch.is_batched(grad):
            continue
        zeros = _torch.unwrap(state[key]["exp_avg_sq"].detach()) == 0
        if key in masks:
            zeros = zeros & ~masks[key]
        if bool(zeros.any()):
            warnings.warn(
                f"from_torch: unit '{key}' has elements whose gradients were all 0, as of a feature that is always 0: "
                f"{cls.__name__} takes the root of their mean square, which has no derivative there, and derivatives that "
                "depend on them are NaN; give eps_root=1e-8, say, which is added under the root",
                stacklevel=3,
            )
            return


# --- In a graph: torch's optimizers read a count by ``Tensor.item``, and give its functions to operators as numbers ---


class NumbersAsTensors(TorchFunctionMode):
    """A mode in which ``item`` returns a 0-D tensor in float64, and operators take one instead of a Python number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item:
            return args[0].double()
        if func in _torch.PROFILER_OPS:  # the graph would have them
            return ()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x.dim() for x in tensors):
            args = tuple(map(_store_number, args))
            kwargs = {key: _store_number(x) for key, x in kwargs.items()}
        elif len(args) == 2 and len(tensors) == 2 and all(x.is_floating_point() for x in tensors):
            first, second = args  # a Python number takes the dtype of a tensor
            if second.dtype == torch.float64:
                return func(first, second.to(first.dtype), **kwargs)
            if first.dtype == torch.float64 and not func.__name__.endswith("_"):
                return func(first.to(second.dtype), second, **kwargs)
        function, name = _SCALED.get(func, (None, ""))
        if function is not None and isinstance(factor := kwargs.get(name), Tensor):
            wide = torch.promote_types(args[0].dtype, torch.float32)  # the kernels round once, at the end
            tensor, first, *others = (x.to(wide) for x in args)
            new = function(tensor, first * factor, *others)
            return args[0].copy_(new) if func.__name__.endswith("_") else new.to(args[0].dtype)
        return func(*args, **kwargs)


def _store_number(x: Any) -> Any:
    """Return a 0-D tensor in memory: inductor would compute an expression of it for each element again."""
    return x.as_strided((), ()) if isinstance(x, Tensor) and x.dim() == 0 else x


_SCALED: dict[Any, tuple[Callable[..., Tensor], str]] = {
    Tensor.add: (torch.add, "alpha"),
    Tensor.add_: (torch.add, "alpha"),
    Tensor.addcmul_: (torch.addcmul, "value"),
    Tensor.addcdiv_: (torch.addcdiv, "value"),
}
"""The operators by which torch's optimizers apply a factor, the functions without a factor, and its name."""


UpdateFn = Callable[..., tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]]
FlatUpdate = Callable[..., tuple[Tensor, ...]]

BRANCHING_CLASSES = (RAdam, ASGD, Rprop)
"""They branch on values unless ``capturable=True``; with it Adam would divide by the learning rate, and 0 / 0 is NaN."""


def _as_vector(x: Any) -> Any:
    """Return a 0-D tensor as a vector: with a 0-D number in float64 it would be computed in float64."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == 0 else x


def reason_for_break(config: ElementwiseConfig) -> str:
    """Return why the update cannot be part of a graph, or "" if it can."""
    if config.differentiable:
        why = "differentiable=True records derivatives"
    elif config.cls not in ELEMENTWISE_CLASSES:
        why = "a class of your own may branch on values"
    elif any({**config.defaults, **group}.get("dampening") for group in config.groups):
        why = "SGD with dampening asks whether a step is the first one"
    elif any(
        isinstance(x, Tensor)
        for options in (config.defaults, *config.groups)
        for x in pytree.tree_leaves({name: value for name, value in options.items() if name != "lr"})
    ):
        why = "options, except lr, are tensors"
    elif isinstance(config.lr, Tensor) and any("lr" in group for group in config.groups):
        why = "lr is a tensor, and parameters have their own"
    else:
        return ""
    return break_message(config.cls.__name__, why)


def flatten_update(config: ElementwiseConfig, update: UpdateFn) -> FlatUpdate:
    """Return ``update`` as a function of flat tensors, which are gradients, params and states, that Dynamo does not enter."""
    is_branching = config.cls in BRANCHING_CLASSES
    cls: Any = config.cls
    kernels: dict[str, Any] = {"foreach": False, "fused": False, "capturable": is_branching}
    options = {name: value for name, value in kernels.items() if name in cls([torch.empty(0)]).defaults}
    if isinstance(config.lr, Tensor):  # an input of the graph; torch compares this one with 0
        options["lr"] = 1.0
    recorded = config._replace(
        defaults={**config.defaults, **options},
        groups=[{name: value for name, value in group.items() if name not in kernels} for group in config.groups],
        donate=False,
        device=None,
        is_recorded=True,
    )

    def flat_update(
        grad_keys: tuple[str, ...],
        keys: tuple[str, ...],
        state_names: tuple[tuple[str, tuple[str, ...]], ...],
        lr: Any,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        given = iter(tensors)
        grads = {key: _as_vector(next(given)) for key in grad_keys}
        params = {key: _as_vector(next(given)) for key in keys}
        state = {
            key: {name: x if name in config.scalars else _as_vector(x) for name, x in zip(names, given, strict=False)}
            for key, names in state_names
        }
        named = [*named_tensors(grads, state, params), *tensor_options(recorded, lr)]
        refuse_derivatives((name, x) for name, x in named if isinstance(x, Tensor))  # pyright: ignore[reportUnnecessaryIsInstance]
        wide = state
        if is_branching:
            numbers = config.scalars
            wide = {k: {n: torch.as_tensor(x).double() if n in numbers else x for n, x in v.items()} for k, v in state.items()}
        with torch.no_grad(), _torch.set_in_graph(is_branching), NumbersAsTensors():
            new_params, new_state = update(recorded, grads, wide, params, lr=lr)
        new = [
            *(new_params[key] for key in keys),
            *(new_state[key][name].to(x.dtype) for key, values in state.items() for name, x in values.items()),
        ]
        return tuple(
            x.squeeze(0) if old.dim() == 0 and x.shape == (1,) else x for x, old in zip(new, tensors[len(grads) :], strict=True)
        )

    return _torch.allow_in_graph(flat_update)


@_torch.allow_in_graph
def _refuse_rate(lr: float) -> None:
    """Raise torch's error for a learning rate, which Dynamo would replace by its own."""
    raise ValueError(f"Invalid learning rate: {lr}")


def run_in_graph(
    config: ElementwiseConfig,
    flat_update: FlatUpdate,
    grads: Tensors,
    state: StateMapping,
    params: Tensors,
    lr: float | Tensor | None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the new params and state of the function of `flatten_update`; with ``config.donate``, in the given tensors."""
    check_mapping(params)
    check_mapping(grads, "grads")
    if lr is None and isinstance(config.lr, Tensor):
        lr = config.lr
    if isinstance(lr, float | int):
        if not lr >= 0.0:
            _refuse_rate(float(lr))
        lr = torch.ones((), dtype=torch.float64) * lr
    state_names = tuple((key, tuple(values)) for key, values in state.items())
    given = [*params.values(), *(x for values in state.values() for x in values.values())]
    new: Iterable[Tensor] = flat_update(tuple(grads), tuple(params), state_names, lr, *grads.values(), *given)
    if config.donate:
        new = [_torch.write_into(into, x) if into.shape == x.shape else x for into, x in zip(given, new, strict=True)]
    values = iter(new)
    new_params = {key: next(values) for key in params}
    return new_params, {key: replace_values(old, {name: next(values) for name in old}) for key, old in state.items()}
