"""What people get wrong with searches, and what they are told: one row a mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.automl import (
    Alternating,
    Attempt,
    AutoClassifier,
    AutoRegressor,
    Bayesian,
    Categorical,
    Conditioning,
    Float,
    GaussianProcess,
    Int,
    Space,
)
from hetu.core.errors import HetuError

X, Y = np.arange(16.0).reshape(8, 2), np.arange(8) % 2
SPACE, RUN = {"x": Float(0.0, 1.0)}, Attempt({"x": 0.5}, 1.0, Path())


def search(**options):
    return ht.automl.search(lambda run: run["x"], SPACE, **{"trials": 1, **options})


def process():
    model = GaussianProcess()
    model.fit(np.eye(2), np.ones(2))
    return model


MISTAKES = [  # one a line, which is what a failing row shows
    (lambda: search(trials=0), ValueError, "search got trials=0", "pass trials as a whole number of 1 at least"),
    (lambda: search(sampler=Bayesian), TypeError, "got sampler=<class", "an object such as Bayesian(...) makes"),
    (lambda: search(schedule=3), TypeError, "search got schedule=3", "pass schedule as BudgetSchedule"),
    (lambda: search(sampler=Conditioning("y")), KeyError, "'y' is no choice of the space", "x"),
    (lambda: search(sampler=Alternating(["y"])), KeyError, "no 'y' in the space", "x"),
    (lambda: search(sampler=Alternating(["x"])), ValueError, "leaves one part empty", "not all"),
    (lambda: ht.automl.search(lambda run: 1, {}), ValueError, "a space without names", "pass one such as"),
    (lambda: ht.automl.search(lambda run: 1, {"x": 3}), ValueError, "x is 3", "pass Float, Int or Categorical"),
    (lambda: Float(1.0, 0.0), ValueError, "Float from 1.0 to 0.0", "pass low below high"),
    (lambda: Float(0.0, 1.0, log=True), ValueError, "log=True from 0.0", "a range above 0"),
    (lambda: Int(1, 3, default=0), ValueError, "default=0 of 1 to 3", "pass one that it holds"),
    (lambda: Int(0, 2.5), TypeError, "Int got high=2.5", "pass high as a whole number"),
    (lambda: Categorical("a", "a"), ValueError, "Categorical of ('a', 'a')", "each of them once"),
    (lambda: Categorical(net={"width": 8}), ValueError, "net.width is 8", "pass Float, Int or Categorical"),
    (lambda: Space([*Space(SPACE).all] * 2), ValueError, "with a name twice", "another name"),
    (lambda: Space(SPACE).places([{"y": 1.0}]), KeyError, "no 'y' in the space", "x"),
    (lambda: Space(SPACE).check({"x": 2.0}), ValueError, "x=2.0", "pass x as one of Float"),
    (lambda: RUN["y"], KeyError, "no 'y' in the configuration", "x"),
    (lambda: RUN.inside("y"), KeyError, "no 'y' in the configuration", "x"),
    (lambda: GaussianProcess().foretell(np.eye(2)), ValueError, "has seen no points", "call fit(x, y) before"),
    (lambda: process().foretell(np.eye(3)), ValueError, "x of shape (3, 3)", "pass 2 columns"),
    (lambda: AutoClassifier(metric="f1"), ValueError, "AutoClassifier got metric='f1'", "'auc' or 'accuracy'"),
    (lambda: AutoClassifier(categorical="town"), TypeError, "got categorical='town'", "a list of str or int"),
    (lambda: AutoClassifier().fit(X, Y[:3]), ValueError, "inconsistent numbers of samples: [8, 3]", "length of X"),
    (lambda: AutoClassifier().fit(X, Y + 0.5), ValueError, "Unknown label type: continuous", "use a regressor"),
    (lambda: AutoClassifier().fit(X * 1j, Y), ValueError, "Complex data not supported: column x0", "real numbers"),
    (lambda: AutoRegressor().fit(X, [*"abcdefgh"]), TypeError, "targets that are no numbers", "pass numbers as y"),
    (lambda: AutoRegressor().predict(X), ValueError, "is not fitted yet", "call fit first"),
    (lambda: process().fit(np.eye(2), [1.0]), ValueError, "inconsistent numbers of samples: [2, 1]", "pass y"),
]


@pytest.mark.parametrize("call, kind, got, fix", MISTAKES)
def test_a_mistake_is_told(call, kind, got, fix):
    with pytest.raises(kind) as told:
        call()
    error = told.value
    assert isinstance(error, HetuError) and got in error.message and fix in error.fix
    assert error.site is not None and error.site.code.co_filename == __file__


def test_a_name_that_a_run_may_lack_has_a_default():
    assert RUN.get("y", 3) == 3 and "y" not in RUN and dict(RUN) == {"x": 0.5}
