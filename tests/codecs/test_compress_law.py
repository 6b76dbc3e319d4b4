"""One law of what a compressor reduces, over all compressors x axes x layouts x sizes of layers, on simulated and real ranks.

Gradients are whole numbers times the number of ranks, so that their means are exact. Below: beside the hooks of
DistributedDataParallel, and what is sent.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_hook
from collective_log import Collectives, Sent, world
from depth import at_most, depth, each, every, mark_seldom
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import Pool, mesh_of, real_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import funshard as fs
from funshard.compress import Compressor, exact, powersgd, quantize, switch

LAYERS: dict[str, tuple[int, ...]] = {
    "bias": (3,),
    "scalar": (),
    "empty": (0, 4),
    "row": (1, 9),
    "small": (2, 3),
    "matrix": (6, 5),
    "kernel": (4, 2, 3),
}
MESHES = ({"shard": 1}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"a": 2, "b": 1, "c": 3})
OVER_ALL: dict[str, Any] = {
    "quantize": lambda axes: quantize(axes=axes),
    "chunks": lambda axes: quantize(4, axes=axes),
    "powersgd": lambda axes: powersgd(axes=axes),
    "eager": lambda axes: powersgd(2, axes=axes, min_compression_rate=0.5),
    "batched": lambda axes: powersgd(1, axes=axes, batched=True, min_compression_rate=0.5),
    "no error": lambda axes: powersgd(1, axes=axes, min_compression_rate=0.5, error_feedback=False, warm_start=False),
}
"""Lossy ones: exact over the axes that they do not compress over."""
LOSSLESS: dict[str, Any] = {
    "each alone": lambda axes: quantize(1, axes=axes),
    "full rank": lambda axes: powersgd(99, axes=axes, min_compression_rate=0),
    "full rank, batched": lambda axes: powersgd(99, axes=axes, batched=True, min_compression_rate=0),
    "full rank, cold": lambda axes: powersgd(99, axes=axes, min_compression_rate=0, warm_start=False, error_feedback=False),
    "nothing is worth it": lambda axes: powersgd(1, axes=axes, min_compression_rate=1e9),
    "switch": lambda axes: switch(0, exact(()), powersgd(99, axes=axes, min_compression_rate=0)),
}


def mean_over(full: fs.Params, sizes: Mapping[str, int], axes: tuple[str, ...] | None = None) -> fs.Params:
    """Each rank's mean over the ranks that are its own but for these axes, all by default; ranks in dimension 0."""
    dims = [i for i, name in enumerate(sizes) if axes is None or name in axes]
    shaped = {n: x.unflatten(0, tuple(sizes.values())) for n, x in full.items()}
    means = {n: (x.mean(dims, keepdim=True) if dims else x).expand_as(x) for n, x in shaped.items()}
    return {n: x.flatten(0, len(sizes) - 1) for n, x in means.items()}


def slices_of(full: fs.Params, spec: fs.PartitionSpec, sizes: Mapping[str, int]) -> fs.Params:
    """Each rank's shards of its own full tensors, by slicing alone."""
    spec, ranks = spec.on(dict(sizes)), range(math.prod(sizes.values()))
    each = [fs.shard({n: x[r] for n, x in full.items()}, spec, rank=r) for r in ranks]
    return {key: torch.stack([shards[key] for shards in each]) for key in each[0]}


@dataclass(frozen=True)
class Case:
    sizes: dict[str, int]
    axes: tuple[str, ...] | str | None
    layers: tuple[tuple[str, str | tuple[str, ...] | None, int], ...]
    """Of each its kind, and what its P is of: axis and align."""

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def model(self) -> nn.Module:
        model = nn.Module()
        for i, (kind, _, _) in enumerate(self.layers):
            layer = nn.Module()
            layer.register_parameter("w", nn.Parameter(torch.zeros(LAYERS[kind], dtype=torch.float64)))
            if kind == "matrix":
                layer.register_parameter("b", nn.Parameter(torch.zeros(5, dtype=torch.float64)))
            model.add_module(f"m{i}", layer)
        return model

    @property
    def spec(self) -> fs.PartitionSpec:
        return fs.by_path({f"m{i}": fs.P(axis, align=align) for i, (_, axis, align) in enumerate(self.layers)})(self.model)

    def gradients(self, seed: int = 0) -> fs.Params:
        """Each rank's own, in dimension 0."""
        g = torch.Generator().manual_seed(seed)
        named = self.model.named_parameters()
        return {n: torch.randint(-9, 10, (self.ranks, *p.shape), generator=g).double() * self.ranks for n, p in named}

    def mean(self, full: fs.Params, axes: tuple[str, ...] | None = None) -> fs.Params:
        return mean_over(full, self.sizes, axes)

    def slices(self, full: fs.Params) -> fs.Params:
        return slices_of(full, self.spec, self.sizes)

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(self.sizes) if self.axes is None else (self.axes,) if isinstance(self.axes, str) else self.axes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from(MESHES))
    some = st.permutations(list(sizes)).flatmap(lambda names: st.integers(0, len(names)).map(lambda n: tuple(names[:n])))
    layer = st.tuples(st.sampled_from(list(LAYERS)), some, st.sampled_from([1, 4]))
    axes = draw(st.one_of(st.none(), st.sampled_from(list(sizes)), some))
    return Case(sizes, axes, tuple(draw(st.lists(layer, min_size=1, max_size=4))))


def reduced(compressor: Compressor[Any], spec: fs.PartitionSpec, *grads: fs.Params) -> tuple[list[fs.Params], Any]:
    """What every step gives, and the last state."""
    state, out = compressor.init(spec), []
    for g in grads:
        shards, state = compressor.reduce(g, state, spec)
        out.append(shards)
    return out, state


def simulated(case: Case, compressor: Compressor[Any], *grads: fs.Params) -> list[fs.Params]:
    """What every step gives, ranks in dimension 0."""
    return fs.testing.spmd(lambda mesh, *g: reduced(compressor, case.spec.on(mesh), *g)[0], case.sizes)(*grads)


def check_replicas(case: Case, shards: fs.Params) -> None:
    """Ranks that hold the same slice hold the same numbers, and zeros in the padding."""
    inside = case.slices({n: torch.ones_like(g) for n, g in case.gradients().items()})
    for unit in case.spec.on(case.sizes):
        x = shards[unit.key].unflatten(0, tuple(case.sizes.values()))
        for dim, axis in enumerate(case.sizes):
            if axis not in unit.p.axes:
                # vmap's matrix products round each rank's in another way; on real ranks it is bit for bit
                assert_close(x, x.narrow(dim, 0, 1).expand_as(x), rtol=0, atol=1e-10)
        assert not shards[unit.key][inside[unit.key] == 0].any()


HSDP = {"replicate": 2, "shard": 2}
SMALL = Case(HSDP, "shard", (("bias", "shard", 1), ("small", "shard", 1), ("row", ("shard", "replicate"), 1)))
SPLIT = Case(HSDP, "replicate", (("bias", ("replicate", "shard"), 1), ("matrix", "replicate", 4)))


@given(case=cases())
@example(case=SMALL)
@example(case=SPLIT)
@settings(max_examples=depth(4, 250))
def test_a_mean_over_all_ranks_or_some(case: Case) -> None:
    """Of a lossless one over the axes that are named and over the others, of an exact one over its axes; all keep replicas
    alike."""
    grads, more = (case.gradients(seed) for seed in range(2))
    over_all, over_some = (case.slices(case.mean(grads, axes)) for axes in (None, case.chosen))
    wanted = [(name, make, over_all) for name, make in LOSSLESS.items()]
    wanted += [("exact", exact, over_some), ("exact later", lambda axes: switch(0, exact(()), exact(axes)), over_some)]
    for name, make, want in wanted:
        [shards] = simulated(case, make(case.axes), grads)
        tolerance = {"each alone": 1e-5, "exact": 1e-6, "exact later": 1e-6}.get(name, 1e-9)
        assert_close(shards, want, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
        if name in LOSSLESS:
            check_replicas(case, shards)
    [own] = simulated(case, exact(()), grads)
    assert_close(own, case.slices(grads), rtol=0, atol=0)
    for make in OVER_ALL.values():
        for shards in simulated(case, make(case.axes), grads, more):
            check_replicas(case, shards)


@given(case=cases())
@example(case=SMALL)
@example(case=SPLIT)
@settings(max_examples=depth(2, 150))
def test_what_powersgd_leaves_out_comes_later(case: Case) -> None:
    """Each step takes what it sends from what is left, whose rank is lower by one: then it was the mean over all ranks."""
    grads = case.gradients()
    nothing = {n: torch.zeros_like(g) for n, g in grads.items()}
    want = case.slices(case.mean(grads))
    for batched, rate in ((False, 0.5), (True, 0.5), (False, 1.0)):
        compressor = powersgd(1, axes=case.axes, batched=batched, warm_start=False, min_compression_rate=rate)
        out = simulated(case, compressor, grads, *[nothing] * 7)
        assert_close({key: torch.stack([shards[key] for shards in out]).sum(0) for key in want}, want, rtol=1e-6, atol=1e-6)


REAL = (
    SMALL,
    SPLIT,
    Case(HSDP, "shard", (("matrix", None, 1), ("kernel", ("replicate", "shard"), 1), ("row", "replicate", 4))),
    Case(HSDP, None, (("matrix", "shard", 1), ("kernel", (), 1), ("bias", ("shard", "replicate"), 1))),
)


def compressors(case: Case) -> dict[str, Any]:
    """By default two cases in turn share all of them."""
    every = LOSSLESS | OVER_ALL
    return {name: every[name] for name in depth([*every][REAL.index(case) % 2 :: 2], [*every])}


def on_real_ranks(rank: int, case: Case) -> dict[str, list[fs.Params]]:
    spec = case.spec.on(mesh_of(**case.sizes))
    grads = [{n: g[rank] for n, g in case.gradients(seed).items()} for seed in range(2)]
    return {name: reduced(make(case.axes), spec, *grads)[0] for name, make in compressors(case).items()}


@at_most(1)
@pytest.mark.parametrize("case", mark_seldom(REAL, REAL[0], REAL[2]), ids=["small", "split", "mixed", "all"])
def test_on_real_ranks(gloo4: Pool, case: Case) -> None:
    """The mean where nothing is lost, bit for bit the same on replicas, and as on simulated ranks."""
    each = gloo4.run(on_real_ranks, case)
    for name, make in compressors(case).items():
        there = simulated(case, make(case.axes), *[case.gradients(seed) for seed in range(2)])
        for step in range(2):
            shards = {key: torch.stack([one[name][step][key] for one in each]) for key in each[0][name][step]}
            check_replicas(case, shards)
            for unit in case.spec.on(case.sizes):
                x = shards[unit.key].unflatten(0, tuple(case.sizes.values()))
                for dim, axis in enumerate(case.sizes):
                    assert axis in unit.p.axes or torch.equal(x.select(dim, 0), x.select(dim, 1)), (name, unit.key)
            assert_close(shards, there[step], rtol=1e-5, atol=1e-5)
            if name in LOSSLESS:
                want = case.slices(case.mean(case.gradients(step)))
                assert_close(shards, want, rtol=1e-5, atol=1e-5)


# --- beside DDP's hooks, and what is sent ---
STEPS, START = 8, 3


def net() -> nn.Module:
    """With two matrices of one shape, a convolution, vectors and a matrix that is too small to be compressed."""
    torch.manual_seed(1)
    convolution = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, stride=2), nn.Flatten())
    return nn.Sequential(convolution, nn.Linear(108, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 2))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7 + rank + 100 * step)
    return torch.randn(4, 64, generator=generator).double(), torch.randn(4, 2, generator=generator).double()


@contextlib.contextmanager
def orthogonalized() -> Iterator[list[Tensor]]:
    """What torch's hooks make orthogonal, before they do: Qs first, then Ps. Its batched hook passes a matrix where a batch
    of them is expected, an AssertionError in torch 2.13; here it is one."""
    seen: list[Tensor] = []
    original = power_hook._orthogonalize

    def recording(matrices: Tensor, epsilon: float = 0) -> None:
        seen.append(matrices.clone())
        original(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    with mock.patch.object(power_hook, "_orthogonalize", recording):
        yield seen


def check_beside_ddp(rank: int, kind: str, options: dict[str, Any], split: bool) -> None:
    """Training with DDP's hook and its gradients; at each step ours are the same, whether units are split or replicated."""
    # Batched, torch's matrix is a bucket, whose order is not our units': with one parameter there is only one.
    model = (nn.Linear(64, 2, bias=False) if options.get("batched") else net()).double()
    peer = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=25)
    theirs, state, ours = PAIRS[kind](options)
    order: list[str] = []

    def hook(hook_state, bucket):  # torch compares annotations with types, and here they are strings
        names = {id(p): name for name, p in peer.module.named_parameters()}
        order[:] = [names[id(p)] for p in bucket.parameters()]
        return theirs(hook_state, bucket)

    peer.register_comm_hook(state, hook)
    spec = fs.policies.always(fs.P("shard") if split else fs.P())(model)
    passed = ours.init(spec.bound)
    for step in range(STEPS):
        full = {n: p.detach().clone() for n, p in peer.module.named_parameters()}
        peer.zero_grad()
        x, y = batch(rank, step)
        with orthogonalized() as seen:
            mse_loss(peer(x), y).backward()
        want = {n: p.grad.clone() for n, p in peer.module.named_parameters()}
        grads = torch.func.grad(lambda p: mse_loss(torch.func.functional_call(model, p, x), y))(full)
        if kind == "powersgd" and step >= START and (step == START or not options.get("warm_start", True)):
            passed = started_like_torch(passed, seen, [(n, want[n]) for n in order])
        shards, passed = ours.reduce(grads, passed, spec)
        rough = 1e-8 if kind == "powersgd" else 1e-9
        atol = rough * max(float(g.abs().amax()) for g in want.values())
        want = fs.shard(want, spec, rank=rank) if kind == "noop" else fs.shard(want, spec, check_values=kind != "post local")
        assert_close(shards, want, rtol=rough, atol=atol, msg=lambda m, step=step: f"step {step}: {m}")
        with torch.no_grad():
            for p in peer.module.parameters():
                if kind in ("noop", "post local"):
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
                p -= 0.05 * p.grad


def started_like_torch(passed: Any, seen: list[Tensor], bucket: list[tuple[str, Tensor]]) -> Any:
    """Our state with the Q that torch drew: its hook goes through a bucket shape by shape."""
    steps, nothing, state = passed
    shapes: dict[torch.Size, list[str]] = {}
    for name, grad in bucket:
        if name in state.q:
            shapes.setdefault(grad.view(len(grad), -1).shape, []).append(name)
    names = [name for same in shapes.values() for name in same] or list(state.q)
    drawn = [q for batch in seen for q in (batch if batch.dim() == 3 else batch[None])]
    q = dict(zip(names, drawn, strict=False))
    assert {n: x.shape for n, x in q.items()} == {n: x.shape for n, x in state.q.items()}
    return steps, nothing, state._replace(q={n: q[n] for n in state.q})


def power(options: dict[str, Any]) -> tuple[Any, Any, Compressor[Any]]:
    named = {"rank": "matrix_approximation_rank", "error_feedback": "use_error_feedback"}
    defaults = {"rank": 1, "min_compression_rate": 2, "error_feedback": True, "warm_start": True}
    of_torch: Any = {named.get(name, name): options.get(name, value) for name, value in defaults.items()}
    state = power_hook.PowerSGDState(None, start_powerSGD_iter=START, orthogonalization_epsilon=0, **of_torch)
    theirs = power_hook.batched_powerSGD_hook if options.get("batched") else power_hook.powerSGD_hook
    ours: Compressor[Any] = switch(START, exact(), powersgd(**options))
    return theirs, state, ours


PAIRS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any, Compressor[Any]]]] = {
    "allreduce": lambda _: (default_hooks.allreduce_hook, None, exact()),
    "noop": lambda _: (debugging_hooks.noop_hook, None, exact(())),
    "post local": lambda _: (
        post_localSGD_hook.post_localSGD_hook,
        post_localSGD_hook.PostLocalSGDState(None, None, START, post_local_gradient_allreduce=False),
        switch(START, exact(), exact(())),
    ),
    "powersgd": power,
}


@at_most(3)
@each(split=[False, True], kind=[kind for kind in PAIRS if kind != "powersgd"])
@real_ranks(2)
def test_is_ddps_hook(rank: int, kind: str, split: bool) -> None:
    """Eight steps, whether units are split or replicated."""
    check_beside_ddp(rank, kind, {}, split)


POWER: dict[str, dict[str, Any]] = {
    "rank 1": {},
    "rank 2": {"rank": 2, "min_compression_rate": 1.0},
    "no error": {"rank": 2, "min_compression_rate": 1.0, "error_feedback": False},
    "cold": {"rank": 2, "min_compression_rate": 1.0, "warm_start": False},
    "batched": {"rank": 2, "batched": True},
    "batched, cold": {"rank": 3, "min_compression_rate": 1.0, "batched": True, "warm_start": False},
}


@at_most(3)
@each(split=[False, True], name=POWER)
@real_ranks(2)
def test_powersgd_is_ddps_hook(rank: int, name: str, split: bool) -> None:
    """Eight steps, from torch's own random numbers."""
    check_beside_ddp(rank, "powersgd", POWER[name], split)


BIG = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32, bias=False), nn.LayerNorm(32)).float()
EIGHT = {"replicate": 2, "shard": 4}


def sent(compressor: Compressor[Any], policy: fs.Policy, sizes: dict[str, int]) -> list[Sent]:
    """What one step sends, on eight ranks of which only this one is there."""
    with world(8):
        spec = policy(BIG).on(mesh_of(**sizes))
        grads = {n: torch.randn_like(p) for n, p in BIG.named_parameters()}
        log, state = Collectives(), compressor.init(spec)
        with log:
            compressor.reduce(grads, state, spec)
        return log.all


@every(split=[False, True], rank=[1, 2, 3])
def test_powersgd_sends_p_and_q(rank: int, split: bool) -> None:
    """Of all units at once: (rows + columns) rank elements of each matrix, vectors as they are, in two all-reduces. A unit
    that is split and has no matrix is reduced as without compression."""
    vectors = 48 + (0 if split else 64)
    rows, columns = 48 + 32, 64 + 48
    numels = [rank * rows + vectors, rank * columns]
    p = fs.P("shard") if split else fs.P()
    want = [Sent("all_reduce", n, 4 * n, 8) for n in numels]
    scattered = [Sent("reduce_scatter", 64, 256, 8)] if split else []
    assert sent(powersgd(rank), fs.policies.always(p), {"shard": 8}) == scattered + want
    both = [Sent("all_reduce", n, 4 * n, size) for n in numels for size in (2, 4)]
    hybrid = [Sent("reduce_scatter", 64, 256, 4), Sent("all_reduce", 16, 64, 2)] if split else []
    assert sent(powersgd(rank), fs.policies.always(p), EIGHT) == hybrid + both


def test_powersgd_of_slices() -> None:
    """On HSDP, over the replicas alone: reduce-scatter first, as without compression, and then a square for each slice."""
    units = {"0": 64 * 48 + 48, "1": 48 * 32, "2": 64}
    scattered = [Sent("reduce_scatter", n, 4 * n, 4) for n in units.values()]
    first, second, _ = (math.ceil(math.sqrt(n / 4)) for n in units.values())
    last = 16  # the slice of "2" is a 4 x 4 square: P and Q are not twice smaller
    reduced = [Sent("all_reduce", n, 4 * n, 2) for n in (first + second + last, first + second)]
    assert sent(powersgd(axes="replicate"), fs.policies.always(fs.P("shard", align=1)), EIGHT) == scattered + reduced


def test_what_quantize_sends() -> None:
    """A quarter of the bytes: all of it to all, or each slice to its owner."""
    whole, slice_ = 64 * 48 + 48, (64 * 48 + 48) // 8
    close = fs.policies.always(fs.P("shard", align=1))
    only = fs.by_path({"0": fs.P()}, fs.P())
    assert Sent("all_gather", whole, whole, 8) in sent(quantize(), only, {"shard": 8})
    assert Sent("all_gather", 2, 8, 8) in sent(quantize(), only, {"shard": 8})
    got = sent(quantize(), close, {"shard": 8})
    assert [(x.op, x.numel, x.bytes) for x in got[:2]] == [("all_to_all_single", 16, 64), ("all_to_all_single", whole, whole)]
    chunks = math.ceil(slice_ / 128)
    got = sent(quantize(128), close, {"shard": 8})
    assert [(x.op, x.numel, x.bytes) for x in got[:2]] == [
        ("all_to_all_single", 8 * chunks * 2, 8 * chunks * 8),
        ("all_to_all_single", 8 * chunks * 128, 8 * chunks * 128),
    ]
    assert len(got) == 2 * 3
    assert sent(exact(), close, {"shard": 8})[0] == Sent("reduce_scatter", whole, 4 * whole, 8)


def test_what_is_local_is_not_sent() -> None:
    assert sent(exact(()), fs.policies.always(), EIGHT) == []
    assert {x.ranks for x in sent(switch(0, exact(), exact("shard")), fs.policies.always(), EIGHT)} == {4}
    assert {x.ranks for x in sent(switch(1, exact(), exact("shard")), fs.policies.always(), EIGHT)} == {2, 4}


@every(p=[fs.P("shard"), fs.P("shard", reshard=False), fs.P()], dtype=[torch.float16, torch.bfloat16])
@real_ranks(2)
def test_a_cast_is_the_reduce_dtype(rank: int, dtype: torch.dtype, p: fs.P) -> None:
    """test_fp16_hook, test_bf16_hook: bit for bit the gradients of ``Precision(reduce=)``, in the parameters' dtype."""
    model = net()
    x, y = (t.float() for t in batch(rank, 0))
    plain = fs.policies.always(p)(model).bound
    low = fs.policies.always(dataclasses.replace(p, precision=fs.Precision(reduce=dtype)))(model).bound
    params = fs.shard(model, plain)

    def loss(params: fs.Params, spec: fs.PartitionSpec) -> Tensor:
        return mse_loss(fs.functional_call(model, params, (x,), spec=spec), y)

    own = fs.grad(lambda full: loss(full, plain))(fs.unshard(params, plain))
    grads, _ = exact().reduce({name: g.to(dtype) for name, g in own.items()}, (), plain)
    grads = {key: g.float() for key, g in grads.items()}
    expected = fs.grad(lambda params: loss(params, low))(params)
    exactly = fs.grad(lambda params: loss(params, plain))(params)
    assert grads.keys() == expected.keys()
    for key in grads:
        assert grads[key].dtype == torch.float32
        assert torch.equal(grads[key], expected[key]), key
    assert not all(torch.equal(grads[key], exactly[key]) for key in grads)
