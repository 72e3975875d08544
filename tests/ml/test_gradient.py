"""What learns by gradients: optima beside scikit-learn's, forms of a sparse X, optimizers, ranks and servers."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.dist import DataParallel, run_ranks
from hetu.ml.inputs import Sparse
from tests.ml import drawn

MODELS = [ht.ml.LogisticRegression, ht.ml.LinearSVC, ht.ml.FactorizationMachineClassifier]
EXACT = {"tol": 1e-9, "max_iter": 1000}
OPTIMIZERS = {
    "sgd": partial(ht.optim.SGD, 0.1),
    "adam": partial(ht.optim.Adam, 0.02),
    "ftrl": partial(ht.optim.FTRL, 0.5),
}


class Entries:
    """As much of a matrix of SciPy as is asked for: half of its numbers are 0, and one row is empty."""

    def __init__(self, X):
        self.array = np.where(np.abs(X) < 1, 0, X)
        self.array[3] = 0
        self.shape = X.shape

    def tocsr(self):
        rows, self.indices = np.nonzero(self.array)
        self.data = self.array[rows, self.indices]
        self.indptr = np.searchsorted(rows, np.arange(len(self.array) + 1))
        return self


def rows(classes, sparse=False):
    X, y = drawn("classifier")
    return (Entries(X) if sparse else X), y.clip(max=classes - 1)


@pytest.mark.parametrize("C", [0.01, 10.0])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("intercept", [True, False])
def test_logistic_regression_has_the_optimum_of_scikit_learns(classes, C, intercept):
    theirs = pytest.importorskip("sklearn.linear_model", reason="the extra [dev] is not installed").LogisticRegression
    (X, y), weight = rows(classes), np.random.default_rng(1).integers(0, 3, 240)
    ours, theirs = (each(C=C, fit_intercept=intercept, **EXACT) for each in (ht.ml.LogisticRegression, theirs))
    ours.fit(X, y, weight), theirs.fit(X, y, weight)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_support_vectors_have_the_optimum_of_scikit_learns(classes):
    theirs = pytest.importorskip("sklearn.svm", reason="the extra [dev] is not installed").LinearSVC
    X, y = rows(classes)
    ours = ht.ml.LinearSVC(C=0.5, fit_intercept=False, **EXACT).fit(X, y)
    theirs = theirs(C=0.5, fit_intercept=False, dual=False, tol=1e-9, max_iter=5000).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_support_vectors_take_few_steps_whatever_the_scales_of_columns(classes, sparse, monkeypatch):
    X, y = rows(classes)
    X = (X + 5) * np.logspace(-2, 3, X.shape[1])
    monkeypatch.setattr("hetu.ml.margins.ROWS", 50)  # several blocks
    model = ht.ml.LinearSVC(C=2.0, tol=1e-6).fit(Entries(X) if sparse else X, y)
    assert model.n_iter_ <= 40  # L-BFGS takes 56 for two classes and 476 for three
    for coef, intercept, own in zip(model.coef_, model.intercept_, range(classes) if classes > 2 else [1]):
        sign = np.where(y == own, 1.0, -1.0)
        lacks = np.maximum(1 - sign * (X @ coef + intercept), 0) * sign
        for slope in (coef - 2 * 2.0 * lacks @ X, [2 * 2.0 * lacks.sum()]):
            assert np.abs(slope).max() <= 1e-6 * 2.0 * len(X)


def test_support_vectors_of_columns_that_are_nearly_equal_come_to_their_minimum():
    """Where no part of the gradient is more than `tol`, long ways still lead down."""
    rng = np.random.default_rng(0)
    X, y = 10 + rng.normal(size=(30, 5)) * np.logspace(-9, -2, 5), rng.integers(0, 2, 30)

    def loss(tol):
        model = ht.ml.LinearSVC(C=1e10, fit_intercept=False, tol=tol).fit(X, y)
        lacks = np.maximum(1 - np.where(y, 1, -1) * (X @ model.coef_[0]), 0)
        return 1e10 * lacks @ lacks + model.coef_[0] @ model.coef_[0] / 2

    assert loss(1e-5) <= 1.001 * loss(1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("solver", ["lbfgs", *OPTIMIZERS])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_sparse_rows_learn_what_dense_ones_do(model, classes, solver):
    X, y = rows(classes, sparse=True)
    made = partial(model, solver=OPTIMIZERS.get(solver, solver), max_iter=5)
    dense, sparse = made().fit(X.array, y), made().fit(X, y)
    np.testing.assert_allclose(sparse.coef_, dense.coef_, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sparse.decision_function(X), dense.decision_function(X.array), rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_optimizers_come_near_the_optimum_as_one_and_as_workers(model, optimizer, sparse):
    X, y = rows(2, sparse)
    made = partial(model, solver=OPTIMIZERS[optimizer], max_iter=40, batch_size=30)
    best = model(**EXACT).fit(X, y).score(X, y)

    def fitted(comm):
        mine = np.arange(len(y)) % 3 < 1 + comm.rank  # the second worker has most rows
        share = Entries(X.array[mine]) if sparse else X[mine]
        return made(comm=comm).fit(share, y[mine])

    one, (first, second) = made().fit(X, y), run_ranks(2, fitted)
    assert one.score(X, y) >= best - 0.02 and one.n_iter_ == 40
    np.testing.assert_array_equal(first.coef_, second.coef_)
    second.comm = None
    assert second.score(X, y) >= best - 0.02


@pytest.mark.parametrize("sparse", [False, True])
def test_ranks_that_a_strategy_spreads_the_rows_over_learn_what_one_does(sparse):
    X, y = rows(3, sparse)
    made = partial(ht.ml.LogisticRegression, solver=OPTIMIZERS["ftrl"], max_iter=3, batch_size=60, fit_intercept=False)
    one = made(strategy=DataParallel()).fit(X, y)
    for found in run_ranks(2, lambda comm: made(strategy=DataParallel(), comm=comm).fit(X, y)):
        np.testing.assert_allclose(found.coef_, one.coef_, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"solver": OPTIMIZERS["sgd"], "max_iter": 3}], ids=["lbfgs", "sgd"])
@pytest.mark.parametrize("sparse", [False, True])
def test_graphs_of_one_worker_are_its_own_whatever_strategy_is_in_force(sparse, options, monkeypatch):
    X, y = rows(2, sparse)
    made = partial(ht.ml.LogisticRegression, **options)

    def fitted(comm):
        part = slice(0, 100) if comm.rank == 0 else slice(100, None)
        model = made(comm=comm).fit(Entries(X.array[part]) if sparse else X[part], y[part])
        return model.coef_, model.score(Entries(X.array[part]) if sparse else X[part], y[part])

    wanted = run_ranks(2, fitted)
    monkeypatch.setenv("HETU_STRATEGY", "dp")
    for found, want in zip(run_ranks(2, fitted), wanted, strict=True):
        np.testing.assert_array_equal(found[0], want[0])
        assert found[1] == want[1]


def test_a_worker_may_have_fewer_rows_than_steps():
    X, y = rows(2)
    made = partial(ht.ml.LogisticRegression, solver=OPTIMIZERS["sgd"], max_iter=2, batch_size=20)
    ends = [0, 3, 240]
    found = run_ranks(2, lambda comm: made(comm=comm).fit(*(part[slice(*ends[comm.rank :][:2])] for part in (X, y))))
    np.testing.assert_array_equal(found[0].coef_, found[1].coef_)
    assert np.isfinite(found[0].coef_).all() and found[0].coef_.any()


def test_ftrl_leaves_weights_of_noise_at_exactly_0():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 20))
    y = X[:, 0] - X[:, 1] > 0
    solver = partial(ht.optim.FTRL, 1.0, l1=3.0)
    model = ht.ml.LogisticRegression(C=math.inf, solver=solver, max_iter=20, batch_size=25).fit(X, y)
    assert (model.coef_[0, 2:] == 0).mean() > 0.6 and (model.coef_[0, :2] != 0).all() and model.score(X, y) > 0.9


WRONG = [
    ({"solver": "sgd"}, "got solver='sgd'", 'pass solver as "lbfgs" or what makes an optimizer'),
    ({"solver": lambda: 3}, "makes 3", "what makes an optimizer"),
    ({"tol": -1.0}, "got tol=-1.0", "pass tol as a number of 0 at least"),
    ({"solver": ht.optim.SGD(0.1)}, "got solver=<SGD", "functools.partial"),
    ({"strategy": DataParallel()}, "strategy= is that of an optimizer", "pass solver="),
]


@pytest.mark.parametrize(("options", "said", "fix"), WRONG, ids=[said for _, said, _ in WRONG])
def test_a_solver_that_is_none_is_told(options, said, fix):
    X, y = rows(2)
    with pytest.raises(ArgumentError) as told:
        ht.ml.LogisticRegression(**options).fit(X, y)
    assert said in str(told.value) and fix in str(told.value)


def test_entries_of_one_place_are_summed():
    twice = Sparse(np.array([0, 2]), np.array([1, 1]), np.array([2.0, 3.0]), (1, 3))
    np.testing.assert_array_equal(twice @ np.eye(3), [[0, 5, 0]])


KEPT = {  # what the next fit has other than the first: whether it builds a graph, and whether it compiles a program
    "the same": ({}, slice(None), False, False),
    "other numbers": ({"C": 0.1, "tol": 1e-3}, np.r_[:4, 239:3:-1], False, False),
    "fewer rows": ({}, slice(100), False, True),
    "no intercept": ({"fit_intercept": False}, slice(None), True, True),
    "no penalty": ({"C": math.inf, "max_iter": 3}, slice(None), True, True),
}


@pytest.fixture
def made(monkeypatch):
    """How often executors, and programs, have been made; no earlier fit has left any."""
    counted = {"executors": 0, "programs": 0}

    def watch(method, name):
        own = getattr(ht.Executor, method)

        def call(*args, **kwargs):
            counted[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(ht.Executor, method, call)

    watch("__init__", "executors")
    watch("_compile", "programs")
    monkeypatch.setattr("hetu.ml.kept._free", {})
    return counted


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("case", KEPT)
def test_a_fit_takes_the_graph_that_an_earlier_one_left(case, sparse, made, monkeypatch):
    (X, y), (options, part, builds, compiles) = rows(2, sparse), KEPT[case]
    shaped = (lambda part: Entries(X.array[part])) if sparse else (lambda part: X[part])
    ht.ml.LogisticRegression().fit(shaped(slice(None)), y)
    before = dict(made)
    found = ht.ml.LogisticRegression(**options).fit(shaped(part), y[part])
    assert {name: made[name] - before[name] for name in made} == {"executors": builds, "programs": compiles}
    monkeypatch.setattr("hetu.ml.kept._free", {})
    anew = ht.ml.LogisticRegression(**options).fit(shaped(part), y[part])
    np.testing.assert_array_equal(found.coef_, anew.coef_)


def test_what_is_kept_is_taken_by_one_fit_at_a_time_and_holds_nothing_that_was_fed(made):
    X, y = rows(2)
    large = np.tile(X, (40, 1))
    fed = weakref.ref(large)
    ht.ml.LogisticRegression().fit(large, np.tile(y, 40))
    del large
    gc.collect()
    assert fed() is None
    alone = ht.ml.LogisticRegression().fit(X, y)
    for model in run_ranks(3, lambda comm: ht.ml.LogisticRegression().fit(X, y)):  # threads, at once
        np.testing.assert_array_equal(model.coef_, alone.coef_)
    assert made["executors"] <= 3


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_programs_go_that_hold_more_than_there_is_room_for(room, made, monkeypatch):
    monkeypatch.setattr("hetu.ml.kept.ROOM", room)
    X, y = rows(2)
    for count in (200, 220, 200):
        ht.ml.LogisticRegression().fit(X[:count], y[:count])
    assert made == {"executors": 1, "programs": 2 if room else 3}


def test_a_graph_whose_fit_fails_is_not_left_to_others(made, monkeypatch):
    X, y = rows(2)
    monkeypatch.setattr("hetu.ml.gradient.minimize", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ht.ml.LogisticRegression().fit(X, y)
    assert made["executors"] == 2
