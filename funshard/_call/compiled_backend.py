"""The backend of compiled units: a `Remat` saves nodes of the joint graph, and torch's partitioner recomputes the others.

Import this module only to compile: torch's compilers take a second to import.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from .._spec.options import Remat
from .._torch.compiler import (
    CustomGraphPass,
    OpOverload,
    compile_fx,
    compile_with_joint_pass,
    get_annotation,
    get_hash_for_files,
    is_view,
    original_op,
    view_base,
)
from .._transforms._recompute.saved_results import NAME_KEY

_FIRST_PASS, _LAST_PASS = "joint_custom_pre_pass", "joint_custom_post_pass"
"""Inductor's options for a pass over the graph of forward and backward before its own, which replace nodes, and after them."""


def find_saved(nodes: Iterable[Node], remat: Remat) -> Iterator[Node]:
    """Yield the nodes whose results are to be saved: what made a named tensor, and calls of chosen operators."""
    chosen = remat._choose_operators()
    for node in nodes:
        if is_view(node):
            if get_annotation(node, NAME_KEY) in remat.names:
                yield view_base(node)
        elif isinstance(node.target, OpOverload):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            if chosen(original_op(node), tuple(args), dict(kwargs), node.meta.get("val")):
                yield node


def _refuse_second_derivative(path: str, _: object) -> None:
    """Raise RuntimeError in a backward that records a graph: torch may take a second derivative of compiled code for zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"module '{path}' with P(compile=True): a gradient with create_graph=True, outside or inside of its forward, "
            "differentiates compiled code twice, which torch cannot: expected fs.hvp or torch.func, which run it without "
            "compilation, or no compile for this unit"
        )


class GraphPass(CustomGraphPass):
    """A pass of inductor: a change of a graph in place, with the key of what inductor caches, None for nothing."""

    def __init__(self, change: Callable[[Graph], None], key: object) -> None:
        self._change, self._key = change, key

    def __call__(self, graph: Graph) -> None:
        self._change(graph)
        graph.lint()

    def uuid(self) -> object:
        """Return the key. Inductor's own has the graph's code, but not its annotations."""
        return self._key


class UnitBackend:
    """A backend of torch.compile, which saves for backward what a `Remat` saves; None for what torch chooses.

    ValueError for options of inductor for its own passes.
    """

    path = ""
    """The module that runs, which errors of its backward name."""

    def __init__(
        self, backend: str | Callable[..., Any], options: dict[str, Any], kwargs: dict[str, Any], remat: Remat | None
    ) -> None:
        for name in {_FIRST_PASS, _LAST_PASS} & options.keys():
            raise ValueError(f"Compile: options: expected no {name!r}, which is where passes over the graph are made")
        self._backend, self._options, self._kwargs = backend, options, kwargs
        code = get_hash_for_files((__file__,))
        self._passes: dict[str, GraphPass] = {}
        if remat is not None:
            key = None if callable(remat.save) else (code, repr(remat))  # None: a user's function chooses
            self._passes[_FIRST_PASS] = GraphPass(functools.partial(_tag_saved, remat), key)
        self._passes[_LAST_PASS] = GraphPass(functools.partial(_tag_others, remat is not None), (code, remat is not None))

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return compiled code for a graph."""
        code = self._compile(graph, inputs)

        def run(*args: Any) -> Any:
            out = code(*args)
            for node in {x.grad_fn for x in out if isinstance(x, Tensor) and x.grad_fn is not None}:
                node.register_prehook(functools.partial(_refuse_second_derivative, self.path))
            return out

        return run

    def _compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph by the backend, with the passes that choose saved and recomputed nodes."""
        if self._backend == "inductor":
            return compile_fx(graph, inputs, config_patches=self._options | self._passes)
        options = ({"options": self._options} if self._options else {}) | self._kwargs
        return compile_with_joint_pass(self._backend, graph, inputs, self._run_passes, **options)

    def _run_passes(self, graph: Graph) -> None:
        for run_pass in self._passes.values():
            run_pass(graph)


def _tag_saved(remat: Remat, graph: Graph) -> None:
    for node in find_saved(_forward_nodes(graph), remat):
        _tag([node, *(user for user in node.users if user.target is operator.getitem)], CheckpointPolicy.MUST_SAVE)


def _tag_others(is_recomputing: bool, graph: Graph) -> None:
    """Save copies of written inputs, and maybe recompute the rest of forward, except collectives."""
    _tag(_copy_written_inputs(graph), CheckpointPolicy.MUST_SAVE)
    if is_recomputing:
        others = [node for node in _forward_nodes(graph) if "recompute" not in node.meta and _is_recomputable(node)]
        _tag(others, CheckpointPolicy.MUST_RECOMPUTE)


def _copy_written_inputs(graph: Graph) -> list[Node]:
    """Add copies of the inputs that a joint graph overwrites, have their readers read the copies, and return the copies.

    torch 2.13 may save an input itself and compute from it again in backward, where it holds what was written (pytorch pull
    request 197039). Pinned by ``test_a_buffer_that_forward_changes_in_place``.
    """
    copies: list[Node] = []
    placeholders = graph.find_nodes(op="placeholder")
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {write.args[0] for write in writes}
    for given in placeholders:
        readers = [user for user in given.users if user.op != "output" and not (user in writes and user.args[0] is given)]
        if given not in written or not readers:
            continue
        with graph.inserting_after(placeholders[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (given,))
        copy.meta["val"] = given.meta["val"].clone()
        for reader in readers:
            reader.replace_input_with(given, copy)
        copies.append(copy)
    return copies


def _forward_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that depend on no gradient of a result."""
    backward: set[Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            yield node


def _is_recomputable(node: Node) -> bool:
    """Return whether a node computes tensors, not sizes, and communicates nothing."""
    value = node.meta.get("val")
    values: Iterable[object] = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(x, Tensor) for x in values) and getattr(node.target, "namespace", "") != "_c10d_functional"


def _tag(nodes: Iterable[Node], policy: CheckpointPolicy) -> None:
    """Mark the calls among nodes as saved or recomputed, in torch's form."""
    for node in nodes:
        if node.op == "call_function":
            node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0  # one region
