"""What autograd keeps of a call: torch.func.grad holds no more than plain autograd, and nobody misses what it does not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from collective_log import world
from depth import at_most, mark_seldom
from ranks import real_ranks
from test_memory import Curved, Peak, no_collector
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.testing import assert_close

import funshard as fs
from funshard import P

Loss = Callable[[Any], Tensor]


ROWS, WIDTH = 64, 5
ACTIVATION = ROWS * WIDTH * 8


def held(transform: Callable[[Loss], Callable[[Any], Any]], blocks: int, call: Callable[..., Tensor] | None = None) -> float:
    """The peak of a step, in activations."""
    with world(4):
        model = nn.Sequential(*[Curved(WIDTH) for _ in range(blocks)])
        spec = fs.by_path({"*": P("shard")})(model).bound
        params = fs.shard(model, spec) if call is None else {name: p.detach() for name, p in model.named_parameters()}
        x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
        call = call or (lambda *args: fs.functional_call(*args, spec=spec))
        with no_collector(), Peak() as all_of_it:
            transform(lambda p: call(model, p, (x,)).square().mean())(params)
        return all_of_it.bytes / ACTIVATION


def squares(tree: Any) -> Tensor:
    return sum(((g**2).sum() for g in tree.values()), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("blocks", mark_seldom([4, 8], 4))
def test_torch_func_grad_holds_what_autograd_does(blocks: int) -> None:
    """Torch's own, of the plain model, holds twice that: all that its backward saves for a derivative that nobody takes."""
    assert held(grad, blocks) == held(fs.grad, blocks)
    assert held(grad, 8, functional_call) > 2 * held(fs.grad, 8)


def test_grad_of_grad_holds_what_autograd_of_it_does() -> None:
    def twice(outer: Callable[[Loss], Any], f: Loss) -> Any:
        return outer(lambda p: squares(grad(f)(p)))

    assert held(lambda f: twice(grad, f), 8) <= 1.02 * held(lambda f: twice(fs.grad, f), 8)


# --- nobody misses it ---


def wave(x: Tensor) -> Tensor:
    return torch.sin(torch.tanh(x) * 2)


class Wave(torch.autograd.Function):
    """Backward runs it again and differentiates that."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return wave(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            return torch.autograd.grad(wave(x), x, g, create_graph=True)[0]


class ByItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Wave.apply(self.inner(x))


def setting(rank: int, block: Callable[[], nn.Module], p: P) -> tuple[nn.Module, fs.PartitionSpec, fs.Params, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(3)])
    spec = fs.by_path({"*": p})(model).bound
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return model, spec, fs.shard(model, spec), x


def curved() -> nn.Module:
    return Curved(WIDTH)


@at_most(1)
@pytest.mark.parametrize(
    "p",
    mark_seldom([P("shard"), P("shard", reshard=False), P("shard", remat=True), P()], P("shard"), P("shard", remat=True)),
    ids=str,
)
@real_ranks(2)
def test_a_backward_inside_of_torch_func_grad(rank: int, p: P) -> None:
    """torch.autograd.grad inside of the function can be differentiated: only the transform's own, the last, keeps less."""
    model, spec, params, x = setting(rank, curved, p)

    def loss(p: fs.Params) -> Tensor:
        return fs.functional_call(model, p, (x,), spec=spec).square().mean()

    def by_autograd(p: fs.Params) -> Tensor:
        return squares(dict(enumerate(torch.autograd.grad(loss(p), list(p.values()), create_graph=True))))

    def twice_by_autograd(p: fs.Params) -> Tensor:
        value = loss(p)
        one = torch.autograd.grad(value, list(p.values()), retain_graph=True)
        return squares(dict(enumerate(one))) + by_autograd(p)

    expected = grad(lambda p: squares(grad(loss)(p)))(params)
    for inner in (by_autograd, twice_by_autograd):
        for key, g in grad(inner)(params).items():
            assert_close(g, expected[key], rtol=1e-10, atol=1e-12)

    def freed(p: fs.Params) -> Tensor:
        value = torch.autograd.grad(loss(p), list(p.values()), create_graph=True, retain_graph=False)
        return squares(dict(enumerate(value)))

    with pytest.raises(RuntimeError, match="expected retain_graph=True, or"):
        grad(freed)(params)


@real_ranks(2)
def test_a_function_whose_backward_differentiates(rank: int) -> None:
    """A node that Python defines keeps what it saves: it may come back to it before the last backward is over."""
    model, spec, params, x = setting(rank, ByItself, P("shard"))

    def loss(p: fs.Params) -> Tensor:
        return fs.functional_call(model, p, (x,), spec=spec).square().mean()

    expected = fs.grad(loss)(params)
    assert all(g.abs().sum() > 0 for g in expected.values())
    for key, g in grad(loss)(params).items():
        assert_close(g, expected[key])


@pytest.mark.parametrize("p", [P("shard"), P("shard", reshard=False), P("shard", remat=True), P()], ids=str)
@real_ranks(2)
def test_what_is_constant_in_a_transform_may_be_differentiated_outside(rank: int, p: P) -> None:
    """The last backward of a torch.func.grad over the shards, as a function of its input and of a factor of the loss."""
    model, spec, params, x = setting(rank, curved, p)
    _, _, _, others = setting(1 - rank, curved, p)
    full = {name: p.detach() for name, p in model.named_parameters()}

    def plain(x: Tensor, factor: Tensor) -> fs.Params:
        return grad(lambda p: factor * functional_call(model, p, (x,)).square().mean())(full)

    factor = torch.tensor(1.5, dtype=torch.float64)
    slopes = [plain(x, factor) for x in (x, others)]
    twice = {name: slopes[0][name] + slopes[1][name] for name in full}  # the derivative of the squares of their mean
    inputs = x.clone().requires_grad_(), factor.clone().requires_grad_()
    along = sum((g * twice[name]).sum() for name, g in plain(*inputs).items())
    expected = torch.autograd.grad(along, inputs)

    def sharded(x: Tensor, factor: Tensor) -> Tensor:
        return squares(grad(lambda p: factor * fs.functional_call(model, p, (x,), spec=spec).square().mean())(params))

    assert_close(torch.autograd.grad(sharded(*inputs), inputs), expected, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(sharded(x, inputs[1]), inputs[1:])  # where no tensor in the call shows it
    assert_close(got, expected[1:], rtol=1e-10, atol=1e-12)


@at_most(1)
@pytest.mark.parametrize("p", [P("shard"), P("shard", reshard=False), P("shard", remat=True), P()], ids=str)
@real_ranks(2)
def test_a_pullback_is_differentiated_by_its_cotangent(rank: int, p: P) -> None:
    """What torch.func.vjp returned is a linear function like any other, also where it gathers again."""
    model, spec, params, x = setting(rank, curved, p)
    _, _, _, others = setting(1 - rank, curved, p)
    full = {name: p.detach() for name, p in model.named_parameters()}
    cotangents = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    slopes = [vjp(lambda p, x=x: functional_call(model, p, (x,)), full)[1](cotangents)[0] for x in (x, others)]
    mean = {name: (slopes[0][name] + slopes[1][name]) / 2 for name in full}
    # of the squares of the mean over ranks of J^T c: 2 J J^T c
    expected = jvp(lambda p: functional_call(model, p, (x,)), (full,), ({name: 2 * g for name, g in mean.items()},))[1]

    _, pull = vjp(lambda p: fs.functional_call(model, p, (x,), spec=spec), params)
    leaf = cotangents.clone().requires_grad_()
    got = [
        grad(lambda c: squares(pull(c)[0]))(cotangents),
        torch.autograd.grad(squares(pull(leaf)[0]), leaf)[0],
        fs.grad(lambda c: squares(pull(c)[0]))(cotangents),
    ]
    for g in got:
        assert_close(g, expected, rtol=1e-10, atol=1e-12)
    own, pushed = jvp(lambda c: squares(pull(c)[0]), (cotangents,), (cotangents,))
    assert_close(pushed, 2 * own)


@pytest.mark.parametrize("p", [P("shard"), P("shard", reshard=False), P("shard", remat=True), P()], ids=str)
@real_ranks(2)
def test_a_cotangent_with_a_tangent(rank: int, p: P) -> None:
    """Forward-mode AD of a plain backward goes through its reductions."""
    model, spec, params, x = setting(rank, curved, p)
    cotangents = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    leaves = {key: shard.detach().requires_grad_() for key, shard in params.items()}

    def call() -> Tensor:
        return fs.functional_call(model, leaves, (x,), spec=spec)

    expected = torch.autograd.grad(call(), list(leaves.values()), cotangents)
    y = call()
    with forward_ad.dual_level():
        got = torch.autograd.grad(y, list(leaves.values()), forward_ad.make_dual(cotangents, 3 * cotangents))
        assert_close([forward_ad.unpack_dual(g).tangent for g in got], [3 * e for e in expected])
