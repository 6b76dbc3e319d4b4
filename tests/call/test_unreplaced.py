"""Parameters that a call does not replace, or that forward makes itself: errors that name them, and no false alarms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import setitem
from typing import Any

import pytest
import torch
from depth import at_most, every
from models import module_class, unchanged
from parity import shards_of
from torch import Tensor, nn

import funshard as fs

POLICIES = {"whole": fs.policies.whole(), "units": fs.by_type(nn.Linear), "remat": fs.policies.whole(fs.P("shard", remat=True))}
WAYS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "forward": lambda loss: loss,
    "fs.grad": fs.grad,
    "torch.func.grad": torch.func.grad,
    "fs.remat": lambda loss: torch.func.grad(fs.remat(loss)),
    "jvp of grad": lambda loss: lambda p: torch.func.jvp(torch.func.grad(loss), (p,), (p,)),
}


class Helper:
    """Not a module, with a parameter of one."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.calls = weight, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight


# How a module holds a parameter, where that is, and what forward reads.
HELD: dict[str, tuple[Callable[[Tensor], Any], str, Callable[[Any], Any]]] = {
    "a list": (lambda w: [w], "held[0]", lambda held: held[0]),
    "nested": (lambda w: {"a": [(1, w)]}, "held['a'][0][1]", lambda held: held["a"][0][1]),
    "a helper": (Helper, "held.weight", lambda held: held.weight),
}


def hold(hold: Callable[[Tensor], Any], use: Callable[[Any], Any] | None) -> dict[str, Any]:
    linear = nn.Linear(4, 4).double()
    return {"linear": linear, "use": use, "held": hold(linear.weight)}


Holds = module_class(
    "Holds", hold, lambda self, x: self.linear(x) if self.use is None else self.linear(x) @ self.use(self.held)
)
"""A module that holds a parameter twice."""


def setting(model: nn.Module, policy: str) -> tuple[fs.PartitionSpec, fs.Params, Callable[[fs.Params], Tensor]]:
    spec, params = shards_of(POLICIES[policy], model)
    return spec, params, lambda p: fs.functional_call(model, p, (torch.ones(2, 4).double(),), spec=spec).sum()


@at_most(6)
@every(policy=POLICIES, how=HELD)
def test_parameters_that_are_held_elsewhere(how: str, policy: str) -> None:
    """By every way, in each call, and of a skeleton; afterwards all is as it was."""
    hold, where, use = HELD[how]
    model: nn.Module = Holds(hold, use)
    spec, params, _ = setting(model, policy)
    for one in (model, fs.skeleton(model)):
        weight = use(one.held)
        for way in (*WAYS, "fs.grad"):
            loss = lambda p, m=one: fs.functional_call(m, p, (torch.ones(2, 4).double(),), spec=spec).sum()  # noqa: E731
            with pytest.raises(RuntimeError) as error, unchanged(one):
                WAYS[way](loss)(params)
            assert str(error.value).startswith(f"'{where}' is the model's own parameter 'linear.weight'")
            assert use(one.held) is weight is one.linear.weight


@every(policy=POLICIES, how=["memory", "cast"])
def test_what_was_computed_from_a_parameter(how: str, policy: str) -> None:
    """A tensor in its memory, and a view from before a cast, whose memory the parameter has left."""
    model = Holds(lambda w: None, lambda held: held)
    if how == "memory":
        vars(model)["held"] = model.linear.weight.data
    else:
        vars(model)["held"] = model.float().linear.weight.view(4, 4).double()
        model.double()
    _, params, loss = setting(model, policy)
    for way in WAYS.keys() - {"fs.remat"}:  # its runs have no graph
        with pytest.raises(RuntimeError, match=r"'held' (is|was computed from) the model's own parameter"):
            WAYS[way](loss)(params)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_with_a_graph_is_no_error(policy: str) -> None:
    """That of the call before, which was computed from the shards."""
    model: Any = Holds(lambda w: torch.eye(4).double(), lambda held: held)
    _, params, loss = setting(model, policy)
    leaves = {key: shard.clone().requires_grad_() for key, shard in params.items()}
    model.held = torch.eye(4).double() * next(iter(leaves.values())).sum()
    loss(leaves).backward()
    assert all(leaf.grad is not None for leaf in leaves.values())


@at_most(4)
@every(policy=POLICIES, how=HELD)
def test_what_is_held_and_not_read_is_no_error(how: str, policy: str) -> None:
    """Nor is what does not depend on values."""
    model = Holds(HELD[how][0], None)
    spec, params, loss = setting(model, policy)
    expected = torch.autograd.grad(model(torch.ones(2, 4).double()).sum(), model.linear.weight)[0]
    for way in ("fs.grad", "torch.func.grad", "fs.remat"):
        assert torch.equal(fs.unshard(WAYS[way](loss)(params), spec)["linear.weight"], expected)
    hold, _, use = HELD[how]
    asked = Holds(hold, lambda held: torch.full(use(held).shape, use(held).numel(), dtype=use(held).dtype))
    setting(asked, policy)[2](params)
    holder = Holds(lambda w: torch.optim.SGD([w], lr=0.1), None)  # as of training loops that are modules
    fs.grad(setting(holder, policy)[2])(fs.shard(holder, POLICIES[policy](holder)))
    assert holder.held.param_groups[0]["params"][0] is holder.linear.weight


def test_what_forward_holds_itself() -> None:
    """A list that each call makes holds that call's parameters; so does what forward puts into a helper."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.weights = [self.linear.weight]
        self.helper.weight = self.linear.weight
        return self.helper(x @ self.weights[0])

    layer = nn.Linear(4, 4).double()
    parts = {"linear": layer, "weights": [layer.weight], "helper": Helper(layer.weight)}
    model = module_class("Makes", lambda: parts, forward)()
    spec, params, loss = setting(model, "whole")
    x = torch.ones(2, 4).double()
    expected = torch.autograd.grad(model(x).sum(), model.linear.weight)[0]
    assert torch.equal(fs.unshard(fs.grad(loss)(params), spec)["linear.weight"], expected)
    assert model.helper.calls == 2


@pytest.mark.parametrize("outer", ["ignored", "own"])
def test_what_a_call_around_hands_out_is_no_error(outer: str) -> None:
    """The model's own parameter, which the outer call has from its spec or arguments, in a call inside of it."""
    inner: Any = module_class("Inner", lambda: {"l": nn.Linear(4, 4).double()}, lambda self, x, w: self.l(x) @ w)()
    of_inner, shards = shards_of(fs.policies.whole(), inner)
    run = lambda self, x: fs.functional_call(self.i, shards, (x, self.i.l.weight), spec=of_inner)  # noqa: E731
    model, x = module_class("Outer", lambda: {"i": inner}, run)(), torch.ones(2, 4).double()
    spec = (fs.policies.ignoring(fs.policies.whole(), modules=["i"]) if outer == "ignored" else fs.policies.whole())(model)
    params = {} if outer == "ignored" else dict(model.named_parameters())
    assert torch.equal(fs.functional_call(model, params, x, spec=spec), inner(x, inner.l.weight))


@pytest.mark.parametrize("way", ["read", "returned"])
def test_what_a_closure_holds(way: str) -> None:
    """Wherever forward finds a parameter of the model itself."""
    model: Any = Holds(lambda w: lambda: w, (lambda held: held()) if way == "read" else None)
    if way == "returned":
        model.forward = lambda x: model.held()
    _, params, loss = setting(model, "whole")
    with pytest.raises(RuntimeError, match=r"^forward reads the model's own parameter 'linear\.weight', with the values from"):
        loss(params)


# --- what forward makes ---
class Makes(nn.Module):
    def __init__(self, make: Callable[[Makes], Any]) -> None:
        super().__init__()
        self.linear, self.make, self.some = nn.Linear(4, 4).double(), make, nn.ParameterList()
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        made = self.make(self)
        return made(x) if isinstance(made, nn.Module) else x * made


def parameter(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(4).double(), **options)


def new(attr: str, make: Callable[[], Any]) -> Callable[[nn.Module], Any]:
    def get(module: nn.Module) -> Any:
        if getattr(module, attr, None) is None:
            setattr(module, attr, make())
        return getattr(module, attr)

    return get


def linear() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.float64)


def over(put: Callable[[nn.Module, nn.Parameter], Any]) -> Callable[[Makes], Any]:
    def replace(model: Makes) -> Tensor:
        put(model.linear, nn.Parameter(model.linear.bias.detach() * 2))
        return model.linear.bias

    return replace


def again(module: nn.Module, new: nn.Parameter) -> None:
    del module.bias
    module.register_parameter("bias", new)


MADE_ANEW = "module Linear, which has parameters to train, is made in forward"

MADE: Mapping[str, tuple[Callable[[Makes], Any], str]] = {
    "none before": (new("none", parameter), "parameter 'none' is made in forward"),
    "in a list": (lambda m: m.some.append(parameter())[0], "parameter 'some.0' is made in forward"),
    "module": (new("late", linear), MADE_ANEW),
    "of a leaf": (lambda m: new("late", linear)(m.linear), MADE_ANEW),
    "over one": (
        over(lambda m, new: setattr(m, "bias", new)),
        "parameter 'linear.bias' is replaced in forward by a new nn.Parameter",
    ),
    "after del": (over(again), "parameter 'linear.bias' is made in forward"),
    "swapped": (over(lambda m, new: torch.utils.swap_tensors(m.bias, new)), "'linear.bias' of unit '.*' was changed in place"),
}


@at_most(9)
@every(policy=POLICIES, what=MADE)
def test_parameters_that_forward_makes(what: str, policy: str) -> None:
    """They would be used, dropped with the call, made anew in the next one, and never trained."""
    refuse_by_every_way(Makes(MADE[what][0]), policy, MADE[what][1])


def refuse_by_every_way(model: nn.Module, policy: str, match: str) -> None:
    _, params, loss = setting(model, policy)
    for way in WAYS.values():
        with pytest.raises(RuntimeError, match=match), unchanged(model):
            way(loss)(params)


class Parts(nn.Module):
    def __init__(self, change: Callable[[Parts], Any]) -> None:
        super().__init__()
        self.l, self.layers, self.change = linear(), nn.ModuleList([nn.ReLU(), linear()]), change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        for part in [getattr(self, "l", nn.Identity()), *self.layers]:
            x = part(x)
        return x


L = "module 'l' is replaced in forward, Linear by "
CHANGED: Mapping[str, tuple[Callable[[Parts], Any], str]] = {
    "set": (lambda m: setattr(m, "l", linear()), L + "Linear: the call would compute without its parameters"),
    "set to one without": (lambda m: setattr(m, "l", nn.Identity()), L + "Identity"),
    "with others": (
        lambda m: setattr(m, "layers", nn.ModuleList()),
        "'layers' is replaced in forward, ModuleList by ModuleList",
    ),
    "where none were": (lambda m: setitem(m.layers, 0, linear()), MADE_ANEW),
    "deleted": (lambda m: delattr(m, "l"), L + "NoneType"),
}


@every(policy=POLICIES, how=CHANGED)
def test_modules_that_forward_replaces(how: str, policy: str) -> None:
    """The call would compute with the new module's own parameters, and its params would have no part in the result."""
    refuse_by_every_way(Parts(CHANGED[how][0]), policy, CHANGED[how][1])


def again_at_the_end(model: Parts) -> None:
    one = model.l
    del model.l
    model.l = one


@pytest.mark.parametrize(
    "change",
    [again_at_the_end, lambda m: setattr(m, "l", nn.Sequential(m.l, nn.Tanh())), lambda m: setitem(m.layers, 0, nn.Tanh())],
    ids=["again", "inside", "ReLU"],
)
def test_modules_that_are_used_in_another_place_are_no_error(change: Callable[[Parts], Any]) -> None:
    """As BigBird puts its own layers into another attention; afterwards they are in their places, in their order."""
    model = Parts(change)
    spec, params, loss = setting(model, "units")
    with unchanged(model):
        grads, names = fs.unshard(fs.grad(loss)(params), spec), [name for name, _ in model.named_modules()]
    assert names == ["", "l", "layers", "layers.0", "layers.1"]
    assert all(grads[name].any() for name in ("l.weight", "layers.1.weight"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "make",
    [
        new("late", functools.partial(parameter, requires_grad=False)),
        new("late", nn.ReLU),
        lambda model: linear().requires_grad_(False),
        lambda model: setattr(model, "linear", model.linear) or 1.0,
        lambda model: setitem(model.linear._parameters, "bias", model.linear.bias * 2) or model.linear.bias,
    ],
    ids=["frozen", "without parameters", "frozen module", "its own", "computed from its own"],
)
def test_what_forward_makes_and_nobody_trains_is_no_error(make: Callable[[Makes], Any], policy: str) -> None:
    model = Makes(make)
    _, params, loss = setting(model, policy)
    with unchanged(model):
        fs.grad(loss)(params)


@pytest.mark.parametrize("tie", ["module", "parameter"])
def test_what_is_tied_after_the_spec(tie: str) -> None:
    """The spec has two slices, and the model one parameter: an error that names both, as torch.func has it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
    spec, params = shards_of(fs.by_type(nn.Linear), model)
    if tie == "module":
        model[2] = model[0]
    else:
        model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"parameter '2\.\w+' of unit '2' is the same as '0\.\w+' in the model, and two"):
        fs.functional_call(model, params, (x,), spec=spec)
