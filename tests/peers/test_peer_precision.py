"""Mixed precision as torch's own tests of FSDP2 and FSDP1 claim it: low-precision copies with masters kept by hand."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import same, slice_numel
from collective_log import Collectives, world
from depth import at_most, depth, each, every
from hypothesis import given
from hypothesis import strategies as st
from models import module_class, refused, unchanged
from parity import GRADIENTS, HIGHER, MAIN_WAYS, WAYS, loss_of, shards_of, step_with
from ranks import mesh_of, real_ranks
from test_memory import no_collector
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard import Codec, P, Precision, _torch
from funshard._core.flow import divide_factors

F16, BF16, F32, F64, I64, U8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8
HALF, UNCAST = Precision(param=F16), Precision(param=F16, cast_inputs=False)
Dtype, Loss = torch.dtype | None, Callable[..., Tensor]
KEPT = [P("shard"), P("shard", reshard=False), P("shard", remat=True), P()]


class Dtypes(TorchDispatchMode):
    """The dtypes of what enters gathers and reductions; gloo gathers by broadcasts and reduces by exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[torch.dtype] = []
        self.reduced: list[torch.dtype] = []
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            (self.gathered if name.startswith(("all_gather", "broadcast")) else self.reduced).append(args[0].dtype)
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


# --- the table: what enters gathers and reductions ---
Layer = module_class("Layer", lambda of: {"w": nn.Parameter(torch.ones(5, dtype=of))}, lambda self, x: x * self.w * self.w)
Stack = module_class(
    "Stack",
    lambda dtype: {"a": Layer(dtype), "b": Layer(dtype), "scale": nn.Parameter(torch.ones(3, dtype=dtype))},
    lambda self, x: self.b(self.a(x)).sum() * self.scale.sum(),
)


ROWS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (F32, {}), (F32, {"param": BF16}), (F32, {"param": F16}), (F32, {"param": F64}), (F32, {"param": F32}),
    (F32, {"reduce": BF16}), (F32, {"reduce": F16}), (F32, {"reduce": F64}), (F32, {"param": BF16, "reduce": F32}),
    (F32, {"param": BF16, "reduce": BF16}), (F32, {"param": BF16, "reduce": F16}), (F32, {"param": F16, "reduce": F32}),
    (F32, {"param": F16, "reduce": BF16}), (F32, {"output": BF16}), (F32, {"buffer": F16}),
    (F32, {"param": BF16, "output": F32, "cast_inputs": False}), (F32, {"param": BF16, "reduce": F32, "restore_outputs": True}),
    (F64, {}), (F64, {"param": F32}), (F64, {"param": F16}), (F64, {"param": BF16, "reduce": F32}), (F64, {"reduce": F32}),
    (F64, {"reduce": F16, "buffer": BF16}), (BF16, {}), (BF16, {"param": F32}), (BF16, {"reduce": F32}), (BF16, {"param": F16}),
    (F16, {}), (F16, {"param": BF16}), (F16, {"reduce": F32}), (F16, {"param": F32, "reduce": F64}),
]  # fmt: skip
"""Dtypes of the parameters, and what Precision says."""
STRATEGIES: dict[str, tuple[P, dict[str, int]]] = {
    "shard": (P("shard"), {"shard": 8}),
    "replicated": (P(), {"shard": 8}),
    "hsdp": (P("shard"), {"replicate": 2, "shard": 4}),
}
DERIVATIVES = GRADIENTS | {way: HIGHER[way] for way in ("hvp", "grad of grad", "double backward")}


def check_row(row: Any, p: P, mesh: Any, way: str) -> None:
    """What enters, what modules compute with, and that gradients come back as parameters are."""
    original, fields = row
    gathered = fields.get("param", original)
    reduced = fields.get("reduce", gathered)
    model, seen = Stack(original), set()
    for layer in (model.a, model.b):
        layer.register_forward_pre_hook(lambda module, _: seen.add(module.w.dtype))
    spec = fs.policies.always(dataclasses.replace(p, precision=Precision(**fields)))(model).on(mesh)
    x = torch.ones(5, dtype=original)
    with Dtypes() as log:
        loss = lambda q: fs.functional_call(model, q, (x,), spec=spec).float()  # noqa: E731
        grads = DERIVATIVES[way](loss)(fs.shard(model, spec))
    assert set(log.gathered) == ({gathered} if p.axes else set()), row
    assert set(log.reduced) == {reduced}, row
    assert {g.dtype for g in grads.values()} == {original}, row
    assert seen == {gathered}, row
    assert dist.get_backend() == "fake" or all(torch.isfinite(g).all() for g in grads.values()), row


@at_most(3)
@each(way=DERIVATIVES, strategy=STRATEGIES)
def test_the_table(strategy: str, way: str) -> None:
    """On 8 ranks, by every derivative."""
    p, sizes = STRATEGIES[strategy]
    with world(8):
        mesh = mesh_of(**sizes)
        for row in ROWS:
            check_row(row, p, mesh, way)


PS = [P("shard"), P("shard", remat=True), P()]


@at_most(1)
@pytest.mark.parametrize("p", PS, ids=str)
@real_ranks(2)
def test_the_table_on_real_ranks(rank: int, p: P) -> None:
    """Rows of it where numbers mean something, and are finite."""
    for row in depth(ROWS[PS.index(p) :: len(PS)], ROWS):
        check_row(row, p, mesh_of(2), "fs")


# --- no Precision is no change ---
@real_ranks(2)
def test_without_precision_nothing_changes(rank: int) -> None:
    """The same collectives, and results bit by bit."""
    for p in KEPT:
        results = []
        for precision in (None, Precision(), Precision(param=F32, reduce=F32, output=F32, buffer=F32)):
            model, spec, params = of_mlps(p, precision)
            with Dtypes() as log:
                grads, value = fs.grad_and_value(loss_of(model, spec, batch(rank, 0), of=squared))(params)
            results.append((log.ops, log.gathered, log.reduced, grads | {"value": value}))
        for other in results[1:]:
            assert other[:3] == results[0][:3]
            same(other[3], results[0][3])


# --- FSDP2: training with low-precision copies and masters by hand ---
MLP = module_class(
    "MLP",
    lambda width: {"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)},
    lambda self, x: self.down(F.relu(self.up(x))),
)


def mlps() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(16), MLP(16), MLP(16))


def of_mlps(p: P, precision: Precision | None, dtype: torch.dtype = F32) -> tuple[nn.Module, fs.PartitionSpec, fs.Params]:
    """The model with a unit for each of its blocks, and shards."""
    model = mlps().to(dtype)
    spec = fs.by_type(MLP, p=dataclasses.replace(p, precision=precision))(model).bound
    return model, spec, fs.shard(model, spec)


def mean_over_ranks(grad: Tensor, reduce: torch.dtype) -> Tensor:
    """Of two ranks, of which a sum has one rounding; float16 divided before it."""
    total = grad.to(reduce) / 2 if reduce == F16 else grad.to(reduce)
    dist.all_reduce(total)
    return total if reduce == F16 else total / 2


def by_hand(model: nn.Module, masters: fs.Params, loss: Loss, param: Dtype, reduce: Dtype) -> tuple[fs.Params, Tensor]:
    """The gradients of masters, computed with copies in ``param`` and reduced in ``reduce``; and the loss."""
    cast = lambda p: p.detach().to(param or p.dtype) if p.is_floating_point() else p.detach()  # noqa: E731
    low = {n: cast(p).requires_grad_(p.requires_grad) for n, p in masters.items()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, low, args, kwargs)

    value = loss(call)
    value.backward()
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in low.items() if p.requires_grad}
    return {n: mean_over_ranks(g, reduce or g.dtype).to(masters[n].dtype) for n, g in grads.items()}, value.detach()


def squared(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def check_training(
    rank: int, model: nn.Module, spec: fs.PartitionSpec, precision: Precision, way: str = "fs", losses: Any = None
) -> None:
    """Three steps of Adam on masters: gradients, parameters and losses bit by bit, of our call and theirs in ``losses``."""
    own = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = precision.param or own
    ours, theirs = losses or (
        lambda call, step: squared(call(batch(rank, step).to(own))),
        lambda call, step: squared(call(batch(rank, step).to(own).to(given)).to(precision.output or given)),
    )
    masters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    trained, frozen = fs.partition(fs.shard(model, spec), spec)
    reference = torch.optim.Adam([p for p in masters.values() if p.requires_grad], lr=1e-2, eps=1e-3)  # of float16, too
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2, eps=1e-3)
    with unchanged(model):
        for step in range(3):
            dtypes = precision.param, precision.reduce or precision.param
            expected, expected_loss = by_hand(model, masters, lambda call: theirs(call, step), *dtypes)
            sharded = lambda p: lambda *a, **k: fs.functional_call(model, fs.combine(p, frozen), a, k, spec=spec)  # noqa: E731
            grads, value = WAYS[way](lambda p: ours(sharded(p), step))(trained)
            assert torch.equal(value, expected_loss)
            for name, p in masters.items():
                p.grad = expected.get(name)
            frozen_too = {n: expected.get(n, torch.zeros_like(p, requires_grad=False)) for n, p in masters.items()}
            same(grads, fs.partition(fs.shard(frozen_too, spec), spec)[0])
            step_with(grads, trained, optimizer, reference)
        same(fs.unshard(fs.combine(trained, frozen), spec), {name: p.detach() for name, p in masters.items()})


def batch(rank: int, step: int, width: int = 16) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


COMPUTED: list[tuple[P, Precision]] = [(p, Precision(param=param)) for p in KEPT for param in (BF16, F16)]
OF_FLOAT16 = [(Precision(param=param), F16) for param in (None, F16, BF16, F32)]
LOW = [Precision(param=BF16, reduce=F32), Precision(reduce=BF16), Precision(param=F16, reduce=F32, output=F32)]
LOW += [Precision(param=BF16, reduce=F16), Precision(param=F64)]


@at_most(9)
@each(way=["fs", "torch.func", "backward", "autograd.grad"])
@pytest.mark.parametrize(
    ("p", "precision", "dtype"),
    [*((*of, F32) for of in COMPUTED), *((P("shard"), one, F32) for one in LOW), *((P("shard"), *of) for of in OF_FLOAT16)],
    ids=str,
)
@real_ranks(2)
def test_training_with_masters(rank: int, p: P, precision: Precision, dtype: torch.dtype, way: str) -> None:
    """``test_compute_dtype`` and ``test_reduce_dtype``: bfloat16 gradients reduced in float32, and the other way round.
    ``test_fp16_dtypes``: a model that is float16 by itself; a policy beats the model's dtype."""
    model, spec, _ = of_mlps(p, precision, dtype)
    check_training(rank, model, spec, precision, way)


WithInteger = module_class(
    "WithInteger",
    lambda: {"frozen": MLP(16), "trained": MLP(16), "shift": nn.Parameter(torch.arange(16), requires_grad=False)},
    lambda self, x: self.trained(self.frozen(x).roll(int(self.shift[3]), -1)),
)


@real_ranks(2)
def test_reduce_dtype_after_frozen_first_forward(rank: int) -> None:
    """``test_reduce_dtype_after_frozen_first_forward``, with an int64 parameter, which travels as bytes beside what is cast."""
    torch.manual_seed(0)
    model = WithInteger()
    model.requires_grad_(False)
    precision = Precision(param=BF16, reduce=F32)
    policy = fs.by_type(MLP, p=P("shard", precision=precision))
    spec, params = shards_of(policy, model)
    with Dtypes() as log:
        fs.functional_call(model, params, (batch(rank, 0),), spec=spec)
    assert set(log.gathered) == {BF16, U8}
    assert log.reduced == []
    model.trained.requires_grad_()
    spec = policy(model)
    assert {p.dtype for p in fs.partition(fs.shard(model, spec), spec)[1].values()} == {F32, I64}
    with Dtypes() as log:
        check_training(rank, model, spec, precision)
    assert set(log.reduced) == {F32}


# --- structured inputs and outputs ---
@dataclasses.dataclass
class Data:
    x: Any
    n: Any


class Pair(NamedTuple):
    x: Tensor
    n: Tensor


def output_of_transformers(x: Tensor, n: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, attentions=(n,))


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "nested": (lambda x, n: Data([Data(x, None)], {"n": Pair(n, n)}), lambda s: (s.x[0].x, s.n["n"].n)),
    "namedtuple": (Pair, lambda s: (s.x, s.n)),
    "dict": (lambda x, n: {"x": x, "n": n}, lambda s: (s["x"], s["n"])),
    "list": (lambda x, n: [x, None, "text", n], lambda s: (s[0], s[3])),
    "a tensor twice": (lambda x, n: (x, ({"n": n}, x)), lambda s: ((s[0] + s[1][1]) / 2, s[1][0]["n"])),
    "packed": (lambda x, n: PackedSequence(x, torch.tensor([2, 2])), lambda s: (s.data, s.batch_sizes)),
    "ModelOutput": (output_of_transformers, lambda s: (s.last_hidden_state, s.attentions[0])),
}
OF_STRUCTURES = [None, Precision(param=BF16), Precision(param=BF16, reduce=F32), Precision(param=BF16, reduce=F32, output=F32)]


def restructured(self: Any, s: Any) -> Any:
    make, take = STRUCTURES[self.kind]
    x, n = take(s)
    self.seen.extend((x.dtype, n.dtype))
    return make(self.linear(x), n)


Structured = module_class(
    "Structured", lambda kind, seen: {"linear": nn.Linear(16, 16), "kind": kind, "seen": seen}, restructured
)
KINDS = [*((kind, False) for kind in STRUCTURES), *((kind, True) for kind in ("namedtuple", "dict", "packed", "ModelOutput"))]


@at_most(8)
@each(way=MAIN_WAYS, precision=OF_STRUCTURES)
@pytest.mark.parametrize(("kind", "remat"), KINDS)
@real_ranks(2)
def test_structured_input_and_output(rank: int, kind: str, remat: bool, precision: Precision | None, way: str) -> None:
    """``test_dataclass_input``, ``test_dataclass_output`` and what else models take and return; of recomputed units, too."""
    torch.manual_seed(0)
    seen: list[torch.dtype] = []
    model = nn.Sequential(Structured(kind, seen), Structured(kind, seen))
    inner = precision and dataclasses.replace(precision, output=None)
    blocks = fs.by_type(Structured, p=P("shard", precision=inner, remat=remat))
    spec = fs.policies.override(fs.policies.whole(P("shard", precision=precision)), blocks)(model)
    make, take = STRUCTURES[kind]
    n = torch.arange(3) + 2**40
    param = (precision and precision.param) or F32

    def ours(call: Callable[..., Any], step: int) -> Tensor:
        given = make(batch(rank, step), n)
        out = call(given)
        assert type(out) is type(given)
        assert take(given)[0].dtype == F32  # as it came
        x, m = take(out)
        assert x.dtype == ((precision and precision.output) or param)
        assert torch.equal(m, take(given)[1])
        return squared(x)

    def theirs(call: Callable[..., Any], step: int) -> Tensor:
        return squared(take(call(make(batch(rank, step).to(param), n)))[0])

    check_training(rank, model, spec, precision or Precision(), way, (ours, theirs))
    assert set(seen) == {param, I64}


# --- different submodules ---
RUNS: list[torch.dtype] = []
"""What each run of a module was given: a global is out of reach of what runs again, which changes everything else once."""


class Saved(nn.Module):
    """The ``SaveForwardInputsModule`` of torch's tests, which can cast by itself."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.l, self.casts = nn.Linear(10, 10), casts

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        RUNS.extend(given.dtype for given in (x, y) if given is not None)
        out = self.l(x.to(self.l.weight.dtype) if self.casts else x)
        return out if y is None else out * y


class SavedModel(nn.Module):
    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.c1, self.c2 = Saved(casts), Saved(casts)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(x.dtype)
        return self.c2(self.c1(x))

    def with_more(self, x: Tensor) -> Tensor:
        """Gives a tensor to a unit that it has made itself."""
        return self.c2(self.c1(x), y=torch.ones(2, 10))


ONE_SUBMODULE: dict[str, tuple[bool, dict[str, Precision | None], str | None, tuple[torch.dtype, ...], bool]] = {
    "on c2": (False, {"c2": HALF}, None, (F32, F32, F16), True),
    "skip inputs": (True, {"c2": UNCAST}, None, (F32, F32, F32), True),
    "on c1, output float32": (False, {"c1": Precision(param=F16, output=F32)}, None, (F32, F16, F32), True),
    "on c1, output restored": (False, {"c1": Precision(param=F16, restore_outputs=True)}, None, (F32, F16, F32), True),
    "on both": (False, {"c1": HALF, "c2": Precision(param=BF16)}, None, (F32, F16, BF16), True),
    "on the root": (False, {"": HALF}, None, (F16, F16, F16), True),
    "on the root and both": (False, {"": HALF, "c1": Precision(param=F32), "c2": HALF}, None, (F16, F32, F16), True),
    "on c2, nobody casts": (False, {"c2": UNCAST}, None, (F32, F32, F32), False),
    "external, on both": (False, {"": HALF, "c2": HALF}, "with_more", (F16, F16, F16), True),
    "external, skip inputs": (False, {"": HALF, "c2": UNCAST}, "with_more", (F16, F16, F32), True),
    "external, a unit without": (False, {"": HALF, "c2": None}, "with_more", (F16, F16, F32), False),
}
"""Whether modules cast by themselves, the precisions, the method, the dtypes that the root, c1 and c2 see, or c1 and c2's two
inputs, and whether they fit: where one that differs runs first, that is torch's error."""


def saved_model(casts: bool, precisions: Mapping[str, Precision | None]) -> tuple[SavedModel, fs.PartitionSpec]:
    RUNS.clear()
    model = SavedModel(casts)
    root = fs.policies.whole(P("shard", precision=precisions.get("")))
    inner = {path: P("shard", precision=precision) for path, precision in precisions.items() if path}
    return model, fs.policies.override(root, fs.by_path(inner))(model)


@pytest.mark.parametrize("name", ONE_SUBMODULE)
@real_ranks(2)
def test_float16_on_one_submodule(rank: int, name: str) -> None:
    """``test_float16_on_one_submodule`` and ``..._skip_inputs``, ``test_submodules_with_different_precisions``, and errors;
    ``test_submodules_with_external_inputs``: cast iff the unit that takes it casts."""
    casts, precisions, method, seen, fits = ONE_SUBMODULE[name]
    for way in MAIN_WAYS:
        model, spec = saved_model(casts, precisions)
        step = WAYS[way](lambda p: fs.functional_call(model, p, (torch.ones(2, 10),), spec=spec, method=method).float().sum())
        if fits:
            step(fs.shard(model, spec))
        else:  # a unit of its own without precision keeps its parameters
            refused(RuntimeError, "must have the same dtype", lambda: step(fs.shard(model, spec)))
        assert tuple(RUNS) == seen


# --- normalisation ---
@every(param=[BF16, F16], norm=[nn.LayerNorm, nn.BatchNorm1d])
@real_ranks(2)
def test_norm_modules(rank: int, norm: type[nn.Module], param: torch.dtype) -> None:
    """``test_norm_modules_bf16`` and ``..._fp16``: with buffers cast as parameters are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), norm(16), nn.Linear(16, 4))
    spec = fs.policies.whole(P("shard", precision=Precision(param=param, reduce=F32, buffer=param)))(model)
    reference = copy.deepcopy(model)
    for module in reference.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(param)
    masters = dict(model.named_parameters())
    loss = lambda call: call(batch(rank, 0)).float().pow(2).mean()  # noqa: E731
    expected, value = by_hand(reference, masters, lambda call: loss(lambda x: call(x.to(param))), param, F32)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    call = lambda p: lambda x: fs.functional_call(model, p, (x,), spec=spec, buffers=buffers)  # noqa: E731
    with unchanged(model):
        grads, got = fs.grad_and_value(lambda p: loss(call(p)))(fs.shard(model, spec))
    assert torch.equal(got, value)
    for n, b in reference.named_buffers():
        assert buffers[n].dtype == model.get_buffer(n).dtype
        assert torch.equal(buffers[n], b.to(buffers[n].dtype))
    same(grads, fs.shard(expected, spec))


def test_clamp_reduce_dtype() -> None:
    """``test_clamp_reduce_dtype``: made in bfloat16, its shards cast to float32 later, reduced in bfloat16 all the same."""
    with world(4):
        model, spec, params = of_mlps(P("shard"), Precision(param=BF16, reduce=BF16), BF16)
        with Dtypes() as log:
            grads = fs.grad(loss_of(model, spec, batch(0, 0), of=squared))({k: p.float() for k, p in params.items()})
        assert (set(log.gathered), set(log.reduced)) == ({BF16}, {BF16})
        assert {g.dtype for g in grads.values()} == {F32}


# --- FSDP1 ---
@real_ranks(2)
def test_full_precision_in_eval(rank: int) -> None:
    """``test_full_precision_in_eval``, ``..._buffers`` and ``..._comm``: another spec for the same shards, and back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))  # of other paddings in other dtypes
    model[1].running_mean.fill_(0.25)  # trained statistics: initial ones are warned of
    precise = fs.policies.always(P("shard"))(model)
    low = fs.policies.always(P("shard", precision=Precision(param=BF16, buffer=BF16)))(model)
    params = fs.shard(model, low)
    assert all(torch.equal(p, params[k]) for k, p in fs.shard(model, precise).items())
    x = batch(rank, 0)
    for spec, dtype in ((low, BF16), (precise, F32), (low, BF16)):
        seen: list[torch.dtype] = []
        hook = model[1].register_forward_pre_hook(lambda m, _: seen.append(m.running_mean.dtype))
        with Dtypes() as log, torch.no_grad():
            out = fs.functional_call(model.eval(), params, (x,), spec=spec)
        hook.remove()
        assert set(log.gathered) == {dtype}
        assert seen == [dtype]
        assert torch.equal(out, copy.deepcopy(model).to(dtype)(x.to(dtype)))


@real_ranks(2)
def test_input_gradients_keep_the_inputs_dtype(rank: int) -> None:
    """``test_input_grads_with_param_mixed_precision``."""
    model, spec, params = of_mlps(P("shard"), Precision(param=BF16))
    x = batch(rank, 0).requires_grad_()
    out = fs.functional_call(model, params, (x,), spec=spec)
    assert out.dtype == BF16
    out.float().pow(2).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == F32
    low = x.detach().to(BF16).requires_grad_()
    copy.deepcopy(model).to(BF16)(low).float().pow(2).sum().backward()
    assert torch.equal(x.grad, low.grad.float())


def test_ignored_modules_are_not_cast() -> None:
    """``test_mixed_precision_with_ignored_module``: what came cast does not fit it; buffers are put back all the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    precision = Precision(param=BF16, buffer=BF16)
    policy = fs.policies.ignoring(fs.policies.whole(P("shard", precision=precision)), modules=("2",))
    spec, params = shards_of(policy, model)
    with unchanged(model), pytest.raises(RuntimeError, match="must have the same dtype"):
        fs.functional_call(model, params, (torch.ones(2, 4),), spec=spec)


# --- memory ---
@each(way=MAIN_WAYS, p=[P("shard"), P()], codec=[False, True])
def test_cast_and_decoded_parameters_go_after_forward(codec: bool, p: P, way: str) -> None:
    """All but the last unit's, whose buffer may have been another's; also where nothing is gathered. Then that as well."""
    storages: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def note(module: nn.Linear, args: object) -> None:
        storages.append(weakref.ref(_torch.unwrap(module.weight).untyped_storage()))

    precision = Precision(codec=FLOAT8) if codec else Precision(param=BF16)
    with world(4):
        model = nn.Sequential(*[MLP(16) for _ in range(5)])
        for block in model:
            block.up.register_forward_pre_hook(note)  # one of the block, before its unit runs, would keep the buffer
        spec, params = shards_of(fs.by_path({"*": dataclasses.replace(p, precision=precision)}), model)

        def loss(params: fs.Params) -> Tensor:
            y = fs.functional_call(model, params, (batch(0, 0),), spec=spec).float().sum()
            alive.extend(ref()._cdata for ref in storages if ref() is not None)
            return y

        with no_collector():
            WAYS[way](loss)(params)
            assert len(set(alive)) == 1
            assert [ref() is not None for ref in storages] == [False] * 5


# --- float16 and the division, on simulated ranks ---
Dot = module_class("Dot", lambda n: {"w": nn.Parameter(torch.ones(n))}, lambda self, x: (self.w * x).sum())
"""Whose gradient is its input."""
Empty = module_class(
    "Empty",
    lambda: {"empty": nn.ParameterList([torch.zeros(0)]), "a": Dot(4), "b": Dot(4)},
    lambda self, x: self.b(x) + self.a(x) + self.empty[0].sum(),
)
"""A unit without elements beside others."""


def simulated(sizes: dict[str, int], p: P, xs: Tensor, **options: Any) -> Tensor:
    """[rank, slice]: the gradient of `Dot`, which is the reduction of every rank's row."""
    model = Dot(xs.shape[1])
    initial = {"w": model.w.detach()}

    def run(mesh: Any, x: Tensor) -> Tensor:
        spec = fs.policies.whole(dataclasses.replace(p, align=1))(model).on(mesh)
        return fs.grad(lambda q: fs.functional_call(model, q, (x,), spec=spec, **options))(fs.shard(initial, spec))[""]

    return fs.testing.spmd(run, sizes)(xs)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000), st.sampled_from([F16, BF16, F64]))
def test_hsdp_is_divided_once_for_both_axes(replicas: int, shards: int, seed: int, reduce: torch.dtype) -> None:
    n = replicas * shards
    xs = torch.randn(n, 2 * shards, generator=torch.Generator().manual_seed(seed)) * 1000
    got = simulated({"replicate": replicas, "shard": shards}, P("shard", precision=Precision(reduce=reduce)), xs)
    rows = xs.to(reduce).view(replicas, shards, -1)
    if reduce == F16:
        before, after = divide_factors(n)
        summed = (rows / before).sum(1, dtype=F16).sum(0, dtype=F16) / after
    else:  # each axis takes its mean
        summed = (rows.sum(1, dtype=reduce) / shards).sum(0, dtype=reduce) / replicas
    assert torch.equal(got.view(replicas, shards, 2), summed.to(F32).view(shards, 2).expand(replicas, -1, -1))


DIVISORS = st.sampled_from([1.0, 3.0, 12.0, 0.7, "sum", "mean"])


@given(st.integers(1, 9), st.sampled_from([None, F16, BF16, F64]), DIVISORS, st.booleans())
def test_the_sum_over_a_number(n: int, reduce: torch.dtype | None, by: Any, sharded: bool) -> None:
    """``test_set_reduce_scatter_divide_factor_mixed_prevision``: also where there is one rank; float16 in two parts."""
    xs = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(n))
    p = P("shard" if sharded else None, precision=Precision(reduce=reduce))
    rows = xs.to(reduce or F32)
    whole = {"sum": 1, "mean": n}.get(by, by)
    before, after = divide_factors(whole) if reduce == F16 else (1, whole)
    expected = ((rows / before).sum(0, dtype=rows.dtype) / after).to(F32)
    got = simulated({"shard": n}, p, xs, reduce=by)
    torch.testing.assert_close(got, expected.view(n, 2) if sharded else expected.expand(n, -1), rtol=0, atol=0)
    torch.testing.assert_close(expected, xs.sum(0) / whole, rtol=0.1, atol=0.1)


SUMMED = [Precision(reduce=reduce) for reduce in (None, F16, BF16)] + [Precision(param=BF16, reduce=F32), HALF]


@each(by=[3.0, 12.0, "sum", "mean"], precision=SUMMED, p=[P("shard"), P()])
@real_ranks(2)
def test_the_sum_over_a_number_on_real_ranks(rank: int, p: P, precision: Precision, by: Any) -> None:
    """A unit without elements is none of those that are divided."""
    model = Empty()
    spec, params = shards_of(fs.policies.always(dataclasses.replace(p, precision=precision)), model)
    xs = torch.randn(2, 4, generator=torch.Generator().manual_seed(7))
    param = precision.param or F32
    rows, whole = xs.to(param).to(precision.reduce or param), {"sum": 1, "mean": 2}.get(by, by)
    before, after = divide_factors(whole) if rows.dtype == F16 else (1, whole)
    expected = (((rows[0] / before) + (rows[1] / before)) / after).to(F32)
    for way in MAIN_WAYS:
        grads, _ = WAYS[way](lambda q: fs.functional_call(model, q, (xs[rank],), spec=spec, reduce=by))(params)
        same(grads, fs.shard({"a.w": expected, "b.w": expected, "empty.0": torch.zeros(0)}, spec))


@every(way=MAIN_WAYS, reduce=[None, F16, BF16], axis=["shard", None])
def test_one_real_rank_divides_by_the_number(axis: str | None, reduce: torch.dtype | None, way: str) -> None:
    """Although it reduces nothing."""
    model, x = Dot(3), torch.tensor([3.0, 4.5, 1 / 3])
    with world(1):
        spec = fs.policies.whole(P(axis, align=1, precision=Precision(reduce=reduce)))(model).bound
        grads, _ = WAYS[way](lambda q: fs.functional_call(model, q, (x,), spec=spec, reduce=3.0))(fs.shard(model, spec))
    torch.testing.assert_close(grads[""], x / 3, rtol=1e-2, atol=0)


# --- codecs ---
def scaled_encode(x: Tensor) -> tuple[Tensor, ...]:
    scale = x.abs().amax().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def scaled_decode(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(scale.dtype) * scale


def blocks_encode(x: Tensor) -> tuple[Tensor, ...]:
    """Int8 in blocks of 8, padded, a scale for each; an empty tensor says how long it was."""
    rows = torch.cat([x, x.new_zeros(-len(x) % 8)]).view(-1, 8)
    scales = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scales[:, None]).round().to(torch.int8), scales.half(), x.new_empty(len(x), 0)


def blocks_decode(rows: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    return (rows.to(like.dtype) * scales[:, None].to(like.dtype)).flatten()[: len(like)]


FLOAT8, BLOCKS = Codec(scaled_encode, scaled_decode), Codec(blocks_encode, blocks_decode)
CODECS = {"float8": FLOAT8, "blocks": BLOCKS}


def as_sent(codec: Codec, full: Mapping[str, Tensor], spec: fs.PartitionSpec, param: torch.dtype) -> dict[str, Tensor]:
    """The parameters that every rank computes with: each rank's slice encoded and decoded."""
    buffers: dict[str, Tensor] = {}
    for unit in spec:
        buffer = fs.flatten(full, spec)[unit.key]
        slices = [codec.decode(*codec.encode(piece)) for piece in buffer.chunk(spec.size(unit))] if unit.numel else [buffer]
        buffers[unit.key] = torch.cat(slices).to(param)
    return fs.unflatten(buffers, spec)


@each(param=[None, BF16], p=[P("shard"), P("shard", reshard=False), P("shard", remat=True), P()], name=CODECS)
@real_ranks(2)
def test_codec_on_real_ranks(rank: int, name: str, p: P, param: torch.dtype | None) -> None:
    """Computed with what decoding gives; the gradient as if it were the shard."""
    model, codec, given = mlps(), CODECS[name], param or F32
    xs = [batch(r, 0) for r in range(2)]
    plain = fs.by_type(MLP, p=p)(model).bound
    low = as_sent(codec, {n: q.detach() for n, q in model.named_parameters()}, plain, given)
    by_hand = lambda q, x: torch.func.functional_call(model, q, (x.to(given),)).float().pow(2).mean()  # noqa: E731
    results = [torch.func.grad_and_value(by_hand)(low, x) for x in xs]
    expected = fs.shard({n: (results[0][0][n].float() + results[1][0][n].float()) / 2 for n in low}, plain)
    _, spec, params = of_mlps(p, Precision(param=param, reduce=F32, codec=codec))
    for way in MAIN_WAYS:
        with Dtypes() as log, unchanged(model):
            grads, value = WAYS[way](loss_of(model, spec, xs[rank], of=squared))(params)
        assert torch.equal(value, results[rank][1])
        same(grads, expected)
        assert set(log.gathered) == ({U8} if p.axes else set())
        assert set(log.reduced) == {F32}
    full = fs.unshard(params, spec)  # neither cast nor encoded
    assert all(torch.equal(full[n], q) for n, q in model.named_parameters())


@every(codec=CODECS, sizes=[(8,), (2, 4)])
def test_what_is_sent_is_encoded(codec: str, sizes: tuple[int, ...]) -> None:
    """On 8 ranks, slices of the shard axis over it alone: one byte an element and the scales, each tensor to a multiple of 16
    bytes; in forward and in backward."""
    with world(8):
        model = mlps()
        policy = fs.by_type(MLP, p=P("shard", precision=Precision(codec=CODECS[codec])))
        spec, params = shards_of(policy, model, mesh_of(*sizes))
        n = spec.shard_numel(spec.by_key["0"])
        assert n == slice_numel(spec.by_key["0"], sizes[-1])
        with Collectives() as sent, torch.no_grad():
            fs.functional_call(model, params, (batch(0, 0),), spec=spec)
        up = lambda x: (x + 15) // 16 * 16  # noqa: E731
        whole = {"float8": up(n) + 16, "blocks": up((n + 7) // 8 * 8) + up(2 * ((n + 7) // 8))}[codec]
        assert [(x.op, x.bytes, x.ranks) for x in sent.all] == [("all_gather", whole, sizes[-1])] * 3
        assert whole < 2 * n


TUPLE, ELEMENTS = "expected encode to return a tuple of tensors", r"expected decode to return 4 elements, got shape \[%s\]"
CODEC_ERRORS: dict[str, tuple[Codec, type[Exception], str]] = {
    "a tensor": (Codec(lambda x: x, lambda x: x), TypeError, TUPLE + ", got Tensor"),
    "no tensor": (Codec(lambda x: (x, 3), lambda x, n: x), TypeError, TUPLE),
    "nothing": (Codec(lambda x: (), lambda: torch.ones(4)), TypeError, TUPLE + ", got an empty one"),
    "too few": (Codec(lambda x: (x,), lambda x: x[1:]), ValueError, ELEMENTS % "3"),
}


@pytest.mark.parametrize("name", CODEC_ERRORS)
def test_codec_errors(name: str) -> None:
    codec, error, match = CODEC_ERRORS[name]
    model = Dot(8)
    with world(2):
        spec, params = shards_of(fs.policies.whole(P("shard", align=1, precision=Precision(codec=codec))), model)
        run = lambda q: fs.functional_call(model, q, (torch.ones(8),), spec=spec)  # noqa: E731
        refused(error, match, lambda: run(params))
        refused(error, match, lambda: fs.hvp(run, params, params))  # by data flow

    def simulate(mesh: Any, x: Tensor) -> Tensor:
        on = fs.policies.whole(P("shard", align=1, precision=Precision(codec=codec)))(model).on(mesh)
        return fs.functional_call(model, fs.shard({"w": model.w.detach()}, on), (x,), spec=on)

    refused(error, match, lambda: fs.testing.spmd(simulate, 2)(torch.ones(2, 8)))


def test_codec_leaves_empty_units_and_integers_alone() -> None:
    """Neither is encoded."""
    model = Empty()
    model.register_parameter("n", nn.Parameter(torch.arange(8), requires_grad=False))
    seen: list[tuple[torch.dtype, int]] = []

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        seen.append((x.dtype, len(x)))
        return scaled_encode(x)

    with world(2):
        spec = fs.policies.always(P("shard", align=1, precision=Precision(codec=Codec(encode, scaled_decode))))(model).bound
        params = fs.shard(model, spec)
        fs.functional_call(model, params, (torch.ones(4),), spec=spec)
        some, rest = fs.partition(params, spec)
        fs.hvp(lambda p: fs.functional_call(model, fs.combine(p, rest), (torch.ones(4),), spec=spec), some, some)
        assert set(seen) == {(F32, 2)}
