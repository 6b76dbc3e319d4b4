"""Hypothesis strategies of random modules, policies and meshes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn

from funshard import P, Params, Policy, by_path, by_size, by_type, module_tree
from funshard.policies import always, by_group, whole


def integers_like(model: nn.Module, seed: int = 0, high: int = 4) -> Params:
    """Return small whole numbers in the shapes and dtypes of a model's parameters, by name: their sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-high, high + 1, p.shape, generator=generator).to(p.dtype) for name, p in model.named_parameters()
    }


class ResidualNode(nn.Module):
    """A node of a random model: it adds ``(parameter * x).sum()`` and its children's outputs to its input."""

    def __init__(self, children: list[nn.Module], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for p in self._parameters.values():
            if p is not None:
                out = out + (p * x).sum()
        for part in self.parts:
            out = out + part(out)
        return out


class OtherResidualNode(ResidualNode):
    """A second class of node, which policies by type tell apart from the first."""


def modules(
    *, max_depth: int = 3, tied: bool = True, frozen: bool = False, dtype: torch.dtype = torch.float64
) -> SearchStrategy[nn.Module]:
    """Return a strategy of module trees with odd, empty and 0-dim parameters, shared modules, tied and frozen parameters.

    Each maps a 0-dim tensor to a 0-dim tensor, by sums and products: exact on small whole numbers.
    """
    shapes = st.lists(st.sampled_from([(), (1,), (2,), (3,), (2, 3), (0,), (5,), (1, 7)]), max_size=3)
    kinds = st.sampled_from([ResidualNode, OtherResidualNode])

    @st.composite
    def tree(draw: st.DrawFn, depth: int, pool: list[nn.Module]) -> nn.Module:
        count = draw(st.integers(0, 3)) if depth else 0
        children: list[nn.Module] = []
        for _ in range(count):
            if tied and pool and draw(st.integers(0, 5)) == 0:
                children.append(draw(st.sampled_from(pool)))
            else:
                children.append(draw(tree(depth - 1, pool)))
        module = draw(kinds)(children, draw(shapes), dtype)
        if frozen:
            for p in module.parameters(recurse=False):
                p.requires_grad_(draw(st.booleans()))
        if tied and pool and draw(st.integers(0, 5)) == 0:
            others = list(draw(st.sampled_from(pool)).parameters())
            if others:
                module.register_parameter("tied", draw(st.sampled_from(others)))
        pool.append(module)
        return module

    return st.deferred(lambda: st.builds(list[nn.Module]).flatmap(lambda pool: tree(max_depth, pool)))


def policies(model: nn.Module) -> SearchStrategy[Policy]:
    """Return a hypothesis strategy of policies for a model: of every kind, and of random paths with random `P`."""
    p = st.builds(P, st.sampled_from(["shard", None]), reshard=st.booleans(), align=st.sampled_from([None, 1, 4]))
    paths = st.dictionaries(st.sampled_from(sorted({*module_tree(model).canonical})), p, max_size=4)
    classes = st.sampled_from(sorted({type(m) for m in model.modules()}, key=lambda c: c.__name__))
    inner = st.sampled_from(sorted({type(m) for name, m in model.named_modules() if name}, key=lambda c: c.__name__))
    groups = st.builds(lambda c, n, p: by_group([c], size=n, p=p), inner, st.integers(2, 3), p)
    return st.one_of(
        st.builds(whole, p),
        st.builds(always, p),
        st.builds(lambda c, p: by_type(c, p=p), classes, p),
        st.builds(lambda n, p: by_size(n, p=p), st.integers(0, 30), p),
        *([groups] if any(True for _ in model.children()) else []),
        st.builds(lambda paths, p: by_path(_unify_aliases(model, paths), p), paths, p),
    )


def _unify_aliases(model: nn.Module, paths: Mapping[str, P]) -> dict[str, P]:
    first: dict[str, P] = {}
    canonical = module_tree(model).canonical
    return {path: first.setdefault(canonical[path], p) for path, p in paths.items()}


def meshes(max_size: int = 5) -> SearchStrategy[dict[str, int]]:
    """Return a hypothesis strategy of mesh shapes: ("shard",), or ("replicate", "shard") for HSDP."""
    n = st.integers(1, max_size)
    small = st.integers(1, 3)
    return st.one_of(st.builds(lambda s: {"shard": s}, n), st.builds(lambda r, s: {"replicate": r, "shard": s}, small, small))
