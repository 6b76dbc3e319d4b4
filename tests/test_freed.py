"""No reading of a freed buffer: whatever user code holds of a parameter past its unit keeps the values it had.

Every case runs on the two processes of the gloo2 fixture, which are children of the test run: one that crashes fails
the test with "the process died", and nothing else. The blocks are of one size, so that each buffer that is let go is
the next one's, unless something still holds it; and prefetch, which decides when that is, takes several values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from depth import at_most, mark_seldom, some
from parity import WAYS, average_gradients, numbers, same
from peer_models import MLP, Net
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import dlpack

import funshard as fs
from funshard import P

BLOCKS = 4
AHEAD = (0, 1, 2)
PLAIN = [way for way in WAYS if way != "torch.func"]  # inside a transform a parameter has no memory to point at


class Hooked(Net):
    """A Net whose forward is given when it is made: a function of the model and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Any] = Net.forward) -> None:
        super().__init__(BLOCKS)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def specs(model: nn.Module) -> Iterator[fs.PartitionSpec]:
    for p in (P("shard"), P("shard", reshard=False), P()):
        yield fs.by_type(MLP, p=p)(model).bound


def agrees(rank: int, run: Callable[[Any, Tensor], Any], loss: Callable[[Any, Tensor], Tensor], *ways: str) -> None:
    """The loss of what forward returns, and its gradients, are those of the model itself, averaged by hand."""
    model, x = Hooked(run), numbers(rank, 0)
    reference = copy.deepcopy(model)
    expected = loss(reference(x), x)
    expected.backward()
    mean = average_gradients(reference)
    for spec, way, prefetch in some(product(specs(model), ways or WAYS, AHEAD)):
        f = lambda p: loss(fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch), x)  # noqa: E731
        grads, value = WAYS[way](f)(fs.shard(model, spec))
        what = f"{spec.units[1].p} {way} prefetch={prefetch}"
        assert_close(value, expected.detach(), msg=lambda m: f"{what}: {m}")
        same(grads, fs.shard(mean, spec), what)


# --- in what forward gives back, or keeps ---
def with_parameters(model: Net, x: Tensor) -> dict[str, Tensor]:
    first, second = model.blocks[0].in_proj.weight, model.blocks[1].out_proj.weight
    return {"y": Net.forward(model, x), "weight": first, "bias": model.first.bias, "view": second[1:, ::2].t()}


def outputs_parameters(rank: int) -> None:
    def loss(out: dict[str, Tensor], x: Tensor) -> Tensor:
        return out["y"].pow(2).mean() + (out["weight"] ** 3).sum() * out["bias"].sum() + out["view"].exp().sum()

    agrees(rank, with_parameters, loss)


def with_closure(model: Net, x: Tensor) -> Callable[[Tensor], Tensor]:
    y, weight, bias = Net.forward(model, x), model.blocks[0].in_proj.weight, model.blocks[3].out_proj.bias
    return lambda x: y * bias + (x @ weight.t()).tanh() @ weight


def closure(rank: int) -> None:
    agrees(rank, with_closure, lambda after, x: after(x).pow(2).mean())


def with_stash(model: Net, x: Tensor) -> Tensor:
    x = model.first(x)
    for i, block in enumerate(model.blocks):
        x = block(x)
        if i:
            x = x + x @ model.stashed[0].t() @ model.stashed[0]
        model.stashed = [block.in_proj.weight]  # in a list: a Parameter by itself would become the plain model's
    return model.head(x)


def stash(rank: int) -> None:
    agrees(rank, with_stash, lambda y, x: y.pow(2).mean())
    model = Hooked(with_stash)
    spec = fs.by_type(MLP)(model).bound
    fs.functional_call(model, fs.shard(model, spec), (numbers(rank, 0),), spec=spec)
    assert not hasattr(model, "stashed")


def again_later(model: Net, x: Tensor) -> Tensor:
    y = Net.forward(model, x)
    for block in (model.blocks[2], model.blocks[0]):  # their units were left long ago
        y = y + torch.tanh(y @ block.in_proj.weight.t()) @ block.out_proj.weight.t()
    return y + model.blocks[1](y)


def used_again(rank: int) -> None:
    agrees(rank, again_later, lambda y, x: y.pow(2).mean())


# --- held outside ---
HOLD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "the parameter": (lambda p: p, lambda held, p: held),
    "detach": (lambda p: p.detach(), lambda held, p: held),
    "data": (lambda p: p.data, lambda held, p: held),
    "a view": (lambda p: p.detach().view(-1)[:].view(torch.int64), lambda held, p: held.view(p.dtype)),
    "untyped_storage": (
        lambda p: (p.untyped_storage(), p.storage_offset()),
        lambda held, p: p.new_empty(0).set_(held[0], held[1], p.shape),
    ),
    "numpy": (lambda p: p.detach().numpy(), lambda held, p: torch.from_numpy(held)),
    "a memoryview": (lambda p: memoryview(p.detach().view(-1).numpy()), lambda held, p: torch.frombuffer(held, dtype=p.dtype)),
    "dlpack": (lambda p: dlpack.to_dlpack(p.detach()), lambda held, p: dlpack.from_dlpack(held)),
    "an iterator": (lambda p: iter(p.detach()), lambda held, p: torch.stack(list(held))),
}
"""How to hold a parameter, and how to read it (given another tensor of its shape) later."""

ONCE = ("dlpack", "an iterator")
"""These can be read only once."""


def held(rank: int, how: str) -> None:
    model, x = Net(BLOCKS), numbers(rank, 0)
    hold, read = HOLD[how]
    kept: dict[str, Any] = {}
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, *_: object) -> None:
        for attr in ("weight", "bias"):
            name = f"{names[module]}.{attr}"
            if name not in kept:
                kept[name] = hold(getattr(module, attr))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(hook)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}

    def check(when: str) -> None:
        assert kept.keys() == expected.keys()
        for name, tensor in expected.items():
            value = read(kept[name], tensor).detach()
            assert torch.equal(value.flatten(), tensor.flatten()), (name, when)

    for spec, way, prefetch in some(product(specs(model), PLAIN, AHEAD)):
        params = fs.shard(model, spec)

        def loss(p: dict[str, Tensor]) -> Tensor:
            y = fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch)
            if how not in ONCE:
                check(f"between forward and backward: {spec.units[1].p} {way} {prefetch}")
            return y.pow(2).mean()

        WAYS[way](loss)(params)
        if how not in ONCE:
            check(f"after backward: {spec.units[1].p} {way} {prefetch}")
        fs.functional_call(model, params, (x,), spec=spec, prefetch=prefetch)
        check(f"after the next call: {spec.units[1].p} {way} {prefetch}")
        kept.clear()


# --- held by backward ---
class Product(torch.autograd.Function):
    """x @ w.t(), with the weight saved in one way or the other; backward keeps it in a list as well."""

    seen: list[Tensor] = []  # noqa: RUF012
    by_attribute = False

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w = inputs
        ctx.save_for_backward(x, *([] if Product.by_attribute else [w]))
        ctx.w = w if Product.by_attribute else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = (*ctx.saved_tensors, ctx.w)[:2]
        Product.seen.append(w)
        return grad @ w, grad.t() @ x


def by_product(model: Net, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = Product.apply(torch.tanh(Product.apply(x, block.in_proj.weight)), block.out_proj.weight)
    return model.head(x)


def gradients_are_the_callers(rank: int) -> None:
    """What a step returned, and what hooks saw in it, is not written over by the rest of it or by the next step."""
    model, x = Net(BLOCKS), numbers(rank, 0)
    seen: list[tuple[Tensor, Tensor]] = []

    def note(grad: Tensor) -> None:
        seen.append((grad, grad.clone()))

    def hook(module: nn.Module, *_: object) -> None:
        if module.weight.requires_grad:
            module.weight.register_hook(note)
            module.bias.register_hook(note)

    for block in model.blocks:
        block.in_proj.register_forward_hook(hook)
    for spec in specs(model):
        params = fs.shard(model, spec)
        for prefetch in AHEAD:
            f = lambda p, s: s * fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch).pow(2).mean()  # noqa: E731
            first = fs.grad(f)(params, 1.0)
            copies = {key: grad.clone() for key, grad in first.items()}
            fs.grad(f)(params, -3.0)
            assert all(torch.equal(first[key], copies[key]) for key in first)
            assert len(seen) == 2 * 2 * BLOCKS
            assert all(torch.equal(grad, copied) for grad, copied in seen)
            seen.clear()


def retained(rank: int) -> None:
    model, x = Net(BLOCKS), numbers(rank, 0)
    reference = copy.deepcopy(model)
    reference(x).pow(2).mean().backward()
    mean = average_gradients(reference)
    for spec in specs(model):
        for prefetch in AHEAD:
            params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
            loss = fs.functional_call(model, params, (x,), spec=spec, prefetch=prefetch).pow(2).mean()
            for last in (False, False, True):
                got = torch.autograd.grad(loss, list(params.values()), retain_graph=not last)
                same(dict(zip(params, got, strict=True)), fs.shard(mean, spec, rank=rank), f"{prefetch}")
            with pytest.raises(RuntimeError, match="a second time"):
                torch.autograd.grad(loss, list(params.values()))


def input_gradient_in_the_loss(rank: int) -> None:
    """Backward in the middle of the loss, of the input alone, and then through that."""
    model, x = Net(BLOCKS), numbers(rank, 0).requires_grad_()

    def loss(call: Callable[[Tensor], Tensor]) -> Tensor:
        y = call(x)
        (plain,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
        (slope,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        return y.pow(2).mean() + (slope**2).mean() + (plain * slope).sum()

    reference = copy.deepcopy(model)
    loss(reference).backward()
    mean = average_gradients(reference)
    for spec, way, prefetch in some(product(specs(model), PLAIN, AHEAD)):
        f = lambda p: loss(lambda x: fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch))  # noqa: E731
        same(WAYS[way](f)(fs.shard(model, spec))[0], fs.shard(mean, spec), f"{way} prefetch={prefetch}")


# --- what does not end as it should ---
class Fails(Net):
    def __init__(self) -> None:
        super().__init__(BLOCKS)
        self.at = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.at:
                raise KeyError(i)
        return self.head(x)


def failing(rank: int) -> None:
    model, x = Fails(), numbers(rank, 0)
    expected = model(x).detach()
    reference = copy.deepcopy(model)
    reference(x).pow(2).mean().backward()
    mean = average_gradients(reference)
    for spec, prefetch, at in some(product(specs(model), AHEAD, range(BLOCKS))):
        params = fs.shard(model, spec)
        f = lambda p: fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch)  # noqa: E731
        model.at = at
        with pytest.raises(KeyError) as kept:  # the traceback holds every frame, with what it had gathered
            fs.grad(lambda p: f(p).pow(2).mean())(params)
        model.at = -1
        assert torch.allclose(f(params), expected)
        same(fs.grad(lambda p: f(p).pow(2).mean())(params), fs.shard(mean, spec, rank=rank), f"{at}")
        assert kept.value.args == (at,)


def streaming(model: Net, x: Tensor) -> Iterator[Tensor]:
    for block in model.blocks:
        x = block(x)
        yield x


def generator(rank: int) -> None:
    model, x = Hooked(streaming), numbers(rank, 0)
    for spec in specs(model):
        with pytest.raises(TypeError, match="expected results, got a generator"):
            fs.functional_call(model, fs.shard(model, spec), (x,), spec=spec)


CASES: dict[str, Callable[[int], None]] = {
    case.__name__: case
    for case in (
        *(outputs_parameters, closure, stash, used_again),
        *(gradients_are_the_callers, retained, input_gradient_in_the_loss, failing, generator),
    )
}


@at_most(1)
@pytest.mark.parametrize("name", CASES)
@real_ranks(2)
def test_what_outlives_its_unit_is_right_or_an_error(rank: int, name: str) -> None:
    """Outputs, views, closures, attributes, a second use, second, repeated and partial backwards, failures, generators."""
    CASES[name](rank)


@at_most(1)
@pytest.mark.parametrize("how", mark_seldom(HOLD, "the parameter", "data", "a view", "untyped_storage", "numpy", "an iterator"))
def test_what_is_held_stays_what_it_was(gloo2: Pool, how: str) -> None:
    """Held in every way that points at its memory, while the next units are gathered, in backward and in the next call."""
    gloo2.run(held, how)


@at_most(1)
@pytest.mark.parametrize("by_attribute", [False, True])
@real_ranks(2)
def test_custom_functions_keep_their_weights(rank: int, by_attribute: bool) -> None:
    """By save_for_backward, where a note stands for the weight, and as an attribute, where the buffer itself is held."""
    Product.by_attribute = by_attribute
    agrees(rank, by_product, lambda y, x: y.pow(2).mean())
    Product.seen.clear()
    model, x = Hooked(by_product), numbers(rank, 0)
    expected = [w.detach() for block in reversed(model.blocks) for w in (block.out_proj.weight, block.in_proj.weight)]
    for spec, prefetch in some(product(specs(model), AHEAD), 1):
        f = lambda p: fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch).pow(2).mean()  # noqa: E731
        for _ in range(2):
            fs.grad(f)(fs.shard(model, spec))
        assert len(Product.seen) == 2 * len(expected)
        for got, weight in zip(Product.seen, expected * 2, strict=True):
            assert torch.equal(got, weight), prefetch  # also after all that was gathered and reduced since
        Product.seen.clear()
