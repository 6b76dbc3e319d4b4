"""Precision as data, its rules against torch's own, and what it casts: trees of inputs and outputs, and buffers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from depth import every
from hypothesis import given
from hypothesis import strategies as st
from models import module_class, refused, unchanged
from parity import WAYS
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import funshard as fs
from funshard import P, Precision
from funshard._call.casting import cast_floats, wrap_in_casts
from funshard._core.flow import Reduction, choose_division, divide_factors

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = st.sampled_from([F16, BF16, F32, F64])
MAYBE = st.none() | FLOATS


# --- trees ---
FIELDS = ["first", "second"]
Pair = namedtuple("Pair", FIELDS)
Data, Frozen = dataclasses.make_dataclass("Data", FIELDS), dataclasses.make_dataclass("Frozen", FIELDS, frozen=True)


def test_cast_floats_is_that_of_fsdp1() -> None:
    """``_apply_to_tensors`` with ``_cast_fp_tensor``: types, order and all that is no float tensor stay, and what is given."""
    floats = [torch.arange(-2, 4).to(dtype) * 1.37 for dtype in (F16, BF16, F32, F64)]
    others = torch.arange(3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)
    tree = [OrderedDict(b=Pair(floats[0], others[0]), a=(floats[1], None, "text")), Data(floats[2], {"in": [others[1], 3.5]})]
    tree += [Frozen(floats[3], others[2]), Pair]
    assert cast_floats(tree, None) is tree
    before = repr(tree)
    for dtype in (F16, BF16, F32, F64):
        got = cast_floats(tree, dtype)
        assert repr(got) == repr(_apply_to_tensors(lambda x, to=dtype: x.to(to) if x.is_floating_point() else x, tree))
        assert repr(tree) == before
        assert got[0]["b"].second is others[0]
        assert cast_floats(got, dtype)[0]["b"].first is got[0]["b"].first  # nothing is left to cast


def test_cast_floats_of_other_containers() -> None:
    @dataclasses.dataclass(frozen=True)
    class Lazy:
        x: Tensor
        y: Tensor = dataclasses.field(init=False)

    x = torch.ones(2)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    got = cast_floats(packed, BF16)
    assert type(got) is PackedSequence
    assert (got.data.dtype, packed.data.dtype, got.batch_sizes.dtype) == (BF16, F32, torch.int64)
    assert cast_floats(pack_sequence([torch.ones(3, dtype=torch.int64)]), BF16).data.dtype == torch.int64
    made = cast_floats(defaultdict(list, a=x), F16)
    assert (type(made), made.default_factory, made["a"].dtype) == (defaultdict, list, F16)
    lazy = cast_floats(Lazy(x), BF16)  # a field that is not set yet stays so
    assert (lazy.x.dtype, hasattr(lazy, "y")) == (BF16, False)
    assert cast_floats(Lazy, BF16) is Lazy


@pytest.mark.parametrize("make", [UserDict, lambda d: SimpleNamespace(**d)])
def test_boxes_that_no_pytree_opens(make: Any) -> None:
    """Inputs and outputs in UserDict, as transformers' BatchEncoding is, and SimpleNamespace: cast, in copies."""
    ids = torch.arange(2)
    box = make({"x": torch.ones(2), "in": [SimpleNamespace(x=torch.ones(2))], "ids": ids})
    got = cast_floats(box, BF16)
    was, now = (vars(b) if isinstance(b, SimpleNamespace) else b.data for b in (box, got))
    assert (type(got), [*now], now["ids"]) == (type(box), ["x", "in", "ids"], ids)
    assert (now["x"].dtype, now["in"][0].x.dtype, was["x"].dtype, was["in"][0].x.dtype) == (BF16, BF16, F32, F32)
    model = nn.Sequential(nn.Linear(2, 2))
    model.forward = lambda box: make({"x": model[0](box["x"] if hasattr(box, "keys") else box.x)})  # type: ignore[method-assign]
    spec = fs.policies.whole(P("shard", precision=Precision(param=BF16, output=F32)))(model)
    out = fs.functional_call(model, fs.shard(model, spec), (box,), spec=spec)
    assert (type(out), (out.x if isinstance(out, SimpleNamespace) else out["x"]).dtype) == (type(box), F32)


# --- around a module ---


BOXES: list[Any] = [lambda x: x, lambda x: {"i": torch.ones(2, dtype=torch.int64), "x": x}, lambda x: pack_sequence([x])]


@every(wrap=BOXES, given=[F16, F32, F64, torch.int64])
def test_outputs_are_restored(wrap: Any, given: torch.dtype) -> None:
    """To the dtype of the first floating point input; without one they stay."""
    run = wrap_in_casts(lambda a: torch.ones(2, dtype=BF16), P(precision=Precision(param=BF16, restore_outputs=True)), "")
    assert run(wrap(torch.ones(2, dtype=given))).dtype == (given if given.is_floating_point else BF16)


# --- buffers ---


def count(self: Any, x: Tensor) -> Tensor:
    self.seen.extend((self.running.dtype, self.table.dtype, self.count.dtype, self.mask.dtype))
    with torch.no_grad():
        self.running[1] += 1
        self.count += 1
    return (self.weight * x * self.table.to(x.dtype) * self.mask).sum()


Counting = module_class(
    "Counting",
    lambda: {
        "weight": nn.Parameter(torch.ones(3) / 3),
        "running": nn.Buffer(torch.ones(3) / 3),
        "table": nn.Buffer(torch.arange(3) / 7),
        "count": nn.Buffer(torch.tensor(2**40 + 1)),
        "seen": [],
        "mask": nn.Buffer(torch.tensor([True, False, True])),
    },
    count,
)
"""A linear layer between buffers: one that changes in a place, one that is read, one that counts, one of booleans."""


@every(remat=[False, True], way=["fs", "backward"], buffer=[None, BF16, F16, F64])
def test_buffers_keep_their_dtypes(buffer: torch.dtype | None, way: str, remat: bool) -> None:
    """Inside they are cast, integers never; outside they are what they were, bit by bit where forward left them alone."""
    model = Counting()
    spec = fs.policies.whole(P("shard", align=1, remat=remat, precision=Precision(buffer=buffer)))(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    before = {name: b.clone() for name, b in model.named_buffers()}
    x = torch.arange(3.0)
    with unchanged(model):
        grads, _ = WAYS[way](lambda p: fs.functional_call(model, p, (x,), spec=spec, buffers=buffers))(fs.shard(model, spec))
    assert set(zip(*[iter(model.seen)] * 4, strict=True)) == {(buffer or F32, buffer or F32, torch.int64, torch.bool)}
    table = before["table"].to(buffer or F32).float()
    torch.testing.assert_close(grads[""], x * table * before["mask"], rtol=1e-6, atol=0)
    assert {name: b.dtype for name, b in buffers.items()} == {name: b.dtype for name, b in before.items()}
    assert torch.equal(buffers["table"], before["table"])
    assert torch.equal(buffers["mask"], before["mask"])
    assert buffers["count"] == 2**40 + 2
    running = before["running"].clone()
    running[1] = (running[1].to(buffer or F32) + 1).to(F32)
    assert torch.equal(buffers["running"], running)


def test_buffers_of_a_unit_of_its_own() -> None:
    """Each module's are cast as the nearest unit around it says."""
    model = nn.Sequential(Counting(), nn.Sequential(Counting()), nn.ModuleDict({"c": Counting()}))
    model.forward = lambda x: model[0](x) + model[1](x) + model[2]["c"](x)
    policy = fs.policies.override(
        fs.policies.whole(P(precision=Precision(buffer=BF16))),
        fs.by_path({"1": P(precision=Precision(buffer=F16)), "2.c": P(precision=Precision(param=F64))}),
    )
    spec = policy(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    fs.functional_call(model, fs.shard(model, spec), (torch.ones(3),), spec=spec, buffers=buffers)
    assert [m.seen[0] for m in (model[0], model[1][0], model[2]["c"])] == [BF16, F16, F32]
    assert {b.dtype for name, b in buffers.items() if "running" in name} == {F32}


def set_buffers(self: Any, x: Tensor) -> Tensor:
    """Puts tensors of other dtypes and shapes into its buffers."""
    self.whole = self.whole + 0.5
    self.cache = torch.cat([self.cache, x.to(self.cache.dtype)])
    return self.weight.sum()


@pytest.mark.parametrize("precision", [None, Precision(), Precision(param=BF16), Precision(buffer=BF16)], ids=str)
def test_buffers_that_are_not_cast_are_what_forward_left(precision: Precision | None) -> None:
    """One that grows comes back in its dtype if it was cast; integers become what forward sets."""
    parts = {"whole": nn.Buffer(torch.zeros(2, dtype=torch.int64)), "cache": nn.Buffer(torch.zeros(2))}
    model = module_class("Setting", lambda: parts | {"weight": nn.Parameter(torch.ones(2))}, set_buffers)()
    spec = fs.policies.whole(P(precision=precision))(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    fs.functional_call(model, fs.shard(model, spec), (torch.full((1,), 1 / 3, dtype=F64),), spec=spec, buffers=buffers)
    assert buffers["whole"].tolist() == [0.5, 0.5]
    assert (buffers["cache"].dtype, buffers["cache"].shape) == (F32, (3,))
    given = torch.full((), 1 / 3, dtype=F64).to((precision and precision.param) or F64)
    assert buffers["cache"][2] == given.to((precision and precision.buffer) or F32)


def test_what_a_module_writes_to_a_list_that_it_was_given() -> None:
    """It is the caller's where nothing is cast, or an error."""
    for dtype, words in ((BF16, ""), (F32, r"module 'a' writes to a list, dict or dataclass that it was given")):
        given = [torch.ones(2, dtype=dtype)]
        run = wrap_in_casts(lambda x: x.append(x[0] + 1), P(precision=Precision(param=BF16)), "a")
        refused(RuntimeError, words, lambda run=run, given=given: run(given)) if words else run(given)
        assert len(given) == (1 if words else 2)


# --- Precision as data ---
@every(name=["param", "reduce", "output", "buffer"], dtype=[torch.int64, torch.bool, torch.complex64, "float16", float, 16])
def test_what_is_no_floating_dtype(name: str, dtype: Any) -> None:
    both = r"expected output or restore_outputs, got both: output=torch\.bfloat16"
    refused(ValueError, both, lambda: Precision(output=BF16, restore_outputs=True))
    refused(TypeError, rf"^Precision: {name}: expected a floating point dtype or None, got", lambda: Precision(**{name: dtype}))


def test_precision_is_a_value() -> None:
    """Equal, hashed, copied, pickled and printed by its fields, which nobody sets."""
    a, b = Precision(param=BF16, reduce=F32, cast_inputs=False), Precision(param=BF16, buffer=F16, restore_outputs=True)
    assert a == dataclasses.replace(a) == copy.deepcopy(a) == pickle.loads(pickle.dumps(a)) != b
    assert (hash(a), P(precision=a)) == (hash(dataclasses.replace(a)), P(precision=dataclasses.replace(a)))
    assert [eval(repr(one), {"Precision": Precision, "torch": torch}) for one in (a, b)] == [a, b]
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.param = F32


@given(MAYBE, MAYBE, FLOATS)
def test_resolve_is_fsdp1s(param: torch.dtype | None, reduce: torch.dtype | None, original: torch.dtype) -> None:
    handle = SimpleNamespace(_orig_param_dtype=original)
    FlatParamHandle._init_param_reduce_dtypes(handle, param, reduce)
    assert Precision(param=param, reduce=reduce)._resolve(original) == (handle._fwd_bwd_param_dtype, handle._reduce_dtype)


# --- division ---
def test_divide_factors_are_fsdp1s() -> None:
    for n in range(1, 4097):
        before = DefaultState._get_gradient_predivide_factor(n)
        assert divide_factors(n) == (before, n / before)


@given(st.integers(1, 64), st.integers(1, 8), FLOATS, st.none() | st.sampled_from([1.0, 3.0, 8.0, 12.5]))
def test_division_is_fsdp2s(shards: int, replicas: int, dtype: torch.dtype, factor: float | None) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    if factor is not None and dtype in (F32, BF16):
        return  # torch multiplies in the collective: see below
    groups: Any = SimpleNamespace(size=lambda: shards), SimpleNamespace(size=lambda: replicas)
    before, after, scatter, _ = _get_gradient_divide_factors(*groups, dtype, "cpu", factor)
    op, *factors = choose_division("mean" if factor is None else factor, shards * replicas, dtype)
    if dtype == F16:
        assert (op, *factors) == ("sum", before, after)
        assert scatter == ReduceOp.SUM
    elif dtype == F64:  # torch divides in two parts what needs none: by as much in all
        total = before * after
        assert (op, *factors) == ("mean", 1, 1) if factor is None else (op, *factors) == ("sum", 1, total)
        assert total == (factor or shards * replicas)
    else:
        assert (op, *factors, before, after) == ("mean", 1, 1, None, None)
        assert scatter == (ReduceOp.AVG if shards * replicas > 1 else ReduceOp.SUM)


@pytest.mark.parametrize("by", ["avg", 0, -1.0, float("inf"), float("nan"), True])
def test_reductions_that_are_none(by: Any) -> None:
    with pytest.raises(ValueError, match=r"^reduce: expected 'mean', 'sum' or a positive number to divide the sum by, got"):
        Reduction.make(by)
