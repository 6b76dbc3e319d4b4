"""Architectures as people train them, tiny and in float64, and `unchanged`: what a call must leave alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import funshard as fs
from funshard.policies import Policy

VOCABULARY = 17
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT_SIZES: dict[str, Any] = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Asserts, also when the block raises, that every module has the very attributes, in order, and values it had."""
    before = _state(model)
    try:
        yield
    finally:
        after = _state(model)
        assert list(before) == list(after), f"other attributes: {before.keys() ^ after.keys()}"
        for where, (value, version, copy) in before.items():
            now, now_version, _ = after[where]
            assert now is value, f"{where} is another object"
            assert now_version == version, f"{where} was written to"
            assert copy is None or copy.is_meta or torch.equal(now, copy), f"{where} has another value"


def _state(model: nn.Module) -> dict[tuple[str, ...], tuple[Any, int | None, Tensor | None]]:
    state: dict[tuple[str, ...], tuple[Any, int | None, Tensor | None]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            state[path, key] = value, None, None
            for name, item in value.items() if isinstance(value, dict) else ():
                tensor = isinstance(item, Tensor)
                state[path, key, str(name)] = item, item._version if tensor else None, item.detach().clone() if tensor else None
    return state


def refused(error: type[Exception] | tuple[type[Exception], ...], words: str, call: Callable[[], object]) -> None:
    """Asserts that it raises such an error, in which these words are."""
    with pytest.raises(error, match=words):
        call()


def module_class(name: str, parts: Callable[..., dict[str, Any]], forward: Callable[..., Any]) -> Any:
    """A class of modules that have what ``parts`` makes of their arguments, and whose forward is that function."""

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        for key, value in parts(*args, **kwargs).items():
            setattr(self, key, value)

    return type(name, (nn.Module,), {"__init__": init, "forward": forward, "__module__": parts.__module__})


class Block(nn.Module):
    """With a branch of two layers around which its input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@dataclass(frozen=True)
class Architecture:
    """A model, batches with the ranks in dimension 0, the loss of one rank's batch, and the classes of its blocks."""

    model: nn.Module
    batches: dict[str, Tensor]
    loss: Callable[[Callable[..., Any], dict[str, Tensor]], Tensor]
    blocks: tuple[type[nn.Module], ...]


def _labelled(call: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return call(**batch).loss


def _squared(call: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return (call(batch["x"]) ** 2).mean()


def _tokens(ranks: int, length: int = 5) -> Tensor:
    return torch.randint(1, VOCABULARY, (ranks, 2, length))


def _text(ranks: int) -> dict[str, Tensor]:
    return {"input_ids": (ids := _tokens(ranks)), "labels": ids.clone()}


def _image(ranks: int, count: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ranks, count, 3, size, size).double(), "labels": torch.randint(3, (ranks, count))}


GPT2 = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "use_cache": False}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"}  # others: no float64
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 2], "layer_type": "basic", "num_channels": 3}

OF_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], dict[str, Tensor]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Block", GPT2, _text),
    "llama_tied": (
        "LlamaForCausalLM", "LlamaDecoderLayer",
        TEXT_SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True, "use_cache": False}, _text),
    "bert_with_dropout": (
        "BertForSequenceClassification", "BertLayer", TEXT_SIZES | {"num_labels": 3},
        lambda n: {"input_ids": _tokens(n), "labels": torch.randint(3, (n, 2))}),
    "resnet_with_batch_norm": (
        "ResNetForImageClassification", "ResNetBasicLayer", RESNET | {"num_labels": 3}, lambda n: _image(n, 3, 16)),
}  # fmt: skip
"""The class, that of its blocks, the options of its config, and batches for so many ranks."""


def of_transformers(name: str, ranks: int, **other: Any) -> Architecture:
    import transformers

    cls, block, options, batches = OF_TRANSFORMERS[name]
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**options | other))
    blocks = next(type(module) for module in model.modules() if type(module).__name__ == block)
    return Architecture(model, batches(ranks), _labelled, (blocks,))


def read_lstm(self: Any, x: Tensor) -> Tensor:
    out, (hidden, _) = self.lstm(x)
    return self.head(out).sum(1) + hidden.mean()


Lstm = module_class(
    "Lstm", lambda: {"lstm": nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), "head": nn.Linear(8, 2)}, read_lstm
)


def lstm(ranks: int) -> Architecture:
    return Architecture(Lstm(), {"x": torch.randn(ranks, 2, 5, 3).double()}, _squared, (nn.LSTM,))


def transformer_encoder(ranks: int) -> Architecture:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))
    return Architecture(model, {"x": torch.randn(ranks, 2, 5, 8).double()}, _squared, (nn.TransformerEncoderLayer,))


def parametrized(ranks: int) -> Architecture:
    class Block(nn.Sequential):
        pass

    blocks = [Block(weight_norm(nn.Linear(4, 6)), nn.Tanh(), spectral_norm(nn.Linear(6, 4))) for _ in range(2)]
    return Architecture(nn.Sequential(*blocks, nn.Linear(4, 2)), {"x": torch.randn(ranks, 3, 4).double()}, _squared, (Block,))


def conv_with_batch_norm(ranks: int) -> Architecture:
    class Block(nn.Sequential):
        pass

    blocks = [Block(nn.Conv2d(c, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for c in (3, 4)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 16, 2)).to(memory_format=torch.channels_last)
    return Architecture(model, {"x": torch.randn(ranks, 3, 3, 8, 8).double()}, _squared, (Block,))


ARCHITECTURES: dict[str, Callable[[int], Architecture]] = {
    **{name: functools.partial(of_transformers, name) for name in OF_TRANSFORMERS},
    **{f.__name__: f for f in (conv_with_batch_norm, lstm, transformer_encoder, parametrized)},
}


def build(name: str, ranks: int) -> Architecture:
    """The architecture, the same in every process, in train mode and double precision."""
    torch.manual_seed(3)
    made = ARCHITECTURES[name](ranks)
    made.model.double().train()
    return made


def plain(made: Architecture, rank: int) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and loss of one rank's batch by the model itself (a copy of it), without funshard."""

    model = copy.deepcopy(made.model)
    torch.manual_seed(rank)
    loss = made.loss(model, {k: v[rank] for k, v in made.batches.items()})
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}, loss.detach()


def assert_mean_gradients(made: Architecture, rank: int, policies: Mapping[str, Policy]) -> None:
    """On this real rank: each policy's sharded gradients are the mean of `plain` over ranks, the loss is this rank's."""
    ranks = len(next(iter(made.batches.values())))
    grads, losses = zip(*(plain(made, r) for r in range(ranks)), strict=True)
    mean = {k: torch.stack([g[k] for g in grads]).mean(0) for k in grads[0]}
    batch = {k: v[rank] for k, v in made.batches.items()}
    for name, policy in policies.items():
        spec = policy(made.model).bound
        params, expected = fs.shard(made.model, spec), fs.shard(mean, spec)

        def loss(params: dict[str, Tensor], spec: fs.PartitionSpec = spec) -> Tensor:
            torch.manual_seed(rank)
            return made.loss(lambda *a, **k: fs.functional_call(made.model, params, a, k, spec=spec), batch)

        for by in (fs.grad_and_value, torch.func.grad_and_value):
            where = f"{name} {by.__module__}"
            with unchanged(made.model), warnings.catch_warnings():
                warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)  # of statistics, which are not what is compared
                got, value = by(loss)(params)
            assert (value.dtype, value.shape) == (losses[rank].dtype, losses[rank].shape), where
            torch.testing.assert_close(value, losses[rank], **EXACT, msg=lambda m, w=where: f"{w}: {m}")
            for key in expected:
                torch.testing.assert_close(got[key], expected[key], **EXACT, msg=lambda m, w=f"{where} {key}": f"{w}: {m}")
    torch.manual_seed(0)  # alike on all ranks again


def function(forward: Callable[..., Any], base: Any = torch.autograd.Function, **methods: Callable[..., Any]) -> Any:
    """A class of Functions; without ``setup_context`` nothing is kept."""
    methods = {"forward": forward, "setup_context": lambda ctx, inputs, output: None, **methods}
    return type("Made", (base,), {name: staticmethod(method) for name, method in methods.items()})


def with_forward(base: type[nn.Module], forward: Callable[..., Any], **attributes: Any) -> Any:
    """A class of modules that are ``base`` but for their forward."""
    return type(f"{base.__name__}WithForward", (base,), {"forward": forward, **attributes})


def autograd_function(forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any] | None = None) -> Any:
    """A `torch.autograd.Function` that saves its inputs: ``backward(grad, *inputs)`` and ``jvp(*inputs, *tangents)``."""

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    body = {"forward": staticmethod(forward), "setup_context": staticmethod(setup_context), "generate_vmap_rule": True}
    body["backward"] = staticmethod(lambda ctx, grad: backward(grad, *ctx.saved_tensors))
    body |= {} if jvp is None else {"jvp": staticmethod(lambda ctx, *tangents: jvp(*ctx.saved_tensors, *tangents))}
    return type("Function", (torch.autograd.Function,), body)
