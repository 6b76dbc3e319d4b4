"""What `import funshard` takes, and that Dynamo, which it leaves out, finds everything when it comes: before or after."""

from __future__ import annotations

import subprocess
import sys

import pytest
from depth import depth, seldom

HEAVY = (
    "torch._dynamo torch._inductor torch._export torch.distributed.fsdp torch.distributed.tensor torch.distributed.checkpoint "
)
HEAVY += "torch.distributed._composable torch.testing functorch sympy numpy.testing transformers funshard._compiled.graph "
HEAVY += "funshard._plan"
"""What takes long to import, and that no call needs but those of the compiler."""

LIGHT = f"""
import sys
import torch

before = set(sys.modules)
import funshard as fs

heavy = tuple({HEAVY!r}.split())
new = [name for name in sys.modules if name not in before and name.startswith(heavy)]
assert not new, new
"""

STEP = """
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
x = torch.randn(2, 5, 3, dtype=torch.float64)


net = model[0]
spec, one = fs.policies.whole()(net), fs.policies.whole()(model).on({"shard": 1})
of_net, shards = fs.policies.whole()(net).on({"shard": 1}), fs.testing.spmd(lambda mesh, _: fs.shard(net, spec.on(mesh)), 2)(x)
inputs = fs.shard(model, one), fs.shard(net, of_net)


def step(x):
    def rank(mesh, params, x):
        loss = lambda p: (fs.functional_call(net, p, (x,), spec=spec.on(mesh), reduce=4.0) ** 2).mean()
        return fs.grad(loss)(params)

    return fs.testing.spmd(rank, 2)(shards, x)


def gathered(x):
    return fs.testing.spmd(lambda mesh, x: fs.collectives.gather_slices(x, mesh["shard"]), 2)(x)


def samples(x):
    loss = lambda p, x: fs.functional_call(net, p, (x,), spec=of_net).square().sum()
    return fs.per_sample_grads(loss, inputs[1], (x,), spec=of_net, clip=0.5)


def running(x):
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return fs.functional_call(model, inputs[0], (x,), spec=one, buffers=buffers), buffers


def nodes(f, x):
    "The names of what Dynamo put into its one graph, and the results."
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target.__qualname__ for node in graph.graph.nodes if hasattr(node.target, "__qualname__"))
        return graph.forward

    out = torch.compile(f, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(out, f(x))
    return seen


assert "_primitive" in nodes(gathered, x)
assert "write_buffer" in nodes(running, x[0])
"""

GRADIENTS = """
found = nodes(step, x)
assert "_flow_in_graph" in found, found
assert "_attach_probe" in nodes(samples, x[0])
"""

ORDERS = {
    "torch.compile first": "import torch\nplain = torch.compile(lambda x: x + 1, fullgraph=True, backend='eager')\n"
    "plain(torch.ones(2))\nimport funshard as fs\n" + STEP + GRADIENTS,
    "a call first": "import torch\nimport funshard as fs\n"
    + STEP.replace("def nodes", "gathered(x), running(x[0])\nassert 'torch._dynamo' not in sys.modules\n\n\ndef nodes")
    + depth("", GRADIENTS),  # of these two is no call before
}


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_import_leaves_out_what_a_call_does_not_need() -> None:
    run(LIGHT)


@seldom
@pytest.mark.parametrize("order", ORDERS)
def test_compiles_in_every_order(order: str) -> None:
    """What is to be one node is one, whether Dynamo was imported before funshard, after it or after a first call."""
    run(ORDERS[order])
