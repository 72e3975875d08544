"""Rows for gathering and scattering by indices."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, given, ints, real

NO_SCATTER = "the array API has no scatter"


def added(table: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rows added one after the other."""
    out = table.copy()
    for place in np.ndindex(ids.shape):
        out[ids[place]] += rows[place]
    return out


def hashes(ids: np.ndarray, salts: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 in Python's integers, which never overflow."""
    made = np.zeros(np.broadcast_shapes(ids.shape, salts.shape), "int64")
    for place, i, salt in zip(np.ndindex(made.shape), *(a.ravel().tolist() for a in np.broadcast_arrays(ids, salts))):
        z = (i * 0x9E3779B97F4A7C15 + salt) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        made[place] = (z ^ z >> 31) >> 1
    return made


def put(like: np.ndarray, indices: np.ndarray, values: np.ndarray, axis: int) -> np.ndarray:
    out = np.zeros_like(like)
    for place in np.ndindex(indices.shape):
        target = list(place)
        target[axis] = indices[place]
        out[tuple(target)] += values[place]
    return out


SAMPLES = [
    Sample("take", ht.take, (real(5, 3), ints(2, 4)), lambda x, i: x[i]),
    Sample("take", lambda x, i: ht.take(x, i, axis=1), (real(3, 5, 2), ints(2, 4)), lambda x, i: x[:, i], "middle"),
    Sample("take", lambda x, i: ht.take(x, i, axis=-1), (real(3, 5), given(2)), lambda x, i: x[:, 2], "one"),
    Sample("take", ht.take, (real(5), given(np.array([3, 3, 0], "int32"))), lambda x, i: x[i], "vector-int32"),
    Sample("embedding", ht.embedding, (real(5, 3), ints(2, 4)), lambda x, i: x[i]),
    Sample(
        "scatter_rows",
        OPS["scatter_rows"],
        (real(5, 3), ints(2, 4), real(2, 4, 3)),
        lambda x, i, r: added(x * 0, i, r),
        strict=NO_SCATTER,
    ),
    Sample(
        "scatter_rows",
        lambda x, i, r: OPS["scatter_rows"](x, i, ht.permute_dims(r, (2, 0, 1))),
        (real(5, 2, 2), given(np.array([4, 4, 1], "int32")), real(2, 2, 3)),
        lambda x, i, r: added(x * 0, i, r.transpose(2, 0, 1)),
        "strided",
        strict=NO_SCATTER,
        fixed=True,
    ),
    Sample("scatter_add", ht.scatter_add, (real(5, 4), ints(6), real(6, 4)), added, strict=NO_SCATTER),
    Sample("scatter_add", ht.scatter_add, (real(5), ints(2, 2), real(2, 2)), added, "vector", strict=NO_SCATTER),
    Sample(
        "take_along_axis",
        ht.take_along_axis,
        (real(3, 5), ints(3, 2)),
        lambda x, i: np.take_along_axis(x, i, -1),
    ),
    Sample(
        "take_along_axis",
        lambda x, i: ht.take_along_axis(x, i, axis=1),
        (real(3, 5, 2), ints(3, 4, 2)),
        lambda x, i: np.take_along_axis(x, i, 1),
        "middle",
    ),
    Sample(
        "put_along_axis_add",
        lambda x, i, v: OPS["put_along_axis_add"](x, i, v, axis=1),
        (real(3, 5, 2), ints(3, 4, 2), real(3, 4, 2)),
        lambda x, i, v: put(x, i, v, 1),
        strict=NO_SCATTER,
    ),
    Sample("within", lambda i: OPS["within"](i, size=5), (ints(2, 3),), lambda i: i, order=0),
    Sample("id_hashes", OPS["id_hashes"], (ints(2, 3), ints(3)), hashes, order=0, strict="NumPy shifts words"),
    Sample("one_hot", lambda i: ht.one_hot(i, 5), (ints(2, 3),), lambda i: np.eye(5)[i], order=0),
    Sample(
        "one_hot", lambda i: ht.one_hot(i, 5, dtype="bool"), (ints(4),), lambda i: np.eye(5)[i] == 1, "bool", order=0
    ),
]
