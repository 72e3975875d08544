"""Nodes are frozen and equal only to themselves; graphs are walked, rewritten and printed without recursion."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DTypeError, GraphError, NodeUseError, ShapeError, UnknownNameError
from hetu.core.graph import OPS, Graph, Node, origin_of, replace, rewrite, tagged, topological
from hetu.core.leaf import scope, unique_name
from hetu.core.op import Op
from hetu.core.simplify import interpret

DEEP = 5_000


@pytest.fixture
def x() -> Node:
    return ht.placeholder("x", (None, 3))


@pytest.fixture(scope="module")
def chain() -> list[Node]:
    """A node, and the same after 20,000 additions."""
    first = node = ht.placeholder("x", (2,))
    for _ in range(DEEP):
        node = node + 1
    return [first, node]


# -- nodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["op", "inputs", "attrs", "type", "site", "tags", "color"])
def test_a_node_cannot_be_changed(x, name):
    with pytest.raises(GraphError, match="frozen"):
        setattr(x, name, None)
    with pytest.raises(GraphError, match="frozen"):
        delattr(x, name)


def test_attributes_and_constants_cannot_be_changed(x):
    with pytest.raises(TypeError):
        ht.sum(x, axis=0).attrs["axis"] = 1
    array = np.zeros(3)
    node = ht.constant(array)
    with pytest.raises(ValueError, match="read-only"):
        node.attrs["value"][0] = 1
    array[0] = 7
    assert node.attrs["value"][0] == 0, "a constant keeps its own copy"


def test_equality_is_identity(x):
    a, b = x + 1, x + 1
    assert a == a and a != b
    assert len({a, b, a}) == 2
    assert a is not None and a != "add" and a in {a: 0}


@pytest.mark.parametrize(
    "use", [lambda n: n == 3, lambda n: n != 0.5, lambda n: n == np.float32(1), lambda n: n in [1]]
)
def test_a_node_is_not_compared_with_a_number(x, use):
    with pytest.raises(NodeUseError, match=r"ht\.equal"):
        use(x)


def test_unused_nodes_are_collected(x):
    ghost = weakref.ref(x + 1)
    gc.collect()
    assert ghost() is None


def test_a_deep_chain_is_collected_without_recursion():
    node = ht.placeholder("x", ())
    for _ in range(DEEP):
        node = node + 1
    ghost = weakref.ref(node)
    del node
    gc.collect()
    assert ghost() is None


@pytest.mark.parametrize(
    "use", [bool, float, int, len, list, iter, lambda n: 1 in n, lambda n: [1, 2][n], lambda n: n and 1, np.asarray]
)
def test_a_node_has_no_value(x, use):
    with pytest.raises(NodeUseError, match=r"x' f32\[\?, 3\] at test_graph.py:\d+> has no value yet"):
        use(x)


def test_a_condition_on_nodes_names_the_replacement(x):
    with pytest.raises(NodeUseError, match=r"ht\.where"):
        max(x, x * 2)


@pytest.mark.parametrize("ufunc", [np.exp, np.sqrt, np.isfinite])
def test_a_node_fed_to_numpy_names_our_own_function(x, ufunc):
    with pytest.raises(NodeUseError, match=rf"ht\.{ufunc.__name__}\(node\)"):
        ufunc(x)


@pytest.mark.parametrize(
    "function",
    [np.sum, np.add.reduce, np.modf, lambda n: np.add(n, 1, out=np.ones(3)), np.mean, np.std, np.sort, np.median],
)
def test_other_numpy_functions_refuse_a_node_too(x, function):
    with pytest.raises(NodeUseError) as caught:
        function(x)
    assert caught.value.site.code.co_filename == __file__  # and no file of NumPy


def test_a_sum_by_numpy_names_our_sum(x):
    with pytest.raises(NodeUseError, match=r"call ht\.sum\(node\)"):
        np.sum(x)
    with pytest.raises(NodeUseError, match="evaluate the node first"):
        np.hypot(x, x)
    with pytest.raises(NodeUseError, match="write it with Python's operator"):
        np.add(x, 1.0, out=np.ones(3))


ARRAY = np.array([1.5, 2.0, 4.0], np.float32)


@pytest.mark.parametrize(
    "build",
    [
        lambda a, n: a + n,
        lambda a, n: a - n,
        lambda a, n: a * n,
        lambda a, n: a / n,
        lambda a, n: a**n,
        lambda a, n: a // n,
        lambda a, n: a % n,
        lambda a, n: n % 2,
        lambda a, n: 7 // n,
        lambda a, n: (a > 2) & (n > 1),
        lambda a, n: (n > 1) | (a > 2),
        lambda a, n: (a > 2) ^ (n > 1),
        lambda a, n: True ^ (n > 1),
        lambda a, n: ~(n > 1),
        lambda a, n: np.negative(n),
        lambda a, n: n + a,
        lambda a, n: n - a,
        lambda a, n: n**a,
        lambda a, n: a < n,
        lambda a, n: a >= n,
        lambda a, n: np.float32(2) * n,
        lambda a, n: n / np.float32(2),
        lambda a, n: 2 - n,
        lambda a, n: 2 / n,
        lambda a, n: 2**n,
        lambda a, n: -n,
        lambda a, n: abs(n - 2),
        lambda a, n: a.reshape(1, 3) @ n.reshape(3, 1) if isinstance(n, np.ndarray) else (a[None] @ n[:, None]),
    ],
)
def test_arrays_numbers_and_nodes_mix_on_both_sides(build):
    value = np.array([0.5, 2.0, 3.0], np.float32)
    n = ht.placeholder("n", (3,))
    made = build(ARRAY, n)
    wanted = build(ARRAY, value)
    assert isinstance(made, Node)
    assert made.dtype == wanted.dtype
    np.testing.assert_allclose(interpret([made], {n: value})[0], wanted, rtol=1e-6)


def test_a_python_number_takes_the_dtype_of_the_other_side():
    for dtype in ("float16", "float32", "float64"):
        assert (ht.placeholder("x", (2,), dtype) * 2.5 + 1).dtype == dtype
    assert (ht.placeholder("i", (2,), "int32") + 1).dtype == "int32"
    assert (ht.placeholder("i", (2,), "int32") * 0.5).dtype == "float32"


def test_an_unknown_attribute_names_the_nearest(x):
    with pytest.raises(UnknownNameError, match="did you mean 'shape'"):
        _ = x.shap
    with pytest.raises(UnknownNameError, match=r"call ht\.exp\(node\)"):
        x.exp()
    assert not hasattr(x, "no_such_thing")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: ht.exp(), "misses its input 'x'"),
        (lambda x: ht.exp(x, 1, 2), "got 3 arguments"),
        (lambda x: ht.sum(x, axes=0), "did you mean 'axis'"),
        (lambda x: ht.sum(x, 0, axis=0), "twice"),
        (lambda x: ht.exp("x"), "str 'x' cannot be an input"),
        (lambda x: ht.sum(x, axis=x), "is a node"),
        (lambda x: ht.exp([[1, 2], [3]]), "cannot make an array"),
    ],
)
def test_a_wrong_call_says_what_was_wanted(x, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(x)


def test_a_type_error_names_operator_types_and_line(x):
    with pytest.raises(ShapeError, match=r"matmul\(f32\[\?, 3\], f32\[4, 2\]\): inner sizes differ: 3 against 4"):
        x @ np.ones((4, 2), np.float32)


def test_an_operator_without_a_type_rule_is_run_once_to_find_it(x):
    op = Op(lambda xp, x, *, by=2: xp.concatenate([x] * by, axis=1), name="widen")
    made = op(x)
    assert made.shape == (x.shape[0], 6) and made.dtype == "float32"


def test_the_name_of_a_node_and_how_it_prints(x):
    assert x.name == "x" and (x + 1).name == "add"
    line = x.site.line
    assert repr(x) == f"<placeholder 'x' f32[?, 3] at test_graph.py:{line}>"


# -- walking and rewriting -------------------------------------------------------------------------------------------


def test_topological_order_lists_inputs_first_and_each_node_once(x):
    shared = x * 2
    out = shared + ht.exp(shared)
    order = topological([out, shared, out])
    assert len(order) == len(set(order)) == 5
    place = {node: i for i, node in enumerate(order)}
    assert all(place[i] < place[node] for node in order for i in node.inputs)


def test_deep_graphs_are_walked_rewritten_printed_and_verified(chain):
    first, last = chain
    graph = Graph((last,))
    assert len(graph.nodes) == 2 * DEEP + 1
    graph.verify()
    assert len(str(graph).splitlines()) == 2 * DEEP + 2
    (same,) = rewrite([last], lambda node, inputs: None)
    assert same is last
    assert interpret([last], {first: np.zeros(2, np.float32)})[0].tolist() == [DEEP, DEEP]


def test_deep_graphs_are_differentiated(chain):
    first, last = chain
    (slope,) = ht.gradients(ht.sum(last), [first])
    assert interpret([slope], {first: np.zeros(2, np.float32)})[0].tolist() == [1, 1]


def test_rewrite_rebuilds_only_what_changed(x):
    left, right = ht.exp(x), x * 2
    out = left + right

    def rule(node, inputs):
        return inputs[0] * 3 if node.op.name == "multiply" else None

    (new,) = rewrite([out], rule)
    assert new is not out and new.inputs[0] is left, "the untouched branch stays the same object"
    value = np.ones((1, 3), np.float32)
    np.testing.assert_allclose(interpret([new], {x: value})[0], np.exp(value) + 3, rtol=1e-6)


def test_rewritten_nodes_keep_line_and_tags(x):
    with tagged(layer="first"):
        old = ht.exp(x)
    (new,) = rewrite([old], lambda node, inputs: inputs[0] + 1 if node is old else None)
    assert (new.site, new.tags) == (old.site, old.tags)
    constant = new.inputs[1]
    assert constant.site == old.site


def test_replace_swaps_nodes_and_types_follow(x):
    y = ht.placeholder("y", (5, 3), "float64")
    (new,) = replace([ht.exp(x) + 1], {x: y})
    assert str(new.type) == "f64[5, 3]"
    Graph((new,)).verify()


def test_tags_nest_and_end(x):
    with tagged(stage=1, layer="a"), tagged(layer="b"):
        inner = x + 1
    assert dict(inner.tags) == {"stage": 1, "layer": "b"}
    assert dict((x + 1).tags) == {}
    with origin_of(inner, gradient=True):
        assert dict((x * 2).tags) == {"stage": 1, "layer": "b", "gradient": True}


# -- names -------------------------------------------------------------------------------------------------------------


def test_scopes_prefix_names_and_count_them_afresh():
    def build() -> list[str]:
        with scope("model"):
            return [unique_name("w"), unique_name("w"), ht.variable("b", 0.0).name]

    assert build() == build() == ["w", "w_1", "model/b"]
    with scope("outer"), scope("inner") as path:
        assert path == "outer/inner"
        assert ht.variable("w", 0.0).name == "outer/inner/w"
    assert ht.variable("w", 0.0).name == "w"


def test_a_scope_ends_when_its_block_fails():
    with pytest.raises(ZeroDivisionError), scope("model"):
        _ = 1 / 0
    assert ht.variable("w", 0.0).name == "w"


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_verify_refuses_two_leaves_of_one_name(x):
    twin = ht.placeholder("x", (None, 3))
    with pytest.raises(GraphError, match="two placeholders are called 'x'"):
        Graph((x + twin,)).verify()
    Graph((x + x,)).verify()


def test_verify_finds_a_type_that_does_not_follow(x):
    wrong = Node(OPS["exp"], (x,), {}, ht.sum(x).type)
    with pytest.raises(GraphError, match="does not follow"):
        Graph((wrong,)).verify()


def test_leaves_are_listed_by_kind(x):
    w = ht.variable("w", np.ones(3, np.float32))
    graph = Graph((x * w + 1, w))
    assert graph.leaves("placeholder") == [x] and graph.leaves("variable") == [w]
    assert len(graph.leaves("constant")) == 1


def test_a_graph_prints_a_typed_row_a_node(x):
    w = ht.variable("w", np.ones((3, 2), np.float32))
    text = str(Graph((ht.sum(x @ w, axis=0),)))
    rows = text.splitlines()
    assert rows[0].startswith("%0: f32[?, 3] = placeholder('x')")
    assert "%2: f32[?, 2] = matmul(%0, %1)" in rows[2]
    assert "%3: f32[2] = sum(%2, axis=(0,))" in rows[3]
    assert all("# test_graph.py:" in row for row in rows[:-1])
    assert rows[-1] == "return %3"
    assert "array(" not in text, "values of variables stay out"


def test_several_outputs_arrive_as_a_tuple(x):
    op = Op(lambda xp, x: (xp.min(x), xp.max(x)), name="extent", infer=lambda x: (x, x), differentiable=False)
    low, high = op(x)
    assert low.op.name == high.op.name == "item" and low.inputs == high.inputs
    pair = low.inputs[0]
    assert str(repr(pair)).startswith("<extent (f32[?, 3], f32[?, 3]) at")
    with pytest.raises(GraphError, match="has 2 outputs"):
        _ = pair.shape


def test_an_unfitting_dtype_is_refused():
    with pytest.raises(DTypeError, match="unknown dtype 'flaot'"):
        ht.placeholder("x", (2,), "flaot")


def test_a_type_is_inferred_anew_only_where_those_of_inputs_change():
    def infer(x):
        asked.append(x)
        return x

    def passed(outputs, instead):
        return rewrite(outputs, lambda node, inputs: instead(*inputs) if node.op is ht.exp else None)[0]

    asked = []
    y = Op(lambda xp, x: x, name="itself", infer=infer)(ht.exp(ht.placeholder("x", (3,))))
    assert passed([y], ht.sin).type is y.type and len(asked) == 1
    assert passed([y], ht.sum).shape == () and len(asked) == 2
