"""Predict from a census form whether a person earns more than 50,000 dollars: `python examples/ctr/train.py`.

The data has the form of click prediction: a few numbers, and categories that want embeddings and crosses. Two workers
and a parameter server: `heturun -w 2 -s 1 python examples/ctr/train.py`; then dense parameters are reduced among the
workers, and embeddings live on the server, with a cache at each worker. Ignored on purpose: choosing anything by a
validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

import argparse

import models
import numpy as np

import hetu as ht
from hetu import dist, plan, ps, strategies
from hetu.ps.wire.environment import has_servers, place

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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a click-prediction model on the Adult census.")
    parser.add_argument("--model", choices=MODELS, default="wide_deep")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam; falls to 0 along a cosine")
    parser.add_argument(
        "--table-rate", type=float, default=0.3, help="of plain gradient descent on the tables, likewise"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and dropout")
    parser.add_argument("--limit", type=int, metavar="N", help="train on the first N rows only")
    spread = parser.add_argument_group("several workers, under heturun")
    spread.add_argument(
        "--comm",
        choices=["allreduce", "ps", "hybrid"],
        help="where gradients meet: among workers, on servers, or (with servers the default) only tables' there",
    )
    spread.add_argument(
        "--consistency",
        type=ps.consistency,
        metavar="MODE",
        help="of the servers: bsp, asp, or ssp:3 (default: theirs)",
    )
    spread.add_argument(
        "--cache",
        choices=["lru", "lfu", "lfuopt", "hot", "auto", "off"],
        default="lfuopt",
        help="which rows workers keep; auto: none while that saves less than 10%% of the bytes",
    )
    spread.add_argument("--cache-rows", type=float, default=0.5, metavar="SHARE", help="of each table")
    spread.add_argument("--bound", type=int, default=10, help="updates that a cached row may lag behind")
    spread.add_argument("--rows", default="", metavar="HOW", help="rows to and from servers as float16 or int8")
    spread.add_argument("--gradients", default="", metavar="HOW", help="others as float16, int8, topk:0.01 or 1bit")
    spread.add_argument("--values", default="", metavar="HOW", help="their new values as float16 or int8")
    spread.add_argument("--at-rest", default="", metavar="HOW", help="rows lie on servers as float16 or int8")
    args = parser.parse_args()
    args.comm = args.comm or ("hybrid" if has_servers() else "allreduce")
    if args.comm == "allreduce":
        args.cache = "off"
    return args


def strategy(args: argparse.Namespace) -> dist.Builder | None:
    """How the one model below is trained by several workers; None for one process."""
    cache = None if args.cache == "off" else ps.Cache(args.cache, args.cache_rows, args.bound, args.bound)
    compress = ps.Compress(args.rows, args.gradients, args.values, args.at_rest)
    if args.comm == "ps":
        return strategies.ParameterServer(consistency=args.consistency, cache=cache, compress=compress)
    if args.comm == "hybrid":  # two workers would gather such small tables with fewer bytes: they have to be named
        return strategies.Hybrid(served=["*embedding*"], consistency=args.consistency, cache=cache, compress=compress)
    return dist.DataParallel() if place()[1] > 1 else None


def updates(loss: ht.Node, args: argparse.Namespace, steps: int) -> dict[ht.Node, ht.Node]:
    """Adam, and for the tables plain gradient descent, whose finished steps a cache can add up before it sends them."""
    adam = ht.optim.Adam(ht.schedules.cosine(args.learning_rate, steps=steps))
    variables = ht.Graph((loss,)).leaves("variable")
    tables = [v for v in variables if "embedding" in v.name]
    others = [v for v in variables if v.attrs["trainable"] and v not in tables]
    descent = ht.optim.SGD(ht.schedules.cosine(args.table_rate, steps=steps))
    return adam.minimize(loss, others) | descent.minimize(loss, tables)


def report(executor: ht.Executor, args: argparse.Namespace, seconds: float, steps: int, feed: dict) -> str:
    """What the training took, as a table; bytes are those of all workers."""
    comm = executor.placement.comm
    rows = [("gradients meet by", args.comm), ("seconds", f"{seconds:.1f}")]
    if args.comm != "ps":
        sent = plan.bytes_between_ranks(executor.program("train", feed), comm.world_size)
        rows.append(("between workers", f"{steps * comm.world_size * sent / 1e6:,.1f} MB"))
    if args.comm != "allreduce":
        servers = comm.client.status()
        moved = sum(server["received"] + server["sent"] for server in servers)
        rows.append(("to and from servers", f"{moved / 1e6:,.1f} MB under {servers[0]['consistency']}"))
        tables = sum(table["bytes"] for server in servers for table in server["largest"] if table["rows"] > 1)
        rows.append(("tables on servers", f"{tables / 1e3:,.1f} kB"))
    if args.cache != "off":
        rows.append(("cache of a worker", f"{args.cache}, {args.cache_rows:.0%} of each table, bound {args.bound}"))
        seen = comm.rows.counters
        rows.append(("cache hits", f"{seen.hit_rate:.1%} of the distinct rows of a batch"))
        rows.append(
            ("cache saves", f"{seen.saved:.1%} of the bytes of rows; off for {seen.passed:,} of {seen.unique:,}")
        )
    return "\n".join(f"{name:<19}  {value}" for name, value in rows)


def main() -> None:
    args = arguments()
    spread = strategy(args)
    train, test, ids_count = census(args.limit)
    even = args.comm == "ps"  # each worker takes as many rows of a batch
    batches = ht.data.DataLoader(train, args.batch_size, shuffle=True, seed=args.seed, drop_last=even)

    x = ht.placeholder("x", (None, train.arrays[0].shape[1]))
    ids = ht.placeholder("ids", (None, train.arrays[1].shape[1]), "int64")
    t = ht.placeholder("t", (None,))
    y = MODELS[args.model](x, ids, ids_count)
    loss = ht.mean(ht.binary_cross_entropy_with_logits(y, t))
    train_op = updates(loss, args, steps=args.epochs * len(batches))

    executor = ht.Executor({"train": [loss, train_op], "eval": [loss, y]}, seed=args.seed, strategy=spread)
    history = ht.fit(
        executor,
        batches,
        epochs=args.epochs,
        inputs=(x, ids, t),
        validate=("eval", ht.data.DataLoader(test, 1000)),
        metrics={"auc": ht.metrics.AUC()},
    )
    if spread is not None and executor.placement.rank:
        return
    print(history)
    if spread is not None:
        print()
        feed = dict(zip((x, ids, t), next(iter(batches))))
        seconds, steps = sum(history["seconds"]), args.epochs * len(batches)
        print(report(executor, args, seconds, steps, feed), end="\n\n")
    print(f"{args.model} on adult: test AUC {history['val_auc'][-1]:.4f}, loss {history['val_loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
