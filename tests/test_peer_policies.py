"""The claims of torch's test_wrap.py, and rows A9 to A23 of policies; also where torch is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given
from models import build
from strategies import OtherResidualNode, modules
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, apply_activation_checkpointing
from torch.distributed.fsdp import wrap
from torch.nn.modules.batchnorm import _BatchNorm
from wrap_oracle import NESTED, Wrapper, lambdas, sequential, size, torch_units, units_of, wrapped

import funshard as fs

BF16 = fs.Precision(param=torch.bfloat16)
FULL = fs.Precision(param=torch.float32, restore_outputs=True)


# --- Sizes and leaves to the numel, as in test_wrap.py. ---


# --- Where torch is wrong. ---


def shared_below_two(order: str = "ab") -> nn.Module:
    """``a.x`` and ``b.x`` are one Linear of 6 elements."""
    shared, model = nn.Linear(2, 2), nn.Module()
    for name in order:
        parent = nn.Module()
        parent.x, parent.own = shared, nn.Parameter(torch.zeros(5 if name == "a" else 1))
        model.add_module(name, parent)
    return model


def test_a12_shared_modules_and_tied_parameters_count_once() -> None:
    """torch wraps a shared module twice and counts it twice; here it is one unit, and its elements count once."""
    model, seen = shared_below_two(), []
    root = wrapped(model, size(6))
    assert root.a.x is not root.b.x
    assert isinstance(root.a.x, Wrapper)
    assert root.a.x._wrapped is root.b.x._wrapped
    wrap._recursive_wrap(copy.deepcopy(model), size(6), lambda m: seen.append(m) or m, set(), set())
    assert sum(isinstance(m, nn.Linear) for m in seen) == 2
    _, counted = wrap._recursive_wrap(copy.deepcopy(model), lambdas(lambda m: isinstance(m, nn.Linear)), Wrapper, set(), set())
    assert counted == 12
    spec = fs.by_size(6)(model)
    assert units_of(spec) == {"": {"a.own", "b.own"}, "a.x": {"a.x.weight", "a.x.bias"}}
    assert spec.by_name["b.x.bias"] == spec.by_name["a.x.bias"]

    tied = sequential((None,), (None,))
    tied[1][0].weight = tied[0][0].weight  # 5 elements of either side are its own, 25 are both's
    assert torch_units(tied, size(30)).keys() == {"", "0.0", "1.0"}
    assert fs.by_size(30)(tied).selected == ()
    assert units_of(fs.by_size(5)(tied))[""] == {"0.0.weight"}


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bn1, self.bn2 = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.BatchNorm2d(5)
        self.bn3, self.sync = nn.BatchNorm3d(5), nn.SyncBatchNorm(5)


@given(modules())
def test_a17_full_precision_inherits_from_the_unit_around(model: nn.Module) -> None:
    """On shared modules too: the P of the lowest unit above all places, but for its precision."""
    p, q = fs.P("shard", precision=BF16), fs.P("shard", precision=BF16, align=4)
    before = fs.policies.override(fs.policies.whole(p), fs.by_size(4, p=q))
    spec, tree = fs.policies.full_precision(before, OtherResidualNode)(model), fs.module_tree(model)
    for unit in spec:
        leafy = tree.canonical[unit.path] in {node.path for node in tree.nodes() if node.cls is OtherResidualNode}
        assert unit.p.precision == (FULL if leafy else BF16)
    dropped = {param.name: (u.p.align, u.p.axis) for u in spec for param in u.params}
    kept = {param.name: (u.p.align, u.p.axis) for u in before(model) for param in u.params}
    assert dropped == kept


def test_custom_policy_with_full_precision() -> None:
    """test_custom_policy: a dict overrides one unit's options, the rest inherit; batch norms stay in full precision."""
    model, p = (
        nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Sequential(Norms(), nn.Linear(2, 2))),
        fs.P("shard", precision=BF16),
    )

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {"axis": None, "reshard": False} if isinstance(module, Norms) else type(module) is nn.Linear

    spec = fs.policies.full_precision(fs.policies.custom(choose, p), _BatchNorm, nn.LayerNorm)(model)
    got = {unit.key: unit.p for unit in spec}
    norm = fs.P(reshard=False, precision=FULL)
    assert got == {
        **dict.fromkeys(("0", "2.1", "2.0.lin"), p),
        "1": fs.P("shard", precision=FULL),
        **{f"2.0.{name}": norm for name in ("bn1", "bn2", "bn3", "sync")},
    }


# --- Marks, frozen parameters, the root, checkpointing. ---


def test_a19_marks_are_enable_wrap_and_wrap() -> None:
    """The override of the mark beats the policy's option, as wrap's beats enable_wrap's; no context, so nothing nests."""
    with wrap.enable_wrap(wrapper_cls=Wrapper, align=2, reshard=False):
        inner = wrap.wrap(nn.Linear(2, 2), align=4)
        with pytest.raises(NotImplementedError, match="nested"), wrap.enable_wrap(wrapper_cls=Wrapper):
            pass
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0].unit, model[0][0].unit = True, {"align": 4}  # as a model may mark its modules where it builds itself
    marked = fs.policies.custom(lambda module: getattr(module, "unit", False), fs.P("shard", align=2, reshard=False))
    spec = marked(model)
    assert dict(spec.selected) == {"0": fs.P("shard", align=2, reshard=False), "0.0": fs.P("shard", align=4, reshard=False)}
    assert inner.options == {"align": 4, "reshard": False}
    assert marked(copy.deepcopy(model)) == spec, "a copy is marked as well"


@given(modules())
@example(nn.Sequential())
def test_a15_the_root_owns_the_leftovers(model: nn.Module) -> None:
    """What no path owns is in unit "", which exists only if something is left."""
    spec = fs.policies.always()(model)
    taken = {param.name for unit in spec if unit.path for param in unit.params}
    left = {param.name for param in fs.module_tree(model).all_params} - taken
    assert {param.name for unit in spec if not unit.path for param in unit.params} == left
    assert ("" in spec.by_key) == bool(left)
    assert spec.paths[0] == ""


def test_a21_frozen_parameters_are_units_of_their_own() -> None:
    """test_frozen_params, test_validate_frozen_params: nothing to warn about, a reduction carries trainable numel only."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Linear(2, 2))
    model[0][0].requires_grad_(False)
    spec = fs.by_path({"0": fs.P("shard")})(model)
    assert {unit.key: (unit.requires_grad, unit.numel) for unit in spec} == {
        "": (True, 6),
        "0": (True, 10),
        "0:frozen": (False, 20),
    }
    assert {unit.key: unit.requires_grad for unit in fs.policies.always()(model)} == {"0.0": False, "0.1": True, "1": True}
    lora = fs.policies.ignoring(fs.by_path({"0": fs.P("shard")}), modules=["0.0"])(model)
    assert [unit.key for unit in lora] == ["", "0"]


def test_a23_one_policy_type_serves_checkpointing() -> None:
    """The units with remat are the modules that apply_activation_checkpointing wraps under the same policy."""
    model = sequential(*NESTED)
    checkpointed = copy.deepcopy(model)
    apply_activation_checkpointing(checkpointed, auto_wrap_policy=wrap.ModuleWrapPolicy([nn.Linear]))
    places = {
        p.replace("._checkpoint_wrapped_module", "")
        for p, m in checkpointed.named_modules()
        if isinstance(m, CheckpointWrapper)
    }
    spec = fs.by_type(nn.Linear, p=fs.P("shard", remat=True))(model)
    assert {unit.path for unit in spec if unit.p.remat} == places == {"0", "1", "2.0", "2.1"}


def test_mixed_precision_resnet() -> None:
    """As many full-precision units as there are batch norms, whatever the policy and although the rest is bf16."""
    with torch.device("meta"):
        made = build("resnet_with_batch_norm", 1)
    norms = {path for path, m in made.model.named_modules() if isinstance(m, _BatchNorm)}
    p = fs.P("shard", precision=BF16)
    for policy in (fs.policies.whole(p), fs.policies.always(p), fs.by_type(*made.blocks, p=p), fs.by_size(50, p=p)):
        assert {unit.path for unit in fs.policies.full_precision(policy)(made.model) if unit.p.precision == FULL} == norms
    assert len(norms) > 3
