"""Updates that an optimizer makes together become one operator, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS, Graph, topological
from hetu.core.memory import plan
from hetu.core.simplify import interpret
from hetu.core.types import as_dtype
from hetu.gpu_kernels.passes.group_checks import group_checks
from hetu.gpu_kernels.passes.group_updates import group_updates
from hetu.passes import simplify

OPTIMIZERS = [ht.optim.SGD, ht.optim.Momentum, ht.optim.AdaGrad, ht.optim.RMSProp, ht.optim.Adam, ht.optim.AMSGrad]


def losses(count=3):
    variables = [ht.variable(f"w{k}", np.arange(1.0, k + 3, dtype="float32"), (k + 2,)) for k in range(count)]
    return variables, sum((ht.sum(w * w) for w in variables[1:]), ht.sum(variables[0] * variables[0]))


def grouped(updates):
    values = group_updates(simplify(updates.values()))  # which makes equal rates one node
    Graph(values).verify()
    return dict(zip(updates, values)), [n for n in topological(values) if n.op.name == "update_all"]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, ht.optim.AdamW])
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_condition_goes_into_the_operator(optimizer, count):
    """Nothing chooses between old and new values afterward, so new values need no memory of their own."""
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
    assert grouped(ht.optim.LAMB(0.1).minimize(loss))[1] == []  # which needs whole parameters
    single = ht.optim.SGD(0.1).minimize(loss, variables[:1])
    assert grouped(single)[1] == []


def test_an_update_that_depends_on_another_stays_by_itself():
    (a, b, *_), _ = losses()
    first = ht.optim.sgd(a, a * 2.0, 0.1)
    second = ht.optim.sgd(b, ht.sum(first) * b, 0.1)
    assert grouped({a: first, b: second})[1] == []


def test_a_rule_that_does_other_things_to_other_shapes_is_joined_by_what_it_does():
    @ht.optim.update_rule
    def by_rank(p, g, lr):
        return p - lr * g if p.ndim == 1 else p - lr * ht.sign(g)

    OPS.pop("by_rank"), OPS.pop("by_rank_rows")
    variables = [ht.variable(f"r{k}", np.ones(shape, "f4")) for k, shape in enumerate([(3,), (2, 3), (4,), (1, 2)])]
    updates = {v: by_rank(v, v * 3.0, 0.5) for v in variables}
    new, groups = grouped(updates)
    assert [g.attrs["count"] for g in groups] == [2, 2]
    feed = {v: np.ones(v.shape, v.dtype) for v in variables}
    assert [made.flat[0] for made in interpret(tuple(new.values()), feed)] == [-0.5, 0.5, -0.5, 0.5]


# -- mixed precision ---------------------------------------------------------------------------------------------------


def low(name):
    """A dtype of 16 bits, if it is there."""
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return as_dtype(name)


def in_16_bits(variables, dtype, scale=None):
    """Gradients as mixed precision hands them to an optimizer; that of the first variable was never in 16 bits."""
    made = [ht.placeholder(f"g{k}", v.shape, dtype if k else "float32") for k, v in enumerate(variables)]
    whole = [ht.astype(g, dtype="float32") if k else g for k, g in enumerate(made)]
    return made, [g if scale is None else g / scale for g in whole]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_read_as_they_were_made(optimizer, dtype, scaled):
    """Bit for bit: widening is exact, and the division is the same one."""
    dtype, (variables, _), rng = low(dtype), losses(), np.random.default_rng(0)
    scale = ht.variable("scale", 3.0, (), trainable=False) if scaled else None
    made, gradients = in_16_bits(variables, dtype.name, scale)
    updates = optimizer(0.1).apply(dict(zip(variables, gradients)))
    new, (group,) = grouped(updates)
    assert {*made} <= {*group.inputs} and group.attrs["scaled"] == scaled
    assert not [n for n in topological(new.values()) if n.op.name in ("astype", "divide")]
    feed = {v: np.full(v.shape, 2, v.dtype) for v in updates} | {scale: np.array(3, "float32")}
    feed |= {g: rng.standard_normal(g.shape).astype(g.dtype) for g in made}
    for old, now in zip(interpret(tuple(updates.values()), feed), interpret(tuple(new.values()), feed)):
        np.testing.assert_array_equal(old, now)
    assert not plan([], {v: n for v, n in new.items() if v is not scale}).late


def test_gradients_that_are_not_divided_alike_stay_so():
    (variables, _), scale = losses(), ht.variable("scale", 3.0, ())
    _, gradients = in_16_bits(variables, "float16", scale)
    gradients[-1] = gradients[-1].inputs[0] / ht.placeholder("other", ())
    (group,) = grouped(ht.optim.SGD(0.1).apply(dict(zip(variables, gradients))))[1]
    assert not group.attrs["scaled"] and {*gradients} <= {*group.inputs}


def checked(variables, gradients):
    """Updates under the condition that all gradients are finite, after both passes."""
    finite = ht.all(ht.isfinite(gradients[0]))
    for g in gradients[1:]:
        finite = finite & ht.all(ht.isfinite(g))
    updates = under(finite, ht.optim.SGD(0.1).apply(dict(zip(variables, gradients))))
    values = group_checks(group_updates(simplify(updates.values())))
    Graph(values).verify()
    return updates, values, [n.op.name for n in topological(values) if n.inputs and n.op.name != "item"]


@pytest.mark.parametrize("bad", [None, 0, 2])
@pytest.mark.parametrize("scale", [8.0, 2.0**-20])
def test_one_operator_asks_whether_all_gradients_are_finite(bad, scale):
    """What is divided may overflow then, so it is divided before it is asked about."""
    variables, _ = losses()
    by = ht.variable("scale", scale, (), trainable=False)
    made, gradients = in_16_bits(variables, "float16", by)
    updates, values, ops = checked(variables, gradients)
    assert sorted(ops) == ["add", "all_finite", "update_all", "where"]  # the last of them counts steps
    feed = {v: np.full(v.shape, 2, v.dtype) for v in updates} | {by: np.array(scale, "float32")}
    feed |= {g: np.full(g.shape, 3, g.dtype) for g in made}
    if bad is not None:
        feed[made[bad]][-1] = np.inf if bad else 2e38
    with np.errstate(over="ignore"):
        old, new = interpret(tuple(updates.values()), feed), interpret(values, feed)
    for before, now in zip(old, new):
        np.testing.assert_array_equal(before, now)
    assert (new[0][0] == 2) == (bad == 2 or (bad == 0 and scale < 1))


def test_what_others_read_unscaled_is_asked_there():
    variables, _ = losses()
    _, gradients = in_16_bits(variables, "float16", ht.variable("scale", 8.0, ()))
    finite = ht.all(ht.isfinite(gradients[0])) & ht.all(ht.isfinite(gradients[1]))
    for outputs in ([finite, gradients[0]], [finite, ht.sum(gradients[1])], [finite, finite.inputs[0]]):
        assert "all_finite" not in [n.op.name for n in topological(group_checks(outputs))]
    assert [n.op.name for n in group_checks([finite])] == ["all_finite"]
