"""Every estimator: scikit-learn's own checks, its scores beside theirs, and one worker beside several."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest

import hetu as ht
from hetu.dist import run_ranks
from hetu.ml.workers import Workers
from tests.ml import REFUSED, assert_alike, drawn_for, rows, shared_out

NAMES = sorted(rows())


def test_every_estimator_is_in_the_table():
    assert {*rows()} == {*ht.ml.ESTIMATORS}


@pytest.mark.parametrize("name", NAMES)
def test_scikit_learns_checks_pass(name):
    checks = pytest.importorskip("sklearn.utils.estimator_checks", reason="the extra [dev] is not installed")
    row = rows()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checks.check_estimator(row.make(), on_fail=None)
    failed = {each["check_name"]: repr(each["exception"]) for each in found if each["status"] == "failed"}
    refused = REFUSED | row.refused
    assert {n: said for n, said in failed.items() if n not in refused} == {}
    assert {*row.refused} <= {*failed}, "these pass by now: take them from the list"


@pytest.mark.parametrize("name", [name for name in NAMES if rows()[name].theirs])
def test_it_scores_as_scikit_learns(name):
    datasets = pytest.importorskip("sklearn.datasets", reason="the extra [dev] is not installed")
    row = rows()[name]
    X, y = getattr(datasets, row.bundled)(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    fit, held = order[: len(X) * 3 // 4], order[len(X) * 3 // 4 :]
    theirs = row.theirs().fit(X[fit], y[fit]).score(X[held], y[held])
    ours = row.make().fit(X[fit], y[fit]).score(X[held], y[held])
    assert ours >= theirs - row.within * abs(theirs)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", [name for name in NAMES if rows()[name].equal])
def test_workers_fit_what_one_fits(name, workers):
    row = rows()[name]
    alone, fitted = shared_out(row, workers)
    for of_rank in run_ranks(workers, lambda comm: fitted(comm, comm.rank)):
        assert_alike(row, of_rank, alone)


WEIGHED = [name for name in NAMES if "sample_weight" in inspect.signature(rows()[name].make().fit).parameters]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", [name for name in WEIGHED if rows()[name].make().kind == "classifier"])
def test_a_class_whose_rows_weigh_nothing_is_known_and_never_foretold(name, classes):
    row = rows()[name]
    X, y = drawn_for(row)
    X, y = X[y < classes], y[y < classes]
    model = row.make().fit(X, y, (y > 0).astype(float))
    X = X[y > 0]
    assert model.classes_.tolist() == [*range(classes)] and (model.predict(X) > 0).all()
    if hasattr(model, "predict_proba"):
        shares = model.predict_proba(X)
        assert shares.shape == (len(X), classes) and (shares[:, 0] < 0.05).all()
        np.testing.assert_allclose(shares.sum(axis=1), 1)


@pytest.mark.parametrize("unit", [2.0**-997, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("name", WEIGHED)
def test_the_unit_of_weights_does_not_matter(name, unit):
    row = rows()[name]
    X, y = drawn_for(row)
    weight = np.random.default_rng(0).uniform(0.5, 2, len(X))

    def fitted(unit):
        model = row.make()
        model.set_params(**{option: getattr(model, option) * unit**power for option, power in row.penalties.items()})
        model.fit(X, y, weight * unit)
        return [answer(X) for each in row.answers if callable(answer := getattr(model, each))]

    assert_alike(row, fitted(unit), fitted(1.0))


@pytest.mark.parametrize("fails", ["at X", "at y", "at its last word with others"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fit_that_fails_changes_nothing(name, fails, monkeypatch):
    row = rows()[name]
    X, y = drawn_for(row)
    fitted, new, asked = row.make().fit(X, y), row.make(), []
    known, lost = [{**vars(model)} for model in (fitted, new)], -1
    wrong = (X[:, :-1], y[:-1]) if fails == "at y" else (np.where(X[3, 3] == X, np.nan, X), y)
    if fails == "at its last word with others":

        def watched(own):
            def answer(self, *arrays):
                asked.append(own)
                if len(asked) == lost:
                    raise ConnectionError
                return own(self, *arrays)

            return answer

        for method in (Workers.sum, Workers.most, Workers.gather):
            monkeypatch.setattr(Workers, method.__name__, watched(method))
        wrong = X[:, :-1], y
        row.make().fit(*wrong)
        lost, _ = len(asked), asked.clear()
    elif fails == "at y" and not isinstance(new, ht.ml.Classifier | ht.ml.Regressor):
        return  # y is not looked at
    for model, before in zip((fitted, new), known):
        asked.clear()
        with pytest.raises((ht.errors.DataError, ht.errors.ShapeError, ConnectionError)):
            model.fit(*wrong)
        assert vars(model).keys() == before.keys() and all(vars(model)[name] is before[name] for name in before)
