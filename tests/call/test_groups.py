"""Units of several modules: one gather and one reduction, and the results of any other spec."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import mirror
import pytest
import torch
from collective_log import gathers, scatters, step, world
from depth import at_most, each, mark_seldom, seldom
from fuzz_cases import Case, mirrored, on_real_ranks
from models import module_class, refused
from parity import MAIN_WAYS, check_parity, next_token, numbers, tokens
from peer_models import MLP, Block, Chunked, Net, Transformer
from ranks import Pool, mesh_of, real_ranks
from test_memory import watched
from torch import Tensor, nn

import funshard as fs
from funshard import P
from funshard.policies import by_group, override


def keys(spec: fs.PartitionSpec) -> list[str]:
    return [unit.key for unit in spec]


# --- the policy ---
def test_groups_of_siblings() -> None:
    """By pattern, class or module; of a size, in the order of their names, among modules of one parent alone."""
    model = nn.ModuleDict({"up": nn.ModuleList([MLP(3) for _ in range(11)]), "down": nn.ModuleList([MLP(3), MLP(3)])})
    spec = by_group([MLP], size=4)(model)
    assert keys(spec) == ["down.0+down.1", "up.0+up.1+up.2+up.3", "up.4+up.5+up.6+up.7", "up.8+up.9+up.10"]
    assert spec == by_group(["*.*"], size=4)(model) == by_group([*model["up"], *model["down"]], size=4)(model)
    assert keys(by_group(["up.1", "down.0"])(model)) == ["", "down.0+up.1"]
    assert by_group([MLP], size=1)(model) == fs.by_type(MLP)(model)
    assert repr(by_group([MLP, "up"], size=2, p=P())) == "by_group([MLP, 'up'], size=2, p=P())"
    assert pickle.loads(pickle.dumps(by_group(["up.*"], size=2)))(model) == by_group(["up.*"], size=2)(model)
    unit = spec.by_key["down.0+down.1"]
    assert (unit.path, unit.paths, unit.p) == ("down.0", ("down.0", "down.1"), P("shard"))
    assert {name.rsplit(".", 2)[0] for param in unit.params for name in param.names} == {"down.0", "down.1"}


def test_modules_with_one_label_are_one_unit() -> None:
    """P(unit=) is what by_group sets: every policy that gives P to modules may say it, and combinators keep it."""
    model = Net()
    named = fs.by_path({"blocks.0": P("shard", unit="ends"), "head": P("shard", unit="ends")})
    assert keys(named(model)) == ["", "blocks.0+head"]
    assert keys(override(by_group([MLP], size=2), named)(model)) == ["", "blocks.0+head", "blocks.1", "blocks.2"]
    low = by_group([MLP], size=2, p=P("shard", precision=fs.Precision(param=torch.bfloat16)))
    apart = [f"blocks.{i}.{name}_proj" for i in range(3) for name in ("in", "out")]
    assert keys(fs.policies.full_precision(low, nn.Linear)(model)) == [*apart, "first", "head"]
    pick = fs.policies.custom(lambda module: {"unit": "all"} if isinstance(module, MLP) else False)
    assert keys(pick(nn.Sequential(MLP(2), MLP(2)))) == ["0+1"]


def test_frozen_parameters_and_dtypes_are_units_of_their_own() -> None:
    """Each with the modules that have such parameters."""
    model = Net()
    model.blocks[0].in_proj.requires_grad_(False)
    spec = by_group([MLP])(model)
    name = "blocks.0+blocks.1+blocks.2"
    assert {unit.key: unit.paths for unit in spec if unit.path} == {
        f"{name}:frozen": ("blocks.0",),
        name: ("blocks.0", "blocks.1", "blocks.2"),
    }


def test_a_parameter_tied_across_a_group_is_in_it() -> None:
    """And one that a group shares with modules outside is above both."""
    model = Transformer(2, tied=True)
    assert keys(by_group(["tokens", "output"])(model)) == ["", "output+tokens"]
    spec = override(by_group(["layers.0", "output"]), fs.by_path({"tokens": P("shard")}))(model)
    assert spec.by_name["tokens.weight"][0].key == spec.by_name["output.weight"][0].key == ""


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (by_group(["blocks.0", "blocks.0.in_proj"]), r"module 'blocks.0.in_proj' is inside of 'blocks.0': expected modules"),
        (by_group([""]), "by_group: '' matches no module: expected some of"),
        (by_group(["layers.*"]), r"by_group: 'layers.\*' matches no module: expected some of \['[^']"),
        (by_group([nn.Conv2d]), r"by_group: <class .*Conv2d'> matches no module"),
        (
            fs.by_path({"blocks.0": P("shard", unit="a"), "blocks.1": P(unit="a")}),
            r"modules 'blocks.0' and 'blocks.1' are one unit as P\('shard', unit='a'\) and as P\(unit='a'\): expected one P",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_a_group(policy: fs.Policy, message: str) -> None:
    refused(ValueError, message, lambda: policy(Net()))


@pytest.mark.parametrize(
    "policy",
    [
        override(by_group(["a", "b"]), fs.by_path({"a+b": P("shard")})),  # one key
        override(by_group(["a", "b+c"]), by_group(["a+b", "c"])),  # one label
    ],
)
def test_names_with_a_plus(policy: fs.Policy) -> None:
    """No unit is lost or joined with another, because its key is that of the other."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c", "a+b", "b+c")})
    assert keys(fs.by_type(nn.Linear)(model)) == ["a", "a+b", "b", "b+c", "c"]
    refused(ValueError, r"unit 'a\+.*' of modules \[.*\] may have another unit's key: expected no '\+'", lambda: policy(model))


# --- what a step sends and holds ---
def in_a_loop(self: Any, x: Tensor) -> Tensor:
    kept = self.a(x)
    for _ in range(2):
        x = self.b(self.a(x))
    self.b(x)
    return kept + x


Recurrent = module_class("Recurrent", lambda: {"a": MLP(5), "b": MLP(5)}, in_a_loop)
"""Two blocks in a loop, of which the loss may leave out the last outputs."""


REMATS = P("shard"), P("shard", remat=True)
SENT: dict[str, tuple[Callable[[], nn.Module], fs.Policy, list[str], list[str], list[str]]] = {
    **{f"two modules each, {p}": (
        lambda: nn.Sequential(*(MLP(5) for _ in range(6))), by_group([MLP], size=2, p=p), ["0+1", "2+3", "4+5"], ["0+1", "2+3"],
        ["0+1", "2+3", "4+5"]) for p in REMATS},
    "what ends the forward": (
        Net, override(by_group(["blocks.0", "blocks.1"]), by_group(["blocks.2", "head"])),
        ["", "blocks.0+blocks.1", "blocks.2+head"], ["blocks.0+blocks.1"], ["", "blocks.0+blocks.1", "blocks.2+head"]),
    "another unit between its modules": (
        Net, override(by_group(["blocks.0", "blocks.2"]), fs.by_path({"blocks.1": P("shard")})),
        ["", "blocks.0+blocks.2", "blocks.1", "blocks.0+blocks.2"], ["blocks.1", "blocks.0+blocks.2"],
        ["", "blocks.0+blocks.2", "blocks.1", "blocks.0+blocks.2"]),
    "units inside of its modules": (
        lambda: nn.Sequential(*(nn.Sequential(MLP(5), MLP(5)) for _ in range(4))),
        override(by_group(["*"], size=2), fs.by_path({"*.1": P("shard")})), ["0+1", "0.1", "1.1", "2+3", "2.1", "3.1"],
        ["0+1", "0.1", "1.1", "2.1"], ["0+1", "0.1", "1.1", "2+3", "2.1", "3.1"]),
    **{f"a loop, {p}": (Recurrent, by_group(["a", "b"], p=p), ["a+b"], [], ["a+b"]) for p in REMATS},
}  # fmt: skip
"""A model, its groups, and the units that are gathered in forward, gathered again in backward, and reduced."""


@each(way=MAIN_WAYS, name=SENT)
def test_a_group_is_gathered_and_reduced_once(name: str, way: str) -> None:
    """As one unit with all its parameters: recomputed, too, where each module runs again by itself. The root, and what ends
    the forward, stay for backward; one in which other units run is gathered again."""
    make, policy, forward, again, reduced = SENT[name]
    with world(8):
        model = make()
        spec = policy(model).bound
        sent = step(model, spec, way)
        assert sent.forward == gathers(spec, *forward)
        assert Counter(sent.backward) == Counter(gathers(spec, *again) + scatters(spec, *reduced))


@pytest.mark.parametrize("remat", [False, True])
def test_a_rank_holds_two_groups(remat: bool) -> None:
    """The one in use and the next; after forward the last one; after backward none."""
    with world(4):
        model = nn.Sequential(*(MLP(5) for _ in range(10)))
        spec = by_group([MLP], size=2, p=P("shard", remat=remat))(model).bound
        size = spec.padded_numel(spec.units[0])
        alive, after_forward, forward_peak, backward_peak = watched(model, spec, "fs")
        assert (forward_peak, after_forward) == (2 * size, [size])
        assert backward_peak <= 3 * size
        assert alive.peak_unreduced <= 2 * size
        assert alive.now() == []


# --- the same results ---
def grouped(p: P) -> fs.Policy:
    """Blocks by two, and the last layers."""
    return override(by_group([Block], size=2, p=p), by_group(["norm", "output"], p=p))


SPECS: dict[str, Callable[[], fs.Policy]] = {
    "shard": lambda: grouped(P("shard")),
    "keep": lambda: grouped(P("shard", reshard=False)),
    "replicated": lambda: grouped(P()),
    "remat": lambda: grouped(P("shard", remat=True)),
    "units inside": lambda: override(grouped(P("shard")), fs.by_type(nn.Sequential, p=P("shard", remat=True))),
    "tied": lambda: override(grouped(P("shard")), by_group(["tokens", "output"])),
    "apart": lambda: override(by_group(["layers.0", "layers.2"]), by_group(["layers.1", "norm"])),
    "activations": lambda: grouped(P("shard", offload="activations")),
}


@at_most(2)
@each(ranks=[2, 4], way=MAIN_WAYS, name=SPECS)
@real_ranks(lambda ranks: ranks)
def test_train_parity(rank: int, ranks: int, name: str, way: str) -> None:
    """Losses, gradients and parameters of a transformer on two real ranks, and on a mesh of two axes."""
    model = Transformer(3, tied=name == "tied")
    model.layers[1].norm1.requires_grad_(name != "units inside")
    spec = SPECS[name]()(model).on(mesh_of(2) if ranks == 2 else mesh_of(2, 2))
    check_parity(rank, model, spec, tokens, next_token, way=way)


ORDERS = {"skipped": (0,), "reversed": (1, 0), "twice": (0, 0, 1), "in turn": (0, 1, 0, 1), "between": (0, 2, 1)}


@each(ps=["group", "group remat"], transform=["fs.grad", "jvp", "hvp", "grad of grad", "double backward", "vjp"], order=ORDERS)
def test_every_order_of_its_modules(gloo2: Pool, order: str, transform: str, ps: str) -> None:
    """Modules of a group that run in any order, again, or not at all."""
    case = Case(("Linear", "Mlp", "layer_norm"), (ps, ps, "shard"), transform, ORDERS[order])
    assert gloo2.run(on_real_ranks, case) == ["", ""]


@pytest.mark.parametrize(
    "case",
    [
        Case(("weight_norm", "Complex", "spectral_norm"), ("group remat",) * 3, "fs.grad of fs.grad"),  # of two dtypes
        Case(("AutocastSingle", "Linear"), ("group remat",) * 2, "fs.grad"),
    ],
    ids=lambda case: case.pieces[0],
)
def test_groups_of_several_dtypes(alone: Pool, case: Case) -> None:
    """Each module has those of the group's units that it has parameters in."""
    assert alone.run(mirrored, case) == [""]


# --- ranks that compare what they send ---
def in_order(self: Any, x: Tensor, order: tuple[int, ...]) -> Tensor:
    for i in order:
        x = self.blocks[i](x)
    return x


Choice = module_class("Choice", lambda: {"blocks": nn.ModuleList(MLP(5) for _ in range(4))}, in_order)
"""Two groups of two, of which the caller chooses some modules."""


def choose(rank: int, p: P, *orders: tuple[int, ...]) -> tuple[Callable[[fs.Params], Tensor], fs.Params]:
    torch.manual_seed(0)
    model = Choice()
    spec = by_group(["blocks.*"], size=2, p=p)(model).bound
    loss = lambda p: fs.functional_call(model, p, (numbers(rank, 0), orders[rank]), spec=spec).square().sum()  # noqa: E731
    return loss, fs.shard(model, spec)


@pytest.mark.parametrize("p", mark_seldom([P("shard"), P("shard", remat=True), P()], P("shard")), ids=str)
@real_ranks(2)
def test_ranks_may_run_a_group_in_another_order(rank: int, p: P) -> None:
    """Of its modules, as long as they gather and reduce the same units: the same inside of fs.check() and without it."""
    loss, params = choose(rank, p, (0, 1, 2, 3), (1, 0, 0, 2))
    with fs.check():
        grads = fs.grad(loss)(params)
    assert all(torch.equal(grads[key], g) for key, g in fs.grad(loss)(params).items())


@at_most(1)
@each(way=MAIN_WAYS)
@real_ranks(2)
def test_partial_group_forward_then_standalone(rank: int, way: str) -> None:
    """Of a group norm and head, the forward runs one, and calls of their own the other, for each chunk of the loss."""

    def loss(call: Any, ids: Tensor) -> Tensor:
        chunks = call(ids, method="trunk").chunk(3, 1)
        return sum(((call(chunk, method="project") ** 2).mean() for chunk in chunks), torch.zeros(()))

    check_parity(rank, Chunked(2), grouped(P("shard"))(Chunked(2)), tokens, loss, way=way)


class Wide(MLP):
    seen: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        Wide.seen += (x.dtype,)
        return super().forward(x).float()


def test_every_module_of_a_group_casts() -> None:
    """Its inputs and its outputs (FSDP2's test_grouped_module_cast_forward_inputs)."""
    model = nn.Sequential(Wide(5), Wide(5)).float()
    low = fs.Precision(param=torch.bfloat16, reduce=torch.float32, output=torch.float32)
    spec = by_group([Wide], p=P("shard", precision=low))(model).on({"shard": 1})
    Wide.seen = ()
    out = fs.functional_call(model, fs.shard(model, spec), (torch.ones(2, 5),), spec=spec)
    assert Wide.seen == (torch.bfloat16,) * 2
    assert out.dtype == torch.float32


# --- compiled ---
@seldom
@pytest.mark.parametrize("remat", mark_seldom([False, True], False))
def test_compiled_modules_of_a_group(alone: Pool, remat: bool) -> None:
    """Each module of a group is compiled by itself, within the gathers and reductions of the eager one."""
    options = [P("shard", remat=remat, compile=how) for how in (False, fs.Compile(backend="aot_eager"))]
    model, policies = nn.Sequential(*(MLP(5) for _ in range(4))), [by_group([MLP], size=2, p=p) for p in options]
    alone.run(mirror.same_compiled, model, policies, numbers(0, 0), "shard")
