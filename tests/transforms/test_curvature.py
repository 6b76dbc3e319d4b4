"""fs.curvature and its products beside explicit matrices and SciPy; the same numbers on any number of ranks."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from collective_log import world
from depth import at_most, depth, every, seldom
from hypothesis import given
from models import refused, with_forward
from parity import policies, shards_of
from ranks import mesh_of, real_ranks
from test_hvp import Cube
from test_memory import Peak, no_collector
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P, curvature
from funshard._slices.random_slices import philox
from funshard._transforms import products

CLASSES = 4
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def network(activation: Callable[[Tensor], Tensor] = torch.tanh) -> nn.Sequential:
    torch.manual_seed(1)
    activated = with_forward(nn.Tanh, lambda self, x: activation(x))()
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), activated, nn.Linear(5, CLASSES)).double()


MODEL = network()
CUBED, WITHOUT_RULE = network(lambda x: torch.tanh(x) ** 3), network(lambda x: Cube.apply(torch.tanh(x)))
"""The same function, with and without a forward-mode rule."""
X, Y = torch.randn(4, 6, 3, dtype=torch.float64), torch.randint(CLASSES, (4, 6))
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
POLICY = fs.policies.override(fs.by_type(nn.Linear), fs.by_path({"1": P()}))
NAMES = ["hessian", "ggn", "fisher"]


def operators(spec: fs.PartitionSpec, x: Tensor, y: Tensor) -> dict[str, curvature.Operator]:
    params = fs.shard(FULL, spec)
    outputs = functools.partial(fs.functional_call, MODEL, args=(x,), spec=spec)
    losses = lambda p: F.cross_entropy(outputs(p), y, reduction="none")  # noqa: E731
    return {
        "hessian": curvature.hessian(lambda p: F.cross_entropy(outputs(p), y), params, spec),
        "ggn": curvature.ggn(outputs, curvature.cross_entropy(y), params, spec),
        "fisher": curvature.fisher(losses, params, spec),
    }


def flat(tree: fs.Params) -> Tensor:
    return torch.cat([tree[name].flatten() for name in FULL])


def rows(tree: Any) -> Tensor:
    return torch.cat([tree[key].flatten(1) for key in FULL], 1)


def plain(params: fs.Params, x: Tensor, model: nn.Module = MODEL) -> Tensor:
    return torch.func.functional_call(model, params, (x,))


def fisher_matrix(x: Tensor, y: Tensor, model: nn.Module = MODEL) -> Tensor:
    g = rows(torch.func.jacrev(lambda p: F.cross_entropy(plain(p, x, model), y, reduction="none"))(FULL))
    return g.T @ g / len(g)


def gauss_newton_matrix(x: Tensor, loss: Callable[[Tensor], Tensor], model: nn.Module = MODEL) -> Tensor:
    j = rows(torch.func.jacrev(lambda p: plain(p, x, model).flatten())(FULL))
    return j.T @ torch.func.hessian(lambda z: loss(z.view(-1, CLASSES)))(plain(FULL, x, model).flatten()) @ j


@functools.cache
def matrix(name: str) -> Tensor:
    """Of the joined batch, written out."""
    x, y = X.flatten(0, 1), Y.flatten()
    if name == "hessian":  # double backward, a row at a time: torch.func.hessian is wrong for a layer norm
        leaves = {key: p.clone().requires_grad_() for key, p in FULL.items()}
        first = torch.autograd.grad(F.cross_entropy(plain(leaves, x), y), [*leaves.values()], create_graph=True)
        grads = torch.cat([g.flatten() for g in first])
        second = [torch.autograd.grad(g, [*leaves.values()], retain_graph=True, materialize_grads=True) for g in grads]
        return torch.stack([torch.cat([x.flatten() for x in row]) for row in second])
    return fisher_matrix(x, y) if name == "fisher" else gauss_newton_matrix(x, lambda z: F.cross_entropy(z, y))


def everything(rank: int, spec: fs.PartitionSpec) -> dict[str, Any]:
    """What each function gives, as whole vectors and numbers, in the model's order."""
    world = math.prod(size for _, size in spec.bound_mesh.sizes)
    x, y = X.flatten(0, 1).chunk(world)[rank], Y.flatten().chunk(world)[rank]
    whole = lambda tree: flat(fs.unshard(tree, spec))  # noqa: E731
    out: dict[str, Any] = {}
    for name, operator in operators(spec, x, y).items():
        operator.check_symmetric()
        start = fs.random_like(operator.params, spec, 3)
        found = curvature.lanczos(operator, start, 12)
        local = curvature.lanczos(operator, start, 8, reorthogonalize=False)
        density = curvature.slq(operator, steps=6, probes=2).density(torch.linspace(-1, 2, 7), 0.1)
        estimate = curvature.hutchinson(operator, probes=3)
        solution = curvature.cg(operator, start, damping=2.0, tolerance=1e-12)
        out[name] = {
            "product": whole(operator @ start),
            "lanczos": (found.diagonal, found.off_diagonal, found.residuals[-1:], whole(found.vector(-1)).abs()),
            "local": (local.diagonal, local.off_diagonal),
            "density": density,
            "trace": (estimate.trace, estimate.standard_error, whole(estimate.diagonal)),
            "cg": whole(solution.x),
            "converged": torch.tensor(solution.converged),
        }
    return out


PROBES = depth(4, 40)
alone = functools.cache(functools.partial(everything, 0, POLICY(MODEL).on({"shard": 1})))


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_explicit_matrix(name: str) -> None:
    """On one rank; all eigenvalues from as many steps as there are distinct ones."""
    a, got = matrix(name), alone()[name]
    values, vectors = torch.linalg.eigh(a)
    start = flat(fs.unshard(fs.random_like(fs.shard(FULL, POLICY(MODEL)), POLICY(MODEL), 3), POLICY(MODEL)))
    assert_close(got["product"], a @ start, rtol=1e-10, atol=1e-10)
    assert_close(got["cg"], torch.linalg.solve(a + 2 * torch.eye(len(a)), start), rtol=1e-9, atol=1e-10)
    assert got["converged"]
    spec = POLICY(MODEL).bound
    operator = operators(spec, X.flatten(0, 1), Y.flatten())[name]
    found = curvature.lanczos(operator, fs.random_like(operator.params, spec, 0), 100)
    assert_close(found.values[[0, -1]], values[[0, -1]], rtol=1e-9, atol=1e-11)
    assert found.remainder < 1e-10
    assert len(found.values) <= len(values)
    assert_close(flat(fs.unshard(found.vector(-1), spec)).abs(), vectors[:, -1].abs(), rtol=1e-6, atol=1e-7)
    assert all(rows[0].numel() == spec.shard_numel(spec.by_key[key]) for key, rows in (found.basis or {}).items())
    gram = sum(rows @ rows.T for rows in (found.basis or {}).values())
    assert_close(gram, torch.eye(len(found.values), dtype=torch.float64), rtol=0, atol=1e-12)
    moments = curvature.slq(operator, steps=100, probes=PROBES)
    spread = 2 * math.sqrt(float((a - a.diag().diag()).square().sum()) / PROBES)
    assert abs(moments.trace(lambda t: t) - a.trace()) < 3 * spread
    exact = curvature.hutchinson(operator, probes=PROBES)
    assert abs(exact.trace - moments.trace(lambda t: t)) < 1e-9  # the same vectors, and quadrature exact for them
    assert_close(flat(fs.unshard(exact.diagonal, spec)).sum(), exact.trace)


@seldom
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"shard": 4}, {"replicate": 2, "shard": 2}], ids=["two", "four", "hsdp"])
@real_ranks(lambda sizes: math.prod(sizes.values()))
def test_ranks_are_one(rank: int, sizes: dict[str, int]) -> None:
    """What each function gives is what it gives in one process."""
    got = everything(rank, POLICY(MODEL).on(mesh_of(**sizes)))
    for name in NAMES:
        assert_close(got[name], alone()[name], rtol=1e-7, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@seldom
@real_ranks(2)
def test_scipy_on_two_ranks(rank: int) -> None:
    """Its eigenvalues."""
    pytest.importorskip("scipy")
    from scipy.sparse.linalg import eigsh

    spec = POLICY(MODEL).bound
    x, y = (t.flatten(0, 1).chunk(spec.bound_mesh["shard"].size)[rank] for t in (X, Y))
    for operator in operators(spec, x, y).values():
        theirs = operator.to_scipy()
        n = operator.numel
        assert theirs.shape == (n, n)
        assert n == sum(p.numel() for p in FULL.values())
        start = fs.random_like(operator.params, spec, 0)
        whole = flat(fs.unshard(start, spec))
        top = eigsh(theirs, k=3, v0=whole.numpy(), which="LA", return_eigenvectors=False)
        found = curvature.lanczos(operator, start, 40)
        assert_close(found.values[-3:], torch.tensor(sorted(top)), rtol=1e-9, atol=1e-10)


# --- what ends early, and what is refused ---
def diagonal(values: Tensor, dtype: torch.dtype = torch.float64) -> curvature.Operator:
    """An operator with these eigenvalues."""
    model = nn.Linear(len(values), 1, bias=False, dtype=dtype)
    spec = fs.policies.whole(P(align=1))(model).bound
    return curvature.Operator(lambda v: {"": values.to(dtype) * v[""]}, fs.shard(model, spec), spec)


@every(dtype=[torch.float64, torch.float32], size=[1.0, 1e-25, 1e25])
def test_tiny_and_huge_operators_and_low_rank(size: float, dtype: torch.dtype) -> None:
    """Squares of their elements are not representable in float32; the iteration ends where the space does."""
    operator = diagonal(size * torch.tensor([3.0, 3.0, 2.0, 0.0, 0.0, 0.0]).double(), dtype)
    start = {"": torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0, 1.0], dtype=dtype)}
    found = curvature.lanczos(operator, start, 6)
    digits = {"rtol": 1e-5, "atol": 1e-6 * size}
    assert found.remainder <= 1e-6 * size
    assert_close(found.values[-2:], size * torch.tensor([2.0, 3.0]).double(), **digits)
    assert found.values[0].abs() <= 1e-6 * size
    solved = curvature.cg(operator, {"": (size * torch.tensor([3.0, 6.0, 2.0, 0, 0, 0]).double()).to(dtype)}, tolerance=1e-5)
    assert solved.converged
    assert_close(solved.x[""], torch.tensor([1.0, 2.0, 1.0, 0, 0, 0], dtype=dtype), rtol=1e-4, atol=1e-5)
    assert not curvature.cg(operator, start).converged  # a right side that is no product
    a = 1e-30 if size < 1e9 else 1e30  # the solution is a / size, which float32 must hold
    far = curvature.cg(operator + size, {key: a * x for key, x in start.items()}, tolerance=1e-5)
    assert far.converged
    expected = start[""] / torch.tensor([4.0, 4.0, 3.0, 1.0, 1.0, 1.0], dtype=dtype)
    assert_close(far.x[""] / a * size, expected, rtol=1e-3, atol=1e-4)


def test_early_ends_of_cg_and_lanczos() -> None:
    operator, b = diagonal(torch.tensor([2.0, -1.0, 1.0])), {"": torch.tensor([1.0, 1.0, 1.0]).double()}
    solution = curvature.cg(operator, b)
    assert solution.negative_curvature
    assert not solution.converged
    assert solution.residual == pytest.approx(float((b[""] - (operator @ solution.x)[""]).norm() / b[""].norm()))
    assert curvature.cg(operator, b, damping=2.0).converged
    assert curvature.cg(operator, {"": 0 * b[""]}).x[""].tolist() == [0, 0, 0]
    again = curvature.cg(operator + 2, b, start=curvature.cg(operator, b, damping=2.0).x)
    assert again.converged
    assert again.products == 1
    values = torch.linspace(0, 1, 50).double()
    values[-1] = 9
    operator, start = diagonal(values), {"": torch.ones(50).double()}
    found = curvature.lanczos(operator, start, 50, tolerance=1e-6)
    assert len(found.values) < 25
    assert found.values[-1].item() == pytest.approx(9, rel=1e-10)
    assert found.residuals[-1] <= 1e-6 * 9
    many = curvature.lanczos(operator, start, 60, reorthogonalize=False)
    assert len(many.values) == 60
    assert (many.values - 9).abs().min() < 1e-9
    refused(ValueError, "the vectors were not kept", lambda: many.vector(0))
    spectrum = curvature.slq(operator, steps=10, probes=2)
    grid = torch.linspace(-5, 15, 2001).double()
    assert torch.trapezoid(spectrum.density(grid, 0.2), grid).item() == pytest.approx(1, rel=1e-6)
    assert spectrum.trace(torch.square).item() == pytest.approx(float(values.square().sum()), rel=1e-9)  # signs: exact


def test_what_is_refused() -> None:
    operator, v = diagonal(torch.ones(3)), {"": torch.ones(3).double()}
    wrongs: dict[str, Callable[[], Any]] = {
        r"curvature: the vector: '': expected \[3\] torch.float64 .* got \[2\]": lambda: operator @ {"": v[""][:2]},
        r"'other': expected none": lambda: operator @ (v | {"other": v[""]}),
        r"lanczos: expected a vector of finite values, got nan": lambda: curvature.lanczos(operator, {"": v[""] * math.nan}, 2),
        r"lanczos: expected a vector that is not zero": lambda: curvature.lanczos(operator, {"": v[""] * 0}, 2),
        r"lanczos: steps: expected a whole number from 1 on": lambda: curvature.lanczos(operator, v, 0),
        r"cg: damping: expected a number from 0 on, got -1": lambda: curvature.cg(operator, v, damping=-1),
        r"curvature: damping: expected a finite number": lambda: operator + math.inf,
        r"slq: probes": lambda: curvature.slq(operator, steps=2, probes=0),
        r"axpy: 'b' is in y only": lambda: fs.optim.axpy(1.0, v, v | {"b": v[""]}),
    }
    for message, call in wrongs.items():
        refused(ValueError, message, call)
    refused(TypeError, r"the vector: expected a dict of tensors", lambda: operator @ v[""])
    refused(TypeError, r"unsupported operand", lambda: operator + "1")
    for dtype in (torch.bfloat16, torch.complex64):
        refused(TypeError, rf"expected float32 or float64, got {dtype}", lambda: diagonal(torch.ones(3), dtype))
    not_finite = curvature.Operator(lambda v: {"": v[""] * math.inf}, operator.params, operator.spec)
    refused(ValueError, r"lanczos: expected a vector of finite values", lambda: curvature.lanczos(not_finite, v, 2))
    skew = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double()
    with pytest.raises(ValueError, match=r"check_symmetric: .* expected a symmetric operator"):
        curvature.Operator(lambda v: {"": skew @ v[""]}, operator.params, operator.spec).check_symmetric()


@real_ranks(2)
def test_a_mixture_of_shards_and_gathered_values_is_found(rank: int) -> None:
    """Shards and gathered values in one loss: not what its name says, and not symmetric."""
    spec = POLICY(MODEL).bound
    params = fs.shard(FULL, spec)

    def losses(p: fs.Params) -> Tensor:
        logits = fs.functional_call(MODEL, p, (X[rank],), spec=spec)
        return F.cross_entropy(logits, Y[rank], reduction="none") + sum((s**2).sum() for s in p.values())

    with pytest.raises(ValueError, match="are its outputs a mixture of shards and gathered values"):
        curvature.fisher(losses, params, spec).check_symmetric()


def test_simulated_ranks() -> None:
    """Products and hutchinson run there; what reads values on the host says so."""

    def rank(mesh: Any, x: Tensor, y: Tensor) -> Any:
        operator = operators(POLICY(MODEL).on(mesh), x, y)["ggn"]
        start = fs.random_like(operator.params, operator.spec, 3)
        with pytest.raises(RuntimeError, match="lanczos: the host reads values, which it cannot on simulated ranks"):
            curvature.lanczos(operator, start, 3)
        return fs.unshard(operator @ start, operator.spec), curvature.hutchinson(operator, probes=3).trace

    product, trace = fs.testing.spmd(rank, 4)(X, Y)
    assert_close(flat({key: t[2] for key, t in product.items()}), alone()["ggn"]["product"], rtol=1e-9, atol=1e-10)
    assert_close(trace[1], alone()["ggn"]["trace"][0], rtol=1e-9, atol=1e-10)


# --- products with the Gauss-Newton and the Fisher matrix: of other losses, and of functions of plain tensors ---
IGNORED = Y.clone()
IGNORED[1, 0] = -100
V = {name: torch.linspace(-1, 2, p.numel(), dtype=p.dtype).view_as(p).cos() for name, p in FULL.items()}
TARGETS = torch.randn(4, 6, CLASSES, dtype=torch.float64)
Loss = Callable[[Tensor], Tensor]


def log_sum(y: Tensor) -> Loss:
    return lambda z: z.logsumexp(-1).square().sum() + (z * y[:, None]).sum()


def squared(t: Tensor) -> Loss:
    return lambda z: (z - t).square().mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Loss], Callable[[Tensor, Tensor], Loss]]] = {
    "cross-entropy": (lambda y, t: curvature.cross_entropy(y), lambda y, t: lambda z: F.cross_entropy(z, y)),
    "smoothed, divided": (
        lambda y, t: curvature.cross_entropy(y, label_smoothing=0.2, ignore_index=1, reduce=7.0),
        lambda y, t: lambda z: F.cross_entropy(z, y, label_smoothing=0.2, ignore_index=1, reduction="sum") / 7,
    ),
    "squared error": (lambda y, t: squared(t), lambda y, t: squared(t)),
    "by hvp": (lambda y, t: log_sum(y), lambda y, t: log_sum(y)),
    "by hvp in reverse": (lambda y, t: lambda z: F.mse_loss(z, t), lambda y, t: lambda z: (z - t).square().mean()),
}
"""A convex loss as it is given, and as plain torch differentiates it."""


def labels(name: str) -> Tensor:
    return Y if name == "smoothed, divided" else IGNORED


def unflat(vector: Tensor) -> fs.Params:
    parts = vector.split([p.numel() for p in FULL.values()])
    return {name: part.view_as(FULL[name]) for name, part in zip(FULL, parts, strict=True)}


def mean_matrix(name: str, model: nn.Module = MODEL) -> Tensor:
    """The mean over two ranks of J' H J, or of each sample's g g', written out."""
    batches = [*zip(X, labels(name), TARGETS, strict=True)][:2]
    each = (
        fisher_matrix(x, y, model) if name == "fisher" else gauss_newton_matrix(x, LOSSES[name][1](y, t), model)
        for x, y, t in batches
    )
    return torch.stack([*each]).mean(0)


@pytest.mark.parametrize("model", [CUBED, WITHOUT_RULE], ids=["", "no forward rule"])
@every(name=[*LOSSES, "fisher"])
def test_products_are_those_of_the_explicit_matrix(name: str, model: nn.Module) -> None:
    """On simulated ranks; other strategies are in test_matrix.py."""

    def product(mesh: Any, x: Tensor, y: Tensor, t: Tensor) -> fs.Params:
        spec = POLICY(model).on(mesh)
        outputs = functools.partial(fs.functional_call, model, args=(x,), spec=spec)
        params, v = fs.shard(FULL, spec), fs.shard(V, spec)
        if name == "fisher":
            return products.fishervp(lambda p: F.cross_entropy(outputs(p), y, reduction="none"), params, v)
        return products.ggnvp(outputs, LOSSES[name][0](y, t), params, v)

    got = fs.testing.spmd(product, 2)(X[:2], labels(name)[:2], TARGETS[:2])
    want, spec = unflat(mean_matrix(name, CUBED) @ flat(V)), POLICY(model).on({"shard": 2})
    assert max(w.abs().max() for w in want.values()) > 1e-3
    for rank in range(2):
        assert_close({key: g[rank] for key, g in got.items()}, fs.shard(want, spec, rank=rank), **CLOSE)


def own_product(outputs: Callable[[fs.Params], Any] | None = None, v: fs.Params | None = None, y: Tensor = Y[0]) -> fs.Params:
    spec = POLICY(MODEL)
    params = fs.shard(FULL, spec)
    call = outputs or (lambda p: fs.functional_call(MODEL, p, (X[0],), spec=spec))
    return products.ggnvp(call, curvature.cross_entropy(y), params, fs.shard(V, spec) if v is None else v)


def test_a_batch_of_vectors() -> None:
    """By vmap."""
    spec = POLICY(MODEL)
    vectors = {key: torch.stack([x, 2 * x.sin()]) for key, x in fs.shard(V, spec).items()}
    together = torch.vmap(lambda v: own_product(v=v))(vectors)
    for i in range(2):
        assert_close({key: x[i] for key, x in together.items()}, own_product(v={k: x[i] for k, x in vectors.items()}), **CLOSE)


@real_ranks(2)
def test_outputs_may_be_a_tree_and_a_penalty_of_shards_counts_once(rank: int) -> None:
    spec = POLICY(MODEL).bound
    params, v = fs.shard(FULL, spec), fs.shard(V, spec)
    cross_entropy = curvature.cross_entropy(IGNORED[rank])

    def outputs(p: fs.Params) -> dict[str, Any]:
        return {"logits": fs.functional_call(MODEL, p, (X[rank],), spec=spec), "p": p}

    got = products.ggnvp(outputs, lambda z: cross_entropy(z["logits"]) + sum((s**2).sum() for s in z["p"].values()), params, v)
    assert_close(got, fs.shard(unflat(mean_matrix("cross-entropy") @ flat(V) + 2 * flat(V)), spec), **CLOSE)


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


def test_products_that_are_refused() -> None:
    spec = POLICY(MODEL)
    params = fs.shard(FULL, spec)
    v = fs.shard(V, spec)
    with pytest.raises(ValueError, match=r"ggnvp: v\['1'\]: expected \[12\] torch.float64 as in params, got none"):
        own_product(v={key: x for key, x in v.items() if key != "1"})
    words = r"cross_entropy: expected logits of shape \[2, 'classes'\] .* got \[6, 4\]"
    refused(ValueError, words, lambda: own_product(y=Y[0, :2]))
    with pytest.raises(TypeError, match=r"cross_entropy: labels: expected whole numbers, got torch\.float64"):
        curvature.cross_entropy(X[0])
    with pytest.raises(ValueError, match="reduce: expected 'mean', 'sum' or a positive number"):
        curvature.cross_entropy(Y[0], reduce=0.0)
    with pytest.raises(TypeError, match="ggnvp: outputs: expected a tensor, as the loss takes, got dict"):
        own_product(lambda p: {"logits": p["1"]})
    with pytest.raises(TypeError, match=r"ggnvp: outputs\['n'\].*: expected a floating point tensor"):
        own_product(lambda p: {"y": p["1"], "n": torch.ones(2, dtype=torch.int64)})
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


# --- random_like: one vector however the parameters are sharded ---
LINEARS = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, bias=False), nn.LayerNorm(7))
VALUES = {name: p.detach() for name, p in LINEARS.named_parameters()}
POLICIES = policies({"0": P(), "1": P("shard"), "2": P("shard")}, "sharded", "whole", "replicated")
POLICIES["aligned"] = fs.policies.whole(P("shard", align=64))
DISTRIBUTIONS = ["normal", "rademacher"]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_answers(counter: Any, key: Any, words: Any) -> None:
    """The known answers of Random123, by numbers and by tensors."""
    assert philox(counter, key) == words
    got = philox(tuple(torch.tensor([x]) for x in counter), tuple(torch.tensor(x) for x in key))
    assert tuple(int(word) for word in got) == words


@at_most(1)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@given(data=st.data())
def test_equal_for_every_policy_and_any_number_of_ranks(distribution: Any, data: st.DataObject) -> None:
    """Bit by bit, and as of the full parameters; padding is zero."""
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    ranks, seed = data.draw(st.integers(1, 5)), data.draw(st.integers(-(2**70), 2**70))
    spec = policy(LINEARS).on({"shard": ranks})
    want = fs.random_like(VALUES, spec, seed, distribution=distribution)
    for rank in range(ranks):
        got = fs.random_like(fs.shard(VALUES, spec, rank=rank), spec, seed, distribution=distribution, rank=rank)
        assert_close(got, fs.shard(want, spec, rank=rank), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    """Moments, tails, and nothing in common between neighbours, parameters and seeds."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(300, 301, dtype=dtype)) for name in "ab"})
    spec = fs.policies.whole()(model)
    x, y = (fs.random_like({"a": model["a"], "b": model["b"]}, spec, seed) for seed in (0, 1))
    for tree in (x, y):
        values = tree["a"].flatten()
        assert values.dtype == dtype
        parts = [values.float()] if not dtype.is_complex else [2**0.5 * values.real, 2**0.5 * values.imag]
        for part in parts:
            assert abs(float(part.mean())) < 0.015
            assert abs(float(part.var()) - 1) < 0.025
            assert abs(float((part**4).mean()) - 3) < 0.15
            assert abs(float((part.abs() < 0.6745).float().mean()) - 0.5) < 0.01
            assert 3.8 < float(part.abs().max()) < 6.8
    wide = torch.complex128 if dtype.is_complex else torch.float64
    streams = torch.stack([t[name].flatten().to(wide)[i : i + 90_000] for t in (x, y) for name in "ab" for i in range(5)])
    others = (streams @ streams.mH / 90_000 - torch.eye(len(streams))).abs()
    assert float(others.max()) < 0.03


def test_signs_are_equally_likely() -> None:
    model = nn.Linear(300, 301)
    spec = fs.policies.whole()(model)
    shard = fs.random_like(fs.shard(model, spec), spec, 5, distribution="rademacher")
    signs = fs.unshard(shard, spec)["weight"]
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.02
    assert abs(float((signs[:, 1:] * signs[:, :-1]).mean())) < 0.02


def test_a_seed_that_is_a_tensor() -> None:
    """Gives what the number does, also in a batch of them, and compiled."""
    spec, params = shards_of(POLICIES["aligned"], LINEARS)
    want = [fs.random_like(params, spec, seed)[""] for seed in (3, -4)]
    batch = torch.vmap(lambda seed: fs.random_like(params, spec, seed))(torch.tensor([3, -4]))
    assert_close(batch[""], torch.stack(want), rtol=0, atol=0)
    assert_close(fs.random_like(params, spec, torch.tensor(3))[""], want[0], rtol=0, atol=0)
    compiled = torch.compile(lambda seed: fs.random_like(params, spec, seed), fullgraph=True, backend="eager")
    assert_close(compiled(torch.tensor(3))[""], want[0], rtol=0, atol=0)


def test_memory_order_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter in another memory format; and where it is more than is worked on at once."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    full = {name: p.detach() for name, p in model.named_parameters()}
    spec = fs.policies.whole()(model).on({"shard": 3})
    want = fs.random_like(full, spec, 1)
    monkeypatch.setattr("funshard._slices.random_slices.CHUNK", 5)
    for rank in range(3):
        got = fs.random_like(fs.shard(full, spec, rank=rank), spec, 1, rank=rank)
        assert_close(got, fs.shard(want, spec, rank=rank), rtol=0, atol=0)


def test_random_vectors_that_are_refused() -> None:
    spec, params = shards_of(fs.policies.always(), LINEARS)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: fs.random_like(params, spec, 0.5), TypeError, "seed: expected a whole number"),
        (lambda: fs.random_like(params, spec, 0, distribution="uniform"), ValueError, "expected 'normal' or 'rademacher'"),
        (lambda: fs.random_like({"0": torch.ones(3)}, spec, 0), ValueError, "unit '0': expected this rank's slice of"),
        (lambda: fs.random_like({"9": torch.ones(3)}, spec, 0), ValueError, "'9' is no unit and no parameter"),
        (lambda: fs.random_like({"0.bias": torch.ones(3)}, spec, 0), ValueError, r"'0.bias': expected shape \[5\], got \[3\]"),
        (lambda: fs.random_like({"0": params["0"].int()}, spec, 0), TypeError, "'0': expected a floating point tensor"),
    ]
    for call, error, message in wrong:
        refused(error, message, call)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    encoded = fs.policies.whole(P("shard", at_rest=fs.codecs.int8()))(frozen)
    with pytest.raises(ValueError, match=re.escape("expected no random vector of it")):
        fs.random_like(fs.shard(frozen, encoded), encoded, 0)
