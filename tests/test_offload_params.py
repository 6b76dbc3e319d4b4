"""P(offload="params"): shards, gradients and the optimizer's state rest on the host; values are the same to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from depth import seldom
from hosted import elsewhere
from offloaded import everywhere
from parity import check_parity, numbers
from peer_models import MLP, Net
from ranks import real_ranks
from test_offload import MODELS, equal, p_of
from torch import Tensor

import funshard as fs
from funshard import P
from funshard._wire.host import place_slice
from funshard.compress import _compressors

PARAMS = "params"


@seldom
@real_ranks(2)
def test_everything_else_that_takes_shards(rank: int) -> None:
    """Compiled, checkpointed, visited twice, frozen, whole steps, full parameters and back, other specs."""
    model, x = Net(3), numbers(rank, 0)
    model.first.requires_grad_(False)
    plain = fs.by_type(MLP)(model).bound
    params = fs.shard(model, plain)

    def loss_on(spec: fs.PartitionSpec, times: int = 1) -> Callable[[fs.Params], Tensor]:
        def loss(params: fs.Params) -> Tensor:
            y = x
            for _ in range(times):
                y = fs.functional_call(model, params, (y,), spec=spec)
            return y.square().mean()

        return loss

    def both(spec: fs.PartitionSpec, f: Callable[[fs.PartitionSpec], Any]) -> None:
        equal(f(spec), f(plain))

    with elsewhere() as copies:
        first = fs.by_path(dict.fromkeys(("blocks.0", "blocks.1"), P("shard", offload=PARAMS)))
        half = fs.policies.override(fs.by_type(MLP), first)
        for policy in (fs.by_type(MLP, p=P("shard", offload=PARAMS)), half):
            spec = policy(model).bound
            equal(fs.shard(model, spec), params)
            copies.beside = 0
            both(spec, lambda spec: fs.grad(loss_on(spec, 2))(params))
            # each of the blocks: two forwards, two backwards, and a reduced slice of each; the last one stays between
            blocks = 2 if policy is half else 3
            assert 0 < copies.beside <= 2 * 3 * (blocks + 2), copies.beside
            trained = {key: x for key, x in params.items() if "frozen" not in key}
            frozen = {key: x for key, x in params.items() if "frozen" in key}
            assert frozen
            both(spec, lambda spec: fs.grad(lambda p: loss_on(spec)(fs.combine(p, frozen)))(trained))
            full = fs.unshard(params, spec)
            both(spec, lambda spec: fs.reduce_grads(full, spec))
            both(spec, lambda spec: fs.unshard(params, spec, rank0_only=True))
            both(spec, lambda spec: fs.shard(full if rank == 0 else None, spec, src=0))
            both(spec, lambda spec: fs.reshard(params, spec, plain))
            both(spec, lambda spec: fs.reshard(params, plain, spec))
            both(spec, lambda spec: fs.param_views(params, spec))
            both(spec, lambda spec: fs.optim.clip_by_global_norm(params, spec, 0.1))
            both(spec, lambda spec: unscaled(spec, params))
        if torch.__version__ >= "2.13":  # see limits.md
            torch._dynamo.reset()
            equal(fs.compile(fs.grad(loss_on(spec)), backend="aot_eager")(params), fs.grad(loss_on(plain))(params))


@real_ranks(4)
def test_hybrid(rank: int) -> None:
    """Two axes, bound one after the other: a slice leaves once it is reduced over both."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, x = Net(3), numbers(rank, 0)
    call = lambda p, spec, **options: fs.functional_call(model, p, (x,), spec=spec, **options).square().mean()  # noqa: E731
    for p in (
        P("shard"),
        P("shard", precision=fs.Precision(param=torch.float32, reduce=torch.float32)),
        P(("replicate", "shard")),
    ):
        plain = fs.by_type(MLP, p=p)(model).on(mesh)
        params = fs.shard(model, plain)
        with elsewhere():
            spec = fs.by_type(MLP, p=P(p.axis, precision=p.precision, offload=PARAMS))(model).on(mesh)
            equal(fs.grad(call)(params, spec), fs.grad(call)(params, plain))
            if p.axis == "shard" and not p.precision:
                first, expected = (fs.grad(call)(params, s, reduce_axes="shard") for s in (spec, plain))
                equal(
                    fs.reduce_grads(first, spec, reduce_axes="replicate"),
                    fs.reduce_grads(expected, plain, reduce_axes="replicate"),
                )


def test_simulated_ranks() -> None:
    model = MODELS["noisy"][0]()
    xs = torch.stack([numbers(r, 0) for r in range(2)])
    params = {name: p.detach() for name, p in model.named_parameters()}

    def derivatives(to: str | None) -> Any:
        spec = fs.by_type(MLP, type(model.blocks[0]), p=P("shard", offload=to))(model)

        def one(mesh: Any, x: Tensor) -> Any:
            here = spec.on(mesh)
            loss = lambda p: fs.functional_call(model, p, (x,), spec=here).square().mean()  # noqa: E731
            shards = fs.shard(params, here)
            return torch.func.grad(loss)(shards), fs.hvp(loss, shards, {k: v.cos() for k, v in shards.items()})

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)
            return fs.testing.spmd(one, 2)(xs)

    expected = derivatives(None)
    with elsewhere() as copies:
        equal(derivatives(PARAMS), expected)
    assert copies.nodes > 6


# --- around the step ---
def unscaled(spec: fs.PartitionSpec, grads: fs.Params) -> Any:
    init, update = fs.loss_scale.dynamic(spec, scale=4.0)
    return update(grads, init())


COMPRESSORS = {
    "exact": fs.compress.exact(),
    "unreduced": fs.compress.exact(()),
    "quantize": fs.compress.quantize(5),
    "powersgd": fs.compress.powersgd(2, min_compression_rate=0.5),
    "post local": fs.compress.switch(1, fs.compress.exact(), fs.compress.exact(())),
}


@real_ranks(2)
def test_averages_and_compressors_on_real_ranks(rank: int) -> None:
    """The bits of the same units without offload, whichever of the two rests on the host, or both."""
    model, by = Net(3), torch.tensor(rank + 1.0).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    full, grads = ({name: p + x * p.cos() for name, p in params.items()} for x in (by, by.sqrt()))  # that drifted apart

    def averaged_and_compressed(offload: Any) -> Any:
        """Of a block that is split, one that is not, and the rest."""
        policy = fs.by_path({"blocks.0": P("shard", offload=offload), "blocks.1": P(offload=offload)})
        spec = policy(model).bound
        shards = {key: x + by for key, x in fs.shard(model, spec).items()}
        (init, update), out = fs.averaging.periodic(spec, 2), []
        state = init()
        for _ in range(2):
            shards, state = update(shards, state)
            out.append((shards, state, fs.averaging.average(full, spec)))
        for compressor in COMPRESSORS.values():
            passed = compressor.init(spec.bound)
            for _ in range(2):
                reduced, passed = compressor.reduce(grads, passed, spec)
                out.append((reduced, passed))
        return out

    expected = averaged_and_compressed(None)
    assert len(expected) == 2 + 2 * len(COMPRESSORS)
    with elsewhere(), everywhere():
        for offload in (PARAMS, "activations", (PARAMS, "activations")):
            equal(averaged_and_compressed(offload), expected)
        with mock.patch.object(fs.collectives.Mesh, "device_type", "another"):  # than that of the shards
            equal(averaged_and_compressed(PARAMS), expected)


@pytest.mark.parametrize("axis", ["shard", None])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressed_gradients_are_where_the_shards_are(monkeypatch: pytest.MonkeyPatch, name: str, axis: str | None) -> None:
    """With "meta" in the place of the host."""
    monkeypatch.setattr(_compressors, "HOST", torch.device("meta"))
    model, compressor = Net(2), COMPRESSORS[name]
    spec = fs.by_path({"blocks.0": P(axis, offload=PARAMS), "blocks.1": P(axis)})(model)
    with elsewhere():
        grads = {name: p.detach() for name, p in model.named_parameters()}
        shards, _ = compressor.reduce(grads, compressor.init(spec.bound), spec)
    assert {key: x.device.type for key, x in shards.items()} == {"": "cpu", "blocks.0": "meta", "blocks.1": "cpu"}


# --- the update ---
def test_updates_run_where_the_shards_are() -> None:
    with pytest.raises(ValueError, match="from_torch: an update runs where the shards are: expected no device="):
        fs.optim.from_torch(torch.optim.SGD, device="cpu", lr=0.1)


# --- what is refused ---
def test_a_shard_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 says of CPUOffloadPolicy: "Found following parameters on non-CPU device"."""
    monkeypatch.setattr(fs.collectives.Mesh, "device", torch.device("cuda", 0))
    model = Net(2)
    spec = fs.by_type(MLP, p=P("shard", offload=PARAMS))(model).on({"shard": 1})

    class There(Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

    params = {key: torch.zeros(spec.shard_numel(spec.by_key[key]), dtype=torch.float64) for key in spec.by_key}
    params["blocks.1"] = params["blocks.1"].as_subclass(There)
    message = r"unit 'blocks\.1' has P\(offload=\"params\"\): expected its shard on the host, .* to cuda:0, got it on cuda:0; "
    for run in (
        lambda: fs.functional_call(model, params, (numbers(0, 0),), spec=spec),
        lambda: fs.unshard(params, spec),
        lambda: fs.param_views(params, spec, rank=0),
        lambda: fs.unshard(params, spec),
    ):
        with pytest.raises(ValueError, match=message):
            run()
    monkeypatch.setattr(fs.collectives.Mesh, "device", None)
    whole = {name: p.detach().as_subclass(There) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"expected a mesh that says on which device it is used, got sizes \{'shard': 1\}"):
        place_slice(next(iter(whole.values())), spec.units[1], spec.bound_mesh)


# --- the peer's rows of CPU offload (FSDP2's CPUOffloadPolicy) ---
@pytest.mark.parametrize("which", ["sharded", "kept"])
@real_ranks(2)
def test_peer_train_parity(rank: int, which: str) -> None:
    """test_train_parity_*_cpu_offload: losses, gradients and parameters are those of the averaged plain run, for five steps."""
    with elsewhere() as copies:
        spec = fs.by_type(MLP, p=p_of(which, offload=PARAMS))(Net(3)).bound
        torch.manual_seed(0)
        check_parity(rank, Net(3), spec)
        assert copies.beside > 5 * 3


@real_ranks(2)
def test_grad_acc_cpu_offload(rank: int) -> None:
    """With test_gradient_accumulation[offload]: reduced at each micro-batch, or once."""
    torch.manual_seed(0)
    model = Net(3)
    with elsewhere():
        spec = fs.by_type(MLP, p=P("shard", offload=PARAMS))(model).bound
        shards = fs.shard(model, spec)
        loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).square().mean()  # noqa: E731
        xs = [numbers(rank, i) for i in range(3)]
        each_ = [fs.grad(loss)(shards, x) for x in xs]
        full = fs.unshard(shards, spec)
        once = [fs.grad(loss)(full, x) for x in xs]
        total = {key: sum(g[key] for g in each_) for key in shards}
        summed = {name: sum(g[name] for g in once) for name in full}
        for key, g in fs.reduce_grads(summed, spec).items():
            torch.testing.assert_close(g, total[key], rtol=1e-9, atol=1e-12)
            assert g.device.type == "cpu"


@real_ranks(2)
def test_dp_state_dict_cpu_offload(rank: int) -> None:
    """What is loaded has to be on the host, and trains on from there."""
    torch.manual_seed(0)
    model, x = Net(2), numbers(rank, 0)
    with elsewhere():
        spec = fs.by_type(MLP, p=P("shard", offload=PARAMS))(model).bound
        init, update = fs.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)
        loss = lambda p: fs.functional_call(model, p, (x,), spec=spec).square().mean()  # noqa: E731
        params = fs.shard(model, spec)
        state = init(params)
        params, state = update(fs.grad(loss)(params), state, params)
        full = fs.unshard(params, spec, rank0_only=True, offload_to_cpu=True)
        loaded = fs.shard(full if rank == 0 else None, spec, src=0)
        equal(loaded, params)
        equal(update(fs.grad(loss)(loaded), state, loaded), update(fs.grad(loss)(params), state, params))


@real_ranks(2)
def test_together_with_activations(rank: int) -> None:
    """Params and activations on the host at once; the order of a spec; full parameters in the place of a shard."""
    torch.manual_seed(0)
    model, x = Net(3), numbers(rank, 0)
    plain = fs.by_type(MLP)(model).bound
    params = fs.shard(model, plain)
    call = lambda p, spec: fs.functional_call(model, p, (x,), spec=spec).square().mean()  # noqa: E731
    with elsewhere() as copies:
        spec = fs.by_type(MLP, p=P("shard", offload={PARAMS, "activations"}))(model).bound
        order = fs.trace_order(model, spec, x)
        assert order == fs.trace_order(model, plain, x)
        with everywhere() as activations:
            equal(fs.grad(call)(params, spec.ordered(order)), fs.grad(call)(params, plain))
        assert min(copies.beside, activations.out) > 3
        mixed = {key: x for key, x in params.items() if key != "blocks.0"} | fs.unshard(params, spec, units=["blocks.0"])
        equal(fs.grad(call)(mixed, spec), fs.grad(call)(mixed, plain))
