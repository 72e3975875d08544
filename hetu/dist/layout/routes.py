"""Operators that bring rows to rooms by ids, or read them there, and how their rows and rooms meet between ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.graph import OPS
from ...core.op import Op
from ...ops.routing import moe_combine, moe_dispatch


class Route(NamedTuple):
    """The factors `rows` and `rooms` of an operator's `dims` may be split among the same ranks: then rows travel.

    Input `ids` has the room of each choice of each row, which all ranks know; input `at` has the rooms, or the result
    has, if it is None.
    """

    rows: str
    rooms: str
    ids: int
    at: int | None


ROUTES: dict[Op[..., Any], Route] = {
    moe_dispatch: Route("n", "e", ids=1, at=None),
    moe_combine: Route("n", "e", ids=1, at=0),
    OPS["moe_products"]: Route("n", "e", ids=2, at=1),
}
