"""An array made of parts along one axis, each written to its place as soon as it is computed.

A chain `pad`, `set_rows`, `set_rows`, ... is one array that is filled in place: a part is needed no longer than it
takes to write it, while `concat` needs all of them beside the result. Only the pass of `hetu.plan.memory.split` makes
it, after autodiff.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...core.backend import address
from ...core.errors import ShapeError
from ...core.op import Role, op
from ...core.types import TensorType


def _at(axis: int, first: int, stop: int | None = None) -> tuple[Any, ...]:
    """The key of a range along one axis."""
    return (*(slice(None),) * axis, slice(first, stop), ...)


def _set_type(whole: TensorType, part: TensorType, *, first: int, axis: int = 0) -> TensorType:
    others = [t.shape[:axis] + t.shape[axis + 1 :] for t in (whole, part)]
    if others[0] != others[1] or whole.dtype != part.dtype or first + part.shape[axis] > whole.shape[axis]:
        raise ShapeError(f"{part} are no rows of {whole} from row {first}", fix="give rows of the same shape and dtype")
    return whole


@op(role=Role.MOVE, infer=_set_type, inplace={0: (0,)}, differentiable=False)
def set_rows(xp: ModuleType, whole: Any, part: Any, *, first: int, axis: int = 0) -> Any:
    """`whole` with `part` in place of its rows along `axis` from `first` on.

    >>> import hetu as ht
    >>> ht.evaluate(set_rows(ht.constant([1.0, 2.0, 3.0]), ht.constant([7.0]), first=1)).tolist()
    [1.0, 7.0, 3.0]
    """
    last = first + part.shape[axis]
    return xp.concat([whole[_at(axis, 0, first)], part, whole[_at(axis, last)]], axis=axis)


@set_rows.into
def set_rows_into(xp: ModuleType, out: Any, whole: Any, part: Any, *, first: int, axis: int) -> None:
    if address(out) != address(whole):
        xp.copyto(out, whole)
    xp.copyto(out[_at(axis, first, first + part.shape[axis])], part)
