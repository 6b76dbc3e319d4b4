"""Compile, Remat and offload: how a unit's forward is compiled, what backward runs again, and what is in host memory."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.compiler import list_backends
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.unit import PARSERS, Option, P, add_keyword
from .._torch import OpOverload
from .precision import has_casts

# --- Compile: how torch.compile compiles a unit's forward ---


@dataclass(frozen=True)
class Compile(Option):
    """Compilation of a unit's forward by torch.compile: ``P(compile=Compile(...))``; ``P(compile=True)`` is the default one.

    Modules of one structure share a compilation, as far as torch guards allow it. Gathers, reductions and what is saved for
    backward stay those of the eager schedule.

    >>> import torch, funshard as fs
    >>> fs.P("shard", compile=fs.Compile(backend="aot_eager"))
    P('shard', compile=Compile(backend='aot_eager'))

    Raises TypeError or ValueError for options of another kind.
    """

    backend: str | Callable[..., Any] = "inductor"
    """A backend of torch.compile."""
    mode: str | None = None
    """A mode of inductor, such as "max-autotune-no-cudagraphs"; not with ``options``."""
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """The backend's options."""
    dynamic: bool | None = None
    """Whether shapes are symbols from the first graph on (True), never (False), or when they have changed (None)."""
    fullgraph: bool = False
    """Whether a graph break is an error."""

    def __post_init__(self) -> None:
        if not (isinstance(self.backend, str) or callable(self.backend)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Compile: backend: expected a name or a function, got {self.backend!r}")
        kinds: dict[str, tuple[Any, str]] = {
            "mode": ((str, type(None)), "a string or None"),
            "dynamic": ((bool, type(None)), "True, False or None"),
            "fullgraph": (bool, "True or False"),
            "options": ((Mapping, tuple), "a dict"),
        }
        for name, (kind, expected) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"Compile: {name}: expected {expected}, got {value!r}")
        if self.mode and self.options:
            raise ValueError(f"Compile: expected a mode or options, got mode={self.mode!r} and options={self.options!r}")
        items = self.options.items() if isinstance(self.options, Mapping) else self.options
        object.__setattr__(self, "options", tuple(sorted(items)))

    def __repr__(self) -> str:  # the same on every rank
        shown = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}
        if not isinstance(self.backend, str):
            shown["backend"] = getattr(self.backend, "__name__", type(self.backend).__name__)
        if self.options:
            shown["options"] = dict(self.options)
        return f"Compile({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


add_keyword("compile", bool | Compile, "True, False or a Compile, got {}")


def find_compiled(spec: PartitionSpec) -> dict[str, Compile]:
    """Return how each module path with ``P(compile=...)`` is compiled."""
    return {path: p.compile if isinstance(p.compile, Compile) else Compile() for path, p in spec.by_run.items() if p.compile}


def check_names(where: str, backend: object, mode: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a backend, a mode or options that torch.compile does not know; ``where`` begins the message."""

    def check(what: str, name: str, known: Sequence[str], *, close: bool = False) -> None:
        if name not in known and name.replace("-", "_") not in known:
            known = (difflib.get_close_matches(name, known) or known[:5]) if close else known
            raise ValueError(f"{where}: {what}: expected one of {', '.join(map(repr, known))}, got {name!r}")

    if isinstance(backend, str):
        check("backend", backend, list_backends(exclude_tags=()))
    if backend == "inductor" and mode is not None:
        check("mode", mode, [*_torch.inductor_modes()])
    for name in options if backend == "inductor" else ():
        check("options", name, _torch.list_inductor_options(), close=True)


# --- Remat: the results that are saved of a module that runs again for its derivatives ---

Save = Callable[..., Any] | Collection[str | OpOverload]
"""A function that chooses operators, or the operators, or names that `funshard.checkpoint_name` gives."""

Chosen = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], bool]
"""``chosen(op, args, kwargs, results)``: whether the results of this operator are to be kept."""


@dataclass(frozen=True, repr=False)
class Remat(Option):
    """Recomputation of a module for its derivatives, but for saved results: ``P(remat=Remat(save=...))``.

    A saved result costs its memory, and the operator that made it does not run again for the gradient. A run is under a
    dispatch mode until it has saved or reused all results; the first call of a function shows how many there are. A name or
    the next parameter that is read ends the mode, which under operators lasts for the whole first run. ``save`` is

    - names that the model gives with `funshard.checkpoint_name` (jax.checkpoint_policies.save_only_these_names);
    - operators, such as ``torch.ops.aten.mm.default``, or a function from an operator to whether it is to be saved;
    - a policy or a ``context_fn`` as for torch.utils.checkpoint: ``policy(ctx, op, *args, **kwargs) -> CheckpointPolicy``,
      and ``functools.partial(create_selective_checkpoint_contexts, policy)``, which is called anew for each first run.

    >>> import torch, funshard as fs
    >>> fs.P("shard", remat=fs.Remat(save={"attn_out"}))
    P('shard', remat=Remat(save={'attn_out'}))

    Raises TypeError for anything else.
    """

    save: Save | None = None

    def __post_init__(self) -> None:
        save = self.save
        if save is None:
            return
        if isinstance(save, str | bytes) or not (callable(save) or isinstance(save, Collection)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Remat: save: expected names, operators or a function, got {save!r}; one name is {{'name'}}")
        if callable(save):
            _count_required_args(save)
            return
        for item in save:
            if not isinstance(item, str | OpOverload):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"Remat: save: expected names and operators such as torch.ops.aten.mm.default, got {item!r}"
                    + ("; give its overloads" if hasattr(item, "overloads") else "")
                )
        object.__setattr__(self, "save", frozenset(save))

    def __repr__(self) -> str:  # the same on every rank
        if self.save is None:
            return "Remat()"
        if isinstance(self.save, frozenset):
            return f"Remat(save={{{', '.join(sorted(repr(x) if isinstance(x, str) else str(x) for x in self.save))}}})"
        fn = getattr(self.save, "func", self.save)
        return f"Remat(save={fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)})"

    @property
    def names(self) -> frozenset[str]:
        """The names in ``save``."""
        return frozenset(x for x in self.save if isinstance(x, str)) if isinstance(self.save, frozenset) else frozenset()

    def _choose_operators(self) -> Chosen:
        """Return which operators' results one run saves. TypeError where a function returns another type than its kind may."""
        save = self.save
        if not callable(save):
            operators = save or ()
            return lambda op, args, kwargs, out: op in operators
        required = _count_required_args(save)
        if required == 1:
            return lambda op, args, kwargs, out: _means_to_save(save, save(op))
        policy = save if required else _policy_of(save)
        context = SelectiveCheckpointContext(is_recompute=False)

        def chosen(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
            context.op_output = out  # which torch before 2.13 does not know of
            try:
                return _means_to_save(policy, policy(context, op, *args, **kwargs))
            finally:
                context.op_output = None

        return chosen


RECOMPUTE_ALL = Remat()
"""The `Remat` of ``P(remat=True)``, which saves nothing."""

add_keyword("remat", bool | Remat, "True or False, got {} (or a Remat, which says what is kept)")


def remat_of(p: P) -> Remat | None:
    """Return ``P(remat=...)``; None where the module does not run again."""
    return p.remat if isinstance(p.remat, Remat) else RECOMPUTE_ALL if p.remat else None


def inner_calls(spec: PartitionSpec) -> tuple[str, ...]:
    """Return the paths of the modules that are calls inside of a call, since backward runs them again."""
    return tuple(path for path, p in spec.by_run.items() if p.remat)


def _count_required_args(save: Callable[..., Any]) -> int:
    """Return the number of required arguments: 1 for a function of operators, 2 for a policy, 0 for a context_fn."""
    wrong = f"Remat: save: expected save(op), policy(ctx, op, *args, **kwargs) or context_fn(), got {save!r}"
    try:
        params = inspect.signature(save).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(wrong) from error
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in places and p.default is p.empty for p in params)
    if required > 2 or (required < 2 and any(p.kind is p.VAR_POSITIONAL for p in params)):
        raise TypeError(wrong)
    return required


def _policy_of(context_fn: Callable[[], Any]) -> Callable[..., Any]:
    """Return the policy given to torch.utils.checkpoint.create_selective_checkpoint_contexts."""
    contexts = context_fn()
    policy = getattr(contexts[0], "policy_fn", None) if isinstance(contexts, tuple) and contexts else None
    if policy is None:
        raise TypeError(
            f"Remat: save: {context_fn!r} gives contexts of its own, which funshard does not run in: expected those of "
            "torch.utils.checkpoint.create_selective_checkpoint_contexts, or its policy"
        )
    return policy


def _means_to_save(fn: Callable[..., Any], answer: object) -> bool:
    if isinstance(answer, bool):
        return answer
    if answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return True
    if answer in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return False
    raise TypeError(f"Remat: save: expected True, False or a CheckpointPolicy to save or recompute from {fn!r}, got {answer!r}")


# --- ``P(offload=...)`` ---

OFFLOADS = ("activations", "params")
"""The parts of a unit that may live in host memory."""


def _parse_offload(offload: Any, _: P) -> str | tuple[str, ...] | None:
    parts = (offload,) if isinstance(offload, str) else () if offload is None else offload
    expected = f"{' or '.join(map(repr, OFFLOADS))}, a set of them or None"
    if not isinstance(parts, tuple | list | set | frozenset) or not all(type(part) is str for part in parts):
        raise TypeError(f"P: offload: expected {expected}, got {offload!r}")
    if unknown := sorted({*parts} - {*OFFLOADS}):
        raise ValueError(f"P: offload: expected {expected}, got {unknown[0]!r}")
    named = tuple(part for part in OFFLOADS if part in parts)
    return named if len(named) > 1 else named[0] if named else None


PARSERS["offload"] = _parse_offload


# --- all of these, and the casts of a `Precision` ---


def surrounds_forward(p: P) -> bool:
    """Return whether an option surrounds the forward of a module, which a compiled module around it would trace over."""
    return bool(p.remat) or "activations" in p.offloads or has_casts(p)
