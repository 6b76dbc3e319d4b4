"""The examples with axes of their own are exact: their gradients are those of the single-process model, norm included."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from depth import at_most, depth, each, mark_seldom, seldom
from ranks import Pool, launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import funshard as fs

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))
import moe  # noqa: E402
import tensor_parallel  # noqa: E402

Tree = dict[str, Tensor]
BATCH, SEQ = 2, 8
TINY = {"layers": 2, "dim": 8, "heads": 4, "kv_heads": 4, "hidden": 12}


def bind(sizes: dict[str, int]) -> Any:
    """A mesh of this process's ranks."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def gradient_of_mean(model: nn.Module, full: Tree, batches: list[tuple[Any, ...]], seeds: list[int]) -> Tree:
    """In one process: of the mean over ranks of the model's loss, its random numbers drawn by these seeds."""

    def loss(params: Tree) -> Tensor:
        values = []
        for batch, seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            values.append(torch.func.functional_call(model, params, batch))
        return torch.stack(values).mean()

    return torch.func.grad(loss)(full)


def check(found: Tree, norm: Tensor, want: Tree, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    assert found.keys() == want.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in want.values()]).norm(), **tolerance)


def losses(output: str) -> list[float]:
    """What progress lines say."""
    return [float(x) for x in re.findall(r"^step .* loss ([\d.]+)", output, re.MULTILINE)]


# --- tensor parallel ---


def llama(**options: Any) -> tuple[nn.Module, Tree]:
    """A model, by default the whole one, and its parameters."""
    torch.manual_seed(0)
    model = tensor_parallel.Llama(**TINY, **options).double()
    return model, {name: p.detach() for name, p in model.named_parameters()}


def tokens(sizes: Mapping[str, int]) -> Tensor:
    """What each rank reads, which those along "tensor" share: [ranks, 2, batch, seq]."""
    torch.manual_seed(1)
    x = torch.randint(256, (*(1 if name == "tensor" else size for name, size in sizes.items()), 2, BATCH, SEQ))
    return x.expand(*sizes.values(), 2, BATCH, SEQ).reshape(-1, 2, BATCH, SEQ)


def tensor_parallel_gradient(
    mesh: Any, model: nn.Module, full: Tree, xy: Tensor, way: Mapping[str, bool], seed: int | None = None
) -> tuple[Tree, Tensor, Tensor]:
    """A rank's gradient as whole parameters, its norm, and the loss."""
    spec = tensor_parallel.policy(way.get("reshard", True))(model).on(mesh)
    split = tensor_parallel.Split(spec.axis("tensor"), way.get("sequence", False))
    params = fs.shard(full, spec)
    if seed is not None:  # simulated ranks have no seeds of their own
        torch.manual_seed(seed)
    grads, value = fs.grad_and_value(lambda p: fs.functional_call(model, p, (xy[0], xy[1], split), spec=spec))(params)
    return fs.unshard(grads, spec), fs.optim.global_norm(grads, spec), fs.collectives.sum_over(value, spec.bound_mesh)


WAYS = [{}, {"sequence": True}, {"sequence": True, "reshard": False}]
MESHES = [{"shard": 2, "tensor": 2}, {"tensor": 4, "shard": 1}, {"shard": 4, "tensor": 1}]


def tensor_parallel_rank(rank: int, sizes: dict[str, int], way: Mapping[str, Any], dropout: float) -> None:
    (whole, full), xys = llama(dropout=dropout), tokens(sizes)
    grid, at = torch.arange(len(xys)).view(*sizes.values()), [*sizes].index("tensor")
    seeds = grid.narrow(at, 0, 1).expand(grid.shape).flatten().tolist()  # of the first rank along "tensor"
    want = gradient_of_mean(whole, full, [(xy[0], xy[1]) for xy in xys], seeds)
    model, _ = llama(dropout=dropout, parts=sizes["tensor"])
    check(*tensor_parallel_gradient(bind(sizes), model, full, xys[rank], way, seeds[rank])[:2], want)


@at_most(1)
@each(way=WAYS, sizes=MESHES)
def test_tensor_parallel_on_four_ranks(gloo4: Pool, sizes: dict[str, int], way: dict[str, bool]) -> None:
    gloo4.run(tensor_parallel_rank, sizes, way, 0.0)


LEARN: dict[str, tuple[str, list[tuple[int, str]], float]] = {
    "tensor_parallel": (
        "--heads 4 --kv-heads 2 --hidden 64",
        [(1, ""), (4, "--tensor 2 --sequence"), *depth([], [(4, "--tensor 2"), (2, "--tensor 2")])],
        2e-3,
    ),
    "moe": ("--heads 2 --hidden 32 --experts 4 --balance 0.1", [(1, "--expert 1"), (4, "--expert 2")], 2e-3),
    "mixtral": ("--heads 2 --hidden 32 --experts 4", [(1, "--expert 1"), (4, "--expert 2")], 3e-2),  # balanced by rank
}
"""Flags, the numbers of ranks with those of each, and by how much losses may differ."""


@seldom
@pytest.mark.parametrize("name", LEARN)
def test_scripts_learn_alike_on_any_ranks(name: str) -> None:
    """The same losses, auxiliary ones included, on one rank and on more."""
    if name == "mixtral":
        pytest.importorskip("transformers.integrations.moe")
    flags, runs, apart = LEARN[name]
    tiny = f"--layers 1 --dim 32 {flags} --seq 32 --batch 4 --steps 12 --lr 1e-2 --log-every 1 --max-bytes 200000"
    one, *others = (losses(launch(ranks, EXAMPLES / f"{name}.py", *f"{tiny} {more}".split())) for ranks, more in runs)
    assert len(one) == 12
    assert one[-1] < one[0] - 1
    for other in others:
        assert other == pytest.approx(one, abs=apart)


# --- experts ---


def experts(parts: int = 1) -> tuple[nn.Module, Tree]:
    torch.manual_seed(0)
    model = moe.MoE(layers=2, dim=8, heads=2, seq=SEQ, hidden=12, experts=8, parts=parts).double()
    return model, {name: p.detach() for name, p in model.named_parameters()}


def moe_rank(rank: int, sizes: dict[str, int], tokens: int, balance: float) -> list[list[int]]:
    """Compare a rank's gradient, and a product with the Hessian, with those of the joined batch.

    Returns each layer's rows for the experts here.
    """
    (whole, full), (model, _) = experts(), experts(sizes["expert"])
    torch.manual_seed(1)
    xys = torch.randint(256, (torch.Size(sizes.values()).numel(), 2, 1, tokens))
    spec = moe.policy()(model).on(bind(sizes))
    seen, run = [], moe.run_experts

    def watched(rows: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        seen.append(counts)
        assert sum(counts) == len(rows)
        return run(rows, counts, *weights)

    def loss(params: Tree) -> Tensor:
        return fs.functional_call(model, params, (*xys[rank], spec.bound_mesh, balance), spec=spec)

    params = fs.shard(full, spec)
    with mock.patch.object(moe, "run_experts", watched):
        grads = fs.grad(loss)(params)
    joined = (xys[:, 0, 0], xys[:, 1, 0], moe.ALONE, balance)
    check(fs.unshard(grads, spec), fs.optim.global_norm(grads, spec), gradient_of_mean(whole, full, [joined], [0]))
    direction = {name: p.cos() for name, p in full.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        product = fs.hvp(loss, params, fs.shard(direction, spec))
        want = torch.func.jvp(lambda p: gradient_of_mean(whole, p, [joined], [0]), (full,), (direction,))[1]
    check(fs.unshard(product, spec), fs.optim.global_norm(product, spec), want)
    return seen


MOE_MESHES = [{"expert": 2, "shard": 2}, {"shard": 2, "expert": 2}, {"expert": 4, "shard": 1}, {"expert": 1, "shard": 4}]


@at_most(1)
@each(balance=[0.5, 0.0], tokens=[2, SEQ], sizes=mark_seldom(MOE_MESHES, *MOE_MESHES[:2]))
def test_experts_on_four_ranks(gloo4: Pool, sizes: dict[str, int], tokens: int, balance: float) -> None:
    """Of uneven counts, with experts that have no tokens: two tokens of each rank have eight experts to choose from."""
    seen = gloo4.run(moe_rank, sizes, tokens, balance)
    counts = [count for rank in seen for layer in rank for count in layer]
    assert len({*counts}) > 1
    if tokens == 2:
        assert 0 in counts


class Double(TorchFunctionMode):
    """Computes in float64 where transformers' norms, routers and losses ask for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        args = [wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        kwargs = {k: wide.get(x, x) if isinstance(x, torch.dtype) else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs) if func is not Tensor.float else args[0].double()


def mixtral_rank(rank: int, sizes: dict[str, int]) -> None:
    """Compare a rank's gradient with that of the whole model."""
    import mixtral
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=8, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5, use_cache=False,
    )  # fmt: skip
    whole = MixtralForCausalLM(config).double()
    whole.config._experts_implementation = "eager"  # its default takes no float64
    full = {name: p.detach() for name, p in whole.named_parameters()}
    torch.manual_seed(1)
    xs = torch.randint(64, (torch.Size(sizes.values()).numel(), 1, 6))
    mesh = fs.collectives.Mesh.of(bind(sizes))
    model = mixtral.split_experts(whole, mesh["expert"])
    assert [name for name, _ in model.named_parameters()] == [*full]
    spec = mixtral.policy()(model).on(mesh)
    params = fs.shard(whole, spec)

    def whole_loss(params: Tree) -> Tensor:
        outputs = [torch.func.functional_call(whole, params, (x,), {"labels": x}) for x in xs]
        return torch.stack([output.loss for output in outputs]).mean()

    with Double():
        want = torch.func.grad(whole_loss)(full)
        grads = fs.grad(lambda p: fs.functional_call(model, p, (xs[rank],), {"labels": xs[rank]}, spec=spec).loss)(params)
    check(fs.unshard(grads, spec), fs.optim.global_norm(grads, spec), want)


@at_most(1)
@each(sizes=mark_seldom(MOE_MESHES[:3], *MOE_MESHES[:2]))
def test_mixtral_on_four_ranks(gloo4: Pool, sizes: dict[str, int]) -> None:
    pytest.importorskip("transformers.integrations.moe")
    gloo4.run(mixtral_rank, sizes)


def test_mixtral_on_one_rank(alone: Pool) -> None:
    pytest.importorskip("transformers.integrations.moe")
    alone.run(mixtral_rank, {"expert": 1, "shard": 1})


def mixtral_files(rank: int, folder: str) -> None:
    """What save_pretrained wrote, read into pieces, and what they export, read by transformers, are the same bits."""
    import mixtral
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    if rank == 0:
        whole.save_pretrained(f"{folder}/given")
    torch.distributed.barrier()
    loaded = MixtralForCausalLM.from_pretrained(f"{folder}/given")
    mesh = fs.collectives.Mesh.of(bind({"expert": 2, "shard": 2}))
    model = mixtral.split_experts(loaded, mesh["expert"])
    spec = mixtral.policy()(model).on(mesh)
    params = fs.shard(loaded, spec)
    fs.checkpoint.export(f"{folder}/exported", params, spec)
    if rank == 0:
        whole.config.save_pretrained(f"{folder}/exported")
        exported = dict(MixtralForCausalLM.from_pretrained(f"{folder}/exported").named_parameters())
        for name, p in whole.named_parameters():
            assert torch.equal(exported[name], p), name
    torch.distributed.barrier()
    read = fs.checkpoint.read_safetensors(f"{folder}/exported", spec)
    assert all(torch.equal(read[key], p) for key, p in params.items())


def test_mixtral_files_have_whole_experts(gloo4: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe")
    pytest.importorskip("safetensors")
    gloo4.run(mixtral_files, str(tmp_path))
