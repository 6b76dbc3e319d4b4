"""What a benchmark prints and writes: a table, its figures as one line of JSON, and with --save as a file for the guide."""

import argparse
import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LOCAL = {"json", "save", "folder", "step"}
"""Arguments that say where something goes, which are nobody else's."""


def add_model_options(
    parser: argparse.ArgumentParser, *, layers: int = 8, dim: int = 384, heads: int = 6, seq: int = 128, batch: int = 4
) -> None:
    """Add the sizes of the GPT and of a rank's batch, with these defaults: a model of 14 million parameters."""
    for name, size in {"layers": layers, "dim": dim, "heads": heads, "seq": seq, "batch": batch}.items():
        parser.add_argument(f"--{name}", type=int, default=size)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on where the figures go."""
    parser.add_argument("--json", help="where to write the figures; printed as one line if not given")
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help="also write results/NAME.json (the script's name)")


def report(head: Sequence[str], rows: Sequence[Sequence[str]], figures: object, args: argparse.Namespace) -> None:
    """Print a table and, as one line of JSON, the figures; those into ``args.json`` instead if it names a file."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())
    name = Path(sys.argv[0]).stem
    arguments = {key: value for key, value in vars(args).items() if key not in LOCAL}
    text = json.dumps({"benchmark": name, "torch": torch.__version__, "arguments": arguments, "figures": figures})
    if args.json:
        Path(args.json).write_text(text + "\n")
    else:
        print(text)
    if args.save is not None:
        save(args.save or name, {"benchmark": name, **environment(), "arguments": arguments, "figures": rounded(figures)})


def save(name: str, result: Mapping[str, Any]) -> None:
    """Write a file of results, from which the tables of README and guide are (tests/pages/test_benchmarks.py)."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Return the date, the versions and the machine, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    version = re.search(r'^version = "(.*)"$', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.MULTILINE)
    machine = {"cpu": cpu, "cores": os.cpu_count(), "memory GB": round(memory / 1e9)}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "funshard": version and version[1]},
        "machine": machine,
    }


def rounded(figures: Any) -> Any:
    """Return the figures with five digits."""
    if isinstance(figures, Mapping):
        return {str(key): rounded(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [rounded(value) for value in figures]
    return float(f"{figures:.5g}") if isinstance(figures, float) else figures
