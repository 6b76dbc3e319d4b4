"""The price of fs.compile: what Dynamo traces for each unit, and when it compiles again."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import depth, mark_seldom, seldom
from ranks import Pool, launch
from test_compile import needs_cpp
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator

import funshard as fs

PACKAGE = Path(fs.__file__).parent


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(self.norm(x)).tanh()


def chain(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def step_of(model: nn.Module) -> Any:
    def step(params: fs.Params, x: Tensor, spec: fs.PartitionSpec) -> Any:
        return fs.grad_and_value(lambda p: fs.functional_call(model, p, (x,), spec=spec).square().mean())(params)

    return step


@pytest.fixture
def inlined(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Functions that Dynamo traces, by file and name."""
    found: Counter[str] = Counter()
    original = InliningInstructionTranslator.inline_call_

    def inline_call_(self: Any) -> Any:
        path, name = Path(self.f_code.co_filename), self.f_code.co_name
        found[f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else 'torch'}:{name}"] += 1
        return original(self)

    monkeypatch.setattr(InliningInstructionTranslator, "inline_call_", inline_call_)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return found


def frames(inlined: Counter[str], blocks: int, mesh: dict[str, int]) -> Counter[str]:
    """Functions of funshard that Dynamo traces for a step over so many blocks."""
    model = chain(blocks)
    spec = fs.by_type(Block)(model).on(mesh)
    inlined.clear()
    torch._dynamo.reset()
    fs.compile(step_of(model), backend="aot_eager")(fs.shard(model, spec), torch.ones(2, 4).double(), spec)
    return Counter({name: count for name, count in inlined.items() if not name.startswith("torch:")})


@seldom
def test_few_functions_are_traced_for_each_unit(inlined: Counter[str]) -> None:
    """A unit's gather, its layout and the checks of its shard are not traced; modules are walked without calls."""
    few, many = (frames(inlined, blocks, {"shard": 1}) for blocks in (3, 5))
    each = {name: (many[name] - few[name]) / 2 for name in many if many[name] != few[name]}
    own = {name: count for name, count in each.items() if "tests" not in name and not name.endswith(":forward")}
    assert sum(own.values()) <= 12, own
    assert few["_wire/flow.py:unshard_unit"] == 0
    assert few["_core/layout.py:unflatten_unit"] == 0


@seldom
def test_a_compiled_step_writes_no_dict_of_a_module() -> None:
    """What Dynamo runs around the graph neither clears nor updates a dict, though the model is a global for it."""
    model, names = chain(4), set[str]()
    globals()["_model"] = model
    spec = fs.by_type(Block)(model).on({"shard": 1})

    def step(params: fs.Params, x: Tensor) -> Any:
        return fs.grad_and_value(lambda p: fs.functional_call(_model, p, (x,), spec=spec).square().mean())(params)  # noqa: F821

    torch._dynamo.reset()
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda old, new: names.update(new.co_names))
    with contextlib.ExitStack() as stack:
        stack.callback(hook.remove)
        stack.callback(globals().pop, "_model")
        fs.compile(step, backend="aot_eager")(fs.shard(model, spec), torch.ones(2, 4).double())
    assert names
    assert not names & {"clear", "update"}


def compiles(rank: int) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model, x = chain(2), torch.randn(2, 4, dtype=torch.float64)
    policy = fs.by_type(Block)
    compiled, eager = fs.compile(step_of(model), backend="aot_eager"), step_of(model)

    def check(spec: fs.PartitionSpec, graphs: int) -> None:
        params = fs.shard(model, spec)
        torch.testing.assert_close(compiled(params, x, spec), eager(params, x, spec))
        assert counters["stats"]["unique_graphs"] == graphs

    check(policy(model).bound, 1)
    check(policy(model).bound, 1)  # another object, equal
    gc.collect()
    check(policy(model).bound, 1)  # and after the first one is gone
    check(fs.policies.whole()(model).bound, 2)
    check(fs.by_type(Block, p=fs.P())(model).bound, 3)
    check(policy(model).bound, 3)


@seldom
@pytest.mark.parametrize("ranks", mark_seldom(["alone", "gloo2"], "alone"))
def test_equal_specs_share_a_graph(request: pytest.FixtureRequest, ranks: str) -> None:
    """A spec that is made anew, with the same contents, does not compile again; any other does, and has its own values."""
    pool: Pool = request.getfixturevalue(ranks)
    pool.run(compiles)


@pytest.mark.parametrize("given", depth(["all"], ["none", "some", "all"]))
def test_buffers_that_two_modules_share(given: str) -> None:
    """Compiled and eager calls agree on buffers that are shared, given in part, or replaced in forward."""

    class Counting(nn.Module):
        def __init__(self, shared: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("shared", shared)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return self.linear(x) * self.shared * self.seen

    torch.manual_seed(0)
    shared = torch.full((2,), 3.0)
    model = nn.Sequential(Counting(shared), Counting(shared))
    spec = fs.by_type(Counting)(model).on({"shard": 1})
    params, x = fs.shard(model, spec), torch.randn(3, 2)
    names = {"none": [], "some": ["0.seen"], "all": ["0.shared", "0.seen", "1.shared", "1.seen"]}[given]
    own = dict(model.named_buffers(remove_duplicate=False))

    def run(call: Any) -> Any:
        buffers = {name: own[name].clone() for name in names}
        with pytest.warns(fs._call.buffers.BufferWarning) if given != "all" else contextlib.nullcontext():
            return call(params, buffers), buffers

    def call(params: fs.Params, buffers: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec, buffers=buffers)

    expected = run(call)
    torch.testing.assert_close(run(torch.compile(call, backend="eager", fullgraph=True)), expected)
    assert all(torch.equal(b, torch.zeros(()) if name.endswith("seen") else shared) for name, b in own.items())


@seldom
@needs_cpp
def test_later_starts_find_the_compiled_code(tmp_path: Path) -> None:
    """In inductor's cache, or in torch's artifacts, which another machine loads; never that of another schedule."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
import torch, funshard as fs
from torch._dynamo.utils import counters

artifacts, reshard = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
spec = fs.by_type(torch.nn.Linear, p=fs.P("shard", reshard=reshard == "reshard"))(model).on({"shard": 1})
loss = lambda params: fs.functional_call(model, params, torch.ones(2, 4), spec=spec).sum()
if artifacts.startswith("load "):
    torch.compiler.load_cache_artifacts(open(artifacts[5:], "rb").read())
fs.compile(fs.grad(loss))(fs.shard(model, spec))
if artifacts.startswith("save "):
    open(artifacts[5:], "wb").write(torch.compiler.save_cache_artifacts()[0])
print({name.removeprefix("fxgraph_cache_"): n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache")})
""")

    def start(cache: str, artifacts: str, reshard: str = "reshard") -> str:
        found = launch(1, program, artifacts, reshard, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / cache))
        return found.splitlines()[-1]

    file = tmp_path / "artifacts"
    assert start("here", f"save {file}") == "{'miss': 1}"
    assert start("here", "none") == "{'hit': 1}"
    assert start("there", f"load {file}") == "{'hit': 1}"
    assert start("here", "none", "keep") == "{'miss': 1}"
