"""Private parts of torch's compilers, which take a second to import: import this module only to compile."""

from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.eager_transforms import _autograd_grad  # pyright: ignore[reportAttributeAccessIssue]
from torch._inductor import list_mode_options, list_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Node

__all__ = [
    "FUNC_GRADIENT",
    "CustomGraphPass",
    "OpOverload",
    "aot_autograd",
    "compile_fx",
    "get_hash_for_files",
    "list_mode_options",
    "list_options",
    "original_op",
]

FUNC_GRADIENT = _autograd_grad
"""The function that takes torch.func's gradients in the graph that Dynamo makes.

Pinned by ``test_compile.py``'s counts of gathers.
"""


def compile_fx(*args: Any, **options: Any) -> Any:
    """Compile a graph with inductor, which is imported only when this function is called."""
    from torch._inductor import compile_fx as inductor

    return inductor.compile_fx(*args, **options)


def original_op(node: Node) -> Any:
    """Return the operator of the program that the compiler decomposed into this node, or the node's own operator.

    Its metadata has a copy of the operator, which is not equal to it. Pinned by ``test_operators_that_were_taken_apart``.
    """
    original = node.meta.get("original_aten")
    return getattr(original.overloadpacket, original._overloadname) if isinstance(original, OpOverload) else node.target
