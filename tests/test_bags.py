"""Bags that cannot be meant: what is said of starts, fields and tables that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError

TABLE = ht.constant(np.ones((5, 6), "float32"))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize(
    "starts, said",
    [
        ([1, 2], "bag 0 begins at 1, of 3 entries"),
        ([0, 2, 1], "bag 1 begins at 2, of 3 entries"),
        ([0, 4], "bag 1 begins at 4, of 3 entries"),
        ([-1, 2], "bag 0 begins at -1, of 3 entries"),
        ([], "there are no bags, of 3 entries"),
    ],
)
def test_starts_rise_from_0(starts, said, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    x = ht.placeholder("starts", (len(starts),), "int64")
    bags = ht.embedding_bag(TABLE, [0, 1, 2], x)
    with pytest.raises(ValueRangeError, match=said) as error:
        ht.evaluate(bags, {x: np.array(starts, "int64")})
    assert "never fall, such as np.cumsum(lengths) - lengths" in error.value.fix
    assert "with local_feeds=True whole bags of its own" in error.value.fix


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_ids_and_fields_are_there(kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    with pytest.raises(ValueRangeError, match="index 5 at position .1. lies outside 0 to 4"):
        ht.evaluate(ht.pair_products(TABLE, [0, 5], [0]))
    with pytest.raises(ValueRangeError, match="field 2 at position .1. lies outside 0 to 1"):
        ht.evaluate(ht.field_bags(TABLE, [0, 1], [0, 2], 2, [0]))


@pytest.mark.parametrize(
    "make, kind, said",
    [
        (lambda: ht.bag_ids([0.0], [1]), DTypeError, "wanted integers"),
        (lambda: ht.bag_ids([[0]], [1]), ShapeError, "wanted a vector"),
        (lambda: ht.field_products(TABLE, [0], [0], 4, [0]), ArgumentError, r"f32\[5, 6\], wanted \(v, 4 k\)"),
        (lambda: ht.embedding_bag(TABLE, [0, 1], [0], [1.0, 2.0, 3.0]), ShapeError, r"weights f32\[3\] for 2 ids"),
        (
            lambda: ht.embedding_bag(TABLE, [0, 1], [0], 2.0),
            ShapeError,
            r"weights f32\[\] for 2 ids[\s\S]*\(entries,\)",
        ),
        (lambda: ht.pair_products(TABLE, [0, 1], [0], np.ones((2, 1))), ShapeError, r"weights f64\[2, 1\] for 2 ids"),
        (lambda: ht.embedding_bag(TABLE[:, 0], [0, 1], [0], [[2.0, 1.0]]), ShapeError, r"weights f32\[1, 2\]"),
        (lambda: ht.field_bags(TABLE, [0, 1], 0, 2, [0]), ShapeError, r"fields .* for 2 ids"),
        (lambda: ht.field_products(TABLE, [0, 1], [0, 1, 1], 2, [0]), ShapeError, r"fields i64\[3\] for 2 ids"),
        (lambda: ht.pair_products(TABLE[:, 0], [0, 1], [0]), ArgumentError, r"f32\[5\], wanted \(v, 1 k\)"),
    ],
)
def test_types_that_do_not_fit(make, kind, said):
    with pytest.raises(kind, match=said):
        make()


def test_no_bags_and_no_entries():
    assert ht.evaluate(ht.embedding_bag(TABLE, np.zeros(0, int), np.zeros(0, int))).shape == (0, 6)
    assert not ht.evaluate(ht.embedding_bag(TABLE, np.zeros(0, int), [0, 0])).any()
