"""What an editor knows of a call: `.ci/type_check.py` has the type checker read this file, and tests run it."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, assert_type

import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.types import TensorType

x = ht.placeholder("x", (2, 3))


@ht.op
def swish(xp: ModuleType, x: Any, *, beta: float = 1.0) -> Any:
    """x sigmoid(beta x)."""
    return x / (1 + xp.exp(-beta * x))


def _two(x: TensorType) -> tuple[TensorType, TensorType]:
    return x, x


@ht.op(infer=_two, differentiable=False)
def twice(xp: ModuleType, x: Any) -> tuple[Any, Any]:
    """x and x."""
    return xp.asarray(x), xp.asarray(x)


@swish.grad
def _(g: ht.Node, out: ht.Node, x: ht.Node, *, beta: float) -> tuple[ht.Node]:
    s = ht.sigmoid(x * beta)
    return (g * (s + beta * out * (1.0 - s)),)


def test_a_call_of_an_operator_is_a_node() -> None:
    assert isinstance(assert_type(ht.leaky_relu(x, slope=0.2), ht.Node), ht.Node)
    assert isinstance(assert_type(ht.permute_dims(x, (1, 0)), ht.Node), ht.Node)
    assert isinstance(assert_type(ht.mean(-x + 1.0, axis=0), ht.Node), ht.Node)
    assert isinstance(assert_type(swish(x, beta=0.5), ht.Node), ht.Node)


def test_a_wrong_name_of_an_attribute_is_seen_by_the_checker_and_by_hetu() -> None:
    mistakes: list[Callable[[], object]] = [
        lambda: ht.softmax(x, axes=1),  # type: ignore[call-overload]
        lambda: ht.conv2d(x, x, strid=2),  # type: ignore[call-overload]
        lambda: ht.relu(x, foo=1),  # type: ignore[call-overload]
        lambda: swish(x, bata=1.0),  # type: ignore[call-overload]
    ]
    for mistake in mistakes:
        with pytest.raises(ArgumentError):
            mistake()


def test_a_call_of_an_operator_with_several_outputs_is_a_tuple_of_nodes() -> None:
    assert len(assert_type(twice(x), tuple[ht.Node, ...])) == 2
    assert len(assert_type(ht.topk(x, 2), tuple[ht.Node, ...])) == 2


def test_a_call_of_a_layer_is_what_its_forward_returns() -> None:
    layers = ht.nn.Linear(3, 4), ht.relu, ht.nn.Linear(4, 5)
    assert isinstance(assert_type(layers[0](x), ht.Node), ht.Node)
    assert isinstance(assert_type(ht.nn.Sequential(*layers)(x), ht.Node), ht.Node)
    last = assert_type(ht.nn.LSTM(3, 4)(ht.placeholder("x", (2, 5, 3)))[1], tuple[ht.Node, ht.Node])
    assert len(last) == 2


def test_a_call_of_an_update_rule_is_what_the_rule_returns() -> None:
    assert isinstance(assert_type(ht.optim.sgd(x, x, 0.1), ht.Node), ht.Node)
    assert len(assert_type(ht.optim.momentum(x, x, x, ht.constant(0.1), nesterov=True), tuple[ht.Node, ht.Node])) == 2


def test_a_rule_stays_the_function_that_it_is() -> None:
    rule: Callable[..., tuple[ht.Node]] = _
    assert swish.grad_rule is rule


def test_complaints_about_types_may_only_fall() -> None:
    script = runpy.run_path(str(Path(__file__).parent.parent / ".ci/type_check.py"))
    report = "hetu/ps/client.py:3: error: no [x]\nhetu/ps/client.py:3: note: so\nhetu/cli.py:1: error: no [x]\n"
    found = script["rooms"](report)
    assert found == Counter({"hetu/ps": 1, "hetu/cli.py": 1})
    assert script["verdicts"](found, {"hetu/ps": 1, "hetu/cli.py": 1}) == []
    assert ["at most 0" in line for line in script["verdicts"](found, {"hetu/ps": 1})] == [True]
    assert ["lower the 2" in line for line in script["verdicts"](found, {"hetu/ps": 2, "hetu/cli.py": 1})] == [True]
