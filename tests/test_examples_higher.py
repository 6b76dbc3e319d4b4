"""The examples of higher orders: what they say, on any number of ranks, is what plain torch says on the joined batch."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from depth import depth, seldom
from ranks import Pool
from test_examples import EXAMPLES
from torch import Tensor

import funshard as fs

sys.path.append(str(EXAMPLES))


def numbers(output: str) -> list[float]:
    """Every number with decimals, in order."""
    return [float(x) for x in re.findall(r"-?\d+\.\d{5,}", output)]


def column(output: str, name: str) -> list[float]:
    """What the progress lines say."""
    return [float(x) for x in re.findall(rf"^step .* {name} ([\d.]+)", output, re.MULTILINE)]


SMALLER: dict[str, dict[str, Any]] = depth(
    {
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
    },
    {},
)
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
    path, names = EXAMPLES / name, Constants(SMALLER.get(name, {}))
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


def check_printed(output: str, name: str) -> None:
    """Two ranks print to 1e-6 what one does: the same model and batch in total, in float64; and it checked itself."""
    one = printed(name)
    assert "1 ranks" in one
    assert "2 ranks" in output
    assert len(numbers(one)) >= 2
    assert numbers(output) == pytest.approx(numbers(one), rel=1e-6)


EXAMPLE = ["sharpness", "spectrum", "sam", "maml", "meanflow", "ensemble", "data_weights", "learn_rates", "influence", "dp_sgd"]


@seldom
@pytest.mark.parametrize("name", EXAMPLE)
def test_two_ranks_print_what_one_does(gloo2: Pool, name: str) -> None:
    check_printed(gloo2.run(printed_on_this_rank, f"{name}.py")[0], f"{name}.py")


# --- the spectrum of the Hessian ---
@seldom
def test_products_are_more_exact_than_differences() -> None:
    table = re.findall(r"^(fs.hvp|differences, h = \S+) +(\S+) +(\S+) +[\d.]+$", printed("spectrum.py"), re.MULTILINE)
    product, *differences = [(float(single), float(half)) for _, single, half in table]
    assert len(differences) == 5
    assert product[0] < 1e-6 < 1e-5 < min(single for single, _ in differences)
    assert product[1] < 0.05 < min(half for _, half in differences)


# --- sharpness-aware minimisation ---
@seldom
def test_sharpness_aware_minimisation_ends_flatter() -> None:
    plain, flat = (float(x) for x in re.findall(r"sharpness ([\d.]+)", printed("sam.py")))
    assert 0.1 < flat < 0.85 * plain


# --- MAML ---
def test_maml_learns_to_learn() -> None:
    losses = column(printed("maml.py"), "steps")
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 3


# --- MeanFlow ---
# --- ensembles ---
def test_the_ensemble_is_better_than_its_members() -> None:
    output = printed("ensemble.py")
    single, ensemble = (float(x) for x in re.search(r"a member ([\d.]+), the ensemble ([\d.]+)", output).groups())
    assert ensemble < single - 0.02
    first, last = (numbers(line) for line in re.findall("^step.*", output, re.MULTILINE)[::3])
    assert all(end < start - depth(1, 1.5) for start, end in zip(first, last, strict=True))


# --- implicit differentiation ---
def hypergradient_on_this_rank(rank: int) -> tuple[str, fs.Params, fs.Params, fs.Params]:
    given = names_of("implicit.py")
    full = fs.unshard(given["params"], given["spec"])
    return given["printed"], full, given["strengths"], given["hypergradient"](given["params"], given["strengths"])


def dense_hypergradient(given: dict[str, Any], full: fs.Params, strengths: fs.Params) -> fs.Params:
    """By the Hessian of multinomial regression, written out and solved; asserts that ``full`` is the minimum of training."""
    tables = [name for name in full if name != "bias"]
    weights = torch.cat([full["bias"][None], *(full[name] for name in tables)])  # [1 + 256 * distances, kinds]

    def features(x: Tensor) -> Tensor:
        return torch.cat([torch.ones(len(x), 1), *(F.one_hot(byte.long(), 256) for byte in x.unbind(-1))], 1).double()

    a, a_val = features(given["x"]), features(given["x_val"])
    each = torch.tensor([strengths[""], *(strengths[name.removesuffix(".weight")] for name in tables)]).exp()
    strength = each.repeat_interleave(torch.tensor([1] + [256] * len(tables)))
    seen = torch.cat([a, a_val]).any(0)  # of the other bytes weights and gradients are zero, and a row of the Hessian is theirs
    assert not weights[~seen].any()
    a, a_val, weights, strength = a[:, seen], a_val[:, seen], weights[seen], strength[seen]

    def slope(a: Tensor, y: Tensor) -> Tensor:
        return a.T @ ((a @ weights).softmax(-1) - F.one_hot(y, weights.shape[1])) / len(a)

    assert (slope(a, given["y"]) + strength[:, None] * weights).norm() < 1e-8
    p = (a @ weights).softmax(-1)
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(a)
    hessian = (
        torch.einsum("nkl,ni,nj->ikjl", curvature, a, a).flatten(2).flatten(0, 1)
        + strength.repeat_interleave(weights.shape[1]).diag()
    )
    q = torch.linalg.solve(hessian, slope(a_val, given["y_val"]).flatten()).view_as(weights)
    parts = torch.zeros(len(seen), dtype=torch.float64)
    parts[seen] = -(strength[:, None] * weights * q).sum(1)
    sums = [part.sum() for part in parts.split([1] + [256] * len(tables))]
    return dict(zip(["", *(name.removesuffix(".weight") for name in tables)], sums, strict=True))


@seldom
def test_hypergradient_on_real_ranks_is_that_of_a_dense_solve(gloo2: Pool) -> None:
    (output, *_), _ = results = gloo2.run(hypergradient_on_this_rank)
    check_printed(output, "implicit.py")
    _, *trained, _ = results[0]
    expected = dense_hypergradient(alone("implicit.py"), *trained)
    assert min(g.abs() for g in expected.values()) > 1e-3
    for _, *same, got in results:
        torch.testing.assert_close(same, trained, rtol=0, atol=0)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@seldom
def test_hypergradients_lead_to_a_better_validation_loss() -> None:
    losses = column(printed("implicit.py"), "loss")
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.05


# --- gradients through training ---
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


# --- influence functions ---
@seldom
def test_influence_is_that_of_leaving_out() -> None:
    """Predicted ranks are those of retraining."""
    output = printed("influence.py")
    table = re.findall(r"^ +[\d.]+ +\d+((?: +-?\d\.\d{3})+)$", output, re.MULTILINE)
    found = [[float(x) for x in row.split()] for row in table]  # for each damping that of every seed
    assert len(found) == depth(2, 4)
    assert min(found[1]) > 0.6  # of the damping that fits the length of training


# --- dp_sgd ---
@seldom
def test_private_training_learns() -> None:
    """The loss falls, and what is spent grows."""
    output = printed("dp_sgd.py")
    losses, spent = column(output, "loss"), column(output, "epsilon")
    assert losses[-1] < losses[0] - 1
    assert sorted(spent) == spent
    assert spent[0] > 0


def test_privacy_spent_on_whole_batches_is_that_of_the_gaussian_mechanism() -> None:
    """With every sample in every batch its Renyi divergence of order a is a / (2 noise^2)."""
    epsilon = alone("dp_sgd.py")["epsilon"]
    for steps, noise, delta in ((1, 2.0, 1e-5), (20, 5.0, 1e-6)):
        bounds = [
            steps * a / (2 * noise**2) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
            for a in range(2, 128)
        ]
        assert epsilon(steps, 1 - 1e-12, noise, delta) == pytest.approx(min(bounds), rel=1e-6)


def test_privacy_spent_is_what_opacus_says() -> None:
    accountants = pytest.importorskip("opacus.accountants.analysis.rdp")
    epsilon = alone("dp_sgd.py")["epsilon"]
    orders = list(range(2, 128))
    for steps, rate, noise, delta in ((60, 0.001, 0.8, 1e-6), (500, 0.02, 1.1, 1e-5)):
        rdp = accountants.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=orders)
        expected, _ = accountants.get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
        assert epsilon(steps, rate, noise, delta) == pytest.approx(expected, rel=1e-9)
