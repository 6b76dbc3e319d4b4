"""What watches a call for what it would get wrong without a word: each is an error or a warning, which names the path.

A call replaces what is in ``_parameters``. A list or another object of a module, as ``self.weights = [self.linear.weight]``,
still holds the model's own tensor, whose values are those from before training, or none.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._core.tree import join_path
from .._torch.modules import NormWithStatistics
from .buffers import check_statistics, is_first_warning, warn_discarded
from .module_state import CALL_ATTRIBUTES, BoundModule, GatheringParameters, calling_thread, find_instances
from .running import ForwardRun, Guard


class BufferChanges(Guard):
    """A warning of changes of buffers that are thrown away, and of running statistics that are out of date."""

    def check(self, run: ForwardRun) -> None:
        self._discarded = run.buffers.changed()

    def report(self, run: ForwardRun, stacklevel: int) -> None:
        model = run.call.bound.modules[""]
        if self._discarded and is_first_warning(model, "discarded buffers"):
            warn_discarded(tuple(self._discarded), stacklevel + 1)
        if layers := find_instances(run.call.bound.modules, NormWithStatistics):
            check_statistics(model, layers, run.buffers.given, stacklevel + 1)


class BackwardGuard(Guard):
    """A RuntimeError in a backward from the results of a call that runs a module with the model's own parameters.

    From the first node of backward to its end a hook of torch for all modules looks at each that is called.
    """

    def report(self, run: ForwardRun, stacklevel: int) -> None:
        bound, params, armed = run.call.bound, run.call.params, -1

        def arm(_: object) -> None:
            nonlocal armed
            if armed != (armed := _torch.current_graph_task()):  # at the first of several results
                hook = register_module_forward_pre_hook(functools.partial(_check_in_backward, bound, params))
                until_end = functools.partial(hook.remove)
                weakref.finalize(until_end, hook.remove)  # backward drops it after an error, without a call
                _torch.hold_until_backward_ends(until_end)

        tensors = _find_tensors((run.out, run.attributes))
        for node in {node for tensor in tensors for node, _ in _torch.own_edges(tensor)}:
            node.register_prehook(arm)


def _check_in_backward(bound: BoundModule, params: Mapping[str, Tensor], module: nn.Module, _: object) -> None:
    own = vars(module).get("_parameters") if module in bound.owned else None
    if type(own) is not dict or _torch.current_graph_task() < 0:  # in a call, or in a thread without a backward
        return
    path = next(path for path, one in bound.modules.items() if one is module)
    for attr in bound.owned[module]:
        name = join_path(path, attr)
        if isinstance(own.get(attr), nn.Parameter) and own[attr] is not params.get(name):
            raise RuntimeError(
                f"module '{path}' runs in backward, after its functional_call, and would read the model's own "
                f"parameter '{name}', with the values from before training and no gradient: expected a custom "
                "autograd.Function to take the parameters as arguments, and to run torch.func.functional_call(module, "
                "params, x) in its backward; or P(remat=True) instead of it"
            )


def _real_tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and not isinstance(x, _torch.ForbiddenTensor)]


def _find_tensors(out: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(out):
        yield from _real_tensors(leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", ()))


_CONTAINERS = (dict, list, set, deque)
_SCALARS = (int, float, str)
_OF_NN_MODULE = frozenset({*vars(nn.Module()), *CALL_ATTRIBUTES})
"""The attributes of nn.Module itself, and those that a call sets."""
_MADE_ANEW = _OF_NN_MODULE | {"_flat_weights"}
"""And the list of weights that nn.LSTM makes anew."""


class AttributeWrites(Guard):
    """Put back, return or refuse what forward writes to attributes of modules, and into their dicts, lists and sets."""

    def __init__(self, run: ForwardRun) -> None:
        self._modules = run.call.bound.modules
        self._before = {path: module.__dict__.copy() for path, module in self._modules.items()}
        containers = (held for held in _find_held(run) if isinstance(held.value, _CONTAINERS) and not held.is_in_object)
        self._entries = [(held, _entries(held.value)) for held in containers]

    def restore(self) -> None:
        for (_, _, _, container, _), entries in self._changed_containers:
            container.clear()
            if isinstance(container, dict):
                half = len(entries) // 2
                container.update(zip(entries[:half], entries[half:], strict=True))
            else:
                (container.update if isinstance(container, set) else container.extend)(entries)

    def check(self, run: ForwardRun) -> None:
        """Find the attributes to return. Raise RuntimeError for others whose later reader would get another value, unwarned.

        Those are tensors with a graph, but for weights that forward has put there, for what was None before and is no scalar,
        and for scalars and entries of containers that the result was computed from. And a number that goes with a buffer of the
        caller's which is kept, since forward has registered it again.
        """
        run.attributes = self._find(run.returned)
        replaced_buffers = run.buffers.registered_again()
        used: set[tuple[Any, int]] | None = None
        for path, attr, value in self._changed():
            if (name := join_path(path, attr)) in run.attributes:
                continue
            before = self._before[path].get(attr)
            tensors = [x for x in _real_tensors(value) if x.numel() == 1 or before is not None]
            tensors = [x for x in tensors if _torch.requires_grad_at_any_level(x) or _torch.has_tangent(x)]
            if any(isinstance(x, nn.Parameter) for x in pytree.tree_leaves(before)):
                tensors = []
            elif tensors and (isinstance(before, _CONTAINERS) or all(x.numel() == 1 for x in tensors)):
                used = _torch.edges_in_graph(_find_tensors(run.out)) if used is None else used
                tensors = [x for x in tensors if used.isdisjoint(_torch.own_edges(x))]
            if tensors:
                raise RuntimeError(
                    f"forward leaves a tensor with a graph in attribute '{attr}' of module '{path}', and the call puts that "
                    "back as it was before, so whoever reads it later would get another value and no gradient: expected "
                    f"attributes=('{name}',), which returns it, or the tensor detached, or in the result of forward; inside of "
                    "torch.func all that a module with P(remat=True) computes has a graph: make its constants before the call"
                )
            is_number = isinstance(value, _SCALARS) or (isinstance(value, Tensor) and value.numel() == 1)
            if path in replaced_buffers and attr in self._before[path] and is_number:
                raise RuntimeError(
                    f"forward sets attribute '{attr}' of module '{path}' and registers its buffer '{replaced_buffers[path]}' "
                    "again: the call keeps the buffer, which is in buffers=, and puts the attribute back as it was before; "
                    f"expected attributes=('{name}',), and the value set on the module before the next call, or no such buffer "
                    "in buffers="
                )

    def _find(self, globs: Collection[str]) -> dict[str, Any]:
        """Return the attributes that these globs match, by dotted name; raise ValueError for a glob that matches none."""
        found: dict[str, Any] = {}
        for path, module in self._modules.items() if globs else ():
            found |= {join_path(path, attr): value for attr, value in vars(module).items() if attr not in _MADE_ANEW}
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in found):
                raise ValueError(f"attributes: {glob!r} matches no attribute of a module after forward; expected '*.aux_loss'")
        matching = {name: value for name, value in found.items() if any(fnmatchcase(name, glob) for glob in globs)}
        return pytree.tree_map(lambda leaf: leaf, matching)  # other containers than those that are put back

    def _changed(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the attributes that forward has set, or whose containers it has changed: path, name, value."""
        for (path, module), before in zip(self._modules.items(), self._before.values(), strict=True):
            now = module.__dict__
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for attr, value in now.items():
                if value is not before.get(attr, before) and attr not in _MADE_ANEW | _torch.attributes_of_hooks(module):
                    yield path, attr, value
        for path, attr in dict.fromkeys((held.path, held.attr) for held, _ in self._changed_containers):
            if attr not in _MADE_ANEW:
                yield path, attr, vars(self._modules[path]).get(attr)

    @functools.cached_property
    def _changed_containers(self) -> list[tuple[_Held, list[Any]]]:
        """The containers that have other entries than before, with those of before, if tensors are among them: logs stay."""
        changed: list[tuple[_Held, list[Any]]] = []
        for held, before in self._entries:
            now = _entries(held.value)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                changed.append((held, before))
        leaves = pytree.tree_leaves([(_entries(held.value), before) for held, before in changed])
        return changed if any(isinstance(x, Tensor) for x in leaves) else []


class _Held(NamedTuple):
    path: str
    attr: str
    where: str  # with what is around it in the attribute
    value: Any
    is_in_object: bool


def _find_held(run: ForwardRun) -> Sequence[_Held]:
    """Return what attributes of modules hold, but for those of nn.Module, and what containers and users' objects there do."""
    if run.held is not None:
        return run.held
    run.held = []
    queue = [
        _Held(path, attr, join_path(path, attr), value, False)
        for path, module in run.call.bound.modules.items()
        for own in (module.__dict__,)
        for attr in _own_attributes(tuple(own))
        if type(value := own[attr]) not in _ATOMIC_TYPES
        if type(value) is not tuple or not _ATOMIC_TYPES.issuperset(map(type, value))  # as most are: sizes
    ]
    seen: set[int] = set()
    for held in queue:
        path, attr, where, value, is_in_object = held
        if id(value) in seen or isinstance(value, nn.Module | type) or _is_table(value):
            continue
        seen.add(id(value))
        run.held.append(held)
        items: Iterable[tuple[str, Any]] = ()
        if isinstance(value, dict):
            items = ((f"[{k!r}]", x) for k, x in dict.items(value) if type(x) not in _ATOMIC_TYPES)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            items = ((f"[{i}]", x) for i, x in enumerate(value) if type(x) not in _ATOMIC_TYPES)
        elif not is_in_object and (attributes := _user_attributes(value)):
            items, is_in_object = ((f".{name}", x) for name, x in attributes.items() if type(x) not in _ATOMIC_TYPES), True
        queue += [_Held(path, attr, where + bound, x, is_in_object) for bound, x in items]
    return run.held


@functools.lru_cache(maxsize=1024)
def _own_attributes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of attributes that are not those of nn.Module: modules of a class have the same ones."""
    return tuple(name for name in names if name not in _OF_NN_MODULE)


def _is_table(value: Any) -> bool:
    """Return whether a container is a long table of numbers or words, such as a vocabulary, as its first entry says."""
    if not isinstance(value, _CONTAINERS) or len(value) < 100:
        return False
    return isinstance(next(iter(value.values() if isinstance(value, dict) else value)), _SCALARS)


def _entries(container: Any) -> list[Any]:
    """Return the entries of a container; of a dict its keys, then its values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


class OwnParameters(Guard):
    """An error where forward uses the model's own parameters, or tensors in attributes that share their memory or graph."""

    def __init__(self, run: ForwardRun) -> None:
        call, self._before, self._held = run.call, run.before, [x for x in _find_held(run) if isinstance(x.value, Tensor)]
        self._modules, self._thread = call.bound.modules, call.thread
        ignored = (name.rpartition(".") for name in call.params.keys() & call.spec.ignored)
        before = ((self._before[self._modules[path]]["_parameters"], attr) for path, _, attr in ignored)
        replaced = [*call.bound.own_parameters, *(x.get(attr) for x, attr in before if type(x) is not GatheringParameters)]
        given = {id(x) for wrapped in call.params.values() for x in (wrapped, _torch.unwrap(wrapped))}
        own = {id(x): x for x in replaced if type(x) is nn.Parameter}
        self._own = own if given.isdisjoint(own) else {key: x for key, x in own.items() if key not in given}
        others = [held for held in self._held if id(held.value) not in own and id(held.value) not in given]
        by_storage = {_torch.storage_id(x): x for x in self._own.values()} if others else {}
        self._others = {id(held.value): text for held in others if (text := self._describe_source(held, by_storage))}
        self._allow = _torch.forbid([*self._own.values(), *(held.value for held in others if id(held.value) in self._others)])
        _torch.ForbiddenTensor.explain.append(self._explain)

    def check(self, run: ForwardRun) -> None:
        for x in pytree.tree_leaves(run.out):
            if isinstance(x, _torch.ForbiddenTensor) and (text := self._explain(x)):
                raise RuntimeError(text)

    def restore(self) -> None:
        _torch.ForbiddenTensor.explain.remove(self._explain)
        self._allow()

    def _explain(self, tensor: Tensor) -> str:
        """Return the error of using a tensor; an empty string in another thread, or if this call has not forbidden it."""
        if calling_thread(self._thread) != self._thread:
            return ""
        if id(tensor) not in self._own:
            return self._others.get(id(tensor), "")
        where = next((f"'{held.where}' is" for held in self._held if held.value is tensor), "forward reads")
        return f"{where} the model's own parameter '{self._name(tensor)}'{_ADVICE}"

    def _name(self, own: Tensor) -> str:
        mappings = ((path, self._before[module]["_parameters"]) for path, module in self._modules.items())
        return next(join_path(path, attr) for path, mine in mappings for attr, x in dict.items(mine) if x is own)

    def _describe_source(self, held: _Held, by_storage: Mapping[int, Tensor]) -> str:
        """Return the error of using another tensor, an empty string if it has nothing of the parameters."""
        inner = _torch.unwrap(held.value)
        if inner.layout is not torch.strided or _torch.is_fake(inner) or isinstance(held.value, _torch.ForbiddenTensor):
            return ""
        relation, source = "is", by_storage.get(_torch.storage_id(inner))
        if source is None and inner.requires_grad and not inner.is_leaf:  # such as a view in the memory before a cast
            # a state may have the graph of many calls
            nodes = (node for node, _ in islice(_torch.iter_nodes([inner.grad_fn]), _MAX_NODES))
            leaves = (leaf for node in nodes if isinstance(leaf := getattr(node, "variable", None), Tensor))
            found = [by_storage[at] for leaf in leaves if (at := _torch.storage_id(leaf)) in by_storage]
            relation, source = "was computed from", found[0] if found else None
        return "" if source is None else f"'{held.where}' {relation} the model's own parameter '{self._name(source)}'{_ADVICE}"


_ADVICE = (
    ", with the values from before training and no gradient: functional_call replaces a parameter in the module that registers "
    "it, and nowhere else; expected forward to read it there, or to make the list, dict or object itself"
)


def _user_attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, None unless its class is a user's own."""
    cls = type(value)
    if not cls.__dictoffset__ or cls.__module__.partition(".")[0] in ("builtins", "torch", "funshard"):
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


_MAX_NODES = 1000
_ATOMIC_TYPES = frozenset({int, float, bool, str, bytes, complex, type(None)})
