"""Parts of torch's compilers. They take a second to import, so whoever wants them imports this when it compiles."""

from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.eager_transforms import _autograd_grad  # pyright: ignore[reportAttributeAccessIssue]
from torch._inductor import list_mode_options, list_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload

__all__ = [
    "FUNC_GRADIENT",
    "CustomGraphPass",
    "OpOverload",
    "aot_autograd",
    "compile_fx",
    "get_hash_for_files",
    "list_mode_options",
    "list_options",
]

FUNC_GRADIENT = _autograd_grad
"""Where torch.func takes a gradient, in the graph that Dynamo makes. Pinned by ``test_compile.py``'s counts of gathers."""


def compile_fx(*args: Any, **options: Any) -> Any:
    """What inductor makes of a graph. It is imported here, where somebody asks for it."""
    from torch._inductor import compile_fx as inductor

    return inductor.compile_fx(*args, **options)
