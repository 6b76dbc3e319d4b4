"""The modes of daily.py: norms, updates, unequal steps, samples and schedules, by funshard and by torch's own."""

import contextlib
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from common import Block, Step, fully_sharded, loss_of
from measured import Build
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import BatchSampler, DistributedSampler

import funshard as fs

SAMPLES, BATCH, STEPS = 1_000_000, 64, 1000


def shards_of(model: nn.Module, **options: Any) -> tuple[fs.PartitionSpec, fs.Params, fs.Params]:
    """The spec, and slices that stand for the parameters and their gradients."""
    spec = fs.by_type(Block, p=fs.P("shard", **options))(model).bound
    params = fs.shard(model, spec)
    model.to("meta")
    return spec, params, {key: 1e-3 * x for key, x in fs.random_like(params, spec, seed=0).items()}


def parameters_of_fsdp2(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, with gradients."""
    fully_sharded()(model)
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return dict(model.named_parameters())


# --- norms ---


def norms_of_fsdp2(norms: Callable[[dict[str, Tensor]], object]) -> Build:
    def build(model: nn.Module) -> Step:
        grads = {name: p.grad for name, p in parameters_of_fsdp2(model).items() if p.grad is not None}
        return lambda x, y: norms(grads)

    return build


def norms(model: nn.Module) -> Step:
    spec, _, grads = shards_of(model)
    return lambda x, y: fs.optim.norms(grads, spec)


# --- updates ---

Pair = tuple[Callable[..., Any], Callable[..., Any]]
TorchOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
ADAMW = fs.optim.from_torch(torch.optim.AdamW, fused=True, donate=True)
TORCH_ADAMW = functools.partial(torch.optim.AdamW, fused=True)


def update_fsdp2(optimizer: TorchOptimizer, *, scaled: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        own = optimizer(parameters_of_fsdp2(model).values())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9, enabled=scaled)
        scaler.scale(torch.ones(()))

        def step(x: Tensor, y: Tensor) -> None:
            scaler.step(own)
            scaler.update()

        return step

    return build


def update(make: Callable[[fs.PartitionSpec], Pair], **options: Any) -> Build:
    def build(model: nn.Module) -> Step:
        spec, params, grads = shards_of(model, **options)
        init, update = make(spec)
        known = [params, init(params)]

        def step(x: Tensor, y: Tensor) -> object:
            known[:] = update(grads, known[1], known[0])
            return known[1]

        return step

    return build


def update_slices(optimizer: TorchOptimizer) -> Build:
    """An optimizer of torch's or of another package, on the slices as its parameters."""

    def build(model: nn.Module) -> Step:
        _, params, grads = shards_of(model, align=256)
        leaves = {key: nn.Parameter(p) for key, p in params.items()}
        for key, p in leaves.items():
            p.grad = grads[key]
        one = optimizer(leaves.values())

        def step(x: Tensor, y: Tensor) -> object:
            one.step()
            return dict(one.state)

        return step

    return build


def eight_bits() -> dict[str, Build]:
    """The optimizers of bitsandbytes and torchao, if they are installed."""
    found: dict[str, Build] = {}
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        found["bitsandbytes"] = update_slices(lambda leaves: bitsandbytes.optim.AdamW8bit(leaves))
    if importlib.util.find_spec("torchao"):
        from torchao.optim import AdamW8bit

        found["torchao"] = update_slices(lambda leaves: AdamW8bit(leaves))
    return found


RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], fs.optim.Optimizer]] = {
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, fs.optim.sgd(1e-3, momentum=0.9)),
    "AdamW": (torch.optim.AdamW, {}, fs.optim.adamw(1e-3, weight_decay=1e-2)),
    "RMSprop": (torch.optim.RMSprop, {}, fs.optim.rmsprop(1e-2, decay=0.99)),
    "Adagrad": (torch.optim.Adagrad, {}, fs.optim.adagrad(1e-2)),
}


def of_rule(cls: type[torch.optim.Optimizer], options: dict[str, Any], rule: Pair) -> dict[str, Build]:
    """The foreach kernels of torch on FSDP2's parameters and on slices, and the pure rule, which makes new tensors."""
    foreach = functools.partial(cls, foreach=True, **options)
    return {
        "FSDP2": update_fsdp2(foreach),
        "slices": update_slices(foreach),
        "from_torch": update(lambda spec: fs.optim.from_torch(cls, foreach=True, donate=True, **options)),
        "fs": update(lambda spec: rule),
    }


# --- unequal work ---


def own_batches(x: Tensor, y: Tensor, *, uneven: bool) -> list[tuple[Tensor, Tensor]]:
    return [(x[:1], y[:1])] * (2 if uneven and dist.get_rank() else 4)


def steps_of_ddp(*, join: bool, uneven: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        ddp = nn.parallel.DistributedDataParallel(model)

        def step(x: Tensor, y: Tensor) -> None:
            with Join([ddp]) if join else contextlib.nullcontext():
                for batch, labels in own_batches(x, y, uneven=uneven):
                    loss_of(ddp(batch), labels).backward()
                    ddp.zero_grad()

        return step

    return build


def steps(*, padded: bool, uneven: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        spec = fs.by_type(Block, p=fs.P())(model).bound
        params = fs.shard(model, spec)
        model.to("meta")

        def loss(params: fs.Params, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss_of(fs.functional_call(model, params, batch[:1], spec=spec), batch[1])

        def step(x: Tensor, y: Tensor) -> None:
            batches = iter(own_batches(x, y, uneven=uneven))
            if not padded:
                for batch in batches:
                    fs.grad(loss)(params, batch)
                return

            def take() -> Any:
                return fs.pad_microbatches(list(itertools.islice(batches, 1)), spec=spec, stand_in=(x[:1], y[:1]))

            while (one := take()).microbatches:
                fs.accumulate(loss, params, one.microbatches, spec=spec, weights=one.weights)

        return step

    return build


# --- samples and learning rates ---


def samples_of_torch(*, resume: bool) -> Build:
    def step(x: Tensor, y: Tensor) -> None:
        own = DistributedSampler(range(SAMPLES), drop_last=True)
        batches = BatchSampler(own, BATCH // dist.get_world_size(), drop_last=True)
        draw(itertools.islice(batches, SAMPLES // BATCH // 2 if resume else 0, None), resume)

    return lambda model: step


def samples(*, resume: bool) -> Build:
    def build(model: nn.Module) -> Step:
        spec = fs.policies.whole()(model).bound

        def step(x: Tensor, y: Tensor) -> None:
            batches = fs.data.sampler(SAMPLES, spec, batch=BATCH)
            if resume:
                batches.load_state_dict(batches.state_dict(SAMPLES // BATCH // 2))
            draw(batches, resume)

        return step

    return build


def draw(batches: Iterable[list[int]], resume: bool) -> None:
    """Draw the first batch after a restart, or all of an epoch."""
    for _ in itertools.islice(batches, 1 if resume else None):
        pass


def schedule_of_torch(model: nn.Module) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.SGD([torch.zeros(())], lr=0.1)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            optimizer.step()
            rates.step()

    return step


def schedule(model: nn.Module) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        rate = fs.optim.schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 0.1, T_max=STEPS)
        for i in range(STEPS):
            rate(i)

    return step


PARTS: dict[str, dict[str, Build]] = {
    "norms": {
        "FSDP2, one by one": norms_of_fsdp2(lambda grads: [g.norm().full_tensor() for g in grads.values()]),
        "FSDP2, stacked": norms_of_fsdp2(lambda grads: torch.stack([g.norm() for g in grads.values()]).full_tensor()),
        "FSDP2, full tensors": norms_of_fsdp2(lambda grads: [g.full_tensor().norm() for g in grads.values()]),
        "fs": norms,
    },
    "finite": {
        "FSDP2": update_fsdp2(TORCH_ADAMW),
        "FSDP2, GradScaler": update_fsdp2(TORCH_ADAMW, scaled=True),
        "fs": update(lambda spec: ADAMW),
        "fs, apply_if_finite": update(lambda spec: fs.optim.apply_if_finite(spec)(ADAMW)),
    },
    **{f"rules: {name}": of_rule(*rule) for name, rule in RULES.items()},
    "state": {
        "float32": update(lambda spec: ADAMW, align=256),
        "quantized_state": update(
            lambda spec: fs.optim.quantized_state(ADAMW, fs.codecs.dynamic8(), spec=spec, donate=True), align=256
        ),
        **eight_bits(),
    },
    "join": {
        "DDP": steps_of_ddp(join=False),
        "DDP, Join": steps_of_ddp(join=True),
        "DDP, Join, uneven": steps_of_ddp(join=True, uneven=True),
        "fs P()": steps(padded=False),
        "fs P(), padded": steps(padded=True),
        "fs P(), padded, uneven": steps(padded=True, uneven=True),
    },
    "samples": {
        "torch": samples_of_torch(resume=False),
        "fs": samples(resume=False),
        "torch, resumed": samples_of_torch(resume=True),
        "fs, resumed": samples(resume=True),
    },
    "schedule": {"torch": schedule_of_torch, "fs": schedule},
}
