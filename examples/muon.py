"""How many steps Muon needs for the loss that AdamW ends with: train_gpt.py with either, on the same batches.

Two ranks:   python examples/muon.py
Others:      python examples/muon.py --ranks 4 --steps 200 --layers 2     (what it does not know is for train_gpt.py)

It starts train_gpt.py by torchrun, once for each, and compares the losses that they print, means over so many steps.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--lr", default="1e-3", help="AdamW's, of everything")
parser.add_argument("--matrix-lr", default="0.02", help="Muon's")
parser.add_argument("--rest-lr", default="2e-3", help="AdamW's beside Muon")
parser.add_argument("--log-every", type=int, default=20)
args, more = parser.parse_known_args()

torchrun = f"-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node {args.ranks}"
steps = f"--steps {args.steps} --log-every {args.log_every}"
command = [sys.executable, *torchrun.split(), str(Path(__file__).with_name("train_gpt.py")), *steps.split(), *more]


def losses(*flags: str) -> dict[int, float]:
    """By step."""
    run = subprocess.run([*command, *flags], stdout=subprocess.PIPE, text=True, check=True)
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)", run.stdout, re.MULTILINE)}


adamw = losses("--lr", args.lr)
muon = losses("--optimizer", "muon", "--matrix-lr", args.matrix_lr, "--lr", args.rest_lr)
print("  step    AdamW     Muon")
for step, loss in adamw.items():
    print(f"{step:6d}  {loss:7.4f}  {muon[step]:7.4f}")
last = [*adamw.values()][-1]
above = max((step for step, loss in muon.items() if loss > last), default=-1)
below = [step for step in muon if step > above]  # from here on Muon's stays at or below AdamW's last
print(f"Muon has AdamW's loss of {args.steps} steps after " + (f"{below[0] + 1}" if below else f"more than {args.steps}"))
