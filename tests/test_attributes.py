"""What forward leaves on its modules (LAWS R10): put back, returned where asked for, or an error that names it."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import every, pairs
from models import EXACT
from parity import strategies
from ranks import real_ranks
from torch import Tensor, nn

import funshard as fs
from funshard import P

STRATEGIES = strategies("shard", "keep", "remat", "replicated")


class Router(nn.Module):
    """As a mixture of experts has it: the auxiliary loss is in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.aux_loss, self.calls = nn.Linear(4, 4), 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        self.aux_loss = (gates.mean(0) ** 2).sum()
        self.calls += 1
        return x * gates


class Cached(nn.Module):
    """As LeViT has it: a tensor computed from a parameter stays in a container, of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bias, self.lin = kind, nn.Parameter(torch.randn(3)), nn.Linear(4, 4)
        self.cache: Any = {"dict": {}, "list": [], "deque": deque(), "nested": {"inner": [[]]}}[kind]
        self.seen = {"never"}

    def forward(self, x: Tensor) -> Tensor:
        cache = self.cache["inner"][0] if self.kind == "nested" else self.cache
        self.seen.add("once")
        if not cache:
            value = self.bias[torch.tensor([0, 1, 2, 1])]
            cache.update(value=value) if isinstance(cache, dict) else cache.append(value)
        return self.lin(x) + (cache["value"] if isinstance(cache, dict) else cache[0])


class Rotary(nn.Module):
    """As rope of type "dynamic" has it: a number says which frequencies are in the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.seen, self.w = 8, 8, nn.Parameter(torch.ones(4))
        self.register_buffer("freq", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if n > self.seen:
            self.register_buffer("freq", torch.ones(4) / n)
            self.seen = n
        elif n < self.trained < self.seen:
            self.register_buffer("freq", torch.ones(4))
            self.seen = self.trained
        return x * self.freq * self.w


def build(make: Callable[[], nn.Module], p: P = STRATEGIES["shard"]) -> tuple[nn.Module, fs.PartitionSpec, fs.Params, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).double()
    spec = fs.by_type(make if isinstance(make, type) else Cached, p=p)(model)
    return model, spec, fs.shard(model, spec), torch.randn(3, 4, dtype=torch.float64)


def plain(model: nn.Module, loss: Callable[[], Tensor]) -> fs.Params:
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(), params), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_an_auxiliary_loss_in_an_attribute(rank: int, strategy: str) -> None:
    """An error by name; right where it is asked for."""
    model, spec, params, x = build(Router, STRATEGIES[strategy])
    want = plain(model, lambda: model(x).square().mean() + sum(m.aux_loss for m in model))
    for module in model:
        module.aux_loss = 0.0
    for grad in (fs.grad, torch.func.grad):
        with pytest.raises(
            RuntimeError, match=r"graph in attribute 'aux_loss' of module '0'.*expected attributes=\('0.aux_loss',"
        ):
            grad(lambda q: fs.functional_call(model, q, x, spec=spec).square().mean())(params)

        def loss(q: fs.Params) -> Tensor:
            out, left = fs.functional_call(model, q, x, spec=spec, attributes=("*.aux_loss", "0.calls"))
            assert list(left) == ["0.aux_loss", "0.calls", "1.aux_loss"]
            assert left["0.calls"] == 2
            return out.square().mean() + left["0.aux_loss"] + left["1.aux_loss"]

        torch.testing.assert_close(fs.unshard(grad(loss)(params), spec), want, **EXACT)
        assert [m.aux_loss for m in model] == [0.0, 0.0]


@pairs(strategy=STRATEGIES, kind=["dict", "list", "deque", "nested"])
def test_what_a_container_of_a_module_caches(kind: str, strategy: str) -> None:
    """Another call finds the container as it was, so that other parameters are not evaluated with the first ones' values."""
    model, spec, params, x = build(lambda: Cached(kind), STRATEGIES[strategy])
    containers = [module.cache for module in model]
    empty = copy.deepcopy(containers[0])
    doubled = {key: 2 * p for key, p in params.items()}

    def call(q: fs.Params, **options: Any) -> Any:
        return fs.functional_call(model, q, x, spec=spec, **options)

    with torch.no_grad():
        first, other = call(params), call(doubled)
        assert torch.equal(first, model(x))
        for module, container in zip(model, containers, strict=True):
            assert module.cache is container
            module.cache = copy.deepcopy(empty)
        assert torch.equal(other, torch.func.functional_call(model, fs.unshard(doubled, spec), x))
    for module in model:
        module.cache = copy.deepcopy(empty)
    grads: list[fs.Params] = []
    for grad in (fs.grad, torch.func.grad, fs.grad):
        grads.append(grad(lambda q: call(q, attributes="*.cache")[0].square().mean())(params))
        with (
            pytest.raises(RuntimeError, match=r"graph in attribute 'cache' of module '0'")
            if strategy == "remat"  # which does not tell what the module has used
            else contextlib.nullcontext()
        ):
            grads.append(grad(lambda q: call(q).square().mean())(params))
        assert [m.cache for m in model] == [empty, empty]
    want = plain(model, lambda: model(x).square().mean())
    for one in grads:
        torch.testing.assert_close(fs.unshard(one, spec), want, **EXACT)


class Collecting(nn.Module):
    """The model itself adds its routers' losses: in a list, or by their attributes; or leaves them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.routers, self.losses = how, nn.ModuleList([Router(), Router()]), []

    def forward(self, x: Tensor) -> Tensor:
        for router in self.routers:
            x = router(x)
            self.losses.append(router.aux_loss)
        losses = {"list": self.losses, "attributes": [router.aux_loss for router in self.routers], "left": []}[self.how]
        for router in self.routers if self.how in ("list", "left") else ():
            router.aux_loss = 0.0
        return x.square().mean() + sum(losses)


@every(strategy=STRATEGIES, how=["list", "attributes", "left"])
def test_losses_that_the_model_itself_collects(how: str, strategy: str) -> None:
    """What the result was computed from is no error; a list of the others is."""
    torch.manual_seed(0)
    model, x = Collecting(how).double(), torch.randn(3, 4, dtype=torch.float64)
    spec = fs.by_type(Router, p=STRATEGIES[strategy])(model)
    params = fs.shard(model, spec)
    for grad in (fs.grad, torch.func.grad):
        run = grad(lambda q: fs.functional_call(model, q, x, spec=spec))
        if how == "left":
            with pytest.raises(RuntimeError, match="graph in attribute 'losses' of module ''"):
                run(params)
        else:
            grads = run(params)
            assert model.losses == []
            assert [router.aux_loss for router in model.routers] == [0.0, 0.0]
            twin = copy.deepcopy(model)
            torch.testing.assert_close(fs.unshard(grads, spec), plain(twin, lambda twin=twin: twin(x)), **EXACT)


def test_containers_are_put_back_after_an_error() -> None:
    model, spec, params, x = build(lambda: Cached("list"))
    with pytest.raises(RuntimeError, match="shapes"):
        fs.functional_call(model, params, x[:, :2], spec=spec)
    assert [(m.cache, m.seen) for m in model] == 2 * [([], {"never"})]


def test_attributes_that_are_set_between_calls() -> None:
    """What is watched is what the model has in this call: a container is put back, and a list of weights refused."""
    model, spec, params, x = build(lambda: Cached("dict"))
    loss = lambda q: fs.functional_call(model, q, x, spec=spec).square().mean()  # noqa: E731
    expected = fs.grad(loss)(params)
    model[0].cache = {}
    for _ in range(2):
        torch.testing.assert_close(fs.grad(loss)(params), expected, rtol=0, atol=0)
    assert model[0].cache == {}
    model[0].cache = {"value": model[0].bias}
    with pytest.raises(RuntimeError, match=r"'0\.cache\['value'\]' is the model's own parameter '0\.bias'"):
        fs.functional_call(model, params, x, spec=spec)
    model[0].cache, model[0].seen = {}, set(range(200))
    for _ in range(2):  # a long table of numbers
        torch.testing.assert_close(fs.grad(loss)(params), expected, rtol=0, atol=0)


def test_a_second_product_of_the_hessian() -> None:
    """The first one leaves no tensor of an ended transform in the model."""
    model, spec, params, x = build(lambda: Cached("dict"))
    v = fs.random_like(params, spec, 0)
    loss = lambda q: fs.functional_call(model, q, x, spec=spec).square().mean()  # noqa: E731
    first, second = fs.hvp(loss, params, v), fs.hvp(loss, params, v)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_buffer_that_goes_with_an_attribute() -> None:
    """The buffer alone would be kept: refused, or right with the attribute that the caller sets again."""
    model, spec, params, _ = build(Rotary)
    twin = build(Rotary)[0]
    xs = [torch.ones(n, 4).double() for n in (4, 16, 4)]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"sets attribute 'seen' of module '0' and registers its buffer 'freq' again"):
            [fs.functional_call(model, params, x, spec=spec, buffers=buffers) for x in xs]
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        for x in xs:
            out, left = fs.functional_call(model, params, x, spec=spec, buffers=buffers, attributes=("*.seen",))
            assert torch.equal(out, twin(x))
            for i, module in enumerate(model):
                module.seen = left[f"{i}.seen"]


def test_globs() -> None:
    """One that matches nothing is an error; none at all give an empty dict; a single one needs no tuple."""
    model, spec, params, x = build(Router)
    with torch.no_grad():
        with pytest.raises(ValueError, match="'aux' matches no attribute of a module after forward"):
            fs.functional_call(model, params, x, spec=spec, attributes=("*.aux_loss", "aux"))
        assert fs.functional_call(model, params, x, spec=spec, attributes=())[1] == {}
        assert list(fs.functional_call(model, params, x, spec=spec, attributes="1.calls")[1]) == ["1.calls"]


class Positions(nn.Linear):
    """As rotary embeddings have it: constants in an attribute and in a dict. As RecurrentGemma has it: a state for decoding."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.cached, self.by_length, self.state = None, {}, None

    def forward(self, x: Tensor) -> Tensor:
        self.cached = torch.arange(4.0).double().cos()
        self.by_length[len(x)] = self.cached
        out = super().forward(x)
        self.state = out[:, 1:]
        return out * self.by_length[len(x)]


HARMLESS = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "positions": Positions,
}


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::funshard._call.buffers.BufferWarning", "ignore:RNN module weights"
)
@every(strategy=STRATEGIES, kind=HARMLESS)
def test_what_libraries_leave_is_no_error(kind: str, strategy: str) -> None:
    """Weights that hooks compute anew in each forward, lists of weights, constants, and states where None was before."""
    torch.manual_seed(0)
    model, x = nn.Sequential(HARMLESS[kind]()).double().eval(), torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    alone = nn.Sequential(HARMLESS[kind]()).double().eval()
    spec = fs.policies.always(STRATEGIES[strategy])(model)
    params = fs.shard(model, spec)
    want = plain(alone, lambda: alone(x).square().mean())

    def loss(q: fs.Params) -> Tensor:
        return fs.functional_call(model, q, x, spec=spec).square().mean()

    torch.testing.assert_close(fs.unshard(fs.grad(loss)(params), spec), want, **EXACT)
    if kind == "positions" and strategy == "remat":  # in torch.func, a recomputed module does not tell what has a graph
        with pytest.raises(RuntimeError, match="'by_length'"):
            torch.func.grad(loss)(params)
    else:
        torch.testing.assert_close(fs.unshard(torch.func.grad(loss)(params), spec), want, **EXACT)
