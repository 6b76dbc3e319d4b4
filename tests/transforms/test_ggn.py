"""ggnvp and fishervp are products with explicit matrices, in the memory of a gradient and two tensors of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import world
from depth import each, every, seldom
from models import refused
from parity import shards_of, strategies
from ranks import real_ranks
from test_hvp import Cube
from test_memory import Peak, no_collector
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P, curvature
from funshard._transforms import products

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
RANKS, SAMPLES, CLASSES = 4, 3, 4


class Normed(nn.Module):
    """A weight of a layer norm, dropout, and a function without a forward-mode rule if there is one."""

    def __init__(self, cube: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.cube = nn.Linear(5, 5), nn.LayerNorm(5), cube

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cube(torch.tanh(self.norm(self.linear(x))))


def network(cube: Callable[[Tensor], Tensor] = lambda x: x**3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), Normed(cube), nn.Linear(5, CLASSES)).double()


MODEL, WITHOUT_RULE = network(), network(Cube.apply)
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
V = {name: torch.linspace(-1, 2, p.numel(), dtype=p.dtype).view_as(p).cos() for name, p in FULL.items()}
X = torch.randn(RANKS, SAMPLES, 3, dtype=torch.float64)
Y = torch.randint(CLASSES, (RANKS, SAMPLES))
Y[1, 0] = -100
TARGETS = torch.randn(RANKS, SAMPLES, CLASSES, dtype=torch.float64)
POLICIES = {name: fs.by_type(Normed, p=p) for name, p in strategies("shard", "keep", "remat").items()}
POLICIES["replicated"] = fs.policies.always(P())
Loss = Callable[[Tensor], Tensor]


def log_sum(y: Tensor) -> Loss:
    return lambda z: z.logsumexp(-1).square().sum() + (z * y[:, None]).sum()


def squared(t: Tensor) -> Loss:
    return lambda z: (z - t).square().mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Loss], Callable[[Tensor, Tensor], Loss]]] = {
    "cross-entropy": (lambda y, t: curvature.cross_entropy(y), lambda y, t: lambda z: F.cross_entropy(z, y)),
    "smoothed, divided": (
        lambda y, t: curvature.cross_entropy(y, label_smoothing=0.2, ignore_index=1, reduce=7.0),
        lambda y, t: lambda z: F.cross_entropy(z, y.clamp(0), label_smoothing=0.2, ignore_index=1, reduction="sum") / 7,
    ),
    "squared error": (lambda y, t: squared(t), lambda y, t: squared(t)),
    "by hvp": (lambda y, t: log_sum(y), lambda y, t: log_sum(y)),
    "by hvp in reverse": (lambda y, t: lambda z: F.mse_loss(z, t), lambda y, t: lambda z: (z - t).square().mean()),
}
"""A convex loss as it is given, and as plain torch differentiates it."""


def labels(name: str) -> Tensor:
    return Y.clamp(0) if name == "smoothed, divided" else Y


def flat(tree: fs.Params) -> Tensor:
    return torch.cat([tree[name].flatten() for name in FULL])


def unflat(vector: Tensor) -> fs.Params:
    parts = vector.split([p.numel() for p in FULL.values()])
    return {name: part.view_as(FULL[name]) for name, part in zip(FULL, parts, strict=True)}


def jacobian(f: Callable[[fs.Params], Tensor]) -> Tensor:
    columns = torch.func.jacrev(f)(FULL)
    return torch.cat([columns[name].flatten(1) for name in FULL], 1)


def plain(params: fs.Params, x: Tensor) -> Tensor:
    return torch.func.functional_call(MODEL, params, (x,))


@functools.cache
def matrix(name: str, ranks: int) -> Tensor:
    """The mean over ranks of J' H J, or of each sample's g g', written out."""
    total = torch.zeros(())
    for x, y, t in zip(X[:ranks], labels(name), TARGETS, strict=False):
        if name == "fisher":
            g = jacobian(lambda p: F.cross_entropy(plain(p, x), y, reduction="none"))
            total = total + g.T @ g / len(x)
        else:
            loss = LOSSES[name][1](y, t)
            h = torch.func.hessian(lambda z: loss(z.view(SAMPLES, CLASSES)))(plain(FULL, x).flatten())
            j = jacobian(lambda p: plain(p, x).flatten())
            total = total + j.T @ h @ j
    return total / ranks


def product(name: str, model: nn.Module, spec: fs.PartitionSpec, x: Tensor, y: Tensor, t: Tensor) -> fs.Params:
    """As a rank computes it, from shards."""
    outputs = functools.partial(fs.functional_call, model, args=(x,), spec=spec)
    params, v = fs.shard(FULL, spec), fs.shard(V, spec)
    if name == "fisher":
        return products.fishervp(lambda p: F.cross_entropy(outputs(p), y, reduction="none"), params, v)
    return products.ggnvp(outputs, LOSSES[name][0](y, t), params, v)


@each
@pytest.mark.parametrize("model", [MODEL, WITHOUT_RULE], ids=["", "no forward rule"])
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=["shard", "hsdp"])
@every(policy=POLICIES, name=[*LOSSES, "fisher"])
def test_simulated_ranks_have_the_explicit_matrix(name: str, policy: str, sizes: dict[str, int], model: nn.Module) -> None:
    on = POLICIES[policy](model)
    ranks = 4 if "replicate" in sizes else 2
    run = fs.testing.spmd(lambda mesh, *batch: product(name, model, on.on(mesh), *batch), sizes)
    got = run(X[:ranks], labels(name)[:ranks], TARGETS[:ranks])
    want = unflat(matrix(name, ranks) @ flat(V))
    assert max(w.abs().max() for w in want.values()) > 1e-3
    for rank in range(ranks):
        assert_close({key: g[rank] for key, g in got.items()}, fs.shard(want, on.on(sizes), rank=rank), **CLOSE)


# --- what else is a right result ---
def alone(outputs: Callable[[fs.Params], Any] | None = None, v: fs.Params | None = None, y: Tensor = Y[0]) -> fs.Params:
    spec = POLICIES["shard"](MODEL)
    params = fs.shard(FULL, spec)
    call = outputs or (lambda p: fs.functional_call(MODEL, p, (X[0],), spec=spec))
    return products.ggnvp(call, curvature.cross_entropy(y), params, fs.shard(V, spec) if v is None else v)


def test_transforms_around_it() -> None:
    """A batch of vectors by vmap; and a derivative with respect to params, by differences."""
    spec = POLICIES["shard"](MODEL)
    vectors = {key: torch.stack([x, 2 * x.sin()]) for key, x in fs.shard(V, spec).items()}
    together = torch.vmap(lambda v: alone(v=v))(vectors)
    for i in range(2):
        assert_close({key: x[i] for key, x in together.items()}, alone(v={k: x[i] for k, x in vectors.items()}), **CLOSE)

    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    spec = fs.policies.always()(model)  # without a layer norm, of whose jvp torch's derivative is wrong
    params = fs.shard(model, spec)
    v = fs.random_like(params, spec, 0)

    def quadratic(p: fs.Params) -> Tensor:
        gv = products.ggnvp(lambda p: fs.functional_call(model, p, (X[0],), spec=spec), curvature.cross_entropy(Y[0]), p, v)
        return fs.optim.vdot(gv, v, spec)

    slope = fs.optim.vdot(torch.func.grad(quadratic)(params), v, spec)
    up, down = (quadratic(fs.optim.axpy(by, v, params)) for by in (1e-5, -1e-5))
    assert_close(slope, (up - down) / 2e-5, rtol=1e-6, atol=1e-8)


@real_ranks(2)
def test_outputs_may_be_a_tree_and_a_penalty_of_shards_counts_once(rank: int) -> None:
    spec = POLICIES["shard"](MODEL).bound
    params, v = fs.shard(FULL, spec), fs.shard(V, spec)
    cross_entropy = curvature.cross_entropy(Y[rank])

    def outputs(p: fs.Params) -> dict[str, Any]:
        return {"logits": fs.functional_call(MODEL, p, (X[rank],), spec=spec), "p": p}

    got = products.ggnvp(outputs, lambda z: cross_entropy(z["logits"]) + sum((s**2).sum() for s in z["p"].values()), params, v)
    assert_close(got, fs.shard(unflat(matrix("cross-entropy", 2) @ flat(V) + 2 * flat(V)), spec), **CLOSE)


def test_both_runs_draw_the_same_dropout() -> None:
    """Otherwise it is not even symmetric; and the state of the generator is that after one run."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, CLASSES)).double()
    spec, params = shards_of(fs.policies.always(), model)
    a, b = (fs.random_like(params, spec, seed) for seed in (0, 1))

    def run(v: fs.Params) -> fs.Params:
        torch.manual_seed(0)
        return products.ggnvp(lambda p: fs.functional_call(model, p, (X[0],), spec=spec), squared(TARGETS[0]), params, v)

    assert_close(fs.optim.vdot(a, run(b), spec), fs.optim.vdot(b, run(a), spec), **CLOSE)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    model(X[0])
    assert torch.equal(after, torch.get_rng_state())


def test_functions_of_plain_tensors() -> None:
    """no_grad in forward is a constant, results have no graph unless arguments have one, and what is unused has zeros."""
    w, x = {"w": torch.randn(4, dtype=torch.float64)}, X[0].flatten()[:4]

    def outputs(p: fs.Params) -> Tensor:
        with torch.no_grad():
            scale = p["w"].norm()
        return p["w"] * x / scale

    got = products.ggnvp(outputs, lambda z: z.square().sum() / 2, w, w)["w"]
    assert_close(got, w["w"] * (x / w["w"].norm()) ** 2, **CLOSE)
    ones, leaf = {"w": torch.ones(2)}, torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not products.fishervp(lambda p: p["w"] ** 2, {"w": leaf}, ones)["w"].requires_grad
    got = products.fishervp(lambda p: p["w"] ** 2, {"w": leaf}, ones)["w"]  # mean of (2 w v)^2, differentiable
    assert_close(torch.autograd.grad(got.sum(), leaf)[0], torch.tensor([4.0, 4.0]))
    p = {"used": torch.ones(2), "unused": torch.ones(3)}
    got = products.fishervp(lambda p: p["used"] * 2, p, p)
    assert_close(got, {"used": torch.tensor([2.0, 2.0]), "unused": torch.zeros(3)})
    assert_close(products.fishervp(lambda p: torch.ones(2), p, p), {k: torch.zeros_like(x) for k, x in p.items()})
    assert products.ggnvp(lambda p: torch.ones(2), squared(torch.ones(2)), {}, {}) == {}


def test_logits_of_other_shapes_sizes_and_precisions() -> None:
    """Of tokens the matrix is that of all of them in a row, as of a language model; of saturated logits zero, not NaN; in
    bfloat16 the Hessian is computed in float32."""
    z, u = torch.randn(2, 2, 3, CLASSES, dtype=torch.float64)
    tokens = torch.randint(CLASSES, (2, 3))
    in_a_row = curvature.cross_entropy(tokens.flatten()).hessian_product(z.flatten(0, 1), u.flatten(0, 1))
    assert_close(curvature.cross_entropy(tokens).hessian_product(z, u), in_a_row.view_as(z), **CLOSE)
    loss = curvature.cross_entropy(torch.tensor([0, 1]))
    z, u = torch.tensor([[1e30, 0.0], [0.0, -1e4]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert_close(loss.hessian_product(z, u), torch.zeros(2, 2))
    z, u = torch.randn(2, 2, 50, dtype=torch.float64)
    want = torch.func.jvp(torch.func.grad(lambda z: F.cross_entropy(z, torch.tensor([0, 1]))), (z,), (u,))[1]
    got = loss.hessian_product(z.bfloat16(), u.bfloat16())
    assert got.dtype is torch.bfloat16
    assert_close(got.double(), want, rtol=3e-2, atol=1e-4)


# --- refusals ---
def test_what_is_refused() -> None:
    spec = POLICIES["shard"](MODEL)
    params = fs.shard(FULL, spec)
    v = fs.shard(V, spec)
    with pytest.raises(ValueError, match=r"ggnvp: v\['1'\]: expected \[44\] torch.float64 as in params, got none"):
        alone(v={key: x for key, x in v.items() if key != "1"})
    with pytest.raises(ValueError, match=r"ggnvp: v\['1'\]: expected .* torch.float64 as in params, got .* torch.float32"):
        alone(v=v | {"1": v["1"].float()})
    refused(ValueError, r"cross_entropy: expected logits of shape \[2, 'classes'\] .* got \[3, 4\]", lambda: alone(y=Y[0, :2]))
    with pytest.raises(TypeError, match=r"cross_entropy: labels: expected whole numbers, got torch\.float64"):
        curvature.cross_entropy(X[0])
    with pytest.raises(ValueError, match="reduce: expected 'mean', 'sum' or a positive number"):
        curvature.cross_entropy(Y[0], reduce=0.0)
    with pytest.raises(TypeError, match="ggnvp: outputs: expected a tensor, as the loss takes, got dict"):
        alone(lambda p: {"logits": p["1"]})
    with pytest.raises(TypeError, match=r"ggnvp: outputs\['n'\].*: expected a floating point tensor"):
        alone(lambda p: {"y": p["1"], "n": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="ggnvp: expected the Hessian's product to be like the outputs"):
        products.ggnvp(lambda p: p["1"], products.ConvexLoss(torch.sum, lambda z, u: u[:1]), params, v)
    with pytest.raises(ValueError, match=r"fishervp: losses: expected a loss for each sample, \[samples\], got \[\]"):
        products.fishervp(lambda p: p["1"].sum(), params, v)
    with pytest.raises(TypeError, match=r"grad: argument.*: expected a floating point tensor"):
        products.fishervp(lambda p: p["n"], {"n": torch.ones(2, dtype=torch.int64)}, {"n": torch.ones(2, dtype=torch.int64)})


def test_a_function_that_changes_something_is_refused() -> None:
    cache: list[Tensor] = []

    def outputs(p: fs.Params) -> Tensor:
        cache.append(p["w"].detach())
        return p["w"] * len(cache)

    w = {"w": torch.ones(2)}
    with pytest.raises(RuntimeError, match="ggnvp: the function of params gives other outputs when it runs again"):
        products.ggnvp(outputs, squared(torch.ones(2)), w, w)


@seldom
def test_compiled_it_is_refused() -> None:
    w = {"w": torch.ones(2)}
    step = torch.compile(lambda p: products.fishervp(lambda p: p["w"], p, p), fullgraph=True, backend="eager")
    refused(torch._dynamo.exc.Unsupported, "run their function twice with the same random numbers", lambda: step(w))


# --- memory ---
@pytest.mark.parametrize("name", ["ggnvp", "fishervp"])
def test_memory_beside_that_of_a_gradient(name: str) -> None:
    """At 50,000 words: at most two tensors of the logits' size more."""
    words, width, tokens = 50_000, 4, 16
    with world(2):
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, words, bias=False))
        spec = fs.by_type(nn.Linear)(model).bound
        params, x, y = fs.shard(model, spec), torch.randn(tokens, width), torch.randint(words, (tokens,))
        v = fs.random_like(params, spec, 0)
        outputs = functools.partial(fs.functional_call, model, args=(x,), spec=spec)
        steps: dict[str, Callable[[], Any]] = {
            "grad": lambda: fs.grad(lambda p: F.cross_entropy(outputs(p), y))(params),
            "ggnvp": lambda: products.ggnvp(outputs, curvature.cross_entropy(y), params, v),
            "fishervp": lambda: products.fishervp(lambda p: F.cross_entropy(outputs(p), y, reduction="none"), params, v),
        }
        peaks = {}
        for which in ("grad", name):
            with no_collector(), Peak() as peak:
                steps[which]()
            peaks[which] = peak.bytes
    assert peaks[name] - peaks["grad"] <= 2 * tokens * words * 4
