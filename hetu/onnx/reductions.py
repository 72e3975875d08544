"""Operators of ONNX that shrink axes or go along one: sums, extrema, places, running sums, order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import normalize_axis
from ..ops.slicing import cut_along
from .indexing import end
from .meaning import KnownArray, meaning, meanings


def reduction(
    function: Callable[..., Node], of_booleans: Callable[..., Node] | None = None, sign: int = 0
) -> Callable[..., Node]:
    """Over all axes where none are given, or over none with `noop_with_empty_axes`; of no numbers the `end` of sign."""

    def reduced(x: Node, axes: KnownArray = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Node:
        given = [] if axes is None else np.ravel(axes).tolist()
        if not given and noop_with_empty_axes:
            return x
        what = of_booleans if of_booleans and x.dtype.kind == "b" else function
        among: dict[str, Any] = dict(axis=tuple(given) or None, keepdims=bool(keepdims))
        if sign and what is function and 0 in x.shape:
            return ops.full_like(cast_to(ops.sum(x, **among), x.dtype), end(x.dtype, sign))
        return what(x, **among)

    return reduced


meanings(
    {
        "ReduceSum": reduction(ops.sum),
        "ReduceMean": reduction(ops.mean),
        "ReduceProd": reduction(ops.prod),
        "ReduceMax": reduction(ops.max, ops.any, -1),
        "ReduceMin": reduction(ops.min, ops.all, 1),
        "ReduceLogSumExp": reduction(ops.logsumexp, None, -1),
        "GlobalAveragePool": lambda x: ops.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalMaxPool": lambda x: ops.max(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalLpPool": lambda x, *, p=2: length(x, tuple(range(2, x.ndim)), p),
        "LpNormalization": lambda x, *, axis=-1, p=2: ops.where(
            ops.equal(length(x, axis, p), 0), 0, x / length(x, axis, p)
        ),
    }
)


def length(x: Node, axis: Any, p: int) -> Node:
    if p in (1, 2):
        return ops.norm(x, axis=axis, ord=p, keepdims=True)
    return OPS["power"](ops.sum(OPS["power"](ops.abs(x), float(p)), axis=axis, keepdims=True), 1 / p)


def place(function: Callable[..., Node]) -> Callable[..., Node]:
    """The first place of an extremum, or the last."""

    def found(x: Node, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Node:
        if select_last_index:
            return as_node(x.shape[axis] - 1) - function(ops.flip(x, axis), axis=axis, keepdims=bool(keepdims))
        return function(x, axis=axis, keepdims=bool(keepdims))

    return found


meanings({"ArgMax": place(ops.argmax), "ArgMin": place(ops.argmin)})


@meaning("Hardmax")
def hardmax(x: Node, *, axis: int = -1) -> Node:
    places = ops.reshape(ops.arange(x.shape[axis]), tuple(-1 if i == axis % x.ndim else 1 for i in range(x.ndim)))
    return cast_to(ops.equal(places, ops.argmax(x, axis=axis, keepdims=True)), x.dtype)


@meaning("TopK")
def topk(x: Node, k: KnownArray, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Node, Node]:
    count = int(np.ravel(k)[0])
    places = ops.argsort(x, axis=axis, descending=bool(largest))
    cut = tuple(slice(0, count) if i == axis % x.ndim else slice(None) for i in range(x.ndim))
    return ops.take_along_axis(x, places[cut], axis=axis), places[cut]


def moved(x: Node, axis: int, steps: int, reverse: int, value: float) -> Node:
    """Numbers as many steps further along an axis, where `value` comes in their places."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, steps) if reverse else (steps, 0)
    cut = slice(steps, None) if reverse else slice(0, -steps)
    return cut_along(ops.pad(x, pad_width=tuple(width), value=value), axis, cut)


@meaning("CumSum")
def running_sum(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    axis = normalize_axis(int(np.ravel(axis)[0]), x.ndim)
    return ops.cumsum(moved(x, axis, 1, reverse, 0) if exclusive else x, axis=axis, reverse=bool(reverse))


@meaning("CumProd")
def running_product(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    """By doubling: after each step a place holds the product of twice as many before it."""
    axis, steps = normalize_axis(int(np.ravel(axis)[0]), x.ndim), 1
    y = moved(x, axis, 1, reverse, 1) if exclusive else x
    while steps < int(x.shape[axis]):
        y, steps = y * moved(y, axis, steps, reverse, 1), 2 * steps
    return y
