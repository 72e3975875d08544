"""Rows of a sparse matrix in batches, and the text formats of LIBSVM and LIBFFM from which they come.

A row is a bag of entries, each an id with a weight, perhaps with a field. A batch has all entries of its rows side by
side, as `ht.embedding_bag` and its kin take them. Ranks that reduce gradients are fed all of a batch, as shares of it
differ in entries; workers that know the servers only take shards. The number of entries is rounded up, so that a few
programs serve all batches: what is added repeats the last id with a weight of 0, in the last bag. Left out: files
larger than memory.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers import AnswersCalls
from ..core.backend import array_from
from ..core.errors import DataError, public
from ..ranges import AtLeast1
from .dataset import ArrayDataset, Batch, RowIndex
from .formats import PathLike, opened

__all__ = ["BagDataset", "libsvm"]
LONGEST = 1 << 24  # bytes of a line


class BagDataset(AnswersCalls):
    """Bags of ids with weights, and a label for each: what a `DataLoader` hands out as (ids, weights, starts, labels).

    `ids`, `weights` and `fields`, if there are any, are (entries,); bag i has `lengths[i]` of these and `labels[i]`.
    With fields a batch is (ids, weights, fields, starts, labels). `count` is how many ids there can be, one more than
    the greatest unless given. DataError for arrays that do not fit each other, ids outside 0 to count - 1,
    fields below 0, or numbers that are not finite in float32.

    >>> data = BagDataset([7, 2, 2, 5], [1.0, 0.5, 0.5, 2.0], [3, 0, 1], [1, 0, 1])
    >>> [column.tolist() for column in data[[2, 0]]]
    [[5, 7, 2, 2], [2.0, 1.0, 0.5, 0.5], [0, 1], [1.0, 1.0]]
    >>> len(data), data.count
    (3, 8)
    """

    def __init__(
        self,
        ids: ArrayLike,
        weights: ArrayLike,
        lengths: ArrayLike,
        labels: ArrayLike,
        *,
        fields: ArrayLike | None = None,
        count: AtLeast1 | None = None,
    ) -> None:
        self.ids, self.lengths = _column("ids", ids, "int64"), _column("lengths", lengths, "int64")
        self.weights = _column("weights", weights, "float32", self.ids)
        self.labels = _column("labels", labels, "float32", self.lengths)
        self.fields = None if fields is None else _column("fields", fields, "int64", self.ids)
        if not len(self.labels):
            raise DataError("no bags", fix="pass the length and the label of at least one")
        if self.lengths.max() > len(self.ids) or self.lengths.sum() != len(self.ids):  # the sum may overflow
            said = f"lengths add up to {sum(self.lengths.tolist())}; there are {len(self.ids)} ids"
            raise DataError(said, fix="pass how many ids each bag has")
        high = int(self.ids.max(initial=-1))
        self.count = max(1, high + 1) if count is None else count
        if high >= self.count:
            raise DataError(f"id {high} of {self.count}", fix="count them from 0, below `count`")
        self._bags = ArrayDataset(np.cumsum(self.lengths) - self.lengths, self.lengths, self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: RowIndex) -> Batch:
        first, lengths, labels = map(np.atleast_1d, self._bags[rows])
        starts, entries = np.cumsum(lengths) - lengths, int(lengths.sum())
        places = np.repeat(first - starts, lengths) + np.arange(entries)
        places = np.concatenate([places, np.repeat(places[-1:], rounded(entries) - entries)])
        weights = self.weights[places]
        weights[entries:] = 0
        fields = [] if self.fields is None else [self.fields[places]]
        return self.ids[places], weights, *fields, starts, labels

    def __repr__(self) -> str:
        fields = "" if self.fields is None else f", {int(self.fields.max(initial=-1)) + 1} fields"
        return f"BagDataset({len(self)} bags of {len(self.ids)} entries, {self.count} ids{fields})"


def rounded(entries: int) -> int:
    """The number of entries of a batch that has room for so many: an eighth more at most.

    >>> [rounded(n) for n in (0, 1, 15, 17, 1000)]
    [0, 1, 15, 18, 1024]
    """
    step = 1 << max(0, entries.bit_length() - 4)
    return -(-entries // step) * step


def _column(name: str, values: ArrayLike, dtype: str, beside: NDArray[Any] | None = None) -> NDArray[Any]:
    """A vector, perhaps as long as another, of finite numbers or of integers from 0 on, which a DataError asks for."""
    given, whole = array_from(values), dtype == "int64"
    fix = "pass a vector of " + ("integers from 0 on" if whole else "numbers that are finite in float32")
    fix += "" if beside is None else ", one for each"
    if given.ndim != 1 or (given.size and given.dtype.kind not in ("iu" if whole else "biuf")):
        raise DataError(f"{name} are {given.dtype}{list(given.shape)}", fix=fix)
    if beside is not None and len(given) != len(beside):
        raise DataError(f"{len(given)} {name} of {len(beside)}", fix=fix)
    with np.errstate(over="ignore"):
        made = given.astype(dtype)
    wrong = made < 0 if whole else ~np.isfinite(made)
    if wrong.any():
        raise DataError(f"{name} have {given[wrong][0]} at {wrong.argmax()}", fix=fix)
    return made


@public
def libsvm(
    path: PathLike, *, count: AtLeast1 | None = None, first: int = 1, limit: AtLeast1 | None = None
) -> BagDataset:
    """A file of lines `label id:weight id:weight ...`, or `label field:id:weight ...` as LIBFFM has them.

    Ids count from `first`, 1 in most files, and fields from 0; `#` begins a comment. Reads at most `limit` lines. With
    `count` ids that are not below it are a DataError; so is a line that cannot be read, with its number.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write("1 3:0.5 7:2\\n0 # none\\n0 1:1\\n"); file.flush()
    ...     libsvm(file.name)
    BagDataset(3 bags of 3 entries, 7 ids)
    """
    (ids, fields, lengths, lines), kinds = (array("q") for _ in range(4)), set[int]()
    weights, labels = array("d"), array("d")
    with opened(path) as stream:
        read = itertools.takewhile(bool, (stream.readline(LONGEST) for _ in itertools.count()))
        for number, line in enumerate(itertools.islice(read, limit), 1):
            label, *entries = (text := line.partition(b"#")[0]).split() or [b""]
            parts = [entry.split(b":") for entry in entries]
            kinds |= {*map(len, parts)}
            with _line(path, number):
                if b"_" in text:
                    raise ValueError("_ in a number")  # which Python reads
                if len(line) == LONGEST:
                    raise ValueError(f"a line of {LONGEST:,} bytes")
                if kinds not in (set(), {2}, {3}):
                    raise ValueError("its entries are not all alike, or not as those before")
                ids.extend(int(part[-2]) - first for part in parts)
                weights.extend(float(part[-1]) for part in parts)
                fields.extend(int(part[0]) for part in parts if 3 in kinds)
                if label:
                    labels.append(float(label))
                    lengths.append(len(parts))
                    lines.append(number)
    if not labels:
        raise DataError(f"{os.fspath(path)} has no rows", fix="check the file")
    try:
        return BagDataset(ids, weights, lengths, labels, fields=fields if 3 in kinds else None, count=count)
    except DataError:
        for number, end, length, y in zip(lines, itertools.accumulate(lengths), lengths, labels):
            some = slice(end - length, end)
            with _line(path, number):
                if (least := min(ids[some], default=0)) < 0:
                    said, fix = f"id {least + first}, where they count from {first}", f"pass first={least + first}"
                    raise DataError(said, fix=f"{fix} if those of this file do from there") from None
                more = fields[some] if 3 in kinds else None
                BagDataset(ids[some], weights[some], [length], [y], fields=more, count=count)
        raise


@contextmanager
def _line(path: PathLike, number: int) -> Iterator[None]:
    """Tells the line of a file where something is wrong."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        said, fix = f"{error!s:.80}", "make each line `label id:weight ...`, or `label field:id:weight ...`"
        if isinstance(error, DataError):
            said, fix = error.message, error.fix
        raise DataError(f"{os.fspath(path)}, line {number}: {said}", fix=fix) from error
