"""Optimizers against textbook loops over several steps; schedules; what `minimize` refuses; row updates."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

import hetu as ht
from hetu import nn, optim, schedules
from hetu.core.errors import ArgumentError, GradientError, ShapeError, ValueRangeError

from .samples.update import ON_ELEMENTS, RULES

RATE, BETA1, BETA2 = 0.1, 0.9, 0.999
START = np.array([[1.0, -2.0, 3.0], [0.5, 0.0, -1.5]])
TARGET = np.array([[0.0, 1.0, 1.0], [2.0, -1.0, 0.5]])


def slope(w):
    return 2 * (w - TARGET) * np.array([1.0, 5.0, 0.2])


def trained(optimizer, steps=5, dtype="float64"):
    """The variable after some steps on a quadratic with gradient `slope`."""
    with ht.scope("quadratic"):
        w = ht.variable("w", START, dtype=dtype)
    target, scale = TARGET.astype(dtype), np.array([1.0, 5.0, 0.2], dtype)
    loss = ht.sum(ht.square(w - target) * scale)
    ex = ht.Executor({"train": [loss, optimizer.minimize(loss)]})
    for _ in range(steps):
        ex.run("train")
    return ex.state["quadratic/w"], ex


def textbook(rule, steps=5):
    """START after some steps of `rule(w, g, memory, t)`, which returns the new w and keeps what it likes in memory."""
    w, memory = START.copy(), {}
    for t in range(1, steps + 1):
        w = rule(w, slope(w), memory, t)
    return w


def remember(memory, name, value):
    memory[name] = value
    return value


def sgd(w, g, memory, t):
    return w - RATE * g


def l2(w, g, memory, t):
    return w - RATE * (g + 0.3 * w)


def heavy_ball(w, g, memory, t):
    return w - RATE * remember(memory, "v", 0.9 * memory.get("v", 0) + g)


def nesterov(w, g, memory, t):
    v = remember(memory, "v", 0.9 * memory.get("v", 0) + g)
    return w - RATE * (g + 0.9 * v)


def adagrad(w, g, memory, t):
    return w - RATE * g / (np.sqrt(remember(memory, "a", memory.get("a", 0) + g**2)) + 1e-10)


def rmsprop(w, g, memory, t):
    return w - RATE * g / (np.sqrt(remember(memory, "v", 0.9 * memory.get("v", 0) + 0.1 * g**2)) + 1e-8)


def moments(g, memory, t):
    m = remember(memory, "m", BETA1 * memory.get("m", 0) + (1 - BETA1) * g)
    v = remember(memory, "v", BETA2 * memory.get("v", 0) + (1 - BETA2) * g**2)
    return m / (1 - BETA1**t), v / (1 - BETA2**t)


def adam(w, g, memory, t):
    m, v = moments(g, memory, t)
    return w - RATE * m / (np.sqrt(v) + 1e-8)


def adamw(w, g, memory, t):
    return adam(w, g, memory, t) - RATE * 0.05 * w


def amsgrad(w, g, memory, t):
    m, _ = moments(g, memory, t)
    top = remember(memory, "top", np.maximum(memory.get("top", 0), memory["v"]))
    return w - RATE * m / (np.sqrt(top / (1 - BETA2**t)) + 1e-8)


def lamb(w, g, memory, t):
    m, v = moments(g, memory, t)
    r = m / (np.sqrt(v) + 1e-6) + 0.05 * w
    return w - RATE * np.linalg.norm(w) / np.linalg.norm(r) * r


def clipped(w, g, memory, t):
    return w - RATE * np.clip(g, -1.5, 1.5)


def norm_clipped(w, g, memory, t):
    return w - RATE * g * min(1, 2.0 / np.linalg.norm(g))


def lion(w, g, memory, t):
    m = memory.get("m", 0)
    remember(memory, "m", 0.99 * m + 0.01 * g)
    return w - RATE * (np.sign(0.9 * m + 0.1 * g) + 0.05 * w)


def ftrl(w, g, memory, t):
    n = memory.get("n", 0)
    sigma = (np.sqrt(remember(memory, "n", n + g**2)) - np.sqrt(n)) / RATE
    z = remember(memory, "z", memory.get("z", 0) + g - sigma * w)
    return np.where(np.abs(z) <= 0.5, 0, -(z - np.sign(z) * 0.5) / ((1 + np.sqrt(memory["n"])) / RATE + 0.1))


CASES = {
    "sgd": (lambda: optim.SGD(RATE), sgd),
    "sgd with L2": (lambda: optim.SGD(RATE, weight_decay=0.3), l2),
    "momentum": (lambda: optim.Momentum(RATE), heavy_ball),
    "nesterov": (lambda: optim.Momentum(RATE, nesterov=True), nesterov),
    "adagrad": (lambda: optim.AdaGrad(RATE), adagrad),
    "rmsprop": (lambda: optim.RMSProp(RATE), rmsprop),
    "adam": (lambda: optim.Adam(RATE), adam),
    "amsgrad": (lambda: optim.AMSGrad(RATE), amsgrad),
    "adamw": (lambda: optim.AdamW(RATE, weight_decay=0.05), adamw),
    "lamb": (lambda: optim.LAMB(RATE, epsilon=1e-6, weight_decay=0.05), lamb),
    "lion": (lambda: optim.Lion(RATE, weight_decay=0.05), lion),
    "ftrl": (lambda: optim.FTRL(RATE, l1=0.5, l2=0.1), ftrl),
    "clip by value": (lambda: optim.SGD(RATE, clip_value=1.5), clipped),
    "clip by norm": (lambda: optim.SGD(RATE, clip_norm=2.0), norm_clipped),
}


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("case", CASES)
def test_optimizer_follows_its_textbook(case):
    make, rule = CASES[case]
    value, ex = trained(make())
    np.testing.assert_allclose(value, textbook(rule), rtol=1e-9, atol=1e-12)
    (step,) = [v for name, v in ex.state.items() if name.endswith("/step")]
    assert step == 5 and step.dtype == np.int64
    single, _ = trained(make(), dtype="float32")
    np.testing.assert_allclose(single, textbook(rule), rtol=2e-4, atol=1e-5)


def test_a_schedule_is_read_at_every_step():
    value, _ = trained(optim.SGD(schedules.step_decay(RATE, every=2, factor=0.5)))
    rates = [RATE, RATE, RATE / 2, RATE / 2, RATE / 4]
    np.testing.assert_allclose(value, textbook(lambda w, g, memory, t: w - rates[t - 1] * g), rtol=1e-12)


@pytest.mark.parametrize("case", ["sgd", "adam", "lamb"])
def test_a_rate_may_be_a_variable_that_is_set_between_steps(case):
    make, rule = {"sgd": (optim.SGD, sgd), "adam": (optim.Adam, adam), "lamb": (optim.LAMB, lamb)}[case]
    rate = ht.variable("rate_by_hand", RATE, (), "float64", trainable=False)
    options = {"epsilon": 1e-6, "weight_decay": 0.05} if case == "lamb" else {}
    value, ex = trained(make(rate, **options))
    np.testing.assert_allclose(value, textbook(rule), rtol=1e-9, atol=1e-12)
    ex.state[rate] = 0.0
    ex.run("train")
    np.testing.assert_array_equal(ex.state["quadratic/w"], value)


def test_plateau_lives_in_the_state():
    plateau = schedules.Plateau(RATE, factor=0.5, patience=0)
    with ht.scope("plateau_test"):
        w = ht.variable("w", 1.0, ())
    ex = ht.Executor([optim.SGD(plateau).minimize(w * 1.0)])
    steps = []
    for metric in (3.0, 2.0, 2.5):
        before = float(ex.state[w])
        ex.run()
        steps.append(before - float(ex.state[w]))
        plateau.update(metric, ex.state)
    assert float(ex.state[plateau.variable][0]) == RATE / 2
    before = float(ex.state[w])
    ex.run()
    np.testing.assert_allclose([*steps, before - float(ex.state[w])], [RATE] * 3 + [RATE / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (schedules.constant(0.3), lambda t: 0.3),
        (schedules.step_decay(1.0, every=3), lambda t: 0.1 ** (t // 3)),
        (schedules.multistep(1.0, [2, 5], 0.5), lambda t: 1.0 if t < 2 else 0.5 if t < 5 else 0.25),
        (schedules.exponential(1.0, 0.9), lambda t: 0.9**t),
        (schedules.cosine(1.0, 6, final=0.2), lambda t: 0.6 + 0.4 * math.cos(math.pi * min(t / 6, 1))),
        (schedules.warmup(0.8, 4), lambda t: 0.8 * min((t + 1) / 4, 1)),
        (
            schedules.warmup(schedules.exponential(1.0, 0.5), 3),
            lambda t: (t + 1) / 3 if t < 3 else 0.5 ** (t - 3),
        ),
    ],
)
def test_schedule(schedule, wanted):
    step = ht.placeholder("step", (), "int64")
    node = schedule(step)
    assert node.shape == () and node.dtype == np.float64
    values = [float(ht.evaluate(node, {step: t} if node.inputs else {})) for t in range(9)]
    np.testing.assert_allclose(values, [wanted(t) for t in range(9)], rtol=1e-12)


def test_names_are_readable_and_the_same_when_built_twice():
    def build():
        with ht.scope("model"):
            layer = nn.Linear(3, 2)
            loss = ht.sum(layer(ht.placeholder("x", (4, 3))))
            return [v.name for v in optim.Adam().minimize(loss)]

    names = build()
    assert names == build()
    assert names == [
        "model/linear/weight",
        "model/linear/weight/adam_m",
        "model/linear/weight/adam_v",
        "model/linear/bias",
        "model/linear/bias/adam_m",
        "model/linear/bias/adam_v",
        "model/optimizer/step",
    ]


def test_only_reached_trainable_variables_are_updated():
    with ht.scope("reach"):
        used, cut, fixed = (ht.variable(n, 1.0, (), trainable=n != "fixed") for n in ("used", "cut", "fixed"))
    loss = used * fixed + ht.stop_gradient(cut)
    optimizer = optim.SGD(0.1)
    updates = optimizer.minimize(loss)
    assert list(updates) == [used, optimizer.step] and list(updates.gradients) == [used]
    assert list(optimizer.minimize(loss, [fixed])) == [fixed, optimizer.step]
    with pytest.raises(GradientError, match="does not depend on"):
        optimizer.minimize(loss, [used, cut])
    with pytest.raises(GradientError, match="no trainable variable"):
        optimizer.minimize(ht.stop_gradient(used) * fixed)
    with pytest.raises(ArgumentError, match="not a variable"):
        optimizer.minimize(loss, [loss])
    with pytest.raises(GradientError, match="not a scalar"):
        optimizer.minimize(ht.broadcast_to(used, (2,)))


def test_of_the_variables_of_a_layer_those_that_train_are_taken():
    """As of two networks that train against each other; the statistics of their norms go on."""
    with ht.scope("one of two"):
        net = ht.nn.Sequential(ht.nn.Linear(3, 4), ht.nn.BatchNorm(4))
    x = ht.placeholder("x", (5, 3))
    loss = ht.mean(ht.square(net(x)))
    ex = ht.Executor({"train": [loss, optim.SGD(0.1).minimize(loss, net.variables)]})
    before = {v.name: ex.state[v.name].copy() for v in net.variables}
    ex.run("train", {x: np.random.default_rng(0).normal(size=(5, 3))})
    assert all((ex.state[name] != value).any() for name, value in before.items() if "linear/bias" not in name)


def test_apply_takes_foreign_gradients_and_checks_their_types():
    with ht.scope("apply"):
        w = ht.variable("w", np.ones(3, np.float32))
    assert next(iter(optim.SGD(0.1).apply({w: w * 2}))) is w
    with pytest.raises(ShapeError, match="does not fit"):
        optim.SGD(0.1).apply({w: ht.sum(w)})
    with pytest.raises(ArgumentError, match="learning_rate"):
        optim.SGD(-0.1)
    with pytest.raises(ArgumentError, match="clip_norm"):
        optim.Adam(clip_norm="1")


@pytest.mark.parametrize("value", [-0.1, np.nan])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "clip_value", "clip_norm"])
def test_what_is_no_number_from_0_up_is_refused(name, value):
    """NaN is not below 0 either: a decay of it made all weights NaN behind the last loss that was looked at."""
    with pytest.raises(ArgumentError, match=f"SGD got {name}={value}(.|\n)*fix: pass {name} as a number"):
        optim.SGD(**{"learning_rate": 0.1, name: value})
    with pytest.raises(ArgumentError, match=f"cosine got rate={value}(.|\n)*fix: pass rate as a number of 0"):
        ht.schedules.cosine(value, steps=10)


def test_two_optimizers_share_a_loss():
    with ht.scope("two"):
        a, b = ht.variable("a", 1.0, ()), ht.variable("b", 1.0, ())
        first, second = optim.SGD(0.1), optim.SGD(0.5)
        assert (first.step.name, second.step.name) == ("two/optimizer/step", "two/optimizer_1/step")
    ex = ht.Executor([{**first.minimize(a * b, [a]), **second.minimize(a * b, [b])}])
    ex.run()
    np.testing.assert_allclose([ex.state[a], ex.state[b]], [0.9, 0.5], rtol=1e-6)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("rule", ON_ELEMENTS)
def test_row_form_leaves_other_rows_alone(rule, kernels, monkeypatch):
    """Over several steps with other ids each, in place, with duplicates: untouched rows keep value and state."""
    monkeypatch.setenv("HETU_KERNELS", kernels)
    update = RULES[rule].op.update
    form, states = update.rows, len(update.states)
    rng = np.random.default_rng(0)
    tables = tuple(np.abs(rng.normal(size=(50, 3))) for _ in range(1 + states))
    ids, rows, lr, step = np.zeros((2, 4), np.int64), np.zeros((2, 4, 3)), np.array(0.1), np.array(0)
    scalars = (lr, step) if "step" in form.inputs else (lr,)
    calls = form.bound(np, tables if states else tables[0], (*tables, ids, rows, *scalars), form.defaults)
    for count in range(1, 4):
        ids[...], rows[...], step[...] = rng.integers(0, 10, ids.shape) * count, rng.normal(size=rows.shape), count
        before = [t.copy() for t in tables]
        wanted = form.forward(np, *before, ids, rows, *scalars, **form.defaults)
        for call in calls:
            call()
        untouched = np.setdiff1d(np.arange(50), ids)
        for table, old, right in zip(tables, before, wanted if states else (wanted,)):
            np.testing.assert_allclose(table, right, rtol=1e-12)
            np.testing.assert_array_equal(table[untouched], old[untouched])
        assert (tables[0][ids] != before[0][ids]).any(axis=-1).all()


def test_row_forms_check_their_ids():
    with pytest.raises(ValueRangeError, match=r"id -1 .* outside 0 to 2"):
        ht.evaluate(ht.optim.sgd.update.rows(np.ones((3, 2)), [-1], np.ones((1, 2)), 0.1))
    with pytest.raises(ShapeError, match="gradient of the rows"):
        ht.optim.sgd.update.rows(np.ones((3, 2)), [0, 1], np.ones((1, 2)), 0.1)


@pytest.mark.parametrize("name", ON_ELEMENTS)
def test_plain_updates_of_rows_take_memory_in_proportion_to_the_ids(name):
    """And in place nothing in proportion to the table."""
    op, count = RULES[name].op, 4000
    tables = tuple(np.ones((count, 1), np.float32) for _ in range(op.update.tables))
    scalars = (0.1, *([3] if op.update.timed else []))
    few = (*tables, np.arange(9), tables[0][:9], *scalars)
    out, row_form = tables if op.update.states else tables[0], op.update.rows
    for most, run in (
        (200 * count, lambda: row_form.forward(np, *tables, np.arange(count), tables[0], *scalars, **op.defaults)),
        (4 * count, lambda: row_form.into_rule(np, out, *few, **op.defaults)),
    ):
        tracemalloc.start()
        run()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most, "a matrix of ids by ids takes 4000 bytes per id and more"
