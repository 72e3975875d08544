"""An optimizer that nobody has heard of is like ours: alone, over ranks, on rows of a table. For servers see `ps/`."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import UnknownNameError
from hetu.core.leaf import count_names_apart
from hetu.core.op import Role
from hetu.dist import DataParallel, ZeRO, run_ranks

from .apart import APART
from .samples.update import stranger


class Strange(ht.optim.Optimizer):
    rule = stranger


def dense(optimizer):
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        y = ht.nn.Linear(5, 3)(ht.nn.Linear(6, 5, activation=ht.tanh)(x))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return [loss, optimizer(0.05).minimize(loss)]


def trained(optimizer, comm=None, **strategy):
    """Losses of some steps, and the names of the communication in one."""
    count_names_apart()
    ex = ht.Executor(dense(optimizer), comm=comm, **strategy)
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((8, 6)).astype("f4"), "t": rng.integers(0, 3, 8)}
    losses = [float(ex.run(feed)[0]) for _ in range(5)]
    return losses, [s.node.op.name for s in ex.program(feed).steps if s.node.role is Role.COMMUNICATION]


@pytest.mark.parametrize("strategy", [DataParallel(), ZeRO(1), ZeRO(3)], ids=str)
@pytest.mark.parametrize("optimizer", [Strange, ht.optim.Lion])
def test_over_ranks_it_trains_as_alone_with_the_calls_of_adam(optimizer, strategy):
    wanted, _ = trained(optimizer)
    adam = run_ranks(2, lambda comm: trained(ht.optim.Adam, comm, strategy=strategy))
    made = run_ranks(2, lambda comm: trained(optimizer, comm, strategy=strategy))
    for (losses, names), (_, ours) in zip(made, adam):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        assert names == ours
        assert strategy != DataParallel() or names == ["all_reduce_start", "all_reduce_wait"]  # one bucket


@pytest.mark.parametrize("passes, wanted", [(None, "scatter_rows"), (APART, "stranger_rows")], ids=["groups", "apart"])
def test_it_changes_only_the_rows_of_a_table_that_were_looked_up(passes, wanted):
    ids = ht.placeholder("ids", (None, 4), "int64")
    with ht.scope("tables"):
        table = ht.variable("table", ht.init.normal(0.0, 1.0), (50, 3))
    loss = ht.sum(ht.square(ht.embedding(table, ids)))
    ex, feed = ht.Executor([loss, Strange(0.05).minimize(loss)], passes=passes), {"ids": np.array([[3, 9, 3, 20]])}
    before = np.array(ex.state[table])
    ex.run(feed)
    assert np.flatnonzero((np.array(ex.state[table]) != before).any(axis=1)).tolist() == [3, 9, 20]
    assert wanted in {s.node.op.name for s in ex.program(feed).steps}
    assert {"tables/table/stranger_fast", "tables/table/stranger_slow"} < {*ex.state}


def test_its_hyperparameters_are_those_of_the_rule():
    assert Strange(0.1, blend=0.5).hyperparameters == {"blend": 0.5}
    with pytest.raises(UnknownNameError, match="(?s)Strange takes no 'blind'.*did you mean 'blend'"):
        Strange(0.1, blind=0.5)
