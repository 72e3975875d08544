"""The operators that the core itself writes: marks that passes read, and the arithmetic of gradients.

The marks compute nothing. Autodiff starts from ones, adds gradients up, and undoes broadcasting and conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from .backend import common, dtype_in
from .errors import GraphError, ShapeError
from .graph import Node
from .leaf import filled, filling
from .op import Role, op
from .types import TensorType, as_dtype, axis_letters, broadcast_shapes, is_float, numbers, same_type

__all__ = [
    "astype", "broadcast_like", "if_training", "ones_like", "stop_gradient", "sum_to_like", "with_updates",
    "zeros_like",
]  # fmt: skip

# -- marks -----------------------------------------------------------------------------------------------------


@op(role=Role.MOVE, infer=same_type, dims="...->...")
def stop_gradient(xp: ModuleType, x: Any) -> Any:
    """`x`, with a zero gradient.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", ())
    >>> ht.gradients(x * ht.stop_gradient(x), [x])[0].shape
    ()
    """
    return x


stop_gradient.grad(lambda g, out, x: None)


def _same_types(a: TensorType, b: TensorType) -> TensorType:
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        raise ShapeError(f"the two sides differ: {a} and {b}", fix="give both sides one type")
    return a


@op(role=Role.MOVE, infer=_same_types, dims="...,...->...")
def if_training(xp: ModuleType, training: Any, evaluation: Any) -> Any:
    """The first where a sub-graph trains (it commits updates), the second elsewhere; chosen once, not at run time.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (3,))
    >>> ht.evaluate(ht.if_training(x * 2, x), {x: [1, 2, 3]}).tolist()
    [1.0, 2.0, 3.0]
    """
    return evaluation


@if_training.grad
def if_training_grad(g: Node, *_: Node) -> tuple[Node, Node]:
    return if_training(g, zeros_like(g)), if_training(zeros_like(g), g)


@op(role=Role.MOVE, name="with_updates", infer=same_type)
def with_updates_op(xp: ModuleType, y: Any, *variables_and_values: Any) -> Any:
    return y


with_updates_op.grad(lambda g, out, y, *pairs: (g, *(None for _ in pairs)))


def with_updates(y: Node, updates: Mapping[Node, Node]) -> Node:
    """`y`, carrying new values of variables that are committed wherever `y` is trained (batch-norm statistics).

    >>> import hetu as ht
    >>> x, seen = ht.placeholder("x", (3,)), ht.variable("seen", 0.0, ())
    >>> with_updates(x, {seen: seen + 1}).shape
    (3,)
    """
    for target, value in updates.items():
        if target.role is not Role.VARIABLE or target.type != value.type:
            raise GraphError(f"{value!r} cannot be the new value of {target!r}", fix="update a variable of equal type")
    return with_updates_op(y, *(n for pair in updates.items() for n in pair))


def _barrier_dims(x: TensorType, after: TensorType) -> str:
    """Axes of equal size are one factor, so that a split batch stays split; the others of `after` stay whole."""
    letters = [chr(ord("a") + i) for i in range(x.ndim + after.ndim)]
    shared = [i < x.ndim and size == x.shape[i] for i, size in enumerate(after.shape)]
    behind = "".join(letters[i] if common else f"{letters[x.ndim + i]}!" for i, common in enumerate(shared))
    return f"{''.join(letters[: x.ndim])},{behind}->{''.join(letters[: x.ndim])}"


@op(role=Role.MOVE, infer=same_type, dims=_barrier_dims, awaited=(1,))
def barrier(xp: ModuleType, x: Any, after: Any) -> Any:
    """`x`, but not before `after` exists. Keeps recomputed values from being merged with the first ones.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (3,))
    >>> barrier(x, x).shape
    (3,)
    """
    return x


barrier.grad(lambda g, out, x, after: (g, None))
for _mark in (stop_gradient, with_updates_op, barrier):
    _mark.view(lambda xp, x, *_: x)


# -- arithmetic of gradients ------------------------------------------------------------------------------------


def moved_simplify(node: Node, x: Node, *_: Node) -> Node | None:
    """`simplify` of operators that rename or repeat axes: nothing to do, or a filled array stays filled."""
    if x.type == node.type:
        return x
    value = filling(x)
    return None if value is None else filled(node, value)


@op(infer=numbers, dims="...,...->...", linear="joint", ufunc="add", inplace={0: (0, 1)}, code="y = a + b")
def add(xp: ModuleType, a: Any, b: Any) -> Any:
    """a + b.

    >>> import hetu as ht
    >>> ht.evaluate(add([1.0, 2.0], 1)).tolist()
    [2.0, 3.0]
    """
    return xp.add(*common(xp, a, b))


add.grad(lambda g, y, a, b: (g, g))
add.simplify(lambda node, a, b: a if filling(b) == 0 else b if filling(a) == 0 else None)


def _cast_type(x: TensorType, *, dtype: Any) -> TensorType:
    return TensorType(x.shape, as_dtype(dtype))


@op(role=Role.MOVE, infer=_cast_type, dims="...->...", linear=(0,), code="y = x")
def astype(xp: ModuleType, x: Any, *, dtype: Any) -> Any:
    """`x` converted to another dtype; floats are cut off toward 0 when they become integers.

    >>> import hetu as ht
    >>> ht.evaluate(astype([1.7, -1.7], "int32")).tolist()
    [1, -1]
    """
    return xp.astype(xp.asarray(x), dtype_in(xp, dtype))


astype.grad(lambda g, y, x, *, dtype: g)
astype.view(lambda xp, x, *, dtype: x if x.dtype == dtype else None)


@astype.simplify
def astype_simplify(node: Node, x: Node) -> Node | None:
    """Of two conversions the second, where the first loses nothing."""
    first = x.inputs[0] if x.op is astype else None
    if first is not None and is_float(first.dtype) and np.can_cast(first.dtype, x.dtype):
        return cast_to(first, node.dtype)
    return moved_simplify(node, x)


astype.into(lambda xp, out, x, *, dtype: xp.copyto(out, x, casting="unsafe"))


def cast_to(x: Node, dtype: np.dtype) -> Node:
    """`x` in the given dtype; itself when it has it already."""
    return x if x.dtype == dtype else astype(x, dtype=dtype.name)


def _like_type(x: TensorType, like: TensorType) -> TensorType:
    broadcast_shapes(x.shape, like.shape)  # which refuses others
    return TensorType(like.shape, x.dtype)


def like_dims(x: TensorType, like: TensorType) -> str:
    """Sharding rule of both directions: axes that only `x` has are summed, those that only `like` has are new."""
    letters = axis_letters(max(x.ndim, like.ndim))
    here, there = (
        "".join("1" if s == 1 else c for c, s in zip(letters[len(letters) - t.ndim :], t.shape)) for t in (x, like)
    )
    return f"{here},{there}->{there}"


@op(role=Role.MOVE, infer=_like_type, dims=like_dims, like=(1,), linear=(0,))
def broadcast_like(xp: ModuleType, x: Any, like: Any) -> Any:
    """`x` repeated to the shape of `like`; the gradient of a sum.

    >>> import hetu as ht
    >>> ht.evaluate(broadcast_like(1.0, [0.0, 0.0])).tolist()
    [1.0, 1.0]
    """
    return xp.broadcast_to(x, like.shape)


broadcast_like.simplify(moved_simplify)
broadcast_like.view(broadcast_like.forward)


@op(precision="wide", infer=lambda x, like: _like_type(numbers(x), like), dims=like_dims, like=(1,), linear=(0,))
def sum_to_like(xp: ModuleType, x: Any, like: Any) -> Any:
    """`x` summed over the axes along which `like` was broadcast; the gradient of broadcasting.

    >>> import hetu as ht
    >>> ht.evaluate(sum_to_like([[1.0, 2.0], [3.0, 4.0]], [0.0, 0.0])).tolist()
    [4.0, 6.0]
    """
    return xp.reshape(xp.sum(x, axis=broadcast_axes(x.shape, like.shape), dtype=x.dtype), like.shape)


def broadcast_axes(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which an array of the shape `target` was broadcast to `shape`."""
    extra = len(shape) - len(target)
    return tuple(i for i, s in enumerate(shape) if i < extra or (target[i - extra] == 1 and s != 1))


broadcast_like.grad(lambda g, y, x, like: (sum_to_like(g, x), None))
sum_to_like.grad(lambda g, y, x, like: (broadcast_like(g, x), None))


sum_to_like.simplify(lambda node, x, like: moved_simplify(node, x) if x.type == node.type or filling(x) == 0 else None)
sum_to_like.view(lambda xp, x, like: x if x.shape == like.shape else None)


@op(role=Role.MOVE, infer=same_type, dims="...->...", like=(0,), differentiable=False)
def zeros_like(xp: ModuleType, x: Any) -> Any:
    """Zeros of the shape and dtype of `x`.

    >>> import hetu as ht
    >>> ht.evaluate(zeros_like([1.0, 2.0])).tolist()
    [0.0, 0.0]
    """
    return xp.zeros_like(x)


zeros_like.simplify(lambda node, x: filled(node, 0))
zeros_like.into(lambda xp, out, x: out.fill(0))


@op(role=Role.MOVE, infer=same_type, dims="...->...", like=(0,), differentiable=False)
def ones_like(xp: ModuleType, x: Any) -> Any:
    """Ones of the shape and dtype of `x`.

    >>> import hetu as ht
    >>> ht.evaluate(ones_like([3.0, 2.0])).tolist()
    [1.0, 1.0]
    """
    return xp.ones_like(x)


ones_like.simplify(lambda node, x: filled(node, 1))
ones_like.into(lambda xp, out, x: out.fill(1))
