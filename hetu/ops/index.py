"""Gathering and scattering by arrays of indices: take, its row gradient, one_hot.

Indices are counted from 0; a negative or too large one is an error that names it, never a wrap or a clamp. Each gather
has a scatter as its gradient, in which duplicates are summed. For boolean masks see `where`; for one index per element
see `along_axis.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import dtype_in
from ..core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError, public
from ..core.graph import Node
from ..core.op import Op, Role, op
from ..core.operators import add
from ..core.types import Size, TensorType, as_dtype, axis_letters, compatible, normalize_axis, numbers, show_shape
from .elementwise import in_full
from .linalg import permute_dims

__all__ = ["embedding", "one_hot", "scatter_add", "take"]


def require_indices(type_: TensorType) -> None:
    """DTypeError unless the type is an integer one."""
    if type_.dtype.kind not in "iu":
        alone = "pass np.int64(i) or [i]: a number by itself takes the dtype of what is beside it"
        fix = 'make the ids integers, or ht.astype(ids, "int64")' if type_.ndim else alone
        raise DTypeError(f"got indices of {type_}, wanted integers", fix=fix)


def check_range(xp: ModuleType, ids: Any, size: int, what: str) -> None:
    """ValueRangeError that shows the first id outside 0 ... size - 1 and where it stands."""
    flat = xp.reshape(ids, (-1,))
    # by position: NumPy finds extrema eight times as fast as it fetches them
    if not flat.shape[0] or (int(flat[xp.argmin(flat)]) >= 0 and int(flat[xp.argmax(flat)]) < size):
        return
    first = int(xp.nonzero((flat < 0) | (flat >= size))[0][0])
    position = [first // math.prod(ids.shape[axis + 1 :]) % n for axis, n in enumerate(ids.shape)]
    raise ValueRangeError(
        f"{what} {int(flat[first])} at position {position} lies outside 0 to {size - 1}",
        fix=f"check how each {what} is made; there are {size} of them, counted from 0",
    )


def in_range(op: Op[..., Any], ranges: Callable[..., Any]) -> None:
    """Let `op` check what `ranges(*arrays, **attrs)` returns: (ids, size, what), ids from 0 to size - 1."""

    def check(xp: ModuleType, *arrays: Any, **attrs: Any) -> None:
        for ids, size, what in ranges(*arrays, **attrs):
            check_range(xp, ids, size, what)

    op.ranges(ranges)
    op.check(check)


RowWindow = tuple[tuple[int, int, int]] | None  # (low, high, size): the rows of a table that this rank has


def own_rows(ids: Any, rows: Any, window: RowWindow) -> tuple[Any, Any]:
    """The ids and rows in this rank's part of the table; ids count from its first row."""
    if window is None:
        return ids, rows
    low, high, _ = window[0]
    inside = (ids >= low) & (ids < high)
    return ids[inside].astype(np.int64) - low, rows[inside]


def whole_size(here: int, window: RowWindow) -> int:
    """The size of the whole axis."""
    return here if window is None else window[0][2]


def find_inside(xp: ModuleType, ids: Any, window: tuple[tuple[int, int, int]]) -> tuple[Any, Any]:
    """Places of ids in this rank's part (0 for those of other ranks), and which ids have one."""
    (low, high, _), ids = window[0], in_full(xp, ids)
    inside = (ids >= low) & (ids < high)
    return xp.where(inside, ids - low, xp.zeros_like(ids)), inside


def masked(xp: ModuleType, x: Any, mask: Any, axis: int = 0) -> Any:
    """`x`, with 0 where `mask`, laid along its axes from `axis` on, is False."""
    lifted = xp.reshape(mask, (*(1 for _ in x.shape[:axis]), *mask.shape, *(1 for _ in x.shape[axis + mask.ndim :])))
    return xp.where(lifted, x, xp.zeros_like(x))


# -- take and its gradient -------------------------------------------------------------------------------------


def axis_attrs(x: TensorType, *_: TensorType, axis: int, **attrs: Any) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.ndim), **attrs}


def _take_type(x: TensorType, indices: TensorType, *, axis: int, **_: Any) -> TensorType:
    require_indices(indices)
    return TensorType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)


def take_dims(x: TensorType, indices: TensorType, *, axis: int, **_: Any) -> str:
    letters = axis_letters(x.ndim + indices.ndim)
    own, ids = letters[: x.ndim], "".join(letters[x.ndim :])
    before, after = "".join(own[:axis]), "".join(own[axis + 1 :])
    return f"{before}{own[axis]}@{after},{ids}->{before}{ids}{after}"


@op(role=lambda *, axis, **_: Role.MOVE if axis else Role.LOOKUP, infer=_take_type, dims=take_dims, linear=(0,))
def take(xp: ModuleType, x: Any, indices: Any, *, axis: int = 0, window: RowWindow = None) -> Any:
    """Slices of `x` along `axis` at `indices`, of any shape, whose axes take the place of that axis.

    The ids are integers in 0 ... size - 1: ValueRangeError when one is not, DTypeError for other dtypes.

    >>> import hetu as ht
    >>> ht.evaluate(take([[1.0, 2.0], [3.0, 4.0]], [1, 0, 1])).tolist()
    [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    """
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    if window is None:
        return xp.reshape(xp.take(x, xp.reshape(indices, (-1,)), axis=axis), shape)
    places, inside = find_inside(xp, indices, window)
    return masked(xp, xp.reshape(xp.take(x, xp.reshape(places, (-1,)), axis=axis), shape), inside, axis)


take.normalize(axis_attrs)
in_range(take, lambda x, indices, *, axis, window: [(indices, whole_size(x.shape[axis], window), "index")])


@take.grad
def take_grad(g: Node, y: Node, x: Node, indices: Node, *, axis: int, **_: Any) -> tuple[Node, None]:
    if axis == 0:
        return scatter_rows(x, indices, g), None
    to_front = (axis, *(i for i in range(x.ndim) if i != axis))
    places = range(axis, axis + indices.ndim)
    rows = permute_dims(g, axes=(*places, *(i for i in range(g.ndim) if i not in places)))
    back = tuple(sorted(range(x.ndim), key=to_front.__getitem__))
    return permute_dims(scatter_rows(permute_dims(x, axes=to_front), indices, rows), axes=back), None


@public
def embedding(table: Any, ids: Any) -> Node:
    """The rows of `table` at `ids`. (rows, width), (...) -> (..., width).

    Its gradient is row-sparse: an optimizer updates the rows that a batch touched and no others. Gradients of one row
    are added in one order, on a GPU as well, so a run can be repeated to the last digit.

    >>> import hetu as ht
    >>> embedding(ht.placeholder("table", (10, 4)), ht.placeholder("ids", (None, 3), "int64")).shape[1:]
    (3, 4)
    """
    return take(table, ids, axis=0)


def _check_rows(like: TensorType, ids: TensorType, rows: TensorType) -> None:
    require_indices(ids)
    wanted = (*ids.shape, *like.shape[1:])
    if like.ndim == 0 or len(wanted) != rows.ndim or not all(map(compatible, wanted, rows.shape)):
        raise ShapeError(
            f"got rows {show_shape(rows.shape)}, wanted {show_shape(wanted)}", fix="one row of the table for every id"
        )


def _scatter_rows_type(like: TensorType, ids: TensorType, rows: TensorType, **_: Any) -> TensorType:
    _check_rows(like, ids, rows)
    return TensorType(like.shape, rows.dtype)


def scatter_rows_dims(like: TensorType, ids: TensorType, rows: TensorType, mark: str = "", **_: Any) -> str:
    letters = axis_letters(like.ndim + ids.ndim)
    width, lead = "".join(letters[1 : like.ndim]), "".join(c + mark for c in letters[like.ndim :])
    return f"{letters[0]}@{width},{lead},{lead}{width}->{letters[0]}@{width}"


@op(role=Role.SCATTER, infer=_scatter_rows_type, dims=scatter_rows_dims, like=(0,), linear=(2,))
def scatter_rows(xp: ModuleType, like: Any, ids: Any, rows: Any, *, window: RowWindow = None) -> Any:
    """Zeros in the shape of the table `like`, plus `rows` at `ids` of axis 0; rows of one id are summed.

    The gradient of an embedding. (v, ...), (...ids), (...ids, ...) -> (v, ...).

    >>> import hetu as ht
    >>> ht.evaluate(scatter_rows([0.0, 0.0, 0.0], [2, 0, 2], [1.0, 2.0, 3.0])).tolist()
    [2.0, 0.0, 4.0]
    """
    out = xp.zeros(like.shape, dtype=rows.dtype)
    if window is not None:
        ids, inside = find_inside(xp, ids, window)
        rows = masked(xp, rows, inside)
    xp.add.at(out, ids, rows)
    return out


scatter_rows.grad(lambda g, y, like, ids, rows, **_: (None, None, take(g, ids, axis=0)))


def sums_of(places: np.ndarray, parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The same of rows that lie in some of NumPy's arrays, one after the other: their sums at each of the places
    (count, ...row) of an array of this shape, added in their order."""
    sums, first = np.empty(shape, parts[0].dtype), 0
    for rows in parts:
        lead = rows.shape[: rows.ndim - len(shape) + 1]
        at = places[first : first + math.prod(lead)].reshape(lead)
        summed = scatter_add.bound(np, sums, [sums, at, rows], {}) if first else None
        for call in summed or scatter_rows.bound(np, sums, [sums, at, rows], {"window": None}):
            call()
        first += at.size
    return sums


def _scatter_add_type(x: TensorType, ids: TensorType, updates: TensorType) -> TensorType:
    _check_rows(x, ids, updates)
    if x.dtype != updates.dtype:
        raise DTypeError(f"got {x} and updates {updates}, wanted one dtype", fix="convert one with ht.astype")
    return numbers(x)


# Split ids would add `x` once for every part.
@op(infer=_scatter_add_type, dims=lambda x, i, u: scatter_rows_dims(x, i, u, mark="!"), inplace={0: (0,)})
def scatter_add(xp: ModuleType, x: Any, ids: Any, updates: Any) -> Any:
    """`x` with `updates` added to its rows at `ids`; updates of one id are summed.

    (v, ...), (...ids), (...ids, ...) -> (v, ...). ValueRangeError for ids outside the rows.

    >>> import hetu as ht
    >>> ht.evaluate(scatter_add([1.0, 1.0, 1.0], [2, 2], [1.0, 2.0])).tolist()
    [1.0, 1.0, 4.0]
    """
    out = xp.array(x)
    xp.add.at(out, ids, updates)
    return out


in_range(scatter_add, lambda x, ids, updates: [(ids, x.shape[0], "row id")])
scatter_add.flops(lambda y, x, ids, updates: int(updates.size))
scatter_add.grad(lambda g, y, x, ids, updates: (g, None, take(g, ids, axis=0)))
scatter_add.decompose(lambda x, ids, updates: add(x, scatter_rows(x, ids, updates)))


def _ids(ids: TensorType, **_: Any) -> TensorType:
    require_indices(ids)
    return ids


@op(role=Role.MOVE, infer=_ids, dims="...->...", differentiable=False)
def within(xp: ModuleType, ids: Any, *, size: int, what: str = "id") -> Any:
    """The ids as they are, where all are from 0 to below `size`: ValueRangeError for others, even if a hash takes any.

    >>> import hetu as ht
    >>> ht.evaluate(within([2, 0], size=3)).tolist()
    [2, 0]
    """
    return ids


in_range(within, lambda ids, *, size, what: [(ids, size, what)])


# -- one_hot ---------------------------------------------------------------------------------------------------


def _one_hot_attrs(ids: TensorType, *, depth: Any, dtype: str) -> dict[str, Any]:
    if isinstance(depth, int) and depth < 1:
        raise ArgumentError(f"depth={depth}, wanted at least 1", fix="pass the number of classes")
    return {"depth": depth, "dtype": dtype}


def _one_hot_type(ids: TensorType, *, depth: Size, dtype: str) -> TensorType:
    require_indices(ids)
    return TensorType((*ids.shape, depth), as_dtype(dtype))


@op(role=Role.MOVE, infer=_one_hot_type, dims="...->...v@", differentiable=False)
def one_hot(xp: ModuleType, ids: Any, *, depth: int, dtype: Any = "float32") -> Any:
    """1 at the id and 0 elsewhere along a new last axis. (...) -> (..., depth).

    ValueRangeError for ids outside 0 ... depth - 1, DTypeError for ids that are not integers.

    >>> import hetu as ht
    >>> ht.evaluate(one_hot([2, 0], 3)).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    return xp.astype(xp.expand_dims(ids, axis=-1) == xp.arange(depth, dtype=xp.int64), dtype_in(xp, dtype))


one_hot.normalize(_one_hot_attrs)
in_range(one_hot, lambda ids, *, depth, dtype: [(ids, depth, "class id")])
one_hot.into(lambda xp, out, ids, *, depth, dtype: xp.equal(ids[..., None], xp.arange(depth), out))
