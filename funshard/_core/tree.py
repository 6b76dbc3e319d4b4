"""A module as a pytree of frozen nodes: what policies look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import optree
import torch
from torch import nn
from torch.nn.parameter import is_lazy

NAMESPACE = "funshard"
"""The optree namespace in which funshard registers its own node types."""


def natural_key(path: str) -> tuple[tuple[int, int, str], ...]:
    """Return the sort key that puts ``blocks.2`` before ``blocks.10``."""
    return tuple((0, int(c), "") if c.isdecimal() else (1, 0, c) for c in path.split("."))


def join_path(path: str, name: str) -> str:
    """Return ``path.name``, or ``name`` where the path is the root's empty one."""
    return f"{path}.{name}" if path else name


def is_within(name: str, path: str) -> bool:
    """Return whether the name is the module path itself, or that of something inside it."""
    return not path or name == path or name.startswith(f"{path}.")


@dataclass(frozen=True)
class Param:
    """A parameter without its values: names, shape, dtype and memory order.

    ``name`` is the FQN under which ``named_parameters`` lists it and ``aliases`` are its other FQNs: those of tied
    weights, and those that it has because a module above it is shared. ``order`` lists the dimensions from the largest
    stride to the smallest, so that a dense memory format (channels_last, a transposed weight) survives flattening.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    local: tuple[tuple[str, int], ...] = ()
    """The mesh axes over which ``shape`` is that of a piece of a larger parameter, and the dimension that each splits."""
    # made at once, not when asked for: Python 3.11's cached_property has a lock, which torch.compile does not trace
    numel: int = field(init=False, compare=False, repr=False)
    """The number of elements."""
    permuted: bool = field(init=False, compare=False, repr=False)
    """Whether the memory order differs from the order of the dimensions."""
    locations: tuple[tuple[str, str], ...] = field(init=False, compare=False, repr=False)
    """The module path and the attribute of each FQN."""
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """All FQNs, ``name`` first."""

    def __post_init__(self) -> None:
        names = (self.name, *self.aliases)
        object.__setattr__(self, "numel", torch.Size(self.shape).numel())
        object.__setattr__(self, "permuted", self.order != tuple(range(len(self.order))))
        object.__setattr__(self, "locations", tuple((path, attr) for path, _, attr in (name.rpartition(".") for name in names)))
        object.__setattr__(self, "names", names)

    @property
    def sort_key(self) -> tuple[tuple[int, int, str], ...]:
        """A key that does not depend on the order in which submodules were registered (law S3)."""
        return min(map(natural_key, self.names))


@dataclass(frozen=True)
class ModuleTree:
    """A module as a frozen node: its path and class, its own parameters and its children.

    A module that is registered at several places appears once, where ``named_modules`` finds it first; ``aliases`` are
    its other paths. ``ignored`` (on a root) names the parameters that `without` took out. Nodes compare by value; the
    module itself is there for predicates that ask for it and takes no part in comparisons. The tree is registered with
    optree (namespace ``"funshard"``), its leaves are `Param`:

    >>> tree = module_tree(nn.Sequential(nn.Linear(2, 3)))
    >>> [p.name for p in optree.tree_leaves(tree, namespace="funshard")]
    ['0.weight', '0.bias']
    """

    path: str
    cls: type[nn.Module]
    params: tuple[Param, ...]
    children: tuple[ModuleTree, ...]
    aliases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    module: nn.Module = field(compare=False, repr=False, kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """All paths, ``path`` first."""
        return (self.path, *self.aliases)

    def nodes(self) -> Iterator[ModuleTree]:
        """Yield this node and all nodes below it, parents first.

        Yields:
            Each module once, in the order of ``nn.Module.modules``.
        """
        yield self
        for child in self.children:
            yield from child.nodes()

    @cached_property
    def canonical(self) -> Mapping[str, str]:
        """For each path at which a module can be reached, the path of its node."""
        return {path: node.path for node in self.nodes() for path in node.names}

    @cached_property
    def all_params(self) -> tuple[Param, ...]:
        """The parameters at and below this node, each once."""
        return tuple({p.name: p for node in self.nodes() for p in node.params}.values())

    def dominators(self, item: Param | ModuleTree) -> tuple[str, ...]:
        """Return the modules that every way from the root to a parameter or module goes through.

        The last one is the lowest common ancestor of the modules that share the parameter. For a parameter inside a shared
        module it is inside that module, however often the module is used.

        Args:
            item: A parameter or module of this tree.

        Returns:
            The modules' paths, outermost first.
        """
        chains = [self._enclosing_paths(name) for name in item.names]
        common = set(chains[0]).intersection(*chains[1:])
        return tuple(path for path in chains[0] if path in common)

    def _enclosing_paths(self, name: str) -> list[str]:
        """Return the canonical paths of the modules from the root to the one with this parameter."""
        parts = name.split(".")[:-1]
        return [self.canonical[".".join(parts[:i])] for i in range(len(parts) + 1)]

    def without(self, modules: Callable[[ModuleTree], bool], params: Callable[[Param], bool]) -> ModuleTree:
        """Return the tree without the chosen subtrees and parameters, and with their names in ``ignored``.

        A parameter or module that a chosen subtree shares with other modules is removed from those too.

        Args:
            modules: Whether to remove a module, and with it all that is below it.
            params: Whether to remove a parameter.

        Returns:
            A new tree; this one does not change.
        """
        chosen = {node.path for node in self.nodes() if modules(node)}

        def below(item: Param | ModuleTree) -> bool:
            return any(not chosen.isdisjoint(self._enclosing_paths(name)) for name in item.names)

        cut = {node.path for node in self.nodes() if node.path in chosen or (node is not self and below(node))}
        gone = {p.name for p in self.all_params if params(p) or below(p)}

        return dataclasses.replace(_prune(self, gone, cut), ignored=tuple(sorted({*self.ignored, *gone}, key=natural_key)))


def _prune(node: ModuleTree, gone: set[str], cut: set[str]) -> ModuleTree:
    return dataclasses.replace(
        node,
        params=tuple(p for p in node.params if p.name not in gone),
        children=tuple(_prune(child, gone, cut) for child in node.children if child.path not in cut),
    )


def _flatten_node(node: ModuleTree) -> tuple[Iterable[Param | ModuleTree], tuple[ModuleTree, int]]:
    bare = dataclasses.replace(node, params=(), children=())  # no leaves: trees of one structure compare equal
    return (*node.params, *node.children), (bare, len(node.params))


def _unflatten_node(metadata: tuple[ModuleTree, int], children: Iterable[object]) -> ModuleTree:
    node, count = metadata
    items = tuple(children)
    return dataclasses.replace(node, params=items[:count], children=items[count:])  # pyright: ignore[reportArgumentType]


optree.register_pytree_node(ModuleTree, _flatten_node, _unflatten_node, namespace=NAMESPACE)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]


def module_tree(model: nn.Module | ModuleTree) -> ModuleTree:
    """Return the tree of a module, from its structure alone.

    Args:
        model: A module, on any device: on the meta device it gives an equal tree. A `ModuleTree` is returned as it is.

    Returns:
        The root of the tree.

    Raises:
        TypeError: For an object that is not an ``nn.Module``, and for the result of torch.compile.
        ValueError: For a module that contains itself, and for a lazy parameter that has no shape yet.

    Example:
        >>> import torch, funshard as fs
        >>> tree = fs.module_tree(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        >>> [(param.name, param.shape) for param in tree.all_params]
        [('0.weight', (1, 2)), ('0.bias', (1,))]
    """
    if isinstance(model, ModuleTree):
        return model
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"module_tree: expected an nn.Module, got {type(model).__name__}")
    paths: dict[nn.Module, list[str]] = {}
    names: dict[torch.Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if any(is_within(path, around) for around in paths.get(module, ())):
            raise ValueError(f"module '{path}' contains itself: expected a tree of modules")
        check_not_compiled(path, module)
        paths.setdefault(module, []).append(path)
        for name, param in module._parameters.items():
            if param is not None and is_lazy(param):
                raise ValueError(
                    f"parameter '{join_path(path, name)}' is lazy: expected a shape, got none yet; "
                    "run the module once to give it one"
                )
            if param is not None:
                names.setdefault(param, []).append(join_path(path, name))
    infos = {tensor: _describe_param(tensor, fqns) for tensor, fqns in names.items()}
    return _build_node(model, paths, infos, set())


# Not a closure that calls itself: that is a reference cycle, which keeps a dropped model alive until the next gc.
def _build_node(
    module: nn.Module, paths: Mapping[nn.Module, list[str]], infos: Mapping[torch.Tensor, Param], seen: set[nn.Module]
) -> ModuleTree:
    """Return the tree of a module and of those inside it that no other one contains yet."""
    seen.add(module)
    first, *rest = paths[module]
    own = tuple(infos[p] for p in module._parameters.values() if p is not None)
    children = tuple(_build_node(c, paths, infos, seen) for c in module._modules.values() if c is not None and c not in seen)
    return ModuleTree(first, type(module), own, children, tuple(rest), module=module)


def check_not_compiled(path: str, module: nn.Module, *, in_place: bool = False) -> None:
    """Raise TypeError for the result of torch.compile, and with ``in_place`` for a module that ``.compile()`` changed."""
    if "_orig_mod" in module._modules:
        raise TypeError(
            f"module '{path}' is what torch.compile({type(module._modules['_orig_mod']).__name__}) gives: expected the module "
            "itself (its _orig_mod); compile what calls it, with fs.compile or torch.compile"
        )
    if in_place and module._compiled_call_impl is not None:
        raise TypeError(
            f"module '{path}' was compiled in place by .compile(), which would compile functional_call's own insides: "
            "expected that of units only, by a policy such as by_type(type(block)); or compile what calls it, with fs.compile"
        )


def _describe_param(tensor: torch.Tensor, names: list[str]) -> Param:
    order = tuple(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)))
    if not tensor.permute(order).is_contiguous():  # expanded or strided with gaps: no dense format to keep
        order = tuple(range(tensor.dim()))
    unique = tuple(dict.fromkeys(names))
    return Param(unique[0], tuple(tensor.shape), tensor.dtype, tensor.requires_grad, unique[1:], order)
