"""Predict from a census form whether a person earns more than 50,000 dollars: `python examples/ctr/train.py`.

The data has the form of click prediction: a few numbers, and categories that want embeddings and crosses. Two workers
and a server: `heturun -w 2 -s 1 python examples/ctr/train.py --strategy hybrid`. Ignored on purpose: choosing anything
by a validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

import argparse

import models
import numpy as np

import hetu as ht
from hetu import plan, ps

MODELS = {"wide_deep": models.wide_deep, "deepfm": models.deepfm, "dcn": models.dcn}


def census(limit: int | None) -> tuple[ht.data.ArrayDataset, ht.data.ArrayDataset, int]:
    """Train and test part, each x float32 (n, 6) scaled, ids (n, 14) and y float32 (n,); and the number of ids.

    Each column has its own range of ids: a category's is its code, a number's its place among the values seen in
    training, of which at most about 100 are kept apart.
    """
    parts = ht.data.adult("train").take(limit) if limit else ht.data.adult("train"), ht.data.adult("test")
    numbers = [np.log1p(part.arrays[0]) for part in parts]
    mean, std = numbers[0].mean(axis=0), numbers[0].std(axis=0)
    values = [np.unique(column) for column in numbers[0].T]
    edges = [v[:: len(v) // 100 + 1] for v in values]
    sizes = [*map(len, parts[0].info["categorical"].values()), *(len(e) + 1 for e in edges)]
    offsets = np.cumsum([0, *sizes])
    made = []
    for part, x in zip(parts, numbers):
        places = [np.searchsorted(e, column, side="right") for e, column in zip(edges, x.T)]
        ids = np.concatenate([part.arrays[1], np.stack(places, axis=1)], axis=1) + offsets[:-1]
        rows = (x - mean) / std, ids, part.arrays[2].astype("float32")
        made.append(ht.data.ArrayDataset(*rows, names=("x", "ids", "y")))
    return made[0], made[1], int(offsets[-1])


def strategy(name: str, batch_size: int) -> ps.ParameterServer | plan.Hybrid | None:
    """All variables on the servers, or only the tables while the ranks reduce the rest; None on one process."""
    if name == "ps":
        return ps.ParameterServer.from_environment()
    # By bytes tables of only 411 rows would stay on the ranks, and the servers have nothing to do.
    return plan.Hybrid.from_environment(batch_size=batch_size, served=["embedding*"]) if name == "hybrid" else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a click-prediction model on the Adult census.")
    parser.add_argument("--model", choices=MODELS, default="wide_deep")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam; falls to 0 along a cosine")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and dropout")
    parser.add_argument("--limit", type=int, metavar="N", help="train on the first N rows only")
    parser.add_argument(
        "--strategy", choices=["alone", "ps", "hybrid"], default="alone", help="ps, hybrid: by heturun -s"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    train, test, ids_count = census(args.limit)
    even = args.strategy == "ps"  # each worker takes as many rows of a batch
    batches = ht.data.DataLoader(train, args.batch_size, shuffle=True, seed=args.seed, drop_last=even)

    x = ht.placeholder("x", (None, train.arrays[0].shape[1]))
    ids = ht.placeholder("ids", (None, train.arrays[1].shape[1]), "int64")
    t = ht.placeholder("t", (None,))
    y = MODELS[args.model](x, ids, ids_count)
    loss = ht.mean(ht.binary_cross_entropy_with_logits(y, t))
    rate = ht.schedules.cosine(args.learning_rate, steps=args.epochs * len(batches))
    updates = ht.optim.Adam(rate).minimize(loss)

    spread = strategy(args.strategy, args.batch_size)
    executor = ht.Executor({"train": [loss, updates], "eval": [loss, y]}, seed=args.seed, strategy=spread)
    history = ht.fit(
        executor,
        batches,
        epochs=args.epochs,
        inputs=(x, ids, t),
        validate=("eval", ht.data.DataLoader(test, 1000)),
        metrics={"auc": ht.metrics.AUC()},
    )
    if spread is not None and executor.placement.comm.rank:
        return
    print(history)
    print(f"{args.model} on adult: test AUC {history['val_auc'][-1]:.4f}, loss {history['val_loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
