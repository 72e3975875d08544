"""What the cache of embedding rows saves, and what staleness costs: `python examples/benchmarks/cache.py [--auc]`.

Traffic: two workers take turns at one server process; 26 fields, ids by Zipf's law with exponent 1.05, a cache of 10 %
of the rows. Rows fetched are given as shares of all ids looked up, and of the distinct ones in each batch, which is
what a server without caches would send. `--auc` trains `examples/ctr/train.py` under heturun for several bounds
instead. Ignored on purpose: time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hetu.ps import Cache, CachedTable, Client, Options, Parameter, ServerProcess

# Distinct values of the 26 categorical columns of the Criteo display advertising challenge (Kaggle, 2014).
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
          5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]  # fmt: skip
ROWS, COLS, EXPONENT = 100_000, 8, 1.05
TRAIN = Path(__file__).parent.parent / "ctr/train.py"


def scaled(counts: list[int], total: int) -> list[int]:
    """Sizes in the same proportions, at least 3 each, of `total` rows together or a little more."""
    return [max(3, round(count * total / sum(counts))) for count in counts]


def ids_of(fields: list[int], batch: int, rng: np.random.Generator) -> np.ndarray:
    """A batch of ids (batch, fields): each field has a range of its own, its k-th id is drawn with weight k^-1.05."""
    starts = np.cumsum([0, *fields[:-1]])
    edges = [np.cumsum(np.arange(1, n + 1) ** -EXPONENT) for n in fields]
    return np.stack([s + np.searchsorted(e, rng.random(batch) * e[-1]) for s, e in zip(starts, edges)], axis=1)


def traffic(fields: list[int], cache: Cache, batch: int, steps: int) -> tuple[float, float]:
    """Rows fetched as shares of all and of the distinct rows looked up by both workers."""
    rows, rng = sum(fields), np.random.default_rng(0)
    parameter = Parameter((rows, COLS), sparse=True, rule="add", reduce="sum")
    with ServerProcess(Options(2, "token", consistency="asp")) as server:
        clients = [Client([server.address], worker, "token") for worker in range(2)]
        for client in clients:
            client.create({"table": parameter}, {"table": np.zeros((rows, COLS))})
        tables = [CachedTable(client, "table", cache) for client in clients]
        for _ in range(steps):
            for table in tables:
                ids = ids_of(fields, batch, rng)
                table.update(ids, np.ones_like(table.lookup(ids)))
        seen = tables[0].counters + tables[1].counters
        for client in clients:
            client.close()
    return seen.of_lookups, seen.of_unique


def auc(*options: str) -> float:
    """The test AUC of the example under two workers and a server."""
    command = [
        sys.executable,
        "-m",
        "hetu.dist.launch.heturun",
        "-w",
        "2",
        "-s",
        "1",
        sys.executable,
        str(TRAIN),
        *options,
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    return float(re.search(r"test AUC (\S+),", text)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="What a cache of embedding rows saves, and what staleness costs.")
    parser.add_argument("--auc", action="store_true", help="train the example with several bounds")
    parser.add_argument("--epochs", default="12", help="of --auc")
    parser.add_argument("--steps", type=int, default=100, help="of each worker")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512, 1024])
    args = parser.parse_args()
    if args.auc:
        print("bound  test AUC")
        for bound in tqdm([None, 0, 1, 3, 10, 30, 100], leave=False):
            options = ["--cache", "off"] if bound is None else ["--bound", str(bound)]
            tqdm.write(f"{'none' if bound is None else bound:>5}  {auc('--epochs', args.epochs, *options):.4f}")
        return
    shapes = {"as Criteo": scaled(CRITEO, ROWS), "all equal": [ROWS // 26] * 26}
    print("fields     batch  policy  bound  of lookups  of distinct")
    for name, fields in shapes.items():
        for batch in args.batches:
            for policy, bound in (("lru", 10), ("lfu", 10), ("lfuopt", 10), ("lfuopt", 100)):
                found = traffic(fields, Cache(policy, 0.1, bound, bound), batch, args.steps)
                print(
                    f"{name:<9}  {batch:>5}  {policy:<6}  {bound:>5}  {found[0]:>10.3f}  {found[1]:>11.3f}", flush=True
                )


if __name__ == "__main__":
    main()
