"""For users' own tests: a model against itself unsharded, ranks by vmap, hypothesis strategies (with the extra ``test``)."""

from ._strategies import assert_exact, integers_like, meshes, modules, policies, spmd

__all__ = ["assert_exact", "integers_like", "meshes", "modules", "policies", "spmd"]
