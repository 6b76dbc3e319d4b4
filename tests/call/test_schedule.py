"""The schedule: gathers start ahead of their use and reductions end behind it, in an order that is written down."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from collective_log import Collectives, world
from depth import at_most, each, every, mark_seldom, some
from models import module_class, refused, unchanged
from parity import WAYS, average_gradients, loss_of, numbers, same, shards_of, square_sum
from peer_models import MLP, Net, Order, Outer, chain, frozen
from ranks import real_ranks
from test_memory import Alive
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import P
from funshard._core.mesh import Mesh
from funshard._wire import reductions

AHEAD = [0, 1, 2]


class Blocks(Net):
    """A root around blocks that all have other sizes, so that a length names its unit."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([MLP(5, 11 + 2 * i) for i in range(blocks)])


def blocks_alone(blocks: int = 5) -> nn.Sequential:
    """The same without a root."""
    return nn.Sequential(*Blocks(blocks).blocks)


Nested = module_class("Nested", lambda: {"first": Outer(), "last": MLP(5, 8)}, lambda self, x: self.last(self.first(x)))
"""A unit in a unit, then one beside them."""

CLOSE = P("shard", align=1)
"""Units of different lengths, by which these tests tell them apart, have slices of different lengths."""


def beside(x: Tensor, b: nn.Module, c: nn.Module, cut: bool) -> tuple[Tensor, Tensor]:
    side = b(x)
    return c(x), side.detach() if cut else side


SideBySide = module_class(
    "SideBySide",
    lambda cut: {"cut": cut, "a": MLP(5, 11), "b": MLP(5, 7), "c": MLP(5, 8)},
    lambda self, x: beside(self.a(x), self.b, self.c, self.cut),
)
"""The middle unit's output is not in the loss: cut off, or left out."""


@contextlib.contextmanager
def units_of(model: nn.Module) -> Iterator[fs.PartitionSpec]:
    """Each MLP a unit, on the first of eight ranks."""
    with world(8):
        yield fs.by_type(MLP, p=CLOSE)(model).bound


class OfUnits(TorchDispatchMode):
    """Tells units by the sizes of tensors; what is noted goes to ``forward``, and after a call of `turn` to ``backward``."""

    def __init__(self, spec: fs.PartitionSpec) -> None:
        super().__init__()
        self.forward: list[Any] = []
        self.backward: list[Any] = []
        self.now = self.forward
        widths = {max(max(p.shape) for p in unit.params): unit.key for unit in spec if unit.path}
        self.widths = dict(sorted(widths.items(), reverse=True))  # inside of a unit's MLP alone; innermost units first
        self.shards = {spec.shard_numel(unit): unit.key for unit in spec}
        self.whole = {spec.padded_numel(unit): unit.key for unit in spec}

    def turn(self) -> None:
        self.now = self.backward

    def event(self, name: str, args: Any) -> tuple[str, str]:
        """What an operator is to do, with a unit's key: "gather", "reduce", "compute" or nothing of these."""
        if name.startswith("all_gather_into_tensor"):
            return "gather", self.shards[args[0].numel()]
        if name == "reduce_scatter_tensor":
            return "reduce", self.whole[args[0].numel()]
        sizes = {size for x in args for size in x.shape} if name in ("mm", "addmm") else set[int]()
        return "compute" if sizes else "", next((key for width, key in self.widths.items() if width in sizes), "")


class Events(OfUnits):
    """What a call does, in order: "gather 0" and "there 0", "compute 0", "reduce 0" and "reduced 0", by unit key."""

    def __init__(self, spec: fs.PartitionSpec) -> None:
        super().__init__(spec)
        assert len(self.shards) == len(self.whole) == len(spec)
        assert len(self.widths) == sum(unit.path != "" for unit in spec)
        self.under_way: dict[int, tuple[str, str]] = {}

    def add(self, what: str, key: str) -> None:
        event = f"{what} {key.rpartition('blocks.')[2] or 'root'}"
        if what != "compute" or self.now[-1:] != [event]:
            self.now.append(event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        what, key = self.event(name, args)
        out = func(*args, **(kwargs or {}))
        if what:
            self.add(what, key)
        if what in ("gather", "reduce"):
            self.under_way[out.untyped_storage()._cdata] = {"gather": "there", "reduce": "reduced"}[what], key
        elif name == "wait_tensor":
            self.add(*self.under_way.pop(args[0].untyped_storage()._cdata))
        else:
            assert func.namespace not in ("_c10d_functional", "c10d"), name
        return out


Mode = TypeVar("Mode", bound=OfUnits)


def step_in(mode: Mode, model: nn.Module, spec: fs.PartitionSpec, way: str, **options: int) -> Mode:
    """The mode after one step within."""
    params = fs.shard(model, spec)
    first = lambda y: (y if isinstance(y, Tensor) else y[0]).sum()  # noqa: E731
    with mode:
        WAYS[way](loss_of(model, spec, numbers(0, 0), of=first, then=mode.turn, **options))(params)
    return mode


def recorded(model: nn.Module, spec: fs.PartitionSpec, way: str = "fs", **options: int) -> Events:
    """One step's events."""
    events = step_in(Events(spec), model, spec, way, **options)
    assert not events.under_way  # nothing that was started is forgotten
    return events


def lines(text: str) -> list[str]:
    """Events as one writes them down: of several units, "gather 0 1"."""
    out = []
    for event in text.replace("\n", ",").split(","):
        what, *keys = event.split()
        out += [f"{what} {key}" for key in keys]
    return out


FORWARD = {
    0: """gather root, there root, compute root, gather 0, there 0, compute 0, gather 1, there 1, compute 1
          gather 2, there 2, compute 2, compute root""",
    1: """gather root, there root, gather 0, compute root, there 0, gather 1, compute 0, there 1, gather 2, compute 1
          there 2, compute 2, compute root""",
    2: """gather root, there root, gather 0 1, compute root, there 0, gather 2, compute 0, there 1, compute 1
          there 2, compute 2, compute root""",
}
KEPT = """compute root, compute 2, reduce 2, compute 1, reduced 2, reduce 1, compute 0, reduced 1, reduce 0
          compute root, reduced 0, reduce root, reduced root"""
BACKWARD = {
    0: """compute root, compute 2, reduce 2, gather 1, there 1, compute 1, reduced 2, reduce 1
          gather 0, there 0, compute 0, reduced 1, reduce 0, compute root, reduced 0, reduce root, reduced root""",
    1: """compute root, gather 1, compute 2, reduce 2, there 1, gather 0, compute 1, reduced 2, reduce 1
          there 0, compute 0, reduced 1, reduce 0, compute root, reduced 0, reduce root, reduced root""",
    2: """gather 1, compute root, gather 0, compute 2, reduce 2, there 1, compute 1, reduced 2, reduce 1
          there 0, compute 0, reduced 1, reduce 0, compute root, reduced 0, reduce root, reduced root""",
}


@at_most(7)
@every(prefetch=AHEAD, way=sorted(WAYS))
def test_the_events_of_a_step(way: str, prefetch: int) -> None:
    """Three blocks and a root, word by word; the root and the last block stay for backward."""
    model = Blocks()
    with units_of(model) as spec:
        for _ in range(3):
            events = recorded(model, spec, way, prefetch=prefetch)
            assert events.forward == lines(FORWARD[prefetch])
            assert events.backward == lines(BACKWARD[prefetch])


@pytest.mark.parametrize("prefetch", AHEAD)
def test_two_forwards_and_kept_units(prefetch: int) -> None:
    """Each call has a schedule of its own: the events of one step's forward twice, then of its backward twice.

    P(reshard=False): forward is the same, backward only computes and reduces. One ahead, one in flight is the default.
    """
    model = Blocks()
    with units_of(model) as spec:
        params = {key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}
        with Events(spec) as events:
            losses = [loss_of(model, spec, numbers(0, step), prefetch=prefetch)(params) for step in range(2)]
            events.turn()
            torch.autograd.backward(losses)
        assert events.forward == 2 * lines(FORWARD[prefetch])
        assert events.backward == 2 * lines(BACKWARD[prefetch])
        kept = fs.by_type(MLP, p=P("shard", reshard=False))(model).bound
        events = recorded(model, kept, prefetch=prefetch)
        assert (events.forward, events.backward) == (lines(FORWARD[prefetch]), lines(KEPT))
        default = recorded(model, spec)
        assert (default.forward, default.backward) == (lines(FORWARD[1]), lines(BACKWARD[1]))


CHAINS: dict[str, Callable[[], nn.Module]] = {"Blocks": lambda: Blocks(5), "blocks_alone": blocks_alone}


@every(prefetch=[0, 1, 2, 3, 9], name=CHAINS)
def test_each_gather_overlaps_with_the_computation_before_it(name: str, prefetch: int) -> None:
    """In both directions a gather starts just before the unit ``prefetch`` places earlier computes, and ends at its use."""
    model = CHAINS[name]()
    with units_of(model) as spec:
        forward = [key.rpartition("blocks.")[2] or "root" for key in spec.order]
        backward = sorted(forward, reverse=True)  # the root, which ends the forward, begins it
        events = recorded(model, spec, prefetch=prefetch)
        for log, used in ((events.forward, forward), (events.backward, backward)):
            computes = [log.index(f"compute {key}") for key in used]
            for i, key in enumerate(used):
                if f"gather {key}" not in log:
                    assert log is events.backward
                    assert i < (2 if name == "Blocks" else 1)  # what forward has kept
                    continue
                start, there = log.index(f"gather {key}"), log.index(f"there {key}")
                assert start < computes[max(i - prefetch, 0)]
                assert i <= prefetch or start > computes[i - prefetch - 1]
                assert there < computes[i]
                assert i == 0 or there > computes[i - 1]
            under_way = [sum(e.startswith("gather ") - e.startswith("there ") for e in log[:n]) for n in range(len(log))]
            assert max(under_way) <= max(prefetch, 1)  # none starts while another one is awaited


@at_most(9)
@every(in_flight=[1, 2, 3, 9], way=sorted(WAYS))
def test_each_reduction_overlaps_with_the_computation_after_it(way: str, in_flight: int) -> None:
    """A reduction is awaited after the backward of the unit ``in_flight`` places later, and so many are under way at most."""
    with world(8):
        events = recorded(blocks_alone(), fs.by_type(MLP, p=CLOSE)(blocks_alone()).bound, way, in_flight=in_flight).backward
        for i in range(5):
            reduced = events.index(f"reduced {i}")
            assert reduced > events.index(f"reduce {i}")
            assert reduced > events.index(f"reduce {max(i - in_flight + 1, 0)}")
            assert reduced > events.index(f"compute {max(i - in_flight, 0)}")
        count = [sum(e.startswith("reduce ") - e.startswith("reduced ") for e in events[:n]) for n in range(len(events))]
        assert max(count) == min(in_flight, 5)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_what_backward_does_not_read_is_not_gathered_ahead(prefetch: int) -> None:
    """The first layer's weight makes no gradient of its input, and a unit of such layers alone is not gathered again."""
    with world(8):
        model = nn.Sequential(nn.Linear(5, 5).double(), MLP(5, 7), MLP(5, 8))
        spec = fs.by_path({"*": CLOSE})(model).bound
        events = recorded(model, spec, prefetch=prefetch)
        assert gathered(events.forward) == Counter("012")
        assert gathered(events.backward) == Counter("1")


# --- the order ---
def visits(order: str) -> list[str]:
    return ["root", *(name for i, name in enumerate(order) if order[i - 1 : i] != name)]


def gathered(events: list[str]) -> Counter[str]:
    return Counter(event.partition(" ")[2] for event in events if event.startswith("gather "))


ORDERS = ["abc", "bca", "cba", "abab", "aab", "ac", "b", "abcabc", "aabbcc", "cac", ""]


WRONG = [[], ["a"], ["", "c", "b", "a"], ["a", "a", "a", "a"], ["b", "", "b", "c", "b"]]


@at_most(24)
@every(prefetch=[0, 1, 2, 3])
@pytest.mark.parametrize(
    ("order", "named"), [*((order, None) for order in ORDERS), *(("abcab", some) for some in WRONG)], ids=str
)
def test_an_order_that_forward_does_not_have_wastes_little(order: str, named: list[str] | None, prefetch: int) -> None:
    """The tree's, or a wrong one: every visit is gathered, at most ``prefetch`` units in vain, and none again in backward."""
    with units_of(Order(order)) as spec:
        events = recorded(Order(order), spec if named is None else spec.ordered(named), prefetch=prefetch)
        used = Counter(visits(order))
        wasted = gathered(events.forward) - used
        assert used - gathered(events.forward) == Counter()
        assert wasted.total() <= prefetch
        assert set(wasted.values()) <= {1}
        assert gathered(events.backward) == Counter(visits(order)[1:-1])  # the last one and the root have stayed


@at_most(21)
@every(prefetch=[0, 1, 2, 3], order=ORDERS)
def test_the_traced_order_wastes_nothing(order: str, prefetch: int) -> None:
    """Each visit is gathered once, started as soon as what is ``prefetch`` visits earlier is there."""
    with units_of(Order(order)) as spec:
        spec = spec.ordered(fs.trace_order(Order(order), spec, numbers(0, 0)))
        used = visits(order)
        assert [key or "root" for key in spec.order] == used
        events = recorded(Order(order), spec, prefetch=prefetch).forward
        there = [i for i, event in enumerate(events) if event.startswith("there ")]
        starts = [i for i, event in enumerate(events) if event.startswith("gather ")]
        assert [events[i].partition(" ")[2] for i in there] == used
        assert gathered(events) == Counter(used)
        open_again = {i for i in range(2, len(used)) if used[i] in used[max(i - prefetch, 0) : i]}
        if not open_again:  # a unit is not gathered a second time while it is in use
            assert [events[i].partition(" ")[2] for i in starts] == used
            for i, start in enumerate(starts[1:], 1):
                after = max(i - max(prefetch, 1), 0)
                assert there[after] < start < there[after + 1]


def test_nested_units_are_ahead() -> None:
    """The inner unit is gathered while the outer one computes, in either direction, and no unit twice."""
    with units_of(Nested()) as spec:
        assert fs.trace_order(Nested(), spec, numbers(0, 0)) == ("first", "first.inner", "last")
        events = recorded(Nested(), spec, prefetch=1)
        assert events.forward == lines("""gather first, there first, gather first.inner, compute first, there first.inner
            gather last, compute first.inner, compute first, there last, compute last""")
        assert gathered(events.backward) == Counter(["first", "first.inner"])
        again = [events.backward.index(f"{what} first") for what in ("gather", "there", "compute")]
        assert again == sorted(again)
        assert again[0] < events.backward.index("compute last")


InnerLast = module_class(
    "InnerLast", lambda width: {"own": nn.Linear(5, 5), "inner": MLP(5, width)}, lambda self, x: self.inner(self.own(x).tanh())
)
"""A block whose backward comes to the unit inside of it before its own parameters."""


@pytest.mark.parametrize("prefetch", AHEAD)
def test_a_unit_around_the_next_one_is_gathered_once_in_backward(prefetch: int) -> None:
    """It was gathered ahead, dropped when backward came to the unit inside, and gathered again."""
    with world(8):
        model = nn.Sequential(*(InnerLast(8 + i) for i in range(3))).double()
        spec, params = shards_of(fs.by_type(InnerLast, MLP, p=CLOSE), model)
        with Collectives() as sent:
            fs.grad(loss_of(model, spec, numbers(0, 0), prefetch=prefetch))(params)
        once = 3  # forward hands the last block and its inner unit to backward, which does not read the first block's weight
        assert Counter(one.op for one in sent.all)["all_gather"] == 2 * len(spec) - once


# --- backward that does not come to what was gathered for it ---
@every(prefetch=AHEAD, cut=[True, False])
def test_a_unit_that_backward_leaves_out(cut: bool, prefetch: int) -> None:
    """_unused_in_backward: gathered in vain at most, freed, not reduced; and a second backward does the same."""
    model = SideBySide(cut)
    with units_of(model) as spec:
        params = {key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}
        with Alive() as alive, Events(spec) as events:
            y, side = fs.functional_call(model, params, (numbers(0, 0),), spec=spec, prefetch=prefetch)
            runs = []
            for _ in range(2):
                events.now = []
                torch.autograd.grad(y.sum(), list(params.values()), retain_graph=True, allow_unused=True)
                runs.append(events.now)
                assert not events.under_way
                assert alive.now() == []
        for n, run in enumerate(runs):
            wanted = Counter("ac" if n else "a") + Counter("b" if prefetch and not cut else "")
            assert gathered(run) == wanted
            assert [event for event in run if event.startswith("reduce ")] == ["reduce c", "reduce a"]
        del side


# --- trace_order and ordered ---
class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late, self.norm, self.early = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.late(self.norm(self.early(x)))

    def other(self, x: Tensor, *, twice: bool) -> Tensor:
        return self.early(self.late(self.early(x)) if twice else x)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_trace_order_names_what_forward_gathers(where: str) -> None:
    """In the order of use, also of another method; on any device, without a process group, and nothing is changed."""
    model = WithBuffers().to(where)
    x = torch.randn(4, 5, device=where)
    spec = fs.policies.always()(model)
    with unchanged(model), Collectives() as sent:
        assert fs.trace_order(model, spec, (x,)) == fs.trace_order(model, spec, x) == ("early", "norm", "late")
        assert fs.trace_order(model, spec, x, {"twice": True}, method="other") == ("early", "late", "early")
        assert fs.trace_order(model, spec, x, {"twice": False}, method="other") == ("early",)
    assert sent.all == []


def test_trace_order_depends_on_neither_mesh_nor_order() -> None:
    """And leaves out replicated units, which travel nowhere."""
    with world(8):
        unbound = fs.policies.override(fs.by_type(MLP, p=CLOSE), fs.by_path({"a": P()}))(Order("bca"))
        specs = unbound, unbound.bound, unbound.on({"shard": 3}), unbound.ordered(["c"])
        assert {fs.trace_order(Order("bca"), spec, numbers(0, 0)) for spec in specs} == {("", "b", "c")}


def test_trace_order_refuses_what_depends_on_values() -> None:
    """With the advice to give the order by hand; the model is as it was."""
    model = module_class("Depends", lambda: {"a": nn.Linear(5, 5)}, lambda self, x: self.a(x) * x.sum().item())()
    with unchanged(model), pytest.raises(RuntimeError, match=r"trace_order: expected.* on shapes.*spec\.ordered by hand"):
        fs.trace_order(model, fs.policies.always()(model), torch.randn(4, 5))


def test_ordered_specs_are_other_specs() -> None:
    """Equal, hashed and pickled by their order; an unknown name is named."""
    spec = fs.by_type(MLP, p=CLOSE)(Order("bca"))
    assert spec.order == ("", "a", "b", "c")
    ordered, again = spec.ordered(iter(["", "b", "c", "a"])), spec.ordered(["", "b", "c", "a"])
    assert (ordered.order, spec.order) == (("", "b", "c", "a"), ("", "a", "b", "c"))
    assert ordered == again not in (spec, spec.ordered(["", "b", "a", "c"]))
    assert len({spec, ordered, again, spec.ordered([])}) == 3
    assert pickle.loads(pickle.dumps(ordered)) == copy.deepcopy(ordered) == ordered
    assert pickle.loads(pickle.dumps(ordered)).order == ordered.order
    assert ordered.on({"shard": 4}).order == ordered.order
    with pytest.raises(ValueError, match=r"ordered: 'blocks' is not a unit: expected some of '', 'a', 'b', 'c'"):
        spec.ordered(["a", "blocks"])


@real_ranks(2)
def test_ranks_must_agree_on_the_order(rank: int) -> None:
    """Gathers ahead in different orders would meet each other's data: every rank raises."""
    spec = fs.by_type(MLP, p=CLOSE)(Order("abc")).bound
    fs.shard(Order("abc"), spec.ordered(["a", "b"]))
    words = r"different models: expected, as on its rank 0, order 'a', 'b'; got on rank 1 order 'b'"
    refused(ValueError, words, lambda: fs.shard(Order("abc"), spec.ordered(["a", "b"] if rank == 0 else ["b", "a"])))


NO_COUNTS = product(("prefetch", "in_flight"), (1.5, True, None, "1"))


@pytest.mark.parametrize(("option", "value"), [("prefetch", -1), ("in_flight", 0), ("in_flight", -2), *NO_COUNTS])
def test_options_are_checked(option: str, value: Any) -> None:
    """By name, before anything is sent."""
    with units_of(Blocks()) as spec:
        params, call = fs.shard(Blocks(), spec), loss_of(Blocks(), spec, numbers(0, 0), **{option: value})
        error = ValueError if type(value) is int else TypeError
        with Collectives() as sent:
            refused(error, f"^{option}: expected .* got {value!r}", lambda: call(params))
        assert sent.all == []


# --- values, on real ranks ---
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Net": Net,
    "Blocks": Blocks,
    "Order": lambda: Order("abcab"),
    "Nested": Nested,
    "frozen": lambda: frozen(Net(), "first", "blocks.0", "blocks.2"),
}


def step(model: nn.Module, spec: fs.PartitionSpec, way: str, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """The gradients of the spec's trained units."""
    trained, rest = fs.partition(fs.shard(model, spec), spec)
    return WAYS[way](loss_of(model, spec, x, frozen=rest, **options))(trained)[0]


def plain(model: nn.Module, spec: fs.PartitionSpec, x: Tensor, rank: int) -> dict[str, Tensor]:
    """The same of the model itself, averaged over the ranks by hand."""
    model = copy.deepcopy(model)
    square_sum(model(x)).backward()
    shards = fs.shard(average_gradients(model), spec, rank=rank)
    return {unit.key: shards[unit.key] for unit in spec if unit.requires_grad}


@at_most(1)
@each(p=[P("shard"), P("shard", reshard=False), P()], name=MODELS)
@real_ranks(2)
def test_every_schedule_gives_the_same_gradients(rank: int, name: str, p: P) -> None:
    """Bit by bit for every prefetch and in_flight, and those of the plain model averaged by hand."""
    model, x = MODELS[name](), numbers(rank, 0)
    spec = fs.by_type(MLP, p=p)(model).bound
    expected = plain(model, spec, x, rank)
    first = {way: step(model, spec, way, x, prefetch=0, in_flight=1) for way in ("fs", "backward")}
    for way, grads in first.items():
        same(grads, expected, way)
    for way, prefetch, in_flight in some(product(first, range(4), range(1, 4))):
        got = step(model, spec, way, x, prefetch=prefetch, in_flight=in_flight)
        cases.same(got, first[way])


@at_most(1)
@each(way=WAYS, order=["bca", "abab", "aab", "ac"])
@real_ranks(2)
def test_a_wrong_order_costs_no_correctness(rank: int, order: str, way: str) -> None:
    """Right, reversed, too short and nonsensical orders: the gradients of prefetch=0 and of the plain model."""
    model, x = Order(order), numbers(rank, 0)
    spec = fs.by_type(MLP, p=CLOSE)(model).bound
    first = step(model, spec, way, x, prefetch=0)
    same(first, plain(model, spec, x, rank), way)
    traced = fs.trace_order(model, spec, x)
    wrong: list[tuple[str, ...]] = [traced[::-1], (), ("a",) * 4, ("c", "b"), ("b", "", "b", "c", "b"), traced * 2]
    for prefetch, names in some(product((1, 2, 5), (traced, *wrong)), 1):
        cases.same(step(model, spec.ordered(names), way, x, prefetch=prefetch), first)
    cases.same(step(model, spec, way, x, prefetch=2), first)


class Groups(TorchDispatchMode):
    """The process groups by what goes over them."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and (name := func._schema.name.partition("::")[2]) != "wait_tensor":
            self.of.setdefault(name.rstrip("_"), set()).add(args[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", [P("shard"), P()], ids=str)
@real_ranks(2)
def test_reductions_over_a_second_mesh(rank: int, p: P) -> None:
    """The gradients are the same; gathers go over the first mesh's group, reductions over the second's, of the same axes."""
    first, second = (DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("shard",)) for _ in range(2))
    one, two = first.get_group().group_name, second.get_group().group_name
    assert one != two
    model, x = Net(), numbers(rank, 0)
    policy = fs.by_type(MLP, p=p)(model)
    expected = step(model, policy.on(first), "fs", x)
    for sizes in ({"shard": 4}, {"other": 2}, {"replicate": 1, "shard": 2}):
        words = "reductions: expected a mesh of the same axes"
        refused(ValueError, words, lambda sizes=sizes: policy.on(first, reductions=Mesh.of(sizes)))
    spec = policy.on(first, reductions=second)
    for way, prefetch in product(WAYS, (0, 1)):
        trained = fs.shard(model, spec)
        with Groups() as groups:
            got, _ = WAYS[way](loss_of(model, spec, x, prefetch=prefetch))(trained)
        same(got, expected, way)
        moved = {"broadcast": {one}, "all_to_all_single": {two}} if p.axes else {"all_reduce": {two}}
        assert groups.of == moved


class Cast(nn.Sequential):
    """Layers of alternating dtypes."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__(*(nn.Linear(5, 5).to(dtype) for dtype in dtypes))

    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input.to(layer.weight.dtype))
        return input.double()


def reduced(rank: int, model: nn.Module, bucket: int, way: str) -> list[tuple[int, int]]:
    """Elements of everything that is all-reduced, and the bytes of each."""
    x = numbers(rank, 0)
    spec = fs.policies.always(p=P(align=1))(model).bound
    with mock.patch.object(reductions, "BUCKET_BYTES", bucket), Collectives() as log:
        got = step(model, spec, way, x)
    same(got, plain(model, spec, x, rank), f"{bucket}")
    return [(sent.numel, sent.bytes // sent.numel) for sent in log.all if sent.op == "all_reduce"]


@at_most(2)
@pytest.mark.parametrize("way", sorted(WAYS))
@real_ranks(2)
def test_replicated_units_are_reduced_in_buckets(rank: int, way: str) -> None:
    """Units of one dtype together until they are BUCKET_BYTES, of two dtypes never; the gradients are the plain ones."""
    wide, narrow, layers = 8, 4, [30] * 4
    model = Cast([torch.float64] * 4)
    assert reduced(rank, model, reductions.BUCKET_BYTES, way) == [(sum(layers), wide)]
    assert reduced(rank, model, 1, way) == [(n, wide) for n in layers]
    assert reduced(rank, model, 30 * 8, way) == [(n, wide) for n in layers]
    assert reduced(rank, model, 30 * 8 + 1, way) == [(60, wide)] * 2
    double, single = torch.float64, torch.float32
    assert reduced(rank, Cast([double, double, single]), 2**20, way) == [(30, narrow), (60, wide)]
    assert reduced(rank, Cast([double, single, double]), 2**20, way) == [(60, wide), (30, narrow)]


@at_most(1)
@every(p=mark_seldom([P("shard"), P("shard", reshard=False), P()], P("shard"), P("shard", reshard=False)))
@real_ranks(2)
def test_an_interrupted_backward_leaves_nothing(rank: int, p: P) -> None:
    """A hook that raises between two units: the next backwards on the same graph add nothing of that one.

    The last of them frees the graph, after which there is none.
    """
    model, x = Net(), numbers(rank, 0)
    spec = fs.by_type(MLP, p=p)(model).bound
    expected = plain(model, spec, x, rank)
    failing, ran = -1, list[int]()

    def in_backward(i: int, grad: Tensor) -> None:
        ran.append(i)
        if i == failing:
            raise ZeroDivisionError

    def in_forward(i: int, module: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(functools.partial(in_backward, i))

    for i, block in enumerate(model.blocks):
        block.register_forward_hook(functools.partial(in_forward, i))
    for failing_now, prefetch in product(range(3), range(3)):
        params = {key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}
        loss = loss_of(model, spec, x, prefetch=prefetch)(params)
        failing = failing_now
        for _ in range(2):
            ran.clear()
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
            assert ran == [2, 1, 0][: 3 - failing_now]
            assert all(shard.grad is None for shard in params.values())
        failing = -1
        for retain in (True, True, False):
            got = torch.autograd.grad(loss, list(params.values()), retain_graph=retain)
            same(dict(zip(params, got, strict=True)), expected, f"{failing_now}, {prefetch}")
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(loss, list(params.values()))


# --- memory ---
class Memory(OfUnits):
    """After each op how many units are gathered, how many gradients unreduced, and the bytes of both.

    A buffer is what it was last filled with: a gathered unit or a gradient to reduce.
    """

    def __init__(self, spec: fs.PartitionSpec) -> None:
        super().__init__(spec)
        self.buffers: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        what, _ = self.event(name, args)
        if what in ("gather", "reduce") or (name == "_chunk_cat" and self.now is self.backward):
            storage = (args[0] if what == "reduce" else out).untyped_storage()
            self.buffers[storage._cdata] = weakref.ref(storage), what == "gather"
        alive = [(storage.nbytes(), gathered) for ref, gathered in self.buffers.values() if (storage := ref()) is not None]
        gathered = sum(gathered for _, gathered in alive)
        self.now.append((gathered, len(alive) - gathered, sum(size for size, _ in alive)))
        return out


@every(in_flight=[1, 2], prefetch=AHEAD, same_sizes=[True, False])
def test_what_is_gathered_and_unreduced_together(same_sizes: bool, prefetch: int, in_flight: int) -> None:
    """At most prefetch + 1 units gathered and in_flight + 1 unreduced, in buffers and in bytes."""
    model = chain(7) if same_sizes else blocks_alone(7)
    with units_of(model) as spec:
        sizes = sorted(8 * spec.padded_numel(unit) for unit in spec)
        memory = step_in(Memory(spec), model, spec, "backward", prefetch=prefetch, in_flight=in_flight)
        for moments in (memory.forward, memory.backward):
            gathered, unreduced, alive = (max(some) for some in zip(*moments, strict=True))
            assert (gathered, unreduced <= in_flight + 1) == (prefetch + 1, True)
            assert alive <= sum(sizes[-(prefetch + in_flight + 2) :])
