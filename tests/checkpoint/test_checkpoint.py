"""checkpoint.save and load on real ranks: every kind of state, other world sizes, meshes and policies, bit for bit."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from depth import at_most, depth, each, mark_seldom
from models import refused
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import funshard as fs
from funshard import P, checkpoint
from funshard.checkpoint import _checkpoint
from funshard.checkpoint._directory import read_manifest
from funshard.checkpoint._leaves import parse_tensors

State = dict[str, Any]


class Tied(nn.Module):
    """Tied and frozen weights, two dtypes, a channels_last weight, a number, nothing, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6)) for _ in range(2))
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.half = nn.Linear(6, 3).bfloat16()
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(3, 0))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].requires_grad_(False)


POLICIES: dict[str, Callable[[nn.Module], fs.PartitionSpec]] = {
    "whole": fs.policies.whole(),
    "by_type": fs.by_type(nn.Linear, nn.BatchNorm1d),
    "replicated": fs.by_type(nn.Linear, p=P()),
    "mixed": fs.by_path({"blocks.*": P(align=1), "conv": P("shard", offload="params")}),
}


def made(policy: str, replicas: int) -> tuple[nn.Module, fs.PartitionSpec]:
    torch.manual_seed(0)
    model = Tied()
    spec, world = POLICIES[policy](model), dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return model, spec
    sizes = (replicas, world // replicas) if replicas > 1 else (world,)
    return model, spec.on(init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]))


def trained(model: nn.Module, spec: fs.PartitionSpec) -> State:
    """A state after a step of AdamW whose gradients follow from the parameters alone, with all else that loops keep."""
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=0.1)
    params, frozen = fs.partition(fs.shard(model, spec), spec)
    grads = {key: shard * 3 for key, shard in params.items()}
    params, opt = update(grads, init(params), params)
    loss_scale = fs.loss_scale.dynamic(spec)[0]()
    return {
        "params": fs.combine(params, frozen),
        "opt": opt,
        "ema": {key: shard.clone() for key, shard in params.items()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "loss_scale": loss_scale,
        "step": 7,
        "ordered": OrderedDict(b=1, a={3: "c"}),
        "numbers": [1.5, math.inf, True, None, "text", b"\0bytes", torch.bfloat16, (2**70, {"deep": torch.arange(3)})],
        "random": checkpoint.per_rank({"torch": torch.get_rng_state(), "python": random.getstate(), "rank": -spec_rank(spec)}),
    }


def spec_rank(_: fs.PartitionSpec) -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, in the same containers."""
    a, b = (optree.tree_flatten(x, none_is_leaf=True, namespace="funshard") for x in (found, expected))
    assert a[1] == b[1]
    for path, x, y in zip(a[1].paths(), a[0], b[0], strict=True):
        if isinstance(y, Tensor):
            assert isinstance(x, Tensor), path
            assert (x.dtype, x.device) == (y.dtype, y.device), path
            assert torch.equal(x, y), path
        else:
            assert type(x) is type(y), path
            assert x == y, path


def copied(state: Any) -> Any:
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state, none_is_leaf=True)


def save_all(rank: int, path: Path, policy: str, replicas: int) -> None:
    model, spec = made(policy, replicas)
    torch.manual_seed(100 + rank)
    state = trained(model, spec)
    given = copied(state)
    assert checkpoint.save(path, state, spec).wait() == path
    assert_same({k: v for k, v in state.items() if k != "random"}, {k: v for k, v in given.items() if k != "random"})


def load_all(rank: int, path: Path, policy: str, replicas: int, *, same: bool) -> None:
    """What comes back is what this mesh and policy would have made of the same training."""
    model, spec = made(policy, replicas)
    torch.manual_seed(100 + rank)
    expected = trained(model, spec)
    own = expected.pop("random").tree
    parts = [*expected] if same else depth(["params", "ema", "numbers"], [*expected])
    found = checkpoint.load(path, spec) if same else {k: checkpoint.load(path, spec, only=k) for k in parts}
    if same:
        assert_same(found.pop("random"), own)
        like = {**expected, "random": checkpoint.per_rank(own)}
        assert_same(checkpoint.load(path, spec, like=like), expected | {"random": own})
    else:
        refused(ValueError, r"each rank's own, saved by \d ranks", lambda: checkpoint.load(path, spec))
    assert_same(found, {k: expected[k] for k in parts})
    assert_same(checkpoint.load(path, spec, like=expected), expected)
    assert_same(checkpoint.load(path, spec, only="numbers.7.1.deep"), torch.arange(3))
    for key, shard in found["params"].items():
        assert shard.shape == (spec.shard_numel(spec.by_key[key]),)


@at_most(1)
@each(policy=mark_seldom(POLICIES, "by_type", "mixed"), to=["by_type", "mixed"], replicas=[1, 2])
def test_four_ranks_to_fewer(
    gloo4: Pool, gloo2: Pool, alone: Pool, tmp_path: Path, policy: str, to: str, replicas: int
) -> None:
    """Parameters, slots, averages, scalars, buffers and plain values; HSDP to FSDP; per_rank on as many ranks alone."""
    gloo4.run(save_all, tmp_path / "saved", policy, replicas)
    gloo4.run(_load_same, tmp_path / "saved", to, 1)
    gloo2.run(_load_other, tmp_path / "saved", to)
    alone.run(_load_other, tmp_path / "saved", to)
    _load_other(0, tmp_path / "saved", to)


def _load_same(rank: int, path: Path, policy: str, replicas: int) -> None:
    load_all(rank, path, policy, replicas, same=True)


def _load_other(rank: int, path: Path, policy: str) -> None:
    load_all(rank, path, policy, 1, same=False)


@real_ranks(4)
def test_replicas_write_each_byte_once(rank: int, tmp_path: Path) -> None:
    """Four replicas: as many files, none much larger than another, together the parameters once; three ranks read them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    spec = fs.by_type(nn.Linear, p=P())(model).on(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    path = checkpoint.save(tmp_path / "saved", fs.shard(model, spec), spec).wait()
    three: Any = dist.new_group([0, 1, 3])
    if rank != 2:
        some = fs.policies.whole()(model).on(DeviceMesh.from_group(three, "cpu", mesh_dim_names=("shard",)), submesh=True)
        assert_same(checkpoint.load(path, some), fs.shard(model, some))
    sizes = {file.name: file.stat().st_size for file in sorted((tmp_path / "saved").iterdir())}
    assert [name[:6] for name in sizes] == [".metad", *(f"__{rank}_0_" for rank in range(4)), "funsha"]
    sizes, parameters = [*sizes.values()][1:-1], 4 * 4 * (512 * 512 + 512)
    assert parameters <= sum(sizes) <= parameters * 1.02
    assert max(sizes) <= 1.1 * min(sizes)


def test_plain_values_in_the_state_of_units(tmp_path: Path) -> None:
    """They are stored for each parameter, so that other units have them; of those in one unit they must be alike."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    fine, coarse = fs.by_type(nn.Linear)(model), fs.policies.whole()(model)

    def state(spec: fs.PartitionSpec, count: Callable[[int], Any]) -> State:
        return {key: {"m": x, "n": (count(i), "x")} for i, (key, x) in enumerate(fs.shard(model, spec).items())}

    def like(spec: fs.PartitionSpec) -> State:
        return state(spec, lambda i: 0)

    checkpoint.save(tmp_path / "1", {"opt": state(fine, lambda i: math.nan)}, fine)
    for spec in (fine, coarse):
        for found in (checkpoint.load(tmp_path / "1", spec), checkpoint.load(tmp_path / "1", spec, like={"opt": like(spec)})):
            assert_same({k: v["m"] for k, v in found["opt"].items()}, fs.shard(model, spec))
            assert all(math.isnan(v["n"][0]) and v["n"][1] == "x" for v in found["opt"].values())
    checkpoint.save(tmp_path / "2", {"opt": state(fine, lambda i: i)}, fine)
    assert_same(checkpoint.load(tmp_path / "2", fine, like={"opt": like(fine)})["opt"], state(fine, lambda i: i))
    with pytest.raises(ValueError, match=r"expected the same for 'opt\.0\.\w+\.n\.0' and 'opt\.1\.\w+\.n\.0',.* got 0 and 1"):
        checkpoint.load(tmp_path / "2", coarse, like={"opt": like(coarse)})
    with pytest.raises(ValueError, match=r"state 'opt\.': expected the same for '0\.\w+' and '1\.\w+', which are in one unit"):
        checkpoint.load(tmp_path / "2", coarse)


def test_a_number_that_is_nan_comes_back(tmp_path: Path) -> None:
    """Of a run that has diverged: NaN is no difference between the parameters of a unit."""
    model = nn.Linear(2, 3)
    spec = fs.policies.whole()(model)
    state = {"": {"m": fs.shard(model, spec)[""], "t": torch.tensor(math.nan), "n": math.nan}}
    checkpoint.save(tmp_path / "1", {"opt": state}, spec)
    for found in (checkpoint.load(tmp_path / "1", spec), checkpoint.load(tmp_path / "1", spec, like={"opt": state})):
        assert found["opt"][""]["t"].isnan()
        assert math.isnan(found["opt"][""]["n"])


@pytest.mark.parametrize("state", [None, 3, "x", {"": 3}, {"": {"": "x"}}], ids=repr)
def test_plain_values_without_a_name(tmp_path: Path, state: Any) -> None:
    """The whole state, or at empty keys."""
    spec = fs.by_type(nn.Linear)(nn.Sequential(nn.Linear(2, 3)))
    checkpoint.save(tmp_path / "1", state, spec)
    assert checkpoint.load(tmp_path / "1", spec) == state


def test_a_state_without_tensors_loads_under_another_policy(tmp_path: Path) -> None:
    """Plain SGD has nothing for a unit: its state has the keys of the new policy's units all the same."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    fine, coarse = fs.by_type(nn.Linear)(model), fs.policies.whole()(model)
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
    for one, other in ((fine, coarse), (coarse, fine)):
        path = tmp_path / f"{len(one)}"
        state = {"params": fs.shard(model, one), "opt": init(fs.shard(model, one)), "plain": {"x": {}}}
        checkpoint.save(path, state, one)
        found = checkpoint.load(path, other)
        assert found["opt"] == init(fs.shard(model, other)) == checkpoint.load(path, other, like=found)["opt"]
        assert found["plain"] == {"x": {}}
        update(found["params"], found["opt"], found["params"])
        assert_same(checkpoint.load(path, one), state)


def test_any_plain_key_beside_units(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    spec = fs.policies.whole()(model)
    more = {"step": 3, 5: "five", b"q": 7, None: (1, 2), torch.float32: True, 0.5: 0}
    checkpoint.save(tmp_path / "1", fs.shard(model, spec) | more, spec)  # pyright: ignore[reportOperatorIssue]
    found = checkpoint.load(tmp_path / "1", spec)
    assert_same({"": found.pop("")}, fs.shard(model, spec))
    assert found == more
    assert checkpoint.load(tmp_path / "1", spec, only="5", like="") == "five"


class Own(NamedTuple):
    """A container of the caller's own."""

    params: fs.Params
    steps: int


def test_containers_of_the_callers_own_need_like(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    spec = fs.policies.whole()(model)
    state = Own(fs.shard(model, spec), 5)
    checkpoint.save(tmp_path / "a", state, spec)
    refused(ValueError, r"container of the caller's own, .*: expected like=", lambda: checkpoint.load(tmp_path / "a", spec))
    assert_same(checkpoint.load(tmp_path / "a", spec, like=Own(fs.shard(model, spec), 0)), state)
    assert_same(checkpoint.load(tmp_path / "a", spec, only="params"), state.params)
    meta = {key: shard.to("meta") for key, shard in state.params.items()}
    assert_same(checkpoint.load(tmp_path / "a", spec, like=Own(meta, 0)), state)
    library = {"seen": defaultdict(list, b=[1]), "recent": deque([1.5, torch.ones(2), deque()], maxlen=4)}
    checkpoint.save(tmp_path / "b", library, spec)
    assert_same(checkpoint.load(tmp_path / "b", spec, like=library), library)


def _compressed(rank: int, path: Path) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(16, 16)
    spec = fs.policies.whole(P())(model).on(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    compressor = fs.compress.powersgd(rank=1)
    params = fs.unshard(fs.shard(model, spec, src=0), spec)
    state = compressor.init(spec)
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    _, state = compressor.reduce(grads, state, spec)
    assert any(error.any() for error in state.error.values())
    checkpoint.save(path, {"compress": state}, spec)
    found = checkpoint.load(path, spec)["compress"]
    assert type(found) is type(state)
    assert_same(found, state)


def test_feedback_of_compression(gloo2: Pool, tmp_path: Path) -> None:
    """PowerSGD's: each rank's own comes back on as many ranks; on another number of them it begins anew."""
    gloo2.run(_compressed, tmp_path / "a")
    spec = fs.policies.whole(P())(nn.Linear(16, 16)).on({"shard": 1})
    assert (manifest := read_manifest(tmp_path / "a")) is not None
    assert parse_tensors(tmp_path / "a", manifest)["compress.error.weight"].shape == (2, 16, 16)
    with pytest.raises(
        ValueError, match=r"'compress.error.weight' is each rank's own, saved by 2 ranks: expected as many, got 1"
    ):
        checkpoint.load(tmp_path / "a", spec)
    state = fs.compress.powersgd(rank=1).init(spec)
    found = state._replace(**{name: checkpoint.load(tmp_path / "a", spec, only=f"compress.{name}") for name in ("step", "q")})
    assert found.step == 1
    assert {name: x.shape for name, x in found.q.items()} == {name: x.shape for name, x in state.q.items()}
    assert not any(error.any() for error in found.error.values())


# --- Asynchronous. ---


@real_ranks(2)
def test_what_changes_meanwhile_is_not_saved(rank: int, tmp_path: Path) -> None:
    """In-place, donated updates go on while a thread writes: the file has what was there at the call."""
    model, spec = made("whole", 1)
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=0.1, donate=True, fused=True)
    params, _ = fs.partition(fs.shard(model, spec), spec)
    params, opt = update({key: shard * 3 for key, shard in params.items()}, init(params), params)
    for step in range(3):  # the second and third reuse the memory of those before
        expected = copied({"params": params, "opt": opt})
        saving = checkpoint.save(tmp_path / f"{step}", {"params": params, "opt": opt}, spec, asynchronous=True)
        for _ in range(3):
            params, opt = update({key: shard * 3 for key, shard in params.items()}, opt, params)
        for shard in params.values():
            shard.data.neg_()
        assert saving.wait() == tmp_path / f"{step}"
        assert saving.done()
        assert_same(checkpoint.load(saving.path, spec), expected)


def _slowly(monkeypatch: pytest.MonkeyPatch, fail: bool = False) -> None:
    def write(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
            if fail:
                raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    real = _checkpoint.write_boxes
    monkeypatch.setattr(_checkpoint, "write_boxes", write)


def test_a_second_save_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = made("whole", 1)
    params = fs.shard(model, spec)
    _slowly(monkeypatch)
    first = checkpoint.save(tmp_path / "1", params, spec, asynchronous=True)
    assert not first.done()
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path / "2", params, spec)
    assert first.done()
    assert checkpoint.latest(tmp_path) == tmp_path / "2"
    assert (tmp_path / "1").is_dir()


def test_staged_states_of_any_size(tmp_path: Path) -> None:
    """In the memory of the one before, where that is enough."""
    _, spec = made("whole", 1)
    for i, numel in enumerate([8, 12, 4, 5000, 5001]):
        state = {"x": torch.arange(numel), "y": torch.ones(3)}
        assert_same(checkpoint.load(checkpoint.save(tmp_path / f"{i}", state, spec, asynchronous=True).wait(), spec), state)


def test_errors_come_up_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = made("whole", 1)
    params = fs.shard(model, spec)
    _slowly(monkeypatch, fail=True)
    saving = checkpoint.save(tmp_path / "1", params, spec, asynchronous=True)
    refused(OSError, "No space left", lambda: checkpoint.save(tmp_path / "2", params, spec))
    refused(OSError, "No space left", lambda: saving.wait())
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "2", params, spec)  # once told, it is over


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    """Dtypes, views, lazily conjugated and negated ones, parameters, empty ones; what files cannot hold is refused."""
    _, spec = made("whole", 1)
    z = torch.randn(3, 2, dtype=torch.complex64)
    state = {
        **{str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in (torch.bool, torch.uint8, torch.int16, torch.float16)},
        **{str(dtype): torch.randn(2, 3).to(dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float64)},
        "view": torch.arange(12).view(3, 4)[1:, ::2],
        "transposed": torch.arange(12).view(3, 4).t(),
        "conj": z.conj(),
        "neg": z.conj().imag,
        "parameter": nn.Parameter(torch.ones(3)),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "after 8 bytes": torch.randn(2, dtype=torch.complex128),
    }
    for asynchronous in (False, True):
        path = checkpoint.save(tmp_path / f"{asynchronous}", state, spec, asynchronous=asynchronous).wait()
        with torch.device("meta"):  # as where the model was made
            found = checkpoint.load(path, spec)
        assert_same(found, state | {"parameter": torch.ones(3)})
    for wrong in (torch.eye(3).to_sparse(), torch.ones(3, device="meta"), torch.empty(3, dtype=torch.uint1)):
        with pytest.raises((TypeError, ValueError), match=r"state 'a\.0': expected a (plain, dense )?tensor"):
            checkpoint.save(tmp_path / "2", {"a": [wrong]}, spec)
    assert not (tmp_path / "2").exists()


def test_slices_of_every_dtype(tmp_path: Path) -> None:
    """Of float4 too, two of which are in a byte, and which torch does not fill with zeros."""
    dtypes = [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64]
    model = nn.ParameterDict(
        {
            f"{i} {name}": nn.Parameter(values.view(dtype), requires_grad=False)
            for i, dtype in enumerate(dtypes)
            for name, values in {"a": torch.ones(24, dtype=torch.uint8), "b": torch.zeros(40, dtype=torch.uint8)}.items()
        }
    )
    spec, other = fs.policies.whole()(model), fs.policies.always(P("shard", align=3))(model)
    checkpoint.save(tmp_path / "1", {"params": fs.shard(model, spec)}, spec)
    for to in (spec, other):
        found, expected = checkpoint.load(tmp_path / "1", to, only="params"), fs.shard(model, to)
        assert found.keys() == expected.keys()
        for key, shard in found.items():
            assert shard.dtype == expected[key].dtype
            assert shard.view(torch.uint8).equal(expected[key].view(torch.uint8)), shard.dtype


def test_a_parameter_that_has_another_first_name_now(tmp_path: Path) -> None:
    """Tied to a layer that the model did not have when it was saved, and that comes before."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    spec = fs.by_type(nn.Linear)(model)
    checkpoint.save(tmp_path / "1", {"params": fs.shard(model, spec)}, spec)
    more = nn.ModuleDict({"a": nn.Linear(3, 3), "0": model[0], "1": model[1]})
    more["a"].weight, more["a"].bias = model[0].weight, model[0].bias
    found = checkpoint.load(tmp_path / "1", other := fs.policies.whole()(more), only="params")
    assert_same(found, fs.shard(more, other))
