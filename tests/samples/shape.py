"""Rows for reshaping, broadcasting, filling, joining and cutting."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, ints, real

VIEWS = [
    Sample("reshape", lambda x: ht.reshape(x, (2, 6)), (real(3, 4),), lambda x: x.reshape(2, 6), fixed=True),
    Sample("reshape", lambda x: ht.reshape(x, (-1, 12)), (real(2, 3, 4),), lambda x: x.reshape(2, 12), "merge"),
    Sample(
        "reshape", lambda x: ht.reshape(x, (-1, 2, 3, 1)), (real(4, 6),), lambda x: x.reshape(4, 2, 3, 1), "take-apart"
    ),
    Sample("reshape", lambda x: ht.reshape(x, ()), (real(1, 1),), lambda x: x.reshape(()), "scalar"),
    Sample(
        "reshape",
        lambda x: ht.reshape(ht.matrix_transpose(x), (-1,)),
        (real(3, 4),),
        lambda x: x.T.reshape(-1),
        "of-transposed",
    ),
    Sample("flatten", lambda x: ht.flatten(x, 1), (real(2, 3, 4),), lambda x: x.reshape(2, 12)),
    Sample("flatten", ht.flatten, (real(2, 3),), lambda x: x.reshape(6), "all"),
    Sample("squeeze", lambda x: ht.squeeze(x, (1, -1)), (real(3, 1, 4, 1),), lambda x: x[:, 0, :, 0]),
    Sample("expand_dims", lambda x: ht.expand_dims(x, (0, -1)), (real(3, 4),), lambda x: x[None, :, :, None]),
]

BROADCASTS = [
    Sample(
        "broadcast_to",
        lambda x: ht.broadcast_to(x, (2, 3, 4)),
        (real(3, 1),),
        lambda x: np.broadcast_to(x, (2, 3, 4)),
    ),
    Sample("broadcast_like", ht.broadcast_like, (real(3, 1), real(2, 3, 4)), lambda x, y: x + np.zeros_like(y)),
    Sample("sum_to_like", ht.sum_to_like, (real(2, 3, 4), real(3, 1)), lambda x, y: x.sum((0, 2))[:, None]),
    Sample("sum_to_like", ht.sum_to_like, (real(5, 3, 4), real(4)), lambda x, y: x.sum((0, 1)), "leading"),
    Sample("sum_to_like", ht.sum_to_like, (real(3, 4), real(3, 4)), lambda x, y: x, "equal"),
    Sample("zeros_like", ht.zeros_like, (real(3, 4),), np.zeros_like, order=0),
    Sample("ones_like", ht.ones_like, (real(3, 4),), np.ones_like, order=0),
    Sample("full_like", lambda x: ht.full_like(x, 2.5), (real(3, 4),), lambda x: np.full_like(x, 2.5), order=0),
    Sample("full", lambda x: x * ht.full((3, 4), 2.0, x.dtype), (real(3, 4),), lambda x: x * 2),
    Sample("arange", lambda x: x * ht.arange(1.0, 3.0, 0.5, x.dtype), (real(4),), lambda x: x * [1, 1.5, 2, 2.5]),
    Sample(
        "arange",
        lambda x: x * ht.arange(x.shape[0], dtype=x.dtype),
        (real(4),),
        lambda x: x * np.arange(4),
        "unknown-size",
    ),
    Sample("tril", lambda x: ht.tril(x, 1), (real(2, 3, 4),), lambda x: np.tril(x, 1)),
    Sample("triu", lambda x: ht.triu(x, -1), (real(2, 3, 4),), lambda x: np.triu(x, -1)),
]

JOINS = [
    Sample(
        "concat",
        lambda *xs: ht.concat(xs, axis=0),
        (real(2, 3), real(1, 3), real(4, 3)),
        lambda *xs: np.concatenate(xs),
    ),
    Sample(
        "concat",
        lambda *xs: ht.concat(xs, axis=-1),
        (real(2, 3), real(2, 1)),
        lambda *xs: np.concatenate(xs, -1),
        "last-axis",
    ),
    Sample("concat", lambda x, i: ht.concat([x, i]), (real(3), ints(2)), lambda x, i: np.append(x, i), "promotes"),
    Sample("stack", lambda *xs: ht.stack(xs, 1), (real(2, 3), real(2, 3)), lambda *xs: np.stack(xs, 1)),
    Sample("split", lambda x: ht.split(x, 2, axis=1), (real(3, 4),), lambda x: np.split(x, 2, 1)),
    Sample("split", lambda x: ht.split(x, [1, 3]), (real(5, 2),), lambda x: np.split(x, [1, 3]), "places"),
    Sample(
        "pad",
        lambda x: ht.pad(x, ((1, 0), (0, 2)), 3.0),
        (real(3, 4),),
        lambda x: np.pad(x, ((1, 0), (0, 2)), constant_values=3.0),
    ),
    Sample("tile", lambda x: ht.tile(x, (3, 1, 2)), (real(2, 3),), lambda x: np.tile(x, (3, 1, 2))),
    Sample("repeat", lambda x: ht.repeat(x, 3, axis=1), (real(2, 3),), lambda x: np.repeat(x, 3, 1)),
    Sample("repeat", lambda x: ht.repeat(x, 2), (real(2, 3),), lambda x: np.repeat(x, 2), "flat"),
    Sample("flip", lambda x: ht.flip(x, 1), (real(2, 3),), lambda x: x[:, ::-1]),
    Sample("flip", ht.flip, (real(2, 3),), lambda x: x[::-1, ::-1], "all"),
    Sample(
        "flip",
        lambda x: ht.flip(x, 2, lengths=[4, 0, 3]),
        (real(3, 2, 4, 2),),
        lambda x: np.stack([np.concatenate([a[:, :n][:, ::-1], a[:, n:]], 1) for a, n in zip(x, [4, 0, 3])]),
        "lengths",
        fixed=True,
    ),
    Sample(
        "sequence_mask",
        lambda n: OPS["sequence_mask"](n, shape=(n.shape[0], 4)),
        (lambda rng: np.array([3, 0, 4]),),
        lambda n: np.arange(4) < n[:, None],
        order=0,
    ),
    Sample("roll", lambda x: ht.roll(x, (1, -2), (0, 1)), (real(3, 4),), lambda x: np.roll(x, (1, -2), (0, 1))),
    Sample("roll", lambda x: ht.roll(x, 5), (real(2, 4),), lambda x: np.roll(x, 5), "flat"),
]


def cut(label: str, key: object, shape: tuple[int, ...] = (5, 4, 3), **options: bool) -> Sample:
    return Sample("getitem", lambda x: x[key], (real(*shape),), lambda x: x[key], label, **options)


CUTS = [
    cut("integer", 1),
    cut("last", -1),
    cut("start", slice(1, None)),
    cut("from-end", slice(-3, -1)),
    cut("step", (slice(None), slice(None, None, 2))),
    cut("unknown-step", slice(1, None, 3)),
    cut("backward", slice(None, None, -1)),
    cut("backward-step", slice(4, 0, -2)),
    cut("backward-to-first", (slice(None), slice(2, None, -2))),
    cut("empty", (slice(None), slice(3, 1))),
    cut("beyond", (..., slice(-9, 9))),
    cut("ellipsis", (0, ..., 2)),
    cut("new", (None, slice(1, 3), None, 2, ..., None)),
    cut("scalar", 2, (4,)),
    Sample("getitem", lambda x: x[: x.shape[0] // 2], (real(4, 3),), lambda x: x[:2], "size-as-bound"),
    Sample(
        "slice_scatter",
        lambda v, like: OPS["slice_scatter"](v, like, key=(slice(1, 5, 2), 0)),
        (real(2, 3), real(6, 2, 3)),
        lambda v, like: _scattered(v),
        fixed=True,
    ),
]


def _scattered(v: np.ndarray) -> np.ndarray:
    out = np.zeros((6, 2, 3))
    out[1:5:2, 0] = v
    return out


SAMPLES = VIEWS + BROADCASTS + JOINS + CUTS
