"""Sequences of different lengths in one batch: for recurrent layers, and for their other direction.

A batch holds them padded to the longest. What is computed beyond an end is zero, and the state of the last step stays.
Left out: gaps within a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ..core.errors import ShapeError
from ..core.graph import OPS, Node
from ..core.types import Dim, TensorType, compatible
from .index import require_indices


def require_lengths(x: TensorType, lengths: Sequence[TensorType]) -> None:
    """ShapeError unless there is one length for each sequence of x (n, time, f), or none at all."""
    for given in lengths:
        require_indices(given)
        if given.ndim != 1 or not compatible(given.shape[0], x.shape[0]):
            raise ShapeError(f"got x {x} and lengths {given}", fix="pass one length for each sequence, (n,)")


def dims_with_lengths(inputs: str, outputs: str) -> Callable[..., str]:
    """`dims` of an operator that takes lengths, or none, after its other inputs."""
    return lambda *types: f"{inputs}{',n' * (len(types) - inputs.count(',') - 1)}->{outputs}"


def length_ranges(steps: int, lengths: Iterable[Any]) -> list[tuple[Any, int, str]]:
    """What `in_range` checks."""
    return [(given, steps + 1, "length") for given in lengths]


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
    ends, own = OPS["expand_dims"](lengths, axis=1), OPS["arange"](start=0, stop=x.shape[axis], step=1, dtype="int64")
    places = OPS["where"](own < ends, ends - 1 - own, own)
    n, size = places.shape
    places = OPS["reshape"](places, shape=(n, *[1] * (axis - 1), size, *[1] * (x.ndim - axis - 1)))
    return OPS["take_along_axis"](x, OPS["broadcast_to"](places, shape=x.shape), axis=axis)
