"""Functions as compositions of operators: what tracing refuses, plain data there and back, and data from strangers."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, HetuError, ShapeError, UnknownNameError
from hetu.core.graph import OPS
from hetu.ops import composition
from hetu.ops.composition import parsed, traced

from .samples.update import ON_ELEMENTS, RULES


@pytest.mark.parametrize("name", ON_ELEMENTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_comes_as_data_does_the_same(name, dtype):
    """Bit for bit."""
    op, update = RULES[name].op, RULES[name].op.update
    made = update.composition((7, 3), op.defaults)
    again = parsed(json.loads(json.dumps(made.data())))
    assert again is made.interned()
    rng = np.random.default_rng(0)
    values = [np.abs(rng.standard_normal((7, 3))).astype(dtype) for _ in range(update.tables + 1)]
    values += [np.array(0.1), np.array(3)][: 1 + update.timed]
    np.testing.assert_array_equal(made.run(np, values), again.run(np, values))


FUNCTIONS = {
    "both products": lambda x, y, s: (s * x + 2.0 * y, y - s * x),
    "a result that others still need": lambda x, y, s: (y * x, x * s + y),
    "one value twice": lambda x, y, s: ((z := ht.sin(x) + y * s), z),
    "an array as it was": lambda x, y, s: (x * y, y),
    "a product read twice": lambda x, y, s: ((z := s * x) + z * y, y + z),
    "truth values": lambda x, y, s: (ht.where(x > y * s, x, -y), ht.where(ht.logical_and(s > 0.0, x > 0), x, y)),
    "the same array twice": lambda x, y, s: (s * x + 3.0 * x, y * y - y),
    "numbers alone": lambda x, y, s: (1.0 + s * x, 1.0 - 2.0 * y),
    "what follows from scalars": lambda x, y, s: (x * ht.exp(-s) + y / (1.0 - 0.9**s), y - ht.sqrt(s) * x),
    "other dtypes between": lambda x, y, s: (x - s * ht.astype(ht.floor(y), "int64"), ht.astype(y > x, "int32") * y),
    "chains": lambda x, y, s: (((x * s + y) * s + y) * s - y * 0.5, ht.maximum(y, x) * s - ht.minimum(x, y)),
}


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.sampled(8)
def test_as_a_graph_it_changes_variables_in_place(case, dtype):
    """As servers update their tables: what plain array code makes, to rounding."""
    made = traced(lambda x, y, g, s: FUNCTIONS[case](x + g, y, s), 3, 1, (5, 4), {})
    x, y, g = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(dtype)
    variables, feed = [ht.variable("x", x), ht.variable("y", y)], ht.placeholder("g", (5, 4), dtype)
    outputs = made.on([*variables, feed, ht.constant(np.array(0.3))], {})
    ex = ht.Executor([dict(zip(variables, outputs))])
    ex.run({feed: g})
    for variable, right in zip(variables, made.run(np, [x, y, g, np.array(0.3)])):
        rtol = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}[dtype]
        np.testing.assert_allclose(ex.state[variable], right, rtol=rtol, atol=rtol / 10)


def line(*changes):
    """The description of `x - s y` with something else in it."""
    data = {
        "arrays": 2,
        "scalars": 1,
        "lines": [["multiply", [2, 1], {}], ["subtract", [0, 3], {}]],
        "outputs": [4],
    }
    for name, value in changes:
        data[name] = value
    return data


BAD = {
    "nothing": None,
    "a list": [],
    "no lines": {"arrays": 2, "scalars": 1, "outputs": [0]},
    "too long": line(("lines", [["negative", [0], {}]] * composition.LONGEST)),
    "too many inputs": line(("arrays", 10**9)),
    "inputs that are no numbers": line(("arrays", "2")),
    "a value before it is there": line(("lines", [["multiply", [2, 4], {}], ["subtract", [0, 3], {}]])),
    "a value from behind": line(("outputs", [-1])),
    "a line that is none": line(("lines", [["multiply"]])),
    "attributes that are none": line(("lines", [["negative", [0], 3]])),
    "unknown attributes": line(("lines", [["negative", [0], {"axis": 0}]])),
    "missing attributes": line(("lines", [["clip", [0], {}]])),
    "attributes that are lists": line(("lines", [["clip", [0], {"min": [0.0], "max": 1.0}]])),
    "other inputs": line(("lines", [["negative", [0, 1], {}]])),
    "a sum": line(("lines", [["sum", [0], {"axis": 0, "keepdims": False}]])),
    "a leaf": line(("lines", [["placeholder", [], {"name": "x", "shape": 3, "dtype": "float32"}]])),
    "an update in an update": line(("lines", [["sgd", [0, 1, 2], {}]])),
    "a scalar result": line(("outputs", [2])),
    "the other array": line(("outputs", [1])),
    "an array of numbers": line(("lines", [["constant", [], {"value": [1.0]}], ["add", [0, 3], {}]])),
    "an operator of no name": line(("lines", [[["negative"], [0], {}]])),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_describes_no_composition_is_refused(case):
    with pytest.raises(HetuError):
        parsed(BAD[case])


def test_an_unknown_operator_names_the_remedy():
    with pytest.raises(UnknownNameError, match=r"(?s)'strange' here.*fix: have this process import"):
        parsed(line(("lines", [["strange", [0], {}]])))


def test_a_description_that_fits_is_taken():
    (out,) = parsed(line()).run(np, [np.ones(2), np.full(2, 4.0), 0.25])
    assert out.tolist() == [0.0, 0.0] and parsed(line()).descent is not None


def test_results_have_the_type_of_the_arrays():
    with pytest.raises(ArgumentError, match="(?s)result 0 .*return a value of type"):
        traced(lambda x, s: s, 1, 1, (3,), {})
    with pytest.raises(ArgumentError, match="another input"):
        traced(lambda x, y: (y, x), 2, 0, (3,), {})


def test_what_needs_more_than_single_elements_is_named():
    assert "sum at test_composition.py" in traced(lambda x: x - ht.sum(x), 1, 0, (3,), {}).whole
    assert "array of numbers" in traced(lambda x: x * np.ones(3), 1, 0, (3,), {}).whole
    assert not traced(lambda x, s: x * ht.exp(s), 1, 1, (3,), {}).whole


def test_a_rule_says_what_is_wrong_with_it():
    with pytest.raises(ArgumentError, match=r"rule askew\(p, lr, g\)"):
        ht.optim.update_rule(askew)
    with pytest.raises(ArgumentError, match="forgetful returns 1 values for 2 arrays"):
        ht.optim.update_rule(forgetful)([1.0], [0.0], [1.0], 0.1)
    for name in ("forgetful", "forgetful_rows", "forgetful_touched"):
        OPS.pop(name)
    with pytest.raises(ArgumentError, match="no rows alone can be updated: sum"):
        ht.optim.lamb.update.rows([[1.0]], [[0.0]], [[0.0]], [0], [[1.0]], 0.1, 1)
    with pytest.raises(ArgumentError, match="no rows alone can be updated: sum"):
        ht.optim.lamb.update.touched([[1.0]], [[0.0]], [[0.0]], [[1.0]], [1.0], 0.1, 1)
    with pytest.raises(ShapeError, match="what counts the lookups is"):
        ht.optim.sgd.update.touched([[1.0]], [[1.0]], [1.0, 2.0], 0.1)


def askew(p, lr, g):
    return p - lr * g


def forgetful(p, m, g, lr):
    return p - lr * g


def test_two_rules_of_one_name_live_side_by_side():
    """A cell of a notebook that is run again defines its rule anew; graphs that exist keep the old one."""
    made = [ht.optim.update_rule(again) for again in (twice(1.0), twice(2.0))]
    for name in ("again", "again_rows"):
        OPS.pop(name)
    assert [ht.evaluate(rule([3.0], [1.0], 1.0)).tolist() for rule in made] == [[2.0], [1.0]]


def twice(factor):
    def again(p, g, lr):
        return p - lr * factor * g

    return again
