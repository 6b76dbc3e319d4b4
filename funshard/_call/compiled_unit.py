"""A unit's module with P(compile=...): its forward as a compiled function, inside the eager schedule.

The schedule gathers the unit before the run and frees it after it, as without compilation. For the run the modules hold the
gathered parameters in plain dicts, which Dynamo makes inputs of the graph: modules of one structure share a compilation. What
AOTAutograd saves of a parameter is the view that was given in, so saved-tensor hooks replace it as in eager.

In a torch.func.grad, in which torch runs no compiled code, the function is one node of the transform's graph (`CompiledNode`).
It runs outside of the transform, by plain autograd, on detached tensors. The node keeps that graph, and its backward goes back
through it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._core.unit import Unit
from .._spec.options import Compile, Remat, check_names, find_compiled, remat_of
from .._spec.precision import precision_of
from .._transforms._recompute.function import find_attribute_tensors
from .._transforms._recompute.regions import RecomputeRegions, collect_regions, missing_names_message
from .._transforms.saved_tensors import SavedTensorHooks, unpack
from .._units.accumulation import is_backward_repeated
from .buffers import is_first_warning
from .casting import has_casts
from .modes import Scheduled, UnitInUse
from .module_state import GatheringParameters, ModuleAttributes, own_tensors
from .running import Call, Override

__all__ = ["CompileWarning", "can_run_compiled", "compiled_forwards", "is_compiled"]


# --- one compiled function for all modules of a structure ---

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``run(module, args, kwargs)``: the module's forward."""


class CompiledRun:
    """A compiled function for the forward of a module; ``remat`` is what it saves for backward, None for what torch chooses."""

    run: Run

    def __init__(self, remat: Remat | None) -> None:
        self._path, self._names = "", frozenset[str]() if remat is None else remat.names
        self._regions = RecomputeRegions()
        if remat is not None:
            self._regions.enter(remat)

    def __call__(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the module at ``path``. Raises ValueError if it gives none of the names to save."""
        self._path = path
        try:
            with _torch.guard_hooks(), collect_regions(self._regions) if self._names else contextlib.nullcontext():
                out = self.run(module, args, kwargs)
        except RuntimeError as error:
            if (explained := _explain(error, path)) is error:
                raise
            raise explained from error
        if self._names and self._names.isdisjoint(seen := self._regions.names_in(0)):
            raise ValueError(missing_names_message(f"module '{path}' with P(compile=True)", self._names, seen))
        return out

    def make_prehook(self) -> Callable[[Any], None]:
        """Return what the backward of the run calls first."""
        return functools.partial(_refuse_second_derivative, self._path)


def _refuse_second_derivative(path: str, _: object) -> None:
    """Raise RuntimeError in a backward that records a graph: torch may take a second derivative of compiled code for zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"module '{path}' with P(compile=True): a gradient with create_graph=True, outside or inside of its forward, "
            "differentiates compiled code twice, which torch cannot: expected fs.hvp or torch.func, which run it without "
            "compilation, or no compile for this unit"
        )


def _explain(error: RuntimeError, path: str) -> RuntimeError:
    """Return an error that names the module, for one in Dynamo's words; any other as it is."""
    is_dynamo, is_graph_break = _torch.classify_compile_error(error)
    if not is_dynamo:
        return error
    what, hint = _torch.describe_compile_error(error), _torch.find_compile_hint(error)
    if is_graph_break:
        return RuntimeError(
            f"module '{path}' with Compile(fullgraph=True) has a graph break ({what}): expected a forward that torch.compile "
            "traces as one graph, fullgraph=False, or no compile"
        )
    expected = f"{hint}; or a forward" if hint else "expected a forward"
    return RuntimeError(
        f"module '{path}' with P(compile=True) does not compile: {what}; {expected} that runs without compile, as "
        "P(compile=False) shows, and that the backend of torch.compile takes"
    )


def _run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


_RUNS: WeakKeyDictionary[nn.Module, dict[tuple[Compile, Remat | None, bool], CompiledRun]] = WeakKeyDictionary()
"""The compiled functions of each module that has run."""


def find_compiled_run(
    path: str, module: nn.Module, inside: Sequence[nn.Module], options: Compile, remat: Remat | None, *, retains: bool
) -> CompiledRun:
    """Return the compiled function of a module.

    Args:
        path: The module's path.
        module: The module.
        inside: All modules in it, itself included.
        options: How to compile it.
        remat: What it saves for backward, None for what torch chooses.
        retains: Whether a backward may come back to what it saved.

    Raises:
        ValueError: For a backend, a mode or an option that torch.compile does not know.
    """
    runs = _RUNS.setdefault(module, {})
    run = runs.get((options, remat, retains))
    if run is None:
        check_names(f"module '{path}': Compile", options.backend, options.mode, dict(options.options))
        structure = tuple(
            (type(one), tuple((name, p.shape, p.dtype) for name, p in dict.items(vars(one)["_parameters"]) if p is not None))
            for one in inside
        )
        run = runs[options, remat, retains] = _compile(options, remat, structure, retains)
    return run


@functools.lru_cache(maxsize=256)
def _compile(options: Compile, remat: Remat | None, structure: Hashable, retains: bool) -> CompiledRun:
    """Return a function with a compilation cache of its own, for modules of this structure.

    Functions that ``retains`` tells apart share none, nor inductor's caches on disk: a backward that was compiled where it ran
    with ``retain_graph=False`` writes into what forward has saved, and refuses ``retain_graph=True``.
    """
    _torch.run_uncompiled(SavedTensorHooks.pack, unpack)
    run = _torch.copy_function(_run_module, "run_compiled_unit")
    settings: dict[str, Any] = dict(options.options)
    if options.backend == "inductor":
        # random numbers are those of eager: graphs that record a backward and graphs that do not draw the same ones
        settings = {"fallback_random": True, **(_torch.inductor_mode_options(options.mode) if options.mode else {}), **settings}
        if retains:
            settings["inplace_buffers"] = False
    kwargs = {"mode": options.mode} if options.mode and options.backend != "inductor" else {}
    from .._transforms._recompute.saved_nodes import UnitBackend  # takes a second to import

    out = CompiledRun(remat)
    backend = UnitBackend(options.backend, settings, kwargs, remat, out.make_prehook, retains=retains)
    out.run = torch.compile(run, backend=backend, dynamic=options.dynamic, fullgraph=options.fullgraph)
    return out


# --- a compiled function as a node in the graph of a torch.func.grad ---

GivenParameter = tuple[dict[str, Any], str, Tensor]
"""A module's dict of parameters, a name in it, and the tensor there."""

TRANSPARENT = (
    int, float, complex, str, bytes, type(None), enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of leaves in which no tensor can be."""


class CompiledNode:
    """One run of ``compiled(args, kwargs)`` outside of the torch.func.grad around it, and the graph of that run.

    Args:
        path: The module's path, for messages.
        compiled: The compiled function.
        parameters: The parameters that it finds in modules.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        path: str,
        compiled: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        parameters: Sequence[GivenParameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.path, self._compiled, self._parameters = path, compiled, parameters
        self._leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._positions = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.tensors = [*(self._leaves[i] for i in self._positions), *(x for _, _, x in parameters)]
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._shared: list[tuple[Tensor, int]] = []  # outputs that share memory, and their versions
        self.result: list[Any] = []
        self.result_tree: pytree.TreeSpec | None = None

    def apply(self) -> Any:
        """Run the function, and return its result as that of a node in the transform's graph."""
        outputs = iter(_Below.apply(self, *self.tensors))
        leaves = [next(outputs) if isinstance(x, Tensor) else x for x in self.result]
        assert self.result_tree is not None
        return pytree.tree_unflatten(leaves, self.result_tree)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function on tensors of plain autograd. Return the tensors of its result, without a graph."""
        with _torch.below_transforms(), torch.enable_grad():
            self.inputs = [_torch.unwrap_level(x).detach().requires_grad_(x.requires_grad) for x in tensors]
            leaves = self._leaves.copy()
            for i, x in zip(self._positions, self.inputs, strict=False):
                leaves[i] = x
            views = self.inputs[len(self._positions) :]
            for (plain, name, _), view in zip(self._parameters, views, strict=True):
                plain[name] = view
            args, kwargs = pytree.tree_unflatten(leaves, self._tree)
            self.result, self.result_tree = pytree.tree_flatten(self._compiled(args, kwargs))
            after, tree = pytree.tree_flatten((args, kwargs))
            if tree != self._tree or any(x is not y for x, y in zip(after, leaves, strict=True)):
                raise RuntimeError(
                    f"module '{self.path}' with P(compile=True) changes a list or dict that it was given inside of a "
                    "torch.func.grad: expected it left alone and the new values returned, no compile, or fs.grad"
                )
            for (plain, name, _), view in zip(self._parameters, views, strict=True):
                if plain.get(name) is not view:
                    raise RuntimeError(
                        f"module '{self.path}' with P(compile=True) sets its parameter '{name}' in forward inside of a "
                        "torch.func.grad: expected it left alone, no compile, or fs.grad"
                    )
            if opaque := [x for x in self.result if not isinstance(x, (Tensor, *TRANSPARENT))]:
                raise RuntimeError(
                    f"module '{self.path}' with P(compile=True) returns a {type(opaque[0]).__name__} inside of a "
                    "torch.func.grad, which may hold tensors without their derivatives: expected tensors in tuples, lists, "
                    "dicts or registered pytrees, no compile, or fs.grad"
                )
            self.outputs = [x for x in self.result if isinstance(x, Tensor)]
            uses = Counter(_torch.storage_id(x) for x in (*self.outputs, *self.inputs))
            self._shared = [(x, _torch.version(x)) for x in self.outputs if uses[_torch.storage_id(x)] > 1]
            return [x.detach() for x in self.outputs]

    def pull_back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs, None for those without."""
        if any(_torch.version(x) != version for x, version in self._shared):
            raise RuntimeError(
                f"module '{self.path}' with P(compile=True) returned tensors that share memory with each other or with its "
                "arguments, and one of them was changed in place inside of a torch.func.grad, which the others' derivatives "
                "miss: expected a clone, no compile, or fs.grad"
            )
        pairs = [(x, g) for x, g in zip(self.outputs, grads, strict=True) if g is not None and x.requires_grad]
        wanted = [x for x in self.inputs if x.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outputs, given = zip(*pairs, strict=True)
            with _torch.keep_saved_tensors():
                found = [*torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)]
        left = iter(found)
        return [next(left) if x.requires_grad else None for x in self.inputs]


class _Below(_torch.LevelFunction):
    """A run of a compiled function as one node in the graph of a torch.func.grad."""

    @staticmethod
    def forward(below: CompiledNode, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        level = _torch.current_level()
        return tuple(_torch.wrap_at_level(x, level) for x in below.run(tensors))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.below = inputs[0]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.mark_non_differentiable(*(out for out, x in zip(output, inputs[0].outputs, strict=True) if not x.requires_grad))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        below, level = ctx.below, _torch.current_level()
        if any(g is not None and _torch.is_batched(g) for g in grads):
            raise RuntimeError(
                f"module '{below.path}' with P(compile=True): a vmap takes its gradient, as torch.func.jacrev does, where "
                "compiled code does not run: expected no compile for this unit"
            )
        is_last = _torch.is_last_backward(level)
        if level and torch.is_grad_enabled() and not is_last:
            raise RuntimeError(
                f"module '{below.path}' with P(compile=True): a gradient with create_graph=True inside of a torch.func.grad "
                "differentiates compiled code twice, which torch cannot: expected no compile for this unit"
            )
        with _torch.below_transforms():
            found = below.pull_back([None if g is None else _torch.unwrap_level(g) for g in grads])
        if is_last:
            ctx.below = None  # and the graph
        return None, *(None if g is None else _torch.wrap_at_level(g, level) for g in found)


# --- the forward of a compiled module ---


class CompileWarning(UserWarning):
    """A unit with ``P(compile=True)`` runs without compilation, where torch cannot run compiled code."""


def compiled_forwards(call: Call, before: ModuleAttributes) -> Iterator[Override]:
    """Yield the forwards of the modules that are compiled, the innermost ones."""
    modules = call.place.modules
    for path, options in _find_compiled(call.spec, modules).items():
        if vars(modules[path]).get("_compiled_call_impl") is not None:
            yield modules[path], "_compiled_call_impl", None
        yield modules[path], "forward", _compile_forward(call, path, options, before, modules[path].forward)


def is_compiled(spec: PartitionSpec, path: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether the module at this path is compiled, by its ``P`` or, as its attributes of before the call say, itself."""
    return path in spec._compute_once(_compiled_by_spec) or attributes.get("_compiled_call_impl") is not None


def _find_compiled(spec: PartitionSpec, modules: Mapping[str, nn.Module]) -> dict[str, Compile]:
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
    return find_compiled(spec)


def _check_units_inside(spec: PartitionSpec, *paths: str) -> bool:
    """Return True; raise ValueError if a unit inside one of these modules has remat, casts or offloaded activations."""
    for path in paths:
        for inner, p in spec.by_run.items():
            casts = (precision := precision_of(p)) is not None and has_casts(precision)
            if inner != path and is_within(inner, path) and (p.remat or casts or "activations" in p.offloads):
                raise ValueError(
                    f"unit '{inner}' with {p} is inside of module '{path}', which is compiled as one: expected no remat, casts "
                    "or offloaded activations inside of a compiled module; compile the inner unit instead"
                )
    return True


def _compile_forward(
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
    module, chosen = call.place.modules[path], call.spec.by_run.get(path)
    remat = remat_of(chosen) if chosen else None
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
        if any(x.requires_grad and not _torch.is_wrapped(x) for x in find_attribute_tensors(module)):
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
    if any(map(_torch.is_wrapped, find_attribute_tensors(module))) or any(b is not None and b.requires_grad for b in buffers):
        return "in a torch.func.grad, it reads a tensor of that transform that is no argument"
    return None


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
