"""LoRA of a llama beside FSDP2's own, in one run: time and peak memory of a step; and QLoRA: bytes at rest, and the loss.

    python examples/benchmarks/lora.py                     (two gloo ranks on this machine, one thread each)
    python examples/benchmarks/lora.py --rounds 40 --json lora.json

A step is forward, loss and backward of a llama of transformers (6.7 million parameters, float32) with adapters of peft
beside each matrix of its decoder layers, up to gradients of the adapters that are reduced over the ranks; no optimizer.
Rounds, ratios and peaks as in peers.py: what rank 0's tensors hold, at rest included. "FSDP2" is peft's model with
`fully_shard` for each decoder layer; "fs" has a unit for each of them, whose adapters are another; "fs P()" has replicated
adapters; "fs QLoRA" has the matrices at rest in NF4.

The losses are of rank 0 after so many steps of AdamW on the standard library's help texts, the mean over the last five, from
a llama that has been trained shortly on its modules: the same one, the same batches.
"""

import argparse
import statistics
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Step
from measured import in_rounds, on_ranks, over, peak_bytes, ratio
from report import add_output_options, report
from torch import Tensor, nn

import funshard as fs

MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.dim, "intermediate_size": args.ffn, "num_hidden_layers": args.layers}
    config = LlamaConfig(vocab_size=256, num_attention_heads=args.heads, max_position_embeddings=args.seq, **sizes)
    return LlamaForCausalLM(config)


def adapted(base: nn.Module, args: argparse.Namespace) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft asks of another version of transformers
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules=MATRICES)
        return get_peft_model(base, config)


def fsdp2(model: nn.Module) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(x: Tensor, y: Tensor) -> None:
        model(input_ids=x, labels=y, use_cache=False).loss.backward()
        for p in model.parameters():
            p.grad = None

    return step


def spec_of(model: nn.Module, *, replicated: bool, at_rest: fs.Codec | None = None) -> fs.PartitionSpec:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    policy = fs.by_type(LlamaDecoderLayer, p=fs.P("shard", at_rest=at_rest))
    if at_rest:
        policy = fs.policies.override(policy, fs.by_type(LlamaRMSNorm, p=fs.P()))
    small = {name: fs.P() for name, _ in model.named_modules() if name.endswith(".default") and replicated}
    return fs.policies.override(policy, fs.by_path({"": fs.P("shard"), **small}))(model).bound


def loss_of(model: nn.Module, spec: fs.PartitionSpec, frozen: fs.Params) -> Callable[..., Tensor]:
    def loss(trainable: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        inputs = {"input_ids": x, "labels": y, "use_cache": False}
        return fs.functional_call(model, trainable | frozen, (), inputs, spec=spec).loss

    return loss


def sharded(**options: Any) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        spec = spec_of(model, **options)
        trainable, frozen = fs.partition(fs.shard(model, spec), spec)
        loss = loss_of(fs.skeleton(model), spec, frozen)
        model.to("meta")
        return lambda x, y: fs.grad_and_value(loss)(trainable, x, y)

    return build


NF4 = fs.codecs.nf4()
MODES: dict[str, Callable[[nn.Module], Step]] = {
    "FSDP2": fsdp2,
    "fs": sharded(replicated=False),
    "fs P()": sharded(replicated=True),
    "fs QLoRA": sharded(replicated=False, at_rest=NF4),
}


def text(pattern: str) -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(source: Tensor, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(source) - args.seq, (args.batch, 1), generator=generator)
    return source[starts + torch.arange(args.seq)].long()


def trained_base(args: argparse.Namespace) -> dict[str, Tensor]:
    """Trained shortly, on every rank alike, without communication."""
    model, generator, source = llama(args), torch.Generator().manual_seed(0), text("*.py")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(args.pretrain):
        x = batch(source, args, generator)
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def final_loss(rank: int, model: nn.Module, at_rest: fs.Codec | None, args: argparse.Namespace) -> tuple[float, float]:
    """The loss at the end of training, and what the frozen matrices' bytes at rest are of 16 bits an element."""
    spec = spec_of(model, replicated=False, at_rest=at_rest)
    trainable, frozen = fs.partition(fs.shard(model, spec), spec)
    loss = loss_of(fs.skeleton(model), spec, frozen)
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=2e-3)
    state, generator, source = init(trainable), torch.Generator().manual_seed(100 + rank), text("pydoc_data/topics.py")
    losses: list[float] = []
    for _ in range(args.adapt):
        x = batch(source, args, generator)
        grads, value = fs.grad_and_value(loss)(trainable, x, x)
        trainable, state = update(grads, state, trainable)
        losses.append(float(value))
    layers = [unit for unit in spec if ".layers." in unit.key and not unit.requires_grad and "norm" not in unit.key]
    rest = sum(frozen[unit.key].nbytes for unit in layers) / sum(2 * spec.shard_numel(unit) for unit in layers)
    return statistics.mean(losses[-5:]), rest


def measure(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    x = batch(text("*.py"), args, torch.Generator().manual_seed(rank))

    def make() -> nn.Module:
        return adapted(llama(args), args)

    modes = list(MODES)
    peaks = {mode: peak_bytes(MODES[mode], make, (x, x)) for mode in modes}
    times = in_rounds({mode: MODES[mode](make()) for mode in modes}, (x, x), args.warmup, args.rounds)
    losses: dict[str, tuple[float, float]] = {}
    state = trained_base(args) if args.adapt else {}
    for name, at_rest in (("fs", None), ("fs QLoRA", NF4)) if args.adapt else ():
        base = llama(args)
        base.load_state_dict(state)
        losses[name] = final_loss(rank, adapted(base, args), at_rest, args)
    return {"times": times, "peaks": peaks, "losses": losses, "parameters": sum(p.numel() for p in llama(args).parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=688)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pretrain", type=int, default=60)
    parser.add_argument("--adapt", type=int, default=50, help="steps of training for the losses; 0 for none")
    add_output_options(parser)
    args = parser.parse_args()
    result = on_ranks(measure, args)
    rows, figures = [], {}
    for mode in MODES:
        low, middle, high = quarters = ratio(result["times"], mode, "FSDP2")
        milliseconds, peak = statistics.median(result["times"][mode]) * 1e3, result["peaks"][mode]
        loss, rest = result["losses"].get(mode, (None, None))
        cells = ["-" if x is None else f"{x:.3f}" for x in (loss, rest)]
        rows.append([mode, f"{middle:.3f} ({low:.2f}-{high:.2f})", f"{milliseconds:.0f}", f"{peak / 1e6:.1f}", *cells])
        figures[mode] = {**over("FSDP2", quarters), "peak bytes": peak, "loss": loss, "at rest of bf16": rest}
    print(f"{result['parameters']:,} parameters, {args.ranks} ranks; step time over FSDP2 (spread)")
    report(["mode", "FSDP2", "median ms", "peak MB", "loss", "at rest / bf16"], rows, figures, args)


if __name__ == "__main__":
    main()
