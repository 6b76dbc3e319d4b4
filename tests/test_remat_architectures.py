"""Law R3 on transformers at their defaults: caches and dropout on, each block recomputed; gradients are the plain model's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from depth import at_most, mark_seldom
from models import EXACT, VOCABULARY, Architecture, plain, unchanged
from parity import GRADIENTS
from ranks import real_ranks
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import funshard as fs

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL = {**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 8,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BART = {
    "d_model": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
}
OPT = {"ffn_dim": 12, "word_embed_proj_dim": 8, "max_position_embeddings": 16}
VIT = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3}
BERT = {**SMALL, "max_position_embeddings": 16, "num_labels": 3}

# by name: the config and its options, the model, and the blocks
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "gpt2": ("GPT2Config", GPT2, "GPT2LMHeadModel", ("GPT2Block",)),
    "llama": ("LlamaConfig", CAUSAL, "LlamaForCausalLM", ("LlamaDecoderLayer",)),
    "llama tied": ("LlamaConfig", {**CAUSAL, "tie_word_embeddings": True}, "LlamaForCausalLM", ("LlamaDecoderLayer",)),
    "mistral": ("MistralConfig", {**CAUSAL, "sliding_window": 4}, "MistralForCausalLM", ("MistralDecoderLayer",)),
    "qwen2": ("Qwen2Config", CAUSAL, "Qwen2ForCausalLM", ("Qwen2DecoderLayer",)),
    "gemma": ("GemmaConfig", {**CAUSAL, "head_dim": 4}, "GemmaForCausalLM", ("GemmaDecoderLayer",)),
    "mixtral": (
        "MixtralConfig",
        {**CAUSAL, "num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"},
        "MixtralForCausalLM",
        ("MixtralDecoderLayer",),
    ),
    "opt": ("OPTConfig", {**SMALL, **OPT}, "OPTForCausalLM", ("OPTDecoderLayer",)),
    "t5": ("T5Config", {"vocab_size": VOCABULARY, **T5}, "T5ForConditionalGeneration", ("T5Block",)),
    "bart": (
        "BartConfig",
        {"vocab_size": VOCABULARY, **BART},
        "BartForConditionalGeneration",
        ("BartEncoderLayer", "BartDecoderLayer"),
    ),
    "bert": ("BertConfig", BERT, "BertForSequenceClassification", ("BertLayer",)),
    "bert decoder": ("BertConfig", {**BERT, "is_decoder": True}, "BertLMHeadModel", ("BertLayer",)),
    "vit": ("ViTConfig", VIT, "ViTForImageClassification", ("ViTLayer",)),
}


def build(name: str) -> Architecture:
    torch.manual_seed(3)
    config, options, model, blocks = ARCHITECTURES[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).double().train()
    types = {type(m) for m in made.modules()}
    found = tuple(t for t in types if t.__name__ in blocks)
    assert len(found) == len(blocks)
    if name == "vit":
        batches = {"pixel_values": torch.randn(2, 2, 3, 8, 8).double(), "labels": torch.randint(3, (2, 2))}
    else:
        ids = torch.randint(1, VOCABULARY, (2, 2, 5))
        labels = torch.randint(3, (2, 2)) if name == "bert" else ids.clone()
        batches = {"input_ids": ids, "labels": labels}
    return Architecture(made, batches, lambda call, batch: call(**batch).loss, found)


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


@at_most(1)
@pytest.mark.parametrize("name", mark_seldom(ARCHITECTURES, "gpt2", "llama", "llama tied", "mixtral", "t5", "bert"))
@real_ranks(2)
def test_gradients_at_the_defaults(rank: int, name: str) -> None:
    """use_cache and dropout as they come, with each block recomputed, or all of it but its products."""
    made = build(name)
    grads = [plain(made, r)[0] for r in range(2)]
    batch = {k: v[rank] for k, v in made.batches.items()}
    for (way, by), remat in itertools.product(GRADIENTS.items(), (True, fs.Remat(PRODUCTS))):
        spec = fs.by_type(*made.blocks, p=fs.P("shard", remat=remat))(made.model).bound
        expected = fs.shard({k: (grads[0][k] + grads[1][k]) / 2 for k in grads[0]}, spec)

        def loss(params: fs.Params, spec: fs.PartitionSpec = spec) -> Tensor:
            torch.manual_seed(rank)
            return made.loss(lambda **k: fs.functional_call(made.model, params, (), k, spec=spec), batch)

        with unchanged(made.model):
            got = by(loss)(fs.shard(made.model, spec))
        for key in expected:
            torch.testing.assert_close(got[key], expected[key], **EXACT, msg=lambda m, w=f"{way} {key}": f"{w}: {m}")
    torch.manual_seed(0)


class Quiet(nn.Module):
    """The loss as the result: dropout off, whatever the model has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


@at_most(1)
@pytest.mark.parametrize("name", mark_seldom(["gpt2", "llama", "mistral", "t5"], "gpt2", "llama"))
@real_ranks(2)
def test_second_order_at_the_defaults(rank: int, name: str) -> None:
    """Products with the Hessian: SiLU, RoPE and caches in each."""
    made = build(name)
    model = Quiet(made.model)
    spec = fs.by_type(*made.blocks, p=fs.P("shard", remat=True))(model).bound
    full = {k: v.detach() for k, v in model.named_parameters()}
    batches = [{k: v[r] for k, v in made.batches.items()} for r in range(2)]
    direction = {k: v.cos() for k, v in full.items()}

    def loss(params: fs.Params) -> Tensor:
        torch.manual_seed(0)
        return fs.functional_call(model, params, (batches[rank],), spec=spec)

    def one(full: fs.Params, batch: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return torch.func.functional_call(model, full, (batch,))

    def reference(full: fs.Params) -> Tensor:
        return sum(one(full, batch) for batch in batches) / 2

    with sdpa_kernel(SDPBackend.MATH):
        got = fs.hvp(loss, fs.shard(full, spec), fs.shard(direction, spec))
        want = fs.shard(fs.hvp(reference, full, direction), spec)
    for key in want:
        torch.testing.assert_close(got[key], want[key], **EXACT, msg=lambda m, key=key: f"{key}: {m}")
