"""A unit's module with P(compile=...): its forward as a compiled function, inside the eager schedule.

The schedule gathers the unit before the run and frees it after it, as without compilation. For the run the modules hold the
gathered parameters in plain dicts, which Dynamo makes inputs of the graph: modules of one structure share a compilation. What
AOTAutograd saves of a parameter is the view that was given in, so saved-tensor hooks replace it as in eager.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._spec.options import RECOMPUTE_ALL, Compile
from .._spec.spec import PartitionSpec
from .._spec.tree import is_within
from .._spec.unit import Unit
from .._transforms._recompute.reachable import ReachableObjects
from .._units.accumulation import is_backward_repeated
from .casting import has_casts
from .compile_cache import find_compiled_run
from .compiled_node import TRANSPARENT, CompiledNode, GivenParameter
from .modes import Scheduled, UnitInUse
from .module_state import GatheringParameters, ModuleAttributes, own_tensors
from .warn_once import is_first_warning

if TYPE_CHECKING:
    from .running import Call

__all__ = ["CompileWarning", "can_run_compiled", "compile_forward", "find_compiled"]


class CompileWarning(UserWarning):
    """A unit with ``P(compile=True)`` runs without compilation, where torch cannot run compiled code."""


def find_compiled(spec: PartitionSpec, modules: Mapping[str, nn.Module]) -> dict[str, Compile]:
    """Return how each compiled module is compiled, by path: by ``P(compile=...)`` or, among ``modules``, by its ``.compile()``.

    Raises:
        ValueError: For a unit inside of a compiled module that has remat, casts or offloaded activations.
    """
    in_place = {path: m._compiled_call_impl for path, m in modules.items() if m._compiled_call_impl is not None}
    found = {
        **spec._compute_once(_compiled_by_spec),
        **{path: Compile(**_torch.compile_options(run)) for path, run in in_place.items()},
    }
    if found:
        spec._compute_once(_check_units_inside, *found)
    return found


def _compiled_by_spec(spec: PartitionSpec) -> Mapping[str, Compile]:
    return spec.compiled


def _check_units_inside(spec: PartitionSpec, *paths: str) -> bool:
    """Return True; raise ValueError if a unit inside one of these modules has remat, casts or offloaded activations."""
    for path in paths:
        for inner, p in spec._chosen.items():
            casts = p.precision is not None and has_casts(p.precision)
            if inner != path and is_within(inner, path) and (p.remat or casts or "activations" in p.offloads):
                raise ValueError(
                    f"unit '{inner}' with {p} is inside of module '{path}', which is compiled as one: expected no remat, casts "
                    "or offloaded activations inside of a compiled module; compile the inner unit instead"
                )
    return True


def compile_forward(
    call: Call, path: str, options: Compile, before: ModuleAttributes, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the forward of the module at ``path``: compiled where torch can run compiled code, else ``forward`` itself.

    Args:
        call: The call that the module runs in.
        path: The module's path.
        options: How to compile it.
        before: The attributes of the model before the call.
        forward: The forward to run without compilation.
    """
    module, chosen = call.place.modules[path], call.spec._chosen.get(path)
    remat = None if chosen is None or not chosen.remat else RECOMPUTE_ALL if chosen.remat is True else chosen.remat
    inside = call.place.modules_inside(path)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not can_run_compiled(call, path, args, kwargs):
            return forward(*args, **kwargs)
        level = _torch.current_level()
        retains = level > 0 or is_backward_repeated()
        compiled = find_compiled_run(path, module, inside, options, remat, retains=retains)
        with _plain_parameters(call, inside, before, level) as given:
            if not level:
                return compiled(path, module, args, kwargs)
            call.scopes.compiled = path
            try:
                below = functools.partial(compiled, path, module)
                with _plain_buffers(path, inside, level):
                    out = CompiledNode(path, below, given, args, kwargs).apply()
            finally:
                call.scopes.compiled = None
        if any(x.requires_grad and not _torch.is_wrapped(x) for x in _reachable_tensors(call, module)):
            raise RuntimeError(
                f"module '{path}' with P(compile=True) keeps a tensor that has a derivative, in an attribute or elsewhere, "
                "where a torch.func.grad around does not see it: expected it among the results, no compile, or fs.grad"
            )
        return out

    return run


# --- where compiled code can run ---


def can_run_compiled(call: Call, path: str, args: object, kwargs: object) -> bool:
    """Return whether torch can run the module at ``path`` compiled. Warn, once, of a user's choice that prevents it."""
    module, reason = call.place.modules[path], _find_obstacle(call)
    if reason is None and _torch.current_level():
        reason = _find_opaque(call, path, module, args, kwargs)
    if reason:
        _warn_eager(path, module, reason)
    return reason is None


def _find_obstacle(call: Call) -> str | None:
    """Return why torch cannot run compiled code here: "" where operators are recorded; None if it can."""
    if torch.compiler.is_compiling() or _torch.is_traced() or call.is_fake:
        return ""
    if _torch.has_dispatch_mode():
        return "a TorchDispatchMode is active, which sees no operators of compiled code"
    if _torch.current_attention() is not None:
        return "attention is that of fs.transforms_attention"
    if _torch.function_modes(own=True):  # Dynamo would trace its handler for each operator
        return "fs.remat inside of torch.func's transforms looks at its operators"
    if _torch.is_in_forward_ad():
        return "forward-mode AD does not run through it"
    level = _torch.current_level()
    if level > 1 or (level and not (isinstance(call.mode, Scheduled) and call.mode.is_at_call_level())):
        return "of torch.func's transforms it runs in a single grad or vjp"
    return None


def _warn_eager(path: str, module: nn.Module, reason: str) -> None:
    """Warn once for each class of modules and reason that a unit runs without compilation."""
    if is_first_warning(type(module), reason):
        warnings.warn(
            f"module '{path}' with P(compile=True) runs without compilation, with the same results: {reason}",
            CompileWarning,
            stacklevel=3,
        )


def _find_opaque(call: Call, path: str, module: nn.Module, args: object, kwargs: object) -> str | None:
    """Return what could hold tensors of a torch.func.grad where `CompiledNode` would not find them; None if nothing could."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            if _torch.unwrap(leaf).requires_grad:
                return "an argument is differentiated outside of the transform, too"
        elif not isinstance(leaf, TRANSPARENT):
            return f"in a torch.func.grad, an argument of type {type(leaf).__name__} may hold tensors of that transform"
    buffers = (b for one in call.place.modules_inside(path) for b in own_tensors(one, "_buffers").values())
    if any(map(_torch.is_wrapped, _reachable_tensors(call, module))) or any(b is not None and b.requires_grad for b in buffers):
        return "in a torch.func.grad, it reads a tensor of that transform that is no argument"
    return None


def _reachable_tensors(call: Call, module: nn.Module) -> Sequence[Tensor]:
    """Return the tensors that a module can reach beside its arguments and parameters."""
    return ReachableObjects([module], call.place.owned).tensors


# --- parameters that Dynamo can read ---


@contextlib.contextmanager
def _plain_parameters(
    call: Call, inside: Sequence[nn.Module], before: ModuleAttributes, level: int
) -> Generator[list[GivenParameter]]:
    """Give modules their gathered parameters in plain dicts, and their own forward, for the length of a run.

    Yields:
        The dict, name and tensor of each parameter.
    """
    units: dict[str, UnitInUse] = {}

    def read(unit: Unit, i: int) -> Tensor:
        if unit.key not in units:
            units[unit.key] = call.scopes.gather(unit)
        if call.used_parameters is not None:
            call.used_parameters.add(unit.params[i].name)
        return units[unit.key].views[i]

    restored: list[tuple[nn.Module, GatheringParameters, dict[str, Any], dict[str, Any], Any]] = []
    given: list[GivenParameter] = []
    try:
        for module in inside:
            attributes = vars(module)
            gathering = attributes.get("_parameters")
            if not isinstance(gathering, GatheringParameters):
                continue
            plain = gathering.read_with(read)
            restored.append((module, gathering, plain, plain.copy(), attributes.get("forward")))
            attributes["_parameters"] = plain
            given += ((plain, name, x) for name, x in plain.items() if x is not None)
            attributes.pop("forward", None)
            if "forward" in before[module]:
                attributes["forward"] = before[module]["forward"]
        yield given
    finally:
        for module, gathering, plain, views, forward in restored:
            attributes = vars(module)
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward
            for name in {**views, **plain}:
                if name not in plain:
                    del gathering[name]
                elif name not in views or (plain[name] is not views[name] and not level):
                    gathering[name] = plain[name]
            attributes["_parameters"] = gathering


@contextlib.contextmanager
def _plain_buffers(path: str, inside: Sequence[nn.Module], level: int) -> Generator[None]:
    """Give modules their buffers without the wrappers of a torch.func.grad, in which the call has copied them."""
    replaced: list[tuple[nn.Module, dict[str, Tensor | None], dict[str, Tensor | None]]] = []
    for module in inside:
        if own := vars(module).get("_buffers"):  # a ScriptModule has none
            plain = {name: b if b is None else _torch.unwrap_level(b) for name, b in own.items()}
            replaced.append((module, own, plain))
            vars(module)["_buffers"] = plain.copy()
    try:
        yield
        for module, own, plain in replaced:
            now: dict[str, Tensor | None] = vars(module)["_buffers"]
            for name in own.keys() - now.keys():
                del own[name]
            for name, b in now.items():
                if b is not None and b.requires_grad:
                    raise RuntimeError(
                        f"module '{path}' with P(compile=True) sets its buffer '{name}' to a tensor that has a derivative, "
                        "inside of a torch.func.grad: expected buffer.detach(), no compile, or fs.grad"
                    )
                if name not in plain or b is not plain[name]:
                    own[name] = b if b is None else _torch.wrap_at_level(b, level)
    finally:
        for module, own, _ in reversed(replaced):
            vars(module)["_buffers"] = own
