"""Steps of whole matrices in training: derivatives, updates in backward, ZeRO-1, compilation, models of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matrix_peers as peers
import pytest
import torch
from depth import at_most, depth, each, seldom
from ranks import Pool
from test_by_matrix import GRADS, PARAMS, matrices_on, spec_on
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P
from funshard.testing import spmd

ALONE = {"shard": 1}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_derivatives_of_a_step() -> None:
    """Of a loss after it, with respect to params, gradients and the learning rate: those of the plain step."""
    want = derivatives(spec_on(ALONE, "shard"))
    for sizes in ({"shard": 2}, {"replicate": 2, "shard": 2}):
        ranks = torch.Size(sizes.values()).numel()
        got = spmd(lambda mesh, _: derivatives(spec_on(mesh, "shard")), sizes)(torch.zeros(ranks))
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert_close(a, b.expand(ranks, *b.shape), rtol=1e-9, atol=1e-9)


def derivatives(spec: fs.PartitionSpec) -> Any:
    """Full trees, and the learning rate's, which every rank has whole."""
    init, update = fs.optim.muon(matrices_on(spec, "muon"), dtype=torch.float64)
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    state = init(params)

    def loss(params: fs.Params, grads: fs.Params, lr: Tensor) -> Tensor:
        new, _ = update(grads, state, params, lr=lr, fallback_lr=0.1)
        return sum((new[key] ** 2).sum() for key in new if spec.by_key[key].params)  # pyright: ignore[reportReturnType]

    of_params, of_grads, of_lr = torch.func.grad(loss, argnums=(0, 1, 2))(params, grads, torch.tensor(0.1).double())
    return fs.unshard(of_params, spec), fs.unshard(of_grads, spec), of_lr


def transformed(mesh: Any, axis: str | None, batched: bool) -> fs.Params:
    """Of a second step after one, with respect to the first one's gradients: derivatives, or new parameters for two of them."""

    def step(grad: Tensor, state: Any, param: Tensor) -> tuple[Tensor, Any]:
        momentum = 0.9 * state["momentum"] + grad
        new = {"momentum": momentum, "length": state["length"] + grad.norm()}
        return param - 0.1 * momentum / new["length"], new

    spec = spec_on(mesh, axis)
    rest = lambda params: {key: {} for key in params}, lambda grads, state, params: (params, state)
    begin = lambda p: {"momentum": torch.zeros_like(p), "length": p.new_zeros(())}  # noqa: E731
    init, update = fs.optim.by_matrix(begin, step, matrices_on(spec, "muon"), fallback=rest)
    params, grads, later = (fs.shard(tree, spec) for tree in (PARAMS, GRADS[0], GRADS[1]))
    state = init(params)

    def stepped(grads: fs.Params) -> fs.Params:
        """The parameters do not take part in the second step's derivative: on other ranks than the owner nothing does."""
        return update(later, update(grads, state, params)[1], params)[0]

    if batched:
        new = torch.func.vmap(stepped)({key: torch.stack([g, 2 * g]) for key, g in grads.items()})
        return fs.unshard({key: x[1] for key, x in new.items()}, spec)
    loss = lambda grads: sum((x**2).sum() for x in stepped(grads).values())  # noqa: E731
    return fs.unshard(torch.func.grad(loss)(grads), spec)


def transformed_on_ranks(rank: int, axis: str | None, batched: bool) -> fs.Params:
    return transformed(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), axis, batched)


@at_most(1)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("axis", ["shard", None])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_an_update_of_your_own(gloo2: Pool, axis: str | None, batched: bool) -> None:
    """Ranks that own a matrix and ranks that do not send the same things, whatever the update makes of what."""
    want = transformed(ALONE, axis, batched)
    for got in gloo2.run(transformed_on_ranks, axis, batched):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


def of_a_rate(rank: int, axis: str | None) -> tuple[Tensor, fs.Params]:
    """The derivative of a step with respect to its learning rate, which owners alone compute with, and its tangents."""

    def step(grad: Tensor, state: Any, param: Tensor, *, lr: Any) -> tuple[Tensor, Any]:
        momentum = 0.9 * state["momentum"] + grad
        return param - lr * momentum / momentum.norm(), {"momentum": momentum}

    spec = spec_on(ALONE if rank < 0 else init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), axis)
    rest = lambda params: {key: {} for key in params}, lambda grads, state, params, lr: (params, state)
    begin = lambda p: {"momentum": torch.zeros_like(p)}  # noqa: E731
    init, update = fs.optim.by_matrix(begin, step, matrices_on(spec, "muon"), fallback=rest)
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    state, lr = init(params), torch.tensor(0.1).double()

    def stepped(lr: Tensor) -> fs.Params:
        return update(grads, state, params, lr=lr, fallback_lr=0.1)[0]

    slope = torch.func.grad(lambda lr: sum((x**2).sum() for x in stepped(lr).values()))(lr)
    return slope, fs.unshard(torch.func.jvp(stepped, (lr,), (torch.ones_like(lr),))[1], spec)


@at_most(1)
@pytest.mark.parametrize("axis", ["shard", None])
def test_derivatives_of_a_rate_that_owners_compute_with(gloo2: Pool, axis: str | None) -> None:
    """Whole on every rank, though each has only what its own matrices contribute."""
    want = of_a_rate(-1, axis)
    for got in gloo2.run(of_a_rate, axis):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


def in_backward(rank: int, donate: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5)).double()
    spec = fs.by_type(nn.Linear)(model).on(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    _, update = fs.optim.muon(spec, dtype=torch.float64)
    init, inside = fs.optim.muon(spec, dtype=torch.float64, donate=donate)
    params = fs.shard(model, spec)
    state = init(params)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double()

    def loss(params: fs.Params, x: Tensor) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec).pow(2).sum()

    for _ in range(2):
        want = update(fs.grad(loss)(params, x), state, params)
        got = fs.update_in_backward(inside, loss, params, state, [x], spec=spec)
        assert_close((got.params, got.state), want, rtol=1e-9, atol=1e-9)
        params, state = got.params, got.state


@pytest.mark.parametrize("donate", [False, True])
def test_in_backward(gloo2: Pool, donate: bool) -> None:
    """The step of all units at once."""
    gloo2.run(in_backward, donate)


STRATEGIES: dict[str, Any] = {
    "shard": P("shard"),
    "kept": P("shard", reshard=False),
    "bfloat16": P("shard", precision=fs.Precision(param=torch.bfloat16)),
    "offload": P("shard", offload="params"),
    "remat": P("shard", remat=True),
    "replicated": P(),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(7, 4), *blocks, nn.Linear(4, 7)).double()


def by_a_loss(rank: int, ranks: int, strategy: str, donate: bool) -> tuple[fs.Params, list[fs.Params]]:
    """Full parameters after three steps with clipped gradients of a loss, and those gradients."""
    model = small()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    spec = fs.by_type(nn.Sequential, p=STRATEGIES[strategy])(model).on(mesh)
    known = fs.optim.matrices(spec, select=fs.optim.hidden(model, "4"))
    init, update = fs.optim.muon(known, dtype=torch.float64, lr=0.05, weight_decay=0.1, donate=donate)
    params = fs.shard(model, spec)
    state, seen = init(params), []
    x = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(rank))

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec).double().logsumexp(-1).mean()

    for _ in range(3):
        grads, _ = fs.optim.clip_by_global_norm(fs.grad(loss)(params), spec, 0.5)
        seen.append(fs.unshard(grads, spec))
        params, state = update(grads, state, params)
    return fs.unshard(params, spec), seen


@pytest.fixture(scope="module")
def gloo3() -> Iterator[Pool]:
    """Three real ranks, which no matrix and no unit is a multiple of."""
    pool = Pool(3)
    yield pool
    pool.stop()


@at_most(1)
@each
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_of_a_loss(gloo2: Pool, gloo3: Pool, strategy: str, ranks: int, donate: bool) -> None:
    """The plain optimizer's with the gradients that there were, however they were made."""
    results = {2: gloo2, 3: gloo3}[ranks].run(by_a_loss, ranks, strategy, donate)
    hidden = {f"{i}.0.weight" for i in (1, 2, 3)}
    for params, grads in results:
        assert all(grad[name].any() for grad in grads for name in hidden)
        want = peers.trained(dict(small().named_parameters()), grads, peers.muon(), hidden, lr=0.05, weight_decay=0.1)
        assert_close(params, want, rtol=1e-9, atol=1e-9)


@seldom
def test_compiled() -> None:
    """As one graph the same numbers. The rest is plain: what `from_torch` asks of its tensors torch.compile cannot trace."""
    spec = spec_on(ALONE, "shard")
    rest = lambda params: {key: {} for key in params}, lambda grads, state, params: ({k: -g for k, g in grads.items()}, state)
    init, update = fs.optim.muon(matrices_on(spec, "muon"), dtype=torch.float64, fallback=rest, steps=depth(2, 5))
    params, grads = fs.shard(PARAMS, spec), fs.shard(GRADS[0], spec)
    state = init(params)
    got = torch.compile(update, backend=depth("eager", "aot_eager"), fullgraph=True)(grads, state, params)
    assert_close(got, update(grads, state, params), rtol=1e-9, atol=1e-9)


# --- models of transformers ---


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=13, num_key_value_heads=1, tie_word_embeddings=tied, **sizes))


def gpt2(tied: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, tie_word_embeddings=tied)
    return GPT2LMHeadModel(config)


MODELS = {"llama": llama, "gpt2": gpt2}


def of_transformers(name: str, tied: bool) -> tuple[nn.Module, set[str], list[fs.Params]]:
    """The model, the names of its hidden matrices, and gradients."""
    torch.manual_seed(0)
    model = MODELS[name](tied).double()
    layers = {n for n, p in model.named_parameters() if p.dim() == 2 and (".layers." in n or ".h." in n)}
    g = torch.Generator().manual_seed(1)
    return (
        model,
        layers,
        [{n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in model.named_parameters()} for _ in range(3)],
    )


def transformers_on_ranks(rank: int, name: str, tied: bool) -> fs.Params:
    model, layers, grads = of_transformers(name, tied)
    policy = fs.by_path({"model.layers.*" if name == "llama" else "transformer.h.*": P("shard")})
    spec = policy(model).on(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    known = fs.optim.matrices(spec, select=fs.optim.hidden(model))
    assert set(known.by_name) == layers
    init, update = fs.optim.muon(known, dtype=torch.float64, lr=0.05, weight_decay=0.1)
    params = fs.shard(model, spec)
    state = init(params)
    for grad in grads:
        params, state = update(fs.shard(grad, spec), state, params)
    return fs.unshard(params, spec)


@at_most(1)
@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_transformers(gloo2: Pool, name: str, tied: bool) -> None:
    """Hidden layers' matrices and no others; as the plain optimizer's."""
    model, layers, grads = of_transformers(name, tied)
    params = {n: p.detach() for n, p in model.named_parameters()}
    want = peers.trained(params, grads, peers.muon(), layers, lr=0.05, weight_decay=0.1)
    for got in gloo2.run(transformers_on_ranks, name, tied):
        assert_close(got, want, rtol=1e-9, atol=1e-9)
