"""Local units in what training does around the gradient, by compressors, with every other option of P, and in models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import test_compress_law
import torch
from collective_log import Collectives, world
from depth import at_most, depth, each, every, mark_seldom, seldom
from models import module_class, refused
from parity import subtracted
from ranks import mesh_of, real_ranks
from test_local import LAYERS, OPTIONS, Setting, batches, objective
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import funshard as fs
from funshard import Compile, P, Precision, Remat, averaging, policies
from funshard.collectives import Axis
from funshard.compress import Compressor, exact, powersgd, quantize
from funshard.testing._exact import ModelCall

Tree = dict[str, Tensor]
KINDS = ("pair", "experts", "replicated")
MICRO = 3


class Rank:
    """A rank's side of a case with micro-batches, and the same in one process."""

    def __init__(self, rank: int, sizes: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self.case = Setting(KINDS, sizes, options)
        self.whole, self.full, self.sizes = self.case.whole, self.case.full, self.case.sizes
        self.xs = torch.stack([batches(self.sizes) for _ in range(MICRO)], 1)  # [ranks, micro-batches, tokens, features]
        self.x, self.on = self.xs[rank], self.case.on(mesh_of(**self.sizes))
        self.spec, self.params = self.on.spec, self.on.params

    def loss(self, params: Tree, x: Tensor) -> Tensor:
        return self.on.loss(params, x)

    def expected(self) -> Tree:
        """The gradient of the mean over ranks and micro-batches."""
        return torch.func.grad(self.case.mean)(self.full, self.xs.flatten(0, 1))

    def check(self, grads: Tree, want: Tree | None = None, **tolerance: float) -> None:
        want, tolerance = self.expected() if want is None else want, tolerance or {"rtol": 1e-9, "atol": 1e-11}
        for name, got in fs.unshard(grads, self.spec).items():
            torch.testing.assert_close(got, want[name], **tolerance, msg=lambda m, n=name: n + m)


def norm(grads: Tree) -> Tensor:
    return torch.stack([g.norm() for g in grads.values()]).norm()


def summed(case: Rank) -> Tree:
    """The gradient by hand over micro-batches."""
    grads = [fs.grad(case.loss)(case.params, x) for x in case.x]
    return {key: torch.stack([g[key] for g in grads]).mean(0) for key in case.params}


# --- what is compared ---
def accumulated(case: Rank) -> None:
    case.check(summed(case))
    for keep in ("shards", "full"):
        grads, _ = fs.accumulate(case.loss, case.params, list(case.x), spec=case.spec, keep=keep)
        case.check(grads)


def updated_in_backward(case: Rank) -> None:
    """A step of SGD with a rate of 1 subtracts the gradient, clipped by the norm of all ranks' pieces."""
    want = case.expected()
    for max_norm in (None, 0.1):
        clip: Any = {"max_norm": max_norm, "clip": "previous", "norm": norm(want)} if max_norm else {}
        steps, total = subtracted(case.loss, case.params, list(case.x), case.spec, **clip)
        assert total is None or torch.allclose(total, norm(want))
        scale = 1.0 if max_norm is None else max_norm / (norm(want) + 1e-6)
        case.check(steps, {name: g * scale for name, g in want.items()})


def clipped(case: Rank) -> None:
    """The norm counts every element once: local ones of all ranks, replicated ones of one."""
    grads, want = summed(case), case.expected()
    scale = 0.1 / (norm(want) + 1e-6)
    found, total = fs.optim.clip_by_global_norm(grads, case.spec, 0.1)
    torch.testing.assert_close(total, norm(want))
    case.check(found, {name: g * scale for name, g in want.items()})
    torch.testing.assert_close(fs.optim.norms(grads, case.spec), {name: g.norm() for name, g in want.items()})
    dotted = sum((want[n] * p).sum() for n, p in case.full.items())
    torch.testing.assert_close(fs.optim.vdot(grads, case.params, case.spec), dotted)


def found_finite(case: Rank) -> None:
    """One element of one rank's piece that is not finite skips the step on every rank."""
    grads = summed(case)
    key = next(unit.key for unit in case.spec if unit.local_axes)
    if all(axis.rank == 0 for _, axis in case.spec.bound_mesh.axes):
        grads[key] = grads[key].clone().index_fill_(0, torch.tensor(0), float("inf"))
    init, unscale = fs.loss_scale.dynamic(case.spec, scale=4.0)
    assert not unscale(grads, init())[1].finite
    init, update = fs.optim.apply_if_finite(case.spec)(fs.optim.from_torch(torch.optim.SGD))
    params, state = update(grads, init(case.params), case.params)
    assert state.total == 1
    torch.testing.assert_close(params, case.params, rtol=0, atol=0)


def check_training(case: Rank, want: Tree, theirs: torch.optim.Optimizer, update: Any, params: Tree, state: Any) -> Any:
    """Check that parameters after a step for each batch are those of one process; return the state."""
    for i in range(MICRO):
        loss = case.case.mean(want, case.xs[:, i])
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        params, state = update(fs.grad(case.loss)(params, case.x[i]), state, params)
    case.check(params, {name: p.detach() for name, p in want.items()}, rtol=1e-6, atol=1e-8)
    return state


def gathered(case: Rank) -> None:
    """Whole parameters leave and enter, on every rank or on the first one."""
    full = fs.unshard(case.params, case.spec)
    assert all(torch.equal(full[name], p) for name, p in case.full.items())
    first = fs.unshard(case.params, case.spec, rank0_only=True)
    is_first = all(axis.rank == 0 for _, axis in case.spec.bound_mesh.axes)
    assert bool(first) == is_first
    assert all(torch.equal(p, case.full[name]) for name, p in first.items())
    back = fs.shard(first or None, case.spec, src=0)
    sent = fs.shard(case.whole, case.spec, src=1)
    for key, p in case.params.items():
        assert torch.equal(back[key], p)
        assert sent[key].shape == p.shape


CHECKS: dict[str, Callable[[Rank], None]] = {
    "accumulate": accumulated,
    "update_in_backward": updated_in_backward,
    "clip": clipped,
    "finite": found_finite,
    "gather_full": gathered,
}
MESHES = [{"shard": 2, "tensor": 2}, {"expert": 2, "shard": 2}, {"tensor": 2, "expert": 2}, {"replicate": 2, "expert": 2}]


@each(options=depth(mark_seldom(OPTIONS[:2], OPTIONS[0]), OPTIONS), sizes=mark_seldom(MESHES, MESHES[0]))
@real_ranks(4)
def test_training_with_local_units(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Every part of a training step speaks of the same gradient."""
    case = Rank(rank, sizes, options)
    for part in CHECKS.values():
        part(case)


# --- optimizers ---
@at_most(3)
@each(sizes=MESHES, options=[{"axis": "shard"}, {"axis": None}])
@real_ranks(4)
def test_an_elementwise_optimizer(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Steps with an option of a parameter's own, and the state by parameter name. None of them asks whether a unit is local."""
    case = Rank(rank, {"shard": 1, **sizes}, options)
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    want = {name: p.clone().requires_grad_() for name, p in case.full.items()}
    bias = [p for name, p in want.items() if name.endswith("bias")]
    others = [p for name, p in want.items() if not name.endswith("bias")]
    theirs = torch.optim.AdamW([{"params": others}, {"params": bias, "lr": 0.05}], **settings)
    of_bias = lambda name, _: {"lr": 0.05} if name.endswith("bias") else {}  # noqa: E731
    init, update = fs.optim.from_torch(torch.optim.AdamW, **settings, spec=case.spec, options=of_bias)
    params = {key: p.clone() for key, p in case.params.items()}
    state = check_training(case, want, theirs, update, params, init(params))
    for slot in ("exp_avg", "exp_avg_sq"):
        slices = {key: values[slot] for key, values in state.items()}
        case.check(slices, {name: theirs.state[p][slot] for name, p in want.items()}, rtol=1e-6, atol=1e-8)


@at_most(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_derivative_of_a_rate(max_norm: float | None) -> None:
    """Through a clipped step of SGD, whose rate all ranks share: units with and without local axes have parts of it."""
    case, rate = Setting(("experts", "pair"), {"tensor": 2, "expert": 2}, OPTIONS[0]), torch.tensor(0.05, dtype=torch.float64)

    def rank(mesh: Any, x: Tensor) -> Tensor:
        _, on, params, _ = local = case.on(mesh)
        loss, (init, update) = local.loss, fs.optim.sgd(0.1, spec=on)

        def after(lr: Tensor) -> Tensor:
            step = lambda grads, state, params: update(grads, state, params, lr=lr)  # noqa: E731
            if max_norm is None:
                return loss(fs.update_in_backward(step, loss, params, init(params), [x], spec=on).params, x)
            grads, _ = fs.optim.clip_by_global_norm(fs.accumulate(loss, params, [x], spec=on)[0], on, max_norm)
            return loss(step(grads, init(params), params)[0], x)

        return torch.func.grad(after)(rate)

    grads = torch.func.grad(case.mean)(case.full)
    scale = 1.0 if max_norm is None else max_norm / (norm(grads) + 1e-6)
    want = torch.func.grad(lambda lr: case.mean({name: p - lr * scale * grads[name] for name, p in case.full.items()}))(rate)
    found = fs.testing.spmd(rank, case.sizes)(case.xs)
    torch.testing.assert_close(found, want.expand_as(found))


# --- compressors: over a local axis nothing is sent, and the mean divides by its size ---
LOSSLESS: dict[str, Callable[[Any], Compressor[Any]]] = {"exact": exact} | test_compress_law.LOSSLESS
TOLERANCES = {"each alone": {"rtol": 1e-5, "atol": 1e-6}}


def reduced(compressor: Compressor[Any], spec: fs.PartitionSpec, loss: Callable[[Tree], Tensor], params: Tree) -> Tree:
    return compressor.reduce(fs.grad(loss)(fs.unshard(params, spec, whole=False)), compressor.init(spec), spec)[0]


@each(options=mark_seldom(OPTIONS[:2], OPTIONS[0]))
@pytest.mark.parametrize("sizes", mark_seldom(MESHES, MESHES[1]), ids=str)
@real_ranks(4)
def test_compressors_on_real_ranks(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Over all axes, and by a compressor that takes some of them and leaves the others to exact reductions.

    Units with local axes are exact, whatever the rank of PowerSGD.
    """
    case = Rank(rank, sizes, options)
    case.xs = case.xs[:, :1]
    want, loss = case.expected(), lambda p: case.loss(p, case.x[0])
    for name, make in LOSSLESS.items():
        for axes in [None] if name in ("exact", "switch") else [None, ("replicate", "expert")]:
            case.check(reduced(make(axes), case.spec, loss, case.params), want, **TOLERANCES.get(name, {}))
    lossy = fs.unshard(reduced(powersgd(1), case.spec, loss, case.params), case.spec)
    for name in (name for unit in case.spec if unit.local_axes for param in unit.params for name in param.names):
        torch.testing.assert_close(lossy[name], want[name], rtol=1e-9, atol=1e-11)


def test_sums_of_float16_do_not_overflow() -> None:
    """Gradients of local units of 16 bits are divided before they are added, by all ranks that the mean is over."""
    model = torch.nn.ParameterDict({"w": torch.zeros(2, 8, dtype=torch.float16)})
    spec = fs.policies.whole(fs.P("shard", local={"expert": 0}))(model)
    large = torch.finfo(torch.float16).max

    def rank(mesh: Any, own: Tensor) -> Tree:
        return exact().reduce({"w": own}, (), spec.on(mesh))[0]

    found = fs.testing.spmd(rank, {"expert": 2, "shard": 2})(torch.full((4, 2, 8), large, dtype=torch.float16))
    assert torch.equal(found[""], torch.full_like(found[""], large / 2))


def test_nothing_crosses_a_local_axis() -> None:
    """Of 64 ranks only those along the split axis exchange the gradient."""
    with world(64):
        model = torch.nn.ParameterDict({"w": torch.zeros(2, 32, 32)})
        spec = fs.policies.whole(fs.P("shard", local={"expert": 0}))(model).on(mesh_of(expert=16, shard=4))
        for compressor in (exact(), quantize(), powersgd()):
            with Collectives() as sent:
                compressor.reduce({"w": torch.ones(2, 32, 32)}, compressor.init(spec), spec)
            assert {one.ranks for one in sent.all} == {4}
            assert max(one.numel for one in sent.all) == model["w"].numel()


def test_local_axes_are_among_the_others() -> None:
    """Without an axis that a unit is local over, gradients would be that axis's size too large: refused."""
    model = torch.nn.ParameterDict({"w": torch.zeros(2, 8)})
    spec = fs.policies.whole(fs.P(local={"expert": 0}))(model).on({"node": 2, "expert": 2})
    message = r"compress.exact: unit '' is local over axis 'expert', .*: expected axes= with it, got \['node'\]"
    refused(ValueError, message, lambda: exact("node").reduce({}, (), spec))
    exact("expert").reduce({}, (), spec)
    spec = fs.policies.whole(fs.P(local={"expert": 0}))(model).on({"expert": 2})  # wholes are no gradients of pieces
    refused(ValueError, r"'w'.*expected.*\[2, 8\], got .*\[4, 8\]", lambda: exact().reduce({"w": torch.zeros(4, 8)}, (), spec))


# --- with every other option of P and every form of a step ---
AOT = Compile(backend="aot_eager")
OFFLOAD = ("params", "activations")


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    del ctx, args, kwargs
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


TOLERATED = ((1e-9, 1e-11), (2e-2, 2e-3), (0.15, 0.02))
EXACT, HALF, SHORT = ({"rtol": rtol, "atol": atol} for rtol, atol in TOLERATED)
CASES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "replicated": ({"axis": None}, EXACT),
    "compiled units": ({"compile": AOT}, EXACT),
    "summed in bf16": ({"precision": Precision(reduce=torch.bfloat16)}, SHORT),
    "offloaded, recomputed": ({"remat": True, "offload": OFFLOAD}, EXACT),
    "fp16, gathered once": ({"reshard": False, "precision": Precision(param=torch.float16)}, HALF),
    "matrix products saved": ({"remat": Remat(save=save_matmuls)}, EXACT),
    "compiled units, offloaded": ({"compile": AOT, "offload": "params"}, EXACT),
}
"""The kinds of ways that units take: none of them asks whether a unit is local, only its division does, which dtypes change."""


class Mixed(Rank):
    """A rank's side, whose loss is in float64 whatever the units compute in. Layers alone are compiled, not the root."""

    def __init__(self, rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
        of_root: dict[str, Any] = {"axis": "shard"} | {name: value for name, value in options.items() if name != "compile"}
        super().__init__(rank, sizes, of_root)
        layers = {f"layers.{i}": P(**{**of_root, **options}, local=LAYERS[kind][1]) for i, kind in enumerate(KINDS)}
        self.spec = fs.policies.by_path({"": P(**of_root), **layers})(self.on.model).on(self.spec.bound_mesh)
        self.on = self.on._replace(spec=self.spec)

    def mean(self, params: Tree, xs: Tensor) -> Tensor:
        return torch.stack([self.loss(params, x) for x in xs]).mean()


def check_options(rank: int, sizes: dict[str, int], name: str, *steps: Callable[[Any], Any]) -> None:
    options, tolerance = CASES[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own reads
        warnings.simplefilter("ignore", fs._call.compiled_unit.CompileWarning)  # in torch.func the modules run as they are
        case = Mixed(rank, sizes, options)
        want = case.expected()
        for step in steps:
            grads = step(case.mean)(case.params, case.x)
            case.check(grads, want, **tolerance)
            torch.testing.assert_close(fs.optim.global_norm(grads, case.spec).double(), norm(want), **tolerance)


SIZES = [{"tensor": 2, "expert": 2}, {"expert": 2, "shard": 2}]


@at_most(1)
@every(sizes=mark_seldom(SIZES, SIZES[0]), name=mark_seldom(CASES, "replicated", *[*CASES][3:5]))
@real_ranks(4)
def test_options_on_real_ranks(rank: int, name: str, sizes: dict[str, int]) -> None:
    """Every kind of option, by the schedule and by data flow."""
    check_options(rank, sizes, name, fs.grad, torch.func.grad)


@seldom
@every(sizes=SIZES, name=CASES)
@real_ranks(4)
def test_compiled_steps_on_real_ranks(rank: int, name: str, sizes: dict[str, int]) -> None:
    """And in one graph."""
    check_options(rank, sizes, name, lambda loss: fs.compile(lambda p, xs: fs.grad(loss)(p, xs), backend="aot_eager"))


@pytest.mark.parametrize("codec", [fs.codecs.int8(), fs.codecs.nf4()], ids=str)
def test_frozen_local_units_at_rest(codec: fs.Codec) -> None:
    """Slices of which some are padding alone; every rank decodes the same whole parameters."""
    case = Setting(KINDS, {"tensor": 2, "expert": 2}, OPTIONS[0])
    for layer in range(2):
        case.model.get_submodule(f"layers.{layer}").requires_grad_(False)
    paths = {f"layers.{i}": P("shard", local=LAYERS[KINDS[i]][1], at_rest=codec) for i in range(2)}
    case.spec = fs.policies.by_path({"": P("shard"), **paths})(case.model)

    def rank(mesh: Any, x: Tensor) -> tuple[Tensor, Tree]:
        on = case.on(mesh)
        trained, frozen = fs.partition(on.params, on.spec)
        grads = fs.grad(lambda p: on.loss({**frozen, **p}, x))(trained)
        return fs.optim.global_norm(grads, on.spec), fs.unshard(on.params, on.spec)

    found, decoded = fs.testing.spmd(rank, case.sizes)(case.xs)
    values = {name: p[0] for name, p in decoded.items()}
    for name, p in decoded.items():
        assert torch.equal(p, values[name].expand_as(p))
        torch.testing.assert_close(values[name], case.full[name], rtol=0.3, atol=0.3)
    trained = {name: p for name, p in values.items() if "layers.2" in name or "head" in name}
    want = torch.func.grad(lambda p: case.mean({**values, **p}))(trained)
    torch.testing.assert_close(found, norm(want).expand(4))


def test_uneven_batches() -> None:
    """A weight on a rank's gradients, which have parts of other ranks' losses, is refused: `weight_share` is right."""
    case, weights = Setting(KINDS, {"shard": 2, "expert": 2}, OPTIONS[0]), torch.tensor([1.0, 3.0, 2.0, 5.0]).double()

    def rank(mesh: Any, x: Tensor, weight: Tensor) -> Tree:
        on = case.on(mesh)
        share = fs.weight_share(weight, on.spec)
        message = r"reduce_grads: weight=: unit 'layers.1' is local over axis 'expert', .*weight_sh"
        refused(NotImplementedError, message, lambda: fs.reduce_grads(case.full, on.spec, weight=weight))
        return fs.unshard(fs.grad(lambda p: share * on.loss(p, x, reduce="sum"))(on.params), on.spec)

    def weighted(p: Tree) -> Tensor:
        return sum(w * case.mean(p, x[None]) for w, x in zip(weights, case.xs, strict=True)) / weights.sum()

    want = torch.func.grad(weighted)(case.full)
    for name, g in fs.testing.spmd(rank, case.sizes)(case.xs, weights).items():
        torch.testing.assert_close(g, want[name].expand_as(g), rtol=1e-9, atol=1e-11)


def twice(self: Any, x: Tensor, axis: Any = None) -> Tensor:
    for layer in (self.a, self.b):
        x = layer(x).tanh()
        x = x if axis is None else fs.collectives.gather_slices(x.T.contiguous(), axis, reduce="sum").T
    return x


def tied(ranks: int = 1) -> nn.Module:
    """Two column-parallel maps of one weight."""
    model = module_class("Tied", lambda: {name: nn.Linear(8, 8 // ranks, bias=False) for name in "ab"}, twice)()
    model.b.weight = model.a.weight
    return model


@pytest.mark.parametrize("globs", [0, {"a.weight": 0}, {"b.weight": 0}], ids=str)
def test_tied_pieces(globs: Any) -> None:
    """A glob may match either name of a tied weight; globs that disagree are refused."""
    whole, local = tied().double(), tied(2).double()
    spec = fs.policies.whole(P("shard", local={"tensor": globs}))(local)
    batch = torch.randn(2, 1, 5, 8, dtype=torch.float64).expand(2, 2, 5, 8).flatten(0, 1)

    def loss(call: Any, x: Tensor) -> Tensor:
        return objective(call(x, call.axis("tensor")))

    fs.testing.assert_exact(loss, whole, spec.on({"shard": 2, "tensor": 2}), batch, local=local)
    with pytest.raises(ValueError, match=r"for its names .'a.weight', 'b.weight'.: expected one dimension"):
        fs.policies.whole(P(local={"tensor": {"a.*": 0, "b.*": 1}}))(local)


CHOICES = [OPTIONS[0], OPTIONS[4], {"axis": "shard", "offload": OFFLOAD}]
"""Split, recomputed and offloaded."""


# --- dropout ---
FEATURES, HIDDEN = 4, 12


class Dropped(nn.Module):
    """Columns and rows between normalised activations and results that ranks share, which are dropped, as hidden features are.

    A rank draws for its columns, all draw for what they share.
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, HIDDEN // ranks), nn.Linear(HIDDEN // ranks, FEATURES, bias=False)

    def forward(self, x: Tensor, columns: list[int], shared: int, axis: Axis | None = None) -> Tensor:
        """With the seeds of the columns that this module has, by rank, and of what ranks share."""
        x = self.norm(self.first(x))
        x = x * mask(shared, x)
        hidden = self.up(x).tanh()
        parts = zip(columns, hidden.chunk(len(columns), -1), strict=True)
        y = self.down(hidden * torch.cat([mask(seed, part) for seed, part in parts], -1))
        y = x + (y if axis is None else fs.collectives.all_reduce(y, axis, reduce="sum"))
        return y * mask(shared, y)


def mask(seed: int, like: Tensor) -> Tensor:
    """Dropout's, drawn from a seed."""
    torch.manual_seed(seed)
    return nn.functional.dropout(torch.ones_like(like), 0.4)


@at_most(1)
@each(options=CHOICES, sizes=[{"shard": 2, "tensor": 2}, {"tensor": 4, "shard": 1}, {"tensor": 1, "shard": 4}])
@real_ranks(4)
def test_dropout(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Masks differ on all ranks, or on those that have other rows; the whole model draws the same, and has the statistics."""
    warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)  # after assert_exact, which compares them
    whole, local = Dropped().double(), Dropped(sizes["tensor"]).double()
    names = {"up.*": 0, "down.weight": 1}
    spec = fs.policies.by_path({"": fs.P(**options, local={"tensor": names})})(local).on(mesh_of(**sizes))
    at = spec.bound_mesh["shard"].rank
    x, seeds = torch.randn(sizes["shard"], 6, FEATURES)[at].double(), [100 * at + part for part in range(sizes["tensor"])]

    def loss(call: ModelCall, x: Tensor) -> Tensor:
        axis = call.axis("tensor")
        return objective(call(x, seeds if axis is None else [seeds[axis.rank]], 7 + at, axis))

    def sharded(params: Tree, x: Tensor) -> Tensor:
        return loss(ModelCall(lambda *args: fs.functional_call(local, params, args, spec=spec), spec), x)

    fs.testing.assert_exact(loss, whole, spec, x, local=local, order=2)
    params = fs.shard(dict(whole.named_parameters()), spec)
    grads = fs.grad(sharded)(params, x)
    for got in (torch.func.grad(sharded)(params, x), fs.accumulate(sharded, params, [x, x], spec=spec)[0]):
        torch.testing.assert_close(got, grads)


# --- pieces by name ---
PIECES = nn.Linear(2, 2).double()
"""Half of the rows of a linear map over "tensor"; the bias is replicated."""
SPEC = policies.whole(P("shard", local={"tensor": {"weight": 0}}))(PIECES)
AXES = {"tensor": 2, "shard": 2}
WHOLE = {"weight": torch.arange(8.0, dtype=torch.float64).view(4, 2), "bias": torch.tensor([3.0, -1.0], dtype=torch.float64)}


def my_pieces(spec: fs.PartitionSpec) -> fs.Params:
    """The rank's piece of the weight, and the bias."""
    return {"weight": fs.collectives.scatter(WHOLE["weight"], spec.axis("tensor")), "bias": WHOLE["bias"]}


def vector(tree: fs.Params) -> Tensor:
    return torch.cat([x.flatten() for x in tree.values()])


def of_all_ranks(f: Callable[[fs.PartitionSpec], Any]) -> Any:
    return fs.testing.spmd(lambda mesh, _: f(SPEC.on(mesh)), AXES)(torch.zeros(4))


def measures(spec: fs.PartitionSpec) -> Tensor:
    """Norms and an inner product of pieces and of whole tensors by name."""
    trees = my_pieces(spec), WHOLE
    each = ([*(fs.optim.global_norm(t, spec, p=p) for p in NORMS), fs.optim.vdot(t, t, spec)] for t in trees)
    return torch.stack([x for some in each for x in some])


NORMS = (1.0, 2.0, float("inf"))
WANTED = torch.stack([*(torch.linalg.vector_norm(vector(WHOLE), p) for p in NORMS), vector(WHOLE).square().sum()]).repeat(2)


def test_the_derivative_of_clipped_pieces() -> None:
    """Of a sum over them, of which each rank has a part."""

    def loss(tree: fs.Params) -> Tensor:
        scale = 1.0 / (vector(tree).norm() + 1e-6)
        return (tree["weight"] * scale).pow(3).sum() + (tree["bias"] * scale).cos().sum()

    def of_pieces(tree: fs.Params, spec: fs.PartitionSpec) -> Tensor:
        clipped, _ = fs.optim.clip_by_global_norm(tree, spec, 1.0)
        weight = fs.collectives.gather_slices(clipped["weight"], spec.axis("tensor"))
        return weight.pow(3).sum() + clipped["bias"].cos().sum()

    got = of_all_ranks(lambda spec: torch.func.grad(of_pieces)(my_pieces(spec), spec))
    want = torch.func.grad(loss)(WHOLE)
    torch.testing.assert_close(got["weight"], want["weight"].view(2, 1, 2, 2).expand(2, 2, 2, 2).flatten(0, 1))
    torch.testing.assert_close(got["bias"], want["bias"].expand(4, 2))


def averages(spec: fs.PartitionSpec) -> tuple[fs.Params, fs.Params, fs.Params]:
    """Averages of pieces that drifted apart over "shard", and the pieces."""
    before = my_pieces(spec)
    index = fs.collectives.scatter(torch.arange(2.0), spec.axis("shard"))[0]
    drifted = {name: x + index for name, x in before.items()}
    init, update = averaging.periodic(spec, 1)
    return averaging.average(drifted, spec), update(drifted, init())[0], before


@real_ranks(4)
def test_norms_count_every_piece_once_and_averages_keep_them_apart(rank: int) -> None:
    """On simulated ranks and on real ones."""
    torch.testing.assert_close(of_all_ranks(measures), WANTED.expand(4, -1))
    torch.testing.assert_close(measures(SPEC.on(mesh_of(**AXES))), WANTED)
    for *found, before in (of_all_ranks(averages), averages(SPEC.on(mesh_of(**AXES)))):
        for got in found:
            torch.testing.assert_close(got, {name: x + 0.5 for name, x in before.items()})


def normed(mesh: Any, x: Tensor) -> Tensor:
    """Channels of which each rank of "tensor" has some, by their statistics over all ranks."""
    model = nn.Sequential(fs.SyncBatchNorm(2)).double()
    spec = policies.whole(P("shard", local={"tensor": 0}))(model).on(mesh)
    whole = {name: p.detach().repeat(2) for name, p in model.named_parameters()}
    return fs.functional_call(model, fs.shard(whole, spec), (x,), spec=spec)


TWO, INNER = SPEC.on({"tensor": 2, "shard": 1}), P("shard", local={"t": 0})
WHOLE_IN_A_CALL = r"expected shape \[2, 2\], got \[4, 2\]; it is local over .'tensor': 0.: .*as from unshard\(whole=False\)"
BY_LAYER = {"tensor": {"layers.?.up.*": 0, "layers.?.down.weight": 1}}
DISAGREE = r"parameter 'weight': .*'weight': 0.* for its names .'weight'.: expected one dimension"
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "buffers averaged over a local axis": (
        r"average_buffers: unit '.*' is local over axis 'tensor'.*expected axes=",
        lambda: averaging.average_buffers({"mean": torch.zeros(2)}, TWO)),
    "pieces averaged over it": (
        "is split over 'tensor', where each rank has other elements: expected axes without it",
        lambda: of_all_ranks(lambda spec: averaging.average(my_pieces(spec), spec, axes="tensor"))),
    "tensors of neither shape": (
        r"parameter 'weight': expected the whole, \[4, 2\], or this rank's piece of it, \[2, 2\], got \[3, 2\]; it is local",
        lambda: fs.optim.global_norm({"weight": torch.zeros(3, 2)}, SPEC.on(AXES))),
    "whole parameters in a call": (
        WHOLE_IN_A_CALL, lambda: fs.functional_call(PIECES, WHOLE, torch.zeros(2), spec=TWO)),
    "whole gradients to reduce": (WHOLE_IN_A_CALL, lambda: fs.reduce_grads(WHOLE, TWO)),
    "a module of pieces": (  # which with one seed on all ranks would be the same values
        r"parameter 'weight' of unit '.*': expected shape \[4, 2\], got \[2, 2\]; .*the whole is expected",
        lambda: fs.shard(PIECES, SPEC.on(AXES), rank=3)),
    "a piece that a policy leaves": (
        r"'layers.\?.down.weight' matches no parameter of its units: .* what a policy leaves is replicated",
        lambda: fs.by_size(60, p=P("shard", local=BY_LAYER))(Setting(("pair", "replicated", "pair"), {"tensor": 2}, {}).model)),
    **{f"globs that disagree, {[*globs]}": (
        DISAGREE, lambda globs=globs: policies.whole(P(local={"t": globs}))(nn.Linear(2, 2, bias=False)))
        for globs in ({"*": 1, "weight": 0}, {"weight": 0, "*": 1})},
    "statistics over a local axis": (
        r"SyncBatchNorm '0': unit '.*' is local over axis 'tensor'.*expected axes=",
        lambda: fs.testing.spmd(normed, AXES)(torch.zeros(4, 5, 2).double())),
    "a weight tied to one outside": (
        r"'a.weight', also \['b.weight'\], is in unit '', above all its uses, .* of 'b' says",
        lambda: fs.by_path({"b": INNER})(tied())),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_of_pieces(what: str) -> None:
    """Named, and what is expected."""
    match, call = REFUSED[what]
    refused(ValueError, match, call)


def test_what_is_no_piece_is_as_ever() -> None:
    """Other axes, one rank along the axis, globs that agree, and a unit above that is local, too."""
    assert averaging.average_buffers({"mean": torch.zeros(2)}, TWO, axes="shard")
    assert fs.shard(PIECES, SPEC.on({"tensor": 1, "shard": 1}))
    policies.whole(P(local={"t": {"*": 0, "weight": 0}}))(nn.Linear(2, 2, bias=False))
    (unit,) = fs.by_path({"": INNER, "b": INNER})(tied())
    assert unit.local_axes == ("t",)


@pytest.mark.parametrize("dims", [-1, True, 0.0, None, "0", "up.*", ["up.*"], [0], (0, 1), ((0, "*"),), {}, {"*": -1}, {0: 0}])
def test_what_is_no_dimension(dims: Any) -> None:
    """Neither a number nor globs."""
    with pytest.raises(TypeError, match=r"P: local: axis 't': expected a dimension \(0 or more\), or dimensions by glob.*got"):
        P("shard", local={"t": dims})
