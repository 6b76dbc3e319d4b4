"""init: parameters born sharded are the slices of one model, whose values follow from a seed and names alone."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import strategies
import torch
import transformers
from cases import same
from collective_log import world
from depth import at_most, depth, pairs
from hypothesis import given
from hypothesis import strategies as st
from models import TEXT_SIZES, of_transformers, refused, unchanged, with_forward
from peer_models import MLP, Net, Transformer
from ranks import mesh_of, real_ranks
from test_memory import Peak
from torch import Tensor, nn

import funshard as fs
from funshard import P, _torch

InitFn = Callable[[nn.Module], object]


def children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from children_first(child, seen)
    yield module


def reset(module: nn.Module) -> None:
    """What torch's layers do by themselves."""
    for name in ("reset_parameters", "_reset_parameters" if isinstance(module, nn.MultiheadAttention | nn.Transformer) else ""):
        if name and callable(fn := getattr(module, name, None)):
            fn()


def seeded(model: nn.Module, seed: int, init_fn: InitFn = reset) -> nn.Module:
    """The reference: the whole model in memory, its modules initialised children first; tied parameters by the first one."""
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(torch.nan if x.is_floating_point() else 99)
        paths = {module: path for path, module in model.named_modules()}
        owners: dict[Tensor, nn.Module] = {}
        for module in children_first(model, set()):
            for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                owners.setdefault(x, module)
        for module in children_first(model, set()):
            tensors = [(own, name, x) for own in (module._parameters, module._buffers) for name, x in own.items()]
            tied = [(own, name, x) for own, name, x in tensors if x is not None and owners.get(x, module) is not module]
            for own, name, x in tied:  # later: until then it has another tensor
                own[name] = nn.Parameter(x.clone(), x.requires_grad) if isinstance(x, nn.Parameter) else x.clone()
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {paths[module]}".encode()).digest()[:7], "big"))
            init_fn(module)
            for own, name, x in tied:
                own[name] = x
    return model


class Tied(nn.Module):
    """Ties, a module that is there twice, parameters of every kind, and a parent that looks after its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.inner = MixedKinds()
        self.again = nn.ModuleList([self.inner, nn.Linear(8, 3)])


class MixedKinds(nn.Module):
    """Several dtypes, some frozen, a scalar and nothing at all in one module: three units of one path."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = nn.Parameter(torch.empty(3, 5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.empty(()))
        self.none = nn.Parameter(torch.empty(0, 2))
        self.frozen = nn.Parameter(torch.empty(7), requires_grad=False)
        self.codes = nn.Parameter(torch.empty(5, dtype=torch.int32), requires_grad=False)
        self.sub = nn.Linear(2, 3)
        self.sub.bias.requires_grad_(False)

    def reset_parameters(self) -> None:
        for x in self.parameters(recurse=False):
            x.random_(-9, 9)
        self.sub.weight.mul_(2)  # reads what the child has
        self.sub.bias = nn.Parameter(torch.randn(3), requires_grad=False)  # and puts another in its place


class Chooses(nn.Linear):
    """Decides by its own values, which on the meta device nobody knows."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight.data[0, 0].item() > 0:
            self.bias.data = torch.ones(self.bias.shape, device=self.bias.device)  # which touches nothing
        self.weight.numpy()[1:3] = 0
        if self.weight.sum() > 0:
            self.weight.neg_()
        self.bias = nn.Parameter(self.bias - 1)


LAST = torch.channels_last
MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "chooses": lambda: nn.Sequential(Chooses(4, 3), Chooses(3, 4), nn.Linear(4, 50)),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, (1, 3))).to(memory_format=LAST),
    "encoder": lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 40), nn.LSTM(8, 3, num_layers=2, bidirectional=True)),
    "transformer": lambda: Transformer(layers=2, tied=True),
}
POLICIES: dict[str, Callable[[nn.Module], fs.PartitionSpec]] = {
    "whole": fs.policies.whole(),
    "always": fs.policies.always(),
    "size": fs.by_size(40, p=P(align=1)),
    "linear": fs.by_type(nn.Linear, nn.Conv2d, p=P()),
    "replicated": fs.policies.whole(P(None)),
    "ignoring": lambda m: fs.policies.ignoring(
        fs.policies.always(), params=[n for n, _ in m.named_parameters() if n.endswith("bias")]
    )(m),
    "children": lambda m: fs.by_path({name: P("shard") for name, c in m.named_children() if [*c.parameters()]})(m),
}

OVER_UNITS = {(name, policy) for name in ("tied", "encoder") for policy in ("always", "linear", "ignoring")}
"""MixedKinds writes to its child, and torch's attention to the bias of its output layer, which are units of their own here."""


def bare(name: str) -> nn.Module:
    """On the meta device, ties and all."""
    return fs.skeleton(MODELS[name]())


@at_most(12)
@pairs(sizes=[{"shard": 1}, {"shard": 3}, {"shard": 8}, {"replicate": 2, "shard": 2}], policy=POLICIES, name=MODELS)
def test_slices_of_one_model(name: str, policy: str, sizes: dict[str, int]) -> None:
    """Bit for bit, on any mesh, with any policy, at every rank, or refused where a module writes to units inside it."""
    model = bare(name)
    spec = POLICIES[policy](model).on(sizes)
    if (name, policy) in OVER_UNITS:
        words = r"initialiser of module '(inner|0\.self_attn)' .* in other units"
        with unchanged(model):
            refused(ValueError, words, lambda: fs.init(model, spec, seed=7, rank=0))
        return
    full = dict(seeded(MODELS[name](), 7).named_parameters())
    before = torch.get_rng_state()
    for rank in {0, math.prod(sizes.values()) - 1}:
        with unchanged(model):
            params = fs.init(model, spec, seed=7, rank=rank)
        same(params, fs.shard(full, spec, rank=rank))
    assert torch.equal(torch.get_rng_state(), before)


def draw(module: nn.Module) -> None:
    for x in module.parameters(recurse=False):
        x.data.copy_(torch.randn(x.shape))  # as initialisers of old do


def draw_and_halve(module: nn.Module) -> None:
    draw(module)
    for child in module.children():
        for x in child.parameters():
            x.mul_(0.5)


@given(st.data())
def test_law(data: st.DataObject) -> None:
    """Random trees with ties and shared modules, policies and meshes, initialisers of themselves and of all below them."""
    full = data.draw(strategies.modules(frozen=True))
    model = fs.skeleton(full)
    spec = data.draw(strategies.policies(model))(model).on(data.draw(strategies.meshes()))
    rank = data.draw(st.integers(0, math.prod(size for _, size in spec.bound_mesh.sizes) - 1))
    init_fn = data.draw(st.sampled_from([draw, draw_and_halve]))
    want = fs.shard(seeded(full, 3, init_fn), spec, rank=rank, check_values=False)
    try:
        with unchanged(model):
            got = fs.init(model, spec, init_fn=init_fn, seed=3, rank=rank)
    except ValueError as error:  # by small units
        if "in other units" not in str(error):
            raise
    else:
        same(got, want)


def test_values_follow_from_names_alone() -> None:
    """What else is in the model, and what other modules draw, changes nothing; a seed does, and so does a name."""

    def of(model: nn.Module, seed: int | None = 0) -> dict[str, Tensor]:
        spec = fs.policies.always()(model)
        return fs.unshard(fs.init(model, spec, seed=seed), spec)

    with torch.device("meta"):
        small = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
        large = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.LSTM(9, 9))
    values, more = of(small), of(large)
    same(values, {name: more[name] for name in values})
    assert not torch.equal(values["0.weight"], values["1.weight"])
    assert not torch.equal(values["0.weight"], of(small, 1)["0.weight"])
    torch.manual_seed(5)
    torch.randn(3)
    same(of(small, None), of(small, 5))


def test_an_init_fn_of_fsdp() -> None:
    """FSDP1's param_init_fn makes room by itself, in other memory, and then initialises: the same values."""

    def param_init_fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        reset(module)

    model = bare("encoder")
    spec = fs.by_type(nn.TransformerEncoderLayer)(model)
    same(fs.init(model, spec, init_fn=param_init_fn, seed=1), fs.init(model, spec, seed=1))


def test_simulated_ranks_and_an_ambient_device() -> None:
    """Inside spmd every rank has its slices; a device that is the default for now is not that of the values."""
    model = bare("transformer")
    spec = fs.policies.always()(model)
    slices = fs.testing.spmd(lambda mesh, _: fs.init(model, spec.on(mesh), seed=2), 3)(torch.zeros(3))
    for rank in range(3):
        with torch.device("meta"):
            params = fs.init(model, spec.on({"shard": 3}), seed=2, rank=rank)
        same(params, {key: piece[rank] for key, piece in slices.items()})


def test_where_units_rest() -> None:
    """In a codec, on the host: as shard puts them."""
    model = fs.skeleton(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    model[0].requires_grad_(False)
    at_rest = {"0": P("shard", at_rest=fs.codecs.nf4()), "1": P("shard", offload="params")}
    spec = fs.by_path(at_rest)(model).on({"shard": 2})
    full = seeded(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), 0)
    full[0].requires_grad_(False)
    for rank in range(2):
        same(fs.init(model, spec, seed=0, rank=rank), fs.shard(full, spec, rank=rank))


# --- transformers, by its own initialisers. ---
def gpt2() -> Any:
    return of_transformers("gpt2", 1).model.eval()


def llama(layers: int = 2, **sizes: int) -> Any:
    return of_transformers("llama_tied", 1, num_hidden_layers=layers, tie_word_embeddings=False, **sizes).model.eval()


def bert() -> Any:
    return of_transformers("bert_with_dropout", 1).model.eval()


def masked_bert() -> Any:
    config = transformers.BertConfig(**TEXT_SIZES | {"num_hidden_layers": 1, "pad_token_id": 3})
    return transformers.BertForMaskedLM(config).eval()


@at_most(1)
@pytest.mark.parametrize("make", [gpt2, llama, bert, masked_bert])
def test_transformers(make: Callable[[], Any]) -> None:
    """Its initialisers, GPT-2's of projections and the buffers' too; then it computes what the model in memory does."""
    with torch.device("meta"):
        model = make()
    init_fn = model._init_weights
    full = make()
    buffers = {name: b.clone() for name, b in full.named_buffers()}
    full = seeded(full, 0, init_fn)
    ids = torch.arange(5)[None]
    for policy in (fs.policies.always(), fs.by_size(300)):
        spec = policy(model)
        with unchanged(model):
            params = fs.init(model, spec, init_fn=init_fn, seed=0)
            made = fs.init_buffers(model, spec, init_fn=init_fn, seed=0)
        same(params, fs.shard(full, spec))
        same(made, buffers)
        with torch.no_grad():
            torch.testing.assert_close(
                fs.functional_call(model, params, (ids,), spec=spec, buffers=made).logits, full(ids).logits
            )
    if make is gpt2:
        projection = full.transformer.h[0].mlp.c_proj.weight.detach()
        assert float(projection.std()) == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.2)


def assigned(reset: InitFn) -> InitFn:
    """recipes.md, "A model that does not fit": a weight that a parametrization computes is assigned."""

    def init_fn(module: Any) -> None:
        reset(module)
        for name, steps in getattr(module, "parametrizations", {}).items():
            weight = nn.init.kaiming_uniform_(torch.empty_like(getattr(module, name)), a=5**0.5)
            setattr(module, name, weight)
            for step in (step for step in steps if hasattr(step, "_power_method")):
                step._u.normal_()
                step._v.normal_()
                step._power_method(weight.flatten(1), 15)

    return init_fn


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrized_weight(norm: Callable[[nn.Module], nn.Module]) -> None:
    """It is refused with the recipe, and right by it: its layer computes what the one in memory does."""
    with torch.device("meta"):
        model = nn.Sequential(norm(nn.Linear(6, 4)))
    spec = fs.policies.whole()(model)
    with pytest.raises(ValueError, match=r"parameter '0\.parametrizations\.weight\.original.*has to assign a weight that"):
        fs.init(model, spec, seed=0)
    init_fn = assigned(reset)
    with torch.no_grad():
        full = seeded(nn.Sequential(norm(nn.Linear(6, 4))), 0, init_fn).eval()
    x = torch.randn(3, 6)
    params, buffers = (make(model, spec, init_fn=init_fn, seed=0) for make in (fs.init, fs.init_buffers))
    torch.testing.assert_close(fs.functional_call(model.eval(), params, x, spec=spec, buffers=buffers), full(x))
    assert all(torch.linalg.matrix_norm(full[0].weight, 2) < 1.2 for _ in buffers)  # a spectral norm of about 1


# --- Buffers. ---
def test_statistics_of_batch_norm() -> None:
    """Training with them, as plainly: a dict that is updated."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("scale", torch.arange(4.0))
    spec = fs.policies.always()(model)
    params, buffers = fs.init(model, spec, seed=0), fs.init_buffers(model, spec, seed=0)
    assert list(buffers) == ["scale", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert buffers["scale"] is not model.scale
    x = torch.randn(8, 3)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    plain.load_state_dict(fs.unshard(params, spec), strict=False)
    torch.testing.assert_close(fs.functional_call(model, params, x, spec=spec, buffers=buffers), plain(x))
    torch.testing.assert_close({name: b for name, b in buffers.items() if name != "scale"}, dict(plain.named_buffers()))
    words = r"functional_call: buffers are on the meta device, .*: '1\.running_mean'.*fs\.init_buffers"
    refused(ValueError, words, lambda: fs.functional_call(model, params, x, spec=spec))


def test_what_has_no_values_is_not_read() -> None:
    """torch gives memory that nobody wrote to for a product by a tensor on the meta device."""
    with torch.device("meta"):
        reading = with_forward(nn.Linear, lambda self, x: nn.Linear.forward(self, x) @ self.mask)  # as torch also does without
        model = nn.Sequential(reading(2, 2), nn.Linear(2, 2, bias=False))
        model[0].mask = nn.Buffer(torch.eye(2))
    spec = fs.policies.whole()(model)
    params, x, before = fs.init(model, spec, seed=0), torch.randn(3, 2), model[0].mask
    words = r"buffers are on the meta device, without values: '0\.mask'; expected all in buffers="
    refused(ValueError, words, lambda: fs.functional_call(model, params, x, spec=spec))
    assert model[0].mask is before
    buffers = {"0.mask": torch.eye(2)}
    plain = x @ fs.unshard(params, spec)["0.weight"].T + fs.unshard(params, spec)["0.bias"]
    out = fs.functional_call(model, params, x, spec=spec, buffers=buffers)
    torch.testing.assert_close(out, plain @ fs.unshard(params, spec)["1.weight"].T)
    some = fs.policies.ignoring(fs.policies.whole(), ["1"])(model)
    params = fs.init(model, some, seed=0)
    words = r"the spec ignores are on the meta device, without values: '1\.weight'; expected them in"
    refused(ValueError, words, lambda: fs.functional_call(model, params, x, spec=some, buffers=buffers))
    params |= {"1.weight": torch.eye(2)}
    torch.testing.assert_close(fs.functional_call(model, params, x, spec=some, buffers=buffers), plain)
    meta = {key: tensor.to("meta") for key, tensor in params.items()}
    assert fs.functional_call(model, meta, x.to("meta"), spec=some).is_meta  # shapes alone


class Masked(nn.Linear):
    def __init__(self, device: str | None = None) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(2, 2, device=device).tril(), persistent=False)
        self.alias = nn.Module()
        self.alias.register_buffer("mask", self.mask)


def test_a_buffer_that_its_constructor_alone_computes() -> None:
    """It is named, unless it has its values; where modules share one, all have the same."""
    with torch.device("meta"):
        lost, kept = Masked(), Masked(device="cpu")
    spec = fs.policies.whole()(lost)
    fs.init(lost, spec)
    with pytest.raises(ValueError, match=r"init: buffer 'mask' of module '' \(Masked\) was left without values"):
        fs.init_buffers(lost, spec)
    made = fs.init_buffers(kept, spec)
    same(made, {"mask": torch.ones(2, 2).tril(), "alias.mask": torch.ones(2, 2).tril()})
    assert made["mask"] is made["alias.mask"] is not kept.mask


# --- What is refused, with everything left as it was. ---
class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, dtype=dtype), requires_grad=dtype.is_floating_point)


def resets(name: str, reset: Callable[[Any], object], base: type[nn.Module] = nn.Sequential) -> Callable[..., nn.Module]:
    """A class of modules, by default of layers in a row, whose ``reset_parameters`` it is."""
    return type(name, (base,), {"reset_parameters": reset})


ResetsAll = resets("ResetsAll", lambda layers: [layer.reset_parameters() for layer in layers])
LooksAtChildren = resets("LooksAtChildren", lambda layers: layers[0].weight.sum() > 0 and layers[1].weight.neg_())
Counts = resets("Counts", lambda module: None, Scale)


def noted(module: nn.Module) -> None:
    if not hasattr(module, "was_here"):
        module.was_here = True
        raise KeyError("weight")


def one(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind())


def linears() -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(3)]


def three(kind: Callable[..., nn.Module] = nn.Sequential) -> Callable[[], nn.Module]:
    return lambda: kind(*linears())


def fill(value: float) -> InitFn:
    """Of each layer, and of a parent what it says itself."""
    return lambda m: reset(m) if len([*m.parameters()]) > 2 else [nn.init.constant_(x, value) for x in m.parameters()]


LEFT = r"'1\.bias' of module '1' \(LayerNorm\) was left without values.*init_fn=, which is then all that initialises modules"
ON_META = r"failed: .*; parameters of other units are on the meta device then: expected an init"
REFUSED: dict[str, tuple[Any, ...]] = {
    "no initialiser": (one(Scale), {}, r"parameter '0\.weight' of module '0' \(Scale\) was left .* its reset_p"),
    "in part": (
        one(resets("Part", lambda module: module.weight[1:].normal_(), Scale)),
        {},
        r"'0\.weight' of module '0' \(Part\) was left without values, or",
    ),
    "whole numbers": (one(lambda: Counts(torch.int64)), {}, r"'0\.weight' of module '0' \(Counts\) was left without"),
    "init_fn of some": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
        {"init_fn": lambda m: reset(m) if isinstance(m, nn.Linear) else None},
        LEFT,
    ),
    "tied": (Tied, {"init_fn": lambda m: isinstance(m, nn.Embedding) or reset(m)}, r"'embed\.weight' .* was left"),
    "another shape": (
        one(resets("Other", lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4))), Scale)),
        {},
        r"\(Other\) failed: ValueError: expected \[3\].*of '0\.weight', got \[4\]",
        RuntimeError,
    ),
    "a root that resets all": (
        three(ResetsAll),
        {},
        r"\(ResetsAll\) touches '0\.bias', '0\.weight', '1\.bias', .* \(6 in all\), in other units",
    ),
    "a look at children": (
        three(LooksAtChildren),
        {"init_fn": fill(1)},
        r"module '' \(LooksAtChildren\) touches '0\.bias', '1\.weight', in other units",
    ),
    "a look without values": (three(LooksAtChildren), {"init_fn": fill(-1)}, rf"\(LooksAtChildren\) {ON_META}", RuntimeError),
    "an error": (three(), {"init_fn": noted}, r"of module '0' \(Linear\) failed: KeyError", RuntimeError),
    "init_fn": (lambda: nn.Linear(1, 1), {"init_fn": 3}, "init_fn: expected a function of a module, got int", TypeError),
    "seed": (lambda: nn.Linear(1, 1), {"seed": 1.5}, r"seed: expected a whole number or None, got 1\.5", TypeError),
    "device": (lambda: nn.Linear(1, 1), {"device": "meta"}, "expected one that can hold values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """By name, with the module and torch's random state as they were."""
    make, options, message, *error = REFUSED[case]
    with torch.device("meta"):
        model = make()
    spec = fs.policies.always()(model)
    before = torch.get_rng_state()
    with unchanged(model):
        refused(*error or [ValueError], message, lambda: fs.init(model, spec, **options))
    assert torch.equal(torch.get_rng_state(), before)


@torch.jit.script
def fill_by_script(weight: Tensor) -> Tensor:
    return weight.fill_(3)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal_": nn.init.orthogonal_,
    "one that skips the meta device": lambda w: w.is_meta or w.fill_(3),
    "one by .data": lambda w: w.data.normal_(),
    "one that is no function of Python's": fill_by_script,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_skips_the_meta_device(write: Callable[[Tensor], object]) -> None:
    """Functions of torch write nothing to a meta tensor: a parent's are still the last word, or refused over units."""
    block = resets("Block", lambda layers: [write(layer.weight) for layer in layers])  # as torchtitan's init_weights
    full = nn.Sequential(block(*linears()), block(nn.Linear(2, 2)))
    model = fs.skeleton(full)
    spec = fs.by_type(block)(model)
    same(fs.init(model, spec, seed=1), fs.shard(seeded(full, 1), spec))
    root = fs.skeleton(block(*linears()))
    words = r"initialiser of module '' \(Block\) touches '0\..*'1\.weight'.*in other units"
    refused(ValueError, words, lambda: fs.init(root, fs.policies.always()(root), seed=1))


# --- torch's own claims (PEER_TESTS.md, 13). ---
def one_step(params: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: p - 0.1 * grads[key] for key, p in params.items()}


@real_ranks(4)
def test_meta_device_1d_init(rank: int) -> None:
    """Widths that four ranks divide, do not, and of which some have nothing: initialised, and a step of training."""
    for dim, dtype in itertools.product((8, 3, 1), (torch.float32, torch.bfloat16)):
        with torch.device("meta"):
            model = nn.Sequential(MLP(dim, dim), MLP(dim, dim), MLP(dim, dim)).to(dtype)
        spec = fs.by_type(MLP)(model).bound
        with unchanged(model):
            params = fs.init(model, spec, seed=42)
        assert all(p.is_meta for p in model.parameters())
        assert all(params[unit.key].dtype == dtype for unit in spec)
        if dtype == torch.float32:  # of bfloat16's 256 numbers, 0 is drawn
            assert all(piece.all() for piece in fs.param_views(params, spec).values())  # also of no elements
        torch.manual_seed(rank)
        x = torch.randn(3, dim, dtype=dtype)
        grads = fs.grad(lambda p, m=model, s=spec, x=x: fs.functional_call(m, p, (x,), spec=s).sum())(params)
        assert all(piece.isfinite().all() for piece in one_step(params, grads).values())
        assert all(piece.any() or not piece.numel() for piece in fs.param_views(grads, spec).values())


def test_invalid_meta_device_init() -> None:
    """Params on the meta device are no params to train with, by units or by names."""
    model = fs.skeleton(nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)))
    spec = fs.policies.always()(model)
    for params in (dict(model.named_parameters()), {key: p.to("meta") for key, p in fs.init(model, spec).items()}):
        with pytest.raises(ValueError, match=rf"without values: {', '.join(map(repr, params))}; expected them to be mat"):
            fs.functional_call(model, params, torch.tensor([1]), spec=spec)
        assert fs.functional_call(model, params, torch.tensor([1], device="meta"), spec=spec).is_meta
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))  # what has values is for shard
    spec = fs.policies.whole()(model)
    words = r"parameter '0\.bias' is on cpu: expected it on the meta device; shard\(model, spec\)"
    refused(ValueError, words, lambda: fs.init(model, spec))
    refused(ValueError, "init: the spec is on sizes alone", lambda: fs.init(fs.skeleton(model), spec.on({"shard": 2})))


@real_ranks(2)
def test_simple_model_with_meta_device(rank: int) -> None:
    """By reset_parameters, wrapped in three ways: the regular model's values before a step of SGD, and after it."""
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for policy in (fs.policies.whole(), fs.policies.always(), fs.by_type(MLP)):
        with torch.device("meta"):
            model = Net()
        spec = policy(model).on(mesh_of(2))
        plain = seeded(Net(), 9)
        named = {name: p.detach() for name, p in plain.named_parameters()}
        params = fs.init(model, spec, seed=9)
        same(fs.unshard(params, spec), named)
        grads = fs.grad(lambda p, m=model, s=spec: fs.functional_call(m, p, (x[rank],), spec=s).square().mean())(params)
        plain(x).square().mean().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        torch.testing.assert_close(fs.unshard(one_step(params, grads), spec), named)


# --- Ranks that differ. ---
@real_ranks(2)
def test_ranks_that_differ(rank: int) -> None:
    """In seeds, in what initialisers make or in an error of one's own: an error on both, and none waits."""
    model = bare("transformer")
    spec = fs.policies.always()(model).bound
    mine = MODELS["transformer"]() if rank else model
    same(fs.init(model, spec, seed=4), fs.init(model, spec, seed=4, rank=rank))
    before = torch.get_rng_state()
    random.seed(rank)
    by_hand: InitFn = lambda m: [x.fill_(random.random()) for x in m.parameters(recurse=False)]  # noqa: E731

    def fails(module: nn.Module) -> None:
        reset(module)
        if rank and isinstance(module, nn.Embedding):
            raise OSError("out of paper")

    own = "failed: OSError: out of paper" if rank else "got on rank 1 RuntimeError: init: the"
    with unchanged(model):
        for error, words, one, options in (
            (ValueError, r"as on its rank 0, init\(seed=0\); got on rank 1 init\(seed=1\)", model, {"seed": rank}),
            (ValueError, r"same values on all ranks .* initialisers that depend on the module", model, {"init_fn": by_hand}),
            (RuntimeError if rank else ValueError, own, model, {"init_fn": fails}),
            (ValueError, "is on cpu" if rank else "got on rank 1 init: parameter", mine, {}),
        ):
            refused(error, words, lambda: fs.init(one, spec, **{"seed": 0, **options}))
        assert len(fs.init(model, spec, init_fn=by_hand, seed=0, check_values=False)) == len(spec)
    assert torch.equal(torch.get_rng_state(), before)


# --- Memory. ---
def held(model: Any, ranks: int) -> tuple[int, int, int]:
    """The peak, and the bytes of the slices and of the largest unit."""
    spec = fs.by_type(type(model.model.layers[0]), nn.Embedding)(model).on({"shard": ranks})
    with Peak() as memory:
        params = fs.init(model, spec, init_fn=model._init_weights, seed=0, rank=5)
    slices = sum(x.numel() * x.itemsize for x in params.values())
    return memory.bytes, slices, max(spec.padded_numel(unit) * unit.dtype.itemsize for unit in spec)


def test_a_model_of_8_billion_parameters() -> None:
    """Rank 5 of 64 holds its slices and one unit: of Llama 3 8B, without the values, and by default of two of its layers."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    with world(64), torch.device("meta"):
        model = llama(depth(2, 32), **sizes, num_key_value_heads=8)
    with _torch.fake_mode():
        peak, slices, unit = held(model, 64)
    assert unit == (128256 * 4096 + 4096) * 4  # the head and the last norm
    assert unit < peak <= slices + unit


def test_memory_with_values() -> None:
    """The same, with values, of a smaller one; masks for NaN, one byte for each element of a parameter, are the rest."""
    with torch.device("meta"):
        model = llama(4, vocab_size=1024, hidden_size=128, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    peak, slices, unit = held(model, 8)
    assert slices == pytest.approx(sum(p.numel() * 4 for p in model.parameters()) / 8, rel=1e-3)
    assert peak <= slices + unit + max(p.numel() for p in model.parameters())


def test_units_share_one_buffer() -> None:
    """Of a buffer for each unit, malloc kept most: 220 MB beside 34 MB of slices, of 64 units of 4.2 MB on 8 ranks."""

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)], nn.LayerNorm(32, dtype=torch.bfloat16))

    with torch.device("meta"):
        model = make()
    for p, expected in ((fs.P("shard"), 1), (fs.P(), 6)):  # whole units are what the caller gets
        spec = fs.policies.always(p)(model).on({"shard": 8})
        with Peak() as memory:
            params = fs.init(model, spec, seed=0, rank=5)
        assert sum(nbytes >= spec.padded_numel(spec.by_key["0"]) * 4 for nbytes in memory.made) == expected
        same(params, fs.shard(seeded(make(), 0), spec, rank=5))
