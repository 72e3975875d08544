"""Train a graph network on parts of a graph, with servers: `heturun -w 2 -s 1 python examples/graph/parts.py`.

Each rank owns a part of the nouns of WordNet and samples neighbors of these alone. It keeps the words of its own nouns
and of its halo, those within two relations of them. What is learned of each noun lives on servers, as do the weights;
a rank fetches the rows that others have changed. So the fewer relations join two parts, the less is kept and fetched:
compare `--cut random`. Ignored on purpose: `--strategy`, as ranks are fed what they own; one process owns everything.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np

import hetu as ht
from hetu import dist
from hetu.models import graphs
from hetu.ps import Cache
from hetu.ps.wire.environment import has_servers
from hetu.script import Script, number, positive
from hetu.strategies import ParameterServer

HOPS = 2  # layers of the network, and so how far the halo reaches


class Owned:
    """The part of `rank`, and batches of its nouns."""

    def __init__(self, nouns: ht.data.GraphData, ranks: int, rank: int, options: Namespace) -> None:
        if options.cut == "few":
            self.owners = ht.data.partition(nouns.edges, len(nouns), ranks, seed=options.seed)
        else:
            self.owners = np.random.default_rng(options.seed).permutation(np.arange(len(nouns)) % ranks)
        self.nouns, self.rank = nouns, rank
        self.part = ht.data.GraphPart.of(nouns.edges, self.owners, rank, hops=HOPS)
        words = nouns.features[self.part.nodes]
        self.rows = self.part.nodes, words / np.maximum(words.sum(axis=1, keepdims=True), 1)

    def batches(self, ids: np.ndarray, **settings: Any) -> ht.data.NeighborLoader:
        """Those of `ids` that it owns, with neighbors."""
        own = ids[self.owners[ids] == self.rank]
        graph = self.part.edges, len(self.part.nodes), self.part.places(own), self.nouns.y[own]
        return ht.data.NeighborLoader(*graph, rows=self.rows, **settings)

    def steps(self, ids: np.ndarray, batch_size: int) -> int:
        """Batches of an epoch, in all ranks as many, and so no more than any owns of `ids`."""
        owned = np.bincount(self.owners[ids], minlength=int(self.owners.max()) + 1)
        return int(min(-(-owned.max() * len(owned) // batch_size), max(1, owned.min())))


def network(seen: ht.data.Neighborhood, nouns: ht.data.GraphData, features: int) -> ht.Node:
    """The logits of a batch: GraphSAGE of what the words of each noun are made to, beside what is learned of it."""
    ids, words = seen.rows
    learned = ht.nn.Embedding(len(nouns), features, name="noun")(ids)
    x = ht.concat([ht.nn.Linear(nouns.features.shape[1], features, name="words")(words), learned], axis=1)
    return graphs.Sampled(2 * features, len(nouns.info["classes"]), hidden=32)(x, seen.hops)


def moved(executor: ht.Executor) -> str:
    """What servers have received and sent, and how many of the rows that this rank has read it had to fetch."""
    comm = executor.placement.comm
    total = sum(server["received"] + server["sent"] for server in comm.client.status())
    return f", {total / 1e6:.1f} MB to and from servers, {comm.rows.counters.of_unique:.1%} of rows fetched"


def main() -> None:
    script = Script(__doc__, epochs=60, batch_size=70, learning_rate=1e-2)
    script.add("--cut", choices=["few", "random"], default="few", help="relations between parts (%(default)s)")
    script.add("--sample", type=positive, default=5, metavar="N", help="neighbors of a noun to see (%(default)s)")
    script.add(
        "--features", type=positive, default=16, metavar="N", help="learned of a noun, and of words (%(default)s)"
    )
    script.add("--weight-decay", type=number, default=1e-2, metavar="RATE", help="(%(default)s)")
    options, comm, nouns = script.parse(), dist.world(), ht.data.wordnet_nouns()
    owned, known = Owned(nouns, comm.world_size, comm.rank, options), nouns.train[: options.limit]
    steps = owned.steps(known, options.batch_size)
    train = owned.batches(known, fanouts=[options.sample] * HOPS, batches=steps, shuffle=True, seed=options.seed)
    test = owned.batches(nouns.test, fanouts=[len(nouns)] * HOPS)

    seen = train.placeholders()
    y = network(seen, nouns, options.features)
    loss = ht.mean(ht.softmax_cross_entropy(y, seen.t))
    descent = ht.optim.SGD(script.rate(train, 20 * options.learning_rate))  # a cache takes finished steps alone
    adam = ht.optim.AdamW(script.rate(train), weight_decay=options.weight_decay)
    updates = ht.optim.by_name(loss, {"*noun/*": descent, "*": adam})
    right = ht.sum(ht.astype(ht.equal(ht.argmax(y, axis=1), seen.t), "float32"))

    cache = Cache("lru", rows=1.0, pull_bound=0, push_bound=0)  # rows as fresh as without it
    strategy = ParameterServer(cache=cache, local_feeds=True) if has_servers() else None
    executor = script.executor({"train": [loss, updates], "eval": [right]}, strategy)
    script.fit(executor, train, inputs=seen.inputs)
    counts = [executor.run("eval", dict(zip(seen.inputs, batch)))[0] for batch in test]
    mine, total = np.array([np.sum(counts)]), np.zeros(1, "float32")
    comm.all_reduce(mine, total)
    halo = len(owned.part.nodes) - owned.part.own
    script.say(f"a rank owns {owned.part.own:,} of {len(nouns):,} nouns, and keeps the words of {halo:,} others")
    more = moved(executor) if strategy else ""
    script.say(f"graphsage on wordnet nouns: test accuracy {total[0] / len(nouns.test):.2%}{more}")


if __name__ == "__main__":
    main()
