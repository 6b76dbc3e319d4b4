"""ZeRO-1 by composition: parameters replicated, optimizer state for slices, joined by reshard; the state of a unit."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from collective_log import Collectives, gather, world
from depth import at_most
from ranks import real_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard.optim import UnitState

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))


def specs(module: nn.Module) -> tuple[fs.PartitionSpec, fs.PartitionSpec]:
    """Replicated for the gradients, split for the state."""
    return fs.policies.always(fs.P())(module), fs.policies.always(fs.P("shard", align=1))(module)


def batches(ranks: int) -> Tensor:
    return torch.randn(3, ranks, 4, 5, generator=torch.Generator().manual_seed(1))


def train(module: nn.Module, xs: Tensor) -> tuple[fs.Params, dict[str, Any]]:
    """Full parameters after a step on each of this rank's batches, and this rank's optimizer state."""
    replicated, split = specs(module)
    params = fs.shard(module, replicated)
    init, update = fs.optim.from_torch(torch.optim.AdamW, donate=True, **OPTIONS)
    state = init(fs.reshard(params, replicated, split))
    for x in xs:
        grads = fs.grad(lambda p, x=x: fs.functional_call(module, p, (x,), spec=replicated).pow(2).mean())(params)
        own, own_grads = (fs.reshard(tree, replicated, split) for tree in (params, grads))
        own, state = update(own_grads, state, own)
        params = fs.reshard(own, split, replicated)
    return fs.unshard(params, replicated), state


def nbytes(states: Any) -> int:
    return sum(t.nbytes for values in states for name, t in values.items() if name != "step")


@at_most(1)
@pytest.mark.parametrize("ranks", [2, 4])
@real_ranks(lambda ranks: ranks)
def test_zero_redundancy_optimizer(rank: int, ranks: int) -> None:
    """Its parameters under DDP to 1e-6; the state is one part in N on every rank, but for padding."""
    xs, ddp = batches(ranks)[:, rank], DistributedDataParallel(model())
    got, state = train(model(), xs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **OPTIONS)
        for batch in xs:
            optimizer.zero_grad()
            ddp(batch).pow(2).mean().backward()
            optimizer.step()
    peer, of_peer = {n: p.detach() for n, p in ddp.module.named_parameters()}, nbytes(optimizer.optim.state.values())
    assert_close(got, peer, rtol=1e-6, atol=1e-6)
    sizes = fs.collectives.gather_values(
        torch.tensor([[nbytes(state.values()), of_peer]]), fs.collectives.Mesh.world()["shard"]
    )
    whole, (ours, theirs) = 2 * sum(p.nbytes for p in model().parameters()), sizes.T
    padding = 2 * 4 * len(specs(model())[1])  # less than an element of each moment of each unit
    assert ((whole / ranks <= ours) & (ours < whole / ranks + padding)).all()
    assert ours.max() <= theirs.max()  # which cannot split a tensor
    assert theirs.sum() == whole


@pytest.mark.parametrize("size", [1, 2, 7])
def test_what_is_sent(size: int) -> None:
    """A gather of each unit; slices are taken without a word. Gradients: test_replicated_units_only_reduce."""
    with world(size):
        module = model()
        replicated, split = specs(module)
        params = fs.shard(module, replicated)
        init, update = fs.optim.from_torch(torch.optim.AdamW, **OPTIONS)
        with Collectives() as sent:
            own = fs.reshard(params, replicated, split)
            own, _ = update(fs.reshard(params, replicated, split), init(own), own)
            sent.turn()
            new = fs.reshard(own, split, replicated)
        assert {key: p.shape for key, p in new.items()} == {key: p.shape for key, p in params.items()}
        assert sent.forward == []
        assert sent.backward == ([gather(split.bound, key) for key in split.by_key] if size > 1 else [])


# --- the state of a unit ---
class Counting(torch.optim.Optimizer):
    """Counts its steps under a name that torch's optimizers do not have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param]["sum"].add_(param.grad)
            self.state[param]["count"].add_(1)


def initial(param: Tensor) -> dict[str, Tensor]:
    return {"count": torch.zeros(()), "sum": torch.zeros_like(param)}


def stepped() -> tuple[fs.PartitionSpec, dict[str, Any]]:
    spec = fs.policies.whole(fs.P("shard", align=1))(nn.Linear(8, 1, bias=False)).on({"shard": 1})
    init, update = fs.optim.from_torch(Counting, spec=spec, initial=initial)
    params = {"": torch.arange(8.0)}
    _, state = update(params, init(params), params)
    return spec, state


def double(tree: Any) -> Any:
    return pytree.tree_map(lambda x: 2 * x, tree)


def by_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


MADE: dict[str, Callable[[Any], Any]] = {
    "pytree": double,
    "optree": lambda state: optree.tree_map(lambda x: 2 * x, state),
    "vmap": lambda state: pytree.tree_map(lambda x: x[0], torch.func.vmap(double)(pytree.tree_map(lambda x: x[None], state))),
    "torch.compile": torch.compile(double, fullgraph=True, backend="eager"),
    "pickle": lambda state: double(pickle.loads(pickle.dumps(state))),
    "torch.load": lambda state: double(by_file(state)),
    "copy": lambda state: {key: copy.copy(x) for key, x in double(state).items()},
    "method": lambda state: {key: x.copy() for key, x in double(state).items()},
    "union": lambda state: {key: x | {"sum": 2 * x["sum"], "count": 2 * x["count"]} for key, x in state.items()},
}
"""A state times two by functions of trees, and by copies of it."""


@pytest.mark.parametrize("how", MADE)
def test_what_is_made_of_a_state_keeps_the_declaration(how: str) -> None:
    """So that tree_map goes over a state and its copy."""
    _, state = stepped()
    found = MADE[how](state)
    assert type(found[""]) is UnitState
    assert found[""].numbers == {"count"}
    for library in (pytree, optree):
        added: Any = library.tree_map(torch.add, state, found)
        assert added[""].numbers == {"count"}
        assert_close({**added[""]}, {name: 3 * x for name, x in state[""].items()})


@pytest.mark.parametrize("library", [pytree, optree])
def test_states_of_one_tree_map_have_one_declaration(library: Any) -> None:
    """A plain dict, or another declaration, is refused by name; a state that is made of it is not, in any order of names."""
    _, state = stepped()
    plain = dict(reversed(state[""].items()))
    for other in (plain, UnitState(plain, ["count", "sum"])):
        with pytest.raises(ValueError, match=r"UnitState|frozenset\(\{'count'\}\)"):
            library.tree_map(torch.add, state, {"": other})
    added = library.tree_map(torch.add, state, {"": UnitState(plain, ["count"])})
    assert_close(added[""]["sum"], 2 * plain["sum"])
    assert_close(added[""]["count"], 2 * plain["count"])
    with pytest.raises(ValueError, match=r"expected numbers among \['sum', 'count'\], got 'step'"):
        UnitState(plain, ["step"])  # it is 'count' here


def test_a_state_of_numbers_alone_is_stored_by_parameter(tmp_path: Path) -> None:
    """So that another policy loads it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, other = (policy(model).on({"shard": 1}) for policy in (fs.policies.whole(), fs.by_type(nn.Linear)))
    fs.checkpoint.save(tmp_path / "a", {"": UnitState({"count": torch.tensor(3)}, ["count"])}, one)
    assert fs.checkpoint.load(tmp_path / "a", other) == {key: {"count": torch.tensor(3)} for key in ("0", "1")}


def test_a_group_of_torch_without_parameters() -> None:
    """Ours have some: the way that the guide names puts it in and leaves it out."""
    model = nn.Linear(4, 3)
    spec = fs.policies.whole()(model).on({"shard": 1})
    theirs = torch.optim.SGD([{"params": [], "lr": 0.5}, {"params": model.parameters()}], lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    theirs.step()
    init, _ = fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    before = get_optimizer_state_dict(model, theirs)
    state = fs.checkpoint.from_optimizer_state_dict(before, spec, init(fs.shard(model, spec)))
    found = fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)
    found["param_groups"].insert(0, {**theirs.param_groups[0], "params": []})
    set_optimizer_state_dict(model, theirs, found)
    after = get_optimizer_state_dict(model, theirs)
    assert_close(after["state"], before["state"])
    assert after["param_groups"][1] == before["param_groups"][1]


def test_a_unit_has_one_number_for_all_options() -> None:
    """What torch would compute of a parameter's own options is refused."""
    spec = fs.policies.whole(fs.P("shard", align=4))(nn.LayerNorm(1)).on({"shard": 1})
    init, update = fs.optim.from_torch(torch.optim.AdamW, spec=spec, options=lambda name, _: {"eps": 0.5 + len(name)})
    params = {"": torch.ones(spec.shard_numel(spec.by_key[""]))}
    _, state = update(params, init(params), params)
    assert state[""]["step"].tolist() == 1
    for cls, own in ((torch.optim.NAdam, {"momentum_decay": 0.1}), (torch.optim.ASGD, {"lr": 0.1})):
        with pytest.raises(ValueError, match=f"{cls.__name__} computes a number of the unit's state from .*fs.partition"):
            fs.optim.from_torch(cls, spec=spec, options=lambda name, _, own=own: own)
    with pytest.raises(ValueError, match=r"Counting has numbers in its state, \['count'\]: expected options=None"):
        fs.optim.from_torch(Counting, spec=spec, options=lambda name, _: {"lr": float(len(name))}, initial=initial)


def test_an_update_returns_what_it_was_given() -> None:
    """A plain dict stays one: the structure of the state never changes."""
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    params: dict[str, Tensor] = {"": torch.ones(4)}
    state = init(params)
    assert isinstance(update(params, state, params)[1][""], UnitState)
    assert type(update(params, {"": dict(state[""])}, params)[1][""]) is dict
