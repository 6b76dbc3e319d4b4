"""Selective remat: what is saved is not computed again, and no number is another one for it, in any transform."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives
from depth import at_most, dealt, depth, each, every, mark_seldom, some
from hypothesis import given
from hypothesis import strategies as st
from kernels import Kernels
from models import module_class, refused
from parity import gradient_of, loss_of, plain_grad, shards_of
from ranks import real_ranks
from recomputed_cases import CASES
from test_memory import Held, Peak, no_collector
from test_recompute import made, policy, seed
from test_remat import ORDERS, W, X
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import funshard as fs
from funshard import collectives

aten = torch.ops.aten
Save = Any
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def products(op: Any) -> bool:
    return op in PRODUCTS


def torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As torch.utils.checkpoint has it: of all products the first, the third and so on."""
    assert not ctx.is_recompute
    return CheckpointPolicy.PREFER_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def every_second() -> Any:
    """A context_fn whose policy counts, as those of torchtitan."""
    seen: Counter[Any] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[op] += 1
        return CheckpointPolicy.MUST_SAVE if op in PRODUCTS and seen[op] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


SAVES: dict[str, Save] = {
    "names": {"product", "dropped"},
    "operators": list(PRODUCTS),
    "a function": products,
    "everything": lambda op: True,
    "a policy": torch_policy,
    "a context_fn": functools.partial(create_selective_checkpoint_contexts, torch_policy),
    "a context_fn that counts": every_second,
}


def layer(w: Tensor, x: Tensor) -> Tensor:
    h = fs.checkpoint_name(x @ w, "product")
    return fs.checkpoint_name((torch.tanh(h) @ w).sin() * torch.tensor(2.0), "dropped")


def equal(a: Any, b: Any) -> None:
    """Bit for bit."""
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@at_most(9)
@each(order=ORDERS, save=SAVES)
def test_no_number_changes_at_any_order(order: str, save: str) -> None:
    saved, again, plain = (ORDERS[order](f, (W, X)) for f in (fs.remat(layer, save=SAVES[save]), fs.remat(layer), layer))
    equal(saved, again)
    assert_close(saved, plain, rtol=1e-11, atol=1e-11)


WAYS: dict[str, Any] = {"fs.grad": fs.grad, "torch.func.grad": torch.func.grad, "backward": plain_grad}


def counted(way: str, f: Any, w: Tensor = W) -> tuple[Any, Counter[str]]:
    torch.manual_seed(3)
    with Kernels() as kernels:
        out = WAYS[way](f)(w), torch.rand(2)
    return out, kernels.ops


# --- what runs again ---
def block(w: Tensor) -> Tensor:
    """Products, dropout and attention with dropout, and what is drawn after them."""
    x = torch.stack([X, 2 * X])
    q = fs.checkpoint_name(x @ w, "q")
    h = fs.checkpoint_name(F.scaled_dot_product_attention(q, q.sin(), x @ w.cos(), dropout_p=0.5), "attn_out")
    h = fs.checkpoint_name(F.dropout(h, 0.5), "dropped")
    h = F.layer_norm(h + torch.rand_like(h), (4,))
    return (fs.checkpoint_name(h, "norm") @ w).square().sum()


RUN_ONCE: dict[str, tuple[Save, dict[str, int]]] = {
    "a name": ({"q"}, {"mm": 1}),
    "attention by its name": ({"attn_out"}, {"bmm": 1}),
    "an operator": ({aten.mm.default}, {"mm": 3}),
    "operators with random numbers": (
        {aten.rand_like.default, aten.native_layer_norm.default},
        {"rand_like": 1, "native_layer_norm": 1},
    ),
    "a policy": (torch_policy, {"mm": 3, "bmm": 2}),
    "a counting context_fn": (every_second, {"mm": 2, "bmm": 1}),
}


@at_most(5)
@every(way=WAYS, what=RUN_ONCE)
def test_what_is_saved_runs_once(what: str, way: str) -> None:
    """Exactly these kernels fewer than with all computed again, and the same random numbers then and afterwards."""
    save, once = RUN_ONCE[what]
    plain, _ = counted(way, block)
    full, all_twice = counted(way, fs.remat(block))
    got, ran = counted(way, fs.remat(block, save=save))
    equal(full, plain)
    equal(got, plain)
    assert all_twice - ran == Counter(once)
    assert not ran - all_twice


def test_attention_that_makes_more_where_autograd_follows() -> None:
    """CUDA's attention makes its log-sum-exp only there, which the first run is not: it is handed to backward all the same."""
    attention = aten._scaled_dot_product_efficient_attention.default
    x = torch.ones(1, 1, 4, 8, device="meta", requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return fs.checkpoint_name(attention(x, x, x, None, x.requires_grad)[0], "attn_out").sum()

    for save in ({"attn_out"}, {attention}):
        with Kernels() as kernels:
            fs.remat(f, save=save)(x).backward()
        assert kernels.ops["_scaled_dot_product_efficient_attention"] == 1
        assert kernels.ops["_scaled_dot_product_efficient_attention_backward"] == 1


def test_a_graph_that_is_kept_computes_again() -> None:
    """Its first backward is handed what is saved, as torch.utils.checkpoint's, which refuses another one."""
    w = W.clone().requires_grad_()
    out = fs.remat(lambda w: (torch.tanh(w @ w) @ w).sum(), save=PRODUCTS)(w)
    with Kernels() as kernels:
        first, second = (torch.autograd.grad(out, w, retain_graph=True)[0] for _ in range(2))
        equal(first, second)
        assert kernels.ops["mm"] == 2 * 4 + 2  # of the backward, and of the second one's run
        equal(torch.autograd.grad(out, w)[0], first)
    assert kernels.ops["mm"] == 3 * 4 + 4


V = W.cos()

# --- any program ---
STEPS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "product": lambda h, w, i: h @ w,
    "bias": lambda h, w, i: torch.addmm(w[0], h, w),
    "dropout": lambda h, w, i: F.dropout(h, 0.5),
    "sort": lambda h, w, i: torch.sort(h, 0)[0] if i % 2 else h.max(0, keepdim=True)[0] + h,
    "split": lambda h, w, i: torch.cat([part.sin() for part in h.split(2, 1)], 1),
    "in place": lambda h, w, i: h.cos().mul_(2).add_(h),
    "view": lambda h, w, i: h.T.contiguous().T if i % 2 else h.flatten().view_as(h),
    "branch": lambda h, w, i: h.sin() if h.sum().item() > 0 else h.tanh(),
    "norm": lambda h, w, i: F.layer_norm(h, h.shape[-1:]),
    "random": lambda h, w, i: h * torch.rand_like(h) + torch.arange(4) + torch.tensor([1.5]),
    "again": lambda h, w, i: fs.remat(lambda h, w: (h @ w).sin(), save={aten.mm.default} if i % 2 else None)(h, w),
    "inner grad": lambda h, w, i: torch.func.grad(lambda h: fs.checkpoint_name(torch.tanh(h @ w), "inner").sum())(h) + h,
    "vmap": lambda h, w, i: torch.vmap(lambda h: fs.checkpoint_name(h.sin() @ w, "inner"))(h),
}


def run_program(program: list[tuple[str, int]], w: Tensor, x: Tensor) -> Tensor:
    """Steps on some tensors, each of which may get a name."""
    known = [x, x @ w]
    for step, i in program:
        known.append(fs.checkpoint_name(STEPS[step](known[i % len(known)], w, i), f"name {i % 3}"))
    return sum((h.square().mean() for h in known), w.sum() * 0)


PROGRAMS = st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 11)), max_size=8)


@given(program=PROGRAMS, chosen=st.sets(st.integers(0, 12)), by_name=st.booleans(), way=st.sampled_from(sorted(WAYS)))
def test_any_program_with_anything_saved(program: list[tuple[str, int]], chosen: set[int], by_name: bool, way: str) -> None:
    """The bits of the function, of each operator no more runs than with all computed again; later calls are as the first."""

    def by_number(op: Any) -> bool:
        return sum(map(ord, str(op))) % 13 in chosen

    save: Save = {"name 0", "inner", *(f"name {i}" for i in chosen)} if by_name else by_number
    f = lambda w: run_program(program, w, X)  # noqa: E731
    expected, _ = counted(way, f)
    full, all_twice = counted(way, fs.remat(f))
    equal(full, expected)
    kept = fs.remat(f, save=save)
    try:
        got, ran = counted(way, kept)
    except ValueError as error:
        if not by_name or "gave none of these names" not in str(error):
            raise
        refused(ValueError, "gave none of these names", lambda: counted(way, kept))
        return
    equal(got, expected)
    assert not ran - all_twice
    for _ in range(2):
        got, ran_now = counted(way, kept)
        equal(got, expected)
        assert ran_now == ran


# --- names ---
def test_a_name_is_that_of_what_made_it() -> None:
    """Through views; of several results; inside of transforms. Not an argument, and not what was changed since."""

    def mm_of(f: Callable[[Tensor], Tensor], op: str = "mm") -> int:
        full, _ = counted("torch.func.grad", fs.remat(lambda w: f(w).sin().sum()))
        got, ran = counted("torch.func.grad", fs.remat(lambda w: f(w).sin().sum(), save={"h"}))
        equal(got, full)
        return counted("torch.func.grad", fs.remat(lambda w: f(w).sin().sum()))[1][op] - ran[op]

    named = lambda x: fs.checkpoint_name(x, "h")  # noqa: E731
    assert mm_of(lambda w: named((w @ w).T)) == 1
    assert mm_of(lambda w: named((w @ w)[1:].view(-1)[2:])) == 1
    for op, saved in (("add", 1), ("mm", 0)):  # an inner gradient ends with the sum of two products
        assert mm_of(lambda w: named(torch.func.grad(lambda w: (w @ w).sum())(w)), op) == saved
    assert mm_of(lambda w: torch.vmap(lambda x: named((x @ w).sin()))(w), "sin") == 1
    assert mm_of(lambda w: torch.func.grad(lambda w: named(w @ w).sin().sum())(w)) == 1
    assert mm_of(lambda w: named(F.layer_norm(w, (4,))), "native_layer_norm") == 1
    assert mm_of(lambda w: named(w) @ w) == 0
    assert mm_of(lambda w: named(w.T) @ w) == 0
    assert mm_of(lambda w: named((w @ w).mul_(2))) == 0
    assert mm_of(lambda w: named(w @ w) @ named(w @ w.T)) == 2


def test_a_name_is_nothing_elsewhere() -> None:
    assert fs.checkpoint_name(X, "x") is X
    equal(
        torch.func.grad(lambda x: (fs.checkpoint_name(x.sin(), "sin") ** 2).sum())(X),
        torch.func.grad(lambda x: (x.sin() ** 2).sum())(X),
    )
    compiled = torch.compile(lambda x: fs.checkpoint_name(x.sin(), "sin") * 2, backend="eager", fullgraph=True)
    assert_close(compiled(X), X.sin() * 2)


def test_a_name_that_is_not_given_is_an_error() -> None:
    """It lists those that are; where some of them are given, others need not be."""
    f = lambda w: fs.checkpoint_name(w.sin(), "sine").sum()  # noqa: E731
    with pytest.raises(ValueError, match=r"remat of .*lambda.* is to save 'cosine', .*: expected some of 'sine'"):
        torch.func.grad(fs.remat(f, save={"cosine"}))(W)
    with pytest.raises(ValueError, match=r"is to save 'cosine', .*expected funshard.checkpoint_name\(x, name\) in it"):
        torch.func.grad(fs.remat(torch.sum, save={"cosine"}))(W)
    torch.func.grad(fs.remat(f, save={"sine", "cosine"}))(W)
    with pytest.raises(ValueError, match=r"module '' with P\(remat=True\) is to save 'attn_out', and gave none"):
        gradient_of(fs.policies.whole(fs.P("shard", remat=fs.Remat({"attn_out"}))), nn.Linear(2, 2), torch.ones(2))


# --- what is refused ---
FUNCTIONS = r"expected save\(op\), policy\(ctx, op, \*args, \*\*kwargs\) or context_fn\(\)"
SAVED: list[tuple[Save, str]] = [
    ("attn_out", r"Remat: save: expected names, operators or a function, got 'attn_out'; one name is {'name'}"),
    (3, r"Remat: save: expected names, operators or a function, got 3"),
    ([aten.mm], r"operators such as torch.ops.aten.mm.default, got .*aten.mm.*; give its overloads"),
    ([3], r"expected names and operators such as torch.ops.aten.mm.default, got 3"),
    *((f, FUNCTIONS) for f in (lambda *args: True, lambda ctx, op, x: True)),
]
SAID: list[tuple[Save, str]] = [
    (lambda op: 1, "expected True, False or a CheckpointPolicy to save or recompute from .*lambda.*, got 1"),
    (lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD, "CheckpointPolicy to save or recompute .*OFFLOAD"),
    (lambda: (contextlib.nullcontext(), contextlib.nullcontext()), "gives contexts of its own, which funshard does not"),
]


@pytest.mark.parametrize(("save", "message"), [*SAVED, *SAID])
def test_what_save_may_not_be(save: Save, message: str) -> None:
    """Told when it is given, or, of what a function says, when it runs."""
    refused(TypeError, message, lambda: torch.func.grad(fs.remat(lambda w: w.sin().sum(), save=save))(W))
    if (save, message) in SAVED:
        refused(TypeError, message, lambda: fs.remat(torch.sin, save=save))
        refused(TypeError, message, lambda: fs.P(remat=fs.Remat(save)))


def test_what_is_saved_and_changed_is_computed_again() -> None:
    """Changes in the function, also those that no version tells of, and afterwards by the caller."""

    def changes(write: Callable[[Tensor], Any]) -> Any:
        def f(w: Tensor) -> Tensor:
            h = fs.checkpoint_name(w @ w, "h")
            write(h)
            return h.sin().sum()

        return f

    writes = (
        torch.relu_,
        lambda h: h.detach().zero_(),
        lambda h: h.data.zero_(),
        lambda h: torch.sin(h.detach(), out=h.detach()),
    )
    for save, write, way in itertools.product((None, {"h"}, {aten.mm.default}), writes, WAYS.values()):
        equal(way(fs.remat(changes(write), save=save))(W), way(changes(write))(W))
    w = W.clone().requires_grad_()
    out = fs.remat(lambda w: w @ w, save={aten.mm.default})(w)
    with torch.no_grad():
        out.mul_(2)
    equal(torch.autograd.grad(out.sum(), w)[0], plain_grad(lambda w: (w @ w).sum())(W))


VIEWED: dict[str, Callable[[Tensor], Tensor]] = {
    "t_": lambda h: h.t_() * W,
    "unsqueeze_": lambda h: h.unsqueeze_(0).sin().squeeze_(0).squeeze_(),
    "einsum": lambda h: torch.einsum("ij,jk,k->i", h, W, W[0]),
    "vmap": lambda h: torch.vmap(lambda row: row @ W @ W[0])(h),
}


@every(save=["products", "names"], how=VIEWED)
def test_what_only_looks_otherwise_was_not_changed(how: str, save: str) -> None:
    """An operator that makes a tensor a view of itself in place writes nothing: torch's own matmul uses them."""

    def f(w: Tensor) -> Tensor:
        h = VIEWED[how](fs.checkpoint_name(torch.sin(w) @ w, "product"))
        return fs.checkpoint_name(h, "viewed").sin().sum()

    kept = fs.remat(f, save={"products": products, "names": {"product", "viewed"}}[save])
    for way in WAYS.values():
        equal(way(kept)(W), way(f)(W))
    w = W.clone().requires_grad_()
    out = kept(w)
    first = torch.autograd.grad(out, w, retain_graph=True)
    equal(torch.autograd.grad(out, w, retain_graph=True), first)
    equal(torch.autograd.grad(out, w), first)
    _, twice = counted("backward", fs.remat(f))
    _, ran = counted("backward", kept)
    assert ran["mm"] < twice["mm"]


FLAG = {"calls": 0}


def test_another_control_flow_is_refused() -> None:
    """A saved call that the last run does not make, and one of another shape."""

    def f(w: Tensor) -> Tensor:
        FLAG["calls"] += 1
        first = w if FLAG["calls"] % 2 or FLAG["fewer"] else w[:2]
        return (first @ w).sum() + (w.sum() if FLAG["fewer"] and not FLAG["calls"] % 2 else (w @ w).sum())

    for fewer, how in ((0, r"given .*, now "), (1, "called 2 times, now 1")):
        FLAG.update(calls=0, fewer=fewer)
        with pytest.raises(RuntimeError, match=rf"remat of .*f does not run the operators .*aten.mm.default, {how}"):
            fs.grad(fs.remat(f, save=PRODUCTS if not fewer else lambda op: op is aten.mm.default))(W)


# --- what it costs ---
HELD = Held()


def watched(w: Tensor) -> Tensor:
    h = HELD(fs.checkpoint_name(w @ w, "h"))
    return (HELD(torch.tanh(h)) @ w).sum()


def test_what_is_kept_goes_when_it_was_used() -> None:
    """One tensor of the two between forward and backward, and none after it; without the cycle collector."""
    torch.func.grad(fs.remat(watched, save={"h"}))(W)  # a mode's first operator imports Dynamo, which leaves frames behind
    with no_collector():
        for save in ({"h"}, lambda op: op in PRODUCTS):
            w = W.clone().requires_grad_()
            HELD.refs = ()
            out = fs.remat(watched, save=save)(w)
            assert HELD.alive() == 1
            torch.autograd.grad(out, w, retain_graph=True)
            assert HELD.alive() == 0
            torch.autograd.grad(out, w)
            assert HELD.alive() == 0
            out = fs.remat(watched, save=save)(w)
            del out
            assert HELD.alive() == 0
            torch.func.grad(fs.remat(watched, save=save))(W)
            torch.func.grad(lambda w, save=save: torch.func.grad(fs.remat(watched, save=save))(w).sum())(W)
            fs.remat(watched, save=save)(W)
            assert HELD.alive() == 0
        pullback = torch.func.vjp(lambda x: torch.vmap(fs.remat(watched, save={"h"}))(x), torch.stack([W, V]))[1]
        assert HELD.alive() == 0  # where nobody can be handed it
        del pullback


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + self.drop(self.out(fs.checkpoint_name(attn, "attn_out")))
        return x + fs.checkpoint_name(self.drop(self.down(F.gelu(self.up(x)))), "mlp_out")


def gpt(blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


CHOICES: dict[str, Any] = {
    "none": False,
    "names": fs.Remat(save={"attn_out"}),
    "products": fs.Remat(save=PRODUCTS),
    "full": True,
}


@pytest.mark.parametrize("way", mark_seldom(["fs.grad", "torch.func.grad"], "fs.grad"))
def test_the_peak_is_between_all_and_nothing(way: str) -> None:
    """Many blocks and a long batch: less is held the less is saved."""
    model, x = gpt(depth(5, 8)), torch.randn(2, 64, 16, dtype=torch.float64)
    peaks, results = [], []
    for remat in CHOICES.values():
        spec, params = shards_of(fs.by_type(Block, p=fs.P("shard", remat=remat)), model)
        torch.manual_seed(1)
        with no_collector(), Peak() as peak:
            results.append(WAYS[way](loss_of(model, spec, x))(params))
        peaks.append(peak.bytes)
    none, products, full = peaks[0], peaks[2], peaks[3]
    assert full < peaks[1] < products < none
    assert full < 0.6 * none
    for result in results:
        equal(result, results[0])


# --- later calls ---
DEPTH = {"of": 1}


@pytest.mark.parametrize("save", [{"h"}, {aten.mm.default}, {"h", aten.mm.default}], ids=["names", "operators", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_more_to_save_than_in_earlier_calls(way: str, save: Save) -> None:
    """One call may save too little, and the next one saves all of it; the numbers are those of the function."""

    def f(w: Tensor) -> Tensor:
        h = w
        for _ in range(DEPTH["of"]):
            h = fs.checkpoint_name(torch.tanh(h) @ w, "h")
        return h.sin().sum()

    kept = fs.remat(f, save=save)
    for depth_now, ran in ((1, 1), (3, None), (3, 3), (2, 2), (3, 3)):
        DEPTH["of"] = depth_now
        expected, plain = counted(way, f)
        got, now = counted(way, kept)
        equal(got, expected)
        assert ran is None or now["mm"] == plain["mm"], depth_now
        assert now["mm"] <= plain["mm"] + depth_now


def test_a_change_that_only_a_later_call_makes() -> None:
    """The first run sees it."""

    def f(w: Tensor) -> Tensor:
        h = fs.checkpoint_name(w @ w, "h")
        if DEPTH["of"] == 2:
            h.relu_()
        return h.cos().sum()

    for save in ({"h"}, {aten.mm.default}):
        kept = fs.remat(f, save=save)
        DEPTH["of"] = 1
        equal(torch.func.grad(kept)(W), torch.func.grad(f)(W))
        DEPTH["of"] = 2
        for way in WAYS.values():
            equal(way(kept)(W), way(f)(W))


# --- units on ranks ---
STRATEGIES: dict[str, Callable[[Any], fs.P]] = {
    "shard": lambda remat: fs.P("shard", remat=remat),
    "kept": lambda remat: fs.P("shard", remat=remat, reshard=False),
    "replicated": lambda remat: fs.P(remat=remat),
    "bf16": lambda remat: fs.P("shard", remat=remat, precision=fs.Precision(param=torch.bfloat16)),
}


@at_most(1)
@pytest.mark.parametrize("strategy", mark_seldom(STRATEGIES, "shard", "kept"))
@real_ranks(2)
def test_units_on_two_ranks(rank: int, strategy: str) -> None:
    """Gathered again as often as ever; what is saved runs once, all else twice; bit for bit the gradients of no remat."""
    model = gpt(2)
    xs = torch.randn(2, 2, 5, 16, dtype=torch.float64)
    counts: dict[str, Counter[str]] = {}
    for way in dealt(strategy, STRATEGIES, WAYS):
        results = {}
        for name, remat in CHOICES.items():
            spec, params = shards_of(fs.by_type(Block, p=STRATEGIES[strategy](remat)), model)
            for call in ("first", "later"):
                torch.manual_seed(rank)
                with Kernels() as kernels, Collectives() as sent:
                    results[name, call] = WAYS[way](loss_of(model, spec, xs[rank]))(params)
                ran = kernels.ops + Counter({"sent": len(sent.all)})
                assert call == "first" or counts[name] == ran, (name, way, counts[name] - ran, ran - counts[name])
                counts[name] = ran
        for name, result in results.items():
            assert_close(result, results["none", "first"], rtol=0, atol=0, msg=lambda m, n=name, w=way: f"{w} {n}: {m}")
        assert counts["full"]["addmm"] == 2 * 4 + counts["none"]["addmm"]
        assert counts["products"]["addmm"] == counts["none"]["addmm"]
        attention = "_scaled_dot_product_flash_attention_for_cpu"
        assert counts["full"][attention] == counts["products"][attention] == 2 * counts["none"][attention] == 4
        assert counts["names"][attention] == counts["none"][attention] == 2
        assert counts["names"]["sent"] == counts["products"]["sent"] == counts["full"]["sent"]


def less_its_sum(h: Tensor) -> Tensor:
    return h - collectives.all_reduce(h.detach(), MESH["shard"])


Talks = module_class(
    "Talks",
    lambda: {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)},
    lambda self, x: fs.checkpoint_name(self.two(less_its_sum(torch.tanh(self.one(x)))), "h"),
)
"""Units within a unit, and a collective of its own."""
MESH: dict[str, Any] = {}


@real_ranks(2)
def test_collectives_run_on_all_ranks_or_none(rank: int) -> None:
    """Gathers of units inside, and what forward sends itself: the same ones whatever is to be saved, asked for or not."""
    model = nn.Sequential(Talks(), Talks()).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)[rank]
    seen = []
    saves = (None, frozenset({"h"}), lambda op: "c10d" in str(op), lambda op: True)
    for save, way in some(itertools.product(saves, ("fs.grad", "torch.func.grad")), 1):
        spec, params = shards_of(fs.by_path({"*": fs.P("shard", remat=fs.Remat(save)), "*.two": fs.P("shard")}), model)
        MESH.update(spec.bound_mesh.axes)
        with Collectives() as sent:
            grads = WAYS[way](loss_of(model, spec, x))(params)
        seen.append((grads, sorted(sent.all)))
    for grads, sent in seen:
        equal(grads, seen[0][0])
        assert sent == seen[0][1]
        assert any(op.op == "all_reduce" for op in sent) or len(sent) > 8


@at_most(7)
@pytest.mark.filterwarnings("ignore::funshard._call.buffers.BufferWarning")
@each(name=CASES, way=["fs.grad", "torch.func.grad"])
def test_state_that_passes_by_other_ways(name: str, way: str) -> None:
    """The cases of test_recompute.py: state, hooks, buffers, random numbers of all kinds, with the products saved."""
    results = []
    for remat in (True, fs.Remat(PRODUCTS), fs.Remat(lambda op: op is aten.sin.default)):
        model, x, full, _ = made(name)
        spec = policy(model, fs.P("shard", remat=remat)).bound
        results.append(WAYS[way](seed(loss_of(model, spec, x[0])))(fs.shard(full, spec)))
    equal(results[1], results[0])
    equal(results[2], results[0])


def test_a_spec_says_what_is_saved() -> None:
    """The same text on every rank, whatever the order of a set."""
    assert str(fs.P("shard", remat=fs.Remat(["b", "a"]))) == "P('shard', remat=Remat(save={'a', 'b'}))"
    assert repr(fs.Remat([aten.mm.default])) == "Remat(save={aten.mm.default})"
    assert repr(fs.Remat(products)) == f"Remat(save={__name__}.products)"
    assert repr(fs.Remat()) == "Remat()"
    assert fs.P(remat=fs.Remat({"a"})) == fs.P(remat=fs.Remat(["a"]))
    assert hash(fs.P(remat=fs.Remat({"a"}))) == hash(fs.P(remat=fs.Remat(["a"])))


def test_a_context_fn_is_called_for_each_first_run() -> None:
    """test_checkpoint_wrapper.py's ``test_context_fn``: there for forward and recomputation, here its policy counts anew."""
    calls = []

    def contexts() -> Any:
        calls.append(1)
        return every_second()

    f = fs.remat(lambda w: (torch.tanh(w @ w) @ w @ w).sum(), save=contexts)
    for n in (1, 2):
        torch.func.grad(f)(W)
        assert len(calls) == n


# --- PEER_TESTS.md, section 16: test_checkpoint_wrapper.py and _composable/test_checkpoint.py ---
class ManyInManyOut(nn.Module):
    """Positional, keyword and keyword-only arguments, several results, and a product with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.fails = nn.Linear(4, 4), ""

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.lin(x) @ torch.randn(4, 4, dtype=x.dtype)
        if self.fails == ("again" if FLAG["calls"] > 1 else "first"):
            raise ArithmeticError(self.fails)
        FLAG["calls"] += 1
        return h * scale, {"shifted": h if shift is None else h + shift}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ManyInManyOut()

    def forward(self, x: Tensor) -> Tensor:
        a, more = self.inner(x, scale=x.sum(), shift=x.cos())
        b, _ = self.inner(x, x.mean())
        return (a * more["shifted"] + b).square().sum()


def six_steps(remat: Any) -> list[fs.Params]:
    torch.manual_seed(0)
    model = Around().double()
    return [gradient_of(fs.by_type(ManyInManyOut, p=fs.P("shard", remat=remat)), model, X) for _ in range(6)]


def test_what_goes_in_and_out_of_a_checkpoint() -> None:
    """``test_checkpoint_wrapper_args_kwargs``, ``test_multi_args``, ``test_random_cpu``; six backward passes."""
    first = six_steps(False)
    for remat in (True, fs.Remat(PRODUCTS), fs.Remat(lambda op: op is aten.randn.default)):
        equal(six_steps(remat), first)
    assert all(grad.abs().sum() > 0 for grads in first for grad in grads.values())


@pytest.mark.parametrize("when", ["first", "again"])
@pytest.mark.parametrize("remat", [True, fs.Remat(PRODUCTS)], ids=["all", "products"])
def test_an_exception_in_a_run_leaves_nothing(when: str, remat: Any) -> None:
    """``test_clears_state_on_error_in_forward``, and in the run again: it is the caller's, and the next step is a clean one."""
    model = Around().double()
    spec, params = shards_of(fs.by_type(ManyInManyOut, p=fs.P("shard", remat=remat)), model)
    step, before = fs.grad(loss_of(model, spec, X)), dict(vars(model.inner))
    torch.manual_seed(1)
    expected = step(params)
    model.inner.fails, FLAG["calls"] = when, 0
    refused(ArithmeticError, when, lambda: step(params))
    model.inner.fails = ""
    assert vars(model.inner) == before
    torch.manual_seed(1)
    equal(step(params), expected)
