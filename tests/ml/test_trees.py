"""Trees beside brute force, on several workers to the last bit, and the bytes of their messages."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu.core.errors import ArgumentError, DataError
from hetu.dist import run_ranks
from hetu.ml.boosting import Derivatives
from hetu.ml.boosting import squared_error as boosted_error
from hetu.ml.trees.bins import binned, whole
from hetu.ml.trees.grow import Grower, GrowthRules
from hetu.ml.workers import Workers
from tests.ml import drawn

CLASSES = ht.ml.DecisionTreeClassifier
NUMBERS = ht.ml.DecisionTreeRegressor


def squared_error(y, weight):
    return float((weight * (y - np.average(y, weights=weight)) ** 2).sum()) if len(y) else 0.0


def gini(y, weight):
    shares = np.array([weight[y == k].sum() for k in np.unique(y)]) / weight.sum()
    return float(weight.sum() * (1 - (shares**2).sum()))


def best_gain(X, y, weight, loss, least):
    """What the best cut of all rows in two improves, over all columns and places."""
    gains = [-np.inf]
    for column in X.T:
        for at in np.unique(column)[:-1]:
            left = column <= at
            if min(left.sum(), (~left).sum()) >= least:
                gains.append(loss(y, weight) - loss(y[left], weight[left]) - loss(y[~left], weight[~left]))
    return max(gains)


@settings(max_examples=60)
@given(
    st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 4), st.integers(2, 30), st.integers(1, 4), st.booleans()
)
def test_the_first_cut_is_the_best_of_all(seed, rows, columns, values, least, classes):
    rng = np.random.default_rng(seed)
    X = rng.integers(0, values, (rows, columns)) * rng.normal()
    weight = rng.integers(1, 4, rows).astype(float) if least == 1 else np.ones(rows)
    y = rng.integers(0, 3, rows) if classes else rng.normal(size=rows)
    y[:2] = [0, 1]
    model = (CLASSES if classes else NUMBERS)(max_leaf_nodes=2, min_samples_leaf=least).fit(X, y, weight)
    loss = gini if classes else squared_error
    wanted = best_gain(X, y, weight, loss, least)
    found = len(model.trees_.lefts) == 3
    assert found == (wanted > -np.inf)
    if found:
        share = 2 if classes and len(np.unique(y)) == 2 else 1  # of two classes one is looked at
        assert share * model.trees_.gains[0] == pytest.approx(wanted, abs=1e-9)
        leaf = model.apply(X)[:, 0]
        parted = loss(y, weight) - sum(loss(y[leaf == k], weight[leaf == k]) for k in (1, 2))
        assert parted == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("kinds", [2, 3])
def test_a_cut_that_improves_too_little_is_not_made(kinds):
    rng = np.random.default_rng(kinds)
    X, y, even = rng.normal(size=(80, 3)), rng.integers(0, kinds, 80), np.ones(80)
    best = best_gain(X, y, even, gini, 1) / 80
    for least, nodes in (0.99 * best, 3), (1.01 * best, 1):
        assert len(CLASSES(max_depth=1, min_impurity_decrease=least).fit(X, y).trees_.lefts) == nodes


def test_a_whole_tree_has_the_training_rows_by_heart_as_one_written_out():
    X, y = drawn("classifier", 150)
    assert CLASSES().fit(X, y).score(X, y) == 1
    X, y = drawn("regressor", 150)
    assert NUMBERS().fit(X, y).score(X, y) == pytest.approx(1)
    leaf = (model := NUMBERS(max_depth=3, min_samples_leaf=7).fit(X, y)).apply(X)[:, 0]
    assert np.unique(leaf, return_counts=True)[1].min() >= 7 and len(np.unique(leaf)) <= 8
    means = np.array([y[leaf == k].mean() for k in leaf])
    np.testing.assert_allclose(model.predict(X), means, rtol=1e-12)


MODELS = {
    "deep": lambda **more: CLASSES(**more),
    "bounded": lambda **more: NUMBERS(max_leaf_nodes=9, min_samples_leaf=3, **more),
    "coarse": lambda **more: NUMBERS(max_bins=7, max_features=2, **more),
    "forest": lambda **more: ht.ml.RandomForestClassifier(n_estimators=3, **more),
    "boosted": lambda **more: ht.ml.GradientBoostingRegressor(max_iter=5, min_samples_leaf=4, **more),
    "of classes": lambda **more: ht.ml.GradientBoostingClassifier(
        max_iter=4, max_depth=3, max_leaf_nodes=None, max_features=0.5, early_stopping=True, **more
    ),
}


def facts(trees):
    return [trees.features, trees.thresholds, trees.lefts, trees.values, trees.gains, trees.counts]


@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_workers_grows_the_same_bits(name):
    kind = MODELS[name]().kind
    X, y = drawn(kind, 600)
    weight = np.random.default_rng(1).choice([0.0, 0.7, 1.0, 2.5], 600)
    X[:, 2], weight[250] = 5.0, 0.0  # a constant column
    alone = facts(MODELS[name]().fit(X, y, weight).trees_)
    assert len(alone[0]) > 5
    for ends in ([0, 17, 600], [0, 250, 251, 360, 600]):  # one of them has no row that counts

        def fitted(comm, ends=ends):
            mine = slice(ends[comm.rank], ends[comm.rank + 1])
            return facts(MODELS[name](comm=comm).fit(X[mine], y[mine], weight[mine]).trees_)

        for of_rank in run_ranks(len(ends) - 1, fitted):
            for one, many in zip(alone, of_rank, strict=True):
                np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("small", "together"), [(0, 1 << 18), (700, 1 << 18), (700, 64), (1 << 20, 64)])
def test_trees_are_the_same_step_by_step_and_in_calls_of_any_size(small, together, name, monkeypatch):
    X, y = drawn(MODELS[name]().kind, 400)
    whole = facts(MODELS[name]().fit(X, y).trees_)
    monkeypatch.setattr("hetu.ml.trees.grow.SMALL", small)
    monkeypatch.setattr("hetu.ml.trees.grow.TOGETHER", together)
    for one, other in zip(whole, facts(MODELS[name]().fit(X, y).trees_), strict=True):
        np.testing.assert_array_equal(other, one)


def test_kernels_change_no_bit(monkeypatch):
    X, y = drawn("classifier", 400)
    found = {name: MODELS[name]().fit(X, y) for name in ("deep", "forest", "of classes")}
    monkeypatch.setenv("HETU_KERNELS", "0")
    for name, model in found.items():
        plain = MODELS[name]().fit(X, y)
        for one, other in zip(facts(model.trees_), facts(plain.trees_), strict=True):
            (np.testing.assert_allclose if name == "of classes" else np.testing.assert_array_equal)(other, one)
        np.testing.assert_array_equal(plain.apply(X), model.apply(X))


def counted(comm):
    """The bytes of each sum of which every rank gets a part, as they come."""
    sent, all_to_all = [], comm.all_to_all
    comm.all_to_all = lambda x, out, counts: sent.append(x.nbytes) or all_to_all(x, out, counts)
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("columns", range(1, 10))
@pytest.mark.sampled(9)
def test_a_node_is_as_many_bytes_as_its_histogram(columns, ranks, monkeypatch):
    """Also where ranks own unequal parts of the columns, or none."""
    nodes, count = defaultdict(list), Grower._counted

    def noted(grower, ids, looked):
        nodes[grower.workers.rank].append(len(ids))
        return count(grower, ids, looked)

    monkeypatch.setattr(Grower, "_counted", noted)
    bins, leaves = 33, 6
    X = np.random.default_rng(0).integers(0, bins, (4000, columns)).astype(float)
    y = X @ np.arange(1, columns + 1) + X[:, 0] * X[:, -1]

    def fitted(comm):
        sent = counted(comm)
        model = ht.ml.GradientBoostingRegressor(max_iter=3, max_leaf_nodes=leaves, comm=comm)
        model.fit(X[comm.rank :: ranks], y[comm.rank :: ranks])
        return sent

    for rank, sent in enumerate(run_ranks(ranks, fitted)):
        assert sent == [columns * bins * 2 * 4 * several for several in nodes[rank]]
    trees, splits = 3, leaves - 1  # of two children one is counted; some that others then push out of a tree, too
    assert trees * splits <= sum(nodes[0]) <= 1.5 * trees * splits and len(nodes[0]) <= sum(nodes[0])


@pytest.mark.parametrize("leaves", [2, 3, 8, 31, 200])
@pytest.mark.parametrize("ties", [False, True])
def test_splits_that_are_made_together_are_those_that_are_made_one_by_one(leaves, ties, monkeypatch):
    """Also where many gains are equal: rows stand twice, mirrored in a column of signs."""
    X, y = drawn("regressor", 400)
    if ties:
        signs = np.repeat([[-1.0], [1.0]], len(X), axis=0)
        X, y = np.hstack([np.vstack([X, X]), signs]), np.concatenate([y, y])
    steps, split, best_first = [], Grower._split, Grower._best_first
    monkeypatch.setattr("hetu.ml.trees.grow.SMALL", 0)
    monkeypatch.setattr(Grower, "_split", lambda grower, ids: steps.append(len(ids)) or split(grower, ids))

    def fitted():
        steps.clear()
        model = ht.ml.GradientBoostingRegressor(max_iter=5, max_leaf_nodes=leaves, min_samples_leaf=2).fit(X, y)
        return model.predict(X), np.sort(model.trees_.gains), len(steps)

    *together, few = fitted()
    monkeypatch.setattr(Grower, "_best_first", lambda grower: (best := best_first(grower))[:1] + (best[1][:1],))
    *singly, many = fitted()
    for one, other in zip(together, singly, strict=True):
        np.testing.assert_array_equal(one, other)
    assert few < many if leaves > 3 else few == many


def test_few_rows_come_to_all_workers_instead_of_their_histograms():
    X, y = drawn("classifier", 400)

    def fitted(comm):
        sent = counted(comm)
        model = CLASSES(comm=comm, max_bins=100).fit(X[comm.rank :: 2], y[comm.rank :: 2])
        return len(sent), int((model.trees_.counts > 100).sum())

    for calls, large in run_ranks(2, fitted):
        assert 0 < calls <= large


def test_whole_numbers_are_kept_and_sums_have_room():
    rng = np.random.default_rng(0)
    for values in (rng.integers(-5, 5, (1000, 1)), rng.normal(size=(1000, 1)) * 1e200, np.zeros((3, 1))):
        numbers, units = whole(Workers(), values.astype(float))
        assert np.abs(numbers.astype(object)).sum() <= 2**52
        np.testing.assert_allclose(numbers * units, values, atol=np.abs(values).max() * 1e-12, rtol=0)


def test_a_bin_has_as_many_rows_as_the_next():
    x = np.random.default_rng(0).exponential(size=(5000, 1))
    table = binned(Workers(), x, 50)
    counts = np.bincount(table.bins[:, 0])
    assert table.size == len(counts) == 50 and counts.min() >= 99 and counts.max() <= 101
    assert (table.below < table.above).all()


def test_large_children_are_what_the_smaller_leave():
    """A tree that keeps no histograms is the same."""
    X, y = drawn("regressor", 3000)

    class Forgets(Grower):
        def _by_all_columns(self, ids):
            self.known.kept.clear()
            super()._by_all_columns(ids)

    made = []
    for kind in (Grower, Forgets):
        table, workers = binned(Workers(), X, 31), Workers()
        values, units = whole(workers, np.stack([y, np.ones(len(y))], axis=1))
        rules = GrowthRules(max_leaf_nodes=40)
        draws, rows = [np.random.default_rng(0)], [np.arange(len(y))]
        made.append(facts(kind(workers, table, values[None], units[None], rules, draws, rows).grow()))
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)


def test_boosting_stops_when_rows_that_stay_apart_say_so():
    X, y = drawn("regressor", 400)
    y += np.random.default_rng(3).normal(size=400) * 3
    model = ht.ml.GradientBoostingRegressor(max_iter=400, learning_rate=0.5, early_stopping=True, n_iter_no_change=5)
    model.fit(X, y)
    scores = model.validation_score_
    assert model.n_iter_ == len(scores) < 400
    assert max(scores[-5:]) <= max(scores[:-5]) and len(model.trees_.roots) == model.n_iter_


def test_a_loss_is_any_convex_function_of_nodes():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 3))
    rate = 3 + np.sin(2 * X[:, 0])
    model = ht.ml.GradientBoostingRegressor(loss=lambda raw, y: ht.exp(raw) - y * raw)
    y = rng.poisson(np.exp(rate)).astype(float)
    assert model.fit(X, y).score(X, rate) > 0.95
    assert model.baseline_[0] == pytest.approx(np.log(y.mean()), rel=1e-9)
    for loss, said in (
        (lambda raw, y: ht.abs(raw - y), "0 everywhere"),
        (lambda raw, y: -((raw - y) ** 2), "negative"),
    ):
        with pytest.raises(DataError, match=f"second derivative of the loss is {said}"):
            ht.ml.GradientBoostingRegressor(loss=loss).fit(X, y)


def flat(raw, y):
    """Squared, and of rows that are told right by 1 nothing at all: neither a slope nor a curvature."""
    return ht.square(ht.relu(1 - raw * y))


@pytest.mark.parametrize("loss", [flat, boosted_error], ids=["flat", "squared"])
@pytest.mark.parametrize("weigh", [0, 30])
def test_rows_come_to_the_leaves_that_they_helped_to_grow(loss, weigh, monkeypatch):
    """Also rows that weigh so little, or are told so well, that whole numbers leave nothing of them."""
    rng, grown = np.random.default_rng(0), []
    X = rng.normal(size=(300, 2))
    y, weight = (
        np.where(X[:, 0] * X[:, 1] + 0.3 * X[:, 0] > 0, 1.0, -1.0),
        np.ldexp(1.0, -rng.integers(0, 1 + weigh, 300)),
    )
    leaves = Grower.leaves
    monkeypatch.setattr(Grower, "leaves", lambda grower: grown.append(leaves(grower)) or grown[-1])
    model = ht.ml.GradientBoostingRegressor(loss=loss, max_iter=30, min_samples_leaf=1).fit(X, y, weight)
    np.testing.assert_array_equal(model.apply(X), model.trees_.roots + np.concatenate(grown).T)


def test_what_a_model_shows():
    X, y = drawn("classifier", 300)
    model = CLASSES(max_depth=2).fit(X, y)
    lines = model.text(list("abcdef")).splitlines()
    assert len(lines) == len(model.trees_.lefts) and lines[0].startswith("300 rows, ")
    assert model.feature_importances_.sum() == pytest.approx(1)
    assert CLASSES().fit(np.ones((4, 2)), [0, 1, 0, 1]).feature_importances_.tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="max_bins=300"):
        CLASSES(max_bins=300)
    with pytest.raises(ArgumentError, match="max_features='half'"):
        CLASSES(max_features="half")


@pytest.mark.parametrize(
    ("kind", "y"),
    [
        (ht.ml.GradientBoostingClassifier, np.arange(150) % 2),
        (ht.ml.GradientBoostingClassifier, np.arange(150) % 3),
        (ht.ml.GradientBoostingClassifier, np.arange(150) % 10),
        (ht.ml.GradientBoostingRegressor, np.sin(np.arange(150))),
        (ht.ml.GradientBoostingRegressor, np.arange(150) % 3 - 1.0),
        (ht.ml.GradientBoostingRegressor, 1e-90 * (np.arange(150) % 3 - 1.1)),
    ],
)
def test_the_constant_is_found_in_few_steps_also_where_it_is_0(kind, y, monkeypatch):
    """Of classes of one size what is left beside it is rounding, which a hundred steps did not end."""
    asked = []
    monkeypatch.setattr(Derivatives, "step", lambda *given, own=Derivatives.step: asked.append(1) or own(*given))
    model = kind(max_iter=1).fit(np.arange(150.0)[:, None], y)
    wanted = y.mean() if kind is ht.ml.GradientBoostingRegressor else 0.0
    np.testing.assert_allclose(model.baseline_, wanted, rtol=1e-12, atol=1e-11 * np.abs(y).max())
    assert len(asked) < 10
