"""The benchmarks run at their smallest sizes, give figures for every mode, and count what they say they count."""

from __future__ import annotations

import functools
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from depth import depth, mark_seldom, seldom
from ranks import launch
from torch.utils import _pytree as pytree

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
LAYERS, DIM, SEQ = 3, 64, 8  # slices of eight ranks have no padding
GPT = f"--layers {LAYERS} --dim {DIM} --heads 2 --seq {SEQ} --batch 1"
PEERS = "--rounds 1 --warmup 0 --layers 1 --dim 32 --heads 2 --seq 16 --batch 1 --modes plain,DDP,FSDP2,fs --no-memory"
LLAMA = "--layers 1 --dim 64 --heads 2 --ffn 32 --vocab 32 --seq 4 --batch 1"
CPU = f"--device cpu --backend gloo --dtype float32 {LLAMA} --rounds 1 --warmup 0"

BLOCK = 4 * (12 * DIM * DIM + 13 * DIM)
"""Bytes of a block: four matrices of 12 dim^2 elements with 9 dim biases, and two norms of 2 dim each."""


@functools.cache
def run(name: str, flags: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and its last line as JSON; AssertionError with all it said if it fails."""
    output = launch(1, BENCHMARKS / f"{name}.py", *shlex.split(flags))
    result = json.loads(output.splitlines()[-1])
    assert result["benchmark"] == name
    return output, result


def numbers(figures: object) -> list[float]:
    """Every figure; None stands for one that this machine does not have."""
    return [x for x in pytree.tree_leaves(figures) if isinstance(x, (int, float))]


def all_finite(figures: object) -> bool:
    return bool(numbers(figures)) and all(map(math.isfinite, numbers(figures)))


Figures = dict[str, Any]


def grows_as_steps_do(of: Figures) -> bool:
    """Scan's peaks grow by fewer states than steps, those of loops by more; every mode gives the same gradient."""
    grown = {mode: known["16"]["peak"] - known["4"]["peak"] for mode, known in of.items()}
    apart = {mode: known["16"]["difference"] < (1e-4 if mode == "TorchOpt" else 1e-10) for mode, known in of.items()}
    return grown["TorchOpt"] > 1.5 * grown["all"] > 3 * grown["sqrt"] > 3 * grown["log"] > 0 and all(apart.values())


def sums_are_wide(of: Figures) -> bool:
    """A sum in float32 of what is rounded once is nearer than one in bf16; bytes are those of the dtype and the scales."""
    errors = {mode: one["error"] for mode, one in of.items()}
    near = 0 < errors["fs codec bf16"] < min(errors["fs reduce bf16"], errors["FSDP2 reduce bf16"]) < 0.01
    return near and [one["bytes"] * 4 / 3 for one in of.values()] == pytest.approx([4, 2, 4, 2, 2, 1.0625])


def owners_receive_what_a_gather_does(of: Figures) -> bool:
    """Of two ranks; and of eight a fourth: the matrices differ in size."""
    arriving, matrices = {mode: one["arriving bytes"] for mode, one in of.items()}, 2 * 4 * 12 * DIM * DIM
    muon = arriving["fs.optim.muon"]
    assert arriving["gathered"] == {"2": 2 * BLOCK, "8": 2 * BLOCK}
    return muon["2"] == pytest.approx(matrices, rel=0.1) and 0.2 * matrices < muon["8"] < 0.3 * matrices


def small_state(of: Figures) -> bool:
    """Each part's first mode has a ratio of 1; all norms are one collective, and eight bits a quarter of the state."""
    assert all(next(iter(modes.values()))["over the first"] == 1 for modes in of.values())
    assert of["norms"]["fs"]["collectives"] == of["finite"]["fs, apply_if_finite"]["collectives"] == 1
    return of["state"]["quantized_state"]["state bytes"] < 0.3 * of["state"]["float32"]["state bytes"]


def fewer_bytes_move(of: Figures) -> bool:
    """The more ranks experts are split over."""
    moved = [of[f"moe: fs {mode}"]["moved bytes"] for mode in ("gathered", "expert 2", "expert")]
    return of["llama: DTensor"]["over torch"] == of["moe: FSDP2"]["over torch"] == 1 and moved[0] > moved[1] > moved[2] > 0


def blocks_share_a_graph(of: Figures) -> bool:
    """Two or three of them, each compiled."""
    graphs = {mode: [count for _, count in known.values()] for mode, known in of.items()}
    return graphs == {"eager cold": [0, 0], **{f"{mode} cold": [1, 1] for mode in ("FSDP2", "units", "step")}}


def every_size_has_rows(of: Any) -> bool:
    """Each number of units and ranks, and a Llama of 405 billion parameters."""
    rows = {(one["what"], one["units"], one["ranks"]) for one in of}
    asked = {("Llama 405B: on", 127, 16384), *((what, n, 8) for what in ("shard", "forward", "step") for n in (2, 5))}
    return asked | {("on", n, ranks) for n in (2, 5) for ranks in (8, 16384)} < rows and len(rows) == len(of)


def every_mode_has_a_ratio(of: Figures) -> bool:
    """To every base: 1 to itself, and not to all."""
    bases = ["plain", "DDP", "FSDP2"]
    own = all(of[base][f"over {base}"] == 1 for base in bases)
    return own and list(of) == [*bases, "fs"] and len({one["over plain"] for one in of.values()}) > 1


HIGHER = f"--backend aot_eager {GPT} --rounds 1 --warmup 0 --modes"
LORA = "--layers 1 --dim 64 --ffn 128 --heads 2 --rank 2 --seq 16 --batch 1 --rounds 1 --warmup 0 --pretrain 1 --adapt 5"
RUNS: dict[str, tuple[str, str, Callable[[Figures], bool]]] = {
    "chunked": (
        "chunked", "--words 2000 --dim 16 --tokens 128 --chunks 8 --rounds 1",
        lambda of: all(one["chunked"] < one["whole"] / 2 for one in of.values())),
    "attention": (
        "attention", "--lengths 256,512 --block 32 --rounds 1",
        lambda of: of["512"]["blocks"] < 2.2 * of["256"]["blocks"] and of["512"]["math"] > 3.5 * of["256"]["math"]),
    **{f"higher, {mode}": (
        "higher", f"{HIGHER} '{mode}'",
        lambda of, mode=mode: of[mode]["no prefetch"]["peak bytes"] <= of[mode]["eager"]["peak bytes"])
        for mode in ("hvp", "per sample")},
    "scan": ("scan", "--steps 4,16 --layers 1 --dim 16 --seq 8 --batch 2", grows_as_steps_do),
    "daily": ("daily", "--rounds 1 --warmup 0 --layers 1 --dim 64 --heads 2 --seq 8", small_state),
    "encoded": ("encoded", "--runs 1 --elements 6400 --layers 1 --dim 64 --heads 2 --seq 8 --batch 1", sums_are_wide),
    "stream": (
        "stream", "--layers 4 --dim 64 --bucket 20000 --rounds 1 --warmup 0 --no-peaks",
        lambda of: [of[mode]["received"] for mode in ("FSDP2", "stream_full", "stream_full, bf16")] == [0.5, 0.5, 0.25]),
    "axes": ("axes", "--rounds 1 --warmup 0 --layers 1 --dim 32 --hidden 64 --seq 8 --batch 1", fewer_bytes_move),
    "lora": (
        "lora", LORA, lambda of: of["fs"]["at rest of bf16"] == 2 and 0.28125 <= of["fs QLoRA"]["at rest of bf16"] < 0.2813),
    "matrices": ("matrices", "--layers 2 --dim 64 --seq 8 --rounds 1 --warmup 0", owners_receive_what_a_gather_does),
    "peers": ("peers", PEERS, every_mode_has_a_ratio),
    "compile": ("compile", "--blocks 2,3 --modes eager,FSDP2,units,step", blocks_share_a_graph),
    "buckets": (
        "comm", "--buckets --sizes 1,64 --rounds 2 --warmup 1",
        lambda of: [one["MB/s"] * one["ms"] for one in of.values()] == pytest.approx([1.024, 65.536])),
    "scale": ("scale", "--units 2,5 --ranks 8,16384 --rounds 1", every_size_has_rows),
    "host": (
        "host", "--rounds 1 --modes plain,FSDP2,shard,torch.func,bare --blocks 2",
        lambda of: of["bare"]["collectives"] - of["shard"]["collectives"] == 2),
    "checkpoint": (
        "checkpoint", "--layers 2 --dim 16 --rounds 2 --warmup 0 --no-peaks",
        lambda of: all(one["s"] > 0 < one["over DCP"] for one in of["modes"].values())),
}  # fmt: skip
NEEDS = {"scan": ["torchopt"], "lora": ["peft", "transformers"]}


@pytest.mark.parametrize("case", mark_seldom(RUNS, "peers", "buckets", "host"))
def test_figures(case: str, tmp_path: Path) -> None:
    """Of benchmarks of one part each: all are numbers and in the table, and say what the guide says of them."""
    name, flags, holds = RUNS[case]
    for library in NEEDS.get(name, []):
        pytest.importorskip(library)
    table, result = run(name, flags + (f" --folder {tmp_path}" if name == "checkpoint" else ""))
    assert all_finite(result["figures"])
    modes = result["figures"] if isinstance(result["figures"], dict) else {}
    assert all(mode.removesuffix(" cold") in table for mode in modes.get("modes", modes))
    assert holds(result["figures"])
    assert not list(tmp_path.iterdir())


@seldom
def test_operators_of_a_step() -> None:
    """The limit for the 8-block GPT: 1.4 times the plain step's operators, 1.1 where nothing is gathered twice."""
    flags = "--ranks 8 --layers 8 --dim 16 --heads 2 --seq 8 --batch 1 --modes"
    figures = run("comm", f"{flags} 'plain,fs,fs keep,fs P()'")[1]["figures"]["8"]
    assert 1 < figures["fs"]["ops"] <= 1.4
    assert 1 < figures["fs keep"]["ops"] <= 1.1
    assert figures["fs P()"]["ops"] <= 1.1


@seldom
def test_gpu_runs_without_one() -> None:
    """Every mode on one rank and on a fake group, but for peak memory; funshard copies each gradient once."""
    some = "--modes 'plain,FSDP2,fs,fs keep,fs compiled,fs torch.func'"  # what compiles takes longest
    table, result = run("gpu", f"{CPU} --compiler aot_eager {depth(some, '')}")
    modes = result["arguments"]["modes"].split(",")
    assert "failed" not in table
    for part in ("1", "8"):
        figures = result["figures"][part]
        assert list(figures) == modes
        for one in figures.values():
            assert one["ms"] > 0
            assert len(one["over plain"]) == len(one["over FSDP2"]) == 3
            assert all_finite(one)
        assert [figures[mode]["copied"] for mode in ("plain", "fs", "fs keep", "fs torch.func")] == [0, 1, 1, 1]


@seldom
def test_memory() -> None:
    """The exact figures are within their limits, and all whole steps, FSDP2's too, train the same model."""
    modes = "shard,remat,save attention,save products,one micro-batch,accumulate shards,AdamW,AdamW in backward,all of it"
    size = f"--layers {depth(4, 8)} --dim 32 --heads 2 --seq 32 --batch 4 --micro 4 --rounds 1 --warmup 0 --peaks 1"
    table, result = run("memory", f"{size} --modes '{modes},FSDP2 all of it'")
    figures, limits = result["figures"]["modes"], result["figures"]["limits"]
    assert all(f"\n{mode} " in table and one["step"] > 0 for mode, one in figures.items())
    exact = {name: limit for name, limit in limits.items() if not name.startswith("all of it")}
    assert len(exact) == 8
    assert all(0 < figure <= limit for figure, limit in exact.values())
    beyond, sums = exact["accumulate shards: bytes beyond one micro-batch's peak; its sums of gradients, and losses"]
    assert beyond == sums
    after, inside = (figures[mode]["alive"]["slices"] for mode in ("AdamW", "AdamW in backward"))
    assert inside < after / 2
    losses = [one["loss"] for one in figures.values() if one["loss"] is not None]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
