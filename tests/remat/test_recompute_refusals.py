"""Law R3 for what a recomputed function hides: deferred results, results in one memory, and state that is no tensor."""

from __future__ import annotations

import copy
import io
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from depth import every
from models import module_class, refused, unchanged
from parity import gradient, gradient_of, loss_of, plain_grad, shards_of
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = Callable[[Wrap, Tensor], Tensor]
"""What calls functions by a wrapper of them, `fs.remat` or none."""

WAYS: dict[str, Callable[..., Any]] = {
    "fs.grad": fs.grad,
    "torch.func.grad": torch.func.grad,
    "backward": plain_grad,
    "second order": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
}
OUTER_WAYS: dict[str, Callable[..., Any]] = {
    **WAYS,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    "hvp": lambda f: lambda x: fs.hvp(f, x, x),
    "vmap": lambda f: lambda x: torch.vmap(f)(torch.stack([x, x])),
}
"""Also those in which nothing runs again."""


def yields(x: Tensor) -> Iterator[Tensor]:
    for scale in (1.0, 2.0):
        yield x.sin() * scale


class Picky(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Picky:
        return super().__new__(cls, (first, second))


def sets_on_an_argument(x: Tensor, w: Any) -> Any:
    w.extra = x.cos()
    return x * w


def sets_on_a_result(x: Tensor, w: Any) -> Any:
    y: Any = x.sin() * w
    y.extra = x.cos()
    return y


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y[:2]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat([x.sin(), x.cos()])
    return y[:3], y[3:]


def with_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.view(3)


def in_one_memory(f: Callable[[Tensor], Any], changed: int | None = None, *, clones: bool = False) -> Loss:
    """Results of which one may be changed in place."""

    def loss(again: Wrap, x: Tensor) -> Tensor:
        argument = x * 1.5
        results = [y.clone() if clones else y for y in again(f)(argument)]
        if changed is not None:
            results[changed].mul_(2)
        return sum(((i + 1) * result.square()).sum() for i, result in enumerate(results)) + argument.cos().sum()

    return loss


GLOBAL: dict[str, Any] = {}


def reads_a_global(w: Tensor) -> Callable[[Tensor], Tensor]:
    GLOBAL["w"] = w
    return lambda x: (x * GLOBAL["w"]).sin()


def reads_by_a_weak_reference(w: Tensor) -> Callable[[Tensor], Tensor]:
    GLOBAL["keeps"], reference = w, weakref.ref(w)
    return lambda x: (x * cast(Tensor, reference())).sin()


def leaves_by_a_global(x: Tensor) -> Tensor:
    GLOBAL["left"] = x.sin()
    return x.cos()


class Counts(nn.Linear):
    """A layer that counts its calls, in an attribute or in a buffer."""

    def __init__(self, where: str) -> None:
        super().__init__(3, 3)
        self.calls, self.where = 1, where
        self.register_buffer("seen", torch.ones((), dtype=torch.float64))
        self.double().requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        if self.where == "attribute":
            self.calls += 1
        else:
            self.seen.add_(1)
        return super().forward(input) * self.calls * self.seen


def of_a_thread(w: Tensor) -> Callable[[], Tensor]:
    local = threading.local()
    local.w = w
    return lambda: X * local.w


def asks(x: Tensor) -> Tensor:
    return x.sin() if x.requires_grad else x.cos()


def closing_over(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x)


class Inside(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return fs.remat(lambda x: super(Inside, self).forward(x))(input)


COUNTS = {where: Counts(where) for where in ("attribute", "buffer")}
LAYER, INSIDE, ONES = nn.Linear(3, 3).double(), Inside(3, 3).double(), torch.ones(3, dtype=torch.float64)
UNCOPIED = r"remat of .* returns, stores or changes an object that cannot be copied"
IN_PLACE = "is a view and is being modified inplace"
PARAMETER = r"remat of .* reads parameter '\w+' of a {}, .*functional_call"
OF_A_TRANSFORM = r"remat of .* reads a tensor of .*neither an argument nor reached from one"
ATTRIBUTE = r"remat of .*sets the attribute 'extra' of a tensor, .*: expected it returned"
CHANGES = "remat of .* changes '{}' of a Counts, which each run would change again"
NO_COPY = r"cannot be copied for another run, {} \(cannot pickle '{}' object\)"
OF_A_VIEW, OF_A_THREAD = NO_COPY.format(r"args\[0\]", "dict_values"), NO_COPY.format("the function", "_thread._local")
HANDS_ON = "remat of .*leaves_by_a_global hands on a tensor by a global, .* expected it in the result"

REFUSED: dict[str, tuple[Loss, str]] = {
    # computed later, where it would have no gradient: the function has ended
    "generator": (lambda again, x: (again(yields)(x), x.sum())[1], UNCOPIED),
    "class without a copy": (lambda again, x: again(lambda x: Picky(x, x.sin()))(x)[1].sum(), UNCOPIED),
    # results in one memory, of which one changes in place
    "a view changes": (in_one_memory(two, 1), IN_PLACE),
    "a half changes": (in_one_memory(halves, 0), IN_PLACE),
    "an argument changes": (in_one_memory(with_argument, 1), IN_PLACE),
    # no run's tensor is the caller's, so what is set would be lost
    "sets on an argument": (lambda again, x: again(sets_on_an_argument)(x, ONES).sum(), ATTRIBUTE),
    "sets on a result": (lambda again, x: again(sets_on_a_result)(x, ONES).sum(), ATTRIBUTE),
    # each run would change it again
    "a module counts": (lambda again, x: again(closing_over(COUNTS["attribute"]))(x).sum(), CHANGES.format("calls")),
    "a module's buffer counts": (lambda again, x: again(closing_over(COUNTS["buffer"]))(x).sum(), CHANGES.format("seen")),
    # parameters and tensors of a transform around, which a run below it takes for constants
    "module": (lambda again, x: again(LAYER)(x).sum(), PARAMETER.format("Linear")),
    "parameters of a call around": (
        lambda again, x: torch.func.functional_call(INSIDE, {"weight": torch.outer(x, x), "bias": ONES}, X).sum(),
        PARAMETER.format("Inside"),
    ),
    "reads a global": (lambda again, x: again(reads_a_global(x * 2))(X).sum(), OF_A_TRANSFORM),
    "reads by a weak reference": (lambda again, x: again(reads_by_a_weak_reference(x * 2))(X).sum(), OF_A_TRANSFORM),
    "leaves by a global": (lambda again, x: again(leaves_by_a_global)(x).sum() + GLOBAL["left"].sum(), HANDS_ON),
    # tensors that no copy reaches
    "a view of a dict": (lambda again, x: again(lambda vs: X * next(iter(vs)))({"w": x}.values()).sin().sum(), OF_A_VIEW),
    "a thread's": (lambda again, x: again(of_a_thread(x))().sin().sum(), OF_A_THREAD),
    # what each level of a stack would answer by itself, or a first run with a graph by what it was not given
    "asks autograd": (lambda again, x: again(asks)(x).sum(), r"remat of asks reads tensor.requires_grad, which in a stack"),
    "asks of a captured tensor": (
        lambda again, x: (GLOBAL.update(w=x), again(lambda y: (asks(y) * GLOBAL["w"]).sum())(x * 2))[1],
        "reads a tensor of the running computation that is neither an argument",
    ),
}
ERRORS: dict[str, Any] = {UNCOPIED: TypeError, **dict.fromkeys((OF_A_VIEW, OF_A_THREAD), (TypeError, RuntimeError))}
SOME_WAYS = {
    **dict.fromkeys(("leaves by a global", "reads the gradient of its own"), ("fs.grad", "backward")),
    **dict.fromkeys(("a view of a dict", "a thread's"), (*WAYS, "hvp")),
    "asks autograd": ["hvp"],
    "asks of a captured tensor": ["fs.grad"],
}


def ways_of(name: str) -> Any:
    return SOME_WAYS.get(name, OUTER_WAYS if name.startswith("reads") or "around" in name else WAYS)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in REFUSED for way in ways_of(name)])
def test_what_is_refused(name: str, way: str) -> None:
    """By name and with what to write: the gradient would be wrong, or zero."""
    loss, words = REFUSED[name]
    refused(ERRORS.get(words, RuntimeError), words, lambda: OUTER_WAYS[way](lambda x: loss(fs.remat, x))(X.clone()))


def makes_a_leaf(x: Tensor) -> Tensor:
    own = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return (x * own).sin()


def reads_the_gradient_of_its_own(x: Tensor) -> Tensor:
    own = torch.ones(3, dtype=torch.float64).requires_grad_()
    (own.square() * 3).sum().backward()
    return x.sin() * own.grad  # pyright: ignore[reportOperatorIssue]


def calls(params: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(LAYER, params, x).sin()


PARAMS = {name: p.detach() for name, p in LAYER.named_parameters()}
FROZEN, GIVEN = copy.deepcopy(LAYER).requires_grad_(False), random.Random(3)
CONSTANT = (X * 2).detach()
RIGHT: dict[str, Loss] = {
    "list of a generator": lambda again, x: again(lambda x: [*yields(x)])(x)[1].sum(),
    "map of tensors": lambda again, x: next(again(lambda x: map(torch.sin, [x.cos()]))(x)).square().sum(),
    "iterator of tensors": lambda again, x: next(again(lambda x: iter([x.sin()]))(x)).square().sum(),
    "a view": in_one_memory(two),
    "halves": in_one_memory(halves),
    "an argument": in_one_memory(with_argument),
    "a clone of a view changes": in_one_memory(two, 1, clones=True),
    "an object that does not change": lambda again, x: again(lambda x: x.sin() * (GIVEN is not None))(x).sum(),
    "frozen module": lambda again, x: again(FROZEN)(x).square().sum(),
    "parameters as arguments": lambda again, x: again(calls)(PARAMS, x).square().sum(),
    "parameters of x": lambda again, x: again(calls)({"weight": torch.outer(x, x), "bias": x}, X).square().sum(),
    "reads a constant global": lambda again, x: (again(reads_a_global(CONSTANT))(X).sum() * x).sum(),
    "makes a leaf": lambda again, x: again(makes_a_leaf)(x).sum(),  # as MRA and Jamba of transformers
    "reads the gradient of its own": lambda again, x: again(reads_the_gradient_of_its_own)(x).sum(),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in RIGHT for way in ways_of(name)])
def test_what_is_right(name: str, way: str) -> None:
    got, want = (OUTER_WAYS[way](lambda x, w=wrap: RIGHT[name](w, x))(X) for wrap in (fs.remat, lambda f: f))
    assert_close(got, want)


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list iterator": (lambda: iter([2.0, 3.0]), next),
    "StringIO": (lambda: io.StringIO("2\n3\n"), lambda b: float(b.readline())),
    "NumPy array": (lambda: np.ones(3), lambda b: float(b.__iadd__(1)[0])),
    "Python's generator": (lambda: random.Random(3), lambda g: g.random()),
}


@every(way=WAYS, kind=CHANGED)
def test_a_change_that_is_in_no_attribute_is_refused(kind: str, way: str) -> None:
    """Each run is given its own, and only lists, dicts, sets and attributes are written back."""
    make, change = CHANGED[kind]
    given = make()
    with pytest.raises(TypeError, match=r"remat of .* changes an object that cannot be copied \(a \S+ that it changes\)"):
        WAYS[way](lambda x: fs.remat(lambda x, held: x.sin() * change(held))(x, given).sum())(X)
    assert change(given) == change(make())


# --- modules ---
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
    words = r"'block.0' \(Sequential\) was put there in forward, and P\(remat=...\) of 'block'"
    with unchanged(model), pytest.raises(RuntimeError, match=words):
        gradient_of(fs.by_path({"block": fs.P("shard", remat=True)}), model, X)


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


Residual = module_class(
    "Residual",
    lambda make: {"first": make(), "second": make()},
    lambda self, x: (lambda x: (x + self.second(x)).square().sum())(self.first(x)),
)


HOOK_WAYS = {name: WAYS[name] for name in ("fs.grad", "torch.func.grad")}


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_a_hook_in_a_recomputed_module(way: str) -> None:
    """The first run registers it on a tensor that has a graph, and the last run's gradient passes through it."""
    torch.manual_seed(0)
    model, x = Residual(lambda: Scales(3, 3)).double(), torch.randn(2, 3, dtype=torch.float64)
    policies = [fs.by_type(Scales, p=fs.P(remat=remat)) for remat in (False, True)]
    assert_close(*(gradient_of(policy, model, x, way=HOOK_WAYS[way], of=torch.sum) for policy in policies))


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_a_hook_on_an_argument_is_refused(way: str) -> None:
    """It would miss the gradient that the argument gets outside of the module; on a view it sees that part alone."""
    torch.manual_seed(0)
    model, x = Residual(lambda: ScalesArgument(3, 3)).double(), torch.randn(2, 3, dtype=torch.float64)
    specs = [fs.by_type(ScalesArgument, p=fs.P(remat=remat))(model).bound for remat in (False, True)]
    grads, params = [HOOK_WAYS[way](loss_of(model, s, x, of=torch.sum)) for s in specs], fs.shard(model, specs[1])
    with pytest.raises(RuntimeError, match=r"module 'second' .*calls register_hook on .* given, args\[0\], .* x\.view_as\(x\)"):
        grads[1](params)
    model.first.view = model.second.view = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert_close(grads[1](params), grads[0](params))


Keeps = module_class(
    "Keeps",
    lambda kept, read: {"l": nn.Linear(3, 3), "kept": kept, "read": read},
    lambda self, input, given=None: torch.tanh(self.l(input)) * self.read(self.kept, given),
)
"""A layer with something in an attribute, which it also may get as an argument."""


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


MARK, KEY = object(), Lossy()


@pytest.mark.parametrize(
    ("kept", "read", "given"),
    [
        (None, lambda kept, given: 2.0 if given is MARK else 5.0, MARK),
        ({KEY: 2.0}, lambda kept, given: kept.get(given, 5.0), KEY),
        (None, lambda kept, given: given.factor, KEY),
    ],
    ids=["sentinel", "key", "lossy"],
)
def test_arguments_are_who_they_are(kept: Any, read: Callable[[Any, Any], float], given: Any) -> None:
    """The copies of a run are the same among each other, and have all that the objects have."""
    model = Keeps(kept, read).double()
    want = gradient(model(X, given).sum(), dict(model.named_parameters()))
    for p in (fs.P(), fs.P(remat=True)):
        spec, params = shards_of(fs.policies.whole(p), model)
        assert_close(fs.unshard(fs.grad(loss_of(model, spec, X, given, of=torch.sum))(params), spec), want)


@pytest.mark.parametrize(
    ("kept", "read"),
    [
        ([Counter()], lambda kept, _: kept[0].count()),
        (SimpleNamespace(calls=1), lambda kept, _: setattr(kept, "calls", kept.calls + 1) or kept.calls),
    ],
    ids=["module", "object"],
)
def test_what_each_run_would_change_again_is_refused(kept: Any, read: Callable[[Any, Any], float]) -> None:
    """In an attribute; among the arguments of a module an object changes once (the cases of recomputed_cases.py)."""
    with pytest.raises((TypeError, RuntimeError), match=r"that it changes|would change again"):
        gradient_of(fs.policies.whole(fs.P(remat=True)), Keeps(kept, read).double(), X)
