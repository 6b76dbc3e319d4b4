"""``Precision(keep=...)``: parameters of several dtypes in one unit and one gather, beside the model with the same casts."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_log import Collectives, Sent, world
from depth import at_most, each, every, mark_seldom, seldom
from models import module_class, refused
from parity import DERIVATIVES, GRADIENTS, HIGHER, gradient_of, loss_of, shards_of, strategies, subtracted
from ranks import mesh_of, real_ranks
from torch import Tensor, nn

import funshard as fs
from funshard import P, Precision
from funshard.collectives import Axis

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
KEEP = Precision(param=F32, reduce=F64, keep={"*norm.weight": F64, "head.*": F64})
"""Of a model in float64: what is not kept is rounded to float32, and everything is summed in float64."""
LOW = Precision(param=BF16, reduce=F32, keep={"*norm.weight": F32, "head.*": F32})
"""The same of a model in float32, where parameters of two bytes lie beside others of four."""


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.7, 1.3, width))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.itemsize == 2 * x.itemsize  # what is kept is twice as wide, in every test
        return (F.layer_norm(x.to(self.weight.dtype), x.shape[-1:]) * self.weight).to(x.dtype)


Block = module_class(
    "Block",
    lambda width=5: {"up": nn.Linear(width, 2 * width), "norm": Norm(2 * width), "down": nn.Linear(2 * width, width)},
    lambda self, x: x + self.down(torch.tanh(self.norm(self.up(x)))),
)


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def make_model(dtype: torch.dtype = F64, *, tied: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    if tied:
        model.blocks[1].norm = model.blocks[0].norm
    return model


def make_batch(rank: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(rank)).to(dtype)


def full_of(model: nn.Module) -> fs.Params:
    return {name: 1.1 * p.detach() for name, p in model.named_parameters()}  # not those of the model


def objective(y: Tensor) -> Tensor:
    return y.double().sin().square().sum()


def plain_loss(model: nn.Module, low: torch.dtype, full: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The loss without shards: each parameter cast by hand, and the model's input."""
    cast = {k: p if k.endswith("norm.weight") or k.startswith("head.") else p.to(low) for k, p in full.items()}
    return objective(torch.func.functional_call(model, cast, (x.to(low),)))


def gradients(model: nn.Module, spec: fs.PartitionSpec, x: Tensor, way: Callable[..., Any] = fs.grad) -> fs.Params:
    """Those of shards, made whole."""
    return fs.unshard(way(loss_of(model, spec, x, of=objective))(fs.shard(full_of(model), spec)), spec)


def penalty(f: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    """The gradient of a sum over the gradient, which is linear in the loss."""
    grad = torch.func.grad
    return lambda params: grad(lambda p: sum((g * params[k].detach().cos()).sum() for k, g in grad(f)(p).items()))(params)


TRANSFORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fs.grad": (fs.grad, torch.func.grad),
    "torch.func.grad": (torch.func.grad, torch.func.grad),
    "backward": (GRADIENTS["backward"], torch.func.grad),
    "vjp": (DERIVATIVES["vjp"], torch.func.grad),
    "hvp": (HIGHER["jvp of grad"], HIGHER["jvp of grad"]),
    "penalty": (penalty, penalty),
}
"""What differentiates the loss of shards, and that of full parameters."""
OTHERS = {"offload": P("shard", offload="activations"), "compile": P("shard", compile=fs.Compile(backend="aot_eager"))}
OTHERS |= {"align": P("shard", align=2), "two axes": P(("replicate", "shard"))}
ALL = strategies("shard", "keep", "replicated", "remat", **OTHERS)
STRATEGIES = {name: dataclasses.replace(p, precision=KEEP) for name, p in ALL.items()}


def units(p: P, *, tree: bool = True) -> fs.Policy:
    return fs.by_type(Block, p=p) if tree else fs.policies.whole(p)


def mean_over_ranks(grad: Callable[..., Any], model: nn.Module, low: torch.dtype, full: fs.Params, ranks: int) -> fs.Params:
    batches = [make_batch(i, full["head.weight"].dtype) for i in range(ranks)]
    found = [grad(lambda p, x=x: plain_loss(model, low, p, x))(full) for x in batches]
    return {name: sum(grads[name] for grads in found) / ranks for name in full}


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert tensor.abs().sum() > 0, name
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def meshes(kind: str = "") -> dist.DeviceMesh:
    size = dist.get_world_size()
    return mesh_of(2, size // 2) if kind in ("hybrid", "two axes") else mesh_of(size)


KINDS = [*((strategy, "") for strategy in STRATEGIES if strategy != "two axes"), ("shard", "tied"), ("shard", "whole")]
FOUR = [("shard", "hybrid"), ("two axes", "two axes"), ("shard", "four")]


@each(transform=TRANSFORMS)
@pytest.mark.parametrize(
    ("strategy", "kind"), [*(pytest.param(*k, marks=seldom) if k[0] == "compile" else k for k in KINDS), *FOUR]
)
@real_ranks(lambda strategy, kind: 4 if (strategy, kind) in FOUR else 2)
def test_real_ranks(rank: int, strategy: str, kind: str, transform: str) -> None:
    """Every strategy, tied parameters and a unit for all: the gradient of the mean loss of the model with casts by hand.

    On four ranks HSDP, slices over two axes, gathered one after the other, and slices that lie on all of them.
    """
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # in Dynamo
    warnings.filterwarnings("ignore", "module .* runs without compilation")
    model = make_model(tied=kind == "tied")
    ours, theirs = TRANSFORMS[transform]
    spec = units(STRATEGIES[strategy], tree=kind != "whole")(model).on(meshes(kind))
    got = gradients(model, spec, make_batch(rank), ours)  # first: torch 2.13 leaves its tensors in a tied parameter
    assert_close(got, mean_over_ranks(theirs, model, F32, full_of(model), dist.get_world_size()))


# --- bit for bit, in two bytes and four ---
@pytest.mark.parametrize("reshard", [True, False])
@real_ranks(2)
def test_bit_for_bit(rank: int, reshard: bool) -> None:
    """Nothing that is kept is rounded, on its way there and back, and the rest is rounded once."""
    model = make_model(F32)
    spec = units(P("shard", reshard=reshard, precision=LOW))(model).on(meshes())
    expected = mean_over_ranks(torch.func.grad, model, BF16, full_of(model), dist.get_world_size())
    for name, grad in gradients(model, spec, make_batch(rank, F32)).items():
        assert torch.equal(grad, expected[name]), name


Reads = module_class(
    "Reads",
    lambda sizes: {"params": nn.ParameterList(torch.randn(n) for n in sizes)},
    lambda self: [p.clone() for p in self.params],
)
"""Returns its own parameters."""


@real_ranks(2)
def test_all_values_arrive(rank: int) -> None:
    """Every size and every place of what is kept, and dtypes of one, two, four and eight bytes."""
    generator = random.Random(0)
    for low, kept in ((BF16, F32), (F32, F64), (torch.float16, BF16), (F64, BF16), (torch.float8_e4m3fn, F32)):
        for _ in range(4):
            torch.manual_seed(generator.randrange(1000))
            sizes = [generator.choice([0, 1, 3, 8, 17, 40]) for _ in range(6)] + [1]
            model = Reads(sizes).double()
            names = generator.sample([f"params.{i}" for i in range(7)], generator.randrange(1, 7))
            precision = Precision(param=low, cast_inputs=False, keep=dict.fromkeys(names, kept))
            spec, shards = shards_of(fs.policies.whole(P("shard", align=8, precision=precision)), model, meshes())
            call = functools.partial(fs.functional_call, model, spec=spec)
            scheduled = call(shards, ())
            data_flow, _ = torch.func.jvp(lambda p, call=call: call(p, ()), (shards,), (shards,))
            for found in (scheduled, data_flow):
                for i, (got, p) in enumerate(zip(found, model.params, strict=True)):
                    expected = p.detach().to(kept if f"params.{i}" in names else low)
                    assert got.dtype == expected.dtype
                    assert torch.equal(got.double(), expected.double()), (sizes, names, i)


# --- simulated ranks ---
@pytest.mark.parametrize("sizes", [{"shard": 1}, {"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("transform", mark_seldom(["torch.func.grad", "hvp", "penalty"], "torch.func.grad", "penalty"))
def test_simulated_ranks(sizes: dict[str, int], transform: str) -> None:
    """The same."""
    model, ranks, (ours, theirs) = make_model(tied=True), torch.Size(sizes.values()).numel(), TRANSFORMS[transform]
    spec = units(P("shard", precision=KEEP))(model)
    run = fs.testing.spmd(lambda mesh, x: gradients(model, spec.on(mesh), x, ours), sizes)
    grads = run(torch.stack([make_batch(i) for i in range(ranks)]))
    expected = mean_over_ranks(theirs, model, F32, full_of(model), ranks)
    for rank in range(ranks):
        assert_close({name: grad[rank] for name, grad in grads.items()}, expected)


# --- what a step has beside its gradient ---
OPTIONS: dict[str, Callable[..., fs.Params]] = {
    "accumulate shards": lambda loss, shards, x, spec: fs.accumulate(loss, shards, x.split(2), spec=spec, reduce=2.0)[0],
    "accumulate full": lambda loss, shards, x, spec: fs.accumulate(
        loss, shards, x.split(2), spec=spec, keep="full", reduce=2.0
    )[0],
    "vmap": lambda loss, shards, x, spec: {
        key: grads[0]
        for key, grads in torch.vmap(torch.func.grad(loss), (0, None))({k: p[None] for k, p in shards.items()}, x).items()
    },
    "update_in_backward": lambda loss, shards, x, spec: subtracted(loss, shards, [x], spec)[0],
    "per_sample_grads": lambda loss, shards, x, spec: fs.per_sample_grads(
        lambda p, x: loss(p, x[None]), shards, (x,), spec=spec, clip=1e6, reduce=2.0
    ),
    "torch.compile": lambda loss, shards, x, spec: torch.compile(fs.grad(loss), fullgraph=True, backend="aot_eager")(shards, x),
}
"""Gradients of the sum over micro-batches or samples, of an ensemble of one, and of a compiled step."""


@pytest.mark.parametrize("name", mark_seldom(OPTIONS, "accumulate shards", "accumulate full", "vmap"))
@real_ranks(2)
def test_options_of_a_step(rank: int, name: str) -> None:
    """Each beside the gradient on one rank without shards."""
    torch._dynamo.reset()
    model = make_model()
    spec, full = units(P("shard", precision=KEEP))(model).on(meshes()), full_of(model)
    loss = lambda params, x: loss_of(model, spec, x, of=objective)(params)  # noqa: E731
    grads = OPTIONS[name](loss, fs.shard(full, spec), make_batch(rank), spec)
    assert_close(fs.unshard(grads, spec), mean_over_ranks(torch.func.grad, model, F32, full, 2))


# --- what is sent, and planned ---
@at_most(3)
@pytest.mark.parametrize("axes", [("shard",), ("replicate", "shard")], ids=["one axis", "two axes"])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_one_gather_and_one_reduction_of_a_unit(size: int, axes: tuple[str, ...]) -> None:
    """The bytes of the longest slice times the ranks, and what `plan` says."""
    net = nn.Sequential(*(Block(40) for _ in range(3)))
    precision = Precision(param=BF16, reduce=F32, keep={"*norm.weight": F32})
    with world(2 * size if len(axes) == 2 else size, rank=0):
        mesh, p = mesh_of(size) if len(axes) == 1 else mesh_of(2, size), P("shard", precision=precision)
        (spec, params), sent = shards_of(fs.by_type(Block, p=p), net, mesh), Collectives()

        with sent:
            fs.grad(loss_of(net, spec, torch.ones(2, 40), of=lambda out: out.float().sum(), then=sent.turn))(params)
        planned = {(one.axis, one.op): (one.count, one.input_bytes) for one in fs.plan(spec).traffic}
    if size == 1:
        assert [one.op for one in sent.all] == (["all_reduce"] * bool(len(axes) == 2))
        return
    slices = {key: slice_bytes(spec.by_key[key], spec.shard_numel(spec.by_key[key]), size) for key in ("0", "1", "2")}
    gathered = [Sent("all_gather", longest, longest, size) for longest in map(max, slices.values())]
    assert sent.forward == gathered
    assert [one for one in sent.backward if one.op == "all_gather"] == gathered[:2]  # the last one is there
    assert [one.op for one in sent.backward].count("reduce_scatter") == 3
    assert [one.op for one in sent.backward].count("all_reduce") == 3 * (len(axes) - 1)
    low = sum(param.numel for unit in spec for param in unit.params if "norm" not in param.name)
    kept = sum(param.numel for unit in spec for param in unit.params if "norm" in param.name)
    assert low * 2 + kept * 4 <= sum(map(sum, slices.values())) <= sum(max(some) * size for some in slices.values())
    assert planned["shard", "all_gather"] == (5, sum(one.bytes for one in (*gathered, *gathered[:2])))


def slice_bytes(unit: fs.Unit, length: int, slices: int) -> list[int]:
    """The bytes of each slice, element by element."""
    sizes = [4 if param is not None and "norm" in param.name else 2 for size, param in unit.parts for _ in range(size)]
    for i, (size, param) in enumerate(unit.parts):  # padding is sent like what is before it
        if param is None and "norm" in (unit.parts[i - 1][1] or unit.params[0]).name:
            begin = sum(size for size, _ in unit.parts[:i])
            sizes[begin : begin + size] = [4] * size
    sizes += [sizes[-1]] * (length * slices - len(sizes))
    return [sum(sizes[i * length : (i + 1) * length]) for i in range(slices)]


Choice = module_class(
    "Choice", lambda: {"blocks": nn.ModuleList(Block() for _ in range(2))}, lambda self, x, i: self.blocks[i](x)
)


@real_ranks(2)
def test_ranks_that_run_other_units(rank: int) -> None:
    """The tags of slices travel beside bytes, too."""
    group: Any = dist.new_group()  # after the error its ranks may have started other collectives
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = Choice()
    precision = Precision(param=BF16, reduce=F32, keep={"*norm.weight": F32})
    with pytest.raises(RuntimeError) as error:
        gradient_of(fs.by_type(Block, p=P("shard", precision=precision)), model, torch.ones(1, 5), rank, mesh=mesh)
    assert all(f"'blocks.{i}'" in str(error.value) for i in range(2))


# --- what is wrong ---
def test_values() -> None:
    keep = {"*norm*": F32}
    precision = Precision(param=BF16, keep=keep)
    assert repr(precision) == "Precision(param=torch.bfloat16, keep={'*norm*': torch.float32})"
    assert eval(repr(precision), {"Precision": Precision, "torch": torch}) == precision
    assert hash(precision) == hash(Precision(param=BF16, keep=tuple(keep.items())))
    assert pickle.loads(pickle.dumps(precision)) == precision != Precision(param=BF16)
    assert Precision(keep={}) == Precision()


def on_blocks(precision: Precision, **options: Any) -> Callable[[], Any]:
    return lambda: fs.by_type(Block, p=P("shard", precision=precision, **options))(make_model(F32).requires_grad_(not options))


AT_REST = r"unit 'blocks\.0' is at rest in int8.*'blocks\.0\.norm\.weight'.*a unit of its own"
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "text": (lambda: Precision(keep="*norm*"), TypeError, "^Precision: keep: expected a dict such as"),
    "no floating dtype": (
        lambda: Precision(keep={"*norm*": torch.int32}), TypeError,
        r"^Precision: keep: '\*norm\*': expected a floating point dtype, got torch.int32"),
    "codec": (
        lambda: Precision(codec=fs.codecs.int8(), keep={"*": F32}), ValueError,
        "expected keep or codec, got both.*unit of their own"),
    "at rest": (on_blocks(LOW, at_rest=fs.codecs.int8()), ValueError, AT_REST),
    "nothing": (on_blocks(Precision(keep={"*router*": F32})), ValueError, r"'\*router\*' matches no floating point parameter"),
    "of other units": (
        lambda: fs.by_path({"blocks.*": P("shard", precision=LOW)})(make_model(F32)), ValueError,
        r"keep: 'head\.\*' matches no floating point parameter of the units with"),
    "two": (
        on_blocks(Precision(keep={"*norm*": F32, "blocks.0.*": F64})), ValueError,
        r"parameter 'blocks\.0\.norm\.weight': Precision\(keep=.*expected one dtype"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_keep_may_not_be(what: str) -> None:
    """Globs that match nothing, whatever they match in units of another precision, or disagree, among it."""
    call, error, words = WRONG[what]
    refused(error, words, call)


class Writes(Norm):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_write_into_the_bytes_is_seen() -> None:
    model = nn.Sequential(OrderedDict(up=nn.Linear(3, 3), norm=Writes(3)))
    precision = Precision(param=BF16, keep={"norm.weight": F32})
    spec = fs.policies.whole(P("shard", precision=precision))(model).on({"shard": 1})
    with fs.check(), pytest.raises(RuntimeError, match=r"parameter 'norm\.weight' of unit '' was changed in place in forward"):
        fs.grad(lambda p: fs.functional_call(model, p, (torch.ones(1, 3),), spec=spec).sum())(fs.shard(model, spec))


def test_parameters_between_two_elements() -> None:
    """With ``align=1`` parameters lie end to end, and one of four bytes may begin after three of two: the spec is refused."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False))
    p = P("shard", align=1, precision=Precision(param=BF16, cast_inputs=False, keep={"1.*": F32}))
    words = r"unit '': parameter '1\.weight' of torch\.float32 would begin at byte 6.* expected P\(align=4\)"
    refused(ValueError, words, lambda: fs.policies.whole(p)(model))
    fs.policies.whole(dataclasses.replace(p, align=4))(model)
    fs.policies.whole(p)(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False)))  # which lie on even ones
    # the spec speaks of the model's dtype; shards of another one are refused by the call
    spec = fs.policies.whole(P("shard", align=1, precision=Precision(cast_inputs=False, keep={"1.*": F32})))(model)
    shards = {key: shard.to(BF16) for key, shard in fs.shard(model, spec).items()}
    refused(ValueError, words[10:], lambda: fs.functional_call(model, shards, (torch.ones(1, 3, dtype=BF16),), spec=spec))


def test_a_unit_that_is_kept_as_a_whole_has_one_dtype() -> None:
    model = make_model(F32)
    p = P("shard", precision=Precision(param=BF16, keep={"*norm.weight": F32}))
    spec = fs.by_path({"blocks.0": p, "blocks.0.norm": p})(model).on({"shard": 1})
    assert [unit.param_dtypes for unit in spec] == [(), (), (F32,)]
    reads = fs.policies.whole(P("shard", precision=Precision(param=BF16, keep={"*": F64})))(Reads([3])).on({"shard": 1})
    assert fs.functional_call(Reads([3]), {"": torch.ones(8)}, (), spec=reads)[0].dtype == F64


# --- local units: pieces along an axis in several dtypes, beside the whole model with the same casts ---
WIDTH, HIDDEN, TOKENS = 5, 12, 12


class Parallel(nn.Module):
    """Columns, a gain for each of them, and rows over an axis; the gain of the input is on every rank.

    Parameters of which those in ``kept`` are in float64 where they are used, and the others in float32.
    """

    kept: tuple[str, ...] = ()

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.linspace(0.7, 1.3, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // size), nn.Linear(HIDDEN // size, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.6, 1.4, HIDDEN // size))

    def forward(self, x: Tensor, axis: Axis | None) -> Tensor:
        for name, p in self.named_parameters():
            assert p.dtype == (F64 if name in self.kept else F32), name
        h = (F.layer_norm(x.to(self.norm.dtype), (WIDTH,)) * self.norm).to(self.up.weight.dtype)
        h = F.linear(h, self.up.weight) + self.up.bias
        y = self.down((h.tanh() * self.gain).to(self.down.weight.dtype))
        return x + (fs.collectives.all_reduce(y, axis, reduce="sum") if axis else y).to(x.dtype)


KEPT = {"columns": ("gain", "norm"), "rows": ("down.weight", "up.bias")}
"""Which parameters are kept in float64."""
OF_LOCAL = strategies("shard", "keep", "remat", "replicated")


class Chain(nn.Module):
    def __init__(self, name: str, size: int = 1) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Parallel(size) for _ in range(2)), nn.Linear(WIDTH, 3)
        for one in self.layers:
            one.kept = KEPT[name]
        self.double()

    def forward(self, x: Tensor, axis: Axis | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, axis)
        return self.head(x.double())


ON_MESHES: list[tuple[str, dict[str, int]]] = [
    ("columns", {"shard": 2, "tensor": 2}),
    ("columns", {"tensor": 2, "shard": 2}),
    ("rows", {"replicate": 2, "tensor": 2, "shard": 1}),
]


@at_most(2)
@every(transform=mark_seldom(TRANSFORMS, "fs.grad", "hvp"), strategy=mark_seldom(OF_LOCAL, "shard"))
@pytest.mark.parametrize(("name", "sizes"), ON_MESHES, ids=str)
@real_ranks(4)
def test_local_units(rank: int, name: str, sizes: dict[str, int], strategy: str, transform: str) -> None:
    """A rank's side of a model of pieces: the mean over ranks, on the whole model, with each parameter cast by hand."""
    kept, (ours, theirs), p = KEPT[name], TRANSFORMS[transform], OF_LOCAL[strategy]
    whole, model = Chain(name), Chain(name, sizes["tensor"])
    full = {name: 0.9 * param.detach() for name, param in whole.named_parameters()}
    precision = Precision(param=F32, reduce=F64, keep={f"layers.*.{name}": F64 for name in kept})
    inner = dataclasses.replace(p, precision=precision, local={"tensor": {"*.up.*": 0, "*.gain": 0, "*.down.weight": 1}})
    spec = fs.by_path({"": p, "layers.*": inner})(model).on(mesh_of(**sizes))
    xs = torch.randn(*(1 if name == "tensor" else size for name, size in sizes.items()), TOKENS, WIDTH, dtype=F64)
    xs = xs.expand(*sizes.values(), TOKENS, WIDTH).reshape(-1, TOKENS, WIDTH).to(F32)  # "tensor" shares them

    def loss(full: Mapping[str, Tensor], x: Tensor) -> Tensor:
        low = {name for name in full if name.startswith("layers") and name.split(".", 2)[2] not in kept}
        cast = {name: param.to(F32) if name in low else param for name, param in full.items()}
        return objective(torch.func.functional_call(whole, cast, (x,)))

    found = [theirs(lambda full, x=x: loss(full, x))(full) for x in xs]
    expected = {name: torch.stack([tree[name] for tree in found]).mean(0) for name in full}
    got = ours(loss_of(model, spec, xs[rank], spec.axis("tensor"), of=objective))(fs.shard(full, spec))
    assert_close(fs.unshard(got, spec), expected)
