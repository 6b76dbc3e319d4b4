"""Some AdamW steps of a small GPT on four real ranks: FSDP2's, DDP's and FSDP1's of the same mesh and precision."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from depth import at_most, depth, each, mark_seldom
from parity import next_token, sharded_call, tokens
from peer_models import Block, Transformer
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import funshard as fs
from funshard import P, Precision

BF16, F32 = torch.bfloat16, torch.float32
STEPS = depth(2, 3)


def gpt() -> Transformer:
    torch.manual_seed(0)
    return Transformer(depth(2, 3), 23, 18).float()


def loss_of(call: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    return next_token(lambda ids: call(ids).float(), tokens(rank, step, 23))


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def by_torch(model: nn.Module, rank: int) -> list[float]:
    """The losses of a module that reduces its gradients by itself."""
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_funshard(model: nn.Module, spec: fs.PartitionSpec, rank: int) -> tuple[fs.Params, list[float]]:
    """The full parameters afterwards, and the losses."""
    params, losses = fs.shard(model, spec), []
    optimizer = adamw(params.values())

    for step in range(STEPS):
        grads, value = fs.grad_and_value(lambda p: loss_of(sharded_call(model, p, spec), rank, step))(params)
        for key, p in params.items():
            assert grads[key].dtype == p.dtype
            p.grad = grads[key]
        optimizer.step()
        losses.append(value.item())
    return fs.unshard(params, spec), losses


PRECISIONS: dict[str, tuple[Precision | None, MixedPrecisionPolicy, float]] = {
    "float32": (None, MixedPrecisionPolicy(), 0),
    "bf16": (Precision(param=BF16), MixedPrecisionPolicy(BF16, BF16), 1e-4),
    "bf16, reduced in float32": (Precision(param=BF16, reduce=F32), MixedPrecisionPolicy(BF16, F32), 0),
    "float32, reduced in bf16": (Precision(reduce=BF16), MixedPrecisionPolicy(reduce_dtype=BF16), 1e-4),
    "bf16, output in float32": (Precision(param=BF16, reduce=F32, output=F32), MixedPrecisionPolicy(BF16, F32, F32), 0),
}
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "fsdp": ((4,), ("shard",)),
    "hsdp": ((2, 2), ("replicate", "shard")),
}


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: float) -> None:
    """Equal but for float32, and on average but for so much: Adam makes a step of the rounding of a small gradient."""
    difference = torch.cat([(got[name] - p).abs().flatten() for name, p in expected.items()])
    assert difference.max() < 1e-5 or 0 < difference.mean() < rounding, (difference.mean(), difference.max())


def fsdp2(rank: int, mesh_name: str, name: str, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", MESHES[mesh_name][0], mesh_dim_names=MESHES[mesh_name][1])
    precision, policy, rounding = PRECISIONS[name]
    reference = gpt()
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
    for block in reference.layers:
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=reshard)
    fully_shard(reference, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    losses = by_torch(reference, rank)
    expected = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in reference.state_dict().items()}
    model = gpt()
    p = P("shard", reshard=reshard, precision=precision)
    blocks = dataclasses.replace(p, precision=precision and dataclasses.replace(precision, output=None))
    spec = fs.policies.override(fs.policies.whole(p), fs.by_path({"layers.*": blocks}))(model).on(mesh)
    got, own = by_funshard(model, spec, rank)
    torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=0, atol=20 * rounding or 1e-5)
    compare(got, expected, rounding)


@at_most(1)
@each(name=mark_seldom(PRECISIONS, *[*PRECISIONS][:3]), mesh_name=MESHES)
def test_fsdp2(gloo4: Pool, mesh_name: str, name: str) -> None:
    """fully_shard on the blocks and the root."""
    gloo4.run(fsdp2, mesh_name, name, True)


def test_fsdp2_without_reshard(gloo4: Pool) -> None:
    gloo4.run(fsdp2, "hsdp", "bf16, reduced in float32", False)


@pytest.mark.parametrize("mesh_name", MESHES)
@real_ranks(4)
def test_ddp(rank: int, mesh_name: str) -> None:
    """P() over one axis or over two."""
    mesh = init_device_mesh("cpu", MESHES[mesh_name][0], mesh_dim_names=MESHES[mesh_name][1])
    reference = nn.parallel.DistributedDataParallel(gpt())
    losses = by_torch(reference, rank)
    model = gpt()
    got, own = by_funshard(model, fs.by_type(Block, p=P())(model).on(mesh), rank)
    torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=0, atol=1e-5)
    compare(got, reference.module.state_dict(), 0)


FSDP1: dict[str, tuple[P, ShardingStrategy, MixedPrecision | None]] = {
    "full": (P("shard"), ShardingStrategy.FULL_SHARD, None),
    "grad op": (P("shard", reshard=False), ShardingStrategy.SHARD_GRAD_OP, None),
    "none": (P(), ShardingStrategy.NO_SHARD, None),
    "hybrid": (P("shard"), ShardingStrategy.HYBRID_SHARD, None),
    "bf16": (
        P("shard", precision=Precision(param=BF16, reduce=F32)),
        ShardingStrategy.FULL_SHARD,
        MixedPrecision(param_dtype=BF16, reduce_dtype=F32, cast_forward_inputs=True),
    ),
    "bf16 hybrid": (
        P("shard", precision=Precision(param=BF16)),
        ShardingStrategy.HYBRID_SHARD,
        MixedPrecision(param_dtype=BF16, cast_forward_inputs=True),
    ),
}


@pytest.mark.parametrize("name", mark_seldom(FSDP1, *[*FSDP1][:3]))
@real_ranks(4)
def test_fsdp1(rank: int, name: str) -> None:
    p, strategy, mixed = FSDP1[name]
    shape, names = MESHES["hsdp" if "hybrid" in name else "fsdp"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated in favour of DDP
        reference = FullyShardedDataParallel(
            gpt(),
            device_mesh=mesh,
            sharding_strategy=strategy,
            mixed_precision=mixed,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    losses = by_torch(reference, rank)
    with FullyShardedDataParallel.summon_full_params(reference):
        expected = copy.deepcopy({n.replace("_fsdp_wrapped_module.", ""): p.detach() for n, p in reference.named_parameters()})
    model = gpt()
    got, own = by_funshard(model, fs.by_type(Block, p=p)(model).on(mesh), rank)
    torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=0, atol=1e-5 if mixed is None else 2e-2)
    compare(got, expected, 1e-4 if name == "bf16 hybrid" else 0)
