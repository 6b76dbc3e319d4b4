"""For users' own tests: a model against itself unsharded, and ranks by vmap."""

from .._gone import raise_gone
from ._exact import assert_exact
from ._simulated import spmd

__all__ = ["assert_exact", "spmd"]

__getattr__ = raise_gone(__name__)
