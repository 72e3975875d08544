"""Symbolic sizes agree with plain arithmetic, shapes broadcast and dtypes promote as documented."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hetu as ht
from hetu.core.errors import AxisError, DTypeError, HetuError, NodeUseError, ShapeError
from hetu.core.types import (
    DTYPES,
    Dim,
    TensorType,
    as_dtype,
    broadcast_shapes,
    compatible,
    has_dim,
    normalize_axes,
    normalize_axis,
    product,
    promote,
    show_type,
    substitute,
)

SYMBOLS = {("x", 0): Dim.of("x", 0), ("x", 1): Dim.of("x", 1), ("y", 0): Dim.of("y", 0)}
OPERATORS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]

leaves = st.one_of(st.sampled_from(sorted(SYMBOLS)), st.integers(-4, 9))
expressions = st.recursive(leaves, lambda inner: st.tuples(st.sampled_from(OPERATORS), inner, inner), max_leaves=8)
sizes = st.fixed_dictionaries({symbol: st.integers(1, 12) for symbol in SYMBOLS})


def evaluate(expression, values):
    """The expression over the given value of each symbol; a leaf symbol is a pair, an operation a triple."""
    if isinstance(expression, int):
        return expression
    if len(expression) == 2:
        return values[expression]
    function, left, right = expression
    return function(evaluate(left, values), evaluate(right, values))


@given(expressions, sizes)
def test_substituting_numbers_gives_what_arithmetic_on_numbers_gives(expression, numbers):
    try:
        wanted = evaluate(expression, numbers)
    except ZeroDivisionError:
        assume(False)
    assert substitute(evaluate(expression, SYMBOLS), numbers) == wanted


@given(expressions, sizes)
def test_sizes_may_be_substituted_one_after_the_other(expression, numbers):
    try:
        wanted = evaluate(expression, numbers)
        found = evaluate(expression, SYMBOLS)
        for symbol, number in numbers.items():
            found = substitute(found, {symbol: number})
    except ZeroDivisionError:
        assume(False)
    assert found == wanted


@given(st.integers(1, 50), st.integers(1, 50))
def test_products_cancel(a, b):
    batch = Dim.of("x", 0)
    assert batch * a * b // b == batch * a
    assert batch * a // batch == a
    assert batch * a - batch * a == 0
    assert batch + a - a == batch
    assert (batch * a) % a == 0


def test_a_dim_prints_as_unknown_and_names_its_symbol():
    batch = Dim.of("x", 0)
    assert str(batch) == "?" and repr(batch) == "?x.0"
    assert str(batch * 3) == "3*?" and repr(batch * 3) == "3*?x.0"
    assert repr((batch + 1) // 2) == "?(?(?x.0+1)//2)"


@pytest.mark.parametrize("use", [bool, int, float, range, lambda d: d < 3, lambda d: d >= 3, lambda d: [0][d]])
def test_a_dim_has_no_value_to_decide_on(use):
    with pytest.raises(NodeUseError, match=r"\?x\.0 is not known"):
        use(Dim.of("x", 0))


ARITHMETIC = [getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")]


@pytest.mark.parametrize("of", ARITHMETIC, ids=lambda f: f.__name__)
def test_a_size_beside_a_node_is_its_number_and_beside_a_fraction_an_error(of):
    """On both sides: neither is a fraction cut off, nor a node asked whether it is 0."""
    x, fed = ht.placeholder("x", (None, 3)), np.linspace(1, 2, 15, dtype="f").reshape(5, 3)
    for made, wanted in ((of(x.shape[0], x), of(np.float32(5), fed)), (of(x, x.shape[0]), of(fed, np.float32(5)))):
        np.testing.assert_allclose(ht.evaluate(made, {x: fed}), wanted, rtol=1e-6)
    for fraction in (0.5, 2.0, np.float32(0.5), np.float64(3)):
        for pair in ((x.shape[0], fraction), (fraction, x.shape[0])):
            with pytest.raises(NodeUseError, match=r"\?x\.0 is not known"):
                of(*pair)


def test_equality_of_dims_is_provable_equality():
    x, y = Dim.of("x", 0), Dim.of("y", 0)
    assert x * y == y * x and x + y == y + x and x != y and x != 3
    assert compatible(x, y) and compatible(x, 3) and not compatible(2, 3)
    assert len({x, Dim.of("x", 0), y}) == 2


def test_has_dim_looks_into_tuples():
    assert has_dim((1, (2, Dim.of("x", 0)))) and not has_dim((1, (2, "x"), None))


shapes = st.lists(st.sampled_from([1, 2, 3]), max_size=4).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=3))
def test_broadcasting_is_that_of_numpy(given_shapes):
    try:
        wanted = np.broadcast_shapes(*given_shapes)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast"):
            broadcast_shapes(*given_shapes)
    else:
        assert broadcast_shapes(*given_shapes) == wanted


@given(st.lists(st.sampled_from([1, 3, 5]), min_size=2, max_size=2))
def test_broadcasting_two_unknown_sizes_is_settled_by_the_numbers(numbers):
    shape = broadcast_shapes((Dim.of("x", 0), 4), (Dim.of("y", 0), 1))
    fed = {("x", 0): numbers[0], ("y", 0): numbers[1]}
    try:
        wanted = np.broadcast_shapes((numbers[0], 4), (numbers[1], 1))
    except ValueError:
        with pytest.raises(ShapeError):
            substitute(shape, fed)
    else:
        assert substitute(shape, fed) == wanted


def test_an_unknown_size_gives_way_to_a_known_one():
    assert broadcast_shapes((Dim.of("x", 0), 1), (5, 3)) == (5, 3)
    assert broadcast_shapes((Dim.of("x", 0),), (1,)) == (Dim.of("x", 0),)


@pytest.mark.parametrize(
    "dtypes, wanted",
    [
        ("int64 float32", "float32"),
        ("int64 float16", "float16"),
        ("bool float64", "float64"),
        ("float16 float32", "float32"),
        ("int8 int32", "int32"),
        ("bool int8", "int8"),
        ("bool bool", "bool"),
        ("uint8 int8", "int16"),
    ],
)
def test_promotion_keeps_the_float(dtypes, wanted):
    types = [np.dtype(name) for name in dtypes.split()]
    assert promote(*types) == promote(*reversed(types)) == np.dtype(wanted)


@given(st.lists(st.sampled_from([np.dtype(n) for n in ("bool", "int8", "int64", "float16", "float32")]), min_size=1))
def test_promotion_does_not_depend_on_grouping(dtypes):
    assert promote(*dtypes) == promote(dtypes[0], promote(*dtypes)) == promote(*sorted(dtypes, key=str))


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), "f4"])
def test_dtypes_may_be_written_in_every_common_way(dtype):
    assert as_dtype(dtype) == np.dtype("float32")


@pytest.mark.parametrize("dtype", ["flaot32", "complex64", "U5", object, "datetime64[s]", 3])
def test_unknown_dtypes_are_refused_with_the_list(dtype):
    with pytest.raises(DTypeError, match=r"unknown dtype(.|\n)*float32") as caught:
        as_dtype(dtype)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, HetuError)


def test_every_dtype_prints_short():
    shown = {str(TensorType((), d)) for d in DTYPES.values()}
    assert {"f16[]", "f32[]", "f64[]", "i32[]", "i64[]", "u8[]", "bool[]"} <= shown
    assert len(shown) == len(DTYPES)


def test_a_tensor_type_counts_elements_and_bytes():
    type_ = TensorType((Dim.of("x", 0), 784), np.dtype("float32"))
    assert str(type_) == "f32[?, 784]"
    assert type_.ndim == 2
    assert substitute((type_.size, type_.nbytes), {("x", 0): 10}) == (7840, 31360)
    assert product(()) == 1
    assert show_type((type_, TensorType((), np.dtype(bool)))) == "(f32[?, 784], bool[])"


@given(st.integers(-6, 6), st.integers(0, 5))
def test_an_axis_is_made_non_negative_or_refused(axis, ndim):
    if -ndim <= axis < ndim:
        assert normalize_axis(axis, ndim) == range(ndim)[axis]
    else:
        with pytest.raises(AxisError, match=f"axis {axis} does not exist"):
            normalize_axis(axis, ndim)


def test_axes_are_sorted_unique_and_default_to_all():
    assert normalize_axes(None, 3) == (0, 1, 2)
    assert normalize_axes(-1, 3) == (2,)
    assert normalize_axes([-1, 0], 3) == (0, 2)
    with pytest.raises(AxisError, match="twice"):
        normalize_axes((1, -2), 3)


def test_bfloat16_is_known_by_its_type_too():
    kind = pytest.importorskip("ml_dtypes").bfloat16
    assert {as_dtype(known) for known in ("bfloat16", kind, np.dtype(kind))} == {np.dtype(kind)}
