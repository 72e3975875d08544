"""Graphs that run and cannot be meant are doubted once, with the user's line; their neighbors are not."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import hetu as ht

pytestmark = pytest.mark.usefixtures("meaning")


def x(*shape: int | None, name: str = "x") -> ht.Node:
    return ht.placeholder(name, shape)


def w(value: float = 2.0) -> ht.Node:
    return ht.variable("w", np.full(3, value, "float32"))


def doubts(function: Callable[[], object]) -> list[str]:
    """The warnings of a call, each of which has to name a line of the function."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    lines, first = inspect.getsourcelines(function)
    for each in caught:
        assert each.filename == __file__ and first <= each.lineno < first + len(lines), each
        assert "\n  fix: " in str(each.message)
    return [str(each.message) for each in caught]


def softmax_before_its_loss() -> None:
    ht.softmax_cross_entropy(ht.softmax(x(None, 3)), ht.placeholder("t", (None,), "int64"))


def softmax_reshaped_before_its_loss() -> None:
    ht.softmax_cross_entropy(ht.reshape(ht.softmax(x(4, 3)), (2, 2, 3)), ht.placeholder("t", (2, 2), "int64"))


def a_model_that_ends_in_softmax() -> None:
    model = ht.nn.Sequential(ht.nn.Linear(3, 4), ht.softmax)
    ht.softmax_cross_entropy(model(x(None, 3)), ht.placeholder("t", (None,), "int64"))


def sigmoid_before_the_logits_form() -> None:
    ht.binary_cross_entropy_with_logits(ht.sigmoid(x(None)), x(None, name="t"))


def logits_as_they_are() -> None:
    ht.softmax_cross_entropy(x(None, 3) * ht.softmax(x(None, 3, name="gate")), x(None, 3, name="t"))
    ht.softmax_cross_entropy(x(None, 3), ht.softmax(x(None, 3, name="teacher")))


def updates_that_nobody_runs() -> None:
    loss = ht.sum(ht.square(w()))
    ht.optim.SGD(0.1).minimize(loss)
    ht.Executor([loss]).run()


def updates_that_another_executor_runs() -> None:
    loss = ht.sum(ht.square(w()))
    train = ht.Executor([ht.optim.SGD(0.1).minimize(loss)])
    ht.Executor([loss], state=train.state).run()
    train.run()


def initial_weights_after_training() -> None:
    loss = ht.sum(ht.square(w()))
    train = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)])
    train.run()
    ht.Executor([loss]).run()


def updates_that_an_executor_ran_which_is_gone() -> None:
    loss = ht.sum(ht.square(w()))
    ht.Executor([ht.optim.SGD(0.1).minimize(loss)]).run()
    ht.Executor([loss]).run()


def evaluate_after_training() -> None:
    loss = ht.sum(ht.square(w()))
    train = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)])
    train.run()
    ht.evaluate(loss)


def trained_weights_loaded() -> None:
    loss = ht.sum(ht.square(w()))
    train = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)])
    train.run()
    other = ht.Executor([loss])
    other.state["w"] = train.state["w"]
    other.run()
    ht.Executor([loss], state=train.state).run()


def gradients_without_updates() -> None:
    v = w()
    loss = ht.sum(ht.nn.Dropout(0.5)(v * v))
    ht.Executor([loss, *ht.gradients(loss, [v])]).run()


def gradients_without_dropout() -> None:
    v = w()
    loss = ht.sum(v * v)
    ht.Executor([loss, *ht.gradients(loss, [v])]).run()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (softmax_before_its_loss, "softmax_cross_entropy applies softmax itself"),
        (softmax_reshaped_before_its_loss, "softmax_cross_entropy applies softmax itself"),
        (a_model_that_ends_in_softmax, "softmax_cross_entropy applies softmax itself"),
        (sigmoid_before_the_logits_form, "binary_cross_entropy_with_logits applies sigmoid itself"),
        (updates_that_nobody_runs, "minimize returned updates that no executor was given"),
        (initial_weights_after_training, "has its initial value here, though another executor has trained it"),
        (evaluate_after_training, "has its initial value here, though another executor has trained it"),
        (gradients_without_updates, "computes gradients but commits no updates"),
    ],
)
def test_what_cannot_be_meant_is_doubted_once(function: Callable[[], object], said: str) -> None:
    found = doubts(function)
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize(
    "function",
    [
        logits_as_they_are,
        updates_that_another_executor_runs,
        updates_that_an_executor_ran_which_is_gone,
        trained_weights_loaded,
        gradients_without_dropout,
    ],
)
def test_what_may_be_meant_is_not(function: Callable[[], object]) -> None:
    assert doubts(function) == []


def test_an_executor_that_is_run_again_is_not_doubted_again() -> None:
    loss = ht.sum(ht.square(x(None)))
    ht.optim.SGD(0.1)
    ex = ht.Executor([loss])
    assert doubts(lambda: [ex.run({"x": [1.0] * size}) for size in (1, 2, 3)]) == []


# -- targets that a loss is not defined for -----------------------------------------------------------------------

LOSSES = {
    "binary_cross_entropy_with_logits": ht.binary_cross_entropy_with_logits,
    "softmax_cross_entropy": ht.softmax_cross_entropy,
    "kl_divergence": ht.kl_divergence,
}
TARGETS = {"below": [[-1.0, 1.0]], "above": [[0.5, 2.0]], "infinite": [[0.0, float("inf")]], "counts": [[255.0, 0.0]]}


def as_constant(loss: Callable[..., ht.Node], wrong: list[list[float]]) -> None:
    loss(x(None, 2), wrong)


def as_feed(loss: Callable[..., ht.Node], wrong: list[list[float]]) -> None:
    ht.Executor([ht.mean(loss(x(None, 2), x(None, 2, name="t")))]).run({"x": [[0.0, 0.0]], "t": wrong})


def at_other_sizes(loss: Callable[..., ht.Node], wrong: list[list[float]]) -> None:
    ex = ht.Executor([ht.mean(loss(x(None, 2), x(None, 2, name="t")))])
    ex.run({"x": [[0.0, 0.0]], "t": [[0.0, 1.0]]})
    ex.run({"x": [[0.0, 0.0]] * 2, "t": [[0.0, 1.0], *wrong]})


def evaluated(loss: Callable[..., ht.Node], wrong: list[list[float]]) -> None:
    ht.evaluate(ht.mean(loss(x(None, 2), x(None, 2, name="t"))), {"x": [[0.0, 0.0]], "t": wrong})


def reshaped(loss: Callable[..., ht.Node], wrong: list[list[float]]) -> None:
    targets = ht.reshape(ht.astype(ht.placeholder("t", (None, 2), "float64"), "float32"), (-1, 2))
    ht.Executor([ht.mean(loss(x(None, 2), targets))]).run({"x": [[0.0, 0.0]], "t": wrong})


@pytest.mark.parametrize("how", [as_constant, as_feed, at_other_sizes, evaluated, reshaped])
@pytest.mark.parametrize("wrong", TARGETS)
@pytest.mark.parametrize("name", LOSSES)
def test_targets_outside_of_a_loss_are_told(name: str, wrong: str, how: Callable[..., None]) -> None:
    with pytest.raises(
        ht.errors.ValueRangeError, match=rf"{name} takes targets from 0 to 1, these are[\s\S]*fix: "
    ) as told:
        how(LOSSES[name], TARGETS[wrong])
    assert "test_doubts.py" in str(told.value)


@pytest.mark.parametrize("ids", [[2], [-1], [2**31]])
@pytest.mark.parametrize("loss", [ht.softmax_cross_entropy, ht.nll_loss])
def test_ids_outside_of_the_classes_are_told(loss: Callable[..., ht.Node], ids: list[int]) -> None:
    t = ht.placeholder("t", (None,), "int64")
    with pytest.raises(ht.errors.ValueRangeError, match="[\\s\\S]*fix: "):
        ht.Executor([loss(x(None, 2), t)]).run({"x": [[0.0, 0.0]], "t": ids})


def test_targets_from_0_to_1_are_taken_whatever_came_before() -> None:
    for loss in LOSSES.values():
        for right in ([[0.0, 1.0]], [[0.25, 0.75]], [[float("nan"), 0.0]]):
            as_constant(loss, right)
            as_feed(loss, right)


MADE = {  # targets that follow from what is fed and are not its numbers
    "of its shape": lambda fed: ht.zeros_like(fed),
    "one-hot": lambda fed: ht.astype(ht.one_hot(ht.reshape(fed, (-1, 2))[:, 0], 2, dtype="int32"), "float32"),
    "places": lambda fed: ht.astype(ht.argsort(fed, axis=1), "float32"),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", LOSSES)
def test_targets_that_only_follow_from_what_is_fed_are_not_taken_for_it(name: str, made: str) -> None:
    fed = ht.placeholder("t", (None, 2), "int64" if made == "one-hot" else "float32")
    wrong = [[1, 3], [0, 2]] if made == "one-hot" else [[3.0, -3.0], [7.0, 9.0]]
    ht.Executor([ht.mean(LOSSES[name](x(None, 2), MADE[made](fed)))]).run({"x": [[0.0, 0.0]] * 2, "t": wrong})
