"""Laws G1, G3 and G8 on random models, policies and meshes of simulated ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp

import funshard as fs
from funshard.policies import Policy

Loss = Callable[[Mapping[str, Tensor]], Tensor]


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, Policy, dict[str, int]]:
    model = draw(fs.testing.modules(max_depth=2).filter(lambda m: sum(p.numel() for p in m.parameters())))
    return model, draw(fs.testing.policies(model)), draw(fs.testing.meshes(4))


def full_params(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return fs.testing.integers_like(model, seed, high=1)


def both(
    model: nn.Module, policy: Policy, sizes: dict[str, int], transform: Callable[[Loss, Any, Any], Any]
) -> tuple[Any, Any]:
    """``transform(loss, params, directions)`` on simulated ranks, and its shards on the mean of the ranks' plain losses."""
    ranks = torch.Size(sizes.values()).numel()
    xs = torch.arange(ranks).double() * ranks  # their means are whole numbers times ranks / 2
    t, v = full_params(model), full_params(model, 1)

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = policy(model).on(mesh)
        return transform(lambda p: fs.functional_call(model, p, x, spec=spec), fs.shard(t, spec), fs.shard(v, spec))

    def mean(t: Mapping[str, Tensor]) -> Tensor:
        # A copy for each call: torch 2.13 leaves its tensors in a tied parameter of a module that is registered twice.
        return sum(torch.func.functional_call(copy.deepcopy(model), dict(t), (x,)) for x in xs) / ranks

    expected = transform(mean, t, v)

    def sharded(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        return fs.shard(expected, policy(model).on(mesh))

    return fs.testing.spmd(run, sizes)(xs), fs.testing.spmd(sharded, sizes)(xs)


def agree(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@given(cases())
def test_g1_gradients_are_shards_of_the_mean_gradient(case: tuple[nn.Module, Policy, dict[str, int]]) -> None:
    """By torch.func.grad and fs.grad, alike."""
    for by in (grad, fs.grad):
        agree(*both(*case, lambda f, p, v, by=by: by(f)(p)))


@settings(max_examples=25)
@given(cases())
def test_g3_second_derivatives_are_shards_of_the_mean_ones(case: tuple[nn.Module, Policy, dict[str, int]]) -> None:
    """jvp of grad, grad of (grad . v), and the gradient of a penalty on the gradient."""

    def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
        return sum((a[k] * b[k]).sum() for k in a)

    agree(*both(*case, lambda f, p, v: jvp(grad(f), (p,), (v,))[1]))
    agree(*both(*case, lambda f, p, v: grad(lambda p: dot(grad(f)(p), v))(p)))
    agree(*both(*case, lambda f, p, v: grad(lambda p: f(p) + sum((g**2).sum() for g in grad(f)(p).values()))(p)))


@settings(max_examples=25)
@given(cases(), st.integers(1, 3))
def test_g8_sgd_steps_commute_with_sharding(case: tuple[nn.Module, Policy, dict[str, int]], steps: int) -> None:
    """k steps on shards are the shards of k steps on the mean loss (G9: tied and shared modules among them)."""

    def descend(f: Loss, p: dict[str, Tensor], v: object) -> dict[str, Tensor]:
        for _ in range(steps):
            p = {k: p[k] - 2**-10 * torch.tanh(g) for k, g in fs.grad(f)(p).items()}
        return p

    agree(*both(*case, descend))
