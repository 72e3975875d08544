"""Methods by which ids share numbers that a hash of the id finds. Nothing of the data is known, or looked at.

Hashes are universal: (a id + b) mod p mod size, with numbers that follow from a seed, so that none is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import Node
from ..init import normal, xavier_uniform, zeros
from ..ranges import AtLeast1, Fraction, Seed, Share
from .method import Arrays, Method, Vectors, Weights, smallest

PRIME = 2**31 - 1  # products of two numbers below it fit in int64


def hashed(ids: Any, size: int, *seed: int, functions: int | None = None) -> Any:
    """A number below `size` for each of the ids, a node or an array; by several functions along a new last axis.

    J. Carter, M. Wegman, "Universal classes of hash functions", 1979.
    """
    a, b = np.random.default_rng(seed).integers(1, PRIME, (2, functions or 1))
    if functions is None:
        return (ids % PRIME * int(a[0]) + int(b[0])) % PRIME % size
    return (ops.expand_dims(ids % PRIME, axis=-1) * a + b) % PRIME % size


@dataclass(frozen=True)
class Hash(Method):
    """Row id mod rows: as many rows as there is room for, at ratio 1 one for each id. Training stores as much.

    K. Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
    """

    def cost(self, table: Vectors, size: int) -> float:
        return size * table.row

    def parts(self, table: Vectors) -> dict[str, Weights]:
        return {"weight": table.rows(table.size)}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        return ops.embedding(parts["weight"], ids % table.size)


@dataclass(frozen=True)
class QuotientRemainder(Method):
    """The product of a row by id // m and one by id mod m, a pair that no other id has. Training stores as much.

    H. Shi et al., "Compositional Embeddings Using Complementary Partitions", KDD 2020, algorithm 2. The greatest m for
    which both tables fit; rows of quotients begin near 1.
    """

    def _base(self, table: Vectors, size: int) -> int:
        return math.isqrt(table.count - 1) + size  # m and count / m together are least at the root, and grow from there

    def cost(self, table: Vectors, size: int) -> float:
        m = self._base(table, size)
        return table.row * (m + -(-table.count // m))

    def parts(self, table: Vectors) -> dict[str, Weights]:
        m = self._base(table, table.size)
        quotient = Weights(normal(0.1, 1.0), (-(-table.count // m), table.features))
        return {"quotient": quotient, "remainder": table.rows(m)}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        m = self._base(table, table.size)
        return ops.embedding(parts["quotient"], ids // m) * ops.embedding(parts["remainder"], ids % m)


@dataclass(frozen=True)
class Robe(Method):
    """Slices of one array, of `chunk` numbers each, from where a hash of (id, chunk) says, times a hashed sign.

    A. Desai et al., "Random Offset Block Embedding Array (ROBE)", MLSys 2022, section 2. Training stores as much.
    """

    chunk: AtLeast1 = 8
    seed: Seed = 0

    def cost(self, table: Vectors, size: int) -> float:
        return size * table.row

    def parts(self, table: Vectors) -> dict[str, Weights]:
        return {"array": Weights(table.init, (table.size * table.features, 1))}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        size, chunks = table.size * table.features, -(-table.features // self.chunk)
        first = ops.expand_dims(hashed(ids, size, self.seed, functions=chunks), axis=-1)
        sign = ops.expand_dims(hashed(ids, 2, self.seed, 1, functions=chunks) * 2 - 1, axis=-1)
        places = ops.reshape((first + np.arange(self.chunk)) % size, (*ids.shape, chunks * self.chunk))
        signs = ops.reshape(sign * np.ones(self.chunk, int), (*ids.shape, chunks * self.chunk))
        numbers = ops.squeeze(ops.embedding(parts["array"], places[..., : table.features]), axis=-1)
        return numbers * ops.astype(signs[..., : table.features], "float32")


@dataclass(frozen=True)
class DeepHash(Method):
    """A network that makes vectors of many hashes of the id: no table at all. Training stores as much.

    W.-C. Kang et al., "Learning to Embed Categorical Features without Embedding Tables", KDD 2021 (DHE), section 4:
    numbers even in (-1, 1), and Mish. One hidden layer, as wide as there are hashes; without batch norm.
    """

    widest: AtLeast1 = 256
    seed: Seed = 0

    def cost(self, table: Vectors, size: int) -> float:
        return 4 * (size + table.features) * (size + 1)

    def limit(self, table: Vectors) -> int:
        return self.widest

    def parts(self, table: Vectors) -> dict[str, Weights]:
        width = table.size
        up = {"up": Weights(xavier_uniform, (width, width)), "up_bias": Weights(zeros, (width,))}
        down = Weights(xavier_uniform, (width, table.features))
        return up | {"down": down, "down_bias": Weights(zeros, (table.features,))}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        codes = hashed(ids, PRIME, self.seed, functions=table.size)
        x = ops.astype(codes, "float32") * (2 / PRIME) - 1
        return ops.mish(x @ parts["up"] + parts["up_bias"]) @ parts["down"] + parts["down_bias"]


@dataclass(frozen=True)
class TensorTrain(Method):
    """A product of three small tensors, one by each digit of the id in a mixed base. Training stores as much.

    C. Yin et al., "TT-Rec: Tensor Train Compression for DLRM", MLSys 2021, eq. 3. The highest rank that fits.
    """

    highest: AtLeast1 = 32

    def _shape(self, table: Vectors) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The base, and three factors of the width, each as near to the others as can be."""
        n, f = max(1, round(table.count ** (1 / 3))), table.features
        ways = [(a, b, f // a // b) for a in range(1, f + 1) if f % a == 0 for b in range(1, f + 1) if f // a % b == 0]
        return (n, n, -(-table.count // (n * n))), min(ways, key=sum)

    def _sizes(self, table: Vectors, rank: int) -> list[tuple[int, int]]:
        (n1, n2, n3), (d1, d2, d3) = self._shape(table)
        return [(n1, d1 * rank), (n2, rank * d2 * rank), (n3, rank * d3)]

    def cost(self, table: Vectors, size: int) -> float:
        return 4 * sum(rows * width for rows, width in self._sizes(table, size))

    def limit(self, table: Vectors) -> int:
        return self.highest

    def parts(self, table: Vectors) -> dict[str, Weights]:
        std = (0.02 / table.size) ** (1 / 3)  # so that sums of rank^2 products have 0.02
        return {f"core{k}": Weights(normal(std), shape) for k, shape in enumerate(self._sizes(table, table.size))}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        (_, n2, n3), (d1, d2, d3) = self._shape(table)
        rank, digits = table.size, (ids // (n2 * n3), ids // n3 % n2, ids % n3)
        a, b, c = (ops.embedding(parts[f"core{k}"], digit) for k, digit in enumerate(digits))
        both = ops.reshape(a, (*ids.shape, d1, rank)) @ ops.reshape(b, (*ids.shape, rank, d2 * rank))
        made = ops.reshape(both, (*ids.shape, d1 * d2, rank)) @ ops.reshape(c, (*ids.shape, rank, d3))
        return ops.reshape(made, (*ids.shape, table.features))


@dataclass(frozen=True)
class Dedup(Method):
    """Blocks of rows that are alike become one, in the middle of training, which then goes on with these.

    L. Zhou et al., "Serving Deep Learning Models with Deduplication", VLDB 2022, section 4: blocks in one bucket of
    hashes of projections (M. Datar et al., SCG 2004). Training stores the whole table; not on servers, for they merge
    nothing.

    What is stored of the places of blocks takes half of the budget at most.
    """

    at: Share = 0.5
    seed: Seed = 0

    def _places(self, table: Vectors, size: int) -> tuple[int, int]:
        """How many blocks there are, and the rows of each; at size 1 their places take about as much as one of them."""
        rows = -(-table.count // (math.isqrt(table.count * table.row // 2) + size))
        return -(-table.count // rows), rows

    def cost(self, table: Vectors, size: int) -> float:
        places, rows = self._places(table, size)
        return 2 * max(places * np.dtype(smallest(places)).itemsize, rows * table.row)

    def parts(self, table: Vectors) -> dict[str, Weights]:
        places, rows = self._places(table, table.size)
        numbers = Weights(np.arange(places, dtype=(kind := smallest(places))), (places,), kind, trained=False)
        return {"rows": table.rows(places * rows), "places": numbers}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        _, rows = self._places(table, table.size)
        place = ops.astype(ops.take(parts["places"], ids // rows), "int64")
        return ops.embedding(parts["rows"], place * rows + ids % rows)

    def _room(self, table: Vectors, places: np.ndarray, blocks: np.ndarray) -> int:
        return min(len(places), max(1, int((table.budget - places.nbytes) // blocks[0].nbytes)))

    def settle(self, table: Vectors, values: Arrays, done: Fraction) -> Arrays:
        places, blocks = values["places"], values["rows"].reshape(len(values["places"]), -1)
        if done < self.at or (places != np.arange(len(places))).any():
            return {}
        lines = blocks @ np.random.default_rng(self.seed).normal(size=(blocks.shape[1], 4))
        room = self._room(table, places, blocks)
        for width in max(lines.std(), 1e-9) * 2.0 ** np.arange(-12, 12, 0.25):  # the narrowest buckets that are few
            _, first, of = np.unique(lines // width, axis=0, return_index=True, return_inverse=True)
            if len(first) <= room:
                break
        first, of = (first, of.reshape(-1)) if len(first) <= room else (first[:1], np.zeros(len(places), int))
        means = np.zeros((len(first), blocks.shape[1]))
        np.add.at(means, of, blocks)
        blocks[first] = means / np.bincount(of)[:, None]
        return {"rows": blocks.reshape(-1, table.features), "places": first[of].astype(places.dtype)}

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        kept, places = np.unique(values["places"], return_inverse=True)
        blocks = values["rows"].reshape(len(places), -1)
        kept = np.resize(kept, self._room(table, values["places"], blocks))  # of one size, whatever has been merged
        return {"rows": blocks[kept].reshape(-1, table.features), "places": places.astype(values["places"].dtype)}
