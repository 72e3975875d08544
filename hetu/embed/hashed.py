"""Methods by which ids share numbers that a hash of the id finds. Nothing of the data is known, or looked at.

Salts of hashes follow from a seed, so that none is stored. Training stores as much, where a method says no more.
"""

from __future__ import annotations

import math

import numpy as np

from .. import ops
from ..core.graph import Node
from ..init import normal, xavier_uniform, zeros
from ..ops.random import id_hashes
from ..ranges import AtLeast1, Seed, Share
from .method import Arrays, Nodes, Scheme, Vectors, Weights


def hashed(ids: Node, size: int, *seed: int, functions: int | None = None) -> Node:
    """A number below `size` for each of the ids; by several functions along a new last axis."""
    salts = np.asarray(np.random.default_rng(seed).integers(1 << 62, size=functions))
    return id_hashes(ids if functions is None else ops.expand_dims(ids, axis=-1), salts) % size


def remainder(table: Vectors) -> Scheme:
    """Row id mod rows: as many rows as there is room for, at ratio 1 one for each id.

    K. Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
    """
    rows = table.size
    return Scheme({"weight": table.rows(rows)}, lambda parts, ids: ops.embedding(parts["weight"], ids % rows))


def quotient_remainder(table: Vectors) -> Scheme:
    """The product of a row by id // m and one by id mod m, a pair that no other id has.

    H. Shi et al., "Compositional Embeddings Using Complementary Partitions", KDD 2020, algorithm 2. The greatest m for
    which both tables fit; rows of quotients begin near 1.
    """
    m = math.isqrt(table.count - 1) + table.size  # m and count / m together are least at the root, and grow from there
    quotient = Weights(normal(0.1, 1.0), (-(-table.count // m), table.features))

    def lookup(parts: Nodes, ids: Node) -> Node:
        return ops.embedding(parts["quotient"], ids // m) * ops.embedding(parts["remainder"], ids % m)

    return Scheme({"quotient": quotient, "remainder": table.rows(m)}, lookup)


def robe(table: Vectors, chunk: AtLeast1 = 8, seed: Seed = 0) -> Scheme:
    """Slices of one array, of `chunk` numbers each, from where a hash of (id, chunk) says, times a hashed sign.

    A. Desai et al., "Random Offset Block Embedding Array (ROBE)", MLSys 2022, section 2.
    """
    of, place = np.divmod(np.arange(table.features), chunk)
    size, chunks = table.size * table.features, int(of[-1]) + 1

    def lookup(parts: Nodes, ids: Node) -> Node:
        first, sign = (hashed(ids, n, seed, k, functions=chunks) for k, n in enumerate((size, 2)))
        places = (ops.take(first, of, axis=-1) + place) % size
        signs = ops.astype(ops.take(sign, of, axis=-1) * 2 - 1, "float32")
        return ops.squeeze(ops.embedding(parts["array"], places), axis=-1) * signs

    return Scheme({"array": Weights(table.init, (size, 1))}, lookup)


def dhe(table: Vectors, widest: AtLeast1 = 256, seed: Seed = 0) -> Scheme:
    """A network that makes vectors of many hashes of the id: no table at all.

    W.-C. Kang et al., "Learning to Embed Categorical Features without Embedding Tables", KDD 2021 (DHE), section 4:
    numbers even in (-1, 1), and Mish. One hidden layer, as wide as there are hashes; without batch norm.
    """
    width, features = table.size, table.features
    parts = {"up": Weights(xavier_uniform, (width, width)), "up_bias": Weights(zeros, (width,))}
    parts |= {"down": Weights(xavier_uniform, (width, features)), "down_bias": Weights(zeros, (features,))}

    def lookup(parts: Nodes, ids: Node) -> Node:
        codes = hashed(ids, 1 << 24, seed, functions=width)  # which float32 tells apart
        x = ops.astype(codes, "float32") * 2.0**-23 - 1
        return ops.mish(x @ parts["up"] + parts["up_bias"]) @ parts["down"] + parts["down_bias"]

    return Scheme(parts, lookup, limit=widest)


def tt_rec(table: Vectors, highest: AtLeast1 = 32) -> Scheme:
    """A product of three small tensors, one by each digit of the id in a mixed base.

    C. Yin et al., "TT-Rec: Tensor Train Compression for DLRM", MLSys 2021, eq. 3. The highest rank that fits.
    """
    n, f, rank = max(1, round(table.count ** (1 / 3))), table.features, table.size
    last, divisors = -(-table.count // (n * n)), [d for d in range(1, f + 1) if f % d == 0]
    d1, d2, d3 = min(((a, b, f // a // b) for a in divisors for b in divisors if f % (a * b) == 0), key=sum)
    std = (0.02 / rank) ** (1 / 3)  # so that sums of rank^2 products have 0.02
    shapes = (n, d1 * rank), (n, rank * d2 * rank), (last, rank * d3)

    def lookup(parts: Nodes, ids: Node) -> Node:
        digits = ids // (n * last), ids // last % n, ids % last
        a, b, c = (ops.embedding(parts[f"core{k}"], digit) for k, digit in enumerate(digits))
        both = ops.reshape(a, (*ids.shape, d1, rank)) @ ops.reshape(b, (*ids.shape, rank, d2 * rank))
        made = ops.reshape(both, (*ids.shape, d1 * d2, rank)) @ ops.reshape(c, (*ids.shape, rank, d3))
        return ops.reshape(made, (*ids.shape, f))

    return Scheme({f"core{k}": Weights(normal(std), shape) for k, shape in enumerate(shapes)}, lookup, limit=highest)


def dedup(table: Vectors, at: Share = 0.5, seed: Seed = 0) -> Scheme:
    """Blocks of rows that are alike become one, in the middle of training, which then goes on with these.

    L. Zhou et al., "Serving Deep Learning Models with Deduplication", VLDB 2022, section 4. Training stores the whole
    table; not on servers, for they merge nothing. A block has the fewest rows with which the places of blocks take half
    of the budget, or those with which all takes the least.
    """
    kind = np.min_scalar_type(table.count - 1).name
    each = table.count * np.dtype(kind).itemsize
    rows = max(1, min(-(-2 * each // max(1, table.budget)), math.isqrt(each // table.row)))
    blocks = -(-table.count // rows)
    room = max(1, min(blocks, (table.budget - blocks * np.dtype(kind).itemsize) // (rows * table.row)))
    places = Weights(np.arange(blocks, dtype=kind), (blocks,), kind, trained=False)

    def lookup(parts: Nodes, ids: Node) -> Node:
        place = ops.astype(ops.take(parts["places"], ids // rows), "int64")
        return ops.embedding(parts["rows"], place * rows + ids % rows)

    def settle(values: Arrays, done: float) -> Arrays:
        if done < at or (values["places"] != np.arange(blocks)).any():
            return {}
        found = values["rows"].reshape(blocks, -1).copy()
        first, of = alike(found, room, seed)
        means = np.zeros((len(first), found.shape[1]))
        np.add.at(means, of, found)
        found[first] = means / np.bincount(of)[:, None]
        return {"rows": found.reshape(-1, table.features), "places": first[of]}

    def store(values: Arrays) -> Arrays:
        kept, of = np.unique(values["places"], return_inverse=True)
        found = values["rows"].reshape(blocks, -1)[np.resize(kept, room)]  # of one size, whatever has been merged
        return {"rows": found.reshape(-1, table.features), "places": of}

    types = {"rows": ((room * rows, table.features), "float32"), "places": ((blocks,), kind)}
    return Scheme({"rows": table.rows(blocks * rows), "places": places}, lookup, 1, settle, types, store)


def alike(blocks: np.ndarray, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The first block (n, numbers) of each group of those that are alike, at most `most`, and the group of each.

    A group is a bucket of hashes of projections, as narrow as can be (M. Datar et al., SCG 2004).
    """
    lines = blocks @ np.random.default_rng(seed).normal(size=(blocks.shape[1], 4))
    for width in max(lines.std(), 1e-9) * 2.0 ** np.arange(-12, 12, 0.25):
        _, first, of = np.unique(lines // width, axis=0, return_index=True, return_inverse=True)
        if len(first) <= most:
            return first, of.reshape(-1)
    return np.array([0]), np.zeros(len(blocks), int)
