"""Layers without a public name, what traced code writes into modules and dicts, and tensors that must not be used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from .tracing import assume_constant

# --- Layers for which torch.nn has no public name: base classes of normalisation, and methods of initialisation ---

BatchNorm = _BatchNorm
"""The base class of every BatchNorm of torch. Pinned, as `NormWithStatistics`, by ``test_layers_with_statistics``."""

NormWithStatistics = _NormBase
"""The base class of every layer of torch that keeps running statistics."""


def find_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initialisation method, or None. Pinned by ``test_layers_that_reset_themselves``."""
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset) and isinstance(module, nn.MultiheadAttention | nn.Transformer):
        reset = module._reset_parameters
    return reset if callable(reset) else None


_set = parametrize._maybe_set


def _set_unless_same(dest: Tensor, src: Tensor) -> None:
    if dest is not src:  # a forward that registers a parametrization, as peft's, sets a parameter to itself: that is no write
        _set(dest, src)


parametrize._maybe_set = _set_unless_same  # pinned by test_parametrizations_set_a_tensor_to_itself


# --- What traced code writes into modules and dicts: Dynamo writes it into the real objects after the graph has run ---


def attributes_of_hooks(module: nn.Module) -> set[str]:
    """Return the attributes that torch's hooks compute anew before each forward: those of weight_norm, pruning and the like."""
    hooks = vars(module).get("_forward_pre_hooks", {}).values()
    return {getattr(hook, "name", getattr(hook, "_tensor_name", "")) for hook in hooks}


_MARK = "_funshard_called"
"""The attribute that finds a model among the objects of Dynamo's tables, and of a graph the contexts that are open in it."""

_Table = dict[Any, dict[str, Any]]
"""What Dynamo knows of the writes to attributes, by its variable for the object, and by name."""


@contextlib.contextmanager
def undo_module_writes(model: nn.Module) -> Generator[None]:
    """Undo, at the end of this context in traced code, what was set or deleted in the attributes of the model's modules.

    Later code reads the attributes of before, and the modules are not written to after the graph; nor are dicts that have
    again what they had before. A tensor with a graph is an error, by the rule of `AttributeWrites.check`. Dynamo's tables are
    private; pinned by ``test_attributes_that_forward_sets_are_restored`` and
    ``test_a_compiled_step_writes_no_dict_of_a_module``.
    """
    setattr(model, _MARK, True)
    _note_writes()
    try:
        yield
    finally:
        _restore_writes()


@assume_constant
def _note_writes() -> None:
    graph, tables = _writes_of_graph()
    model = next(variable for variable, attributes in tables[0].items() if _MARK in attributes)
    for table in tables:
        del table[model][_MARK]
    copies = [{variable: dict(attributes) for variable, attributes in table.items()} for table in tables]
    vars(graph).setdefault(_MARK, []).append((set(model.value.modules()), copies))  # it ends with its trace


@assume_constant
def _restore_writes() -> None:
    """Make the tables what they were for the modules of the innermost context."""
    graph, tables = _writes_of_graph()
    modules, copies = vars(graph)[_MARK].pop()
    left = next(_recorded_writes(tables[0], modules), None)
    for table, copy in zip(tables, copies, strict=True):
        for variable, attributes in table.items():
            if isinstance(value := getattr(variable, "value", None), nn.Module) and value in modules:
                attributes.clear()
                attributes.update(copy.get(variable, {}))
    for variable in graph.side_effects.id_to_variable.values():
        if _is_as_before(variable):
            variable.mutation_type.is_modified = False
    if left:
        raise RuntimeError(left)


def _recorded_writes(table: _Table, modules: set[nn.Module]) -> Iterator[str]:
    """Yield an error for each tensor with a graph that is to be undone."""
    for variable, attributes in table.items():
        if isinstance(module := getattr(variable, "value", None), nn.Module) and module in modules:
            for name in attributes.keys() - attributes_of_hooks(module):
                proxy = getattr(attributes[name], "proxy", None)
                tensor = proxy.node.meta.get("example_value") if proxy is not None else None
                if proxy is None or not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                if vars(module).get(name) is not None if tensor.numel() > 1 else not proxy.node.users:
                    yield (
                        f"forward leaves a tensor with a graph in attribute '{name}' of a {type(module).__name__}, and the "
                        "call puts that back as it was before: expected it in the result of forward, or detached"
                    )


def _is_as_before(variable: Any) -> bool:
    """Return whether Dynamo's variable is a dict from outside of the graph that has its first values, in their order."""
    from torch._dynamo.variables.base import ValueMutationExisting
    from torch._dynamo.variables.dicts import ConstDictVariable

    if not isinstance(variable, ConstDictVariable) or not isinstance(variable.mutation_type, ValueMutationExisting):
        return False
    now, before = variable.items.items(), variable.original_items.items()
    return len(now) == len(before) and all(
        key.vt is old_key and not variable.is_new_item(old, value)
        for (key, value), (old_key, old) in zip(now, before, strict=True)
    )


def _writes_of_graph() -> tuple[Any, list[_Table]]:
    """Return the graph that Dynamo traces now, and its tables: the new values, and from torch 2.14 on how they are set."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # here, since Dynamo is imported by the first compile

    graph = InstructionTranslator.current_tx().output
    names = ("store_attr_mutations", "attr_mutation_kinds")
    return graph, [getattr(graph.side_effects, name) for name in names if hasattr(graph.side_effects, name)]


# --- Tensors that must not be used for a while ---


class ForbiddenTensor(Tensor):
    """The class of a tensor for as long as it is an error to compute with it; it has its metadata.

    Pinned by ``test_a_forbidden_tensor``.
    """

    explain: ClassVar[list[Callable[[Tensor], str]]] = []
    """Functions that return the error of using a tensor, or an empty string."""

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # which has read past the mapping that gathers: run it, and see
            torch._dynamo.graph_break()
        if func not in _QUESTIONS and TracingContext.try_get() is None:  # else the compiler asks
            for tensor in [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ForbiddenTensor)]:
                if text := next(filter(None, (explain(tensor) for explain in cls.explain)), ""):
                    raise RuntimeError(text)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@functools.cache
def _forbidden_class(cls: type[Tensor]) -> type[Tensor]:
    return type(cls.__name__, (ForbiddenTensor, cls), {})


def forbid(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Make it an error to compute with these tensors. Return a function that allows it again."""
    classes = [*map(type, tensors)]
    for x, cls in zip(tensors, map(_forbidden_class, classes), strict=True):
        x.__class__ = cls

    def allow() -> None:
        for x, cls in zip(tensors, classes, strict=True):
            x.__class__ = cls

    return allow


class SeparateTensor(Tensor):
    """The class of a parameter whose module computes with another tensor: hooks on it, and gradients by it, would miss that.

    Pinned by ``test_a_separate_tensor``.
    """

    parameter: str

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.autograd.grad, Tensor.register_hook, Tensor.retain_grad):
            name = next(x.parameter for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, SeparateTensor))
            raise RuntimeError(
                f"parameter '{name}' is read in forward where its module computes with another tensor, because its unit was "
                "freed since, or runs again in backward: a gradient by it, or a hook on it, would miss that; expected "
                "P(reshard=False) without remat for the unit, or that in the module's own forward"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_QUESTIONS: frozenset[Any] = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__]
    + [getattr(torch._C.TensorBase, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")]
)
