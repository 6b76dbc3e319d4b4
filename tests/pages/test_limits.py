"""Statements of limits.md and optimizers.md that no other test makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives, world
from depth import depth, every, mark_seldom, seldom
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

Norm = Callable[[Tensor], Tensor]


WEIGHTS, POINT = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.arange(24, dtype=torch.float64).view(4, 6)
VECTOR = POINT.cos()


def third_derivative(norm: Norm) -> Tensor:
    """Return that of the norm of [4, 6] numbers, along two vectors."""
    along = lambda f: lambda x: (torch.func.grad(f)(x) * VECTOR).sum()  # noqa: E731
    return torch.func.grad(along(along(lambda x: (norm(x) * WEIGHTS).sin().sum())))(POINT.sin())


def derivative_of_jvp(norm: Norm) -> Tensor:
    """Return the gradient of a forward derivative, a second derivative."""
    value = lambda x: (norm(x) * WEIGHTS).sin().sum()  # noqa: E731
    return torch.func.grad(lambda x: torch.func.jvp(value, (x,), (VECTOR,))[1])(VECTOR.sin())


def by_hand(x: Tensor, groups: int = 1, *, centred: bool = True) -> Tensor:
    x = x.unflatten(1, (groups, -1))
    x = x - x.mean(-1, keepdim=True) if centred else x
    return (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)


NORMS: dict[str, tuple[Norm, Norm, bool]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), by_hand, False),
    "rms_norm": (lambda x: F.rms_norm(x, (6,), eps=1e-5), lambda x: by_hand(x, centred=False), True),
    "group_norm": (lambda x: F.group_norm(x, 2), lambda x: by_hand(x, 2), True),
}
"""Torch's, the same in plain arithmetic, and whether torch's third derivative is right."""


@every(derivative=[third_derivative, derivative_of_jvp], name=NORMS)
def test_derivatives_of_norms(name: str, derivative: Callable[[Norm], Tensor]) -> None:
    """If those of layer_norm are right in a later torch, limits.md no longer needs to warn of them."""
    norm, plain, is_right = NORMS[name]
    got, expected = derivative(norm), derivative(plain)
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9) is is_right
    assert is_right or (got - expected).norm() > 0.1 * expected.norm()


def test_forward_mode_of_norms_in_two_dtypes() -> None:
    """torch's tangent of a LayerNorm has the weights' dtype; `fs.hvp` by reverse mode needs none."""
    x, weight = torch.randn(2, 4, dtype=torch.bfloat16), torch.ones(4)
    out, tangent = torch.func.jvp(lambda x: F.layer_norm(x, (4,), weight, weight), (x,), (x,))
    assert (out.dtype, tangent.dtype) == (torch.bfloat16, torch.float32)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    keep = fs.Precision(param=torch.bfloat16, keep={"1.*": torch.float32})
    spec = fs.policies.whole(fs.P("shard", precision=keep))(model)
    params = fs.shard(model, spec)
    loss = lambda p: fs.functional_call(model, p, torch.ones(2, 4), spec=spec).float().square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="dtype"):
        fs.hvp(loss, params, params)
    assert fs.hvp(loss, params, params, forward=False)[""].isfinite().all()


def test_compressors_reduce_in_the_dtype_of_the_gradients() -> None:
    """A call reduces in the dtype that the unit's Precision names; a compressor does not."""
    model = nn.Linear(4, 3)
    with world(2):
        spec = fs.policies.whole(fs.P("shard", precision=fs.Precision(reduce=torch.float64)))(model).bound
        params, padded = fs.shard(model, spec), spec.padded_numel(spec.by_key[""])
        loss = lambda p: fs.functional_call(model, p, torch.ones(4), spec=spec).sum()  # noqa: E731
        with Collectives() as by_call:
            fs.grad(loss)(params)
        full = fs.unshard(params, spec)
        grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, torch.ones(4)).sum())(full)
        compressor = fs.compress.exact()
        with Collectives() as by_compressor:
            compressor.reduce(grads, compressor.init(spec), spec)
    assert by_call.all[-1].bytes == 8 * padded
    assert by_compressor.all[-1].bytes == 4 * padded


def plain_fallback() -> fs.optim.Optimizer:
    """Plain gradient descent, which torch.compile can trace."""
    return fs.optim.Optimizer(
        lambda params: {key: {} for key in params},
        lambda grads, state, params: ({key: p - grads[key] for key, p in params.items()}, state),
    )


UPDATES: dict[str, tuple[Callable[[fs.PartitionSpec], Any], bool]] = {
    "from_torch": (lambda spec: fs.optim.from_torch(torch.optim.SGD, momentum=0.9, dampening=0.1), False),
    "adamw": (lambda spec: fs.optim.adamw(1e-3), True),
    "muon": (lambda spec: fs.optim.muon(fs.optim.matrices(spec)), True),
    "shampoo, plain fallback": (lambda spec: fs.optim.shampoo(fs.optim.matrices(spec), fallback=plain_fallback()), False),
    "soap, plain fallback": (lambda spec: fs.optim.soap(fs.optim.matrices(spec), fallback=plain_fallback()), False),
}
"""Optimizers, and whether torch.compile takes the update as one graph."""


@seldom
@pytest.mark.filterwarnings("ignore")  # of Dynamo, of what it cannot trace
@pytest.mark.parametrize("name", depth(list(UPDATES)[:3], list(UPDATES)))
def test_which_updates_break_the_graph(name: str) -> None:
    """Where torch.compile cannot have one graph, fullgraph=True says so; the values are the same with breaks."""
    make, is_one_graph = UPDATES[name]
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    spec = fs.policies.whole()(model).on({"shard": 1})
    init, update = make(spec)
    params = fs.shard(model, spec)
    grads, state = {key: p.cos() for key, p in params.items()}, init(params)
    torch._dynamo.reset()
    if is_one_graph:
        got = torch.compile(update, backend="eager", fullgraph=True)(grads, state, params)
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"update cannot be part of a graph: .* Compile the gradients"):
            torch.compile(update, backend="eager", fullgraph=True)(grads, state, params)
        got = torch.compile(update, backend="eager")(grads, state, params)
    assert_close(got[0], update(grads, state, params)[0])


def update_of(name: str, w: Tensor, h: Tensor) -> Tensor:
    """Return the update of five steps of torch's optimizer down the sum of (h w)^2 / 2."""
    new = w.clone()
    optimizer = getattr(torch.optim, name)([new], lr=0.1)

    def value() -> Tensor:
        new.grad = h**2 * new
        return ((h * new) ** 2).sum() / 2

    for _ in range(5):
        optimizer.step(value)
    return new - w


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.flatten().chunk(2)


def halves_of_rows(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2)


ELEMENTWISE = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop"
DISTANCES = dict.fromkeys(ELEMENTWISE.split(), 0.0) | {"Adafactor": 0.80, "LBFGS": 0.03, "Muon": 0.40}
"""Between the updates of a matrix and of its two halves, relative to the first one's length: those of optimizers.md."""


@pytest.mark.parametrize("name", mark_seldom(DISTANCES, *[*DISTANCES][::2]))
def test_optimizers_on_slices_are_as_far_from_themselves_as_the_table_says(name: str) -> None:
    w, h = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    cut = halves_of_rows if name == "Muon" else halves  # it refuses vectors
    whole = update_of(name, w, h).flatten()
    parts = torch.cat([update_of(name, *both).flatten() for both in zip(cut(w), cut(h), strict=True)])
    assert round(float((parts - whole).norm() / whole.norm()), 2) == DISTANCES[name]


def test_hvp_by_reverse_mode_is_the_transposed_product() -> None:
    """Another one than by forward mode only where gradients are masked: torch leaves out those of `padding_idx`."""
    torch.manual_seed(0)
    for padding, is_equal in ((None, True), (0, False)):
        model = nn.Sequential(nn.Embedding(5, 4, padding_idx=padding), nn.Linear(4, 4)).double()
        spec = fs.policies.whole()(model)
        params, v = fs.shard(model, spec), fs.random_like(fs.shard(model, spec), spec, 1)
        loss = functools.partial(_sine_of_tokens, model, spec)
        forward, backward = (fs.hvp(loss, params, v, forward=forward)[""] for forward in (True, False))
        assert torch.allclose(forward, backward) is is_equal
        torch.testing.assert_close(forward, torch.func.jvp(torch.func.grad(loss), (params,), (v,))[1][""])
        torch.testing.assert_close(backward, torch.func.vjp(torch.func.grad(loss), params)[1](v)[0][""])


def _sine_of_tokens(model: nn.Module, spec: fs.PartitionSpec, params: fs.Params) -> Tensor:
    return fs.functional_call(model, params, torch.tensor([0, 1, 2]), spec=spec).sin().sum()
