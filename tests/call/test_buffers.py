"""What forward leaves: buffers that come and go, or a warning; attributes that are put back, returned or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import depth, each, every, pairs, seldom
from models import EXACT, module_class, refused, unchanged
from parity import gradient, gradient_of, loss_of, shards_of, strategies
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.collectives import Mesh

Tree = dict[str, Tensor]

STRATEGIES = strategies("shard", "keep", "remat", "replicated")


def count(self: Any, x: Tensor) -> Tensor:
    out = self.linear(x) * self.table
    self.calls += 1
    self.mean = out.detach().mean(0)
    self.register_buffer("cache", out.detach())
    return out


BUFFERS = {"calls": torch.zeros((), dtype=torch.int64), "mean": torch.zeros(3), "table": torch.ones(3)}
Counts = module_class(
    "Counts", lambda: {"linear": nn.Linear(3, 3)} | {name: nn.Buffer(b.clone()) for name, b in BUFFERS.items()}, count
)
"""A buffer written in place, one that is replaced, a constant, and one that comes and goes."""


class Block(nn.Sequential):
    pass


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(Block(nn.Linear(3, 3), nn.BatchNorm1d(3)), Block(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def pretrained() -> nn.Sequential:
    """A model whose statistics are not the initial ones."""
    model = with_batch_norm()
    model(torch.randn(4, 3))
    return model


def halve(self: Any, x: Tensor) -> Tensor:
    self.mean = x.detach().mean(0) if self.mean is None else self.mean / 2
    return self.linear(x) - self.mean


@every(remat=[False, True])
def test_a_buffer_that_was_none_is_handed_back(remat: bool) -> None:
    """The next call goes on with it."""
    model, x = module_class("Halves", lambda: {"linear": nn.Linear(3, 3)}, halve)(), torch.randn(4, 3)
    model.register_buffer("mean", None)
    plain, buffers = copy.deepcopy(model), Tree()
    spec, params = shards_of(fs.policies.whole(P("shard", remat=remat)), model)
    for _ in range(3):
        assert_close(fs.functional_call(model, params, (x,), spec=spec, buffers=buffers), plain(x), rtol=0, atol=0)
    assert model.mean is None


def gate(self: Any, x: Tensor) -> Tensor:
    self.n += 1
    return self.linear(x).tanh() * self.n


@every(remat=[False, True], name=["0.n", "1.n"])
def test_a_buffer_of_two_modules_is_one(name: str, remat: bool) -> None:
    """Given by any of its names, as in torch.func.functional_call."""
    n, x, make = torch.zeros(3), torch.randn(4, 3), module_class("Gate", lambda: {"linear": nn.Linear(3, 3)}, gate)
    model = nn.Sequential(make(), make())
    for child in model:
        child.register_buffer("n", n)
    plain, buffers = copy.deepcopy(model), {name: n.clone()}
    spec, params = shards_of(fs.policies.whole(P("shard", remat=remat)), model)
    for _ in range(2):
        assert_close(fs.functional_call(model, params, (x,), spec=spec, buffers=buffers), plain(x), rtol=0, atol=0)
    assert_close(buffers, {name: plain.get_buffer("0.n")})
    assert not n.any()


def test_the_buffers_of_a_module_at_two_paths_in_every_order() -> None:
    """As of a rotary embedding that all layers share."""
    turns = module_class("Turns", lambda: {"freq": nn.Buffer(torch.rand(3))}, lambda self, x: x * self.freq.cos())()
    model, x = nn.Sequential(turns, nn.Linear(3, 3), nn.Tanh(), turns, nn.Linear(3, 3)), torch.randn(4, 3)
    found: list[Tree] = []
    for p in (P(), P(remat=True)):
        spec, params = shards_of(fs.policies.whole(p), model)
        loss = loss_of(model, spec, x)
        found.append(fs.hvp(loss, params, params) | fs.hvp(loss, params, params, forward=False))
    assert_close(*found)


CHANGED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch": (
        with_batch_norm,
        r"buffers '0\.1\.running_mean', '0\.1\.running_var', '0\.1\.num_batches_tracked', \.\.\. \(6 in all\) in copies",
    ),
    "own": (lambda: nn.Sequential(Counts()), r"buffers '0\.calls', '0\.mean' in copies"),
}
UNCHANGED: dict[str, Callable[[], nn.Module]] = {
    "eval": lambda: pretrained().eval(),
    "layer": lambda: Block(nn.Linear(3, 3), nn.LayerNorm(3)),
}
WAYS: dict[str, Callable[..., object]] = {
    "call": lambda loss: loss,
    "fs.grad": fs.grad,
    "torch.func.grad": torch.func.grad,
    "no_grad": torch.no_grad(),
}


@every(remat=[False, True], way=WAYS, kind=CHANGED)
def test_changes_that_are_lost_are_said_once(kind: str, way: str, remat: bool) -> None:
    """Naming the buffers, at the caller's line, the first time that a model loses any."""
    make, match = CHANGED[kind]
    model, x = make(), torch.randn(4, 3)
    spec, params = shards_of(fs.by_type(Block, Counts, p=fs.P("shard", remat=remat)), model)
    step = WAYS[way](lambda p: fs.functional_call(model, p, (x,), spec=spec).sum())
    with unchanged(model):
        with pytest.warns(fs._call.buffers.BufferWarning, match=match) as caught:
            step(params)
        assert [warning.filename for warning in caught] == [__file__]
        step(params)  # warnings are errors in the tests


@every(remat=[False, True], kind=UNCHANGED)
def test_nothing_is_said_where_nothing_is_lost(kind: str, remat: bool) -> None:
    """Of constants, of what is in eval mode, and of buffers that are given."""
    model, policy, x = UNCHANGED[kind](), fs.by_type(Block, Counts, p=fs.P("shard", remat=remat)), torch.randn(4, 3)
    model.register_buffer("table", torch.ones(3))
    gradient_of(policy, model, x)
    model = with_batch_norm()
    gradient_of(policy, model, x, buffers=copies(model))


def copies(model: nn.Module) -> Tree:
    """Of its buffers, to be given."""
    return {name: b.clone() for name, b in model.named_buffers()}


def test_some_buffers_given() -> None:
    """Those that were not are named; what is no buffer is an error."""
    model = with_batch_norm()
    spec = fs.policies.whole()(model)
    given = {name: b.clone() for name, b in model.named_buffers() if name.startswith("0")}
    words = r"buffers '1\.1\.running_mean', '1\.1\.running_var', '1\.1\.num_batches_tracked' in"
    with pytest.warns(fs._call.buffers.BufferWarning, match=words):
        fs.functional_call(model, fs.shard(model, spec), torch.randn(4, 3), spec=spec, buffers=given)
    call = loss_of(model, spec, torch.randn(4, 3), buffers={"1.nothing": torch.ones(3)})
    refused(ValueError, r"buffer '1\.nothing' is not in the model", lambda: call(fs.shard(model, spec)))


@seldom
def test_said_in_a_compiled_call() -> None:
    """When it is traced."""
    model, x = with_batch_norm()[: depth(1, 2)], torch.randn(4, 3)
    spec, params = shards_of(fs.policies.whole(), model)
    step = torch.compile(loss_of(model, spec, x), backend="eager", fullgraph=True)
    with pytest.warns(fs._call.buffers.BufferWarning, match=r"'0\.1\.running_mean'"):
        step(params)
    step(params)
    model.eval()
    step(params)


# --- the pure form: buffers go in and come out ---
TRANSFORMS = {
    "fs": lambda loss: fs.grad_and_value(loss, has_aux=True),
    "torch.func": lambda loss: torch.func.grad_and_value(loss, has_aux=True),
    "vmap": lambda loss: torch.vmap(torch.func.grad_and_value(loss, has_aux=True)),
    "remat": lambda loss: fs.grad_and_value(fs.remat(loss), has_aux=True),
}


@each(strategy=STRATEGIES, way=TRANSFORMS)
@real_ranks(2)
def test_pure_form(rank: int, way: str, strategy: str) -> None:
    """Buffers in, buffers out by has_aux: in three steps those of plain calls, and the ones that went in stay as they were."""
    model = with_batch_norm().double()
    spec = fs.by_type(Block, p=STRATEGIES[strategy])(model).bound
    params, buffers, theirs = fs.shard(model, spec), copies(model), copies(model)
    full = {n: p.detach() for n, p in model.named_parameters()}
    xs = torch.randn(3, 2, 4, 3, dtype=torch.float64)[:, rank]

    def loss(params: Tree, buffers: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        buffers = {name: b.clone() for name, b in buffers.items()}
        return (fs.functional_call(model, params, (x,), spec=spec, buffers=buffers) ** 2).mean(), buffers

    batched = (lambda tree: {k: t[None] for k, t in tree.items()}) if way == "vmap" else lambda tree: tree
    for x in xs:
        before = {name: b.clone() for name, b in buffers.items()}
        args = (batched(params), batched(buffers), x[None] if way == "vmap" else x)
        with unchanged(model):
            _, (value, after) = TRANSFORMS[way](loss)(*args)
        assert_close(buffers, before, rtol=0, atol=0)
        expected = (torch.func.functional_call(model, (full, theirs), (x,)) ** 2).mean()
        buffers = {name: b[0] if way == "vmap" else b for name, b in after.items()}
        assert_close(value.reshape(()), expected)
        assert_close(buffers, theirs)
    assert buffers["0.1.num_batches_tracked"] == 3


@real_ranks(2)
def test_buffers_from_outside(rank: int) -> None:
    """Buffers that the step closes over are updated by a compiled step as by an eager one."""
    model = with_batch_norm()[: depth(1, 2)].double()
    (spec, params), x = shards_of(fs.policies.whole(), model), torch.randn(4, 3, dtype=torch.float64)
    results, plain = [], depth("eager", "aot_eager")
    ways = [lambda f: f, lambda f: fs.compile(f, backend="aot_eager"), lambda f: torch.compile(f, backend=plain)]
    for compiled in ways:
        buffers = copies(model)
        given = dict(buffers)
        run = compiled(lambda params, x, b=buffers: fs.grad_and_value(loss_of(model, spec, x, buffers=b))(params))
        with unchanged(model):
            results.append(([run(params, x + i) for i in range(2)], buffers))
        assert all(buffers[name] is b for name, b in given.items())
        assert buffers["0.1.num_batches_tracked"] == 2
    for result in results[1:]:
        assert_close(result, results[0])


# --- the mean over ranks ---
ANY = fs.policies.whole()(nn.Linear(2, 2))


def averaged(mesh: Mesh, x: Tensor, weight: Tensor | None, axes: str | None) -> Tree:
    buffers = {"mean": x, "low": x.half(), "count": torch.tensor(3)}
    return fs.averaging.average_buffers(buffers, ANY.on(mesh), axes=axes, weight=weight)


@every(axes=[None, "shard"], weighted=[False, True])
@real_ranks(4)
def test_average_buffers(rank: int, weighted: bool, axes: str | None) -> None:
    """Floating point ones, over all ranks or those along an axis, by numbers of samples if given; counters stay as they are."""
    x, weights = torch.arange(8.0).view(4, 2), torch.ones(4)
    if weighted:
        x[2], x[3] = 50_000.0, torch.nan  # float16 has its mean, not its sum; a rank without samples counts for nothing
        weights = torch.tensor([1.0, 3.0, 4.0, 0.0])
    parts, shares = x.nan_to_num().view(2, 2, 2), weights.view(2, 2, 1)
    over = 1 if axes else (0, 1)
    mean = ((parts * shares).sum(over, keepdim=True) / shares.sum(over, keepdim=True)).expand(2, 2, 2).reshape(4, 2)
    run = fs.testing.spmd(lambda mesh, x, w: averaged(mesh, x, w if weighted else None, axes), {"replicate": 2, "shard": 2})
    simulated = run(x, weights)
    real = averaged(Mesh.of(mesh_of(2, 2)), x[rank], weights[rank] if weighted else None, axes)
    for got in (real, {name: b[rank] for name, b in simulated.items()}):
        assert_close(got["mean"], mean[rank])
        assert_close(got["low"], mean[rank].half())
        assert got["count"] == 3
    refused(ValueError, "unknown mesh axis 'node'", lambda: fs.averaging.average_buffers({}, ANY, axes="node"))
    if weighted:  # all alike where none has any
        equal = torch.arange(8.0).view(4, 2)
        assert_close(run(equal, torch.zeros(4))["mean"], run(equal, torch.ones(4))["mean"])
        assert all(run(equal, torch.tensor([1.0, bad, 1.0, 1.0]))["mean"].isnan().any() for bad in (-1.0, torch.nan))


# --- evaluation with statistics that training has not updated ---
INITIAL = (
    r"eval mode normalise with the model's own '0\.1\.running_mean', '0\.1\.running_var', .*: they are those of a new model"
)


def trained(model: nn.Module) -> tuple[fs.PartitionSpec, Tree, Tree]:
    """Train a step with ``buffers=``; return spec, params and buffers."""
    (spec, params), buffers = shards_of(fs.by_type(Block), model), copies(model)
    fs.grad(loss_of(model.train(), spec, torch.randn(4, 3), buffers=buffers))(params)
    return spec, params, buffers


def test_evaluation_without_the_statistics_of_training_is_said_once() -> None:
    """And nothing of statistics that are meant."""
    model, x = with_batch_norm(), torch.randn(4, 3)
    spec, params, buffers = trained(model)
    fs.functional_call(model.eval(), params, (x,), spec=spec, buffers=buffers)
    with pytest.warns(fs._call.buffers.BufferWarning, match=INITIAL) as caught:
        fs.functional_call(model, params, (x,), spec=spec)
    assert [warning.filename for warning in caught] == [__file__]
    fs.functional_call(model, params, (x,), spec=spec)
    model = pretrained()
    model[1] = with_batch_norm()[1]  # a new head, whose statistics are named alone
    words = r"own '1\.1\.running_mean', '1\.1\.running_var': they are those of a new model"
    with pytest.warns(fs._call.buffers.BufferWarning, match=words):
        gradient_of(fs.by_type(Block), model.eval(), x)
    # nor is of pretrained ones, those that were copied into the model after training, and those of layers that are frozen
    gradient_of(fs.by_type(Block), pretrained().eval(), x)
    for assign in (False, True):
        model = pretrained()
        spec, params, buffers = trained(model)
        model.load_state_dict(buffers, strict=False, assign=assign)
        fs.functional_call(model.eval(), params, (x,), spec=spec)
    model = pretrained()
    model[0].eval()
    fs.functional_call(model, params, (x,), spec=spec, buffers={n: b.clone() for n, b in model[1].named_buffers(prefix="1")})


# --- attributes (LAWS R10): put back, returned where asked for, or an error that names them ---
def route(self: Any, x: Tensor) -> Tensor:
    gates = self.gate(x).softmax(-1)
    self.aux_loss = (gates.mean(0) ** 2).sum()
    self.calls += 1
    return x * gates


Router = module_class("Router", lambda: {"gate": nn.Linear(4, 4), "aux_loss": 0.0, "calls": 0}, route)
"""As a mixture of experts has it: the auxiliary loss is in an attribute."""


class Cached(nn.Module):
    """As LeViT has it: a tensor computed from a parameter stays in a container, of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bias, self.lin = kind, nn.Parameter(torch.randn(3)), nn.Linear(4, 4)
        self.cache: Any = {} if kind == "dict" else {"inner": [[]]}
        self.seen = {"never"}

    def forward(self, x: Tensor) -> Tensor:
        cache = self.cache["inner"][0] if self.kind == "nested" else self.cache
        self.seen.add("once")
        if not cache:
            value = self.bias[torch.tensor([0, 1, 2, 1])]
            cache.update(value=value) if isinstance(cache, dict) else cache.append(value)
        return self.lin(x) + (cache["value"] if isinstance(cache, dict) else cache[0])


def rotate(self: Any, x: Tensor) -> Tensor:
    n = len(x)
    if n > self.seen:
        self.register_buffer("freq", torch.ones(4) / n)
        self.seen = n
    elif n < self.trained < self.seen:
        self.register_buffer("freq", torch.ones(4))
        self.seen = self.trained
    return x * self.freq * self.w


ROTARY = {"trained": 8, "seen": 8}
Rotary = module_class("Rotary", lambda: {**ROTARY, "w": nn.Parameter(torch.ones(4)), "freq": nn.Buffer(torch.ones(4))}, rotate)
"""As rope of type "dynamic" has it: a number says which frequencies are in the buffer."""


def build(make: Callable[[], nn.Module], p: P = STRATEGIES["shard"]) -> tuple[nn.Module, fs.PartitionSpec, fs.Params, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).double()
    spec = fs.by_type(make if isinstance(make, type) else Cached, p=p)(model)
    return model, spec, fs.shard(model, spec), torch.randn(3, 4, dtype=torch.float64)


@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_an_auxiliary_loss_in_an_attribute(rank: int, strategy: str) -> None:
    """An error by name; right where it is asked for."""
    model, spec, params, x = build(Router, STRATEGIES[strategy])
    want = gradient(model(x).square().sum() + sum(m.aux_loss for m in model), dict(model.named_parameters()))
    for module in model:
        module.aux_loss = 0.0
    for grad in (fs.grad, torch.func.grad):
        words = r"graph in attribute 'aux_loss' of module '0'.*expected attributes=\('0.aux_loss',"
        refused(RuntimeError, words, lambda: grad(loss_of(model, spec, x))(params))

        def total(results: Any) -> Tensor:
            out, left = results
            assert list(left) == ["0.aux_loss", "0.calls", "1.aux_loss"]
            assert left["0.calls"] == 2
            return out.square().sum() + left["0.aux_loss"] + left["1.aux_loss"]

        loss = loss_of(model, spec, x, of=total, attributes=("*.aux_loss", "0.calls"))
        torch.testing.assert_close(fs.unshard(grad(loss)(params), spec), want, **EXACT)
        assert [m.aux_loss for m in model] == [0.0, 0.0]


@pairs(strategy=STRATEGIES, kind=["dict", "nested"])
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
    want = gradient(model(x).square().mean(), dict(model.named_parameters()))
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
    model, x = Collecting(how).double(), torch.randn(3, 4, dtype=torch.float64)
    spec, params = shards_of(fs.by_type(Router, p=STRATEGIES[strategy]), model)
    for grad in (fs.grad, torch.func.grad):
        run = grad(loss_of(model, spec, x, of=torch.sum))
        if how == "left":
            refused(RuntimeError, "graph in attribute 'losses' of module ''", lambda: run(params))
        else:
            grads = run(params)
            assert model.losses == []
            assert [router.aux_loss for router in model.routers] == [0.0, 0.0]
            twin = copy.deepcopy(model)
            torch.testing.assert_close(fs.unshard(grads, spec), gradient(twin(x), dict(twin.named_parameters())), **EXACT)


def test_attributes_that_are_set_between_calls() -> None:
    """What is watched is what the model has in this call: a container is put back, and a list of weights refused.

    A product with the Hessian leaves no tensor of an ended transform in the model, so that a second one is the same. After an
    error containers are put back as well.
    """
    model, spec, params, x = build(lambda: Cached("dict"))
    refused(RuntimeError, "shapes", lambda: fs.functional_call(model, params, x[:, :2], spec=spec))
    assert [(m.cache, m.seen) for m in model] == 2 * [({}, {"never"})]
    loss = loss_of(model, spec, x)
    products = [fs.hvp(loss, params, fs.random_like(params, spec, 0)) for _ in range(2)]
    torch.testing.assert_close(*products, rtol=0, atol=0)
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


def test_a_buffer_that_goes_with_an_attribute() -> None:
    """The buffer alone would be kept: refused, or right with the attribute that the caller sets again."""
    model, spec, params, _ = build(Rotary)
    twin = build(Rotary)[0]
    xs = [torch.ones(n, 4).double() for n in (4, 16, 4)]
    buffers = copies(model)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"sets attribute 'seen' of module '0' and registers its buffer 'freq' again"):
            [fs.functional_call(model, params, x, spec=spec, buffers=buffers) for x in xs]
        buffers = copies(model)
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


HARMLESS = {"weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "positions": Positions}


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::funshard._call.buffers.BufferWarning", "ignore:RNN module weights"
)
@every(strategy=STRATEGIES, kind=HARMLESS)
def test_what_libraries_leave_is_no_error(kind: str, strategy: str) -> None:
    """Weights that hooks compute anew in each forward, lists of weights, constants, and states where None was before."""
    torch.manual_seed(0)
    model = nn.Sequential(HARMLESS[kind]()).double().eval()
    torch.manual_seed(0)
    alone = nn.Sequential(HARMLESS[kind]()).double().eval()
    x = torch.randn(3, 4, dtype=torch.float64)
    spec, params = shards_of(fs.policies.always(STRATEGIES[strategy]), model)
    want, loss = gradient(alone(x).square().sum(), dict(alone.named_parameters())), loss_of(model, spec, x)
    torch.testing.assert_close(fs.unshard(fs.grad(loss)(params), spec), want, **EXACT)
    if kind == "positions" and strategy == "remat":  # in torch.func, a recomputed module does not tell what has a graph
        refused(RuntimeError, "'by_length'", lambda: torch.func.grad(loss)(params))
    else:
        torch.testing.assert_close(fs.unshard(torch.func.grad(loss)(params), spec), want, **EXACT)
