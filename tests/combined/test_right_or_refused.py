"""Modules as people write them (LAWS R1, R2, R4): sharded, the plain model's derivatives of both orders, or an error.

What is saved without a graph, parameters that forward changes in place, inference mode, script modules, sparse gradients
and threads; on real ranks, with every strategy. What each module does is `torch.func.functional_call` of the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, every, some
from fuzz_modules import PIECES
from models import EXACT, module_class, refused, unchanged, with_forward
from parity import DERIVATIVES, shards_of, squared_loss, strategies
from ranks import real_ranks
from torch import Tensor, nn
from torch.func import grad
from torch.nn.utils import parametrize

import funshard as fs
from funshard import P, _torch

Tree = Mapping[str, Tensor]
Loss = Callable[[Tree], Tensor]

RANKS = 2
IDENTITY = fs.Precision(codec=fs.Codec(lambda x: (x,), lambda x: x))
STRATEGIES = strategies("shard", "keep", "replicated", codec=P("shard", precision=IDENTITY))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))


class Parametrized(Base):
    """Registers parametrizations for the length of a call, as peft does for fused experts: each calls ``set_``."""

    def forward(self, x: Tensor) -> Tensor:
        for name, tensor in (("weight", self.w), ("bias", self.w[0])):
            parametrize.register_parametrization(self.l, name, Plus(tensor))
        try:
            return torch.tanh(self.l(x)) @ self.w
        finally:
            for name in ("weight", "bias"):
                parametrize.remove_parametrizations(self.l, name, leave_parametrized=False)


Summed = with_forward(Base, lambda self, x: torch.tanh(F.linear(x, self.l.weight + self.w, self.l.bias + self.w[0])) @ self.w)
"""Computes the same."""
Plus = module_class("Plus", lambda other: {"other": other}, lambda self, tensor: tensor + self.other)


def in_place_around(self: Any, x: Tensor) -> Tensor:
    """Writes to a parameter of a unit before the unit's module runs."""
    self.w.weight.data.clamp_(-0.3, 0.3)
    return torch.tanh(self.w(x))


InPlaceAround = module_class("InPlaceAround", lambda: {"w": nn.Linear(4, 4)}, in_place_around)
BY_VERSION = ["ClampsWithoutGrad", "ScalesAfterUse", "MaxNorm", "SetsData"]
CHANGING = [*BY_VERSION, "ClampsData"]
"""The last writes what no version counts."""
WAYS = ("fs.grad", "torch.func.grad", "autograd", "hvp", "grad of grad", "double backward")


def network(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), kind(), kind(), nn.Linear(4, 4)).double()


def inputs() -> Tensor:
    return torch.randn(RANKS, 3, 4, generator=torch.Generator().manual_seed(1)).double()


def setting(kind: Callable[[], nn.Module], p: P) -> tuple[nn.Module, fs.PartitionSpec, fs.Params]:
    model = network(kind)
    spec = fs.by_path({"1": p, "2": p})(model).bound
    return model, spec, fs.shard(model, spec)


def squared(model: nn.Module, params: Tree, x: Tensor, spec: fs.PartitionSpec) -> Tensor:
    buffers = {name: b.clone() for name, b in model.named_buffers()}  # that they are updated is not the matter here
    return (fs.functional_call(model, params, (x,), spec=spec, buffers=buffers) ** 2).mean()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))], ids=["script", "trace"])
def test_script_modules_are_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    """As torch.func does; the module that was scripted is right."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), make(layer))
    spec = fs.policies.always()(model)
    with pytest.raises(TypeError, match="module '1' is a ScriptModule, whose code reads its own parameters and not those of a"):
        fs.functional_call(model, fs.shard(model, spec), (torch.ones(2, 4),), spec=spec)
    plain = nn.Sequential(model[0], layer)
    assert torch.equal(fs.functional_call(plain, fs.shard(plain, spec), torch.ones(2, 4), spec=spec), model(torch.ones(2, 4)))


@real_ranks(2)
def test_parametrizations_for_the_length_of_a_call(rank: int) -> None:
    """Exact with every strategy, by every way, and model and shards as they were; other pieces are in test_fuzz.py."""
    xs, whole = inputs(), network(Summed)  # torch.func leaves a parametrized weight as a buffer
    full = {name: p.detach() for name, p in whole.named_parameters()}

    def mean(p: Tree) -> Tensor:
        return torch.stack([(torch.func.functional_call(whole, dict(p), (x,)) ** 2).mean() for x in xs]).mean()

    for way, strategy in some(itertools.product(WAYS, STRATEGIES), 1):
        model, spec, params = setting(Parametrized, STRATEGIES[strategy])
        before = copy.deepcopy(params)
        with unchanged(model):
            got = DERIVATIVES[way](lambda q, m=model, s=spec: squared(m, q, xs[rank], s))(params)
        for key, shard in fs.shard(DERIVATIVES[way](mean)(full), spec).items():
            torch.testing.assert_close(got[key], shard, **EXACT, msg=lambda m, w=(way, strategy, key): f"{w}: {m}")
            assert torch.equal(params[key], before[key])


@every(p=[P("shard"), P("shard", remat=True)], way=["fs.grad", "torch.func.grad", "autograd"])
def test_writes_from_around_a_unit_are_refused(p: P, way: str) -> None:
    """Where others have read the unit's buffer since."""
    model = network(InPlaceAround)
    spec, params = shards_of(fs.by_path({"1.w": p, "2.w": p}), model)
    before = copy.deepcopy(params)
    with fs.check(), pytest.raises(RuntimeError, match=r"parameter '1\.w\.weight' of unit '1\.w' was changed in place"):
        DERIVATIVES[way](lambda q: squared(model, q, inputs()[0], spec))(params)
    assert all(torch.equal(params[key], t) for key, t in before.items())


def scale_the_second(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.b.mul_(2)
    return x * self.a * self.b


@pytest.mark.parametrize("copied", [False, True])
def test_a_write_to_a_parameter_given_in_full_names_no_other(copied: bool) -> None:
    """Views of one buffer have one version: then it is one of them."""
    model = module_class("Pair", lambda: {n: nn.Parameter(torch.ones(3).double()) for n in "ab"}, scale_the_second)()
    spec = fs.policies.whole()(model)
    full = {k: t.clone() if copied else t for k, t in fs.unshard(fs.shard(model, spec), spec).items()}
    match = "^parameter 'b' of unit" if copied else "^one of the parameters 'a', 'b' of unit"
    refused(RuntimeError, match, lambda: fs.functional_call(model, full, torch.ones(3).double(), spec=spec))


def stay_parametrized(self: Base, x: Tensor) -> Tensor:
    parametrize.register_parametrization(self.l, "weight", Plus(self.w))
    raise KeyError("a user's own error")


def test_the_class_of_a_module_is_put_back() -> None:
    """torch.nn.utils.parametrize gives a module a class of its own, and an error keeps forward from taking it off."""
    model, spec, params = setting(with_forward(Base, stay_parametrized), P("shard"))
    for _ in range(2):
        with unchanged(model), pytest.raises(KeyError, match="a user's own error"):
            squared(model, params, inputs()[0], spec)
        assert type(model[1].l) is nn.Linear


@every(kind=CHANGING, given=["shards", "full", "views", "remat"])
def test_parameters_changed_in_place_are_refused(kind: str, given: str) -> None:
    """By name, and what was given is left alone in fs.check: the caller's own shard, or full parameters in its place."""
    p = P("shard", remat=given == "remat")
    model, spec, params = setting(PIECES[kind], p)
    if given in ("full", "views"):
        params = {k: t.clone() if given == "full" else t for k, t in fs.unshard(params, spec).items()}
    before = copy.deepcopy(params)
    with fs.check(), unchanged(model), torch.no_grad(), pytest.raises(RuntimeError, match=r"'1\..* was changed in place"):
        squared(model, params, inputs()[0], spec)
    assert all(torch.equal(params[key], t) for key, t in before.items())
    if kind in BY_VERSION and given in ("shards", "remat"):
        with unchanged(model), pytest.raises(RuntimeError, match=r"'1\..* was changed in place|a view, as '1\."):
            fs.grad(lambda q: squared(model, q, inputs()[0], spec))(params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_through_data_reaches_the_shard_where_nothing_is_gathered(strategy: str) -> None:
    """The limit as the guide has it: no error outside of fs.check; where a buffer of its own is gathered, the write is lost."""
    model, spec, params = setting(PIECES["ClampsData"], STRATEGIES[strategy])
    before = copy.deepcopy(params)
    fs.grad(lambda p: squared(model, p, inputs()[0], spec))(params)
    assert all(torch.equal(params[key], t) for key, t in before.items()) == (strategy == "codec")


def test_parameters_that_are_only_read_do_not_count() -> None:
    """nn.LSTM asks for memory to write to and only reads it; NaN are equal to themselves."""
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True)).double()
    with torch.no_grad():
        model[0].bias_hh_l0[0] = torch.nan
    spec, params = shards_of(fs.policies.whole(), model)
    for check in (contextlib.nullcontext(), fs.check()):
        with check:
            out = fs.functional_call(model, params, (torch.ones(2, 5, 3).double(),), spec=spec)[0]
        assert out.isnan().any()


@pytest.fixture
def _many_switches() -> Iterator[None]:
    """Threads take turns more often than calls end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@at_most(1)
@pytest.mark.usefixtures("_many_switches")
@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True)])
def test_two_threads_in_one_model_are_refused(p: P) -> None:
    """Every gradient is right or an error, and the model is what it was; one after the other they are all right."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]).double()
    spec = fs.by_path({"*": p})(model)
    x = torch.randn(8, 16).double()
    given = [fs.shard({k: t.detach() * i for k, t in model.named_parameters()}, spec) for i in (1, 2)]

    loss = squared_loss(model, spec, x)
    expected = [fs.grad(loss)(params) for params in given]
    errors: list[str] = []
    wrong: list[int] = []
    inside, lock = threading.Barrier(2, timeout=60), threading.Lock()

    def train(i: int, guard: Any) -> None:
        for number in range(1000):  # on a busy machine it takes some until both are there at once
            inside.wait()
            enough = number >= 20 and bool(guard or errors)
            inside.wait()  # both have seen the same errors
            if enough:
                break
            try:
                with guard or threading.Lock():
                    grads = fs.grad(loss)(given[i])
                wrong.extend(i for key, g in grads.items() if not torch.equal(g, expected[i][key]))
            except RuntimeError as error:
                errors.append(str(error))

    for guard in (None, lock):
        errors.clear()
        with unchanged(model), ThreadPoolExecutor(2) as threads:
            [*threads.map(train, range(2), [guard] * 2)]
        assert not wrong
        assert all("is in a functional_call of another thread: expected one at a time" in e for e in errors)
        assert bool(errors) is (guard is None)


def test_a_call_in_a_call() -> None:
    """The same thread may call one of the model's modules on other parameters while the model runs."""

    outer = module_class(
        "Outer",
        lambda: {"inner": PIECES["Detached"](), "last": nn.Linear(4, 4)},
        lambda self, x: self.last(self.inner(x) + fs.functional_call(self.inner, fs.shard(other, inside), (x,), spec=inside)),
    )

    model, x = outer().double(), inputs()[0]
    other = {name: p.detach() * 3 for name, p in model.inner.named_parameters()}
    inside = fs.policies.whole()(model.inner)
    spec = fs.by_path({"inner": P("shard")})(model)

    def plain(p: Tree) -> Tensor:
        own = torch.func.functional_call(model.inner, other, (x,))
        inner = {k.removeprefix("inner."): t for k, t in p.items() if k.startswith("inner.")}
        return F.linear(torch.func.functional_call(model.inner, inner, (x,)) + own, p["last.weight"], p["last.bias"]).sum()

    with unchanged(model):
        got = fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum())(fs.shard(model, spec))
    expected = fs.shard(grad(plain)({name: p.detach() for name, p in model.named_parameters()}), spec)
    torch.testing.assert_close(got, expected, **EXACT)


def penalised(m: Any, x: Tensor) -> Tensor:
    """A gradient by the weights of layers that have run."""
    h = m.a(x)
    grads = torch.autograd.grad(m.b(h.tanh()).pow(2).mean(), [*m.parameters()], create_graph=True, allow_unused=True)
    return h + sum(g.pow(2).sum() for g in grads if g is not None)


def penalised_last(m: Any, x: Tensor) -> Tensor:
    y = m.a(m.b(x).tanh()).tanh()
    return y + torch.autograd.grad(y.sum(), m.a.weight, create_graph=True, allow_unused=True, materialize_grads=True)[0].sum()


def hooked(m: Any, x: Tensor) -> Tensor:
    if m.a.weight.requires_grad:
        m.a.weight.register_hook(lambda g: 2 * g)
    return m.b(m.a(x).tanh())


def tied(m: Any, x: Tensor) -> Tensor:
    """A weight that is read after its module has run, and another one since: it counts as often as it is used."""
    return m.b(m.a(x).tanh()) @ m.a.weight


def copied(m: Any, x: Tensor) -> Tensor:
    """What is saved under hooks that copy has no derivative."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        x = m.a(x).tanh()
    return m.b(x)


def descends(m: Any, x: Tensor) -> Tensor:
    y = F.linear(x, m.weight)
    (step,) = torch.autograd.grad(y.tanh().sum(), m.weight, create_graph=True)
    return y - 0.1 * F.linear(x, step)


def reads(forward: Any) -> nn.Module:
    return module_class("Reads", lambda: {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, forward)()


def runs_twice() -> nn.Module:
    """A module whose first run is a part of its second one's gradient, which another gather or a run again would miss."""
    twice = with_forward(nn.Linear, descends)(4, 4, bias=False)
    return nn.Sequential(twice, nn.Linear(4, 4), twice)


TWICE = {
    "shard": "unit '0': forward takes a gradient by a parameter of it, and it was freed and gathered again in this call",
    "remat": "module '0' .* differentiates by its parameters, which others of its arguments are computed from",
}
OTHER = "parameter 'a.weight' is read in forward where its module computes with another tensor"
READ_BY = {"shard": P("shard"), "remat": P("shard", remat=True), "keep": P("shard", reshard=False)}
READS: dict[str, tuple[Any, dict[str, str], str]] = {  # by strategy, where a first derivative is refused; and a second one
    "a gradient by weights": (lambda: reads(penalised), {"shard": OTHER, "remat": OTHER}, ""),
    "a gradient by the last weights": (lambda: reads(penalised_last), {"remat": OTHER}, ""),
    "a hook on a weight": (lambda: reads(hooked), {"remat": OTHER}, ""),
    "a weight of before": (lambda: reads(tied), {}, ""),
    "a gradient by its own weight": (runs_twice, TWICE, ""),
    "hooks of its own": (
        lambda: reads(copied),
        {},
        "'a' is read within torch.autograd.graph.saved_tensors_hooks of forward's own, inside of",
    ),
}


@every(read=READS, strategy=READ_BY)
@real_ranks(2)
def test_weights_read_where_others_are_computed_with(rank: int, read: str, strategy: str) -> None:
    """A gradient by them, or a hook on them, would miss what the module did with those that it was given."""
    make, first, second = READS[read]
    model = make().double()
    x, spec = torch.randn(3, 4).double(), fs.by_type(nn.Linear, p=READ_BY[strategy])(model).bound
    loss, params = lambda p: fs.functional_call(model, p, (x,), spec=spec).square().sum(), fs.shard(model, spec)
    torch.autograd.backward(model(x).square().sum())
    expected = fs.shard({name: q.grad for name, q in model.named_parameters()}, spec)
    if words := first.get(strategy):
        refused(RuntimeError, words, lambda: fs.grad(loss)(params))
    else:
        torch.testing.assert_close(fs.grad(loss)(params), expected, **EXACT)
    if second:
        refused(RuntimeError, second, lambda: fs.hvp(loss, params, params, forward=False))


class Remembers(nn.Module):
    """What forward leaves behind outlives the transforms that it was computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.memo: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x).tanh()
        self.memo.append(y)
        self.seen = 0.9 * self.seen + y.detach().mean(0)
        return x + y + 0.1 * self.seen


@pytest.mark.filterwarnings("ignore::funshard._call.buffers.BufferWarning")
@every(left_by=["torch.func", "funshard"], p=[P(), P(remat=True), P(offload="activations")])
def test_what_ended_transforms_have_left_in_the_model(p: P, left_by: str) -> None:
    """Tensors of two transforms that have ended: torch cannot compute with them, nor clone them, inside of another."""
    model = nn.Sequential(Remembers(), Remembers())
    x, spec = torch.randn(3, 4), fs.by_type(Remembers, p=p)(model)
    params = fs.shard(model, spec)

    def squares(loss: Loss) -> Loss:
        return lambda params: sum((g**2).sum() for g in grad(loss)(params).values())  # pyright: ignore[reportReturnType]

    def loss(params: Tree) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec, attributes="*.memo")[0].square().mean()

    if left_by == "torch.func":
        plain = dict(model.named_parameters())
        grad(squares(lambda params: torch.func.functional_call(model, params, (x,)).square().mean()))(plain)
    else:
        grad(squares(loss))(params)
    seen = [_torch.unwrap(child.seen).clone() for child in model]  # pyright: ignore[reportAttributeAccessIssue]
    found = [f(params) for f in (fs.grad(loss), grad(loss), grad(squares(loss)))]

    model = nn.Sequential(Remembers(), Remembers())
    for child, buffer in zip(model, seen, strict=True):
        child.seen = buffer
    for f, of in zip((fs.grad(loss), grad(loss), grad(squares(loss))), found, strict=True):
        torch.testing.assert_close(f(params), of, **EXACT)
