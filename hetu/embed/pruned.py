"""Methods that leave numbers of a table out, by their size or by what a search has found to matter.

Training stores the whole table, and what is left out is 0 there. On servers none settles: to leave the smallest out,
all must be seen; so save, load in one process, and settle there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import ops
from ..core.graph import Node
from ..init import ones
from ..ranges import AtLeast1, Finite, Fraction, Share
from .method import Arrays, Method, Vectors, Weights
from .popular import blocks_of

LOW = 1 << 16  # places in windows of so many, of which each number stores its place in 16 bits


def largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """Which `count` of all numbers are the largest; of equal ones the first."""
    kept = np.zeros(sizes.size, bool)
    kept[np.argsort(-sizes, axis=None, kind="stable")[:count]] = True
    return kept.reshape(sizes.shape)


class Pruned(Method):
    """Numbers stored one by one: 6 bytes each, of which 2 are its place among 65,536."""

    def cost(self, table: Vectors, size: int) -> float:
        return 4 * (-(-table.count * table.features // LOW) + 1) + 6 * size

    def limit(self, table: Vectors) -> int:
        return table.count * table.features

    def parts(self, table: Vectors) -> dict[str, Weights]:
        return {"weight": table.rows(table.count)}

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        flat = values["weight"].reshape(-1)
        places = np.flatnonzero(largest(np.abs(flat), table.size))
        starts = np.searchsorted(places, np.arange(0, flat.size + LOW, LOW)).astype("uint32")
        return {"values": flat[places], "places": (places % LOW).astype("uint16"), "starts": starts}

    def read(self, table: Vectors, stored: Mapping[str, Node], ids: Node) -> Node:
        """Each number is looked for by halves in its window."""
        wanted = ops.expand_dims(ids, axis=-1) * table.features + np.arange(table.features)
        window, low, last = wanted // LOW, wanted % LOW, int(stored["places"].shape[0]) - 1
        first = ops.astype(ops.take(stored["starts"], window), "int64")
        end = until = ops.astype(ops.take(stored["starts"], window + 1), "int64")
        for _ in range(min(LOW, last + 1).bit_length()):
            middle = (first + end) // 2
            before = ops.astype(ops.take(stored["places"], ops.minimum(middle, last)), "int64") < low
            before = ops.logical_and(before, middle < end)
            first, end = ops.where(before, middle + 1, first), ops.where(before, end, middle)
        place = ops.minimum(first, last)
        found = ops.logical_and(ops.equal(ops.astype(ops.take(stored["places"], place), "int64"), low), first < until)
        return ops.where(found, ops.take(stored["values"], place), 0.0)


@dataclass(frozen=True)
class DeepLight(Pruned):
    """The smallest numbers become 0 between steps, ever more of them; until the next time they may grow again.

    W. Deng et al., "DeepLight: Deep Lightweight Feature Interactions", WSDM 2021, algorithm 1: a share R (1 - D^t),
    with D such that 0.99 R is reached at three quarters of training, and R from then on.
    """

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        return ops.embedding(parts["weight"], ids)

    def settle(self, table: Vectors, values: Arrays, done: Fraction) -> Arrays:
        weight, share = values["weight"], 1.0 if done >= 0.75 else 1 - 0.01 ** (done / 0.75)
        count = weight.size - int(share * (weight.size - table.size))
        return {"weight": np.where(largest(np.abs(weight), count), weight, 0)}


@dataclass(frozen=True)
class Pep(Pruned):
    """sign(v) relu(|v| - sigmoid(s)), with a learned threshold s of each dimension; what it makes 0 stays 0.

    S. Liu et al., "Learnable Embedding Sizes for Recommender Systems", ICLR 2021 (PEP), eq. 5. Where a share `at` of
    training is over, what is then the smallest leaves as well, until the rest fits, and training goes on with that;
    the paper stops the search where enough have left, and trains the rest anew.
    """

    first: Finite = -6.0
    at: Share = 0.75

    def parts(self, table: Vectors) -> dict[str, Weights]:
        return super().parts(table) | {"threshold": Weights(self.first, (table.features,))}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        v = ops.embedding(parts["weight"], ids)
        return ops.sign(v) * ops.relu(ops.abs(v) - ops.sigmoid(parts["threshold"]))

    def _soft(self, values: Arrays) -> np.ndarray:
        weight, cut = values["weight"], 1 / (1 + np.exp(-values["threshold"]))
        return np.sign(weight) * np.maximum(np.abs(weight) - cut, 0)

    def settle(self, table: Vectors, values: Arrays, done: Fraction) -> Arrays:
        if done < self.at:
            return {}
        kept = largest(np.abs(self._soft(values)), table.size)
        return {"weight": np.where(kept, values["weight"], 0)}

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        return super().stored(table, {"weight": self._soft(values)})


@dataclass(frozen=True)
class AutoSrh(Pruned):
    """Each block of ids of like popularity weighs its columns, by learned numbers; the columns of least weight leave.

    S. Kong et al., "AutoSrh: An Embedding Dimensionality Search Framework", TKDE 2022, eq. 4 and 8. Weights learn
    from the same batches as vectors. Where a share `at` of training is over, those columns stay that fit, first those
    of the largest weight times the popularity of the block: alone, weights of ids that are seldom seen stay large.
    """

    blocks: AtLeast1 = 6
    at: Share = 0.5
    ranked: ClassVar[bool] = True

    def parts(self, table: Vectors) -> dict[str, Weights]:
        size = len(blocks_of(table.count, self.blocks)), table.features
        return super().parts(table) | {"alpha": Weights(ones, size), "kept": Weights(ones, size, trained=False)}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        ends = np.array([last for _, last in blocks_of(table.count, self.blocks)])
        block = ops.sum(ops.astype(ops.expand_dims(ids, axis=-1) >= ends, "int64"), axis=-1)
        weighs = ops.embedding(parts["alpha"], block) * ops.take(parts["kept"], block)
        return ops.embedding(parts["weight"], ids) * weighs

    def settle(self, table: Vectors, values: Arrays, done: Fraction) -> Arrays:
        if done < self.at or not values["kept"].all():
            return {}
        ends = blocks_of(table.count, self.blocks)
        kept, left = np.zeros_like(values["kept"]), table.size
        loss = np.abs(values["alpha"]) * [[table.popularity[slice(*pair)].mean()] for pair in ends]
        for block, column in zip(*np.unravel_index(np.argsort(-loss, axis=None, kind="stable"), kept.shape)):
            if (size := ends[block][1] - ends[block][0]) <= left:
                kept[block, column], left = 1, left - size
        return {"kept": kept}

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        sizes = np.diff(blocks_of(table.count, self.blocks))[:, 0]
        weighs = np.repeat(values["alpha"] * values["kept"], sizes, axis=0)
        return super().stored(table, {"weight": values["weight"] * weighs})
