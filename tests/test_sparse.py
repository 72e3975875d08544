"""The sparse products: fixed entries, which are put in order when they are bound, and fed ones; a graph that learns."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import optim
from hetu.core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from hetu.core.graph import topological


def entries(rng, size, nodes, count):
    """Rows whose lengths differ widely, some empty, in no order, with entries that meet."""
    rows = (size * rng.random(count) ** 4).astype(np.int64) // 2 * 2
    return rows, rng.integers(0, nodes, count), rng.standard_normal(count).astype(np.float32)


def dense(rows, columns, values, shape):
    matrix = np.zeros(shape)
    np.add.at(matrix, (rows, columns), values)
    return matrix


@pytest.mark.parametrize(("size", "nodes", "count", "features"), [(30, 20, 500, 3), (7, 5, 1, 1), (400, 90, 9000, 40)])
def test_fixed_entries_give_the_dense_product_and_its_gradients(size, nodes, count, features):
    rng = np.random.default_rng(count)
    rows, columns, values = entries(rng, size, nodes, count)
    matrix, x = dense(rows, columns, values, (size, nodes)), rng.standard_normal((nodes, features), np.float32)
    given, weights = ht.placeholder("x", x.shape), ht.placeholder("v", values.shape)
    g = rng.standard_normal((size, features)).astype(np.float32)
    for coefficients in (ht.constant(values), weights):
        y = ht.sparse_matmul(rows, columns, coefficients, given, size=size)
        dx, dv = ht.gradients(ht.sum(y * g), [given, coefficients])
        feed = {given: x} if coefficients is not weights else {given: x, weights: values}
        executor = ht.Executor([y, dx, dv])
        for _ in range(2):
            got = executor.run(feed)
        wanted = (matrix @ x, matrix.T @ g, (g[rows] * x[columns]).sum(1))
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("fixed", [True, False])
def test_products_are_sampled(fixed, dtype):
    rng, count = np.random.default_rng(0), 3000
    rows, columns, _ = entries(rng, 30, 20, count)
    a, b = rng.standard_normal((30, 80)).astype(dtype), rng.standard_normal((20, 80)).astype(dtype)
    at = (rows, columns) if fixed else (ht.placeholder("r", (None,), "int64"), ht.placeholder("c", (None,), "int64"))
    given = ht.placeholder("a", a.shape, dtype)
    feed = {given: a} if fixed else {given: a, at[0]: rows, at[1]: columns}
    y = ht.sampled_matmul(*at, given, b)
    (got,) = ht.Executor([y]).run(feed)
    wanted = (a.astype(float) @ b.astype(float).T)[rows, columns]
    np.testing.assert_allclose(got, wanted, rtol=0, atol={"float64": 1e-12, "float32": 1e-4}.get(dtype, 0.5))


def test_the_gradient_for_values_is_sampled_where_the_matrix_has_entries():
    values, x = ht.placeholder("v", (3,)), ht.placeholder("x", (2, 4))
    y = ht.sparse_matmul([0, 1, 1], [0, 0, 1], values, x, size=2)
    ops = [n.op.name for n in topological(ht.gradients(ht.sum(ht.square(y)), [values]))]
    assert ops.count("sampled_matmul") == 1 and "take" not in ops


def test_no_number_spreads_from_a_node_to_rows_that_do_not_read_it():
    x = np.array([[np.nan], [1.0], [2.0]], np.float32)
    rows, columns = np.repeat([0, 1, 2], [3, 9, 1]), np.array([1, 2, 1] + [2] * 9 + [0])
    y = ht.sparse_matmul(rows, columns, np.ones(13, np.float32), ht.placeholder("x", (3, 1)), size=3)
    np.testing.assert_array_equal(ht.Executor([y]).run({"x": x})[0].ravel(), [4, 18, np.nan])


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("row", "column", "what"), [(4, 0, "row 4"), (0, 3, "column 3"), (-1, 0, "row -1")])
def test_entries_outside_are_named(fixed, is_sampled, row, column, what):
    x, values = ht.placeholder("x", (3, 2)), np.ones(2, np.float32)
    rows, columns = np.array([0, row]), np.array([0, column])
    feed = {x: np.ones((3, 2), np.float32)}
    if not fixed:
        feed |= {"r": rows, "c": columns}
        rows, columns = ht.placeholder("r", (2,), "int64"), ht.placeholder("c", (2,), "int64")
    if is_sampled:
        y = ht.sampled_matmul(rows, columns, np.ones((4, 2), np.float32), x)
    else:
        y = ht.sparse_matmul(rows, columns, values, x, size=4)
    with pytest.raises(ValueRangeError, match=f"{what} at position"):
        ht.Executor([y]).run(feed)


def test_entries_outside_are_named_where_all_is_constant():
    x = np.ones((3, 2), np.float32)
    for y in (ht.sparse_matmul([0], [-1], [1.0], x, size=4), ht.sampled_matmul([0], [-1], x, x)):
        with pytest.raises(ValueRangeError, match="column -1 at position"):
            ht.evaluate(y)


def test_mistakes():
    x, ids, values = ht.placeholder("x", (3, 2)), np.array([0, 1]), np.ones(2, np.float32)
    with pytest.raises(ShapeError, match="vectors of one length"):
        ht.sparse_matmul(ids, ids[:1], values, x, size=2)
    with pytest.raises(ShapeError, match="wanted \\(nodes, features\\)"):
        ht.sparse_matmul(ids, ids, values, ht.placeholder("z", (3,)), size=2)
    with pytest.raises(DTypeError, match="integers"):
        ht.sparse_matmul(values, ids, values, x, size=2)
    with pytest.raises(ArgumentError, match="size=-1"):  # none is a size: an empty graph has gradients
        ht.sparse_matmul(ids, ids, values, x, size=-1)
    with pytest.raises(ShapeError, match="as many features"):
        ht.sampled_matmul(ids, ids, x, ht.placeholder("z", (3, 3)))


def test_a_graph_network_learns():
    """Two convolutions over a ring of three communities give each node the label of its own."""
    nodes = 30
    labels = np.arange(nodes) // 10
    rows = np.repeat(np.arange(nodes), 3)
    columns = labels[rows] * 10 + (rows % 10 + np.tile([-1, 0, 1], nodes)) % 10
    values = np.full(len(rows), 1 / 3, np.float32)
    with ht.scope("gcn"):
        first = ht.variable("first", ht.init.he_uniform, (nodes, 8))
        second = ht.variable("second", ht.init.he_uniform, (8, 3))
    h = ht.relu(ht.sparse_matmul(rows, columns, values, first, size=nodes))
    logits = ht.sparse_matmul(rows, columns, values, h @ second, size=nodes)
    loss = ht.mean(ht.softmax_cross_entropy(logits, ht.constant(labels)))
    executor = ht.Executor({"train": [loss, optim.Adam(0.05).minimize(loss)], "test": [logits]})
    losses = [float(executor.run("train")[0]) for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    assert (executor.run("test")[0].argmax(1) == labels).all()


def test_graph_attention_learns_which_neighbors_count():
    """Every node is to look at the one neighbor that is of its own kind, among four others."""
    rng, nodes, each = np.random.default_rng(0), 60, 5
    kinds = rng.integers(0, 4, nodes)
    rows = np.repeat(np.arange(nodes), each)
    columns = np.concatenate([_neighbors(rng, kinds, node, each) for node in range(nodes)])
    x, labels = np.eye(4, dtype=np.float32)[kinds], np.eye(nodes, dtype=np.float32)
    with ht.scope("attention"):
        query, key = (ht.variable(name, ht.init.normal(0.3), (4, 8)) for name in ("query", "key"))
    weights = ht.exp(ht.sampled_matmul(rows, columns, x @ query, x @ key))
    total = ht.sparse_matmul(rows, columns, weights, np.ones((nodes, 1), np.float32), size=nodes)
    seen = ht.sparse_matmul(rows, columns, weights, labels, size=nodes) / total
    loss = -ht.mean(ht.log(ht.sum(seen * labels[columns[::each]], axis=1)))
    executor = ht.Executor({"train": [loss, optim.Adam(0.05).minimize(loss)], "test": [weights]})
    losses = [float(executor.run("train")[0]) for _ in range(60)]
    assert losses[0] > 1 and losses[-1] < 0.1
    assert (executor.run("test")[0].reshape(nodes, each).argmax(1) == 0).all()


def _neighbors(rng, kinds, node, count):
    """One other node of its kind, then some of others."""
    same = rng.choice(np.flatnonzero((kinds == kinds[node]) & (np.arange(len(kinds)) != node)), 1)
    return np.concatenate([same, rng.choice(np.flatnonzero(kinds != kinds[node]), count - 1, replace=False)])
