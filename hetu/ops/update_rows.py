"""Row forms of update rules: change only the rows of a table that a batch looked up, and their optimizer state.

"Lazy": where a row was not touched, momentum does not decay and Adam does not move. Gradients of an id that occurs
several times are summed first, so plain gradient descent and AdaGrad give exactly what their dense forms give.
Ignored on purpose: the rules themselves, see `update.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import DTypeError
from ..core.op import Instruction, Op, Role, op
from ..core.types import TensorType
from .index import Window, add_rows, check_range
from .update_kernels import check_alike, check_scalars, check_tables, negated, outputs_in_place


def row_form(dense: Op, tables: int) -> Op:
    """The rule `dense` on the rows `ids` only: same inputs, with `g` replaced by `ids` and one gradient row for each.

    Gradients of an id that occurs several times are summed first; other rows keep parameter and state.
    """

    def forward(xp: ModuleType, *arrays: Any, window: Window = None, **attrs: Any) -> Any:
        values, (ids, rows, *scalars) = arrays[:tables], arrays[tables:]
        ids, rows = own_rows(ids, rows, window)
        ids = xp.reshape(ids, (-1,))
        touched = xp.sort(xp.unique_values(ids))  # the standard promises no order
        sums = xp.astype(touched[:, None] == ids[None, :], rows.dtype) @ xp.reshape(rows, (ids.shape[0], -1))
        sums = xp.reshape(sums, (*touched.shape, *rows.shape[rows.ndim - values[0].ndim + 1 :]))
        new = dense.forward(xp, *(xp.take(v, touched, axis=0) for v in values), sums, *scalars, **attrs)
        pairs = zip(values, new if isinstance(new, tuple) else (new,))
        written = tuple(_with_rows(xp, v, touched, n) for v, n in pairs)
        return written if tables > 1 else written[0]

    names = list(inspect.signature(dense.forward).parameters.values())
    position = 1 + dense.inputs.index("g")
    inputs = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("ids", "rows")]
    slices = inspect.Parameter("window", inspect.Parameter.KEYWORD_ONLY, default=None)
    forward.__signature__ = inspect.Signature([*names[:position], *inputs, *names[position + 1 :], slices])
    forward.__doc__ = _row_doc(dense, tables)
    made = op(
        forward,
        name=f"{dense.name}_rows",
        role=Role.UPDATE,
        infer=_row_type(tables),
        dims=_row_dims(tables),
        inplace={i: (i,) for i in range(tables)},
        differentiable=False,
    )
    made.bind(partial(_rows_bind, dense, tables))
    made.check(partial(_check_ids, tables))
    return made


def own_rows(ids: Any, rows: Any, window: Window) -> tuple[Any, Any]:
    """Of ids and their rows those that this rank's part of the table has, counted from its first row."""
    if window is None:
        return ids, rows
    low, high, _ = window[0]
    inside = (ids >= low) & (ids < high)
    return ids[inside] - low, rows[inside]


def _row_doc(dense: Op, tables: int) -> str:
    """Docstring of a row form, with an example in which row 1 changes and row 0 does not."""
    zeros = ", [[1.0], [1.0]]" * tables
    step = ", 1" if "step" in dense.inputs else ""
    pick = "" if tables == 1 else "[0]"
    return f"""`{dense.name}` on the rows `ids` of a table (n, ...), `rows` being their gradients: ids.shape + (...).

    Duplicate ids are summed first; only touched rows of the table and of its optimizer state change. ValueRangeError
    for ids outside [0, n).

    >>> import hetu as ht
    >>> new = {dense.name}_rows({zeros[2:]}, [1], [[2.0]], 0.1{step}){pick}
    >>> changed = ht.evaluate(new) != 1
    >>> changed.tolist()
    [[False], [True]]
    """


def _with_rows(xp: ModuleType, table: Any, ids: Any, rows: Any) -> Any:
    """A copy of `table` with the rows `ids` (sorted, unique) replaced."""
    if ids.shape[0] == 0:
        return table
    places = xp.arange(table.shape[0], dtype=ids.dtype)
    nearest = xp.searchsorted(ids, places)
    nearest = xp.where(nearest == ids.shape[0], ids.shape[0] - 1, nearest)
    hit = xp.reshape(xp.take(ids, nearest, axis=0) == places, (-1,) + (1,) * (table.ndim - 1))
    return xp.where(hit, xp.take(rows, nearest, axis=0), table)


def _check_ids(tables: int, xp: ModuleType, *arrays: Any, window: Window = None, **_: Any) -> None:
    check_range(xp, arrays[tables], arrays[0].shape[0] if window is None else window[0][2], "row id")


def _rows_bind(
    dense: Op, tables: int, xp: ModuleType, out: Any, *arrays: Any, window: Window = None, **attrs: Any
) -> Any:
    if xp is not np or not arrays[0].size:
        return None
    ids, rows, *scalars = arrays[tables:]
    outs, copies = outputs_in_place(out, arrays[:tables])
    gather = _SumRows(outs[0], ids, rows) if window is None else None

    def update() -> None:
        touched, sums = gather() if gather else _SumRows(outs[0], *own_rows(ids, rows, window))()
        for o, n in zip(outs, dense.forward(np, *(o[touched] for o in outs), sums, *scalars, **attrs)):
            o[touched] = n

    return [*copies, update]


def subtract_rows(
    xp: ModuleType, out: Any, p: Any, ids: Any, rows: Any, lr: Any, *, window: Window = None
) -> list[Instruction] | None:
    """The `bind` of plain gradient descent on rows: no sums of duplicates, each is subtracted where it belongs."""
    if xp is not np or window is not None:
        return None
    _, copies = outputs_in_place(out, (p,))
    minus, negate = negated(lr, p.dtype)
    steps = np.empty(rows.shape, p.dtype)
    return [*copies, *negate, partial(np.multiply, rows, minus, steps), *add_rows(np, out, ids, steps)]


class _SumRows:
    """The distinct ids and the sum of the gradient rows of each, without sorting.

    A table of places (one integer a row of the parameter) takes the position of every id; the last one to write
    wins and stands for all equal ones.
    """

    def __init__(self, table: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
        self.ids, self.order = ids, np.arange(ids.size)
        self.place, self.slots = np.empty(len(table), np.intp), np.empty(ids.shape, np.intp)
        self.sums = np.empty((ids.size, *table.shape[1:]), table.dtype)
        self.add = [partial(self.sums.fill, 0), *add_rows(np, self.sums, self.slots, rows)]

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        ids = self.ids.reshape(-1)
        self.place[ids] = self.order
        touched = ids[self.place[ids] == self.order]
        self.place[touched] = self.order[: len(touched)]
        np.take(self.place, self.ids, out=self.slots, mode="clip")
        for call in self.add:
            call()
        return touched, self.sums[: len(touched)]


def _row_type(tables: int) -> Callable[..., TensorType | tuple[TensorType, ...]]:
    """As `update_type`, with ids of any shape and one row of gradient for each."""

    def infer(*types: TensorType, **_: Any) -> TensorType | tuple[TensorType, ...]:
        p, ids, rows = types[0], types[tables], types[tables + 1]
        check_tables(types[:tables])
        if p.ndim == 0 or ids.dtype.kind not in "iu":
            raise DTypeError(f"got a table {p} and ids {ids}", fix="pass a table with rows and integer ids")
        check_alike(TensorType((*ids.shape, *p.shape[1:]), p.dtype), rows, "the gradient of the rows")
        check_scalars(types[tables + 2 :])
        return p if tables == 1 else types[:tables]

    return infer


def _row_dims(tables: int) -> Callable[..., str]:
    """Sharding rule of a row form: rows and columns of the table may be split, ids not."""

    def dims(*types: TensorType, **_: Any) -> str:
        columns = "".join(chr(ord("a") + i) for i in range(types[0].ndim - 1))
        ids = "".join(f"{chr(ord('A') + i)}!" for i in range(types[tables].ndim))
        scalars = "," * (len(types) - tables - 2)
        left = ",".join([f"n@{columns}"] * tables)
        return f"{left},{ids},{ids}{columns}{scalars}->{left}"

    return dims
