"""For users' own tests: a model against itself unsharded, ranks by vmap, hypothesis strategies (with the extra ``test``)."""

from ._exact import assert_exact
from ._side_by_side import ModelCall
from ._simulated import spmd
from ._strategies import integers_like, meshes, modules, policies

__all__ = ["ModelCall", "assert_exact", "integers_like", "meshes", "modules", "policies", "spmd"]
