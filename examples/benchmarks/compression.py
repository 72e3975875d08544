"""What fewer bytes to, from and on servers cost: `python examples/benchmarks/compression.py`.

Trains `examples/ctr/train.py` with everything on one server, two workers and no cache, once for each way of
`hetu.ps.Compress`, and prints the bytes of all workers, those that the server counts for its tables, and the AUC on the
test set. With `--memory` it makes a table on a server process instead, and prints the memory of that process (Linux).
Ignored on purpose: the time of a network, which one host has not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hetu import init, ps
from hetu.ps.store.first_values import Drawn

TRAIN = Path(__file__).parent.parent / "ctr/train.py"
WAYS = (  # rows, gradients, values, rows at rest
    ("", "", "", ""),
    ("float16", "float16", "float16", ""),
    ("int8", "int8", "int8", ""),
    ("int8", "topk:0.01", "int8", ""),
    ("int8", "1bit", "int8", ""),
    ("", "", "", "float16"),
    ("", "", "", "int8"),
    ("int8", "int8", "int8", "int8"),
)
OPTIONS = ("--rows", "--gradients", "--values", "--at-rest")
ROWS, COLUMNS, BATCH, STEPS = 1_000_000, 64, 4096, 50


def measured(epochs: str, way: tuple[str, ...]) -> tuple[float, float, float]:
    """Megabytes, kilobytes of tables and the AUC of one training."""
    options = [word for pair in zip(OPTIONS, way) if pair[1] for word in pair]
    command = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "-s", "1", sys.executable, str(TRAIN)]
    asked = [*command, "--strategy", "ps", "--cache", "off", "--epochs", epochs, *options]
    text = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=600).stdout
    patterns = (r"to and from servers +([0-9.,]+) MB", r"tables on servers +([0-9.,]+) kB", r"test AUC ([0-9.]+),")
    moved, tables, auc = (float(re.search(pattern, text)[1].replace(",", "")) for pattern in patterns)
    return moved, tables, auc


def resident(process: int) -> float:
    """Megabytes of memory that a process holds."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) / 1e3


def lying(how: str) -> tuple[float, float, float, float]:
    """Of a table at rest: megabytes by which a server grows, those it counts, and milliseconds of a push and a pull."""
    rng, took = np.random.default_rng(0), list[list[float]]()
    options = ps.Options(workers=1, token="secret", consistency="asp")
    with ps.ServerProcess(options) as server, ps.Client([server.address], worker=0, token="secret") as client:
        before = resident(server.process.pid)
        table = ps.Parameter((ROWS, COLUMNS), sparse=True, at_rest=how)
        law = init.law_of(init.normal(0.01), table.shape)
        client.create({"table": table}, {"table": [Drawn(law, table.shape, [0])]})
        for _ in range(STEPS):
            ids = np.sort(rng.choice(ROWS, BATCH, replace=False))
            gradient = rng.standard_normal((BATCH, COLUMNS)).astype("float32")
            times = [time.perf_counter()]
            client.push_rows("table", ids, gradient).wait()
            times.append(time.perf_counter())
            client.pull_rows("table", ids).wait()
            times.append(time.perf_counter())
            took.append(np.diff(times).tolist())
        grown, counted = resident(server.process.pid) - before, client.status()[0]["bytes"] / 1e6
    push, pull = 1e3 * np.median(took, axis=0)
    return grown, counted, push, pull


def main() -> None:
    parser = argparse.ArgumentParser(description="What fewer bytes to, from and on servers cost.")
    parser.add_argument("--epochs", default="12", help="passes over the data (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="the memory of a server with a table of 256 MB instead")
    args = parser.parse_args()
    if args.memory:
        print("at rest  MB grown  MB counted  ms push  ms pull")
        for how in tqdm(("", "float16", "int8"), leave=False):
            grown, counted, push, pull = lying(how)
            tqdm.write(f"{how or '-':<7}  {grown:>8.1f}  {counted:>10.1f}  {push:>7.2f}  {pull:>7.2f}")
        return
    print("rows     gradients  values   at rest        MB  kB of tables  test AUC")
    for way in tqdm(WAYS, leave=False):
        moved, tables, auc = measured(args.epochs, way)
        rows, gradients, values, rest = (name or "-" for name in way)
        tqdm.write(f"{rows:<7}  {gradients:<9}  {values:<7}  {rest:<7}  {moved:>8.1f}  {tables:>12.1f}  {auc:.4f}")


if __name__ == "__main__":
    main()
