"""Two models in one step, one model twice, an evaluation in between: plain autograd's numbers with each choice about memory.

On two real ranks. The choices are of units (``remat``, ``offload``) and of the step: by `fs.grad_and_value`, backward, or
`fs.accumulate`, and `fs.update_in_backward` for the update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import hosted
import torch
import torch.distributed as dist
import torch.nn.functional as F
from depth import at_most, depth, each
from models import EXACT, module_class, unchanged
from offloaded import everywhere
from parity import WAYS, average_gradients, numbers
from ranks import real_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

import funshard as fs
from funshard import P

BOTH = ("params", "activations")
CHOICES = {
    "plain": P("shard"),
    "remat": P("shard", remat=True),
    "save": P("shard", remat=fs.Remat(save={"inner"})),
    "offload": P("shard", offload=BOTH),
    "save, offload": P("shard", remat=fs.Remat(save={"inner"}), offload=BOTH),
}
STEPS, MICRO, RATE = depth(2, 3), 2, 0.1
Loss = Callable[..., Tensor]
"""``loss(model, *others, batch)``, of models as functions."""


Layer = module_class(
    "Layer",
    lambda width, out: {"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, out)},
    lambda self, x: self.down(fs.checkpoint_name(torch.tanh(self.up(x)), "inner")),
)


def network(width: int, out: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 4), Layer(4, 5), Layer(5, 3), nn.Linear(3, out)).double()


class Trained:
    """A model, its shards and its state of an optimizer; and the plain one beside it."""

    def __init__(self, model: nn.Module, p: P) -> None:
        self.model, self.plain = model, copy.deepcopy(model)
        self.spec = fs.by_type(Layer, p=p)(model).bound
        self.params = fs.shard(model, self.spec)
        init, self.update = fs.optim.from_torch(torch.optim.SGD, lr=RATE, momentum=0.9)
        self.state = init(self.params)
        self.peer = torch.optim.SGD(self.plain.parameters(), lr=RATE, momentum=0.9)

    def on(self, params: fs.Params) -> Callable[..., Any]:
        return lambda *args: fs.functional_call(self.model, params, args, spec=self.spec)

    def step(self, way: str, loss: Loss, batch: Tensor, *others: Trained) -> Tensor:
        """One step of the sharded model, with the others as they are: the value of the loss."""

        def f(params: fs.Params, batch: Tensor) -> Tensor:
            return loss(self.on(params), *(other.on(other.params) for other in others), batch)

        micro = [*batch.chunk(MICRO)]
        if way == "update_in_backward":
            stepped = fs.update_in_backward(self.update, f, self.params, self.state, micro, spec=self.spec)
            self.params, self.state = stepped.params, stepped.state
            return stepped.value
        if way in ("shards", "full"):
            grads, value = fs.accumulate(f, self.params, micro, spec=self.spec, keep=way)
        else:
            grads, value = WAYS[way](lambda params: f(params, batch))(self.params)
        self.params, self.state = self.update(grads, self.state, self.params)
        return value

    def plain_step(self, loss: Loss, batch: Tensor, *others: Trained) -> Tensor:
        """That of the plain one."""
        self.peer.zero_grad()
        value = loss(self.plain, *(other.plain for other in others), batch)
        value.backward()
        average_gradients(self.plain)
        self.peer.step()
        return value.detach()

    def check(self) -> None:
        full = {name: p.detach() for name, p in self.plain.named_parameters()}
        assert_close(self.params, fs.shard(full, self.spec, rank=dist.get_rank()), **EXACT)


def judged(judge: Callable[..., Any], made: Callable[..., Any], x: Tensor) -> Tensor:
    """The discriminator's loss: what is made is a constant."""
    return F.softplus(judge(made(x[:, :3]).detach())).mean() + F.softplus(-judge(x)).mean()


def fooled(made: Callable[..., Any], judge: Callable[..., Any], x: Tensor) -> Tensor:
    """The generator's, through the discriminator, whose gradients nobody wants."""
    return F.softplus(-judge(made(x[:, :3]))).mean()


def evaluated(model: Callable[..., Any], x: Tensor) -> Tensor:
    """With an evaluation between forward and backward, which counts as a number."""
    y = model(x)
    with torch.no_grad():
        weight = 1 + model(x * 2).square().mean() + model(x.sin()).mean() ** 2
    return y.square().mean() * weight + model(x.cos()).mean()


def gan(rank: int, way: str, p: P) -> None:
    made, judge = Trained(network(3, 5, 1), p), Trained(network(5, 1, 2), p)
    with unchanged(made.model), unchanged(judge.model):
        for step in range(STEPS):
            x = numbers(rank, step)
            for one, loss, other in ((judge, judged, made), (made, fooled, judge)):
                assert_close(one.step(way, loss, x, other), one.plain_step(loss, x, other), **EXACT)
                one.check()
                other.check()


def alone(loss: Loss) -> Callable[[int, str, P], None]:
    def run(rank: int, way: str, p: P) -> None:
        one = Trained(network(5, 2, 3), p)
        with unchanged(one.model):
            for step in range(STEPS):
                x = numbers(rank, step)
                # the weight of an evaluation is each micro-batch's own, and so is the loss
                plain = micro_batches(loss) if way in ("shards", "full", "update_in_backward") else loss
                assert_close(one.step(way, loss, x), one.plain_step(plain, x), **EXACT)
                one.check()

    return run


def micro_batches(loss: Loss) -> Loss:
    """The mean of what each micro-batch gives."""
    return lambda *models_and_batch: torch.stack(
        [loss(*models_and_batch[:-1], some) for some in models_and_batch[-1].chunk(MICRO)]
    ).mean()


TASKS = {"gan": gan, "evaluated": alone(evaluated)}


@at_most(1)
@each(choice=CHOICES, way=[*WAYS, "shards", "full", "update_in_backward"], task=TASKS)
@real_ranks(2)
def test_on_two_ranks(rank: int, task: str, way: str, choice: str) -> None:
    """Losses and parameters after each step."""
    with hosted.elsewhere(), everywhere() as copies:  # for the device is the host
        TASKS[task](rank, way, CHOICES[choice])
    assert not copies.alive
    assert (copies.out > 0) == ("activations" in CHOICES[choice].offloads and way != "torch.func")


@real_ranks(2)
def test_threads_with_a_process_group_each_compare_apart(rank: int) -> None:
    """Process groups of the same ranks shared one group for comparisons, in which threads came in another order."""
    groups: list[Any] = [dist.new_group(timeout=timedelta(seconds=15)) for _ in range(2)]
    models = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in groups]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)) for group in groups]
    specs = [fs.by_type(nn.Linear)(model).on(mesh) for model, mesh in zip(models, meshes, strict=True)]
    shards = [fs.shard(model, spec) for model, spec in zip(models, specs, strict=True)]

    def run(i: int) -> None:
        def loss(params: fs.Params) -> Tensor:
            return fs.functional_call(models[i], params, (torch.ones(4, 8),), spec=specs[i]).sum()

        for _ in range(30):
            fs.optim.clip_by_global_norm(fs.grad(loss)(shards[i]), specs[i], 1.0)

    with ThreadPoolExecutor(2) as threads:
        [*threads.map(run, range(2))]  # which raises what they raise
