"""Local units together with every other option of P and every form of a step: gradients and the global norm of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import at_most, every, mark_seldom, seldom
from ranks import real_ranks
from test_local import LAYERS, OPTIONS, Setting, objective
from test_local_training import KINDS, Rank, Tree, norm
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import funshard as fs
from funshard import Compile, P, Precision, Remat

AOT = Compile(backend="aot_eager")
OFFLOAD = ("params", "activations")


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    del ctx, args, kwargs
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


EXACT, SINGLE, HALF, SHORT = (
    {"rtol": rtol, "atol": atol} for rtol, atol in ((1e-9, 1e-11), (1e-4, 1e-6), (2e-2, 2e-3), (0.15, 0.02))
)
CASES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "replicated": ({"axis": None}, EXACT),
    "gathered once": ({"reshard": False}, EXACT),
    "compiled units": ({"compile": AOT}, EXACT),
    "summed in bf16": ({"precision": Precision(reduce=torch.bfloat16)}, SHORT),
    "offloaded, recomputed": ({"remat": True, "offload": OFFLOAD}, EXACT),
    "fp16, gathered once": ({"reshard": False, "precision": Precision(param=torch.float16)}, HALF),
    "bf16, offloaded": ({"offload": "params", "precision": Precision(param=torch.bfloat16)}, SHORT),
    "matrix products saved": ({"remat": Remat(save=save_matmuls)}, EXACT),
    "compiled units, recomputed": ({"compile": AOT, "remat": True}, EXACT),
    "compiled units, offloaded": ({"compile": AOT, "offload": "params"}, EXACT),
    "bf16, compiled units": ({"compile": AOT, "precision": Precision(param=torch.bfloat16)}, SHORT),
    "reduced in float32": ({"precision": Precision(param=torch.float32)}, SINGLE),
    "gathered once, offloaded": ({"reshard": False, "offload": "params"}, EXACT),
}


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


def in_backward(case: Mixed) -> Tree:
    """The step of SGD with a rate of 1."""
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0, donate=True)
    params = {key: p.clone() for key, p in case.params.items()}
    result = fs.update_in_backward(update, case.loss, params, init(params), list(case.x), spec=case.spec)
    return {key: case.params[key] - p for key, p in result.params.items()}


def scaled(case: Mixed) -> Tree:
    init, unscale = fs.loss_scale.dynamic(case.spec, scale=1024.0)
    state = init(case.params)
    grads, state = unscale(fs.grad(lambda p: state.scale * case.mean(p, case.x))(case.params), state)
    assert state.finite
    return grads


def by_autograd(case: Mixed) -> Tree:
    params = {key: p.clone().requires_grad_() for key, p in case.params.items()}
    case.mean(params, case.x).backward()
    return {key: p.grad for key, p in params.items() if p.grad is not None}


def under_vmap(case: Mixed) -> Tree:
    """Of two copies of the parameters, the second one's."""

    def scaled(scale: Tensor) -> Tree:
        return fs.grad(case.mean)({key: p * scale for key, p in case.params.items()}, case.x)

    return {key: g[1] for key, g in torch.vmap(scaled)(torch.tensor([0.5, 1.0], dtype=torch.float64)).items()}


STEPS: dict[str, Callable[[Mixed], Tree]] = {
    "fs.compile": lambda case: fs.compile(lambda p, xs: fs.grad(case.mean)(p, xs), backend="aot_eager")(case.params, case.x),
    "torch.func.grad": lambda case: torch.func.grad(case.mean)(case.params, case.x),
    "autograd": by_autograd,
    "vmap": under_vmap,
    "no_sync": lambda case: fs.accumulate(case.loss, case.params, list(case.x), spec=case.spec, keep="full")[0],
    "update_in_backward": in_backward,
    "loss_scale": scaled,
}


def run_steps(rank: int, sizes: dict[str, int], options: dict[str, Any], tolerance: dict[str, Any], steps: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own reads
        warnings.simplefilter("ignore", fs._call.compiled_unit.CompileWarning)  # in torch.func the modules run as they are
        case = Mixed(rank, sizes, options)
        want = case.expected()
        for name in steps:
            grads = STEPS[name](case)
            case.check(grads, want, **tolerance)
            torch.testing.assert_close(fs.optim.global_norm(grads, case.spec).double(), norm(want), **tolerance)


SIZES = [{"tensor": 2, "expert": 2}, {"expert": 2, "shard": 2}]


@at_most(1)
@every(sizes=mark_seldom(SIZES, SIZES[0]), name=mark_seldom(CASES, "replicated", *[*CASES][4:7]))
@real_ranks(4)
def test_options_on_real_ranks(rank: int, name: str, sizes: dict[str, int]) -> None:
    """Every step but a compiled one."""
    run_steps(rank, sizes, *CASES[name], [step for step in STEPS if step != "fs.compile"])


@seldom
@every(sizes=SIZES, name=CASES)
@real_ranks(4)
def test_compiled_steps_on_real_ranks(rank: int, name: str, sizes: dict[str, int]) -> None:
    """That one."""
    run_steps(rank, sizes, *CASES[name], ["fs.compile"])


@real_ranks(2)
def test_two_real_ranks(rank: int) -> None:
    """Of which each has its experts."""
    run_steps(rank, {"expert": 2}, {"offload": OFFLOAD}, EXACT, list(STEPS)[1:])


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
        with pytest.raises(NotImplementedError, match=message):
            fs.reduce_grads(case.full, on.spec, weight=weight)
        return fs.unshard(fs.grad(lambda p: share * on.loss(p, x, reduce="sum"))(on.params), on.spec)

    def weighted(p: Tree) -> Tensor:
        return sum(w * case.mean(p, x[None]) for w, x in zip(weights, case.xs, strict=True)) / weights.sum()

    want = torch.func.grad(weighted)(case.full)
    for name, g in fs.testing.spmd(rank, case.sizes)(case.xs, weights).items():
        torch.testing.assert_close(g, want[name].expand_as(g), rtol=1e-9, atol=1e-11)


class Tied(nn.Module):
    """Two column-parallel maps of one weight."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8 // ranks, bias=False), nn.Linear(8, 8 // ranks, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, axis: Any = None) -> Tensor:
        for layer in (self.a, self.b):
            x = layer(x).tanh()
            x = x if axis is None else fs.collectives.gather_slices(x.T.contiguous(), axis, reduce="sum").T
        return x


@pytest.mark.parametrize("globs", [0, {"a.weight": 0}, {"b.weight": 0}], ids=str)
def test_tied_pieces(globs: Any) -> None:
    """A glob may match either name of a tied weight; globs that disagree are refused."""
    whole, local = Tied().double(), Tied(2).double()
    full = {name: p.detach() for name, p in whole.named_parameters()}
    spec = fs.policies.whole(P("shard", local={"tensor": globs}))(local)
    batch = torch.randn(2, 1, 5, 8, dtype=torch.float64).expand(2, 2, 5, 8).flatten(0, 1)

    def rank(mesh: Any, x: Tensor) -> Tree:
        on = spec.on(mesh)
        loss = lambda p: objective(fs.functional_call(local, p, (x, on.axis("tensor")), spec=on))  # noqa: E731
        return fs.unshard(fs.grad(loss)(fs.shard(full, on)), on)

    found = fs.testing.spmd(rank, {"shard": 2, "tensor": 2})(batch)["a.weight"]
    mean = torch.func.grad(lambda p: torch.stack([objective(torch.func.functional_call(whole, p, (x,))) for x in batch]).mean())
    torch.testing.assert_close(found, mean(full)["a.weight"].expand_as(found), rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match=r"for its names .'a.weight', 'b.weight'.: expected one dimension"):
        fs.policies.whole(P(local={"tensor": {"a.*": 0, "b.*": 1}}))(local)
