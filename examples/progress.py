"""The progress of a training run: a line that rewrites itself on a terminal, plain lines in a file, and a plot."""

import sys
import time
from collections.abc import Sequence
from typing import Any

try:
    from tqdm import tqdm
except ImportError:  # plain lines everywhere
    tqdm = None

FORMATS = {"loss": ".4f", "norm": ".4f", "lr": ".2e", "tokens/s": ",.0f", "bytes per rank": ",d", "seconds a step": ".3f"}


class Progress:
    """Shows the numbers of a run's steps on the first rank, and keeps them for a plot.

    Args:
        steps: The number of steps.
        first: The step to begin with, where a run goes on.
        shown: Whether this process prints: True on the first rank.
    """

    def __init__(self, steps: int, first: int = 0, *, shown: bool = True) -> None:
        self.steps, self.shown = steps, shown
        self.history: list[dict[str, float]] = []
        self._first, self._start = first, time.perf_counter()
        is_terminal = shown and tqdm is not None and sys.stdout.isatty()
        self._bar: Any = tqdm(total=steps, initial=first, unit="step", file=sys.stdout) if is_terminal and tqdm else None

    def show(self, step: int, **numbers: float) -> None:
        """Show the numbers of a step by name, such as ``loss=``, with the time that is left."""
        self.history.append({"step": step, **numbers})
        if not self.shown:
            return
        text = "  ".join(f"{name} {x:{FORMATS.get(name, '.4g')}}" for name, x in numbers.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step + 1 - self._bar.n)
            if step == self.steps - 1:
                self._bar.close()
            return
        seconds = (time.perf_counter() - self._start) / (step + 1 - self._first) * (self.steps - 1 - step)
        print(f"step {step:5d}  {text}  left {int(seconds) // 60}:{int(seconds) % 60:02d}", flush=True)

    def plot(self, path: str, names: Sequence[str] = ("loss", "lr", "tokens/s", "bytes per rank")) -> None:
        """Write a picture of these numbers over steps; its format is that of the path's suffix. Needs matplotlib."""
        if not self.shown:
            return
        from matplotlib.figure import Figure  # drawn without a display
        from matplotlib.ticker import EngFormatter

        figure = Figure(figsize=(8, 2 * len(names)), layout="constrained")
        axes = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for axis, name in zip(axes, names, strict=True):
            known = [(numbers["step"], numbers[name]) for numbers in self.history if name in numbers]
            axis.plot(*zip(*known, strict=True), marker=".")
            axis.set_ylabel(name)
            if name in ("tokens/s", "bytes per rank"):  # sizes: from zero, with k, M and G
                axis.set_ylim(bottom=0)
                axis.yaxis.set_major_formatter(EngFormatter())
            axis.grid(visible=True, alpha=0.3)
        axes[-1].set_xlabel("step")
        figure.savefig(path)
