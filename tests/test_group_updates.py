"""Updates that an optimizer makes together become one operator, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.graph import Graph, topological
from hetu.interpret import interpret
from hetu.memory import plan
from hetu.passes import group_updates, simplify

OPTIMIZERS = [ht.optim.SGD, ht.optim.Momentum, ht.optim.AdaGrad, ht.optim.RMSProp, ht.optim.Adam, ht.optim.AMSGrad]


def losses(count=3):
    variables = [ht.variable(f"w{k}", np.arange(1.0, k + 3, dtype="float32"), (k + 2,)) for k in range(count)]
    return variables, sum((ht.sum(w * w) for w in variables[1:]), ht.sum(variables[0] * variables[0]))


def grouped(updates):
    values = group_updates(simplify(updates.values()))  # which makes equal rates one node
    Graph(values).verify()
    return dict(zip(updates, values)), [n for n in topological(values) if n.op.name == "update_all"]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, ht.optim.AdamW, ht.optim.LAMB])
def test_one_operator_with_the_same_values_all_in_place(optimizer):
    _, loss = losses()
    updates = optimizer(0.1).minimize(loss)
    new, groups = grouped(updates)
    assert [g.attrs["count"] for g in groups] == [3]
    feed = {v: np.full(v.shape, 2, v.dtype) for v in updates}
    for old, made in zip(interpret(tuple(updates.values()), feed), interpret(tuple(new.values()), feed)):
        np.testing.assert_array_equal(old, made)
    made = plan([], new)
    assert not made.late  # every new value is written straight into its variable


def under(condition, updates):
    return {v: ht.where(condition, new, v) for v, new in updates.items()}


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, ht.optim.LAMB])
@pytest.mark.parametrize("count", [1, 3])
def test_a_condition_goes_into_the_operator(optimizer, count):
    """Nothing chooses between old and new values afterwards, so new values need no memory of their own."""
    variables, loss = losses()
    good = ht.placeholder("good", (), "bool")
    updates = under(good, optimizer(0.1).minimize(loss, variables[:count]))
    new, (group,) = grouped(updates)
    assert group.attrs["count"] == count and group.inputs[-1] is good
    assert all(made.op.name == "item" or v.ndim == 0 for v, made in new.items())
    for value in (True, False):
        feed = {good: np.array(value)} | {v: np.full(v.shape, 2, v.dtype) for v in (*variables, *updates)}
        for old, made in zip(interpret(tuple(updates.values()), feed), interpret(tuple(new.values()), feed)):
            np.testing.assert_array_equal(old, made)
    assert not plan([], new).late


def test_a_condition_that_is_not_that_of_the_whole_update_stays_outside():
    variables, loss = losses()
    one, two = (ht.placeholder(name, (), "bool") for name in ("one", "two"))
    updates = ht.optim.Momentum(0.1).minimize(loss)
    parameters = {v: updates[v] for v in variables}
    states = {v: new for v, new in updates.items() if v not in parameters}
    first = variables[0]

    def conditions(updates):
        return [(g.attrs["count"], g.inputs[-1] if g.attrs["conditional"] else None) for g in grouped(updates)[1]]

    assert conditions(under(one, updates)) == [(3, one)]
    assert conditions(states | under(one, parameters)) == [(3, None)]
    assert conditions(under(one, states) | under(two, parameters)) == [(3, None)]
    assert conditions(under(one, updates) | {first: updates[first]}) == [(2, one)]  # one without needs no group
    rows = ht.placeholder("rows", (2,), "bool")  # those of `first`
    assert conditions(under(rows, {v: updates[v] for v in updates if v.shape == (2,)})) == []
    apart = under(one, parameters) | under(two, {first: parameters[first]})
    assert conditions(apart) == [(1, two), (2, one)]
    falling = ht.sum(updates[first]) < 0.0
    assert conditions(under(falling, updates)) == [(3, None)]  # it waits for an update


def test_the_last_parameter_comes_first():
    """Backward has its gradient first, so the order of the variables would keep all of them waiting."""
    variables, loss = losses()
    _, (group,) = grouped(ht.optim.SGD(0.1).minimize(loss))
    assert group.inputs[:3] == tuple(reversed(variables))


def test_different_rules_rates_and_dtypes_stay_apart():
    variables, loss = losses(4)
    slow, fast = ht.optim.SGD(0.1), ht.optim.SGD(0.5)
    updates = {**slow.minimize(loss, variables[:2]), **fast.minimize(loss, variables[2:])}
    assert [g.attrs["count"] for g in grouped(updates)[1]] == [2, 2]
    single = ht.optim.SGD(0.1).minimize(loss, variables[:1])
    assert grouped(single)[1] == []


def test_an_update_that_depends_on_another_stays_by_itself():
    (a, b, *_), _ = losses()
    first = ht.sgd(a, a * 2.0, 0.1)
    second = ht.sgd(b, ht.sum(first) * b, 0.1)
    assert grouped({a: first, b: second})[1] == []
