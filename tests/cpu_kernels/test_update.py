"""Rules as calls in place: tapes against plain array code, blocks, rules that came as data, and rules of users."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.types import TensorType
from hetu.cpu_kernels import update
from hetu.cpu_kernels.update import in_place
from hetu.ops.composition import parsed, traced
from hetu.ops.update import update_rule

from ..samples.update import ON_ELEMENTS, RULES

FUNCTIONS = {
    "both products": lambda x, y, s: (s * x + 2.0 * y, y - s * x),
    "a result that others still need": lambda x, y, s: (y * x, x * s + y),
    "one value twice": lambda x, y, s: ((z := ht.sin(x) + y * s), z),
    "an array as it was": lambda x, y, s: (x * y, y),
    "a product read twice": lambda x, y, s: ((z := s * x) + z * y, y + z),
    "truth values": lambda x, y, s: (ht.where(x > y * s, x, -y), ht.where(ht.logical_and(s > 0.0, x > 0), x, y)),
    "the same array twice": lambda x, y, s: (s * x + 3.0 * x, y * y - y),
    "a number plus a product": lambda x, y, s: (1.0 + s * x, 1.0 - 2.0 * y),
    "chains": lambda x, y, s: (((x * s + y) * s + y) * s - y * 0.5, ht.maximum(y, x) * s - ht.minimum(x, y)),
}


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("blas", ["0", "1"])
def test_a_tape_computes_what_plain_array_code_does(case, blas, monkeypatch):
    monkeypatch.setenv("HETU_BLAS", blas)
    function = FUNCTIONS[case]
    rng = np.random.default_rng(0)
    x, y, g = rng.standard_normal((3, 5, 4))
    c = traced(lambda x, y, g, s: function(x + g, y, s), 3, 1, (5, 4), {})
    scalar = np.array(0.3)
    wanted = c.run(np, [x, y, g, scalar])
    apart = [np.empty_like(x), np.empty_like(y)]
    for call in in_place(c, apart, (x, y, g), [scalar]):
        call()
    for got, right in zip(apart, wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12)
    kept = g.copy()
    for call in in_place(c, [x, y], (x, y, g), [scalar]):
        call()
    for got, right in zip((x, y), wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12)
    np.testing.assert_array_equal(g, kept)


@pytest.mark.parametrize("name", ON_ELEMENTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_rule_that_came_as_data_does_the_same(name, dtype):
    """Bit for bit, and to rounding what plain array code does."""
    op, rule = RULES[name].op, RULES[name].op.update
    made = rule.composition((7, 3), op.defaults)
    rng = np.random.default_rng(0)
    values = [np.abs(rng.standard_normal((7, 3))).astype(dtype) for _ in range(rule.tables + 1)]
    scalars = [np.array(0.1), np.array(3)][: 1 + rule.timed]
    found = []
    for c in (made, parsed(made.data())):
        outs = [v.copy() for v in values[:-1]]
        for call in in_place(c, outs, (*outs, values[-1]), scalars):
            call()
        found.append(outs)
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], made.run(np, [*values, *scalars]), rtol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_long_parameters_are_updated_in_blocks(monkeypatch, transposed):
    """Blocks, a remainder, and a gradient in another memory order give what whole arrays give."""
    monkeypatch.setattr(update, "BLOCK", 40)
    rng = np.random.default_rng(0)
    p, m, v = rng.normal(size=(3, 23, 7))
    v = v**2
    g = rng.normal(size=(7, 23)).T if transposed else rng.normal(size=(23, 7))
    lr, step = np.array(0.1), np.array(3)
    attrs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}
    wanted = ht.optim.adam.forward(np, p, m, v, g, lr, step, **attrs)
    for call in ht.optim.adam.bound(np, (p, m, v), (p, m, v, g, lr, step), attrs):
        call()
    for got, right in zip((p, m, v), wanted):
        np.testing.assert_allclose(got, right, rtol=1e-12)


def test_the_rule_of_a_user_is_computed_in_place(monkeypatch):
    """Whatever its name is: nothing is copied over what the plain path would have made."""
    monkeypatch.setitem(ht.core.graph.OPS, "relu", ht.core.graph.OPS["relu"])
    monkeypatch.setitem(ht.core.graph.OPS, "relu_rows", None)

    @update_rule
    def relu(p, g, lr):
        return ht.maximum(p - lr * g, 0.0)

    p, table, lr = np.array([1.0, 2.0]), np.ones((3, 2)), np.array(0.5)
    calls = relu.bound(np, p, (p, np.array([4.0, 2.0]), lr), {})
    calls += relu.update.rows.bound(np, table, (table, np.array([2]), np.ones((1, 2)), lr), {"window": None})
    monkeypatch.setattr(relu, "forward", None)
    monkeypatch.setattr(relu.update.rows, "forward", None)
    for call in calls:
        call()
    assert p.tolist() == [0.0, 1.0] and table.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.5, 0.5]]


def test_a_rule_that_no_tape_computes_updates_rows_too(monkeypatch):
    for name in ("whole_part", "by_steps", "by_steps_rows"):
        monkeypatch.setitem(ht.core.graph.OPS, name, None)

    @ht.op(infer=lambda x: TensorType(x.shape, np.dtype("int64")), dims="...->...", differentiable=False)
    def whole_part(xp, x):
        """The integer part."""
        return xp.astype(xp.floor(x), xp.int64)

    @update_rule
    def by_steps(p, g, lr):
        return p - lr * whole_part(g)

    table = np.ones((3, 2))
    inputs = (table, np.array([2, 2]), np.array([[1.5, 0.5], [1.0, 2.0]]), np.array(0.5))
    for call in by_steps.update.rows.bound(np, table, inputs, {"window": None}):
        call()
    assert table.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
