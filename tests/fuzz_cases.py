"""Cases of the fuzzer: pieces put together, sharded and differentiated, beside the plain model. `run` says what is wrong."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mirror
import torch
from fuzz_modules import PIECES, WIDTH
from models import unchanged
from parity import WAYS, gradient, leaves_of
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, vjp
from torch.overrides import TorchFunctionMode

import funshard as fs
from funshard import P
from funshard._call.modes import compare_values

ROWS = 3
CODEC = fs.Precision(codec=fs.Codec(lambda x: (x,), lambda x: x))

PS = {
    "shard": P("shard"),
    "keep": P("shard", reshard=False),
    "remat": P("shard", remat=True),
    "keep remat": P("shard", reshard=False, remat=True),
    "replicated": P(),
    "replicated remat": P(remat=True),
    "codec": P("shard", precision=CODEC),
    "codec remat": P("shard", remat=True, precision=CODEC),
    "slice": P(("replicate", "shard"), reshard="shard"),
    "slice remat": P(("replicate", "shard"), reshard="replicate", remat=True),
    "group": P("shard", unit="group"),
    "group remat": P("shard", unit="group remat", remat=True),
}
"""Pieces that are a "group" are one unit together."""
COMPILED = {
    "compiled": P("shard", compile=fs.Compile(backend="aot_eager")),
    "compiled remat": P("shard", remat=True, compile=fs.Compile(backend="aot_eager")),
}
"""Not drawn at random: a compilation takes longer than a hundred cases."""
Params = Mapping[str, Tensor]
Loss = Callable[[Params], Tensor]
Result = tuple[dict[str, Tensor], list[Tensor]]
"""Something like the parameters, and values."""


@dataclass(frozen=True)
class Case:
    """``pieces`` in ``order``, with their ``ps`` ("" for none: the root's), their layers too if ``leaves``."""

    pieces: tuple[str, ...]
    ps: tuple[str, ...]
    transform: str
    order: tuple[int, ...] = ()
    root: str = "shard"
    leaves: bool = False
    tie: bool = False
    train: bool = True
    prefetch: int = 1
    mesh: tuple[int, ...] = (2,)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh's axes."""
        return dict(zip(("replicate", "shard")[-len(self.mesh) :], self.mesh, strict=True))


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PIECES[name]() for name in case.pieces)
        self.order = case.order or tuple(range(len(case.pieces)))
        first, last = self.parts[0], self.parts[-1]
        for part in self.parts[1:]:
            if hasattr(part, "lender"):
                part.lender = [first]
        if case.tie and isinstance(getattr(first, "l", None), nn.Linear) and isinstance(getattr(last, "l", None), nn.Linear):
            first.l.bias = last.l.bias

    def forward(self, x: Tensor) -> Tensor:
        caches: dict[Any, Any] = {}
        for i in self.order:
            part = self.parts[i]
            wants = getattr(part, "wants", None)
            given = () if wants is None else (caches.setdefault(wants, wants()),)
            x = torch.tanh(part(x, *given))
        return x


def build(case: Case) -> nn.Module:
    seed(1)
    net = Net(case)
    for module in net.modules():
        if not getattr(module, "low", False):
            for p in module.parameters(recurse=False):
                p.data = p.data if p.is_complex() else p.data.double()
            for name, b in module.named_buffers(recurse=False):
                module._buffers[name] = b.double() if b.is_floating_point() else b
    for part in net.parts:
        if getattr(part, "low", False):
            part.float() if case.pieces and type(part).__name__ == "AutocastSingle" else part.double()
    return net.train(case.train)


def policy(case: Case, net: nn.Module) -> fs.PartitionSpec:
    ps = PS | COMPILED
    if len(case.mesh) == 1:
        ps = {k: p if len(p.axes) < 2 else replace(p, axis="shard", reshard=True) for k, p in ps.items()}
    paths: dict[str, P] = {"": replace(ps[case.root], unit=None)}
    for i, name in enumerate(case.ps):
        if name:
            paths[f"parts.{i}"] = ps[name]
            inside = net.parts[i].named_modules(prefix=f"parts.{i}") if case.leaves else ()
            alone = replace(ps[name], unit=None)
            paths |= {path: alone for path, module in inside if module._parameters and path != f"parts.{i}"}
    return fs.by_path(paths)(net)


def size(tree: Params) -> Tensor:
    return sum(((t * t.conj()).real.sum().double() for t in tree.values()), torch.zeros((), dtype=torch.float64))


def along(tree: Params, v: Params) -> Tensor:
    return sum(((t * v[k].conj()).real.sum().double() for k, t in tree.items()), torch.zeros((), dtype=torch.float64))


def dense(tree: Params) -> dict[str, Tensor]:
    return {k: t.to_dense() if t.is_sparse else t for k, t in tree.items()}


def twice_by_autograd(f: Loss, p: Params, v: Params) -> Result:
    leaves = leaves_of(p)
    first = dense(gradient(f(leaves), leaves, create_graph=True))
    return dense(gradient(along(first, v), leaves)), []


def penalty_by_autograd(f: Loss, p: Params, v: Params) -> Result:
    leaves = leaves_of(p)
    value = f(leaves)
    first = dense(gradient(value, leaves, create_graph=True))
    return dense(gradient(value + size(first), leaves)), []


def with_value(g: Callable[..., Any]) -> Callable[[Loss, Params, Params], Result]:
    def run(f: Loss, p: Params, v: Params) -> Result:
        grads, value = g(f)(p)
        return dense(grads), [value]

    return run


by_autograd, by_backward = with_value(WAYS["autograd.grad"]), with_value(WAYS["backward"])


def by_vjp(f: Loss, p: Params, v: Params) -> Result:
    value, pullback = vjp(f, p)
    return dense(pullback(torch.full_like(value, 0.7))[0]), [value]


def by_jvp(f: Loss, p: Params, v: Params) -> Result:
    return {}, list(jvp(f, (p,), (v,)))


class NoGradRecorder(TorchFunctionMode):
    """Notes whether a function of torch is called where gradients are off, and whether one masks its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.is_used = self.has_padding_idx = False

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.is_used |= not torch.is_grad_enabled()
        self.has_padding_idx |= (kwargs or {}).get("padding_idx") is not None  # of F.embedding
        return func(*args, **(kwargs or {}))


def by_hvp(f: Loss, p: Params, v: Params) -> Result:
    """By torch's jvp, or by reverse mode alone where forward uses no_grad, which torch's jvp ignores.

    A pullback is linear, and its own pullback is the derivative of the gradient.
    """
    with NoGradRecorder() as recorder:
        f(p)
    if not recorder.is_used:
        return jvp(grad(f), (p,), (v,))[1], []
    if recorder.has_padding_idx:
        raise NotImplementedError("torch's second derivative in reverse mode ignores that padding_idx masks the first one")
    first, pullback = vjp(grad(f), p)
    if any(t.is_sparse for t in first.values()):
        raise NotImplementedError("a sparse gradient has no derivative")
    zeros = {key: torch.zeros_like(t) for key, t in p.items()}
    product, transposed = vjp(lambda u: pullback(u)[0], zeros)[1](v)[0], pullback(v)[0]
    if not all(torch.allclose(t, transposed[key], rtol=1e-6, atol=1e-9) for key, t in product.items()):
        raise NotImplementedError("torch's two products differ: of detached values, and of the old weight_norm")
    return product, []


def along_by(g: Callable[..., Any]) -> Callable[[Loss, Params, Params], Result]:
    return lambda f, p, v: (dense(g(lambda p: f(p) + along(dense(g(f)(p)), v))(p)), [])


def evaluated(mode: Callable[[], Any]) -> Callable[[Loss, Params, Params], Result]:
    def run(f: Loss, p: Params, v: Params) -> Result:
        with mode():
            return {}, [f(p)]

    return run


TRANSFORMS: dict[str, tuple[Callable[[Loss, Params, Params], Result], Callable[[Loss, Params, Params], Result]]] = {
    "fs.grad": (with_value(fs.grad_and_value), by_autograd),
    "grad": (with_value(grad_and_value), with_value(grad_and_value)),
    "backward": (by_backward, by_backward),
    "vjp": (by_vjp, by_vjp),
    "jvp": (by_jvp, by_jvp),
    "hvp": (lambda f, p, v: (fs.hvp(f, p, v), []), by_hvp),
    "grad of grad": (along_by(grad), along_by(grad)),
    "fs.grad of fs.grad": (along_by(fs.grad), along_by(fs.grad)),
    "grad of jvp": (lambda f, p, v: (dense(grad(lambda p: jvp(f, (p,), (v,))[1])(p)), []),) * 2,
    "double backward": (twice_by_autograd, twice_by_autograd),
    "penalty": (penalty_by_autograd, penalty_by_autograd),
    "no_grad": (evaluated(torch.no_grad), evaluated(torch.no_grad)),
    "inference_mode": (evaluated(torch.inference_mode), evaluated(torch.inference_mode)),
}
"""What runs on shards, and what is as much on the whole model."""

MEANS = ("fs.grad", "grad", "vjp", "jvp", "hvp", "no_grad")
"""Those that on simulated ranks are, inside of each rank, means over ranks."""

NAMED = re.compile(
    r"(unit|module|parameter|buffer|argument|attribute) '|functional_call: |per_sample_grads\("
    # torch's own words for what a transform cannot run where the plain model runs in another one
    r"|inside of a function being transformed by a functorch transform|Batching rule not implemented for"
)


def batch(rank: int) -> Tensor:
    """Positive, so that ranks take the same branches."""
    return torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3 + rank))


def score(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, WIDTH, dtype=out.dtype)).sin().sum()


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 10 ms: it has every device in mind


def direction(full: Params) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    kinds = {name: torch.cfloat if p.is_complex() else torch.float for name, p in full.items()}
    return {name: torch.randn(p.shape, generator=draw, dtype=kinds[name]).to(p) for name, p in full.items()}


class Plain:
    """The unsharded model: never the very one that is sharded, and its parameters only in copies."""

    def __init__(self, case: Case, ranks: int, *, equal: bool = False) -> None:
        self.case, self.ranks, self.equal = case, ranks, equal
        self.net = build(case)
        self.spec = policy(case, self.net)
        values = self.repeated({name: p.detach() for name, p in self.net.named_parameters()})
        self.full = {name: p.detach().clone() for name, p in values.items()}
        self.trained = {name: p for name, p in self.full.items() if self.net.get_parameter(name).requires_grad}

    def repeated(self, tree: Params) -> dict[str, Tensor]:
        """What equal ranks have, all with the first one's shards."""
        if not self.equal:
            return dict(tree)
        spec = self.spec.on(self.case.sizes)
        shards = fs.shard(tree, spec, rank=0)
        return fs.unflatten({unit.key: torch.cat([shards[unit.key]] * spec.size(unit)) for unit in spec}, spec)

    def another(self) -> nn.Module:
        """The model again; old-style reparametrizations keep what cannot be copied."""
        try:
            return copy.deepcopy(self.net)
        except RuntimeError:
            with torch.random.fork_rng(devices=[]):
                return build(self.case)

    def sharded(self) -> nn.Module:
        """The model with its values, to be sharded."""
        net = self.another()
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.data.copy_(self.full[name])
        return net

    def loss(self, rank: int, x: Tensor | None = None) -> Loss:
        def f(params: Params) -> Tensor:
            seed(11 + rank)
            buffers = {name: b.clone() for name, b in self.net.named_buffers()}
            tensors = {name: t.clone() for name, t in {**self.full, **params}.items()}
            return score(torch.func.functional_call(self.another(), {**tensors, **buffers}, (batch(rank) if x is None else x,)))

        return f

    def mean(self, params: Params) -> Tensor:
        return torch.stack([self.loss(rank)(params) for rank in range(self.ranks)]).mean()

    @functools.cached_property
    def direction(self) -> dict[str, Tensor]:
        found = self.repeated({**self.full, **direction(self.trained)})
        return {name: found[name] for name in self.trained}

    def on_batch(self, transform: str, x: Tensor, params: Params) -> Result:
        return TRANSFORMS[transform][1](self.loss(0, x), params, self.direction)

    def run(self, transform: str, rank: int) -> Result:
        """Like the parameters: of the mean over ranks; values: this rank's."""
        reference = TRANSFORMS[transform][1]
        tree, values = reference(self.loss(rank), self.trained, self.direction)
        return (tree if self.ranks == 1 else reference(self.mean, self.trained, self.direction)[0]), values


def sharded(plain: Plain, net: nn.Module, spec: fs.PartitionSpec, x: Tensor, rank: int | None) -> tuple[Loss, Params, Params]:
    """The loss, and shards of the parameters and a direction, of what is trained."""
    trained, frozen = fs.partition(fs.shard(net, spec), spec)
    v = fs.shard({**plain.full, **plain.direction}, spec, rank=rank)

    def f(params: Params) -> Tensor:
        seed(11 + (rank or 0))
        return score(fs.functional_call(net, fs.combine(params, frozen), x, spec=spec, prefetch=plain.case.prefetch))

    return f, trained, {k: v[k] for k in trained}


def modes() -> tuple[Any, ...]:
    """Thread-local modes of torch that a call must leave as they are."""
    hooks, level = torch._C._autograd._top_saved_tensors_default_hooks(True), torch._C._functorch.maybe_current_level()
    grad_and_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *grad_and_inference, torch.is_autocast_enabled("cpu"), level, hooks, torch.get_default_dtype()


@contextlib.contextmanager
def untouched(net: nn.Module, tensors: list[Tensor]) -> Iterator[None]:
    """Raises Verdict where the block raises, and unless model, tensors and modes are as before.

    With an error a tensor may have been written to if its values were put back.
    """
    copies, versions, before = [t.clone() for t in tensors], [t._version for t in tensors], modes()
    error: BaseException | None = None
    try:
        with unchanged(net):
            try:
                yield
            except Exception as raised:
                error = raised
        assert modes() == before, f"other modes: expected {before}, got {modes()}"
        for i, (t, c, version) in enumerate(zip(tensors, copies, versions, strict=True)):
            assert torch.equal(t, c), f"the caller's tensor {i} was changed"
            assert error is not None or t._version == version, f"the caller's tensor {i} was written to"
    except AssertionError as changed:
        raise Verdict(f"changed: {changed}") from error
    if error is not None:
        raise Verdict(refusal(error)) from error


class Verdict(Exception):
    """On a case that ends here."""


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """What cannot run here has no reference."""
    try:
        yield
    except Exception as error:
        raise Verdict(f"no reference: {type(error).__name__}: {error}") from error


def judged(f: Callable[..., str]) -> Callable[..., str]:
    """The function's result, or the verdict at which it ended; warnings are nobody's matter."""

    @functools.wraps(f)
    def judge(*args: Any, **kwargs: Any) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return f(*args, **kwargs)
            except Verdict as verdict:
                return str(verdict)

    return judge


def watched(case: Case) -> contextlib.AbstractContextManager[None]:
    """Compare values of parameters where a piece writes to them: versions miss ``.data``, and nothing else restores them."""
    writes = {"ClampsData", "ClampsWithoutGrad", "MaxNorm", "ScalesAfterUse"}
    return contextlib.nullcontext() if writes.isdisjoint(case.pieces) else compare_values()


@judged
def run(case: Case, mesh: Any = None, rank: int = 0, ranks: int = 1, *, equal: bool = False) -> str:
    """What is wrong with the case on these ranks; "" if nothing is, "refused: ..." if an error says what.

    With ``equal`` the ranks of the mesh all do the same (mirror.py).
    """
    plain = Plain(case, ranks, equal=equal)
    with reference():
        expected, values = plain.run(case.transform, rank)
    drawn = torch.get_rng_state()
    net, x = plain.sharded(), batch(rank)
    spec = plain.spec if mesh is None else plain.spec.on(mesh)
    f, params, v = sharded(plain, net, spec, x, rank)
    with untouched(net, [*params.values(), *v.values(), x]), watched(case):
        got, got_values = TRANSFORMS[case.transform][0](f, params, v)
    want = {} if not expected else fs.shard({**plain.full, **expected}, spec, rank=rank)
    apart = [compare(f"unit '{k}'", got[k], want[k], case) for k in got]
    apart += [compare("value", a, b, case) for a, b in zip(got_values, values, strict=True)]
    if ranks == 1 and not torch.equal(drawn, torch.get_rng_state()):
        apart.append("other random numbers were drawn")
    return "; ".join(text for text in apart if text)


def refusal(error: Exception) -> str:
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return f"{'refused' if NAMED.search(text) else 'crash'}: {type(error).__name__}: {text}"


def mirrored(rank: int, case: Case) -> str:
    """As `run`, on ranks that are all equal, in one process (of a pool of one)."""
    return run(case, mirror.mesh(case.sizes), equal=True)


@judged
def per_sample(rank: int, case: Case, clip: float | None) -> str:
    """Of per_sample_grads on equal ranks, what is wrong: beside vmap of the plain gradient."""
    plain, x = Plain(case, 1, equal=True), batch(0)
    with reference():
        each = torch.vmap(grad(lambda p, row: plain.loss(0, row[None])(p)), (None, 0))(plain.trained, x)
    net, spec = plain.sharded(), plain.spec.on(mirror.mesh(case.sizes))
    trained, frozen = fs.partition(fs.shard(net, spec), spec)

    def f(params: Params, row: Tensor) -> Tensor:
        seed(11)
        return score(fs.functional_call(net, fs.combine(params, frozen), row[None], spec=spec))

    with untouched(net, [*trained.values(), x]), watched(case):
        got = fs.per_sample_grads(f, trained, x, spec=spec, clip=clip)
    if clip is not None:
        norms = sum((g.abs() ** 2).reshape(len(g), -1).sum(1).double() for g in each.values()).sqrt()
        scale = (clip / (norms + 1e-6)).clamp(max=1)
        mean = {name: (g * scale.to(g).view(-1, *(1,) * (g.dim() - 1))).mean(0) for name, g in each.items()}
        full = fs.shard({**plain.full, **mean}, spec, rank=0)
        each = {key: full[key] for key in trained}
    if got.keys() != each.keys():
        return f"WRONG keys {list(got)}, expected {list(each)}"
    return "; ".join(text for k in got if (text := compare(f"'{k}'", got[k], each[k], case)))


def on_real_ranks(rank: int, case: Case) -> str:
    """As `run`, on ranks with batches of their own."""
    several = len(case.mesh) > 1
    mesh = torch.distributed.init_device_mesh("cpu", case.mesh, mesh_dim_names=tuple(case.sizes)) if several else None
    return run(case, mesh, rank, torch.Size(case.mesh).numel())


def compare(what: str, got: Tensor, expected: Tensor, case: Case) -> str:
    tolerance = 1e-2 if any("Autocast" in name for name in case.pieces) else 1e-9
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"WRONG {what}: {list(got.shape)} {got.dtype}, expected {list(expected.shape)} {expected.dtype}"
    if torch.allclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"WRONG {what}: by {(got - expected).abs().max():.3g} of {expected.abs().max():.3g}"


@judged
def on_simulated(rank: int, case: Case) -> str:
    """As `run`, on ranks that are a batch dimension of vmap (in a pool of one)."""
    sizes, ranks = case.sizes, torch.Size(case.mesh).numel()
    plain = Plain(case, ranks)
    xs = torch.stack([batch(rank) for rank in range(ranks)])
    stacked = {name: torch.stack([p] * ranks) for name, p in plain.trained.items()}
    assert plain.direction.keys() == stacked.keys()  # drawn here, and not once for each simulated rank
    transform = "grad" if case.transform == "fs.grad" else case.transform
    with reference():
        fs.testing.spmd(lambda _, *args: plain.on_batch(transform, *args), sizes)(xs, stacked)  # what vmap cannot run
        found = [plain.run(case.transform, rank) for rank in range(ranks)]
    net = plain.sharded()

    def on_a_rank(mesh: Any, x: Tensor) -> Result:
        f, params, v = sharded(plain, net, plain.spec.on(mesh), x, None)
        return TRANSFORMS[case.transform][0](f, params, v)

    with untouched(net, [xs]), watched(case):
        got, values = fs.testing.spmd(on_a_rank, sizes)(xs)
    apart: list[str] = []
    spec = plain.spec.on(sizes)
    for rank, (tree, own) in enumerate(found):
        want = {} if not tree else fs.shard({**plain.full, **tree}, spec, rank=rank)
        apart += [compare(f"unit '{k}' on rank {rank}", got[k][rank], want[k], case) for k in got]
        apart += [compare(f"value on rank {rank}", a[rank], b, case) for a, b in zip(values, own, strict=True)]
    return "; ".join(text for text in apart if text)
