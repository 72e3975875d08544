"""Learn which relations hold between nouns of WordNet, from some that do: `python examples/knowledge/train.py`.

Each true triple is seen beside false ones, of which head or tail is another entity drawn at random. In the end all
entities are ranked as the head and as the tail of each test triple, those aside that are known to fit as well
("filtered"). Ignored on purpose: choosing anything by the validation triples, which are known beside those of training.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

import hetu as ht
from hetu.models import knowledge
from hetu.script import Script, positive

# The score, and its margin.
MODELS = {
    "transe": (knowledge.transe, 6.0),
    "distmult": (knowledge.distmult, 0.0),
    "complex": (knowledge.complex_, 0.0),
    "rotate": (knowledge.rotate, 6.0),
}
ROWS = 20  # of a table of scores for all entities


def loss_of(model: knowledge.Triples, head: ht.Node, relation: ht.Node, tail: ht.Node, others: int) -> ht.Node:
    """Cross entropy of each true triple and of as many false ones, drawn half by the head, half by the tail."""
    half = ht.randint(0, model.entities.shape[0], (head.shape[0], 2 * others))
    h, r, t = (ht.expand_dims(ids, axis=1) for ids in (head, relation, tail))
    false = ht.concat([model(half[:, :others], r, t), model(h, r, half[:, others:])], axis=1)
    weights = ht.stop_gradient(ht.softmax(false, axis=1))  # the likelier ones count more, Z. Sun et al., 2019, eq. 5
    return ht.mean(ht.softplus(-model(head, relation, tail))) + ht.mean(ht.sum(weights * ht.softplus(false), axis=1))


def ranks(executor: ht.Executor, test: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The place of each test triple (n, 3) among all that differ in its head, or in its tail, `known` ones left out."""
    found = []
    for name, place, given in (("heads", 0, ("relation", "tail")), ("tails", 2, ("head", "relation"))):
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


def main() -> None:
    script = Script(__doc__, epochs=50, batch_size=256, learning_rate=1e-2)
    script.add("--model", choices=MODELS, default="transe", help="(%(default)s)")
    script.add("--features", type=positive, default=64, metavar="N", help="of an entity (%(default)s)")
    script.add(
        "--others", type=positive, default=16, metavar="N", help="false triples by head, and by tail (%(default)s)"
    )
    options = script.parse()
    train, valid, test = (ht.data.wordnet_kg(part) for part in ("train", "valid", "test"))
    entities, relations = len(train.info["entities"]), len(train.info["relations"])
    batches = script.batches(script.first(train), drop_last=True)

    head, relation, tail = inputs = [ht.placeholder(name, (None,), "int64") for name in train.names]
    score, margin = MODELS[options.model]
    model = knowledge.Triples(entities, relations, options.features, score, margin=margin)
    loss = loss_of(model, head, relation, tail, options.others)
    updates = ht.optim.Adam(script.rate(batches)).minimize(loss)
    h, r, t = (ht.expand_dims(ids, axis=1) for ids in inputs)
    everyone = np.arange(entities)[None]
    graphs = {"train": [loss, updates], "heads": [model(everyone, r, t)], "tails": [model(h, r, everyone)]}
    executor = script.executor(graphs)
    script.fit(executor, batches, inputs=inputs)
    parts = [np.stack(part.arrays, axis=1) for part in (test, valid, train)]
    places = ranks(executor, parts[0], np.concatenate(parts))
    hits = ", ".join(f"Hits@{k} {np.mean(places <= k):.3f}" for k in (1, 10))
    script.say(f"{options.model} on wordnet triples: MRR {np.mean(1 / places):.3f}, {hits}")


if __name__ == "__main__":
    main()
