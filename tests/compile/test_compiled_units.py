"""P(compile=True): units run as compiled functions within the eager schedule, with its results, its gathers and its memory."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import mirror
import pytest
import torch
import torch.nn.functional as F
from depth import at_most, depth, each, every, mark_seldom, seldom
from fuzz_cases import COMPILED, Case, mirrored
from fuzz_modules import PIECES
from models import module_class, refused, unchanged
from parity import DERIVATIVES, gradient_of, loss_of, shards_of
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import funshard as fs
from funshard import Compile, P, Remat
from funshard._transforms.error_hints import find_hint

AOT = Compile(backend="aot_eager")
ALONE = {"shard": 1}
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Dynamo ")
"""Dynamo asks for it and hides the warning, which the tests' filter makes an error."""

EXACT = {"rtol": 1e-12, "atol": 1e-12}
Loss = Callable[[fs.Params], Tensor]


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        up = fs.checkpoint_name(self.up(self.norm(x)), "up")
        return x + scale * self.dropout(self.down(F.gelu(up)))


def model(blocks: int = 4, make: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[make() for _ in range(blocks)], nn.Linear(6, 2)).double()


def batch(rank: int = 0) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)).double()


def counted() -> tuple[int, int]:
    """Graphs compiled and graph breaks since the last `torch._dynamo.reset`."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.fixture(autouse=True)
def fresh() -> None:
    reset()


def reset() -> None:
    torch._dynamo.reset()
    counters.clear()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # on ranks, too


# --- compilations ---
def trained(net: nn.Module, p: P, grad: Callable[[Loss], Any] = fs.grad, rank: int = 0, **options: Any) -> fs.Params:
    """Gradients of one step. Each begins with the same random numbers."""
    spec, params = shards_of(fs.by_type(Block, p=p), net, ALONE if options.pop("alone", True) else None)
    params = {key: 1.5 * shard for key, shard in params.items()}  # not those of the model
    torch.manual_seed(rank + 1)
    with unchanged(net):
        return grad(loss_of(net, spec, batch(rank), of=lambda y: y.sin().sum(), **options))(params)


def test_one_compilation_serves_all_units_of_a_structure() -> None:
    """The input of the first block needs no gradient, that of the others does: two graphs, whatever the depth."""
    for blocks in (2, 3, 9):
        trained(model(blocks), P("shard", compile=AOT))
        assert counted() == (2, 0)


# --- equal to eager ---
GRADS = ["fs.grad", "torch.func.grad", "vjp", "no_grad", "jvp", "hvp", "grad of grad"]


PS: dict[str, dict[str, Any]] = {
    "shard": {},
    "keep": {"reshard": False},
    "remat": {"remat": True},
    "save a name": {"remat": Remat(save={"up"})},
    "save products": {"remat": Remat(save={torch.ops.aten.addmm.default})},
    "save layer_norm": {"remat": Remat(save=lambda op: op is torch.ops.aten.native_layer_norm.default)},
    "precision": {"precision": fs.Precision(param=torch.float32, reduce=torch.float64)},
    "activations": {"offload": "activations"},
    "params": {"offload": "params"},
}
EAGER = ("torch.func.grad", "vjp", "jvp", "hvp", "grad of grad")
"""Those in which torch runs no compiled code."""


def equal_to_eager(rank: int, name: str, how: str) -> None:
    """Check a step with compiled units."""
    reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fs._call.compiled_unit.CompileWarning)
        for axes in ("shard", ()) if name != "params" else ("shard",):
            expected = trained(model(), P(axes, **PS[name]), DERIVATIVES[how], rank, alone=False)
            got = trained(model(), P(axes, **PS[name], compile=AOT), DERIVATIVES[how], rank, alone=False)
            rounding = {"rtol": 1e-5, "atol": 1e-6} if name == "precision" else EXACT
            torch.testing.assert_close(got, expected, **rounding)
    assert (counted()[0] > 0) == (how not in EAGER)


@at_most(2)
@each(how=mark_seldom(GRADS, "fs.grad", "torch.func.grad"), name=PS, ranks=["alone", "gloo2"])
def test_equal_to_eager(request: pytest.FixtureRequest, ranks: str, name: str, how: str) -> None:
    request.getfixturevalue(ranks).run(equal_to_eager, name, how)


class Other(Block):
    """A class of its own: users are told once for each."""


def test_said_once() -> None:
    net = model(3, Other)
    spec, params = shards_of(fs.by_type(Other, p=P("shard", compile=AOT)), net, ALONE)
    loss = loss_of(net, spec, batch())
    words = r"module '0' with .* runs without compilation.*inside of torch\.func's"
    with pytest.warns(fs._call.compiled_unit.CompileWarning, match=words) as caught:
        torch.func.jvp(loss, (params,), (params,))
    assert len([one for one in caught if one.category is fs._call.compiled_unit.CompileWarning]) == 1
    torch.func.jvp(loss, (params,), (params,))


@seldom
@real_ranks(2)
def test_training_on_two_ranks(rank: int) -> None:
    """accumulate and update_in_backward with compiled units, frozen and trained ones."""
    reset()
    net = model()
    for p in net[1].parameters():
        p.requires_grad_(False)
    results = []
    for compile in (False, AOT):
        spec = fs.by_type(Block, p=P("shard", compile=compile))(net).bound
        trained_params, frozen = fs.partition(fs.shard(net, spec), spec)
        loss = lambda params, x, spec=spec, frozen=frozen: loss_of(net, spec, x, frozen=frozen)(params)  # noqa: E731

        torch.manual_seed(rank)
        sums, value = fs.accumulate(loss, trained_params, [batch(rank), batch(rank + 2)], spec=spec)
        init, update = fs.optim.from_torch(torch.optim.AdamW, lr=0.1)
        state = init(trained_params)
        torch.manual_seed(rank)
        step = fs.update_in_backward(update, loss, trained_params, state, [batch(rank)], spec=spec)
        results.append((sums, value, step.params))
    torch.testing.assert_close(results[1], results[0], **EXACT)
    assert counted()[0] > 0


# --- the schedule ---
def traffic(rank: int, name: str, compile: bool | Compile) -> list[str]:
    reset()
    net = model()
    spec, params = shards_of(fs.by_type(Block, p=P("shard", **PS[name], compile=compile)), net, mirror.mesh({"shard": 2}))
    grad = fs.grad(loss_of(net, spec, batch()))
    grad(params)  # compiled
    return mirror.sent(2, lambda: grad(params))


def test_weights_are_gathered_again_and_not_kept(alone: Pool) -> None:
    """What compiled code saves of a weight is the view that was given in, which the schedule replaces as in eager."""
    eager, compiled = (Counter(alone.run(traffic, "shard", c)[0]) for c in (False, AOT))
    assert compiled == eager
    assert max(eager.values()) > 4  # gathers of four blocks, and again in backward


def saved_bytes(p: P) -> int:
    """The bytes that a forward leaves allocated for its backward."""
    reset()
    net = model(6)
    spec, params = shards_of(fs.by_type(Block, p=p), net, ALONE)
    params, x = {key: shard.requires_grad_() for key, shard in params.items()}, torch.ones(1000, 6).double()
    for _ in range(2):  # the first one compiles
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            loss = loss_of(net, spec, x, of=torch.sum)(params)
        loss.backward()
    return sum(event.self_cpu_memory_usage for event in profile.events())


@seldom
@pytest.mark.parametrize("compile", [AOT, pytest.param(True, marks=seldom)])
@every(name=["remat", "save a name", *(pytest.param(name, marks=seldom) for name in ("save products", "save layer_norm"))])
def test_saved_results_of_a_compiled_unit(alone: Pool, name: str, compile: Any) -> None:
    """No more bytes than eager saves, but for the state of the random numbers of a dropout; gathers are as many."""
    eager, compiled = (saved_bytes(P("shard", **PS[name], compile=c)) for c in (False, compile))
    assert 6 * 1000 * 6 * 8 <= compiled <= eager + 6 * 5200
    eager, compiled = (Counter(alone.run(traffic, name, c)[0]) for c in (False, compile))
    assert compiled == eager


def test_a_context_variable_of_the_compiler_is_no_state_of_the_function() -> None:
    """A recomputed function that the user compiled, where the configuration is another one than in backward."""
    compiled = torch.compile(torch.sin, backend="aot_eager")
    x = batch().requires_grad_()

    def grad() -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=5):
            y = fs.remat(lambda x: compiled(x) * x)(x)
        return torch.autograd.grad(y.sum(), x)[0]

    torch.testing.assert_close(contextvars.Context().run(grad), x.cos() * x + x.sin(), **EXACT)


def choose(self: Any, x: Tensor) -> Tensor:
    p = self.l(x).softmax(-1)
    torch._dynamo.graph_break()
    w, i = p.max(-1)
    return x * w[..., None] + i[..., None] * self.scale


Chooses = module_class("Chooses", lambda: {"l": nn.Linear(6, 6), "scale": nn.Buffer(torch.full((), 0.5))}, choose)
"""A block that breaks the graph before it unpacks the result of a method, and that has a buffer."""


@seldom
@pytest.mark.filterwarnings("ignore::funshard._call.compiled_unit.CompileWarning")
@every(way=["torch.func.grad", "grad of grad", "fs.grad"], has_buffers=[False, True])
def test_a_unit_inside_of_remat_in_a_transform(way: str, has_buffers: bool) -> None:
    """It runs without the modes of remat, in which Dynamo loses results, and remat takes Dynamo's attributes for nobody's."""
    net, x = nn.Sequential(block := model(1, Chooses)[0], block, nn.Linear(6, 1).double()), batch()
    spec = fs.by_type(Chooses, p=P("shard", compile=AOT))(net)
    buffers = {name: b.clone() for name, b in net.named_buffers(remove_duplicate=False)} if has_buffers else None

    def loss(params: fs.Params, buffers: Any) -> Tensor:
        return loss_of(net, spec, x, buffers=buffers)(params)

    def plain(params: fs.Params) -> Tensor:
        return torch.func.functional_call(net, params, (x,), tie_weights=False).square().sum()  # torch would leave them

    take = DERIVATIVES[way]
    want = take(plain)({name: p.detach() for name, p in net.named_parameters()})
    for _ in range(2):
        got = take(lambda p: fs.remat(loss)(p, buffers))(fs.shard(net, spec))
        torch.testing.assert_close(got, fs.shard(want, spec), **EXACT)


class Stack(nn.Sequential):
    """Blocks that run again as one."""


@pytest.mark.filterwarnings("ignore::funshard._call.compiled_unit.CompileWarning")
@pytest.mark.parametrize("way", ["grad of grad", "grad of grad of remat", "hvp"])
def test_a_recomputed_module_around_compiled_units_in_a_stack(way: str) -> None:
    """A gradient of a gradient in torch.func is exact, as the refusal of ``create_graph=True`` advises."""
    net, x = nn.Sequential(Stack(*model(2)[:2]), nn.Linear(6, 1).double()).eval(), batch()

    results: list[Any] = []
    for compile in (False, AOT):
        inner = fs.by_type(Block, p=P("shard", compile=compile))
        spec, params = shards_of(fs.policies.override(fs.by_type(Stack, p=P("shard", remat=bool(compile))), inner), net)
        loss = loss_of(net, spec, x)
        if way == "hvp":
            results.append(fs.hvp(loss, params, {key: p.cos() for key, p in params.items()}, forward=False))
        else:
            results.append(DERIVATIVES["grad of grad"](fs.remat(loss) if "remat" in way else loss)(params))
    torch.testing.assert_close(results[1], results[0], **EXACT)


# --- what people write ---
Leaf = module_class("Leaf", lambda: {"l": nn.Linear(6, 6)}, lambda self, x: self.l(x).sin())


def leaf(name: str, forward: Callable[[Any, Tensor], Any]) -> type[nn.Module]:
    return type(name, (Leaf,), {"forward": forward})


class Breaks(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        torch._dynamo.graph_break()
        return y.sin() * self.l.bias


Mixed = leaf("Mixed", lambda self, x: {"y": self.l(x), "x": x, "n": 3, "i": torch.arange(2)})


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            out = block(x)
            x = out["y"] + out["x"].sin() if isinstance(out, dict) else out
        return x


def leaf_step(kind: type[nn.Module], compile: bool | Compile, *, remat: bool | Remat = False) -> Any:
    torch.manual_seed(0)
    net = Chain(nn.Linear(6, 6), *[kind() for _ in range(3)]).double()
    spec, params = shards_of(fs.by_type(kind, p=P("shard", compile=compile, remat=remat)), net, ALONE)
    params, given = ({key: 1.5 * shard for key, shard in params.items()} for _ in range(2))
    try:
        return fs.grad(loss_of(net, spec, batch()))(params)
    finally:
        torch.testing.assert_close(params, given, rtol=0, atol=0)


@at_most(4)
@every(kind=[Breaks, Mixed], remat=[False, True, Remat(save={torch.ops.aten.addmm.default})])
def test_what_people_write(kind: type[nn.Module], remat: bool | Remat) -> None:
    """Graph breaks, and results of several kinds. What Dynamo keeps in context variables is no state of the function."""
    for _ in range(2):
        got = leaf_step(kind, AOT, remat=remat)
        torch.testing.assert_close(got, leaf_step(kind, False), **EXACT)
    assert counted()[0] > 0


def compiled_piece(rank: int, name: str, p: str) -> str:
    reset()
    result = mirrored(rank, Case((name,), (p,), "fs.grad"))
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()  # Dynamo leaves them disabled where torch.func in it fails
    return result


@at_most(8)
@every(p=COMPILED, name=[name for name in PIECES if name != "CheckpointedReentrant"])
def test_pieces_are_exact_or_refused(alone: Pool, name: str, p: str) -> None:
    """What people write (fuzz_modules.py), each as a compiled unit."""
    result = alone.run(compiled_piece, name, p)[0]
    assert result.split(":")[0] in ("", "refused", "no reference"), result


# --- by .compile() ---
@pytest.mark.parametrize("is_bare", [False, True], ids=["model", "skeleton"])
def test_blocks_that_the_user_compiled(is_bare: bool) -> None:
    net = model().eval()
    spec, params = shards_of(fs.by_type(Block), net, ALONE)
    expected = fs.grad(loss_of(net, spec, batch()))(params)
    for block in net[:4]:
        block.compile(backend="aot_eager")
    made = [block._compiled_call_impl for block in net]
    reset()
    got = fs.grad(loss_of(fs.skeleton(net) if is_bare else net, spec, batch()))(params)
    torch.testing.assert_close(got, expected, **EXACT)
    assert counted() == (2, 0)
    assert [block._compiled_call_impl for block in net] == made
    net = model()  # a compiled module that is no unit
    net[0].up.compile(backend="aot_eager")
    with pytest.raises(TypeError, match=r"module '0\.up' was compiled in place by \.compile\(\).*that of units only"):
        trained(net, P("shard"))


# --- arguments ---
def test_bad_options() -> None:
    """By name, when they are made."""
    wrong = TypeError, ValueError
    refused(wrong, "P: compile: expected True, False or a Compile, got 'inductor'", lambda: P(compile="inductor"))
    refused(wrong, "Compile: backend: expected a name or a function, got 3", lambda: Compile(backend=3))
    refused(wrong, "Compile: dynamic", lambda: Compile(dynamic="yes"))
    refused(wrong, "expected a mode or options", lambda: Compile(mode="default", options={"a": 1}))


def test_units_inside_of_a_compiled_one() -> None:
    """Casts or recomputation inside would be lost in the graph; gathering is not."""
    net, grads = model(2), []
    for compile in (False, AOT):
        torch.manual_seed(1)
        policy = fs.by_path({"0": P("shard", compile=compile), "0.up": P("shard")})
        grads.append(gradient_of(policy, net, batch(), mesh=ALONE))
    torch.testing.assert_close(grads[1], grads[0], **EXACT)
    for inner in (P(remat=True), P(offload="activations"), P(precision=fs.Precision(param=torch.float32))):
        policy = fs.by_path({"0": P("shard", compile=AOT), "0.up": inner})
        words = r"unit '0\.up' .* is inside of module '0', which is compiled as one"
        refused(ValueError, words, lambda policy=policy: gradient_of(policy, net, batch(), mesh=ALONE))


OWN_PASS, MISSPELT = {"joint_custom_pre_pass": None}, {"fallback_randm": True}
EAGERLY, WHOLE = {"backend": "aot_eager"}, {"backend": "aot_eager", "fullgraph": True}
MISFITS = leaf("Misfits", lambda self, x: self.l(x) @ x)
WRONG: dict[str, tuple[type[Exception], type[nn.Module], dict[str, Any]]] = {
    r"module '1': Compile: backend: expected one of .*'aot_eager'.*, got 'nope'": (ValueError, Leaf, {"backend": "nope"}),
    r"module '1': Compile: options: expected one of 'fallback_random'.*, got": (ValueError, Leaf, {"options": MISSPELT}),
    r"options: expected no 'joint_custom_pre_pass', which is where passes": (ValueError, Leaf, {"options": OWN_PASS}),
    r"(?s)graph_break.*module '1' with P\(compile=True\): expected a forward that": (RuntimeError, Breaks, WHOLE),
    r"(?s)same reduction dim.*module '1' with P\(compile=True\): expected": (RuntimeError, MISFITS, EAGERLY),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_compiled_is_refused_by_name(words: str) -> None:
    """Names that torch does not know, a graph break that may not be, and an error in what is compiled."""
    error, kind, options = WRONG[words]
    refused(error, words, lambda: leaf_step(kind, Compile(**options)))


@pytest.mark.parametrize("alone", [True, False])
@real_ranks(2)
def test_second_derivatives_are_refused(rank: int, alone: bool) -> None:
    """torch itself gives zeros for these: the compiled function saves nothing that has a graph."""
    reset()
    net = nn.Sequential(Leaf()).double()
    for p in (P("shard", compile=AOT), P("shard", reshard=False, compile=AOT)):
        spec, params = shards_of(fs.by_type(Leaf, p=p), net, ALONE if alone else None)
        loss = loss_of(net, spec, batch(rank))({key: shard.requires_grad_() for key, shard in params.items()})
        with pytest.raises(RuntimeError, match=r"module '0' with .* a gradient with create_graph=True, outside or inside"):
            torch.autograd.grad(loss, list(params.values()), create_graph=True)


@seldom
@every(how=depth(["fs.grad"], ["fs.grad", "no_grad"]), name=["shard", "remat"])
def test_inductor_draws_the_random_numbers_of_eager(name: str, how: str) -> None:
    expected = trained(model(), P("shard", **PS[name]), DERIVATIVES[how])
    torch.testing.assert_close(trained(model(), P("shard", **PS[name], compile=True), DERIVATIVES[how]), expected)
    assert counted()[1] == 0


# --- models that do what Dynamo does not expect, in compiled units and steps: right as in eager, or a clear error ---
def network(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), nn.Linear(6, 2)).double()


Recurrent = module_class("Recurrent", lambda: {"gru": nn.GRU(6, 6, batch_first=True)}, lambda self, x: self.gru(x[None])[0][0])
"""Dynamo runs the kernels of a GRU eagerly, after a graph break."""


@real_ranks(2)
def test_saved_tensor_hooks_are_not_traced(rank: int) -> None:
    """On several ranks a unit has them; Dynamo compiled their frames, and failed on the version of a tensor."""
    reset()
    net = network(Recurrent)
    policies = [fs.by_type(Recurrent, p=P("shard", compile=compile)) for compile in (AOT, False)]
    torch.testing.assert_close(*(gradient_of(policy, net, batch(rank)) for policy in policies), **EXACT)


def write_buffers(self: Any, x: Tensor) -> Tensor:
    scale = self.sums.sin()
    self.runs += 1
    self.sums.add_(x.detach().mean(0))
    return self.l(x).sin() * scale * self.sums * self.runs


SUMS, RUNS = torch.full((6,), 2.0), torch.zeros((), dtype=torch.long)
WritesBuffers = module_class(
    "WritesBuffers",
    lambda: {"l": nn.Linear(6, 6), "sums": nn.Buffer(SUMS.clone()), "runs": nn.Buffer(RUNS.clone())},
    write_buffers,
)
"""Its derivative is in the new values, which backward can compute from the old ones, or take as they are."""


@every(remat=mark_seldom([False, True], False), compile=[AOT, pytest.param(True, marks=seldom)])
def test_a_buffer_that_forward_changes_in_place(compile: bool | fs.Compile, remat: bool) -> None:
    """torch's partitioner computes the new values once more in backward, from a buffer that has them already."""
    net, results = network(WritesBuffers), []
    for how in (False, compile):
        policy = fs.by_type(WritesBuffers, p=P("shard", compile=how, remat=remat))
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        results.append(([gradient_of(policy, net, batch(), mesh=ALONE, buffers=buffers) for _ in range(2)], buffers))
    torch.testing.assert_close(results[1], results[0], **EXACT)
    assert int(results[1][1]["1.runs"]) == 2


@at_most(1)
@every(which=["unit", pytest.param("step", marks=seldom)], inside=[False, True])
def test_hooks_that_are_registered_later(which: str, inside: bool) -> None:
    """By default Dynamo does not see them, and goes on with the code from before, without an error."""
    results = []
    for is_compiled in (False, True):
        net = network(Leaf)
        policy = fs.by_type(Leaf, p=P("shard", compile=AOT if is_compiled and which == "unit" else False))
        spec, params = shards_of(policy, net, ALONE)
        step: Any = fs.grad(loss_of(net, spec, batch()))
        if is_compiled and which == "step":
            step = fs.compile(step, backend="aot_eager")
        got = [step(params)]
        handle = (net[1].l if inside else net[1]).register_forward_hook(lambda module, args, out: out * 3)
        got.append(step(params))
        handle.remove()
        results.append([*got, step(params)])
    torch.testing.assert_close(results[1], results[0], **EXACT)
    assert (results[0][0]["1"] != results[0][1]["1"]).any()


class Constant(Leaf):
    """What it computes under no_grad is a view, a tensor that is written to, and a list."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            first = super().forward(x).T
            total = torch.zeros_like(x).add_(y)
            parts = y.split(1)
            pairs = y.unflatten(1, (3, 2))  # a method of Python's
        out = y * first.T + y * total + torch.cat([part * y[:1] for part in parts])
        return out + (pairs * y.sin().unflatten(1, (3, 2))).flatten(1)


@seldom
@each(compiler=mark_seldom(["fs.compile", "torch.compile"], "fs.compile"), forward=mark_seldom([True, False], False))
def test_no_grad_in_a_compiled_hvp(compiler: str, forward: bool) -> None:
    """torch.func.jvp itself differentiates through it."""
    net = network(Constant)
    spec, params = shards_of(fs.by_type(Constant), net, ALONE)

    def product(params: fs.Params, x: Tensor) -> fs.Params:
        return fs.hvp(loss_of(net, spec, x), params, {key: p.cos() for key, p in params.items()}, forward=forward)

    compile = fs.compile if compiler == "fs.compile" else torch.compile
    compiled = compile(product, backend="aot_eager", fullgraph=True)
    for n in (3, 2):  # the second call compiles after an eager one
        torch.testing.assert_close(compiled(params, batch()[:n]), product(params, batch()[:n]), **EXACT)


# --- errors that say what to do ---
class Writes(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.l.weight.mul_(0.5)
        return self.l(x)


class Differentiates(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.l(x).sum(), x)[0]


class BackwardHook(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.l.register_full_backward_hook(lambda module, given, out: given)


KEPT: list[Tensor] = []
CHECKPOINTS = leaf("Checkpoints", lambda self, x: checkpoint(Leaf.forward.__get__(self), x, use_reentrant=False))
KEEPS = leaf("Keeps", lambda self, x: KEPT.append(self.l(x)) or KEPT[-1].sin())
HINTS: dict[type[nn.Module], str] = {
    CHECKPOINTS: "forward uses torch.utils.checkpoint: expected P(remat=True) of the unit, or fs.remat",
    Writes: "forward changes a parameter, a buffer or an argument in place: expected a new tensor",
    KEEPS: "forward keeps a tensor that it computes, in a list",
    Differentiates: "expected fs.grad, fs.grad_and_value or torch.func.grad for every gradient",
    BackwardHook: "a module has a backward hook: expected tensor.register_hook in forward, or P(compile=True) of units",
}


def compiled_gradient(kind: type[nn.Module], **options: Any) -> Any:
    compiled = lambda loss: fs.compile(fs.grad(loss), backend="aot_eager", **options)  # noqa: E731
    return gradient_of(fs.by_type(kind), network(kind), batch(), mesh=ALONE, way=compiled)


@at_most(1)
@pytest.mark.parametrize("kind", HINTS, ids=lambda kind: kind.__name__)
def test_compile_errors_say_what_to_do(kind: type[nn.Module]) -> None:
    """Dynamo's words stay, and a note names what forward does."""
    if kind is CHECKPOINTS and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("an older torch compiles it")
    with pytest.raises(RuntimeError) as error:
        compiled_gradient(kind)
    assert f"funshard: {HINTS[kind]}" in find_hint(error.value)


def test_a_failed_trace_leaves_no_state() -> None:
    """Dynamo leaves saved-tensor hooks disabled after a checkpoint in a torch.func.grad."""
    with contextlib.suppress(RuntimeError):  # torch 2.11 compiles it
        compiled_gradient(CHECKPOINTS)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.ones(2, requires_grad=True).sin().sum().backward()


@at_most(1)
@each(inside=[False, True], outer=["fs.compile", "torch.compile"])
def test_a_compiled_step_in_a_compiled_function(inside: bool, outer: str) -> None:
    """It is a part of the graph that is being traced, also where it is made there."""

    def make() -> Callable[[fs.Params], fs.Params]:
        return fs.compile(lambda params: {key: p / 2 for key, p in params.items()}, donate_argnums=0, backend="aot_eager")

    made = make()

    def twice(params: fs.Params) -> fs.Params:
        return make()(make()(params)) if inside else made(made(params))

    compile = fs.compile if outer == "fs.compile" else torch.compile
    given = {"a": torch.tensor([4.0, 8.0])}
    got = compile(twice, backend="aot_eager", fullgraph=True)(given)
    torch.testing.assert_close((got, given), ({"a": torch.tensor([1.0, 2.0])},) * 2)


def test_a_compiled_step_that_is_differentiated_is_refused() -> None:
    """In a transform, or in a loss: the step runs under no_grad, and gradients through it were 0."""
    square = fs.compile(lambda x: (x * x).sum(), backend="aot_eager")
    words = r"the compiled step is called inside of a torch.func transform, .* expected"
    for transform in (torch.func.grad(square), torch.vmap(square), lambda x: torch.func.jvp(square, (x,), (x,))):
        refused(RuntimeError, words, lambda transform=transform: transform(torch.ones(2, 3)))
    assert fs.grad(lambda x: x.sum() * square(torch.ones(3)))(torch.ones(1)) == 3  # a constant
    loss = fs.compile(lambda params, x: (params[""].sum() * x).sum(), backend="aot_eager")
    (spec, params), x = shards_of(fs.policies.whole(), nn.Linear(1, 1)), torch.ones(2, 3)
    for gradient in (
        lambda: fs.grad(lambda p: loss({"": p[""] * 2}, x))(params),
        lambda: fs.grad(lambda p: fs.remat(loss)(p, x))(params),
        lambda: fs.grad(lambda p: fs.chunked(lambda p, x: (loss(p, x), 1), 2)(p, x)[0])(params),
        lambda: fs.accumulate(loss, params, [x], spec=spec),
    ):
        refused(RuntimeError, r"step is called inside of a loss or a recomputed function, .* expected", gradient)


# --- shards and full parameters inside of a compiled step ---
@seldom
@real_ranks(2)
def test_full_parameters_in_a_step(rank: int) -> None:
    """On several ranks: what is gathered there is not compared while it is traced."""
    reset()
    net = network(Leaf)
    spec, shards = shards_of(fs.policies.override(fs.by_type(Leaf), fs.by_path({"1": P()})), net)

    def through(p: fs.Params, x: Tensor) -> fs.Params:
        return fs.grad(lambda q: torch.func.functional_call(net, fs.unshard(q, spec), (x,)).square().sum())(p)

    def changed(p: fs.Params, x: Tensor) -> Any:
        full = fs.unshard(p, spec)
        for shard in p.values():
            shard.add_(1)
        return full, fs.shard(full, spec), fs.unshard(p, spec)

    for step in (through, changed):
        both = step, fs.compile(step, backend="aot_eager")
        expected, got = (f({key: p.clone() for key, p in shards.items()}, batch(rank)) for f in both)
        torch.testing.assert_close(got, expected, **EXACT)


@seldom
def test_dropout_of_sizes_that_change() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).sum()

    step = fs.compile(fs.grad(loss), backend="aot_eager")
    step(batch())
    with pytest.raises(RuntimeError) as error:
        step(batch()[:2])
    assert "expected dynamic=False" in find_hint(error.value)
