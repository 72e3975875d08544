"""Groups of one form: which there are, and that C and NumPy compute what the operators mean one by one."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import OPS, topological
from hetu.core.passes import PASSES
from hetu.core.simplify import interpret
from hetu.core.types import same_type
from hetu.cpu_kernels import groups as groups_in_c
from hetu.cpu_kernels.compiled import compiler
from hetu.cpu_kernels.groups import LIMITS, compiled, fuse_groups, one_by_one
from hetu.fuse import apart, pattern, unit
from hetu.fuse.apart import taken_apart
from hetu.fuse.form import fused
from hetu.fuse.group import fuse
from hetu.fuse.unit import Rules

from ..at_once import compiled_at_once, only_bound, own_items
from ..cpu_kernels.divided import in_parts

WAYS = ["NumPy", *(["C"] if compiler() else [])]
EXACT = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "sqrt", "square", "abs", "negative", "where")


def computed(way, node, values, always=True):
    """The results of a group, compiled (`always`, or where its columns lie in a row) or one by one.

    Compiled jobs also run each by itself, or a thousand parts of them, and give equal bits.
    """
    form = node.attrs["form"]
    arrays = [np.asarray(v) for v in values[: len(form.types)]]
    outs = tuple(np.full(t.shape, 7, t.dtype) for t in form.types_of_results())
    calls = compiled(form, outs, arrays, Scratch()) if way == "C" else None
    if calls is None:
        assert way == "NumPy" or not always
        way, calls = "NumPy", one_by_one(form, outs, arrays, Scratch())
    for call in calls:
        call()
    if way == "C":
        first = [out.copy() for out in outs]
        for out in outs:
            out.fill(9)
        for call in calls:
            in_parts(call, min(call.jobs, 1000))
        for one, other in zip(outs, first):
            np.testing.assert_array_equal(one, other)
    return outs


def groups_of(outputs):
    """The groups among what the pass makes of some nodes."""
    made = fuse_groups(outputs)
    return made, [n for n in topological(made) if "form" in n.attrs]


def calls_of(outputs, feed):
    """The calls of the groups among some nodes, and of their lines one by one."""
    calls = []
    for group in groups_of(outputs)[1]:
        form, arrays = group.attrs["form"], [np.asarray(v) for v in interpret(group.inputs, feed)]
        outs = tuple(np.empty(t.shape, t.dtype) for t in form.types_of_results())
        for way in (compiled, one_by_one):
            calls += way(form, outs, arrays[: len(form.types)], Scratch()) or []
    return calls


def check(outputs, feed, **tolerance):
    """Each group computes what its operators mean, given what they are given; and the whole what it meant before."""
    made, groups = groups_of(outputs)
    assert groups
    wanted = interpret(outputs, feed)
    np.testing.assert_equal([str(n.type) for n in made], [str(n.type) for n in outputs])
    inner = [i for g in groups for i in g.inputs]
    known = dict(zip(inner, interpret(inner, feed)))
    for group in groups:
        values = [known[i] for i in group.inputs]
        plain = fused.forward(np, *values, form=group.attrs["form"])
        for way in WAYS:
            for got, right in zip(computed(way, group, values), plain if isinstance(plain, tuple) else (plain,)):
                np.testing.assert_allclose(got, right, **tolerance, err_msg=way)
    for got, right in zip(interpret(made, feed), wanted):
        np.testing.assert_allclose(got, right, rtol=3e-3, atol=2e-4)  # a group's error, and what follows grows from it
    return groups


# -- random graphs -----------------------------------------------------------------------------------------------------


def broadcast(*nodes):
    with suppress(ValueError):
        return np.prod(np.broadcast_shapes(*(n.shape for n in nodes))) <= 1 << 16
    return False


@st.composite
def lines(draw, nodes, names=EXACT):
    op, operands = OPS[draw(st.sampled_from(names))], []
    for _ in op.inputs:
        operands.append(draw(st.sampled_from([n for n in nodes if broadcast(n, *operands)])))
    if op is OPS["where"]:
        operands[0] = operands[1] > operands[2]
    return op(*operands)


@st.composite
def folds(draw, nodes):
    """A fold of the first axes, of the last ones or of all."""
    x = draw(st.sampled_from([n for n in nodes if n.ndim]))
    begin, end = draw(st.sampled_from([(0, k) for k in range(1, x.ndim + 1)] + [(k, x.ndim) for k in range(x.ndim)]))
    return OPS[draw(st.sampled_from(["sum", "max", "min"]))](
        x, axis=tuple(range(begin, end)), keepdims=draw(st.booleans())
    )


@st.composite
def moves(draw, nodes):
    """The same numbers with axes of size 1 before or behind them, without such, or in one axis."""
    x = draw(st.sampled_from([n for n in nodes if n.ndim < 5]))
    shapes = [(*x.shape, 1), (*x.shape, 1, 1), (1, *x.shape), tuple(n for n in x.shape if n > 1), (-1,)]
    return ht.reshape(x, draw(st.sampled_from(shapes)))


@st.composite
def graphs(draw, dtypes=("float32", "float64"), kinds=(lines,)):
    """A few operators on arrays that broadcast against each other."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 33]), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(dtypes))
    nodes = []
    for k in range(draw(st.integers(1, 3))):
        kept = [n if draw(st.booleans()) else 1 for n in shape[draw(st.integers(0, len(shape))) :]] if k else shape
        nodes.append(ht.placeholder(f"x{k}", tuple(kept), dtype))
    feeds = list(nodes)
    for _ in range(draw(st.integers(2, 10))):
        nodes.append(draw(draw(st.sampled_from(kinds))(nodes)))
    outputs = draw(st.lists(st.sampled_from(nodes[len(feeds) :]), min_size=1, max_size=3, unique=True))
    return outputs, feeds, draw(st.integers(0, 1 << 20))


def groups_with_values(graph):
    """The graph as the pass makes it, and each group with what it is given and what NumPy makes of that."""
    outputs, feeds, seed = graph
    rng = np.random.default_rng(seed)
    feed = {f: rng.uniform(-2, 2, f.shape).astype(f.dtype) for f in feeds}
    made, groups = groups_of(outputs)
    found = []
    for group in groups:
        values = interpret(group.inputs, feed)
        plain = fused.forward(np, *values, form=group.attrs["form"])
        found.append((group, values, plain if isinstance(plain, tuple) else (plain,)))
    return outputs, made, feed, found


def several(graph):
    """Graphs of which a compiler reads the groups at once."""
    return st.lists(graph, min_size=6, max_size=10)


@settings(max_examples=4)
@given(graphs=several(graphs()))
def test_random_graphs_give_the_same_bits(graphs):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        made_of = [groups_with_values(graph) for graph in graphs]
        compiled_at_once(partial(calls_of, outputs, feed) for outputs, _, feed, _ in made_of)
        for outputs, made, feed, groups in made_of:
            for way, (group, values, plain) in itertools.product(WAYS, groups):
                for got, right in zip(computed(way, group, values), plain):
                    np.testing.assert_array_equal(got, right, err_msg=way)
            for got, right in zip(interpret(made, feed), interpret(outputs, feed)):
                np.testing.assert_array_equal(got, right)


SMOOTH = ("add", "subtract", "maximum", "abs", "where", "tanh", "sigmoid")


@settings(max_examples=6)
@given(graphs=several(graphs(["float64"], [partial(lines, names=SMOOTH), folds, moves])))
def test_random_graphs_with_folds_and_moves_are_right(graphs):
    made_of = [groups_with_values(graph) for graph in graphs]
    compiled_at_once(partial(calls_of, outputs, feed) for outputs, _, feed, _ in made_of)
    for outputs, made, feed, groups in made_of:
        for way, (group, values, plain) in itertools.product(WAYS, groups):
            for got, right in zip(computed(way, group, values, always=False), plain):
                np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9, err_msg=way)
        for got, right in zip(interpret(made, feed), interpret(outputs, feed)):
            np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9)


SPECIAL = {
    "float32": [0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38],
    "float64": [0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 1e308],
    "int64": [0, 1, -1, (1 << 53) + 1, (1 << 63) - 1, 1 - (1 << 63)],
}


@pytest.mark.parametrize("dtype", SPECIAL)
def test_operators_that_do_not_round_give_numpys_bits_at_special_numbers(dtype):
    names = ("abs", "negative", "floor", "ceil", "round", "sign", "relu", *(["sqrt"] if dtype != "int64" else []))
    values = np.array(SPECIAL[dtype], dtype)
    x = ht.placeholder("x", values.shape, dtype)
    with np.errstate(invalid="ignore"):
        found = ht.Executor([OPS[name](x) for name in names]).run({x: values})
        for name, got in zip(names, found):
            right = OPS[name].forward(np, values)
            same = (got == right) & (np.signbit(got) == np.signbit(right)) | (np.isnan(got) & np.isnan(right))
            assert same.all(), (name, values[~same], got[~same])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("whole", ["int32", "int64"])
def test_a_float_that_was_an_integer_is_no_negative_zero(whole, dtype):
    x = ht.placeholder("x", (40,), dtype)
    cut, values = ht.astype(x, whole), np.linspace(-0.9, 0.9, 40, dtype=dtype)
    minus, product = ht.Executor([-ht.astype(cut, dtype), cut * x]).run({x: values})
    assert np.signbit(minus).all() and (np.signbit(product) == np.signbit(values)).all()


# -- what becomes one group --------------------------------------------------------------------------------------------


def entropy(x, **options):
    """The cross entropy with its gradient."""
    ids = ht.placeholder("ids", x.shape[:-1], "int64")
    losses = ht.softmax_cross_entropy(x, ids, **options)
    return [losses, *ht.gradients(ht.sum(losses), [x])]


def norm(function, *vectors):
    def made(x):
        scales = [ht.placeholder(name, x.shape[-1:], x.dtype) for name in vectors]
        y = function(x, *scales)
        return [y, *ht.gradients(ht.sum(y * y), [x, *scales])]

    return made


def dropped(x, stream):
    return OPS["dropout"](x, ht.placeholder("state", (2,), "uint64"), rate=0.3, stream=stream)


def rows(x):
    """Of the rows of another space, some lack axes or have them with one place."""
    b, c, w = (ht.placeholder(n, s, x.dtype) for n, s in (("b", x.shape[-1:]), ("c", (1,)), ("w", (*x.shape, 3))))
    return [ht.expand_dims(x - b * c, -1) * w, ht.reshape(x * b, (*x.shape, 1, 1))]


# What is computed, and into how many groups that goes.
CASES = {
    "softmax": (lambda x: [ht.softmax(x)], 1),
    "log_softmax": (lambda x: [ht.log_softmax(x) * 2], 1),
    "gelu and slope": (lambda x: [y := ht.gelu(x), *ht.gradients(ht.sum(y), [x])], 1),
    "gelu tanh": (lambda x: [ht.gelu(x, "tanh") + 1], 1),
    "layer norm": (norm(ht.layer_norm, "scale", "bias"), 1),
    "rms norm": (norm(ht.rms_norm, "scale"), 1),
    "entropy": (entropy, 1),
    "smooth": (lambda x: entropy(x, label_smoothing=0.1, ignore_index=2), 1),
    "mask": (lambda x: [x * (x > 0), ht.sum(x * 2, axis=0)], 1),
    "sums of rows and columns": (lambda x: [ht.sum(x * 2, axis=-1), ht.max(x * 2, axis=-1)], 1),
    "a sum of all": (lambda x: [ht.sum(ht.square(x + ht.placeholder("b", x.shape[-1:], x.dtype)))], 1),
    "rows of another space": (rows, None),
    "dropout": (lambda x: [y := dropped(x * 2, 5) + x, dropped(ht.relu(y), 6)], 1),
    "dropout and sums": (lambda x: [ht.softmax(dropped(x, 7) + 1), ht.sum(dropped(x, 8), axis=-1)], None),
    "counts": (lambda x: [ht.astype(x > 0, "int64") * 3 + 1], 1),
    "batch norm": (norm(lambda x, s, b: OPS["batch_norm_train"](x, s, b, axis=x.ndim - 1)[0], "s", "b"), None),
}
LEAST_ROWS = {"batch norm": 2}  # of one the variance is 0, and training by it refused
SHAPES = {  # by the texts that they lead to
    "short rows": [(6, 5), (70, 33), (3, 4, 100), (33, 2), (65, 127), (3000, 9), (40, 16), (70, 31), (33, 24)],
    "long rows": [(2, 5000), (300, 1100), (64, 128)],
    "one row": [(1, 7)],
    "one column": [(5, 1)],
}


def feed_of(outputs, rng):
    feed = {}
    for n in topological(outputs):
        if n.op.name == "placeholder":
            values = rng.integers(0, 1, n.shape) if n.dtype.kind in "iu" else rng.standard_normal(n.shape) * 2
            feed[n] = values.astype(n.dtype)
    return feed


def case_of(case, shape, dtype):
    return PASSES["simplify"](CASES[case][0](ht.placeholder("x", shape, dtype)))


DTYPES = ["float32", "float64"]


def each_shape_of_each_case():
    """With one dtype for all shapes of a kind, the other nightly."""
    for (c, case), (k, kind), dtype in itertools.product(enumerate(CASES), enumerate(SHAPES), DTYPES):
        marks = () if dtype == DTYPES[(c + k) % 2] else pytest.mark.nightly
        shapes = [shape for shape in SHAPES[kind] if math.prod(shape[:-1]) >= LEAST_ROWS.get(case, 1)]
        yield from (pytest.param(case, shape, dtype, marks=marks) for shape in shapes)


def bound(outputs, feed):
    ht.Executor(outputs).program(feed)


def fed_case(case, shape, dtype):
    outputs = case_of(case, shape, dtype)
    return outputs, feed_of(outputs, np.random.default_rng(3))


@pytest.fixture(scope="module")
def all_compiled(request):
    """What the chosen tests compute, which together takes a fifth of the time."""
    names = ("case", "shape", "dtype")
    params = [item.callspec.params for item in own_items(request) if hasattr(item, "callspec")]
    made = [fed_case(*(p[n] for n in names)) for p in params if p.keys() == {*names}]
    made += [rule_of(p["rule"])[1:] for p in params if p.keys() == {"rule"}]
    made += [viewed(view) for view in VIEWS]
    compiled_at_once(partial(calls_of, *one) for one in made)
    compiled_at_once(partial(bound, *nothing(p["shape"])) for p in params if p.keys() == {"shape"})


@pytest.mark.parametrize(("case", "shape", "dtype"), [*each_shape_of_each_case()], ids=str)
@pytest.mark.sampled(16)
def test_a_case_is_one_group_and_right(all_compiled, case, shape, dtype):
    count = CASES[case][1]
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}
    groups = check(*fed_case(case, shape, dtype), **tolerance)
    if count is not None and 1 not in shape:
        assert len(groups) == count


def rule_of(rule):
    """What the rule computes: of a tuple of results or of one; the nodes, and what they are fed."""
    op = OPS[rule]
    tables = [ht.placeholder(f"t{k}", (7, 9)) for k in range(op.update.tables + 1)]
    scalars = [ht.placeholder(name, (), "float64") for name in ("lr", "step")[: 1 + op.update.timed]]
    node = op(*tables, *scalars)
    rng = np.random.default_rng(0)
    feed = {t: np.abs(rng.standard_normal(t.shape)).astype(t.dtype) for t in tables}
    feed |= dict(zip(scalars, (np.float64(0.1), np.float64(3.0))))
    return node, list(node) if isinstance(node, tuple) else [node], feed


@pytest.mark.parametrize("rule", sorted(name for name, op in OPS.items() if op.update is not None))
def test_the_rule_of_an_optimizer_is_one_group_for_its_parameter(all_compiled, rule):
    node, outputs, feed = rule_of(rule)
    groups = check(outputs, feed, rtol=1e-5, atol=1e-6)
    found = OPS[rule].update.of(outputs[0].inputs[0] if isinstance(node, tuple) else node)
    assert sum(g.attrs["form"].space == (7, 9) for g in groups) == (2 if found.whole else 1)  # a norm ends the first


# -- a stranger's operator, views, nothing -----------------------------------------------------------------------------


def swish(code="y = x / ((T)1 + exp(-x))"):
    made = ht.op(name="swish_of_a_stranger", infer=same_type, code=code)(lambda xp, x: x / (1 + xp.exp(-x)))
    OPS.pop("swish_of_a_stranger")
    return made


def test_the_operator_of_a_stranger_is_a_line_of_a_group():
    x = ht.placeholder("x", (33, 5))
    program = ht.Executor([ht.relu(swish()(x + 1) * 3)]).program({x: np.zeros((33, 5), np.float32)})
    assert len(program.steps) == 1
    if compiler():
        assert "// swish_of_a_stranger" in program.c and "void group(" in program.c
    assert "swish_of_a_stranger" in str(program.steps[0].node.attrs["form"].text(["x"]))


@pytest.mark.compiled
def test_the_text_of_a_program_names_the_instructions_and_where_written_functions_stand():
    x = ht.placeholder("x", (6, 5))
    y = ht.relu((ht.relu(x @ ht.matrix_transpose(x)) + 1) @ x)
    shown = ht.Executor([y]).program({x: np.zeros((6, 5), np.float32)}).c
    assert "// of 0, 2:\n// gemm, which stands in hetu/cpu_kernels/blas.c\n" in shown
    assert "// of 1:\nvoid group(" in shown and "// of 3:\nvoid group(" in shown and shown.count("void ") == 2


@pytest.mark.compiled
def test_the_text_of_a_program_names_what_it_includes():
    x = ht.placeholder("x", (6, 5))
    shown = ht.Executor([ht.softmax(x), ht.softmax(ht.tanh(x), axis=0)]).program({x: np.zeros((6, 5), np.float32)}).c
    assert '#include "turn.h"\nvoid group(' in shown and "square(" not in shown


@pytest.mark.compiled
def test_an_expression_that_is_no_c_loses_its_own_group_only():
    x, wrong, right = ht.placeholder("x", (9, 5)), swish("y = nothing_of_the_kind(x)"), swish()
    outputs = [wrong(x) * 2, ht.sum(right(x) * 2, axis=0)]
    feed = {x: np.ones((9, 5), np.float32)}
    with pytest.warns(RuntimeWarning, match="nothing_of_the_kind"):
        executor = ht.Executor(outputs)
        got = executor.run(feed)
    for a, b in zip(got, interpret(outputs, feed)):
        np.testing.assert_allclose(a, b, rtol=1e-5)


VIEWS = {
    "every second column": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1],
    "columns": lambda a: np.asfortranarray(a),
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a[:, :0],
}


def viewed(view):
    array = VIEWS[view](np.random.default_rng(0).standard_normal((8, 34)).astype(np.float32))
    x = ht.placeholder("x", array.shape)
    return [ht.relu(x + 1) * x, ht.exp(x) * 2, *([ht.softmax(x)] if array.size else [])], {x: array}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_arrays_of_nothing(all_compiled, way, view):
    outputs, feed = viewed(view)
    (array,) = feed.values()
    for group in groups_of(outputs)[1]:
        plain = fused.forward(np, array, form=group.attrs["form"])
        for got, right in zip(computed(way, group, [array] * len(group.inputs)), plain):
            np.testing.assert_allclose(got, right, rtol=1e-6)


def nothing(shape):
    """Numbers per row, too, where the rows have no columns."""
    x, y = ht.placeholder("x", shape), ht.placeholder("y", tuple(n or 1 for n in shape))
    per_row = ht.tanh(y)
    outputs = [per_row, ht.relu(x) - per_row, ht.sum(per_row + 1, axis=-1)]
    return outputs, {n: np.ones(n.shape, np.float32) for n in (x, y)}


@pytest.mark.parametrize("shape", [s for n in (1, 2, 3) for s in itertools.product((0, 2), repeat=n)], ids=str)
def test_what_meets_arrays_of_nothing_is_computed(all_compiled, shape):
    outputs, feed = nothing(shape)
    for got, wanted in zip(ht.Executor(outputs).run(feed), interpret(outputs, feed)):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_what_a_loss_checks_is_still_checked_and_named():
    x, ids = ht.placeholder("x", (4, 3)), ht.placeholder("ids", (4,), "int64")
    executor = ht.Executor([ht.mean(ht.softmax_cross_entropy(x * 2, ids))])
    values = np.zeros((4, 3), np.float32)
    executor.run({x: values, ids: [0, 1, 2, 0]})
    with pytest.raises(ht.errors.ValueRangeError, match="softmax_cross_entropy: class id 3 at position") as caught:
        executor.run({x: values, ids: [0, 1, 3, 0]})
    assert "test_groups.py" in str(caught.value.site)


@pytest.mark.compiled
def test_another_batch_compiles_nothing():
    w = ht.variable("w", np.ones((5, 3), np.float32))
    x, ids = ht.placeholder("x", (None, 5)), ht.placeholder("ids", (None,), "int64")
    loss = ht.mean(ht.softmax_cross_entropy(ht.layer_norm(ht.gelu(x) @ w, np.ones(3, "f"), np.zeros(3, "f")), ids))
    executor = ht.Executor({"train": [loss, ht.optim.Adam(0.1).minimize(loss)]})

    def texts(n):
        feed = {x: np.ones((n, 5), np.float32), ids: np.zeros(n, np.int64)}
        return {call.source.text for step in executor.program("train", feed).steps for call in step.calls}

    with only_bound():
        known = texts(4)
        assert all(texts(n) <= known for n in (70, 129, 1))
    assert texts(5000) <= known


@pytest.mark.compiled
def test_sequences_of_one_step_and_batches_of_one_are_grouped_as_others():
    ids, t = (ht.placeholder(name, (None, None), "int64") for name in ("ids", "t"))
    h = ht.nn.Embedding(7, 8)(ids)
    for _ in range(2):
        h = ht.nn.TransformerBlock(8, 2, causal=True, dropout=0.1)(h)
    loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(8, 7)(ht.nn.LayerNorm(8)(h)), t))
    executor = ht.Executor([loss, ht.optim.Adam(0.1).minimize(loss)])

    def texts(*shape):
        steps = executor.program({ids: np.zeros(shape, np.int64), t: np.zeros(shape, np.int64)}).steps
        return {call.source.text for step in steps for call in step.calls if call.source.shared}

    with only_bound():
        assert all(texts(*shape) <= texts(4, 6) for shape in [(5, 9), (3, 1), (1, 6), (1, 1), (150, 2)])


def lines_run(work):
    """How many lines of the file that finds groups are run."""
    seen = [0]

    def inside(frame, event, argument):
        seen[0] += event == "line"
        return inside

    file = fuse.__code__.co_filename
    sys.settrace(lambda frame, event, argument: inside if frame.f_code.co_filename == file else None)
    try:
        work()
    finally:
        sys.settrace(None)
    return seen[0]


def test_a_graph_four_times_as_deep_is_four_times_the_work():
    def stack(layers):
        h = ht.placeholder("x", (3, 5))
        for _ in range(layers):
            h = h + ht.softmax(ht.gelu(h)) @ np.ones((5, 5), np.float32)
        return PASSES["simplify"]([ht.sum(h), *ht.gradients(ht.sum(h), [h])])

    few, many = (lines_run(partial(fuse_groups, stack(layers))) for layers in (10, 40))
    assert few < many < 5 * few


def attended(h):
    return h + ht.nn.MultiHeadAttention(8, 2)(ht.nn.LayerNorm(8)(h))


def recurred(h):
    return h + ht.nn.LSTM(8, 8)(h)[0]


DEEP = {"norm": lambda h: ht.gelu(ht.nn.Linear(8, 8)(ht.nn.LayerNorm(8)(h))), "attention": attended, "lstm": recurred}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("block", "rule"),
    [
        pytest.param(block, rule, marks=() if block == "norm" or rule == "Adam" else pytest.mark.nightly)
        for block, rule in itertools.product(DEEP, ["SGD", "Adam", "LAMB"])
    ],
)
def test_at_another_shape_layers_that_are_alike_are_worked_out_once(monkeypatch, block, rule):
    def counts(layers):
        h = ht.placeholder("x", (None, 3, 8))
        for _ in range(layers):
            h = DEEP[block](h)
        loss = ht.mean(h)
        executor = ht.Executor([loss, getattr(ht.optim, rule)(0.1).minimize(loss)])
        executor.program({"x": np.ones((2, 3, 8), np.float32)})
        found = [0, 0]
        for k, (module, name) in enumerate([(apart, "_example"), (unit.Rules, "unit_of_all")]):
            real = getattr(module, name)

            def counted(*args, k=k, real=real):
                found[k] += 1
                return real(*args)

            monkeypatch.setattr(module, name, counted)
        pattern.kept.cache_clear()  # of a pattern that is new, too
        missed = groups_in_c._function.cache_info().misses
        executor.program({"x": np.ones((5 + layers, 3, 8), np.float32)})
        monkeypatch.undo()
        return [*found, groups_in_c._function.cache_info().misses - missed]

    with only_bound():
        counts(2)  # the first in a process also makes what folds the parts of larger batches
        assert counts(3) == counts(6)


def test_a_rule_that_looks_behind_its_inputs_is_asked_for_each_node():
    """Nodes that are alike are taken apart once; this one is not like the next."""

    @ht.op(infer=lambda x: x)
    def undone(xp, x):
        return xp.exp(xp.log(x))

    @undone.decompose
    def undone_parts(x):
        return x.inputs[0] * 1.0 if x.op is OPS["exp"] else OPS["exp"](ht.log(x))

    a, b, c = (ht.placeholder(n, (3, 4)) for n in "abc")
    outputs = [undone(ht.exp(a)), undone(ht.exp(b)), undone(c), undone(ht.square(c))]
    feed = {n: np.full((3, 4), k + 1, np.float32) for k, n in enumerate((a, b, c))}
    made = fuse_groups(outputs)
    for got, right in zip(interpret(made, feed), (1, 2, 3, 9)):
        np.testing.assert_allclose(got, right, rtol=1e-6)


@pytest.mark.parametrize("line", ["sin", "cumsum"])
def test_parts_may_be_thousands_deep(line):
    """An operator that is taken apart into a chain, and one of which every part could be a line but the first."""

    @ht.op(infer=lambda x: x)
    def deep(xp, x):
        return x

    asked = []

    @deep.decompose
    def deep_parts(x):
        h = ht.cumsum(x, axis=0) if line == "cumsum" else ht.sin(x)
        for _ in range(5000):
            h = h + 1.0
        return h

    x = ht.placeholder("x", (3, 4))
    fits = Rules(LIMITS).unit_of
    (made,), _, _ = taken_apart([deep(x)], lambda n: asked.append(n) or fits(n) is not None, lambda op: False)
    assert (made.op is deep) == (line == "cumsum")
    assert len(asked) < 10 if made.op is deep else len(topological([made])) > 5000


@pytest.mark.compiled
@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_a_recurrent_layer_is_not_taken_apart_as_its_parts_are_those_of_every_step(layer, monkeypatch):
    x = ht.placeholder("x", (None, None, 4))
    loss = ht.mean(ht.square(getattr(ht.nn, layer)(4, 3)(x)[0]))
    executor, asked = ht.Executor([loss, ht.optim.Adam(0.1).minimize(loss)]), []
    gradient = OPS[f"{layer.lower()}_dx"]
    monkeypatch.setattr(gradient, "decompose_rule", lambda *inputs, **attrs: asked.append(inputs))
    with only_bound():
        program = executor.program({x: np.ones((2, 700, 4), np.float32)})
    assert gradient in {step.node.op for step in program.steps} and not asked
