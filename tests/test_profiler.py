"""The profiler counts operations and bytes exactly, sums by any label, and leaves the state alone."""

from __future__ import annotations

import functools
import json
import linecache
import operator
import re
import xml.etree.ElementTree as ElementTree
from functools import reduce

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, FeedError, UnknownNameError
from hetu.core.graph import OPS, Node, tagged, topological
from hetu.core.memory import types_of
from hetu.look.profiler import Profile, ProfileRow, flops, profile, traffic
from hetu.passes.channels_last import channels_last

from .test_ops import built, each_sample


def array(*shape: int, dtype: str = "float32", name: str = "x") -> Node:
    return ht.placeholder(name, shape, dtype)


INTS = functools.partial(array, dtype="int64")


@pytest.mark.parametrize(
    "build, wanted",
    [
        (lambda: array(2, 3) @ array(3, 5), 2 * 2 * 3 * 5),
        (lambda: array(7, 2, 3) @ array(3, 5), 2 * 7 * 2 * 3 * 5),
        (lambda: array(7, 1, 2, 3) @ array(4, 3, 5), 2 * 7 * 4 * 2 * 3 * 5),
        (lambda: ht.einsum("bij,bkj->bik", array(2, 3, 4), array(2, 5, 4)), 2 * 2 * 3 * 5 * 4),
        (lambda: array(4, 6) + array(6), 24),
        (lambda: ht.exp(array(4, 6)), 24),
        (lambda: ht.sum(array(4, 6), axis=1), 24),
        (lambda: ht.softmax(array(4, 6)), 24),
        (lambda: ht.reshape(array(4, 6), (24,)), 0),
        (lambda: array(4, 6)[1:, ::2], 0),
        (lambda: ht.concat([array(4, 6), array(2, 6)], axis=0), 0),
        (lambda: ht.take(array(1000, 6), array(3, dtype="int64"), axis=0), 0),
        (lambda: ht.matrix_transpose(array(4, 6)), 0),
        (lambda: OPS["bag"](INTS(4), INTS(12), array(1000, 6), array(12)), 2 * 12 * 6),
        (lambda: OPS["sgd_rows"](array(1000, 6), array(3, dtype="int64"), array(3, 6), 0.1), 18),
        (lambda: ht.conv2d(array(2, 3, 8, 8), array(4, 3, 5, 5)), 2 * (2 * 4 * 4 * 4) * (3 * 5 * 5)),
        (lambda: ht.conv2d(array(2, 4, 8, 8), array(6, 2, 3, 3), groups=2), 2 * (2 * 6 * 6 * 6) * (2 * 3 * 3)),
    ],
)
def test_operations_follow_from_the_sharding_rule(build, wanted):
    assert flops(build()) == wanted


@pytest.mark.parametrize("form, lowered", [("conv2d", lambda outputs: outputs), ("conv2d_last", channels_last)])
def test_the_backward_of_a_convolution_costs_as_much_as_its_forward(form, lowered):
    x, w = array(2, 3, 8, 8), array(32, 3, 5, 5)
    y = ht.conv2d(x, w)
    nodes = ht.Graph(lowered((y, *ht.gradients(ht.sum(y), [x, w])))).nodes
    counts = {n.op.name: flops(n) for n in nodes if n.op.name.startswith("conv2d")}
    assert counts == dict.fromkeys((form, f"{form}_dx", f"{form}_dw"), flops(y))


@pytest.mark.parametrize("make, gates, biases", [(ht.lstm, 4, [np.zeros(64)]), (ht.gru, 3, [np.zeros(48)] * 2)])
def test_products_of_the_steps_of_recurrent_layers(make, gates, biases):
    x, w, u = array(2, 5, 9, name="x"), array(9, gates * 16, name="w"), array(16, gates * 16, name="u")
    graph = ht.Graph(tuple(ht.gradients(ht.sum(make(x, w, u, *biases)[0]), [x, w, u])))
    counts = {n.op.name: flops(n) for n in graph.nodes if n.op.name.startswith(make.__name__)}
    steps = 2 * 2 * 5 * gates * 16
    assert counts == {make.__name__: steps * (9 + 16), f"{make.__name__}_dx": steps * (9 + 16 + 16)}


class Counted(np.ndarray):
    """An array that counts the operations of matrix products, and those of all other arithmetic, made with it."""

    products = others = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        inputs = [_plain(i) for i in inputs]
        kwargs |= {"out": tuple(map(_plain, kwargs["out"]))} if "out" in kwargs else {}
        made = getattr(ufunc, method)(*inputs, **kwargs)
        results = made if ufunc.nout > 1 else (made,)
        if ufunc is np.matmul:
            Counted.products += made.size * (2 * inputs[0].shape[-1] - 1)
        else:
            Counted.others += max(map(np.size, (results[0], inputs[0], inputs[-1])))
        results = tuple(r.view(Counted) if isinstance(r, np.ndarray) else r for r in results)
        return results if ufunc.nout > 1 else results[0]


def _plain(value):
    return value.view(np.ndarray) if isinstance(value, Counted) else value


def counted(node: Node, values: dict[Node, np.ndarray]) -> tuple[int, int]:
    """Operations of the node's forward in NumPy: of products, and all others. Its value is put into `values`."""
    Counted.products = Counted.others = 0
    arrays = [values[i] for i in node.inputs]
    viewed = [a.view(Counted) if isinstance(a, np.ndarray) else a for a in arrays]
    made = node.op.forward(np, *viewed, **node.attrs)
    values[node] = tuple(map(np.asarray, made)) if isinstance(made, tuple) else np.asarray(made)
    return Counted.products, Counted.others


@each_sample
def test_operations_are_at_most_twice_or_half_of_what_numpy_makes(sample):
    """Of operators with products, and of their gradients: the sample's values are computed by arrays that count."""
    outputs, values = built(sample)
    if sample.order:
        floats = [n for n in values if n.dtype.kind == "f"]
        total = reduce(operator.add, (ht.sum(ht.square(o)) for o in outputs if o.dtype.kind == "f"))
        outputs += tuple(ht.gradients(total, floats, allow_unused=True))
    for node in [n for n in topological(outputs) if n not in values]:
        products, others = counted(node, values)
        claimed, largest = flops(node), max((int(t.size) for n in (node, *node.inputs) for t in types_of(n)), default=0)
        assert products / 2 <= claimed <= 2 * max(products + others, largest), (node, products, others)


@pytest.mark.parametrize("masks", [0, 1])
def test_attention_is_two_products_forward_and_four_backward(masks):
    q, k, v = array(2, 5, 8, name="q"), array(2, 7, 8, name="k"), array(2, 7, 3, name="v")
    y = ht.scaled_dot_product_attention(q, k, v, *[array(5, 7, dtype="bool", name="mask")] * masks)
    graph = ht.Graph(tuple(ht.gradients(ht.sum(y), [q, k, v])))
    counts = {n.op.name: flops(n) for n in graph.nodes if n.op.name.startswith("attention")}
    forward = 2 * 2 * 5 * 7 * (8 + 3)
    assert counts == {"attention": forward, "attention_dx": 2 * forward}


def test_bytes_are_those_of_values_read_and_written():
    a, b = array(2, 3), array(3, 5)
    assert traffic(a @ b) == 4 * (6 + 15 + 10)
    assert traffic(ht.zeros_like(a)) == 4 * 6, "an input that lends its shape is not read"


@pytest.fixture
def training():
    x = ht.placeholder("x", (None, 4))
    w = ht.variable("dense/weight", np.ones((4, 3), np.float32))
    with tagged(layer="dense"):
        y = x @ w
    loss = ht.sum(ht.exp(y))
    (slope,) = ht.gradients(loss, [w])
    return ht.Executor({"train": [loss, {w: w - 0.1 * slope}], "eval": [y]}), w, {x: np.ones((2, 4), np.float32)}


def test_every_instruction_is_timed(training):
    executor, _, feed = training
    measured = profile(executor, "train", feed, repeat=2)
    program = executor.program("train", feed)
    assert [node for node, _ in measured.instructions] == [step.node for step in program.steps]
    assert all(row.seconds > 0 for _, row in measured.instructions)
    assert measured.seconds == pytest.approx(sum(row.seconds for row in measured.rows()))


def test_calls_are_made_once_to_warm_up_and_then_as_often_as_asked():
    seen = []
    noted = ht.op(lambda xp, x: x + 0 * len(seen), name="noted", infer=lambda x: x, differentiable=False)
    noted.into(lambda xp, out, x: (seen.append(1), xp.copyto(out, x)))
    x = ht.placeholder("x", (2,))
    try:
        executor = ht.Executor([noted(x)])
        profile(executor, {x: np.ones(2, np.float32)}, repeat=3)
    finally:
        OPS.pop("noted")
    assert len(seen) == 4


def test_profiling_does_not_train(training):
    executor, w, feed = training
    before = executor.state[w].copy()
    profile(executor, "train", feed)
    np.testing.assert_array_equal(executor.state[w], before)
    after = executor.run("train", feed)[0]
    profile(executor, "train", feed)
    assert executor.run("eval", feed)[0].sum() != pytest.approx(before.sum() * 2), "running does train"
    assert after == pytest.approx(6 * np.exp(4), rel=1e-5), "what ran saw the values of before"


def test_wrong_arguments_are_refused(training):
    executor, _, feed = training
    with pytest.raises(ArgumentError, match="got repeat=0"):
        profile(executor, "train", feed, repeat=0)
    with pytest.raises(UnknownNameError, match="did you mean 'train'"):
        profile(executor, "trian", feed)
    with pytest.raises(FeedError, match="was not fed 'x'"):
        profile(executor, "train")
    with pytest.raises(ArgumentError, match="did you mean 'line'"):
        profile(executor, "train", feed).rows("lime")


# -- views, on numbers that do not depend on a clock ---------------------------------------------------------------


@pytest.fixture
def measured() -> Profile:
    x = ht.placeholder("x", (2, 4))
    with tagged(layer="a"):
        first = ht.exp(x)
    second = ht.exp(first) + first
    (slope,) = ht.gradients(ht.sum(second), [x])
    add, exps = second, [first, second.inputs[0]]
    times = {exps[0]: 3e-3, exps[1]: 1e-3, add: 2e-3, slope: 4e-3}
    families = {add: "compute", slope: "gradient"}
    return Profile(
        tuple((n, ProfileRow(n.op.name, families.get(n, "compute"), 1, s, 1000, 2000)) for n, s in times.items())
    )


def test_rows_are_sums_with_the_slowest_first(measured):
    rows = measured.rows("op")
    assert [r.seconds for r in rows] == sorted((r.seconds for r in rows), reverse=True)
    exp = next(r for r in rows if r.label == "exp")
    assert (exp.calls, exp.nbytes, exp.flops) == (2, 2000, 4000)
    assert exp.seconds == pytest.approx(4e-3) and exp.gflops_per_second == pytest.approx(1e-3)
    assert len(measured.rows("node")) == 4


def test_layers_show_gradients_apart(measured):
    labels = {r.label: r.seconds for r in measured.rows("layer")}
    assert labels["a"] == pytest.approx(3e-3) and labels["a backward"] == pytest.approx(4e-3)
    assert labels["(compute)"] == pytest.approx(3e-3)


def test_lines_are_those_of_the_user(measured):
    rows = measured.rows("line")
    assert all(re.match(r"test_profiler\.py:\d+  ", r.label) for r in rows)
    assert {r.label.split("  ")[1] for r in rows} == {"first = ht.exp(x)", "second = ht.exp(first) + first"}


def test_lines_of_cells_that_have_one_number_are_told_apart():
    """A notebook has many lines 1; where the source is not at hand, the number has to do."""
    x, made = array(2), []
    for number, text in enumerate(["ht.exp(x)", "ht.tanh(x)", ""]):
        cell = f"ipykernel_7/cell{number}"
        if text:
            linecache.cache[cell] = (len(text), None, [text], cell)
        made.append(eval(compile(text or "ht.sin(x)", cell, "eval"), {"ht": ht, "x": x}))
    assert sorted(labels_of(made, "line")) == [f"notebook cell:1{t}" for t in ("", "  ht.exp(x)", "  ht.tanh(x)")]


def test_the_table_is_aligned_and_sums_up(measured):
    lines = measured.table("op").splitlines()
    assert lines[0].split() == ["op", "calls", "ms", "share", "MB", "MFLOP", "GB/s", "GFLOP/s"]
    assert lines[-1].split()[:4] == ["step", "4", "10.000", "100.0%"]
    assert len({len(line) for line in lines}) == 1
    assert str(measured) == measured.table()
    assert "... and 3 more" in measured.table("node", limit=1)


def labels_of(outputs, by) -> list[str]:
    """The labels of a table of these nodes, each of which takes a second."""
    found = [n for n in topological(outputs) if n.inputs and n.op.name != "item"]
    rows = Profile(tuple((n, ProfileRow(n.op.name, "compute", 1, 1.0, 0, 0)) for n in found)).table(by).splitlines()
    width = rows[0].index("calls")
    return [row[:width].strip() for row in rows[2:-2]]


@pytest.mark.parametrize(
    "count, shown",
    [
        (1, "f32[7]"),
        (3, "(f32[7], f32[7], f32[7])"),
        (4, "(f32[7], f32[7], f32[7], ... 1 more)"),
        (150, "(f32[7], f32[7], f32[7], ... 147 more)"),
    ],
)
def test_a_label_of_many_types_has_the_first_and_counts_the_others(count, shown):
    many = ht.op(lambda xp, x: (x,) * count, name="many", infer=lambda x: (x,) * count if count > 1 else x)
    OPS.pop("many")
    made = many(array(7))
    (label,) = labels_of(made if count > 1 else [made], "node")
    assert re.fullmatch(rf"many {re.escape(shown)} at test_profiler\.py:\d+", label)


@pytest.mark.parametrize("by", ["op", "layer", "node"])
def test_a_long_label_keeps_its_ends(by):
    """Whatever it is summed by: names of operators and layers are a user's."""
    long = "begin_" + 300 * "x" + "_end"
    made = ht.op(lambda xp, x: x, name=long, infer=lambda x: x)
    OPS.pop(long)
    with tagged(layer=long):
        y = made(array(2))
    (label,) = labels_of([y], by)
    assert len(label) == 70 and label.startswith("begin_x") and label.endswith("_end" if by != "node" else f"{y.site}")


def test_an_empty_profile_prints():
    assert "step" in str(Profile(())) and Profile(())._repr_html_()


def test_the_html_has_a_bar_a_row(measured):
    html = measured._repr_html_()
    ElementTree.fromstring(f"<div>{html}</div>")
    assert html.count("<div") == len(measured.rows())


def test_the_trace_lays_instructions_end_to_end(measured, tmp_path):
    path = tmp_path / "trace.json"
    measured.chrome_trace(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert [e["name"] for e in events] == [n.op.name for n, _ in measured.instructions]
    assert [e["dur"] for e in events] == pytest.approx([3000, 1000, 2000, 4000])
    assert [e["ts"] for e in events] == pytest.approx([0, 3000, 4000, 6000])
    assert all(e["ph"] == "X" and e["args"]["line"].startswith("test_profiler.py:") for e in events)
