"""Readers for the public file formats, each from a path to plain arrays or rows; a `.gz` is unpacked on the way.

A file that is cut short or of another format raises DataError, which names the place. Pickles, such as the Python
version of CIFAR-10, are not read: loading one runs the code that it holds.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError

PathLike = str | os.PathLike[str]

ADULT_NUMERIC = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
ADULT_CATEGORICAL = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country",
)  # fmt: skip
ADULT_COLUMNS = (  # in the order of the file
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship",
    "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income",
)  # fmt: skip
CRITEO_NUMERIC, CRITEO_CATEGORICAL = 13, 26
BLOCK = 5000  # rows that are read as text at a time
IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@contextmanager
def opened(path: PathLike) -> Iterator[IO[bytes]]:
    """The bytes of a plain or gzipped file, told apart by the first two bytes.

    Raises DataError for a file that is missing or damaged, or that is read as UTF-8 and is not.
    """
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            with gzip.open(plain) if packed else plain as stream:
                yield cast(IO[bytes], stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{os.fspath(path)} is damaged: {error}", fix="fetch the file again") from error
    except csv.Error as error:
        raise DataError(f"{os.fspath(path)}: {error}", fix="check which columns the file has") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{os.fspath(path)} is not UTF-8: {error}", fix="convert the file to UTF-8") from error
    except OSError as error:
        raise DataError(f"{os.fspath(path)} cannot be read: {error.strerror}", fix="check the path") from error


def read_text(path: PathLike) -> str:
    """A UTF-8 text with `\\n` as line ends."""
    with opened(path) as stream:
        return stream.read().decode("utf-8").replace("\r\n", "\n")


def read_idx(path: PathLike) -> NDArray[Any]:
    """An IDX file, the format of MNIST: two zero bytes, a type code, the rank, the sizes, then the numbers.

    Returns an array of the file's shape and dtype, in the machine's byte order.
    """
    with opened(path) as stream:
        raw = stream.read()
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_DTYPES:
        raise DataError(f"{os.fspath(path)} is no IDX file", fix="pass a file such as train-images-idx3-ubyte")
    dtype, rank = np.dtype(IDX_DTYPES[raw[2]]), raw[3]
    header, body = raw[4 : 4 + 4 * rank], raw[4 + 4 * rank :]
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4))
    expected = math.prod(shape) * dtype.itemsize
    if len(header) != 4 * rank or len(body) != expected:
        raise DataError(
            f"{os.fspath(path)} holds {len(body)} bytes of numbers, its header {list(shape)} says {expected}",
            fix="fetch the file again, it was cut short or altered",
        )
    return np.frombuffer(body, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def read_cifar10(path: PathLike) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A file of the binary version of CIFAR-10: images uint8 (n, 3, 32, 32) and labels uint8 (n,)."""
    record = 1 + 3 * 32 * 32
    with opened(path) as stream:
        raw = np.frombuffer(stream.read(), np.uint8)
    if len(raw) == 0 or len(raw) % record:
        raise DataError(
            f"{os.fspath(path)} has {len(raw)} bytes, not a multiple of {record}",
            fix="use the binary version, cifar-10-binary.tar.gz, not the Python version",
        )
    rows = raw.reshape(-1, record)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def read_rows(path: PathLike, columns: int, delimiter: str = ",") -> list[list[str]]:
    """Rows of separated text without spaces around fields, blank lines, and comment lines that begin with `|`.

    Triples of a knowledge graph (FB15k, WN18), for example, are three `columns` separated by tabs. DataError if a row
    has another number of columns, with its line.
    """
    return [*each_row(path, columns, delimiter)]


def each_row(path: PathLike, columns: int, delimiter: str, limit: int | None = None) -> Iterator[list[str]]:
    """As `read_rows`, one after the other, at most `limit`."""
    none = True
    with opened(path) as stream:
        lines = csv.reader(io.TextIOWrapper(stream, "utf-8", newline=""), delimiter=delimiter, quoting=csv.QUOTE_NONE)
        filled = (row for row in lines if any(row) and not row[0].startswith("|"))
        for row in itertools.islice(filled, limit):
            if len(row) != columns:
                raise DataError(
                    f"{os.fspath(path)}, line {lines.line_num}: {len(row)} fields, expected {columns}",
                    fix=f"each line needs {columns} fields separated by {delimiter!r}",
                )
            none = False
            yield [field.strip() for field in row]
    if none:
        raise DataError(f"{os.fspath(path)} has no rows", fix="check the file")


def read_table(path: PathLike) -> dict[str, list[str]]:
    """A comma-separated table with a header line, as text, column by column."""
    with opened(path) as stream:
        header = stream.readline().decode("utf-8").strip()
    names = [name.strip() for name in header.split(",")]
    _, *rows = read_rows(path, len(names))
    return {name: list(column) for name, column in zip(names, zip(*rows))} if rows else {name: [] for name in names}


def numbers(column: Sequence[str], name: str, dtype: str = "float32") -> NDArray[Any]:
    """A text column as numbers. DataError, with the column's name and the text, for what is none or does not fit."""
    try:
        read = np.array(column, dtype="float64")
    except ValueError as error:
        raise DataError(f"column {name!r}: {error!s:.80}", fix="check the order of the columns") from error
    with np.errstate(invalid="ignore", over="ignore"):
        made: NDArray[Any] = read.astype(dtype)
    if made.dtype.kind == "i" and (strange := np.flatnonzero(made != read)).size:
        wrong = f"column {name!r}: {column[strange[0]]!r:.60} is no whole number that fits {dtype}"
        raise DataError(wrong, fix="check the order of the columns")
    return made


def read_adult(path: PathLike) -> dict[str, list[str]]:
    """`adult.data` or `adult.test` of the UCI repository, as text, column by column; `?` is missing.

    The full stop after the income in `adult.test` is removed.
    """
    rows = read_rows(path, len(ADULT_COLUMNS))
    table = {name: list(column) for name, column in zip(ADULT_COLUMNS, zip(*rows))}
    table["income"] = [value.rstrip(".") for value in table["income"]]
    strange = set(table["income"]) - {"<=50K", ">50K"}
    if strange:
        raise DataError(f"{os.fspath(path)}: income {min(strange)!r}", fix="the last column is <=50K or >50K")
    return table


def criteo_blocks(path: PathLike, limit: int | None = None) -> Iterator[tuple[NDArray[Any], ...]]:
    """Criteo's `train.txt`: label, 13 counts, 26 hexadecimal categories, tab-separated, any but the label empty.

    Yields up to `BLOCK` rows after the other, as text takes many times the memory of numbers: counts float32 (n, 13),
    NaN where missing; categories int64 (n, 26), -1 where missing; labels int64 (n,).
    """
    rows = each_row(path, 1 + CRITEO_NUMERIC + CRITEO_CATEGORICAL, "\t", limit)
    while block := [*itertools.islice(rows, BLOCK)]:
        yield _criteo_block(path, block)


def _criteo_block(path: PathLike, rows: list[list[str]]) -> tuple[NDArray[Any], ...]:
    try:
        labels = numbers([row[0] for row in rows], "label", "int64")
        counts = [[float(v) if v else np.nan for v in row[1 : 1 + CRITEO_NUMERIC]] for row in rows]
        codes = [[int(v, 16) if v else -1 for v in row[1 + CRITEO_NUMERIC :]] for row in rows]
        categories = np.array(codes, "int64")
    except (ValueError, OverflowError) as error:
        raise DataError(f"{os.fspath(path)}: {error!s:.80}", fix="pass Criteo's train.txt, unaltered") from error
    return np.array(counts, "float32"), categories, labels
