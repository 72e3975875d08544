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
