"""peft's LoraModel around a llama of transformers, unmodified: its base frozen, or at rest in NF4 as in QLoRA."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from depth import at_most, each
from models import unchanged
from parity import MAIN_WAYS, WAYS
from ranks import real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CODEC = fs.codecs.nf4(16)
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft asks of another version of transformers
        return peft.get_peft_model(model, config).double()


def spec_of(model: nn.Module, at_rest: fs.Codec | None, p: fs.P) -> fs.PartitionSpec:
    """Decoder layers as units, each with its norms as they are, and the embedding and the head in the root's."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    quantized = fs.P(p.axis, reshard=p.reshard, remat=p.remat, at_rest=at_rest)
    layers = fs.policies.override(fs.by_type(LlamaDecoderLayer, p=quantized), fs.by_type(LlamaRMSNorm, p=fs.P()))
    return fs.policies.override(layers, fs.by_path({"": fs.P("shard")}))(model).bound


def plain(model: nn.Module, spec: fs.PartitionSpec) -> nn.Module:
    """peft's own model with what is decoded as its frozen weights."""
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        if spec.by_name[name][0].at_rest == CODEC:
            p.data.copy_(CODEC.decode(*CODEC.encode(p.detach().flatten())).view_as(p))
    return model


def ids_of(rank: int) -> Tensor:
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(rank))


def check_gradients(rank: int, model: nn.Module, spec: fs.PartitionSpec, way: str = "fs") -> nn.Module:
    """Of the adapters, and the loss, beside peft's own model with what is decoded, which is returned."""
    trainable, frozen = fs.partition(fs.shard(model, spec), spec)

    def loss(trainable: fs.Params) -> Tensor:
        inputs = {"input_ids": ids_of(rank), "labels": ids_of(rank), "use_cache": False}
        return fs.functional_call(model, trainable | frozen, (), inputs, spec=spec).loss

    with unchanged(model):
        grads, value = WAYS[way](loss)(trainable)
    reference = plain(model, spec)
    losses = [reference(input_ids=ids_of(r), labels=ids_of(r), use_cache=False).loss for r in range(2)]
    (sum(losses) / 2).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert_close(value, losses[rank].detach(), rtol=1e-9, atol=1e-9)
    got: dict[str, Any] = fs.unshard(grads, spec)
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert wanted.keys() == got.keys()
    assert all("lora_" in name for name in wanted)
    for name, grad in wanted.items():
        assert grad.abs().max() > 0
        assert_close(got[name], grad, rtol=1e-9, atol=1e-12)
    return reference


PS = [fs.P("shard"), fs.P("shard", reshard=False), fs.P("shard", remat=True)]


@at_most(2)
@each(way=MAIN_WAYS, p=PS)
@pytest.mark.parametrize(("kind", "at_rest"), [*((kind, False) for kind in KINDS), ("lora", True)])
@real_ranks(2)
def test_gradients_of_adapters_are_pefts_own(rank: int, kind: str, at_rest: bool, p: fs.P, way: str) -> None:
    """Also where the base is bytes: then those of the base that is decoded."""
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model = adapted(llama, target_modules=["q_proj", "v_proj", "down_proj"], **KINDS[kind])
    spec = spec_of(model, CODEC if at_rest else None, p)
    layers = [unit for unit in spec if unit.key.endswith(":frozen") and ".layers." in unit.key]
    assert len(layers) == 2
    assert all((spec.stored(unit)[1] == torch.uint8) is at_rest for unit in layers)
    check_gradients(rank, model, spec, way)


@at_most(2)
@pytest.mark.parametrize(
    ("p", "at_rest"),
    [(fs.P("shard"), False), (fs.P("shard"), True), (fs.P(), False), (fs.P("shard", remat=True), False)],
    ids=str,
)
@real_ranks(2)
def test_adapters_on_fused_experts_are_pefts_own(rank: int, p: fs.P, at_rest: bool) -> None:
    """peft registers parametrizations on a Mixtral's fused experts for the length of each forward, of which each sets a
    parameter to itself, which is no write."""
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    torch.manual_seed(0)
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=3, **SIZES))
    mixtral.set_experts_implementation("eager")  # the others have no float64
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(mixtral, target_modules=["q_proj"], target_parameters=experts)
    p = fs.P(p.axis, reshard=p.reshard, remat=p.remat, at_rest=CODEC if at_rest else None)
    layers = fs.by_type(MixtralDecoderLayer, p=p)
    spec = fs.policies.override(layers, fs.by_path({"": fs.P("shard")}))(model).bound
    reference = check_gradients(rank, model, spec)
    ids = ids_of(rank)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        inputs = {"input_ids": ids, **options}
        got = fs.functional_call(model, fs.shard(model, spec), (), inputs, spec=spec, method="generate")
        assert torch.equal(got, reference.generate(**inputs))
