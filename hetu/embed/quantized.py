"""Methods that store a table in fewer bits: whole numbers times a scale, or numbers of rows of small codebooks.

Forward, a rounded number is what is stored; backward it is the number that was rounded (straight-through: Y. Bengio et
al., 2013). Training keeps the numbers that are rounded in float32, so it takes as much as the whole table and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import if_training, stop_gradient
from ..ranges import Positive, Range, Share
from .method import Arrays, Lookup, Nodes, Scheme, Types, Vectors, Weights, values_of

Bits = Annotated[int, Range(2, 16)]
FEW = 16  # codes, whose numbers take 4 bits


def fixed(table: Vectors, bits: Bits = 8, most: Positive = 1.0) -> Scheme:
    """Whole numbers of 8 or 16 bits times one scale, fixed beforehand: numbers from -most to `most`. Others are cut.

    B. Jacob et al., "Quantization and Training of Neural Networks", CVPR 2018, section 3.
    """
    end = (1 << bits - 1) - 1
    return _rounded(table, end, Weights(most / end, (), trained=False), lambda parts, ids: parts["scale"], ops.round)


def alpt(table: Vectors, bits: Bits = 8) -> Scheme:
    """Whole numbers of 8 or 16 bits times a learned scale of each row, rounded at random in training.

    S. Li et al., "Adaptive Low-Precision Training for Embeddings in CTR Prediction", AAAI 2023, eq. 3 and 8; the
    gradient of a scale is that of S. Esser et al., "Learned Step Size Quantization", ICLR 2020, eq. 3. Scales are
    logarithms. There whole numbers are kept in training, too; here it keeps float32.
    """
    end = (1 << bits - 1) - 1

    def by_chance(x: Node) -> Node:
        return if_training(ops.minimum(ops.floor(x + ops.uniform(x.shape)), float(end)), ops.round(x))

    scale = Weights(math.log(0.032 / math.sqrt(end)), (table.count, 1))
    return _rounded(table, end, scale, lambda parts, ids: ops.exp(ops.embedding(parts["scale"], ids)), by_chance)


def _rounded(table: Vectors, end: int, scale: Weights, times: Lookup, by: Callable[[Node], Node]) -> Scheme:
    """Whole numbers from -end to end, rounded `by` a function, and what they are multiplied by."""

    def whole(parts: Nodes, ids: Node) -> Node:
        return ops.clip(ops.embedding(parts["weight"], ids) / times(parts, ids), min=-end, max=end)

    def lookup(parts: Nodes, ids: Node) -> Node:
        x = whole(parts, ids)
        return (stop_gradient(by(x)) + (x - stop_gradient(x))) * times(parts, ids)

    def store(values: Arrays) -> Arrays:
        return values | {"weight": np.round(values_of(whole, values, np.arange(table.count))).astype("int16")}

    def read(stored: Nodes, ids: Node) -> Node:
        return ops.astype(ops.embedding(stored["weight"], ids), "float32") * times(stored, ids)

    kind = "int8" if end < 128 else "int16"
    types: Types = {"weight": ((table.count, table.features), kind), "scale": (scale.shape, "float32")}
    return Scheme({"weight": table.rows(table.count), "scale": scale}, lookup, 1, types=types, store=store, read=read)


def dpq(table: Vectors, codes: Annotated[int, Range(2, 256)] = 256, head: Share = 1.0) -> Scheme:
    """Parts of a vector are rows of codebooks, of which each id stores the numbers.

    T. Chen et al., "Differentiable Product Quantization", ICML 2020, section 2.3 (DPQ-VQ): the rows nearest to a query
    that each id has in training. Backward both have the gradient of the vector, where the paper also pulls rows to
    queries. As many codes as half of the budget holds, and then as many parts as there is room for. Where products take
    16 bits, training may take another code of those that are about as near than is stored.

    Ids beyond the share `head` of those that occur most have the first 16 codes only, whose numbers take 4 bits. W.-C.
    Kang et al., "Learning Multi-granular Quantized Embeddings", WWW 2020, section 3.3 (MGQE, shared codebooks).
    """
    books = [n for n in range(1, table.features + 1) if table.features % n == 0]
    first, count, limit = max(1, int(head * table.count)), books[table.size - 1], len(books)
    seldom, width = table.count - first, table.features // count
    while codes > 2 and table.row * codes > min(table.budget / 2, table.budget - first - (seldom + 1) // 2):
        codes //= 2

    def numbers(parts: Nodes, ids: Node) -> Node:
        """The codes (..., count) that are the nearest to the parts of queries."""
        values, shape = stop_gradient(parts["values"]), (*ids.shape, count, 1, width)
        rows = ops.reshape(ops.embedding(parts["query"], ids), shape) @ ops.matrix_transpose(values)
        like = ops.squeeze(rows, axis=-2) - 0.5 * ops.sum(ops.square(values), axis=-1)
        barred = ops.logical_and(ops.reshape(ids >= first, (*ids.shape, 1, 1)), np.arange(codes) >= FEW)
        return ops.argmax(ops.where(barred, -np.inf, like), axis=-1)

    def vectors(values: Node, numbers: Node) -> Node:
        places = ops.astype(numbers, "int64") + np.arange(count) * codes
        rows = ops.take(ops.reshape(values, (count * codes, width)), places)
        return ops.reshape(rows, (*numbers.shape[:-1], table.features))

    def lookup(parts: Nodes, ids: Node) -> Node:
        query = ops.embedding(parts["query"], ids)
        return vectors(parts["values"], numbers(parts, ids)) + (query - stop_gradient(query))

    def store(values: Arrays) -> Arrays:
        found = values_of(numbers, values, np.arange(table.count))
        few = np.append(found[first:], np.zeros(seldom * count % 2, int)).reshape(-1, 2) @ [1, FEW]
        made = {"often": found[:first], "seldom": few, "values": values["values"]}
        return {name: made[name] for name in types}

    def read(stored: Nodes, ids: Node) -> Node:
        found = ops.embedding(stored["often"], ops.minimum(ids, first - 1))
        if seldom:
            places = ops.maximum(ops.expand_dims(ids - first, axis=-1) * count + np.arange(count), 0)
            pair = ops.take(stored["seldom"], places // 2)
            few = ops.where(ops.equal(places % 2, 1), pair // FEW, pair % FEW)
            found = ops.where(ops.expand_dims(ids < first, axis=-1), found, few)
        return vectors(stored["values"], found)

    types: Types = {"often": ((first, count), "uint8"), "values": ((count, codes, width), "float32")}
    types |= {"seldom": (((seldom * count + 1) // 2,), "uint8")} if seldom else {}
    made = {"query": table.rows(table.count), "values": Weights(table.init, (count, codes, width))}
    return Scheme(made, lookup, limit, types=types, store=store, read=read)
