"""Law G1 on architectures that people train: sharded gradients are the mean of the plain model's over the ranks."""

from __future__ import annotations

import pytest
import torch
from depth import at_most, depth, mark_seldom
from models import ARCHITECTURES, EXACT, Architecture, assert_mean_gradients, build, plain, unchanged
from ranks import real_ranks
from torch import Tensor

import funshard as fs
from funshard.policies import Policy


def policies(made: Architecture, name: str) -> dict[str, Policy]:
    """By default a unit for each block, and one of the others, in turn."""
    every = {
        "by_type": fs.by_type(*made.blocks),
        "always": fs.policies.always(),
        "by_size": fs.by_size(100),
        "whole": fs.policies.whole(),
        "kept": fs.by_type(*made.blocks, p=fs.P("shard", reshard=False)),
        "replicated": fs.policies.always(fs.P()),
    }
    first, *others = every
    turn = others[list(ARCHITECTURES).index(name) % len(others)]
    return depth({key: every[key] for key in (first, turn)}, every)


@at_most(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
@real_ranks(2)
def test_gradients_are_the_mean_of_plain_ones(rank: int, name: str) -> None:
    """On real ranks, by every policy, with the unit's buffers freed and gathered again; the module stays as it was."""
    made = build(name, 2)
    assert_mean_gradients(made, rank, policies(made, name))


# Those that vmap runs: mixtral's control flow depends on data, dropout draws other numbers, spectral_norm writes to out=.
SIMULATED = [name for name in ARCHITECTURES if name not in ("mixtral", "bert_with_dropout", "parametrized")]


@at_most(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap's, of attention without a rule
@pytest.mark.parametrize("name", mark_seldom(SIMULATED, *[*SIMULATED][::2]))
def test_gradients_on_simulated_ranks_are_the_mean_of_plain_ones(name: str) -> None:
    """On three ranks, and on 2 x 2 with HSDP; buffers are arguments, as torch.func wants what a call writes to."""
    for sizes in ({"shard": 3}, {"replicate": 2, "shard": 2}):
        ranks = torch.Size(sizes.values()).numel()
        made = build(name, ranks)
        grads, losses = zip(*(plain(made, r) for r in range(ranks)), strict=True)
        mean = {k: torch.stack([g[k] for g in grads]).mean(0) for k in grads[0]}
        full = {k: v.detach() for k, v in made.model.named_parameters()}
        buffers = {k: v.expand(ranks, *v.shape).clone() for k, v in made.model.named_buffers()}
        for policy_name, policy in policies(made, name).items():

            def run(mesh: fs.collectives.Mesh, batch: dict[str, Tensor], buffers: dict[str, Tensor], policy=policy):
                spec = policy(made.model).on(mesh)

                def loss(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
                    return made.loss(
                        lambda *a, **k: fs.functional_call(made.model, params, a, k, spec=spec, buffers=buffers), batch
                    )

                grads, value = fs.grad_and_value(loss)(fs.shard(full, spec), buffers)
                return fs.unshard(grads, spec), value

            with unchanged(made.model):
                got, values = fs.testing.spmd(run, sizes)(made.batches, buffers)
            # Hugging Face takes losses in float32
            torch.testing.assert_close(values, torch.stack(losses), rtol=1e-6, atol=0, msg=lambda m, w=policy_name: f"{w}: {m}")
            for key in mean:
                for rank in range(ranks):
                    torch.testing.assert_close(
                        got[key][rank], mean[key], **EXACT, msg=lambda m, w=(policy_name, key): f"{w}: {m}"
                    )
