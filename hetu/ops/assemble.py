"""An array made of parts along its first axis, each written where it belongs as soon as it is there.

A chain `start_rows`, `set_rows`, `set_rows`, ... is one array that is filled in place: a part is needed no longer than
it takes to write it, while `concat` needs all of them beside the result. Made by the pass of `hetu.plan.split` only,
after autodiff. Ignored on purpose: other axes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..errors import ShapeError
from ..op import op
from ..types import TensorType

__all__ = ["set_rows", "start_rows"]


def _start_type(part: TensorType, *, rows: int) -> TensorType:
    if not part.ndim or rows < part.shape[0]:
        raise ShapeError(f"{part} is no part of an array of {rows} rows", fix="give at least as many rows")
    return TensorType((rows, *part.shape[1:]), part.dtype)


@op(infer=_start_type, differentiable=False)
def start_rows(xp: ModuleType, part: Any, *, rows: int) -> Any:
    """An array of so many rows, of which the first are `part` and the others zeros, to be set next.

    >>> import hetu as ht
    >>> start_rows(ht.placeholder("part", (2, 3)), rows=5).shape
    (5, 3)
    """
    return xp.concat([part, xp.zeros((rows - part.shape[0], *part.shape[1:]), dtype=part.dtype)], axis=0)


@start_rows.into
def start_rows_into(xp: ModuleType, out: Any, part: Any, *, rows: int) -> None:
    xp.copyto(out[: part.shape[0]], part)
    out[part.shape[0] :].fill(0)


def _set_type(whole: TensorType, part: TensorType, *, first: int) -> TensorType:
    if whole.shape[1:] != part.shape[1:] or whole.dtype != part.dtype or first + part.shape[0] > whole.shape[0]:
        raise ShapeError(f"{part} are no rows of {whole} from row {first}", fix="give rows of the same shape and dtype")
    return whole


@op(infer=_set_type, inplace={0: (0,)}, differentiable=False)
def set_rows(xp: ModuleType, whole: Any, part: Any, *, first: int) -> Any:
    """`whole` with `part` in place of its rows from `first` on.

    >>> import hetu as ht
    >>> ht.evaluate(set_rows(ht.constant([1.0, 2.0, 3.0]), ht.constant([7.0]), first=1)).tolist()
    [1.0, 7.0, 3.0]
    """
    return xp.concat([whole[:first, ...], part, whole[first + part.shape[0] :, ...]], axis=0)


@set_rows.into
def set_rows_into(xp: ModuleType, out: Any, whole: Any, part: Any, *, first: int) -> None:
    if out.ctypes.data != whole.ctypes.data if xp.__name__ == "numpy" else out.data.ptr != whole.data.ptr:
        xp.copyto(out, whole)
    xp.copyto(out[first : first + part.shape[0]], part)
