"""Predictions of any number of rows, frozen layers, and what a checkpoint that does not fit is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, CheckpointError, FeedError, GraphError, HetuError, UnknownNameError
from hetu.dist import DataParallel, run_ranks

X = np.random.default_rng(0).standard_normal((100, 4)).astype("float32")


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 100])
def test_any_number_of_rows_is_predicted_whatever_a_run_takes(count: int, size: int | None) -> None:
    x = ht.placeholder("x", (size, 4))
    ex = ht.Executor({"both": [ht.sum(x, axis=1), x * 2]})
    if size is not None and count == 0:
        with pytest.raises(FeedError, match="there is no row(\n.*)+fix: feed at least one; 'both' takes 7 at a time"):
            ex.predict(X[:0])
        return
    total, double = ex.predict(X[:count], batch_size=7)
    np.testing.assert_allclose(total, X[:count].sum(axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(double, 2 * X[:count])


def test_rows_of_several_feeds_may_meet() -> None:
    a, b = ht.placeholder("a", (None, 4)), ht.placeholder("b", (None, 4))
    ex = ht.Executor({"met": [a + 2 * b], "shifted": [ht.concat([a, b], axis=0)[:-1]], "twice": [ht.concat([a, b])]})
    np.testing.assert_array_equal(ex.predict({"a": X, "b": X}, name="met", batch_size=7), X + 2 * X)
    for name in ("shifted", "twice"):
        with pytest.raises(ArgumentError, match="which is not one value per row"):
            ex.predict({"a": X, "b": X}, name=name)


def test_ranks_predict_what_one_process_does() -> None:
    def values(strategy: Any = None, comm: Any = None) -> np.ndarray:
        x = ht.placeholder("x", (None, 4))
        with ht.scope("model"):
            y = ht.nn.Linear(4, 3)(x)
        return ht.Executor([y], strategy=strategy, comm=comm).predict({"x": X}, batch_size=32, progress=True)

    for own in run_ranks(2, lambda comm: values(DataParallel(), comm)):
        np.testing.assert_allclose(own, values(), rtol=1e-5, atol=1e-6)


def model() -> dict[str, Any]:
    x, t = ht.placeholder("x", (None, 4)), ht.placeholder("t", (None, 1))
    with ht.scope("model"):
        y = ht.nn.Linear(4, 1)(x)
    loss = ht.mean(ht.square(y - t))
    return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)], "eval": [loss, y], "predict": [y]}


T = X[:, :1]
REFUSED: dict[str, tuple[Any, type[HetuError], str, str]] = {
    "several": (lambda ex: ex.predict(X), ArgumentError, "there are 'eval', 'predict'", "say which: name="),
    "one that trains": (lambda ex: ex.predict(X, name="train"), ArgumentError, "'train' trains", "updates nothing"),
    "no such": (lambda ex: ex.predict(X, name="predic"), UnknownNameError, "no sub-graph 'predic'", "'predict'"),
    "two feeds": (lambda ex: ex.predict(X, name="eval"), ArgumentError, "is fed 'x', 't'", "an array for each"),
    "a loss": (lambda ex: ex.predict({"x": X, "t": T}, name="eval"), ArgumentError, "not one value", "'predict'"),
    "rows": (
        lambda ex: ex.predict({"x": X, "t": T[:9]}, name="eval"),
        FeedError,
        "x (100, 4), t (9, 1)",
        "one row",
    ),
    "a number": (lambda ex: ex.predict(3.0, name="predict"), FeedError, "x ()", "one row per example"),
    "a size": (lambda ex: ex.predict(X, name="predict", batch_size=0), ArgumentError, "batch_size is 0", "from 1"),
    "a wide row": (lambda ex: ex.predict(X[:, :3], name="predict"), FeedError, "got shape (100, 3)", "reshape"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_predicted_is_told(what: str) -> None:
    act, error, said, fix = REFUSED[what]
    with pytest.raises(error) as caught:
        act(ht.Executor(model()))
    assert said in str(caught.value) and fix in caught.value.fix


def test_a_look_at_a_node_has_the_values_of_now_and_trains_nothing() -> None:
    graphs = model()
    ex, (loss, _) = ht.Executor(graphs), graphs["train"]
    ex.run("train", {"x": X, "t": T})
    before = dict(ex.state)
    assert float(ex.value(loss, {"x": X, "t": T})) == float(ex.run("eval", {"x": X, "t": T})[0])
    with pytest.warns(UserWarning, match="initial"):
        assert float(ex.value(loss, {"x": X, "t": T})) < float(ht.evaluate(loss, {"x": X, "t": T}))
    assert all(np.array_equal(before[name], ex.state[name]) for name in before) and before.keys() == ex.state.keys()
    with pytest.raises(UnknownNameError, match="has no value of other(\n.*)+fix: ask for a node of its graph"):
        ex.value(ht.variable("other", 1.0, ()) * 2)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    ht.Executor(model()).save(path)
    with ht.scope("other"):
        layer = ht.nn.Linear(4, 1)
    other, narrow = ht.Executor([layer(ht.placeholder("x", (None, 4)))]), ht.Executor([ht.variable("x", 1.0, ())])
    with pytest.raises(CheckpointError, match="has none of other/linear/weight.* it has .*model/linear/weight"):
        ht.load_weights(other, path)
    for only, error, said in [
        ("othre/*", UnknownNameError, "no variable 'othre/\\*'"),
        (3, ArgumentError, "only=3"),
        (ht.variable("y", 0.0, ()), UnknownNameError, "no variable 'y'"),
    ]:
        with pytest.raises(error, match=said):
            other.load(path, only=only)
    with pytest.raises(CheckpointError, match=r"missing     other/linear/weight\n(.*\n)+  fix: build the model"):
        other.load(path, only=[layer])
    assert other.load(path, strict=False) == {}  # nothing fits, which it was told to pass over
    with ht.scope("model"):
        wide = ht.Executor([ht.nn.Linear(5, 1)(ht.placeholder("x", (None, 5)))])
    before = dict(wide.state)
    for load in (lambda: ht.load_weights(wide, path), lambda: wide.load(path, strict=False)):
        with pytest.raises(CheckpointError, match="different   model/linear/weight: the file has .*4, 1.* the model"):
            load()
    assert all(np.array_equal(before[name], wide.state[name]) for name in before) and narrow.state["x"] == 1


def test_who_opens_a_whole_training_is_told_of_weights_alone(tmp_path: Path) -> None:
    graphs = model()
    ht.Executor(graphs).save(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"unexpected(.*\n)+.*fix: take the weights alone: ht.load_weights"):
        ht.Executor([graphs["predict"][0]]).load(tmp_path / "run")


# -- frozen layers ----------------------------------------------------------------------------------------------------


def test_a_frozen_layer_stays_as_it_is_and_the_rest_learns() -> None:
    x, t = ht.placeholder("x", (None, 4)), ht.placeholder("t", (None, 1))
    with ht.scope("model"):
        body = ht.nn.Sequential(ht.nn.Linear(4, 6), ht.nn.BatchNorm(6, axis=2), ht.nn.LSTM(6, 5)).freeze()
        norm = ht.nn.BatchNorm(5)
        y = ht.nn.Linear(5, 1)(norm(ht.max(body(ht.stack([x, x], axis=1))[0], axis=1)))
    loss = ht.mean(ht.square(y - t))
    ex = ht.Executor([loss, ht.optim.Adam(0.1).minimize(loss)])
    before = dict(ex.state)
    ex.run({x: X, t: T})
    changed = {name for name in before if not np.array_equal(before[name], ex.state[name])}
    assert changed.isdisjoint(v.name for v in body.variables) and not any("body" in name for name in changed)
    assert {v.name for v in norm.variables} < changed
    summed = ht.summary(y)
    assert summed.parameters - summed.trainable == sum(v.tensor.size for v in body.variables) + 10


def test_a_variable_that_layers_share_is_frozen_once() -> None:
    with ht.scope("model"):
        table = ht.nn.Embedding(5, 3)
        both = ht.nn.Sequential(table, table).freeze()
    assert len(both.variables) == 1 and not table.weight.attrs["trainable"]


def test_it_is_too_late_to_freeze_what_a_graph_has() -> None:
    layer = ht.nn.Linear(4, 3)
    layer(ht.placeholder("x", (None, 4)))
    for late in (layer, ht.nn.Sequential(layer)):
        with pytest.raises(GraphError, match=r"has been called.*(\n.*)+fix: freeze it before.*variables"):
            late.freeze()
