"""Optimizers of matrices: equal to the unsharded ones on every mesh, each matrix worked on once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matrix_peers as peers
import pytest
import torch
from depth import at_most, each, every, mark_seldom
from ranks import Pool
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.testing import assert_close

import funshard as fs
from funshard.testing import spmd

STEPS = 10
ADAMW: dict[str, float] = {"lr": 0.05, "weight_decay": 0.1}


def model() -> nn.Module:
    """Embeddings, biases, a norm, a head, tall, wide and square matrices, some of one shape."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    return nn.Sequential(nn.Embedding(11, 6), block, nn.Linear(8, 3), nn.Linear(3, 11)).double()


MODEL = model()
WANTED = {"1.0.weight", "1.2.weight", "1.3.weight", "2.weight"}
GRADS = [
    {name: torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in MODEL.named_parameters()}
    for g in (torch.Generator().manual_seed(t) for t in range(STEPS))
]
PARAMS = {name: p.detach() for name, p in MODEL.named_parameters()}

OPTIMIZERS: dict[str, tuple[Any, peers.Peer]] = {
    "muon": (lambda where, **o: fs.optim.muon(where, dtype=torch.float64, **ADAMW, **o), peers.muon()),
    "muon of its own": (
        lambda where, **o: fs.optim.muon(
            where, dtype=torch.float64, momentum=0.8, nesterov=False, adjust_lr="match_rms_adamw", **ADAMW, **o
        ),
        peers.muon(mu=0.8, nesterov=False, adjust="match_rms_adamw"),
    ),
    "shampoo": (lambda where, **o: fs.optim.shampoo(where, eps=1e-2, **ADAMW, **o), peers.shampoo()),
    "shampoo every 3": (
        lambda where, **o: fs.optim.shampoo(where, eps=1e-2, every=3, decay=0.9, momentum=0.5, **ADAMW, **o),
        peers.shampoo(every=3, beta=0.9, mu=0.5),
    ),
    "soap": (lambda where, **o: fs.optim.soap(where, betas=(0.9, 0.8), every=3, **ADAMW, **o), peers.soap()),
    "soap of one side": (
        lambda where, **o: fs.optim.soap(where, betas=(0.9, 0.8), every=3, max_size=6, **ADAMW, **o),
        peers.soap(max_size=6),
    ),
}
SQUARE = {"1.2.weight", "1.3.weight"}
"""Of the others the larger factor has no inverse at first, and in its null space SOAP's basis is any."""
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "alone": ({"shard": 1}, "shard"),
    "fsdp": ({"shard": 2}, "shard"),
    "3 ranks": ({"shard": 3}, "shard"),
    "8 ranks": ({"shard": 8}, "shard"),
    "ddp": ({"shard": 2}, None),
    "hsdp": ({"replicate": 2, "shard": 2}, "shard"),
    "two axes": ({"a": 2, "b": 2}, ("b", "a")),
}


POLICIES = {"whole": fs.policies.whole(), "always": fs.policies.always(), "linear ddp": fs.by_type(nn.Linear, p=fs.P())}


def spec_on(mesh: Any, axis: Any) -> fs.PartitionSpec:
    return fs.by_type(nn.Sequential, nn.Linear, p=fs.P(axis))(MODEL).on(mesh)


def matrices_on(spec: fs.PartitionSpec, optimizer: str) -> fs.optim._matrices.Matrices:
    hidden = fs.optim.hidden(MODEL, "3")
    return fs.optim.matrices(spec, select=lambda name, p: hidden(name, p) and name in wanted(optimizer))


def collect(known: fs.optim._matrices.Matrices, tree: fs.Params) -> fs.Params:
    """The matrices of the units in a tree, whole on their owners: empty elsewhere, zeros on simulated ranks."""
    parts = {name: known._select(key, tree[key], name) for key in tree for name in known._names_in(key)}
    return {name: x for batch in known._batches_of(tree) for name, x in batch.collect(parts)().items()}


def spread(known: fs.optim._matrices.Matrices, whole: fs.Params) -> fs.Params:
    """The slices of whole matrices, with zeros for all other elements: the inverse and the transpose of `collect`."""
    keys = dict.fromkeys(known.by_name[name].unit.key for name in whole)
    parts = {name: [x] for batch in known._batches_of(keys) for name, x in batch.spread(whole)().items()}
    own = {key: {name: parts[name] for name in known._names_in(key)} for key in keys}
    numels = {key: known.spec.shard_numel(known.spec.by_key[key]) for key in keys}
    return {key: known._join(key, some, next(iter(some.values()))[0].new_zeros(numels[key])) for key, some in own.items()}


def wanted(optimizer: str) -> set[str]:
    return SQUARE if optimizer == "soap" else WANTED


def expected(optimizer: str) -> fs.Params:
    return peers.trained(PARAMS, GRADS, OPTIMIZERS[optimizer][1], wanted(optimizer), **ADAMW)


def ours(mesh: Any, axis: Any, optimizer: str, **options: Any) -> fs.Params:
    """Full parameters after all steps."""
    spec = spec_on(mesh, axis)
    params = fs.shard(PARAMS, spec)
    init, update = OPTIMIZERS[optimizer][0](matrices_on(spec, optimizer), **options)
    state = init(params)
    for grads in GRADS:
        params, state = update(fs.shard(grads, spec), state, params)
    return fs.unshard(params, spec)


def test_what_is_hidden() -> None:
    """Neither embeddings nor heads, nor what is tied to one; a wrong name is an error."""
    found = fs.optim.matrices(spec_on({"shard": 1}, "shard"), select=fs.optim.hidden(MODEL, "3"))
    assert set(found.by_name) == WANTED
    with pytest.raises(ValueError, match="hidden: 'lm_head' is no module of the model: expected paths such as"):
        fs.optim.hidden(MODEL, "lm_head")
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False))
    tied[2].weight = tied[0].weight
    assert set(fs.optim.matrices(fs.policies.whole()(tied), select=fs.optim.hidden(tied)).by_name) == {"1.weight"}


@at_most(1)
@each(mesh=MESHES, optimizer=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_equal_to_the_unsharded_one_on_simulated_ranks(optimizer: str, mesh: str) -> None:
    sizes, axis = MESHES[mesh]
    ranks = math.prod(sizes.values())
    run = spmd(lambda mesh, _: ours(mesh, axis, optimizer), sizes)
    got = run(torch.zeros(ranks))
    for name, want in expected(optimizer).items():
        for rank in range(ranks):
            assert_close(got[name][rank], want, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def on_ranks(rank: int, sizes: dict[str, int], axis: Any, optimizer: str, options: dict[str, Any]) -> fs.Params:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return ours(mesh, axis, optimizer, **options)


@at_most(1)
@each(donate=[False, True], mesh=["fsdp", "ddp", "hsdp", "two axes"], optimizer=OPTIMIZERS)
def test_equal_to_the_unsharded_one_on_real_ranks(gloo2: Pool, gloo4: Pool, optimizer: str, mesh: str, donate: bool) -> None:
    sizes, axis = MESHES[mesh]
    pool = gloo4 if math.prod(sizes.values()) == 4 else gloo2
    want = expected(optimizer)
    for got in pool.run(on_ranks, sizes, axis, optimizer, {"donate": donate}):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


def saved_in_the_middle(rank: int, sizes: dict[str, int], axis: Any, optimizer: str, path: str) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    spec = spec_on(mesh, axis)
    params = fs.shard(PARAMS, spec)
    init, update = OPTIMIZERS[optimizer][0](matrices_on(spec, optimizer))
    state = init(params)
    for grads in GRADS[: STEPS // 2]:
        params, state = update(fs.shard(grads, spec), state, params)
    fs.checkpoint.save(path, {"params": params, "opt": state}, spec)


def loaded_in_the_middle(
    rank: int, sizes: dict[str, int], axis: Any, policy: str, optimizer: str, path: str, like: bool
) -> fs.Params:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    spec = POLICIES[policy](MODEL).on(mesh)
    init, update = OPTIMIZERS[optimizer][0](matrices_on(spec, optimizer))
    params = fs.shard({name: torch.zeros_like(p) for name, p in PARAMS.items()}, spec)
    state = fs.checkpoint.load(path, spec, like={"params": params, "opt": init(params)} if like else None)
    params, state = state["params"], state["opt"]
    assert all(isinstance(unit, fs.optim._by_matrix.MatrixState) for unit in state.values())
    for grads in GRADS[STEPS // 2 :]:
        params, state = update(fs.shard(grads, spec), state, params)
    return fs.unshard(params, spec)


@at_most(1)
@each(like=[False, True], policy=POLICIES)
@every(mesh=["fsdp", "hsdp", "two axes"], optimizer=mark_seldom(OPTIMIZERS, *[*OPTIMIZERS][::2]))
def test_another_world_size_in_the_middle(
    gloo2: Pool, gloo4: Pool, tmp_path: Path, optimizer: str, mesh: str, policy: str, like: bool
) -> None:
    """Saved on four ranks (or two), loaded on two (or four) with another policy: what was not interrupted, to rounding."""
    sizes, axis = MESHES[mesh]
    first, second = (gloo4, gloo2) if math.prod(sizes.values()) == 4 else (gloo2, gloo4)
    path = str(tmp_path / "step_5")
    first.run(saved_in_the_middle, sizes, axis, optimizer, path)
    other = {"shard": 2} if second is gloo2 else {"shard": 4}
    want = expected(optimizer)
    for got in second.run(loaded_in_the_middle, other, "shard", policy, optimizer, path, like):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


# --- your own, and what goes wrong in it ---


def test_other_state_of_vectors() -> None:
    """What only some parameters have in their own shape stays with the owner: a column's too, as of torch's Adafactor."""
    column = nn.Linear(1, 5).double()
    spec = fs.policies.whole()(column).on({"shard": 1})
    params, want = fs.shard(column, spec), torch.optim.Adafactor(column.parameters())
    init, update = fs.optim.adafactor(0.01, spec)
    new, _ = update(params, init(params), params)
    for p in column.parameters():
        p.grad = p.detach().clone()
    want.step()
    assert_close(fs.unshard(new, spec), {name: p.detach() for name, p in column.named_parameters()}, rtol=1e-12, atol=1e-12)


def test_an_update_that_raises_in_the_middle() -> None:
    """Nothing has happened; or what was donated, which is half written, is gone."""
    calls: list[int] = []

    def step(grad: Tensor, state: Any, param: Tensor) -> tuple[Tensor, Any]:
        calls.append(0)
        if len(calls) % 4 == 0:
            raise RuntimeError("the fourth")
        return param - grad, {"momentum": grad}

    spec = spec_on({"shard": 1}, "shard")
    everything = fs.optim.matrices(spec, select=lambda name, param: True)
    rest = fs.optim.from_torch(torch.optim.AdamW)
    for donate in (False, True):
        init, update = fs.optim.by_matrix(
            lambda p: {"momentum": torch.zeros_like(p)}, step, everything, fallback=rest, donate=donate
        )
        params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
        state = init(params)
        calls.clear()
        with pytest.raises(RuntimeError, match="the fourth"):
            update(grads, state, params)
        for x in (*params.values(), *(x for unit in state.values() for x in unit.slices.values())):
            if donate:
                with pytest.raises(RuntimeError, match="donated"):
                    x.sum()
        if not donate:
            assert_close(fs.unshard(params, spec), PARAMS, rtol=0, atol=0)
            assert not any(x.any() for unit in state.values() for x in unit.slices.values())


def test_a_rest_that_writes_alone_is_refused() -> None:
    """The parameters that were given, and are to stay, would have new biases."""
    spec = spec_on({"shard": 1}, "shard")
    for fused in (False, True):
        params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
        rest = fs.optim.from_torch(torch.optim.AdamW, donate=True, fused=fused)
        init, update = fs.optim.muon(matrices_on(spec, "muon"), fallback=rest)
        with pytest.raises(ValueError, match=r"fallback: it has written into params\['.*'\]: expected donate=True of both"):
            update(grads, init(params), params)


def test_memory_that_would_be_written_twice_is_refused() -> None:
    """With donate, before anything is sent: a gradient, a slot or a shard in the memory of another."""
    spec = spec_on({"shard": 1}, "shard")
    init, update = fs.optim.muon(matrices_on(spec, "muon"), donate=True)
    params = fs.shard(PARAMS, spec)
    state, grads = init(params), fs.shard(GRADS[0], spec)
    key = next(key for key, unit in state.items() if unit.slices)
    slices = {"momentum_buffer": params[key]}
    for given in ((params, state), (grads, {**state, key: state[key]._replace(slices=slices)})):
        with pytest.raises(ValueError, match=r"share memory, which donate=True writes: expected tensors of their own"):
            update(*given, params)
    assert_close(fs.unshard(params, spec), PARAMS, rtol=0, atol=0)


def test_the_state_of_another_optimizer_is_refused() -> None:
    """Also where both have momentum alone in slices, and where it is of other matrices."""
    spec = spec_on({"shard": 1}, "shard")
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    every = {name: make(matrices_on(spec, name)) for name, (make, _) in OPTIMIZERS.items()}
    before = {key: x.clone() for key, x in params.items()}
    for mine, other in (("muon", "shampoo"), ("shampoo", "muon"), ("soap", "muon"), ("muon", "soap of one side")):
        with pytest.raises(ValueError, match=r"state of unit '.*expected .*was it made"):
            every[mine][1](grads, every[other][0](params), params)
    with pytest.raises(TypeError, match="expected a MatrixState, got UnitState; make it by init"):
        every["muon"][1](grads, fs.optim.from_torch(torch.optim.AdamW)[0](params), params)
    assert_close(params, before, rtol=0, atol=0)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "shape": (lambda p: {}, lambda g, s, p: (p.mT, {}), r"the update of a matrix \[8, 6\]: expected \[8, 6\] .*, got \[6, 8\]"),
    "dtype": (lambda p: {}, lambda g, s, p: (p.float(), {}), "expected .* torch.float64, got .* torch.float32"),
    "state": (lambda p: {"m": p}, lambda g, s, p: (p, {}), "the new state of .*: expected {'m': .*}, as before, got {}"),
    "its shape": (lambda p: {"m": p}, lambda g, s, p: (p, {"m": p[0]}), "the new state of .*: expected"),
    "no pair": (lambda p: {}, lambda g, s, p: p, r"expected \(new param, new state\), got Tensor"),
    "no dict": (lambda p: p, lambda g, s, p: (p, {}), "init: expected a dict of tensors"),
    "values": (lambda p: {"m": torch.tensor(p.sum().item())}, lambda g, s, p: (p, s), "init runs on a meta tensor first"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_update_is_refused_where_it_is_made(wrong: str) -> None:
    """On all ranks, before anything is sent: alone on an owner it would leave the others waiting."""
    init, update, message = WRONG[wrong]
    where = matrices_on(spec_on({"shard": 4}, "shard"), "muon")
    with pytest.raises((ValueError, TypeError), match=message):
        fs.optim.by_matrix(init, update, where, fallback=fs.optim.from_torch(torch.optim.AdamW))
    with pytest.raises(TypeError, match=r"fallback: expected \(init, update\), such as"):
        fs.optim.muon(where, fallback=torch.optim.AdamW)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mesh", ["alone", "ddp"])
def test_an_update_that_writes_changes_nothing_of_the_callers(gloo2: Pool, mesh: str) -> None:
    sizes, axis = MESHES[mesh]
    if mesh == "ddp":
        assert all(gloo2.run(written_by_an_update, sizes, axis))
    else:
        assert written_by_an_update(0, sizes, axis)


def written_by_an_update(rank: int, sizes: dict[str, int], axis: Any) -> bool:
    mesh = (
        init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if len(sizes) < sum(sizes.values())
        else sizes
    )
    spec = spec_on(mesh, axis)

    def update(g: Tensor, s: Any, p: Tensor) -> tuple[Tensor, Any]:
        return p.sub_(g.mul_(2)), {"m": s["m"].add_(1)}

    rest = fs.optim.from_torch(torch.optim.AdamW)
    begin, update_all = fs.optim.by_matrix(
        lambda p: {"m": torch.zeros_like(p)}, update, matrices_on(spec, "muon"), fallback=rest
    )
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    state = begin(params)
    kept = [{key: x.clone() for key, x in tree.items()} for tree in (params, grads)]
    new, after = update_all(grads, state, params)
    assert_close([params, grads], kept, rtol=0, atol=0)
    assert not any(x.any() for unit in state.values() for x in unit.slices.values())
    full, want = fs.unshard(new, spec), {name: PARAMS[name] - 2 * GRADS[0][name] for name in WANTED}
    return all(torch.allclose(full[name], x) for name, x in want.items()) and any(x.slices for x in after.values())
