"""A graph cut into parts for ranks, few of whose nodes have neighbors elsewhere, and what each rank keeps of it.

The graph is made small by joining nodes that belong together, cut, and made large again, and at every size nodes move
to where most of their neighbors are, as far as there is room. H. Meyerhenke, P. Sanders and C. Schulz, "Partitioning
Complex Networks via Size-Constrained Clustering", SEA 2014, sections 3 and 4. Left out: weights of edges and of nodes,
and graphs that no process holds. A million edges take half a minute.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import ArgumentError, DataError, public
from ..ranges import AtLeast1, Count, Range, Seed, unmasked
from .graphs import Ids, checked_edges

COARSE, SHRINKS = 20, 0.9  # nodes of each part in the smallest graph; a graph that hardly shrinks is small enough
SWEEPS, TRIES = 6, 8  # over all nodes of a graph; of cutting the smallest


@public
def partition(
    edges: ArrayLike,
    nodes: AtLeast1,
    parts: AtLeast1,
    *,
    imbalance: Annotated[float, Range(1, endless=True)] = 1.05,
    seed: Seed = 0,
) -> Ids:
    """The part of each of `nodes` nodes, int64 (nodes,): few of the undirected `edges` (m, 2) join two parts.

    No part has more than `imbalance` times the average number of nodes, or one node more than that, and none is empty.
    Edges of a node to itself say nothing, and one that is given twice counts twice. ArgumentError for more parts than
    nodes, DataError for a node that is not there.

    >>> partition([[0, 1], [1, 2], [0, 2], [3, 4], [4, 5], [3, 5], [2, 3]], 6, 2).tolist()
    [1, 1, 1, 0, 0, 0]
    """
    if not 1 <= parts <= nodes:
        raise ArgumentError(f"{parts} parts of {nodes} nodes", fix="make from 1 part up to as many as there are nodes")
    if not imbalance >= 1:
        raise ArgumentError(f"imbalance={imbalance}", fix="pass 1.0, for parts of one size, or more")
    rng, pairs = np.random.default_rng(seed), checked_edges(edges, nodes)
    limit, least = max(int(min(imbalance, parts) * nodes / parts), -(-nodes // parts)), max(1, nodes // (2 * parts))
    graphs = [_weighted(pairs, np.ones(len(pairs), np.int64), np.ones(nodes, np.int64))]
    clusters = list[Ids]()
    while len(graphs[-1].sizes) > COARSE * parts:
        fine = graphs[-1]
        joined = _settled(fine, np.arange(len(fine.sizes)), max(1, nodes // (COARSE * parts)), rng)
        _, cluster = np.unique(joined, return_inverse=True)
        coarse = _contracted(fine, cluster)
        if len(coarse.sizes) > SHRINKS * len(fine.sizes):
            break
        graphs.append(coarse)
        clusters.append(cluster)
    tries = [_settled(graphs[-1], _grown(graphs[-1], parts, rng), limit, rng, least) for _ in range(TRIES)]
    owners = min(tries, key=lambda owners: _cut(graphs[-1], owners, limit))
    for fine, cluster in zip(graphs[-2::-1], clusters[::-1]):
        owners = _settled(fine, owners[cluster], limit, rng, least)
    return owners


@dataclass(frozen=True, eq=False)
class GraphPart:
    """What one rank keeps of a graph: its own nodes, the halo of others around them, and the edges that it gathers by.

    `nodes` int64 are the numbers of its nodes in the whole graph, the first `own` its own, the others the halo; `edges`
    int64 (m, 2) count from 0 among these. So `features[part.nodes]` is what it keeps of features, and a
    `NeighborLoader` of `part.edges` samples as one of the whole graph does, for as many layers as the halo has hops.

    >>> part = GraphPart.of([[0, 1], [1, 2], [2, 3]], [0, 0, 1, 1], rank=1)
    >>> part.nodes.tolist(), part.own, part.edges.tolist(), part.places([3, 1]).tolist()
    ([2, 3, 1], 2, [[2, 0], [0, 1]], [1, 2])
    """

    nodes: Ids
    own: AtLeast1
    edges: Ids

    def __post_init__(self) -> None:
        if self.nodes.ndim != 1 or self.own > len(self.nodes) or self.edges.ndim != 2 or self.edges.shape[1:] != (2,):
            shapes = f"nodes {self.nodes.shape}, {self.own} own, edges {self.edges.shape}"
            raise DataError(shapes, fix="give nodes (n,), of which as many are own at most, and edges (m, 2)")
        if len(np.unique(self.nodes)) < len(self.nodes):
            raise DataError("a node stands twice among those of a part", fix="give each once: the own, then the halo")
        checked_edges(self.edges, len(self.nodes))

    @classmethod
    @public
    def of(cls, edges: ArrayLike, owners: ArrayLike, rank: Count, *, hops: AtLeast1 = 1) -> GraphPart:
        """The part of `rank` among `owners`, which `partition` makes, with what is `hops` edges away."""
        owned = unmasked(owners, "owners")
        if owned.dtype.kind not in "iu" or owned.ndim != 1:
            raise DataError(f"owners are {owned.dtype} of shape {owned.shape}", fix="give the rank of each node")
        if hops < 1:
            raise ArgumentError(f"hops={hops}", fix="a halo is one edge wide at least")
        pairs, own = checked_edges(edges, len(owned)), owned == rank
        if not own.any():
            known = f"parts are {owned.min()} to {owned.max()}" if owned.size else "there are no nodes"
            raise DataError(f"no node belongs to rank {rank}", fix=known)
        inside, known = own, own
        for _ in range(hops):
            inside, kept = known, known[pairs].any(axis=1)
            known = known.copy()
            known[pairs[kept]] = True
            if (known == inside).all():  # all that can be reached
                break
        nodes = np.concatenate([np.flatnonzero(own), np.flatnonzero(known & ~own)])
        part = cls(nodes, int(own.sum()), pairs[:0])
        return replace(part, edges=part.places(pairs[inside[pairs].any(axis=1)]))

    @public
    def places(self, ids: ArrayLike) -> Ids:
        """Where nodes of the whole graph stand among those of this part; DataError for one that is not there."""
        wanted, order = unmasked(ids, "nodes"), np.argsort(self.nodes)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise DataError(f"nodes are {wanted.dtype}", fix="give their numbers in the whole graph, as integers")
        wanted = wanted.astype(np.int64)
        found = order[np.searchsorted(self.nodes, wanted, sorter=order) % len(order)]
        if (strange := wanted[self.nodes[found] != wanted]).size:
            raise DataError(
                f"node {strange[0]} is neither in this part nor in its halo", fix="ask the rank that has it"
            )
        return found


class _Weighted(NamedTuple):
    """A graph whose nodes stand for `sizes` nodes; those of node k are neighbors[starts[k]:starts[k + 1]]."""

    sizes: Ids
    starts: Ids
    neighbors: Ids
    weights: Ids


def _weighted(pairs: Ids, weights: Ids, sizes: Ids) -> _Weighted:
    """The graph of these edges; equal ones are joined, and those of a node to itself are gone."""
    count, other = len(sizes), pairs[:, 0] != pairs[:, 1]
    both = np.concatenate([pairs[other], pairs[other][:, ::-1]])
    keys, place = np.unique(both[:, 0] * count + both[:, 1], return_inverse=True)
    total = np.bincount(place, np.tile(weights[other], 2), minlength=len(keys)).astype(np.int64)
    return _Weighted(sizes, np.searchsorted(keys // count, np.arange(count + 1)), keys % count, total)


def _contracted(graph: _Weighted, cluster: Ids) -> _Weighted:
    """The graph of clusters. Each edge lies there in both directions, of which one is enough."""
    rows = np.repeat(np.arange(len(graph.sizes)), np.diff(graph.starts))
    once = rows < graph.neighbors
    pairs = np.stack([cluster[rows[once]], cluster[graph.neighbors[once]]], axis=1)
    return _weighted(pairs, graph.weights[once], np.bincount(cluster, graph.sizes).astype(np.int64))


def _settled(graph: _Weighted, labels: Ids, limit: int, rng: np.random.Generator, least: int = 0) -> Ids:
    """Labels after nodes have moved to that of most of their neighbors, in which no more than `limit` have room.

    A node of a label that is too full moves in any case, if need be to the emptiest; none moves out of one that would
    have fewer than `least` without it.
    """
    sizes, starts, neighbors, weights = (array.tolist() for array in graph)
    filled, now = np.bincount(labels, graph.sizes).tolist(), labels.tolist()
    for _ in range(SWEEPS):
        before = now.copy()
        for node in rng.permutation(len(now)).tolist():
            pulls = defaultdict(int, {now[node]: 0})
            filled[now[node]] -= sizes[node]
            if filled[now[node]] >= least:
                for k in range(starts[node], starts[node + 1]):
                    pulls[now[neighbors[k]]] += weights[k]
            fits = [label for label in pulls if filled[label] + sizes[node] <= limit]
            now[node] = max(fits, key=lambda label: (pulls[label], -filled[label]), default=None)
            if now[node] is None:
                now[node] = min(range(len(filled)), key=filled.__getitem__)
            filled[now[node]] += sizes[node]
        if now == before:
            break
    return np.array(now, np.int64)


def _grown(graph: _Weighted, parts: int, rng: np.random.Generator) -> Ids:
    """A first cut: parts grow one after the other, each from some node, by the node most of which is in it already."""
    owners, left = np.full(len(graph.sizes), parts - 1), graph.sizes.sum()
    free = dict.fromkeys(rng.permutation(len(owners)).tolist(), 0)
    for part in range(parts - 1):
        filled, wanted = 0, left / (parts - part)
        pulls = dict.fromkeys(free, 0)
        while filled < wanted and pulls:
            node = max(pulls, key=pulls.__getitem__)
            del pulls[node], free[node]
            owners[node], filled = part, filled + int(graph.sizes[node])
            for k in range(graph.starts[node], graph.starts[node + 1]):
                if (near := int(graph.neighbors[k])) in pulls:
                    pulls[near] += int(graph.weights[k])
        left -= filled
    return owners


def _cut(graph: _Weighted, owners: Ids, limit: int) -> tuple[int, int]:
    """How many nodes are too many in parts, and the weight between parts."""
    apart = owners[np.repeat(np.arange(len(owners)), np.diff(graph.starts))] != owners[graph.neighbors]
    over = np.bincount(owners, graph.sizes) - limit
    return int(over.clip(0).sum()), int(graph.weights[apart].sum())
