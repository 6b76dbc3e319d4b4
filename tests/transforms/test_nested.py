"""Stacks of transforms, and what autograd keeps of a call for them.

On real ranks each backward gathers a saved weight again: exact, and no unit stays. torch.func.grad holds no more than plain
autograd, and nobody misses what it does not keep.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it in its first operator under a mode, and that import holds frames, and their tensors
import torch.autograd.forward_ad as forward_ad
from collective_log import world
from depth import at_most, each, every, mark_seldom
from models import autograd_function, module_class, refused
from parity import average_gradients, dot, leaves_of, mean_square, numbers, plain_grad, squared_loss
from parity import squares as total
from ranks import real_ranks
from test_memory import Alive, Curved, Peak, no_collector
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.testing import assert_close

import funshard as fs
from funshard import P, _torch

Tree = Mapping[str, Tensor]
Loss = Callable[[Any], Tensor]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Mixer(nn.Module):
    """Weights that are saved as they are, transposed, as slices, twice, and in another module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 2), nn.Linear(width + 2, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)) @ self.down.weight.t()
        return x * self.scale + self.down(self.up(h)) * self.scale[:1] + h @ self.up.weight[:-2].sin()


def pulled(f: Loss, p: Tree) -> Tree:
    """A gradient by a pullback that is called when its transform has ended."""
    value, pull = vjp(f, p)
    return pull(torch.full_like(value, 2))[0]


def pushed(f: Callable[[Tree], Any], p: Tree, v: Tree) -> Any:
    return jvp(f, (p,), (v,))[1]


def both(f: Loss, p: Tree) -> Loss:
    return lambda q: f(q) + f({key: p[key] * t for key, t in q.items()})


STACKS: dict[str, Callable[[Loss, Tree, Tree], Tree]] = {
    "grad of grad": lambda f, p, v: grad(lambda p: total(grad(f)(p)))(p),
    "grad of grad . v": lambda f, p, v: grad(lambda p: dot(grad(f)(p), v))(p),
    "fs.grad of grad": lambda f, p, v: fs.grad(lambda p: total(grad(f)(p)))(p),
    "autograd of grad": lambda f, p, v: plain_grad(lambda p: total(grad(f)(p)))(p),
    "grad of grad of grad": lambda f, p, v: grad(lambda p: dot(grad(lambda p: total(grad(f)(p)))(p), v))(p),
    "jvp of grad": lambda f, p, v: pushed(grad(f), p, v),
    "grad of jvp": lambda f, p, v: grad(lambda p: pushed(f, p, v))(p),
    "jvp of jvp of grad": lambda f, p, v: pushed(lambda p: pushed(grad(f), p, v), p, v),
    "grad of jvp of grad": lambda f, p, v: grad(lambda p: total(pushed(grad(f), p, v)))(p),
    "grad of a pullback": lambda f, p, v: grad(lambda p: total(pulled(f, p)))(p),
    "autograd of a pullback": lambda f, p, v: plain_grad(lambda p: total(pulled(f, p)))(p),
    "jvp of a pullback": lambda f, p, v: pushed(lambda p: pulled(f, p), p, v),
    "pulled back after all": lambda f, p, v: vjp(lambda p: pulled(f, p), p)[1](dict(v))[0],
    "two calls in one": lambda f, p, v: grad(lambda p: total(grad(both(f, p))(p)))(p),
}


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x - x / 2


SENT = fs.Precision(codec=fs.Codec(halves, torch.add))
USUAL = ["grad of grad", "fs.grad of grad", "autograd of grad", "grad of grad of grad", "jvp of grad", "grad of jvp"]
USUAL += ["grad of a pullback", "two calls in one"]
TWICE = ["grad of grad", "fs.grad of grad", "autograd of grad", "grad of a pullback", "pulled back after all"]
STAYS = {**dict.fromkeys(TWICE, 3), "jvp of grad": 6, "jvp of jvp of grad": 9}
"""Units that are alive at most."""


@at_most(3)
@each
@pytest.mark.parametrize("p", [P("shard"), P("shard", precision=SENT)], ids=["plain", "codec"])
@pytest.mark.parametrize("name", mark_seldom(STACKS, *USUAL))
@real_ranks(2)
def test_every_stack_is_exact(rank: int, name: str, p: P) -> None:
    """Beside the same stack on full parameters and the mean of the ranks' losses, and with weights saved in every way."""
    torch.manual_seed(0)
    parts = [Mixer(4) for _ in range(3)]
    parts[1].down.weight = parts[0].down.weight
    model = nn.Sequential(nn.Linear(3, 4), *parts, parts[0], nn.Linear(4, 2)).double()
    full = {key: t.detach() for key, t in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    direction = {key: torch.randn(t.shape, dtype=t.dtype, generator=generator) for key, t in full.items()}
    xs = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
    spec = fs.by_type(Mixer, p=p)(model).bound

    loss = squared_loss(model, spec, xs[rank])

    def mean(params: Tree) -> Tensor:  # of a copy: torch 2.13 leaves its tensors in a module that is registered twice
        outs = (torch.func.functional_call(copy.deepcopy(model), dict(params), (x,)) for x in xs)
        return torch.stack([y.square().mean() for y in outs]).mean()

    got = STACKS[name](loss, fs.shard(full, spec), fs.shard(direction, spec))
    for key, t in fs.shard(STACKS[name](mean, full, direction), spec).items():
        assert t.abs().sum() > 0
        assert_close(got[key], t, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def held(name: str, blocks: int) -> tuple[float, int]:
    """Gathered units alive at most, and how many gathers."""
    with world(4):
        model = nn.Sequential(*[Curved(5) for _ in range(blocks)])
        spec = fs.by_path({"*": P("shard")})(model).bound
        params = fs.shard(model, spec)
        v = {key: torch.ones_like(p) for key, p in params.items()}
        x = torch.ones(4, 5, dtype=torch.float64)
        with no_collector(), Alive() as alive:
            STACKS[name](lambda p: fs.functional_call(model, p, (x,), spec=spec).square().sum(), params, v)
            assert alive.now() == []
        return alive.peak / spec.padded_numel(spec.by_key["0"]), len(alive.gathered)


@pytest.mark.parametrize("name", mark_seldom(STAYS, *TWICE[:2], "jvp of grad"))
def test_no_unit_stays(name: str) -> None:
    """As many at 8 blocks as at 4: one that runs and those that were gathered last, with tangents two or three times that."""
    few, many = held(name, 4), held(name, 8)
    assert few[0] == many[0] == STAYS[name]
    if name == "fs.grad of grad":  # less than a gather for each unit in each of three passes, and one for its cotangent
        assert many[1] - few[1] == 4 * 5


def test_weights_of_every_level() -> None:
    """What nested.py stands on: a tensor of a level below, wrapped for one above, keeps its graph and its tangent there."""

    def inner(y: Tensor, z: Tensor) -> Tensor:  # at level 2
        with _torch.at_level(1):
            below = _torch.unwrap_to_level(y, 1) * 3
        assert _torch.level_of(below) == 1
        again = _torch.wrap_at_level(below, 2)
        assert (_torch.level_of(again), _torch.current_level()) == (2, 2)
        return again * z

    def outer(y: Tensor) -> Tensor:  # at level 1
        return grad(lambda z: inner(y, z))(torch.ones(()))  # 3 y

    assert grad(outer)(torch.ones(())) == 3
    assert jvp(outer, (torch.ones(()),), (torch.full((), 2.0),))[1] == 6
    assert grad(lambda y: _torch.wrap_for_ended_level(y * 3) * 2)(torch.ones(())) == 6


# --- what autograd keeps ---
ROWS, WIDTH = 64, 5
ACTIVATION = ROWS * WIDTH * 8
PS = [P("shard"), P("shard", reshard=False), P("shard", remat=True), P()]


def held_bytes(
    transform: Callable[[Loss], Callable[[Any], Any]], blocks: int, call: Callable[..., Tensor] | None = None
) -> float:
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


@pytest.mark.parametrize("blocks", mark_seldom([4, 8], 4))
def test_torch_func_grad_holds_what_autograd_does(blocks: int) -> None:
    """Torch's own, of the plain model, holds twice that: all that its backward saves for a derivative that nobody takes."""
    assert held_bytes(grad, blocks) == held_bytes(fs.grad, blocks)
    assert held_bytes(grad, 8, functional_call) > 2 * held_bytes(fs.grad, 8)
    twice = [held_bytes(lambda f: outer(lambda p: total(grad(f)(p))), 8) for outer in (grad, fs.grad)]  # of a gradient, too
    assert twice[0] <= 1.02 * twice[1]


# --- nobody misses it ---
def wave(x: Tensor) -> Tensor:
    return torch.sin(torch.tanh(x) * 2)


@torch.enable_grad()
def by_running_again(grad: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(wave(x), x, grad, create_graph=True)[0]


Wave = autograd_function(wave, by_running_again)
ByItself = module_class(
    "ByItself", lambda: {"inner": nn.Linear(WIDTH, WIDTH, dtype=torch.float64)}, lambda self, x: Wave.apply(self.inner(x))
)


def setting(rank: int, block: Callable[[], nn.Module], p: P) -> tuple[nn.Module, fs.PartitionSpec, fs.Params, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(3)])
    spec = fs.by_path({"*": p})(model).bound
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return model, spec, fs.shard(model, spec), x


@at_most(1)
@every(p=mark_seldom(PS, P("shard"), P("shard", remat=True)))
@real_ranks(2)
def test_a_backward_inside_of_torch_func_grad(rank: int, p: P) -> None:
    """torch.autograd.grad inside of the function can be differentiated: only the transform's own, the last, keeps less."""
    model, spec, params, x = setting(rank, functools.partial(Curved, WIDTH), p)
    loss = squared_loss(model, spec, x)

    def by_autograd(p: fs.Params) -> Tensor:
        return total(dict(enumerate(torch.autograd.grad(loss(p), list(p.values()), create_graph=True))))

    def twice_by_autograd(p: fs.Params) -> Tensor:
        value = loss(p)
        one = torch.autograd.grad(value, list(p.values()), retain_graph=True)
        return total(dict(enumerate(one))) + by_autograd(p)

    expected = grad(lambda p: total(grad(loss)(p)))(params)
    for inner in (by_autograd, twice_by_autograd):
        assert_close(grad(inner)(params), expected, **EXACT)

    def freed(p: fs.Params) -> Tensor:
        value = torch.autograd.grad(loss(p), list(p.values()), create_graph=True, retain_graph=False)
        return total(dict(enumerate(value)))

    refused(RuntimeError, "expected retain_graph=True, or", lambda: grad(freed)(params))


@real_ranks(2)
def test_a_function_whose_backward_differentiates(rank: int) -> None:
    """A node that Python defines keeps what it saves: it may come back to it before the last backward is over."""
    model, spec, params, x = setting(rank, ByItself, P("shard"))
    loss = squared_loss(model, spec, x)
    expected = fs.grad(loss)(params)
    assert all(g.abs().sum() > 0 for g in expected.values())
    assert_close(grad(loss)(params), expected)


@pytest.mark.parametrize("p", PS, ids=str)
@real_ranks(2)
def test_what_is_constant_in_a_transform_may_be_differentiated_outside(rank: int, p: P) -> None:
    """The last backward of a torch.func.grad over the shards, as a function of its input and of a factor of the loss."""
    model, spec, params, x = setting(rank, functools.partial(Curved, WIDTH), p)
    _, _, _, others = setting(1 - rank, functools.partial(Curved, WIDTH), p)
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
        return total(grad(lambda p: factor * fs.functional_call(model, p, (x,), spec=spec).square().mean())(params))

    assert_close(torch.autograd.grad(sharded(*inputs), inputs), expected, **EXACT)
    got = torch.autograd.grad(sharded(x, inputs[1]), inputs[1:])  # where no tensor in the call shows it
    assert_close(got, expected[1:], **EXACT)


@at_most(1)
@pytest.mark.parametrize("p", PS, ids=str)
@real_ranks(2)
def test_a_pullback_is_differentiated_by_its_cotangent(rank: int, p: P) -> None:
    """What torch.func.vjp returned is a linear function like any other, also where it gathers again; as is a plain backward."""
    model, spec, params, x = setting(rank, functools.partial(Curved, WIDTH), p)
    _, _, _, others = setting(1 - rank, functools.partial(Curved, WIDTH), p)
    full = {name: p.detach() for name, p in model.named_parameters()}
    cotangents = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    slopes = [vjp(lambda p, x=x: functional_call(model, p, (x,)), full)[1](cotangents)[0] for x in (x, others)]
    mean = {name: (slopes[0][name] + slopes[1][name]) / 2 for name in full}
    # of the squares of the mean over ranks of J^T c: 2 J J^T c
    expected = jvp(lambda p: functional_call(model, p, (x,)), (full,), ({name: 2 * g for name, g in mean.items()},))[1]

    _, pull = vjp(lambda p: fs.functional_call(model, p, (x,), spec=spec), params)
    leaf = cotangents.clone().requires_grad_()
    got = [
        grad(lambda c: total(pull(c)[0]))(cotangents),
        torch.autograd.grad(total(pull(leaf)[0]), leaf)[0],
        fs.grad(lambda c: total(pull(c)[0]))(cotangents),
    ]
    for g in got:
        assert_close(g, expected, **EXACT)
    own, pushed = jvp(lambda c: total(pull(c)[0]), (cotangents,), (cotangents,))
    assert_close(pushed, 2 * own)
    leaves = {key: shard.detach().requires_grad_() for key, shard in params.items()}  # forward mode of a plain backward
    call = functools.partial(fs.functional_call, model, leaves, (x,), spec=spec)
    expected = torch.autograd.grad(call(), list(leaves.values()), cotangents)
    y = call()
    with forward_ad.dual_level():
        got = torch.autograd.grad(y, list(leaves.values()), forward_ad.make_dual(cotangents, 3 * cotangents))
        assert_close([forward_ad.unpack_dual(g).tangent for g in got], [3 * e for e in expected])


# --- plain autograd: two losses, in-place changes and autocast ---
def in_the_middle(self: Any, x: Tensor, clobber: bool = False) -> Tensor:
    h = torch.tanh(self.a(x))
    out = self.b(h) * self.scale
    if clobber:
        h.mul_(2)
    return out


Middle = module_class(
    "Middle", lambda: {"a": nn.Linear(3, 5), "b": nn.Linear(5, 2), "scale": nn.Parameter(torch.randn(2))}, in_the_middle
)
"""Two units around an activation, and a parameter of the root."""


def leaves_setting(model: nn.Module, p: fs.P | None = None) -> tuple[fs.PartitionSpec, fs.Params]:
    spec = fs.policies.always(p or fs.P("shard"))(model).bound
    return spec, leaves_of(fs.shard(model, spec))


def mean(
    x: Tensor, model: nn.Module, spec: fs.PartitionSpec, loss: Any = mean_square, call: Any = lambda model, x: model(x)
) -> fs.Params:
    """This rank's shards of the mean over ranks of plain gradients."""
    plain = copy.deepcopy(model)
    loss(call(plain, x)).backward()
    return fs.shard(average_gradients(plain), spec)


@real_ranks(2)
def test_two_losses_and_a_changed_activation(rank: int) -> None:
    """Two losses of one forward, one backward each: their gradients add up, and each alone is right. An activation that is
    changed before is an error as in plain autograd, whose own check the saved-tensor hooks switch off."""
    model, x = Middle().double(), numbers(rank, 0, 3)
    spec, params = leaves_setting(model)
    out = fs.functional_call(model, params, x, spec=spec)
    other = lambda out: out.exp().sum()  # noqa: E731
    each = [mean(x, model, spec, loss) for loss in (mean_square, other)]
    alone = torch.autograd.grad(other(out), list(params.values()), retain_graph=True)
    assert_close(dict(zip(params, alone, strict=True)), each[1], **EXACT)
    mean_square(out).backward(retain_graph=True)
    other(out).backward()
    assert_close({k: p.grad for k, p in params.items()}, {k: each[0][k] + each[1][k] for k in params}, **EXACT)
    refused(RuntimeError, "modified by an inplace operation", lambda: mean_square(model(x, True)).backward())
    loss = mean_square(fs.functional_call(model, params, (x, True), spec=spec))
    refused(RuntimeError, r"tensor of shape \[4, 5\] .* was modified in place", lambda: loss.backward())


@real_ranks(2)
def test_shard_changed_before_backward(rank: int) -> None:
    """An optimizer step between forward and backward: an error that names the unit, or the weights that forward used."""
    model, x = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))), numbers(rank, 0, 3)
    for changed in ("0", "1", "2"):
        spec, params = leaves_setting(model)
        loss = mean_square(fs.functional_call(model, params, x, spec=spec))
        with torch.no_grad():
            params[changed].add_(1)
        if changed == "1":  # backward does not read the weight of the first layer, and has kept that of the last
            words = r"shard of unit '1' was modified in place.*expected version \d+, got"
            refused(RuntimeError, words, lambda: loss.backward())
        else:
            loss.backward()
            assert_close({k: p.grad for k, p in params.items()}, mean(x, model, spec), **EXACT)


@pytest.mark.parametrize("p", [fs.P("shard"), fs.P("shard", reshard=False)], ids=str)
@real_ranks(2)
def test_autocast(rank: int, p: fs.P) -> None:
    """Under autocast to bfloat16: the outputs bit by bit, and the mean of the gradients, of plain autocast."""
    model, x = Middle(), numbers(rank, 0, 3).float()
    spec, params = leaves_setting(model, p)

    def cast(call: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    out, want = cast(lambda x: fs.functional_call(model, params, x, spec=spec), x), cast(model, x)
    assert out.dtype == want.dtype
    assert torch.equal(out, want)
    mean_square(out).backward()
    for k, g in mean(x, model, spec, call=cast).items():
        assert params[k].grad.dtype == torch.float32
        assert_close(params[k].grad, g)
