"""Law G1 on architectures that people train: sharded gradients are the mean of the plain model's over the ranks."""

from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, Architecture, build, plain, unchanged
from ranks import Pool
from torch import Tensor

import funshard as fs
from funshard.policies import Policy

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def policies(made: Architecture) -> dict[str, Policy]:
    return {
        "by_type": fs.by_type(*made.blocks),
        "always": fs.always(),
        "by_size": fs.by_size(100),
        "whole": fs.whole(),
        "kept": fs.by_type(*made.blocks, p=fs.P("shard", reshard=False)),
        "replicated": fs.always(fs.P()),
    }


def check(rank: int, name: str) -> None:
    made = build(name, 2)
    grads, losses = zip(*(plain(made, r) for r in range(2)), strict=True)
    mean = {k: (grads[0][k] + grads[1][k]) / 2 for k in grads[0]}
    batch = {k: v[rank] for k, v in made.batches.items()}
    for policy_name, policy in policies(made).items():
        spec = policy(made.model).bound
        params, expected = fs.shard(made.model, spec), fs.shard(mean, spec)

        def loss(params: dict[str, Tensor]) -> Tensor:
            torch.manual_seed(rank)
            return made.loss(lambda *a, **k: fs.functional_call(made.model, params, a, k, spec=spec), batch)

        for by in (fs.grad_and_value, torch.func.grad_and_value):
            where = f"{name} {policy_name} {by.__module__}"
            with unchanged(made.model):
                got, value = by(loss)(params)
            assert (value.dtype, value.shape) == (losses[rank].dtype, losses[rank].shape), where
            torch.testing.assert_close(value, losses[rank], **EXACT, msg=lambda m, w=where: f"{w}: {m}")
            for key in expected:
                torch.testing.assert_close(got[key], expected[key], **EXACT, msg=lambda m, w=where, k=key: f"{w} {k}: {m}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_the_mean_of_plain_ones(gloo2: Pool, name: str) -> None:
    """On real ranks, by every policy, with the unit's buffers freed and gathered again; the module stays as it was."""
    gloo2.run(check, name)
