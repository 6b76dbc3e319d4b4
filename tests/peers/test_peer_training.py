"""Training as torch's own tests of FSDP claim it (test_fully_shard_training, _autograd, _frozen, test_fsdp_core, _misc).

Every run is held, at every step, against a plain copy whose gradients are averaged by hand: losses, gradients and
parameters, with other data on each rank, in double precision at torch's own tolerance for it (1e-7). `CLAIMS` has a row for
each of torch's tests that says no more than that; the tests below it say something else as well, also of torch.func (the jvp
without a warm-up, TestFullyShardMixedPrecisionJVP) and of compiled losses (FSDP1's test_fsdp_compile).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from collective_log import world
from depth import at_most, depth, every, seldom
from models import module_class, refused, unchanged, with_forward
from parity import STRATEGIES, WAYS, next_token, numbers, same, sharded_call, shards_of, squared, squared_loss, tokens
from peer_models import MLP, Block, Net, Transformer, chain, frozen
from ranks import mesh_of, real_ranks
from test_memory import Alive
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.func import jvp
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from wrap_oracle import NESTED, sequential

import funshard as fs
from funshard import P
from funshard.policies import Policy


# --- models of the claims ---
def linear(n_in: int = 5, n_out: int = 5) -> nn.Linear:
    return nn.Linear(n_in, n_out).double()


Twice = module_class(
    "Twice",
    lambda: {"inner": MLP(5), "outer": linear()},
    lambda self, x: self.outer(self.inner(x) + self.inner(2 * torch.sigmoid(self.outer(x)))),
)
TwoHeads = module_class(
    "TwoHeads",
    lambda: {
        "trunk": nn.Sequential(MLP(5), nn.Sequential(MLP(5), nn.Tanh())), "policy": linear(5, 3), "value": linear(5, 1)
    },
    lambda self, x, head="policy": getattr(self, head)(self.trunk(x)),
)  # fmt: skip


def repeated(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        y = layer(x)
        y += x
        x = torch.tanh(y)
    return x * 1


def with_a_target(self: Any, x: Tensor) -> Tensor:
    target = torch.no_grad()(repeated)(self, x)
    out = repeated(self, x)
    out += target
    return repeated(self, out)


Reused = module_class("Reused", lambda: {"layers": frozen(nn.ModuleList([MLP(5) for _ in range(3)]), "1")}, with_a_target)


def tied_units() -> nn.Module:
    """Two would-be units whose weights are one tensor."""
    model = nn.Sequential(MLP(5), nn.Sigmoid(), MLP(5))
    model[2].in_proj.weight = model[0].in_proj.weight
    return model


Branches = module_class(
    "Branches",
    lambda: {"pair": nn.ModuleList([linear() for _ in range(2)]), "scale": nn.Parameter(torch.tensor(2.0).double())},
    lambda self, batch: self.scale * self.pair[batch[0]](batch[1]),
)


def one_or_both(self: Any, x: Tensor, second: bool = True) -> tuple[Tensor, Tensor] | Tensor:
    out = torch.relu(self.lin1(x))
    return (out, torch.relu(self.lin2(x))) if second else out


DoubleLinear = module_class("DoubleLinear", lambda: {"lin1": linear(), "lin2": linear()}, one_or_both)
TwoLayers = module_class(
    "TwoLayers", lambda: {"a": DoubleLinear(), "b": DoubleLinear()}, lambda self, x, second=True: self.b(self.a(x)[0], second)
)
NoGradPart = module_class(
    "NoGradPart",
    lambda: {"trained": MLP(5), "constant": MLP(5), "head": linear()},
    lambda self, x: self.head(self.trained(x) + torch.no_grad()(self.constant)(x) + self.constant(x).detach()),
)


FineTuned = module_class(
    "FineTuned", lambda: {"trunk": chain(), "head": linear(5, 2)}, lambda self, x: self.head(self.trunk(x))
)
NoInput = module_class("NoInput", lambda: {"weight": nn.Parameter(torch.randn(7).double())}, lambda self: self.weight.exp())


def bitfit() -> nn.Module:
    model = Transformer(2)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


# --- the claims ---
def other_branch(rank: int, step: int) -> tuple[int, Tensor]:
    return (rank + step) % 2, numbers(rank, step)


After = Callable[[nn.Module, fs.PartitionSpec, fs.Params], bool]
"""Of the model, its spec and the trained full parameters."""


def unmoved(*names: str) -> After:
    return lambda model, _, trained: {name for name, p in model.named_parameters() if torch.equal(trained[name], p)} == {*names}


def blocks(*classes: type[nn.Module]) -> Callable[[P], Policy]:
    return lambda p: fs.by_type(*classes, p=p)


@dataclass(frozen=True)
class Claim:
    """A model that trains as the plain one does, by every strategy and every way to differentiate."""

    says: str
    model: Callable[[], nn.Module]
    policies: Sequence[Callable[[P], Policy]]
    batch: Callable[[int, int], Any] = numbers
    loss: parity.Loss = squared
    after: After | None = None
    ways: Sequence[str] = tuple(parity.MAIN_WAYS)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = (2,)
    ps: Mapping[str, P] = field(default_factory=STRATEGIES.copy)


BLOCKS, LAYERS, WHOLE = [blocks(MLP)], [fs.policies.always], [fs.policies.whole]
MOMENTUM = {"optimizer": torch.optim.SGD, "momentum": 0.9, "steps": depth(3, 4)}
SHAPES = [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)], [(1, 1), (1, 1)]]
BOTH = P(("replicate", "shard"))
OF_TWO_AXES = [P("shard"), P("shard", reshard=False), BOTH, P(("shard", "replicate")), P("replicate"), P()]
MIXED = {"tokens": P("shard"), "positions": P("shard", reshard=False), "layers.*": BOTH, "output": P()}
"""An HSDP embedding, FSDP blocks, a DDP head; what is left is the root's."""
CLAIMS: dict[str, Claim] = {
    "test_train_parity_multi_group": Claim("A unit for each block.", Transformer, [blocks(Block)], tokens, next_token),
    "test_main_wrap_api": Claim(
        "Threshold 0: with every module a unit, six steps of SGD.", lambda: sequential(*NESTED).double(),
        [lambda p: fs.by_size(0, p=p)], after=lambda _, spec, __: spec.paths == ("", "0", "1", "2", "2.0", "2.1"),
        options={"optimizer": torch.optim.SGD, "lr": 0.1, "steps": 6}),
    "test_nested_wrapped_model": Claim(
        "Containers are units.", lambda: nn.Sequential(MLP(5), nn.Sequential(MLP(5), MLP(5))), [blocks(MLP, nn.Sequential)],
        after=unmoved(), options=MOMENTUM),
    "test_non_root_forward_backward": Claim(
        "Steps through the whole model in turn with steps through a part of it, entered by another method than forward.", Net,
        BLOCKS, lambda rank, step: numbers(rank, step).abs() * (-1) ** step,
        lambda call, x: squared(lambda x: call(x, method="features" if x[0, 0] > 0 else None), x)),
    "test_multi_forward_module": Claim(
        "A unit that runs twice in a forward, with others in between, has the sum of both gradients.", Twice, BLOCKS + LAYERS),
    "test_train_parity_with_activation_checkpointing": Claim(
        "torch.utils.checkpoint around the call recomputes it, gathers included, to the same gradients.", Transformer,
        [blocks(Block)], tokens, lambda call, ids: next_token(lambda ids: checkpoint(call, ids, use_reentrant=False), ids),
        ways=["fs", "backward"]),
    "test_double_partial_forward_then_backward": Claim(
        "Several forwards, then one backward (DPO), nested units and an unused head.", TwoHeads,
        [blocks(MLP, nn.Sequential, nn.Linear)],
        loss=lambda call, x: nn.functional.softplus(call(-x) - call(x) + call(x + 1)).mean(),
        after=unmoved("value.weight", "value.bias")),
    "test_unused_forward_output": Claim(
        "The second output is in the loss for three steps and then no more: gradients of its weights become zeros.", TwoLayers,
        [blocks(DoubleLinear), *LAYERS], lambda rank, step: (numbers(rank, step), step < 3),
        lambda call, batch: sum(out.sum() for out in call(batch[0])[: 1 + batch[1]]), options={"steps": 5}),
    "test_unused_forward_module": Claim(
        "A module that never runs, in a unit of its own or with others, stays what it is.", TwoLayers,
        [blocks(DoubleLinear), *LAYERS], loss=lambda call, x: call(x, second=False).sum(),
        after=unmoved(*(f"{block}.lin2.{name}" for block in "ab" for name in ("weight", "bias")))),
    "test_fsdp_module_no_compute_grad": Claim(
        "A unit that runs under no_grad, or is detached, gets zeros and disturbs nothing.", NoGradPart, BLOCKS,
        after=unmoved(*(f"constant.{name}" for name, _ in MLP(5).named_parameters()))),
    "test_root_no_forward_inputs": Claim(
        "A module whose forward takes nothing trains.", NoInput, WHOLE, lambda rank, step: rank + step,
        lambda call, x: (call() * x).sum()),
    "test_freezing_weights": Claim(
        "A frozen trunk, in units of its own or in one.", lambda: frozen(FineTuned(), "trunk"),
        [blocks(MLP, nn.Linear), lambda p: fs.by_path({"head": p})],
        after=unmoved(*(f"trunk.{name}" for name, _ in chain().named_parameters()))),
    "test_train_mixed_requires_grad_per_group": Claim(
        "BitFit: every unit is part frozen, part trained.", bitfit, [blocks(Block)], tokens, next_token,
        lambda model, _, got: all(torch.equal(got[name], p) is not p.requires_grad for name, p in model.named_parameters())),
    "test_multi_forward_mixed_requires_grad": Claim(
        "The same layers with and without no_grad, some frozen, activations added to in place.", Reused, BLOCKS),
    "test_train_parity_with_shared_params": Claim(
        "An embedding tied to the head: one tensor, the sum of both gradients.", lambda: Transformer(2, tied=True),
        [blocks(Block)], tokens, next_token),
    "test_shared_params_separate_fsdp_groups": Claim(
        "Weights tied across units, an error in the peer, belong to the unit above both.", tied_units, BLOCKS,
        after=lambda _, spec, __: (
            spec.by_name["2.in_proj.weight"] == spec.by_name["0.in_proj.weight"] and
            spec.by_name["2.in_proj.weight"][0].path == "")),
    "test_unused_param_has_grad": Claim(
        "Ranks take different branches of one unit: no one waits, unused parameters count with zeros; 0-dim ones too.",
        Branches, WHOLE, other_branch),
    **{
        f"test_train_parity_single_group_shard_dim0, {shapes}": Claim(
        "Shapes that four ranks do not divide, down to ranks that own nothing but padding.",
        lambda shapes=shapes: nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1])).double(), WHOLE,
        lambda rank, step, shapes=shapes: numbers(rank, step, shapes[0][0]), ways=["fs"], options={"steps": depth(3, 10)},
        mesh=(4,), ps=parity.strategies("shard")) for shapes in SHAPES},
    **{
        f"test_train_parity_hsdp, {dim}": Claim(
        "Iterations of three micro-batches on 2 x 2. One all-reduce for all of them: test_gradient_accumulation.",
        lambda dim=dim: nn.Sequential(nn.LayerNorm(dim, bias=False).double(), *(MLP(dim, n * dim) for n in (3, 1, 3))), BLOCKS,
        lambda rank, step, dim=dim: [numbers(rank, 10 * step + micro, dim) for micro in range(3)],
        lambda call, xs: sum(squared(call, x) for x in xs), ways=["fs", "torch.func"], options={"steps": depth(2, 5)},
        mesh=(2, 2), ps=parity.strategies("shard", "keep", "remat")) for dim in (3, 16, 17)},
    "test_fsdp_hybrid_shard_parity": Claim(
        "By every P of a mesh of two axes.", lambda: Transformer(depth(1, 3)), [blocks(Block)], tokens, next_token, ways=["fs"],
        options={"steps": depth(2, 5)}, mesh=(2, 2), ps={str(p): p for p in OF_TWO_AXES}),
    "test_each_unit_its_own_strategy": Claim(
        "FSDP blocks, a DDP head and an HSDP embedding of one model on one mesh.", lambda: Transformer(depth(1, 3)),
        [lambda p: fs.by_path(MIXED, p=p)], tokens, next_token,
        lambda _, spec, __: (
            {spec.size(unit) for unit in spec if "layers" in unit.path} == {4} and
            {key: spec.by_key[key].p for key in MIXED if "*" not in key} == {k: p for k, p in MIXED.items() if "*" not in k}),
        options={"steps": depth(2, 3)}, mesh=(2, 2), ps=parity.strategies("shard", "replicated", replicate=P("replicate"))),
}  # fmt: skip
"""By the names of torch's tests. By default each with each way and each strategy once."""


def cases() -> Iterator[Any]:
    for i, (name, claim) in enumerate(CLAIMS.items()):
        for (j, way), (k, strategy) in itertools.product(enumerate(claim.ways), enumerate(claim.ps)):
            marks = [seldom] * ((i + j + k) % min(3, len(claim.ps)) > 0)
            yield pytest.param(name, way, strategy, marks=marks, id=f"{name}-{strategy}-{way}")


@at_most(50)
@pytest.mark.parametrize(("name", "way", "strategy"), [*cases()])
@real_ranks(lambda name: math.prod(CLAIMS[name].mesh))
def test_claims(rank: int, name: str, way: str, strategy: str) -> None:
    """A sharded model trains as the plain one does: each of `CLAIMS`."""
    claim = CLAIMS[name]
    for policy in claim.policies:
        model = claim.model()
        spec = policy(claim.ps[strategy])(model).on(mesh_of(*claim.mesh))
        trained = parity.check_parity(rank, model, spec, claim.batch, claim.loss, way=way, **claim.options)
        assert claim.after is None or claim.after(model, spec, trained)


# --- training that says more ---
def averaged(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain model's loss, and the mean of its gradients over ranks."""
    value = squared(model, x)
    value.backward()
    return value.detach(), parity.average_gradients(model)


@real_ranks(2)
def test_to_float64_after_init(rank: int) -> None:
    """Shards cast after sharding compute in the new dtype, whatever the module's own parameters are."""
    model = Net().float()
    spec = fs.by_type(MLP)(model).bound
    reference, x = copy.deepcopy(model).double(), numbers(rank, 0)
    params = {key: shard.double() for key, shard in fs.shard(model, spec).items()}
    grads, value = fs.grad_and_value(squared_loss(model, spec, x))(params)
    expected, mean = averaged(reference, x)
    full = fs.unshard(grads, spec)
    assert {g.dtype for g in (value, *full.values())} == {torch.float64}
    assert_close(value, expected)
    same(full, mean, "gradient")


@real_ranks(2)
def test_non_root_forward_backward_of_a_submodule(rank: int) -> None:
    """The shard of a unit serves the submodule called by itself."""
    model, x = Net(), numbers(rank, 0)
    spec, part = fs.by_type(MLP)(model).bound, fs.policies.whole()(model.blocks[1]).bound
    params = fs.shard(model, spec)
    loss = lambda p: squared(sharded_call(model.blocks[1], {"": p["blocks.1"]}, part), x)  # noqa: E731
    grads, value = fs.grad_and_value(loss)(params)
    expected = squared(model.blocks[1], x)
    expected.backward()
    assert_close(value, expected.detach())
    same(fs.unshard(grads, spec), parity.average_gradients(model), "gradient")


@real_ranks(2)
def test_unshard_async(rank: int) -> None:
    """All units are gathered while a collective of the caller's own is under way: the gradients of the scheduled call."""
    model = chain()
    (spec, params), x = shards_of(fs.policies.always(), model), numbers(rank, 0)
    mine = torch.full((3,), float(rank))
    work = dist.all_reduce(mine, async_op=True)
    full = fs.unshard(params, spec)
    grads = fs.reduce_grads(fs.grad(squared_loss(model, spec, x))(full), spec)
    assert work is not None
    work.wait()
    assert mine.tolist() == [1.0] * 3
    same(grads, fs.grad(squared_loss(model, spec, x))(params), "gradient")


@every(given=[False, True], way=parity.MAIN_WAYS)
@real_ranks(2)
def test_ignored_modules_and_mixture_of_experts(rank: int, way: str, given: bool) -> None:
    """What is ignored is not sharded and never reduced: a rank's own expert, from the model or from params by name."""
    model = Net()
    spec = fs.policies.ignoring(fs.by_type(MLP), modules=["blocks.1"], params=["head.bias"])(model).bound
    total = sum(p.numel() for p in model.parameters())
    left = sum(p.numel() for p in model.blocks[1].parameters()) + model.head.bias.numel()
    assert sum(unit.numel for unit in spec) == total - left
    x, reference = numbers(rank, 0), copy.deepcopy(model)
    params = fs.shard(model, spec)
    if given:
        params |= {name: p.detach() for name, p in model.named_parameters() if name in spec.ignored}
    grads, value = WAYS[way](squared_loss(model, spec, x))(params)
    expected = squared(reference, x)
    expected.backward()
    local = {name: p.grad.clone() for name, p in reference.named_parameters()}
    assert_close(value, expected.detach())
    same({k: g for k, g in grads.items() if k in spec.by_key}, fs.shard(parity.average_gradients(reference), spec), "gradient")
    assert set(grads) - set(spec.by_key) == (set(spec.ignored) if given else set())
    own = {name: g for name, g in local.items() if given and name in spec.ignored}
    same({k: g for k, g in grads.items() if k in spec.ignored}, own, "a rank's own gradient")


@real_ranks(2)
def test_diff_ignored_modules_across_ranks(rank: int) -> None:
    """Ranks that ignore different modules would wait for each other: an error on every rank, naming the unit."""
    model = Net()
    spec = fs.policies.ignoring(fs.by_type(MLP), modules=[f"blocks.{rank}"])(model)
    refused(ValueError, r"the ranks of .* have different models.*'blocks\.[01]'", lambda: fs.shard(model, spec))


@real_ranks(2)
def test_train_mixed_requires_grad_across_groups(rank: int) -> None:
    """Frozen and trained units in turn, and then all unfrozen."""
    model = frozen(chain(6), "0", "2", "4")
    for kept in (["0", "2", "4"], []):
        model.load_state_dict(parity.check_parity(rank, model, fs.by_type(MLP)(model).bound, optimizer=torch.optim.SGD))
        assert [name for name, block in model.named_children() if not block.in_proj.weight.requires_grad] == kept
        model.requires_grad_(True)


# --- what goes in and comes out ---
@real_ranks(2)
def test_post_acc_grad_hook_runs(rank: int) -> None:
    """A hook on a shard fires exactly once in a backward pass, when all gradients of the call are there."""
    model, fired = Net(), []
    spec = fs.by_type(MLP)(model).bound
    leaves = {key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}
    for key, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda _, key=key: fired.append(key))
    squared(sharded_call(model, leaves, spec), numbers(rank, 0)).backward()
    assert sorted(fired) == sorted(spec.by_key)


@real_ranks(2)
def test_param_change_after_init(rank: int) -> None:
    """The call computes with the parameters it is given, also after they changed in place."""
    model, x = Net(), numbers(rank, 0)
    spec, params = shards_of(fs.by_type(MLP), model)
    doubled = {key: 2 * shard for key, shard in params.items()}
    out = sharded_call(model, doubled, spec)(x)
    for shard in params.values():
        shard.mul_(2)
    assert torch.equal(sharded_call(model, params, spec)(x), out)
    for p in model.parameters():
        p.data.mul_(2)
    assert_close(out, model(x))


@pytest.mark.parametrize("reshard", [False, True])
def test_unshard_params_respects_reshard(reshard: bool) -> None:
    """A gather of everything between forward and backward, or after it, leaves the very buffers alive that were."""
    with world(2):
        model = Net()
        spec = fs.policies.override(fs.by_type(MLP, p=P("shard", reshard=reshard)), fs.by_path({"": P("shard")}))(model).bound
        params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
        sizes = {unit.path: spec.padded_numel(unit) for unit in spec}
        with Alive() as alive:
            y = fs.functional_call(model, params, numbers(0, 0), spec=spec).sum()
            kept = [sizes[""], sizes["blocks.2"]] if reshard else [*sizes.values()]
            assert alive.now() == kept
            fs.unshard(params, spec)
            assert alive.now() == kept
            full = fs.unshard(params, spec, units=["blocks.1"])
            assert alive.now() == [*kept, sizes["blocks.1"]]
            del full
            assert alive.now() == kept
            y.backward()
            assert alive.now() == []
            fs.unshard(params, spec)
            assert alive.now() == []


def rerun(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.out_proj, self.in_proj(x), use_reentrant=self.reentrant)


@every(reentrant=[False, True], way=["fs", "backward"])
def test_checkpoint_inside_is_an_error(way: str, reentrant: bool) -> None:
    """It would recompute with other parameters. Around the call: test_train_parity_with_activation_checkpointing."""
    model = with_forward(MLP, rerun, reentrant=reentrant)(5)
    message = r"unit 'out_proj': torch\.utils\.checkpoint inside functional_call.*checkpoint the functional_call as a whole"
    with unchanged(model), pytest.raises(RuntimeError, match=message):
        parity.gradient_of(fs.policies.always(), model, numbers(0, 0), way=WAYS[way])


# --- transforms and the compiler ---
BF16 = torch.bfloat16
LOW = fs.Precision(param=BF16, reduce=torch.float32)
IN_BF16 = STRATEGIES | {f"float32 in bf16, reshard={r}": P("shard", reshard=r, precision=LOW) for r in (False, True)}


@pytest.mark.parametrize("strategy", IN_BF16)
@real_ranks(2)
def test_no_warmup_jvp(rank: int, strategy: str) -> None:
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
        out, tangent = jvp(f, (one,), (one,))
        assert out.dtype == tangent.dtype == BF16
        assert torch.equal(out, zeros + 31)
        assert torch.equal(tangent, zeros + expected)


@at_most(1)
@pytest.mark.parametrize("policy", [fs.by_type(MLP), fs.by_path({"": P(), "blocks.0": P("shard", reshard=False)})])
def test_compiled_graph_takes_shards_alone(policy: Policy) -> None:
    """One graph whose inputs are the shards and the batch: no unsharded parameter, nor a module's own, is an input of it."""
    with world(4):
        model, x, seen = Net(1), numbers(0, 0), EagerAndRecordGraphs()
        spec, params = shards_of(policy, model)
        torch._dynamo.reset()
        step = fs.grad(lambda params, x: squared(sharded_call(model, params, spec), x))
        torch.compile(step, fullgraph=True, backend=seen)(params, x)
    (graph,) = seen.graphs
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    shapes = sorted(tuple(t.shape) for t in inputs if isinstance(t, Tensor))
    assert shapes == sorted(tuple(t.shape) for t in [*params.values(), x])
    assert not list(graph.parameters())
