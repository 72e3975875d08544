"""The matrices that nodes gather by, against dense ones, and what is no edge."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError


def dense(edges, nodes, own):
    a = np.eye(nodes) * own
    for i, j in edges:
        a[i, j] += 1
        a[j, i] += 1
    return a


def normalized(a, kind):
    degrees = np.maximum(a.sum(axis=1), 1)
    return {"symmetric": a / np.sqrt(np.outer(degrees, degrees)), "mean": a / degrees[:, None], "none": a}[kind]


@pytest.mark.parametrize("kind", ["symmetric", "mean", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_the_entries_are_those_of_the_dense_matrix(kind, seed):
    rng, nodes = np.random.default_rng(seed), 7
    edges = rng.permuted(np.stack(np.triu_indices(nodes - 1, 1), axis=1), axis=0)[: 3 * seed]  # none at the last node
    rows, columns, values = ht.data.adjacency(edges, nodes, kind)
    found = np.zeros((nodes, nodes))
    np.add.at(found, (rows, columns), values)
    wanted = normalized(dense(edges, nodes, kind != "mean"), kind)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert (np.diff(rows) >= 0).all() and values.dtype == "float32"


MISTAKES = [
    ([[0, 3]], "symmetric", DataError, "edges between nodes 0 to 3 of 3"),
    ([[-1, 2]], "mean", DataError, "edges between nodes -1 to 2 of 3"),
    ([0, 1], "mean", DataError, r"edges are int64\[2\]"),
    ([[0.0, 1.0]], "none", DataError, r"edges are float64\[1, 2\]"),
    ([[0, 1]], "symetric", ArgumentError, "normalized='symetric'"),
]


@pytest.mark.parametrize(("edges", "kind", "error", "said"), MISTAKES, ids=[case[-1] for case in MISTAKES])
def test_what_is_no_edge_is_told(edges, kind, error, said):
    with pytest.raises(error, match=said):
        ht.data.adjacency(edges, 3, kind)


def loader(**options):
    edges = np.array([(i, j) for i in range(20) for j in range(i) if (i * j) % 3 == 1])  # none at multiples of 3
    given = {"fanouts": (3, 2), "batch_size": 4} | options
    return edges, ht.data.NeighborLoader(edges, 20, np.arange(10), np.arange(10) % 3, **given)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_sample_holds_neighbors_alone_none_twice_and_as_many_as_it_may(seed, itself):
    """With `itself`, each node beside its neighbors."""
    edges, batches = loader(shuffle=True, seed=seed, itself=itself)
    adjacent = dense(edges, 20, itself) > 0
    for nodes, *arrays, y in batches:
        hops = [arrays[4 * k : 4 * k + 4] for k in range(2)]
        assert len(nodes) == len(set(nodes.tolist())) and (nodes[: len(y)] % 3 == y).all()
        for (own, rows, columns, values), fanout in zip(hops, (2, 3)):
            assert own.tolist() == list(range(len(own)))
            wanted = np.minimum(adjacent[nodes[own]].sum(axis=1), fanout + itself)
            assert not itself or {*zip(own, own)} <= {*zip(rows, columns)}
            assert (np.bincount(rows, minlength=len(own)) == wanted).all()
            assert adjacent[nodes[rows], nodes[columns]].all() and len(set(zip(rows, columns))) == len(rows)
            np.testing.assert_allclose(np.bincount(rows, values, len(own)), wanted > 0, atol=1e-6)
        assert len(hops[1][0]) == len(y) and set(hops[0][0]) >= set(hops[1][2])


SAMPLED = {"mean": ht.models.graphs.Sampled, "none": ht.models.graphs.SampledAttention}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SAMPLED)
def test_with_room_for_all_neighbors_a_sample_gives_what_the_whole_graph_does(kind):
    edges, batches = loader(fanouts=(20, 20), itself=kind == "none")
    features = np.random.default_rng(0).standard_normal((20, 5)).astype("float32")
    sample = batches.placeholders()
    model = SAMPLED[kind](5, 3, hidden=4, dropout=0.0)
    graph = None, ht.data.adjacency(edges, 20, kind)
    part, whole = model(ht.take(ht.constant(features), sample.nodes), sample.hops), model(features, (graph, graph))
    executor = ht.Executor({"part": [part], "whole": [whole]})
    everywhere = executor.run("whole")[0]
    for batch in batches:
        feed = dict(zip(sample.inputs[:-1], batch))
        np.testing.assert_allclose(executor.run("part", feed)[0], everywhere[batch[0][: len(batch[-1])]], atol=1e-5)


def test_epochs_differ_and_a_position_is_taken_up():
    _, batches = loader(shuffle=True)
    first, second = [[batch[0].tolist() for batch in batches] for _ in range(2)]
    assert first != second and len(first) == len(batches) == 3
    _, again = loader(shuffle=True)
    again.load_state({"epoch": 1, "cursor": 1, "batches": 3, "seed": 0})
    assert [batch[0].tolist() for batch in again] == second[1:]
    assert again.state() == {"epoch": 2, "cursor": 0, "batches": 3, "seed": 0}


def test_the_position_behind_the_last_batch_is_the_next_epoch_and_a_loop_left_early_begins_anew():
    _, batches = loader(shuffle=True)
    places = [batches.state() for _ in batches]
    assert places[-1] == {"epoch": 1, "cursor": 0, "batches": 3, "seed": 0} == batches.state()
    first = next(iter(batches))[0].tolist()
    assert next(iter(batches))[0].tolist() == first


NONSENSE = [
    ({"epoch": 0, "batch": 1}, "has epoch, cursor, batches, seed; got epoch, batch"),
    ({"epoch": 0, "cursor": 3, "batches": 3, "seed": 0}, "cursor 3, batches 3, seed 0 does not fit 3 batches"),
    ({"epoch": -1, "cursor": 0, "batches": 3, "seed": 0}, "epoch -1, cursor 0"),
    ({"epoch": 0, "cursor": 0.5, "batches": 3, "seed": 0}, "'cursor': 0.5"),
    ({"epoch": "0", "cursor": 0, "batches": 3, "seed": 0}, "'epoch': '0'"),
    ({"epoch": 0, "cursor": True, "batches": 3, "seed": 0}, "'cursor': True"),
    ({}, "got nothing"),
    (None, "got state=None"),
]


@pytest.mark.parametrize(("state", "said"), NONSENSE, ids=[said for _, said in NONSENSE])
def test_what_is_no_position_is_told(state, said):
    _, batches = loader()
    with pytest.raises((DataError, ArgumentError), match=said):
        batches.load_state(state)
    assert batches.state() == {"epoch": 0, "cursor": 0, "batches": 3, "seed": 0}


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_as_many_batches_as_are_asked_for_of_even_sizes(count):
    _, batches = loader(batches=count, shuffle=True)
    sizes = [len(batch[-1]) for batch in batches]
    assert len(sizes) == len(batches) == count and sum(sizes) == 10 and max(sizes) - min(sizes) <= 1


def test_rows_of_the_nodes_that_are_seen_come_with_a_batch():
    features = np.random.default_rng(0).standard_normal((20, 5)).astype("float32")
    _, plain = loader(shuffle=True)
    _, batches = loader(shuffle=True, rows=(100 + np.arange(20), features))
    sample = batches.placeholders()
    assert [str(node.type) for node in sample.rows] == ["i64[?]", "f32[?, 5]"]
    for (nodes, *rest), (ids, x, *others) in zip(plain, batches):
        assert (ids == 100 + nodes).all() and (x == features[nodes]).all() and len(rest) == len(others)
    with pytest.raises(DataError, match="rows of 19 nodes, there are 20"):
        loader(rows=(features[1:],))


@pytest.mark.parametrize(
    "options", [{"fanouts": (0, 2)}, {"fanouts": ()}, {"batch_size": 11}, {"batches": 11}, {"batches": 0}]
)
def test_what_cannot_be_sampled_is_told(options):
    with pytest.raises(DataError, match="fanouts="):
        loader(**options)
    with pytest.raises(DataError, match="2 nodes with 1 classes"):
        ht.data.NeighborLoader([[0, 1]], 2, [0, 1], [0])


@pytest.mark.parametrize(
    ("ids", "y", "said"),
    [
        ([0, 2], [0, 0], "ids from 0 to 2 of 2 nodes"),
        ([-1], [0], "ids from -1 to -1 of 2 nodes"),
        ([], [], r"there is no node to learn[\s\S]*fix: pass one id at least; of several ranks"),
        ([0.5], [0], "ids are float64"),
        ([[0]], [0], "ids are int64"),
        ([0], [0.5], "classes are float64"),
    ],
)
def test_what_is_no_node_is_told_before_a_batch(ids, y, said):
    with pytest.raises(DataError, match=said):
        ht.data.NeighborLoader([[0, 1]], 2, ids, y, fanouts=(1,), batch_size=1)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e15])
def test_attention_is_a_softmax_over_neighbors_however_far_scores_lie_apart(size):
    """Subtracted is the greatest score of a node, not of all: sums of others underflowed to 0, and it gathered NaN."""
    rng, entries = np.random.default_rng(0), np.array([(0, 0), (0, 1), (1, 2), (2, 2), (2, 0), (1, 2), (4, 3)])
    x, rows, columns = rng.standard_normal((5, 3)), *entries.T  # node 3 has no neighbor
    layer = ht.nn.GraphAttention(3, 2)
    given = ht.placeholder("x", (5, 3))
    y = layer(given, (rows, columns, np.ones(len(rows), "float32")))
    slopes = ht.gradients(ht.sum(ht.square(y)), [layer.asks, layer.answers, given])
    executor = ht.Executor([y, *slopes])
    weight, asks, answers = (
        executor.state[v].astype("float64") for v in (layer.linear.weight, layer.asks, layer.answers)
    )
    found = executor.run({"x": size * x})
    h = size * x @ weight
    scores = (h @ asks[0])[rows] + (h @ answers[0])[columns]
    scores = np.where(scores > 0, scores, 0.2 * scores)
    wanted = np.zeros((5, 2))
    for node in {*rows}:
        own = rows == node
        shares = np.exp(scores[own] - scores[own].max())
        wanted[node] = shares / shares.sum() @ h[columns[own]]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-3, atol=1e-4 * size)
    assert all(np.isfinite(slope).all() for slope in found[1:])
