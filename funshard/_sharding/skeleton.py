"""skeleton: a model without the memory of its parameters, for after `shard`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._core.checks import check_param_classes
from .._core.tree import join_path, module_tree

M = TypeVar("M", bound=nn.Module)

_SKELETONS: WeakSet[nn.Module] = WeakSet()
"""The modules that `skeleton` has returned."""


def skeleton(model: M) -> M:
    """Return a copy of the model with its parameters on the meta device: the same shapes, dtypes and ties, but no values.

    After `shard`, ``model = skeleton(model)`` frees the full parameters; every call takes the skeleton instead of the model.
    Called by itself, on anything but the meta device, it raises RuntimeError.

    Args:
        model: Does not change. The copy has its ``requires_grad`` and its very buffers, including those outside the state_dict,
            which ``model.to("meta")`` would lose. Everything else is copied, as by ``copy.deepcopy``.

    Raises:
        TypeError: For a ScriptModule, a compiled module, a parameter of another type than nn.Parameter, and for what cannot be
            copied, such as a torch.fx.GraphModule, naming the module.
        ValueError: For a hook or forward that holds a module or a parameter of the model, which a copy would share, and for a
            buffer or another tensor of a module that is in a parameter's memory.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.shard(model, spec)
        >>> bare = fs.skeleton(model)
        >>> bare.weight.device, bare.weight.shape
        (device(type='meta'), torch.Size([1, 2]))
        >>> x = torch.ones(3, 2)
        >>> torch.equal(fs.functional_call(bare, params, (x,), spec=spec), model(x))
        True
    """
    tree = module_tree(model)
    check_param_classes(dict(model.named_parameters()))
    memo: dict[int, Any] = {id(param): _make_meta_parameter(param) for param in model.parameters()}
    storages = {_torch.storage_id(p): name for name, p in model.named_parameters()}
    inside = {id(x) for x in (*model.modules(), *model.parameters())}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"skeleton: module '{path}' is a ScriptModule, which cannot be copied without its parameters")
        for name, tensor in (*module._buffers.items(), *vars(module).items()):
            if not isinstance(tensor, Tensor) or id(tensor) in memo:
                continue
            if (owner := storages.get(_torch.storage_id(tensor))) is not None:
                raise ValueError(
                    f"skeleton: '{join_path(path, name)}' is in the memory of parameter '{owner}', which would stay: expected "
                    "a copy of its own; clone it"
                )
            memo[id(tensor)] = tensor
        for name, function in _own_functions(module):
            if any(id(x) in inside for x in _captured_objects(function)):
                raise ValueError(
                    f"skeleton: {name} of module '{path}' holds a module or a parameter of the model, which a copy "
                    "would share: expected a method, or a function that takes the module as its argument"
                )
    try:
        bare = copy.deepcopy(model, memo)
    except Exception as error:
        why = f"{type(error).__name__}: {_torch.error_text(error)}"
        raise TypeError(f"skeleton: {type(model).__name__} cannot be copied: {why}") from error
    # a torch.fx.GraphModule gives each copy a class of its own, and drops hooks and attributes
    if module_tree(bare) != tree or not all(p.is_meta for p in bare.parameters()) or {*map(id, bare.modules())} & inside:
        raise TypeError(
            f"skeleton: {type(model).__name__} does not copy as it is: expected a plain copy.deepcopy of its modules, which no "
            "torch.fx.GraphModule has; keep the model"
        )
    for module, copied in zip(model.modules(), bare.modules(), strict=True):
        if module._compiled_call_impl is not None:  # for its options: a call compiles the units itself
            copied._compiled_call_impl = module._compiled_call_impl
    if not is_skeleton(model):  # which the copy would have twice
        bare.register_forward_pre_hook(_forbid_direct_call, with_kwargs=True)
    _SKELETONS.add(bare)
    return bare


def _forbid_direct_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if a skeleton is called outside of functional_call, unless all tensor arguments are on meta."""
    if type(vars(module)["_parameters"]) is not dict or not any(param.is_meta for param in module.parameters()):
        return  # in a functional_call, ours or torch's
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors or not all(x.is_meta for x in tensors):
        raise RuntimeError(
            f"skeleton: {type(module).__name__} was called and has no values: expected fs.functional_call(model, params, args, "
            "spec=spec), or arguments on the meta device for shapes alone"
        )


def is_skeleton(model: object) -> bool:
    """Return whether the model came from `skeleton`."""
    return isinstance(model, nn.Module) and model in _SKELETONS


def _make_meta_parameter(param: Tensor) -> nn.Parameter:
    """Return a meta parameter with the strides and attributes of another one."""
    empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    bare = nn.Parameter(empty, requires_grad=param.requires_grad)
    vars(bare).update(vars(param))
    return bare


def _own_functions(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":  # torch.compile's, of which only the options count
            continue
        inside = value.values() if isinstance(value, dict) else [value]
        yield from ((f"'{name}'", x) for x in inside if isinstance(x, FunctionType))


def _captured_objects(function: FunctionType) -> Iterator[object]:
    """Yield the objects that a function holds: its closure, its defaults, and the owners of bound methods there."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of a cell without a value
            values.append(cell.cell_contents)
    for value in values:
        yield from (value, getattr(value, "__self__", None))  # of a method, such as the forward that was there before
