"""Every estimator: scikit-learn's own checks, its scores beside theirs, and one worker beside several."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import hetu as ht
from hetu.dist import run_ranks
from tests.ml import REFUSED, drawn, rows

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
    X, y = drawn(row.make().kind)
    X = np.abs(X) if row.make().positive else X

    ends = [0, *(len(X) * (k + 1) // 5 for k in range(workers - 1)), len(X)]  # shares of unequal sizes

    def fitted(comm=None):
        mine = slice(None) if comm is None else slice(ends[comm.rank], ends[comm.rank + 1])
        model = row.make(comm=comm).fit(X[mine], y[mine])
        model.comm = None
        return [np.asarray(found(X[:50]) if callable(found := getattr(model, each)) else found) for each in row.answers]

    alone = fitted()
    for of_rank in run_ranks(workers, fitted):
        for one, many in zip(alone, of_rank, strict=True):
            if one.dtype.kind == "f":
                np.testing.assert_allclose(many, one, rtol=row.equal, atol=row.equal)
            else:
                np.testing.assert_array_equal(many, one)
