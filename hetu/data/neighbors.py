"""Batches of nodes of a large graph, each with some of its neighbors, and these with some of theirs.

A step then costs as much as it samples, however large the graph is. W. Hamilton et al., "Inductive Representation
Learning on Large Graphs", NIPS 2017, algorithm 2. Where a graph lies on several ranks, each samples its own nodes in
its `GraphPart`. Left out: samples by the importance of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.backend import array_from
from ..core.errors import DataError, public
from ..core.graph import Node
from ..core.leaf import placeholder
from ..ranges import Seed
from .dataset import Batch
from .graphs import Ids, checked_edges
from .loader import Resumable


class Neighborhood(NamedTuple):
    """The placeholders of a batch: of each array of `rows` those of the nodes that it sees; of each hop, the farthest
    first, the places of those that gather and (rows, columns, values), by which they do; and the classes. `inputs` are
    all of them, in their order."""

    rows: tuple[Node, ...]
    hops: tuple[tuple[Node, tuple[Node, Node, Node]], ...]
    t: Node

    @property
    def nodes(self) -> Node:
        """The numbers of the nodes, the first of `rows` unless others were given."""
        return self.rows[0]

    @property
    def inputs(self) -> list[Node]:
        return [*self.rows, *(node for own, entries in self.hops for node in (own, *entries)), self.t]


class NeighborLoader(Resumable):
    """Batches of the nodes `ids` and their classes `y`, with at most `fanouts[k]` neighbors of each node of hop k.

    A batch is a tuple of arrays for the placeholders of a `Neighborhood`: its own nodes are the first that it sees, and
    each gathers the mean of those that were sampled of its neighbors. They are drawn anew for every batch.

    Args:
        edges, nodes: the graph, undirected; a node is no neighbor of its own unless an edge says so.
        ids, y: the nodes to learn, int64 (n,), and their classes.
        fanouts: as many hops as the model has layers, the nearest first.
        batch_size: nodes of `ids` in a batch, of which the last may have fewer.
        batches: in place of `batch_size`, how many batches an epoch has, of equal sizes but for one node: ranks that
            wait for each other need as many, whatever they own.
        shuffle: a new order each epoch, drawn from `seed` and the epoch's number.
        rows: arrays with a row for each node, of which a batch has those of the nodes that it sees; by default their
            numbers. A rank passes `part.nodes`, their numbers in the whole graph, and what it keeps of features.
        itself: whether each node also gathers from itself, beside the neighbors that are drawn, as attention wants.

    DataError for nodes that are not there, a batch without a node, or arrays of other lengths.

    >>> edges = [[0, 1], [1, 2], [2, 3], [3, 4]]
    >>> loader = NeighborLoader(edges, 5, [2], [1], fanouts=(2, 1), batch_size=1)
    >>> nodes, *_, y = next(iter(loader))
    >>> nodes[:3].tolist(), y.tolist()
    ([2, 1, 3], [1])
    """

    def __init__(
        self,
        edges: ArrayLike,
        nodes: int,
        ids: ArrayLike,
        y: ArrayLike,
        *,
        fanouts: Sequence[int] = (10, 10),
        batch_size: int = 64,
        batches: int | None = None,
        shuffle: bool = False,
        seed: Seed = 0,
        rows: Sequence[ArrayLike] | None = None,
        itself: bool = False,
    ) -> None:
        super().__init__(seed)
        pairs = checked_edges(edges, nodes)
        self.ids, self.y = _whole(ids, "ids"), _whole(y, "classes")
        self.rows = [np.arange(nodes)] if rows is None else [np.asarray(array) for array in rows]
        self._check(nodes, fanouts, batch_size if batches is None else batches, batches is None)
        both = np.concatenate([pairs, pairs[:, ::-1]])
        both = both[np.argsort(both[:, 0], kind="stable")]
        self.neighbors, self.starts = both[:, 1], np.searchsorted(both[:, 0], np.arange(nodes + 1))
        self.fanouts, self.shuffle, self.itself = tuple(fanouts), shuffle, itself
        places = np.arange(len(self.ids))
        self.parts = np.array_split(places, batches or np.arange(batch_size, len(places), batch_size))

    def _check(self, nodes: int, fanouts: Sequence[int], size: int, sized: bool) -> None:
        if not len(self.ids):
            fix = "pass one id at least; of several ranks each has to own one: learn from more nodes, or on fewer ranks"
            raise DataError("there is no node to learn", fix=fix)
        if len(self.ids) != len(self.y):
            raise DataError(f"{len(self.ids)} nodes with {len(self.y)} classes", fix="pass one class a node")
        if not 0 <= self.ids.min() <= self.ids.max() < nodes:
            raise DataError(f"ids from {self.ids.min()} to {self.ids.max()} of {nodes} nodes", fix="count from 0")
        if min(fanouts, default=0) < 1 or not 1 <= size <= len(self.ids):
            raise DataError(
                f"fanouts={fanouts}, {'batch_size' if sized else 'batches'}={size}",
                fix=f"sample one neighbor at least; a batch has 1 to {len(self.ids)} nodes"
                if sized
                else f"sample one neighbor at least; {len(self.ids)} nodes make 1 to {len(self.ids)} batches",
            )
        if lengths := [len(array) if array.ndim else 0 for array in self.rows if not array.ndim or len(array) != nodes]:
            raise DataError(
                f"rows of {lengths[0]} nodes, there are {nodes}", fix="pass arrays with a row for each node"
            )

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.parts)

    def _batches(self, steps: range) -> Iterator[Batch]:
        order = self._shuffled(len(self.ids)) if self.shuffle else np.arange(len(self.ids))
        for step in steps:
            chosen = order[self.parts[step]]
            seen, *hops = self._sampled(self.ids[chosen], np.random.default_rng((self._seed, self._epoch, step + 1)))
            yield *(array[seen] for array in self.rows), *hops, self.y[chosen]

    @public
    def placeholders(self) -> Neighborhood:
        """What a batch is fed to."""
        hops = []
        for hop in range(len(self.fanouts)):
            own, rows, columns = (placeholder(f"{name}_{hop}", (None,), "int64") for name in ("own", "rows", "columns"))
            hops.append((own, (rows, columns, placeholder(f"values_{hop}", (None,)))))
        names = ["nodes", *(f"nodes_{k}" for k in range(1, len(self.rows)))]
        seen = [placeholder(n, (None, *array.shape[1:]), array.dtype) for n, array in zip(names, self.rows)]
        return Neighborhood(tuple(seen), tuple(hops), placeholder("t", (None,), "int64"))

    def _sampled(self, targets: Ids, rng: np.random.Generator) -> list[NDArray[np.generic]]:
        """All nodes, and the hops from the farthest to the nearest."""
        hops: list[NDArray[np.generic]] = []
        seen = targets
        for fanout in self.fanouts:
            rows, found = self._some(seen, fanout, rng)
            own = np.arange(len(seen))
            if self.itself:
                rows, found = np.concatenate([rows, own]), np.concatenate([found, seen])
            new = np.setdiff1d(found, seen)
            wider = np.concatenate([seen, new])
            order = np.argsort(wider, kind="stable")
            columns = order[np.searchsorted(wider, found, sorter=order)]
            counts = np.bincount(rows, minlength=len(seen))
            hops = [own, rows, columns, (1 / counts[rows]).astype(np.float32), *hops]
            seen = wider
        return [seen, *hops]

    def _some(self, nodes: Ids, fanout: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
        """Places of nodes and their neighbors, at most `fanout` of each, drawn without putting back."""
        degrees = self.starts[nodes + 1] - self.starts[nodes]
        rows = np.repeat(np.arange(len(nodes)), degrees)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(degrees) - degrees, degrees)
        neighbors = self.neighbors[self.starts[nodes][rows] + place]
        order = np.lexsort((rng.random(len(rows)), rows))  # those of a row in a random order
        kept = np.sort(order[place < fanout])
        return rows[kept], neighbors[kept]


def _whole(values: ArrayLike, what: str) -> Ids:
    """Whole numbers as int64 (n,); DataError for others, which would be cut off."""
    given = array_from(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(f"{what} are {given.dtype}{list(given.shape)}", fix="pass a vector of whole numbers")
    return given.astype(np.int64)
