"""Every graph layer, the grid of ranks and the sampler on awkward graphs: what plain NumPy gives, or a good error."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError, HetuError
from hetu.dist import GraphGrid, run_ranks

GRAPHS = {  # edges, nodes
    "no edges": ([], 4),
    "one node": ([], 1),
    "one node and itself": ([[0, 0]], 1),
    "only loops": ([[0, 0], [2, 2]], 3),
    "isolated first and last": ([[1, 2]], 4),
    "isolated between": ([[0, 3], [3, 4]], 5),
    "each edge twice": ([[0, 1], [0, 1], [1, 2], [2, 1]], 3),
    "a loop beside edges": ([[0, 1], [1, 1], [1, 2]], 3),
    "a star": ([[0, k] for k in range(1, 6)], 6),
}
F, OUT = 3, 2


def pairs(edges: list[list[int]]) -> np.ndarray:
    return np.array(edges, np.int64).reshape(-1, 2)


def matrix(edges: list[list[int]], nodes: int, kind: str) -> np.ndarray:
    """The dense matrix: every entry counts as often as it is given, in both directions."""
    a = np.eye(nodes) * (kind != "mean")
    for i, j in edges:
        a[i, j] += 1
        a[j, i] += 1
    d = np.maximum(a.sum(axis=1), 1)
    return {"symmetric": a / np.sqrt(np.outer(d, d)), "mean": a / d[:, None], "none": a}[kind]


def attended(a: np.ndarray, h: np.ndarray, asks: np.ndarray, answers: np.ndarray) -> np.ndarray:
    scores = (h @ asks)[:, None] + (h @ answers)[None]
    weights = a * np.exp(np.where(scores > 0, scores, 0.2 * scores))
    return weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30) @ h


def conv(layer, value, a, x):
    return a @ x @ value(layer.linear.weight) + value(layer.bias)


def sage(layer, value, a, x):
    return x @ value(layer.own.weight) + value(layer.own.bias) + a @ x @ value(layer.neighbors.weight)


def attention(layer, value, a, x):
    h = x @ value(layer.linear.weight)
    made = [attended(a, h[:, k * OUT : (k + 1) * OUT], value(layer.asks)[k], value(layer.answers)[k]) for k in range(2)]
    return np.concatenate(made, axis=1) + value(layer.bias)


LAYERS = {
    "conv": (lambda: ht.nn.GraphConv(F, OUT), "symmetric", conv),
    "sage": (lambda: ht.nn.GraphSAGE(F, OUT), "mean", sage),
    "attention": (lambda: ht.nn.GraphAttention(F, OUT, heads=2), "none", attention),
}


@pytest.fixture(params=["compiled", "numpy"])
def compiling(request, monkeypatch):
    """With C, and without."""
    monkeypatch.setenv("HETU_CC", "0") if request.param == "numpy" else monkeypatch.delenv("HETU_CC", raising=False)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_layers_on_awkward_graphs(name, kind):
    """Entries as constants and as feeds give what the dense formula does, and finite gradients."""
    (edges, nodes), (make, normalized, formula) = GRAPHS[name], LAYERS[kind]
    x = np.random.default_rng(0).standard_normal((nodes, F)).astype("float32")
    entries = ht.data.adjacency(pairs(edges), nodes, normalized)
    layer, given = make(), ht.placeholder("x", (nodes, F))
    kinds = zip(("rows", "columns", "values"), ("int64", "int64", "float32"))
    fed = tuple(ht.placeholder(name, (None,), dtype) for name, dtype in kinds)
    fixed, open_ = layer(given, entries), layer(given, fed)
    slopes = ht.gradients(ht.sum(ht.square(open_)), [given, *ht.Graph((open_,)).leaves("variable")])
    executor = ht.Executor({"fixed": [fixed], "open": [open_, *slopes]})
    wanted = formula(layer, lambda v: executor.state[v].astype("float64"), matrix(edges, nodes, normalized), x)
    found = executor.run("open", {given: x} | dict(zip(fed, entries)))
    for y in (executor.run("fixed", {given: x})[0], found[0]):
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert all(np.isfinite(slope).all() for slope in found[1:])


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("name", GRAPHS)
def test_the_grid_on_awkward_graphs(name):
    edges, nodes = GRAPHS[name]
    nodes += -nodes % 2  # nodes without edges fill the last block
    x = np.random.default_rng(0).standard_normal((nodes, F)).astype("float32")

    def run(comm):
        grid = GraphGrid(comm.rank, comm.world_size, nodes)
        y = grid(ht.constant(x[grid.block]))
        return ht.Executor([y], comm=comm).run(grid.feed(ht.data.adjacency(pairs(edges), nodes)))[0]

    found = np.concatenate(run_ranks(2, run))
    np.testing.assert_allclose(found, matrix(edges, nodes, "symmetric") @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("kind", ["mean", "none"])
@pytest.mark.parametrize("name", GRAPHS)
def test_samples_of_awkward_graphs(name, kind):
    """With room for all neighbors they give what the whole graph does; otherwise something finite."""
    edges, nodes = GRAPHS[name]
    x, y = np.random.default_rng(0).standard_normal((nodes, F)).astype("float32"), np.zeros(nodes, int)
    make = {"mean": ht.models.graphs.Sampled, "none": ht.models.graphs.SampledAttention}[kind]
    model, graph = make(F, OUT, hidden=4, dropout=0.0), (None, ht.data.adjacency(pairs(edges), nodes, kind))
    given = pairs(edges), nodes, np.arange(nodes), y
    loader = ht.data.NeighborLoader(*given, fanouts=(99, 99), batch_size=min(2, nodes), itself=kind == "none")
    sample = loader.placeholders()
    part = model(ht.take(ht.constant(x), sample.nodes), sample.hops)
    executor = ht.Executor({"part": [part], "whole": [model(ht.constant(x), (graph, graph))]})
    everywhere = executor.run("whole")[0]
    few = ht.data.NeighborLoader(*given, fanouts=(1, 1), batch_size=nodes, itself=kind == "none")
    for batches in (loader, few):
        for batch in batches:
            found = executor.run("part", dict(zip(sample.inputs[:-1], batch)))[0]
            assert np.isfinite(found).all() and len(found) == len(batch[-1])
            if batches is loader:
                np.testing.assert_allclose(found, everywhere[batch[0][: len(found)]], rtol=1e-4, atol=1e-5)


WRONG = {
    "beyond": ([0, 3], "edges between nodes 0 to 3 of 3"),
    "below": ([-1, 0], "edges between nodes -1 to 0 of 3"),
    "a fraction": ([0.5, 1.0], r"edges are float64\[1, 2\]"),
    "three ends": ([0, 1, 2], r"edges are int64\[1, 3\]"),
}
TAKERS = {
    "adjacency": lambda edges: ht.data.adjacency(edges, 3),
    "sampler": lambda edges: ht.data.NeighborLoader(edges, 3, [0], [0], fanouts=(1,), batch_size=1),
    "partition": lambda edges: ht.data.partition(edges, 3, 2),
    "part": lambda edges: ht.data.GraphPart.of(edges, [0, 0, 1], 0),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_edge_is_told_by_all(what, taker):
    edge, said = WRONG[what]
    with pytest.raises(DataError, match=said):
        TAKERS[taker]([edge])


STRANGE = {
    "a row beyond": ([3], [0]),
    "a column beyond": ([0], [3]),
    "a row below": ([-1], [0]),
    "lengths": ([0, 1], [0]),
}


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("what", STRANGE)
def test_entries_out_of_range_are_told_by_layers(what, kind):
    rows, columns = (np.array(part) for part in STRANGE[what])
    make, _, _ = LAYERS[kind]
    x = ht.placeholder("x", (3, F))
    kinds = zip(("rows", "columns", "values"), ("int64", "int64", "float32"))
    fed = tuple(ht.placeholder(name, (None,), dtype) for name, dtype in kinds)
    executor = ht.Executor([make()(x, fed)])
    with pytest.raises(HetuError) as told:
        executor.run(dict(zip((x, *fed), (np.ones((3, F), "float32"), rows, columns, np.ones(len(rows), "float32")))))
    said = (
        "got entries" if what == "lengths" else f"{what.split()[1]} {-1 if 'below' in what else 3} at position [0] lies"
    )
    assert said in str(told.value) and "fix: " in str(told.value)


@pytest.mark.parametrize("what", ["a row beyond", "a column beyond", "a row below"])
def test_entries_out_of_range_are_told_by_the_grid(what):
    """Nobody was fed them."""
    rows, columns = (np.array(part) for part in STRANGE[what])
    with pytest.raises(DataError, match=f"{what.split()[1]}s -?[0-9] to -?[0-9] of 3 nodes"):
        GraphGrid(0, 1, 3).feed((rows, columns, np.ones(1, "float32")))
