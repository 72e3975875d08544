"""ArrayDataset, TextData and windows: what they hand out, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import AxisError, DataError
from hetu.data import ArrayDataset, BagDataset, TextData, sliding_windows


def test_rows_come_as_one_array_a_column() -> None:
    data = ArrayDataset(np.arange(12).reshape(4, 3), [4, 5, 6, 7], names=("x", "y"))
    x, y = data[np.array([3, 0])]
    np.testing.assert_array_equal(x, [[9, 10, 11], [0, 1, 2]])
    np.testing.assert_array_equal(y, [7, 4])
    assert len(data) == 4


INDEXED = {  # of four rows each
    "ArrayDataset": ArrayDataset(np.arange(12).reshape(4, 3), [4, 5, 6, 7]),
    "BagDataset": BagDataset([7, 2, 2, 5], np.ones(4), [3, 0, 1, 0], [4, 5, 6, 7]),
}
each = pytest.mark.parametrize("name", INDEXED)


def test_every_data_set_with_rows_by_position_is_looked_at() -> None:
    shown = {name: vars(ht.data)[name] for name in ht.data.__all__}
    assert {name for name, made in shown.items() if "__getitem__" in vars(made) and made is not ht.data.Dataset} == {
        *INDEXED
    }


@each
@pytest.mark.parametrize("rows", [2, -1, np.uint8(3), np.array(1), [], [-4, 3, 3], slice(1, 9), np.arange(4) > 1, ...])
def test_rows_are_those_that_numpy_means(name: str, rows) -> None:
    labels = INDEXED[name][rows][-1]
    np.testing.assert_array_equal(np.atleast_1d(labels), np.atleast_1d(np.arange(4, 8)[rows]))


@each
@pytest.mark.parametrize(
    "rows",
    [
        4, -5, [0, 4], np.array([-5]), 10**30, 1.0, [0.5], np.float32(1), "x", ["a"], {1}, None, True, (0, 1), [[0, 1]],
        [[0], [1, 2]], [True, False], np.ones(5, bool), slice(0.5, 2),
    ],
    ids=repr,
)  # fmt: skip
def test_rows_that_are_not_there_are_told(name: str, rows) -> None:
    with pytest.raises(AxisError, match="^rows .* of a data set of 4 rows: ") as caught:
        INDEXED[name][rows]
    assert caught.value.fix and caught.value.site.code.co_filename == __file__


def test_a_data_set_is_frozen() -> None:
    data = ArrayDataset([1, 2], info={"classes": ("a",)})
    with pytest.raises(AttributeError, match="frozen"):
        data.names = ("z",)
    with pytest.raises(TypeError):
        data.info["classes"] = ()


def test_split_parts_are_disjoint_complete_and_repeatable() -> None:
    data = ArrayDataset(np.arange(101), names=("x",), info={"k": 1})
    first, second = data.split(0.7, seed=3)
    assert (len(first), len(second)) == (71, 30)
    assert first.names == ("x",) and second.info == {"k": 1}
    np.testing.assert_array_equal(np.sort(np.concatenate([first.arrays[0], second.arrays[0]])), np.arange(101))
    np.testing.assert_array_equal(first.arrays[0], data.split(0.7, seed=3)[0].arrays[0])
    assert not np.array_equal(first.arrays[0], data.split(0.7, seed=4)[0].arrays[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrayDataset(), "without columns"),
        (lambda: ArrayDataset([]), "without rows"),
        (lambda: ArrayDataset([1, 2], [1]), "c0 has 2, c1 has 1"),
        (lambda: ArrayDataset(3.0), "single number"),
        (lambda: ArrayDataset([1], names=("a", "b")), "2 names for 1 columns"),
        (lambda: ArrayDataset([1, 2]).take(3), "take\\(3\\)"),
        (lambda: ArrayDataset([1, 2]).split(1.0), "one part empty"),
        (lambda: TextData.of(""), "empty text"),
        (lambda: TextData.of("abc").encode("abd"), "'d' is not among the 3"),
        (lambda: TextData.of("abc").take(4), r"take\(4\) of 3 characters"),
        (lambda: TextData.of("abc").decode([3]), "of a vocabulary of 3 characters"),
        (lambda: TextData.of("abc").decode([-1]), "of a vocabulary of 3 characters"),
        (lambda: sliding_windows([1, 2], 3), "series of 2 steps"),
    ],
)
def test_mistakes_are_named_with_a_fix(make, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert caught.value.fix


def test_text_codes_round_trip_beyond_ascii() -> None:
    text = TextData.of("naïve — Ω𝛼")
    assert text.decode(text.codes) == "naïve — Ω𝛼"
    assert text.codes.dtype == np.int64 and text.vocabulary == "".join(sorted(set("naïve — Ω𝛼")))


def test_text_keeps_a_given_vocabulary_in_its_order() -> None:
    np.testing.assert_array_equal(TextData.of("abc", "cab").codes, [1, 2, 0])


def test_text_windows_predict_the_next_character() -> None:
    text = TextData.of("abcdefghij")
    x, t = text.windows(4)[:]
    np.testing.assert_array_equal(x, [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(t, x + 1)
    assert len(text.windows(4, stride=1)) == 6


def test_sliding_windows_of_a_multivariate_series() -> None:
    series = np.arange(10.0).reshape(5, 2)
    windows = sliding_windows(series, 3, stride=2)
    np.testing.assert_array_equal(windows, [series[0:3], series[2:5]])
