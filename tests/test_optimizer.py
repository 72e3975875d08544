"""An optimizer that nobody has heard of is like ours: alone, over ranks, on rows of a table. For servers see `ps/`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DTypeError, UnknownNameError
from hetu.core.op import Role
from hetu.dist import DataParallel, ZeRO, run_ranks
from hetu.dist.comm.threads import count_names_apart
from hetu.plan.simulation.instructions import bytes_between_ranks

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


@pytest.mark.sampled(3)
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


@ht.optim.update_rule
def whole(p, v, g, lr, *, beta=0.9):
    """A rule that nobody has heard of, with more than one number of a whole parameter."""
    v = beta * v + g / (ht.sqrt(ht.mean(g * g)) + 1e-3)
    return p - lr * v * ht.max(ht.abs(p)), v


@ht.optim.update_rule
def turned(p, v, g, lr):
    """And one whose elements follow from whole rows."""
    v = 0.9 * v + g
    return p - lr * (v @ ht.matrix_transpose(v) @ v if len(p.shape) == 2 else v), v


class Whole(ht.optim.Optimizer):
    rule = whole


class Turned(ht.optim.Optimizer):
    rule = turned


def sent(optimizer, comm, strategy):
    """Losses of some steps, and of one the bytes that a rank sends and the collectives by kind."""
    count_names_apart()
    ex = ht.Executor(dense(optimizer), comm=comm, strategy=strategy)
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((8, 6)).astype("f4"), "t": rng.integers(0, 3, 8)}
    losses = [float(ex.run(feed)[0]) for _ in range(5)]
    program = ex.program(feed)
    kinds = Counter(s.node.op.collective for s in program.steps if s.node.op.collective)
    return losses, bytes_between_ranks(program, comm.world_size), kinds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("optimizer", "numbers"), [(ht.optim.LAMB, 2), (Whole, 2)])
def test_one_that_needs_numbers_of_whole_parameters_sends_little_more_than_adam(optimizer, numbers, stage):
    wanted, _ = trained(optimizer)
    [(_, adam, few)] = run_ranks(2, lambda comm: sent(ht.optim.Adam, comm, ZeRO(stage)))[:1]
    for losses, nbytes, kinds in run_ranks(2, lambda comm: sent(optimizer, comm, ZeRO(stage))):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        assert nbytes <= adam + 4 * 4 * numbers  # of 4 variables, in float32
        assert kinds - few == Counter(all_reduce=kinds["all_reduce"] - few["all_reduce"])
        assert kinds["all_reduce"] <= few["all_reduce"] + numbers  # one bucket for each level, of all variables


@pytest.mark.parametrize("stage", [1, 3])
def test_one_that_needs_whole_rows_trains_as_alone(stage):
    wanted, _ = trained(Turned)
    for losses, _ in run_ranks(3, lambda comm: trained(Turned, comm, strategy=ZeRO(stage))):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    "passes, wanted", [(None, "update_entries"), (APART, "stranger_rows")], ids=["groups", "apart"]
)
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


@pytest.mark.parametrize("blend", [0.5, 1e-8])
def test_a_number_of_the_rule_is_not_lost_in_16_bits(blend):
    """An epsilon of 0 had made NaN of all that has no gradient."""
    for dtype in ("float16", "float32"):
        w = ht.variable("w", ht.init.ones, (3,), dtype=dtype)
        if dtype == "float16" and blend < 0.1:
            with pytest.raises(DTypeError, match="(?s)blend=1e-08 is 0 in float16, of which the variable 'w.* larger"):
                Strange(0.1, blend=blend).minimize(ht.mean(w * w))
        else:
            assert w in Strange(0.1, blend=blend).minimize(ht.mean(w * w))
