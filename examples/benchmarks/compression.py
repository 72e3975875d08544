"""What travels to and from servers, and what fewer bytes of it cost: `python examples/benchmarks/compression.py`.

Trains `examples/ctr/train.py` with everything on one server, two workers and no cache, once for each way of
`hetu.ps.Compress`, and prints the bytes of all workers and the AUC on the test set. Ignored on purpose: time, which on
one host is that of coding and not of a network.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

TRAIN = Path(__file__).parent.parent / "ctr/train.py"
WAYS = (  # rows, gradients, values
    ("", "", ""),
    ("float16", "float16", "float16"),
    ("int8", "int8", "int8"),
    ("int8", "topk:0.01", "int8"),
    ("int8", "1bit", "int8"),
)


def measured(epochs: str, way: tuple[str, str, str]) -> tuple[float, float]:
    """Megabytes and the AUC of one training."""
    options = [word for pair in zip(("--rows", "--gradients", "--values"), way) if pair[1] for word in pair]
    command = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "-s", "1", sys.executable, str(TRAIN)]
    asked = [*command, "--comm", "ps", "--cache", "off", "--epochs", epochs, *options]
    text = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=600).stdout
    moved = re.search(r"to and from servers +([0-9.,]+) MB", text)[1].replace(",", "")
    return float(moved), float(re.search(r"test AUC (\S+),", text)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="What fewer bytes to and from servers cost.")
    parser.add_argument("--epochs", default="12")
    args = parser.parse_args()
    print("rows     gradients  values         MB  test AUC")
    for way in tqdm(WAYS, leave=False):
        moved, auc = measured(args.epochs, way)
        rows, gradients, values = (name or "-" for name in way)
        tqdm.write(f"{rows:<7}  {gradients:<9}  {values:<7}  {moved:>8.1f}  {auc:.4f}")


if __name__ == "__main__":
    main()
