"""Architectures as people train them, tiny and in float64, and `unchanged`: what a call must leave alone."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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


def gpt2(ranks: int) -> Architecture:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False, **off)
    ids = _tokens(ranks)
    return Architecture(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, _labelled, (GPT2Block,))


def llama_tied(ranks: int) -> Architecture:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(**TEXT_SIZES, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False)
    ids = _tokens(ranks)
    return Architecture(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, _labelled, (LlamaDecoderLayer,))


def mixtral(ranks: int) -> Architecture:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    config = MixtralConfig(
        **TEXT_SIZES,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        experts_implementation="eager",  # grouped_mm knows no float64
        use_cache=False,
    )
    ids = _tokens(ranks)
    return Architecture(
        MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, _labelled, (MixtralDecoderLayer,)
    )


def t5(ranks: int) -> Architecture:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5.modeling_t5 import T5Block

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    batches = {"input_ids": _tokens(ranks), "labels": _tokens(ranks, 4)}
    return Architecture(T5ForConditionalGeneration(config), batches, _labelled, (T5Block,))


def bert_with_dropout(ranks: int) -> Architecture:
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(**TEXT_SIZES, num_labels=3)
    batches = {"input_ids": _tokens(ranks), "labels": torch.randint(3, (ranks, 2))}
    return Architecture(BertForSequenceClassification(config), batches, _labelled, (BertLayer,))


def vit(ranks: int) -> Architecture:
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.modeling_vit import ViTLayer

    config = ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
    batches = {"pixel_values": torch.randn(ranks, 2, 3, 8, 8).double(), "labels": torch.randint(3, (ranks, 2))}
    return Architecture(ViTForImageClassification(config), batches, _labelled, (ViTLayer,))


def resnet_with_batch_norm(ranks: int) -> Architecture:
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.models.resnet.modeling_resnet import ResNetBasicLayer

    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 2], layer_type="basic", num_channels=3, num_labels=3
    )
    batches = {"pixel_values": torch.randn(ranks, 3, 3, 16, 16).double(), "labels": torch.randint(3, (ranks, 3))}
    return Architecture(ResNetForImageClassification(config), batches, _labelled, (ResNetBasicLayer,))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        return self.head(out).sum(1) + hidden.mean()


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
    f.__name__: f
    for f in (
        gpt2,
        llama_tied,
        mixtral,
        t5,
        bert_with_dropout,
        vit,
        resnet_with_batch_norm,
        conv_with_batch_norm,
        lstm,
        transformer_encoder,
        parametrized,
    )
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
