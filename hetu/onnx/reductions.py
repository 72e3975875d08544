"""Operators of ONNX that shrink axes or go along one: sums, extrema, places, running sums, order."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import normalize_axis
from .meaning import KnownArray, meaning, meanings


def reduction(
    function: Callable[..., Node], of_booleans: Callable[..., Node] | None = None, empty: float | None = None
) -> Callable[..., Node]:
    """Over all axes where none are given, or over none with `noop_with_empty_axes`; of no numbers `empty`."""

    def reduced(x: Node, axes: KnownArray = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Node:
        given = [] if axes is None else np.ravel(axes).tolist()
        if not given and noop_with_empty_axes:
            return x
        what = of_booleans if of_booleans and x.dtype.kind == "b" else function
        if empty is not None and what is function and 0 in x.shape:
            return ops.sum(x, axis=tuple(given) or None, keepdims=bool(keepdims)) + empty
        return what(x, axis=tuple(given) or None, keepdims=bool(keepdims))

    return reduced


meanings(
    {
        "ReduceSum": reduction(ops.sum),
        "ReduceMean": reduction(ops.mean),
        "ReduceProd": reduction(ops.prod),
        "ReduceMax": reduction(ops.max, ops.any, -math.inf),
        "ReduceMin": reduction(ops.min, ops.all, math.inf),
        "ReduceLogSumExp": reduction(ops.logsumexp, None, -math.inf),
        "GlobalAveragePool": lambda x: ops.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalMaxPool": lambda x: ops.max(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalLpPool": lambda x, *, p=2: ops.norm(x, axis=tuple(range(2, x.ndim)), ord=p, keepdims=True),
        "LpNormalization": lambda x, *, axis=-1, p=2: normalized(x, axis, p),
    }
)


def normalized(x: Node, axis: int, p: int) -> Node:
    length = ops.norm(x, axis=axis, ord=p, keepdims=True)
    return ops.where(ops.equal(length, 0), 0, x / length)


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


@meaning("CumSum")
def running_sum(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    made = cast_to(ops.cumsum(x, axis=int(axis), reverse=bool(reverse)), x.dtype)
    return made - x if exclusive else made


@meaning("CumProd")
def running_product(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    """By doubling: after each step a place holds the product of twice as many before it."""
    axis = normalize_axis(int(np.ravel(axis)[0]), x.ndim)
    size = int(x.shape[axis])

    def moved(x: Node, steps: int) -> Node:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, steps) if reverse else (steps, 0)
        cut = [slice(None)] * x.ndim
        cut[axis] = slice(steps, None) if reverse else slice(0, size)
        return ops.pad(x, pad_width=tuple(width), value=1)[tuple(cut)]

    y, steps = moved(x, 1) if exclusive else x, 1
    while steps < size:
        y, steps = y * moved(y, steps), 2 * steps
    return y
