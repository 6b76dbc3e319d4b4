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
from models import autograd_function, module_class
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call as call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

WIDTH = 4

PIECES: dict[str, Callable[[], nn.Module]] = {}
"""By name: what makes one."""
Forward = Callable[..., Tensor]


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

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


class Two(One):
    """And another, ``m``."""

    def __init__(self) -> None:
        super().__init__()
        self.m = linear_()


class Buffered(One):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.full((WIDTH,), 0.5))


def forward_of(base: type[nn.Module], parts: Callable[[], dict[str, Any]] = dict, **attributes: Any) -> Callable[[Any], Any]:
    """A piece of the function's name whose forward it is, and that has parts of its own."""

    def init(self: nn.Module) -> None:
        base.__init__(self)
        for name, part in parts().items():
            setattr(self, name, part)

    def decorate(forward: Forward) -> Any:
        return piece(type(forward.__name__, (base,), {"__init__": init, "forward": forward, **attributes}))

    return decorate


def changing(base: type[nn.Module]) -> Callable[[Callable[[Any], None]], Callable[[], nn.Module]]:
    """A piece of the function's name: one of this class, which it has changed."""

    def decorate(change: Callable[[Any], None]) -> Callable[[], nn.Module]:
        def init(self: nn.Module) -> None:
            base.__init__(self)
            change(self)

        return piece(type(change.__name__, (base,), {"__init__": init}))

    return decorate


def under(context: Any, call: Callable[[], Tensor]) -> Tensor:
    with context:
        return call()


def pieces(base: type[nn.Module], **forwards: Forward) -> None:
    """One by each name, with this forward."""
    PIECES.update({name: type(name, (base,), {"forward": forward}) for name, forward in forwards.items()})


class Around(nn.Module):
    """Layers, by their names, and how they run."""

    def __init__(self, run: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def inner(layer: nn.Module) -> nn.Module:
    return Around(lambda m, x: m.inner(x), inner=layer)


def normed(norm: nn.Module) -> nn.Module:
    return Around(lambda m, x: m.norm(m.l(x)), norm=norm, l=linear_())


class InARow(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.tanh(self.l(x)))


class Embeds(One):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + self.table(indices(x))


def indices(x: Tensor) -> Tensor:
    return (x.detach().abs().sum(-1) * 10).long() % 5


PIECES["Linear"] = One
pieces(
    One,
    # weights read without a graph
    Detached=lambda m, x: F.linear(x, m.l.weight.detach()) * m.l(x),
    Data=lambda m, x: F.linear(x, m.l.weight.data) * m.l(x),
    NormWithoutGrad=lambda m, x: under(torch.no_grad(), lambda: 1 / m.l.weight.norm()) * m.l(x),
    WeightWithoutGrad=lambda m, x: F.linear(x, under(torch.no_grad(), lambda: m.l.weight)) + m.l(x),
    ConditionInInference=lambda m, x: under(torch.inference_mode(), lambda: m.l(x)).clone().sigmoid() * m.l(x),
    # straight-through rounding of a weight
    Straight=lambda m, x: F.linear(x, m.l.weight + ((m.l.weight * 4).round() / 4 - m.l.weight).detach(), m.l.bias),
    # one weight twice
    Transposed=lambda m, x: F.linear(torch.tanh(m.l(x)), m.l.weight.t()),
    # the gradient of an energy by its input, in the forward pass, and other functions of torch.func within
    InnerGradByInput=lambda m, x: torch.func.grad(lambda x: torch.tanh(m.l(x)).sum())(x),
    InnerVmap=lambda m, x: torch.vmap(m.l)(x),
    InnerJvp=lambda m, x: torch.func.jvp(lambda x: torch.tanh(m.l(x)), (x,), (torch.ones_like(x),))[1],
    Recursive=lambda m, x, depth=2: torch.tanh(m.l(x)) if depth == 0 else m(m.l(x), depth - 1),
    # reads its state dict, whose tensors are detached
    State=lambda m, x: m.l(x) * m.state_dict()["l.weight"].sum(),
    Copies=lambda m, x: copy.copy(m.l)(x) + m.l(x),
    # a new parameter of the values: no gradient to the old one
    Rewrapped=lambda m, x: F.linear(x, nn.Parameter(m.l.weight.data.clone())) + m.l(x),
    # saved-tensor hooks of its own
    SavedOnCpu=lambda m, x: under(saved_tensors_hooks(lambda t: t.clone(), lambda t: t), lambda: torch.tanh(m.l(x))),
    # fast weights, and those of a step of gradient descent: MAML within
    FastWeights=lambda m, x: call(m.l, {k: p - 0.1 * p.tanh() for k, p in m.l.named_parameters()}, (x,)) + m.l(x),
    InnerStep=lambda m, x: F.linear(
        x, m.l.weight - 0.1 * torch.func.grad(lambda w: F.linear(x, w).pow(2).mean())(m.l.weight), m.l.bias
    ),
    Custom=lambda m, x: Product.apply(x, m.l.weight) + m.l.bias,
    CustomOld=lambda m, x: OldProduct.apply(x, m.l.weight) + m.l.bias,
)
pieces(
    Two,
    Mlp=lambda m, x: x + m.m(torch.tanh(m.l(x))),
    ProbeWithoutGrad=lambda m, x: under(torch.no_grad(), lambda: torch.sigmoid(m.m(m.l(x)))) * m.l(x) + m.m(x),
    Hypernetwork=lambda m, x: call(m.m, {"weight": m.m.weight * torch.tanh(m.l.weight)}, (x,)),
    StopGradientOutput=lambda m, x: m.l(x) * m.m(x).detach(),
    Branches=lambda m, x: m.l(x) if float(x.detach().sum()) > 0 else m.m(x),
    BranchesOnAWeight=lambda m, x: m.l(x) if float(m.l.bias.detach()[0]) > 0 else m.m(x) * m.l.bias,
    Vector=lambda m, x: m.l(x) * nn.utils.parameters_to_vector(m.parameters()).tanh().mean() + m.m(x),
    Checkpointed=lambda m, x: m.m(checkpoint(lambda x: torch.tanh(m.l(x)), x, use_reentrant=False)),
    CheckpointedReentrant=lambda m, x: m.m(checkpoint(lambda x: torch.tanh(m.l(x)), x, use_reentrant=True)),
)
PIECES |= {
    "weight_norm": lambda: inner(parametrizations.weight_norm(linear_())),
    "spectral_norm": lambda: inner(parametrizations.spectral_norm(linear_())),
    "symmetric": lambda: inner(parametrize.register_parametrization(linear_(), "weight", Symmetric())),
    "pruned": lambda: inner(prune.random_unstructured(linear_(), "weight", 0.25)),
    "MaxNorm": lambda: Embeds(max_norm=1.0),
    "Sparse": lambda: Embeds(sparse=True),
    "Lstm": lambda: Around(lambda m, x: m.rnn(x.unsqueeze(1))[0].squeeze(1), rnn=nn.LSTM(WIDTH, WIDTH)),
    "Gru": lambda: Around(lambda m, x: m.cell(x, m.cell(x, torch.zeros_like(x))), cell=nn.GRUCell(WIDTH, WIDTH)),
    "Conv": lambda: Around(lambda m, x: m.conv(x.unsqueeze(1)).mean(1), conv=nn.Conv1d(1, 2, 3, padding=1)),
    "batch_norm": lambda: normed(nn.BatchNorm1d(WIDTH)),
    "layer_norm": lambda: normed(nn.LayerNorm(WIDTH)),
    "group_norm": lambda: normed(nn.GroupNorm(2, WIDTH)),
    "rms_norm": lambda: normed(nn.RMSNorm(WIDTH)),
    "dropped": lambda: normed(nn.Dropout(0.3)),
    "silu": lambda: nn.Sequential(linear_(), nn.SiLU(), linear_()),
}


# ---- weights read without a graph
@forward_of(Two)
def ProbeInInference(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        m.metric = m.m(m.l(x)).abs().mean()
    return torch.tanh(m.m(m.l(x)))


@forward_of(One)
def GradInNoGrad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        a = m.l(x)
        with torch.enable_grad():
            b = m.l(x)
    return a * b


# ---- parametrizations
class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


@forward_of(One, lambda: {"l": parametrize.register_parametrization(linear_(), "weight", Symmetric())})
def Cached(m: Any, x: Tensor) -> Tensor:
    """A parametrization that is computed once for two uses."""
    with parametrize.cached():
        return m.l(m.l(x))


Lora = module_class(
    "Lora",
    lambda: {name: nn.Parameter(torch.randn(*shape) / 3) for name, shape in {"a": (2, WIDTH), "b": (WIDTH, 2)}.items()},
    lambda m, w: w + m.b @ m.a,
)


@changing(One)
def Adapted(m: Any) -> None:
    """A frozen weight, with a trained correction."""
    parametrize.register_parametrization(m.l, "weight", Lora())
    m.l.parametrizations.weight.original.requires_grad_(False)


# ---- tied and shared
@changing(InARow)
def Tied(m: Any) -> None:
    m.m.weight = m.l.weight


@changing(InARow)
def Shared(m: Any) -> None:
    m.m = m.l


@forward_of(One)
def Often(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(m.l(x))
    return x


# ---- hooks
@changing(One)
def Hooked(m: Any) -> None:
    m.l.register_forward_pre_hook(lambda module, args: (args[0] * module.bias,))
    m.l.register_forward_hook(lambda module, args, out: out + module.weight.sum() * args[0])


@changing(One)
def HookedItself(m: Any) -> None:
    """Its own hooks read its child's weight: one runs before it is entered, the other after it is left."""
    m.register_forward_pre_hook(lambda module, args: (args[0] * module.l.bias,))
    m.register_forward_hook(lambda module, args, out: out + module.l.weight.sum())


@changing(One)
def BackwardHooked(m: Any) -> None:
    m.l.register_full_backward_hook(lambda module, grads, _: tuple(None if g is None else 2 * g for g in grads))


@forward_of(One)
def TensorHook(m: Any, x: Tensor) -> Tensor:
    y = m.l(x)
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
    return y


@forward_of(Two)
def Collecting(m: Any, x: Tensor) -> Tensor:
    """Features by hooks, used by the module itself."""
    found: list[Tensor] = []
    handle = m.l.register_forward_hook(lambda module, args, out: found.append(out))
    try:
        y = m.m(m.l(x))
    finally:
        handle.remove()
    return y + found[0]


# ---- dtypes
@forward_of(One, low=True)
def Autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        y = F.linear(x.float(), m.l.weight.float())
        y = F.linear(y, m.l.weight.float())
    return y.double() + m.l.bias


@forward_of(One, low=True)
def AutocastSingle(m: Any, x: Tensor) -> Tensor:
    """Parameters in float32, which autocast casts and keeps; one of two uses without a graph."""
    with torch.autocast("cpu", torch.float16):
        with torch.no_grad():
            y = m.l(x.float())
        y = m.l(x.float()) * y
    return y.double()


def weight_of(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, **options) / 2)


@forward_of(nn.Module, lambda: {"c": weight_of(WIDTH, WIDTH, dtype=torch.complex128), "scale": nn.Parameter(torch.rand(()))})
def Complex(m: Any, x: Tensor) -> Tensor:
    y = x.to(m.c.dtype) @ m.c
    return y.real * m.scale + y.imag.tanh()


@forward_of(nn.Module, lambda: {name: weight_of(WIDTH // 2, dtype=torch.complex128) for name in ("turn", "shift")})
def Rotates(m: Any, x: Tensor) -> Tensor:
    """Complex numbers, which are saved as pairs of real ones and conjugated."""
    pairs = torch.view_as_real(m.turn) * torch.view_as_real(m.shift)
    return pairs.flatten() * x + (m.turn.conj() * m.shift).abs().sum()


@forward_of(One, lambda: {name: nn.Parameter(torch.rand(s)) for name, s in {"empty": (0, 3), "scale": (), "unused": 5}.items()})
def Odd(m: Any, x: Tensor) -> Tensor:
    """Empty and 0-dim parameters, and one that is never used."""
    return m.l(x) * m.scale + m.empty.sum()


@changing(InARow)
def Frozen(m: Any) -> None:
    for part in (m.m, m.l.bias):
        part.requires_grad_(False)


# ---- arguments that a module changes
@dataclass
class Cache:
    """As transformers have them."""

    keys: list[Tensor] = field(default_factory=list)
    by_layer: dict[int, Tensor] = field(default_factory=dict)
    latest: Tensor | None = None


@forward_of(One, wants=list)
def AppendsToAList(m: Any, x: Tensor, cache: list[Tensor]) -> Tensor:
    cache.append(m.l(x))
    return torch.stack(cache).mean(0)


@forward_of(One, wants=dict)
def AddsToADict(m: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    y = m.l(x)
    cache["sum"] = cache["sum"] + y if "sum" in cache else y
    return torch.tanh(cache["sum"])


@forward_of(One, wants=Cache)
def UsesACache(m: Any, x: Tensor, cache: Cache) -> Tensor:
    y = m.l(x)
    cache.keys.append(y)
    n = len(cache.by_layer)
    cache.by_layer[n] = y if cache.latest is None else y + cache.latest
    cache.latest = y.tanh()
    return torch.cat(cache.keys).sum(0) * 0.1 + cache.by_layer[n]


@forward_of(One)
def WritesItsInput(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    y = m.l(x * 2)
    return y.mul_(0.5).add_(x)


@forward_of(One, wants=dict)
def Grows(m: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    """Concatenates with what came before, kept in a tensor of the cache."""
    k = m.l(x)
    cache["k"] = torch.cat([cache["k"], k]) if "k" in cache else k
    return torch.softmax(x @ cache["k"].T, -1) @ cache["k"]


# ---- buffers
@forward_of(Buffered)
def BufferReassigned(m: Any, x: Tensor) -> Tensor:
    y = m.l(x)
    m.buf = 0.9 * m.buf + 0.1 * y.detach().mean(0)
    return y * m.buf


@forward_of(Buffered)
def BufferInPlace(m: Any, x: Tensor) -> Tensor:
    y = m.l(x)
    m.buf.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y * m.buf.clone()


@forward_of(Buffered)
def BufferBeforeAndAfter(m: Any, x: Tensor) -> Tensor:
    y = m.l(x * m.buf.clone())
    with torch.no_grad():
        m.buf.add_(1)
    return m.l(y) * m.buf.clone()


@forward_of(Buffered)
def Counts(m: Any, x: Tensor) -> Tensor:
    """An exponential moving average of its weight, as target networks have."""
    with torch.no_grad():
        m.buf.lerp_(m.l.weight.mean(0), 0.1)
    return m.l(x) + F.linear(x, torch.diag(m.buf.clone()))


# ---- modules called on other parameters, functions of torch.func within
@forward_of(One, lambda: {"inner": nn.Sequential(linear_(), nn.Tanh(), linear_())})
def WholeInner(m: Any, x: Tensor) -> Tensor:
    """The inner model has blocks of its own."""
    params = {k: p * 1.1 for k, p in m.inner.named_parameters()}
    return call(m.inner, params, (m.l(x),))


@forward_of(One)
def InnerAutograd(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(m.l(z)).sum()
        (force,) = torch.autograd.grad(energy, z, create_graph=True)
    return force


@forward_of(One)
def InnerAutogradByWeight(m: Any, x: Tensor) -> Tensor:
    """A step of gradient descent on its layer's weight, by plain autograd."""
    with torch.enable_grad():
        w = m.l.weight if m.l.weight.requires_grad else m.l.weight.detach().requires_grad_()
        (step,) = torch.autograd.grad(torch.tanh(F.linear(x, w)).sum(), w, create_graph=True)
    return F.linear(m.l(x), w - 0.1 * step)


@forward_of(One)
def GradientThroughItsLayer(m: Any, x: Tensor) -> Tensor:
    """The gradient of what its layer computes by the weight that this module reads."""
    if not m.l.weight.requires_grad:
        return m.l(x)
    with torch.enable_grad():
        (step,) = torch.autograd.grad(torch.tanh(m.l(x)).sum(), m.l.weight, create_graph=True)
    return m.l(x) * step.mean()


# ---- parameters that change in forward
@forward_of(One)
def ClampsData(m: Any, x: Tensor) -> Tensor:
    m.l.weight.data.clamp_(-0.3, 0.3)
    return m.l(x)


@forward_of(One)
def ClampsWithoutGrad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.l.weight.clamp_(-0.3, 0.3)
    return m.l(x)


@forward_of(One)
def ScalesAfterUse(m: Any, x: Tensor) -> Tensor:
    """Its version moves after autograd has saved it."""
    y = m.l(x)
    with torch.no_grad():
        m.l.bias.mul_(0.5)
    return m.l(y)


@forward_of(One)
def SetsData(m: Any, x: Tensor) -> Tensor:
    m.l.weight.data = m.l.weight.data * 0.5
    return m.l(x)


@forward_of(Embeds, lambda: {"table": nn.Embedding(5, WIDTH, padding_idx=0)})
def Table(m: Any, x: Tensor) -> Tensor:
    return F.linear(Embeds.forward(m, x), m.table.weight[:WIDTH])


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
@forward_of(nn.Module, lambda: {"attention": nn.MultiheadAttention(WIDTH, 2)})
def Attention(m: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return m.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), need_weights=False)[0].squeeze(1)


@forward_of(nn.Module, lambda: {"qkv": weight_of(3 * WIDTH, WIDTH)})
def Chunked(m: Any, x: Tensor) -> Tensor:
    """One weight, three views."""
    q, k, v = (F.linear(x, w) for w in m.qkv.chunk(3))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


# ---- control flow
@forward_of(Two)
def Recovers(m: Any, x: Tensor) -> Tensor:
    """From an error in a child."""
    with contextlib.suppress(RuntimeError):
        m.l(x[:, :2])
    return m.m(m.l(x))


# ---- parameters from elsewhere, and as results
@forward_of(One, lambda: {"lender": list[nn.Module]()})
def Borrows(m: Any, x: Tensor) -> Tensor:
    """A weight of a piece that ran before, or of its own layer in the first; Net sets ``lender``."""
    lender = (m.lender or [m])[0]
    return m.l(x) + sum(p.mean() for p in lender.parameters() if p.is_floating_point() and p.numel())


Prompt = module_class("Prompt", lambda: {"w": nn.Parameter(torch.randn(WIDTH))}, lambda m: m.w)


@forward_of(nn.Module, lambda: {"prompt": Prompt(), "l": linear_()})
def Returned(m: Any, x: Tensor) -> Tensor:
    """A child whose output is its parameter."""
    return m.l(x) * m.prompt()


@forward_of(Two)
def Penalised(m: Any, x: Tensor) -> Tensor:
    """Over all of its parameters, by each of the ways to list them."""
    decay = sum(p.pow(2).sum() for p in m.parameters())
    names = sum(p.sum() for name, p in m.named_parameters() if name.endswith("bias"))
    return m.m(m.l(x)) + 0.01 * decay * names


def lists() -> dict[str, Any]:
    weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 2 for _ in range(2)])
    named = nn.ParameterDict({"scale": torch.rand(WIDTH), "shift": torch.rand(())})
    return {"weights": weights, "named": named, "choice": nn.ModuleDict({"a": linear_(), "b": linear_()})}


@forward_of(nn.Module, lists)
def Lists(m: Any, x: Tensor) -> Tensor:
    for w in m.weights:
        x = torch.tanh(x @ w)
    return m.choice["b"](x * m.named["scale"] + m.named["shift"])


@piece
class Remembers(Two):
    """Keeps an activation on itself for later in the same call."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.l(x)
        return self.finish()

    def finish(self) -> Tensor:
        return self.m(self.seen) + self.seen


@forward_of(One)
def KeepsWeight(m: Any, x: Tensor) -> Tensor:
    """Its weight in an attribute of another name, for the length of the call."""
    m.alias = m.l.weight
    y = m.l(x)
    return F.linear(y, m.alias)


# ---- autograd inside
Product = autograd_function(
    lambda x, w: x @ w.t(), lambda grad, x, w: (grad @ w, grad.t() @ x), lambda x, w, dx, dw: dx @ w.t() + x @ dw.t()
)
"""x @ w.T, saving both."""


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


@forward_of(Two)
def InPlaceActivation(m: Any, x: Tensor) -> Tensor:
    y = m.l(x)
    y += F.relu(m.m(x), inplace=True)
    y[:, 0] = m.m.bias[0]
    return y


@forward_of(One)
def Out(m: Any, x: Tensor) -> Tensor:
    """A weight's view, written over in a copy."""
    mask = torch.ones_like(m.l.weight)
    mask[0] = 0
    w = m.l.weight.clone()
    w[1] = m.l.bias
    return F.linear(x, w.masked_fill(mask == 0, 0.5))
