"""Every transform with every strategy, on simulated and on real ranks, is plain autograd on the whole model.

The cells of the guide's table: `table` makes it of what is tested here, and ``python tests/combined/test_matrix.py`` prints it.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hosted
import pytest
import torch
import torch.nn.functional as F
from cases import slices
from depth import at_most, depth, each, mark_seldom, seldom
from offloaded import everywhere
from parity import dot, normal
from ranks import Pool, mesh_of
from test_at_rest import quantized
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P
from funshard._transforms import products

DIGITS = 9


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 2), nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(fs.checkpoint_name(torch.tanh(self.up(x)), "inner"))


class AsWritten(nn.Module):
    """What people write in a forward: ``detach``, fast weights by functional_call, another unit's weight, hooks, in-place."""

    def __init__(self, width: int, head: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.fast = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.heads = [head]  # of another unit, and no submodule
        self.register_forward_pre_hook(lambda _, args: (args[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(F.linear(x, self.up.weight.detach()))
        fast = {"weight": self.fast.weight + self.up.weight**2, "bias": self.fast.bias * self.up.bias}
        h = torch.func.functional_call(self.fast, fast, (x,))
        h *= gate
        return x + self.down(torch.tanh(h)) * self.heads[0].weight.mean() + self.heads[0].bias.sum()


class Whole(Block):
    """A block with a gate that is a mean over its rows."""

    def forward(self, x: Tensor) -> Tensor:
        total, count = self.sums((self.up.weight, self.up.bias), x.reshape(-1, x.shape[-1]))
        return super().forward(x) * torch.sigmoid(total / count)

    def sums(self, w: Any, rows: Tensor) -> Any:
        return torch.tanh(F.linear(rows, *w)).square().sum(), rows.shape[0]


IN_CHUNKS = {"sums": lambda self, w, rows: fs.chunked(functools.partial(Whole.sums, self), 3)(w, rows)}
InChunks = type("InChunks", (Whole,), IN_CHUNKS)
"""The same by `fs.chunked`."""


def network(block: type[Block] = Block) -> nn.Module:
    """Two blocks with a weight in common, one of them run twice; no number of ranks divides every unit."""
    torch.manual_seed(1)
    a, b = block(5), block(5)
    b.up.weight = a.up.weight
    return nn.Sequential(nn.Linear(3, 5), a, b, a, nn.Linear(5, 2)).double()


def as_written() -> nn.Module:
    """Two blocks as people write them."""
    torch.manual_seed(1)
    head = nn.Linear(5, 2)
    return nn.Sequential(nn.Linear(3, 5), AsWritten(5, head), AsWritten(5, head), head).double()


def adapted() -> nn.Module:
    """The first of them with half of each block frozen."""
    model = network()
    for block in (model[1], model[2]):
        block.down.requires_grad_(False)
    return model


@dataclass(frozen=True, eq=False)
class Network:
    """A model, its trained parameters and a direction for them; the frozen ones, as they are computed with; what it equals."""

    model: nn.Module
    full: fs.Params
    direction: fs.Params
    frozen: fs.Params
    reference: nn.Module

    @classmethod
    def of(cls, model: nn.Module, codec: fs.Codec | None = None, reference: nn.Module | None = None) -> Network:
        full = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        direction = {name: normal(*p.shape, seed=i) for i, (name, p) in enumerate(full.items())}
        used = dict((quantized(model, codec) if codec else model).named_parameters())
        frozen = {name: p.detach() for name, p in used.items() if name not in full}
        return cls(model, full, direction, frozen, reference or model)

    def plain(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        # of a copy: torch 2.13 leaves its tensors in a tied parameter of a module that is registered twice
        return torch.func.functional_call(copy.deepcopy(self.reference), self.frozen | dict(params), (x,))


INT8, NF4 = fs.codecs.int8(8), fs.codecs.nf4(8)
ORDINARY, WRITTEN = Network.of(network()), Network.of(as_written())
X = normal(8, 4, 3, seed=100)
COTANGENT = normal(8, 4, 2, seed=101)
CLIP = 3.0
WEIGHTS = normal(3, seed=102)
RATES = torch.tensor([0.1, 0.05, 0.02, 0.01], dtype=torch.float64)


@dataclass(frozen=True)
class Strategy:
    """What the policy gives each block, and the mesh for a number of ranks; the real one is a DeviceMesh of that shape."""

    p: P
    real: int = 2
    meshes: Mapping[int, Mapping[str, int]] | None = None
    network: Network = ORDINARY

    def sizes(self, ranks: int) -> dict[str, int]:
        return {"shard": ranks} if self.meshes is None else dict(self.meshes[ranks])

    def position(self, ranks: int, rank: int) -> tuple[int, int]:
        """How many slices a buffer has, and which one is this rank's."""
        shards = math.prod(size for axis, size in self.sizes(ranks).items() if axis in self.p.axes)
        return shards, rank % shards


HYBRID = {2: (2, 1), 3: (1, 3), 4: (2, 2), 8: (2, 4)}
IDENTITY = fs.Codec(lambda x: (x,), lambda x: x)
ON_HYBRID = {n: {"replicate": r, "shard": s} for n, (r, s) in HYBRID.items()}
MAIN = {
    '`P("shard")`': Strategy(P("shard")),
    "`reshard=False`": Strategy(P("shard", reshard=False)),
    "`remat=True`": Strategy(P("shard", remat=True)),
    "`offload=` activations": Strategy(P("shard", offload="activations")),
    "`P()`": Strategy(P()),
    "`codec=`": Strategy(P("shard", precision=fs.Precision(codec=IDENTITY))),
    "HSDP": Strategy(P("shard"), 4, ON_HYBRID),
    "as written": Strategy(P("shard"), network=WRITTEN),
}
OF_MEMORY = {
    "`Remat(save=)`": Strategy(P("shard", remat=fs.Remat(save={"inner"}))),
    "`offload=` params": Strategy(P("shard", offload="params")),
    "`at_rest=` int8": Strategy(P("shard", at_rest=INT8), network=Network.of(adapted(), INT8)),
    "`at_rest=` nf4": Strategy(P("shard", at_rest=NF4), network=Network.of(adapted(), NF4)),
    "`chunked`": Strategy(P("shard"), network=Network.of(network(InChunks), reference=network(Whole))),
}
OF_UNITS = {
    "`by_group`": Strategy(P("shard", unit="blocks")),
    '`reshard="shard"`': Strategy(P(("replicate", "shard"), reshard="shard"), 4, ON_HYBRID),
    "`reduce_codec=`": Strategy(P("shard", precision=fs.Precision(reduce_codec=IDENTITY))),
}
OF_COMPILED_UNITS = {"`compile=`": Strategy(P("shard", compile=fs.Compile(backend="aot_eager")))}
STRATEGIES = MAIN | OF_MEMORY | OF_UNITS | OF_COMPILED_UNITS
SIMULATED = (2, 3, 8)


def square(y: Tensor) -> Tensor:
    return (y**2).mean()


def square_rows(y: Tensor) -> Tensor:
    return (y**2).mean(-1)


def convex(y: Tensor) -> Tensor:
    return y.logsumexp(-1).square().mean()


def gradient(f: Callable[[fs.Params], Tensor], at: Mapping[str, Tensor]) -> fs.Params:
    """By torch.autograd, with a graph for the next one."""
    leaves = {name: t if t.requires_grad else t.detach().requires_grad_() for name, t in at.items()}
    return dict(zip(leaves, torch.autograd.grad(f(leaves), list(leaves.values()), create_graph=True), strict=True))


def cubes(tree: Mapping[str, Tensor]) -> Tensor:
    return sum(((t**3).sum() for t in tree.values()), torch.zeros((), dtype=torch.float64))


def clipped(g: fs.Params) -> fs.Params:
    scale = min(1.0, CLIP / (norm(g) + 1e-6))
    return {name: t * scale for name, t in g.items()}


def norm(g: fs.Params) -> float:
    return float(dot(g, g).detach()) ** 0.5


class Reference:
    """The derivatives of the ranks' losses, and of their mean, with respect to the whole model's parameters."""

    def __init__(self, network: Network, ranks: int) -> None:
        self.plain, self.full, self.direction, self.ranks = network.plain, network.full, network.direction, ranks
        self.batch = X[:ranks]
        self.outputs = [self.plain(self.full, x) for x in X[:ranks]]
        self.values = [square(y) for y in self.outputs]

    def mean(self, params: fs.Params) -> Tensor:
        return torch.stack([square(self.plain(params, x)) for x in X[: self.ranks]]).mean()

    @functools.cached_property
    def gradient(self) -> fs.Params:
        return gradient(self.mean, self.full)

    @functools.cached_property
    def pulled_back(self) -> fs.Params:
        pairs = list(zip(X[: self.ranks], COTANGENT, strict=False))
        return gradient(lambda p: torch.stack([(self.plain(p, x) * c).sum() for x, c in pairs]).mean(), self.full)

    @functools.cached_property
    def tangents(self) -> list[Tensor]:
        return [dot(gradient(lambda p: square(self.plain(p, x)), self.full), self.direction) for x in X[: self.ranks]]

    @functools.cached_property
    def hessian_product(self) -> fs.Params:
        return gradient(lambda p: dot(gradient(self.mean, p), self.direction), self.full)

    @functools.cached_property
    def gauss_newton_product(self) -> fs.Params:
        """The mean of J' H J v, with H that of `convex`; J v is a derivative with respect to the cotangent."""
        return mean_of(
            self._curved(x, lambda y, u: gradient(lambda z: dot(gradient(lambda z: convex(z["y"]), z), u), y))
            for x in self.batch
        )

    @functools.cached_property
    def fisher_product(self) -> fs.Params:
        return mean_of(self._curved(x, lambda y, u: {"y": u["y"] / len(u["y"])}, rows=True) for x in self.batch)

    def _curved(self, x: Tensor, curve: Callable[[fs.Params, fs.Params], fs.Params], *, rows: bool = False) -> fs.Params:
        outputs = lambda p: square_rows(self.plain(p, x)) if rows else self.plain(p, x)  # noqa: E731
        y = outputs(self.full)
        pulled = lambda c: dot(gradient(lambda p: (outputs(p) * c["y"]).sum(), self.full), self.direction)  # noqa: E731
        cotangent = curve({"y": y.detach()}, detached(gradient(pulled, {"y": torch.zeros_like(y)})))["y"].detach()
        return gradient(lambda p: (outputs(p) * cotangent).sum(), self.full)

    @functools.cached_property
    def penalised(self) -> fs.Params:
        """Of the mean loss and the sum of its gradient's cubes."""
        return gradient(lambda p: self.mean(p) + cubes(gradient(self.mean, p)), self.full)

    @functools.cached_property
    def through_steps(self) -> fs.Params:
        """Of the mean loss after steps down it."""

        def after(params: fs.Params) -> Tensor:
            for rate in RATES:
                grads = gradient(self.mean, params)
                params = {name: p - rate * grads[name] for name, p in params.items()}
            return self.mean(params)

        return gradient(after, self.full)

    @functools.cached_property
    def elsewhere(self) -> list[fs.Params]:
        pairs = zip(stack_of(self.full, self.direction), WEIGHTS, strict=True)
        return [gradient(lambda p: weight * self.mean(p), params) for params, weight in pairs]

    @functools.cached_property
    def samples(self) -> list[list[fs.Params]]:
        return [[gradient(lambda p: square(self.plain(p, sample)), self.full) for sample in x] for x in X[: self.ranks]]

    @functools.cached_property
    def private(self) -> fs.Params:
        return mean_of([clipped(g) for own in self.samples for g in own])


def stack_of(params: fs.Params, v: fs.Params) -> list[fs.Params]:
    """Three models."""
    return [params, v, {k: p - v[k] for k, p in params.items()}]


def stacked(trees: Iterable[fs.Params]) -> fs.Params:
    trees = list(trees)
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def mean_of(trees: Iterable[fs.Params]) -> fs.Params:
    return {name: t.mean(0) for name, t in stacked(trees).items()}


reference = functools.cache(Reference)


State = tuple[fs.Params, fs.Params, Tensor, Tensor]
"""Shards of parameters and of a direction, this rank's batch and a cotangent of its outputs; stacked if simulated."""
OnRanks = Callable[[Callable[..., Any]], Callable[..., Any]]
"""``on(fn)(*args)`` is ``fn(sharded, *args)`` as each rank runs it."""
Cut = Callable[[fs.Params], fs.Params]
"""This rank's shards of full parameters."""


class Sharded(NamedTuple):
    """A network with its spec on the ranks, and this rank's shards of what is frozen."""

    network: Network
    spec: fs.PartitionSpec
    frozen: fs.Params

    def call(self, params: fs.Params, x: Tensor) -> Tensor:
        return fs.functional_call(self.network.model, fs.combine(params, self.frozen), x, spec=self.spec)

    def loss(self, params: fs.Params, x: Tensor) -> Tensor:
        return square(self.call(params, x))


@dataclass(frozen=True)
class Transform:
    """What runs on the ranks, and what the whole model has in its place, for one rank."""

    run: Callable[[OnRanks, State], Any]
    equals: Callable[[Reference, Cut, int], Any]


def inside(transform: Callable[..., Any]) -> Callable[[OnRanks, State], Any]:
    """``transform(loss of the parameters, parameters, direction)`` as each rank runs it."""

    def run(on: OnRanks, state: State) -> Any:
        return on(lambda of, p, v, x, _: transform(lambda p: of.loss(p, x), p, v))(*state)

    return run


def pulled_back(on: OnRanks, state: State) -> Any:
    def rank(of: Sharded, p: fs.Params, v: fs.Params, x: Tensor, cotangent: Tensor) -> Any:
        y, pullback = vjp(lambda p: of.call(p, x), p)
        return y, pullback(cotangent)[0]

    return on(rank)(*state)


def curved(on: OnRanks, state: State) -> Any:
    """Products with the Gauss-Newton and the Fisher matrix."""

    def rank(of: Sharded, p: fs.Params, v: fs.Params, x: Tensor, _: Tensor) -> Any:
        fisher = products.fishervp(lambda p: square_rows(of.call(p, x)), p, v)
        return products.ggnvp(lambda p: of.call(p, x), convex, p, v), fisher

    return on(rank)(*state)


def through_steps(loss: Callable[[fs.Params], Tensor], p: fs.Params, v: fs.Params) -> fs.Params:
    def descend(p: fs.Params, rate: Tensor) -> tuple[fs.Params, None]:
        grads = fs.grad(loss)(p)
        return {key: t - rate * grads[key] for key, t in p.items()}, None

    return fs.grad(lambda p: loss(fs.scan(descend, p, RATES)[0]))(p)


def of_each_sample(**options: Any) -> Callable[[OnRanks, State], Any]:
    def run(on: OnRanks, state: State) -> Any:
        return on(lambda of, p, v, x, _: fs.per_sample_grads(of.loss, p, x, spec=of.spec, **options))(*state)

    return run


def by_plain_autograd(order: int) -> Callable[[OnRanks, State], Any]:
    """Around the ranks, whose losses add up: each has its own backward."""

    def run(on: OnRanks, state: State) -> Any:
        params, _, x, _ = state
        leaves = {k: t.clone().requires_grad_() for k, t in params.items()}
        loss = on(lambda of, p, x: of.loss(p, x))(leaves, x).sum()
        if order == 2:
            first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            loss = loss + cubes(dict(zip(leaves, first, strict=True)))
        loss.backward()
        return {k: t.grad for k, t in leaves.items()}

    return run


def step(of: Sharded, p: fs.Params, x: Tensor) -> tuple[fs.Params, Tensor]:
    return fs.grad_and_value(of.loss)(p, x)


def elsewhere(params: fs.Params, x: Tensor) -> tuple[fs.Params, Tensor]:
    """Other arguments to record a step with: none of them must be found in it."""
    return {k: t.cos() for k, t in params.items()}, x.flip(-1)


def compiled(on: OnRanks, state: State) -> Any:
    params, _, x, _ = state
    torch._dynamo.reset()
    once = torch.compile(on(step), fullgraph=True, backend=depth("eager", "aot_eager"))
    once(*elsewhere(params, x))
    with torch.compiler.set_stance("fail_on_recompile"):
        return once(params, x)


TRANSFORMS = {
    "`grad`": Transform(inside(lambda loss, p, v: grad(loss)(p)), lambda of, cut, rank: cut(of.gradient)),
    "`grad_and_value`": Transform(
        inside(lambda loss, p, v: grad_and_value(loss)(p)), lambda of, cut, rank: (cut(of.gradient), of.values[rank])),
    "`fs.grad`": Transform(inside(lambda loss, p, v: fs.grad(loss)(p)), lambda of, cut, rank: cut(of.gradient)),
    "`vjp`": Transform(pulled_back, lambda of, cut, rank: (of.outputs[rank], cut(of.pulled_back))),
    "`jvp`": Transform(
        inside(lambda loss, p, v: jvp(loss, (p,), (v,))), lambda of, cut, rank: (of.values[rank], of.tangents[rank])),
    "`jvp` of `grad`, `fs.hvp`": Transform(
        inside(lambda loss, p, v: (jvp(grad(loss), (p,), (v,)), fs.hvp(loss, p, v))),
        lambda of, cut, rank: ((cut(of.gradient), cut(of.hessian_product)), cut(of.hessian_product))),
    "`curvature.ggn`, `curvature.fisher`": Transform(
        curved, lambda of, cut, rank: (cut(of.gauss_newton_product), cut(of.fisher_product))),
    "`grad` of `grad`": Transform(
        inside(lambda loss, p, v: grad(lambda p: loss(p) + cubes(grad(loss)(p)))(p)), lambda of, cut, rank: cut(of.penalised)),
    "`vmap` over parameters": Transform(
        inside(lambda f, p, v: torch.vmap(grad(lambda p, weight: weight * f(p)))(stacked(stack_of(p, v)), WEIGHTS)),
        lambda of, cut, rank: stacked(cut(g) for g in of.elsewhere)),
    "`fs.scan`": Transform(inside(through_steps), lambda of, cut, rank: cut(of.through_steps)),
    "`per_sample_grads`": Transform(of_each_sample(), lambda of, cut, rank: stacked(of.samples[rank])),
    "`per_sample_grads(clip=)`": Transform(of_each_sample(clip=CLIP), lambda of, cut, rank: cut(of.private)),
    "plain autograd": Transform(by_plain_autograd(1), lambda of, cut, rank: cut(of.gradient)),
    "double backward": Transform(by_plain_autograd(2), lambda of, cut, rank: cut(of.penalised)),
    "`torch.compile`": Transform(compiled, lambda of, cut, rank: (cut(of.gradient), of.values[rank])),
    "`make_fx`": Transform(
        lambda on, state: make_fx(on(step))(*elsewhere(state[0], state[2]))(state[0], state[2]),
        lambda of, cut, rank: (cut(of.gradient), of.values[rank])),
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """An error that running this on each simulated rank raises, which is torch's, and what the guide says of it."""

    run: Callable[[OnRanks, State], Any]
    error: type[Exception]
    message: str
    note: str


def compiled_on_each(on: OnRanks, state: State) -> Any:
    params, _, x, _ = state
    torch._dynamo.reset()
    rank = lambda of, p, x: torch.compile(functools.partial(step, of), fullgraph=True, backend="aot_eager")(p, x)  # noqa: E731
    return on(rank)(params, x)


AROUND = Limit(
    lambda on, state: on(lambda of, p, x: of.loss({k: t.requires_grad_() for k, t in p.items()}, x))(state[0], state[2]),
    RuntimeError,
    "You are attempting to call Tensor.requires_grad_() (or perhaps using torch.autograd.functional.* APIs) inside of a "
    "function being transformed by a functorch transform. ",
    "On simulated ranks: around `spmd`. Inside, `requires_grad_` is a RuntimeError of torch's.",
)
LIMITS = {
    "plain autograd": AROUND,
    "double backward": AROUND,
    "`torch.compile`": Limit(
        compiled_on_each,
        torch._dynamo.exc.Unsupported,
        "Calling torch.func.vmap(compiled_fn) function from eager mode is not supported. ",
        "On simulated ranks: around `spmd`. Inside, a compiled function is a RuntimeError of torch's (pytorch issue 128711).",
    ),
}
"""Of transforms, whatever the strategy."""


def table() -> str:
    """The guide's table, in markdown, with its caption and notes."""
    notes = list(dict.fromkeys(limit.note for limit in LIMITS.values()))
    marks = {note: "¹²³⁴⁵"[i] for i, note in enumerate(notes)}
    alone, hybrid = (STRATEGIES[name] for name in ("`P()`", "HSDP"))
    shape = " x ".join(map(str, hybrid.sizes(hybrid.real).values()))
    counts = f"{', '.join(map(str, SIMULATED[:-1]))} and {SIMULATED[-1]}"
    caption = (
        f"Each result equals, to 1e-{DIGITS} in float64, plain autograd of the unsharded "
        "model's loss, the mean over ranks. Values, tangents and samples are each rank's own. The tests run on "
        f"{counts} simulated ranks and on {alone.real} real ones, for HSDP on {shape}."
    )
    transforms = [name + (marks[LIMITS[name].note] if name in LIMITS else "") for name in TRANSFORMS]
    rows = ["| | |", "|---|---|", f"| transforms | {', '.join(transforms)} |", f"| strategies | {', '.join(STRATEGIES)} |"]
    explained = (
        '*As written* is `P("shard")` of blocks with `detach`, fast weights by `torch.func.functional_call`, another weight, '
        "hooks and in-place operators. *`chunked`* is that of blocks with an `fs.chunked` mean over their rows. With "
        "`at_rest=` half of each block is frozen, and the unsharded model has the decoded values. *`by_group`* has all blocks "
        'in one unit; *`reshard="shard"`* splits them over both axes of HSDP\'s mesh. With `compile=` double '
        "backward is a RuntimeError of torch's; torch.func's transforms run without compilation."
    )
    return "\n".join([caption, "", *rows, "", explained, *(f"\n{mark} {note}" for note, mark in marks.items())])


def without_ticks(name: str) -> str:
    return name.replace("`", "")


def policy(strategy: str) -> fs.PartitionSpec:
    chosen = STRATEGIES[strategy]
    return fs.by_type(AsWritten if chosen.network is WRITTEN else Block, p=chosen.p)(chosen.network.model)


def start(network: Network, spec: fs.PartitionSpec, x: Tensor, cotangent: Tensor) -> tuple[State, fs.Params]:
    """This rank's arguments, and its shards of what is frozen."""
    whole = {name: p.detach() for name, p in network.model.named_parameters()}
    trained, frozen = fs.partition(fs.shard(whole, spec), spec)
    direction, _ = fs.partition(fs.shard(whole | network.direction, spec), spec)
    return (trained, direction, x, cotangent), frozen


def simulated(strategy: str, ranks: int) -> tuple[OnRanks, State]:
    spec, chosen = policy(strategy), STRATEGIES[strategy]
    sizes, network = chosen.sizes(ranks), chosen.network
    begin = fs.testing.spmd(lambda mesh, *args: start(network, spec.on(mesh), *args), sizes)
    state, frozen = pytree.tree_map(Tensor.contiguous, begin(X[:ranks], COTANGENT[:ranks]))

    def on(fn: Callable[..., Any]) -> Callable[..., Any]:
        rank = fs.testing.spmd(lambda mesh, mine, *args: fn(Sharded(network, spec.on(mesh), mine), *args), sizes)
        return functools.partial(rank, frozen)

    return on, state


def shards(full: fs.Params, strategy: str, ranks: int, rank: int) -> fs.Params:
    """A rank's slice of each unit that is trained."""
    count, index = STRATEGIES[strategy].position(ranks, rank)
    return {unit.key: slices(full, unit, count)[index] for unit in policy(strategy) if unit.requires_grad}


def check(got: Any, transform: str, strategy: str, ranks: int, rank: int) -> None:
    cut = functools.partial(shards, strategy=strategy, ranks=ranks, rank=rank)
    network = STRATEGIES[strategy].network
    expected = TRANSFORMS[transform].equals(reference(network, ranks), cut, rank)
    holds = any(t.any() for t in cut({name: torch.ones_like(p) for name, p in network.full.items()}).values())
    assert any(t.abs().max() > 1e-4 for t in pytree.tree_leaves(expected)) or not holds
    torch.testing.assert_close(got, detached(expected), rtol=10**-DIGITS, atol=10**-DIGITS)


def detached(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.detach(), tree)


BY_DYNAMO = "`torch.compile`"
NOT_BY_DYNAMO = [name for name in TRANSFORMS if name != BY_DYNAMO]
TRACED = [BY_DYNAMO, *depth(["`make_fx`"], [])]
"""What real ranks have a test of its own for, each of them tracing for itself."""
AS_IT_RUNS = [name for name in TRANSFORMS if name not in TRACED]
COMPILED = depth(['`P("shard")`'], [*MAIN, *OF_MEMORY])
COMPILED_SIMULATED = depth(["`codec=`", "`offload=` activations", "as written"], [*MAIN, *OF_MEMORY])
"""By default what test_compile.py and test_compile_remat.py do not compile on real ranks."""


QUIET = pytest.mark.filterwarnings(
    "ignore::funshard._call.compiled_unit.CompileWarning", "ignore:The .grad attribute of a Tensor that is not"
)
"""Compiled units run without compilation in simulated ranks."""
USUAL = ['`P("shard")`', "`remat=True`", "`P()`", "HSDP"]


@QUIET
@each(ranks=SIMULATED)
@pytest.mark.parametrize("strategy", mark_seldom(STRATEGIES, *MAIN, "`Remat(save=)`", "`by_group`"), ids=without_ticks)
@pytest.mark.parametrize("transform", NOT_BY_DYNAMO, ids=without_ticks)
def test_simulated_ranks(transform: str, strategy: str, ranks: int) -> None:
    """Each rank has its slices of the derivative of the mean loss; what torch refuses there, it refuses in these words."""
    on_simulated_ranks(transform, strategy, ranks)


@seldom
@each(ranks=mark_seldom(SIMULATED, 2))
@pytest.mark.parametrize("strategy", mark_seldom(COMPILED_SIMULATED, "`codec=`"), ids=without_ticks)
def test_compiled_on_simulated_ranks(strategy: str, ranks: int) -> None:
    """So does the compiler."""
    on_simulated_ranks(BY_DYNAMO, strategy, ranks)


def on_simulated_ranks(transform: str, strategy: str, ranks: int) -> None:
    with hosted.elsewhere():  # for what rests on the host
        on, state = simulated(strategy, ranks)
        limit = LIMITS.get(transform)
        if limit:
            with pytest.raises(limit.error) as raised:
                limit.run(on, state)
            assert type(raised.value) is limit.error
            assert limit.message in str(raised.value)
        result = TRANSFORMS[transform].run(on, state)
    for rank in range(ranks):
        check(pytree.tree_map(lambda t, rank=rank: t[rank], detached(result)), transform, strategy, ranks, rank)


def on_real_ranks(rank: int, strategy: str, transforms: Iterable[str] = tuple(TRANSFORMS)) -> dict[str, Any]:
    """Of these transforms the result, or why there is none."""
    network = STRATEGIES[strategy].network
    if strategy in OF_COMPILED_UNITS:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        warnings.simplefilter("ignore", fs._call.compiled_unit.CompileWarning)
    out: dict[str, Any] = {}
    with everywhere(), hosted.elsewhere():  # for the device is the host
        spec = policy(strategy).on(mesh_of(**STRATEGIES[strategy].sizes(STRATEGIES[strategy].real)))
        state, frozen = start(network, spec, X[rank], COTANGENT[rank])
        of = Sharded(network, spec, frozen)
        for name in transforms:
            out[name] = result_or_traceback(TRANSFORMS[name], lambda fn: functools.partial(fn, of), state)
    return out


def result_or_traceback(transform: Transform, on: OnRanks, state: State) -> Any:
    try:
        return detached(transform.run(on, state))
    except Exception:
        return traceback.format_exc()


@pytest.fixture(scope="module", params=mark_seldom(MAIN, *USUAL), ids=without_ticks)
def real(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """Every transform that does not trace with one strategy, on all real ranks."""
    return request.param, run_on_real_ranks(request, request.param, AS_IT_RUNS)


def run_on_real_ranks(request: pytest.FixtureRequest, strategy: str, transforms: list[str]) -> list[dict[str, Any]]:
    pool: Pool = request.getfixturevalue(f"gloo{STRATEGIES[strategy].real}")
    return pool.run(on_real_ranks, strategy, transforms)


@pytest.mark.parametrize("transform", AS_IT_RUNS, ids=without_ticks)
def test_real_ranks(real: tuple[str, list[dict[str, Any]]], transform: str) -> None:
    """The same over a process group, whatever the transform."""
    check_real(*real, transform)


@pytest.mark.parametrize("strategy", COMPILED, ids=without_ticks)
def test_compiled_on_real_ranks(request: pytest.FixtureRequest, strategy: str) -> None:
    """The rest of them."""
    results = run_on_real_ranks(request, strategy, TRACED)
    for transform in TRACED:
        check_real(strategy, results, transform)


@at_most(8)
@each
@pytest.mark.parametrize("strategy", OF_MEMORY | OF_UNITS | OF_COMPILED_UNITS, ids=without_ticks)
@pytest.mark.parametrize("transform", AS_IT_RUNS, ids=without_ticks)
def test_other_strategies_on_real_ranks(request: pytest.FixtureRequest, transform: str, strategy: str) -> None:
    """The same of what is kept, on the host, in a codec or compiled, and of other ways to gather and to reduce."""
    check_real(strategy, run_on_real_ranks(request, strategy, [transform]), transform)


def check_real(strategy: str, results: list[dict[str, Any]], transform: str) -> None:
    if (strategy, transform) == ("`compile=`", "double backward") and isinstance(results[0][transform], str):
        # beyond Dynamo's limit of compilations it runs eagerly
        assert re.search(r"differentiates compiled code twice|requires create_graph=False", results[0][transform])
        return
    for rank, mine in enumerate(results):
        assert not isinstance(mine[transform], str), mine[transform]
        check(mine[transform], transform, strategy, len(results), rank)


def test_the_guide_has_the_table() -> None:
    """Word for word."""
    page = Path(__file__).parents[2] / "examples" / "guide" / "transforms.md"
    assert table() in page.read_text(), f"{page} should have:\n\n{table()}"


if __name__ == "__main__":
    print(table())
