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
