"""Learn which relations hold between nouns of WordNet, from some that do: `python examples/knowledge/train.py`.

Each true triple is seen beside false ones, of which head or tail is another entity drawn at random. In the end all
entities are ranked as the head and as the tail of each test triple, those aside that are known to fit as well
("filtered"). Two workers and a parameter server, where each worker keeps the rows that its next batches use most:
`heturun -w 2 -s 1 python examples/knowledge/train.py --cache dynamic`. Ignored on purpose: choosing anything by the
validation triples, which are known beside those of training.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.models import knowledge
from hetu.script import Script, number, positive
from hetu.script_servers import ServerOptions

# The score, and its margin.
MODELS = {
    "transe": (knowledge.transe, 6.0),
    "distmult": (knowledge.distmult, 0.0),
    "complex": (knowledge.complex_, 0.0),
    "rotate": (knowledge.rotate, 6.0),
}
TABLES = {"*entities": 1.0, "*relations": 0.02}  # and how fast they learn by descent: a relation is in many triples
ROWS = 20  # of a table of scores for all entities
GROUP = 16  # true triples that share false heads and tails


def loss_of(model: knowledge.Triples, true: Sequence[ht.Node], heads: ht.Node, tails: ht.Node) -> ht.Node:
    """Cross entropy of `true` triples (groups, n) three times, and of as many false ones, by other heads and tails."""
    head, relation, tail = model.vectors(*true)
    right = model.scores(head, relation, tail)
    h, r, t = (ht.expand_dims(vectors, axis=2) for vectors in (head, relation, tail))
    others = [ht.expand_dims(ht.embedding(model.entities, ids), axis=1) for ids in (heads, tails)]
    false = ht.concat([model.scores(others[0], r, t), model.scores(h, r, others[1])], axis=2)
    weights = ht.stop_gradient(ht.softmax(false, axis=2))  # the likelier ones count more, Z. Sun et al., 2019, eq. 5
    return ht.mean(ht.softplus(-right)) + ht.mean(ht.sum(weights * ht.softplus(false), axis=2))


def ranks(executor: ht.Executor, test: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The place of each test triple (n, 3) among all that differ in its head, or in its tail, `known` ones left out."""
    found = []
    for name, place, given in (
        ("heads", 0, ("asked_relation", "asked_tail")),
        ("tails", 2, ("asked_head", "asked_relation")),
    ):
        fits, rest = defaultdict(list), [k for k in range(3) if k != place]
        for triple in known.tolist():
            fits[triple[rest[0]], triple[rest[1]]].append(triple[place])
        for rows in np.array_split(test, -(-len(test) // ROWS)):
            scores = executor.run(name, dict(zip(given, rows[:, rest].T)))[0]
            for triple, row in zip(rows.tolist(), scores):
                right = row[triple[place]]
                row[fits[triple[rest[0]], triple[rest[1]]]] = -np.inf
                found.append(1 + np.sum(row > right) + np.sum(row == right) / 2)
    return np.array(found)


def triples(options: argparse.Namespace) -> tuple[list[ht.data.ArrayDataset], str]:
    """Train, validation and test part, and what they are called."""
    parts = [ht.data.wordnet_kg(part, options.data) for part in ("train", "valid", "test")]
    return parts, Path(options.data).name if options.data else "wordnet triples"


def batches_of(script: Script, train: ht.data.ArrayDataset) -> ht.data.TripleLoader:
    """True triples in groups that share false heads and tails."""
    options, entities = script.options, len(train.info["entities"])
    loader = script.batches(script.first(train), drop_last=True)
    seen = np.bincount(np.concatenate([train.arrays[0], train.arrays[2]]), minlength=entities)
    weights = seen.astype("float64") ** options.popular
    group = math.gcd(loader.batch_size, GROUP)
    return ht.data.TripleLoader(loader, entities, group=group, others=options.others, weights=weights)


def parsed(arguments: Sequence[str] | None = None) -> tuple[Script, ServerOptions]:
    """What this script, and its servers, are asked for, by default on the command line."""
    script = Script(__doc__, epochs=50, batch_size=256, learning_rate=1e-2)
    script.add("--model", choices=MODELS, default="transe", help="(%(default)s)")
    script.add("--data", metavar="FOLDER", help="with train.txt, valid.txt and test.txt, rows of head, relation, tail")
    script.add("--features", type=positive, default=64, metavar="N", help="of an entity (%(default)s)")
    help = "false triples by head, and by tail (%(default)s)"
    script.add("--others", type=positive, default=16, metavar="N", help=help)
    help = "false ones are drawn by their uses to this power (%(default)s: all alike)"
    script.add("--popular", type=number, default=0.0, metavar="POWER", help=help)
    servers = ServerOptions(script, TABLES, cached_rate=30.0, rows=0.05)
    script.parse(arguments)
    return script, servers


def main() -> None:
    script, servers = parsed()
    options = script.options
    (train, valid, test), data = triples(options)
    entities, relations = len(train.info["entities"]), len(train.info["relations"])
    batches = batches_of(script, train)

    sizes = [batches.group] * 3 + [batches.others] * 2
    names = ("head", "relation", "tail", "heads", "tails")
    inputs = [ht.placeholder(name, (None, size), "int64") for name, size in zip(names, sizes)]
    score, margin = MODELS[options.model]
    model = knowledge.Triples(entities, relations, options.features, score, margin=margin)
    loss = loss_of(model, inputs[:3], *inputs[3:])
    asked = [ht.placeholder(f"asked_{name}", (None,), "int64") for name in train.names]
    h, r, t = (ht.expand_dims(ids, axis=1) for ids in asked)
    everyone = np.arange(entities)[None]
    graphs = {"train": [loss, servers.updates(loss, batches)]}
    graphs |= {"heads": [model(everyone, r, t)], "tails": [model(h, r, everyone)]}
    lines = round(options.cache_rows * (entities + relations))
    hot = min(relations, max(1, lines // 5))  # relations are few, and used by every triple
    cache = servers.cache({"*relations": hot, "*": max(1, lines - hot)}, epoch=len(batches))
    executor = script.executor(graphs, servers.strategy(cache))
    history = script.fit(executor, batches, inputs=inputs)
    if options.strategy:
        feed = dict(zip(inputs, next(iter(batches))))
        script.say(f"\n{servers.report(executor, history, options.epochs * len(batches), feed)}\n")
    parts = [np.stack(part.arrays, axis=1) for part in (test, valid, train)]
    places = ranks(executor, parts[0], np.concatenate(parts))
    hits = ", ".join(f"Hits@{k} {np.mean(places <= k):.3f}" for k in (1, 10))
    script.say(f"{options.model} on {data}: MRR {np.mean(1 / places):.3f}, {hits}")


if __name__ == "__main__":
    main()
