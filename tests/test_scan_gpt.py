"""The gradient through 64 steps of AdamW of a small GPT is plain autograd's, on 1, 2 and 4 ranks with each strategy."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import seldom
from ranks import Pool
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, Block

STEPS, SAMPLES, SEQ, RANKS = 64, 2, 6, 4
ADAMW: dict[str, Any] = {"learning_rate": 3e-3, "weight_decay": 0.1, "eps_root": 1e-10}


@functools.cache
def network() -> tuple[GPT, fs.Params]:
    torch.manual_seed(0)
    model = GPT(1, 8, 2, SEQ).double()
    return model, {name: p.detach() for name, p in model.named_parameters()}


def samples(steps: int) -> Tensor:
    """Bytes by step, rank and sample, of which the last is the one to predict."""
    return torch.randint(256, (steps, RANKS, SAMPLES, SEQ + 1), generator=torch.Generator().manual_seed(1))


def weighted_loss(call: Any, params: Any, tokens: Tensor, weights: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the one with a second derivative
        logits = call(params, tokens[:, :-1])
    losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
    return (weights * losses).mean()


def after_training(scan: Any, call: Any, optimizer: Any, params: Any, tokens: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
    """The loss on other samples after AdamW's steps."""
    loss = functools.partial(weighted_loss, call)

    def step(state: Any, given: tuple[Tensor, Tensor]) -> Any:
        params, moments = state
        grads = torch.func.grad(loss)(params, *given)
        return optimizer.update(grads, moments, params, lr=lr), None

    (params, _), _ = scan(step, (params, optimizer.init(params)), (tokens[:-1], weights))
    return loss(params, tokens[-1], torch.ones(()))


def loop(step: Any, state: Any, xs: Any) -> Any:
    for x in zip(*xs, strict=True):
        state, _ = step(state, x)
    return state, None


@functools.cache
def wanted(ranks: int) -> tuple[Tensor, Tensor, fs.Params]:
    """By weights of samples, the rate and the first parameters: plain autograd of the unsharded model, all in one graph."""
    model, full = network()
    tokens = samples(STEPS + 1)[:, :ranks].flatten(1, 2)
    weights = torch.ones(STEPS, ranks * SAMPLES).double()
    call = lambda params, x: torch.func.functional_call(model, params, x)  # noqa: E731
    leaves, tree = pytree.tree_flatten((weights, torch.tensor(ADAMW["learning_rate"]).double(), full))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    weights, lr, params = pytree.tree_unflatten(leaves, tree)
    optimizer = fs.optim.adamw(**ADAMW)
    value = after_training(loop, call, optimizer, params, tokens, weights, lr)
    return pytree.tree_unflatten(list(torch.autograd.grad(value, leaves)), tree)


def check(rank: int, sizes: dict[str, int], p: fs.P, options: dict[str, Any]) -> None:
    model, full = network()
    mesh: Any = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes != {"shard": 1} else sizes
    spec = fs.by_type(Block, p=p)(model).on(mesh)
    ranks = torch.Size(sizes.values()).numel()
    call = lambda params, x: fs.functional_call(model, params, x, spec=spec)  # noqa: E731
    optimizer = fs.optim.adamw(spec=spec, **ADAMW)
    scan = functools.partial(fs.scan, **options)
    f = functools.partial(after_training, scan, call, optimizer)
    weights, lr = torch.ones(STEPS, SAMPLES).double(), torch.tensor(ADAMW["learning_rate"]).double()
    own = fs.grad(lambda w, lr, params: f(params, samples(STEPS + 1)[:, rank], w, lr), (0, 1, 2))
    got_weights, got_lr, got_params = own(weights, lr, fs.shard(full, spec))
    want_weights, want_lr, want_params = wanted(ranks)
    mine = want_weights.unflatten(1, (ranks, SAMPLES))[:, rank]
    assert mine.abs().max() > 1e-4
    assert_close(got_weights / ranks, mine, rtol=1e-9, atol=1e-9 * float(want_weights.abs().max()))
    assert_close(got_lr, want_lr, rtol=1e-9, atol=0)
    assert_close(fs.unshard(got_params, spec), want_params, rtol=1e-9, atol=1e-11)


@seldom
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{}, {"segments": "log"}], ids=["sqrt", "log"])
def test_on_one_rank(options: dict[str, Any]) -> None:
    check(0, {"shard": 1}, fs.P("shard"), options)


@seldom
@pytest.mark.timeout(300)
@pytest.mark.parametrize("p", [fs.P("shard"), fs.P()], ids=str)
def test_on_two_ranks(gloo2: Pool, p: fs.P) -> None:
    gloo2.run(check, {"shard": 2}, p, {})


@seldom
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sizes", "p"),
    [({"shard": 4}, fs.P("shard")), ({"replicate": 2, "shard": 2}, fs.P("shard")), ({"shard": 4}, fs.P())],
    ids=["FSDP", "HSDP", "P()"],
)
def test_on_four_ranks(gloo4: Pool, sizes: dict[str, int], p: fs.P) -> None:
    gloo4.run(check, sizes, p, {})
