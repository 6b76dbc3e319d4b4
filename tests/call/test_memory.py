"""The memory law: which gathered buffers are alive at every moment of a step, watched by their storages."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from collective_log import Collectives, Sent, gather, scatter, world
from depth import each, mark_seldom, pairs
from hypothesis import given
from hypothesis import strategies as st
from kernels import Kernels
from models import module_class, refused
from parity import WAYS, leaves_of, loss_of, numbers, shards_of, strategies
from peer_models import Net, chain
from ranks import mesh_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import Codec, P, Precision, _torch


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What must go, goes without the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Held:
    """The storages of the tensors that it was called with. One to be asked by recomputed functions is a global of theirs."""

    refs: tuple[weakref.ref[Any], ...] = ()

    def __call__(self, *tensors: Tensor) -> Tensor:
        self.refs += tuple(weakref.ref(_torch.unwrap(tensor).untyped_storage()) for tensor in tensors)
        return tensors[0]

    def alive(self) -> int:
        return len({id(ref()) for ref in self.refs if ref() is not None})


class Alive(TorchDispatchMode):
    """Elements of gathered and of unreduced buffers that are alive after each op."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[tuple[weakref.ref[Any], int]] = []
        self.unreduced: list[tuple[weakref.ref[Any], int]] = []
        self.peak = self.peak_unreduced = 0

    def now(self) -> list[int]:
        """The sizes of the gathered buffers that are alive, each once: one may be gathered into again."""
        return list({ref: numel for ref, numel in self.gathered if ref() is not None}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("_c10d_functional::all_gather_into_tensor"):
            self.gathered.append((weakref.ref(out.untyped_storage()), out.numel()))
        if name == "_c10d_functional::reduce_scatter_tensor":
            self.unreduced.append((weakref.ref(args[0].untyped_storage()), args[0].numel()))
        self.peak = max(self.peak, sum(self.now()))
        unreduced = {ref: numel for ref, numel in self.unreduced if ref() is not None}
        self.peak_unreduced = max(self.peak_unreduced, sum(unreduced.values()))
        return out


class Peak(TorchDispatchMode):
    """The most bytes that tensors made here on the CPU hold at once, and the bytes of each storage, in their order.

    But for those in the memory of ``known`` ones.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.bytes = 0
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata in self.known:
                    continue
                if storage._cdata not in self.alive or self.alive[storage._cdata][0]() is None:
                    self.made.append(storage.nbytes())
                self.alive[storage._cdata] = weakref.ref(storage), storage.nbytes()
        self.alive = {key: held for key, held in self.alive.items() if held[0]() is not None}
        self.bytes = max(self.bytes, sum(nbytes for _, nbytes in self.alive.values()))
        return out


@contextlib.contextmanager
def net_of(blocks: int, **options: bool) -> Iterator[tuple[Net, fs.PartitionSpec]]:
    """A model with a unit for each block, on the first of four ranks."""
    with world(4):
        model = Net(blocks)
        yield model, fs.by_path({"blocks.*": P("shard", **options)})(model).bound


def watched(model: nn.Module, spec: fs.PartitionSpec, way: str, **options: int) -> tuple[Alive, list[int], int, int]:
    """The watcher, what is alive when forward has ended, and the peaks of forward and of backward."""
    at_turn: list[int] = []
    with no_collector(), Alive() as alive:

        def turn() -> None:
            at_turn.extend([*alive.now(), alive.peak])
            alive.peak = sum(alive.now())

        WAYS[way](loss_of(model, spec, numbers(0, 0), then=turn, **options))(fs.shard(model, spec))
    return alive, at_turn[:-1], at_turn[-1], alive.peak


@pytest.mark.parametrize("way", mark_seldom(sorted(WAYS), "fs", "backward"))
def test_units_are_freed_between_forward_and_backward(way: str) -> None:
    """Root, one block and the next; after forward the root and the last block; after backward nothing.

    Also where a block is read before it runs, as by torch.nn.utils.weight_norm. With P(reshard=False) gathered once, all alive
    after forward, none after backward.
    """
    with net_of(5) as (model, spec):
        root, block = (spec.padded_numel(spec.by_key[key]) for key in ("", "blocks.0"))
        alive, after_forward, forward_peak, backward_peak = watched(model, spec, way)
        assert forward_peak == root + 2 * block
        assert after_forward == [root, block]
        # As before, and the gradient of the block before that is being reduced, in a buffer that held a block.
        assert backward_peak <= root + 3 * block
        assert alive.peak_unreduced <= 2 * block
        assert alive.now() == []
        for one in model.blocks:
            one.register_forward_pre_hook(lambda one, _: [*map(torch.numel, one.parameters())][:0] or None)
        assert watched(model, spec, way)[1:3] == (after_forward, forward_peak)
    with net_of(3, reshard=False) as (model, spec):
        alive, after_forward, _, _ = watched(model, spec, way)
        assert len(alive.gathered) == 4
        assert len(after_forward) == 4
        assert alive.now() == []


Curved = module_class(
    "Curved", lambda width: {"inner": nn.Linear(width, width, dtype=torch.float64)}, lambda self, x: torch.tanh(self.inner(x))
)


@pytest.mark.parametrize("blocks", [4, 8])
def test_a_double_backward_holds_no_more(blocks: int) -> None:
    """In both backwards three units at most, however many there are: the second goes over them forth and back."""
    with world(4):
        model = nn.Sequential(*[Curved(5) for _ in range(blocks)])
        spec, params = shards_of(fs.by_path({"*": fs.P("shard")}), model)
        unit, params = spec.padded_numel(spec.by_key["0"]), leaves_of(params)
        with no_collector(), Alive() as alive:
            value = loss_of(model, spec, numbers(0, 0))(params)
            grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
            assert alive.peak <= 3 * unit
            alive.peak = 0
            torch.autograd.grad(sum((g**2).sum() for g in grads), list(params.values()))
            assert 0 < alive.peak <= 3 * unit
            del value, grads
            assert alive.now() == []


@pytest.mark.parametrize("retain", [False, True])
def test_frozen_units_are_bounded_in_backward(retain: bool) -> None:
    """A frozen unit goes with the last op that saved it; where the graph is retained, two of them stay at most."""
    with net_of(6) as (model, _):
        model.blocks.requires_grad_(False)
        spec = fs.by_path({"blocks.*": P("shard")})(model).bound
        trained, frozen = fs.partition(fs.shard(model, spec), spec)
        root, block = (spec.padded_numel(spec.by_key[key]) for key in ("", "blocks.0"))
        params = {k: v.requires_grad_() for k, v in trained.items()}
        with Alive() as alive:
            y = fs.functional_call(model, fs.combine(params, frozen), (numbers(0, 0),), spec=spec).sum()
            torch.autograd.grad(y, list(params.values()), retain_graph=retain)
            assert len(alive.gathered) == 1 + 6 + 5
            assert alive.peak == root + (3 if retain else 2) * block  # one of them ahead of its use
            del y
            assert alive.now() == []


@each(trained=[True, False], prefetch=[0, 1, 2])
def test_a_gradient_of_the_input_alone_holds_no_more(prefetch: int, trained: bool) -> None:
    """Where no gradient of a unit tells that it has been used: it goes with the last op that saved it."""
    with world(4):
        model = chain(blocks=6)
        spec, params = shards_of(fs.by_path({"*": fs.P("shard")}), model)
        params, x = leaves_of(params) if trained else params, numbers(0, 0).requires_grad_()
        with no_collector(), Alive() as alive:
            y = fs.functional_call(model, params, (x,), spec=spec, prefetch=prefetch).sum()
            alive.peak = 0
            torch.autograd.grad(y, x)
            assert alive.peak == (1 + prefetch) * spec.padded_numel(spec.by_key["0"])
            assert alive.now() == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_stays(mode: Callable[[], Any]) -> None:
    """Inference holds the root, one block and the next, and nothing afterwards."""
    with net_of(3) as (model, spec), mode():
        params = fs.shard(model, spec)
        with Alive() as alive:
            fs.functional_call(model, params, (numbers(0, 0),), spec=spec)
        assert alive.peak == sum(spec.padded_numel(spec.by_key[key]) for key in ("", "blocks.0", "blocks.1"))
        assert alive.now() == []


@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_frees_everything(failing: int) -> None:
    """Also between forward and backward of other units; the next call is a clean one."""
    with net_of(3) as (model, spec):
        params = {k: v.requires_grad_() for k, v in fs.shard(model, spec).items()}
        call = loss_of(model, spec, numbers(0, 0))
        hook = model.blocks[failing].register_forward_hook(lambda *_: 1 / 0)
        with Alive() as alive:
            refused(ZeroDivisionError, "division", lambda: call(params))
            gc.collect()  # the traceback is a cycle
            assert alive.now() == []
            hook.remove()
            call(params).backward()
            assert alive.now() == []


def note(held: Held, tensors: tuple[Tensor, ...]) -> None:
    held(*tensors)


def test_a_graph_that_is_dropped_frees_what_it_held() -> None:
    """A forward without a backward: the kept units and the activations go with the output, without the cycle collector."""
    with net_of(3) as (model, spec):
        inside = Held()
        model.blocks[1].out_proj.register_forward_pre_hook(lambda _, args: note(inside, args))
        params = {k: v.requires_grad_() for k, v in fs.shard(model, spec).items()}
        with no_collector(), Alive() as alive:
            y = fs.functional_call(model, params, (numbers(0, 0),), spec=spec)
            assert len(alive.now()) == 2
            assert inside.alive() == 1
            del y
            assert alive.now() == []
            assert inside.alive() == 0


@pytest.mark.parametrize("way", mark_seldom(sorted(WAYS), "fs", "backward"))
def test_activations_go_with_the_step(way: str) -> None:
    """Outputs that their own nodes save (tanh) are in no cycle, under torch.func either."""
    with net_of(3) as (model, spec), no_collector():
        inside = Held()
        for block in model.blocks:
            block.out_proj.register_forward_pre_hook(lambda _, args: note(inside, args))
        WAYS[way](loss_of(model, spec, numbers(0, 0)))(fs.shard(model, spec))
        assert (len(inside.refs), inside.alive()) == (3, 0)


def step_and_forget(held: Held) -> None:
    """Takes a model, its shards and gradients, all out of scope."""
    model = Net(blocks=2)
    spec, params = shards_of(fs.by_path({"blocks.*": fs.P("shard")}), model)
    grads = fs.grad(loss_of(model, spec, numbers(0, 0)))(params)
    held(*model.parameters(), *params.values(), *grads.values())


def test_dropping_everything_returns_to_the_baseline() -> None:
    """test_fully_shard_del_memory: no cycle keeps a model, its shards or its gathered buffers alive."""
    with world(4), no_collector():
        step_and_forget(held := Held())
        assert (len(held.refs) > 9, held.alive()) == (True, 0)


def test_gradients_that_are_reduced_over_one_axis_of_two_do_not_stay() -> None:
    """Beside one axis of as many ranks, backward holds no more than parts of three units."""
    blocks, width = 12, 64
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))

    def peak_of(mesh: Any, p: P) -> int:
        spec = fs.by_type(nn.Linear, p=p)(model).on(mesh)
        params = fs.shard(model, spec, check_values=False)
        with no_collector(), Peak() as peak:
            fs.grad(loss_of(model, spec, torch.ones(1, width), of=torch.sum))(params)
        return peak.bytes

    with world(4):
        one, two = peak_of(mesh_of(4), P("shard")), peak_of(mesh_of(2, 2), P(("replicate", "shard")))
    unit = 4 * (width * width + width)
    assert two < one + 1.5 * unit


# --- what is not trained costs no gradient ---
UNITS = 6
STRATEGIES = strategies("shard", "keep", "replicated", "remat", low=P("shard", precision=fs.Precision(param=torch.bfloat16)))


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        made.append(StorageWeakRef(_torch.unwrap(y).untyped_storage()))
        return y


made: list[StorageWeakRef] = []
"""What the layers gave, in order."""


def layers(frozen: set[str], *, by_flag: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(8, 8) for _ in range(UNITS)))
    for name, layer in model.named_children():
        layer.requires_grad_(not (by_flag and name in frozen))
    return model


@dataclasses.dataclass
class Step:
    """What one step did."""

    sent: Collectives
    products: int
    """Matrix products in backward."""
    kept: list[int]
    """The layers whose results were there when forward had ended."""
    grads: fs.Params


def step(frozen: set[str], p: P, way: str, how: str, prefetch: int = 1) -> tuple[Step, fs.PartitionSpec]:
    """One step of six layers of which these are frozen, by ``requires_grad``, or as a constant of the loss."""
    model = layers(frozen, by_flag=how == "flag")
    spec, params = shards_of(fs.by_type(Layer, p=p), model)
    trained, rest = fs.partition(params, spec, None if how == "flag" else lambda unit: unit.path not in frozen)
    sent, ran, kept, forward = Collectives(), Kernels(), list[int](), Counter[str]()
    made.clear()

    def turn(y: Tensor) -> Tensor:
        sent.turn()
        forward.update(ran.ops)
        kept[:] = [i for i, ref in enumerate(made[:UNITS]) if not ref.expired()]
        return y.sum()

    loss = loss_of(model, spec, torch.ones(3, 8), of=turn, frozen=rest, prefetch=prefetch)
    with no_collector(), sent, ran:  # nothing is to wait for that
        grads, _ = WAYS[way](loss)(trained)
    return Step(sent, sum(ran.ops[op] - forward[op] for op in ("mm", "addmm")), kept, grads), spec


FROZEN = [{"0"}, {"0", "1", "2"}, {"2", "3"}, {"5"}, {"0", "2", "4", "5"}, set("01234")]


@pairs(how=["flag", "constant"], way=WAYS, strategy=STRATEGIES)
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda x: "".join(sorted(x)))
def test_a_step_does_no_more_than_it_must(frozen: set[str], strategy: str, way: str, how: str) -> None:
    """Reductions, gathers and matrix products of backward, by number and by size."""
    p = STRATEGIES[strategy]
    with world(4):
        did, spec = step(frozen, p, way, how)
        trained = [str(i) for i in range(UNITS) if str(i) not in frozen]
        first = int(trained[0])
        assert set(did.grads) == set(trained)
        low = p.precision is not None

        def narrow(s: Sent) -> Sent:
            return s._replace(bytes=s.bytes // 2) if low else s

        sends = Counter(s for s in did.sent.backward)
        if p.axes:
            # the last one still is there, and the first one's input wants no gradient, for which its weight would be needed
            again = [str(i) for i in range(first + (not p.remat), UNITS - 1)] if p.reshard else []
            wanted = Counter(narrow(gather(spec, key)) for key in again)
            wanted += Counter(narrow(scatter(spec, key)) for key in trained)
            assert sends == wanted
        else:
            assert {s.op for s in sends} == {"all_reduce"}
            assert sum(s.numel for s in sends.elements()) == len(trained) * spec.shard_numel(next(iter(spec)))
        rerun = range(first, UNITS) if p.remat else ()
        # of each layer from the first trained one on: one for its weight if that is trained, one for its input, not that one's
        assert did.products == len(trained) + (UNITS - 1 - first) + len(rerun)
        assert did.kept == [*range(max(first - 1, 0), UNITS)]


# --- how many kernels a step has beyond the plain one ---
def linears(units: int, dim: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(units)))


def step_of_linears(mode: Any, p: P, size: int, way: str = "fs", units: int = 4, dim: int = 512) -> Any:
    """The mode after a step within on so many ranks, where slices need no padding on up to 64."""
    model = linears(units, dim)
    with world(size):
        spec, params = shards_of(fs.by_type(nn.Linear, p=p), model)
        loss = loss_of(model, spec, torch.ones(3, dim), of=torch.sum)
        with mode:
            WAYS[way](loss)(params)
    return mode


# --- steps ---
MOST = {
    "P()": (P(), 0.1),
    "shard": (P("shard"), 1.9),
    "bfloat16": (P("shard", precision=Precision(param=torch.bfloat16)), 4.0),
    "float16": (P("shard", precision=Precision(param=torch.float16)), 6.0),
}
"""So many for each unit, beyond the plain step's."""


@each(way=WAYS, p=MOST)
def test_kernels_of_a_step(p: str, way: str) -> None:
    """A joining of gradients for each bucket or unit, and in low precision a cast before each gather and after the reduction.

    Float16 has two divisions more: sums over ranks must neither overflow nor vanish, so one part of the number of ranks
    divides before the collective and the rest after it (`divide_factors`). Also where slices are padded, as of 64 ranks.
    """
    spec, most = MOST[p]
    units, dim = 16, 128
    counts = [step_of_linears(Kernels(), spec, size, way, units, dim).all for size in (2, 8, 64)]
    model, x = linears(units, dim), torch.ones(3, dim)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Kernels() as plain:
        WAYS[way](lambda params: torch.func.functional_call(model, params, (x,)).sum())(params)
    assert max(counts) - plain.all <= most * units
    assert counts[1] <= counts[2] <= counts[1] + 1  # the zeros of all padding
    assert counts[0] == counts[1] - units * (p == "float16")  # on two ranks it divides once


# --- codecs ---
def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def decoded(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(scale.dtype) * scale


def written(x: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty(len(x))  # which vmap cannot write to
    return out.copy_(x).mul_(scale)


def read(x: Tensor, scale: Tensor) -> Tensor:
    return x.float() * scale.item()  # nor read this


@pytest.mark.parametrize("way", WAYS)
def test_a_codec_has_as_many_kernels_at_any_number_of_ranks(way: str) -> None:
    """Slices of all ranks are decoded at once."""
    p = P("shard", precision=Precision(codec=Codec(scaled, decoded)))
    counts = [step_of_linears(Kernels(), p, size, way).ops for size in (2, 8, 64)]
    assert counts[0] == counts[1] == counts[2]


DECODES: dict[str, Callable[..., Tensor]] = {"at once": decoded, "writes": written, "reads": read}


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99), st.sampled_from([*DECODES]))
def test_slices_are_decoded_alike_at_once_and_one_by_one(slices: int, numel: int, seed: int, how: str) -> None:
    """Bit by bit; also by a decode that vmap cannot run."""
    x = torch.randn(slices, numel, generator=torch.Generator().manual_seed(seed))
    sent = [torch.stack(parts) for parts in zip(*map(scaled, x), strict=True)]
    expected = torch.cat([decoded(*scaled(row)) for row in x])
    assert torch.equal(Codec(scaled, DECODES[how])._decode_slices(sent, numel, torch.float32), expected)


# --- compressors ---
@pytest.mark.parametrize("p", [P("shard"), P()], ids=str)
def test_quantize_has_as_many_kernels_at_any_number_of_ranks(p: P) -> None:
    """What all ranks sent is dequantized and added at once."""
    model = linears(2, 64)
    grads = {name: torch.ones_like(x) for name, x in model.named_parameters()}
    counts: list[Counter[str]] = []
    for size in (2, 8, 64):
        with world(size), Kernels() as counted:
            fs.compress.quantize(16).reduce(grads, (), fs.policies.always(p)(model).bound)
        counts.append(counted.ops)
    assert counts[0] == counts[1] == counts[2]
