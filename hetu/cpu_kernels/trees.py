"""Decision trees in `grow.c`, whole, and in `trees.c`: histograms of nodes, their best cuts, rows that part, leaves.

Gain: 8 to 50 times the speed of the forward functions. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..ops.grow import grow_trees
from ..ops.trees import best_cuts, histograms, part_rows, tree_leaves
from .c_calls import c_call
from .moves import grain_of
from .recipes import kernel


def _in_order(*arrays: Any) -> bool:
    """Whether arrays lie in order, the first as the C functions have it and others as whole numbers of 64 bits."""
    return all(a.flags.c_contiguous for a in arrays) and all(a.dtype == np.int64 for a in arrays[1:])


@kernel(histograms)
def histograms_bind(
    xp: ModuleType, out: Any, bins: Any, values: Any, rows: Any, starts: Any, features: Any, *, size: int
) -> Call | None:
    fits = bins.dtype == np.uint8 and _in_order(values, rows, starts, features) and _in_order(bins) and _in_order(out)
    if not fits or values.dtype.name not in ("int32", "int64"):
        return None
    (nodes, slots), jobs = features.shape, features.size
    sizes = (len(rows), bins.shape[1], values.shape[1], nodes, slots, size)
    grain = grain_of(jobs, len(rows) * slots * 4 + out.nbytes)
    return c_call(
        "trees.c", "histograms", values.dtype, out, bins, values, rows, starts, features, *sizes, jobs=jobs, grain=grain
    )


@kernel(best_cuts)
def best_cuts_bind(xp: ModuleType, out: Any, found: Any, totals: Any, least: Any, *, l2: float) -> Call | None:
    fits = _in_order(found) and _in_order(totals) and _in_order(least) and found.dtype == totals.dtype
    if not fits or found.dtype.name not in ("int32", "int64") or least.dtype != np.float64:
        return None
    slots, nodes, size, channels = found.shape
    words, jobs = (*out, found, totals, least, slots, nodes, size, channels, float(l2)), slots * nodes
    more = {"jobs": jobs, "grain": grain_of(jobs, 2 * found.nbytes), "scratch": 20 * (size + 8) + found.itemsize * size}
    return c_call("trees.c", "best_cuts", found.dtype, *words, **more)


@kernel(grow_trees)
def grow_trees_bind(
    xp: ModuleType, out: Any, bins: Any, values: Any, rows: Any, starts: Any, target: Any, order: Any, begun: Any,
    units: Any, *, size: int, features: int, max_depth: int, max_leaf_nodes: int, min_samples_split: int,
    min_samples_leaf: int, least_gain: float, room: int = 0,
) -> Call | None:  # fmt: skip
    fits = bins.dtype == np.uint8 and _in_order(values, rows, starts, order, begun) and _in_order(target, begun)
    if not fits or values.dtype.name not in ("int32", "int64") or {target.dtype, units.dtype} != {np.dtype("float64")}:
        return None
    (entries, channels), (roots, columns) = values.shape, order.shape
    words = (*out, bins, values, rows, starts, target if len(target) else 0, order, begun, np.ascontiguousarray(units))
    words += (roots, entries, *bins.strides, room, columns, channels, size, features, max_depth, max_leaf_nodes)
    words += (min_samples_split, min_samples_leaf, float(least_gain))
    numbers = channels * (2 * entries + 8 * size + 3) + size
    scratch = 8 * (columns + 2 * entries) + values.itemsize * numbers + 20 * (size + 8)
    more = {"jobs": roots, "grain": grain_of(roots, 64 * entries * columns), "scratch": scratch}
    return c_call("grow.c", "grow_trees", values.dtype, *words, **more)


@kernel(part_rows)
def part_rows_bind(
    xp: ModuleType, out: Any, bins: Any, rows: Any, starts: Any, features: Any, cuts: Any
) -> Call | None:
    if bins.dtype != np.uint8 or not _in_order(bins, rows, starts, features, cuts):
        return None
    words, jobs = (*out, bins, rows, starts, features, cuts, len(rows), bins.shape[1], len(starts)), len(starts)
    more = {"jobs": jobs, "grain": grain_of(jobs, 4 * rows.nbytes), "scratch": rows.nbytes + 8}
    return c_call("trees.c", "part_rows", "int64", *words, **more)


@kernel(tree_leaves)
def tree_leaves_bind(
    xp: ModuleType, out: Any, x: Any, features: Any, thresholds: Any, lefts: Any, roots: Any
) -> Call | None:
    if not (_in_order(x, features, lefts, roots) and _in_order(thresholds)) or x.dtype != thresholds.dtype:
        return None
    words, (jobs, trees) = (out, x, features, thresholds, lefts, roots, x.shape[1], len(roots)), out.shape
    return c_call("trees.c", "tree_leaves", x.dtype, *words, jobs=jobs, grain=grain_of(jobs, 64 * jobs * trees))
