"""The commands of the guide's page on running: two agents of torchrun with two ranks each, and ranks as srun starts them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from depth import seldom
from ranks import ended, free_port, start_one

import funshard

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
