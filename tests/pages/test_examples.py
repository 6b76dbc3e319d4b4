"""The examples run as their docstrings say: plainly on one rank, and as under torchrun on real ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
import torch.nn.functional as F
from depth import at_most, depth, mark_seldom, seldom
from parity import dot
from ranks import Pool, ended, free_port, launch, real_ranks, start_one
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import funshard as fs

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def column(output: str, name: str) -> list[float]:
    """What the progress lines say."""
    return [float(x) for x in re.findall(rf"^step .* {name} ([\d.]+)", output, re.MULTILINE)]


def losses(output: str) -> list[float]:
    return column(output, "loss")


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
    patterns = r"total .* ([\d,]+)\n", r"bytes per rank ([\d,]+)  left 0:00\nvalid"
    total, held = (int(re.search(pattern, output)[1].replace(",", "")) for pattern in patterns)  # pyright: ignore
    assert 3 * total <= held < 3 * total + 1000  # parameters, two moments, step counters


@seldom
@pytest.mark.parametrize("optimizer", ["muon", *depth([], ["shampoo", "soap"])])
def test_train_gpt_with_optimizers_of_matrices(optimizer: str) -> None:
    """Each learns, on two ranks as on one, from where AdamW begins; and says who owns the matrices."""
    flags, more = f"--strategy fsdp {TINY}", f" --optimizer {optimizer}"
    said = run(2, "train_gpt.py", flags + more)
    adamw, two, one = map(losses, (run(2, "train_gpt.py", flags), said, run(1, "train_gpt.py", flags + more)))
    assert two[0] == adamw[0]
    assert two[:10] == pytest.approx(one[:10], abs=2e-3)
    assert two[-1] < two[0] - 1
    assert f"no matrices: {5 + 4 * LAYERS} parameters, " in said


@seldom
def test_muon_beside_adamw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each step, of the same first batch, with both losses."""

    def run_script(command: list[str], **_: object) -> SimpleNamespace:
        i = next(i for i, word in enumerate(command) if word.endswith(".py"))
        return SimpleNamespace(stdout=launched(int(command[i - 1]), Path(command[i]), *command[i + 1 :]))

    tiny = "--layers 1 --dim 32 --heads 2 --seq 32 --batch 4 --steps 6 --warmup 2 --log-every 1 --sample 1"
    monkeypatch.setattr(subprocess, "run", run_script)
    monkeypatch.setattr(sys, "argv", ["muon.py", *tiny.split()])
    runpy.run_path(str(EXAMPLES / "muon.py"))
    *table, says = capsys.readouterr().out.splitlines()
    (_, adamw, muon), *_, last = [[float(x) for x in line.split()] for line in table if re.match(r" +\d", line)]
    assert adamw == muon
    assert last[0] == 5
    assert last[1] != last[2]
    assert says.startswith("Muon has AdamW's loss of 6 steps after ")


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
PAGE = EXAMPLES / "guide" / "running.md"


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
    outputs = run_together(Path(torch.distributed.run.__file__), [argv, argv], [{}, {}], script.parent)
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


# --- examples/mini.py is the package in small: equal training, every transform, buffers that are freed ---
sys.path.append(str(EXAMPLES))
import mini  # noqa: E402

Tree = dict[str, Tensor]
MINI_STEPS, BATCH, SEQ = depth(3, 20), 2, 8


def full_params(model: nn.Module) -> Tree:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("ranks", mark_seldom([1, 2], 2))
def test_script_learns(ranks: int) -> None:
    """A line every ten steps, with a loss that falls from about log(256)."""
    losses = [float(x) for x in re.findall(r"^step +\d+  loss ([\d.]+)$", launch(ranks, EXAMPLES / "mini.py"), re.MULTILINE)]
    assert len(losses) == 11
    assert 5.3 < losses[0] < 6.3
    assert losses[-1] < losses[0] - 2.5


def test_it_is_plain_torch() -> None:
    """Short, and without an import of the package."""
    text = (EXAMPLES / "mini.py").read_text()
    assert "import funshard" not in text
    assert len(text.splitlines()) <= 250


# --- training equals the package's ---
def gpt() -> nn.Module:
    """The example's model in float64, the same on every rank."""
    torch.manual_seed(0)
    return mini.GPT(layers=2, dim=12, heads=2, seq=SEQ).double()


def cross_entropy(call: Callable[[Tree, Tensor], Tensor]) -> Callable[[Tree, Tensor, Tensor], Tensor]:
    """The loss of a model that is called so."""
    return lambda slices, x, y: F.cross_entropy(call(slices, x).flatten(0, 1), y.flatten())


@real_ranks(2)
def test_training_equals_the_package(rank: int) -> None:
    """The same units; losses, gradients and parameters of each step of AdamW."""
    model = gpt()
    spec, fs_spec = mini.by_type(model, nn.TransformerEncoderLayer), fs.by_type(nn.TransformerEncoderLayer)(model)
    assert {unit: {*shapes} for unit, shapes in spec.items()} == {u.key: {p.name for p in u.params} for u in fs_spec}
    slices, params = mini.shard(full_params(model), spec), fs.shard(model, fs_spec)
    moments = {unit: (torch.zeros_like(x), torch.zeros_like(x)) for unit, x in slices.items()}
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
    state = init(params)
    model.to("meta")  # no parameter of the model's own is read
    loss = cross_entropy(lambda slices, x: mini.functional_call(model, slices, (x,), spec))
    fs_loss = cross_entropy(lambda params, x: fs.functional_call(model, params, (x,), spec=fs_spec))
    torch.manual_seed(1 + rank)
    for step, tokens in enumerate(torch.randint(256, (MINI_STEPS, BATCH, SEQ + 1)), start=1):
        grads, value = mini.grad_and_value(loss)(slices, tokens[:, :-1], tokens[:, 1:])
        fs_grads, fs_value = fs.grad_and_value(fs_loss)(params, tokens[:, :-1], tokens[:, 1:])
        slices, moments = mini.adamw(grads, moments, slices, step)
        params, state = update(fs_grads, state, params)
        for tree, fs_tree in ((grads, fs_grads), (slices, params)):
            torch.testing.assert_close(mini.unshard(tree, spec), fs.unshard(fs_tree, fs_spec), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(value, fs_value, rtol=1e-12, atol=1e-12)


# --- the gather under torch.func: every order, every transform ---
def mlp() -> nn.Module:
    """A model that has derivatives of every order, with padding in each unit."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def hvp(f: Callable[..., Tensor], t: Tree, v: Tree, x: Tensor) -> Tree:
    return grad(lambda t: dot(grad(f)(t, x), v))(t)


DERIVATIVES: dict[str, Callable[[Callable[..., Tensor], Tree, Tree, Tensor], Tree]] = {
    "grad": lambda f, t, v, x: grad(f)(t, x),
    "grad of grad": hvp,
    "jvp of grad": lambda f, t, v, x: jvp(lambda t: grad(f)(t, x), (t,), (v,))[1],
    "third order": lambda f, t, v, x: grad(lambda t: dot(hvp(f, t, v, x), v))(t),
    "vmap over samples": lambda f, t, v, x: vmap(grad(f), (None, 0))(t, x),
    "vmap over models": lambda f, t, v, x: vmap(grad(f), (0, None))({k: torch.stack([t[k], v[k]], 0) for k in t}, x),
    "vmap of hvp": lambda f, t, v, x: vmap(lambda x: hvp(f, t, v, x))(x),
}


@real_ranks(2)
def test_derivatives_are_those_of_the_mean_loss(rank: int) -> None:
    """The law of gradients: derive(loss)(shard(t)) == shard(derive(mean of losses)(t)), of every order, batched and not."""
    model = mlp()
    spec, t = mini.by_type(model, nn.Linear), full_params(model)
    v = {name: torch.randn_like(x) for name, x in t.items()}
    xs = torch.randn(4, 2, 3).double()  # samples of 2 ranks, the same numbers on both

    def loss(slices: Tree, x: Tensor) -> Tensor:
        return mini.functional_call(model, slices, (x,), spec, reshard=False).square().mean()

    for name, derive in DERIVATIVES.items():
        found = derive(loss, mini.shard(t, spec), mini.shard(v, spec), xs[:, rank])
        want = derive(lambda t, xs: torch.func.functional_call(model, t, (xs,)).square().mean(), t, v, xs)
        vmapped = name.startswith("vmap")
        sharded = vmap(lambda t: mini.shard(t, spec))(want) if vmapped else mini.shard(want, spec)
        torch.testing.assert_close(found, sharded, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# --- The examples of higher orders: what they say, on any number of ranks, is what plain torch says on the joined batch ---
def numbers(output: str) -> list[float]:
    """Every number with decimals, in order."""
    return [float(x) for x in re.findall(r"-?\d+\.\d{5,}", output)]


SMALL: dict[str, dict[str, Any]] = {
    "sharpness.py": {"LAYERS": 1, "LR": 0.25, "STEPS": 36, "EVERY": 18},
    "spectrum.py": {"LAYERS": 1, "DIM": 16, "SEQ": 16, "STEPS": 10, "LANCZOS": 12, "PROBES": 1, "TOP": 3, "REPEATS": 1},
    "maml.py": {"INNER_LR": 0.04, "LR": 0.03, "STEPS": 40, "EVERY": 10},
    "ensemble.py": {"HIDDEN": 32, "BATCH": 120, "STEPS": 21, "EVERY": 7},
    "meanflow.py": {"LAYERS": 1, "DIM": 16, "STEPS": 12, "EVERY": 6, "LR": 1e-2},
    "implicit.py": {"SAMPLES": 200, "STRENGTH": 0.5, "LR": 10.0},
    "dp_sgd.py": {"HIDDEN": 32, "BATCH": 96, "STEPS": 24, "EVERY": 4},
    "data_weights.py": {"STEPS": 32},
    "influence.py": {"SAMPLES": 16, "STEPS": 20, "SEEDS": 1, "DAMPINGS": (1.0, 1 / 2)},
    "learn_rates.py": {"STEPS": 12, "UPDATES": 2, "RATE": 1e-3},
}
"""Constants that examples have by default in place of their own."""


class Constants(dict[str, Any]):
    """The names of a script, of which those that are given keep these values, whatever it assigns."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.given = given

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self.given.get(name, value))


def names_of(name: str) -> dict[str, Any]:
    """The names that an example defines, run in this process on the ranks that there are; and what it ``printed``."""
    path, names = EXAMPLES / name, Constants(depth(SMALL, {}).get(name, {}))
    with mock.patch.object(dist, "destroy_process_group"), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(path.read_text(), str(path), "exec"), names)
    return {**names, "printed": printed.getvalue()}


alone = functools.cache(names_of)
"""The names that an example defines on one rank: with the joined batch."""


def printed(name: str) -> str:
    """What an example prints on one rank."""
    return alone(name)["printed"]


def printed_on_this_rank(rank: int, name: str) -> str:
    return names_of(name)["printed"]


@seldom
@pytest.mark.parametrize("name", ["sam.py", *SMALL])
def test_two_ranks_print_what_one_does(gloo2: Pool, name: str) -> None:
    """To 1e-6: the same model and batch in total, in float64; and each checked itself."""
    one, two = printed(name), gloo2.run(printed_on_this_rank, name)[0]
    assert "1 ranks" in one
    assert "2 ranks" in two
    assert len(numbers(one)) >= 2
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-6)


@seldom
def test_products_are_more_exact_than_differences() -> None:
    table = re.findall(r"^(fs.hvp|differences, h = \S+) +(\S+) +(\S+) +[\d.]+$", printed("spectrum.py"), re.MULTILINE)
    product, *differences = [(float(single), float(half)) for _, single, half in table]
    assert len(differences) == 5
    assert product[0] < 1e-6 < 1e-5 < min(single for single, _ in differences)
    assert product[1] < 0.05 < min(half for _, half in differences)


@seldom
def test_sharpness_aware_minimisation_ends_flatter() -> None:
    plain, flat = (float(x) for x in re.findall(r"sharpness ([\d.]+)", printed("sam.py")))
    assert 0.1 < flat < 0.85 * plain


def test_maml_learns_to_learn() -> None:
    losses = column(printed("maml.py"), "steps")
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 3


def test_the_ensemble_is_better_than_its_members() -> None:
    output = printed("ensemble.py")
    single, ensemble = (float(x) for x in re.search(r"a member ([\d.]+), the ensemble ([\d.]+)", output).groups())
    assert ensemble < single - 0.02
    first, last = (numbers(line) for line in re.findall("^step.*", output, re.MULTILINE)[::3])
    assert all(end < start - depth(1, 1.5) for start, end in zip(first, last, strict=True))


@seldom
def test_hypergradients_lead_to_a_better_validation_loss() -> None:
    losses = column(printed("implicit.py"), "loss")
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.05


@seldom
def test_mislabelled_samples_are_found() -> None:
    """Most of them; the metagradient predicts a small change, and the loss without them is lower."""
    output = printed("data_weights.py")
    found, count = (int(x) for x in re.search(r"(\d+) of (\d+) mislabelled", output).groups())  # pyright: ignore
    assert 30 < count < 60
    assert found > 0.7 * count
    predicted, measured, before, after = numbers(output)
    assert predicted < 0
    assert measured == pytest.approx(predicted, rel=0.05)
    assert after < 0.7 * before
    assert float(re.search(r"float32 differs by (\S+) of", output).group(1)) < 1e-3  # pyright: ignore


@seldom
def test_learnt_rates_lower_the_loss() -> None:
    """Forward mode agrees, or the script would have stopped."""
    losses = [float(x) for x in re.findall(r"^update .* loss ([\d.]+)", printed("learn_rates.py"), re.MULTILINE)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@seldom
def test_influence_is_that_of_leaving_out() -> None:
    """Predicted ranks are those of retraining."""
    output = printed("influence.py")
    table = re.findall(r"^ +[\d.]+ +\d+((?: +-?\d\.\d{3})+)$", output, re.MULTILINE)
    found = [[float(x) for x in row.split()] for row in table]  # for each damping that of every seed
    assert len(found) == depth(2, 4)
    assert min(found[1]) > 0.6  # of the damping that fits the length of training


@seldom
def test_private_training_learns() -> None:
    """The loss falls, and what is spent grows."""
    output = printed("dp_sgd.py")
    losses, spent = column(output, "loss"), column(output, "epsilon")
    assert losses[-1] < losses[0] - 1
    assert sorted(spent) == spent
    assert spent[0] > 0


def test_privacy_spent_is_what_opacus_says() -> None:
    accountants = pytest.importorskip("opacus.accountants.analysis.rdp")
    epsilon = alone("dp_sgd.py")["epsilon"]
    orders = list(range(2, 128))
    for steps, rate, noise, delta in ((60, 0.001, 0.8, 1e-6), (500, 0.02, 1.1, 1e-5)):
        rdp = accountants.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=orders)
        expected, _ = accountants.get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
        assert epsilon(steps, rate, noise, delta) == pytest.approx(expected, rel=1e-9)
