"""Matrix products and transposes.

For products of more than two arrays see `einsum.py`. Left out: decompositions and solvers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import AxisError, DTypeError, ShapeError, public
from ..core.graph import Node
from ..core.leaf import filled, filling
from ..core.op import Role, as_nodes, op
from ..core.operators import add, sum_to_like
from ..core.types import (
    TensorType,
    axis_letters,
    broadcast_shapes,
    compatible,
    is_float,
    normalize_axis,
    product,
    promote,
    show_shape,
)
from .elementwise import multiply
from .shape import expand_dims, reshape, squeeze

__all__ = ["linear", "matmul", "matrix_transpose", "outer", "permute_dims"]


# -- transposes ------------------------------------------------------------------------------------------------


def _permute_attrs(x: TensorType, *, axes: Any) -> dict[str, Any]:
    axes = (axes,) if isinstance(axes, int) else axes
    found = tuple(normalize_axis(a, x.ndim) for a in axes)
    if sorted(found) != list(range(x.ndim)):
        raise AxisError(f"axes {axes} are not an order of the {x.ndim} axes", fix="name every axis exactly once")
    return {"axes": found}


def permute_dims_dims(x: TensorType, *, axes: tuple[int, ...]) -> str:
    letters = axis_letters(x.ndim)
    return f"{''.join(letters)}->{''.join(letters[a] for a in axes)}"


@op(
    role=Role.MOVE,
    infer=lambda x, *, axes: TensorType(tuple(x.shape[a] for a in axes), x.dtype),
    dims=permute_dims_dims,
    linear=(0,),
)
def permute_dims(xp: ModuleType, x: Any, *, axes: tuple[int, ...]) -> Any:
    """`x` with its axes in another order: axis i of the result is axis `axes[i]` of `x`.

    >>> import hetu as ht
    >>> permute_dims(ht.placeholder("x", (2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    return xp.permute_dims(x, axes)


permute_dims.normalize(_permute_attrs)
permute_dims.grad(lambda g, y, x, *, axes: permute_dims(g, axes=tuple(sorted(range(len(axes)), key=axes.__getitem__))))
permute_dims.view(lambda xp, x, *, axes: xp.transpose(x, axes))


@permute_dims.simplify
def permute_dims_simplify(node: Node, x: Node) -> Node | None:
    if node.attrs["axes"] == tuple(range(x.ndim)):
        return x
    value = filling(x)
    return None if value is None else filled(node, value)


def _transpose_type(x: TensorType) -> TensorType:
    if x.ndim < 2:
        raise ShapeError(f"got {x.ndim} axes, wanted at least 2", fix="add one with ht.expand_dims")
    return TensorType((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)


@op(role=Role.MOVE, infer=_transpose_type, dims="...mn->...nm", linear=(0,))
def matrix_transpose(xp: ModuleType, x: Any) -> Any:
    """`x` with its last two axes swapped. (..., m, n) -> (..., n, m).

    >>> import hetu as ht
    >>> matrix_transpose(ht.placeholder("x", (2, 3, 4))).shape
    (2, 4, 3)
    """
    return xp.matrix_transpose(x)


matrix_transpose.grad(lambda g, y, x: matrix_transpose(g))
matrix_transpose.view(lambda xp, x: xp.swapaxes(x, -1, -2))


@matrix_transpose.simplify
def matrix_transpose_simplify(node: Node, x: Node) -> Node | None:
    if x.op is matrix_transpose:
        return x.inputs[0]
    return filled(node, 0) if filling(x) == 0 else None


# -- products --------------------------------------------------------------------------------------------------


def product_dtype(*types: TensorType) -> np.dtype:
    """The dtype of a product: all floats or all integers, DTypeError otherwise."""
    kinds = {"f" if is_float(t.dtype) else "i" if t.dtype.kind == "u" else t.dtype.kind for t in types}
    if kinds not in ({"f"}, {"i"}):
        raise DTypeError(
            f"got {' and '.join(t.dtype.name for t in types)}, wanted all floats or all integers",
            fix='convert one with ht.astype(x, "float32")',
        )
    return promote(*(t.dtype for t in types))


def _matmul_type(a: TensorType, b: TensorType) -> TensorType:
    if not a.ndim or not b.ndim:
        raise ShapeError(f"got {a.ndim} and {b.ndim} axes, wanted at least 1 each", fix="multiply a number by *")
    inner = b.shape[-2:][0]
    if not compatible(a.shape[-1], inner):
        raise ShapeError(
            f"inner sizes differ: {a.shape[-1]} against {inner}",
            fix="the last axis of the left must equal the last but one of the right; ht.matrix_transpose swaps them",
        )
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return TensorType((*batch, *a.shape[-2:-1], *b.shape[1:][-1:]), product_dtype(a, b))


def _matmul_dims(a: TensorType, b: TensorType) -> str:
    left, m = ("...mk", "m") if a.ndim > 1 else ("k", "")
    right, n = ("...kn", "n") if b.ndim > 1 else ("k", "")
    return f"{left},{right}->{'...' if m or n else ''}{m}{n}"


@op(precision="low", infer=_matmul_type, dims=_matmul_dims, linear=(0, 1))
def matmul(xp: ModuleType, a: Any, b: Any) -> Any:
    """Matrix product over the last two axes; leading axes broadcast. (..., m, k) @ (..., k, n) -> (..., m, n).

    A vector (k,) is a row on the left and a column on the right; that axis of the result vanishes.

    >>> import hetu as ht
    >>> [ht.evaluate(matmul([[1.0, 2.0]], right)).tolist() for right in ([[3.0], [4.0]], [3.0, 4.0])]
    [[[11.0]], [11.0]]
    """
    return xp.matmul(a, b)


@matmul.simplify
def matmul_simplify(node: Node, a: Node, b: Node) -> Node | None:
    if 0 in (filling(a), filling(b)):
        return filled(node, 0)
    new = _new_axes(a, b)
    return squeeze(matmul(*_matrices(a, b)), new) if new else None


def _matrices(a: Node, b: Node) -> tuple[Node, Node]:
    """Both as matrices: kernels see no vectors."""
    return a if a.ndim > 1 else expand_dims(a, axis=0), b if b.ndim > 1 else expand_dims(b, axis=1)


def _new_axes(a: Node, b: Node) -> tuple[int, ...]:
    """Those which their product has more than that of `a` and `b`."""
    return (-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1)


@matmul.grad
def matmul_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    if new := _new_axes(a, b):
        da, db = matmul_grad(expand_dims(g, axis=new), y, *_matrices(a, b))
        return squeeze(da, -2) if a.ndim == 1 else da, squeeze(db, -1) if b.ndim == 1 else db
    if b.ndim == 2:
        return matmul(g, matrix_transpose(b)), _weight_gradient(a, g)
    return matmul(g, matrix_transpose(b)), matmul(matrix_transpose(a), g)


matmul.into(lambda xp, out, a, b: xp.matmul(a, b, out=out))


def _weight_gradient(x: Node, g: Node) -> Node:
    """x^T g over all rows: one flat product instead of a batch of products and a sum over them."""
    return matmul(matrix_transpose(_rows(x)), _rows(g))


def _rows(x: Node) -> Node:
    return x if x.ndim == 2 else reshape(x, shape=(product(x.shape[:-1]), x.shape[-1]))


def _linear_type(x: TensorType, w: TensorType, b: TensorType) -> TensorType:
    if w.ndim != 2 or b.ndim != 1 or x.ndim < 2:
        raise ShapeError(
            f"got {x}, {w} and {b}, wanted (..., k), (k, n) and (n,)", fix="x needs a batch axis, w two axes, b one"
        )
    if not compatible(x.shape[-1], w.shape[0]) or not compatible(w.shape[1], b.shape[0]):
        raise ShapeError(
            f"sizes differ: x {show_shape(x.shape)}, w {show_shape(w.shape)}, b {show_shape(b.shape)}",
            fix="the last axis of x must equal the first of w, and the size of b the second of w",
        )
    return TensorType((*x.shape[:-1], w.shape[1]), product_dtype(x, w, b))


@op(precision="low", infer=_linear_type, dims="...k!,k!n,n->...n")
def linear(xp: ModuleType, x: Any, w: Any, b: Any) -> Any:
    """x @ w + b in one buffer. (..., k) @ (k, n) + (n,) -> (..., n).

    >>> import hetu as ht
    >>> ht.evaluate(linear([[1.0, 2.0]], [[3.0], [4.0]], [0.5])).tolist()
    [[11.5]]
    """
    return xp.matmul(x, w) + b


linear.grad(lambda g, y, x, w, b: (matmul(g, matrix_transpose(w)), _weight_gradient(x, g), sum_to_like(g, b)))


@linear.into
def linear_into(xp: ModuleType, out: Any, x: Any, w: Any, b: Any) -> None:
    xp.matmul(x, w, out=out)
    xp.add(out, b, out)


linear.decompose(lambda x, w, b: add(matmul(x, w), b))


@public
def outer(a: Any, b: Any) -> Node:
    """All products of the elements of two vectors. (m,), (n,) -> (m, n).

    >>> import hetu as ht
    >>> ht.evaluate(outer([1.0, 2.0], [3.0, 4.0])).tolist()
    [[3.0, 4.0], [6.0, 8.0]]
    """
    a, b = as_nodes([a, b])
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer: got {a.type} and {b.type}, wanted two vectors", fix="flatten them with ht.flatten")
    return multiply(expand_dims(a, axis=1), expand_dims(b, axis=0))
