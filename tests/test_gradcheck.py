"""The gradient checker passes right rules and catches wrong ones, of first and of second order."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GradientError
from hetu.core.graph import Node
from hetu.core.op import Op
from hetu.core.types import same_type


def cube_with(rule) -> Op:
    cube = Op(lambda xp, x: x * x * x, name="cube", infer=same_type)
    cube.grad(rule)
    return cube


def test_a_right_rule_passes():
    ht.check_gradients(cube_with(lambda g, y, x: 3 * g * x * x), (3, 4))


@pytest.mark.parametrize(
    "rule",
    [
        lambda g, y, x: 2 * g * x * x,
        lambda g, y, x: 3 * g * x,
        lambda g, y, x: 3 * x * x,  # forgets the incoming gradient
        lambda g, y, x: None,
        lambda g, y, x: 3.001 * g * x * x,
    ],
    ids=["factor", "power", "no chain rule", "nothing", "one in a thousand"],
)
def test_a_wrong_rule_is_caught(rule):
    with pytest.raises(GradientError, match="order 1 gradient with respect to input0"):
        ht.check_gradients(cube_with(rule), (3, 4))


def test_one_wrong_element_is_caught():
    mask = np.ones((3, 4))
    mask[2, 1] = 1.01
    with pytest.raises(GradientError, match="finite differences"):
        ht.check_gradients(cube_with(lambda g, y, x: 3 * g * x * x * ht.constant(mask)), (3, 4))


def test_a_rule_right_only_in_first_order_is_caught_in_second():
    op = cube_with(lambda g, y, x: 3 * g * ht.stop_gradient(x * x))
    ht.check_gradients(op, (3,), order=1)
    with pytest.raises(GradientError, match="order 2"):
        ht.check_gradients(op, (3,))


def test_the_wrong_input_is_named():
    def function(a: Node, b: Node) -> Node:
        return a * cube_with(lambda g, y, x: g)(b)

    with pytest.raises(GradientError, match="input1"):
        ht.check_gradients(function, (3,), (3,))


@pytest.mark.compiled
@pytest.mark.parametrize("form", ["code", "into", "bind"])
@pytest.mark.parametrize("right", [True, False])
def test_what_programs_run_of_an_operator_is_compared_with_its_function(form, right):
    cube = Op(
        lambda xp, x: x * x * x,
        name="cube",
        infer=same_type,
        code=("y = x * x * x" if right else "y = x * x * x + (x > 1)") if form == "code" else None,
    )
    cube.grad(lambda g, y, x: 3 * g * x * x)
    into = (lambda xp, out, x: xp.power(x, 3, out=out)) if right else (lambda xp, out, x: xp.multiply(x, x, out=out))
    if form == "into":
        cube.into(into)
    if form == "bind":
        cube.bind(lambda xp, out, x: lambda: into(xp, out, x))
    if right:
        ht.check_gradients(cube, (3, 4))
    else:
        with pytest.raises(GradientError, match="a program with cube gives .*, the function"):
            ht.check_gradients(cube, (3, 4))


def test_integer_inputs_are_fed_but_not_differentiated():
    def function(x: Node, i: Node) -> Node:
        assert i.dtype == "int64" and x.dtype == "float64"
        return x * x * i

    ht.check_gradients(function, np.ones(3, np.float32), np.array([1, 2, 3]))


def test_several_outputs_are_all_checked():
    def function(x: Node) -> tuple[Node, Node]:
        return x * x, cube_with(lambda g, y, x: g)(x)

    with pytest.raises(GradientError):
        ht.check_gradients(function, (3,))


def test_attributes_reach_the_function():
    with pytest.raises(GradientError):
        ht.check_gradients(lambda x, *, factor: cube_with(lambda g, y, x: factor * g * x * x)(x), (3,), factor=2)
    ht.check_gradients(lambda x, *, factor: cube_with(lambda g, y, x: factor * g * x * x)(x), (3,), factor=3)


def test_the_same_seed_draws_the_same_inputs():
    seen = []

    def function(x: Node) -> Node:
        return x * x

    for _ in range(2):
        with pytest.raises(GradientError) as caught:
            ht.check_gradients(cube_with(lambda g, y, x: g), (3,), seed=5)
        seen.append(caught.value.message)
    assert seen[0] == seen[1]
    ht.check_gradients(function, (3,), seed=5)


@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: ht.astype(x, "float64")], ids=["to int", "to float"])
def test_a_function_of_integers_has_no_gradient(function):
    with pytest.raises(ht.errors.ArgumentError, match="no floats to differentiate"):
        ht.check_gradients(function, np.arange(3))
