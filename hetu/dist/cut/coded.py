"""Sums of gradients that travel in fewer bytes than they have, as `Kept.wire` asks for single variables.

Floats of 16 bits are summed as those of 32 are. Other codes have no sum, so each rank sends its own to all that sum
with it, and adds up what they mean; what its code loses it adds to its next gradient of the variable, whatever the
batch's size, so losses go with the array of its values, which all programs share, until other values are loaded. So of
n numbers each of k ranks sends 4 n (k - 1) / k bytes in 16 bits, and k - 1 times those of its code (`hetu.codec`).
Checkpoints hold what a rank has lost in its part; it is for as many ranks, so others begin without.
Left out: joining codes with others, sending them beside the computation, and GPUs.
"""

from __future__ import annotations

import math
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ...checkpoint import Checkpoint
from ...codec import Codec, Feedback, codec
from ...core.errors import ArgumentError, CheckpointError, GraphError, HetuError
from ...core.graph import OPS, Node
from ...core.kernels import Call
from ...core.memory import types_of
from ...core.types import Shape, TensorType
from ..comm.comm import Comm
from ..layout.deduce import Grid
from ..layout.layout import DUP, SUM, Layout
from ..layout.redistribute import plan
from ..ops import communicates, whole_reduction

Sum = tuple[str, tuple[int, ...], Shape]  # a code, the ranks of a group, and the shape of what each of them gives
LOST = dict[int, dict[Sum, Feedback]]()  # by the array of a variable's values: the sums that its gradient has a part in
UNREAD = weakref.WeakSet[Feedback]()  # what a checkpoint had, as long as no step has used it
Saved = tuple[str, int, Sum, np.ndarray]  # see `saved_losses`
LOST_OF = re.compile(r"(.+):lost (\d+) (\S+) ([\d,]+)")  # in checkpoints: a variable, how many ranks, a code, a group


def _types(x: TensorType, *kept: TensorType, code: str, **_: Any) -> tuple[TensorType, TensorType]:
    """What a rank sends, and the sum."""
    return TensorType((_known(code).width(int(x.size)),), np.dtype("uint8")), x


def _known(code: str) -> Codec:
    found = codec(code)
    assert found is not None
    return found


@communicates("sum_coded", _types, "all_gather")
def sum_coded(
    xp: ModuleType, out: Any, x: Any, *kept: Any, group: tuple[int, ...], code: str, order: int, comm: Comm
) -> list[Call]:
    """What this rank sends of an array, and the sum of what all ranks of `group` send; `kept` are the values, if this
    rank has some, of the variable that it is a gradient of."""
    if xp is not np:
        raise ArgumentError(f"wire={code!r} on a GPU", fix='use wire="float16" or "bfloat16" there')
    (mine, total), members, form = out, comm.split(group), _known(code)
    feedback, codes = _feedback(kept, code, group, x.shape), np.empty((len(group), mine.size), np.uint8)

    def run() -> None:
        UNREAD.discard(feedback)
        mine[...] = feedback.encode(x.reshape(1, -1))[0]
        members.all_gather(mine, codes)
        total[...] = form.decode(codes, x.size).sum(axis=0).reshape(x.shape)

    return [run]


def _feedback(kept: Iterable[np.ndarray], *part: Any) -> Feedback:
    """What has been lost of this part of the gradients of a variable, which has these values."""
    made = Feedback(_known(part[0]))
    for values in kept:
        if id(values) not in LOST:
            weakref.finalize(values, LOST.pop, id(values))
        made = LOST.setdefault(id(values), {}).setdefault(part, made)
    return made


def losses(values: Mapping[str, np.ndarray], ranks: int) -> dict[str, np.ndarray]:
    """What gradients of variables with these values have lost on this one of so many ranks, as checkpoints name it.

    RuntimeWarning if a checkpoint had it of other sums than those that steps have used since, and they are dropped.
    """
    old = []
    for name, array in values.items():
        parts = LOST.get(id(array), {})
        unread = [part for part, feedback in parts.items() if feedback in UNREAD]
        if len(unread) < len(parts):  # else nobody has trained yet, who may use them
            old += [name for part in unread if parts.pop(part)]
    if old:
        said = f"what codes lost of gradients such as that of {old[0]!r} under another strategy is dropped"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return {
        f"{name}:lost {ranks} {code} {','.join(map(str, group))}": feedback.lost.reshape(shape)
        for name, array in values.items()
        for (code, group, shape), feedback in LOST.get(id(array), {}).items()
        if feedback.lost.size == math.prod(map(int, shape))  # else it has sent nothing yet
    }


def saved_losses(saved: Checkpoint, rank: int) -> list[Saved]:
    """What this rank finds of `losses` in a checkpoint: the variable, how many ranks, the sum, and the array."""
    found = list[Saved]()
    for name, array in saved.beside(rank, LOST_OF).items():
        variable, ranks, code, group = LOST_OF.fullmatch(name).groups()  # type: ignore[union-attr]
        try:
            _known(code)
        except HetuError as error:
            raise CheckpointError(f"{name} in {str(saved.path)!r}: {error}", fix="use an earlier checkpoint") from None
        part = code, tuple(map(int, group.split(","))), array.shape
        found.append((variable, int(ranks), part, array.astype(np.float32)))
    return found


def recall(values: Mapping[str, np.ndarray], lost: Iterable[Saved], ranks: int) -> None:
    """Go on with what a checkpoint has of `losses`, and else without any; RuntimeWarning if it was of other ranks."""
    for feedback in (each for array in values.values() for each in LOST.get(id(array), {}).values()):
        feedback.forget()
    mine = [each for each in lost if each[0] in values]
    for variable, count, part, array in mine:
        if count == ranks:
            feedback = _feedback([values[variable]], *part)
            feedback.lost = array.reshape(1, -1)
            UNREAD.add(feedback)
    if others := {count for _, count, _, _ in mine} - {ranks}:
        said = f"what codes of gradients lost on {max(others)} ranks is dropped on {ranks}: gradients begin without it"
        warnings.warn(said, RuntimeWarning, stacklevel=2)


def beside_plan(order: Sequence[Node]) -> int:
    """Bytes that these instructions have beside a plan, at most: what was lost and what others sent, which stay, and
    numbers while they are coded or read."""
    stays, runs = 0, 0
    for node in (n for n in order if n.op is sum_coded):
        x, ranks = node.inputs[0].tensor, len(node.attrs["group"])
        n, code = int(x.size), int(types_of(node)[0].nbytes)
        stays += int(x.nbytes) + ranks * code
        runs = max(runs, (3 * x.dtype.itemsize + 5) * n + 3 * code, (5 * ranks + 4) * n + 2 * ranks * code)
    return stays + runs


def coded(local: Node | None, have: Layout, shape: Shape, rank: int, kept: Node | None, wire: str, order: int) -> Any:
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
    both = sum_coded.make(
        (local,) if kept is None else (local, kept), {"group": mine.group, "code": wire, "order": order}
    )
    return OPS["item"].make((both,), {"index": 1}), whole
