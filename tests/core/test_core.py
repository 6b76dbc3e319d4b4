"""The core alone: the laws of gradients and layout hold for its own shard, unshard and functional_call.

Here these and torch.func's grad stand where the package has its own, so that no schedule, stage or option takes part.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import test_gradients
import test_layout
import test_policies
import torch
from depth import at_most
from parity import numbers, squares
from ranks import real_ranks
from test_house import FILES, ROOT, imported
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import funshard as fs
from funshard._core import call

LAWS = (
    test_gradients.test_g1_gradients_are_shards_of_the_mean_gradient,
    test_gradients.test_g3_ensembles,
    test_gradients.test_g3_higher_derivatives_are_shards_of_the_mean_ones,
    test_gradients.test_g3_maml,
    test_gradients.test_g3_samples,
    test_gradients.test_g5_nothing_runs,
    test_gradients.test_g8_sgd_steps_commute_with_sharding,
    test_layout.test_l1_unflatten_inverts_flatten,
    test_layout.test_l2_every_element_has_one_owner,
    test_layout.test_l2_slices_join_to_the_buffer,
    test_layout.test_l3_padding_is_in_no_view,
    test_layout.test_l7_replicated_and_one_rank,
    test_layout.test_l9_padding_has_no_gradient,
    test_policies.test_a3_by_type_is_module_wrap_policy,
    test_policies.test_a3_shared_modules_are_selected_as_in_torch,
)
globals().update({law.__name__: law for law in LAWS})  # collected here once more

CORE = {
    "functional_call": call.functional_call,
    "shard": call.shard,
    "unshard": call.unshard,
    "grad": torch.func.grad,
    "grad_and_value": torch.func.grad_and_value,
}


@pytest.fixture(autouse=True, scope="module")
def core_alone() -> Iterator[None]:
    with mock.patch.multiple(fs, **CORE):
        yield


def test_the_core_imports_torch_optree_and_the_private_parts_of_torch_alone() -> None:
    """And has at most 2,500 lines."""
    core = [path for path in FILES if path.is_relative_to(ROOT / "_core")]
    assert {to.split(".")[0] for path in core for _, to in imported(path)} == {"_core", "_torch"}
    outside = {
        (node.module if isinstance(node, ast.ImportFrom) else name.name).split(".")[0]
        for path in core
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for name in node.names
    }
    assert outside & {"optree", "torch"} == {"optree", "torch"}
    assert "funshard" not in outside
    assert sum(len(path.read_text().splitlines()) for path in core) <= 2500


STRATEGIES = {
    "FSDP": (fs.P("shard"), (2,), ("shard",)),
    "DDP": (fs.P(), (2,), ("shard",)),
    "HSDP": (fs.P("shard"), (2, 1), ("replicate", "shard")),
    "over all axes": (fs.P(("replicate", "shard")), (1, 2), ("replicate", "shard")),
}


same = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@at_most(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_the_core_and_the_package_agree_on_real_ranks(rank: int, strategy: str) -> None:
    """Values and gradients of the core and of the package, by two reductions; then a derivative of the gradient."""
    warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    p, shape, names = STRATEGIES[strategy]
    spec = fs.by_type(nn.Linear, p=p)(model).on(init_device_mesh("cpu", shape, mesh_dim_names=names))
    shards = call.shard(model, spec)
    same(shards, fs.shard(model, spec))
    same(call.unshard(shards, spec), fs.unshard(shards, spec))
    for reduce in ("mean", "sum", 3.0):

        def loss(params: fs.Params, run: object, reduce: object = reduce) -> Tensor:
            return run(model, params, numbers(rank, 0), spec=spec, reduce=reduce).square().mean()

        same(torch.func.grad(loss)(shards, call.functional_call), fs.grad(loss)(shards, fs.functional_call))
        both = [
            torch.func.grad(lambda params, run=run: squares(torch.func.grad(loss)(params, run)))(shards)
            for run in (call.functional_call, fs.functional_call)
        ]
        same(*both)
    assert model[1].num_batches_tracked == 0


def test_options_are_refused() -> None:
    model = nn.Linear(2, 2)
    for options in (
        {"precision": fs.Precision()},
        {"remat": True},
        {"compile": True},
        {"offload": "params"},
        {"local": {"e": 0}},
    ):
        spec = fs.policies.whole(fs.P("shard", **options))(model).on({"shard": 1, "e": 1})
        with pytest.raises(
            ValueError, match=r"unit '' is P\('shard', .*\): expected a P of axis, reshard, align and unit alone"
        ):
            call.functional_call(model, {}, (torch.ones(2),), spec=spec)
