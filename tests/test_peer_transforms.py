"""What torch's tests say of torch.func and of compiled training, and the graph that a traced step is.

The jvp without a warm-up (TestFullyShardMixedPrecisionJVP), FSDP1's test_fsdp_compile, and what
test_fully_shard_compile asserts of the graph's inputs; with the strategies and transforms beside theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from collective_log import world
from depth import at_most, depth, every, mark_seldom, seldom, thorough
from parity import STRATEGIES, next_token, numbers, same, sharded_call, shards_of, squared, step_with, tokens
from peer_models import MLP, Block, Net, Transformer
from ranks import real_ranks
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import jvp, vmap
from torch.testing import assert_close

import funshard as fs
from funshard import P

BF16 = torch.bfloat16
POLICIES = {name: fs.by_type(MLP, Block, p=p) for name, p in STRATEGIES.items()}
POLICIES["both"] = fs.by_path({"": P(), "blocks.0": P("shard", reshard=False)})
"""Of the blocks of a model; "both", which is for `Net`, keeps a block of a replicated one."""
BY_DEFAULT = depth(["shard", "both"], ["shard", "keep", "replicated"])


def by_jvp(f: Callable[[Tensor], Tensor], one: Tensor) -> tuple[Tensor, Tensor | None]:
    return jvp(f, (one,), (one,))


def by_dual_numbers(f: Callable[[Tensor], Tensor], one: Tensor) -> tuple[Tensor, Tensor | None]:
    with dual_level():
        out = unpack_dual(f(make_dual(one, one)))
    return out.primal, out.tangent


def by_jvp_in_vmap(f: Callable[[Tensor], Tensor], one: Tensor) -> tuple[Tensor, Tensor | None]:
    out, tangent = vmap(lambda s: jvp(f, (s,), (one,)))(one.expand(3))
    return out[1], tangent[1]


def by_jvp_in_jvp(f: Callable[[Tensor], Tensor], one: Tensor) -> tuple[Tensor, Tensor | None]:
    (out, _), (tangent, _) = jvp(lambda s: jvp(f, (s,), (one,)), (one,), (one,))
    return out, tangent


TRANSFORMS = {f.__name__: f for f in (by_jvp, by_dual_numbers, by_jvp_in_vmap, by_jvp_in_jvp)}


LOW = fs.Precision(param=BF16, reduce=torch.float32)
IN_BF16 = STRATEGIES | {f"float32 in bf16, reshard={r}": P("shard", reshard=r, precision=LOW) for r in (False, True)}


@every(how=TRANSFORMS, strategy=IN_BF16)
@real_ranks(2)
def test_no_warmup_jvp(rank: int, strategy: str, how: str) -> None:
    """Of a function that runs both units and ignores its argument, of one that uses it, and of the weights. By hand, in
    bf16: six hidden units of 4 + 1, and a bias, are 31; zeros past units that have nothing to do with it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).to(torch.float32 if IN_BF16[strategy].precision else BF16)
    spec = fs.policies.always(IN_BF16[strategy])(model).bound
    params = fs.shard({name: torch.ones(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}, spec)
    x, one, zeros = torch.ones(2, 4, dtype=BF16), torch.ones((), dtype=BF16), torch.zeros(2, 4, dtype=BF16)

    def call(params: fs.Params, scale: Tensor | float = 1.0) -> Tensor:
        return fs.functional_call(model, params, (scale * x,), spec=spec)

    for f, expected in (
        (lambda scale: call(params), 0),
        (lambda scale: call(params, scale), 24),  # 6 * 4
        (lambda scale: call({k: scale * p for k, p in params.items()}), 61),  # 30 twice, for each layer, and the second bias
    ):
        out, tangent = TRANSFORMS[how](f, one)
        assert out.dtype == BF16
        assert torch.equal(out, zeros + 31)
        if tangent is None:  # as torch itself gives where nothing has a tangent
            assert (how, expected) == ("by_dual_numbers", 0)
        else:
            assert tangent.dtype == BF16
            assert torch.equal(tangent, zeros + expected)


def grad_and_value_of_plain(f: Callable[..., Tensor]) -> Callable[..., tuple[fs.Params, Tensor]]:
    """fs.grad_and_value with respect to shards that an optimizer holds."""
    return lambda params, x: fs.grad_and_value(f)({key: p.detach() for key, p in params.items()}, x)


@seldom
@pytest.mark.parametrize("strategy", mark_seldom(BY_DEFAULT, BY_DEFAULT[0]))
@real_ranks(2)
def test_fsdp_compile_losses(rank: int, strategy: str) -> None:
    """Ten iterations of Adam in eager mode over a compiled loss, by autograd and by fs.grad, beside the eager run."""
    small = not thorough() and strategy != "shard"
    model, of_call, batch = (Net(1), squared, numbers) if small else (Transformer(1), next_token, tokens)
    spec = POLICIES[strategy](model).bound

    def loss(params: fs.Params, x: Tensor) -> Tensor:
        return of_call(sharded_call(model, params, spec), x)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    def backward(params: fs.Params, x: Tensor) -> tuple[fs.Params, Tensor]:
        value = compiled(params, x)
        return dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True)), value.detach()

    def run(gradient: Callable[..., tuple[fs.Params, Tensor]]) -> tuple[list[Tensor], fs.Params]:
        params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
        optimizer, losses = torch.optim.Adam(params.values(), lr=1e-2), []
        for i in range(10):
            grads, value = gradient(params, batch(rank, i % 2))
            losses.append(value.detach())
            step_with({key: g.detach() for key, g in grads.items()}, params, optimizer)
        return losses, {key: p.detach() for key, p in params.items()}

    losses, params = run(grad_and_value_of_plain(loss))
    assert losses[-1] < losses[1] < losses[0] + 1  # it trains
    ways = backward, grad_and_value_of_plain(compiled)
    for gradient in depth(ways[1:] if small else ways[:1], ways):
        theirs, trained = run(gradient)
        assert_close(torch.stack(theirs), torch.stack(losses))
        same(trained, params, "parameters")


@at_most(1)
@pytest.mark.parametrize("strategy", BY_DEFAULT)
def test_compiled_graph_takes_shards_alone(strategy: str) -> None:
    """One graph whose inputs are the shards and the batch: no unsharded parameter, nor a module's own, is an input of it."""
    with world(4):
        model, loss, batch = depth((Net(1), squared, numbers), (Transformer(1), next_token, tokens))
        (spec, params), x = shards_of(POLICIES[strategy], model), batch(0, 0)
        torch._dynamo.reset()
        seen = EagerAndRecordGraphs()
        step = fs.grad(lambda params, x: loss(sharded_call(model, params, spec), x))
        torch.compile(step, fullgraph=True, backend=seen)(params, x)
    (graph,) = seen.graphs
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    shapes = sorted(tuple(t.shape) for t in inputs if isinstance(t, Tensor))
    assert shapes == sorted(tuple(t.shape) for t in [*params.values(), x])
    assert not list(graph.parameters())
