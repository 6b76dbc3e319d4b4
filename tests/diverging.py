"""Steps in which one rank does something else than the others, by name: `CASES`. As a script, it runs one on real ranks.

    diverging.py CASE

Every rank prints a line: its error, or that it has ended.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import funshard as fs

WIDTH = 6
LIMIT = 20.0
"""Seconds within which every rank has its error with the check."""
LIMITS = {"a_recompiling_rank": 4.0}
"""Other limits, by case."""


class Model(nn.Module):
    """Layers that run in the order that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, order: Sequence[int], fail: bool = False) -> Tensor:
        for i in order:
            x = self.layers[i](x).sin()
            if fail:
                raise ValueError("a bad batch")
        return x


class Trainer:
    """A model with its spec and parameters, and the steps that cases are made of."""

    def __init__(self, p: fs.P | None = None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = Model().to(dtype)
        self.spec = fs.by_type(nn.Linear, p=p or fs.P("shard"))(self.model)
        self.params = fs.shard(self.model, self.spec)
        self.x = torch.ones(2, WIDTH, dtype=dtype)
        self.init, self.update = fs.optim.from_torch(torch.optim.SGD, lr=0.1)

    def call(self, params: fs.Params, order: Sequence[int] = (0, 1, 2), fail: bool = False) -> Tensor:
        return fs.functional_call(self.model, params, (self.x, order, fail), spec=self.spec)

    def step(self, order: Sequence[int] = (0, 1, 2), fail: str = "") -> fs.Params:
        def loss(params: fs.Params) -> Tensor:
            out = self.call(params, order, fail == "forward")
            if fail == "backward":
                out.register_hook(raise_error)
            return out.square().sum()

        grads = fs.grad(loss)(self.params)
        params, _ = self.update(grads, self.init(self.params), self.params)
        return params


def raise_error(grad: Tensor) -> Tensor:
    raise ValueError("a bad gradient")


def with_another(make: Callable[[], Trainer], is_other: bool) -> None:
    trainers = Trainer(), make()  # fs.shard compares the models: so all ranks have both
    trainers[is_other].step()


def in_order(order: Sequence[int], is_other: bool) -> None:
    Trainer().step(order if is_other else (0, 1, 2))


def another_number_of_microbatches(is_other: bool) -> None:
    trainer = Trainer()
    orders = [(0, 1, 2)] * (2 if is_other else 3)
    fs.accumulate(lambda p, order: trainer.call(p, order).square().sum(), trainer.params, orders, spec=trainer.spec)


def raise_in_part(part: str, is_other: bool) -> None:
    trainer = Trainer()
    for i in range(3):
        trainer.step(fail=part if is_other and i == 1 else "")


def raise_in_teardown(is_other: bool) -> None:
    trainer = Trainer()
    trainer.step()
    if is_other:
        dist.destroy_process_group()
        raise ValueError("a bad end")
    trainer.step()


def a_skipped_nan(is_other: bool) -> None:
    trainer = Trainer()
    for i in range(3):
        grads = fs.grad(lambda p: trainer.call(p).sum())(trainer.params)
        if is_other and i == 1:  # its loss is NaN
            continue
        fs.optim.global_norm(grads, trainer.spec)


def a_loop_left_early(is_other: bool) -> None:
    trainer = Trainer()
    for _ in range(2 if is_other else 3):
        trainer.step()


def a_lone_unshard(is_other: bool) -> None:
    trainer = Trainer()
    trainer.step()
    if is_other:
        fs.unshard(trainer.params, trainer.spec, offload_to_cpu=True)


def a_recompiling_rank(is_other: bool) -> None:
    """Not an error, although it takes longer than the limit."""

    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(LIMITS["a_recompiling_rank"] + 2)
        return graph

    trainer = Trainer()
    trainer.step()
    if is_other:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    trainer.step()


CASES: Mapping[str, Callable[[bool], None]] = {
    "another_order": functools.partial(in_order, (0, 2, 1)),
    "a_skipped_unit": functools.partial(in_order, (0, 2)),
    "no_unit": functools.partial(in_order, ()),
    "another_dtype": functools.partial(with_another, functools.partial(Trainer, dtype=torch.float64)),
    "another_spec": functools.partial(with_another, functools.partial(Trainer, fs.P())),
    "another_number_of_microbatches": another_number_of_microbatches,
    "a_skipped_nan": a_skipped_nan,
    "a_loop_left_early": a_loop_left_early,
    "a_lone_unshard": a_lone_unshard,
    "a_recompiling_rank": a_recompiling_rank,
    "raise_in_teardown": raise_in_teardown,
    **{f"raise_in_{part}": functools.partial(raise_in_part, part) for part in ("forward", "backward")},
}
"""By name, what a rank does; the argument says whether this rank is the one that differs: the last."""


def run(case: str) -> tuple[str, float]:
    """Run a case within the check. Return this rank's error, or "ended", with its warnings, and the seconds that it took."""
    is_other = dist.get_rank() == dist.get_world_size() - 1
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with fs.check(LIMITS.get(case, LIMIT)):
                CASES[case](is_other)
            text = "ended"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in caught if "fs.check" in str(warning.message)]
    return "\n".join([text.splitlines()[0], *texts]), time.monotonic() - begin


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    rank = dist.get_rank()
    text, seconds = run(sys.argv[1])
    print(f"\nrank {rank} after {seconds:.1f} s: {text}", flush=True)  # warnings of torch may end without a line break
