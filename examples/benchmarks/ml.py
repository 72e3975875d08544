"""Estimators beside scikit-learn's of the same names: `python examples/benchmarks/ml.py [GaussianNB ...]`.

Each row fits both on the same data and asks them for all they are good for, in processor time of one thread, by
alternation in one process; above 1 ours takes longer. Beside it stands what each reaches: accuracy, R^2 or whatever
the row says. Ignored on purpose: many workers, and options that only one of both has.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from report import print_table
from scipy import sparse
from sklearn import cluster, datasets, decomposition, ensemble, linear_model, mixture, naive_bayes, neighbors, svm, tree
from threadpoolctl import threadpool_limits

import hetu as ht
from hetu.cpu_kernels import openblas

Data = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """What is fitted to `data()`, theirs by `theirs()`, and what `reach(model, X, y)` makes of it, which is timed."""

    data: Callable[[], Data]
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    reach: Callable[[Any, np.ndarray, np.ndarray], float] = lambda model, X, y: model.score(X, y)


@cache
def groups(count: int, columns: int, classes: int = 5) -> Data:
    """Classes that overlap."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, classes, count)
    return rng.normal(size=(count, columns)) + rng.normal(size=(classes, columns))[y], y


@cache
def numbers(count: int, columns: int) -> Data:
    """Sums of columns, with noise."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(count, columns))
    return X, X @ rng.normal(size=columns) + rng.normal(size=count)


@cache
def bent(count: int, columns: int, classes: int = 0) -> Data:
    """A product, a wave and a line of the first columns, with noise: as a number, or in classes of one size."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(count, columns))
    y = X[:, 0] * X[:, 1] + np.sin(3 * X[:, 2]) + X[:, 3] + 0.3 * rng.normal(size=count)
    return X, np.searchsorted(np.quantile(y, np.arange(1, classes) / classes), y) if classes else y


@cache
def words(count: int, known: int, length: int) -> tuple[Any, np.ndarray]:
    """Sparse rows of as many words, in which common ones weigh less, each of length 1; and two classes."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, count * length) - 1, known - 1)
    X = sparse.csr_matrix((np.ones(len(ids)), ids, np.arange(count + 1) * length), (count, known))
    X.sum_duplicates()
    X = X.multiply(np.log(count / np.maximum(X.getnnz(axis=0), 1)) + 1e-3).tocsr()
    X = X.multiply(1 / np.sqrt(X.multiply(X).sum(axis=1))).tocsr()
    return X, (10 * X @ rng.normal(size=known) + rng.normal(size=count) > 0).astype(int)


@cache
def documents(count: int, words: int, topics: int, length: int) -> Data:
    """Counts of words as latent Dirichlet allocation has them, and the likeliest topic."""
    rng = np.random.default_rng(0)
    laws, mixes = rng.dirichlet(np.full(words, 0.05), topics), rng.dirichlet(np.full(topics, 0.2), count)
    return np.array([rng.multinomial(rng.poisson(length), mix @ laws) for mix in mixes], float), mixes.argmax(axis=1)


@cache
def parts(count: int, columns: int, size: int) -> Data:
    """Sums of a few rows without negative numbers, and noise."""
    rng = np.random.default_rng(0)
    shares, rows = (np.abs(rng.normal(size=shape)) for shape in ((count, size), (size, columns)))
    return shares @ rows + np.abs(rng.normal(size=(count, columns))), shares.argmax(axis=1)


@cache
def entries(count: int, columns: int, share: float) -> Data:
    """A sparse matrix without an order."""
    return sparse.random(count, columns, share, format="csr", random_state=0), np.zeros(count)


def explained(model: Any, X: np.ndarray, y: np.ndarray) -> float:
    """The share of the variance that components explain."""
    return float(model.explained_variance_ratio_.sum())


def error(model: Any, X: np.ndarray, y: np.ndarray) -> float:
    """The root of the sum of squared errors."""
    return float(model.reconstruction_err_)


def first(rows: int) -> Callable[[Any, np.ndarray, np.ndarray], float]:
    """The score of some rows, where all would take long."""
    return lambda model, X, y: model.score(X[:rows], y[:rows])


def perplexity(model: Any, X: np.ndarray, y: np.ndarray) -> float:
    """Of the words, given the mixes that the model finds; the same formula for both."""
    laws = model.components_ / model.components_.sum(axis=1, keepdims=True)
    return float(np.exp(-(X * np.log(model.transform(X) @ laws)).sum() / X.sum()))


THEIRS = {
    "DecisionTreeClassifier": tree.DecisionTreeClassifier,
    "DecisionTreeRegressor": tree.DecisionTreeRegressor,
    "GradientBoostingClassifier": ensemble.HistGradientBoostingClassifier,
    "GradientBoostingRegressor": ensemble.HistGradientBoostingRegressor,
    "RandomForestClassifier": ensemble.RandomForestClassifier,
    "RandomForestRegressor": ensemble.RandomForestRegressor,
}
CASES = {
    "LinearRegression": Case(lambda: numbers(100_000, 50), ht.ml.LinearRegression, linear_model.LinearRegression),
    "Ridge": Case(lambda: numbers(100_000, 50), ht.ml.Ridge, linear_model.Ridge),
    "LogisticRegression": Case(
        lambda: groups(100_000, 50, 2), ht.ml.LogisticRegression, linear_model.LogisticRegression
    ),
    "LogisticRegression-softmax": Case(
        lambda: groups(100_000, 50), ht.ml.LogisticRegression, linear_model.LogisticRegression
    ),
    "LogisticRegression-words": Case(
        lambda: words(50_000, 20_000, 60), ht.ml.LogisticRegression, linear_model.LogisticRegression
    ),
    "LinearSVC": Case(lambda: groups(100_000, 50, 2), ht.ml.LinearSVC, svm.LinearSVC),
    "LinearSVC-several": Case(lambda: groups(100_000, 50), ht.ml.LinearSVC, svm.LinearSVC),
    "LinearSVC-words": Case(lambda: words(50_000, 20_000, 60), ht.ml.LinearSVC, svm.LinearSVC),
    "GaussianNB": Case(lambda: groups(100_000, 20), ht.ml.GaussianNB, naive_bayes.GaussianNB),
    "BernoulliNB": Case(lambda: groups(100_000, 20), ht.ml.BernoulliNB, naive_bayes.BernoulliNB),
    "MultinomialNB": Case(lambda: documents(5000, 1000, 20, 60), ht.ml.MultinomialNB, naive_bayes.MultinomialNB),
    "KNeighborsClassifier": Case(
        lambda: groups(50_000, 20),
        ht.ml.KNeighborsClassifier,
        neighbors.KNeighborsClassifier,
        first(2000),
    ),
    "LatentDirichletAllocation": Case(
        lambda: documents(1000, 1000, 20, 60),
        lambda: ht.ml.LatentDirichletAllocation(20),
        lambda: decomposition.LatentDirichletAllocation(20, random_state=0),
        perplexity,
    ),
    **{
        f"{name}{of}": Case(
            lambda classes=classes: bent(100_000, 30, classes),
            lambda name=name, given=given: getattr(ht.ml, name)(**given),
            lambda name=name, given=given: THEIRS[name](**given | {"random_state": 0}),
        )
        for name, of, classes, given in (
            ("DecisionTreeClassifier", "", 2, {}),
            ("DecisionTreeRegressor", "", 0, {}),
            ("RandomForestClassifier", "", 2, {"n_estimators": 5}),
            ("RandomForestRegressor", "", 0, {"n_estimators": 2}),
            ("GradientBoostingRegressor", "", 0, {"early_stopping": False}),
            ("GradientBoostingClassifier", "", 2, {"early_stopping": False}),
            ("GradientBoostingClassifier", ", several", 5, {"early_stopping": False, "max_iter": 30}),
        )
    },
    **{
        f"{name}, {bundled}": Case(
            lambda bundled=bundled: getattr(datasets, f"load_{bundled}")(return_X_y=True),
            lambda name=name, given=given: getattr(ht.ml, name)(**given),
            lambda name=name, given=given: THEIRS[name](**given | {"random_state": 0}),
        )
        for name, given, some in (
            ("DecisionTreeClassifier", {}, ["iris", "wine", "breast_cancer", "digits"]),
            ("DecisionTreeRegressor", {}, ["diabetes"]),
            ("GradientBoostingClassifier", {"early_stopping": False}, ["iris", "wine", "breast_cancer"]),
            ("GradientBoostingClassifier", {"early_stopping": False, "max_iter": 20}, ["digits"]),
            ("GradientBoostingRegressor", {"early_stopping": False}, ["diabetes"]),
        )
        for bundled in some
    },
    "KMeans": Case(
        lambda: groups(100_000, 20, 20), lambda: ht.ml.KMeans(20), lambda: cluster.KMeans(20, random_state=0)
    ),
    "KMeans by batches": Case(
        lambda: groups(100_000, 20, 20),
        lambda: ht.ml.KMeans(20, batch_size=1024),
        lambda: cluster.MiniBatchKMeans(20, random_state=0),
    ),
    **{
        f"GaussianMixture, {kind}": Case(
            lambda: groups(30_000, 20),
            lambda kind=kind: ht.ml.GaussianMixture(10, covariance_type=kind, max_iter=20, tol=0),
            lambda kind=kind: mixture.GaussianMixture(10, covariance_type=kind, max_iter=20, tol=0, random_state=0),
        )
        for kind in ("full", "tied", "diag", "spherical")
    },
    "PCA": Case(lambda: groups(100_000, 20), lambda: ht.ml.PCA(10), lambda: decomposition.PCA(10), explained),
    "PCA, wide": Case(
        lambda: parts(2000, 1500, 20), lambda: ht.ml.PCA(10), lambda: decomposition.PCA(10, random_state=0), explained
    ),
    "PCA, sparse": Case(
        lambda: entries(20_000, 1000, 0.02),
        lambda: ht.ml.PCA(10),
        lambda: decomposition.PCA(10, random_state=0),
        explained,
    ),
    "NMF": Case(
        lambda: parts(5000, 300, 20),
        lambda: ht.ml.NMF(20, max_iter=50),
        lambda: decomposition.NMF(20, max_iter=50, random_state=0),
        error,
    ),
    "NMF, sparse": Case(
        lambda: entries(20_000, 1000, 0.02),
        lambda: ht.ml.NMF(10, max_iter=50),
        lambda: decomposition.NMF(10, max_iter=50, random_state=0),
        error,
    ),
}


def compared(name: str, rounds: int) -> dict[str, Any]:
    """A row of the table: quartiles of our time by theirs."""
    case, times, reached = CASES[name], {"ours": [], "theirs": []}, {}
    X, y = case.data()
    sides = {"ours": case.ours, "theirs": case.theirs}
    for turn in range(rounds + 1):
        for side in sides if turn % 2 else reversed(sides):
            began = time.process_time()
            reached[side] = case.reach(sides[side]().fit(X, y), X, y)
            times[side] += [time.process_time() - began] * (turn > 0)  # the first is to warm up
    ratios = [a / b for a, b in zip(times["ours"], times["theirs"])]
    return {
        "estimator": name,
        "data": " x ".join(map(str, X.shape)),
        "ours by theirs": statistics.quantiles(ratios, n=4) if rounds > 1 else ratios[0],
        "s, ours": statistics.median(times["ours"]),
        "ours reaches": reached["ours"],
        "theirs": reached["theirs"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimators beside scikit-learn's.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of: {' '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side (default: 5)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in CASES]:
        parser.error(f"no row is called {unknown[0]!r}; there are {' '.join(CASES)}")
    openblas.set_threads(1)
    with threadpool_limits(1):
        names = arguments.names or [*CASES]
        print_table((compared(name, arguments.rounds) for name in names), widest=max(map(len, names)))


if __name__ == "__main__":
    main()
