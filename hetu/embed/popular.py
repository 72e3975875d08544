"""Methods that give ids more room the more often they occur. Ids count by popularity: 0 is the one that occurs most.

CAFE alone is not told which these are: it finds out in training. Training stores as much, where a method says no more.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.leaf import constant
from ..core.operators import if_training
from ..init import xavier_uniform
from ..ops.sketch import heeded
from ..ranges import AtLeast0, AtLeast1, Range, Seed, Share
from .hashed import hashed
from .method import Arrays, Nodes, Scheme, Types, Vectors, Weights, values_of

Blocks = Annotated[int, Range(1, 64)]


def adaptive(table: Vectors, own: Share = 0.75, seed: Seed = 0) -> Scheme:
    """Ids that occur most have rows of their own, a share `own` of all rows; the others share the rest by a hash.

    AdaptEmb of Zhang et al., VLDB 2024, section 3.
    """
    rows = table.size + 1
    first = table.size if rows >= table.count else max(1, int(own * table.size))

    def lookup(parts: Nodes, ids: Node) -> Node:
        return ops.embedding(parts["weight"], ops.where(ids < first, ids, first + hashed(ids, rows - first, seed)))

    return Scheme({"weight": table.rows(rows)}, lookup)


def blocks_of(count: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Where ids by popularity begin and end in blocks, each about four times as large as the one before."""
    sizes = np.cumsum(4.0 ** np.arange(blocks))
    ends = np.unique(np.round(count * sizes / sizes[-1]).astype(int))
    ends = ends[ends > 0]
    return np.append(0, ends[:-1]), ends


def popularity(table: Vectors, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How often an id of each block occurs, or a guess by Zipf's law."""
    seen = 1 / np.arange(1, table.count + 1) if table.seen is None else table.seen
    return np.asarray(np.add.reduceat(seen, starts) / (ends - starts))


def mde(table: Vectors, blocks: Blocks = 4, temperature: AtLeast0 = 0.3) -> Scheme:
    """Blocks of ids of less popularity have fewer dimensions, which a matrix of the block makes a vector of.

    A. Ginart et al., "Mixed Dimension Embeddings", ISIT 2021, algorithm 1: a dimension in proportion to the mean
    popularity of the block to the power of `temperature`, from 1 up; where a matrix saves nothing, all of them.
    In each block an id of another one looks up its first or last row, whose gradient is then 0.
    """
    (starts, ends), f = blocks_of(table.count, blocks), table.features
    seen = popularity(table, starts, ends)
    # At each size one block has a dimension more: that which has the fewest beside its popularity.
    due = np.outer(np.maximum(seen / max(seen[0], 1e-12), 1e-12) ** -temperature, np.arange(2, f + 1))
    more = np.argsort(due, axis=None, kind="stable")[: table.size - 1] // max(1, f - 1)
    made = dict[str, Weights]()
    for k, (n, dim) in enumerate(zip((ends - starts).tolist(), (1 + np.bincount(more, minlength=len(ends))).tolist())):
        narrow = dim * (n + f) < n * f
        made[f"block{k}"] = Weights(table.init, (n, dim if narrow else f))
        made |= {f"matrix{k}": Weights(xavier_uniform, (dim, f))} if narrow else {}

    def lookup(parts: Nodes, ids: Node) -> Node:
        vectors = constant(value=np.float32(0))
        for k, (first, last) in enumerate(zip(starts.tolist(), ends.tolist())):
            rows = ops.embedding(parts[f"block{k}"], ops.clip(ids - first, min=0, max=last - first - 1))
            rows = rows @ parts[f"matrix{k}"] if f"matrix{k}" in parts else rows
            here = ops.logical_and(ids >= first, ids < last)
            vectors = ops.where(ops.expand_dims(here, axis=-1), rows, vectors)
        return vectors

    return Scheme(made, lookup, limit=1 + due.size)


def cafe(
    table: Vectors,
    own: Share = 0.7,
    slots: AtLeast1 = 4,
    threshold: AtLeast0 = 1.0,
    decay: Share = 0.98,
    seed: Seed = 0,
) -> Scheme:
    """Ids with the largest gradients have rows of their own, which a sketch finds out in training; others share.

    H. Zhang et al., "CAFE: Towards Compact, Adaptive, and Fast Embedding for Large-scale Recommendation Models",
    SIGMOD 2024, section 3.2 (HotSketch). Each bucket of the sketch has `slots` ids and their scores, which are sums of
    norms of gradients. Between steps they decay, and an id whose score is above `threshold` times the median takes the
    row of its slot, which begins as the one it shared. A share `own` of the bytes is for rows of their own.
    Training also stores the sketch, 8 or 12 bytes a slot. A layer can be called once. Not on servers: rows move.
    Moments that an optimizer keeps stay with the slot.
    """
    kind = "int32" if table.count < 2**31 else "int64"
    bucket = slots * (table.row + np.dtype(kind).itemsize)  # its bytes
    first, size = table.size * slots, (table.size, slots)
    shared = max(1, (table.budget - table.size * bucket) // table.row)
    parts = {name: Weights(-1, size, kind, trained=False) for name in ("owners", "keys")}
    parts |= {"rows": table.rows(first + shared), "scores": Weights(0, size, trained=False)}

    def lookup(parts: Nodes, ids: Node) -> Node:
        at = hashed(ids, table.size, seed)
        owned = ops.equal(ops.take(parts["owners"], at), ops.expand_dims(ids, axis=-1))
        slot = at * slots + ops.argmax(ops.astype(owned, "int32"), axis=-1)
        place = ops.where(ops.any(owned, axis=-1), slot, first + hashed(ids, shared, seed, 1))
        vectors = ops.embedding(parts["rows"], place)
        if "keys" not in parts:
            return vectors
        return if_training(heeded(vectors, at, ids, parts["keys"], parts["scores"]), vectors)

    def settle(values: Arrays, done: float) -> Arrays:
        keys, scores, owners, rows = (values[name] for name in ("keys", "scores", "owners", "rows"))
        bar = threshold * np.median(scores[keys >= 0]) if (keys >= 0).any() else 0.0
        moved = (scores > bar) & (keys >= 0) & (keys != owners)
        rows = rows.copy()
        rows[:first][moved.reshape(-1)] = values_of(lookup, values, keys[moved])
        left = (owners[:, :, None] == np.where(moved, keys, -1)[:, None]).any(axis=2)  # by ids that came back elsewhere
        owners = np.where(moved, keys, np.where(left, -1, owners))
        return {"owners": owners, "rows": rows, "scores": scores * np.float32(decay)}

    types: Types = {"rows": ((first + shared, table.features), "float32"), "owners": (size, kind)}
    limit = max(1, int(own * table.budget) // bucket)
    return Scheme(parts, lookup, limit, settle, types, lambda values: {name: values[name] for name in types})
