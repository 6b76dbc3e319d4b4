"""Remat: the results that are saved of a module that runs again for its derivatives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .._torch import OpOverload

__all__ = ["RECOMPUTE_ALL", "Chosen", "Remat", "Save"]

Save = Callable[..., Any] | Collection[str | OpOverload]
"""A function that chooses operators, or the operators, or names that `funshard.checkpoint_name` gives."""

Chosen = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], bool]
"""``chosen(op, args, kwargs, results)``: whether the results of this operator are to be kept."""


@dataclass(frozen=True, repr=False)
class Remat:
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
    """Return whether the answer of a save function means to save; raise TypeError for an answer of another kind."""
    if isinstance(answer, bool):
        return answer
    if answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return True
    if answer in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return False
    raise TypeError(f"Remat: save: expected True, False or a CheckpointPolicy to save or recompute from {fn!r}, got {answer!r}")
