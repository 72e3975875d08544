"""Methods that store a table in fewer bits: whole numbers times a scale, or numbers of rows of small codebooks.

Forward, a rounded number is what is stored; backward it is the number that was rounded (straight-through: Y. Bengio et
al., 2013). Training keeps the numbers that are rounded in float32, so it takes as much as the whole table and more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import if_training, stop_gradient
from ..ranges import Positive, Range, Share
from .method import Arrays, Method, Vectors, Weights


def straight(rounded: Node, x: Node) -> Node:
    """`rounded`, to the last bit, with the gradient of `x`."""
    return stop_gradient(rounded) + (x - stop_gradient(x))


@dataclass(frozen=True)
class Fixed(Method):
    """Whole numbers of 8 or 16 bits times one scale, fixed beforehand: numbers from -most to `most`. Others are cut.

    B. Jacob et al., "Quantization and Training of Neural Networks", CVPR 2018, section 3.
    """

    bits: Annotated[int, Range(2, 16)] = 8
    most: Positive = 1.0

    def cost(self, table: Vectors, size: int) -> float:
        return table.count * table.features * self._kind.itemsize + 4

    @property
    def _kind(self) -> np.dtype:
        return np.dtype("int8" if self.bits <= 8 else "int16")

    @property
    def _end(self) -> int:
        return (1 << self.bits - 1) - 1

    def parts(self, table: Vectors) -> dict[str, Weights]:
        scale = Weights(np.array(self.most / self._end, "float32"), (), trained=False)
        return {"weight": table.rows(table.count), "scale": scale}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        x = ops.clip(ops.embedding(parts["weight"], ids) / parts["scale"], min=-self._end, max=self._end)
        return straight(ops.round(x), x) * parts["scale"]

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        whole = np.clip(np.round(values["weight"] / values["scale"]), -self._end, self._end)
        return {"weight": whole.astype(self._kind), "scale": values["scale"]}

    def read(self, table: Vectors, stored: Mapping[str, Node], ids: Node) -> Node:
        return ops.astype(ops.embedding(stored["weight"], ids), "float32") * stored["scale"]


@dataclass(frozen=True)
class Learned(Fixed):
    """Whole numbers of 8 bits times a learned scale of each row, rounded at random in training: ALPT.

    S. Li et al., "Adaptive Low-Precision Training for Embeddings in CTR Prediction", AAAI 2023, eq. 3 and 8; the
    gradient of a scale is that of S. Esser et al., "Learned Step Size Quantization", ICLR 2020, eq. 3. Scales are
    learned as logarithms. There whole numbers are kept in training, too; here it keeps float32.
    """

    def cost(self, table: Vectors, size: int) -> float:
        return table.count * (table.features * self._kind.itemsize + 4)

    def parts(self, table: Vectors) -> dict[str, Weights]:
        scale = Weights(math.log(0.032 / math.sqrt(self._end)), (table.count, 1))
        return {"weight": table.rows(table.count), "scale": scale}

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        scale = ops.exp(ops.embedding(parts["scale"], ids))
        x = ops.clip(ops.embedding(parts["weight"], ids) / scale, min=-self._end, max=self._end)
        chance = ops.minimum(ops.floor(x + ops.uniform(x.shape)), float(self._end))
        return straight(if_training(chance, ops.round(x)), x) * scale

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        return super().stored(table, values | {"scale": np.exp(values["scale"])})

    def read(self, table: Vectors, stored: Mapping[str, Node], ids: Node) -> Node:
        return ops.astype(ops.embedding(stored["weight"], ids), "float32") * ops.embedding(stored["scale"], ids)


@dataclass(frozen=True)
class ProductCodes(Method):
    """Parts of a vector are rows of codebooks, of which each id stores the numbers: DPQ.

    T. Chen et al., "Differentiable Product Quantization", ICML 2020, section 2.3 (DPQ-VQ): the rows nearest to a query
    that each id has in training. Backward both have the gradient of the vector, where the paper also pulls rows to
    queries. As many codes as half of the budget holds, and then as many parts as there is room for.
    """

    codes: Annotated[int, Range(2, 256)] = 256

    def _bytes(self, table: Vectors, books: int, codes: int) -> int:
        return table.count * books + codes * table.row

    def cost(self, table: Vectors, size: int) -> float:
        return self._bytes(table, 1, 2)

    def _sizes(self, table: Vectors) -> tuple[int, int]:
        """Parts of a vector, and codes of each."""
        codes = self.codes
        while codes > 2 and max(2 * codes * table.row, self._bytes(table, 1, codes)) > table.budget:
            codes //= 2
        books = [n for n in range(1, table.features + 1) if table.features % n == 0]
        return max((n for n in books if self._bytes(table, n, codes) <= table.budget), default=1), codes

    def parts(self, table: Vectors) -> dict[str, Weights]:
        books, codes = self._sizes(table)
        return {
            "query": table.rows(table.count),
            "values": Weights(table.init, (books, codes, table.features // books)),
        }

    def _barred(self, table: Vectors, ids: Any, codes: Any) -> Any:
        """What the likeness of each code loses, (..., 1, codes): much where the id does not have it."""
        return 0.0

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        values, query = parts["values"], ops.embedding(parts["query"], ids)
        books, codes, width = values.shape
        rows = ops.reshape(stop_gradient(query), (*ids.shape, books, 1, width))
        lengths = 0.5 * ops.sum(ops.square(values), axis=-1)  # the most like code is the nearest
        like = ops.squeeze(rows @ ops.matrix_transpose(values), axis=-2) - lengths
        numbers = ops.argmax(stop_gradient(like - self._barred(table, ids, codes)), axis=-1)
        return self._of(table, values, numbers) + (query - stop_gradient(query))

    def _numbers(self, table: Vectors, values: Arrays) -> np.ndarray:
        """(count, books): the code of each part."""
        books, _, width = values["values"].shape
        query, book = values["query"].reshape(table.count, books, width), values["values"]
        like = [query[:, k] @ book[k].T - 0.5 * np.square(book[k]).sum(axis=1) for k in range(books)]
        return np.stack([np.argmax(each, axis=1) for each in like], axis=1)

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        return {"numbers": self._numbers(table, values).astype("uint8"), "values": values["values"]}

    def read(self, table: Vectors, stored: Mapping[str, Node], ids: Node) -> Node:
        return self._of(table, stored["values"], ops.embedding(stored["numbers"], ids))

    def _of(self, table: Vectors, values: Node, numbers: Node) -> Node:
        books, codes, width = (int(size) for size in values.shape)
        places = ops.astype(numbers, "int64") + np.arange(books) * codes
        rows = ops.take(ops.reshape(values, (books * codes, width)), places)
        return ops.reshape(rows, (*numbers.shape[:-1], table.features))


@dataclass(frozen=True)
class GranularCodes(ProductCodes):
    """As DPQ, but ids that occur seldom have the first 16 codes only, whose numbers take 4 bits: MGQE.

    W.-C. Kang et al., "Learning Multi-granular Quantized Embeddings", WWW 2020, section 3.3 (shared codebooks).
    `head` is the share of ids that have all codes.
    """

    head: Share = 0.1
    ranked: ClassVar[bool] = True
    FEW: ClassVar[int] = 16

    def _first(self, table: Vectors) -> int:
        return max(1, int(self.head * table.count))

    def _bytes(self, table: Vectors, books: int, codes: int) -> int:
        first = self._first(table)
        return first * books + (table.count - first) * books // 2 + 1 + codes * table.row

    def _barred(self, table: Vectors, ids: Any, codes: Any) -> Any:
        seldom = ops.reshape(ids >= self._first(table), (*ids.shape, 1, 1))
        return ops.where(ops.logical_and(seldom, np.arange(codes) >= self.FEW), 1e9, 0.0)

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        first, few = self._first(table), values["values"][:, : self.FEW]
        often = self._numbers(table, values)[:first]
        seldom = self._numbers(table, values | {"values": few})[first:].reshape(-1)
        pairs = np.append(seldom, np.zeros(2 - seldom.size % 2, int)).reshape(-1, 2)  # one at least, so never none
        packed = (pairs[:, 0] + self.FEW * pairs[:, 1]).astype("uint8")
        return {"often": often.astype("uint8"), "seldom": packed, "values": values["values"]}

    def read(self, table: Vectors, stored: Mapping[str, Node], ids: Node) -> Node:
        books, first = int(stored["values"].shape[0]), self._first(table)
        places = ops.expand_dims(ids - first, axis=-1) * books + np.arange(books)
        inside = ops.maximum(places, 0)
        pair = ops.astype(ops.take(stored["seldom"], inside // 2), "int64")
        few = ops.where(ops.equal(inside % 2, 1), pair // self.FEW, pair % self.FEW)
        often = ops.astype(ops.take(stored["often"], ops.minimum(ids, first - 1)), "int64")
        return self._of(table, stored["values"], ops.where(places >= 0, few, often))
