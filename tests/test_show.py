"""Pictures of graphs: well-formed, complete, nothing drawn across a box, and every name escaped."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu.core.graph import Graph, Node, tagged
from hetu.core.op import Op, Role
from hetu.look import curves_svg, install, memory_svg, to_dot, to_html, to_svg
from hetu.look.html_table import rows_html
from hetu.look.layout import BOX_HEIGHT, layout
from hetu.look.picture import family, picture
from hetu.look.roofline import roofline_svg
from hetu.look.shards import shards_svg
from hetu.look.staleness import leads, staleness_svg
from hetu.look.timeline import Panel, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def linear(name: str, x: Node, size: int) -> Node:
    w = ht.variable(f"{name}/weight", np.ones((x.shape[-1], size), np.float32))
    b = ht.variable(f"{name}/bias", np.ones(size, np.float32))
    with tagged(layer=name):
        return ht.exp(x @ w + b)


def model(depth: int = 2) -> tuple[Node, list[Node]]:
    """A loss and the gradients of all variables."""
    h = ht.placeholder("x", (None, 8))
    for i in range(depth):
        h = linear(f"layer{i}", h, 8)
    loss = ht.sum(h * h) * 0.5
    return loss, ht.gradients(loss, Graph((loss,)).leaves("variable"))


# -- what is drawn -------------------------------------------------------------------------------------------------


def test_every_node_has_a_box_except_numbers_and_items():
    pair = Op(lambda xp, x: (x, x), name="pair", infer=lambda x: (x, x), differentiable=False)
    first, second = pair(ht.placeholder("x", (3,)) * 2.5)
    drawn = picture(first + second)
    assert [b.title for b in drawn.boxes] == ["x", "multiply 2.5", "pair", "add"]
    assert drawn.arrows == [(0, 1), (1, 2), (2, 3)]
    assert [b.is_output for b in drawn.boxes] == [False, False, False, True]


def test_a_number_that_is_the_output_is_drawn():
    assert [b.title for b in picture(ht.constant(1.0)).boxes] == ["constant"]
    assert picture([]).boxes == [] and "<svg" in to_svg([])


def test_nodes_fall_into_families():
    loss, slopes = model(1)
    assert family(loss) == "compute" and family(slopes[0]) == "gradient"
    assert {b.family for b in picture([loss, *slopes]).boxes} == {"placeholder", "variable", "compute", "gradient"}
    roles = [(Role.UPDATE, "update"), (Role.COMMUNICATION, "communication"), (Role.HINT, "communication")]
    for role, wanted in roles:
        mine = Op(lambda xp, x: x, name="mine", role=role, infer=lambda x: x)
        assert family(mine(loss)) == wanted


def test_a_layer_holds_its_variables_and_its_gradients_stand_apart():
    loss, slopes = model(1)
    groups = {(b.title, b.group) for b in picture([loss, *slopes]).boxes if b.group}
    assert ("weight", ("layer0", "forward")) in groups and ("matmul", ("layer0", "backward")) in groups


def test_a_use_of_the_shape_alone_is_marked():
    x, y = ht.placeholder("x", (3,)), ht.placeholder("y", (3,))
    drawn = picture(ht.zeros_like(x) + y)
    assert drawn.shape_only == {(0, 1)}
    assert to_svg(ht.zeros_like(x) + y).count('stroke-dasharray="') == 1
    assert "style=dashed" in to_dot(ht.zeros_like(x))


# -- layout --------------------------------------------------------------------------------------------------------


@st.composite
def pictures(draw):
    """Widths, arrows from lower to higher indices, and groups of a random picture."""
    count = draw(st.integers(1, 16))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] < p[1])
    arrows = sorted(draw(st.sets(pairs, max_size=2 * count)) if count > 1 else ())
    groups = draw(st.lists(st.sampled_from([None, None, "a", "b", "c"]), min_size=count, max_size=count))
    return draw(st.lists(st.integers(50, 200), min_size=count, max_size=count)), arrows, groups


def boxes_of(placed, widths):
    return [(x - w / 2, y - BOX_HEIGHT / 2, x + w / 2, y + BOX_HEIGHT / 2) for (x, y), w in zip(placed.centers, widths)]


def curve(points):
    """Points along a drawn arrow: S-shaped pieces and vertical ones in turn."""
    for index, ((x, y), (to_x, to_y)) in enumerate(itertools.pairwise(points)):
        assert index % 2 == 0 or x == to_x
        for t in np.linspace(0, 1, 9):
            blend = t * t * (3 - 2 * t)  # both coordinates of the cubic with controls at half height
            yield x + (to_x - x) * blend, y + (to_y - y) * (1.5 * t * (1 - t) * (1 - t) + 1.5 * t * t * (1 - t) + t**3)


@settings(max_examples=40)
@given(pictures())
def test_boxes_do_not_overlap_and_arrows_cross_none(drawn):
    widths, arrows, _ = drawn
    placed = layout(*drawn)
    boxes = boxes_of(placed, widths)
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for (source, target), points in placed.paths.items():
        assert points[0][1] == boxes[source][3] and points[-1][1] == boxes[target][1], "from its box to its box"
        for x, y in curve(points):
            for left, top, right, bottom in boxes:
                assert not (left < x < right and top + 1e-6 < y < bottom - 1e-6)
    assert set(placed.paths) == set(arrows)


@settings(max_examples=40)
@given(pictures())
def test_groups_frame_their_boxes_and_no_others(drawn):
    widths, _, groups = drawn
    placed = layout(*drawn)
    for key, (x, y, width, height) in placed.groups.items():
        for group, (left, top, right, bottom) in zip(groups, boxes_of(placed, widths)):
            if group == key:
                assert x < left and right < x + width and y < top and bottom < y + height
            else:
                assert right <= x or x + width <= left or bottom <= y or y + height <= top
    assert set(placed.groups) == set(groups) - {None}


@settings(max_examples=40)
@given(pictures())
def test_everything_lies_on_the_page_and_flows_down(drawn):
    widths, arrows, _ = drawn
    placed = layout(*drawn)
    for left, top, right, bottom in boxes_of(placed, widths):
        assert left >= 0 and top >= 0 and right <= placed.width and bottom <= placed.height
    assert all(0 <= x <= placed.width for points in placed.paths.values() for x, _ in points)
    assert all(placed.centers[s][1] < placed.centers[t][1] for s, t in arrows)
    for x, y, width, height in placed.groups.values():
        assert x >= 0 and y >= 0 and x + width <= placed.width and y + height <= placed.height


def test_a_chain_is_straight():
    middles = [x for x, _ in layout([60, 90, 60], [(0, 1), (1, 2)], [None] * 3).centers]
    assert max(middles) - min(middles) < 0.5


# -- SVG, dot, HTML ------------------------------------------------------------------------------------------------


def test_the_svg_is_well_formed_and_complete():
    loss, slopes = model(3)
    drawn = picture([loss, *slopes])
    root = ElementTree.fromstring(to_svg([loss, *slopes]))
    titles = [t.text for t in root.iter(f"{SVG}title")]
    assert len(titles) == len(drawn.boxes) + 6, "boxes, and three layers in both directions"
    assert len([p for p in root.iter(f"{SVG}path") if p.get("marker-end")]) == len(drawn.arrows)
    assert any("test_show.py:" in t and "x @ w + b" in t and "f32[?, 8]" in t for t in titles)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"layer0", "layer2 · backward", "gradient", "weight"} <= set(texts)


def test_a_long_layer_name_loses_outer_scopes_and_is_whole_in_the_tooltip():
    with tagged(layer="model/encoder/transformer_block_3/attention/query"):
        root = ElementTree.fromstring(to_svg(ht.exp(ht.placeholder("x", (3,)))))
    assert "…/query" in [t.text for t in root.iter(f"{SVG}text")]
    assert "model/encoder/transformer_block_3/attention/query" in [t.text for t in root.iter(f"{SVG}title")]


HOSTILE = "<script>\"'&x"


@pytest.mark.parametrize("view", [to_svg, to_html, lambda n: Graph((n,))._repr_html_()])
def test_names_are_escaped(view):
    install()
    with tagged(layer=HOSTILE):
        text = view(ht.placeholder(HOSTILE, (3,)) + 1)
    assert "<script>" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "drawn",
    [
        memory_svg([(HOSTILE, 0, 9, 0, 64)]),
        curves_svg({HOSTILE: [1.0, 2.0]}, label=HOSTILE),
        timeline_svg(Panel([(0, "compute", HOSTILE, 0.0, 1.0)], {0: HOSTILE}, title=HOSTILE)),
        shards_svg([(HOSTILE, (4,), {0: ((0, 4),)})], {0: HOSTILE}),
        roofline_svg([(HOSTILE, 2e9, 1e6, 0.0)], 1e12, 1e11),
        rows_html([(HOSTILE, "b"), ("c", HOSTILE)]),
    ],
    ids=["memory", "curves", "timeline", "shards", "roofline", "table"],
)
def test_names_are_escaped_in_every_picture(drawn):
    assert "".join(ElementTree.fromstring(drawn).itertext()).count(HOSTILE) >= 2
    assert "<script" not in drawn


def test_dot_quotes_names():
    text = to_dot(ht.placeholder('a"b\\', (3,)))
    assert r'label="a\"b\\\nf32[3]"' in text
    assert text.startswith("digraph {") and text.endswith("}")


def test_dot_has_the_same_boxes_arrows_and_clusters():
    loss, slopes = model(2)
    drawn, text = picture([loss, *slopes]), to_dot([loss, *slopes])
    assert len(re.findall(r"^ +n\d+ \[label", text, re.M)) == len(drawn.boxes)
    assert len(re.findall(r"n\d+ -> n\d+", text)) == len(drawn.arrows)
    assert text.count("subgraph cluster_") == 4


def test_the_table_has_a_row_a_node():
    loss, slopes = model(1)
    graph = Graph((loss, *slopes))
    html = to_html(graph)
    ElementTree.fromstring(html)
    assert html.count("<tr>") == len(graph.nodes) + 1
    assert html.count("⇐") == len(set(graph.outputs))


def test_notebooks_get_pictures():
    install()
    loss, _ = model(1)
    graph = Graph((loss,))
    assert graph._repr_svg_().startswith("<svg")
    assert graph._repr_html_().startswith("<svg") and "<table" in graph._repr_html_()
    assert loss._repr_html_().startswith("<details>")


def test_a_large_graph_is_a_table_only():
    install()
    node = ht.placeholder("x", (3,))
    for _ in range(500):
        node = ht.exp(node)
    assert Graph((node,))._repr_svg_() is None
    assert "<svg" not in Graph((node,))._repr_html_()


def chain(count: int) -> Node:
    """A graph of so many nodes, each with an arrow from the one before and a longer one."""
    nodes = [ht.placeholder("x", (3,))]
    for i in range(1, count):
        nodes.append(nodes[-1] + nodes[i // 3 * 2])
    return nodes[-1]


def calls_to_draw(graph: Graph) -> int:
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        to_svg(graph)
    finally:
        sys.setprofile(None)
    return calls


def test_drawing_takes_work_in_proportion_to_the_graph():
    """200 nodes take 0.2 s; what is counted here are calls of functions."""
    graphs = [Graph((chain(count),)) for count in (50, 200)]
    assert [len(g.nodes) for g in graphs] == [50, 200]
    few, many = map(calls_to_draw, graphs)
    assert many < 6 * few and many < 1_200_000


# -- memory --------------------------------------------------------------------------------------------------------

ROWS = [
    ("%1 matmul", 0, 2, 0, 4096),
    ("%2 <relu>", 2, 5, 4096, 2048),
    ("%3 exp", 3, 5, 0, 1024),
    ("%4 empty", 1, 1, 0, 0),
]


def test_the_memory_plan_draws_time_against_addresses():
    root = ElementTree.fromstring(memory_svg(ROWS))
    bricks = [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in root.iter(f"{SVG}rect")]
    assert len(bricks) == 3, "empty values take no place"
    (x1, y1, w1, h1), (_, y2, w2, h2), (x3, y3, w3, h3) = bricks
    assert w1 == pytest.approx(w3, abs=0.02) and w2 == pytest.approx(4 / 3 * w1, abs=0.02)
    assert h1 == pytest.approx(2 * h2, abs=0.02) and y1 == pytest.approx(y2 + h2, abs=0.02), "stacked"
    assert y1 + h1 == pytest.approx(y3 + h3, abs=0.02), "both at address 0"
    assert x3 == pytest.approx(x1 + w1, abs=0.02), "one after the other"
    text = "".join(root.itertext())
    assert "peak 6.14 kB" in text and "%2 <relu>" in text and "2,048 bytes" in text


def test_an_empty_plan_draws():
    ElementTree.fromstring(memory_svg([]))


@pytest.mark.compiled
def test_a_program_shows_its_memory_plan():
    x = ht.placeholder("x", (64, 8))
    program = ht.Executor([ht.sum(ht.exp(x @ np.ones((8, 8), np.float32)))]).program({x: np.zeros((64, 8))})
    text = "".join(ElementTree.fromstring(program._repr_svg_()).itertext())
    assert "peak 2.05 kB" in text and "%2 matmul" in text and "%3 fused" in text
    assert "exp" not in text, "it overwrites the product"
    assert repr(program) == f"<Program of {len(program.steps)} instructions, {program.plan.arena_bytes:,} bytes>"


# -- curves --------------------------------------------------------------------------------------------------------


def dots(drawn: str, index: int = 0) -> list[tuple[float, float]]:
    """The dots of one curve."""
    root = ElementTree.fromstring(drawn)
    color = list(dict.fromkeys(c.get("fill") for c in root.iter(f"{SVG}circle")))[index]
    return [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle") if c.get("fill") == color]


def test_curves_share_their_axes():
    drawn = curves_svg({"<a>": [1.0, 3.0, 2.0], "b": [2.0, 2.0, 1.0]}, [0, 1, 4], label="step")
    a, b = dots(drawn), dots(drawn, 1)
    assert a[2][0] - a[1][0] == pytest.approx(3 * (a[1][0] - a[0][0]), abs=0.3)
    assert a[0][1] - a[2][1] == pytest.approx(a[2][1] - a[1][1], abs=0.2), "1, 2 and 3 are equally far apart"
    assert [p[1] for p in b] == [a[2][1], a[2][1], a[0][1]]
    assert {"<a>", "b", "step", "0", "4"} <= set(ElementTree.fromstring(drawn).itertext())


def test_a_logarithm_makes_equal_factors_equally_high_and_leaves_gaps():
    drawn = curves_svg({"loss": [1000.0, 0.0, 10.0, float("nan"), 0.1]}, log=True)
    first, second, third = dots(drawn)
    assert first[1] - second[1] == pytest.approx(second[1] - third[1], abs=0.2)
    assert re.search(r"M[\d.,]+M[\d.,]+M[\d.,]+\"", drawn), "no line leads over a gap"


AXES = [  # values, what stands beside the axis
    ([1e-5, 1e3], ["10⁻⁴", "0.01", "1", "100"]),
    ([1e-9, 1e9], ["10⁻⁹", "10⁻⁶", "0.001", "1", "1,000", "10⁶", "10⁹"]),
    ([10.0, 1e5], ["10", "100", "1,000", "10⁴", "10⁵"]),
    ([0.03, 4.0], ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
    ([1.0, 1.5], ["1", "1.1", "1.2", "1.3", "1.4", "1.5"]),
    ([20.0, 30.0], ["20", "22", "24", "26", "28", "30"]),
]


@pytest.mark.parametrize(("values", "numbers"), AXES)
def test_numbers_beside_a_logarithmic_axis_are_round(values, numbers):
    def beside(drawn: str, anchor: str) -> list[str]:
        found = ElementTree.fromstring(drawn).iter(f"{SVG}text")
        return [t.text for t in found if t.get("text-anchor") == anchor]

    assert beside(curves_svg({"a": values}, log=True), "end") == numbers
    many = list(np.geomspace(*values, 40))
    below = beside(curves_svg({"a": many}, many, log_x=True, label="", up="loss"), "middle")
    assert [n for n in below if n] == [*numbers, "loss"]


def test_numbers_below_the_axis_do_not_touch():
    drawn = curves_svg({"hits": [1.0] * 7}, [1, 2, 5, 10, 20, 40, 100])
    assert [
        t.text for t in ElementTree.fromstring(drawn).iter(f"{SVG}text") if t.get("text-anchor") == "middle" and t.text
    ] == ["1", "5", "10", "20", "40", "100"]


@pytest.mark.parametrize("curves", [{}, {"a": []}, {"a": [2.0]}, {"a": [5.0, 5.0]}, {"a": [float("nan")]}])
def test_curves_of_next_to_nothing_draw(curves):
    ElementTree.fromstring(curves_svg(curves))


def test_a_history_shows_its_losses():
    history = ht.History({"loss": [3.0, 2.0], "val_accuracy": [0.1, 0.2]})
    assert len(dots(history._repr_svg_())) == 2
    assert "val_accuracy" not in history._repr_svg_()


def test_notebooks_show_a_picture_and_no_page_of_text():
    drawn = to_svg(ht.placeholder("x", (3,)) + 1)
    assert drawn._repr_svg_() == str(drawn) and len(repr(drawn)) < 40


# -- and always ----------------------------------------------------------------------------------------------------


def test_pictures_do_not_depend_on_the_run():
    loss, slopes = model(2)
    assert json.dumps(to_svg([loss, *slopes])) == json.dumps(to_svg([loss, *slopes]))


# -- shards, staleness, rooflines ------------------------------------------------------------------------------------


def rectangles(drawn: str) -> list[list[float]]:
    found = ElementTree.fromstring(drawn).iter(f"{SVG}rect")
    return [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in found]


def test_the_shards_of_a_tensor_cover_its_frame_once():
    rows = [("weight", (4, 6), {0: ((0, 1), (0, 6)), 1: ((1, 4), (0, 6))})]
    frame0, part0, frame1, part1 = rectangles(shards_svg(rows, {0: "", 1: ""}))
    assert part0[:3] == frame0[:3] and frame0[2:] == frame1[2:]
    assert part0[3] == pytest.approx(frame0[3] / 4, abs=0.1) and part1[3] == pytest.approx(frame1[3] * 3 / 4, abs=0.1)
    assert part1[1] + part1[3] == pytest.approx(frame1[1] + frame1[3], abs=0.1)


def test_a_rank_without_a_part_has_a_frame_only():
    assert len(rectangles(shards_svg([("scalar", (), {1: ()})], {0: "", 1: ""}))) == 3


STEPS = [(0, 0, 0.0, 1.0), (1, 0, 0.0, 4.0), (0, 1, 1.0, 2.0), (0, 2, 2.0, 3.0), (0, 3, 3.0, 4.0), (1, 1, 4.0, 5.0)]


def test_a_lead_counts_the_clocks_that_the_slowest_has_not_ended():
    assert leads(STEPS) == [0, 0, 1, 2, 3, 0]


def test_steps_beyond_the_bound_are_red():
    bars = [[r.get("fill") for r in ElementTree.fromstring(drawn).iter(f"{SVG}rect")][-4:] for drawn in
            (staleness_svg(STEPS), staleness_svg(STEPS, bound=1))]  # fmt: skip
    assert len(set(bars[0])) == 1
    assert bars[1][:2] == bars[0][:2] and set(bars[1][2:]) == {"#ffe4e6"}
    ElementTree.fromstring(staleness_svg([]))


@pytest.mark.parametrize("intensity", [0.001, 0.1, 3.0, 900.0])
@pytest.mark.parametrize("beside", [(1.0, 1.6), (1.3, 1.0), (1.3, 1.3), (1.3, 0.7)])
def test_names_of_points_that_are_neighbors_can_be_read(intensity, beside):
    """Wherever they lie: names meet neither each other nor a dot, and stay in the picture."""
    points = [
        ("multiply", 1e9 * intensity, 1e9, 1e-1),
        ("subtract", 1e9 * intensity * beside[0], 1e9, 1e-1 * beside[1]),
    ]
    drawn = ElementTree.fromstring(roofline_svg(points, 1e12, 1e11))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in drawn.iter(f"{SVG}circle")]
    boxes = [(x - 4, x + 4, y - 4, y + 4) for x, y in dots]
    for name in (t for t in drawn.iter(f"{SVG}text") if t.text in ("multiply", "subtract")):
        x, y, width = float(name.get("x")), float(name.get("y")), 6.5 * len(name.text)
        left = x - width if name.get("text-anchor") == "end" else x
        boxes.append((left, left + width, y - 9, y + 2))
    for one, other in itertools.combinations(boxes[2:] + boxes[:2] * (len(set(dots)) > 1), 2):
        assert one[0] >= other[1] or other[0] >= one[1] or one[2] >= other[3] or other[2] >= one[3] or one in boxes[:2]
    assert all(a >= 0 and b <= 620 and c >= 0 and d <= 320 for a, b, c, d in boxes)


def test_points_without_a_time_lie_on_the_roof():
    drawn = ElementTree.fromstring(roofline_svg([("far", 1e12, 1e6, 0.0), ("slow", 1e12, 1e6, 1e3)], 1e12, 1e11))
    dots = [[float(c.get(k)) for k in ("cx", "cy")] for c in drawn.iter(f"{SVG}circle")]
    roof = next(m for p in drawn.iter(f"{SVG}path") if (m := re.match(r"M.*L.*,([\d.]+)H", p.get("d"))))
    assert dots[0][1] == float(roof[1]) and dots[0][0] == dots[1][0] and dots[0][1] < dots[1][1]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: ht.sum(ht.constant([1.0, 2.0])), " = 3.0"),
        (lambda: ht.topk(ht.constant([1.0, 2.0]), k=1)[0], " = [2.]"),
        (lambda: ht.placeholder("x", (2,)) * 2, ""),
        (lambda: ht.variable("w", 1.0, ()) * 2, ""),
        (lambda: ht.normal((2,)), ""),
        (lambda: ht.full((1_000_000_000, 1000), 1.0), ""),  # no picture is worth 4 TB
        (lambda: ht.take(ht.constant([1.0]), [5], axis=0), ""),  # a look does not fail
    ],
)
def test_a_shell_shows_the_value_of_what_depends_on_nothing(make, value) -> None:
    texts: list[str] = []
    node = make()
    node._repr_pretty_(SimpleNamespace(text=texts.append), False)
    assert texts == [repr(node) + value] and f"{value}</code>" in node._repr_html_()
