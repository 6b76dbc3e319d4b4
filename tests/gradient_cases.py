"""Random models on simulated ranks whose derivatives are exact, and `assert_shards_of_mean`: what G1, G3 and G8 assert."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import strategies
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

import funshard as fs
from funshard.policies import Policy

Loss = Callable[[Mapping[str, Tensor]], Tensor]
Transform = Callable[[Loss, fs.Params, fs.Params], fs.Params]
"""``transform(loss, params, directions)``: something like params."""
Case = tuple[nn.Module, Policy, dict[str, int]]

EXACT = 2.0**44
"""float64 has 53 bits; some are left for the divisions by up to 4 ranks, a few of them in a row."""


class Calls(nn.Module):
    """Calls its parts in the given order: some more than once, some never."""

    def __init__(self, parts: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = x + self.parts[i](x)
        return x


def models(max_depth: int = 2) -> st.SearchStrategy[nn.Module]:
    """Models with parameters; some have modules twice and tied weights."""
    return strategies.modules(max_depth=max_depth).filter(lambda m: any(p.numel() for p in m.parameters()))


@st.composite
def calls(draw: st.DrawFn) -> nn.Module:
    """Models that call their parts in any order, some again, some never, and tie weights across them."""
    parts = draw(st.lists(models(1), min_size=1, max_size=3))
    if draw(st.booleans()):
        parts[-1].register_parameter("tied", next(parts[0].parameters()))
    return Calls(parts, draw(st.lists(st.integers(0, len(parts) - 1), max_size=4)))


MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 1}]
"""The means over all ranks and over each axis divide by powers of two."""


@st.composite
def cases(draw: st.DrawFn, model: st.SearchStrategy[nn.Module] | None = None) -> Case:
    chosen = draw(models() if model is None else model)
    return chosen, draw(strategies.policies(chosen)), draw(st.sampled_from(MESHES))


def values(model: nn.Module, seed: int = 0, *, exact: bool = True) -> fs.Params:
    """-1, 0 and 1 as parameters, or a third of these."""
    return {k: v if exact else v / 3 for k, v in strategies.integers_like(model, seed, high=1).items()}


def inputs(sizes: Mapping[str, int], *, exact: bool = True) -> Tensor:
    """Each rank's own input. The models are linear in it, so their mean gradients are whole numbers as well."""
    ranks = math.prod(sizes.values())
    return (torch.arange(ranks).double() + 1) * ranks if exact else torch.linspace(0.3, 1, ranks).double()


def penalty(params: Mapping[str, Tensor]) -> Tensor:
    """Of shards alone: it counts with its sum over ranks."""
    return sum(((p**3).sum() for p in params.values()), torch.zeros((), dtype=torch.float64))


def mean_loss(model: nn.Module, xs: Tensor, penalty: Loss = penalty) -> Loss:
    """The mean of the ranks' losses and the penalty, of full parameters."""

    def mean(t: Mapping[str, Tensor]) -> Tensor:
        # A copy for each call: torch 2.13 leaves its tensors in a tied parameter of a module that is registered twice.
        return sum(torch.func.functional_call(copy.deepcopy(model), dict(t), (x,)) for x in xs) / len(xs) + penalty(t)

    return mean


def assume_exact(model: nn.Module, xs: Tensor, transform: Transform) -> None:
    """Drops cases with numbers that float64 does not hold.

    All is a polynomial in parameters, directions and inputs with positive coefficients: nothing on the way is larger
    than the result with positive ones.
    """
    t, v = ({k: p.abs() + 1 for k, p in values(model, seed).items()} for seed in (0, 1))
    largest = transform(mean_loss(model, xs), t, v)
    assume(all(bool((g < EXACT).all()) for g in largest.values()))


def assert_shards_of_mean(case: Case, transform: Transform, reference: Transform | None = None, *, exact: bool = True) -> None:
    """``transform`` of each rank's loss, on shards, is the shards of ``reference`` of the mean loss, bit by bit if exact.

    ``reference`` is a transform of full parameters, by default the same.
    """
    model, policy, sizes = case
    xs = inputs(sizes, exact=exact)
    t, v = (values(model, seed, exact=exact) for seed in (0, 1))
    reference = reference or transform
    if exact:
        assume_exact(model, xs, reference)

    def sharded(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = policy(model).on(mesh)

        def loss(p: Mapping[str, Tensor]) -> Tensor:
            return fs.functional_call(model, p, x, spec=spec) + penalty(p)

        return transform(loss, fs.shard(t, spec), fs.shard(v, spec))

    expected = reference(mean_loss(model, xs), t, v)
    got = fs.testing.spmd(sharded, sizes)(xs)
    want = fs.testing.spmd(lambda mesh, _: fs.shard(expected, policy(model).on(mesh)), sizes)(xs)
    agree(got, want, exact=exact)


def agree(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, exact: bool = True) -> None:
    """The same keys and values, bit by bit if exact."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] is not None
        if exact:
            assert torch.equal(got[key], value), f"{key}: expected {value}, got {got[key]}"
        else:
            torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
