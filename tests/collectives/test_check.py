"""`funshard.check`: ranks that disagree, raise, or do not come stop together, with the collective, the rank and the line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import diverging
import pytest
import torch
from depth import mark_seldom, seldom
from diverging import CASES, LIMIT, Trainer, raise_error
from ranks import Pool, free_port, launch, real_ranks
from test_rank_order import assert_says
from test_sharding import message
from torch import nn

import funshard as fs
from funshard._core import ops
from funshard.collectives import _rank_check as switch
from funshard.collectives._rank_check import _find_user_line

RAISED = {"raise_in_forward": "a bad batch", "raise_in_backward": "a bad gradient"}
DIFFERENT = {
    "another_order": ("unit 'layers.1'", "unit 'layers.2'"),
    "a_skipped_unit": ("the end of forward without unit 'layers.1'",),
    "no_unit": ("all-gather of", "unit 'layers.0'"),
    "another_dtype": ("all-gather of 24 x float32, unit 'layers.0' over 'shard'", "float64"),
    "another_spec": ("all-gather", "between hosts"),
    "another_number_of_microbatches": ("got 3 micro-batches on rank 0", "2 micro-batches on rank 1"),
    "a_skipped_nan": ("all-reduce, between hosts, to compare trees", "unit 'layers.0'"),
    "a_loop_left_early": ("unit 'layers.0'", "the end of fs.check()"),
    "a_lone_unshard": ("gather of unit 'layers.0'", "the end of fs.check()"),
}
"""What an error names, on two ranks: what each rank was about to start."""


def diverge(rank: int, names: list[str]) -> list[tuple[str, float]]:
    """The cases, one after the other: each begins after the error of the one before."""
    return [diverging.run(name) for name in names]


CHECKED = [name for name in CASES if name != "raise_in_teardown"]


@pytest.mark.usefixtures("not_on_worst")
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ("gloo4", ["another_order", "raise_in_backward", "a_loop_left_early"]),
        pytest.param("gloo4", CHECKED, marks=seldom),
        pytest.param("gloo2", [*CHECKED, CHECKED[0]], marks=seldom),  # and the processes go on
    ],
    ids=["some", "all", "two ranks"],
)
def test_every_case_is_an_error_on_every_rank(request: pytest.FixtureRequest, ranks: str, names: list[str]) -> None:
    """Every rank gets the same error within the limit; a rank that raises gets its own."""
    pool: Pool = request.getfixturevalue(ranks)
    rows = pool.run(diverge, [*names])
    last = pool.size - 1
    for name, results in zip(names, zip(*rows, strict=True), strict=True):
        texts = [text for text, _ in results]
        assert max(seconds for _, seconds in results) < LIMIT, name
        if name in RAISED:
            assert texts[last] == f"ValueError: {RAISED[name]}"
            for text in texts[:last]:
                assert text.startswith(f"RankError: fs.check: rank {last} raised ValueError: {RAISED[name]} ("), text
                assert "diverging.py:" in text
        elif name == "a_recompiling_rank":
            assert all(text == "ended" for text in texts), texts
        else:
            assert len({*texts}) == 1, texts
            if name == "another_number_of_microbatches":  # which accumulate compares itself
                assert texts[0].startswith("ValueError: accumulate: expected as many micro-batches"), texts[0]
            elif name == "a_skipped_unit":  # which the end of forward compares without the check
                assert texts[0].startswith("RuntimeError: ranks ran different units"), texts[0]
            else:
                assert texts[0].startswith("RankError: fs.check: ranks disagree on collective"), texts[0]
                assert "diverging.py:" in texts[0]
            if pool.size == 2:
                for words in DIFFERENT[name]:
                    assert words in texts[0], texts[0]


@seldom
@pytest.mark.parametrize("ranks", mark_seldom([2, 4], 2))
def test_a_rank_that_raises_after_its_process_group_is_gone(ranks: int) -> None:
    said = launch(ranks, Path(diverging.__file__), "raise_in_teardown")
    assert re.search(rf"rank {ranks - 1} after .* ValueError: a bad end", said), said
    assert said.count(f"fs.check: rank {ranks - 1} raised ValueError: a bad end") == ranks - 1, said


# --- A rank that does not come ---
@real_ranks(2)
def test_a_rank_that_does_not_come_is_named_with_its_line(rank: int) -> None:
    """The last rank sleeps within its check."""
    trainer = Trainer()

    @fs.check(2.0)
    def steps() -> None:
        trainer.step()
        if rank:
            time.sleep(3.0)
        trainer.step()

    text = message(steps)
    assert re.search(r"rank 0 has waited \d s to start all-gather .* unit 'layers.0' over 'shard'", text), text
    assert re.search(r"for rank 1, which is at .*test_check.py:\d+ in (.*\.)?steps: time.sleep\(3.0\)", text), text
    assert "fs.check(timeout=2)" in text


@real_ranks(4)
def test_a_rank_that_has_left_the_block_is_not_waited_for(rank: int) -> None:
    """Rank 1 leaves its block, while rank 0 waits for it on a channel of other ranks."""
    begin = time.monotonic()
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    axis = fs.collectives.Mesh.of(mesh)["shard"]

    @fs.check(60)
    def reduce() -> None:
        if rank != 1:
            fs.collectives.all_reduce(torch.ones(1), axis)

    assert_says(message(reduce), "rank 1 does not come: it waits to start the end of fs.check(), block", "all-reduce")
    assert time.monotonic() - begin < 30


def entered_alone(rank: int) -> str:
    axis = fs.collectives.Mesh.world()["shard"]
    return time.sleep(4) or "" if rank else message(fs.check(2)(fs.collectives.all_reduce), torch.ones(1), axis)


@seldom
def test_a_rank_that_has_not_entered_is_named(gloo2: Pool) -> None:
    gloo2.stop()  # a process that has ever entered would be at its end
    assert "for rank 1, which has not entered fs.check()" in gloo2.run(entered_alone)[0]
    gloo2.stop()


FORKED = """
import os, sys, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import funshard as fs
from diverging import Trainer

dist.init_process_group("gloo")
trainer = Trainer()

def fork(end):
    if dist.get_rank() == 1 and (pid := os.fork()):
        os.waitpid(pid, 0)
    elif dist.get_rank() == 1:
        end()

def fail():
    raise ValueError("in the child alone")

with fs.check(30):
    trainer.step()
    for end in (sys.exit, fail):  # a child unwinds the block, and runs what is registered by atexit
        fork(end)
        trainer.step()
print(f"rank {dist.get_rank()} ended")
"""


def test_a_forked_child_is_no_rank_however_it_ends(tmp_path: Path) -> None:
    """Its `sys.exit` was an error of rank 1 to all ranks, and its end was the rank's."""
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    said = launch(2, script, str(Path(__file__).parents[1]))
    assert "rank 0 ended" in said
    assert "rank 1 ended" in said
    assert "ValueError: in the child alone" in said  # as it is elsewhere


# --- What is compared, and what is left alone ---
@real_ranks(2)
def test_all_collectives_are_compared(rank: int) -> None:
    """One rank makes another call of the same size."""
    axis = fs.collectives.Mesh.world()["shard"]
    x, c = torch.ones(2), fs.collectives
    cases: list[tuple[Callable[[], object], Callable[[], object], tuple[str, ...]]] = [
        (lambda: c.permute(x, axis), lambda: c.all_to_all(x, axis), ("permute of 2 x float32", "all-to-all of 2 x float32")),
        (lambda: c.all_reduce(x, axis), lambda: c.all_reduce(x, axis, reduce="sum"),
         ("all-reduce (mean) of 2", "all-reduce (sum) of 2")),
        (lambda: c.broadcast(x, axis), lambda: c.all_reduce(x.double(), axis), ("broadcast of 2 x float32", "of 2 x float64")),
        (lambda: c.ragged_all_to_all(x, axis, [1, 1]), lambda: c.gather_values(x, axis),
         ("between hosts", "to compare gather_values of [2] torch.float32")),
    ]  # fmt: skip
    for *pair, words in cases:
        assert_says(message(fs.check(LIMIT)(pair[rank])), *words)


@real_ranks(2)
def test_a_checkpoint_of_one_rank(rank: int, tmp_path: Path) -> None:
    """Rank 0 saves, and the other one evaluates."""
    trainer = Trainer()

    @fs.check(LIMIT)
    def run() -> None:
        fs.checkpoint.save(tmp_path / "all", trainer.params, trainer.spec)
        saving = fs.checkpoint.save(tmp_path / "background", trainer.params, trainer.spec, asynchronous=True)
        trainer.step()
        saving.wait()
        fs.checkpoint.load(tmp_path / "all", trainer.spec)
        fs.unshard(trainer.params, trainer.spec, rank0_only=True)
        fs.shard(trainer.model, trainer.spec, src=0)
        if rank == 0:
            fs.checkpoint.save(tmp_path / "alone", trainer.params, trainer.spec)
        else:
            trainer.call(trainer.params)

    with pytest.raises((RuntimeError, fs.checkpoint.CheckpointError)) as error:
        run()
    text = str(error.value)
    assert_says(text, "ranks disagree on collective", "test_check.py", "fs.checkpoint.save(")
    assert "trainer.call(" in text or "self.layers[i]" in text


@real_ranks(2)
def test_no_transform_changes(rank: int) -> None:
    """The check changes no result, of any transform, under nested checks; and is gone after it."""
    trainer = Trainer()

    def loss(params: fs.Params) -> torch.Tensor:
        return trainer.call(params).square().sum()

    def results() -> list[torch.Tensor]:
        _, tangent = torch.func.jvp(loss, (trainer.params,), (trainer.params,))
        second = fs.hvp(loss, trainer.params, trainer.params)
        grads = [fs.grad(loss)(trainer.params), torch.func.grad(loss)(trainer.params), second]
        return [tangent, *(x for tree in grads for x in tree.values())]

    expected = results()
    with fs.check(LIMIT):
        with fs.check(5):
            got = results()
        got += results()
    assert all(map(torch.equal, got, expected + expected))
    assert ops._listener is None


def test_looking_at_what_a_rank_runs_keeps_no_tensor() -> None:
    """A frame that another thread holds would keep the tensors of a function that has returned."""

    def step() -> tuple[list[Any], weakref.ref[torch.Tensor]]:
        x = torch.ones(1)
        lines: list[Any] = []
        thread = threading.Thread(target=lambda: lines.extend(switch._main_lines()))
        thread.start()
        thread.join()
        return lines, weakref.ref(x)

    lines, x = step()
    assert any(code.co_name == "step" for code, _ in lines)
    assert x() is None


@seldom
@real_ranks(2)
def test_a_compiled_step_is_compared_when_it_starts(rank: int) -> None:
    """Its graph is compared as a whole."""
    trainer = Trainer()
    step = fs.compile(fs.grad(lambda p: trainer.call(p).square().sum()), backend="aot_eager")
    with fs.check(60):
        step(trainer.params)
    differ = fs.check(LIMIT)(lambda: step(trainer.params) if rank == 0 else trainer.step((2, 1, 0)))
    assert_says(message(differ), "ranks disagree on collective", "rank 0 all-reduce, between hosts, to compare")


def test_without_other_ranks_nothing_happens() -> None:
    trainer = Trainer()
    expected = trainer.step()
    with fs.check(timeout=1):
        got = trainer.step()
        run = fs.testing.spmd(lambda mesh, x: fs.collectives.sum_over(x, mesh), 2)
        assert run(torch.tensor([1.0, 3.0])).tolist() == [4.0, 4.0]
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert fs.check(timeout=1)(lambda: 7)() == 7
    with pytest.raises(KeyError), fs.check():
        raise KeyError
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout: expected a positive number"), fs.check(timeout):
            pass
    assert ops._listener is None


# --- The whole process ---
PROCESS = """
import os, sys, torch, torch.distributed as dist
from torch import nn
import funshard as fs

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 4)
spec = fs.policies.whole()(model)
params, rank = fs.shard(model, spec), dist.get_rank()
for i in range(3):
    if rank == 1 and i == 1:
        if sys.argv[1] == "raise":
            raise ValueError("a bad batch")
        if sys.argv[1] == "end":
            sys.exit(3)
    try:
        fs.grad(lambda p: fs.functional_call(model, p, (torch.ones(2, 4),), spec=spec).sum())(params)
    except RuntimeError as error:
        print("rank", rank, error, flush=True)
        raise
print("finished", flush=True)
dist.destroy_process_group()
"""


def run_processes(script: Path, *argv: str) -> list[tuple[int, str]]:
    """Exit codes and outputs of two ranks, as processes that end as a user's do."""
    port = free_port()
    env = {**os.environ, "FUNSHARD_CHECK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    said_to: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(script), *argv]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}, **said_to) for rank in range(2)]
    try:
        said = [process.communicate(timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, text) for process, text in zip(ranks, said, strict=True)]


@seldom
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        pytest.param("raise", 1, "fs.check: rank 1 raised ValueError: a bad batch", marks=seldom),
        pytest.param("end", 3, "rank 1 does not come: it has ended", marks=seldom),
        ("fine", 0, "finished"),
    ],
)
def test_the_variable_checks_the_whole_process(tmp_path: Path, how: str, code: int, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESS)
    (first, said), (second, other) = run_processes(script, how)
    assert (first, second) == (min(code, 1), code), said + other
    assert words in said


@seldom
def test_the_variable_takes_no_other_value() -> None:
    env = {**os.environ, "FUNSHARD_CHECK": "yes"}
    command = [sys.executable, "-c", "import funshard"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "FUNSHARD_CHECK: expected 0 or 1, got 'yes'" in done.stderr


# --- Its parts ---
def test_the_line_is_the_users() -> None:
    line: list[str] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            line.append(_find_user_line())
            return x

    Looks()(torch.ones(1))
    assert re.search(r"test_check.py:\d+ in (.*Looks.)?forward: line.append", line[0])
    with ThreadPoolExecutor(1) as threads:  # as autograd's, which run backward on an accelerator
        assert "threads.submit(_find_user_line)" in threads.submit(_find_user_line).result()
    scope: dict[str, Any] = {"find": _find_user_line}
    exec(compile("def look(): return find()", __file__, "exec"), scope)  # code without a hash, as Dynamo makes
    look: Any = FunctionType(scope["look"].__code__.replace(co_consts=({},)), scope)
    assert " in look" in look()
    with pytest.raises(ValueError, match="a bad gradient"):
        raise_error(torch.ones(1))
