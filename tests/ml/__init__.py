"""The table of estimators. A new one is a row in `families/` and inherits every check of `test_table.py`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from . import families


@dataclass(frozen=True)
class Row:
    """`make(**options)` is the estimator, small enough for a second; `theirs()` scikit-learn's, on `bundled` data of
    theirs (a function of `sklearn.datasets`), where the scores may differ by `within` of theirs.

    `equal` says how near fits by several workers come to one worker's: in what `answers` names, its attributes or
    methods of X. `penalties` are numbers that weights are weighed against, and by which power of these: a fit is the
    same where both are in another unit. `refused` maps checks of scikit-learn's that do not pass to the reason.
    """

    name: str
    make: Callable[..., Any]
    theirs: Callable[[], Any] | None = None
    bundled: str = ""
    within: float = 0.01
    equal: float = 1e-6
    answers: tuple[str, ...] = ("predict",)
    penalties: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


# Of all estimators.
REFUSED = {
    "check_estimators_unfitted": "the error is of a class of ours: scikit-learn is not imported",
    "check_supervised_y_2d": "a warning of a class of theirs",
    "check_do_not_raise_errors_in_init_or_set_params": "what does not fit is told on the line where it is written",
}


@cache
def rows() -> dict[str, Row]:
    names = [each.name for each in pkgutil.iter_modules(families.__path__)]
    found = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return {row.name: row for module in found for row in module.ROWS}


def drawn(kind: str, count: int = 240, features: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and targets of a kind of estimator: three classes that overlap a little, or a sum with noise."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 3, count)
    X = rng.normal(size=(count, features)) + 2.5 * rng.normal(size=(3, features))[group]
    if kind == "regressor":
        return X, X @ rng.normal(size=features) + 0.1 * rng.normal(size=count)
    return X, group


def drawn_for(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """What the estimator of a row is fitted on."""
    X, y = drawn(row.make().kind)
    return np.abs(X) if row.make().positive else X, y


def shared_out(row: Row, workers: int) -> tuple[list[np.ndarray], Callable[[Any, int], list[np.ndarray]]]:
    """What a fit by one worker answers, and `fitted(comm, rank)`: what one of several does, in unequal shares."""
    X, y = drawn_for(row)
    ends = [0, *(len(X) * (k + 1) // 5 for k in range(workers - 1)), len(X)]

    def fitted(comm: Any = None, rank: int = 0) -> list[np.ndarray]:
        mine = slice(None) if comm is None else slice(ends[rank], ends[rank + 1])
        model = row.make(comm=comm).fit(X[mine], y[mine])
        model.comm = None
        return [np.asarray(found(X[:50]) if callable(found := getattr(model, each)) else found) for each in row.answers]

    return fitted(), fitted


def assert_alike(row: Row, found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for many, one in zip(found, wanted, strict=True):
        if one.dtype.kind == "f":
            np.testing.assert_allclose(many, one, rtol=row.equal, atol=row.equal)
        else:
            np.testing.assert_array_equal(many, one)
