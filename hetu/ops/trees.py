"""What decision trees are grown and walked by: histograms of nodes, their best cuts, rows that part, leaves of rows.

Columns are cut into bins beforehand, so that a node is judged by sums over bins (G. Ke et al., "LightGBM", NIPS 2017).
Rows of several nodes stand one node after the other, from `starts` on, as entries do in bags. Sums are of whole
numbers, which no order changes. Growing is up to others (`hetu.ml`). Left out: gradients, as these are counts and
choices; and columns over ranks.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import DTypeError, ShapeError, ValueRangeError
from ..core.op import op
from ..core.types import Size, TensorType, compatible, promote
from ..ranges import AtLeast0, AtLeast1
from .bags import check_starts
from .index import check_range, require_indices

__all__ = ["best_cuts", "histograms", "part_rows", "tree_leaves"]


def require_axes(wanted: str, *types: TensorType) -> None:
    """Whole numbers, or any where a word has capitals, of axes such as "nc n"; those of one letter are of one size."""
    sizes: dict[str, Size] = {}
    for word, type_ in zip(wanted.split(), types, strict=True):
        if word.islower():
            require_indices(type_)
        axes = [*zip(word.lower(), type_.shape)]
        if type_.ndim != len(word) or not all(compatible(sizes.setdefault(letter, n), n) for letter, n in axes):
            raise ShapeError(f"got {', '.join(map(str, types))}", fix=f"pass axes {wanted.lower()}, a size by letter")


def require_channels(type_: TensorType) -> None:
    if type_.shape[-1] == 0:
        raise ShapeError(f"got {type_}, of 0 channels", fix="pass sums of H as the last channel, and G before it")


def check_rows(xp: ModuleType, bins: Any, rows: Any, starts: Any, features: Any) -> None:
    check_starts(xp, starts, rows.shape[0])
    check_range(xp, rows, bins.shape[0], "row")
    check_range(xp, features, bins.shape[1], "column")


def _histograms_type(
    bins: TensorType, values: TensorType, rows: TensorType, starts: TensorType, features: TensorType, *, size: int
) -> TensorType:
    require_axes("nc ek e t ts", bins, values, rows, starts, features)
    nodes, slots = features.shape
    return TensorType((slots, nodes, size, values.shape[1]), values.dtype)


@op(infer=_histograms_type, differentiable=False)
def histograms(xp: ModuleType, bins: Any, values: Any, rows: Any, starts: Any, features: Any, *, size: AtLeast1) -> Any:
    """The sums of the values of each node's entries in each bin of its features: (slots, nodes, size, channels).

    `bins` are (n, columns) below `size`, `values` whole numbers (entries, channels), `rows` (entries,) those of the
    first node, then of the next, from `starts` (nodes,) on; `features` (nodes, slots) the columns that a node looks at.

    >>> import hetu as ht
    >>> bins, values = [[0, 1], [1, 1], [0, 0]], [[1], [10], [100]]
    >>> ht.evaluate(histograms(bins, values, [0, 1, 2], [0], [[0, 1]], size=2)).tolist()
    [[[[101], [10]]], [[[100], [11]]]]
    """
    (nodes, slots), channels = features.shape, values.shape[1]
    out = xp.zeros((slots * nodes * size, channels), "uint64")  # which CUDA adds, and overflows as int64
    node = _node_of(xp, rows, starts)
    for slot in range(slots):
        places = (slot * nodes + node) * size + bins[rows, features[node, slot]]
        xp.add.at(out, places, values.astype("uint64"))
    return out.astype(values.dtype).reshape(slots, nodes, size, channels)


@histograms.check
def histograms_check(
    xp: ModuleType, bins: Any, values: Any, rows: Any, starts: Any, features: Any, *, size: int
) -> None:
    check_rows(xp, bins, rows, starts, features)
    check_range(xp, bins, size, "bin")


def _node_of(xp: ModuleType, rows: Any, starts: Any) -> Any:
    """The number of the node of each entry: the last that begins there or before."""
    return xp.searchsorted(starts, xp.arange(len(rows)), side="right") - 1


def _cuts_types(nodes: Size, slots: Size, channels: Size) -> tuple[TensorType, TensorType]:
    facts = TensorType((nodes, slots, 2 + channels), np.dtype("int64"))
    return TensorType((nodes, slots), np.dtype("float64")), facts


def _best_cuts_types(found: TensorType, totals: TensorType, least: TensorType, *, l2: float) -> tuple[TensorType, ...]:
    require_axes("stbk tk T", found, totals, least)
    require_channels(found)
    return _cuts_types(found.shape[1], found.shape[0], found.shape[3])


@op(infer=_best_cuts_types, differentiable=False)
def best_cuts(xp: ModuleType, found: Any, totals: Any, least: Any, *, l2: AtLeast0) -> tuple[Any, Any]:
    """The best score of a cut in two of each node and slot, (nodes, slots), and its facts (nodes, slots, 2 + channels).

    These are the last bin on the left that has a row, the last before the next one that has, and the sums on the left.
    `found` are histograms (slots, nodes, size, channels), of which the last channel is H and others are G; `totals`
    (nodes, channels) their sums. The score is the sum of G^2 / (H + l2) over both sides and all G, of which each side
    has an H above `least` (nodes,); -inf where there is no such cut. T. Chen, C. Guestrin, "XGBoost", KDD 2016, eq. 7.

    >>> import hetu as ht
    >>> scores, cuts = best_cuts([[[[3, 1], [4, 1], [0, 0], [-5, 1]]]], [[2, 3]], [0.0], l2=0.0)
    >>> ht.evaluate(scores).tolist(), ht.evaluate(cuts).tolist()
    ([[49.5]], [[[1, 2, 7, 2]]])
    """
    left = xp.cumsum(found, axis=2, dtype=np.int64)
    right = totals[:, None] - left
    fits = (left[..., -1] > least[:, None]) & (right[..., -1] > least[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = xp.where(fits, sum(_score(side, l2) for side in (left, right)), -np.inf)
    low = scores.argmax(axis=2)
    after = found.any(axis=3) & (xp.arange(found.shape[2]) > low[..., None])
    best, lefts = (xp.take_along_axis(a, low[..., None, None], axis=2)[:, :, 0] for a in (scores[..., None], left))
    facts = xp.concatenate([low[..., None], after.argmax(axis=2)[..., None] - 1, lefts], axis=2)
    return best[..., 0].T, xp.where(xp.isfinite(best), facts, 0).swapaxes(0, 1)


def _score(side: Any, l2: float) -> Any:
    """G^2 / (H + l2), summed one channel after the other, as C does."""
    floats = side.astype(np.float64)
    return sum(floats[..., k] ** 2 for k in range(side.shape[-1] - 1)) / (floats[..., -1] + l2)


def _part_rows_types(*types: TensorType) -> tuple[TensorType, TensorType]:
    require_axes("nc e t t t", *types)
    return types[1], TensorType(types[2].shape, np.dtype("int64"))


@op(infer=_part_rows_types, differentiable=False)
def part_rows(xp: ModuleType, bins: Any, rows: Any, starts: Any, features: Any, cuts: Any) -> tuple[Any, Any]:
    """The rows of each node with those first whose bin of its feature is at most its cut, and how many these are.

    `bins` (n, columns), `rows` (entries,) and `starts` (nodes,) as of `histograms`; `features`, `cuts` (nodes,). Rows
    of one side stay in their order.

    >>> import hetu as ht
    >>> rows, lefts = part_rows([[3], [0], [1], [2]], [0, 1, 2, 3], [0], [0], [1])
    >>> ht.evaluate(rows).tolist(), ht.evaluate(lefts).tolist()
    ([1, 2, 0, 3], [2])
    """
    node = _node_of(xp, rows, starts)
    right = bins[rows, features[node]] > cuts[node]
    order = xp.lexsort(xp.stack([xp.arange(len(rows)), 2 * node + right]))
    return rows[order], xp.bincount(node[~right], minlength=len(starts)).astype(np.int64)


@part_rows.check
def part_rows_check(xp: ModuleType, bins: Any, rows: Any, starts: Any, features: Any, cuts: Any) -> None:
    check_rows(xp, bins, rows, starts, features)


def _tree_leaves_type(
    x: TensorType, features: TensorType, thresholds: TensorType, lefts: TensorType, roots: TensorType
) -> TensorType:
    require_axes("NC m M m t", x, features, thresholds, lefts, roots)
    if promote(x.dtype, thresholds.dtype) != x.dtype:
        raise DTypeError(f"rows {x}, thresholds {thresholds}", fix="pass rows of the thresholds' dtype")
    return TensorType((x.shape[0], roots.shape[0]), np.dtype("int64"))


@op(infer=_tree_leaves_type, differentiable=False)
def tree_leaves(xp: ModuleType, x: Any, features: Any, thresholds: Any, lefts: Any, roots: Any) -> Any:
    """The leaf to which each row comes in each tree: (n, columns) -> (n, trees).

    Nodes of all trees are numbered together: a row goes from `roots` (trees,) on to `lefts` (nodes,) where its number
    in the column `features` (nodes,) is at most `thresholds` (nodes,), else to the node after that. Both come after
    their parent. A leaf is a node whose left one is 0.

    >>> import hetu as ht
    >>> x = np.array([[0.5], [2.0]])
    >>> ht.evaluate(tree_leaves(x, [0, 0, 0], np.array([1.0, 0, 0]), [1, 0, 0], [0])).tolist()
    [[1], [2]]
    """
    at = xp.repeat(roots.astype(np.int64)[None], x.shape[0], axis=0)
    moving = xp.nonzero(lefts[at])
    while len(moving[0]):
        node = at[moving]
        at[moving] = lefts[node] + (x[moving[0], features[node]] > thresholds[node])
        still = lefts[at[moving]] != 0
        moving = moving[0][still], moving[1][still]
    return at


@tree_leaves.check
def tree_leaves_check(xp: ModuleType, x: Any, features: Any, thresholds: Any, lefts: Any, roots: Any) -> None:
    nodes = len(lefts)
    check_range(xp, features, x.shape[1], "column")
    check_range(xp, lefts, max(1, nodes - 1), "left node")
    check_range(xp, roots, nodes, "root")
    back = np.flatnonzero((lefts != 0) & (lefts <= np.arange(nodes)))
    if len(back):
        raise ValueRangeError(
            f"the left node of {back[0]} is {lefts[back[0]]}",
            fix="number the nodes so that both come after their parent",
        )
