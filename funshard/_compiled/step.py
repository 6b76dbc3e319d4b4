"""compile: a whole training step as one graph, with the schedule of functional_call (graph.py).

Inductor's own passes that reorder the graph are off, because the schedule is its order. Private in torch: inductor's
``compile_fx``, ``joint_custom_pre_pass`` and ``post_grad_custom_post_pass``, which tests/compile/test_compile.py and
tests/compile/test_compile_remat.py pin.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from .. import _torch
from .._spec.options import check_names
from .._transforms.ambient import RUNNING
from .._transforms.error_hints import explain_compile_errors
from .._transforms.products import is_differentiated_outside
from ..optim._checks import refuse_shared_memory

Step = TypeVar("Step", bound=Callable[..., Any])
Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compile(
    step: Step,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    prefetch: int = 1,
    in_flight: int = 1,
    backend: str | Compiler = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = True,
    **others: Any,
) -> Step:
    """Compile a training step whole: ``torch.compile(step)`` with the memory and overlap of `functional_call`.

    The step runs under no_grad, so its results have no graph. See ``examples/guide/transforms.md``, "Compiled".

    Args:
        step: Takes parameters, optimizer state and a batch, computes gradients of a loss over `functional_call` by
            `grad_and_value` or torch.func's, and returns any results.
        donate_argnums: The positional arguments that the step may overwrite. The results are written into their tensors:
            **after the call the donated tensors hold the new values**. The i-th donated argument takes the first free result
            (an element of a returned tuple, or the one result) of its tree, shapes and dtypes. Clone other results that are
            views of donated tensors.
        prefetch, in_flight: The numbers of gathers to start ahead of their use, and of reductions to wait for late, as in
            `functional_call`.
        backend: "inductor", "aot_eager" (runs the graph without a compiler, for tests), or a function of an FX graph of ATen
            operators and its inputs that returns a callable.
        mode, options, fullgraph, **others: As in torch.compile: ``options`` are inductor's, and by default a graph break is an
            error.

    Returns:
        A function with the arguments and results of ``step``.

    Raises:
        ValueError: At the call: for a donated argument that no result fits, that is given twice, that overlaps another one in
            memory or that another result contains; and for names to save that a `remat` does not have.
        RuntimeError: The step is called where its results are differentiated.

    Example:
        >>> import torch, funshard as fs
        >>> halve = fs.compile(lambda params: {key: p / 2 for key, p in params.items()}, donate_argnums=0, backend="aot_eager")
        >>> given = {"w": torch.tensor([2.0])}
        >>> halve(given)
        {'w': tensor([1.])}
        >>> given
        {'w': tensor([1.])}
    """
    if prefetch < 0 or in_flight < 1:
        raise ValueError(
            f"compile: expected prefetch of at least 0 and in_flight of at least 1, got {prefetch} and {in_flight}"
        )
    donated_indices = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if torch.compiler.is_compiling():  # a part of the graph that is being traced
        return cast("Step", lambda *args, **kwargs: _run_step(step, donated_indices, *args, **kwargs))
    if mode or options:
        check_names("compile", "inductor", mode, options or {})
    inductor_options = {**(_torch.inductor_modes()[mode] if mode else {}), **(options or {})}
    compiler = _make_backend(backend, prefetch, in_flight, inductor_options)

    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_step(step, donated_indices, *args, **kwargs)

    runs: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()

    def find_run() -> Callable[..., Any]:
        """Return what is compiled for this default process group: a graph knows groups by their names alone."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else compiler
        if world not in runs:  # Dynamo counts recompiles by code object, so every compiled step needs its own
            runs[world] = torch.compile(_torch.copy_function(run, "run"), backend=compiler, fullgraph=fullgraph, **others)
        return runs[world]

    find_run()  # so that options which torch.compile does not know are an error here

    @functools.wraps(step)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _run_step(step, donated_indices, *args, **kwargs)
        if _torch.current_level():
            raise RuntimeError(
                "compile: the compiled step is called inside of a torch.func transform, in which torch runs no compiled code: "
                "expected the transform inside of the step, or the step without compile"
            )
        if RUNNING.names or (RUNNING.is_in_gradient and is_differentiated_outside((args, kwargs))):
            raise RuntimeError(
                "compile: the compiled step is called inside of a loss or a recomputed function, where its results are "
                "constants: expected the gradient inside of the step, or the step without compile"
            )
        donated = _check_donated(args, donated_indices)
        with explain_compile_errors(), RUNNING.set(regions=[]):
            out = find_run()(*args, **kwargs)
        seen = Counter(_torch.storage_id(leaf) for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        if any(seen[storage] > count for storage, count in donated.items()):
            raise ValueError(
                "compile: a result is, or is a view of, a donated tensor, which was written to: return a clone of it"
            )
        return out

    return cast("Step", compiled)


def _run_step(step: Callable[..., Any], donate_argnums: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """Run the step and return its results, written into the donated tensors; ValueError for an argument that no result fits."""
    with torch.no_grad():
        out = step(*args, **kwargs)
        results = list(out) if isinstance(out, tuple) else [out]
        given = {leaf for i in donate_argnums for leaf in pytree.tree_leaves(args[i])}
        writes: list[tuple[Tensor, Tensor]] = []
        used: list[int] = []
        for i in donate_argnums:
            old, tree = pytree.tree_flatten(args[i])
            for j, result in enumerate(results):
                new, other = pytree.tree_flatten(result)
                if j not in used and tree == other and all(map(_can_write_into, old, new)):
                    break
            else:
                raise ValueError(f"compile: donated argument {i}: expected a result with its tree, shapes and dtypes, got none")
            used.append(j)
            results[j] = args[i]
            # A value that is another donated tensor is to be read before that is written to.
            writes += [(into, x.clone() if x in given else x) for into, x in zip(old, new, strict=True) if x is not into]
        for into, value in writes:
            _torch.write_into(into, value)
    return tuple(results) if isinstance(out, tuple) else results[0]


def _can_write_into(old: Any, new: Any) -> bool:
    return isinstance(new, Tensor) and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def _make_backend(compiler: str | Compiler, prefetch: int, in_flight: int, options: dict[str, Any]) -> Compiler:
    """Return the backend of torch.compile, which compiles one of Dynamo's graphs."""
    if isinstance(compiler, str) and compiler not in ("inductor", "aot_eager"):
        raise ValueError(f"compile: backend: expected 'inductor', 'aot_eager' or a function, got {compiler!r}")
    for name in {_FIRST_PASS, _LAST_PASS} & options.keys():
        raise ValueError(f"compile: options: expected no {name!r}, which is where passes over the graph are made")

    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Here, because the compiler takes a second to import.
        from functorch.compile import make_boxed_func

        from .._call.compiled_backend import GraphPass
        from .._torch.compiler import aot_autograd, compile_fx, get_hash_for_files
        from . import graph as graph_file

        remats, code = RUNNING.regions or (), get_hash_for_files((graph_file.__file__,))
        key = None if any(callable(remat.save) for remat in remats) else (code, repr(remats))  # None: a user's function chooses
        choose_pass = GraphPass(lambda graph: graph_file.mark_saved(graph, remats), key)
        annotations = graph_file.annotate_phases(graph.graph)
        schedule = functools.partial(graph_file.schedule_nodes, prefetch=prefetch, in_flight=in_flight)
        schedule_pass = GraphPass(schedule, (code, annotations, prefetch, in_flight))
        if compiler == "inductor":
            patches = dict.fromkeys(_SORTING_OPTIONS.intersection(_torch.list_inductor_options()), False) | options
            passes = {_FIRST_PASS: choose_pass, _LAST_PASS: schedule_pass}
            return cast("Callable[..., Any]", compile_fx(graph, inputs, config_patches=patches | passes))

        def compile_scheduled(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            choose_pass(graph.graph)
            schedule_pass(graph.graph)
            graph.recompile()
            return make_boxed_func(graph if isinstance(compiler, str) else compiler(graph, inputs))

        return aot_autograd(fw_compiler=compile_scheduled, keep_inference_input_mutations=True)(graph, inputs)

    return compile_graph


_FIRST_PASS = "joint_custom_pre_pass"  # the first of inductor's passes that see the ATen graph
_LAST_PASS = "post_grad_custom_post_pass"  # the last one that may change it
_SORTING_OPTIONS = {
    "reorder_for_locality",
    "reorder_for_peak_memory",
    "reorder_for_compute_comm_overlap",
    "aten_distributed_optimizations.enable_simple_overlap",  # from torch 2.15 on
}
"""Options of inductor, in any version, for passes that reorder the graph."""


def _check_donated(args: tuple[Any, ...], donate_argnums: tuple[int, ...]) -> Counter[int]:
    """Return the number of donated tensors in each storage, or raise for an argument that cannot be donated."""
    storages: Counter[int] = Counter()
    tensors: list[tuple[str, Tensor]] = []
    for i in donate_argnums:
        if not 0 <= i < len(args):
            raise ValueError(
                f"compile: donate_argnums {donate_argnums} but {len(args)} positional arguments: expected 0..{len(args) - 1}"
            )
        for path, leaf in pytree.tree_flatten_with_path(args[i])[0]:
            where = f"donated argument {i}{pytree.keystr(path)}"
            if not isinstance(leaf, Tensor):
                raise TypeError(f"compile: {where}: expected a tensor, got {type(leaf).__name__}")
            storages[_torch.storage_id(leaf)] += 1
            tensors.append((f"compile: {where}", leaf))
    refuse_shared_memory(tensors, f"donate_argnums={donate_argnums}")
    return storages
