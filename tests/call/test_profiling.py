"""The ranges that a trace of torch.profiler shows and the lines of the log: every phase of a step under its unit's name."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_log import world
from depth import seldom
from models import module_class, refused
from parity import loss_of, mean_square
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import funshard as fs
from funshard import P, checkpoint
from funshard._torch.tracing import phase

Block = module_class(
    "Block", lambda: {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}, lambda self, x: x + self.down(self.up(x).relu())
)


def make(p: P, policy: fs.Policy | None = None, **mesh: int) -> tuple[fs.PartitionSpec, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    spec = (policy or fs.by_type(Block, p=p))(model)
    if mesh:
        spec = spec.on(mesh)
    return spec, fs.shard(model, spec), lambda params, x: loss_of(model, spec, x, of=mean_square)(params)


def ranges(run: Any) -> Counter[str]:
    """Return how often each range of ours is in the trace of a function."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    return Counter({e.key.removeprefix("funshard::"): e.count for e in trace.key_averages() if e.key.startswith("funshard::")})


def step(p: P, policy: fs.Policy | None = None) -> Counter[str]:
    _, params, loss = make(p, policy)
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    state = init(params)
    return ranges(lambda: update(fs.grad(loss)(params, torch.randn(2, 4)), state, params))


RANGES: dict[str, tuple[P, fs.Policy | None, dict[str, int]]] = {
    "units": (P("shard"), None, {"update AdamW": 1, "gather 0": 2, "wait for 0": 2, "reduce 0": 1, "gather 2": 1}),
    "the root": (P("shard"), fs.policies.whole(), {"gather ''": 1, "wait for ''": 1, "reduce ''": 1}),
    "replicas": (P(), None, {"reduce bucket 2 1 0": 1, "wait for reductions": 1}),
    "recomputed": (P("shard", remat=True), None, {"recompute 1": 1}),
    "not recomputed": (P("shard"), None, {"recompute 1": 0}),
}


@pytest.mark.parametrize("case", RANGES)
def test_every_phase_has_its_units_name(case: str) -> None:
    """Forward gathers a unit once, backward again unless it is the last, and reduces each; replicas are in one bucket."""
    p, policy, expected = RANGES[case]
    with world(2):
        found = step(p, policy)
    assert {name: found[name] for name in expected} == expected, found


def test_stacks_of_transforms_and_checkpoints_have_ranges(tmp_path: Path) -> None:
    with world(2):
        _, params, loss = make(P("shard"))
        x = torch.randn(2, 4)
        found = ranges(lambda: fs.hvp(lambda p: loss(p, x), params, {key: torch.ones_like(p) for key, p in params.items()}))
    assert found["gather_mean of unit '1'"] == 4, found  # values and tangents, in forward and in backward
    assert found["scatter_mean of unit '1'"] == 2, found
    spec, params, _ = make(P("shard"), shard=1)
    found = ranges(lambda: checkpoint.save(tmp_path / "a", params, spec).wait())
    found += ranges(lambda: checkpoint.load(tmp_path / "a", spec))
    assert found["checkpoint plan"] == found["checkpoint write"] == found["checkpoint read"] == 1, found


def test_a_profiler_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the private question of torch that `_torch.is_profiling` asks: without one there are no ranges."""

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    assert not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    with world(2):
        _, params, loss = make(P("shard"))
        fs.grad(loss)(params, torch.randn(2, 4))
        with profile(activities=[ProfilerActivity.CPU]):
            assert torch.autograd._profiler_enabled()  # which `_torch.is_profiling` asks
            refused(AssertionError, re.escape("funshard::gather 0"), lambda: fs.grad(loss)(params, torch.randn(2, 4)))


@seldom
def test_compiled_graphs_have_no_ranges() -> None:
    """They would be operators in the graph."""
    with world(2):
        _, params, loss = make(P("shard"))
        compiled = fs.compile(lambda p, x: fs.grad(loss)(p, x), backend="aot_eager")
        with profile(activities=[ProfilerActivity.CPU]), phase("outside"):
            grads = compiled(params, torch.ones(2, 4))
        assert grads.keys() == params.keys()


@contextlib.contextmanager
def logged(level: int) -> Iterator[list[tuple[int, str]]]:
    """Collect the levels and messages of the log; pytest's own plugin for it is off."""
    found: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelno, record.getMessage()))  # pyright: ignore[reportAttributeAccessIssue]
    logger = logging.getLogger("funshard")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def test_info_names_the_spec_checkpoints_and_skipped_steps(tmp_path: Path) -> None:
    with logged(logging.INFO) as found:
        spec, params, _ = make(P("shard"), shard=1)
        checkpoint.save(tmp_path / "a", params, spec).wait()
        checkpoint.load(tmp_path / "a", spec)
        checkpoint.export(tmp_path / "b", params, spec)
        fs.shard(fs.unshard(params, spec), spec)  # which is known
        begin, unscale = fs.loss_scale.dynamic(spec, scale=8.0)
        for factor in (1, torch.inf):
            unscale({key: factor + 0 * x for key, x in params.items()}, begin())
    assert found == [
        (logging.INFO, message)
        for message in (
            f"sharded by {spec!r}",
            f"checkpoint.save: {tmp_path / 'a'} is complete",
            f"checkpoint.load: {tmp_path / 'a'} is read",
            f"checkpoint.export: {tmp_path / 'b'} is complete",
            "loss_scale: a step is skipped; its gradients were not finite at a scale of 8",
        )
    ]


def test_debug_names_each_phase(capfd: pytest.CaptureFixture[str]) -> None:
    """And the log is silent unless it is asked."""
    with world(2):
        step(P("shard"))
    assert "gather" not in "".join(capfd.readouterr())
    with world(2), logged(logging.DEBUG) as found:
        _, params, loss = make(P("shard"))
        fs.grad(loss)(params, torch.randn(2, 4))
    phases = [message for level, message in found if level == logging.DEBUG]
    assert phases[-2:] == ["reduce 0", "wait for reductions"], phases
    assert {"gather 0", "wait for 0", "gather 2"} <= {*phases}, phases
