"""Policies: pure functions from a module pytree to a partition spec.

After torch.distributed.fsdp.wrap; where these differ from their namesakes there (shared modules and tied parameters
are counted once, root options are never changed) tests/core/test_policies.py says so. `funshard.policies` has more of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from .build import build_with_leftovers
from .spec import PartitionSpec
from .tree import ModuleTree, module_tree
from .unit import P


class Policy(Protocol):
    """A pure function from a module, or its `module_tree`, to a `PartitionSpec`: which modules are units, and how.

    It reads the structure only, so a module on the meta device will do, and gives equal specs for equal trees. Any function
    of this signature is a policy. Those of this package print as the call that made them, and pickle if their arguments do.

    >>> import torch, funshard as fs
    >>> def blocks(model: torch.nn.Module | fs.ModuleTree) -> fs.PartitionSpec:
    ...     return fs.by_path({"0": fs.P("shard", remat=True)})(model)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> [unit.key for unit in fs.policies.override(fs.policies.whole(), blocks)(model)]
    ['', '0']
    """

    def __call__(self, model: nn.Module | ModuleTree, /) -> PartitionSpec:
        """Return the spec of a module, or of its tree."""
        ...


SHARD = P("shard")
"""The `P` of every policy that is given no other."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NamedPolicy:
    """A policy that prints as the call that made it.

    ``build`` is a module-level function with its arguments bound (functools.partial) and no closure: closures do not pickle.
    """

    text: str
    build: Callable[[ModuleTree], PartitionSpec]

    def __call__(self, model: nn.Module | ModuleTree, /) -> PartitionSpec:
        return self.build(module_tree(model))

    def __repr__(self) -> str:
        return self.text


def format_call(name: str, *args: object, p: P | None = None, **options: object) -> str:
    """Return a call much as it was written; options that are not None, and ``p`` where it is not the default."""
    given = [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join([*map(_format_argument, args), *given, *([f'p={p}'] if p is not None and p != SHARD else [])])})"


def _format_argument(item: object) -> str:
    """Return an argument in a policy's repr: classes and functions by name, modules and tensors by class."""
    if isinstance(item, type):
        return item.__name__
    if isinstance(item, nn.Module | torch.Tensor):
        return f"<{type(item).__name__}>"
    if isinstance(item, list):
        return f"[{', '.join(map(_format_argument, item))}]"
    return getattr(item, "__qualname__", None) or repr(item)


def check_p(where: str, p: object) -> None:
    """Raise TypeError unless it is a `P`."""
    if not isinstance(p, P):
        hint = f"; write P({p!r})" if isinstance(p, str | tuple) else ""
        raise TypeError(f"{where}: expected a P such as P('shard'), got {p!r}{hint}")


def check_classes(what: str, classes: Iterable[object]) -> None:
    """Raise TypeError unless they are classes of modules."""
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{what}: expected subclasses of nn.Module, got {cls!r}")


def build_selected(select: Callable[[P, ModuleTree], P | None], p: P, tree: ModuleTree) -> PartitionSpec:
    """Build the spec whose units are the nodes for which ``select(p, node)`` returns a `P`; the leftovers have ``p``."""
    chosen = {node.path: own for node in tree.nodes() if (own := select(p, node)) is not None}
    return build_with_leftovers(tree, chosen, p)


def whole(p: P = SHARD) -> Policy:
    """Return the policy with the whole model as one unit.

    Args:
        p: The unit's `P`.

    Example:
        >>> import torch, funshard as fs
        >>> [unit.path for unit in fs.policies.whole()(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))]
        ['']
    """
    check_p("whole", p)
    return NamedPolicy(format_call("whole", p=p), functools.partial(build_selected, _select_none, p))


def _select_none(p: P, node: ModuleTree) -> P | None:
    return None


def by_type(*classes: type[nn.Module], p: P = SHARD) -> Policy:
    """Return the policy with a unit for every instance of the classes (ModuleWrapPolicy).

    Args:
        classes: Module classes, at least one.
        p: The `P` of all units.

    Raises:
        ValueError: Without classes; from the policy, for a model that has no module of them.
        TypeError: For something else than a module class.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [unit.path for unit in fs.by_type(torch.nn.Linear)(model)]
        ['', '0']
    """
    if not classes:
        raise ValueError("by_type: expected at least one module class, got none; whole() makes one unit")
    check_classes("by_type", classes)
    check_p("by_type", p)
    return NamedPolicy(format_call("by_type", *classes, p=p), functools.partial(_build_by_type, classes, p))


def _build_by_type(classes: tuple[type[nn.Module], ...], p: P, tree: ModuleTree) -> PartitionSpec:
    chosen = {node.path: p for node in tree.nodes() if issubclass(node.cls, classes)}
    if not chosen:
        names = list(dict.fromkeys(node.cls.__name__ for node in tree.nodes()))
        raise ValueError(
            f"by_type: no module is of {', '.join(cls.__name__ for cls in classes)}: expected classes of the model's "
            f"modules, some of {names[:8]}; whole() makes one unit"
        )
    return build_with_leftovers(tree, chosen, p)
