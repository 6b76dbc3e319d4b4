"""Modules as people write them, each from [rows, WIDTH] to the same: what the fuzzer (test_fuzz.py) puts together.

Every piece here runs under plain autograd, most of them under torch.func.functional_call and its transforms.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

WIDTH = 4

PIECES: dict[str, Callable[[], nn.Module]] = {}
"""By name: what makes one."""


def piece(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    PIECES[make.__name__] = make
    return make


def linear_() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class One(nn.Module):
    """With one linear layer, ``l``."""

    def __init__(self) -> None:
        super().__init__()
        self.l = linear_()


class Two(One):
    """And another, ``m``."""

    def __init__(self) -> None:
        super().__init__()
        self.m = linear_()


@piece
class Linear(One):
    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


@piece
class Mlp(Two):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.m(torch.tanh(self.l(x)))


# ---- weights read without a graph


@piece
class Detached(One):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.l.weight.detach()) * self.l(x)


@piece
class Data(One):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.l.weight.data) * self.l(x)


@piece
class NormWithoutGrad(One):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = self.l.weight.norm()
        return self.l(x) / norm


@piece
class ProbeWithoutGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.m(self.l(x)))
        return self.l(x) * gate + self.m(x)


@piece
class WeightWithoutGrad(One):
    """The very weight, read under no_grad and used outside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.l.weight
        return F.linear(x, weight) + self.l(x)


@piece
class ProbeInInference(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.metric = self.m(self.l(x)).abs().mean()
        return torch.tanh(self.m(self.l(x)))


@piece
class ConditionInInference(One):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            guess = self.l(x)
        return self.l(x) * guess.clone().sigmoid()


@piece
class GradInNoGrad(One):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.l(x)
            with torch.enable_grad():
                b = self.l(x)
        return a * b


@piece
class StopGradientOutput(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * self.m(x).detach()


@piece
class Straight(One):
    """Straight-through rounding of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.l.weight
        return F.linear(x, w + ((w * 4).round() / 4 - w).detach(), self.l.bias)


# ---- parametrizations


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Wrapping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@piece
def weight_norm() -> nn.Module:
    return Wrapping(parametrizations.weight_norm(linear_()))


@piece
def spectral_norm() -> nn.Module:
    return Wrapping(parametrizations.spectral_norm(linear_()))


@piece
def symmetric() -> nn.Module:
    return Wrapping(parametrize.register_parametrization(linear_(), "weight", Symmetric()))


@piece
class Cached(One):
    """A parametrization that is computed once for two uses."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.l, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.l(self.l(x))


@piece
def pruned() -> nn.Module:
    return Wrapping(prune.random_unstructured(linear_(), "weight", 0.25))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.b @ self.a


@piece
class Adapted(One):
    """A frozen weight, with a trained correction."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.l, "weight", Lora())
        self.l.parametrizations.weight.original.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


# ---- tied and shared


@piece
class Tied(Two):
    def __init__(self) -> None:
        super().__init__()
        self.m.weight = self.l.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.tanh(self.l(x)))


@piece
class Transposed(One):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.l(x)), self.l.weight.t())


@piece
class Shared(Two):
    def __init__(self) -> None:
        super().__init__()
        self.m = self.l

    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.tanh(self.l(x)))


@piece
class Often(One):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.l(x))
        return x


# ---- hooks


@piece
class Hooked(One):
    def __init__(self) -> None:
        super().__init__()
        self.l.register_forward_pre_hook(before)
        self.l.register_forward_hook(after)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * module.bias,)


def after(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out + module.weight.sum() * args[0]


@piece
class HookedItself(One):
    """Its own hooks read its child's weight: one runs before it is entered, the other after it is left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * module.l.bias,))
        self.register_forward_hook(lambda module, args, out: out + module.l.weight.sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


@piece
class TensorHook(One):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 2)
        return y


@piece
class Collecting(Two):
    """Features by hooks, used by the module itself."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        handle = self.l.register_forward_hook(lambda module, args, out: found.append(out))
        try:
            y = self.m(self.l(x))
        finally:
            handle.remove()
        return y + found[0]


# ---- dtypes


@piece
class Autocast(One):
    low = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            y = F.linear(x.float(), self.l.weight.float())
            y = F.linear(y, self.l.weight.float())
        return y.double() + self.l.bias


@piece
class AutocastSingle(One):
    """Parameters in float32, which autocast casts and keeps; one of two uses without a graph."""

    low = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            with torch.no_grad():
                y = self.l(x.float())
            y = self.l(x.float()) * y
        return y.double()


@piece
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 2)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.c.dtype) @ self.c
        return y.real * self.scale + y.imag.tanh()


@piece
class Odd(One):
    """Empty and 0-dim parameters, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.rand(()))
        self.unused = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * self.scale + self.empty.sum()


@piece
class Frozen(Two):
    def __init__(self) -> None:
        super().__init__()
        self.m.requires_grad_(False)
        self.l.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.tanh(self.l(x)))


# ---- arguments that a module changes


@dataclass
class Cache:
    """As transformers have them."""

    keys: list[Tensor] = field(default_factory=list)
    by_layer: dict[int, Tensor] = field(default_factory=dict)
    latest: Tensor | None = None


@piece
class AppendsToAList(One):
    wants = list

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(self.l(x))
        return torch.stack(cache).mean(0)


@piece
class AddsToADict(One):
    wants = dict

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        y = self.l(x)
        cache["sum"] = cache["sum"] + y if "sum" in cache else y
        return torch.tanh(cache["sum"])


@piece
class UsesACache(One):
    wants = Cache

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y = self.l(x)
        cache.keys.append(y)
        n = len(cache.by_layer)
        cache.by_layer[n] = y if cache.latest is None else y + cache.latest
        cache.latest = y.tanh()
        return torch.cat(cache.keys).sum(0) * 0.1 + cache.by_layer[n]


@piece
class WritesItsInput(One):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.l(x * 2)
        return y.mul_(0.5).add_(x)


@piece
class Grows(One):
    """Concatenates with what came before, kept in a tensor of the cache."""

    wants = dict

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        k = self.l(x)
        cache["k"] = torch.cat([cache["k"], k]) if "k" in cache else k
        return torch.softmax(x @ cache["k"].T, -1) @ cache["k"]


# ---- buffers


class Buffered(One):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.full((WIDTH,), 0.5))


@piece
class BufferReassigned(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.buf = 0.9 * self.buf + 0.1 * y.detach().mean(0)
        return y * self.buf


@piece
class BufferInPlace(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.buf.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y * self.buf.clone()


@piece
class BufferBeforeAndAfter(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x * self.buf.clone())
        with torch.no_grad():
            self.buf.add_(1)
        return self.l(y) * self.buf.clone()


@piece
class Counts(Buffered):
    """An exponential moving average of its weight, as target networks have."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.buf.lerp_(self.l.weight.mean(0), 0.1)
        return self.l(x) + F.linear(x, torch.diag(self.buf.clone()))


# ---- modules called on other parameters, functions of torch.func within


@piece
class Hypernetwork(Two):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.m.weight * torch.tanh(self.l.weight)
        return torch.func.functional_call(self.m, {"weight": weight}, (x,))


@piece
class FastWeights(One):
    def forward(self, x: Tensor) -> Tensor:
        fast = {k: p - 0.1 * p.tanh() for k, p in self.l.named_parameters()}
        return torch.func.functional_call(self.l, fast, (x,)) + self.l(x)


@piece
class WholeInner(One):
    """The inner model has blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear_(), nn.Tanh(), linear_())

    def forward(self, x: Tensor) -> Tensor:
        params = {k: p * 1.1 for k, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, params, (self.l(x),))


@piece
class InnerGradByInput(One):
    """The gradient of an energy by its input, in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.tanh(self.l(x)).sum())(x)


@piece
class InnerAutograd(One):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.l(z)).sum()
            (force,) = torch.autograd.grad(energy, z, create_graph=True)
        return force


@piece
class InnerStep(One):
    """A step of gradient descent on its weight, then a run with that: MAML within."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.l.weight
        step = torch.func.grad(lambda w: F.linear(x, w).pow(2).mean())(weight)
        return F.linear(x, weight - 0.1 * step, self.l.bias)


@piece
class InnerVmap(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.l)(x)


@piece
class InnerJvp(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: torch.tanh(self.l(x)), (x,), (torch.ones_like(x),))[1]


# ---- parameters that change in forward


@piece
class ClampsData(One):
    def forward(self, x: Tensor) -> Tensor:
        self.l.weight.data.clamp_(-0.3, 0.3)
        return self.l(x)


@piece
class ClampsWithoutGrad(One):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.l.weight.clamp_(-0.3, 0.3)
        return self.l(x)


@piece
class ScalesAfterUse(One):
    """Its version moves after autograd has saved it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        with torch.no_grad():
            self.l.bias.mul_(0.5)
        return self.l(y)


@piece
class SetsData(One):
    def forward(self, x: Tensor) -> Tensor:
        self.l.weight.data = self.l.weight.data * 0.5
        return self.l(x)


@piece
class MaxNorm(One):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + self.table(indices(x))


def indices(x: Tensor) -> Tensor:
    return (x.detach().abs().sum(-1) * 10).long() % 5


@piece
class Sparse(One):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + self.table(indices(x))


@piece
class Table(One):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.l(x) + self.table(indices(x)), self.table.weight[:WIDTH])


@piece
class Replaces(One):
    """As old-style reparametrizations do: a computed tensor in the place of the layer's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = self.l.weight
        del self.l.weight

    def forward(self, x: Tensor) -> Tensor:
        self.l.weight = torch.tanh(self.raw)
        return self.l(x)


# ---- layers of torch


@piece
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1))[0].squeeze(1)


@piece
class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, self.cell(x, torch.zeros_like(x)))


@piece
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), need_weights=False)[0].squeeze(1)


@piece
class Chunked(nn.Module):
    """One weight, three views."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w) for w in self.qkv.chunk(3))
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


@piece
class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).mean(1)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.l = norm, linear_()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.l(x))


@piece
def batch_norm() -> nn.Module:
    return Normed(nn.BatchNorm1d(WIDTH))


@piece
def layer_norm() -> nn.Module:
    return Normed(nn.LayerNorm(WIDTH))


@piece
def group_norm() -> nn.Module:
    return Normed(nn.GroupNorm(2, WIDTH))


@piece
def rms_norm() -> nn.Module:
    return Normed(nn.RMSNorm(WIDTH))


@piece
def dropped() -> nn.Module:
    return Normed(nn.Dropout(0.3))


@piece
def silu() -> nn.Module:
    return nn.Sequential(linear_(), nn.SiLU(), linear_())


# ---- control flow


@piece
class Branches(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) if float(x.detach().sum()) > 0 else self.m(x)


@piece
class BranchesOnAWeight(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) if float(self.l.bias.detach()[0]) > 0 else self.m(x) * self.l.bias


@piece
class Recovers(Two):
    """From an error in a child."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.l(x[:, :2])
        return self.m(self.l(x))


@piece
class Recursive(One):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return torch.tanh(self.l(x)) if depth == 0 else self(self.l(x), depth - 1)


# ---- parameters from elsewhere, and as results


@piece
class Borrows(One):
    """A weight of a piece that ran before, or of its own layer in the first; Net sets ``lender``."""

    def __init__(self) -> None:
        super().__init__()
        self.lender: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        lender = (self.lender or [self])[0]
        vectors = [p for p in lender.parameters() if p.is_floating_point() and p.numel()]
        return self.l(x) + sum(p.mean() for p in vectors)


@piece
class Returned(nn.Module):
    """A child whose output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = Prompt()
        self.l = linear_()

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * self.prompt()


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.w


@piece
class Penalised(Two):
    """Over all of its parameters, by each of the ways to list them."""

    def forward(self, x: Tensor) -> Tensor:
        decay = sum(p.pow(2).sum() for p in self.parameters())
        names = sum(p.sum() for name, p in self.named_parameters() if name.endswith("bias"))
        return self.m(self.l(x)) + 0.01 * decay * names


@piece
class Vector(Two):
    def forward(self, x: Tensor) -> Tensor:
        flat = nn.utils.parameters_to_vector(self.parameters())
        return self.l(x) * flat.tanh().mean() + self.m(x)


@piece
class State(One):
    """Reads its state dict, whose tensors are detached."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * self.state_dict()["l.weight"].sum()


@piece
class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 2 for _ in range(2)])
        self.named = nn.ParameterDict({"scale": torch.rand(WIDTH), "shift": torch.rand(())})
        self.choice = nn.ModuleDict({"a": linear_(), "b": linear_()})

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = torch.tanh(x @ w)
        return self.choice["b"](x * self.named["scale"] + self.named["shift"])


@piece
class Remembers(Two):
    """Keeps an activation on itself for later in the same call."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.l(x)
        return self.finish()

    def finish(self) -> Tensor:
        return self.m(self.seen) + self.seen


@piece
class KeepsWeight(One):
    """Its weight in an attribute of another name, for the length of the call."""

    def forward(self, x: Tensor) -> Tensor:
        self.alias = self.l.weight
        y = self.l(x)
        return F.linear(y, self.alias)


@piece
class Copies(One):
    def forward(self, x: Tensor) -> Tensor:
        other = copy.copy(self.l)
        return other(x) + self.l(x)


@piece
class Rewrapped(One):
    """A new parameter of the values: no gradient to the old one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, nn.Parameter(self.l.weight.data.clone())) + self.l(x)


# ---- autograd inside


@piece
class Checkpointed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.m(checkpoint(lambda x: torch.tanh(self.l(x)), x, use_reentrant=False))


@piece
class CheckpointedReentrant(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.m(checkpoint(lambda x: torch.tanh(self.l(x)), x, use_reentrant=True))


class Product(torch.autograd.Function):
    """x @ w.T, saving both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Tensor:
        x, w = ctx.saved_tensors
        return dx @ w.t() + x @ dw.t()


@piece
class Custom(One):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.l.weight) + self.l.bias


class OldProduct(torch.autograd.Function):
    """As most are written: with ctx in forward, and the weight in an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.w, grad.t() @ x


@piece
class CustomOld(One):
    def forward(self, x: Tensor) -> Tensor:
        return OldProduct.apply(x, self.l.weight) + self.l.bias


@piece
class SavedOnCpu(One):
    """Saved-tensor hooks of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return torch.tanh(self.l(x))


@piece
class InPlaceActivation(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        y += F.relu(self.m(x), inplace=True)
        y[:, 0] = self.m.bias[0]
        return y


@piece
class Out(One):
    """A weight's view, written over in a copy."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(self.l.weight)
        mask[0] = 0
        w = self.l.weight.clone()
        w[1] = self.l.bias
        return F.linear(x, w.masked_fill(mask == 0, 0.5))
