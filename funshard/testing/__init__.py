"""For users' own tests: a model against itself unsharded, ranks by vmap, hypothesis strategies (with the extra ``test``)."""

from ._strategies import ModelCall, assert_exact, integers_like, meshes, modules, policies, spmd

__all__ = ["ModelCall", "assert_exact", "integers_like", "meshes", "modules", "policies", "spmd"]
