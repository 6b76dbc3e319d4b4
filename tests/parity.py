"""A sharded training run against the plain one whose gradients are averaged by hand, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from depth import depth
from models import unchanged
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs

Call = Callable[..., Any]
Loss = Callable[[Call, Any], Tensor]
"""From the model as a function (with an optional ``method=``) and a batch to this rank's loss."""


def leaves_of(tree: Any) -> Any:
    """The tensors of a tree, or one, as leaves of a new graph."""
    return pytree.tree_map(lambda t: t.detach().clone().requires_grad_(), tree)


def gradient(value: Tensor, leaves: Any, **options: bool) -> Any:
    """Of a value by a tree of leaves, zeros by those that it does not depend on."""
    flat, structure = pytree.tree_flatten(leaves)
    grads = torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True, **options)
    return pytree.tree_unflatten(grads, structure)


def plain_grad(f: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    """The gradient by a tree, of plain autograd."""
    return lambda tree: gradient(f(leaves := leaves_of(tree)), leaves)


def squares(tree: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(x.double() ** 2).sum() for x in tree.values()]).sum()


def double_grad(f: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    """The gradient of the squares of the gradient, of plain autograd."""

    def run(tree: Any) -> Any:
        leaves = leaves_of(tree)
        return gradient(squares(gradient(f(leaves), leaves, create_graph=True)), leaves)

    return run


DERIVATIVES: dict[str, Callable[[Callable[[Any], Tensor]], Callable[[Any], Any]]] = {
    "fs.grad": fs.grad,
    "torch.func.grad": torch.func.grad,
    "autograd": plain_grad,
    "vjp": lambda f: lambda p: (lambda y, pull: pull(torch.ones_like(y))[0])(*torch.func.vjp(f, p)),
    "jvp": lambda f: lambda p: torch.func.jvp(f, (p,), (p,))[1],
    "hvp": lambda f: lambda p: fs.hvp(f, p, {key: x.cos() for key, x in p.items()}),
    "grad of grad": lambda f: torch.func.grad(lambda p: squares(torch.func.grad(f)(p))),
    "double backward": double_grad,
    "no_grad": lambda f: torch.no_grad()(f),
}
"""Derivatives of a loss by a dict of tensors."""


def _by_backward(f: Callable[[fs.Params], Tensor]) -> Callable[[fs.Params], tuple[fs.Params, Tensor]]:
    def run(params: fs.Params) -> tuple[fs.Params, Tensor]:
        leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
        value = f(leaves)
        value.backward()
        return {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in leaves.items()}, value.detach()

    return run


def _by_autograd(f: Callable[[fs.Params], Tensor]) -> Callable[[fs.Params], tuple[fs.Params, Tensor]]:
    def run(params: fs.Params) -> tuple[fs.Params, Tensor]:
        value = f(leaves := leaves_of(params))
        return gradient(value, leaves), value.detach()

    return run


WAYS: dict[str, Callable[..., Any]] = {
    "fs": fs.grad_and_value,
    "torch.func": torch.func.grad_and_value,
    "backward": _by_backward,
    "autograd.grad": _by_autograd,
}
"""The ways to differentiate a step: each gives ``(grads, value)``."""

MAIN_WAYS = ["fs", "torch.func", "backward"]
GRADIENTS: dict[str, Callable[..., Any]] = {way: lambda f, way=way: lambda params: WAYS[way](f)(params)[0] for way in MAIN_WAYS}
"""The same without the value."""


def along(params: fs.Params) -> fs.Params:
    """A direction for them."""
    return {key: p.detach().cos() for key, p in params.items()}


HIGHER: dict[str, Callable[..., Any]] = {
    "hvp": lambda f: lambda params: fs.hvp(f, params, along(params)),
    "jvp of grad": lambda f: lambda params: torch.func.jvp(torch.func.grad(f), (params,), (along(params),))[1],
    "grad of grad": DERIVATIVES["grad of grad"],
    "double backward": double_grad,
}
"""Derivatives of the second order: products with the Hessian along a direction, and with the gradient."""


def strategies(*names: str, **more: fs.P) -> dict[str, fs.P]:
    """The options of a unit that almost every suite tries, by their names, and more of a suite's own."""
    usual = {
        "shard": fs.P("shard"),
        "keep": fs.P("shard", reshard=False),
        "replicated": fs.P(),
        "remat": fs.P("shard", remat=True),
    }
    return {name: usual[name] for name in names} | more


STRATEGIES = strategies("shard", "keep", "replicated")
"""FSDP1's FULL_SHARD, SHARD_GRAD_OP and NO_SHARD."""


def numbers(rank: int, step: int, width: int = 5) -> Tensor:
    """A batch that is another one on each rank and at each step."""
    return torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(43 + rank + 1000 * step))


def tokens(rank: int, step: int, vocabulary: int = 19) -> Tensor:
    return torch.randint(vocabulary, (2, 7), generator=torch.Generator().manual_seed(43 + rank + 1000 * step))


def squared(call: Call, x: Tensor) -> Tensor:
    return (call(x) ** 2).mean()


def next_token(call: Call, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(call(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain_call(model: nn.Module) -> Call:
    return lambda *args, method=None, **kwargs: getattr(model, method or "__call__")(*args, **kwargs)


def sharded_call(model: nn.Module, params: Mapping[str, Tensor], spec: fs.PartitionSpec) -> Call:
    return lambda *args, method=None, **kwargs: fs.functional_call(model, params, args, kwargs, spec=spec, method=method)


def shards_of(policy: fs.Policy, model: nn.Module, mesh: Any = None) -> tuple[fs.PartitionSpec, fs.Params]:
    """The model's spec, bound to a mesh or to all ranks, and its shards."""
    spec = policy(model).bound if mesh is None else policy(model).on(mesh)
    return spec, fs.shard(model, spec)


def squared_loss(model: nn.Module, spec: fs.PartitionSpec, x: Tensor) -> Callable[[fs.Params], Tensor]:
    return lambda params: squared(sharded_call(model, params, spec), x)


def average_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The mean over all ranks of every gradient, zeros where there is none, in place and by name."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_with(grads: fs.Params, params: fs.Params, *optimizers: torch.optim.Optimizer) -> None:
    """Gives these parameters their gradients, and each optimizer a step."""
    for key, p in params.items():
        p.grad = grads[key]
    for optimizer in optimizers:
        optimizer.step()


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    assert got.keys() == expected.keys(), f"{what}: expected {sorted(expected)}, got {sorted(got)}"
    for key in got:
        assert_close(got[key], expected[key], msg=lambda m, key=key: f"{what} '{key}': {m}")


def check_parity(
    rank: int,
    model: nn.Module,
    spec: fs.PartitionSpec,
    batch: Callable[[int, int], Any] = numbers,
    loss: Loss = squared,
    *,
    steps: int = depth(3, 5),
    way: str = "fs",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **options: Any,
) -> dict[str, Tensor]:
    """Losses, gradients and parameters agree with the averaged plain run at every step; the trained full parameters.

    Elementwise optimizers act on shards as they are. What the spec says is frozen is not given to either optimizer.
    """
    options = {"lr": 1e-2, **options}
    spec = spec.bound
    reference = copy.deepcopy(model)
    trainable, frozen = fs.partition(fs.shard(model, spec), spec)
    ours = optimizer(trainable.values(), **options)
    theirs = optimizer([p for p in reference.parameters() if p.requires_grad], **options)
    with unchanged(model):
        for step in range(steps):
            x = batch(rank, step)
            theirs.zero_grad(set_to_none=step % 2 == 0)
            expected = loss(plain_call(reference), x)
            expected.backward()
            mean = average_gradients(reference)
            f = lambda p: loss(sharded_call(model, fs.combine(p, frozen), spec), x)  # noqa: E731
            grads, value = WAYS[way](f)(trainable)
            assert_close(value, expected.detach(), msg=lambda m, step=step: f"loss of step {step}: {m}")
            same(grads, fs.partition(fs.shard(mean, spec, rank=rank), spec)[0], f"gradient at step {step}")
            step_with(grads, trainable, ours, theirs)
            full = {name: p.detach() for name, p in reference.named_parameters()}
            same(fs.combine(trainable, frozen), fs.shard(full, spec, rank=rank), f"parameters after step {step}")
    return fs.unshard(fs.combine(trainable, frozen), spec)


def square_sum(y: Tensor) -> Tensor:
    return y.square().sum()


def loss_of(
    model: Any, spec: fs.PartitionSpec, *args: Any, of: Any = square_sum, frozen: Any = None, then: Any = None, **options: Any
) -> Callable[[fs.Params], Tensor]:
    """The loss of parameters, those that are trained: what ``of`` makes of the model's result; ``then`` is called after it."""

    def loss(params: fs.Params) -> Tensor:
        params = fs.combine(params, frozen) if frozen else params
        value = of(fs.functional_call(model, params, args, spec=spec, **options))
        if then:
            then()
        return value

    return loss


def gradient_of(
    policy: fs.Policy, model: nn.Module, *args: Any, way: Callable[..., Any] = fs.grad, mesh: Any = None, **options: Any
) -> Any:
    """The gradient of `loss_of` by the model's own shards."""
    spec, params = shards_of(policy, model, mesh)
    return way(loss_of(model, spec, *args, **options))(params)


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(x * b[key]).sum() for key, x in a.items()]).sum()


def policies(mixed: Mapping[str, fs.P], *names: str) -> dict[str, fs.Policy]:
    """The policies that almost every suite of optimizers tries, by their names, and one of the suite's own, by paths."""
    usual = {"sharded": fs.policies.always(), "whole": fs.policies.whole(), "replicated": fs.policies.whole(fs.P())}
    return {name: usual[name] for name in names} | {"mixed": fs.by_path(mixed)}


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def subtracted(
    loss: Callable[..., Tensor], params: fs.Params, batches: list[Tensor], spec: fs.PartitionSpec, **options: Any
) -> tuple[fs.Params, Any]:
    """What `fs.update_in_backward` with SGD of a rate of 1 subtracts: the gradient; and the norm."""
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0, donate=True)
    mine = {key: p.clone() for key, p in params.items()}
    result = fs.update_in_backward(update, loss, mine, init(mine), batches, spec=spec, **options)
    return {key: params[key] - p for key, p in result.params.items()}, result.norm


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers of a seed of their own."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same_leaves(got: object, expected: object, **close: float) -> None:
    """Of two trees; a lost backward is silently zero."""
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        assert b.abs().sum() > 0
        assert_close(a, b, **close)
