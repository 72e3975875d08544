"""Methods that give ids more room the more often they occur. Ids count by popularity: 0 is the one that occurs most.

CAFE alone is not told which these are: it finds out in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import if_training
from ..init import xavier_uniform
from ..ops.sketch import heeded
from ..ranges import AtLeast0, AtLeast1, Fraction, Seed, Share
from .hashed import hashed
from .method import Arrays, Method, Vectors, Weights


@dataclass(frozen=True)
class Adaptive(Method):
    """Ids that occur most have rows of their own, a share `own` of all rows; the others share the rest by a hash.

    AdaptEmb of Zhang et al., VLDB 2024, section 3. Training stores as much.
    """

    own: Share = 0.75
    seed: Seed = 0
    ranked: ClassVar[bool] = True

    def cost(self, table: Vectors, size: int) -> float:
        return (size + 1) * table.row

    def parts(self, table: Vectors) -> dict[str, Weights]:
        return {"weight": table.rows(table.size + 1)}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        own = table.size if table.size + 1 >= table.count else max(1, int(self.own * table.size))
        shared = own + hashed(ids, table.size + 1 - own, self.seed)
        return ops.embedding(parts["weight"], ops.where(ids < own, ids, shared))


def blocks_of(count: int, blocks: int) -> list[tuple[int, int]]:
    """Ids by popularity in blocks, each about four times as large as the one before.

    >>> blocks_of(850, 4)
    [(0, 10), (10, 50), (50, 210), (210, 850)]
    """
    sizes = np.cumsum(4.0 ** np.arange(blocks))
    ends = np.unique(np.round(count * sizes / sizes[-1]).astype(int))
    return [pair for pair in pairwise([0, *ends.tolist()]) if pair[0] < pair[1]]


@dataclass(frozen=True)
class Mixed(Method):
    """Blocks of ids of less popularity have fewer dimensions, which a matrix of the block makes a vector of.

    A. Ginart et al., "Mixed Dimension Embeddings", ISIT 2021, algorithm 1: a dimension in proportion to the mean
    popularity of the block to the power of `temperature`, from 1 up. Training stores as much.
    In each block an id of another one looks up its first or last row, whose gradient is then 0.
    """

    blocks: AtLeast1 = 4
    temperature: AtLeast0 = 0.3
    ranked: ClassVar[bool] = True

    def _dims(self, table: Vectors, size: int) -> list[int]:
        """The dimensions where those of the first block are a thousandth of `size`, were it not for bounds."""
        means = [max(table.popularity[slice(*ends)].mean(), 1e-12) for ends in blocks_of(table.count, self.blocks)]
        return [max(1, min(table.features, int(size / 1000 * (m / means[0]) ** self.temperature))) for m in means]

    def cost(self, table: Vectors, size: int) -> float:
        sizes = [last - first for first, last in blocks_of(table.count, self.blocks)]
        dims = self._dims(table, size)
        return sum(4 * n * d + d * table.row * (d < table.features) for n, d in zip(sizes, dims))

    def limit(self, table: Vectors) -> int:
        return 1_000_000 * table.features

    def parts(self, table: Vectors) -> dict[str, Weights]:
        made = dict[str, Weights]()
        blocks = zip(self._dims(table, table.size), blocks_of(table.count, self.blocks))
        for k, (dim, (first, last)) in enumerate(blocks):
            made[f"block{k}"] = Weights(table.init, (last - first, dim))
            if dim < table.features:
                made[f"matrix{k}"] = Weights(xavier_uniform, (dim, table.features))
        return made

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        vectors = []
        for k, (first, last) in enumerate(blocks_of(table.count, self.blocks)):
            here = ops.astype(ops.logical_and(ids >= first, ids < last), "float32")
            rows = ops.embedding(parts[f"block{k}"], ops.clip(ids - first, min=0, max=last - first - 1))
            rows = rows * ops.expand_dims(here, axis=-1)
            vectors.append(rows @ parts[f"matrix{k}"] if f"matrix{k}" in parts else rows)
        return sum(vectors[1:], vectors[0])


@dataclass(frozen=True)
class Cafe(Method):
    """Ids with the largest gradients have rows of their own, which a sketch finds out in training; others share.

    H. Zhang et al., "CAFE: Towards Compact, Adaptive, and Fast Embedding for Large-scale Recommendation Models",
    SIGMOD 2024, section 3.2 (HotSketch). Each bucket of the sketch has `slots` ids and their scores, which are sums of
    norms of gradients. Between steps scores fade, and an id whose score is above `threshold` times the median takes the
    row of its slot, which begins as the one it shared. A share `own` of the bytes is for rows of their own.
    Training also stores the sketch, 8 or 12 bytes a slot. A layer can be called once. Not on servers: rows move.
    Moments that an optimizer keeps stay with the slot.
    """

    own: Share = 0.7
    slots: AtLeast1 = 4
    threshold: AtLeast0 = 1.0
    fading: Share = 0.98
    seed: Seed = 0

    def _kind(self, table: Vectors) -> str:
        return "int32" if table.count < 2**31 else "int64"

    def _own(self, table: Vectors, size: int) -> int:
        return size * self.slots * (table.row + np.dtype(self._kind(table)).itemsize)

    def cost(self, table: Vectors, size: int) -> float:
        return max(self._own(table, size) / self.own, self._own(table, size) + table.row)

    def _rows(self, table: Vectors) -> tuple[int, int]:
        """Rows of ids of their own, and shared ones."""
        return table.size * self.slots, max(1, (table.budget - self._own(table, table.size)) // table.row)

    def parts(self, table: Vectors) -> dict[str, Weights]:
        size, kind = (table.size, self.slots), self._kind(table)
        sketch = {name: Weights(-1, size, kind, trained=False) for name in ("owners", "keys")}
        return {"rows": table.rows(sum(self._rows(table))), **sketch, "scores": Weights(0, size, trained=False)}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        bucket = hashed(ids, table.size, self.seed)
        owned = ops.equal(ops.take(parts["owners"], bucket), ops.expand_dims(ids, axis=-1))
        slot = bucket * self.slots + ops.argmax(ops.astype(owned, "int32"), axis=-1)
        place = ops.where(ops.any(owned, axis=-1), slot, self._shared(table, ids))
        vectors = ops.embedding(parts["rows"], place)
        if "keys" not in parts:
            return vectors
        return if_training(heeded(vectors, bucket, ids, parts["keys"], parts["scores"]), vectors)

    def _shared(self, table: Vectors, ids: Any) -> Any:
        own, shared = self._rows(table)
        return own + hashed(ids, shared, self.seed, 1)

    def settle(self, table: Vectors, values: Arrays, done: Fraction) -> Arrays:
        keys, scores, owners, rows = (values[name] for name in ("keys", "scores", "owners", "rows"))
        bar = self.threshold * np.median(scores[keys >= 0]) if (keys >= 0).any() else 0.0
        moved = (scores > bar) & (keys >= 0) & (keys != owners)
        rows[np.flatnonzero(moved)] = rows[self._shared(table, keys[moved].astype("int64"))]
        owners[moved] = keys[moved]
        return {"owners": owners, "rows": rows, "scores": scores * np.float32(self.fading)}

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        return {"rows": values["rows"], "owners": values["owners"]}
