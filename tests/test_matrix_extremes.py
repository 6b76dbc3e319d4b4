"""Muon, Shampoo and SOAP in float32 do what they do in float64: for gradients of low rank, with dead rows, tiny and huge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import at_most, each
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs

STEPS = 3
SHAPES = [(8, 8), (96, 3), (48, 24)]


def whole(shape: tuple[int, int], t: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(t))


def low_rank(shape: tuple[int, int], t: int) -> Tensor:
    """Of rank 2 and in whole numbers, so exactly of that rank in each dtype; of one row and column space in all steps."""
    u, v = (torch.randint(-3, 4, (2, n), generator=torch.Generator().manual_seed(99 + n)).float() for n in shape)
    return u.T @ torch.diag(torch.tensor([1.0 + t, 2.0 - t % 2])) @ v


def few_rows(shape: tuple[int, int], t: int) -> Tensor:
    grad = torch.zeros(shape)
    grad[1 : 1 + shape[1] // 2] = whole((shape[1] // 2, shape[1]), 7) * 2**t
    return grad


GRADIENTS: dict[str, Callable[[tuple[int, int], int], Tensor]] = {"whole": whole, "low rank": low_rank, "few rows": few_rows}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "muon": lambda spec, dtype: fs.optim.muon(spec, lr=1.0, weight_decay=0.0, dtype=dtype),
    "shampoo": lambda spec, dtype: fs.optim.shampoo(spec, lr=1.0, momentum=0.5),
    "shampoo of averages": lambda spec, dtype: fs.optim.shampoo(spec, lr=1.0, momentum=0.5, decay=0.9, every=2),
    "shampoo of one side": lambda spec, dtype: fs.optim.shampoo(spec, lr=1.0, max_size=40),
    "soap": lambda spec, dtype: fs.optim.soap(spec, lr=1.0, weight_decay=0.0, every=2),
}

TOLERANCES = {"soap": 0.1, "shampoo of averages": 0.02}
"""Of Adam's division what is left of rounding errors; of old roots those of eigenvalues that were 0."""


def stepped(name: str, grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """What each of the steps adds."""
    module = nn.Linear(grads[0].shape[1], grads[0].shape[0], bias=False, dtype=dtype)
    spec = fs.policies.whole()(module).on({"shard": 1})
    init, update = OPTIMIZERS[name](spec, dtype)
    params = fs.shard({"weight": torch.zeros_like(module.weight)}, spec)
    state, out = init(params), []
    for grad in grads:
        new, state = update(fs.shard({"weight": grad.to(dtype)}, spec), state, params)
        out.append(fs.unshard(new, spec)["weight"] - fs.unshard(params, spec)["weight"])
        params = new
    return torch.stack(out).double()


@each
@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40], ids=["", "tiny", "huge"])
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_does_what_float64_does(name: str, kind: str, scale: float) -> None:
    """Where a gradient has nothing, rounding errors do not become steps: Shampoo's were 4e12 where 2 is due."""
    for shape in SHAPES if (name, kind) != ("soap", "whole") else SHAPES[:1]:  # SOAP: the null space has no basis of its own
        grads = [GRADIENTS[kind](shape, t) * scale for t in range(STEPS)]
        got, want = (stepped(name, grads, dtype) for dtype in (torch.float32, torch.float64))
        for one, expected in zip(got, want, strict=True):
            error, size = (one - expected).norm(), expected.norm()
            assert error <= TOLERANCES.get(name, 1e-3) * size + 1e-12, (shape, float(error), float(size))


def test_muon_of_gradients_whose_squares_overflow() -> None:
    """The norm of 1e20 was infinite in float32, and the step 0."""
    x = whole((6, 4), 0)
    for dtype in (torch.float32, torch.bfloat16):
        want = fs.optim.orthogonal(x.to(dtype))
        assert_close(fs.optim.orthogonal(x.to(dtype) * 2.0**70), want, rtol=0, atol=0)
    assert_close(fs.optim.orthogonal(torch.stack([x, x * 2.0**100])), torch.stack([fs.optim.orthogonal(x)] * 2))


@at_most(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_whose_square_overflows_leaves_state_finite(name: str, dtype: torch.dtype) -> None:
    """Of Shampoo and SOAP it was NaN for good, at the first step or later, and `apply_if_finite` saw a finite gradient."""
    module = nn.Linear(6, 8, bias=False, dtype=dtype)
    spec = fs.policies.whole()(module).on({"shard": 1})
    init, update = fs.optim.apply_if_finite(spec)(OPTIMIZERS[name](spec, torch.float32))
    params, huge = fs.shard({"weight": torch.zeros_like(module.weight)}, spec), torch.finfo(dtype).max
    state = init(params)
    for t, scale in enumerate((min(huge, 1e19), 1.0, huge, 1.0)):
        grad = whole((8, 6), t).tanh() * scale
        params, state = update(fs.shard({"weight": grad.to(dtype)}, spec), state, params)
        assert all(x.isfinite().all() for x in pytree.tree_leaves((params, state)) if isinstance(x, Tensor)), t
        assert params[""].abs().max() < 100
    assert state.total == 0
    assert (
        OPTIMIZERS[name](spec, torch.float32)
        .update({"": torch.full((48,), torch.inf, dtype=dtype)}, state.inner, params)[0][""]
        .isnan()
        .any()
    ), "what is not finite stays visible"


def test_relative_eps_is_of_the_largest_eigenvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the authors' code: (L + relative_eps max(L) I)^(-1/4)."""
    monkeypatch.setattr("funshard.optim._by_matrix.rules.RELATIVE_EPS", 0.5)
    spec = fs.policies.whole()(nn.Linear(2, 2, bias=False).double()).on({"shard": 1})
    init, update = fs.optim.shampoo(spec, lr=1.0, momentum=0.0, eps=1e-30)
    params = {"": torch.zeros(4).double()}
    new, _ = update({"": torch.tensor([4.0, 0.0, 0.0, 1.0]).double()}, init(params), params)
    assert_close(new[""], -torch.tensor([4 / (16 + 8) ** 0.5, 0, 0, 1 / (1 + 8) ** 0.5]).double())
