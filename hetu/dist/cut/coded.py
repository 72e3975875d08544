"""Sums of gradients that travel in fewer bytes than they have, as `Kept.wire` asks for single variables.

Floats of 16 bits are summed as those of 32 are. Other codes have no sum, so each rank sends its own to all that sum
with it, and adds up what they mean; what its code loses it adds to its next gradient. So of n numbers each of k ranks
sends 4 n (k - 1) / k bytes in 16 bits, and k - 1 times those of its code (`hetu.codec`).
Left out: joining codes with others, sending them beside the computation, and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ...codec import Codec, Feedback, codec
from ...core.errors import ArgumentError, GraphError
from ...core.graph import OPS, Node
from ...core.op import Role, op
from ...core.types import Shape, TensorType
from ..comm.comm import Comm
from ..layout.deduce import Grid
from ..layout.layout import DUP, SUM, Layout
from ..layout.redistribute import plan
from ..ops import whole_reduction


def _types(x: TensorType, *, code: str, **_: Any) -> tuple[TensorType, TensorType]:
    """What a rank sends, and the sum."""
    return TensorType((_known(code).width(int(x.size)),), np.dtype("uint8")), x


def _known(code: str) -> Codec:
    found = codec(code)
    assert found is not None
    return found


@op(role=Role.COMMUNICATION, collective="all_gather", infer=_types, differentiable=False)
def sum_coded(xp: ModuleType, x: Any, *, group: tuple[int, ...], code: str, order: int, comm: Comm) -> Any:
    """What this rank sends of an array, and the sum of what all ranks of `group` send."""
    given = TensorType(x.shape, x.dtype)
    out = tuple(xp.empty(t.shape, t.dtype) for t in _types(given, code=code))
    for call in bind(xp, out, x, group=group, code=code, order=order, comm=comm):
        call()
    return out


@sum_coded.bind
def bind(
    xp: ModuleType, out: Any, x: Any, *, group: tuple[int, ...], code: str, order: int, comm: Comm
) -> list[Callable[[], Any]]:
    if xp is not np:
        raise ArgumentError(f"wire={code!r} on a GPU", fix='use wire="float16" or "bfloat16" there')
    (mine, total), members, form = out, comm.split(group), _known(code)
    feedback, codes = Feedback(form), np.empty((len(group), mine.size), np.uint8)

    def run() -> None:
        mine[...] = feedback.encode(x.reshape(1, -1))[0]
        members.all_gather(mine, codes)
        total[...] = form.decode(codes, x.size).sum(axis=0).reshape(x.shape)

    return [run]


def coded(local: Node | None, have: Layout, shape: Shape, rank: int, wire: str, order: int) -> Any:
    """This rank's part of a gradient, and its layout, after the sum of what `wire` makes of all parts of it."""
    roles = {axis: DUP if role == SUM else role for axis, (role, _) in have.axes().items()}
    whole = Grid.of(have).layout(roles)
    way = plan(have, whole, shape)
    mine = None if local is None else whole_reduction(way, rank)
    if way.kind != "all_reduce" or (local is not None and mine is None):
        said = f"a gradient of {shape} is to travel as {wire}, but ranks that sum it have unequal parts"
        raise GraphError(said, fix='use wire="float16" or "bfloat16" there')
    if local is None or mine is None:
        return None, whole
    both = sum_coded.make((local,), {"group": mine.group, "code": wire, "order": order})
    return OPS["item"].make((both,), {"index": 1}), whole
