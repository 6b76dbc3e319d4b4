"""Symbolic shapes in a graph of torch.compile."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch._guards import TracingContext

from .tracing import assume_constant

__all__ = ["flat_linear", "has_symbolic_shapes"]


@assume_constant
def has_symbolic_shapes() -> bool:
    """Return whether an input of the graph that Dynamo traces has a symbolic size. Pinned by ``test_one_graph``."""
    context = TracingContext.try_get()
    env = context.fake_mode.shape_env if context and context.fake_mode else None
    if env is None:
        return False
    symbols = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # pyright: ignore[reportDeprecated]
    return any(symbol.is_integer and symbol not in env.replacements for symbol in symbols)


def flat_linear(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer that flattens its input by itself, as its kernel does, with the same numbers.

    Inside torch.func transforms torch's ``linear`` with a bias makes constants of the sizes that it flattens, and a graph of
    each shape (torch 2.11 to 2.13). Pinned by ``test_linear_with_a_bias_makes_constants_of_sizes``.
    """

    def forward(x: Tensor) -> Tensor:
        if x.dim() < 3 or module.bias is None:  # pyright: ignore[reportUnnecessaryComparison]
            return nn.functional.linear(x, module.weight, module.bias)
        return nn.functional.linear(x.flatten(0, -2), module.weight, module.bias).unflatten(0, x.shape[:-1])

    return forward
