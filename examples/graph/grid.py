"""Train a graph network on a graph that no rank holds: `heturun -w 4 python examples/graph/grid.py --replicas 2`.

Ranks keep blocks of the nouns of WordNet and of their relations, see `hetu.dist.GraphGrid`; what a rank needs of others
travels in every layer, and the outcome is that of one process. Every rank runs its own graph, so gradients are added up
by hand. Ignored on purpose: dropout, which all ranks would have to draw alike.
"""

from __future__ import annotations

import numpy as np
from tqdm import trange

import hetu as ht
from hetu import dist
from hetu.models import graphs
from hetu.plan import bytes_between_ranks
from hetu.script import Script, number, positive


def padded(array: np.ndarray, rows: int) -> np.ndarray:
    """The array with rows of zeros behind it, so that all blocks are of one size."""
    return np.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)])


def main() -> None:
    without = "--batch-size", "--accumulate", "--limit", "--checkpoint", "--log", "--precision", "--strategy"
    script = Script(__doc__, epochs=100, batch_size=140, learning_rate=1e-2, without=without)
    script.add("--replicas", type=positive, default=1, metavar="N", help="ranks that keep the same block (%(default)s)")
    script.add("--weight-decay", type=number, default=1e-2, metavar="RATE", help="(%(default)s)")
    options, comm = script.parse(), dist.world()
    nouns = ht.data.wordnet_nouns()
    nodes = -(-len(nouns) // comm.world_size) * comm.world_size  # some of them alone, to fill the last block
    grid = dist.GraphGrid(comm.rank, comm.world_size, nodes, replicas=options.replicas)
    features = nouns.features / np.maximum(nouns.features.sum(axis=1, keepdims=True), 1)
    parts = [np.isin(np.arange(nodes), part) for part in (nouns.train, nouns.test)]
    arrays = padded(features, nodes), padded(nouns.y, nodes), *(part.astype("float32") for part in parts)

    x, t = ht.placeholder("x", (grid.size, features.shape[1])), ht.placeholder("t", (grid.size,), "int64")
    train, test = (ht.placeholder(name, (grid.size,)) for name in ("train", "test"))
    y = graphs.gcn(x, grid, len(nouns.info["classes"]), dropout=0.0)
    losses = ht.softmax_cross_entropy(y, t) / options.replicas  # each block counts once for all ranks that have it
    loss = ht.sum(losses * train) / len(nouns.train)
    rate = ht.schedules.cosine(options.learning_rate, steps=options.epochs)
    optimizer = ht.optim.AdamW(rate, weight_decay=options.weight_decay)
    slopes = optimizer.minimize(loss).gradients
    updates = optimizer.apply({w: dist.all_reduce(slope) for w, slope in slopes.items()})
    right = ht.sum(ht.astype(ht.equal(ht.argmax(y, axis=1), t), "float32") * test) / options.replicas

    subgraphs = {"train": [dist.all_reduce(loss), updates], "eval": [dist.all_reduce(right)]}
    executor = ht.Executor(subgraphs, seed=options.seed, comm=comm, device=options.device)
    own = dict(zip((x, t, train, test), (array[grid.block] for array in arrays)))
    seen = {x: own[x], t: own[t]} | grid.feed(ht.data.adjacency(nouns.edges, nodes))
    fed = {"train": seen | {train: own[train]}, "eval": seen | {test: own[test]}}
    history = ht.History()
    for _ in (bar := trange(options.epochs, disable=comm.rank > 0 or None, leave=False)):
        history.append({"loss": float(executor.run("train", fed["train"])[0])})
        bar.set_postfix(loss=history["loss"][-1])
    accuracy = float(executor.run("eval", fed["eval"])[0]) / len(nouns.test)
    sent = bytes_between_ranks(executor.program("train", fed["train"]), comm.world_size)
    if comm.rank == 0:
        print(history)
        print(f"a rank keeps {grid.size:,} of {nodes:,} nouns and is sent {sent / 1e6:.2f} MB a step")
        print(f"gcn on wordnet nouns: test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
