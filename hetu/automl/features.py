"""Columns of numbers and of words as columns of numbers: what automatic machine learning may do to a table first.

Each step has options, which a search chooses among. Means of targets are of rows that the row is not among, or they
would tell it its own (D. Micci-Barreca, SIGKDD Explorations 2001). Left out: missing numbers, dates, texts of words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from ..core.errors import DataError, ShapeError, UnknownNameError, did_you_mean
from ..ml.inputs import as_array
from ..ranges import OneOf, Seed, Share
from .space import Categorical, Float

FOLDS = 5
PRIOR = 10.0  # rows of the mean of all that stand beside those of a word
FEATURES: Mapping[str, Any] = {
    "numbers": Categorical("standard", "ranks", "log"),
    "words": Categorical("one_hot", "target", "counts"),
    "keep": Float(0.05, 1.0, log=True, default=1.0),
}


@dataclass
class Columns:
    """A table: `numbers` (rows, columns) and `codes` (rows, columns), the numbers of words, -1 for one not known."""

    numbers: np.ndarray
    codes: np.ndarray
    names: list[str]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Any) -> Columns:
        return Columns(self.numbers[rows], self.codes[rows], self.names)


@dataclass
class TableReader:
    """Reads tables of the same columns: arrays, mappings of columns, or what has `columns`, as pandas.

    A column is one of words if it is in `categorical` (names, or places in an array) or has anything but numbers. A
    word that is missing, None or NaN, is the empty one. DataError for numbers that are missing or infinite and for
    what is masked, ShapeError for other columns than the first table had, UnknownNameError without a categorical one.
    """

    categorical: Collection[str | int] = ()
    words: dict[str, np.ndarray] = field(default_factory=dict)
    names: list[str] | None = None

    def read(self, X: Any) -> Columns:
        columns = self._columns(X)
        first = self.names is None
        for name in self.categorical if first else ():
            if name not in columns and name not in range(len(columns)):
                raise UnknownNameError(f"no column {name!r}", fix=did_you_mean(name, columns))
        self.names = self.names or [*columns]
        if [*columns] != self.names:
            raise ShapeError(
                f"columns {[*columns]!s:.80}, wanted {self.names!s:.80}", fix="pass those of fit, in order"
            )
        numbers, codes, order = [], [], ([], [])  # type: ignore[var-annotated]
        for place, (name, column) in enumerate(columns.items()):
            if (first and self._is_words(name, place, column)) or name in self.words:
                texts = as_texts(column)
                known = self.words.setdefault(name, np.unique(texts))
                at = np.minimum(np.searchsorted(known, texts), len(known) - 1)
                codes.append(np.where(known[at] == texts, at, -1))
                order[1].append(name)
            else:
                numbers.append(self._numbers(name, column))
                order[0].append(name)
        rows = len(next(iter(columns.values())))
        made = np.stack(numbers, axis=1) if numbers else np.empty((rows, 0))
        return Columns(made, np.stack(codes, axis=1) if codes else np.empty((rows, 0), int), [*order[0], *order[1]])

    def _columns(self, X: Any) -> dict[str, np.ndarray]:
        if hasattr(X, "columns") and not isinstance(X, np.ndarray):
            X = {str(name): X[name] for name in X.columns}
        if not isinstance(X, Mapping):
            array = as_array(X, "X") if isinstance(X, np.ndarray) else np.array(X, object)  # columns keep their kinds
            if array.ndim != 2 or not array.size:
                raise ShapeError(f"a table of shape {array.shape}", fix="pass (rows, columns)")
            return {f"x{k}": array[:, k] for k in range(array.shape[1])}
        columns = {name: as_array(column, f"column {name}") for name, column in X.items()}
        if len({column.shape for column in columns.values()}) != 1 or any(c.ndim != 1 for c in columns.values()):
            told = {name: column.shape for name, column in columns.items()}
            raise ShapeError(f"columns of shapes {told!s:.100}", fix="pass columns of one length")
        return columns

    def _is_words(self, name: str, place: int, column: np.ndarray) -> bool:
        if name in self.categorical or place in self.categorical or column.dtype.kind in "US":
            return True
        if column.dtype.kind == "c":
            return False
        try:
            column.astype(float)
        except (TypeError, ValueError):
            return True
        return False

    def _numbers(self, name: str, column: np.ndarray) -> np.ndarray:
        if column.dtype.kind == "c":
            raise DataError(f"Complex data not supported: column {name}", fix="pass real numbers")
        try:
            numbers = column.astype(float)
        except (TypeError, ValueError) as error:
            raise DataError(f"column {name}: {error}", fix="pass numbers, as fit had them") from None
        if not np.isfinite(numbers).all():
            raise DataError(f"Input X contains NaN or infinity in column {name}.", fix="put a number in its place")
        return numbers


def as_texts(column: np.ndarray) -> np.ndarray:
    """The words of a column, of which numbers are one in any dtype, and what is missing is "".

    >>> as_texts(np.array(["a", None, 1, 1.0], object)).tolist()
    ['a', '', '1.0', '1.0']
    """
    if column.dtype.kind in "US":
        return column.astype(str)
    numbers = bool | int | float | np.number | np.bool_
    read = (float(each) if isinstance(each, numbers) else each for each in column)
    return np.array(["" if each is None or each != each else str(each) for each in read])


@dataclass
class Features:
    """What is made of a table, fitted on some rows: numbers (rows, features).

    `numbers` are made "standard" (mean 0, deviation 1), their "ranks" among those of fit, or the "log" of what is above
    the least, standard. `words` become a column for each ("one_hot"), the mean "target" of each class or number, or
    their "counts". The share `keep` of columns stays that tells most of the target by itself (largest F).
    """

    numbers: Annotated[str, OneOf("standard", "ranks", "log")] = "standard"
    words: Annotated[str, OneOf("one_hot", "target", "counts")] = "one_hot"
    keep: Share = 1.0
    seed: Seed = 0

    def fit_transform(self, table: Columns, y: np.ndarray) -> np.ndarray:
        """The features of the rows, `y` (rows, outputs) their targets, of classes one column of 0 and 1 for each."""
        self.sorted = np.sort(table.numbers, axis=0)
        self.low = self.sorted[0] if len(table) else np.zeros(0)
        logs = self._scaled(table.numbers)
        self.mean, self.std = logs.mean(axis=0), logs.std(axis=0)
        self.sizes = table.codes.max(axis=0, initial=-1) + 1
        self.counts = [np.bincount(codes[codes >= 0], minlength=1) for codes in table.codes.T]
        self.targets = [self._means(codes, y) for codes in table.codes.T]
        self.overall = y.mean(axis=0)
        means = self.words == "target" and table.codes.shape[1] > 0
        made = self._made(table, self._of_others(table.codes, y) if means else None)
        told = informative(made, y)
        self.kept = np.sort(np.argsort(-told, kind="stable")[: max(1, round(self.keep * len(told)))])
        return made[:, self.kept]

    def transform(self, table: Columns) -> np.ndarray:
        """The features of other rows."""
        known = replace(table, codes=np.where(table.codes < self.sizes, table.codes, -1))
        return self._made(known, None)[:, self.kept]

    def _scaled(self, numbers: np.ndarray) -> np.ndarray:
        return np.log1p(np.maximum(numbers - self.low, 0)) if self.numbers == "log" else numbers

    def _made(self, table: Columns, targets: np.ndarray | None) -> np.ndarray:
        if self.numbers == "ranks":
            places = [np.searchsorted(known, own) for known, own in zip(self.sorted.T, table.numbers.T)]
            own = [np.stack(places, axis=1) / len(self.sorted) - 0.5] if places else []
        else:
            own = [(self._scaled(table.numbers) - self.mean) / np.where(self.std > 0, self.std, 1)]
        if self.words == "target" and targets is not None:
            own.append(targets)
        elif self.words == "target":
            own += [np.where(c[:, None] >= 0, means[c], self.overall) for c, means in zip(table.codes.T, self.targets)]
        elif self.words == "counts":
            own += [np.where(c >= 0, np.log1p(n[c]), 0.0)[:, None] for c, n in zip(table.codes.T, self.counts)]
        else:
            own += [(c[:, None] == np.arange(size)).astype(float) for c, size in zip(table.codes.T, self.sizes)]
        return np.concatenate(own, axis=1)

    def _means(self, codes: np.ndarray, y: np.ndarray) -> np.ndarray:
        """(words, outputs): the mean target of each word, drawn to that of all."""
        size = codes.max(initial=0) + 1
        sums = np.zeros((size, y.shape[1]))
        np.add.at(sums, codes, y)
        means: np.ndarray = (sums + PRIOR * y.mean(axis=0)) / (np.bincount(codes, minlength=size)[:, None] + PRIOR)
        return means

    def _of_others(self, codes: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The mean targets of each row's words, among the rows of other folds."""
        fold = np.random.default_rng(self.seed).permutation(len(codes)) % FOLDS
        made = np.empty((len(codes), codes.shape[1] * y.shape[1]))
        for k in range(FOLDS):
            here, there = fold == k, fold != k
            of_each = [self._means(np.append(c[there], c.max()), np.append(y[there], y[there].mean(axis=0)[None], 0))
                       for c in codes.T]  # fmt: skip
            made[here] = np.concatenate([means[c[here]] for c, means in zip(codes.T, of_each)], axis=1)
        return made


def informative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest r^2 of each column with a target (rows, outputs): how much of its variance a line tells."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    scale = np.sqrt(np.outer((x * x).sum(axis=0), (y * y).sum(axis=0)))
    told: np.ndarray = (np.abs(x.T @ y) / np.where(scale > 0, scale, np.inf)).max(axis=1) ** 2
    return told
