"""What people get wrong with estimators, and what they are told: one row a mistake, in scikit-learn's words."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import HetuError

X, Y = np.arange(12.0).reshape(6, 2) ** 2, np.array([0, 0, 0, 1, 1, 1])
NAN, MASKED = np.where(X == 0, np.nan, X), np.ma.masked_equal(X, 0)


class Frame:
    """A table with columns, as one of pandas."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns

    def __array__(self, dtype=None, copy=None):
        return X


def fitted():
    return ht.ml.LogisticRegression().fit(X, Y)


def tree():
    return ht.ml.DecisionTreeClassifier().fit(X, Y)


def sparse(starts=(0, 1, 2), columns=(0, 1), values=(1.0, 2.0)):
    return ht.ml.Sparse(np.array(starts), np.array(columns), np.array(values), (2, 2))


MISTAKES = [  # one a line, which is what a failing row shows
    (lambda: ht.ml.KMeans(2).fit(NAN), ValueError, "Input X contains NaN", "drop these rows"),
    (lambda: ht.ml.PCA().fit(MASKED), ValueError, "Input X contains masked values", "drop these rows"),
    (lambda: ht.ml.PCA().fit([*MASKED]), ValueError, "Input X contains masked values", "drop these rows"),
    (lambda: ht.ml.PCA().fit([[1.0, None], [2.0, 3.0]]), ValueError, "Input X contains NaN", "drop these rows"),
    (lambda: ht.ml.Ridge().fit(X, MASKED[:, 0]), ValueError, "Input y contains masked values", "drop these rows"),
    (lambda: ht.ml.Ridge().fit(X, Y, MASKED[:, 0]), ValueError, "sample_weight contains masked", "drop these rows"),
    (lambda: ht.ml.PCA().fit(X + np.inf), ValueError, "Input X contains infinity", "drop these rows"),
    (lambda: ht.ml.PCA().fit(X * 1e200), ValueError, "or a value too large for dtype('float64')", "of 1e+140 at most"),
    (lambda: ht.ml.Ridge().fit(X, Y * 1e200), ValueError, "Input y contains infinity or a value too large", "at most"),
    (lambda: ht.ml.PCA().fit(X[0]), ValueError, "Expected 2D array, got 1D array", "X.reshape(-1, 1) is one column"),
    (lambda: ht.ml.PCA().fit([[1], [1, 2]]), ValueError, "X got rows of different lengths", "pad or cut them"),
    (lambda: ht.ml.PCA().fit(X[:0]), ValueError, "Found array with 0 sample(s)", "pass as many in X"),
    (lambda: ht.ml.PCA().fit([["a", "b"]]), ValueError, "could not convert string", "texts become numbers"),
    (lambda: ht.ml.PCA(3).fit(X), ValueError, "n_components=3 must be between 1 and", "ask for fewer"),
    (lambda: ht.ml.KMeans(7).fit(X), ValueError, "n_samples=6 should be >= n_clusters=7", "ask for fewer"),
    (lambda: ht.ml.GaussianMixture(7).fit(X), ValueError, "Expected n_samples >= n_components", "ask for fewer"),
    (
        lambda: ht.ml.GradientBoostingRegressor(early_stopping=True).fit(X[:1], Y[:1]),
        ValueError,
        "early_stopping=True with a single row",
        "pass more",
    ),
    (lambda: ht.ml.KMeans(2, init=[[0.0], [1.0]]).fit(X), ValueError, "initial centers (2, 1)", "columns of X"),
    (lambda: ht.ml.KMeans(2, init=5).fit(X), ValueError, "Expected 2D array, got scalar", "init.reshape(-1, 1)"),
    (lambda: ht.ml.NMF().fit(-X), ValueError, "Negative values in data passed to NMF", "shift X"),
    (lambda: ht.ml.GaussianNB().fit(X, Y[:3]), ValueError, "inconsistent numbers of samples: [6, 3]", "length of X"),
    (lambda: ht.ml.GaussianNB().fit(X, Y * 0), ValueError, "the data contains only one class", "rows of another class"),
    (lambda: ht.ml.GaussianNB().fit(X, Y / 3), ValueError, "Unknown label type: continuous", "use a regressor"),
    (lambda: ht.ml.GaussianNB().fit(X, [None, *"aabbb"]), ValueError, "Input y contains NaN", "drop these rows"),
    (lambda: ht.ml.GaussianNB().fit(X, np.array([1, *"aabbb"], object)), TypeError, "Got y of int, str", "pass texts"),
    (lambda: ht.ml.GaussianNB().partial_fit(X, Y), ValueError, "on the first call to partial_fit", "pass all"),
    (lambda: ht.ml.GaussianNB().partial_fit(X, Y, [1, 2]), ValueError, "do not exist in the initial classes", "name"),
    (lambda: ht.ml.GaussianNB([0.5]).fit(X, Y), ValueError, "Number of priors must match", "pass one for each"),
    (lambda: ht.ml.GaussianNB([1, 1]).fit(X, Y), ValueError, "The sum of the priors should be 1", "divide them"),
    (lambda: ht.ml.Ridge().fit(X), ValueError, "Ridge requires y to be passed", "pass y"),
    (lambda: ht.ml.Ridge().fit(X, [*"abcdef"]), TypeError, "targets that are no numbers", "pass numbers as y"),
    (lambda: ht.ml.Ridge().fit(X, [None] * 6), ValueError, "Input y contains NaN", "drop these rows"),
    (lambda: ht.ml.Ridge().fit(X, Y, -np.ones(6)), ValueError, "negative values", "how often each row counts"),
    (lambda: ht.ml.Ridge().fit(X, Y, np.zeros(6)), ValueError, "at least one non-zero", "pass one above 0"),
    (lambda: ht.ml.Ridge().fit(X, Y, [1.0]), ValueError, "sample_weight.shape == (1,)", "one for each row"),
    (lambda: ht.ml.Ridge().fit(X, Y, "balanced"), ValueError, "sample_weight: could not convert", "pass numbers"),
    (lambda: ht.ml.Ridge().fit(X, Y, np.ones(6) * 1j), ValueError, "Complex data not supported", "real numbers"),
    (lambda: fitted().score(X, Y, np.zeros(6)), ValueError, "at least one non-zero", "pass one above 0"),
    (lambda: fitted().score(X, Y[:5]), ValueError, "inconsistent numbers of samples: [6, 5]", "length of X"),
    (lambda: fitted().predict(X[:, :1]), ValueError, "X has 1 features, but", "pass the columns of fit"),
    (lambda: ht.ml.PCA().transform(X), ValueError, "is not fitted yet", "call fit(X)"),
    (
        lambda: ht.ml.PCA().fit(Frame("a", "b")).transform(Frame("b", "a")),
        ValueError,
        "feature names",
        "in their order",
    ),
    (lambda: ht.ml.PCA().set_params(whitening=True), KeyError, "PCA has no parameter 'whitening'", "whiten"),
    (lambda: ht.ml.PCA().set_params(whiten="no"), TypeError, "PCA got whiten='no'", "pass whiten as bool"),
    (lambda: ht.ml.KNeighborsClassifier(7).fit(X, Y).predict(X), ValueError, "n_neighbors <= n_samples", "fewer"),
    (lambda: ht.ml.KNeighborsClassifier().fit(X, Y).kneighbors(X, 0), ValueError, "n_neighbors=0", "of 1 at least"),
    (lambda: ht.ml.LatentDirichletAllocation().fit([[2**62]]), ValueError, "documents of 4.61e+18 words", "divide"),
    (lambda: ht.ml.LatentDirichletAllocation().fit([[1e12]]), ValueError, "takes 64 bytes, for", "divide the counts"),
    (lambda: ht.ml.ALSRecommender(1).fit(X).rate([0.5], [0]), TypeError, "a user that is no whole number", "whole"),
    (lambda: ht.ml.ALSRecommender(1).fit(X).rate([6], [0]), ValueError, "user 6 of 6", "pass numbers from 0 to 5"),
    (lambda: tree().text(["size"]), ValueError, "1 names", "pass one for each of 2 columns"),
    (lambda: tree().text(tree=1), ValueError, "tree 1 of 1", "pass numbers from 0 to 0"),
    (lambda: ht.ml.Sparse.of([0.5], [0], [1.0], (2, 2)), TypeError, "a row that is no whole number", "whole numbers"),
    (lambda: ht.ml.Sparse.of([0], [0, 1], [1.0], (2, 2)), ValueError, "shapes (1,), (2,) and (1,)", "for each entry"),
    (lambda: sparse(starts=(0, 2, 1)), ValueError, "for a matrix (2, 2)", "Sparse.of takes entries in any order"),
    (lambda: sparse(starts=(0, 3, 2)), ValueError, "for a matrix (2, 2)", "rise from 0"),
    (lambda: sparse(columns=(0, 2)), ValueError, "column 2 of 2", "pass numbers from 0 to 1"),
    (lambda: sparse(values=(0.0, np.inf)), ValueError, "values contains infinity", "put a number in their place"),
]
WRONG = [3, 0, ht.dist.DataParallel, "data"]
MISTAKES += [
    (partial(kind, strategy=wrong), (ValueError, KeyError), f"{wrong!r:.60}", "say DataParallel" if k < 3 else "dp")
    for kind in ht.ml.ESTIMATORS.values()
    for k, wrong in enumerate(WRONG)
    if hasattr(kind, "strategy")
]


@pytest.mark.parametrize("call, kind, got, fix", MISTAKES)
def test_a_mistake_is_told(call, kind, got, fix):
    with pytest.raises(kind) as told:
        call()
    error = told.value
    assert isinstance(error, HetuError) and got in error.message and fix in error.fix
    assert error.site is not None and error.site.code.co_filename == __file__


def test_a_mistake_leaves_the_estimator_as_it_was():
    model = ht.ml.Ridge()
    with pytest.raises(ht.errors.ArgumentError, match="alpha"):
        model.set_params(fit_intercept=False, alpha=-1.0)
    assert model.get_params() == ht.ml.Ridge().get_params()
