"""The contract every operator keeps, checked on every row of the table in `samples/`."""

from __future__ import annotations

import doctest
from contextlib import suppress

import array_api_strict
import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, HetuError, NodeUseError, ShapeError
from hetu.core.graph import OPS, Node, topological
from hetu.core.simplify import interpret
from hetu.core.types import TensorType, as_dtype, is_float

from .at_once import compiled_at_once, own_items
from .pairs import in_turn
from .samples import SAMPLES, Sample
from .samples.update import ON_ELEMENTS

each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
each_bound = pytest.mark.parametrize(
    ("sample", "dtype"), in_turn(2, SAMPLES, ["float64", "float32"]), ids=lambda v: getattr(v, "id", v)
)


def as_tuple(value):
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(dtype) if is_float(array.dtype) else array


def built(sample: Sample, dtype: str = "float64", unknown: int = 0):
    """Placeholders, outputs and feed of a row; the sizes of so many axes are unknown."""
    arrays = [cast(a, dtype) for a in sample.arrays()]
    shapes = [(*(None for _ in a.shape[:unknown]), *a.shape[unknown:]) for a in arrays]
    nodes = [ht.placeholder(f"x{i}", s, a.dtype) for i, (s, a) in enumerate(zip(shapes, arrays))]
    return as_tuple(sample.build(*nodes)), dict(zip(nodes, arrays))


TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-2}


@each_sample
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_forward_equals_reference(sample, dtype):
    outputs, feed = built(sample, dtype)
    if dtype == "float16" and sample.extra.get("no_float16"):
        return
    for node, value, wanted in zip(outputs, interpret(outputs, feed), sample.wanted, strict=True):
        value = np.asarray(value)
        assert TensorType(value.shape, value.dtype) == node.type, f"{node!r} gave {value.shape} {value.dtype}"
        tolerance = max(TOLERANCE[dtype], sample.tolerance * 1e-3)
        np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance)


@each_sample
def test_values_of_bfloat16_have_the_dtype_of_their_nodes(sample):
    """NumPy makes products of it in float32."""
    pytest.importorskip("ml_dtypes")
    with suppress(HetuError):  # no gradients of some, and no operators of bits
        outputs, feed = built(sample, as_dtype("bfloat16"))
        for node, value in zip(outputs, interpret(outputs, feed)):
            assert np.asarray(value).dtype == node.dtype


NEEDED = (ShapeError, ArgumentError, NodeUseError)  # of operators for which some sizes have to be known


@each_sample
@pytest.mark.parametrize("unknown", [1, 9], ids=["first", "every"])
def test_unknown_sizes_give_the_same_values(sample, unknown):
    if sample.fixed:
        return
    try:
        outputs, feed = built(sample, unknown=unknown)
    except NEEDED:
        assert unknown > 1
        return
    known, _ = built(sample)
    sizes = {(n.name, axis): s for n, a in feed.items() for axis, s in enumerate(a.shape)}
    outputs = specialized(outputs, feed, sizes)
    for node, value, wanted, twin in zip(outputs, interpret(outputs, at(outputs, feed)), sample.wanted, known):
        assert node.type == twin.type
        np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=max(1e-9, sample.tolerance * 1e-3))


def specialized(outputs, feed, sizes):
    from hetu.passes import specialize

    return specialize(outputs, sizes)


def at(outputs, feed):
    """The feed keyed by the placeholders of a rewritten graph."""
    by_name = {n.name: a for n, a in feed.items()}
    return {n: by_name[n.name] for n in topological(outputs) if n.op.name == "placeholder"}


@each_sample
def test_gradient(sample):
    if sample.order:
        ht.check_gradients(sample.build, *sample.arrays(), order=sample.order, tolerance=sample.tolerance)


def bound(sample, dtype):
    """Each node of a row's graph, what it reads and makes, and the array and the calls that make it once more."""
    outputs, feed = built(sample, dtype)
    nodes = [n for n in topological(outputs) if n.op.name not in ("placeholder", "item")]
    values = dict(zip(nodes, interpret(nodes, feed))) | feed
    for node in nodes:
        arrays = [values[i] if i in values else interpret([i], feed)[0] for i in node.inputs]
        arrays = [tuple(a) if isinstance(a, tuple) else np.asarray(a) for a in arrays]
        out = _empty(node)
        yield node, arrays, values[node], out, node.op.bound(np, out, arrays, node.attrs)


@pytest.fixture(scope="module")
def all_compiled(request):
    rows = [i.callspec.params for i in own_items(request) if "all_compiled" in i.fixturenames]
    compiled_at_once(lambda row=row: [call for *_, calls in bound(**row) for call in calls] for row in rows)


@pytest.mark.sampled(8)
@each_bound
def test_bound_equals_forward(all_compiled, sample, dtype):
    """`bind`, `into`, the ufunc form and `view` compute what the forward function computes."""
    for node, arrays, values, out, calls in bound(sample, dtype):
        if node.op.view_rule and (view := node.op.view_rule(np, *arrays, **node.attrs)) is not None:
            np.testing.assert_array_equal(view, values)
        for call in calls:
            call()
        for got, wanted in zip(as_tuple(out), as_tuple(values), strict=True):
            tolerance = TOLERANCE[dtype]
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def _empty(node: Node):
    types = as_tuple(node.type)
    arrays = tuple(np.full(t.shape, 77, t.dtype) for t in types)
    return arrays if isinstance(node.type, tuple) else arrays[0]


@each_bound
def test_in_place_equals_forward(all_compiled, sample, dtype):
    """Where a rule allows `out` to be one of the inputs, the result is the same."""
    outputs, feed = built(sample, dtype)
    node = topological(outputs)[-1]
    if not node.op.inplace:
        return
    arrays = [np.array(v) for v in interpret(node.inputs, feed)]
    wanted = as_tuple(interpret([node], feed)[0])
    types = as_tuple(node.type)
    for slot, positions in node.op.inplace.items():
        for position in positions:
            if position >= len(arrays) or TensorType(arrays[position].shape, arrays[position].dtype) != types[slot]:
                continue
            copies = [a.copy() for a in arrays]
            outs = [np.empty(t.shape, t.dtype) for t in types]
            outs[slot] = copies[position]
            out = tuple(outs) if isinstance(node.type, tuple) else outs[0]
            for instruction in node.op.bound(np, out, copies, node.attrs):
                instruction()
            np.testing.assert_allclose(outs[slot], wanted[slot], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@each_sample
def test_forward_runs_under_the_array_api(sample):
    """array_api_strict stands in for CuPy: a forward function uses nothing that only NumPy has."""
    if sample.strict:
        return
    outputs, feed = built(sample)
    strict = {n: array_api_strict.asarray(np.ascontiguousarray(a) if a.ndim else a) for n, a in feed.items()}
    for value, wanted in zip(interpret(outputs, strict, array_api_strict), sample.wanted):
        np.testing.assert_allclose(np.asarray(value), wanted, rtol=1e-9, atol=max(1e-9, sample.tolerance * 1e-3))


def test_the_array_api_suffices_for_most() -> None:
    """The number of rows that need more may only fall."""
    assert sum(bool(sample.strict) for sample in SAMPLES) <= 43


@each_sample
def test_sharding_rule_names_every_axis(sample):
    """The `dims` rule has one term per input and per output, and one letter per axis."""
    outputs, _ = built(sample)
    for node in topological(outputs):
        dims = node.op.dims(*(i.type for i in node.inputs), **node.attrs) if callable(node.op.dims) else node.op.dims
        if dims is None or isinstance(dims, tuple):
            continue
        left, right = dims.split("->")
        assert len(left.split(",")) == len(node.inputs) or node.op.variadic, f"{node!r}: {dims}"
        assert len(right.split(",")) == len(as_tuple(node.type)), f"{node!r}: {dims}"


@each_sample
def test_prints(sample):
    outputs, _ = built(sample)
    assert f"{outputs[0].type}" in repr(outputs[0])
    assert "return" in str(ht.Graph(outputs))


INTERNAL = {"placeholder", "variable", "size", "item", "with_updates"}


def test_every_operator_has_a_row_a_docstring_and_a_gradient():
    tested = {s.op for s in SAMPLES}
    for name, op in OPS.items():
        if name in INTERNAL or not op.forward.__module__.startswith("hetu.ops"):
            continue
        assert name in tested, f"operator {name!r} has no row in tests/samples"
        assert ">>>" in (op.__doc__ or ""), f"operator {name!r} has no example in its docstring"
        assert doctest.DocTestParser().get_examples(op.__doc__)
        assert op.grad_rule or op.decompose_rule or not op.differentiable, (
            f"{name!r}: add a gradient or differentiable=False"
        )
        assert op.infer_rule, f"operator {name!r} declares no type rule"


# Operators whose forward functions need what the array API does not have. On a GPU they have a kernel of their own, or
# CuPy has the function under NumPy's name.
SCATTERS = {"scatter_add", "scatter_rows", "put_along_axis_add", "row_maxima", "sparse_matmul", "moe_dispatch"}
SCATTERS |= {"summed_entries", "bag", "spread"}
TREES = {"histograms", "best_cuts", "grow_trees", "part_rows", "tree_leaves"}  # of numbers on the host
BEYOND_THE_ARRAY_API = (
    SCATTERS | {"sketched", "drawn_topics", "id_hashes", "bitcast"} | TREES | {f"{name}_rows" for name in ON_ELEMENTS}
)


def test_most_operators_run_under_the_array_api():
    strict = {s.op for s in SAMPLES if not s.strict}
    exempt = {s.op for s in SAMPLES} - strict
    assert exempt == BEYOND_THE_ARRAY_API
    assert len(strict) >= 0.9 * len((strict | exempt) - TREES)
