"""from_torch: torch's optimizers on shards are torch's on the whole tensors, and pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
import strategies
import torch
from cases import owned
from depth import at_most, every, pairs
from hypothesis import strategies as st
from models import refused
from parity import shards_of, step_with
from ranks import at_rank
from test_memory import Peak
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard._core import layout
from funshard.optim import from_torch
from funshard.optim._from_torch import ELEMENTWISE_CLASSES

SIZES = {"shard": 3}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.3, "fused": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True, "maximize": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.Adamax, {"foreach": True}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.ASGD, {"t0": 1.0, "lambd": 0.1}),
    (torch.optim.Rprop, {"lr": 0.1}),
]
NAMES = [f"{cls.__name__}-{'-'.join(options)}" for cls, options in CASES]
every_case = pytest.mark.parametrize(("cls", "options"), CASES, ids=NAMES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def numbers(module: nn.Module, seed: int) -> fs.Params:
    """A tree of the parameters' shapes."""
    return gradients(dict(module.named_parameters()), seed - 100)


def by_torch(cls: Any, options: dict[str, Any], start: fs.Params, steps: int, of: Any = lambda name: {}) -> fs.Params:
    """The peer: torch's optimizer on full tensors, with the gradients of `gradients`."""
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = cls([{"params": [p], **of(name)} for name, p in params.items()], **options)
    for step in range(steps):
        step_with(gradients(start, step), params, optimizer)
    return {name: p.detach() for name, p in params.items()}


def gradients(like: fs.Params, step: int) -> fs.Params:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for n, t in like.items()}


def on_ranks(cls: Any, spec: fs.PartitionSpec, start: fs.Params, steps: int, **options: Any) -> fs.Params:
    """The same on every rank's shards, one rank after the other, joined again."""
    ranks = torch.Size(size for _, size in spec.sizes or ()).numel()
    trees: list[fs.Params] = []
    for rank in range(ranks):
        init, update = from_torch(cls, spec=at_rank(spec, rank), **options)
        params = fs.shard(start, spec, rank=rank)
        state = init(params)
        structure = pytree.tree_structure(state)
        for step in range(steps):
            params, state = update(fs.shard(gradients(start, step), spec, rank=rank), state, params)
            assert pytree.tree_structure(state) == structure
        trees.append(params)
    joined: fs.Params = {}
    for unit in spec:
        slices = {
            layout.rank_along(unit.p.axes, spec.bound_mesh, layout.rank_coords(spec.bound_mesh, r))[0]: r for r in range(ranks)
        }
        joined[unit.key] = torch.cat([trees[slices[i]][unit.key] for i in range(spec.size(unit))])
        assert not joined[unit.key][~owned(unit, len(joined[unit.key]))].any()  # the padding
    return fs.unflatten(joined, spec)


@every_case
def test_the_same_tensors(cls: Any, options: dict[str, Any]) -> None:
    """Bitwise, without a spec, on tensors of any shape. Nothing that goes in changes, not even a version counter, and
    nothing that comes out shares memory with it."""
    start = numbers(model(), 1)
    init, update = from_torch(cls, **options)
    params, state = start, init(start)
    for step in range(4):
        given = gradients(start, step), state, params
        before, versions = copy.deepcopy(given), [t._version for t in everything(given)]
        params, state = update(*given)
        assert [t._version for t in everything(given)] == versions
        assert_close(given, before, rtol=0, atol=0)
        held = {t.untyped_storage().data_ptr() for t in everything(given)}
        assert not held & {t.untyped_storage().data_ptr() for t in everything(params, state)}
        assert not any(t.requires_grad or t.grad is not None for t in everything(params, state, given))
    assert_close(params, by_torch(cls, options, start, 4), rtol=0, atol=0)


@at_most(17)
@every_case
@pytest.mark.parametrize("policy", [fs.policies.whole(), fs.by_path({"0": fs.P("shard", align=4), "2": fs.P()})])
def test_shards(cls: Any, options: dict[str, Any], policy: fs.Policy) -> None:
    """Law L5: a step on shards is the shard of a step."""
    module = model()
    start = numbers(module, 1)
    got = on_ranks(cls, policy(module).on(SIZES), start, 4, **options)
    assert_close(got, by_torch(cls, options, start, 4), rtol=1e-14, atol=1e-15)


OWN: list[tuple[Any, dict[str, Any], list[dict[str, Any]]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, [{}, {"weight_decay": 0.9}, {"lr": 0.5, "nesterov": True}]),
    (torch.optim.AdamW, {"fused": True}, [{}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9), "lr": 0.5}]),
    (torch.optim.NAdam, {}, [{}, {"lr": 0.5}, {"weight_decay": 0.1}]),
    (torch.optim.ASGD, {"t0": 1.0}, [{}, {"weight_decay": 0.1}, {"maximize": True}]),
    (torch.optim.Rprop, {}, [{}, {"lr": 0.5}, {"etas": (0.1, 1.1)}]),
]


@hypothesis.given(st.data(), st.sampled_from(OWN), st.integers(0, 9))
def test_options_on_any_sharding(data: st.DataObject, case: Any, seed: int) -> None:
    """Every parameter as in a group of its own, whatever the modules, the policy, the mesh: also where a slice has none."""
    cls, options, choices = case
    module = data.draw(strategies.modules())
    hypothesis.assume(any(p.numel() for p in module.parameters()))
    spec = data.draw(strategies.policies(module))(module).on(data.draw(strategies.meshes()))
    start = numbers(module, 1)
    picks = torch.randint(len(choices), (len(start),), generator=torch.Generator().manual_seed(seed)).tolist()
    own = {name: choices[i] for name, i in zip(start, picks, strict=True)}.__getitem__
    got = on_ranks(cls, spec, start, 3, options=lambda name, param: own(name), **options)
    assert_close({name: got[name] for name in start}, by_torch(cls, options, start, 3, own), rtol=1e-13, atol=1e-14)


def decayed(name: str, param: fs.Param) -> dict[str, float]:
    return {"weight_decay": 0.0} if len(param.shape) < 2 else {}


def test_neighbours_of_equal_options_are_one_vector() -> None:
    """The bias, the weight, and two norms as one: as few kernels as there can be, a group for each kind."""
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.LayerNorm(5))
    spec = fs.policies.whole()(module).on({"shard": 1})
    stepped: list[list[int]] = []

    class Seen(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            stepped.append([[p.numel() for p in group["params"]] for group in self.param_groups])
            super().step(closure)

    params = fs.shard(module, spec)
    init, update = from_torch(Seen, spec=spec, options=decayed, weight_decay=0.1, initial=lambda p: {})
    update(params, init(params), params)
    assert stepped == [[[5, 29], [15]]]  # four of 5, with the padding to 8 of the first three between them


@every_case
def test_schedule_of_the_learning_rate(cls: Any, options: dict[str, Any]) -> None:
    """``lr`` is what a torch.optim.lr_scheduler would set, from the first step on, also beside an lr of a parameter's own.
    Rprop and ASGD keep the first rate in their state, which torch creates in the first step."""
    start = numbers(model(), 1)
    spec = fs.policies.whole()(model())
    base: float = cls([torch.empty(0)], **options).defaults["lr"]
    own = lambda name: {"lr": 5 * base} if name.endswith("bias") and cls is not torch.optim.ASGD else {}  # noqa: E731
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    peer = cls([{"params": [p], **own(name)} for name, p in params.items()], **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(peer, 0.1, total_iters=4)
    rate = fs.optim.schedule(torch.optim.lr_scheduler.LinearLR, base, start_factor=0.1, total_iters=4)
    for donate in (False, True):
        init, update = from_torch(cls, spec=spec, options=lambda name, _: own(name), donate=donate, **options)
        shards = fs.shard(start, spec)
        state = init(shards)
        for step in range(5):
            grads = gradients(start, step)
            if not donate:
                for name, p in params.items():
                    p.grad = grads[name].clone()  # some kernels write there
                peer.step()
                scheduler.step()
            is_tensor = step % 2 == 0 and "foreach" not in options
            lr = torch.tensor(rate(step), dtype=torch.float64) if is_tensor else rate(step)
            shards, state = update(fs.shard(grads, spec), state, shards, lr=lr)
        assert_close(fs.unshard(shards, spec), {name: p.detach() for name, p in params.items()}, rtol=1e-12, atol=1e-15)


def test_the_first_rate_of_complex_parameters() -> None:
    """Real and imaginary parts have step sizes of their own."""
    start = torch.tensor([1 + 2j, 2 - 1j])
    init, update = from_torch(torch.optim.Rprop, lr=0.1)
    want = nn.Parameter(start.clone())
    want.grad = 2 * start
    torch.optim.Rprop([want], lr=0.03).step()
    assert_close(update({"w": 2 * start}, init({"w": start}), {"w": start}, lr=0.03)[0]["w"], want.detach())


# --- purity, and donation ---
def everything(*trees: Any) -> list[Tensor]:
    return pytree.tree_leaves(trees)


@every_case
def test_donated(cls: Any, options: dict[str, Any]) -> None:
    """The same tensors; what comes out has the memory of what went in, written over, and that is an error to use."""
    start = numbers(model(), 1)
    params = {name: p.clone().requires_grad_(name == "0.weight") for name, p in start.items()}
    init, update = from_torch(cls, donate=True, **options)
    state = init(params)
    for step in range(4):
        before = [(t, t.data_ptr(), t.requires_grad) for t in everything(params, state)]
        with torch.no_grad():
            params, state = update(gradients(start, step), state, params)
        assert [(t.data_ptr(), t.requires_grad) for t in everything(params, state)] == [old[1:] for old in before]
        assert all(p._version > step for p in params.values())
        for old, *_ in before:
            for use in (lambda x: x + 1, torch.clone, lambda x: x.shape, lambda x: torch.stack([x])):
                refused(RuntimeError, "a tensor is used that was donated", lambda: use(old))
    assert_close({name: p.detach() for name, p in params.items()}, by_torch(cls, options, start, 4), rtol=0, atol=0)


def test_donated_memory_is_known_to_have_changed() -> None:
    """Fused kernels do not count what they write: a derivative that had saved it says so, also where a transform runs."""
    params = {"a": torch.randn(8)}
    init, update = from_torch(torch.optim.AdamW, donate=True, fused=True)
    state, weight = init(params), torch.ones(8, requires_grad=True)
    product = (weight * params["a"]).sum()

    def step(x: Tensor) -> Tensor:
        update({"a": torch.ones(8)}, state, params)
        return x

    torch.vmap(step)(torch.zeros(2))
    refused(RuntimeError, "modified by an inplace operation", lambda: product.backward())


@pytest.mark.parametrize("own", [False, True])
@every_case
def test_donated_update_allocates_what_torch_does(cls: Any, options: dict[str, Any], own: bool) -> None:
    """With options on the pieces as well: there the sum is the same, in more pieces."""
    module = nn.Linear(50, 50)
    spec, params = shards_of(fs.policies.whole(), module, {"shard": 1})
    holder = nn.Parameter(params[""].clone())
    peer = cls([holder], **options)
    rest = {"spec": spec, "options": lambda name, param: {"maximize": name == "bias"}} if own else {}
    init, update = from_torch(cls, donate=True, **rest, **options)
    state = init(params)
    for _ in range(2):
        holder.grad = torch.ones_like(holder)
        grads = {"": torch.ones_like(holder)}
        with Peak([holder, holder.grad, *(x for x in everything([*peer.state.values()]) if isinstance(x, Tensor))]) as wanted:
            peer.step()
        with Peak(everything(grads, params, state)) as got:
            params, state = update(grads, state, params)
    negated = 50 * 4 if own and not options.get("maximize") else 0  # of the bias
    made, of_torch = (sum(nbytes for nbytes in peak.made if nbytes > 100) for peak in (got, wanted))
    assert made <= of_torch + 2 * negated


def test_shared_memory_is_not_donated() -> None:
    init, update = from_torch(torch.optim.SGD, momentum=0.9, donate=True)
    whole = torch.ones(6)
    halves = {"a": whole[:3], "b": whole[3:]}
    halves, _ = update({"a": torch.ones(3), "b": torch.ones(3)}, init(halves), halves)
    assert_close(whole, torch.full((6,), 1 - 1e-3))
    state = init(halves)
    both = {"a": whole[:4], "b": whole[2:]}
    with pytest.raises(ValueError, match=r"params\['a'\] and params\['b'\] share"):
        update({"a": torch.ones(4), "b": torch.ones(4)}, init(both), both)
    refused(ValueError, r"grads\['a'\] and params\['a'\] share memory", lambda: update(halves, state, halves))
    assert_close(whole, torch.full((6,), 1 - 1e-3))


# --- which optimizers ---
NOT_KNOWN = "is not known to work element by element"
WHOLE: dict[Any, str] = {torch.optim.Muon: r"muon\(spec\)", torch.optim.Adafactor: r"adafactor\(learning_rate, spec\)"}
"""What runs on whole matrices, on their owners, by functions of its own (test_by_matrix.py)."""


def test_every_optimizer_is_right_or_refused() -> None:
    """All of this torch's: of halves it makes the halves of what it makes of the whole, or it is refused by name."""
    classes = [c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    assert {torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, torch.optim.Optimizer} <= set(classes)
    assert {cls for cls, _ in CASES} == set(ELEMENTWISE_CLASSES)  # each is in the cases of this file, once
    assert len({*NAMES}) == len(CASES)
    for cls in classes:
        if cls not in ELEMENTWISE_CLASSES:
            for vouched in (None, lambda p: {}):
                why = rf"needs whole matrices: expected optim\.{WHOLE[cls]}" if cls in WHOLE else NOT_KNOWN
                refused(ValueError, f"{cls.__name__} {why}", lambda: from_torch(cls, initial=vouched))
            continue
        init, update = from_torch(cls)
        params, grads = {"": torch.randn(4, 6)}, {"": torch.randn(4, 6) * torch.logspace(-3, 3, 4)[:, None]}
        once = update(grads, init(params), params)
        whole = update(grads, once[1], once[0])[0][""]
        for rows in (slice(0, 1), slice(1, 4)):
            part, grad = {"": params[""][rows]}, {"": grads[""][rows]}
            once = update(grad, init(part), part)
            assert_close(update(grad, once[1], once[0])[0][""], whole[rows])


class Lion(torch.optim.Optimizer):
    """A class that torch does not have, in the usual way of writing one."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.add_(state["exp_avg"].lerp(p.grad, 0.5).sign(), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"].lerp(p.grad, 1 - group["momentum"])


def test_a_class_of_ones_own() -> None:
    module = model()
    start = numbers(module, 1)
    spec = fs.policies.always()(module).on(SIZES)
    own = lambda name: {"momentum": 0.5} if name.endswith("bias") else {}  # noqa: E731
    initial = lambda p: {"exp_avg": torch.zeros_like(p)}  # noqa: E731
    got = on_ranks(Lion, spec, start, 4, initial=initial, options=lambda name, _: own(name), lr=0.05)
    assert_close(got, by_torch(Lion, {"lr": 0.05}, start, 4, own), rtol=0, atol=1e-15)
    refused(ValueError, r"Lion is not known .* or initial= for a class of your own", lambda: from_torch(Lion))
    init, update = from_torch(Lion, initial=lambda p: {})
    params = fs.shard(start, spec, rank=0)
    with pytest.raises(ValueError, match="the first step made 'exp_avg': expected initial= to give it"):
        update(params, init(params), params)
    with pytest.raises(TypeError, match=r"expected a class of optimizers such as torch.optim.AdamW, got 'Adam'"):
        from_torch("Adam")  # pyright: ignore[reportArgumentType]


# --- derivatives ---
def test_derivatives_are_refused() -> None:
    init, update = from_torch(torch.optim.SGD, momentum=0.9)
    params, grads = {"": torch.ones(3)}, {"": torch.ones(3)}
    state = init(params)

    of: dict[str, Callable[[Tensor], Tensor]] = {
        "params['']": lambda p: update(grads, state, {"": p})[0][""].sum(),
        "grads['']": lambda g: update({"": g}, state, params)[0][""].sum(),
        "state['']['momentum_buffer']": lambda s: update(grads, {"": {"momentum_buffer": s}}, params)[0][""].sum(),
        "lr": lambda x: update(grads, state, params, lr=x.sum())[0][""].sum(),
    }

    def forward(f: Any, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            return f(torch.autograd.forward_ad.make_dual(x, x))

    for what, f in of.items():
        for take in (
            lambda x, f=f: torch.func.grad(f)(x),
            lambda x, f=f: torch.func.jvp(f, (x,), (x,)),
            lambda x, f=f: torch.vmap(torch.func.grad(f))(x[None]),
            lambda x, f=f: torch.func.grad(lambda x: torch.vmap(f)(x[None]).sum())(x),
            lambda x, f=f: f(x.clone().requires_grad_()),
            lambda x, f=f: forward(f, x),
        ):
            with pytest.raises(RuntimeError, match=re.escape(f"{what} takes part in a derivative") + ".*expected optim.sgd"):
                take(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"lr is batched, and torch's SGD makes a number of it: expected optim\.sgd"):
        torch.func.vmap(of["lr"])(torch.tensor([0.1, 0.3]))
    with torch.no_grad():  # says that nobody differentiates
        assert not of["params['']"](torch.ones(3, requires_grad=True)).requires_grad
    for given in ({"differentiable": True}, {"eps_root": 1e-8}):
        with pytest.raises(ValueError, match=r"from_torch: .*: for derivatives use optim\.sgd, adam.* and take eps_root"):
            from_torch(torch.optim.AdamW, **given)


@pairs
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every(policy=[fs.P("shard"), fs.P()])
@every(how=["foreach", "fused", "donate", "fused donate"], cls=[torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_kernels_without_batching_rules_on_simulated_ranks(cls: Any, how: str, policy: fs.P) -> None:
    """The step of a script runs: a kernel and overwritten memory are means, and never say what a step is."""
    spec, start = fs.policies.whole(policy)(nn.Linear(3, 4)), {"": torch.linspace(1, 2, 32)}

    def steps(mesh: Any, grad: Tensor, **how: bool) -> Tensor:
        init, update = from_torch(cls, lr=0.1, spec=spec.on(mesh), **how)
        params = {"": start[""][: spec.on(mesh).shard_numel(spec.by_key[""])].clone()}
        state = init(params)
        for _ in range(2):
            params, state = update({"": grad[: len(params[""])]}, state, params)
        return params[""]

    grads = torch.randn(2, 32)
    assert_close(*(fs.testing.spmd(partial(steps, **some), 2)(grads) for some in (dict.fromkeys(how.split(), True), {})))


# --- what state and params may be ---
def test_integers_empty_units_and_nothing() -> None:
    init, update = from_torch(torch.optim.AdamW)
    assert update({}, init({}), {}) == ({}, {})
    params = {"count": torch.tensor([3]), "empty": torch.empty(0), "half": torch.ones(3, dtype=torch.bfloat16)}
    grads = {key: torch.ones_like(p) for key, p in params.items() if key != "count"}
    new, state = update(grads, init(params), params)
    assert new["count"] is params["count"]
    assert state["count"] == {}
    assert {key: p.dtype for key, p in new.items()} == {key: p.dtype for key, p in params.items()}
    holder = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    holder.grad = torch.ones_like(holder)
    torch.optim.AdamW([holder]).step()
    assert_close(new["half"], holder.detach(), rtol=0, atol=0)


def test_padding_is_left_alone() -> None:
    """Poisoned, it stays poison and spreads nowhere; with eps=0 clean padding stays clean."""
    module = nn.Linear(3, 2)
    spec = fs.policies.whole()(module).on(SIZES)
    params, grads = fs.shard(module, spec, rank=2), fs.shard(numbers(module, 1), spec, rank=2)
    init, update = from_torch(torch.optim.AdamW, spec=at_rank(spec, 2), eps=0.0)
    new, state = update(grads, init(params), params)
    assert (new[""][-1], state[""]["exp_avg_sq"][-1]) == (0, 0)
    poison = [{"": torch.cat([tree[""][:-1], torch.tensor([torch.nan])])} for tree in (grads, params)]
    dirty, _ = update(poison[0], init(params), poison[1])
    assert dirty[""][-1].isnan()
    assert_close(dirty[""][:-1], new[""][:-1], rtol=0, atol=0)


# --- ranks ---
def test_options_of_simulated_ranks_are_refused() -> None:
    spec = fs.policies.whole()(model())
    build = fs.testing.spmd(lambda mesh, x: from_torch(torch.optim.SGD, spec=spec.on(mesh), options=decayed) and x, 2)
    refused(ValueError, "simulated ranks are all there at once: expected a mesh", lambda: build(torch.zeros(2)))


# --- mistakes ---
WRONG_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("unit 'b' has no gradient", {"grads": {"b": None}}),
    ("unit 'c' has a gradient and is not in params", {"grads": {"c": lambda _: torch.ones(1)}}),
    ("unit 'b' has no state", {"state": {"b": None}}),
    (r"gradient of unit 'b': expected \[3\] torch.float32 .* got \[3\] torch.float64", {"grads": {"b": torch.Tensor.double}}),
    ("gradient of unit 'a': expected a dense tensor, got torch.sparse_coo", {"grads": {"a": torch.Tensor.to_sparse}}),
    (
        r"unit 'a': expected \['exp_avg', 'exp_avg_sq', 'step'\], got \['step'\]",
        {"state": {"a": lambda s: {"step": s["step"]}}},
    ),
    (r"'exp_avg' of unit 'a': expected shape \[2\], got \[3\]", {"state": {"a": lambda s: s | {"exp_avg": torch.ones(3)}}}),
]
WRONG_TYPES: list[tuple[str, dict[str, Any]]] = [
    ("grads: 'a': expected a tensor, got NoneType; an unused", {"grads": {"a": lambda _: None}}),
    ("'step' of unit 'a': expected a tensor, got int", {"state": {"a": lambda s: s | {"step": 1}}}),
    ("'a': expected a tensor, got list", {"params": {"a": lambda _: [1.0]}}),
]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [*((ValueError, *row) for row in WRONG_VALUES), *((TypeError, *row) for row in WRONG_TYPES)],
)
def test_mistakes_in_update(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    """Of units a and b: all found before anything is written, though everything was donated."""
    init, update = from_torch(torch.optim.AdamW, donate=True)
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    trees: dict[str, Any] = {"grads": {key: torch.ones_like(p) for key, p in params.items()}, "state": init(params)}
    trees |= {"params": dict(params)}
    for what, edits in changes.items():
        trees[what] |= {key: edit(trees[what].get(key)) for key, edit in edits.items() if edit}
        trees[what] = {key: x for key, x in trees[what].items() if edits.get(key, True)}
    refused(error, message, lambda: update(trees["grads"], trees["state"], trees["params"]))
    assert_close(params, {"a": torch.ones(2), "b": torch.ones(3)})


def test_mistakes_in_options() -> None:
    spec = fs.policies.whole()(model()).on(SIZES)
    of_bias = lambda own: lambda name, _: own if name == "0.bias" else {}  # noqa: E731
    for kwargs, error, message in [
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"options": decayed}, ValueError, "options are those of a spec's parameters: expected spec="),
        ({"spec": spec, "options": decayed}, ValueError, "does not know its rank: expected rank=0..2"),
        ({"spec": at_rank(spec, 0), "options": of_bias({"rate": 1.0})}, TypeError, "options of parameter '0.bias', .*'rate'"),
        ({"spec": at_rank(spec, 0), "options": of_bias({"eps": -1.0})}, ValueError, "options of parameter '0.bias', .*epsilon"),
    ]:
        refused(error, message, lambda: from_torch(torch.optim.AdamW, **kwargs))
    for cls, own in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"amsgrad": True})):
        with pytest.raises(ValueError, match=f"from '{min(own)}', or whether there is one: expected one for all"):
            from_torch(cls, spec=at_rank(spec, 0), options=of_bias(own))
    init, update = from_torch(torch.optim.AdamW, spec=at_rank(spec, 0))
    refused(ValueError, "unit 'x' is not in the spec", lambda: init({"x": torch.ones(3)}))
    refused(ValueError, r"unit '': expected a shard of \d+ elements, got shape \[3\]", lambda: init({"": torch.ones(3)}))
    init, update = from_torch(torch.optim.SGD, lr=0.0, spec=at_rank(spec, 0), options=of_bias({"lr": 0.1}))
    params = fs.shard(numbers(model(), 1), spec, rank=0)
    refused(ValueError, "keeps its ratio to the default one", lambda: update(params, init(params), params, lr=0.1))
