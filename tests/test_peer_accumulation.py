"""Gradient accumulation: torch's own claims for no_sync and set_requires_gradient_sync, with what is sent.

Micro-batches whose gradients are not to be reduced are differentiated with respect to full parameters, which stand in the
place of their units' shards: neither gathered nor reduced. `reduce_grads` reduces what was added up, once.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from collective_log import Collectives, gathers, reduce, scatters, world
from depth import at_most, depth, each, every
from models import module_class
from parity import MAIN_WAYS, STRATEGIES, WAYS, numbers, same, sharded_call, shards_of, squared, squared_loss, step_with
from peer_models import MLP, chain, fsdp2
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P, Precision
from funshard.collectives import Mesh

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BLOCKS, MICRO = 3, 3
ROOT, MLPS = "", ["1", "2", "3"]
MODES: dict[str, list[str]] = {"none": [], "all": [ROOT, *MLPS], "root_only": [ROOT], "some_mlps": MLPS[:2]}
"""The units that are not synchronised before the last micro-batch."""


def sequence(blocks: int = BLOCKS) -> nn.Module:
    """A layer that the root owns, and MLPs: the model of torch's test."""
    return nn.Sequential(nn.Linear(5, 5).double(), *chain(blocks))


class Accumulated(NamedTuple):
    grads: fs.Params
    """Of the sum of the losses, by unit key."""
    losses: list[Tensor]
    sent: Collectives
    """In ``forward`` what the micro-batches send, in ``backward`` the reduction of what they left."""


def accumulate(
    model: nn.Module, spec: fs.PartitionSpec, params: fs.Params, batches: list[Tensor], held: list[str], way: str, partial: bool
) -> Accumulated:
    """The gradients of micro-batches, those of the ``held`` units reduced at the end; if ``partial``, the others' over
    replicas at the end as well."""
    losses: list[Tensor] = []
    total: fs.Params = {}
    options: dict[str, Any] = {"reduce_axes": ["shard"]} if partial else {}
    with Collectives() as sent:
        given = {key: shard for key, shard in params.items() if key not in held} | fs.unshard(params, spec, units=held)
        for x in batches:
            loss = lambda p: squared(lambda x: fs.functional_call(model, p, x, spec=spec, **options), x)  # noqa: E731
            grads, value = WAYS[way](loss)(given)
            total = {key: total[key] + g if total else g for key, g in grads.items()}
            losses.append(value)
        sent.turn()
        own = {name: g for name, g in total.items() if name not in spec.by_key}
        slices = {key: g for key, g in total.items() if key in spec.by_key}
        if partial:
            slices = fs.reduce_grads(slices, spec, reduce_axes=["replicate"])
        reduced = slices | fs.reduce_grads(own, spec)
    return Accumulated({unit.key: reduced[unit.key] for unit in spec}, losses, sent)


# --- what is sent ---
class Where(NamedTuple):
    mesh: tuple[int, ...]
    held: str
    partial: bool = False


WHERE = [Where(mesh, held, mesh == (4, 2)) for mesh in ((8,), (2, 4), (4, 2)) for held in MODES]


@at_most(12)
@every(way=MAIN_WAYS, reshard=[True, False], where=WHERE)
def test_gradient_accumulation_communication_count(where: Where, reshard: bool, way: str) -> None:
    """A unit that is held is gathered and reduced once; torch's formulas for reductions, and fewer gathers."""
    held = MODES[where.held]
    synced = [key for key in (ROOT, *MLPS) if key not in held]
    blocks = [key for key in synced if key != ROOT]
    with world(torch.Size(where.mesh).numel()):
        model = sequence()
        spec = fs.by_type(MLP, p=P("shard", reshard=reshard))(model).on(mesh_of(*where.mesh))
        batches = [numbers(0, step) for step in range(MICRO)]
        sent = accumulate(model, spec, fs.shard(model, spec), batches, held, way, where.partial).sent
    reduced = lambda *keys: [reduce(spec, key, where.mesh[0]) for key in keys if len(where.mesh) == 2]  # noqa: E731
    again = blocks[:-1] if reshard else []  # what ran last is still there
    micro = Counter(gathers(spec, *synced) + gathers(spec, *again) + scatters(spec, *synced))
    micro += Counter([] if where.partial else reduced(*synced))
    end = Counter(scatters(spec, *held) + reduced(*held, *(synced if where.partial else [])))
    assert Counter(sent.forward) == Counter(gathers(spec, *held) + [*micro.elements()] * MICRO)
    assert Counter(sent.backward) == end
    assert sent.forward[: len(held)] == gathers(spec, *held)

    counts = Counter(s.op for s in sent.all)
    m, d = BLOCKS, len([key for key in held if key != ROOT])
    formulas = {
        "none": (m + 1) * MICRO,
        "all": m + 1,
        "root_only": m + 1 + m * (MICRO - 1),
        "some_mlps": m + 1 + (m - d + 1) * (MICRO - 1),
    }
    assert counts["reduce_scatter"] == formulas[where.held]
    assert counts["all_reduce"] == (0 if len(where.mesh) == 1 else m + 1 if where.partial else formulas[where.held])
    if reshard:
        assert counts["all_gather"] <= 2 * (m + 1) * MICRO  # torch's
    else:
        assert counts["all_gather"] == formulas[where.held]


@every(reshard=[True, False], way=MAIN_WAYS)
def test_no_sync_gathered_for_each_micro_batch(way: str, reshard: bool) -> None:
    """Full gradients without keeping full parameters from one micro-batch to the next: (m+1)M gathers, m+1 reductions."""
    with world(8):
        model = sequence()
        spec, params = shards_of(fs.by_type(MLP, p=P("shard", reshard=reshard)), model)
        total: fs.Params = {}
        with Collectives() as sent:
            for step in range(MICRO):
                full = fs.unshard(params, spec)
                grads, _ = WAYS[way](lambda full: squared(sharded_call(model, full, spec), numbers(0, step)))(full)
                total = {name: total[name] + g if total else g for name, g in grads.items()}
            sent.turn()
            fs.reduce_grads(total, spec)
        assert sent.forward == gathers(spec, ROOT, *MLPS) * MICRO
        assert sent.backward == scatters(spec, ROOT, *MLPS)


# --- parity ---
@at_most(1)
@each(way=["fs", "torch.func"], reshard=[True, False], mode=MODES)
@pytest.mark.parametrize(("shape", "partial"), [((4,), False), ((2, 2), False), ((2, 2), True)])
@real_ranks(4)
def test_gradient_accumulation(rank: int, shape: tuple[int, ...], mode: str, reshard: bool, partial: bool, way: str) -> None:
    """Losses of every micro-batch, gradients and parameters as FSDP2's in the same mode."""
    mesh = mesh_of(*shape)
    held = MODES[mode]
    model = sequence()
    peer = fsdp2(copy.deepcopy(model), MLP, mesh=mesh, reshard_after_forward=reshard)
    spec, params = shards_of(fs.by_type(MLP, p=P("shard", reshard=reshard)), model, mesh)
    ours, theirs = (torch.optim.Adam(tensors, lr=1e-2) for tensors in (params.values(), peer.parameters()))
    for step in range(depth(1, 2)):
        batches = [numbers(rank, 10 * step + i) for i in range(MICRO)]
        got = accumulate(model, spec, params, batches, held, way, partial)
        theirs.zero_grad()
        for i, x in enumerate(batches):
            last = i == MICRO - 1
            for key in (ROOT, *MLPS):
                peer.get_submodule(key).set_requires_gradient_sync(last or key not in held, recurse=False)
            peer.set_requires_all_reduce(last or not partial)
            peer.set_is_last_backward(last)
            loss = squared(peer, x)
            loss.backward()
            assert_close(got.losses[i], loss.detach())
        expected = {name: p.grad.full_tensor() for name, p in peer.named_parameters()}
        full = fs.unshard(got.grads, spec)
        same(full, expected, f"gradient at step {step}")
        step_with(got.grads, params, ours, theirs)
    same(fs.unshard(params, spec), {name: p.full_tensor() for name, p in peer.named_parameters()}, "parameters")


@real_ranks(2)
def test_1f1b_microbatching(rank: int) -> None:
    """All units are gathered first, forwards and backwards of micro-batches take turns, the last reduces: parity."""
    model = chain()
    (spec, params), plain = shards_of(fs.by_type(MLP, p=P("shard", reshard=False)), model), copy.deepcopy(model)
    ours, theirs = torch.optim.Adam(params.values(), lr=1e-2), torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(3):
        batches = [numbers(rank, 10 * step + i) for i in range(4)]
        with Collectives() as sent:
            full = fs.unshard(params, spec)
            sent.turn()
            waiting, grads, losses = [], [], []
            for i, x in enumerate(batches):  # one forward, one backward: of the batch before last
                value, pull = torch.func.vjp(lambda full, x=x: squared(sharded_call(model, full, spec), x), full)
                losses.append(value)
                waiting.append(pull)
                if i >= 2:
                    grads += waiting.pop(0)(torch.tensor(0.25).double())
            for pull in waiting:
                grads += pull(torch.tensor(0.25).double())
            assert sent.forward == gathers(spec, "0", "1", "2")
            assert not sent.backward
            own = {name: torch.stack([g[name] for g in grads]).sum(0) for name in full}
            reduced = fs.reduce_grads(own, spec)
            assert len(sent.backward) == len(spec)
        theirs.zero_grad()
        joined = torch.cat([numbers(r, 10 * step + i) for r in range(2) for i in range(4)])
        squared(plain, joined).backward()
        for i, x in enumerate(batches):
            assert_close(losses[i], squared(plain, x).detach())
        same(reduced, fs.shard({name: p.grad for name, p in plain.named_parameters()}, spec, rank=rank), "gradient")
        step_with(reduced, params, ours, theirs)


# --- FSDP1's no_sync ---
PATTERNS = ["iiioooiii", "oio", "oioioi"]
"""``i`` is an iteration inside no_sync, ``o`` one outside. One more outside ends each."""


def permuted(rank: int, i: int) -> Tensor:
    """The elements of one batch in another order for each iteration."""
    return numbers(rank, 0).flatten()[torch.randperm(20, generator=torch.Generator().manual_seed(i))].view(4, 5)


@each(pattern=PATTERNS, strategy=STRATEGIES)
@real_ranks(2)
def test_grad_acc(rank: int, strategy: str, pattern: str) -> None:
    """Iterations that are reduced and ones that are not, mixed: one backward of all batches joined."""
    model = sequence()
    spec, params = shards_of(fs.by_type(MLP, p=STRATEGIES[strategy]), model)
    pattern += "o"
    n = len(pattern)
    full, slices, pending = {}, {}, {}
    losses = []
    for i, where in enumerate(pattern):
        loss = lambda p: squared(sharded_call(model, p, spec), permuted(rank, i)) / n  # noqa: E731
        if where == "i":
            full = full or fs.unshard(params, spec)
            with Collectives() as sent:
                grads, value = fs.grad_and_value(loss)(full)
            assert not sent.all
            pending = {name: pending[name] + g if pending else g for name, g in grads.items()}
        else:
            grads, value = fs.grad_and_value(loss)(params)
            slices = {key: slices[key] + g if slices else g for key, g in grads.items()}
        losses.append(value)
    reduced = fs.reduce_grads(pending, spec)
    grads = fs.unshard({key: g + reduced[key] for key, g in slices.items()}, spec)
    joined = torch.cat([permuted(r, i) for r in range(2) for i in range(n)])
    plain = copy.deepcopy(model)
    squared(plain, joined).backward()
    same(grads, {name: q.grad for name, q in plain.named_parameters()}, "gradient")
    own = torch.cat([permuted(rank, i) for i in range(n)])
    assert_close(sum(losses), squared(plain, own).detach())


@every(way=MAIN_WAYS, strategy=STRATEGIES)
@real_ranks(2)
def test_no_sync_correctness(rank: int, strategy: str, way: str) -> None:
    """[no_sync, sync] is twice one step's gradient; before it is reduced it has the parameters' shapes and is this rank's."""
    model, x = sequence(), numbers(rank, 0)
    spec, params = shards_of(fs.by_type(MLP, p=STRATEGIES[strategy]), model)
    loss = squared_loss(model, spec, x)
    once, _ = WAYS[way](loss)(params)
    own, _ = WAYS[way](loss)(fs.unshard(params, spec))
    assert {name: g.shape for name, g in own.items()} == {name: p.shape for name, p in model.named_parameters()}
    assert not any(torch.equal(g, q) for g, q in zip(own.values(), fs.unshard(once, spec).values(), strict=True))
    later = fs.reduce_grads(own, spec)
    same({key: g + once[key] for key, g in later.items()}, {key: 2 * g for key, g in once.items()}, "gradient")


@real_ranks(2)
def test_no_sync_mixed_precision(rank: int) -> None:
    """Local gradients are in the dtype of the full parameters that you give: float16 as in FSDP1, or float32 to add up in."""
    model = sequence().float()
    spec = fs.by_type(MLP, p=P("shard", precision=Precision(param=F16, reduce=F32)))(model).bound
    params, x = fs.shard(model, spec), numbers(rank, 0).float()
    loss = lambda p: squared(sharded_call(model, p, spec), x).float()  # noqa: E731
    full = fs.unshard(params, spec)
    wide = fs.grad(loss)(full)
    low = fs.grad(loss)({name: t.half() for name, t in full.items()})
    assert {g.dtype for g in wide.values()} == {F32}
    assert {g.dtype for g in low.values()} == {F16}
    for name, g in low.items():
        assert g.any()
        assert torch.equal(g.float(), wide[name])  # what was added up nowhere is the same number
    reduced = fs.reduce_grads({name: g.float() for name, g in low.items()}, spec)
    assert {g.dtype for g in reduced.values()} == {F32}
    same(reduced, fs.grad(loss)(params), "reduced at once")


# --- what is pending is a value ---
Outputs = module_class(
    "Outputs",
    lambda n_in, n_out: {"weight": nn.Parameter(torch.randn(n_out, n_in))},
    lambda self, x: nn.functional.linear(x, self.weight).float().sum(),
)
"""``test_fully_shard_pending_grad.py``: the gradient of each weight is the input."""


ROUNDING = [
    ([("sync", 256), ("pending", 1), ("pending", -256)], {BF16: 1, F32: 1}),
    ([("sync", 3), ("pending", 256), ("pending", 1), ("pending", -256)], {BF16: 3, F32: 4}),
]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("contributions", "expected"), ROUNDING)
def test_native_accumulation_dtypes(contributions: Any, expected: dict[torch.dtype, int], dtype: torch.dtype) -> None:
    """History that is reduced stays exact in float32 beside what is pending; that rounds in the dtype that you add up in.
    The last contribution of torch's test is reduced together with what is pending, which is how it is done here."""
    model = Outputs(1, 2)
    spec = fs.policies.whole(P("shard", precision=Precision(param=BF16), align=1))(model)

    def run(mesh: Mesh, _: Tensor) -> Tensor:
        bound = spec.on(mesh)
        shards = fs.shard({"weight": torch.zeros(2, 1)}, bound)
        pending = {"weight": torch.zeros(2, 1, dtype=dtype)}
        reduced = {"": torch.zeros(1)}
        for kind, value in contributions:
            loss = lambda p: fs.functional_call(model, p, torch.full((1, 1), float(value)), spec=bound)  # noqa: E731
            if kind == "sync":
                reduced = {"": reduced[""] + fs.grad(loss)(shards)[""]}
            else:
                low = {name: t.to(dtype) for name, t in fs.unshard(shards, bound).items()}
                pending = {name: pending[name] + g for name, g in fs.grad(loss)(low).items()}
        assert reduced[""].dtype == F32
        assert pending["weight"].dtype == dtype
        return reduced[""] + fs.reduce_grads(pending, bound)[""]

    assert fs.testing.spmd(run, 2)(torch.zeros(2)).tolist() == [[expected[dtype]]] * 2


@real_ranks(2)
def test_native_storage_and_mutations(rank: int) -> None:
    """Pending gradients are read and changed without any collective, reduced as often as you like, and dropped."""
    model = Outputs(2, 4)
    spec = fs.policies.whole()(model).bound
    full = fs.unshard(fs.shard(model, spec), spec)
    loss = lambda p, value: fs.functional_call(model, p, torch.full((1, 2), float(value)), spec=spec)  # noqa: E731
    expected = torch.zeros(4, 2)
    total = {"weight": torch.zeros(4, 2)}
    with Collectives() as sent:
        for step, value in enumerate((2, 1, 1)):
            for name, g in fs.grad(lambda p: loss(p, value + rank))(full).items():
                total[name] += g
            expected += value + rank
            if step == 0:
                total["weight"].square_()[:, 0].add_(1)
                expected = expected.square()
                expected[:, 0] += 1
            elif step == 1:
                total["weight"].fill_(3 + rank)
                expected.fill_(3 + rank)
            assert torch.equal(total["weight"], expected)
    assert not sent.all
    kept = total["weight"].clone()
    reduced, again = fs.reduce_grads(total, spec), fs.reduce_grads(total, spec)
    assert torch.equal(total["weight"], kept)
    assert torch.equal(reduced[""], again[""])
    assert torch.equal(fs.unshard(reduced, spec)["weight"], torch.full((4, 2), 5.0))  # (3+1) + (3+1+2) over 2
    cleared = fs.reduce_grads({name: torch.zeros_like(g) for name, g in total.items()}, spec)
    assert not any(g.any() for g in cleared.values())
    assert fs.reduce_grads({}, spec) == {}


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(1, 5, bias=False) for _ in range(2))

    def forward(self, x: Tensor, which: str = "both") -> Tensor:
        parts = {"first": self.first, "second": self.second}
        return sum(part(x).float().sum() for name, part in parts.items() if which in (name, "both"))


@real_ranks(4)
def test_native_partial_ownership(rank: int) -> None:
    """HSDP: what is reduced, what is reduced over the slices only, and what is not at all, each by itself: seven together."""
    offsets = (-3.0, -1.0, 1.0, 3.0)
    model = TwoLinear()
    spec, params = shards_of(fs.policies.whole(P("shard", precision=Precision(param=BF16))), model, mesh_of(2, 2))

    def gradient(p: fs.Params, value: float, which: str, **options: Any) -> fs.Params:
        x = torch.full((1, 1), value + offsets[rank])
        return fs.grad(lambda p: fs.functional_call(model, p, (x, which), spec=spec, **options))(p)

    reduced = gradient(params, 4, "both")
    partials = [gradient(params, value, which, reduce_axes=["shard"]) for value, which in ((2, "first"), (3, "second"))]
    partial = {key: partials[0][key] + partials[1][key] for key in params}
    low = {name: t.bfloat16() for name, t in fs.unshard(params, spec).items()}
    pending = gradient(low, 1, "first")
    assert {g.dtype for g in pending.values()} == {BF16}
    assert not pending["second.weight"].any()
    replica = sum(offsets[2 * (rank // 2) : 2 * (rank // 2) + 2]) / 2
    on_slices = fs.param_views(partial, spec)
    for name, value in (("first.weight", 2), ("second.weight", 3)):  # a replica's own mean
        assert torch.equal(on_slices[name], torch.full_like(on_slices[name], value + replica))
    done = fs.reduce_grads(partial, spec, reduce_axes=["replicate"])
    rest = fs.reduce_grads(pending, spec)
    total = fs.unshard({key: reduced[key] + done[key] + rest[key] for key in params}, spec)
    assert all(torch.equal(g, torch.full((5, 1), 7.0)) for g in total.values())
    more = fs.unshard({key: g + reduced[key] + done[key] + rest[key] for key, g in gradient(params, 1, "both").items()}, spec)
    assert all(torch.equal(g, torch.full((5, 1), 8.0)) for g in more.values())
    dropped = fs.unshard(reduced, spec)
    assert all(torch.equal(g, torch.full((5, 1), 4.0)) for g in dropped.values())
