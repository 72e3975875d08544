"""Methods that leave numbers of a table out, by their size or by what a search has found to matter.

Training stores the whole table, and what is left out is 0 there. On servers none settles: to leave the smallest out,
all must be seen; so save, load in one process, and settle there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import ops
from ..core.graph import Node
from ..init import ones
from ..ranges import Finite, Share
from .method import Arrays, Lookup, Nodes, Scheme, Types, Vectors, Weights, values_of
from .popular import Blocks, blocks_of, popularity

LOW = 1 << 16  # places in windows of so many, of which each number stores its place in 16 bits


def deeplight(table: Vectors, at: Share = 0.75) -> Scheme:
    """The smallest numbers become 0 between steps, ever more of them; until the next time they may grow again.

    W. Deng et al., "DeepLight: Deep Lightweight Feature Interactions", WSDM 2021, algorithm 1: a share R (1 - D^t),
    with D such that 0.99 R is reached at the share `at` of training, and R from then on.
    """

    def lookup(parts: Nodes, ids: Node) -> Node:
        return ops.embedding(parts["weight"], ids)

    def settle(values: Arrays, done: float) -> Arrays:
        weight, made = values["weight"].reshape(-1), np.zeros(values["weight"].size, "float32")
        left = 1 - (done < at) * 0.01 ** (done / at)
        _, places = _largest(lookup, values, made.size - int(left * (made.size - table.size)))
        made[places] = weight[places]
        return {"weight": made.reshape(-1, table.features)}

    return _pruned(table, settle, lookup)


def pep(table: Vectors, first: Finite = -6.0, at: Share = 0.75) -> Scheme:
    """sign(v) relu(|v| - sigmoid(s)), with a learned threshold s of each dimension.

    S. Liu et al., "Learnable Embedding Sizes for Recommender Systems", ICLR 2021 (PEP), eq. 5. What this makes 0 has no
    gradient, but comes back where s falls, or by momentum. Where a share `at` of training is over, all but the largest
    that fit leave for good, and training goes on with those; the paper stops the search where enough have left, and
    trains the rest anew. Training also stores a byte for each number.
    """
    size = table.count, table.features

    def lookup(parts: Nodes, ids: Node) -> Node:
        v, kept = ops.embedding(parts["weight"], ids), ops.take(parts["kept"], ids)
        return ops.sign(v) * ops.relu(ops.abs(v) - ops.sigmoid(parts["threshold"])) * ops.astype(kept, "float32")

    def settle(values: Arrays, done: float) -> Arrays:
        if done < at or not values["kept"].all():
            return {}
        kept = np.zeros(size, bool)
        kept.reshape(-1)[_largest(lookup, values, table.size)[1]] = True
        return {"kept": kept}

    beside = {"threshold": Weights(first, (table.features,)), "kept": Weights(True, size, "bool", trained=False)}
    return _pruned(table, settle, lookup, **beside)


def autosrh(table: Vectors, blocks: Blocks = 6, at: Share = 0.5) -> Scheme:
    """Each block of ids of like popularity weighs its columns, by learned numbers; the columns of least weight leave.

    S. Kong et al., "AutoSrh: An Embedding Dimensionality Search Framework", TKDE 2022, eq. 4 and 8. Weights learn
    from the same batches as vectors. Where a share `at` of training is over, those columns stay that fit, first those
    of the largest weight times the popularity of the block: alone, weights of ids that are seldom seen stay large.
    """
    starts, ends = blocks_of(table.count, blocks)
    size = len(ends), table.features

    def lookup(parts: Nodes, ids: Node) -> Node:
        block = ops.sum(ops.astype(ops.expand_dims(ids, axis=-1) >= ends, "int64"), axis=-1)
        weighs = ops.embedding(parts["alpha"], block) * ops.take(parts["kept"], block)
        return ops.embedding(parts["weight"], ids) * weighs

    def settle(values: Arrays, done: float) -> Arrays:
        if done < at or not values["kept"].all():
            return {}
        kept, left = np.zeros(size), table.size
        worth = np.abs(values["alpha"]) * popularity(table, starts, ends)[:, None]
        for block, column in zip(*np.unravel_index(np.argsort(-worth, axis=None, kind="stable"), size)):
            if (rows := ends[block] - starts[block]) <= left:
                kept[block, column], left = 1, left - rows
        return {"kept": kept}

    return _pruned(table, settle, lookup, alpha=Weights(ones, size), kept=Weights(ones, size, trained=False))


def _largest(lookup: Lookup, values: Arrays, count: int) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of vectors, and which of them are the largest, in order; of equal ones the first."""
    flat = values_of(lookup, values, np.arange(len(values["weight"]))).reshape(-1)
    return flat, np.sort(np.argsort(-np.abs(flat), kind="stable")[:count])


def _pruned(table: Vectors, settle: Callable[[Arrays, float], Arrays], lookup: Lookup, **beside: Weights) -> Scheme:
    """A table of which the largest numbers of vectors are stored one by one: 6 bytes each, 2 of them its place."""
    f, most, kept = table.features, table.count * table.features, table.size

    def store(values: Arrays) -> Arrays:
        flat, places = _largest(lookup, values, kept)
        starts = np.searchsorted(places, np.arange(0, most + LOW, LOW))
        return {"values": flat[places], "places": places % LOW, "starts": starts}

    def read(stored: Nodes, ids: Node) -> Node:
        """Each number is looked for in its window, by steps of half the length each."""
        wanted = ops.expand_dims(ids, axis=-1) * f + np.arange(f)
        window, low = wanted // LOW, wanted % LOW
        place, end = (ops.astype(ops.take(stored["starts"], window + k), "int64") for k in (0, 1))

        def at(name: str, place: Node) -> Node:
            return ops.take(stored[name], ops.minimum(place, kept - 1))

        for k in reversed(range(min(LOW, kept).bit_length())):
            on = place + (1 << k)
            place = ops.where(ops.logical_and(on <= end, at("places", on - 1) < low), on, place)
        found = ops.logical_and(place < end, ops.equal(at("places", place), low))
        return ops.where(found, at("values", place), 0.0)

    types: Types = {"values": ((kept,), "float32"), "places": ((kept,), "uint16")}
    types["starts"] = ((-(-most // LOW) + 1,), np.min_scalar_type(kept).name)
    return Scheme({"weight": table.rows(table.count), **beside}, lookup, most, settle, types, store, read)
