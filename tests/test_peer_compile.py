"""torch.func and torch.compile: torch's own few claims, and the graph that a traced step is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from collective_log import SHORT, Collectives, world
from depth import at_most, depth, each, seldom
from parity import WAYS, next_token, numbers, same, sharded_call, squared, tokens
from peer_models import MLP, Block, Net, Transformer
from ranks import real_ranks
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import funshard as fs
from funshard import P

POLICIES = {
    "reshard": fs.by_type(MLP, Block),
    "keep": fs.by_type(MLP, Block, p=P("shard", reshard=False)),
    "replicate": fs.by_type(MLP, Block, p=P()),
    "both": fs.by_path({"": P(), "blocks.0": P("shard", reshard=False)}),
}
"""Of the blocks of a model; "both", which is for `Net`, keeps a block of a replicated one."""
BY_DEFAULT = depth(["reshard", "both"], ["reshard", "keep", "replicate"])


@pytest.mark.parametrize("reshard", [False, True])
@real_ranks(2)
def test_no_warmup_jvp(rank: int, reshard: bool) -> None:
    """jvp over what the function ignores while it runs a bf16 unit, no step before it: zeros; and over what it uses."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    policy = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
    spec = fs.policies.always(P("shard", reshard=reshard, precision=policy))(model).bound
    params = fs.shard({name: torch.ones(p.shape) for name, p in model.named_parameters()}, spec)
    x = torch.ones(2, 4)

    def ignoring(scale: Tensor) -> Tensor:
        return fs.functional_call(model, params, x, spec=spec)

    def using(scale: Tensor) -> Tensor:
        return fs.functional_call(model, params, scale * x, spec=spec)

    one = torch.ones(())
    out, tangent = torch.func.jvp(ignoring, (one,), (one,))
    assert (out.shape, out.dtype, tangent.dtype) == ((2, 4), torch.bfloat16, torch.bfloat16)
    assert torch.equal(tangent, torch.zeros_like(out))
    assert torch.equal(out, torch.full_like(out, 31))
    _, tangent = torch.func.jvp(using, (one,), (one,))
    assert torch.equal(tangent, torch.full_like(out, 24))


@seldom
@pytest.mark.parametrize("strategy", BY_DEFAULT)
@real_ranks(2)
def test_fsdp_compile(rank: int, strategy: str) -> None:
    """A compiled step, update included, is the eager one for five steps, and is compiled once into one graph."""
    model, loss, batch = depth((Net(1), squared, numbers), (Transformer(2), next_token, tokens))
    spec = POLICIES[strategy](model).bound

    def step(params: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grads, value = fs.grad_and_value(lambda p: loss(sharded_call(model, p, spec), x))(params)
        return {k: p - 0.1 * grads[k] for k, p in params.items()}, value

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = depth("aot_eager" if strategy == "reshard" else "eager", "aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager = ours = fs.shard(model, spec)
    for i in range(5):
        eager, expected = step(eager, batch(rank, i))
        ours, value = compiled(ours, batch(rank, i))
        assert_close(value, expected)
        same(ours, eager, f"parameters after step {i}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@at_most(1)
@each
@pytest.mark.parametrize("way", ["fs", "torch.func"])
@pytest.mark.parametrize("p", [P("shard"), P("shard", reshard=False), P()], ids=str)
def test_fully_shard_compile_graph(p: P, way: str) -> None:
    """The graph of a step has the very collectives that the eager step sends, regathers included, in the same order."""
    with world(8):
        model = Net()
        spec = fs.by_type(MLP, p=p)(model).bound
        params = fs.shard(model, spec)
        f = WAYS[way](lambda p, x: squared(sharded_call(model, p, spec), x))
        with Collectives() as sent:
            f(params, numbers(0, 0))
        graph = make_fx(f)(params, numbers(0, 0)).graph
        targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        names = [target._schema.name.partition("::") for target in targets]
        ops = [
            SHORT.get(name, name) for namespace, _, name in names if namespace == "_c10d_functional" and name != "wait_tensor"
        ]
        assert ops == [s.op for s in sent.all]
        reductions = 4 if p.axis else 1
        assert Counter(ops).total() == reductions + {P("shard"): 6, P("shard", reshard=False): 4, P(): 0}[p]
        assert sum(name == "wait_tensor" for _, _, name in names) == len(ops)
