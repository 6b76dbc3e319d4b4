"""The peer's claims that no other file holds: shared parameters, structured inputs, names, what a gather leaves behind."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from collective_log import world
from models import unchanged
from parity import WAYS, average_gradients, check_parity, numbers, plain_call, same, sharded_call, squared
from peer_models import MLP, Block, Net, Outer, Transformer
from ranks import real_ranks
from test_memory import Alive
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close
from wrap_oracle import NESTED, sequential

import funshard as fs
from funshard import P
from funshard._core.mesh import Mesh

STRATEGIES = {"FULL_SHARD": P("shard"), "SHARD_GRAD_OP": P("shard", reshard=False), "NO_SHARD": P()}


# --- Section 1: policies. ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_main_wrap_api(rank: int, strategy: str) -> None:
    """Threshold 0, on real ranks: with every module a unit six SGD steps are the plain ones."""
    model = sequential(*NESTED).double()
    spec = fs.by_size(0, p=STRATEGIES[strategy])(model)
    assert spec.paths == ("", "0", "1", "2", "2.0", "2.1")
    check_parity(rank, model, spec, steps=6, optimizer=torch.optim.SGD, lr=0.1)


def test_str_of_an_unbound_spec_with_an_unknown_axis() -> None:
    """Printing never raises: a spec for a mesh that is still to come shows its sizes as on one rank."""
    table = str(fs.policies.whole(P(("expert", "shard"), align=1))(nn.Linear(2, 3)))
    assert "P(('expert', 'shard'), align=1)" in table
    assert table.splitlines()[-1].split() == ["total", "unbound:", "as", "on", "one", "rank", "2", "9", "0", "36"]


# --- Section 2: flat parameters. ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_output_with_and_without_shared_params(tied: bool, dtype: torch.dtype) -> None:
    """Flattened or not, in full and in half precision: bit for bit the same output."""
    model, ids = Transformer(tied=tied).to(dtype), torch.arange(6).view(2, 3)
    for policy in (fs.policies.whole(), fs.by_type(Block), fs.policies.always()):
        spec = policy(model).on({"shard": 1})
        out = fs.functional_call(model, fs.shard(model, spec), ids, spec=spec)
        assert out.dtype == dtype
        assert torch.equal(out, model(ids))


@pytest.mark.parametrize("tied", [False, True])
@real_ranks(2)
def test_pnorm_after_step_with_shared_params(rank: int, tied: bool) -> None:
    """The norm over all shards after one SGD(0.01) step is the plain model's: a shared parameter counts, and moves, once."""
    model, ids = Transformer(tied=tied), torch.arange(6).view(2, 3) + rank
    spec = fs.by_type(Block)(model).bound
    params = fs.shard(model, spec)
    grads = fs.grad(lambda p: squared(sharded_call(model, p, spec), ids))(params)
    total = torch.stack([(params[key] - 0.01 * grads[key]).square().sum() for key in params]).sum()
    dist.all_reduce(total)
    reference = copy.deepcopy(model)
    squared(plain_call(reference), ids).backward()
    average_gradients(reference)
    torch.optim.SGD(reference.parameters(), lr=0.01).step()
    assert_close(total.sqrt(), nn.utils.get_total_norm(reference.parameters()).detach())


@dataclass
class Record:
    x: Tensor | PackedSequence
    rest: Any


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(5, 5, batch_first=True).double(), nn.Linear(5, 5).double()

    def forward(self, record: Record) -> Record:
        (y, inner), label = record.rest["list"], record.rest["label"]
        inner = Record(self.lstm(inner.x)[0], None)
        return Record(self.linear(record.x), {"list": [self.linear(y), inner], "label": label})


@pytest.mark.parametrize("way", ["fs", "backward"])
@real_ranks(2)
def test_apply_to_tensors_and_packed_sequence(rank: int, way: str) -> None:
    """Nested dataclasses, dicts, lists and a PackedSequence go in and come out, and every tensor in them has its gradient."""

    def loss(call: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.expand(2, 4, 5), [4, 3], batch_first=True)
        out = call(Record(x, {"list": [2 * x, Record(packed, None)], "label": "label"}))
        y, inner = out.rest["list"]
        assert (type(out), type(inner.x), out.rest["label"]) == (Record, PackedSequence, "label")
        return squared(lambda t: t, torch.cat([out.x, y, pad_packed_sequence(inner.x)[0].flatten(0, 1)]))

    check_parity(rank, Structured(), fs.policies.always()(Structured()), numbers, loss, way=way)


# --- Section 3: full parameters. ---


@real_ranks(2)
def test_named_parameters_and_buffers(rank: int) -> None:
    """Names and values are the plain module's, with its prefixes, of all units or some: with the buffers a state dict."""
    model = nn.Sequential(Outer(), nn.BatchNorm1d(5).double())
    spec = fs.by_type(MLP)(model).bound
    expected, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    shards = fs.shard(model, spec)
    full = fs.gather_full(shards, spec)
    assert full.keys() == expected.keys()
    assert all(torch.equal(full[name], p) for name, p in expected.items())
    part = fs.unshard(shards, spec, units=["0.inner"])
    assert part.keys() == {f"0.inner.{name}" for name, _ in model[0].inner.named_parameters()}
    fresh = copy.deepcopy(model)
    for p in fresh.parameters():
        nn.init.zeros_(p)
    fresh.load_state_dict(full | buffers, strict=True)
    assert all(torch.equal(p, expected[name]) for name, p in fresh.named_parameters())


@pytest.mark.parametrize("way", WAYS)
@real_ranks(2)
def test_with_grads_none_grads(rank: int, way: str) -> None:
    """Gradients are what a transform returns: nothing sharded or gathered has a .grad, before it or after it."""
    model = Net()
    spec = fs.by_type(MLP)(model).bound
    squared(model, numbers(rank, 0)).backward()  # gradients of the plain model are not taken along
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    params = fs.shard(model, spec)
    for tensors in (params, fs.gather_full(params, spec), fs.unshard(params, spec)):
        assert all(t.grad is None and not t.requires_grad for t in tensors.values())
    with unchanged(model):
        WAYS[way](lambda p: squared(sharded_call(model, p, spec), numbers(rank, 0)))(params)
    assert all(t.grad is None for t in params.values())
    same({name: p.grad for name, p in model.named_parameters()}, before, "the plain model's gradient")


@pytest.mark.parametrize("reshard", [False, True])
def test_unshard_params_respects_reshard(reshard: bool) -> None:
    """A gather of everything between forward and backward, or after it, leaves the very buffers alive that were."""
    with world(2):
        model = Net()
        spec = fs.policies.override(fs.by_type(MLP, p=P("shard", reshard=reshard)), fs.by_path({"": P("shard")}))(model).bound
        params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
        sizes = {unit.path: spec.padded_numel(unit) for unit in spec}
        with Alive() as alive:
            y = fs.functional_call(model, params, numbers(0, 0), spec=spec).sum()
            kept = [sizes[""], sizes["blocks.2"]] if reshard else [*sizes.values()]
            assert alive.now() == kept
            fs.gather_full(params, spec)
            assert alive.now() == kept
            full = fs.unshard(params, spec, units=["blocks.1"])
            assert alive.now() == [*kept, sizes["blocks.1"]]
            del full
            assert alive.now() == kept
            y.backward()
            assert alive.now() == []
            fs.gather_full(params, spec)
            assert alive.now() == []


# --- Sections 4 and 6: checkpointing, division. ---


class Checkpoints(Net):
    reentrant = False

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["fs", "backward"])
@real_ranks(2)
def test_checkpoint_inside_is_an_error(rank: int, way: str, reentrant: bool) -> None:
    """It would recompute with other parameters. Around the call: test_train_parity_with_activation_checkpointing."""
    model = Checkpoints()
    model.reentrant = reentrant
    spec = fs.by_type(MLP)(model).bound
    params = fs.shard(model, spec)
    message = r"unit 'blocks\.0': torch\.utils\.checkpoint inside functional_call.*checkpoint the functional_call as a whole"
    with unchanged(model), pytest.raises(RuntimeError, match=message):
        WAYS[way](lambda p: squared(sharded_call(model, p, spec), numbers(rank, 0)))(params)


@real_ranks(2)
def test_reentrant_checkpoint_around_the_call(rank: int) -> None:
    """With .backward(), the only way that torch allows for it."""

    def loss(call: Any, x: Tensor) -> Tensor:
        return squared(lambda x: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=True), x.requires_grad_())

    check_parity(rank, Net(), fs.by_type(MLP)(Net()), numbers, loss, steps=3, way="backward")


@pytest.mark.parametrize("sizes", [{"shard": 3}, {"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 1}, {"shard": 1}])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_singleton_copy_division(sizes: dict[str, int], reduce: str) -> None:
    """On any mesh, of one rank too, the sum over ranks is divided exactly once, or never: by the number of ranks."""
    model = nn.Linear(2, 3, bias=False).double()
    ranks = torch.Size(sizes.values()).numel()

    def run(mesh: Mesh, x: Tensor) -> Tensor:
        spec = fs.policies.whole()(model).on(mesh)
        call = lambda p: fs.functional_call(model, p, x[None], spec=spec, reduce=reduce)  # noqa: E731
        grads = fs.grad(lambda p: call(p).sum())(fs.shard(model, spec))
        return fs.unshard(grads, spec)["weight"]

    xs = 12.0 * torch.arange(1, 2 * ranks + 1, dtype=torch.float64).view(ranks, 2)
    expected = xs.sum(0) / (ranks if reduce == "mean" else 1)
    assert torch.equal(fs.testing.spmd(run, sizes)(xs), expected.expand(ranks, 3, 2))
