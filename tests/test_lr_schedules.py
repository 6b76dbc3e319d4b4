"""optim.schedule: the learning rates of torch's schedulers, bit for bit, as a function of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as theirs
from torch.optim.swa_utils import SWALR

import funshard as fs
from funshard.optim import schedule

SCHEDULERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "LambdaLR": (theirs.LambdaLR, {"lr_lambda": lambda step: min(1.0, (step + 1) / 5)}),
    "MultiplicativeLR": (theirs.MultiplicativeLR, {"lr_lambda": lambda step: 0.95}),
    "StepLR": (theirs.StepLR, {"step_size": 3, "gamma": 0.3}),
    "MultiStepLR": (theirs.MultiStepLR, {"milestones": [2, 7, 7], "gamma": 0.3}),
    "ConstantLR": (theirs.ConstantLR, {"factor": 0.5, "total_iters": 4}),
    "LinearLR": (theirs.LinearLR, {"start_factor": 0.1, "total_iters": 6}),
    "ExponentialLR": (theirs.ExponentialLR, {"gamma": 0.9}),
    "PolynomialLR": (theirs.PolynomialLR, {"total_iters": 9, "power": 1.5}),
    "CosineAnnealingLR": (theirs.CosineAnnealingLR, {"T_max": 7, "eta_min": 0.01}),
    "CosineAnnealingWarmRestarts": (theirs.CosineAnnealingWarmRestarts, {"T_0": 3, "T_mult": 2}),
    "CyclicLR": (theirs.CyclicLR, {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3, "cycle_momentum": False}),
    "OneCycleLR": (theirs.OneCycleLR, {"max_lr": 0.3, "total_steps": 30, "cycle_momentum": False}),
    "SWALR": (SWALR, {"swa_lr": 0.02, "anneal_epochs": 5}),
    "SequentialLR": (
        lambda optimizer: theirs.SequentialLR(
            optimizer, [theirs.LinearLR(optimizer, 0.1, total_iters=5), theirs.CosineAnnealingLR(optimizer, 10)], [5]
        ),
        {},
    ),
    "ChainedScheduler": (
        lambda optimizer: theirs.ChainedScheduler(
            [theirs.ConstantLR(optimizer, 0.5, 4), theirs.ExponentialLR(optimizer, 0.9)], optimizer
        ),
        {},
    ),
}


def test_every_scheduler_of_torch_is_here() -> None:
    """But the base class and the one that depends on metrics."""
    assert {*theirs.__all__} - {*SCHEDULERS} == {"LRScheduler", "ReduceLROnPlateau"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_torchs(name: str) -> None:
    """In any order of steps, also as tensors."""
    make, options = SCHEDULERS[name]
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer, **options)
        expected: list[float] = []
        for _ in range(25):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    rate = schedule(make, 0.1, **options)
    assert [rate(step) for step in range(25)] == expected
    assert rate(torch.tensor(13)) == expected[13] == rate(13)


def test_more_steps_than_were_computed_at_first() -> None:
    rate = schedule(theirs.ExponentialLR, 1.0, gamma=0.999)
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    scheduler = theirs.ExponentialLR(optimizer, 0.999)
    for _ in range(1500):
        optimizer.step()
        scheduler.step()
    assert rate(1500) == scheduler.get_last_lr()[0]


def test_what_is_no_function_of_the_step_is_refused() -> None:
    with pytest.raises(TypeError, match="ReduceLROnPlateau depends on metrics"):
        schedule(theirs.ReduceLROnPlateau, 0.1)
    for name in ("CyclicLR", "OneCycleLR"):
        cls, options = SCHEDULERS[name]
        with pytest.raises(ValueError, match="give cycle_momentum=False"):
            schedule(cls, 0.1, **{**options, "cycle_momentum": True})
    with pytest.raises(TypeError, match=r"StepLR: .*step_size"):
        schedule(theirs.StepLR, 0.1)
    other = torch.optim.SGD([torch.zeros(())], lr=0.1)
    with pytest.raises(TypeError, match="for the optimizer that it is given"):
        schedule(lambda optimizer: theirs.StepLR(other, 2), 0.1)
    rate = schedule(theirs.OneCycleLR, 0.1, max_lr=0.1, total_steps=9, cycle_momentum=False)
    rate(8)
    with pytest.raises(ValueError, match=r"OneCycleLR: expected a step below \d+, got 40: Tried to step"):
        rate(40)
    with pytest.raises(ValueError, match="expected a step from 0 on, got -1"):
        rate(-1)
    init, update = fs.optim.schedule_lr(rate)(fs.optim.from_torch(torch.optim.SGD))
    params = {"": torch.ones(2)}
    with pytest.raises(TypeError, match="its schedule gives lr="):
        update(params, init(params), params, lr=0.1)


def test_a_rate_is_a_function_of_the_step_in_remat() -> None:
    """Run again, it changes nothing that the first run has read."""
    rate = schedule(theirs.StepLR, 0.5, step_size=1)

    def f(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (x * rate(step)).sin().sum()

    x, step = torch.ones(2), torch.tensor(2000)
    torch.testing.assert_close(fs.grad(fs.remat(f))(x, step), fs.grad(f)(x, step))
