"""Predict from a census form whether a person earns more than 50,000 dollars: `python examples/ctr/train.py`.

The data has the form of click prediction: a few numbers, and categories that want embeddings and crosses. Two workers
and a parameter server: `heturun -w 2 -s 1 python examples/ctr/train.py`; then dense parameters are reduced among the
workers, and embeddings live on the server, with a cache at each worker. Ignored on purpose: choosing anything by a
validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

import argparse

import numpy as np

import hetu as ht
from hetu import dist, plan, ps, strategies
from hetu.models import clicks
from hetu.script import Script

MODELS = {name: getattr(clicks, name) for name in ("wide_deep", "deepfm", "dcn", "dcn_v1", "xdeepfm", "dlrm")}


def census(train: ht.data.ArrayDataset) -> tuple[ht.data.ArrayDataset, ht.data.ArrayDataset, int]:
    """Train and test part, each x float32 (n, 6) scaled, ids (n, 14) and y float32 (n,); and the number of ids.

    Each column has its own range of ids: a category's is its code, a number's its place among the values seen in
    training, of which at most about 100 are kept apart.
    """
    parts = train, ht.data.adult("test")
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


def add_options(script: Script) -> None:
    script.add("--model", choices=MODELS, default="wide_deep", help="(%(default)s)")
    script.add("--table-rate", type=float, default=0.3, metavar="RATE", help="of plain descent on tables (%(default)s)")
    add = script.parser.add_argument_group("servers, under heturun -s").add_argument
    mode = {"type": ps.consistency, "metavar": "MODE"}
    add("--consistency", help="of the servers: bsp, asp, or ssp:3 (by default theirs)", **mode)
    policies = ["lru", "lfu", "lfuopt", "hot", "auto", "off"]
    help = "which rows workers keep; auto: none while that saves less than 10%% of the bytes (%(default)s)"
    add("--cache", choices=policies, default="lfuopt", help=help)
    add("--cache-rows", type=float, default=0.5, metavar="SHARE", help="of each table (%(default)s)")
    add("--bound", type=int, default=10, metavar="N", help="updates that a cached row may lag behind (%(default)s)")
    add("--rows", default="", metavar="HOW", help="rows to and from servers as float16 or int8")
    add("--gradients", default="", metavar="HOW", help="others as float16, int8, topk:0.01 or 1bit")
    add("--values", default="", metavar="HOW", help="their new values as float16 or int8")
    add("--at-rest", default="", metavar="HOW", help="rows lie on servers as float16 or int8")


def served(options: argparse.Namespace) -> dist.Builder | None:
    """The strategy, where servers take part in it."""
    if options.strategy not in ("ps", "hybrid"):
        return None
    bound = options.bound
    cache = None if options.cache == "off" else ps.Cache(options.cache, options.cache_rows, bound, bound)
    compress = ps.Compress(options.rows, options.gradients, options.values, at_rest=options.at_rest)
    if options.strategy == "ps":
        return strategies.ParameterServer(consistency=options.consistency, cache=cache, compress=compress)
    # Two workers would gather such small tables with fewer bytes: they have to be named.
    tables = ["*embedding*"]
    return strategies.Hybrid(served=tables, consistency=options.consistency, cache=cache, compress=compress)


def updates(script: Script, loss: ht.Node, batches: ht.data.DataLoader) -> ht.optim.Updates:
    """Adam, and for the tables plain gradient descent, whose finished steps a cache can add up before it sends them."""
    variables = ht.Graph((loss,)).leaves("variable")
    tables = [v for v in variables if "embedding" in v.name]
    others = [v for v in variables if v.attrs["trainable"] and v not in tables]
    descent = ht.optim.SGD(script.rate(batches, script.options.table_rate))
    return ht.optim.Adam(script.rate(batches)).minimize(loss, others) | descent.minimize(loss, tables)


def report(executor: ht.Executor, options: argparse.Namespace, history: ht.History, steps: int, feed: dict) -> str:
    """What the training took, as a table; bytes are those of all workers."""
    comm, servers = executor.placement.comm, options.strategy in ("ps", "hybrid")
    rows = [("strategy", options.strategy), ("seconds", f"{sum(history['seconds']):.1f}")]
    if options.strategy != "ps":
        sent = plan.bytes_between_ranks(executor.program("train", feed), comm.world_size)
        rows.append(("between workers", f"{steps * comm.world_size * sent / 1e6:,.1f} MB"))
    if servers:
        told = comm.client.status()
        moved = sum(server["received"] + server["sent"] for server in told)
        rows.append(("to and from servers", f"{moved / 1e6:,.1f} MB under {told[0]['consistency']}"))
        tables = sum(table["bytes"] for server in told for table in server["largest"] if table["rows"] > 1)
        rows.append(("tables on servers", f"{tables / 1e3:,.1f} kB"))
    if servers and options.cache != "off":
        kept = f"{options.cache}, {options.cache_rows:.0%} of each table, bound {options.bound}"
        seen = comm.rows.counters
        saved = f"{seen.saved:.1%} of the bytes of rows; off for {seen.passed:,} of {seen.unique:,}"
        hits = f"{seen.hit_rate:.1%} of the distinct rows of a batch"
        rows += [("cache of a worker", kept), ("cache hits", hits), ("cache saves", saved)]
    return "\n".join(f"{name:<19}  {value}" for name, value in rows)


def main() -> None:
    script = Script(__doc__, epochs=12, batch_size=256, learning_rate=2e-3)
    add_options(script)
    options = script.parse()
    train, test, count = census(script.first(ht.data.adult("train")))
    batches = script.batches(train, drop_last=options.strategy == "ps")  # each worker takes as many rows of a batch

    x = ht.placeholder("x", (None, train.arrays[0].shape[1]))
    ids = ht.placeholder("ids", (None, train.arrays[1].shape[1]), "int64")
    t = ht.placeholder("t", (None,))
    y = MODELS[options.model](x, ids, count)
    loss = ht.mean(ht.binary_cross_entropy_with_logits(y, t))

    graphs = {"train": [loss, updates(script, loss, batches)], "eval": [loss, y]}
    executor = script.executor(graphs, served(options))
    validate, metrics = ("eval", ht.data.DataLoader(test, 1000)), {"auc": ht.metrics.AUC()}
    history = script.fit(executor, batches, inputs=(x, ids, t), validate=validate, metrics=metrics)
    if script.rank == 0 and options.strategy:
        feed = dict(zip((x, ids, t), next(iter(batches))))
        print(f"\n{report(executor, options, history, options.epochs * len(batches), feed)}\n")
    auc, lost = history["val_auc"][-1], history["val_loss"][-1]
    script.say(f"{options.model} on adult: test AUC {auc:.4f}, loss {lost:.4f}")


if __name__ == "__main__":
    main()
