"""Batches of nodes of a large graph, each with some of its neighbors, and these with some of theirs.

A step then costs as much as it samples, however large the graph is. W. Hamilton et al., "Inductive Representation
Learning on Large Graphs", NIPS 2017, algorithm 2. Left out: graphs that lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers import AnswersCalls
from ..core.errors import DataError, public
from ..core.graph import Node
from ..core.leaf import placeholder
from .graphs import checked_edges

Ids = NDArray[np.int64]


class Neighborhood(NamedTuple):
    """The placeholders of a batch: the nodes that it sees; of each hop, the farthest first, the places of those that
    gather and (rows, columns, values), by which they do; and the classes. `inputs` are all of them, in their order."""

    nodes: Node
    hops: tuple[tuple[Node, tuple[Node, Node, Node]], ...]
    t: Node

    @property
    def inputs(self) -> list[Node]:
        return [self.nodes, *(node for own, entries in self.hops for node in (own, *entries)), self.t]


class NeighborLoader(AnswersCalls):
    """Batches of the nodes `ids` and their classes `y`, with at most `fanouts[k]` neighbors of each node of hop k.

    A batch is a tuple of arrays for the placeholders of a `Neighborhood`: its own nodes are the first that it sees, and
    each gathers the mean of those that were sampled of its neighbors. They are drawn anew for every batch.

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
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        pairs = checked_edges(edges, nodes)
        self.ids, self.y = _whole(ids, "ids"), _whole(y, "classes")
        if len(self.ids) != len(self.y) or not len(self.ids):
            raise DataError(f"{len(self.ids)} nodes with {len(self.y)} classes", fix="pass one class a node")
        if not 0 <= self.ids.min() <= self.ids.max() < nodes:
            raise DataError(f"ids from {self.ids.min()} to {self.ids.max()} of {nodes} nodes", fix="count from 0")
        if min(fanouts, default=0) < 1 or not 1 <= batch_size <= len(self.ids):
            raise DataError(
                f"fanouts={fanouts}, batch_size={batch_size}",
                fix=f"sample one neighbor at least; a batch has 1 to {len(self.ids)} nodes",
            )
        both = np.concatenate([pairs, pairs[:, ::-1]])
        both = both[np.argsort(both[:, 0], kind="stable")]
        self.neighbors, self.starts = both[:, 1], np.searchsorted(both[:, 0], np.arange(nodes + 1))
        self.fanouts, self.batch_size, self.shuffle, self.seed = tuple(fanouts), batch_size, shuffle, seed
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[NDArray[np.generic], ...]]:
        order = np.arange(len(self.ids))
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(order)
        while self.batch < len(self):
            chosen = order[self.batch * self.batch_size :][: self.batch_size]
            rng = np.random.default_rng((self.seed, self.epoch, self.batch + 1))
            self.batch += 1
            yield *self._sampled(self.ids[chosen], rng), self.y[chosen]
        self.epoch, self.batch = self.epoch + 1, 0

    def state(self) -> dict[str, int]:
        """The position in the data."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on from a position."""
        self.epoch, self.batch = state["epoch"], state["batch"]

    @public
    def placeholders(self) -> Neighborhood:
        """What a batch is fed to."""
        hops = []
        for hop in range(len(self.fanouts)):
            own, rows, columns = (placeholder(f"{name}_{hop}", (None,), "int64") for name in ("own", "rows", "columns"))
            hops.append((own, (rows, columns, placeholder(f"values_{hop}", (None,)))))
        return Neighborhood(placeholder("nodes", (None,), "int64"), tuple(hops), placeholder("t", (None,), "int64"))

    def _sampled(self, targets: Ids, rng: np.random.Generator) -> list[NDArray[np.generic]]:
        """All nodes, and the hops from the farthest to the nearest."""
        hops: list[NDArray[np.generic]] = []
        seen = targets
        for fanout in self.fanouts:
            rows, found = self._some(seen, fanout, rng)
            own = np.arange(len(seen))
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
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(f"{what} are {given.dtype}{list(given.shape)}", fix="pass a vector of whole numbers")
    return given.astype(np.int64)
