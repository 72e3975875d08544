"""Tell the classes of nouns in WordNet from their glosses and their relations: `python examples/graph/train.py`.

Of 3,000 nouns the classes of 140 are known, 20 of each; a graph network also sees what a noun is linked to. A step sees
the whole graph, or with `--sample N` some neighbors of some nouns, and neighbors of these. Ignored on purpose: choosing
anything by a validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

from argparse import Namespace

import numpy as np

import hetu as ht
from hetu.models import graphs
from hetu.script import Script, number, positive

MODELS = {"gcn": (graphs.gcn, "symmetric"), "graphsage": (graphs.graphsage, "mean"), "gat": (graphs.gat, "none")}


SAMPLED = {"graphsage": graphs.Sampled, "gat": graphs.SampledAttention}


def sampled(nouns: ht.data.GraphData, train: ht.data.ArrayDataset, options: Namespace) -> ht.data.NeighborLoader:
    """Batches of the nouns to train on, with some of their neighbors, and for attention with themselves."""
    fanouts, size = (options.sample, options.sample), min(options.batch_size, len(train))
    settings = {"fanouts": fanouts, "batch_size": size, "shuffle": True, "seed": options.seed}
    settings["itself"] = options.model == "gat"
    return ht.data.NeighborLoader(nouns.edges, len(nouns), *train.arrays, **settings)


def main() -> None:
    script = Script(__doc__, epochs=100, batch_size=140, learning_rate=1e-2)
    script.add("--model", choices=MODELS, help="(gcn, with --sample graphsage)")
    script.add("--weight-decay", type=number, default=1e-2, metavar="RATE", help="(%(default)s)")
    help = "see N neighbors of a noun, and N of each of them, by graphsage or gat"
    script.add("--sample", type=positive, metavar="N", help=help)
    options = script.parse()
    kind = options.model or ("graphsage" if options.sample else "gcn")
    if options.sample and kind not in SAMPLED:
        names = " or ".join(SAMPLED)
        script.parser.error(f"--sample N trains {names}, not --model {kind}: leave one of them out")
    nouns = ht.data.wordnet_nouns()
    model, normalized = MODELS[kind]
    features = nouns.features / np.maximum(nouns.features.sum(axis=1, keepdims=True), 1)
    graph, classes = ht.data.adjacency(nouns.edges, len(nouns), normalized), len(nouns.info["classes"])
    ids, t = ht.placeholder("ids", (None,), "int64"), ht.placeholder("t", (None,), "int64")
    train, test = (ht.data.ArrayDataset(part, nouns.y[part], names=("ids", "t")) for part in (nouns.train, nouns.test))
    train = script.first(train)
    if options.sample:
        network = SAMPLED[kind](features.shape[1], classes)
        batches = sampled(nouns, train, options)
        seen = batches.placeholders()
        inputs = seen.inputs
        part = network(ht.take(ht.constant(features), seen.nodes), seen.hops)
        loss = ht.mean(ht.softmax_cross_entropy(part, seen.t))
        y = ht.take(network(features, ((None, graph), (None, graph))), ids)
    else:
        batches, inputs = script.batches(train), (ids, t)
        y = ht.take(model(ht.constant(features), graph, classes), ids)
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
    updates = ht.optim.AdamW(script.rate(batches), weight_decay=options.weight_decay).minimize(loss)

    executor = script.executor({"train": [loss, updates], "eval": [ht.mean(ht.softmax_cross_entropy(y, t)), y]})
    validate, metrics = ("eval", ht.data.DataLoader(test, len(test)), (ids, t)), {"accuracy": ht.metrics.Accuracy()}
    history = script.fit(executor, batches, inputs=inputs, validate=validate, metrics=metrics)
    script.say(f"{kind} on wordnet nouns: test accuracy {history['val_accuracy'][-1]:.2%}")


if __name__ == "__main__":
    main()
