"""Gradients as graphs: higher orders, several outputs, recomputation, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GradientError
from hetu.core.graph import OPS, Node, tagged, topological
from hetu.core.op import Op
from hetu.core.simplify import interpret
from hetu.core.types import TensorType, same_type


def value(node: Node, **feed: float | np.ndarray) -> np.ndarray:
    leaves = {n.name: n for n in topological([node]) if n.op.name == "placeholder"}
    return interpret([node], {leaves[k]: np.asarray(v, leaves[k].dtype) for k, v in feed.items() if k in leaves})[0]


def scalar(name: str) -> Node:
    return ht.placeholder(name, (), "float64")


def test_derivatives_of_every_order():
    x = scalar("x")
    y, wanted = x * x * x * x, [4 * 2.0**3, 12 * 2.0**2, 24 * 2.0, 24.0]
    for derivative in wanted:
        (y,) = ht.gradients(y, [x], allow_unused=True)
        assert value(y, x=2.0) == derivative
    (y,) = ht.gradients(y, [x], allow_unused=True)
    assert value(y, x=2.0) == 0


def test_a_mixed_second_derivative():
    x, y = scalar("x"), scalar("y")
    (dx,) = ht.gradients(ht.exp(x * y), [x])
    (dxdy,) = ht.gradients(dx, [y])
    assert value(dxdy, x=0.5, y=0.3) == pytest.approx(np.exp(0.15) * (1 + 0.15))


def test_contributions_of_every_path_add_up():
    x = scalar("x")
    a = x * x
    (slope,) = ht.gradients(a + a * x + a, [x])
    assert value(slope, x=3.0) == 2 * 6 + 3 * 9


def test_the_loss_itself_and_an_inner_node_may_be_asked_for():
    x = scalar("x")
    inner = x * x
    loss = inner * inner
    of_loss, of_inner, of_x = ht.gradients(loss, [loss, inner, x])
    assert [value(n, x=3.0) for n in (of_loss, of_inner, of_x)] == [1, 18, 108]


def test_gradients_have_the_type_of_what_they_belong_to():
    x = ht.placeholder("x", (None, 3))
    row, column = ht.variable("row", np.ones(3, np.float16)), ht.variable("column", np.ones((4, 1), np.float32))
    slopes = ht.gradients(ht.sum(x * row * column[:1]), [x, row, column])
    assert [str(s.type) for s in slopes] == ["f32[?, 3]", "f16[3]", "f32[4, 1]"]


def test_a_seed_stands_for_the_gradient_of_what_follows():
    x = ht.placeholder("x", (3,), "float64")
    seed = np.array([1.0, 10.0, 100.0])
    (slope,) = ht.gradients(x * x, [x], seed=ht.constant(seed))
    assert value(slope, x=[1.0, 2.0, 3.0]).tolist() == [2.0, 40.0, 600.0]
    with pytest.raises(GradientError, match="shapes differ"):
        ht.gradients(x * x, [x], seed=ht.constant(1.0))


def test_a_loss_must_be_a_floating_scalar():
    x = ht.placeholder("x", (3,))
    with pytest.raises(GradientError, match=r"not a scalar(.|\n)*ht\.mean\(loss\)"):
        ht.gradients(x * x, [x])
    with pytest.raises(GradientError, match="not a float"):
        ht.gradients(ht.placeholder("i", (), "int64"), [x])


def test_what_the_loss_does_not_depend_on():
    x, y = scalar("x"), scalar("y")
    with pytest.raises(GradientError, match="does not depend on <placeholder 'y'"):
        ht.gradients(x * x, [x, y])
    of_x, of_y = ht.gradients(x * x, [x, y], allow_unused=True)
    assert value(of_x, x=3.0) == 6 and value(of_y, y=5.0) == 0
    with pytest.raises(GradientError, match="stop_gradient"):
        ht.gradients(ht.stop_gradient(x) * 2, [x])


def test_nothing_flows_through_shapes_and_integers():
    x = ht.placeholder("x", (2,), "float64")
    shape_only = ht.sum(OPS["broadcast_like"](ht.constant(np.float64(1.0)), x))
    with pytest.raises(GradientError, match="does not depend"):
        ht.gradients(shape_only, [x])
    with pytest.raises(GradientError, match="does not depend"):
        ht.gradients(ht.sum(ht.astype(ht.astype(x, "int64"), "float64")), [x])


def test_a_missing_rule_names_operator_and_line():
    cube = Op(lambda xp, x: x**3, name="cube", infer=same_type)
    x = scalar("x")
    y = cube(x)
    with pytest.raises(GradientError, match="operator 'cube' has no gradient rule") as caught:
        ht.gradients(y * 2, [x])
    assert caught.value.site == y.site
    assert "cube(x)" in str(caught.value) and "@cube.grad" in str(caught.value)


@pytest.mark.parametrize("made", [lambda g: (g, g, g), lambda g: g])
def test_a_rule_of_the_wrong_length_is_refused(made):
    pair = Op(lambda xp, x, y: x + y, name="pair", infer=same_type)
    pair.grad(lambda g, out, x, y: made(g))
    x, y = scalar("x"), scalar("y")
    with pytest.raises(GradientError, match=r"returned \d values for 2 inputs"):
        ht.gradients(pair(x, y), [x, y])


def test_a_rule_may_return_none():
    gate = Op(lambda xp, x, y: x, name="gate", infer=same_type)
    gate.grad(lambda g, out, x, y: None)
    x, y = scalar("x"), scalar("y")
    (slope,) = ht.gradients(gate(x, y) + x, [x])
    assert value(slope, x=1.0, y=1.0) == 1


# -- several outputs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def square_and_cube() -> Op:
    op = Op(lambda xp, x: (x * x, x * x * x), name="square_and_cube", infer=lambda x: (x, x))

    @op.grad
    def rule(g, out, x):
        seen.append([part is not None for part in g])
        square, cube = g
        parts = [2 * x * square] if square is not None else []
        parts += [3 * out[0] * cube] if cube is not None else []
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    seen: list[list[bool]] = []
    op.seen = seen
    return op


def test_a_rule_sees_a_hole_where_an_output_is_unused(square_and_cube):
    x = scalar("x")
    square, cube = square_and_cube(x)
    for loss, wanted, holes in [
        (square, 4, [True, False]),
        (cube, 12, [False, True]),
        (square + cube, 16, [True, True]),
    ]:
        (slope,) = ht.gradients(loss, [x])
        assert value(slope, x=2.0) == wanted
        assert square_and_cube.seen.pop() == holes


def test_second_order_through_several_outputs(square_and_cube):
    x = scalar("x")
    square, cube = square_and_cube(x)
    (first,) = ht.gradients(square * cube, [x])
    (second,) = ht.gradients(first, [x])
    assert value(first, x=2.0) == 5 * 2**4
    assert value(second, x=2.0) == 20 * 2**3


# -- where gradient nodes come from ------------------------------------------------------------------------------------


def test_gradient_nodes_inherit_line_and_tags_and_are_marked():
    x = scalar("x")
    with tagged(layer="square"):
        y = x * x
    (slope,) = ht.gradients(ht.exp(y), [x])
    new = [n for n in topological([slope]) if n.tags.get("gradient")]
    assert slope in new and not x.tags.get("gradient") and not y.tags.get("gradient")
    inside = [n for n in new if n.tags.get("layer") == "square"]
    assert inside and all(n.site == y.site for n in inside)


# -- recomputation -----------------------------------------------------------------------------------------------------


def needed_for_values(node: Node) -> list[Node]:
    """What `node` is computed from, in graph order, without inputs that lend only their shape."""
    found, stack = set(), [node]
    while stack:
        n = stack.pop()
        found.add(n)
        stack += [i for k, i in enumerate(n.inputs) if k not in n.op.like and i not in found]
    return [n for n in topological([node]) if n in found]


def recomputed(node: Node) -> list[Node]:
    return [n for n in topological([node]) if n.tags.get("recompute") is not None]


def test_recomputation_changes_no_gradient():
    x = ht.placeholder("x", (3,), "float64")
    w = ht.placeholder("w", (3,), "float64")

    def block(v):
        return ht.exp(v * w) * v

    feed = {"x": [0.1, 0.2, 0.3], "w": [1.0, -1.0, 2.0]}
    plain, kept = [ht.sum(f(f(x * 2))) for f in (block, ht.recompute(block))]
    for a, b in zip(ht.gradients(plain, [x, w]), ht.gradients(kept, [x, w]), strict=True):
        np.testing.assert_allclose(value(a, **feed), value(b, **feed), rtol=1e-12)
        (again_a,), (again_b,) = (ht.gradients(ht.sum(g), [x]) for g in (a, b))
        np.testing.assert_allclose(value(again_a, **feed), value(again_b, **feed), rtol=1e-12)


def test_recomputed_copies_stand_behind_a_barrier():
    x = ht.placeholder("x", (3,), "float64")
    outside = x * 2
    y = ht.recompute(lambda v: ht.exp(ht.exp(v)))(outside)
    (slope,) = ht.gradients(ht.sum(y), [x])
    nodes = needed_for_values(slope)
    exps = [n for n in nodes if n.op.name == "exp"]
    barriers = [n for n in nodes if n.op.name == "barrier"]
    assert barriers and all(b.inputs[0] is outside for b in barriers)
    copies = [n for n in exps if n not in topological([y])]
    assert len(copies) == 2, "both inner values are computed again"
    assert all(any(b in topological([c]) for b in barriers) for c in copies)
    assert exps == copies, "backward needs none of the first values"


def test_two_calls_of_one_recomputed_function_are_two_regions():
    x = scalar("x")
    block = ht.recompute(lambda v: ht.exp(v))
    regions = {n.tags["recompute"] for n in recomputed(block(block(x)))}
    assert len(regions) == 2


def test_types_of_gradients_of_a_recomputed_block_with_several_outputs(square_and_cube):
    x = scalar("x")
    square, cube = ht.recompute(lambda v: square_and_cube(v * 1.0))(x)
    (slope,) = ht.gradients(square + cube, [x])
    assert slope.type == TensorType((), np.dtype("float64"))
    assert value(slope, x=2.0) == 16
