"""functional_call on two real ranks, where buffers are really freed and gathered again: values, gradients, the module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import Architecture, assert_mean_gradients, unchanged
from ranks import real_ranks
from torch import Tensor, nn

import funshard as fs


def linear(n_in: int = 3, n_out: int = 3) -> nn.Linear:
    return nn.Linear(n_in, n_out).double()


class Pair(nn.Module):
    """Two linear units and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.scale = nn.Parameter(torch.randn(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale


def xs() -> Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(5)).double()


def squared(out: Tensor) -> Tensor:
    return (out**2).mean()


def right(rank: int, model: nn.Module, loss: Callable[..., Tensor] | None = None) -> None:
    """The model's gradients are the plain mean's, by several policies; ``loss(call, x)`` gets model or functional_call."""
    run = loss or (lambda call, x: squared(call(x)))
    made = Architecture(model.double(), {"x": xs()}, lambda call, batch: run(call, batch["x"]), ())
    kept = fs.P("shard", reshard=False)
    assert_mean_gradients(
        made, rank, {"always": fs.policies.always(), "whole": fs.policies.whole(), "kept": fs.policies.always(kept)}
    )


def setting(rank: int, model: nn.Module | None = None) -> tuple[nn.Module, fs.PartitionSpec, dict[str, Tensor], Tensor]:
    model = model or Pair()
    spec = fs.policies.always()(model).bound
    return model, spec, fs.shard(model, spec), xs()[rank]


@real_ranks(2)
def test_nested_units(rank: int) -> None:
    """A unit inside a unit inside a unit, each with parameters of its own used before and after the inner ones."""

    class Outer(Pair):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.inner(self.a(x) * self.scale)) * self.scale

    right(rank, Outer(Outer(Pair())))


@real_ranks(2)
def test_units_called_several_times_in_any_order(rank: int) -> None:
    """G9: each use counts, also of a module registered twice and of tied weights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.tied = Pair(), Pair(), linear()
            self.again = self.a
            self.tied.weight = self.b.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.tied(self.b(self.a(x) + self.again(x)))))

    right(rank, Model())


@real_ranks(2)
def test_units_called_conditionally_or_never(rank: int) -> None:
    """G5: zeros for a unit that does not run, and no hang."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.never = linear(), linear(), linear()

        def forward(self, x: Tensor, flag: bool = True) -> Tensor:
            return self.b(x) if flag else self.a(x)

    model = Model()
    for flag in (True, False):
        right(rank, model, lambda call, x, flag=flag: squared(call(x, flag=flag)))
    model, spec, params, x = setting(rank, model)
    for by in (fs.grad, torch.func.grad):
        grads = by(lambda p: squared(fs.functional_call(model, p, x, spec=spec)))(params)
        assert torch.equal(grads["never"], torch.zeros_like(params["never"]))


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    label: str


@real_ranks(2)
def test_arguments_and_results_of_any_kind(rank: int) -> None:
    """A lone argument, a tuple, keywords; dataclasses, NamedTuples and dicts go in and come out as they are."""

    class Model(Pair):
        def forward(self, record: Record, point: Point, *, rest: dict[str, Tensor]) -> Record:
            return Record(self.a(record.x) + self.b(point.x) * self.scale + rest["z"] + point.y, record.label)

        def split(self, x: Tensor) -> Point:
            return Point(self.a(x), self.b(x))

    def loss(call: Callable[..., Any], x: Tensor) -> Tensor:
        out = call(Record(x, "name"), Point(x, 2 * x), rest={"z": x})
        assert isinstance(out, Record)
        assert out.label == "name"
        return squared(out.x)

    right(rank, Model(), loss)
    model, spec, params, x = setting(rank, Model())
    out = fs.functional_call(model, params, x, spec=spec, method="split")
    assert isinstance(out, Point)
    assert torch.equal(out.y, model.b(x))
    assert torch.equal(fs.functional_call(model, params, (x,), spec=spec, method="split").y, out.y)


@real_ranks(2)
def test_buffers_like_torch_func(rank: int) -> None:
    """Given buffers are updated in the dict, as torch.func.functional_call does; the module's own never change."""
    model, spec, params, x = setting(rank, nn.Sequential(linear(), nn.BatchNorm1d(3).double(), linear()))
    full = {k: v.detach() for k, v in model.named_parameters()}
    ours, theirs = ({k: v.clone() for k, v in model.named_buffers()} for _ in range(2))
    given = dict(ours)
    with unchanged(model):
        out = fs.functional_call(model, params, x, spec=spec, buffers=ours)
        assert torch.equal(out, torch.func.functional_call(model, (full, theirs), x))
        with pytest.warns(
            fs._call.buffers.BufferWarning, match=r"'1\.running_mean', '1\.running_var', '1\.num_batches_tracked' in copies"
        ):
            assert torch.equal(out, fs.functional_call(model, params, x, spec=spec))
        with pytest.raises(ValueError, match=r"buffer '1\.nothing' is not in the model"):
            fs.functional_call(model, params, x, spec=spec, buffers={"1.nothing": x})
    assert all(torch.equal(ours[k], theirs[k]) and ours[k] is given[k] for k in theirs)
    assert not torch.equal(ours["1.running_mean"], model[1].running_mean)


@real_ranks(2)
def test_copies_of_modules_made_in_forward(rank: int) -> None:
    """They would hold the call's own parameters and forward: an error; a copy of the values is right."""

    class Model(Pair):
        def __init__(self, copier: Callable[[object], object]) -> None:
            super().__init__()
            self.copier, self.of_values = copier, False

        def forward(self, x: Tensor) -> Tensor:
            self.copier(nn.GELU())
            self.copier({k: v.detach() for k, v in self.a.state_dict().items()} if self.of_values else self.a)
            return super().forward(x)

    for copier in (copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        model, spec, params, x = setting(rank, Model(copier))
        with unchanged(model), pytest.raises(RuntimeError, match="module 'a' is copied or pickled in forward"):
            fs.functional_call(model, params, x, spec=spec)
        model.of_values = True
        assert torch.equal(fs.functional_call(model, params, x, spec=spec), model(x))


@real_ranks(2)
def test_users_hooks_that_read_parameters(rank: int) -> None:
    """A forward hook runs after its unit was let go; what it reads is the sharded value, gathered again if need be."""
    model = Pair()
    model.a.peer = [model.b]
    model.a.register_forward_hook(lambda module, args, out: out + module.weight.sum() + module.peer[0].bias)
    model.b.register_forward_pre_hook(lambda module, args: args[0] * module.weight[0])
    model.register_forward_hook(lambda module, args, out: out * module.a.bias)
    right(rank, model)


@real_ranks(2)
def test_calls_without_gradients(rank: int) -> None:
    """no_grad and inference_mode: the plain values, without a graph; then differentiable as ever."""
    model, spec, params, x = setting(rank)
    for context in (torch.no_grad(), torch.inference_mode()):
        with unchanged(model), context:
            out = fs.functional_call(model, {k: p.requires_grad_() for k, p in params.items()}, x, spec=spec)
            assert torch.equal(out, model(x))
            assert not out.requires_grad
    right(rank, model)


@real_ranks(2)
def test_part_of_forward_without_gradients(rank: int) -> None:
    """A unit that is first used under no_grad and then outside of it, and the other way round."""

    class Model(Pair):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = self.a(x) + self.b.weight.sum()
            return self.b(self.a(x) + shift) + self.a(shift).detach()

    right(rank, Model())


@real_ranks(2)
def test_exceptions_in_the_middle(rank: int) -> None:
    """The module is as before, and the next call is right."""

    class Model(Pair):
        def forward(self, x: Tensor, fail: bool = False) -> Tensor:
            self.stored = self.a(x)
            if fail:
                raise KeyError("from forward")
            return self.b(self.stored) * self.scale

    model, spec, params, x = setting(rank, Model())
    for by in (fs.grad, torch.func.grad):
        with unchanged(model), pytest.raises(KeyError, match="from forward"):
            by(lambda p: squared(fs.functional_call(model, p, (x, True), spec=spec)))(params)
    right(rank, model)


@real_ranks(2)
def test_modules_that_call_themselves(rank: int) -> None:
    """Recursion inside one call; a call inside a call is in test_right_or_refused.py."""

    class Model(Pair):
        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            return self.b(x) if depth == 0 else self.a(self(torch.tanh(x), depth - 1)) * self.scale

    right(rank, Model())


@real_ranks(2)
def test_generators(rank: int) -> None:
    """One that the model consumes itself is right, though it runs after its unit was left; a result is not (test_freed.py)."""

    class Steps(Pair):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield self.a(x)
            yield self.b(x) * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.last = Steps(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(sum(self.steps(x)))

    right(rank, Model())


class Force(Pair):
    """A vmap over a submodule and a gradient by the input (a score, a force) inside forward."""

    def forward(self, x: Tensor) -> Tensor:
        each = torch.vmap(self.a)(x)
        force = torch.func.grad(lambda x: torch.tanh(self.b(self.a(x))).sum())(x)
        return self.b(each) + force * self.scale


@real_ranks(2)
def test_transforms_inside_forward(rank: int) -> None:
    """Right where no buffer is freed for backward; else the clear error that says so (torch: no saved-tensor hooks)."""
    made = Architecture(Force(), {"x": xs()}, lambda call, batch: squared(call(batch["x"])), ())
    assert_mean_gradients(made, rank, {"kept": fs.policies.always(fs.P("shard", reshard=False))})
    model, spec, params, x = setting(rank, made.model)
    for by in (fs.grad, torch.func.grad):
        with unchanged(model), pytest.raises(RuntimeError, match=r"torch\.func transform.*expected P\(reshard=False\)"):
            by(lambda p: squared(fs.functional_call(model, p, x, spec=spec)))(params)


@real_ranks(2)
def test_parameters_read_outside_of_their_unit(rank: int) -> None:
    """MultiheadAttention hands out_proj's parameters to a kernel and never calls it; a parent may do the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(3, 1, batch_first=True), linear()

        def forward(self, x: Tensor) -> Tensor:
            y = self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
            return F.linear(y, self.head.weight) + sum(p.sum() for p in self.attention.out_proj.parameters())

    right(rank, Model())


@real_ranks(2)
def test_full_parameters_in_the_place_of_shards(rank: int) -> None:
    """What `unshard` gives, of some units or of all: the gradient of this rank's loss for them, the mean for the others."""
    model, spec, params, x = setting(rank)
    local = torch.func.grad(lambda p: squared(torch.func.functional_call(model, p, (x,))))(fs.unshard(params, spec))
    expected = fs.grad(lambda p: squared(fs.functional_call(model, p, x, spec=spec)))(params)
    for remat in (False, True):
        again = fs.by_type(nn.Linear, p=fs.P("shard", remat=remat))(model).bound
        for units in (["a"], ["", "b"], ["", "a", "b"]):
            full = fs.unshard(params, spec, units=units)
            mixed = {**full, **{key: shard for key, shard in params.items() if key not in units}}
            want = {key: local[key] if key in full else expected[key] for key in mixed}
            for by in (fs.grad, torch.func.grad):
                got = by(lambda p, again=again: squared(fs.functional_call(model, p, x, spec=again)))(mixed)
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class MuteError(RuntimeError):
    """An error without a message, since its class raises."""

    def __str__(self) -> str:
        raise KeyError("no message")


@real_ranks(2)
def test_an_error_of_forward_whose_message_cannot_be_read(rank: int) -> None:
    """It comes out as it is: where errors are looked through for torch's words, and told to the other ranks."""

    failing = [0, 1]

    class Model(Pair):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if rank in failing:
                raise MuteError
            return y

    model, spec, params, x = setting(rank, Model())

    def loss(params: fs.Params) -> Tensor:
        return squared(fs.functional_call(model, params, x, spec=spec))

    for call in (loss, fs.grad(loss), fs.grad(fs.remat(loss)), lambda params: fs.hvp(loss, params, params)):
        with pytest.raises(MuteError):
            call(params)
    failing.remove(0)
    with pytest.raises(MuteError if rank else RuntimeError) as raised, fs.check(20):
        fs.grad(loss)(params)
    if not rank:
        assert "rank 1 raised MuteError: no message: __str__ of MuteError raises" in str(raised.value)
