"""Operators of ONNX that shrink axes or go along one: sums, extrema, places, running sums, order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import ops
from ..core.errors import DataError
from ..core.graph import Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import normalize_axis
from ..ops.slicing import cut_along
from .indexing import end
from .meaning import KnownArray, meaning, meanings
from .shapes import places, whole


def reduction(
    function: Callable[..., Node], of_booleans: Callable[..., Node] | None = None, sign: int = 0
) -> Callable[..., Node]:
    """Over all axes where none are given, or over none with `noop_with_empty_axes`; of no numbers the `end` of sign."""

    def reduced(x: Node, axes: KnownArray = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Node:
        what = of_booleans if of_booleans and x.dtype.kind == "b" else function
        given = tuple(whole(axes))
        among: dict[str, Any] = dict(axis=given if given or noop_with_empty_axes else None, keepdims=bool(keepdims))
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
        "ReduceL1": reduction(partial(ops.norm, ord=1)),
        "ReduceL2": reduction(ops.norm),
        "ReduceLogSumExp": reduction(ops.logsumexp, None, -1),
        "GlobalAveragePool": lambda x: ops.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalMaxPool": lambda x: ops.max(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalLpPool": lambda x, *, p=2: ops.norm(x, tuple(range(2, x.ndim)), p, keepdims=True),
        "LpNormalization": lambda x, *, axis=-1, p=2: x / not_0(ops.norm(x, axis, p, keepdims=True)),
    }
)


def not_0(x: Node) -> Node:
    return ops.where(ops.equal(x, 0), 1, x)


def place(
    extremum: Callable[..., Node], x: Node, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
) -> Node:
    """The first place of an extremum, or the last."""
    found = partial(extremum, axis=axis, keepdims=bool(keepdims))
    return as_node(x.shape[axis] - 1) - found(ops.flip(x, axis)) if select_last_index else found(x)


meanings({"ArgMax": partial(place, ops.argmax), "ArgMin": partial(place, ops.argmin)})


@meaning("Hardmax")
def hardmax(x: Node, *, axis: int = -1) -> Node:
    there = places(x.shape[axis], x.ndim, axis % x.ndim)
    return cast_to(ops.equal(there, ops.argmax(x, axis=axis, keepdims=True)), x.dtype)


@meaning("TopK")
def topk(x: Node, k: KnownArray, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Node, Node]:
    count, size = whole(k)[0], x.shape[axis]
    if isinstance(size, int) and not 0 <= count <= size:
        raise DataError(f"takes {count} of {size}", fix="write the model again: onnx.checker.check_model")
    order = ops.argsort(x, axis=axis, descending=bool(largest))
    first = cut_along(order, axis % x.ndim, slice(0, count))
    return ops.take_along_axis(x, first, axis=axis), first


def moved(x: Node, axis: int, steps: int, reverse: int, value: float) -> Node:
    """Numbers as many steps further along an axis, where `value` comes in their places."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, steps) if reverse else (steps, 0)
    cut = slice(steps, None) if reverse else slice(0, -steps)
    return cut_along(ops.pad(x, pad_width=tuple(width), value=value), axis, cut)


@meaning("CumSum")
def running_sum(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    axis = normalize_axis(whole(axis)[0], x.ndim)
    return ops.cumsum(moved(x, axis, 1, reverse, 0) if exclusive else x, axis=axis, reverse=bool(reverse))


@meaning("CumProd")
def running_product(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    """By doubling: after each step a place holds the product of twice as many before it."""
    axis, steps = normalize_axis(whole(axis)[0], x.ndim), 1
    y = moved(x, axis, 1, reverse, 1) if exclusive else x
    while steps < int(x.shape[axis]):
        y, steps = y * moved(y, axis, steps, reverse, 1), 2 * steps
    return y
