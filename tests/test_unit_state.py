"""An elementwise optimizer's state declares which of its values are numbers; it stays a dict and a pytree of plain tensors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard._spec.unit_state import UnitState


class Counting(torch.optim.Optimizer):
    """Counts its steps under a name that torch's optimizers do not have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param]["sum"].add_(param.grad)
            self.state[param]["count"].add_(1)


class Scales(nn.Module):
    """Eight parameters of one element, each with options of its own: as many numbers as elements in the slice."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(8)])


def stepped() -> tuple[fs.PartitionSpec, dict[str, Any]]:
    spec = fs.policies.whole(fs.P("shard", align=1))(Scales()).on({"shard": 1})
    init, update = fs.optim.from_torch(
        Counting,
        spec=spec,
        options=lambda name, param: {"lr": 0.1 + int(name.split(".")[-1])},
        initial=lambda p: {"count": torch.zeros(()), "sum": torch.zeros_like(p)},
    )
    params = {"": torch.arange(8.0)}
    _, state = update(params, init(params), params)
    return spec, state


def test_numbers_as_long_as_a_slice_need_no_guess(tmp_path: Path) -> None:
    spec, state = stepped()
    assert state[""]["count"].shape == state[""]["sum"].shape == (8,)
    fs.checkpoint.save(tmp_path / "declared", state, spec)
    found = fs.checkpoint.load(tmp_path / "declared", spec, like=state)
    assert pytree.tree_structure(found) == pytree.tree_structure(state)
    assert_close(found[""]["sum"], state[""]["sum"])
    with pytest.raises(ValueError, match="may be this rank's slice, or numbers"):
        fs.checkpoint.save(tmp_path / "plain", {"": dict(state[""])}, spec)


def test_a_file_keeps_the_declaration(tmp_path: Path) -> None:
    """Without ``like`` as well."""
    spec = fs.policies.whole()(nn.Linear(4, 3)).on({"shard": 1})
    init, _ = fs.optim.from_torch(torch.optim.AdamW)
    state = init({"": torch.zeros(spec.shard_numel(spec.by_key[""]))})
    fs.checkpoint.save(tmp_path / "a", state, spec)
    found = fs.checkpoint.load(tmp_path / "a", spec)
    assert pytree.tree_structure(found) == pytree.tree_structure(state)
    assert found[""].numbers == {"step"}


def test_functions_of_trees_keep_the_declaration() -> None:
    _, state = stepped()

    def double(tree: Any) -> Any:
        return pytree.tree_map(lambda x: 2 * x, tree)

    for new in (
        double(state),
        optree.tree_map(lambda x: 2 * x, state),  # pyright: ignore[reportArgumentType]
        torch.func.jvp(double, (state,), (state,))[1],
        torch.func.vjp(double, state)[1](state)[0],
        torch.func.vmap(double)(state),
        torch.compile(double, fullgraph=True, backend="eager")(state),
        pytree.tree_map(lambda x: 2 * x, copy.deepcopy(state)),
    ):
        assert isinstance(new[""], UnitState)
        assert new[""].numbers == {"count"}
        assert_close(new[""]["sum"], 2 * state[""]["sum"])


def test_a_pickle_is_a_plain_dict() -> None:
    """torch.load(weights_only=True) reads no other classes; such a state is read by its shapes."""
    _, state = stepped()
    found = pickle.loads(pickle.dumps(state))
    assert type(found[""]) is dict
    assert_close(found[""]["count"], state[""]["count"])


def test_an_update_returns_what_it_was_given() -> None:
    """A plain dict stays one: the structure of the state never changes."""
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    params: dict[str, Tensor] = {"": torch.ones(4)}
    state = init(params)
    assert isinstance(update(params, state, params)[1][""], UnitState)
    assert type(update(params, {"": dict(state[""])}, params)[1][""]) is dict


def test_resharding_keeps_the_declaration() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    old, new = (fs.optim.matrices(policy(model)) for policy in (fs.policies.whole(), fs.by_type(nn.Linear)))
    init = fs.optim.muon(old).init
    found = fs.optim.reshard(init(fs.shard(model, old.spec)), old, new)
    wanted = fs.optim.muon(new).init(fs.shard(model, new.spec))
    assert pytree.tree_structure(found) == pytree.tree_structure(wanted)
