"""Data sets: anything of known length that hands out rows as a tuple of arrays.

`ArrayDataset` holds rows in memory, `TextData` one long string as codes, `GraphData` one graph. For rows that do not
fit in memory write a class with `__len__` and `__getitem__`; the loader needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from types import MappingProxyType
from typing import Any, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers import AnswersCalls
from ..core.backend import array_from
from ..core.errors import AxisError, DataError, public
from ..ranges import AtLeast1, Count, Fraction, Seed

Batch = tuple[NDArray[Any], ...]
RowIndex = SupportsIndex | slice | NDArray[np.integer]


class Dataset(Protocol):
    """What the loader needs: a length, and the rows at given positions as one array per column."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: NDArray[np.integer], /) -> Batch: ...


class ArrayDataset(AnswersCalls):
    """Columns of equal length; row i is the i-th entry of each. Frozen: `take` and `split` return new data sets.

    Args:
        arrays: one or more arrays; the first axis of each counts the rows.
        names: one name per column; by default `c0, c1, ...`.
        info: facts about the whole set, such as class names or vocabularies.

    Raises DataError for no columns, no rows, or columns of different lengths.

    >>> data = ArrayDataset([[1.0], [2.0], [3.0]], [0, 1, 0], names=("x", "y"))
    >>> data
    ArrayDataset(x: float64[3, 1], y: int64[3])
    >>> x, y = data[1:]
    >>> y
    array([1, 0])
    """

    __slots__ = ("arrays", "info", "names")

    arrays: tuple[NDArray[Any], ...]
    names: tuple[str, ...]
    info: Mapping[str, object]

    def __init__(
        self, *arrays: ArrayLike, names: Sequence[str] | None = None, info: Mapping[str, object] | None = None
    ) -> None:
        columns = tuple(array_from(a) for a in arrays)
        names = tuple(f"c{i}" for i in range(len(columns))) if names is None else tuple(names)
        _check_columns(columns, names)
        object.__setattr__(self, "arrays", columns)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "info", MappingProxyType(dict(info or {})))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a data set is frozen: make a new one instead of setting {name!r}")

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        """Made anew from a copy."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, rows: RowIndex) -> Batch:
        """Rows by position, slice, integers (n,) or a mask (len,); one array per column. AxisError for others."""
        try:
            if np.broadcast_to(True, len(self))[rows].ndim > 1:  # as for None, which would make an axis
                raise IndexError("they have several axes")
            return tuple(a[rows] for a in self.arrays)
        except (IndexError, TypeError, ValueError) as error:
            said = f"rows {rows!r:.60} of a data set of {len(self)} rows: {error}"
            raise AxisError(said, fix="pass whole numbers below the length, a slice, or a mask of all rows") from error

    def __repr__(self) -> str:
        columns = (f"{n}: {a.dtype}{list(a.shape)}" for n, a in zip(self.names, self.arrays))
        return f"ArrayDataset({', '.join(columns)})"

    def take(self, n: int) -> ArrayDataset:
        """The first `n` rows. Raises DataError unless 1 <= n <= len.

        >>> len(ArrayDataset(range(10)).take(3))
        3
        """
        if not 1 <= n <= len(self):
            raise DataError(f"take({n}) of a data set of {len(self)} rows", fix=f"take between 1 and {len(self)} rows")
        return ArrayDataset(*self[:n], names=self.names, info=self.info)

    def flat(self) -> ArrayDataset:
        """Every row as a vector: images of shape (n, 28, 28) become (n, 784), columns of single values stay.

        >>> ArrayDataset(np.zeros((5, 28, 28)), range(5), names=("x", "y")).flat()
        ArrayDataset(x: float64[5, 784], y: int64[5])
        """
        columns = (a.reshape(len(a), -1) if a.ndim > 1 else a for a in self.arrays)
        return ArrayDataset(*columns, names=self.names, info=self.info)

    def split(self, fraction: float, seed: Seed = 0) -> tuple[ArrayDataset, ArrayDataset]:
        """Two disjoint random parts, `fraction` of the rows (rounded) in the first; the same for the same seed.

        >>> train, test = ArrayDataset(range(10)).split(0.8, seed=1)
        >>> len(train), len(test)
        (8, 2)
        """
        cut = round(fraction * len(self))
        if not 0 < cut < len(self):
            raise DataError(
                f"split({fraction}) of {len(self)} rows leaves one part empty",
                fix="pass a fraction between 0 and 1 that leaves rows on both sides",
            )
        order = np.random.default_rng(seed).permutation(len(self))
        first, second = (ArrayDataset(*self[rows], names=self.names, info=self.info) for rows in np.split(order, [cut]))
        return first, second


def _check_columns(columns: tuple[NDArray[Any], ...], names: tuple[str, ...]) -> None:
    if not columns:
        raise DataError("a data set without columns", fix="pass at least one array")
    if len(names) != len(columns):
        raise DataError(f"{len(names)} names for {len(columns)} columns", fix="give one name per column")
    for name, column in zip(names, columns):
        if column.ndim == 0:
            raise DataError(f"column {name!r} is a single number", fix="pass arrays whose first axis counts the rows")
    lengths = {name: len(column) for name, column in zip(names, columns)}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"columns of different lengths: {', '.join(f'{n} has {length}' for n, length in lengths.items())}",
            fix="give every column one entry per row",
        )
    if len(columns[0]) == 0:
        raise DataError("a data set without rows", fix="check the file or the filter the rows came from")


@dataclass(frozen=True, eq=False)
class TextData:
    """A text as integer codes; code i is the i-th character of `vocabulary`.

    >>> words = TextData.of("to be or not")
    >>> words.decode(words.encode("bet"))
    'bet'
    """

    codes: NDArray[np.int64]
    vocabulary: str
    _code_of: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        codes, known = np.asarray(self.codes), len(self.vocabulary)
        if (
            codes.ndim != 1
            or codes.dtype.kind not in "iu"
            or not (codes.size == 0 or 0 <= codes.min() <= codes.max() < known)
        ):
            raise DataError(
                f"codes {codes.dtype}{list(codes.shape)} of a vocabulary of {known} characters",
                fix=f"pass whole numbers (n,) from 0 to {known - 1}, or make it of a text: TextData.of(text)",
            )
        object.__setattr__(self, "_code_of", {c: i for i, c in enumerate(self.vocabulary)})

    @classmethod
    def of(cls, string: str, vocabulary: str | None = None) -> TextData:
        """Encode `string`; the vocabulary is its sorted characters unless given. Raises DataError if it is empty."""
        if not string:
            raise DataError("an empty text", fix="pass at least one character")
        points = np.frombuffer(string.encode("utf-32-le"), dtype="<u4")
        known = np.unique(points) if vocabulary is None else np.array([ord(c) for c in vocabulary], dtype="<u4")
        order = np.argsort(known)
        found = np.searchsorted(known, points, sorter=order).clip(max=len(known) - 1)
        codes = order[found].astype(np.int64)
        strange = points[known[codes] != points]
        if len(strange):
            raise DataError(
                f"character {chr(strange[0])!r} is not among the {len(known)} of the vocabulary",
                fix="drop it from the text, or build the vocabulary from all of the text",
            )
        return cls(codes, "".join(map(chr, known)))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, n: int) -> TextData:
        """The first `n` characters, with the same vocabulary. Raises DataError unless 1 <= n <= len.

        >>> TextData.of("to be or not").take(2).codes.tolist()
        [6, 4]
        """
        if not 1 <= n <= len(self):
            raise DataError(f"take({n}) of {len(self)} characters", fix=f"take between 1 and {len(self)}")
        return TextData(self.codes[:n], self.vocabulary)

    def encode(self, string: str) -> NDArray[np.int64]:
        """Codes of `string`, int64 (len,). Raises DataError for a character outside the vocabulary."""
        return TextData.of(string, self.vocabulary).codes

    def decode(self, codes: Iterable[SupportsIndex]) -> str:
        """The string of `codes`, the inverse of `encode`. Raises DataError for a code outside the vocabulary."""
        found = TextData(np.array([*map(index, codes)], np.int64), self.vocabulary).codes
        return "".join(self.vocabulary[c] for c in found)

    def windows(self, length: int, stride: int | None = None) -> ArrayDataset:
        """Rows for next-character prediction: x int64 (n, length) and t, the same one character later.

        `stride` is the step between the starts of two rows, by default `length`.

        >>> x, t = TextData.of("abcdefg").windows(3)[0]
        >>> x, t
        (array([0, 1, 2]), array([1, 2, 3]))
        """
        rows = sliding_windows(self.codes, length + 1, length if stride is None else stride)
        return ArrayDataset(rows[:, :-1], rows[:, 1:], names=("x", "t"), info={"vocabulary": self.vocabulary})


@dataclass(frozen=True, eq=False)
class GraphData:
    """One graph for node classification: `features` float32 (n, f), `y` int64 (n,), `edges` int64 (m, 2), each
    undirected edge once, and the fixed node positions to train and test on."""

    features: NDArray[np.float32]
    y: NDArray[np.int64]
    edges: NDArray[np.int64]
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    info: Mapping[str, object]

    def __len__(self) -> int:
        return len(self.y)


@public
def packed(rows: Sequence[NDArray[np.int64]], length: int) -> tuple[NDArray[np.int64], ...]:
    """Rows of ids, of several lengths, in as few of `length` as fit: (ids, part, place), int64 (n, length) each.

    `part` counts the rows within one from 1, 0 is padding; `place` is where in its row an id stands. The longest come
    first, each where there is room first. M. Krell et al., "Efficient Sequence Packing without Cross-contamination",
    2021. A text sees itself alone if `part` is equal. DataError for a row that is longer.

    >>> for array in packed([np.array([5, 6]), np.array([7, 8, 9]), np.array([4])], 4):
    ...     print(array.tolist())
    [[7, 8, 9, 4], [5, 6, 0, 0]]
    [[1, 1, 1, 2], [1, 1, 0, 0]]
    [[0, 1, 2, 0], [0, 1, 0, 0]]
    """
    sizes = [len(row) for row in rows]
    if max(sizes, default=0) > length:
        raise DataError(f"a row of {max(sizes)} ids does not fit into {length}", fix="cut it, or pass a larger length")
    room, parts, n = np.full(len(rows), length), np.zeros(len(rows), np.int64), 0
    ids, part, place = (np.zeros((len(rows), length), np.int64) for _ in range(3))
    for k in sorted(range(len(rows)), key=lambda k: -sizes[k]):
        at = int(np.argmax(room >= sizes[k]))
        where = slice(length - room[at], length - room[at] + sizes[k])
        parts[at] += 1
        ids[at, where], part[at, where], place[at, where] = rows[k], parts[at], np.arange(sizes[k])
        room[at] -= sizes[k]
        n = max(n, at + 1)
    return ids[:n], part[:n], place[:n]


@public
def masked_words(
    ids: NDArray[np.int64], rng: np.random.Generator, mask: Count, words: range, share: Fraction = 0.15
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids to read, and ids to guess, -1 where there is none: what BERT is trained by.

    Of the ids in `words`, `share` are to guess. Of these 80 % are read as `mask`, 10 % as any of `words`, 10 % as they
    are. J. Devlin et al., "BERT", 2019, section 3.1.

    >>> read, guess = masked_words(np.arange(8), np.random.default_rng(2), 9, range(2, 8), share=0.5)
    >>> read, guess
    (array([0, 1, 2, 9, 4, 5, 9, 9]), array([-1, -1, -1,  3, -1, -1,  6,  7]))
    """
    asked = (rng.random(ids.shape) < share) & (ids >= words.start) & (ids < words.stop)
    fate, other = rng.random(ids.shape), rng.integers(words.start, words.stop, ids.shape)
    read = np.where(asked & (fate < 0.8), mask, np.where(asked & (fate < 0.9), other, ids))
    return read, np.where(asked, ids, -1)


@public
def sliding_windows(series: ArrayLike, length: AtLeast1, stride: AtLeast1 = 1) -> NDArray[Any]:
    """Every stretch of `length` steps of a series (n, ...), as a read-only view (windows, length, ...).

    Raises DataError if the series is shorter than one window.

    >>> sliding_windows([1, 2, 3, 4], 3)
    array([[1, 2, 3],
           [2, 3, 4]])
    """
    series = array_from(series)
    if series.dtype.kind not in "biufc":
        raise DataError(f"a series of {series.dtype}", fix="pass numbers (n, ...)")
    if length > len(series):
        raise DataError(
            f"windows of {length} steps from a series of {len(series)} steps",
            fix=f"pass a window of at most {len(series)} steps",
        )
    view = np.lib.stride_tricks.sliding_window_view(series, length, axis=0)
    return np.moveaxis(view, -1, 1)[::stride]


@public
def standardized(values: ArrayLike, like: ArrayLike | None = None) -> NDArray[np.float32]:
    """Numbers (n, ...) less the mean of `like`, by default of themselves, over its standard deviation: float32.

    Both are taken along the first axis. What does not vary there is not divided, so that it is 0 and not NaN.

    >>> standardized([[1, 5], [3, 5]]).tolist(), standardized([[5, 6]], like=[[1, 5], [3, 5]]).tolist()
    ([[-1.0, 0.0], [1.0, 0.0]], [[3.0, 1.0]])
    """
    known = array_from(values if like is None else like).astype(np.float64)
    if known.ndim == 0 or len(known) == 0:
        raise DataError(
            f"numbers of shape {known.shape} have no mean", fix="pass numbers (n, ...) with one row at least"
        )
    spread = known.std(axis=0)
    scaled = (array_from(values) - known.mean(axis=0)) / np.where(spread > 0, spread, 1)
    return np.asarray(scaled, np.float32)
