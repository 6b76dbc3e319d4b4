"""``Precision(reduce_codec=...)``: gradients that are sent encoded during backward, and added up in float32."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import same
from collective_log import Collectives, world
from depth import at_most, every, mark_seldom, seldom
from models import module_class, refused
from parity import HIGHER, WAYS, numbers, shards_of
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import Codec, P, Precision, codecs
from funshard._wire.stages import GatherEncodedBack, Names

BF16, F32 = torch.bfloat16, torch.float32


def read_on_host(x: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder of a codec that torch.vmap cannot run."""
    scale = float(x.abs().max()) / 127 or 1.0
    return (x / scale).round().to(torch.int8), torch.tensor(scale)


IDENTITY = Codec(lambda x: (x,), lambda x: x, name="identity")
CODECS = {
    "bf16": codecs.cast(BF16),
    "fp16": codecs.cast(torch.float16),
    "int8": codecs.int8(),
    "dynamic8": codecs.dynamic8(block=64),
    "by slice": Codec(read_on_host, lambda x, scale: x.float() * scale, name="by slice"),
}
STRATEGIES = {
    "shard": P("shard"),
    "reshard=False": P("shard", reshard=False),
    "remat": P("shard", remat=True),
    "offload": P("shard", offload={"activations", "params"}),
    "compile": P("shard", compile=fs.Compile(backend="aot_eager")),
    "keep": P("shard", precision=Precision(param=BF16, keep={"*down*": F32})),
    "codec": P("shard", precision=Precision(param=BF16, codec=codecs.int8())),
}


Block = module_class(
    "Block",
    lambda: {"up": nn.Linear(9, 12), "down": nn.Linear(12, 9)},
    lambda self, x: x + self.down(torch.tanh(self.up(x)).to(self.down.weight.dtype)),  # which may be kept in another
)


def make_model(dtype: torch.dtype = F32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).to(dtype)


def with_codec(p: P, codec: Codec | None, **options: Any) -> P:
    """A P with this codec and a sum in float32."""
    precision = dataclasses.replace(p.precision or Precision(), reduce=F32, reduce_codec=codec)
    return dataclasses.replace(p, align=64, precision=precision, **options)


def make_batch(rank: int) -> Tensor:
    return numbers(rank, 0, 9).float()


def sharded_loss(model: nn.Module, spec: fs.PartitionSpec, x: Tensor, **options: Any) -> Callable[[fs.Params], Tensor]:
    return lambda params: fs.functional_call(model, params, (x,), spec=spec, **options).float().square().mean()


def encoded_mean(model: nn.Module, spec: fs.PartitionSpec, codec: Codec, batches: list[Tensor], slices: int) -> fs.Params:
    """The gradients by unit as whole buffers: each rank's slices encoded and decoded by hand, and added in float32."""
    full = {name: p.detach() for name, p in model.named_parameters()}
    total: fs.Params = {}
    for x in batches:
        grads = torch.func.grad(lambda p, x=x: torch.func.functional_call(model, p, (x,)).square().mean())(full)
        for key, buffer in fs.flatten(grads, spec).items():
            decoded = torch.cat([codec.decode(*codec.encode(piece)) for piece in buffer.chunk(slices)]).float()
            total[key] = total[key] + decoded if key in total else decoded
    return {key: x / len(batches) for key, x in total.items()}


# --- values ---
@every(way=mark_seldom(WAYS, "fs"), strategy=mark_seldom(STRATEGIES, "shard", "remat", "offload"))
@real_ranks(2)
def test_identity_changes_no_bit(rank: int, strategy: str, way: str) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # in Dynamo
    warnings.simplefilter("ignore", fs._call.compiled_unit.CompileWarning)  # in torch.func the module runs as it is
    model, mesh = make_model(), mesh_of(2)
    found = []
    for codec in (None, IDENTITY):
        spec = fs.by_type(Block, p=with_codec(STRATEGIES[strategy], codec))(model).on(mesh)
        found.append(WAYS[way](sharded_loss(model, spec, make_batch(rank)))(fs.shard(model, spec)))
    (expected, value), (grads, same_value) = found
    assert torch.equal(value, same_value)
    assert all(grad.any() for grad in grads.values())
    same(grads, expected)


OF_RANKS = [pytest.param(sizes, name, marks=[seldom] * (name != "int8")) for sizes in ((4,), (2, 2)) for name in CODECS]


@pytest.mark.parametrize(("sizes", "codec"), [*(((2,), name) for name in CODECS), *OF_RANKS])
@every(way=mark_seldom(WAYS, "fs"))
@real_ranks(lambda sizes: math.prod(sizes))
def test_values_by_hand(rank: int, sizes: tuple[int, ...], codec: str, way: str) -> None:
    """Each rank's slices encoded and decoded by hand, and added in float32; by FSDP and HSDP."""
    model, of = make_model(), CODECS[codec]
    spec = fs.by_type(Block, p=with_codec(P("shard"), of))(model).on(mesh_of(*sizes))
    grads = WAYS[way](sharded_loss(model, spec, make_batch(rank)))(fs.shard(model, spec))[0]
    expected = encoded_mean(model, spec, of, [make_batch(i) for i in range(math.prod(sizes))], sizes[-1])
    for key, grad in grads.items():
        assert_close(grad, expected[key].chunk(sizes[-1])[rank % sizes[-1]], rtol=1e-6, atol=1e-9)


@at_most(3)
@pytest.mark.parametrize("by", [fs.grad, torch.func.grad], ids=["fs", "torch.func"])
@pytest.mark.parametrize("sizes", [{"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 7}], ids=["FSDP", "HSDP", "seven"])
def test_values_on_simulated_ranks(sizes: dict[str, int], by: Callable[..., Any]) -> None:
    """Of seven ranks two slices are decoded together, and the last one by itself."""
    model, codec = make_model(), CODECS["int8"]
    batches = [make_batch(i) for i in range(math.prod(sizes.values()))]

    def run(mesh: Any, x: Tensor) -> fs.Params:
        spec = fs.by_type(Block, p=with_codec(P("shard"), codec))(model).on(mesh)
        return by(sharded_loss(model, spec, x))(fs.shard(model, spec))

    shape = tuple(sizes.values())
    got = fs.testing.spmd(run, sizes)(torch.stack(batches))
    spec = fs.by_type(Block, p=with_codec(P("shard"), codec))(model).on(sizes)
    for key, whole in encoded_mean(model, spec, codec, batches, shape[-1]).items():
        assert_close(got[key].view(-1, len(whole))[0], whole, rtol=1e-5, atol=1e-8)


def test_the_sum_is_wide() -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16."""
    model = nn.Linear(1, 1, bias=False)

    def run(precision: Precision) -> Tensor:
        def one(mesh: Any, x: Tensor) -> fs.Params:
            spec = fs.policies.whole(P("shard", precision=precision))(model).on(mesh)
            grads = fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec, reduce="sum").sum())(fs.shard(model, spec))
            return fs.unshard(grads, spec)

        return fs.testing.spmd(one, 4)(torch.tensor([256.0, 1.0, 1.0, 1.0]).view(4, 1))["weight"][0]

    assert run(Precision(reduce_codec=codecs.cast(BF16))).item() == 259
    assert run(Precision(reduce=BF16)).item() != 259


# --- steps and transforms ---
@every(codec=mark_seldom(CODECS, "int8"), transform=mark_seldom(["hvp", "grad of grad", "jvp of grad"], "hvp"))
@real_ranks(2)
def test_rounding_is_straight_through(rank: int, transform: str, codec: str) -> None:
    """On real ranks and on simulated ones, where the codec runs under torch.vmap."""
    model = make_model()

    def run(mesh: Any, x: Tensor, codec: Codec | None = CODECS[codec]) -> fs.Params:
        spec = fs.by_type(Block, p=with_codec(P("shard"), codec))(model).on(mesh)
        return fs.unshard(HIGHER[transform](sharded_loss(model, spec, x))(fs.shard(model, spec)), spec)

    exact, kept, rounded = (run(mesh_of(2), make_batch(rank), *other) for other in ((None,), (IDENTITY,), ()))
    batched = codec != "by slice"
    simulated = fs.testing.spmd(run, 2)(torch.stack([make_batch(0), make_batch(1)])) if batched else {}
    same(kept, exact)
    for name, x in exact.items():
        assert (rounded[name] - x).norm() < 0.02 * x.norm()
        assert not torch.equal(rounded[name], x)
        if batched:  # a level more or less, where sums differ by a bit
            assert (simulated[name][0] - rounded[name]).norm() < 0.02 * x.norm()


@real_ranks(2)
def test_batched_reductions(rank: int) -> None:
    """Jacobians, whose reductions are batched: each row as a gradient of its own."""
    model = make_model()
    spec = fs.by_type(Block, p=with_codec(P("shard"), CODECS["int8"]))(model).on(mesh_of(2))
    params, x = fs.shard(model, spec), make_batch(rank)
    losses = lambda p: fs.functional_call(model, p, (x,), spec=spec).square().mean(0)[:3]  # noqa: E731
    rows = torch.func.jacrev(losses)(params)
    for i in range(3):
        for key, grad in torch.func.grad(lambda p, i=i: losses(p)[i])(params).items():
            assert_close(rows[key][i], grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("codec", mark_seldom(CODECS, "bf16"))
@real_ranks(2)
def test_steps(rank: int, codec: str) -> None:
    """Accumulation, updates in backward and gradients of full parameters, beside a backward alone."""
    model, mesh = make_model(), mesh_of(2)
    (spec, params), x = shards_of(fs.by_type(Block, p=with_codec(P("shard"), CODECS[codec])), model, mesh), make_batch(rank)
    expected = fs.grad(sharded_loss(model, spec, x))(params)

    by_batch = lambda p, x: sharded_loss(model, spec, x)(p)  # noqa: E731
    accumulated = {keep: fs.accumulate(by_batch, params, [x, x], spec=spec, keep=keep)[0] for keep in ("shards", "full")}
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
    updated = fs.update_in_backward(update, by_batch, params, init(params), [x], spec=spec)
    own = fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).square().mean())(fs.unshard(params, spec))
    reduced = fs.reduce_grads(own, spec)
    for key, grad in expected.items():
        assert torch.equal(reduced[key], grad)
        assert_close(accumulated["full"][key], grad)
        assert_close(accumulated["shards"][key], grad)
        assert torch.equal(updated.params[key], params[key] - grad)


# --- what is sent ---
def record(p: P, size: int = 8) -> Collectives:
    with world(size):
        model = make_model()
        spec = fs.by_type(Block, p=p)(model).on(mesh_of(size))
        params = {k: x.requires_grad_() for k, x in fs.shard(model, spec).items()}
        with Collectives() as log:
            value = sharded_loss(model, spec, make_batch(0))(params)
            log.turn()
            value.backward()
    return log


def test_bytes_and_overlap() -> None:
    """A unit's reduction is one all-to-all of its codes and scales, and starts before the next gather ends."""
    with world(8):
        spec = fs.by_type(Block, p=with_codec(P("shard"), None))(make_model()).on(mesh_of(8))
        numel = spec.shard_numel(spec.by_key["0"])
    assert numel % 64 == 0
    up = lambda x: -(-x // 16) * 16  # noqa: E731
    for name, size in {"int8": numel + up(numel // 64 * 4), "bf16": 2 * numel}.items():
        sent = record(with_codec(P("shard"), CODECS[name])).backward
        exchanges = [x for x in sent if x.op != "all_gather"]
        assert {(x.op, x.bytes, x.ranks) for x in exchanges} == {("all_to_all_single", 8 * size, 8)}
        assert len(exchanges) == 3
        assert [x.op for x in sent].index("all_to_all_single") < len(sent) - 3


class Largest(TorchDispatchMode):
    """The elements of the largest float32 tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        wide = (x.numel() for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.dtype == F32)
        self.numel = max([self.numel, *wide])
        return out


@every(codec=CODECS, ranks=[2, 8])
def test_slices_are_decoded_a_few_at_a_time(ranks: int, codec: str) -> None:
    """Those of eight ranks at once would be a float32 buffer as large as the unit."""
    with world(ranks):
        options = {"codec": CODECS[codec], "numel": 640, "dtype": F32}
        stage = GatherEncodedBack.on_axis("shard", fs.collectives.Mesh.of(mesh_of(ranks)), "mean", **options)
        pending = stage.start_transpose(Names("", ""))(stage.transpose_(torch.ones(640 * ranks)), None)
        with Largest() as largest:
            assert pending().shape == (640,)
    assert largest.numel <= 640 * max(1, ranks // 4)


def test_one_rank_sends_and_rounds_nothing() -> None:
    model = make_model()
    found = []
    for codec in (None, CODECS["int8"]):
        spec = fs.by_type(Block, p=with_codec(P("shard"), codec))(model).on({"shard": 1})
        found.append(fs.grad(sharded_loss(model, spec, make_batch(0)))(fs.shard(model, spec)))
    same(*found)


@at_most(1)
@pytest.mark.parametrize("checked", [False, True])
@real_ranks(2)
def test_ranks_with_other_codecs_get_an_error(rank: int, checked: bool) -> None:
    """Two codecs with as many bytes, in specs with equal shards."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)])
    codec = codecs.cast(torch.float16 if rank else BF16)
    mesh, p = mesh_of(2), with_codec(P("shard"), codecs.cast(BF16))
    first, spec = (fs.by_type(nn.Linear, p=one)(model).on(mesh) for one in (p, with_codec(P("shard"), codec)))
    params = fs.shard(model, first)
    match = ("ranks disagree on collective" if checked else "ranks ran different units") + "(?s:.*)encoded by"
    with pytest.raises(RuntimeError, match=match), fs.check() if checked else contextlib.nullcontext():
        fs.grad(sharded_loss(model, spec, torch.ones(2, 64)))(params)


# --- what is refused ---
@pytest.mark.parametrize(
    ("p", "words"),
    [
        (P(align=64), "unit '0' is replicated"),
        (P(("replicate", "shard"), align=64), "unit '0' is split over 2 axes"),
        (P("shard", align=32), r"unit '0'.*blocks of 64.*P\(align=64\)"),
    ],
    ids=["replicated", "two axes", "align"],
)
def test_refused_units(p: P, words: str) -> None:
    p = dataclasses.replace(p, precision=Precision(reduce_codec=codecs.int8()))
    refused(ValueError, words, lambda: fs.by_type(Block, p=p)(make_model()))
    frozen = fs.by_type(Block, p=p)(make_model().requires_grad_(False))  # which has no gradients to reduce
    assert frozen.by_key["0"].p == p


def test_refused_precisions() -> None:
    with pytest.raises(ValueError, match=r"added in reduce: expected float32, float64 or None, got torch.bfloat16"):
        Precision(reduce=BF16, reduce_codec=codecs.int8())
    refused(TypeError, "expected a Codec", lambda: Precision(reduce_codec=BF16))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"codecs.cast: expected a floating point dtype of at least 16 bits, got torch.int8"):
        codecs.cast(torch.int8)
    assert Precision(param=BF16, reduce_codec=codecs.int8())._resolve(BF16) == (BF16, F32)


@at_most(1)
@pytest.mark.parametrize("transform", [lambda loss: loss, fs.grad, torch.func.grad], ids=["forward", "fs", "torch.func"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_steps_are_refused(fullgraph: bool, transform: Callable[..., Any]) -> None:
    """Also after a graph break, where Dynamo goes on with the frames inside, and failed on one of them."""
    model, x = make_model(), make_batch(0)
    spec, params = shards_of(fs.by_type(Block, p=with_codec(P("shard"), CODECS["int8"])), model)
    for compiler in (fs.compile, torch.compile):
        step = compiler(transform(sharded_loss(model, spec, x)), backend="aot_eager", fullgraph=fullgraph)
        refused(Exception, r"Precision\(reduce_codec=\) in a step that is compiled whole", lambda: step(params))
    torch._dynamo.reset()  # which runs the frames that failed without compilation from then on, torch.func.grad's among them
