"""What the cache of embedding rows saves, and what staleness costs: `python examples/benchmarks/cache.py [--auc]`.

Traffic: two workers take turns at one server process; 26 fields, ids by Zipf's law with exponent 1.05, or all alike, a
cache of 10 % of the rows. Rows fetched are given as shares of all ids looked up, and of the distinct ones in each
batch, which is what a server without caches would send; bytes, both ways, as shares of those without a cache. `--auc`
trains `examples/ctr/train.py` under heturun for several bounds instead. Ignored on purpose: time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hetu.ps import Cache, CachedTable, Client, Counters, Options, Parameter, ServerProcess

# Distinct values of the 26 categorical columns of the Criteo display advertising challenge (Kaggle, 2014).
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
          5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]  # fmt: skip
ROWS, COLS, EXPONENT = 100_000, 16, 1.05
TRAIN = Path(__file__).parent.parent / "ctr/train.py"


def scaled(counts: list[int], total: int) -> list[int]:
    """Sizes in the same proportions, at least 3 each, of `total` rows together or a little more."""
    return [max(3, round(count * total / sum(counts))) for count in counts]


def ids_of(fields: list[int], batch: int, rng: np.random.Generator, exponent: float = EXPONENT) -> np.ndarray:
    """A batch of ids (batch, fields): each field has a range of its own, its k-th id is drawn with weight
    k^-exponent."""
    starts = np.cumsum([0, *fields[:-1]])
    edges = [np.cumsum(np.arange(1.0, n + 1) ** -exponent) for n in fields]
    return np.stack([s + np.searchsorted(e, rng.random(batch) * e[-1]) for s, e in zip(starts, edges)], axis=1)


def traffic(
    fields: list[int], cache: Cache | None, batch: int, steps: int, exponent: float = EXPONENT
) -> tuple[float, float, int]:
    """Rows fetched as shares of all and of the distinct rows looked up by both workers, and the bytes moved."""
    rows, rng = sum(fields), np.random.default_rng(0)
    parameter = Parameter((rows, COLS), sparse=True, rule="add", reduce="sum")
    with ServerProcess(Options(2, "token", consistency="asp")) as server:
        clients = [Client([server.address], worker, "token") for worker in range(2)]
        for client in clients:
            client.create({"table": parameter}, {"table": np.zeros((rows, COLS))})
        tables = [CachedTable(client, "table", cache) for client in clients] if cache else []
        before = clients[0].status()[0]
        for _ in range(steps):
            for worker, client in enumerate(clients):
                ids = ids_of(fields, batch, rng, exponent)
                if tables:
                    tables[worker].update(ids, np.ones_like(tables[worker].lookup(ids)))
                else:
                    client.push_rows("table", ids, np.ones_like(client.pull_rows("table", ids).wait())).wait()
        for table in tables:
            table.flush()
        after = clients[0].status()[0]
        seen = sum((table.counters for table in tables), Counters())
        for client in clients:
            client.close()
    return seen.of_lookups, seen.of_unique, sum(after[way] - before[way] for way in ("received", "sent"))


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
    parser.add_argument("--epochs", default="12", help="of --auc (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of each worker (default: %(default)s)")
    for option, kind, tried, of in (
        ("--policies", str, ["lru", "lfu", "lfuopt", "auto"], "which rows are kept"),
        ("--bounds", int, [0, 1, 10, 100], "updates that a cached row may lag behind"),
        ("--batches", int, [128, 512, 1024], "samples of a batch"),
    ):
        shown = " ".join(map(str, tried))
        parser.add_argument(option, type=kind, nargs="+", default=tried, help=f"{of} (default: {shown})")
    args = parser.parse_args()
    if args.auc:
        print("bound  test AUC")
        for bound in tqdm([None, 0, 1, 3, 10, 30, 100], leave=False):
            options = ["--cache", "off"] if bound is None else ["--bound", str(bound)]
            tqdm.write(f"{'none' if bound is None else bound:>5}  {auc('--epochs', args.epochs, *options):.4f}")
        return
    shapes = {"as Criteo": scaled(CRITEO, ROWS), "all equal": [ROWS // 26] * 26}
    print("ids   fields     batch  policy  bound  of lookups  of distinct  of bytes")
    kinds = [("zipf", EXPONENT, name) for name in shapes] + [("flat", 0.0, "all equal")]
    for (law, exponent, name), batch in product(kinds, args.batches):
        fields = shapes[name]
        plain = traffic(fields, None, batch, args.steps, exponent)[2]
        for policy, bound in product(args.policies, args.bounds):
            cache = Cache(policy, 0.1, bound, bound)
            of_lookups, of_distinct, moved = traffic(fields, cache, batch, args.steps, exponent)
            shares = f"{of_lookups:>10.3f}  {of_distinct:>11.3f}  {moved / plain:>8.3f}"
            print(f"{law}  {name:<9}  {batch:>5}  {policy:<6}  {bound:>5}  {shares}", flush=True)


if __name__ == "__main__":
    main()
