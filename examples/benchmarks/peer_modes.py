"""The modes of peers.py: a training step by funshard and by torch's own data parallel trainers, from a model."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from common import (
    ATTENTION,
    BF16,
    BF16_KEEP,
    CODEC_BF16,
    CODEC_INT8,
    PRODUCTS,
    REDUCE_BF16,
    Block,
    Step,
    checkpointed,
    compared,
    fully_sharded,
    funshard,
    loss_of,
    plain,
    sharded,
)
from torch import Tensor, nn

import funshard as fs
from funshard._compiled.step import compile


def plain_functional(model: nn.Module) -> Step:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, params, (x,)), y)

    step = torch.func.grad_and_value(loss)
    return lambda x, y: step(params, x, y)


def ddp(model: nn.Module) -> Step:
    return plain(nn.parallel.DistributedDataParallel(model))


def fsdp1(model: nn.Module) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return plain(FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")))


def compiled(p: fs.P) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block, p=p)(model).bound
        params = fs.shard(model, spec)
        model.to("meta")

        def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(fs.functional_call(model, params, (x,), spec=spec), y)

        step = compile(fs.grad_and_value(loss))
        return lambda x, y: step(params, x, y)

    return build


def plain_compiled(model: nn.Module) -> Step:
    return plain(torch.compile(model, fullgraph=True))


def fsdp2_compiled(model: nn.Module) -> Step:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, fullgraph=True)
    return fully_sharded()(model)


def fsdp2_adamw(model: nn.Module) -> Step:
    fully_sharded()(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(*, compile_grad: bool = False, compile_step: bool = False) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block)(model).bound
        fused = fs.optim.from_torch(torch.optim.AdamW, fused=True, donate=True)
        init, update = fs.optim.adamw(1e-3, weight_decay=1e-2) if compile_step else fused
        params = fs.shard(model, spec)
        model.to("meta")
        grad = fs.grad_and_value(lambda p, x, y: loss_of(fs.functional_call(model, p, (x,), spec=spec), y))
        grad = compile(grad) if compile_grad else grad

        def train(params: fs.Params, state: object, x: Tensor, y: Tensor) -> tuple:
            grads, value = grad(params, x, y)
            return *update(grads, state, params), value

        train = compile(train, donate_argnums=(0, 1)) if compile_step else train
        known = [params, init(params)]

        def step(x: Tensor, y: Tensor) -> None:
            known[:] = train(*known, x, y)[:2]

        return step

    return build


def norms_apart(model: nn.Module) -> Step:
    policy = fs.policies.full_precision(fs.by_type(Block, p=fs.P("shard", precision=BF16)), nn.LayerNorm)
    return funshard(model, policy(model).bound)


def grouped(size: int) -> Callable[[nn.Module], Step]:
    return lambda model: funshard(model, fs.policies.by_group([Block], size=size)(model).bound)


def in_halves(p: fs.P) -> Callable[[nn.Module], Step]:
    """On a mesh of two halves, as of two machines."""

    def build(model: nn.Module) -> Step:
        mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return funshard(model, fs.by_type(Block, p=p)(model).on(mesh))

    return build


Modes = dict[str, Callable[[nn.Module], Step]]
MODES: Modes = {
    "plain": plain,
    "plain torch.func": plain_functional,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fully_sharded(),
    "FSDP2 keep": fully_sharded(reshard=False),
    "fs": sharded(fs.P("shard")),
    "fs keep": sharded(fs.P("shard", reshard=False)),
    "fs P()": sharded(fs.P()),
    "fs torch.func": sharded(fs.P("shard"), torch.func.grad_and_value),
}
COMPILED: Modes = {
    "plain compiled": plain_compiled,
    "FSDP2 compiled": fsdp2_compiled,
    "fs compiled": compiled(fs.P("shard")),
    "fs units compiled": sharded(fs.P("shard", compile=True)),
    "fs units compiled keep": sharded(fs.P("shard", reshard=False, compile=True)),
    "fs units compiled remat": sharded(fs.P("shard", remat=True, compile=True)),
    "fs keep compiled": compiled(fs.P("shard", reshard=False)),
    "fs compiled remat": compiled(fs.P("shard", remat=True)),
}
REMAT: Modes = {
    "plain remat": checkpointed(plain),
    "FSDP2 remat": checkpointed(fully_sharded()),
    "fs remat": sharded(fs.P("shard", remat=True)),
    "fs torch.func remat": sharded(fs.P("shard", remat=True), torch.func.grad_and_value),
    "FSDP2 save attention": checkpointed(fully_sharded(), ATTENTION),
    "fs save attention": sharded(fs.P("shard", remat=fs.Remat(ATTENTION))),
    "FSDP2 save products": checkpointed(fully_sharded(), PRODUCTS),
    "fs save products": sharded(fs.P("shard", remat=fs.Remat(PRODUCTS))),
}
LOW: Modes = {
    "plain bf16": lambda model: plain(model.bfloat16()),
    "FSDP2 bf16": fully_sharded(precision=BF16),
    "FSDP2 bf16 apart": fully_sharded(precision=BF16, apart=nn.LayerNorm),
    "fs bf16": sharded(fs.P("shard", precision=BF16)),
    "fs bf16 keep": sharded(fs.P("shard", precision=BF16_KEEP)),
    "fs bf16 apart": norms_apart,
    "fs P() bf16": sharded(fs.P(precision=BF16)),
}
REDUCED: Modes = {
    "FSDP2 reduce bf16": fully_sharded(precision=REDUCE_BF16),
    "fs reduce bf16": sharded(fs.P("shard", precision=REDUCE_BF16)),
    "fs codec bf16": sharded(fs.P("shard", precision=CODEC_BF16)),
    "fs codec int8": sharded(fs.P("shard", align=64, precision=CODEC_INT8)),
}
GROUPS: Modes = {
    "FSDP2 by 2": fully_sharded(group=2),
    "FSDP2 by 4": fully_sharded(group=4),
    "fs by 2": grouped(2),
    "fs by 4": grouped(4),
}
HALVES: Modes = {
    "FSDP2 halves": lambda model: fully_sharded(reshard=dist.get_world_size() // 2)(model),
    "fs halves": in_halves(fs.P(("replicate", "shard"), reshard="shard")),
    "fs HSDP": in_halves(fs.P("shard")),
}
UNCHECKED: Modes = {
    "fs unchecked": sharded(fs.P("shard"), check_order=False),
    "fs keep unchecked": sharded(fs.P("shard", reshard=False), check_order=False),
    "fs P() unchecked": sharded(fs.P(), check_order=False),
}
CHECKED: Modes = {
    "fs check": compared(sharded(fs.P("shard"))),
    "fs keep check": compared(sharded(fs.P("shard", reshard=False))),
    "fs P() check": compared(sharded(fs.P())),
}
ADAMW: Modes = {
    "FSDP2 AdamW": fsdp2_adamw,
    "fs AdamW": adamw(),
}
COMPILED |= {"fs compiled + AdamW": adamw(compile_grad=True), "fs compiled AdamW": adamw(compile_step=True)}
ALL = MODES | COMPILED | REMAT | LOW | REDUCED | GROUPS | HALVES | UNCHECKED | CHECKED | ADAMW
