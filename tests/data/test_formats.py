"""The readers on tiny files, written here in the true public formats; and on damaged ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetu.core.errors import DataError
from hetu.data import formats


def idx(array: np.ndarray) -> bytes:
    code = {"u1": 0x08, "i2": 0x0B, "f4": 0x0D}[array.dtype.str[1:]]
    big_endian = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + big_endian


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx(tmp_path: Path, dtype: str, pack) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "a").write_bytes(pack(idx(array)))
    got = formats.read_idx(tmp_path / "a")
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype


def test_cifar10(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    labels = np.array([7, 0, 9], np.uint8)
    records = b"".join(bytes([y]) + x.tobytes() for x, y in zip(images, labels))
    (tmp_path / "b.bin").write_bytes(records)
    x, y = formats.read_cifar10(tmp_path / "b.bin")
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, labels)


def test_triples_keep_spaces_inside_names(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("/m/a\tborn in\tNew York\nb\tr\tc\n\n")
    assert formats.read_rows(tmp_path / "t.txt", 3, "\t") == [["/m/a", "born in", "New York"], ["b", "r", "c"]]


def test_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a, b\r\n1, x\r\n2, y\r\n")
    assert formats.read_table(tmp_path / "t.csv") == {"a": ["1", "2"], "b": ["x", "y"]}


ADULT = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, ?, "


def test_adult_test_file_has_a_comment_and_full_stops(tmp_path: Path) -> None:
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{ADULT}<=50K.\n{ADULT}>50K.\n\n")
    table = formats.read_adult(tmp_path / "adult.test")
    assert table["income"] == ["<=50K", ">50K"]
    assert table["native_country"] == ["?", "?"] and table["hours_per_week"] == ["40", "40"]


def test_criteo(tmp_path: Path) -> None:
    counts = ["1", "-2", ""] + ["5"] * 10
    categories = ["68fd1e64", ""] + ["ffffffff"] * 24
    (tmp_path / "train.txt").write_text("\n".join("\t".join([y, *counts, *categories]) for y in "01") + "\n")
    ((x, c, y),) = formats.criteo_blocks(tmp_path / "train.txt")
    np.testing.assert_array_equal(x[0], [1, -2, np.nan] + [5] * 10)
    np.testing.assert_array_equal(c[0], [0x68FD1E64, -1] + [0xFFFFFFFF] * 24)
    np.testing.assert_array_equal(y, [0, 1])
    ((_, _, first),) = formats.criteo_blocks(tmp_path / "train.txt", limit=1)
    assert len(first) == 1


def triples(path: Path) -> list[list[str]]:
    return formats.read_rows(path, 3, "\t")


def clicks(path: Path) -> list[Any]:
    return [*formats.criteo_blocks(path)]


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        (formats.read_idx, b"", "no IDX file"),
        (formats.read_idx, b"\x89PNG....", "no IDX file"),
        (formats.read_idx, idx(np.zeros((2, 3), "u1"))[:-1], r"5 bytes of numbers, its header \[2, 3\] says 6"),
        (formats.read_idx, idx(np.zeros((2, 3), "u1"))[:9], "header"),
        (formats.read_idx, gzip.compress(idx(np.zeros(300, "u1")), mtime=0)[:-9], "damaged"),
        (formats.read_cifar10, b"\x80\x04\x95pickled", "not a multiple of 3073"),
        (formats.read_cifar10, b"", "0 bytes"),
        (triples, b"a\tb\tc\na b c\n", "line 2: 1 fields, expected 3"),
        (triples, b"", "no rows"),
        (formats.read_table, b"a,b\n1\n", "line 2: 1 fields, expected 2"),
        (formats.read_adult, ADULT.encode() + b"maybe\n", "income 'maybe'"),
        (clicks, "\t".join(["x"] + ["1"] * 39).encode(), "'x'"),
        (clicks, "\t".join(["1"] * 39 + ["f" * 17]).encode(), "too large"),
        (clicks, "\t".join(["1"] * 39 + ["x" * 999]).encode(), "base 16: 'x{9,60}(?!x)"),
        (formats.read_text, b"\xff\xfe", "not UTF-8"),
        (triples, b"\xff\tb\tc\n", "not UTF-8"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if not isinstance(value, str) else value,
)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, reader, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        reader(tmp_path / "file")
    assert caught.value.fix


def test_an_absent_file_and_a_text_among_numbers_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere cannot be read"):
        formats.read_text(tmp_path / "nowhere")
    with pytest.raises(DataError, match="column 'age': .*'old'"):
        formats.numbers(["1", "old"], "age")


@pytest.mark.parametrize("text", ["nan", "inf", "-1e400", "2.5", "9" * 30, "1e19"])
def test_what_is_no_whole_number_is_not_made_one(text) -> None:
    with pytest.raises(DataError, match="column 'time': '.* is no whole number that fits int64"):
        formats.numbers(["1", text], "time", "int64")
    assert formats.numbers(["1", "-3e2"], "time", "int64").tolist() == [1, -300]
