"""Law R3 for what a recomputed function hides: deferred results, results in one memory, and state that is no tensor."""

from __future__ import annotations

import copy
import io
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from models import unchanged
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def by_backward(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf)[0]


WAYS: dict[str, Callable[..., Any]] = {
    "fs.grad": fs.grad,
    "torch.func.grad": torch.func.grad,
    "backward": by_backward,
    "second order": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
}


def yields(x: Tensor) -> Iterator[Tensor]:
    for scale in (1.0, 2.0):
        yield x.sin() * scale


async def awaits(x: Tensor) -> Tensor:
    return x.sin()


class Picky(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Picky:
        return super().__new__(cls, (first, second))


UNCOPIED: dict[str, Callable[[Tensor], Any]] = {
    "generator": yields,
    "with tensors": lambda x: (x.sin(), [yields(x)]),
    "coroutine": awaits,
    "class without a copy": lambda x: Picky(x, x.sin()),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", UNCOPIED)
def test_a_result_that_pickle_cannot_copy_is_refused(kind: str, way: str) -> None:
    """What is computed later would have no gradient: the function has ended. A list of what it gives is exact."""
    with pytest.raises(TypeError, match=r"remat of .* returns, stores or changes an object that cannot be copied"):
        WAYS[way](lambda x: (fs.remat(UNCOPIED[kind])(x), x.sum())[1])(X)
    got, want = (WAYS[way](lambda x, f=f: f(lambda x: [*yields(x)])(x)[1].sum())(X) for f in (fs.remat, lambda f: f))
    assert_close(got, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", [lambda x: map(torch.sin, [x.cos()]), lambda x: iter([x.sin()])])
def test_an_iterator_that_pickle_copies_is_a_result(f: Callable[[Tensor], Any], way: str) -> None:
    """It computes from results."""
    got, want = (WAYS[way](lambda x, g=g: next(g(x)).square().sum())(X) for g in (fs.remat(f), f))
    assert_close(got, want)


GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list iterator": (lambda: iter([2.0, 3.0]), next),
    "StringIO": (lambda: io.StringIO("2\n3\n"), lambda b: float(b.readline())),
    "NumPy array": (lambda: np.ones(3), lambda b: float(b.__iadd__(1)[0])),
    "Python's generator": (lambda: random.Random(3), lambda g: g.random()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GIVEN)
def test_a_change_that_is_in_no_attribute_is_refused(kind: str, way: str) -> None:
    """Each run is given its own, and only lists, dicts, sets and attributes are written back. Unchanged, it is an argument."""
    make, change = GIVEN[kind]
    given = make()
    with pytest.raises(TypeError, match=r"remat of .* changes an object that cannot be copied \(a \S+ that it changes\)"):
        WAYS[way](lambda x: fs.remat(lambda x, held: x.sin() * change(held))(x, given).sum())(X)
    got, want = (
        WAYS[way](lambda x, f=f: f(x).sum())(X) for f in (fs.remat(lambda x: x.sin() * (given is not None)), torch.sin)
    )
    assert_close(got, want)
    assert change(given) == change(make())


class Swaps(nn.Module):
    """As BigBird on short texts: forward puts another module in the place of one, with its children."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.block[0] = nn.Sequential(*cast("nn.Sequential", self.block[0]))
        return self.block(x)


def test_a_module_that_forward_puts_into_a_recomputed_one() -> None:
    """Refused by name; where nothing is recomputed it is right (test_unreplaced.py)."""
    model = Swaps().double()
    spec = fs.by_path({"block": fs.P("shard", remat=True)})(model)
    words = r"'block.0' \(Sequential\) was put there in forward, and P\(remat=...\) of 'block'"
    with unchanged(model), pytest.raises(RuntimeError, match=words):
        fs.grad(lambda q: fs.functional_call(model, q, X, spec=spec).sum())(fs.shard(model, spec))


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y[:2]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat([x.sin(), x.cos()])
    return y[:3], y[3:]


SHARED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "a view changes": (two, 1),
    "its base changes": (two, 0),
    "halves": (halves, 0),
    "a view of an argument": (lambda x: (x.sin(), x.view(3)), 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SHARED)
def test_results_in_one_memory_are_not_changed_in_place(kind: str, way: str) -> None:
    """Without the change they are exact, and as clones."""
    f, changed = SHARED[kind]

    def loss(f: Callable[[Tensor], Any], *, in_place: bool, clones: bool = False) -> Callable[[Tensor], Tensor]:
        def of(x: Tensor) -> Tensor:
            argument = x * 1.5
            results = [y.clone() for y in f(argument)] if clones else f(argument)
            if in_place:
                results[changed].mul_(2)
            return sum(((i + 1) * result.square()).sum() for i, result in enumerate(results)) + argument.cos().sum()

        return of

    for options in ({"in_place": False}, {"in_place": True, "clones": True}):
        got, want = (WAYS[way](loss(g, **options))(X) for g in (fs.remat(f), f))
        assert_close(got, want)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        WAYS[way](loss(fs.remat(f), in_place=True))(X)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_with_parameters_is_refused_by_name(way: str) -> None:
    """As what it asks for it is exact, and the parameters have their gradients; a frozen one is a constant."""
    module = nn.Linear(3, 3).double()
    for f in (module, lambda x: module(x)):
        with pytest.raises(RuntimeError, match=r"remat of .* reads parameter '\w+' of a Linear, .*functional_call"):
            WAYS[way](lambda x, f=f: fs.remat(f)(x).sum())(X)
    frozen = copy.deepcopy(module).requires_grad_(False)
    got, want = (WAYS[way](lambda x, g=g: g(x).square().sum())(X) for g in (fs.remat(frozen), frozen))
    assert_close(got, want)
    params = {name: p.detach() for name, p in module.named_parameters()}

    def call(p: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, p, x).sin()

    got, want = (WAYS[way](lambda x, g=g: g(params, x).square().sum())(X) for g in (fs.remat(call), call))
    assert_close(got, want)
    got, want = (fs.grad(lambda p, g=g: g(p, X).square().sum())(params) for g in (fs.remat(call), call))
    assert_close(got, want)


def sets_on_an_argument(x: Tensor, w: Any) -> Any:
    w.extra = x.cos()
    return x * w


def sets_on_a_result(x: Tensor, w: Any) -> Any:
    y: Any = x.sin() * w
    y.extra = x.cos()
    return y


@pytest.mark.parametrize("f", [sets_on_an_argument, sets_on_a_result])
@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_that_is_set_on_a_tensor_is_refused(way: str, f: Callable[..., Any]) -> None:
    """No run's tensor is the caller's, so what is set would be lost; what is returned beside the result is exact."""
    w = torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"remat of .*sets the attribute 'extra' of a tensor, .*: expected it returned"):
        WAYS[way](lambda x: fs.remat(f)(x, w).sum())(X)


GLOBAL: dict[str, Any] = {}


def reads_a_global(w: Tensor) -> Callable[[Tensor], Tensor]:
    GLOBAL["w"] = w
    return lambda x: (x * GLOBAL["w"]).sin()


def reads_by_a_method(w: Tensor) -> Callable[[Tensor], Tensor]:
    multiply = w.mul
    return lambda x: multiply(x).sin()


def reads_by_a_weak_reference(w: Tensor) -> Callable[[Tensor], Tensor]:
    GLOBAL["keeps"], reference = w, weakref.ref(w)
    return lambda x: (x * cast(Tensor, reference())).sin()


OUTER_WAYS: dict[str, Callable[..., Any]] = {
    **WAYS,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    "hvp": lambda f: lambda x: fs.hvp(f, x, x),
    "vmap": lambda f: lambda x: torch.vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("way", OUTER_WAYS)
@pytest.mark.parametrize("read", [reads_a_global, reads_by_a_method, reads_by_a_weak_reference])
def test_a_tensor_of_a_transform_around_is_refused(read: Any, way: str) -> None:
    """A run is below the transform, where torch takes it for a constant: the gradient was zero. A constant is read."""
    with pytest.raises(RuntimeError, match=r"remat of .* reads a tensor of .*neither an argument nor reached from one"):
        OUTER_WAYS[way](lambda x: fs.remat(read(x * 2))(X).sum())(X.clone())
    for w in (X * 2 + 1, (X * 2).detach()):
        got, want = (
            OUTER_WAYS[way](lambda x, r=wrap, w=w: (r(read(w))(X).sum() * x).sum())(X) for wrap in (fs.remat, lambda f: f)
        )
        assert_close(got, want)


@pytest.mark.parametrize("way", ["torch.func.grad", "jvp", "hvp"])
def test_a_recomputed_module_that_reads_a_global_is_refused(way: str) -> None:
    class Reads(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * GLOBAL["w"]

    model = nn.Sequential(Reads(3, 3)).double()
    spec = fs.by_type(Reads, p=fs.P("shard", remat=True))(model)
    params = fs.shard(model, spec)

    def loss(x: Tensor) -> Tensor:
        GLOBAL["w"] = x.sin()
        return fs.functional_call(model, params, X, spec=spec).sum()

    with pytest.raises(RuntimeError, match=r"module '0' with .* reads a tensor of .*neither an argument nor reached from one"):
        OUTER_WAYS[way](loss)(X.clone())


@pytest.mark.parametrize("way", OUTER_WAYS)
def test_parameters_of_a_functional_call_around_are_refused_by_name(way: str) -> None:
    class Inside(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return fs.remat(lambda x: super(Inside, self).forward(x))(input)

    module = Inside(3, 3).double()
    bias = torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"remat of .* reads parameter 'weight' of a Inside, .*functional_call"):
        OUTER_WAYS[way](lambda x: torch.func.functional_call(module, {"weight": torch.outer(x, x), "bias": bias}, X).sum())(
            X.clone()
        )


class TaggedSet(frozenset[Any]):
    tag: float


class TaggedTensor(Tensor):
    pass


def tags_a_set(x: Tensor) -> Any:
    out = TaggedSet([x.sin()])
    out.tag = 2.0
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", [lambda x: [x.sin().as_subclass(TaggedTensor)], tags_a_set])
def test_classes_of_results_are_kept(f: Callable[[Tensor], Any], way: str) -> None:
    classes: list[type] = []

    def loss(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
        def of(x: Tensor) -> Tensor:
            (out,) = whole = f(x)
            classes.append(type(out))
            return getattr(whole, "tag", 1.0) * out.square().sum()

        return of

    got, want = (WAYS[way](loss(g))(X) for g in (fs.remat(f), f))
    assert_close(got, want)
    assert len(set(classes)) == 1


class Scales(nn.Linear):
    """A layer that doubles the gradient of its activation by a hook, registered without asking whether there is a graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda g: 2 * g)
        self.weight.register_hook(lambda g: 3 * g)
        return y.sin()


class ScalesArgument(nn.Linear):
    view = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x) if self.view else x
        if x.requires_grad:
            x.register_hook(lambda g: 2 * g)
        return super().forward(x).sin()


class Residual(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (x + self.second(x)).square().sum()


HOOK_WAYS = {name: WAYS[name] for name in ("fs.grad", "torch.func.grad")}


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_a_hook_in_a_recomputed_module(way: str) -> None:
    """The first run registers it on a tensor that has a graph, and the last run's gradient passes through it."""
    torch.manual_seed(0)
    model, x = Residual(lambda: Scales(3, 3)).double(), torch.randn(2, 3, dtype=torch.float64)
    grads: list[Any] = []
    for remat in (False, True):
        spec = fs.by_type(Scales, p=fs.P(remat=remat))(model)
        loss = lambda p, spec=spec: fs.functional_call(model, p, (x,), spec=spec)  # noqa: E731
        grads.append(HOOK_WAYS[way](loss)(fs.shard(model, spec)))
    assert_close(grads[1], grads[0])


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_a_hook_on_an_argument_is_refused(way: str) -> None:
    """It would miss the gradient that the argument gets outside of the module; on a view it sees that part alone."""
    torch.manual_seed(0)
    model, x = Residual(lambda: ScalesArgument(3, 3)).double(), torch.randn(2, 3, dtype=torch.float64)
    specs = [fs.by_type(ScalesArgument, p=fs.P(remat=remat))(model) for remat in (False, True)]
    grads = [HOOK_WAYS[way](lambda p, s=s: fs.functional_call(model, p, (x,), spec=s)) for s in specs]
    with pytest.raises(RuntimeError, match=r"module 'second' .*calls register_hook on .* given, args\[0\], .* x\.view_as\(x\)"):
        grads[1](fs.shard(model, specs[1]))
    model.first.view = model.second.view = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    params = fs.shard(model, specs[1])
    assert_close(grads[1](params), grads[0](params))


class Counts(nn.Linear):
    """A layer that counts its calls, in one of several places."""

    def __init__(self, where: str) -> None:
        super().__init__(3, 3)
        self.calls, self.where = 1, where
        self.register_buffer("seen", torch.ones((), dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        if self.where == "attribute":
            self.calls += 1
        elif self.where == "buffer":
            self.seen.add_(1)
        return super().forward(input) * self.calls * self.seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["attribute", "buffer"])
def test_a_module_of_a_closure_that_changes_is_refused(where: str, way: str) -> None:
    """Every run would change it; of a unit with P(remat=True) it changes once."""
    module = Counts(where).double().requires_grad_(False)
    what = "'calls'" if where == "attribute" else "'seen'"
    with pytest.raises(RuntimeError, match=rf"remat of .* changes {what} of a Counts, which each run would change again"):
        WAYS[way](fs.remat(lambda x: module(x).sum()))(X)


class Keeps(nn.Module):
    """A layer with something in an attribute, which it also may get as an argument."""

    def __init__(self, kept: Any, read: Callable[[Any, Any], float]) -> None:
        super().__init__()
        self.l, self.kept, self.read = nn.Linear(3, 3), kept, read

    def forward(self, input: Tensor, given: Any = None) -> Tensor:
        return torch.tanh(self.l(input)) * self.read(self.kept, given)


class Lossy:
    """An object that pickle would copy without what it is for."""

    def __init__(self) -> None:
        self.factor = 3.0

    def __getstate__(self) -> dict[str, float]:
        return {"factor": 1.0}


class Counter(nn.Module):
    calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


class Some(list[int]):
    pass


MARK, KEY, SOME = object(), Lossy(), Some()


def append(given: list[int]) -> float:
    given.append(1)
    return float(len(given))


def increase(array: np.ndarray[Any, Any]) -> float:
    array[0] += 1
    return float(array[0])


@pytest.mark.parametrize(
    ("kept", "read", "given"),
    [
        (None, lambda kept, given: 2.0 if given is MARK else 5.0, MARK),
        ({KEY: 2.0}, lambda kept, given: kept.get(given, 5.0), KEY),
        (None, lambda kept, given: given.factor, KEY),
        (None, lambda kept, given: append(given) / len(given), SOME),
    ],
    ids=["sentinel", "key", "lossy", "global list"],
)
def test_arguments_are_who_they_are(kept: Any, read: Callable[[Any, Any], float], given: Any) -> None:
    """The copies of a run are the same among each other, and have all that the objects have."""
    model = Keeps(kept, read).double()
    full = {name: p.detach() for name, p in model.named_parameters()}
    want = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X, given)).sum())(full)
    for p in (fs.P(), fs.P(remat=True)):
        spec = fs.policies.whole(p)(model)
        got = fs.grad(lambda q, s=spec: fs.functional_call(model, q, (X, given), spec=s).sum())(fs.shard(full, spec))
        assert_close(fs.unshard(got, spec), want)


@pytest.mark.parametrize(
    ("kept", "read"),
    [
        (np.random.default_rng(0), lambda kept, _: float(kept.random())),
        (np.zeros(1), lambda kept, _: increase(kept)),
        ([Counter()], lambda kept, _: kept[0].count()),
        (SimpleNamespace(calls=1), lambda kept, _: setattr(kept, "calls", kept.calls + 1) or kept.calls),
    ],
    ids=["generator", "array", "module", "object"],
)
def test_what_each_run_would_change_again_is_refused(kept: Any, read: Callable[[Any, Any], float]) -> None:
    """In an attribute; among the arguments of a module an object changes once (the cases of recomputed_cases.py)."""
    model = Keeps(kept, read).double()
    spec = fs.policies.whole(fs.P(remat=True))(model)
    with pytest.raises((TypeError, RuntimeError), match=r"that it changes|would change again"):
        fs.grad(lambda p: fs.functional_call(model, p, (X,), spec=spec).sum())(fs.shard(model, spec))


def makes_a_leaf(x: Tensor) -> Tensor:
    own = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return (x * own).sin()


def reads_the_gradient_of_its_own(x: Tensor) -> Tensor:
    own = torch.ones(3, dtype=torch.float64).requires_grad_()
    (own.square() * 3).sum().backward()
    return x.sin() * own.grad  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize(
    ("f", "way"),
    [*((makes_a_leaf, way) for way in WAYS), *((reads_the_gradient_of_its_own, w) for w in ("fs.grad", "backward"))],
)
def test_a_leaf_that_a_run_makes_is_its_own(f: Callable[[Tensor], Tensor], way: str) -> None:
    """As MRA and Jamba of transformers have one."""
    got, want = (WAYS[way](lambda x, g=g: g(x).sum())(X) for g in (fs.remat(f), f))
    assert_close(got, want)


@pytest.mark.parametrize("way", ["fs.grad", "backward"])
def test_a_tensor_that_leaves_by_a_global_has_no_gradient(way: str) -> None:
    """It says so, instead of a gradient that lacks it."""

    def f(x: Tensor) -> Tensor:
        GLOBAL["left"] = x.sin()
        return x.cos()

    def loss(x: Tensor) -> Tensor:
        return fs.remat(f)(x).sum() + GLOBAL["left"].sum()

    with pytest.raises(RuntimeError, match=r"remat of .*f hands on a tensor by a global, .* expected it in the result"):
        WAYS[way](loss)(X)
