"""Graphs in parts: how few nodes lie around them, how even they are, and that each has what its nodes gather by."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError
from hetu.data import GraphPart, partition


def planted(nodes: int, groups: int, inside: int, outside: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Edges, on average so many of a node within its group and to others, and the groups."""
    rng, group = np.random.default_rng(seed), np.arange(nodes) % groups
    first = rng.integers(0, nodes, nodes * (inside + outside) // 2)
    within = np.arange(len(first)) < nodes * inside // 2
    same = rng.integers(0, nodes // groups, len(first)) * groups + group[first]
    other = (
        first + rng.integers(0, nodes // groups, len(first)) * groups + rng.integers(1, groups, len(first))
    ) % nodes
    return np.stack([first, np.where(within, same, other)], axis=1), group


def halo(edges: np.ndarray, owners: np.ndarray) -> int:
    """The nodes around all parts, counted from pairs of a node and a part that has a neighbor of it."""
    both = np.concatenate([edges, edges[:, ::-1]])
    apart = owners[both[:, 0]] != owners[both[:, 1]]
    return len({*zip(both[apart, 0].tolist(), owners[both[apart, 1]].tolist())})


GRAPHS = {
    "4 groups": (*planted(2000, 4, 10, 2)[:1], 2000, 4),
    "20 groups": (*planted(2000, 20, 10, 1)[:1], 2000, 4),
    "8 groups": (*planted(1600, 8, 12, 2)[:1], 1600, 8),
    "wordnet": (ht.data.wordnet_nouns().edges, 3000, 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GRAPHS)
def test_parts_are_even_and_few_nodes_lie_around_them(name):
    edges, nodes, parts = GRAPHS[name]
    owners = partition(edges, nodes, parts)
    assert 1 <= np.bincount(owners, minlength=parts).max() / (nodes / parts) <= 1.05
    drawn = np.random.default_rng(0).permutation(np.arange(nodes) % parts)
    share = halo(edges, owners) / halo(edges, drawn)
    assert share <= (0.05 if name == "wordnet" else 0.6), share
    assert halo(edges, owners) == sum(
        len(p.nodes) - p.own for p in (GraphPart.of(edges, owners, k) for k in range(parts))
    )


def test_the_cut_is_no_larger_than_the_one_that_was_planted():
    edges, group = planted(2000, 4, 10, 2)
    owners = partition(edges, 2000, 4)
    assert (owners[edges[:, 0]] != owners[edges[:, 1]]).sum() <= (group[edges[:, 0]] != group[edges[:, 1]]).sum()
    assert np.array_equal(owners, partition(edges, 2000, 4)) and not np.array_equal(
        owners, partition(edges, 2000, 4, seed=1)
    )


STAR, CLIQUES = (
    [[0, k] for k in range(1, 9)],
    [[i + 5 * k, j + 5 * k] for k in range(3) for i in range(5) for j in range(i)],
)
AWKWARD = [
    ("no edges", np.zeros((0, 2), int), 7, 3, 1.0),
    ("one node", np.zeros((0, 2), int), 1, 1, 1.0),
    ("only loops", [[k, k] for k in range(5)], 5, 2, 1.0),
    ("each edge twice", [*STAR, *STAR], 9, 3, 1.0),
    ("as many parts as nodes", STAR, 9, 9, 1.05),
    ("one part", STAR, 9, 1, 1.05),
    ("cliques", CLIQUES, 15, 3, 1.0),
    ("a star among nodes without neighbors", STAR, 500, 4, 1.05),
]


@pytest.mark.parametrize(("name", "edges", "nodes", "parts", "imbalance"), AWKWARD, ids=[row[0] for row in AWKWARD])
def test_awkward_graphs_have_even_parts(name, edges, nodes, parts, imbalance):
    owners = partition(edges, nodes, parts, imbalance=imbalance)
    assert owners.shape == (nodes,) and owners.dtype == "int64" and {*owners.tolist()} <= {*range(parts)}
    assert np.bincount(owners).max() <= max(int(imbalance * nodes / parts), -(-nodes // parts))
    if name == "cliques":
        assert [len({*owners[k : k + 5]}) for k in (0, 5, 10)] == [1, 1, 1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_each_rank_gets_a_part(seed):
    """Of stars, lines and random graphs, also where few parts could hold all nodes."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(2, 70))
    line = np.stack([np.arange(nodes - 1), np.arange(1, nodes)], axis=1)
    for edges in (line, line * [0, 1], rng.integers(0, nodes, (2 * nodes, 2))):
        for parts in (2, 8, int(rng.integers(1, nodes + 1)), nodes):
            for imbalance in (1.0, 1.05, 2.0, np.inf):
                owners = partition(edges, nodes, min(parts, nodes), imbalance=imbalance, seed=seed)
                assert {*owners.tolist()} == {*range(min(parts, nodes))}


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_part_has_what_its_nodes_gather_by(hops, seed):
    rng = np.random.default_rng(seed)
    edges, owners = rng.integers(0, 30, (40, 2)), rng.integers(0, 3, 30)
    near = np.zeros((30, 30), bool)
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = True
    for rank in range(3):
        part = GraphPart.of(edges, owners, rank, hops=hops)
        reach = [owners == rank]
        for _ in range(hops):
            reach.append(reach[-1] | near[reach[-1]].any(axis=0))
        assert {*part.nodes[: part.own]} == {*np.flatnonzero(reach[0])}
        assert {*part.nodes} == {*np.flatnonzero(reach[-1])} and len({*part.nodes}) == len(part.nodes)
        wanted = edges[reach[-2][edges].any(axis=1)]
        assert part.nodes[part.edges].tolist() == wanted.tolist()
        assert part.nodes[part.places(part.nodes[::-1])].tolist() == part.nodes[::-1].tolist()


def test_a_model_gives_each_rank_what_it_gives_one_that_has_all():
    edges, _ = planted(60, 3, 4, 2)
    features = np.random.default_rng(0).standard_normal((60, 5)).astype("float32")
    model = ht.models.graphs.Sampled(5, 3, hidden=4, dropout=0.0)

    def made(x, own_edges):
        mean = None, ht.data.adjacency(own_edges, len(x), "mean")
        return model(ht.constant(x), (mean, mean))

    parts = [GraphPart.of(edges, partition(edges, 60, 3), rank, hops=2) for rank in range(3)]
    whole, *each = ht.Executor([made(features, edges), *(made(features[p.nodes], p.edges) for p in parts)]).run()
    for part, y in zip(parts, each):
        np.testing.assert_allclose(y[: part.own], whole[part.nodes[: part.own]], atol=1e-6)


MISTAKES = [
    (lambda: partition([[0, 1]], 2, 3), ArgumentError, "3 parts of 2 nodes(?s:.*)fix: make from 1 part up to"),
    (lambda: partition([[0, 1]], 2, 0), ArgumentError, "0 parts of 2 nodes"),
    (lambda: partition([[0, 1]], 2, 1, imbalance=0.9), ArgumentError, "imbalance=0.9(?s:.*)fix: pass 1.0"),
    (lambda: partition([[0, 2]], 2, 1), DataError, "edges between nodes 0 to 2 of 2"),
    (lambda: GraphPart.of(np.zeros((0, 2), int), [], 0), DataError, "rank 0(?s:.*)fix: there are no nodes"),
    (lambda: GraphPart.of([[0, 1]], [0, 0], 1), DataError, "no node belongs to rank 1(?s:.*)fix: parts are 0 to 0"),
    (lambda: GraphPart.of([[0, 1]], [0, 1], 1, hops=0), ArgumentError, "hops=0(?s:.*)fix: a halo is one edge wide"),
    (lambda: GraphPart.of([[0, 1]], [0, 0, 0], 0).places([3]), DataError, "node 3 is neither in this part nor in its"),
]


@pytest.mark.parametrize(("act", "error", "said"), MISTAKES, ids=[row[-1] for row in MISTAKES])
def test_what_is_no_partition_is_told(act, error, said):
    with pytest.raises(error, match=said):
        act()
