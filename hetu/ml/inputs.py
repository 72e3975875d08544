"""What may stand for rows, targets and weights: arrays, lists, tables with columns, sparse matrices; what is told else.

The words of errors are scikit-learn's where its users, and its checks, know them. Sparse matrices are told by what
they have, as SciPy's, which is not imported. Computed is in float64. Left out: missing values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from .. import ops
from ..core.backend import array_from
from ..core.errors import DataError, DTypeError, ShapeError, ValueRangeError
from ..core.executor import Executor
from ..core.graph import Node
from ..core.leaf import placeholder
from ..dist.comm.comm import SerialComm
from ..ops.index import scatter_rows

KINDS = str, bool | int | float | np.number  # of which labels may be, in an array of objects
LARGEST = 1e140  # sums of squares of smaller numbers are numbers
MISSING = f"drop these rows, or put a number in their place, of {LARGEST:g} at most"


@dataclass(frozen=True)
class Sparse:
    """A matrix by its entries, row after row: those of row i are `starts[i]` to `starts[i + 1]` (CSR).

    ShapeError, ValueRangeError, DTypeError or DataError for arrays that are none.

    >>> Sparse.of([1, 0], [2, 0], [5.0, 3.0], (2, 3)).dense().tolist()
    [[3.0, 0.0, 0.0], [0.0, 0.0, 5.0]]
    """

    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if (
            self.starts.shape != (self.shape[0] + 1,)
            or not self.columns.shape == self.values.shape == (self.starts[-1],)
            or self.starts[0] != 0
            or (np.diff(self.starts) < 0).any()
        ):
            shapes = f"{self.starts.shape}, {self.columns.shape} and {self.values.shape}"
            raise ShapeError(
                f"starts, columns and values of shapes {shapes} for a matrix {self.shape}",
                fix="pass rows + 1 starts that rise from 0 to the number of entries, and columns and values of those; "
                "Sparse.of takes entries in any order",
            )
        check_places(self.starts, len(self.values) + 1, "start")
        check_places(self.columns, self.shape[1], "column")
        _finite(_floats(self.values, "values"), "values")

    @classmethod
    def of(cls, rows: Any, columns: Any, values: Any, shape: tuple[int, int]) -> Self:
        """The matrix of `values` at places in any order; ValueRangeError for places outside."""
        rows, columns, values = np.asarray(rows), np.asarray(columns), _floats(np.asarray(values), "values")
        if not (rows.shape == columns.shape == values.shape == (values.size,)):
            raise ShapeError(
                f"rows, columns and values of shapes {rows.shape}, {columns.shape} and {values.shape}",
                fix="pass a row, a column and a value for each entry",
            )
        for places, size, what in (rows, shape[0], "row"), (columns, shape[1], "column"):
            check_places(places, size, what)
        rows, columns = rows.astype(np.int64), columns.astype(np.int64)
        order = np.argsort(rows.astype(np.min_scalar_type(shape[0])), kind="stable")  # of 16 bits by counting
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
        return cls(starts, columns[order], values[order], shape)

    @property
    def rows(self) -> np.ndarray:
        """The row of each entry."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.starts))

    @classmethod
    def entries(cls, rows: np.ndarray | Sparse) -> Sparse:
        """Rows as their entries: of an array those that are not 0."""
        if isinstance(rows, Sparse):
            return rows
        at, columns = np.nonzero(rows)
        return cls.of(at, columns, rows[at, columns], rows.shape)

    def dense(self) -> np.ndarray:
        """The same as an array, in which entries of one place are summed."""
        out = np.zeros(self.shape)
        np.add.at(out, (self.rows, self.columns), self.values)
        return out

    def __getitem__(self, rows: np.ndarray) -> Sparse:
        """These rows, by their numbers."""
        counts = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], counts)
        return Sparse(starts, self.columns[places], self.values[places], (len(counts), self.shape[1]))

    @cached_property
    def T(self) -> Sparse:
        """The transpose."""
        return Sparse.of(self.columns, self.rows, self.values, self.shape[::-1])

    @cached_property
    def _products(self) -> tuple[Executor, list[Node], dict[Node | str, Any]]:
        other, errors = (
            placeholder(name, (n, None), np.float64) for name, n in (("other", self.shape[1]), ("errors", None))
        )
        ids, starts = (placeholder(name, (None,), np.int64) for name in ("ids", "starts"))
        values = placeholder("values", (None,), np.float64)
        rows = ops.take(errors, ops.bag_ids(starts, ids)) * ops.expand_dims(values, axis=1)
        zeros = ops.full(shape=(self.shape[1], errors.shape[1]), fill_value=0.0, dtype=np.float64)
        entries = {"times": [ops.embedding_bag(other, ids, starts, values)], "back": [scatter_rows(zeros, ids, rows)]}
        whole = [self.columns.astype(np.int64, copy=False), self.starts[:-1].astype(np.int64, copy=False), self.values]
        fed: dict[Node | str, Any] = dict(zip([ids, starts, values], whole))
        return Executor(entries, comm=SerialComm()), [other, errors], fed

    def __matmul__(self, other: np.ndarray) -> np.ndarray:
        """The product with an array (columns, n), by a graph that is kept for more of them."""
        executor, (place, _), own = self._products
        return executor.run("times", {place: other, **own})[0]

    def back(self, errors: np.ndarray) -> np.ndarray:
        """The product of the transpose, which is not made, with an array (rows, n)."""
        executor, (_, place), own = self._products
        return executor.run("back", {place: errors, **own})[0]

    def __len__(self) -> int:
        return self.shape[0]


def check_places(places: np.ndarray, size: int, what: str) -> None:
    """ValueRangeError for a place that is not from 0 to below `size`; DTypeError for one that is no whole number."""
    if len(places) and places.dtype.kind not in "iu":
        raise DTypeError(f"a {what} that is no whole number: {places[0]!r:.40}", fix="pass whole numbers")
    if len(outside := places[(places < 0) | (places >= size)]):
        raise ValueRangeError(f"{what} {outside[0]} of {size}", fix=f"pass numbers from 0 to {size - 1}")


def matrix(X: Any, *, sparse: bool = False, name: str = "X", least: int = 1) -> np.ndarray | Sparse:
    """(rows, columns) in float64, checked: DataError, ShapeError or DTypeError. Sparse ones only where `sparse`."""
    if isinstance(X, Sparse) or hasattr(X, "tocsr"):
        if not sparse:
            raise DTypeError(
                f"Sparse data was passed for {name}, but dense data is required.", fix="use X.toarray() for an array"
            )
        made = X if isinstance(X, Sparse) else _read(X.tocsr(), name)
        _check(made.values, made.shape, name, least)
        return _summed(made)
    array = as_array(X, name)
    if array.ndim != 2:
        raise ShapeError(
            f"Expected 2D array, got {'scalar' if array.ndim == 0 else f'{array.ndim}D'} array instead: {name} of "
            f"shape {array.shape}. Reshape your data",
            fix=f"{name}.reshape(-1, 1) is one column, {name}.reshape(1, -1) one row",
        )
    floats = _floats(array, name)
    _check(floats, floats.shape, name, least)
    return floats


def _read(csr: Any, name: str) -> Sparse:
    starts, size = np.asarray(csr.indptr, np.int64), csr.indptr[-1]
    return Sparse(starts, np.asarray(csr.indices[:size], np.int64), _floats(csr.data[:size], name), csr.shape)


def as_array(values: Any, name: str) -> np.ndarray:
    """An array of them; DataError where there is none, and where some are masked.

    >>> as_array([[1, 2], [3, 4]], "X").shape
    (2, 2)
    """
    parts = values if isinstance(values, list | tuple) else ()
    if np.ma.is_masked(values) or any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise DataError(f"Input {name} contains masked values.", fix=MISSING)
    whole = values.data if isinstance(values, np.ma.MaskedArray) else values
    return array_from(whole, lambda what, fix: DataError(f"{name} {what}", fix=fix))


def _summed(rows: Sparse) -> Sparse:
    """The same, in which entries of one place are one, their sum: squares, and what is counted, go by places."""
    places = rows.rows * rows.shape[1] + rows.columns
    if (np.diff(places) > 0).all():
        return rows
    distinct, entries = np.unique(places, return_inverse=True)
    if len(distinct) == len(places):
        return rows
    return Sparse.of(*np.divmod(distinct, rows.shape[1]), np.bincount(entries, rows.values), rows.shape)


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.kind == "c":
        raise DataError(f"Complex data not supported: {name}", fix="pass real numbers")
    try:
        return np.asarray(array, np.float64)
    except (TypeError, ValueError) as error:
        kind = DTypeError if isinstance(error, TypeError) else DataError
        raise kind(f"{name}: {error}", fix="pass numbers; texts become numbers by an encoding of yours") from None


def _check(values: np.ndarray, shape: tuple[int, ...], name: str, least: int) -> None:
    for size, what, wanted in zip(shape, ("sample(s)", "feature(s)"), (least, 1)):
        if size < wanted:
            raise DataError(
                f"Found array with {size} {what} (shape={shape}) while a minimum of {wanted} is required.",
                fix=f"pass as many in {name}",
            )
    _finite(values, name)


def _finite(values: np.ndarray, name: str) -> None:
    if not -LARGEST <= float(values.min(initial=0.0)) <= float(values.max(initial=0.0)) <= LARGEST:
        what = "NaN" if np.isnan(values).any() else "infinity or a value too large for dtype('float64')"
        raise DataError(f"Input {name} contains {what}.", fix=MISSING)


def vector(y: Any, rows: int, *, name: str = "y", outputs: bool = False) -> np.ndarray:
    """(rows,) of any dtype, or with `outputs` also (rows, outputs)."""
    array = as_array(y, name)
    if array.ndim == 2 and array.shape[1] == 1 and not outputs:
        array = array[:, 0]
    if array.ndim != 1 and not (outputs and array.ndim == 2):
        raise ShapeError(
            f"{name} should be a 1d array, got an array of shape {array.shape} instead.",
            fix=f"pass {name} of shape ({rows},), one for each row",
        )
    if len(array) != rows:
        raise ShapeError(
            f"Found input variables with inconsistent numbers of samples: {[rows, len(array)]}",
            fix=f"pass {name} of the length of X",
        )
    if array.dtype.kind == "c":
        raise DataError(f"Complex data not supported: {name}", fix="pass real numbers")
    if array.dtype.kind == "f":
        _finite(array, name)
    if array.dtype.kind == "O" and any(each is None or each != each for each in array.ravel()):
        raise DataError(f"Input {name} contains NaN.", fix=MISSING)
    return array


def as_labels(y: np.ndarray) -> np.ndarray:
    """What (rows,) of classes are: texts, whole numbers or truths; DTypeError for others, DataError for fractions."""
    if y.dtype.kind == "O" and any(all(isinstance(each, kind) for each in y) for kind in KINDS):
        y = np.array([*y])
    if y.dtype.kind not in "biufU":
        raise DTypeError(
            f"Unknown label type: unknown. Got y of {', '.join(sorted({type(each).__name__ for each in y}))}",
            fix="pass texts, or whole numbers, or True and False, as y",
        )
    if y.dtype.kind == "f" and (y != np.floor(y)).any():
        raise DataError(
            "Unknown label type: continuous. Maybe you are trying to fit a classifier, which expects discrete classes "
            "on a regression target with continuous values.",
            fix="use a regressor, or divide y into classes",
        )
    return y


def as_numbers(y: np.ndarray) -> np.ndarray:
    """Targets in float64; DTypeError for what are no numbers."""
    try:
        return y.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"targets that are no numbers: {error}", fix="pass numbers as y") from None


def weights(sample_weight: Any, rows: int) -> np.ndarray:
    """(rows,) float64: how often each row counts, once where nothing is said; DataError below 0."""
    if sample_weight is None:
        return np.ones(rows)
    array = _floats(as_array(sample_weight, "sample_weight"), "sample_weight")
    array = np.full(rows, array.item()) if array.ndim == 0 else array
    if array.ndim != 1:
        raise ShapeError("Sample weights must be 1D array or scalar", fix=f"got {array.shape}, wanted ({rows},)")
    if len(array) != rows:
        raise ShapeError(f"sample_weight.shape == {array.shape}, expected ({rows},)!", fix="pass one for each row")
    if not 0 <= float(array.min(initial=0.0)) <= float(array.max(initial=0.0)) <= LARGEST:
        raise DataError(
            "Input sample_weight contains NaN, infinity or negative values.", fix="pass how often each row counts"
        )
    return array
