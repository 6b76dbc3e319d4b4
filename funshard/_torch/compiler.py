"""Private parts of torch's compilers, which take a second to import: import this module only to compile."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch.eager_transforms import _autograd_grad  # pyright: ignore[reportAttributeAccessIssue]
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

__all__ = ["FUNC_GRADIENT", "CustomGraphPass", "OpOverload", "annotate", "aot_autograd", "compile_fx"]
__all__ += ["compile_with_joint_pass", "get_annotation", "get_hash_for_files", "is_view", "original_op", "view_base"]

FUNC_GRADIENT = _autograd_grad
"""The function that takes torch.func's gradients in the graph that Dynamo makes.

Pinned by ``test_compile.py``'s counts of gathers.
"""


def compile_fx(*args: Any, **options: Any) -> Any:
    """Compile a graph with inductor, which is imported only when this function is called."""
    from torch._inductor import compile_fx as inductor

    return inductor.compile_fx(*args, **options)


def compile_with_joint_pass(
    backend: str | Callable[..., Any],
    graph: GraphModule,
    inputs: Sequence[Any],
    joint_pass: Callable[[Graph], None],
    **options: Any,
) -> Callable[..., Any]:
    """Compile a graph with a backend of torch.compile that runs a pass on the joint graph of forward and backward.

    Pinned by ``test_saved_results_of_a_compiled_unit``.
    """

    def run_pass(joint: GraphModule, joint_inputs: object) -> GraphModule:
        joint_pass(joint.graph)
        return joint

    compile: Any = lookup_backend(backend) if isinstance(backend, str) else backend
    # the cache of compiled graphs does not ask for the pass
    with torch._functorch.config.patch(joint_custom_pass=run_pass, enable_autograd_cache=False):
        return compile(graph, inputs, **options)


def annotate(node: Node, **annotations: object) -> None:
    """Add annotations to a node."""
    node.meta["custom"] = {**node.meta.get("custom", {}), **annotations}


def get_annotation(node: Node, key: str) -> Any:
    """Return the node's annotation under this key, None if the node has none."""
    return node.meta.get("custom", {}).get(key)


def is_view(node: Node) -> bool:
    """Return whether a node has no memory of its own: a view, or an element of a tuple of results."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def view_base(node: Node) -> Node:
    """Return the node that allocated the memory of which this node is a view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def original_op(node: Node) -> Any:
    """Return the operator of the program that the compiler decomposed into this node, or the node's own operator.

    Its metadata has a copy of the operator, which is not equal to it. Pinned by ``test_operators_that_were_taken_apart``.
    """
    original = node.meta.get("original_aten")
    return getattr(original.overloadpacket, original._overloadname) if isinstance(original, OpOverload) else node.target
