"""What wide models gain by being computed entry by entry: `python examples/benchmarks/wide.py`.

100,000 bags of 40 ids each out of 100,000, used by a law of Zipf with exponent 1.05, train a logistic regression (LR),
a factorization machine of 8 features (FM), a field-aware one of 10 fields and 4 features (FFM) and a DeepFM. A round
takes one pass over the data with the pass `join_entries` and one without, in turn; the ratio is the median of rounds.
"rows" are those of tables that a pass over the data writes, of as many as there are entries: what is summed before it
is written counts once. Ignored on purpose: how well they learn, and the loader.

On two cores that others used, too (a load of 11), the ratios and the quartiles of five rounds:

    batches of         LR                 FM                 FFM                DeepFM             rows
    10,000, SGD        3.88 (3.87-4.78)   3.13 (2.70-3.15)   1.78 (1.62-1.79)   2.40 (2.09-2.86)    11%
    10,000, Adam       2.34 (1.98-3.14)   2.13 (2.09-2.14)                                          11%
    1,000, SGD         2.60 (2.49-2.71)   2.64 (2.54-2.80)                                          26%
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from report import Row, print_table

import hetu as ht
from hetu.core.passes import chosen_passes
from hetu.data import BagDataset, DataLoader

FIELDS, ENTRIES = 10, 40  # of a bag
MODELS: dict[str, Callable[..., ht.Node]] = {
    "LR": lambda ids, fields, starts, count, w: ht.models.wide.logistic(ids, starts, count, w),
    "FM": lambda ids, fields, starts, count, w: ht.models.wide.factorization(ids, starts, count, w),
    "FFM": lambda *x: ht.models.wide.field_factorization(*x, field_count=FIELDS),
    "DeepFM": lambda *x: ht.models.wide.deep_factorization(*x, field_count=FIELDS),
}


def bags(count: int, ids: int, exponent: float) -> BagDataset:
    """Bags of which the ids follow a law of Zipf, and lie in any order."""
    rng, law = np.random.default_rng(0), np.arange(1, ids + 1.0) ** -exponent
    drawn = rng.permutation(ids)[rng.choice(ids, count * ENTRIES, p=law / law.sum())]
    fields, weights = np.tile(np.arange(ENTRIES) % FIELDS, count), rng.random(count * ENTRIES)
    return BagDataset(drawn, weights, [ENTRIES] * count, rng.random(count) < 0.3, fields=fields, count=ids)


def measured(model: str, batches: Sequence[tuple[np.ndarray, ...]], args: argparse.Namespace) -> Row:
    """A row of the table."""
    kinds = {"ids": "int64", "weights": "float32", "fields": "int64", "starts": "int64", "labels": "float32"}
    x = {name: ht.placeholder(name, (None,), dtype) for name, dtype in kinds.items()}
    logits = MODELS[model](x["ids"], x["fields"], x["starts"], args.ids, x["weights"])
    loss = ht.mean(ht.binary_cross_entropy_with_logits(logits, x["labels"]))
    train = {"train": [loss, getattr(ht.optim, args.optimizer)(0.01).minimize(loss)]}
    passes = [run.__name__ for run in chosen_passes(None)]
    ways = [ht.Executor(train, passes=p) for p in (passes, [p for p in passes if p != "join_entries"])]
    needed = ways[0].subgraphs["train"].placeholders.values()
    feeds = [{node: a for node, a in zip(x.values(), batch) if node in needed} for batch in batches]
    times, losses = list[list[float]](), list[float]()
    for _ in range(args.rounds + 1):  # the first compiles
        times.append([])
        for executor in ways:
            begun = time.perf_counter()
            losses.append(sum(float(executor.run("train", feed)[0]) for feed in feeds) / len(feeds))
            times[-1].append(1e3 * (time.perf_counter() - begun))
    assert np.allclose(losses[::2], losses[1::2], rtol=1e-4), f"both ways learn the same: {losses}"
    joined, apart = (statistics.median(column) for column in zip(*times[1:]))
    ratios = np.quantile([b / a for a, b in times[1:]], [0.25, 0.5, 0.75]).tolist()
    rows = sum(len(np.unique(batch[0])) for batch in batches) / sum(len(batch[0]) for batch in batches)
    return {"model": model, "joined ms": joined, "apart ms": apart, "ratio": ratios, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Wide models entry by entry, and with a row in memory for each entry.")
    parser.add_argument(
        "models", nargs="*", default=[*MODELS], metavar="MODEL", help="LR, FM, FFM, DeepFM (default: all)"
    )
    parser.add_argument("--bags", type=int, default=100_000, help="in the data (default: %(default)s)")
    parser.add_argument("--ids", type=int, default=100_000, help="that there are (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--optimizer", default="SGD", help="of `ht.optim` (default: %(default)s)")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the law of Zipf (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    batches = [*DataLoader(bags(args.bags, args.ids, args.exponent), args.batch_size)]
    print_table([measured(model, batches, args) for model in args.models])


if __name__ == "__main__":
    main()
