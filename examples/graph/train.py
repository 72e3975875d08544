"""Tell the classes of nouns in WordNet from their glosses and their relations: `python examples/graph/train.py`.

Of 3,000 nouns the classes of 140 are known, 20 of each; a graph network also sees what a noun is linked to. A step sees
the whole graph. Ignored on purpose: choosing anything by a validation set; the test set is looked at and changes
nothing.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.models import graphs
from hetu.script import Script

MODELS = {"gcn": (graphs.gcn, "symmetric"), "graphsage": (graphs.graphsage, "mean"), "gat": (graphs.gat, "none")}


def main() -> None:
    script = Script(__doc__, epochs=100, batch_size=140, learning_rate=1e-2)
    script.add("--model", choices=MODELS, default="gcn", help="(%(default)s)")
    script.add("--weight-decay", type=float, default=1e-2, metavar="RATE", help="(%(default)s)")
    options = script.parse()
    nouns = ht.data.wordnet_nouns()
    model, normalized = MODELS[options.model]
    scale = np.maximum(nouns.features.sum(axis=1, keepdims=True), 1)
    ids, t = ht.placeholder("ids", (None,), "int64"), ht.placeholder("t", (None,), "int64")
    logits = model(
        ht.constant(nouns.features / scale),
        ht.data.adjacency(nouns.edges, len(nouns), normalized),
        len(nouns.info["classes"]),
    )
    y = ht.take(logits, ids)
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    train, test = (ht.data.ArrayDataset(part, nouns.y[part], names=("ids", "t")) for part in (nouns.train, nouns.test))
    batches = script.batches(script.first(train))
    updates = ht.optim.AdamW(script.rate(batches), weight_decay=options.weight_decay).minimize(loss)

    executor = script.executor({"train": [loss, updates], "eval": [loss, y]})
    validate, metrics = ("eval", ht.data.DataLoader(test, len(test))), {"accuracy": ht.metrics.Accuracy()}
    history = script.fit(executor, batches, inputs=(ids, t), validate=validate, metrics=metrics)
    script.say(f"{options.model} on wordnet nouns: test accuracy {history['val_accuracy'][-1]:.2%}")


if __name__ == "__main__":
    main()
