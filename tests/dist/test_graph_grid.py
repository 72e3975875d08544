"""A graph over a grid of ranks: outputs and training are those of one process, and the bytes those of the formula."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError, ShapeError
from hetu.core.op import Role
from hetu.dist import GraphGrid, run_ranks
from hetu.models import graphs

NODES, FEATURES, CLASSES, HIDDEN = 24, 6, 3, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((NODES, FEATURES)).astype("float32")
T = RNG.integers(0, CLASSES, NODES)
EDGES = np.array([(i, j) for i in range(NODES) for j in range(i) if RNG.random() < 0.2])
GRAPH = ht.data.adjacency(EDGES, NODES)
GRIDS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (8, 2)]
each_grid = pytest.mark.parametrize(("ranks", "replicas"), GRIDS)


def model(graph, nodes, share=1):
    """Logits and the loss of some nodes, of which each loss counts as a part of that of all."""
    x, t = ht.placeholder("x", (nodes, FEATURES)), ht.placeholder("t", (nodes,), "int64")
    with ht.scope("gcn"):
        y = graphs.gcn(x, graph, CLASSES, hidden=HIDDEN, dropout=0.0)
    return y, ht.sum(ht.softmax_cross_entropy(y, t)) / (NODES * share)


def alone(steps):
    y, loss = model(GRAPH, NODES)
    executor = ht.Executor([loss, y, ht.optim.Adam(0.05).minimize(loss)])
    return [executor.run({"x": X, "t": T})[:2] for _ in range(steps)]


def of_rank(comm, replicas, steps):
    """Losses of all ranks, logits of this one's block, and what it was sent in a step."""
    grid = GraphGrid(comm.rank, comm.world_size, NODES, replicas=replicas)
    y, loss = model(grid, grid.size, replicas)
    optimizer = ht.optim.Adam(0.05)
    slopes = optimizer.minimize(loss).gradients
    updates = optimizer.apply({w: dist.all_reduce(g) for w, g in slopes.items()})
    executor = ht.Executor([dist.all_reduce(loss), y, updates], comm=comm)
    feed = {"x": X[grid.block], "t": T[grid.block], **grid.feed(GRAPH)}
    found = [executor.run(feed)[:2] for _ in range(steps)]
    return found, grid.block, executor.program(feed)


@pytest.mark.sampled(3)
@each_grid
def test_a_grid_trains_as_one_process_does(ranks, replicas):
    wanted = alone(4)
    for found, block, _ in run_ranks(ranks, lambda comm: of_rank(comm, replicas, 4)):
        for (loss, y), (right, logits) in zip(found, wanted):
            np.testing.assert_allclose(loss, right, atol=1e-5)
            np.testing.assert_allclose(y, logits[block], atol=1e-4)


@each_grid
def test_a_rank_receives_what_the_formula_says(ranks, replicas):
    """Forward, for each product: the blocks of the column's part, and the sums of a row."""

    def received(comm):
        grid = GraphGrid(comm.rank, comm.world_size, NODES, replicas=replicas)
        executor = ht.Executor([model(grid, grid.size)[0]], comm=comm)
        steps = executor.program({"x": X[grid.block], **grid.feed(GRAPH)}).steps
        kinds = [step.node for step in steps if step.node.role is Role.COMMUNICATION]
        passed = sum(n.tensor.size for n in kinds if n.op.name == "broadcast")
        summed = sum(n.tensor.size for n in kinds if n.op.name == "all_reduce")
        return passed, summed

    widths = HIDDEN + CLASSES
    for passed, summed in run_ranks(ranks, received):
        assert passed == (NODES * widths / replicas if ranks > 1 else 0)
        assert summed == (NODES * widths * replicas / ranks if replicas > 1 else 0)


@pytest.mark.parametrize(("ranks", "nodes", "replicas"), [(4, 8, 3), (6, 12, 2), (4, 8, 0)])
def test_replicas_that_do_not_fit_are_told(ranks, nodes, replicas):
    with pytest.raises(ArgumentError, match=rf"{replicas} replicas on {ranks} ranks"):
        GraphGrid(0, ranks, nodes, replicas=replicas)


def test_nodes_that_do_not_divide_are_told():
    with pytest.raises(ShapeError, match=r"10 nodes in 4 rows[\s\S]*fix: add 2 nodes without edges"):
        GraphGrid(0, 4, 10)
