"""testing.assert_exact: a model on shards beside itself, on real and simulated ranks; what it finds, and how it says so."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, each, every, some
from fuzz_modules import Symmetric
from models import autograd_function, build, module_class, refused, unchanged, with_forward
from parity import normal
from ranks import real_ranks
from torch import Tensor, nn

import funshard as fs
from funshard import P
from funshard.testing import assert_exact

LOSSY = fs.Precision(codec=fs.Codec(lambda x: ((x * 8).round() / 8,), lambda x: x))


Block = module_class(
    "Block",
    lambda: {
        "linear": nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric()),
        "norm": nn.BatchNorm1d(4),
        "drop": nn.Dropout(0.4),
    },
    lambda self, x: self.norm(x + self.drop(torch.tanh(self.linear(x)))),
)
"""With what a call must leave alone: a parametrization, dropout, a batch norm."""


def network() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), Block(), Block(), nn.Linear(4, 2)).double()
    model[3].bias.requires_grad_(False)
    return model


Apart = module_class(
    "Apart",
    lambda: {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)},
    lambda self, x: self.a(x).tanh().sum() + self.b(x).tanh().sum(),
)
"""The sum of two parts, so that what is wrong with one is not wrong with the other."""
PS = [P("shard"), P("shard", reshard=False), P("shard", remat=True), P()]
lossy = fs.by_path({"a": P("shard"), "b": P("shard", precision=LOSSY)})
OFF = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.complex128: None, torch.complex64: None}
"""By how much a codec is off, which complex units do not have."""
BRANCHES = r"module '0' does what vmap cannot: vmap: .* without branches on values .* on real ranks"
CHECKPOINTS = r"module '0' uses torch\.utils\.checkpoint, .* give its blocks P\(remat=True\), and switch"
SPECTRAL = r"module '0\.parametrizations.*' does what vmap cannot: .* by model\.eval\(\)"


def cube(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return (call(x) ** 3).mean()


def on_two(model: nn.Module, loss: Any = cube, policy: fs.Policy | None = None, **options: Any) -> None:
    """On two simulated ranks."""
    assert_exact(loss, model, (policy or fs.policies.whole())(model).on({"shard": 2}), normal(2, 5, 3), **options)


@at_most(1)
@each(sizes=[{"shard": 1}, {"shard": 3}, {"replicate": 2, "shard": 2}], p=PS)
def test_simulated_ranks(p: P, sizes: dict[str, int]) -> None:
    """With dropout, batch norm and a parametrization, to second order; the model and the random state are left alone."""
    model = network()
    spec = fs.by_type(Block, p=p)(model).on(sizes)
    state = torch.get_rng_state()
    with unchanged(model):
        assert_exact(cube, model, spec, normal(torch.Size(sizes.values()).numel(), 6, 3), order=1 if p.remat else 2)
    assert torch.equal(torch.get_rng_state(), state)


@real_ranks(2)
def test_real_ranks(rank: int) -> None:
    """Each with a batch of its own."""
    names = ("conv_with_batch_norm", "transformer_encoder", "lstm", "parametrized")
    for name, p in some((case for case in itertools.product(names, PS) if case[0] != "lstm" or case[1] in PS[:2]), 1):
        made = build(name, 2)
        spec = fs.by_type(*made.blocks, p=p)(made.model)
        with unchanged(made.model):
            assert_exact(made.loss, made.model, spec, {k: v[rank] for k, v in made.batches.items()})
    model = network()
    state = torch.get_rng_state()
    with unchanged(model):
        assert_exact(cube, model, fs.by_type(Block)(model), normal(6, 3, seed=rank), order=2)
    assert torch.equal(torch.get_rng_state(), state)


@real_ranks(2)
def test_a_loss_that_raises_on_one_rank(rank: int) -> None:
    """Raises there, and tells the others."""

    def loss(call: Callable[..., Tensor], x: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("no such label")
        return call(x)

    model = Apart().double()
    said = "^assert_exact: the plain model raised on rank 1: KeyError: 'no such label'$"
    with pytest.raises(KeyError if rank else AssertionError, match=None if rank else said):
        assert_exact(loss, model, fs.policies.whole()(model), normal(5, 3, seed=rank))


def tell(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return call(x).mean()


@at_most(1)
@pytest.mark.parametrize("order", [1, 2])
def test_names_the_first_parameter_that_differs(order: int) -> None:
    """With its unit, how far it is off, and that the forward itself is neither impure nor random."""
    model = Apart().double()
    expected = (
        r"another gradient of 'b\.weight' \(unit 'b', P\('shard', precision.*\): by ([\d.e-]+) on rank \d.*; 2 of 4 differ"
    )
    with pytest.raises(AssertionError, match=expected) as info:
        on_two(model, tell, lossy, order=order)
    assert "neither impure nor random, and the sharded run is wrong" in str(info.value)
    found = re.search(expected, str(info.value))
    assert found
    assert 0.01 < float(found[1]) < 1
    on_two(model, tell, lossy, order=order, tolerance=0.9)


class Odd(nn.Linear):
    """As it says, where its weight is not its own; what it does in the plain run is right."""

    def __init__(self, wrong: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.wrong = wrong
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if isinstance(self.weight, nn.Parameter) else self.wrong(self, y)


def check_odd(wrong: Callable[[Odd, Tensor], Tensor], p: float = 0.0, **options: Any) -> None:
    on_two(nn.Sequential(Odd(wrong), nn.Dropout(p)), policy=fs.by_type(Odd), **options)


WrongTwice = autograd_function(lambda x: x.clone(), lambda grad, _: grad.clone(), lambda _, tangent: 2 * tangent)
"""The identity, with the second derivative doubled."""


def test_tells_apart_what_is_wrong() -> None:
    """Gradient, second derivative, loss and buffer each are compared; a random forward is told from a wrong one."""
    check_odd(lambda self, y: y, order=2)
    refused(AssertionError, r"another gradient of '0\.weight'", lambda: check_odd(lambda self, y: 2 * y.detach() - y))
    words = r"another buffer of '0\.count': by 1 on rank \d"
    refused(AssertionError, words, lambda: check_odd(lambda self, y: y + 0 * self.count.add_(1)))
    words = r"another Hessian-vector product of '0\.weight'"
    refused(AssertionError, words, lambda: check_odd(lambda self, y: WrongTwice.apply(y), order=2))
    refused(AssertionError, r"another loss: by 3 on rank \d", lambda: on_two(Odd(lambda self, y: y + 3), tell))
    check_odd(lambda self, y: y, p=0.5)
    words = r"gradient of '0\.weight'.*its forward is random, and may have drawn others"  # another number on shards
    refused(AssertionError, words, lambda: check_odd(lambda self, y: y.add(0 * torch.rand(())), p=0.5))


CALLS: list[Tensor] = []


def counting(self: nn.Linear, x: Tensor) -> Tensor:
    CALLS.append(x)
    return nn.Linear.forward(self, x) * len(CALLS)


def test_an_impure_forward_is_told_from_a_wrong_one() -> None:
    """One that keeps something from call to call."""
    words = r"run again with the same seed, the plain model gives another gradient of 'weight'.*impure"
    refused(AssertionError, words, lambda: on_two(with_forward(nn.Linear, counting)(3, 3).double()))


def clamping(self: nn.Linear, x: Tensor) -> Tensor:
    if isinstance(self.weight, nn.Parameter):
        self.weight.data.clamp_(-0.1, 0.1)
    return nn.Linear.forward(self, x)


def test_what_a_plain_forward_writes_into_parameters_and_batches_is_put_back() -> None:
    """The plain run is on the model itself."""
    model = with_forward(nn.Linear, clamping)(3, 3).double()
    before = model.weight.detach().clone()
    refused(AssertionError, "gradient of 'weight'", lambda: on_two(model))
    assert torch.equal(model.weight, before)
    model, x = with_forward(nn.Linear, lambda self, x: nn.Linear.forward(self, x.mul_(0.5)))(3, 3).double(), normal(2, 5, 3)
    assert_exact(cube, model, fs.policies.whole()(model).on({"shard": 2}), x, order=2)
    assert torch.equal(x, normal(2, 5, 3))


@pytest.mark.parametrize("dtype", OFF, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """With the tolerance that it needs, and no more."""
    model = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype))
    loss = lambda call, x: call(x).abs().pow(2).float().mean()  # noqa: E731
    assert_exact(loss, model, fs.by_type(nn.Linear)(model).on({"shard": 2}), normal(2, 5, 3).to(dtype), order=2)
    if off := OFF[dtype]:
        more = fs.Precision(codec=fs.Codec(lambda x: (x * (1 + off),), lambda x: x))
        wrong = fs.by_type(nn.Linear, p=P("shard", precision=more))(model).on({"shard": 2})
        x = normal(2, 5, 3).to(dtype)
        refused(AssertionError, r"another gradient of '0\.weight'", lambda: assert_exact(loss, model, wrong, x))


def test_what_is_rounding_is_said_to_be() -> None:
    """As of transformers in float64, whose losses are in float32: there it rounds in another order on shards."""
    coarser = with_forward(nn.Linear, lambda self, x: nn.Linear.forward(self, x).float().exp().logsumexp(-1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), coarser(4, 5)).double()
    words = r"computes in torch\.float32 in part, .* give tolerance=1e-04, or a loss without"
    refused(AssertionError, words, lambda: on_two(model, tell, fs.by_type(nn.Linear), order=2))
    on_two(model, tell, fs.by_type(nn.Linear), order=2, tolerance=1e-4)


def test_another_method_and_a_tree_of_batches() -> None:
    class Two(nn.Linear):
        def halved(self, x: Tensor, *, factor: float) -> Tensor:
            return self(x) * factor

    def loss(call: Callable[..., Tensor], batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(call(batch["x"], factor=batch["factor"]), batch["y"])

    model = Two(3, 2).double()
    batch = {"x": normal(2, 5, 3), "y": normal(2, 5, 2, seed=6), "factor": 0.5}
    assert_exact(loss, model, fs.policies.whole()(model).on({"shard": 2}), batch, method="halved")


def test_mistakes() -> None:
    model = nn.Linear(3, 2)
    spec = fs.policies.whole()(model)
    loss = lambda call, x: call(x).sum()  # noqa: E731
    refused(ValueError, "order: expected 1 or 2, got 3", lambda: assert_exact(loss, model, spec, torch.ones(5, 3), order=3))
    with pytest.raises(ValueError, match=r"batch\['x'\]: expected the 4 ranks of .* in dimension 0, got shape \[5, 3\]"):
        assert_exact(loss, model, spec.on({"shard": 4}), {"x": torch.ones(5, 3)})
    with pytest.raises(ValueError, match=r"expected the loss to be a scalar, got shape \[5, 2\]"):
        assert_exact(lambda call, x: call(x), model, spec, torch.ones(5, 3))
    with pytest.raises(ValueError, match="call it outside of spmd"):
        fs.testing.spmd(lambda mesh, x: assert_exact(loss, model, spec.on(mesh), x), 2)(torch.ones(2, 5, 3))


# --- what joins the ranks' batches, what simulated ranks cannot run, and ranks that differ ---
def with_batch_norm() -> nn.Module:
    torch.manual_seed(2)
    return fs.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double())


@at_most(1)
@every(sizes=[{"shard": 3}, {"replicate": 2, "shard": 2}], order=[1, 2])
def test_sync_batch_norm_on_simulated_ranks_is_no_false_alarm(order: int, sizes: dict[str, int]) -> None:
    """Its plain model has the statistics of the joined batch as well, over all axes or one."""
    model = with_batch_norm()
    spec, x = fs.by_type(nn.Linear)(model).on(sizes), normal(torch.Size(sizes.values()).numel(), 5, 3)
    with unchanged(model):
        assert_exact(cube, model, spec, x, order=order)
    model[1].axes = "shard"
    assert_exact(cube, model, spec, x, order=order)


@real_ranks(4)
def test_sync_batch_norm_on_real_ranks(rank: int) -> None:
    """The plain model has the mesh of the spec, whose axes the world's own mesh does not know."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for axes in (None, "shard"):
        model = with_batch_norm()
        model[1].axes = axes
        assert_exact(cube, model, fs.by_type(nn.Linear)(model).on(mesh), normal(4, 3, seed=rank), order=2)


def branch(self: nn.Linear, x: Tensor) -> Tensor:
    return nn.Linear.forward(self, x) if x.sum() > 0 else -nn.Linear.forward(self, x)


def checkpointed(self: nn.Linear, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(functools.partial(nn.Linear.forward, self), x, use_reentrant=False)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "checkpoint": (lambda: with_forward(nn.Linear, checkpointed)(3, 3), CHECKPOINTS),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), SPECTRAL),
    "branch": (lambda: with_forward(nn.Linear, branch)(3, 3), BRANCHES),
}


@pytest.mark.parametrize(("block", "message"), BLOCKS.values(), ids=BLOCKS)
def test_simulated_ranks_refuse_in_our_words(block: Callable[[], nn.Module], message: str) -> None:
    """A forward that torch.vmap cannot run, and gradient checkpointing: the module, and what to do."""
    model = nn.Sequential(block()).double()
    refused(RuntimeError, rf"^assert_exact: .*{message}", lambda: on_two(model, policy=fs.by_type(nn.Linear)))
