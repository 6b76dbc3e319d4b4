"""Checkpoints of local units: the files have whole parameters, which any other sizes of the axes load, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from depth import at_most, depth, each, mark_seldom, seldom
from hypothesis import given, settings
from hypothesis import strategies as st
from models import refused
from ranks import Pool, real_ranks
from safetensors.torch import load_file
from test_checkpoint_boxes import check_read_by_others, everyone
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.device_mesh import init_device_mesh

import funshard as fs
from funshard import P, checkpoint

State = dict[str, Any]
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "both": {"grid": (4, 3, 8), "line": (16,)},
    "embed": {"weight": (8, 5)},
    "empty": {"none": (0, 4), "scale": (4,)},
    "experts": {"b": (4, 4), "w": (4, 4, 12)},
    "host": {"w": (4, 8)},
    "frozen": {"w": (8, 64)},
    "pair": {"down": (5, 8), "turned": (8, 12), "up": (8, 5)},
    "plain": {"w": (5, 3)},
}
"""The whole parameters by path. "turned" lies transposed in memory, and "head.weight" is tied to "embed.weight"."""
OPTIONS: dict[str, dict[str, Any]] = {"both": {"axis": None}, "host": {"offload": "params"}, "pair": {"align": 1}}
BY_ROW: dict[str, Any] = {
    "both": {"expert": 0, "tensor": {"*.grid": 2, "*.line": 0}},
    "embed": {"tensor": 0},
    "empty": {"expert": 0},
    "experts": {"expert": 0},
    "host": {"expert": 0},
    "frozen": {"tensor": 0},
    "pair": {"tensor": {"*.up": 0, "*.turned": 0, "*.down": 1}},
}
BY_COLUMN: dict[str, Any] = {
    "both": {"tensor": {"*.grid": 2, "*.line": 0}, "expert": {"*.grid": 2, "*.line": 0}},
    "empty": {"expert": {"*.none": 1, "*.scale": 0}},
    "experts": {"tensor": {"*.w": 2}, "expert": {"*.b": 0, "*.w": 1}},
    "host": {"expert": 1},
    "frozen": {"expert": 1},
    "pair": {"tensor": {"*.up": 0, "*.turned": 1}},
}
LOCALS = {"by_row": BY_ROW, "by_column": BY_COLUMN, "none": dict[str, Any]()}


def whole_params() -> fs.Params:
    torch.manual_seed(0)
    return {f"{path}.{name}": torch.randn(shape) for path, shapes in SHAPES.items() for name, shape in shapes.items()}


def make(mesh: str, local: str, codec: bool = False) -> fs.PartitionSpec:
    """The spec of a local model on a mesh such as "expert=2,shard=2"."""
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
    sizes |= dict.fromkeys({"expert", "tensor", "shard"} - {*sizes}, 1)
    model, paths = nn.ModuleDict(), dict[str, P]()
    for path, shapes in SHAPES.items():
        module, splits = nn.Module(), LOCALS[local].get(path)
        for name, whole in shapes.items():
            shape = [*whole]
            for axis, dims in (splits or {}).items():
                dims = dims if isinstance(dims, Mapping) else {"*": dims}
                dim = next((dim for glob, dim in dims.items() if glob in ("*", f"*.{name}")), None)
                if dim is not None:
                    shape[dim] //= sizes[axis]
            x = torch.zeros(shape[::-1]).T if name == "turned" else torch.zeros(shape)
            module.register_parameter(name, nn.Parameter(x, requires_grad=path != "frozen"))
        model[path] = module
        at_rest = fs.codecs.nf4() if codec and path == "frozen" else None
        options: dict[str, Any] = {"axis": "shard", "local": splits, "at_rest": at_rest} | OPTIONS.get(path, {})
        paths[path] = P(**options)
    model["head"] = nn.Module()
    model["head"].register_parameter("weight", model["embed"].weight)  # pyright: ignore[reportArgumentType]
    paths[""] = paths.pop("embed")  # which embed and head share
    return fs.by_path(paths)(model).on(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def decay(name: str, param: Any) -> dict[str, float]:
    return {"weight_decay": 0.0} if name.endswith((".b", ".line", ".down")) else {}


ADAMW: dict[str, Any] = {"lr": 0.1, "options": decay}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


def optimizers(spec: fs.PartitionSpec) -> Any:
    return fs.optim.from_torch(torch.optim.AdamW, spec=spec, **ADAMW), fs.optim.from_torch(torch.optim.SGD, **SGD)


def train(spec: fs.PartitionSpec) -> State:
    """A state after two steps whose gradients follow from the parameters alone."""
    (init_adamw, adamw), (init_sgd, sgd) = optimizers(spec)
    params, frozen = fs.partition(fs.shard(whole_params(), spec), spec)
    opt, momentum = init_adamw(params), init_sgd(params)
    for _ in range(2):
        grads = {key: shard * 3 for key, shard in params.items()}
        params, opt = adamw(grads, opt, params)
        params, momentum = sgd(grads, momentum, params)
    return {"params": fs.combine(params, frozen), "opt": opt, "momentum": momentum, "step": 7, "rest": torch.arange(3)}


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, in the same containers. A number for each of a unit's options comes back as one."""
    (xs, a), (ys, b) = (optree.tree_flatten(x, namespace="funshard") for x in (found, expected))
    assert a == b
    for path, x, y in zip(a.paths(), xs, ys, strict=True):
        assert torch.equal(x.expand_as(y) if path[-1:] == ("step",) else x, y) if isinstance(y, Tensor) else x == y, path


def save(rank: int, path: str, mesh: str, local: str) -> None:
    spec = make(mesh, local)
    checkpoint.save(path, train(spec), spec).wait()


def load(rank: int, path: str, mesh: str, local: str) -> None:
    spec = make(mesh, local)
    expected = train(spec)
    assert_same(checkpoint.load(path, spec), expected)
    assert_same(checkpoint.load(path, spec, like=expected), expected)
    encoded = make(mesh, local, codec=True)
    (key,) = (unit.key for unit in encoded if unit.at_rest)
    assert_same(checkpoint.load(path, encoded, only="params")[key], fs.shard(whole_params(), encoded)[key])


def read_by_torch(rank: int, path: str) -> None:
    """torch's own reader has the whole parameters."""
    spec = make("shard=1", "none")
    whole = fs.unshard(train(spec)["params"], spec)
    found = {"params": {name: torch.zeros_like(x) for name, x in whole.items()}}
    load_by_torch(found, checkpoint_id=path)
    assert_same(found, {"params": whole})


FOUR = ["expert=2,shard=2", "tensor=2,expert=2", "expert=4", "tensor=4", "shard=4", "shard=2,tensor=2", "replicate=2,expert=2"]
TWO = ["expert=2", "tensor=2", "shard=2", "replicate=2"]


@seldom
@each(mesh=mark_seldom(FOUR, "tensor=2,expert=2"), local=mark_seldom(["by_row", "by_column", "none"], "by_column"))
def test_four_ranks_to_others(gloo4: Pool, gloo2: Pool, alone: Pool, tmp_path: Path, mesh: str, local: str) -> None:
    path = str(tmp_path / "a")
    gloo4.run(save, path, mesh, local)
    pools = (gloo4, FOUR), (gloo2, TWO), (alone, ["shard=1"])
    others = [(pool, axes, dims) for pool, every in pools for axes in every for dims in LOCALS]
    step = depth(18, 1)
    for pool, axes, dims in others[FOUR.index(mesh) % step :: step]:
        pool.run(load, path, axes, dims)
    alone.run(read_by_torch, path)


def to_names(rank: int, mesh: str, local: str) -> list[Any]:
    """The state_dicts of torch's optimizers."""
    spec = make(mesh, local)
    state, to_dict = train(spec), checkpoint.optimizer_state_dict
    return [
        to_dict(state["opt"], spec, torch.optim.AdamW, rank0_only=True, **ADAMW).get("state"),
        to_dict(state["momentum"], spec, torch.optim.SGD, **SGD)["state"],
    ]


def from_names(rank: int, found: list[Any], mesh: str, local: str) -> None:
    spec = make(mesh, local)
    state, (params, _) = train(spec), fs.partition(fs.shard(whole_params(), spec), spec)
    blank = [init(params) for init, _ in optimizers(spec)]
    for one, old, name in zip(found, blank, ("opt", "momentum"), strict=True):
        given = {"state": one}
        got = checkpoint.from_optimizer_state_dict(given, spec, old)
        without = {
            key: {slot: x for slot, x in of.items() if name == "opt" or slot != "step"} for key, of in state[name].items()
        }
        assert_same({key: {slot: got[key][slot] for slot in of} for key, of in without.items()}, without)


@at_most(1)
@pytest.mark.parametrize(("mesh", "local"), [("expert=2,shard=2", "by_row"), ("tensor=2,expert=2", "by_column")])
def test_optimizer_states_by_name(gloo4: Pool, gloo2: Pool, alone: Pool, mesh: str, local: str) -> None:
    found = gloo4.run(to_names, mesh, local)
    assert_same(found[0], alone.run(to_names, "shard=1", "none")[0])
    for pool, other, dims in (gloo4, "expert=4", "by_column"), (gloo2, "tensor=2", "by_row"), (alone, "shard=1", "by_row"):
        pool.run(from_names, found[0], other, dims)


def export(rank: int, path: str, mesh: str, local: str, kind: str) -> None:
    spec = make(mesh, local)
    params = {"shards": fs.shard(whole_params(), spec), "whole": whole_params()}[kind]
    checkpoint.export(path, params, spec)


def read_safetensors(rank: int, path: str, mesh: str, local: str) -> None:
    for codec in (False, True):
        spec = make(mesh, local, codec=codec)
        assert_same(checkpoint.read_safetensors(path, spec), dict(fs.shard(whole_params(), spec)))


@at_most(1)
@each
@pytest.mark.parametrize(("mesh", "local"), [("expert=2,shard=2", "by_row"), ("tensor=2,expert=2", "by_column")])
@pytest.mark.parametrize("kind", ["shards", "whole"])
def test_safetensors(gloo4: Pool, gloo2: Pool, alone: Pool, tmp_path: Path, mesh: str, local: str, kind: str) -> None:
    path = str(tmp_path / "a")
    gloo4.run(export, path, mesh, local, kind)
    assert_same(load_file(f"{path}/model.safetensors"), dict(sorted(whole_params().items())))
    for pool, other, dims in (gloo4, "expert=4", "by_column"), (gloo2, "tensor=2", "by_row"), (alone, "shard=1", "by_row"):
        pool.run(read_safetensors, path, other, dims)


@real_ranks(2)
def test_a_size_that_does_not_divide_the_dimension(rank: int, tmp_path: Path) -> None:
    """Three experts on two ranks, which have one or two each: an error on all, before anything is read, with all shapes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))

    def of(size: int, local: Any) -> fs.PartitionSpec:
        return fs.policies.whole(P(local=local))(nn.ModuleDict({"experts": nn.Linear(5, size, bias=False)})).on(mesh)

    whole, saved = {"experts.weight": torch.arange(15.0).view(3, 5)}, of(3, None)
    state = {"params": fs.shard(whole, saved)}
    checkpoint.save(tmp_path / "a", state, saved).wait()
    checkpoint.export(tmp_path / "export", state["params"], saved)
    init, _ = fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    names = {"state": {name: {"momentum_buffer": x} for name, x in whole.items()}}
    for size in (1, 2):
        spec = of(size, {"expert": 0})
        blank: Any = init(fs.shard({"experts.weight": torch.zeros(2 * size, 5)}, spec))
        part = re.escape(f"each rank's module has [{size}, 5] of it, a piece over axis 'expert' of 2 along dimension 0")
        for call in (
            lambda: checkpoint.load(tmp_path / "a", spec),
            lambda: checkpoint.read_safetensors(tmp_path / "export", spec),
            lambda: checkpoint.from_optimizer_state_dict(names, spec, blank),
        ):
            refused(ValueError, rf"(?s)(?=.*experts\.weight)(?=.*\[{2 * size}, 5\])(?=.*\[3, 5\]).*{part}", call)
        text = rf"experts\.weight.*expected shape \[{2 * size}, 5\], got \[{size}, 5\]; it is local over {{'expert': 0}}"
        other = {"experts.weight": torch.zeros(size, 5)}
        refused(ValueError, text, lambda: checkpoint.export(tmp_path / "other", other, spec))


def by_matrix(rank: int, path: str, mesh: str, local: str, *, saves: bool) -> None:
    """The state of an optimizer by matrix, whose fallback steps the local units."""
    spec = make(mesh, local)
    chosen = fs.optim.matrices(spec, select=lambda name, param: name == "plain.w")
    init, update = fs.optim.shampoo(chosen, lr=0.1)
    params, _ = fs.partition(fs.shard(whole_params(), spec), spec)
    _, state = update({key: shard * 3 for key, shard in params.items()}, init(params), params)
    if saves:
        checkpoint.save(path, {"opt": state}, spec).wait()
    assert_same(checkpoint.load(path, spec, like={"opt": init(params)}), {"opt": state})


def test_local_units_beside_matrices(gloo4: Pool, gloo2: Pool, alone: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    gloo4.run(partial(by_matrix, saves=True), path, "expert=2,shard=2", "by_row")
    for pool, other, dims in (gloo4, "expert=4", "by_column"), (gloo2, "tensor=2", "by_row"), (alone, "shard=1", "none"):
        pool.run(partial(by_matrix, saves=False), path, other, dims)


@real_ranks(4)
def test_replicas_of_a_piece_that_differ(rank: int, tmp_path: Path) -> None:
    """An error for pieces that differ where they are replicas, and none where they are not."""
    spec = make("replicate=2,expert=2", "by_row")
    params = fs.shard(whole_params(), spec)
    params["experts"] = params["experts"] + (rank == 3)
    text = r"state 'experts.b', slice 1 of unit 'experts': expected the same .*got on rank 1 slice, .*on rank 3 slice"
    refused(ValueError, text, lambda: checkpoint.save(tmp_path / "a", params, spec))


Units = list[list[tuple[int, ...]]]
"""The shapes of the whole parameters of each unit."""


@st.composite
def local_specs(draw: st.DrawFn, units: Units) -> list[fs.PartitionSpec]:
    """A random spec on each rank of a random mesh: for each unit an axis splits it, is local or replicates."""
    sizes, model, paths = draw(st.fixed_dictionaries(dict.fromkeys("abc", st.integers(1, 3)))), nn.ModuleList(), dict[str, P]()
    for i, shapes in enumerate(units):
        axes, local, module = draw(st.permutations(sorted(sizes))), dict[str, dict[str, int]](), nn.Module()
        split = tuple(axis for axis in axes if draw(st.booleans()))
        for j, whole in enumerate(shapes):
            shape = [*whole]
            for axis in (axis for axis in axes if axis not in split):
                dim = draw(st.sampled_from([None, *(dim for dim, size in enumerate(shape) if size % sizes[axis] == 0)]))
                if dim is not None:
                    local.setdefault(axis, {})[f"*.p{j}"] = dim
                    shape[dim] //= sizes[axis]
            order = draw(st.permutations(range(len(shape))))
            x = torch.zeros([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
            module.register_parameter(f"p{j}", nn.Parameter(x))
        model.append(module)
        paths[str(i)] = P(split, local=local, align=draw(st.sampled_from([None, 1])))
    return everyone(fs.by_path(paths)(model), sizes)


WHOLE_SHAPES = st.lists(st.sampled_from([0, 1, 5, 6, 12]), max_size=3).map(tuple)


@settings(max_examples=depth(15, 300), deadline=None)
@given(st.lists(st.lists(WHOLE_SHAPES, min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_any_pieces_read_what_any_pieces_wrote(units: Units, data: st.DataObject) -> None:
    """The boxes of all ranks tile the whole parameters once, and any other pieces are read from them, bit for bit."""
    named = {f"{i}.p{j}": shape for i, shapes in enumerate(units) for j, shape in enumerate(shapes)}
    full = {name: torch.randn(shape) for name, shape in named.items()}
    specs, others = (data.draw(local_specs(units)) for _ in range(2))
    check_read_by_others(full, specs, others, data.draw(st.sampled_from([24, 400])))
