"""Predict from a census form whether a person earns more than 50,000 dollars: `python examples/ctr/train.py`.

The data has the form of click prediction: a few numbers, and categories that want embeddings and crosses. Two workers
and a parameter server: `heturun -w 2 -s 1 python examples/ctr/train.py`; then dense parameters are reduced among the
workers, and embeddings live on the server, with a cache at each worker. Ignored on purpose: choosing anything by a
validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.models import clicks
from hetu.script import Script
from hetu.script_servers import ServerOptions

MODELS = {name: getattr(clicks, name) for name in ("wide_deep", "deepfm", "dcn", "dcn_v1", "xdeepfm", "dlrm")}


def census(train: ht.data.ArrayDataset) -> tuple[ht.data.ArrayDataset, ht.data.ArrayDataset, int]:
    """Train and test part, each x float32 (n, 6) scaled, ids (n, 14) and y float32 (n,); and the number of ids.

    Each column has its own range of ids: a category's is its code, a number's its place among the values seen in
    training, of which at most about 100 are kept apart.
    """
    parts = train, ht.data.adult("test")
    numbers = [np.log1p(part.arrays[0]) for part in parts]
    values = [np.unique(column) for column in numbers[0].T]
    edges = [v[:: len(v) // 100 + 1] for v in values]
    sizes = [*map(len, parts[0].info["categorical"].values()), *(len(e) + 1 for e in edges)]
    offsets = np.cumsum([0, *sizes])
    made = []
    for part, x in zip(parts, numbers):
        places = [np.searchsorted(e, column, side="right") for e, column in zip(edges, x.T)]
        ids = np.concatenate([part.arrays[1], np.stack(places, axis=1)], axis=1) + offsets[:-1]
        rows = ht.data.standardized(x, numbers[0]), ids, part.arrays[2].astype("float32")
        made.append(ht.data.ArrayDataset(*rows, names=("x", "ids", "y")))
    return made[0], made[1], int(offsets[-1])


def main() -> None:
    script = Script(__doc__, epochs=12, batch_size=256, learning_rate=2e-3)
    script.add("--model", choices=MODELS, default="wide_deep", help="(%(default)s)")
    servers = ServerOptions(script, {"*embedding*": 1.0}, rate=0.3, cache="lfuopt", rows=0.5)
    options = script.parse()
    train, test, count = census(script.first(ht.data.adult("train")))
    batches = script.batches(train, drop_last=options.strategy == "ps")  # each worker takes as many rows of a batch

    x = ht.placeholder("x", (None, train.arrays[0].shape[1]))
    ids = ht.placeholder("ids", (None, train.arrays[1].shape[1]), "int64")
    t = ht.placeholder("t", (None,))
    y = MODELS[options.model](x, ids, count)
    loss = ht.mean(ht.binary_cross_entropy_with_logits(y, t))

    graphs = {"train": [loss, servers.updates(loss, batches)], "eval": [loss, y]}
    executor = script.executor(graphs, servers.strategy(servers.cache(epoch=len(batches))))
    validate, metrics = ("eval", ht.data.DataLoader(test, 1000)), {"auc": ht.metrics.AUC()}
    history = script.fit(executor, batches, inputs=(x, ids, t), validate=validate, metrics=metrics)
    if options.strategy:
        feed = dict(zip((x, ids, t), next(iter(batches))))
        script.say(f"\n{servers.report(executor, history, options.epochs * len(batches), feed)}\n")
    auc, lost = history["val_auc"][-1], history["val_loss"][-1]
    script.say(f"{options.model} on adult: test AUC {auc:.4f}, loss {lost:.4f}")


if __name__ == "__main__":
    main()
