"""The commands of the guide's page on running: two agents of torchrun with two ranks each, and ranks as srun starts them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import funshard

PAGE = Path(funshard.__file__).parents[1] / "examples" / "guide" / "running.md"
ENV = {
    **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's script, in a file."""
    path = tmp_path / "train.py"
    path.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    return path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(commands: list[list[str]], envs: list[dict[str, str]], folder: Path) -> list[str]:
    """Run processes side by side, and return what each prints; all of them have to end well within the time."""
    processes = [
        subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, env in zip(commands, envs, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


def test_two_agents(script: Path) -> None:
    """`--nnodes 2`: a mesh of two machines with two ranks each, and one of the four ranks prints."""
    options = re.findall(r"`torchrun (--nnodes 2 .*?) train.py`", PAGE.read_text())[0]
    options = options.replace("HOST:29500", f"127.0.0.1:{free_port()}").replace("--nproc-per-node 8", "--nproc-per-node 2")
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *options.split(), str(script)]
    outputs = run_together([command, command], [ENV, ENV], script.parent)
    assert sorted(outputs) == ["", "learnt: True\n"]


def test_srun_alone(script: Path) -> None:
    """The variables that the page gives to each rank, from those that SLURM sets."""
    shell = re.findall(r"^srun (bash -c '.*')$", PAGE.read_text(), re.MULTILINE)[0]
    body = shell.removeprefix("bash -c '").removesuffix("'").replace("python train.py", f"{sys.executable} {script}")
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    envs = [{**ENV, **job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)} for rank in range(4)]
    outputs = run_together([["bash", "-c", body]] * 4, envs, script.parent)
    assert outputs == ["learnt: True\n", "", "", ""]
