"""The table of methods of compressed tables. A new method is a row here and inherits every check of `test_methods.py`.

A row says what the vector of an id is, in plain NumPy, of the values of the parts that training has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import hetu as ht
from hetu.embed.method import Method

from ..samples.index import hashes as splitmix

Vector = Callable[[Any, dict[str, np.ndarray], int], np.ndarray]  # of the layer, the parts, and an id


@dataclass(frozen=True)
class Row:
    """`vector` is the oracle; `least` the least bytes for 300 x 8, counted by hand; `straight` has a gradient that is
    not that of its values; `settles` where something is done between steps; `table` where servers keep rows of it;
    `chance` how far rounding by chance, which follows from the places of nodes, may move values."""

    name: str
    vector: Vector
    least: int
    straight: bool = False
    settles: bool = False
    table: bool = True
    chance: float = 0.0


def hashes(i: int, size: int, *seed: int, functions: int = 1) -> list[int]:
    salts = np.random.default_rng(seed).integers(1 << 62, size=functions)
    return [int(h) % size for h in splitmix(np.array([i]), salts)]


def blocks_of(count: int, blocks: int) -> list[tuple[int, int]]:
    """Each four times as large as the one before; none is empty."""
    ends = [round(count * (4**k - 1) / (4**blocks - 1)) for k in range(blocks + 1)]
    return [pair for pair in pairwise(ends) if pair[0] < pair[1]]


def quotient_remainder(layer, v, i):
    m = len(v["remainder"])
    return v["quotient"][i // m] * v["remainder"][i % m]


def robe(layer, v, i):
    size = len(v["array"])
    (first,), (sign,) = hashes(i, size, 0, 0), hashes(i, 2, 0, 1)
    return np.array([v["array"][(first + j) % size, 0] for j in range(8)]) * (2 * sign - 1)


def dhe(layer, v, i):
    x = 2 * np.array(hashes(i, 2**24, 0, functions=len(v["up"]))) / 2**24 - 1
    hidden = x @ v["up"] + v["up_bias"]
    return hidden * np.tanh(np.log1p(np.exp(hidden))) @ v["down"] + v["down_bias"]


def tt_rec(layer, v, i):
    n1, n2, n3 = (len(v[f"core{k}"]) for k in range(3))
    rank = v["core2"].shape[1] // 2
    assert n1 * n2 * n3 >= 300
    a, b, c = v["core0"].reshape(n1, 2, rank), v["core1"].reshape(n2, rank, 2, rank), v["core2"].reshape(n3, rank, 2)
    return np.einsum("ar,rbs,sc->abc", a[i // (n2 * n3)], b[i // n3 % n2], c[i % n3]).ravel()


def dedup(layer, v, i):
    rows = len(v["rows"]) // len(v["places"])
    return v["rows"].reshape(-1, rows, 8)[v["places"][i // rows], i % rows]


def whole(bits, scale):
    end = 2 ** (bits - 1) - 1
    return lambda layer, v, i: np.clip(np.round(v["weight"][i] / scale(v, i)), -end, end) * scale(v, i)


def dpq(layer, v, i, few=None):
    books, _, width = v["values"].shape
    parts = v["query"][i].reshape(books, width)
    near = [np.square(book[:few] - part).sum(axis=1).argmin() for book, part in zip(v["values"], parts)]
    return np.concatenate([book[k] for book, k in zip(v["values"], near)])


def adaptive(layer, v, i):
    rows = len(v["weight"])
    own = rows if rows == 300 else int(0.75 * (rows - 1))
    return v["weight"][i if i < own else own + hashes(i, rows - own, 0)[0]]


def mde(layer, v, i):
    k = next(k for k, (_, last) in enumerate(blocks_of(300, 4)) if i < last)
    row = v[f"block{k}"][i - blocks_of(300, 4)[k][0]]
    return row @ v.get(f"matrix{k}", np.eye(8))


def pep(layer, v, i):
    w, cut = v["weight"][i], 1 / (1 + np.exp(-v["threshold"]))
    return np.where((np.abs(w) > cut) & v["kept"][i], w - np.sign(w) * cut, 0)


def autosrh(layer, v, i):
    block = next(k for k, (_, last) in enumerate(blocks_of(300, 6)) if i < last)
    return v["weight"][i] * v["alpha"][block] * v["kept"][block]


def cafe(layer, v, i):
    buckets, slots = v["owners"].shape
    bucket, own = hashes(i, buckets, 0)[0], buckets * slots
    if i in v["owners"][bucket]:
        return v["rows"][bucket * slots + [*v["owners"][bucket]].index(i)]
    return v["rows"][own + hashes(i, len(v["rows"]) - own, 0, 1)[0]]


# fmt: off
ROWS = [
    Row("hash", lambda layer, v, i: v["weight"][i % len(v["weight"])], 32),
    Row("quotient_remainder", quotient_remainder, (18 + 17) * 32),
    Row("robe", robe, 32),
    Row("dhe", dhe, 4 * (1 + 1 + 8 + 8), table=False),
    Row("tt_rec", tt_rec, 4 * (7 * 2 + 7 * 2 + 7 * 2)),
    Row("dedup", dedup, 2 * 75 + 4 * 32, settles=True),
    Row("int8", whole(8, lambda v, i: v["scale"]), 2404, straight=True),
    Row("int16", whole(16, lambda v, i: v["scale"]), 4804, straight=True),
    Row("alpt", whole(8, lambda v, i: np.exp(v["scale"][i])), 3600, straight=True, chance=0.01),
    Row("dpq", dpq, 300 + 2 * 32, straight=True),
    Row("mgqe", lambda layer, v, i: dpq(layer, v, i, 16 if i >= 30 else None), 30 + 135 + 2 * 32, straight=True),
    Row("adaptive", adaptive, 64),
    Row("mde", mde, 4 * 300 + 4 * 32),
    Row("deeplight", lambda layer, v, i: v["weight"][i], 2 * 1 + 6, settles=True),
    Row("pep", pep, 2 * 1 + 6, settles=True),
    Row("autosrh", autosrh, 2 * 1 + 6, settles=True),
    Row("cafe", cafe, 4 * 36 + 32, settles=True),
]
# fmt: on


def built(name: str | Method, ratio: float = 0.5, size: tuple[int, int] = (300, 8), **more: Any) -> ht.embed.Embedding:
    """A table in a scope of its own, so that each has the same names."""
    with ht.scope("model"):
        return ht.embed.Embedding(*size, name, ratio=ratio, **{"name": "table", **more})
