"""Sequences of different lengths in one batch: for recurrent layers, and for their other direction.

A batch holds them padded to the longest. What is computed beyond an end is zero, and the state of the last step stays.
Left out: gaps within a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ShapeError
from ..core.graph import OPS, Node
from ..core.op import op
from ..core.types import Dim, Shape, TensorType, compatible
from .index import in_range, require_indices


def require_lengths(x: Shape, lengths: Iterable[TensorType]) -> None:
    """ShapeError unless there is one length for each sequence of x (n, time, ...), or none at all."""
    for given in lengths:
        require_indices(given)
        if given.ndim != 1 or not compatible(given.shape[0], x[0]):
            raise ShapeError(f"got lengths {given} of {x[0]} sequences", fix="pass one length for each sequence, (n,)")


def dims_with_lengths(inputs: str, outputs: str) -> Callable[..., str]:
    """`dims` of an operator that takes lengths, or none, after its other inputs."""
    return lambda *types: f"{inputs}{',n' * (len(types) - inputs.count(',') - 1)}->{outputs}"


def length_ranges(steps: int, lengths: Iterable[Any]) -> list[tuple[Any, int, str]]:
    """What `in_range` checks."""
    return [(given, steps + 1, "length") for given in lengths]


def _mask_type(lengths: TensorType, *, shape: Shape) -> TensorType:
    require_lengths(shape, [lengths])
    return TensorType(shape, np.dtype(bool))


@op(infer=_mask_type, dims="n->nt!", differentiable=False)
def sequence_mask(xp: ModuleType, lengths: Any, *, shape: Any) -> Any:
    """(n, time), True at the steps that sequences of `lengths` (n,) have; `shape` is (n, time).

    ValueRangeError for a length that is not from 0 to time.

    >>> import hetu as ht
    >>> ht.evaluate(sequence_mask([2, 0, 3], shape=(3, 3))).tolist()
    [[True, True, False], [False, False, False], [True, True, True]]
    """
    return xp.arange(shape[1]) < xp.expand_dims(lengths, axis=1)


in_range(sequence_mask, lambda lengths, *, shape: length_ranges(shape[1], [lengths]))


def steps_of(x: Node) -> range:
    """The steps of x (n, time, f), where each becomes nodes of its own; ShapeError when their number is open."""
    if isinstance(x.shape[1], Dim) or not x.shape[1]:
        raise ShapeError(
            f"the number of time steps of {x.type} is not known", fix="give the time axis of x a fixed size, 1 or more"
        )
    return range(x.shape[1])


def products_of_steps(x: TensorType, *weights: TensorType) -> int:
    """The operations of each step's products with these matrices."""
    return 2 * math.prod(map(int, x.shape[:2])) * sum(int(w.size) for w in weights)


def kept(where: Any, lengths: Sequence[Any], t: int, new: Any, old: Any) -> Any:
    """`new` (n, k) for the sequences that have a step t, `old` for the others; for arrays and for nodes."""
    for given in lengths:
        new = where((given > t)[:, None], new, old)
    return new


def along_time(xp: ModuleType, steps: Sequence[Sequence[Any]], like: Any, *widths: int) -> tuple[Any, ...]:
    """The arrays (n, k) of all steps as (n, time, k), which are empty without a step."""
    if not steps:
        return tuple(xp.zeros((like.shape[0], 0, width), dtype=like.dtype) for width in widths)
    return tuple(xp.stack(parts, axis=1) for parts in zip(*steps))


def flipped(x: Node, axes: tuple[int, ...], lengths: Node) -> Node:
    """The first `lengths` (n,) places of each x[i] along one axis in reverse order; the others stay."""
    if len(axes) != 1 or axes == (0,) or lengths.ndim != 1:
        raise ShapeError(
            f"flip: got {x.type}, axes {axes} and lengths {lengths.type}",
            fix="name one axis behind the first, and pass one length for each x[i], (n,)",
        )
    (axis,) = axes
    n, size = x.shape[0], x.shape[axis]
    ends, own = OPS["astype"](lengths, dtype="int64"), OPS["arange"](start=0, stop=size, step=1, dtype="int64")
    turned = OPS["expand_dims"](ends, axis=1) - 1 - own
    places = OPS["where"](sequence_mask(lengths, shape=(n, size)), turned, own)
    places = OPS["reshape"](places, shape=(n, *[1] * (axis - 1), size, *[1] * (x.ndim - axis - 1)))
    return OPS["take_along_axis"](x, OPS["broadcast_to"](places, shape=x.shape), axis=axis)
