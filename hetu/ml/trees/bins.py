"""Columns in bins, the whole numbers that trees add up, and how operators compute without a graph.

A column has at most 255 bins: one for each distinct value, or quantiles of as many rows each. All workers agree on
where bins end, and on what one unit of a number is, so sums are exact: they are the same in any order, for any number
of workers. Y. Shi et al., "Quantized Training of Gradient Boosting Decision Trees", NeurIPS 2022, take far fewer bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.op import Op
from ..workers import Workers

MOST_BINS = 255
SAMPLE = 200_000  # rows from which quantiles are taken
ROOM = 1 << 24  # bytes that are looked at together


@dataclass(frozen=True)
class BinnedRows:
    """Rows in bins, (rows, columns) uint8, and the numbers next to where bins end, both (columns, bins - 1).

    Bin b of a column ends between the number `below[column, b]`, its last, and `above[column, b]`, the first of the
    bin after it. The column that has most bins has `size`; in others the rest of the numbers is infinite.
    """

    bins: np.ndarray
    below: np.ndarray
    above: np.ndarray

    @property
    def size(self) -> int:
        return int(self.below.shape[1]) + 1


def binned(workers: Workers, X: np.ndarray, most: int = MOST_BINS) -> BinnedRows:
    """The rows of this worker in bins that follow from those of all: every k-th row, where there are very many."""
    before, rows = rows_of_all(workers, len(X))
    step = -(-rows // SAMPLE)
    bins, found = np.empty(X.shape, np.uint8), []
    some = max(1, ROOM // (8 * SAMPLE if step > 1 else 8 * rows))  # columns that are gathered together
    for first in range(0, X.shape[1], some):
        for values in workers.gather(X[-before % step :: step, first : first + some]).T:
            found.append(ends_of(values, most))
    for number, ends in enumerate(found):
        bins[:, number] = np.searchsorted(between(*ends), X[:, number])
    width = max(len(below) for below, _ in found)
    filled = [[np.append(ends, np.full(width - len(ends), np.inf)) for ends in pair] for pair in found]
    return BinnedRows(bins, *(np.stack([pair[k] for pair in filled]) for k in range(2)))


def ends_of(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The last number of each bin but the last, and the first of the next: of each distinct one, or of quantiles.

    >>> [ends.tolist() for ends in ends_of(np.array([1.0, 5, 3, 3]), 4)]
    [[1.0, 3.0], [3.0, 5.0]]
    >>> [ends.tolist() for ends in ends_of(np.arange(12.0), 3)]
    [[3.0, 7.0], [4.0, 8.0]]
    """
    values = np.sort(values)
    ends = np.flatnonzero(values[1:] != values[:-1]) + 1  # where another number begins
    if len(ends) >= most:
        quantiles = values[np.linspace(0, len(values) - 1, most + 1)[1:-1].astype(int)]
        ends = np.unique(np.searchsorted(values, quantiles, side="right"))
        ends = ends[ends < len(values)]
    return values[ends - 1], values[ends]


def between(below: np.ndarray, above: np.ndarray) -> np.ndarray:
    """The numbers in the middle, which round to none of those above."""
    middle = below / 2 + above / 2
    return np.where(middle < above, middle, below)


def rows_of_all(workers: Workers, own: int) -> tuple[int, int]:
    """How many rows the workers before this one have, and all."""
    counts = workers.gather(np.array([own]))
    return int(counts[: workers.rank].sum()), int(counts.sum())


def whole(workers: Workers, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (rows, columns) as whole ones whose sums over all workers stay below 2**52, and their units.

    So floats hold these sums, too. Units (columns,) are powers of two: whole numbers and simple fractions stay as they
    are.

    >>> numbers, units = whole(Workers(), np.array([[0.5], [-1.0], [3.0]]))
    >>> (numbers * units).tolist(), units.tolist() == [2.0**-48]
    ([[0.5], [-1.0], [3.0]], True)
    """
    own = np.abs(np.ascontiguousarray(values.T)).max(axis=1, initial=0.0)  # along memory: columns are few
    told = workers.side_by_side(np.append(own, len(values)))
    most, rows = told[:, :-1].max(axis=0), told[:, -1].sum()
    shifts = np.where(most > 0, np.frexp((2.0**52 - rows) / np.where(most > 0, most * rows, 1))[1] - 1, 0)
    shifts = np.clip(shifts, -1000, 1000)
    return np.rint(values * np.ldexp(1.0, shifts)).astype(np.int64), np.ldexp(1.0, -shifts)


def narrowed(workers: Workers, numbers: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same in 32 bits, with coarser units: of a million rows 10 bits are left for the number of a usual row.

    >>> numbers, units = narrowed(Workers(), *whole(Workers(), np.array([[0.5], [-1.0], [3.0]])))
    >>> numbers.dtype.name, (numbers * units).tolist()
    ('int32', [[0.5], [-1.0], [3.0]])
    """
    sums, rows = workers.sum(np.abs(np.ascontiguousarray(numbers.T)).sum(axis=1), np.array([len(numbers)]))
    shifts = np.where(sums > 0, np.frexp((2.0**30 - rows) / np.maximum(sums, 1))[1] - 1, 0)
    return np.rint(numbers * np.ldexp(1.0, shifts)).astype(np.int32), np.ldexp(units, -shifts)


def mean_of_all(workers: Workers, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted mean of each column over the rows of all workers, the same for any division of rows."""
    numbers, units = whole(workers, np.concatenate([values * weights[:, None], weights[:, None]], axis=1))
    (sums,) = workers.sum(np.ascontiguousarray(numbers.T).sum(axis=1))
    return sums[:-1] * units[:-1] / (sums[-1] * units[-1])


def compute(operator: Op[..., Any], out: Any, *arrays: np.ndarray, **attrs: Any) -> Any:
    """What an operator makes of arrays, in `out`; by the kernels of a CPU where there are any."""
    for call in operator.bound(np, out, arrays, attrs):
        call()
    return out
