"""examples/context_parallel.py: ring and Ulysses attention, and a GPT on them, are the single-process ones at every order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, depth, each, seldom
from parity import dot
from ranks import launch, mesh_of, real_ranks
from torch import Tensor
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import funshard as fs

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
import context_parallel as example  # noqa: E402

Tree = dict[str, Tensor]
SEQ, BATCH, HEADS = 24, 2, 12  # which up to four ranks divide
torch.manual_seed(0)
MODEL = example.GPT(2, 12, HEADS, SEQ).double()
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
VECTOR = {name: p.cos() for name, p in FULL.items()}


def tokens(readers: int) -> Tensor:
    return torch.randint(256, (readers, 2, BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def plain_attention(qkv: Tensor, order: Tensor, axis: Any) -> Tensor:
    """Torch's own, of a whole sequence in its order."""
    assert axis.size == 1
    assert order.flatten().equal(torch.arange(qkv.shape[3]))
    return F.scaled_dot_product_attention(*qkv, is_causal=True)


def in_one_process(readers: int) -> list[Tree]:
    """The gradient, Hessian-vector product and gradient's gradient of the mean over all sequences."""
    xys = tokens(readers)

    def loss(full: Tree) -> Tensor:
        values = [torch.func.functional_call(MODEL, full, (*xy, example.ALONE, plain_attention)) for xy in xys]
        return torch.stack(values).mean()

    with sdpa_kernel(SDPBackend.MATH):
        hvp = jvp(grad(loss), (FULL,), (VECTOR,))[1]
        return [grad(loss)(FULL), hvp, grad(lambda p: dot(g := grad(loss)(p), g) / 2)(FULL)]


@at_most(1)
@each(sizes=[(2, 2), pytest.param((1, 4), marks=seldom)], attention=example.ATTENTION)
@real_ranks(4)
def test_four_ranks(rank: int, attention: str, sizes: tuple[int, int]) -> None:
    """Derivatives of first and second order as whole parameters, and the gradient's norm."""
    spec, xy = example.policy()(MODEL).on(mesh_of(shard=sizes[0], context=sizes[1])), tokens(sizes[0])[rank // sizes[1]]
    params, v = fs.shard(FULL, spec), fs.shard(VECTOR, spec)

    def loss(params: Tree) -> Tensor:
        attend = example.ATTENTION[attention]
        return fs.functional_call(MODEL, params, (*xy, spec.bound_mesh["context"], attend), spec=spec)

    def half_square(params: Tree) -> Tensor:
        g = grad(loss)(params)
        return dot(g, g) / 2

    found, want = [fs.grad(loss)(params), fs.hvp(loss, params, v), grad(half_square)(params)], in_one_process(sizes[0])
    for i, (tree, other) in enumerate(zip(found, want, strict=True)):
        for name, value in fs.unshard(tree, spec).items():
            assert_close(value, other[name], rtol=1e-9, atol=1e-11, msg=lambda m, i=i, name=name: f"[{i}] {name}: {m}")
    norm = fs.optim.global_norm(found[0], spec)
    assert_close(norm, torch.stack([g.norm() for g in want[0].values()]).norm(), rtol=1e-9, atol=0)


def test_slices_are_balanced() -> None:
    """Each rank has as many pairs of a query and a key that it sees as any other."""
    for ranks in (1, 2, 3, 4):
        order = example.positions(SEQ, ranks)
        assert order.flatten().sort().values.equal(torch.arange(SEQ))
        assert len({int((row + 1).sum()) for row in order}) == 1
    with pytest.raises(ValueError, match="expected a multiple of 10, two chunks for each rank, got 24"):
        example.positions(SEQ, 5)


TINY = "--layers 1 --dim 16 --heads 4 --seq 16 --batch 4 --steps 3 --log-every 1 --max-bytes 100000"


@pytest.mark.parametrize(("ranks", "flags"), [(2, "--context 2"), *depth([], [(4, "--context 2 --attention ulysses")])])
def test_it_runs_as_on_one_rank(ranks: int, flags: str) -> None:
    """The losses of each step are those of one rank."""
    one, more = (launch(n, EXAMPLES / "context_parallel.py", *f"{TINY} {how}".split()) for n, how in ((1, ""), (ranks, flags)))
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", said)] for said in (one, more)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert f"{ranks} ranks" in more
