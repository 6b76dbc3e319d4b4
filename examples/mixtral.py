"""Train a transformers Mixtral on byte text with its experts split over "expert", and all of it sharded.

One rank:        python examples/mixtral.py
Four ranks:      torchrun --nproc-per-node 4 examples/mixtral.py --expert 2
From a folder:   torchrun --nproc-per-node 4 examples/mixtral.py --expert 2 --load FOLDER   (as save_pretrained writes it)

transformers 5 has a layer's experts stacked in two parameters, [experts, ...], and asks a registry how to run them. So the
model stays as it is, with its names of parameters: `split_experts` gives each layer this rank's experts, and `dispatch` of
moe.py sends tokens to them. Specs, checkpoints and exports speak of the whole model.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import LossReport, add_run_options, batch, mesh_of, ranks, text
from moe import EVERYWHERE, dispatch, run_experts
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import funshard as fs
from funshard.collectives import Axis, Mesh


def dispatch_mixtral(experts: MixtralExperts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run a layer's experts on the ranks that have them, for tokens [tokens, dim] of this rank."""
    run = lambda rows, counts: run_experts(rows, counts, experts.gate_up_proj, experts.down_proj, experts.act_fn)  # noqa: E731
    return dispatch(x, chosen, weights.to(x.dtype), experts.axis, len(experts.gate_up_proj), run)


ALL_EXPERTS_FUNCTIONS.register("dispatch", dispatch_mixtral)


def split_experts(model: nn.Module, axis: Axis) -> nn.Module:
    """Return a copy of a transformers model, without values, in which every layer has one rank's experts.

    Args:
        model: The whole one.
        axis: The axis that experts are split over.
    """
    local = fs.skeleton(model)
    for experts in local.modules():
        if isinstance(experts, MixtralExperts):
            if experts.num_experts % axis.size:
                raise ValueError(f"experts: expected a multiple of {axis.size} ranks, got {experts.num_experts}")
            for name, p in [*experts.named_parameters(recurse=False)]:
                shape = len(p) // axis.size, *p.shape[1:]
                setattr(experts, name, nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad))
            experts.axis = axis
    local.config._experts_implementation = "dispatch"
    return local


def policy() -> fs.policies.Policy:
    """Return the policy: units for each layer and its experts, the rest of the model as another."""
    experts = fs.P("shard", local={"expert": 0})
    return fs.policies.by_path({"model.layers.*": EVERYWHERE, "model.layers.*.mlp.experts": experts}, EVERYWHERE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", help="a folder with a Mixtral, or its name on the hub; by default a small new one")
    parser.add_argument("--expert", type=int, default=1, help="ranks that experts are split over")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences of each step, over all ranks")
    add_run_options(parser, steps=60)
    args = parser.parse_args()

    rank, world, device = ranks()
    if world % args.expert or args.batch % world:
        parser.error(f"--expert, --batch: they do not divide {world} ranks, and {args.batch} sequences, evenly")
    axes = {"expert": args.expert, "shard": world // args.expert}
    mesh = Mesh.of(mesh_of(axes, device))

    torch.manual_seed(args.seed)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=args.dim,
        intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        num_local_experts=args.experts,
        max_position_embeddings=args.seq,
        output_router_logits=True,  # so that the loss has its auxiliary part
        router_aux_loss_coef=0.01,
        use_cache=False,
    )
    whole = MixtralForCausalLM.from_pretrained(args.load) if args.load else MixtralForCausalLM(config)  # alike on every rank
    model = split_experts(whole, mesh["expert"])
    for buffer in model.buffers():  # its parameters have no values
        buffer.data = buffer.to(device)
    spec = policy()(model).on(mesh)
    params = {key: shard.to(device) for key, shard in fs.shard(whole, spec).items()}
    del whole

    def loss(params: fs.Params, x: Tensor) -> Tensor:
        return fs.functional_call(model, params, (x,), {"labels": x}, spec=spec).loss

    train, _ = text("*.py", args.max_bytes)
    generator = torch.Generator().manual_seed(args.seed + 1)
    each = args.batch // world
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=args.lr, fused=True, donate=True)
    state, progress = init(params), LossReport(args, spec, rank)
    for step in range(args.steps):
        x, _ = batch(train, (args.batch, args.seq), generator, device, slice(rank * each, (rank + 1) * each))
        grads, value = fs.grad_and_value(loss)(params, x)
        grads, norm = fs.optim.clip_by_global_norm(grads, spec, 1.0)
        params, state = update(grads, state, params)
        progress.report(step, value, norm)
    if rank == 0:
        print(f"{world} ranks: {axes}, {sum(p.numel() for p in params.values()):,} parameters on each")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
