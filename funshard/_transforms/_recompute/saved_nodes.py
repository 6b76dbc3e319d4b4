"""The nodes of a joint graph, of forward and backward, that a `Remat` saves; torch's partitioner recomputes the others.

Import this module only to compile: torch's compilers take a second to import.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from ... import _torch
from ..._spec.remat import Chosen, Remat
from ..._torch.compiler import (
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
from .regions import NAME_KEY

__all__ = ["UnitBackend", "is_chosen"]


def is_chosen(node: Node, chosen: Chosen) -> bool:
    """Return whether the results of a node's operator are to be saved."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return chosen(original_op(node), tuple(args), dict(kwargs), node.meta.get("val"))


class UnitBackend:
    """A backend of torch.compile, which saves for backward what a `Remat` saves, and whose code nobody differentiates twice.

    Args:
        backend: The backend.
        options: Its options.
        kwargs: Its other keyword arguments, for another backend than inductor.
        remat: What to save; None for what torch chooses.
        make_prehook: Returns, for a run of the code, what to call before its backward.
        retains: Whether a backward may come back to what forward saved.
    """

    def __init__(
        self,
        backend: str | Callable[..., Any],
        options: dict[str, Any],
        kwargs: dict[str, Any],
        remat: Remat | None,
        make_prehook: Callable[[], Callable[[Any], None]],
        *,
        retains: bool,
    ) -> None:
        self._retains = retains
        self._backend, self._options, self._kwargs, self._make_prehook = backend, options, kwargs, make_prehook
        self._passes = None if remat is None else (_SavePass(remat), _RecomputePass())

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return compiled code for a graph."""
        with _torch.keep_saved_tensors() if self._retains else contextlib.nullcontext():
            code = self._compile(graph, inputs)

        def run(*args: Any) -> Any:
            out = code(*args)
            for node in {x.grad_fn for x in out if isinstance(x, Tensor) and x.grad_fn is not None}:
                node.register_prehook(self._make_prehook())
            return out

        return run

    def _compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph by the backend, with the passes that choose saved and recomputed nodes."""
        if self._backend == "inductor":
            # inductor's passes are between these two, and replace nodes
            save, recompute = self._passes or (None, None)
            passes = {"joint_custom_pre_pass": save, "joint_custom_post_pass": recompute} if self._passes else {}
            return compile_fx(graph, inputs, config_patches=self._options | passes)
        options = ({"options": self._options} if self._options else {}) | self._kwargs
        return compile_with_joint_pass(self._backend, graph, inputs, self._passes and self._tag_nodes, **options)

    def _tag_nodes(self, graph: Graph) -> None:
        for tag_nodes in self._passes or ():
            tag_nodes(graph)


class _SavePass(CustomGraphPass):
    """A pass that tags the nodes to save: their operators are chosen, or their results have names."""

    def __init__(self, remat: Remat) -> None:
        self._remat = remat

    def __call__(self, graph: Graph) -> None:
        chosen = self._remat._choose_operators()
        for node in _forward_nodes(graph):
            name = get_annotation(node, NAME_KEY)
            if name in self._remat.names and is_view(node):
                _tag(_with_elements(view_base(node)), CheckpointPolicy.MUST_SAVE)
            elif isinstance(node.target, OpOverload) and not is_view(node) and is_chosen(node, chosen):
                _tag(_with_elements(node), CheckpointPolicy.MUST_SAVE)

    def uuid(self) -> object:
        """Return the cache key of this pass; None, so that nothing is cached, if a user's function chooses what to save."""
        return None if callable(self._remat.save) else (get_hash_for_files((__file__,)), repr(self._remat))


class _RecomputePass(CustomGraphPass):
    """A pass that tags all other nodes of forward, but collectives, to be recomputed in backward."""

    def __call__(self, graph: Graph) -> None:
        others = [node for node in _forward_nodes(graph) if "recompute" not in node.meta and _is_recomputable(node)]
        _tag(others, CheckpointPolicy.MUST_RECOMPUTE)

    def uuid(self) -> object:
        """Return the cache key of this pass."""
        return get_hash_for_files((__file__,))


def _forward_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that depend on no gradient of a result."""
    backward: set[Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            yield node


def _with_elements(node: Node) -> list[Node]:
    """Return a node and the elements of its result, if that is a tuple."""
    return [node, *(user for user in node.users if user.target is operator.getitem)]


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
