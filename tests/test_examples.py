"""The examples run as their docstrings say: plainly on one rank, and as under torchrun on real ranks."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from depth import at_most, depth, mark_seldom, seldom
from ranks import ended, free_port, launch, start_one

import funshard

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYERS, STEPS = depth((1, 20), (2, 30))
TINY = f"--layers {LAYERS} --dim 32 --heads 2 --seq 32 --batch 4 --steps {STEPS} --warmup 5 --lr 1e-2 --log-every 1 --sample 8"
TINY += depth(" --eval-batches 2 --max-bytes 1000000", "")


def launched(ranks: int, path: Path, *argv: str) -> str:
    """As `ranks.launch`; and a rank that is alone has one thread too, as the other cores are busy with other tests."""
    return launch(ranks, path, *argv, LOCAL_WORLD_SIZE=str(os.cpu_count()))


@functools.cache
def run(ranks: int, name: str, flags: str = "") -> str:
    """The output of an example on so many ranks; AssertionError with all it said if it fails."""
    return launched(ranks, EXAMPLES / name, *flags.split())


def losses(output: str) -> list[float]:
    """What train_gpt.py's progress lines say."""
    return [float(x) for x in re.findall(r"^step .* loss ([\d.]+)", output, re.MULTILINE)]


@at_most(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "says"), [("mlp.py", "equal to the unsharded run"), ("per_layer_by_hand.py", "agree")])
def test_example_checks_itself(name: str, says: str, ranks: int) -> None:
    """An example that asserts its result against the unsharded one reaches its last line."""
    output = run(ranks, name)
    assert f"{ranks} ranks" in output
    assert says in output


@at_most(1)
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "fsdp"), (2, "fsdp"), (2, "hsdp"), (2, "ddp"), *depth([], [(1, "hsdp")])])
def test_train_gpt_learns(ranks: int, strategy: str) -> None:
    """A few steps of a tiny GPT bring the loss down from log(256), with the memory that the strategy says."""
    output = run(ranks, "train_gpt.py", f"--strategy {strategy} {TINY}")
    first, *_, last = losses(output)
    assert len(losses(output)) == STEPS
    assert 5.3 < first < 5.8
    assert last < first - 1.5
    assert "validation loss" in output
    assert "sample:\ndef " in output
    total, held = (
        re.search(pattern, output) for pattern in (r"total .* ([\d,]+)\n", r"bytes per rank ([\d,]+)  left 0:00\nvalid")
    )
    assert total is not None
    assert held is not None
    per_rank = int(total[1].replace(",", ""))
    assert 3 * per_rank <= int(held[1].replace(",", "")) < 3 * per_rank + 1000  # parameters, two moments, step counters


@seldom
def test_train_gpt_strategies_agree() -> None:
    """FSDP, HSDP and DDP on two ranks are the same training."""
    fsdp, hsdp, ddp = (losses(run(2, "train_gpt.py", f"--strategy {name} {TINY}")) for name in ("fsdp", "hsdp", "ddp"))
    assert fsdp[:10] == pytest.approx(ddp[:10], abs=1e-3)
    assert hsdp[:10] == pytest.approx(ddp[:10], abs=1e-3)


@seldom
@pytest.mark.parametrize("optimizer", ["muon", *depth([], ["shampoo", "soap"])])
def test_train_gpt_with_optimizers_of_matrices(optimizer: str) -> None:
    """Each learns, on two ranks as on one, from where AdamW begins; and says who owns the matrices."""
    adamw, two, one = (
        losses(run(ranks, "train_gpt.py", f"--strategy fsdp {TINY}{more}"))
        for ranks, more in ((2, ""), (2, f" --optimizer {optimizer}"), (1, f" --optimizer {optimizer}"))
    )
    assert two[0] == adamw[0]
    assert two[10] != adamw[10]
    assert two[:10] == pytest.approx(one[:10], abs=2e-3)
    assert two[-1] < two[0] - 1
    said = run(2, "train_gpt.py", f"--strategy fsdp {TINY} --optimizer {optimizer}")
    assert f"no matrices: {5 + 4 * LAYERS} parameters, " in said


def forked(command: list[str], **_: object) -> SimpleNamespace:
    """What torchrun's script prints, on ranks that start faster."""
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    return SimpleNamespace(stdout=launched(int(command[script - 1]), Path(command[script]), *command[script + 1 :]))


@seldom
@pytest.mark.parametrize("start", [forked, *depth([], [subprocess.run])])
def test_muon_beside_adamw(start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both columns, of the same first batch; then in which step Muon has AdamW's last loss."""
    tiny = "--layers 1 --dim 32 --heads 2 --seq 32 --batch 4 --steps 6 --warmup 2 --log-every 1 --sample 1"
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["muon.py", *tiny.split()])
    runpy.run_path(str(EXAMPLES / "muon.py"))
    *table, says = capsys.readouterr().out.splitlines()
    rows = [[float(x) for x in line.split()] for line in table if re.match(r" +\d", line)]
    assert [row[0] for row in rows] == list(range(6))
    assert rows[0][1] == rows[0][2]
    assert rows[-1][1] != rows[-1][2]
    last = rows[-1][1]
    better = next((i for i in range(6) if all(row[2] <= last for row in rows[i:])), None)
    assert says == "Muon has AdamW's loss of 6 steps after " + ("more than 6" if better is None else f"{better + 1}")


@seldom
@pytest.mark.parametrize("strategy", mark_seldom(["fsdp", "hsdp"], "fsdp"))
def test_train_gpt_in_low_precision_and_micro_batches(strategy: str) -> None:
    """It learns in bf16 as well, and two micro-batches of half the size are as good as one batch."""
    whole = losses(run(2, "train_gpt.py", f"--strategy {strategy} {TINY}"))
    low = losses(run(2, "train_gpt.py", f"--strategy {strategy} {TINY} --precision bf16"))
    halves = losses(run(2, "train_gpt.py", f"--strategy {strategy} {TINY} --precision bf16 --batch 4 --micro-batches 2"))
    assert low != whole
    assert low[:10] == pytest.approx(whole[:10], abs=2e-2)
    assert halves == pytest.approx(low, abs=2e-2)  # the same sequences, in two parts
    assert halves[-1] < halves[0] - 1.5


@seldom
@pytest.mark.parametrize(("ranks", "flags"), [(2, "--quantize"), *depth([], [(1, "")])])
def test_lora_adapts_and_merges(ranks: int, flags: str) -> None:
    """The loss on another text falls, with few bytes trained, and the merged GPT is the adapted one."""
    tiny = TINY.partition("--steps")[0] + "--pretrain 60 --steps 60 --lr 5e-3"
    output = run(ranks, "lora.py", f"{tiny} {flags}")
    before, after = (float(x) for x in re.search(r"other text: ([\d.]+) before, ([\d.]+) after", output).groups())  # pyright: ignore
    assert after < before - 0.03
    assert "the merged GPT is the adapted one" in output
    held = re.search(r"adapting: bytes per rank: ([\d,]+) trained, ([\d,]+) of optimizer state, ([\d,]+) frozen", output)
    assert held is not None
    trained, moments, frozen = (int(x.replace(",", "")) for x in held.groups())
    assert 2 * trained <= moments < 2 * trained + 200
    root, blocks = (256 * 32 * 2 + 32 * 32 + 64) * 4 // ranks, LAYERS * 12 * 32 * 32 * 4 // ranks
    norms = LAYERS * 2 * 64 * 4
    assert frozen == root + norms + (blocks if not flags else blocks // 8 + blocks // 64)  # half a byte, and 4 for 64 elements


def test_lora_takes_what_train_gpt_saved(tmp_path: Path) -> None:
    """Trained by the one, adapted by the other."""
    saved = tmp_path / "gpt.pt"
    run(1, "train_gpt.py", f"{TINY} --steps 3 --save {saved}")
    output = run(1, "lora.py", f"{TINY.partition('--steps')[0]} --steps 3 --load {saved}")
    assert "pretraining" not in output
    assert "the merged GPT is the adapted one" in output


# --- the commands of the guide's page on running: two agents of torchrun, and ranks as srun starts them ---
PAGE = Path(funshard.__file__).parents[1] / "examples" / "guide" / "running.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's script, in a file."""
    path = tmp_path / "train.py"
    path.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    return path


def run_together(path: Path, argvs: list[list[str]], envs: list[dict[str, str]], folder: Path) -> list[str]:
    """Run processes of a script side by side, and return what each prints; all of them have to end well within the time."""
    outputs = [folder / f"output{i}" for i in range(len(envs))]
    runs = zip(argvs, outputs, envs, strict=True)
    codes = ended([start_one(path, argv, str(output), **env) for argv, output, env in runs])
    said = [output.read_text() for output in outputs]
    assert codes == [0] * len(codes), said
    return said


@seldom
@pytest.mark.parametrize(
    "command", [r"`torchrun (--nnodes 2 .*?) train.py`", r"^srun torchrun (.*?) train.py$"], ids=["by hand", "SLURM"]
)
def test_two_agents(script: Path, command: str) -> None:
    """`--nnodes 2`: a mesh of two machines with two ranks each, and one of the four ranks prints."""
    options = re.findall(command, PAGE.read_text(), re.MULTILINE)[0]
    for variable, value in {
        '"$HOST:29500"': "HOST:29500",
        '"$SLURM_NNODES"': "2",
        '"$SLURM_JOB_ID"': "17",
        "HOST:29500": f"127.0.0.1:{free_port()}",
        "--nproc-per-node 8": "--nproc-per-node 2",
    }.items():
        options = options.replace(variable, value)
    assert "$" not in options
    argv = ["--local-addr", "127.0.0.1", *options.split(), str(script)]
    torchrun = importlib.util.find_spec("torch.distributed.run")
    assert torchrun is not None
    assert torchrun.origin is not None
    outputs = run_together(Path(torchrun.origin), [argv, argv], [{}, {}], script.parent)
    said = [output.count("learnt: True\n") for output in outputs]  # an agent may warn that the other one's store is gone
    assert sorted(said) == [0, 1], outputs


@seldom
def test_srun_alone(script: Path) -> None:
    """The variables that the page gives to each rank, from those that SLURM sets."""
    shell = re.findall(r"^srun (bash -c '.*')$", PAGE.read_text(), re.MULTILINE)[0]
    body = shell.removeprefix("bash -c '").removesuffix("'").replace("python train.py", "env")
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    envs = [variables(body, {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}) for rank in range(4)]
    assert all(len(env) >= 10 for env in envs)
    outputs = run_together(script, [[]] * 4, envs, script.parent)
    assert outputs == ["learnt: True\n", "", "", ""]


def variables(body: str, env: dict[str, str]) -> dict[str, str]:
    """What a command of bash that prints its variables adds to these."""
    said = subprocess.run(
        ["bash", "-c", body], env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in said.stdout.splitlines())
    return {name: value for name, value in found.items() if name in env or re.fullmatch(r"(LOCAL_)?(RANK|WORLD_SIZE)", name)}
