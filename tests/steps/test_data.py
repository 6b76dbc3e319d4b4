"""fs.data.sampler: global batches that do not depend on the number of ranks, and runs that go on in the middle."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from depth import every, seldom
from models import refused
from ranks import real_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import funshard as fs
from funshard import P
from funshard.data._sampler import BatchSampler

SPEC = fs.policies.whole()(nn.Linear(3, 2))
SIZES = (1, 2, 3, 4, 8)


def parts(size: int, ranks: int, **options: Any) -> list[BatchSampler]:
    return [fs.data.sampler(size, SPEC.on({"shard": ranks}), rank=rank, **options) for rank in range(ranks)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


@every(last=["drop", "pad", "short"], shuffle=[False, True])
def test_the_parts_of_all_ranks_are_the_batch_of_one(last: str, shuffle: bool) -> None:
    """In rank order, for every step of three epochs; the counts of real samples add up to the samples."""
    options = {"batch": 24, "seed": 3, "shuffle": shuffle, "last": last}
    (alone,) = parts(97 - 5 * (last == "short"), 1, **options)  # 20 left for "short", which has no empty part
    for ranks in SIZES:
        samplers = parts(alone.size, ranks, **options)
        for step in range(3 * alone.steps_per_epoch):
            assert flat(one[step] for one in samplers) == alone[step]
            assert sum(one.count(step) for one in samplers) == alone.count(step)
            assert last == "short" or {len(one[step]) for one in samplers} == {24 // ranks}
            if last == "short":
                assert [len(one[step]) for one in samplers] == [one.count(step) for one in samplers]
                assert max(lengths := [len(one[step]) for one in samplers]) - min(lengths) <= 1
    seen = [i for step in range(alone.steps_per_epoch) for i in alone[step][: alone.count(step)]]
    assert len(seen) == len({*seen}) == (96 if last == "drop" else alone.size)


def test_every_epoch_has_the_order_of_torchs_sampler() -> None:
    """Its own for each epoch and seed, the same in each process; unshuffled the data's."""
    for seed in (0, 7):
        theirs = DistributedSampler(range(20), num_replicas=1, rank=0, seed=seed)  # pyright: ignore[reportArgumentType]
        (ours,) = parts(20, 1, batch=5, seed=seed, epochs=3)
        got = list(ours)
        for epoch in range(3):
            theirs.set_epoch(epoch)
            assert flat(got[4 * epoch : 4 * epoch + 4]) == list(theirs) != list(range(20))
    (plain,) = parts(20, 1, batch=5, shuffle=False)
    assert flat(plain) == list(range(20))


def test_each_iteration_goes_on_with_the_next_epoch() -> None:
    """So that an outer loop over epochs needs no set_epoch; one that was left begins again."""
    (one,), (all_of_them,) = parts(20, 1, batch=5), parts(20, 1, batch=5, epochs=3)
    assert len(one) == 4
    assert len(all_of_them) == 12
    next(iter(one))
    assert [batch for _ in range(3) for batch in one] == list(all_of_them)
    (counted,) = parts(20, 1, batch=5)  # a loop that counts its steps, and does not ask for one after the last
    for epoch in range(3):
        assert [batch for _, batch in zip(range(4), counted, strict=False)] == [one[4 * epoch + i] for i in range(4)]
    (endless,) = parts(20, 1, batch=5, epochs=None)
    assert [batch for batch, _ in zip(endless, range(12), strict=False)] == [one[step] for step in range(12)]
    refused(TypeError, "epochs=None has no length", lambda: len(endless))


def test_resumed_at_any_step_on_any_number_of_ranks() -> None:
    """The batches of the rest of the epoch, and those of the next one, are the uninterrupted run's."""
    (alone,) = parts(40, 1, batch=8, seed=2, epochs=2)
    expected = list(alone)
    for step in range(11):
        state = parts(40, 2, batch=8, seed=2)[0].state_dict(step)
        samplers = parts(40, 4, batch=8, seed=2, epochs=None)
        for one in samplers:
            one.load_state_dict(state)
        steps = zip(*(itertools.islice(one, 10 - step) for one in samplers), strict=True)
        assert [flat(step_parts) for step_parts in steps] == expected[step:]
    (one,) = parts(40, 1, batch=8, seed=2)
    one.load_state_dict(one.state_dict(3))
    assert len(one) == 2
    assert list(one) == expected[3:5]
    assert list(one) == expected[5:]


def test_a_state_of_other_batches_is_refused() -> None:
    (one,) = parts(40, 1, batch=8)
    for options in ({"batch": 4}, {"seed": 1, "batch": 8}, {"shuffle": False, "batch": 8}, {"last": "pad", "batch": 8}):
        (other,) = parts(40, 1, **options)
        with pytest.raises(ValueError, match=r"data.sampler: \w+: expected .*, as in the state, got"):
            one.load_state_dict(other.state_dict(2))
    with pytest.raises(ValueError, match="size: expected 41, as in the state, got 40"):
        one.load_state_dict(parts(41, 1, batch=8)[0].state_dict(2))
    refused(ValueError, "expected what state_dict returned, got no 'size'", lambda: one.load_state_dict({"step": 2}))
    refused(ValueError, "step: expected a whole number from 0 on, got -1", lambda: one.state_dict(-1))
    assert one.start == 0


def test_axes_along_which_ranks_share_samples() -> None:
    """HSDP: all ranks differ. Along an axis that is not named, ranks have the same samples; a local axis must be decided."""
    mesh = {"replicate": 2, "shard": 3}
    spec = SPEC.on(mesh)
    every = [fs.data.sampler(24, spec, batch=12, shuffle=False, rank=rank) for rank in range(6)]
    assert [one[0] for one in every] == [[2 * rank, 2 * rank + 1] for rank in range(6)]
    shared = [fs.data.sampler(24, spec, batch=12, shuffle=False, rank=rank, axes=["replicate"]) for rank in range(6)]
    assert [one[0] for one in shared] == [list(range(6))] * 3 + [list(range(6, 12))] * 3
    local = fs.policies.whole(P("shard", local={"expert": 0}))(nn.Linear(3, 2)).on({"expert": 2, "shard": 2})
    with pytest.raises(ValueError, match=r"unit '' is local over axis 'expert'.*expected axes="):
        fs.data.sampler(24, local, batch=12, rank=0)
    assert fs.data.sampler(24, local, batch=12, rank=3, axes=["shard"], shuffle=False)[0] == list(range(6, 12))
    refused(ValueError, "unknown mesh axis 'data'", lambda: fs.data.sampler(24, spec, batch=12, rank=0, axes=["data"]))


def test_what_does_not_fit_is_refused() -> None:
    on = SPEC.on({"shard": 4})
    for match, options in {
        "multiple of the 4 ranks": {"batch": 6},
        "at most the 10 samples": {"batch": 12},
        "2 samples for 4 ranks": {"batch": 8, "last": "short"},
        "last: expected one of": {"batch": 4, "last": "keep"},
        "epochs: expected at least 1": {"batch": 4, "epochs": 0},
        "data: expected one sample at least, got 0": {"data": 0, "batch": 4, "last": "pad"},
        "does not know its rank": {"batch": 4, "rank": None},
    }.items():
        refused(ValueError, match, lambda: fs.data.sampler(**{"data": 10, "spec": on, "rank": 0, **options}))
    for name, value in (("batch", 4.0), ("batch", "4"), ("seed", 1.5), ("epochs", "2")):
        with pytest.raises(TypeError, match=f"{name}: expected a whole number, got {value!r}"):
            fs.data.sampler(**{"data": 10, "spec": on, "rank": 0, "batch": 4, name: value})
    with pytest.raises(TypeError, match="a data set with a length"):
        fs.data.sampler(iter(range(3)), on, batch=4, rank=0)  # pyright: ignore[reportArgumentType]
    refused(IndexError, "at least 0", lambda: fs.data.sampler(10, on, batch=4, rank=0)[-1])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=seldom)])
def test_in_a_data_loader(workers: int) -> None:
    """As its batch_sampler, over epochs, with workers that draw ahead and stay; the state is that of the loop."""
    data = TensorDataset(torch.arange(40.0))
    (expected,) = parts(40, 1, batch=8, epochs=3)
    indices = [torch.tensor(batch).float() for batch in expected]

    def loader() -> tuple[BatchSampler, DataLoader[Any]]:
        (batches,) = parts(40, 1, batch=8)
        return batches, DataLoader(data, batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0)

    _, whole = loader()
    assert len(whole) == 5
    got = [x for _ in range(3) for (x,) in whole]
    assert all(map(torch.equal, got, indices))
    assert len(got) == 15
    batches, first = loader()
    taken = [x for (x,), _ in zip(first, range(2), strict=False)]
    state = batches.state_dict(len(taken))
    batches, rest = loader()
    batches.load_state_dict(state)
    taken += [x for _ in range(2) for (x,) in rest]
    assert len(taken) == 10
    assert all(map(torch.equal, taken, indices))


@real_ranks(2)
def test_on_real_ranks(rank: int, tmp_path: Path) -> None:
    """Each its part; a checkpoint holds the state; ranks with other options all raise, also where one's do not fit."""
    spec = SPEC.bound
    batches = fs.data.sampler(24, spec, batch=8, seed=4)
    fs.checkpoint.save(tmp_path / "state", {"data": batches.state_dict(2)}, spec)
    loaded = fs.checkpoint.load(tmp_path / "state", spec)
    again = fs.data.sampler(24, spec, batch=8, seed=4)
    again.load_state_dict(loaded["data"])
    refused(ValueError, r"seed': 4.*seed': 5|seed': 5.*seed': 4", lambda: fs.data.sampler(24, spec, batch=8, seed=4 + rank))
    refused(ValueError, "multiple of the 2 ranks", lambda: fs.data.sampler(24, spec, batch=8 + rank, seed=4))
    assert fs.data.sampler(24, spec, batch=8, seed=4, axes=iter(["shard"]))[0] == batches[0]
    of_all: list[Any] = [None] * 2
    dist.all_gather_object(of_all, [*batches])
    (alone,) = parts(24, 1, batch=8, seed=4)
    assert [a + b for a, b in zip(*of_all, strict=True)] == list(alone)
    assert [*again] == of_all[rank][2:]
