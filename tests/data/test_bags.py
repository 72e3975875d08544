"""Bags of ids from files and in batches: what comes back, what is rounded up, and what cannot be read."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError
from hetu.data import BagDataset, DataLoader, libsvm

IDS, LENGTHS = [7, 2, 2, 5, 0], [3, 0, 1, 1]


def bags(**changes):
    columns = {"ids": IDS, "weights": np.arange(5.0), "lengths": LENGTHS, "labels": [1, 0, 1, 0]}
    return BagDataset(**columns | changes)


def test_batches_are_the_rows():
    data, rng = bags(fields=[0, 1, 2, 0, 1]), np.random.default_rng(0)
    for rows in (np.array([2, 0, 1]), [1], slice(None), 3, rng.integers(0, 4, 9)):
        ids, weights, fields, starts, labels = data[rows]
        wanted = np.atleast_1d(np.arange(4)[rows])
        assert len(ids) == len(weights) == len(fields) and labels.tolist() == data.labels[wanted].tolist()
        ends = [*starts[1:], sum(LENGTHS[i] for i in wanted)]
        first = np.cumsum([0, *LENGTHS])
        for i, start, end in zip(wanted, starts, ends):
            assert ids[start:end].tolist() == IDS[first[i] : first[i + 1]]
            assert weights[start:end].tolist() == [*range(first[i], first[i + 1])]
        assert not weights[ends[-1] :].any() and {*ids[ends[-1] :]} <= {*ids[: ends[-1]][-1:]}


def test_few_sizes_of_batches():
    rng = np.random.default_rng(0)
    lengths = rng.poisson(40, 3000)
    data = BagDataset(rng.integers(0, 99, lengths.sum()), np.ones(lengths.sum()), lengths, rng.random(3000))
    sizes = {len(batch[0]) for batch in DataLoader(data, 100, shuffle=True)}
    assert len(sizes) <= 3


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"weights": [1.0]}, "1 weights of 5.*one for each"),
        ({"fields": [1]}, "1 fields of 5.*integers from 0 on, one for each"),
        ({"ids": [1.0] * 5}, r"ids are float64\[5\].*pass a vector of integers"),
        ({"weights": [1, 2, np.nan, 4, 5]}, "weights have nan at 2.*finite in float32"),
        ({"labels": [1, 0, 1, 1e39]}, r"labels have 1e\+39 at 3"),
        ({"lengths": [3, 0, 1]}, "4 labels of 3"),
        ({"lengths": [3, 0, 1, 2]}, "lengths add up to 6; there are 5 ids"),
        ({"lengths": [6, -2, 1, 0]}, "lengths have -2 at 1"),
        ({"lengths": [2**63 - 1, 2**63 - 1, 7, 0]}, "lengths add up to 18446744073709551621"),  # to 5 in 64 bits
        ({"fields": [0, 1, -1, 0, 0]}, "fields have -1 at 2.*integers from 0 on"),
        ({"ids": [7, 2, 2, 5, -1]}, "ids have -1 at 4.*integers from 0 on"),
        ({"count": 7}, "id 7 of 7"),
        ({"lengths": [], "labels": []}, "no bags"),
        ({"ids": np.array(IDS, "u8") + (1 << 63)}, "ids have 9223372036854775815 at 0"),
    ],
)
def test_arrays_that_do_not_fit(changes, said):
    with pytest.raises(DataError) as error:
        bags(**changes)
    assert re.search(said, str(error.value), re.DOTALL)


def test_files_of_libsvm_and_libffm(tmp_path):
    plain, fields = tmp_path / "a.txt", tmp_path / "b.gz"
    plain.write_text("+1 1:0.5 12:-2e-1  # two\n\n-1\n0.25 3:1\n")
    fields.write_bytes(gzip.compress(b"1 0:3:1 4:9:0.5\n0 2:0:1\n"))
    data = libsvm(plain)
    assert data.labels.tolist() == [1, -1, 0.25] and data.lengths.tolist() == [2, 0, 1] and data.count == 12
    assert data.ids.tolist() == [0, 11, 2] and data.weights.tolist() == pytest.approx([0.5, -0.2, 1.0])
    data = libsvm(fields, first=0, count=20)
    assert data.fields.tolist() == [0, 4, 2] and data.ids.tolist() == [3, 9, 0] and data.count == 20
    assert len(libsvm(plain, limit=1)) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "has no rows"),
        ("# none\n", "has no rows"),
        ("1 2:3\nx 1:1\n", "line 2: could not convert string to float"),
        ("1 2\n", "line 1: its entries are not all alike"),
        ("1 2:a\n", "line 1: could not convert string to float"),
        ("1 2.5:1\n", "line 1: invalid literal for int"),
        ("0 1:1\n1 1:inf\n", "line 2: weights have inf at 0"),
        ("0 1:1 2:1\n\n1 1:1 3:-1e39\n", "line 3: weights have -1e\\+39 at 1"),
        ("1 1:1\nnan 1:1\n", "line 2: labels have nan at 0"),
        ("1 1_0:1\n", "line 1: _ in a number"),
        ("1 0:1:1\n\n1 -1:1:1\n", "line 3: fields have -1 at 0"),
        ("1 1:2:3:4\n", "line 1: its entries are not all alike"),
        ("1 1:2\n1 0:1:2\n", "line 2: its entries are not all alike"),
        (f"1 {2**70}:1\n", "line 1: "),
        ("0 7:1\n1 0:1\n", "line 2: id 0, where they count from 1(?s:.*)pass first=0"),
        ("0\n1 9:1\n", "line 2: id 8 of 8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, said):
    path = tmp_path / "x.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        libsvm(path, count=8)


def test_wide_models_learn_from_a_file(tmp_path):
    """The sign of a sum of hidden weights, from text to a loss that has fallen."""
    rng, path = np.random.default_rng(0), tmp_path / "clicks.txt"
    hidden = rng.standard_normal(30)
    rows = [rng.integers(0, 30, rng.integers(0, 9)) for _ in range(300)]
    path.write_text("".join(f"{int(hidden[r].sum() > 0)} {' '.join(f'{i % 3}:{i + 1}:1' for i in r)}\n" for r in rows))
    data = libsvm(path, count=30)
    kinds = {"ids": "int64", "weights": "float32", "fields": "int64", "starts": "int64", "labels": "float32"}
    x = {name: ht.placeholder(name, (None,), dtype) for name, dtype in kinds.items()}
    ids, weights, fields, starts, labels = x.values()
    wide = ht.models.wide
    for logits in (
        wide.logistic(ids, starts, 30, weights),
        wide.factorization(ids, starts, 30, weights),
        wide.field_factorization(ids, fields, starts, 30, weights, field_count=3),
        wide.deep_factorization(ids, fields, starts, 30, weights, field_count=3),
    ):
        loss = ht.mean(ht.binary_cross_entropy_with_logits(logits, labels))
        executor = ht.Executor({"train": [loss, ht.optim.Adam(0.05).minimize(loss)]})
        needed = executor.subgraphs["train"].placeholders.values()
        losses = [
            float(executor.run("train", {node: a for node, a in zip(x.values(), batch) if node in needed})[0])
            for _ in range(5)
            for batch in DataLoader(data, 50, shuffle=True)
        ]
        assert np.mean(losses[-6:]) < 0.6 * np.mean(losses[:3])
